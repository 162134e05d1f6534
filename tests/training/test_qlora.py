"""QLoRA: adapters on a base in 4 or 8 bits. Rollouts, scores and training are of one function, PEFT's own forward."""

import copy
import hashlib

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

import hybrid
from hybrid.config import HybridEngineConfig, RolloutConfig
from hybrid.decoders.fallback import no_decoder_reason
from hybrid.models.model_info import ModelInfo
from hybrid.models.quantized import dequantized, keep_formats, mark_quantized, quantized_layers, scales_of
from hybrid.training.compiled_layers import CompiledLayers
from hybrid.training.offline_plan import Training, offline_plan
from hybrid.weights.gather import gathered
from tests.engines import engine_of, require_greedy_tokens, settings, storage_digest, train_step
from tests.marks import slow_but
from tests.tiny_models import prompts, tiny_model, with_peft

bnb = pytest.importorskip("bitsandbytes", reason="needs the extra qlora")

# Blocks of 64 values, which bitsandbytes quantizes, are whole rows of these.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
NF4 = {"quant_type": "nf4", "compress_statistics": True, "compute_dtype": torch.float32}
FP4 = {"quant_type": "fp4", "compress_statistics": False}
FORMATS = {
    "nf4": NF4,
    "nf4 in float32": {**NF4, "quant_storage": torch.float32},
    "fp4": FP4,
    "int8": None,
}


def quantize(model: nn.Module, options: dict | None) -> nn.Module:
    """`model` with its linear layers but the head's in 4 bits with these options, or in 8 bits; as transformers'
    BitsAndBytesConfig loads it."""
    for name, linear in list(model.named_modules()):
        if type(linear) is not nn.Linear or linear is model.get_output_embeddings():
            continue
        sizes, bias = (linear.in_features, linear.out_features), linear.bias is not None
        if options is None:
            layer = bnb.nn.Linear8bitLt(*sizes, bias, has_fp16_weights=False)
            layer.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
        else:
            layer = bnb.nn.Linear4bit(*sizes, bias, **options)
            layer.weight = bnb.nn.Params4bit(
                linear.weight.data,
                requires_grad=False,
                module=layer,
                compress_statistics=layer.weight.compress_statistics,
                quant_type=layer.weight.quant_type,
                quant_storage=layer.quant_storage,
            )
        if bias:
            layer.bias = linear.bias
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.to("cpu"))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = options is not None, options is None
    return model.requires_grad_(False)


def qlora_model(name: str = "nf4", dtype: torch.dtype = torch.float32, family: str = "llama", **lora) -> nn.Module:
    base = quantize(tiny_model(family, dtype=dtype, **SIZES), FORMATS[name])
    return with_peft(base, **lora)


def reference_of(model: nn.Module) -> nn.Module:
    """A copy as PEFT computes it, in 8 bits too: in train mode the CPU's inputs are not rounded. No dropout."""
    reference = copy.deepcopy(model)
    keep_formats(reference)
    reference.eval()
    for _, layer in quantized_layers(reference):
        layer.train()
    return reference


def digest(engine: hybrid.HybridEngine) -> str:
    """Of this rank's training storage, and of the scales of quantized weights."""
    scales = [tensor for _, layer in quantized_layers(engine.module) for tensor in scales_of(layer.weight)]
    content = b"".join(tensor.numpy().tobytes() for tensor in scales)
    return storage_digest(engine) + hashlib.sha256(content).hexdigest()


def logps_of(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits.float()
    return logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]


def check_equals_peft(name: str, config: dict, lora: dict) -> None:
    model = qlora_model(name, **lora)
    reference = reference_of(model)
    plain, engine = engine_of(copy.deepcopy(model), config), engine_of(model, config)
    before, rank = digest(engine), dist.get_rank()
    ids, mask = prompts(2 + rank, 7 + rank, padded=False, seed=rank)
    request = {"attention_mask": mask, "max_new_tokens": 5 + 3 * rank, "do_sample": False}
    expected = reference.generate(ids, **request)
    full_mask = torch.ones_like(expected)
    with torch.no_grad():
        logits = reference(expected, attention_mask=full_mask).logits
    require_greedy_tokens(engine.generate(ids, **request), expected, logits)
    containers = {row["container"] for row in engine.coverage() if row["kind"] in ("model", "layer")}
    assert containers == {config["rollout"]["containers"]}, engine.coverage()
    sampling = hybrid.SamplingParams(max_new_tokens=6, seed=3)
    batch = engine.rollout(ids, mask, sampling, num_generations=2)
    scores = engine.score(batch.sequences, batch.attention_mask)
    real = batch.attention_mask[:, 1:].bool() & batch.attention_mask[:, :-1].bool()
    wanted = logps_of(reference, batch.sequences, batch.attention_mask)
    # float32 sums in another order; layers of random weights amplify them.
    torch.testing.assert_close(scores.per_token_logps[real], wanted[real], atol=3e-4, rtol=1e-4)
    width = batch.completion_ids.shape[1]
    completed = batch.completion_mask.bool()
    torch.testing.assert_close(
        batch.old_per_token_logps[completed], wanted[:, -width:][completed], atol=3e-4, rtol=1e-4
    )
    with reference.disable_adapter():
        without = logps_of(reference, batch.sequences, batch.attention_mask)
    base = engine.score(batch.sequences, batch.attention_mask, adapters=False)
    torch.testing.assert_close(base.per_token_logps[real], without[real], atol=3e-4, rtol=1e-4)
    assert (without - wanted)[real].abs().max() > 1e-2, "the adapter does nothing"
    engine.eval()
    with torch.no_grad():
        actual = engine(batch.sequences, attention_mask=batch.attention_mask, use_cache=False).logits
        logits = reference(batch.sequences, attention_mask=batch.attention_mask).logits
    of_tokens = batch.attention_mask.bool()
    torch.testing.assert_close(actual[of_tokens], logits[of_tokens], atol=1e-3, rtol=1e-4)
    engine.train()
    assert digest(engine) == before, "inference has written training storage"
    for step in range(2):
        assert torch.equal(train_step(engine, step), train_step(plain, step))
    assert digest(engine) == digest(plain)
    assert torch.equal(engine.generate(ids, **request), plain.generate(ids, **request))
    for forward in ("model", "packed", "exact"):
        if forward == "exact" and config["rollout"]["containers"] == "native":
            continue
        with torch.no_grad():
            logps = engine.logps(batch.sequences, batch.attention_mask, batch.completion_mask, forward=forward)
        again = engine.score(batch.sequences, batch.attention_mask).per_token_logps[:, -width:]
        torch.testing.assert_close(logps.per_token_logps[completed], again[completed], atol=3e-4, rtol=1e-4)
    engine.destroy()
    plain.destroy()


def qlora_settings(stage: int, containers: str = "fused", lora: str = "merged", **block) -> dict:
    rollout = {"containers": containers, "lora": lora}
    return settings(stage, 0, hybrid_engine={"enabled": True, **block}, rollout=rollout)


SOME = {"target_modules": ["q_proj", "down_proj"]}  # the other layers are quantized and have no adapter
CASES = {
    "fused": ("nf4", 2, {}, {}),
    "storage": ("nf4 in float32", 3, {}, SOME),
    "uint8": ("nf4", 3, {}, {}),
    "stage 0": ("fp4", 0, {}, SOME),
    "stage 1": ("nf4", 1, {"lora": "unmerged"}, {}),
    "int8": ("int8", 2, {}, {}),
    "int8 native": ("int8", 1, {"containers": "native"}, SOME),
    "native": ("nf4", 2, {"containers": "native"}, SOME),
    "native unmerged": ("nf4 in float32", 3, {"containers": "native", "lora": "unmerged"}, SOME),
    "unmerged": ("nf4 in float32", 3, {"lora": "unmerged"}, SOME),
    "streamed": ("nf4 in float32", 3, {"pin_parameters": False}, SOME),
    "streamed native": ("nf4 in float32", 3, {"pin_parameters": False, "containers": "native"}, {}),
    "sliced": ("nf4 in float32", 3, {"inference_tp_size": 2}, {}),
    "sliced whole": ("nf4", 2, {"inference_tp_size": 2}, {}),
    "dora": ("nf4", 2, {}, {"use_dora": True}),
    "dora sliced": ("nf4", 2, {"inference_tp_size": 2}, {"use_dora": True}),
}


@pytest.mark.parametrize("case", slow_but(["fused", "storage"], CASES))
def test_rollouts_scores_and_training_match_peft(ranks, case):
    name, stage, block, lora = CASES[case]
    ranks.run(check_equals_peft, name, qlora_settings(stage, **block), lora)


def check_export(tmp_path: str, stage: int) -> None:
    """The merged model is whole and loads without bitsandbytes; the adapter's files load on the same base."""
    model = qlora_model("nf4", **SOME)
    ids, mask = prompts(2, 7, padded=False)
    reference = reference_of(model)
    engine = engine_of(model, qlora_settings(stage))
    engine.generate(ids, attention_mask=mask, max_new_tokens=2)
    engine.save_pretrained(f"{tmp_path}/merged")
    engine.save_pretrained(f"{tmp_path}/adapter", merged=False)
    merged = AutoModelForCausalLM.from_pretrained(f"{tmp_path}/merged").eval()
    assert not list(quantized_layers(merged)) and not hasattr(merged.config, "quantization_config")
    torch.testing.assert_close(logps_of(merged, ids, mask), logps_of(reference, ids, mask), atol=3e-4, rtol=1e-4)
    base = quantize(tiny_model("llama", **SIZES), FORMATS["nf4"])
    adapted = reference_of(peft.PeftModel.from_pretrained(base, f"{tmp_path}/adapter"))
    assert torch.equal(logps_of(adapted, ids, mask), logps_of(reference, ids, mask))
    engine.destroy()


@pytest.mark.parametrize("stage", slow_but([3], [2, 3]))
def test_exports_are_whole_models_or_adapters(ranks, tmp_path, stage):
    ranks.run(check_export, str(tmp_path), stage)


def check_checkpoint(tmp_path: str, stage: int) -> None:
    """A checkpoint is loaded into an engine of the same quantized base; one of another base is refused."""
    ids, mask = prompts(2, 7, padded=False)
    engine = engine_of(qlora_model("nf4", **SOME), qlora_settings(stage))
    train_step(engine)
    expected, saved = engine.generate(ids, attention_mask=mask, max_new_tokens=6), digest(engine)
    engine.save_checkpoint(tmp_path)
    train_step(engine, 1)
    assert digest(engine) != saved
    engine.load_checkpoint(tmp_path)
    assert digest(engine) == saved
    assert torch.equal(engine.generate(ids, attention_mask=mask, max_new_tokens=6), expected)
    trained = engine.module_state_dict(exclude_frozen_parameters=True)
    assert trained and all("lora_" in name for name in trained)
    engine.destroy()
    other = engine_of(with_peft(quantize(tiny_model("llama", seed=5, **SIZES), NF4), **SOME), qlora_settings(stage))
    with pytest.raises(ValueError, match="quantized from other weights"):
        other.load_checkpoint(tmp_path)
    other.destroy()


@pytest.mark.parametrize("stage", slow_but([3], [2, 3]))
def test_checkpoints_of_the_same_base_are_loaded(ranks, tmp_path, stage):
    ranks.run(check_checkpoint, str(tmp_path), stage)


def check_plan(stage: int, containers: str) -> None:
    """The plan counts quantized bytes, their scales and the dequantized copy as they are held."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 8}
    base = quantize(tiny_model("llama", dtype=torch.bfloat16, **sizes), {**NF4, "compute_dtype": torch.bfloat16})
    model = with_peft(base)
    config = qlora_settings(stage, containers, tp_gather_partition_size=1) | {"bf16": {"enabled": True}}
    engine = engine_of(model, config)
    rows, length, new = 3, 40, 20
    plan = engine.memory_plan(rows, length, new)
    need = plan.needs[plan.in_use]
    weights = sum((p.ds_tensor if stage == 3 else p).nbytes for p in engine.module.parameters())
    scales = sum(tensor.nbytes for _, layer in quantized_layers(engine.module) for tensor in scales_of(layer.weight))
    assert need.parameters == weights + scales
    ids, mask = prompts(rows, length, padded=False, seed=dist.get_rank())
    engine.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new)
    stats = engine.stats()
    copies = sum(dequantized(p).nbytes for p in gathered_parameters(engine))
    assert stats["snapshot_bytes"] == need.snapshot >= copies
    assert need.total >= stats["peak_bytes"]
    held = need.snapshot + need.gather + need.kv + need.containers
    print(f"planned {need}, measured {stats['snapshot_bytes']} {stats['kv_bytes']} {stats['peak_bytes']}")
    assert held <= 1.1 * stats["peak_bytes"], (need, stats)
    engine.destroy()


def gathered_parameters(engine: hybrid.HybridEngine) -> list[nn.Parameter]:
    weights = [layer.weight for _, layer in quantized_layers(engine.module)]
    with gathered(weights):
        return [nn.Parameter(dequantized(weight), requires_grad=False) for weight in weights]


@pytest.mark.parametrize("stage", slow_but([3], [2, 3]))
def test_the_plan_counts_quantized_bytes_and_dequantized_copies(ranks, stage):
    ranks.run(check_plan, stage, "fused")


def test_the_offline_plan_counts_a_quantized_base():
    """As the engine's own: the same bytes by the configuration alone."""
    config = tiny_model("llama", **SIZES).config
    blocks = HybridEngineConfig(), RolloutConfig()
    plans = [
        offline_plan(config, Training(2, 3, 4, device="cpu", bits=bits), *blocks, rows=2, tokens=16) for bits in (0, 4)
    ]
    whole, quantized = (plan.plan.needs[plan.plan.in_use] for plan in plans)
    assert quantized.snapshot == whole.snapshot  # dequantized
    model = with_peft(quantize(tiny_model("llama", dtype=torch.bfloat16, **SIZES), FORMATS["fp4"])).bfloat16()
    mark_quantized(model)
    of_scales = sum(16 * 4 for _ in quantized_layers(model))  # the code of each layer
    halves = sum(-(-param.numel() // 2) * param.element_size() for param in model.parameters())
    scales = sum(tensor.nbytes for _, layer in quantized_layers(model) for tensor in scales_of(layer.weight))
    assert quantized.parameters == halves + scales - of_scales
    with pytest.raises(ValueError, match=r"base in 4 bits.*--lora"):
        Training(bits=4)


def test_what_cannot_be_read_is_refused():
    def message_of(model: nn.Module, **changes) -> str:
        with pytest.raises((ValueError, NotImplementedError)) as raised:
            engine_of(model, settings(**changes))
        return str(raised.value)

    packed = quantize(tiny_model("llama", **SIZES), FORMATS["nf4"])
    next(quantized_layers(packed))[1].quant_state.packing_format_for_cpu = True
    assert "packed its weight" in message_of(packed) and "BitsAndBytesConfig" in message_of(packed)
    with_float_storage = qlora_model("nf4 in float32")
    assert "bnb_4bit_quant_storage" in message_of(with_float_storage, dtype=torch.bfloat16)
    eight = message_of(qlora_model("int8"), stage=3)
    assert "stage 0, 1 or 2, or 4-bit weights" in eight
    assert "use_dora" in message_of(qlora_model("nf4", use_dora=True), stage=3)
    again = message_of(qlora_model("nf4"), rollout={"weight_dtype": "int8"})
    assert "rollout.weight_dtype" in again and "bitsandbytes" in again

    with pytest.raises((ValueError, NotImplementedError), match=r"bitsandbytes; use hybrid\.initialize"):
        hybrid.init_inference(quantize(tiny_model("llama", **SIZES), FORMATS["nf4"]), dtype=torch.float32)

    class Int4Tensor(nn.Parameter):
        __module__ = "torchao.quantization"

    foreign = tiny_model("llama", **SIZES)
    linear = foreign.model.layers[0].self_attn.q_proj
    linear.weight = torch.Tensor._make_subclass(Int4Tensor, linear.weight.data, False)
    assert "Int4Tensor of torchao" in message_of(foreign)


def test_layers_that_compute_in_a_narrower_dtype_run_natively():
    model = with_peft(quantize(tiny_model("llama", **SIZES), {**FP4, "compute_dtype": torch.bfloat16}))
    reason = no_decoder_reason(ModelInfo(model), lambda: model.get_input_embeddings().weight)
    assert "computes in torch.bfloat16, and the model is in torch.float32" in reason


def test_evaluating_does_not_pack_weights():
    """bitsandbytes would, on a CPU with AVX-512 BF16, and training would learn nothing through them afterwards."""
    model = qlora_model("nf4")
    before = next(quantized_layers(model))[1].weight.data.clone()
    keep_formats(model)
    ids = prompts(2, 7, padded=False)[0]
    with torch.no_grad():
        model.eval()(ids)
    _, layer = next(quantized_layers(model))
    assert torch.equal(layer.weight.data, before) and not getattr(layer.quant_state, "packing_format_for_cpu", False)


def test_quantized_layers_are_not_compiled():
    with pytest.raises(NotImplementedError, match="layers in 4 or 8 bits given"):
        CompiledLayers(list(qlora_model().get_base_model().model.layers), False, {})
