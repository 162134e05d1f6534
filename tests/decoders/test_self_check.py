"""The self-check runs prefill and decode as they will run; it rejects defects, with massive activations too, and
accepts correct decoders."""

import copy
import dataclasses
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from hybrid.decoders import self_check, torch_decoder
from hybrid.decoders.batch import BLOCK_SIZE, PackedBatch, PagedKV
from hybrid.decoders.cpu_decoder import CpuDecoder
from hybrid.decoders.int8_decoder import Int8Decoder
from hybrid.decoders.self_check import require_equal
from hybrid.decoders.torch_decoder import TorchDecoder
from hybrid.kernels import torch_ops
from hybrid.kernels.cpu_library import cpu_library
from hybrid.models.model_info import ModelInfo
from hybrid.models.reader import read_decoder
from hybrid.models.spec import UnsupportedModel
from hybrid.models.structure import read_structure
from hybrid.weights.int8 import in_int8
from tests.decoders.test_torch_decoder import own_weights
from tests.engines import engine_of, settings
from tests.marks import slow_but
from tests.tiny_models import ALL_FAMILIES, CROSSED, prompts, tiny_model, twin

CHANNEL, MASSIVE = 5, 1000.0
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
by_name = {"ids": lambda value: str(value).removeprefix("torch.")}


def cases(families: Iterable[str]) -> list:
    """Families and dtypes: all families in bfloat16, Llama in every dtype; other cases are slow tests."""
    return [
        pytest.param(family, dtype, marks=[] if "llama" in family or dtype == torch.bfloat16 else pytest.mark.slow)
        for family in families
        for dtype in DTYPES
    ]


def decoder_of(model: nn.Module, kind: type | None = None) -> CpuDecoder | TorchDecoder:
    """A bound decoder in the model's dtype; kind: None for an engine's default on this machine's CPU."""
    kind = kind or (TorchDecoder if model.dtype == torch.float16 or cpu_library() is None else CpuDecoder)
    more = (cpu_library(),) if kind is CpuDecoder else ()
    decoder = kind(read_decoder(model), own_weights, model.dtype, *more)
    decoder.bind()
    return decoder


@torch.no_grad()
def self_check_reason(decoder: object, model: nn.Module) -> str:
    """Why the self-check rejects a decoder of `model`; "" if it accepts it."""
    try:
        require_equal(decoder, ModelInfo(model))
    except UnsupportedModel as reason:
        return str(reason)
    return ""


@torch.no_grad()
def with_massive_channel(model: nn.Module, family: str, tokens: str) -> nn.Module:
    """`model` with a channel of the residual stream near MASSIVE from the embedding on, as in real models.

    tokens: "every", or "some", of which there are several in every sequence.
    """
    rows = slice(None) if tokens == "every" else slice(0, 20)
    embedding = model.get_input_embeddings().weight
    if model.config.tie_word_embeddings:  # logits of MASSIVE times a channel of the last norm would be all alike
        model.get_output_embeddings().weight = nn.Parameter(embedding.clone())
    if family == "bloom":
        model.transformer.word_embeddings_layernorm.bias[CHANNEL] = MASSIVE
    elif family in ("gpt2", "opt"):
        table = model.transformer.wpe if family == "gpt2" else model.model.decoder.embed_positions
        table.weight[rows, CHANNEL] = MASSIVE
    else:
        multiplier = {"gemma2": 32**0.5, "gemma3_text": 32**0.5, "granite": 3.0}.get(family, 1.0)
        embedding[rows, CHANNEL] = MASSIVE / multiplier
    return model


# A correct decoder is accepted


@pytest.mark.parametrize(("family", "dtype"), cases(ALL_FAMILIES), **by_name)
def test_a_correct_decoder_is_accepted(family, dtype):
    """Of every family, without massive activations, with some, and with one at every token."""
    for seed, tokens in enumerate(("no", "some", "every")):
        model = tiny_model(family, seed=seed, dtype=dtype).eval()
        if tokens != "no":
            with_massive_channel(model, family, tokens)
        assert self_check_reason(decoder_of(model), model) == "", tokens


@pytest.mark.parametrize("kind", slow_but([CpuDecoder], [CpuDecoder, TorchDecoder]))
def test_a_correct_decoder_is_accepted_for_every_seed(kind):
    """50 models with massive activations."""
    for seed in range(50):
        model = tiny_model("llama", seed=seed, dtype=torch.bfloat16).eval()
        with_massive_channel(model, "llama", "some" if seed % 2 else "every")
        assert self_check_reason(decoder_of(model, kind), model) == "", seed


@pytest.mark.parametrize("dtype", DTYPES, **by_name)
def test_a_pretrained_model_is_accepted(dtype, stories260k):
    model = AutoModelForCausalLM.from_pretrained(stories260k, dtype=dtype).eval()
    assert self_check_reason(decoder_of(model), model) == ""


def test_eighty_layers_are_accepted():
    """Rounding differences accumulate over the layers of a step."""
    model = tiny_model("llama", dtype=torch.bfloat16, num_hidden_layers=80).eval()
    assert self_check_reason(decoder_of(model), model) == ""


# A wrong layer is rejected

MLPS = {"gemma2": "post_feedforward_layernorm", "opt": "fc2", "bloom": "mlp.dense_4h_to_h"}
ATTENTIONS = {"gemma2": "post_attention_layernorm", "gpt2": "attn", "bloom": "self_attention.dense"}
OUTPUTS = {"gpt2": "attn.c_proj", "opt": "self_attn.out_proj", "bloom": "self_attention.dense"}
NORMS = {"gpt2": "ln_2", "opt": "final_layer_norm", "gemma2": "pre_feedforward_layernorm"}


def scaled(module: nn.Module, factor: float) -> None:
    """Multiply a module's outputs by `factor`."""

    def hook(module: nn.Module, args: tuple, output: object) -> object:
        return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor

    module.register_forward_hook(hook)


def without_head(module: nn.Module) -> None:
    """Zero the last of four heads in the inputs of attention's output projection."""

    def hook(module: nn.Module, args: tuple) -> tuple:
        kept = args[0].clone()
        kept[..., -(kept.shape[-1] // 4) :] = 0
        return (kept,)

    module.register_forward_pre_hook(hook)


@torch.no_grad()
def without_weight(norm: nn.Module) -> None:
    """Set a norm's effective weight to one."""
    norm.weight.fill_(0.0 if "Gemma" in type(norm).__name__ else 1.0)


DEFECTS: dict[str, Callable[[nn.Module, str], None]] = {
    "MLP doubled": lambda layer, family: scaled(layer.get_submodule(MLPS.get(family, "mlp")), 2.0),
    "MLP dropped": lambda layer, family: scaled(layer.get_submodule(MLPS.get(family, "mlp")), 0.0),
    "MLP negated": lambda layer, family: scaled(layer.get_submodule(MLPS.get(family, "mlp")), -1.0),
    "attention dropped": lambda layer, family: scaled(layer.get_submodule(ATTENTIONS.get(family, "self_attn")), 0.0),
    "a head dropped": lambda layer, family: without_head(layer.get_submodule(OUTPUTS.get(family, "self_attn.o_proj"))),
    "a norm's weight ignored": lambda layer, family: without_weight(
        layer.get_submodule(NORMS.get(family, "post_attention_layernorm"))
    ),
}


@pytest.mark.parametrize(
    ("family", "dtype"), cases(["llama", "qwen2", "mistral", "mixtral", "gemma2", "gpt2", "opt", "bloom"]), **by_name
)
@pytest.mark.parametrize("tokens", slow_but(["some"], ["no", "some", "every"]))
def test_every_defect_of_a_layer_is_rejected(tokens, family, dtype):
    """With and without massive activations; the same decoder is accepted for the correct model."""
    model = tiny_model(family, dtype=dtype).eval()
    if tokens != "no":
        with_massive_channel(model, family, tokens)
    with torch.no_grad():  # a trained model's norms are not near one
        norm = read_structure(model).layers[1].module.get_submodule(NORMS.get(family, "post_attention_layernorm"))
        norm.weight.add_(torch.randn_like(norm.weight), alpha=0.5)
    decoder = decoder_of(model)
    assert self_check_reason(decoder, model) == ""
    for what, apply in DEFECTS.items():
        wrong = copy.deepcopy(model)
        apply(read_structure(wrong).layers[1].module, family)
        assert self_check_reason(decoder, wrong).startswith("layer 1 of the fused container differs"), what


@pytest.mark.parametrize("defect", ["MLP doubled", "MLP dropped", "MLP negated", "attention dropped"])
def test_defects_small_against_the_residual_stream_are_rejected(defect):
    """The residual stream is thirty times as large: most of the missing terms are below its rounding."""
    model = tiny_model("llama", dtype=torch.bfloat16).eval()
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding.mul_(30 / embedding.float().square().mean().sqrt())
    decoder, wrong = decoder_of(model), copy.deepcopy(model)
    assert self_check_reason(decoder, model) == ""
    DEFECTS[defect](wrong.model.layers[1], "llama")
    assert self_check_reason(decoder, wrong).startswith("layer 1 of the fused container differs")


# Decode steps are checked


def is_decoding(groups: tuple[torch_ops.Group, ...]) -> bool:
    """Whether attention is that of a decode step."""
    return all(group.rows.shape[1] == 1 for group in groups)


def zeros(q, keys, values, groups, *args, **kwargs):
    """Zeros in place of attention, of the right shape."""
    return torch.zeros_like(q)


def other_sequences_blocks(q, keys, values, groups, *args, **kwargs):
    """Attention over the blocks of another sequence."""
    flipped = tuple(dataclasses.replace(group, slot_mapping=group.slot_mapping.flip(0)) for group in groups)
    return torch_ops.paged_attention(q, keys, values, flipped, *args, **kwargs)


def wrong_in_steps(monkeypatch, wrong: Callable) -> None:
    """Break the attention of torch's decoders in decode steps only."""

    class Patched:
        def __getattr__(self, name: str) -> object:
            return getattr(torch_ops, name)

        @staticmethod
        def paged_attention(q, keys, values, groups, *args, **kwargs):
            attend = wrong if is_decoding(groups) else torch_ops.paged_attention
            return attend(q, keys, values, groups, *args, **kwargs)

    monkeypatch.setattr(torch_decoder, "torch_ops", Patched())


@pytest.mark.parametrize("wrong", [zeros, other_sequences_blocks])
@pytest.mark.parametrize("kind", [TorchDecoder, Int8Decoder])
def test_wrong_decode_attention_is_rejected(kind, wrong, monkeypatch):
    model = tiny_model("llama", dtype=torch.bfloat16).eval()
    if kind is Int8Decoder:
        params = dict(model.named_parameters())
        for name, quantize in in_int8(model, 1).items():
            quantize(params[name])
    decoder = decoder_of(model, kind)
    assert self_check_reason(decoder, model) == ""
    wrong_in_steps(monkeypatch, wrong)
    assert self_check_reason(decoder, model).startswith("layer 0, in decode steps, of the fused container differs")


def wrong_cpu_steps(own: Callable, wrong: str) -> Callable:
    """CpuDecoder._run whose decode steps read zeros, or the blocks of other sequences."""

    def run(self, hidden: torch.Tensor, batch: PackedBatch, kv: PagedKV | None, *more):
        if kv is not None and len(batch.ids) == len(batch.lengths) > 1:
            if wrong == "zeros":
                kv = PagedKV(kv.keys, [torch.zeros_like(values) for values in kv.values])
            else:
                batch = dataclasses.replace(batch, block_tables=batch.block_tables.flip(0).contiguous())
        return own(self, hidden, batch, kv, *more)

    return run


@pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler here")
@pytest.mark.parametrize("wrong", ["zeros", "other blocks"])
def test_wrong_decode_attention_of_the_cpu_kernels_is_rejected(wrong, monkeypatch):
    model = tiny_model("llama", dtype=torch.bfloat16).eval()
    decoder = decoder_of(model, CpuDecoder)
    assert self_check_reason(decoder, model) == ""
    monkeypatch.setattr(CpuDecoder, "_run", wrong_cpu_steps(CpuDecoder._run, wrong))
    assert self_check_reason(decoder, model).startswith("layer 0, in decode steps, of the fused container differs")


@pytest.mark.parametrize(("steps", "what"), [(True, "a decode step"), (False, "a forward")])
def test_a_step_without_its_last_layer_is_rejected(steps, what, monkeypatch):
    """Every layer is correct, but whole decode steps, or forwards of several tokens, skip the last layer."""
    model = tiny_model("llama").eval()
    decoder = decoder_of(model, TorchDecoder)

    def forward(batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        last = 2 if (len(batch.ids) == len(batch.lengths)) == steps else 3
        return decoder.layers(decoder.embed(batch.ids, batch.positions), batch, kv, 0, last)

    monkeypatch.setattr(decoder, "forward", forward)
    assert self_check_reason(decoder, model).startswith(f"{what} of the fused container differs")


def check_steps(kind: str) -> None:
    """A decoder that ranks run together, with wrong decode attention, is rejected on every rank."""
    block = {"inference_tp_size": 2} if kind == "tensor parallel" else {"pin_parameters": False}
    model = tiny_model("llama")
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    expected = twin(model).generate(ids, attention_mask=mask, max_new_tokens=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuDecoder, "_run", wrong_cpu_steps(CpuDecoder._run, "zeros"))
        engine = engine_of(model, settings(3, hybrid_engine=block, rollout={"containers": "fused"}))
        engine.eval()
        assert torch.equal(engine.generate(ids, attention_mask=mask, max_new_tokens=4), expected)
        assert "layer 0, in decode steps, of the fused container differs" in engine.coverage()[0]["why"]
        engine.destroy()


@pytest.mark.parametrize("kind", slow_but(["tensor parallel"], ["tensor parallel", "streaming"]))
def test_wrong_decode_attention_is_rejected_on_every_rank(ranks, kind):
    ranks.run(check_steps, kind)


# Costs


def test_checked_contexts_are_longer_than_a_block_and_a_split():
    model = tiny_model("llama").eval()
    decoder = decoder_of(model, TorchDecoder)
    for block in (BLOCK_SIZE, 256):
        decoder.context_block = block
        lengths = self_check.checked_lengths(decoder)
        sequences = self_check.Sequences(lengths, 97, torch.device("cpu"), torch.tensor([5, 0]))
        assert not torch.isin(torch.cat(sequences.ids), torch.tensor([5, 0])).any(), "placeholders of images"
        assert [len(step.batch.ids) for step in sequences.steps] == [3, 1, 2, 3]
        for step in sequences.steps:
            assert len(set(step.batch.lengths.tolist())) == len(step.batch.ids)
            assert len(step.batch.ids) == 2 or step.batch.lengths.max() > block + BLOCK_SIZE
        ends = {int(length) for step in sequences.steps for length in step.batch.lengths}
        assert {BLOCK_SIZE, BLOCK_SIZE + 1} <= ends, "no sequence crosses the end of a block during decode"
        assert any(
            begin > 0
            for prefill in sequences.prefills
            for begin in prefill.batch.positions[prefill.batch.cu_seqlens[:-1].long()]
        )


@pytest.mark.parametrize("family", slow_but(CROSSED, ALL_FAMILIES))
def test_the_self_check_computes_logits_of_few_tokens(family):
    """At a real size logits of all tokens would take gigabytes."""
    model = tiny_model(family).eval()
    rows: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: rows.append(out[..., 0].numel()))
    decoder = decoder_of(model)
    own = decoder.logits

    def counting(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return own(hidden)

    decoder.logits = counting
    assert self_check_reason(decoder, model) == ""
    assert max(rows) <= 3 * 3 * self_check.STEPS
