"""Boundaries: the offsets of the one flat row that a recurrent kernel is given, with every token covered.

Recurrent kernels have no mask. What no sequence covers stays unwritten memory, whose NaN reach the weights' gradients
(0 * NaN is NaN; flash-linear-attention #892), so each run of padding either is a sequence of its own, or lies behind the
sequence before it, whose real tokens come first and cannot see it. `1 1 1 0 2 2 0 0`::

    own       0 3 4 6 8
    behind    0   4   8     as Megatron's padded offsets, and for kernels whose short last chunks are wrong

Legend: B rows, S width, T tokens of the flat row, N sequences.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from collate_npu.errors import UnsupportedFormError, explain, explain_rows
from collate_npu.host import Array
from collate_npu.segments import Segments

Padding = Literal["own", "behind"]


def flat_offsets(segments: Segments, *, keep_padding: bool | None = None, padding: Padding = "own") -> tuple[int, ...]:
    """`(0, ..., T)`, strictly rising: where sequences begin in the tensors of a call.

    `keep_padding=True`: the tensors are the rows as they are, one behind the other, `[1, B * S]`. False: those of
    `unpad`, `[1, T]`. Default: one row is kept as it is, of several the padding is taken out. `padding` says where the
    padding that is kept belongs. Raises `UnsupportedFormError` without a real token; where padding that is kept stands
    inside a sequence; and for `"behind"` where it stands before the first one.
    """
    if not segments.num_tokens:
        rule = "A recurrent kernel takes at least one token."
        raise UnsupportedFormError(explain("segments", repr(segments), rule, "Drop batches without tokens."))
    if keep_padding is None:
        keep_padding = segments.shape[0] == 1
    if not keep_padding or segments.padding_side == "none":
        return segments.cu_seqlens_host
    _check_holes(segments)
    starts = _starts(segments, own=padding == "own")
    return (*starts.tolist(), segments.array.size)


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
            raise UnsupportedFormError(explain_rows("segments", rows, rule, "Use padding='own', or unpad() first."))
        begins_BS &= ids_BS != 0
    return np.flatnonzero(begins_BS)


def _check_holes(segments: Segments) -> None:
    if segments.hole_rows:
        rows = [(b, "padding inside a sequence") for b in segments.hole_rows]
        rule = "The state would run on through the padding, and the convolution reads it."
        remedy = "Use the tensors of unpad(), with keep_padding=False: there the holes are closed."
        raise UnsupportedFormError(explain_rows("segments", rows, rule, remedy))
