"""Raw rows of any source: files, directories, hub sets, synthetic sets, mixtures of them, and shares.

A raw row is {"source", "number", "record", "problem"}: where the record comes from, its content as JSON, and why it
could not be read. So sets with different columns can be mixed, and a broken record can still be reported.
"""

import csv
import hashlib
import json
from bisect import bisect
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow
import pyarrow.parquet
from datasets import Dataset, Features, IterableDataset, Value, concatenate_datasets, interleave_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError

from rlhf_examples.data.synthetic import SETS, SIZES
from rlhf_examples.environments import ENVIRONMENTS

Rows: TypeAlias = Dataset | IterableDataset
RAW = Features(
    {"source": Value("string"), "number": Value("int64"), "record": Value("string"), "problem": Value("string")}
)
# Name → a function of the split: the synthetic sets, and demonstrations of the environments.
SYNTHETIC = {f"synthetic:{name}": make for name, make in SETS.items()} | {
    f"synthetic:{name}": lambda split, make=environment.demonstrations: make(split=split)
    for name, environment in ENVIRONMENTS.items()
}


def load_records(
    names: str | list[str], split: str = "train", streaming: bool = False, cache_dir: str | Path | None = None
) -> Rows:
    """The raw rows of a set, or of several sets mixed.

    names: each a JSON, JSONL, Parquet, CSV or text file, a directory of those, `synthetic:set[@split]`, or a hub name,
        `name[:config][@split]`. split: for names without their own; a single file has no splits and is used whole.
    streaming: rows are read when they are needed, not copied or counted; several sets alternate.
    cache_dir: where raw rows are cached by content; None: datasets' own cache.
    Raises ValueError if a set does not exist, cannot be read or has no records.
    """
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        raise ValueError(f"no data set given; give files, directories, hub names, or {', '.join(SYNTHETIC)}")
    sets = [load_set(name, split, streaming, None if cache_dir is None else str(cache_dir)) for name in names]
    if streaming and len(sets) > 1:
        return interleave_datasets(sets, stopping_strategy="all_exhausted_without_replacement")
    return concatenate_datasets(sets)


def load_set(name: str, split: str, streaming: bool, cache_dir: str | None) -> Rows:
    """The raw rows of one set. Raises ValueError if it does not exist."""
    base, _, named_split = (name, "", "") if Path(name).exists() else name.partition("@")
    if base.startswith("synthetic:"):
        return synthetic_set(base, named_split or split, streaming)
    if Path(base).exists():
        return local_set(Path(base), named_split, split, streaming, cache_dir)
    if Path(base).suffix in READERS or base.startswith((".", "/", "~")):
        raise ValueError(f"{name!r}: there is no such file or directory")
    return hub_set(base, named_split or split, streaming, cache_dir)


def synthetic_set(name: str, split: str, streaming: bool) -> Rows:
    """A synthetic set. Raises ValueError if there is no such set or split."""
    if name not in SYNTHETIC or split not in SIZES:
        available = f"{', '.join(SYNTHETIC)}, each with @{' and @'.join(SIZES)}"
        raise ValueError(f"'{name}@{split}': there is no such data set; allowed: {available}")
    records = SYNTHETIC[name](split)
    rows = [raw_row(f"{name}@{split}", number, as_json(record)) for number, record in enumerate(records, start=1)]
    dataset = Dataset.from_list(rows, features=RAW)
    return dataset.to_iterable_dataset() if streaming else dataset


def hub_set(name: str, split: str, streaming: bool, cache_dir: str | None) -> Rows:
    """A set of the Hugging Face hub. Raises ValueError if it cannot be read or has no records."""
    path, _, config = name.partition(":")
    try:
        dataset = load_dataset(path, config or None, split=split, streaming=streaming, cache_dir=cache_dir)
        columns = list(next(iter(dataset)))
    except StopIteration:
        raise ValueError(f"'{name}@{split}' has no records") from None
    except (OSError, ValueError) as error:  # datasets raises these if the network, set, config or split is missing
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{name!r}: there is no such file or directory, and split {split!r} of a data set of that name cannot be "
            f"read from the Hugging Face hub: {reason}"
        ) from error
    return dataset.map(
        lambda record, number: raw_row(f"{name}@{split}", number + 1, as_json(dict(record))),
        with_indices=True,
        remove_columns=columns,
        features=RAW,
    )


def local_set(path: Path, named_split: str, split: str, streaming: bool, cache_dir: str | None) -> Rows:
    """The records of a file or directory. Raises ValueError if there are none or they cannot be read."""
    files = [str(file) for file in files_of(path, named_split, split)]
    if streaming:
        return IterableDataset.from_generator(raw_rows, features=RAW, gen_kwargs={"paths": files})
    if next(raw_rows(files), None) is None:
        raise ValueError(f"'{path}' has no records")
    content = hashlib.sha256(Path(__file__).read_bytes())  # a changed reader may read other rows
    for file in files:
        content.update(f"{file} {digest_of(file)}\n".encode())
    key = content.hexdigest()[:32]
    try:
        return Dataset.from_generator(
            raw_rows, features=RAW, gen_kwargs={"paths": files}, cache_dir=cache_dir, fingerprint=key
        )
    except DatasetGenerationError as error:
        raise ValueError(str(error.__cause__)) from error


def files_of(path: Path, named_split: str, split: str) -> list[Path]:
    """The files of `path`, sorted by name.

    In a directory, those of the split ("train-00.jsonl", "train/00.jsonl") if there are any, else all.
    Raises ValueError for a split of a file, or if there is no file with a known suffix or of the split.
    """
    kinds = ", ".join(READERS)
    if path.is_file():
        if named_split:
            raise ValueError(f"'{path}@{named_split}': a file has no splits")
        if path.suffix not in READERS:
            raise ValueError(f"'{path}': the file name must end in {kinds}")
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in READERS and file.is_file())
    if not files:
        raise ValueError(f"'{path}': the directory contains no file that ends in {kinds}")
    of_split = [file for file in files if str(file.relative_to(path)).startswith(named_split or split)]
    if named_split and not of_split:
        raise ValueError(
            f"'{path}@{named_split}': the directory contains no file whose name begins with {named_split!r}"
        )
    return of_split or files


def digest_of(path: str) -> str:
    """A hash of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def raw_rows(paths: list[str]) -> Iterator[dict[str, Any]]:
    """The raw rows of files, numbered from 1 in each: by line for text and JSONL, else by record.

    Raises ValueError if a file cannot be parsed from some position on.
    """
    for path in paths:
        try:
            for number, record, problem in READERS[Path(path).suffix](path):
                yield raw_row(path, number, record, problem)
        except (csv.Error, pyarrow.ArrowInvalid, UnicodeDecodeError) as error:
            raise ValueError(f"{path!r} cannot be read: {error}") from error


def raw_row(source: str, number: int, record: str, problem: str = "") -> dict[str, Any]:
    """A raw row."""
    return {"source": source, "number": number, "record": record, "problem": problem}


def as_json(record: Any) -> str:
    """A record as JSON; a value without a JSON form becomes an object, so that it is not taken for text."""
    return json.dumps(record, default=lambda value: {"type": type(value).__name__})


Read = tuple[int, str, str]  # number, record, problem


def read_jsonl(path: str) -> Iterator[Read]:
    """A record per line; blank lines are skipped."""
    return read_lines(path, lambda line: line)


def read_text(path: str) -> Iterator[Read]:
    """A text per line; blank lines are skipped."""
    return read_lines(path, lambda line: as_json({"text": line}))


def read_lines(path: str, record_of: Callable[[str], str]) -> Iterator[Read]:
    """The lines of a file that are not blank, as records; a line that is not UTF-8 has a problem instead."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig").strip()
            except UnicodeDecodeError:
                yield number, "", "not UTF-8"
                continue
            if text:
                yield number, record_of(text), ""


def read_json(path: str) -> Iterator[Read]:
    """A list of records, an object whose only field `data` is that list, a single record, or JSONL."""
    try:
        content = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError):
        yield from read_jsonl(path)
        return
    if isinstance(content, dict):
        content = content["data"] if list(content) == ["data"] else [content]
    for number, record in enumerate(content if isinstance(content, list) else [content], start=1):
        yield number, as_json(record), ""


def read_csv(path: str) -> Iterator[Read]:
    """The rows below a header; every field is text."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        for number, record in enumerate(csv.DictReader(file, strict=True), start=1):
            surplus = record.pop(None, None)
            yield number, as_json(record), "more fields than the header has" if surplus else ""


def read_parquet(path: str) -> Iterator[Read]:
    """The rows of a Parquet file."""
    number = 0
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches():
            for record in batch.to_pylist():
                number += 1
                yield number, as_json(record), ""


READERS = {".jsonl": read_jsonl, ".json": read_json, ".csv": read_csv, ".txt": read_text, ".parquet": read_parquet}


def share(records: Rows, data_split: str, step: int, seed: int = 0, purpose: str = "") -> Rows:
    """The records of share number `step`, where the weights of the shares are `data_split`, such as DeepSpeed-Chat's
    "2,4,4".

    A record's share is a function of its content and the seed, not of the world size, the order or the other records.
    Equal records are in the same share, so shares do not overlap.
    purpose: shares for different purposes are drawn independently, so that a share of a share has records of all of
        them.
    Raises ValueError for invalid weights, a step without a weight, or a share without records.
    """
    weights = share_weights(data_split)
    if not 0 <= step < len(weights):
        raise ValueError(f"data_split: {data_split!r} has {len(weights)} shares, and step {step} needs one of its own")
    if isinstance(records, IterableDataset):
        return records.filter(lambda row: share_of(row["record"], weights, seed, purpose) == step)
    numbers = [i for i, record in enumerate(records["record"]) if share_of(record, weights, seed, purpose) == step]
    if not numbers:
        raise ValueError(f"data_split: {data_split!r} leaves no records for step {step}, of {len(records)}")
    return records.select(numbers)


def share_weights(data_split: str) -> list[float]:
    """The weights in "2,4,4". Raises ValueError if they are invalid."""
    try:
        weights = [float(part) for part in data_split.split(",")]
    except ValueError:
        weights = []
    if not weights or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise ValueError(f"data_split: {data_split!r} given; allowed: weights separated by commas, such as '2,4,4'")
    return weights


def share_of(record: str, weights: list[float], seed: int, purpose: str = "") -> int:
    """The number of the share that a record belongs to."""
    digest = hashlib.sha256(f"{purpose}{seed} {record}".encode()).digest()[:8]
    point = int.from_bytes(digest, "big") / 2**64 * sum(weights)
    return min(bisect(list(accumulate(weights)), point), len(weights) - 1)
