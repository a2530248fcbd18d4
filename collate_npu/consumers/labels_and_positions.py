"""Labels and positions of a batch, as the model that reads it needs them.

A label that a sample alone would not learn becomes -100: that of padding; the first of each sequence, which a batch would
predict from padding or from the sequence before; and, if labels are shifted already, the last of a sequence that is the
first token of the next. A transformers model shifts labels itself, other stacks take them shifted. The caller or the tokens
tell which: each label equals its own token, or the next. If neither tells, only the labels of padding change.

Megatron-style stacks always get positions. A transformers model gets them if its own count would be wrong (left padding,
packing), or if the batch has them, and then as it counts (`model_traits.position_rule`). Positions that count padding are
replaced; a caller's own are not. All costs O(B * S).
Legend: B rows, S width, T tokens of a flat row, N sequences.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import Array, dims
from collate_npu.consumers.mask_choice import Case, Consumer
from collate_npu.consumers.model_traits import LabelRule
from collate_npu.errors import AmbiguousMaskError, CollateError, UnsupportedFormError, a_type, explain, refuse_rows, shape_of
from collate_npu.masks.sources import Sources, check_counts
from collate_npu.outputs import repad, unpad
from collate_npu.segments import PADS_BEFORE, Segments
from collate_npu.validation import check_held, check_of_batch

IGNORED = -100
KEY = "position_ids"
TEXT_KEY = "text_position_ids"
_PAIR = ("input_ids", "labels")


def labels_for(
    sources: Sources, segments: Segments, rule: LabelRule, shifted: bool | None, *, ignored: int = IGNORED,
    holes: bool = True,
) -> dict[str, Tensor]:  # fmt: skip
    """Return those of `labels`, `shift_labels`, `shifted_labels` and `loss_mask` `[B, S]` of this batch that must change.
    `shifted`: True if each label stands with the token that predicts it. None: the tokens tell. `holes`: True if a token
    behind padding would be predicted from the padding. Its label is then refused: the sample alone learns it."""
    out: dict[str, Tensor] = {}
    for key, given in (("labels", shifted), ("shift_labels", True), ("shifted_labels", True)):
        if isinstance(labels := sources.get(key), Tensor) and not labels.is_floating_point():
            wrong_BS = _wrong(sources, key, segments, rule, given, holes)
            if wrong_BS.any():
                for name, fill in ((key, ignored), ("loss_mask", 0)):  # Megatron's loss reads the second, not labels
                    if isinstance(x := sources.get(name), Tensor) and dims(x) == wrong_BS.shape:
                        check_of_batch(name, x, segments.shape, f"Pass {name}.to_dense().long().")
                        check_held(name, fill, x.dtype)
                        out[name] = torch.where(torch.from_numpy(wrong_BS).to(x.device), x.new_tensor(fill), x)
    return out


def label_places(sources: Sources, segments: Segments) -> Array | None:
    """Return the places of all labels but the first, if they are cut to the logits that `logits_to_keep` names (a number, a
    mask or places; ms-swift's default): a label is the token behind the place that is kept for it. Else None."""
    kept, labels, S = sources.get("logits_to_keep"), sources.get("labels"), segments.shape[1]
    if kept is None or not isinstance(labels, Tensor) or labels.shape == segments.shape:
        return None
    kept_S = np.arange(S)[-kept:] if isinstance(kept, int) else np.arange(S)[sources.array("logits_to_keep")]
    return kept_S[:-1] + 1 if labels.shape == (len(segments.array), len(kept_S)) else None


def check_labels(sources: Sources, segments: Segments, rule: LabelRule | None) -> None:
    """Raise if ids are floats, or if a language model's labels have another shape `[B, S]` than its tokens."""
    ids, labels = sources.get("input_ids"), sources.get("labels")
    if isinstance(ids, Tensor) and ids.is_floating_point():
        raise CollateError(explain("input_ids", shape_of(ids), "Token ids are whole numbers.", "Pass input_ids.long()."))
    no_ids = isinstance(labels, Tensor) and (labels.is_floating_point() or labels.dtype == torch.bool)
    if rule == "next" and no_ids and dims(labels) == segments.shape:
        text = "A label is the id of a token, -100 where nothing is learned."
        remedy = "Pass ids, or input_ids.masked_fill(~learned, -100) for a mask of learned tokens."
        raise CollateError(explain("labels", shape_of(labels), text, remedy))
    if rule == "next" and isinstance(labels, Tensor) and labels.ndim > 1 and labels.shape != segments.shape:
        text = f"A language model reads one label for each token, and the tokens are {list(segments.shape)}."
        raise CollateError(explain("labels", shape_of(labels), text, "Pad labels with -100 to the width of input_ids."))


def _wrong(sources: Sources, key: str, segments: Segments, rule: LabelRule, shifted: bool | None, holes: bool) -> Array:
    """Return bool `[B, S]`, True for labels of padding or of another sequence; `[0]` if there is not one label a token."""
    named, labels_BS = sources.named["tokens"], sources.array(key)
    tokens_BS = sources.array(named[0]) if named in (("input_ids",), ("tokens",)) else None
    if labels_BS.shape != segments.shape:
        return np.zeros(0, bool)
    read_BS: Array = labels_BS >= 0
    ids_BS = segments.array if segments.packed else segments._keep_BS
    real_BS = ids_BS != 0 if segments.packed else ids_BS  # numpy compares bool with a number in 20 times as long
    behind = segments.packed or segments.padding_side in PADS_BEFORE  # something stands before a sequence
    if tokens_BS is not None and rule == "next" and not shifted and (behind or shifted is False):
        moved = labels_are_shifted(tokens_BS, labels_BS, segments)
        if moved and shifted is False and sources.get("shift_labels") is None:
            refuse_moved(tokens_BS, labels_BS, segments)
        shifted = moved if shifted is None else shifted
    if holes and rule == "next" and shifted is not None and segments.hole_rows:
        following = labels_BS[:, :-1] == tokens_BS[:, 1:] if shifted and tokens_BS is not None else not shifted
        _refuse_behind_holes(key, (read_BS[:, :-1] if shifted else read_BS[:, 1:]) & following, real_BS, segments)
    if not behind or rule != "next":
        return np.greater(read_BS, real_BS, out=read_BS)
    lost_BS, other_BS = ~real_BS, ids_BS[:, 1:] != ids_BS[:, :-1]
    if shifted:  # the last label of a sequence where it is the token that stands next: any other is the sample's own
        following = True if tokens_BS is None else labels_BS[:, :-1] == tokens_BS[:, 1:]
        lost_BS[:, :-1] |= other_BS & real_BS[:, :-1] & real_BS[:, 1:] & following
    elif shifted is not None:  # the first label of a sequence; the shift drops that of a row which stays a row
        rows_N, first_N, _ = np.array(segments.spans, np.int64).reshape(-1, 3).T
        lost_BS[rows_N, first_N] = (first_N > 0) | (not holes)
    return read_BS & lost_BS


def _refuse_behind_holes(key: str, read_BS: Array, real_BS: Array, segments: Segments) -> None:
    """Raise for labels that are read of tokens behind padding inside a sequence."""
    behind_BS = (segments.position_ids.numpy()[:, 1:] > 0) & real_BS[:, 1:] & ~real_BS[:, :-1] & read_BS
    found = [(b, f"{n} labels behind padding inside a sequence") for b, n in enumerate(behind_BS.sum(axis=1).tolist()) if n]
    rule = "The head would predict such a token from the padding before it, and the sample alone learns it."
    refuse_rows(key, found, rule, "Take the padding out of the sample, or ignore that label (-100).")


def refuse_moved(tokens_BS: Array, labels_BS: Array, segments: Segments) -> None:
    """Raise for labels that the tokens show to be moved, several of them, where unmoved ones are expected."""
    moved = labels_are_shifted(tokens_BS, labels_BS, segments)
    if moved and ((labels_BS[:, :-1] == tokens_BS[:, 1:]) & (labels_BS[:, :-1] >= 0)).sum() > 1:
        rule = "Labels stand with their own tokens, and the model moves them; these are moved: each is the token after it."
        remedy = "Pass labels_shifted=True, or a copy of input_ids with -100 where nothing is learned."
        raise CollateError(explain("labels", "the next token at each place", rule, remedy, more="labels"))


def check_rebuilt(sources: Sources, segments: Segments, tokens_T: Array, own_T: Array) -> None:
    """Raise where a collator made labels anew: it learns what the samples' labels, `[T]` beside their tokens, do not, or it
    lost each token of one id (labels == pad_token_id, if pad is eos). To ignore more is its choice."""
    ids, labels = (sources.array(each) if dims(sources.get(each)) == segments.shape else None for each in _PAIR)
    if ids is None or labels is None or not np.array_equal(ids[segments._keep_BS], tokens_T):
        return
    given_T, first_T = labels[segments._keep_BS], (segments.position_ids == 0).numpy()[segments._keep_BS]
    more_T, lost_T = (given_T >= 0) & (own_T < 0), (own_T >= 0) & (given_T < 0) & ~first_T
    of_one = len(set(tokens_T[lost_T].tolist())) == 1 and not (given_T[tokens_T == tokens_T[lost_T][0]] >= 0).any()
    wrong_T = more_T | lost_T if of_one else more_T
    if wrong_T.any():
        rows_T = np.nonzero(segments._keep_BS)[0]
        bad = [(b, f"{wrong_T[rows_T == b].sum()} others than in the samples") for b in np.unique(rows_T[wrong_T]).tolist()]
        rule = "The samples have labels, and this collator made others of the tokens."
        remedy = "Let it pad the samples' labels (DataCollatorForSeq2Seq does), or take labels out of the samples."
        refuse_rows("labels", bad, rule, remedy, more="labels")


def check_starts(sources: Sources, segments: Segments) -> None:
    """Raise for sequences that look padded on the left though nothing says so: they begin with one token again and again,
    not learned, in half of the row, others with fewer of it; below eight times, if it stands nowhere else in the batch."""
    ids, labels = (sources.array(each) if dims(sources.get(each)) == segments.shape else None for each in _PAIR)
    if ids is None or labels is None or sources.named["vision"]:
        return
    rows_N, first_N, ends_N = np.array(segments.spans, np.int64).reshape(-1, 3).T
    after_N = np.minimum(first_N + 1, ends_N - 1)
    twice_N = (ids[rows_N, first_N] == ids[rows_N, after_N]) & (after_N > first_N) & (labels[rows_N, after_N] < 0)
    bad, runs_N = [], np.zeros(len(rows_N), np.int64)
    for n, (b, start, end) in enumerate(segments.spans) if twice_N.any() else ():
        runs_N[n] = (ids[b, start:end] == ids[b, start]).cumprod().sum()
    for n in np.flatnonzero(twice_N & (2 * runs_N >= ends_N - first_N) & (runs_N < ends_N - first_N)).tolist():
        b, start, run, token = rows_N[n], first_N[n], runs_N[n], ids[rows_N[n], first_N[n]]
        leads_N = np.where(ids[rows_N, first_N] == token, runs_N, 0)
        alone = run > 7 or (ids[segments._keep_BS] == token).sum() == leads_N.sum()
        if alone and (leads_N != run).any() and (labels[b, start : start + run] < 0).all():
            bad.append((int(b), f"{run} times the token {token} where a sequence begins"))
    rule = "The mask shows no padding, and these rows look padded."
    remedy = "Make the mask from the lengths. If these are real tokens, give one of them a label, or batch them alone."
    refuse_rows("attention_mask", bad, rule, remedy, more="padding-unknown", kind=AmbiguousMaskError)


def labels_are_shifted(tokens_BS: Array, labels_BS: Array, segments: Segments) -> bool | None:
    """Return True if each label that is learned is the next token of its sequence, False if its own, None if unclear.
    The ends of each sequence tell first, then all places."""
    if tokens_BS.shape != labels_BS.shape:
        return None
    rows_N, first_N, ends_N = np.array(segments.spans, np.int64).reshape(-1, 3).T
    at_3N = np.stack([first_N, np.maximum(ends_N - 2, first_N), ends_N - 1])
    if (found := _told(tokens_BS, labels_BS, (rows_N, at_3N), at_3N < ends_N - 1)) is not None:
        return found
    rows_T, at_T = np.nonzero(segments._keep_BS)
    after_T = np.append((np.diff(at_T) == 1) & (np.diff(segments.array[rows_T, at_T]) == 0), False)
    return _told(tokens_BS, labels_BS, (rows_T, at_T), after_T)


def _told(tokens_BS: Array, labels_BS: Array, places: tuple[Array, Array], inside: Array) -> bool | None:
    """Say of these places, and of those `inside` a sequence, before its last."""
    rows, at = places
    found = labels_BS[rows, at]
    read = found >= 0
    own = (found == tokens_BS[rows, at])[read].all()
    moved = (found == tokens_BS[rows, at + inside])[read & inside].all()
    return None if own == moved or not read.any() else bool(moved)


# --- positions


def check_image_types(case: Case, sources: Sources) -> None:
    """Raise if a model would take tokens of images for text: their type is 0, or nothing tells it. Processors write 1 and 2
    at the ids of images and videos (5.23 processing_utils.py:995); a model that is given its axes does not look."""
    key, *names = case.model.image_types or ("",)
    given = sources.get(KEY)
    if not key or sources.get("input_ids") is None or (getattr(given, "ndim", 0) == 3 and key != "token_type_ids"):
        return
    ids = [getattr(case.model.config, name) for name in names]
    image_BS, types = np.isin(sources.array("input_ids"), ids) & case.segments._keep_BS, sources.get(key)
    if not image_BS.any() or (types is None and case.model.positions != "axes" and key != "token_type_ids"):
        return
    fits = dims(types) == case.segments.shape
    lost_BS = image_BS & (sources.array(key) == 0) if fits else image_BS
    if lost_BS.any():
        got = "no image" if fits else a_type(types) if types is None else shape_of(types)
        bad = [(b, f"{got} at {lost_BS[b].sum()} tokens of images") for b in np.flatnonzero(lost_BS.any(axis=1)).tolist()]
        rule = f"{key} [B, S] is not 0 where input_ids are {', '.join(names)}: the model finds images by it."
        remedy = "Take it from the processor (return_mm_token_type_ids=True), and pad it with the tokens, on the same side."
        refuse_rows(key, bad, rule, remedy)


def positions_for(consumer: Consumer, case: Case, sources: Sources, device: torch.device | None = None) -> Tensor | None:
    """Return the `position_ids` of this batch for this consumer, if possible made on this device; None to leave them out."""
    if case.segments.padding_side == "none" and sources.named["labels"]:
        check_starts(sources, case.segments)
    if sources.named["vision"] and consumer.counts_positions:
        check_image_types(case, sources)
    rule, first = case.model.positions, case.model.first_position
    given: Tensor | None = sources.get(KEY)
    counted = sources.counted and sources.get(TEXT_KEY) is None and getattr(given, "ndim", 2) == 2
    kind = "derived" if given is None or counted else kind_of(torch.from_numpy(sources.array(KEY)), case.segments, first)
    if kind == "places":
        given = None
    axes = not case.padding_free and sources.named["vision"]  # the model derives them from the 2D mask
    if not consumer.counts_positions:
        return given if given is not None or axes else positions_on(case.segments, device)
    derived = kind != "own"
    if not derived and rule != "none" and given is not None and tuple(given.shape) == case.segments.shape:
        check_counts(sources.array(KEY), case.segments)
    if rule == "axes" and (case.padding_free or case.segments.packed):
        return _axes(case, None if derived else given, sources)
    if not derived:
        return given
    if rule == "none" or (rule == "axes" and axes):
        return None
    if rule == "padding_idx" and sources.get("input_ids") is not None:  # padding may hold an id that this model counts
        foreign = (sources.array("input_ids")[~case.segments._keep_BS] != first - 1).any()
        return _by_ids(case, sources) if case.segments.packed or foreign or given is not None else None
    segments, wide = case.segments, case.segments.shape[1] > (case.model.rope_limit or case.segments.shape[1])
    if given is not None and first == 0 and not wide:
        return given
    needed = given is not None or segments.packed or segments.padding_side in PADS_BEFORE or case.padding_free or wide
    # rotary frequencies follow the highest position, that of padding too
    most = max(segments.max_length - 1, 0) if wide else segments.shape[1]
    return positions_on(segments, device).clamp_(max=most).add_(first) if needed else None


def _by_ids(case: Case, sources: Sources) -> Tensor:
    """Return positions as RoBERTa's family counts each sequence: from `padding_idx + 1`; `padding_idx` for its own id."""
    padding_idx, segments = case.model.first_position - 1, case.segments
    counts_T = (unpad(torch.from_numpy(sources.array("input_ids")), segments) != padding_idx).long()
    counted_T = counts_T.cumsum(0)
    before_N = (counted_T - counts_T)[segments.cu_seqlens[:-1].long()]
    inside_T = counted_T - before_N.repeat_interleave(torch.tensor(segments.sequence_lengths))
    return repad(inside_T * counts_T + padding_idx, segments, fill=padding_idx)


def kind_of(positions: Tensor, segments: Segments, first: int = 0) -> Literal["derived", "places", "own"]:
    """Return "derived" if they restart exactly where sequences begin, "places" if they count places, padding included. One
    row of positions is that of all rows. A model that counts from `first` may be given either from there."""
    keep_BS, derived_BS = segments.keep, segments.position_ids
    if positions.shape[-1:] != keep_BS.shape[1:] or positions.ndim != 2:
        return "own"
    positions = positions.expand(keep_BS.shape)[keep_BS]
    places = torch.arange(keep_BS.shape[1]).expand(keep_BS.shape)[keep_BS]
    for start in dict.fromkeys((0, first)):
        if torch.equal(positions, derived_BS[keep_BS] + start):
            return "own" if start else "derived"
    return "places" if any(torch.equal(positions, places + start) for start in (0, first)) else "own"


def _axes(case: Case, own: Tensor | None, sources: Sources) -> Tensor:
    """Return `[4, B, S]`: a text row that restarts with each sequence, and three axes (modeling_qwen2_5_vl.py:795-817)."""
    if own is None and sources.named["vision"]:
        rule = "A flat or packed row does not show where images stand among its tokens."
        remedy = "Pad one sequence a row. With a get_rope_index, the model can make position_ids [3, L] of each sample."
        raise UnsupportedFormError(explain(KEY, "none, with images in the batch", rule, remedy))
    text = case.segments.position_ids
    axes = text if own is None else own
    axes = axes if axes.ndim == 3 else axes.repeat(3, 1, 1)
    return axes if len(axes) == 4 else torch.cat([text[None], axes])


def positions_on(segments: Segments, device: torch.device | None) -> Tensor:
    """Return `segments.position_ids`; those of rows with one sequence and no holes are computed on this device."""
    if device is None or segments.packed or segments.hole_rows:
        return segments.position_ids
    starts = dict.fromkeys(range(segments.shape[0]), segments.shape[1]) | {b: start for b, start, _ in segments.spans}
    places_S = torch.arange(segments.shape[1], device=device)
    return (places_S - torch.tensor([*starts.values()])[:, None].to(device, non_blocking=True)).clamp_(min=0)
