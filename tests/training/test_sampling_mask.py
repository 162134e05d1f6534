"""Logprobs of truncated distributions: `engine.logps` with a rollout's sampling mask.

The oracles are the sampler's own logprobs, and a softmax in float64 over sets of tokens that a loop collects.
"""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

from hybrid import Observation, RolloutBatch, SamplingParams, StopAfter
from hybrid.training.logps import TrainingForwards
from hybrid.training.packed_forwards import target_tokens
from tests.engines import engine_of, settings
from tests.marks import slow_but
from tests.tiny_models import VOCABULARY, in_float64, prompts, tiny_model
from tests.training.grouped_rows import grouped_rows

WAYS = {
    "top_k": {"top_k": 12},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.3},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
}
# Deepspeed 0.19.8 clips gradients at 1 by default.
UNCLIPPED = {"gradient_clipping": 0.0}


def sampling_of(way: str, **others) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 12, "temperature": 0.7, "seed": 3, **WAYS[way], **others})


def plain_logps(model, ids, mask, completion_mask, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logprobs and entropies of completion tokens over the first k tokens by logit, k different for each, and
    the sampled one; and the masks that say so. Each row alone, in float64, a softmax for each token."""
    generator, width = torch.Generator().manual_seed(seed), completion_mask.shape[1]
    masks = torch.full(completion_mask.shape, -1)
    logps, entropies = torch.zeros(2, *completion_mask.shape, dtype=torch.float64).unbind()
    for row, column in completion_mask.nonzero().tolist():
        end = ids.shape[1] - width + column
        kept = mask[row, :end].bool()
        logits = model(input_ids=ids[row, :end][kept][None], use_cache=False).logits[0, -1] / 0.7
        token, k = int(ids[row, end]), int(torch.randint(0, 9, (), generator=generator))
        values = logits.tolist()
        order = [index for _, index in sorted(zip(values, range(len(values)), strict=True), reverse=True)]
        others = [index for index in order[:k] if index != token]
        masks[row, column] = others[-1] if others else token
        of_kept = torch.log_softmax(logits[[token, *others]], -1)
        at = torch.tensor(row), torch.tensor(column)
        logps = logps.index_put(at, of_kept[0])
        entropies = entropies.index_put(at, -(of_kept.exp() * of_kept).sum())
    return logps, entropies, masks


@pytest.mark.parametrize("forward", ["packed", "model"])
def test_logprobs_and_gradients_are_those_of_the_kept_tokens(forward):
    """In float64, with rows of common prefixes whose tokens have different masks."""
    torch.manual_seed(0)
    model = in_float64(tiny_model("llama")).train()
    expected_model = copy.deepcopy(model)
    ids, mask, completion_mask = grouped_rows(0, groups=2)
    logps, entropies, masks = plain_logps(expected_model, ids, mask, completion_mask, seed=1)
    forwards = TrainingForwards(model, model, model)
    forwards.min_shared = 1
    arguments = ids, mask, completion_mask, None, torch.device("cpu"), None, model.config, masks
    actual = forwards.logps(target_tokens(*arguments), 0.7, True, forward)
    torch.testing.assert_close(actual.per_token_logps, logps, atol=1e-5, rtol=0)
    torch.testing.assert_close(actual.entropies, entropies, atol=1e-5, rtol=0)
    weights = torch.linspace(-1, 1, completion_mask.numel()).view(completion_mask.shape)
    (weights * (actual.per_token_logps + 0.3 * actual.entropies)).sum().backward()
    (weights * (logps + 0.3 * entropies)).sum().backward()
    for (name, parameter), expected in zip(model.named_parameters(), expected_model.parameters(), strict=True):
        error = (parameter.grad - expected.grad).norm() / expected.grad.norm().clamp(min=1e-4)
        assert error < 1e-5, f"{name}: {error:.2g}"  # RMSNorm and rotations compute in float32


def gradients(engine, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of a loss that no step follows."""
    engine.backward(loss)
    found = {name: safe_get_full_grad(parameter).clone() for name, parameter in engine.module.named_parameters()}
    engine.optimizer.zero_grad()
    return found


def check_masked_logps(stage: int, way: str, dtype: torch.dtype, mode: dict) -> None:
    """At the weights that sampled they are the sampler's truncated logprobs: "exact" to the bit, the others within
    rounding. The forwards' gradients agree, and a step of the masked loss changes the logprobs."""
    rank = dist.get_rank()
    engine = engine_of(tiny_model("llama"), settings(stage, dtype=dtype, **UNCLIPPED, **mode))
    ids, mask = prompts(2 + rank, 18, padded=True, seed=rank)
    batch = engine.rollout(ids, mask, sampling_of(way), num_generations=3)
    sampled, kept = batch.completion_mask.bool(), batch.sampling_mask
    assert kept.dtype == torch.int64 and (kept[~sampled] == -1).all()
    assert ((kept[sampled] >= 0) & (kept[sampled] < VOCABULARY)).all()
    expected = batch.sampling_per_token_logps
    assert (expected - batch.old_per_token_logps)[sampled].max() > 0.05, "something was truncated"
    assert torch.equal(
        expected[sampled & (kept == batch.completion_ids)],
        expected.new_zeros(()).expand(int((sampled & (kept == batch.completion_ids)).sum())),
    ), "of one kept token the logprob is 0"
    engine.train()
    weights = torch.linspace(-1, 1, sampled.numel()).view(sampled.shape) * sampled
    by_forward = {}
    for forward in ("exact", "packed", "model"):
        logps, entropies = engine.logps(
            batch, temperature=0.7, entropy=True, forward=forward, sampling_mask=batch.sampling_mask
        )
        difference = (logps - expected).abs()[sampled]
        if forward == "exact":
            assert torch.equal(logps, expected)
            of_exact = entropies.detach()
        elif dtype == torch.float32:
            # a token at the edge may change sides by rounding: none does here
            assert difference.max() < 2e-5, f"{forward}: {difference.max():.2g}"
            torch.testing.assert_close(entropies, of_exact, atol=2e-5, rtol=0)
        else:
            assert difference.mean() < 0.05, f"{forward}: {difference.mean():.2g}"
        if dtype == torch.float32:
            by_forward[forward] = gradients(engine, (weights * (logps + 0.3 * entropies)).sum())
    for forward, name in itertools.product(("exact", "packed"), by_forward.get("model", ())):
        value, wanted = by_forward[forward][name], by_forward["model"][name]
        assert (value - wanted).norm() <= 1e-4 * wanted.norm().clamp(min=1e-3), f"{forward}: {name}"
    for forward in ("packed", "exact"):  # the batch's mask is not taken unless it is given
        whole = engine.logps(batch, temperature=0.7, forward=forward).per_token_logps
        torch.testing.assert_close(whole, batch.old_per_token_logps, atol=2e-5 if dtype == torch.float32 else 1, rtol=0)
    engine.backward(-(engine.logps(batch, temperature=0.7, sampling_mask=kept).per_token_logps * weights).sum())
    engine.step()
    later = engine.logps(batch, temperature=0.7, forward="exact", sampling_mask=kept).per_token_logps
    assert later.isfinite().all() and not torch.equal(later, expected)


CASES = [*itertools.product((0, 3), WAYS, (torch.float32, torch.bfloat16))]


@pytest.mark.parametrize(
    ("stage", "way", "dtype"), slow_but([(0, "top_p", torch.float32), (3, "all", torch.bfloat16)], CASES)
)
def test_masked_logprobs_are_the_samplers(ranks, stage, way, dtype):
    ranks.run(check_masked_logps, stage, way, dtype, {})


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_masked_logprobs_are_the_samplers_over_slices_of_the_vocabulary(ranks, way):
    mode = {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}}
    ranks.run(check_masked_logps, 3, way, torch.float32, mode)


def check_native(way: str) -> None:
    """The model's own layers roll out: its logits give the mask."""
    engine = engine_of(tiny_model("llama"), settings(3, rollout={"containers": "native"}))
    ids, mask = prompts(2 + dist.get_rank(), 9, padded=True, seed=dist.get_rank())
    batch = engine.rollout(ids, mask, sampling_of(way), num_generations=2)
    engine.train()
    for forward in ("packed", "model"):
        masked = engine.logps(batch, temperature=0.7, forward=forward, sampling_mask=batch.sampling_mask)
        torch.testing.assert_close(masked.per_token_logps, batch.sampling_per_token_logps, atol=2e-5, rtol=0)


@pytest.mark.parametrize("way", slow_but(["all"], WAYS))
def test_native_rollouts_have_masks(ranks, way):
    ranks.run(check_native, way)


class TwoTokens:
    """Answers the first turn with two tokens, then ends the row."""

    def __init__(self):
        self.answered: set[int] = set()

    def reset(self, row: int, prompt_ids: torch.Tensor) -> None:
        return None

    def step(self, row: int, completion_ids: torch.Tensor) -> Observation:
        done = row in self.answered
        self.answered.add(row)
        return Observation([5, 6], done=done)


def check_batches() -> None:
    """Masks of rows that were stopped and resumed, of environments, and of batches that are padded, cut and joined."""
    engine = engine_of(tiny_model("llama"), settings(3))
    ids, mask = prompts(4, 9, padded=True, seed=dist.get_rank())
    sampling = sampling_of("all", stop_token_ids=tuple(range(0, VOCABULARY, 9)))
    whole = engine.rollout(ids, mask, sampling, num_generations=2)
    assert len(set(whole.completion_mask.sum(1).tolist())) > 1

    part = engine.rollout(ids, mask, sampling, num_generations=2, stop_after=StopAfter(rows=3))
    rest = part.unfinished
    assert torch.equal(rest.sampling_mask >= 0, rest.completion_mask.bool())
    resumed = engine.rollout(None, None, sampling, resume=rest)
    order = resumed.row_index.tolist()
    width = resumed.completion_ids.shape[1]
    expected = whole.sampling_mask[[int(rest.row_index[row]) for row in order], :width]
    assert torch.equal(resumed.sampling_mask, expected)
    unknown = engine.rollout(None, None, sampling, resume=replace(rest, sampling_mask=None))
    assert unknown.sampling_mask is None and torch.equal(unknown.completion_ids, resumed.completion_ids)
    assert torch.equal(rest.select_rows([1]).sampling_mask, rest.sampling_mask[[1]])

    wider = whole.padded(20, 30)
    assert wider.sampling_mask.shape == (8, 30) and (wider.sampling_mask[:, 12:] == -1).all()
    joined = RolloutBatch.cat([whole.select_rows([5, 0]), part.padded(20, 30)])
    assert torch.equal(joined.sampling_mask[:2, :width], whole.sampling_mask[[5, 0], :width])
    without = RolloutBatch.cat([replace(whole, sampling_mask=None), part])
    assert without.sampling_mask is None and len(without.prompt_ids) == len(whole.prompt_ids) + len(part.prompt_ids)

    episodes = engine.rollout(ids, mask, sampling, environment=TwoTokens())
    assert episodes.observation_mask.any()
    assert torch.equal(episodes.sampling_mask >= 0, episodes.completion_mask.bool())
    engine.train()
    masked = engine.logps(episodes, temperature=0.7, forward="exact", sampling_mask=episodes.sampling_mask)
    assert torch.equal(masked.per_token_logps, episodes.sampling_per_token_logps)

    for arguments in ({"top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"temperature": 0}, {"repetition_penalty": 1.2}):
        assert engine.rollout(ids, mask, replace(sampling, **arguments)).sampling_mask is None
    engine.train()
    for given in (whole.sampling_mask.float(), whole.sampling_mask[:, :-1], whole.sampling_mask + VOCABULARY):
        with pytest.raises(ValueError, match="sampling_mask: "):
            engine.logps(whole, sampling_mask=given)


def test_masks_of_resumed_rows_environments_and_joined_batches(ranks):
    ranks.run(check_batches)
