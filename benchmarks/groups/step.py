"""Whole training steps of a small model: loader, collator, adapter, copy, forward, backward; rows as long as those of
instruction data. Each way trains on the same rows, and its loss over all their labels must be ours.

`--device cuda` (or npu) runs them on a card. Tokens are the real ones; memory is what a pass adds at its peak.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks import peers
from benchmarks.inputs import IGNORED
from benchmarks.peers import rival
from benchmarks.timing import Case, Work, size_of
from collate_npu import PaddingCollator, adapt
from collate_npu.testing import tiny_model

DEVICE = os.environ.get("COLLATE_NPU_BENCH_DEVICE", "cpu")
ON_CARD = DEVICE != "cpu"
VOCABULARY = 512
SIZES = {(8, 1024): 2, (4, 4096): 1, (4, 128): 4}
"""Rows of a batch and the longest of them, and how many batches a pass has."""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {}, "llama": {}, "mistral": {"sliding_window": 4096}, "mistral-window-512": {"sliding_window": 512},
    "qwen3_moe": {}, "qwen3_5_text": {},
}  # fmt: skip
"""What differs from the tiny model of the family. 4,096 is the window of Mistral 7B, and long rows pass one of 512."""
CLOSE = 1e-3
Sample = dict[str, Any]
Collating = Callable[[Any], Work]
"""A model to its collator."""


@dataclass(frozen=True)
class Pass:
    """What a pass over all rows gave and took."""

    loss: float
    """Summed over labels."""
    nbytes: int
    """Of the batches, as they leave the collator."""
    facts: dict[str, float]


def cases(quick: bool) -> Iterator[Case]:
    for family in FAMILIES:
        for (rows, width), batches in ({(4, 128): 2} if quick else SIZES).items():
            yield case(family, rows, width, batches)


def case(family: str, rows: int, width: int, batches: int) -> Case:
    samples = instruction_rows(rows, width, batches)
    in_order = sorted(samples, key=lambda sample: len(sample["input_ids"]))

    def way(name: str, collating: Collating, given: Sequence[Sample] = samples, **how: Any) -> Any:
        return rival(name, lambda: steps_of(family, collating, given, rows, **how), agrees=_same_loss)

    rivals = [
        way("ours, adapted, padded left", lambda _: peers.seq2seq("left"), adapted=True),
        *([way("ours, adapted, rows sorted by length", padded, in_order, adapted=True)] if batches > 1 else []),
        way("ours, adapted, packed rows", partial(packed, width=width), together=True, adapted=True),
        way("ours, adapted, one flat row", flat, flat_row=True, adapted=True),
        way("transformers Seq2Seq", lambda _: peers.seq2seq("right")),
        way("transformers Seq2Seq, left", lambda _: peers.seq2seq("left")),
    ]
    if family in ("qwen3_next", "llama"):
        rivals += [way("TRL", lambda _: peers.trl()), way("ms-swift template", lambda _: peers.swift("right"))]
    return Case("step", f"{family} {rows}x{width}, {DEVICE}", way("ours, adapted", padded, adapted=True), rivals)


def instruction_rows(rows: int, width: int, batches: int) -> list[Sample]:
    """Lengths are log-normal around a quarter of the width, one row of each batch has all of it; a third is the prompt."""
    draw = np.random.default_rng(rows * width)
    samples = []
    for n in range(rows * batches):
        drawn = int(width / 4 * np.exp(draw.normal(0, 0.7)))
        length = width if n % rows == rows // 2 else min(max(drawn, 16), width)
        ids = draw.integers(1, VOCABULARY - 1, length)
        labels = np.where(np.arange(length) < length // 3, IGNORED, ids)
        samples.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return samples


def padded(_: Any) -> Work:
    return peers.seq2seq("right")


def flat(model: Any) -> Work:
    return PaddingCollator(model=model, padding_free=True)


def packed(model: Any, *, width: int) -> Work:
    """Rows of the widest, each of as many samples as fit."""
    return PaddingCollator(peers.tokenizer("right"), model=model, packing=True, max_length=width)


def steps_of(
    family: str, collating: Collating, samples: Sequence[Sample], rows: int, *, adapted: bool = False,
    flat_row: bool = False, together: bool = False,
) -> Work:  # fmt: skip
    """A pass over the rows, `together` in one batch; the first one measures what it takes, behind a step that nobody
    counts."""
    model = tiny_model(family.partition("-")[0], vocab_size=VOCABULARY, attn_implementation=_attention(flat_row))
    for name, value in FAMILIES[family].items():
        setattr(model.config, name, value)
    model = model.to(DEVICE)
    if adapted:
        adapt(model)
    collate, together = collating(model), together and len(samples) > rows
    loader = DataLoader(samples, batch_size=len(samples) if together else rows, collate_fn=collate)  # type: ignore[arg-type]
    _step(model, next(iter(loader)))
    taken: dict[str, float] = {}

    def work(_: Any) -> Pass:
        if taken:
            return _pass(model, loader, {})
        taken["tokens"] = sum(len(sample["input_ids"]) for sample in samples)
        taken["padding"] = 1 - taken["tokens"] / sum(batch["input_ids"].numel() for batch in loader)
        before = _peak_begins()
        done = _pass(model, loader, taken)
        taken["peak"] = _peak() - before
        return done

    return work


def _pass(model: Any, loader: Any, facts: dict[str, float]) -> Pass:
    """On a card its own clock tells the device's share, from the first copy to the last gradient."""
    events = [torch.get_device_module(DEVICE).Event(enable_timing=True) for _ in range(2 * ON_CARD)]
    loss, made = 0.0, 0
    for event in events[:1]:
        event.record()
    for batch in loader:
        loss, made = loss + _step(model, batch), made + size_of(batch)
    for event in events[1:]:
        event.record()
        event.synchronize()
        facts["on the device"] = events[0].elapsed_time(event) / 1e3
    return Pass(float(loss), made, facts)


def _step(model: Any, batch: dict[str, Any]) -> Any:
    """The loss times labels, left on the device."""
    labels = batch["labels"][:, 1:] != IGNORED
    inputs = {key: x.to(DEVICE, non_blocking=True) if isinstance(x, Tensor) else x for key, x in batch.items()}
    loss = model(**{"use_cache": False, **inputs}).loss
    loss.backward()
    model.zero_grad()
    return loss.detach() * int(labels.sum())


def _attention(flat_row: bool) -> str:
    """What reads the offsets of a flat row on a card, where it is installed."""
    return "flash_attention_2" if flat_row and ON_CARD and _installed("flash_attn") else "sdpa"


def _installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def _same_loss(ours: Pass, theirs: Pass) -> None:
    assert abs(ours.loss - theirs.loss) <= CLOSE * abs(ours.loss), f"the loss differs: {ours.loss} and {theirs.loss}"


# --- memory: of the card as torch counts it, of the host as Linux does


def _peak_begins() -> float:
    if ON_CARD:
        module = torch.get_device_module(DEVICE)
        module.reset_peak_memory_stats()
        return float(module.memory_allocated())
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again (proc(5))
    return _status("VmRSS")


def _peak() -> float:
    return float(torch.get_device_module(DEVICE).max_memory_allocated()) if ON_CARD else _status("VmHWM")


def _status(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024.0 * int(found[1])
