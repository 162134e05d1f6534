"""Which prefixes of prompts have their recurrent states kept, and that rows which begin from kept states have the bits
of rows that do not."""

import contextlib
import random
from dataclasses import replace

import pytest
import torch

from hybrid.decoders.batch import BLOCK_SIZE, NO_ADAPTER, KVWeights, state_bytes
from hybrid.decoders.cpu_decoder import CpuDecoder
from hybrid.generation.block_pool import BlockPool
from hybrid.generation.recurrent_prefixes import shared_prefixes
from hybrid.generation.scheduler import Scheduler
from hybrid.generation.scoring import score_packed
from hybrid.sampling.sampler import stream_keys
from tests.decoders.test_cpu_decoder import decoder_of as cpu_decoder_of
from tests.decoders.test_torch_decoder import decoder_of as torch_decoder_of
from tests.generation.test_block_pool import Maker, kept_sequence, states_of
from tests.generation.test_scheduler import request_of
from tests.generation.test_shared_prefixes import padded
from tests.marks import slow_but
from tests.tiny_models import tiny_model

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
    assert all(len(ids) and len(ids) % BLOCK_SIZE == 0 for prefixes in lists for _, ids in prefixes)
    return [[(adapter, ids.view(-1, BLOCK_SIZE)[:, 0].tolist()) for adapter, ids in prefixes] for prefixes in lists]


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


def test_at_most_one_kept_state_is_forgotten_for_prefixes_of_one_prompt():
    block_pool = pool(3)
    kept_sequence(block_pool, torch.cat([A, B]), 1.0)
    assert found(block_pool, [prompt(A, C)]) == [[(NO_ADAPTER, [0])]]
    kept_sequence(block_pool, torch.cat([D, B]), 1.0)
    kept_sequence(block_pool, torch.cat([D, C]), 1.0)
    assert not block_pool.free_slots
    assert found(block_pool, [prompt(A, C), prompt(D, A)]) == [[(NO_ADAPTER, [0])]]
    assert found(block_pool, [prompt(A, C), prompt(A, D)]) == [[(NO_ADAPTER, [0])]]
    block_pool.allocate_states(2)
    assert found(block_pool, [prompt(A, C)]) == [], "the prompt needs the last slot"


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


class Conversations:
    """Prompts that continue, repeat and part from sequences of earlier calls, over few tokens."""

    def __init__(self, seed: int):
        self.chosen, self.sequences = random.Random(seed), [torch.tensor([5])]

    def prompt(self) -> torch.Tensor:
        """A new prompt: an earlier sequence, whole or cut, and some tokens."""
        earlier = self.chosen.choice(self.sequences)
        cut = self.chosen.choice([len(earlier), self.chosen.randint(0, len(earlier))])
        cut = min(cut, 5 * BLOCK_SIZE)
        more = self.chosen.choice([1, 3, BLOCK_SIZE, self.chosen.randint(1, 70)])
        return torch.cat([earlier[:cut], torch.tensor(self.chosen.choices(range(6, 40), k=more))])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "family", slow_but(["qwen3_5_text", "mamba2"], ["qwen3_5_text", "nemotron_h", "lfm2", "mamba2"])
)
@pytest.mark.parametrize("decoder_of", [cpu_decoder_of, torch_decoder_of])
@torch.no_grad()
def test_calls_in_any_order_have_the_bits_of_calls_without_a_prefix_cache(decoder_of, family, seed):
    """Groups, few slots, little room for blocks, scores between rollouts, other weights. Steps of the decoder in torch
    continue past rows' ends, which changes their states; its logits have other bits in other batches."""
    decoder = decoder_of(tiny_model(family).eval())
    exact = isinstance(decoder, CpuDecoder)
    texts, chosen, version = Conversations(seed), random.Random(seed), 0
    block_bytes, slot_bytes = decoder.kv(1).nbytes, state_bytes(decoder.states(1))
    room = chosen.choice([None, 40 * block_bytes + 30 * slot_bytes])
    extra_bytes = chosen.choice([0, 20 * (block_bytes + slot_bytes), 2 * (room or 0)])
    caching = BlockPool(BLOCK_SIZE, room, extra_bytes=extra_bytes)
    reused = 0
    for _ in range(14 if exact else 6):
        version += chosen.random() < 0.15
        prompts = [texts.prompt() for _ in range(chosen.randint(1, 7))]
        rows = [index for index in range(len(prompts)) for _ in range(chosen.choice([1, 1, 3]))]
        new_tokens = chosen.choice([1, 9, 40])
        request = request_of(
            [prompts[index] for index in rows],
            groups=torch.tensor(rows),
            max_new_tokens=new_tokens,
            sampling_keys=stream_keys(seed, torch.arange(len(rows)), torch.zeros(len(rows), dtype=torch.long)),
        )
        request = replace(request, limits=torch.tensor([chosen.randint(1, new_tokens) for _ in rows]))
        max_num_seqs, results = chosen.choice([2, 5, 32]), []
        for block_pool in (caching, BlockPool(BLOCK_SIZE, room, caches_prefixes=False)):
            block_pool.begin_call(decoder.kv, KVWeights(version, 0), decoder.states)
            max_num_seqs = block_pool.num_seqs_within_limit(request.longest, max_num_seqs)
            phase = lambda name: contextlib.nullcontext()  # noqa: E731
            results.append(Scheduler(request, decoder, block_pool, max_num_seqs, phase, 4).run())
            slots = [*block_pool.free_slots, *(kept.slot for kept in block_pool.kept_states.values())]
            assert sorted(slots) == list(range(block_pool.num_slots))
            assert not block_pool.num_used and (room is None or block_pool.nbytes() <= room)
            found, computed = block_pool.reused_tokens, block_pool.prefilled_tokens
            assert min(found, computed) >= 0 and found + computed >= sum(map(len, prompts))
            assert found + computed == sum(map(len, prompts)) or max_num_seqs < 32
            reused += found
            block_pool.end_call()
        with_cache, without = results
        assert torch.equal(with_cache.tokens, without.tokens) and torch.equal(with_cache.lengths, without.lengths)
        for name in ("raw_logps", "sampling_logps"):
            torch.testing.assert_close(
                getattr(with_cache, name), getattr(without, name), rtol=0, atol=0 if exact else 1e-4
            )
        new = [
            torch.cat([prompts[index], ids[:count]])
            for index, ids, count in zip(rows, with_cache.tokens, with_cache.lengths.tolist(), strict=True)
        ]
        texts.sequences += new
        if chosen.random() < 0.3:
            scores, rows_at_once = [], chosen.choice([1, 4, 64])
            for block_pool in (caching, BlockPool(BLOCK_SIZE, room, caches_prefixes=False)):
                block_pool.begin_call(decoder.kv, KVWeights(version, 0), decoder.states)
                scores.append(score_packed(decoder, block_pool, *padded(new), 1.0, rows_at_once).per_token_logps)
                assert not block_pool.num_used and (room is None or block_pool.nbytes() <= room)
                block_pool.end_call()
            torch.testing.assert_close(*scores, rtol=0, atol=0 if exact else 1e-4)
    assert reused > 0 or room is not None or not exact


@torch.no_grad()
def test_scores_between_two_turns_leave_most_states_of_the_first(monkeypatch):
    """More rows than fill a forward would take their slots."""
    monkeypatch.setattr(CpuDecoder, "prefill_tokens", 128)
    decoder = cpu_decoder_of(tiny_model("qwen3_5_text").eval())
    prompts = [torch.randint(6, 40, (40,), generator=torch.Generator().manual_seed(n)) for n in range(24)]
    block_pool, computed = BlockPool(BLOCK_SIZE), []
    phase = lambda name: contextlib.nullcontext()  # noqa: E731
    for _ in range(2):
        block_pool.begin_call(decoder.kv, KVWeights(1, 0), decoder.states)
        request = request_of(prompts, max_new_tokens=4, stop_token_ids=torch.tensor([-1]))
        done = Scheduler(request, decoder, block_pool, 32, phase, 4).run()
        computed.append(block_pool.prefilled_tokens)
        rows = [torch.cat([ids, more]) for ids, more in zip(prompts, done.tokens, strict=True)]
        block_pool.begin_call(decoder.kv, KVWeights(1, 0), decoder.states)
        score_packed(decoder, block_pool, *padded(rows), 1.0, 24)
        prompts = [torch.cat([ids, torch.tensor([7])]) for ids in rows]
    first, second = computed
    assert first == 24 * 40 and second <= 24 * 2 + 6 * 45, "at most six rows are computed whole"
