"""Figures of horizontal bars: rollouts over Hugging Face's, where the time of a GRPO step goes, and shares of a GPU's
rates.

A file has its bars as a text in its metadata, so that `benchmarks.page --check` sees from which results it was drawn.
"""

import html
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
from PIL import Image

from benchmarks.results import Spread
from benchmarks.tables import gpu_shares

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# In the order in which a case's bars are drawn.
COLOURS = {
    "hybrid": "#0b6e4f",
    "hybrid-new-weights": "#73c2a5",
    "vllm": "#7b4fa3",
    "vllm-eager": "#bfa3d6",
    "zero3-gathered": "#b9b9b9",
    "hybrid-eager": "#73c2a5",
    "hybrid-flashinfer": "#2563a8",
    "hybrid-flashinfer-eager": "#9dbfe0",
    "hf-static": "#b9b9b9",
    "generation": "#c2410c",
    "logprobs, loss, backward, optimizer step": "#64748b",
}
# Of contenders of `benchmarks.trl_step`.
IN_WORDS = {
    "TRL's default: gather all, Hugging Face": "TRL's default: gather all, then generate",
    "hybrid.install()": "hybrid.install(), nothing else changed",
    "rollout_func": "hybrid: rollout_func, with logprobs",
}
BAR, GAP = 0.26, 0.35  # inches
# Matplotlib writes colours into each element of an SVG; for readers in the dark these rules replace them.
DARK = """<style>@media (prefers-color-scheme: dark) {
  text { fill: #e4e7eb } [style*="fill: #ffffff"] { fill: #0d1117 !important }
  [style*="stroke: #000000"] { stroke: #9aa5b1 !important }
}</style>
"""


@dataclass(frozen=True)
class Bar:
    """A bar of a case, with a text at its end.  parts: lengths by name, one after the other."""

    parts: dict[str, float]
    text: str


@dataclass(frozen=True)
class Panel:
    """A part of a figure with its own title.  cases: bars by the case's name, from top to bottom."""

    title: str
    cases: dict[str, list[Bar]]

    @property
    def height(self) -> float:
        """Inches."""
        return sum(len(bars) * BAR + GAP for bars in self.cases.values())

    def draw(self, axis: plt.Axes, label: str, reference: float | None) -> None:
        """Draw all bars, and a line at `reference`."""
        y, ticks, seen = 0.0, [], set()
        for case, bars in self.cases.items():
            ticks.append((y + (len(bars) - 1) * BAR / 2, case))
            for bar in bars:
                end = 0.0
                for name, length in bar.parts.items():
                    colour, legend = COLOURS.get(name, "#444444"), None if name in seen else name
                    axis.barh(y, length, BAR * 0.9, left=end, color=colour, label=legend)
                    end += length
                    seen.add(name)
                axis.annotate(bar.text, (end, y), (3, 0), textcoords="offset points", va="center", fontsize=7)
                y += BAR
            y += GAP
        if reference is not None:
            axis.axvline(reference, color="black", linewidth=0.8)
        axis.set_yticks([position for position, _ in ticks], [name for _, name in ticks])
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.set_xlabel(label)
        axis.set_title(self.title, loc="left", pad=34, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, fontsize=8, frameon=False)


@dataclass(frozen=True)
class Figure:
    """Panels below each other.  label: of the axis.  reference: where a line is drawn."""

    panels: list[Panel]
    label: str
    reference: float | None = None

    def data(self) -> str:
        """All that is drawn, as JSON."""
        return json.dumps(asdict(self))

    def draw(self, path: Path) -> None:
        """Write a PNG, or an SVG that follows the reader's light or dark mode."""
        heights = [panel.height for panel in self.panels]
        size = (9, sum(heights) + 1.2 * len(heights))
        figure, axes = plt.subplots(
            len(heights), figsize=size, height_ratios=heights, squeeze=False, layout="constrained"
        )
        for panel, axis in zip(self.panels, axes[:, 0], strict=True):
            panel.draw(axis, self.label, self.reference)
        with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
            metadata = {"Description": self.data()} | ({"Date": None} if path.suffix == ".svg" else {})
            figure.savefig(path, dpi=150, metadata=metadata)
        if path.suffix == ".svg":
            path.write_text(path.read_text().replace(" <defs>", DARK + " <defs>", 1))
        plt.close(figure)

    def is_at(self, path: Path) -> bool:
        """Whether the file was drawn from the same."""
        if not path.is_file():
            return False
        if path.suffix == ".svg":
            texts = re.findall(r"<dc:description>(.*?)</dc:description>", path.read_text(), re.S)
            return self.data() in map(html.unescape, texts)
        return Image.open(path).info.get("Description") == self.data()


def rollouts(reports: list[dict[str, Any]]) -> Figure:
    """Tokens a second over Hugging Face's, of those results of `benchmarks.rollout` that have it as a contender."""
    panels = []
    for report in reports:
        ratios = {
            case["name"]: {name: case["results"][name]["ratio"] for name in COLOURS if name in case["results"]}
            for case in report["cases"]
            if "hf" in case["results"]
        }
        if not ratios:
            continue
        machine = report["machine"]
        title = f"{machine['gpu'] or machine['cpu']}, {machine['instructions']}"
        cases = {
            case: [Bar({name: value}, f"{value:.1f}") for name, value in of.items()] for case, of in ratios.items()
        }
        panels.append(Panel(title, cases))
    return Figure(panels, "tokens per second relative to Hugging Face's generate on the whole model", 1.0)


def iteration(report: dict[str, Any]) -> Figure:
    """The median step of each contender of `benchmarks.trl_step`, and its generation."""
    cases = {}
    for name, contender in report["contenders"].items():
        generation, step = (Spread.of(contender[phase]).median for phase in ("generate_s", "step_s"))
        parts = {"generation": generation, "logprobs, loss, backward, optimizer step": max(step - generation, 0.0)}
        cases[IN_WORDS.get(name, name)] = [Bar(parts, f"{generation:.2f} of {sum(parts.values()):.2f}")]
    title = report["title"].replace("; ", ";\n")  # the machine, the settings, the rounds
    return Figure([Panel(f"Where the time of a GRPO step goes\n{title}", cases)], "median seconds")


def gpu(report: dict[str, Any]) -> Figure:
    """The shares of the device's rates that `benchmarks.gpu` has measured with the latest code."""
    code = report["runs"][-1]["code"]
    cases: dict[str, dict[str, list[Bar]]] = {"prefill": {}, "decode step": {}}
    for row in report["rows"]:
        if row["kind"] == "rollout" and row["code"] == code and "error" not in row:
            for phase, share in gpu_shares(row).items():
                if share is not None:
                    bars = cases[phase].setdefault(row["case"], [])
                    bars.append(Bar({row["contender"]: share}, f"{share:.0%}"))
    rates = {"prefill": "of its matrix products", "decode step": "of its copies"}
    hardware = report["runs"][-1]["hardware"]
    panels = [Panel(f"{hardware}: {phase}, {rates[phase]}", bars) for phase, bars in cases.items() if bars]
    return Figure(panels, "share of the device's measured rate", 1.0)
