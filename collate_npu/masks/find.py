"""Find: the one door from a batch to its `Segments`; nothing else reads a mask, an offset, a position or a length.

Every source the batch has is read: `segment_ids`, `attention_mask_2d`, `attention_mask` of any rank, offsets, sequence
numbers, lengths and positions. Each is checked against the shape of the tokens and against the others, and any
disagreement raises. Costs O(B * S), and for a dense mask a few passes over its bytes.

Legend: B batch, S width, N sequences of a flat row, Q/K query and key rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from collate_npu.errors import (
    REMEDY_CARRY_2D,
    AmbiguousMaskError,
    CollateError,
    PolarityError,
    explain,
    explain_rows,
    shape_of,
)
from collate_npu.host import Array, host_array, host_tensor
from collate_npu.keys import KEEP_KEY, SEGMENT_KEY, Role, of_kind, with_role
from collate_npu.masks.derive import check_same_padding, read_bare_mask, read_mask, segments_from_2d, spelled
from collate_npu.masks.evidence import Known, Reading
from collate_npu.masks.forms import MAX_MASK_BYTES, check_bytes
from collate_npu.masks.offsets import check_offsets, segments_from_offsets
from collate_npu.masks.patterns import Pattern
from collate_npu.masks.polarity import MaskValues, Polarity
from collate_npu.rows import as_ids, sequence_starts
from collate_npu.segments import Segments, Values

MASK_KEY = "attention_mask"


def segments_from_batch(
    batch: Mapping[str, Any],
    *,
    polarity: Polarity | None = None,
    pattern: str | Pattern | None = None,
    padding_free: bool = False,
) -> Segments:
    """The `Segments` of a batch, from whatever it carries; all sources are checked against each other.

    `polarity` declares `attention_mask`, of any rank; `attention_mask_2d` is always keep. A dense mask must be that of
    `pattern` (plain causal where none is declared). Any other is refused, and the error names the pattern that would
    explain it. Per-head and valued masks (ALiBi) are refused. With `padding_free` the batch is one flat row.

    Raises `CollateError`: where nothing says which tokens are padding (no mask may mean no padding, or a mask that was
    lost), where two sources differ, where a row has no real token (`segment_ids` may say so), and where the labels are
    all on padding, as a mask turned around would have it.

    >>> batch = {"input_ids": [[0, 0, 7], [4, 5, 6]], "attention_mask": [[0, 0, 1], [1, 1, 1]]}
    >>> segments_from_batch(batch)
    Segments(B=2, S=3, lengths=[1, 3], padding='left')
    >>> segments_from_batch({"input_ids": [[0, 0, 7], [4, 5, 6]]})
    Traceback (most recent call last):
        ...
    collate_npu.errors.AmbiguousMaskError: batch: got keys input_ids. No key says which tokens are padding: no mask may
        mean no padding, or a mask that was lost. Carry attention_mask_2d from the collator (PaddingCollator and
        wrap_collator emit it).
    """
    return find_segments(batch, polarity=polarity, pattern=pattern, padding_free=padding_free).ready()


def find_segments(
    batch: Mapping[str, Any], *, polarity: Polarity | None, pattern: str | Pattern | None, padding_free: bool
) -> Segments:
    """`segments_from_batch` for the library's own use: what only compiled code needs is not computed."""
    declared = None if pattern is None else Pattern.of(pattern)
    B, S = token_shape(batch)
    if padding_free and B != 1:
        rule = "padding_free means one flat row [1, T]; this batch is padded."
        raise CollateError(explain("input_ids", f"{B} rows", rule, "Collate with padding_free=True, or set it to False."))
    masks = dict(_masks(batch))
    sources = list(_sources(batch, masks, (B, S), polarity))
    truth, positions_BS = _agreed(sources, (B, S)), _text_positions(batch, (B, S))
    if truth is not None and positions_BS is not None and truth.segments.counts_as(positions_BS):
        positions_BS = None  # as our own collators add them: they say nothing more
    truth = _with_positions(positions_BS, truth, (B, S), padding_free, bool(masks))
    for key, full in masks.items():
        if not _is_keys(full, (B, S)):
            truth = _with_dense(key, full, truth, _parted_throughout(positions_BS), (B, S), polarity, declared)
    if truth is None:
        return _refuse_unknown(batch, padding_free)
    _check_positions(positions_BS, truth.segments)
    check_offsets(batch, truth.segments)
    _refuse_inverted(batch, truth.segments)
    return truth.segments


def token_shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    """`(B, S)` of the tokens of a batch. Raises where two keys of tokens differ, or there is none."""
    shapes = dict(_shapes(batch, "tokens")) or dict(_shapes(batch, "segment_ids", "keep"))
    if len(set(shapes.values())) > 1:
        got = ", ".join(f"{key} {list(shape)}" for key, shape in shapes.items())
        raise CollateError(explain("batch", got, "All keys of tokens have the same rows and width.", "Pad them together."))
    if shapes:
        return next(iter(shapes.values()))
    rule = "A batch has input_ids [B, S], or inputs_embeds [B, S, H]."
    raise CollateError(explain("batch", f"keys {', '.join(map(str, batch))}", rule, "Collate the tokens too."))


def _shapes(batch: Mapping[str, Any], *roles: Role) -> Iterator[tuple[str, tuple[int, int]]]:
    for key in with_role(batch, *roles):
        value = batch[key]
        if value is None:
            continue
        shape = tuple(value.shape) if isinstance(value, Tensor) and not value.is_nested else host_array(key, value).shape
        if len(shape) < 2:
            raise CollateError(
                explain(key, f"shape {list(shape)}", "Tokens of a batch are [B, S].", "Add the row: x[None].")
            )
        yield key, (shape[0], shape[1])


# --- sources


@dataclass(frozen=True, slots=True)
class _Truth:
    """What is known so far; `parted` where it is also known where one sequence of a row ends and the next begins."""

    name: str
    segments: Segments
    parted: bool


def _masks(batch: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """`attention_mask`, or each mask of a mapping by kind of layer."""
    carried = batch.get(MASK_KEY)
    if carried is None:
        return
    entries = carried.items() if isinstance(carried, Mapping) else [("", carried)]
    for kind, value in entries:
        if value is not None:
            key = f"{MASK_KEY}[{kind!r}]" if kind else MASK_KEY
            yield key, _evaluated(value) if hasattr(value, "mask_mod") else host_tensor(key, value)


def _evaluated(block_mask: Any) -> Tensor:
    """A BlockMask as bool `[B, H, Q, K]`: torch keeps the predicate it was made of (nn/attention/flex_attention.py)."""
    from torch.nn.attention.flex_attention import create_mask

    B, H, Q, K = block_mask.shape
    check_bytes(MASK_KEY, (B, H, Q, K), 1, MAX_MASK_BYTES)
    device = block_mask.kv_num_blocks.device
    evaluated: Tensor = create_mask(block_mask.mask_mod, B, H, Q, K, device=str(device)).cpu()
    return evaluated


def _is_keys(full: Tensor, shape: tuple[int, int]) -> bool:
    """One value a token, by its place in a batch. With as many rows as tokens an additive one is a square mask as well."""
    additive_square = (
        full.ndim == 2 and full.shape[0] == full.shape[1] and full.is_floating_point() and bool((full < 0).any())
    )
    return full.ndim == 2 and tuple(full.shape) == shape and not additive_square


def _sources(
    batch: Mapping[str, Any], masks: Mapping[str, Tensor], shape: tuple[int, int], polarity: Polarity | None
) -> Iterator[_Truth]:
    if batch.get(SEGMENT_KEY) is not None:
        yield _Truth(SEGMENT_KEY, Segments.numbered(as_ids(host_array(SEGMENT_KEY, batch[SEGMENT_KEY]))), True)
    if batch.get(KEEP_KEY) is not None:
        yield _keys_source(KEEP_KEY, batch[KEEP_KEY], "keep")
    beside = batch.get(SEGMENT_KEY) is not None or batch.get(KEEP_KEY) is not None
    for key, full in masks.items():
        if _is_keys(full, shape):
            zeros = beside and not bool(full.any())  # alone they could mean anything
            yield _keys_source(key, full, polarity or ("keep" if zeros else None))
    if (flat := segments_from_offsets(batch, shape)) is not None:
        yield _Truth(flat[0], flat[1], True)


def _keys_source(key: str, full: Values, polarity: Polarity | None) -> _Truth:
    segments = segments_from_2d(key, full, polarity)
    return _Truth(key, segments, segments.packed)


def _agreed(sources: list[_Truth], shape: tuple[int, int]) -> _Truth | None:
    """The source that says most, once all have the shape of the tokens and agree."""
    for source in sources:
        if source.segments.shape != shape:
            rule = f"The tokens of the batch are {list(shape)} (rows, width)."
            remedy = "Build them together, and split them together."
            raise CollateError(explain(source.name, str(list(source.segments.shape)), rule, remedy))
    for source in sources[1:]:
        check_same_padding(sources[0].segments, {source.name: source.segments})
    parted = [source for source in sources if source.parted]
    for source in parted[1:]:
        _check_same_parts(parted[0], source)
    return (parted or sources or [None])[0]  # type: ignore[list-item]


def _check_same_parts(one: _Truth, other: _Truth) -> None:
    wrong = np.flatnonzero((one.segments.array != other.segments.array).any(axis=1))
    if len(wrong):
        rows = [(int(b), f"lengths {list(other.segments.lengths[b])}, not {list(one.segments.lengths[b])}") for b in wrong]
        rule = f"It disagrees with {one.name} about where one sequence of a row ends and the next begins."
        raise CollateError(explain_rows(other.name, rows, rule, "Keep one of them, or rebuild both from the lengths."))


# --- positions


def _text_positions(batch: Mapping[str, Any], shape: tuple[int, int]) -> Array | None:
    """`[B, S]`: `text_position_ids`, two-dimensional `position_ids`, or the text row of `[4, B, S]`; others tell nothing."""
    found = None
    for key in of_kind(batch, "positions"):
        if batch[key] is None:
            continue
        positions = host_array(key, batch[key])
        if positions.ndim not in (2, 3) or positions.shape[-2:] not in (shape, (1, shape[1])):
            rule = f"The tokens of the batch are {list(shape)} (rows, width)."
            raise CollateError(
                explain(key, str(list(positions.shape)), rule, "Build them together, and split them together.")
            )
        if positions.ndim == 2 or len(positions) == 4:
            text = positions if positions.ndim == 2 else positions[0]
            wide = text if text.shape == shape else np.broadcast_to(text, shape)
            found = wide if found is None or key.startswith("text") else found
    return found


def _restarts(positions_BS: Array, keep_BS: Array) -> tuple[Array, Array]:
    """Where sequences begin, and the rows that tell: each run counts 0, 1, 2, ...

    Some run of the batch must be longer than a token: zeros throughout say nothing.
    """
    starts_BS, counts_B = sequence_starts(positions_BS, keep_BS)
    counting = bool((starts_BS != keep_BS)[counts_B].any())
    return starts_BS, counts_B & (counting | (keep_BS.sum(axis=1) < 2))


def _with_positions(
    positions_BS: Array | None, truth: _Truth | None, shape: tuple[int, int], padding_free: bool, masked: bool
) -> _Truth | None:
    """A keep mask does not show where one sequence of a row ends and the next begins; positions that restart do."""
    if positions_BS is None or (truth is not None and truth.parted) or (truth is None and (masked or shape[0] != 1)):
        return truth  # without a keep mask, padding may stand anywhere
    keep_BS = np.ones(shape, bool) if truth is None else truth.segments.keep_array()
    starts_BS, tells_B = _restarts(positions_BS, keep_BS)
    restarts = bool((starts_BS.sum(axis=1) > 1)[tells_B].any())
    if not tells_B.any() or (truth is None and not restarts and not padding_free):
        return truth
    parted = Segments.from_ids(np.where(tells_B[:, None], np.cumsum(starts_BS, axis=1), 1) * keep_BS)
    return _Truth("position_ids", parted, bool(tells_B.all()) and (restarts or truth is None))


def _parted_throughout(positions_BS: Array | None) -> Segments | None:
    """The sequences by positions alone, if every token of every row were real."""
    if positions_BS is None:
        return None
    starts_BS, tells_B = _restarts(positions_BS, np.ones(positions_BS.shape, bool))
    return Segments.from_ids(np.cumsum(starts_BS, axis=1)) if tells_B.all() and (starts_BS.sum(axis=1) > 1).any() else None


def _check_positions(positions_BS: Array | None, segments: Segments) -> None:
    """Rows whose positions restart must restart where their sequences begin."""
    if positions_BS is None:
        return
    keep_BS = segments.keep_array()
    starts_BS, tells_B = _restarts(positions_BS, keep_BS)
    true_BS, _ = sequence_starts(segments.position_ids.numpy(), keep_BS)
    wrong_B = tells_B & (starts_BS.sum(axis=1) > 1) & (starts_BS != true_BS).any(axis=1)
    bad = [(int(b), f"sequences that begin at {np.flatnonzero(starts_BS[b]).tolist()[:8]}") for b in np.flatnonzero(wrong_B)]
    if bad:
        rule = "Positions restart at other places than the sequences that the other sources of the batch tell."
        remedy = "Let every sequence count from 0, carry segment_ids, or drop position_ids."
        raise CollateError(explain_rows("position_ids", bad, rule, remedy))


# --- dense masks


def _with_dense(
    key: str,
    full: Tensor,
    truth: _Truth | None,
    throughout: Segments | None,
    shape: tuple[int, int],
    polarity: Polarity | None,
    declared: Pattern | None,
) -> _Truth:
    """The truth with what a dense mask says of it; the mask must be that of the pattern."""
    B, S = shape
    full = _one_head(key, full, polarity)
    if declared is None and full.ndim == 4 and full.shape[-2] == 1 < S:
        rule = "One row of keys for all queries is padding beside causal attention, or attention to both sides."
        raise AmbiguousMaskError(explain(key, shape_of(full), rule, "Declare pattern='causal' or pattern='bidirectional'."))
    if full.shape[-1] != S:
        rule = f"The tokens of the batch are {list(shape)} (rows, width)."
        raise CollateError(explain(key, shape_of(full), rule, "Build them together, and split them together."))
    reading = _read(full, truth, throughout, B, polarity, declared)
    found = reading.pattern
    if declared is None and found is not None and found.reaches(reading.segments.longest_span):
        rule = f"It is the mask of {found} attention, and plain causal attention is what this batch would be given."
        remedy = f"Pass pattern={spelled(found)} if the model attends so."
        raise AmbiguousMaskError(explain(key, shape_of(full), rule, remedy))
    return _Truth(key, reading.segments, truth is not None and truth.parted)


def _read(
    full: Tensor,
    truth: _Truth | None,
    throughout: Segments | None,
    B: int,
    polarity: Polarity | None,
    declared: Pattern | None,
) -> Reading:
    """What is known beside the mask decides; `throughout` only what the mask alone leaves open."""
    if truth is not None:
        keep = None if truth.parted else truth.segments.keep_array()
        known = Known(pattern=declared, keep=keep, segments=truth.segments if truth.parted else None)
        return read_mask(full, known, polarity=polarity, batch_size=B)
    try:
        return read_bare_mask(full, Known(pattern=declared), polarity=polarity, batch_size=B)
    except (AmbiguousMaskError, PolarityError):
        if throughout is None:
            raise
        return read_mask(full, Known(pattern=declared, segments=throughout), polarity=polarity, batch_size=B)


def _one_head(key: str, full: Tensor, polarity: Polarity | None) -> Tensor:
    """Heads that are all alike as one; a mask that says more than who attends whom has no other form."""
    remedy = f"Leave it to the model, and pass attention_mask_2d instead. {REMEDY_CARRY_2D}"
    if full.ndim == 4 and full.shape[1] > 1:
        if not bool((full == full[:, :1]).all()):
            raise AmbiguousMaskError(
                explain(key, f"{shape_of(full)}, not the same for every head", "One mask is for all heads.", remedy)
            )
        full = full[:, :1]
    if full.is_floating_point() and MaskValues(full, polarity, key).valued:
        rule = "It adds values where it attends (ALiBi, a position bias), which no form of a mask here would carry on."
        raise AmbiguousMaskError(explain(key, shape_of(full), rule, remedy))
    return full


# --- refusals


def _refuse_unknown(batch: Mapping[str, Any], padding_free: bool) -> Segments:
    keys = f"keys {', '.join(map(str, batch))}"
    if padding_free:
        rule = "Nothing says where one sequence of this flat row ends and the next begins."
        remedy = "Keep position_ids that restart, cu_seq_lens_q or segment_ids in the batch (return_position_ids=True)."
        raise AmbiguousMaskError(explain("batch", keys, rule, remedy))
    rule = "No key says which tokens are padding: no mask may mean no padding, or a mask that was lost."
    remedy = "Carry attention_mask_2d from the collator (PaddingCollator and wrap_collator emit it)."
    raise AmbiguousMaskError(explain("batch", keys, rule, remedy))


def _refuse_inverted(batch: Mapping[str, Any], segments: Segments) -> None:
    """A keep mask turned around leaves a row without a real token, or puts every label on padding."""
    if batch.get(SEGMENT_KEY) is not None:
        return
    bad = dict.fromkeys(segments.empty_rows, "no real token")
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and tuple(labels.shape) == segments.shape and not labels.is_floating_point():
        labels_BS = host_array("labels", labels)
        if not bad and all(labels_BS[b, end - 1] >= 0 for b, _, end in segments.spans):
            return  # a label on the last token of every sequence
        labelled_BS = labels_BS >= 0
        lost_B = labelled_BS.any(axis=1) & ~(labelled_BS & segments.keep_array()).any(axis=1)
        bad |= {int(b): f"{int(labelled_BS[b].sum())} labels, all on padding" for b in np.flatnonzero(lost_B)}
    if bad:
        rule = "True or 1 is a real token in a 2D mask; here it looks turned around, or made of ids != pad_token_id."
        remedy = "Invert it (== 0) or declare polarity='masked'; if it is right, carry segment_ids beside it."
        raise CollateError(explain_rows(KEEP_KEY if KEEP_KEY in batch else MASK_KEY, bad.items(), rule, remedy))
