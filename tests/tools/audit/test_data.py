"""Data: every form of a file gives the same rows, and what is bad is refused with its file and row."""

import gzip
import io
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from collate_npu import CollateError
from collate_npu.tools.audit import data
from collate_npu.tools.audit.data import _messages, _tokens, encoded, read_rows, samples_of_rows, shipped_text

RECORDS = [{"text": "one"}, {"text": "two"}]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


def test_shipped_text_is_ragged_and_unique():
    lines = shipped_text()
    sizes = sorted(len(line.encode()) for line in lines)
    assert len(lines) == len(set(lines)) == 300
    assert sizes[0] < 10 < 200 < sizes[-1]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", b"one\n\ntwo\n"),
        ("a.log", b"one\ntwo"),
        ("a.txt.gz", gzip.compress(b"one\ntwo\n", mtime=0)),
        ("b.jsonl", b'{"text": "one"}\n{"content": "two"}\n'),
        ("b.ndjson", LINES),
        ("b.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("bom.jsonl", '\ufeff{"text": "one"}\n\n{"text": "two"}\n'.encode()),
    ],
)
def test_lines_need_no_package(tmp_path, monkeypatch, name, content):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    (tmp_path / name).write_bytes(content)
    assert read_rows(tmp_path / name) == ["one", "two"]


@pytest.mark.parametrize("content", [b"one\ntwo\n", LINES, b'{"text": "one"}'])
def test_standard_input(monkeypatch, content):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    assert read_rows(Path("-")) == ["one", "two"][: 1 + content.count(b"\n")]


@pytest.mark.parametrize("name", ["a.json", "b.json", "a.csv", "a.parquet", "a.csv.gz", "a.json.gz"])
def test_tables_by_datasets_leave_no_cache_and_ask_nobody(tmp_path, monkeypatch, name):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("socket.socket.connect", lambda *args: pytest.fail("a connection"))
    path = tmp_path / name
    if name == "a.parquet":
        datasets.Dataset.from_list(RECORDS).to_parquet(str(path))
    else:
        content = {"a": json.dumps(RECORDS).encode(), "b": LINES}[name[0]] if ".json" in name else b"text\none\ntwo\n"
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    logging.getLogger("datasets").setLevel(logging.WARNING)
    assert read_rows(path) == ["one", "two"]
    assert not (tmp_path / "cache").exists()
    assert not logging.getLogger("datasets").isEnabledFor(logging.CRITICAL)


SAID = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


@pytest.mark.parametrize(
    ("record", "row"),
    [
        ({"messages": SAID}, SAID),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}, SAID),
        ({"text": "flattened", "messages": SAID}, SAID),
        ({"input_ids": [1, 2], "text": "one"}, {"input_ids": [1, 2], "labels": [1, 2]}),
        ({"input_ids": [1, 2], "labels": [-100, 2]}, {"input_ids": [1, 2], "labels": [-100, 2]}),
    ],
)
def test_what_a_row_holds(tmp_path, record, row):
    (tmp_path / "a.jsonl").write_text(json.dumps(record), encoding="utf-8")
    assert read_rows(tmp_path / "a.jsonl") == [row]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("c.jsonl", b'{"question": "one"}\n', r"line 1: got no text field \(columns question"),
        ("c.jsonl", b'{"text": "one"}\n\n{"text": 3}\n', r"line 3: got no text field \(text: 3"),
        ("c.jsonl", b'{"text": "one"}\n["two"]\n', "line 2: got a list"),
        ("c.jsonl", b'{"text": "one"}\n{"text": "tw\n', "line 2: got no JSON"),
        ("c.jsonl", b'{"messages": [{"role": "user"}]}\n', "line 1: got no text field"),
        ("c.jsonl", b'{"input_ids": [1, 2.5]}\n', "line 1: got no text field"),
        ("c.jsonl", b'{"input_ids": [1, 2], "labels": [1]}\n', "line 1: got no text field"),
        ("c.txt", "caf\u00e9".encode("latin-1"), "got UnicodeDecodeError: .* in UTF-8"),
        ("c.txt.gz", b"no archive", "c.txt.gz: got BadGzipFile: Not a gzipped file"),
        ("c.txt", b"\n\n", "got no rows"),
        ("c.txt", None, "no such file"),
        ("c.json", None, "no such file"),
        ("", None, "got a folder"),
        ("folder.json", None, "got a folder"),
        ("c.parquet", b"PAR1\x15\x04\x15\xf0\xffPAR1", "convert it to .jsonl"),
        ("c.json", b'[{"text": "on', "It cannot be read as a table"),
        ("c.csv", b"question,answer\none,two\n", r"row 0: got no text field \(columns question, answer"),
    ],
)
def test_what_is_no_data_is_refused_with_its_place_in_a_line(tmp_path, capfd, name, content, said):
    if name.endswith((".json", ".csv", ".parquet")):
        pytest.importorskip("datasets")
    (tmp_path / "folder.json").mkdir()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CollateError, match=said) as error:
        read_rows(tmp_path / name)
    assert str(error.value).startswith(str(tmp_path / name))
    assert "\n" not in str(error.value)
    assert not capfd.readouterr().err


def test_text_becomes_tokens_without_what_a_tokenizer_adds():
    def tokenizer(text, *, add_special_tokens, truncation, max_length):
        ids = [0] * add_special_tokens + [*text.encode()]
        return {"input_ids": ids[:max_length] if truncation else ids}

    assert encoded("abc", tokenizer, 2) == {"input_ids": [97, 98]}


def test_a_table_without_the_package_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    (tmp_path / "a.json").write_text(json.dumps(RECORDS), encoding="utf-8")
    with pytest.raises(CollateError, match="pip install datasets"):
        read_rows(tmp_path / "a.json")


@pytest.mark.parametrize("many", [False, True], ids=["in many groups", "in one group"])
def test_a_parquet_of_more_than_is_read_gives_its_first_rows_or_is_refused(tmp_path, monkeypatch, many):
    """One group can hold any number of values in a few bytes; many small ones are read as far as wanted."""
    pytest.importorskip("datasets")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(data, "MOST_BYTES", 1000)
    table = pytest.importorskip("pyarrow").table({"input_ids": [[1, 2, 3, 4, 5]] * 4000})
    path = tmp_path / "large.parquet"
    parquet.write_table(table, path, row_group_size=4000 if many else 200)
    if many:
        with pytest.raises(CollateError, match="row group 0 holds 20000 values"):
            read_rows(path)
    else:
        assert 0 < len(read_rows(path)) < 4000
        monkeypatch.setattr(data, "MOST_BYTES", 1 << 30)
        monkeypatch.setattr(data, "MOST", 130)
        assert len(read_rows(path)) == 130


@pytest.mark.parametrize(
    ("ids", "labels", "taken"),
    [
        ([(1 << 31) - 1, -(1 << 31) + 1], None, True),
        ([1 << 31], None, False),
        ([1, 2], [1, -(1 << 31)], False),
        ([1, 2], [-100, 2], True),
        ([1, 2], [1], False),
        ([], None, False),
        ([True], None, False),
        ("12", None, False),
    ],
)
def test_tokens_are_whole_numbers_of_32_bits_with_as_many_labels(ids, labels, taken):
    assert (_tokens(ids, labels) is not None) is taken


@pytest.mark.parametrize("value", ["said", 5, None, ["said"], [{"role": "user", "content": "hi"}, 5], {"role": "user"}])
def test_what_is_no_list_of_messages_is_none(value):
    assert _messages(value) is None


class Letters:
    eos_token_id = 0

    def __call__(self, text, *, max_length, **settings):
        return {"input_ids": [*text.encode()][:max_length]}


def test_samples_are_cut_to_drawn_lengths_and_closed():
    lines = ["abcdefghijklmnopqrstuvwxyz" * 2] * 300
    drawn = samples_of_rows(lines, Letters(), count=200, max_length=17, seed=1)
    lengths = [len(each["input_ids"]) for each in drawn]
    assert (min(lengths), max(lengths)) == (3, 17)
    assert all(each["input_ids"][-1] == 0 and 0 not in each["input_ids"][:-1] for each in drawn)
    assert all(each["labels"] == each["input_ids"] for each in drawn)
    for most in (1, 2):
        assert {len(each["input_ids"]) for each in samples_of_rows(lines, Letters(), count=9, max_length=most)} == {2}
    tokens = [{"input_ids": [1, 2], "labels": [-100, 2]}] * 3
    assert samples_of_rows(tokens, None, count=3, max_length=4) == tokens
    with pytest.raises(CollateError, match="got 3 lines with tokens"):
        samples_of_rows(tokens, None, count=4, max_length=4)
