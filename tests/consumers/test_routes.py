"""A route in words, once for each kind of batch."""

from __future__ import annotations

import pytest
import torch

from collate_npu import BatchAdapter, ContextParallel, Segments, debug
from collate_npu.consumers.consumer import consumers
from collate_npu.consumers.routes import WHY_2D, say_batch, shape_said


@pytest.fixture
def said(monkeypatch):
    found: dict[object, str] = {}
    monkeypatch.setattr(debug, "ON", True)
    monkeypatch.setattr(debug, "say", lambda what, text: found.setdefault(what, text))
    return found


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        (Segments.from_lengths([3, 3]), "2 rows of 3, one sequence each; no padding"),
        (Segments.from_lengths([1, 3]), "2 rows of 3, one sequence each; padding on the right, 2 of 6 places (33%)"),
        (Segments.from_lengths([[3, 2]]), "1 row of 5, 2 sequences; no padding"),
        (
            Segments([[0, 1, 0]]),
            "1 row of 3, one sequence each; padding before, between or behind tokens, 2 of 3 places (67%)",
        ),
    ],
)
def test_the_shape_of_a_batch(segments, words):
    assert shape_said(segments) == words


def test_every_consumer_has_its_reason():
    for consumer in consumers().values():
        assert any(keeps == consumer.keeps_mask_2d for keeps, _ in WHY_2D)


@pytest.mark.parametrize("recurrent", [True, False])
def test_why_the_2d_mask_stays_or_goes(recurrent):
    route = BatchAdapter(needs_mask_2d=recurrent, consumer="megatron").route(Segments.from_lengths([1, 2]))
    assert route.keeps_mask_2d == recurrent
    assert route.why_2d == WHY_2D["recurrent", recurrent]
    flat = BatchAdapter(needs_mask_2d=recurrent, consumer="megatron", padding_free=True).route(
        Segments.from_lengths([[1, 2]])
    )
    assert flat.why_2d == "a flat row has no padding"


def test_routes_that_differ_are_said_apart(said):
    segments = Segments.from_lengths([1, 3])
    for cp in (None, ContextParallel(2, 0), ContextParallel(2, 1)):
        for consumer in ("megatron", "verl"):
            adapter = BatchAdapter(needs_mask_2d=False, consumer=consumer, context_parallel=cp)
            for _ in range(2):
                adapter.route(segments)
    assert len(said) == 6
    assert sum("context parallelism: none" in text for text in said.values()) == 2


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ({"attention_mask": None}, "attention_mask: None (why)"),
        ({"attention_mask": torch.ones(1, 2)}, "attention_mask: the 2D mask, True or 1 = real (why)"),
        ({"attention_mask": torch.ones(1, 1, 2, 2)}, "attention_mask: 4D, True = blocked (why)"),
        ({"attention_masks": {"full": None}}, "attention_masks: a mask for each kind of layer (why)"),
    ],
)
def test_a_batch_whose_route_no_consumer_chose(said, out, words):
    say_batch("somebody", out, Segments.from_lengths([2]), why="why")
    (text,) = said.values()
    assert words in text
    assert "attention_mask_2d: taken out (nobody here reads it)" in text
