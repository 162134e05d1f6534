"""Engines of models with latent attention (DeepSeek V3): everything runs fused, over a cache of latents."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hybrid
from hybrid import SamplingParams
from hybrid.decoders.batch import BLOCK_SIZE
from hybrid.kernels.cpu_library import cpu_library
from tests.engines import engine_of, require_matches_hugging_face, require_same_rollouts, settings
from tests.marks import slow_but
from tests.tiny_models import ADAPTERS, VOCABULARY, prompts, tiny_model, twin

FAMILY = "deepseek_v3"
ENDS = tuple(range(2, VOCABULARY, 12))
SAMPLING = SamplingParams(max_new_tokens=40, temperature=0.9, seed=7, stop_token_ids=ENDS)


def engine(adapter: str = "none", **blocks: Any) -> hybrid.HybridEngine:
    return engine_of(ADAPTERS[adapter](tiny_model(FAMILY)), settings(3, **blocks))


def check_tokens(adapter: str, blocks: dict) -> None:
    model = ADAPTERS[adapter](tiny_model(FAMILY))
    reference = twin(model)
    engine_ = engine_of(model, settings(3, **blocks))
    require_matches_hugging_face(engine_, reference, tolerance=1e-3)
    assert {row["container"] for row in engine_.coverage()} == {"fused"}, engine_.coverage()


MODES = {
    "merged": ("peft", {}),
    "unmerged": ("chat", {"rollout": {"lora": "unmerged"}}),
    "streamed, unmerged": (
        "peft",
        {"rollout": {"lora": "unmerged"}, "hybrid_engine": {"enabled": True, "pin_parameters": False}},
    ),
    "sliced": ("peft", {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}}),
}


@pytest.mark.parametrize("mode", slow_but(["unmerged", "sliced"], MODES))
def test_tokens_match_hugging_face(ranks, mode):
    ranks.run(check_tokens, *MODES[mode])


def check_streams() -> None:
    """Also that a step of ZeRO-3 is seen, in a snapshot and in a stream."""
    streamed = engine("peft", hybrid_engine={"enabled": True, "pin_parameters": False})
    require_same_rollouts(engine("peft"), streamed, 37, True, tolerance=0)


def test_streamed_rollouts_are_bit_identical(ranks):
    ranks.run(check_streams)


def check_rows() -> None:
    """A row's bits do not depend on other rows, drafts, or cached prefixes; scores give its logprobs again."""
    rank = dist.get_rank()
    ids, mask = prompts(4, 70 + 3 * rank, padded=True, seed=rank)
    whole = engine()
    expected = whole.rollout(ids, mask, SAMPLING, num_generations=3)
    assert whole.stats()["prefilled_tokens"] == int(mask.sum())
    lanes = cpu_library().lanes()
    value = -(-24 // lanes) * lanes  # elements, in whole vectors
    assert whole.stats()["kv_bytes"] % (3 * 4 * BLOCK_SIZE * (24 + 4 + value)) == 0  # 3 layers, float32
    assert len(expected.completion_mask.sum(dim=1).unique()) > 3, "all rows end together: the test is vacuous"
    scores = whole.score(expected.sequences, expected.attention_mask, temperature=0.9)
    width = expected.completion_ids.shape[1]
    scored = scores.per_token_logps[:, -width:] * expected.completion_mask
    assert torch.equal(scored, expected.old_per_token_logps)
    few = engine(rollout={"max_num_seqs": 2, "speculation": {}})
    for again in (few, whole):
        with again.inference():
            again.rollout(ids, mask, replace(SAMPLING, seed=8))
            batch = again.rollout(ids, mask, SAMPLING, num_generations=3)
            assert again.stats()["cached_tokens"] > 0, "no prefix was found"
        for name in ("completion_ids", "completion_mask", "sampling_per_token_logps", "raw_per_token_logps"):
            assert torch.equal(getattr(batch, name), getattr(expected, name)), name


def test_rows_do_not_depend_on_each_other(ranks):
    ranks.run(check_rows)
