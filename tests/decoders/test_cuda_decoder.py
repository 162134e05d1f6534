"""The decoder on Triton kernels equals the one in torch operations, and Hugging Face's forward.

Without a GPU the kernels run in Triton's interpreter, which takes seconds instead of microseconds: two layers, a few
tokens, and a capture that only stores the function. Tests that need a device are in tests/gpu.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")

from hybrid.decoders.batch import BLOCK_SIZE, PackedBatch
from hybrid.decoders.cuda_decoder import CudaDecoder, ShardedCudaDecoder
from hybrid.decoders.decoder_weights import DecoderWeights
from hybrid.kernels.host_group import on_host
from hybrid.kernels.kv_addresses import kv_addresses
from hybrid.kernels.triton_attention import decode_attention
from hybrid.models.reader import read_decoder
from hybrid.runtime.parallel import InferenceGroup
from hybrid.weights.slices import Shard
from tests.decoders.test_self_check import self_check_reason
from tests.decoders.test_sharded_decoder import Slices
from tests.decoders.test_torch_decoder import VARIANTS as EVERY_VARIANT
from tests.decoders.test_torch_decoder import average, distance, own_weights
from tests.decoders.test_unmerged_lora import fused_of
from tests.device_ops import DeviceOps
from tests.kernels import interpreter_bfloat16
from tests.marks import skip_with_old_transformers, slow_but
from tests.tiny_models import ALL_FAMILIES as EVERY_FAMILY
from tests.tiny_models import CROSSED, OF_FAMILY, PER_LAYER_INPUTS, VOCABULARY, WITHOUT_TRITON, tiny_model, with_peft

interpreter_bfloat16.install()

# These cover the kernels' features; the other variants differ in torch operations only, and run as slow tests.
QUICK = (
    "qwen3",
    "gemma2",
    "bloom",
)
ALL_FAMILIES = {family: sizes for family, sizes in EVERY_FAMILY.items() if family not in WITHOUT_TRITON}
VARIANTS = {name: variant for name, variant in EVERY_VARIANT.items() if variant[0] not in WITHOUT_TRITON}
LATENTS = "deepseek_v3, yarn, no dense layers, tied"  # latent attention
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
# Of float32 logits. Sums in another order: 1 to 4e-7 measured in the interpreter; a device's exp2, log2 and reciprocals
# are approximations (ex2, lg2 and rcp.approx in PTX).
TOLERANCE = 1e-5 if DEVICE == "cuda" else 2e-6
PROMPTS = (31, 3, 1)  # tokens; the first sequence crosses the end of its block during decode
NEW = 2
slow = partial(pytest.param, marks=pytest.mark.slow)  # these take seconds in the interpreter


def eager_capture(run: Callable[[], None]) -> Callable[[], None]:
    """Stands in for a capture: its replay calls `run`, on the same tensors."""
    run()
    return run


def small(variant: str, **changes) -> torch.nn.Module:
    """A model of two layers; of all of them where layers share keys and values."""
    family, settings = VARIANTS[variant]
    skip_with_old_transformers(family)
    if family in PER_LAYER_INPUTS:
        return tiny_model(family, **settings, **changes).to(DEVICE).eval()
    layers = {"bloom": "n_layer", "gpt2": "n_layer", "gptj": "n_layer"}.get(family, "num_hidden_layers")
    settings = {**settings, layers: 2, **changes}
    for name in ("layer_types", "mlp_layer_types"):
        if types := {**OF_FAMILY[family], **settings}.get(name):
            settings[name] = types[-2:]
    if family in ("smollm3", "llama4_text"):
        settings["no_rope_layers"] = [1, 0]
    return tiny_model(family, **settings).to(DEVICE).eval()


def sequences(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).to(DEVICE) for length in lengths]


class Decoding:
    """Sequences in a decoder's KV blocks; block 0 is unused, and holds NaN like every unwritten position."""

    def __init__(self, decoder, ids: list[torch.Tensor], device: str = DEVICE):
        self.decoder, self.ids, self.device = decoder, ids, device
        needed = [-(-len(ids_of_row) // BLOCK_SIZE) for ids_of_row in ids]
        self.kv = decoder.kv(1 + sum(needed))
        self.state_slots = None
        if decoder.spec.is_recurrent:
            self.kv = replace(self.kv, states=decoder.states(len(ids)))
            self.state_slots = torch.arange(len(ids), device=device).flip(0).int()
        for blocks in (
            *self.kv.keys,
            *self.kv.values,
            *(state for layer in self.kv.states.values() for state in layer),
        ):
            blocks.fill_(torch.nan)
        self.block_tables = torch.full((len(ids), max(needed)), 10**6, dtype=torch.int32)
        for row, own in zip(self.block_tables, (1 + torch.randperm(sum(needed))).split(needed), strict=True):
            row[: len(own)] = own
        self.block_tables = self.block_tables.to(device)

    def batch(self, spans: list[tuple[int, int]]) -> PackedBatch:
        """The tokens of these spans, one for each sequence."""
        return PackedBatch(
            ids=torch.cat([ids_of_row[begin:end] for ids_of_row, (begin, end) in zip(self.ids, spans, strict=True)]),
            positions=torch.cat([torch.arange(*span) for span in spans]).int().to(self.device),
            cu_seqlens=torch.tensor([0] + [end - begin for begin, end in spans]).cumsum(0).int().to(self.device),
            lengths=torch.tensor([end for _, end in spans], dtype=torch.int32, device=self.device),
            block_tables=self.block_tables,
            state_slots=self.state_slots,
        )

    @torch.no_grad()
    def run(self, begins: list[int], ends: list[int]) -> list[torch.Tensor]:
        """Logits of the spans, in one forward."""
        batch = self.batch(list(zip(begins, ends, strict=True)))
        hidden = self.decoder.forward(batch, self.kv)
        return list(self.decoder.logits(hidden).split([e - b for b, e in zip(begins, ends, strict=True)]))

    @torch.no_grad()
    def decode(self, at: list[int]) -> torch.Tensor:
        """Logits of a decode step for the tokens at these positions."""
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
    return [model(ids_of_row[None]).logits[0].float() for ids_of_row in ids]


def cuda_decoder(model: torch.nn.Module, max_capture_size: int = 0) -> CudaDecoder:
    """A bound decoder in the model's dtype; without a device its graphs are eager."""
    capture = {} if DEVICE == "cuda" else {"capture": eager_capture}
    decoder = CudaDecoder(read_decoder(model), own_weights, model.dtype, max_capture_size, **capture)
    decoder.bind()
    return decoder


@pytest.mark.parametrize("variant", slow_but(["gemma2", LATENTS], VARIANTS))
def test_logits_equal_hugging_face(variant):
    """Prefill, decode steps in graphs with padding sequences, a token behind a prefix; every mechanism in float32."""
    model = small(variant)
    ids = sequences(tuple(length + NEW + 1 for length in PROMPTS))
    actual = Decoding(cuda_decoder(model, max_capture_size=4), ids).every_logit()
    assert distance(actual, hugging_face(model, ids)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["qwen3", "gptj", "phi3, rope on half a head"])
def test_unmerged_lora_matches_peft(variant):
    """Also in graphs, which stay valid after a training step and are captured again if an adapter's scale changes."""
    model = with_peft(small(variant)).eval()
    ids = sequences(tuple(length + NEW + 1 for length in PROMPTS))
    fused = fused_of(model)
    capture = {} if DEVICE == "cuda" else {"capture": eager_capture}
    weights = DecoderWeights(fused.layout, fused.snapshot, adapters=True)
    reads = {"lora_deltas": weights.lora_deltas, **capture}
    decoder = CudaDecoder(read_decoder(model), weights.tensor, torch.float32, 4, **reads)
    for change in ("none", "step", "scale"):
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.mul_(0.9 if "lora_" in name and change == "step" else 1.0)
        for adapted in fused.snapshot.adapted:
            adapted.wrapper.scaling["default"] *= 0.5 if change == "scale" else 1.0
        decoder.bind()
        assert (len(decoder.graphs) > 0) == (change == "step")
        assert distance(Decoding(decoder, ids).every_logit(), hugging_face(model, ids)) < TOLERANCE


@pytest.mark.parametrize(
    "variant", slow_but(["bloom"], [*QUICK, "phi3, rope on half a head", "mixtral", "gemma4_text"])
)
def test_half_precision_logits_round_as_hugging_face(variant):
    """Independent roundings would be √2 times as far apart; 0.4 to 0.85 measured."""
    model = small(variant)
    ids = sequences(tuple(length + NEW + 1 for length in PROMPTS))
    exact = hugging_face(model, ids)
    expected = hugging_face(model.to(HALF), ids)
    actual = Decoding(cuda_decoder(model), ids).every_logit()
    assert average(actual, expected) < average(expected, exact)


# Norm, queries keys and values, rope, attention, its projection, norm, up, activation, down. Parallel layers add the
# outputs of attention and MLP. Ministral 3 scales its queries.
# Latent attention: norm, latent of queries, its norm, queries, latent and key, their norm, rope and write, and two
# products around attention.
LATENT_LAUNCHES = dict.fromkeys(("youtu", "minicpm3"), 14)
OWN_INPUTS = dict.fromkeys(PER_LAYER_INPUTS, 18)  # also the norm of values, and a factor of the residual stream
LAUNCHES = {**OWN_INPUTS, "gpt_neox": 10, "gptj": 9, "falcon": 9, "phi": 9, "ministral3": 10, **LATENT_LAUNCHES}


@torch.no_grad()
@pytest.mark.skipif(DEVICE == "cuda", reason="counts launches of interpreted kernels")
@pytest.mark.parametrize("family", slow_but(CROSSED, ALL_FAMILIES))
def test_a_dense_layer_takes_nine_launches(family, monkeypatch):
    """In decode steps; of products with biases each is one, which cuBLASLt adds."""
    decoder = cuda_decoder(small(family))
    if any(layer.experts for layer in decoder.spec.layers):
        pytest.skip("experts take more")
    decoding, counts = Decoding(decoder, sequences((3, 3))), []
    batch, hidden = decoding.batch([(2, 3), (2, 3)]), torch.zeros(2, decoder.spec.hidden_size, device=DEVICE)
    for layers in (1, 1, 2):  # the first run makes tables
        with DeviceOps().on(monkeypatch) as device:
            decoder.decode_layers(hidden, batch, decoding.kv, 0, layers)
        counts.append(len(device.seen))
    assert counts[2] - counts[1] == LAUNCHES.get(family, 9)


def check_slices(variant: str) -> None:
    """Prefill and decode steps, in graphs, of two ranks' slices."""
    model = small(variant)
    layout, group = read_decoder(model), on_host(InferenceGroup(2), torch.device("cpu"))
    ids = sequences(tuple(length + NEW + 1 for length in PROMPTS))
    weights = Slices(layout, Shard(2, group.index))
    decoder = ShardedCudaDecoder(layout, weights, group, max_capture_size=4, capture=eager_capture)
    decoder.bind()
    parts = Decoding(decoder, ids).every_logit()
    assert len(decoder.graphs) and decoder.vocabulary.width < VOCABULARY
    actual = [decoder.vocabulary.whole(rows) for rows in parts]
    assert distance(actual, hugging_face(model, ids)) < TOLERANCE


@pytest.mark.skipif(DEVICE == "cuda", reason="two ranks of one device cannot exchange by NCCL")
@pytest.mark.parametrize(
    "variant", slow_but(["qwen3"], ["qwen3", "bloom", "mixtral", "olmo2", "falcon, new", "gemma4, mixture", LATENTS])
)
def test_slices_equal_hugging_face_at_two_ranks(ranks, variant):
    ranks.run(check_slices, variant)


def three_sequences(decoder: CudaDecoder) -> Decoding:
    """Three prompts of two tokens in the decoder's blocks, with room for more."""
    decoding = Decoding(decoder, sequences((5, 5, 5)))
    decoding.run([0, 0, 0], [2, 2, 2])
    return decoding


def test_graphs_are_captured_again_only_if_weights_move():
    """Blocks may move: kernels read their addresses from a table."""
    model = small("llama")
    decoder = cuda_decoder(model, max_capture_size=4)
    decoding = three_sequences(decoder)
    first = decoding.decode([2, 2, 2]).clone()
    graph = decoder.graphs.replays["decode", 4]
    assert torch.equal(decoding.decode([2, 2, 2]), first)
    decoder.bind()
    assert decoder.graphs.replays["decode", 4] is graph, "the graph was dropped without a move"
    moved = three_sequences(decoder)
    for blocks in (*decoding.kv.keys, *decoding.kv.values):
        blocks.fill_(torch.nan)
    assert torch.equal(moved.decode([2, 2, 2]), first)
    for blocks in (*decoding.kv.keys, *decoding.kv.values):
        assert torch.isnan(blocks).all(), "the blocks that are no longer lent were written"
    assert decoder.graphs.replays["decode", 4] is graph
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight * 2)
    decoder.bind()
    assert torch.allclose(moved.decode([2, 2, 2]), 2 * first)
    assert decoder.graphs.replays["decode", 4] is not graph


def test_a_replay_reads_the_blocks_that_it_is_given():
    """Also if another forward has run over other blocks since the last replay."""
    decoder = cuda_decoder(small("llama"), max_capture_size=4)
    decoder.graphs.capture = lambda run: lambda: None  # as on a device: no Python runs in a replay
    first = three_sequences(decoder)
    first.decode([2, 2, 2])
    three_sequences(decoder)
    first.decode([2, 2, 2])
    expected = kv_addresses(first.kv.keys, first.kv.values)
    assert torch.equal(decoder.kv_table.cpu(), expected)


@pytest.mark.slow
def test_sequences_longer_than_reserved_get_longer_tables_and_new_graphs(monkeypatch):
    monkeypatch.setattr("hybrid.decoders.cuda_decoder.MIN_TOKENS", BLOCK_SIZE)
    decoder = cuda_decoder(small("bloom"), max_capture_size=2)
    decoder.reserve(BLOCK_SIZE)
    short, long = Decoding(decoder, sequences((4,))), Decoding(decoder, sequences((BLOCK_SIZE + 2,)))
    short.run([0], [3])
    short.decode([3])
    state = decoder.state
    assert decoder.positions == BLOCK_SIZE and decoder.bias.shape[1] == BLOCK_SIZE and len(decoder.graphs)
    long.run([0], [BLOCK_SIZE])
    assert decoder.positions == 2 * BLOCK_SIZE and not len(decoder.graphs)
    expected = Decoding(cuda_decoder(small("bloom")), sequences((BLOCK_SIZE + 2,)))
    expected.run([0], [BLOCK_SIZE])
    torch.testing.assert_close(long.decode([BLOCK_SIZE]), expected.decode([BLOCK_SIZE]))
    assert decoder.state is not state


def test_a_batch_larger_than_every_captured_size_runs_without_a_graph():
    decoder = cuda_decoder(small("llama"), max_capture_size=2)
    assert three_sequences(decoder).decode([2, 2, 2]).shape == (3, VOCABULARY)
    assert not len(decoder.graphs)


def test_padding_sequences_write_only_block_0():
    decoder = cuda_decoder(small("llama"), max_capture_size=4)
    decoding = three_sequences(decoder)
    decoding.decode([2, 2, 2])
    for blocks in (*decoding.kv.keys, *decoding.kv.values):
        written = ~torch.isnan(blocks).flatten(2).any(2)  # [blocks, BLOCK_SIZE]
        assert written[0].nonzero().flatten().tolist() == [0]
        assert written[1:].sum() == 3 * 3


def test_a_batch_with_as_many_tokens_as_sequences_may_be_a_prefill():
    """Two new tokens of one sequence and none of the other: `cu_seqlens` assigns them."""
    decoder = cuda_decoder(small("llama"))
    packed, reference = (Decoding(decoder, sequences((5, 5))) for _ in range(2))
    packed.run([0, 0], [2, 2])
    actual = packed.run([2, 2], [4, 2])
    reference.run([0, 0], [4, 2])
    with torch.no_grad():
        expected = reference.decode([4, 2])
    torch.testing.assert_close(packed.decode([4, 2]), expected)
    assert [len(rows) for rows in actual] == [2, 0]


# The self-check, over a context of two splits


def checked_model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """As small as possible: the interpreter runs 290 tokens."""
    return small("llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1).to(dtype)


@pytest.mark.parametrize("max_capture_size", slow_but([4], [0, 1, 4]), ids="no one several".split())
def test_the_self_check_accepts_a_correct_decoder(max_capture_size):
    """Also decode steps, from graphs if they are on, with as many sequences as fit."""
    model = checked_model(HALF if max_capture_size else torch.float32)
    decoder = cuda_decoder(model, max_capture_size)
    assert self_check_reason(decoder, model) == ""
    assert (len(decoder.graphs) > 0) == (max_capture_size > 0)


def no_attention(q, *args):
    return torch.zeros_like(q)


def of_other_sequences_blocks(q, kv, lengths, block_tables, *features):
    return decode_attention(q, kv, lengths, block_tables.flip(0).contiguous(), *features)


def of_the_first_tiles(q, kv, lengths, block_tables, *features):
    return decode_attention(q, kv, lengths.clamp(max=CudaDecoder.context_block), block_tables, *features)


def of_averaged_splits(q, kv, lengths, block_tables, workspace, scale, softcap, window, *features):
    """As if the join ignored the sums of the splits' weights; only one sequence is as long as two splits."""
    inputs, split = (block_tables, workspace, scale, softcap), CudaDecoder.context_block // 2
    first = decode_attention(q, kv, lengths.clamp(max=split), *inputs, 0, *features)
    rest = decode_attention(q, kv, lengths, *inputs, int(lengths.max()) - split, *features)
    return torch.where((lengths > split)[:, None, None], (first + rest) / 2, first)


@pytest.mark.parametrize(
    "wrong",
    [slow(no_attention), slow(of_other_sequences_blocks), slow(of_the_first_tiles), slow(of_averaged_splits)],
)
def test_the_self_check_rejects_wrong_decode_attention(wrong, monkeypatch):
    """Only decode attention is wrong; prefill is correct."""
    monkeypatch.setattr("hybrid.kernels.triton_attention.decode_attention", wrong)
    model = checked_model()
    reason = self_check_reason(cuda_decoder(model), model)
    assert reason.startswith("layer 0, in decode steps, of the fused container differs"), reason


def with_stale_inputs(decoder: CudaDecoder, names: tuple[str, ...]) -> Callable:
    """A capture whose replays read these tensors of the state with their values at capture."""

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        run()
        held = [getattr(decoder.state, name) for name in names]
        captured = [tensor.clone() for tensor in held]

        def replay() -> None:
            now = [tensor.clone() for tensor in held]
            for tensor, before in zip(held, captured, strict=True):
                tensor.copy_(before)
            run()
            for tensor, own in zip(held, now, strict=True):
                tensor.copy_(own)

        return replay

    return capture


@pytest.mark.parametrize(
    "stale", [slow(("lengths",)), slow(("block_tables",)), slow(("positions",)), slow(("ids",)), ()], ids=str
)
def test_the_self_check_rejects_graphs_with_stale_inputs(stale):
    """The step itself is correct; (): a replay does nothing."""
    model = checked_model()
    decoder = cuda_decoder(model, max_capture_size=4)
    decoder.graphs.capture = with_stale_inputs(decoder, stale) if stale else lambda run: lambda: None
    reason = self_check_reason(decoder, model)
    assert reason.startswith("a decode step from a graph of the fused container differs"), reason
