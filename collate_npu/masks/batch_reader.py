"""Batch reader: the one function from a batch to its `Segments`.

It reads `segment_ids`, `attention_mask_2d`, `attention_mask` of any rank, offsets, sequence numbers, lengths and positions,
and raises where two of them differ. Costs O(B * S), and for a dense mask a few passes over its bytes.
Legend: B batch, S width, N sequences of a flat row, Q/K query and key rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import Array, dims
from collate_npu.errors import AmbiguousMaskError, CollateError, PolarityError, explain, explain_rows, refuse_rows, shape_of
from collate_npu.keys import KEEP_KEY, MASK_KEY
from collate_npu.masks.dense_mask import Reading, read_mask
from collate_npu.masks.mask_values import (
    Known,
    MaskValues,
    Polarity,
    check_same_padding,
    heads_differ_error,
    is_causal,
    read_keys,
)
from collate_npu.masks.patterns import CAUSAL, Pattern
from collate_npu.masks.sources import (
    Sources,
    check_known_offsets,
    check_longest,
    check_offsets,
    check_positions,
    drop_tail,
    says_padding,
    segments_from_offsets,
    split_by_positions,
    unless_in_doubt,
    without_padding,
    wrong_shape_error,
)
from collate_npu.segments import Segments, as_ids, of_ids, of_keep, positions_match, ready
from collate_npu.validation import checked


@checked
def segments_from_batch(
    batch: Mapping[str, Any],
    *,
    polarity: Polarity | None = None,
    pattern: str | Pattern | None = None,
    padding_free: bool = False,
) -> Segments:
    """Return the `Segments` of a batch, from whatever it carries; all sources are checked against each other.

    `polarity` declares `attention_mask`, of any rank; `attention_mask_2d` is always keep. A dense mask must be that of
    `pattern` (plain causal where none is declared). Any other is refused, and the error names the pattern that would
    explain it. Per-head and valued masks (ALiBi) are refused. With `padding_free` the batch is one flat row.

    Raises `CollateError`: where nothing says which tokens are padding (no mask may mean no padding, or a mask that was
    lost), where two sources differ, where a row has no real token (`segment_ids` may say so), and where the labels are
    all on padding, as a mask turned around would have it.

    >>> batch = {"input_ids": [[0, 0, 7], [4, 5, 6]], "attention_mask": [[0, 0, 1], [1, 1, 1]]}
    >>> segments_from_batch(batch)
    Segments(B=2, S=3, lengths=[1, 3], padding='left')
    """
    return ready(agreed(Sources.of(batch), polarity=polarity, pattern=pattern, padding_free=padding_free))


def agreed(
    sources: Sources,
    *,
    polarity: Polarity | None,
    pattern: str | Pattern | None,
    padding_free: bool,
    own: Collection[Pattern] = (),
    labels: bool = True,
) -> Segments:
    """Return the Segments of a record that the caller goes on reading. `own` are patterns that the model makes by itself: a
    dense mask of such a pattern is accepted like a plain causal one. `labels`: False for a model that is out of scope."""
    declared = None if pattern is None else Pattern.of(pattern)
    shape = sources.shape()
    if padding_free and shape[0] != 1:
        rule = "padding_free means one flat row [1, T]; this batch is padded."
        remedy = "Collate with padding_free=True, or pass padding_free=False here."
        raise CollateError(explain("input_ids", f"{shape[0]} rows", rule, remedy))
    squares = {key: full for key, full in sources.masks.items() if not _is_keys(full, shape)}
    truth, positions_BS = _parted(sources, _compared(sources, shape, polarity, squares), shape, padding_free)
    by_keys = truth is not None
    parting_BS = None if by_keys or positions_BS is None else unless_in_doubt(sources, positions_BS)
    for key, full in squares.items():
        truth = _with_dense(_one_head(key, full, polarity), truth, parting_BS, shape, (polarity, declared, own))
        truth = truth._replace(parted=True)  # the next mask of a mapping is of the same sequences
    if truth is None:
        raise _unknown(sources, padding_free)
    if positions_BS is not None:
        check_positions(positions_BS, truth.segments)
    if sources.lengths is not None or sources.named["sequence_index"]:
        check_offsets(sources, truth.segments, truth.name)
    if sources.named["longest"]:
        check_longest(sources, truth.segments)
    if not by_keys:
        _refuse_doubtful_ends(sources, truth)
    told = sources.named["segment_ids"] or (sources.named["labels"] and not truth.segments.empty_rows)
    if not told and not _learns_nothing(sources):
        _refuse_inverted(sources, truth.segments, empty=by_keys and bool(squares))
    return with_labels(sources, truth.segments) if labels else truth.segments


def with_labels(sources: Sources, segments: Segments) -> Segments:
    """Return the Segments of a batch, with end tokens that the mask drops and labels learn (`ids != pad`, if pad is eos):
    one place behind the last sequence of a row, whose label is its own token, if that token is real nowhere. Raises for any
    other label that is learned at padding: mask and labels differ, and nothing says which of them is wrong. Labels that were
    moved over the whole row have a first token's at the padding before it, which no mask denies.

    >>> batch = Sources({"input_ids": [[5, 7, 7]], "labels": np.array([[5, 7, -100]])})
    >>> with_labels(batch, of_keep(np.array([[True, False, False]])))
    Segments(B=1, S=3, lengths=[2], padding='right')
    """
    found = segments
    for key in ("labels", "shift_labels", "shifted_labels") if segments.padding_side != "none" else ():
        lost_BS: Any = sources.get(key) is not None and _lost_labels(sources, key, segments)
        for b, _, end in segments.spans if lost_BS is not False and key == "labels" else ():
            if lost_BS[b].nonzero()[0].tolist() != [end] or (tokens_BS := _tokens(sources)) is None:
                continue
            if sources.array(key)[b, end] == tokens_BS[b, end] and tokens_BS[b, end] not in tokens_BS[segments._keep_BS]:
                lost_BS[b], ids_BS = False, found.array.copy()
                ids_BS[b, end] = ids_BS[b, end - 1]
                found = of_ids(ids_BS)
        if np.any(lost_BS):
            lost = ((b, lost_BS[b].nonzero()[0]) for b in lost_BS.any(axis=1).nonzero()[0].tolist())
            bad = [(b, f"{len(places_n)} learned at padding, the first at place {places_n[0]}") for b, places_n in lost]
            rule = "Labels are learned at real tokens, and the mask calls these tokens padding: one of the two is wrong."
            remedy = "If they are padding: labels[attention_mask == 0] = -100. If they are real (pad is eos): make the mask "
            remedy += "from the lengths, not by ids != pad_token_id. If the mask is inverted: mask == 0."
            raise CollateError(explain_rows(key, bad, rule, remedy, more="labels"))
    return found


def _lost_labels(sources: Sources, key: str, segments: Segments) -> Any:
    """Return bool `[B, S]`: the labels of this key that are learned at padding; False if there are none."""
    held, shape = sources[key], segments.shape
    if not isinstance(held, (Tensor, np.ndarray)) or getattr(held, "is_nested", False) or tuple(held.shape) != shape:
        return False
    labels_BS = sources.array(key)
    if labels_BS.dtype.kind not in "iu" or not (lost_BS := (labels_BS >= 0) & ~segments._keep_BS).any():
        return False
    if dims(sources.get("loss_mask")) == shape:
        lost_BS &= sources.array("loss_mask") != 0
    tokens_BS = _tokens(sources)
    following = key != "labels" if tokens_BS is None else labels_BS[:, :-1] == tokens_BS[:, 1:]
    lost_BS[:, :-1] &= ~(following & segments._keep_BS[:, 1:])
    return lost_BS


def _tokens(sources: Sources) -> Any:
    named = sources.named["tokens"]
    return sources.array(named[0]) if named in (("input_ids",), ("tokens",)) else None


def check_known(sources: Sources, segments: Segments) -> None:
    """Raise where a batch contradicts the Segments that its caller knows; `attention_mask`, the consumer's, is not read."""
    try:
        _compared(sources, sources.shape() if sources.named["tokens"] else segments.shape, None, {}, segments)
        check_known_offsets(sources, segments)
        check_offsets(sources, segments, "segments")
        check_longest(sources, segments)
        positions_BS = sources.text_positions(segments.shape)
        if positions_BS is not None and not positions_match(segments, positions_BS):
            check_positions(positions_BS, segments)
    except CollateError:
        with suppress(CollateError):  # a tail that numbers count as a sequence
            if agreed(sources, polarity=None, pattern=None, padding_free=False) == segments:
                return
        raise


_Declared = tuple[Polarity | None, Pattern | None, Collection[Pattern]]


class _Truth(NamedTuple):
    """What is known so far; `parted` where it is also known where one sequence of a row ends and the next begins."""

    name: str
    segments: Segments
    parted: bool


def _is_keys(full: Tensor, shape: tuple[int, int]) -> bool:
    """True for a mask with one value a token. An additive one with as many rows as tokens is read as a square mask."""
    if full.ndim != 2 or tuple(full.shape) != shape:
        return False
    return not (full.shape[0] == full.shape[1] and full.is_floating_point() and bool((full < 0).any()))


def _compared(
    sources: Sources,
    shape: tuple[int, int],
    polarity: Polarity | None,
    squares: Mapping[str, Tensor],
    known: Segments | None = None,
) -> _Truth | None:
    """Return the most detailed of the sources that need no other, after all were compared: shape, padding, boundaries. With
    `known` Segments, only the keys that carry the same facts are compared."""
    flat = segments_from_offsets(sources, shape) if known is None and (sources.offsets or sources.lengths) else None
    found = [] if known is None else [_Truth("segments", known, True)]
    found += [_Truth(key, of_ids(as_ids(sources.array(key))), True) for key in sources.named["segment_ids"]]
    keep_BS = sources.array(KEEP_KEY) if sources.named["keep"] else None
    if keep_BS is not None:
        plain = keep_BS.dtype.kind == "b" and keep_BS.ndim == 2
        keep = _Truth(KEEP_KEY, of_keep(keep_BS), False) if plain else _of_keys(KEEP_KEY, torch.from_numpy(keep_BS), "keep")
        found.append(keep)
    if known is None and len(squares) < len(sources.masks):
        rows = {key: full for key, full in sources.masks.items() if key not in squares}
        tails = flat is not None and (flat[0] == "input_lengths" or bool(sources.named["tail"]))
        if not (tails and polarity in (None, "keep") and not says_padding(sources)):  # ones beside tails say nothing
            found += _of_rows(rows, polarity, keep_BS, beside=bool(found) or _learns_nothing(sources))
    for name, segments, _ in found:
        if segments.shape != shape:
            raise wrong_shape_error(name, str(list(segments.shape)), shape)
    if flat is not None:
        name, segments = flat
        real_S = found[0].segments.array[0] != 0 if found else _on_diagonal(squares, segments)
        found.append(_Truth(name, without_padding(sources, segments, real_S), True))
    if len(found) > 1:
        for each in found[1:]:
            check_same_padding(found[0].segments, each.name, each.segments)
        _check_same_boundaries([each for each in found if each.parted])
    return next((each for each in found if each.parted), found[0] if found else None)


def _on_diagonal(squares: Mapping[str, Tensor], segments: Segments) -> Array:
    """Return bool `[S]`: True where each dense mask holds the same at a token's own place as at the first real token's."""
    S, first = segments.shape[1], next((start for _, start, _ in segments.spans), 0)
    real_S = np.ones(S, bool)
    for full in squares.values():
        if full.shape[-2:] == (S, S) and full.numel():
            own_S = full[(0,) * (full.ndim - 2)].diagonal()
            real_S &= (own_S == own_S[first]).numpy()
    return real_S


def _of_rows(
    rows: Mapping[str, Tensor], polarity: Polarity | None, keep_BS: Array | None, *, beside: bool
) -> Iterator[_Truth]:
    """Read the masks `[B, S]` that do not repeat the 2D mask; `beside`: another key names the padding too."""
    for key, full in rows.items():
        repeats = polarity in (None, "keep") and keep_BS is not None and np.array_equal(full, keep_BS)
        if not repeats:
            zeros = beside and not bool(full.any())  # alone they could mean anything
            yield _of_keys(key, full, polarity or ("keep" if zeros else None))


def _learns_nothing(sources: Sources) -> bool:
    """True for a batch that only keeps ranks in step: its mask is of zeros, and so is what it learns."""
    labels_BS = sources.array("labels") if sources.named["labels"] else None
    if labels_BS is None or not labels_BS.size or (labels_BS >= 0).any():
        return False
    kept = (*sources.masks.values(), *map(sources.array, sources.named["keep"]))
    return bool(kept) and not any(bool(each.any()) for each in kept)


def _check_same_boundaries(parted: Sequence[_Truth]) -> None:
    """Raise where two sources disagree on where sequences begin."""
    for each in parted[1:]:
        one, other = parted[0].segments, each.segments
        wrong = np.flatnonzero((one.array != other.array).any(axis=1)).tolist()
        bad = [(b, f"lengths {list(other.lengths[b])}, not {list(one.lengths[b])}") for b in wrong]
        rule = f"It disagrees with {parted[0].name} about where one sequence of a row ends and the next begins."
        refuse_rows(each.name, bad, rule, "Keep one of them, or rebuild both from the lengths.", more="sources-disagree")


def _parted(
    sources: Sources, truth: _Truth | None, shape: tuple[int, int], padding_free: bool
) -> tuple[_Truth | None, Array | None]:
    """Return the Segments, split where positions restart, and the positions where they may split them further."""
    positions_BS = sources.text_positions(shape)
    if truth and truth.name in (*sources.offsets, *sources.named["lengths"]):
        truth = truth._replace(segments=drop_tail(sources, truth.segments, positions_BS))
    if positions_BS is None:
        return truth, None
    sources.counted = truth is not None and positions_match(truth.segments, positions_BS)
    if sources.counted:  # as our own collators add them
        return truth, None
    known = not truth.parted if truth else not sources.masks
    found = split_by_positions(positions_BS, truth and truth.segments, padding_free=padding_free) if known else None
    if found and (truth or found[1]):  # else padding may stand where a row does not count from 0
        truth = _Truth("position_ids", drop_tail(sources, found[0], positions_BS), found[1])
    return truth, positions_BS


def _of_keys(key: str, full: Tensor, polarity: Polarity | None) -> _Truth:
    segments = read_keys(MaskValues(full, polarity, key))
    return _Truth(key, segments, segments.packed)


def _with_dense(
    values: MaskValues, truth: _Truth | None, positions_BS: Array | None, shape: tuple[int, int], declared: _Declared
) -> _Truth:
    """Return the Segments that a dense mask shows beside what is known. Raises where the mask is not of the pattern."""
    polarity, pattern, own = declared
    key, full = values.key, values.full
    if full.ndim == 4 and full.shape[-2] == 1 < shape[1] and pattern is None:
        missing = {} if polarity or truth else {"polarity=": "which of True and False is real"}
        missing |= {"pattern=": "whether queries attend to both sides"}
        rule = f"One row of keys for all queries does not say {' or '.join(missing.values())}."
        remedy = f"Pass {' and '.join(missing)}, or attention_mask_2d in its place."
        raise AmbiguousMaskError(explain(key, shape_of(full), rule, remedy, more="polarity"))
    if not full.ndim or full.shape[-1] != shape[1] or (full.ndim == 4 and not full.shape[1]):
        raise wrong_shape_error(key, shape_of(full), shape)
    known = Known(pattern=pattern)
    if truth is not None:  # sequences of a row that only another mask showed are not known
        shown = truth.segments.packed and not truth.parted
        segments = of_keep(truth.segments._keep_BS) if shown else truth.segments
        known = Known(segments=segments, parted=truth.parted, pattern=pattern)
    square = full.ndim in (3, 4) and full.shape[-2:] == (shape[1], shape[1]) and len(full) in (1, shape[0])
    if known.segments is not None and square and pattern in (None, CAUSAL) and is_causal(values, known.segments):
        return _Truth(key, known.segments, known.parted)
    reading = _read(values, known, positions_BS, shape[0])
    found = reading.pattern if pattern is None else None
    if found is not None and found not in own and found.reaches(reading.segments.longest_span):
        rule = f"It is the mask of {found} attention, and without pattern= the batch would get plain causal attention."
        remedy = f"Pass pattern={found.expression} if the model attends so, else attention_mask_2d in its place."
        raise AmbiguousMaskError(explain(key, shape_of(full), rule, remedy, more="mask-pattern"))
    return _Truth(key, reading.segments, truth is not None and truth.parted)


def _read(values: MaskValues, known: Known, positions_BS: Array | None, B: int) -> Reading:
    """Read the mask with what is known beside it; positions decide only where the mask alone is ambiguous."""
    try:
        return read_mask(values, known, B)
    except (AmbiguousMaskError, PolarityError):
        if positions_BS is None or known.segments is not None:
            raise
        split = split_by_positions(positions_BS, None, padding_free=False)
        if split is None or not split[1]:
            raise
        return read_mask(values, Known(pattern=known.pattern, segments=split[0]))


def _one_head(key: str, full: Tensor, polarity: Polarity | None) -> MaskValues:
    """Return one head of equal heads. Raises where heads differ, or where the mask adds values at places that attend."""
    alike = full.ndim != 4 or full.shape[1] < 2 or bool((full == full[:, :1]).all())
    values = MaskValues(full[:, :1] if full.ndim == 4 and alike else full, polarity, key)
    if not alike:
        raise heads_differ_error(values)
    if values.valued:
        remedy = "Let the model build the bias, and pass attention_mask_2d (1 = real token) in its place."
        rule = "It adds values to scores (ALiBi, a position bias), and every mask built from it would lose them."
        raise AmbiguousMaskError(explain(key, values.got, rule, remedy))
    return values


def _unknown(sources: Sources, padding_free: bool) -> AmbiguousMaskError:
    rule = "No key says which tokens are padding: no mask may mean no padding, or a mask that was lost."
    remedy = "Pass attention_mask [B, S], 1 = real token (ones where nothing is padded), and segment_ids if rows are packed"
    remedy += "; or collate with PaddingCollator."
    if padding_free:
        rule = "Nothing says where one sequence of this flat row ends and the next begins."
        remedy = "Keep position_ids that restart, cu_seq_lens_q or segment_ids in the batch (return_position_ids=True). "
        remedy += "If the row is one sequence, pass attention_mask, ones [1, S]."
    got = f"keys {', '.join(map(str, sources))}"
    return AmbiguousMaskError(explain("batch", got, rule, remedy, more="flat-row" if padding_free else "padding-unknown"))


def _refuse_doubtful_ends(sources: Sources, truth: _Truth) -> None:
    """Raise for a dense mask alone that shows no padding, over rows that look padded: one token repeated at an end, without
    labels. A plain causal mask carries no padding, and nothing says whether this one should."""
    ids_BS = sources.array("input_ids") if sources.named["tokens"] == ("input_ids",) else np.zeros((0, 0), np.int64)
    if truth.segments.padding_side != "none" or ids_BS.size < 2 or (ids_BS == ids_BS[0, 0]).all():
        return
    labels_BS = sources.array("labels") if sources.named["labels"] else np.zeros(())
    unread_BS = labels_BS < 0 if labels_BS.shape == ids_BS.shape else np.ones(ids_BS.shape, bool)
    bad = {}
    for end, at in (("begin", slice(None)), ("end", slice(None, None, -1))):
        run_BS = np.logical_and.accumulate((ids_BS == ids_BS[:, at][:, :1])[:, at], axis=1)
        for b in np.flatnonzero((run_BS.sum(axis=1) > 1) & (unread_BS[:, at] | ~run_BS).all(axis=1)):
            bad[int(b)] = f"{run_BS[b].sum()} times the token {ids_BS[b, at][0]} where it {end}s"
    rule = "It shows no padding, and these rows look padded."
    remedy = "Pass attention_mask_2d (True = real token): beside this mask if no row is padded, else in its place."
    refuse_rows(truth.name, bad.items(), rule, remedy, more="padding-unknown", kind=AmbiguousMaskError)


def _refuse_inverted(sources: Sources, segments: Segments, *, empty: bool) -> None:
    """Raise for a 2D mask that looks inverted: a row has no real token (unless `empty`: a second mask agrees), or, without
    labels, one repeated token is real and text is padding."""
    bad = {} if empty else dict.fromkeys(segments.empty_rows, "no real token")
    if (
        not sources.named["labels"]
        and not (sources.named["keep"] and sources.named["mask"])  # as our own collators write them
        and sources.named["tokens"] == ("input_ids",)
        and segments.num_padding
        and (ids_BS := sources.array("input_ids")).ndim == 2
    ):
        bad |= _looks_inverted(ids_BS, segments._keep_BS)
    if bad:
        rule = "True or 1 is a real token in a 2D mask; here it looks inverted, or made by ids != pad_token_id."
        remedy = "Invert it (mask == 0), pass polarity='masked' to what reads batches, or make it from the lengths; if it "
        remedy += "is right, pass segment_ids too."
        key = KEEP_KEY if KEEP_KEY in sources else MASK_KEY
        raise CollateError(explain_rows(key, bad.items(), rule, remedy, more="inverted-mask"))


def _looks_inverted(ids_BS: Array, keep_BS: Array) -> dict[int, str]:
    """Return the padded rows, if all of their real tokens are one id and their padding holds several."""
    at_B = np.flatnonzero(~keep_BS.all(axis=1) & keep_BS.any(axis=1))
    ids_BS, keep_BS = ids_BS[at_B], keep_BS[at_B]
    real, first_B = np.unique(ids_BS[keep_BS]), keep_BS.argmin(axis=1)
    padding_BS = np.where(keep_BS, ids_BS[np.arange(len(at_B)), first_B][:, None], ids_BS)
    if len(real) != 1 or keep_BS.sum() < 2 or not (padding_BS != padding_BS[:, :1]).any(axis=1).all():
        return {}
    return {b: f"{n} real tokens, all of them {real[0]}" for b, n in zip(at_B.tolist(), keep_BS.sum(axis=1))}
