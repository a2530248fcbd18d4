"""Places: how much of a flat row each sequence takes up: its tokens, the padding behind it, and what the tail is cut into.

Their sums are the physical offsets that kernels go by, in a row of width S with N sequences. Two of 3 and 2, each at a
multiple of 4; the same in a row of 16; and there with offsets of a fixed length, for 4 sequences, as recurrent layers and as
attention alone take them::

    1 1 1 0 2 2 0 0                     places 4 4          offsets 0 4 8
    1 1 1 0 2 2 0 0 0 0 0 0 0 0 0 0     places 4 4 8        offsets 0 4 8 16
                                        places 4 4 4 4      offsets 0 4 8 12 16
                                        places 4 4 8 0      offsets 0 4 8 16 16
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from collate_npu.arrays import Array, check_places
from collate_npu.errors import CollateError, UnsupportedFormError, explain, explain_rows
from collate_npu.segments import Segments


def own_places(segments: Segments) -> list[int]:
    """What a flat row `[1, S]` says by itself: padding between sequences belongs to the one before it, as alignment does,
    and so does that behind the last; a row with padding at its end alone has a tail, which is one more sequence.

    Raises `UnsupportedFormError` for several rows, padding before the first token, and padding inside a sequence.
    """
    B, S = segments.shape
    if B != 1 or segments.hole_rows or (segments.spans and segments.spans[0][1]):
        rule = "In one flat row padding stands behind a sequence, or at the end."
        remedy = "unpad() first, and leave the tail out."
        raise UnsupportedFormError(explain("offsets", repr(segments), rule, remedy))
    if segments.padding_side in ("none", "right"):
        tail = S - segments.num_tokens
        return [*segments.sequence_lengths, *([tail] if tail else [])]
    starts = [start for _, start, _ in segments.spans]
    return [stop - start for start, stop in zip(starts, [*starts[1:], S])]


def fitting_places(offsets: Array, segments: Segments) -> list[int] | None:
    """The places by physical offsets: all of one flat row, each sequence at the start of its own, the tail behind them;
    None for offsets that are not so."""
    starts_N, ends_N = (np.array([span[i] for span in segments.spans], np.int64) for i in (1, 2))
    N = len(starts_N)
    if segments.shape[0] != 1 or len(offsets) <= N or offsets[-1] != segments.shape[1] or segments.hole_rows:
        return None
    fits = np.array_equal(offsets[:N], starts_N) and (ends_N <= offsets[1 : N + 1]).all()
    return np.diff(offsets).tolist() if fits else None


def check_cuts(name: str, offsets: Array, segments: Segments) -> None:
    """Raise unless each sequence of one flat row begins at an offset, and none stands inside it."""
    _, starts_N, ends_N = np.array(segments.spans, np.int64).reshape(-1, 3).T
    after_N = np.searchsorted(offsets, starts_N, side="right")
    ends = np.append(offsets, -1)  # behind the last there is no room
    bad_N = np.flatnonzero((offsets[after_N - 1] != starts_N) | (ends[after_N] < ends_N))
    if len(bad_N):
        bad = [(n, f"tokens {starts_N[n]} to {ends_N[n] - 1}") for n in bad_N.tolist()]
        rule = f"A sequence begins at an offset, and none stands inside it; they are {offsets[:16].tolist()}."
        remedy = "Pass the offsets of these sequences, or leave offsets out."
        raise CollateError(explain_rows(f"{name} (rows are sequences)", bad, rule, remedy, more="sources-disagree"))


def aligned(lengths: Sequence[int], multiple: int) -> list[int]:
    """Each sequence with the padding behind it, a multiple of `multiple`: 64 is the chunk of the recurrent kernels."""
    return [-(-length // multiple) * multiple for length in lengths]


def least_room(count: int, max_sequences: int | None, *, multiple: int = 1, repeats: bool = False) -> int:
    """Tokens the tail must have for `with_tail` to bring `count` sequences up to `max_sequences`."""
    return 0 if max_sequences is None or repeats else max(max_sequences - count, 0) * multiple


def with_tail(
    places: Sequence[int],
    width: int,
    *,
    max_sequences: int | None = None,
    multiple: int = 1,
    repeats: bool = False,
    behind: bool = True,
) -> list[int]:
    """Places that fill a row of `width` tokens, a multiple too; with `max_sequences`, as many as that, for equal offsets.

    The tail is one more sequence. With `max_sequences` it is cut evenly into as many as are missing, each at least
    `multiple` tokens, so that offsets rise: recurrent kernels refuse or misread an empty sequence (fla up to 0.5.0, and
    Ascend's `recompute_w_u_fwd_tiling_processor.h:360`). `repeats=True` leaves the missing ones empty, which repeats the
    last offset: kernels of attention take that (torchtitan pull request 4158; torch_npu's `actual_seq_qlen`). Where none
    is missing, the padding stands `behind` the last sequence, which is exact for causal layers.

    Raises `CollateError` for too many tokens or sequences, and where the tail has no room.
    """
    room = width - sum(places)
    if room < 0:
        rule, remedy = f"The row is {width} tokens wide.", "Raise the width, or put fewer samples in a batch."
        raise CollateError(explain("flat row", f"{sum(places)} tokens with their alignment", rule, remedy))
    missing = (1 if room else 0) if max_sequences is None else max_sequences - len(places)
    if missing < 0 or (room and not missing and not behind):
        least = len(places) + (0 if behind or not room else 1)
        rule = f"The offsets are for {max_sequences} sequences, the tail counted where attention looks ahead."
        remedy = f"Raise max_sequences to {least} or more, or put fewer samples in a batch."
        raise CollateError(explain("max_sequences", f"{len(places)} sequences", rule, remedy))
    if not missing:
        return [*places[:-1], places[-1] + room] if room else list(places)
    check_places("max_sequences", missing, "It is the most sequences that a row may hold.")
    if repeats:
        return [*places, room, *([0] * (missing - 1))]
    if room < missing * multiple:
        rule = f"Rising offsets for {max_sequences} sequences take a tail of {missing * multiple} tokens here."
        remedy = f"Raise the width to {sum(places) + missing * multiple}, or lower max_sequences."
        raise CollateError(explain("max_sequences", f"{len(places)} sequences and a tail of {room} tokens", rule, remedy))
    each, more = divmod(room // multiple, missing)  # the largest last
    return [*places, *((each + (n >= missing - more)) * multiple for n in range(missing))]
