"""Draws the rows of `benchmarks.gpu`: each contender's share of the copy bandwidth in decode steps, by case."""

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {
    "hybrid": "#0b6e4f",
    "hybrid-flashinfer": "#73c2a5",
    "hybrid-eager": "#b5dccb",
    "hf-static": "#8c8c8c",
    "vllm": "#7b4fa3",
}
BAR, GAP = 0.26, 0.35  # inches


def draw_shares(rows: list[dict[str, Any]], hardware: str, path: Path) -> None:
    """Write a PNG of measured rows to `path`, with the tokens per second at the bars."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    figure, axis = plt.subplots(figsize=(9, len(rows) * BAR + len(cases) * GAP + 1.2), layout="constrained")
    y, ticks, seen = 0.0, [], set()
    for case in cases:
        bars = [row for row in rows if row["case"] == case]
        ticks.append((y + (len(bars) - 1) * BAR / 2, case))
        for row in bars:
            step, name = max(statistics.median(row["step_s"]), 1e-9), row["contender"]
            share = row["step_bytes"] / row["rates"]["copy_bytes_per_s"] / step
            axis.barh(y, share, BAR * 0.9, color=COLOURS.get(name, "#444444"), label=None if name in seen else name)
            text = f"{share:.0%}, {row['rows'] / step:.0f} tokens/s"
            axis.annotate(text, (share, y), (3, 0), textcoords="offset points", va="center", fontsize=7)
            seen.add(name)
            y += BAR
        y += GAP
    axis.set_yticks([position for position, _ in ticks], [name for _, name in ticks])
    axis.invert_yaxis()
    axis.margins(x=0.25)
    axis.set_xlabel("bytes that a decode step must read, over those that a copy moves in its time")
    axis.set_title(hardware, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="lower right", fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
