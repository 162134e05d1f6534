"""A weight with merged adapters has one copy, which holds the base or the merged weight by turns: results are those of
an engine that holds both, memory is that of one."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hybrid
from hybrid.weights.snapshot import Snapshot
from tests.decoders.test_unmerged_lora import with_two_adapters
from tests.engines import CollectiveCount, engine_of, settings, storage_digest, train_step
from tests.marks import slow_but
from tests.tiny_models import prompts, tiny_model, with_chat_lora, with_peft
from tests.training.test_memory_modes import LiveBytes

ROOM = {"rollout": {"memory_limit": 2**40}}  # for both
HEADED = {"target_modules": ["q_proj", "down_proj", "lm_head", "embed_tokens"]}
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: with_peft(tiny_model("llama")),
    "some of q, k, v": lambda: with_peft(tiny_model("llama"), target_modules=["q_proj", "v_proj", "up_proj"]),
    "two adapters": lambda: with_two_adapters(tiny_model("llama")),
    "DoRA": lambda: with_peft(tiny_model("llama"), use_dora=True),
    "biases": lambda: with_peft(tiny_model("gpt2"), target_modules=["c_attn", "c_fc"], lora_bias=True),
    "embedding and head": lambda: with_peft(tiny_model("llama"), **HEADED),
    "tied": lambda: with_peft(tiny_model("llama", tie_word_embeddings=True), **HEADED),
    "experts": lambda: with_peft(tiny_model("mixtral"), target_modules=["q_proj"], **EXPERTS),
    "DeepSpeed-Chat": lambda: with_chat_lora(tiny_model("llama")),
    "bfloat16": lambda: with_peft(tiny_model("llama")).to(torch.bfloat16),
}
MODES = {
    "pinned": {},
    "native": {"rollout": {"containers": "native"}},
    "tensor parallel": {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}},
    "freed": {"rollout": {"keep_snapshot": False}},
}


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def engine_with_both(model: nn.Module, config: dict) -> hybrid.HybridEngine:
    """An engine whose snapshot has a copy of the base and one of the merged weight, in any mode."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Snapshot, "_copies_to_merge_over", lambda self: {})
        return engine_of(model, config)


def calls(engine: hybrid.HybridEngine) -> list[torch.Tensor]:
    """Calls with and without adapters by turns, in a window and outside of one; all that they give. Ranks differ in
    rows and lengths."""
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, 5 + rank, padded=True, seed=rank)
    sampling = hybrid.SamplingParams(max_new_tokens=4 + 2 * rank, temperature=0.9, seed=1)
    given = []
    with engine.inference():
        batch = engine.rollout(ids, mask, sampling, num_generations=2)
        sequence = batch.sequences, batch.attention_mask
        for adapters in (None, False, None, False, False, True):
            given.append(engine.score(*sequence, adapters=adapters).per_token_logps)
        again = engine.rollout(ids, mask, sampling, num_generations=2)
        with engine.inference(adapters=False):
            given.append(engine(batch.sequences, attention_mask=batch.attention_mask, use_cache=False).logits)
            given.append(engine.score(*sequence, adapters=True).entropies)
            given.append(engine.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False))
        given.append(engine(batch.sequences, attention_mask=batch.attention_mask, use_cache=False).logits)
    given.append(engine.score(*sequence, adapters=False).per_token_logps)
    later = engine.rollout(ids, mask, sampling, num_generations=2)
    given.append(engine.rollout(ids, mask, sampling, adapters=False).sampling_per_token_logps)
    for each in (batch, again, later):
        given += [each.completion_ids, each.sampling_per_token_logps, each.old_per_token_logps]
        assert each.weight_version == engine.weight_version
    assert (given[0] - given[1]).abs().max() > 1e-3, "the adapters change nothing"
    return given


def check_same(model: str, mode: str, stage: int) -> None:
    config = settings(stage, dtype=dtype_of(MODELS[model]()), **MODES[mode])
    both, engine = engine_with_both(MODELS[model](), config), engine_of(MODELS[model](), config)
    assert mode == "native" or not engine.stats()["fallback_reason"]
    for step in range(3):
        expected, before = calls(both), storage_digest(engine)
        for number, (value, expected_value) in enumerate(zip(calls(engine), expected, strict=True)):
            assert torch.equal(value, expected_value), (step, number)
        assert storage_digest(engine) == before
        assert engine.weight_version == both.weight_version
        held, of_both = (each.stats()["snapshot_bytes"] for each in (engine, both))
        if mode != "freed":
            assert held < of_both if stage == 3 or mode == "tensor parallel" else held == of_both
        for each in (both, engine):
            each.train()
            train_step(each, step)
    assert storage_digest(both) == storage_digest(engine)
    for each in (both, engine):
        each.destroy()


@pytest.mark.parametrize(
    ("model", "mode", "stage"),
    slow_but(
        [("llama", "pinned", 3), ("some of q, k, v", "tensor parallel", 3), ("embedding and head", "pinned", 3)],
        [
            *((model, "pinned", 3) for model in MODELS),
            *(("llama", mode, stage) for mode in MODES for stage in (0, 3) if (mode, stage) != ("pinned", 3)),
            *((model, "tensor parallel", 3) for model in ("two adapters", "DoRA", "some of q, k, v")),
            ("DoRA", "native", 3),
            ("DeepSpeed-Chat", "native", 3),
        ],
    ),
)
def test_results_are_those_of_an_engine_with_both(ranks, model, mode, stage):
    ranks.run(check_same, model, mode, stage)


def check_versions() -> None:
    """A copy is used again without a collective as long as it holds what a call reads. A step makes the merged weights
    stale, and their merge then reads the base, which is gathered unless the copies hold it."""
    engine = engine_of(with_peft(tiny_model("llama")), settings(3))
    ids, mask = prompts(2, 6, padded=False, seed=dist.get_rank())
    base = sum(p.ds_numel * 4 for name, p in engine.module.named_parameters() if ".base_layer." in name)
    total = sum(p.ds_numel * 4 for p in engine.module.parameters())
    adapters = sum(p.ds_numel * 4 for name, p in engine.module.named_parameters() if "lora_" in name)

    def gathered(call: Callable[[], object]) -> int:
        before = engine.stats()["gathered_bytes"]
        call()
        with CollectiveCount() as again:
            call()
        assert again.count == 0, "the same call again, and nothing has changed"
        return engine.stats()["gathered_bytes"] - before

    engine.eval()
    policy = lambda: engine.score(ids, mask)  # noqa: E731
    reference = lambda: engine.score(ids, mask, adapters=False)  # noqa: E731
    assert gathered(policy) == total
    assert engine.stats()["snapshot_bytes"] == total - adapters
    assert gathered(reference) == base
    assert gathered(policy) == adapters
    engine.train()
    train_step(engine)
    engine.eval()
    assert gathered(policy) == base + adapters
    assert gathered(reference) == base
    engine.train()
    train_step(engine)
    engine.eval()
    assert gathered(reference) == 0  # the copies hold it, and a step has not changed it
    assert gathered(policy) == adapters
    assert engine.stats()["snapshot_bytes"] == total - adapters
    engine.destroy()


def test_a_copy_is_gathered_again_only_for_what_it_does_not_hold(ranks):
    ranks.run(check_versions)


def check_errors(stage: int, blocks: dict) -> None:
    """An error in a merge or of a user's, on both ranks, leaves no copy that holds neither."""
    config = settings(stage, **blocks)
    both, engine = engine_with_both(MODELS["llama"](), config), engine_of(MODELS["llama"](), config)
    keep, done = Snapshot.keep_adapters, []

    def failing(self: Snapshot, layer: object) -> None:
        keep(self, layer)
        done.append(layer)
        if len(done) == 4:
            raise RuntimeError("no memory")

    ids, mask = prompts(2, 6, padded=False, seed=dist.get_rank())
    for reads_base in (True, False):
        engine.score(ids, mask, adapters=not reads_base)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
            patch.setattr(Snapshot, "keep_adapters", failing)
            done.clear()
            train_step(engine)
            engine.score(ids, mask)
        train_step(both)
        with pytest.raises(KeyError), engine.inference():
            engine.score(ids, mask, adapters=False)
            raise KeyError
        assert all(map(torch.equal, calls(engine), calls(both)))
    for each in (both, engine):
        each.destroy()


@pytest.mark.parametrize("mode", slow_but(["pinned"], ["pinned", "tensor parallel"]))
def test_an_error_in_between_leaves_no_mixture(ranks, mode):
    ranks.run(check_errors, 3, MODES[mode])


def check_reading() -> None:
    """After a call with other adapters, parameters that the window has swapped in cannot be read before the next call:
    their copies hold the other call's weights."""
    engine = engine_of(with_peft(tiny_model("llama"), **HEADED), settings(3))
    ids, mask = prompts(2, 6, padded=False, seed=dist.get_rank())
    head = engine.module.get_output_embeddings()
    norm = next(module for name, module in engine.module.named_modules() if name.endswith("model.norm"))
    engine.score(ids, mask, adapters=False)
    with engine.inference(adapters=False):
        base = head.weight.clone()
    with engine.inference():
        merged = head.weight.clone()
        assert not torch.equal(merged, base)
        for _ in range(2):
            engine.score(ids, mask, adapters=False)
            with pytest.raises(RuntimeError, match="with other adapters"):
                head.weight.sum()
            norm.weight.sum()  # has no adapters
            engine.score(ids, mask)
            assert torch.equal(head.weight, merged)
        engine.score(ids, mask, adapters=False)
        engine.module(input_ids=ids, attention_mask=mask)
        assert torch.equal(head.weight, merged)
        with engine.inference(adapters=False):
            assert torch.equal(head.weight, base)
            engine.score(ids, mask, adapters=True)
            with pytest.raises(RuntimeError, match="with other adapters"):
                head.weight.sum()
        assert torch.equal(head.weight, merged)  # the last call has brought it back
        engine.score(ids, mask)
        assert torch.equal(head.weight, merged)
        engine.score(ids, mask, adapters=False)
    assert head.weight.numel() == 0, "the training parameter, partitioned"
    train_step(engine)
    engine.destroy()


def test_parameters_that_a_nested_call_has_overwritten_cannot_be_read(ranks):
    ranks.run(check_reading)


def check_warning() -> None:
    """One warning for calls that alternate, on rank 0; none for a step with one reference."""
    engine, patient = (engine_of(with_peft(tiny_model("llama")), settings(3)) for _ in range(2))
    ids, mask = prompts(2, 6, padded=False, seed=dist.get_rank())

    def warned(engine: hybrid.HybridEngine, turns: int) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(turns):
                engine.score(ids, mask)
                engine.score(ids, mask, adapters=False)
        return sum("alternate" in str(each.message) for each in caught)

    for step in range(3):
        assert warned(patient, 2) == 0
        train_step(patient, step)
    assert warned(engine, 5) == (dist.get_rank() == 0)
    assert warned(engine, 5) == 0
    for each in (engine, patient):
        each.destroy()


def test_calls_that_alternate_are_warned_about_once(ranks):
    ranks.run(check_warning)


def check_sleep_and_streams() -> None:
    both, engine = engine_with_both(MODELS["llama"](), settings(3)), engine_of(MODELS["llama"](), settings(3))
    ids, mask = prompts(3, 6, padded=True, seed=dist.get_rank())
    given = []
    for each in (both, engine):
        tensors = []
        for level in (1, 2):
            sampling = hybrid.SamplingParams(max_new_tokens=5, temperature=0.8, seed=level)
            for adapters in (None, False):
                with each.rollout_iter(ids, mask, sampling, adapters=adapters) as stream:
                    rows = sorted((int(row.row_index[0]), row.sampling_per_token_logps) for row in stream)
                tensors += [logps for _, logps in rows]
                tokens = list(each.generate_stream(ids, attention_mask=mask, max_new_tokens=3, adapters=adapters))
                tensors += tokens
            each.sleep(level)
            each.wake()
            tensors.append(each.score(ids, mask, adapters=False).per_token_logps)
            tensors.append(each.score(ids, mask).per_token_logps)
            train_step(each)
        given.append(tensors)
    assert len(given[0]) == len(given[1]) and all(map(torch.equal, *given))
    for each in (both, engine):
        each.destroy()


def test_sleep_and_streams_between_calls_with_and_without_adapters(ranks):
    ranks.run(check_sleep_and_streams)


def check_choice() -> None:
    """Both are kept only within a memory limit that has room for both and for as many sequences."""
    limits = {"max_num_seqs": 4}
    sizes = {"max_out_tokens": 16, "enabled": True}

    def engine_within(limit: int | None, pinned: bool | str = True) -> hybrid.HybridEngine:
        rollout = limits if limit is None else {**limits, "memory_limit": limit}
        block = {**sizes, "pin_parameters": pinned}
        return engine_of(with_peft(tiny_model("llama")), settings(3, hybrid_engine=block, rollout=rollout))

    engine = engine_within(None)
    plan = engine.memory_plan(4, 8, 8)
    need = {str(mode): each.total for mode, each in plan.needs.items()}
    assert str(plan.in_use) == "pinned"
    assert need["pinned, base kept"] > need["pinned"]
    assert "pinned, base kept" in str(plan)
    ids, mask = prompts(4, 8, padded=False)
    for pinned in (True, "auto"):
        for name in ("pinned, base kept", "pinned"):
            engine = engine_within(need[name] + dist.get_rank(), pinned)
            plan = engine.memory_plan(4, 8, 8)
            assert str(plan.in_use) == name
            engine.score(ids, mask, adapters=False)
            engine.score(ids, mask)
            assert engine.stats()["snapshot_bytes"] == plan.needs[plan.in_use].snapshot
            engine.destroy()
    assert str(engine_within(None, "auto").memory_plan(1, 1, 1).in_use) == "pinned"
    for stage, blocks in ((2, {}), (3, {"rollout": {"lora": "unmerged"}})):
        engine = engine_of(with_peft(tiny_model("llama")), settings(stage, **blocks))
        assert "pinned, base kept" not in map(str, engine.memory_plan(1, 1, 1).needs)
    engine = engine_of(tiny_model("llama"), settings(3, **ROOM))
    assert str(engine.memory_plan(1, 1, 1).in_use) == "pinned"


def test_the_plan_says_whether_the_base_is_kept(ranks):
    ranks.run(check_choice)


def check_peak(mode: str, layers: int, hidden: int) -> None:
    """Live bytes of calls with and without adapters by turns, against the plan."""
    shape = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers, "vocab_size": 512}
    shape["max_position_embeddings"] = 512
    block = {"enabled": True, "tp_gather_partition_size": 1, **MODES[mode].get("hybrid_engine", {})}
    engine = engine_of(with_peft(tiny_model("llama", **shape), r=2), settings(3, hybrid_engine=block))
    ids, mask = prompts(4, 190, padded=False, seed=dist.get_rank())  # more tokens than the self-check has
    for adapters in (None, False):
        engine.score(ids, mask, adapters=adapters)  # the self-check is done
    train_step(engine, length=4)
    engine._runtime.free()
    plan = engine.memory_plan(4, 190, 4)
    need = plan.needs[plan.in_use]
    with torch.no_grad(), LiveBytes(engine.module) as live, engine.inference():
        engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=4))
        for adapters in (False, None, False):
            engine.score(ids, mask, adapters=adapters)
    # Ranks that gather slices need less than the plan's whole group: 0.86 and 0.89 of the plan at these sizes.
    low, high = (0.8, 1.0) if mode == "tensor parallel" else (0.9, 1.1)
    assert low <= live.peak / need.total <= high, (live.peak, need)
    assert live.peak + need.snapshot > high * need.total, "a second copy of the weights would not be seen"
    assert engine.stats()["peak_bytes"] <= need.total
    engine.destroy()


@pytest.mark.parametrize("mode", slow_but(["pinned"], ["pinned", "tensor parallel"]))
@pytest.mark.parametrize(("layers", "hidden"), slow_but([(4, 320)], [(4, 320), (8, 448)]))
def test_the_plan_is_the_peak_of_calls_by_turns(ranks, mode, layers, hidden):
    ranks.run(check_peak, mode, layers, hidden)
