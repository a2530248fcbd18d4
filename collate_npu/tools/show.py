"""Show: a batch in words, and its masks as a picture of `■` (attends, real) and `⬚` (blocked, padding).

For people: costs O(Q * K) characters for what is drawn, and reads tensors back to the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from collate_npu.errors import CollateError, explain, shape_of
from collate_npu.masks.derive import derive_segments
from collate_npu.masks.find import segments_from_batch
from collate_npu.masks.forms import none_is_exact
from collate_npu.masks.polarity import Polarity
from collate_npu.segments import Segments

KEEP, GONE = "■", "⬚"


def picture(shown: Mapping[str, Any] | Segments | Tensor, *, row: int | None = None, limit: int = 64) -> str:
    """A batch, its `Segments`, or a mask, drawn.

    Segments: one line a row of the batch, digits where a row holds several sequences. A 4D mask: one square for each row
    (or for `row`), side by side, True drawn as it attends where its polarity can be proved and as True where not. At
    most `limit` columns are drawn of each.

        >>> print(picture(Segments.from_lengths([3, 5], side="left")))
        ⬚ ⬚ ■ ■ ■
        ■ ■ ■ ■ ■
    """
    if isinstance(shown, Segments):
        return _segments(shown, limit)
    if isinstance(shown, Tensor):
        return _tensor(shown, row, limit)
    parts = [_titled("attention_mask_2d" if "attention_mask_2d" in shown else "segments", _of_batch(shown, limit))]
    carried = shown.get("attention_mask")
    masks = carried if isinstance(carried, Mapping) else {"attention_mask": carried}
    parts += [_titled(key, _tensor(x, row, limit)) for key, x in masks.items() if isinstance(x, Tensor) and x.ndim > 2]
    return "\n\n".join(parts)


def describe(batch: Mapping[str, Any]) -> str:
    """A batch in words: each key with dtype and shape, what is real and how that is known, whether None would be exact."""
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
    return (
        repr(value) if value is None or isinstance(value, (int, float, str)) else f"{type(value).__name__} of {len(value)}"
    )


def _titled(title: str, drawing: str) -> str:
    return f"{title}\n{drawing}"


def _of_batch(batch: Mapping[str, Any], limit: int) -> str:
    return _segments(segments_from_batch(batch), limit)


def _segments(segments: Segments, limit: int) -> str:
    def drawn(i: int) -> str:
        return GONE if not i else KEEP if not segments.packed else "123456789"[(i - 1) % 9]

    more = " ..." if segments.shape[1] > limit else ""
    return "\n".join(" ".join(map(drawn, ids[:limit])) + more for ids in segments.ids.tolist())


def _tensor(x: Tensor, row: int | None, limit: int) -> str:
    if x.ndim == 2:
        return _segments(derive_segments(x), limit)
    squares = x.reshape(-1, *x.shape[-2:]) if x.ndim == 3 else x.flatten(0, 1) if x.ndim == 4 else None
    if squares is None or x.numel() == 0:
        raise CollateError(explain("mask", shape_of(x), "Masks have two to four dimensions.", "Pass one of them."))
    attends = _attends(x, squares)
    chosen = [row] if row is not None else list(range(len(attends)))
    blocks = [_square(attends[b, :limit, :limit], x.shape[-1] > limit) for b in chosen]
    return "\n".join("   ".join(lines) for lines in zip(*blocks))


def _attends(x: Tensor, squares: Tensor) -> Tensor:
    if x.is_floating_point():
        return squares > torch.finfo(x.dtype).min / 2
    return squares == 0 if _possible(x, "masked") and not _possible(x, "keep") else squares != 0


def _possible(x: Tensor, polarity: Polarity) -> bool:
    try:
        derive_segments(x, polarity=polarity)
    except CollateError:
        return False
    return True


def _square(attends_QK: Tensor, cut: bool) -> list[str]:
    return [" ".join(KEEP if cell else GONE for cell in line) + (" ..." if cut else "") for line in attends_QK.tolist()]
