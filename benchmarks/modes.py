"""The cost of each way to hold weights under ZeRO-3: the switch to inference, and rollouts.

    make bench
    torchrun --nproc_per_node=2 -m benchmarks.modes --shape 120M --dtype f32 --rounds 3

Contenders alternate in one process group, with the same weights and prompts, each after an optimizer step of its own.
"""

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import peft
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import hybrid
from benchmarks import results, tables
from benchmarks.cases import DTYPES, SHAPES, make_model
from benchmarks.contenders import eval_mode, gathered, zero3_engine
from benchmarks.families import FUSED
from benchmarks.machine import hardware
from benchmarks.ranks import start_ranks

# DeepSpeed keeps up to 1e9 parameters gathered, and parameters that are read again within 1e9 (0.19.8). A smaller model
# stays whole after its first forward; this share is that of a 7B model.
DEFAULT_LIVE_SHARE = 1 / 7


@dataclass
class Contender:
    """A way to generate.  switch: a context in which the weights are ready.  generate: to call inside it.

    ours: the engine's inference, whose gathered bytes it counts.
    """

    engine: hybrid.HybridEngine
    switch: Callable
    generate: Callable
    ours: bool = True
    switch_s: list[float] = field(default_factory=list)
    rollout_s: list[float] = field(default_factory=list)
    gathered_mib: float | None = None  # by this engine on this rank, in the switch and the rollout

    @property
    def figures(self) -> dict[str, Any]:
        """The measurements by name."""
        return {"switch_s": self.switch_s, "rollout_s": self.rollout_s, "gathered_mib": self.gathered_mib}


def main() -> None:
    """Measure and print the table."""
    args = parse()
    start_ranks()
    about = results.begin("modes", args)
    contenders = make_contenders(args)
    engine = next(iter(contenders.values())).engine
    generator = torch.Generator().manual_seed(dist.get_rank())  # equal prompts of two ranks would be decoded once
    vocabulary, size = engine.module.config.vocab_size, (args.sequences, args.prompt_length)
    ids = torch.randint(1, vocabulary, size, generator=generator).to(engine.device)
    request = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": args.new_tokens,
        "min_new_tokens": args.new_tokens,
        "do_sample": False,
    }
    for round_number in range(args.rounds + 1):  # the first is not counted
        outputs = {
            name: measure(contender, ids, request, counted=round_number > 0) for name, contender in contenders.items()
        }
        if args.dtype == "f32":
            base = [output for name, output in outputs.items() if "LoRA" not in name]
            assert all(torch.equal(output, base[0]) for output in base), "contenders generated different tokens"
    if dist.get_rank() == 0:
        size = sum(parameter.ds_numel for parameter in engine.module.parameters())
        ways = {name: contender.figures for name, contender in contenders.items()}
        result = {**about, "parameters": size, "results": ways}
        print(f"{dist.get_world_size()} ranks on {hardware()}", *tables.modes(result), sep="\n")
        results.write(args.output, result)
    dist.barrier()
    dist.destroy_process_group()


def make_contenders(args: argparse.Namespace) -> dict[str, Contender]:
    """This engine in every mode, with full fine-tuning and with LoRA, and three ways to run Hugging Face's generate."""
    blocks = {
        "pinned": {},
        "tensor parallel": {"inference_tp_size": dist.get_world_size()},
        "streaming": {"pin_parameters": False},
    }
    makers = {name: partial(of_engine, args, block) for name, block in blocks.items()}
    makers |= {f"pinned, LoRA {how}": partial(of_engine, args, {}, lora=how) for how in ("merged", "unmerged")}
    makers |= {f"{name}, native": partial(of_engine, args, blocks[name], containers="native") for name in blocks}
    makers["GatheredParameters(all) + Hugging Face"] = partial(of_hugging_face, args, gathered)
    makers["ZeRO-3 that keeps all + Hugging Face"] = partial(of_hugging_face, args, plain)
    makers["plain ZeRO-3 Hugging Face"] = partial(of_hugging_face, args, plain, live_share=DEFAULT_LIVE_SHARE)
    return {name: make() for name, make in makers.items() if not args.contenders or name in args.contenders}


def of_engine(args: argparse.Namespace, block: dict, lora: str = "", containers: str = "fused") -> Contender:
    """This engine, with `block` as its `hybrid_engine` configuration.  containers: as in the `rollout` block."""
    engine = make_engine(args, block, lora, containers=containers)
    return Contender(engine, engine.inference, engine.generate)


def of_hugging_face(args: argparse.Namespace, switch: Callable, live_share: float = 1.0) -> Contender:
    """Hugging Face's generate, inside `switch`."""
    engine = make_engine(args, {}, live_share=live_share)
    generate = partial(type(engine.module).generate, engine.module)  # the instance's method calls the engine
    return Contender(engine, lambda: switch(engine), generate, ours=False)


def plain(engine: hybrid.HybridEngine) -> AbstractContextManager:
    """ZeRO-3's own hooks gather the weights."""
    return eval_mode(engine.module)


def make_engine(
    args: argparse.Namespace, block: dict, lora: str = "", live_share: float = 1.0, containers: str = "fused"
) -> hybrid.HybridEngine:
    """An engine with a model of the shape, always with the same weights.

    lora: how an adapter on every layer runs; empty: none.  live_share: of the model, which ZeRO-3 may keep
        gathered.  containers: as in the `rollout` block.
    """
    model = make_model(args.shape, args.dtype, get_accelerator().current_device_name())
    live = int(live_share * sum(parameter.numel() for parameter in model.parameters()))
    if lora:
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=targets, task_type="CAUSAL_LM"))
    zero = {"stage3_max_live_parameters": live, "stage3_max_reuse_distance": live}
    rollout = {"containers": containers, **({"lora": lora} if lora else {})}
    return zero3_engine(model, 4096, lr=0.0, zero_optimization=zero, hybrid_engine=block, rollout=rollout)


def measure(contender: Contender, ids: torch.Tensor, request: dict, counted: bool) -> torch.Tensor:
    """Make an optimizer step, then time the switch and the rollout over all ranks; returns the sequences."""
    update(contender.engine)
    before = contender.engine.stats()["gathered_bytes"]
    dist.barrier()
    start = time.perf_counter()
    with contender.switch():
        dist.barrier()
        switched = time.perf_counter()
        output = contender.generate(ids, **request)
        dist.barrier()
    end = time.perf_counter()
    if counted:
        contender.switch_s.append(switched - start)
        contender.rollout_s.append(end - start)
    if counted and contender.ours:
        contender.gathered_mib = (contender.engine.stats()["gathered_bytes"] - before) / 2**20
    return output


def update(engine: hybrid.HybridEngine) -> None:
    """An optimizer step with a learning rate of 0: the weights stay the same, which the engine cannot know."""
    ids = torch.ones(1, 8, dtype=torch.int64, device=engine.device)
    engine.train()
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


def parse() -> argparse.Namespace:
    """The flags."""
    parser = results.parser(__doc__, sequences=64, prompt_length=32, new_tokens=64, rounds=3)
    parser.add_argument("--shape", choices=[*SHAPES, *FUSED], default="10M")
    parser.add_argument("--dtype", choices=list(DTYPES), default="f32")
    parser.add_argument("--contenders", nargs="*", help="names in the table; default: all")
    return parser.parse_args()


if __name__ == "__main__":
    main()
