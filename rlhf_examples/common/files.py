"""File names of a run, atomic writes, and text that any terminal can show."""

import os
import unicodedata
from pathlib import Path

CHECKPOINTS, MODEL, AVERAGE = "checkpoints", "model", "model_ema"
BEFORE, METRICS, SAMPLES, SETTINGS = "before.json", "metrics.jsonl", "samples.json", "settings.json"
COMPLETIONS = "completions.jsonl"  # of evaluations
DONE, PAIRS = "done.json", "pairs.jsonl"

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a kill leaves either the old or the new content."""
    temporary = path.with_name(f"{path.name}.unfinished")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def printable(text: str) -> str:
    """`text` with every character that UTF-8 cannot encode or that a terminal would obey replaced by U+FFFD.

    These are surrogates and control characters other than tab and line feed; models sample both.
    """
    return "".join(REPLACEMENT if unicodedata.category(c) in ("Cs", "Cc") and c not in "\t\n" else c for c in text)
