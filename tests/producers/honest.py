"""Where a refusal is honest: the list of reasons, each a fact of the case. A refusal without one of them is a failure.

`EVERYWHERE` holds for every producer; a producer names the others that its form brings.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from drawing import chunked, positions
from entries import Entry
from torch import Tensor
from verdicts import Case

Reason = Callable[[Case, Entry], bool]


def _foreign(case: Case, entry: Entry) -> bool:
    """Another pattern than the causal one that this entry declares, or one that no declaration says."""
    return case.pattern is None or not (case.plain or entry.declared or entry.derives)


def _empty_row(case: Case, entry: Entry) -> bool:
    """A row of padding alone: an inverted 2D mask looks like that, and a 4D one may have unmasked it."""
    return bool((~case.keep).all(axis=1).any())


def _no_mask(case: Case, entry: Entry) -> bool:
    return case.mask is None and not entry.with_2d and not case.flat and not entry.wraps


def _no_mask_no_side(case: Case, entry: Entry) -> bool:
    """Without a mask the samples must stand at one end of their rows, alike, to tell where padding is."""
    return case.mask is None and not entry.with_2d and not case.flat and case.draw.style not in ("none", "right", "left")


def _recurrent(case: Case, entry: Entry) -> bool:
    """No mask keeps a recurrent layer's state from crossing a boundary, or a hole."""
    asked = entry.name.startswith("megatron") and bool(case.draw.tokens.sum() % 2)
    return asked and (case.packed or _has_gap(case))


def _has_gap(case: Case) -> bool:
    return any((np.diff(np.flatnonzero(row)) > 1).any() for row in case.keep)


def _undecided(case: Case, entry: Entry) -> bool:
    """The bare mask, and nobody said how to read it."""
    return not entry.with_2d and not entry.declared


def _one_value(case: Case, entry: Entry) -> bool:
    """All places alike: all real, or all padding."""
    mask = case.mask
    alike = isinstance(mask, Tensor) and bool((mask == mask.flatten()[0]).all()) and mask.ndim > 2
    return alike and not entry.with_2d and not (entry.declared and case.polarity)


def _additive_zeros(case: Case, entry: Entry) -> bool:
    """Nothing blocked in a float mask: no padding (additive), or nothing but padding (0/1)."""
    mask = case.mask
    return isinstance(mask, Tensor) and mask.is_floating_point() and not mask.any() and not entry.declared


def _square_2d(case: Case, entry: Entry) -> bool:
    """`[B, S]` with B == S may be one square mask that all rows share; its place in a batch would tell."""
    square = getattr(case.mask, "ndim", 0) == 2 and case.ids.shape[0] == case.ids.shape[1]
    return entry.derives and not entry.with_2d and square


def _one_token(case: Case, entry: Entry) -> bool:
    """A token that attends nothing but itself: a sequence of one, or padding whose diagonal was forced."""
    lone = case.attends.sum(axis=2) == 1
    lone &= (case.attends & case.keep[:, :, None]).sum(axis=1) == 1
    return bool((lone & case.keep).any()) and _undecided(case, entry) and getattr(case.mask, "ndim", 0) != 2


def _chunks(case: Case, entry: Entry) -> bool:
    """Packed rows that are chunked attention over one sequence as well; positions in the batch would tell."""
    if entry.declared or (case.plain and not case.packed) or (not entry.derives and _positions_tell(case)):
        return False
    one = case.keep.astype(np.int64)
    return any((chunked(one, size) == case.attends).all() for size in range(1, case.ids.shape[1]))


def _positions_tell(case: Case) -> bool:
    given = case.batch.get("position_ids")
    return isinstance(given, Tensor) and bool((given.numpy() == positions(case.ids))[case.keep].all())


def _wide_gap(case: Case, entry: Entry) -> bool:
    """Two sequences with padding between, or one whose hole is wider than its window."""
    return case.draw.style in ("packed_gaps", "holes") and not entry.declared and (case.packed or not case.plain)


def _hidden_steps(case: Case, entry: Entry) -> bool:
    """Two neighbours of a row that no window of this size joins: one sequence with a hole, or two sequences."""
    pattern = case.pattern
    hides = pattern is not None and (pattern.name == "sliding" or (pattern.name == "chunked" and not entry.declared))
    if not hides:
        return False
    return any((np.diff(np.flatnonzero(row)) >= pattern.size).any() for row in case.keep)


def _samples_against_mask(case: Case, entry: Entry) -> bool:
    """The samples show padding where the mask shows none."""
    said_less = case.keep.shape == case.draw.keep.shape and bool((case.keep != case.draw.keep).any())
    hidden = any(
        "attention_mask" not in feature and len(feature.get("input_ids", ())) > real
        for feature, real in zip(case.features, case.keep.sum(axis=1))
    )
    if entry.wraps and hidden:
        return True
    return entry.wraps and not entry.with_2d and (said_less or bool(np.any(case.silent)))


def _visible_padding(case: Case, entry: Entry) -> bool:
    """Packed rows without padding that nobody sees: some sequences may be padding that attends itself."""
    dense = getattr(case.mask, "ndim", 4) != 2
    told = entry.with_2d or (not entry.derives and _positions_tell(case))
    return dense and case.packed and bool(case.keep.all()) and not told


def _contrary(case: Case, entry: Entry) -> bool:
    """A 2D mask of the other polarity, undeclared: beside a keep mask the two disagree, alone its labels are on padding."""
    return case.contrary and not entry.declared


def _keys_for_all_queries(case: Case, entry: Entry) -> bool:
    """`[B, 1, 1, S]`: padding beside causal attention, or attention to both sides."""
    return not entry.declared and getattr(case.mask, "ndim", 0) == 4 and case.mask.shape[-2] == 1


def _turned_around(case: Case, entry: Entry) -> bool:
    """A row of single tokens beside padding that attends padding: so does a 2D mask that is turned around look."""
    rows = [row[row > 0] for row in case.ids]
    return entry.with_2d and any(len(row) > 1 and len(set(row.tolist())) == len(row) for row in rows)


EVERYWHERE: dict[str, Reason] = {
    "turned around": _turned_around,
    "visible padding": _visible_padding,
    "contrary": _contrary,
    "keys for all queries": _keys_for_all_queries,
    "foreign pattern": _foreign,
    "empty row": _empty_row,
    "no mask": _no_mask,
    "no mask and no side": _no_mask_no_side,
    "recurrent layers": _recurrent,
    "one value": _one_value,
    "additive zeros": _additive_zeros,
    "square 2D": _square_2d,
    "one token": _one_token,
    "chunks": _chunks,
    "wide gap": _wide_gap,
    "hidden steps": _hidden_steps,
    "samples against mask": _samples_against_mask,
}


def _either_polarity(case: Case, entry: Entry) -> bool:
    """Bidirectional attention with padding is, inverted, bidirectional attention of the padding."""
    mask = case.mask
    return isinstance(mask, Tensor) and mask.dtype == torch.bool and _undecided(case, entry)


def _key_row(case: Case, entry: Entry) -> bool:
    """`[B, 1, 1, S]`, or `[B, S]` whose meaning is not the usual one: the numbers do not say which."""
    return _undecided(case, entry)


def _no_tensor(case: Case, entry: Entry) -> bool:
    """Another container, or a subclass that stands for numbers it does not hold."""
    return type(case.mask) is not Tensor


def _self_attending(case: Case, entry: Entry) -> bool:
    """Padding that attends itself is a sequence like any other, unless a 2D mask says what is real."""
    return not entry.with_2d and not case.keep.all()


def _unmasked(case: Case, entry: Entry) -> bool:
    """Empty rows were made to attend everything, so they look real."""
    return not entry.with_2d and not case.keep.all()


def _says_nothing(case: Case, entry: Entry) -> bool:
    """A triangle has no word of padding; where some stands before a real token, it even says that it is attended."""
    keep = case.keep
    return not entry.with_2d or bool((keep[:, 1:] & ~keep[:, :-1]).any())


def _no_boundaries(case: Case, entry: Entry) -> bool:
    """A flat row of several sequences without a word of where they meet; the samples beside it would tell."""
    return not entry.wraps


def _positions_against_mask(case: Case, entry: Entry) -> bool:
    """Positions that restart beside a mask that goes on: two sources that tell different things."""
    return not entry.derives


BY_NAME: dict[str, Reason] = {
    "either polarity": _either_polarity,
    "key row": _key_row,
    "no tensor": _no_tensor,
    "self-attending padding": _self_attending,
    "unmasked rows": _unmasked,
    "says nothing": _says_nothing,
    "no boundaries": _no_boundaries,
    "positions against mask": _positions_against_mask,
}
REASONS = EVERYWHERE | BY_NAME


def excuse(case: Case, entry: Entry, names: tuple[str, ...] = ()) -> str | None:
    """The first reason why a refusal is honest here, or None."""
    for name in (*EVERYWHERE, *names):
        if REASONS[name](case, entry):
            return name
    return None
