"""`sequence_parallel_size`: packed rows over the ranks of a group, against an engine whose ranks compute whole rows."""

from contextlib import contextmanager

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

import hybrid
from rlhf_examples.common.models import LoRA, ValueModel
from tests.engines import engine_of, settings
from tests.marks import slow_but
from tests.rank_pool import pool_of
from tests.tiny_models import tiny_model, twin, with_peft
from tests.training.grouped_rows import grouped_rows
from tests.training.test_logps import RELEASE_AT_ONCE, UNCLIPPED, rank_rows, weighted_loss
from tests.training.test_values import classifier, weighted

four_ranks = pool_of(4)
# Steps of SGD's kind: AdamW's first steps have the size of the learning rate, however small the gradient.
SMOOTH = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-2, "torch_adam": True}}
MODELS = {
    "whole": lambda: tiny_model("qwen3"),
    "peft": lambda: with_peft(tiny_model("llama")),
    "checkpointing": lambda: tiny_model("llama", tie_word_embeddings=True),
    "one key-value head": lambda: tiny_model("llama", num_key_value_heads=1),
    "three key-value heads": lambda: tiny_model(
        "llama", num_attention_heads=12, num_key_value_heads=3, hidden_size=48, head_dim=4
    ),
    "sinks and windows": lambda: tiny_model("gpt_oss"),
    "soft cap": lambda: tiny_model("gemma2"),
    "narrow values": lambda: tiny_model("deepseek_v3"),
    "scaled rotations": lambda: tiny_model("llama", rope_parameters=dynamic(), max_position_embeddings=8),
}


def dynamic() -> dict:
    return {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 8}


def pair_of(model: nn.Module, stage: int, size: int, **changes) -> list[hybrid.HybridEngine]:
    """Engines of the same weights in train mode: each rank computes whole rows, or `size` ranks share them."""
    changes = {**(RELEASE_AT_ONCE if stage == 3 else UNCLIPPED), "optimizer": SMOOTH, **changes}
    config = settings(stage, **changes)
    engines = [engine_of(twin(model), config), engine_of(model, {**config, "sequence_parallel_size": size})]
    for engine in engines:
        engine.train()
    return engines


def own_group(size: int) -> int:
    return dist.get_rank() // size


def gradients(engine: hybrid.HybridEngine) -> dict[str, torch.Tensor]:
    named = engine.module.named_parameters()
    return {name: deepspeed.utils.safe_get_full_grad(param) for name, param in named if param.requires_grad}


def require_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], limit: float) -> None:
    """Each tensor within `limit` of its largest value."""
    for name, tensor in expected.items():
        scale = tensor.abs().max()
        assert scale > 0
        torch.testing.assert_close(actual[name] / scale, tensor / scale, atol=limit, rtol=0, msg=name)


@contextmanager
def widths(engine: hybrid.HybridEngine):
    """Inside the block, the yielded list gets the tokens of each forward of the model."""
    seen: list[int] = []
    embedding = next(module for module in engine.module.modules() if isinstance(module, nn.Embedding))
    handle = embedding.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    try:
        yield seen
    finally:
        handle.remove()


def check_steps(kind: str, stage: int, size: int) -> None:
    """Logprobs, entropies and gradients of two steps, and the weights after them; rows differ by group."""
    engines = pair_of(MODELS[kind](), stage, size)
    for engine in engines:
        if kind == "checkpointing":
            engine.module.gradient_checkpointing_enable({"use_reentrant": False})
        engine.logps(*grouped_rows(0))  # compares the forwards
    for step in range(2):
        ids, mask, completion_mask = rank_rows(own_group(size), step)
        results = []
        for engine in engines:
            with widths(engine) as seen:
                values = engine.logps(ids, mask, completion_mask, temperature=0.7, entropy=True)
            engine.backward(weighted_loss(*values, completion_mask))
            results.append((*values, gradients(engine), seen[0]))
            engine.step()
        (*expected, expected_grads, whole), (*actual, actual_grads, own) = results
        for value, wanted in zip(actual, expected, strict=True):
            torch.testing.assert_close(value, wanted, atol=2e-5, rtol=0)
        require_close(actual_grads, expected_grads, 2e-5)
        assert own == -(-whole // size) + 1  # one of them belongs to no row
    for (name, weight), (_, expected_weight) in zip(
        engines[1].module.named_parameters(), engines[0].module.named_parameters(), strict=True
    ):
        with deepspeed.zero.GatheredParameters([weight, expected_weight]):
            torch.testing.assert_close(weight.data, expected_weight.data, atol=2e-5, rtol=0, msg=name)


CASES = [
    *(("whole", stage) for stage in range(4)),
    *(("peft", stage) for stage in (0, 2, 3)),
    *(("checkpointing", stage) for stage in (1, 3)),
    *((kind, 2) for kind in MODELS if kind not in ("whole", "peft", "checkpointing")),
]
QUICK = [("whole", 3), ("peft", 2), ("checkpointing", 3), ("three key-value heads", 2)]


@pytest.mark.parametrize(("kind", "stage"), slow_but(QUICK, CASES))
def test_two_ranks_train_as_one(ranks, kind, stage):
    ranks.run(check_steps, kind, stage, 2)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("kind", "stage"), [("whole", 0), ("whole", 3), ("peft", 3), ("one key-value head", 2)])
def test_four_ranks_train_as_one_or_two(four_ranks, kind, stage, size):
    four_ranks.run(check_steps, kind, stage, size)


def check_values(lora: bool, stage: int) -> None:
    """A critic's values and their gradients; rows are shared as a policy's."""
    model = classifier("llama")
    model = ValueModel(LoRA(4, 8, "all-linear").apply(model, "SEQ_CLS") if lora else model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, and so the gradient of A
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    engines = pair_of(model, stage, 2)
    for step in range(2):
        ids, mask, completion_mask = grouped_rows(step)
        values, grads = [], []
        for engine in engines:
            values.append(engine.values(ids, mask, completion_mask))
            engine.backward(weighted(values[-1], completion_mask))
            grads.append(gradients(engine))
            engine.step()
        torch.testing.assert_close(values[1], values[0], atol=2e-5, rtol=0)
        require_close(grads[1], grads[0], 2e-5)


@pytest.mark.parametrize(("lora", "stage"), slow_but([(False, 3)], [(False, 3), (False, 0), (True, 2)]))
def test_values_are_shared_too(ranks, lora, stage):
    ranks.run(check_values, lora, stage)


def check_token_losses() -> None:
    """Losses of logits by row and column, and replayed experts."""
    engines = pair_of(tiny_model("qwen3_moe"), 3, 2)
    ids, mask, completion_mask = grouped_rows(1)
    vocabulary = engines[0].module.config.vocab_size
    teacher = torch.randn(*completion_mask.shape, vocabulary, generator=torch.Generator().manual_seed(2))
    experts = torch.randint(4, (*ids.shape, 2, 2), generator=torch.Generator().manual_seed(3))
    experts[..., 1] = (experts[..., 0] + 1) % 4

    def token_loss(tokens: hybrid.TokenLogits) -> torch.Tensor:
        return (tokens.logits.softmax(-1) * teacher[tokens.rows, tokens.columns]).sum(-1)

    def losses_of(engine: hybrid.HybridEngine) -> tuple[torch.Tensor, ...]:
        hidden = engine.last_hidden_states(ids, mask, completion_mask)
        losses = engine.token_losses(token_loss, ids, mask, completion_mask)
        return losses.token_losses, losses.per_token_logps, hidden

    def replayed(engine: hybrid.HybridEngine) -> tuple[torch.Tensor, ...]:
        return tuple(engine.logps(ids, mask, completion_mask, router_indices=experts)[:1])

    for compute in (losses_of, replayed):
        values, grads = [], []
        for engine in engines:
            values.append(compute(engine))
            engine.backward(weighted(values[-1][0], completion_mask))
            grads.append(gradients(engine))
            engine.step()
        for value, expected in zip(values[1], values[0], strict=True):
            torch.testing.assert_close(value, expected, atol=2e-5, rtol=0)
        require_close(grads[1], grads[0], 5e-5)


def test_token_losses_and_replayed_experts(ranks):
    ranks.run(check_token_losses)


def check_an_iteration(tp_size: int, folder: str) -> None:
    """Rollouts and scores are of each rank's own prompts; what the ranks of a group learn from, they exchange first."""
    block = {"hybrid_engine": {"enabled": True, "inference_tp_size": tp_size}}
    engines = pair_of(tiny_model("qwen3"), 3, 2, **block)
    ids, mask, _ = grouped_rows(dist.get_rank())
    ids, mask = ids[: 2 + dist.get_rank(), :18], mask[: 2 + dist.get_rank(), :18]
    sampling = hybrid.SamplingParams(max_new_tokens=6, seed=1)
    batches = []
    for engine in engines:
        with engine.inference():
            batch = engine.rollout(ids, mask, sampling)
            scores = engine.score(batch.sequences, batch.attention_mask).per_token_logps
            generated = engine.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
        with torch.no_grad():  # each rank's own rows: nothing is shared without gradients
            logps = engine.logps(batch).per_token_logps
        batches.append((batch.completion_ids, scores, generated, logps))
    for value, wanted in zip(*reversed(batches), strict=True):
        torch.testing.assert_close(value, wanted, atol=0, rtol=0)
    torch.testing.assert_close(logps, batch.old_per_token_logps, atol=2e-5, rtol=0)
    of_ranks: list = [None, None]
    engine = engines[1]
    dist.all_gather_object(of_ranks, batch, group=engine.get_sequence_parallel_group())
    rows = hybrid.RolloutBatch.cat(of_ranks)
    engine.backward(engine.logps(rows).per_token_logps.mean())
    engine.step()
    assert engine.weight_version == 1
    engine.save_checkpoint(folder)
    weights = [param.ds_tensor.clone() for param in engine.module.parameters()]
    engine.backward(engine.logps(rows).per_token_logps.mean())
    engine.step()
    engine.load_checkpoint(folder)
    for param, saved in zip(engine.module.parameters(), weights, strict=True):
        assert torch.equal(param.ds_tensor, saved)
    engines[0].load_checkpoint(folder)  # also without sharing
    torch.testing.assert_close(
        engines[0].score(rows.sequences, rows.attention_mask).per_token_logps,
        engine.score(rows.sequences, rows.attention_mask).per_token_logps,
        atol=0,
        rtol=0,
    )
    engine.destroy()


@pytest.mark.parametrize("tp_size", slow_but([2], [1, 2]))
def test_rollouts_and_checkpoints(ranks, tp_size, tmp_path):
    ranks.run(check_an_iteration, tp_size, str(tmp_path))


def check_other_rows() -> None:
    """Different rows raise on every rank, and the engine goes on."""
    _, engine = pair_of(tiny_model("llama"), 3, 2)
    ids, mask, completion_mask = grouped_rows(dist.get_rank())
    message = "sequence_parallel_size=2: ranks 0 to 1 train together and were given different rows; give them the same"
    with pytest.raises(ValueError, match=message):
        engine.logps(ids, mask, completion_mask)
    engine.backward(engine.logps(*grouped_rows(0)).per_token_logps.sum())
    for forward in ("model", "exact"):
        with pytest.raises(NotImplementedError, match=f"{forward}' is not available with sequence_parallel_size=2"):
            engine.logps(*grouped_rows(0), forward=forward)
    engine.module.config.attn_temperature_tuning, engine._forwards.reason = True, None
    with pytest.raises(NotImplementedError, match="logps: not available with sequence_parallel_size=2, .*; use 1"):
        engine.logps(*grouped_rows(0))


def test_other_rows_and_forwards_raise(ranks):
    ranks.run(check_other_rows)


SHARED = {"sequence_parallel_size": 2}
INVALID = {
    "size": ("llama", {"sequence_parallel_size": 3}, ValueError, "3 given; it must divide the world size, 2"),
    "kind": ("llama", {"sequence_parallel_size": "2"}, ValueError, "it must divide the world size, 2"),
    "product": ("llama", {**SHARED, "data_parallel_size": 2}, ValueError, "data_parallel_size: 2 given; times"),
    "heads": ("llama", SHARED, ValueError, "it must divide the 3 attention heads of LlamaForCausalLM"),
    "attention": ("bloom", SHARED, NotImplementedError, "does not go through transformers' AttentionInterface; use 1"),
    "recurrent": ("qwen3_next", SHARED, NotImplementedError, "has recurrent layers, which run a row's tokens in their"),
}


def check_invalid(name: str) -> None:
    family, keys, error, message = INVALID[name]
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 24, "head_dim": 8}
    model = tiny_model(family, **(heads if name == "heads" else {}))
    with pytest.raises(error, match=f"{'data_parallel_size|' if name == 'product' else ''}sequence_parallel_size"):
        hybrid.initialize(model=model, config=settings(3, **keys))
    with pytest.raises(error, match=message):
        hybrid.initialize(model=model, config=settings(3, **keys))
    assert not any(hasattr(parameter, "ds_id") for parameter in model.parameters())


@pytest.mark.parametrize("name", INVALID)
def test_invalid_settings_raise(ranks, name):
    ranks.run(check_invalid, name)


def check_batch_sizes() -> None:
    """The batch size counts groups, in integers; DeepSpeed's loader, which knows none, is refused."""
    config = settings(2, **SHARED, train_batch_size=6, data_parallel_size=1)
    engine = engine_of(tiny_model("llama"), config)
    assert repr(engine.gradient_accumulation_steps()) == "3" and repr(engine.train_batch_size()) == "6"
    with pytest.raises(ValueError, match="training_data: 'list' given; with sequence_parallel_size=2 the ranks"):
        hybrid.initialize(model=tiny_model("llama"), config=config, training_data=[1])
    assert engine_of(tiny_model("llama"), settings(2, train_batch_size=4)).gradient_accumulation_steps() == 1


def test_batch_sizes(ranks):
    ranks.run(check_batch_sizes)


def saved_bytes(engine: hybrid.HybridEngine, tokens: int) -> int:
    """Bytes that the graph of one row's logprobs keeps for the backward, weights and inputs left out."""
    row = torch.randint(3, 97, (1, tokens), generator=torch.Generator().manual_seed(0))
    kept: dict[int, torch.UntypedStorage] = {}
    outside = {param.untyped_storage().data_ptr() for param in engine.module.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logps = engine.logps(row, torch.ones_like(row)).per_token_logps
    assert logps.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def check_memory() -> list[int]:
    """Activations of a row of 8,192 tokens on this rank, of whole and of shared rows."""
    model = tiny_model("llama", max_position_embeddings=8192)
    return [saved_bytes(engine, 8192) for engine in pair_of(model, 2, dist.get_world_size())]


def test_activations_of_8k_tokens_halve(ranks):
    for whole, shared in ranks.run(check_memory, timeout_s=600):
        print(f"{whole / 2**20:.1f} MB whole, {shared / 2**20:.1f} MB shared")
        assert whole > 8192 * 1000 and shared < 0.51 * whole, (whole, shared)
