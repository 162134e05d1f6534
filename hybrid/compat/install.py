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

from hybrid.config import HybridEngineConfig, read_block
from hybrid.inference.engine import init_inference
from hybrid.initialize import initialize

PARAMETERS = tuple(inspect.signature(initialize).parameters)  # of `deepspeed.initialize`, in order


@dataclass
class Patch:
    """Our patch of one of DeepSpeed's functions; one per process and function.

    name: of the function.  build: called in its place, with the original function before the call's own arguments.
    lasting: whether `install()` is in effect.  blocks: number of open `installed()` blocks.
    function: ours if it is installed, else None. It may be wrapped by another library's patch; then it stays after
        `uninstall()` and calls DeepSpeed's function.
    """

    name: str
    build: Callable[..., Any]
    lasting: bool = False
    blocks: int = 0
    function: Any = None  # ours, around the original one; None until it is installed

    @property
    def is_active(self) -> bool:
        """Whether the function must build our engine: after `install()` or in an `installed()` block."""
        return self.lasting or self.blocks > 0

    def apply(self) -> None:
        """Install our function, unless it is there already, alone or wrapped by another patch."""
        original = getattr(deepspeed, self.name)
        if self.function is None:

            @functools.wraps(original)
            def function(*args: Any, **kwargs: Any) -> Any:
                return self.build(original, *args, **kwargs) if self.is_active else original(*args, **kwargs)

            self.function = function
        if original is self.function.__wrapped__:
            setattr(deepspeed, self.name, self.function)

    def revert(self) -> None:
        """Restore the original function unless it is active.

        Warns and keeps our function if another library's patch wraps it.
        """
        current = getattr(deepspeed, self.name)
        if self.is_active or self.function is None or current is self.function.__wrapped__:
            return
        if current is self.function:
            setattr(deepspeed, self.name, self.function.__wrapped__)
            self.function = None
        else:
            warnings.warn(
                f"uninstall: deepspeed.{self.name} is {current!r}, which another library installed after install(). It "
                "stays; where it calls the function that it wraps, DeepSpeed's own engines are built from here on",
                stacklevel=3,
            )


def build_engine(original: Callable, *args: Any, **kwargs: Any) -> tuple:
    """`deepspeed.initialize` that builds a HybridEngine if the configuration enables `hybrid_engine`.

    Raises ValueError if the block has an unknown key or an invalid value.
    """
    arguments = {**dict(zip(PARAMETERS, args, strict=False)), **kwargs}
    from_args = getattr(arguments.get("args"), "deepspeed_config", None)
    configs = (arguments.get("config"), arguments.get("config_params"), from_args)
    config = next((config for config in configs if config is not None), None)
    if config is None or arguments.get("model") is None:
        return original(*args, **kwargs)  # DeepSpeed raises its own error
    settings = config if isinstance(config, dict) else load_ds_config(config)
    block = settings.get("hybrid_engine")
    if not block or (isinstance(block, dict) and "enabled" not in block):
        return original(*args, **kwargs)
    if not read_block(HybridEngineConfig, block, "hybrid_engine").enabled:
        return original(*args, **kwargs)
    if isinstance(arguments.get("config"), str):
        arguments["config"] = settings  # read from a path, or from base64, which DeepSpeed accepts too
    return initialize(**arguments)


def build_inference_engine(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """`deepspeed.init_inference` that builds an InferenceEngine."""
    return init_inference(*args, **kwargs)


TRAINING, INFERENCE = Patch("initialize", build_engine), Patch("init_inference", build_inference_engine)
LOCK = threading.RLock()


def install(inference: bool = True) -> None:
    """From now on `deepspeed.initialize` with `"hybrid_engine": {"enabled": true}` builds a HybridEngine, also when
    accelerate, the transformers Trainer or TRL call it. With other configurations it builds DeepSpeed's engines.

    inference: whether `deepspeed.init_inference` builds an `InferenceEngine`; False leaves it to DeepSpeed.
    A second call has no further effect. Existing engines do not change. A function imported by name before this call
    (`from deepspeed import initialize`) is not patched.
    """
    with LOCK:
        TRAINING.lasting, INFERENCE.lasting = True, inference
        TRAINING.apply()
        INFERENCE.apply() if inference else INFERENCE.revert()


def uninstall() -> None:
    """Undo `install()`: restore `deepspeed.initialize` and `deepspeed.init_inference`. Inside `installed()`, they are
    restored when the outermost block ends.

    If another library's patch wraps ours, both stay, with a warning; the call then reaches DeepSpeed's own function.
    """
    with LOCK:
        for patch in (TRAINING, INFERENCE):
            patch.lasting = False
            patch.revert()


@contextmanager
def installed(inference: bool = True) -> Iterator[None]:
    """`install()` for the length of a block. Blocks may nest and overlap in several threads; the last to end undoes it.

    inference: as in `install()`.
    """
    patches = [TRAINING, INFERENCE] if inference else [TRAINING]
    with LOCK:
        for patch in patches:
            patch.blocks += 1
            patch.apply()
    try:
        yield
    finally:
        with LOCK:
            for patch in patches:
                patch.blocks -= 1
                patch.revert()
