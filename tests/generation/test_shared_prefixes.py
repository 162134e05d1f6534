"""Sequences of one call that begin alike: what they share, and that each shared token runs through the layers once."""

import random
from collections import Counter

import pytest
import torch

from hybrid.decoders.batch import BLOCK_SIZE, KVWeights
from hybrid.decoders.cpu_decoder import CpuDecoder
from hybrid.decoders.torch_decoder import WholeDecoder
from hybrid.generation.block_pool import RESERVED_SHARE, BlockPool
from hybrid.generation.model_runner import forward_bytes, hidden_states
from hybrid.generation.scoring import LayerInputScores, score_packed, score_with_layer_inputs
from hybrid.generation.shared_prefixes import NO_PARENT, PackedSequences, common_tokens
from tests.decoders import test_cpu_decoder, test_torch_decoder
from tests.decoders.test_layer_inputs import recorded_inputs, require_close
from tests.marks import slow_but
from tests.tiny_models import ALL_FAMILIES, RECURRENT, VOCABULARY, tiny_model

WEIGHTS = KVWeights(0, 0)
QUICK = ("llama", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "qwen3_moe", "bloom")


def random_sequences(seed: int, count: int, longest: int, vocabulary: int) -> list[torch.Tensor]:
    """Sequences over few tokens, some of which continue or repeat others."""
    chosen = random.Random(seed)
    sequences: list[list[int]] = []
    for _ in range(count):
        begin = chosen.choice(sequences)[: chosen.randint(0, longest)] if sequences and chosen.random() < 0.6 else []
        sequences.append(begin + [chosen.randrange(vocabulary) for _ in range(chosen.randint(0, longest - len(begin)))])
    return [torch.tensor(ids, dtype=torch.int64) for ids in sequences]


@pytest.mark.parametrize("vocabulary", [2, 50000])
def test_sequences_are_packed_as_a_tree_of_their_prefixes(vocabulary):
    """The oracle is a dictionary of all prefixes."""
    for seed in range(60):
        sequences = random_sequences(seed, 1 + seed % 9, 12, vocabulary)
        packed = PackedSequences.of(sequences)
        seen: dict[tuple, int] = {}
        for row, (ids, index) in enumerate(zip(sequences, packed.index, strict=True)):
            tokens, known = ids.tolist(), len(seen)
            expected = [seen.setdefault(tuple(tokens[: n + 1]), len(seen)) for n in range(len(tokens))]
            assert index.tolist() == expected
            shared = packed.shared[row]
            assert shared == sum(place < known for place in expected)
            parent = packed.parents[row]
            assert (parent == NO_PARENT) == (shared == 0)
            assert shared == 0 or (parent < row and common_tokens(sequences[parent], ids) == shared)
        assert packed.count == len(seen)


@pytest.mark.parametrize("vocabulary", [2, 50000])
def test_recurrent_sequences_continue_whole_ones(vocabulary):
    """Of two that share a block or more, what they share is a sequence before them; no token of it is packed twice."""
    for seed in range(60):
        sequences = random_sequences(seed, 1 + seed % 9, 4 * BLOCK_SIZE, vocabulary)
        packed = PackedSequences.of(sequences, is_recurrent=True)
        assert [packed.sequences[row].tolist() for row in packed.rows] == [ids.tolist() for ids in sequences]
        tokens = torch.full((packed.count,), -1)
        for row, (ids, index) in enumerate(zip(packed.sequences, packed.index, strict=True)):
            parent = packed.parents[row]
            assert parent < row
            assert packed.shared[row] == (0 if parent == NO_PARENT else len(packed.sequences[parent]))
            assert parent == NO_PARENT or torch.equal(packed.sequences[parent], ids[: packed.shared[row]])
            assert (tokens[index[: packed.shared[row]]] == ids[: packed.shared[row]]).all()
            assert (tokens[index[packed.shared[row] :]] == -1).all()
            tokens[index] = ids
        for row, ids in enumerate(sequences):
            for other, others in enumerate(sequences[:row]):
                same = packed.index[packed.rows[row]][: len(others)] == packed.index[packed.rows[other]][: len(ids)]
                common = common_tokens(ids, others)
                assert same.sum() == common if common >= BLOCK_SIZE else same.sum() <= common


@pytest.mark.parametrize("is_recurrent", [False, True])
@pytest.mark.parametrize("max_blocks", [None, 3, 9])
@pytest.mark.parametrize("max_rows", [1, 2, 16])
def test_runs_hold_the_blocks_that_they_say(max_rows, max_blocks, is_recurrent):
    for seed in range(30):
        packed = PackedSequences.of(random_sequences(seed, 12, 3 * BLOCK_SIZE, 3), is_recurrent)
        runs = packed.runs(max_rows, max_blocks)
        assert [row for run in runs for row in run.begins] == list(range(len(packed.sequences)))
        for run in runs:
            assert len(run.begins) <= max_rows
            assert max_blocks is None or run.num_blocks <= max_blocks
            known = {*run.begins, *run.kept}
            assert all(begin in (0, packed.shared[row]) for row, begin in run.begins.items())
            assert all(packed.parents[row] in known for row, begin in run.begins.items() if begin)
            assert not is_recurrent or len(run.begins) + len(run.kept) <= max_rows + 1
        if max_blocks is None and not (is_recurrent and max_rows < 16):
            assert [begin for run in runs for begin in run.begins.values()] == packed.shared


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences and their mask, int64 [rows, tokens]; every second row is padded on the left."""
    width = max(map(len, rows)) + 1
    sequences, mask = torch.zeros(2, len(rows), width, dtype=torch.int64).unbind()
    for index, ids in enumerate(rows):
        first = (width - len(ids)) * (index % 2)
        sequences[index, first : first + len(ids)] = ids
        mask[index, first : first + len(ids)] = 1
    return sequences, mask


def groups(prompts: tuple[int, ...] = (41, 64, 1), size: int = 3, seed: int = 0) -> list[torch.Tensor]:
    """`size` sequences after each prompt of so many tokens: their completions have 0, 1, and 2 to 30 tokens. The last
    row continues one of the first group: a later turn of its conversation."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> torch.Tensor:
        return torch.randint(3, VOCABULARY, (count,), generator=generator)

    rows = []
    for length in prompts:
        prompt = ids(length)
        lengths = [0, 1, *torch.randint(2, 31, (size - 2,), generator=generator).tolist()]
        rows += [torch.cat([prompt, ids(count)]) for count in lengths]
    return [*rows, torch.cat([rows[2], ids(7)]), rows[4].clone()]


def new_pool(decoder: WholeDecoder, blocks: int | None = None) -> BlockPool:
    limit = None if blocks is None else (1 + blocks) * decoder.kv(1).nbytes
    pool = BlockPool(BLOCK_SIZE, limit)
    pool.begin_call(decoder.kv, WEIGHTS, decoder.states if decoder.spec.is_recurrent else None)
    return pool


class CountedTokens:
    """A decoder that counts the tokens of its forwards."""

    def __init__(self, decoder: WholeDecoder):
        self.decoder, self.positions = decoder, Counter()

    def __getattr__(self, name: str):
        return getattr(self.decoder, name)

    def forward(self, batch, kv, *args, **kwargs):
        self.positions.update(batch.positions.tolist())
        return self.decoder.forward(batch, kv, *args, **kwargs)


@torch.no_grad()
def require_inputs_of_hugging_face(
    found: LayerInputScores, model: torch.nn.Module, rows: list[torch.Tensor], mask: torch.Tensor, tolerance: float
) -> None:
    """Every row's layer inputs, one row at a time, and that no others are kept."""
    for row, ids in enumerate(rows):
        place = found.index[row][mask[row].bool()]
        assert place[-1] == -1
        assert (found.index[row][~mask[row].bool()] == -1).all()
        if len(ids) == 1:
            continue
        with recorded_inputs(model) as inputs:
            model(ids[None], use_cache=False)
        expected = torch.stack([layer[0][0, :-1] for layer in inputs])
        require_close(found.layer_inputs[:, place[:-1]], expected, tolerance)
    used = found.index[found.index >= 0].unique()
    assert torch.equal(used, torch.arange(found.layer_inputs.shape[1]))


@pytest.mark.parametrize("family", slow_but(QUICK, ALL_FAMILIES))
@torch.no_grad()
def test_scores_are_the_same_bits_and_shared_tokens_run_once(family):
    model, rows = tiny_model(family).eval(), groups()
    sequences, mask = padded(rows)
    for decoder in (test_cpu_decoder.decoder_of(model), test_torch_decoder.decoder_of(model)):
        expected = score_packed(decoder, new_pool(decoder), sequences, mask, 0.7, 16)
        counted, pool = CountedTokens(decoder), new_pool(decoder)
        found = score_with_layer_inputs(counted, pool, sequences, mask, 0.7, 16)
        if isinstance(decoder, test_cpu_decoder.CpuDecoder):  # torch's products have other bits in other batches
            assert torch.equal(found.scores.per_token_logps, expected.per_token_logps)
            assert torch.equal(found.scores.entropies, expected.entropies)
        torch.testing.assert_close(found.scores.per_token_logps, expected.per_token_logps, rtol=0, atol=1e-5)
        assert (
            counted.positions.total() == found.layer_inputs.shape[1] == PackedSequences.of([r[:-1] for r in rows]).count
        )
        require_inputs_of_hugging_face(found, model, rows, mask, 1e-5)
        if found.router_indices is not None:
            assert found.router_indices.shape[:2] == (found.layer_inputs.shape[1], len(decoder.spec.moe_layers))
        assert not pool.num_used


@pytest.mark.parametrize("family", slow_but(["gemma2", "qwen3_moe", "gpt2"], ALL_FAMILIES))
@torch.no_grad()
def test_bfloat16_scores_are_the_same_bits(family):
    """An odd prompt ends between two tokens whose values the kernels keep as a pair."""
    model = tiny_model(family).bfloat16().eval()
    decoder = test_cpu_decoder.decoder_of(model, torch.bfloat16)
    sequences, mask = padded(groups(prompts=(41, 63, 7), size=5))
    expected = score_packed(decoder, new_pool(decoder), sequences, mask, 1.0, 16)
    found = score_with_layer_inputs(decoder, new_pool(decoder), sequences, mask, 1.0, 16)
    assert torch.equal(found.scores.per_token_logps, expected.per_token_logps)
    assert torch.equal(found.scores.entropies, expected.entropies)
    whole = score_with_layer_inputs(decoder, new_pool(decoder), sequences[3:4], mask[3:4], 1.0, 16)
    place = found.index[3][whole.index[0] >= 0]
    assert torch.equal(found.layer_inputs[:, place], whole.layer_inputs)
    assert found.layer_inputs.dtype == torch.bfloat16


@pytest.mark.parametrize(("rows_at_once", "blocks"), [(1, None), (2, None), (4, None), (16, 3), (16, 5), (2, 7)])
@torch.no_grad()
def test_runs_of_few_rows_and_little_room_change_no_bit(rows_at_once, blocks, monkeypatch):
    """Prefixes stay for later runs; with too little room they are computed again, and the inputs stored once."""
    monkeypatch.setattr(CpuDecoder, "prefill_tokens", 50)  # a sequence in several forwards
    model, rows = tiny_model("gemma2").eval(), groups()
    rows = [rows[n] for n in torch.randperm(len(rows), generator=torch.Generator().manual_seed(3))]
    sequences, mask = padded(rows)
    decoder = test_cpu_decoder.decoder_of(model)
    expected = score_with_layer_inputs(decoder, new_pool(decoder), sequences, mask, 0.7, 16)
    counted, pool = CountedTokens(decoder), new_pool(decoder, blocks)
    found = score_with_layer_inputs(counted, pool, sequences, mask, 0.7, rows_at_once)
    assert torch.equal(found.layer_inputs, expected.layer_inputs)
    assert torch.equal(found.index, expected.index)
    assert torch.equal(found.scores.per_token_logps, expected.scores.per_token_logps)
    assert torch.equal(found.scores.entropies, expected.scores.entropies)
    assert blocks is not None or counted.positions.total() == found.layer_inputs.shape[1]
    assert not pool.num_used


@pytest.mark.parametrize("keeps_hidden_states", [False, True])
@pytest.mark.parametrize("num_blocks", [4, 6, 9])
@torch.no_grad()
def test_scores_leave_free_memory_to_their_forwards(num_blocks, keeps_hidden_states):
    """Where it does not hold all rows' keys and values, they are scored in more runs, to the same bits."""
    model, rows = tiny_model("llama").eval(), groups(prompts=(41, 64, 1))
    sequences, mask = padded(rows)
    decoder = test_cpu_decoder.decoder_of(model)
    expected = score_packed(decoder, new_pool(decoder), sequences, mask, 0.7, 16)
    decoder.keeps_hidden_states = keeps_hidden_states
    for_forwards = forward_bytes(decoder, len(rows), max(map(len, rows)), decodes=False)
    block_bytes = decoder.kv(1).nbytes
    free = for_forwards + (num_blocks + 1) * block_bytes / RESERVED_SHARE + 1
    pool = BlockPool(BLOCK_SIZE, free_bytes=lambda: free)
    pool.begin_call(decoder.kv, WEIGHTS)
    found = score_packed(decoder, pool, sequences, mask, 0.7, 16)
    assert torch.equal(found.per_token_logps, expected.per_token_logps)
    assert torch.equal(found.entropies, expected.entropies)
    assert pool.peak_bytes <= (num_blocks + 1) * block_bytes < new_peak(decoder, sequences, mask)


def new_peak(decoder: WholeDecoder, sequences: torch.Tensor, mask: torch.Tensor) -> int:
    """Bytes of the blocks that scores take where memory is not short."""
    pool = new_pool(decoder)
    score_packed(decoder, pool, sequences, mask, 0.7, 16)
    return pool.peak_bytes


@pytest.mark.parametrize("family", slow_but(["qwen3_5_text", "mamba2", "lfm2"], RECURRENT))
@torch.no_grad()
def test_recurrent_scores_are_those_of_rows_alone_and_shared_tokens_run_once(family, monkeypatch):
    """However few rows are in the cache at once; float32, two decoders."""
    monkeypatch.setattr(CpuDecoder, "prefill_tokens", 50)  # a sequence in several forwards
    model, rows = tiny_model(family).eval(), groups(prompts=(41, 64, 1, 100), size=4)
    rows = [rows[n] for n in torch.randperm(len(rows), generator=torch.Generator().manual_seed(3))]
    sequences, mask = padded(rows)
    count = PackedSequences.of([ids[:-1] for ids in rows], is_recurrent=True).count
    assert count < sum(len(ids) - 1 for ids in rows) * 0.6
    for decoder in (test_cpu_decoder.decoder_of(model), test_torch_decoder.decoder_of(model)):
        is_exact = isinstance(decoder, CpuDecoder)
        alone = [
            score_packed(decoder, new_pool(decoder), *row, 0.7, 1)
            for row in zip(sequences[:, None], mask[:, None], strict=True)
        ]
        for rows_at_once in (1, 2, 5, 64):
            counted, pool = CountedTokens(decoder), new_pool(decoder)
            found = score_packed(counted, pool, sequences, mask, 0.7, rows_at_once)
            for name in ("per_token_logps", "entropies"):
                expected = torch.cat([getattr(scores, name) for scores in alone])
                actual = getattr(found, name)
                assert not is_exact or torch.equal(actual, expected)
                torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
            assert counted.positions.total() == count or rows_at_once < 5
            assert not pool.num_used and pool.num_slots == len(pool.free_slots) <= max(rows_at_once, 1) + 1


@torch.no_grad()
def test_blocks_of_the_prefix_cache_are_written_with_the_values_that_they_have():
    """As rollouts leave them: of a whole sequence, and of a prefix."""
    model, rows = tiny_model("llama").eval(), groups()
    sequences, mask = padded(rows)
    decoder = test_cpu_decoder.decoder_of(model)
    pool = new_pool(decoder)
    expected = score_with_layer_inputs(decoder, pool, sequences, mask, 0.7, 16)
    ids, full = rows[5], len(rows[5]) // BLOCK_SIZE
    blocks = pool.allocate(full + 1)
    list(hidden_states(decoder, pool, [ids], [blocks], [0]))
    pool.insert(ids[: full * BLOCK_SIZE], blocks[:full])
    before = [tensor[blocks].clone() for tensor in (*pool.kv.keys, *pool.kv.values)]
    pool.begin_call(decoder.kv, WEIGHTS)
    found = score_with_layer_inputs(decoder, pool, sequences, mask, 0.7, 16)
    assert torch.equal(found.layer_inputs, expected.layer_inputs)
    assert torch.equal(found.scores.per_token_logps, expected.scores.per_token_logps)
    after = [tensor[blocks] for tensor in (*pool.kv.keys, *pool.kv.values)]
    assert all(torch.equal(own[:full], other[:full]) for own, other in zip(after, before, strict=True))


@torch.no_grad()
def test_a_rank_that_runs_another_ones_rows_keeps_nothing():
    model, (sequences, mask) = tiny_model("llama").eval(), padded(groups())
    decoder = test_cpu_decoder.decoder_of(model)
    counted, other = CountedTokens(decoder), CountedTokens(decoder)
    assert score_with_layer_inputs(counted, new_pool(decoder), sequences, mask, 0.7, 16, keeps_inputs=False) is None
    score_with_layer_inputs(other, new_pool(decoder), sequences, mask, 0.7, 16)
    assert counted.positions == other.positions


@torch.no_grad()
def test_rows_of_one_token_have_no_scores_and_no_inputs():
    model = tiny_model("mixtral").eval()
    decoder = test_cpu_decoder.decoder_of(model)
    sequences, mask = padded([torch.tensor([5]), torch.tensor([6])])
    found = score_with_layer_inputs(decoder, new_pool(decoder), sequences, mask, 1.0, 16)
    assert found.layer_inputs.shape == (4, 0, 32)
    assert (found.index == -1).all()
    assert not found.scores.per_token_logps.any()
