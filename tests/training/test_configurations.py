"""DeepSpeed configurations: offload, autocast, gradient accumulation, `zero.Init`, an engine without an optimizer."""

import copy
import warnings

import deepspeed
import pytest
import torch
import torch.distributed as dist

import hybrid
from tests.engines import engine_of, settings, train_step
from tests.marks import slow_but
from tests.tiny_models import prompts, tiny_model, twin

ZERO = {"stage3_param_persistence_threshold": 0}
OFFLOADS = {
    "optimizer, stage 1": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    "optimizer, stage 2": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer, stage 3": {**ZERO, "stage": 3, "offload_optimizer": {"device": "cpu"}},
    "optimizer and parameters": {
        **ZERO,
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}


def check_rollouts_and_training(config: dict, dtype: torch.dtype = torch.float32) -> None:
    """Generation equals Hugging Face's before and after a step; training equals that of an engine always in train
    mode."""
    model = tiny_model("llama")
    reference = twin(model)
    engine, plain = engine_of(model, copy.deepcopy(config)), engine_of(tiny_model("llama"), copy.deepcopy(config))
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    request = {"attention_mask": mask, "max_new_tokens": 6}
    if dtype == torch.float32:
        assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    before = engine.generate(ids, **request)
    for step in range(3):
        assert torch.equal(train_step(engine, step), train_step(plain, step))
        engine.generate(ids, **request)
    assert not torch.equal(engine.generate(ids, **request), before)
    assert torch.equal(engine.generate(ids, **request), plain.generate(ids, **request))


@pytest.mark.parametrize("name", slow_but(["optimizer and parameters"], OFFLOADS))
def test_offload_generates_and_trains_as_without_switching(ranks, name):
    config = settings(zero_optimization=OFFLOADS[name], zero_force_ds_cpu_optimizer=False)
    ranks.run(check_rollouts_and_training, config)


def check_autocast(stage: int) -> None:
    """Under torch_autocast forwards in eval mode run in the dtype that training runs in."""
    autocast = {"enabled": True, "dtype": "bfloat16"}
    engine = engine_of(tiny_model("llama"), settings(stage, torch_autocast=autocast))
    ids, mask = prompts(2, 6, padded=False, seed=dist.get_rank())
    with torch.no_grad():
        expected = engine(input_ids=ids, attention_mask=mask).logits
    engine.eval()
    actual = engine(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(actual, expected)
    engine.train()
    check_rollouts_and_training(settings(stage, torch_autocast=autocast), torch.bfloat16)


@pytest.mark.parametrize("stage", slow_but([3], [0, 3]))
def test_autocast_forwards_in_eval_mode_equal_training_forwards(ranks, stage):
    ranks.run(check_autocast, stage)


def check_zero_init() -> None:
    """A model partitioned while it is constructed."""
    config = settings(3)
    with deepspeed.zero.Init(config_dict_or_path=copy.deepcopy(config)):
        # Hugging Face would zero the padding row, which is partitioned away
        model = tiny_model("llama", pad_token_id=None)
    engine = engine_of(model, config)
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    own = list(model.parameters())
    reference = tiny_model("llama", pad_token_id=None).eval()
    with torch.no_grad(), deepspeed.zero.GatheredParameters(own):
        for copied, parameter in zip(reference.parameters(), own, strict=True):
            copied.copy_(parameter)
    request = {"attention_mask": mask, "max_new_tokens": 6}
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))


def test_zero_init_generates_and_trains_as_without_switching(ranks):
    ranks.run(check_zero_init)


def check_frozen_engine() -> None:
    """An engine without an optimizer: a reference model, partitioned."""
    model = tiny_model("llama").requires_grad_(False)
    reference = twin(model)
    config = settings(3)
    del config["optimizer"]
    engine = engine_of(model, config)
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    for _ in range(2):
        request = {"attention_mask": mask, "max_new_tokens": 6}
        assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    assert engine.score(ids, mask).per_token_logps.shape == (2, 5)


def test_an_engine_without_an_optimizer_generates(ranks):
    ranks.run(check_frozen_engine)


def check_tied_and_shared() -> None:
    """Parameters that modules share are gathered once and shared in the snapshot."""
    model = tiny_model("llama", tie_word_embeddings=True)
    reference = twin(model)
    engine = engine_of(model, settings(3))
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    request = {"attention_mask": mask, "max_new_tokens": 6}
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    assert engine.stats()["snapshot_bytes"] == sum(parameter.ds_numel * 4 for parameter in model.parameters())
    train_step(engine)
    engine.generate(ids, **request)


def test_tied_weights_are_gathered_once(ranks):
    ranks.run(check_tied_and_shared)


def check_graphs_without_a_device() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = engine_of(tiny_model("llama"), settings(3, hybrid_engine={"enable_cuda_graph": True}))
    told = [str(warning.message) for warning in caught if "enable_cuda_graph" in str(warning.message)]
    assert len(told) == (dist.get_rank() == 0), told
    ids, mask = prompts(2, 5, padded=False)
    assert engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=3)).completion_ids.shape == (2, 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_graphs_without_a_device_warn_and_run(ranks):
    ranks.run(check_graphs_without_a_device)
