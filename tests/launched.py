"""The script that every launcher test runs: an engine from `deepspeed.initialize`, a rollout, a step."""

import sys

import deepspeed
import torch
import torch.distributed as dist

import hybrid
from tests.tiny_models import prompts, tiny_model


def main() -> None:
    hybrid.install()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "hybrid_engine": {"enabled": True},
    }
    engine = deepspeed.initialize(model=tiny_model("llama"), config=config)[0]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ids, mask = prompts(2, 6, padded=True)
    with engine.inference():
        batch = engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=4, temperature=0.0))
    sequences = batch.sequences
    engine.backward(engine(input_ids=sequences, labels=sequences).loss)
    engine.step()
    # One line in one write: ranks share the output.
    sys.stdout.write(f"\nrank {rank} of {world_size}: {sequences.tolist()}, version {engine.weight_version}\n")
    sys.stdout.flush()
    assert isinstance(engine, hybrid.HybridEngine)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
