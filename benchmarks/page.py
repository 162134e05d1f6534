"""Writes docs/benchmarks.md, the tables of README.md and two figures from the JSON files of benchmarks/results/.

    make bench-page
    python -m benchmarks.page --check      # exit code 1 with the difference, if a page is not what the files give

The page is benchmarks/page.md with `{{ name arguments }}` replaced by the function of that name in PLACES; the tables
of README.md stand between `<!-- benchmarks.page: name -->` and `<!-- end -->`. Every measured figure comes from a file:
nobody types one. A run without a file is shown as not measured; a file that lacks a figure raises KeyError with its
name and the figure's.
"""

import argparse
import difflib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import plot, roofline, tables
from benchmarks.machine import LEVELS
from benchmarks.results import RESULTS, ROOT, Figures, Results, Spread, parser, quotient

TEMPLATE = Path(__file__).with_name("page.md")
PLACE = re.compile(r"\{\{ (.+?) \}\}")
BLOCK = re.compile(r"(<!-- benchmarks\.page: (\w+) -->\n).*?(<!-- end -->)", re.S)
NOT_MEASURED = "not measured"
LEVEL_NAMES = {"amx": "AMX", "avx512": "AVX-512", "avx2": "AVX2"}
# README's rows: the cases of `benchmarks.rollout` and of `benchmarks.gpu`.
CASES = {
    "120M bf16 b64": "rollouts, 120M bf16, 64 rows",
    "120M bf16 b16": "rollouts, 120M bf16, 16 rows",
    "120M bf16 b1": "rollouts, 120M bf16, 1 row",
    "120M bf16 b64 natural 256": "rollouts, 120M bf16, 64 rows of unequal lengths",
    "120M f32 b64": "rollouts, 120M f32, 64 rows",
}
BASES = {
    "hf": "Hugging Face's `generate`",
    "hf-static": "Hugging Face's `generate`, static cache",
    "vllm": "vLLM for CPUs",
}
TRAINING = (("0.5B", 4), ("qwen3_5", 8), ("10M", 1))  # shape and completions of a prompt; 1 has no prompt to share
MODELS = ROOT / "benchmarks" / "models.json"
GPU_CASES = {
    "1.5B bf16 b64 prompt 512": "rollouts, 1.5B bf16, 64 rows, prompts of 512 tokens",
    "7B bf16 b64 prompt 512": "rollouts, 7B bf16, 64 rows, prompts of 512 tokens",
}


def main(arguments: list[str] | None = None) -> None:
    """Write the pages, or check them."""
    args = parse(arguments)
    results = Results.read(args.results)
    texts = pages(results, args.root)
    if args.check:
        drawn = figures(results, args.root).items()
        differences = changed(texts) + [f"{path}: drawn from other results" for path, f in drawn if not f.is_at(path)]
        print("\n".join(differences))
        raise SystemExit(1 if differences else 0)
    for path, text in texts.items():
        path.write_text(text)
    for path, figure in figures(results, args.root).items():
        figure.draw(path)
    print(f"written: {', '.join(str(path) for path in texts)}")


def figures(results: Results, root: Path) -> dict[Path, plot.Figure]:
    """The figures by their paths, of results that are not of earlier code."""
    reports = present(results.of("rollout"))
    steps = results.of("trl_step")
    drawn = {root / "docs" / "rollout.png": plot.rollouts(reports)} if reports else {}
    return drawn | ({root / "docs" / "iteration.svg": plot.iteration(steps[0])} if steps else {})


def pages(results: Results, root: Path) -> dict[Path, str]:
    """The text of every page by its path. Raises ValueError if README.md lacks a block."""
    readme = root / "README.md"
    text = readme.read_text()
    blocks = [name for _, name, _ in BLOCK.findall(text)]
    if sorted(blocks) != sorted(README_BLOCKS):
        raise ValueError(f"{readme}: blocks {blocks}; needed once each: {', '.join(README_BLOCKS)}")
    return {
        root / "docs" / "benchmarks.md": filled(TEMPLATE.read_text(), results),
        readme: BLOCK.sub(lambda block: block[1] + "\n".join(README_BLOCKS[block[2]](results)) + "\n" + block[3], text),
    }


def filled(template: str, results: Results) -> str:
    """The template with its places filled. Raises ValueError for an unknown place."""

    def text(place: re.Match) -> str:
        name, *arguments = shlex.split(place[1])
        if name not in PLACES:
            raise ValueError(f"{TEMPLATE.name}: unknown place {name!r}; allowed: {', '.join(PLACES)}")
        return "\n".join(PLACES[name](results, *arguments))

    return PLACE.sub(text, template)


def changed(texts: dict[Path, str]) -> list[str]:
    """The lines in which files differ from `texts`."""
    lines = []
    for path, text in texts.items():
        old = path.read_text().splitlines() if path.is_file() else []
        lines += difflib.unified_diff(old, text.splitlines(), str(path), "what the results give", n=0, lineterm="")
    return lines


# Places of the page


def shown(lines: Callable[..., list[str]], together: bool = False) -> Callable[..., list[str]]:
    """A place with a table, and its caption, for each machine on which a run was measured.

    together: a machine's results of all runs whose names start alike are in one table.
    """

    def place(results: Results, run: str) -> list[str]:
        parts = results.starting(run).values() if together else ([result] for result in results.of(run))
        texts = []
        for part in parts:
            captions = (line for text in tables.captions(*part) for line in ("", f"*{text}*"))
            texts.append("\n".join([*lines(*part), *captions]))
        return ["\n\n".join(texts) or f"*{NOT_MEASURED.capitalize()}.*"]

    return place


@dataclass(frozen=True)
class Comparison:
    """A row of "In short": the range of ratios, the base's figure over ours, in the newest results of some runs.

    ours, base: texts of the row's two cells.  runs: a pattern of their names.
    path: of the figure, with "*" for the contender; `name` is ours, `base_name` the base. A result without one of the
        two is left out.  each: the key of a list of such figures.
    """

    ours: str
    base: str
    runs: str
    path: str
    name: str
    base_name: str
    each: str = ""

    def ratios(self, result: Figures) -> list[float]:
        """The ratio, for each of the list."""
        parts = result[self.each] if self.each else [result]
        pairs = [[figure_at(part, self.path, name) for name in (self.base_name, self.name)] for part in parts]
        return [quotient(*pair) for pair in pairs if None not in pair]

    def row(self, results: Results) -> list[str]:
        """The cells."""
        newest = results.newest(self.runs)
        ratios = [ratio for result in newest for ratio in self.ratios(result)]
        if not ratios:
            return [self.ours, self.base, NOT_MEASURED, "–"]
        low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
        machines = "; ".join(dict.fromkeys(map(label, newest)))
        return [self.ours, self.base, low if low == high else f"{low} to {high}", machines]


def figure_at(figures: Figures, path: str, name: str) -> Any:
    """The figure at a path such as "results/*/seconds" of the contender `name`; None if there is no such contender."""
    for key in path.split("/"):
        if key == "*" and name not in figures:
            return None
        figures = figures[name if key == "*" else key]
    return figures


GENERATE, SAME = "Hugging Face's `generate`", "the same"
ALL, SEVENTH = "ZeRO-3 that keeps all + Hugging Face", "plain ZeRO-3 Hugging Face"
CASE, WAY, DECODE = "results/*/seconds", "results/*/rollout_s", "seconds/*/decode"
TRAINED = "contenders/*/seconds"
TRL = "hybrid.install()", "TRL's default: gather all, Hugging Face"
PACKED_TRL = 'hybrid.install(training_forward="packed")', TRL[1]
STEPS = {
    TRL[0]: "plain",
    PACKED_TRL[0]: "packed",
    'hybrid.install(training_forward="exact")': "exact",
}
STEP = Comparison("a GRPO step of TRL's trainer", "TRL's default", "trl_step*", "contenders/*/step_s", *TRL)
PACKED_STEP = Comparison("the same, packed", "TRL's default", "trl_step*", "contenders/*/step_s", *PACKED_TRL)
COMPARISONS = (
    Comparison("tokens a second of rollouts", f"{GENERATE}, whole model", "rollout", CASE, "hybrid", "hf", "cases"),
    Comparison("the same, with a gather", SAME, "rollout", CASE, "hybrid-new-weights", "hf", "cases"),
    Comparison("tokens a second of rollouts", "vLLM for CPUs", "rollout", CASE, "hybrid", "vllm", "cases"),
    Comparison(f"{SAME}, long prompts, a vocabulary of 152k", SAME, "rollout-long", CASE, "hybrid", "vllm", "cases"),
    Comparison(
        "the same, Qwen3.5, GPT-OSS, GLM-4-MoE, DeepSeek V3",
        GENERATE,
        "rollout-families",
        CASE,
        "hybrid",
        "hf",
        "cases",
    ),
    Comparison(SAME, "vLLM for CPUs", "rollout-families", CASE, "hybrid", "vllm", "cases"),
    Comparison("the same, types without a decoder", GENERATE, "rollout-native", CASE, "hybrid", "hf", "cases"),
    STEP,
    PACKED_STEP,
    Comparison("generation in that step", "TRL's default", "trl_step*", "contenders/*/generate_s", *TRL),
    Comparison("forward and backward of training, packed", "padded", "training*", TRAINED, "packed", "padded", "cases"),
    Comparison(f"{SAME}, exact", "packed", "training*", TRAINED, "exact", "packed", "cases"),
    Comparison("rollouts under ZeRO-3, whole weights", "ZeRO-3 that keeps all", "modes-*", WAY, "pinned", ALL),
    Comparison(SAME, "ZeRO-3 that keeps a seventh", "modes-*", WAY, "pinned", SEVENTH),
    Comparison(f"{SAME}, a layer at a time", SAME, "modes-*", WAY, "streaming", SEVENTH),
    Comparison("decoding with `init_inference`", GENERATE, "inference-*", DECODE, "fused", "hf"),
    Comparison(SAME, "Hugging Face's, compiled", "inference-*", DECODE, "fused", "hf-compiled"),
    Comparison(f"{SAME}, int8 weights", "the same in bfloat16", "inference-*", DECODE, "int8", "fused"),
    Comparison("memory of the plan", "the peak of live tensors", "overhead", "*", "peak", "planned", "plans"),
    Comparison(f"{SAME}, 0.5B", "the peak of the process's memory", "real_size-*", "*", "measured", "planned", "ranks"),
)


def in_short(results: Results) -> list[str]:
    """Return the conclusions: a row for each comparison, and whether anything was measured on a GPU."""
    gpus = ", ".join(map(label, results.of("gpu")))
    rows = [comparison.row(results) for comparison in COMPARISONS]
    rows.append(["rollouts on GPUs", "–", "see below" if gpus else NOT_MEASURED, gpus or "–"])
    return tables.table(["this engine", "over", "ratio", "on"], rows)


def label(result: dict[str, Any]) -> str:
    """A machine in a few words."""
    machine = result["machine"]
    flags = machine["instructions"].split()
    level = next((LEVEL_NAMES[name] for flag, name in LEVELS if flag in flags), "")
    level += " with bfloat16" * (level == "AVX-512" and "avx512_bf16" in flags)
    earlier = " (earlier code)" * ("note" in result)
    return (machine["gpu"] or ", ".join(filter(None, [machine["cpu"].removeprefix("AMD "), level]))) + earlier


def vllm_version(results: Results) -> str:
    """vLLM and its version, of all results of rollouts that have it."""
    texts = [result.get("contenders", {}).get("vllm", "") for result in results.of("rollout")]
    return ", ".join(sorted({" ".join(text.split()[:2]) for text in texts if text})) or "vLLM"


TOGETHER = (
    tables.tensor_parallel,
    tables.real_size,
    tables.inference,
    tables.training,
    tables.serving,
    tables.endpoint_overhead,
)  # all runs of a machine in one table
SHOWN = (tables.rollouts, tables.first_tokens, tables.trl_step, tables.modes, tables.windows, tables.plans)
SHOWN += (tables.rollout_features, tables.speculation, tables.demo_seeds, tables.trl_sums, tables.stories)
PLACES: dict[str, Callable[..., list[str]]] = {
    "in_short": in_short,
    **{each.__name__: shown(each, each in TOGETHER) for each in SHOWN + TOGETHER},
    "gpu": lambda results: shown(tables.gpu)(results, "gpu"),
    "vllm": lambda results: [vllm_version(results)],
    "roofline_anchors": lambda results: roofline.anchor_table(),
    "roofline_steps": lambda results: roofline.step_table(roofline.Rollout(), fastest=True),
    "roofline_iterations": lambda results: roofline.iteration_table(roofline.Rollout()),
}


# README


def numbers(results: Results) -> list[str]:
    """Return README's table: a row for each machine on which something was measured with the present code."""
    cases = CASES | (GPU_CASES if results.of("gpu") else {})
    rows = [row for case, title in cases.items() for row in rows_or_not_measured(title, rollout_rows(results, case))]
    rows += rows_or_not_measured("GRPO step in TRL", step_rows(results))
    rows += rows_or_not_measured("forward and backward of training", training_rows(results))
    return tables.table(["what", "this engine", "compared with", "on"], [*rows, models_row()])


def rows_or_not_measured(title: str, rows: Iterable[list[str]]) -> list[list[str | None]]:
    """Return the rows, or one that says that nothing was measured."""
    return list(rows) or [[title, NOT_MEASURED, None, None]]


def rollout_rows(results: Results, case: str) -> Iterator[list[str]]:
    """Yield tokens a second in a case, and the ratios to others, of every machine that ran it."""
    for result in present(results.of("gpu" if case in GPU_CASES else "rollout")):
        if result["benchmark"] == "gpu":
            rows = [row for row in result["rows"] if row["code"] == result["runs"][-1]["code"] and "error" not in row]
            timed = [(row["rows"], row["contender"], row["step_s"]) for row in rows if row["case"] == case]
        else:
            cases = [each for each in result["cases"] if each["name"] == case]
            timed = [(c["tokens"], name, each["seconds"]) for c in cases for name, each in c["results"].items()]
        seconds = {name: each for _, name, each in timed}
        if "hybrid" in seconds:
            speed = tables.rate(Spread.of(seconds["hybrid"]).median, timed[0][0])
            bases = [base for base in BASES if base in seconds]
            compared = ", ".join(f"{quotient(seconds[base], seconds['hybrid']):.2f} × {BASES[base]}" for base in bases)
            yield [(CASES | GPU_CASES)[case], f"{speed} tokens/s", compared or None, label(result)]


def step_rows(results: Results) -> Iterator[list[str]]:
    """Yield the seconds of TRL's step with this engine and with TRL's default."""
    for run in sorted(results.runs):
        for result in present(results.of(run)) if run.startswith("trl_step") else []:
            ways = {name: result["contenders"][key] for key, name in STEPS.items() if key in result["contenders"]}
            ours = ", ".join(f"{name} {in_seconds(way['step_s'])}" for name, way in ways.items())
            default = f"TRL's default {in_seconds(result['contenders'][TRL[1]]['step_s'])}"
            size, rows = (
                result["title"].split()[0],
                result["title"].split("; ")[1].replace("sequences per rank", "rows"),
            )
            yield [f"GRPO step in TRL, {size}, {rows}", ours, default, label(result)]


def training_rows(results: Results) -> Iterator[list[str]]:
    """Yield the seconds of a forward and backward in the cases of TRAINING, as last measured."""
    all_results = [each for part in results.starting("training").values() for each in present(part)]
    found = {
        (result["shape"], case["group"]): (result, case)
        for result in sorted(all_results, key=lambda each: each["date"])
        for case in result["cases"]
    }
    for shape, group in TRAINING:
        if (shape, group) in found:
            result, case = found[shape, group]
            times = {name: in_seconds(way["seconds"]) for name, way in case["contenders"].items()}
            once = ", one round" * (len(case["contenders"]["packed"]["seconds"]) == 1)
            tokens = f"{case['prompt_len']} + {case['completion_len']} tokens"
            yield [
                f"forward and backward, {shape}, groups of {group}, {tokens}{once}",
                f"packed {times['packed']}, exact {times['exact']}",
                f"plain {times['padded']}",
                label(result),
            ]


def present(results: list[Figures]) -> list[Figures]:
    """Return the results that are not of earlier code."""
    return [result for result in results if "note" not in result]


def in_seconds(measured: Any) -> str:
    """Return the median in seconds."""
    return f"{Spread.of(measured).median:.1f} s"


def models_row() -> list[str]:
    """Return how many classes of models run fused, as `docs/models.md` counts them."""
    result = json.loads(MODELS.read_text())
    runs = [model["runs"] for model in result["models"]]
    version = result["versions"]["transformers"]
    title = f"classes of transformers {version} that run fused, at tiny size"
    return [title, f"{runs.count('fused')} of {len(runs)}", f"{runs.count('native')} run natively", label(result)]


def demo(results: Results) -> list[str]:
    """The demo's results: mean and standard error of the first result's seeds, and the range that a single run falls
    in, mean ± 2 standard deviations over the runs of every machine. Results of earlier settings are left out."""
    rows, measured = [], [list(result["summaries"].values()) for result in present(results.of("demo_seeds"))]
    for title, name in (
        ("PPO: gold score, 0 to 1", "gold_score"),
        ("GRPO: exact match on sums that it has not seen", "grpo_exact_match"),
    ):
        cells = [NOT_MEASURED] * 3
        if measured:
            values = [[seed[f"{name}_{when}"] for seed in measured[0]] for when in ("before", "after")]
            runs = [seed[f"{name}_after"] for seeds in measured for seed in seeds if f"{name}_after" in seed]
            low, high = (min(max(edge, 0.0), 1.0) for edge in tables.single_run(runs))
            cells = ["{:.2f} ± {:.2f}".format(*tables.mean_and_error(each)) for each in values]
            cells.append(f"{low:.2f} to {high:.2f} ({len(runs)} runs)")
        rows.append([title, *cells])
    return tables.table(["", "before", "after", "a single run, after"], rows)


README_BLOCKS = {"numbers": numbers, "demo": demo}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The flags."""
    flags = parser(__doc__, output=False)
    flags.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something would change")
    flags.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    flags.add_argument("--root", type=Path, default=ROOT, help="of README.md and docs/")
    return flags.parse_args(arguments)


if __name__ == "__main__":
    main()
