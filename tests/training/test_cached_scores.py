"""`score()` of sequences that were just rolled out runs the head alone. The oracle is the engine that keeps nothing."""

import pytest
import torch
import torch.distributed as dist

import hybrid
from hybrid import SamplingParams
from tests.engines import engine_of, settings, train_step
from tests.marks import slow_but
from tests.tiny_models import ADAPTERS, prompts, tiny_model
from tests.training.test_speculation import forced

SAMPLING = SamplingParams(max_new_tokens=40, temperature=0.9, seed=7, stop_token_ids=(5,))
KEPT = {"cache_hidden_states": True, "prefix_cache_bytes": 10**6}
TENSOR_PARALLEL = {"enabled": True, "inference_tp_size": 2}
MODES = {
    "one rank": {},
    "queued": {"rollout": {"max_num_seqs": 2}},
    "tensor parallel": {"hybrid_engine": TENSOR_PARALLEL},
    "streamed": {"hybrid_engine": {"enabled": True, "pin_parameters": False}},
    "int8": {"rollout": {"weight_dtype": "int8"}},
    "speculation": {"rollout": {"speculation": {"ngram": True, "history": True}}},
    "little room": {"rollout": {"kv_cache_bytes": 9 * 32 * 3 * (2 * 2 * 8 + 32) * 4}},
}


def pair(
    model: str = "llama", blocks: dict | None = None, adapters: str = "", dtype: torch.dtype = torch.float32
) -> list[hybrid.HybridEngine]:
    """An engine that keeps the last layer's outputs, and one that does not."""
    engines = []
    for kept in (KEPT, {}):
        rollout = {**(blocks or {}).get("rollout", {}), **kept}
        if "kv_cache_bytes" in rollout:
            rollout.pop("prefix_cache_bytes", None)
        own = tiny_model(model).to(dtype)
        own = ADAPTERS[adapters](own) if adapters else own
        engines.append(engine_of(own, settings(3, dtype=dtype, **{**(blocks or {}), "rollout": rollout})))
    return engines


def cached(engine: hybrid.HybridEngine) -> int:
    return engine.stats()["cached_scored_tokens"]


def rolled_out(
    engines: list[hybrid.HybridEngine], ids: torch.Tensor, mask: torch.Tensor, **settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences that all engines sample, and their mask."""
    batches = [e.rollout(ids, mask, SAMPLING, **settings) for e in engines]
    assert torch.equal(batches[0].sequences, batches[1].sequences)
    return batches[0].sequences, batches[0].attention_mask


def require_same_scores(engines: list[hybrid.HybridEngine], ids: torch.Tensor, mask: torch.Tensor, **settings) -> int:
    """Compares scores to the bit; gives how many tokens' layers were not computed."""
    before = cached(engines[0])
    found, expected = (e.score(ids, mask, **settings) for e in engines)
    assert torch.equal(found.per_token_logps, expected.per_token_logps)
    assert torch.equal(found.entropies, expected.entropies)
    assert cached(engines[1]) == 0
    return cached(engines[0]) - before


def check_modes(blocks: dict, knows_all: bool) -> None:
    engines, rank = pair(blocks=blocks), dist.get_rank()
    for step in range(2):
        ids, mask = prompts(3, 35 + 4 * rank, padded=True, seed=rank)
        with forced():
            sequences, attention_mask = rolled_out(engines, ids, mask, num_generations=2)
        counts = [require_same_scores(engines, sequences, attention_mask, temperature=t) for t in (1.0, 0.7)]
        if knows_all:
            ranks = 2 if "inference_tp_size" in blocks.get("hybrid_engine", {}) else 1
            tokens = attention_mask.sum() - len(sequences)
            if ranks == 2:
                dist.all_reduce(tokens)
            assert counts == [tokens, tokens], (counts, tokens)
        longer = torch.cat([sequences, sequences[:, -2:].clamp(min=6)], dim=1)  # rows that have not ended go on
        require_same_scores(engines, longer, torch.cat([attention_mask, attention_mask[:, -2:]], dim=1))
        for e in engines:
            train_step(e, seed=step)
        stale = require_same_scores(engines, sequences, attention_mask)
        assert stale == 0, "outputs of the former weights were used"


@pytest.mark.parametrize("mode", slow_but(["one rank", "tensor parallel", "int8", "speculation"], MODES))
def test_scores_of_a_rollout_run_the_head_alone_and_are_the_same_bits(ranks, mode):
    ranks.run(check_modes, MODES[mode], mode not in ("int8", "little room"))


def check_family(family: str, dtype: torch.dtype) -> None:
    engines = pair(family, dtype=dtype)
    ids, mask = prompts(3, 35, padded=True, seed=dist.get_rank())
    sequences, attention_mask = rolled_out(engines, ids, mask)
    assert require_same_scores(engines, sequences, attention_mask) == attention_mask.sum() - len(sequences)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "family", slow_but(["gemma3_text", "mixtral"], ["gemma3_text", "mixtral", "gpt2", "bloom", "phi3", "gptj", "opt"])
)
def test_families(ranks, family, dtype):
    ranks.run(check_family, family, dtype)


def check_adapters() -> None:
    engines = pair(adapters="peft")
    ids, mask = prompts(2, 40, padded=False)
    sequences = rolled_out(engines, ids, mask)
    assert require_same_scores(engines, *sequences, adapters=False) == 0
    assert require_same_scores(engines, *sequences) > 0


def test_scores_without_adapters_do_not_take_the_outputs_with_adapters(ranks):
    ranks.run(check_adapters)


def test_hidden_states_without_prefix_caching_are_refused():
    with pytest.raises(ValueError, match="cache_hidden_states: true given with enable_prefix_caching: false"):
        hybrid.config.RolloutConfig(cache_hidden_states=True, enable_prefix_caching=False)
