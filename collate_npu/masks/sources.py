"""Sources: a batch as the house reads it: its keys by role, and each value on the host once, however many ask for it.

The door, offsets, positions, hazards, consumers, collators and proof hand this record on, and none of them reads the batch
again. Legend: B batch, S width, H heads, Q/K query and key rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from torch import Tensor

from collate_npu.arrays import Array, as_offsets, entries, host_array, host_tensor, length_rows, once
from collate_npu.errors import CollateError, explain
from collate_npu.keys import KEYS, Role
from collate_npu.masks.forms import MAX_MASK_BYTES, check_bytes

Named = Role | Literal["positions", "vision"]

_ORDER = {name: n for n, name in enumerate(KEYS)}
_ROLES: dict[str, Any] = {
    name: key.role or key.kind for name, key in KEYS.items() if key.role or key.kind in ("positions", "vision")
}
_NO_SEQUENCE = -1000
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
            raise CollateError(explain("batch", f"a {type(batch).__name__}", rule, remedy))
        super().__init__(entries(batch))
        self.named: defaultdict[Named, tuple[str, ...]] = defaultdict(tuple)
        """The keys of each role that hold something, in the order of the table."""
        self._held: dict[tuple[str, Any], tuple[Any, Any]] = {}
        self.counted = False
        """Are its positions those that follow from its Segments? The door says so, or the collator that made them."""
        listed = [name for name, value in self.items() if value is not None and name in _ROLES]
        for name in sorted(listed, key=_ORDER.__getitem__):
            self.named[_ROLES[name]] += (name,)

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Sources:
        """The record of a batch; a record as it is."""
        return batch if isinstance(batch, cls) else cls(batch)

    def __or__(self, changed: Mapping[str, Any]) -> Sources:  # type: ignore[override]
        made = Sources({**self, **changed})
        made._held, made.counted = self._held, self.counted
        return made

    def array(self, name: str) -> Array:
        """A value as a numpy array."""
        found: Array = self._once(name, host_array)
        return found

    def _once(self, name: str, convert: Callable[[str, Any], Any]) -> Any:
        value, held = self[name], self._held.get((name, convert))
        if held is None or held[0] is not value:
            held = self._held[name, convert] = (value, convert(name, value))
        return held[1]

    @once
    def masks(self) -> Mapping[str, Tensor]:
        """`attention_mask`, or each mask of a mapping by kind of layer."""
        return {name: full for key in self.named["mask"] for name, full in self._once(key, _masks).items()}

    @once
    def offsets(self) -> Mapping[str, Array]:
        """Offsets of a flat row, physical and real ones, those of Megatron's `packed_seq_params` among them, and of NeMo
        RL's `flash_attn_kwargs` (nemo_rl/models/automodel/train.py:125, 7ea279a)."""
        told: dict[str, Array] = {}
        for held in ("packed_seq_params", "flash_attn_kwargs"):
            params = self.get(held)
            for name in KEYS if params is not None else ():
                value = params.get(name) if isinstance(params, Mapping) else getattr(params, name, None)
                if KEYS[name].role in _OFFSETS and value is not None:
                    told[f"{held}.{name}"] = as_offsets(f"{held}.{name}", value)
        for role in _OFFSETS:
            told |= {name: as_offsets(name, self.array(name)) for name in self.named[role]}
        return told

    @once
    def lengths(self) -> list[list[int]] | None:
        """`seq_lens`, as one list of lengths for each row; a flat list is of one row, or one length for each row.
        -1000 fills rows of fewer sequences (NeMo Automodel 0.7.0 datasets/utils.py)."""
        return self._listed("lengths")

    @once
    def padded_lengths(self) -> list[list[int]] | None:
        """What each of them takes up in its row, likewise."""
        return self._listed("padded_lengths")

    def _listed(self, role: Role) -> list[list[int]] | None:
        if not self.named[role]:
            return None
        held = self[name := self.named[role][0]]
        rows = held if isinstance(held, (list, tuple)) else np.atleast_1d(self.array(name))
        return length_rows(rows, name, filler=_NO_SEQUENCE)

    def text_positions(self, shape: tuple[int, int]) -> Array | None:
        """`[B, S]`: `text_position_ids`, two-dimensional `position_ids`, or the text row of `[4, B, S]`; else None."""
        found = None
        for key in self.named["positions"]:
            positions = self.array(key)
            if positions.ndim not in (2, 3) or positions.shape[-2:] not in (shape, (1, shape[1])):
                raise misfit(key, str(list(positions.shape)), shape)
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
            raise CollateError(explain("batch", f"keys {', '.join(map(str, self))}", rule, "Collate the tokens too."))
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


def misfit(name: str, got: str, shape: tuple[int, int]) -> CollateError:
    """What has other rows or another width than the tokens."""
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
    device = block_mask.kv_num_blocks.device
    evaluated: Tensor = create_mask(block_mask.mask_mod, B, H, Q, K, device=str(device)).cpu()
    return evaluated
