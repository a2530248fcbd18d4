"""Megatron-core's datasets and ms-swift's templates.

Legend: B rows, S width.
"""

from __future__ import annotations

import sys
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from drawing import ONE_SEQUENCE, SIDED, Draw, causal, sliding, together
from from_collators import EOS, joined, placed
from producing import BIDIRECTIONAL, CAUSAL, Producer, case, emitted, keep_2d, there
from verdicts import Case

if there("swift"):
    sys.path.append(str(Path(__file__).parents[1] / "peers"))
    import te_stub  # noqa: F401  (its stand-ins come before megatron.core is imported)

CORE = ("megatron.core",)
SWIFT = ("swift", "mcore_bridge", "megatron")


def dataset(draw: Draw, *, positions: bool, attention: bool, loss: bool = False) -> Case:
    """`_get_ltor_masks_and_position_ids` of each row, stacked: bool `[B, 1, S, S]`, True = blocked."""
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids as build

    tokens = _ended(draw)
    with patch.object(torch.cuda, "is_available", lambda: False):
        rows = [build(row, EOS, positions, attention, loss, True) for row in torch.from_numpy(tokens)]
    mask, loss_mask, place = (torch.stack(column) for column in zip(*rows))
    ids = draw.ids if attention else draw.keep.astype(np.int64)
    batch = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(np.roll(tokens, -1, 1))}
    batch |= {"attention_mask": mask, "loss_mask": loss_mask, "position_ids": place}
    features = [{"text": row.tolist()} for row in tokens]
    return emitted(draw, batch, ids=ids, features=features, polarity="masked", silent=not draw.keep.all())


def _ended(draw: Draw) -> np.ndarray:
    """The tokens with an eos behind each sequence that another one follows."""
    tokens, ids = draw.tokens.copy(), draw.ids
    tokens[:, :-1][(ids[:, 1:] != ids[:, :-1]) & (ids[:, 1:] > 0) & (ids[:, :-1] > 0)] = EOS
    return tokens


def t5(draw: Draw, *, history: bool) -> Case:
    """megatron-core's T5 masks for local kernels: rows and columns, True = blocked."""
    from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset

    tokens = torch.from_numpy(draw.tokens)
    mask = T5MaskedWordPieceDataset._build_b1ss_attention_mask(tokens, tokens, make_history_mask=history)
    attends = causal(draw.ids) if history else together(draw.ids)
    return case(draw, mask, attends=attends, pattern=CAUSAL if history else BIDIRECTIONAL, polarity="masked")


@cache
def template(padding_free: bool) -> Any:
    """ms-swift's real template, as tests/peers builds it."""
    import swift_world

    return swift_world.template(padding_free=padding_free)


def swift(draw: Draw, *, megatron: bool, flat: bool = False) -> Case:
    """`Template.data_collator`: for Megatron 4D (True = blocked) beside a 2D, for transformers a 2D."""
    made = template(flat)
    made.use_megatron, made.padding_side = megatron, "left" if draw.style == "left" else "right"
    sequences = [sequence for row in draw.sequences() for sequence in row]
    features = [{"input_ids": row, "labels": [-100, *row[1:]], "length": len(row)} for row in sequences]
    batch = made.data_collator([dict(feature) for feature in features], padding_to=None)
    batch = {key: value for key, value in batch.items() if value is not None}
    width = batch["input_ids"].shape[1]
    ids = joined(features, width) if flat else placed(list(map(len, sequences)), width, made.padding_side)
    return emitted(draw, batch, ids=ids, features=features, flat=flat, polarity="masked" if megatron else None)


def swift_rswa(draw: Draw) -> Case:
    """ms-swift's mask for OCR: a causal prefix that all see, then a window over the answer (templates/deepseek.py:486)."""
    from swift.template.templates import deepseek

    owner = next(found for found in vars(deepseek).values() if hasattr(found, "_build_rswa_attention_mask"))
    size = int(draw.rng.integers(1, draw.shape[1] + 1))
    cut = int(draw.rng.integers(0, draw.shape[1]))
    labels = torch.from_numpy(draw.tokens).masked_fill(torch.arange(draw.shape[1]) < cut, -100)
    mask = owner._build_rswa_attention_mask(labels, keep_2d(draw), size, torch.float32)
    attends = sliding(draw.ids, size) | causal(draw.ids) & (np.arange(draw.shape[1]) < cut)
    attends[:, :cut] = causal(draw.ids)[:, :cut]
    plain = bool((attends == causal(draw.ids)).all())
    return case(draw, mask, attends=attends, pattern=CAUSAL if plain else None, polarity="bias")


PRODUCERS = [
    Producer("mcore GPTDataset, reset both", CORE, partial(dataset, positions=True, attention=True), ("none", "packed")),
    Producer(
        "mcore GPTDataset, reset attention",
        CORE,
        partial(dataset, positions=False, attention=True, loss=True),
        ("none", "packed"),
    ),
    Producer(
        "mcore GPTDataset, reset positions",
        CORE,
        partial(dataset, positions=True, attention=False),
        ("none", "packed"),
        ("positions against mask",),
        "The mask is a whole triangle and Megatron attends it all, although positions restart.",
    ),
    Producer(
        "mcore GPTDataset, plain",
        CORE,
        partial(dataset, positions=False, attention=False),
        ("none", "right", "left"),
        ("says nothing",),
        "Megatron's dataset has no word of padding: its loss_mask alone leaves it out.",
    ),
    Producer("mcore T5 encoder", CORE, partial(t5, history=False), ONE_SEQUENCE, ("either polarity",)),
    Producer("mcore T5 decoder", CORE, partial(t5, history=True), ONE_SEQUENCE),
    Producer("swift template, Megatron", SWIFT, partial(swift, megatron=True), ("none", "right")),
    Producer("swift template, transformers", SWIFT, partial(swift, megatron=False), SIDED),
    Producer("swift template, Megatron, padding free", SWIFT, partial(swift, megatron=True, flat=True), ("none", "packed")),
    Producer("swift template, padding free", SWIFT, partial(swift, megatron=False, flat=True), ("none", "packed")),
    Producer("swift R-SWA", SWIFT, swift_rswa, ONE_SEQUENCE, note="one row each, `labels` say where the answer begins"),
]
