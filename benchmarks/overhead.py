"""The fixed cost of a call, and `memory_plan` against the measured peak, under ZeRO-3.

    torchrun --nproc_per_node=2 -m benchmarks.overhead
    torchrun --nproc_per_node=2 -m benchmarks.overhead --layers 8 80 --shapes 7M 134M

Times that are shown are the minimum of a few repetitions. Bytes are those of live tensors that a rollout and its
scoring have created, counted at every operation; memory that kernels and libraries allocate is not counted.
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
from benchmarks import results, tables
from benchmarks.modes import start_ranks
from hybrid.decoders.batch import BLOCK_SIZE, PagedKV
from hybrid.generation.block_pool import BlockPool, blocks_for
from hybrid.generation.model_runner import ModelRunner

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


class LiveBytes(TorchDispatchMode):
    """Counts, at every operation, the bytes of live tensors created inside the block.  peak: the maximum."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        own = (tensor for param in model.parameters() for tensor in (param, getattr(param, "ds_tensor", param)))
        self.before = {StorageWeakRef(tensor.untyped_storage()) for tensor in own}
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


def engine_of(model: torch.nn.Module, lora: str = "", containers: str = "fused") -> hybrid.HybridEngine:
    """An engine under ZeRO-3 that partitions every parameter.  lora: "", "merged" or "unmerged"."""
    if lora:
        adapters = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, adapters)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "hybrid_engine": {"enabled": True, "tp_gather_partition_size": 2},
        "rollout": {"containers": containers, "lora": lora or "merged"},
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with contextlib.redirect_stdout(io.StringIO()):
        return hybrid.initialize(model=model, model_parameters=trained, config=config)[0]


def timed_ms(call: Callable, repetitions: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each call after the first: wall-clock time, and processor time of this process."""
    call()
    clocks, processor = [], []
    for _ in range(repetitions):
        clock, own = time.perf_counter(), time.process_time()
        call()
        clocks.append((time.perf_counter() - clock) * 1e3)
        processor.append((time.process_time() - own) * 1e3)
    return clocks, processor


def measure_windows(layers: int, repetitions: int) -> dict[str, Any]:
    """Time an empty `inference()`, and one that refreshes all weights: milliseconds of every call."""
    engine = engine_of(llama(16, 32, layers, 2, 2, 64), lora="merged")
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


class NoDecoder:
    """A decoder that computes nothing, so that only the work around it is measured."""

    device = torch.device("cpu")

    def kv(self, num_blocks: int) -> PagedKV:
        return PagedKV([torch.zeros(num_blocks, 1)], [torch.zeros(num_blocks, 1)])

    def decode(self, batch: object, kv: PagedKV) -> torch.Tensor:
        return batch.ids


def measure_tables(num_rows: int, tokens: int, steps: int = 64) -> dict[str, Any]:
    """Processor time of block tables of `num_rows` rows near `tokens` tokens, whose blocks end at different steps."""
    lengths = [tokens - steps - 1 - row % BLOCK_SIZE for row in range(num_rows)]
    decoder, block_pool = NoDecoder(), BlockPool(BLOCK_SIZE)
    block_pool.begin_call(decoder.kv)
    block_pool.reserve_call(num_rows * blocks_for(tokens))
    runner = ModelRunner(decoder, block_pool, tokens)
    runner.add([block_pool.allocate(blocks_for(length)) for length in lengths], lengths)
    ids = torch.zeros(num_rows, dtype=torch.int64)
    start = time.process_time()
    for _ in range(steps):
        runner.allocate_slots(1)
        runner.step(ids)
    spent_ms = (time.process_time() - start) / steps * 1e3
    print_on_rank_0(f"block tables of {num_rows} rows of {tokens} tokens: {spent_ms:.2f} ms of processor time per step")
    return {"rows": num_rows, "tokens": tokens, "processor_ms": spent_ms}


def measure_plan(shape: str, way: str, rows: int, prompt: int, new: int) -> dict[str, Any]:
    """The plan and the measured peak of a rollout and its scoring, with an adapter also under the base model, in
    bytes."""
    engine = engine_of(llama(*SHAPES[shape]), **WAYS[way])
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


def print_on_rank_0(line: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    """Run the measurements of the flags."""
    args = parse()
    start_ranks()
    about = results.begin("overhead", args)
    torch.manual_seed(0)
    sizes = args.sequences, args.prompt_length, args.new_tokens
    result = {
        **about,
        "windows": [measure_windows(layers, args.turns) for layers in args.layers],
        "block_tables": measure_tables(args.rows, args.tokens),
        "plans": [measure_plan(shape, way, *sizes) for shape in args.shapes for way in args.ways],
    }
    print_on_rank_0("\n".join(["", *tables.windows(result), "", *tables.plans(result)]))
    results.write(args.output, result)
    dist.barrier()
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layers", type=int, nargs="*", default=[8, 80], help="numbers of layers for which inference() is timed"
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rows", type=int, default=256, help="rows of the block tables")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens per row of the block tables")
    parser.add_argument(
        "--shapes", nargs="*", choices=SHAPES, default=["7M", "134M"], help="models whose plan is checked"
    )
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS)[:3])
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--prompt_length", type=int, default=128)
    parser.add_argument("--new_tokens", type=int, default=64)
    results.add_output(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
