"""Every benchmark's result as Markdown tables: what it prints, and what `docs/benchmarks.md` shows.

A function takes the content of a JSON file (see `benchmarks.results`) and returns lines. Times are medians (minimum–
maximum); a ratio is that of two medians.
"""

import math
import statistics
from collections.abc import Iterable
from typing import Any

from benchmarks.results import Spread

MIB = 2**20
EDGE = 5  # iterations of PPO at the beginning and at the end that are compared
STANDARD_ERROR = "_stderr"  # suffix of figures that are the standard error, within a run, of another figure
BASE_WAYS = {
    "pinned": "",
    "pinned, native": ", native",
}  # with whole weights: the suffix of the names of ways to compare with them


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """A table. Its first column has names."""
    head = list(head)
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def ratio(base: Any, measured: Any, form: str = ".2f") -> str:
    """How many times as long the median of `base` is."""
    return f"{Spread.of(base).median / Spread.of(measured).median:{form}}"


def rate(seconds: Any, count: float, form: str = ".0f") -> str:
    """`count` per second, of measured seconds."""
    return Spread.of(seconds).per(count).show(form)


def captions(*results: dict[str, Any]) -> list[str]:
    """Where, when, how and with which code results were measured, a line for all that are alike but for command and
    load."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for result in results:
        key = result["commit"], result["date"][:10], *(result.get(name) for name in ("source", "note"))
        groups.setdefault(key, []).append(result)
    return [caption(*group) for group in groups.values()]


def caption(*results: dict[str, Any]) -> str:
    """One line; what is the same in all results is said once."""
    parts = [list(dict.fromkeys(filter(None, values))) for values in zip(*map(described, results), strict=True)]
    return "; ".join(", ".join(values) for values in parts if values) + "."


def described(result: dict[str, Any]) -> list[str]:
    """The parts of a caption; "" for what is not known."""
    machine = result["machine"]
    counts = [f"{machine[name]} {name if machine[name] != 1 else name[:-1]}" for name in ("cores", "ranks", "threads")]
    load = " to ".join(f"{load:.1f}" for load in machine["load"])
    return [
        f"{machine['gpu'] or machine['cpu']} ({machine['instructions']}), {', '.join(counts)}",
        f"load {load}" if load else "",
        f"`hybrid/` at {result['commit']}" if result["commit"] else "",
        result["date"][:10],
        f"`{result['command']}`",
        *(result.get(name, "") for name in ("source", "note")),
    ]


def rollouts(result: dict[str, Any]) -> list[str]:
    """Tokens a second in each case, this engine's ratios, and its share of the roofline."""
    named = {"hybrid": "this engine", "hybrid-new-weights": "new weights", "hf": "Hugging Face", "vllm": "vLLM"}
    contenders = [name for name in named if any(name in case["results"] for case in result["cases"])]
    bases = [name for name in ("hf", "vllm") if name in contenders]
    head = ["case", *(named[name] for name in contenders), *(f"× {named[name]}" for name in bases)]
    rows = []
    for case in result["cases"]:
        timings = case["results"]
        rates = [
            rate(timings[name]["seconds"], case["tokens"], rate_form(case)) if name in timings else "–"
            for name in contenders
        ]
        ours = timings["hybrid"]
        ratios = [ratio(timings[name]["seconds"], ours["seconds"]) if name in timings else "–" for name in bases]
        share = ours["roofline"]
        rows.append([case["name"], *rates, *ratios, f"{share:.0%}" if share else "–"])
    return markdown([*head, "of the roofline"], rows)


def rate_form(case: dict[str, Any]) -> str:
    """Tokens a second are shown with a digit after the point where this engine makes fewer than ten."""
    return ".0f" if case["tokens"] / Spread.of(case["results"]["hybrid"]["seconds"]).median >= 10 else ".1f"


def first_tokens(result: dict[str, Any]) -> list[str]:
    """Cases in which prompts take most of the time: tokens a second, and seconds to the first token."""
    head = ["case", "this engine", "vLLM", "× vLLM", "first token, s: this engine", "vLLM"]
    rows = []
    for case in result["cases"]:
        cells = [case["name"]]
        ours, vllm = timings = [case["results"].get(name) for name in ("hybrid", "vllm")]
        cells += [rate(each["seconds"], case["tokens"], rate_form(case)) if each else "–" for each in timings]
        cells.append(ratio(vllm["seconds"], ours["seconds"]) if vllm else "–")
        rows.append([*cells, *(f"{each['first_token_s']:.1f}" if each else "–" for each in timings)])
    return markdown(head, rows)


def inference(results: list[dict[str, Any]]) -> list[str]:
    """Tokens a second of prefill and decode, one result for each number of rows; ratios to Hugging Face in the same
    dtype."""
    rows = []
    for result in sorted(results, key=lambda result: result["args"]["rows"]):
        args = result["args"]
        tokens = {
            "prefill": args["rows"] * args["prompt_len"],
            "decode": args["rows"] * (args["new_tokens"] - 1),
        }
        for name, seconds in result["seconds"].items():
            cells = [f"{args['shape']} {args['dtype']}, {args['rows']} × {args['prompt_len']}", name]
            for phase, count in tokens.items():
                base = result["seconds"].get("hf")
                cells.append(rate(seconds[phase], count))
                cells.append(ratio(base[phase], seconds[phase]) if base else "–")
            rows.append(cells)
    return markdown(["model, rows × prompt", "", "prefill, tokens/s", "× hf", "decode, tokens/s", "× hf"], rows)


def modes_title(result: dict[str, Any]) -> str:
    """A sentence that says what was measured."""
    args = result["args"]
    return (
        f"{result['parameters'] / 1e6:.0f}M parameters, {args['dtype']}; {args['sequences']} sequences a rank, "
        f"{args['prompt_length']} + {args['new_tokens']} tokens; {args['rounds']} rounds in turns"
    )


def tokens_of(result: dict[str, Any]) -> int:
    """New tokens of all ranks in a rollout of `benchmarks.modes`."""
    return result["args"]["sequences"] * result["args"]["new_tokens"] * result["machine"]["ranks"]


def modes(result: dict[str, Any]) -> list[str]:
    """The switch and the rollout in each way; tokens a second include the switch; ratios are to the last way."""
    ways, tokens = result["results"], tokens_of(result)
    last = list(ways.values())[-1]["rollout_s"]
    rows = []
    for name, way in ways.items():
        switch, rollout = Spread.of(way["switch_s"]), Spread.of(way["rollout_s"])
        gathered = "–" if way["gathered_mib"] is None else f"{way['gathered_mib']:.0f}"
        cells = [name, switch.show(), f"{switch.median / rollout.median:.1%}", gathered]
        rows.append([*cells, rate(way["rollout_s"], tokens), ratio(last, way["rollout_s"])])
    return markdown(["", "switch, s", "of a rollout", "gathered, MiB", "tokens/s", f"× {list(ways)[-1]}"], rows)


def tensor_parallel(results: list[dict[str, Any]]) -> list[str]:
    """Tokens a second of whole weights, slices and layers, and their ratios to whole weights; with the fused decoder
    and with the model's own layers. One result for each model and dtype."""
    rows = []
    for result in results:
        ways, tokens = result["results"], tokens_of(result)
        for base, suffix in BASE_WAYS.items():
            if base not in ways:
                continue
            cells = [rate(ways[base]["rollout_s"], tokens)]
            for name in (f"tensor parallel{suffix}", f"streaming{suffix}"):
                seconds = ways[name]["rollout_s"] if name in ways else None
                cells.append(rate(seconds, tokens) if seconds else "–")
                cells.append(ratio(ways[base]["rollout_s"], seconds) if seconds else "–")
            layers = ", the model's own layers" * bool(suffix)
            rows.append([f"{result['parameters'] / 1e6:.0f}M, {result['args']['dtype']}{layers}", *cells])
    return markdown(["", "pinned", "tensor parallel", "of pinned", "streaming", "of pinned"], rows)


def trl_step(result: dict[str, Any]) -> list[str]:
    """Seconds of a step and of generation in it; ratios are to the first way."""
    ways = result["contenders"]
    first = next(iter(ways.values()))
    rows = [
        [
            name,
            *(Spread.of(way[phase]).show() for phase in ("step_s", "generate_s")),
            *(ratio(first[phase], way[phase]) for phase in ("step_s", "generate_s")),
        ]
        for name, way in ways.items()
    ]
    return markdown(["", "step, s", "generation in it, s", "× step", "× generation"], rows)


def windows(result: dict[str, Any]) -> list[str]:
    """The fixed cost of a call: the least of its repetitions."""
    rows = [
        [
            f"{window['layers']} layers, {window['modules']} modules, {window['hooks']} hooks of DeepSpeed",
            *(f"{least(window[name]):.1f}" for name in ("empty_ms", "gather_ms")),
        ]
        for window in result["windows"]
    ]
    return markdown(["", "an empty `inference()`, ms", "one that gathers everything, ms"], rows)


def least(values: list[float] | dict[str, float]) -> float:
    """The minimum of measurements, or the one that is known of lost ones."""
    return values["min"] if isinstance(values, dict) else min(values)


def plans(result: dict[str, Any]) -> list[str]:
    """The memory plan against the measured peak."""
    rows = [
        [f"{plan['shape']}, {plan['way']}", *mebibytes(plan["planned"], plan["peak"]), quotient(plan)]
        for plan in result["plans"]
    ]
    return markdown(["", "plan, MiB", "peak, MiB", "plan / peak"], rows)


def quotient(plan: dict[str, Any]) -> str:
    """The plan over the peak."""
    return f"{plan['planned'] / plan['peak']:.2f}"


def mebibytes(*sizes: float) -> list[str]:
    """Bytes as MiB."""
    return [f"{size / MIB:.1f}" for size in sizes]


def real_size(results: list[dict[str, Any]]) -> list[str]:
    """A step at a real size, a column for each result."""
    firsts = [result["ranks"][0] for result in results]
    rows = [
        [
            "rollout, tokens/s",
            *(
                f"{sum(rank['tokens'] for rank in result['ranks']) / first['seconds']['rollout']:.1f}"
                for result, first in zip(results, firsts, strict=True)
            ),
        ],
        *(
            [f"{phase}, s", *(f"{first['seconds'][phase]:.1f}" for first in firsts)]
            for phase in firsts[0]["seconds"]
            if phase != "rollout"
        ),
        ["inference's memory, MiB: planned", *(f"{first['planned'] / MIB:.0f}" for first in firsts)],
        [
            "measured, of each rank",
            *(", ".join(f"{rank['measured'] / MIB:.0f}" for rank in result["ranks"]) for result in results),
        ],
    ]
    return markdown(["", *(result["args"]["containers"] for result in results)], rows)


def rollout_features(result: dict[str, Any]) -> list[str]:
    """Each way's measurements, and how many times better it is than the first one."""
    measured, form = result["measured"], ".0f" if result["more_is_better"] else ".3f"
    first = next(iter(measured.values()))
    rows = []
    for name, values in measured.items():
        better = ratio(values, first) if result["more_is_better"] else ratio(first, values)
        share = Spread.of(result["shares"][name]).median
        rows.append([name, Spread.of(values).show(form), better, f"{share:.1%}"])
    return markdown([result["title"], result["unit"], "×", result["share_of"]], rows)


def speculation(result: dict[str, Any]) -> list[str]:
    """Seconds without and with speculation, of the last rows and of whole rollouts; ratios of medians and of pairs."""
    rows = []
    for case, measured in result["cases"].items():
        for part in measured["without"]:
            without, speculating = measured["without"][part], measured["speculating"][part]
            pairs = sorted(first / second for first, second in zip(without, speculating, strict=True))
            cells = [f"{case}, {part}", Spread.of(without).show(".3f"), Spread.of(speculating).show(".3f")]
            rows.append([*cells, f"{ratio(without, speculating)} ({pairs[0]:.2f}–{pairs[-1]:.2f})"])
    return markdown(["", "without, s", "speculating, s", "× (pairs)"], rows)


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean over seeds and its standard error. Raises ValueError for fewer than two."""
    if len(values) < 2:
        raise ValueError(f"seeds: {len(values)} given; a standard error needs 2")
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def demo_seeds(result: dict[str, Any]) -> list[str]:
    """The mean ± standard error over seeds of each figure of the summaries, and the value of each seed. Speeds are left
    out: they differ by the machine's load."""
    summaries = result["summaries"]
    rows = []
    for name in next(iter(summaries.values())):
        if not name.endswith((STANDARD_ERROR, "_per_second")):
            values = [summary[name] for summary in summaries.values()]
            mean, error = mean_and_error(values)
            rows.append([name, f"{figure(mean)} ± {figure(error, '.2g')}", *map(figure, values)])
    return markdown(["figure", "mean ± standard error", *(f"seed {seed}" for seed in summaries)], rows)


def figure(value: float, form: str = ".4g") -> str:
    """A number of any size, without an exponent."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:{form}}"


def rise(runs: list[list[dict[str, float]]]) -> tuple[float, float]:
    """The rise of the score from a run's first iterations to its last: the mean over runs, and its standard error.

    The iterations of a run are correlated, so a run counts as one sample. Raises ValueError for fewer than two.
    """
    scores = [[row["objective/scores"] for row in rows] for rows in runs]
    return mean_and_error(
        [statistics.mean(of_run[-EDGE:]) - statistics.mean(of_run[:EDGE]) for of_run in scores],
    )


def stories(result: dict[str, Any]) -> list[str]:
    """Scores, KL and the reference model's perplexity for each kind of training."""
    rows = []
    for kind, runs in result["runs"].items():
        first = [row["objective/scores"] for run in runs for row in run[:EDGE]]
        last = [row["objective/scores"] for run in runs for row in run[-EDGE:]]
        rises, error = rise(runs)
        kl = [row["objective/kl"] for run in runs for row in run[-EDGE:]]
        most = max(row["objective/kl"] for run in runs for row in run)
        perplexities = [math.exp(statistics.mean(run[i]["completions/ref_nll"] for run in runs)) for i in (0, -1)]
        rows.append(
            [
                kind,
                f"{statistics.mean(first):.2f}",
                f"{statistics.mean(last):.2f}",
                f"{rises:.2f} ± {error:.2f}",
                f"{statistics.mean(kl):.1f}, {most:.1f} nats a sequence",
                f"{perplexities[0]:.2f}, {perplexities[1]:.2f}",
            ]
        )
    head = [f"score, first {EDGE}", f"score, last {EDGE}", "rise ± standard error", f"KL, last {EDGE}, and most"]
    return markdown(["training", *head, "reference perplexity, first and last"], rows)
