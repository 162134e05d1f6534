"""`hybrid.install()`: `deepspeed.initialize` builds our engine where a configuration enables `hybrid_engine`, and
`deepspeed.init_inference` builds ours.

accelerate, the transformers Trainer and TRL look the name up in DeepSpeed's module as they call it, and so build ours.
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

PARAMETERS = tuple(inspect.signature(initialize).parameters)  # of `deepspeed.initialize`, in its order


@dataclass
class Place:
    """The place of one of DeepSpeed's functions, of which a process has one.

    name: of the function.  lasting: whether `install()` was called.  blocks: of `installed()`, open now.
    standing: what stands there for us, perhaps under a patch of somebody else's; kept when nobody wants it any more.
    """

    name: str = "initialize"
    lasting: bool = False
    blocks: int = 0
    standing: "StandIn | None" = None

    @property
    def wanted(self) -> bool:
        """Whether anybody wants our engine."""
        return self.lasting or self.blocks > 0

    def stand_in(self, kind: "type[StandIn]") -> None:
        """Put ours there, unless it is, or is under somebody's patch."""
        if self.standing is None:
            self.standing = kind(getattr(deepspeed, self.name))
        if getattr(deepspeed, self.name) is self.standing.own:
            setattr(deepspeed, self.name, self.standing)

    def step_aside(self) -> None:
        """Put back what was there, where nobody wants ours any more."""
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
    """What stands in the place of one of DeepSpeed's functions.

    own: what stood there, which builds what is not ours. Everything is, for it, as long as nobody wants our engine.
    """

    def __init__(self, own: Callable):
        functools.update_wrapper(self, own)
        self.own = own


class InitInference(StandIn):
    """In the place of `deepspeed.init_inference`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return init_inference(*args, **kwargs) if INFERENCE_PLACE.wanted else self.own(*args, **kwargs)


class Initialize(StandIn):
    """In the place of `deepspeed.initialize`."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple:
        given = {**dict(zip(PARAMETERS, args, strict=False)), **kwargs}
        if not PLACE.wanted or not asks_for_us(given):
            return self.own(*args, **kwargs)
        if isinstance(given.get("config"), str):
            given["config"] = load_ds_config(given["config"])  # base64 too, which DeepSpeed takes
        return initialize(**given)


def asks_for_us(given: dict[str, Any]) -> bool:
    """Whether what `deepspeed.initialize` was given enables `hybrid_engine`. A block that is not there does not.

    Raises ValueError, in words, for a block that is there and cannot be read.
    """
    places = (given.get("config"), given.get("config_params"), getattr(given.get("args"), "deepspeed_config", None))
    config = next((one for one in places if one is not None), None)
    if config is None or given.get("model") is None:
        return False  # DeepSpeed has words for that
    settings = config if isinstance(config, dict) else load_ds_config(config)
    block = settings.get("hybrid_engine")
    if not block or (isinstance(block, dict) and "enabled" not in block):
        return False
    return read_block(settings, "hybrid_engine").enabled


def install(inference: bool = True) -> None:
    """From here on `deepspeed.initialize` with `"hybrid_engine": {"enabled": true}` builds a HybridEngine, whoever
    calls it: accelerate, the transformers Trainer, TRL, your script. Everything else it builds as before.

    inference: whether `deepspeed.init_inference` builds an `InferenceEngine`; False leaves it to DeepSpeed.
    Calling it twice is calling it once. Engines that are there stay what they are. A name that was taken out of the
    module before (`from deepspeed import initialize`) is not this one.
    """
    with LOCK:
        PLACE.lasting, INFERENCE_PLACE.lasting = True, inference
        PLACE.stand_in(Initialize)
        if inference:
            INFERENCE_PLACE.stand_in(InitInference)
        else:
            INFERENCE_PLACE.step_aside()


def uninstall() -> None:
    """`deepspeed.initialize` and `deepspeed.init_inference` are what they were before `install()`; within
    `installed()`, once the outermost block ends.

    Somebody else's patch on top of ours stays, with a warning, and reaches DeepSpeed's own function through it.
    """
    with LOCK:
        for place in (PLACE, INFERENCE_PLACE):
            place.lasting = False
            place.step_aside()


@contextmanager
def installed(inference: bool = True) -> Iterator[None]:
    """`install()` for a block. Blocks nest, and may be open in several threads; the last one that ends undoes it."""
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
