"""Data: rows of a file or of standard input, as text, as a conversation or as tokens; each is checked, and named by place.

Lines (.txt, .jsonl, standard input, each of them as .gz) need nothing else. .json, .parquet and .csv are read by the
`datasets` package, without a network and without a cache that stays. A table is read up to `MOST` rows.
"""

from __future__ import annotations

import gzip
import json
import logging
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from collate_npu.errors import CollateError, explain
from collate_npu.testing.measure import Batch
from collate_npu.tools.audit.attentions import first_line

Row = str | list[dict[str, str]] | Batch
"""Text; messages with role and content; or `input_ids` with `labels`, used as they are."""

COLUMNS = ("input_ids", "messages", "conversations", "text", "content")
"""What is read of a row, the first that it has."""
MOST = 20_000
TABLES = {".json": "from_json", ".parquet": "from_parquet", ".csv": "from_csv"}
_RULE = "Data has a column text, content, messages, conversations or input_ids; a .txt file one sample a line, in UTF-8."


def shipped_text() -> list[Row]:
    """The lines shipped with the package, written for it: a few hundred, ragged, in several scripts."""
    return [*(resources.files("collate_npu") / "tools" / "data" / "text.txt").read_text(encoding="utf-8").splitlines()]


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, or of standard input (`-`). Raises `CollateError` with the file and the row that is bad."""
    kind = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    rows = list(_table(path, TABLES[kind]) if kind in TABLES else _lines(path, jsonl=kind in (".jsonl", ".ndjson")))
    if not rows:
        raise CollateError(explain(str(path), "no rows", _RULE, "Name a file that has some."))
    return rows


def _lines(path: Path, *, jsonl: bool) -> Iterator[Row]:
    name = "standard input" if str(path) == "-" else str(path)
    try:
        data = sys.stdin.buffer.read() if name == "standard input" else path.read_bytes()
        lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig").splitlines()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or str(error)
        got = "bytes that are not UTF-8" if isinstance(error, UnicodeDecodeError) else said
        remedy = "Name a file of .txt, .jsonl, .json, .parquet or .csv, or pipe text to --data -."
        raise CollateError(explain(name, got, _RULE, remedy)) from None
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    jsonl = jsonl or (name == "standard input" and bool(numbered) and numbered[0][1].lstrip().startswith("{"))
    for n, line in numbered:
        yield _row(f"{name}, line {n}", _parsed(f"{name}, line {n}", line)) if jsonl else line


def _parsed(where: str, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        rule = "Each line is one JSON object."
        raise CollateError(explain(where, f"no JSON ({error})", rule, "Mend it, or leave it out.")) from None


def _table(path: Path, reader: str) -> Iterator[Row]:
    if not path.is_file():
        got = "Is a directory" if path.is_dir() else "No such file or directory"
        raise CollateError(explain(str(path), got, _RULE, "Name a file."))
    try:
        datasets: Any = import_module("datasets")
    except ImportError as error:
        rule, remedy = "Tables are read by the datasets package.", "Run pip install datasets, or convert it to .jsonl."
        raise CollateError(explain(str(path), str(error), rule, remedy)) from None
    shown, logger = not datasets.are_progress_bars_disabled(), logging.getLogger("datasets")
    level = logger.level
    datasets.disable_progress_bars()
    logger.setLevel(logging.CRITICAL + 1)  # it would log a traceback of what is said here in a line
    try:
        with tempfile.TemporaryDirectory(prefix="collate-npu-") as cache:
            table = getattr(datasets.Dataset, reader)(str(path), cache_dir=cache, keep_in_memory=True)
            records = table.select(range(min(len(table), MOST))).to_list()
    except Exception as error:  # pyarrow, pandas and datasets raise classes of their own, one as the cause of another
        cause = error.__cause__ or error
        got, rule = f"{type(cause).__name__}: {first_line(cause)[:200]}", "It cannot be read as a table."
        raise CollateError(explain(str(path), got, rule, "Write it again, or convert it to .jsonl.")) from None
    finally:
        logger.setLevel(level)
        if shown:
            datasets.enable_progress_bars()
    for n, record in enumerate(records):
        yield _row(f"{path}, row {n}", record)


def _row(where: str, record: Any) -> Row:
    """What a record holds: its tokens, else its conversation, else its text."""
    if not isinstance(record, dict):
        raise CollateError(explain(where, f"a {type(record).__name__}", _RULE, 'Write objects: {"text": "..."}.'))
    held = {key: record[key] for key in COLUMNS if record.get(key) is not None}
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
    whole = all(isinstance(x, list) and x and all(type(n) is int for n in x) for x in (ids, labels))
    return {"input_ids": ids, "labels": labels} if whole and len(ids) == len(labels) else None


_SPEAKERS = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names."""


def _messages(value: Any) -> list[dict[str, str]] | None:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        return None
    pairs = [(each.get("role", each.get("from")), each.get("content", each.get("value"))) for each in value]
    if not all(isinstance(role, str) and isinstance(said, str) for role, said in pairs):
        return None
    return [{"role": _SPEAKERS.get(role, role), "content": said} for role, said in pairs]
