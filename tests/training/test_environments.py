"""Environments of rollouts at the level of tokens: turns, limits and errors of rows, at ZeRO-3 and in tensor parallel.

The oracle plays the same turns one row at a time, each by a rollout of its own over everything that came before.
"""

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hybrid
from hybrid import EnvironmentLimits, Observation, SamplingParams
from hybrid.runtime.parallel import ROWS_PER_RANK
from hybrid.sampling.sampler import stream_keys
from tests.engines import engine_of, settings, train_step
from tests.marks import slow_but
from tests.tiny_models import VOCABULARY, prompts, tiny_model

ENDS = tuple(range(2, VOCABULARY, 5))  # one token in five ends a turn
SAMPLING = SamplingParams(max_new_tokens=40, temperature=0.9, seed=7, stop_token_ids=ENDS)


class Echo:
    """Answers a turn with tokens that depend on the row and on the turn; the row ends after `turns(row)` of them."""

    def __init__(self, delays: bool = False):
        self.seen: dict[int, list[list[int]]] = {}
        self.delays, self.lock = delays, threading.Lock()

    @staticmethod
    def turns(row: int) -> int:
        return 1 + row % 4

    @staticmethod
    def answer(row: int, turn: int) -> list[int]:
        return [10 + row, 20 + turn, 30][: 1 + (row + turn) % 3]

    def reset(self, row: int, prompt_ids: torch.Tensor) -> list[int] | None:
        assert prompt_ids.dtype == torch.int64 and prompt_ids.device.type == "cpu"
        return None if row % 2 else [*prompt_ids.tolist(), 40 + row]

    def step(self, row: int, completion_ids: torch.Tensor) -> Observation:
        if self.delays:
            time.sleep(0.002 * ((7 * row) % 5))
        with self.lock:
            turns = self.seen.setdefault(row, [])
            turns.append(completion_ids.tolist())
            number = len(turns)
        return Observation(self.answer(row, number), reward=float(number), done=number == self.turns(row))


def expected_rows(engine, ids, mask, num_generations: int, rank: int, most: int) -> list[tuple[list[int], list[int]]]:
    """Each row's completion and which of its tokens are sampled, played turn by turn."""
    rows = []
    for row in range(len(ids) * num_generations):
        prompt = ids[row // num_generations][mask[row // num_generations].bool()].tolist()
        prompt = Echo().reset(row, torch.tensor(prompt)) or prompt
        completion, sampled, turn = [], [], 0
        while True:
            done = play(engine, prompt, completion, row, rank, num_generations, most - len(completion))
            completion, sampled, turn = completion + done, sampled + [1] * len(done), turn + 1
            stopped = done[-1] in ENDS or done[-1] in hybrid_ends(engine)
            if not stopped or turn == Echo.turns(row):
                break
            answer = Echo.answer(row, turn)
            if len(completion) + len(answer) >= most:
                break
            completion, sampled = completion + answer, sampled + [0] * len(answer)
        rows.append((completion, sampled))
    return rows


def hybrid_ends(engine) -> list[int]:
    eos = engine.module.generation_config.eos_token_id
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def play(engine, prompt, completion, row: int, rank: int, num_generations: int, room: int) -> list[int]:
    """A turn of one row. The sampling key is the row's; positions count from the completion's begin, as an unfinished
    row that is resumed."""
    prompt_row = torch.tensor([row // num_generations + rank * ROWS_PER_RANK])
    keys = stream_keys(SAMPLING.seed, prompt_row, torch.tensor([row % num_generations]))
    count = len(completion)
    ids = torch.tensor([prompt])
    resumed = hybrid.UnfinishedRows(
        prompt_ids=ids,
        prompt_mask=torch.ones_like(ids),
        completion_ids=torch.tensor([completion], dtype=torch.int64).view(1, count),
        completion_mask=torch.ones(1, count, dtype=torch.int64),
        logps=torch.zeros(3, 1, count),
        weight_versions=torch.zeros(1, count, dtype=torch.int64),
        sampling_keys=keys,
        limits=torch.tensor([count + room]),
        groups=torch.tensor([0]),
        row_index=torch.tensor([0]),
    )
    batch = engine.rollout(None, None, SAMPLING, resume=resumed)
    return batch.completion_ids[0, count : int(batch.completion_mask.sum())].tolist()


def check_turns(blocks: dict, delays: bool) -> None:
    rank = dist.get_rank()
    engine = engine_of(tiny_model("llama"), settings(3, **blocks))
    plain = engine_of(tiny_model("llama"), settings(3))
    ids, mask = prompts(2 + rank, 5 + 3 * rank, padded=True, seed=rank)  # ranks differ in rows, and so in turns
    environment = Echo(delays)
    batch = engine.rollout(ids, mask, SAMPLING, num_generations=2, environment=environment)
    assert batch.row_index.tolist() == list(range(2 * len(ids)))
    expected = expected_rows(plain, ids, mask, 2, rank, SAMPLING.max_new_tokens)
    turns = []
    for row, (completion, sampled) in enumerate(expected):
        length = len(completion)
        assert batch.completion_ids[row, :length].tolist() == completion, row
        assert batch.completion_mask[row].tolist() == sampled + [0] * (batch.completion_mask.shape[1] - length)
        present = batch.completion_mask[row] + batch.observation_mask[row]
        assert present.tolist() == [1] * length + [0] * (len(present) - length)
        assert int(batch.attention_mask[row].sum()) == length + int(batch.prompt_mask[row].sum())
        assert batch.turn_rewards[row] == [float(number + 1) for number in range(len(batch.turn_rewards[row]))]
        assert len(batch.turn_seconds[row]) == len(batch.turn_rewards[row])
        own = [
            batch.completion_ids[row][(batch.turn_ids[row] == n) & (batch.completion_mask[row] == 1)].tolist()
            for n in range(len(batch.turn_rewards[row]))
        ]
        assert own == environment.seen.get(row, [])
        turns.append(len(own))
        assert (batch.turn_ids[row][length:] == -1).all()
        reason = "stop" if len(own) == Echo.turns(row) else "length"
        assert batch.finish_reason[row] == reason, (row, batch.finish_reason[row])
    assert max(turns) > 2, turns
    # The logprobs are those of the tokens in their context, and masked elsewhere.
    scores = plain.score(batch.sequences, batch.attention_mask, temperature=0.9).per_token_logps
    width = batch.completion_ids.shape[1]
    torch.testing.assert_close(
        batch.old_per_token_logps, scores[:, -width:] * batch.completion_mask, atol=1e-5, rtol=1e-5
    )
    train_step(engine)


MODES = {
    "one rank": {},
    "tensor parallel": {"hybrid_engine": {"enabled": True, "inference_tp_size": 2}},
    "streamed": {"hybrid_engine": {"enabled": True, "pin_parameters": False}},
    "few at once": {"rollout": {"max_num_seqs": 2}},
    "no caching": {"rollout": {"enable_prefix_caching": False}},
    "native": {"rollout": {"containers": "native", "max_num_seqs": 3}},
    "native, tensor parallel": {"rollout": {"containers": "native"}, "hybrid_engine": {"inference_tp_size": 2}},
    "native, streamed": {"rollout": {"containers": "native"}, "hybrid_engine": {"pin_parameters": False}},
}


@pytest.mark.parametrize("delays", [True])
@pytest.mark.parametrize("mode", slow_but(["one rank", "tensor parallel", "streamed", "few at once", "native"], MODES))
def test_turns_give_the_tokens_of_rows_played_alone(ranks, mode, delays):
    ranks.run(check_turns, MODES[mode], delays)


class Fails(Echo):
    """Raises in the step of row 1, in the reset of row 2, and never answers row 3."""

    def reset(self, row, prompt_ids):
        if row == 2:
            raise RuntimeError("no such task")

    def step(self, row, completion_ids):
        if row == 1:
            raise ValueError("a bad tool")
        if row == 3:
            time.sleep(30)
        return Observation(done=True)


def check_errors() -> None:
    engine = engine_of(tiny_model("llama"), settings(3))
    ids, mask = prompts(5, 5, padded=True)
    limits = EnvironmentLimits(step_timeout_s=3, max_turn_tokens=4)
    batch = engine.rollout(ids, mask, SAMPLING, environment=Fails(), environment_limits=limits)
    assert batch.finish_reason == ["stop", "environment_error", "environment_error", "environment_timeout", "stop"]
    errors = ["", "ValueError: a bad tool", "RuntimeError: no such task", "no answer within 3 s", ""]
    assert batch.errors == errors, batch.errors
    assert batch.completion_mask[2].sum() == 0 and (batch.completion_mask[[0, 1, 3, 4]].sum(dim=1) > 0).all()
    again = engine.rollout(ids, mask, SAMPLING)
    assert (again.completion_mask.sum(dim=1) > 0).all()
    train_step(engine)


def test_an_environment_that_fails_ends_its_row_alone(ranks):
    ranks.run(check_errors)


class Coroutines(Echo):
    async def reset(self, row, prompt_ids):
        return super().reset(row, prompt_ids)

    async def step(self, row, completion_ids):
        return super().step(row, completion_ids)


def check_coroutines() -> None:
    engine = engine_of(tiny_model("llama"), settings(3))
    ids, mask = prompts(4, 5, padded=True)
    plain, waited = (engine.rollout(ids, mask, SAMPLING, environment=kind()) for kind in (Echo, Coroutines))
    assert torch.equal(plain.completion_ids, waited.completion_ids)
    assert plain.finish_reason == waited.finish_reason


def test_coroutines_give_what_functions_give(ranks):
    ranks.run(check_coroutines)


class Endless(Echo):
    def step(self, row, completion_ids):
        self.seen.setdefault(row, []).append(completion_ids.tolist())
        return Observation([5], reward=1.0)


def check_limits() -> None:
    engine = engine_of(tiny_model("llama"), settings(3))
    ids, mask = prompts(3, 5, padded=True)
    few = EnvironmentLimits(max_turns=3, max_turn_tokens=2)
    environment = Endless()
    batch = engine.rollout(ids, mask, SAMPLING, environment=environment, environment_limits=few)
    assert batch.finish_reason == ["turns"] * 3
    assert [len(turns) for turns in environment.seen.values()] == [3] * 3
    assert all(1 <= len(turn) <= 2 for turns in environment.seen.values() for turn in turns)
    short = replace(SAMPLING, max_new_tokens=7)
    batch = engine.rollout(ids, mask, short, environment=Endless())
    assert batch.finish_reason == ["length"] * 3
    assert (batch.completion_mask + batch.observation_mask).sum(dim=1).max() <= 7


def test_limits_of_turns_and_tokens_end_rows(ranks):
    ranks.run(check_limits)


class Rewrites(Echo):
    """After its first turn a row goes on from a shorter history."""

    def step(self, row, completion_ids):
        turns = self.seen.setdefault(row, [])
        turns.append(completion_ids.tolist())
        if len(turns) == 1 and row != 1:
            return Observation(reward=0.5, prompt_ids=[11, 12, 13 + row] * (1 + 4 * row))
        return Observation(reward=1.0, done=True)


def check_forks() -> None:
    engine = engine_of(tiny_model("llama"), settings(3))
    ids, mask = prompts(3, 5, padded=True)
    environment = Rewrites()
    batch = engine.rollout(ids, mask, SAMPLING, environment=environment)
    assert batch.row_index.tolist() == [0, 0, 1, 2, 2], batch.row_index
    assert batch.finish_reason == ["fork", "stop", "stop", "fork", "stop"], batch.finish_reason
    assert batch.turn_rewards == [[0.5], [1.0], [1.0], [0.5], [1.0]]
    own_prompts = [row[keep.bool()].tolist() for row, keep in zip(batch.prompt_ids, batch.prompt_mask, strict=True)]
    given = [Echo().reset(row, ids[row][mask[row].bool()]) or ids[row][mask[row].bool()].tolist() for row in range(3)]
    assert own_prompts == [given[0], [11, 12, 13], given[1], given[2], [11, 12, 15] * 9], own_prompts
    sampled = [row[keep.bool()].tolist() for row, keep in zip(batch.completion_ids, batch.completion_mask, strict=True)]
    assert sampled == [*environment.seen[0], *environment.seen[1], *environment.seen[2]]
    scores = engine.score(batch.sequences, batch.attention_mask, temperature=0.9).per_token_logps
    width = batch.completion_ids.shape[1]
    expected = scores[:, -width:] * batch.completion_mask
    torch.testing.assert_close(batch.old_per_token_logps, expected, atol=1e-5, rtol=1e-5)
    again = engine.rollout(None, None, SAMPLING, resume=before_first_token(batch))
    for name in ("completion_ids", "completion_mask", "sampling_per_token_logps", "sampling_keys"):
        assert torch.equal(getattr(again, name), getattr(batch, name)), name
    assert len(batch.sampling_keys.unique()) == len(sampled), "a fork draws by a key of its own"


def before_first_token(batch: hybrid.RolloutBatch) -> hybrid.UnfinishedRows:
    """Rows of one turn, before they began: with their sampling keys they are drawn again."""
    lengths, rows = batch.completion_mask.sum(dim=1), torch.arange(len(batch.prompt_ids))
    none = torch.zeros(len(rows), 1, dtype=torch.int64)
    return hybrid.UnfinishedRows(
        *(batch.prompt_ids, batch.prompt_mask, none, none),
        logps=torch.zeros(3, *none.shape),
        weight_versions=none,
        sampling_keys=batch.sampling_keys,
        limits=lengths,
        groups=rows,
        row_index=rows,
    )


def test_a_rewritten_history_makes_a_row_of_its_own(ranks):
    ranks.run(check_forks)


class Unusual(BaseException):
    """Not an Exception."""


class Raises(Echo):
    """Rows above 0 fail, each in another way."""

    RESETS: tuple[Any, ...] = ([VOCABULARY + 900], [-1], [5] * 100, asyncio.CancelledError("reset"))
    STEPS: tuple[Any, ...] = (
        asyncio.CancelledError("step"),
        GeneratorExit("step"),
        SystemExit("step"),
        Unusual("step"),
        Observation([5, VOCABULARY]),
        Observation(prompt_ids=[]),
        Observation(prompt_ids=[4, -7]),
    )
    TEXTS = (
        f"gave token ids from {VOCABULARY + 900}",
        "gave token ids from -1",
        "gave a prompt of 100 tokens; at most 24 fit: max_out_tokens minus max_new_tokens",
        "CancelledError: reset",
        "CancelledError: step",
        "GeneratorExit: step",
        "SystemExit: step",
        "Unusual: step",
        f"gave token ids from 5 to {VOCABULARY}; the model's are 0 to {VOCABULARY - 1}",
        "gave no prompt_ids",
        "gave token ids from -7",
    )

    def reset(self, row, prompt_ids):
        return given(self.RESETS[row - 1]) if 1 <= row <= 4 else super().reset(row, prompt_ids)

    def step(self, row, completion_ids):
        return given(self.STEPS[row - 5]) if row > 4 else super().step(row, completion_ids)


class RaisesInCoroutines(Raises):
    async def reset(self, row, prompt_ids):
        return super().reset(row, prompt_ids)

    async def step(self, row, completion_ids):
        return super().step(row, completion_ids)


def given(value: Any) -> Any:
    if isinstance(value, BaseException):
        raise value
    return value


def check_failing_rows(blocks: dict) -> None:
    """Without a time limit each of them ends at once with its reason, and the first row plays on."""
    engine = engine_of(tiny_model("llama"), settings(3, **blocks))
    ids, mask = prompts(1, 5, padded=True)
    one_turn = replace(SAMPLING, stop_token_ids=tuple(range(VOCABULARY)))
    expected = engine.rollout(ids, mask, one_turn, environment=Echo())
    for environment in (Raises(), RaisesInCoroutines()):
        started = time.monotonic()
        batch = engine.rollout(ids, mask, one_turn, num_generations=len(Raises.TEXTS) + 1, environment=environment)
        assert time.monotonic() - started < 20
        assert batch.finish_reason == ["stop"] + ["environment_error"] * len(Raises.TEXTS), batch.finish_reason
        for text, error in zip(Raises.TEXTS, batch.errors[1:], strict=True):
            assert text in error, (text, error)
        width = expected.completion_ids.shape[1]
        assert torch.equal(batch.completion_ids[:1, :width], expected.completion_ids)
    engine.destroy()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_row_whose_environment_fails_in_any_way_ends_alone(ranks, tp_size):
    engine = {"enabled": True, "max_out_tokens": SAMPLING.max_new_tokens + 24, "inference_tp_size": tp_size}
    ranks.run(check_failing_rows, {"hybrid_engine": engine})


def check_forks_with_penalties() -> None:
    """Kernels that sample with penalties, and processors where decoders do not: the same tokens."""
    sampling = replace(SAMPLING, repetition_penalty=1.4, min_new_tokens=4)
    batches = []
    for pinned in (True, False):
        blocks = {"hybrid_engine": {"enabled": True, "pin_parameters": pinned}}
        engine = engine_of(tiny_model("llama"), settings(3, **blocks))
        ids, mask = prompts(3, 5, padded=True)
        batches.append(engine.rollout(ids, mask, sampling, environment=Rewrites()))
        engine.destroy()
    expected, actual = batches
    assert actual.finish_reason == expected.finish_reason and expected.finish_reason[0] == "fork"
    for name in ("prompt_ids", "completion_ids", "completion_mask"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    assert expected.completion_mask.sum(dim=1).min() >= 4


def test_forks_go_on_with_penalties(ranks):
    ranks.run(check_forks_with_penalties)


class CallsItsEngine(Echo):
    def __init__(self, engine):
        super().__init__()
        self.engine = engine

    def step(self, row, completion_ids):
        self.engine.generate(torch.tensor([[5, 6]]), max_new_tokens=2)

    async def reset(self, row, prompt_ids):
        if row == 1:
            self.engine.score(torch.tensor([[5, 6]]), torch.tensor([[1, 1]]))


def check_calls_of_the_own_engine(blocks: dict) -> None:
    engine = engine_of(tiny_model("llama"), settings(3, **blocks))
    ids, mask = prompts(2, 5, padded=True)
    for call in (engine.rollout, lambda *args, **kwargs: whole(engine.rollout_iter(*args, **kwargs))):
        batch = call(ids, mask, SAMPLING, environment=CallsItsEngine(engine))
        assert batch.finish_reason == ["environment_error"] * 2
        assert all("calls the engine whose rollout waits for it" in error for error in batch.errors), batch.errors


def whole(stream):
    for _ in stream:
        pass
    return stream.output()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_environment_that_calls_its_engine_is_refused(ranks, tp_size):
    ranks.run(check_calls_of_the_own_engine, {"hybrid_engine": {"enabled": True, "inference_tp_size": tp_size}})


class Slow(Echo):
    """Row 0's tool takes until all other rows have ended."""

    def __init__(self, rows: int):
        super().__init__()
        self.others, self.all_done = rows - 1, threading.Event()

    def step(self, row, completion_ids):
        if row == 0:
            return Observation([5], done=not self.all_done.wait(20))  # False: the others had to wait for row 0
        self.others -= 1
        if not self.others:
            self.all_done.set()
        return Observation(done=True)


def check_others_decode_on() -> None:
    engine = engine_of(tiny_model("llama"), settings(3, rollout={"max_num_seqs": 2}))
    ids, mask = prompts(5, 5, padded=True)
    limits = EnvironmentLimits(max_turns=2, max_turn_tokens=5)
    batch = engine.rollout(ids, mask, SAMPLING, environment=Slow(5), environment_limits=limits)
    assert batch.turn_ids[0].max() == 1, "row 0 was not continued: the other rows waited for its tool"


def test_the_other_rows_decode_while_a_tool_runs(ranks):
    ranks.run(check_others_decode_on)


def check_wrong_arguments() -> None:
    engine = engine_of(tiny_model("llama"), settings(3))
    ids, mask = prompts(2, 5, padded=True)
    for error, text, call in (
        (TypeError, "int given, which has no method reset", lambda: engine.rollout(ids, mask, SAMPLING, environment=3)),
        (
            TypeError,
            "environment_limits: dict given; it must be a hybrid.EnvironmentLimits",
            lambda: engine.rollout(ids, mask, SAMPLING, environment=Echo(), environment_limits={"max_turns": 2}),
        ),
        (ValueError, "max_turns: 0 given; it must be at least 1", lambda: EnvironmentLimits(max_turns=0)),
        (
            ValueError,
            "environment_limits: given without an environment",
            lambda: engine.rollout(ids, mask, SAMPLING, environment_limits=EnvironmentLimits()),
        ),
        (
            NotImplementedError,
            "stop_after with an environment",
            lambda: engine.rollout(ids, mask, SAMPLING, environment=Echo(), stop_after=hybrid.StopAfter(rows=1)),
        ),
    ):
        with pytest.raises(error, match=text):
            call()
    wrong = engine.rollout(ids, mask, SAMPLING, environment=WrongAnswer())
    assert wrong.errors[0].startswith("TypeError: environment.step gave list; it must give a hybrid.Observation")


class WrongAnswer(Echo):
    def step(self, row, completion_ids):
        return [1, 2]


def test_wrong_arguments_say_what_is_allowed(ranks):
    ranks.run(check_wrong_arguments)
