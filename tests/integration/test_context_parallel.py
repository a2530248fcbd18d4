"""What is handed to transformers' Trainer, accelerate and DeepSpeed's Ulysses, and what is refused."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st

from collate_npu import BatchAdapter, CollateError, ContextParallel, Segments, adapt
from collate_npu.errors import AmbiguousMaskError, UnsupportedFormError
from collate_npu.integrations.accelerate import context_parallel_collator, ready_batch, refuse_model
from collate_npu.outputs import shift_labels
from collate_npu.testing import tiny_model


def batch_of(segments: Segments, **more: object) -> dict:
    ids = torch.arange(1, segments.ids.numel() + 1).view(segments.shape)
    labels = torch.where(segments.keep, ids, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": segments.keep.long(), **more}


def config(**fields: object) -> SimpleNamespace:
    """As transformers writes it."""
    made = SimpleNamespace(**fields)
    made.get_text_config = lambda decoder=False: made
    return made


DENSE = config(layer_types=["full_attention"] * 2, _attn_implementation="sdpa")
RESTARTING = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
right_padded = st.lists(st.integers(1, 8), min_size=1, max_size=3).map(lambda n: Segments.from_lengths(n, width=8))


@given(right_padded)
def test_labels_positions_and_the_2d_mask_are_emitted_as_owned_copies(segments):
    """torch resizes buffers in place: a view, an expanded row or labels that are the ids would be cut twice."""
    batch = batch_of(segments)
    batch["labels"] = batch["input_ids"].masked_fill(~segments.keep, -100)
    ready = ready_batch(batch, size=2)
    assert torch.equal(ready["shift_labels"], shift_labels(batch["labels"], segments))
    assert torch.equal(ready["position_ids"], segments.position_ids)
    assert torch.equal(ready["attention_mask"], segments.keep.long())
    assert torch.equal(ready["labels"], batch["labels"])
    places = [value.untyped_storage().data_ptr() for value in [*ready.values(), *batch.values()]]
    assert len(set(places)) == len(places)
    assert all(value.is_contiguous() for value in ready.values())


def test_attention_mask_is_never_none_and_attention_mask_2d_is_not_left_over():
    segments = Segments.from_lengths([3, 8], width=8)
    batch = {**batch_of(segments), "attention_mask": None, "attention_mask_2d": segments.keep}
    ready = ready_batch(batch, size=2)
    assert "attention_mask_2d" not in ready  # transformers' models take it and never read it
    assert torch.equal(ready["attention_mask"].bool(), segments.keep)
    bare = {"input_ids": torch.zeros(1, 8, dtype=torch.long)}
    assert "attention_mask" not in ready_batch(bare, size=2, segments=Segments.from_lengths([8]))
    with pytest.raises(AmbiguousMaskError, match="no mask may mean no padding"):  # or one that was lost
        ready_batch({**bare, "attention_mask": None}, size=2)


def test_what_is_in_the_batch_already_stays():
    segments = Segments.from_lengths([8])
    mine = {"shift_labels": torch.full((1, 8), 5), "position_ids": torch.arange(8)[None] + 3}
    ready = ready_batch(batch_of(segments, **mine), size=2)
    assert all(torch.equal(ready[key], mine[key]) for key in mine)


LEFT = Segments.from_lengths([3, 8], side="left")
HOLED = Segments.from_keep([[1, 0, 1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        (batch_of(LEFT), "padding stands on the left"),
        (batch_of(LEFT, attention_mask=None, attention_mask_2d=LEFT.keep), "padding stands on the left"),
        (batch_of(Segments.from_lengths([[3, 5]]), attention_mask=None, position_ids=RESTARTING), "several sequences"),
        (batch_of(HOLED), "before or between"),
    ],
)
@pytest.mark.parametrize("backend", ["torch", "deepspeed"])
def test_a_batch_that_needs_a_mask_is_refused(batch, why, backend):
    with pytest.raises(UnsupportedFormError, match=why):
        ready_batch(batch, size=2, backend=backend)


def test_widths():
    batch = batch_of(Segments.from_lengths([8]))
    for settings in ({"size": 4}, {"size": 8, "backend": "deepspeed"}):
        assert ready_batch(batch, **settings)["input_ids"].shape == (1, 8)
    with pytest.raises(CollateError, match="pad_to_multiple_of=16"):
        ready_batch(batch, size=8)


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
    theirs = batch_of(LEFT, position_ids=torch.arange(8).expand(2, 8))
    ready = ready_batch(theirs, size=2, backend="deepspeed", attn_implementation=implementation)
    assert torch.equal(ready["position_ids"], LEFT.position_ids)
    assert ready["position_ids"][0].tolist() == [0, 0, 0, 0, 0, 0, 1, 2]  # each padding a document of its own
    holes = Segments.from_keep([[1, 1, 0, 1, 1, 1, 1, 1]])
    with pytest.raises(UnsupportedFormError, match="between real tokens"):
        ready_batch(batch_of(holes), size=2, backend="deepspeed", attn_implementation=implementation)


@pytest.mark.parametrize("backend", ["torch", "deepspeed"])
def test_recurrent_models_are_refused_with_the_reason(backend):
    recurrent = config(layer_types=["linear_attention", "full_attention"])
    with pytest.raises(UnsupportedFormError, match="without the state of the tokens before it"):
        refuse_model(recurrent, backend)
    pytest.importorskip("transformers")
    adapt(model := tiny_model("qwen3_next", vocab_size=61))  # which knows of no ranks
    with pytest.raises(UnsupportedFormError, match="recurrent layers"):
        context_parallel_collator(dict, size=2, model=model, backend=backend)
    with pytest.raises(UnsupportedFormError, match="state of the tokens before its part"):
        BatchAdapter(model, context_parallel=ContextParallel(2, 0))


def test_windows_are_refused_where_the_hooks_drop_the_mask():
    sliding = config(layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(UnsupportedFormError, match="sliding_attention"):
        refuse_model(sliding)
    refuse_model(sliding, "deepspeed")
    refuse_model(DENSE)


def inner(features: list, **more: object) -> dict:
    return batch_of(Segments.from_lengths([len(row) for row in features], width=8), **more)


def test_the_collator_pickles_and_makes_batches_ready():
    collator = pickle.loads(pickle.dumps(context_parallel_collator(inner, size=2, model=DENSE)))
    assert set(collator([[1, 2], [3]])) == {"input_ids", "labels", "shift_labels", "position_ids", "attention_mask"}
