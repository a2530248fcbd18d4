"""Boundaries: the offsets of the one flat row that a recurrent kernel is given, with every token covered.

Recurrent kernels have no mask. What no sequence covers stays unwritten memory, whose NaN reach the weights' gradients
(0 * NaN is NaN; flash-linear-attention #892), so each run of padding either is a sequence of its own, or lies behind the
sequence before it, whose real tokens come first and cannot see it. `1 1 1 0 2 2 0 0`::

    own       0 3 4 6 8
    behind    0   4   8     as Megatron's padded offsets, and for kernels whose short last chunks are wrong
    0 4 6 8   0   4 6 8     a batch's own physical offsets: which padding belongs to a sequence, and how the tail is cut

Legend: B rows, S width, T tokens of the flat row, N sequences.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from collate_npu.errors import UnsupportedFormError, explain, explain_rows
from collate_npu.host import Array, host_array, whole_number
from collate_npu.masks.places import fitting_places, with_tail
from collate_npu.segments import Segments, Values

Padding = Literal["own", "behind"]


def flat_offsets(
    segments: Segments,
    *,
    keep_padding: bool | None = None,
    padding: Padding | Values = "own",
    max_sequences: int | None = None,
) -> tuple[int, ...]:
    """`(0, ..., T)`, strictly rising: where sequences begin in the tensors of a call.

    `keep_padding=True`: the tensors are the rows as they are, one behind the other, `[1, B * S]`. False: those of
    `unpad`, `[1, T]`. Default: one row is kept as it is, of several the padding is taken out. `padding` says where the
    padding that is kept belongs, or is the physical offsets of this very row. `max_sequences` gives the offsets that many
    entries and one, by cutting the padding at the end (`masks.places.with_tail`); no sequence is ever empty.

    Raises `UnsupportedFormError` without a real token; where padding that is kept stands inside a sequence; for `"behind"`
    where it stands before the first one; and for offsets that do not fit the row.
    """
    if not segments.num_tokens:
        rule = "A recurrent kernel takes at least one token."
        raise UnsupportedFormError(explain("segments", repr(segments), rule, "Drop batches without tokens."))
    if not isinstance(padding, str):
        offsets = _given(padding, segments)
    elif not (segments.shape[0] == 1 if keep_padding is None else keep_padding) or segments.padding_side == "none":
        offsets = segments.cu_seqlens_host
    else:
        _check_holes(segments)
        offsets = (*_starts(segments, own=padding == "own").tolist(), segments.array.size)
    return offsets if max_sequences is None else _of_one_length(offsets, segments, padding, max_sequences)


def _given(physical: Values, segments: Segments) -> tuple[int, ...]:
    """The offsets that a batch carries, without the empty sequences that attention alone takes."""
    places = fitting_places(host_array("padding", physical), segments)
    if places is None:
        rule = "Physical offsets begin at 0, end at the width of one flat row, and each sequence begins at one."
        remedy = "Pass cu_seqlens_padded of this very batch, or 'own'."
        raise UnsupportedFormError(explain("padding", str(host_array("padding", physical).tolist())[:80], rule, remedy))
    return (0, *np.cumsum([place for place in places if place]).tolist())


def _of_one_length(
    offsets: tuple[int, ...], segments: Segments, padding: Padding | Values, max_sequences: int
) -> tuple[int, ...]:
    if len(offsets) == whole_number("max_sequences", max_sequences, least=1) + 1:
        return offsets
    if not isinstance(padding, str) or padding == "behind":
        rule = f"They are offsets of {len(offsets) - 1} sequences, and where the padding of the last one ends is not known."
        remedy = "Pass padding=batch['cu_seqlens_padded'] of PaddingCollator(max_sequences=), or padding='own'."
        raise UnsupportedFormError(explain("max_sequences", str(max_sequences), rule, remedy))
    tail = offsets[-1] == segments.array.size and not segments.array[-1, -1]
    places = np.diff(offsets[:-1] if tail else offsets).tolist()
    return (0, *np.cumsum(with_tail(places, offsets[-1], max_sequences=max_sequences)).tolist())


def _starts(segments: Segments, *, own: bool) -> Array:
    """Where a run begins in the flattened rows: of one sequence, or of padding where that is a sequence of its own."""
    ids_BS = segments.array
    begins_BS = np.ones(ids_BS.shape, bool)
    begins_BS[:, 1:] = ids_BS[:, 1:] != ids_BS[:, :-1]
    if not own:
        leading = np.flatnonzero(ids_BS[:, 0] == 0)
        if len(leading):
            rows = [(int(b), "padding before the first sequence") for b in leading]
            rule = "Padding can lie behind a sequence, never before the first: the state would begin with it."
            remedy = "unpad() first, or make it a sequence of its own (padding='own')."
            raise UnsupportedFormError(explain_rows("segments", rows, rule, remedy))
        begins_BS &= ids_BS != 0
    return np.flatnonzero(begins_BS)


def _check_holes(segments: Segments) -> None:
    if segments.hole_rows:
        rows = [(b, "padding inside a sequence") for b in segments.hole_rows]
        rule = "The state would run on through the padding, and the convolution reads it."
        remedy = "Use the tensors of unpad(), with keep_padding=False: there the holes are closed."
        raise UnsupportedFormError(explain_rows("segments", rows, rule, remedy))
