"""Slots and their queue, over a decoder that reads every sequence back from its blocks: a wrong block shows as a wrong
token. The oracle decodes each row alone, from a list of its tokens."""

import contextlib
from dataclasses import replace

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
from hybrid.generation import model_runner as rows
from hybrid.generation.block_pool import BlockPool, blocks_for
from hybrid.generation.sampling import Draw, draw_tokens_in_torch, mixed, shifted, stream_keys
from hybrid.generation.scheduler import Completions, Request, complete

VOCABULARY, PAD = 23, 0
ENDS = (2, 7)


def digests(ids: torch.Tensor) -> torch.Tensor:
    """A number for each prefix of a sequence, of its tokens and their places.  int64 [n] to int64 [n]"""
    return mixed(ids * 1_000_003 + torch.arange(len(ids)) * 7919 + 1).cumsum(0)


def logits_of(digest: torch.Tensor) -> torch.Tensor:
    """Logits between 0 and 4 that are a function of what was read.  int64 [n] to float32 [n, vocab]"""
    return shifted(mixed(digest[:, None] * VOCABULARY + torch.arange(VOCABULARY)), 40).float() / 2**22


class PagedMock:
    """A decoder whose blocks hold token ids, and whose logits are a function of the sequence that they hold."""

    device = torch.device("cpu")

    def __init__(self):
        self.prefilled = 0  # tokens
        self.forwards: list[int] = []  # tokens of each prefill
        self.steps: list[int] = []  # rows of each decode step
        self.reserved = 0
        self.made: list[int] = []  # blocks, each time that some were asked for

    def kv(self, num_blocks: int) -> PagedKV:
        self.made.append(num_blocks)
        return PagedKV([torch.full((num_blocks, BLOCK_SIZE), 10**6)], [torch.full((num_blocks, BLOCK_SIZE), -1)])

    def reserve(self, tokens: int) -> None:
        self.reserved = tokens

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
            assert (table[position // BLOCK_SIZE] != 0).all(), "block 0 belongs to nobody"
            kv.keys[0][table[position // BLOCK_SIZE], position % BLOCK_SIZE] = batch.ids[start:stop]
        found = []
        for (start, stop, table), length in zip(spans, batch.lengths.tolist(), strict=True):
            position = torch.arange(length)
            assert length <= self.reserved
            assert torch.equal(batch.positions[start:stop].long(), position[length - (stop - start) :])
            found.append(
                digests(kv.keys[0][table[position // BLOCK_SIZE], position % BLOCK_SIZE])[length - (stop - start) :]
            )
        return torch.cat(found)[:, None]


class WatchedPool(BlockPool):
    """Notes the most blocks that were held at once."""

    most = 0

    def allocate(self, num_blocks: int) -> list[int]:
        blocks = super().allocate(num_blocks)
        self.most = max(self.most, self.num_used)
        return blocks


def request_of(prompts: list[torch.Tensor], seed: int = 0, **changes) -> Request:
    """A request for sampled completions of prompts, int64 [n] each."""
    width = max(map(len, prompts))
    padded = torch.stack([torch.cat([torch.full((width - len(ids),), PAD), ids]) for ids in prompts])
    settings = {
        "padded": padded,
        "lengths": [len(ids) for ids in prompts],
        "keys": stream_keys(seed, torch.arange(len(prompts)), torch.zeros(len(prompts), dtype=torch.long)),
        "max_new_tokens": 40,
        "ends": torch.tensor(ENDS),
        "pad": PAD,
        "draw": Draw(temperature=0.9, top_k=20),
        "processors": None,
        "logprob_temperature": 0.9,
    }
    return Request(**{**settings, **changes})


def prompts_of(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    """Random prompts of given lengths, without end tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(8, VOCABULARY, (length,), generator=generator) for length in lengths]


def run(
    request: Request, max_num_seqs: int = 100, stride: int = 1, limit: int | None = None, step: int = BLOCK_SIZE
) -> tuple[Completions, PagedMock, WatchedPool]:
    """The completions, and who made them; limit: blocks that may be held."""
    decoder = PagedMock()
    block_pool = WatchedPool(step, None if limit is None else (limit + 1) * 2 * BLOCK_SIZE * 8)
    block_pool.begin_call(decoder.kv)
    done = complete(request, decoder, block_pool, max_num_seqs, stride, lambda name: contextlib.nullcontext())
    assert block_pool.num_used == 0, "blocks are still held when everything is done"
    assert len(decoder.made) == 2, "storage has grown: only the block that tells its kind comes before what is reserved"
    return done, decoder, block_pool


def expected(request: Request) -> Completions:
    """Every row alone: no blocks, no batch."""
    rows_of = [alone(request, row) for row in range(len(request.padded))]
    tokens = torch.full((len(rows_of), request.max_new_tokens), request.pad)
    sampling, old, raw = torch.zeros(3, *tokens.shape)
    greedy = request.draw.temperature == 0
    for row, made in enumerate(rows_of):
        for column, (token, logits, scores) in enumerate(made):
            tokens[row, column] = token
            drawn_from = scores if greedy else request.draw.warpers()(None, scores)[0]
            sampling[row, column] = drawn_from.log_softmax(-1).flatten()[token]
            old[row, column] = (logits / request.logprob_temperature).log_softmax(-1)[token]
            raw[row, column] = logits.log_softmax(-1)[token]
    return Completions(tokens, torch.tensor([len(made) for made in rows_of]), sampling, old, raw)


def alone(request: Request, row: int) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """A row's tokens, the logits of each, float32 [vocab], and its scores after processors, [1, vocab]."""
    ids = request.padded[row].tolist()
    made: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    while len(made) < request.max_new_tokens and not (made and made[-1][0] in request.ends.tolist()):
        real = torch.tensor(ids[len(request.padded[row]) - request.lengths[row] :])
        logits = logits_of(digests(real)[-1:])
        scores = logits.clone()
        if request.processors is not None:
            scores = request.processors(torch.tensor([ids]), scores, torch.tensor([row]))
        position = torch.tensor([len(made)])
        token = int(draw_tokens_in_torch(scores, request.keys[row : row + 1], position, request.draw).tokens)
        made.append((token, logits[0], scores))
        ids.append(token)
    return made


def require_same(found: Completions, wanted: Completions) -> None:
    assert torch.equal(found.tokens, wanted.tokens)
    assert torch.equal(found.lengths, wanted.lengths)
    # float32 logprobs, by the kernels and by torch
    torch.testing.assert_close(found.sampling_logps, wanted.sampling_logps, atol=2e-6, rtol=0)
    torch.testing.assert_close(found.old_logps, wanted.old_logps, atol=2e-6, rtol=0)
    torch.testing.assert_close(found.raw_logps, wanted.raw_logps, atol=2e-6, rtol=0)


# A block exactly, a token, two blocks, over a block; groups of equal prompts, also apart from each other.
ONE, OTHER, TWO, LONG, WHOLE = prompts_of(1, BLOCK_SIZE, 2 * BLOCK_SIZE, BLOCK_SIZE + 9, 5)
MIXTURE = [ONE, LONG, LONG, LONG, OTHER, OTHER, TWO, WHOLE, LONG, TWO, ONE]


@pytest.mark.parametrize("stride", [1, 5, 8])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 100])
def test_completions_do_not_depend_on_max_num_seqs(max_num_seqs, stride):
    request = request_of(MIXTURE)
    found, decoder, _ = run(request, max_num_seqs, stride)
    require_same(found, expected(request))
    assert max(decoder.steps) <= max_num_seqs
    lengths = set(found.lengths.tolist())
    assert min(lengths) < 5 < max(lengths), "lengths do not differ, and nothing was tested"


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture(seed):
    """Random prompts, groups, max_num_seqs, strides, budgets and lengths."""
    generator = torch.Generator().manual_seed(seed)
    number = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    distinct = prompts_of(*(number(1, 80) for _ in range(4)), seed=seed)
    prompts = [distinct[number(0, 4)] for _ in range(number(1, 14))]
    request = request_of(prompts, seed, max_new_tokens=number(1, 60), ends=torch.tensor([2]))
    smallest = max(blocks_for(length + request.max_new_tokens) for length in request.lengths)
    limit = smallest + number(0, 12)
    found, _, block_pool = run(request, number(1, 9), number(1, 9), limit, step=number(1, 100))
    require_same(found, expected(request))
    assert block_pool.most <= limit


def test_rows_leave_at_once():
    """A step computes just the rows that need its token."""
    request = request_of(MIXTURE)
    found, decoder, _ = run(request)
    needed = [(found.lengths > step).sum().item() for step in range(1, int(found.lengths.max()))]
    assert decoder.steps == needed
    assert len(set(needed)) > 3


def test_free_slots_are_taken_by_those_that_wait():
    request = request_of(MIXTURE)
    shortest = MinNewTokensLengthLogitsProcessor(request.padded.shape[1], 2, list(ENDS))
    request = replace(request, processors=lambda ids, scores, rows: shortest(ids, scores))
    found, decoder, _ = run(request, max_num_seqs=3)
    assert sum(decoder.steps) == (found.lengths - 1).sum()
    assert decoder.steps == sorted(decoder.steps, reverse=True), "a sequence less is decoded while rows wait"
    assert decoder.steps.count(3) > len(decoder.steps) // 2


@pytest.mark.parametrize("max_num_seqs", [1, 2, 100])
def test_equal_prompts_are_prefilled_once(max_num_seqs):
    _, decoder, _ = run(request_of(MIXTURE), max_num_seqs)
    assert decoder.prefilled == sum(map(len, (ONE, OTHER, TWO, LONG, WHOLE)))


def test_a_prompt_that_begins_like_another_is_another():
    """Padding is not part of it, and what is behind it neither."""
    prompts = [LONG, LONG[1:], LONG[:-1], torch.cat([ONE * 0 + PAD, LONG])]
    request = request_of(prompts)
    found, decoder, _ = run(request)
    require_same(found, expected(request))
    assert decoder.prefilled == sum(map(len, prompts))


@pytest.mark.parametrize("at_once", [7, 16, BLOCK_SIZE])
def test_prompts_longer_than_a_forward_are_split(monkeypatch, at_once):
    monkeypatch.setattr(rows, "PREFILL_TOKENS", at_once)
    request = request_of(MIXTURE)
    found, decoder, _ = run(request)
    require_same(found, expected(request))
    assert max(decoder.forwards) == at_once
    assert len(decoder.forwards) == -(-decoder.prefilled // at_once)


@pytest.mark.parametrize("max_num_seqs", [2, 100])
@pytest.mark.parametrize("stride", [1, 5])
def test_the_budget_is_kept(max_num_seqs, stride):
    """From a single row's blocks on; every row is done, and more blocks let more rows run together."""
    request = request_of(MIXTURE)
    wanted = expected(request)
    smallest = blocks_for(2 * BLOCK_SIZE + request.max_new_tokens)
    together = []
    for limit in range(smallest, smallest + 25, 3):
        found, decoder, block_pool = run(request, max_num_seqs, stride, limit)
        require_same(found, wanted)
        assert block_pool.most <= limit
        assert block_pool.capacity <= limit + 1
        assert block_pool.nbytes() <= block_pool.limit_bytes
        together.append(max(decoder.steps))
    assert together == sorted(together)
    assert together[0] < together[-1]


def test_what_a_group_shares_counts_until_its_last_row_has_left():
    """Two whole blocks that three rows share, then two, then one."""
    prompts = [TWO, TWO, TWO, OTHER, OTHER, OTHER]
    request = request_of(prompts, max_new_tokens=BLOCK_SIZE)
    found, decoder, block_pool = run(request, limit=2 + 3)  # TWO's blocks and one more each
    require_same(found, expected(request))
    assert block_pool.most == 5
    assert decoder.prefilled == len(TWO) + len(OTHER)


def test_a_group_whose_prompt_leaves_no_room_beside_a_row_is_prefilled_for_each():
    request = request_of([LONG] * 3, max_new_tokens=10)
    found, decoder, block_pool = run(request, limit=blocks_for(len(LONG) + 10))
    require_same(found, expected(request))
    assert decoder.steps == [1] * len(decoder.steps)
    assert decoder.prefilled == 3 * len(LONG)
    assert block_pool.most == block_pool.limit


def test_rows_of_one_prompt_draw_by_their_own_noise():
    keys = stream_keys(5, torch.zeros(6, dtype=torch.long), torch.tensor([0, 1, 2, 3, 1, 0]))
    found, decoder, _ = run(request_of([LONG] * 6, keys=keys), max_num_seqs=4)
    assert decoder.prefilled == len(LONG)
    assert torch.equal(found.tokens[4], found.tokens[1])
    assert torch.equal(found.tokens[5], found.tokens[0])
    assert len({str(row.tolist()) for row in found.tokens}) == 4


def test_greedy_rows_of_one_prompt_are_alike():
    request = request_of([LONG, WHOLE] * 3, draw=Draw(temperature=0), logprob_temperature=1.0)
    found, _, _ = run(request, max_num_seqs=4, stride=5)
    require_same(found, expected(request))
    assert torch.equal(found.tokens[::2], found.tokens[:1].expand(3, -1))


@pytest.mark.parametrize("ends", [(), (2,), (2, 7, 11, 22), tuple(range(VOCABULARY))])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 33])
def test_ends(ends, max_new_tokens):
    """None, one, several, and every token: then the first token is the last."""
    request = request_of(MIXTURE, ends=torch.tensor(ends, dtype=torch.long), max_new_tokens=max_new_tokens)
    for stride in (1, 8):
        found, decoder, _ = run(request, max_num_seqs=4, stride=stride)
        require_same(found, expected(request))
    if not ends:
        assert (found.lengths == max_new_tokens).all()
    if len(ends) == VOCABULARY:
        assert (found.lengths == 1).all()
        assert decoder.steps == []


def test_the_padding_token_may_be_an_end():
    request = request_of(MIXTURE, ends=torch.tensor([PAD]), max_new_tokens=30)
    for stride in (1, 5):
        require_same(run(request, 3, stride)[0], expected(request))


class Watched:
    """Hugging Face's processors, and what they were shown."""

    def __init__(self, padded: torch.Tensor):
        self.padded = padded
        self.shown: list[torch.Tensor] = []
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
        assert torch.equal(ids[:, : self.padded.shape[1]], self.padded[rows]), "rows are not those that are said"
        self.shown.append(ids.clone())
        return self.processors(ids, scores)


@pytest.mark.parametrize("max_num_seqs", [2, 3, 100])
def test_processors_see_rows_of_one_length_as_hugging_face_shows_them(max_num_seqs):
    request = request_of(MIXTURE)
    request = replace(request, processors=Watched(request.padded))
    wanted = expected(request)
    alone_shown = {str(ids.tolist()) for shown in request.processors.shown for ids in shown}
    for stride in (1, 5):
        request.processors.shown.clear()
        found, _, _ = run(request, max_num_seqs, stride)
        require_same(found, wanted)
        seen = {str(ids.tolist()) for shown in request.processors.shown for ids in shown}
        assert seen >= alone_shown
        assert seen == alone_shown or stride > 1, "something that no row has was shown"
    assert found.lengths.min() >= 7


def test_logits_are_not_changed_by_processors_that_write_into_them():
    def in_place(ids: torch.Tensor, scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        scores[:, 3:] = -torch.inf
        return scores

    request = request_of([LONG, WHOLE], processors=in_place, max_new_tokens=5)
    found, _, _ = run(request)
    require_same(found, expected(request))
    assert (found.tokens < 3).all()
