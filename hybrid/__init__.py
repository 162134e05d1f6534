"""RLHF rollouts in-process: a model trained under DeepSpeed ZeRO also generates, from the same weights."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid.public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import the public names at the first use of one: that takes seconds, and `hybrid --help` needs none of them."""
    if "__all__" not in globals():
        public = importlib.import_module("hybrid.public")
        globals().update({name: getattr(public, name) for name in public.__all__}, __all__=public.__all__)
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module 'hybrid' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names too, for completion."""
    return sorted({*globals(), *importlib.import_module("hybrid.public").__all__})
