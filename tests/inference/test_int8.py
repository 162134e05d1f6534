"""int8: error bounds against float64, equal to Hugging Face with rounded weights, half the memory, perplexity."""

import copy

import pytest
import torch
from deepspeed.utils.logging import logger, warning_once
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hybrid
from hybrid.decoders import selection
from hybrid.kernels.cpu_library import cpu_library
from hybrid.weights.int8 import (
    Int8Linear,
    dequantized,
    expert_matrices,
    int8_linear,
    int8_weights,
    quantizable,
    quantized,
)
from tests.marks import slow_but
from tests.tiny_models import (
    ALL_FAMILIES,
    NON_DECODERS,
    RECURRENT,
    prompts,
    tiny_model,
    tiny_non_decoder,
    twin,
    with_peft,
)

IDS, MASK = prompts(3, 7, padded=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 4])
def test_quantization_error_is_at_most_half_a_step(groups, dtype):
    weight = torch.randn(9, 64, dtype=torch.float64) * torch.logspace(-6, 3, 9, dtype=torch.float64)[:, None]
    weight[3] = 0
    weight[4, 5] *= 1000
    weight = weight.to(dtype)
    values, scale = quantized(weight, groups, dtype)
    assert (values.dtype, scale.dtype, scale.shape) == (torch.int8, dtype, (9, groups))
    step = scale.double().repeat_interleave(64 // groups, dim=1)
    error = (weight.double() - values.double() * step).abs()
    assert (error <= step / 2 * (1 + 1e-6)).all()  # rounding the quotient in float32
    largest = weight.double().view(9, groups, -1).abs().amax(2)
    spacing = torch.finfo(dtype).eps
    assert (scale.double() * 127 <= largest * (1 + spacing) + 1e-35).all(), (
        "the quantization step is larger than necessary"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("shape", [(1, 64), (2, 5, 64), (0, 64), (3, 48), (3, 40), (5, 72), (1, 100)])
def test_int8_linear_matches_float64(shape, groups, dtype):
    """Numbers of inputs for which torch's int8 kernel crashes or is wrong too."""
    torch.manual_seed(0)
    inputs = shape[-1]
    x, bias = torch.randn(shape, dtype=dtype), torch.randn(37, dtype=dtype)
    values, scale = quantized(torch.randn(37, inputs), groups, dtype)
    weight = values.double() * scale.double().repeat_interleave(inputs // groups, dim=1)
    expected = x.double() @ weight.T + bias.double()
    tolerance = 1e-5 if dtype == torch.float32 else 0.02  # of sums of about 8
    torch.testing.assert_close(
        int8_linear(x, values, scale, bias).double(), expected, atol=8 * tolerance, rtol=tolerance
    )


def rounded(model: nn.Module, groups: int, row_parallel: tuple[str, ...] = ()) -> nn.Module:
    """The same model with the weights of its linear layers and experts rounded as int8 rounds them, in its own dtype.

    row_parallel: names in layers of which each of two ranks holds, and so quantizes, half of the inputs.
    """
    model = copy.deepcopy(model).eval()
    linear = {f"{name}.weight": module for name, module in quantizable(model).items()}
    experts = {f"{path}.{name}" for path, module in model.named_modules() for name in expert_matrices(module)}
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name not in linear and name not in experts:
                continue
            transposed = type(linear.get(name)).__name__ == "Conv1D"
            weight = param.T if transposed else param
            parts = groups * (2 if any(suffix in name for suffix in row_parallel) else 1)
            rounded_weight = dequantized(*quantized(weight, parts, weight.dtype))
            param.copy_(rounded_weight.T if transposed else rounded_weight)
    return model


def logits_of(model, **more) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, attention_mask=MASK, **more).logits[MASK.bool()]


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("inject", [True, False])
@pytest.mark.parametrize(
    "name",
    slow_but(
        ["llama", "gpt2", "bloom", "gemma3_text", "falcon", "mixtral", "qwen3_5_text", "t5"],
        # Mamba 2's own head casts its input to the dtype of its weight, so it refuses.
        [*ALL_FAMILIES, *(family for family in RECURRENT if family != "mamba2"), *NON_DECODERS],
    ),
)
def test_models_match_hugging_face_with_rounded_weights(name, inject, groups):
    sizes = {"linear_head_dim": 8} if name == "kimi_linear" else {}  # which the groups divide
    model = tiny_non_decoder(name) if name in NON_DECODERS else tiny_model(name, **sizes)
    reference = rounded(model, groups)
    engine = hybrid.init_inference(
        model, dtype=torch.int8, kernel_inject=inject, quant={"weight": {"q_groups": groups}}
    )
    more = {"decoder_input_ids": IDS} if name == "t5" else {}
    torch.testing.assert_close(logits_of(engine, **more), logits_of(reference, **more), atol=2e-3, rtol=1e-3)
    assert all(p.dtype == torch.int8 for m in model.modules() if isinstance(m, Int8Linear) for p in [m.weight])
    if hasattr(reference, "generate") and name not in NON_DECODERS:
        request = {"attention_mask": MASK, "max_new_tokens": 6}
        assert torch.equal(engine.generate(IDS, **request), reference.generate(IDS, **request))
        why = engine.coverage()[0]["why"]
        assert ("over int8 weights" in why) == inject, why


WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # slices of a row that are whole vectors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 4])
def test_int8_kernels_match_the_reference(groups, dtype):
    """With few rows, and with more than are dequantized at once; in float32 against float64."""
    model = tiny_model("llama", dtype=dtype, **WIDE)
    reference = rounded(model, groups).double()
    engine = hybrid.init_inference(model, dtype="int8", kernel_inject=True, quant={"weight": {"q_groups": groups}})
    assert "over int8 weights, on CPU kernels" in engine.coverage()[0]["why"]
    for rows, length in ((1, 2), (5, 1), (9, 40)):
        ids, _ = prompts(rows, length, padded=False)
        with torch.no_grad():
            expected = reference(ids).logits
        error = (engine(ids).logits.double() - expected).abs().max() / expected.abs().max()
        # As in test_cpu_decoder.py; the reference rounds weights to bfloat16 once more than the kernels do.
        assert error < (2e-6 if dtype == torch.float32 else 0.04)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 4])
def test_a_row_is_bit_identical_in_every_batch(groups, dtype):
    model = tiny_model("llama", dtype=dtype, **WIDE)
    engine = hybrid.init_inference(model, dtype="int8", kernel_inject=True, quant={"weight": {"q_groups": groups}})
    ids, _ = prompts(40, 3, padded=False)
    alone = engine(ids[:1]).logits
    for rows in (2, 3, 4, 11, 40):
        assert torch.equal(engine(ids[:rows]).logits[:1], alone), rows


@pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler here")
@pytest.mark.parametrize(
    ("in_tiles", "dtype", "quantized_dtype", "said"),
    [
        (True, torch.bfloat16, "int8", 1),
        (True, torch.float32, "int8", 0),
        (True, torch.bfloat16, "bf16", 0),
        (False, torch.bfloat16, "int8", 0),
    ],
)
def test_int8_that_tiles_make_slower_is_said_once(in_tiles, dtype, quantized_dtype, said, monkeypatch):
    warnings = []
    monkeypatch.setattr(logger, "warning", warnings.append)
    monkeypatch.setattr(cpu_library(), "multiplies_in_tiles", lambda: in_tiles)
    warning_once.cache_clear()
    for _ in range(2):
        engine = hybrid.init_inference(tiny_model("llama", dtype=dtype), dtype=quantized_dtype, kernel_inject=True)
        engine(IDS, attention_mask=MASK)
    assert warnings.count(selection.SLOW_INT8) == said


def test_activations_keep_the_models_dtype():
    for dtype in (torch.float32, torch.bfloat16):
        engine = hybrid.init_inference(tiny_model("llama", dtype=dtype), dtype="int8", kernel_inject=True)
        assert engine(IDS, attention_mask=MASK).logits.dtype == dtype
        assert "int8" in engine.coverage()[0]["why"]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_a_checkpoint_is_quantized_while_it_is_loaded(tmp_path, family):
    reference = tiny_model(family)
    reference.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = type(reference)(reference.config)
    engine = hybrid.init_inference(model, dtype="int8", checkpoint=str(tmp_path), kernel_inject=True)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    torch.testing.assert_close(logits_of(engine), logits_of(rounded(reference, 1)), atol=2e-3, rtol=1e-3)


def test_weights_take_half_of_bfloat16s_memory():
    """Of the matrices with their scales; embeddings and norms are not quantized."""
    model = tiny_model("llama", dtype=torch.bfloat16, **WIDE)
    before = sum(module.weight.nbytes for module in quantizable(model).values())
    engine = hybrid.init_inference(model, dtype="int8", kernel_inject=True)
    pairs = [pair for module in model.modules() for pair in int8_weights(module)]
    assert sum(weight.nbytes + scale.nbytes for weight, scale in pairs) < 0.51 * before
    logits_of(engine)
    assert engine._fused.nbytes() < 0.01 * before, "a decoder holds copies of the model's weights"  # scales, norms


def test_a_tied_head_is_not_quantized():
    model = tiny_model("llama", tie_word_embeddings=True)
    reference = rounded(model, 1)
    engine = hybrid.init_inference(model, dtype="int8", kernel_inject=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(logits_of(engine), logits_of(reference), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("groups", [1, 4])
def test_perplexity_of_a_pretrained_model(stories260k, groups):
    """Within one per cent of Hugging Face's float32 model."""
    model = AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(stories260k)
    text = (
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she "
        "saw a big dog. The dog was very friendly and wanted to play with her. They ran and played all day long."
    )
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        expected = model(ids, labels=ids).loss.exp()
    engine = hybrid.init_inference(model, dtype="int8", kernel_inject=True, quant={"weight": {"q_groups": groups}})
    actual = torch.nn.functional.cross_entropy(engine(ids).logits[0, :-1], ids[0, 1:]).exp()
    assert actual != expected
    assert abs(actual / expected - 1) < 0.01, (actual, expected)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"quant": {"enabled": False}}, ValueError, "quant.enabled: false given; dtype=int8 quantizes"),
        ({"quant": {"weight": {"num_bits": 4}}}, NotImplementedError, "num_bits: 4 given"),
        ({"quant": {"weight": {"q_type": "asymmetric"}}}, NotImplementedError, "q_type: 'asymmetric' given"),
        ({"quant": {"weight": {"q_groups": 5}}}, ValueError, "q_groups: 5 given; it must divide the inputs"),
        ({"moe": {"ep_size": 2}}, NotImplementedError, "moe.ep_size: 2 given; dtype=int8"),
        ({"quant": {"weight": {"post_init_quant": {"x": 1}}}}, NotImplementedError, "post_init_quant: .* is for ZeRO"),
        ({"save_mp_checkpoint_path": "x"}, NotImplementedError, "dtype=int8 given too; use a floating dtype"),
    ],
)
def test_unsupported_quant_settings_raise(config, error, message):
    model = tiny_model("llama")
    before = twin(model)
    with pytest.raises(error, match=message):
        hybrid.init_inference(model, dtype="int8", **config)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    with pytest.raises(NotImplementedError, match="adapters; merge them first"):
        hybrid.init_inference(with_peft(tiny_model("llama")), dtype="int8")


@pytest.mark.parametrize("inject", [True, False])
def test_experts_take_half_of_bfloat16s_memory(inject):
    """They are dequantized while they run, and int8 again after an exception."""
    model = tiny_model("mixtral", dtype=torch.bfloat16, hidden_size=128, intermediate_size=128)
    before = sum(param.nbytes for param in model.parameters() if param.dim() == 3)
    engine = hybrid.init_inference(model, dtype="int8", kernel_inject=inject)

    def expert_bytes() -> int:
        mixtures = [layer.mlp.experts for layer in model.model.layers]
        pairs = [pair for mixture in mixtures for pair in int8_weights(mixture)]
        return sum(weight.nbytes + scale.nbytes for weight, scale in pairs)

    assert 0.5 * before <= expert_bytes() < 0.51 * before
    assert sum(tensor.nbytes for tensor in model.state_dict().values()) < 0.7 * sum(
        tensor.nbytes
        for tensor in tiny_model("mixtral", dtype=torch.bfloat16, hidden_size=128, intermediate_size=128).parameters()
    )
    engine(IDS, attention_mask=MASK)
    with pytest.raises(AttributeError):
        model.model.layers[0].mlp.experts(torch.ones(3, 5), None, None)
    assert 0.5 * before <= expert_bytes() < 0.51 * before
    assert engine._fused.nbytes() < 0.03 * before, "a decoder holds copies of the model's weights"


# The row-parallel projections, of whose inputs each rank has a slice.
ROW_PARALLEL = {
    "llama": ("o_proj", "down_proj"),
    "mixtral": ("o_proj", "down_proj"),
    "opt": ("out_proj", "fc2"),
}


def check_int8_ranks(family: str, groups: int, folder: str) -> None:
    """The model's own modules at two ranks, from its own weights and from a file."""
    reference = tiny_model(family)
    expected = rounded(reference, groups, ROW_PARALLEL[family])
    for checkpoint in (None, folder):
        model = twin(reference)
        if checkpoint:
            with torch.device("meta"):
                model = type(reference)(reference.config)
        engine = hybrid.init_inference(
            model,
            dtype="int8",
            tp={"tp_size": 2},
            quant={"weight": {"q_groups": groups}},
            checkpoint=checkpoint,
            kernel_inject=bool(checkpoint),
        )
        torch.testing.assert_close(logits_of(engine), logits_of(expected), atol=2e-3, rtol=1e-3)
        request = {"attention_mask": MASK, "max_new_tokens": 6}
        assert torch.equal(engine.generate(IDS, **request), expected.generate(IDS, **request))
        bytes_of = {name: tensor.nbytes for name, tensor in model.named_parameters() if tensor.dtype == torch.int8}
        all_elements = sum(reference.get_parameter(name).numel() for name in bytes_of)
        assert sum(bytes_of.values()) < 0.55 * all_elements, bytes_of
        assert "sharded over 2 ranks" in engine.coverage()[0]["why"]
        engine.destroy()


@pytest.mark.parametrize(
    ("family", "groups"),
    slow_but([("llama", 2)], [("llama", 1), ("llama", 2), ("mixtral", 1), ("opt", 1)]),
)
def test_int8_at_two_ranks_matches_rounded_weights(ranks, tmp_path, family, groups):
    tiny_model(family).save_pretrained(tmp_path)
    ranks.run(check_int8_ranks, family, groups, str(tmp_path))


def test_float16_rows_of_small_weights_keep_their_levels():
    """float16's smallest normal number is 6e-5: as a scale it would be too large for weights of a thousandth."""
    model = nn.Sequential(nn.Linear(64, 9)).half()
    torch.nn.init.uniform_(model[0].weight, -1e-3, 1e-3)
    weight = model[0].weight.double().clone()
    with torch.no_grad():
        hybrid.init_inference(model, dtype="int8")
    [pair] = int8_weights(model[0])
    error = (dequantized(*pair).double() - weight).abs()
    assert (error <= pair[1].double() / 2 * (1 + 1e-5)).all()
    assert pair[1].max() < 1e-5


class Doubled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_subclasses_of_linear_are_not_quantized():
    model = nn.Sequential(nn.Linear(8, 8), Doubled(8, 8))
    hybrid.init_inference(model, dtype="int8")
    assert [type(module) for module in model] == [Int8Linear, Doubled]


def test_a_model_with_a_live_autograd_graph_is_quantized():
    """Its parameters are referenced by an autograd graph."""
    model = tiny_model("llama")
    reference = rounded(model, 1)
    loss = model(IDS, attention_mask=MASK, labels=IDS).loss
    engine = hybrid.init_inference(model, dtype="int8", kernel_inject=True)
    assert loss.requires_grad
    torch.testing.assert_close(logits_of(engine), logits_of(reference), atol=2e-3, rtol=1e-3)


def test_scales_are_in_the_state_dict():
    engine = hybrid.init_inference(tiny_model("llama"), dtype="int8")
    assert "model.layers.0.mlp.up_proj.weight_scale" in engine.module.state_dict()


def test_a_model_that_reads_weights_outside_linear_layers_raises_and_is_restored():
    """Mamba multiplies by `dt_proj.weight` outside that layer's forward."""
    config = {"hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "vocab_size": 97}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **config)).eval()
    before = twin(model)
    with pytest.raises(NotImplementedError, match="dtype: int8 given; it does not run on 16 token ids.*use another"):
        hybrid.init_inference(model, dtype="int8")
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, before(IDS).logits)


def test_quant_without_int8_warns():
    with pytest.warns(match="quant: given with dtype=torch.float32; it has no effect"):
        hybrid.init_inference(tiny_model("llama"), dtype="fp32", quant={"weight": {"q_groups": 2}})
