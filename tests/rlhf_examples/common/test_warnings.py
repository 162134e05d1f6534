"""What a run warns of once, before it trains."""

import os
import subprocess
import sys
import warnings

import pytest
import torch

from rlhf_examples.common import engines
from rlhf_examples.common.arguments import SFTArguments
from rlhf_examples.common.engines import Training
from rlhf_examples.data import held_out


def messages_of(training: Training) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.warn_about_schedule()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("steps", [1, 7, 20])
@pytest.mark.parametrize("warmup", [0, 1, 7, 8, 100])
@pytest.mark.parametrize("kind", ["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"])
def test_a_learning_rate_below_its_peak_is_warned_of(monkeypatch, kind, warmup, steps):
    """The oracle is torch's optimizer, which takes every step of the run."""
    monkeypatch.setattr(engines.dist, "get_rank", lambda: 0)
    flags = {"lr_scheduler_type": kind, "num_warmup_steps": warmup, "learning_rate": 2e-3}
    training = Training.from_args(SFTArguments(**flags), "", 1, steps)
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=2e-3)
    schedule, rates = training.schedule(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    messages = messages_of(training)
    if kind == "constant":
        assert ["no effect with constant" in message for message in messages] == [True] * bool(warmup)
    elif max(rates) < 2e-3:
        (message,) = messages
        assert f"never reaches its peak, but {max(rates) / 2e-3:.0%} of it" in message
        if warmup > steps:
            assert message.startswith(f"num_warmup_steps: {warmup} given for {steps} optimizer steps")
    else:
        assert messages == []


def test_other_ranks_do_not_warn(monkeypatch):
    training = Training.from_args(SFTArguments(num_warmup_steps=9), "", 1, 3)
    monkeypatch.setattr(engines.dist, "get_rank", lambda: 1)
    assert messages_of(training) == []


def test_evaluations_that_are_larger_than_the_data_are_warned_of(monkeypatch):
    monkeypatch.setattr(held_out.dist, "get_rank", lambda: 0)
    with pytest.warns(UserWarning, match="an evaluation has 5 rows, and there are 4 training examples"):
        held_out.warn_if_larger([{}] * 5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        held_out.warn_if_larger([{}] * 4, 4)


BFLOAT16 = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import hybrid

def engine(bf16, trains=True):
    sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).requires_grad_(trains)
    optimizer = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}} if trains else {}
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": bf16}, "zero_optimization": {"stage": 0}}
    parameters = list(model.parameters()) if trains else None
    hybrid.initialize(model=model, model_parameters=parameters, config=config | optimizer)

engine(bf16=False)
engine(bf16=True, trains=False)
print("TRAINS", file=sys.stderr, flush=True)
engine(bf16=True)
engine(bf16=True)
"""


def test_bfloat16_without_its_instructions_is_warned_of_once_by_engines_that_train():
    """oneDNN can be told to use AVX2 at most. In a process of its own, because it reads that once."""
    done = subprocess.run(
        [sys.executable, "-c", BFLOAT16],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONWARNINGS": "always"},
    )
    assert done.returncode == 0, done.stderr
    before, after = done.stderr.split("TRAINS")
    assert "bfloat16 instructions" not in before, "frozen engines and float32 do not train slowly"
    assert after.count("this CPU has no bfloat16 instructions: training takes up to 50 times as long") == 1
    assert "--dtype float32" in after
