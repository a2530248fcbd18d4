"""Describe: a batch in words."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from torch import Tensor

from collate_npu.errors import CollateError, shape_of
from collate_npu.masks.find import segments_from_batch
from collate_npu.masks.forms import none_is_exact


def describe(batch: Mapping[str, Any]) -> str:
    """A batch in words: each key with dtype and shape, what is real and how that is known, whether None would be exact.

    >>> from collate_npu import PaddingCollator
    >>> print(describe(PaddingCollator(pad_token_id=0, padding_side="left")([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}])))
    input_ids: int64 [2, 3]
    position_ids: int64 [2, 3]
    attention_mask: bool [2, 1, 3, 3]
    attention_mask_2d: bool [2, 3]
    <BLANKLINE>
    Segments(B=2, S=3, lengths=[3, 1], padding='left'): 2 sequences, 4 real tokens of 6 (67%)
    no mask is not exact: padding stands on the left, so real tokens would attend it
    """
    lines = [f"{key}: {_value(value)}" for key, value in batch.items()]
    try:
        segments = segments_from_batch(batch)
    except CollateError as error:
        return "\n".join([*lines, "", f"padding: not known. {error}"])
    B, S = segments.shape
    real, places = segments.num_tokens, max(B * S, 1)
    verdict = none_is_exact(segments)
    lines += [
        "",
        f"{segments!r}: {segments.num_sequences} sequences, {real} real tokens of {B * S} ({100 * real / places:.0f}%)",
        f"no mask {'is' if verdict else 'is not'} exact: {verdict.why}",
    ]
    return "\n".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, Tensor):
        size = value.untyped_storage().nbytes()
        return f"{shape_of(value)}, {size / 2**20:.1f} MiB" if size >= 2**20 else shape_of(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_value(item)}" for key, item in value.items()) + "}"
    if value is None or isinstance(value, (int, float, str)):
        return repr(value)
    return type(value).__name__ + (f" of {len(value)}" if isinstance(value, Sized) else "")
