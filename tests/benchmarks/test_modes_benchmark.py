"""The benchmark of ways to hold weights: contenders give equal tokens, and the table has a row for each."""

import re

import pytest

NAMES = (
    "pinned",
    "tensor parallel",
    "streaming",
    "pinned, LoRA merged",
    "pinned, LoRA unmerged",
    "pinned, native",
    "tensor parallel, native",
    "streaming, native",
    "GatheredParameters(all) + Hugging Face",
    "ZeRO-3 that keeps all + Hugging Face",
    "plain ZeRO-3 Hugging Face",
)


@pytest.mark.slow
def test_every_contender_has_a_row(measure):
    flags = "--shape micro --sequences 2 --prompt_length 4 --new_tokens 3 --rounds 2"
    printed, result = measure("modes", flags)
    rows = {name: cells for name, *cells in (line.strip("| ").split(" | ") for line in table_of(printed))}
    assert tuple(rows) == NAMES, printed[-4000:]
    gathered = {name: int(cells[2]) for name, cells in rows.items() if cells[2] != "–"}
    assert list(gathered) == list(NAMES[:8])
    assert gathered["streaming"] == 3 * gathered["pinned"] or gathered["pinned"] <= 1  # MiB are rounded
    assert result["command"].endswith(f"torchrun --nproc_per_node=2 -m benchmarks.modes {flags}")
    assert all(len(way["switch_s"]) == len(way["rollout_s"]) == 2 for way in result["results"].values())


def table_of(text: str) -> list[str]:
    """The rows of the table, without its head."""
    return [line for line in text.splitlines() if re.match(r"\| [^|]+ \| [\d.]+ \(", line)]
