"""Writes a run's logs as one self-contained HTML file: python -m rlhf_examples.report runs/demo. Of two runs it writes
their comparison: python -m rlhf_examples.report runs/first runs/second

It has a section for every step that logged metrics: the run's subdirectories, and the run itself.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from rlhf_examples.common.files import METRICS, SAMPLES, SETTINGS, printable, write_atomically
from rlhf_examples.common.run_log import Transcript, format_number, read_completions, read_metrics
from rlhf_examples.common.trackers import Histogram
from rlhf_examples.report.charts import (
    Chart,
    Drawing,
    draw_histogram,
    draw_lines,
    draw_phases,
    draw_spark,
    phase_color,
    phase_seconds,
)
from rlhf_examples.report.page import PAGE

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

# Metric names are TRL's. The charts of LEARNING come first.
LEARNING = (
    Chart("Reward", "score per completion", {"objective/scores": "reward", "reward": "reward"}),
    Chart("Reward minus the KL penalty", "per completion", {"objective/rlhf_reward": "reward"}),
    Chart("KL to the reference", "nats per sequence", {"objective/kl": "KL"}),
    Chart("KL to the reference per token", "nats per token", {"kl": "KL"}),
    Chart("Loss", "training objective", {"loss": "training", "eval_loss": "held out"}),
    Chart("Token accuracy", "share", {"mean_token_accuracy": "training", "eval_mean_token_accuracy": "held out"}),
    Chart(
        "Preference accuracy",
        "share of pairs",
        {
            "accuracy": "training",
            "rewards/accuracies": "training",
            "eval_accuracy": "held out",
            "eval_rewards/accuracies": "held out",
        },
    ),
    Chart(
        "Reward margin",
        "chosen minus rejected",
        {
            "margin": "training",
            "rewards/margins": "training",
            "eval_margin": "held out",
            "eval_rewards/margins": "held out",
        },
    ),
    Chart(
        "Implicit rewards",
        "beta × log ratio to the reference",
        {"rewards/chosen": "chosen", "rewards/rejected": "rejected"},
    ),
    Chart("Entropy", "nats per sequence", {"objective/entropy": "entropy"}),
    Chart("Entropy per token", "nats per token", {"entropy": "entropy"}),
    Chart(
        "Completion length",
        "tokens",
        {
            "completions/mean_length": "mean",
            "completions/min_length": "shortest",
            "completions/max_length": "longest",
        },
    ),
    Chart("Truncated completions", "share", {"completions/clipped_ratio": "truncated"}),
    Chart("Standard deviation of rewards within groups", "mean over groups", {"reward_std": "deviation"}),
    Chart("Groups with equal rewards", "share", {"frac_reward_zero_std": "share"}),
    Chart(
        "Tool calls",
        "per conversation, and share of failed ones",
        {"tools/call_frequency": "calls", "tools/failure_frequency": "failed"},
    ),
    Chart("Policy loss", "mean over tokens", {"loss/policy_avg": "loss"}),
    Chart("Value loss", "mean over tokens", {"loss/value_avg": "loss"}),
    Chart("Probability ratio of new to old policy", "mean over tokens", {"val/ratio": "ratio"}),
    Chart("Approximate KL of the update", "nats per token", {"policy/approxkl_avg": "KL"}),
    Chart(
        "Clipped tokens",
        "share",
        {"policy/clipfrac_avg": "policy", "val/clipfrac_avg": "value", "clip_ratio/region_mean": "policy"},
    ),
    Chart("Gradient norm", "before clipping", {"grad_norm": "model", "val/grad_norm": "critic"}),
    Chart("Explained variance of the critic", "share", {"val/var_explained": "explained"}),
    Chart("Learning rate", "per optimizer step", {"learning_rate": "rate", "lr": "rate"}, smooth=False),
)
SPEED = (
    Chart("Generation", "tokens per second", {"time/tokens_per_s": "tokens"}),
    Chart("Reward functions that ran while others decoded", "seconds", {"time/reward_overlapped_s": "overlapped"}),
    Chart("Training", "TFLOP/s per rank", {"time/tflops_per_s": "TFLOP/s"}),
    Chart("Model FLOPs utilization in training", "share of the peak", {"time/mfu": "MFU"}),
)
NUMERICS = (
    Chart(
        "Logprob differences of sampler and trainer",
        "nats per token",
        {
            "sampling/sampling_logp_difference/mean": "mean",
            "sampling/sampling_logp_difference/max": "largest",
            "control/sampling_logp_difference/mean": "control: trainer against itself, mean",
            "control/sampling_logp_difference/max": "control: trainer against itself, largest",
        },
        log_scale=True,
    ),
    Chart(
        "Importance sampling ratios",
        "ratio",
        {
            f"sampling/importance_sampling_ratio/{name}": label
            for name, label in (("mean", "mean"), ("min", "minimum"), ("max", "maximum"))
        },
    ),
)
CHARTED = {name for chart in (*LEARNING, *SPEED, *NUMERICS) for name in chart.series}
# The figures above a step's charts: the first metric of each row that the step has logged.
HEADLINES = (
    {"objective/scores": "Reward", "reward": "Reward", "eval_loss": "Loss, held out", "loss": "Loss"},
    {"objective/kl": "KL, nats per sequence", "kl": "KL, nats per token"},
    {
        "eval_accuracy": "Preference accuracy, held out",
        "eval_rewards/accuracies": "Preference accuracy, held out",
        "accuracy": "Preference accuracy",
        "rewards/accuracies": "Preference accuracy",
    },
    {"completions/mean_length": "Completion length, tokens"},
    {"time/tokens_per_s": "Tokens per second"},
)


@dataclass(frozen=True)
class Figure:
    """A figure of a run, with its value before training if both are known, and their standard errors if they are."""

    label: str
    now: str
    before: str = ""
    note: str = ""
    error: str = ""
    before_error: str = ""


@dataclass(frozen=True)
class Step:
    """The logs of a step of the run.

    log: a row for each iteration, numbers only.  not_finite: metric → iterations whose value was not finite.
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
    directory = Path(directory)
    steps = [read_step(path) for path in step_directories(directory)]
    if not steps:
        raise ValueError(
            f"there is no {METRICS} in {str(directory)!r} or in its subdirectories; give the directory of a run"
        )
    page = PAGE.render(
        kind="Training report",
        name=directory.resolve().name,
        written=f"{datetime.now():%Y-%m-%d %H:%M}",
        summary=summary_figures(read_json(directory / SUMMARY, {})),
        settings=setting_rows(run_settings(directory)),
        settings_title="Settings",
        settings_open=False,
        steps=[step_section(step) for step in steps],
        sides=(("before", "before"), ("after", "after")),
        samples_title="Samples before and after training",
        arrow="A number with an arrow is the mean of the first tenth of the run, then that of the last tenth.",
    )
    write_atomically(directory / REPORT, page)
    return directory / REPORT


def write_comparison(first: Path, second: Path) -> Path:
    """Write comparison.html of two runs into the second one's directory, and return its path: what their settings
    differ in, their final figures, their curves over each other, and their last samples of the same prompts.

    Steps are compared by name; a run that is one step is compared with any other that is. Raises ValueError if a
    directory has no log, or the two have no step in common.
    """
    directories = [Path(first), Path(second)]
    steps = [[read_step(path) for path in step_directories(directory)] for directory in directories]
    for directory, own in zip(directories, steps, strict=True):
        if not own:
            raise ValueError(f"there is no {METRICS} in {str(directory)!r} or in its subdirectories")
    pairs = [(one, other) for one in steps[0] for other in steps[1] if one.key == other.key]
    if not pairs and len(steps[0]) == len(steps[1]) == 1:
        pairs = [(steps[0][0], steps[1][0])]
    if not pairs:
        keys = [", ".join(step.key for step in own) for own in steps]
        raise ValueError(f"the runs have no step in common: {keys[0]} and {keys[1]}")
    names = [directory.resolve().name for directory in directories]
    if names[0] == names[1]:
        names = [str(directory) for directory in directories]
    summaries = [read_json(directory / SUMMARY, {}) for directory in directories]
    page = PAGE.render(
        kind="Comparison of two runs",
        name=" and ".join(names),
        written=f"{datetime.now():%Y-%m-%d %H:%M}",
        summary=[
            Figure(name.removesuffix("_after").replace("_", " "), format_number(now), format_number(summaries[0][name]))
            for name, now in summaries[1].items()
            if isinstance(now, int | float) and name in summaries[0] and not name.endswith(("_stderr", "_before"))
        ],
        settings=different(*map(run_settings, directories)),
        settings_title="Settings that differ",
        settings_open=True,
        steps=[compared_section(*pair, names) for pair in pairs],
        sides=(("before", names[0]), ("after", names[1])),
        samples_title="Samples of the same prompts after training",
        arrow=f"A number with an arrow: {names[0]}, then {names[1]}; of a step the means over the last tenth.",
    )
    write_atomically(directories[1] / COMPARISON, page)
    return directories[1] / COMPARISON


def compared_section(one: Step, other: Step, names: list[str]) -> dict:
    """The template's values for a step of two runs."""
    logs = [
        step.log.loc[:, [name for name in step.log if name in CHARTED or name.startswith(("eval", "rewards/"))]]
        for step in (one, other)
    ]
    both = pd.concat(
        [log.rename(columns=lambda name, run=run: f"{run}/{name}") for run, log in enumerate(logs)], axis=1
    )
    charts = {
        group: [overlay(chart, logs, names) for chart in of_group]
        for group, of_group in (
            ("learning", (*LEARNING, *other_charts(pd.concat(logs)))),
            ("speed", SPEED),
            ("numerics", NUMERICS),
        )
    }
    drawn = {group: draw_charts(both, of_group) for group, of_group in charts.items()}
    figures = [headline_figures(step.log) for step in (one, other)]
    by_label = {figure.label: figure.now for figure in figures[0]}
    last = {sample.get("prompt"): sample for sample in one.samples}
    samples = [
        sample_of(
            {
                "prompt": sample["prompt"],
                "before": last[sample["prompt"]].get("after", ""),
                "after": sample.get("after", ""),
                **{
                    f"reward_{side}": each["reward_after"]
                    for side, each in (("before", last[sample["prompt"]]), ("after", sample))
                    if "reward_after" in each
                },
            }
        )
        for sample in other.samples
        if sample.get("prompt") in last
    ]
    has = {
        ("learning", "Learning"): True,
        ("speed", "Time and memory"): drawn["speed"],
        ("numerics", "Sampler and trainer"): drawn["numerics"],
        ("samples", "Samples"): samples,
    }
    return {
        "key": other.key,
        "title": other.title,
        "iterations": len(both),
        "duration": "",
        "figures": [Figure(f.label, f.now, by_label[f.label]) for f in figures[1] if f.label in by_label],
        **drawn,
        "phases": None,
        "phase_rows": [],
        "not_finite": [
            f"{name}: {line}" for name, step in zip(names, (one, other), strict=True) for line in not_finite(step)
        ],
        "samples": samples,
        "completions": [],
        "settings": different(one.settings, other.settings),
        "metrics": [],
        "parts": [part for part, there in has.items() if there],
    }


def overlay(chart: Chart, logs: list[pd.DataFrame], names: list[str]) -> Chart:
    """A chart with a line for each metric of each of two runs."""
    logged = [name for name in chart.series if any(name in log for log in logs)]
    series = {
        f"{run}/{name}": f"{run_name}: {chart.series[name]}" if len(logged) > 1 else run_name
        for name in logged
        for run, run_name in enumerate(names)
    }
    return replace(chart, series=series, colors={name: number for number, name in enumerate(series)})


def different(one: dict, other: dict) -> list[tuple[str, str]]:
    """The settings in which two runs differ, as (name, text)."""
    values = {name: [json.dumps(run.get(name)) for run in (one, other)] for name in {**one, **other}}
    return [(name, printable(f"{a} → {b}")) for name, (a, b) in values.items() if a != b]


def run_settings(directory: Path) -> dict:
    """The settings of a run of several steps; {} for a run of one step, which are shown as the step's."""
    return {} if (directory / METRICS).is_file() else read_json(directory / SETTINGS, {})


def step_directories(directory: Path) -> list[Path]:
    """Directories with logged metrics: steps in pipeline.json's order, others by time, the run's own last."""
    directories = [path.parent for path in directory.glob(f"*/{METRICS}")]
    names = list(read_json(directory / PIPELINE, {}).get("steps", []))
    listed = [path for name in names for path in directories if path.name == name]
    unlisted = sorted(set(directories) - set(listed), key=lambda path: (path / METRICS).stat().st_mtime)
    return [*listed, *unlisted, *([directory] if (directory / METRICS).is_file() else [])]


def read_step(directory: Path) -> Step:
    """The logs of a step's directory."""
    rows = read_metrics(directory)
    iterations = [row.pop("iteration") for row in rows]
    numbers = [{name: v for name, v in row.items() if not isinstance(v, Histogram)} for row in rows]
    not_finite: dict[str, list[int]] = defaultdict(list)
    histograms: dict[str, list[Histogram]] = defaultdict(list)
    for iteration, row in zip(iterations, rows, strict=True):
        for name, value in row.items():
            if isinstance(value, Histogram):
                histograms[name].append(value)
            elif math.isnan(value):
                not_finite[name].append(iteration)
    key = directory.resolve().name
    return Step(
        key=key,
        title=title_of(key, read_json(directory.parent / PIPELINE, {}).get("steps", {}).get(key, {})),
        log=pd.DataFrame(numbers, index=pd.Index(iterations, dtype=int), dtype=float),
        not_finite=not_finite,
        histograms=histograms,
        samples=read_json(directory / SAMPLES, []),
        completions=read_completions(directory),
        settings=read_json(directory / SETTINGS, {}),
    )


def title_of(name: str, settings: dict) -> str:
    """A step's title, by its name in a pipeline and its settings there: what its script does, and the name if that says
    more."""
    if name in STEP_TITLES:
        return STEP_TITLES[name]
    script = settings.get("script", "")
    return f"{STEP_TITLES[script]}: {name}" if script in STEP_TITLES else name


def step_section(step: Step) -> dict:
    """The template's values for a step."""
    log, seconds = step.log, phase_seconds(step.log)
    completions = completions_by_prompt(step.completions, len(step.samples) or SHOWN_PROMPTS)
    shown = [iteration for iteration, *_ in completions[0][1]] if completions else []
    links = {iteration: f"#{step.key}-iteration-{iteration}" for iteration in shown}
    section = {
        "key": step.key,
        "title": step.title,
        "iterations": len(log),
        "duration": duration(log["time/iteration_s"].sum()) if "time/iteration_s" in log else "",
        "figures": headline_figures(log),
        "learning": draw_charts(log, (*LEARNING, *other_charts(log)), links),
        "phases": draw_phases(seconds),
        "phase_rows": phase_rows(seconds),
        "not_finite": not_finite(step),
        "speed": [*draw_charts(log, SPEED), *draw_memory(log)],
        "numerics": [*draw_histograms(step.histograms), *draw_charts(log, NUMERICS)],
        "samples": [sample_of(sample) for sample in step.samples],
        "completions": completions,
        "settings": setting_rows(step.settings),
        "metrics": metric_rows(log),
    }
    has = {
        ("learning", "Learning"): True,
        ("speed", "Time and memory"): section["phases"] or section["speed"],
        ("numerics", "Sampler and trainer"): section["numerics"],
        ("samples", "Samples"): section["samples"],
        ("completions", "Completions while training"): completions,
        ("metrics", "All metrics"): section["metrics"],
    }
    return {**section, "parts": [part for part, there in has.items() if there]}


def draw_charts(log: pd.DataFrame, charts: Iterable[Chart], links: dict[int, str] | None = None) -> list[Drawing]:
    """The charts for which the log has data, rendered.  links: iteration → where a point there leads."""
    drawings = (draw_lines(log, chart, links) for chart in charts)
    return [drawing for drawing in drawings if drawing]


def other_charts(log: pd.DataFrame) -> list[Chart]:
    """A chart for each evaluation metric and reward that no other chart shows."""
    names = [name for name in log if name.startswith(("eval", "rewards/")) and not name.endswith("_stderr")]
    names = [name for name in names if name not in CHARTED]
    titles = {name: re.sub("[/_]+", " ", name).capitalize() for name in names}
    return [Chart(titles[name], "held out" if name.startswith("eval") else "", {name: name}) for name in names]


def draw_memory(log: pd.DataFrame) -> list[Drawing]:
    """All memory metrics in one chart, in MiB or GiB by the largest."""
    names = [name for name in log if name.startswith("memory/") and name.endswith("bytes")]
    largest = log[names].max().max() if names else math.nan
    unit, size = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    labels = {name: name.removeprefix("memory/").removesuffix("bytes").strip("_").replace("_", " ") for name in names}
    return draw_charts(log / size, [Chart("Memory per rank", unit, labels, smooth=False)])


def draw_histograms(histograms: dict[str, list[Histogram]]) -> list[Drawing]:
    """A chart for each histogram."""
    titles = {
        name: "Logprob differences of sampler and trainer, by token" for name in histograms if "logp_diff" in name
    }
    drawings = (draw_histogram(titles.get(name, name), "nats", histograms[name]) for name in histograms)
    return [drawing for drawing in drawings if drawing]


def headline_figures(log: pd.DataFrame) -> list[Figure]:
    """The metrics of HEADLINES: means over the first and the last tenth of the iterations."""
    columns_by_row = [[(label, log[n].dropna()) for n, label in row.items() if n in log] for row in HEADLINES]
    figures = []
    for label, column in [row[0] for row in columns_by_row if row]:
        tenth = max(1, len(column) // 10)
        before = format_number(column[:tenth].mean()) if len(column) > 1 else ""
        figures += [Figure(label, format_number(column[-tenth:].mean()), before)] if len(column) else []
    return figures


def summary_figures(summary: dict) -> list[Figure]:
    """The pipeline's figures: known ones first, with labels, then the others by their names. NAME_before and NAME_after
    are one figure; one that has a standard error (`NAME_stderr`) is shown with it.
    """
    texts = {
        name: format_number(value) if isinstance(value, int | float | None) else str(value)
        for name, value in summary.items()
    }
    remaining = {
        name: text for name, text in texts.items() if name.removesuffix("_stderr") not in texts.keys() - {name}
    }

    def figure(label: str, now: str, before: str, note: str = "") -> Figure:
        del remaining[now]
        before_text = remaining.pop(before, "")
        errors = [texts.get(f"{name}_stderr", "") for name in (now, before)]
        return Figure(label, texts[now], before_text, note, errors[0], errors[1] if before_text else "")

    rate, hf_rate = summary.get("tokens_per_second"), summary.get("hf_tokens_per_second")
    speedup = f"{rate / hf_rate:.1f} × Hugging Face's {format_number(hf_rate)}" if rate and hf_rate else ""
    labelled = [
        ("Gold score", "gold_score_after", "gold_score_before", "not used in training"),
        ("KL to the reference", "kl", "", "nats"),
        ("GRPO, exact match", "grpo_exact_match_after", "grpo_exact_match_before", "held-out problems"),
        ("Reward model", "reward_accuracy", "", "accuracy on held-out pairs"),
        ("Tokens per second", "tokens_per_second", "", speedup),
        ("SFT, loss", "sft_loss_after", "sft_loss_before", "held-out records"),
    ]
    figures = [figure(label, now, before, note) for label, now, before, note in labelled if now in remaining]
    if speedup:
        del remaining["hf_tokens_per_second"]
    for name in list(remaining):
        stem = name.removesuffix("_before")
        if name in remaining and not (name != stem and f"{stem}_after" in remaining):
            stem = name.removesuffix("_after")
            figures.append(figure(stem.replace("_", " ").capitalize(), name, f"{stem}_before" if stem != name else ""))
    return figures


def phase_rows(seconds: pd.DataFrame) -> list[tuple[str, int, str, str]]:
    """For each phase its name, the number of its colour, mean seconds of an iteration and share of the total time;
    the top of the stack first.
    """
    shares = 100 * seconds.sum() / seconds.to_numpy().sum()
    return [(p, phase_color(p), f"{seconds[p].mean():.3f}", f"{shares[p]:.1f} %") for p in reversed(seconds.columns)]


def not_finite(step: Step) -> list[str]:
    """A line for each metric that was NaN or infinite, with its iterations."""
    lines = []
    for name, iterations in step.not_finite.items():
        more = f" and {len(iterations) - 5} more" if len(iterations) > 5 else ""
        lines.append(f"{name} in iteration {', '.join(map(str, iterations[:5]))}{more}")
    return lines


def metric_rows(log: pd.DataFrame) -> list[dict[str, str]]:
    """For each metric its name, a spark line, and the first, last, least and greatest value."""
    rows = []
    for name in sorted(log):
        column = log[name].dropna()
        figures = (column.iloc[0], column.iloc[-1], column.min(), column.max()) if len(column) else (None,) * 4
        rows.append(
            {"name": name, "spark": draw_spark(column), "figures": [format_number(figure) for figure in figures]}
        )
    return rows


def turns_of(text: Transcript) -> list[tuple[str, str]]:
    """The roles and texts of a conversation's turns; of a text one turn without a role, of an empty one none."""
    turns = [{"role": "", "text": text}] * bool(text) if isinstance(text, str) else text
    return [(printable(turn["role"]), printable(turn["text"])) for turn in turns]


def sample_of(sample: dict) -> dict[str, str | list[tuple[str, str]]]:
    """A sample as text that HTML can hold."""
    texts = {name: turns_of(sample.get(name, "")) for name in ("before", "after")}
    rewards = {name: format_number(sample[name]) for name in ("reward_before", "reward_after") if name in sample}
    prompt = printable(str(sample.get("prompt", "")))
    return {"reward_before": "", "reward_after": "", "prompt": prompt, **texts, **rewards}


def completions_by_prompt(
    completions: pd.DataFrame, num_prompts: int
) -> list[tuple[str, list[tuple[int, list[tuple[str, str]], str]]]]:
    """For the first `num_prompts` held-out prompts: the prompt, and its completion's turns and score by iteration."""
    scores = [name for name in completions.columns if name not in ("iteration", "prompt", "completion")]
    prompts = []
    for _, rows in completions.groupby(completions.groupby("iteration").cumcount()):
        first_scores = rows[scores[0]] if scores else [None] * len(rows)
        texts = zip(rows["iteration"], rows["completion"], first_scores, strict=True)
        by_iteration = [(iteration, turns_of(text), format_number(score)) for iteration, text, score in texts]
        prompts.append((printable(rows["prompt"].iloc[0]), by_iteration))
    return prompts[:num_prompts]


def setting_rows(settings: dict) -> list[tuple[str, str]]:
    """Settings as (name, text)."""
    return [(name, printable(v if isinstance(v, str) else json.dumps(v))) for name, v in settings.items()]


def duration(seconds: float) -> str:
    """Seconds as hours and minutes, minutes and seconds, or seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def read_json(path: Path, default: Any) -> Any:
    """The content of a JSON file, or `default` if it does not exist."""
    return json.loads(path.read_text()) if path.is_file() else default
