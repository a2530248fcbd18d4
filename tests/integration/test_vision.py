"""Padding invariance of vision-language models through the public API, text alone and with images, padded and flat.

Their positions have three axes. Padded, the model computes them itself from the 2D mask, and positions [B, S] beside
images move the logits by 1; flat, it needs [4, 1, T]: a text row that starts again with each sequence, then the axes.
"""

from contextlib import nullcontext
from functools import cache
from inspect import signature
from itertools import product

import pytest
import torch

pytest.importorskip("transformers")
from tiny_vision import IMAGE, MODELS, PAD, alone, axes, sample, taken, vision_model
from trained import gradient_of, step_of, trainer_of
from transformers import AutoModelForImageTextToText, __version__
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from collate_npu import BatchAdapter, CollateError, PaddingCollator, adapt, needs_mask_2d, wrap_collator
from collate_npu.consumers.tiny_models import make_honest
from collate_npu.releases import numbers

pytestmark = pytest.mark.models

TOLERANCE = 1e-4
TINY = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
family = pytest.mark.parametrize("name", [name for name in MODELS if name in CONFIG_MAPPING])
KINDS = ["text", "images", "images with their axes"]
TEXT = [sample(length, seed=length, image=None) for length in (5, 12, 9)]
IMAGES = [sample(6, seed=1), sample(16, seed=2, image=(4, 8)), sample(9, seed=3, image=None)]
model_of = cache(vision_model)


def features_of(model, kind):
    if kind == "images with their axes":  # as a template computes positions
        return [feature | {"position_ids": axes(model, feature)} for feature in IMAGES]
    return TEXT if kind == "text" else IMAGES


def collated(features, **settings):
    batch = PaddingCollator(pad_token_id=PAD, **settings)(features)
    if "position_ids" in features[0]:  # such a template sends no mm_token_type_ids: the model could not count again
        batch.pop("mm_token_type_ids", None)
    return batch


@torch.no_grad()
def difference(model, batch, features, side=None):
    """To each sample alone; `side` None: one flat row."""
    logits, lengths = model(**taken(model, batch)).logits, [len(feature["input_ids"]) for feature in features]
    if side is None:
        pieces = logits[0, : sum(lengths)].split(lengths)
    else:
        pieces = [row[-n:] if side == "left" else row[:n] for row, n in zip(logits, lengths)]
    errors = [(piece - alone(model, feature)).abs().flatten() for piece, feature in zip(pieces, features)]
    return float(torch.cat(errors).nan_to_num(torch.inf).max())


@family
@pytest.mark.parametrize("kind", KINDS)
def test_a_flat_row_of_the_collator_or_a_refusal(name, kind):
    """Recurrent layers of a flat row need kernels that read offsets, which a CPU has not; images need their axes."""
    model = model_of(name)
    features = features_of(model, kind)
    if needs_mask_2d(model):  # by a CollateError, or by transformers for want of kernels
        with pytest.raises(ValueError, match=r"apart|flat|kernels|recurrent"):
            difference(model, collated(features, padding_free=True, model=model), features)
    elif kind == "images":
        with pytest.raises(CollateError, match="position_ids"):
            collated(features, padding_free=True, model=model)
    else:
        assert difference(model, collated(features, padding_free=True, model=model), features) <= TOLERANCE
        wire = collated(features, padding_free=True)
        assert difference(model, BatchAdapter(model, padding_free=True)(wire), features) <= TOLERANCE


@family
@pytest.mark.parametrize(
    ("kind", "side"), [case for case in product(KINDS, ["left", "right", None]) if case != ("images", None)]
)
def test_images_stay_with_their_tokens_by_sequence(name, kind, side):
    model = model_of(name)
    features = features_of(model, kind)
    with adapt(model) as adapted:
        assert adapted.way == "by sequence"
        settings = {"padding_free": True} if side is None else {"padding_side": side}
        batch = collated(features, model=model, **settings) | {"use_cache": False}
        assert difference(model, batch, features, side) <= TOLERANCE
    if side:  # and without `adapt`
        assert difference(model, collated(features, model=model, **settings), features, side) <= TOLERANCE


def learned(row):
    labels = [-100 if token >= IMAGE else token for token in row["input_ids"]]
    return row | {"attention_mask": [1] * len(labels), "labels": labels}


SAMPLES = [*map(learned, [*IMAGES, sample(3, seed=4)])]
FILL = {"input_ids": PAD, "attention_mask": 0, "labels": -100, "mm_token_type_ids": 0}


def left(rows):
    """As a processor pads: the first token has a label too. The Trainer drops keys that a forward does not name."""
    width, keys = max(len(row["input_ids"]) for row in rows), FILL.keys() & rows[0].keys()
    batch = {key: torch.tensor([[FILL[key]] * (width - len(row[key])) + row[key] for row in rows]) for key in keys}
    seen = [row for row in rows if "pixel_values" in row]
    return batch | {key: torch.cat([row[key] for row in seen]) for key in ("pixel_values", "image_grid_thw") if seen}


def step_alone(model):
    """Loss and gradient of each sample by itself, weighed by its targets."""
    model.train().zero_grad(set_to_none=True)
    targets = [sum(label >= 0 for label in row["labels"][1:]) for row in SAMPLES]
    losses = [model(**taken(model, left([row]))).loss * n / sum(targets) for row, n in zip(SAMPLES, targets)]
    sum(losses).backward()
    return float(sum(losses).detach()), gradient_of(model)


ALL = {"per_device_train_batch_size": 4}
CHECKPOINTED = ALL | {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
TWICE = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
STEPS = [
    ("nothing", ALL, False), ("wrap_collator", ALL, True), ("PaddingCollator", ALL, True), ("adapt", ALL, True),
    ("adapt", CHECKPOINTED, True), ("adapt, wrap_collator", TWICE, True), ("adapt, uncounted", TWICE, False),
]  # fmt: skip


@family
def test_a_step_of_the_trainer_with_images_padded_left(name, tmp_path):
    """Without us padding predicts the first label of each row. Under accumulation the Trainer must count tokens."""
    model, counts = model_of(name), name == "qwen2_5_vl" or numbers(__version__) >= (5, 17)  # before, the loss drops it
    (loss, wanted), ours = step_alone(model), PaddingCollator(pad_token_id=PAD, padding_side="left", model=model)
    made_of = {"wrap_collator": wrap_collator(left, model=model), "PaddingCollator": ours}
    for line, how, right in STEPS:
        collator = next((made for name, made in made_of.items() if name in line), left)
        trainer = trainer_of(model, collator, tmp_path, SAMPLES, max_steps=1, save_strategy="no", max_grad_norm=0.0, **how)
        trainer.model_accepts_loss_kwargs = how is TWICE and right
        right = right and (counts or how is not TWICE)
        with adapt(model) if "adapt" in line else nullcontext():
            found, gradient = step_of(trainer)
        off = float((gradient - wanted).norm() / wanted.norm())
        assert off < TOLERANCE if right else off > 0.1, (line, how)
        assert not right or found == pytest.approx(loss, abs=1e-3), (line, how)
    model.eval()


@pytest.mark.skipif(__version__.startswith("5.0."), reason="it runs in training with token_type_ids alone")
@torch.no_grad()
def test_images_that_see_both_sides_are_not_packed():
    """Our dense mask took the place of the one by which tokens of an image see each other: off by 1.8, in silence."""
    config = CONFIG_MAPPING["gemma3"](
        text_config={**TINY, "vocab_size": 60, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0},
        vision_config={**TINY, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=59,
        boi_token_index=57,
        eoi_token_index=58,
    )
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").eval()
    make_honest(model, 5.0)
    text, image = [9, 10, 11], [5, 57, *[59] * 4, 58, 7]
    collate = PaddingCollator(pad_token_id=0, model=model)
    sample = {"input_ids": image + text, "token_type_ids": [int(token == 59) for token in image + text]}
    with pytest.raises(CollateError, match="tokens see each other by a mask of its own"):
        collate([sample | {"seq_lengths": [8, 3], "pixel_values": torch.randn(1, 3, 28, 28)}])
    packed = collate([{"input_ids": text + text[:2], "token_type_ids": [0] * 5, "seq_lengths": [3, 2]}])
    whole = model(input_ids=torch.tensor([text]), attention_mask=torch.ones(1, 3, dtype=torch.long)).logits
    assert torch.allclose(model(**packed).logits[:, :3], whole, atol=TOLERANCE)


WRONG_TYPES = {
    "on the other side": lambda types, keep: types.flip(1),
    "all zero": lambda types, keep: torch.zeros_like(types),
    "one place on": lambda types, keep: torch.roll(types, 1, 1),
    "cut": lambda types, keep: types[:, :-2],
    "missing": lambda types, keep: None,
}


@family
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("how", WRONG_TYPES)
def test_types_that_do_not_stand_at_the_images_are_refused(name, side, how):
    """TRL 5785: right shapes, wrong positions, by every door. Transformers 4.57.1 finds images by their ids."""
    if "mm_token_type_ids" not in signature((model := model_of(name)).forward).parameters:
        pytest.skip("its layers ask for no types")
    batch = collated(IMAGES, padding_side=side, attention_mask="2d")
    batch["mm_token_type_ids"] = WRONG_TYPES[how](batch["mm_token_type_ids"], batch["attention_mask_2d"])
    for door in (BatchAdapter(model), lambda given: through(model, given)):
        with pytest.raises(CollateError, match="the model finds images by it"):
            door({key: value for key, value in batch.items() if value is not None})


def through(model, batch):
    with adapt(model):
        return model(**taken(model, batch))
