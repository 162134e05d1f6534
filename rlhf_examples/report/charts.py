"""Curves, stacked charts and histograms of runs' logs: Matplotlib's SVG in the colours of the page around it.

A log is a pandas frame with a row for each iteration (the index) and a column for each metric; missing values are NaN.
"""

import html
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlhf_examples.common.trackers import Histogram

LARGEST = 1e100  # greater values are drawn as this: their means and ranges, and a logarithmic axis's ends, overflow
MAX_STEPS = 120  # in a stacked chart; neighbours are averaged if there are more iterations
FEWEST_TO_SMOOTH, FEWEST_WITHOUT_DOTS, FEWEST_TO_FADE = 8, 31, 300
# Matplotlib knows no CSS variables: these colours are placeholders that are replaced in its SVG.
MUTED, GRID = "#010102", "#010103"
SERIES = [f"#0102{number:02d}" for number in range(10)]
VARIABLES = {MUTED: "--muted", GRID: "--grid"} | {color: f"--series-{i}" for i, color in enumerate(SERIES)}
STYLE: Any = {
    "figure.figsize": (4.6, 2.3),
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    **{f"{axis}tick.color": GRID for axis in "xy"},
    **{f"{axis}tick.labelcolor": MUTED for axis in "xy"},
    "path.simplify_threshold": 0.3,  # points: a line of any length takes a few kB and keeps its extremes
    "svg.fonttype": "none",  # text stays text
}
styled = matplotlib.rc_context(STYLE)

# The phases of an iteration in the order of the stack, and the number of the series colour of each.
PHASES = {"gather": 1, "merge": 8, "prefill": 7, "decode": 0, "score": 6, "wait": 5, "train": 4, "release": 3}
OTHER = 9


class Chart(NamedTuple):
    """The content of a chart.  series: metric → its name in the legend; metrics that a log lacks are left out."""

    title: str
    unit: str
    series: dict[str, str]
    log_scale: bool = False
    smooth: bool = True


class Drawing(NamedTuple):
    """A rendered chart.

    legend: (label, number of the series colour); empty if a single line needs none.
    table: in the place of a legend: (label, number of the series colour, *cells).
    """

    title: str
    unit: str
    svg: str
    legend: Sequence[tuple[str, int]] = ()
    table: Sequence[tuple[str, int, str, str]] = ()


@styled
def draw_lines(
    chart: Chart, logs: Sequence[pd.DataFrame], runs: Sequence[str], links: dict[int, str] | None = None
) -> Drawing | None:
    """Every iteration as a thin line, the moving average as a thick one; None without data.

    logs: of one run, or of several, whose lines are named by `runs`.
    links: iteration → a place on the page, to which a point on the first line there leads.
    """
    logged = [name for name in chart.series if any(name in log for log in logs)]
    axes = Figure().add_subplot()
    legend: list[tuple[str, int]] = []
    for number, (name, run) in enumerate((name, run) for name in logged for run in range(len(logs))):
        column = logs[run][name].dropna() if name in logs[run] else pd.Series(dtype=float)
        if chart.log_scale:
            column = column.where(column > 1 / LARGEST)  # others are gaps
        if not column.count():
            continue
        color = number % len(SERIES)
        line = draw_line(axes, column, SERIES[color], chart.smooth)
        if links and not legend:
            marked = [iteration for iteration in links if iteration in line.index]
            dots = axes.scatter(marked, line[marked], s=60, color=SERIES[color], zorder=5, clip_on=False)
            dots.set_urls([links[iteration] for iteration in marked])
        names = [runs[run]] * (len(logs) > 1) + [chart.series[name]] * (len(logged) > 1)
        legend.append((": ".join(names), color))
    if not legend:
        return None
    if chart.log_scale:
        axes.set_yscale("log")
    iterations = np.concatenate([log.index for log in logs])
    svg = iteration_chart(axes, iterations.min(), iterations.max(), chart.title)
    return Drawing(chart.title, chart.unit, svg, legend if len(legend) > 1 or len(logs) > 1 else ())


def draw_line(axes: Axes, column: pd.Series, color: str, smooth: bool) -> pd.Series:
    """Draw a metric; returns the moving average if there is one, else the metric."""
    average = smoothed(column) if smooth else None
    few = len(column) < FEWEST_WITHOUT_DOTS
    if average is None:
        axes.plot(column, color=color, linewidth=1.8, marker="o" if few else "", markersize=3.5)
        return column
    alpha = 0.3 if len(column) >= FEWEST_TO_FADE else 0.55
    axes.plot(column, color=color, linewidth=0.7, alpha=alpha, marker="." if few else "")
    axes.plot(average, color=color, linewidth=1.9)
    return average


def smoothed(column: pd.Series) -> pd.Series | None:
    """A centred moving average over a tenth of the points, which does not lag; None for few points."""
    if len(column) < FEWEST_TO_SMOOTH:
        return None
    return column.rolling(max(3, len(column) // 10 | 1), center=True, min_periods=1).mean()


def phase_seconds(log: pd.DataFrame) -> pd.DataFrame:
    """Seconds of each phase by iteration, and the rest of it as "other"; only phases that took time."""
    seconds = pd.DataFrame({phase: log[f"time/{phase}_s"] for phase in PHASES if f"time/{phase}_s" in log})
    seconds = seconds.fillna(0.0)
    if "time/iteration_s" in log and len(seconds.columns):
        seconds["other"] = (log["time/iteration_s"] - seconds.sum(axis=1)).clip(lower=0).fillna(0.0)
    return seconds.loc[:, seconds.sum() > 0]


@styled
def draw_phases(log: pd.DataFrame) -> Drawing | None:
    """A stacked chart of `phase_seconds`, and its table: mean seconds of an iteration and share of the total time, the
    top of the stack first. None if no phase took time.
    """
    seconds = phase_seconds(log)
    if not seconds.size:
        return None
    steps = np.arange(len(seconds)) * min(len(seconds), MAX_STEPS) // len(seconds)
    edges = np.append(seconds.index[np.unique(steps, return_index=True)[1]], seconds.index[-1] + 1) - 0.5
    axes, below = Figure().add_subplot(), 0.0
    for phase, tops in seconds.groupby(steps).mean().cumsum(axis=1).items():
        axes.stairs(tops, edges, baseline=below, fill=True, color=SERIES[PHASES.get(phase, OTHER)])
        below = tops
    title, shares = "Time of an iteration by phase", 100 * seconds.sum() / seconds.to_numpy().sum()
    rows = [
        (p, PHASES.get(p, OTHER), f"{seconds[p].mean():.3f}", f"{shares[p]:.1f} %") for p in reversed(seconds.columns)
    ]
    return Drawing(title, "seconds", iteration_chart(axes, seconds.index[0], seconds.index[-1], title), table=rows)


@styled
def draw_histogram(title: str, unit: str, histograms: Iterable[Histogram]) -> Drawing | None:
    """The last histogram as an outline over the sum of all, as shares; None if nothing was counted.

    Edges over many orders of magnitude get a logarithmic axis, on which the bin that starts at 0 is as wide as the
    next.
    """
    counted = [histogram for histogram in histograms if sum(histogram.counts) > 0]
    counted = [histogram for histogram in counted if histogram.edges == counted[-1].edges]
    if not counted:
        return None
    edges = np.array(counted[-1].edges, dtype=float)
    counts = np.array([histogram.counts for histogram in counted], dtype=float)
    axes = Figure().add_subplot(xlabel=unit)
    if len(edges) > 2 and edges[0] >= 0 and edges[-1] > 100 * edges[1] > 0:
        edges[0] = edges[0] or edges[1] ** 2 / edges[2]
        axes.set_xscale("log")
    axes.stairs(100 * counts.sum(axis=0) / counts.sum(), edges, fill=True, color=SERIES[0], alpha=0.45)
    axes.stairs(100 * counts[-1] / counts[-1].sum(), edges, color=SERIES[2], linewidth=1.5)
    axes.set_xlim(edges[0], edges[-1])
    return Drawing(title, "% of tokens", as_svg(axes, title), (("all iterations", 0), ("last iteration", 2)))


def iteration_chart(axes: Axes, first: int, last: int, title: str) -> str:
    """The SVG of a chart over the iterations `first` to `last`."""
    axes.set(xlabel="iteration", xlim=(first - 0.5, last + 0.5))
    axes.locator_params("x", nbins=6, integer=True)
    return as_svg(axes, title)


def as_svg(axes: Axes, title: str) -> str:
    """A chart as an SVG element for the page, which sets its size, font and colours."""
    axes.minorticks_off()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.10g}")  # in full, without a common factor or offset
    if axes.get_yscale() == "linear":
        axes.locator_params("y", nbins=5)
    file = io.StringIO()
    assert isinstance(axes.figure, Figure)
    axes.figure.savefig(file, format="svg", transparent=True)
    box, text = re.findall(r'(?s)<svg[^>]*(viewBox="[^"]*")[^>]*>(.*)', file.getvalue())[0]
    text = re.sub(
        r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>| font-family:[^;]*;", "", text, flags=re.DOTALL
    )
    text = re.sub(r'<g id="[^"]*"', "<g", text.replace("xlink:href", "href"))  # nothing refers to ids of groups
    text = re.sub(r' (d|x|y|transform)="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), text)
    text = re.sub(r"\s*\n\s*", " ", text)
    for color, variable in VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    role = "group" if "<a " in text else "img"  # an image has no links for screen readers
    return f'<svg {box} role="{role}" aria-label="{html.escape(title)}">{text.strip()}'
