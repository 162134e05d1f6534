"""Models are loaded straight into ZeRO-3's partitions: training is bit-identical to that from a full float32 model on
every rank, and no rank holds a full model."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

import hybrid
from rlhf_examples.common import models
from rlhf_examples.common.arguments import SFTArguments
from rlhf_examples.common.engines import (
    Training,
    deepspeed_config,
    export,
    load_frozen_model,
    load_rollout_engine,
    make_engine,
)
from rlhf_examples.common.forwards import token_values
from rlhf_examples.common.models import (
    LoRA,
    ValueModel,
    is_reward_model,
    load_exported,
    load_policy,
    load_value_model,
    merge_adapter_weights,
)
from rlhf_examples.common.ranks import seed_everything
from rlhf_examples.data.synthetic import synthetic_tokenizer
from tests.engines import storage_digest, train_step
from tests.host_memory import MIB, PeakMemory, malloc_returns_memory, sum_over_ranks
from tests.marks import slow_but
from tests.rank_pool import RankPool
from tests.tiny_models import prompts, tiny_model

NO_LORA, WITH_LORA = LoRA(0, 16, "all-linear"), LoRA(4, 16, "all-linear")


def training(stage: int, lora: LoRA = NO_LORA) -> Training:
    return Training(stage, 2, 1e-2, 0.0, "constant", 0, 10, False, lora)


def saved(directory: str, make, form: str = "one file", dtype: torch.dtype = torch.float32) -> str:
    """A checkpoint on disk, written by the first rank, in a format that Hugging Face reads."""
    if dist.get_rank() == 0:
        model = make().to(dtype)
        shard = "20KB" if "sharded" in form else "5GB"
        model.save_pretrained(directory, max_shard_size=shard)
        if "pickle" in form:
            as_pickles(Path(directory))
    dist.barrier()
    return directory


def as_pickles(directory: Path) -> None:
    """Replace safetensors files by pickles of torch.save."""
    for path in directory.glob("*.safetensors"):
        name = path.name.replace("model", "pytorch_model", 1).replace(".safetensors", ".bin")
        torch.save(load_file(path), directory / name)
        path.unlink()
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        content = index.read_text().replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
        (directory / "pytorch_model.bin.index.json").write_text(content)
        index.unlink()


def unpartitioned_policy(base: str, lora: LoRA) -> nn.Module:
    """A float32 model on every rank, which DeepSpeed casts and partitions."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if not lora.rank:
        return model
    config = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.modules, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def unpartitioned_value_model(base: str, lora: LoRA, new_head: bool) -> nn.Module:
    config = AutoConfig.from_pretrained(base, num_labels=1)
    model = AutoModelForSequenceClassification.from_pretrained(base, config=config, dtype=torch.float32)
    if new_head:
        nn.init.zeros_(model.score.weight)
    if not lora.rank:
        return ValueModel(model)
    adapter = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.modules, task_type="SEQ_CLS")
    return ValueModel(peft.get_peft_model(model, adapter))


def require_equal_training(first: hybrid.HybridEngine, second: hybrid.HybridEngine, step) -> None:
    """Storage and losses of two engines are bit-identical over steps."""
    assert storage_digest(first) == storage_digest(second), "weights differ"
    for number in range(3):
        losses = [step(engine, number) for engine in (first, second)]
        assert torch.equal(*losses), f"step {number}: {losses}"
    assert storage_digest(first) == storage_digest(second), "trained weights differ"


def value_step(engine: hybrid.HybridEngine, number: int) -> torch.Tensor:
    ids, mask = prompts(2, 7, padded=True, seed=10 * number + dist.get_rank())
    loss = (token_values(engine, ids, mask, 4, "packed") - 1).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.detach()


def check_policy(folder: str, family: str, stage: int, dtype: str, lora: LoRA, form: str, **changes) -> None:
    args, settings = SFTArguments(dtype=dtype), training(stage, lora)
    base = saved(f"{folder}/base", partial(tiny_model, family, **changes), form)
    engines = []
    for load in (lambda: unpartitioned_policy(base, lora), lambda: load_policy(base, settings.config(args), lora)):
        seed_everything(7)
        engines.append(make_engine(load(), args, settings))
    buffers = [dict(engine.module.named_buffers()) for engine in engines]
    assert buffers[0].keys() == buffers[1].keys()
    for name, buffer in buffers[1].items():  # Gemma casts its float32 scale before use; the buffer may be bf16
        assert torch.equal(buffer, buffers[0][name].to(buffer.dtype)), name
        assert "inv_freq" not in name or buffer.dtype == torch.float32
    if stage == 3:
        world = dist.get_world_size()
        for name, parameter in engines[1].module.named_parameters():
            assert parameter.ds_tensor.numel() == -(-parameter.ds_numel // world), f"{name} is not partitioned"
    require_equal_training(*engines, train_step)
    with engines[0].inference(), engines[1].inference():
        ids, mask = prompts(2, 7, padded=True, seed=dist.get_rank())
        tokens = [engine.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False) for engine in engines]
        assert torch.equal(*tokens)


TIED = {"tie_word_embeddings": True}
POLICIES = {
    "llama": ("llama", 3, "float32", NO_LORA, "one file", {}),
    "llama, pickle": ("llama", 3, "float32", NO_LORA, "pickle", {}),
    "llama, sharded, LoRA, bfloat16": ("llama", 3, "bfloat16", WITH_LORA, "sharded", {}),
    "qwen2, tied, sharded pickle, bfloat16": ("qwen2", 3, "bfloat16", NO_LORA, "sharded pickle", TIED),
    "gpt2, tied": ("gpt2", 3, "float32", WITH_LORA, "one file", {}),
    "mixtral, sharded, bfloat16": ("mixtral", 3, "bfloat16", NO_LORA, "sharded", {}),
    "gemma3, tied, bfloat16": ("gemma3_text", 3, "bfloat16", NO_LORA, "one file", TIED),
    "llama, ZeRO-2, LoRA, bfloat16": ("llama", 2, "bfloat16", WITH_LORA, "sharded", {}),
    "qwen2, tied, ZeRO-0": ("qwen2", 0, "float32", NO_LORA, "one file", TIED),
}


QUICK = ("llama, sharded, LoRA, bfloat16", "qwen2, tied, sharded pickle, bfloat16")


@pytest.mark.parametrize("case", slow_but(QUICK, POLICIES))
def test_a_partitioned_policy_trains_bit_identically_to_an_unpartitioned_one(ranks, tmp_path, case):
    *settings, changes = POLICIES[case]
    ranks.run(check_policy, str(tmp_path), *settings, **changes)


def random_reward_model() -> nn.Module:
    config = tiny_model("llama").config
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    nn.init.normal_(model.score.weight)
    return model


def check_value_model(folder: str, lora: LoRA, has_head: bool, dtype: str) -> None:
    def make() -> nn.Module:
        return random_reward_model() if has_head else tiny_model("llama")

    args, settings = SFTArguments(dtype=dtype), training(3, lora)
    base, engines = saved(f"{folder}/base", make), []
    for load in (
        lambda: unpartitioned_value_model(base, lora, not has_head),
        lambda: load_value_model(base, settings.config(args), lora),
    ):
        seed_everything(7)
        engines.append(make_engine(load(), args, settings))
    require_equal_training(*engines, value_step)


@pytest.mark.parametrize(
    ("lora", "has_head", "dtype"),
    slow_but(
        [(WITH_LORA, True, "bfloat16")],
        [
            (NO_LORA, False, "float32"),  # a reward model from a language model
            (WITH_LORA, True, "bfloat16"),  # a reward model, or a critic, from a reward model
        ],
    ),
)
def test_a_partitioned_value_model_trains_bit_identically_to_an_unpartitioned_one(
    ranks, tmp_path, lora, has_head, dtype
):
    ranks.run(check_value_model, str(tmp_path), lora, has_head, dtype)


def with_adapters(folder: str) -> dict[str, nn.Module]:
    """A language model in base/, its adapter in policy/, and a classifier's adapter with a trained head in reward/.
    Returns the two adapted models, loaded by PEFT."""
    base = saved(f"{folder}/base", partial(tiny_model, "llama"), "sharded")
    kinds = {"policy": AutoModelForCausalLM, "reward": AutoModelForSequenceClassification}
    if dist.get_rank() == 0:
        torch.manual_seed(3)
        for name, kind in kinds.items():
            task = "CAUSAL_LM" if name == "policy" else "SEQ_CLS"
            config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type=task)
            adapted = peft.get_peft_model(kind.from_pretrained(base, num_labels=1), config)
            if name == "reward":
                nn.init.normal_(adapted.get_base_model().score.weight)
            adapted.save_pretrained(f"{folder}/{name}")
    dist.barrier()
    return {
        name: peft.PeftModel.from_pretrained(kind.from_pretrained(base, num_labels=1), f"{folder}/{name}").eval()
        for name, kind in kinds.items()
    }


def check_begins_from_adapter(folder: str, stage: int, lora: LoRA) -> None:
    """A policy loaded from an adapter's directory is the adapted model, in full training and under a new LoRA; critic
    and reward model are the adapted classifier, or the adapted language model with a new head."""
    expected = with_adapters(folder)
    args, settings = SFTArguments(), training(stage, lora)
    ids, mask = prompts(2, 7, padded=False, seed=dist.get_rank())
    with torch.no_grad():
        logits = expected["policy"](ids, attention_mask=mask).logits
        hidden = expected["reward"].get_base_model().base_model(ids, attention_mask=mask).last_hidden_state
        values = expected["reward"].get_base_model().score(hidden)
    policy = make_engine(load_policy(f"{folder}/policy", settings.config(args), lora), args, settings)
    torch.testing.assert_close(policy(ids, attention_mask=mask).logits.detach(), logits, atol=1e-4, rtol=1e-4)
    for number in range(2):
        train_step(policy, number)
    trained_logits = policy(ids, attention_mask=mask).logits.detach()
    assert (trained_logits - logits).abs().max() > 1e-2, "nothing was trained"
    if lora.rank:
        scores = policy.score(ids, mask, adapters=False).per_token_logps
        expected_scores = logits[:, :-1].log_softmax(dim=-1).gather(2, ids[:, 1:, None])[..., 0]
        torch.testing.assert_close(scores, expected_scores, atol=1e-4, rtol=1e-4)
        policy.train()
    else:
        assert all(parameter.requires_grad for parameter in policy.module.parameters())
    export(policy, synthetic_tokenizer(), f"{folder}/out")
    with torch.no_grad():
        written = AutoModelForCausalLM.from_pretrained(f"{folder}/out")(ids, attention_mask=mask).logits
    torch.testing.assert_close(written, trained_logits, atol=1e-3, rtol=1e-4)
    critic = make_engine(load_value_model(f"{folder}/reward", settings.config(args), lora), args, settings)
    reward_model = load_frozen_model(load_value_model, f"{folder}/reward", "float32", offload=stage == 3)
    for engine in (critic, reward_model):
        with torch.no_grad():
            actual = engine(input_ids=ids, attention_mask=mask).logits
        torch.testing.assert_close(actual, values, atol=1e-4, rtol=1e-4)
    headless = load_value_model(f"{folder}/policy", settings.config(args))
    assert all((p.ds_tensor if stage == 3 else p).abs().sum() == 0 for p in headless.classifier.score.parameters())


@pytest.mark.parametrize(("stage", "lora"), slow_but([(3, WITH_LORA)], [(0, WITH_LORA), (3, WITH_LORA), (3, NO_LORA)]))
def test_training_starts_from_an_adapter_directory(ranks, tmp_path, stage, lora):
    ranks.run(check_begins_from_adapter, str(tmp_path), stage, lora)


def check_adapters_kinds(folder: str) -> None:
    with_adapters(folder)
    assert is_reward_model(f"{folder}/reward") and not is_reward_model(f"{folder}/policy")
    adapter_only = replace(WITH_LORA, export_adapter=True)
    with pytest.raises(ValueError, match=r"lora_export: adapter given, and '.*policy' is an adapter itself"):
        load_policy(f"{folder}/policy", training(3, adapter_only).config(SFTArguments()), adapter_only)
    with pytest.raises(ValueError, match=r"'.*policy' is no adapter of a LlamaForCausalLM: it has .*layers.2"):
        merge_adapter_weights(tiny_model("llama", num_hidden_layers=2), f"{folder}/policy")


def test_adapter_directories_of_the_wrong_kind_raise(ranks, tmp_path):
    ranks.run(check_adapters_kinds, str(tmp_path))


def test_is_reward_model_accepts_hub_names(monkeypatch):
    """The configuration that transformers loads by name decides."""
    architectures = {"org/reward-model": "LlamaForSequenceClassification", "org/chat-model": "LlamaForCausalLM"}

    def load_config(name: str):
        if name not in architectures:
            raise OSError(f"{name} is not a local folder and is not a valid model identifier")
        return SimpleNamespace(architectures=[architectures[name]])

    monkeypatch.setattr(models, "find_adapter_config_file", lambda name: None)
    monkeypatch.setattr(models.AutoConfig, "from_pretrained", load_config)
    assert is_reward_model("org/reward-model")
    assert not is_reward_model("org/chat-model") and not is_reward_model("rlhf_examples.rewards:exact_match")
    with pytest.raises(ValueError, match="'exact_match' given; it must be module:function, the address of a"):
        is_reward_model("exact_match")


def check_frozen(folder: str, offload: bool) -> None:
    """Logits of a reference, and of an adapter's directory, equal Hugging Face's."""
    base = saved(f"{folder}/base", partial(tiny_model, "llama"), "sharded")
    if dist.get_rank() == 0:
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(f"{folder}/adapter")
    dist.barrier()
    ids, mask = prompts(2, 7, padded=False, seed=dist.get_rank())
    reference = AutoModelForCausalLM.from_pretrained(base).eval()
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), f"{folder}/adapter").eval()
    engines = {
        reference: load_frozen_model(load_policy, base, "float32", offload),
        adapted: load_rollout_engine(load_exported, f"{folder}/adapter", "float32", zero_stage=3 if offload else 0),
    }
    for model, engine in engines.items():
        with torch.no_grad():
            expected = model(ids, attention_mask=mask).logits
        context = engine.inference() if isinstance(engine, hybrid.HybridEngine) else torch.no_grad()
        with context:
            actual = engine(ids, attention_mask=mask).logits
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
        if offload:
            local_elements = sum(parameter.ds_tensor.numel() for parameter in engine.module.parameters())
            assert local_elements <= 0.55 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("offload", [False, True])
def test_frozen_models_match_hugging_face(ranks, tmp_path, offload):
    ranks.run(check_frozen, str(tmp_path), offload)


def error_of(load, base: str, stage: int) -> str:
    try:
        load(base, deepspeed_config("float32", stage))
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def check_bad_checkpoints(folder: str, stage: int) -> list[str]:
    """The errors of this rank for bad checkpoints."""
    other = saved(f"{folder}/other", partial(tiny_model, "llama"))
    cut = saved(f"{folder}/cut", partial(tiny_model, "llama"))
    headless = saved(f"{folder}/headless", random_reward_model)
    if dist.get_rank() == 0:
        config = json.loads(Path(other, "config.json").read_text())
        Path(other, "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
        weights = Path(cut, "model.safetensors")
        weights.write_bytes(weights.read_bytes()[:-1000])
    dist.barrier()
    errors = [error_of(load_policy, base, stage) for base in (other, cut, headless, f"{folder}/nothing")]
    assert torch.get_default_dtype() == torch.float32
    nn.Linear(3, 3)  # no context of DeepSpeed's is left open
    return errors


@pytest.mark.parametrize("stage", [0, 3])
def test_bad_checkpoints_raise_on_every_rank(ranks, tmp_path, stage):
    for size, cut, missing, absent in ranks.run(check_bad_checkpoints, str(tmp_path), stage):
        assert "other' cannot be loaded" in size
        assert "cut' cannot be loaded" in cut
        assert "headless' cannot be loaded: it has no lm_head.weight; give the checkpoint of a Llama" in missing
        assert "nothing' cannot be loaded" in absent


# ------------------------------------------------------------------ memory

SIZES = {  # hidden size, intermediate size, layers, vocabulary
    "120 MiB": (768, 2048, 8, 4096),
    "1 GiB": (2048, 5632, 10, 4096),  # TinyLlama-1.1B's layers
}


def make_checkpoint(directory: str, size: str) -> int:
    """A random bfloat16 Llama in files of a few matrices; returns its bytes."""
    hidden, intermediate, layers, vocabulary = SIZES[size]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=8,
        vocab_size=vocabulary,
    )
    if dist.get_rank() == 0:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.data.fill_(0.01)
        model.save_pretrained(directory, max_shard_size="100MB")
    dist.barrier()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return sum(parameter.nbytes for parameter in model.parameters())


def peak_memory(directory: str, size: str, max_shard_bytes: int) -> tuple[int, dict[str, int], dict[str, int]]:
    """The model's bytes; this rank's peaks from files to an engine that generates, and from that to files."""
    with malloc_returns_memory():
        nbytes = make_checkpoint(directory, size)
        with PeakMemory() as loading:
            engine = load_rollout_engine(
                load_policy, directory, "bfloat16", zero_stage=3, hybrid_engine={"pin_parameters": False}
            )
        dist.barrier()
        with PeakMemory() as saving:
            engine.save_pretrained(f"{directory}/again", max_shard_bytes=max_shard_bytes)
        dist.barrier()
        engine.destroy()
    if dist.get_rank() == 0:
        first, again = Path(directory), Path(directory, "again")
        assert len(list(again.glob("*.safetensors"))) > 2
        for path in first.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    file_again = json.loads((again / "model.safetensors.index.json").read_text())["weight_map"][name]
                    with safe_open(again / file_again, "pt") as other:
                        assert torch.equal(file.get_tensor(name), other.get_tensor(name)), name
    dist.barrier()
    return nbytes, loading.figures(), saving.figures()


def require_bounded(measurements: list[tuple], max_shard_bytes: int, size: str) -> None:
    """Memory of all ranks together. Loading: anonymous memory is the partitions and about two full parameters per rank
    (on a GPU those are not in host memory), under 1.3 models; with mapped pages of the files, which the kernel may drop
    and which count once, under 1.3 models and the partitions. Saving: a file and a layer on the first rank, a parameter
    on others."""
    (nbytes, *_), ranks = measurements[0], len(measurements)
    loading, saving = ([figures[i] for figures in measurements] for i in (1, 2))
    for what, figures in (("loading", loading), ("saving", saving)):
        print(f"{what} {nbytes / MIB:.0f} MiB", [{k: round(v / MIB) for k, v in figure.items()} for figure in figures])
    total = sum_over_ranks(loading)
    assert total["anonymous"] < 1.3 * nbytes
    assert total["proportional"] < (1.3 + 1) * nbytes
    assert max(figure["anonymous"] for figure in loading) < nbytes / ranks + 0.3 * nbytes
    hidden, intermediate, _, vocabulary = SIZES[size]
    parameter = 2 * hidden * max(intermediate, vocabulary)
    layer = 2 * (4 * hidden * hidden + 3 * hidden * intermediate)
    slack = 4 * parameter + 8 * MIB  # full, as input and output of a collective, and the copy that is written
    assert saving[0]["anonymous"] < max_shard_bytes + layer + slack
    assert all(figure["anonymous"] < slack for figure in saving[1:])


@pytest.mark.slow
def test_loading_and_saving_120_mib_is_bounded_in_memory(ranks, tmp_path):
    shard = 10 * MIB
    require_bounded(ranks.run(peak_memory, str(tmp_path / "model"), "120 MiB", shard), shard, "120 MiB")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_loading_and_saving_1_gib_is_bounded_in_memory(tmp_path, world_size):
    pool, shard = RankPool(world_size, timeout_s=600), 150 * MIB
    try:
        require_bounded(pool.run(peak_memory, str(tmp_path / "model"), "1 GiB", shard), shard, "1 GiB")
    finally:
        pool.close()
