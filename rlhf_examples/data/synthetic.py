"""Synthetic sets: stories with a mood and a gold score, preferences, arithmetic, story openings.

Every set is a function of split and seed. `load_records("synthetic:stories@train")` reads a set by its name in SETS.
"""

import random
import re
from collections.abc import Callable, Sequence
from itertools import chain, combinations_with_replacement

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

Records = list[dict[str, str]]

NAMES = "anna ben clara david emma finn greta hugo ida jonas".split()
PLACES = "garden forest river kitchen village harbour school meadow".split()
THINGS = "ball lamp boat book kite drum stone basket letter hat".split()
COLOURS = "red blue green old small shiny".split()
# Every story has a mood, and each mood its own sentences, so that a reward can prefer a mood.
MOODS = {
    "happy": [
        "{name} laughed and danced with joy .",
        "the sun was warm and {name} felt happy .",
        "everyone smiled and loved the {thing} .",
        "it was a wonderful day full of fun .",
    ],
    "sad": [
        "{name} cried and felt very sad .",
        "the {thing} was broken and lost .",
        "it was a lonely and gloomy day .",
        "everyone was angry and afraid of the dark .",
    ],
    "plain": [
        "{name} put the {thing} on the table .",
        "then {name} walked back along the road .",
        "the {thing} was {colour} and quite heavy .",
        "later it rained for an hour .",
    ],
}
OPENING = "{name} found a {colour} {thing} in the {place} ."
ENDING = "that was the end ."
MOOD_PATTERNS = {
    mood: re.compile("|".join(re.sub("{.*?}", r"\\w+", text.replace(".", "[.]")) for text in texts))
    for mood, texts in MOODS.items()
}
GOLD = {"happy": 1.0, "plain": 0.5, "sad": 0.0}  # worth of a sentence by its mood; 0 without a mood

STORY_OPENINGS = [
    "Once upon a time, there was a little {kind} named {name}.",
    "One day, a {kind} named {name} went to the park.",
    "{name} was a small {kind} who liked to play.",
    "There was a {kind} called {name}. One morning",
]
STORY_KINDS = "girl boy dog cat bird bear".split()
STORY_NAMES = "Lily Tom Max Sue Ben Mia Sam Anna Tim Lucy".split()

SIZES = {"train": 4096, "test": 512}  # records of a split
TEST_SHARE = 0.1  # share of the prompts that only the test split has
OPERANDS, LARGEST = 5, 6  # an arithmetic sum has OPERANDS numbers, each from 0 to LARGEST
HELD_OUT_SUMS = 0.46  # share of the 462 sums: 213 for a small standard error, and 249 so that they are not memorised
WRONG = 0.85  # share of the supervised answers that are the sum plus one
LABEL_NOISE = 0.05  # share of the training pairs that are swapped
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def stories(split: str, seed: int = 0, size: int | None = None) -> Records:
    """Openings (`prompt`) and the rest of a story (`completion`): two or three sentences of one mood, and an ending."""
    rng, prompts = random.Random(f"stories {split} {seed}"), openings(split)
    records = []
    for _ in range(size or SIZES[split]):
        prompt, words = rng.choice(prompts)
        sentences = rng.sample(MOODS[rng.choice(sorted(MOODS))], rng.choice((2, 3)))
        records.append({"prompt": prompt, "completion": fill_in([*sentences, ENDING], words)})
    return records


def preferences(split: str, seed: int = 0, size: int | None = None, label_noise: float = LABEL_NOISE) -> Records:
    """Pairs of stories with the same opening: `chosen` has the higher gold score, except in a share of `label_noise`.

    Some stories mix moods, repeat a sentence or lack an ending, so that a reward model learns to score that. The test
    split has no noise: accuracy on it is agreement with the gold score.
    """
    rng, prompts = random.Random(f"preferences {split} {seed}"), openings(split)
    swap_probability = label_noise if split == "train" else 0.0
    records: Records = []
    while len(records) < (size or SIZES[split]):
        prompt, words = rng.choice(prompts)
        texts = [fill_in(flawed_story(rng), words) for _ in range(2)]
        for pair in preference_pairs([prompt], texts[:1], texts[1:], gold_score):
            if rng.random() < swap_probability:
                pair["chosen"], pair["rejected"] = pair["rejected"], pair["chosen"]
            records.append(pair)
    return records


def arithmetic(split: str, seed: int = 0, size: int | None = None, wrong: float = WRONG) -> Records:
    """Sums (`prompt`: "3 + 4 + 5 + 0 + 4 ="), their `answer`, and a supervised `completion`, which is too large by one
    in a share of `wrong`.

    A model supervised on them knows sums but seldom answers right, so that RL has something to improve. The test split
    has each of its sums once; the train split has none of them in any order.
    """
    rng = random.Random(f"arithmetic {split} {seed}")
    sums = train_test_split([*combinations_with_replacement(range(LARGEST + 1), OPERANDS)], HELD_OUT_SUMS)[split]
    drawn = rng.sample(sums, len(sums)) if split == "test" else rng.choices(sums, k=size or SIZES[split])
    records = []
    for numbers in drawn[:size]:
        answer, order = sum(numbers), rng.sample(numbers, OPERANDS)
        completion = answer + 1 if rng.random() < wrong else answer
        records.append(
            {"prompt": f"{' + '.join(map(str, order))} =", "completion": str(completion), "answer": str(answer)}
        )
    return records


def story_openings(split: str, seed: int = 0, size: int | None = None) -> Records:
    """English openings (`prompt`) for a pretrained story model."""
    texts = [
        opening.format(kind=kind, name=name)
        for opening in STORY_OPENINGS
        for kind in STORY_KINDS
        for name in STORY_NAMES
    ]
    return [{"prompt": text} for text in train_test_split(texts)[split][:size]]


SETS: dict[str, Callable[..., Records]] = {
    "stories": stories,
    "preferences": preferences,
    "arithmetic": arithmetic,
    "openings": story_openings,
}


def train_test_split(items: list, test_share: float = TEST_SHARE) -> dict[str, list]:
    """The items of each split; the test split's share is the same on every call."""
    shuffled = random.Random("splits").sample(items, len(items))
    held_out = round(len(items) * test_share)
    return {"test": shuffled[:held_out], "train": shuffled[held_out:]}


def openings(split: str) -> list[tuple[str, dict[str, str]]]:
    """The openings of a split, each with the words that its story is about."""
    words = [
        {"name": name, "colour": colour, "thing": thing, "place": place}
        for name in NAMES
        for colour in COLOURS
        for thing in THINGS
        for place in PLACES
    ]
    return [(OPENING.format(**chosen), chosen) for chosen in train_test_split(words)[split]]


def fill_in(sentences: list[str], words: dict[str, str]) -> str:
    """Sentences with their words filled in, as a completion: it starts with the space after the opening."""
    return " " + " ".join(sentences).format(**words)


def flawed_story(rng: random.Random) -> list[str]:
    """One to four sentences, possibly with mixed moods, a repeated sentence, or no ending."""
    pool = MOODS[rng.choice(sorted(MOODS))] if rng.random() < 0.5 else [*chain(*MOODS.values())]
    sentences = rng.sample(pool, rng.randint(1, 4))
    if rng.random() < 0.3:
        sentences.insert(rng.randint(0, len(sentences)), rng.choice(sentences))
    return sentences if rng.random() < 0.2 else [*sentences, ENDING]


def gold_score(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """The quality of each story, in [0, 1]; for evaluation only, training never uses it.

    The mean worth of the sentences (GOLD by their mood), times the share of distinct ones, halved without an ending.
    """
    return [story_worth(sentences_of(completion)) for completion in completions]


def sentences_of(text: str) -> list[str]:
    """The sentences of a text with single spaces between words; text after the last full stop counts as a sentence."""
    return [" ".join(part.split()) for part in re.split(r"(?<=[.])", text) if part.strip()]


def story_worth(sentences: list[str]) -> float:
    """`gold_score` of a story's sentences."""
    ended = sentences[-1:] == [ENDING]
    if not (body := sentences[:-1] if ended else sentences):
        return 0.0
    worth = sum(GOLD.get(mood_of(sentence) or "", 0.0) for sentence in body) / len(body)
    return worth * len(set(body)) / len(body) * (1.0 if ended else 0.5)


def mood_of(sentence: str) -> str | None:
    """The mood of a sentence, whatever its words; None if it matches no mood."""
    return next((mood for mood, pattern in MOOD_PATTERNS.items() if pattern.fullmatch(sentence)), None)


def preference_pairs(
    prompts: Sequence[str],
    completions_a: Sequence[str],
    completions_b: Sequence[str],
    score: Callable[[list[str], list[str]], list[float]],
) -> Records:
    """Pairs of two completions of each prompt, the one with the higher score as `chosen`; pairs with equal scores,
    or with a completion that could not be scored (NaN), are left out.
    """
    scores = [score(list(prompts), list(completions)) for completions in (completions_a, completions_b)]
    pairs = []
    for prompt, *texts, a, b in zip(prompts, completions_a, completions_b, *scores, strict=True):
        if a < b or a > b:
            chosen, rejected = texts if a > b else reversed(texts)
            pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return pairs


def synthetic_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer for all synthetic sets but the English openings. It adds a start token to a text."""
    texts = [OPENING, ENDING, *(sentence for mood in MOODS.values() for sentence in mood)]
    words = {word for text in texts for word in text.split() if "{" not in word}
    sums = ["+", "=", *map(str, range(OPERANDS * LARGEST + 2))]
    vocabulary = [*SPECIAL.values(), *sorted(words | {*NAMES, *PLACES, *THINGS, *COLOURS}), *sums]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", add_bos_token=True, **SPECIAL)
