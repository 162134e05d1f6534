"""Rollouts and tokens as they come. The oracle is the call that returns them all at its end."""

import asyncio
import threading
import time

import pytest
import torch
import torch.distributed as dist

import hybrid
from hybrid import SamplingParams
from tests.engines import engine_of, settings, train_step
from tests.marks import slow_but
from tests.tiny_models import VOCABULARY, prompts, tiny_model

ENDS = tuple(range(2, VOCABULARY, 12))
SAMPLING = SamplingParams(max_new_tokens=40, temperature=0.9, seed=7, stop_token_ids=ENDS)
MODES = {
    "one rank": {},
    "tensor parallel": {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}},
    "streamed": {"hybrid_engine": {"enabled": True, "pin_parameters": False}},
    "native": {"rollout": {"containers": "native"}},
}
NAMES = ("completion_ids", "completion_mask", "sampling_per_token_logps", "old_per_token_logps", "turn_ids")


def require_row(item: hybrid.RolloutBatch, whole: hybrid.RolloutBatch) -> int:
    """One row of the whole, narrower."""
    assert len(item.prompt_ids) == 1
    row, length = int(item.row_index), int(item.completion_mask.sum())
    for name in NAMES:
        assert torch.equal(getattr(item, name)[0, :length], getattr(whole, name)[row, :length]), name
    assert item.finish_reason == [whole.finish_reason[row]] and item.weight_version == whole.weight_version
    assert torch.equal(item.prompt_ids[0], whole.prompt_ids[row])
    return row


def check_rows(blocks: dict) -> None:
    rank = dist.get_rank()
    engine = engine_of(tiny_model("llama"), settings(3, **blocks))
    ids, mask = prompts(3 + rank, 5 + 3 * rank, padded=True, seed=rank)
    whole = engine.rollout(ids, mask, SAMPLING, num_generations=2)
    stream = engine.rollout_iter(ids, mask, SAMPLING, num_generations=2)
    rows = [require_row(item, whole) for item in stream]
    assert sorted(rows) == list(range(2 * len(ids)))
    assert torch.equal(stream.output().completion_ids, whole.completion_ids)
    lengths = whole.completion_mask.sum(dim=1)
    assert lengths[rows[0]] < lengths[rows[-1]], "rows came in another order than they ended"
    with engine.inference():  # this thread holds the engine's lock
        again = [require_row(item, whole) for item in engine.rollout_iter(ids, mask, SAMPLING, num_generations=2)]
        scores = engine.score(whole.sequences, whole.attention_mask)
    assert again == rows and len(scores.entropies) == len(rows)

    async def collect() -> list[int]:
        return [require_row(item, whole) async for item in engine.rollout_iter(ids, mask, SAMPLING, num_generations=2)]

    assert asyncio.run(collect()) == rows
    train_step(engine)


@pytest.mark.parametrize("mode", slow_but(["one rank", "tensor parallel", "native"], MODES))
def test_rows_come_as_they_finish(ranks, mode):
    ranks.run(check_rows, MODES[mode])


def check_overlap() -> None:
    """Rows come while others decode: the last row waits, in the sampler, until the first one was received."""
    from hybrid.generation.scheduler import Scheduler

    engine = engine_of(tiny_model("llama"), settings(3))
    ids, mask = prompts(4, 5, padded=True)
    received, own, waited = threading.Event(), Scheduler.decode, []

    def decode(scheduler) -> None:
        if len(scheduler.runner) < 4:
            waited.append(received.wait(20))
        own(scheduler)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "decode", decode)
        for _ in engine.rollout_iter(ids, mask, SAMPLING):
            received.set()
    assert waited and all(waited), "no row came before all had ended"


def test_rows_come_while_others_decode(ranks):
    ranks.run(check_overlap)


def check_ends() -> None:
    """Errors are raised by the iteration; a stream that is left stops decoding, and the engine goes on."""
    engine = engine_of(tiny_model("llama"), settings(3))
    ids, mask = prompts(4, 5, padded=True)
    whole = engine.rollout(ids, mask, SAMPLING)
    with pytest.raises(ValueError, match="not left padded"):
        list(engine.rollout_iter(ids, mask.flip(1) * 0 + torch.tensor([1, 1, 1, 1, 0]), SAMPLING))
    with engine.rollout_iter(ids, mask, SAMPLING) as stream:
        require_row(next(stream), whole)
    assert stream.output() is None or len(stream.output().prompt_ids) == 4
    begin = time.monotonic()
    assert torch.equal(engine.rollout(ids, mask, SAMPLING).completion_ids, whole.completion_ids)
    assert time.monotonic() - begin < 20
    assert list(engine.rollout_iter(ids[:0], mask[:0], SAMPLING)) == []
    train_step(engine)


def test_a_stream_that_fails_or_is_left_leaves_the_engine_usable(ranks):
    ranks.run(check_ends)


def check_cancelled(blocks: dict) -> None:
    """The loop ends while the rollout, of 25 slow steps, has just begun. One of a single rank then stops too."""
    from hybrid.generation.scheduler import Scheduler

    engine = engine_of(tiny_model("llama"), settings(3, **blocks))
    ids, mask = prompts(2, 5, padded=True)
    long, own, steps = SamplingParams(max_new_tokens=400, seed=3), Scheduler.decode, []

    def decode(scheduler) -> None:
        steps.append(1)
        time.sleep(0.2)
        own(scheduler)

    async def collect(stream) -> None:
        async for _ in stream:
            pass

    async def cancelled() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(collect(engine.rollout_iter(ids, mask, long)), 0.5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "decode", decode)
        asyncio.run(cancelled())
        assert len(steps) < 15, "the loop waited for the rollout"
        engine.score(ids, mask)  # waits for its end
        assert (len(steps) < 15) == (not engine.in_step), len(steps)


@pytest.mark.parametrize("mode", ["one rank", "tensor parallel"])
def test_a_cancelled_loop_ends_soon(ranks, mode):
    ranks.run(check_cancelled, MODES[mode])


def check_tokens() -> None:
    rank = dist.get_rank()
    engine = engine_of(tiny_model("llama"), settings(3))
    ids, mask = prompts(2 + rank, 5, padded=True, seed=rank)
    settings_of_call = {"attention_mask": mask, "max_new_tokens": 7 + rank, "do_sample": True, "seed": 5}
    whole = engine.generate(ids, **settings_of_call)
    stream = engine.generate_stream(ids, **settings_of_call)
    steps = list(stream)
    assert torch.equal(torch.stack(steps, dim=1), whole[:, ids.shape[1] :])
    assert torch.equal(stream.output(), whole)


def test_tokens_come_step_by_step(ranks):
    ranks.run(check_tokens)
