"""Writes docs/models.md from what `benchmarks.models` finds: tables of fused models, of native ones, of the rest."""

import re
from collections.abc import Callable
from typing import Any

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from benchmarks.results import ROOT
from benchmarks.tables import table

PAGE = ROOT / "docs" / "models.md"
TEMPLATE, RECIPES = ROOT / "benchmarks" / "models.md", ROOT / "benchmarks" / "recipes.tsv"
FUSED, NATIVE, FORWARDS_ONLY, NOT_BUILT = "fused", "native", "forwards alone", "not built"
CUTS = (
    r"^the Hugging Face module itself, over the snapshot's weights: ",
    r"^a decoder of the (\S+) family.*$",
    r" \((hybrid/models/README|if nobody has changed|fused are adapters|rollout\.containers).*$",
    r"^\w+ fits no supported family; the nearest is ",
    r"\b(\w+\.)*layers\.\d+\.",
)
LONGEST = 100  # characters of a reason


def page(result: dict[str, Any]) -> str:
    """Return docs/models.md."""
    groups = {runs: [row for row in result["models"] if row["runs"] == runs] for runs in TABLES}
    counts = ", ".join(f"{len(rows)} {runs}" for runs, rows in groups.items())
    lines = []
    for runs, rows in groups.items():
        if rows:
            head, cells = TABLES[runs]
            lines += [f"## {runs.capitalize()}", "", *table(head, [[label(row), *cells(row)] for row in rows]), ""]
    places = {
        "transformers": result["versions"]["transformers"],
        "summary": f"**{len(result['models'])} classes: {counts}.**{unfinished(result)}",
        "recipes": recipes_covered({row["type"] for row in groups[FUSED]}),
        "tables": "\n".join(lines[:-1]),
    }
    return re.sub(r"\{\{ (\w+) \}\}", lambda place: places[place[1]], TEMPLATE.read_text())


def unfinished(result: dict[str, Any]) -> str:
    """Return a sentence about models that have not been examined; "" if all have."""
    examined = {(row["type"], row["class"]) for row in result["models"]}
    left = [name for name, kind in result["classes"] if (name, kind) not in examined]
    return f" {len(left)} more have not been examined, from {left[0]} on: run `make models`." if left else ""


def label(row: dict[str, Any]) -> str:
    """Return a row's type, with a mark of classes that read images or sound."""
    marks = {
        " (vision)": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        "": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        " (sound)": MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }
    of_class = (mark for mark, names in marks.items() if names.get(row["type"]) == row["class"])
    return row["type"] + next(of_class, "")


def yes(reason: str | None) -> str:
    """Return "yes" for a setting that is not refused; how many of the adapted modules run unmerged, if not all."""
    if counts := re.fullmatch(r"adapters unmerged in (\d+ of \d+) modules", reason or ""):
        return counts[1]
    return "–" if reason is None or "no routers of experts" in reason else "yes" if not reason else "no"


def short(reason: str) -> str:
    """Return a reason in one cell."""
    for pattern in CUTS:
        reason = re.sub(pattern, r"\1" if "family.*" in pattern else "", reason)
    reason = reason.replace("|", "/").replace("<", "‹").replace("_", "\\_").replace("*", "\\*")
    return reason if len(reason) <= LONGEST else reason[: LONGEST - 1].rstrip() + "…"


def common_cells(row: dict[str, Any]) -> list[str]:
    """Return the cells that fused and native models have."""
    sharing, logps = row.get("tensor_parallel"), row.get("logps")
    ranks = "?" if sharing is None else sharing if sharing in ("fused", "modules") else "whole"
    names = [name for name in ("packed", "exact") if not logps[name]] if isinstance(logps, dict) else []
    more = [yes(row.get(name)) for name in ("unmerged_lora", "router_replay")]
    return [ranks, *more, ", ".join(names) or "–"]


def fused_cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a fused model."""
    common = common_cells(row)
    drafts = [yes(row.get(name)) for name in ("int8", "speculation")]
    return [short(row["reason"]), f"{row['difference']:.0e}", *drafts, *common]


def native_cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a native model."""
    return [short(row["reason"]), *common_cells(row)]


def reason_cell(row: dict[str, Any]) -> list[str]:
    """Return the reason alone."""
    return [short(row["reason"])]


COMMON = ("2 ranks", "LoRA", "replay", "logps")
TABLES: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any]], list[str]]]] = {
    FUSED: (("type", "family", "differs", "int8", "drafts", *COMMON), fused_cells),
    NATIVE: (("type", "nearest family and what it lacks, or the reason", *COMMON), native_cells),
    FORWARDS_ONLY: (("type", "reason"), reason_cell),
    NOT_BUILT: (("type", "reason"), reason_cell),
}


def recipes_covered(fused: set[str]) -> str:
    """Return a sentence with the share of the recipes' families that run fused.

    fused: the model types that run fused.
    """
    lines = [line.split("\t") for line in RECIPES.read_text().splitlines() if not line.startswith("#")]
    named = [(int(count), types.split()) for count, types in lines]
    total = sum(count for count, _ in named)
    whole = sum(count for count, types in named if fused.issuperset(types))
    part = sum(count for count, types in named if not fused.isdisjoint(types))
    left = [f"{', '.join(sorted({*types} - fused))} ({count})" for count, types in named if not fused.issuperset(types)]
    return (
        "730 training recipes that 16 open projects added between March and August 2026 name a family of these models "
        f"{total} times: **{whole / total:.0%}** are families whose types all run fused, {part / total:.0%} those with "
        f"at least one. Not fused, and how often its family is named: {'; '.join(left) or 'none'}."
    )
