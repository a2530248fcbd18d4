"""Dense mask: what a mask that someone else built means, as `Segments` and the one attention pattern that gives it back.

Takes every rank, dtype and polarity in use (transformers, Megatron-LM, ms-swift, verl, torch_npu). In a square mask a token
is real if it attends itself and its key is used; both must agree. A query row that attends everything while others do not is
a filler (an empty row that its producer "unmasked") and is no evidence. The reading is proved: a pattern must give back all
rows that count. Where another reading gives the same matrix, the mask is refused and both are named. What is known beside a
mask (`Known`) is not guessed: with a keep mask only real rows count; with Segments the rows are compared, no more.

Most masks are plain causal: a pass compares them block by block, and rows that differ are read. Nothing of the size of the
mask is built: a bool mask is read where it lies, any other dtype block by block. Doubts and key masks cost O(B * S).
Legend: B batch, S width, H heads, N sequences, Q/K query and key rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from collate_npu.arrays import Array, host_tensor
from collate_npu.errors import AmbiguousMaskError, CollateError, PolarityError, explain, explain_rows, refuse_rows
from collate_npu.keys import MASK_KEY
from collate_npu.masks.mask_values import (
    ALL,
    REMEDY_CARRY_2D,
    REMEDY_DECLARE_POLARITY,
    Bools,
    Known,
    MaskValues,
    Polarity,
    Square,
    check_same_padding,
    heads_differ_error,
    no_mask_error,
    polarities_of,
    read_keys,
    read_keys_beside,
    refuse_compressed,
    wrong_rows,
)
from collate_npu.masks.patterns import CAUSAL, Pattern, Prefix, Sliding, regions_of
from collate_npu.masks.sources import wrong_shape_error
from collate_npu.segments import Segments, Values, of_keep, ready
from collate_npu.validation import checked


class Reading(NamedTuple):
    """The sequences that a mask shows and the pattern that gives it back (None where no pattern was looked for)."""

    segments: Segments
    pattern: Pattern | None


@checked
def derive_segments(
    attention_mask: Values,
    *,
    polarity: Polarity | None = None,
    keep: Values | None = None,
    pattern: str | Pattern | None = None,
    prove: bool = True,
    unmasked_rows: bool = False,
) -> Segments:
    """Return the `Segments` of a mask `[B,S]`, `[B,1,1,S]`, `[B,S,S]`, `[S,S]`, `[1,1,S,S]`, `[B,1,S,S]` or `[B,H,S,S]`.

    It is the inverse of `dense` for every polarity, pattern and padding side, or raises an error. The dtype is bool, 0/1 of
    any number type, or an additive float (blocked at or below -9984, so ALiBi and position biases pass). All heads must
    block the same keys. A `[B, S]` mask is read as keep, 1 = real, and each row must have a real token, unless you pass
    `polarity`. Whole numbers above 1 are packing ids (`1 1 2 2 0`).

    * `attention_mask`: the mask, in one of these shapes: bool, 0/1, additive, or packing ids.
    * `polarity`: "keep", "masked" or "bias". None: read both ways, and the one proved counts. Declare it for `[B,1,1,S]`.
    * `keep`: `[B, S]`, 1 = real. It decides what the mask leaves open: the polarity, and whether a token that sees only
      itself is padding. The mask must agree with it at real tokens.
    * `pattern`: what attention sees, if two patterns would explain the mask. "chunked" also means that rows are not packed.
    * `prove`: False skips the proof (rebuilding the mask) and compares its diagonal with its columns: for custom attention.
    * `unmasked_rows`: True if the producer fills fully blocked rows with True (transformers 4.x `_unmask_unattended`).
      False: this is assumed only if a row of this batch shows it. All rows of a batch must be padded on one side.

    Raises `PolarityError`, `AmbiguousMaskError` (both name the readings), or `CollateError` for values and shapes that
    no mask has. Derive before a context-parallel split: a shard has lost the columns this reads.

    >>> from collate_npu import Segments
    >>> from collate_npu.masks import dense
    >>> masked = dense(Segments.from_lengths([3, 5], side="left"), polarity="masked")
    >>> derive_segments(masked), derive_segments(~masked) == derive_segments(masked)
    (Segments(B=2, S=5, lengths=[3, 5], padding='left'), True)
    >>> derive_segments([[1, 1, 2, 2, 0]]).lengths
    ((2, 2),)
    """
    values = MaskValues(host_tensor(MASK_KEY, attention_mask), polarity)
    how = None if pattern is None else Pattern.of(pattern)
    truth = None if keep is None else of_keep(read_keys(MaskValues(host_tensor("keep", keep), "keep", "keep")).array != 0)
    known = Known(segments=truth, parted=False, pattern=how, prove=prove, unmasked_rows=unmasked_rows and keep is None)
    return ready(read_mask(values, known).segments)


def read_mask(values: MaskValues, known: Known, batch_size: int | None = None) -> Reading:
    """Return what a mask of any rank shows, alone or beside the Segments of its batch, for a batch of `batch_size` rows."""
    return _read_alone(values, known, batch_size) if known.segments is None else _read_beside(values, known, known.segments)


def _read_beside(values: MaskValues, known: Known, truth: Segments) -> Reading:
    """Read a mask of any rank; it and the truth must agree on what is real."""
    full, (B, S) = values.full, truth.shape
    rows = (B, S) if full.ndim == 2 else (1, B)
    if full.ndim not in (2, 3, 4) or full.shape[-1] != S or full.shape[0] not in rows:
        raise wrong_shape_error(values.key, values.got, (B, S))
    if tuple(full.shape[:-1]) in ((B,), (B, 1, 1)) and not (full.ndim == 4 and S == 1):
        found = read_keys_beside(values, truth.array != 0)
        check_same_padding(truth, values.key, found)
        return Reading(truth if known.parted else found, None)
    if full.shape[-2] != full.shape[-1]:
        raise no_mask_error(values)
    return _square(values, known, B) if full.numel() else Reading(truth, None)


def _read_alone(values: MaskValues, known: Known, batch_size: int | None) -> Reading:
    """Read a mask of any rank by itself."""
    shape = values.full.shape
    refuse_compressed(values)
    if not values.full.numel() and len(shape) in (2, 3, 4):
        if shape[-1]:
            _check_rows(values, shape[0], batch_size)
        return Reading(Segments(np.zeros((batch_size or shape[0], shape[-1]), np.int32)), None)
    if len(shape) == 2:
        return _of_two_dims(values, known, batch_size)
    if len(shape) == 4 and shape[1:3] == (1, 1) and shape[3] > 1:
        if values.declared is None:
            rule = "True is 'attends' (SDPA) or 'blocked' (TransformerEngine's padding mask), and a key mask shows neither."
            raise PolarityError(explain(values.key, values.got, rule, REMEDY_DECLARE_POLARITY, more="polarity"))
        return _repeat(values, Reading(of_keep(values.read(values.raw[:, 0, 0], values.declared)), None), batch_size)
    if len(shape) in (3, 4) and shape[-1] == shape[-2]:
        return _repeat(values, _square(values, known, shape[0]), batch_size)
    raise no_mask_error(values)


def _of_two_dims(values: MaskValues, known: Known, batch_size: int | None) -> Reading:
    rows, S = values.full.shape
    low, high = values.range
    square = rows == S and low != high and high <= 1
    if square and batch_size not in (None, S):
        return _repeat(values, _square(values, known, 1), batch_size)
    if square and not all(isinstance(tried, UnexplainedError) for tried in _readings(values, known, 1).values()):
        rule = f"It is a keep mask of {S} rows [B, S], or one square mask [S, S] that all rows share."
        raise AmbiguousMaskError(explain(values.key, values.got, rule, "Pass [B, 1, S, S], or attention_mask_2d."))
    _check_rows(values, rows, batch_size)
    return Reading(read_keys(values, alone=True), None)


def _repeat(values: MaskValues, reading: Reading, batch_size: int | None) -> Reading:
    """Return the reading for each row of the batch: one row may be that of all."""
    rows = reading.segments.shape[0]
    if rows == 1 and batch_size and batch_size > 1:
        return Reading(Segments(np.repeat(reading.segments.array, batch_size, axis=0)), reading.pattern)
    _check_rows(values, rows, batch_size)
    return reading


def _check_rows(values: MaskValues, rows: int, batch_size: int | None) -> None:
    if batch_size not in (None, rows):
        rule = f"The batch has {batch_size} rows."
        raise CollateError(explain(values.key, values.got, rule, "Pass the mask of this batch, before any split."))


def _readings(
    values: MaskValues, known: Known, batch_size: int
) -> dict[str, Reading | AmbiguousMaskError | UnexplainedError]:
    """Return, for each polarity to try, the reading of a square mask, or the error that says why it is ambiguous or none."""
    tried: dict[str, Reading | AmbiguousMaskError | UnexplainedError] = {}
    for polarity in polarities_of(values, known.segments):
        try:
            tried[polarity] = read_square(Square(values, polarity, batch_size), known)
        except (AmbiguousMaskError, UnexplainedError) as error:
            tried[polarity] = error.with_traceback(None)  # whose frames would hold the whole matrix
    if len(tried) == 2 and tried["keep"] == tried["masked"]:
        del tried["masked"]  # a batch of padding alone, known from the 2D mask: both readings say so
    return tried


def _square(values: MaskValues, known: Known, batch_size: int) -> Reading:
    """Return the reading of `[B, S, S]` or `[B, H, S, S]`, by the declared or the proved polarity; heads are alike."""
    if values.full.ndim == 4 and values.full.shape[1] > 1 and values.heads_differ():
        raise heads_differ_error(values)
    tried = _readings(values, known, batch_size)
    failed = {name: x for name, x in tried.items() if isinstance(x, UnexplainedError)}
    found = {name: x for name, x in tried.items() if not isinstance(x, UnexplainedError)}
    if not found:
        raise _unexplained(values, known, failed)
    # where a pattern was declared, that may be what is wrong, and not the other reading
    others = {name: str(error.instead) for name, error in failed.items() if error.instead is not None}
    result = next(iter(found.values()))
    if len(found) > 1 or (others and isinstance(result, Reading)):
        readings = {name: repr(x.segments) if isinstance(x, Reading) else "ambiguous too" for name, x in found.items()}
        text = "; ".join(f"as '{name}' it is {found_as}" for name, found_as in (readings | others).items())
        rule = f"Both readings are possible: {text}."
        raise PolarityError(explain(values.key, values.got, rule, REMEDY_DECLARE_POLARITY, more="polarity"))
    if isinstance(result, AmbiguousMaskError):
        raise result
    return result


def _unexplained(values: MaskValues, known: Known, failed: dict[str, UnexplainedError]) -> AmbiguousMaskError:
    rows = [(row, f"as '{name}': {text}") for name, error in failed.items() for row, text in error.rows]
    instead = next((error.instead for error in failed.values() if error.instead is not None), None)
    got = values.got
    if instead is not None:
        rule = f"{got} is not {known.pattern} attention on these tokens; {instead} would explain it."
        remedy = f"Pass pattern={instead.expression} if the model attends so, or pass attention_mask_2d in its place."
    elif known.segments is not None:
        rule = f"{got} and the other keys of the batch name different real tokens, under every pattern."
        remedy = "Remove the wrong one: with attention_mask_2d this mask can be left out; "
        remedy += "or pass pattern= of custom attention."
    else:
        rule = f"{got} is no padding and no pattern (causal, sliding, chunked, prefix, bidirectional)."
        remedy = f"{REMEDY_CARRY_2D} If True means the opposite, pass the other polarity=; if the attention is custom, "
        remedy += "pattern=. In derive_segments: if the attention is custom, pass prove=False; "
        remedy += "if padding attends itself, pass keep=."
    return AmbiguousMaskError(explain_rows(values.key, rows, rule, remedy, more="mask-pattern"))


class UnexplainedError(Exception):
    """No padding and no pattern gives this matrix, under the polarity it was read with; `rows` says where and why, `instead`
    names a pattern that would explain it, where one was given."""

    def __init__(self, rows: list[tuple[int, str]], instead: Pattern | None = None) -> None:
        super().__init__()
        self.rows, self.instead = rows, instead


class Extents(NamedTuple):
    """The first and last key that each query row `[B, S]` attends; where it attends none, its own place and -1."""

    first: Array
    last: Array


class Shown(NamedTuple):
    """What the matrix shows, `[B, S]`: `real` tokens; query rows that attend everything (`full`), of these the ones that the
    producer unmasked (`filler`; none beside a keep mask), rows that are evidence (`counts`), and rows that plain causal
    attention on `segments` gives (`proved`)."""

    segments: Segments
    real: Bools
    full: Bools
    filler: Bools
    counts: Bools
    proved: Bools
    extents: Extents

    @property
    def reach(self) -> int:
        """Return how far back any row that counts looks, padding queries included."""
        back_BQ = np.arange(self.real.shape[1]) - self.extents.first
        return int(back_BQ.max(initial=0, where=self.counts))


def look(square: Square, keep_BS: Bools | None) -> Shown:
    """Return what the matrix shows. Raises `UnexplainedError` where a row that counts attends a key that is not real."""
    diagonal_BS = square.diagonal()
    # a token that does not attend itself attends another such: one row tells most wrong polarities
    used_BS = square.at(np.arange(len(diagonal_BS)), diagonal_BS.argmin(axis=1), ALL) if keep_BS is None else keep_BS
    bad = {b: int(lost_S.argmax()) for b, lost_S in enumerate(used_BS & ~diagonal_BS) if lost_S.any()}
    if bad:
        text = "is attended by another token" if keep_BS is None else "is real in the 2D mask"
        raise UnexplainedError([(b, f"token {k} {text}, and does not attend itself") for b, k in bad.items()])
    full_BQ = full_rows(square)
    filler_BQ = full_BQ & ~full_BQ.all(axis=1, keepdims=True) & (keep_BS is None)
    filler_BQ[:, -1] &= full_BQ[:, :-1].any(axis=1)  # alone, a last row that sees everything is an ordinary causal row
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
    full_BQ = square.at(ALL, ALL, 0) & square.at(ALL, ALL, -1)
    for b, full_Q in enumerate(full_BQ):
        for low, high in square.blocks:
            at_N = np.flatnonzero(full_Q[low:high])
            if len(at_N):
                full_Q[low + at_N] = square.at(b, low + at_N).all(axis=1)
    return full_BQ


def _causal_extents(real_BS: Bools, begins_BS: Bools) -> Extents:
    """Return what queries attend under plain causal attention; padding attends what the token before it does."""
    own_S = np.arange(real_BS.shape[1], dtype=np.int32)
    first_BQ = np.maximum.accumulate(np.where(begins_BS, own_S, 0), axis=1)
    last_BQ = np.maximum.accumulate(np.where(real_BS, own_S, -1), axis=1)
    return Extents(np.where(last_BQ >= 0, first_BQ, own_S), last_BQ)


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


def read_query_rows(square: Square, b: int, low: int, read_Q: Bools, into: Extents, counts_BQ: Bools) -> Bools:
    """Write the extents of these query rows, from `low` on, of row b to `into`; return the keys `[S]` of what counts."""
    if not read_Q.any():
        return np.zeros(square.shape[1], bool)
    q_N = low + np.flatnonzero(read_Q)
    rows_NK = square.at(b, slice(low, low + len(read_Q)))
    rows_NK = rows_NK if read_Q.all() else rows_NK[read_Q]
    first_N, last_N = rows_NK.argmax(axis=1), rows_NK.shape[1] - 1 - rows_NK[:, ::-1].argmax(axis=1)
    any_N = rows_NK[np.arange(len(q_N)), first_N]
    into.first[b, q_N], into.last[b, q_N] = np.where(any_N, first_N, q_N), np.where(any_N, last_N, -1)
    counts_N = counts_BQ[b, q_N]
    used_K: Bools = np.logical_or.reduce(rows_NK if counts_N.all() else rows_NK[counts_N], axis=0)
    return used_K


def all_extents(square: Square) -> Extents:
    """Return what every query attends, read off the whole matrix."""
    all_BQ = np.ones(square.shape, bool)
    extents = Extents(np.zeros(square.shape, np.int32), np.zeros(square.shape, np.int32))
    for b in range(len(all_BQ)):
        for low, high in square.blocks:
            read_query_rows(square, b, low, all_BQ[b, low:high], extents, all_BQ)
    return extents


def read_square(square: Square, known: Known) -> Reading:
    """Return the `Reading` of a `[B, S, S]` matrix. Raises `UnexplainedError` where nothing gives this matrix,
    `AmbiguousMaskError` where two different truths do."""
    keep_BS = None if known.segments is None else known.segments.array != 0
    if known.segments is not None and known.parted:
        return Reading(known.segments, prove(square, known.segments, known.pattern))
    shown = look(square, keep_BS)
    segments, proved_BQ = shown.segments, shown.proved
    if known.pattern is not None and known.pattern.cuts and segments.packed:
        segments, proved_BQ = of_keep(shown.real), np.zeros_like(proved_BQ)
    if keep_BS is not None:
        refuse_inverted(square, segments)
    if not known.prove:
        return Reading(segments, None)
    refuse_gaps(shown, segments, known.pattern)
    pattern = prove(square, segments, known.pattern, shown, proved_BQ)
    if keep_BS is None:
        refuse_unmasked_rows(shown, pattern, declared=known.pattern is not None, unmasked_rows=known.unmasked_rows)
        refuse_visible_padding(shown, segments)
    if known.pattern is None and pattern.causal:
        refuse_chunks(shown, segments, pattern)
    return Reading(segments, pattern)


def prove(
    square: Square, segments: Segments, pattern: Pattern | None, shown: Shown | None = None, proved_BQ: Bools | None = None
) -> Pattern:
    """Return the pattern that gives the matrix back on every real row: the declared one, or the first that does. `proved_BQ`
    are queries that plain causal attention is known to give. Raises `UnexplainedError`."""
    first, wrong = pattern or CAUSAL, partial(wrong_rows, square, segments, proved_BQ=proved_BQ)
    first.check(segments.num_sequences)
    if next(wrong(first), None) is None:
        return first
    seen = _seen(segments, shown.extents, shown.reach) if shown else _seen(segments, all_extents(square), 0)
    tries = filter(None, (kind.explaining(*seen) for kind in Pattern.__subclasses__()))
    found = next((each for each in tries if each != first and next(wrong(each), None) is None), None)
    if pattern is None and found is not None:
        return found
    text = "rows that no pattern gives" if pattern is None else f"rows that are not those of {pattern} attention"
    raise UnexplainedError([(b, text) for b in wrong(first)], found)


def _seen(segments: Segments, extents: Extents, reach: int) -> tuple[int, list[int]]:
    """Return the arguments of `Pattern.explaining`: how far back real queries look, and the prefix of each sequence."""
    place_Q, real_BQ = np.arange(segments.shape[1]), segments.array != 0
    ahead_BQ = np.where(real_BQ & (extents.last > place_Q), extents.last + 1, 0)
    prefixes = [max(int(ahead_BQ[b, start:end].max()) - start, 0) for b, start, end in segments.spans]
    return max(reach, int((place_Q - extents.first).max(initial=0, where=real_BQ))), prefixes


def refuse_inverted(square: Square, segments: Segments) -> None:
    """Raise where the 2D mask may be inverted: padding that attends other padding would look like many sequences."""
    bad = []
    for b, row in enumerate(segments.lengths):
        if len(row) > 1 and max(row) == 1:
            padding_S = segments.array[b] == 0
            attended = (square.at(b, slice(low, high))[padding_S[low:high]] & padding_S for low, high in square.blocks)
            if sum(map(np.count_nonzero, attended)) > np.count_nonzero(square.diagonal()[b] & padding_S):
                bad.append((b, f"{len(row)} real tokens that attend only themselves, and padding that attends padding"))
    rule = "They are sequences of one token, or the 2D mask is inverted (True = padding)."
    _raise_ambiguous(bad, rule, "Pass attention_mask_2d with True = real; with sequences of one token, segment_ids too.")


def refuse_unmasked_rows(shown: Shown, pattern: Pattern, *, declared: bool, unmasked_rows: bool) -> None:
    """Raise where empty rows may be unmasked: right padding by one, or a row of padding, then looks like no padding."""
    filler_BS, prefixed = shown.filler, isinstance(pattern, Prefix)
    unmasks = unmasked_rows or bool(filler_BS.any())
    if (filler_BS.shape[1] < 2 and not unmasked_rows) or not (unmasks or prefixed):
        return
    all_B = np.asarray(shown.full.all(axis=1))
    mixed = not declared and prefixed and not all_B.all()
    pads_left = bool((filler_BS.any(axis=1) & ~filler_BS[:, -1]).any())
    bad_B = (all_B & (unmasks or mixed)) | (shown.full[:, -1] & shown.real[:, -1] & (unmasks and not pads_left))
    seen = {True: "rows that all see everything", False: "a last row that sees everything"}
    bad = [(b, seen[bool(all_B[b])]) for b in np.flatnonzero(bad_B).tolist()]
    rule = "If the producer unmasks empty rows, these tokens are all real, or the last ones are padding."
    _raise_ambiguous(bad, rule, REMEDY_CARRY_2D)
    ends = [(b, "last rows that see everything") for b in np.flatnonzero(filler_BS[:, -1] & (not unmasked_rows)).tolist()]
    rule = "The last rows are padding that was unmasked, or real tokens that attend to both sides (an image)."
    _raise_ambiguous(ends, rule, f"Pass unmasked_rows=True if the producer unmasks rows. {REMEDY_CARRY_2D}")


def refuse_visible_padding(shown: Shown, segments: Segments) -> None:
    """Raise where padding may attend itself (a forced diagonal, a sequence of its own) and look like a sequence. Padding
    that nobody sees, in any row, shows that this producer's does not. One row that sees everything shows nothing: it was
    unmasked, or is padding that attends the others and, on its diagonal, itself."""
    if not segments.packed or ((~shown.real).sum(axis=1) > (shown.filler.sum(axis=1) == 1)).any():
        return
    packed = [(b, row) for b, row in enumerate(segments.lengths) if len(row) > 1]
    bad = [(b, f"sequences of {', '.join(map(str, row[:8]))} tokens") for b, row in packed]
    _raise_ambiguous(bad, "All of them are real, or some are padding that attends itself.", REMEDY_CARRY_2D)


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
    _raise_ambiguous(apart.items(), rule, declare + REMEDY_CARRY_2D)


def refuse_chunks(shown: Shown, segments: Segments, pattern: Pattern) -> None:
    """Raise where packed sequences end on multiples of one number: one sequence under chunked attention looks the same.
    Packing and chunks at once are not considered: any longest sequence would be doubtful. Places are counted from a row's
    first token; padding that attends as the sequence before it belongs to that one."""
    if not segments.packed or pattern.reaches(segments.longest_span):
        return
    row_N, start_N, stop_N = np.array(segments.spans, np.int64).T
    meets_N = np.diff(row_N) == 0
    if (((shown.extents.last >= 0) & ~shown.filler) | ~(np.logical_or.accumulate(shown.real, axis=1) & ~shown.real)).all():
        stop_N = np.append(np.where(meets_N, start_N[1:], segments.shape[1]), segments.shape[1])
    origin_N = start_N[np.searchsorted(row_N, row_N)]
    start_N, stop_N, first = start_N - origin_N, stop_N - origin_N, int(np.argmax(meets_N))
    for size in range(int(stop_N[first]), int(start_N[first + 1]) + 1):
        chunk_N = start_N // size
        if (chunk_N == (stop_N - 1) // size).all() and (np.diff(chunk_N)[meets_N] != 0).all():
            bad = {b: f"sequences that end at token {j}" for b, j, _ in reversed(list(_boundaries(segments)))}
            rule = f"They are packed sequences, or one sequence a row with chunked attention of {size}."
            remedy = f"Pass pattern='causal' or pattern=Pattern.chunked({size}). {REMEDY_CARRY_2D}"
            _raise_ambiguous(bad.items(), rule, remedy)


_raise_ambiguous = partial(refuse_rows, MASK_KEY, kind=AmbiguousMaskError)


def _boundaries(segments: Segments) -> Iterator[tuple[int, int, int]]:
    """Yield `(row, last token of a sequence, first token of the next)` wherever two meet in a row."""
    for (b, _, end), (next_b, next_start, _) in pairwise(segments.spans):
        if b == next_b:
            yield b, end - 1, next_start
