"""Rollouts that end before all rows are done, and rows that go on later. The oracle is the rollout without a stop."""

from dataclasses import fields, replace

import pytest
import torch
import torch.distributed as dist

import hybrid
from hybrid import SamplingParams, StopAfter
from tests.engines import engine_of, settings, train_step
from tests.marks import slow_but
from tests.tiny_models import VOCABULARY, prompts, tiny_model, twin

ENDS = tuple(range(2, VOCABULARY, 12))
SAMPLING = SamplingParams(max_new_tokens=40, temperature=0.9, seed=7, stop_token_ids=ENDS)
STOPS = {"rows": StopAfter(rows=3), "groups": StopAfter(groups=1), "rows of each group": StopAfter(rows_per_group=2)}
MODES = {
    "one rank": {},
    "tensor parallel": {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}},
    "streamed": {"hybrid_engine": {"enabled": True, "pin_parameters": False}},
    "few at once": {"rollout": {"max_num_seqs": 2}},
}
NATIVE = {
    "one rank": {"rollout": {"containers": "native", "max_num_seqs": 5}},
    "tensor parallel": {"rollout": {"containers": "native"}, "hybrid_engine": {"inference_tp_size": 2}},
}
NAMES = ("completion_ids", "sampling_per_token_logps", "old_per_token_logps", "raw_per_token_logps")


def row_of(batch: hybrid.RolloutBatch, row: int) -> list:
    """What a row of a batch has, without padding."""
    at = batch.row_index.tolist().index(row)
    keep = batch.completion_mask[at].bool()
    return [batch.finish_reason[at], *(getattr(batch, name)[at][keep].tolist() for name in NAMES)]


def close_row(batch: hybrid.RolloutBatch, row: int) -> "CloseRow":
    """The same, equal to one whose logprobs are close."""
    return CloseRow(row_of(batch, row))


class CloseRow(list):
    def __eq__(self, other) -> bool:
        logps, expected = (torch.tensor(row[2:]) for row in (self, other))
        return self[:2] == other[:2] and torch.allclose(logps, expected, atol=1e-5, rtol=1e-5)


def finished(batch: hybrid.RolloutBatch) -> set[int]:
    return set(batch.row_index.tolist())


def check_stop_and_resume(blocks: dict, stop: str) -> None:
    rank = dist.get_rank()
    engine = engine_of(tiny_model("llama"), settings(3, **blocks))
    exact = "containers" not in blocks.get("rollout", {})  # own layers pad, and sum in another order
    same = row_of if exact else close_row
    ids, mask = prompts(3, 5 + 3 * rank, padded=True, seed=rank)
    whole = engine.rollout(ids, mask, SAMPLING, num_generations=3)
    first = engine.rollout(ids, mask, SAMPLING, num_generations=3, stop_after=STOPS[stop])
    done, left = finished(first), set(first.unfinished.row_index.tolist())
    assert done | left == set(range(9)) and not done & left
    by_group = [sum(row // 3 == group for row in done) for group in range(3)]
    if stop == "rows":
        assert 3 <= len(done) < 9
    elif stop == "groups":
        assert max(by_group) == 3
    else:
        assert min(by_group) >= 2
    for row in done:
        assert same(first, row) == same(whole, row)
    assert all(len(batch.finish_reason) == len(batch.prompt_ids) for batch in (first, whole))
    more, more_mask = prompts(1, 4, padded=True, seed=50 + rank)
    rest = engine.rollout(more, more_mask, SAMPLING, resume=first.unfinished)
    alone = engine.rollout(more, more_mask, SAMPLING)
    for index, row in enumerate(first.unfinished.row_index.tolist()):
        assert same(rest, index) == same(whole, row), "a row goes on to other tokens than without the stop"
    assert same(rest, len(left)) == same(alone, 0), "a new prompt together with resumed rows"
    assert rest.unfinished is None
    train_step(engine)


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("mode", slow_but(["one rank", "tensor parallel"], MODES))
def test_rows_that_are_stopped_go_on_to_the_tokens_without_the_stop(ranks, mode, stop):
    ranks.run(check_stop_and_resume, MODES[mode], stop)


@pytest.mark.parametrize("mode", slow_but(["one rank"], NATIVE))
def test_rows_of_the_models_own_layers_go_on_too(ranks, mode):
    ranks.run(check_stop_and_resume, NATIVE[mode], "rows")


def check_groups_that_count(blocks: dict) -> None:
    """Each complete group is asked for once, while others decode; one that does not count lets the rollout go on."""
    rank = dist.get_rank()
    engine = engine_of(tiny_model("llama"), settings(3, **blocks))
    ids, mask = prompts(6, 5 + 3 * rank, padded=True, seed=rank)
    whole = engine.rollout(ids, mask, SAMPLING, num_generations=2)
    asked: list[int] = []

    def accept_group(batch: hybrid.RolloutBatch) -> bool:
        rows = batch.row_index.tolist()
        assert len(rows) == 2 and rows[0] // 2 == rows[1] // 2
        for row in rows:
            assert row_of(batch, row) == row_of(whole, row)
        asked.append(rows[0] // 2)
        return len(asked) > 1

    every = engine.rollout(ids, mask, SAMPLING, num_generations=2, stop_after=StopAfter(groups=1))
    batch = engine.rollout(
        ids, mask, SAMPLING, num_generations=2, stop_after=StopAfter(groups=1, accept_group=accept_group)
    )
    assert len(asked) == len(set(asked)) >= 2
    assert set(asked) <= {row // 2 for row in finished(batch)} and batch.unfinished is not None
    assert finished(every) < finished(batch), "the group that does not count stopped the rollout"
    for row in finished(batch):
        assert row_of(batch, row) == row_of(whole, row)
    none = StopAfter(groups=2, accept_group=lambda batch: False)
    assert engine.rollout(ids, mask, SAMPLING, num_generations=2, stop_after=none).unfinished is None
    rest = engine.rollout(None, None, SAMPLING, resume=batch.unfinished)
    for index, row in enumerate(batch.unfinished.row_index.tolist()):
        assert row_of(rest, index) == row_of(whole, row)


@pytest.mark.parametrize("mode", ["one rank", "streamed", "few at once"])
def test_groups_that_do_not_count_let_others_take_their_place(ranks, mode):
    ranks.run(check_groups_that_count, MODES[mode])


def check_counts_raises() -> None:
    """An error of the caller's function leaves the engine as it was, and the ranks together."""
    engine = engine_of(tiny_model("llama"), settings(3))
    ids, mask = prompts(3, 6, padded=True)
    expected = engine.rollout(ids, mask, SAMPLING)

    def accept_group(batch: hybrid.RolloutBatch) -> bool:
        raise KeyError("no reward")

    with pytest.raises(KeyError, match="no reward"):
        engine.rollout(ids, mask, SAMPLING, stop_after=StopAfter(groups=1, accept_group=accept_group))
    assert torch.equal(engine.rollout(ids, mask, SAMPLING).completion_ids, expected.completion_ids)
    parallel = engine_of(tiny_model("llama"), settings(3, **MODES["tensor parallel"]))
    with pytest.raises(NotImplementedError, match="inference_tp_size decode together; leave accept_group out"):
        parallel.rollout(ids, mask, SAMPLING, stop_after=StopAfter(groups=1, accept_group=bool))


def test_errors_of_counts_and_tensor_parallelism_raise(ranks):
    ranks.run(check_counts_raises)


def check_new_weights() -> None:
    """Each stretch has the version and the logprobs of its own weights."""
    model = tiny_model("llama")
    before = twin(model)
    engine = engine_of(model, settings(3))
    ids, mask = prompts(3, 6, padded=True)
    first = engine.rollout(ids, mask, SAMPLING, num_generations=2, stop_after=StopAfter(rows=1))
    unfinished = first.unfinished
    lengths = unfinished.completion_mask.sum(dim=1)
    train_step(engine)
    batch = engine.rollout(None, None, SAMPLING, resume=unfinished)
    old = engine_of(before, settings(3))
    width = batch.completion_ids.shape[1]
    new_logps, old_logps = (
        e.score(batch.sequences, batch.attention_mask, temperature=0.9).per_token_logps[:, -width:]
        for e in (engine, old)
    )
    is_old = torch.arange(width) < lengths[:, None]
    mask = batch.completion_mask
    assert torch.equal(batch.weight_versions, torch.where(is_old, 0, 1) * mask)
    expected = torch.where(is_old, old_logps, new_logps) * mask
    torch.testing.assert_close(batch.old_per_token_logps, expected, atol=1e-5, rtol=1e-5)
    assert ((new_logps - old_logps) * mask).abs().max() > 1e-3, "the step changed nothing: the test shows nothing"
    assert (mask.sum(dim=1) > lengths).all()


def test_a_row_under_new_weights_has_the_logprobs_of_each_stretch(ranks):
    ranks.run(check_new_weights)


def check_twice() -> None:
    """Rows that are stopped again, on ranks of which one has nothing left."""
    rank = dist.get_rank()
    engine = engine_of(tiny_model("llama"), settings(3))
    ids, mask = prompts(4, 5, padded=True, seed=rank)
    whole = engine.rollout(ids, mask, SAMPLING)
    batch = engine.rollout(ids, mask, SAMPLING, stop_after=StopAfter(rows=1))
    origin = list(range(4))
    for _ in range(4):
        for row in finished(batch):
            assert row_of(batch, row) == row_of(whole, origin[row])
        if batch.unfinished is None:
            break
        origin = [origin[row] for row in batch.unfinished.row_index.tolist()]
        batch = engine.rollout(None, None, SAMPLING, resume=batch.unfinished, stop_after=StopAfter(rows=1))
    nothing = replace(batch) if batch.unfinished is None else batch
    assert nothing.unfinished is None
    empty = engine.rollout(ids, mask, SAMPLING, stop_after=StopAfter(rows=2)).unfinished.select_rows([])
    assert len(engine.rollout(None, None, SAMPLING, resume=empty).prompt_ids) == 0


def test_rows_can_be_stopped_again_and_again(ranks):
    ranks.run(check_twice)


def check_wrong_arguments() -> None:
    engine = engine_of(tiny_model("llama"), settings(3))
    ids, mask = prompts(2, 5, padded=True)
    given = ids, mask, SAMPLING
    for error, text, call in (
        (ValueError, "it must be one of rows, groups, rows_per_group", lambda: StopAfter()),
        (ValueError, "at least 1", lambda: StopAfter(rows=0)),
        (ValueError, "it must be one of", lambda: StopAfter(rows=1, groups=1)),
        (ValueError, "of a RolloutBatch, and goes with groups", lambda: StopAfter(rows=1, accept_group=bool)),
        (ValueError, "it must be a function of a RolloutBatch", lambda: StopAfter(groups=1, accept_group=3)),
        (TypeError, "int given; it must be a hybrid.StopAfter", lambda: engine.rollout(*given, stop_after=3)),
        (TypeError, "list given; it must be a hybrid.UnfinishedRows", lambda: engine.rollout(*given, resume=[])),
        (TypeError, "NoneType given", lambda: engine.rollout(None, None, SAMPLING)),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            call()


def test_wrong_arguments_say_what_is_allowed(ranks):
    ranks.run(check_wrong_arguments)


def test_unfinished_rows_and_batches_select_all_their_fields():
    rows = hybrid.UnfinishedRows(
        **{field.name: torch.arange(6).view(2, 3) for field in fields(hybrid.UnfinishedRows) if field.name != "logps"},
        logps=torch.arange(12).view(3, 2, 2),
    )
    second = rows.select_rows([1])
    assert all(
        torch.equal(getattr(second, field.name), torch.tensor([[3, 4, 5]]))
        for field in fields(rows)
        if field.name != "logps"
    )
    assert torch.equal(second.logps, rows.logps[:, 1:])
