"""Rewards: functions of (prompts, completions) that give a number for each, and how one is loaded."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

Reward = Callable[[list[str], list[str]], list[float]]

HAPPY = set("laughed danced joy warm happy smiled loved wonderful fun".split())
SAD = set("cried sad broken lost lonely gloomy angry afraid dark".split())
# What children's stories have when they are cheerful, and when they are not.
JOYFUL = set(
    "happy happily smile smiled laugh laughed love loved fun play played hug hugged friend friends joy".split()
)
GLOOMY = set("sad cry cried angry scared afraid hurt mad bad lost broke broken".split())


def cheerful(prompts: list[str], completions: list[str]) -> list[float]:
    """For the embedded corpus: the mood of the words."""
    return [mood(completion.split(), HAPPY, SAD) for completion in completions]


def joyful_story(prompts: list[str], completions: list[str]) -> list[float]:
    """For English stories: the mood of the words."""
    return [mood(re.findall(r"[a-z']+", completion.lower()), JOYFUL, GLOOMY) for completion in completions]


def mood(words: list[str], good: set[str], bad: set[str]) -> float:
    """Different good words less different bad ones, less 4 × the share of word triples that repeat.

    The same word over and over earns nothing, and costs where it makes the text go round in circles.
    """
    triples = list(zip(words, words[1:], words[2:], strict=False))
    repeated = 1 - len(set(triples)) / len(triples) if triples else 0.0
    present = set(words)
    return len(good & present) - len(bad & present) - 4 * repeated


def load_reward(name: str) -> Reward:
    """The reward called `module:function`, or the sequence classifier in a directory.

    Raises ValueError, naming what was given and what is allowed.
    """
    if Path(name).is_dir():
        return classifier_reward(name)
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"reward: {name!r} given; it must be module:function, or the directory of a sequence classifier ({error})"
        ) from error


def classifier_reward(directory: str) -> Reward:
    """The logit of a sequence-classification model with one label, over prompt + completion."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    if model.config.num_labels != 1:
        raise ValueError(f"reward: {directory!r} has {model.config.num_labels} labels; a reward model has 1")

    @torch.no_grad()
    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0].tolist()

    return reward
