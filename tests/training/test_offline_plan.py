"""Plans from a configuration alone are those of the engine that trains such a model."""

import pickle
import subprocess
import sys
from itertools import product

import pytest
import torch
import torch.distributed as dist

import hybrid
from hybrid.training.offline_plan import Training, optimizer_bytes
from tests.marks import slow_but
from tests.tiny_models import tiny_model, with_peft

PLANNING = """
import pickle, sys
import torch
from hybrid.config import HybridEngineConfig, RolloutConfig
from hybrid.training.offline_plan import Training, offline_plan
config, training, settings, rollout = pickle.load(sys.stdin.buffer)
plan = offline_plan(config, training, HybridEngineConfig(**settings), RolloutConfig(**rollout), 3, 24)
sys.stdout.buffer.write(b"plan:" + pickle.dumps((plan.plan.needs, plan.fallback_reason)))
"""


def offline(config, training: Training, settings: dict, **rollout):
    """Needs by mode, and the fallback reason, of an offline plan, made in a process that has no process group."""
    done = subprocess.run(
        [sys.executable, "-c", PLANNING],
        input=pickle.dumps((config, training, settings, rollout)),
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr.decode()
    return pickle.loads(done.stdout.split(b"plan:", 1)[1])


def check_equal(family: str, lora_rank: int, stage: int) -> None:
    model = tiny_model(family)
    config = model.config
    if lora_rank:
        model = with_peft(model, r=lora_rank)
    engine, *_ = hybrid.initialize(
        model=model,
        model_parameters=[param for param in model.parameters() if param.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "hybrid_engine": {"enabled": True, "max_out_tokens": 24},
        },
    )
    expected = engine.memory_plan(3, 16, 8).needs
    if dist.get_rank() == 0:
        training = Training(dist.get_world_size(), stage, lora_rank, torch.float32, "cpu")
        needs, reason = offline(config, training, {"enabled": True, "max_out_tokens": 24})
        assert needs == expected, (needs, expected)
        assert reason == ""
    dist.barrier()
    engine.destroy()


PLANNED = list(product((("llama", 0), ("llama", 4), ("gemma3_text", 0), ("mixtral", 0)), (0, 3)))


@pytest.mark.parametrize(("model", "stage"), slow_but([(("llama", 4), 3), (("mixtral", 0), 0)], PLANNED))
def test_the_plan_is_the_engines(ranks, model, stage):
    """model: its family, and the rank of its adapters."""
    ranks.run(check_equal, *model, stage)


@pytest.mark.parametrize(("family", "ranks"), [("qwen3_5_text", 4), ("llama", 3)])
def test_heads_that_the_ranks_cannot_divide_are_refused(family, ranks):
    training = Training(ranks, device="cpu")
    settings = {"enabled": True, "inference_tp_size": ranks}
    message = f"ValueError: hybrid_engine.inference_tp_size: {ranks} given; the model's .* can be shared out by 1, 2"
    with pytest.raises(AssertionError, match=message):  # of the process that plans
        offline(tiny_model(family).config, training, settings)


def test_a_plan_of_native_layers_takes_a_size_that_the_decoder_cannot_be_divided_by():
    """As the engine does: no decoder is sliced."""
    config, settings = tiny_model("qwen3_5_text").config, {"enabled": True, "inference_tp_size": 4}
    _, reason = offline(config, Training(4, device="cpu"), settings, containers="native")
    assert reason == "rollout.containers=native"


def test_the_optimizer_takes_what_the_zero_paper_says():
    """ZeRO's table 1: 7.5 B parameters on 64 ranks take 120 GB without it, and 31.4, 16.6 and 1.9 GB at its stages,
    weights included (2 bytes each, partitioned at stage 3)."""
    numel, weights = 7.5e9, 2
    held = []
    for stage in range(4):
        at_rest = weights * numel / (64 if stage == 3 else 1)
        held.append((at_rest + optimizer_bytes(Training(64, stage, 0, torch.bfloat16), int(numel))) / 1e9)
    assert held == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)
