"""Runs DeepSpeed-Chat's three `main.py`, unchanged, with today's libraries, and generates with this engine:

    torchrun --nproc_per_node=8 -m hybrid.compat.deepspeed_chat main.py --enable_hybrid_engine ...
    deepspeed --module hybrid.compat.deepspeed_chat main.py --enable_hybrid_engine ...

Or two lines at the top of `main.py`, before its other imports:

    from hybrid.compat import deepspeed_chat
    deepspeed_chat.install()

DeepSpeed-Chat (DeepSpeedExamples 45b4b715) was written for transformers 4 and DeepSpeed 0.9 to 0.19.1. Each function in
SHIMS restores one thing that it needs and that a later version has changed, only where the installed version needs it.
"""

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers.modeling_utils
from deepspeed.runtime.engine import DeepSpeedEngine
from transformers import LlamaTokenizer, initialization
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from hybrid.compat import install as drop_in
from hybrid.training.initialize import init_single_process_group

LOCAL_RANK = "--local_rank"
DEEPSPEEDS_CAST: Any = getattr(DeepSpeedEngine, "_cast_module_mixed_precision", None)
Replacement = tuple[Any, str, Any]  # an owner, the name of its attribute, and the value that it gets


def no_init_weights() -> Iterator[Replacement]:
    """Restore `modeling_utils.no_init_weights`: transformers 5.0 moved it, which model_utils.py imports, to
    `initialization`."""
    if not hasattr(transformers.modeling_utils, "no_init_weights"):
        yield transformers.modeling_utils, "no_init_weights", initialization.no_init_weights


def whole_tokenizers() -> Iterator[Replacement]:
    """`save_hf_format` saves a tokenizer by `save_vocabulary`, which since transformers 5.0 needs a vocabulary file
    that most tokenizers do not have. Since 4.50 config.json does not name the model that the tokenizer came from, so
    the next step loads it from that directory: all of it must be there.
    """
    yield TokenizersBackend, "save_vocabulary", save_whole


def save_whole(tokenizer: Any, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
    return tokenizer.save_pretrained(save_directory, filename_prefix=filename_prefix)


def right_padding() -> Iterator[Replacement]:
    """Since transformers 5.0 `LlamaTokenizer` pads on the left. `get_tokenizer` corrects that only where the tokenizer
    has no padding token, and the reward model looks for the end of a text at its first padding tokens.
    """
    yield LlamaTokenizer, "padding_side", "right"


def one_dtype_under_zero3() -> Iterator[Replacement]:
    """Since DeepSpeed 0.19.2 parameters that were made outside `zero.Init`, such as the reward model's `v_head`, stay
    in float32 next to partitioned 16-bit ones, and the ZeRO-3 optimizer fails with an AssertionError in `defragment`.
    """
    if DEEPSPEEDS_CAST is not None:
        yield DeepSpeedEngine, "_cast_module_mixed_precision", cast_unpartitioned


def cast_unpartitioned(engine: Any, param_dtype: torch.dtype | None, *args: Any, **kwargs: Any) -> None:
    DEEPSPEEDS_CAST(engine, param_dtype, *args, **kwargs)
    for param in engine.module.parameters() if param_dtype is not None else ():
        if not hasattr(param, "ds_id") and param.dtype == torch.float32:
            param.data = param.data.to(param_dtype)


SHIMS = (no_init_weights, whole_tokenizers, right_padding, one_dtype_under_zero3)


@contextmanager
def installed() -> Iterator[None]:
    """`hybrid.installed()` with the shims, for the length of a block."""
    with drop_in.installed(), ExitStack() as stack:
        for shim in SHIMS:
            for replacement in shim():
                stack.enter_context(patch.object(*replacement, create=True))
        yield


def install() -> None:
    """`hybrid.install()` with the shims, for the life of the process. Call it before DeepSpeed-Chat is imported.

    A second call has no further effect.
    """
    drop_in.install()
    for shim in SHIMS:
        for owner, name, value in shim():
            setattr(owner, name, value)


def script_arguments(arguments: list[str]) -> list[str]:
    """Return the script and its arguments, with the local rank: the `deepspeed` launcher puts it first, torchrun does
    not.

    Raises ValueError if no script is given.
    """
    first = [argument for argument in arguments[:1] if argument.startswith(f"{LOCAL_RANK}=")]
    script, *rest = arguments[len(first) :] or [""]
    if not Path(script).is_file():
        raise ValueError(f"{script!r} given; give DeepSpeed-Chat's main.py and its arguments, in its directory")
    if not any(argument.partition("=")[0] == LOCAL_RANK for argument in rest):
        rest += first or [f"{LOCAL_RANK}={os.environ.get('LOCAL_RANK', '0')}"]
    return [script, *rest]


def main() -> None:
    """Run a script as `python script.py arguments` does, with the shims."""
    try:
        sys.argv = script_arguments(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    init_single_process_group()
    try:
        with installed():
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    if dist.is_initialized():  # the three scripts do not; gloo's threads can then abort the exit (pytorch#190489)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
