"""`hybrid.install()` patches DeepSpeed's module: `deepspeed.initialize` builds a HybridEngine if the configuration
enables `hybrid_engine`, and `deepspeed.init_inference` builds an InferenceEngine.

accelerate, the transformers Trainer and TRL look these functions up in DeepSpeed's module at call time, so they build
our engines too. `deepspeed.init_distributed` warns while it waits for a lock of another process's build.
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

from hybrid.compat.trl_forward import METHOD, logps_by, trainer_classes
from hybrid.config import HybridEngineConfig, read_block
from hybrid.inference.engine import init_inference
from hybrid.runtime.extension_lock import extension_lock_reported
from hybrid.training.initialize import initialize
from hybrid.training.logps import FORWARDS

PARAMETERS = tuple(inspect.signature(initialize).parameters)  # of `deepspeed.initialize`, in order


@dataclass
class Patch:
    """Our patch of one of DeepSpeed's functions, or of a trainer's method; one per process and function.

    name: of the function.  build: called in its place, with the original function before the call's own arguments.
    owner: the module or class that has it.
    lasting: whether `install()` is in effect.  blocks: number of open `installed()` blocks.
    function: ours if it is installed, else None. It may be wrapped by another library's patch; then it stays after
        `uninstall()` and calls DeepSpeed's function.
    """

    name: str
    build: Callable[..., Any]
    lasting: bool = False
    blocks: int = 0
    function: Any = None  # ours, around the original one; None until it is installed
    owner: Any = deepspeed

    @property
    def is_active(self) -> bool:
        """Whether the function must build our engine: after `install()` or in an `installed()` block."""
        return self.lasting or self.blocks > 0

    def apply(self) -> None:
        """Install our function, unless it is there already, alone or wrapped by another patch."""
        original = getattr(self.owner, self.name)
        if self.function is None:

            @functools.wraps(original)
            def function(*args: Any, **kwargs: Any) -> Any:
                return self.build(original, *args, **kwargs) if self.is_active else original(*args, **kwargs)

            self.function = function
        if original is self.function.__wrapped__:
            setattr(self.owner, self.name, self.function)

    def revert(self) -> None:
        """Restore the original function unless it is active.

        Warns and keeps our function if another library's patch wraps it.
        """
        current = getattr(self.owner, self.name)
        if self.is_active or self.function is None or current is self.function.__wrapped__:
            return
        if current is self.function:
            setattr(self.owner, self.name, self.function.__wrapped__)
            self.function = None
        else:
            warnings.warn(
                f"uninstall: {self.owner.__name__}.{self.name} is {current!r}"
                ", which another library installed after install(). It stays; where it calls the function that it "
                "wraps, the original one runs from here on",
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


def report_long_waits(original: Callable, *args: Any, **kwargs: Any) -> None:
    """`deepspeed.init_distributed` that warns if it waits for another process to build an operator."""
    with extension_lock_reported():
        original(*args, **kwargs)


# Of trainers' methods, by class; made when `training_forward` is first given.
TRAINERS: dict[type, Patch] = {}
TRAINING, INFERENCE = Patch("initialize", build_engine), Patch("init_inference", build_inference_engine)
# Of the process group's start, which accelerate and scripts call before `initialize`.
STARTS = [Patch("init_distributed", report_long_waits, owner=owner) for owner in (deepspeed, deepspeed.comm)]
LOCK = threading.RLock()


def trainer_patches(training_forward: str | None) -> list[Patch]:
    """Return the patches of TRL's trainers for a forward of `HybridEngine.logps`; None: none.

    Raises ValueError for another forward.
    """
    if training_forward is None:
        return []
    if training_forward not in FORWARDS:
        allowed = ", ".join(map(repr, FORWARDS))
        raise ValueError(f"training_forward: {training_forward!r} given; it must be one of {allowed}, or None")
    for kind in trainer_classes():
        patch = TRAINERS.setdefault(kind, Patch(METHOD, logps_by, owner=kind))
        patch.build = functools.partial(logps_by, training_forward)
    return list(TRAINERS.values())


def install(inference: bool = True, training_forward: str | None = None) -> None:
    """From now on `deepspeed.initialize` with `"hybrid_engine": {"enabled": true}` builds a HybridEngine, also when
    accelerate, the transformers Trainer or TRL call it. With other configurations it builds DeepSpeed's engines.

    A second call has no further effect. Existing engines do not change. A function imported by name before this call
    (`from deepspeed import initialize`) is not patched.

    Args:
        inference: whether `deepspeed.init_inference` builds an `InferenceEngine`; False leaves it to DeepSpeed.
        training_forward: "packed", "exact" or "model" makes TRL's GRPO and RLOO trainers compute logprobs by
            `HybridEngine.logps`, with losses equal to TRL's within rounding. None: TRL's own pass, bit for bit.

    Raises:
        ValueError: for another `training_forward`.
        ImportError: for one without TRL 1.16.
    """
    with LOCK:
        trainers = trainer_patches(training_forward)
        wanted = [TRAINING, *STARTS, *([INFERENCE] if inference else []), *trainers]
        for patch in (TRAINING, *STARTS, INFERENCE, *TRAINERS.values()):
            patch.lasting = patch in wanted
            patch.apply() if patch.lasting else patch.revert()


def uninstall() -> None:
    """Undo `install()`: restore `deepspeed.initialize` and `deepspeed.init_inference`. Inside `installed()`, they are
    restored when the outermost block ends.

    If another library's patch wraps ours, both stay, with a warning; the call then reaches DeepSpeed's own function.
    """
    with LOCK:
        for patch in (TRAINING, *STARTS, INFERENCE, *TRAINERS.values()):
            patch.lasting = False
            patch.revert()


@contextmanager
def installed(inference: bool = True, training_forward: str | None = None) -> Iterator[None]:
    """`install()` for the length of a block. Blocks may nest and overlap in several threads; the last to end undoes it.

    Args:
        inference: as in `install()`.
        training_forward: likewise; an enclosing block's is back in force when this block ends.
    """
    with LOCK:
        outer = [(patch, patch.build) for patch in TRAINERS.values()]
        patches = [TRAINING, *STARTS, *([INFERENCE] if inference else []), *trainer_patches(training_forward)]
        for patch in patches:
            patch.blocks += 1
            patch.apply()
    try:
        yield
    finally:
        with LOCK:
            for patch, build in outer:
                patch.build = build
            for patch in patches:
                patch.blocks -= 1
                patch.revert()
