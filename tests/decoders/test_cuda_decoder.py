"""The decoder on Triton kernels equals the one in torch operations, and Hugging Face's forward.

Without a GPU the kernels run in Triton's interpreter, which takes seconds for what is microseconds there: two layers, a
few tokens, and a capture that only remembers the run. What needs a device is in tests/gpu.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")

from hybrid.decoders.batch import BLOCK_SIZE, PackedBatch
from hybrid.decoders.cuda_decoder import CudaDecoder
from hybrid.kernels.cuda_graph import Captured
from hybrid.kernels.triton_attention import SPLIT, decode_attention
from hybrid.models.reader import read_decoder
from tests.decoders.test_self_check import refusal
from tests.decoders.test_side_paths import fused_of
from tests.decoders.test_torch_decoder import VARIANTS, average, distance, own_weights
from tests.tiny_models import VOCABULARY, tiny_model, with_peft

# What the kernels can do is in these; the others differ from them in what torch does. They run as slow tests.
QUICK = (
    "qwen3",
    "gemma2",
    "bloom",
    "phi3, half a head turned",
    "mixtral",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter cannot do bfloat16 (triton 3.7.1)
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
PROMPTS = (31, 3, 1)  # tokens; the first sequence goes over the end of its block as it is decoded
NEW = 2


def remembered(run, pool) -> Captured:
    """A capture that is none: the run itself, over the tensors that it has."""
    run()
    return Captured(run, pool)


def small(variant: str, **changes) -> torch.nn.Module:
    """A model of two layers."""
    family, settings = VARIANTS[variant]
    layers = {"bloom": "n_layer", "gpt2": "n_layer", "gptj": "n_layer"}.get(family, "num_hidden_layers")
    settings = {**settings, layers: 2, **changes}
    if family == "gemma3_text":
        settings["layer_types"] = ["sliding_attention", "full_attention"]
    if family == "smollm3":
        settings["no_rope_layers"] = [1, 0]
    return tiny_model(family, **settings).to(DEVICE).eval()


def sequences(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).to(DEVICE) for length in lengths]


class Decoding:
    """Sequences in a decoder's blocks; block 0 is nobody's, and holds NaN as every unwritten place does."""

    def __init__(self, decoder, ids: list[torch.Tensor], device: str = DEVICE):
        self.decoder, self.ids, self.device = decoder, ids, device
        needed = [-(-len(one) // BLOCK_SIZE) for one in ids]
        self.kv = decoder.kv(1 + sum(needed))
        for blocks in (*self.kv.keys, *self.kv.values):
            blocks.fill_(torch.nan)
        self.block_tables = torch.full((len(ids), max(needed)), 10**6, dtype=torch.int32)
        for row, own in zip(self.block_tables, (1 + torch.randperm(sum(needed))).split(needed), strict=True):
            row[: len(own)] = own
        self.block_tables = self.block_tables.to(device)

    def batch(self, spans: list[tuple[int, int]]) -> PackedBatch:
        """The tokens of these spans, one for each sequence."""
        return PackedBatch(
            ids=torch.cat([one[begin:end] for one, (begin, end) in zip(self.ids, spans, strict=True)]),
            positions=torch.cat([torch.arange(*span) for span in spans]).int().to(self.device),
            cu_seqlens=torch.tensor([0] + [end - begin for begin, end in spans]).cumsum(0).int().to(self.device),
            lengths=torch.tensor([end for _, end in spans], dtype=torch.int32, device=self.device),
            block_tables=self.block_tables,
        )

    @torch.no_grad()
    def run(self, begins: list[int], ends: list[int]) -> list[torch.Tensor]:
        """Logits of the spans, a forward for all."""
        batch = self.batch(list(zip(begins, ends, strict=True)))
        hidden = self.decoder.layers(self.decoder.embed(batch.ids, batch.positions), batch, self.kv)
        return list(self.decoder.logits(hidden).split([e - b for b, e in zip(begins, ends, strict=True)]))

    @torch.no_grad()
    def decode(self, at: list[int]) -> torch.Tensor:
        """Logits after the token at these places, a decode step."""
        return self.decoder.decode(self.batch([(ref, ref + 1) for ref in at]), self.kv)

    def every_logit(self, prompts: tuple[int, ...] = PROMPTS) -> list[torch.Tensor]:
        """Prompts, decode steps, and the last token behind a prefix: [length, vocabulary] of each sequence."""
        parts = [self.run([0] * len(prompts), list(prompts))]
        ends = list(prompts)
        while ends[0] < len(self.ids[0]) - 1:
            parts.append(list(self.decode(ends).clone().split(1)))
            ends = [end + 1 for end in ends]
        parts.append(self.run(ends, [end + 1 for end in ends]))
        return [torch.cat(rows) for rows in zip(*parts, strict=True)]


@torch.no_grad()
def hugging_face(model: torch.nn.Module, ids: list[torch.Tensor]) -> list[torch.Tensor]:
    """The model's own logits of each whole sequence, alone."""
    return [model(one[None]).logits[0].float() for one in ids]


def cuda_decoder(model: torch.nn.Module, max_capture_size: int = 0) -> CudaDecoder:
    """A bound decoder in the model's dtype, whose graphs are none without a device."""
    capture = {} if DEVICE == "cuda" else {"capture": remembered}
    decoder = CudaDecoder(read_decoder(model), own_weights, model.dtype, max_capture_size, **capture)
    decoder.bind()
    return decoder


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in VARIANTS]
)
def test_logits_equal_hugging_face(variant):
    """Prefill, decode steps in graphs with padding sequences, a token behind a prefix; every mechanism in float32."""
    model = small(variant)
    ids = sequences(tuple(length + NEW + 1 for length in PROMPTS))
    ours = Decoding(cuda_decoder(model, max_capture_size=4), ids).every_logit()
    assert distance(ours, hugging_face(model, ids)) < 2e-6  # sums in another order: 1 to 4e-7 was seen


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["qwen3", "gptj", "phi3, half a head turned"])
def test_adapters_beside_the_weights_equal_pefts_forward(variant):
    """In graphs too, which are kept over a step, and captured anew where an adapter is scaled otherwise."""
    model = with_peft(small(variant)).eval()
    ids = sequences(tuple(length + NEW + 1 for length in PROMPTS))
    fused = fused_of(model)
    capture = {} if DEVICE == "cuda" else {"capture": remembered}
    weights, lora_deltas = (partial(read, adapters=True) for read in (fused.tensor, fused.lora_deltas))
    decoder = CudaDecoder(read_decoder(model), weights, torch.float32, 4, **capture, lora_deltas=lora_deltas)
    for change in ("none", "step", "scale"):
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.mul_(0.9 if "lora_" in name and change == "step" else 1.0)
        for one in fused.snapshot.adapted:
            one.wrapper.scaling["default"] *= 0.5 if change == "scale" else 1.0
        decoder.bind()
        kept = decoder.graphed is not None and len(decoder.graphed.graphs) > 0
        assert kept == (change == "step")
        assert distance(Decoding(decoder, ids).every_logit(), hugging_face(model, ids)) < 2e-6


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[] if name in ("qwen3", "bloom") else pytest.mark.slow) for name in QUICK]
)
def test_half_precision_rounds_where_hugging_face_does(variant):
    """Two roundings that know nothing of each other would be √2 times as far apart; 0.4 to 0.8 was seen in float16."""
    model = small(variant)
    ids = sequences(tuple(length + NEW + 1 for length in PROMPTS))
    exact = hugging_face(model, ids)
    theirs = hugging_face(model.to(HALF), ids)
    ours = Decoding(cuda_decoder(model), ids).every_logit()
    assert average(ours, theirs) < average(theirs, exact)


def three_sequences(decoder: CudaDecoder) -> Decoding:
    """Three prompts of two tokens in the decoder's blocks, with room for more."""
    decoding = Decoding(decoder, sequences((5, 5, 5)))
    decoding.run([0, 0, 0], [2, 2, 2])
    return decoding


def test_graphs_are_captured_once_and_anew_where_blocks_or_weights_move():
    model = small("llama")
    decoder = cuda_decoder(model, max_capture_size=4)
    decoding = three_sequences(decoder)
    first = decoding.decode([2, 2, 2])
    graph = decoder.graphed.graphs[4]
    assert torch.equal(decoding.decode([2, 2, 2]), first)
    decoder.bind()
    assert decoder.graphed.graphs[4] is graph, "nothing moved, and the graph was dropped"
    moved = three_sequences(decoder)
    assert torch.equal(moved.decode([2, 2, 2]), first)
    assert decoder.graphed.graphs[4] is not graph
    graph = decoder.graphed.graphs[4]
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight * 2)
    decoder.bind()
    assert torch.allclose(moved.decode([2, 2, 2]), 2 * first)
    assert decoder.graphed.graphs[4] is not graph


def test_longer_sequences_than_were_reserved_for_get_longer_tables_and_new_graphs():
    decoder = cuda_decoder(small("bloom"), max_capture_size=2)
    decoder.reserve(BLOCK_SIZE)
    short, long = Decoding(decoder, sequences((4,))), Decoding(decoder, sequences((BLOCK_SIZE + 2,)))
    short.run([0], [3])
    short.decode([3])
    graphs = decoder.graphed
    assert decoder.positions == BLOCK_SIZE and decoder.bias.shape[1] == BLOCK_SIZE
    long.run([0], [BLOCK_SIZE])
    expected = Decoding(cuda_decoder(small("bloom")), sequences((BLOCK_SIZE + 2,)))
    expected.run([0], [BLOCK_SIZE])
    torch.testing.assert_close(long.decode([BLOCK_SIZE]), expected.decode([BLOCK_SIZE]))
    assert decoder.positions == 2 * BLOCK_SIZE and decoder.graphed is not graphs


def test_a_step_of_more_sequences_than_captured_runs_without_a_graph():
    decoder = cuda_decoder(small("llama"), max_capture_size=2)
    assert three_sequences(decoder).decode([2, 2, 2]).shape == (3, VOCABULARY)
    assert decoder.graphed is None


def test_padding_sequences_touch_block_0_alone():
    decoder = cuda_decoder(small("llama"), max_capture_size=4)
    decoding = three_sequences(decoder)
    decoding.decode([2, 2, 2])
    for blocks in (*decoding.kv.keys, *decoding.kv.values):
        written = ~torch.isnan(blocks).flatten(2).any(2)  # [blocks, BLOCK_SIZE]
        assert written[0].nonzero().flatten().tolist() == [0]
        assert written[1:].sum() == 3 * 3


def test_a_batch_of_as_many_tokens_as_sequences_need_not_be_a_decode_step():
    """Two new tokens of one sequence, none of the other: which is whose is told by `cu_seqlens`."""
    decoder = cuda_decoder(small("llama"))
    ours, alone = (Decoding(decoder, sequences((5, 5))) for _ in range(2))
    ours.run([0, 0], [2, 2])
    found = ours.run([2, 2], [4, 2])
    alone.run([0, 0], [4, 2])
    with torch.no_grad():
        expected = alone.decode([4, 2])
    torch.testing.assert_close(ours.decode([4, 2]), expected)
    assert [len(rows) for rows in found] == [2, 0]


# The self-check, over a context of two splits


def checked_model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """As small as can be: the interpreter goes through 290 tokens."""
    return small("llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1).to(dtype)


@pytest.mark.parametrize(
    "max_capture_size", [0, pytest.param(1, marks=pytest.mark.slow), 4], ids="no one several".split()
)
def test_the_self_check_accepts_the_decoder(max_capture_size):
    """Decode steps too, from graphs where they are on: of as many sequences as fit."""
    model = checked_model(HALF if max_capture_size else torch.float32)
    decoder = cuda_decoder(model, max_capture_size)
    assert refusal(decoder, model) == ""
    assert (decoder.graphed is not None) == (max_capture_size > 0)


class AveragedSplits:
    """In the join kernel's place: splits are averaged, whatever each of them has of the softmax."""

    def __getitem__(self, grid: tuple) -> Callable:
        def join(parts, log_totals, lengths, out, window, splits, **sizes):
            for row, length in enumerate(lengths.tolist()):
                out[row] = parts[row, :, : -(-length // SPLIT)].mean(1)

        return join


def no_attention(q, *args):
    return torch.zeros_like(q)


def of_others_blocks(q, keys, values, lengths, block_tables, *features):
    return decode_attention(q, keys, values, lengths, block_tables.flip(0).contiguous(), *features)


def of_the_first_split(q, keys, values, lengths, block_tables, *features):
    return decode_attention(q, keys, values, lengths.clamp(max=SPLIT), block_tables, *features)


slow = partial(pytest.param, marks=pytest.mark.slow)  # they take seconds in the interpreter


@pytest.mark.parametrize("wrong", [no_attention, slow(of_others_blocks), slow(of_the_first_split), AveragedSplits])
def test_the_self_check_refuses_wrong_decode_attention(wrong, monkeypatch):
    """Prefill is right, and so are the layers of a prefill."""
    if wrong is AveragedSplits:
        monkeypatch.setattr("hybrid.kernels.triton_attention._join_kernel", AveragedSplits())
    else:
        monkeypatch.setattr("hybrid.decoders.cuda_decoder.decode_attention", wrong)
    model = checked_model()
    reason = refusal(cuda_decoder(model), model)
    assert reason.startswith("layer 0, in decode steps, of the fused container differs"), reason


def with_stale_inputs(decoder: CudaDecoder, names: tuple[str, ...]) -> Callable:
    """A capture whose replays see these inputs as they were when it was captured."""

    def capture(run, pool) -> Captured:
        run()
        captured = {name: decoder.graphed.inputs[name].clone() for name in names}

        def replay() -> None:
            inputs = decoder.graphed.inputs
            now = {name: inputs[name].clone() for name in names}
            for name in names:
                inputs[name].copy_(captured[name])
            run()
            for name in names:
                inputs[name].copy_(now[name])

        return Captured(replay, pool)

    return capture


@pytest.mark.parametrize(
    "stale", [("lengths",), slow(("block_tables",)), slow(("positions",)), slow(("ids",)), ()], ids=str
)
def test_the_self_check_refuses_graphs_that_replay_something_else(stale):
    """The step itself is right; (): a replay does nothing."""
    model = checked_model()
    decoder = cuda_decoder(model, max_capture_size=4)
    decoder.capture = with_stale_inputs(decoder, stale) if stale else lambda run, pool: Captured(lambda: None, pool)
    reason = refusal(decoder, model)
    assert reason.startswith("a decode step from a graph of the fused container differs"), reason
