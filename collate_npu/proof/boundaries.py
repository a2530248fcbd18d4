"""Boundaries of a kernel call: where sequences begin and what is padding, by its arguments, in one form for every kernel.

A call gives offsets, a number a token, a mask, or nothing; padding of a recurrent layer shows as zeros in what it writes.
One form holds all of it: for each token of the call the first token that its kernel can read (`first_T`), and which tokens
count for nothing (`neutral_T`). What follows from it is `rank_T`, how many tokens a token goes on from: in `0 0 A A B` with
zeros at padding and a boundary before B::

    first   0 0 0 0 4     neutral   1 1 0 0 0     rank   0 0 0 1 0

Legend: B rows, T tokens of a row, Q queries, K keys; arrays with suffix T run over all B * T tokens, row after row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import Array, host_array, once
from collate_npu.consumers.by_sequence import MixerPlan
from collate_npu.errors import CollateError, explain, shape_of
from collate_npu.masks.forms import mask_mod
from collate_npu.masks.patterns import Pattern
from collate_npu.segments import Segments, position_array

Attended = tuple[Tensor, Tensor]
"""bool `[Q, K]`: whom any head attends, and whom every head does."""


def row_of(keep: Tensor, b: int) -> Attended:
    """Return row b of `[..., H, Q, K]`, True = attends; a mask shared by rows or heads is spread."""
    row = keep[min(b, len(keep) - 1)] if keep.ndim > 3 else keep
    return (row, row) if row.ndim == 2 else (row.any(dim=0), row.all(dim=0))


class _Untouched(Tensor):
    """Stands for the number of a head, and raises where it is read: then heads differ."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise LookupError


def evaluated(tells: Callable[..., Tensor], b: int, heads: int, shape: tuple[int, int], device: Any) -> Attended:
    """Return which keys the queries of row b attend by a mask_mod or score_mod of flex attention, `tells(b, h, q, k)`.

    It is evaluated for each head only where heads differ."""
    from torch._dynamo import _trace_wrapped_higher_order_op as indexing

    zero = torch.zeros((), dtype=torch.int64, device=device)
    places_Q, places_K = (torch.arange(size, device=device) for size in shape)

    def of_head(h: Tensor) -> Tensor:
        row = torch.vmap(torch.vmap(lambda q, k: tells(zero + b, h, q, k), (None, 0)), (0, None))
        with getattr(indexing, "TransformGetItemToIndex", nullcontext)():  # so that torch before 2.13 indexes by tensors
            return row(places_Q, places_K).expand(shape)

    try:
        shared = of_head(zero.as_subclass(_Untouched))
    except LookupError:
        found = [of_head(zero + h) for h in range(heads)]
        return torch.stack(found).any(dim=0), torch.stack(found).all(dim=0)
    return shared, shared


Kind = Literal["attention", "rule", "convolution"]
MOST_SCORES = 1 << 26
"""Queries times keys of one row of a mask that is looked at."""
_LISTED = 12
_OF_ROWS = ("zeros", "mask", "atten_mask", "block_mask", "score_mod")
"""Arguments that mark padding of rows; any other bounds sequences."""


@dataclass(frozen=True)
class CallBoundaries:
    """Where the sequences of one kernel call begin, and which of its tokens are padding, by its arguments."""

    kernel: str
    """Its package and name: `fla.chunk_gated_delta_rule`."""
    kind: Kind
    shape: tuple[int, int]
    """B and T; B is 1 for a flat row."""
    first_T: Array
    """int64: for each token, the first token that its kernel can read."""
    neutral_T: Array
    """bool: tokens that add nothing: zeros, keys that a mask blocks for everybody, what offsets do not cover."""
    by: str = ""
    """The argument that says it; "" where none does."""
    window: int | None = None
    """Tokens that a query attends at most, itself among them; None where all."""
    causal: bool | None = None
    """Does attention look back alone? None where that is not known."""
    digest: int = 0
    """Of all scores that its mask allows."""
    allowed: Callable[[int], Attended] | None = field(default=None, repr=False)
    """Whom one row attends, where attention was given a mask, or attends to both sides; let go once it is judged."""
    keys: int = 0
    """How many they are, where they are not the queries' tokens."""

    @once
    def rank_T(self) -> Array:
        """int64: how many tokens each token reads before itself."""
        before_T = np.concatenate([[0], np.cumsum(~self.neutral_T)])
        rank_T: Array = before_T[:-1] - before_T[self.first_T]
        return rank_T

    @property
    def reach(self) -> int:
        """Return the largest number of tokens that a token reads, itself included."""
        far = int((np.arange(len(self.first_T)) - self.first_T).max(initial=0)) + 1
        return far if self.window is None else min(far, self.window)

    @property
    def fits(self) -> bool:
        """Return True if the offsets of the call, if any, lie within its tokens."""
        return not self.neutral_T.all() or self.by in ("", *_OF_ROWS)

    def same(self, other: CallBoundaries) -> bool:
        """Return True if both calls have the same sequences, padding, window, direction and mask."""
        names = ("kernel", "window", "causal", "digest")
        alike = all(getattr(self, name) == getattr(other, name) for name in names)
        return alike and np.array_equal(self.first_T, other.first_T) and np.array_equal(self.neutral_T, other.neutral_T)

    def __str__(self) -> str:
        if not self.by:
            return "nothing"
        if self.by in _OF_ROWS:
            lengths_B = (~self.neutral_T).reshape(self.shape).sum(axis=1)  # tokens that count, of each row
            return f"{self.by} {shown(lengths_B.tolist())}"
        if not self.fits:
            return f"{self.by} that are no offsets of its {len(self.first_T)} tokens"
        end = int(np.flatnonzero(~self.neutral_T)[-1]) + 1
        return shown([*np.flatnonzero((self.rank_T == 0) & ~self.neutral_T).tolist(), end])


def shown(numbers: Sequence[int]) -> str:
    """Return the first of these numbers as text."""
    few = ", ".join(map(str, numbers[:_LISTED]))
    return f"[{few}{', ...' * (len(numbers) > _LISTED)}]"


def row_starts(B: int, T: int) -> Array:
    """Return `first_T` of rows that are one sequence each."""
    return np.repeat(np.arange(B) * T, T)


def by_offsets(offsets: Sequence[int], total: int) -> tuple[Array, Array]:
    """Return `first_T` and `neutral_T` by offsets over the whole call; tokens that they do not cover are neutral."""
    places_T, starts = np.arange(total), np.array(offsets)
    if len(starts) < 2 or (np.diff(starts) < 0).any() or starts[0] < 0 or starts[-1] > total:
        return places_T, np.ones(total, bool)
    first_T = np.where(places_T < starts[0], places_T, starts[np.searchsorted(starts, places_T, side="right") - 1])
    return first_T, (places_T < starts[0]) | (places_T >= starts[-1])


def by_numbers(numbers_BT: Array) -> Array:
    """Return `first_T` by a number for each token: a sequence begins where it changes."""
    changes_BT = np.ones(numbers_BT.shape, bool)
    changes_BT[:, 1:] = numbers_BT[:, 1:] != numbers_BT[:, :-1]
    return _latest(changes_BT.reshape(-1))


def _latest(begins_T: Array) -> Array:
    """Return for each token the last at or before it that begins something; 0 before all of these."""
    at_T: Array = np.maximum.accumulate(np.where(begins_T, np.arange(len(begins_T)), 0))
    return at_T


def zeros_of(x: Tensor, order: str) -> Array:
    """Return bool `[B * T]`: tokens at which all channels are zero. `order` names the dimensions of x: B before T."""
    zero = x.detach() == 0
    across = tuple(at for at, axis in enumerate(order) if axis not in "BT")
    zero = zero.all(dim=across) if across else zero
    return np.ascontiguousarray(zero.cpu().numpy()).reshape(-1)


def by_mask(rows: Callable[[int], Attended], B: int, T: int) -> tuple[Array, Array, int]:
    """Return `first_T`, `neutral_T` and a digest by which keys the queries attend.

    A query that attends later keys, under a mask that is causal everywhere else, is padding: its keys do not count."""
    first_T, neutral_T, digest = np.zeros(B * T, np.int64), np.zeros(B * T, bool), 0
    for b in range(B):
        allowed_QK, by_all_QK = rows(b)
        for each_QK in (allowed_QK, by_all_QK)[: 1 + (by_all_QK is not allowed_QK)]:
            digest = crc32(np.packbits(each_QK.cpu().numpy()).tobytes(), digest)
        future_Q = torch.triu(allowed_QK, 1).any(dim=1)
        filled_Q = future_Q if not bool(future_Q[:-1].all()) else torch.zeros_like(future_Q)
        attends_QK = allowed_QK & ~filled_Q[:, None]
        past_QK = torch.tril(attends_QK)
        itself_Q = torch.arange(T, device=past_QK.device)
        first_Q = torch.where(past_QK.any(dim=1), past_QK.to(torch.uint8).argmax(dim=1), itself_Q)
        at = slice(b * T, (b + 1) * T)
        first_T[at], neutral_T[at] = first_Q.cpu().numpy() + b * T, ~attends_QK.any(dim=0).cpu().numpy()
    return first_T, neutral_T, digest


# --- against the truth


def places_in(call: CallBoundaries, segments: Segments) -> Array | None:
    """Return the places of the call's tokens in the flattened batch `[B * S]`; None for tokens of another batch."""
    total = len(call.first_T)
    if call.shape == segments.shape or (call.shape[0] == 1 and total == segments.array.size):
        return np.arange(total)
    if total == segments.num_tokens and call.shape[0] == 1:
        return np.flatnonzero(segments.array)
    return None


def boundary_reason(call: CallBoundaries, segments: Segments, empty_T: Array | None = None) -> str:
    """Return which real token reads other tokens than those of its own sequence; "" if none does.

    Tokens of the batch that are `empty_T` (zero before any layer) may be treated as padding."""
    places_T = places_in(call, segments)
    assert places_T is not None
    ids_T, own_T = (each.reshape(-1)[places_T] for each in (segments.array, position_array(segments)))
    S, real_T, rank_T = segments.shape[1], ids_T > 0, call.rank_T
    lost_T = real_T & call.neutral_T
    if empty_T is not None and len(empty_T) == segments.array.size:
        zero_T = lost_T & empty_T[places_T]
        before_T: Array = np.cumsum(zero_T) - zero_T
        own_T = own_T - (before_T - before_T[_latest(real_T & (own_T == 0))])
        real_T, lost_T = real_T & ~zero_T, lost_T & ~zero_T
    if call.window is not None:
        own_T, rank_T = np.where(own_T > 0, 1, 0), np.minimum(rank_T, 1)
    wrong_T = lost_T | (real_T & (rank_T != own_T))
    if call.window is None:  # as many tokens before it, but others
        at_T = np.where(call.neutral_T, len(ids_T), np.arange(len(ids_T)))
        next_T = np.minimum.accumulate(at_T[::-1])[::-1]  # the first at or behind it that counts
        wrong_T |= real_T & (own_T > 0) & (next_T[call.first_T] != next_T[_latest(real_T & (own_T == 0))])
    if not wrong_T.any():
        return ""
    t = int(np.argmax(wrong_T))
    at = f"the token at (row, column) ({places_T[t] // S}, {places_T[t] % S})"
    if lost_T[t]:
        return f"{at} is real, and the kernel treats it as padding"
    if call.rank_T[t] < own_T[t]:
        return f"{at} does not read the first {own_T[t] - call.rank_T[t]} tokens of its sequence"
    read = np.arange(call.first_T[t], t)
    others = read[~call.neutral_T[read] & (ids_T[read] != ids_T[t])]
    whose = "padding" if len(others) and (ids_T[others] == 0).all() else "another sequence"
    return f"{at} goes on from {whose}"


def attention_reason(
    segments: Segments, pattern: Pattern | None, b: int, attended: Attended, places_Q: Tensor | None = None
) -> str:
    """Return which real query attends other keys than the pattern says for its own sequence; "" if none does.

    `attended` is of the queries at these places of row b, by default all, and of all keys of that row. Without a pattern
    only keys of padding and of other sequences are wrong.
    """
    S, ids_S = segments.shape[1], segments.ids[b]
    at_Q = torch.arange(S) if places_Q is None else places_Q
    if attended[0].shape != (len(at_Q), S):
        return f"row {b} has {list(attended[0].shape)} queries and keys, not [{len(at_Q)}, {S}]"
    at_Q1, (any_QK, all_QK) = at_Q[ids_S[at_Q] != 0, None], (each.cpu()[ids_S[at_Q] != 0] for each in attended)
    expected_QK = any_QK
    if pattern is not None:
        expected_QK = mask_mod(segments, pattern)(torch.tensor(b), torch.tensor(0), at_Q1, torch.arange(S))
        if torch.equal(any_QK, expected_QK) and (all_QK is any_QK or torch.equal(all_QK, expected_QK)):
            return ""

    missing_QK = expected_QK & ~(any_QK if pattern is None else all_QK)
    heads = "" if bool((missing_QK & ~any_QK).any()) else " in one of its heads"
    for wrong_QK, what, verb, where in (
        (any_QK & (ids_S == 0), "attends padding", "attends", ""),
        (any_QK & (ids_S[at_Q1] != ids_S), "attends another sequence", "attends", ""),
        (any_QK & ~expected_QK, f"attends more than {pattern} attention does", "attends", ""),
        (missing_QK, "does not attend all of its sequence", "does not attend", heads),
    ):
        if bool(wrong_QK.any()):
            i, k = map(int, wrong_QK.nonzero()[0])
            return f"row {b} {what}: query {int(at_Q1[i])} {verb} key {k} of {S}{where}"
    return ""


def plan_reason(plan: MixerPlan, segments: Segments) -> str:
    """Return why a plan does not lay each sequence of a batch out as a row of its own; "" if it does."""
    if plan.part:  # another rank has the rest
        return ""
    if list(plan.lengths) != list(segments.sequence_lengths):
        return f"it has sequences of {shown(plan.lengths)} tokens, and the batch of {shown(segments.sequence_lengths)}"
    if sorted(each for rows in plan.buckets for each in rows) != list(range(len(plan.lengths))):
        return "a sequence stands in no bucket, or in two"
    starts, end = dict[int, int](), 0
    for rows, (n, L) in zip(plan.buckets, plan.shapes):
        starts |= {each: end + k * L for k, each in enumerate(rows)}
        end += n * L
    place_T = np.concatenate([np.arange(length) + starts[n] for n, length in enumerate(plan.lengths)])
    for found_T, expected_T in ((plan.place_T, place_T), (plan.at_T, segments.indices.numpy())):
        if found_T is not None and (wrong_T := found_T.cpu().numpy() != expected_T).any():
            return f"token {int(np.argmax(wrong_T))} of its flat row stands in another place than in its sequence"
    return ""


def position_reason(positions_T: Array, segments: Segments, first: int | None) -> str:
    """Return which real token has a wrong position; "" if none has.

    A position is one more than that of the token before it. Where positions are embedded, a sequence begins with `first`."""
    own_T, at = position_array(segments).reshape(-1), np.flatnonzero(segments.array)
    off = positions_T[at] - own_T[at]
    wrong = off != (off[_latest(own_T[at] == 0)] if first is None else first)
    if not wrong.any():
        return ""
    t = int(at[np.argmax(wrong)])
    place = f"({t // segments.shape[1]}, {t % segments.shape[1]})"
    return f"the token at (row, column) {place} has position {positions_T[t]}, as token {own_T[t]} of its sequence"


def offset_values(values: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the whole numbers of an argument, () where it is not given; a sync if they lie on a device. Raises
    `CollateError` for anything but one row of them."""
    if (given := values.get(name)) is None:
        return ()
    array = host_array(name, given)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        rule, remedy = "It is one row of whole numbers.", "Pass a tensor or list of them, as the operator takes it."
        raise CollateError(explain(name, shape_of(given), rule, remedy))
    return tuple(array.tolist())
