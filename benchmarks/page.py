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
import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks import gpu, iteration_plot, plot, roofline, tables
from benchmarks.machine import LEVELS
from benchmarks.results import RESULTS, ROOT, Figures, Results, Spread

TEMPLATE = Path(__file__).with_name("page.md")
PLACE = re.compile(r"\{\{ (.+?) \}\}")
BLOCK = re.compile(r"(<!-- benchmarks\.page: (\w+) -->\n).*?(<!-- end -->)", re.S)
NOT_MEASURED = "not measured"
LEVEL_NAMES = {"amx": "AMX", "avx512": "AVX-512", "avx2": "AVX2"}
# README's rows: the cases of `benchmarks.rollout` and of `benchmarks.gpu`.
CASES = {
    "120M bf16 b64": "120M bf16, 64 rows",
    "120M bf16 b16": "120M bf16, 16 rows",
    "120M bf16 b1": "120M bf16, 1 row",
    "120M bf16 b64 natural 256": "120M bf16, 64 rows of unequal lengths",
    "120M f32 b64": "120M f32, 64 rows",
}
GPU_CASES = {
    "1.5B bf16 b64 prompt 512": "1.5B bf16, 64 rows, prompts of 512 tokens",
    "7B bf16 b64 prompt 512": "7B bf16, 64 rows, prompts of 512 tokens",
}
STEPS = ("trl_step", "trl_step-120M")
# Ways to hold weights of `benchmarks.modes`.
WHOLE, KEEPS_ALL, KEEPS_A_SEVENTH = "pinned", "ZeRO-3 that keeps all + Hugging Face", "plain ZeRO-3 Hugging Face"


def main(arguments: list[str] | None = None) -> None:
    """Write the pages, or check them."""
    args = parse(arguments)
    results = Results.read(args.results)
    texts = pages(results, args.root)
    if args.check:
        differences = [*changed(texts), *changed_figure(results, args.root)]
        print("\n".join(differences))
        raise SystemExit(1 if differences else 0)
    for path, text in texts.items():
        path.write_text(text)
    reports = measured_now(results, "rollout")
    if reports:
        plot.picture(reports, args.root / "docs" / "rollout.png")
    print(f"written: {', '.join(str(path) for path in texts)}")


def pages(results: Results, root: Path) -> dict[Path, str]:
    """The text of every page and drawing by its path. Raises ValueError if README.md lacks a block."""
    readme = root / "README.md"
    text = readme.read_text()
    blocks = [name for _, name, _ in BLOCK.findall(text)]
    if sorted(blocks) != sorted(README_BLOCKS):
        raise ValueError(f"{readme}: blocks {blocks}; needed once each: {', '.join(README_BLOCKS)}")
    written = {
        root / "docs" / "benchmarks.md": filled(TEMPLATE.read_text(), results),
        readme: BLOCK.sub(lambda block: block[1] + "\n".join(README_BLOCKS[block[2]](results)) + "\n" + block[3], text),
    }
    if steps := results.of("trl_step"):
        written[root / "docs" / "iteration.svg"] = iteration_plot.picture(steps[0])
    return written


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


def changed_figure(results: Results, root: Path) -> list[str]:
    """What is wrong with the figure of rollouts: it names the data that it was drawn from."""
    reports, path = measured_now(results, "rollout"), root / "docs" / "rollout.png"
    drawn = Image.open(path).info.get(plot.DATA) if path.is_file() else None
    return [f"{path}: drawn from other results"] if reports and drawn != plot.data(reports) else []


def measured_now(results: Results, run: str) -> list[Figures]:
    """The results of a run that are not of earlier code."""
    return [result for result in results.of(run) if "note" not in result]


# Places of the page


def of_machines(lines: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """A place with a table for each machine on which a run was measured, and its caption."""

    def place(results: Results, run: str) -> list[str]:
        return separated([*lines(result), "", *captions(result)] for result in results.of(run))

    return place


def of_runs(lines: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """A place with a table for each machine over all runs whose names start alike, and its caption."""

    def place(results: Results, prefix: str) -> list[str]:
        parts = results.starting(prefix).values()
        return separated([*lines(part), "", *captions(*part)] for part in parts)

    return place


def captions(*results: Figures) -> list[str]:
    """The captions of a table, each a paragraph."""
    lines = [line for text in tables.captions(*results) for line in (f"*{text}*", "")]
    return lines[:-1]


def separated(parts: Iterable[list[str]]) -> list[str]:
    """Tables one after the other; or that there are none."""
    lines = [line for part in parts for line in [*part, ""]]
    return lines[:-1] if lines else [f"*{NOT_MEASURED.capitalize()}.*"]


def in_short(results: Results) -> list[str]:
    """What to conclude: a row for each comparison, of the newest result."""
    rows = [
        ["tokens a second of rollouts", "Hugging Face's `generate`, whole model", *rollout_ratio(results, "hf")],
        ["the same, with a gather", "the same", *rollout_ratio(results, "hf", ours="hybrid-new-weights")],
        ["tokens a second of rollouts", "vLLM for CPUs", *rollout_ratio(results, "vllm")],
        ["the same, long prompts, a vocabulary of 152k", "the same", *rollout_ratio(results, "vllm", "rollout-long")],
        ["a GRPO step of TRL's trainer", "TRL's default", *step_ratio(results, "step_s")],
        ["generation in that step", "TRL's default", *step_ratio(results, "generate_s")],
        ["rollouts under ZeRO-3, whole weights", "ZeRO-3 that keeps all", *zero3_ratio(results, WHOLE, KEEPS_ALL)],
        ["the same", "ZeRO-3 that keeps a seventh", *zero3_ratio(results, WHOLE, KEEPS_A_SEVENTH)],
        ["the same, a layer at a time", "the same", *zero3_ratio(results, "streaming", KEEPS_A_SEVENTH)],
        ["decoding with `init_inference`", "Hugging Face's `generate`", *decode_ratio(results, "hf")],
        ["the same", "Hugging Face's, compiled", *decode_ratio(results, "hf-compiled")],
        ["the same, int8 weights", "the same in bfloat16", *decode_ratio(results, "fused", "int8")],
        ["memory of the plan", "the peak of live tensors", *plan_ratio(results)],
        ["the same, 0.5B", "the peak of the process's memory", *process_plan_ratio(results)],
        ["rollouts on GPUs", "–", *on_gpus(results)],
    ]
    return tables.markdown(["this engine", "over", "ratio", "on"], rows)


def span(values: list[float], label: str) -> list[str]:
    """The cells of a row of `in_short`: the range of ratios, and the machine."""
    if not values:
        return [NOT_MEASURED, "–"]
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return [low if low == high else f"{low} to {high}", label]


def newest(results: Results, run: str) -> tuple[Any, str]:
    """The newest result of a run and the name of its machine; (None, "") if there is none."""
    result = next(iter(results.of(run)), None)
    return result, label(result) if result else ""


def joined(machines: list[str]) -> str:
    """The machines of several runs, each once."""
    return "; ".join(dict.fromkeys(machines))


def rollout_ratio(results: Results, base: str, run: str = "rollout", ours: str = "hybrid") -> list[str]:
    """Tokens a second over those of another contender, in all cases."""
    result, where = newest(results, run)
    cases = result["cases"] if result else []
    seconds = [case["results"] for case in cases if {base, ours} <= case["results"].keys()]
    return span([quotient(each[base]["seconds"], each[ours]["seconds"]) for each in seconds], where)


def step_ratio(results: Results, phase: str) -> list[str]:
    """The time of TRL's default over that with `hybrid.install()`, for each size."""
    values, machines = [], []
    for run in STEPS:
        result, name = newest(results, run)
        if result:
            values.append(over_install(result, phase))
            machines.append(name)
    return span(values, joined(machines))


def over_install(result: Figures, phase: str) -> float:
    """How many times as long TRL's default, the first contender, takes as `hybrid.install()`."""
    contenders = result["contenders"]
    return quotient(next(iter(contenders.values()))[phase], contenders["hybrid.install()"][phase])


def zero3_ratio(results: Results, way: str, base: str) -> list[str]:
    """Tokens a second in a way over those in another, for each size."""
    values, machines = [], []
    for run in ("modes-10M", "modes-120M"):
        result, name = newest(results, run)
        if result:
            seconds = result["results"]
            values.append(quotient(seconds[base]["rollout_s"], seconds[way]["rollout_s"]))
            machines.append(name)
    return span(values, joined(machines))


def decode_ratio(results: Results, base: str, contender: str = "fused") -> list[str]:
    """Seconds of decoding of `base` over those of `contender`, for each number of rows."""
    parts = next(iter(results.starting("inference").values()), [])
    seconds = [part["seconds"] for part in parts]
    comparable = [each for each in seconds if base in each and contender in each]
    values = [quotient(each[base]["decode"], each[contender]["decode"]) for each in comparable]
    return span(values, label(parts[0]) if parts else "")


def plan_ratio(results: Results) -> list[str]:
    """The memory plan over the measured peak."""
    result, where = newest(results, "overhead")
    return span([plan["planned"] / plan["peak"] for plan in result["plans"]] if result else [], where)


def process_plan_ratio(results: Results) -> list[str]:
    """The memory plan over what a rank's process took in addition, for each rank of a step at real size."""
    runs = next(iter(results.starting("real_size").values()), [])
    ratios = [rank["planned"] / rank["measured"] for run in runs for rank in run["ranks"]]
    return span(ratios, label(runs[0]) if runs else "")


def on_gpus(results: Results) -> list[str]:
    """Whether something was measured on a GPU."""
    labels = [label(result) for result in results.of("gpu")]
    return ["see below", ", ".join(labels)] if labels else [NOT_MEASURED, "–"]


def quotient(base: Any, measured: Any) -> float:
    """How many times as long the median of `base` is."""
    return Spread.of(base).median / Spread.of(measured).median


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


def gpu_report(result: Figures) -> gpu.Report:
    """A result of `benchmarks.gpu`, which knows the rows of its latest code."""
    runs = result["runs"]
    return gpu.Report(Path(), runs[-1]["code"], {}, runs, result["rows"], result["not_measured"])


def gpu_tables(results: Results) -> list[str]:
    """The tables of `make gpu`."""
    parts = []
    for result in results.of("gpu"):
        parts.append([gpu.tables(gpu_report(result)), "", *captions(result)])
    return separated(parts)


PLACES: dict[str, Callable[..., list[str]]] = {
    "in_short": in_short,
    "rollouts": of_machines(tables.rollouts),
    "first_tokens": of_machines(tables.first_tokens),
    "trl_step": of_machines(lambda result: [f"{result['title']}:", "", *tables.trl_step(result)]),
    "modes": of_machines(lambda result: [f"{tables.modes_title(result)}:", "", *tables.modes(result)]),
    "tensor_parallel": of_runs(tables.tensor_parallel),
    "windows": of_machines(tables.windows),
    "plans": of_machines(tables.plans),
    "real_size": of_runs(tables.real_size),
    "inference": of_runs(tables.inference),
    "rollout_features": of_machines(tables.rollout_features),
    "speculation": of_machines(tables.speculation),
    "demo_seeds": of_machines(tables.demo_seeds),
    "stories": of_machines(tables.stories),
    "gpu": gpu_tables,
    "vllm": lambda results: [vllm_version(results)],
    "roofline_steps": lambda results: roofline.step_table(roofline.Rollout(), fastest=True),
    "roofline_iterations": lambda results: roofline.iteration_table(roofline.Rollout()),
}


# README


def numbers(results: Results) -> list[str]:
    """Tokens a second and ratios on every machine, and what a model says about GPUs."""
    machines = [*results.of("rollout"), *results.of("gpu")]
    model = roofline.Rollout()
    head = ["case", *map(label, machines), f"{roofline.GPUS} × H100"]
    rows = [
        *([title, *(rollout_cell(each, case) for each in machines), NOT_MEASURED] for case, title in CASES.items()),
        *(
            [title, *(gpu_cell(each, case) for each in machines), NOT_MEASURED]
            for case, title in (GPU_CASES if results.of("gpu") else {}).items()
        ),
        [
            f"7B bf16, {model.rows} rows a GPU, context {model.context}",
            *["–"] * len(machines),
            f"{roofline.tokens_per_s('7B', roofline.DEVICES[0], model):.0f} a GPU, estimated",
        ],
        [
            "GRPO step in TRL with `hybrid.install()`: time of TRL's default over ours",
            *(step_cell(results, each["machine"]["name"]) for each in machines),
            NOT_MEASURED,
        ],
    ]
    return tables.markdown(head, rows)


def rollout_cell(result: dict[str, Any], case: str) -> str:
    """Tokens a second in a case, and its ratios in brackets."""
    if result["benchmark"] != "rollout":
        return "–"
    measured = next((each for each in result["cases"] if each["name"] == case), None)
    if measured is None:
        return NOT_MEASURED
    ours = measured["results"]["hybrid"]["seconds"]
    ratios = []
    for base in ("hf", "vllm"):
        if base in measured["results"]:
            value = quotient(measured["results"][base]["seconds"], ours)
            form = ".2f" if base == "vllm" else ".1f" if value < 10 else ".0f"
            ratios.append(f"{value:{form}} ×")
    return f"{measured['tokens'] / Spread.of(ours).median:.0f} ({', '.join(ratios)})"


def gpu_cell(result: dict[str, Any], case: str) -> str:
    """Tokens a second of decode steps on a GPU, and the ratio to Hugging Face's static cache."""
    if result["benchmark"] != "gpu":
        return "–"
    measured = gpu_report(result).own_rows()
    rows = {row["contender"]: row for row in measured if row["case"] == case and "error" not in row}
    if "hybrid" not in rows:
        return NOT_MEASURED
    ours = rows["hybrid"]["step_s"]
    ratios = [f"{quotient(rows[base]['step_s'], ours):.1f} ×" for base in ("hf-static", "vllm") if base in rows]
    return f"{rows['hybrid']['rows'] / Spread.of(ours).median:.0f} ({', '.join(ratios) or 'alone'})"


def step_cell(results: Results, machine: str) -> str:
    """How many times as long a step of TRL's default takes, for each size."""
    cells = []
    for run in STEPS:
        for result in results.of(run):
            if result["machine"]["name"] == machine:
                cells.append(f"{over_install(result, 'step_s'):.1f} × ({result['title'].split()[0]})")
    return ", ".join(cells) or NOT_MEASURED


def demo(results: Results) -> list[str]:
    """What the demo found."""
    result, _ = newest(results, "demo_seeds")
    rows = []
    for title, name in (
        ("PPO: gold score, 0 to 1", "gold_score"),
        ("GRPO: exact match on sums that it has not seen", "grpo_exact_match"),
    ):
        cells = [NOT_MEASURED] * 2
        if result:
            values = [[seed[f"{name}_{when}"] for seed in result["summaries"].values()] for when in ("before", "after")]
            cells = ["{:.2f} ± {:.2f}".format(*tables.mean_and_error(each)) for each in values]
        rows.append([title, *cells])
    return tables.markdown(["", "before", "after"], rows)


README_BLOCKS = {"numbers": numbers, "demo": demo}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something would change")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--root", type=Path, default=ROOT, help="of README.md and docs/")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
