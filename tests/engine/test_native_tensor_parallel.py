"""Inference tensor parallelism through a model's own modules: what one rank alone makes, whatever each rank brings."""

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
from tests.engines import engine_of, require_hugging_faces, require_same_rollouts, settings, storage_digest, train_step
from tests.rank_pool import RankPool
from tests.tiny_models import ADAPTERS, SIZES, prompts, tiny_model, twin, with_peft

# Models of no family of ours whose configuration has a tp_plan, and what each brings that others do not.
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


def spread(size: int, stage: int = 3, containers: str = "fused", dtype: torch.dtype = torch.float32) -> dict:
    """Settings of an engine whose inference is spread over `size` ranks."""
    block = {"enabled": True, "inference_tp_size": size, "tp_gather_partition_size": 2}
    return settings(stage, 0, dtype, hybrid_engine=block, rollout={"containers": containers})


def check_model(model, size: int, containers: str = "fused") -> None:
    """Tokens, logits and training of a model whose ranks differ in rows, prompt length and number of new tokens."""
    reference = twin(model)
    engine = engine_of(model, spread(size, containers=containers))
    why = engine.coverage()[0]["why"]
    assert "spread over ranks by the model's tp_plan" in why, why
    require_hugging_faces(engine, reference, tolerance=1e-4)
    engine.destroy()


def check_family(family: str, adapter: str, size: int, containers: str = "fused", sizes: dict | None = None) -> None:
    check_model(ADAPTERS[adapter](tiny_model(family, sizes=sizes or FAMILIES[family])), size, containers)


QUICK = ("cohere", "glm", "starcoder2", "deepseek_v2")


def slow_unless(quick: bool) -> list:
    """Marks of a case that a default run can do without."""
    return [] if quick else [pytest.mark.slow]


@pytest.mark.parametrize("family", [pytest.param(name, marks=slow_unless(name in QUICK)) for name in FAMILIES])
def test_two_ranks_make_what_one_makes(ranks, family):
    ranks.run(check_family, family, "none", 2)


def check_containers() -> None:
    """Models that have a decoder of ours, where the configuration wants their own modules."""
    for family, adapter in (("llama", "none"), ("qwen2", "peft"), ("mixtral", "peft"), ("llama", "chat")):
        check_family(family, adapter, 2, containers="native", sizes=SIZES)


@pytest.mark.slow
def test_native_containers_are_spread(ranks):
    ranks.run(check_containers)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=slow_unless(name == "starcoder2")) for name in QUICK if name != "cohere"]
)
def test_adapters_are_merged_before_slices_are_cut(ranks, family):
    ranks.run(check_family, family, "peft", 2)


def check_adapter_kinds() -> None:
    """What adapters change besides a layer's weight: biases of rows, the vocabulary, norms of whole rows (DoRA), and
    modules that are saved beside the original."""
    everywhere = {"target_modules": ["q_proj", "o_proj", "c_fc", "c_proj", "embed_tokens"]}
    untied = {**SIZES, "tie_word_embeddings": False}
    for lora in (
        {**everywhere, "modules_to_save": ["lm_head"]},
        {"lora_bias": True, "target_modules": ["q_proj", "o_proj", "c_proj"]},
        {"use_dora": True},
    ):
        check_model(with_peft(tiny_model("starcoder2", sizes=untied), **lora), 2)


def test_every_kind_of_adapter_is_merged(ranks):
    ranks.run(check_adapter_kinds)


def check_critic() -> None:
    """A model with a head of its own, which has no generate()."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("starcoder2", vocab_size=97, pad_token_id=0, num_labels=1, **SIZES)
    model = AutoModelForSequenceClassification.from_config(config)
    reference = twin(model)
    engine = engine_of(model, spread(2))
    assert "spread over ranks" in engine.coverage()[0]["why"], engine.coverage()[0]["why"]
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, 6 + rank, padded=True, seed=rank)
    engine.eval()
    with torch.no_grad():
        ours, theirs = (one(input_ids=ids, attention_mask=mask).logits for one in (engine, reference))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    engine.train()


def test_a_critic_is_spread(ranks):
    ranks.run(check_critic)


def check_four() -> None:
    """Two groups of two; and one of four, in which two ranks have the same key head, and the last a part of zeros."""
    check_family("starcoder2", "none", 2)
    for family in ("starcoder2", "cohere", "deepseek_v2"):
        check_family(family, "none", 4)
    uneven = {**SIZES, "intermediate_size": 45}
    check_family("phi", "peft", 4, sizes=uneven)


@pytest.mark.slow
def test_four_ranks():
    pool = RankPool(4)
    try:
        pool.run(check_four)
    finally:
        pool.close()


def check_rollouts(adapter: str, stage: int) -> None:
    """Sampled tokens, logprobs, scores and training are an engine's that is not spread, before and after a step."""
    model = ADAPTERS[adapter](tiny_model("starcoder2", sizes=SIZES))
    alone, together = engine_of(twin(model).train(), settings(stage)), engine_of(model, spread(2, stage))
    require_same_rollouts(alone, together, 6, adapter != "none", tolerance=1e-5)


@pytest.mark.parametrize(
    ("adapter", "stage"),
    [
        pytest.param(adapter, stage, marks=slow_unless((adapter, stage) in (("peft", 3), ("none", 0))))
        for adapter, stage in (("none", 3), ("peft", 3), ("chat", 3), ("none", 0), ("peft", 2))
    ],
)
def test_rollouts_and_scores_are_those_of_an_engine_alone(ranks, adapter, stage):
    ranks.run(check_rollouts, adapter, stage)


def check_company() -> None:
    """A rank without rows, ranks with other settings, one that raises, and one whose tokens do not exist: nobody hangs,
    and the others get what they asked for."""
    model = tiny_model("starcoder2", sizes=SIZES, attn_implementation="eager")
    reference = twin(model)
    engine = engine_of(model, spread(2))
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

    wrongs = (
        ({"stopping_criteria": StoppingCriteriaList([Raises()])}, ArithmeticError),
        ({"input_ids": ids + 97}, IndexError),
        ({"adapter_names": ["a", "b"]}, NotImplementedError),
        ({"input_ids": ids.float()}, ValueError),
        ({"output_attentions": True, "return_dict_in_generate": True}, NotImplementedError),
        ({"past_key_values": filled(reference, ids)}, NotImplementedError),
    )
    one_sided = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2} if rank else {"return_dict_in_generate": True}
    request = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 8 + 4 * rank, **one_sided}
    expected = sequences(reference.generate(**request))
    digest = storage_digest(engine)
    for unlucky, (wrong, error) in itertools.product(range(2), wrongs):
        if rank == unlucky:
            with pytest.raises(error):
                engine.generate(**{**request, **wrong})
        else:
            assert torch.equal(sequences(engine.generate(**request)), expected)
        dist.barrier()  # where ranks are a call apart, this hangs
        assert engine.module.training
        assert storage_digest(engine) == digest
    sampling = hybrid.SamplingParams(max_new_tokens=3)
    with contextlib.nullcontext() if rank else pytest.raises(ValueError, match="not left padded"):
        engine.rollout(ids, mask if rank else mask.flip(1), sampling)
    train_step(engine)


def sequences(found) -> torch.Tensor:
    """The tokens of what `generate` gives."""
    return getattr(found, "sequences", found)


def filled(model, ids: torch.Tensor) -> DynamicCache:
    """A cache that the engine has not seen."""
    return model(ids[:, :-1], use_cache=True).past_key_values


def test_ranks_keep_each_other_company(ranks):
    ranks.run(check_company)


def check_contract() -> None:
    """What a forward gives besides logits: hidden states, a loss, caches that go on; and parts called by themselves."""
    model = tiny_model("cohere2", sizes=FAMILIES["cohere2"])
    reference = twin(model)
    engine = engine_of(model, spread(2))
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, 9, padded=True, seed=rank)
    asked = {"max_new_tokens": 4 + rank, "return_dict_in_generate": True, "output_scores": True}
    asked["output_hidden_states"] = True
    engine.eval()
    ours, theirs = (one.generate(ids, attention_mask=mask, **asked) for one in (engine, reference))
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(ours.scores, theirs.scores, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.hidden_states, theirs.hidden_states, atol=1e-4, rtol=1e-4)
    longer = torch.cat([mask, torch.ones_like(ours.sequences[:, ids.shape[1] :])], dim=1)
    request = {"attention_mask": longer, "max_new_tokens": 3}
    held = ours.past_key_values
    again = engine.generate(ours.sequences, past_key_values=held, **request)
    assert torch.equal(again, reference.generate(ours.sequences, **request))
    with torch.no_grad():
        ours, theirs = (one(ids, attention_mask=mask, labels=ids) for one in (engine, reference))
        torch.testing.assert_close(ours.loss, theirs.loss, atol=1e-5, rtol=1e-5)
        for length in (10, 11):
            longer = torch.cat([mask, torch.ones(len(ids), length - 9, dtype=torch.int64)], dim=1)
            ours, theirs = (
                one(ids[:, :1], attention_mask=longer, past_key_values=before.past_key_values)
                for one, before in ((engine, ours), (reference, theirs))
            )
            torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
        hidden = torch.randn(1 + rank, 32)
        torch.testing.assert_close(engine.module.lm_head(hidden), reference.lm_head(hidden), atol=1e-5, rtol=1e-5)
        ours, theirs = (one.model(ids, attention_mask=mask, use_cache=False) for one in (engine.module, reference))
        torch.testing.assert_close(ours[0], theirs[0], atol=1e-4, rtol=1e-4)
        with pytest.raises(RuntimeError, match="called by itself"), engine.inference():
            engine.module.model.layers[0].mlp.down_proj(torch.randn(1, 24))
    engine.train()
    train_step(engine)
    with pytest.raises(NotImplementedError, match="a DynamicCache of .* tokens given"):
        engine.generate(again, past_key_values=held, max_new_tokens=3)


def test_a_forward_is_hugging_faces(ranks):
    ranks.run(check_contract)


def check_bytes() -> None:
    """A rank keeps its part, also of keys and values; nothing is gathered that is fresh, nor kept of others' caches."""
    whole, half = (engine_of(tiny_model("starcoder2", sizes=SIZES), config) for config in (settings(3), spread(2)))
    assert half.stats()["snapshot_bytes"] == 0, "the self-check left its slices"
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    for engine in (whole, half):
        engine.eval()
        engine.generate(ids, attention_mask=mask, max_new_tokens=3)
    ours, all_of_it = half.stats()["snapshot_bytes"], whole.stats()["snapshot_bytes"]
    assert 0.5 < ours / all_of_it < 0.54  # norms are whole, biases of rows are the first rank's
    layer = sum(p.ds_numel * 4 for p in half.module.model.layers[0].parameters())
    assert half.stats()["peak_bytes"] - half.stats()["kv_bytes"] <= ours + 2 * layer
    gathered = half.stats()["gathered_bytes"]
    assert gathered == sum(p.ds_numel * 4 for p in half.module.parameters())
    half.generate(ids, attention_mask=mask, max_new_tokens=3)
    assert half.stats()["gathered_bytes"] == gathered
    own = whole.stats()["kv_bytes"] / 2  # storage of 128 tokens a row, this rank's heads
    cache = half(ids, attention_mask=mask).past_key_values
    assert half.stats()["kv_bytes"] == own + 2 * 6 * 8 * 4 * 2 * 3  # of the other's: 2 rows, 6 tokens, a head, 3 layers
    del cache
    half(ids, attention_mask=mask, use_cache=False)
    assert half.stats()["kv_bytes"] == own
    cache = half(ids, attention_mask=mask).past_key_values
    half.train()
    assert cache.get_seq_length() == 6
    assert half.stats()["kv_bytes"] == own


def test_a_rank_keeps_its_part_alone(ranks):
    ranks.run(check_bytes)


def check_half_precision() -> None:
    """In bfloat16 the spread model passes its check, and is as near to float32 as an engine's that is not spread."""
    exact = tiny_model("olmoe", sizes=FAMILIES["olmoe"]).bfloat16().float()
    ids, mask = prompts(4, 9, padded=True, seed=dist.get_rank())
    expected = engine_of(twin(exact), settings(3)).score(ids, mask).per_token_logps
    errors = []
    for config in (settings(3, dtype=torch.bfloat16), spread(2, dtype=torch.bfloat16)):
        engine = engine_of(twin(exact).bfloat16(), config)
        errors.append((engine.score(ids, mask).per_token_logps - expected).abs().median())
        assert engine.rollout(ids, mask, hybrid.SamplingParams(max_new_tokens=4, seed=0)).completion_ids.shape[0] == 4
    assert "spread over ranks" in engine.coverage()[0]["why"], engine.coverage()[0]["why"]
    assert 0 < errors[1] < 2 * errors[0] + 1e-3, errors


def test_half_precision_is_spread(ranks):
    ranks.run(check_half_precision)


def check_autocast() -> None:
    """Who keeps company computes in the dtypes of whose forward it is, also as its own block is left."""
    model = tiny_model("starcoder2", sizes=SIZES)
    cast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    rank = dist.get_rank()
    ids, mask = prompts(2 + rank, 9, padded=True, seed=rank)
    found = []
    for config in (settings(3), {**settings(3), **cast}, {**spread(2), **cast}):
        engine = engine_of(twin(model), config)
        with engine.inference():
            scores = [engine.score(ids, mask).per_token_logps for _ in range(1 + rank)]
        found.append(scores[0])
    assert "spread over ranks" in engine.coverage()[0]["why"], engine.coverage()[0]["why"]
    exact, alone, ours = found
    assert 0 < (ours - exact).abs().median() < 2 * (alone - exact).abs().median() + 1e-3


def test_autocast_is_the_callers(ranks):
    ranks.run(check_autocast)


def check_fallback() -> None:
    """A model without a plan, with a style that is not known, or that its plan does not describe, runs layer by layer,
    and coverage says why; a decoder that is refused as it is checked makes way for the model's own modules."""
    rank = dist.get_rank()
    ids, mask = prompts(2, 6, padded=True, seed=rank)
    request = {"attention_mask": mask, "max_new_tokens": 3 + 2 * rank}

    def runs(model, words: str) -> None:
        reference = twin(model)
        engine = engine_of(model, spread(2))
        assert words in engine.coverage()[0]["why"], engine.coverage()[0]["why"]
        assert "layer by layer" in engine.coverage()[0]["why"]
        assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
        train_step(engine)

    runs(tiny_model("stablelm", sizes=SIZES), "StableLmForCausalLM has no tp_plan")
    unknown = tiny_model("olmo", sizes=SIZES)
    unknown.tp_plan["model.layers.*.mlp"] = "all_reduce"
    runs(unknown, "has all_reduce, which is not known")
    wrong = tiny_model("olmo", sizes=SIZES)
    wrong.tp_plan["model.layers.*.self_attn.k_proj"] = "replicate"
    runs(wrong, "the model differs from the whole one")
    lone = tiny_model("olmo", sizes=SIZES)
    for name in ("mlp.gate_proj", "mlp.up_proj", "self_attn.o_proj"):
        del lone.tp_plan[f"model.layers.*.{name}"]
    runs(lone, "the tp_plan of OlmoForCausalLM spreads no layer")


def test_what_has_no_plan_runs_layer_by_layer(ranks):
    ranks.run(check_fallback)


def check_refused_decoder() -> None:
    """A layer that is not its family's: the self-check refuses the decoder; the modules run on slices after that."""
    model = tiny_model("llama")
    reference = twin(model)
    for one in (model, reference):
        mlp = one.model.layers[1].mlp
        mlp.forward = lambda x, own=mlp.forward: own(x) * 1.01
    engine = engine_of(model, spread(2))
    ids, mask = prompts(2, 6, padded=True, seed=dist.get_rank())
    request = {"attention_mask": mask, "max_new_tokens": 3 + 2 * dist.get_rank()}
    for words in ("a decoder of the llama family, spread", "the Hugging Face module itself", "spread over ranks by"):
        assert words in engine.coverage()[0]["why"]
        assert torch.equal(engine.generate(ids, **request), reference.generate(ids, **request))
    assert "layer 1 of the fused container differs" in engine.coverage()[0]["why"]
    train_step(engine)
    assert engine.weight_version == 1


def test_a_refused_decoder_makes_way(ranks):
    ranks.run(check_refused_decoder)


def check_heads() -> None:
    odd = {**SIZES, "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
    with pytest.raises(ValueError, match="2 given; the model's 3 attention heads and 3 key and value heads.*by 1, 3"):
        engine_of(tiny_model("olmo", sizes=odd), spread(2))


def test_heads_that_cannot_be_shared_are_refused(ranks):
    ranks.run(check_heads)
