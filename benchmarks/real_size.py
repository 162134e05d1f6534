"""A GRPO step at a real size: Qwen2.5-0.5B's shape, random weights, LoRA on every linear layer, checkpointing, ZeRO-3.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 -m benchmarks.real_size
    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 -m benchmarks.real_size --containers native

Prints tokens per second, seconds by phase, coverage, and `memory_plan` against the memory that inference needed.
`--sequences` are the completions of all ranks, in groups of `--num_generations`. A rollout of two tokens runs first, to
compile kernels and check the decoder; the measured step gathers the weights again. Memory is the process's resident set
on CPUs and that of torch's allocator on a GPU; 0.5B needs about 8 GB on two ranks.
"""

import argparse
import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import peft
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import AutoModelForCausalLM, Qwen2Config

import hybrid
from benchmarks import results, tables
from benchmarks.cases import DTYPES, SHAPES, hugging_face_sizes
from benchmarks.machine import hardware
from benchmarks.ranks import now, start_ranks

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt

LORA_RANK, CLIP, KL_COEFFICIENT = 16, 0.2, 0.04
INFERENCE_PHASES = ("gather", "merge", "prefill", "decode")
SAMPLE_EVERY_S = 0.01  # interval of reading the resident set


def main() -> None:
    """Measure a step and print the figures."""
    args = parse()
    if not torch.cuda.is_available():
        # glibc raises its threshold with what is freed, up to 32 MiB: tensors below it then leave holes in the heap.
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            ctypes.CDLL(None).mallopt(option, 1 << 20)
    start_ranks()
    about = results.begin("real_size", args)
    engine = make_engine(args)
    prompts = rank_prompts(args)
    engine.rollout(*prompts, sampling(2), args.num_generations)
    engine.mark_weights_changed()
    report = step(engine, prompts, args)
    reports: list[Report] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    if dist.get_rank() == 0:
        show(engine, reports, args)
        parameters = sum(parameter.ds_numel for parameter in engine.module.parameters())
        results.write(args.output, {**about, "parameters": parameters, "ranks": [asdict(each) for each in reports]})
    dist.barrier()
    dist.destroy_process_group()


def make_engine(args: argparse.Namespace) -> hybrid.HybridEngine:
    """A policy under ZeRO-3 of which only the adapters train. The base is created in its final dtype."""
    torch.manual_seed(0)
    config = Qwen2Config(**hugging_face_sizes(args.shape), tie_word_embeddings=True, eos_token_id=None, use_cache=False)
    with torch.device(get_accelerator().current_device_name()):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[args.dtype])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    lora = peft.LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    rows = args.sequences // dist.get_world_size()
    return hybrid.initialize(
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": args.micro_batch,
            "gradient_accumulation_steps": rows // args.micro_batch,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "bf16": {"enabled": args.dtype == "bf16"},
            "steps_per_print": 10**9,
            "hybrid_engine": {
                "enabled": True,
                "max_out_tokens": args.prompt_length + args.new_tokens,
                "release_inference_cache": True,
            },
            # Keep nothing of the first rollout, so that the measured step starts from the memory of training alone.
            "rollout": {"containers": args.containers, "lora": args.lora, "keep_snapshot": False},
        },
    )[0]


def rank_prompts(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's prompts and their mask.  int64 [prompts, tokens] each"""
    groups = args.sequences // args.num_generations // dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(3, SHAPES[args.shape]["vocab"], (groups, args.prompt_length), generator=generator)
    ids = ids.to(get_accelerator().current_device_name())
    return ids, torch.ones_like(ids)


def sampling(new_tokens: int) -> hybrid.SamplingParams:
    """Sampling parameters with which every completion has `new_tokens` tokens."""
    return hybrid.SamplingParams(max_new_tokens=new_tokens, min_new_tokens=new_tokens, temperature=1.0, seed=0)


# The step


@dataclass
class Report:
    """A rank's measurements.  seconds: by phase, until the last rank is done.  tokens: generated by this rank.

    planned, measured: bytes that inference needs in addition to those of training.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    stats: dict = field(default_factory=dict)
    tokens: int = 0
    planned: int = 0
    measured: int = 0
    loss: float = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block."""
        start = now()
        yield
        self.seconds[name] = now() - start


def step(engine: hybrid.HybridEngine, prompts: tuple[torch.Tensor, torch.Tensor], args: argparse.Namespace) -> Report:
    """A rollout, logprobs of the policy and the base, and an update with GRPO's loss and a KL term to the base."""
    report = Report()
    rows = prompts[0].shape[0] * args.num_generations
    plan = engine.memory_plan(rows, args.prompt_length, args.new_tokens)
    report.planned = plan.needs[plan.in_use].total
    if not torch.cuda.is_available():
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed memory, whose reuse would not be measured
    with peak_memory() as peak:
        engine.eval()
        with engine.inference():
            with report.phase("rollout"):
                batch = engine.rollout(*prompts, sampling(args.new_tokens), args.num_generations)
            with report.phase("score, policy"):
                old_logps = engine.score(batch.sequences, batch.attention_mask)
            with report.phase("score, base"):
                base_logps = engine.score(batch.sequences, batch.attention_mask, adapters=False)
    report.measured = peak.bytes
    report.stats, report.tokens = engine.stats(), int(batch.completion_mask.sum())
    engine.train()
    width = batch.completion_ids.shape[1]
    old_logps, base_logps = (scores.per_token_logps[:, -width:] for scores in (old_logps, base_logps))
    advantages = group_advantages(batch.completion_ids, args.num_generations)
    with report.phase("train"):
        for batch_rows in torch.arange(rows, device=old_logps.device).split(args.micro_batch):
            loss = grpo_loss(
                engine,
                batch,
                batch_rows,
                old_logps[batch_rows],
                base_logps[batch_rows],
                advantages[batch_rows],
            )
            engine.backward(loss)
            engine.step()
        report.loss = loss.item()
    return report


def group_advantages(completion_ids: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Group advantages of a made-up reward that differs between completions.  float32 [rows]"""
    rewards = (completion_ids.sum(dim=1) % 97 / 97).view(-1, num_generations)
    deviations = rewards - rewards.mean(dim=1, keepdim=True)
    return (deviations / (rewards.std(dim=1, keepdim=True) + 1e-4)).flatten()


def grpo_loss(
    engine: hybrid.HybridEngine,
    batch: hybrid.RolloutBatch,
    rows: torch.Tensor,
    old: torch.Tensor,
    base: torch.Tensor,
    advantages: torch.Tensor,
) -> torch.Tensor:
    """GRPO's loss of `rows` (arXiv:2402.03300).  old, base float32 [rows, completion]; advantages float32 [rows]."""
    ids, mask, kept = batch.sequences[rows], batch.attention_mask[rows], batch.completion_mask[rows]
    width = kept.shape[1]
    output = engine(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=width + 1)
    logps = hybrid.selective_log_softmax(output.logits[:, :-1], ids[:, -width:])
    ratio, advantages = (logps - old).exp(), advantages[:, None]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    divergence = (base - logps).exp() - (base - logps) - 1
    return -((gain - KL_COEFFICIENT * divergence) * kept).sum() / kept.sum()


# Memory


@dataclass
class Peak:
    """The maximum of bytes in use above those at the beginning."""

    bytes: int = 0


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Measures the peak memory of the block above that at its beginning; the result is set when the block ends."""
    peak, ended = Peak(), threading.Event()
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated() - before
        return
    before = resident_bytes()

    def sample() -> None:
        while not ended.wait(SAMPLE_EVERY_S):
            peak.bytes = max(peak.bytes, resident_bytes() - before)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield peak
    finally:
        ended.set()
        sampler.join()


def resident_bytes() -> int:
    """The resident set of this process (Linux)."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def show(engine: hybrid.HybridEngine, reports: list[Report], args: argparse.Namespace) -> None:
    """Print the figures."""
    first = reports[0]
    size = sum(parameter.ds_numel for parameter in engine.module.parameters())
    print(
        f"{size / 1e6:.0f}M parameters, {args.dtype}, LoRA {args.lora}, {len(reports)} ranks on {hardware()}; "
        f"{args.sequences} sequences in groups of {args.num_generations}, {args.prompt_length} + {args.new_tokens} "
        "tokens"
    )
    containers = sorted({row["container"] for row in engine.coverage()})
    print(f"coverage: {', '.join(containers)}; fallback_reason: {first.stats['fallback_reason'] or 'none'}")
    print(f"coverage of the model: {engine.coverage()[0]['why']}")
    tokens = sum(report.tokens for report in reports)
    print(f"tokens/s of the rollout: {tokens / first.seconds['rollout']:.1f}; loss {first.loss:.4f}")
    seconds = first.seconds | {f"of inference, {name}": first.stats[f"{name}_s"] for name in INFERENCE_PHASES}
    phases = tables.table(["phase", "seconds"], ([name, f"{value:.1f}"] for name, value in seconds.items()))
    head = ["rank", "planned for inference, MiB", "measured, MiB", "measured / planned"]
    memory = (
        [i, *map(tables.mebibytes, (r.planned, r.measured)), r.measured / r.planned] for i, r in enumerate(reports)
    )
    print("", *phases, "", *tables.table(head, memory), sep="\n")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The flags.  arguments: instead of the command line's."""
    parser = results.parser(__doc__, num_generations=4, prompt_length=128, new_tokens=64)
    parser.add_argument("--shape", choices=("0.5B", "1.5B", "micro"), default="0.5B")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--containers", choices=("fused", "native"), default="fused")
    parser.add_argument("--lora", choices=("merged", "unmerged"), default="merged")
    parser.add_argument("--sequences", type=int, default=16, help="completions of all ranks together")
    parser.add_argument("--micro_batch", type=int, default=2, help="sequences per training forward")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
