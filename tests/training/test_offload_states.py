"""`rollout.offload_states`: states are on the host inside a window and restored after it; training is bit-identical."""

from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from hybrid import HybridEngine, SamplingParams
from hybrid.weights.offload import movable_states
from tests.engines import engine_of, settings, storage_digest, train_step
from tests.marks import slow_but
from tests.tiny_models import prompts, tiny_model, with_peft

IDS, MASK = prompts(2, 5, padded=True)


def offloading(stage: int, dtype: torch.dtype = torch.float32, offload: bool = True, **blocks) -> dict:
    """Settings of an engine with offload_states on or off."""
    return settings(stage, 0, dtype, rollout={"offload_states": offload}, **blocks)


def torch_adamw_as_fused_adam():
    """ZeRO-3 moves only states of DeepSpeed's FusedAdam, which takes minutes to compile; torch's AdamW has the same
    ones."""
    return patch.object(deepspeed.ops.adam.fused_adam, "FusedAdam", torch.optim.AdamW)


def optimizer_state(engine: HybridEngine) -> list[torch.Tensor]:
    """Unpartitioned master weights and Adam states of every trained parameter."""
    return [
        state
        for param in engine.module.parameters()
        if param.requires_grad
        for state in (
            safe_get_full_fp32_param(param),
            safe_get_full_optimizer_state(param, "exp_avg"),
            safe_get_full_optimizer_state(param, "exp_avg_sq"),
        )
    ]


def backward(engine: HybridEngine, seed: int) -> torch.Tensor:
    ids = prompts(2, 9, padded=False, seed=seed * 10 + dist.get_rank())[0]
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    return loss.detach()


def check_training(stage: int, dtype: torch.dtype, adapter: bool) -> None:
    """Windows before the first step, between steps, between micro batches, and between backward and step."""
    with torch_adamw_as_fused_adam():
        moved, plain = (
            engine_of(
                with_peft(tiny_model("llama")) if adapter else tiny_model("llama"),
                offloading(stage, dtype, offload, gradient_accumulation_steps=2),
            )
            for offload in (True, False)
        )
        for step in range(3):
            for part in range(2):
                generate(moved)
                assert torch.equal(*(backward(engine, 2 * step + part) for engine in (moved, plain)))
                generate(moved)
                for engine in (moved, plain):
                    engine.step()
            generate(moved)
            assert storage_digest(moved) == storage_digest(plain)
            actual, expected = optimizer_state(moved), optimizer_state(plain)
            assert len(actual) == len(expected) > 10
            assert all(map(torch.equal, actual, expected))
        assert moved.weight_version == 3
        request = {"attention_mask": MASK, "max_new_tokens": 4}
        assert torch.equal(moved.generate(IDS, **request), plain.generate(IDS, **request))


def generate(engine: HybridEngine) -> None:
    with engine.inference():
        batch = engine.rollout(IDS, MASK, SamplingParams(max_new_tokens=3, seed=1))
        engine.score(batch.sequences, batch.attention_mask)


@pytest.mark.parametrize(
    ("stage", "dtype", "adapter"),
    slow_but(
        [(3, torch.bfloat16, True)],
        [
            (1, torch.bfloat16, False),
            (2, torch.float32, False),
            (2, torch.bfloat16, True),
            (3, torch.float32, False),
            (3, torch.bfloat16, True),
        ],
    ),
)
def test_training_is_bit_identical_with_and_without_offloading(ranks, stage, dtype, adapter):
    ranks.run(check_training, stage, dtype, adapter)


def check_offloaded(stage: int, dtype: torch.dtype) -> None:
    """Once for nested windows; never the weights; not gradients that a pending step needs, where offloading loses
    them."""
    with torch_adamw_as_fused_adam():
        engine = engine_of(tiny_model("llama"), offloading(stage, dtype))
        train_step(engine)
        gone = engine.optimizer.offloaded_states
        expected = {State.optim_states, State.hp_params, State.lp_grads}
        storages = [param.data_ptr() for param in engine.module.parameters()]
        with (
            patch.object(engine.optimizer, "offload_states", wraps=engine.optimizer.offload_states) as offloads,
            patch.object(engine.optimizer, "reload_states", wraps=engine.optimizer.reload_states) as reloads,
        ):
            with engine.inference():
                assert gone - {State.contiguous_grad_buffer} == expected
                with engine.inference(adapters=False):
                    engine.generate(IDS, attention_mask=MASK, max_new_tokens=2)
                    assert gone - {State.contiguous_grad_buffer} == expected
                assert offloads.call_count == 1 and reloads.call_count == 0
            assert offloads.call_count == reloads.call_count == 1
        assert not gone
        assert storages == [param.data_ptr() for param in engine.module.parameters()]
        assert engine.stats()["release_s"] > 0
        backward(engine, 1)
        with engine.inference():
            assert (State.lp_grads in gone) == (stage < 3)
            assert State.lp_params not in gone
        engine.step()
        if stage == 3:  # ZeRO-3 in float32 uses the weights as master weights, which stay too
            masters = engine.optimizer.fp32_partitioned_groups_flat
            with patch.object(engine.optimizer, "fp16_partitioned_groups_flat", masters):
                assert State.hp_params not in movable_states(engine.optimizer)


@pytest.mark.parametrize(
    ("stage", "dtype"),
    slow_but(
        [(2, torch.float32), (3, torch.bfloat16)],
        [(1, torch.bfloat16), (2, torch.float32), (3, torch.float32), (3, torch.bfloat16)],
    ),
)
def test_which_states_are_offloaded(ranks, stage, dtype):
    ranks.run(check_offloaded, stage, dtype)


def check_exception(stage: int) -> None:
    """An exception inside the window, or while states are moved, on any rank: states are restored and training
    continues."""
    with torch_adamw_as_fused_adam():
        hit, calm = (engine_of(tiny_model("llama"), offloading(stage, torch.bfloat16, o)) for o in (True, False))
        for step, broken in enumerate((False, True)):
            assert torch.equal(train_step(hit, step), train_step(calm, step))
            own = hit.optimizer.offload_states

            def fails(own=own, **kwargs) -> None:
                own(**kwargs)
                raise ArithmeticError

            with (
                pytest.raises(ArithmeticError),
                patch.object(hit.optimizer, "offload_states", fails if broken else own),
                hit.inference(),
            ):
                assert hit.optimizer.offloaded_states
                raise ArithmeticError
            assert not hit.optimizer.offloaded_states
            assert hit.module.training
        assert torch.equal(train_step(hit, 2), train_step(calm, 2))
        assert storage_digest(hit) == storage_digest(calm)
        assert all(map(torch.equal, optimizer_state(hit), optimizer_state(calm)))


@pytest.mark.parametrize("stage", slow_but([3], [2, 3]))
def test_states_are_restored_after_an_exception(ranks, stage):
    ranks.run(check_exception, stage)


def zero(stage: int, **offloads) -> dict:
    """Settings with ZeRO's own CPU offload."""
    config = offloading(stage, zero_force_ds_cpu_optimizer=False)
    config["zero_optimization"].update({name: {"device": device} for name, device in offloads.items()})
    return config


INVALID = {
    "stage 0": (zero(0), r"offload_states: true given with zero_optimization.stage=0.*use stage 1, 2 or 3, or false"),
    "an optimizer on the host": (zero(2, offload_optimizer="cpu"), r"zero_optimization.offload_optimizer.device=cpu"),
    "parameters on the host": (
        zero(3, offload_optimizer="cpu", offload_param="cpu"),
        r"zero_optimization.offload_param.device=cpu",
    ),
    "an optimizer that ZeRO-3 does not move": (zero(3), r"AdamW and ZeRO-3.*FusedAdam"),
}


def check_settings_that_raise() -> None:
    for what, (config, message) in INVALID.items():
        with pytest.raises(ValueError, match=message):
            engine_of(tiny_model("llama"), config)
            raise AssertionError(what)
    config = zero(3)
    del config["optimizer"]
    with pytest.raises(ValueError, match="DeepSpeedZeRoOffload as DeepSpeed's optimizer, which has no states"):
        engine_of(tiny_model("llama").requires_grad_(False), config)


def test_offload_states_without_movable_states_raises(ranks):
    ranks.run(check_settings_that_raise)
