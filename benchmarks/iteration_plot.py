"""Draws where the time of a GRPO step goes, with and without this engine.

Reads what `benchmarks.trl_step --output` wrote:

python -m benchmarks.iteration_plot benchmarks/results/trl_step-epyc-avx512.json --output docs/iteration.svg
"""

import argparse
import html
import json
from pathlib import Path
from typing import Any

from benchmarks.results import Spread

WIDTH, LEFT, BAR, ROW, TOP = 900, 300, 26, 44, 70
# What is shown, by the benchmark's name, and the words beside the bar.
BARS = {
    "TRL's default: gather all, Hugging Face": "TRL's default: gather all, then generate",
    "rollout_func": "hybrid: rollout_func, with logprobs",
    "hybrid.install()": "hybrid.install(), nothing else changed",
}
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2933 } .small { font-size: 12px; fill: #52606d }
.generation { fill: #c2410c } .training { fill: #64748b } .inside { fill: #ffffff; font-size: 12px }
.page { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e7eb } .small { fill: #9aa5b1 } .training { fill: #52667f } .page { fill: #0d1117 } }
"""


def main(arguments: list[str] | None = None) -> None:
    """Read the report and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="JSON file of benchmarks.trl_step")
    parser.add_argument("--output", type=Path, default=Path("docs/iteration.svg"))
    args = parser.parse_args(arguments)
    args.output.write_text(picture(json.loads(args.report.read_text())))


def picture(report: dict[str, Any]) -> str:
    """An SVG with a bar for each way to train: the median step, its generation and the rest, in seconds."""
    bars = {words: medians(report["contenders"][name]) for name, words in BARS.items() if name in report["contenders"]}
    longest = max(sum(parts) for parts in bars.values())
    scale = (WIDTH - LEFT - 90) / longest  # pixels a second
    lines = [text(16, 28, "Where the time of a GRPO step goes (median seconds)")]
    lines += legend()
    for row, (words, (generation, rest)) in enumerate(bars.items()):
        y = TOP + row * ROW
        lines += [
            text(16, y + 18, words),
            bar(LEFT, y, generation * scale, "generation"),
            bar(LEFT + generation * scale, y, rest * scale, "training"),
            text(LEFT + (generation + rest) * scale + 8, y + 18, f"{generation + rest:.2f}"),
        ]
        lines += [
            text(x + 6, y + 17, f"{seconds:.2f}", "inside")
            for x, seconds in ((LEFT, generation), (LEFT + generation * scale, rest))
            if seconds * scale > 40
        ]
    bottom = TOP + len(bars) * ROW
    notes = [note.strip() for note in report["title"].replace("; ", ";\n", 1).splitlines()]  # the machine, the settings
    lines += [text(16, bottom + 12 + 18 * row, note, "small") for row, note in enumerate(notes)]
    height = bottom + 8 + 18 * len(notes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n'
        f"<title>Where the time of a GRPO step goes</title>\n<style>{STYLE}</style>\n"
        f'<rect class="page" width="{WIDTH}" height="{height}"/>\n' + "\n".join(lines) + "\n</svg>\n"
    )


def medians(contender: dict[str, Any]) -> tuple[float, float]:
    """The median seconds of generation in a step, and of what else the median step has."""
    generation, step = (Spread.of(contender[phase]).median for phase in ("generate_s", "step_s"))
    return generation, max(step - generation, 0.0)


def legend() -> list[str]:
    """What the colours mean."""
    return [
        f'<rect class="generation" x="{LEFT}" y="42" width="12" height="12"/>',
        text(LEFT + 18, 53, "generation", "small"),
        f'<rect class="training" x="{LEFT + 110}" y="42" width="12" height="12"/>',
        text(LEFT + 128, 53, "logprobs, loss, backward, optimizer step", "small"),
    ]


def bar(x: float, y: float, width: float, kind: str) -> str:
    """A part of a bar."""
    return f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}"/>'


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """A line of text."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y}">{html.escape(words)}</text>'


if __name__ == "__main__":
    main()
