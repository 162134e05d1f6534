"""`rollout.lora: unmerged` equals PEFT's own forward, holds no merged copy, and gathers only LoRA factors again."""

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import GatheredParameters
from peft.tuners.tuners_utils import BaseTunerLayer

from hybrid import HybridEngine
from tests.decoders.test_unmerged_lora import with_two_adapters
from tests.engines import CollectiveCount, engine_of, settings, storage_digest, train_step
from tests.marks import slow_but
from tests.tiny_models import ADAPTERS, prompts, tiny_model, twin, with_peft
from tests.weights.test_lora import SETTINGS, shake


def unmerged(stage: int = 3, ranks: int = 1, containers: str = "fused", lora: str = "unmerged") -> dict:
    """Settings of an engine with unmerged adapters and `inference_tp_size` = `ranks`."""
    block = {"enabled": True, "inference_tp_size": ranks, "tp_gather_partition_size": 2}
    return settings(stage, 0, hybrid_engine=block, rollout={"containers": containers, "lora": lora})


def mask_of_sequences(sequences: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mask of prompts and completions."""
    full_mask = torch.ones_like(sequences)
    full_mask[:, : mask.shape[1]] = mask
    return full_mask


def check_equals_peft(family: str, adapter: str, config: dict) -> None:
    """Tokens and logits with and without the adapter, before and after a step; training is unchanged."""
    model, base = ADAPTERS[adapter](tiny_model(family)), tiny_model(family).eval()
    reference = twin(model)
    engine, plain = engine_of(model, config), engine_of(ADAPTERS[adapter](tiny_model(family)), config)
    digest, rank = storage_digest(engine), dist.get_rank()
    for padded in (False, True):
        ids, mask = prompts(3 + rank, 7 + rank, padded, seed=rank)
        request = {"attention_mask": mask, "max_new_tokens": 6 + 4 * rank}
        expected = reference.generate(ids, **request)
        assert torch.equal(engine.generate(ids, **request), expected)
        assert torch.equal(engine.generate(ids, adapters=False, **request), base.generate(ids, **request))
        assert torch.equal(engine.generate(ids, **request), expected)
        assert engine.weight_version == 0
    assert {row["container"] for row in engine.coverage()} == {config["rollout"]["containers"]}
    assert all("adapters unmerged in" in row["why"] for row in engine.coverage() if row["kind"] in ("model", "layer"))
    full_mask = mask_of_sequences(expected, mask)
    with engine.inference(), torch.no_grad():
        for adapters, oracle in ((True, reference), (False, base)):
            logits = oracle(expected, attention_mask=full_mask).logits
            with engine.inference(adapters=adapters):
                actual = engine(expected, attention_mask=full_mask, use_cache=False).logits
            torch.testing.assert_close(actual[full_mask.bool()], logits[full_mask.bool()], atol=1e-4, rtol=1e-4)
    assert storage_digest(engine) == digest
    assert torch.equal(train_step(engine), train_step(plain))
    assert storage_digest(engine) == storage_digest(plain)
    # After the step tokens equal those of an engine that never generated before.
    assert torch.equal(engine.generate(ids, **request), plain.generate(ids, **request))
    for instance in (engine, plain):
        instance.destroy()


QUICK = {(3, "mixtral", "fused")}


@pytest.mark.parametrize(
    ("stage", "family", "containers"),
    [
        pytest.param(stage, family, containers, marks=[] if (stage, family, containers) in QUICK else pytest.mark.slow)
        for stage, family in ((0, "llama"), (2, "phi3"), (3, "llama"), (3, "gpt2"), (3, "mixtral"))
        for containers in ("fused", "native")
    ],
)
def test_tokens_and_logits_match_peft(ranks, stage, family, containers):
    ranks.run(check_equals_peft, family, "peft", unmerged(stage, containers=containers))


@pytest.mark.parametrize("containers", slow_but(["fused"], ["fused", "native"]))
def test_deepspeed_chats_adapters_run_unmerged(ranks, containers):
    ranks.run(check_equals_peft, "llama", "chat", unmerged(3, containers=containers))


@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        pytest.param("llama", "peft", marks=pytest.mark.slow),
        pytest.param("llama", "chat", marks=pytest.mark.slow),
        pytest.param("gpt2", "peft", marks=pytest.mark.slow),
        pytest.param("phi3", "peft", marks=pytest.mark.slow),
        pytest.param("bloom", "peft", marks=pytest.mark.slow),
        ("mixtral", "peft"),
    ],
)
def test_tensor_parallel_unmerged_lora_matches_peft(ranks, family, adapter):
    """Column-parallel layers hold rows of B, row-parallel ones columns of A."""
    ranks.run(check_shared, family, adapter, "unmerged")


@pytest.mark.parametrize(
    "name",
    slow_but(["dora"], ["plain", "dora", "lora bias", "embedding", "rank pattern"]),
)
def test_tensor_parallel_merged_lora_matches_peft(ranks, name):
    ranks.run(check_shared, "opt" if name == "lora bias" else "llama", name, "merged")


def check_shared(family: str, adapter: str, lora: str) -> None:
    """Before and after a step, with the adapter and without, tokens and logits are PEFT's."""

    def make_model() -> torch.nn.Module:
        model = tiny_model(family)
        return ADAPTERS[adapter](model) if adapter in ADAPTERS else shake(with_peft(model, **SETTINGS[adapter]))

    engine, base = engine_of(make_model(), unmerged(3, ranks=2, lora=lora)), tiny_model(family).eval()
    rank = dist.get_rank()
    ids, mask = prompts(3 + rank, 7 + rank, True, seed=rank)
    request = {"attention_mask": mask, "max_new_tokens": 6 + 4 * rank}
    for step in range(2):
        reference = with_weights_of(engine, make_model())
        expected = reference.generate(ids, **request)
        assert torch.equal(engine.generate(ids, **request), expected)
        full_mask = mask_of_sequences(expected, mask)
        logits = reference(expected, attention_mask=full_mask).logits
        engine.eval()
        actual = engine(expected, attention_mask=full_mask, use_cache=False).logits
        torch.testing.assert_close(actual[full_mask.bool()], logits[full_mask.bool()], atol=1e-4, rtol=1e-4)
        engine.train()
        assert torch.equal(engine.generate(ids, adapters=False, **request), base.generate(ids, **request))
        train_step(engine, step)
    assert all("sharded over 2 ranks" in row["why"] for row in engine.coverage())
    engine.destroy()


def with_weights_of(engine: HybridEngine, fresh: torch.nn.Module) -> torch.nn.Module:
    """`fresh` with the engine's current weights."""
    own, copy = dict(engine.module.named_parameters()), fresh.eval()
    with torch.no_grad(), GatheredParameters(list(own.values())):
        for name, param in copy.named_parameters():
            param.copy_(own[name])
    return copy


def check_adapters_change() -> None:
    """Active adapters may change between windows."""
    model = with_two_adapters(tiny_model("llama"))
    reference = twin(model)
    engine = engine_of(model, unmerged(3))
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    request = {"attention_mask": mask, "max_new_tokens": 6}
    distinct = set()
    for active in (["default", "second"], ["second"], ["second", "default"], ["default"]):
        for module in (model, reference):
            module.base_model.set_adapter(active)
        expected = reference.generate(ids, **request)
        assert torch.equal(engine.generate(ids, **request), expected)
        distinct.add(str(expected.tolist()))
    assert len(distinct) > 2
    for module in (model, reference):
        for layer in (module for module in module.modules() if isinstance(module, BaseTunerLayer)):
            layer.scaling = {name: 3 * scale for name, scale in layer.scaling.items()}
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    with model.disable_adapter():
        assert torch.equal(engine.generate(ids, **request), tiny_model("llama").eval().generate(ids, **request))


def test_generate_uses_the_currently_active_adapters(ranks):
    ranks.run(check_adapters_change)


def check_nested(containers: str) -> None:
    """The outer window needs no LoRA factors and does not refresh them, so the inner window must."""
    nested, plain = (engine_of(with_peft(tiny_model("llama")), unmerged(3, containers=containers)) for _ in range(2))
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    request = {"attention_mask": mask, "max_new_tokens": 6}
    before = nested.generate(ids, **request)
    for instance in (nested, plain):
        train_step(instance)
    with nested.inference(adapters=False):
        base = nested.generate(ids, **request)
        with nested.inference(adapters=True):
            actual = nested.generate(ids, **request)
        assert torch.equal(nested.generate(ids, **request), base)
    assert torch.equal(actual, plain.generate(ids, **request))
    assert not torch.equal(actual, before)


@pytest.mark.parametrize("containers", slow_but(["fused"], ["fused", "native"]))
def test_a_nested_window_with_adapters_refreshes_them(ranks, containers):
    ranks.run(check_nested, containers)


def parameter_bytes(engine: HybridEngine, part: str = "") -> int:
    """Bytes of whole parameters with `part` in their names."""
    return sum(param.ds_numel * 4 for name, param in engine.module.named_parameters() if part in name)


def check_bytes(ranks: int) -> None:
    """Three ways to train, three iterations each: gathered bytes of each iteration, and held bytes."""
    held = {}
    for what in ("full", "merged", "unmerged"):
        model = tiny_model("llama")
        engine = engine_of(
            model if what == "full" else with_peft(model),
            unmerged(3, ranks, lora="merged" if what == "full" else what),
        )
        ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
        gathered = []
        for step in range(3):
            engine.eval()
            engine.generate(ids, attention_mask=mask, max_new_tokens=2)
            engine.generate(ids, attention_mask=mask, max_new_tokens=2)
            gathered.append(engine.stats()["gathered_bytes"])
            held[what] = engine.stats()["snapshot_bytes"]
            engine.train()
            train_step(engine, step)
        everything, factors = parameter_bytes(engine), parameter_bytes(engine, "lora_")
        again = {"full": everything, "merged": factors + parameter_bytes(engine, "base_layer"), "unmerged": factors}
        # With two ranks, the self-check's run of the model's own layers gathers everything once more.
        assert gathered == [everything * ranks, *[again[what]] * 2]
        if what == "unmerged" and ranks == 1:
            assert held[what] == everything
        engine.destroy()
    targets = sum(
        module.weight.nbytes for module in tiny_model("llama").model.layers.modules() if hasattr(module, "in_features")
    )
    factors = held["unmerged"] - held["full"]
    assert held["merged"] == held["full"], "merged weights take the base's place"
    assert 0 < factors < targets // ranks
    assert (factors == parameter_bytes(engine, "lora_")) == (ranks == 1)


@pytest.mark.parametrize("size", slow_but([1], [1, 2]))
def test_a_new_version_gathers_what_changes(ranks, size):
    ranks.run(check_bytes, size)


def check_nothing_is_copied(stage: int) -> None:
    engine = engine_of(with_peft(tiny_model("llama")), unmerged(stage))
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    for step in range(2):
        with CollectiveCount() as count:
            engine.generate(ids, attention_mask=mask, max_new_tokens=3)
        stats = engine.stats()
        assert stats["snapshot_bytes"] == stats["container_bytes"] == count.count == 0
        train_step(engine, step)


@pytest.mark.parametrize("stage", slow_but([2], [0, 1, 2]))
def test_unpartitioned_weights_are_not_copied(ranks, stage):
    ranks.run(check_nothing_is_copied, stage)


def check_bfloat16(size: int) -> None:
    """The decoder passes its self-check with unmerged adapters, and rounds as PEFT does."""
    config = {**unmerged(3, size), "bf16": {"enabled": True}}
    model = with_peft(tiny_model("llama"))
    exact, engine = twin(model), engine_of(model, config)
    reference = twin(with_peft(tiny_model("llama")).bfloat16())
    ids, mask = prompts(3, 12, padded=False, seed=dist.get_rank())
    engine.eval()
    actual = engine(ids, attention_mask=mask, use_cache=False).logits.float()
    assert {row["container"] for row in engine.coverage()} == {"fused"}
    with torch.no_grad():
        rounded, expected = reference(ids, attention_mask=mask).logits.float(), exact(ids, attention_mask=mask).logits
    # Independent roundings are √2 times as far from each other as either is from the exact value; with tensor
    # parallelism each rank's partial sum is rounded, and then their sum.
    assert (actual - rounded).abs().mean() < (0.9, 1.2)[size - 1] * (rounded - expected).abs().mean()


@pytest.mark.parametrize("size", slow_but([2], [1, 2]))
def test_bfloat16_rounds_as_peft(ranks, size):
    ranks.run(check_bfloat16, size)
