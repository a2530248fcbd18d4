"""Samples: text, from a file or shipped with the package, as token ids."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from collate_npu.errors import CollateError, explain


def shipped_text() -> list[str]:
    """The lines shipped with the package, written for it: a few hundred, ragged, in several scripts."""
    return (resources.files("collate_npu") / "tools" / "data" / "text.txt").read_text(encoding="utf-8").splitlines()


def read_text(path: Path) -> list[str]:
    """Lines of a text file in UTF-8, or the `text` (or `content`) field of each line of a `.jsonl` file."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        got = "bytes that are not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error.strerror or error)
        rule = "Data is a text file in UTF-8, one sample a line, or .jsonl."
        raise CollateError(explain(str(path), got, rule, "Name such a file; convert parquet and archives.")) from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    jsonl = path.suffix == ".jsonl"
    return [_text_of(f"{path}, line {number}", line) if jsonl else line for number, line in numbered]


def _text_of(where: str, line: str) -> str:
    try:
        record = json.loads(line)
        text = record.get("text") or record.get("content") if isinstance(record, dict) else None
        got = "no text field" if isinstance(record, dict) else f"a {type(record).__name__}"
    except ValueError as error:
        text, got = None, f"no JSON ({error})"
    if not isinstance(text, str):
        rule = "Each line of a .jsonl file is an object with a text field."
        raise CollateError(explain(where, got, rule, "Name the field text, or pass a .txt file."))
    return text


def sample_ids(text: Sequence[str], tokenizer: Any, *, count: int, max_length: int, seed: int = 0) -> list[list[int]]:
    """Token ids of `count` lines drawn from the text, cut to lengths drawn up to `max_length`, and closed with eos.

    Lengths are drawn so that long lines are ragged too. Where pad is eos, as so often, the last token is real and looks
    like padding.
    """
    rng = random.Random(seed)
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    cut = {"add_special_tokens": False, "truncation": True, "max_length": max_length}
    encoded = [ids for line in text if (ids := tokenizer(line, **cut)["input_ids"])]
    if len(encoded) < count:
        rule = f"The audit draws {count} lines."
        raise CollateError(explain("data", f"{len(encoded)} lines with tokens", rule, "Give more text, or fewer batches."))
    longest = max(max_length - len(eos), 1)
    return [ids[: rng.randint(max(longest // 8, 1), longest)] + eos for ids in rng.sample(encoded, count)]
