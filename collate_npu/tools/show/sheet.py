"""Sheet: what a picture says, before it is drawn: panels of rows and of squares, and the refusals in words.

Every drawing (text, a figure, a page) is made of this one, so that they say the same. Legend: B batch, S width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from collate_npu.errors import CollateError, explain, shape_of
from collate_npu.host import Array
from collate_npu.keys import KEEP_KEY, with_role
from collate_npu.masks.derive import derive_segments
from collate_npu.masks.find import MASK_KEY, segments_from_batch, token_shape
from collate_npu.masks.forms import none_is_exact
from collate_npu.masks.polarity import Bools
from collate_npu.segments import Segments
from collate_npu.tools.show.attention import Attention, attention_of
from collate_npu.tools.show.faults import MEANS, attentions_of_mask, faults_of_mask, keys_of_mask
from collate_npu.tools.show.tokens import Tokens

COUNTED, IGNORED, ON_PADDING = 1, 2, 3
"""What a label is: it counts, it is ignored at a real token, it counts at padding (which is wrong)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a batch, place by place."""

    ids: Array
    """int32 `[B, S]`: 0 is padding, n the n-th sequence of the row."""
    labels: Array | None = None
    """int8 `[B, S]`: `COUNTED`, `IGNORED`, `ON_PADDING`, or 0."""
    held: Bools | None = None
    """bool `[S]`: the places that one rank holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One view: rows, squares, or a refusal."""

    title: str = ""
    facts: str = ""
    rows: Rows | None = None
    squares: tuple[Attention, ...] = ()
    refused: str = ""
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
        return any(panel.rows is not None and panel.rows.ids.max(initial=0) > 1 for panel in self.panels)


def sheet_of(shown: Mapping[str, Any] | Segments | Tensor, *, row: int | None = None, tokenizer: Any = None) -> Sheet:
    """What is to be drawn of a batch, its `Segments` or a mask; of one row where `row` is given."""
    if isinstance(shown, Segments):
        return Sheet(panels=_rows_asked([Panel(facts=counts(shown), rows=Rows(ids=shown.array)), _attends(shown)], row))
    if isinstance(shown, Tensor):
        return Sheet(panels=_rows_asked(_alone(shown), row))
    return Sheet(panels=_rows_asked(_batch(shown), row), tokens=_tokens(shown, tokenizer))


def _tokens(batch: Mapping[str, Any], tokenizer: Any) -> Tokens | None:
    ids = next((batch[key] for key in with_role(batch, "tokens") if key != "inputs_embeds"), None)
    readable = tokenizer is not None and isinstance(ids, Tensor) and ids.ndim == 2
    return Tokens(lambda numbers: str(tokenizer.decode(numbers)), ids) if readable and ids is not None else None


def counts(segments: Segments) -> str:
    """How many rows, places, sequences, and how much of it is padding."""
    B, S = segments.shape
    return f"{B} x {S}, {segments.num_sequences} sequences, {100 * segments.padding_share:.1f}% padding"


def labels_of(batch: Mapping[str, Any], segments: Segments) -> Array | None:
    """int8 `[B, S]`, as `Rows.labels`; None where the batch has no labels of tokens."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or tuple(labels.shape) != segments.shape or labels.is_floating_point():
        return None
    counted_BS, real_BS = labels.cpu().numpy() >= 0, segments.array > 0
    what_BS = np.where(real_BS, np.where(counted_BS, COUNTED, IGNORED), np.where(counted_BS, ON_PADDING, 0))
    return what_BS.astype(np.int8)


def _batch(batch: Mapping[str, Any]) -> Iterator[Panel]:
    carried = batch.get(MASK_KEY)
    masks = {**carried} if isinstance(carried, Mapping) else {MASK_KEY: carried}
    try:
        segments = segments_from_batch(batch)
    except CollateError as error:
        yield Panel(refused=str(error))
        yield from _refused(batch, masks)
        return
    rows = Rows(ids=segments.array, labels=labels_of(batch, segments))
    yield Panel(title=KEEP_KEY if KEEP_KEY in batch else "segments", facts=counts(segments), rows=rows)
    squares = {key: x for key, x in masks.items() if isinstance(x, Tensor) and x.ndim in (3, 4)}
    for key, x in squares.items():
        attentions, polarity = attentions_of_mask(x, segments.shape[0], segments)
        yield Panel(title=key, facts=f"{shape_of(x)}, {MEANS[polarity]}", squares=tuple(attentions))
    if not squares:
        yield _attends(segments)


def _refused(batch: Mapping[str, Any], masks: Mapping[str, Any]) -> Iterator[Panel]:
    """Every mask as it stands, and where it differs from what the rest of the batch says."""
    others = _others(batch)
    held = {KEEP_KEY: batch.get(KEEP_KEY), **masks}
    for key, x in held.items():
        if isinstance(x, Tensor) and x.ndim == 2:
            yield Panel(title=key, facts=shape_of(x), rows=Rows(ids=keys_of_mask(x).astype(np.int32)))
        elif isinstance(x, Tensor) and x.ndim in (3, 4):
            attentions, polarity = faults_of_mask(x, _height(batch, x), others)
            yield Panel(title=key, facts=f"{shape_of(x)}, {MEANS[polarity]}", squares=tuple(attentions))


def _height(batch: Mapping[str, Any], x: Tensor) -> int:
    try:
        return max(token_shape(batch)[0], 1) if x.shape[0] == 1 else x.shape[0]
    except CollateError:
        return x.shape[0]


def _others(batch: Mapping[str, Any]) -> Segments | None:
    """What the batch says without its dense masks."""
    try:
        return segments_from_batch({key: x for key, x in batch.items() if key != MASK_KEY})
    except CollateError:
        return None


def _alone(x: Tensor) -> Iterator[Panel]:
    """A mask without its batch: as a padding mask where it is one, else as it stands, with what speaks against it."""
    if not 2 <= x.ndim <= 4:
        raise CollateError(explain("mask", shape_of(x), "Masks have two to four dimensions.", "Pass one of them."))
    try:
        segments = derive_segments(x)
    except CollateError as error:
        if x.ndim == 2:
            yield Panel(facts=shape_of(x), rows=Rows(ids=keys_of_mask(x).astype(np.int32)))
        else:
            attentions, polarity = faults_of_mask(x, x.shape[0], None)
            yield Panel(facts=f"{shape_of(x)}, as {polarity}: {MEANS[polarity]}", squares=tuple(attentions))
        yield Panel(refused=str(error))
        return
    rows = Panel(facts=f"found: {counts(segments)}", rows=Rows(ids=segments.array), derived=x.ndim > 2)
    if x.ndim > 2:
        attentions, polarity = attentions_of_mask(x, segments.shape[0], segments)
        yield Panel(facts=f"{shape_of(x)}, {MEANS[polarity]}", squares=tuple(attentions))
    yield rows


def _attends(segments: Segments) -> Panel:
    """What causal attention by the truth is, where no square mask came."""
    verdict = none_is_exact(segments)
    facts = f"no mask came, and None {'is' if verdict else 'is not'} exact: {verdict.why}"
    squares = tuple(attention_of(segments, b) for b in range(segments.shape[0]))
    return Panel(title="causal attention", facts=facts, squares=squares, derived=True)


def _rows_asked(panels: Iterator[Panel] | list[Panel], row: int | None) -> tuple[Panel, ...]:
    """With the squares of one row of the batch alone, where one is asked for."""
    if row is None:
        return tuple(panels)
    return tuple(replace(panel, squares=panel.squares[row : row + 1]) for panel in panels)
