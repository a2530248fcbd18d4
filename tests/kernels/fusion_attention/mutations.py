"""Wrong calls made from right ones: every argument dropped, shifted, turned or replaced in every way that came to mind.

A mutation is a name and the changed arguments. Some change nothing that counts (a uint8 mask, mode 2 for mode 3); which
ones do is for the reference operator to say, never for this file.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from npu_batches import HEADS, KEY_HEADS, PADDED
from torch import Tensor

from collate_npu import Pattern, Segments
from collate_npu.kernels.fusion_attention import prefix_triangle, triangle
from collate_npu.kernels.fusion_attention.contract import UNLIMITED
from collate_npu.masks import dense

Kwargs = dict[str, Any]
LISTS = ("actual_seq_qlen", "actual_seq_kvlen")


def mutations(kwargs: Kwargs, batch: Segments) -> Iterator[tuple[str, Kwargs]]:
    """Each with one thing changed."""
    for name in kwargs:
        if name != "input_layout":
            yield f"without {name}", {key: value for key, value in kwargs.items() if key != name}
    for change in (_plain, _masks, _prefixes, _lists):
        for name, changed in change(kwargs, batch):
            yield name, kwargs | changed


def _plain(kwargs: Kwargs, batch: Segments) -> Iterator[tuple[str, Kwargs]]:
    """One argument, another value. What the card alone refuses is not among them."""
    values: dict[str, Any] = {
        "sparse_mode": set(range(-1, 10)) - {kwargs.get("sparse_mode", 0)},
        "inner_precise": (0, 1, 2),
        "padding_mask": (~batch.keep,),
        "pse": (torch.zeros(1),),
        "scale": (0.0, -1.0, float("nan")),
        "input_layout": (None, *(PADDED if kwargs["input_layout"] in PADDED else ())),
    }
    for name in ("pre_tockens", "next_tockens"):
        now = kwargs.get(name, UNLIMITED)
        values[name] = sorted({now - 1, now + 1, -now, 0, 1, -1, 2, batch.shape[1], UNLIMITED} - {now})
    yield from ((f"{name} {i}", {name: value}) for name, among in values.items() for i, value in enumerate(among))


def _masks(kwargs: Kwargs, batch: Segments) -> Iterator[tuple[str, Kwargs]]:
    S = batch.shape[1]
    causal = torch.ones(S, S, dtype=torch.bool).triu(1)
    foreign: dict[str, Tensor | None] = {
        "None": None,
        "[B, S]": ~batch.keep,
        "keep [B, S]": batch.keep,
        "[B, 1, 1, S]": ~batch.keep[:, None, None],
        "triangle": triangle(),
        "prefix triangle": prefix_triangle(),
        "shared causal": causal,
        "shared causal 4-D": causal[None, None],
        "longest causal": causal[: batch.max_length, : batch.max_length].contiguous(),
        "nothing blocked": torch.zeros(1, 1, S, S, dtype=torch.bool),
    }
    bands = (Pattern.sliding(2), Pattern.chunked(2), Pattern.prefix(2))
    for pattern in (Pattern.of("causal"), Pattern.of("bidirectional"), *bands):
        foreign[f"dense {pattern}"] = dense(batch, polarity="masked", pattern=pattern)
        foreign[f"keep {pattern}"] = dense(batch, pattern=pattern)
    for name, mask in foreign.items():
        yield f"mask {name}", {"atten_mask": mask}
        yield f"mask {name}, mode 1", {"atten_mask": mask, "sparse_mode": 1}
    if (mask := kwargs.get("atten_mask")) is not None:
        headed = len(mask) > S or (mask.ndim == 4 and mask.shape[1] > 1)  # a compressed mask has no heads, and is large
        turns = TURNS if headed else TURNS | HEADED
        yield from ((f"mask {name}", {"atten_mask": make(mask)}) for name, make in turns.items())
        for at in range(0, mask.numel(), max(1, mask.numel() // 8) + 1):
            changed = mask.clone(memory_format=torch.contiguous_format)
            changed.view(-1)[at] ^= True
            yield f"mask, score {at} flipped", {"atten_mask": changed}


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


def _prefixes(kwargs: Kwargs, batch: Segments) -> Iterator[tuple[str, Kwargs]]:
    given = kwargs["prefix"] if is_list(kwargs.get("prefix")) else []
    for n in (0, 2, batch.shape[1], -1):
        prefix = {"prefix": [n] * (len(given) or batch.shape[0])}
        yield f"prefix {n} for all", prefix
        yield f"prefix {n}, mode 6", prefix | {"sparse_mode": 6, "atten_mask": prefix_triangle()}
    yield from ((f"prefix {name}", {"prefix": changed}) for name, changed in changed_lists(given))


def _lists(kwargs: Kwargs, batch: Segments) -> Iterator[tuple[str, Kwargs]]:
    ends = kwargs.get("actual_seq_qlen")
    if ends is None:
        lists = dict.fromkeys(LISTS, batch.cu_seqlens_host[1:])
        yield "lists outside TND", lists
        yield "TND by its name", {"input_layout": "TND"}
        yield "TND", {"input_layout": "TND", **lists}
    elif is_list(ends):  # not changed before
        for name, changed in changed_lists(ends):
            yield f"lists {name}", dict.fromkeys(LISTS, changed)
            yield from ((f"{which} {name}", {which: changed}) for which in LISTS)
        yield "a leading 0 and prefix", {name: [0, *ends] for name in (*LISTS, "prefix")}
        for layout in PADDED:
            yield f"layout {layout}", {"input_layout": layout}
            yield f"layout {layout}, no lists", {"input_layout": layout, **dict.fromkeys(LISTS)}


def is_list(values: Any) -> bool:
    """Whole numbers, as the library gives them: not one of the changes below."""
    return isinstance(values, (list, tuple)) and bool(values) and all(type(n) is int for n in values)


def changed_lists(values: list[int]) -> Iterator[tuple[str, Any]]:
    if not values:
        return
    last = values[-1]
    changed: list[Any] = [
        *([0, *values], [*values, 0, 0], [*values, last], [*values, last + 1], values[:-1], values[1:], values[::-1]),
        *([b - a for a, b in zip([0, *values], values)], [0] * len(values), [], sum(values)),
        *(torch.tensor(values), [float(n) + 0.5 for n in values], torch.tensor(values, dtype=torch.float32)),
        *([[values[1], values[0], *values[2:]]] if len(values) > 1 else []),
    ]
    for i, value in enumerate(values):
        before, after = values[:i], values[i + 1 :]
        changed += [[*before, other, *after] for other in (value - 1, value + 1)]
        changed += [before + after, [*before, value - 1, *values[i:]]]
    yield from ((f"changed to {each}", each) for each in changed)
