"""Two environments for GRPO over several turns, small enough for a tiny model: sums with a calculator, a guessing game.

    tokenizer = environment_tokenizer()
    environment = ENVIRONMENTS["calculator"].make(tokenizer)
    episodes = environment.episodes(ENVIRONMENTS["calculator"].records("train"), num_generations=8)
    batch = engine.rollout(*episodes.prompts(), sampling, num_generations=8, environment=episodes)

A supervised policy learns the moves from `demonstrations`, and seldom the right ones: RL has something to improve.
"""

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import hybrid

Records = list[dict[str, Any]]

SIZES = {"train": 4096, "test": 512}  # records of a split, if there are as many different ones
OPERANDS, LARGEST = 3, 7  # a sum has OPERANDS numbers, each from 0 to LARGEST
TEST_SHARE = 0.2  # share of the sums that only the test split has
WRONG = 0.9  # share of the demonstrations that play badly
SECRETS, GUESSES = 7, 3  # a secret number from 1 to SECRETS, found in GUESSES guesses by halving

PAD, END = "<pad>", "</s>"
# Words are separated by white space: "<user> 3 + 4 + 5 = </s> <assistant> add 3 4 </s> <tool> 7 </s> <assistant> ".
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }} {{ call.function.arguments.values() | join(' ') }}"
    "{% endfor %} </s> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant> ",
    "fields": {
        "tool_calls": {
            "open_pattern": r"add (?P<a>\d+) (?P<b>\d+)\s*(?=</s>)",
            "close_pattern": r"</s>\s*",
            "transform": [{"type": "function", "function": {"name": "add", "arguments": {"a": "{a}", "b": "{b}"}}}],
        },
        "content": {"close_pattern": r"\s*</s>\s*", "content": "text"},
    },
}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


class SumTask:
    """A sum whose answer is the text of the turn without a tool call. The reward is 1 for the right answer, else 0."""

    def reset(self, answer: int) -> tuple[str, dict]:
        """Begin with the sum of a record, which is in its prompt."""
        self.answer = answer
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Gymnasium's `step`: every answer is the last one."""
        return "", float(action.strip() == str(self.answer)), True, False, {}


class GuessingGame:
    """A secret number, found by guesses that are answered with "higher", "lower" or "yes". The reward is 1 if it is
    found within GUESSES guesses, else 0; what is no number is a lost guess, answered with "no".
    """

    def reset(self, secret: int) -> tuple[str, dict]:
        """Begin with the secret of a record."""
        self.secret, self.guesses = secret, 0
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Gymnasium's `step`: the game ends with the number, or after the last guess."""
        self.guesses += 1
        answer = answer_to(action.strip(), self.secret)
        return answer, float(answer == "yes"), answer == "yes", self.guesses == GUESSES, {}


def answer_to(guess: str, secret: int) -> str:
    """The game's answer to a guess."""
    if not guess.isdecimal():
        return "no"
    return "yes" if int(guess) == secret else "higher" if int(guess) < secret else "lower"


def calculator(tokenizer: PreTrainedTokenizerBase, **settings: Any) -> hybrid.MessageEnvironment:
    """Sums with the tool `add`.  settings: of MessageEnvironment."""

    def task() -> hybrid.StepEnvironment:
        return hybrid.StepEnvironment(SumTask(), reset_arguments=lambda record: {"answer": record["answer"]})

    return hybrid.MessageEnvironment(tokenizer, [add], task, **{"max_tool_calling_iterations": OPERANDS, **settings})


def guessing_game(tokenizer: PreTrainedTokenizerBase, **settings: Any) -> hybrid.MessageEnvironment:
    """Guessing games.  settings: of MessageEnvironment."""

    def game() -> hybrid.StepEnvironment:
        return hybrid.StepEnvironment(GuessingGame(), reset_arguments=lambda record: {"secret": record["secret"]})

    return hybrid.MessageEnvironment(tokenizer, environment_factory=game, **settings)


def calculator_records(split: str, seed: int = 0, size: int | None = None) -> Records:
    """Sums ("prompt": "3 + 4 + 5 =") and their "answer"; no sum of the test split is in the train split."""
    numbers = [[a, b, c] for a in range(LARGEST + 1) for b in range(LARGEST + 1) for c in range(LARGEST + 1)]
    shuffled = random.Random("sums").sample(numbers, len(numbers))
    held_out = round(len(shuffled) * TEST_SHARE)
    sums = {"test": shuffled[:held_out], "train": shuffled[held_out:]}[split]
    rng = random.Random(f"calculator {split} {seed}")
    drawn = rng.sample(sums, len(sums)) if split == "test" else rng.choices(sums, k=size or SIZES[split])
    return [
        {"prompt": user(f"{' + '.join(map(str, operands))} ="), "numbers": operands, "answer": sum(operands)}
        for operands in drawn[:size]
    ]


def guessing_records(split: str, seed: int = 0, size: int | None = None) -> Records:
    """Games ("prompt": "guess") and their "secret". The splits differ in their order: there are SECRETS games."""
    rng = random.Random(f"guessing {split} {seed}")
    return [{"prompt": user("guess"), "secret": rng.randint(1, SECRETS)} for _ in range(size or SIZES[split])]


def calculator_demonstrations(
    seed: int = 0, size: int | None = None, wrong: float = WRONG, split: str = "train"
) -> Records:
    """Conversations ("messages") that solve a split's sums step by step; a share of `wrong` answers before the last
    addition.
    """
    rng, records = random.Random(f"calculator demonstrations {seed}"), []
    for record in calculator_records(split, seed, size):
        messages, (result, *others) = [*record["prompt"]], record["numbers"]
        for number in others[: -1 if rng.random() < wrong else None]:
            call = {"type": "function", "function": {"name": "add", "arguments": {"a": result, "b": number}}}
            result = add(result, number)
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "name": "add", "content": str(result)})
        records.append({"messages": [*messages, {"role": "assistant", "content": str(result)}]})
    return records


def guessing_demonstrations(
    seed: int = 0, size: int | None = None, wrong: float = WRONG, split: str = "train"
) -> Records:
    """Conversations ("messages") of games that halve the numbers that are left; a share of `wrong` repeats the
    first guess.
    """
    rng, records = random.Random(f"guessing demonstrations {seed}"), []
    for record in guessing_records(split, seed, size):
        messages, low, high = [*record["prompt"]], 1, SECRETS
        learns = rng.random() >= wrong
        for _ in range(GUESSES):
            guess = (low + high) // 2
            answer = answer_to(str(guess), record["secret"])
            messages += [{"role": "assistant", "content": str(guess)}, *user(answer)]
            if answer == "yes":
                break
            if learns:
                low, high = (guess + 1, high) if answer == "higher" else (low, guess - 1)
        records.append({"messages": messages[:-1]})  # the last answer ends the game
    return records


def user(text: str) -> list[dict[str, str]]:
    """A conversation of one user message."""
    return [{"role": "user", "content": text}]


@dataclass(frozen=True)
class Environment:
    """An environment with its data.

    make: a tokenizer and settings → a `hybrid.MessageEnvironment`.
    records: split ("train", "test"), seed and size → what its `episodes` take.
    demonstrations: seed, size and split → conversations for supervised fine-tuning.
    """

    make: Callable[..., hybrid.MessageEnvironment]
    records: Callable[..., Records]
    demonstrations: Callable[..., Records]


ENVIRONMENTS = {
    "calculator": Environment(calculator, calculator_records, calculator_demonstrations),
    "guessing": Environment(guessing_game, guessing_records, guessing_demonstrations),
}


def load_environment(name: str) -> Environment:
    """An environment by its name in ENVIRONMENTS, or `module:name` of one's own.

    Raises ValueError, with the allowed forms, if there is none.
    """
    module, _, attribute = name.partition(":")
    try:
        environment = getattr(importlib.import_module(module), attribute) if attribute else ENVIRONMENTS[name]
    except (ImportError, AttributeError, KeyError, ValueError) as error:
        allowed = f"{', '.join(ENVIRONMENTS)}, or module:name of an rlhf_examples.environments.Environment"
        raise ValueError(f"environment: {name!r} given; it must be {allowed}") from error
    return environment


def environment_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer for both environments, with a chat template and a response template."""
    special = [PAD, END, "<unk>", "<user>", "<assistant>", "<tool>"]
    words = ["add", "+", "=", "guess", "higher", "lower", "yes", "no", *map(str, range(OPERANDS * LARGEST + 1))]
    vocabulary = {word: token for token, word in enumerate([*special, *words])}
    inner = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        padding_side="left",
        pad_token=PAD,
        eos_token=END,
        unk_token="<unk>",
        extra_special_tokens=special[3:],
    )
    tokenizer.chat_template, tokenizer.response_template = CHAT_TEMPLATE, RESPONSE_TEMPLATE
    return tokenizer
