"""Tokenized records: cached by content, in an order that can be resumed, padded into tensors."""

import hashlib
import inspect
import json
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets import Features, IterableDataset, List, Value
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from hybrid import cut_after_turn_end
from rlhf_examples.data import conversations, messages, texts
from rlhf_examples.data.conversations import assistant_mask, encode_plain_text, encode_text
from rlhf_examples.data.records import Rows
from rlhf_examples.data.texts import AS_NAMED, BadRecord, RecordFormat, SkippedRecords, Texts, texts_of

TOKENS = List(Value("int32"))
ORIGIN = {"source": Value("string"), "number": Value("int64"), "reason": Value("string")}
FEATURES = {
    "supervised": Features(ORIGIN | {"prompt_ids": TOKENS, "completion_ids": TOKENS}),
    "turns": Features(ORIGIN | {"prompt_ids": TOKENS, "completion_ids": TOKENS, "assistant_mask": List(Value("int8"))}),
    "preference": Features(
        ORIGIN | {"prompt_ids": TOKENS, "chosen_ids": TOKENS, "rejected_ids": TOKENS, "margin": Value("float64")}
    ),
    "prompt": Features(
        ORIGIN
        | {
            "prompt_ids": TOKENS,
            "prompt": Value("string"),
            "messages": Value("string"),
            "columns": Value("string"),
        }
    ),
}
NOT_COLUMNS = ("prompt", "messages", "completion")  # columns that are not passed on to reward functions
IDS = ("prompt_ids", "completion_ids")  # columns of a supervised example
SHUFFLE_BUFFER = 1024  # rows of a stream from which the next one is drawn


@dataclass(frozen=True)
class Examples:
    """Tokenized records that can be used.

    rows: columns are FEATURES by form; the form "turns" is supervised with a mask of all assistant turns. A prompt's
        row has as JSON `messages`, its conversation (empty for a text prompt), and `columns`, the record's other
        columns.
    A stream's rows still include unusable ones.
    skipped: the unusable records; of a stream, those seen so far in its first pass.
    """

    rows: Rows
    skipped: SkippedRecords

    def __len__(self) -> int:
        """The number of rows of a pass; unknown for a stream."""
        return len(self.rows)

    def ordered(self, seed: int, position: int = 0) -> Iterator[Any]:
        """An endless iterator over rows from position `position`: every pass has all rows, in its own order.

        The order is a pure function of the seed. A stream is shuffled within a buffer of SHUFFLE_BUFFER rows, and its
        rows before `position` are read and skipped. Raises ValueError if a stream has no usable record.
        """
        if isinstance(self.rows, IterableDataset):
            return islice(self._streamed(seed), position, None)
        return (self.rows[number] for number in shuffled_order(len(self.rows), seed, position))

    def _streamed(self, seed: int) -> Iterator[dict[str, Any]]:
        epoch = 0
        while True:
            passed = SkippedRecords() if epoch else self.skipped
            for row in self.rows.shuffle(seed=epoch_seed(seed, epoch), buffer_size=SHUFFLE_BUFFER):
                if passed.usable(row["source"], row["number"], row["reason"]):
                    yield row
            require_usable(passed)
            epoch += 1


@dataclass
class RowStream:
    """The rows that a run learns from, in the order of `Examples.ordered`.

    taken: rows used so far by all ranks; saved in checkpoints.
    """

    examples: Examples
    seed: int
    taken: int = 0
    _rows: Iterator[Any] | None = field(default=None, repr=False)

    def next(self, count: int) -> list[Any]:
        """The next `count` rows, those of all ranks together."""
        if self._rows is None:
            self._rows = self.examples.ordered(self.seed, self.taken)
        self.taken += count
        return list(islice(self._rows, count))

    def state_dict(self) -> dict[str, int]:
        """The state for a checkpoint."""
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the state from a checkpoint."""
        self.taken, self._rows = state["taken"], None


@dataclass(frozen=True)
class PackedExamples(Examples):
    """Examples of which several share a sequence: instead of a row there is a list of rows, a pack.

    packs: row numbers of each pack.
    """

    packs: list[list[int]]

    @classmethod
    def of(cls, examples: Examples, max_length: int) -> "PackedExamples":
        """Packs of supervised examples with at most `max_length` tokens each; no example may be longer."""
        lengths = [sum(map(len, ids)) for ids in zip(*(examples.rows[name] for name in IDS), strict=True)]
        return cls(examples.rows, examples.skipped, best_fit(lengths, max_length))

    def __len__(self) -> int:
        """The number of packs of a pass."""
        return len(self.packs)

    def ordered(self, seed: int, position: int = 0) -> Iterator[Any]:
        """An endless iterator over packs from position `position`, in the order of `Examples.ordered`."""
        numbers = shuffled_order(len(self.packs), seed, position)
        return ([self.rows[row] for row in self.packs[number]] for number in numbers)


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Row numbers in packs of at most `capacity` tokens: the longest row first, each into the fullest pack that has
    room for it (TRL's "bfd").

    lengths: tokens of each row, none above `capacity`.
    """
    packs: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free tokens of a pack, its number), sorted
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        index = bisect_left(free, (lengths[row], -1))
        space, pack = free.pop(index) if index < len(free) else (capacity, len(packs))
        if pack == len(packs):
            packs.append([])
        packs[pack].append(row)
        insort(free, (space - lengths[row], pack))
    return packs


def tokenize_records(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    form: str,
    max_length: int = 0,
    cache_dir: str | Path | None = None,
    num_proc: int | None = None,
    record_format: RecordFormat = AS_NAMED,
) -> Examples:
    """Tokenize raw rows.  form: supervised, turns, preference or prompt; record_format: how records are read.

    tokenizer: from `load_tokenizer`: it must not add a token after a text.
    max_length: limit for prompt and completion together, special tokens included; longer records are left out. 0: no
        limit.
    cache_dir: where tokens are cached by content of rows, tokenizer and settings; None: datasets' own cache. One of the
        ranks that share it tokenizes, and the others wait for its file.
    num_proc: number of tokenizing processes.
    Raises ValueError for another form, or, with the reasons, if no record can be used; for a stream, that error is
    raised at the end of its first pass.
    """
    if form not in FEATURES:
        raise ValueError(f"form: {form!r} given; allowed: {', '.join(FEATURES)}")
    map_arguments = {
        "function": partial(
            tokenize_record, form=form, tokenizer=tokenizer, max_length=max_length, record_format=record_format
        ),
        "remove_columns": ["record", "problem"],
        "features": FEATURES[form],
    }
    if isinstance(rows, IterableDataset):
        return Examples(rows.map(**map_arguments), SkippedRecords())
    directory = Path(cache_dir or Path(datasets.config.HF_DATASETS_CACHE) / "rlhf_examples")
    directory.mkdir(parents=True, exist_ok=True)
    key = cache_key(rows, tokenizer, form, max_length, record_format)
    with FileLock(directory / f"{key}.lock"):
        tokenized = rows.map(
            **map_arguments, cache_file_name=str(directory / f"{key}.arrow"), new_fingerprint=key, num_proc=num_proc
        )
    skipped, usable = SkippedRecords(), []
    for batch in tokenized.select_columns(list(ORIGIN)).iter(batch_size=1000):
        usable += [skipped.usable(*origin) for origin in zip(*(batch[name] for name in ORIGIN), strict=True)]
    require_usable(skipped)
    return Examples(tokenized.select([i for i, kept in enumerate(usable) if kept]), skipped)


def require_usable(skipped: SkippedRecords) -> None:
    """Raises ValueError if all records are left out."""
    if skipped.counts.total() == skipped.total:
        raise ValueError(f"no record can be used: {skipped}")


def cache_key(rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, *settings: Any) -> str:
    """A hash of everything that the tokens depend on: rows, tokenizer, settings and the source files that make them."""
    digest = hashlib.sha256(repr((settings, tokenizer_state(tokenizer))).encode())
    turn_ends = inspect.getsourcefile(cut_after_turn_end)
    assert turn_ends is not None, "a function of this package has a source file"
    for file in (__file__, conversations.__file__, messages.__file__, texts.__file__, turn_ends):
        digest.update(Path(file).read_bytes())
    for batch in rows.iter(batch_size=1000):
        digest.update(repr(batch).encode())
    return digest.hexdigest()[:32]


def tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> str:
    """The settings that determine a tokenizer's output, as JSON, without its last call's padding and truncation."""
    state = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "chat_template")}
    if tokenizer.is_fast:
        state["backend"] = {**json.loads(tokenizer.backend_tokenizer.to_str()), "padding": None, "truncation": None}
    else:
        state |= {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab(), "init": tokenizer.init_kwargs}
    return json.dumps(state, sort_keys=True, default=str)


def tokenize_record(
    row: dict[str, Any], form: str, tokenizer: PreTrainedTokenizerBase, max_length: int, record_format: RecordFormat
) -> dict[str, Any]:
    """A row of FEATURES from a raw row: with tokens, or with the reason why the record cannot be used."""
    names = [name for name in FEATURES[form] if name.endswith(("_ids", "_mask"))]
    try:
        record_texts = texts_of(row, form, tokenizer, record_format)
        tokens = tokenize_texts(record_texts, tokenizer)
        if form in ("prompt", "preference") and not tokens[0]:
            raise BadRecord("the prompt has no tokens")
        if max_length and len(tokens[0]) + max(map(len, tokens[1:]), default=0) > max_length:
            raise BadRecord(f"longer than {max_length} tokens")
        if form == "preference" and tokens[1] == tokens[2]:
            raise BadRecord("chosen and rejected have the same tokens")
        margin = record_format.margin(json.loads(row["record"])) if form == "preference" else 0.0
        if form == "turns":
            ids = tokens[0] + tokens[1]
            tokens.append(
                assistant_mask(record_texts, ids, tokenizer)
                if record_texts.is_conversation
                else completion_mask_of(*tokens)
            )
    except BadRecord as defect:
        record_texts, tokens, margin, reason = Texts("", ()), [[] for _ in names], 0.0, str(defect)
    else:
        reason = ""
    row_of_tokens = {
        "source": row["source"],
        "number": row["number"],
        "reason": reason,
        **dict(zip(names, tokens, strict=True)),
    }
    if form == "preference":
        row_of_tokens |= {"margin": margin}
    if form == "prompt":
        record = {} if reason else json.loads(row["record"])
        excluded = {*NOT_COLUMNS, record_format.prompt_column, record_format.messages_column}
        columns = {name: value for name, value in record.items() if name not in excluded}
        conversation = json.dumps(record_texts.messages) if record_texts.messages else ""
        row_of_tokens |= {"prompt": record_texts.prompt, "messages": conversation, "columns": json.dumps(columns)}
    return row_of_tokens


def tokenize_texts(record_texts: Texts, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The tokens of a prompt and of each of its completions.

    A prompt has the tokens of `tokenizer(prompt)`, as the trained model's users will call it; a conversation those of
    its chat template. An end token is put after a completion, if the tokenizer has one and the text itself has not
    written it; a conversation's completion ends with the assistant's turn. A completion is what follows the prompt's
    tokens in those of prompt and completion together; if a token spans the border, the completion is tokenized alone,
    so that the prompt always has the tokens of a rollout.
    """
    encode, end = encode_text if record_texts.is_conversation else encode_plain_text, tokenizer.eos_token_id
    prompt = encode(record_texts.prompt, tokenizer)
    rows = [prompt]
    for completion in record_texts.completions:
        whole = encode(record_texts.prompt + completion, tokenizer)
        tokens = whole[len(prompt) :] if whole[: len(prompt)] == prompt else encode_text(completion, tokenizer)
        if record_texts.is_conversation:
            tokens = cut_after_turn_end(tokens, tokenizer)
        elif end is not None and tokens[-1:] != [end]:
            tokens = [*tokens, end]
        rows.append(tokens)
    return rows


def shuffled_order(count: int, seed: int, position: int = 0) -> Iterator[int]:
    """Endless numbers below `count` from position `position`: each pass has all, in its own order."""
    epoch, start = divmod(position, count)
    while True:
        generator = torch.Generator().manual_seed(epoch_seed(seed, epoch))
        yield from torch.randperm(count, generator=generator).tolist()[start:]
        epoch, start = epoch + 1, 0


def epoch_seed(seed: int, epoch: int) -> int:
    """The seed of a pass."""
    return seed * 1_000_003 + epoch


def collate_supervised(
    rows: list[dict[str, Any]], pad_token_id: int, completion_only_loss: bool = True
) -> dict[str, torch.Tensor]:
    """`input_ids`, `attention_mask`, `labels`, int64 [rows, longest], right padded.

    labels: -100 on padding, and on prompts if `completion_only_loss`; if rows have an `assistant_mask`, on all tokens
        outside the assistant's turns.
    """
    ids, mask = pad([row["prompt_ids"] + row["completion_ids"] for row in rows], pad_token_id, left=False)
    completions = [completion_mask_of(row["prompt_ids"], row["completion_ids"]) for row in rows]
    turns = [row.get("assistant_mask", of_row) for row, of_row in zip(rows, completions, strict=True)]
    learned, _ = pad(turns, 0, left=False)
    kept = learned if completion_only_loss or "assistant_mask" in rows[0] else mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(kept == 0, -100)}


def collate_preference(rows: list[dict[str, Any]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """`input_ids`, `attention_mask`, `completion_mask`, int64 [2 * rows, longest], right padded: first every chosen
    sequence, then every rejected one. `margin`, float32 [rows]."""
    pairs = [(row["prompt_ids"], row[name]) for name in ("chosen_ids", "rejected_ids") for row in rows]
    ids, mask = pad([prompt + completion for prompt, completion in pairs], pad_token_id, left=False)
    completion_mask, _ = pad([completion_mask_of(*pair) for pair in pairs], 0, left=False)
    margin = torch.tensor([row["margin"] for row in rows], dtype=torch.float32)
    return {"input_ids": ids, "attention_mask": mask, "completion_mask": completion_mask, "margin": margin}


def completion_mask_of(prompt: list[int], completion: list[int]) -> list[int]:
    """0 for every token of a prompt, 1 for every token of its completion."""
    return [0] * len(prompt) + [1] * len(completion)


def collate_prompts(rows: list[dict[str, Any]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """`prompt_ids`, `prompt_mask`, int64 [rows, longest], left padded."""
    ids, mask = pad([row["prompt_ids"] for row in rows], pad_token_id, left=True)
    return {"prompt_ids": ids, "prompt_mask": mask}


def reward_columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The other columns of these rows' records, by name; None where a record lacks a column.

    They are keyword arguments of reward functions, as in TRL.
    """
    records = [json.loads(row["columns"]) for row in rows]
    names = sorted({name for record in records for name in record})
    return {name: [record.get(name) for record in records] for name in names}


def pad(rows: list[list[int]], pad_token_id: int, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of tokens as ids and mask, both int64 [len(rows), longest]; the mask comes from the lengths."""
    width = max(map(len, rows), default=0)
    ids = torch.full((len(rows), width), pad_token_id)
    mask = torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        columns = slice(width - len(row), width) if left else slice(0, len(row))
        ids[i, columns] = torch.tensor(row)
        mask[i, columns] = 1
    return ids, mask
