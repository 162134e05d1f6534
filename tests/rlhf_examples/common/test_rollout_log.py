"""The log of rollouts: its lines by hand, what is read again, and what a resumed run drops."""

from dataclasses import asdict

import numpy as np
import pytest
import torch

import hybrid
from rlhf_examples.common.arguments import GRPOArguments
from rlhf_examples.common.files import ROLLOUTS
from rlhf_examples.common.rollout_log import drop_rollouts, log_rollout, numbered, ranges, read_rollouts, spans

PARAMS = hybrid.SamplingParams(max_new_tokens=6, temperature=0.7, seed=3, stop_token_ids=(9,))


def conversation() -> hybrid.RolloutBatch:
    """Two rows: a turn that ends, an answer of two tokens and a turn; and two turns without an answer between them."""
    mask = torch.tensor([[1, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 0]])
    logps = torch.tensor([[-0.1, -0.2, 0, 0, -0.3, 0], [-1.5, -1e-8, -2.5, 0, 0, 0]])
    return hybrid.RolloutBatch(
        prompt_ids=torch.tensor([[0, 5, 6], [7, 8, 9]]),
        prompt_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]),
        completion_ids=torch.tensor([[11, 9, 12, 13, 14, 0], [21, 9, 22, 0, 0, 0]]),
        completion_mask=mask,
        sampling_per_token_logps=logps,
        old_per_token_logps=logps,
        raw_per_token_logps=logps,
        finish_reason=["length", "stop"],
        weight_version=4,
        row_index=torch.tensor([0, 1]),
        observation_mask=torch.tensor([[0, 0, 1, 1, 0, 0], [0] * 6]),
        turn_ids=torch.tensor([[0, 0, 0, 0, 1, -1], [0, 0, 1, -1, -1, -1]]),
        sampling_keys=torch.tensor([-(2**62), 17]),
    )


def settings(directory, **changes) -> GRPOArguments:
    return GRPOArguments(output_dir=str(directory), log_rollouts=True, **changes)


def test_a_line_has_what_a_replay_needs(alone, tmp_path):
    log_rollout(conversation(), numbered(torch.tensor([3, 1])), PARAMS, 5, settings(tmp_path))
    second, first = read_rollouts(tmp_path, 5)
    assert (first.iteration, first.weights, first.row, first.sample) == (5, 4, 3, 0)
    assert first.sampling_key == -(2**62) and hybrid.SamplingParams(**first.sampling) == PARAMS
    assert first.prompt_ids == [5, 6] and first.completion_ids == [11, 9, 12, 13, 14]
    assert first.turns == [[0, 2], [4, 5]] and first.token_ids() == [11, 9, 14]
    assert (second.row, second.turns, second.token_ids()) == (1, [[0, 2], [2, 3]], [21, 9, 22])
    assert torch.equal(torch.tensor(second.logps), torch.tensor([-1.5, -1e-8, -2.5])), "every bit is kept"
    assert (first.finish_reason, second.finish_reason) == ("length", "stop")


def test_of_a_resumed_row_only_new_tokens_count(alone, tmp_path):
    """A row that was done before is left out; an unfinished one has what this rollout added."""
    batch = conversation()
    before = hybrid.UnfinishedRows(
        *(batch.prompt_ids, batch.prompt_mask, batch.completion_ids),
        completion_mask=torch.tensor([[1] * 5 + [0], [1, 1, 0, 0, 0, 0]]),
        logps=torch.zeros(3, 2, 6),
        **{name: torch.zeros(2, dtype=torch.int64) for name in ("weight_versions", "limits", "groups", "row_index")},
        sampling_keys=batch.sampling_keys,
    )
    log_rollout(batch, [(0, 0), (0, 1)], PARAMS, 2, settings(tmp_path), before)
    (only,) = read_rollouts(tmp_path, 2)
    assert (only.sample, only.turns, only.logps) == (1, [[2, 3]], [-2.5])
    assert only.completion_ids == [21, 9, 22], "with the tokens before them"


def test_nothing_is_logged_by_default(tmp_path):
    log_rollout(conversation(), [], PARAMS, 1, GRPOArguments(output_dir=str(tmp_path)))
    assert not (tmp_path / ROLLOUTS).exists()


def test_a_resumed_run_drops_later_iterations(alone, tmp_path):
    for iteration in (1, 2, 3):
        log_rollout(conversation(), [(0, 0), (1, 0)], PARAMS, iteration, settings(tmp_path))
    (tmp_path / ROLLOUTS / "000003-rank7.jsonl").write_text("{}\n")  # of another number of ranks
    drop_rollouts(tmp_path, 1)
    assert [path.name for path in (tmp_path / ROLLOUTS).iterdir()] == ["000001-rank0.jsonl"]
    with pytest.raises(ValueError, match=r"step: 2 given; .* does not have it: logged are 1$"):
        read_rollouts(tmp_path, 2)
    with pytest.raises(ValueError, match=r"none are logged; the run needs --log_rollouts true$"):
        read_rollouts(tmp_path / "nowhere", 1)


def test_a_cut_off_line_is_left_out_and_a_wrong_one_is_named(alone, tmp_path):
    log_rollout(conversation(), [(0, 0), (1, 0)], PARAMS, 1, settings(tmp_path))
    path = tmp_path / ROLLOUTS / "000001-rank0.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-9])
    assert [asdict(completion)["row"] for completion in read_rollouts(tmp_path, 1)] == [0]
    for line in ("[1]", '{"row": 1}', "{"):
        path.write_text(whole + line + "\n")
        with pytest.raises(ValueError, match=r"000001-rank0.jsonl:3 is no line of `log_rollouts`"):
            read_rollouts(tmp_path, 1)


def test_spans_and_ranges():
    labels = np.array([[0, 1, 1, 2, 0, 0, 3], [0] * 7, [4, 4, 4, 4, 4, 4, 4], [5, 0, 0, 0, 0, 0, 0]])
    assert spans(labels) == [[[1, 3], [3, 4], [6, 7]], [], [[0, 7]], [[0, 1]]]
    assert spans(labels[:0]) == [] and spans(labels[:, :0]) == [[]] * 4
    assert ranges([1, 3, 4, 5, 9]) == "1, 3 to 5, 9" and ranges([2]) == "2" and ranges([]) == ""
