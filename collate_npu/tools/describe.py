"""Describe: a batch in words: its keys, what is real and how that is known, what its mask must be, and what can go wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor

from collate_npu.arrays import entries, host_tensor
from collate_npu.consumers.mask_choice import describe_cheapest, describe_shape
from collate_npu.errors import CollateError, a_type, explain, printable, shape_of, short
from collate_npu.keys import of_kind, with_role
from collate_npu.masks.batch_reader import find_hazards, is_dense, reads, segments_from_batch
from collate_npu.masks.forms import none_is_exact
from collate_npu.masks.sources import Sources
from collate_npu.segments import Segments


class Words(str):
    """Text that a prompt and a notebook show as `print` does."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def describe(batch: Mapping[str, Any]) -> Words:
    """Return a batch in words: each key with dtype and shape, what is real and how that is known, whether None would be
    exact, and hazards: what is legal and goes wrong in silence somewhere.

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
        known by attention_mask: says all of it without other keys
        known by attention_mask_2d: says all of it without other keys
        known by position_ids: agrees; without the other keys it is incomplete
        no mask is not exact: padding stands on the left, so real tokens would attend it
        cheapest exact form: the 2D mask, 6 bytes; the dense 4D that models make of it takes 18 bytes
    """
    if not isinstance(batch, Mapping):
        rule = "A batch is a dict of tensors, as a collator returns it."
        remedy = "Describe what the model is called with; collate_npu.tools.show.picture draws a mask alone."
        raise CollateError(explain("batch", a_type(batch), rule, remedy))
    batch = entries(batch)
    sparse = [key for key, x in batch.items() if isinstance(x, Tensor) and not x.is_nested and x.layout != torch.strided]
    batch, segments = Sources({**batch, **{key: host_tensor(str(key), batch[key]) for key in sparse}}), None
    try:
        segments = segments_from_batch(batch)
    except CollateError as error:
        facts = [f"padding: not known. {error}"]
    else:
        facts = [*_facts(batch, segments)]
    wrong = (f"hazard: {text}" for text in find_hazards(batch, segments).values())
    return Words(printable("\n".join([*_keys(batch, segments), "", *facts, *wrong])))


def _keys(batch: Mapping[str, Any], segments: Segments | None) -> Iterator[str]:
    for key, value in batch.items():
        means = reads(value, segments) if key == "attention_mask" and is_dense(value) else ""
        yield f"{short(str(key), 200)}: {_value(value)}{f', {means}' if means else ''}"


def _facts(batch: Sources, segments: Segments) -> Iterator[str]:
    B, S = segments.shape
    real = segments.num_tokens
    share = f"{real} real tokens of {B * S} ({100 * real / max(B * S, 1):.0f}%)"
    yield f"{segments!r}: {segments.num_sequences} sequences, {share}"
    yield f"in words: {describe_shape(segments)}"
    keys = [*of_kind(batch, "truth"), *of_kind(batch, "offsets"), *of_kind(batch, "positions")]
    held = (key for key in keys if key not in with_role(batch, "longest") and batch[key] is not None)
    yield from (f"known by {key}: {_alone(batch, key, segments)}" for key in held)
    verdict = none_is_exact(segments)
    yield f"no mask {'is' if verdict else 'is not'} exact: {verdict.why}"
    yield f"cheapest exact form: {describe_cheapest(segments)}"


def _alone(batch: Sources, key: str, segments: Segments) -> str:
    """Return what a key says by itself, through the same door; together they agree, or were refused."""
    alone = {**dict.fromkeys(batch), "input_ids": torch.zeros(batch.shape(), dtype=torch.int64), key: batch[key]}
    try:
        found = segments_from_batch(batch | alone, padding_free=segments.shape[0] == 1)
    except CollateError:
        return "agrees; without the other keys it is incomplete"
    if found == segments:
        return "says all of it without other keys"
    same = bool((found.keep == segments.keep).all())
    return "says what is padding, not where sequences part" if same else "says where sequences part, not what is padding"


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
