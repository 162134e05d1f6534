"""Scripts written for `DeepSpeedHybridEngine` run unchanged: DeepSpeed-Chat's loop, fusing LoRA, attribute names."""

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
from deepspeed.runtime.zero import GatheredParameters

import hybrid
from tests.compat.test_install import quietly
from tests.engines import engine_of, settings, storage_digest, train_step
from tests.marks import slow_but
from tests.tiny_models import ADAPTERS, prompts, tiny_model, twin

INTERNAL = {  # how DeepSpeed builds its containers, which are not ours
    "convert_to_linear_transposed",
    "create_inference_containers",
    "create_inference_module",
    "inference_mp_group",
    "new_inference_container",
    "populate_all_inference_policies",
}


def test_every_public_name_of_deepspeeds_engine_exists():
    names = {name for name in vars(DeepSpeedHybridEngine) if not name.startswith("_")}
    assert len(names) > 10
    assert {name for name in names if not hasattr(hybrid.HybridEngine, name)} == INTERNAL


def chat_step(engine, ids: torch.Tensor, mask: torch.Tensor, step: int) -> torch.Tensor:
    """An iteration of DeepSpeed-Chat's `DeepSpeedPPOTrainer` (`generate_experience`, `train_rlhf`), using DeepSpeed's
    interface only."""
    engine.eval()
    max_length = ids.shape[1] + 4 + dist.get_rank()
    with torch.no_grad():
        by_module = engine.module.generate(
            ids, attention_mask=mask, max_length=max_length, pad_token_id=0, synced_gpus=True, do_sample=False
        )
        by_engine = engine.generate(ids, attention_mask=mask, max_length=max_length, pad_token_id=0, do_sample=False)
    assert torch.equal(by_module, by_engine)
    engine.train()
    seq = by_module
    full_mask = torch.cat([mask, torch.ones_like(seq[:, mask.shape[1] :])], dim=1)
    with torch.no_grad():
        old = engine(seq, attention_mask=full_mask, use_cache=False).logits.log_softmax(-1)
    logits = engine(seq, attention_mask=full_mask, use_cache=False).logits.log_softmax(-1)
    loss = -(logits - old).gather(2, seq[..., None]).exp().mean() - 0.1 * logits.gather(2, seq[..., None]).mean()
    engine.backward(loss)
    engine.step()
    return seq


def check_chat_loop(adapter: str, stage: int) -> None:
    model = ADAPTERS[adapter](tiny_model("opt"))
    reference = twin(model)
    config = settings(stage, hybrid_engine={"enabled": True, "release_inference_cache": True})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with hybrid.installed():
        engine = quietly(deepspeed.initialize, model=model, model_parameters=trained, config=config)[0]
    assert isinstance(engine, hybrid.HybridEngine)
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    for step in range(3):
        own = list(engine.module.parameters())
        with torch.no_grad(), GatheredParameters(own, enabled=stage == 3):
            for copy, parameter in zip(reference.parameters(), own, strict=True):
                copy.copy_(parameter)
        seq = chat_step(engine, ids, mask, step)
        length = ids.shape[1] + 4 + dist.get_rank()
        assert torch.equal(seq, reference.generate(ids, attention_mask=mask, max_length=length, do_sample=False))
    assert engine.weight_version == 3


@pytest.mark.parametrize(("adapter", "stage"), slow_but([("chat", 3)], [("chat", 3), ("none", 3), ("chat", 2)]))
def test_deepspeed_chats_training_loop_runs_unchanged(ranks, adapter, stage):
    ranks.run(check_chat_loop, adapter, stage)


def check_fusing(adapter: str, stage: int, **rollout) -> None:
    model = ADAPTERS[adapter](tiny_model("llama"))
    reference = twin(model)
    engine = engine_of(model, settings(stage, rollout=rollout))
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    request = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    expected, digest = reference.generate(ids, **request), storage_digest(engine)
    merges = adapter != "none" and not rollout
    for round_ in range(20):
        assert engine.is_lora_fused is False
        engine.eval()
        engine.fuse_lora_weight()
        assert engine.is_lora_fused is True
        fused_bytes = engine.stats()["snapshot_bytes"]
        if round_ % 5 == 0:
            assert torch.equal(engine.generate(ids, **request), expected)
            with engine.inference(), pytest.raises(RuntimeError, match="unfuse_lora_weight.. inside"):
                engine.unfuse_lora_weight()
        engine.unfuse_lora_weight()
        assert (engine.stats()["snapshot_bytes"] < fused_bytes) == merges, "unfusing did not free the merged weights"
        if round_ % 5 == 0:
            assert torch.equal(engine.generate(ids, **request), expected), "the unfused policy has no adapters"
            engine.unfuse_lora_weight()
        engine.train()
        assert storage_digest(engine) == digest
    train_step(engine)
    assert storage_digest(engine) != digest


@pytest.mark.parametrize(
    ("adapter", "stage"), slow_but([("peft", 3), ("chat", 3)], [("peft", 3), ("chat", 3), ("peft", 0), ("none", 3)])
)
def test_fusing_lora_never_writes_base_weights(ranks, adapter, stage):
    ranks.run(check_fusing, adapter, stage)


def test_fusing_lora_with_unmerged_adapters(ranks):
    ranks.run(check_fusing, "peft", 3, lora="unmerged")


def check_names() -> None:
    for adapter in ADAPTERS:
        engine = engine_of(ADAPTERS[adapter](tiny_model("llama")), settings(3))
        factors = [param for name, param in engine.module.named_parameters() if "lora_" in name]
        assert {id(param) for param in engine.all_lora_params} == {id(param) for param in factors}
        assert len(engine.layer_params) == len(engine.layer_lora_params) == 3
        flat = [param for layer in engine.layer_params + engine.layer_lora_params for param in layer]
        inside = [param for name, param in engine.module.named_parameters() if ".layers." in name]
        assert sorted(map(id, flat)) == sorted(map(id, inside))
        assert len(engine.all_layers_params) == len(list(engine.module.parameters()))
        assert all(bool(layer) == (adapter != "none") for layer in engine.layer_lora_params)
    ids, mask = prompts(2, 6, padded=True)
    engine.eval()
    first = engine.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert engine.stats()["kv_bytes"] > 0
    engine.release_inference_cache()
    assert engine.stats()["kv_bytes"] == 0
    engine.retake_inference_cache()
    assert torch.equal(engine.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False), first)
    with engine.inference(), pytest.raises(RuntimeError, match="release_inference_cache.. inside"):
        engine.release_inference_cache()
    for call in (engine.prepare_shared_prefill, engine.repeat_shared_prefill_cache):
        with pytest.raises(NotImplementedError, match="prefills equal prompts once by itself"):
            call(2, 4)


def test_attributes_and_methods_that_scripts_use(ranks):
    ranks.run(check_names)
