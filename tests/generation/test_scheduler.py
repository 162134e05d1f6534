"""The scheduler over a decoder that reads every sequence back from its blocks, so that a wrong block gives a wrong
token. The oracle decodes each row alone, from a list of its tokens."""

import contextlib
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from hybrid.decoders.batch import BLOCK_SIZE, PackedBatch, PagedKV
from hybrid.generation.block_pool import BlockPool, blocks_for
from hybrid.generation.completions import Completions
from hybrid.generation.lockstep import FusedForward
from hybrid.generation.model_runner import forward_bytes
from hybrid.generation.request import Request
from hybrid.generation.scheduler import Scheduler
from hybrid.sampling.params import warpers_of
from hybrid.sampling.sampler import mixed, sample_tokens_in_torch, shifted, stream_keys
from tests.marks import slow_but
from tests.sampling_params import params_of

VOCABULARY, PAD = 23, 0
ENDS = (2, 7)


def digests(ids: torch.Tensor) -> torch.Tensor:
    """A hash of each prefix of a sequence, from its tokens and positions.  int64 [n] to int64 [n]"""
    return mixed(ids * 1_000_003 + torch.arange(len(ids)) * 7919 + 1).cumsum(0)


def logits_of(digest: torch.Tensor) -> torch.Tensor:
    """Logits between 0 and 4, as a function of the hash.  int64 [n] to float32 [n, vocab]"""
    return shifted(mixed(digest[:, None] * VOCABULARY + torch.arange(VOCABULARY)), 40).float() / 2**22


class PagedMock:
    """A decoder whose blocks hold token ids, and whose logits are a function of the stored sequence."""

    device = torch.device("cpu")
    vocabulary = group = None
    samples_in_kernel = samples_with_penalties = False
    mixed_adapters = ()
    prefill_tokens = context_block = 2048
    spec = SimpleNamespace(vocab_size=VOCABULARY, max_positions=None)

    def __init__(self):
        self.prefilled = 0  # tokens
        self.forwards: list[int] = []  # tokens of each prefill
        self.steps: list[int] = []  # rows of each decode step
        self.reserved = 0
        self.kv_sizes: list[int] = []  # blocks of each allocation

    def kv(self, num_blocks: int) -> PagedKV:
        self.kv_sizes.append(num_blocks)
        return PagedKV([torch.full((num_blocks, BLOCK_SIZE), 10**6)], [torch.full((num_blocks, BLOCK_SIZE), -1)])

    def reserve(self, tokens: int) -> None:
        self.reserved = tokens

    def activation_bytes(self, tokens: int) -> int:
        return 100 * tokens

    def loop_bytes(self, sequences: int, tokens: int) -> int:
        return 1000 * sequences

    def forward(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        self.prefilled += len(batch.ids)
        self.forwards.append(len(batch.ids))
        return self._read(batch, kv)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return logits_of(hidden[:, 0])

    def decode(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        self.steps.append(len(batch.ids))
        assert torch.equal(batch.cu_seqlens, torch.arange(len(batch.ids) + 1, dtype=torch.int32))
        return self.logits(self._read(batch, kv))

    def _read(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """Write every new token to its block, then read each sequence; int64 [tokens, 1]."""
        assert batch.ids.dtype == torch.int64
        assert {batch.positions.dtype, batch.cu_seqlens.dtype, batch.lengths.dtype, batch.block_tables.dtype} == {
            torch.int32
        }
        spans = list(
            zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), batch.block_tables.long(), strict=True)
        )
        for start, stop, table in spans:
            position = batch.positions[start:stop].long()
            assert (table[position // BLOCK_SIZE] != 0).all(), "block 0 is in use"
            kv.keys[0][table[position // BLOCK_SIZE], position % BLOCK_SIZE] = batch.ids[start:stop]
        digests_read = []
        for (start, stop, table), length in zip(spans, batch.lengths.tolist(), strict=True):
            position = torch.arange(length)
            assert length <= self.reserved
            assert torch.equal(batch.positions[start:stop].long(), position[length - (stop - start) :])
            digests_read.append(
                digests(kv.keys[0][table[position // BLOCK_SIZE], position % BLOCK_SIZE])[length - (stop - start) :]
            )
        return torch.cat(digests_read)[:, None]


class RecordingPool(BlockPool):
    """Records the most blocks in use at once."""

    max_used = 0

    def allocate(self, num_blocks: int) -> list[int]:
        blocks = super().allocate(num_blocks)
        self.max_used = max(self.max_used, self.num_used)
        return blocks


def request_of(prompts: list[torch.Tensor], seed: int = 0, **changes) -> Request:
    """A request for sampled completions of prompts, int64 [n] each."""
    width = max(map(len, prompts))
    padded = torch.stack([torch.cat([torch.full((width - len(ids),), PAD), ids]) for ids in prompts])
    settings = {
        "prompt_ids": padded,
        "groups": torch.arange(len(prompts)),
        "limits": torch.full((len(prompts),), changes.get("max_new_tokens", 40)),
        "prompt_lengths": [len(ids) for ids in prompts],
        "sampling_keys": stream_keys(seed, torch.arange(len(prompts)), torch.zeros(len(prompts), dtype=torch.long)),
        "max_new_tokens": 40,
        "stop_token_ids": torch.tensor(ENDS),
        "pad_token_id": PAD,
        "sampling_params": params_of(temperature=0.9, top_k=20),
        "processors": None,
    }
    return Request(**{**settings, **changes})


def prompts_of(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    """Random prompts of given lengths, without end tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(8, VOCABULARY, (length,), generator=generator) for length in lengths]


def run_scheduler(
    request: Request,
    max_num_seqs: int = 100,
    num_scheduler_steps: int = 1,
    limit: int | None = None,
    step: int = BLOCK_SIZE,
    caches_prefixes: bool = True,
    free_bytes: float = math.inf,
) -> tuple[Completions, PagedMock, RecordingPool]:
    """The completions, their decoder and block pool; limit: the most blocks in use."""
    decoder = PagedMock()
    limit_bytes = None if limit is None else (limit + 1) * 2 * BLOCK_SIZE * 8
    block_pool = RecordingPool(step, limit_bytes, free_bytes=lambda: free_bytes, caches_prefixes=caches_prefixes)
    block_pool.begin_call(decoder.kv)
    phase = lambda name: contextlib.nullcontext()  # noqa: E731
    done = Scheduler(request, decoder, block_pool, max_num_seqs, phase, num_scheduler_steps).run()
    assert block_pool.num_used == 0, "blocks are still in use after the last row"
    assert len(decoder.kv_sizes) == 2, "storage has grown: only the measuring block precedes the reservation"
    return done, decoder, block_pool


def expected(request: Request) -> Completions:
    """Every row alone: no blocks, no batch."""
    rows_of = [decode_alone(request, row) for row in range(len(request.prompt_ids))]
    tokens = torch.full((len(rows_of), request.max_new_tokens), request.pad_token_id)
    sampling, old, raw = torch.zeros(3, *tokens.shape)
    greedy = request.sampling_params.temperature == 0
    for row, made in enumerate(rows_of):
        for column, (token, logits, scores) in enumerate(made):
            tokens[row, column] = token
            drawn_from = scores if greedy else warpers_of(request.sampling_params)(None, scores)[0]
            sampling[row, column] = drawn_from.log_softmax(-1).flatten()[token]
            old[row, column] = (logits / (request.sampling_params.temperature or 1.0)).log_softmax(-1)[token]
            raw[row, column] = logits.log_softmax(-1)[token]
    return Completions(tokens, torch.tensor([len(made) for made in rows_of]), sampling, old, raw)


def decode_alone(request: Request, row: int) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """A row's tokens, the logits of each, float32 [vocab], and its scores after processors, [1, vocab]."""
    ids = request.prompt_ids[row].tolist()
    made: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    while len(made) < request.max_new_tokens and not (made and made[-1][0] in request.stop_token_ids.tolist()):
        real = torch.tensor(ids[len(request.prompt_ids[row]) - request.prompt_lengths[row] :])
        logits = logits_of(digests(real)[-1:])
        scores = logits.clone()
        if request.processors is not None:
            scores = request.processors(torch.tensor([ids]), scores, torch.tensor([row]))
        position = torch.tensor([len(made)])
        token = int(
            sample_tokens_in_torch(
                scores, request.sampling_keys[row : row + 1], position, request.sampling_params
            ).tokens
        )
        made.append((token, logits[0], scores))
        ids.append(token)
    return made


def require_same(actual: Completions, expected: Completions) -> None:
    assert torch.equal(actual.tokens, expected.tokens)
    assert torch.equal(actual.lengths, expected.lengths)
    # float32 logprobs, by the kernels and by torch
    torch.testing.assert_close(actual.sampling_logps, expected.sampling_logps, atol=2e-6, rtol=0)
    torch.testing.assert_close(actual.old_logps, expected.old_logps, atol=2e-6, rtol=0)
    torch.testing.assert_close(actual.raw_logps, expected.raw_logps, atol=2e-6, rtol=0)


# Prompts of one token, exactly a block, two blocks, more than a block, and five tokens.
# MIXTURE: groups of equal prompts, also separated.
BLOCK, TOKEN, TWO_BLOCKS, OVER_A_BLOCK, SHORT = prompts_of(1, BLOCK_SIZE, 2 * BLOCK_SIZE, BLOCK_SIZE + 9, 5)
MIXTURE = [
    BLOCK,
    OVER_A_BLOCK,
    OVER_A_BLOCK,
    OVER_A_BLOCK,
    TOKEN,
    TOKEN,
    TWO_BLOCKS,
    SHORT,
    OVER_A_BLOCK,
    TWO_BLOCKS,
    BLOCK,
]


@pytest.mark.parametrize("num_scheduler_steps", slow_but([1, 8], [1, 5, 8]))
@pytest.mark.parametrize("max_num_seqs", slow_but([2, 100], [1, 2, 3, 100]))
def test_completions_do_not_depend_on_max_num_seqs(max_num_seqs, num_scheduler_steps):
    request = request_of(MIXTURE)
    actual, decoder, _ = run_scheduler(request, max_num_seqs, num_scheduler_steps)
    require_same(actual, expected(request))
    assert max(decoder.steps) <= max_num_seqs
    lengths = set(actual.lengths.tolist())
    assert min(lengths) < 5 < max(lengths), "all lengths are equal: the test is vacuous"


@pytest.mark.parametrize("seed", range(12))
def test_random_requests_match_decoding_each_row_alone(seed):
    """Random prompts, groups, max_num_seqs, strides, budgets and lengths."""
    generator = torch.Generator().manual_seed(seed)
    number = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    distinct = prompts_of(*(number(1, 80) for _ in range(4)), seed=seed)
    prompts = [distinct[number(0, 4)] for _ in range(number(1, 14))]
    request = request_of(prompts, seed, max_new_tokens=number(1, 60), stop_token_ids=torch.tensor([2]))
    smallest = max(blocks_for(length + request.max_new_tokens) for length in request.prompt_lengths)
    limit = smallest + number(0, 12)
    actual, _, block_pool = run_scheduler(request, number(1, 9), number(1, 9), limit, step=number(1, 100))
    require_same(actual, expected(request))
    assert block_pool.max_used <= limit


def test_finished_rows_leave_the_batch_at_once():
    """A decode step computes only unfinished rows."""
    request = request_of(MIXTURE)
    actual, decoder, _ = run_scheduler(request)
    needed = [(actual.lengths > step).sum().item() for step in range(1, int(actual.lengths.max()))]
    assert decoder.steps == needed
    assert len(set(needed)) > 3


def test_waiting_rows_are_admitted_as_others_finish():
    request = request_of(MIXTURE)
    shortest = MinNewTokensLengthLogitsProcessor(request.prompt_ids.shape[1], 2, list(ENDS))
    request = replace(request, processors=lambda ids, scores, rows: shortest(ids, scores))
    actual, decoder, _ = run_scheduler(request, max_num_seqs=3)
    assert sum(decoder.steps) == (actual.lengths - 1).sum()
    assert decoder.steps == sorted(decoder.steps, reverse=True), (
        "fewer sequences than allowed are decoded while rows wait"
    )
    assert decoder.steps.count(3) > len(decoder.steps) // 2


@pytest.mark.parametrize("max_num_seqs", [1, 2, 100])
def test_equal_prompts_are_prefilled_once(max_num_seqs):
    _, decoder, _ = run_scheduler(request_of(MIXTURE), max_num_seqs, caches_prefixes=False)
    assert decoder.prefilled == sum(map(len, (BLOCK, TOKEN, TWO_BLOCKS, OVER_A_BLOCK, SHORT)))


@pytest.mark.parametrize("caches_prefixes", [True, False])
def test_a_common_block_of_prompts_is_prefilled_once(caches_prefixes):
    """Prompts differ by a first token, a last token, padding, or what follows their first block."""
    other = torch.cat([OVER_A_BLOCK[:BLOCK_SIZE], prompts_of(2 * BLOCK_SIZE, seed=9)[0]])
    longer = torch.cat([other, prompts_of(7, seed=10)[0]])
    padding = torch.cat([BLOCK * 0 + PAD, OVER_A_BLOCK])
    prompts = [OVER_A_BLOCK, other, OVER_A_BLOCK[1:], OVER_A_BLOCK[:-1], padding, longer]
    request = request_of(prompts)
    actual, decoder, _ = run_scheduler(request, caches_prefixes=caches_prefixes)
    require_same(actual, expected(request))
    shared = [BLOCK_SIZE, BLOCK_SIZE, 3 * BLOCK_SIZE] if caches_prefixes else []
    assert decoder.prefilled == sum(map(len, prompts)) - sum(shared)


@pytest.mark.parametrize("at_once", [7, 16, BLOCK_SIZE])
def test_prefill_is_split_into_chunks(monkeypatch, at_once):
    monkeypatch.setattr(PagedMock, "prefill_tokens", at_once)
    request = request_of(MIXTURE)
    actual, decoder, _ = run_scheduler(request)
    require_same(actual, expected(request))
    assert max(decoder.forwards) == at_once
    assert len(decoder.forwards) == -(-decoder.prefilled // at_once)


@pytest.mark.parametrize("max_num_seqs", [2, 100])
@pytest.mark.parametrize("num_scheduler_steps", slow_but([5], [1, 5]))
def test_the_kv_cache_limit_is_kept(max_num_seqs, num_scheduler_steps):
    """From one row's blocks upwards; all rows finish, and more blocks allow larger batches."""
    request = request_of(MIXTURE)
    expected_completions = expected(request)
    smallest = blocks_for(2 * BLOCK_SIZE + request.max_new_tokens)
    batch_sizes = []
    for limit in range(smallest, smallest + 25, 3):
        actual, decoder, block_pool = run_scheduler(request, max_num_seqs, num_scheduler_steps, limit)
        require_same(actual, expected_completions)
        assert block_pool.max_used <= limit
        assert block_pool.capacity <= limit + 1
        assert block_pool.nbytes() <= block_pool.limit_bytes
        batch_sizes.append(max(decoder.steps))
    assert batch_sizes == sorted(batch_sizes)
    assert batch_sizes[0] < batch_sizes[-1]


def test_rows_wait_where_free_memory_is_short():
    """Free memory holds 12 blocks and the forward passes; if rows did not wait, storage would grow beyond it."""
    request = request_of(MIXTURE)
    most, block_bytes = run_scheduler(request)[2].max_used, 2 * BLOCK_SIZE * 8
    forwards = forward_bytes(PagedMock(), len(MIXTURE), request.longest)
    actual, _, block_pool = run_scheduler(request, free_bytes=forwards + 12 * block_bytes)
    require_same(actual, expected(request))
    assert block_pool.max_used <= 9 < most and block_pool.peak_bytes == 10 * block_bytes


def test_steps_of_all_rows_leave_memory_for_forward_passes():
    """The prefix cache does not take the free memory that forward passes need."""
    decoder, block_bytes, lengths = PagedMock(), 2 * BLOCK_SIZE * 8, [40, 7]
    forwards = forward_bytes(decoder, len(lengths), 40 + 8)
    free = forwards + 12 * block_bytes
    pool = BlockPool(BLOCK_SIZE, free_bytes=lambda: free, extra_bytes=100 * block_bytes)
    pool.begin_call(decoder.kv)
    FusedForward(decoder, pool, lengths, max_new_tokens=8)
    assert sum(blocks_for(length + 8) for length in lengths) < pool.capacity <= 12


def test_shared_blocks_are_held_until_the_groups_last_row_finishes():
    """Two full blocks shared by three rows, then two, then one."""
    prompts = [TWO_BLOCKS, TWO_BLOCKS, TWO_BLOCKS, TOKEN, TOKEN, TOKEN]
    request = request_of(prompts, max_new_tokens=BLOCK_SIZE)
    actual, decoder, block_pool = run_scheduler(request, limit=2 + 3)  # TWO_BLOCKS' blocks and one more each
    require_same(actual, expected(request))
    assert block_pool.max_used == 5
    assert decoder.prefilled == len(TWO_BLOCKS) + len(TOKEN)


def test_a_group_without_room_to_share_its_prompt_is_prefilled_per_row():
    request = request_of([OVER_A_BLOCK] * 3, max_new_tokens=10)
    actual, decoder, block_pool = run_scheduler(request, limit=blocks_for(len(OVER_A_BLOCK) + 10))
    require_same(actual, expected(request))
    assert decoder.steps == [1] * len(decoder.steps)
    assert decoder.prefilled == len(OVER_A_BLOCK) + 2  # all but the last token is in the blocks of the row before
    assert block_pool.max_used == block_pool.limit


def test_rows_of_one_prompt_have_their_own_sampling_keys():
    keys = stream_keys(5, torch.zeros(6, dtype=torch.long), torch.tensor([0, 1, 2, 3, 1, 0]))
    actual, decoder, _ = run_scheduler(request_of([OVER_A_BLOCK] * 6, sampling_keys=keys), max_num_seqs=4)
    assert decoder.prefilled == len(OVER_A_BLOCK)
    assert torch.equal(actual.tokens[4], actual.tokens[1])
    assert torch.equal(actual.tokens[5], actual.tokens[0])
    assert len({str(row.tolist()) for row in actual.tokens}) == 4


def test_greedy_rows_of_one_prompt_are_equal():
    request = request_of([OVER_A_BLOCK, SHORT] * 3, sampling_params=params_of(temperature=0))
    actual, _, _ = run_scheduler(request, max_num_seqs=4, num_scheduler_steps=5)
    require_same(actual, expected(request))
    assert torch.equal(actual.tokens[::2], actual.tokens[:1].expand(3, -1))


@pytest.mark.parametrize("ends", [(), (2,), (2, 7, 11, 22), tuple(range(VOCABULARY))])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 33])
def test_rows_end_at_any_end_token_or_max_new_tokens(ends, max_new_tokens):
    """None, one, several, and every token: then the first token is the last."""
    request = request_of(MIXTURE, stop_token_ids=torch.tensor(ends, dtype=torch.long), max_new_tokens=max_new_tokens)
    for num_scheduler_steps in (1, 8):
        actual, decoder, _ = run_scheduler(request, max_num_seqs=4, num_scheduler_steps=num_scheduler_steps)
        require_same(actual, expected(request))
    if not ends:
        assert (actual.lengths == max_new_tokens).all()
    if len(ends) == VOCABULARY:
        assert (actual.lengths == 1).all()
        assert decoder.steps == []


def test_the_padding_token_may_be_an_end_token():
    request = request_of(MIXTURE, stop_token_ids=torch.tensor([PAD]), max_new_tokens=30)
    for num_scheduler_steps in (1, 5):
        require_same(run_scheduler(request, 3, num_scheduler_steps)[0], expected(request))


class RecordingProcessors:
    """Hugging Face's processors, recording the ids that they get."""

    def __init__(self, padded: torch.Tensor):
        self.padded = padded
        self.seen_ids: list[torch.Tensor] = []
        self.processors = LogitsProcessorList(
            [
                RepetitionPenaltyLogitsProcessor(1.4),
                NoRepeatNGramLogitsProcessor(2),
                MinNewTokensLengthLogitsProcessor(padded.shape[1], 6, list(ENDS)),
                TemperatureLogitsWarper(1.5),
            ]
        )

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        assert len(ids) == len(scores) == len(rows)
        assert torch.equal(ids[:, : self.padded.shape[1]], self.padded[rows]), "ids do not match `rows`"
        self.seen_ids.append(ids.clone())
        return self.processors(ids, scores)


@pytest.mark.parametrize("max_num_seqs", [2, 3, 100])
def test_processors_get_rows_of_one_length_as_in_hugging_face(max_num_seqs):
    request = request_of(MIXTURE)
    request = replace(request, processors=RecordingProcessors(request.prompt_ids))
    expected_completions = expected(request)
    expected_ids = {str(ids.tolist()) for shown in request.processors.seen_ids for ids in shown}
    for num_scheduler_steps in (1, 5):
        request.processors.seen_ids.clear()
        actual, _, _ = run_scheduler(request, max_num_seqs, num_scheduler_steps)
        require_same(actual, expected_completions)
        actual_ids = {str(ids.tolist()) for shown in request.processors.seen_ids for ids in shown}
        assert actual_ids >= expected_ids
        assert actual_ids == expected_ids or num_scheduler_steps > 1, "a processor got ids that no row has"
    assert actual.lengths.min() >= 7


def test_processors_that_write_in_place_do_not_change_raw_logprobs():
    def in_place(ids: torch.Tensor, scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        scores[:, 3:] = -torch.inf
        return scores

    request = request_of([OVER_A_BLOCK, SHORT], processors=in_place, max_new_tokens=5)
    actual, _, _ = run_scheduler(request)
    require_same(actual, expected(request))
    assert (actual.tokens < 3).all()
