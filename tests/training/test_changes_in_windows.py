"""Whatever changes weights or adapters inside a window is seen by the next call, or refused, and nothing of it is left
for calls after the window."""

from collections.abc import Callable
from contextlib import nullcontext

import peft
import pytest
import torch
import torch.distributed as dist
from deepspeed import zero
from torch import nn

import hybrid
from tests.decoders.test_unmerged_lora import with_two_adapters
from tests.engines import engine_of, settings, storage_digest
from tests.marks import slow_but
from tests.tiny_models import prompts, tiny_model, twin, with_chat_lora, with_peft

SAMPLING = hybrid.SamplingParams(max_new_tokens=4, temperature=0)


def scale(model: nn.Module, method: str, *args) -> None:
    """Call a method of every LoRA layer."""
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            getattr(module, method)(*args)


# Changes that stay until the next one.
SWITCHES: dict[str, Callable[[nn.Module], object]] = {
    "another adapter": lambda model: model.set_adapter("second"),
    "both adapters": lambda model: model.base_model.set_adapter(["default", "second"]),
    "scale_layer": lambda model: scale(model, "scale_layer", 3.0),
    "unscale_layer": lambda model: scale(model, "unscale_layer"),
    "set_scale": lambda model: scale(model, "set_scale", "default", 0.25),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "enabled": lambda model: model.base_model.enable_adapter_layers(),
    "the first adapter": lambda model: model.set_adapter("default"),
}


def require_same(engine: hybrid.HybridEngine, reference: nn.Module, what: str, adapters: bool | None = None) -> None:
    """Every kind of call gives what the reference, PEFT's own forward, gives."""
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, 6, padded=True, seed=rank)
    expected = reference.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    full_mask = torch.cat([mask, torch.ones_like(expected[:, mask.shape[1] :])], dim=1)
    with torch.no_grad():
        logits = reference(expected, attention_mask=full_mask).logits
    batch = engine.rollout(ids, mask, SAMPLING, adapters=adapters)
    assert torch.equal(batch.sequences[:, : expected.shape[1]], expected), what
    scores = engine.score(expected, full_mask, adapters=adapters).per_token_logps
    logps = logits.log_softmax(-1)[:, :-1].gather(2, expected[:, 1:, None]).squeeze(2)
    real = full_mask[:, 1:].bool() & full_mask[:, :-1].bool()
    torch.testing.assert_close(scores[real], logps[real], atol=2e-4, rtol=1e-4, msg=lambda m: f"{what}: {m}")
    if adapters is None:
        tokens = engine.generate(ids, attention_mask=mask, max_new_tokens=4)
        assert torch.equal(tokens, expected), what
        actual = engine(expected, attention_mask=full_mask, use_cache=False).logits
        torch.testing.assert_close(
            actual[full_mask.bool()], logits[full_mask.bool()], atol=2e-4, rtol=1e-4, msg=lambda m: f"{what}: {m}"
        )


def check_switches(stage: int, blocks: dict) -> None:
    model = with_two_adapters(tiny_model("llama"))
    reference, base = twin(model), tiny_model("llama").eval()
    engine = engine_of(model, settings(stage, **blocks))
    before, version = storage_digest(engine), engine.weight_version
    with engine.inference():
        require_same(engine, reference, "at first")
        for what, switch in SWITCHES.items():
            for module in (engine.module, reference):
                switch(module)
            require_same(engine, reference, what)
            if what == "another adapter":
                with engine.module.disable_adapter():
                    require_same(engine, base, "disable_adapter()")
                    with engine.inference(adapters=False):
                        require_same(engine, base, "without adapters, disabled")
                with engine.inference(adapters=False):
                    with engine.module.disable_adapter():
                        require_same(engine, base, "disabled, without adapters")
                    require_same(engine, base, "without adapters")
                require_same(engine, reference, "enabled again")
        for module in (engine.module, reference):
            SWITCHES["another adapter"](module)
    assert engine.weight_version > version
    require_same(engine, reference, "after the window")
    assert storage_digest(engine) == before
    engine.destroy()


NATIVE = {"rollout": {"containers": "native"}}
MODES = {
    "merged": {},
    "unmerged": {"rollout": {"lora": "unmerged"}},
    "native": NATIVE,
    "native, unmerged": {"rollout": {"containers": "native", "lora": "unmerged"}},
    "tensor parallel": {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}},
    "tensor parallel, native": {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}, **NATIVE},
    "streaming": {"hybrid_engine": {"enabled": True, "pin_parameters": False}},
    "streaming, native": {"hybrid_engine": {"enabled": True, "pin_parameters": False}, **NATIVE},
}
CASES = [(stage, mode) for stage in (0, 2, 3) for mode in MODES if stage == 3 or "streaming" not in mode]


@pytest.mark.parametrize(("stage", "mode"), slow_but([(0, "merged"), (3, "merged"), (3, "unmerged")], CASES))
def test_adapters_switched_inside_a_window_are_used_by_the_next_call(ranks, stage, mode):
    ranks.run(check_switches, stage, MODES[mode])


def check_int8(stage: int) -> None:
    """Rollouts over int8 weights follow the switches: an engine that opens its window afterwards draws the same."""
    config = settings(stage, rollout={"weight_dtype": "int8"})
    engine, other = (engine_of(with_two_adapters(tiny_model("llama")), config) for _ in range(2))
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    sampling = hybrid.SamplingParams(max_new_tokens=6, temperature=1.0, seed=1)
    drawn = set()
    with engine.inference():
        for what in ("the first adapter", "another adapter", "disabled", "enabled", "set_scale"):
            for each in (engine, other):
                SWITCHES[what](each.module)
            if what in ("disabled", "enabled") or not drawn:
                engine.rollout(ids, mask, sampling)
            expected = other.rollout(ids, mask, sampling)
            actual = engine.rollout(ids, mask, sampling)
            assert torch.equal(actual.completion_ids, expected.completion_ids), what
            assert torch.equal(actual.sampling_per_token_logps, expected.sampling_per_token_logps), what
            drawn.add(str(actual.sampling_per_token_logps.tolist()))
    assert len(drawn) > 2
    for each in (engine, other):
        each.destroy()


@pytest.mark.parametrize("stage", slow_but([0], [0, 3]))
def test_int8_rollouts_use_adapters_switched_inside_a_window(ranks, stage):
    ranks.run(check_int8, stage)


def write(params: list[nn.Parameter]) -> None:
    """Write through `.data`; under ZeRO-3 on rank 0, for all ranks."""
    partitioned = any(hasattr(param, "ds_id") for param in params)
    with zero.GatheredParameters(params, modifier_rank=0) if partitioned else nullcontext():
        if dist.get_rank() == 0 or not partitioned:
            for param in params:
                param.data.mul_(1.5)


def check_writes(stage: int, blocks: dict) -> None:
    model = with_peft(tiny_model("llama"))
    reference = twin(model)
    engine = engine_of(model, settings(stage, **blocks))
    own = dict(engine.module.named_parameters())
    groups = {
        "a norm": [name for name in own if name.endswith("model.norm.weight")],
        "adapted weights": [name for name in own if "base_layer" in name],
        "factors": [name for name in own if "lora_B" in name],
    }
    with engine.inference():
        require_same(engine, reference, "at first")
        for what, names in groups.items():
            version = engine.weight_version
            write([own[name] for name in names])
            copies = dict(reference.named_parameters())
            with torch.no_grad():
                for name in names:
                    copies[name].mul_(1.5)
            require_same(engine, reference, what)
            assert engine.weight_version > version
    require_same(engine, reference, "after the window")
    engine.destroy()


@pytest.mark.parametrize(("stage", "mode"), slow_but([(0, "merged"), (3, "merged"), (3, "tensor parallel")], CASES))
def test_weights_written_inside_a_window_are_used_by_the_next_call(ranks, stage, mode):
    ranks.run(check_writes, stage, MODES[mode])


def add_adapter(model: nn.Module) -> None:
    model.add_adapter("third", peft.LoraConfig(r=2, target_modules=["q_proj"]))


def norm_of(model: nn.Module) -> nn.Module:
    return model.get_submodule("base_model.model.model.norm")


# What is refused at once, with the message, or by the next call.
REFUSED: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "merge_adapter": (lambda model: model.merge_adapter(), "adapters merged, unmerged or added"),
    "merge_and_unload": (lambda model: model.merge_and_unload(), "adapters merged, unmerged or added"),
    "add_adapter": (add_adapter, "adapters merged, unmerged or added"),
}
REFUSED_NEXT: dict[str, Callable[[nn.Module], object]] = {
    "a parameter replaced": lambda model: setattr(norm_of(model), "weight", nn.Parameter(torch.ones(32))),
    "delete_adapter": lambda model: model.delete_adapter("second"),
    "a merged weight written": lambda model: next(
        param for name, param in model.named_parameters() if name.endswith("q_proj.base_layer.weight")
    ).data.mul_(2.0),
}


def check_refused(stage: int, what: str) -> None:
    model = with_two_adapters(tiny_model("llama"))
    model.set_adapter("default")
    reference = twin(model)
    engine = engine_of(model, settings(stage))
    before = storage_digest(engine)
    ids, mask = prompts(2, 6, padded=True)
    if what in REFUSED:
        change, message = REFUSED[what]
        with engine.inference():
            with pytest.raises(RuntimeError, match=message):
                change(engine.module)
            require_same(engine, reference, "in the window")
    else:
        with pytest.raises(RuntimeError, match=r"[Ll]eave the block first"), engine.inference():
            engine.score(ids, mask)
            REFUSED_NEXT[what](engine.module)
            for call in (
                lambda: engine.score(ids, mask),
                lambda: engine.generate(ids, max_new_tokens=2),
                lambda: engine.rollout(ids, mask, SAMPLING),
                lambda: engine(ids, use_cache=False),
            ):
                with pytest.raises(RuntimeError, match=r"leave the block first|Leave the block first"):
                    call()
            if what == "delete_adapter":
                raise RuntimeError("leave the block first")
    require_same(engine, reference, "after the window")
    assert what == "delete_adapter" or storage_digest(engine) == before
    engine.destroy()


@pytest.mark.parametrize(
    ("stage", "what"),
    slow_but(
        [(0, "merge_adapter"), (3, "a merged weight written"), (0, "a merged weight written")],
        [
            (stage, what)
            for stage in (0, 3)
            for what in (*REFUSED, *REFUSED_NEXT)
            if stage == 3 or "parameter" not in what
        ],
    ),
)
def test_what_a_window_cannot_follow_is_refused(ranks, stage, what):
    ranks.run(check_refused, stage, what)


def check_cast(stage: int) -> None:
    """A cast model is refused inside the window, and runs in its new dtype after it."""
    engine = engine_of(tiny_model("llama"), settings(stage))
    ids, mask = prompts(2, 6, padded=True)
    with (
        pytest.raises(RuntimeError, match=r"eave the block first") if stage == 3 else nullcontext(),
        engine.inference(),
    ):
        engine.score(ids, mask)
        engine.module.bfloat16()
        with pytest.raises(RuntimeError, match=r"eave the block first"):
            engine.score(ids, mask)
    if stage < 3:
        reference = twin(engine.module)
        assert next(reference.parameters()).dtype == torch.bfloat16
        actual = engine.score(ids, mask).per_token_logps
        logits = reference(ids, attention_mask=mask).logits.float()
        expected = logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
        real = mask[:, :-1].bool()
        assert (actual - expected)[real].abs().max() < 0.1
    engine.destroy()


@pytest.mark.parametrize("stage", slow_but([0], [0, 3]))
def test_a_model_cast_inside_a_window_is_refused(ranks, stage):
    ranks.run(check_cast, stage)


def check_ranks_differ(blocks: dict, kind: str) -> None:
    """One rank's change is an error on all ranks that compute together, not a hang."""
    model = with_two_adapters(tiny_model("llama"))
    model.set_adapter("default")
    reference = twin(model)
    engine = engine_of(model, settings(3, **blocks))
    ids, mask = prompts(2, 6, padded=True)
    with engine.inference():
        require_same(engine, reference, "at first")
        if kind == "another adapter":
            if dist.get_rank() == 1:
                engine.module.set_adapter("second")
            for call in (lambda: engine.score(ids, mask), lambda: engine.rollout(ids, mask, SAMPLING)):
                with pytest.raises(RuntimeError, match=r"rank 0 calls the model with default .*rank 1 .*second"):
                    call()
            engine.module.set_adapter("default")
        elif kind == "changed weights":
            if dist.get_rank() == 1:
                engine.mark_weights_changed()
            with pytest.raises(RuntimeError, match="rank 1 calls the model with default .*changed weights"):
                engine.score(ids, mask)
            engine.mark_weights_changed()
        require_same(engine, reference, "afterwards")
    engine.destroy()


@pytest.mark.parametrize(
    ("mode", "kind"),
    slow_but(
        [("tensor parallel", "another adapter"), ("streaming", "changed weights")],
        [(mode, kind) for mode in ("tensor parallel", "streaming") for kind in ("another adapter", "changed weights")],
    ),
)
def test_ranks_that_differ_inside_a_window_all_raise(ranks, mode, kind):
    ranks.run(check_ranks_differ, MODES[mode], kind)


def check_gathers_differ() -> None:
    """Ranks that gather for different adapters all raise."""
    model = with_two_adapters(tiny_model("llama"))
    engine = engine_of(model, settings(3))
    ids, mask = prompts(2, 6, padded=True)
    with engine.inference():
        engine.score(ids, mask)
        engine.module.set_adapter(("default", "second")[dist.get_rank()])
        with pytest.raises(RuntimeError, match=r"different adapters \(rank 0: default .*; rank 1: second"):
            engine.score(ids, mask)
        engine.module.set_adapter("second")
        engine.score(ids, mask)
    engine.destroy()


def test_ranks_that_gather_for_different_adapters_all_raise(ranks):
    ranks.run(check_gathers_differ)


def check_chat() -> None:
    """DeepSpeed-Chat's layers: a scale changed inside the window is used; fusing there is refused."""
    engine = engine_of(with_chat_lora(tiny_model("llama")), settings(3))
    reference = twin(with_chat_lora(tiny_model("llama")))
    with engine.inference():
        require_same(engine, reference, "at first")
        for model in (engine.module, reference):
            for module in model.modules():
                if hasattr(module, "lora_scaling"):
                    module.lora_scaling *= 2
        require_same(engine, reference, "another scale")
    engine.destroy()


def test_deepspeed_chats_adapters_scaled_inside_a_window(ranks):
    ranks.run(check_chat)
