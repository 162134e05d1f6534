"""Inference tensor parallelism through the model's own modules equals one rank's results; ranks may have different
batches."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DynamicCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

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
from tests.tiny_models import ADAPTERS, SIZES, prompts, tiny_model, twin, with_peft

# Models whose configuration has a tp_plan, and what each one covers.
FAMILIES = {
    "cohere": SIZES,  # tied embeddings, scaled logits
    "cohere2": {**SIZES, "sliding_window": 6},
    "glm": SIZES,  # gate and up in one matrix, whose output is gathered
    "olmo": SIZES,
    "olmo3": SIZES,  # a norm over all heads: queries and keys are gathered
    "starcoder2": SIZES,  # biases everywhere
    "exaone4": SIZES,  # norms of each head
    "phi": SIZES,  # a bias of the head
    "nemotron": SIZES,  # an MLP without a gate
    "apertus": SIZES,  # an activation with parameters
    "olmoe": {**SIZES, "num_experts": 4, "num_experts_per_tok": 2},  # experts
    "deepseek_v2": {
        **SIZES,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },  # latent attention, dense layers before mixtures
}


def tp_settings(size: int, stage: int = 3, containers: str = "native", dtype: torch.dtype = torch.float32) -> dict:
    """Settings of an engine with `inference_tp_size` = `size`, which runs a model's own modules."""
    block = {"enabled": True, "inference_tp_size": size, "tp_gather_partition_size": 2}
    return settings(stage, 0, dtype, hybrid_engine=block, rollout={"containers": containers})


def check_model(model, size: int, containers: str = "native") -> None:
    """Tokens, logits and a training step; ranks differ in rows, prompt length and number of new tokens."""
    reference = twin(model)
    engine = engine_of(model, tp_settings(size, containers=containers))
    why = engine.coverage()[0]["why"]
    assert "sharded over ranks by the model's tp_plan" in why, why
    require_matches_hugging_face(engine, reference, tolerance=1e-4)
    engine.destroy()


def check_family(family: str, adapter: str, size: int, containers: str = "native", sizes: dict | None = None) -> None:
    check_model(ADAPTERS[adapter](tiny_model(family, sizes=sizes or FAMILIES[family])), size, containers)


QUICK = ("cohere", "glm", "starcoder2", "deepseek_v2")


@pytest.mark.parametrize("family", slow_but(["glm", "deepseek_v2"], FAMILIES))
def test_two_ranks_match_hugging_face(ranks, family):
    ranks.run(check_family, family, "none", 2)


def check_containers() -> None:
    """Models that have a fused decoder, with `containers: native`."""
    for family, adapter in (("llama", "none"), ("qwen2", "peft"), ("mixtral", "peft"), ("llama", "chat")):
        check_family(family, adapter, 2, containers="native", sizes=SIZES)


@pytest.mark.slow
def test_native_containers_run_tensor_parallel(ranks):
    ranks.run(check_containers)


@pytest.mark.parametrize("family", slow_but(["starcoder2"], [name for name in QUICK if name != "cohere"]))
def test_adapters_are_merged_before_slicing(ranks, family):
    ranks.run(check_family, family, "peft", 2)


def check_adapter_kinds() -> None:
    """Adapters that change more than a layer's weight: biases, the vocabulary, row norms (DoRA), and
    `modules_to_save`."""
    everywhere = {"target_modules": ["q_proj", "o_proj", "c_fc", "c_proj", "embed_tokens"]}
    untied = {**SIZES, "tie_word_embeddings": False}
    for lora in (
        {**everywhere, "modules_to_save": ["lm_head"]},
        {"lora_bias": True, "target_modules": ["q_proj", "o_proj", "c_proj"]},
        {"use_dora": True},
    ):
        check_model(with_peft(tiny_model("starcoder2", sizes=untied), **lora), 2)


@pytest.mark.slow
def test_lora_bias_dora_and_saved_modules_are_merged(ranks):
    ranks.run(check_adapter_kinds)


def check_critic() -> None:
    """A model with a head of its own, which has no generate()."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("starcoder2", vocab_size=97, pad_token_id=0, num_labels=1, **SIZES)
    model = AutoModelForSequenceClassification.from_config(config)
    reference = twin(model)
    engine = engine_of(model, tp_settings(2))
    assert "sharded over ranks" in engine.coverage()[0]["why"], engine.coverage()[0]["why"]
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, 6 + rank, padded=True, seed=rank)
    engine.eval()
    with torch.no_grad():
        actual, expected = (module(input_ids=ids, attention_mask=mask).logits for module in (engine, reference))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    engine.train()


def test_a_critic_runs_tensor_parallel(ranks):
    ranks.run(check_critic)


def check_four() -> None:
    """Two groups of two ranks; and one of four, in which two ranks hold the same key head and the last slice is
    zeros."""
    check_family("starcoder2", "none", 2)
    for family in ("starcoder2", "cohere", "deepseek_v2"):
        check_family(family, "none", 4)
    uneven = {**SIZES, "intermediate_size": 45}
    check_family("phi", "peft", 4, sizes=uneven)


@pytest.mark.slow
def test_four_ranks_match_hugging_face():
    pool = RankPool(4)
    try:
        pool.run(check_four)
    finally:
        pool.close()


def check_rollouts(adapter: str, stage: int) -> None:
    """Sampled tokens, logprobs, scores and training equal those of an engine without tensor parallelism."""
    model = ADAPTERS[adapter](tiny_model("starcoder2", sizes=SIZES))
    unsharded, sharded = engine_of(twin(model).train(), settings(stage)), engine_of(model, tp_settings(2, stage))
    require_same_rollouts(unsharded, sharded, 6, adapter != "none", tolerance=1e-5)


@pytest.mark.parametrize(
    ("adapter", "stage"),
    slow_but([("peft", 3)], [("none", 3), ("peft", 3), ("chat", 3), ("none", 0), ("peft", 2)]),
)
def test_rollouts_and_scores_match_an_engine_without_tensor_parallelism(ranks, adapter, stage):
    ranks.run(check_rollouts, adapter, stage)


def check_idle_and_failing_ranks() -> None:
    """A rank without rows, ranks with different settings, one that raises, and one whose token ids are out of range: no
    rank hangs, and the other rank gets its result."""
    model = tiny_model("starcoder2", sizes=SIZES, attn_implementation="eager")
    reference = twin(model)
    engine = engine_of(model, tp_settings(2))
    rank = dist.get_rank()
    ids, mask = prompts(2, 6, padded=True, seed=rank)
    rows = 2 * rank
    batch = engine.rollout(ids[:rows], mask[:rows], hybrid.SamplingParams(max_new_tokens=12, temperature=0))
    assert len(batch.completion_ids) == rows
    assert len(engine.score(ids[:rows], mask[:rows]).per_token_logps) == rows

    class Raises(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] >= 9:
                raise ArithmeticError
            return torch.zeros(len(input_ids), dtype=torch.bool)

    failures = (
        ({"stopping_criteria": StoppingCriteriaList([Raises()])}, ArithmeticError),
        ({"input_ids": ids + 97}, IndexError),
        ({"adapter_names": ["a", "b"]}, NotImplementedError),
        ({"input_ids": ids.float()}, ValueError),
        ({"output_attentions": True, "return_dict_in_generate": True}, NotImplementedError),
        ({"past_key_values": prefilled_cache(reference, ids)}, NotImplementedError),
    )
    rank_settings = (
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2} if rank else {"return_dict_in_generate": True}
    )
    request = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 8 + 4 * rank, **rank_settings}
    expected = sequences(reference.generate(**request))
    digest = storage_digest(engine)
    for failing_rank, (changes, error) in itertools.product(range(2), failures):
        if rank == failing_rank:
            with pytest.raises(error):
                engine.generate(**{**request, **changes})
        else:
            assert torch.equal(sequences(engine.generate(**request)), expected)
        dist.barrier()  # where ranks are a call apart, this hangs
        assert engine.module.training
        assert storage_digest(engine) == digest
    sampling = hybrid.SamplingParams(max_new_tokens=3)
    with contextlib.nullcontext() if rank else pytest.raises(ValueError, match="not left padded"):
        engine.rollout(ids, mask if rank else mask.flip(1), sampling)
    train_step(engine)


def sequences(output) -> torch.Tensor:
    """The tokens of an output of `generate`."""
    return getattr(output, "sequences", output)


def prefilled_cache(model, ids: torch.Tensor) -> DynamicCache:
    """A KV cache that the engine did not make."""
    return model(ids[:, :-1], use_cache=True).past_key_values


def test_idle_and_failing_ranks_do_not_hang_the_group(ranks):
    ranks.run(check_idle_and_failing_ranks)


def check_contract() -> None:
    """Outputs of a forward besides logits: hidden states, a loss, a cache to continue from; and submodules called
    alone."""
    model = tiny_model("cohere2", sizes=FAMILIES["cohere2"])
    reference = twin(model)
    engine = engine_of(model, tp_settings(2))
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, 9, padded=True, seed=rank)
    request_with_scores = {"max_new_tokens": 4 + rank, "return_dict_in_generate": True, "output_scores": True}
    request_with_scores["output_hidden_states"] = True
    engine.eval()
    actual, expected = (
        module.generate(ids, attention_mask=mask, **request_with_scores) for module in (engine, reference)
    )
    assert torch.equal(actual.sequences, expected.sequences)
    torch.testing.assert_close(actual.scores, expected.scores, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(actual.hidden_states, expected.hidden_states, atol=1e-4, rtol=1e-4)
    longer = torch.cat([mask, torch.ones_like(actual.sequences[:, ids.shape[1] :])], dim=1)
    request = {"attention_mask": longer, "max_new_tokens": 3}
    cache = actual.past_key_values
    continued = engine.generate(actual.sequences, past_key_values=cache, **request)
    assert torch.equal(continued, reference.generate(actual.sequences, **request))
    with torch.no_grad():
        actual, expected = (module(ids, attention_mask=mask, labels=ids) for module in (engine, reference))
        torch.testing.assert_close(actual.loss, expected.loss, atol=1e-5, rtol=1e-5)
        for length in (10, 11):
            longer = torch.cat([mask, torch.ones(len(ids), length - 9, dtype=torch.int64)], dim=1)
            actual, expected = (
                module(ids[:, :1], attention_mask=longer, past_key_values=before.past_key_values)
                for module, before in ((engine, actual), (reference, expected))
            )
            torch.testing.assert_close(actual.logits, expected.logits, atol=1e-4, rtol=1e-4)
        hidden = torch.randn(1 + rank, 32)
        torch.testing.assert_close(engine.module.lm_head(hidden), reference.lm_head(hidden), atol=1e-5, rtol=1e-5)
        actual, expected = (
            module.model(ids, attention_mask=mask, use_cache=False) for module in (engine.module, reference)
        )
        torch.testing.assert_close(actual[0], expected[0], atol=1e-4, rtol=1e-4)
        with pytest.raises(RuntimeError, match="called by itself"), engine.inference():
            engine.module.model.layers[0].mlp.down_proj(torch.randn(1, 24))
    engine.train()
    train_step(engine)
    with pytest.raises(NotImplementedError, match="a DynamicCache of .* tokens given"):
        engine.generate(continued, past_key_values=cache, max_new_tokens=3)


def test_forward_outputs_match_hugging_face(ranks):
    ranks.run(check_contract)


def check_bytes() -> None:
    """A rank holds its slice of weights, keys and values; fresh weights are not gathered again, and no cache of another
    rank's request is kept."""
    unsharded, sharded = (
        engine_of(tiny_model("starcoder2", sizes=SIZES), config)
        for config in (settings(3, rollout={"containers": "native"}), tp_settings(2))
    )
    assert sharded.stats()["snapshot_bytes"] == 0, "the self-check's slices were not freed"
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    for engine in (unsharded, sharded):
        engine.eval()
        engine.generate(ids, attention_mask=mask, max_new_tokens=3)
    sharded_bytes, unsharded_bytes = sharded.stats()["snapshot_bytes"], unsharded.stats()["snapshot_bytes"]
    # norms are replicated; row-parallel biases are on the first rank
    assert 0.5 < sharded_bytes / unsharded_bytes < 0.54
    layer = sum(p.ds_numel * 4 for p in sharded.module.model.layers[0].parameters())
    assert sharded.stats()["peak_bytes"] - sharded.stats()["kv_bytes"] <= sharded_bytes + 2 * layer
    gathered = sharded.stats()["gathered_bytes"]
    assert gathered == sum(p.ds_numel * 4 for p in sharded.module.parameters())
    sharded.generate(ids, attention_mask=mask, max_new_tokens=3)
    assert sharded.stats()["gathered_bytes"] == gathered
    kv_bytes = unsharded.stats()["kv_bytes"]  # 128 tokens per row, both ranks' rows, this rank's heads
    cache = sharded(ids, attention_mask=mask).past_key_values
    # of the other rank's request: 2 rows, 6 tokens, one head, 3 layers
    assert sharded.stats()["kv_bytes"] == kv_bytes + 2 * 6 * 8 * 4 * 2 * 3
    del cache
    sharded(ids, attention_mask=mask, use_cache=False)
    assert sharded.stats()["kv_bytes"] == kv_bytes
    cache = sharded(ids, attention_mask=mask).past_key_values
    sharded.train()
    assert cache.get_seq_length() == 6
    assert sharded.stats()["kv_bytes"] == kv_bytes


def test_a_rank_holds_only_its_slice(ranks):
    ranks.run(check_bytes)


def check_half_precision() -> None:
    """In bfloat16 the sharded model passes its self-check, and is as close to float32 as an unsharded engine."""
    exact = tiny_model("olmoe", sizes=FAMILIES["olmoe"]).bfloat16().float()
    ids, mask = prompts(4, 9, padded=True, seed=dist.get_rank())
    expected = engine_of(twin(exact), settings(3)).score(ids, mask).per_token_logps
    errors = []
    for config in (settings(3, dtype=torch.bfloat16), tp_settings(2, dtype=torch.bfloat16)):
        engine = engine_of(twin(exact).bfloat16(), config)
        errors.append((engine.score(ids, mask).per_token_logps - expected).abs().median())
        assert engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=4, seed=0)).completion_ids.shape[0] == 4
    assert "sharded over ranks" in engine.coverage()[0]["why"], engine.coverage()[0]["why"]
    assert 0 < errors[1] < 2 * errors[0] + 1e-3, errors


def test_half_precision_runs_tensor_parallel(ranks):
    ranks.run(check_half_precision)


def check_autocast() -> None:
    """A rank that runs another rank's forward uses that forward's autocast dtype, also after its own block has
    ended."""
    model = tiny_model("starcoder2", sizes=SIZES)
    cast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, 9, padded=True, seed=rank)
    logps = []
    for config in (settings(3), {**settings(3), **cast}, {**tp_settings(2), **cast}):
        engine = engine_of(twin(model), config)
        with engine.inference():
            scores = [engine.score(ids, mask).per_token_logps for _ in range(1 + rank)]
        logps.append(scores[0])
    assert "sharded over ranks" in engine.coverage()[0]["why"], engine.coverage()[0]["why"]
    exact, unsharded, sharded = logps
    assert 0 < (sharded - exact).abs().median() < 2 * (unsharded - exact).abs().median() + 1e-3


def test_ranks_may_differ_in_autocast(ranks):
    ranks.run(check_autocast)


def check_fallback() -> None:
    """A model without a tp_plan, with an unknown style, or with a plan that does not describe it, runs whole on every
    rank if its weights fit, else layer by layer, and coverage() says why."""
    rank = dist.get_rank()
    ids, mask = prompts(2, 6, padded=True, seed=rank)
    request = {"attention_mask": mask, "max_new_tokens": 3 + 2 * rank}

    def require_without_slices(model, reason: str, limit: int | None = None) -> hybrid.HybridEngine:
        reference, config = twin(model), tp_settings(2)
        config["hybrid_engine"]["max_out_tokens"] = 16
        config["rollout"] |= {"memory_limit": limit, "max_num_seqs": 2} if limit else {}
        engine = engine_of(model, config)
        held = "weights are gathered layer by layer" if limit else "weights are whole on every rank"
        why = engine.coverage()[0]["why"]
        assert reason in why and held in why, why
        with engine.inference(), CollectiveCount() as collectives:
            assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
        assert (collectives.count == 0) == (limit is None), "whole weights need no collective inside a window"
        train_step(engine)
        return engine

    whole = require_without_slices(tiny_model("stablelm", sizes=SIZES), "StableLmForCausalLM has no tp_plan")
    needs = {str(mode): need.total for mode, need in whole.memory_plan(2, 8, 8).needs.items()}
    assert str(whole.memory_plan(2, 8, 8).in_use) == "pinned"
    tight = (needs["streaming"] + needs["pinned"]) // 2
    require_without_slices(tiny_model("stablelm", sizes=SIZES), "StableLmForCausalLM has no tp_plan", tight)
    unknown_style = tiny_model("olmo", sizes=SIZES)
    unknown_style.tp_plan["model.layers.*.mlp"] = "all_reduce"
    require_without_slices(unknown_style, "has all_reduce: not supported")
    wrong = tiny_model("olmo", sizes=SIZES)
    wrong.tp_plan["model.layers.*.self_attn.k_proj"] = "replicate"
    require_without_slices(wrong, "the model differs from the whole one")
    incomplete = tiny_model("olmo", sizes=SIZES)
    for name in ("mlp.gate_proj", "mlp.up_proj", "self_attn.o_proj"):
        del incomplete.tp_plan[f"model.layers.*.{name}"]
    require_without_slices(incomplete, "the tp_plan of OlmoForCausalLM slices no layer")


def test_a_model_without_a_usable_tp_plan_runs_without_slices(ranks):
    ranks.run(check_fallback)


def check_refused_decoder() -> None:
    """A layer that differs from its family's: the self-check rejects the decoder, and the model's own modules run
    sliced."""
    model = tiny_model("llama")
    reference = twin(model)
    for module in (model, reference):
        mlp = module.model.layers[1].mlp
        mlp.forward = lambda x, own=mlp.forward: own(x) * 1.01
    config = tp_settings(2, containers="fused")
    config["rollout"]["trust_forward"] = True
    engine = engine_of(model, config)
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    request = {"attention_mask": mask, "max_new_tokens": 3 + 2 * dist.get_rank()}
    for reason in ("a decoder of the llama family, sharded", "the Hugging Face module itself", "sharded over ranks by"):
        assert reason in engine.coverage()[0]["why"]
        assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    assert "layer 1 of the fused container differs" in engine.coverage()[0]["why"]
    train_step(engine)
    assert engine.weight_version == 1


def test_a_decoder_that_fails_its_self_check_is_replaced_by_sliced_modules(ranks):
    ranks.run(check_refused_decoder)


def check_heads() -> None:
    odd = {**SIZES, "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
    with pytest.raises(ValueError, match="2 given; the model's 3 attention heads and 3 key and value heads.*by 1, 3"):
        engine_of(tiny_model("olmo", sizes=odd), tp_settings(2))


def test_heads_that_tp_size_does_not_divide_raise(ranks):
    ranks.run(check_heads)
