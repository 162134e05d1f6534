"""Keys and values of ended sequences are reused by sequences that begin alike, under the same weights. The oracle is
the engine without prefix caching."""

import pytest
import torch
import torch.distributed as dist

import hybrid
from hybrid import SamplingParams
from tests.engines import engine_of, settings, train_step
from tests.marks import slow_but
from tests.tiny_models import ADAPTERS, prompts, tiny_model

SAMPLING = SamplingParams(max_new_tokens=20, temperature=0.9, seed=7, stop_token_ids=(5,))
ROOM = {"prefix_cache_bytes": 10**6}
MODES = {
    "one rank": {"rollout": ROOM},
    "tensor parallel": {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}, "rollout": ROOM},
    "streamed": {"hybrid_engine": {"enabled": True, "pin_parameters": False}, "rollout": ROOM},
    "int8": {"rollout": {"weight_dtype": "int8", **ROOM}},
    "little room": {"rollout": {"kv_cache_bytes": 9 * 32 * 3 * 2 * 2 * 8 * 4}},  # 9 blocks: of float32, 3 layers
}


def second_turn(batch: hybrid.RolloutBatch, seed: int, more: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences of a batch, each followed by new tokens, left padded."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for ids, mask in zip(batch.sequences, batch.attention_mask, strict=True):
        rows.append(torch.cat([ids[mask.bool()], torch.randint(6, 97, (more,), generator=generator)]))
    width = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (width - len(row), 0)) for row in rows])
    return ids, mask


def require_equal(actual: hybrid.RolloutBatch, expected: hybrid.RolloutBatch) -> None:
    for name in ("completion_ids", "completion_mask", "sampling_per_token_logps", "raw_per_token_logps"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name


def cached(engine: hybrid.HybridEngine) -> tuple[int, int]:
    stats = engine.stats()
    return stats["cached_tokens"], stats["prefilled_tokens"]


def check_turns(blocks: dict) -> None:
    """Three turns, scores and other prompts between them, in windows and across windows, before and after a step."""
    rank = dist.get_rank()
    plain_rollout = {**blocks.get("rollout", {}), "enable_prefix_caching": False}
    engine = engine_of(tiny_model("llama"), settings(3, **blocks))
    plain = engine_of(tiny_model("llama"), settings(3, **{**blocks, "rollout": plain_rollout}))
    for step in range(2):
        ids, mask = prompts(3, 35 + 4 * rank, padded=True, seed=rank)
        found = []
        for turn in range(2):
            before = cached(engine)
            actual, expected = (e.rollout(ids, mask, SAMPLING, num_generations=1) for e in (engine, plain))
            require_equal(actual, expected)
            after = cached(engine)
            found.append((after[0] - before[0], after[1] - before[1]))
            scores, expected_scores = (e.score(actual.sequences, actual.attention_mask) for e in (engine, plain))
            assert torch.equal(scores.per_token_logps, expected_scores.per_token_logps)
            require_equal(*(e.rollout(ids[:1] + 1, mask[:1], SAMPLING) for e in (engine, plain)))
            ids, mask = second_turn(actual, seed=turn)
        reused, computed = found[1]
        rows = 3 if blocks.get("hybrid_engine", {}).get("inference_tp_size", 1) == 1 else 6
        if "prefix_cache_bytes" in blocks["rollout"]:
            # Of a row the last sampled token and the three new ones are new.
            assert computed == rows * 4, found
            assert reused > 10 * computed
        assert found[0][0] < 40, "keys and values of the former weights were used"
        assert cached(plain)[0] == 0
        for e in (engine, plain):
            train_step(e, seed=step)


@pytest.mark.parametrize("mode", slow_but(["one rank", "tensor parallel", "little room"], MODES))
def test_a_second_turn_computes_only_what_is_new(ranks, mode):
    ranks.run(check_turns, MODES[mode])


def check_adapters() -> None:
    """With and without adapters keys and values differ; both stay, and are not mixed."""
    engine, plain = (
        engine_of(ADAPTERS["peft"](tiny_model("llama")), settings(3, rollout={"enable_prefix_caching": on, **ROOM}))
        for on in (True, False)
    )
    ids, mask = prompts(2, 40, padded=False)
    for _ in range(2):
        for adapters in (True, False):
            actual, expected = (e.rollout(ids, mask, SAMPLING, adapters=adapters) for e in (engine, plain))
            require_equal(actual, expected)
    reused, computed = cached(engine)
    assert (reused, computed) == (2 * 2 * 39, 2 * 2 * 40 + 2 * 2)
    engine.mark_weights_changed()
    engine.rollout(ids, mask, SAMPLING)
    assert cached(engine)[0] == reused


def test_weights_with_and_without_adapters_have_their_own_blocks(ranks):
    ranks.run(check_adapters)


def check_families(family: str) -> None:
    engine, plain = (
        engine_of(tiny_model(family), settings(3, rollout={"enable_prefix_caching": on, **ROOM}))
        for on in (True, False)
    )
    ids, mask = prompts(2, 36, padded=True)
    first = engine.rollout(ids, mask, SAMPLING)
    ids, mask = second_turn(first, seed=1)
    require_equal(*(e.rollout(ids, mask, SAMPLING) for e in (engine, plain)))
    assert cached(engine)[0] > 60
    generated = [e.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False) for e in (engine, plain)]
    assert torch.equal(*generated)


@pytest.mark.parametrize(
    "family", slow_but(["gemma3_text", "bloom"], ["gemma3_text", "bloom", "mixtral", "opt", "gptj"])
)
def test_reuse_in_other_families(ranks, family):
    ranks.run(check_families, family)
