"""A model of rollouts on GPUs: seconds by part, from a model's sizes and a device's rates. Nothing is measured.

    python -m benchmarks.roofline

prints three tables: a decode step by part, an iteration's rollout in three ways, and the model's steps next to those
published by vLLM. They show which part limits which model, and what a faster one would gain; `docs/benchmarks.md` has
them, of the first the fastest groups.
"""

import functools
from dataclasses import dataclass, replace

from benchmarks.cases import make_model
from benchmarks.limits import kv_values_of_a_token, step_matrices
from benchmarks.results import parser
from benchmarks.tables import table

BYTES = 2  # of a bfloat16 number
GPUS = 8  # of a host
TP_SIZES = (1, 2, 4, 8)
# What is assumed, because no GPU has been measured yet.
BANDWIDTH_SHARE = 0.8  # of the peak, that kernels which only read reach
GEMM_SHARE = 0.7  # of the peak
LINK_SHARE = 0.8  # of the peak, also of the network's
NETWORK = 50e9  # bytes per second to other hosts, of each GPU: 400 Gb/s
ALL_REDUCE_S = 10e-6  # of a small message between GPUs of a host
GRAPH_KERNEL_S = 1.5e-6  # of a kernel in a CUDA graph, from one to the next
EAGER_KERNEL_S = 8e-6  # of a kernel that Python launches
KERNELS_A_LAYER, EAGER_KERNELS_A_LAYER = 10, 30  # of our decoder, and of Hugging Face's Llama
SAMPLING_PASSES = 4  # over bfloat16 logits: the head's output, its copy into the state, the draw


@dataclass(frozen=True)
class Device:
    """A GPU: bytes of memory, and peak rates per second.

    bandwidth: bytes read from its memory.  flops: bfloat16, dense.  link: bytes to other GPUs of the host, in one
        direction.  host_link: bytes from the host's memory.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: float
    host_link: float

    def read_s(self, size: float) -> float:
        """Seconds of reading so many bytes of the GPU's memory."""
        return size / (self.bandwidth * BANDWIDTH_SHARE)

    def gather_s(self, size: float, tp_size: int, hosts: int) -> float:
        """Seconds until the GPUs of every group of `tp_size` have `size` bytes together, of which each GPU of all hosts
        has an equal part. Each group gets its bytes from other hosts by itself, except that whole weights
        (`tp_size` 1) reach a host once, as in NCCL's rings.
        """
        from_hosts = size * (hosts - 1) / hosts / (GPUS if tp_size == 1 else tp_size) / NETWORK
        return (size / tp_size / self.link + from_hosts) / LINK_SHARE


# NVIDIA's data sheets of H100 SXM, H200 SXM and HGX B200.
DEVICES = (
    Device("H100", 80e9, 3.35e12, 989e12, 450e9, 64e9),
    Device("H200", 141e9, 4.8e12, 989e12, 450e9, 64e9),
    Device("B200", 180e9, 8e12, 2250e12, 900e9, 64e9),
)
HOSTS = {"7B": 1, "32B": 2, "70B": 4}  # over whose GPUs ZeRO-3 partitions a model


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model.  parameters: all.  multiplied: parameters that a token is multiplied with.

    kv_bytes: of a token in the KV cache.
    """

    parameters: int
    multiplied: int
    layers: int
    hidden: int
    vocabulary: int
    kv_bytes: int

    @classmethod
    @functools.cache
    def of(cls, shape: str) -> "Sizes":
        """Sizes of a key of SHAPES, or of a Hugging Face name or path."""
        model = make_model(shape, "bf16", "meta")
        config = model.config
        return cls(
            sum(parameter.numel() for parameter in model.parameters()),
            sum(matrix.numel() for matrix in step_matrices(model)),
            config.num_hidden_layers,
            config.hidden_size,
            config.vocab_size,
            kv_values_of_a_token(config) * BYTES,
        )


@dataclass(frozen=True)
class Rollout:
    """A rollout of an iteration.  rows: sequences of each GPU.  context: tokens of a sequence, on average."""

    rows: int = 64
    context: int = 1024
    new_tokens: int = 1024


@dataclass(frozen=True)
class Anchor:
    """Milliseconds from a token to the next that vLLM published.  rows: requests at once.  context: tokens of each."""

    rows: int
    context: int
    published_ms: float


# Llama-3.1-8B in bfloat16 on one H100, vLLM 0.19.1: the line fitted to one request, 6.44 ms + 4.37e-5 ms a token of the
# prompt, and the median of 8 requests with about 20k prompt and 2k new tokens (vllm-project.github.io c3a01c4,
# _posts/2026-04-22-fp8-kvcache.md).
ANCHORS = (
    Anchor(1, 1024, 6.44 + 4.37e-5 * 1024),
    Anchor(1, 100_000, 6.44 + 4.37e-5 * 100_000),
    Anchor(8, 21_000, 15.18),
)


@dataclass(frozen=True)
class Step:
    """Seconds of a decode step on each GPU of a group, by part."""

    linear: float
    attention: float
    all_reduce: float
    launches: float
    sampling: float

    @property
    def total(self) -> float:
        """Of all parts, one after the other."""
        return self.linear + self.attention + self.all_reduce + self.launches + self.sampling


def decode_step(sizes: Sizes, device: Device, tp_size: int, rollout: Rollout) -> Step:
    """A step of a group of `tp_size` GPUs, which decode the rows of all of them as one batch, in a CUDA graph."""
    rows = rollout.rows * tp_size
    flops = 2 * rows * sizes.multiplied / tp_size
    cached = rows * rollout.context * sizes.kv_bytes / tp_size
    message = rows * sizes.hidden * BYTES
    ring = 2 * message * (tp_size - 1) / tp_size / (device.link * LINK_SHARE)
    return Step(
        linear=max(device.read_s(sizes.multiplied * BYTES / tp_size), flops / (device.flops * GEMM_SHARE)),
        attention=device.read_s(cached),
        all_reduce=2 * sizes.layers * (ALL_REDUCE_S + ring) if tp_size > 1 else 0.0,
        launches=sizes.layers * KERNELS_A_LAYER * GRAPH_KERNEL_S,
        sampling=device.read_s(SAMPLING_PASSES * rollout.rows * sizes.vocabulary * BYTES),
    )


def llama_8b() -> Sizes:
    """Sizes of Llama-3.1-8B: Mistral-7B's layers, and a vocabulary of 128256."""
    sizes, vocabulary = Sizes.of("7B"), 128256
    more = (vocabulary - sizes.vocabulary) * sizes.hidden
    parameters, multiplied = sizes.parameters + 2 * more, sizes.multiplied + more
    return replace(sizes, parameters=parameters, multiplied=multiplied, vocabulary=vocabulary)


def memory_left(sizes: Sizes, device: Device, hosts: int, copies: float) -> float:
    """Bytes of a GPU left for the KV cache and activations, after its ZeRO-3 partitions and inference's weights.

    copies: of all weights, that inference holds on a GPU; 1 / tp_size for slices. ZeRO-3 partitions 16 bytes a
        parameter over all GPUs: bfloat16 weights and gradients, float32 weights, and AdamW's two moments.
    """
    return device.memory - 16 * sizes.parameters / (hosts * GPUS) - copies * sizes.parameters * BYTES


@dataclass(frozen=True)
class Iteration:
    """A rollout in one way: seconds until the weights are ready, and of decoding."""

    tp_size: int
    switch: float
    decode: float

    @property
    def total(self) -> float:
        """Of both."""
        return self.switch + self.decode


def fits(sizes: Sizes, device: Device, hosts: int, copies: float, rollout: Rollout) -> bool:
    """Whether the KV cache of a GPU's rows fits into the memory left."""
    return memory_left(sizes, device, hosts, copies) > rollout.rows * rollout.context * sizes.kv_bytes


def iterations(sizes: Sizes, device: Device, hosts: int, rollout: Rollout) -> list[Iteration | None]:
    """The rollout with this engine, with a second engine on the same GPUs, and with Hugging Face's generate on weights
    gathered whole on each GPU. Each with its fastest tensor-parallel size; None: it does not fit into memory."""
    whole = sizes.parameters * BYTES
    gather = device.gather_s(whole, 1, hosts)
    engine, second, gathered = [], [], []
    for tp_size in TP_SIZES:
        if not fits(sizes, device, hosts, 1 / tp_size, rollout):
            continue
        step = decode_step(sizes, device, tp_size, rollout)
        decode = step.total * rollout.new_tokens
        engine.append(Iteration(tp_size, device.gather_s(whole, tp_size, hosts), decode))
        # On waking up it copies its slices back from host memory, then overwrites them with the gathered weights.
        copied = whole / tp_size / device.host_link + 2 * device.read_s(whole / tp_size)
        second.append(Iteration(tp_size, gather + copied, decode))
        if tp_size == 1:
            eager = replace(step, launches=sizes.layers * EAGER_KERNELS_A_LAYER * EAGER_KERNEL_S)
            gathered.append(Iteration(1, gather, eager.total * rollout.new_tokens))
    return [min(way, key=lambda each: each.total, default=None) for way in (engine, second, gathered)]


def groups(name: str, device: Device, rollout: Rollout) -> list[int]:
    """The sizes of the groups that hold a model."""
    return [tp for tp in TP_SIZES if fits(Sizes.of(name), device, HOSTS[name], 1 / tp, rollout)]


def step_table(rollout: Rollout, fastest: bool = False) -> list[str]:
    """Markdown: a decode step by part, in milliseconds, for every model and device and each group that holds it, or the
    fastest group."""
    head = "model | GPUs | tp | linear | attention | all-reduce | launches | sampling | step, ms | tokens/s a GPU"
    rows = []
    for name, hosts in HOSTS.items():
        sizes = Sizes.of(name)
        for device in DEVICES:
            made = {tp: decode_step(sizes, device, tp, rollout) for tp in groups(name, device, rollout)}
            best = min(made, key=lambda tp: made[tp].total)
            for tp_size, step in made.items():
                if not fastest or tp_size == best:
                    parts = (step.linear, step.attention, step.all_reduce, step.launches, step.sampling, step.total)
                    cells = [part * 1e3 for part in parts]
                    speed = f"{rollout.rows / step.total:.0f}"
                    rows.append([name, f"{hosts * GPUS} x {device.name}", tp_size, *cells, speed])
    return table(head.split(" | "), rows)


def iteration_table(rollout: Rollout) -> list[str]:
    """Markdown: seconds of a rollout in each way."""
    rows = []
    for name, hosts in HOSTS.items():
        sizes = Sizes.of(name)
        for device in DEVICES:
            cells = [
                f"{way.total:.1f} (tp {way.tp_size}, switch {way.switch:.2f})" if way else "no memory"
                for way in iterations(sizes, device, hosts, rollout)
            ]
            rows.append([name, f"{hosts * GPUS} x {device.name}", *cells])
    return table(["model", "GPUs", "this engine", "second engine", "gather all"], rows)


def anchor_table() -> list[str]:
    """Markdown: milliseconds of a token on one H100, of the model and as vLLM published them."""
    rows = []
    for anchor in ANCHORS:
        step_ms = decode_step(llama_8b(), DEVICES[0], 1, Rollout(anchor.rows, anchor.context)).total * 1e3
        cells = f"{anchor.published_ms:.1f}", f"{step_ms:.1f}", step_ms / anchor.published_ms
        rows.append([anchor.rows, anchor.context, *cells])
    return table(["requests", "context", "vLLM, published", "this model", "model / vLLM"], rows)


def main() -> None:
    """Print the tables."""
    parser(__doc__, output=False).parse_args()
    print("\n".join([*step_table(Rollout()), "", *iteration_table(Rollout()), "", *anchor_table()]))


if __name__ == "__main__":
    main()
