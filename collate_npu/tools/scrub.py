"""Scrub: a copy of a batch to hand out: other tokens and values under the same shapes, masks, boundaries and padding.

What says how a batch is laid out stays: masks, positions, segment ids, offsets, lengths, sizes of images, flags of 0 and 1.
Token ids and labels get other ids, one-to-one: labels equal the tokens that they equalled, and the copy is read, or refused,
as the batch is. Negative ids stay, and the id of padding where it is one. Other numbers are drawn anew, every letter is an
`x`, and what is neither is left out. Names of columns stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import Array, host_array, host_tensor
from collate_npu.errors import CollateError, explain
from collate_npu.keys import KEYS
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.masks.sources import Sources
from collate_npu.tools.files import batch_of_file, check_place

KEPT, RENAMED, DRAWN, LEFT_OUT = "kept", "other ids", "drawn anew", "left out"
IDS = {name for name, key in KEYS.items() if key.kind == "tokens" and key.whole and key.fill in ("pad", "ignored")}
LAYOUT = {name for name, key in KEYS.items() if key.kind != "tokens" and key.unit < 2}
LAYOUT |= {"token_type_ids", "mm_token_type_ids", "visual_pos_masks", "pixel_attention_mask"}
"""Columns that stay, by their names."""
MOST = 127
"""Of whole numbers that are drawn anew: it fits every dtype."""


def scrub(batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return the copy, which shares no memory with the batch, and the columns that were kept, changed and left out."""
    new = _new_ids(batch)
    changes: dict[str, Callable[[Tensor], Tensor]]
    changes = {KEPT: lambda x: x.detach().clone(), RENAMED: lambda x: _rename(x, new), DRAWN: _draw}
    out, columns = dict[str, Any](), {fate: list[str]() for fate in (*changes, LEFT_OUT)}
    for name, value in batch.items():
        fate = KEPT if _stays(batch, name) else RENAMED if _ids(batch, name) else DRAWN
        try:
            out[name] = _each(value, changes[fate])
        except CollateError:
            fate = LEFT_OUT
        columns[fate].append(name)
    return out, columns


def write_copy(path: Path, to: Path) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Write the copy of a saved batch into a new file. Returns the copy, and the columns by what became of them."""
    check_place(to, ".pt")
    if to.exists():
        raise CollateError(explain(str(to), "a file that is there", "The copy is a new file.", "Name another one."))
    copy, columns = scrub(batch_of_file(path))
    torch.save(copy, to)
    return copy, columns | {"written": [str(to)]}


def _stays(batch: Mapping[str, Any], name: str) -> bool:
    """True for the columns of `LAYOUT`, and for flags, one a token or a row. What else nobody knows is private."""
    kind = KEYS[name].kind if name in KEYS else "unknown"
    if batch[name] is None or name in LAYOUT:
        return True
    with suppress(CollateError):
        x = host_tensor(name, batch[name])
        one_each = x.ndim == 2 if kind == "tokens" else tuple(x.shape) == Sources(batch).shape()[: x.ndim]
        return name not in IDS and kind != "vision" and one_each and bool(((x == 0) | (x == 1)).all())
    return False


def _ids(batch: Mapping[str, Any], name: str) -> list[Array]:
    """Return the arrays of a column of whole numbers, one a token; none of labels `[B]`, the classes of samples."""
    found: list[Array] = []
    with suppress(CollateError):
        if name in IDS and name in batch:
            _each(batch[name], lambda x: found.append(host_array(name, x)) or x)  # type: ignore[func-returns-value]
            if KEYS[name].or_sample and host_array(name, batch[name]).ndim < 2:
                return []
    return found if all(x.dtype.kind in "iu" for x in found) else []


def _new_ids(batch: Mapping[str, Any]) -> dict[int, int]:
    """Return another id for each that does not stay, at random: none is larger than the largest, or than its dtype holds."""
    held, stay = [x for name in IDS for x in _ids(batch, name) if x.size], _padding(batch)
    seen = {n for x in held for n in np.unique(x).tolist() if n >= 0}
    new, low = dict[int, int](), 0
    for high in sorted({min(np.iinfo(x.dtype).max, max(seen, default=0)) for x in held}):
        within = [n for n in seen - stay if low <= n <= high]
        drawn = SystemRandom().sample(range(low, high + 1), min(len(within) + len(stay), high + 1 - low))
        new |= zip(within, (n for n in drawn if n not in stay))
        low = high + 1
    return new


def _padding(batch: Mapping[str, Any]) -> set[int]:
    """Return the id of padding, if padding is known and holds one: several may be text behind a wrong mask."""
    with suppress(CollateError):
        padding = ~segments_from_batch(batch).keep.numpy()
        for x in (*_ids(batch, "input_ids"), *_ids(batch, "tokens")):
            if x.shape == padding.shape and len(found := np.unique(x[padding])) == 1:
                return {*found.tolist()}
    return set()


def _rename(x: Tensor, new: Mapping[int, int]) -> Tensor:
    values, places = np.unique(host_array("ids", x), return_inverse=True)
    drawn = np.array([new.get(n, n) for n in values.tolist()], np.int64)
    return torch.from_numpy(drawn[places.reshape(x.shape)]).to(x.dtype)


def _draw(x: Tensor) -> Tensor:
    """Return numbers that have nothing of those of x, but where they are not finite, or -100."""
    held, drawing = host_tensor("values", x), torch.Generator().manual_seed(SystemRandom().getrandbits(63))
    if held.is_floating_point():
        drawn = torch.rand(held.shape, generator=drawing).to(held.dtype)
    else:
        held = held.long()
        most = int(held.clamp(0, MOST).max()) if held.numel() else 0
        drawn = torch.randint(most + 1, held.shape, generator=drawing)
    return torch.where(held.isfinite() & (held != -100), drawn, held).to(x.dtype)


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a value with each of its tensors and numbers changed. Raises `CollateError` where it holds anything else."""
    if isinstance(value, Tensor):
        nested = value.is_nested
        return torch.nested.nested_tensor([*map(change, value.unbind())], layout=value.layout) if nested else change(value)
    if isinstance(value, Mapping):
        return {key: _each(item, change) for key, item in value.items()}
    if isinstance(value, (str, bytes)) or value is None:
        return value and ("x" if isinstance(value, str) else b"x") * len(value)
    if isinstance(value, (list, tuple)) and any(not isinstance(item, (int, float)) for item in value):
        made = [_each(item, change) for item in value]
    else:
        made = change(torch.from_numpy(host_array("value", value))).tolist()
    return tuple(made) if isinstance(value, tuple) else made
