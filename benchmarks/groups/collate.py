"""Collators: lists, arrays and tensors of ids and labels to one batch.

Ours is the neutral form: positions and both masks too, which no peer makes. Floors: `struct.pack_into` of the same
lists, `np.copyto` of the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks import agreement, peers
from benchmarks.inputs import Kind, columns_of, copies, rows_of
from benchmarks.peers import rival
from benchmarks.timing import Case, Contestant, Fresh, Work
from collate_npu import PaddingCollator

SIZES = ((4, 512), (32, 512), (8, 4096), (32, 4096), (4, 32768), (64, 32768))
QUICK = ((4, 512), (8, 4096))
LEFT = ((4, 512), (32, 4096))
FLAT = ((4, 512), (32, 4096))
KINDS: tuple[Kind, ...] = ("lists", "numpy", "torch")
TARGETS: dict[tuple[Kind, int, int], tuple[float, float]] = {
    ("lists", 4, 512): (15, 7),
    ("lists", 32, 4096): (33, 12),
    ("numpy", 32, 4096): (200, 3),
    ("torch", 32, 4096): (150, 3),
}
"""Times faster than transformers' Seq2Seq and than TRL, padded right."""


def cases(quick: bool) -> Iterator[Case]:
    for rows, width in QUICK if quick else SIZES:
        for kind in KINDS:
            yield padded(kind, rows, width, "right")
    for rows, width in () if quick else LEFT:
        for kind in KINDS:
            yield padded(kind, rows, width, "left")
    for rows, width in QUICK[:1] if quick else FLAT:
        yield columns(rows, width)
        yield padding_free("lists", rows, width)


def padded(kind: Kind, rows: int, width: int, side: str) -> Case:
    features = rows_of(kind, rows, width)
    whole, ids = partial(copies, features), partial(copies, features, "input_ids")
    target, target_trl = TARGETS.get((kind, rows, width), (None, None)) if side == "right" else (None, None)
    given = {"fresh": whole, "agrees": agreement.same_batch}
    alone = {"fresh": ids, "agrees": agreement.same_ids}
    rivals = [
        rival("transformers Seq2Seq", lambda: peers.seq2seq(side), **given, target=target),
        rival("transformers WithPadding, ids alone", lambda: peers.with_padding(side), **alone),
        rival("transformers LM, ids alone", lambda: peers.language_modeling(side), **alone),
        rival("ms-swift template", lambda: peers.swift(side), **given),
        rival("twinkle", lambda: peers.twinkle(side), fresh=whole, agrees=agreement.same_at_real_tokens),
    ]
    if side == "right":  # TRL pads on the right alone
        rivals.insert(3, rival("TRL", peers.trl, **given, target=target_trl))
    name = f"{kind} {rows}x{width}" + (", left" if side == "left" else "")
    # on the left the neutral form has a 4D mask, which is the group `neutral`
    collator = PaddingCollator(peers.tokenizer(side), attention_mask="2d" if side == "left" else "auto")
    return Case("collate", name, Contestant("ours", collator, whole), [*rivals, floor(kind, features)])


def padding_free(kind: Kind, rows: int, width: int) -> Case:
    """One flat row with its offsets."""
    features = rows_of(kind, rows, width)
    given: dict[str, Any] = {"fresh": partial(copies, features), "agrees": agreement.same_batch}
    rivals = [
        rival("transformers WithFlattening", peers.flattening, **given),
        rival("TRL, padding free", lambda: peers.trl(padding_free=True), **given),
    ]
    collator = PaddingCollator(peers.tokenizer("right"), padding_free=True)
    ours = Contestant("ours", collator, given["fresh"])
    return Case("collate", f"{kind} {rows}x{width}, flat row", ours, [*rivals, floor(kind, features)])


def columns(rows: int, width: int) -> Case:
    """A dict of columns of lists; the peers get its rows, which costs them next to nothing."""

    def rows_from(held: dict[str, Any]) -> list[dict[str, Any]]:
        return [dict(zip(held, row)) for row in zip(*held.values())]

    held = columns_of(rows_of("lists", rows, width))
    return whole_batch(f"columns {rows}x{width}", lambda: held, rows_from, rows, width)


def whole_batch(name: str, fresh: Fresh, rows_from: Callable[[Any], Any], rows: int, width: int) -> Case:
    """Input that is no list of samples: ours as it is, the peers with its rows, cut while the clock runs."""

    def of_rows(work: Work) -> Work:
        return lambda held: work(rows_from(held))

    given: dict[str, Any] = {"fresh": fresh, "agrees": agreement.same_batch}
    rivals = [
        rival("transformers Seq2Seq, of its rows", lambda: of_rows(peers.seq2seq("right")), **given),
        rival("TRL, of its rows", lambda: of_rows(peers.trl()), **given),
    ]
    ours = Contestant("ours", PaddingCollator(peers.tokenizer("right")), fresh)
    return Case("collate", name, ours, [*rivals, floor("numpy", rows_of("numpy", rows, width))])


def floor(kind: Kind, features: list[dict[str, Any]]) -> Contestant:
    """The tokens alone, written once into memory that is there already: no padding, masks, positions or checks."""
    columns = [row[key] for row in features for key in ("input_ids", "labels")]
    out = np.empty(sum(map(len, columns)), np.int64)
    if kind != "lists":
        whole = np.concatenate([np.asarray(column) for column in columns])
        return Contestant("np.copyto", lambda _: np.copyto(out, whole), against="floor")

    def pack(_: Any) -> None:
        start = 0
        for column in columns:
            partial(struct.pack_into, f"={len(column)}q", out, start)(*column)
            start += 8 * len(column)

    return Contestant("struct.pack_into", pack, against="floor")
