"""Describe: a batch in words: its keys, what is real, what its mask must be, and what can go wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import PLAIN, dims, entries, host_tensor
from collate_npu.consumers.mask_choice import describe_shape
from collate_npu.errors import CollateError, a_type, explain, printable, shape_of, short
from collate_npu.keys import KEEP_KEY
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.masks.forms import none_is_exact
from collate_npu.masks.mask_values import BLOCKED_BELOW
from collate_npu.masks.sources import Sources
from collate_npu.segments import Segments, keep_array
from collate_npu.validation import is_plain

_LISTED = 8  # rows and ids that a hazard names


class Words(str):
    """Text that a prompt and a notebook show as `print` does."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def describe(batch: Mapping[str, Any]) -> Words:
    """Return a batch in words: each key with dtype and shape, what is real, whether None would be exact, and hazards:
    what is legal and goes wrong in silence somewhere.

        >>> from collate_npu import PaddingCollator
        >>> rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]
        >>> print(describe(PaddingCollator(pad_token_id=0, padding_side="left", attention_mask="2d")(rows)))
        input_ids: int64 [2, 3]
        position_ids: int64 [2, 3]
        attention_mask: bool [2, 3]
        attention_mask_2d: bool [2, 3]
        <BLANKLINE>
        Segments(B=2, S=3, lengths=[3, 1], padding='left'): 2 sequences, 4 real tokens of 6 (67%)
        in words: 2 rows of 3, one sequence each; padding on the left, 2 of 6 places (33%)
        no mask is not exact: padding stands on the left, so real tokens would attend it
    """
    if not isinstance(batch, Mapping):
        rule = "A batch is a dict of tensors, as a collator returns it."
        remedy = "Describe what the model is called with; collate_npu.tools.show.picture draws a mask alone."
        raise CollateError(explain("batch", a_type(batch), rule, remedy))
    batch = entries(batch)
    sparse = {key: x for key, x in batch.items() if isinstance(x, Tensor) and not x.is_nested and x.layout != torch.strided}
    batch, segments = Sources({**batch, **{key: host_tensor(str(key), x) for key, x in sparse.items()}}), None
    try:
        segments = segments_from_batch(batch)
    except CollateError as error:
        facts = [f"padding: not known. {error}"]
    else:
        real, places, exact = segments.num_tokens, segments.array.size, none_is_exact(segments)
        share = f"{real} real tokens of {places} ({100 * real / max(places, 1):.0f}%)"
        facts = [f"{segments!r}: {segments.num_sequences} sequences, {share}", f"in words: {describe_shape(segments)}"]
        facts.append(f"no mask {'is' if exact else 'is not'} exact: {exact.why}")
    keys = {key: f"{short(str(key), 200)}: {_value(value)}" for key, value in batch.items()}
    if is_dense(full := batch.get("attention_mask")) and (means := reads(full, segments)):
        keys["attention_mask"] += f", {means}"
    wrong = (f"hazard: {text}" for text in _hazards(batch, segments))
    return Words(printable("\n".join([*keys.values(), "", *facts, *wrong])))


def _value(value: Any) -> str:
    if isinstance(value, Tensor):
        size = value.untyped_storage().nbytes() if value.layout == torch.strided and not value.is_nested else 0
        return f"{shape_of(value)}, {size / 2**20:.1f} MiB" if size >= 2**20 else shape_of(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_value(item)}" for key, item in value.items()) + "}"
    if value is None or isinstance(value, (int, float, str)):
        return short(repr(value), 200)
    counted = isinstance(value, Sized) and getattr(value, "shape", None) != ()  # an array without a dimension has no length
    return type(value).__name__ + (f" of {len(value)}" if counted else "")


def _hazards(sources: Sources, segments: Segments | None) -> Iterator[str]:
    """Yield what goes wrong where and what to do. `segments` is None where the batch is refused: then less is known."""
    if is_dense(full := sources.get("attention_mask")):
        yield from _hazards_of_dense(full, sources, segments)
    if segments is None:
        return
    exact = none_is_exact(segments)
    flat = sources.named["offsets"] or sources.get("packed_seq_params") is not None
    if not (exact or flat or sources.named["mask"] or "attention_masks" in sources):
        yield f"there is no attention_mask, and {exact.why}. Let a BatchAdapter build one for the model that reads it."
    if segments.padding_side != "none" and dims(sources.get("input_ids")) == segments.shape:
        ids_BS, keep_BS = sources.array("input_ids"), keep_array(segments)
        padded = np.unique(ids_BS[~keep_BS])
        if shared := int(np.isin(ids_BS[keep_BS], padded).sum()):
            yield (
                f"padding holds the id {', '.join(map(str, padded[:_LISTED].tolist()))}, as do {shared} of {keep_BS.sum()} "
                "real tokens (is pad eos?). A mask made by ids != pad loses them. Emit attention_mask_2d, as the collators "
                "here do."
            )


def is_dense(value: Any) -> TypeGuard[Tensor]:
    """Return True for a mask of three or four dimensions whose numbers can be read."""
    return isinstance(value, Tensor) and is_plain(value) and value.dtype in PLAIN and not value.is_meta and value.ndim > 2


def reads(full: Tensor, segments: Segments | None) -> str:
    """Return what True, or 1, means in a dense mask, by its diagonal at a real token; "" where that is unknown."""
    if full.is_floating_point():
        return "additive" if bool((full <= BLOCKED_BELOW).any()) else ""
    if segments is None or not segments.spans or tuple(full.shape[-2:]) != (segments.shape[1],) * 2:
        return ""
    b, start, _ = segments.spans[0]
    for at in (b, 0)[: full.ndim - 2]:  # of the first head; one row may be that of all
        full = full[min(at, len(full) - 1)]
    keeps = bool(full[start, start])
    return f"{'True' if full.dtype == torch.bool else '1'} = {'attends' if keeps else 'blocked'}"


def _hazards_of_dense(full: Tensor, sources: Sources, segments: Segments | None) -> Iterator[str]:
    """Yield the hazards of a dense mask: it is alone, it holds integers, or ones and zeros that are added to scores."""
    held = f"attention_mask is {str(full.dtype)[6:]}"
    harmless = segments is not None and segments.padding_side == "none" and not segments.packed
    if sources.get(KEEP_KEY) is None and not harmless:
        yield (
            f"attention_mask is {full.ndim}D and alone. Recurrent layers of a hybrid model (Gated DeltaNet) read a 2D mask "
            f"and ignore this one, without an error. Emit {KEEP_KEY} too."
        )
    if not full.is_floating_point() and full.dtype != torch.bool:
        means = reads(full, segments)
        yield (
            f"{held} and 4D{f', {means}' if means else ''}. Megatron and npu_fusion_attention read 1 as blocked, "
            "transformers takes 1 for attended, and sdpa takes no integers. Pass consumer=."
        )
    if full.is_floating_point() and bool(((full == 0) | (full == 1)).all()):
        yield (
            f"{held} and holds 0 and 1 alone. Layers add it to scores: nothing is blocked. Pass bool, or 0 and the lowest "
            "number of the dtype."
        )
    if bool((full == -torch.inf).all(-1).any()):
        yield "attention_mask has rows of -inf throughout: their softmax is NaN. Use the lowest finite number."
