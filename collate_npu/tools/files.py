"""Files that a user names: a saved batch or mask, and rows of text, conversations or tokens.

A batch or a mask is read without running anything that the file holds. Rows are checked, and named by their place; the first
`MOST_ROWS` are read. Lines (.txt, .jsonl, standard input) need nothing else. .json, .parquet and .csv
are read by the `datasets` package, without a network and without a cache that stays.
"""

from __future__ import annotations

import io
import json
import logging
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module, resources
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from collate_npu.errors import CollateError, a_type, explain
from collate_npu.proof.measure import Batch
from collate_npu.tools.user_code import check_file, describe_error, refused

RECIPE = (
    "Save it in your training loop: torch.save({k: v.cpu() for k, v in batch.items() if torch.is_tensor(v)}, 'batch.pt')."
)


def check_place(path: Path, ending: str = "") -> None:
    """Refuse a file that could not be written, before anything is measured for it; a link, behind which another file would
    be; and a name that ends otherwise."""
    if not path.name.endswith(ending):
        rule, remedy = f"This file is written as {ending}.", f"End the name with {ending}."
        raise CollateError(explain(str(path), repr(path.suffix), rule, remedy))
    if path.is_symlink():
        raise CollateError(explain(str(path), f"a link to {path.readlink()}", "It is one file.", "Name that file itself."))
    if path.is_dir() or not path.absolute().parent.is_dir():
        got = "a folder" if path.is_dir() else "no folder of that name"
        raise CollateError(explain(str(path), got, "It is one file.", "Name a file in a folder that exists."))


def batch_of_file(path: Path) -> dict[str, Any]:
    """A saved batch: a dict of tensors (`.pt`, `.pth`), `.safetensors` or `.npz`."""
    check_file(path, [*LOADERS], RECIPE)
    try:
        held = LOADERS[path.suffix](path)
    except Exception as error:  # torch, numpy and safetensors raise whatever they meet in the bytes
        rule = "Files are read without running anything they hold, so they hold tensors, numbers and strings alone."
        raise CollateError(explain(str(path), describe_error(error).partition(". ")[0], rule, RECIPE)) from None
    if isinstance(held, Mapping) and held and all(isinstance(key, str) for key in held):
        return dict(held)
    rule = "A saved batch is a dict of tensors by their keys."
    raise CollateError(explain(str(path), type(held).__name__, rule, RECIPE))


_TORCH = partial(torch.load, map_location="cpu", weights_only=True)
LOADERS: dict[str, Callable[[Path], Any]] = {
    ".pt": _TORCH,
    ".pth": _TORCH,
    ".safetensors": lambda path: import_module("safetensors.torch").load(path.read_bytes()),
    ".npz": lambda path: {key: torch.from_numpy(held) for key, held in np.load(path, allow_pickle=False).items()},
}


Record = str | list[dict[str, str]] | Batch
"""Text; messages with role and content; or `input_ids` with `labels`, used as they are."""

_COLUMNS = ("input_ids", "messages", "conversations", "text", "content")
"""What is read of a row, the first that it has."""
MOST_ROWS = 20_000
_LOOKED_AT = 2_000
"""Rows that are tokenized at most: of more, so many are drawn first."""
_LETTERS = 1024
"""Of a text for each token that it is cut to; no more of it are tokenized."""
TABLES = {".json": "from_json", ".parquet": "from_parquet", ".csv": "from_csv"}
_READ = "Name a file of .txt, .jsonl, .json, .parquet or .csv, or pipe text to --data -."
_RULE = "Data has a column text, content, messages, conversations or input_ids; a .txt file has one sample a line, in UTF-8."


def shipped_text() -> list[Record]:
    """The lines shipped with the package, written for it: a few hundred, ragged, in several scripts."""
    return [*(resources.files("collate_npu") / "tools" / "data" / "text.txt").read_text(encoding="utf-8").splitlines()]


def read_rows(path: Path) -> list[Record]:
    """The rows of a file, or of standard input (`-`). Raises `CollateError` with the file and the row that is bad."""
    if str(path) != "-":
        remedy = "A saved batch goes to --batch." if path.suffix in LOADERS else _READ
        check_file(path, [".txt", ".jsonl", *TABLES], remedy)
    rows = list(_table(path) if path.suffix in TABLES else _lines(path))
    if not rows:
        raise CollateError(explain(str(path), "no rows", _RULE, "Name a file that has some."))
    return rows


def _lines(path: Path) -> Iterator[Record]:
    name = "standard input" if str(path) == "-" else str(path)
    with (
        refused(name, "", _RULE, _READ),
        io.TextIOWrapper(sys.stdin.buffer if str(path) == "-" else path.open("rb"), encoding="utf-8-sig") as text,
    ):
        numbered = [(n, line.rstrip("\n")) for n, line in enumerate(islice(text, MOST_ROWS), 1) if line.strip()]
    jsonl = path.suffix == ".jsonl" or (str(path) == "-" and bool(numbered) and numbered[0][1].lstrip().startswith("{"))
    for n, line in numbered:
        if not jsonl:
            yield line
            continue
        where = f"{name}, line {n}"
        with refused(where, "no JSON", "Each line is one JSON object.", "Correct the line, or leave it out."):
            record = json.loads(line)
        yield _row(where, record)


def _table(path: Path) -> Iterator[Record]:
    with refused(str(path), "", "The datasets package reads it.", "Run pip install datasets, or convert it to .jsonl."):
        datasets: Any = import_module("datasets")
    datasets.disable_progress_bars()
    logging.getLogger("datasets").setLevel(logging.CRITICAL + 1)  # it would log a traceback of what is raised here in a line
    with refused(str(path), "", "It cannot be read as a table.", "Write it again, or convert it to .jsonl."):
        try:
            with tempfile.TemporaryDirectory(prefix="collate-npu-") as cache:
                table = getattr(datasets.Dataset, TABLES[path.suffix])(str(path), cache_dir=cache, keep_in_memory=True)
                records = table.select(range(min(len(table), MOST_ROWS))).to_list()
        except Exception as error:  # of datasets' own, which says less than what caused it
            raise error.__cause__ or error from None
    for n, record in enumerate(records):
        yield _row(f"{path}, row {n}", record)


def _row(where: str, record: Any) -> Record:
    """What a record holds: its tokens, else its conversation, else its text."""
    if not isinstance(record, dict):
        raise CollateError(explain(where, a_type(record), _RULE, 'Write objects: {"text": "..."}.'))
    held = {key: record[key] for key in _COLUMNS if record.get(key) is not None}
    for key, value in held.items():
        if key == "input_ids" and (tokens := _tokens(value, record.get("labels"))):
            return tokens
        if key in ("messages", "conversations") and (messages := _messages(value)):
            return messages
        if key in ("text", "content") and isinstance(value, str):
            return value
    got = "; ".join(f"{key}: {str(value)[:40]}" for key, value in held.items()) or f"columns {', '.join(map(str, record))}"
    remedy = "Name the column text, or tokenize it (input_ids: whole numbers, labels: as many)."
    raise CollateError(explain(where, f"no text field ({got})", _RULE, remedy))


def _tokens(ids: Any, labels: Any) -> Batch | None:
    labels = ids if labels is None else labels
    whole = all(isinstance(x, list) and x and all(type(n) is int and abs(n) < 1 << 31 for n in x) for x in (ids, labels))
    return {"input_ids": ids, "labels": labels} if whole and len(ids) == len(labels) else None


_SPEAKERS = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names."""


def _messages(value: Any) -> list[dict[str, str]] | None:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        return None
    pairs = [(each.get("role", each.get("from")), each.get("content", each.get("value"))) for each in value]
    if not all(isinstance(role, str) and isinstance(text, str) for role, text in pairs):
        return None
    return [{"role": _SPEAKERS.get(role, role), "content": text} for role, text in pairs]


def samples_of_rows(rows: Sequence[Record], tokenizer: Any, *, count: int, max_length: int, seed: int = 0) -> list[Batch]:
    """`count` features, `input_ids` and `labels`: text is cut to lengths drawn up to `max_length`, and closed with eos.

    Lengths are drawn: long lines are ragged too. Where pad is eos, the last token looks like padding. `input_ids` stay.
    """
    rng = random.Random(seed)
    looked_at = rng.sample(rows, _LOOKED_AT) if len(rows) > _LOOKED_AT else rows
    drawn = [feature for row in looked_at if (feature := encoded(row, tokenizer, max_length))["input_ids"]]
    if len(drawn) < count:
        rule = f"The audit draws {count} lines."
        raise CollateError(explain("data", f"{len(drawn)} lines with tokens", rule, "Give more text, or fewer --batches."))
    eos = [] if tokenizer is None or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    longest = max(max_length - len(eos), 1)
    cuts = [(rng.randint(max(longest // 8, 1), longest), feature) for feature in rng.sample(drawn, count)]
    closed = [feature if "labels" in feature else {"input_ids": feature["input_ids"][:n] + eos} for n, feature in cuts]
    return [{"labels": feature["input_ids"], **feature} for feature in closed]


def encoded(row: Record, tokenizer: Any, max_length: int) -> Batch:
    """`input_ids` of a row, cut to `max_length`; a row of tokens as it is."""
    if isinstance(row, dict):
        return row
    if tokenizer is None:
        rule = "Text becomes tokens by the tokenizer of the checkpoint."
        raise CollateError(explain("tokenizer", "no file of a tokenizer", rule, "Name the folder of one with --tokenizer."))
    if isinstance(row, list):
        remedy = "Name, with --tokenizer, the folder of one that has it, or give a column text."
        if not getattr(tokenizer, "chat_template", None):
            rule = "Rows of messages become text by the chat template of the tokenizer."
            raise CollateError(explain("tokenizer", "no chat template", rule, remedy))
        with refused("chat template", "", f"It is given {str(row)[:80]}.", remedy):
            row = str(tokenizer.apply_chat_template(row, tokenize=False))
    how = {"add_special_tokens": False, "truncation": True, "max_length": max_length}
    return {"input_ids": tokenizer(row[: _LETTERS * max_length], **how)["input_ids"]}
