"""Wrong calls made from right ones: each argument dropped, shifted, spelled otherwise or taken from elsewhere.

Some changes are harmless (other numbers, int32 for int64); which ones is for the readings to say, never for this file.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collate_npu.kernels.gated_delta import chunk_indices

Kwargs = dict[str, Any]
ROWS = ("cu_seqlens", "cu_seqlens_cpu", "cu_seq_lens_q", "query_start_loc", "actual_seq_lengths")
FIELDS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


def mutations(kwargs: Kwargs, draw: random.Random, T: int, chunk: int, others: list[Kwargs]) -> Iterator[tuple[str, Kwargs]]:
    """A name, and the arguments with one thing changed."""
    for name in kwargs:
        yield f"without {name}", {key: value for key, value in kwargs.items() if key != name}
    yield "without all", {}
    rows = [name for name in (*ROWS, *FIELDS) if name in kwargs]
    if rows:
        for what, changed in changed_rows([int(n) for n in kwargs[rows[0]]], draw):
            new = {name: _like(kwargs[name], changed) for name in rows}
            yield f"rows {what}", kwargs | new
            yield f"{rows[-1]} {what}", kwargs | {rows[-1]: new[rows[-1]]}
            yield f"rows {what} with tables", kwargs | new | _tables(kwargs, changed, chunk)
        for what, hold in HOLDERS.items():
            yield f"{rows[0]} as {what}", kwargs | {rows[0]: hold([int(n) for n in kwargs[rows[0]]])}
    yield from _table_changes(kwargs, draw, chunk)
    if "seq_idx" in kwargs:
        yield from ((f"seq_idx {what}", kwargs | {"seq_idx": make(kwargs["seq_idx"])}) for what, make in NUMBERS.items())
        yield "seq_idx one changed", kwargs | {"seq_idx": _one_changed(kwargs["seq_idx"], draw)}
    if "attention_mask" in kwargs:
        yield from ((f"mask {what}", {"attention_mask": make(kwargs["attention_mask"])}) for what, make in MASKS.items())
        yield "mask one changed", {"attention_mask": _one_flipped(kwargs["attention_mask"], draw)}
    for i, other in enumerate(others):
        yield f"of another call {i}", other
        yield f"with another's {i}", kwargs | other
    yield from _foreign(kwargs, T)


def changed_rows(row: list[int], draw: random.Random) -> Iterator[tuple[str, list[int]]]:
    lengths = [b - a for a, b in pairwise(row)]
    yield "as lengths", lengths
    yield "as ends", row[1:]
    yield "as first entry and lengths", [0, *lengths]
    yield "as offsets of them", [0, *np.cumsum(row).tolist()]
    yield "sums", np.cumsum(row).tolist()
    yield "reversed", row[::-1]
    yield "first and last", [row[0], row[-1]]
    yield "one more", [*row, row[-1] + 1]
    yield "last twice", [*row, row[-1]]
    yield "first twice", [row[0], *row]
    yield "without the last", row[:-1]
    yield "empty", []
    yield "shifted", [n + 1 for n in row]
    yield "doubled", [2 * n for n in row]
    i = draw.randrange(len(row))
    for step in (-2, -1, 1, 2):
        yield f"[{i}] {step:+}", [*row[:i], row[i] + step, *row[i + 1 :]]
    yield f"without [{i}]", row[:i] + row[i + 1 :]
    yield f"[{i}] twice", [*row[:i], row[i], *row[i:]]
    yield f"[{i}] split", [*row[:i], row[i] - 1, *row[i:]]
    if len(row) > 2:
        yield "two exchanged", [row[1], row[0], *row[2:]]
        yield "middle exchanged", [row[0], *row[1:-1][::-1], row[-1]]


HOLDERS: dict[str, Callable[[list[int]], Any]] = {
    "int32": lambda row: torch.tensor(row, dtype=torch.int32),
    "int64": lambda row: torch.tensor(row),
    "int16": lambda row: torch.tensor(row, dtype=torch.int16),
    "floats": lambda row: torch.tensor(row, dtype=torch.float32),
    "a list": list,
    "a tuple": tuple,
    "an array": np.array,
    "a matrix": lambda row: torch.tensor([row]),
    "text": str,
    "meta": lambda row: torch.empty(len(row), dtype=torch.int64, device="meta"),
}
NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "plus 5": lambda n: n + 5,
    "negated": lambda n: -n,
    "mod 2": lambda n: n % 2,
    "mod 3": lambda n: n % 3,
    "halved": lambda n: n // 2,
    "all equal": lambda n: n * 0,
    "int64": lambda n: n.long(),
    "float": lambda n: n.float(),
    "[T]": lambda n: n[0],
    "[T, 1]": lambda n: n.T.contiguous(),
    "rolled": lambda n: n.roll(1, 1),
    "rolled left": lambda n: n.roll(-1, 1),
    "a list": lambda n: n.tolist(),
    "strided": lambda n: torch.stack([n, n], -1)[..., 0],
    "cropped": lambda n: n[:, :-1].contiguous(),
    "each its own": lambda n: torch.arange(n.numel(), dtype=torch.int32).reshape(n.shape),
}
MASKS: dict[str, Callable[[Tensor], Any]] = {
    "None": lambda m: None,
    "inverted": lambda m: 1 - m,
    "all ones": lambda m: m * 0 + 1,
    "all zeros": lambda m: m * 0,
    "bool": lambda m: m.bool(),
    "float": lambda m: m.float(),
    "bias": lambda m: (1 - m).float() * -1e9,
    "indexed": lambda m: m * 2,
    "4D": lambda m: m[:, None, None].bool(),
    "dense": lambda m: (m[:, None, :, None] * m[:, None, None] * torch.ones(m.shape[1], m.shape[1]).tril()).bool(),
    "flipped": lambda m: m.flip(1),
    "rows exchanged": lambda m: m.flip(0),
    "rolled": lambda m: m.roll(1, 1),
    "rolled left": lambda m: m.roll(-1, 1),
    "first row": lambda m: m[:1],
    "wider": lambda m: torch.cat([m, m[:, -1:]], 1),
    "a list": lambda m: m.tolist(),
    "transposed": lambda m: m.T,
}


def _one_changed(ids: Tensor, draw: random.Random) -> Tensor:
    ids = ids.clone()
    ids[0, draw.randrange(ids.shape[1])] += draw.choice((-1, 1, 7))
    return ids


def _one_flipped(keep: Tensor, draw: random.Random) -> Tensor:
    keep = keep.clone()
    b, t = draw.randrange(keep.shape[0]), draw.randrange(keep.shape[1])
    keep[b, t] = 1 - keep[b, t]
    return keep


def _like(value: Any, row: list[int]) -> Any:
    return torch.tensor(row, dtype=value.dtype) if isinstance(value, Tensor) else tuple(row)


def _tables(kwargs: Kwargs, row: list[int], chunk: int) -> Kwargs:
    """The tables that belong to a changed row, where there are any."""
    blocks = {"chunk_indices": chunk, "chunk_indices_out": 2**17 // chunk}
    try:
        made = {name: chunk_indices(row, blocks[name]) for name in blocks if name in kwargs}
    except ValueError:
        return {}
    return {name: _like(kwargs[name], table.tolist() if isinstance(kwargs[name], Tensor) else table.reshape(-1).tolist())
            for name, table in made.items()}  # fmt: skip


def _table_changes(kwargs: Kwargs, draw: random.Random, chunk: int) -> Iterator[tuple[str, Kwargs]]:
    for name in ("chunk_indices", "chunk_indices_out"):
        if name not in kwargs:
            continue
        value = kwargs[name]
        flat = [int(n) for n in (value.reshape(-1) if isinstance(value, Tensor) else value)]
        rows = [int(n) for n in kwargs["cu_seqlens"]]
        changes = {
            "cropped": flat[:-2],
            "odd": flat[:-1],
            "one more": [*flat, *flat[-2:]],
            "reversed": flat[::-1],
            "swapped": [n for pair in zip(flat[1::2], flat[::2]) for n in pair],
            "one changed": [*flat[:-1], flat[-1] + 1],
            **{f"of {block}": chunk_indices(rows, block).reshape(-1).tolist() for block in (16, 32, 64, 128, 1024, 2048)},
        }
        for what, changed in changes.items():
            if isinstance(value, Tensor):
                if len(changed) % 2 == 0:
                    yield f"{name} {what}", kwargs | {name: torch.tensor(changed, dtype=value.dtype).reshape(-1, 2)}
            else:
                yield f"{name} {what}", kwargs | {name: tuple(changed)}
        yield f"{name} a list", kwargs | {name: list(flat)}
        yield f"{name} a tensor", kwargs | {name: torch.tensor(flat)}


def _foreign(kwargs: Kwargs, T: int) -> Iterator[tuple[str, Kwargs]]:
    added: Kwargs = {
        "attention_mask": torch.ones(1, T, dtype=torch.int64),
        "attention_mask_2d": torch.ones(1, T, dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, T]),
        "cu_seqlen": torch.tensor([0, T]),
        "seq_idx": torch.zeros(1, T, dtype=torch.int32),
        "position_ids": torch.arange(T)[None],
        "segment_ids": torch.ones(1, T, dtype=torch.int32),
        "total_tokens": T + 1,
        "qkv_format": "sbhd",
    }
    yield from ((f"and {name}", kwargs | {name: value}) for name, value in added.items() if name not in kwargs)
