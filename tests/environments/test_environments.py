"""Tools and environments: TRL's conventions, errors as messages, rewritten histories, limits."""

import asyncio
import json
import re
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from trl import GRPOTrainer
from trl.chat_template_utils import add_response_schema, parse_response

import hybrid
from hybrid.environments.chat_template import encode_text
from tests.rlhf_examples.chat_models import FAMILIES, tokenizer_of
from tests.scripted_rollouts import roll_out

ASK = [{"role": "user", "content": "What is it?"}]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def fail(reason: str) -> str:
    """Fail.

    Args:
        reason: What the error says.
    """
    kinds = {"stop": StopIteration, "exit": SystemExit, "cancel": asyncio.CancelledError, "close": GeneratorExit}
    raise kinds.get(reason, KeyError)(reason)


async def fail_later(reason: str) -> str:
    """Fail, as a coroutine.

    Args:
        reason: What the error says.
    """
    return fail(reason)


def long_text(words: int) -> str:
    """A long text.

    Args:
        words: The number of words.
    """
    return "word " * words


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: The seconds.
    """
    await asyncio.sleep(seconds)
    return f"waited {seconds}"


def sleep(seconds: float) -> str:
    """Wait in the thread.

    Args:
        seconds: The seconds.
    """
    time.sleep(seconds)
    return threading.current_thread().name


def odd_text() -> str:
    """A text that is not Unicode."""
    return "a\ud800b"


TOOLS = [add, fail, fail_later, long_text, wait, sleep, odd_text]


def call_text(name: str, **arguments) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


class Counter:
    """TRL's kind: public methods are tools, `get_reward` is the reward."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.count = None

    def reset(self, prompt, start=0, **example):
        self.count, self.example, self.scored = start, example, 0
        return f" Begin at {start}." if start else None

    def increment(self, by: int) -> int:
        """Count on.

        Args:
            by: By how much.
        """
        self.count += by
        return self.count

    def get_reward(self) -> float:
        self.scored += 1
        return float(self.count)

    def _private(self):
        """Is no tool."""


def scripted(tokenizer, turns_of_rows: list[list[str]]):
    """The turns of each row, with the turn's end token."""
    end = hybrid.turn_end_token(tokenizer)
    return lambda row, turn: [*encode_text(tokenizer, turns_of_rows[row][turn]), end]


def run(turns: list[str], tools=TOOLS, family="qwen2_5", example=None, **settings):
    """One row: (the scripted row, its messages after the prompt, the episodes)."""
    tokenizer = tokenizer_of(family)
    environment = hybrid.MessageEnvironment(tokenizer, tools, **settings)
    episodes = environment.episodes([example or {"prompt": ASK}])
    (row,) = roll_out(episodes, [[0]], scripted(tokenizer, [turns]), max_turns=len(turns))
    return row, episodes.completions[0], episodes


def contents(messages: list[dict], role: str = "tool") -> list[str]:
    return [message["content"] for message in messages if message["role"] == role]


def test_the_tool_loop_is_trls():
    """The oracle is GRPOTrainer's own loop over the same turns: tokens, mask, messages and counts."""
    tokenizer = tokenizer_of("qwen2_5")
    turns = [
        [call_text("add", a=1, b=2), call_text("nothing"), "done"],
        ["at once"],
        [call_text("add", a=1, b=2) + "\n" + call_text("add", a=5, b=6), "two"],
        [call_text("add", a=1, b=2)] * 4,
    ]
    script = scripted(tokenizer, turns)
    environment = hybrid.MessageEnvironment(tokenizer, [add], max_tool_calling_iterations=2)
    episodes = environment.episodes([{"prompt": ASK}] * 4)
    rows = roll_out(episodes, [[0]] * 4, script)

    prompt_ids = tokenizer.apply_chat_template(ASK, tools=[add], add_generation_prompt=True, return_dict=False)
    later = {row: iter(range(1, 9)) for row in range(4)}
    trainer = SimpleNamespace(
        processing_class=add_response_schema(tokenizer), _tokenizer=tokenizer, _is_vlm=False, chat_template=None,
        chat_template_kwargs={}, max_tool_calling_iterations=2, use_vllm=False, max_completion_length=10**6,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10**6)), tools=[add],
        environment_factories=None, _sync_tool_dicts=[{"add": add}] * 4, _async_tool_dicts=[{}] * 4,
    )  # fmt: skip
    first = [script(row, 0) for row in range(4)]
    completions = [[parse_response(tokenizer, ids, prefix=prompt_ids, tools=[add])] for ids in first]
    calls = {row: sum("<tool_call>" in text for text in turns[row]) for row in range(4)}
    rounds = iter([[row for row in range(4) if calls[row] > number] for number in range(3)])

    def generate_turn(prompts, *_, **__):
        return [script(row, next(later[row])) for row in next(rounds)], None

    trainer._generate_single_turn = generate_turn
    trainer._get_tool_suffix_ids = lambda messages: GRPOTrainer._get_tool_suffix_ids(trainer, messages)
    mask, messages, ids, _, count, failures, _ = GRPOTrainer._tool_call_loop(
        trainer, [list(ASK) for _ in range(4)], [prompt_ids] * 4, first, completions, None, None, {}
    )
    for row, expected_ids, expected_mask in zip(rows, ids, mask, strict=True):
        assert row.training[0].prompt_ids == prompt_ids
        assert (row.training[0].completion_ids, row.training[0].mask) == (expected_ids, expected_mask)
        assert row.finish_reason == "done"
    assert episodes.completions == messages
    assert episodes.metrics()["tools/call_frequency"] * 4 == count
    assert episodes.metrics()["tools/failure_frequency"] * count == failures


def test_an_environment_of_trl():
    tokenizer = tokenizer_of("qwen2_5")
    made = Counter.made
    environment = hybrid.MessageEnvironment(tokenizer, [add], Counter)
    for _ in range(2):  # objects are reused
        examples = [{"prompt": ASK, "start": 0, "level": 3}, {"prompt": ASK, "start": 7}]
        episodes = environment.episodes(examples, num_generations=2)
        turns = [[call_text("increment", by=row), call_text("increment", by=10), "end"] for row in range(4)]
        rows = roll_out(episodes, [[0], [0]], scripted(tokenizer, turns), num_generations=2, max_turns=3)
        assert [row.finish_reason for row in rows] == ["done"] * 4
        assert [row.rewards for row in rows] == [[None, None, 10 + row + 7 * (row > 1)] for row in range(4)]
        assert episodes.rewards() == [10, 11, 19, 20]
        assert [one.scored for one in episodes.environments] == [1] * 4
        assert episodes.environments[0].example == {"level": 3}
    assert Counter.made - made == 4
    template = {"tools": [add, Counter().increment], "add_generation_prompt": True, "return_dict": False}
    for row, text in ((rows[0], ""), (rows[2], " Begin at 7.")):
        prompt = [{"role": "user", "content": ASK[0]["content"] + text}]
        assert row.training[0].prompt_ids == tokenizer.apply_chat_template(prompt, **template)
    assert examples[1]["prompt"] == ASK == [{"role": "user", "content": "What is it?"}]
    ids, mask = episodes.prompts()
    assert ids.dtype == mask.dtype == torch.int64 and ids.shape == mask.shape
    assert ids[1][mask[1].bool()].tolist() == tokenizer.apply_chat_template(ASK, **template)


def test_a_row_that_a_limit_ends_has_its_reward():
    tokenizer = tokenizer_of("qwen2_5")
    episodes = hybrid.MessageEnvironment(tokenizer, [], Counter).episodes([{"prompt": ASK}] * 2)
    turns = [[call_text("increment", by=5), call_text("increment", by=5)], ["end"]]
    rows = roll_out(episodes, [[0]] * 2, scripted(tokenizer, turns), max_turns=2)
    assert [row.finish_reason for row in rows] == ["turns", "done"]
    assert episodes.rewards() == [10.0, 0.0]


def test_environments_by_name():
    class Other:
        def reset(self, **example):
            assert "environment" not in example
            return "!"

        def shout(self) -> str:
            """Shout."""
            return "HEY"

    tokenizer = tokenizer_of("qwen2_5")
    environment = hybrid.MessageEnvironment(tokenizer, [], {"count": Counter, "other": Other})
    examples = [{"prompt": ASK, "environment": "other"}, {"prompt": ASK, "environment": "count"}]
    episodes = environment.episodes(examples)
    turns = [[call_text("shout"), call_text("increment", by=1), "x"], [call_text("shout"), "x"]]
    rows = roll_out(episodes, [[0]] * 2, scripted(tokenizer, turns))
    assert contents(episodes.completions[0]) == ["HEY", "{'error': 'Tool increment not found.'}"]
    assert contents(episodes.completions[1]) == ["{'error': 'Tool shout not found.'}"]
    assert "increment" not in tokenizer.decode(rows[0].training[0].prompt_ids)
    assert episodes.rewards() == [None, 0.0]
    with pytest.raises(ValueError, match=r"environment: None given; it must be one of \['count', 'other'\]"):
        environment.episodes([{"prompt": ASK}])


ERRORS = {
    call_text("fail", reason="no"): "{'error': \"KeyError: 'no'\"}",
    call_text("fail", reason="stop"): "{'error': 'RuntimeError: coroutine raised StopIteration'}",
    call_text("fail", reason="exit"): "{'error': 'RuntimeError: SystemExit: exit'}",
    call_text("fail", reason="cancel"): "{'error': 'RuntimeError: CancelledError: cancel'}",
    call_text("fail_later", reason="cancel"): "{'error': 'RuntimeError: CancelledError: cancel'}",
    call_text("fail_later", reason="close"): "{'error': 'RuntimeError: GeneratorExit: close'}",
    call_text("add", a=1): "{'error': \"TypeError: add() missing 1 required positional argument: 'b'\"}",
    call_text("wait", seconds=60): "{'error': 'TimeoutError: no result within 0.2 s'}",
    call_text("sleep", seconds=2): "{'error': 'TimeoutError: no result within 0.2 s'}",
    call_text("odd_text"): "a?b",
}


@pytest.mark.parametrize("text", ERRORS, ids=range(len(ERRORS)))
def test_a_tool_that_fails_answers_with_an_error(text):
    row, messages, episodes = run([text, "end"], tool_timeout_s=0.2)
    assert contents(messages) == [ERRORS[text]] and row.finish_reason == "done"
    assert episodes.metrics()["tools/failure_frequency"] == float("error" in ERRORS[text])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen2_5", '<tool_call>\n{"name": "add", "argu</tool_call>'),
        ("llama3_1", '{"name": "add", "parameters": {1}}'),
    ],
)
def test_a_malformed_call_is_answered_with_an_error(family, text):
    row, (turn, error, _), _ = run([text, "end"], family=family)
    assert row.finish_reason == "done" and turn == {"role": "assistant", "content": text}
    assert error["role"] == "tool" and "ValueError: json parser could not parse region" in error["content"]


def test_calls_that_the_template_cannot_render_are_answered_with_an_error():
    """Llama 3.1's template raises for two calls in a turn."""
    text = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
    closing = FAMILIES["llama3_1"][1]
    _, messages, _ = run([text + closing + text, "end"], family="llama3_1")
    assert "single tool-calls" in contents(messages)[0]


def test_the_message_of_a_template_that_takes_no_tool_message_is_the_users():
    tokenizer = tokenizer_of("qwen2_5")
    needs_call = "{%- if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{%- endif %}"
    marker = '{%- elif message.role == "tool" %}'
    tokenizer.chat_template = tokenizer.chat_template.replace(marker, marker + needs_call)
    environment = hybrid.MessageEnvironment(tokenizer, [add])
    episodes = environment.episodes([{"prompt": ASK}])
    roll_out(episodes, [[0]], scripted(tokenizer, [["<tool_call>x</tool_call>", call_text("add", a=1, b=1), "end"]]))
    assert [message["role"] for message in episodes.completions[0]] == [
        "assistant", "user", "assistant", "tool", "assistant"
    ]  # fmt: skip


def test_functions_run_in_order_and_coroutines_together():
    calls = [call_text("wait", seconds=0.5), call_text("add", a=1, b=1), call_text("wait", seconds=0.4)]
    began = time.monotonic()
    _, messages, _ = run(["\n".join(calls), "end"])
    assert contents(messages) == ["waited 0.5", "2", "waited 0.4"]
    assert time.monotonic() - began < 0.85


def test_rows_do_not_wait_for_each_other():
    tokenizer = tokenizer_of("qwen2_5")
    environment = hybrid.MessageEnvironment(tokenizer, TOOLS)
    episodes = environment.episodes([{"prompt": ASK}] * 40)
    began = time.monotonic()
    turns = [[call_text("sleep", seconds=0.5), "end"]] * 40
    roll_out(episodes, [[0]] * 40, scripted(tokenizer, turns))
    assert time.monotonic() - began < 5  # 20 s one after the other


class Broken(Counter):
    """Raises where an example says so."""

    def reset(self, where="", **example):
        self.where = where
        if where == "reset":
            raise OSError("no connection")
        return super().reset(**example)

    def get_reward(self):
        if self.where == "get_reward":
            raise OSError("no connection")
        return super().get_reward()


def test_an_environment_that_raises_ends_its_row_only():
    tokenizer = tokenizer_of("qwen2_5")
    places = ("reset", "get_reward", "")
    environment = hybrid.MessageEnvironment(tokenizer, [], Broken)
    episodes = environment.episodes([{"prompt": ASK, "where": where} for where in places])
    rows = roll_out(episodes, [[0]] * 3, scripted(tokenizer, [[call_text("increment", by=2), "end"]] * 3))
    assert [row.finish_reason for row in rows] == ["OSError: no connection"] * 2 + ["done"]
    assert episodes.rewards() == [None, None, 2.0]


# Environments with steps


class Guess:
    """A Gymnasium environment; `kind` is the form of its results."""

    def __init__(self, kind="gymnasium"):
        self.kind = kind

    def reset(self, seed=0):
        self.secret = 3 + seed
        first = f" Seed {seed}."
        return SimpleNamespace(observation=first) if self.kind == "openenv" else (first, {})

    def step(self, action):
        found = action == self.secret
        said, reward = ("yes" if found else "no"), float(found) - 0.25
        return {
            "gymnasium": (said, reward, found, False, {}),
            "gym": (said, reward, found, {}),
            "openenv": SimpleNamespace(observation=said, reward=reward, done=found),
        }[self.kind]


class AsyncGuess(Guess):
    """OpenEnv's client: coroutines, with a connection that belongs to one event loop."""

    async def reset(self, **arguments):
        self.loop = asyncio.get_running_loop()
        return super().reset(**arguments)

    async def step(self, action):
        assert asyncio.get_running_loop() is self.loop
        return super().step(action)


@pytest.mark.parametrize("family", ["qwen2_5", "gemma3", "phi3", "llama3"])
@pytest.mark.parametrize(
    "make", [Guess, lambda: Guess("gym"), lambda: AsyncGuess("openenv")], ids=["gymnasium", "gym", "openenv"]
)
def test_an_environment_with_steps(family, make):
    def factory():
        return hybrid.StepEnvironment(make(), int, reset_arguments=lambda example: {"seed": example["seed"]})

    row, messages, episodes = run(
        ["1", "five", "5", "9"], [], family, {"prompt": ASK, "seed": 2}, environment_factory=factory
    )
    assert row.rewards == [-0.25, None, 0.75] and row.finish_reason == "done" and episodes.rewards() == [0.5]
    said = contents(messages, "user")
    assert (
        said[0] == "no" and said[1].startswith("{'error': \"ValueError: invalid literal for int()") and said[2] == "yes"
    )
    assert "What is it? Seed 2." in tokenizer_of(family).decode(row.training[0].prompt_ids)


def test_steps_and_tools_together():
    turns = [call_text("add", a=2, b=1), "3"]
    row, messages, _ = run(turns, [add], environment_factory=lambda: hybrid.StepEnvironment(Guess(), int))
    assert row.rewards == [None, 0.75] and [message["role"] for message in messages] == [
        "assistant", "tool", "assistant", "user"
    ]  # fmt: skip


# Histories that the template rewrites

THOUGHT = "<think>\n{}\n</think>\n\n{}"


class Chat:
    """Asks on, three times."""

    def reset(self):
        self.asked = 0
        return "", {}

    def step(self, action):
        self.asked += 1
        return f"Why {self.asked}?", 0.0, self.asked == 3, False, {}


def thoughtful(history: str):
    turns = [
        THOUGHT.format("let me add", call_text("add", a=1, b=2)),  # a tool's result follows: Qwen 3 keeps the thought
        THOUGHT.format("so three", "3"),  # a user's message follows: it drops both
        THOUGHT.format("why", "Because"),
        THOUGHT.format("why indeed", "So"),
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        row, messages, episodes = run(
            turns, [add], "qwen3", history=history, environment_factory=lambda: hybrid.StepEnvironment(Chat())
        )
    return row, messages, episodes, [str(one.message) for one in caught], turns


def test_a_rewritten_history_forks_the_row():
    """The oracle is the template over the messages so far: it is the prompt of each fork."""
    tokenizer = tokenizer_of("qwen3")
    row, messages, episodes, caught, turns = thoughtful("template")
    assert len(row.training) == 3 and caught == [] and episodes.metrics()["environments/forks"] == 2
    settings = {"tools": [add], "add_generation_prompt": True, "return_dict": False}
    for training, length in zip(row.training, (0, 4, 6), strict=True):
        assert training.prompt_ids == tokenizer.apply_chat_template([*ASK, *messages[:length]], **settings)
    texts = [[tokenizer.decode(token) for token in part.completion_ids] for part in row.training]
    sampled = [
        "".join(text for text, mask in zip(part, training.mask, strict=True) if mask)
        for part, training in zip(texts, row.training, strict=True)
    ]
    end = FAMILIES["qwen3"][1]
    assert sampled == [turns[0] + end + turns[1] + end, turns[2] + end, turns[3] + end]
    assert "let me add" not in tokenizer.decode(row.training[1].ids)


def test_an_appended_history_keeps_what_was_sampled_and_warns_once():
    row, _, episodes, caught, turns = thoughtful("append")
    (training,) = row.training
    text = tokenizer_of("qwen3").decode(training.ids)
    assert all(turn in text for turn in turns) and episodes.metrics()["environments/forks"] == 0
    assert len(caught) == 1 and "the chat template rewrites earlier turns" in caught[0]


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "gemma3", "llama3", "phi3", "chatml"])
def test_other_spaces_and_tokens_are_no_rewriting(family):
    """Sampled text that the template strips, or writes in another way, forks nothing."""
    turns = [" Well  \n", "x\n\n", " y"]
    row, *_ = run(turns, [], family, history="template", environment_factory=lambda: hybrid.StepEnvironment(Chat()))
    assert len(row.training) == 1 and all(turn in tokenizer_of(family).decode(row.training[0].ids) for turn in turns)


def test_a_call_with_other_spaces_is_no_rewriting():
    text = '<tool_call>{"name":"add","arguments":{"b":1,"a":2}}</tool_call>'
    row, messages, _ = run([THOUGHT.format("t", text), text, "end"], [add], "qwen3", history="template")
    assert contents(messages) == ["3", "3"]
    assert len(row.training) == 1 and row.finish_reason == "done"


def test_the_empty_thoughts_of_a_prompt_are_a_history_that_is_rewritten():
    """With enable_thinking false Qwen 3 writes empty thoughts before the turn, and drops them when messages follow."""
    settings = {"chat_template_kwargs": {"enable_thinking": False}, "history": "template"}
    row, messages, _ = run(
        ["a", "b", "c"], [], "qwen3", environment_factory=lambda: hybrid.StepEnvironment(Chat()), **settings
    )
    tokenizer = tokenizer_of("qwen3")
    for training, length in zip(row.training, (0, 2, 4), strict=True):
        expected = tokenizer.apply_chat_template(
            [*ASK, *messages[:length]], add_generation_prompt=True, return_dict=False, enable_thinking=False
        )
        assert training.prompt_ids == expected


# The page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"
PLAYED = [[call_text("add", a=12, b=30), "It is 42."], [call_text("increment", by=6), "Ten."], ["it"]]


def test_code_of_the_page_runs():
    class Engine:
        def __init__(self, turns):
            self.turns = turns

        def rollout(self, prompt_ids, prompt_mask, sampling, num_generations=1, environment=None):
            rows = [ids[mask.bool()].tolist() for ids, mask in zip(prompt_ids, prompt_mask, strict=True)]
            script = scripted(names["tokenizer"], [self.turns] * len(rows) * num_generations)
            return roll_out(environment, rows, script, num_generations)

    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    names = {"tokenizer": tokenizer_of("qwen2_5")}
    for block, turns in zip(blocks, PLAYED, strict=True):
        names["engine"] = Engine(turns)
        exec(block, names)
        assert all(row.finish_reason == "done" for row in names["batch"])
        if "rewards" in block:
            assert names["rewards"] == [1.0]
    assert names["answers"] == ["It is 42."] * 2 and names["metrics"]["tools/call_frequency"] == 1.0


# Limits


@pytest.mark.parametrize("limit", [60, 100, 500])
@pytest.mark.parametrize("family", ["qwen2_5", "llama3_1"])
def test_long_results_are_cut_with_a_note(limit, family):
    text = call_text("long_text", words=300)
    if family == "llama3_1":
        text = '{"name": "long_text", "parameters": {"words": 300}}'
    row, messages, _ = run([text, "end"], family=family, max_observation_tokens=limit + 60)
    given = row.training[0].mask.count(0)
    assert limit < given <= limit + 60
    (content,) = contents(messages)
    head, note = content.split("\n[cut: ")
    assert note == f"{len(head)} of 1500 tokens shown]" and ("word " * 300).startswith(head)


def test_short_results_are_not_cut_for_a_long_one():
    calls = [call_text("add", a=1000, b=1), call_text("long_text", words=100), call_text("add", a=2000, b=2)]
    row, messages, _ = run(["\n".join(calls), "end"], max_observation_tokens=260)
    assert contents(messages)[::2] == ["1001", "2002"] and "[cut: " in contents(messages)[1]
    assert 230 < row.training[0].mask.count(0) <= 260


def test_an_observation_that_cannot_fit_ends_the_row():
    row, messages, _ = run([call_text("add", a=1, b=2), "end"], max_observation_tokens=5)
    assert row.finish_reason == "done" and len(row.rewards) == 1 and contents(messages) == ["3"]


def test_values_that_are_not_allowed_are_refused():
    tokenizer = tokenizer_of("qwen2_5")
    for settings, message in (
        ({"history": "drop"}, "history: 'drop' given; it must be one of 'append', 'template'"),
        ({"max_observation_tokens": 0}, "max_observation_tokens: 0 given; it must be at least 1, or None for no limit"),
        ({"tool_timeout_s": 0}, "tool_timeout_s: 0 given"),
        ({"max_tool_calling_iterations": -1}, "max_tool_calling_iterations: -1 given"),
        ({"tools": [add, add]}, r"tools: \['add'\] given more than once"),
        ({"environment_factory": object}, r"environment_factory: object has no reset\(\)"),
    ):
        with pytest.raises(ValueError, match=message):
            hybrid.MessageEnvironment(tokenizer, **settings)
    with pytest.raises(ValueError, match="prompt: 'Hi' given; it must be a conversation, a list of messages"):
        hybrid.MessageEnvironment(tokenizer).episodes([{"prompt": "Hi"}])
    with pytest.raises(Exception, match="docstring"):
        hybrid.MessageEnvironment(tokenizer, [lambda x: x])
