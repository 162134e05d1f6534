"""Inference tensor parallelism through a model's own modules: what one rank alone makes, whatever each rank brings."""

import pytest
import torch
import torch.distributed as dist

import hybrid
from tests.engines import engine_of, settings, storage_digest, train_step
from tests.models import ADAPTERS, PLAIN_SIZES, SIZES, prompts, tiny_model, twin
from tests.rank_pool import RankPool

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
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },  # latent attention, dense layers among mixtures
}


def spread(size: int, stage: int = 3, containers: str = "fused", **changes) -> dict:
    """Settings of an engine whose inference is spread over `size` ranks."""
    block = {"enabled": True, "inference_tp_size": size, "tp_gather_partition_size": 2}
    return settings(stage, 0, hybrid_engine=block, rollout={"containers": containers}, **changes)


def check_model(model, size: int, containers: str = "fused") -> None:
    """Tokens, logits and training of a model whose ranks differ in rows, prompt length and number of new tokens."""
    reference = twin(model)
    engine = engine_of(model, spread(size, containers=containers))
    why = engine.coverage()[0]["why"]
    assert "spread over ranks by the model's tp_plan" in why, why
    rank = dist.get_rank()
    for padded in (False, True):
        ids, mask = prompts(rows=3 + rank, length=7 + rank, padded=padded, seed=rank)
        request = {"attention_mask": mask, "max_new_tokens": 6 + 4 * rank, "do_sample": False}
        expected = reference.generate(ids, **request)
        assert torch.equal(engine.generate(ids, **request), expected), f"padded {padded}, rank {rank}"
    whole = torch.ones_like(expected)
    whole[:, : ids.shape[1]] = mask
    with torch.no_grad():
        logits = reference(expected, attention_mask=whole).logits
    engine.eval()
    ours = engine(expected, attention_mask=whole, use_cache=False).logits
    torch.testing.assert_close(ours[whole.bool()], logits[whole.bool()], atol=1e-4, rtol=1e-4)
    engine.train()
    train_step(engine)
    engine.destroy()


def check_family(family: str, adapter: str, size: int, containers: str = "fused", sizes: dict | None = None) -> None:
    check_model(ADAPTERS[adapter](tiny_model(family, sizes=sizes or FAMILIES[family])), size, containers)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_make_what_one_makes(ranks, family):
    ranks.run(check_family, family, "none", 2)
