"""The decoder on the CPU kernels against Hugging Face's own forward; rows are bit-identical in other batches."""

import contextlib
import ctypes
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybrid.decoders.batch import BLOCK_SIZE, KVWeights, PackedBatch, packed
from hybrid.decoders.cpu_decoder import CpuDecoder
from hybrid.generation.block_pool import BlockPool
from hybrid.generation.scoring import LOGIT_ROWS, score_packed
from hybrid.kernels.cpu_library import cpu_library
from hybrid.models.reader import read_decoder
from hybrid.models.spec import UnsupportedModel
from tests.decoders.test_torch_decoder import (
    QUICK,
    RELEASED,
    VARIANTS,
    Run,
    average,
    distance,
    hugging_face,
    own_weights,
    sequences,
)
from tests.marks import slow_but
from tests.tiny_models import ALL_FAMILIES, CROSSED, VOCABULARY, tiny_model

CPU = torch.device("cpu")


def own_blocks_batch(
    pieces: list[torch.Tensor], device: torch.device, begins: list[int] | None = None, longest: int = 0
) -> PackedBatch:
    """A batch of pieces of sequences, each sequence with its own blocks.

    pieces: int64 [n] each.  begins: their first tokens' positions; None: 0.  longest: blocks are for the longer of this
        many tokens and the longest piece.
    """
    each = -(-max(longest, *map(len, pieces)) // BLOCK_SIZE)
    blocks = [list(range(1 + n * each, 1 + (n + 1) * each)) for n in range(len(pieces))]
    return packed(pieces, begins or [0] * len(pieces), blocks, device)


# Our distance from Hugging Face in bfloat16, as a share of Hugging Face's distance from float32. Independent roundings
# would be √2 apart; 0.34 to 0.78 is measured where every step rounds alike. Gemma 2 rounds probabilities after they are
# divided by their sum, we before; Falcon adds biases after rounding.
SAME_ROUNDINGS, OTHER_ROUNDINGS = 0.9, 1.2


class CpuRun(Run):
    """Sequences in scattered blocks that hold NaN wherever nothing was written, computed by the CPU kernels."""

    def logits(self, begins: list[int], ends: list[int]) -> list[torch.Tensor]:
        self.decoder.reserve(max(ends))
        logits = self.decoder.logits(self.decoder.forward(self.batch(begins, ends), self.kv))
        return list(logits.split([end - begin for begin, end in zip(begins, ends, strict=True)]))


def decoder_of(
    model: torch.nn.Module, dtype: torch.dtype = torch.float32, weights=own_weights, library: ctypes.CDLL | None = None
) -> CpuDecoder:
    """A bound decoder of `model`.  library: a build of the kernels; None: that of this machine."""
    decoder = CpuDecoder(read_decoder(model), weights, dtype, library or cpu_library())
    decoder.bind()
    return decoder


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside the block torch, and so the kernels, use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_hugging_face(variant):
    family, changes = VARIANTS[variant]
    model = tiny_model(family, **changes).eval()
    actual = CpuRun(decoder_of(model), sequences()).every_logit()
    assert distance(actual, hugging_face(model)) < 2e-6  # sums in another order: 1 to 5e-7 measured


@pytest.mark.parametrize("variant", slow_but(QUICK, VARIANTS))
def test_bfloat16_logits_round_as_hugging_face(variant):
    family, changes = VARIANTS[variant]
    model = tiny_model(family, **changes).eval()
    exact = hugging_face(model)
    model = model.bfloat16()
    expected = hugging_face(model)
    actual = CpuRun(decoder_of(model, torch.bfloat16), sequences()).every_logit()
    share = OTHER_ROUNDINGS if family in ("gemma2", "falcon", "gpt_oss", "mimo_v2_flash") else SAME_ROUNDINGS
    assert average(actual, expected) < share * average(expected, exact)


@pytest.mark.parametrize("family", slow_but(["gpt_oss", "glm4_moe"], RELEASED))
def test_released_heads_and_experts_match_hugging_face(family):
    model = tiny_model(family, **RELEASED[family]).eval()
    assert distance(CpuRun(decoder_of(model), sequences()).every_logit(), hugging_face(model)) < 2e-6


@pytest.mark.parametrize("head_dim", [16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 192, 256])
def test_heads_of_every_size_equal_hugging_face(head_dim):
    """One vector of a head, several, and a part of one."""
    model = tiny_model("llama", head_dim=head_dim).eval()
    exact = hugging_face(model)
    assert distance(CpuRun(decoder_of(model), sequences()).every_logit(), exact) < 2e-6
    model = model.bfloat16()
    expected = hugging_face(model)
    actual = CpuRun(decoder_of(model, torch.bfloat16), sequences()).every_logit()
    assert average(actual, expected) < SAME_ROUNDINGS * average(expected, exact)


@pytest.mark.parametrize("family", ["bloom", "falcon"])
def test_alibi_rounds_as_hugging_face_at_large_positions(family):
    """In bfloat16 position 900 times a slope of 1/2 rounds to a multiple of 2, so that neighbouring tokens tie."""
    changes = {"alibi": True, "hidden_size": 64, "num_attention_heads": 16} if family == "falcon" else {}
    model = tiny_model(family, **changes).eval()
    ids = torch.randint(3, VOCABULARY, (1000,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = model(ids[None]).logits[0]
        expected = model.bfloat16()(ids[None]).logits[0].float()
    decoder = decoder_of(model, torch.bfloat16)
    batch = own_blocks_batch([ids], CPU)
    decoder.reserve(len(ids))
    actual = decoder.logits(decoder.forward(batch, decoder.kv(1 + batch.block_tables.numel())))
    # 0.3 and 0.6; where the position is not rounded, 0.9 and 5.9
    assert (actual - expected).abs().mean() < 0.7 * (exact - expected).abs().mean()


# Sizes that are no multiple of a vector, a tile or each other, so that every tail is computed.
ODD = {"hidden_size": 42, "intermediate_size": 53, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 14}
RAGGED = {
    "llama": ODD,
    "qwen3": {},  # whole vectors: with enough rows in a batch, rows of bfloat16 matrices are converted to float32
    "gemma2": ODD,
    "phi3": {"hidden_size": 42, "intermediate_size": 53, "num_attention_heads": 3, "num_key_value_heads": 1},
    "bloom": {"hidden_size": 42, "n_head": 3},
    "opt": {"hidden_size": 42, "num_attention_heads": 3, "word_embed_proj_dim": 19, "ffn_dim": 53},
    "gpt_neox": {"hidden_size": 42, "num_attention_heads": 3, "intermediate_size": 53},
    "mixtral": ODD,
    "gpt_oss": ODD,
    "glm4_moe": {**ODD, "moe_intermediate_size": 21},
    "granite": {},  # the residual is added with a factor
}


class SegmentedForward:
    """Forwards of one or several sequences, with their own blocks in one KV cache, in segments of any length."""

    def __init__(self, decoder: CpuDecoder, sequences: list[torch.Tensor]):
        self.decoder, self.sequences = decoder, sequences
        self.longest = max(map(len, sequences))
        decoder.reserve(self.longest)
        self.kv = decoder.kv(1 + len(sequences) * -(-self.longest // 32))

    def run(self, cuts: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Hidden states and logits of every sequence, forwarded in segments that end at `cuts`."""
        outputs = [[] for _ in self.sequences]
        for begin, end in zip([0, *cuts], [*cuts, self.longest], strict=True):
            pieces = [ids[begin:end] for ids in self.sequences]
            active = [index for index, piece in enumerate(pieces) if len(piece)]
            if not active:
                break
            batch = own_blocks_batch([pieces[i] for i in active], CPU, [begin] * len(active), self.longest)
            batch = type(batch)(**{**vars(batch), "block_tables": self.block_tables()[active]})
            hidden = self.decoder.forward(batch, self.kv)
            parts = zip(
                hidden.split([len(pieces[i]) for i in active]),
                self.decoder.logits(hidden).split([len(pieces[i]) for i in active]),
                strict=True,
            )
            for index, part in zip(active, parts, strict=True):
                outputs[index].append(part)
        return [tuple(torch.cat(part) for part in zip(*pieces, strict=True)) for pieces in outputs]

    def block_tables(self) -> torch.Tensor:
        width = -(-self.longest // 32)
        return (1 + torch.arange(len(self.sequences) * width).view(-1, width)).int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", RAGGED)
def test_a_row_is_bit_identical_in_every_batch_and_split(family, dtype):
    """Alone, among seven others, in one piece, in several, token by token, on one thread, on two, and on more than
    there are cores."""
    model = tiny_model(family, dtype=dtype, **RAGGED[family]).eval()
    decoder = decoder_of(model, dtype)
    generator = torch.Generator().manual_seed(0)
    batch = [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in (37, 5, 41, 1, 33, 12, 64, 20)]
    with threads(1):
        expected = [SegmentedForward(decoder, [ids]).run([])[0] for ids in batch]
    runs = {
        "together": (1, []),
        "together, two threads": (2, []),
        "in pieces": (1, [3, 32, 39]),
        "in pieces, two threads": (2, [1, 2, 3, 4, 31, 32, 33, 50]),
        "together, 16 threads": (16, []),
        "in pieces, 7 threads": (7, [3, 40]),
        "token by token": (1, list(range(1, 64))),
    }
    for case, (count, cuts) in runs.items():
        with threads(count):
            actual = SegmentedForward(decoder, batch).run(cuts)
        for index, (outputs, expected_outputs) in enumerate(zip(actual, expected, strict=True)):
            assert torch.equal(outputs[0], expected_outputs[0]), f"hidden states of sequence {index}, {case}"
            assert torch.equal(outputs[1], expected_outputs[1]), f"logits of sequence {index}, {case}"


@torch.no_grad()
@pytest.mark.parametrize("hidden_size", [1000, 1024])
def test_rows_a_multiple_of_4_kib_apart_have_the_bits_of_single_rows(hidden_size):
    """They share sets of the L1 cache, so that more than 4 are copied. 1000 inputs lie as they are."""
    model = tiny_model("llama", hidden_size=hidden_size, num_attention_heads=8, num_hidden_layers=1)
    decoder, hidden = decoder_of(model), torch.randn(70, hidden_size)
    with threads(1):
        expected = torch.cat([decoder.logits(row) for row in hidden.split(1)])
    assert distance(expected, model.lm_head(model.model.norm(hidden))) < 2e-6
    for rows, count in ((4, 1), (5, 1), (70, 1), (70, 2)):
        with threads(count):
            assert torch.equal(decoder.logits(hidden[:rows]), expected[:rows]), f"{rows} rows, {count} threads"


LONG = {
    "llama": {},
    "gemma2": {"sliding_window": 600},  # one of two layers begins within a split
    "bloom": {},
    "phi3": {"sliding_window": 300},
    "gpt_oss": {"sliding_window": 600},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", slow_but(["gpt_oss"], LONG))
def test_splits_of_a_long_context_change_no_bit(family, dtype):
    """Steps around the borders of splits and far behind them, whose splits are computed by many threads, by one, and in
    a prefill; alone, and batched with a shorter sequence."""
    positions = {} if family == "bloom" else {"max_position_embeddings": 2048}
    decoder = decoder_of(tiny_model(family, dtype=dtype, **positions, **LONG[family]).eval(), dtype)
    batch = list(torch.randint(3, VOCABULARY, (2, 1300), generator=torch.Generator().manual_seed(0)))
    batch[1] = batch[1][:700]
    cuts = [510, 511, 512, 513, 1024, 1025, 1297, 1298, 1299]
    with threads(1):
        expected = [SegmentedForward(decoder, [ids]).run([])[0] for ids in batch]
    for count, these, where in ((8, batch[:1], cuts), (64, batch[:1], cuts), (1, batch, cuts), (16, batch, cuts)):
        with threads(count):
            actual = SegmentedForward(decoder, these).run(where)
        for outputs, expected_outputs in zip(actual, expected, strict=False):
            assert all(map(torch.equal, outputs, expected_outputs)), f"{len(these)} sequences, {count} threads"


@pytest.mark.parametrize("family", LONG)
def test_long_contexts_match_hugging_face(family):
    positions = {} if family == "bloom" else {"max_position_embeddings": 2048}
    model = tiny_model(family, **positions, **LONG[family]).eval()
    ids = torch.randint(3, VOCABULARY, (1300,), generator=torch.Generator().manual_seed(0))
    model.config._experts_implementation = "eager"  # torch's grouped product has no float64 (2.13)
    expected = model.double()(ids[None]).logits.float()
    with threads(8):
        actual = SegmentedForward(decoder_of(model.float()), [ids]).run([1290, 1295])[0][1]
    assert distance([actual], list(expected)) < 4e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_in_several_rounds_change_no_bit(family, dtype):
    """40 experts and 1200 tokens: more rows than the buffers hold at a time; and steps of 1 to 3 tokens."""
    names = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}
    sizes = {names[family]: 40, "num_experts_per_tok": 3, "max_position_embeddings": 2048}
    model = tiny_model(family, dtype=dtype, **sizes).eval()
    decoder = decoder_of(model, dtype)
    batch = list(torch.randint(3, VOCABULARY, (3, 400), generator=torch.Generator().manual_seed(0)))
    with threads(1):
        expected = [SegmentedForward(decoder, [ids]).run([])[0] for ids in batch]
    for count, cuts in ((1, []), (2, []), (16, [398, 399]), (64, [1, 2])):
        with threads(count):
            actual = SegmentedForward(decoder, batch).run(cuts)
        for outputs, expected_outputs in zip(actual, expected, strict=True):
            assert all(map(torch.equal, outputs, expected_outputs)), f"{count} threads, cut at {cuts}"
    if dtype == torch.float32:
        logits = [model(ids[None]).logits[0] for ids in batch]
        assert distance([outputs[1] for outputs in expected], logits) < 4e-6


def test_a_row_is_bit_identical_in_every_batch_size():
    """One new token for each of 1 to 19 sequences: whole tiles of rows, and every remainder."""
    decoder = decoder_of(tiny_model("llama", **ODD).eval())
    generator = torch.Generator().manual_seed(0)
    batch = [torch.randint(3, VOCABULARY, (n % 7 + 2,), generator=generator) for n in range(19)]
    expected = [SegmentedForward(decoder, [ids]).run([])[0][1] for ids in batch]
    for count in range(1, 20):
        for outputs, expected_logits in zip(
            SegmentedForward(decoder, batch[:count]).run([1, 2]), expected, strict=False
        ):
            assert torch.equal(outputs[1], expected_logits), f"{count} sequences"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_is_bit_identical_in_batches_larger_than_the_cpu_cache(dtype):
    decoder = decoder_of(tiny_model("llama", dtype=dtype).eval(), dtype)
    rows = 2**20 // (4 * decoder.spec.hidden_size)  # rows of a chunk, which is a MiB of floats
    batch = list(torch.randint(3, VOCABULARY, (rows // 90, 100), generator=torch.Generator().manual_seed(0)))
    actual = SegmentedForward(decoder, batch).run([])
    for index in (0, rows // 200, rows // 101, len(batch) - 1):
        assert all(map(torch.equal, actual[index], SegmentedForward(decoder, [batch[index]]).run([])[0]))


@pytest.mark.parametrize("family", slow_but(CROSSED, ALL_FAMILIES))
def test_ranges_of_layers_equal_the_whole_forward(family):
    decoder = decoder_of(tiny_model(family).eval())
    batch = own_blocks_batch([ids[:20] for ids in sequences()], CPU)
    decoder.reserve(20)
    expected = decoder.forward(batch, decoder.kv(1 + batch.block_tables.numel()))
    kv = decoder.kv(1 + batch.block_tables.numel())
    hidden = decoder.embed(batch.ids, batch.positions)
    for first, last in ((0, 1), (1, 3)):
        before = hidden.clone()
        after = decoder.layers(hidden, batch, kv, first, last)
        assert torch.equal(hidden, before), "the input was changed in place"
        hidden = after
    assert torch.equal(hidden, expected)


def test_decode_equals_a_forward_of_one_token():
    decoder = decoder_of(tiny_model("qwen3").eval())
    ids = sequences()[0][:34]
    batch = own_blocks_batch([ids], CPU)
    decoder.reserve(40)
    kv = decoder.kv(4)
    expected = decoder.logits(decoder.forward(batch, kv)[-1:])
    kv = decoder.kv(4)
    decoder.forward(own_blocks_batch([ids[:-1]], CPU, longest=34), kv)
    assert torch.equal(decoder.decode(own_blocks_batch([ids[-1:]], CPU, [33], 34), kv), expected)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mixtral"])
def test_bind_reads_changed_weights(family):
    model = tiny_model(family).eval()
    decoder = decoder_of(model)
    other = tiny_model(family, seed=5).eval()
    model.load_state_dict(other.state_dict())
    decoder.bind()
    assert distance(CpuRun(decoder, sequences()).every_logit(), hugging_face(other)) < 2e-6


def test_weights_are_read_in_place():
    model = tiny_model("llama").eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    decoder = decoder_of(model)
    assert decoder.nbytes() == 0
    CpuRun(decoder, sequences()).every_logit()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert distance(CpuRun(decoder, sequences()).every_logit(), hugging_face(model)) < 2e-6
    # GPT-2's matrices are [in, out] and are transposed: 12 · hidden² in each of three layers.
    assert decoder_of(tiny_model("gpt2")).nbytes() == 3 * 12 * 32 * 32 * 4


def test_kv_blocks_are_freed_with_their_owner():
    decoder = decoder_of(tiny_model("llama").eval())
    decoder.reserve(32)
    kv = decoder.kv(2)
    decoder.forward(own_blocks_batch([torch.tensor([5, 6])], CPU), kv)
    watched = weakref.ref(kv.keys[0])
    del kv
    gc.collect()
    assert watched() is None, "the decoder keeps the KV cache alive"


def test_reserving_positions_that_would_change_dynamic_rope_raises():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    decoder = decoder_of(tiny_model("llama", rope_parameters=rope).eval())
    decoder.reserve(96)
    with pytest.raises(AssertionError, match="more positions"):
        decoder.reserve(97)


def test_token_ids_outside_the_vocabulary_raise():
    """IndexError, as from Hugging Face, and no read past the end of the table."""
    model = tiny_model("llama").eval()
    decoder = decoder_of(model)
    decoder.reserve(32)
    for token in (VOCABULARY, -1, 2**40):
        batch = own_blocks_batch([torch.tensor([5, token])], CPU)
        with pytest.raises(IndexError, match=f"{token}.*rows for 0 to {VOCABULARY - 1}"):
            decoder.forward(batch, decoder.kv(2))
        with pytest.raises(IndexError, match=str(token)):
            decoder.decode(own_blocks_batch([torch.tensor([token])], CPU), decoder.kv(2))
        with pytest.raises(IndexError):
            model(torch.tensor([[5, token]]))


def test_dtypes_without_kernels_are_unsupported():
    model = tiny_model("llama").eval()
    with pytest.raises(UnsupportedModel, match=r"float32 and bfloat16, not torch\.float16"):
        decoder_of(model.half(), torch.float16)
    model = tiny_model("llama").eval()
    model.model.layers[1].mlp.up_proj.bfloat16()
    with pytest.raises(UnsupportedModel, match=r"bfloat16 where the embedding is torch\.float32"):
        decoder_of(model)


class LiveLogits(TorchDispatchMode):
    """The most tensors over the vocabulary, of so many elements or more, that live at once, each storage once."""

    def __init__(self, vocabulary: int, elements: int):
        super().__init__()
        self.vocabulary, self.elements, self.most = vocabulary, elements, 0
        self.live: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            is_logits = isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (self.vocabulary,)
            if is_logits and tensor.numel() >= self.elements:
                self.live.add(StorageWeakRef(tensor.untyped_storage()))
        self.live = {ref for ref in self.live if not ref.expired()}
        self.most = max(self.most, len(self.live))
        return output


@torch.no_grad()
def test_logits_of_scores_are_freed_before_the_next_ones_are_computed():
    """With a vocabulary of 128k those of LOGIT_ROWS tokens are 125 MiB, and the memory plan counts them once."""
    model = tiny_model("llama", max_position_embeddings=1024)
    decoder, pool = decoder_of(model), BlockPool(128)
    ids = torch.randint(3, VOCABULARY, (1, 3 * LOGIT_ROWS + 1))
    pool.begin_call(decoder.kv, KVWeights(0, 0))
    with LiveLogits(VOCABULARY, LOGIT_ROWS * VOCABULARY) as live:
        score_packed(decoder, pool, ids, torch.ones_like(ids), 0.7, 1)
    assert live.most == 1
