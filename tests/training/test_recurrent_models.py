"""Engines of models with recurrent layers: rollouts and scores run fused, and what does not says why."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hybrid
from hybrid import EnvironmentLimits, Observation, SamplingParams, StopAfter
from hybrid.decoders.batch import BLOCK_SIZE
from hybrid.kernels.cpu_library import cpu_library
from tests.engines import engine_of, require_matches_hugging_face, require_same_rollouts, settings, train_step
from tests.marks import slow_but
from tests.tiny_models import ADAPTERS, VOCABULARY, prompts, tiny_model, twin
from tests.training.test_prefix_caching import cached, second_turn

FAMILY, MAMBA, SHORT = "qwen3_5_text", "nemotron_h", "lfm2"
ALONE = "mamba2"  # no keys and values
ENDS = tuple(range(2, VOCABULARY, 12))
SAMPLING = SamplingParams(max_new_tokens=40, temperature=0.9, seed=7, stop_token_ids=ENDS)
SLICED = {"enabled": True, "inference_tp_size": 2}
FIELDS = ("completion_ids", "completion_mask", "sampling_per_token_logps", "raw_per_token_logps")
SLOT_BYTES = {  # float32, of 3, 2, 3 and 3 layers; with vectors of 16
    FAMILY: 3 * 4 * (4 * 8 * 16 + 3 * (2 * 2 * 8 + 4 * 6)),
    MAMBA: 2 * 4 * (6 * 10 * 16 + 3 * (6 * 6 + 2 * 2 * 10)),
    SHORT: 3 * 4 * 2 * 32,
    ALONE: 3 * 4 * (8 * 10 * 16 + 3 * (8 * 8 + 2 * 2 * 10)),
}


def engine(adapter: str = "none", family: str = FAMILY, **blocks: Any) -> hybrid.HybridEngine:
    return engine_of(ADAPTERS[adapter](tiny_model(family)), settings(3, **blocks))


def require_fused(engine: hybrid.HybridEngine) -> None:
    rows = engine.coverage()
    assert {row["container"] for row in rows} == {"fused"}
    assert all("a prefix cache of kept states" in row["why"] for row in rows), rows


def require_equal(actual: hybrid.RolloutBatch, expected: hybrid.RolloutBatch) -> None:
    for name in FIELDS:
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name


def completions(batch: hybrid.RolloutBatch) -> list[torch.Tensor]:
    """Each row's tokens, without padding."""
    return [ids[mask.bool()] for ids, mask in zip(batch.completion_ids, batch.completion_mask, strict=True)]


def check_tokens(adapter: str, blocks: dict, family: str = FAMILY) -> None:
    model = ADAPTERS[adapter](tiny_model(family))
    reference = twin(model)
    engine = engine_of(model, settings(3, **blocks))
    require_matches_hugging_face(engine, reference, tolerance=1e-3)
    require_fused(engine)
    assert engine.stats()["fallback_reason"] == "", "`generate()` or a forward ran in the model's own layers"


MODES = {
    "whole": ("none", {}),
    "merged": ("peft", {}),
    "unmerged": ("chat", {"rollout": {"lora": "unmerged"}}),
    "streamed": ("none", {"hybrid_engine": {"enabled": True, "pin_parameters": False}}),
    "sliced": ("none", {"hybrid_engine": SLICED}),
    "sliced, unmerged": ("chat", {"hybrid_engine": SLICED, "rollout": {"lora": "unmerged"}}),
}


@pytest.mark.parametrize("mode", slow_but(["merged", "unmerged", "sliced, unmerged"], MODES))
def test_tokens_match_hugging_face(ranks, mode):
    ranks.run(check_tokens, *MODES[mode])


OTHERS = ["qwen3_next", "qwen3_5_moe_text", MAMBA, "bamba", "granitemoehybrid", SHORT, "lfm2_moe", ALONE]
OTHERS += ["olmo_hybrid", "kimi_linear", "falcon_h1", "lfm3"]


@pytest.mark.parametrize(
    "family", slow_but(["qwen3_next", MAMBA, "lfm2_moe", ALONE, "kimi_linear", "falcon_h1"], OTHERS)
)
def test_other_families_match_hugging_face(ranks, family):
    ranks.run(check_tokens, "peft", {}, family)


@pytest.mark.parametrize("mode", slow_but(["unmerged", "sliced"], MODES))
@pytest.mark.parametrize("family", [MAMBA, SHORT])
def test_every_mode_matches_hugging_face(ranks, family, mode):
    ranks.run(check_tokens, *MODES[mode], family)


def check_forwards() -> None:
    """Forwards in eval mode run fused, padded on either side."""
    model = tiny_model(FAMILY)
    reference, ids = twin(model), torch.randint(3, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, 15:] = 0, 0
    fused = engine_of(model, settings(3))
    fused.eval()
    logits = fused(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert fused.stats()["fallback_reason"] == ""
    with torch.no_grad():
        for row, kept, actual in zip(ids, mask.bool(), logits, strict=True):
            expected = reference(row[kept][None]).logits[0]
            torch.testing.assert_close(actual[kept], expected, atol=1e-3, rtol=1e-4)


def test_forwards_match_hugging_face(ranks):
    ranks.run(check_forwards)


def check_streams(family: str) -> None:
    """Also that a step of ZeRO-3 is seen, in a snapshot and in a stream."""
    streamed = engine("peft", family, hybrid_engine={"enabled": True, "pin_parameters": False})
    require_same_rollouts(engine("peft", family), streamed, 37, True, tolerance=0)


@pytest.mark.parametrize("family", slow_but([MAMBA], [FAMILY, MAMBA, SHORT, ALONE]))
def test_streamed_rollouts_are_bit_identical(ranks, family):
    ranks.run(check_streams, family)


def check_rows(family: str) -> None:
    """A row's bits do not depend on other rows: few or many at once, rows that leave and join, prompts that
    are prefilled once for a group or again, a limit of memory. Scores give a rollout's logprobs again."""
    rank = dist.get_rank()
    ids, mask = prompts(4, 33 + 3 * rank, padded=True, seed=rank)
    whole = engine(family=family)
    expected = whole.rollout(ids, mask, SAMPLING, num_generations=3)
    assert whole.stats()["prefilled_tokens"] == int(mask.sum())
    lengths = expected.completion_mask.sum(dim=1)
    assert len(lengths.unique()) > 3, "all rows end together: the test is vacuous"
    scores = whole.score(expected.sequences, expected.attention_mask, temperature=0.9)
    width = expected.completion_ids.shape[1]
    scored = scores.per_token_logps[:, -width:] * expected.completion_mask
    assert torch.equal(scored, expected.old_per_token_logps)
    few = engine(family=family, rollout={"max_num_seqs": 2, "prefix_cache_bytes": 2**20})
    require_equal(few.rollout(ids, mask, SAMPLING, num_generations=3), expected)
    assert 2**19 < few.stats()["kv_bytes"] < 2**21, "memory for blocks and states of prefixes, and for few rows"
    # In float32; LFM2's blocks hold keys of 2 heads of 8 elements, and values in whole vectors.
    blocks = 5 * 2 * 4 * BLOCK_SIZE * (8 + max(8, cpu_library().lanes())) if family == SHORT else 20 * 2**10
    limit = 6 * SLOT_BYTES[family] + blocks
    room = engine(family=family, rollout={"kv_cache_bytes": limit})
    require_equal(room.rollout(ids, mask, SAMPLING, num_generations=3), expected)
    assert room.stats()["kv_bytes"] <= limit
    again = room.score(expected.sequences, expected.attention_mask, temperature=0.9)
    assert torch.equal(again.per_token_logps, scores.per_token_logps)
    one = whole.rollout(ids[1:2], mask[1:2], replace(SAMPLING, temperature=0), num_generations=1)
    every = whole.rollout(ids, mask, replace(SAMPLING, temperature=0), num_generations=1)
    kept = one.completion_mask[0].bool()
    assert torch.equal(one.completion_ids[0][kept], every.completion_ids[1][: len(kept)][kept])
    rows = {}
    for batch in whole.rollout_iter(ids, mask, SAMPLING, num_generations=3):
        rows |= {row: batch.completion_ids[at] for at, row in enumerate(batch.row_index.tolist())}
    for row, tokens in enumerate(expected.completion_ids):
        length = int(lengths[row])
        assert torch.equal(rows[row][:length], tokens[:length])


@pytest.mark.parametrize("family", [FAMILY, MAMBA, SHORT, ALONE])
def test_rows_do_not_depend_on_each_other(ranks, family):
    ranks.run(check_rows, family)


def check_parts() -> None:
    """Rows that stop and go on later, and generate() with a processor, which decodes all rows in lockstep."""
    engine_, rank = engine(), dist.get_rank()
    ids, mask = prompts(3, 5 + 3 * rank, padded=True, seed=rank)
    whole = engine_.rollout(ids, mask, SAMPLING, num_generations=3)
    first = engine_.rollout(ids, mask, SAMPLING, num_generations=3, stop_after=StopAfter(rows=3))
    rest = engine_.rollout(None, None, SAMPLING, resume=first.unfinished)
    tokens = dict(zip(first.row_index.tolist(), completions(first), strict=True))
    tokens |= dict(zip(first.unfinished.row_index.tolist(), completions(rest), strict=True))
    assert all(torch.equal(tokens[row], expected) for row, expected in enumerate(completions(whole)))
    request = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    seen = []

    def see(ids, scores):
        seen.append(len(ids))
        return scores

    plain = engine_.generate(ids, **request)
    assert torch.equal(engine_.generate(ids, **request, logits_processor=[see]), plain) and len(seen) > 3


def test_rows_go_on_later_and_in_lockstep(ranks):
    ranks.run(check_parts)


class Turns:
    """Answers each turn with three tokens; a row ends after three turns."""

    def __init__(self) -> None:
        self.turns: dict[int, list[list[int]]] = {}

    def reset(self, row: int, prompt_ids: torch.Tensor) -> None:
        return None

    def step(self, row: int, completion_ids: torch.Tensor) -> Observation:
        turns = self.turns.setdefault(row, [])
        turns.append(completion_ids.tolist())
        return Observation([10 + row, 20 + len(turns), 30], reward=1.0, done=len(turns) == 3)


def check_environment(family: str, max_num_seqs: int) -> None:
    """A turn is the rollout of everything before it, and scores give a row's logprobs again. Its states are those of
    the turn before, with room for all rows of them; with little room some are computed again."""
    ids, mask = prompts(3, 9, padded=True, seed=dist.get_rank())
    sampling = replace(SAMPLING, max_new_tokens=60, stop_token_ids=tuple(range(2, VOCABULARY, 4)))
    limits = EnvironmentLimits(4)
    batches, tokens = [], []
    for caches in (False, True):
        settings_ = {"max_num_seqs": max_num_seqs, "enable_prefix_caching": caches}
        environment, engine_ = Turns(), engine(family=family, rollout=settings_)
        batches.append(engine_.rollout(ids, mask, sampling, environment=environment, environment_limits=limits))
        stats = engine_.stats()
        tokens.append((stats["prefilled_tokens"], stats["cached_tokens"]))
    plain, batch = batches
    require_equal(batch, plain)
    (computed, none), (new, found) = tokens
    assert none == 0 and new + found == computed
    # Of a later turn the last sampled token, and the environment's three.
    later = sum(len(turns) - 1 for turns in environment.turns.values())
    assert new == int(mask.sum()) + 4 * later if max_num_seqs > 2 else found > 0
    assert max(map(len, environment.turns.values())) == 3
    scores = engine_.score(batch.sequences, batch.attention_mask, temperature=0.9)
    width, sampled = batch.completion_ids.shape[1], batch.old_per_token_logps != 0
    assert sampled.sum() == sum(len(turn) for turns in environment.turns.values() for turn in turns)
    assert torch.equal(scores.per_token_logps[:, -width:][sampled], batch.old_per_token_logps[sampled])


@pytest.mark.parametrize("max_num_seqs", [2, 4])
@pytest.mark.parametrize("family", slow_but([FAMILY], [FAMILY, MAMBA, SHORT, ALONE]))
def test_environments_take_turns(ranks, family, max_num_seqs):
    ranks.run(check_environment, family, max_num_seqs)


def check_second_turns() -> None:
    """A call that continues the rows of an earlier one computes what is new; not after a step, nor by an adapter."""
    engine_, plain = (
        engine("peft", rollout={"enable_prefix_caching": on, "lora": "unmerged", "prefix_cache_bytes": 10**6 * on})
        for on in (True, False)
    )
    sampling = replace(SAMPLING, max_new_tokens=12, stop_token_ids=())
    for step in range(2):
        ids, mask = prompts(3, 20, padded=False, seed=dist.get_rank())
        for turn in range(3):
            before = cached(engine_)
            actual, expected = (e.rollout(ids, mask, sampling, num_generations=1) for e in (engine_, plain))
            require_equal(actual, expected)
            found, computed = (after - first for after, first in zip(cached(engine_), before, strict=True))
            assert found + computed == mask.sum()
            assert computed == (12 if turn else 60)  # of a later turn the last sampled token and the three new ones
            without = [e.rollout(ids, mask, sampling, adapters=False) for e in (engine_, plain)]
            require_equal(*without)
            ids, mask = second_turn(actual, seed=turn)
        for e in (engine_, plain):
            train_step(e, seed=step)


def test_a_second_turn_computes_only_what_is_new(ranks):
    ranks.run(check_second_turns)


def beginning_alike(system: torch.Tensor, rows: int, seed: int, every: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts, left padded: each `every`-th begins with `system`, and half of these with more in common."""
    generator = torch.Generator().manual_seed(seed)
    more = torch.randint(6, 97, (BLOCK_SIZE,), generator=generator)
    texts = []
    for row in range(rows):
        own = torch.randint(6, 97, (5 + row,), generator=generator)
        texts.append(torch.cat([*[system] * (row % every == 0), *[more] * (row % (2 * every) == 0), own]))
    width = max(map(len, texts))
    padded = [torch.nn.functional.pad(text, (width - len(text), 0)) for text in texts]
    mask = [torch.nn.functional.pad(torch.ones_like(text), (width - len(text), 0)) for text in texts]
    return torch.stack(padded), torch.stack(mask)


def check_shared_beginnings(adapter: str, family: str, blocks: dict) -> None:
    """A prefix that prompts share is computed once, in this call and in later ones with the same weights. Ranks have
    different rows. Without prefix caching every token is computed, and the results have the same bits."""
    rank, engines = dist.get_rank(), []
    for on in (True, False):
        rollout = {"prefix_cache_bytes": 10**6 * on, "enable_prefix_caching": on}
        rollout = {**blocks.get("rollout", {}), **rollout}
        engines.append(engine(adapter, family, **{**blocks, "rollout": rollout}))
    system = torch.randint(6, 97, (2 * BLOCK_SIZE + 7,), generator=torch.Generator().manual_seed(11))
    for step in range(2):
        for call in range(2):
            ids, mask = beginning_alike(system, 8 if rank == 0 else 3, seed=2 * call + rank)
            before = cached(engines[0])
            batches = [e.rollout(ids, mask, SAMPLING, num_generations=2) for e in engines]
            require_equal(*batches)
            found, computed = (after - first for after, first in zip(cached(engines[0]), before, strict=True))
            # Rows 0, 2, 4, 6 of rank 0 share two blocks, 0 and 4 three; rows 0 and 2 of rank 1 two.
            sharing, tokens = 4 if rank == 0 else 2, mask.sum()
            if "inference_tp_size" in blocks.get("hybrid_engine", {}):  # both ranks' prompts are one batch
                sharing = 6
                dist.all_reduce(tokens)
            spared = (sharing - (call == 0)) * 2 + (sharing > 2)
            assert found + computed == tokens
            assert found == spared * BLOCK_SIZE, (found, call)
        assert engines[1].stats()["cached_tokens"] == 0
        for e in engines:
            train_step(e, seed=step)


@pytest.mark.parametrize("mode", slow_but(["unmerged", "streamed"], MODES))
@pytest.mark.parametrize("family", slow_but([FAMILY], [FAMILY, MAMBA, SHORT, ALONE]))
def test_what_prompts_begin_with_is_computed_once(ranks, family, mode):
    ranks.run(check_shared_beginnings, MODES[mode][0], family, MODES[mode][1])


def check_little_room(max_num_seqs: int) -> None:
    """With slots for few rows, what is shared is kept as long as rows do not need its slot: the tokens are the same."""
    engines = [
        engine(rollout={"max_num_seqs": max_num_seqs, "enable_prefix_caching": on}, family=FAMILY)
        for on in (True, False)
    ]
    system = torch.randint(6, 97, (BLOCK_SIZE + 7,), generator=torch.Generator().manual_seed(11))
    for call, num_generations in enumerate((1, 2, 3)):
        ids, mask = beginning_alike(system, 10, seed=call, every=1)
        batches = [e.rollout(ids, mask, SAMPLING, num_generations=num_generations) for e in engines]
        require_equal(*batches)
        assert engines[0].stats()["cached_tokens"] > 0


@pytest.mark.parametrize("max_num_seqs", [2, 4])
def test_what_prompts_begin_with_is_kept_in_little_room(ranks, max_num_seqs):
    ranks.run(check_little_room, max_num_seqs)


def check_heads_that_ranks_cannot_divide() -> None:
    model = tiny_model(FAMILY, linear_num_key_heads=1)
    message = "inference_tp_size: 2 given; the model's attention heads and its gated delta nets can be shared out by 1"
    with pytest.raises(ValueError, match=message):
        engine_of(model, settings(3, hybrid_engine=SLICED))
    engine_of(model, settings(3, hybrid_engine=SLICED, rollout={"containers": "native"})).destroy()
    alone = tiny_model(ALONE, n_groups=1, num_heads=1, head_dim=64)
    with pytest.raises(ValueError, match="2 given; the model's Mamba 2 mixers can be shared out by 1$"):
        engine_of(alone, settings(3, hybrid_engine=SLICED))


def test_heads_that_ranks_cannot_divide_are_refused(ranks):
    ranks.run(check_heads_that_ranks_cannot_divide)


def check_slices(family: str, adapter: str, stage: int) -> None:
    """Rollouts and scores are those of whole mixers within rounding, before and after a step; ranks have rows of their
    own."""
    blocks = {} if adapter != "chat" else {"rollout": {"lora": "unmerged"}}
    models = [ADAPTERS[adapter](tiny_model(family)) for _ in range(2)]
    whole = engine_of(models[0], settings(stage, **blocks))
    sliced = engine_of(models[1], settings(stage, **blocks, hybrid_engine=SLICED))
    require_same_rollouts(whole, sliced, 37, adapter != "none", tolerance=2e-5)
    require_fused(sliced)
    assert all("sharded over 2 ranks" in row["why"] for row in sliced.coverage())


@pytest.mark.parametrize("adapter", slow_but(["peft"], ADAPTERS))
@pytest.mark.parametrize("family", slow_but([FAMILY, "granitemoehybrid", "falcon_h1"], [FAMILY, *OTHERS]))
def test_slices_roll_out_as_whole_mixers_do(ranks, family, adapter):
    ranks.run(check_slices, family, adapter, 3)


@pytest.mark.parametrize("family", slow_but(["kimi_linear"], [FAMILY, MAMBA, "kimi_linear", SHORT]))
def test_slices_of_weights_that_are_read_in_place(ranks, family):
    """At ZeRO 0, also of matrices that every rank keeps whole."""
    ranks.run(check_slices, family, "peft", 0)


def check_training_forwards(family: str, blocks: dict) -> None:
    """Packed rows have the model's logprobs within rounding, exact ones the rollout's bits."""
    engine_ = engine(family=family, **blocks)
    ids, mask = prompts(2, 7, padded=True, seed=dist.get_rank())
    batch = engine_.rollout(ids, mask, SAMPLING)
    model, packed, exact = (
        engine_.logps(batch, temperature=0.9, forward=forward).per_token_logps
        for forward in ("model", "packed", "exact")
    )
    assert not [row for row in engine_.coverage() if row["kind"] == "training forward"]
    torch.testing.assert_close(packed, model, atol=2e-5, rtol=0)
    assert torch.equal(exact, batch.old_per_token_logps)
    train_step(engine_)


@pytest.mark.parametrize("mode", slow_but(["whole"], ["whole", "sliced"]))
@pytest.mark.parametrize("family", [FAMILY, MAMBA, SHORT, ALONE])
def test_logprobs_with_gradients_are_packed_and_exact(ranks, family, mode):
    ranks.run(check_training_forwards, family, MODES[mode][1])
