"""Sums and gathers of ranks on one host: exact, in rank order, and ended by an error of any rank."""

import pytest
import torch

from hybrid.kernels.host_group import CAPACITY
from hybrid.runtime.parallel import LostRankError, RankFailedError
from tests.host_groups import host_groups, on_every_rank


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", [1, 17, CAPACITY, 2 * CAPACITY + 5])
def test_sums_are_those_of_the_ranks_in_order_on_every_rank(size, count):
    parts = torch.randn(size, count) * 10 ** torch.randint(-6, 6, (size, 1)).float()
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    for total in on_every_rank(host_groups(size), lambda group: group.sum(parts[group.index].clone())):
        assert torch.equal(total, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("shape", [(), (3, 5), (CAPACITY + 1,)])
def test_gathered_tensors_are_in_rank_order(dtype, shape):
    parts = torch.randint(0, 2 if dtype == torch.bool else 100, (3, *shape)).to(dtype)
    for gathered in on_every_rank(host_groups(3), lambda group: group.gather(parts[group.index])):
        assert gathered.dtype == dtype
        assert torch.equal(gathered, parts)


def test_a_bfloat16_sum_is_added_in_float32():
    parts = torch.tensor([[1.0], [2**-9], [2**-9]], dtype=torch.bfloat16)
    sums = on_every_rank(host_groups(3), lambda group: group.sum(parts[group.index].clone()))
    assert [float(total) for total in sums] == [float(parts.float().sum().bfloat16())] * 3


def test_many_exchanges_of_ranks_that_differ_in_speed():
    """Buffers are used again two rounds later, while a slow rank may still read the round before."""

    def exchange(group):
        totals = []
        for step in range(300):
            if (step * 7 + group.index) % 11 == 0:
                torch.randn(64, 64) @ torch.randn(64, 64)
            totals.append(float(group.sum(torch.full((100,), float(step * 3 + group.index)))[-1]))
            assert group.gather(torch.tensor(step)).tolist() == [step] * 3
        return totals

    expected = [float(9 * step + 3) for step in range(300)]
    assert on_every_rank(host_groups(3), exchange) == [expected] * 3


def test_an_error_of_a_rank_is_raised_on_ranks_that_wait_and_the_next_call_works():
    groups = host_groups(2)

    def call(group):
        group.begin_call([0, 0])
        if group.index == 1:
            group.fail()
            return
        with pytest.raises(RankFailedError, match="rank 1"):
            group.sum(torch.ones(4))
        return

    on_every_rank(groups, call)
    rounds = [group.record.round for group in groups]
    assert rounds[0] != rounds[1]
    for group in groups:
        group.begin_call(rounds)
    assert [total.tolist() for total in on_every_rank(groups, lambda group: group.sum(torch.ones(4)))] == [
        [2.0] * 4
    ] * 2


def test_a_rank_whose_process_has_ended_is_a_lost_rank():
    first, _ = host_groups(2)
    first.record.pids[1] = 2**22 + 1  # above the kernel's largest process id
    with pytest.raises(LostRankError, match="another rank has ended.*rank 1"):
        first.gather(torch.ones(2))
