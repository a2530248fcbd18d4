"""Padding invariance of vision-language models through the public API, text alone and with images, padded and flat.

Their positions have three axes. Padded, the model computes them itself from the 2D mask, and positions [B, S] beside
images move the logits by 1; flat, it needs [4, 1, T]: a text row that starts again with each sequence, then the axes.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

pytest.importorskip("transformers")
from tiny_vision import MODELS, PAD, alone, axes, sample, taken, vision_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from collate_npu import BatchAdapter, CollateError, PaddingCollator, needs_mask_2d, wrap_collator

TOLERANCE, POWER = 1e-4, 0.1
family = pytest.mark.parametrize("name", [name for name in MODELS if name in CONFIG_MAPPING])
kind_of = pytest.mark.parametrize("kind", ["text", "images"])
side_of = pytest.mark.parametrize("side", ["left", "right"])
FEATURES = {
    "text": [sample(length, seed=length, image=None) for length in (5, 12, 9)],
    "images": [sample(6, seed=1), sample(16, seed=2, image=(4, 8)), sample(9, seed=3, image=None)],
}
model_of = cache(vision_model)


@torch.no_grad()
def difference(model, batch, features, side=None):
    """To each sample alone; `side` None: one flat row."""
    logits, lengths = model(**taken(model, batch)).logits, [len(feature["input_ids"]) for feature in features]
    if side is None:
        pieces = logits[0, : sum(lengths)].split(lengths)
    else:
        width = logits.shape[1]
        starts = [width - length if side == "left" else 0 for length in lengths]
        pieces = [logits[b, start : start + length] for b, (start, length) in enumerate(zip(starts, lengths))]
    errors = [(piece - alone(model, feature)).abs().flatten() for piece, feature in zip(pieces, features)]
    return float(torch.cat(errors).nan_to_num(torch.inf).max())


def with_axes(model, features):
    return [feature | {"position_ids": axes(model, feature)} for feature in features]


def without_kinds(batch):
    """A template that computed positions itself sends no mm_token_type_ids: the model could not count them again."""
    return {key: value for key, value in batch.items() if key != "mm_token_type_ids"}


@family
@kind_of
@side_of
def test_a_padded_batch_of_the_collator(name, kind, side):
    model, features = model_of(name), FEATURES[kind]
    batch = PaddingCollator(pad_token_id=PAD, padding_side=side, model=model)(features)
    assert difference(model, batch, features, side) <= TOLERANCE


@family
@kind_of
@side_of
def test_a_padded_batch_on_the_wire_through_the_adapter(name, kind, side):
    model, features = model_of(name), FEATURES[kind]
    wire = PaddingCollator(pad_token_id=PAD, padding_side=side)(features)
    assert difference(model, BatchAdapter(model)(wire), features, side) <= TOLERANCE


@family
@side_of
def test_a_padded_batch_whose_samples_carry_their_axes(name, side):
    model, features = model_of(name), FEATURES["images"]
    batch = PaddingCollator(pad_token_id=PAD, padding_side=side, model=model)(with_axes(model, features))
    assert difference(model, without_kinds(batch), features, side) <= TOLERANCE


@family
def test_a_padded_batch_of_a_wrapped_collator(name):
    model, features = model_of(name), FEATURES["text"]
    inner = PaddingCollator(pad_token_id=PAD, padding_side="left", attention_mask="2d")
    assert difference(model, wrap_collator(inner, model=model)(features), features, "left") <= TOLERANCE


def check_flat(model, features):
    """Recurrent layers of a flat row need kernels that read offsets, which a CPU has not: those must be refused."""
    if needs_mask_2d(model):  # by a CollateError, or by transformers for want of kernels
        with pytest.raises(ValueError, match=r"apart|flat|kernels|recurrent"):
            difference(model, PaddingCollator(pad_token_id=PAD, padding_free=True, model=model)(features), features)
        return
    batch = PaddingCollator(pad_token_id=PAD, padding_free=True, model=model)(features)
    assert difference(model, batch, features) <= TOLERANCE
    wire = PaddingCollator(pad_token_id=PAD, padding_free=True)(features)
    assert difference(model, BatchAdapter(model, padding_free=True)(wire), features) <= TOLERANCE


@family
def test_a_flat_row_of_text(name):
    check_flat(model_of(name), FEATURES["text"])


@family
def test_a_flat_row_of_samples_that_carry_their_axes(name):
    model = model_of(name)
    check_flat(model, with_axes(model, FEATURES["images"]))


@family
def test_a_flat_row_with_images_and_no_positions_is_refused(name):
    model, features = model_of(name), FEATURES["images"]
    with pytest.raises(CollateError, match=r"recurrent|flat" if needs_mask_2d(model) else "position_ids"):
        PaddingCollator(pad_token_id=PAD, padding_free=True, model=model)(features)


@family
def test_positions_of_one_axis_beside_images_are_wrong(name):
    """Why the collator emits none there."""
    model, features = model_of(name), FEATURES["images"]
    batch = PaddingCollator(pad_token_id=PAD, padding_side="left", model=model)(features)
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    assert difference(model, batch, features, "left") > POWER
