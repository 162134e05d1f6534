"""`save_pretrained` writes the trained weights in Hugging Face's format, at world size 2."""

import json
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import hybrid
from hybrid.weights.export import Shards
from tests.engines import engine_of, settings, storage_digest, train_step
from tests.marks import slow_but
from tests.tiny_models import ChatLoRA, prompts, tiny_model, with_peft

LINEAR = ("q_proj", "down_proj")


def tensors_in(directory: str | Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory, by its name in the files."""
    tensors = {}
    for path in Path(directory).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    return tensors


def gathered_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict, gathered by DeepSpeed."""
    from deepspeed import zero

    with zero.GatheredParameters(list(model.parameters())):
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def adapted(kind: str, model: PreTrainedModel) -> nn.Module:
    """`model` under random adapters."""
    if kind == "chat":
        for layer in model.model.layers:
            layer.self_attn.q_proj = ChatLoRA(layer.self_attn.q_proj)
            layer.mlp.down_proj = ChatLoRA(layer.mlp.down_proj)
        return model
    more = {
        "lora": {},
        "dora": {"use_dora": True},
        "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
        "modules_to_save": {"modules_to_save": ["lm_head"]},
        "experts": {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
        "trainable tokens": {"trainable_token_indices": [3, 5]},
    }[kind]
    return with_peft(model, **more)


def merged_state_dict(kind: str, model: nn.Module, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict of a model with `weights`, its adapters merged by PEFT or by DeepSpeed-Chat's formula."""
    if kind != "chat":
        model.load_state_dict(weights)
        return (model.merge_and_unload() if isinstance(model, peft.PeftModel) else model).state_dict()
    merged = {name: tensor for name, tensor in weights.items() if "lora_" not in name}
    for name in [name for name in weights if name.endswith("lora_right_weight")]:
        path = name.removesuffix("lora_right_weight")
        delta = (weights[name] @ weights[f"{path}lora_left_weight"]).T
        merged[f"{path}weight"] = merged[f"{path}weight"] + 1.5 / 4 * delta
    return merged


def check_saved(folder: str, family: str, kind: str, stage: int, dtype: torch.dtype, changes: dict) -> None:
    def make() -> nn.Module:
        model = tiny_model(family, **changes)
        return adapted(kind, model) if kind else model

    engine = engine_of(make(), settings(stage, dtype=dtype))
    for number in range(2):
        train_step(engine, number)
    before = storage_digest(engine)
    engine.save_pretrained(f"{folder}/saved", max_shard_bytes=30_000)
    assert storage_digest(engine) == before
    weights = gathered_weights(engine.module)
    dist.barrier()
    files = tensors_in(f"{folder}/saved")
    assert len(list(Path(folder, "saved").glob("*"))) > 4, "one file: nothing was sharded"
    expected = merged_state_dict(kind, make().to(dtype).float() if kind else make().to(dtype), weights)
    loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/saved")
    assert loaded.dtype == dtype
    for name, tensor in loaded.state_dict().items():
        if kind:  # PEFT sums in another order
            torch.testing.assert_close(
                tensor, expected[name].to(dtype), atol=1e-6, rtol=2**-7 if dtype != torch.float32 else 1e-5
            )
        else:
            assert torch.equal(tensor, expected[name]), name
    if dist.get_rank() == 0:
        tiny_model(family, **changes).to(dtype).save_pretrained(f"{folder}/theirs")
        expected_tensors = tensors_in(f"{folder}/theirs")
        shapes = {name: tensor.shape for name, tensor in files.items()}
        assert shapes == {name: tensor.shape for name, tensor in expected_tensors.items()}, (
            "names differ from Hugging Face's"
        )
        index = json.loads(Path(folder, "saved", "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected_tensors.values())
    dist.barrier()
    train_step(engine, 3)


TIED = {"tie_word_embeddings": True}
CASES = {
    "llama": ("llama", "", 3, torch.float32, {}),
    "qwen2, tied, bfloat16": ("qwen2", "", 3, torch.bfloat16, TIED),
    "gpt2, ZeRO-0": ("gpt2", "", 0, torch.float32, {}),
    "mixtral, bfloat16": ("mixtral", "", 3, torch.bfloat16, {}),
    "LoRA": ("llama", "lora", 3, torch.float32, {}),
    "LoRA, bfloat16": ("qwen2", "lora", 3, torch.bfloat16, TIED),
    "LoRA, gpt2, ZeRO-2": ("gpt2", "lora", 2, torch.float32, {}),
    "DoRA": ("llama", "dora", 3, torch.float32, {}),
    "LoRA on embeddings": ("llama", "embedding", 3, torch.float32, {}),
    "LoRA on experts": ("mixtral", "experts", 3, torch.float32, {}),
    "modules_to_save": ("llama", "modules_to_save", 3, torch.float32, {}),
    "DeepSpeed-Chat's LoRA": ("llama", "chat", 3, torch.float32, {}),
}


QUICK = ("DoRA", "LoRA on experts", "modules_to_save")


@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
def test_save_pretrained_writes_the_trained_weights(ranks, tmp_path, case):
    ranks.run(check_saved, str(tmp_path), *CASES[case])


def check_adapter(folder: str, kind: str) -> None:
    base = tiny_model("llama")
    if dist.get_rank() == 0:
        base.save_pretrained(f"{folder}/base")
    dist.barrier()
    model = adapted(kind, AutoModelForCausalLM.from_pretrained(f"{folder}/base"))
    engine = engine_of(model, settings(3))
    train_step(engine)
    engine.save_pretrained(f"{folder}/adapter", merged=False)
    weights = gathered_weights(engine.module)
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(f"{folder}/base"), f"{folder}/adapter")
    trained = {name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    assert trained
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], atol=0, rtol=0)


@pytest.mark.parametrize(
    "kind", slow_but(["modules_to_save", "trainable tokens"], ["lora", "modules_to_save", "trainable tokens"])
)
def test_save_pretrained_unmerged_writes_only_the_adapter(ranks, tmp_path, kind):
    ranks.run(check_adapter, str(tmp_path), kind)


def check_instead(folder: str) -> None:
    """Float32 values that replace trained parameters: merged weights are computed from them, unrounded."""
    engine = engine_of(adapted("lora", tiny_model("llama")), settings(3, dtype=torch.bfloat16))
    generator = torch.Generator().manual_seed(0)
    values = {p: torch.randn(p.ds_shape, generator=generator) for p in engine.module.parameters() if p.requires_grad}
    names = {name: values[p] for name, p in engine.module.named_parameters() if p in values}
    engine.save_pretrained(f"{folder}/saved", instead=values.get)
    weights = {name: tensor.float() for name, tensor in gathered_weights(engine.module).items()} | names
    expected = merged_state_dict("lora", adapted("lora", tiny_model("llama")), weights)
    loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/saved")
    assert loaded.dtype == torch.float32
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=1e-5)


def test_save_pretrained_with_replacement_values(ranks, tmp_path):
    ranks.run(check_instead, str(tmp_path))


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def raise_in_add(*_: object) -> None:
    raise ArithmeticError("in the midst")


def check_errors(folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        require_errors(folder, patch)


def require_errors(folder: str, patch: pytest.MonkeyPatch) -> None:
    engine = engine_of(Wrapper(tiny_model("llama")), settings(3))
    with pytest.raises(ValueError, match="a Wrapper given, which Hugging Face cannot load"):
        engine.save_pretrained(f"{folder}/a")
    with pytest.raises(ValueError, match="merged=False given for a LlamaForCausalLM without"):
        engine.save_pretrained(f"{folder}/a", part=engine.module.inner, merged=False)
    with engine.inference(), pytest.raises(RuntimeError, match="leave the block"):
        engine.save_pretrained(f"{folder}/a", part=engine.module.inner)
    if dist.get_rank() == 0:
        Path(folder, "file").write_text("")
    dist.barrier()
    # An error while the first rank writes is raised on all ranks, and none hangs.
    with pytest.raises(OSError if dist.get_rank() == 0 else RuntimeError, match="file"):
        engine.save_pretrained(f"{folder}/file", part=engine.module.inner)
    engine.save_pretrained(f"{folder}/a", part=engine.module.inner)
    if dist.get_rank() == 0:
        patch.setattr(Shards, "add", raise_in_add)
    with pytest.raises(ArithmeticError if dist.get_rank() == 0 else RuntimeError, match="in the midst"):
        engine.save_pretrained(f"{folder}/a", part=engine.module.inner)
    engine.train()
    train_step(engine)
    tokens = engine_of(adapted("trainable tokens", tiny_model("llama")), settings(3))
    with pytest.raises(NotImplementedError, match="cannot be written merged"):
        tokens.save_pretrained(f"{folder}/b")


def test_save_pretrained_errors_are_raised_on_all_ranks(ranks, tmp_path):
    ranks.run(check_errors, str(tmp_path))


def check_generates(folder: str) -> None:
    """A model saved in eval mode and loaded by transformers generates the engine's tokens."""
    engine = engine_of(adapted("lora", tiny_model("llama")), settings(3))
    train_step(engine)
    ids, mask = prompts(2, 7, padded=True, seed=0)
    engine.eval()
    tokens = engine.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    engine.save_pretrained(f"{folder}/saved")
    loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/saved").eval()
    assert torch.equal(loaded.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False), tokens)
    assert isinstance(engine, hybrid.HybridEngine)


def test_save_pretrained_in_eval_mode_writes_the_training_weights(ranks, tmp_path):
    ranks.run(check_generates, str(tmp_path))
