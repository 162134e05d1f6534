"""Decoders over slices of the weights equal the one over whole weights, for every family, and have equal bits on ranks.

Ranks are threads of this process, see tests/host_groups.py.
"""

import copy
from dataclasses import replace

import pytest
import torch

from hybrid.decoders.batch import BLOCK_SIZE, PackedBatch, packed
from hybrid.decoders.cpu_decoder import CpuDecoder
from hybrid.decoders.tp_decoder import ShardedDecoder
from hybrid.kernels.cpu_library import cpu_library
from hybrid.kernels.host_group import HostGroup
from hybrid.models.reader import read_decoder
from hybrid.models.spec import DecoderLayout, ParamRef
from hybrid.runtime.parallel import InferenceGroup
from hybrid.sampling.vocabulary import whole_logits
from hybrid.weights.lora import LowRank
from hybrid.weights.slices import WHOLE, Shard, decoder_sizes, shard_spec, sizes_that_fit, slices_of
from tests.decoders import test_recurrent_mixers as recurrent
from tests.decoders.test_cpu_decoder import threads
from tests.decoders.test_torch_decoder import VARIANTS, own_weights
from tests.host_groups import host_groups, on_every_rank
from tests.marks import slow_but
from tests.tiny_models import RECURRENT, VOCABULARY, in_float64, tiny_model

LENGTHS, STEPS = (45, 7, 33), 3
TOLERANCE = 4e-7  # of float32 logits, as a share of the largest
CPU = torch.device("cpu")


class Slices:
    """A rank's slices of a model without adapters, as DecoderWeights gives them."""

    def __init__(self, layout: DecoderLayout, shard: Shard, experts: Shard = WHOLE):
        self.layout, self.slices, self.copies = layout, slices_of(layout, shard, experts), {}

    def tensor(self, ref: ParamRef) -> torch.Tensor | None:
        whole = own_weights(ref)
        if ref not in self.copies:
            part = None if whole is None else self.slices[ref].of(whole.detach())
            self.copies[ref] = None if part is None else part.contiguous()
        return self.copies[ref]

    def embedding(self) -> torch.Tensor:
        return own_weights(self.layout.outer["embedding.weight"])

    def lora_deltas(self, ref: ParamRef) -> list[LowRank]:
        return []


def cpu_decoder(layout: DecoderLayout, group: HostGroup | None = None) -> CpuDecoder:
    """The kernels' decoder; with a group over this rank's slices."""
    weights, dtype = own_weights, own_weights(layout.outer["embedding.weight"]).dtype
    if group is not None:
        shard, shards = Shard(group.tensor.size, group.tensor.index), group.size // group.tensor.size
        experts = WHOLE if shards == 1 else Shard(shards, group.index // group.tensor.size)
        weights = Slices(layout, shard, experts).tensor
        layout = replace(layout, spec=shard_spec(layout.spec, shard))
    decoder = CpuDecoder(layout, weights, dtype, cpu_library(), group=group)
    decoder.bind()
    return decoder


def torch_decoder(layout: DecoderLayout, group: HostGroup) -> ShardedDecoder:
    """The reference decoder over this rank's slices."""
    decoder = ShardedDecoder(layout, Slices(layout, Shard(group.size, group.index)), group)
    decoder.bind()
    return decoder


def batches() -> list[PackedBatch]:
    """A prefill of all sequences but their last tokens, and the decode steps of these."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(VOCABULARY, (length + STEPS,), generator=generator) for length in LENGTHS]
    width = -(-(max(LENGTHS) + STEPS) // BLOCK_SIZE)
    blocks = [list(range(1 + n * width, 1 + (n + 1) * width)) for n in range(len(ids))]
    steps = [[(length + step, length + step + 1) for length in LENGTHS] for step in range(STEPS)]
    return [
        packed([row[a:b] for row, (a, b) in zip(ids, spans, strict=True)], [a for a, _ in spans], blocks, CPU)
        for spans in ([(0, length) for length in LENGTHS], *steps)
    ]


@torch.no_grad()
def logits_of(decoder) -> torch.Tensor:
    """Logits after every token of `batches`, of the whole vocabulary."""
    decoder.reserve(max(LENGTHS) + STEPS)
    kv = decoder.kv(1 + 2 * len(LENGTHS))
    parts = [decoder.logits(decoder.forward(batch, kv)) for batch in batches()]
    return whole_logits(torch.cat(parts), decoder.vocabulary)


def require_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance * float(expected.abs().max()), rtol=0)


def layout_of(variant: str, dtype: torch.dtype = torch.float32) -> DecoderLayout:
    family, changes = VARIANTS[variant]
    return read_decoder(tiny_model(family, dtype=dtype, **changes).eval())


QUICK = (
    *("llama", "olmo2", "gpt2", "opt", "bloom", "gptj", "falcon, new", "gemma2", "mixtral", "phi3"),
    *("gpt_oss", "glm4_moe", "deepseek_v3"),
)


@pytest.mark.parametrize("variant", slow_but(QUICK, VARIANTS))
def test_slices_give_the_logits_of_whole_weights_and_the_same_bits_on_every_rank(variant):
    layout = layout_of(variant)
    fits = sizes_that_fit(layout.spec.num_heads, layout.spec.num_kv_heads)
    expected = logits_of(cpu_decoder(layout))
    share = 4 if variant.startswith("gemma4") else 3  # its layers have more sums: 1.204e-6 measured
    for size in (size for size in (2, 3, 4) if size in fits):
        actual = on_every_rank(host_groups(size), lambda group: logits_of(cpu_decoder(layout, group)))
        require_close(actual[0], expected, share * TOLERANCE)
        assert all(torch.equal(logits, actual[0]) for logits in actual)


@pytest.mark.parametrize("variant", slow_but(("llama", "mixtral"), QUICK))
def test_the_kernels_equal_torchs_operations_over_the_same_slices(variant):
    layout = layout_of(variant)
    expected, actual = (
        on_every_rank(host_groups(2), lambda group, make=make: logits_of(make(layout, group)))[0]
        for make in (torch_decoder, cpu_decoder)
    )
    require_close(actual, expected, 5e-6)


@pytest.mark.parametrize("variant", slow_but(("llama", "bloom", "mixtral"), QUICK))
def test_bfloat16_is_as_near_to_float32_as_whole_weights_are(variant):
    """Sums over ranks are rounded once, from float32. Where a mixture's experts are nearly as likely, rounding sends a
    token to another one. Both must do so with the same tokens but 2 of 94; the errors are of the others."""
    layout = layout_of(variant, torch.bfloat16)
    exact = logits_of(cpu_decoder(read_decoder(float32_of(variant))))
    whole = logits_of(cpu_decoder(layout))
    sliced = on_every_rank(host_groups(2), lambda group: logits_of(cpu_decoder(layout, group)))[0]
    of_tokens = [(logits - exact).square().mean(dim=-1).sqrt() for logits in (sliced, whole)]
    rerouted = [(errors > 5 * errors.median()) & (layout.spec.num_experts > 0) for errors in of_tokens]
    assert (rerouted[0] ^ rerouted[1]).sum() <= 2
    errors = [errors[~(rerouted[0] | rerouted[1])].square().mean().sqrt() for errors in of_tokens]
    assert 0 < errors[0] < 1.2 * errors[1], errors


def float32_of(variant: str) -> torch.nn.Module:
    """The variant's model with weights that bfloat16 can represent."""
    family, changes = VARIANTS[variant]
    return tiny_model(family, dtype=torch.bfloat16, **changes).float().eval()


def states_logits(decoder) -> torch.Tensor:
    """The whole vocabulary's logits of sequences with states, in pieces of several tokens and of one."""
    decoded = recurrent.logits_of(decoder, recurrent.sequences(), [20, 1, 1, 64])
    return whole_logits(torch.cat(decoded), decoder.vocabulary)


RECURRENT_CASES = {family: (family, {}) for family in RECURRENT} | recurrent.VARIANTS
# Slices of whole groups of heads, of parts of the only group, of each kind of mixer, without a norm, with biases.
QUICK_RECURRENT = ("qwen3_5_text", "kimi_linear", "nemotron_h", "one group", "falcon_h1", "convolutions' biases")


def require_exact_slices(model: torch.nn.Module, sizes: tuple[int, ...]) -> None:
    """On the kernels and in torch's operations: as far from float64 as whole mixers, with equal bits on all ranks."""
    layout = read_decoder(model)
    exact = torch.cat(recurrent.whole_logits_of(in_float64(copy.deepcopy(model)), recurrent.sequences()))
    whole = (states_logits(cpu_decoder(layout)) - exact).abs().max()
    for size in sizes:
        for make in (cpu_decoder, torch_decoder):
            actual = on_every_rank(host_groups(size), lambda group, make=make: states_logits(make(layout, group)))
            assert (actual[0] - exact).abs().max() < 2 * whole + 1e-6 * exact.abs().max()
            assert all(torch.equal(logits, actual[0]) for logits in actual)


@pytest.mark.parametrize("case", slow_but(QUICK_RECURRENT, RECURRENT_CASES))
def test_slices_of_recurrent_mixers_are_as_exact_as_whole_ones(case):
    family, changes = RECURRENT_CASES[case]
    model = tiny_model(family, **changes).eval()
    sizes = tuple(size for size in (2, 4) if size in decoder_sizes(read_decoder(model).spec))
    assert 2 in sizes
    require_exact_slices(model, sizes)


@pytest.mark.parametrize("case", slow_but(("qwen3_5_text", "one group"), QUICK_RECURRENT))
def test_slices_of_recurrent_mixers_in_bfloat16_are_as_near_to_float32(case):
    family, changes = RECURRENT_CASES[case]
    models = [tiny_model(family, dtype=torch.bfloat16, **changes).eval() for _ in range(2)]
    exact = states_logits(cpu_decoder(read_decoder(models[0].float())))
    layout = read_decoder(models[1])
    whole = states_logits(cpu_decoder(layout))
    sliced = on_every_rank(host_groups(2), lambda group: states_logits(cpu_decoder(layout, group)))[0]
    # A token of a mixture may be routed to other experts, by either.
    errors = [(logits - exact).square().mean(dim=-1).sqrt().median() for logits in (sliced, whole)]
    assert 0 < errors[0] < 1.3 * errors[1], errors


@pytest.mark.parametrize("case", ["qwen3_5_text", "one group"])
def test_bits_of_sliced_recurrent_mixers_depend_on_no_piece_and_no_thread(case):
    family, changes = RECURRENT_CASES[case]
    layout, ids = read_decoder(tiny_model(family, **changes).eval()), recurrent.sequences()

    def in_pieces(group: HostGroup) -> list[torch.Tensor]:
        decoder = cpu_decoder(layout, group)
        parts = [recurrent.logits_of(decoder, ids, pieces) for pieces in ([max(map(len, ids))], [20, 1, 1, 64])]
        return [torch.cat(rows) for rows in parts]

    one = on_every_rank(host_groups(2), in_pieces)
    assert all(torch.equal(*pieces) for pieces in one)
    with threads(2):
        two = on_every_rank(host_groups(2), in_pieces)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(one, two, strict=True))


def test_recurrent_mixers_are_divided_by_heads_and_groups():
    """A group of several is not divided over ranks; the only one is, and its norm is a sum over the ranks."""
    sizes = {
        case: decoder_sizes(read_decoder(tiny_model(family, **changes)).spec)
        for case, (family, changes) in {
            "two groups, two key and value heads": ("bamba", {}),
            "one group": ("bamba", {"mamba_n_groups": 1}),
            "mixers alone": ("mamba2", {"n_groups": 4}),
            "two key heads": ("qwen3_5_text", {}),
            "channels": ("lfm2", {}),
        }.items()
    }
    assert sizes == {
        "two groups, two key and value heads": [1, 2],
        "one group": [1, 2, 4],
        "mixers alone": [1, 2, 4],
        "two key heads": [1, 2],
        "channels": [1, 2, 4],
    }


@pytest.mark.parametrize("variant", ["llama", "olmo2", "mixtral", "falcon, new"])
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(variant):
    layout = layout_of(variant)

    def rows(group: HostGroup) -> tuple[torch.Tensor, torch.Tensor]:
        decoder = cpu_decoder(layout, group)
        decoder.reserve(max(LENGTHS))
        kv, batch = decoder.kv(1 + 2 * len(LENGTHS)), batches()[0]
        together = decoder.forward(batch, kv)
        last = int(batch.cu_seqlens[-2])
        alone = packed([batch.ids[last:]], [0], [batch.block_tables[-1].tolist()], CPU)
        return together[last:], decoder.forward(alone, kv)

    for together, alone in on_every_rank(host_groups(2), rows):
        assert torch.equal(together, alone)
    with threads(2):
        two = logits_of(cpu_decoder(layout))
        sliced = on_every_rank(host_groups(2), lambda group: logits_of(cpu_decoder(layout, group)))
    assert torch.equal(two, logits_of(cpu_decoder(layout)))
    assert torch.equal(sliced[0], on_every_rank(host_groups(2), lambda g: logits_of(cpu_decoder(layout, g)))[0])


@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe, weights not normalised", "gpt_oss", "qwen2_moe"])
@pytest.mark.parametrize(("tensor_size", "size"), [(1, 2), (1, 4), (2, 4)])
def test_experts_divided_over_ranks_give_the_logits_of_whole_weights(variant, tensor_size, size):
    """The rest of the model is whole on every rank, or sliced over neighbouring ranks."""
    layout = layout_of(variant)
    expected = logits_of(cpu_decoder(layout))
    groups = host_groups(size)
    for start in range(0, size, tensor_size):
        for group, tensor in zip(groups[start : start + tensor_size], host_groups(tensor_size), strict=True):
            group.tensor = tensor
    for logits in on_every_rank(groups, lambda group: logits_of(cpu_decoder(layout, group))):
        require_close(logits, expected, 3 * TOLERANCE)


def test_ranks_exchange_two_sums_a_layer_and_one_for_the_embedding():
    layout = layout_of("llama")
    groups = host_groups(2)

    def rounds(group: HostGroup) -> int:
        decoder = cpu_decoder(layout, group)
        decoder.reserve(64)
        kv = decoder.kv(7)
        decoder.forward(batches()[0], kv)
        before = group.record.round
        decoder.decode(batches()[1], kv)
        return group.record.round - before

    assert on_every_rank(groups, rounds) == [2 * len(layout.spec.layers) + 1] * 2


def test_ranks_of_several_hosts_exchange_through_their_process_group(monkeypatch):
    """Without shared memory the kernels call back for every sum; an error there is raised by the forward."""
    layout, group, counts = layout_of("llama"), HostGroup(InferenceGroup(2, connected=False)), []
    monkeypatch.setattr(InferenceGroup, "sum", lambda self, tensor: counts.append(tensor.numel()))
    decoder = cpu_decoder(layout, group)
    decoder.reserve(64)
    kv = decoder.kv(7)
    decoder.forward(batches()[0], kv)
    assert counts == [sum(LENGTHS) * layout.spec.hidden_size] * (2 * len(layout.spec.layers) + 1)

    def lost(self, tensor):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(InferenceGroup, "sum", lost)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        decoder.forward(batches()[0], kv)
