"""Every source gives the same raw rows; unreadable sources raise with their name; shares are disjoint and stable."""

import csv
import json
import os
from itertools import chain

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset

from rlhf_examples.data import records
from rlhf_examples.data.records import load_records, share

PAIRS = [
    {"prompt": "Wie heißt du?\n", "chosen": "Zoë 🙂", "rejected": 'say "no", twice'},
    {"prompt": "NA", "chosen": "3", "rejected": "null"},  # not read as a missing value or a number
    {"prompt": "x", "chosen": "y", "rejected": "z"},
]


def write(path, rows: list[dict]):
    """A file in the format of its suffix, written by another library."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def raw_rows(names, tmp_path, **settings) -> list[dict]:
    """The raw rows as a list."""
    names = list(map(str, names)) if isinstance(names, list) else str(names)
    return list(load_records(names, cache_dir=tmp_path / "cache", **settings))


def contents(rows: list[dict]) -> list[dict]:
    assert not any(row["problem"] for row in rows)
    return [json.loads(row["record"]) for row in rows]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_file_format_gives_the_same_records(suffix, streaming, tmp_path):
    path = write(tmp_path / f"pairs{suffix}", PAIRS)
    rows = raw_rows(path, tmp_path, streaming=streaming)
    assert contents(rows) == PAIRS
    assert [(row["source"], row["number"]) for row in rows] == [(str(path), number) for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"data": [{"text": "a"}, {"text": "b"}]}', [{"text": "a"}, {"text": "b"}]),
        ('{"text": "a"}', [{"text": "a"}]),
        ('{"messages": [{"role": "user", "content": "a"}]}', [{"messages": [{"role": "user", "content": "a"}]}]),
        ('{"text": "a"}\n{"text": "b"}\n', [{"text": "a"}, {"text": "b"}]),
        ("[3]", [3]),
    ],
)
def test_json_layouts(text, expected, tmp_path):
    (tmp_path / "x.json").write_text(text)
    assert contents(raw_rows(tmp_path / "x.json", tmp_path)) == expected


def test_lines_of_a_text_file_are_records(tmp_path):
    (tmp_path / "x.txt").write_bytes("\ufeffone\r\n\n  two \n{3}".encode())
    rows = raw_rows(tmp_path / "x.txt", tmp_path)
    assert contents(rows) == [{"text": "one"}, {"text": "two"}, {"text": "{3}"}]
    assert [row["number"] for row in rows] == [1, 3, 4], "`number` is not the line number"


def test_broken_lines_are_reported_and_others_read(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a"}\n{"text": \n\xff\xfe\n{"text": "b"}\n')
    rows = raw_rows(tmp_path / "x.jsonl", tmp_path)
    assert [row["problem"] for row in rows] == ["", "", "not UTF-8", ""]
    assert rows[1]["record"] == '{"text":' and rows[3]["record"] == '{"text": "b"}'


def test_csv_rows_that_do_not_match_the_header(tmp_path):
    (tmp_path / "x.csv").write_text("prompt,chosen\na,b,c\nd\n")
    long, short = raw_rows(tmp_path / "x.csv", tmp_path)
    assert long["problem"] == "more fields than the header has"
    assert json.loads(short["record"]) == {"prompt": "d", "chosen": None}


def test_values_that_json_cannot_represent_are_not_read_as_text(tmp_path):
    table = pyarrow.table({"prompt": pyarrow.array([b"bytes"]), "text": ["a"]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    assert contents(raw_rows(tmp_path / "x.parquet", tmp_path)) == [{"prompt": {"type": "bytes"}, "text": "a"}]


@pytest.mark.parametrize(
    ("name", "content"),
    [("x.parquet", b"PAR1 no"), ("x.csv", b'prompt\n"never closed'), ("x.csv", b"prompt\n\xff"), ("x.parquet", b"")],
)
@pytest.mark.parametrize("good_first", [False, True])
def test_a_damaged_file_raises_with_its_name(name, content, good_first, tmp_path):
    (tmp_path / name).write_bytes(content)
    if good_first:  # so that the error occurs while rows are copied
        write(tmp_path / f"a{(tmp_path / name).suffix}", PAIRS)
    with pytest.raises(ValueError, match=f"{name}' cannot be read: "):
        raw_rows(tmp_path if good_first else tmp_path / name, tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("name", "content"),
    [("x.jsonl", "\n\n"), ("x.json", "[]"), ("x.json", ""), ("x.csv", "prompt,chosen\n"), ("x.csv", ""), ("x.txt", "")],
)
def test_a_file_without_records_raises(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name}' has no records"):
        raw_rows(tmp_path / name, tmp_path)


def test_a_directory_gives_its_files_or_those_of_the_split(tmp_path):
    for name in ("train-1", "test", "train-0"):
        write(tmp_path / "split" / f"{name}.jsonl", [{"text": name}])
    write(tmp_path / "whole" / "b.jsonl", [{"text": "b"}])
    write(tmp_path / "whole" / "deep" / "a.csv", [{"text": "a"}])
    (tmp_path / "whole" / "README.md").write_text("not data")

    def texts(name: str, split: str) -> list[str]:
        return [record["text"] for record in contents(raw_rows(f"{tmp_path}/{name}", tmp_path, split=split))]

    assert texts("split", "train") == texts("split@train", "test") == ["train-0", "train-1"]
    assert texts("split", "test") == ["test"]
    assert texts("split", "validation") == ["test", "train-0", "train-1"]
    assert texts("whole", "train") == ["b", "a"]
    with pytest.raises(ValueError, match="the directory contains no file whose name begins with 'validation'"):
        texts("split@validation", "train")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.jsonl", "there is no such file or directory"),
        ("./nowhere", "there is no such file or directory"),
        ("{}/x.jsonl@test", "a file has no splits"),
        ("{}/x.doc", "the file name must end in .jsonl, .json, .csv, .txt, .parquet"),
        ("{}/empty", "the directory contains no file that ends in .jsonl, .json, .csv, .txt, .parquet"),
        ("synthetic:songs", "there is no such data set; allowed: synthetic:stories, synthetic:preferences, "),
        ("synthetic:stories@validation", "each with @train and @test"),
        ([], "no data set given"),
    ],
)
def test_invalid_set_names_raise(name, message, tmp_path):
    write(tmp_path / "x.jsonl", PAIRS)
    (tmp_path / "x.doc").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        load_records(name.format(tmp_path) if name else name)


@pytest.mark.parametrize("streaming", [False, True])
def test_an_unreachable_hub_raises_value_error(streaming, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match="no such file or directory, and split 'test' of a data set of that name cannot be"
    ) as e:
        load_records("nobody/nothing:main@test", streaming=streaming)
    assert "Hugging Face hub: " in str(e.value) and "nobody/nothing" in str(e.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_names_with_config_and_split(streaming, monkeypatch):
    """Stands in for the hub: records requests and returns a fixed set."""
    requests = []

    def load_dataset(path, name, *, split, streaming, cache_dir):
        requests.append((path, name, split))
        rows = Dataset.from_list([{**pair, "id": number} for number, pair in enumerate(PAIRS)])
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr(records, "load_dataset", load_dataset)
    rows = list(load_records("org/set:main@test[:3]", streaming=streaming))
    load_records(["org/set", "org/set@b", "org/set:c"], split="a", streaming=streaming)
    assert requests == [
        ("org/set", "main", "test[:3]"),
        ("org/set", None, "a"),
        ("org/set", None, "b"),
        ("org/set", "c", "a"),
    ]
    assert contents(rows) == [{**pair, "id": number} for number, pair in enumerate(PAIRS)]
    assert [(row["source"], row["number"]) for row in rows] == [("org/set:main@test[:3]", i) for i in (1, 2, 3)]


@pytest.mark.parametrize("streaming", [False, True])
def test_sets_with_different_columns_are_mixed(streaming, tmp_path):
    long = write(tmp_path / "long.jsonl", [{"text": str(i)} for i in range(20)])
    short = write(tmp_path / "short.parquet", PAIRS)
    rows = raw_rows([long, short, "synthetic:openings@test"], tmp_path, streaming=streaming)
    counts = {source: [row["number"] for row in rows if row["source"] == source] for source in (str(long), str(short))}
    assert counts == {str(long): list(range(1, 21)), str(short): [1, 2, 3]}
    assert len(rows) == 23 + 24
    if streaming:
        assert [row["source"] for row in rows[:3]] == [str(long), str(short), "synthetic:openings@test"], (
            "streamed sets do not alternate"
        )


def test_a_changed_file_with_equal_size_and_time_is_read_again(tmp_path):
    path = write(tmp_path / "x.jsonl", [{"text": "a"}])
    before, times = path.stat(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    assert contents(raw_rows(path, tmp_path)) == [{"text": "a"}]
    write(path, [{"text": "b"}])
    os.utime(path, ns=times)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert contents(raw_rows(path, tmp_path)) == [{"text": "b"}]


def test_an_unchanged_file_is_not_copied_again(tmp_path):
    path = write(tmp_path / "x.jsonl", [{"text": "a"}])
    first = load_records(str(path), cache_dir=tmp_path / "cache").cache_files
    os.utime(path, ns=(1, 1))
    times = {file["filename"]: os.stat(file["filename"]).st_mtime_ns for file in first}
    again = load_records(str(path), cache_dir=tmp_path / "cache").cache_files
    assert times and {file["filename"]: os.stat(file["filename"]).st_mtime_ns for file in again} == times


def texts_of_share(rows, *request) -> list[str]:
    return [json.loads(row["record"])["text"] for row in share(rows, *request)]


@pytest.fixture
def texts_file(tmp_path):
    """A file of 2000 distinct texts."""
    return write(tmp_path / "x.jsonl", [{"text": f"text {i}"} for i in range(2000)])


def test_shares_are_disjoint_and_have_their_weights(texts_file, tmp_path):
    rows = load_records(str(texts_file), cache_dir=tmp_path / "cache")
    shares = [texts_of_share(rows, "2,4,4", step) for step in range(3)]
    assert sorted(chain(*shares)) == sorted(f"text {i}" for i in range(2000))
    for found_texts, weight in zip(shares, (0.2, 0.4, 0.4), strict=True):
        # The count is binomial; 5 sigma.
        assert len(found_texts) == pytest.approx(2000 * weight, abs=5 * (2000 * weight * (1 - weight)) ** 0.5)
    assert texts_of_share(rows, "2,4,4", 0, 1) != shares[0], "the share does not depend on the seed"
    assert texts_of_share(rows, "0.5,1,1", 2) == shares[2], "weights are not relative"


def test_a_share_does_not_depend_on_order_duplicates_or_streaming(texts_file, tmp_path):
    rows = load_records(str(texts_file), cache_dir=tmp_path / "cache")
    expected = texts_of_share(rows, "2,4,4", 1)
    doubled = write(tmp_path / "y.jsonl", [{"text": f"text {i}"} for i in (*reversed(range(2000)), *range(50))])
    rows = load_records(str(doubled), cache_dir=tmp_path / "cache")
    repeated = [text for text in expected if int(text.split()[1]) < 50]
    assert repeated and sorted(texts_of_share(rows, "2,4,4", 1)) == sorted(expected + repeated)
    assert texts_of_share(load_records(str(texts_file), streaming=True), "2,4,4", 1) == expected


@pytest.mark.parametrize(
    ("data_split", "step", "message"),
    [
        ("2,4,4", 3, "has 3 shares, and step 3 needs one of its own"),
        ("2,4,4", -1, "step -1 needs one of its own"),
        ("1,x", 0, "'1,x' given; allowed: weights separated by commas"),
        ("", 0, "allowed: weights separated by commas"),
        ("2,-1", 0, "allowed: weights separated by commas"),
        ("0,0", 0, "allowed: weights separated by commas"),
        ("nan,1", 0, "allowed: weights separated by commas"),
        ("1,0", 1, "leaves no records for step 1, of 3"),
    ],
)
def test_invalid_shares_raise(data_split, step, message, tmp_path):
    rows = load_records(str(write(tmp_path / "x.jsonl", PAIRS)), cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match=message):
        share(rows, data_split, step)
