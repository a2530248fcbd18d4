"""Sheet: what a picture says, before it is drawn: panels of rows and of squares, tokens, and the refusals in words.

Legend: B batch, S width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import Array, host_tensor, whole_number
from collate_npu.consumers.routes import shape_said
from collate_npu.errors import CollateError, explain, shape_of
from collate_npu.given import check_tokenizer
from collate_npu.keys import KEEP_KEY, with_role
from collate_npu.masks.derive import MASK_KEY, derive_segments
from collate_npu.masks.find import segments_from_batch
from collate_npu.masks.sources import Sources
from collate_npu.segments import Segments
from collate_npu.tools.show.attention import Attention, Cell, attention_of
from collate_npu.tools.show.faults import MEANS, keys_of_mask, squares_of_mask

LOST = "\ufffd"


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a batch as text. Only those that are drawn are decoded."""

    decode: Callable[[list[int]], str]
    input_ids: Tensor
    """`[B, S]`."""

    def one(self, b: int, s: int) -> str:
        """The token at one place, "" where the batch has none; one that is no text by itself by its id: `#228`."""
        if b >= self.input_ids.shape[0] or s >= self.input_ids.shape[1]:
            return ""
        number = int(self.input_ids[b, s])
        text = self._read([number])
        return f"#{number}" if LOST in text or not text else escaped(text)

    def text(self, b: int, places: Sequence[int]) -> str:
        """Several tokens as one text."""
        B, S = self.input_ids.shape
        return escaped(self._read([int(self.input_ids[b, s]) for s in places if b < B and s < S]))

    def _read(self, numbers: list[int]) -> str:
        try:
            return self.decode(numbers) if min(numbers, default=0) >= 0 else LOST
        except Exception:  # of a tokenizer that has no such id
            return LOST


def escaped(text: str) -> str:
    """On one line, with nothing that moves the cursor: a newline is `\\n`, a space at either end is `·`."""
    inner = text.strip(" ")
    before, after = (len(text) - len(text.lstrip(" ")), len(text) - len(text.rstrip(" "))) if inner else (len(text), 0)
    safe = "".join(c if c.isprintable() or c == "\u200d" else c.encode("unicode_escape").decode() for c in inner)
    return "·" * before + safe + "·" * after


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One view: rows, squares, or a refusal."""

    heading: str = ""
    facts: str = ""
    refused: str = ""
    ids: Array | None = None
    """The rows of the batch: int32 `[B, S]`, 0 is padding, n the n-th sequence of the row."""
    labels: Array | None = None
    """int8 `[B, S]`: a `Cell` of labels, 0 for none."""
    numbers: Array | None = None
    """Whole numbers `[B, S]` that are no mask, to be read as they stand."""
    squares: tuple[Attention, ...] = ()
    derived: bool = False
    """Was it made from the truth, and did not come with the batch?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """The panels, in order."""

    panels: tuple[Panel, ...]
    tokens: Tokens | None = None
    """Where there is a tokenizer."""

    @property
    def packed(self) -> bool:
        """Does some row hold several sequences?"""
        return any(panel.ids is not None and panel.ids.max(initial=0) > 1 for panel in self.panels)


def sheet_of(shown: Mapping[str, Any] | Segments | Tensor, *, row: int | None = None, tokenizer: Any = None) -> Sheet:
    """What is to be drawn of a batch, its `Segments` or a mask; of one row where `row` is given."""
    if isinstance(shown, Segments):
        panels: Iterable[Panel] = (Panel(facts=shape_said(shown), ids=shown.array), _attends(shown))
    else:
        panels = _batch(shown) if isinstance(shown, Mapping) else _alone(host_tensor("mask", shown))
    panels = list(panels)
    held = {square.b for panel in panels for square in panel.squares}
    held |= {b for panel in panels if panel.ids is not None for b in range(len(panel.ids))}
    if row is not None and whole_number("row", row) not in held:
        rule = f"The rows are 0 to {max(held)}." if held else "There is no row."
        raise CollateError(explain("row", str(row), rule, "Name one of them, or leave it out for all."))
    asked = (replace(panel, squares=tuple(x for x in panel.squares if row in (None, x.b))) for panel in panels)
    return Sheet(panels=tuple(asked), tokens=_tokens(shown, tokenizer) if isinstance(shown, Mapping) else None)


def _tokens(batch: Mapping[str, Any], tokenizer: Any) -> Tokens | None:
    if tokenizer is not None:
        check_tokenizer(tokenizer, does="decode")
    ids = next((batch[key] for key in with_role(batch, "tokens") if key != "inputs_embeds"), None)
    if tokenizer is None or not isinstance(ids, Tensor) or ids.ndim != 2:
        return None
    return Tokens(lambda numbers: str(tokenizer.decode(numbers)), ids)


def labels_of(batch: Mapping[str, Any], segments: Segments) -> Array | None:
    """int8 `[B, S]`, as `Panel.labels`; None where the batch has no labels of tokens."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or tuple(labels.shape) != segments.shape or labels.is_floating_point():
        return None
    counted_BS, real_BS = labels.cpu().numpy() >= 0, segments.array > 0
    kinds, codes = [counted_BS & ~real_BS, counted_BS, real_BS], [Cell.ON_PADDING, Cell.COUNTED, Cell.IGNORED]
    return np.select(kinds, codes, default=0).astype(np.int8)


def _batch(batch: Mapping[str, Any]) -> Iterator[Panel]:
    carried = batch.get(MASK_KEY)
    masks = _tensors(carried if isinstance(carried, Mapping) else {MASK_KEY: carried})
    try:
        segments = segments_from_batch(batch)
    except CollateError as error:
        yield Panel(refused=str(error))
        yield from _refused(batch, masks)
        return
    heading = KEEP_KEY if KEEP_KEY in batch else "segments"
    yield Panel(heading=heading, facts=shape_said(segments), ids=segments.array, labels=labels_of(batch, segments))
    squares = {key: x for key, x in masks.items() if not _is_keys(x, segments.shape)}
    yield from (_mask(key, x, segments.shape[0], segments) for key, x in squares.items())
    if not squares:
        yield _attends(segments)


def _refused(batch: Mapping[str, Any], masks: Mapping[str, Tensor]) -> Iterator[Panel]:
    """Every mask as it stands, and where it differs from what the rest of the batch says."""
    others, shape = None, (0, 0)
    with suppress(CollateError):
        shape = Sources(batch).shape()
        others = segments_from_batch({key: x for key, x in batch.items() if key != MASK_KEY})
    for key, x in {**_tensors({KEEP_KEY: batch.get(KEEP_KEY)}), **masks}.items():
        rows = shape[0] if x.shape[0] == 1 or x.ndim == 2 else x.shape[0]
        yield _keys(key, x) if _is_keys(x, shape) else _mask(key, x, max(rows, 1), others)


def _tensors(masks: Mapping[str, Any]) -> dict[str, Tensor]:
    """Those that can be drawn."""
    out = {}
    for key, value in masks.items():
        with suppress(CollateError):
            if value is not None and 2 <= (x := host_tensor(key, value)).ndim <= 4:
                out[key] = x
    return out


def _is_keys(x: Tensor, shape: tuple[int, int]) -> bool:
    """One value a token, and no square that all rows share."""
    return x.ndim == 2 and (x.shape[0] != x.shape[1] or tuple(x.shape) == shape)


def _keys(heading: str, x: Tensor) -> Panel:
    return Panel(heading=heading, facts=shape_of(x), ids=keys_of_mask(x).astype(np.int32))


def _mask(heading: str, x: Tensor, B: int, truth: Segments | None) -> Panel:
    squares, polarity = squares_of_mask(x, B, truth)
    heads = f", any of its {x.shape[1]} heads" if x.ndim == 4 and x.shape[1] > 1 else ""
    return Panel(heading=heading, facts=f"{shape_of(x)}, {MEANS[polarity]}{heads}", squares=tuple(squares))


def _alone(x: Tensor) -> Iterator[Panel]:
    """A mask without its batch: as a padding mask where it is one, else as it stands, with what speaks against it."""
    if not 2 <= x.ndim <= 4:
        raise CollateError(explain("mask", shape_of(x), "Masks have two to four dimensions.", "Pass one of them."))
    if _are_numbers(x):
        yield Panel(heading="numbers, not a mask; picture(batch) draws all of it", facts=shape_of(x), numbers=x.numpy())
        return
    try:
        segments = derive_segments(x)
    except CollateError as error:
        yield _keys("", x) if x.ndim == 2 else _mask("", x, x.shape[0], None)
        yield Panel(refused=str(error))
        return
    if x.ndim > 2:
        yield _mask("", x, segments.shape[0], segments)
    yield Panel(facts=f"found: {shape_said(segments)}", ids=segments.array, derived=x.ndim > 2)


def _are_numbers(x: Tensor) -> bool:
    """Are they token ids, or labels? No row has as many sequences as it has tokens, and one more."""
    whole = x.ndim == 2 and not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)
    return whole and bool(x.numel()) and bool((x > x.shape[1]).any() or (x < 0).any())


def row_of_numbers(row_S: Array, columns: int) -> str:
    """So many columns of them: both ends where not all fit, for padding stands at either.

    >>> row_of_numbers(np.arange(10, 20), 18)
    '10 11 ... 18 19'
    """
    whole = " ".join(map(str, row_S[: columns + 1].tolist()))
    if len(whole) <= columns:
        return whole
    end, half = " ".join(map(str, row_S[-columns:].tolist())), max((columns - 5) // 2, 0) + 1
    return f"{whole[:half].rpartition(' ')[0]} ... {end[-half:].partition(' ')[2]}"


def _attends(segments: Segments) -> Panel:
    """By the truth."""
    squares = tuple(attention_of(segments, b) for b in range(segments.shape[0]))
    return Panel(heading="causal attention", facts="no 4D mask came", squares=squares, derived=True)
