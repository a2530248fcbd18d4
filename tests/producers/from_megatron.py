"""Megatron-core's datasets and ms-swift's templates.

Legend: B rows, S width.
"""

import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from drawing import ONE_SEQUENCE, SIDED, Draw, causal, sliding
from from_collators import EOS, FLAT, RIGHT
from producing import case, emitted, joined, keep_2d, otherwise, placed, producer, said, side_of, there
from verdicts import Case

if there("swift"):
    sys.path.append(str(Path(__file__).parents[1] / "peers"))
    import te_stub  # noqa: F401  (its stand-ins come before megatron.core is imported)

CORE = ("megatron.core",)
SWIFT = ("swift", "mcore_bridge", "megatron")


def dataset(draw: Draw, *, positions: bool, attention: bool, loss: bool = False) -> Case:
    """`_get_ltor_masks_and_position_ids` of each row, stacked: bool `[B, 1, S, S]`, True = blocked. It has no word of
    padding: its loss_mask alone leaves it out. Without `attention` the mask is a triangle, although positions restart."""
    from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids as build

    tokens, ids = draw.tokens.copy(), draw.ids
    tokens[:, :-1][(ids[:, 1:] != ids[:, :-1]) & (ids[:, 1:] > 0) & (ids[:, :-1] > 0)] = EOS  # another sequence follows
    with patch.object(torch.cuda, "is_available", lambda: False):
        rows = [build(row, EOS, positions, attention, loss, True) for row in torch.from_numpy(tokens)]
    mask, loss_mask, place = (torch.stack(column) for column in zip(*rows))
    batch = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(np.roll(tokens, -1, 1))}
    batch |= {"attention_mask": mask, "loss_mask": loss_mask, "position_ids": place}
    told = {"features": [{"text": row.tolist()} for row in tokens], "polarity": "masked", "silent": not draw.keep.all()}
    return emitted(draw, batch, ids=ids if attention else draw.keep.astype(np.int64), **told)


def t5(draw: Draw, *, history: bool) -> Case:
    """megatron-core's T5 masks for local kernels: rows and columns, True = blocked."""
    from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset

    tokens = torch.from_numpy(draw.tokens)
    mask = T5MaskedWordPieceDataset._build_b1ss_attention_mask(tokens, tokens, make_history_mask=history)
    return case(draw, mask, told={**({} if history else said(draw, "bidirectional")), "polarity": "masked"})


@cache
def template(padding_free: bool) -> Any:
    """ms-swift's real template, as tests/peers builds it."""
    import swift_world

    return swift_world.template(padding_free=padding_free)


def swift(draw: Draw, *, megatron: bool, flat: bool = False) -> Case:
    """`Template.data_collator`: for Megatron 4D (True = blocked) beside a 2D, for transformers a 2D."""
    made = template(flat)
    made.use_megatron, made.padding_side = megatron, side_of(draw)
    rows = draw.sequences()
    features = [{"input_ids": row, "labels": [-100, *row[1:]], "length": len(row)} for row in rows]
    batch = made.data_collator([dict(feature) for feature in features], padding_to=None)
    batch = {key: value for key, value in batch.items() if value is not None}
    width = batch["input_ids"].shape[1]
    ids = joined(features, width) if flat else placed(list(map(len, rows)), width, made.padding_side)
    return emitted(draw, batch, ids=ids, features=features, flat=flat, polarity="masked" if megatron else None)


def swift_rswa(draw: Draw) -> Case:
    """ms-swift's mask for OCR: a causal prefix that all see, then a window over the answer, whose beginning `labels` say
    (templates/deepseek.py:486)."""
    from swift.template.templates import deepseek

    owner = next(found for found in vars(deepseek).values() if hasattr(found, "_build_rswa_attention_mask"))
    size, cut = draw.number(1, draw.shape[1]), draw.number(0, draw.shape[1] - 1)
    labels = torch.from_numpy(draw.tokens).masked_fill(torch.arange(draw.shape[1]) < cut, -100)
    mask = owner._build_rswa_attention_mask(labels, keep_2d(draw), size, torch.float32)
    attends = sliding(draw.ids, size) | causal(draw.ids) & (np.arange(draw.shape[1]) < cut)
    attends[:, :cut] = causal(draw.ids)[:, :cut]
    return case(draw, mask, told={**otherwise(draw, attends), "polarity": "bias"})


AGAINST = "positions against mask"
PRODUCERS = [
    producer("mcore GPTDataset, reset both", CORE, dataset, FLAT, positions=True, attention=True),
    producer("mcore GPTDataset, reset attention", CORE, dataset, FLAT, positions=False, attention=True, loss=True),
    producer("mcore GPTDataset, reset positions", CORE, dataset, FLAT, AGAINST, positions=True, attention=False),
    producer("mcore GPTDataset, plain", CORE, dataset, SIDED, "says nothing", positions=False, attention=False),
    producer("mcore T5 encoder", CORE, t5, ONE_SEQUENCE, "either polarity", history=False),
    producer("mcore T5 decoder", CORE, t5, ONE_SEQUENCE, history=True),
    producer("swift template, Megatron", SWIFT, swift, RIGHT, megatron=True),
    producer("swift template, transformers", SWIFT, swift, SIDED, megatron=False),
    producer("swift template, Megatron, padding free", SWIFT, swift, FLAT, megatron=True, flat=True),
    producer("swift template, padding free", SWIFT, swift, FLAT, megatron=False, flat=True),
    producer("swift R-SWA", SWIFT, swift_rswa, ONE_SEQUENCE),
]
