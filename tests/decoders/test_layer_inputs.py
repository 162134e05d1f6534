"""The layers' inputs that decoders keep are what Hugging Face's own layers receive, and keeping them changes no bit."""

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from hybrid.decoders.batch import BLOCK_SIZE, LayerActivations, packed
from hybrid.decoders.torch_decoder import WholeDecoder
from hybrid.generation.routing import recorded_routing, routers_of
from hybrid.models.model_info import ModelInfo
from hybrid.models.reader import read_decoder
from tests.decoders import test_cpu_decoder, test_sharded_decoder, test_torch_decoder
from tests.decoders.test_torch_decoder import VARIANTS
from tests.host_groups import host_groups, on_every_rank
from tests.marks import slow_but
from tests.tiny_models import CROSSED, LATENT_FAMILIES, PER_LAYER_INPUTS, VOCABULARY, WITHOUT_TRITON, tiny_model

LENGTHS, LATER = (45, 7, 33), 9  # tokens of the sequences; so many of each follow in a second forward
SPARE = 3  # rows of the memory that no token is written to
# Of a layer's inputs, as a share of the largest: sums in another order.
TOLERANCE = 1e-5
QUICK = ("llama", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "opt", "bloom", "gptj", "mixtral", "falcon, new")


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


@contextmanager
def recorded_inputs(model: nn.Module) -> Iterator[list[list[torch.Tensor]]]:
    """Inside the block, the inputs of the model's layers, and last those of its final norm, are appended to the list of
    each."""
    weight = read_decoder(model).outer.get("final_norm.weight")  # OLMo's norms have none
    final_norm = model.get_submodule("model.norm") if weight is None else weight.module
    modules = [*ModelInfo(model).layers, final_norm]
    inputs: list[list[torch.Tensor]] = [[] for _ in modules]

    def hook(calls: list[torch.Tensor]) -> Callable:
        def keep(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if calls is inputs[-1] and len(calls) == len(inputs[-2]):  # NanoChat's norm is of the embedding too
                return
            calls.append((args[0] if args else kwargs["hidden_states"]).detach().clone())

        return keep

    pairs = zip(modules, inputs, strict=True)
    handles = [module.register_forward_pre_hook(hook(calls), with_kwargs=True) for module, calls in pairs]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def hugging_face(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs of the model's layers and final norm, [layers + 1, tokens, hidden], and the experts of its routers,
    int16 [tokens, layers with experts, experts per token]: of each whole sequence, alone, one after the other."""
    # PhiMoE's routers choose without `torch.topk`: their experts are not recorded.
    routing = nullcontext([]) if model.config.model_type == "phimoe" else recorded_routing(model)
    with recorded_inputs(model) as inputs, routing as calls:
        for ids in sequences():
            model(ids[None], use_cache=False)
    experts = [torch.cat(layer) for layer in calls]
    stacked = torch.stack([torch.cat([call[0] for call in layer]) for layer in inputs])
    return stacked, torch.stack(experts, dim=1) if experts else torch.zeros(len(stacked[0]), 0, 0)


@torch.no_grad()
def kept(decoder: WholeDecoder) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of a decoder that runs all sequences in two forwards, the second one over the last LATER tokens of each.
    Checks that the outputs are the bits of a decoder that keeps nothing, and that no other memory is written."""
    ids, spec = sequences(), decoder.spec
    decoder.reserve(max(LENGTHS))
    each = [-(-length // BLOCK_SIZE) for length in LENGTHS]
    ends = torch.tensor(each).cumsum(0).tolist()
    blocks = [list(range(1 + end - count, 1 + end)) for end, count in zip(ends, each, strict=True)]
    splits = [max(length - LATER, 0) for length in LENGTHS]
    first = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    order = torch.randperm(sum(LENGTHS) + SPARE, generator=torch.Generator().manual_seed(1))
    shape = len(spec.layers) + 1, len(order), spec.hidden_size
    layer_inputs = torch.full(shape, torch.nan, dtype=decoder.dtype)
    router_indices = torch.full((len(order), len(spec.moe_layers), spec.experts_per_token), -1, dtype=torch.int16)
    plain, keeping = decoder.kv(1 + sum(each)), decoder.kv(1 + sum(each))
    for kv in (plain, keeping):
        if kv.router_indices is not None:
            kv.router_indices.fill_(-1)
    for begins, stops in (([0] * len(ids), splits), (splits, LENGTHS)):
        spans = list(zip(begins, stops, strict=True))
        pieces = [row[begin:stop] for row, (begin, stop) in zip(ids, spans, strict=True)]
        batch = packed(pieces, begins, blocks, decoder.device)
        rows = torch.cat([torch.arange(at + begin, at + stop) for at, (begin, stop) in zip(first, spans, strict=False)])
        activations = LayerActivations(layer_inputs, router_indices, order[rows])
        hidden = decoder.forward(batch, keeping, activations)
        assert torch.equal(hidden, decoder.forward(batch, plain))
        assert torch.equal(hidden.to(decoder.dtype), layer_inputs[-1, order[rows]])
        if plain.router_indices is not None:
            assert torch.equal(plain.router_indices, keeping.router_indices)
    assert layer_inputs[:, order[sum(LENGTHS) :]].isnan().all(), "memory of no token is written"
    assert (router_indices[order[sum(LENGTHS) :]] == -1).all(), "memory of no token is written"
    return layer_inputs[:, order[: sum(LENGTHS)]], router_indices[order[: sum(LENGTHS)]]


def require_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Layers' inputs, one by one: each layer's largest value is another."""
    for layer, (own, other) in enumerate(zip(actual.float(), expected.float(), strict=True)):
        difference = ((own - other).abs().max() / other.abs().max()).nan_to_num(torch.inf).item()
        assert difference < tolerance, f"input of layer {layer}: {difference:.2g}"


def require_equals_hugging_face(decoder: WholeDecoder, model: nn.Module) -> None:
    layer_inputs, router_indices = kept(decoder)
    expected, experts = hugging_face(model)
    require_close(layer_inputs, expected, TOLERANCE)
    if experts.numel():
        # Ours are in the order of their scores.
        if "sorted=False" in inspect.getsource(type(routers_of(model)[0]).forward):
            router_indices, experts = (indices.sort(dim=-1).values for indices in (router_indices, experts))
        assert torch.equal(router_indices, experts)


@pytest.mark.parametrize("variant", slow_but([v for v in VARIANTS if VARIANTS[v][0] in CROSSED], VARIANTS))
def test_the_cpu_kernels_keep_what_the_models_own_layers_receive(variant):
    family, changes = VARIANTS[variant]
    model = tiny_model(family, **changes).eval()
    require_equals_hugging_face(test_cpu_decoder.decoder_of(model), model)


@pytest.mark.parametrize("variant", slow_but(QUICK, VARIANTS))
def test_torchs_operations_keep_what_the_models_own_layers_receive(variant):
    family, changes = VARIANTS[variant]
    model = tiny_model(family, **changes).eval()
    require_equals_hugging_face(test_torch_decoder.decoder_of(model), model)


@pytest.mark.parametrize("variant", slow_but(QUICK, VARIANTS))
def test_bfloat16_inputs_are_as_near_to_float32_as_hugging_faces(variant):
    """On average: every layer's input is rounded, and roundings differ where sums do. Of tokens that all three send to
    the same experts."""
    family, changes = VARIANTS[variant]
    model = tiny_model(family, **changes).eval()
    exact, exact_experts = hugging_face(model)
    model = model.bfloat16()
    expected, experts = hugging_face(model)
    for decoder in (
        test_cpu_decoder.decoder_of(model, torch.bfloat16),
        test_torch_decoder.decoder_of(model, torch.bfloat16),
    ):
        layer_inputs, router_indices = kept(decoder)
        assert layer_inputs.dtype == torch.bfloat16
        alike = torch.ones(layer_inputs.shape[1], dtype=torch.bool)
        if experts.numel():
            ours, theirs, reference = (each.sort(dim=-1).values for each in (router_indices, experts, exact_experts))
            alike = ((ours == reference) & (theirs == reference)).flatten(1).all(dim=1)
            assert alike.float().mean() > 0.9
        assert torch.equal(layer_inputs[0], expected[0]) or family in (
            "gemma2",
            "gemma3_text",
            "granite",
            "opt",
            "bloom",
        )
        # A token attends to others that were sent to another expert, in either: 0.75 to 1.23 measured.
        share = 1.3 if family in (*LATENT_FAMILIES, *PER_LAYER_INPUTS, *WITHOUT_TRITON) else 1.2
        for own, other, reference in zip(layer_inputs.float(), expected.float(), exact, strict=True):
            bound = share * (other - reference)[alike].abs().mean()
            assert (own - reference)[alike].abs().mean() <= bound


@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe"])
def test_experts_are_kept_in_blocks_too_where_the_decoder_records_them(variant):
    family, changes = VARIANTS[variant]
    model = tiny_model(family, **changes).eval()
    for decoder in (test_cpu_decoder.decoder_of(model), test_torch_decoder.decoder_of(model)):
        decoder.records_experts = True
        require_equals_hugging_face(decoder, model)


def test_layers_one_by_one_keep_the_inputs_of_the_whole_forward():
    """As a decoder with streamed weights runs them."""
    model = tiny_model("mixtral").eval()
    for decoder in (test_cpu_decoder.decoder_of(model), test_torch_decoder.decoder_of(model)):
        expected, experts = kept(decoder)
        whole = decoder.forward

        def forward(batch, kv, activations=None, decoder=decoder):
            hidden = decoder.embed(batch.ids, batch.positions)
            for layer in range(len(decoder.spec.layers)):
                hidden = decoder.layers(hidden, batch, kv, layer, layer + 1, activations)
            return hidden

        decoder.forward = forward
        layer_inputs, router_indices = kept(decoder)
        decoder.forward = whole
        assert torch.equal(layer_inputs, expected)
        assert torch.equal(router_indices, experts)


@pytest.mark.parametrize("count", [2, 3])
def test_threads_change_no_bit(count):
    decoder = test_cpu_decoder.decoder_of(tiny_model("gemma2").eval())
    expected, _ = kept(decoder)
    with test_cpu_decoder.threads(count):
        assert torch.equal(kept(decoder)[0], expected)


@pytest.mark.parametrize(
    "variant", slow_but(["gemma2", "qwen3_moe"], ["gemma2", "qwen3_moe", "falcon, new", "opt", "gptj"])
)
def test_ranks_with_slices_keep_the_same_bits(variant):
    """The residual stream is whole on every rank."""
    family, changes = VARIANTS[variant]
    model = tiny_model(family, **changes).eval()
    layout, (expected, experts) = read_decoder(model), hugging_face(model)
    for make in (test_sharded_decoder.cpu_decoder, test_sharded_decoder.torch_decoder):
        results = on_every_rank(host_groups(2), lambda group, make=make: kept(make(layout, group)))
        for layer_inputs, router_indices in results:
            require_close(layer_inputs, expected, TOLERANCE)
            assert torch.equal(layer_inputs, results[0][0])
            assert not experts.numel() or torch.equal(router_indices, experts)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("variant", slow_but(["gemma2"], ["gemma2", "llama", "mixtral", "falcon, new", "olmo2"]))
def test_triton_kernels_keep_the_sums_that_they_norm(variant):
    """There the next layer's norm kernel adds what a layer adds to the residual stream."""
    from tests.decoders import test_cuda_decoder as cuda

    model = cuda.small(variant)
    decoder = cuda.cuda_decoder(model)
    ids = cuda.sequences((33, 3))
    run, spec = cuda.Decoding(decoder, ids), decoder.spec
    batch = run.batch([(0, 33), (0, 3)])
    layer_inputs = torch.full((len(spec.layers) + 1, 36, spec.hidden_size), torch.nan, device=cuda.DEVICE)
    shape = 36, len(spec.moe_layers), spec.experts_per_token
    router_indices = torch.full(shape, -1, dtype=torch.int16, device=cuda.DEVICE)
    rows = torch.randperm(36, generator=torch.Generator().manual_seed(1)).to(cuda.DEVICE)
    with torch.no_grad():
        hidden = decoder.forward(batch, run.kv, LayerActivations(layer_inputs, router_indices, rows))
        assert torch.equal(hidden, decoder.forward(batch, run.kv))
        # PhiMoE's routers choose without `torch.topk`: their experts are not recorded.
    routing = nullcontext([]) if model.config.model_type == "phimoe" else recorded_routing(model)
    with recorded_inputs(model) as inputs, routing as calls:
        for row in ids:
            model(row[None], use_cache=False)
    expected = torch.stack([torch.cat([call[0] for call in layer]) for layer in inputs])
    require_close(layer_inputs[:, rows], expected, TOLERANCE)
    for number, layer in enumerate(calls):
        assert torch.equal(router_indices[rows, number], torch.cat(layer))
