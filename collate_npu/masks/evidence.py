"""Evidence: what a square attention matrix says of padding and packing, and what it cannot say.

A token is real if it attends itself and if its key is used; both must agree. A query row that attends everything while
others do not is a filler (an empty row that its producer "unmasked") and is no evidence. Sequences end where a real
token does not attend the real token before it. Then the reading is proved: one attention pattern, rebuilt from it,
must give the matrix back on every real row; and every other reading that gives the same matrix is looked for.

Costs a few passes over S * S bytes per row of the batch. Legend: B batch, S width, Q/K query and key rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import from_numpy

from collate_npu.errors import AmbiguousMaskError, explain_rows
from collate_npu.masks.forms import dense
from collate_npu.masks.patterns import Pattern
from collate_npu.segments import Segments

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[Any]
Rows = list[tuple[int, str]]

CARRY = "Carry attention_mask_2d (or the lengths) from the collator and derive from that."


class UnexplainedError(Exception):
    """No padding and no pattern gives this matrix, under the polarity it was read with; `rows` says where and why."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        self.rows = rows


@dataclass(frozen=True, slots=True)
class _Facts:
    """What one row of the batch shows; the arrays are `[S]`."""

    real: Bools
    filler: Bools
    ids: Ints
    lone: Bools
    """Real, but its key is used by no other row and it uses no other key."""
    reach: int
    """How far back any row that counts looks, padding queries included."""
    sees_future: bool
    sees_all: bool
    last_sees_all: bool


def read_square(
    attends_BQK: Bools,
    *,
    keep_BS: Bools | None = None,
    pattern: Pattern | None = None,
    prove: bool = True,
    unmasked_rows: bool = False,
) -> Segments:
    """Segments of a `[B, S, S]` bool matrix, True = attends.

    With `keep_BS`, a 2D truth of the same batch, padding is known: the rows of padded queries are left out, and the
    matrix must agree with it everywhere else. Raises `UnexplainedError` where nothing gives this matrix,
    `AmbiguousMaskError` where two different truths do.
    """
    if keep_BS is not None:
        _check_padding(attends_BQK, keep_BS)
        attends_BQK = attends_BQK & keep_BS[:, :, None]
    facts = _facts(attends_BQK, keep_BS)
    ids_BS = np.stack([fact.ids for fact in facts])
    if pattern is not None and pattern.kind == "chunked":
        ids_BS = (ids_BS > 0).astype(np.int32)
    segments = Segments.from_ids(ids_BS)
    if prove:
        _refit(attends_BQK, segments, facts, pattern)
        if keep_BS is None:
            _refuse_unmasked_rows(facts, unmasked_rows)
            _refuse_self_attending(facts)
        if pattern is None and not any(fact.sees_future for fact in facts):
            _refuse_window_gaps(attends_BQK, segments, facts)
            _refuse_chunks(attends_BQK, segments, facts)
    return segments


def _check_padding(attends_BQK: Bools, keep_BS: Bools) -> None:
    """What a 2D truth calls padding may attend itself, everywhere or nowhere, and is seen by no other row that counts.

    A plain causal triangle in every row says nothing of padding (Megatron's dataset builds it so), and agrees with any.
    """
    S = keep_BS.shape[1]
    if (attends_BQK == np.tri(S, dtype=bool)).all():
        return
    filler_BQ = attends_BQK.all(axis=2) & ~keep_BS
    diagonal_BS = np.diagonal(attends_BQK, axis1=1, axis2=2)
    # A last row that sees everything may be a real token: a filler only where others are, or where it sees plain padding.
    filler_BQ[:, -1] &= filler_BQ[:, :-1].any() | (~keep_BS & ~diagonal_BS)[:, :-1].any(axis=1)
    padding_BS = ~keep_BS & ~filler_BQ
    own_BS = diagonal_BS & padding_BS
    forced = (own_BS == padding_BS).all()
    seen_BS = np.stack([rows[~filler].sum(axis=0) for rows, filler in zip(attends_BQK, filler_BQ)]) - own_BS
    wrong_BS = ~keep_BS & (seen_BS > 0) | own_BS & (not forced)
    bad = [
        (b, f"key {int(np.argmax(wrong_S))} attended, which the 2D mask calls padding")
        for b, wrong_S in enumerate(wrong_BS)
        if wrong_S.any()
    ]
    if bad:
        raise UnexplainedError(bad)


# --- reading


def _facts(attends_BQK: Bools, keep_BS: Bools | None) -> list[_Facts]:
    facts, bad = [], []
    for b, attends_QK in enumerate(attends_BQK):
        filler_Q = _fillers(attends_QK) if keep_BS is None else np.zeros(len(attends_QK), bool)
        used_K = attends_QK[~filler_Q].any(axis=0)
        real_S = attends_QK.diagonal() & ~filler_Q
        if (used_K != real_S).any():
            bad.append((b, _disagreement(used_K, real_S)))
        elif keep_BS is not None and (real_S != keep_BS[b]).any():
            bad.append((b, f"{real_S.sum()} real tokens where the 2D mask has {keep_BS[b].sum()}"))
        else:
            facts.append(_row_facts(attends_QK, filler_Q, real_S))
    if bad:
        raise UnexplainedError(bad)
    return facts


def _fillers(attends_QK: Bools) -> Bools:
    """Rows that attend every key, future ones included, while other rows do not."""
    full_Q: Bools = np.asarray(attends_QK.all(axis=1))
    if full_Q.all():
        return np.zeros_like(full_Q)
    filler_Q: Bools = full_Q.copy()
    filler_Q[-1] &= full_Q[:-1].any()  # alone, a last row that sees everything is an ordinary causal row
    return filler_Q


def _disagreement(used_K: Bools, real_S: Bools) -> str:
    at = int(np.flatnonzero(used_K != real_S)[0])
    if used_K[at]:
        return f"key {at} is attended by other tokens, but token {at} does not attend itself"
    return f"token {at} attends itself, but its key is used by no row that counts"


def _row_facts(attends_QK: Bools, filler_Q: Bools, real_S: Bools) -> _Facts:
    at = np.flatnonzero(real_S)
    ids = np.zeros(len(real_S), np.int32)
    linked = attends_QK[at[1:], at[:-1]]
    ids[at] = 1 + np.concatenate([[0], np.cumsum(~linked)])[: len(at)]
    first_Q, last_Q = _extent(attends_QK)
    place_Q = np.arange(len(real_S))
    alone = np.flatnonzero(real_S & (first_Q == place_Q) & (last_Q == place_Q))
    lone = np.zeros_like(real_S)
    lone[alone] = attends_QK[~filler_Q][:, alone].sum(axis=0) == 1
    return _Facts(
        real=real_S,
        filler=filler_Q,
        ids=ids,
        lone=lone,
        reach=int((place_Q - first_Q)[~filler_Q].max(initial=0)),
        sees_future=bool((last_Q > place_Q)[real_S].any()),
        sees_all=bool(attends_QK.all()),
        last_sees_all=bool(attends_QK[-1].all()),
    )


def _extent(attends_QK: Bools) -> tuple[Ints, Ints]:
    """First and last key each row attends; its own place for a row that attends none."""
    Q, K = attends_QK.shape
    any_Q = attends_QK.any(axis=1)
    first_Q = np.where(any_Q, attends_QK.argmax(axis=1), np.arange(Q))
    last_Q = np.where(any_Q, K - 1 - attends_QK[:, ::-1].argmax(axis=1), np.arange(Q))
    return first_Q, last_Q


# --- proof


def _refit(attends_BQK: Bools, segments: Segments, facts: list[_Facts], pattern: Pattern | None) -> None:
    candidates = [pattern] if pattern is not None else list(_candidates(attends_BQK, segments, facts))
    bad: Rows = []
    for candidate in candidates:
        rebuilt_BQK = dense(segments, pattern=candidate, max_mask_bytes=1 << 62)[:, 0].numpy()
        wrong_B = ((rebuilt_BQK != attends_BQK) & segments.keep.numpy()[:, :, None]).any(axis=(1, 2))
        if not wrong_B.any():
            return
        bad = [(int(b), f"rows that are not those of {candidate} attention") for b in np.flatnonzero(wrong_B)]
    raise UnexplainedError(bad)


def _candidates(attends_BQK: Bools, segments: Segments, facts: list[_Facts]) -> Iterator[Pattern]:
    if any(fact.sees_future for fact in facts):
        yield Pattern("bidirectional")
        yield Pattern.prefix([_prefix(attends_BQK[b, start:end, start:end]) for b, start, end in segments.spans])
    else:
        yield Pattern.sliding(max(fact.reach for fact in facts) + 1)


def _prefix(attends_QK: Bools) -> int:
    real_Q = attends_QK.diagonal()
    last_Q = _extent(attends_QK)[1]
    return int((last_Q + 1)[real_Q & (last_Q > np.arange(len(last_Q)))].max(initial=0))


# --- other readings of the same matrix


def _raise_ambiguous(rows: Rows, rule: str, remedy: str = CARRY) -> None:
    if rows:
        raise AmbiguousMaskError(explain_rows("attention_mask", rows, rule, remedy))


def _refuse_unmasked_rows(facts: list[_Facts], declared: bool) -> None:
    """A producer that unmasks empty rows makes right padding by one, or a row of padding, equal to no padding at all."""
    if len(facts[0].real) < 2 or not (declared or any(fact.filler.any() for fact in facts)):
        return
    pads_left = any(fact.filler.any() and not fact.filler[-1] for fact in facts)
    rows = [
        (b, "rows that all see everything" if fact.sees_all else "a last row that sees everything")
        for b, fact in enumerate(facts)
        if fact.sees_all or (fact.last_sees_all and fact.real[-1] and not pads_left)
    ]
    rule = "Where empty rows are unmasked, these are real tokens throughout, or end in padding."
    _raise_ambiguous(rows, rule)


def _refuse_self_attending(facts: list[_Facts]) -> None:
    """Padding forced to attend itself looks like a sequence of one token, unless other padding shows it is not forced."""
    if any((~fact.real & ~fact.filler).any() for fact in facts):
        return
    rows = [
        (b, f"tokens {np.flatnonzero(fact.lone).tolist()[:8]} that attend only themselves")
        for b, fact in enumerate(facts)
        if fact.lone.any()
    ]
    _raise_ambiguous(rows, "Such a token is a sequence of one, or padding whose diagonal was forced to attend.")


def _refuse_window_gaps(attends_BQK: Bools, segments: Segments, facts: list[_Facts]) -> None:
    """Two sequences with padding between them look like one sequence whose hole is wider than its window."""
    reach = max(fact.reach for fact in facts)
    apart = [(b, j, i) for b, _, j, i in _boundaries(segments) if i - j > reach]
    ids_BS = segments.ids.numpy().copy()
    for b, _, i in apart:
        ids_BS[b, i:] -= ids_BS[b, i:] > 0
    if apart and _gives(attends_BQK, Segments(from_numpy(ids_BS)), Pattern.sliding(reach + 1), facts):
        rows = {b: f"tokens {j} and {i} that do not meet" for b, j, i in reversed(apart)}
        rule = f"No token looks back more than {reach}: they are two sequences, or one under a window of {reach + 1}."
        _raise_ambiguous(list(rows.items()), rule, "Declare the pattern, e.g. pattern='causal'. " + CARRY)


def _refuse_chunks(attends_BQK: Bools, segments: Segments, facts: list[_Facts]) -> None:
    """Packed sequences that end on multiples of one number look like one sequence a row under chunked attention.

    Packing and chunks at once are not considered: any longest sequence would be doubtful.
    """
    boundaries = list(_boundaries(segments))
    if not boundaries:
        return
    _, origin, j, i = boundaries[0]
    unpacked = Segments.from_keep(segments.keep)
    for size in range(j - origin + 1, i - origin + 1):
        if _gives(attends_BQK, unpacked, Pattern.chunked(size), facts):
            rows = {b: f"sequences that end at token {j}" for b, _, j, _ in reversed(boundaries)}
            rule = f"They are packed sequences, or one sequence a row under chunked attention of {size}."
            remedy = f"Declare pattern='causal' or pattern=Pattern.chunked({size}). " + CARRY
            _raise_ambiguous(list(rows.items()), rule, remedy)


def _gives(attends_BQK: Bools, segments: Segments, pattern: Pattern, facts: list[_Facts]) -> bool:
    """Does this other truth give the same matrix, with padded queries masked or not?"""
    rebuilt_BQK = dense(segments, pattern=pattern, max_mask_bytes=1 << 62)[:, 0].numpy()
    counts_BQ = ~np.stack([fact.filler for fact in facts])
    wrong_BQ = (rebuilt_BQK != attends_BQK).any(axis=2) & counts_BQ
    keep_BQ = segments.keep.numpy()
    blank = not (attends_BQK.any(axis=2) & counts_BQ & ~keep_BQ).any()
    return not (wrong_BQ & keep_BQ).any() if blank else not wrong_BQ.any()


def _boundaries(segments: Segments) -> Iterator[tuple[int, int, int, int]]:
    """`(row, the row's first token, last token of a sequence, first token of the next)` wherever two meet in a row."""
    origin = 0
    for (b, start, end), (next_b, next_start, _) in pairwise(segments.spans):
        origin = start if segments.ids[b, start] == 1 else origin
        if b == next_b:
            yield b, origin, end - 1, next_start
