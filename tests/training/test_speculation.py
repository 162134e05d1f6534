"""Rollouts that verify drafts give the tokens, logprobs and ends of rollouts that do not: to the bit on CPUs.

The oracle is the engine without `rollout.speculation`. Drafts are forced where measurements would decide: every row
drafts in every call. The second rollout has the seed of the first one, so that drafts from the history are right; the
third one has another, so that most are wrong.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import hybrid
from hybrid import EnvironmentLimits, SamplingParams, StopAfter
from hybrid.config import RolloutConfig, SpeculationConfig, read_block
from hybrid.decoders.drafts import StateCopies
from hybrid.decoders.selection import TORCH
from hybrid.generation.model_runner import COPIED_STATES
from hybrid.generation.speculation import PROBE_SHARE, Pace, RolloutHistory, Speculation, key_of
from hybrid.kernels.cpu_library import cpu_library
from tests.engines import engine_of, settings, train_step
from tests.marks import slow_but
from tests.tiny_models import ADAPTERS, RECURRENT, VOCABULARY, prompts, tiny_model
from tests.training.test_environments import Echo

pytestmark = pytest.mark.skipif(cpu_library() is None, reason="no C++ compiler here")
ENDS = tuple(range(2, VOCABULARY, 12))
SAMPLING = SamplingParams(max_new_tokens=40, temperature=0.9, seed=7, stop_token_ids=ENDS)
NAMES = ("completion_ids", "completion_mask", *(f"{kind}_per_token_logps" for kind in ("sampling", "old", "raw")))

SAMPLINGS = {
    "greedy": {"temperature": 0},
    "truncated": {"top_k": 20, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.3, "min_new_tokens": 9},
    "never stops": {"stop_token_ids": (), "max_new_tokens": 70},
}
MODES = {
    "one rank": {},
    "few at once": {"rollout": {"max_num_seqs": 2}},
    "tensor parallel": {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}},
    "streamed": {"hybrid_engine": {"enabled": True, "pin_parameters": False}},
    "int8": {"rollout": {"weight_dtype": "int8"}},
    "prefix cache": {"rollout": {"prefix_cache_bytes": 10**6}},
    "little room": {"rollout": {"kv_cache_bytes": 9 * 32 * 3 * 2 * 2 * 8 * 4}},  # 9 blocks: of float32, 3 layers
}


@contextlib.contextmanager
def forced() -> Iterator[None]:
    """Inside the block every call of a decoder verifies drafts of every row, in as many steps as it may have."""

    def plan(self, rows, counts):
        return self.drafting(rows, counts, self.settings.max_draft)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speculation, "plan", plan)
        patch.setattr(Speculation, "max_steps", lambda self, num_rows, limit: limit)
        yield


def speculating(blocks: dict, **changes) -> dict:
    """The blocks with speculation in addition."""
    return {**blocks, "rollout": {**blocks.get("rollout", {}), "speculation": {"max_draft": 5, **changes}}}


def require_equal(actual: hybrid.RolloutBatch, expected: hybrid.RolloutBatch) -> None:
    for name in NAMES:
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    assert actual.finish_reason == expected.finish_reason
    if expected.router_indices is not None:
        assert torch.equal(actual.router_indices, expected.router_indices)


def engines(blocks: dict, model=tiny_model, family: str = "llama", **changes) -> tuple:
    """An engine that speculates, and one that does not, over equal weights."""
    return tuple(engine_of(model(family), settings(3, **own)) for own in (speculating(blocks, **changes), blocks))


def check_rollouts(blocks: dict, sampling: SamplingParams, family: str = "llama", model=tiny_model) -> None:
    """Ranks differ in rows, lengths and padding; groups of three; before and after a step."""
    rank = dist.get_rank()
    engine, plain = engines(blocks, model, family)
    ids, mask = prompts(2 + rank, 20 + 4 * rank, padded=True, seed=rank)
    ids[:, -6:] = ids[:, -12:-6]  # an n-gram to look up
    generations = 1 if sampling.temperature == 0 else 3
    for step in range(2):
        for seed in (7, 7, 8):
            request = replace(sampling, seed=seed)
            with forced():
                actual = engine.rollout(ids, mask, request, num_generations=generations)
            require_equal(actual, plain.rollout(ids, mask, request, num_generations=generations))
        stats, without = engine.stats(), plain.stats()
        if sampling.repetition_penalty == 1.0:
            assert 0 < stats["accepted_tokens"] <= stats["drafted_tokens"] and stats["saved_steps"] > 3, stats
        else:
            assert stats["drafted_tokens"] == 0, "draws that depend on the tokens before them are not drafted"
        assert stats["tokens"] == without["tokens"]
        assert without["drafted_tokens"] == without["accepted_tokens"] == without["saved_steps"] == 0
        for each in (engine, plain):
            each.train()
            train_step(each, seed=step)


@pytest.mark.parametrize("mode", slow_but(["few at once", "tensor parallel"], MODES))
def test_every_way_to_decode(ranks, mode):
    ranks.run(check_rollouts, MODES[mode], SAMPLING)


@pytest.mark.parametrize("sampling", slow_but(["greedy", "penalties"], SAMPLINGS))
@pytest.mark.parametrize("mode", slow_but(["one rank"], ["one rank", "tensor parallel", "streamed"]))
def test_every_way_to_sample(ranks, mode, sampling):
    ranks.run(check_rollouts, MODES[mode], replace(SAMPLING, **SAMPLINGS[sampling]))


def adapted(family: str) -> torch.nn.Module:
    return ADAPTERS["peft"](tiny_model(family))


@pytest.mark.parametrize(
    ("lora", "family"),
    slow_but([("unmerged", "llama")], [("merged", "llama"), ("unmerged", "llama"), ("unmerged", "qwen3_5_text")]),
)
def test_adapters(ranks, lora, family):
    ranks.run(check_rollouts, {"rollout": {"lora": lora}}, SAMPLING, family, adapted)


@pytest.mark.parametrize("mode", slow_but(["one rank"], ["one rank", "tensor parallel", "streamed"]))
def test_a_mixture_of_experts_and_its_routers_choices(ranks, mode):
    blocks = {**MODES[mode], "rollout": {"return_router_indices": True, "max_num_seqs": 4}}
    ranks.run(check_rollouts, blocks, SAMPLING, "mixtral")


def check_recurrent_states(family: str, blocks: dict) -> None:
    """A refused draft leaves no trace in a row's states."""
    check_rollouts(blocks, SAMPLING, family)
    engine, plain = engines(blocks, family=family, ngram=1)  # a token that has come before is a match
    ids, mask = prompts(6, 20, padded=True)
    limits = torch.tensor([9, 40, 12, 40, 10, 39])
    refused: list[int] = []
    settle = StateCopies.settle

    def counted(self, runs, counts):
        refused.extend(count for count in counts if count)
        settle(self, runs, counts)

    with pytest.MonkeyPatch.context() as patch, forced():
        patch.setattr(StateCopies, "settle", counted)
        for seed in (7, 7, 8):
            request = replace(SAMPLING, seed=seed, stop_token_ids=())
            require_equal(*(each.rollout(ids, mask, request, max_new_tokens=limits) for each in (engine, plain)))
    assert len(refused) > 3 and max(refused) > 1, refused
    slots, without = (each._generator.block_pool.num_slots for each in (engine, plain))
    assert 0 < slots - without <= COPIED_STATES, "the storage of states has grown during a call"


RECURRENT_MODES = {
    **{name: MODES[name] for name in ("one rank", "tensor parallel", "streamed", "int8")},
    "few at once": {"rollout": {"max_num_seqs": 5}},
    "prefix caching": {"rollout": {"enable_prefix_caching": True}},
}


@pytest.mark.parametrize("mode", slow_but(["tensor parallel"], RECURRENT_MODES))
@pytest.mark.parametrize("family", slow_but(["qwen3_5_text"], ["qwen3_5_text", "falcon_h1", "mamba2"]))
def test_recurrent_states(ranks, family, mode):
    ranks.run(check_recurrent_states, family, RECURRENT_MODES[mode])


@pytest.mark.parametrize("family", slow_but(["lfm2"], sorted(RECURRENT)))
def test_every_recurrent_family(ranks, family):
    ranks.run(check_recurrent_states, family, {})


class Rewriting(Echo):
    """Echo whose second observation rewrites the history in every third row."""

    def step(self, row: int, completion_ids: torch.Tensor) -> hybrid.Observation:
        observation = super().step(row, completion_ids)
        rewrites = row % 3 == 0 and len(self.seen[row]) == 1
        return replace(observation, ids=[], prompt_ids=[50, 51, 52, 10 + row]) if rewrites else observation


def check_environments(blocks: dict, family: str = "llama") -> None:
    """Turns with observations, forks, and limits of turns."""
    rank = dist.get_rank()
    engine, plain = engines(blocks, family=family)
    ids, mask = prompts(2 + rank, 5 + 3 * rank, padded=True, seed=rank)
    more = {"num_generations": 2, "environment_limits": EnvironmentLimits(max_turn_tokens=11)}
    for seed in (7, 7, 8):
        request = replace(SAMPLING, seed=seed)
        with forced():
            actual = engine.rollout(ids, mask, request, environment=Rewriting(), **more)
        expected = plain.rollout(ids, mask, request, environment=Rewriting(), **more)
        assert len(expected.finish_reason) > 2 * len(ids), "no history was rewritten: the test is vacuous"
        require_equal(actual, expected)
    assert engine.stats()["accepted_tokens"] > (20 if family == "llama" else 5)


@pytest.mark.parametrize("mode", slow_but(["one rank"], ["one rank", "tensor parallel", "streamed"]))
def test_environments(ranks, mode):
    ranks.run(check_environments, MODES[mode])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2"])
def test_environments_of_recurrent_models(ranks, family):
    ranks.run(check_environments, {"rollout": {"enable_prefix_caching": True}}, family)


def check_partial_rollouts(family: str) -> None:
    """Which rows end first is as without speculation; those that go on later draft."""
    engine, plain = engines({}, family=family)
    ids, mask = prompts(3, 9, padded=True)
    for seed in (7, 7):
        request = replace(SAMPLING, seed=seed)
        with forced():
            firsts = [each.rollout(ids, mask, request, 3, stop_after=StopAfter(rows=3)) for each in (engine, plain)]
            assert engine.stats()["drafted_tokens"] == 0 or seed == 7
            rests = [
                each.rollout(None, None, request, resume=first.unfinished)
                for each, first in zip((engine, plain), firsts, strict=True)
            ]
        for actual, expected in (firsts, rests):
            require_equal(actual, expected)
    assert engine.stats()["accepted_tokens"] > 20


@pytest.mark.parametrize("family", slow_but(["llama"], ["llama", "qwen3_5_text"]))
def test_partial_rollouts(ranks, family):
    ranks.run(check_partial_rollouts, family)


def check_generate() -> None:
    """`generate()`, also with timed forwards and a processor of the user's, which drafts never reach."""
    model = tiny_model("llama")
    seen: list[int] = []

    class Processor:
        rowwise = True

        def __call__(self, ids, scores):
            seen.append(ids.shape[1])
            return scores

    engine = hybrid.init_inference(
        tiny_model("llama"), dtype=torch.float32, replace_with_kernel_inject=True, speculation={"max_draft": 4}
    )
    plain = hybrid.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
    ids, mask = prompts(3, 12, padded=True)
    request = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": True, "seed": 3}
    counters = engine._generator.profiler.stats
    with forced():
        for more in ({}, {}, {"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}):
            assert torch.equal(engine.generate(ids, **request, **more), plain.generate(ids, **request, **more))
        accepted, drafted = counters()["accepted_tokens"], counters()["drafted_tokens"]
        assert accepted > 50
        own = {"logits_processor": [Processor()]}
        assert torch.equal(engine.generate(ids, **request, **own), plain.generate(ids, **request))
        assert counters()["drafted_tokens"] == drafted and len(seen) >= 40
        engine.profile_model_time()
        engine.generate(ids, **request)
        assert counters()["accepted_tokens"] > accepted
        assert len(engine.model_times()) < 40, "a verification step is one forward"


def test_generate_of_a_frozen_model(ranks):
    ranks.run(check_generate)


def check_other_decoders() -> None:
    """In torch operations sums depend on the batch: tokens are equal, logprobs nearly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybrid.decoders.selection.kernels_for", lambda *args: TORCH)
        engine, plain = engines({})
    ids, mask = prompts(2, 9, padded=True)
    for _ in range(2):
        with forced():
            actual = engine.rollout(ids, mask, SAMPLING, num_generations=2)
        expected = plain.rollout(ids, mask, SAMPLING, num_generations=2)
        assert torch.equal(actual.completion_ids, expected.completion_ids)
        torch.testing.assert_close(actual.raw_per_token_logps, expected.raw_per_token_logps, rtol=0, atol=1e-5)
    assert engine.stats()["accepted_tokens"] > 10


def test_the_decoder_in_torch_operations(ranks):
    ranks.run(check_other_decoders)


def check_controller() -> None:
    """Without being forced: drafts are verified where a copied text makes them pay, and the tokens are the same."""
    engine, plain = engines({}, max_draft=8)
    request = replace(SAMPLING, max_new_tokens=70, stop_token_ids=(), temperature=0)
    ids, mask = prompts(1, 20, padded=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speculation, "observe", timed_by(lambda tokens: 1e-3))
        for _ in range(4):
            require_equal(engine.rollout(ids, mask, request), plain.rollout(ids, mask, request))
        pays = engine.stats()
        assert pays["accepted_tokens"] > 60 and pays["saved_steps"] > 60, pays
        patch.setattr(Speculation, "observe", timed_by(lambda tokens: 1e-3 * tokens**1.2))
        engine._generator.speculator.forget()
        for _ in range(3):
            before = engine.stats()["drafted_tokens"]
            require_equal(engine.rollout(ids, mask, request), plain.rollout(ids, mask, request))
    assert engine.stats()["drafted_tokens"] - before < 20, "drafts were verified where each token takes a step's time"


OBSERVE = Speculation.observe


def timed_by(seconds_of):
    """`Speculation.observe` as if a step took `seconds_of` the tokens of its forward."""

    def observe(self, rows, steps, verified, seconds):
        tokens = len(rows) + (0 if verified is None else verified.drafted / steps)
        OBSERVE(self, rows, steps, verified, steps * seconds_of(tokens))

    return observe


def decoded(pace: Pace, cost: float, tokens: float, seconds: float) -> float:
    """Decode for `seconds` by 16 plain steps of a second or, as `Speculation` does, 2 or 16 that verify drafts, which
    take `cost` seconds and give `tokens` tokens; returns the share of the time that verification took."""
    passed = verified = 0.0
    while passed < seconds:
        verifies = pace.verifies_next()
        steps = 2 if verifies and not pace.verifies else 16
        took = steps * (cost if verifies else 1.0)
        pace.observe(verifies, took, steps, steps * (tokens if verifies else 1))
        passed, verified = passed + took, verified + took * verifies
    return verified / passed


def test_the_slower_kind_of_steps_takes_a_few_percent_of_the_time():
    pace = Pace()
    assert not pace.verifies_next(), "plain steps come first: there is nothing to compare with"
    assert decoded(pace, 1.8, 1.2, 1e4) < 1.1 * PROBE_SHARE
    assert decoded(pace, 1.8, 1.84, 1e4) < 1.1 * PROBE_SHARE, "2 % is no reason to change"
    assert decoded(pace, 0.5, 1, 1e4) < 1.1 * PROBE_SHARE, "a step that verifies nothing cannot be faster"
    assert decoded(pace, 1.5, 3, 1e4) > 0.9
    assert decoded(pace, 1.5, 3, 1e4) > 1 - 1.1 * PROBE_SHARE
    assert decoded(pace, 1.8, 1.2, 1e4) < 1.2 * PROBE_SHARE, "a loss is seen at once, not at the next probe"


def test_measurements_decide(ranks):
    ranks.run(check_controller)


def check_history() -> None:
    """It has the latest prompts, after a step too, and no more bytes than the setting."""
    engine = engine_of(tiny_model("llama"), settings(3, **speculating({}, history=1024)))
    for seed in range(3):
        ids, mask = prompts(2, 9, padded=False, seed=seed)
        for sample in range(4):
            engine.rollout(ids, mask, replace(SAMPLING, seed=sample, stop_token_ids=()))
        train_step(engine, seed)
        history = engine._generator.speculator.history
        assert history.of(ids[1]) and 400 < history.nbytes <= 1024
    assert not history.of(prompts(2, 9, padded=False, seed=0)[0][0]), "the oldest prompt is still there"


def test_the_history_is_bounded_and_outlives_steps(ranks):
    ranks.run(check_history)


def test_the_history_drops_the_prompt_used_least_recently():
    history, bytes_of_prompt = RolloutHistory(4 * 3 * 8), 4 * 3
    first, second, third = (torch.tensor([number, 5, 6]) for number in range(3))
    history.add(first, torch.arange(3))
    history.add(second, torch.arange(9))
    assert history.nbytes == 2 * bytes_of_prompt + 4 * 12
    assert [len(text) for text in history.of(first)] == [3]  # used: now the second one is the oldest
    history.add(third, torch.arange(6))
    assert history.of(second) == [] and len(history.texts) == 2 and len(history.of(third)[0]) == 6
    history.add(third, torch.arange(20))
    assert len(history.texts) == 1 and [len(text) for text in history.of(third)] == [20]
    assert key_of(third) == key_of(third.int()) and history.nbytes == bytes_of_prompt + 80


WRONG = {
    "a number": ({"speculation": 3}, "rollout.speculation: 3 given; it must be a dictionary"),
    "unknown": ({"speculation": {"drafts": 3}}, "rollout.speculation: unknown key 'drafts'; the nearest known key is"),
    "no draft": ({"speculation": {"max_draft": 0}}, "rollout.speculation.max_draft: 0 given"),
    "long match": ({"speculation": {"ngram": 17}}, "rollout.speculation.ngram: 17 given; .*from 1 to 16"),
    "text": ({"speculation": {"ngram": "yes"}}, "rollout.speculation.ngram: 'yes' given; .*true, false"),
    "few bytes": ({"speculation": {"history": 5}}, "rollout.speculation.history: 5 given; .*at least 1024"),
    "nothing": ({"speculation": {"ngram": False, "history": False}}, "rollout.speculation: .*leave speculation out"),
}


@pytest.mark.parametrize("values, message", WRONG.values(), ids=list(WRONG))
def test_wrong_settings_say_what_is_allowed(values, message):
    with pytest.raises(ValueError, match=message):
        read_block(RolloutConfig, values, "rollout")


def test_settings_by_default_and_in_full():
    assert read_block(RolloutConfig, {}, "rollout").speculation is None
    assert read_block(RolloutConfig, {"speculation": None}, "rollout").speculation is None
    given = read_block(RolloutConfig, {"speculation": {}}, "rollout").speculation
    assert given == SpeculationConfig(ngram=True, history=True, max_draft=8)
    assert (given.least_match, given.history_bytes) == (2, 64 << 20)
    given = read_block(RolloutConfig, {"speculation": {"ngram": 3, "history": False}}, "rollout").speculation
    assert (given.least_match, given.history_bytes) == (3, 0)


def check_refusals() -> None:
    native = {"rollout": {"containers": "native", "speculation": {}}}
    with pytest.raises(ValueError, match="rollout.speculation: given; it needs rollout.containers=fused; leave it out"):
        engine_of(tiny_model("llama"), settings(3, **native))
    with pytest.raises(ValueError, match="speculation: given; it needs replace_with_kernel_inject=true; leave it out"):
        hybrid.init_inference(tiny_model("llama"), dtype=torch.float32, speculation={})


def test_models_without_a_decoder_refuse(ranks):
    ranks.run(check_refusals)
