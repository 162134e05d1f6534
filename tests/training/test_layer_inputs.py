"""An engine's scores with the layers' inputs: the bits of its scores and rollouts, and what the model's own layers
receive, in every way to hold weights."""

import contextlib

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

import hybrid
from hybrid import SamplingParams
from hybrid.generation.routing import recorded_routing
from hybrid.generation.scoring import LayerInputScores
from hybrid.training.memory_plan import layer_input_bytes
from tests.decoders.test_layer_inputs import recorded_inputs, require_close
from tests.engines import engine_of, settings, storage_digest, train_step
from tests.marks import slow_but
from tests.tiny_models import ADAPTERS, ALL_FAMILIES, prompts, tiny_model, twin

SAMPLING = SamplingParams(max_new_tokens=20, temperature=0.9, seed=7, stop_token_ids=(5,))
MODES = {
    "zero 0": {"stage": 0},
    "pinned": {},
    "tensor parallel": {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}},
    "streamed": {"hybrid_engine": {"enabled": True, "pin_parameters": False}},
    "cached hidden states": {"rollout": {"cache_hidden_states": True, "prefix_cache_bytes": 10**6}},
    "int8 rollouts": {"rollout": {"weight_dtype": "int8"}},
    "little room": {"rollout": {"kv_cache_bytes": 6 * 32 * 3 * (2 * 2 * 8) * 4}},
    "unmerged": {"rollout": {"lora": "unmerged"}},
}


def kept(engine: hybrid.HybridEngine, *batch, adapters=None, temperature=0.9, rows=16) -> LayerInputScores:
    """As `engine.logps` calls it."""
    with engine._call(adapters):
        return engine._generator.score_with_layer_inputs(*batch, adapters, temperature, rows)


def updated(reference: nn.Module, engine: hybrid.HybridEngine) -> nn.Module:
    """The reference with the engine's current weights. A collective."""
    own, current = dict(reference.named_parameters()), dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(current.values())), torch.no_grad():
        for name, param in current.items():
            own[name].copy_(param)
    return reference


@torch.no_grad()
def require_inputs_of(
    model: nn.Module, found: LayerInputScores, sequences: torch.Tensor, mask: torch.Tensor, tolerance: float
) -> None:
    for row, (ids, own) in enumerate(zip(sequences, mask.bool(), strict=True)):
        place = found.index[row][own][:-1]
        replayed = contextlib.nullcontext()
        if found.router_indices is not None and tolerance >= 1e-3:  # rounding may choose other experts
            experts = found.router_indices[place]
            replayed = hybrid.replay_routing(
                model, torch.cat([experts, experts.new_full((1, *experts.shape[1:]), -1)])[None]
            )
        with recorded_inputs(model) as inputs, recorded_routing(model) as calls, replayed:
            model(ids[own][None], use_cache=False)
        require_close(found.layer_inputs[:, place], torch.stack([layer[0][0, :-1] for layer in inputs]), tolerance)
        if calls and tolerance < 1e-3:
            experts = torch.stack([layer[0][:-1] for layer in calls], dim=1)
            assert torch.equal(found.router_indices[place], experts)


def check_mode(family: str, adapter: str, dtype: torch.dtype, stage: int = 3, **blocks) -> None:
    rank = dist.get_rank()
    model = ADAPTERS[adapter](tiny_model(family)).to(dtype)
    reference = twin(model)
    engine = engine_of(model, settings(stage, dtype=dtype, **blocks))
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-4 if blocks.get("rollout", {}).get("lora") else 1e-5
    former = None
    for step in range(2):
        ids, mask = prompts(2 + rank, 37 + rank, padded=True, seed=rank)
        before = storage_digest(engine)
        with engine.inference():
            batch = engine.rollout(ids, mask, SAMPLING, num_generations=3)
            given = batch.sequences, batch.attention_mask
            found, scores = kept(engine, *given), engine.score(*given, temperature=0.9)
            base = kept(engine, *given, adapters=False)
        again = kept(engine, *given, rows=2)  # in a window of its own
        assert storage_digest(engine) == before
        for other in (found, again):
            assert torch.equal(other.scores.per_token_logps, scores.per_token_logps)
            assert torch.equal(other.scores.entropies, scores.entropies)
            assert torch.equal(other.layer_inputs, found.layer_inputs)
        if blocks.get("rollout", {}).get("weight_dtype") != "int8":
            width = batch.completion_ids.shape[1]
            logps = found.scores.per_token_logps[:, -width:] * batch.completion_mask
            assert torch.equal(logps, batch.old_per_token_logps * batch.completion_mask)
        assert found.layer_inputs.shape[1] < int(given[1].sum()) * 0.7, "prompts are shared by three rows"
        assert found.layer_inputs.dtype == dtype
        tensors = (found.layer_inputs, found.router_indices)
        held = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        assert layer_input_bytes(engine._builder.info.layout.spec, dtype, found.layer_inputs.shape[1]) == held
        plan = engine.memory_plan(2, found.layer_inputs.shape[1] - 8, 8)
        assert plan.layer_inputs == 2 * held and f"keeps {2 * held / 2**20:.1f} of layer inputs" in str(plan)
        require_inputs_of(updated(reference, engine), found, *given, tolerance)
        if adapter == "peft":
            with reference.disable_adapter():
                require_inputs_of(reference, base, *given, tolerance)
        if former is not None:
            assert not torch.equal(former[1:, 0], found.layer_inputs[1:, 0])
        former = found.layer_inputs
        engine.train()
        train_step(engine, step)
    engine.destroy()


QUICK = ["tensor parallel", "streamed", "little room"]


@pytest.mark.parametrize("mode", slow_but(QUICK, [mode for mode in MODES if mode != "unmerged"]))
def test_scores_with_layer_inputs_are_the_bits_of_scores_and_rollouts(ranks, mode):
    ranks.run(check_mode, "qwen3_moe" if mode == "tensor parallel" else "llama", "none", torch.float32, **MODES[mode])


@pytest.mark.parametrize("mode", slow_but(["pinned"], ["pinned", "streamed", "tensor parallel", "unmerged"]))
def test_adapters(ranks, mode):
    ranks.run(check_mode, "llama", "peft", torch.float32, **MODES[mode])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", slow_but(["gemma3_text", "gpt2"], ALL_FAMILIES))
def test_families(ranks, family, dtype):
    ranks.run(check_mode, family, "none", dtype)


def check_ranks_without_rows() -> None:
    """A rank without rows, and then another one whose call is refused: no rank hangs."""
    rank = dist.get_rank()
    for blocks in (MODES["tensor parallel"], MODES["streamed"], {}):
        engine = engine_of(tiny_model("mixtral"), settings(3, **blocks))
        ids, mask = prompts(4 * rank, 20, padded=False) if rank else (torch.zeros(0, 20, dtype=torch.int64),) * 2
        found = kept(engine, ids, mask)
        assert found.index.shape == (4 * rank, 20)
        assert found.scores.per_token_logps.shape == (4 * rank, 19)
        assert found.layer_inputs.shape == (4, 19 * 4 * rank, 32)
        assert len(found.router_indices) == found.layer_inputs.shape[1]
        ids, mask = prompts(2, 12, padded=False)
        gap = mask.clone()
        gap[0, 5] = 0
        refused = pytest.raises(NotImplementedError, match="zeros between a row's ones")
        with contextlib.nullcontext() if rank else refused:
            kept(engine, ids, mask if rank else gap)
        engine.destroy()


def test_ranks_may_have_no_rows(ranks):
    ranks.run(check_ranks_without_rows)


def check_native() -> None:
    engine = engine_of(tiny_model("llama"), settings(3, rollout={"containers": "native"}))
    ids, mask = prompts(2, 12, padded=False)
    with pytest.raises(NotImplementedError, match="layer inputs: the fused decoder keeps them, and cannot run: "):
        kept(engine, ids, mask)
    engine.destroy()


def test_models_that_run_in_their_own_layers_are_refused_with_the_reason(ranks):
    ranks.run(check_native)
