"""Token-balanced micro batches give the numbers of whole batches."""

import itertools
import math

import deepspeed
import pytest
import torch
import torch.distributed as dist

from rlhf_examples.common.batches import balanced_batches, grouped_batches
from rlhf_examples.common.losses import language_model_loss
from rlhf_examples.common.policy_losses import loss_denominator
from tests.engines import engine_of, settings
from tests.marks import slow_but
from tests.tiny_models import prompts, tiny_model, twin
from tests.training.test_logps import plain_logps


def test_balanced_batches_match_an_example():
    """9 | 5, 4 | then 3 to the batch with fewer rows, then 2 and 1 to the one with fewer tokens."""
    assert balanced_batches([3, 9, 5, 4, 1, 2], 2) == [[0, 1], [2, 3, 4, 5]]
    assert balanced_batches(torch.tensor([5, 0, 0]), 3) == [[0], [1], [2]], "a batch has no rows"
    with pytest.raises(ValueError, match="num_batches: 3 given for 2 rows; every batch needs a row"):
        balanced_batches([4, 4], 3)


@pytest.mark.parametrize("seed", range(12))
def test_balanced_batches_are_within_grahams_bound(seed):
    """Longest first is within 4/3 - 1/(3m) of the optimum (Graham 1969), found by trying all assignments."""
    generator = torch.Generator().manual_seed(seed)
    rows, number = 4 + seed % 5, 2 + seed % 2
    lengths = torch.randint(1, 100, (rows,), generator=generator).tolist()
    batches = balanced_batches(lengths, number)
    assert sorted(row for batch in batches for row in batch) == list(range(rows))
    assert len(batches) == number and all(batches)
    best = math.inf
    for places in itertools.product(range(number), repeat=rows):
        best = min(best, max(sum(lengths[row] for row in range(rows) if places[row] == b) for b in range(number)))
    assert max(sum(lengths[row] for row in batch) for batch in batches) <= (4 / 3 - 1 / (3 * number)) * best
    assert balanced_batches(lengths, number) == batches


def batch_cost(rows, groups, prompt_lengths, completions) -> int:
    """Tokens of a batch, each group's prompt once."""
    shared = {groups[row]: prompt_lengths[row] for row in rows}
    return sum(shared.values()) + sum(completions[row] for row in rows)


def test_grouped_batches_match_an_example():
    """A group stays whole where that costs nothing; a large one is divided, and each part pays its prompt."""
    groups, ones = [7, 5, 7, 5], [1] * 4
    assert grouped_batches(groups, [0] * 4, ones, 2) == [[0, 2], [1, 3]]
    assert grouped_batches([1] * 4, [10] * 4, [5, 5, 5, 5], 2) == [[0, 1], [2, 3]]
    assert grouped_batches([1, 2, 2], [100, 1, 1], [1, 1, 1], 2) == [[0], [1, 2]]
    assert grouped_batches([3, 4], ones, ones, 5) == [[0], [1]], "a batch has no rows"


@pytest.mark.parametrize("seed", range(8))
def test_grouped_batches_are_the_cheapest_consecutive_parts(seed):
    """Against all ways to cut the rows, ordered by group, into consecutive parts."""
    generator = torch.Generator().manual_seed(seed)
    rows, number = 6 + seed % 3, 2 + seed % 3
    groups = torch.randint(3, (rows,), generator=generator).tolist()
    of_group, completions = ([*torch.randint(1, 40, (n,), generator=generator).tolist()] for n in (3, rows))
    costs = groups, [of_group[group] for group in groups], completions
    batches = grouped_batches(*costs, number)
    assert sorted(row for batch in batches for row in batch) == list(range(rows))
    assert len(batches) <= number and all(batches)
    order = sorted(range(rows), key=lambda row: (groups.index(groups[row]), row))
    best = math.inf
    for cuts in itertools.combinations(range(1, rows), number - 1):
        parts = [order[first:last] for first, last in itertools.pairwise((0, *cuts, rows))]
        best = min(best, max(batch_cost(part, *costs) for part in parts))
    assert max(batch_cost(batch, *costs) for batch in batches) == best


def check_varying_steps(stage: int) -> None:
    """Steps with a varying number of backwards, as `max_tokens_per_batch` makes them, equal SGD on the whole batch."""
    model = tiny_model("llama")
    plain = twin(model)
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
    }
    engine = engine_of(model, settings(stage, **config))
    engine.train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step, number_of_batches in enumerate((3, 1, 4)):
        ranks_rows = [prompts(4, 9 + 2 * rank, padded=True, seed=step) for rank in range(2)]
        tokens = sum(int(mask.sum()) - len(mask) for _, mask in ranks_rows)  # a row's first token has no logprob
        ids, mask = ranks_rows[dist.get_rank()]
        batches = balanced_batches(mask.sum(dim=1), number_of_batches)
        counts = {"sequences": 8, "tokens": tokens, "max_completion_length": 0}
        denominator = loss_denominator("dapo", **counts, micro_batches=dist.get_world_size())
        for number, rows in enumerate(batches):
            engine.set_gradient_accumulation_boundary(number == len(batches) - 1)
            logps = engine.logps(ids[rows], mask[rows]).per_token_logps
            engine.backward(language_model_loss(logps, mask[rows][:, 1:], denominator).loss)
            engine.step()
        optimizer.zero_grad()
        for ids, mask in ranks_rows:
            logps, _ = plain_logps(plain, ids, mask, ids.shape[1], 1.0)
            (-logps.sum() / tokens).backward()
        optimizer.step()
    assert engine.global_steps == 3
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter] if stage == 3 else []):
            torch.testing.assert_close(parameter.data, plain.get_parameter(name).data, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("stage", slow_but([3], [0, 2, 3]))
def test_steps_of_varying_numbers_of_backwards_match_sgd_on_the_whole_batch(ranks, stage):
    ranks.run(check_varying_steps, stage)
