"""Where a refusal is honest: the list of reasons, each a fact of the case. A refusal without one of them is a failure.

`EVERYWHERE` holds for every producer; a producer names those of `BY_NAME` that its form brings. `LIMITS` are the batches
that no reader could read otherwise: what the library answers there is what the batch says, and not what its maker meant.
"""

from collections.abc import Callable

import numpy as np
import torch
from drawing import SIDED, causal, chunked, positions, together
from entries import Entry
from torch import Tensor
from verdicts import Case

Reason = Callable[[Case, Entry], bool]


def undecided(case: Case, entry: Entry) -> bool:
    """The bare mask, and nobody said how to read it."""
    return not entry.with_2d and not entry.declared


def _dimensions(case: Case) -> int:
    return getattr(case.mask, "ndim", 0)


def _one_value(case: Case, entry: Entry) -> bool:
    alike = isinstance(case.mask, Tensor) and bool((case.mask == case.mask.flatten()[0]).all()) and case.mask.ndim > 2
    return alike and not entry.with_2d and not (entry.declared and case.polarity)


def _one_token(case: Case, entry: Entry) -> bool:
    lone = case.attends.sum(axis=2) == 1
    lone &= (case.attends & case.keep[:, :, None]).sum(axis=1) == 1
    return bool((lone & case.keep).any()) and undecided(case, entry) and _dimensions(case) != 2


def _chunks(case: Case, entry: Entry) -> bool:
    if entry.declared or (case.plain and not case.packed) or (not entry.derives and _positions_tell(case)):
        return False
    one = case.keep.astype(np.int64)
    return any((chunked(one, size) == case.attends).all() for size in range(1, case.ids.shape[1]))


def _positions_tell(case: Case) -> bool:
    given = case.batch.get("position_ids")
    same = isinstance(given, Tensor) and bool((given.numpy() == positions(case.ids))[case.keep].all())
    return same and not _lone(case)


def _lone(case: Case) -> bool:
    """Rows of several sequences of one token each: their positions never count up, so they say nothing."""
    rows = [row[row > 0] for row in case.ids]
    return any(len(row) > 1 and len(set(row.tolist())) == len(row) for row in rows)


def _hidden_steps(case: Case, entry: Entry) -> bool:
    pattern = case.pattern
    hides = pattern is not None and (pattern.name == "sliding" or (pattern.name == "chunked" and not entry.declared))
    return hides and any((np.diff(np.flatnonzero(row)) >= pattern.size).any() for row in case.keep)


def _samples_against_mask(case: Case, entry: Entry) -> bool:
    said_less = case.keep.shape == case.draw.keep.shape and bool((case.keep != case.draw.keep).any())
    hidden = any(
        "attention_mask" not in feature and len(feature.get("input_ids", ())) > real
        for feature, real in zip(case.features, case.keep.sum(axis=1))
    )
    return entry.wraps and (hidden or (not entry.with_2d and (said_less or bool(np.any(case.silent)))))


def _visible_padding(case: Case, entry: Entry) -> bool:
    told = entry.with_2d or (not entry.derives and _positions_tell(case))
    return getattr(case.mask, "ndim", 4) != 2 and case.packed and bool(case.keep.all()) and not told


def _looks_padded(case: Case, entry: Entry) -> bool:
    tokens = np.asarray(() if case.unpadded else case.batch.get("input_ids", ()))
    ends = tokens.ndim == 2 and tokens.shape[1] > 1
    repeated = ends and bool(((tokens[:, 0] == tokens[:, 1]) | (tokens[:, -1] == tokens[:, -2])).any())
    return not entry.with_2d and bool(case.keep.all()) and repeated


def _says_nothing(case: Case, entry: Entry) -> bool:
    return not entry.with_2d or bool((case.keep[:, 1:] & ~case.keep[:, :-1]).any())


EVERYWHERE: dict[str, Reason] = {
    # A row of single tokens beside padding that attends padding: so does a 2D mask that is turned around look.
    "turned around": lambda case, entry: entry.with_2d and _lone(case),
    "single tokens": lambda case, entry: case.flat and not positions(case.ids).any() and "cu_seq_lens_q" not in case.batch,
    # Packed rows without padding that nobody sees: some sequences may be padding that attends itself.
    "visible padding": _visible_padding,
    # A 2D mask of the other polarity: beside a keep mask the two disagree, alone its labels are on padding.
    "contrary": lambda case, entry: case.contrary and not entry.declared,
    # `[B, 1, 1, S]`: padding beside causal attention, or attention to both sides.
    "keys for all queries": lambda case, entry: not entry.declared and _dimensions(case) == 4 and case.mask.shape[-2] == 1,
    # Another pattern than the causal one that this entry declares, or one that no declaration says.
    "foreign pattern": lambda case, entry: case.pattern is None or not (case.plain or entry.declared or entry.derives),
    # An inverted 2D mask looks like that, and a 4D one may have unmasked it.
    "empty row": lambda case, entry: bool((~case.keep).all(axis=1).any()),
    # Without a mask the samples must stand at one end of their rows, alike, to tell where padding is.
    "no mask": lambda case, entry: (
        case.mask is None and not (entry.with_2d or case.flat) and not (entry.wraps and case.draw.style in SIDED)
    ),
    # All places alike: all real, or all padding.
    "one value": _one_value,
    # Nothing blocked in a float mask: no padding (additive), or nothing but padding (0/1).
    "additive zeros": lambda case, entry: (
        isinstance(case.mask, Tensor) and case.mask.is_floating_point() and not case.mask.any() and not entry.declared
    ),
    # `[B, S]` with B == S may be one square mask that all rows share; its place in a batch would tell.
    "square 2D": lambda case, entry: (
        entry.derives and not entry.with_2d and _dimensions(case) == 2 and case.ids.shape[0] == case.ids.shape[1]
    ),
    # A token that attends nothing but itself: a sequence of one, or padding whose diagonal was forced.
    "one token": _one_token,
    # Packed rows that are chunked attention over one sequence as well; positions in the batch would tell.
    "chunks": _chunks,
    # Two sequences with padding between, or one whose hole is wider than its window.
    "wide gap": lambda case, entry: (
        case.draw.style in ("packed_gaps", "holes") and not entry.declared and (case.packed or not case.plain)
    ),
    # Two neighbours of a row that no window of this size joins: one sequence with a hole, or two sequences.
    "hidden steps": _hidden_steps,
    # A mask that shows no padding over rows that begin or end with one token again and again.
    "looks padded": _looks_padded,
    # The samples show padding where the mask shows none.
    "samples against mask": _samples_against_mask,
}
BY_NAME: dict[str, Reason] = {
    # Offsets that count padding to a sequence, beside positions that do not.
    "padding in offsets": lambda case, entry: "cu_seq_lens_q" in case.batch and not case.keep.all(),
    # Bidirectional attention with padding is, inverted, bidirectional attention of the padding.
    "either polarity": lambda case, entry: (
        isinstance(case.mask, Tensor) and case.mask.dtype == torch.bool and undecided(case, entry)
    ),
    # `[B, 1, 1, S]`, or `[B, S]` whose meaning is not the usual one: the numbers do not say which.
    "key row": undecided,
    # Another container, or a subclass that stands for numbers it does not hold.
    "no tensor": lambda case, entry: type(case.mask) is not Tensor,
    # Padding that attends itself is a sequence like any other, unless a 2D mask says what is real.
    "self-attending padding": lambda case, entry: not entry.with_2d and not case.keep.all(),
    # Empty rows were made to attend everything, so they look real.
    "unmasked rows": lambda case, entry: not entry.with_2d and not case.keep.all(),
    # A triangle has no word of padding; where some stands before a real token, it even says that it is attended.
    "says nothing": _says_nothing,
    # A flat row of several sequences without a word of where they meet; the samples beside it would tell.
    "no boundaries": lambda case, entry: not entry.wraps,
    # Rows of their own lengths: a collator pads them.
    "not padded yet": lambda case, entry: case.unpadded and entry.name != "collate",
    # A mask of ones and offsets say that the places of a tail are sequences, and the samples that they are none.
    "tail against samples": lambda case, entry: case.flat and entry.wraps,
    # Positions that restart beside a mask that goes on: two sources that tell different things.
    "positions against mask": lambda case, entry: not entry.derives,
}
REASONS = EVERYWHERE | BY_NAME


def _window_or_pack(case: Case, entry: Entry) -> bool:
    """A window that no hole lets through, or of one token, is, place by place, the attention of several sequences."""
    apart = np.where(case.keep, case.attends.argmax(2) + 1, 0)
    packs = (together(apart), causal(apart))
    return case.pattern is None and not case.plain and any((case.attends == pack).all() for pack in packs)


LIMITS: dict[str, Reason] = {
    # Positions are all that tells sequences of one token apart.
    "single tokens by positions": lambda case, entry: (
        _lone(case) and isinstance(case.batch.get("position_ids"), Tensor) and getattr(case.mask, "ndim", 2) == 2
    ),
    "window or pack": _window_or_pack,
    # One place behind the last sequence, counted as one more: a token alone that nobody learns looks the same.
    "a place alone": lambda case, entry: case.flat and entry.wraps and bool((case.ids[0, -2:] == 0).sum() == 1),
    # Sequences of the same one token at the end of a flat row, which nobody learns: a tail looks the same.
    "tokens alone": lambda case, entry: (
        case.flat and len(set(case.ids[0, -3:].tolist())) == 3 and case.draw.tokens[0, -2] == case.draw.tokens[0, -1]
    ),
}


def excuse(case: Case, entry: Entry, names: tuple[str, ...] = ()) -> str | None:
    """The first reason why a refusal is honest here, or None."""
    return next((name for name in (*EVERYWHERE, *names) if REASONS[name](case, entry)), None)
