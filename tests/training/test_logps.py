"""`engine.logps`: logprobs with gradients, by three forwards, against Hugging Face's own over single rows."""

import copy
import functools
import itertools
import math
from functools import partial
from unittest import mock

import deepspeed
import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

import hybrid
from hybrid.training.logps import TrainingForwards, chunked_logps, logps_and_entropies, scaled_logits
from hybrid.training.packed_attention import PackedAttention
from hybrid.training.packed_forwards import PackedTargets, target_tokens
from tests.engines import CollectiveCount, engine_of, settings, storage_digest
from tests.marks import slow_but
from tests.rank_pool import pool_of
from tests.tiny_models import (
    ALL_FAMILIES,
    CROSSED,
    GEMMA4_26B,
    PER_LAYER_INPUTS,
    RECURRENT,
    VOCABULARY,
    compute_scans_in_float64,
    in_float64,
    tiny_model,
    twin,
    with_chat_lora,
    with_peft,
)
from tests.training.grouped_rows import grouped_rows

# Families whose layers do not call transformers' AttentionInterface (5.23).
WITHOUT_PACKING = {"bloom", "falcon", "gptj"}
# Families that FAMILIES has no sizes for: a recurrent one.
MORE = {
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
}
# Of MIXTURES: a correction bias that is a buffer, shared experts, a sigmoid gate, latent attention.
MIXED = ("glm4_moe", "qwen2_moe", "deepseek_v3")
# No clipping (deepspeed 0.19.8 clips at 1 by default), so that gradients are the loss's.
UNCLIPPED = {"gradient_clipping": 0.0}
# ZeRO-3 that releases each parameter as soon as its module has run (deferred in models this small) and prefetches none.
RELEASE_AT_ONCE = {
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 0,
        "stage3_prefetch_bucket_size": 0,
    },
    **UNCLIPPED,
}


def plain_logps(model: nn.Module, ids, mask, width: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies of completion tokens by the model's own forward of each row alone, without padding."""
    outputs = [torch.zeros(ids.shape, dtype=torch.float64) for _ in range(2)]
    for row in range(len(ids)):
        kept = mask[row].bool()
        logits = model(input_ids=ids[row][kept][None], use_cache=False).logits[0, :-1]
        log_probs = torch.log_softmax(logits.double() / temperature, -1)
        places = kept.nonzero()[1:, 0]
        values = log_probs.gather(1, ids[row][places][:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)
        outputs = [
            output.index_put((torch.tensor(row), places), value) for output, value in zip(outputs, values, strict=True)
        ]
    return outputs[0][:, -width:], outputs[1][:, -width:]


def weighted_loss(logps: torch.Tensor, entropies: torch.Tensor, completion_mask: torch.Tensor) -> torch.Tensor:
    """A loss in which every completion token has a different weight."""
    weights = torch.linspace(-1, 1, completion_mask.numel()).view(completion_mask.shape) * completion_mask
    return (weights * logps).sum() + 0.3 * (weights * entropies).sum()


PACKED = sorted({*ALL_FAMILIES, *MIXED, *MORE, *RECURRENT} - WITHOUT_PACKING - {"mamba"})
QUICK = {*CROSSED, *MIXED, *MORE, "cohere", "glm4", "starcoder2", "qwen3_5_text", "nemotron_h", "lfm2"}
PACKED_QUICK = [family for family in PACKED if family in QUICK]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", slow_but(PACKED_QUICK, PACKED))
def test_packed_gradients_match_single_rows(family, checkpointing, monkeypatch):
    """In float64, every family whose attention goes through transformers' interface, and the recurrent ones."""
    torch.manual_seed(0)
    if family in RECURRENT:
        compute_scans_in_float64(monkeypatch)
    model = in_float64(tiny_model(family, sizes=MORE.get(family)))
    expected_model = copy.deepcopy(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    ids, mask, completion_mask = grouped_rows(0)
    forwards = TrainingForwards(model, model, model)
    rows = target_tokens(ids, mask, completion_mask, None, torch.device("cpu"))
    assert forwards.packed_reason() == ""
    forwards.min_shared = 1
    actual = forwards.logps(rows, 0.7, True, "packed")
    expected = plain_logps(expected_model.train(), ids, mask, 14, 0.7)
    # RMSNorm, rotations and routers compute in float32 inside.
    for value, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(value * completion_mask, wanted * completion_mask, atol=1e-5, rtol=0)
        assert not value[completion_mask == 0].any()
    weighted_loss(*actual, completion_mask).backward()
    weighted_loss(*expected, completion_mask).backward()
    parameters = dict(model.named_parameters())
    for name, parameter in expected_model.named_parameters():
        error = (parameters[name].grad - parameter.grad).norm() / parameter.grad.norm().clamp(min=1e-4)
        assert error < 1e-5, f"{name}: {error:.2g}"


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h", "lfm2"])
def test_packed_gradients_of_long_recurrent_rows(family, monkeypatch):
    """Segments of several chunks of a scan, in a tree of four levels, and a single token that two rows continue, in
    float64.

    Two prompts of 70 tokens begin with the same 65; each has completions of 1 to 150 tokens. Two of the first prompt
    begin with the same 20, two of the second one with the same token.
    """
    compute_scans_in_float64(monkeypatch)
    model = in_float64(tiny_model(family)).train()
    expected_model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (6, 220), generator=generator)
    ids[:3, :70], ids[3:, :70] = ids[0, :70], torch.cat([ids[0, :65], ids[3, 65:70]])
    ids[1, 70:90], ids[4, 70] = ids[0, 70:90], ids[3, 70]
    completion_mask = (torch.arange(150) < torch.tensor([150, 66, 2, 64, 130, 1])[:, None]).long()
    mask = torch.cat([torch.ones(6, 70, dtype=torch.int64), completion_mask], dim=1)
    rows = target_tokens(ids * mask, mask, completion_mask, None, torch.device("cpu"))
    forwards = TrainingForwards(model, model, model)
    assert forwards.packed_reason() == ""
    forwards.min_shared = 1
    spans = {(segment.position, segment.stop - segment.start) for segment in PackedTargets(rows, 1).packed.segments}
    assert spans >= {(0, 65), (65, 5), (70, 20), (70, 1)}, spans
    actual = forwards.logps(rows, 0.7, True, "packed")
    expected = plain_logps(expected_model, ids * mask, mask, 150, 0.7)
    for value, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(value * completion_mask, wanted * completion_mask, atol=1e-7, rtol=0)
    weighted_loss(*actual, completion_mask).backward()
    weighted_loss(*expected, completion_mask).backward()
    parameters = dict(model.named_parameters())
    for name, parameter in expected_model.named_parameters():
        error = (parameters[name].grad - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-6, f"{name}: {error:.2g}"


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "lfm2"])
def test_packed_mixers_of_a_model_leave_other_models_alone(family):
    """Of the same class, with as many tokens: inside, and after blocks of two models that end in any order."""
    model, other = tiny_model(family).train(), tiny_model(family, seed=1).train()
    ids, mask, completion_mask = grouped_rows(0)
    rows = target_tokens(ids, mask, completion_mask, None, torch.device("cpu"))
    first, second = (TrainingForwards(each, each, each) for each in (model, other))
    assert first.packed_reason() == second.packed_reason() == ""
    packed = PackedTargets(rows, 1).packed
    expected = other(input_ids=packed.input_ids, use_cache=False).logits
    blocks = [forwards.over(PackedAttention(packed)) for forwards in (first, second)]
    blocks[0].__enter__()
    assert torch.equal(other(input_ids=packed.input_ids, use_cache=False).logits, expected)
    blocks[1].__enter__()
    for block in blocks:
        block.__exit__(None, None, None)
    assert torch.equal(other(input_ids=packed.input_ids, use_cache=False).logits, expected)
    assert not any("forward" in vars(module) for module in [*model.modules(), *other.modules()])


class AttributeMixer(nn.Module):
    """Calls its convolution by an attribute, as mixers of older versions of transformers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.causal_conv1d_fn(x)


def test_mixers_that_call_attributes_are_left_alone():
    model = tiny_model("qwen3_5_text")
    mixers = len(TrainingForwards(model, model, model).mixers.forwards(model.modules()))
    model.model.layers[0].linear_attn = AttributeMixer()
    assert len(TrainingForwards(model, model, model).mixers.forwards(model.modules())) == mixers - 1 > 0


@pytest.mark.parametrize("family", sorted(WITHOUT_PACKING | {"mamba"}))
def test_models_without_packing_run_as_model(family):
    model = tiny_model(family, sizes=MORE.get(family)).train()
    model.config.attention_dropout = model.config.hidden_dropout = 0.0
    ids, mask, completion_mask = grouped_rows(0)
    forwards = TrainingForwards(model, model, model)
    rows = target_tokens(ids, mask, completion_mask, None, torch.device("cpu"))
    reason = "logprobs differ from" if family == "mamba" else "the model's attention does not go through transformers'"
    with pytest.warns(UserWarning, match=f"'packed' runs as 'model'.*: {reason}"):
        actual = forwards.logps(rows, 1.0, False, "packed").per_token_logps
    assert torch.equal(actual, forwards.logps(rows, 1.0, False, "model").per_token_logps)
    if family != "mamba":  # its forward takes no mask of left padding into account
        expected = plain_logps(model, ids, mask, 14, 1.0)[0].float()
        torch.testing.assert_close(actual * completion_mask, expected * completion_mask, atol=1e-5, rtol=0)


def test_chunks_of_attention_are_not_packed():
    """Llama 4 divides rows into chunks by place; short rows alone would not show it."""
    model = tiny_model("llama4_text", attention_chunk_size=4096)
    assert "chunks of attention" in TrainingForwards(model, model, model).packed_reason()


def check_coverage() -> None:
    """An engine that cannot pack says so in `coverage()`, and trains all the same."""
    engine = engine_of(tiny_model("bloom"), settings(2))
    ids, mask, completion_mask = grouped_rows(dist.get_rank(), groups=1)
    engine.train()
    before = engine.coverage()
    with pytest.warns(UserWarning, match="'packed' runs as 'model'"):
        engine.backward(engine.logps(ids, mask, completion_mask).per_token_logps.sum())
    engine.step()
    *rows, last = engine.coverage()
    assert len(rows) == len(before) and last["kind"] == "training forward" and "AttentionInterface" in last["reason"]
    with pytest.raises(NotImplementedError, match="forward='exact' is not available: .* give 'model'"):
        engine.logps(ids, mask, completion_mask, forward="exact")


def test_coverage_reports_the_training_forward(ranks):
    ranks.run(check_coverage)


class Mixing(nn.Module):
    """A layer's wrapper that adds the previous token's output, as a convolution over packed rows would."""

    def __init__(self, layer: nn.Module, share: float):
        super().__init__()
        self.layer, self.share = layer, share

    def forward(self, hidden, **kwargs):
        return hidden + self.share * hidden.roll(1, dims=1) + self.layer(hidden, **kwargs)


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1e-2), (torch.bfloat16, 0.5)])
def test_a_layer_that_mixes_rows_is_found(dtype, share):
    model = tiny_model("llama").to(dtype).eval()
    model.model.layers[1] = Mixing(model.model.layers[1], share)
    reason = TrainingForwards(model, model, model).packed_reason()
    assert "differ from the model's own" in reason or "with another row's tokens" in reason


def test_dropout_is_refused_with_the_remedy():
    ids, mask, completion_mask = grouped_rows(0)
    rows = target_tokens(ids, mask, completion_mask, None, torch.device("cpu"))
    with_attention_dropout = tiny_model("llama", attention_dropout=0.1)
    with_lora_dropout = with_peft(tiny_model("llama"), lora_dropout=0.05)
    for model, where in ((with_attention_dropout, "self_attn.attention_dropout"), (with_lora_dropout, "lora_dropout")):
        forwards = TrainingForwards(model.train(), model, getattr(model, "base_model", model))
        with pytest.raises(ValueError, match=rf"forward: 'packed' given; .*{where}.* is 0\.\d+, .*forward='model'"):
            forwards.logps(rows, 1.0, False, "packed")
        forwards.logps(rows, 1.0, False, "model")


def check_listed_modules() -> None:
    """Modules are listed once, however many calls follow, and again once one has been added: its dropout is found."""
    engine = engine_of(with_peft(tiny_model("llama")), settings(0))
    ids, mask, completion_mask = grouped_rows(dist.get_rank(), groups=1)
    engine.train()
    with torch.no_grad():
        engine.logps(ids, mask, completion_mask)
        listed = engine._forwards.listed
        engine.logps(ids, mask, completion_mask)
        assert engine._forwards.listed is listed and len(listed) == len(list(engine.module.modules()))
        engine.module.add_adapter("second", peft.LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1))
        engine.module.set_adapter("second")
        with pytest.raises(ValueError, match=r"lora_dropout.second.p is 0\.1, but rows share"):
            engine.logps(ids, mask, completion_mask)


def test_modules_are_listed_once(ranks):
    ranks.run(check_listed_modules)


def test_a_second_backward_says_so():
    model = tiny_model("llama").train()
    ids, mask, completion_mask = grouped_rows(0)
    rows = target_tokens(ids, mask, completion_mask, None, torch.device("cpu"))
    loss = TrainingForwards(model, model, model).logps(rows, 1.0, False, "packed").per_token_logps.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call engine.logps again"):
        loss.backward()
    assert model.config._attn_implementation == "sdpa"


def test_attention_is_restored_after_an_error():
    """An error in the middle of the forward, and in the middle of the backward."""
    from transformers import AttentionInterface

    before = set(AttentionInterface._global_mapping)
    model = tiny_model("llama").train()
    ids, mask, completion_mask = grouped_rows(0)
    rows = target_tokens(ids, mask, completion_mask, None, torch.device("cpu"))
    forwards = TrainingForwards(model, model, model)
    forwards.packed_reason()
    loss = forwards.logps(rows, 1.0, False, "packed").per_token_logps.sum()
    handle = model.model.layers[1].register_full_backward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forwards.logps(rows, 1.0, False, "packed").per_token_logps.sum().backward()
    handle.remove()
    handle = model.model.layers[1].register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forwards.logps(rows, 1.0, False, "packed")
    handle.remove()
    assert set(AttentionInterface._global_mapping) == before and model.config._attn_implementation == "sdpa"
    loss.backward()


def rank_rows(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of one rank: other ones on each, and none with a completion token on rank 1 in step 1."""
    ids, mask, completion_mask = grouped_rows(10 * step + rank, groups=2 + rank % 2)
    if (rank, step) == (1, 1):
        mask[:, -14:], completion_mask = 0, torch.zeros_like(completion_mask)
    return ids, mask, completion_mask


def check_gradients(kind: str, stage: int, forward: str) -> None:
    """Gradients after engine.backward equal those of single rows, over accumulated micro batches, in every step."""
    model = tiny_model("llama", tie_word_embeddings=kind == "tied")
    model = {"peft": with_peft, "chat": with_chat_lora}.get(kind, lambda model: model)(model)
    plain = twin(model)
    changes = RELEASE_AT_ONCE if stage == 3 else UNCLIPPED
    engine = engine_of(model, settings(stage, gradient_accumulation_steps=2, **changes))
    if kind == "checkpointing":
        engine.module.gradient_checkpointing_enable({"use_reentrant": False})
    engine.train()
    trained = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
    parameters = dict(engine.module.named_parameters())
    for start in (0, 2):  # the second time with updated weights
        for step in (start, start + 1):
            ids, mask, completion_mask = rank_rows(dist.get_rank(), step)
            values = engine.logps(ids, mask, completion_mask, temperature=0.7, entropy=True, forward=forward)
            engine.backward(weighted_loss(*values, completion_mask))
            if step % 2:
                grads = {name: deepspeed.utils.safe_get_full_grad(parameters[name]) for name in trained}
            engine.step()
        plain.zero_grad()
        world = dist.get_world_size()
        for rank, step in itertools.product(range(world), (start, start + 1)):
            ids, mask, completion_mask = rank_rows(rank, step)
            (weighted_loss(*plain_logps(plain, ids, mask, 14, 0.7), completion_mask) / (2 * world)).backward()
        expected = dict(plain.named_parameters())
        for name in trained:
            scale = expected[name].grad.abs().max()
            assert scale > 1e-3
            torch.testing.assert_close(grads[name] / scale, expected[name].grad / scale, atol=2e-5, rtol=0)
        for name, parameter in expected.items():
            with deepspeed.zero.GatheredParameters([parameters[name]]):
                parameter.data.copy_(parameters[name].data)


QUICK = [("whole", 3, "packed"), ("tied", 3, "packed"), ("peft", 3, "packed"), ("checkpointing", 2, "packed")]
QUICK += [("whole", 2, "exact"), ("tied", 3, "exact"), ("tied", 2, "exact"), ("peft", 3, "exact")]
CASES = list(
    itertools.product(("whole", "tied", "peft", "chat", "checkpointing"), range(4), hybrid.training.logps.FORWARDS)
)


@pytest.mark.parametrize(("kind", "stage", "forward"), slow_but(QUICK, CASES))
def test_gradients_under_zero(ranks, kind, stage, forward):
    ranks.run(check_gradients, kind, stage, forward)


one_rank, four_ranks = pool_of(1), pool_of(4)


@pytest.mark.slow
@pytest.mark.parametrize("forward", ["packed", "exact"])
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_on_one_and_four_ranks(one_rank, four_ranks, stage, forward):
    for pool in (one_rank, four_ranks):
        pool.run(check_gradients, "tied", stage, forward)


def check_clipped_steps(stage: int, forward: str, family: str = "llama") -> None:
    """Steps with clipped gradients have the norms and weights of the model's own forward."""
    smooth = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3, "torch_adam": True}}  # rounding stays rounding
    changes = {"gradient_clipping": 0.5, "optimizer": smooth}
    rounding = 10 if family in RECURRENT else 1  # of time steps' gradients
    engines = {name: engine_of(tiny_model(family), settings(stage, **changes)) for name in ("model", forward)}
    for step in range(3):
        norms = []
        for name, engine in engines.items():
            ids, mask, completion_mask = rank_rows(dist.get_rank(), step)
            engine.train()
            values = engine.logps(ids, mask, completion_mask, entropy=True, forward=name)
            engine.backward(weighted_loss(*values, completion_mask))
            engine.step()
            norms.append(float(engine.get_global_grad_norm()))
        assert norms[0] > 1 and norms[1] == pytest.approx(norms[0], rel=1e-5 * rounding), norms
    weights = [dict(engine.module.named_parameters()) for engine in engines.values()]
    for name, expected in weights[0].items():
        with deepspeed.zero.GatheredParameters([expected, weights[1][name]]):
            torch.testing.assert_close(weights[1][name], expected, atol=2e-5 * rounding, rtol=0)


@pytest.mark.parametrize(
    ("stage", "forward"),
    slow_but([(3, "exact")], [(stage, forward) for stage in (1, 2, 3) for forward in ("packed", "exact")]),
)
def test_clipped_steps_are_those_of_the_models_forward(ranks, stage, forward):
    ranks.run(check_clipped_steps, stage, forward)


# Without routers, which rounding can turn after a step.
DENSE = ("bamba", "falcon_h1", "lfm2", "mamba2", "olmo_hybrid", "qwen3_5_text")
RECURRENT_QUICK = [("qwen3_5_text", 3, "packed"), ("qwen3_5_text", 3, "exact"), ("falcon_h1", 3, "packed")]


@pytest.mark.parametrize(
    ("family", "stage", "forward"),
    slow_but(RECURRENT_QUICK, itertools.product(DENSE, (2, 3), ("packed", "exact"))),
)
def test_clipped_steps_of_recurrent_models(ranks, family, stage, forward):
    ranks.run(check_clipped_steps, stage, forward, family)


def check_overflow(stage: int, forward: str) -> None:
    """An infinite loss of one rank skips the step of all; the next step trains, and exact values are the rollout's."""
    engine = engine_of(tiny_model("llama"), settings(stage, dtype=torch.bfloat16))
    ids, mask, _ = grouped_rows(dist.get_rank(), groups=1)
    digests = [storage_digest(engine)]
    for overflows in (True, False):
        sampling = hybrid.SamplingParams(max_new_tokens=6, seed=1)
        batch = engine.rollout(ids[:1, :18], mask[:1, :18], sampling, num_generations=3)
        engine.train()
        logps = engine.logps(batch, forward=forward).per_token_logps
        assert forward != "exact" or torch.equal(logps, batch.old_per_token_logps)
        scale = math.inf if overflows and dist.get_rank() == 1 else 1.0
        engine.backward(-(logps * batch.completion_mask).sum() * scale)
        engine.step()
        digests.append(storage_digest(engine))
    assert engine.skipped_steps == 1
    assert digests[0] == digests[1] != digests[2]
    assert all(parameter.isfinite().all() for parameter in engine.module.parameters())


@pytest.mark.parametrize(
    ("stage", "forward"),
    slow_but([(2, "exact")], [(stage, forward) for stage in (1, 2, 3) for forward in ("packed", "exact")]),
)
def test_an_overflow_skips_the_step(ranks, stage, forward):
    ranks.run(check_overflow, stage, forward)


def check_training_is_untouched() -> None:
    """An engine that has computed packed logprobs trains on its own forward to the same bits as one that has not."""
    engines = [engine_of(tiny_model("llama"), settings(3)) for _ in range(2)]
    ids, mask, completion_mask = rank_rows(dist.get_rank(), 0)
    for index, engine in enumerate(engines):
        engine.train()
        if index:
            with torch.no_grad():
                engine.logps(ids, mask, completion_mask)
        for _ in range(2):
            loss = engine(input_ids=ids, attention_mask=mask, labels=ids).loss
            engine.backward(loss)
            engine.step()
    assert storage_digest(engines[0]) == storage_digest(engines[1])


def test_the_engines_own_forward_keeps_its_bits(ranks):
    ranks.run(check_training_is_untouched)


def check_rollout_batches() -> None:
    """A rollout's batch gives what its tensors give; values change with the weights; eval mode is refused."""
    engine = engine_of(tiny_model("llama"), settings(3))
    ids, mask, _ = grouped_rows(dist.get_rank(), groups=1)
    prompt_ids, prompt_mask = ids[:1, :18], mask[:1, :18]
    sampling = hybrid.SamplingParams(max_new_tokens=6 + dist.get_rank(), temperature=0.7, seed=1)
    batch = engine.rollout(prompt_ids, prompt_mask, sampling, num_generations=3)
    engine.train()
    for forward in hybrid.training.logps.FORWARDS:
        values = engine.logps(batch, temperature=0.7, forward=forward).per_token_logps
        torch.testing.assert_close(values, batch.old_per_token_logps, atol=2e-5, rtol=0)
        assert forward != "exact" or torch.equal(values, batch.old_per_token_logps)
    engine.backward(values.sum())
    engine.step()
    assert (engine.logps(batch, temperature=0.7).per_token_logps - batch.old_per_token_logps).abs().max() > 1e-3
    whole = engine.logps(batch.sequences, batch.attention_mask, temperature=0.7).per_token_logps
    with engine.inference():
        scores = engine.score(batch.sequences, batch.attention_mask, temperature=0.7).per_token_logps
    torch.testing.assert_close(whole, scores, atol=2e-5, rtol=0)
    for arguments, error, message in (
        ({"forward": "padded"}, ValueError, "forward: 'padded' given; it must be one of 'model', 'packed', 'exact'"),
        ({"temperature": 0}, ValueError, "temperature: 0 given"),
        ({"attention_mask": batch.attention_mask}, ValueError, "attention_mask: given with a RolloutBatch"),
        ({"completion_mask": batch.prompt_mask[:0]}, ValueError, "completion_mask: shape .* given; it must be"),
    ):
        with pytest.raises(error, match=message):
            engine.logps(batch, **arguments)
    engine.eval()
    with pytest.raises(RuntimeError, match=r"call train\(\) first"):
        engine.logps(batch)


def check_exact(family: str, adapted: bool, dtype: torch.dtype, steps: int) -> None:
    """In every step exact logprobs are the rollout's, to the bit: the ratio is 1 and the KL 0.0. The weights move, and
    with all of them trained the reward rises."""
    model = tiny_model(family, sizes=MORE.get(family))
    model = with_peft(model) if adapted else model
    engine = engine_of(model, settings(3, dtype=dtype))
    ids, mask, _ = grouped_rows(dist.get_rank(), groups=2)
    prompt_ids, prompt_mask = ids[:4:3, :18], mask[:4:3, :18]
    rewards = []
    for step in range(steps):
        sampling = hybrid.SamplingParams(max_new_tokens=12 - 3 * dist.get_rank(), temperature=0.9, seed=step)
        batch = engine.rollout(prompt_ids, prompt_mask, sampling, num_generations=4)
        engine.train()
        logps = engine.logps(batch, temperature=0.9, forward="exact").per_token_logps
        assert torch.equal(logps, batch.old_per_token_logps), f"step {step}"
        ratio = (logps - batch.old_per_token_logps).exp()
        assert (ratio == 1).all()
        reward = ((batch.completion_ids < 40) * batch.completion_mask).sum(1) / batch.completion_mask.sum(1)
        rewards.append(reward.mean())
        advantage = reward - reward.view(2, 4).mean(1).repeat_interleave(4)
        engine.backward(-(ratio * advantage[:, None] * batch.completion_mask).sum() / batch.completion_mask.sum())
        engine.step()
    assert not torch.equal(logps, engine.logps(batch, temperature=0.9, forward="exact").per_token_logps)
    if steps >= 50 and not adapted:
        assert torch.stack(rewards[-10:]).mean() > torch.stack(rewards[:10]).mean() + 0.1


EXACT_FAMILIES = sorted({*ALL_FAMILIES, *MIXED, *RECURRENT} - WITHOUT_PACKING - {*PER_LAYER_INPUTS})
EXACT_CASES = [*itertools.product(EXACT_FAMILIES, (False, True), (torch.float32, torch.bfloat16), (3,))]
EXACT_CASES += [
    (family, adapted, torch.float32, 200) for family in ("llama", "qwen3", "qwen3_moe") for adapted in (False, True)
]
EXACT_QUICK = [("llama", True, torch.float32, 3), ("qwen3_moe", False, torch.float32, 3)]
EXACT_QUICK += [("gemma3_text", False, torch.bfloat16, 3), ("deepseek_v3", True, torch.float32, 3)]
EXACT_QUICK += [("qwen3_5_text", False, torch.bfloat16, 3), ("nemotron_h", True, torch.float32, 3)]


@pytest.mark.parametrize(("family", "adapted", "dtype", "steps"), slow_but(EXACT_QUICK, EXACT_CASES))
def test_exact_logprobs_are_the_rollouts(ranks, family, adapted, dtype, steps):
    ranks.run(check_exact, family, adapted, dtype, steps)


def check_exact_refused() -> None:
    engine = engine_of(tiny_model("gemma4_text"), settings(3))
    ids, mask, completion_mask = grouped_rows(dist.get_rank(), groups=2)
    with pytest.raises(
        NotImplementedError, match=r"forward='exact' is not available: layers .* give 'packed' or 'model'"
    ):
        engine.logps(ids, mask, completion_mask, forward="exact")
    engine.destroy()


def test_exact_is_refused_where_layers_read_more_than_the_one_before(ranks):
    """Keys and values of another layer, or an input of their own, would get no gradient."""
    ranks.run(check_exact_refused)


def check_curves() -> None:
    """By the exact forward the policy learns as by the model's own: the mean reward of three seeds, over 100 steps."""
    curves: dict[str, list[list[float]]] = {"exact": [], "model": []}
    ids, mask, _ = grouped_rows(dist.get_rank(), groups=2)
    for (forward, runs), seed in itertools.product(curves.items(), range(3)):
        engine = engine_of(tiny_model("llama", seed=seed), settings(2))
        runs.append([])
        for step in range(100):
            sampling = hybrid.SamplingParams(max_new_tokens=12, temperature=0.9, seed=1000 * seed + step)
            batch = engine.rollout(ids[:4:3, :18], mask[:4:3, :18], sampling, num_generations=4)
            engine.train()
            logps = engine.logps(batch, temperature=0.9, forward=forward).per_token_logps
            reward = ((batch.completion_ids < 40) * batch.completion_mask).sum(1) / batch.completion_mask.sum(1)
            advantage = reward - reward.view(2, 4).mean(1).repeat_interleave(4)
            ratio = (logps - batch.old_per_token_logps).exp()
            engine.backward(-(ratio * advantage[:, None] * batch.completion_mask).sum() / batch.completion_mask.sum())
            engine.step()
            dist.all_reduce(reward := reward.mean())
            runs[-1].append(float(reward) / dist.get_world_size())
        engine.destroy()
    means = {forward: torch.tensor(runs).mean(0).view(10, 10).mean(1) for forward, runs in curves.items()}
    print(means)
    assert all(mean[-1] > mean[0] + 0.15 for mean in means.values()), means
    assert (means["exact"] - means["model"]).abs().max() < 0.08, means


@pytest.mark.slow
def test_exact_learns_as_the_models_forward(ranks):
    ranks.run(check_curves)


def check_exact_gradients(family: str, **changes) -> None:
    """Gradients at the kernels' activations are the model's own, within rounding, which is larger in scans."""
    tolerance = 3e-4 if family in RECURRENT else 1e-5
    engine = engine_of(tiny_model(family, sizes=MORE.get(family), **changes), settings(2, **UNCLIPPED))
    ids, mask, completion_mask = grouped_rows(dist.get_rank(), groups=2)
    engine.train()
    grads = {}
    for forward in ("model", "exact"):
        values = engine.logps(ids, mask, completion_mask, temperature=0.7, entropy=True, forward=forward)
        engine.backward(weighted_loss(*values, completion_mask))
        grads[forward] = {
            name: deepspeed.utils.safe_get_full_grad(parameter) for name, parameter in engine.module.named_parameters()
        }
        engine.optimizer.zero_grad()
    for name, grad in grads["model"].items():
        assert (grads["exact"][name] - grad).norm() < tolerance * grad.norm().clamp(min=0.1), name


@pytest.mark.parametrize("family", slow_but(["gemma2", "gpt2", "qwen3_moe"], EXACT_FAMILIES))
def test_exact_gradients_match_the_models(ranks, family):
    ranks.run(check_exact_gradients, family)


def test_exact_gradients_match_where_heads_vary_by_layer(ranks):
    ranks.run(check_exact_gradients, "gemma4_text", **GEMMA4_26B)


def check_layers_run_once() -> None:
    """The backward of exact logprobs runs each layer once, with gradient checkpointing too."""
    engine = engine_of(tiny_model("llama"), settings(2))
    engine.module.gradient_checkpointing_enable({"use_reentrant": False})
    engine.train()
    ids, mask, completion_mask = grouped_rows(dist.get_rank(), groups=2)
    engine.logps(ids, mask, completion_mask)  # compares packed rows with the model's forward
    logps = engine.logps(ids, mask, completion_mask, forward="exact").per_token_logps
    calls: list[int] = []
    for index, layer in enumerate(engine.module.model.layers):
        layer.mlp.register_forward_hook(lambda *_, index=index: calls.append(index))
    engine.backward(logps.sum())
    assert sorted(calls) == list(range(len(engine.module.model.layers)))
    assert all(layer.gradient_checkpointing for layer in engine.module.model.layers)


def test_the_exact_backward_runs_each_layer_once(ranks):
    ranks.run(check_layers_run_once)


def test_a_rollouts_batch(ranks):
    ranks.run(check_rollout_batches)


def check_router_replay() -> None:
    """Recorded experts are replayed: of packed tokens as of padded ones, with gradients."""
    rollout = {"rollout": {"return_router_indices": True}}
    engine = engine_of(tiny_model("qwen3_moe"), settings(2, **rollout, **UNCLIPPED))
    ids, mask, _ = grouped_rows(dist.get_rank(), groups=2)
    sampling = hybrid.SamplingParams(max_new_tokens=9, temperature=1.0, seed=1)
    batch = engine.rollout(ids[:4, :18], mask[:4, :18], sampling, num_generations=2)
    engine.train()
    replayed = batch.router_indices
    other = torch.where(replayed >= 0, (replayed + 1) % 4, replayed)  # other experts than the router's
    grads = {}
    for forward in ("model", "packed"):
        values = engine.logps(batch, forward=forward, router_indices=other).per_token_logps
        engine.backward(values.sum())
        grads[forward] = {
            name: deepspeed.utils.safe_get_full_grad(parameter) for name, parameter in engine.module.named_parameters()
        }
        engine.optimizer.zero_grad()
        own = engine.logps(batch, forward=forward).per_token_logps
        torch.testing.assert_close(own, batch.old_per_token_logps, atol=2e-5, rtol=0)
        assert (own - values).abs().max() > 1e-3
    for name, grad in grads["model"].items():
        torch.testing.assert_close(grads["packed"][name], grad, atol=2e-5 * float(grad.abs().max()) + 1e-9, rtol=0)


def test_routers_are_replayed(ranks):
    ranks.run(check_router_replay)


def test_entropies_and_their_gradient_match_a_loop():
    def entropy_of(logits: torch.Tensor) -> torch.Tensor:
        return logps_and_entropies(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64), 1.0, True)[1]

    torch.manual_seed(4)
    logits = torch.randn(3, 4, 9, dtype=torch.float64) * 3
    actual = entropy_of(logits)
    assert actual.shape == (3, 4)
    for row, actual_entropy in zip(logits.view(-1, 9).tolist(), actual.flatten().tolist(), strict=True):
        weights = [math.exp(logit) for logit in row]
        shares = [weight / sum(weights) for weight in weights]
        assert actual_entropy == pytest.approx(-sum(share * math.log(share) for share in shares), rel=1e-12)
    assert torch.autograd.gradcheck(entropy_of, logits.requires_grad_())
    # A token with logit -inf is as one outside the vocabulary, also in the gradient.
    barred = torch.cat([logits.detach(), torch.full((3, 4, 1), -math.inf)], dim=-1).requires_grad_()
    torch.testing.assert_close(entropy_of(barred), actual, atol=1e-14, rtol=1e-14)
    (gradient,) = torch.autograd.grad(entropy_of(barred).sum(), barred)
    (expected,) = torch.autograd.grad(entropy_of(logits).sum(), logits)
    torch.testing.assert_close(gradient[..., :9], expected, atol=1e-14, rtol=1e-12)
    half = torch.randn(3, 50).bfloat16() * 4  # summed in float32
    torch.testing.assert_close(entropy_of(half).double(), entropy_of(half.double()))


class Head(nn.Linear):
    """A head that records the most rows of a forward."""

    largest = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.largest = max(self.largest, len(hidden))
        return super().forward(hidden)


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize(("rows", "chunk_size"), [(13, 4), (12, 4), (13, 1), (3, 50), (0, 4)])
def test_chunked_logprobs_have_equal_values_and_gradients(rows, chunk_size, cap):
    torch.manual_seed(0)
    head, hidden = Head(5, 11).double(), torch.randn(rows, 5, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(11, (rows,))
    weights = torch.randn(2, rows, dtype=torch.float64)
    logits = nn.functional.linear(hidden, head.weight, head.bias)
    distribution = torch.log_softmax((logits if cap is None else cap * torch.tanh(logits / cap)) / 0.7, dim=-1)
    expected = distribution[range(rows), ids], -(distribution.exp() * distribution).sum(dim=-1)
    config = LlamaConfig(final_logit_softcapping=cap)
    chunked = chunked_logps(hidden, head, ids, config, 0.7, True, chunk_size)
    assert "forward" not in vars(head), "the head's forward was not restored"
    gradients = []
    for values in (expected, chunked):
        loss = (torch.stack(values) * weights).sum()
        gradients.append(torch.autograd.grad(loss, (hidden, head.weight, head.bias)))
    for actual, value in zip((*chunked, *gradients[1]), (*expected, *gradients[0]), strict=True):
        torch.testing.assert_close(actual, value, atol=1e-12, rtol=1e-12)
    assert head.largest == min(rows, chunk_size)


def test_a_failing_heads_forward_is_restored():
    head, before = nn.Linear(5, 11), lambda hidden: hidden @ torch.zeros(4, 4)
    head.forward = before
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        chunked_logps(torch.zeros(3, 5), head, torch.zeros(3, dtype=torch.long), LlamaConfig())
    assert vars(head)["forward"] is before


class PeakBytes(TorchDispatchMode):
    """Peak bytes of live tensors allocated inside the block, in forward and backward."""

    def __enter__(self):
        self.peak, self.live = 0, {}
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.live = {key: kept for key, kept in self.live.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


def test_only_one_chunk_of_logits_is_in_memory():
    """Forward and backward of 256 tokens with a vocabulary of 2000: the peak depends on the chunk, not on the
    tokens."""
    torch.manual_seed(0)
    head, hidden, ids = nn.Linear(4, 2000), torch.randn(256, 4, requires_grad=True), torch.randint(2000, (256,))
    peaks = {}
    for chunk_size in (256, 64, 16):
        with PeakBytes() as made:
            logps, entropies = chunked_logps(hidden, head, ids, LlamaConfig(), 0.7, True, chunk_size)
            (logps.sum() + entropies.sum()).backward()
        peaks[chunk_size] = made.peak / (2000 * 4)  # in rows of logits
        head.weight.grad = hidden.grad = head.bias.grad = None
    assert peaks[256] > 3 * 256, "logits, log_softmax and their gradients were not measured"
    rest = 4 * 5 + 30  # four gradients of the head at once, and small tensors
    assert peaks[64] < peaks[256] / 4 + rest and peaks[16] < peaks[256] / 16 + rest, peaks


def count_gathers() -> list[int]:
    """Collectives of a forward and backward with one chunk, many and some, after three for DeepSpeed's trace."""
    engine = engine_of(tiny_model("llama"), settings(3, **RELEASE_AT_ONCE))
    engine.train()
    ids, mask, completion_mask = grouped_rows(0)
    with torch.no_grad():
        engine.logps(ids, mask, completion_mask)  # compares the forwards
    counts = []
    for chunk_size in (1000, 1000, 1000, 1000, 1, 4):
        chunked = partial(chunked_logps, chunk_size=chunk_size)
        with mock.patch.object(hybrid.training.logps, "chunked_logps", chunked), CollectiveCount() as collectives:
            values = engine.logps(ids, mask, completion_mask, entropy=True)
            engine.backward(weighted_loss(*values, completion_mask))
        counts.append(collectives.count)
        engine.step()
    return counts[-3:]


def test_the_number_of_gathers_does_not_depend_on_chunks(ranks):
    (one_chunk, many_chunks, some_chunks), _ = ranks.run(count_gathers)
    assert one_chunk == many_chunks == some_chunks > 0


def check_an_adapted_head() -> None:
    """A head whose adapter ZeRO-3 partitions takes its logits whole: the model's own forward runs."""
    engine = engine_of(with_peft(tiny_model("llama"), target_modules=["q_proj", "lm_head"]), settings(3))
    engine.train()
    ids, mask, completion_mask = grouped_rows(dist.get_rank())
    with pytest.warns(UserWarning, match="runs as 'model'.*the head has an adapter, which ZeRO-3 partitions"):
        packed = engine.logps(ids, mask, completion_mask).per_token_logps
    assert torch.equal(packed, engine.logps(ids, mask, completion_mask, forward="model").per_token_logps)


def test_an_adapted_head_under_zero_3_runs_as_model(ranks):
    ranks.run(check_an_adapted_head)


def test_a_model_that_changes_its_logits_runs_as_model():
    model = tiny_model("llama").train()
    forward = model.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    model.forward = functools.wraps(forward)(scaled)
    assert "logprobs differ from the model's own by" in TrainingForwards(model, model, model).packed_reason()


def test_a_model_that_reads_its_mask_runs_as_model():
    """As AXK2's indexers do (transformers 5.23): packed rows have no mask."""
    model = tiny_model("llama").train()

    def read(_model, _args, inputs):
        assert inputs["attention_mask"][:, 0].dim() == 1

    model.model.register_forward_pre_hook(read, with_kwargs=True)
    reason = TrainingForwards(model, model, model).packed_reason()
    assert reason == "LlamaForCausalLM does not run without a mask: 'NoneType' object is not subscriptable"


def test_the_output_of_packed_attention_can_be_viewed():
    """As transformers' own attention functions return it: AFMoE views it (5.23)."""
    ids, mask, completion_mask = grouped_rows(0)
    packed = PackedTargets(target_tokens(ids, mask, completion_mask, None, torch.device("cpu")), 1).packed
    query = torch.randn(1, 4, packed.num_tokens, 8)
    output = PackedAttention(packed)(nn.Identity(), query, query, query, None)[0]
    assert output.view(1, packed.num_tokens, -1).shape == (1, packed.num_tokens, 32)


def test_logits_are_scaled_as_the_models():
    for family in ("gemma2", "granite", "cohere", "llama"):
        model = tiny_model(family, sizes=MORE.get(family))
        hidden = model.model(torch.tensor([[3, 4, 5]])).last_hidden_state
        logits = model(torch.tensor([[3, 4, 5]])).logits
        torch.testing.assert_close(scaled_logits(model.lm_head(hidden), model.config), logits)


def test_bfloat16_is_as_near_as_the_models_own():
    """In bfloat16 packed logprobs are as far from float64's as the padded forward's are."""
    model = tiny_model("qwen3")
    reference, half = copy.deepcopy(model).double(), copy.deepcopy(model).bfloat16().train()
    ids, mask, completion_mask = grouped_rows(0)
    rows = target_tokens(ids, mask, completion_mask, None, torch.device("cpu"))
    forwards = TrainingForwards(half, half, half)
    with torch.no_grad():
        expected, _ = plain_logps(reference, ids, mask, 14, 1.0)
        errors = {
            forward: ((forwards.logps(rows, 1.0, False, forward).per_token_logps - expected) * completion_mask)
            .abs()
            .mean()
            for forward in ("model", "packed")
        }
    assert errors["packed"] < 1.3 * errors["model"], errors
