"""Sources: a batch as this package reads it: its keys by role, each value on the host once, and the sequences that its
offsets, lengths and positions describe.

The batch reader, hazards, consumers, collators and proof hand this record on; none of them reads the batch again.
Physical offsets say where sequences stand in a flat row, real ones how many tokens each has: `0 4 8` and `0 3 5` for two
sequences of 3 and 2, each padded to 4 (Megatron's core/packed_seq_params.py). Positions tell sequences apart only where each
run counts 0, 1, 2 and some run is longer than a token: repeated or custom positions say nothing of boundaries.
Legend: B batch, S width, H heads, N sequences, Q/K query and key rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from torch import Tensor

from collate_npu.arrays import Array, entries, host_array, host_tensor, once, whole_number
from collate_npu.errors import CollateError, UnsupportedFormError, a_type, explain, explain_rows, refuse_rows
from collate_npu.keys import KEYS, Role
from collate_npu.masks import dialects
from collate_npu.masks.dialects import REMEDY_ONE_SET, physical_and_real_offsets
from collate_npu.masks.forms import MAX_MASK_BYTES, check_bytes, check_cuts, fitting_places, own_places
from collate_npu.segments import Segments, as_offsets, length_rows, of_ids, of_lengths, run_starts, sequence_starts

Named = Role | Literal["positions", "vision"]

_ROLES: dict[str, Any] = {
    name: key.role or key.kind for name, key in KEYS.items() if key.role or key.kind in ("positions", "vision")
}
_OFFSETS: tuple[Role, Role] = ("offsets", "padded_offsets")


class Sources(dict[str, Any]):
    """A batch, never written to. `batch | {...}` is the record of a changed one: what they share is read once for both.

    >>> batch = Sources({"input_ids": [[0, 7]], "labels": None, "attention_mask": [[0, 1]]})
    >>> batch.named["labels"], batch.named["mask"], batch.array("input_ids").tolist(), batch.shape()
    ((), ('attention_mask',), [[0, 7]], (1, 2))
    >>> (batch | {"attention_mask": None}).array("input_ids") is batch.array("input_ids")
    True
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        if not hasattr(batch, "items"):
            rule, remedy = "A batch is a dict of tensors.", "Pass the dict that your collator returns."
            raise CollateError(explain("batch", a_type(batch), rule, remedy))
        super().__init__(batch if type(batch) is dict else entries(batch))
        self.named: defaultdict[Named, tuple[str, ...]] = defaultdict(tuple)
        """The keys of each role that hold something, in the order of the table."""
        self._held: dict[tuple[str, Any], tuple[Any, Any]] = {}
        self.counted = False
        """True if position_ids are known to restart just where sequences begin: compared by the reader, or of a collator."""
        for name, role in _ROLES.items():
            if name in self and self[name] is not None:
                self.named[role] += (name,)

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Sources:
        """The record of a batch; a record as it is."""
        return batch if isinstance(batch, cls) else cls(batch)

    def __or__(self, changed: Mapping[str, Any]) -> Sources:  # type: ignore[override]
        made = Sources({**self, **changed})
        made._held, made.counted = self._held, self.counted
        return made

    @classmethod
    def of_tensors(cls, batch: Mapping[str, Any]) -> Sources:
        """`of`, with arrays of numbers as tensors of their own, and lists of numbers where a key has one a token."""
        held, made = batch if isinstance(batch, cls) else cls(batch), dict[str, Tensor]()
        for key, x in held.items():
            known = key in KEYS and KEYS[key].kind in ("tokens", "positions")
            numbers = isinstance(x, np.ndarray) and x.dtype.kind in "biuf"
            if numbers or (known and isinstance(x, (list, tuple, np.ndarray))):
                with suppress(*() if known and numbers else (CollateError,)):  # boxes of an image, hashes of samples
                    made[key] = host_tensor(key, x.tolist() if isinstance(x, np.ndarray) and not numbers else x).clone()
        return held | made if made else held

    def array(self, name: str, convert: Callable[[str, Any], Any] | None = None) -> Any:
        """Return a value as a numpy array, or as `convert` makes it, once."""
        value, held = self[name], self._held.get((name, convert))
        if held is None or held[0] is not value:
            held = self._held[name, convert] = (value, (convert or host_array)(name, value))
        return held[1]

    @once
    def masks(self) -> Mapping[str, Tensor]:
        """`attention_mask`, or each mask of a mapping by kind of layer."""
        return {name: full for key in self.named["mask"] for name, full in self.array(key, _masks).items()}

    @once
    def offsets(self) -> Mapping[str, Array]:
        """Offsets of a flat row, physical and real ones, those that objects hold (`HOLDERS`) among them."""
        found: dict[str, Array] = {}
        for held in dialects.HOLDERS:
            params = self.get(held)
            for name in KEYS if params is not None else ():
                value = params.get(name) if isinstance(params, Mapping) else getattr(params, name, None)
                if KEYS[name].role in _OFFSETS and value is not None:
                    found[f"{held}.{name}"] = as_offsets(f"{held}.{name}", value)
        for role in _OFFSETS:
            found |= {name: self.array(name, as_offsets) for name in self.named[role]}
        return found

    @once
    def lengths(self) -> list[list[int]] | None:
        """`seq_lens`, as one list of lengths for each row; a flat list is of one row, or one length for each row."""
        return self._listed("lengths")

    @once
    def padded_lengths(self) -> list[list[int]] | None:
        """`seq_lens_padded`, in the same form: the places that each sequence takes in its row."""
        return self._listed("padded_lengths")

    def _listed(self, role: Role) -> list[list[int]] | None:
        if not self.named[role]:
            return None
        held = self[name := self.named[role][0]]
        rows = held if isinstance(held, (list, tuple)) else np.atleast_1d(self.array(name))
        return length_rows(rows, name, filler=dialects.NO_SEQUENCE)

    def text_positions(self, shape: tuple[int, int]) -> Array | None:
        """`[B, S]`: `text_position_ids`, two-dimensional `position_ids`, or the text row of `[4, B, S]`; else None."""
        found = None
        for key in self.named["positions"]:
            positions = self.array(key)
            if positions.ndim not in (2, 3) or positions.shape[-2:] not in (shape, (1, shape[1])):
                raise wrong_shape_error(key, str(list(positions.shape)), shape)
            if positions.ndim == 2 or len(positions) == 4:
                text = positions if positions.ndim == 2 else positions[0]
                wide = text if text.shape == shape else np.broadcast_to(text, shape)
                found = wide if found is None or key.startswith("text") else found
        return found

    def shape(self) -> tuple[int, int]:
        """`(B, S)` of the tokens. Raises where two keys of tokens differ, or there is none."""
        named = self.named["tokens"] or (*self.named["keep"], *self.named["segment_ids"])
        if not named:
            rule = "A batch has input_ids [B, S], or inputs_embeds [B, S, H]."
            remedy = "Collate the tokens too. A pipeline stage without tokens takes its batch as it is."
            raise CollateError(explain("batch", f"keys {', '.join(map(str, self))}" if self else "no keys", rule, remedy))
        shape, *others = map(self._rows_and_width, named)
        if any(other != shape for other in others):
            got = ", ".join(f"{name} {list(each)}" for name, each in zip(named, (shape, *others)))
            rule = "All keys of tokens have the same rows and width."
            raise CollateError(explain("batch", got, rule, "Pad them together."))
        return shape

    def _rows_and_width(self, name: str) -> tuple[int, int]:
        value = self[name]
        shape = tuple(value.shape) if isinstance(value, Tensor) and not value.is_nested else self.array(name).shape
        if len(shape) < 2:
            rule = "Tokens of a batch are [B, S]."
            raise CollateError(explain(name, f"shape {list(shape)}", rule, "Add the row: x[None]."))
        return shape[0], shape[1]


def wrong_shape_error(name: str, got: str, shape: tuple[int, int]) -> CollateError:
    """Return the error for a value with other rows or another width than the tokens."""
    rule = f"The tokens of the batch are {list(shape)} (rows, width)."
    return CollateError(explain(name, got, rule, "Build them together, and split them together."))


def _masks(key: str, carried: Any) -> dict[str, Tensor]:
    kinds = {f"{key}[{kind!r}]": x for kind, x in carried.items()} if isinstance(carried, Mapping) else {key: carried}
    held = {name: value for name, value in kinds.items() if value is not None}
    return {name: _evaluated(name, x) if hasattr(x, "mask_mod") else host_tensor(name, x) for name, x in held.items()}


def _evaluated(name: str, block_mask: Any) -> Tensor:
    """A BlockMask as bool `[B, H, Q, K]`: torch keeps the predicate it was made of (nn/attention/flex_attention.py)."""
    from torch.nn.attention.flex_attention import create_mask

    B, H, Q, K = block_mask.shape
    check_bytes(name, (B, H, Q, K), 1, MAX_MASK_BYTES)
    evaluated: Tensor = create_mask(block_mask.mask_mod, B, H, Q, K, device=str(block_mask.kv_num_blocks.device)).cpu()
    return evaluated


def segments_from_offsets(sources: Sources, shape: tuple[int, int]) -> tuple[str, Segments] | None:
    """Return the deciding key and the `Segments` of the offsets, lengths and sequence numbers of a batch; None without any.

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
        pads_right = named in dialects.PADS_RIGHT and not says_padding(sources)
        return (sources.named["lengths"][0], Segments.from_lengths(rows, S)) if whole or pads_right else None
    name, physical, real = physical_and_real_offsets(offsets)
    as_offsets(name, physical, S)
    real_N = _real_lengths(name, physical, real, lengths)
    starts_N, held = physical[:-1], real_N > 0
    tail = _tail(sources)
    if sources.named["tail"] and tail and S - tail not in physical:
        rule = f"The tail begins where a sequence ends: {name} is {physical.tolist()[-8:]}, and the row has {S} tokens."
        remedy = "If rows with tails were joined or split, leave it out and pass segment_ids."
        raise CollateError(explain(sources.named["tail"][0], str(tail), rule, remedy))
    if physical[-1] < S and not _ends_in_padding(sources, int(physical[-1]), S):
        rule = f"The row has {S} tokens, and no other key says that the tokens after the last offset are padding."
        remedy = "Let the last offset count the tail, or add attention_mask_2d or segment_ids."
        raise CollateError(explain(name, str(physical.tolist())[:80], rule, remedy))
    if not tail and np.array_equal(starts_N[held], np.cumsum(real_N[held]) - real_N[held]):
        return name, of_lengths([real_N[held].tolist()], S)
    ids_S = ids_at(starts_N.tolist(), real_N.tolist(), S)
    ids_S[max(S - tail, 0) :] = 0
    return name, of_ids(ids_S[None])


def ids_at(starts: list[int], lengths: list[int], width: int) -> Array:
    """Return the ids of a row whose sequences begin at these places."""
    ids_S = np.zeros(width, np.int64)
    for n, (start, length) in enumerate(zip(starts, lengths), start=1):
        ids_S[start : start + length] = n
    return ids_S


def _ends_in_padding(sources: Sources, end: int, S: int) -> bool:
    """True if another source says that the rest of the row behind the offsets is padding: a mask or lengths, which are
    compared with them; labels; else one repeated token, or a last one at position 0 (NeMo RL's common.py:290)."""
    if sources.named["keep"] or sources.masks or sources.lengths is not None or sources.named["segment_ids"]:
        return True
    if (unread_S := _unread(sources, S)) is not None:
        return bool(unread_S[end:].all())
    positions_BS = sources.text_positions((1, S))
    rest = sources.array("input_ids")[0, end:].tolist() if sources.named["tokens"] == ("input_ids",) else []
    return (len(rest) > 1 and len(set(rest)) == 1) or (positions_BS is not None and not positions_BS[0, end:].any())


def _tail(sources: Sources) -> int:
    """Return how many places the offsets of a flat row number as its last sequence, by a key that says it."""
    name = next(iter(sources.named["tail"]), None)
    return 0 if name is None else whole_number(name, sources.array(name).squeeze()[()])


def says_padding(sources: Sources) -> bool:
    """True if a mask marks any padding. A mask of ones stands beside tails and lengths (VeOmni, NeMo RL)."""
    return bool(sources.named["keep"]) or any(full.ndim > 2 or bool((full != 1).any()) for full in sources.masks.values())


def _placed(rows: list[list[int]], held: list[list[int]], shape: tuple[int, int]) -> Segments:
    """Return the Segments with each sequence at the start of its place, and padding behind it."""
    bad = [
        (b, f"lengths {row}, padded lengths {places}")
        for b, (row, places) in enumerate(zip(rows, held))
        if len(row) != len(places) or any(n > most for n, most in zip(row, places)) or sum(places) > shape[1]
    ]
    if bad or len(rows) != len(held):
        rule = f"No length exceeds its padded length, and padded lengths add up to at most {shape[1]}, the row."
        raise CollateError(explain_rows("seq_lens_padded", bad, rule, "Leave seq_lens_padded out, and pass segment_ids."))
    return of_ids(np.array([ids_at([0, *accumulate(places)], row, shape[1]) for places, row in zip(held, rows)]))


def check_known_offsets(sources: Sources, segments: Segments) -> None:
    """Raise where the offsets of a flat row are not those of Segments that are known."""
    if segments.shape[0] != 1 or not sources.offsets:
        return
    name, physical, real = physical_and_real_offsets(sources.offsets)
    check_cuts(name, as_offsets(name, physical, segments.shape[1]), segments)
    if real is not None and [n for n in np.diff(real).tolist() if n] != list(segments.sequence_lengths):
        rule = f"The sequences have {list(segments.sequence_lengths[:8])} tokens."
        raise CollateError(explain("cu_seqlens", str(real.tolist())[:80], rule, REMEDY_ONE_SET, more="sources-disagree"))


def check_offsets(sources: Sources, segments: Segments, source: str) -> None:
    """Raise where lengths or sequence numbers describe other sequences than the `Segments`, which the key `source` gave."""
    if sources.lengths is not None and source not in sources.named["lengths"]:
        rows = _length_rows(sources, segments.shape[0])
        pairs = enumerate(zip(rows, segments.lengths))
        bad = [(b, f"{row}, not {list(real)}") for b, (row, real) in pairs if [n for n in row if n] != list(real)]
        bad = [(b, text) for b, text in bad if rows[b] != [segments.row_lengths[b]]]
        rule = "Lengths count the real tokens of each sequence."
        refuse_rows(sources.named["lengths"][0], bad, rule, REMEDY_ONE_SET, more="sources-disagree")
    for key in sources.named["sequence_index"]:  # changes where a sequence begins, for layers that read no offsets
        numbers_BS, keep_BS = sources.array(key), segments.array != 0
        same = numbers_BS.shape == segments.shape
        if not same or (run_starts(numbers_BS, keep_BS, 0) != run_starts(segments.array, keep_BS, 0)).any():
            rule = "Its numbers change at other tokens than the sequences of the other keys."
            raise CollateError(explain(key, str(numbers_BS.tolist())[:80], rule, REMEDY_ONE_SET))


def check_longest(sources: Sources, segments: Segments) -> None:
    """Raise where a batch's longest length is smaller than its longest sequence: attention kernels would drop the rest."""
    for key in sources.named["longest"]:
        held = sources.array(key)
        if held.size != 1 or whole_number(key, held.item()) < segments.max_length:
            rule = f"The longest sequence has {segments.max_length} tokens."
            remedy = f"Pass {key}={segments.max_length}, or leave it out."
            raise CollateError(explain(key, str(held.tolist())[:80], rule, remedy))


def _length_rows(sources: Sources, B: int) -> list[list[int]]:
    """Return the lengths of each row; of one row, all of them."""
    lengths = sources.lengths or []
    if len(lengths) == B:
        return lengths
    if B != 1:
        got, rule = f"{len(lengths)} entries", f"The batch has {B} rows."
        raise CollateError(explain(sources.named["lengths"][0], got, rule, REMEDY_ONE_SET))
    return [[n for row in lengths for n in row]]


def physical_offsets(sources: Sources, segments: Segments) -> list[int] | None:
    """Return the places by the offsets of a flat row, padded ones first; None where they do not fit its sequences."""
    named = (*sources.named["padded_offsets"], *sources.named["offsets"])
    fitting = (fitting_places(sources.offsets[name], segments) for name in named)
    return next((places for places in fitting if places is not None), None)


def check_ahead(sources: Sources, segments: Segments, *, reads_both: bool) -> None:
    """Raise where offsets count padding in a sequence and attention looks ahead; `reads_both`: real offsets leave it out."""
    if reads_both and sources.offsets and physical_and_real_offsets(sources.offsets)[2] is not None:
        return
    places = physical_offsets(sources, segments) or own_places(segments)
    if any(place > length for place, length in zip(places, segments.sequence_lengths)):
        rule = "Kernels count padding after a sequence as part of it, and this attention looks ahead."
        remedy = "Pad only the end of the row, and begin a sequence there in the offsets."
        raise UnsupportedFormError(explain("attention_mask", repr(segments), rule, remedy))


def _real_lengths(name: str, physical: Array, real: Array | None, lengths: list[list[int]] | None) -> Array:
    places_N = np.diff(physical)
    real_N = places_N if real is None else np.diff(real)
    if lengths is not None:
        given_N = np.array([n for row in lengths for n in row if n], np.int64)
        held_N = real_N[real_N > 0]
        tail = real is None and len(given_N) == len(held_N) - 1 and np.array_equal(given_N, held_N[:-1])
        padded = real is None and len(given_N) == len(held_N) and (given_N <= held_N).all()
        if not (tail or padded or np.array_equal(given_N, held_N)):
            rule = f"{name} says {held_N.tolist()[:8]}."
            raise CollateError(explain("seq_lens", str(given_N.tolist()[:8]), rule, REMEDY_ONE_SET, more="sources-disagree"))
        real_N = real_N.copy()
        real_N[real_N > 0] = np.append(given_N, 0) if tail else given_N
    if (real_N > places_N).any():
        rule = f"{name} leaves room for {places_N.tolist()[:8]}."
        raise CollateError(explain("cu_seqlens", f"lengths {real_N.tolist()[:8]}", rule, REMEDY_ONE_SET))
    return real_N


def split_by_positions(positions_BS: Array, known: Segments | None, *, padding_free: bool) -> tuple[Segments, bool] | None:
    """Return the sequences by positions that restart, and if all rows do; None where none does. Not `known`: all is real."""
    keep_BS = np.ones(positions_BS.shape, bool) if known is None else known._keep_BS
    starts_BS, tells_B = _restarts(positions_BS, keep_BS)
    restarts = bool((starts_BS.sum(axis=1) > 1)[tells_B].any())
    if not tells_B.any() or (known is None and not restarts and not padding_free):
        return None
    parted = Segments.from_ids(np.where(tells_B[:, None], np.cumsum(starts_BS, axis=1), 1) * keep_BS)
    return parted, bool(tells_B.all()) and (restarts or known is None)


def without_padding(sources: Sources, segments: Segments, real_S: Array) -> Segments:
    """Return the flat row without the padding that its offsets count: what a mask marks as padding, and
    no label is on, whether it stands as a sequence or at the end of one."""
    ids_S, *others = segments.array
    padding_S, unread_S = ~real_S & (ids_S != 0), _unread(sources, len(ids_S))
    learned = unread_S is not None and not unread_S[padding_S].all()
    before = (padding_S[:-1] & real_S[1:] & (ids_S[1:] == ids_S[:-1])).any()
    as_it_is = others or learned or before or not padding_S.any() or not (ids_S != 0)[real_S].any()
    return segments if as_it_is else Segments.from_ids([np.where(padding_S, 0, ids_S)])


def drop_tail(sources: Sources, segments: Segments, positions_BS: Array | None) -> Segments:
    """Return the flat row that numbers gave without a padding tail that they count as a sequence (`TAILS`), unless a mask
    marks padding. Without positions each sequence counts from 0."""
    (lengths, *others), S = segments.lengths, segments.shape[1]
    if others or segments.padding_side != "none" or says_padding(sources):
        return segments
    if tail := _tail(sources):
        return of_ids(np.where(np.arange(S) < S - tail, segments.array, 0))
    starts = [0, *accumulate(lengths[:-1])]
    ids_S = sources.array("input_ids")[0] if sources.named["tokens"] == ("input_ids",) else None
    unread_S = np.zeros(S, bool) if (found_S := _unread(sources, S)) is None else found_S
    counted = sum(n > 0 for n in _length_rows(sources, 1)[0]) == len(lengths)
    (positions_S,) = segments.position_ids.numpy() if positions_BS is None else positions_BS
    row = dialects.FlatRow(starts, positions_S, ids_S, unread_S, counted)
    end = next((end for tail in dialects.TAILS if (end := tail(row)) is not None), None)
    return segments if end is None else of_lengths([[n for n in (*lengths[:-1], end - starts[-1]) if n]], S)


def _unread(sources: Sources, S: int) -> Array | None:
    """Return bool `[S]`: places of a flat row without a label; None where the batch has no labels and no loss mask."""
    for name in ("labels", "shift_labels", "shifted_labels", "loss_mask"):
        if sources.get(name) is not None and (given_BS := sources.array(name)).shape == (1, S):
            return np.asarray(given_BS[0] == 0 if name == "loss_mask" else given_BS[0] < 0)
    return None


def unless_in_doubt(sources: Sources, positions_BS: Array) -> Array | None:
    """Return the positions if they part sequences from padding: one token at position 0 without a label may be either."""
    alone_BS = positions_BS == 0
    alone_BS[:, :-1] &= positions_BS[:, 1:] == 0
    labels_BS = sources.array("labels") if sources.named["labels"] else None
    if labels_BS is not None and labels_BS.shape == alone_BS.shape:
        alone_BS &= labels_BS < 0
    return None if alone_BS.any() else positions_BS


def check_positions(positions_BS: Array, segments: Segments) -> None:
    """Raise where positions restart at other tokens than those where sequences begin."""
    keep_BS = segments._keep_BS
    starts_BS, tells_B = _restarts(positions_BS, keep_BS)
    true_BS, _ = sequence_starts(segments.position_ids.numpy(), keep_BS)
    wrong_B = tells_B & (starts_BS.sum(axis=1) > 1) & (starts_BS != true_BS).any(axis=1)
    bad = [(int(b), f"sequences that begin at {np.flatnonzero(starts_BS[b]).tolist()[:8]}") for b in np.flatnonzero(wrong_B)]
    rule = "Positions restart at other tokens than those where the other keys of the batch begin a sequence."
    remedy = "If the positions are wrong, drop them, or let every sequence count from 0. Else rebuild the other keys."
    refuse_rows("position_ids", bad, rule, remedy)


def check_counts(positions_BS: Array, segments: Segments) -> None:
    """Raise where no model can be meant: positions that fall inside a sequence, or are one number for all of its tokens."""
    ids_BS, keep_BS = segments.array, segments._keep_BS
    tokens_T, ids_T, rows_T = positions_BS[keep_BS], ids_BS[keep_BS], np.nonzero(keep_BS)[0]
    inside = (ids_T[1:] == ids_T[:-1]) & (rows_T[1:] == rows_T[:-1])
    steps, rows = np.diff(tokens_T.astype(np.float64))[inside], rows_T[1:][inside]
    stand = set(rows.tolist()) - set(rows[steps != 0].tolist())
    bad = [(b, str(positions_BS[b].tolist()[:24])) for b in {*rows[~(steps >= 0)].tolist(), *stand}]
    rule = "Positions rise inside a sequence; these fall, or are the same for all of its tokens."
    remedy = "Leave position_ids out (the mask gives them), or let each sequence count from 0."
    refuse_rows("position_ids", bad, rule, remedy)


def _restarts(positions_BS: Array, keep_BS: Array) -> tuple[Array, Array]:
    """Return where sequences begin, and the rows whose positions restart."""
    starts_BS, counts_B = sequence_starts(positions_BS, keep_BS)
    counting = bool((starts_BS != keep_BS)[counts_B].any())
    return starts_BS, counts_B & (counting | (keep_BS.sum(axis=1) < 2))
