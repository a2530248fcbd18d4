"""What is handed to transformers' Trainer, accelerate and DeepSpeed's Ulysses, and what is refused."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collate_npu import CollateError, Segments, UnsupportedFormError
from collate_npu.integrations.context_parallel import (
    ContextParallelCollator,
    buffers_of,
    context_parallel_collator,
    ready_batch,
    refuse_model,
)
from collate_npu.keys import KEYS, SAMPLE
from collate_npu.outputs import shift_labels


def batch_of(segments: Segments, **more: object) -> dict:
    B, S = segments.shape
    ids = torch.arange(1, B * S + 1).view(B, S)
    return {
        "input_ids": ids,
        "labels": torch.where(segments.keep, ids, -100),
        "attention_mask": segments.keep.long(),
        **more,
    }


class Config:
    """A config as transformers writes it."""

    def __init__(self, **fields: object) -> None:
        vars(self).update(fields)

    def get_text_config(self, decoder: bool = False) -> Config:
        return self


DENSE = Config(layer_types=["full_attention"] * 2, _attn_implementation="sdpa")
right_padded = st.lists(st.integers(1, 8), min_size=1, max_size=3).map(lambda n: Segments.from_lengths(n, width=8))


@given(right_padded)
def test_labels_positions_and_the_2d_mask_are_emitted(segments):
    batch = batch_of(segments)
    ready = ready_batch(batch, size=2)
    assert torch.equal(ready["shift_labels"], shift_labels(batch["labels"], segments))
    assert torch.equal(ready["position_ids"], segments.position_ids)
    assert torch.equal(ready["attention_mask"].bool(), segments.keep)
    assert ready["attention_mask"].dtype == torch.int64
    assert torch.equal(ready["labels"], batch["labels"])


def test_labels_left_at_padding_are_no_targets():
    segments = Segments.from_lengths([3], width=8)
    ready = ready_batch({**batch_of(segments), "labels": torch.arange(1, 9)[None]}, size=2)
    assert ready["shift_labels"].tolist() == [[2, 3] + [-100] * 6]


@given(right_padded)
def test_every_tensor_is_an_owned_copy(segments):
    """torch resizes buffers in place: a view, an expanded row or labels that are the ids would be cut twice."""
    batch = batch_of(segments)
    batch["labels"] = batch["input_ids"]
    ready = ready_batch(batch, size=2)
    places = [value.untyped_storage().data_ptr() for value in [*ready.values(), *batch.values()]]
    assert len(set(places)) == len(places) - 1  # the batch's own labels and ids
    assert all(value.is_contiguous() for value in ready.values())


def test_attention_mask_is_never_none_and_attention_mask_2d_is_not_left_over():
    segments = Segments.from_lengths([3, 8], width=8)
    batch = {**batch_of(segments), "attention_mask": None, "attention_mask_2d": segments.keep}
    ready = ready_batch(batch, size=2)
    assert "attention_mask_2d" not in ready  # transformers' models take it and never read it
    assert torch.equal(ready["attention_mask"].bool(), segments.keep)
    assert "attention_mask" not in ready_batch({"input_ids": torch.zeros(1, 8), "attention_mask": None}, size=2)


def test_what_is_in_the_batch_already_stays():
    segments = Segments.from_lengths([8])
    mine = {"shift_labels": torch.full((1, 8), 5), "position_ids": torch.arange(8)[None] + 3}
    ready = ready_batch(batch_of(segments, **mine), size=2)
    assert all(torch.equal(ready[key], mine[key]) for key in mine)


@pytest.mark.parametrize(
    ("segments", "why"),
    [
        (Segments.from_lengths([3, 8], side="left"), "padding stands on the left"),
        (Segments.from_lengths([[3, 5]]), "several sequences"),
        (Segments.from_keep([[1, 0, 1, 1, 1, 1, 1, 1]]), "before or between"),
    ],
)
@pytest.mark.parametrize("backend", ["torch", "deepspeed"])
def test_a_batch_that_needs_a_mask_is_refused(segments, why, backend):
    with pytest.raises(UnsupportedFormError, match=why):
        ready_batch(batch_of(segments), size=2, segments=segments, backend=backend)


def test_the_truth_is_found_in_the_mask_the_2d_mask_or_the_positions():
    left = Segments.from_lengths([3, 8], side="left")
    with pytest.raises(UnsupportedFormError, match="on the left"):
        ready_batch(batch_of(left), size=2)
    with pytest.raises(UnsupportedFormError, match="on the left"):
        ready_batch({**batch_of(left), "attention_mask": None, "attention_mask_2d": left.keep}, size=2)
    packed = {"input_ids": torch.zeros(1, 8), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}
    with pytest.raises(UnsupportedFormError, match="several sequences"):
        ready_batch(packed, size=2)
    with pytest.raises(UnsupportedFormError, match="cannot be what tells the padding"):
        ready_batch({**packed, "attention_mask": torch.ones(1, 1, 8, 8)}, size=2)


def test_widths():
    assert ready_batch(batch_of(Segments.from_lengths([8])), size=4)["input_ids"].shape == (1, 8)
    with pytest.raises(CollateError, match="pad_to_multiple_of=16"):
        ready_batch(batch_of(Segments.from_lengths([8])), size=8)
    assert ready_batch(batch_of(Segments.from_lengths([8])), size=8, backend="deepspeed")["input_ids"].shape == (1, 8)


# --- Ulysses --------------------------------------------------------------------------------------------------------------


def test_ulysses_gets_positions_no_mask_and_labels_that_its_shift_makes_right():
    """DeepSpeed's loader shifts labels across documents; what it makes of ours is what each sequence alone gives."""
    segments = Segments.from_ids([[1, 1, 1, 2, 2, 2, 2, 0]])
    batch = batch_of(segments)
    batch["labels"] = batch["input_ids"].clone()
    del batch["attention_mask"]
    ready = ready_batch(batch, size=2, segments=segments, backend="deepspeed", attn_implementation="flash_attention_2")
    assert set(ready) == {"input_ids", "labels", "position_ids"}
    shifted_by_the_loader = torch.nn.functional.pad(ready["labels"], (0, 1), value=-100)[..., 1:]
    assert torch.equal(shifted_by_the_loader, shift_labels(batch["labels"], segments))
    assert ready["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention"])
def test_ulysses_positions_are_ours_where_they_keep_documents_apart(implementation):
    left = Segments.from_lengths([3, 8], side="left")
    theirs = {**batch_of(left), "position_ids": torch.arange(8).expand(2, 8)}
    ready = ready_batch(theirs, size=2, backend="deepspeed", attn_implementation=implementation)
    assert torch.equal(ready["position_ids"], left.position_ids)
    assert ready["position_ids"][0].tolist() == [0, 0, 0, 0, 0, 0, 1, 2]  # each padding a document of its own
    holes = Segments.from_keep([[1, 1, 0, 1, 1, 1, 1, 1]])
    with pytest.raises(UnsupportedFormError, match="between real tokens"):
        ready_batch(batch_of(holes), size=2, backend="deepspeed", attn_implementation=implementation)


# --- models ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "deepspeed"])
@pytest.mark.parametrize(
    "config",
    [
        Config(layer_types=["linear_attention", "full_attention"]),
        Config(layer_types=["conv", "full_attention"]),
        Config(layers_block_type=["mamba", "attention"]),
        Config(layer_types=["hybrid", "full_attention"]),
    ],
    ids=["linear_attention", "conv", "mamba", "hybrid"],
)
def test_recurrent_models_are_refused_with_the_reason(config, backend):
    with pytest.raises(UnsupportedFormError, match="without the state of the tokens before it"):
        refuse_model(config, backend)
    with pytest.raises(UnsupportedFormError, match="recurrent layers"):
        context_parallel_collator(dict, size=2, model=config, backend=backend)


def test_windows_are_refused_where_the_hooks_drop_the_mask():
    config = Config(layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(UnsupportedFormError, match="sliding_attention"):
        refuse_model(config)
    refuse_model(config, "deepspeed")
    refuse_model(DENSE)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5", "mamba2", "bamba", "falcon_h1"])
def test_transformers_recurrent_families_are_refused(model_type):
    pytest.importorskip("transformers")
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"{model_type} is not in this transformers")
    with pytest.raises(UnsupportedFormError, match="recurrent layers"):
        refuse_model(CONFIG_MAPPING[model_type]())


# --- buffers --------------------------------------------------------------------------------------------------------------


def test_buffers_and_dims_follow_the_table():
    batch = {
        "input_ids": torch.zeros(2, 8),
        "position_ids": torch.zeros(3, 2, 8),
        "attention_mask_2d": torch.zeros(2, 8),
        "attention_mask": torch.zeros(2, 8),
        "loss_scale": torch.zeros(2, 8),
        "extra": torch.zeros(2, 8, 4),
        "labels": torch.zeros(2),
        "pixel_values": torch.zeros(8, 3),
        "cu_seq_lens_q": torch.zeros(3),
        "name": "a",
    }
    buffers, dims = buffers_of(batch)
    named = {key: dim for key, value in batch.items() for buffer, dim in zip(buffers, dims) if buffer is value}
    assert named == {
        "input_ids": 1,
        "position_ids": 2,
        "attention_mask_2d": 1,
        "attention_mask": 1,
        "loss_scale": 1,
        "extra": 1,
    }
    table = {**KEYS, "extra": SAMPLE}
    assert len(buffers_of(batch, keys=table)[0]) == len(buffers) - 1
    with pytest.raises(CollateError, match="input_ids"):
        buffers_of({"labels": torch.zeros(2, 8)})


# --- the collator ---------------------------------------------------------------------------------------------------------


def inner(features: list, **more: object) -> dict:
    return batch_of(Segments.from_lengths([len(row) for row in features], width=8), **more)


def test_the_collator_pickles_and_makes_batches_ready():
    collator = pickle.loads(pickle.dumps(context_parallel_collator(inner, size=2, model=DENSE)))
    assert isinstance(collator, ContextParallelCollator)
    assert set(collator([[1, 2], [3]])) == {"input_ids", "labels", "shift_labels", "position_ids", "attention_mask"}


def test_keys_that_trainer_would_leave_whole_are_refused():
    collator = context_parallel_collator(partial(inner, loss_scale=torch.zeros(1, 8)), size=2, model=DENSE)
    with pytest.raises(UnsupportedFormError, match="loss_scale"):
        collator([[1, 2]])
    vision = context_parallel_collator(partial(inner, pixel_values=torch.zeros(4, 4)), size=2, model=DENSE)
    assert "pixel_values" in vision([[1, 2]])
    mrope = context_parallel_collator(partial(inner, position_ids=torch.zeros(3, 1, 8)), size=2, model=DENSE)
    with pytest.raises(UnsupportedFormError, match="position_ids float32"):
        mrope([[1, 2]])
