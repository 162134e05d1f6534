"""Every benchmark's result as Markdown tables: what it prints, and what `docs/benchmarks.md` shows.

A function takes the content of one JSON file, or of several (see `benchmarks.results`), and returns lines. Times are
medians (minimum–maximum); a ratio is that of two medians.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from itertools import pairwise, starmap
from typing import Any

from benchmarks.families import FAMILIES
from benchmarks.results import Spread, quotient

LAST_REWARDS = 10  # iterations of GRPO at the end whose rewards are averaged
EDGE = 5  # iterations of PPO at the beginning and at the end that are compared
STANDARD_ERROR = "_stderr"  # suffix of figures that are the standard error, within a run, of another figure


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    """A table. A cell is a text, or a ratio of two medians; None is shown as a dash."""

    def line(cells: Iterable[Any]) -> str:
        texts = ("–" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells)
        return f"| {' | '.join(texts)} |"

    head = list(head)
    return [line(head), "|---" * len(head) + "|", *map(line, rows)]


def with_head(*head: str) -> Callable[[Callable[..., Iterator]], Callable[..., list[str]]]:
    """Make a function that yields rows one that returns their table."""
    return lambda rows_of: wraps(rows_of)(lambda *results: table(head, rows_of(*results)))


def show(values: Any, form: str = ".2f") -> str:
    """Median (minimum–maximum) of measurements."""
    return Spread.of(values).show(form)


def rate(seconds: Any, count: float, form: str = ".0f") -> str:
    """`count` per second, of measured seconds."""
    return Spread.of(seconds).per(count).show(form)


def mebibytes(size: float, form: str = ".0f") -> str:
    """Bytes as MiB."""
    return f"{size / 2**20:{form}}"


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


# `benchmarks.rollout` and `benchmarks.inference`


def rollouts(result: dict[str, Any]) -> list[str]:
    """Tokens a second in each case, this engine's ratios, and its share of the roofline where one is known."""
    named = {"hybrid": "this engine", "hybrid-new-weights": "new weights", "hf": "Hugging Face", "vllm": "vLLM"}
    names = [name for name in named if any(name in case["results"] for case in result["cases"])]
    bases = [name for name in ("hf", "vllm") if name in names]
    head = ["case", *map(named.get, names), *(f"× {named[name]}" for name in bases)]
    shares = [case["results"]["hybrid"]["roofline"] for case in result["cases"]]
    rows = []
    for case, share in zip(result["cases"], shares, strict=True):
        ratios = [case_ratio(case, name) for name in bases]
        rows.append([case["name"], *case_rates(case, names), *ratios, f"{share:.0%}" if share else None])
    if any(shares):
        return table([*head, "of the roofline"], rows)
    return table(head, [row[:-1] for row in rows])


@with_head("case", "this engine", "vLLM", "× vLLM", "first token, s: this engine", "vLLM")
def first_tokens(result: dict[str, Any]) -> Iterator[list]:
    """Cases in which prompts take most of the time: tokens a second, and seconds to the first token."""
    names = ("hybrid", "vllm")
    for case in result["cases"]:
        timings = [case["results"].get(name) for name in names]
        firsts = [timing and f"{timing['first_token_s']:.1f}" for timing in timings]
        yield [case["name"], *case_rates(case, names), case_ratio(case, "vllm"), *firsts]


def case_rates(case: dict[str, Any], names: Iterable[str]) -> list[str | None]:
    """Tokens a second of contenders, with a digit after the point where this engine makes fewer than ten."""
    timings, tokens = case["results"], case["tokens"]
    form = ".0f" if tokens / Spread.of(timings["hybrid"]["seconds"]).median >= 10 else ".1f"
    return [rate(timings[name]["seconds"], tokens, form) if name in timings else None for name in names]


def case_ratio(case: dict[str, Any], base: str) -> float | None:
    """This engine's tokens a second over those of `base`."""
    timings = case["results"]
    return quotient(timings[base]["seconds"], timings["hybrid"]["seconds"]) if base in timings else None


@with_head("model, rows × prompt", "", "prefill, tokens/s", "× hf", "decode, tokens/s", "× hf")
def inference(*results: dict[str, Any]) -> Iterator[list]:
    """Tokens a second of prefill and decode, one result for each number of rows; ratios to Hugging Face in the same
    dtype."""
    for result in sorted(results, key=lambda result: result["args"]["rows"]):
        args, base = result["args"], result["seconds"].get("hf")
        counts = {"prefill": args["prompt_len"], "decode": args["new_tokens"] - 1}
        for name, seconds in result["seconds"].items():
            cells = [f"{args['shape']} {args['dtype']}, {args['rows']} × {args['prompt_len']}", name]
            for phase, count in counts.items():
                cells.append(rate(seconds[phase], args["rows"] * count))
                cells.append(quotient(base[phase], seconds[phase]) if base else None)
            yield cells


# `benchmarks.modes` and `benchmarks.trl_step`


def modes(result: dict[str, Any]) -> list[str]:
    """The switch and the rollout in each way; tokens a second include the switch; ratios are to the last way."""
    args, ways, rows = result["args"], result["results"], []
    last = list(ways)[-1]
    for name, way in ways.items():
        switch, rollout = way["switch_s"], way["rollout_s"]
        mib = None if way["gathered_mib"] is None else f"{way['gathered_mib']:.0f}"
        ratio = quotient(ways[last]["rollout_s"], rollout)
        rows.append(
            [name, show(switch), f"{quotient(switch, rollout):.1%}", mib, rate(rollout, tokens_of(result)), ratio]
        )
    title = (
        f"{result['parameters'] / 1e6:.0f}M parameters, {args['dtype']}; {args['sequences']} sequences a rank, "
        f"{args['prompt_length']} + {args['new_tokens']} tokens; {args['rounds']} rounds in turns:"
    )
    return [title, "", *table(["", "switch, s", "of a rollout", "gathered, MiB", "tokens/s", f"× {last}"], rows)]


def tokens_of(result: dict[str, Any]) -> int:
    """New tokens of all ranks in a rollout of `benchmarks.modes`."""
    return result["args"]["sequences"] * result["args"]["new_tokens"] * result["machine"]["ranks"]


@with_head("", "pinned", "tensor parallel", "of pinned", "streaming", "of pinned")
def tensor_parallel(*results: dict[str, Any]) -> Iterator[list]:
    """Tokens a second of whole weights, slices and layers, and their ratios to whole weights; with the fused decoder
    and with the model's own layers. One result for each model and dtype."""
    for result in results:
        for suffix, layers in (("", ""), (", native", ", the model's own layers")):
            ways = [result["results"].get(f"{way}{suffix}") for way in ("pinned", "tensor parallel", "streaming")]
            whole, *others = (way and way["rollout_s"] for way in ways)
            if whole:
                args, size = result["args"], f"{result['parameters'] / 1e6:.0f}M"
                kind = f" {args['shape']}" if args["shape"] in FAMILIES else ""
                cells = [f"{size}{kind}, {args['dtype']}{layers}"]
                cells += [rate(whole, tokens_of(result))]
                for each in others:
                    cells += [rate(each, tokens_of(result)), quotient(whole, each)] if each else [None, None]
                yield cells


def trl_step(result: dict[str, Any]) -> list[str]:
    """Seconds of a step and of generation in it; ratios are to the first way."""
    ways, phases = result["contenders"], ("step_s", "generate_s")
    first = next(iter(ways.values()))
    rows = [
        [name, *(show(way[phase]) for phase in phases), *(quotient(first[phase], way[phase]) for phase in phases)]
        for name, way in ways.items()
    ]
    return [f"{result['title']}:", "", *table(["", "step, s", "generation in it, s", "× step", "× generation"], rows)]


TRAINING = "shape", "group", "prompt", "completion", "forward", "seconds", "× padded", "tokens", "peak, MiB", "KL"


@with_head(*TRAINING)
def training(*results: dict[str, Any]) -> Iterator[list]:
    """Seconds of a forward and backward, its peak, and how far its logprobs are from the sampler's."""
    for result in results:
        for case in result["cases"]:
            shape = [result["shape"], *(case[name] for name in ("group", "prompt_len", "completion_len"))]
            first = next(iter(case["contenders"].values()))
            for name, way in case["contenders"].items():
                peak = None if way["peak_bytes"] is None else mebibytes(way["peak_bytes"])
                times = show(way["seconds"]), quotient(first["seconds"], way["seconds"]), way["token_ratio"]
                yield [*shape, name, *times, peak, f"{way['kl']:.1e}" if way["kl"] else "0.0"]


# The other benchmarks on CPUs


@with_head("", "an empty `inference()`, ms", "one that gathers everything, ms")
def windows(result: dict[str, Any]) -> Iterator[list]:
    """The fixed cost of a call: the minimum of its repetitions."""
    for window in result["windows"]:
        name = f"{window['layers']} layers, {window['modules']} modules, {window['hooks']} hooks of DeepSpeed"
        yield [name, *(f"{Spread.of(window[name]).min:.1f}" for name in ("empty_ms", "gather_ms"))]


@with_head("", "plan, MiB", "peak, MiB", "plan / peak")
def plans(result: dict[str, Any]) -> Iterator[list]:
    """The memory plan against the measured peak."""
    for plan in result["plans"]:
        planned, peak = plan["planned"], plan["peak"]
        yield [f"{plan['shape']}, {plan['way']}", mebibytes(planned, ".1f"), mebibytes(peak, ".1f"), planned / peak]


def real_size(*results: dict[str, Any]) -> list[str]:
    """A step at a real size, a column for each result."""
    columns = []
    for ranks in (result["ranks"] for result in results):
        seconds = dict(ranks[0]["seconds"])
        column = {"rollout, tokens/s": f"{sum(rank['tokens'] for rank in ranks) / seconds.pop('rollout'):.1f}"}
        column |= {f"{phase}, s": f"{value:.1f}" for phase, value in seconds.items()}
        column["inference's memory, MiB: planned"] = mebibytes(ranks[0]["planned"])
        column["measured, of each rank"] = ", ".join(mebibytes(rank["measured"]) for rank in ranks)
        columns.append(column)
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return table(["", *(result["args"]["containers"] for result in results)], rows)


def rollout_features(result: dict[str, Any]) -> list[str]:
    """Each way's measurements, and how many times better it is than the first one."""
    measured, more = result["measured"], result["more_is_better"]
    first, rows = next(iter(measured.values())), []
    for name, values in measured.items():
        ratio = quotient(values, first) if more else quotient(first, values)
        share = f"{Spread.of(result['shares'][name]).median:.1%}"
        rows.append([name, show(values, ".0f" if more else ".3f"), ratio, share])
    return table([result["title"], result["unit"], "×", result["share_of"]], rows)


@with_head("", "without, s", "speculating, s", "× (pairs)")
def speculation(result: dict[str, Any]) -> Iterator[list]:
    """Seconds without and with speculation, of the last rows and of whole rollouts; ratios of medians and of pairs."""
    for case, ways in result["cases"].items():
        for part, without in ways["without"].items():
            speculating = ways["speculating"][part]
            pairs = Spread.of([first / second for first, second in zip(without, speculating, strict=True)])
            ratios = f"{quotient(without, speculating):.2f} ({pairs.min:.2f}–{pairs.max:.2f})"
            yield [f"{case}, {part}", show(without, ".3f"), show(speculating, ".3f"), ratios]


# `benchmarks.serving`

SERVERS = {"hybrid": "this engine", "vllm": "`vllm serve`"}
LATENCIES = "first token, ms: p50", "p99", "each token, ms: p50", "p99"


@with_head("model", "agents/s", "server", "tokens/s", "× vLLM", *LATENCIES)
def serving(*results: dict[str, Any]) -> Iterator[list]:
    """Tokens a second and latencies of agents at each rate, by server: medians over rounds."""
    for result in results:
        for case in result["agents"]:
            base = case["results"].get("vllm")
            for name, figures in case["results"].items():
                model = f"{result['args']['shape']} {result['args']['dtype']}"
                rates = figures["tokens_per_s"]
                latencies = [
                    f"{1e3 * Spread.of(figures[f'{part}_{share}_s']).median:.{digits}f}"
                    for part, digits in (("first_token", 0), ("token", 1))
                    for share in ("p50", "p99")
                ]
                ratio = quotient(rates, base["tokens_per_s"]) if base else None
                yield [model, f"{case['rate']:g}", SERVERS[name], show(rates, ".0f"), ratio, *latencies]


@with_head("model", "", "tokens/s", "of the rollout")
def endpoint_overhead(*results: dict[str, Any]) -> Iterator[list]:
    """Tokens a second of a rollout, and of the same rows as requests and as clients of the endpoint."""
    for result in results:
        rollout = result["overhead"].get("rollout")
        for name, rates in result["overhead"].items():
            model = f"{result['args']['shape']} {result['args']['dtype']}, {result['args']['rows']} rows"
            yield [model, name, show(rates, ".0f"), quotient(rates, rollout)]


# Training over seeds


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean over seeds and its standard error. Raises ValueError for fewer than two."""
    if len(values) < 2:
        raise ValueError(f"seeds: {len(values)} given; a standard error needs 2")
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def single_run(values: list[float]) -> tuple[float, float]:
    """The range that a single run falls in: mean ± 2 standard deviations of runs."""
    mean, spread = statistics.fmean(values), 2 * statistics.stdev(values)
    return mean - spread, mean + spread


def demo_seeds(result: dict[str, Any]) -> list[str]:
    """Each figure of the summaries: mean ± standard error over seeds, how far from the mean a single run falls, its
    standard error over the held-out records, and the value of each seed. Speeds are left out: they differ by the
    machine's load."""
    summaries, rows = result["summaries"], []
    for name in next(iter(summaries.values())):
        if not name.endswith((STANDARD_ERROR, "_per_second")):
            values, errors = (
                [summary.get(key) for summary in summaries.values()] for key in (name, name + STANDARD_ERROR)
            )
            mean, error = mean_and_error(values)
            run = f"± {number(single_run(values)[1] - mean, '.2g')}"
            within = None if None in errors else number(statistics.fmean(errors), ".2g")
            rows.append([name, f"{number(mean)} ± {number(error, '.2g')}", run, within, *map(number, values)])
    heads = "figure", "mean ± standard error", "a single run", "its standard error"
    return table([*heads, *(f"seed {seed}" for seed in summaries)], rows)


def trl_sums(result: dict[str, Any]) -> list[str]:
    """Each trainer's mean reward in every quarter of its training and at the end, and its held-out exact match: mean ±
    standard deviation over seeds."""
    ways = result["ways"]
    count = len(next(iter(ways.values()))[0]["rewards"])
    quarters = [*pairwise(count * quarter // 4 for quarter in range(5))]
    parts = [*starmap(slice, quarters), slice(-LAST_REWARDS, None)]
    rows = []
    for way, runs in ways.items():
        rewards = [[statistics.fmean(run["rewards"][part]) for run in runs] for part in parts]
        matches = [run["exact_match"] for run in runs]
        spreads = (f"{statistics.fmean(each):.3f} ± {statistics.stdev(each):.3f}" for each in (*rewards, matches))
        rows.append([way, *spreads, ", ".join(f"{match:.3f}" for match in matches)])
    titles = (f"reward {first + 1}–{last}" for first, last in quarters)
    head = "trainer", *titles, f"last {LAST_REWARDS}", "held-out exact match", "of each seed"
    return table(head, rows)


def number(value: float, form: str = ".4g") -> str:
    """A number of any size, without an exponent."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:{form}}"


def mean_of(runs: Iterable[list[dict[str, float]]], name: str) -> float:
    """The mean of a figure over all iterations of runs."""
    return statistics.mean(row[name] for run in runs for row in run)


def rise(runs: list[list[dict[str, float]]]) -> tuple[float, float]:
    """The rise of the score from a run's first iterations to its last: the mean over runs, and its standard error.

    The iterations of a run are correlated, so a run counts as one sample. Raises ValueError for fewer than two.
    """
    score = "objective/scores"
    return mean_and_error([mean_of([run[-EDGE:]], score) - mean_of([run[:EDGE]], score) for run in runs])


STORIES = f"score, first {EDGE}", f"score, last {EDGE}", "rise ± standard error", f"KL, last {EDGE}, and maximum"


@with_head("training", *STORIES, "reference perplexity, first and last")
def stories(result: dict[str, Any]) -> Iterator[list]:
    """Scores, KL and the reference model's perplexity for each kind of training."""
    for kind, runs in result["runs"].items():
        edges = [[run[edge] for run in runs] for edge in (slice(EDGE), slice(-EDGE, None))]
        nats = [mean_of(([run[index]] for run in runs), "completions/ref_nll") for index in (0, -1)]
        highest = max(row["objective/kl"] for run in runs for row in run)
        kl = f"{mean_of(edges[1], 'objective/kl'):.1f}, {highest:.1f} nats a sequence"
        scores = [mean_of(edge, "objective/scores") for edge in edges]
        yield [kind, *scores, "{:.2f} ± {:.2f}".format(*rise(runs)), kl, ", ".join(f"{math.exp(n):.2f}" for n in nats)]


# `benchmarks.gpu`

KERNEL_CHARS = 80  # of a kernel's name: those of templates are long

GPU_HEADS = {
    "rollout": "case, contender, prefill ms (min–max), of GEMM, step ms (min–max), of copy, tokens/s, note".split(", "),
    "profile": ["kernel", "launches a step", "µs a step"],
    "switch": "case, switch ms (min–max), gather ms, merge ms, snapshot GiB, of copy, note".split(", "),
    "grpo": "case, rollout s (min–max), scores s, training s, tokens/s, planned MiB, measured MiB, note".split(", "),
}


def gpu(result: dict[str, Any]) -> list[str]:
    """The device's rates, tables of rollouts, switches, GRPO steps and profiled decode steps, all of the latest code,
    and what was not measured.

    Shares of the device's rates: FLOPs of the prompts / (GEMM rate x time); bytes that a step must read, or twice the
    snapshot's bytes, / (copy rate x time).
    """
    run, left = result["runs"][-1], result["not_measured"]
    kinds: dict[str, list[list[str]]] = {"rollout": [], "switch": [], "grpo": []}
    profiles: list[str] = []
    for row in result["rows"]:
        if row["code"] == run["code"] and row["kind"] == "profile":
            profiles += ["", *gpu_profile(row)]
        elif row["code"] == run["code"]:
            empty = ["–"] * (6 if row["kind"] == "grpo" else 5)
            figures = empty if "error" in row else gpu_cells(row)
            name = [row["case"], row["contender"]][: 2 if row["kind"] == "rollout" else 1]
            note = " ".join((row.get("error") or row["note"]).replace("|", "/").split())
            kinds[row["kind"]].append([*name, *figures, note])
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return [
        f"{run['hardware']}: copies {run['copy_bytes_per_s'] / 1e9:.0f} GB/s (read and written), multiplies "
        f"{run['gemm_flops_per_s'] / 1e12:.3g} TFLOP/s in bfloat16; {versions}; commit {run['commit'] or 'unknown'}, "
        f"code {run['code']}",
        "",
        *table(GPU_HEADS["rollout"], kinds["rollout"]),
        "",
        *table(GPU_HEADS["switch"], kinds["switch"]),
        *(["", *table(GPU_HEADS["grpo"], kinds["grpo"])] if kinds["grpo"] else []),
        *profiles,
        *(["", f"Not measured, call again: {'; '.join(left)}."] if left else []),
    ]


def gpu_profile(row: dict[str, Any]) -> list[str]:
    """The kernels of a decode step, and its bytes a second: by the clock, and over its kernels' time alone."""
    if "error" in row:
        return [f"{row['case']}: {row['error']}"]
    step_s, kernels_s = row["profiled_step_s"], row["kernels_s"]
    rates = [f"{row['step_bytes'] / seconds / 1e9:.0f} GB/s" if seconds > 0 else "–" for seconds in (step_s, kernels_s)]
    head = (
        f"{row['case']}: a step of {1e3 * step_s:.2f} ms ({rates[0]}), {row['launches']:.0f} kernels of together "
        f"{1e3 * kernels_s:.2f} ms ({rates[1]}); {row['cuda_graphs']} CUDA graphs"
    )
    cells = (
        [name[:KERNEL_CHARS].replace("|", "/"), f"{count:.1f}", f"{micros:.1f}"]
        for name, count, micros in row["kernels"]
    )
    return [head, "", *table(GPU_HEADS["profile"], cells)]


def gpu_cells(row: dict[str, Any]) -> list[str | None]:
    """The figures of a row: times and shares."""
    rates = row["rates"]
    median = {key: Spread.of(row[key]).median for key in row if key.endswith("_s")}
    if row["kind"] == "grpo":
        seconds = [show(row["rollout_s"], ".2f"), *(f"{median[key]:.2f}" for key in ("score_s", "train_s"))]
        memory = map(mebibytes, (row["planned"], row["measured"]))
        return [*seconds, f"{row['tokens'] / median['rollout_s']:.0f}", *memory]

    def times(key: str) -> str:
        low, high = (f"{1e3 * value:.2f}" for value in (min(row[key]), max(row[key])))
        return f"{1e3 * median[key]:.2f} ({low}–{high})"

    def percent(share: float | None) -> str | None:
        return None if share is None else f"{share:.0%}"

    if row["kind"] == "switch":
        moved_s = 2 * row["snapshot_bytes"] / rates["copy_bytes_per_s"]
        parts = (f"{1e3 * median[key]:.1f}" for key in ("gather_s", "merge_s"))
        return [
            times("switch_s"),
            *parts,
            f"{row['snapshot_bytes'] / 2**30:.2f}",
            percent(share_of(moved_s, row["switch_s"])),
        ]
    shares = gpu_shares(row)
    speed = f"{row['rows'] / median['step_s']:.0f}" if median["step_s"] > 0 else None
    prefill = [times("prefill_s"), percent(shares["prefill"])]
    return [*prefill, times("step_s"), percent(shares["decode step"]), speed]


def gpu_shares(row: dict[str, Any]) -> dict[str, float | None]:
    """The shares of a rollout's prefill and decode step in the device's rates."""
    rates = row["rates"]
    return {
        "prefill": share_of(row["prefill_flops"] / rates["gemm_flops_per_s"], row["prefill_s"]),
        "decode step": share_of(row["step_bytes"] / rates["copy_bytes_per_s"], row["step_s"]),
    }


def share_of(needed_s: float, measured_s: list[float]) -> float | None:
    """The share of needed seconds in measured ones; None for a difference of two clocks that noise made negative."""
    median = Spread.of(measured_s).median
    return needed_s / median if median > 0 else None
