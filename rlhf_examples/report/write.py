"""Writes a run's logs as one self-contained HTML file: python -m rlhf_examples.report runs/demo. Of two runs it writes
their comparison: python -m rlhf_examples.report runs/first runs/second

It has a section for every step that logged metrics: the run's subdirectories, and the run itself.
"""

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pandas as pd
from markupsafe import Markup

from rlhf_examples.common.files import METRICS, SAMPLES, SETTINGS, printable, write_atomically
from rlhf_examples.common.run_log import Transcript, format_number, read_completions, read_metrics
from rlhf_examples.common.trackers import Histogram
from rlhf_examples.report.charts import LARGEST, Chart, Drawing, draw_histogram, draw_lines, draw_phases

REPORT, SUMMARY, PIPELINE = "report.html", "summary.json", "pipeline.json"
COMPARISON = "comparison.html"
SHOWN_PROMPTS = 4  # for a run that has not ended and has no samples.json

STEP_TITLES = {
    "sft": "Supervised fine-tuning",
    "reward": "Reward model",
    "reward_model": "Reward model",
    "ppo": "PPO",
    "grpo": "GRPO",
    "agent": "GRPO over several turns",
    "dpo": "DPO",
}
# The parts of a step's section, in order.
PARTS = {"learning": "Learning", "speed": "Time and memory", "numerics": "Sampler and trainer", "samples": "Samples"}
PARTS |= {"completions": "Completions while training", "metrics": "All metrics"}


def chart_rows(table: str, **options: bool) -> tuple[Chart, ...]:
    """The charts of a table: title | unit | metric: name in the legend, and so on. A single metric needs no name."""
    rows = [[cell.strip() for cell in line.split("|")] for line in table.replace("\\\n", "").strip().splitlines()]
    pairs = [[pair.partition(":")[::2] for pair in series.split(",")] for *_, series in rows]
    series = [{metric.strip(): label.strip() for metric, label in row} for row in pairs]
    return tuple(Chart(title, unit, each, **options) for (title, unit, _), each in zip(rows, series, strict=True))


# Metric names are TRL's. The charts of LEARNING come first.
LEARNING = chart_rows("""
Reward | score per completion | objective/scores: reward, reward: reward
Reward minus the KL penalty | per completion | objective/rlhf_reward
KL to the reference | nats per sequence | objective/kl
KL to the reference per token | nats per token | kl
Loss | training objective | loss: training, eval_loss: held out
Token accuracy | share | mean_token_accuracy: training, eval_mean_token_accuracy: held out
Preference accuracy | share of pairs | accuracy: training, rewards/accuracies: training, eval_accuracy: held out, \
    eval_rewards/accuracies: held out
Reward margin | chosen minus rejected | margin: training, rewards/margins: training, eval_margin: held out, \
    eval_rewards/margins: held out
Implicit rewards | beta × log ratio to the reference | rewards/chosen: chosen, rewards/rejected: rejected
Entropy | nats per sequence | objective/entropy
Entropy per token | nats per token | entropy
Completion length | tokens | completions/mean_length: mean, completions/min_length: shortest, \
    completions/max_length: longest
Truncated completions | share | completions/clipped_ratio
Standard deviation of rewards within groups | mean over groups | reward_std
Groups with equal rewards | share | frac_reward_zero_std
Tool calls | per conversation, and share of failed ones | tools/call_frequency: calls, tools/failure_frequency: failed
Policy loss | mean over tokens | loss/policy_avg
Value loss | mean over tokens | loss/value_avg
Probability ratio of new to old policy | mean over tokens | val/ratio
Approximate KL of the update | nats per token | policy/approxkl_avg
Clipped tokens | share | policy/clipfrac_avg: policy, val/clipfrac_avg: value, clip_ratio/region_mean: policy
Gradient norm | before clipping | grad_norm: model, val/grad_norm: critic
Explained variance of the critic | share | val/var_explained
""") + chart_rows("Learning rate | per optimizer step | learning_rate: rate, lr: rate", smooth=False)
SPEED = chart_rows("""
Generation | tokens per second | time/tokens_per_s
Reward functions that ran while others decoded | seconds | time/reward_overlapped_s
Training | TFLOP/s per rank | time/tflops_per_s
Model FLOPs utilization in training | share of the peak | time/mfu
""")
NUMERICS = chart_rows(
    """
Logprob differences of sampler and trainer | nats per token | sampling/sampling_logp_difference/mean: mean, \
    sampling/sampling_logp_difference/max: largest, \
    control/sampling_logp_difference/mean: control (trainer against itself) mean, \
    control/sampling_logp_difference/max: control (trainer against itself) largest
""",
    log_scale=True,
) + chart_rows("""
Importance sampling ratios | ratio | sampling/importance_sampling_ratio/mean: mean, \
    sampling/importance_sampling_ratio/min: minimum, sampling/importance_sampling_ratio/max: maximum
""")
CHARTED = {name for chart in (*LEARNING, *SPEED, *NUMERICS) for name in chart.series}
# The figures above a step's charts, after those of its evaluations: of each row the first metric that it has logged.
HEADLINES = (
    {"objective/scores": "Reward in training", "reward": "Reward in training", "loss": "Loss in training"},
    {"objective/kl": "KL, nats per sequence", "kl": "KL, nats per token"},
    {"accuracy": "Preference accuracy in training", "rewards/accuracies": "Preference accuracy in training"},
    {"completions/mean_length": "Completion length, tokens"},
    {"time/tokens_per_s": "Tokens per second"},
)
# Metrics of evaluations, rewards aside, whose figures come first.
HELD_OUT = {
    "eval_loss": "Loss",
    "eval_accuracy": "Preference accuracy",
    "eval_rewards/accuracies": "Preference accuracy",
}
# The pipeline's figures that come first: label and note.
SUMMARY_LABELS = {
    "gold_score": ("Gold score", "not used in training"),
    "kl": ("KL to the reference", "nats"),
    "grpo_exact_match": ("GRPO, exact match", "held-out problems"),
    "reward_accuracy": ("Reward model", "accuracy on held-out pairs"),
    "tokens_per_second": ("Tokens per second", ""),
    "sft_loss": ("SFT, loss", "held-out records"),
}


class Figure(NamedTuple):
    """A figure of a run, with its value before training if both are known, and their standard errors if they are.

    An unknown value or error is an empty text.
    """

    label: str
    now: float | str | None
    before: float | str | None = ""
    note: str = ""
    error: float | str = ""
    before_error: float | str = ""


@dataclass(frozen=True)
class Step:
    """The logs of a step of the run.

    log: a row for each iteration, numbers only, at most LARGEST; iteration 0 is the evaluation before training.
    not_finite: metric → iterations whose value was not finite.
    histograms: metric → its histograms, in order.
    """

    key: str
    title: str
    log: pd.DataFrame
    not_finite: dict[str, list[int]]
    histograms: dict[str, list[Histogram]]
    samples: list[dict]
    completions: pd.DataFrame
    settings: dict


def write_report(directory: Path) -> Path:
    """Write report.html from the logs under `directory`, and return its path. Call it on one rank, at any time of the
    run.

    Raises ValueError if nothing was logged there.
    """
    return write_page(Path(directory) / REPORT, [Path(directory)])


def write_comparison(first: Path, second: Path) -> Path:
    """Write comparison.html of two runs into the second one's directory, and return its path: what their settings
    differ in, their final figures, their curves over each other, and their last samples of the same prompts.

    Steps are compared by name; a run that is one step is compared with any other that is. Raises ValueError if a
    directory has no log, or the two have no step in common.
    """
    return write_page(Path(second) / COMPARISON, [Path(first), Path(second)])


def write_page(path: Path, directories: list[Path]) -> Path:
    """Write the page of a run, or of two that are compared, and return its path."""
    runs = [read_steps(directory) for directory in directories]
    groups = [steps for steps in itertools.product(*runs) if len({step.key for step in steps}) == 1]
    if not groups and all(len(run) == 1 for run in runs):
        groups = [tuple(run[0] for run in runs)]
    if not groups:
        keys = [", ".join(step.key for step in run) for run in runs]
        raise ValueError(f"the runs have no step in common: {' and '.join(keys)}")
    names = [directory.resolve().name for directory in directories]
    names = names if len({*names}) == len(names) else [str(directory) for directory in directories]
    environment = jinja2.Environment(  # everything is escaped but our SVG
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html").render(
        compared=len(runs) > 1,
        names=names,
        written=f"{datetime.now():%Y-%m-%d %H:%M}",
        parts=PARTS,
        summary=compared([summary_figures(read_json(directory / SUMMARY, {})) for directory in directories]),
        settings=setting_rows(*map(run_settings, directories)),
        steps=[step_section(steps, names) for steps in groups],
    )
    write_atomically(path, page)
    return path


def read_steps(directory: Path) -> list[Step]:
    """The steps with logged metrics: in pipeline.json's order, others by time, the run's own last.

    Raises ValueError if there are none.
    """
    directories = [path.parent for path in directory.glob(f"*/{METRICS}")]
    names = list(read_json(directory / PIPELINE, {}).get("steps", []))
    listed = [path for name in names for path in directories if path.name == name]
    unlisted = sorted(set(directories) - set(listed), key=lambda path: (path / METRICS).stat().st_mtime)
    steps = [*listed, *unlisted, *([directory] if (directory / METRICS).is_file() else [])]
    if not steps:
        raise ValueError(
            f"there is no {METRICS} in {str(directory)!r} or in its subdirectories; give the directory of a run"
        )
    return [read_step(path) for path in steps]


def read_step(directory: Path) -> Step:
    """The logs of a step's directory."""
    rows = read_metrics(directory)
    not_finite: dict[str, list[int]] = defaultdict(list)
    histograms: dict[str, list[Histogram]] = defaultdict(list)
    for row in rows:
        for name, value in list(row.items()):
            if isinstance(value, Histogram):
                histograms[name].append(row.pop(name))
            elif math.isnan(value):
                not_finite[name].append(row["iteration"])
    log = pd.DataFrame(rows or {"iteration": []}, dtype=float).drop_duplicates("iteration", keep="last")
    key = directory.resolve().name
    samples = read_json(directory / SAMPLES, [])
    if not all(isinstance(sample, dict) for sample in samples):
        raise ValueError(f"{directory / SAMPLES} has samples that are no objects; delete the file")
    return Step(
        key=key,
        title=title_of(key, read_json(directory.parent / PIPELINE, {}).get("steps", {}).get(key, {})),
        log=log.astype({"iteration": int}).set_index("iteration").sort_index().clip(-LARGEST, LARGEST),
        not_finite=not_finite,
        histograms=histograms,
        samples=samples,
        completions=read_completions(directory),
        settings=read_json(directory / SETTINGS, {}),
    )


def run_settings(directory: Path) -> dict:
    """The settings of a run of several steps; {} for a run of one step, which are shown as the step's."""
    return {} if (directory / METRICS).is_file() else read_json(directory / SETTINGS, {})


def title_of(name: str, settings: dict) -> str:
    """A step's title, by its name in a pipeline and its settings there: what its script does, and the name if that says
    more.
    """
    script = STEP_TITLES.get(settings.get("script", ""))
    return STEP_TITLES.get(name) or (f"{script}: {name}" if script else name)


def step_section(steps: Sequence[Step], names: list[str]) -> dict:
    """The template's values for a step of a run, or of two that are compared."""
    logs, last, alone = [step.log for step in steps], steps[-1], len(steps) == 1
    log = pd.concat(logs)
    trained = log[log.index > 0]
    completions = completions_by_prompt(last) if alone else []
    links = {i: f"#{last.key}-iteration-{i}" for i in last.completions["iteration"]} if completions else {}
    memory, size = memory_chart(log)
    phases = [drawing for drawing in [draw_phases(trained)] if drawing and alone]
    return {
        "key": last.key,
        "title": last.title,
        "iterations": trained.index.nunique(),
        "duration": duration(log["time/iteration_s"].sum()) if alone and "time/iteration_s" in log else "",
        "figures": compared([step_figures(step) for step in steps]),
        "not_finite": [
            line if alone else f"{name}: {line}"
            for name, step in zip(names, steps, strict=True)
            for line in not_finite(step)
        ],
        "settings": setting_rows(*(step.settings for step in steps)),
        "learning": draw_charts((*LEARNING, *other_charts(log)), logs, names, links),
        "phases": phases,
        "speed": phases + draw_charts(SPEED, logs, names) + draw_charts([memory], [log / size for log in logs], names),
        "numerics": (draw_histograms(last.histograms) if alone else []) + draw_charts(NUMERICS, logs, names),
        "samples": shown_samples(steps, names),
        "completions": completions,
        "metrics": metric_rows(log) if alone else [],
    }


def draw_charts(
    charts: Iterable[Chart], logs: list[pd.DataFrame], names: list[str], links: dict[int, str] | None = None
) -> list[Drawing]:
    """The charts for which a log has data, rendered. Arguments as in `draw_lines`."""
    return [drawing for chart in charts if (drawing := draw_lines(chart, logs, names, links))]


def other_charts(log: pd.DataFrame) -> list[Chart]:
    """A chart for each evaluation metric and reward that no other chart shows."""
    names = [name for name in log if name.startswith(("eval", "rewards/")) and not name.endswith("_stderr")]
    titles = {name: re.sub("[/_]+", " ", name).capitalize() for name in names if name not in CHARTED}
    return [Chart(title, "held out" if name.startswith("eval") else "", {name: name}) for name, title in titles.items()]


def memory_chart(log: pd.DataFrame) -> tuple[Chart, int]:
    """A chart of all memory metrics, and the size of its unit, MiB or GiB by the largest, in bytes."""
    names = [name for name in log if name.startswith("memory/") and name.endswith("bytes")]
    unit, size = ("GiB", 2**30) if (log[names] >= 2**30).any(axis=None) else ("MiB", 2**20)
    labels = {name: name.removeprefix("memory/").removesuffix("bytes").strip("_").replace("_", " ") for name in names}
    return Chart("Memory per rank", unit, labels, smooth=False), size


def draw_histograms(histograms: dict[str, list[Histogram]]) -> list[Drawing]:
    """A chart for each histogram."""
    title = "Logprob differences of sampler and trainer, by token"
    drawings = [draw_histogram(title if "logp_diff" in n else n, "nats", each) for n, each in histograms.items()]
    return [drawing for drawing in drawings if drawing]


def compared(figures: list[list[Figure]]) -> list[Figure]:
    """The figures of one run; of two those of both, with the first run's in the place of those before training."""
    if len(figures) == 1:
        return figures[0]
    first = {figure.label: figure for figure in figures[0]}
    both = [(first[figure.label], figure) for figure in figures[1] if figure.label in first]
    return [Figure(b.label, b.now, a.now, error=b.error, before_error=a.error) for a, b in both]


def step_figures(step: Step) -> list[Figure]:
    """The evaluations before and after training with standard errors, then the metrics of HEADLINES: means over the
    first and the last tenth of the iterations.
    """
    log, figures = step.log.dropna(axis="columns", how="all"), []
    for name in (name for name in log if name.startswith("eval_") and not name.endswith("_stderr")):
        if name in HELD_OUT or not ("/" in name or name in CHARTED):  # the mean of a reward
            column = log[name].dropna()
            before, after = column.index[0], exported_iteration(step, column)
            errors = log.get(f"{name}_stderr", pd.Series(dtype=float)).dropna()
            label = HELD_OUT.get(name) or name.removeprefix("eval_").replace("_", " ").capitalize()
            figure = Figure(f"{label}, held out", column[after], error=errors.get(after, ""))
            first = {"before": column[before], "before_error": errors.get(before, "")} if before != after else {}
            figures.append(figure._replace(**first))
    logged = [[(label, log[name].dropna()) for name, label in row.items() if name in log][:1] for row in HEADLINES]
    for label, column in itertools.chain(*logged):
        tenth = max(1, len(column) // 10)
        before = column.iloc[:tenth].mean() if len(column) > 1 else ""
        figures.append(Figure(label, column.iloc[-tenth:].mean(), before))
    return figures


def exported_iteration(step: Step, column: pd.Series) -> int:
    """The iteration whose model is exported: the last evaluated one, or the best with `load_best_model_at_end`."""
    metric = step.settings.get("metric_for_best_model") or ""
    metric = metric if metric.startswith("eval_") else f"eval_{metric}"
    values = step.log.get(metric, pd.Series(dtype=float)).dropna()
    values = values[(values.index > 0) & values.index.isin(column.index)]
    if not step.settings.get("load_best_model_at_end") or not len(values):
        return column.index[-1]
    greater = step.settings.get("greater_is_better")
    greater = not metric.endswith("loss") if greater is None else greater
    return values.idxmax() if greater else values.idxmin()


def summary_figures(summary: dict) -> list[Figure]:
    """The pipeline's figures: known ones first, with labels, then the others by their names. NAME_before and NAME_after
    are one figure; one that has a standard error (`NAME_stderr`) is shown with it.
    """
    rate, hf_rate = summary.get("tokens_per_second"), summary.get("hf_tokens_per_second")
    speedup = f"{rate / hf_rate:.1f} × Hugging Face's {format_number(hf_rate)}" if rate and hf_rate else ""
    hidden = {f"{name}_stderr" for name in summary} | ({"hf_tokens_per_second"} if speedup else set())
    hidden |= {f"{name.removesuffix('_after')}_before" for name in summary if name.endswith("_after")}
    names = {name: name.removesuffix("_after") for name in summary if name not in hidden}
    figures = []
    for name, stem in sorted(names.items(), key=lambda item: [*SUMMARY_LABELS, item[1]].index(item[1])):
        label, note = SUMMARY_LABELS.get(stem, (stem.replace("_", " ").capitalize(), ""))
        before = f"{stem}_before" if stem != name else ""
        note = speedup if name == "tokens_per_second" else note
        errors = [summary.get(f"{each}_stderr", "") for each in (name, before)]
        figures.append(Figure(label, summary[name], summary.get(before, ""), note, errors[0], errors[1]))
    return figures


def not_finite(step: Step) -> list[str]:
    """A line for each metric that was NaN or infinite, with its iterations."""
    lines = []
    for name, iterations in step.not_finite.items():
        more = f" and {len(iterations) - 5} more" if len(iterations) > 5 else ""
        lines.append(f"{name} in iteration {', '.join(map(str, iterations[:5]))}{more}")
    return lines


def metric_rows(log: pd.DataFrame) -> list[tuple]:
    """For each metric its name, and the first, last, minimum and maximum value; None without values."""
    columns = {name: log[name].dropna() for name in sorted(log)}
    picked = {name: (c.iloc[0], c.iloc[-1], c.min(), c.max()) if len(c) else (None,) * 4 for name, c in columns.items()}
    return [*picked.items()]


Side = tuple[str, float | str | None, Transcript, str]  # label, reward or "", text, id of the element


def shown_samples(steps: Sequence[Step], names: list[str]) -> list[tuple[str, list[Side]]]:
    """For each sample its prompt, and its completions before and after training; of two runs those after training."""
    if len(steps) == 1:
        groups = [[("before", "before", sample), ("after", "after", sample)] for sample in steps[0].samples]
    else:
        first = {str(sample.get("prompt")): sample for sample in steps[0].samples}
        pairs = [(first.get(str(sample.get("prompt"))), sample) for sample in steps[1].samples]
        groups = [[(names[0], "after", a), (names[1], "after", b)] for a, b in pairs if a is not None]
    return [
        (
            str(group[0][2].get("prompt", "")),
            [(label, sample.get(f"reward_{key}", ""), sample.get(key, ""), "") for label, key, sample in group],
        )
        for group in groups
    ]


def completions_by_prompt(step: Step) -> list[tuple[str, list[Side]]]:
    """For the first held-out prompts, as many as there are samples: the prompt, and its completion by iteration."""
    table, prompts = step.completions, []
    score = next((name for name in table if name not in ("iteration", "prompt", "completion")), "")
    for number, rows in table.groupby(table.groupby("iteration").cumcount()):
        sides = []
        for row in rows.to_dict("records"):
            where = f"iteration {row['iteration']}"
            id_ = f"{step.key}-{where.replace(' ', '-')}" if number == 0 else ""
            sides.append((where, row.get(score, ""), row["completion"], id_))
        prompts.append((rows["prompt"].iloc[0], sides))
    return prompts[: len(step.samples) or SHOWN_PROMPTS]


def setting_rows(*runs: dict) -> list[tuple[str, str]]:
    """The settings of a run as (name, text); of two those in which they differ."""
    if len(runs) == 1:
        return [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in runs[0].items()]
    values = {name: [json.dumps(run.get(name)) for run in runs] for name in {**runs[0], **runs[1]}}
    return [(name, f"{a} → {b}") for name, (a, b) in values.items() if a != b]


def shown(value: object) -> object:
    """A value for display: numbers are short, and a text has only characters that HTML can hold."""
    if isinstance(value, Markup):
        return value
    return format_number(value) if isinstance(value, int | float | None) else printable(str(value))


def duration(seconds: float) -> str:
    """Seconds as hours and minutes, minutes and seconds, or seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def read_json(path: Path, default: Any) -> Any:
    """The content of a JSON file, or `default` if it does not exist. Raises ValueError for another type."""
    if not path.is_file():
        return default
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); delete the file") from error
    if not isinstance(content, type(default)):
        raise ValueError(f"{path} is no JSON {'array' if default == [] else 'object'}; delete the file")
    return content
