"""The report of a run: it shows the logged values, is self-contained, and renders in a browser."""

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
from contextlib import redirect_stderr
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
import pytest

from rlhf_examples.common.run_log import RunLog
from rlhf_examples.common.trackers import Histogram
from rlhf_examples.report.__main__ import main
from rlhf_examples.report.charts import Chart, draw_histogram, draw_lines, phase_seconds, smoothed
from rlhf_examples.report.write import duration, summary_figures, title_of, write_comparison, write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ODD = "<script>alert(1)</script> </p> &amp; {{ 7 * 7 }} \u202egnp 🙂 \ud83d \x00 [/red] 'q' \"q\""
SECONDS = {"gather": 0.05, "merge": 0.02, "prefill": 0.1, "decode": 0.4, "score": 0.08, "wait": 0.05, "train": 0.2}


class Page(HTMLParser):
    """A parsed page: elements, attributes, and texts by tag, or by class with a dot."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in ("meta", "link"):
            self.open.append(f".{dict(attrs)['class']}" if dict(attrs).get("class") else tag)
            self.texts.setdefault(self.open[-1], []).append("")

    def handle_endtag(self, tag):
        self.open.pop()
        if tag in ("td", "th"):
            self.handle_data(" ")

    def handle_data(self, data):
        for name in set(self.open):
            self.texts[name][-1] += data

    @property
    def charts(self) -> list[str]:
        """The titles of the charts."""
        return [value for tag, name, value in self.attributes if (tag, name) == ("svg", "aria-label")]


def log_ppo(directory: Path, iterations: int = 20, **more) -> None:
    """Log a PPO step whose metrics are functions of the iteration."""
    log = RunLog(directory, total=iterations, print_every=0, report_to=[], settings={"seed": 3, "model": "<tiny>"})
    for i in range(1, iterations + 1):
        metrics = {
            "objective/scores": float(i),
            "objective/kl": i / 10,
            "objective/entropy": 20.0 - i,
            "completions/mean_length": 30.0,
            "loss/policy_avg": 0.1 / i,
            "loss/value_avg": 1 / i,
            "sampling/sampling_logp_difference/mean": 1e-7 * i,
            "sampling/sampling_logp_difference/max": 1e-6 * i,
            "sampling/sampling_logp_difference/histogram": Histogram((0.0, 1e-8, 1e-7, 1e-6, 1.0), (1, 2, 3, 0)),
            "memory/peak_bytes": 3 * 2**30,
            "time/iteration_s": 1.0,
            "time/tokens_per_s": 1500.0,
            **{f"time/{name}_s": seconds for name, seconds in SECONDS.items()},
            "time/release_s": 0.0,
        }
        log.add(i, metrics | {name: value for name, value in more.items() if value is not None})
    log.show_samples(["p <1>", "p2"], [ODD, ""], ["joy", ODD], [-1.0, math.nan], [2.0, 3.0])


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of two steps."""
    directory = tmp_path_factory.mktemp("runs") / "demo"
    log_ppo(directory / "ppo")
    sft = RunLog(directory / "sft", total=30, print_every=0, report_to=[])
    for i in range(1, 31):
        sft.add(i, {"loss": 3 / i, "learning_rate": 1e-4, **({"eval_loss": 3.5 / i} if i % 10 == 0 else {})})
    (directory / "pipeline.json").write_text(json.dumps({"steps": {"sft": {"done": True}, "ppo": {}}}))
    summary = {"gold_score_before": 0.48, "gold_score_after": 0.91, "kl": 3.25, "tokens_per_second": 1500.0}
    summary |= {"gold_score_after_stderr": 0.012}
    (directory / "summary.json").write_text(json.dumps(summary | {"hf_tokens_per_second": 500.0, "my_own": 7}))
    write_report(directory)
    return directory


@pytest.fixture(scope="module")
def page(run) -> Page:
    """Its report."""
    return Page(run / "report.html")


def test_every_step_has_a_section_in_pipeline_order(run, page, tmp_path):
    assert page.texts["h1"] == ["demo"]
    assert page.texts["h2"] == ["Supervised fine-tuning", "PPO"]
    sft, ppo = page.source.split('<section id="ppo">')
    assert re.findall('aria-label="([^"]*)', sft) == ["Loss", "Learning rate"]
    assert re.findall('aria-label="([^"]*)', ppo) == [
        "Reward",
        "KL to the reference",
        "Entropy",
        "Completion length",
        "Policy loss",
        "Value loss",
        "Time of an iteration by phase",
        "Generation",
        "Memory per rank",
        "Logprob differences of sampler and trainer, by token",
        "Logprob differences of sampler and trainer",
    ]
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "pipeline.json").unlink()
    for number, name in enumerate(("ppo", "sft")):
        os.utime(tmp_path / "run" / name / "metrics.jsonl", (number, number))
    assert Page(write_report(tmp_path / "run")).texts["h2"] == ["PPO", "Supervised fine-tuning"], "as they ended"


@pytest.mark.parametrize(
    ("name", "settings", "title"),
    [
        ("sft", {}, "Supervised fine-tuning"),
        ("sums", {"script": "sft"}, "Supervised fine-tuning: sums"),
        ("sums", {"script": "throughput"}, "sums"),
        ("sums", {}, "sums"),
    ],
)
def test_the_title_of_a_step_says_what_it_does(name, settings, title):
    assert title_of(name, settings) == title


def test_figures_match_the_log(page):
    figures = dict(zip(page.texts[".label"], page.texts[".value"], strict=True))
    assert figures == {
        "Gold score": "0.48 → 0.91 ± 0.012",
        "KL to the reference": "3.25",
        "Tokens per second": "1,500 → 1,500",  # the step's value; the summary's has the same label
        "My own": "7",
        "Loss, held out": "0.35 → 0.117",
        "Loss in training": "1.83 → 0.104",  # means of 3, 3/2, 1 and of 3/28, 3/29, 3/30
        "Reward in training": "1.5 → 19.5",  # means of 1, 2 and of 19, 20
        "KL, nats per sequence": "0.15 → 1.95",
        "Completion length, tokens": "30 → 30",
    }
    assert "3.0 × Hugging Face's 500" in page.texts[".note"]
    rows = [" ".join(row.split()) for row in page.texts["tr"]]
    assert "loss/value_avg 1 0.05 0.05 1" in rows  # first, last, least, most
    assert "model <tiny>" in rows


def test_phases_sum_to_the_iteration(page):
    cells = [row.split() for row in page.texts["tr"] if row.strip().endswith("%")]
    shares = {name: float(share) for name, _, share, _ in cells}
    other = 1 - sum(SECONDS.values())
    assert shares == {name: pytest.approx(100 * s, abs=0.051) for name, s in {**SECONDS, "other": other}.items()}
    log = pd.DataFrame({"time/train_s": [2.0, math.nan], "time/iteration_s": [1.5, 3.0]}, index=[1, 2])
    assert phase_seconds(log).to_dict("list") == {"train": [2.0, 0.0], "other": [0.0, 3.0]}, "a phase is negative"
    assert not phase_seconds(pd.DataFrame({"loss": [1.0]})).size


def test_smoothing_is_a_centred_mean():
    values = np.random.default_rng(0).normal(size=57)
    actual = smoothed(pd.Series(values)).to_numpy()
    windows = [values[max(0, i - 2) : i + 3] for i in range(57)]  # 57 // 10 = 5 points
    np.testing.assert_allclose(actual, [window.mean() for window in windows], rtol=1e-12)
    assert smoothed(pd.Series(values[:7])) is None


def test_long_curves_are_short_paths_that_keep_their_extremes():
    values = np.random.default_rng(0).normal(size=50_000)
    log = pd.DataFrame({"loss": values}, index=np.arange(1, 50_001))
    svg = draw_lines(Chart("Loss", "", {"loss": ""}), [log], ["run"]).svg
    assert len(svg) < 100_000
    line = max(re.findall(r' d="([^"]*)"', svg), key=len)
    x, y = np.array(re.findall(r"[ML] (\S+) (\S+)", line), dtype=float).T
    ranges = np.array_split(np.arange(50_000), 50)
    ends = np.linspace(x.min(), x.max(), 51)
    scale = np.ptp(y) / np.ptp(values)  # points for a unit of the loss; y grows downwards
    for rows, left, right in zip(ranges, ends, ends[1:], strict=False):
        inside = y.max() - y[(x >= left - 1) & (x <= right + 1)]
        drawn = inside.min() / scale + values.min(), inside.max() / scale + values.min()
        assert drawn[0] < values[rows].min() + 0.02 and drawn[1] > values[rows].max() - 0.02


def test_completions_are_escaped(page):
    assert "script" not in page.tags
    assert page.tags.count("html") == page.tags.count("body") == 1
    shown = ODD.replace("\ud83d", "\ufffd").replace("\x00", "\ufffd")
    assert page.texts[".text"] == ["p <1>", shown, "joy", "p2", shown]
    assert [tag.strip() for tag in page.texts[".tag"]] == [
        "prompt",
        "before · reward -1",
        "after · reward 2",
        "prompt",
        "before · reward –",
        "after · reward 3",
    ]


def test_the_page_loads_no_resources(page):
    links = [value for _, name, value in page.attributes if name in ("src", "href", "srcset", "data", "xlink:href")]
    assert links and all(link.startswith("#") or link == "data:," for link in links)
    addresses = re.findall(r'(\S+?)=?["\']?https?://', page.source)
    assert set(addresses) <= {"xmlns", "xmlns:xlink"}
    assert not re.search(r"@import|url\((?!#)", page.source)
    assert not {"script", "iframe", "object", "img"} & set(page.tags)
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', page.source))
    assert used <= set(ids), "a chart references a missing element"


@pytest.mark.parametrize("iterations", [0, 1, 2])
def test_short_runs_have_reports(tmp_path, iterations):
    log_ppo(tmp_path / "ppo", iterations)
    page = Page(write_report(tmp_path / "ppo"))  # a run without a pipeline
    assert len(page.charts) == (11 if iterations else 0)
    assert (f"{iterations} iteration" in page.source) == (iterations > 0)
    assert ("no iteration was logged" in page.source) == (iterations == 0)


def test_missing_and_non_finite_values_are_skipped(tmp_path):
    log = RunLog(tmp_path, total=3, print_every=0, report_to=[])
    with pytest.warns(UserWarning):
        for i in (1, 2, 3):
            metrics = {"loss": math.nan if i == 2 else 1.0, "kl": math.inf, "time/train_s": math.nan, "empty": math.nan}
            log.add(i, {**metrics, "difference": Histogram((0, 1), (0,)), "eval/gold_score": 0.5})
    page = Page(write_report(tmp_path))
    assert page.charts == ["Loss", "Eval gold score"]
    warning = " ".join(page.texts[".card warning"][0].split())
    assert warning.startswith("Not finite: kl in iteration 1, 2, 3; ") and warning.endswith("; loss in iteration 2")


def test_histograms_with_different_edges_are_not_mixed():
    few, many = Histogram((0.0, 1.0, 2.0), (1, 1)), Histogram((0.0, 1.0, 2.0, 3.0), (1, 2, 3))
    assert draw_histogram("t", "nats", [few, many]) is not None
    assert draw_histogram("t", "nats", [Histogram((0.0, 1.0), (0,))]) is None
    assert draw_histogram("t", "nats", []) is None


def test_durations():
    assert [duration(s) for s in (3.21, 75, 3600 * 5 + 121)] == ["3.2 s", "1 min 15 s", "5 h 2 min"]


def test_a_directory_without_a_log_raises(tmp_path):
    with pytest.raises(ValueError, match=r"no metrics.jsonl in '.*' or in its subdirectories"):
        write_report(tmp_path)


def test_evaluations_before_and_after_training_come_first(tmp_path):
    """With standard errors, and of the model that is exported: the best one, if a run says so."""
    rewards = {0: 0.2, 2: 0.75, 4: 0.7}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "gold_score"}
    for name, settings in (("last", {}), ("best", best)):
        log = RunLog(tmp_path / name, total=4, print_every=0, report_to=[], settings=settings)
        for i in range(5):
            metrics = {"reward": i / 10, "time/train_s": 1.0, "time/iteration_s": 1.0} if i else {}
            if i in rewards:
                metrics |= {"eval_gold_score": rewards[i], "eval_gold_score_stderr": 0.01 * (i + 1)}
            log.add(i, metrics)
        page = Page(write_report(tmp_path / name))
        figures = [tuple(map(str.strip, pair)) for pair in zip(page.texts[".label"], page.texts[".value"], strict=True)]
        after, error = ("0.7", "0.05") if name == "last" else ("0.75", "0.03")
        assert [" ".join(text.split()) for text in figures[0]] == [
            "Gold score, held out",
            f"0.2 → {after} ± {error}, before ± 0.01",
        ]
        assert figures[1] == ("Reward in training", "0.1 → 0.4")
        assert "4 iterations · 4.0 s" in " ".join(page.source.split())
        assert "train 1.000 100.0 %" in [" ".join(row.split()) for row in page.texts["tr"]]
    page = Page(write_comparison(tmp_path / "last", tmp_path / "best"))
    assert page.texts[".label"][0] == "Gold score, held out"
    assert " ".join(page.texts[".value"][0].split()) == "0.7 → 0.75 ± 0.03, before ± 0.05"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"loss": 1.0}', "is no JSON object with an iteration, 0 or greater"),
        ('{"iteration": 1.5}', "is no JSON object with an iteration"),
        ('{"iteration": -1}', "is no JSON object with an iteration"),
        ('{"iteration": 1' + "0" * 400 + "}", "is no JSON object with an iteration"),
        ("[1, 2]", "is no JSON object with an iteration"),
        ("7", "is no JSON object with an iteration"),
        ("null", "is no JSON object with an iteration"),
        ("[" * 100_000, "is not JSON"),
        ('{"iteration": 1, "loss": "low"}', "loss is 'low'; it must be a number, null or a histogram"),
        ('{"iteration": 1, "loss": {"edges": [0, "1"], "counts": [1]}}', "loss is .*; it must be a number"),
    ],
)
def test_lines_that_are_no_metrics_are_named_in_one_line(line, problem, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(f'{{"iteration": 1, "loss": 1.0}}\n{line}\n')
    assert re.fullmatch(rf"error: .*metrics.jsonl:2:? {problem}.*; delete this line or the file\n", refused(tmp_path))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["none"], "there is no metrics.jsonl in 'none': there is no such directory; give the directory of a run"),
        (["x" * 300], r"\[Errno \d+\] File name too long: 'x+'"),
        ([__file__], f"there is no metrics.jsonl in '{__file__}': it is a file; give the directory of a run"),
        (["a", "b", "c"], "3 directories given; one gives a report, two a comparison"),
    ],
)
def test_wrong_arguments_are_named_in_one_line(given, problem):
    assert re.fullmatch(f"error: {problem}\n", refused(*given))


def test_logs_that_cannot_be_read_are_named_in_one_line(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    assert re.fullmatch(r"error: .*\n", refused(tmp_path))
    (tmp_path / "metrics.jsonl").rmdir()
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    assert re.fullmatch(r"error: .*\n", refused(tmp_path))


def refused(*given: Path | str) -> str:
    """What the command line prints to standard error, with status 2."""
    output = io.StringIO()
    with pytest.raises(SystemExit) as ended, redirect_stderr(output), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["report", *map(str, given)])
        main()
    assert ended.value.code == 2
    return output.getvalue()


@pytest.mark.parametrize("name", ["settings.json", "samples.json", "summary.json", "pipeline.json"])
@pytest.mark.parametrize("content", ["7", "{"])
def test_other_files_that_are_not_readable_are_named_in_one_line(name, content, tmp_path):
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "metrics.jsonl").write_text('{"iteration": 1, "loss": 1.0}\n')
    (tmp_path / ("step" if name.startswith("s") and name != "summary.json" else ".") / name).write_text(content)
    assert re.fullmatch(rf"error: \S*{name} is no.*; delete the file\n", refused(tmp_path))


def test_the_largest_numbers_are_drawn(tmp_path):
    """Their sums, ranges and ratios overflow; JSON can hold greater ones, and infinities."""
    huge = ["1e308", "-1e308", "1e-308", "1e999", "-Infinity", "NaN", "null", "1" + "0" * 400, "5e-324", "0"]
    names = ["loss", "reward", "objective/kl", "time/iteration_s", "time/train_s", "time/decode_s", "memory/peak_bytes"]
    names += ["eval_gold_score", "eval_gold_score_stderr", "sampling/sampling_logp_difference/max"]
    rows = [
        {"iteration": i, **{name: huge[(i + number) % len(huge)] for number, name in enumerate(names)}}
        for i in [*range(30), 3, 7]
    ]
    lines = ["{" + ", ".join(f'"{name}": {value}' for name, value in row.items()) + "}" for row in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of numpy's and matplotlib's overflows
        page = Page(write_report(tmp_path))
    assert {"Loss", "Reward", "Memory per rank", "Logprob differences of sampler and trainer"} <= set(page.charts)
    assert "30 iterations" not in page.source and "29 iterations" in page.source
    assert not any(re.search(r"\d{40}", text) for text in (*page.texts[".value"], *page.texts["text"]))
    write_comparison(tmp_path, tmp_path)


@pytest.mark.slow
def test_the_command_line_writes_the_report(run, tmp_path):
    shutil.copytree(run / "sft", tmp_path / "sft")
    command = [sys.executable, "-m", "rlhf_examples.report", str(tmp_path)]
    root = str(Path(__file__).resolve().parents[3])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": root}, cwd=root
    )
    assert done.stdout.strip() == str(tmp_path / "report.html"), done.stderr
    assert (tmp_path / "report.html").is_file()


# In a browser.

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
# Logs the widths of window and page, and every chart's rectangle, to the console.
MEASURE = """<script>
const charts = [...document.querySelectorAll("figure svg")].map(svg => {
  const box = svg.getBoundingClientRect();
  return [svg.getAttribute("aria-label"), box.x, box.y, box.width, box.height];
});
const wide = [...document.querySelectorAll(".card, .card *")].filter(
  element => !element.closest(".scroll, svg") && element.scrollWidth > element.clientWidth + 1 && element.clientWidth
).map(element => element.className + ": " + element.textContent.trim().slice(0, 40));
const lost = [...document.querySelectorAll("a")].map(link => link.getAttribute("href")).filter(
  target => !target || !document.getElementById(target.slice(1)));
console.log(JSON.stringify({window: innerWidth, page: document.documentElement.scrollWidth, charts, wide, lost}));
</script></body>"""


def console_of(page: Path, screenshot: Path, width: int = 1280, height: int = 4200) -> list[str]:
    """Open a page and take a screenshot; returns its console output, errors included."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    command += ["--force-device-scale-factor=1", f"--user-data-dir={screenshot.parent / 'profile'}"]
    command += [f"--window-size={width},{height}", f"--screenshot={screenshot}", f"file://{page}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert screenshot.is_file(), done.stderr[-3000:]
    return re.findall(r'CONSOLE[^"]*"(.*)", source', done.stderr)


def measured(run: Path, directory: Path, width: int, height: int = 4200, name: str = "report.html") -> dict:
    """The sizes of a page's charts in a window of `width`: in a frame, as a window is never narrower than 500."""
    source = (run / name).read_text(encoding="utf-8")
    source = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", source)
    (directory / "measured.html").write_text(source.replace("</body>", MEASURE), encoding="utf-8")
    frame = f'<iframe src="measured.html" style="border:0;width:{width}px;height:{height}px"></iframe>'
    (directory / "frame.html").write_text(f'<!DOCTYPE html><body style="margin:0">{frame}')
    (line,) = console_of(directory / "frame.html", directory / f"{width}.png", max(width, 500), height)
    return json.loads(line)


@needs_chromium
def test_a_browser_reports_no_errors(run, tmp_path):
    assert console_of(run / "report.html", tmp_path / "page.png") == []
    broken = (run / "report.html").read_text().replace("</body>", '<img src="http://localhost:9/x.png"></body>')
    (tmp_path / "broken.html").write_text(broken)
    assert "Content Security Policy" in console_of(tmp_path / "broken.html", tmp_path / "broken.png")[0]


@needs_chromium
@pytest.mark.parametrize(("width", "columns"), [(1280, 3), (400, 1)])
def test_every_chart_is_visible_on_wide_and_narrow_screens(run, page, tmp_path, width, columns):
    sizes = measured(run, tmp_path, width, height=7000)
    assert sizes["window"] == width and sizes["page"] <= width, "the page is wider than the window"
    assert [chart[0] for chart in sizes["charts"]] == page.charts
    assert len({round(x) for _, x, *_ in sizes["charts"]}) == columns
    picture = matplotlib.image.imread(tmp_path / f"{width}.png")[..., :3]
    for title, x, y, wide, high in ([chart[0], *(round(number) for number in chart[1:])] for chart in sizes["charts"]):
        assert 280 < wide < 500 and 140 < high < 300, title
        inside = picture[y : y + high, x : x + wide]
        line = np.ptp(inside, axis=2) > 0.2  # coloured pixels: text and grid are grey
        assert line.any(axis=0).mean() > 0.3, f"{title} is blank"


@needs_chromium
def test_the_stacked_chart_shows_the_phases_shares(run, tmp_path):
    sizes = measured(run, tmp_path, 1280)
    ((_, *box),) = [chart for chart in sizes["charts"] if "by phase" in chart[0]]
    x, y, wide, high = (round(number) for number in box)
    inside = (matplotlib.image.imread(tmp_path / "1280.png")[y : y + high, x : x + wide, :3] * 255).round()
    source = (run / "report.html").read_text().split("prefers-color-scheme")[0]
    series = [tuple(bytes.fromhex(color)) for color in re.findall(r"--series-\d: #(\w{6})", source)]
    pixels = {
        phase: int((inside == series[number]).all(axis=2).sum()) for phase, number in (("train", 4), ("decode", 0))
    }
    assert pixels["train"] > 2000
    assert pixels["decode"] / pixels["train"] == pytest.approx(SECONDS["decode"] / SECONDS["train"], rel=0.08)  # edges


def test_completions_while_training_are_shown_by_prompt(tmp_path):
    log = RunLog(tmp_path / "grpo", total=2, print_every=0, report_to=[])
    log.add(1, {"reward": 0.5})
    for iteration, score in ((0, 0.25), (1, 0.75)):
        columns = {"prompt": ["one", "two <b>"], "completion": [f"a{iteration}", f"b{iteration}"]}
        log.add_completions(iteration, {**columns, "correct": [score, None]}, shown=0)
    log.close()
    page = write_report(tmp_path).read_text()
    part = page[page.index("Completions of held-out prompts during training") :]
    assert "two &lt;b&gt;" in part
    assert part.index("0.25") < part.index("a0") < part.index("0.75") < part.index("a1") < part.index("b0")


def log_grpo(directory: Path, reward: float, beta: float) -> None:
    """Log a GRPO step whose held-out completions are written every second iteration."""
    log = RunLog(directory, total=12, print_every=0, report_to=[], settings={"beta": beta, "seed": 1})
    for i in range(1, 13):
        metrics = {"reward": reward * i, "kl": 0.1, "time/iteration_s": 1.0, "time/tokens_per_s": 90.0}
        log.add(i, metrics | ({"eval_reward": 0.5} if reward == 2.0 else {}))
        if i % 2 == 0:
            game = [{"role": "assistant", "text": f"two {i}"}, {"role": "user", "text": "higher"}]
            columns = {"prompt": ["1 + 1 =", "2 + 2 ="], "completion": [game, f"four {i}"], "score": [0.0, 1.0]}
            log.add_completions(i, columns, shown=0)
    turns = [
        {"role": "assistant", "text": "<tool_call>add(1, 1)</tool_call>"},
        {"role": "tool", "text": "2" * 90},
        {"role": "assistant", "text": f"after {beta}"},
    ]
    log.show_samples(["1 + 1 =", "2 + 2 ="], ["", "5"], [turns, ODD], [0.0, 0.0], [1.0, reward])


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory) -> list[Path]:
    """Two runs of GRPO, and their summaries, which are long."""
    runs = [tmp_path_factory.mktemp("two") / name for name in ("first", "second")]
    for run, reward in zip(runs, (1.0, 2.0), strict=True):
        log_grpo(run / "grpo", reward, beta=reward / 10)
        figures = {"gold_score_before": 0.426604, "gold_score_before_stderr": 0.024601, "kl": -123456.789 * reward}
        figures |= {
            "gold_score_after": 0.95277,
            "gold_score_after_stderr": 0.009651,
            "a_name_that_is_very_long_after": 1e-9,
        }
        (run / "summary.json").write_text(json.dumps(figures))
        write_report(run)
    write_comparison(*runs)
    return runs


def test_points_lead_to_the_completions_of_their_iterations(two_runs):
    page = Page(two_runs[0] / "report.html")
    targets = {value for _, name, value in page.attributes if name == "id"}
    links = [value for tag, name, value in page.attributes if (tag, name) == ("a", "href") and "-iteration-" in value]
    assert set(links) == {f"#grpo-iteration-{i}" for i in range(2, 13, 2)} <= {f"#{target}" for target in targets}


def test_a_figure_before_and_after_is_one_card():
    figures = {
        figure.label: figure for figure in summary_figures({"my_before": 1, "my_after": 2, "my_after_stderr": 0.5})
    }
    assert figures.keys() == {"My"}
    assert (figures["My"].before, figures["My"].now, figures["My"].error) == (1, 2, 0.5)


def test_two_runs_are_compared(two_runs):
    page = Page(two_runs[1] / "comparison.html")
    assert page.texts["h1"] == ["first and second"]
    assert [row.split() for row in page.texts["tr"] if "beta" in row] == [["beta", "0.1", "→", "0.2"]]
    assert not any(row.startswith("seed") for row in page.texts["tr"]), "settings that are equal are left out"
    assert "Reward" in page.charts and page.texts[".legend"][0] == "firstsecond"
    assert any("after 0.1" in side for side in page.texts[".side"]) and any(
        "after 0.2" in side for side in page.texts[".side"]
    )
    values = [" ".join(value.split()) for value in page.texts[".value"]]
    assert "12 → 24" in values, "the last tenth's reward of both"


def test_a_metric_of_one_run_is_named_and_keeps_its_runs_colour(two_runs):
    source = (two_runs[1] / "comparison.html").read_text()
    page = Page(two_runs[1] / "comparison.html")
    assert "Eval reward" in page.charts, "only the second run has it"
    (figure,) = re.findall(r'<figure(?:(?!</figure>).)*aria-label="Eval reward".*?</figure>', source, re.S)
    assert "second" in figure and "first" not in figure and "var(--series-1)" in figure
    write_comparison(two_runs[1], two_runs[0])
    assert Page(two_runs[0] / "comparison.html").charts == page.charts


def test_a_run_of_one_step_shows_its_settings_once(two_runs):
    write_comparison(*(run / "grpo" for run in two_runs))
    page = Page(two_runs[1] / "grpo" / "comparison.html")
    assert len([row for row in page.texts["tr"] if "beta" in row]) == 1


def test_conversations_have_their_roles(two_runs):
    page = Page(two_runs[0] / "report.html")
    tags = [" ".join(text.split()) for text in page.texts[".tag"]]
    assert {"tool", "assistant", "user"} <= {*tags}


def test_the_page_explains_what_it_shows(two_runs, run):
    for path, dots in ((two_runs[0] / "report.html", True), (two_runs[1] / "comparison.html", False)):
        assert ("A large dot leads" in path.read_text()) == dots
    assert "The stacked chart" in (run / "report.html").read_text()
    assert "The stacked chart" not in (two_runs[1] / "comparison.html").read_text()


def test_colours_follow_the_page(run):
    """Dark mode changes the variables of the style sheet; charts name no colour themselves."""
    source = (run / "report.html").read_text()
    charts = re.findall(r"<figure.*?</figure>", source, re.S)
    assert len(charts) > 5 and not [chart for chart in charts if re.search(r"#[0-9a-f]{6}|rgb\(", chart)]
    light, dark = source.split("prefers-color-scheme: dark")[:2]
    variables = {*re.findall(r"var\((--[\w-]+)\)", source)}
    assert variables and all(f"{name}:" in light for name in variables)
    assert {name for name in variables if f"{name}:" in dark[:2000]} >= {"--ink", "--muted", "--grid", "--series-0"}


def test_runs_without_a_common_step_are_refused(run, two_runs, tmp_path):
    with pytest.raises(ValueError, match="no step in common: sft, ppo and grpo"):
        write_comparison(run, two_runs[0])
    with pytest.raises(ValueError, match="there is no metrics"):
        write_comparison(run, tmp_path)


@needs_chromium
@pytest.mark.parametrize("width", [360, 800, 1400])
@pytest.mark.parametrize("name", ["report.html", "comparison.html"])
def test_nothing_is_wider_than_its_card(two_runs, tmp_path, width, name):
    sizes = measured(two_runs[1], tmp_path, width, name=name)
    assert sizes["page"] <= sizes["window"] == width
    assert (sizes["wide"], sizes["lost"]) == ([], [])
