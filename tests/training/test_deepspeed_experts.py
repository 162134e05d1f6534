"""Training with DeepSpeed's own MoE layers, experts over two ranks: every forward is a collective, and ranks may have
different batches."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

import hybrid
from tests.engines import settings
from tests.inference.test_deepspeed_experts import with_mixtures
from tests.marks import slow_but
from tests.tiny_models import prompts


def engine_over(model: nn.Module, stage: int = 2) -> hybrid.HybridEngine:
    """An engine that trains all parameters of a model with MoE layers."""
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": [*model.parameters()], "name": "parameters"}
    )
    return hybrid.initialize(model=model, model_parameters=groups, config=settings(stage))[0]


@torch.no_grad()
def greedy(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, new: int) -> torch.Tensor:
    """Tokens of a greedy loop without a cache over the model with all experts; rows are right-padded after their
    end."""
    unfinished = torch.ones(len(ids), dtype=torch.bool)
    for _ in range(new):
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        tokens = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1].argmax(-1)
        tokens = tokens * unfinished
        ids = torch.cat([ids, tokens[:, None]], dim=1)
        mask = torch.cat([mask, torch.ones_like(tokens)[:, None]], dim=1)
        unfinished &= tokens != 2
        if not unfinished.any():
            break
    return ids


def check_lengths(k: int, drop_tokens: bool) -> None:
    """Ranks that differ in rows, prompts and lengths; a rank without rows; a rank whose request raises."""
    rank = dist.get_rank()
    reference = with_mixtures(1, k, drop_tokens)
    engine = engine_over(with_mixtures(2, k, drop_tokens, rank).train())
    state = torch.get_rng_state()
    for rows, length, new in ((3, 7, 3 + 9 * rank), (2 + 3 * rank, 9 - 3 * rank, 8 - 5 * rank), (1 + rank, 5, 1)):
        ids, mask = prompts(rows, length, padded=True, seed=rank)
        expected = greedy(reference, ids, mask, new)
        request = {"attention_mask": mask, "max_new_tokens": new, "do_sample": False}
        assert torch.equal(engine.generate(ids, synced_gpus=True, **request), expected)
        sampling = hybrid.SamplingParams(max_new_tokens=new, temperature=0)
        for own in (rows, rows * rank):
            batch = engine.rollout(ids[:own], mask[:own], sampling)
            assert torch.equal(batch.completion_ids, expected[:own, length : length + batch.completion_ids.shape[1]])
            scores = engine.score(batch.sequences, batch.attention_mask, rows_per_forward=1 + 2 * rank)
            scored = scores.per_token_logps[:, length - 1 :] * batch.completion_mask
            torch.testing.assert_close(scored, batch.sampling_per_token_logps, atol=1e-4, rtol=1e-4)
    wrong = {"attention_mask": mask.flip(1)} if rank == 0 else {"attention_mask": mask}
    with pytest.raises(ValueError, match="left padded") if rank == 0 else contextlib.nullcontext():
        engine.rollout(ids[:2], wrong["attention_mask"][:2] if rank else torch.tensor([[1, 1, 1, 1, 0]]), sampling)
    assert torch.equal(torch.get_rng_state(), state), "the gates drew from training's generator"
    engine.eval()
    actual = engine(input_ids=ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(
        actual[mask.bool()], reference(input_ids=ids, attention_mask=mask).logits[mask.bool()], atol=1e-4, rtol=1e-4
    )
    engine.train()


@pytest.mark.parametrize(("k", "drop_tokens"), slow_but([(2, False)], [(2, True), (2, False), (1, True)]))
def test_ranks_with_different_batches_and_lengths_match_the_unsharded_model(ranks, k, drop_tokens):
    ranks.run(check_lengths, k, drop_tokens)


def check_training() -> None:
    """A run with rollouts trains to the same bits as one without."""
    rank = dist.get_rank()
    engines = [engine_over(with_mixtures(2, 2, False, rank).train()) for _ in range(2)]
    ids, mask = prompts(2 + rank, 6, padded=True, seed=rank)
    training_ids, _ = prompts(2, 9, padded=False, seed=10 + rank)
    for _ in range(2):
        engines[0].rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=3 + 4 * rank))
        losses = []
        for engine in engines:
            torch.manual_seed(rank)
            loss = engine(input_ids=training_ids, labels=training_ids).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    parameters, other_parameters = (engine.module.parameters() for engine in engines)
    assert all(torch.equal(a, b) for a, b in zip(parameters, other_parameters, strict=True))


def test_training_is_bit_identical_after_rollouts(ranks):
    ranks.run(check_training)


def check_processor() -> None:
    """Only rank 1's processor calls the embedding, which sends no tokens to experts."""
    rank = dist.get_rank()
    engine = engine_over(with_mixtures(2, 2, False, rank).train())
    embed = engine.module.get_input_embeddings()

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 0 * embed(ids).sum() if rank else scores

    ids, mask = prompts(2 + rank, 6, padded=True, seed=rank)
    request = {"attention_mask": mask, "max_new_tokens": 3 + rank, "do_sample": False, "logits_processor": [processor]}
    expected = greedy(with_mixtures(1, 2, False), ids, mask, 3 + rank)
    assert torch.equal(engine.generate(ids, **request), expected)


def test_a_ranks_processor_may_call_a_module_without_experts(ranks):
    ranks.run(check_processor)
