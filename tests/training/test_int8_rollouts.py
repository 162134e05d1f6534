"""`rollout.weight_dtype: int8`: rollouts equal Hugging Face with rounded weights, at every version; scores, training
and training storage are those of the engine without it; the plan equals the measured memory."""

import warnings

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

import hybrid
from hybrid.weights.int8_copy import Int8Copy
from rlhf_examples.common.policy_losses import importance_sampling_weights
from tests.engines import engine_of, require_greedy_tokens, settings, storage_digest, train_step
from tests.inference.test_int8 import rounded
from tests.marks import slow_but
from tests.tiny_models import ADAPTERS, prompts, tiny_model, twin, with_peft
from tests.training.test_memory_modes import LiveBytes
from tests.training.test_offload_states import torch_adamw_as_fused_adam

INT8 = {"rollout": {"weight_dtype": "int8", "containers": "fused"}}
GREEDY = {"max_new_tokens": 8, "do_sample": False}
RECURRENT = [(family, "peft", 3) for family in ("qwen3_5_text", "falcon_h1", "lfm2", "mamba2", "bamba", "olmo_hybrid")]


def int8_engine(model: nn.Module, stage: int = 3, dtype: torch.dtype = torch.float32, **blocks) -> hybrid.HybridEngine:
    """An engine that rolls out in int8; `rollout` in `blocks` adds to INT8's."""
    rollout = INT8["rollout"] | blocks.pop("rollout", {})
    return engine_of(model, settings(stage, 0, dtype, rollout=rollout, **blocks))


def current(engine: hybrid.HybridEngine, like: nn.Module) -> nn.Module:
    """`like`, a model on this rank alone, with the engine's current training weights."""
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters([param for param in params if hasattr(param, "ds_id")]), torch.no_grad():
        for own, param in zip(like.parameters(), params, strict=True):
            own.copy_(param)
    return like


def merged(model: nn.Module) -> nn.Module:
    """A copy with the adapters merged in float32: by PEFT, or DeepSpeed-Chat's by their formula."""
    model = twin(model)
    if hasattr(model, "merge_and_unload"):
        return model.merge_and_unload()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if hasattr(child, "lora_right_weight"):
                delta = (child.lora_right_weight @ child.lora_left_weight).T * child.lora_scaling
                linear = nn.Linear(*reversed(child.weight.shape), bias=child.bias is not None)
                linear.weight.data, linear.bias = child.weight.detach() + delta.detach(), child.bias
                setattr(module, name, linear)
    return model


def require_generates(engine: hybrid.HybridEngine, expected: nn.Module, adapters: bool | None = None) -> None:
    """Greedy tokens are those of a Hugging Face model, and so are a rollout's logprobs. Ranks differ in rows."""
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, 7 + rank, padded=True, seed=rank)
    tokens = expected.generate(ids, attention_mask=mask, **GREEDY)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the model runs in native containers")
        actual = engine.generate(ids, attention_mask=mask, adapters=adapters, **GREEDY)
        batch = engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=8, temperature=0.0), adapters=adapters)
    whole = torch.cat([mask, torch.ones_like(tokens[:, ids.shape[1] :])], dim=1)
    with torch.no_grad():
        logits = expected(tokens, attention_mask=whole).logits
    require_greedy_tokens(actual, tokens, logits)
    assert torch.equal(actual, tokens)
    real = batch.completion_mask.bool()
    # As in `current`, weights are merged in another order than PEFT's: in float32 a level of int8 may differ.
    torch.testing.assert_close(
        batch.old_per_token_logps[real], completion_logps(expected, batch)[real], atol=2e-4, rtol=1e-4
    )


def completion_logps(model: nn.Module, batch: hybrid.RolloutBatch) -> torch.Tensor:
    """Logprobs of a batch's completions by a Hugging Face model.  [rows, completion]"""
    width = batch.completion_mask.shape[1]
    positions = (batch.attention_mask.cumsum(1) - 1).clamp(min=0)
    more = {} if model.config.model_type == "bloom" else {"position_ids": positions}
    with torch.no_grad():
        logits = model(batch.sequences, attention_mask=batch.attention_mask, **more).logits[:, -width - 1 : -1]
    return logits.float().log_softmax(-1).gather(2, batch.completion_ids[:, :, None])[:, :, 0]


def check_rollouts(family: str, adapter: str, stage: int, dtype: torch.dtype = torch.float32) -> None:
    """Two versions; a window with and without adapters; training is that of an engine that never switched."""
    engine = int8_engine(ADAPTERS[adapter](tiny_model(family)), stage)
    plain = engine_of(ADAPTERS[adapter](tiny_model(family)), settings(stage, 0))
    reference = ADAPTERS[adapter](tiny_model(family)).eval()
    for step in range(3):
        before = storage_digest(engine)
        weights = current(engine, reference)
        require_generates(engine, rounded(merged(weights), 1))
        if adapter == "peft":
            with weights.disable_adapter(), engine.inference(adapters=False):
                require_generates(engine, rounded(twin(weights).unload(), 1))
        require_scores(engine, current(engine, ADAPTERS[adapter](tiny_model(family)).eval()))
        assert storage_digest(engine) == before
        assert engine.stats()["fallback_reason"] == ""
        reference = ADAPTERS[adapter](tiny_model(family)).eval()
        engine.train()
        losses = [train_step(each, step) for each in (engine, plain)]
        assert torch.equal(*losses)
        assert storage_digest(engine) == storage_digest(plain), "a rollout changes training"
    engine.destroy()


def require_scores(engine: hybrid.HybridEngine, exact: nn.Module) -> None:
    """Scores are the training weights', with and without adapters, and differ from the int8 rollout's logprobs."""
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, 7 + rank, padded=True, seed=rank)
    batch = engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=8, temperature=1.0, seed=5))
    width, real = batch.completion_mask.shape[1], batch.completion_mask.bool()
    scores = engine.score(batch.sequences, batch.attention_mask).per_token_logps[:, -width:]
    torch.testing.assert_close(scores[real], completion_logps(exact, batch)[real], atol=1e-5, rtol=1e-5)
    if hasattr(exact, "disable_adapter"):
        base = engine.score(batch.sequences, batch.attention_mask, adapters=False).per_token_logps[:, -width:]
        with exact.disable_adapter():
            torch.testing.assert_close(base[real], completion_logps(exact, batch)[real], atol=1e-5, rtol=1e-5)
    metrics = hybrid.sampling_metrics(batch.old_per_token_logps, scores, real)
    assert 1e-4 < metrics["sampling/sampling_logp_difference/mean"] < 0.5
    weights = importance_sampling_weights(scores, batch.sampling_per_token_logps, real, 2.0)
    assert (weights[real] != 1).float().mean() > 0.9
    assert (weights[real] - 1).abs().mean() < 0.5


@pytest.mark.parametrize(
    ("family", "adapter", "stage"),
    slow_but(
        [("llama", "none", 3), ("llama", "peft", 3), ("gpt2", "none", 1), ("llama", "peft", 2), RECURRENT[0]],
        [
            *[(family, adapter, 3) for family in ("llama", "gpt2", "gpt_neox", "phi3") for adapter in ("none", "peft")],
            *[(family, "none", 1) for family in ("llama", "gpt2", "bloom", "falcon", "gemma2", "opt")],
            *[("llama", adapter, stage) for adapter in ("peft", "chat") for stage in (0, 2)],
            ("llama", "chat", 3),
            *RECURRENT,
        ],
    ),
)
def test_rollouts_equal_hugging_face_with_rounded_weights(ranks, family, adapter, stage):
    ranks.run(check_rollouts, family, adapter, stage)


class Interruption(Exception):
    """Raised by user code in the middle of a rollout."""


class Interrupting:
    """A streamer that raises at its third token."""

    def __init__(self):
        self.count = 0

    def put(self, value: torch.Tensor) -> None:
        self.count += 1
        if self.count == 3:
            raise Interruption

    def end(self) -> None:
        """Called after the last token."""


def check_exceptions(stage: int) -> None:
    """One in a call; one in a window; a call that is refused on one rank alone, while the other one refreshes."""
    engine, reference = int8_engine(with_peft(tiny_model("llama")), stage), with_peft(tiny_model("llama")).eval()
    before, rank = storage_digest(engine), dist.get_rank()
    ids, mask = prompts(2, 6, padded=True, seed=rank)
    for _ in range(2):
        with pytest.raises(Interruption):
            engine.generate(ids[:1], attention_mask=mask[:1], streamer=Interrupting(), **GREEDY)
        assert engine.module.training
        with pytest.raises(Interruption), engine.inference():
            engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=3, seed=1))
            raise Interruption
        assert engine.module.training and storage_digest(engine) == before
        train_step(engine)
        before = storage_digest(engine)
    sampling = hybrid.SamplingParams(max_new_tokens=3 if rank == 0 else 10**4, seed=1)
    if rank == 0:
        engine.rollout(ids, mask, sampling)
    else:
        with pytest.raises(ValueError, match="max_out_tokens"):
            engine.rollout(ids, mask, sampling)
    require_generates(engine, rounded(merged(current(engine, reference)), 1))
    assert storage_digest(engine) == before
    assert not any("forward" in module.__dict__ for module in engine.module.modules())


@pytest.mark.parametrize("stage", slow_but([3], [0, 3]))
def test_exceptions_leave_mode_and_weights(ranks, stage):
    ranks.run(check_exceptions, stage)


def check_frozen(stage: int) -> None:
    """LoRA on the queries alone: what no adapter changes is quantized once; a load quantizes everything again."""
    model = with_peft(tiny_model("llama"), target_modules=["q_proj"])
    engine = int8_engine(model, stage, rollout={"keep_snapshot": True})
    copy: Int8Copy = engine._runtime.int8.snapshot
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    sampling = hybrid.SamplingParams(max_new_tokens=3, seed=1)
    queries = 3 * 32 * 32
    everything = sum(entry.module._parameters[entry.name].numel() for entry in copy.entries.values() if entry.quantized)
    assert everything == queries + 3 * (2 * 16 * 32 + 32 * 32 + 3 * 48 * 32) + 97 * 32
    quantized = 0
    for step in range(3):
        for _ in range(2):
            engine.rollout(ids, mask, sampling)
        quantized += queries if step else everything
        assert copy.quantized_elements == quantized, step
        train_step(engine, step)
    engine.mark_weights_changed()
    engine.rollout(ids, mask, sampling)
    assert copy.quantized_elements == quantized + everything


@pytest.mark.parametrize("stage", slow_but([3], [0, 3]))
def test_frozen_weights_are_quantized_once(ranks, stage):
    ranks.run(check_frozen, stage)


def check_defects() -> None:
    """A wrong copy is refused, with a warning, and rollouts run in the model's own layers, on its own weights."""
    reference = tiny_model("llama").eval()
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    expected = reference.generate(ids, attention_mask=mask, **GREEDY)

    def of_layer(role: str, change) -> None:
        def keep(self, entry, whole):
            own(self, entry, change(whole) if (entry.name, entry.module) == (role, self.holders[2]) else whole)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Int8Copy, "_keep", keep)
            for dtype in (torch.float32, torch.bfloat16):
                engine = int8_engine(tiny_model("llama", dtype=dtype), dtype=dtype)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    actual = engine.generate(ids, attention_mask=mask, **GREEDY)
                assert "layer 1" in engine.stats()["fallback_reason"], (role, dtype, engine.stats()["fallback_reason"])
                warned = any("native containers: layer 1" in str(warning.message) for warning in caught)
                assert warned == (dist.get_rank() == 0)
                assert dtype != torch.float32 or torch.equal(actual, expected)
                engine.destroy()

    own = Int8Copy._keep
    of_layer("down_weight", lambda weight: 2 * weight)
    of_layer("down_weight", lambda weight: 0 * weight)
    of_layer("o_weight", lambda weight: -weight)
    of_layer("k_weight", lambda weight: weight.flip(0))


@pytest.mark.slow
def test_a_wrong_copy_is_refused(ranks):
    ranks.run(check_defects)


def check_bfloat16(stage: int) -> None:
    """The copy is checked against the model's own modules in bfloat16, and decodes; scores are the trainer's."""
    engine = int8_engine(with_peft(tiny_model("llama", dtype=torch.bfloat16)), stage, torch.bfloat16)
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, 6, padded=True, seed=rank)
    for step in range(2):
        batch = engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=6, seed=step), num_generations=2)
        assert engine.stats()["fallback_reason"] == ""
        real, width = batch.completion_mask.bool(), batch.completion_mask.shape[1]
        scores = engine.score(batch.sequences, batch.attention_mask).per_token_logps[:, -width:]
        with torch.no_grad():
            engine.train()
            positions = (batch.attention_mask.cumsum(1) - 1).clamp(min=0)
            logits = engine(batch.sequences, attention_mask=batch.attention_mask, position_ids=positions).logits
        trained = (
            logits[:, -width - 1 : -1].float().log_softmax(-1).gather(2, batch.completion_ids[:, :, None])[:, :, 0]
        )
        of_score, of_rollout = (
            hybrid.sampling_metrics(logps, trained, real)["sampling/sampling_logp_difference/mean"]
            for logps in (scores, batch.old_per_token_logps)
        )
        assert of_score < of_rollout / 2
        train_step(engine, step)


@pytest.mark.parametrize("stage", slow_but([3], [1, 3]))
def test_bfloat16_scores_are_nearer_to_the_trainer_than_rollouts(ranks, stage):
    ranks.run(check_bfloat16, stage)


def check_offload() -> None:
    with torch_adamw_as_fused_adam():
        settled = {"rollout": {"offload_states": True, "keep_snapshot": False}}
        engine, reference = int8_engine(tiny_model("llama"), **settled), tiny_model("llama").eval()
        for step in range(2):
            require_generates(engine, rounded(current(engine, reference), 1))
            engine.train()
            assert engine.stats()["snapshot_bytes"] == 0
            train_step(engine, step)


@pytest.mark.slow
def test_states_are_offloaded_and_the_copy_is_freed(ranks):
    ranks.run(check_offload)


# Wide enough for the weights to be most of the memory; at two sizes.
WIDE = {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 8}
PLANNED = {
    "128": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, **WIDE},
    "256": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, **WIDE},
}


def check_bfloat16_plan(stage: int) -> None:
    """Copies of both decoders are in the plan: the kernels read norms in float32."""
    engine = int8_engine(tiny_model("llama", dtype=torch.bfloat16, **PLANNED["128"]), stage, torch.bfloat16)
    ids, mask = prompts(3, 40, padded=False, seed=dist.get_rank())
    plan = engine.memory_plan(3, 40, 4)
    need = plan.needs[plan.in_use]
    with engine.inference():
        engine.score(ids, mask)
        engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=4, seed=0))
        stats = engine.stats()
        of_layer = need.containers * (stage == 3)
        assert need.containers <= stats["container_bytes"] <= need.containers + of_layer
        assert stats["peak_bytes"] <= need.total
    assert need.containers > 0 and engine._runtime.int8.snapshot.nbytes() == need.snapshot


@pytest.mark.parametrize("stage", slow_but([1], [1, 3]))
def test_the_plan_counts_both_decoders_copies(ranks, stage):
    ranks.run(check_bfloat16_plan, stage)


def check_plan(size: str, adapter: str, layers_per_group: int) -> None:
    """The live bytes of a refresh and of what is kept, at stage 3; and a whole rollout's peak by `stats()`."""
    block = {"hybrid_engine": {"tp_gather_partition_size": layers_per_group}}
    engine = int8_engine(ADAPTERS[adapter](tiny_model("llama", **PLANNED[size])), **block)
    rows, length, new = 3, 40, 20
    ids, mask = prompts(rows, length, padded=False, seed=dist.get_rank())
    plan = engine.memory_plan(rows, length, new)
    need = plan.needs[plan.in_use]
    assert str(plan.in_use) == "int8"
    engine.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new)
    stats = engine.stats()
    assert (stats["snapshot_bytes"], stats["kv_bytes"]) == (need.snapshot, need.kv)
    assert stats["container_bytes"] == need.containers
    copy = engine._runtime.int8.snapshot
    group = copy.planned()[1]
    matrices = sum(entry.module._parameters[entry.name].numel() for entry in copy.entries.values() if entry.quantized)
    assert matrices < need.snapshot < 1.1 * matrices + 2 * 97 * PLANNED[size]["hidden_size"] * 4
    copy.release()
    with torch.no_grad(), LiveBytes(engine.module) as live, engine.inference():
        copy.refresh(engine._profiler.phase, True)
    assert 0.9 * (need.snapshot + group) <= live.peak <= 1.02 * (need.snapshot + group), (live.peak, need, group)
    assert need.gather >= group
    engine.score(ids, mask)
    need = need.total - need.logits - need.activations  # which are of the largest forward that the plan allows
    measured = engine.stats()["peak_bytes"] - max(
        each.peak_activation_bytes() for each in (engine._runtime.fused, engine._runtime.int8)
    )
    assert 0.9 * need <= measured <= need, (measured, need)


@pytest.mark.parametrize(
    ("size", "adapter", "layers_per_group"),
    slow_but(
        [("128", "peft", 2)], [(size, adapter, n) for size in PLANNED for adapter in ("none", "peft") for n in (1, 2)]
    ),
)
def test_the_plan_is_the_measured_peak(ranks, size, adapter, layers_per_group):
    ranks.run(check_plan, size, adapter, layers_per_group)


REFUSED = [
    ({"hybrid_engine": {"inference_tp_size": 2}}, "inference_tp_size: 2 given; with rollout.weight_dtype=int8.*use 1"),
    ({"hybrid_engine": {"inference_tp_size": "auto"}}, "inference_tp_size: 'auto' given; .*use 1"),
    ({"hybrid_engine": {"pin_parameters": False}}, "pin_parameters: false given; with rollout.weight_dtype=int8.*true"),
    ({"hybrid_engine": {"pin_parameters": "auto"}}, "pin_parameters: 'auto' given; .*use true"),
    ({"rollout": {"lora": "unmerged"}}, "rollout.lora: 'unmerged' given; .*use merged"),
    ({"rollout": {"containers": "native"}}, "rollout.weight_dtype: 'int8' given; .*containers=fused"),
    ({"rollout": {"weight_dtype": "int4"}}, "rollout.weight_dtype: 'int4' given; .*'model' or 'int8'"),
]


def check_refusals() -> None:
    for blocks, message in REFUSED:
        with pytest.raises(ValueError, match=f"(?s){message}"):
            int8_engine(tiny_model("llama"), **blocks)
    with pytest.raises(ValueError, match="'int8' given; MixtralForCausalLM is a mixture of experts.*use model"):
        int8_engine(tiny_model("mixtral"))
    with pytest.raises(ValueError, match="'int8' given; only fused decoders.*XGLMForCausalLM has none.*use model"):
        sizes = {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}
        int8_engine(tiny_model("xglm", sizes=sizes))


def test_combinations_that_cannot_work_are_refused(ranks):
    ranks.run(check_refusals)
