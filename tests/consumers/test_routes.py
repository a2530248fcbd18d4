"""A route in words, once for each kind of batch."""

from functools import partial

import pytest
import torch

from collate_npu import BatchAdapter, ContextParallel, Segments, debug
from collate_npu.consumers.mask_routing import describe_bytes, describe_cheapest, describe_cost, describe_shape, say_batch


@pytest.fixture
def said(monkeypatch):
    found: dict[object, str] = {}
    monkeypatch.setattr(debug, "ON", True)
    monkeypatch.setattr(debug, "say", lambda what, text: found.setdefault(what, text))
    return found


ONE, RIGHT, LEFT = Segments.from_lengths([2]), Segments.from_lengths([1, 3]), Segments.from_lengths([1, 3], side="left")
SAID = [
    (describe_shape, Segments.from_lengths([3, 3]), "2 rows of 3, one sequence each; no padding"),
    (describe_shape, RIGHT, "2 rows of 3, one sequence each; padding on the right, 2 of 6 places (33%)"),
    (describe_shape, Segments.from_lengths([[3, 2]]), "1 row of 5, 2 sequences; no padding"),
    (describe_shape, Segments([[0, 1, 0]]),
     "1 row of 3, one sequence each; padding before, between or behind tokens, 2 of 3 places (67%)"),
    (describe_cheapest, Segments.from_lengths([[3, 2], [4]]), "offsets of a flat row, 16 bytes; a dense 4D takes 50 bytes"),
    (describe_cheapest, RIGHT, "None with a causal kernel; the 2D mask takes 6 bytes, the dense 4D that models make"),
    (describe_cheapest, LEFT, "the 2D mask, 6 bytes; the dense 4D that models make"),
    *((partial(describe_cost, form), RIGHT, f"{size} bytes") for form, size in (
        ("keep_2d", 6), ("masked", 18), ("keep", 18), ("bias", 72))),
]  # fmt: skip


@pytest.mark.parametrize(("says", "segments", "words"), SAID)
def test_a_batch_and_what_its_forms_take_in_words(says, segments, words):
    assert says(segments).startswith(words)
    assert [describe_bytes(n) for n in (2**20 - 1, 2**20, 3 * 2**20)] == ["1048575 bytes", "1.0 MiB", "3.0 MiB"]


def test_routes_that_differ_are_said_apart_with_what_becomes_of_the_2d_mask(said):
    for cp in (None, ContextParallel(2, 0), ContextParallel(2, 1)):
        for consumer, recurrent in (("megatron", True), ("megatron", False), ("verl", False)):
            adapter = BatchAdapter(needs_mask_2d=recurrent, consumer=consumer, context_parallel=cp)
            for _ in range(2):
                adapter.route(RIGHT)
    assert len(said) == 9
    assert sum("context parallelism: none" in text for text in said.values()) == 3
    for kept in ("stays (recurrent layers read it)", "taken out (nobody here", "stays (this consumer always reads it)"):
        assert sum(kept in text for text in said.values()) == 3
    assert all(("stays (this" in text) == ("consumer verl" in text) for text in said.values())


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ({"attention_mask": None}, "attention_mask: None (why)"),
        ({"attention_mask": torch.ones(1, 2)}, "attention_mask: the 2D mask, True or 1 = real (why)"),
        ({"attention_mask": torch.ones(1, 1, 2, 2)}, "attention_mask: 4D, True is blocked, 4 bytes (why)"),
        ({"attention_masks": {"full": None}}, "attention_masks: a mask for each kind of layer (why)"),
    ],
)
def test_a_batch_whose_route_no_consumer_chose(said, out, words):
    say_batch("somebody", out, ONE, why="why")
    (text,) = said.values()
    assert words in text
    assert "attention_mask_2d: taken out (nobody here reads it)" in text
