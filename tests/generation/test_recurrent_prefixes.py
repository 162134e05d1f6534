"""Which prefixes of prompts have their recurrent states kept."""

import torch

from hybrid.decoders.batch import BLOCK_SIZE, NO_ADAPTER, KVWeights
from hybrid.generation.block_pool import BlockPool
from hybrid.generation.recurrent_prefixes import shared_prefixes
from tests.generation.test_block_pool import Maker, kept_sequence, states_of

A, B, C, D = (torch.full((BLOCK_SIZE,), value) for value in range(4))
END = torch.tensor([9, 9])


def pool(num_slots: int) -> BlockPool:
    block_pool = BlockPool(BLOCK_SIZE)
    block_pool.begin_call(Maker(), KVWeights(1, 0), make_states=states_of)
    block_pool.reserve_states(num_slots)
    block_pool.reserve_call(20)
    return block_pool


def found(block_pool: BlockPool, prompts: list[torch.Tensor], adapters: list[int] | None = None) -> list[list[tuple]]:
    """Adapters and blocks of each prefix, by the value of their tokens."""
    lists = shared_prefixes(block_pool, prompts, adapters or [NO_ADAPTER] * len(prompts))
    return [
        [(adapter, ids.view(-1, BLOCK_SIZE)[:, 0].tolist()) for adapter, ids in prefixes if len(ids) % BLOCK_SIZE == 0]
        for prefixes in lists
    ]


def prompt(*blocks: torch.Tensor, end: int = 0) -> torch.Tensor:
    return torch.cat([*blocks, END + end])


def test_what_two_prompts_begin_with_is_found_the_shorter_first():
    prompts = [prompt(A, B, C), prompt(A, B, D), prompt(A, D), prompt(C), prompt(D, C)]
    assert found(pool(20), prompts) == [[(NO_ADAPTER, [0])], [(NO_ADAPTER, [0, 1])]]
    assert found(pool(20), [prompt(A), prompt(A, end=1), prompt(B), prompt(B, C)]) == [
        [(NO_ADAPTER, [0]), (NO_ADAPTER, [1])]
    ]


def test_less_than_a_block_and_the_whole_prompt_are_not_found():
    assert found(pool(20), [torch.cat([A[:-1], END]), torch.cat([A[:-1], END + 1])]) == []
    assert found(pool(20), [A, torch.cat([A, B])]) == [], "the last token of a prompt is computed, for its logits"


def test_prompts_of_different_adapters_share_nothing():
    prompts = [prompt(A, B), prompt(A, C), prompt(A, D)]
    assert found(pool(20), prompts, [0, 1, 1]) == [[(1, [0])]]


def test_slots_that_prompts_need_are_not_used():
    prompts = [prompt(A, B), prompt(A, C), prompt(D, end=1), prompt(D, end=2), prompt(D, end=3)]
    assert found(pool(5), prompts) == []
    assert found(pool(6), prompts) == [[(NO_ADAPTER, [3])]], "it spares two blocks, the other one"
    assert found(pool(7), prompts) == [[(NO_ADAPTER, [0]), (NO_ADAPTER, [3])]]


def test_prompts_that_continue_from_kept_states_are_not_counted():
    block_pool = pool(6)
    kept_sequence(block_pool, torch.cat([A, B]), 1.0)
    prompts = [prompt(A, B), prompt(A, C)]
    assert found(block_pool, prompts) == [[(NO_ADAPTER, [0])]], "a cached sequence begins with it"
    assert found(block_pool, [prompts[0], prompt(C)]) == []
    kept_sequence(block_pool, A, 1.0, is_shared=True)
    assert found(block_pool, prompts) == []


def test_kept_states_are_forgotten_for_what_two_prompts_begin_with_alone():
    block_pool = pool(3)
    kept_sequence(block_pool, torch.cat([A, B]), 1.0)
    assert found(block_pool, [prompt(A, C)]) == [[(NO_ADAPTER, [0])]]
    kept_sequence(block_pool, torch.cat([D, B]), 1.0)
    kept_sequence(block_pool, torch.cat([D, C]), 1.0)
    assert found(block_pool, [prompt(A, C)]) == []
    assert found(block_pool, [prompt(A, C), prompt(A, D)]) == [[(NO_ADAPTER, [0])]]


def test_the_next_turn_of_a_sequence_shares_nothing_with_it():
    """Though its states are forgotten: only a sequence that parts from it shows that others may come."""
    block_pool = pool(6)
    kept_sequence(block_pool, torch.cat([A, B, C[:5]]), 1.0)
    block_pool.allocate_states(6)
    assert not block_pool.kept_states
    block_pool.free_states(list(range(6)))
    assert found(block_pool, [torch.cat([A, B, C[:5], END])]) == []
    assert found(block_pool, [torch.cat([A, B, C[:4], END])]) == [[(NO_ADAPTER, [0, 1])]]


def test_nothing_is_found_without_prefix_caching():
    block_pool = BlockPool(BLOCK_SIZE, caches_prefixes=False)
    block_pool.begin_call(Maker(), make_states=states_of)
    block_pool.reserve_states(9)
    assert found(block_pool, [prompt(A, B), prompt(A, C)]) == []
