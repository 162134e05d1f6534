"""The fixed cost of a call, and `memory_plan` against the measured peak, under ZeRO-3.

    torchrun --nproc_per_node=2 -m benchmarks.overhead
    torchrun --nproc_per_node=2 -m benchmarks.overhead --layers 8 80 --shapes 7M 134M
    python -m benchmarks.overhead --trip --verbose

Times that are shown are the minimum of a few repetitions. Bytes are those of live tensors that a rollout and its
scoring have created, counted at every operation; memory that kernels and libraries allocate is not counted. `--trip`
counts instead the files, functions and record types of `hybrid` that a plain rollout passes through.
"""

import argparse
import contextlib
import io
import time
from collections.abc import Callable
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import hybrid
from benchmarks import call_path, results, tables
from benchmarks.ranks import print_on_rank_0, start_ranks

# hidden, intermediate, layers, heads, key heads, vocabulary
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 512),
    "7M": (256, 768, 6, 8, 4, 4096),
    "134M": (768, 2048, 12, 12, 12, 32000),
}
WAYS = {
    "all weights learn": {},
    "LoRA, merged": {"lora": "merged"},
    "LoRA, unmerged": {"lora": "unmerged"},
    "native, LoRA": {"lora": "merged", "containers": "native"},
}
NO_OUT_PROJ = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}  # where PEFT refuses to adapt it (0.21.2)
# Blocks of an engine's configuration: ZeRO-3 as DeepSpeed sets it, and with every parameter partitioned.
PLAIN = {"zero_optimization": {"stage": 3}, "hybrid_engine": {"enabled": True, "max_out_tokens": 4096}}
PARTITIONED = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "hybrid_engine": {"enabled": True, "tp_gather_partition_size": 2},
}


class LiveBytes(TorchDispatchMode):
    """Counts, at every operation, the bytes of live tensors created inside the block.  peak: the maximum."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        weights = (tensor for param in model.parameters() for tensor in (param, getattr(param, "ds_tensor", param)))
        self.before = {StorageWeakRef(tensor.untyped_storage()) for tensor in weights}
        self.created: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self.created[StorageWeakRef(storage)] = storage.nbytes()
        self.created = {ref: nbytes for ref, nbytes in self.created.items() if not ref.expired()}
        self.peak = max(self.peak, sum(nbytes for ref, nbytes in self.created.items() if ref not in self.before))
        return out


def llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int) -> LlamaForCausalLM:
    """A model with random weights."""
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    heads = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=4096))


def engine_of(
    model: torch.nn.Module, rollout: dict[str, Any], blocks: dict[str, Any], lora: bool = False
) -> hybrid.HybridEngine:
    """An engine over `model` or adapters on it.  rollout: settings of that block.  blocks: the other ones' settings."""
    if lora:
        refused = ["out_proj"] if model.config.model_type in NO_OUT_PROJ else None
        adapters = peft.LoraConfig(r=8, target_modules="all-linear", exclude_modules=refused, init_lora_weights=False)
        model = peft.get_peft_model(model, adapters)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "rollout": rollout,
        **blocks,
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with contextlib.redirect_stdout(io.StringIO()):
        return hybrid.initialize(model=model, model_parameters=trained, config=config)[0]


def timed_ms(call: Callable, repetitions: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each call after the first: wall-clock time, and processor time of this process."""
    call()
    clocks, processor = [], []
    for _ in range(repetitions):
        clock, process_clock = time.perf_counter(), time.process_time()
        call()
        clocks.append((time.perf_counter() - clock) * 1e3)
        processor.append((time.process_time() - process_clock) * 1e3)
    return clocks, processor


def measure_windows(layers: int, repetitions: int) -> dict[str, Any]:
    """Time an empty `inference()`, and one that refreshes all weights: milliseconds of every call."""
    engine = engine_of(llama(16, 32, layers, 2, 2, 64), {"lora": "merged"}, PARTITIONED, lora=True)
    modules, parameters = (len(list(items)) for items in (engine.module.modules(), engine.module.parameters()))
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.module.modules())

    def empty() -> None:
        with engine.inference():
            pass

    def refresh() -> None:
        engine.mark_weights_changed()
        empty()

    print_on_rank_0(f"{layers} layers with LoRA: {modules} modules, {hooks} hooks, {parameters} parameters")
    window = {"layers": layers, "modules": modules, "hooks": hooks, "parameters": parameters}
    for key, name, call in (
        ("empty", "empty inference()", empty),
        ("gather", "inference() that gathers all", refresh),
    ):
        clocks, processor = timed_ms(call, repetitions)
        window |= {f"{key}_ms": clocks, f"{key}_processor_ms": processor}
        print_on_rank_0(f"  {name:30} {min(clocks):8.1f} ms ({min(processor):.1f} ms of processor time)")
    engine.destroy()
    return window


def measure_plan(shape: str, way: str, rows: int, prompt: int, new: int) -> dict[str, Any]:
    """The plan and the measured peak of a rollout and its scoring, with an adapter also under the base model, in
    bytes."""
    engine = engine_of(llama(*SHAPES[shape]), WAYS[way], PARTITIONED, lora="lora" in WAYS[way])
    vocabulary = SHAPES[shape][-1]
    ids = torch.randint(vocabulary, (rows, prompt)).to(engine.device)
    plan = engine.memory_plan(rows, prompt, new)
    request = hybrid.SamplingParams(max_new_tokens=new, min_new_tokens=new, seed=0)
    with torch.no_grad(), LiveBytes(engine.module) as live:
        engine.eval()
        with engine.inference():
            batch = engine.rollout(ids, torch.ones_like(ids), request)
            sequences = torch.cat([ids, batch.completion_ids], dim=1)
            engine.score(sequences, torch.ones_like(sequences))
            if "LoRA" in way:
                engine.score(sequences, torch.ones_like(sequences), adapters=False)
    planned, reported = plan.needs[plan.in_use].total, engine.stats()["peak_bytes"]
    in_mib = [f"{nbytes / 2**20:8.1f} MiB" for nbytes in (planned, live.peak, reported)]
    print_on_rank_0("{:5} {:20} plan {}, peak {}, stats {}: {:.2f}".format(shape, way, *in_mib, planned / live.peak))
    engine.destroy()
    return {"shape": shape, "way": way, "planned": planned, "peak": live.peak, "stats": reported}


def print_trip(verbose: bool) -> None:
    """Print what a plain rollout of one rank passes through in `hybrid`."""
    start_ranks()
    sizes = list(SHAPES["tiny"])

    def make_engine(stage: int, layers: int) -> hybrid.HybridEngine:
        torch.manual_seed(0)
        model = llama(*sizes[:2], layers, *sizes[3:])
        return engine_of(model, {}, {**PARTITIONED, "zero_optimization": {"stage": stage}})

    for line in call_path.report(make_engine, verbose):
        print_on_rank_0(line)
    dist.destroy_process_group()


def main() -> None:
    """Run the measurements of the flags."""
    args = parse()
    if args.trip:
        print_trip(args.verbose)
        return
    start_ranks()
    about = results.begin("overhead", args)
    torch.manual_seed(0)
    sizes = args.sequences, args.prompt_length, args.new_tokens
    result = {
        **about,
        "windows": [measure_windows(layers, args.turns) for layers in args.layers],
        "plans": [measure_plan(shape, way, *sizes) for shape in args.shapes for way in args.ways],
    }
    print_on_rank_0("\n".join(["", *tables.windows(result), "", *tables.plans(result)]))
    results.write(args.output, result)
    dist.barrier()
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = results.parser(__doc__, turns=5, sequences=16, prompt_length=128, new_tokens=64)
    parser.add_argument(
        "--layers", type=int, nargs="*", default=[8, 80], help="numbers of layers for which inference() is timed"
    )
    parser.add_argument(
        "--shapes", nargs="*", choices=SHAPES, default=["7M", "134M"], help="models whose plan is checked"
    )
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS)[:3])
    parser.add_argument(
        "--trip", action="store_true", help="count the code that a plain rollout runs, and nothing else"
    )
    parser.add_argument("--verbose", action="store_true", help="print the names that --trip counts")
    return parser.parse_args()


if __name__ == "__main__":
    main()
