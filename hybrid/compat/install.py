"""`hybrid.install()` patches DeepSpeed's module: `deepspeed.initialize` builds a HybridEngine if the configuration
enables `hybrid_engine`, and `deepspeed.init_inference` builds an InferenceEngine.

accelerate, the transformers Trainer and TRL look these functions up in DeepSpeed's module at call time, so they build
our engines too.
"""

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

from hybrid.config import read_block
from hybrid.inference.engine import init_inference
from hybrid.initialize import initialize

PARAMETERS = tuple(inspect.signature(initialize).parameters)  # of `deepspeed.initialize`, in order


@dataclass
class Place:
    """The state of our patch of one of DeepSpeed's functions; one per process and function.

    name: of the function.  lasting: whether `install()` is in effect.  blocks: number of open `installed()` blocks.
    standing: our patch if it is installed, else None. It may be wrapped by another library's patch; then it stays
        after `uninstall()` and calls DeepSpeed's function.
    """

    name: str = "initialize"
    lasting: bool = False
    blocks: int = 0
    standing: "StandIn | None" = None

    @property
    def wanted(self) -> bool:
        """Whether the function must build our engine: after `install()` or in an `installed()` block."""
        return self.lasting or self.blocks > 0

    def stand_in(self, kind: "type[StandIn]") -> None:
        """Install our patch, unless it is there already, alone or wrapped by another patch."""
        if self.standing is None:
            self.standing = kind(getattr(deepspeed, self.name))
        if getattr(deepspeed, self.name) is self.standing.own:
            setattr(deepspeed, self.name, self.standing)

    def step_aside(self) -> None:
        """Restore the original function if our engine is no longer wanted.

        Warns and keeps our patch if another library's patch wraps it.
        """
        there = getattr(deepspeed, self.name)
        if self.wanted or self.standing is None or there is self.standing.own:
            return
        if there is self.standing:
            setattr(deepspeed, self.name, self.standing.own)
            self.standing = None
        else:
            warnings.warn(
                f"uninstall: deepspeed.{self.name} is {there!r}, which somebody put there after install(). It stays; "
                "where it calls what was there before, that builds DeepSpeed's own engines from here on",
                stacklevel=3,
            )


PLACE, INFERENCE_PLACE, LOCK = Place(), Place("init_inference"), threading.RLock()


class StandIn:
    """Our patch of one of DeepSpeed's functions.

    own: the original function. The patch calls it for every engine that is not ours, and always after `uninstall()`.
    """

    def __init__(self, own: Callable):
        functools.update_wrapper(self, own)
        self.own = own


class InitInference(StandIn):
    """Our patch of `deepspeed.init_inference`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return init_inference(*args, **kwargs) if INFERENCE_PLACE.wanted else self.own(*args, **kwargs)


class Initialize(StandIn):
    """Our patch of `deepspeed.initialize`."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple:
        given = {**dict(zip(PARAMETERS, args, strict=False)), **kwargs}
        if not PLACE.wanted or not asks_for_us(given):
            return self.own(*args, **kwargs)
        if isinstance(given.get("config"), str):
            given["config"] = load_ds_config(given["config"])  # a path, or base64, which DeepSpeed accepts too
        return initialize(**given)


def asks_for_us(given: dict[str, Any]) -> bool:
    """Whether the arguments of `deepspeed.initialize` enable `hybrid_engine`; False without the block or its `enabled`.

    Raises ValueError if the block has an unknown key or an invalid value.
    """
    places = (given.get("config"), given.get("config_params"), getattr(given.get("args"), "deepspeed_config", None))
    config = next((one for one in places if one is not None), None)
    if config is None or given.get("model") is None:
        return False  # DeepSpeed raises its own error
    settings = config if isinstance(config, dict) else load_ds_config(config)
    block = settings.get("hybrid_engine")
    if not block or (isinstance(block, dict) and "enabled" not in block):
        return False
    return read_block(settings, "hybrid_engine").enabled


def install(inference: bool = True) -> None:
    """From now on `deepspeed.initialize` with `"hybrid_engine": {"enabled": true}` builds a HybridEngine, also when
    accelerate, the transformers Trainer or TRL call it. With other configurations it builds DeepSpeed's engines.

    inference: whether `deepspeed.init_inference` builds an `InferenceEngine`; False leaves it to DeepSpeed.
    A second call has no further effect. Existing engines do not change. A function imported by name before this call
    (`from deepspeed import initialize`) is not patched.
    """
    with LOCK:
        PLACE.lasting, INFERENCE_PLACE.lasting = True, inference
        PLACE.stand_in(Initialize)
        if inference:
            INFERENCE_PLACE.stand_in(InitInference)
        else:
            INFERENCE_PLACE.step_aside()


def uninstall() -> None:
    """Undo `install()`: restore `deepspeed.initialize` and `deepspeed.init_inference`. Inside `installed()`, they are
    restored when the outermost block ends.

    If another library's patch wraps ours, both stay, with a warning; the call then reaches DeepSpeed's own function.
    """
    with LOCK:
        for place in (PLACE, INFERENCE_PLACE):
            place.lasting = False
            place.step_aside()


@contextmanager
def installed(inference: bool = True) -> Iterator[None]:
    """`install()` for the length of a block. Blocks may nest and overlap in several threads; the last to end undoes it.

    inference: as in `install()`.
    """
    places = [(PLACE, Initialize), (INFERENCE_PLACE, InitInference)][: 2 if inference else 1]
    with LOCK:
        for place, kind in places:
            place.blocks += 1
            place.stand_in(kind)
    try:
        yield
    finally:
        with LOCK:
            for place, _ in places:
                place.blocks -= 1
                place.step_aside()
