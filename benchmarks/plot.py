"""Draws the rollout benchmark's JSON files as a figure: tokens per second relative to Hugging Face's, by case.

python -m benchmarks.plot runs/rollout-*.json --output docs/rollout.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# The colour of each contender, in the order of the bars.
COLOURS = {
    "hybrid": "#0b6e4f",
    "hybrid-new-weights": "#73c2a5",
    "vllm": "#7b4fa3",
    "vllm-eager": "#bfa3d6",
    "hf-continuous": "#d98c3f",
    "hf-static": "#8c8c8c",
    "zero3-gathered": "#b9b9b9",
}
DATA = "Description"  # the PNG's text in which its data are, for `benchmarks.page --check`
BAR, GAP = 0.26, 0.35  # inches


def main(arguments: list[str] | None = None) -> None:
    """Read the reports and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, help="JSON files of benchmarks.rollout")
    parser.add_argument("--output", type=Path, default=Path("docs/rollout.png"))
    args = parser.parse_args(arguments)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    picture([json.loads(path.read_text()) for path in args.reports], args.output)


def picture(reports: list[dict[str, Any]], path: Path) -> None:
    """Write a PNG of reports to `path`, with their bars as its text DATA."""
    heights = [sum(len(bars_of(case)) * BAR + GAP for case in report["cases"]) for report in reports]  # inches
    figure, axes = plt.subplots(
        len(reports),
        figsize=(9, sum(heights) + len(reports)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for report, axis in zip(reports, axes[:, 0], strict=True):
        draw(report, axis)
    figure.savefig(path, dpi=150, metadata={DATA: data(reports)})
    plt.close(figure)


def data(reports: list[dict[str, Any]]) -> str:
    """All that is drawn: titles, cases and bars, as JSON."""
    drawn = [[title(report), {case["name"]: bars_of(case) for case in report["cases"]}] for report in reports]
    return json.dumps(drawn)


def title(report: dict[str, Any]) -> str:
    """The machine."""
    machine = report["machine"]
    return f"{machine['gpu'] or machine['cpu']}, {machine['instructions']}"


def bars_of(case: dict[str, Any]) -> dict[str, float]:
    """Each contender's ratio to Hugging Face in a case, in the order of the bars."""
    return {name: case["results"][name]["ratio"] for name in COLOURS if name in case["results"]}


def draw(report: dict[str, Any], axis: plt.Axes) -> None:
    """Draw the cases of a report, from top to bottom."""
    y, ticks, seen = 0.0, [], set()
    for case in report["cases"]:
        bars = bars_of(case)
        ticks.append((y + (len(bars) - 1) * BAR / 2, case["name"]))
        for name, ratio in bars.items():
            axis.barh(y, ratio, BAR * 0.9, color=COLOURS[name], label=None if name in seen else name)
            axis.annotate(f"{ratio:.1f}", (ratio, y), (3, 0), textcoords="offset points", va="center", fontsize=7)
            seen.add(name)
            y += BAR
        y += GAP
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks([position for position, _ in ticks], [name for _, name in ticks])
    axis.invert_yaxis()
    axis.margins(x=0.08)
    axis.set_xlabel("tokens per second relative to Hugging Face's generate on the whole model")
    axis.set_title(title(report), loc="left", pad=34)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, fontsize=8, frameon=False)


if __name__ == "__main__":
    main()
