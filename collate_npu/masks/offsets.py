"""Offsets: the sequences of a row by the numbers that kernels take, and by positions that begin again.

Physical offsets say where sequences stand in a flat row, real ones how many tokens each has: `0 4 8` and `0 3 5` for two
sequences of 3 and 2, each padded to 4 (Megatron's core/packed_seq_params.py). Positions tell only where each run counts
0, 1, 2 and some run is longer than a token: repeated or custom ones say nothing. Legend: B rows, S width, N sequences.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from collate_npu.arrays import Array, as_offsets, run_starts, sequence_starts, whole_number
from collate_npu.errors import CollateError, explain, explain_rows
from collate_npu.masks.forms import check_cuts, fitting_places
from collate_npu.masks.sources import Sources
from collate_npu.segments import Segments, keep_array, of_ids, of_lengths

_REMEDY = "Keep one set of them, of this very batch: a collator or a split may have left old ones behind."


def segments_from_offsets(sources: Sources, shape: tuple[int, int]) -> tuple[str, Segments] | None:
    """The key that tells, and the `Segments` of the offsets, lengths and sequence numbers of a batch; None without any.

    Of a padded batch of several rows lengths say nothing of places, and are checked where a mask tells the rest; but with
    the places beside them (NeMo Automodel), or of NeMo RL, which pads right.
    Raises `CollateError` where two of them differ, or they do not fit the row.
    """
    offsets, lengths = sources.offsets, sources.lengths
    B, S = shape
    if B != 1 or not offsets:
        rows = [] if lengths is None else _length_rows(sources, B)
        if sources.padded_lengths is not None and rows:
            return "seq_lens", _placed(rows, sources.padded_lengths, shape)
        whole = rows and all(sum(row) == S for row in rows)  # else a mask tells where they stand
        named = sources.named["lengths"][0] if rows else ""
        pads_right = named in ("input_lengths", "packed_seq_lengths") and not says_padding(sources)
        return (sources.named["lengths"][0], Segments.from_lengths(rows, S)) if whole or pads_right else None
    name, physical, real = kept_apart(offsets)
    as_offsets(name, physical, S)
    real_N = _real_lengths(name, physical, real, lengths)
    starts_N, held = physical[:-1], real_N > 0
    tail = _tail(sources)
    if sources.named["tail"] and tail and S - tail not in physical:
        rule = f"The tail begins where a sequence ends: {name} is {physical.tolist()[-8:]}, and the row has {S} tokens."
        remedy = "Leave it out where rows that had tails were joined or split, and carry segment_ids."
        raise CollateError(explain(sources.named["tail"][0], str(tail), rule, remedy))
    if physical[-1] < S and not _ends_in_padding(sources, int(physical[-1]), S):
        rule = f"The row has {S} tokens, and nothing else says that those behind the last offset are padding."
        remedy = "Count the tail too, or carry attention_mask_2d or segment_ids beside them."
        raise CollateError(explain(name, str(physical.tolist())[:80], rule, remedy))
    if not tail and np.array_equal(starts_N[held], np.cumsum(real_N[held]) - real_N[held]):
        return name, of_lengths([real_N[held].tolist()], S)
    ids_S = np.zeros(S, np.int64)
    for n, (start, length) in enumerate(zip(starts_N[held].tolist(), real_N[held].tolist()), start=1):
        ids_S[start : start + length] = n
    ids_S[max(S - tail, 0) :] = 0
    return name, of_ids(ids_S[None])


def _ends_in_padding(sources: Sources, end: int, S: int) -> bool:
    """Does anything but offsets that end before their row say that the rest is padding? A mask or lengths, which are held
    against them; labels; else one token again and again, or a last one at position 0 (NeMo RL's common.py:290)."""
    if says_padding(sources) or sources.lengths is not None or sources.named["segment_ids"] or sources.masks:
        return True
    if (unread_S := _unread(sources, S)) is not None:
        return bool(unread_S[end:].all())
    positions_BS = sources.text_positions((1, S))
    again = (
        end < S - 1
        and sources.named["tokens"] == ("input_ids",)
        and len(set(sources.array("input_ids")[0, end:].tolist())) == 1
    )
    return again or (positions_BS is not None and not positions_BS[0, end:].any())


def _tail(sources: Sources) -> int:
    """Places that the offsets of a flat row number as its last sequence: xtuner's and VeOmni's own number, and the zeros of
    NeMo Automodel's document map (0.7.0 datasets/packed_seq.py:79)."""
    if sources.named["tail"]:
        return whole_number(name := sources.named["tail"][0], sources.array(name).item())
    if sources.get("_packed_seq_ids") is None:
        return 0
    real_S = np.flatnonzero(sources.array("_packed_seq_ids")[0])
    return int(sources.array("_packed_seq_ids").shape[1] - real_S[-1] - 1) if len(real_S) else 0


def says_padding(sources: Sources) -> bool:
    """Does a mask say more than that all is real? One of ones stands beside tails and lengths (VeOmni, NeMo RL)."""
    return bool(sources.named["keep"]) or any(full.ndim > 2 or bool((full != 1).any()) for full in sources.masks.values())


def _placed(rows: list[list[int]], held: list[list[int]], shape: tuple[int, int]) -> Segments:
    """Each sequence at the start of its place, padding behind it."""
    bad = [
        (b, f"{row} in places of {places}")
        for b, (row, places) in enumerate(zip(rows, held))
        if len(row) != len(places) or any(n > most for n, most in zip(row, places)) or sum(places) > shape[1]
    ]
    if bad or len(rows) != len(held):
        rule = f"Each length fits its place, and the places their row of {shape[1]}."
        raise CollateError(explain_rows("seq_lens_padded", bad, rule, "Leave seq_lens_padded out, and carry segment_ids."))
    ids_BS = np.zeros(shape, np.int64)
    for ids_S, row, places in zip(ids_BS, rows, held):
        for n, (start, length) in enumerate(zip(np.cumsum([0, *places]).tolist(), row), start=1):
            ids_S[start : start + length] = n
    return of_ids(ids_BS)


def check_known(sources: Sources, segments: Segments) -> None:
    """Raise where the offsets of a flat row are not those of Segments that are known."""
    if segments.shape[0] != 1 or not sources.offsets:
        return
    name, physical, real = kept_apart(sources.offsets)
    check_cuts(name, as_offsets(name, physical, segments.shape[1]), segments)
    if real is not None and [n for n in np.diff(real).tolist() if n] != list(segments.sequence_lengths):
        rule = f"The sequences have {list(segments.sequence_lengths[:8])} tokens."
        raise CollateError(explain("cu_seqlens", str(real.tolist())[:80], rule, _REMEDY, more="sources-disagree"))


def check_offsets(sources: Sources, segments: Segments, told_by: str) -> None:
    """Raise where the lengths or sequence numbers of a batch speak of other sequences than its `Segments`, which that key
    told."""
    if sources.lengths is not None and told_by not in sources.named["lengths"]:
        rows = _length_rows(sources, segments.shape[0])
        told = enumerate(zip(rows, segments.lengths))
        bad = [(b, f"{row}, not {list(real)}") for b, (row, real) in told if [n for n in row if n] != list(real)]
        bad = [(b, text) for b, text in bad if rows[b] != [segments.row_lengths[b]]]
        if bad:
            rule = "Lengths count the real tokens of each sequence."
            key = sources.named["lengths"][0]
            raise CollateError(explain_rows(key, bad, rule, _REMEDY, more="sources-disagree"))
    for key in sources.named["sequence_index"]:  # changes where a sequence begins, for layers that read no offsets
        numbers_BS, keep_BS = sources.array(key), segments.array != 0
        same = numbers_BS.shape == segments.shape
        if not same or (run_starts(numbers_BS, keep_BS, 0) != run_starts(segments.array, keep_BS, 0)).any():
            rule = "It numbers other sequences than the rest of the batch tells."
            raise CollateError(explain(key, str(numbers_BS.tolist())[:80], rule, _REMEDY))


def check_longest(sources: Sources, segments: Segments) -> None:
    """Raise where kernels of attention would be told of fewer tokens than the longest sequence has: they leave the rest."""
    for key in sources.named["longest"]:
        held = sources.array(key)
        if held.size != 1 or whole_number(key, held.item()) < segments.max_length:
            rule = f"The longest sequence has {segments.max_length} tokens."
            raise CollateError(
                explain(key, str(held.tolist())[:80], rule, f"Pass {key}={segments.max_length}, or leave it out.")
            )


def _length_rows(sources: Sources, B: int) -> list[list[int]]:
    """The lengths of each row: as many lists as rows, or all of them of one row."""
    lengths = sources.lengths or []
    if len(lengths) == B:
        return lengths
    if B != 1:
        got, rule = f"{len(lengths)} entries", f"The batch has {B} rows."
        raise CollateError(explain(sources.named["lengths"][0], got, rule, _REMEDY))
    return [[n for row in lengths for n in row]]


def places_of(sources: Sources, segments: Segments) -> list[int] | None:
    """What the offsets of a flat row say, padded ones first, where they cover the row and fit its sequences; else None."""
    named = (*sources.named["padded_offsets"], *sources.named["offsets"])
    told = (fitting_places(sources.offsets[name], segments) for name in named)
    return next((places for places in told if places is not None), None)


def kept_apart(offsets: Mapping[str, Array]) -> tuple[str, Array, Array | None]:
    """`(key, physical, real or None)`; every offset must be one of the two."""
    unpadded = {key for key in offsets if key.endswith("unpadded")}  # Megatron-Bridge: the others are padded then
    padded = {key for key in offsets if key.endswith("padded") or unpadded} - unpadded
    name = next((key for key in offsets if key in padded), next(iter(offsets)))
    physical = offsets[name]
    others = {key: ends for key, ends in offsets.items() if not np.array_equal(ends, physical)}
    real_name, real = next(iter(others.items()), ("", None))
    for key, ends in others.items():
        if not padded or key in padded or real is None or not np.array_equal(ends, real) or len(ends) != len(physical):
            rule = f"It differs from {name}, {physical.tolist()[:8]}{f', and from {real_name}' * (key != real_name)}."
            raise CollateError(explain(key, str(ends.tolist()[:8]), rule, _REMEDY, more="sources-disagree"))
    return name, physical, real


def _real_lengths(name: str, physical: Array, real: Array | None, lengths: list[list[int]] | None) -> Array:
    places_N = np.diff(physical)
    real_N = places_N if real is None else np.diff(real)
    if lengths is not None:
        told_N = np.array([n for row in lengths for n in row if n], np.int64)
        held_N = real_N[real_N > 0]
        tail = real is None and len(told_N) == len(held_N) - 1 and np.array_equal(told_N, held_N[:-1])
        padded = real is None and len(told_N) == len(held_N) and (told_N <= held_N).all()
        if not (tail or padded or np.array_equal(told_N, held_N)):
            rule = f"{name} says {held_N.tolist()[:8]}."
            raise CollateError(explain("seq_lens", str(told_N.tolist()[:8]), rule, _REMEDY, more="sources-disagree"))
        real_N = real_N.copy()
        real_N[real_N > 0] = np.append(told_N, 0) if tail else told_N
    if (real_N > places_N).any():
        rule = f"{name} leaves room for {places_N.tolist()[:8]}."
        raise CollateError(explain("cu_seqlens", f"lengths {real_N.tolist()[:8]}", rule, _REMEDY))
    return real_N


def parted_by_positions(positions_BS: Array, known: Segments | None, *, padding_free: bool) -> tuple[Segments, bool] | None:
    """The sequences by positions that restart, which a keep mask does not show, and whether every row tells them; None where
    nothing is told. Without a mask (`known` is None) all of the row is real.
    """
    keep_BS = np.ones(positions_BS.shape, bool) if known is None else keep_array(known)
    starts_BS, tells_B = _restarts(positions_BS, keep_BS)
    restarts = bool((starts_BS.sum(axis=1) > 1)[tells_B].any())
    if not tells_B.any() or (known is None and not restarts and not padding_free):
        return None
    parted = Segments.from_ids(np.where(tells_B[:, None], np.cumsum(starts_BS, axis=1), 1) * keep_BS)
    return parted, bool(tells_B.all()) and (restarts or known is None)


def without_tail(sources: Sources, segments: Segments, positions_BS: Array) -> Segments:
    """A flat row without what positions, offsets and lengths number as sequences, and no sequence is: its tail.

    A last sequence of several tokens at position 0 (VeOmni data/data_collator.py, d977449); the end of it, where positions
    begin again, stand still or are 0, and nobody learns (prime-rl 559b447 trainer/batch.py:717-719, which adds the tail to
    the last length); and a last sequence of one token again and again that nobody learns (torchtitan b5bcd76). Places that
    are a sequence each may be samples of one token (transformers' flattening) or a tail (TRL 1.16 `pad_to_multiple_of`):
    they stay sequences, which is exact for both. Sequences that lengths count are real.
    """
    (lengths, *others), S = segments.lengths, segments.shape[1]
    if others or segments.padding_side != "none":
        return segments
    starts = S - np.cumsum(lengths[::-1])[::-1]
    last_S, ids_S = positions_BS[0, starts[-1] :], np.zeros(S, np.int64)
    unread_S = np.zeros(S, bool) if (found_S := _unread(sources, S)) is None else found_S
    told = sources.named["tokens"] == ("input_ids",)
    ids_S = sources.array("input_ids")[0] if told else ids_S
    one_is_real = (ids_S[starts[-1] + 1 :] == ids_S[-1]).all() and ids_S[starts[-1]] != ids_S[-1]
    counted_N = [] if sources.lengths is None else _length_rows(sources, 1)[0]
    counts_them = sum(n > 0 for n in counted_N) == len(lengths)  # so they are real
    if not counts_them and len(lengths) > 1 and len(last_S) > 1 and not last_S.any() and not one_is_real:
        return of_lengths([lengths[:-1]], S)
    counted = int((last_S == np.arange(len(last_S))).cumprod().sum())
    rest_S = last_S[counted:]
    again = any(np.array_equal(rest_S, form) for form in (np.arange(len(rest_S)), 0 * rest_S, 0 * rest_S + counted - 1))
    if 0 < counted < len(last_S) and again and unread_S[starts[-1] + counted :].all():
        return of_lengths([[*lengths[:-1], counted]], S)
    run = int((unread_S & (ids_S == ids_S[-1]))[::-1].cumprod().sum()) if told and not counts_them else 0
    again = len(lengths) > 1 and S - run <= starts[-1] < S - 1 and not S - run <= starts[-2]  # several would be parted still
    return of_lengths([lengths[:-1]], S) if again else segments


def _unread(sources: Sources, S: int) -> Array | None:
    """bool `[S]`: places of a flat row without a label, by whatever tells; None where nothing does."""
    for name in ("labels", "shift_labels", "shifted_labels", "loss_mask"):
        if sources.get(name) is not None and (told_BS := sources.array(name)).shape == (1, S):
            return np.asarray(told_BS[0] == 0 if name == "loss_mask" else told_BS[0] < 0)
    return None


def unless_in_doubt(sources: Sources, positions_BS: Array) -> Array | None:
    """The positions, where they can tell sequences from padding: a token alone at position 0 that nobody learns may be
    either."""
    alone_BS = positions_BS == 0
    alone_BS[:, :-1] &= positions_BS[:, 1:] == 0
    labels_BS = sources.array("labels") if sources.named["labels"] else None
    if labels_BS is not None and labels_BS.shape == alone_BS.shape:
        alone_BS &= labels_BS < 0
    return None if alone_BS.any() else positions_BS


def check_positions(positions_BS: Array, segments: Segments) -> None:
    """Rows whose positions restart must restart where their sequences begin."""
    keep_BS = keep_array(segments)
    starts_BS, tells_B = _restarts(positions_BS, keep_BS)
    true_BS, _ = sequence_starts(segments.position_ids.numpy(), keep_BS)
    wrong_B = tells_B & (starts_BS.sum(axis=1) > 1) & (starts_BS != true_BS).any(axis=1)
    bad = [(int(b), f"sequences that begin at {np.flatnonzero(starts_BS[b]).tolist()[:8]}") for b in np.flatnonzero(wrong_B)]
    if bad:
        rule = "Positions restart at other places than the sequences that the other sources of the batch tell."
        remedy = "Let every sequence count from 0, carry segment_ids, or drop position_ids."
        raise CollateError(explain_rows("position_ids", bad, rule, remedy))


def check_counts(positions_BS: Array, segments: Segments) -> None:
    """Raise where no model can be meant: positions that fall inside a sequence, or are one number for all of its tokens."""
    ids_BS, keep_BS = segments.array, keep_array(segments)
    tokens_T, ids_T, rows_T = positions_BS[keep_BS], ids_BS[keep_BS], np.nonzero(keep_BS)[0]
    inside = (ids_T[1:] == ids_T[:-1]) & (rows_T[1:] == rows_T[:-1])
    steps, rows = np.diff(tokens_T.astype(np.float64))[inside], rows_T[1:][inside]
    stand = set(rows.tolist()) - set(rows[steps != 0].tolist())
    if bad := sorted({*rows[~(steps >= 0)].tolist(), *stand}):
        rule = "Inside a sequence positions rise; these fall, or are one number for all of its tokens."
        remedy = "Leave position_ids out: they follow from the mask. Or let each sequence count from 0."
        said = [(int(b), str(positions_BS[b].tolist()[:24])) for b in bad]
        raise CollateError(explain_rows("position_ids", said, rule, remedy))


def _restarts(positions_BS: Array, keep_BS: Array) -> tuple[Array, Array]:
    """Where sequences begin, and the rows that tell."""
    starts_BS, counts_B = sequence_starts(positions_BS, keep_BS)
    counting = bool((starts_BS != keep_BS)[counts_B].any())
    return starts_BS, counts_B & (counting | (keep_BS.sum(axis=1) < 2))
