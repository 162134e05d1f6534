"""Inference tensor parallelism gives the tokens of one rank; ranks of a group may have different batches."""

import pytest
import torch
import torch.distributed as dist
from transformers import StoppingCriteria, StoppingCriteriaList

import hybrid
from tests.engines import (
    CollectiveCount,
    engine_of,
    require_matches_hugging_face,
    require_same_rollouts,
    settings,
    storage_digest,
    train_step,
)
from tests.marks import slow_but
from tests.rank_pool import RankPool
from tests.tiny_models import ADAPTERS, ALL_FAMILIES, prompts, tiny_model, twin, with_chat_lora, with_peft


def tp_settings(size: int, stage: int = 3, threshold: int = 0, **changes) -> dict:
    """Settings of an engine with `inference_tp_size` = `size`."""
    block = {"enabled": True, "inference_tp_size": size, "tp_gather_partition_size": 2}
    return settings(stage, threshold, hybrid_engine=block, rollout={"containers": "fused"}, **changes)


def runs_fused_tp(engine: hybrid.HybridEngine, size: int) -> bool:
    """Whether coverage() says that the decoder is sharded over `size` ranks."""
    return all(f"sharded over {size} ranks" in row["why"] for row in engine.coverage())


def check_family(family: str, adapter: str, size: int) -> None:
    model = ADAPTERS[adapter](tiny_model(family))
    reference = twin(model)
    engine = engine_of(model, tp_settings(size))
    require_matches_hugging_face(engine, reference, tolerance=1e-3)
    assert runs_fused_tp(engine, size), engine.coverage()
    engine.destroy()


# A default run covers each kind of norm, position, bias, head layout and MLP; the rest are slow.
QUICK = {("bloom", "none"), ("gpt2", "peft"), ("mixtral", "peft")}
CASES = [
    pytest.param(family, adapter, marks=[] if (family, adapter) in QUICK else pytest.mark.slow)
    for adapter in ("none", "peft")
    for family in (*ALL_FAMILIES, "glm4_moe", "afmoe", "mimo_v2_flash", "qwen2_moe", "deepseek_v3")
]


@pytest.mark.parametrize(("family", "adapter"), CASES)
def test_two_ranks_match_hugging_face(ranks, family, adapter):
    ranks.run(check_family, family, adapter, 2)


def check_four(size: int, cases: list[tuple[str, str]]) -> None:
    for family, adapter in cases:
        check_family(family, adapter, size)


EVERY = [(family, adapter) for family in ALL_FAMILIES for adapter in ("none", "peft")]
SOME = [("llama", "none"), ("qwen3_moe", "none"), ("olmo2", "peft"), ("bloom", "chat")]
SOME += [("kimi_linear", "peft"), ("lfm2", "none")]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # every family takes ten minutes on two cores
@pytest.mark.parametrize("cases", [SOME, EVERY], ids=["some", "every family"])
def test_four_ranks_match_hugging_face(cases):
    """Two groups of two ranks, with independent rows; and one of four, in which two ranks hold the same key head."""
    pool = RankPool(4)
    try:
        pool.run(check_four, 2, cases, timeout_s=1200)
        pool.run(check_four, 4, cases, timeout_s=1200)
    finally:
        pool.close()


def check_rollouts(stage: int, adapter: str) -> None:
    """Rollouts, their logprobs and scores equal those of an engine without tensor parallelism, before and after a
    step."""
    unsharded, sharded = (
        engine_of(ADAPTERS[adapter](tiny_model("llama")), config) for config in (settings(stage), tp_settings(2, stage))
    )
    require_same_rollouts(unsharded, sharded, 6, adapter != "none", tolerance=1e-5)


ROLLOUTS = {(3, "peft"), (0, "chat")}


def check_whole_roles(family: str) -> None:
    """A matrix with adapters that every rank keeps whole, where parameters are read in place."""
    # Not the experts' parameters, which PEFT (0.21) writes in every forward: that counts as a change of weights.
    targets = "q_a_proj kv_a_proj_with_mqa o_proj shared_expert_gate q_proj".split()
    unsharded, sharded = (
        engine_of(with_peft(tiny_model(family), target_modules=targets), config)
        for config in (settings(0), tp_settings(2, 0))
    )
    require_same_rollouts(unsharded, sharded, 6, True, tolerance=1e-5)


@pytest.mark.parametrize("family", slow_but(["qwen2_moe"], ["qwen2_moe", "deepseek_v3"]))
def test_adapters_of_matrices_that_ranks_do_not_slice(ranks, family):
    ranks.run(check_whole_roles, family)


@pytest.mark.parametrize(
    ("stage", "adapter"),
    [
        pytest.param(stage, adapter, marks=[] if (stage, adapter) in ROLLOUTS else pytest.mark.slow)
        for stage in (0, 2, 3)
        for adapter in ADAPTERS
    ],
)
def test_rollouts_and_scores_match_an_engine_without_tensor_parallelism(ranks, stage, adapter):
    ranks.run(check_rollouts, stage, adapter)


def check_shared_prompts() -> None:
    """Equal prompts are prefilled once, their last block copied on every rank; more sequences than max_num_seqs."""
    config = tp_settings(2)
    config["rollout"] = {"containers": "fused", "max_num_seqs": 2, "kv_step": 32}
    model = tiny_model("llama")
    reference = twin(model)
    engine = engine_of(model, config)
    rank = dist.get_rank()
    ids, mask = prompts(2, 37, padded=True, seed=rank)
    request = {"attention_mask": mask, "max_new_tokens": 9 - 5 * rank}
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    sampling = hybrid.SamplingParams(max_new_tokens=7, seed=1)
    batch = engine.rollout(ids, mask, sampling, num_generations=3)
    scores = engine.score(batch.sequences, batch.attention_mask)
    scored_logps = scores.per_token_logps[:, ids.shape[1] - 1 :] * batch.completion_mask
    torch.testing.assert_close(scored_logps, batch.sampling_per_token_logps, atol=1e-5, rtol=1e-5)


def test_shared_prompts_with_a_queue_match_hugging_face(ranks):
    ranks.run(check_shared_prompts)


def check_idle_and_failing_ranks() -> None:
    """A rank without rows, one with custom stopping criteria, and one that raises: no rank hangs."""
    model = tiny_model("llama")
    reference = twin(model)
    engine = engine_of(model, tp_settings(2))
    rank = dist.get_rank()
    ids, mask = prompts(2, 6, padded=True, seed=rank)
    sampling = hybrid.SamplingParams(max_new_tokens=12, temperature=0)
    rows = 2 * rank
    batch = engine.rollout(ids[:rows], mask[:rows], sampling)
    assert len(batch.completion_ids) == rows
    assert len(engine.score(ids[:rows], mask[:rows]).per_token_logps) == rows

    class Never(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if raises and input_ids.shape[1] >= 9:
                raise ArithmeticError
            return torch.zeros(len(input_ids), dtype=torch.bool)

    criteria = {"stopping_criteria": StoppingCriteriaList([Never()] * (1 - rank))}
    request = {"attention_mask": mask, "max_new_tokens": 8 + 4 * rank}
    raises = False
    assert torch.equal(engine.generate(ids, **request, **criteria), reference.generate(ids, **request))
    raises = True
    digest = storage_digest(engine)
    try:
        actual = engine.generate(ids, **request, **criteria)
        assert rank == 1
        assert torch.equal(actual, reference.generate(ids, **request))
    except ArithmeticError:
        assert rank == 0
    assert engine.module.training
    assert storage_digest(engine) == digest
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    train_step(engine)


def test_idle_and_failing_ranks_do_not_hang_the_group(ranks):
    ranks.run(check_idle_and_failing_ranks)


def check_bytes() -> None:
    """A rank holds its slice; frozen weights are gathered once; fresh weights are not gathered again."""
    unsharded, sharded = (engine_of(tiny_model("llama"), config) for config in (settings(3), tp_settings(2)))
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    for engine in (unsharded, sharded):
        engine.eval()
        engine.generate(ids, attention_mask=mask, max_new_tokens=3)
    sharded_bytes, unsharded_bytes = sharded.stats()["snapshot_bytes"], unsharded.stats()["snapshot_bytes"]
    assert 0.5 < sharded_bytes / unsharded_bytes < 0.53  # norms are replicated, and the vocabulary of 97 is rounded up
    layer = sum(p.ds_numel * 4 for p in sharded.module.model.layers[0].parameters())
    stats = sharded.stats()
    buffers = stats["container_bytes"] + stats["kv_bytes"] + sharded._runtime.fused.peak_activation_bytes()
    assert stats["peak_bytes"] - buffers <= sharded_bytes + 2 * layer
    gathered = sharded.stats()["gathered_bytes"]
    # Once for the slices, and once for the self-check's run of the model's own layers.
    assert gathered == 2 * sum(p.ds_numel * 4 for p in sharded.module.parameters())
    sharded.generate(ids, attention_mask=mask, max_new_tokens=3)
    assert sharded.stats()["gathered_bytes"] == gathered

    tuned = engine_of(with_peft(tiny_model("llama")), tp_settings(2))
    tuned.generate(ids, attention_mask=mask, max_new_tokens=2)
    train_step(tuned)
    tuned.eval()
    tuned.generate(ids, attention_mask=mask, max_new_tokens=2)
    # The base's weights lie where the merged ones did: they are gathered again, with the factors.
    merged = sum(p.ds_numel * 4 for n, p in tuned.module.named_parameters() if "lora_" in n or "base_layer" in n)
    assert tuned.stats()["gathered_bytes"] == merged
    tuned.train()
    sharded.train()


def test_a_rank_holds_only_its_slice(ranks):
    ranks.run(check_bytes)


def check_native() -> None:
    """Calls that the decoder does not support run layer by layer, and coverage() says so."""
    model = tiny_model("llama")
    reference = twin(model)
    engine = engine_of(model, tp_settings(2))
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    request = {"attention_mask": mask, "max_new_tokens": 3, "return_dict_in_generate": True, "output_scores": True}
    actual, expected = engine.generate(ids, **request), reference.generate(ids, **request)
    assert torch.equal(actual.sequences, expected.sequences)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(actual.scores, expected.scores, strict=True))
    tuned = engine_of(with_peft(tiny_model("llama")), tp_settings(2))
    assert torch.equal(tuned.generate(ids, adapters=False, **request).sequences, expected.sequences)
    assert tuned.weight_version == 0
    chat = engine_of(with_chat_lora(tiny_model("llama")), tp_settings(2))
    with pytest.raises(NotImplementedError, match="inference_tp_size above 1: DeepSpeed-Chat's LoRA cannot"):
        chat.generate(ids, adapters=False, **request)
    config = tp_settings(2)
    config["rollout"] = {"containers": "native"}
    engine = engine_of(tiny_model("llama"), config)
    request = {"attention_mask": mask, "max_new_tokens": 3 + 2 * dist.get_rank()}
    assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    assert all("native" in row["why"] for row in engine.coverage())


def test_calls_without_a_fused_path_run_layer_by_layer(ranks):
    ranks.run(check_native)


def check_sizes_that_raise() -> None:
    for block, error, message in (
        ({"inference_tp_size": 3}, ValueError, "3 given; it must divide the world size, 2"),
        ({"inference_tp_size": 4}, ValueError, "4 given; it must divide the world size, 2"),
        ({"inference_tp_size": 0}, ValueError, "inference_tp_size: 0 given"),
        ({"inference_tp_size": -1}, ValueError, "inference_tp_size: -1 given"),
        ({"inference_tp_size": 2, "pin_parameters": False}, ValueError, "pin_parameters=false"),
    ):
        with pytest.raises(error, match=message), CollectiveCount() as count:
            engine_of(tiny_model("llama"), settings(3, hybrid_engine={"enabled": True, **block}))
        assert count.count == 0, block
    odd = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
    with pytest.raises(ValueError, match="2 given; the model's 3 attention heads and 3 key and value heads.*by 1, 3"):
        engine_of(tiny_model("llama", **odd), tp_settings(2))


def test_invalid_inference_tp_size_raises(ranks):
    ranks.run(check_sizes_that_raise)


def check_hpz(size: int) -> None:
    """ZeRO-3 with a second partition inside each machine (hpZ): rollouts match Hugging Face, and training is that of an
    engine that never generates."""
    model = tiny_model("llama")
    reference = twin(model)
    hpz = {"zero_hpz_partition_size": 2}
    engines = []
    for block in ({"inference_tp_size": size, "tp_gather_partition_size": 2}, {}):
        config = settings(3, hybrid_engine=block, rollout={"containers": "fused"})
        config["zero_optimization"] |= hpz
        engines.append(engine_of(twin(model).train(), config))
    engine, untouched = engines
    assert runs_fused_tp(engine, size) or size == 1
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, 9, padded=True, seed=rank)
    assert torch.equal(
        engine.generate(ids, attention_mask=mask, max_new_tokens=6),
        reference.generate(ids, attention_mask=mask, max_new_tokens=6),
    )
    for _ in range(2):
        losses = [train_step(each) for each in engines]
        assert torch.equal(*losses), losses
        engine.generate(ids, attention_mask=mask, max_new_tokens=6)
    assert storage_digest(engine) == storage_digest(untouched)


@pytest.mark.parametrize("size", slow_but([2], [1, 2]))
def test_hpz_at_two_ranks(ranks, size):
    ranks.run(check_hpz, size)


@pytest.mark.slow
def test_hpz_and_groups_of_two_at_four_ranks():
    """Data-parallel groups times inference groups."""
    pool = RankPool(4)
    try:
        pool.run(check_hpz, 2)
    finally:
        pool.close()
