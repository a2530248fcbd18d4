"""Tokens: what stands at a place of a batch, in a few columns of text.

Widths are columns of a terminal, as rich counts them: a Chinese character and most emoji take two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from collate_npu.errors import CollateError, explain

LOST = "\ufffd"


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a batch as text. Only those that are drawn are decoded."""

    decode: Callable[[list[int]], str]
    input_ids: Tensor
    """`[B, S]`."""

    def one(self, b: int, s: int) -> str:
        """The token at one place; where it is no text by itself, as a part of a letter is not, its id: `#228`."""
        number = int(self.input_ids[b, s])
        text = self.decode([number]) if number >= 0 else LOST
        return f"#{number}" if LOST in text or not text else escaped(text)

    def text(self, b: int, places: Sequence[int]) -> str:
        """Several tokens as one text."""
        return escaped(self.decode([int(self.input_ids[b, s]) for s in places]))


def escaped(text: str) -> str:
    """On one line, with nothing that moves the cursor: a newline is `\\n`, a space at either end is `·`."""
    inner = text.strip(" ")
    before, after = (len(text) - len(text.lstrip(" ")), len(text) - len(text.rstrip(" "))) if inner else (len(text), 0)
    safe = "".join(c if c.isprintable() or c == "\u200d" else c.encode("unicode_escape").decode() for c in inner)
    return "·" * before + safe + "·" * after


def fitted(text: str, columns: int) -> str:
    """Exactly so many columns wide: cut with `…`, or filled with spaces."""
    cells = _cells()
    if cells.cell_len(text) > columns:
        text = cells.set_cell_size(text, max(columns - 1, 0)) + "…" * (columns > 0)
    return str(cells.set_cell_size(text, columns))


def _cells() -> Any:
    try:
        return import_module("rich.cells")
    except ImportError:
        rule = "Columns of tokens are counted by rich, which is not installed."
        raise CollateError(explain("tokenizer", "no rich", rule, "pip install 'collate-npu[audit]'.")) from None
