"""Hooks that frameworks put on a model in training keep the fused decoder; any other reason for the native fallback is
warned of once, with the remedy, and is in `stats()` and `coverage()`."""

import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import GatheredParameters

import hybrid
from tests.engines import engine_of, settings, train_step
from tests.marks import slow_but
from tests.tiny_models import prompts, tiny_model, twin, with_chat_lora, with_peft

FUSED = {"containers": "fused"}  # independent of `--containers`
SAMPLING = hybrid.SamplingParams(max_new_tokens=5, temperature=0.0)


def containers(engine: hybrid.HybridEngine) -> set[str]:
    """The containers that the engine's parts run in."""
    return {row["container"] for row in engine.coverage()}


def require_rollouts_of(engine: hybrid.HybridEngine, reference: torch.nn.Module) -> None:
    """Greedy completions equal the reference's; `score` gives the rollout's logprobs."""
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    batch = engine.rollout(ids, mask, SAMPLING)
    expected = reference.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert torch.equal(batch.sequences, expected)
    scores = engine.score(batch.sequences, batch.attention_mask)
    real = batch.completion_mask.bool()
    actual = scores.per_token_logps[:, -real.shape[1] :][real]
    torch.testing.assert_close(actual, batch.raw_per_token_logps[real], atol=1e-4, rtol=1e-4)


def peft_on_a_checkpointed_model() -> torch.nn.Module:
    model = tiny_model("qwen2")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return with_peft(model)


def checkpointing_on_a_peft_model() -> torch.nn.Module:
    model = with_peft(tiny_model("qwen2"))
    model.gradient_checkpointing_enable()
    return model


def only_optimize_lora() -> torch.nn.Module:
    """As DeepSpeed-Chat's `main.py` does with `--only_optimize_lora --gradient_checkpointing`."""
    model = with_chat_lora(tiny_model("opt"))
    model.get_input_embeddings().weight.requires_grad_(False)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    return model


CHECKPOINTED = (peft_on_a_checkpointed_model, checkpointing_on_a_peft_model, only_optimize_lora)


def check_checkpointing(make, **block) -> None:
    model = make()
    reference = twin(model).eval()
    engine = engine_of(model, settings(3, rollout=FUSED, hybrid_engine=block))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the model runs in native containers")
        require_rollouts_of(engine, reference)
        train_step(engine)
        # TRL turns checkpointing off and on around `generate`, each time with another hook.
        model.gradient_checkpointing_disable()
        model.gradient_checkpointing_enable()
        require_fused_after_training(engine)


def require_fused_after_training(engine: hybrid.HybridEngine) -> None:
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    with engine.inference():
        engine.rollout(ids, mask, SAMPLING)
        engine.score(ids, mask, adapters=False)
        assert containers(engine) == {"fused"}
    assert engine.stats()["fallback_reason"] == ""
    assert containers(engine) == {"fused"}


@pytest.mark.parametrize("make", CHECKPOINTED)
def test_gradient_checkpointing_keeps_the_fused_decoder(ranks, make):
    ranks.run(check_checkpointing, make)


@pytest.mark.parametrize(
    "block", slow_but([{"inference_tp_size": 2}], [{"inference_tp_size": 2}, {"pin_parameters": False}]), ids=str
)
def test_gradient_checkpointing_keeps_the_fused_decoder_with_tp_and_streaming(ranks, block):
    ranks.run(check_checkpointing, peft_on_a_checkpointed_model, **block)


def fallback_warnings(run) -> list[str]:
    """Messages of the warnings about native containers while `run()` runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught if "runs in native containers" in str(warning.message)]


def check_warnings() -> None:
    """One warning, on rank 0, with the remedy; the reason is in stats() until the next eval(), and in coverage()."""
    engine = engine_of(tiny_model("llama"), settings(3, rollout=FUSED))
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    first = dist.get_rank() == 0
    request = {"attention_mask": mask, "max_new_tokens": 3}
    cases = (
        ({"return_dict_in_generate": True}, "return_dict_in_generate=True (fused gives sequences;"),
        ({"cache_implementation": "dynamic"}, "cache_implementation='dynamic' (leave it out)"),
    )
    for more, reason in cases:
        engine.eval()
        assert engine.stats()["fallback_reason"] == ""
        messages = fallback_warnings(lambda more=more: [engine.generate(ids, **request, **more) for _ in range(2)])
        assert len(messages) == first and all(reason in message for message in messages), (messages, reason)
        assert reason in engine.stats()["fallback_reason"]
        assert containers(engine) == {"fused"}
        assert all(reason in row["why"] for row in engine.coverage())
        engine.train()
        train_step(engine)
    handle = engine.module.lm_head.register_forward_hook(lambda *args: None)
    messages = fallback_warnings(lambda: (engine.rollout(ids, mask, SAMPLING), engine.score(ids, mask)))
    assert len(messages) == first and all(
        "<lambda> on lm_head (remove them before inference)" in message for message in messages
    )
    assert containers(engine) == {"native"} and "lm_head" in engine.stats()["fallback_reason"]
    handle.remove()
    assert containers(engine) == {"fused"}
    stats = engine.stats()
    assert stats.pop("fallback_reason")
    assert stats.pop("eager_reason") == ""
    assert all(isinstance(value, int | float) for value in stats.values())


def test_fallback_warns_once_with_reason_and_remedy(ranks):
    ranks.run(check_warnings)


def check_native_by_setting() -> None:
    engine = engine_of(tiny_model("llama"), settings(3, rollout={"containers": "native"}))
    ids, mask = prompts(2, 6, padded=False)
    assert fallback_warnings(lambda: engine.rollout(ids, mask, SAMPLING)) == []
    assert engine.stats()["fallback_reason"] == "rollout.containers=native"


def test_native_containers_by_setting_do_not_warn(ranks):
    ranks.run(check_native_by_setting)


def check_float64(stage: int, fp16: bool) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    reference = twin(model).eval()
    with patch.object(get_accelerator(), "is_fp16_supported", lambda: fp16):
        engine = engine_of(model, settings(stage, rollout=FUSED))
    messages = fallback_warnings(lambda: require_rollouts_of(engine, reference))
    assert len(messages) == (dist.get_rank() == 0) and all(
        "weights are torch.float64" in message for message in messages
    )
    assert "(cast the model" in engine.stats()["fallback_reason"]
    assert containers(engine) == {"native"}
    train_step(engine)
    trained = list(engine.module.parameters())
    with torch.no_grad(), GatheredParameters(trained, enabled=stage == 3):
        assert all(parameter.dtype == torch.float64 for parameter in trained)
        assert not any(map(torch.equal, trained, reference.parameters()))
        for copy, parameter in zip(reference.parameters(), trained, strict=True):
            copy.copy_(parameter)
    require_rollouts_of(engine, reference)


@pytest.mark.parametrize("fp16", [False, True], ids=["no fp16", "fp16"])
@pytest.mark.parametrize("stage", slow_but([3], [1, 2, 3]))
def test_float64_runs_natively(ranks, stage, fp16):
    """Also where the accelerator supports float16, as GPUs and CPUs with its instructions do: there DeepSpeed's
    ZeRO-3 refuses a model in float64."""
    ranks.run(check_float64, stage, fp16)


def check_unsummed(fp16: bool) -> None:
    sentence = r"^zero_optimization\.stage: 0 given; .* in torch\.float64; use stage 1, 2 or 3, or cast the model$"
    with patch.object(get_accelerator(), "is_fp16_supported", lambda: fp16):
        with pytest.raises(ValueError, match=sentence):
            engine_of(tiny_model("llama", dtype=torch.float64), settings(0))
        frozen = tiny_model("llama")
        frozen.scale = torch.nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        train_step(engine_of(frozen, settings(0)))
        half = {"fp16": {"enabled": fp16}} if fp16 else {"bf16": {"enabled": True}}
        train_step(engine_of(tiny_model("llama", dtype=torch.float64), settings(0, **half)))


@pytest.mark.parametrize("fp16", [False, True], ids=["no fp16", "fp16"])
def test_float64_that_deepspeed_cannot_sum_is_refused(ranks, fp16):
    """Without ZeRO, before anything is built; frozen parameters, and a model that DeepSpeed casts, are not."""
    ranks.run(check_unsummed, fp16)
