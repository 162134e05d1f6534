"""Curves, stacked charts and histograms of a run's log as SVG that takes its colours from the page around it.

A log is a pandas frame with a row for each iteration (the index) and a column for each metric; missing values are NaN.
"""

import html
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from rlhf_examples.common.trackers import Histogram

SIZE_INCHES = (4.6, 2.3)
MOST_STEPS = 120  # in a stacked chart; neighbours are averaged if there are more iterations
MOST_POINTS = (
    1200  # of a raw line, more than a screen has columns; a longer line keeps the minimum and maximum of each range
)
FEWEST_TO_SMOOTH = 8
FEWEST_WITHOUT_DOTS, FEWEST_TO_FADE = 31, 300
# Matplotlib knows no CSS variables: these colours are placeholders that are replaced in its SVG.
INK, MUTED, GRID = "#010101", "#010102", "#010103"
SERIES = tuple(f"#0102{number:02d}" for number in range(10))
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid"} | {c: f"--series-{i}" for i, c in enumerate(SERIES)}

# The phases of an iteration in the order of the stack, and the number of the series colour of each.
PHASES = {"gather": 1, "merge": 8, "prefill": 7, "decode": 0, "score": 6, "wait": 5, "train": 4, "release": 3}
OTHER = 9
PHASES_TITLE = "Time of an iteration by phase"


@dataclass(frozen=True)
class Chart:
    """The content of a chart.

    series: metric → its name in the legend; metrics that a log lacks are left out.
    colors: metric → number of its series colour, and a single line is named too; empty: colours in the order of lines.
    """

    title: str
    unit: str
    series: dict[str, str]
    log_scale: bool = False
    smooth: bool = True
    colors: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Drawing:
    """A rendered chart.  legend: (label, number of the series colour); empty if a single line needs none."""

    title: str
    unit: str
    svg: str
    legend: tuple[tuple[str, int], ...] = ()


def draw_lines(log: pd.DataFrame, chart: Chart, links: dict[int, str] | None = None) -> Drawing | None:
    """Every iteration as a thin line, the moving average as a thick one; None without data.

    links: iteration → a place on the page, to which a point on the first line there leads.
    """
    columns = {name: log[name].dropna() for name in chart.series if name in log}
    columns = {n: c for n, c in columns.items() if len(c) and (not chart.log_scale or c.max() > 0)}
    if not columns:
        return None
    figure, axes = new_figure()
    numbers = {name: chart.colors.get(name, i) % len(SERIES) for i, name in enumerate(columns)}
    for name, column in columns.items():
        color = SERIES[numbers[name]]
        smooth = smoothed(column) if chart.smooth else None
        few = len(column) < FEWEST_WITHOUT_DOTS
        if smooth is None:
            axes.plot(*points(column, chart), color=color, linewidth=1.8, marker="o" if few else None, markersize=3.5)
        else:
            raw: dict[str, Any] = {"linewidth": 0.7, "marker": "." if few else None}
            axes.plot(*points(column, chart), color=color, alpha=0.3 if len(column) >= FEWEST_TO_FADE else 0.55, **raw)
            axes.plot(*points(smooth, chart), color=color, linewidth=1.9)
    add_links(axes, next(iter(columns.values())), chart, links or {})
    if chart.log_scale:
        axes.set_yscale("log")
        log_ticks(axes.yaxis, *axes.get_ylim())
    else:
        plain_ticks(axes)
    iteration_axis(axes, log.index)
    labels = tuple((chart.series[name], number) for name, number in numbers.items())
    is_named = len(labels) > 1 or chart.colors
    return Drawing(chart.title, chart.unit, as_svg(figure, chart.title), labels if is_named else ())


def add_links(axes: Axes, column: pd.Series, chart: Chart, links: dict[int, str]) -> None:
    """Mark the iterations of `links` on a line by points that lead to their places."""
    line = smoothed(column) if chart.smooth else None
    line = (column if line is None else line).dropna()
    marked = [iteration for iteration in links if iteration in line.index]
    if marked:
        dots = axes.scatter(marked, line[marked], s=60, color=SERIES[0], zorder=5, clip_on=False)
        dots.set_urls([links[iteration] for iteration in marked])


def points(column: pd.Series, chart: Chart) -> tuple[pd.Index, pd.Series]:
    """Iterations and values; values that a logarithmic axis cannot show become gaps."""
    shown = downsampled(column)
    return shown.index, shown.where(shown > 0) if chart.log_scale else shown


def smoothed(column: pd.Series) -> pd.Series | None:
    """A centred moving average over a tenth of the points, which does not lag; None for few points."""
    if len(column) < FEWEST_TO_SMOOTH:
        return None
    return column.rolling(max(3, len(column) // 10 | 1), center=True, min_periods=1).mean()


def downsampled(column: pd.Series) -> pd.Series:
    """`column`, or, if it is long, the minimum and maximum of every range."""
    if len(column) <= MOST_POINTS:
        return column
    stretches = np.array_split(np.arange(len(column)), MOST_POINTS // 2)
    values = column.to_numpy()
    kept = {edge for rows in stretches for edge in (rows[values[rows].argmin()], rows[values[rows].argmax()])}
    return column.iloc[sorted(kept)]


def phase_seconds(log: pd.DataFrame) -> pd.DataFrame:
    """Seconds of each phase by iteration, and the rest of it as "other"; only phases that took time."""
    seconds = pd.DataFrame({phase: log[f"time/{phase}_s"] for phase in PHASES if f"time/{phase}_s" in log})
    seconds = seconds.fillna(0.0)
    if "time/iteration_s" in log and len(seconds.columns):
        seconds["other"] = (log["time/iteration_s"] - seconds.sum(axis=1)).clip(lower=0).fillna(0.0)
    return seconds.loc[:, seconds.sum() > 0]


def draw_phases(seconds: pd.DataFrame) -> Drawing | None:
    """A stacked chart of `phase_seconds`; None if it is empty. The page's table of phases is its legend."""
    if not seconds.size:
        return None
    figure, axes = new_figure()
    steps = np.array_split(np.arange(len(seconds)), min(len(seconds), MOST_STEPS))
    means = np.stack([seconds.to_numpy()[rows].mean(axis=0) for rows in steps])  # [steps, phases]
    firsts = seconds.index.to_numpy()[[rows[0] for rows in steps]]
    edges = np.append(firsts, seconds.index[-1] + 1) - 0.5
    tops = np.cumsum(means, axis=1)
    for number, phase in enumerate(seconds.columns):
        below = tops[:, number - 1] if number else np.zeros(len(steps))
        axes.stairs(tops[:, number], edges, baseline=below, fill=True, color=SERIES[phase_color(phase)])
    plain_ticks(axes)
    iteration_axis(axes, seconds.index)
    return Drawing(PHASES_TITLE, "seconds", as_svg(figure, PHASES_TITLE))


def phase_color(phase: str) -> int:
    """The number of a phase's series colour."""
    return PHASES.get(phase, OTHER)


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
    summed = np.sum([histogram.counts for histogram in counted], axis=0)
    all_shares, last_shares = (np.array(counts) / np.sum(counts) for counts in (summed, counted[-1].counts))
    figure, axes = new_figure()
    if len(edges) > 2 and edges[0] >= 0 and edges[-1] > 100 * edges[1] > 0:
        edges[0] = edges[0] or edges[1] ** 2 / edges[2]
        axes.set_xscale("log")
        log_ticks(axes.xaxis, edges[0], edges[-1])
    axes.stairs(all_shares * 100, edges, fill=True, color=SERIES[0], alpha=0.45)
    axes.stairs(last_shares * 100, edges, color=SERIES[2], linewidth=1.5)
    axes.set_xlim(edges[0], edges[-1])
    plain_ticks(axes)
    axes.set_xlabel(unit)
    return Drawing(title, "% of tokens", as_svg(figure, title), (("all iterations", 0), ("last iteration", 2)))


def draw_spark(column: pd.Series) -> str:
    """A line without axes for a table, 100 × 20 units: at most 60 points, each a mean."""
    values = column.dropna().to_numpy(dtype=float)
    if not len(values):
        return ""
    means = np.array([part.mean() for part in np.array_split(values, min(len(values), 60))])
    span = np.ptp(means) or 1.0
    points = zip(np.linspace(1, 99, len(means)), 18 - 16 * (means - means.min()) / span, strict=True)
    path = " ".join(f"{x:.0f},{y:.1f}" for x, y in points)
    dot = f'<circle cx="50" cy="10" r="2" fill="var({VARIABLES[SERIES[0]]})"/>'
    line = f'<polyline points="{path}" fill="none" stroke="var({VARIABLES[SERIES[0]]})" stroke-width="1.3"/>'
    return f'<svg class="spark" viewBox="0 0 100 20" aria-hidden="true">{line if len(means) > 1 else dot}</svg>'


def new_figure() -> tuple[Figure, Axes]:
    """An empty figure in the page's style."""
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=GRID, labelcolor=MUTED, labelsize=9, length=3)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.xaxis.label.set(color=MUTED, fontsize=9)
    return figure, axes


def iteration_axis(axes: Axes, iterations: pd.Index) -> None:
    """Format the x axis: integer iterations, from the first to the last."""
    axes.set_xlabel("iteration")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlim(iterations[0] - 0.5, iterations[-1] + 0.5)


def plain_ticks(axes: Axes) -> None:
    """Format the y axis: a few values, written in full without a common factor or offset."""
    axes.yaxis.set_major_locator(MaxNLocator(4))
    if max(map(abs, axes.get_ylim())) < 1e-3:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.ticklabel_format(axis="y", style="plain", useOffset=False)


def log_ticks(axis: Axis, low: float, high: float) -> None:
    """Format a logarithmic axis: at most five powers of ten."""
    decades = max(1, int(np.ceil(np.log10(high / low) / 5)))
    axis.set_major_locator(LogLocator(10.0**decades, numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
    axis.set_minor_locator(LogLocator(10.0, subs=(), numticks=8))


def as_svg(figure: Figure, title: str) -> str:
    """A figure as an SVG element for the page: its text stays text, and size and colours are the page's."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # ids stay random: a page holds many figures
        figure.savefig(file, format="svg", transparent=True)
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text[text.index("<svg") :], flags=re.DOTALL)
    box = re.findall(r'viewBox="[^"]*"', text)[0]
    role = "group" if "<a " in text else "img"  # an image has no links for screen readers
    text = f'<svg {box} role="{role}" aria-label="{html.escape(title)}">{text[text.index(">") + 1 :]}'
    # The page sets the font, and nothing refers to the ids and styles of groups.
    text = re.sub(r'<g id="[^"]*"', "<g", text.replace("xlink:href", "href"))
    text = re.sub(r"<style.*?</style>| font-family:[^;]*;| transform=\"rotate\(-?0 [^\"]*\"", "", text)
    text = re.sub(r' (d|x|y|transform)="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), text)
    text = re.sub(r"\s*\n\s*", " ", text)
    for color, variable in VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    return text.strip()
