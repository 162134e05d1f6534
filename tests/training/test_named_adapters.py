"""Calls that name an adapter use it, whatever is active, and leave the model as it was."""

import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import logger
from torch import nn
from torch.nn import functional as F

import hybrid
from tests.engines import engine_of, settings, storage_digest, train_step
from tests.marks import slow_but
from tests.tiny_models import prompts, tiny_model, twin
from tests.training.test_changes_in_windows import MODES
from tests.training.test_speculation import forced
from tests.training.test_unmerged import with_weights_of

GREEDY = hybrid.SamplingParams(max_new_tokens=4, temperature=0)
SAMPLED = hybrid.SamplingParams(max_new_tokens=6, temperature=1.0, seed=7)
# Of other ranks, scales and modules, a rank-stabilized one among them.
ADAPTERS: dict[str, dict[str, Any]] = {
    "alice": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "bob": {"r": 3, "lora_alpha": 9, "target_modules": ["q_proj", "down_proj"]},
    "ref": {"r": 2, "lora_alpha": 4, "use_rslora": True, "target_modules": ["v_proj", "gate_proj", "o_proj"]},
}


def with_adapters(model: nn.Module, **adapters: dict[str, Any]) -> peft.PeftModel:
    """The model with these adapters, random ones, in the weights' dtype; the first is active."""
    torch.manual_seed(5)
    named = {name: peft.LoraConfig(init_lora_weights=False, **given) for name, given in (adapters or ADAPTERS).items()}
    first, *others = named
    adapted = peft.get_peft_model(model, named[first], adapter_name=first)
    for name in others:
        adapted.add_adapter(name, named[name])
    return adapted


def flags_of(model: nn.Module) -> list[Any]:
    """All that a call must leave as it was: PEFT's flags and `requires_grad`."""
    tables = [
        (name, {key: value for key, value in vars(module).items() if "adapter" in key})
        for name, module in model.named_modules()
    ]
    return [repr(tables), [param.requires_grad for param in model.parameters()]]


def full_mask_of(sequences: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mask of prompts with this mask, and of all tokens after them."""
    return torch.cat([mask, torch.ones_like(sequences[:, mask.shape[1] :])], dim=1)


@torch.no_grad()
def require_peft(engine: hybrid.HybridEngine, reference: peft.PeftModel, given: dict[str, Any], active: str) -> None:
    """Rollouts, scores and `generate` called with `given` are those of PEFT's own forward with `active` ("": none)."""
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    if active:
        reference.set_adapter(active)
    else:
        reference.base_model.disable_adapter_layers()
    expected = reference.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    full_mask = full_mask_of(expected, mask)
    logps = reference(input_ids=expected, attention_mask=full_mask).logits.log_softmax(-1)[:, :-1]
    logps = logps.gather(2, expected[:, 1:, None]).squeeze(2)
    reference.base_model.enable_adapter_layers()
    assert torch.equal(engine.rollout(ids, mask, GREEDY, **given).sequences[:, : expected.shape[1]], expected), given
    scores = engine.score(expected, full_mask, **given).per_token_logps
    real = full_mask[:, 1:].bool() & full_mask[:, :-1].bool()
    torch.testing.assert_close(scores[real], logps[real], atol=2e-4, rtol=1e-4)
    tokens = engine.generate(ids, attention_mask=mask, max_new_tokens=4, **given)
    assert torch.equal(tokens, expected), given


def sampled(engine: hybrid.HybridEngine, **given: Any) -> list[torch.Tensor]:
    """Tokens, their logprobs and scores of a call."""
    ids, mask = prompts(3, 6, padded=True, seed=dist.get_rank())
    batch = engine.rollout(ids, mask, SAMPLED, num_generations=2, **given)
    if "adapter_names" in given:
        given = {"adapter_names": [name for name in given["adapter_names"] for _ in range(2)]}
    scores = engine.score(batch.sequences, batch.attention_mask, **given)
    return [batch.completion_ids, batch.sampling_per_token_logps, scores.per_token_logps, scores.entropies]


def require_equal(actual: list[torch.Tensor], expected: list[torch.Tensor], what: str, tolerance: float = 0.0) -> None:
    """The results of `sampled` are equal, to the bit without a tolerance."""
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance, msg=lambda m: f"{what}: {m}")


def check_named(stage: int, blocks: dict[str, Any]) -> None:
    """A named adapter gives PEFT's tokens and logprobs, and those of our engine with it active, to the bit."""
    model = with_adapters(tiny_model("llama"))
    reference = twin(model)
    engine, other = (engine_of(each, settings(stage, **blocks)) for each in (model, with_adapters(tiny_model("llama"))))
    digest, flags, version = storage_digest(engine), flags_of(engine.module), engine.weight_version
    expected = {}
    for name in ADAPTERS:
        other.module.set_adapter(name)
        expected[name] = sampled(other)
        require_peft(engine, reference, {"adapter": name}, name)
        require_equal(sampled(engine, adapter=name), expected[name], name)
        require_peft(engine, reference, {}, "alice")
    assert len({str(tensors[1].tolist()) for tensors in expected.values()}) == len(expected)
    require_peft(engine, reference, {"adapter": "__base__"}, "")
    with engine.inference():
        require_peft(engine, reference, {"adapter": "bob"}, "bob")
        require_peft(engine, reference, {}, "alice")
        require_equal(sampled(engine, adapter="ref"), expected["ref"], "ref in a window")
        require_peft(engine, reference, {"adapters": False}, "")
        require_peft(engine, reference, {"adapter": "alice"}, "alice")
    with engine.inference(adapter="bob"):
        require_peft(engine, reference, {}, "bob")
        with engine.inference(adapters=True):
            require_peft(engine, reference, {}, "alice")
        require_peft(engine, reference, {"adapter": "ref"}, "ref")
        require_equal(sampled(engine), expected["bob"], "a window of bob")
    assert engine.weight_version == version, "naming an adapter made a new version"
    with engine.module.disable_adapter():
        require_equal(sampled(engine, adapter="bob"), expected["bob"], "disabled")
    assert flags_of(engine.module) == flags and storage_digest(engine) == digest
    for each in (engine, other):
        each.destroy()


CASES = [(stage, mode) for stage in (0, 2, 3) for mode in MODES if stage == 3 or "streaming" not in mode]
QUICK = [(0, "merged"), (3, "merged"), (3, "unmerged")]


@pytest.mark.parametrize(("stage", "mode"), slow_but(QUICK, CASES))
def test_a_named_adapter_is_used_whatever_is_active(ranks, stage, mode):
    ranks.run(check_named, stage, MODES[mode])


NAMES = (("alice", "bob", "alice"), ("__base__", "ref", "bob"))  # of each rank's rows


def padded(tensor: torch.Tensor, width: int = 32) -> torch.Tensor:
    return F.pad(tensor, (0, width - tensor.shape[1]))


def check_rows(stage: int, blocks: dict[str, Any]) -> None:
    """Rows with different adapters have the bits that they have in a call for their adapter alone; in the model's own
    layers, whose sums depend on the batch, the same tokens."""
    tolerance = 1e-5 if blocks.get("rollout", {}).get("containers") == "native" else 0.0
    engine = engine_of(with_adapters(tiny_model("llama")), settings(stage, **blocks))
    flags, own = flags_of(engine.module), NAMES[dist.get_rank()]
    alone = {name: [padded(each) for each in sampled(engine, adapter=name)] for name in ("__base__", *ADAPTERS)}
    assert len({str(tensors[1].tolist()) for tensors in alone.values()}) == len(alone)
    of_generations = [name for name in own for _ in range(2)]
    expected = [torch.stack([alone[name][at][row] for row, name in enumerate(of_generations)]) for at in range(4)]
    require_equal([padded(each) for each in sampled(engine, adapter_names=list(own))], expected, "", tolerance)
    with engine.inference():
        require_equal([padded(each) for each in sampled(engine, adapter_names=own)], expected, "window", tolerance)
    ids, mask = prompts(3, 6, padded=True, seed=dist.get_rank())
    rows = list(engine.rollout_iter(ids, mask, SAMPLED, num_generations=2, adapter_names=own))
    assert sorted(int(batch.row_index) for batch in rows) == list(range(6))
    for batch in rows:
        assert torch.equal(padded(batch.completion_ids)[0], expected[0][int(batch.row_index)])
    # A rank without rows, and one that fails, make the others' calls.
    if dist.get_rank():
        assert len(engine.rollout(ids[:0], mask[:0], SAMPLED, adapter_names=[]).prompt_ids) == 0
    batch = engine.rollout(ids, mask, SAMPLED, num_generations=2, adapter_names=own)
    assert torch.equal(padded(batch.completion_ids), expected[0])
    if not dist.get_rank():
        with pytest.raises(ValueError, match="adapter: 'nobody' given; it must be one of 'alice', 'bob', 'ref'"):
            engine.rollout(ids, mask, SAMPLED, adapter_names=["alice", "bob", "nobody"])
    assert flags_of(engine.module) == flags
    engine.destroy()


@pytest.mark.parametrize(("stage", "mode"), slow_but([(0, "unmerged"), (3, "merged")], CASES))
def test_rows_of_one_call_have_different_adapters(ranks, stage, mode):
    ranks.run(check_rows, stage, MODES[mode])


def check_together(stage: int, blocks: dict[str, Any], requests: int, drafts: bool = False) -> None:
    """Rows of several adapters with one prompt, of more than a block, are `requests` requests, and share nothing that
    an adapter has computed: not in the call, and not with an earlier one. Training goes on with the active adapter."""
    engine, other = (engine_of(with_adapters(tiny_model("llama")), settings(stage, **blocks)) for _ in range(2))
    names = ["bob", "__base__", "alice", "bob", "ref"]
    ids, mask = (each.expand(5, -1) for each in prompts(1, 70, padded=False, seed=dist.get_rank()))
    limits, row_ids = torch.tensor([3, 30, 17, 30, 9]), torch.arange(5) + 7 * dist.get_rank()
    sampling = hybrid.SamplingParams(max_new_tokens=30, top_k=30, seed=3)
    if not drafts:  # which are of rows without penalties
        sampling = replace(sampling, repetition_penalty=1.2, min_new_tokens=2)
    opened: list[Any] = []
    window = engine._runtime.window
    unwatched = window.opened
    window.opened = lambda adapters=None, by_user=False: opened.append(adapters) or unwatched(adapters, by_user)
    for step in range(3):
        alone = {
            name: other.rollout(ids, mask, sampling, max_new_tokens=limits, row_ids=row_ids, adapter=name)
            for name in sorted(set(names))
        }
        opened.clear()
        with forced() if drafts else nullcontext():
            batch = engine.rollout(ids, mask, sampling, max_new_tokens=limits, row_ids=row_ids, adapter_names=names)
        assert not drafts or engine.stats()["drafted_tokens"] > 0, "nothing is drafted"
        if step:
            assert len(opened) == requests, opened
        elif requests == 1:  # the first call checks the decoder, under ZeRO-3 in a turn of the first adapter
            assert len(opened) == (4 if stage == 3 else 2), opened
        for row, name in enumerate(names):
            assert torch.equal(batch.completion_ids[row], alone[name].completion_ids[row]), (step, row)
            for logps in ("sampling_per_token_logps", "old_per_token_logps"):
                assert torch.equal(getattr(batch, logps)[row], getattr(alone[name], logps)[row]), (step, row)
        assert torch.equal(train_step(engine, step), train_step(other, step))
    # A rank that fails once ranks have agreed on the adapters joins the gather of the new weights.
    if dist.get_rank():
        assert len(engine.rollout(ids, mask, sampling, adapter_names=names).completion_ids) == 5
    else:
        with pytest.raises(ValueError, match="is over hybrid_engine.max_out_tokens"):
            engine.rollout(ids, mask, replace(sampling, max_new_tokens=10**6), adapter_names=names)
    assert len(engine.rollout(ids, mask, sampling, adapter_names=names[:1] * 5).completion_ids) == 5
    assert storage_digest(engine) == storage_digest(other)
    for each in (engine, other):
        each.destroy()


TOGETHER: dict[str, tuple] = {
    "unmerged": (1, {"rollout": {"lora": "unmerged"}}, 1),
    "unmerged, ZeRO-3": (3, {"rollout": {"lora": "unmerged"}}, 1),
    "unmerged, few rows at once": (1, {"rollout": {"lora": "unmerged", "max_num_seqs": 2}}, 1),
    "unmerged, drafts": (1, {"rollout": {"lora": "unmerged", "speculation": {"max_draft": 4}}}, 1, True),
    "merged": (1, {}, 4),
}


@pytest.mark.parametrize("mode", slow_but(["unmerged", "unmerged, ZeRO-3"], TOGETHER))
def test_rows_of_several_adapters_are_decoded_together(ranks, mode):
    ranks.run(check_together, *TOGETHER[mode])


def check_ranks_differ(stage: int, blocks: dict[str, Any]) -> None:
    """Ranks that compute or gather together and name different adapters all raise; others may."""
    rank = dist.get_rank()
    model = with_adapters(tiny_model("llama"))
    reference = twin(model)
    engine = engine_of(model, settings(stage, **blocks))
    ids, mask = prompts(2, 6, padded=True)
    name = ("bob", "ref")[rank]
    calls: list[Callable] = [
        lambda **given: engine.rollout(ids, mask, GREEDY, **given),
        lambda **given: engine.score(ids, mask, **given),
        lambda **given: engine.inference(**given).__enter__(),
    ]
    if stage < 3 and not engine.in_step:
        require_peft(engine, reference, {"adapter": name}, name)
    else:
        for call in calls:
            with pytest.raises(RuntimeError, match=r"rank 0.*'bob'.*rank 1.*'ref'"):
                call(adapter=name)
    # A rank whose name is unknown raises, and joins the others' call.
    for call in calls[:2]:
        if rank == 0:
            with pytest.raises(ValueError, match="adapter: 'nobody' given; it must be one of 'alice', 'bob', 'ref'"):
                call(adapter="nobody")
        else:
            call(adapter="bob")
    if rank == 0:
        with pytest.raises(ValueError, match="'nobody'"):
            engine.inference(adapter="nobody").__enter__()
    else:
        with engine.inference(adapter="bob"):
            engine.score(ids, mask)
    require_peft(engine, reference, {"adapter": "ref"}, "ref")
    require_peft(engine, reference, {}, "alice")
    engine.destroy()


@pytest.mark.parametrize(
    ("stage", "mode"),
    slow_but(
        [(3, "merged"), (3, "tensor parallel")],
        [(stage, mode) for stage, mode in CASES if "native" not in mode],
    ),
)
def test_ranks_that_name_different_adapters_all_raise(ranks, stage, mode):
    ranks.run(check_ranks_differ, stage, MODES[mode])


INVALID: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "an unknown name": (
        {"adapter": "nobody"},
        ValueError,
        "adapter: 'nobody' given; it must be one of 'alice', 'bob', 'ref', or '__base__' for none",
    ),
    "several names": ({"adapter": ["alice", "bob"]}, TypeError, "for one name a row use adapter_names"),
    "two arguments": ({"adapter": "bob", "adapters": False}, ValueError, "adapters=False and adapter='bob' given"),
    "names for too few rows": ({"adapter_names": ["bob"]}, ValueError, "1 names given for 2 rows of "),
    "one name for rows": ({"adapter_names": "bob"}, TypeError, "it must be a name for each row, or use adapter"),
    "an unknown name of a row": ({"adapter_names": ["bob", "nobody"]}, ValueError, "adapter: 'nobody' given"),
}


def check_invalid() -> None:
    engine = engine_of(with_adapters(tiny_model("llama")), settings(0))
    ids, mask = prompts(2, 6, padded=True)
    flags = flags_of(engine.module)
    for given, error, message in INVALID.values():
        for call in (
            lambda **more: engine.rollout(ids, mask, GREEDY, **more),
            lambda **more: engine.score(ids, mask, **more),
        ):
            with pytest.raises(error, match=re.escape(message)):
                call(**given)
    with pytest.raises(NotImplementedError, match="adapter_names is not available with stop_after"):
        engine.rollout(ids, mask, GREEDY, adapter_names=["bob", "ref"], stop_after=hybrid.StopAfter(rows=1))
    with pytest.raises(NotImplementedError, match=r"adapter_names is not available; give adapter="):
        engine.generate(ids, attention_mask=mask, adapter_names=["bob", "ref"])
    engine.module.merge_adapter(["bob"])
    with pytest.raises(RuntimeError, match=r"PEFT has merged \['bob'\].*unmerge_adapter"):
        engine.score(ids, mask, adapter="bob")
    engine.module.unmerge_adapter()
    assert flags_of(engine.module) == flags
    plain = engine_of(tiny_model("llama"), settings(0))
    with pytest.raises(ValueError, match="adapter: 'bob' given; the model has no adapters of PEFT"):
        plain.score(ids, mask, adapter="bob")
    for each in (engine, plain):
        each.destroy()


def test_invalid_names_are_refused(ranks):
    ranks.run(check_invalid)


def check_int8(stage: int) -> None:
    config = settings(stage, rollout={"weight_dtype": "int8"})
    engine, other = (engine_of(with_adapters(tiny_model("llama")), config) for _ in range(2))
    for name in ADAPTERS:
        other.module.set_adapter(name)
        require_equal(sampled(engine, adapter=name), sampled(other), name)
    for each in (engine, other):
        each.destroy()


@pytest.mark.parametrize("stage", slow_but([0], [0, 3]))
def test_int8_rollouts_use_a_named_adapter(ranks, stage):
    ranks.run(check_int8, stage)


def check_self_play(stage: int, blocks: dict[str, Any]) -> None:
    """Two policies on one base, trained in turn: each rollout names its policy, and is that of the weights that it then
    has. Training one leaves the other's bits."""
    players = {name: ADAPTERS[name] for name in ("alice", "bob")}
    model = with_adapters(tiny_model("llama"), **players)
    for name, param in model.named_parameters():
        param.requires_grad = "lora_" in name
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.05}}, "zero_allow_untested_optimizer": True}
    config = settings(stage, **blocks) | sgd
    engine = engine_of(model, config)
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    latest = {name: sampled(engine, adapter=name) for name in ("alice", "bob")}
    for step in range(4):
        mover, other = ("alice", "bob") if step % 2 == 0 else ("bob", "alice")
        with engine.inference():
            moves = engine.rollout(ids, mask, SAMPLED, adapter=mover)
            replies = engine.rollout(moves.sequences, moves.attention_mask, SAMPLED, adapter=other)
            reference = engine.score(replies.sequences, replies.attention_mask, adapters=False).per_token_logps
        assert replies.weight_version == moves.weight_version == engine.weight_version
        engine.module.set_adapter(mover)
        engine.train()
        logps = engine.logps(moves).per_token_logps
        torch.testing.assert_close(
            logps.detach() * moves.completion_mask, moves.old_per_token_logps, atol=2e-4, rtol=1e-4
        )
        engine.backward(-(logps * moves.completion_mask).sum())
        engine.step()
        now = {name: sampled(engine, adapter=name) for name in ("alice", "bob")}
        require_equal(now[other], latest[other], f"{other} after a step of {mover}")
        assert not torch.equal(now[mover][1], latest[mover][1]), f"{mover} has not moved"
        with_weights = with_weights_of(engine, with_adapters(tiny_model("llama"), **players))
        for name in ("alice", "bob"):
            require_peft(engine, with_weights, {"adapter": name}, name)
        latest = now
        assert reference.isfinite().all()
    engine.destroy()


@pytest.mark.parametrize(("stage", "mode"), slow_but([(2, "merged"), (3, "unmerged")], CASES))
def test_self_play_of_two_policies_on_one_base(ranks, stage, mode):
    ranks.run(check_self_play, stage, MODES[mode])


def check_parameters_in_a_window(stage: int) -> None:
    """A merged weight that a named adapter's call has overwritten is not read as the window's."""
    engine = engine_of(with_adapters(tiny_model("llama")), settings(stage))
    ids, mask = prompts(2, 6, padded=True)

    def merged() -> torch.Tensor:
        layer = engine.module.base_model.model.model.layers[0].self_attn.q_proj
        return layer.get_base_layer().weight.detach().clone()

    with engine.inference():
        before = merged()
        engine.score(ids, mask, adapter="bob")
        with pytest.raises(RuntimeError, match="after a call with other adapters"):
            merged()
        engine.score(ids, mask)
        assert torch.equal(merged(), before)
        with engine.inference(adapter="bob"):
            assert not torch.equal(merged(), before)
    engine.destroy()


@pytest.mark.parametrize("stage", slow_but([0], [0, 3]))
def test_an_overwritten_weight_is_not_read(ranks, stage):
    ranks.run(check_parameters_in_a_window, stage)


def check_methods() -> None:
    """DoRA, and modules_to_save of one adapter alone."""
    kinds: dict[str, dict[str, dict[str, Any]]] = {
        "dora": {"alice": {"use_dora": True, "target_modules": ["q_proj"]}, "bob": ADAPTERS["bob"]},
        "saved": {"alice": ADAPTERS["bob"], "bob": {"target_modules": ["k_proj"], "modules_to_save": ["lm_head"]}},
    }
    for adapters in kinds.values():
        for blocks in ({}, {"rollout": {"lora": "unmerged"}}):
            model = with_adapters(tiny_model("llama"), **adapters)
            with torch.no_grad():
                for name, param in model.named_parameters():
                    if "modules_to_save" in name:
                        param.mul_(1.5)
            reference, engine = twin(model), engine_of(model, settings(0, **blocks))
            for name in ("bob", "alice", "bob"):
                require_peft(engine, reference, {"adapter": name}, name)
            require_peft(engine, reference, {}, "alice")
            engine.destroy()


def test_adapters_of_other_kinds_are_named(ranks):
    ranks.run(check_methods)


def check_served() -> None:
    """A server serves the adapter that it names; a merge for a call is logged once."""
    engine = engine_of(with_adapters(tiny_model("llama")), settings(0))
    prompt = torch.arange(5, 11)
    ids, mask = prompt[None], torch.ones(1, 6, dtype=torch.int64)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for name in ("bob", "ref"):
        expected = engine.rollout(ids, mask, GREEDY, adapter=name).completion_ids[0]
        with engine.serve(adapter=name, max_num_seqs=2) as server:
            done = server.submit(prompt, GREEDY).result()
        assert done[0].token_ids == expected[: len(done[0].token_ids)].tolist()
    logger.removeHandler(handler)
    said = [text for text in records if "was merged for a call" in text]
    assert len(said) == (dist.get_rank() == 0)
    assert all("adapter 'bob'" in text and "rollout.lora to 'unmerged'" in text for text in said)
    engine.destroy()


def test_a_server_names_its_adapter_and_merges_are_logged_once(ranks):
    ranks.run(check_served)
