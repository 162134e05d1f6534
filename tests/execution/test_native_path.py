"""The native path, in the model's own layers: equal prompts prefilled once, logits of the last token only, scores with
different numbers of rows per rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hybrid
from hybrid.runtime.call_lock import CallLock
from tests.engines import engine_of, settings
from tests.marks import slow_but
from tests.tiny_models import prompts, tiny_model, twin, with_peft

NATIVE = {"containers": "native"}
GREEDY = {
    "temperature": 1.0,
    "top_k": 1,
    "seed": 0,
}  # sampling from one token: Hugging Face's greedy search has no groups


class ForwardShapes:
    """Records (rows, tokens) of each forward of the first layer."""

    def __init__(self, model: nn.Module):
        layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
        layers[0].register_forward_pre_hook(self.note, with_kwargs=True)
        self.shapes: list[tuple[int, int]] = []

    def note(self, module, args, kwargs) -> None:
        self.shapes.append(tuple((args[0] if args else kwargs["hidden_states"]).shape[:2]))

    def taken(self) -> list[tuple[int, int]]:
        shapes, self.shapes = self.shapes, []
        return shapes


def check_equal_prompts(family: str) -> None:
    """Groups of four completions, two prompts equal: each prompt is prefilled once. Greedy tokens equal Hugging Face's,
    and each sampled row has its own sampling keys."""
    model = with_peft(tiny_model(family))
    reference = twin(model).eval()
    engine = engine_of(model, settings(3, rollout=NATIVE))
    forwards, rank = ForwardShapes(engine.module), dist.get_rank()
    ids, mask = prompts(3 + rank, 7, padded=True, seed=rank)
    ids, mask = torch.cat([ids, ids[:1]]), torch.cat([mask, mask[:1]])  # the first prompt once more, at the end
    for sampling in (
        hybrid.SamplingParams(max_new_tokens=6, repetition_penalty=1.3, **GREEDY),
        hybrid.SamplingParams(max_new_tokens=6, temperature=0.9, top_k=40, seed=5, min_new_tokens=3),
    ):
        batch = engine.rollout(ids, mask, sampling, num_generations=4)
        first, *steps = forwards.taken()
        assert first == (3 + rank, 7)
        rows = [count for count, _ in steps]
        assert rows[0] == 4 * (4 + rank) and rows == sorted(rows, reverse=True) and {count for _, count in steps} == {1}
        require_own_logprobs(reference, batch)
        if sampling.top_k == 1:
            group_ids, group_mask = (tensor.repeat_interleave(4, dim=0) for tensor in (ids, mask))
            request = {"max_new_tokens": 6, "do_sample": False, "repetition_penalty": 1.3}
            assert torch.equal(batch.sequences, reference.generate(group_ids, attention_mask=group_mask, **request))
    completions = batch.completion_ids.view(-1, 4, batch.completion_ids.shape[1])
    assert not all(torch.equal(rows[0], rows[1]) for rows in completions), (
        "a group's completions share their sampling keys"
    )
    # A row's tokens do not depend on the other rows of its prompt.
    alone = engine.rollout(ids[:1], mask[:1], sampling, num_generations=2)
    width = min(alone.completion_ids.shape[1], completions.shape[2])
    assert torch.equal(alone.completion_ids[:, :width], completions[0, :2, :width])


def require_own_logprobs(reference: nn.Module, batch: hybrid.RolloutBatch) -> None:
    """A rollout's raw logprobs equal those of Hugging Face's forward over its sequences."""
    with torch.no_grad():
        logits = hybrid.padded_forward(reference)(batch.sequences, batch.attention_mask).logits
    real = batch.completion_mask.bool()
    logps = logits.log_softmax(-1)[:, :-1].gather(-1, batch.sequences[:, 1:, None])[..., 0][:, -real.shape[1] :]
    torch.testing.assert_close(batch.raw_per_token_logps[real], logps[real], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", slow_but(["gemma3_text", "gpt2"], ["llama", "mistral", "gemma3_text", "gpt2"]))
def test_equal_prompts_are_prefilled_once(ranks, family):
    ranks.run(check_equal_prompts, family)


def check_separate_prompts() -> None:
    """Prompts with different masks are not shared; a call that returns its cache, or uses none, prefills every row."""
    model = tiny_model("llama")
    reference = twin(model).eval()
    engine = engine_of(model, settings(3, rollout=NATIVE))
    forwards = ForwardShapes(engine.module)
    ids, mask = prompts(2, 6, padded=False)
    ids[1], mask[1, 0] = ids[0], 0  # the same tokens, the first of one masked
    request = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    assert forwards.taken()[0] == (2, 6)
    request = {"max_new_tokens": 4, "do_sample": True, "top_k": 1, "num_return_sequences": 3}
    for more in ({"return_dict_in_generate": True}, {"use_cache": False}):
        actual, expected = engine.generate(ids, **request, **more), reference.generate(ids, **request, **more)
        if "return_dict_in_generate" in more:
            assert actual.past_key_values.layers[0].keys.shape == expected.past_key_values.layers[0].keys.shape
            actual, expected = actual.sequences, expected.sequences
        assert torch.equal(actual, expected), more
        assert forwards.taken()[0] == (6, 6), more
    # Repeated keys and values are in storage that the next call reuses, with room for new tokens: 6 rows, 3 layers.
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    assert forwards.taken()[0] == (1, 6)
    assert engine.stats()["kv_bytes"] == 6 * 3 * 2 * 2 * 8 * 128 * 4


def test_prompts_with_different_masks_are_not_shared(ranks):
    ranks.run(check_separate_prompts)


def check_streaming_scores() -> None:
    """Streaming: ranks with different numbers of rows, forwards and chunks all finish."""
    rank = dist.get_rank()
    model = with_peft(tiny_model("llama"))
    reference = twin(model).eval()
    block = {"hybrid_engine": {"pin_parameters": False}, "rollout": NATIVE}
    engine = engine_of(model, settings(3, **block))
    for rows, length, rows_per_forward in ((2 + 5 * rank, 90 - 60 * rank, 8 - 6 * rank), (3 * rank, 20, 1)):
        ids, mask = prompts(rows, length, padded=True, seed=rank) if rows else (torch.zeros(2, 0, 9, dtype=torch.long))
        scores = engine.score(ids, mask, rows_per_forward=rows_per_forward)
        assert scores.per_token_logps.shape == (rows, ids.shape[1] - 1)
        if rows:
            with torch.no_grad():
                logits = hybrid.padded_forward(reference)(ids, mask).logits[:, :-1]
            scored_mask = mask[:, 1:] * mask[:, :-1]
            expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0] * scored_mask
            torch.testing.assert_close(scores.per_token_logps, expected, atol=1e-4, rtol=1e-4)
    # And groups of equal prompts.
    ids, mask = prompts(1 + rank, 6, padded=False, seed=rank)
    batch = engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=3 + 2 * rank, **GREEDY), 3)
    expected = reference.generate(ids, attention_mask=mask, max_new_tokens=3 + 2 * rank, do_sample=False)
    assert torch.equal(batch.sequences, expected.repeat_interleave(3, dim=0))


def test_streaming_scores_ranks_with_different_numbers_of_rows(ranks):
    ranks.run(check_streaming_scores)


def check_prefill_logits() -> None:
    engine = engine_of(tiny_model("qwen2"), settings(3, rollout=NATIVE))
    ids, mask = prompts(3, 40, padded=True)
    shapes: list[tuple[int, int]] = []
    engine.module.lm_head.register_forward_pre_hook(lambda head, args: shapes.append(tuple(args[0].shape[:2])))
    engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=2, min_new_tokens=2, **GREEDY), 2)
    assert shapes == [(3, 1), (6, 1)]


def test_prefill_computes_logits_of_the_last_token_only(ranks):
    ranks.run(check_prefill_logits)


def check_lock() -> None:
    """A decode step enters the engine's lock once, however many layers have a container inside the model's."""
    entered, call = [], CallLock.call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallLock, "call", lambda lock: (entered.append(lock), call(lock))[1])
        counts = []
        for layers in (2, 6):
            engine = engine_of(tiny_model("llama", num_hidden_layers=layers), settings(3, rollout=NATIVE))
            ids, mask = prompts(2, 7, padded=True)
            entered.clear()
            engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=6))
            counts.append(len(entered))
    assert counts[0] == counts[1] <= 1 + 6 + 1, counts


def test_layers_within_a_forward_do_not_enter_the_lock_again(ranks):
    ranks.run(check_lock)
