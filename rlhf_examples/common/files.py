"""File names of a run, atomic writes, and text that any terminal can show."""

import os
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHECKPOINTS, MODEL, AVERAGE = "checkpoints", "model", "model_ema"
BEFORE, METRICS, SAMPLES, SETTINGS = "before.json", "metrics.jsonl", "samples.json", "settings.json"
COMPLETIONS = "completions.jsonl"  # of evaluations
DONE, PAIRS = "done.json", "pairs.jsonl"
ENGINE_LOG, LOCK = "engine.log", "run.lock"
ROLLOUTS = "rollouts"  # with --log_rollouts

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a kill leaves either the old or the new content. Raises OSError with the file's name."""
    temporary = path.with_name(f"{path.name}.unfinished")
    with write_errors_named(path):
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)


def append(path: Path, text: str) -> None:
    """Append to a file. Raises OSError with the file's name."""
    with write_errors_named(path), path.open("a", encoding="utf-8") as file:
        file.write(text)


@contextmanager
def write_errors_named(path: str | Path) -> Iterator[None]:
    """Inside the block an error of writing becomes an OSError with the file's name, which a full disk's does not have.

    torch.save raises RuntimeError instead of the system's errors.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise OSError(f"{path} cannot be written ({' '.join(reason.split())[:300]}){room_at(path)}") from error


def room_at(path: str | Path) -> str:
    """The free space of a file's disk, as the end of an error message; empty if it is unknown."""
    try:
        disk = os.statvfs(Path(path).parent)
    except OSError:
        return ""
    return f"; its disk has {disk.f_bavail * disk.f_frsize / 1e9:.3f} GB free"


def printable(text: str) -> str:
    """`text` with every character that UTF-8 cannot encode or that a terminal would obey replaced by U+FFFD.

    These are surrogates and control characters other than tab and line feed; models sample both.
    """
    return "".join(REPLACEMENT if unicodedata.category(c) in ("Cs", "Cc") and c not in "\t\n" else c for c in text)
