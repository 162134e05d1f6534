"""The embedded corpus, the prompts, and what turns text into padded tensors."""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

NAMES = "anna ben clara david emma finn greta hugo ida jonas".split()
PLACES = "garden forest river kitchen village harbour school meadow".split()
THINGS = "ball lamp boat book kite drum stone basket letter hat".split()
COLOURS = "red blue green old small shiny".split()
# Every story has a mood, and each mood its own sentences; a reward can prefer one.
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
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

STORY_OPENINGS = [
    "Once upon a time, there was a little {kind} named {name}.",
    "One day, a {kind} named {name} went to the park.",
    "{name} was a small {kind} who liked to play.",
    "There was a {kind} called {name}. One morning",
]
STORY_KINDS = "girl boy dog cat bird bear".split()
STORY_NAMES = "Lily Tom Max Sue Ben Mia Sam Anna Tim Lucy".split()


def story(rng: random.Random) -> str:
    """One story of the embedded corpus: an opening, two to three sentences of one mood, an ending."""
    words = {
        "name": rng.choice(NAMES),
        "place": rng.choice(PLACES),
        "thing": rng.choice(THINGS),
        "colour": rng.choice(COLOURS),
    }
    mood = MOODS[rng.choice(sorted(MOODS))]
    sentences = [OPENING, *rng.sample(mood, rng.choice((2, 3))), ENDING]
    return " ".join(sentences).format(**words)


def corpus(size: int, seed: int) -> list[str]:
    """`size` stories, a pure function of the seed."""
    rng = random.Random(seed)
    return [story(rng) for _ in range(size)]


def corpus_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer of the embedded corpus."""
    texts = [OPENING, ENDING, *(sentence for mood in MOODS.values() for sentence in mood)]
    words = {word for text in texts for word in text.split() if "{" not in word}
    vocabulary = [*SPECIAL.values(), *sorted(words | {*NAMES, *PLACES, *THINGS, *COLOURS})]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **SPECIAL)


def load_prompts(path: str, embedded: bool) -> list[str]:
    """Prompts of a text file, a line each; without a path those of the embedded corpus, or story openings.

    Raises ValueError for a file that is absent or has no prompts.
    """
    if path:
        if not Path(path).is_file():
            raise ValueError(f"prompts: no file at {path!r}")
        found = [line.strip() for line in Path(path).read_text().splitlines() if line.strip()]
        if not found:
            raise ValueError(f"prompts: {path!r} has no prompts; it needs one on each line")
        return found
    if embedded:
        return [
            OPENING.format(name=name, colour=colour, thing=thing, place=place)
            for name in NAMES
            for colour in COLOURS
            for thing in THINGS
            for place in PLACES
        ]
    return [
        opening.format(kind=kind, name=name)
        for opening in STORY_OPENINGS
        for kind in STORY_KINDS
        for name in STORY_NAMES
    ]


def prompt_order(count: int, seed: int):
    """Prompt numbers without end: each pass over all of them in an order of its own, a pure function of the seed."""
    epoch = 0
    while True:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        yield from torch.randperm(count, generator=generator).tolist()
        epoch += 1


def encode_prompts(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded ids and mask, int64 [len(texts), longest], each prompt beginning with the start token."""
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    rows = [start + tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return pad(rows, tokenizer.pad_token_id, left=True)


def encode_stories(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and mask, int64 [len(texts), longest], each text between start and end token."""
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return pad([[tokenizer.bos_token_id, *row, tokenizer.eos_token_id] for row in ids], tokenizer.pad_token_id, False)


def pad(rows: list[list[int]], pad_token_id: int, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of tokens as ids and mask, int64 [len(rows), longest]; the mask comes from lengths."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad_token_id)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, place] = torch.tensor(row)
        mask[i, place] = 1
    return ids, mask
