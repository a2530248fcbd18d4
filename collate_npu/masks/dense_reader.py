"""Dense reader: what a dense mask means, as sequences and the one attention pattern that give it back.

A token is real if it attends itself and if its key is used; both must agree. A query row that attends everything while
others do not is a filler (an empty row that its producer "unmasked") and is no evidence. Most masks are those of plain
causal attention: that is compared block by block, and rows that differ are read.

The reading is proved: rows that the pattern gives are compared with those of the mask, a block at a time; the first block
with a wrong row ends it. Where another reading gives the same matrix, the mask is refused and both are named. What is known
beside the mask (`Known`) is not guessed: with a keep mask only real rows count; with Segments only the rows are compared.

One pass over the mask for each pattern that holds, one block for most that do not; memory is a block of rows; doubts cost
O(B * S). Legend: B batch, S width, N sequences, Q/K query and key rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from collate_npu.arrays import Array
from collate_npu.errors import AmbiguousMaskError, explain_rows
from collate_npu.masks.dense_mask import REMEDY_CARRY_2D, Bools, Known, Reading, Square, regions_of, wrong_rows
from collate_npu.masks.patterns import CAUSAL, Pattern, Prefix, Sliding
from collate_npu.segments import Segments, of_keep


class UnexplainedError(Exception):
    """No padding and no pattern gives this matrix, under the polarity it was read with; `rows` says where and why.

    `instead` names a pattern that would explain it, where one was given.
    """

    def __init__(self, rows: list[tuple[int, str]], instead: Pattern | None = None) -> None:
        super().__init__()
        self.rows, self.instead = rows, instead


@dataclass(slots=True)
class Extents:
    """What each query row `[B, S]` attends: its first and last key, or its own place where it attends none; whether any."""

    first: Array
    last: Array
    some: Bools


@dataclass(frozen=True, slots=True)
class Shown:
    """What the matrix shows, `[B, S]`."""

    segments: Segments
    real: Bools
    full: Bools
    """Rows that attend everything."""
    filler: Bools
    """Rows that their producer unmasked; none where a keep mask says which rows count."""
    counts: Bools
    """Rows that count as evidence."""
    proved: Bools
    """Rows that plain causal attention on `segments` gives."""
    extents: Extents

    @property
    def reach(self) -> int:
        """How far back any row that counts looks, padding queries included."""
        back_BQ = np.arange(self.real.shape[1]) - self.extents.first
        return int(back_BQ.max(initial=0, where=self.counts))


def look(square: Square, keep_BS: Bools | None) -> Shown:
    """Return what the matrix shows. Raises `UnexplainedError` where a row that counts attends a key that is not real.

    Most masks are those of plain causal attention: rows that it gives are compared a block at a time, the others are read.
    """
    diagonal_BS = square.diagonal()
    # a token that does not attend itself attends another such: one row tells most wrong polarities
    used_BS = square.row(diagonal_BS.argmin(axis=1)) if keep_BS is None else keep_BS
    bad = {b: int(lost_S.argmax()) for b, lost_S in enumerate(used_BS & ~diagonal_BS) if lost_S.any()}
    if bad:
        text = "is attended by another token" if keep_BS is None else "is real in the 2D mask"
        raise UnexplainedError([(b, f"token {k} {text}, and does not attend itself") for b, k in bad.items()])
    full_BQ = full_rows(square)
    filler_BQ = fillers(full_BQ) if keep_BS is None else np.zeros_like(full_BQ)
    counts_BQ = ~filler_BQ if keep_BS is None else keep_BS
    real_BS = diagonal_BS & counts_BQ
    segments, begins_BS = sequences(square, real_BS)
    extents, proved_BQ = _causal_extents(real_BS, begins_BS), np.ones_like(real_BS)
    for b, regions in enumerate(regions_of(segments)):
        for low, high in square.blocks:
            other_Q = square.differing(b, low, high, regions, CAUSAL)
            proved_BQ[b, low:high] = ~other_Q
            lost_S = read_query_rows(square, b, low, other_Q, extents, counts_BQ) & ~real_BS[b]
            if lost_S.any():
                bad[b] = int(lost_S.argmax())
                break
    if bad:
        text = "is attended by other tokens, and is padding or does not attend itself"
        raise UnexplainedError([(b, f"token {k} {text}") for b, k in bad.items()])
    return Shown(segments, real_BS, full_BQ, filler_BQ, counts_BQ, proved_BQ, extents)


def full_rows(square: Square) -> Bools:
    """Return bool `[B, S]`: the query rows that attend every key."""
    full_BQ = square.column(0) & square.column(square.shape[1] - 1)
    for b, full_Q in enumerate(full_BQ):
        for low, high in square.blocks:
            at_N = np.flatnonzero(full_Q[low:high])
            if len(at_N):
                full_Q[low + at_N] = square.rows(b, low, high)[at_N].all(axis=1)
    return full_BQ


def _causal_extents(real_BS: Bools, begins_BS: Bools) -> Extents:
    """Return what queries attend under plain causal attention; padding attends what the token before it does."""
    own_S = np.arange(real_BS.shape[1], dtype=np.int32)
    first_BQ = np.maximum.accumulate(np.where(begins_BS, own_S, 0), axis=1)
    last_BQ = np.maximum.accumulate(np.where(real_BS, own_S, -1), axis=1)
    any_BQ = last_BQ >= 0
    return Extents(np.where(any_BQ, first_BQ, own_S), np.where(any_BQ, last_BQ, own_S), any_BQ)


def sequences(square: Square, real_BS: Bools) -> tuple[Segments, Bools]:
    """Return the Segments and, bool `[B, S]`, where a sequence begins: a real token that does not attend the one before."""
    begins_BS, follows_BS = real_BS.copy(), np.zeros_like(real_BS)
    follows_BS[:, 1:] = real_BS[:, :-1]
    begins_BS[:, 1:] &= ~(follows_BS[:, 1:] & square.diagonal(before=1))
    distant_BS = begins_BS & ~follows_BS & np.logical_or.accumulate(follows_BS, axis=1)
    if distant_BS.any():  # holes, and padding between sequences
        last_BS = np.maximum.accumulate(np.where(real_BS, np.arange(real_BS.shape[1]), 0), axis=1)
        b_N, q_N = np.nonzero(distant_BS)
        begins_BS[b_N, q_N] = ~square.at(b_N, q_N, last_BS[b_N, q_N - 1])
    if (np.count_nonzero(begins_BS, axis=1) <= 1).all():
        return of_keep(real_BS), begins_BS
    return Segments.from_ids(np.cumsum(begins_BS, axis=1) * real_BS), begins_BS


def after_token(real_BS: Bools) -> Bools:
    """Return bool `[B, S]`: True for padding behind the first real token of its row."""
    return np.logical_or.accumulate(real_BS, axis=1) & ~real_BS


def fillers(full_BQ: Bools) -> Bools:
    """Return bool `[B, S]`: query rows that attend every key, later ones too, in a row of the batch where others do not."""
    if not full_BQ[:, :-1].any():
        return np.zeros_like(full_BQ)  # alone, a last row that sees everything is an ordinary causal row
    filler_BQ = full_BQ & ~full_BQ.all(axis=1, keepdims=True)
    filler_BQ[:, -1] &= full_BQ[:, :-1].any(axis=1)
    return filler_BQ


def read_query_rows(square: Square, b: int, low: int, read_Q: Bools, into: Extents, counts_BQ: Bools) -> Bools:
    """Write the extents of these query rows, from `low` on, of one row of the batch to `into`; return the keys `[S]` that
    those of them attend that count."""
    if not read_Q.any():
        return np.zeros(square.shape[1], bool)
    q_N = low + np.flatnonzero(read_Q)
    rows_NK = square.rows(b, low, low + len(read_Q))
    rows_NK = rows_NK if read_Q.all() else rows_NK[read_Q]
    first_N, last_N = rows_NK.argmax(axis=1), rows_NK.shape[1] - 1 - rows_NK[:, ::-1].argmax(axis=1)
    any_N = rows_NK[np.arange(len(q_N)), first_N]
    into.some[b, q_N] = any_N
    into.first[b, q_N], into.last[b, q_N] = np.where(any_N, first_N, q_N), np.where(any_N, last_N, q_N)
    counts_N = counts_BQ[b, q_N]
    used_K: Bools = np.logical_or.reduce(rows_NK if counts_N.all() else rows_NK[counts_N], axis=0)
    return used_K


def all_extents(square: Square) -> Extents:
    """Return what every query attends, read off the whole matrix."""
    own_BQ, all_BQ = np.tile(np.arange(square.shape[1], dtype=np.int32), (square.shape[0], 1)), np.ones(square.shape, bool)
    extents = Extents(own_BQ, own_BQ.copy(), ~all_BQ)
    for b in range(len(all_BQ)):
        for low, high in square.blocks:
            read_query_rows(square, b, low, all_BQ[b, low:high], extents, all_BQ)
    return extents


def read_square(square: Square, known: Known) -> Reading:
    """Return the `Reading` of a `[B, S, S]` matrix.

    Raises `UnexplainedError` where nothing gives this matrix, `AmbiguousMaskError` where two different truths do.
    """
    keep_BS = None if known.segments is None else known.segments.array != 0
    if known.segments is not None and known.parted:
        pattern = prove(square, known.segments, known.pattern, lambda: (all_extents(square), 0))
        return Reading(known.segments, pattern)
    shown = look(square, keep_BS)
    segments, proved_BQ = shown.segments, shown.proved
    if known.pattern is not None and known.pattern.cuts and segments.packed:
        segments, proved_BQ = of_keep(shown.real), np.zeros_like(proved_BQ)
    if keep_BS is not None:
        refuse_inverted(square, segments)
    if not known.prove:
        return Reading(segments, None)
    refuse_gaps(shown, segments, known.pattern)
    pattern = prove(square, segments, known.pattern, lambda: (shown.extents, shown.reach), proved_BQ)
    if keep_BS is None:
        refuse_unmasked_rows(shown, pattern, declared=known.pattern is not None, unmasked_rows=known.unmasked_rows)
        refuse_visible_padding(shown, segments)
    if known.pattern is None and pattern.causal:
        refuse_chunks(shown, segments, pattern)
    return Reading(segments, pattern)


# --- one pattern gives it back


def prove(
    square: Square,
    segments: Segments,
    pattern: Pattern | None,
    extents: Callable[[], tuple[Extents, int]],
    proved_BQ: Bools | None = None,
) -> Pattern:
    """Return the pattern that gives the matrix back on every real row: the declared one, or the first that does.

    `extents`, what every query attends and how far back any that counts looks, is computed where the first pattern fails.
    `proved_BQ` are queries that plain causal attention is known to give. Raises `UnexplainedError`.
    """

    def wrong(tried: Pattern) -> Iterator[int]:
        return wrong_rows(square, segments, tried, proved_BQ if tried == CAUSAL else None)

    first = pattern or CAUSAL
    first.check(segments.num_sequences)
    if next(wrong(first), None) is None:
        return first
    seen = _seen(segments, *extents())
    tries = filter(None, (kind.explaining(*seen) for kind in Pattern.__subclasses__()))
    found = next((each for each in tries if each != first and next(wrong(each), None) is None), None)
    if pattern is None and found is not None:
        return found
    text = "rows that no pattern gives" if pattern is None else f"rows that are not those of {pattern} attention"
    raise UnexplainedError([(b, text) for b in wrong(first)], found)


def _seen(segments: Segments, extents: Extents, reach: int) -> tuple[int, list[int]]:
    """Return the arguments of `Pattern.explaining`: how far back real queries look, and the prefix of each sequence."""
    place_Q = np.arange(segments.shape[1])
    real_BQ = segments.array != 0
    back_BQ = np.where(real_BQ, place_Q - extents.first, 0)
    ahead_BQ = np.where(real_BQ & (extents.last > place_Q), extents.last + 1, 0)
    prefixes = [max(int(ahead_BQ[b, start:end].max()) - start, 0) for b, start, end in segments.spans]
    return max(reach, int(back_BQ.max(initial=0))), prefixes


# --- so do others


def refuse_inverted(square: Square, segments: Segments) -> None:
    """Raise where the 2D mask may be inverted: padding that attends itself alone would look like many sequences."""
    doubtful = [b for b, row in enumerate(segments.lengths) if len(row) > 1 and max(row) == 1]
    bad = [
        (b, f"{len(segments.lengths[b])} real tokens that attend only themselves, and padding that attends padding")
        for b in doubtful
        if any(_attends_other(square.rows(b, low, high), low, segments.array[b] == 0) for low, high in square.blocks)
    ]
    rule = "They are sequences of one token, or the 2D mask is inverted (True = padding)."
    _raise_ambiguous(bad, rule, "Pass attention_mask_2d with True = real; with sequences of one token, segment_ids too.")


def _attends_other(rows_QK: Bools, low: int, among_S: Bools) -> bool:
    """True if one of these tokens attends another of them."""
    q_N = np.flatnonzero(among_S[low : low + len(rows_QK)])
    found_NK = rows_QK[q_N] & among_S
    found_NK[np.arange(len(q_N)), low + q_N] = False
    return bool(found_NK.any())


def refuse_unmasked_rows(shown: Shown, pattern: Pattern, *, declared: bool, unmasked_rows: bool) -> None:
    """Raise where empty rows may be unmasked: right padding by one, or a row of padding, then looks like no padding."""
    filler_BS = shown.filler
    unmasks = unmasked_rows or bool(filler_BS.any())
    if (filler_BS.shape[1] < 2 and not unmasked_rows) or not (unmasks or isinstance(pattern, Prefix)):
        return
    all_B = np.asarray(shown.full.all(axis=1))
    mixed = not declared and isinstance(pattern, Prefix) and not all_B.all()
    pads_left = bool((filler_BS.any(axis=1) & ~filler_BS[:, -1]).any())
    last_B = shown.full[:, -1] & shown.real[:, -1]
    bad_B = (all_B & (unmasks or mixed)) | (last_B & (unmasks and not pads_left))
    bad = [
        (b, "rows that all see everything" if all_B[b] else "a last row that sees everything")
        for b in np.flatnonzero(bad_B).tolist()
    ]
    _raise_ambiguous(bad, "If the producer unmasks empty rows, these tokens are all real, or the last ones are padding.")
    end_B = filler_BS[:, -1] & (not unmasked_rows)
    ends = [(b, "last rows that see everything") for b in np.flatnonzero(end_B).tolist()]
    rule = "The last rows are padding that was unmasked, or real tokens that attend to both sides (an image)."
    _raise_ambiguous(ends, rule, f"Pass unmasked_rows=True if the producer unmasks rows. {REMEDY_CARRY_2D}")


def refuse_visible_padding(shown: Shown, segments: Segments) -> None:
    """Raise where padding may attend itself (a forced diagonal, a sequence of its own) and look like a sequence.

    Padding that nobody sees, in any row, shows that this producer's does not. One row that sees everything shows nothing:
    it was unmasked, or is padding that attends the others and, on its diagonal, itself.
    """
    if not segments.packed or ((~shown.real).sum(axis=1) > (shown.filler.sum(axis=1) == 1)).any():
        return
    packed = [(b, row) for b, row in enumerate(segments.lengths) if len(row) > 1]
    bad = [(b, f"sequences of {', '.join(map(str, row[:8]))} tokens") for b, row in packed]
    _raise_ambiguous(bad, "All of them are real, or some are padding that attends itself.")


def refuse_gaps(shown: Shown, segments: Segments, pattern: Pattern | None) -> None:
    """Raise where two sequences with padding between them look like one whose hole is wider than its window."""
    if not segments.packed or (pattern is not None and not isinstance(pattern, Sliding)):
        return
    reach = pattern.size - 1 if isinstance(pattern, Sliding) else shown.reach
    if pattern is None and (shown.real & (shown.extents.last > np.arange(segments.shape[1]))).any():
        return  # a query attends a key after it
    apart = {b: f"tokens {j} and {i} that do not attend each other" for b, j, i in _boundaries(segments) if i - j > reach}
    rule = f"No token looks back more than {reach}: they are in two sequences, or in one with a window of {reach + 1}."
    declare = "" if pattern is not None else "Pass pattern=, e.g. pattern='causal'. "
    _raise_ambiguous(sorted(apart.items()), rule, declare + REMEDY_CARRY_2D)


def refuse_chunks(shown: Shown, segments: Segments, pattern: Pattern) -> None:
    """Raise where packed sequences end on multiples of one number: one sequence under chunked attention looks the same.

    Packing and chunks at once are not considered: any longest sequence would be doubtful. Places are counted from a row's
    first token; padding that attends as the sequence before it belongs to that one.
    """
    if not segments.packed or pattern.reaches(segments.longest_span):
        return
    row_N, start_N, stop_N = np.array(segments.spans, np.int64).T
    meets_N = np.diff(row_N) == 0
    if ((shown.extents.some & ~shown.filler) | ~after_token(shown.real)).all():
        stop_N = np.append(np.where(meets_N, start_N[1:], segments.shape[1]), segments.shape[1])
    origin_N = start_N[np.searchsorted(row_N, row_N)]
    start_N, stop_N, first = start_N - origin_N, stop_N - origin_N, int(np.argmax(meets_N))
    for size in range(int(stop_N[first]), int(start_N[first + 1]) + 1):
        chunk_N = start_N // size
        if (chunk_N == (stop_N - 1) // size).all() and (np.diff(chunk_N)[meets_N] != 0).all():
            bad = {b: f"sequences that end at token {j}" for b, j, _ in reversed(list(_boundaries(segments)))}
            rule = f"They are packed sequences, or one sequence a row with chunked attention of {size}."
            remedy = f"Pass pattern='causal' or pattern=Pattern.chunked({size}). {REMEDY_CARRY_2D}"
            _raise_ambiguous(sorted(bad.items()), rule, remedy)


def _raise_ambiguous(rows: list[tuple[int, str]], rule: str, remedy: str = REMEDY_CARRY_2D) -> None:
    if rows:
        raise AmbiguousMaskError(explain_rows("attention_mask", rows, rule, remedy))


def _boundaries(segments: Segments) -> Iterator[tuple[int, int, int]]:
    """`(row, last token of a sequence, first token of the next)` wherever two meet in a row."""
    for (b, _, end), (next_b, next_start, _) in pairwise(segments.spans):
        if b == next_b:
            yield b, end - 1, next_start
