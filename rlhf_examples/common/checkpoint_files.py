"""The files of checkpoints: written with errors that name them, checked against their sizes, loaded as data alone."""

import json
import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

import hybrid
from rlhf_examples.common.files import write_errors_named

RUN = "run.json"  # what a checkpoint is of, and the sizes of its other files
FORMAT = 2  # of checkpoints; those of format 1, which did not say so, held pickled objects
# Classes in DeepSpeed's checkpoint files, in addition to tensors and plain values (0.19.8).
DEEPSPEED_CLASSES = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]


def save_tensors(content: Any, path: Path) -> None:
    """Write tensors and plain values (numbers, texts, lists, dicts). Raises OSError with the file's name."""
    with write_errors_named(path):
        torch.save(content, path)


def load_tensors(path: str | Path, map_location: Any = "cpu", mmap: bool = True) -> Any:
    """The contents of `save_tensors`, or of a file of DeepSpeed's, without running code from it.

    mmap: map tensors into memory instead of reading them. Raises ValueError if the file cannot be read.
    """
    try:
        with torch.serialization.safe_globals(DEEPSPEED_CLASSES):
            mapped = mmap and zipfile.is_zipfile(path)
            return torch.load(path, map_location=map_location, mmap=mapped, weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ValueError(f"resume: {path} cannot be read ({' '.join(str(error).split())[:300]})") from error


@contextmanager
def deepspeed_files(engine: hybrid.HybridEngine) -> Iterator[list[OSError]]:
    """Inside the block DeepSpeed loads its checkpoint's files by `load_tensors`. What it cannot write becomes an error
    in the list instead of being raised, so that this rank joins the collectives of the save.
    """
    errors: list[OSError] = []

    def kept(write: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> None:
            try:
                with write_errors_named(kwargs.get("path", args[-1] if args else "")):
                    write(*args, **kwargs)
            except OSError as error:
                errors.append(error)

        return call

    def load(path: str, map_location: Any = None) -> Any:
        return load_tensors(path, map_location, mmap=False)

    files, copy_script = engine.checkpoint_engine, engine._copy_recovery_script
    with (
        patch.object(files, "save", kept(files.save)),
        patch.object(files, "load", load),
        patch.object(engine, "_copy_recovery_script", kept(copy_script)),
    ):
        yield errors


def describe(checkpoint: Path, run_info: dict[str, Any]) -> None:
    """Write the file that makes a checkpoint whole. Raises OSError with the file's name."""
    sizes = {str(path.relative_to(checkpoint)): path.stat().st_size for path in files_of(checkpoint)}
    with write_errors_named(checkpoint / RUN):
        (checkpoint / RUN).write_text(json.dumps({"format": FORMAT, **run_info, "files": sizes}))


def files_of(checkpoint: Path) -> list[Path]:
    """All files in a checkpoint's directory."""
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def damage(checkpoint: Path) -> str:
    """Why a checkpoint cannot be loaded, with the file's name; empty if it is whole."""
    try:
        run_info = json.loads((checkpoint / RUN).read_text())
    except FileNotFoundError:
        return f"{checkpoint / RUN} is missing"
    except (OSError, ValueError, RecursionError) as error:
        return f"{checkpoint / RUN} cannot be read ({error})"
    if not isinstance(run_info, dict) or run_info.get("format") != FORMAT:
        return (
            f"{checkpoint} was written by another version of these examples, in another format; finish the run with "
            "that version"
        )
    for name, size in run_info["files"].items():
        path = checkpoint / name
        if not path.is_file():
            return f"{path} is missing"
        if (actual := path.stat().st_size) != size:
            return f"{path} has {actual} bytes, and {size} were saved"
    return ""
