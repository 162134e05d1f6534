"""Files of a run, by name; files that a kill at any moment leaves whole; text that any program may show."""

import os
import unicodedata
from pathlib import Path

CHECKPOINTS, MODEL, AVERAGE = "checkpoints", "model", "model_ema"
BEFORE, METRICS, SAMPLES, SETTINGS = "before.json", "metrics.jsonl", "samples.json", "settings.json"
COMPLETIONS = "completions.jsonl"  # of evaluations
DONE, PAIRS = "done.json", "pairs.jsonl"

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is either the old one or the new one, whatever happens."""
    temporary = path.with_name(f"{path.name}.unfinished")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def printable(text: str) -> str:
    """`text` with what no UTF-8 file can hold or a terminal would obey replaced by U+FFFD.

    Those are half surrogate pairs and control characters but for tab and line feed: models sample both.
    """
    return "".join(REPLACEMENT if unicodedata.category(c) in ("Cs", "Cc") and c not in "\t\n" else c for c in text)
