"""Wrong calls made from right ones: every argument dropped, shifted, turned or replaced in every way that came to mind.

A mutation is a name and the changed arguments. Some change nothing that counts (a uint8 mask, mode 2 for mode 3); which
ones do is for the reference operator to say, never for this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from npu_batches import HEADS, KEY_HEADS, PADDED
from torch import Tensor

from collate_npu import Pattern, Segments, dense
from collate_npu.kernels.fusion_attention import prefix_triangle, triangle
from collate_npu.kernels.fusion_attention.geometry import UNLIMITED

Kwargs = dict[str, Any]
LISTS = ("actual_seq_qlen", "actual_seq_kvlen")


def mutations(kwargs: Kwargs, batch: Segments) -> Iterator[tuple[str, Kwargs]]:
    """Each with one thing changed."""
    for name in kwargs:
        if name != "input_layout":
            yield f"without {name}", {key: value for key, value in kwargs.items() if key != name}
    for change in (_modes, _tokens, _masks, _prefixes, _lists, _others):
        for name, changed in change(kwargs, batch):
            yield name, kwargs | changed


def _modes(kwargs: Kwargs, batch: Segments) -> Iterator[tuple[str, Kwargs]]:
    for mode in range(-1, 10):
        if mode != kwargs.get("sparse_mode", 0):
            yield f"sparse_mode {mode}", {"sparse_mode": mode}


def _tokens(kwargs: Kwargs, batch: Segments) -> Iterator[tuple[str, Kwargs]]:
    for name in ("pre_tockens", "next_tockens"):
        now = kwargs.get(name, UNLIMITED)
        for value in sorted({now - 1, now + 1, -now, 0, 1, -1, 2, batch.shape[1], UNLIMITED} - {now}):
            yield f"{name} {value}", {name: value}


def _masks(kwargs: Kwargs, batch: Segments) -> Iterator[tuple[str, Kwargs]]:
    S = batch.shape[1]
    foreign: dict[str, Tensor | None] = {
        "None": None,
        "[B, S]": ~batch.keep,
        "keep [B, S]": batch.keep,
        "[B, 1, 1, S]": ~batch.keep[:, None, None],
        "triangle": triangle(),
        "prefix triangle": prefix_triangle(),
        "shared causal": torch.ones(S, S, dtype=torch.bool).triu(1),
        "shared causal 4-D": torch.ones(1, 1, S, S, dtype=torch.bool).triu(1),
        "longest causal": torch.ones(batch.max_length, batch.max_length, dtype=torch.bool).triu(1),
        "nothing blocked": torch.zeros(1, 1, S, S, dtype=torch.bool),
    }
    for pattern in (
        Pattern.of("causal"),
        Pattern.of("bidirectional"),
        Pattern.sliding(2),
        Pattern.chunked(2),
        Pattern.prefix(2),
    ):
        foreign[f"dense {pattern}"] = dense(batch, polarity="masked", pattern=pattern)
        foreign[f"keep {pattern}"] = dense(batch, pattern=pattern)
    for name, mask in foreign.items():
        yield f"mask {name}", {"atten_mask": mask}
        yield f"mask {name}, mode 1", {"atten_mask": mask, "sparse_mode": 1}
    if (mask := kwargs.get("atten_mask")) is not None:
        headed = len(mask) > S or (mask.ndim == 4 and mask.shape[1] > 1)  # a compressed mask has no heads, and is large
        turns = TURNS if headed else TURNS | HEADED
        yield from ((f"mask {name}", {"atten_mask": make(mask)}) for name, make in turns.items())
        yield from _cells(mask)


TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "inverted": lambda m: ~m,
    "transposed": lambda m: m.transpose(-1, -2).contiguous(),
    "inverted and transposed": lambda m: ~m.transpose(-1, -2).contiguous(),
    "rolled down": lambda m: m.roll(1, -2),
    "rolled right": lambda m: m.roll(1, -1),
    "rolled left": lambda m: m.roll(-1, -1),
    "rolled over rows": lambda m: m.roll(1, 0),
    "flipped over rows": lambda m: m.flip(0),
    "first row for all": lambda m: m[:1].repeat(m.shape[0], *[1] * (m.ndim - 1)),
    "cropped queries": lambda m: m[..., :-1, :].contiguous(),
    "cropped keys": lambda m: m[..., :-1].contiguous(),
    "one key more": lambda m: torch.cat([m, m[..., -1:]], -1),
    "all False": lambda m: m & False,
    "all True": lambda m: m | True,
    "diagonal blocked": lambda m: m | torch.eye(*m.shape[-2:], dtype=torch.bool),
    "float": lambda m: m.float(),
    "bias": lambda m: m.float() * -1e4,
    "int64": lambda m: m.long(),
    "uint8": lambda m: m.to(torch.uint8),
    "uint8 255": lambda m: m.to(torch.uint8) * 255,
    "strided": lambda m: m.transpose(-1, -2).contiguous().transpose(-1, -2),
    "rank 3": lambda m: m.flatten(0, -3) if m.ndim == 4 else m[None],
    "rank 2": lambda m: m[0, 0] if m.ndim == 4 else m,
    "rank 4": lambda m: m if m.ndim == 4 else m[None, None],
    "rank 0": lambda m: m.any(),
}
HEADED: dict[str, Callable[[Tensor], Tensor]] = {
    "all heads": lambda m: m.repeat(1, HEADS, 1, 1),
    "key heads": lambda m: m.repeat(1, KEY_HEADS, 1, 1),
    "last head inverted": lambda m: torch.cat([m.repeat(1, HEADS - 1, 1, 1), ~m.reshape(-1, 1, *m.shape[-2:])], 1),
}


def _cells(mask: Tensor) -> Iterator[tuple[str, Kwargs]]:
    """One score flipped, at places spread over the small masks; at the corners of the compressed ones."""
    step = max(1, mask.numel() // 8)
    for at in range(0, mask.numel(), step + 1):
        changed = mask.clone()
        changed.view(-1)[at] ^= True
        yield f"mask, score {at} flipped", {"atten_mask": changed}


def _prefixes(kwargs: Kwargs, batch: Segments) -> Iterator[tuple[str, Kwargs]]:
    count = len(kwargs["prefix"]) if "prefix" in kwargs else batch.shape[0]
    for n in (0, 2, batch.shape[1], -1):
        yield f"prefix {n} for all", {"prefix": [n] * count}
        yield f"prefix {n}, mode 6", {"prefix": [n] * count, "sparse_mode": 6, "atten_mask": prefix_triangle()}
    if "prefix" in kwargs:
        yield from ((f"prefix {name}", {"prefix": changed}) for name, changed in changed_lists(kwargs["prefix"]))


def _lists(kwargs: Kwargs, batch: Segments) -> Iterator[tuple[str, Kwargs]]:
    if "actual_seq_qlen" not in kwargs:
        ends = list(batch.cu_seqlens_host[1:])
        yield "lists outside TND", dict.fromkeys(LISTS, ends)
        yield "TND by its name", {"input_layout": "TND"}
        yield "TND", {"input_layout": "TND", **dict.fromkeys(LISTS, ends)}
        return
    ends = [int(n) for n in kwargs["actual_seq_qlen"]]
    for name, changed in changed_lists(ends):
        yield f"lists {name}", dict.fromkeys(LISTS, changed)
        yield from ((f"{which} {name}", {which: changed}) for which in LISTS)
    yield "a leading 0 and prefix", {name: [0, *ends] for name in LISTS} | {"prefix": [0, *kwargs.get("prefix", ends)]}
    for layout in PADDED:
        yield f"layout {layout}", {"input_layout": layout}
        yield f"layout {layout}, no lists", {"input_layout": layout, **dict.fromkeys(LISTS)}


def changed_lists(values: list[int]) -> Iterator[tuple[str, Any]]:
    lengths = [b - a for a, b in zip([0, *values], values)]
    yield "with a leading 0", [0, *values]
    yield "with trailing zeros", [*values, 0, 0]
    yield "with the last one twice", [*values, values[-1]]
    yield "with one more", [*values, values[-1] + 1]
    yield "without the last", values[:-1]
    yield "without the first", values[1:]
    yield "reversed", values[::-1]
    yield "as lengths", lengths
    yield "as a tensor", torch.tensor(values)
    yield "as floats", [float(n) + 0.5 for n in values]
    yield "as float tensor", torch.tensor(values, dtype=torch.float32)
    yield "of zeros", [0] * len(values)
    yield "empty", []
    yield "a number", sum(values)
    for i, value in enumerate(values):
        for other in (value - 1, value + 1):
            yield f"[{i}] {other}", [*values[:i], other, *values[i + 1 :]]
        yield f"without [{i}]", values[:i] + values[i + 1 :]
        yield f"[{i}] split", [*values[:i], value - 1, *values[i:]]
    if len(values) > 1:
        yield "first two exchanged", [values[1], values[0], *values[2:]]


def _others(kwargs: Kwargs, batch: Segments) -> Iterator[tuple[str, Kwargs]]:
    for precise in (0, 1, 2):
        yield f"inner_precise {precise}", {"inner_precise": precise}
    yield "padding_mask", {"padding_mask": ~batch.keep}
    yield "pse", {"pse": torch.zeros(1)}
    yield "keep_prob 0", {"keep_prob": 0.0}
    yield "a name of v2", {"pre_tokens": 1}
    yield "no layout", {"input_layout": None}
    if kwargs["input_layout"] in PADDED:
        yield from ((f"layout {layout}", {"input_layout": layout}) for layout in PADDED)
