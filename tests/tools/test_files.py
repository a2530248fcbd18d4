"""Files that a user names: rows (one table: a file, and what it gives or why it is refused, with its place and in a line),
samples of them, and saved batches, which run nothing. Places that are no file: test_cli."""

import io
import json
import logging
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("rich")
from collate_npu import CollateError, Segments
from collate_npu.masks import dense
from collate_npu.tools import files
from collate_npu.tools.files import batch_of_file, read_rows, samples_of_rows, shipped_text

RECORDS, TWO = [{"text": "one"}, {"text": "two"}], ["one", "two"]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
SAID = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
SHARED = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
NONE = "line 1: got no text field"
LARGE = (1 << 31) - 1
FILES = [
    ("a.txt", b"one\n\ntwo\n", TWO),
    ("b.jsonl", b'{"text": "one"}\n{"content": "two"}\n', TWO), ("b.jsonl", LINES, TWO),
    ("bom.jsonl", '\ufeff{"text": "one"}\n\n{"text": "two"}\n'.encode(), TWO),
    ("c.jsonl", b'{"question": "one"}\n', r"line 1: got no text field \(columns question"),
    ("c.jsonl", b'{"text": "one"}\n\n{"text": 3}\n', r"line 3: got no text field \(text: 3"),
    ("c.jsonl", b'{"text": "one"}\n["two"]\n', "line 2: got a list"),
    ("c.jsonl", b'{"text": "one"}\n{"text": "tw\n', "line 2: got no JSON"),
    ("c.txt", "caf\u00e9".encode("latin-1"), "got UnicodeDecodeError: .* in UTF-8"),
    ("c.txt.gz", b"no text", "Name a file of .txt, .jsonl"), ("c.txt", b"\n\n", "got no rows"),
    ("c.txt", None, "no such file"), ("c.json", None, "no such file"), ("", None, "got a folder"),
    ("folder.json", None, "got a folder"), ("c.parquet", b"PAR1\x15\x04\x15\xf0\xffPAR1", "convert it to .jsonl"),
    ("c.json", b'[{"text": "on', "It cannot be read as a table"),
    ("c.csv", b"question,answer\none,two\n", r"row 0: got no text field \(columns question, answer"),
    ("a.json", json.dumps(RECORDS).encode(), TWO), ("b.json", LINES, TWO),
    ("a.csv", b"text\none\ntwo\n", TWO), ("a.parquet", RECORDS, TWO),
]  # fmt: skip
HELD = [
    ({"messages": SAID}, SAID), ({"conversations": SHARED}, SAID), ({"text": "flattened", "messages": SAID}, SAID),
    ({"input_ids": [1, 2], "text": "one"}, {"input_ids": [1, 2], "labels": [1, 2]}),
    *(({"input_ids": ids, "labels": labels}, {"input_ids": ids, "labels": labels}) for ids, labels in (
        ([1, 2], [-100, 2]), ([LARGE, -LARGE], [1, -LARGE]))),
    *(({"input_ids": ids, "labels": labels}, NONE) for ids, labels in (
        ([LARGE + 1], None), ([1, 2], [1, -LARGE - 1]), ([1, 2], [1]), ([], None), ([True], None), ("12", None),
        ([1, 2.5], None))),
    *(({"messages": value}, NONE) for value in ("said", 5, ["said"], [*SAID, 5], {"role": "user"}, [{"role": "user"}])),
]  # fmt: skip
FILES += [("held.jsonl", json.dumps(record).encode(), row if row == NONE else [row]) for record, row in HELD]


@pytest.mark.parametrize(("name", "content", "rows"), FILES)
def test_a_file_gives_its_rows_or_says_where_it_is_bad(tmp_path, monkeypatch, capfd, name, content, rows):
    """Lines need no package; a table leaves no cache, asks nobody and logs nothing."""
    path = tmp_path / name
    if table := re.search(r"\.(json|csv|parquet)$", name):
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        monkeypatch.setattr("socket.socket.connect", lambda *args: pytest.fail("a connection"))
        logging.getLogger("datasets").setLevel(logging.WARNING)
    else:
        monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    (tmp_path / "folder.json").mkdir()
    if isinstance(content, list):
        datasets.Dataset.from_list(content).to_parquet(str(path))
        capfd.readouterr()
    elif content is not None:
        path.write_bytes(content)
    if isinstance(rows, list):
        assert read_rows(path) == rows
        assert not (table and logging.getLogger("datasets").isEnabledFor(logging.CRITICAL))
        assert not (tmp_path / "cache").exists()
    else:
        with pytest.raises(CollateError, match=rows) as error:
            read_rows(path)
        assert (str(error.value).startswith(str(path)), "\n" in str(error.value)) == (True, False)
        assert not capfd.readouterr().err


def test_standard_input_a_pipe_and_a_table_without_its_package(tmp_path, monkeypatch):
    for content in (b"one\ntwo\n", LINES, b'{"text": "one"}'):
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
        assert read_rows(Path("-")) == TWO[: 1 + content.count(b"\n")]
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with subprocess.Popen(["printf", "one\ntwo\n"], stdout=subprocess.PIPE) as shell:
        assert read_rows(Path(f"/proc/self/fd/{shell.stdout.fileno()}")) == TWO  # the shell's `<(...)`
    (tmp_path / "a.json").write_text(json.dumps(RECORDS), encoding="utf-8")
    with pytest.raises(CollateError, match="pip install datasets"):
        read_rows(tmp_path / "a.json")


def test_of_many_lines_the_first_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_ROWS", 2)
    (tmp_path / "a.txt").write_text("one\ntwo\nsix\n", encoding="utf-8")
    assert read_rows(tmp_path / "a.txt") == TWO


class Letters:
    eos_token_id = 0

    def __call__(self, text, *, add_special_tokens, truncation, max_length):
        ids = [0] * add_special_tokens + [*text.encode()]
        return {"input_ids": ids[:max_length] if truncation else ids}


def test_samples_are_cut_to_drawn_lengths_and_closed():
    """The text of ours is ragged and has no line twice."""
    lines = shipped_text()
    sizes = sorted(len(line.encode()) for line in lines)
    assert (len(lines), len(set(lines)), sizes[0] < 10, sizes[-1] > 200) == (300, 300, True, True)
    drawn = samples_of_rows(["abcdefghijklmnopqrstuvwxyz" * 2] * 300, Letters(), count=200, max_length=17, seed=1)
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


# --- saved batches and masks

TRUTH = Segments.from_lengths([3, 5], side="left")
BATCH = {"input_ids": TRUTH.ids, "attention_mask_2d": TRUTH.keep, "attention_mask": dense(TRUTH)}


@pytest.mark.parametrize("ending", files.LOADERS)
def test_a_saved_batch_is_the_batch(tmp_path, ending):
    path = tmp_path / f"held{ending}"
    if ending == ".safetensors":
        pytest.importorskip("safetensors.torch").save_file(BATCH, path)
    elif ending == ".npz":
        np.savez(path, **{key: value.numpy() for key, value in BATCH.items()})
    else:
        torch.save(BATCH, path)
    held = batch_of_file(path)
    assert held.keys() == BATCH.keys()
    assert all(torch.equal(held[key], value) for key, value in BATCH.items())


class Anything:
    """What a file must not build."""


@pytest.mark.parametrize(
    ("name", "write", "said"),
    [
        ("x.pkl", lambda path: path.write_bytes(b""), "Such files end with"),
        ("x.pt", lambda path: path.write_bytes(b"no"), r"torch\.save\("),
        ("x.pt", lambda path: torch.save({"a": Anything()}, path), "without running anything"),
        ("x.pt", lambda path: torch.save([1], path), "a dict of tensors"),
        ("x.npz", lambda path: path.write_bytes(b"no"), r"torch\.save\("),
        ("x.npz", lambda path: np.savez(path, a=np.array([{}], dtype=object)), "allow_pickle=False"),
        ("x.pt", lambda path: None, "no such file"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, name, write, said):
    write(tmp_path / name)
    with pytest.raises(CollateError, match=said) as error:
        batch_of_file(tmp_path / name)
    assert "\n" not in str(error.value)
