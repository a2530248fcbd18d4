"""The neutral form where a mask is needed, left padding: 8 rows to 4096 are 134 MB of bool. What a worker makes and ships.

`attention_mask="2d"` leaves the mask to the adapter. Beside it ms-swift's Megatron template, which ships its 4D mask from
each worker, and the same template with our `install()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks import agreement, peers
from benchmarks.inputs import copies, rows_of
from benchmarks.peers import rival
from benchmarks.timing import Case, Contestant, size_of
from collate_npu import PaddingCollator

OVER_FULL = 1.3


def cases(quick: bool) -> Iterator[Case]:
    rows, width = (4, 1024) if quick else (8, 4096)
    yield left(rows, width, "auto")
    yield left(rows, width, "2d")
    yield megatron(rows, width)


def left(rows: int, width: int, mode: Any) -> Case:
    fresh: Any = partial(copies, rows_of("lists", rows, width))
    whole, small = (PaddingCollator(peers.tokenizer("left"), attention_mask=name) for name in ("auto", "2d"))
    theirs = rival("transformers Seq2Seq, 2D", lambda: peers.seq2seq("left"), fresh=fresh, agrees=agreement.same_batch)
    if mode == "2d":
        with_4d = Contestant("ours, with the 4D mask", whole, fresh, agrees=agreement.same_tokens)
        return Case("neutral", f"{rows}x{width}, left, 2d", Contestant("ours", small, fresh), [with_4d, theirs])
    made = size_of(whole(fresh()))
    floor = Contestant("np.full of as many bytes", lambda _: np.full(made, True), against="floor", target=OVER_FULL)
    return Case("neutral", f"{rows}x{width}, left, 4D", Contestant("ours", whole, fresh), [floor, theirs])


def megatron(rows: int, width: int) -> Case:
    """ms-swift pads on the right for Megatron."""
    fresh: Any = partial(copies, rows_of("lists", rows, width))
    theirs = rival("ms-swift template alone", lambda: peers.swift(megatron=True), fresh=fresh, agrees=agreement.same_batch)
    ours = rival("ms-swift with install()", lambda: peers.swift(megatron=True, ours=True), fresh=fresh)
    return Case("neutral", f"{rows}x{width}, ms-swift with install()", ours, [theirs])
