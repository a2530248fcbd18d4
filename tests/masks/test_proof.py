"""Proof: one flipped place in a real row is noticed wherever it is; a mask is read so often, and no more."""

from __future__ import annotations

import contextlib
import tracemalloc

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from live_bytes import peak_bytes

from collate_npu import CollateError, Pattern, Segments, dense, derive_segments
from collate_npu.masks import square as square_module
from collate_npu.masks.extents import Extents
from collate_npu.masks.polarity import MaskValues
from collate_npu.masks.proof import UnexplainedError, prove, wrong_rows
from collate_npu.masks.square import Square


def square_of(full, polarity="keep"):
    return Square(MaskValues(full, polarity), polarity, full.shape[0])


@given(strategies.attentions(), st.sampled_from(["keep", "masked"]), st.sampled_from([1, 16, 1 << 19]), st.data())
def test_one_flipped_place_is_noticed_in_every_real_row_and_in_no_other(attention, polarity, block, data):
    segments, pattern = attention
    B, S = segments.shape
    full = dense(segments, pattern=pattern, polarity=polarity)
    at = b, _, q, _ = tuple(data.draw(st.integers(0, n - 1)) for n in (B, 1, S, S))
    before, square_module.BLOCK = square_module.BLOCK, block
    try:
        assert list(wrong_rows(square_of(full, polarity), segments, pattern)) == []
        full[at] = ~full[at]
        wrong = [b] if segments.array[b, q] else []
        assert list(wrong_rows(square_of(full, polarity), segments, pattern)) == wrong
        proved = np.zeros((B, S), bool)
        proved[b, q] = True
        assert list(wrong_rows(square_of(full, polarity), segments, pattern, proved)) == []
    finally:
        square_module.BLOCK = before


@given(strategies.attentions(), st.booleans(), st.data())
def test_a_derived_mask_with_a_flipped_place_is_no_longer_that_mask(attention, declared, data):
    """Refused, or another truth that gives exactly this tensor: never the truth it was before, with a real row changed."""
    segments, pattern = attention
    B, S = segments.shape
    full = dense(segments, pattern=pattern)
    b, q, k = (data.draw(st.integers(0, n - 1)) for n in (B, S, S))
    full[b, 0, q, k] = ~full[b, 0, q, k]
    try:
        found = derive_segments(full, polarity="keep", pattern=pattern if declared else None)
    except CollateError:
        return
    assert found != segments or not segments.array[b, q] or not declared


def test_the_declared_pattern_is_proved_or_another_is_named():
    segments = Segments.from_lengths([5])
    square = square_of(dense(segments, pattern=Pattern.sliding(2)))
    extents = Extents(np.array([[0, 0, 1, 2, 3]]), np.arange(5)[None], np.ones((1, 5), bool), np.zeros((1, 5), bool))
    assert prove(square, segments, None, lambda: (extents, 1), np.zeros((1, 5), bool)) == Pattern.sliding(2)
    with pytest.raises(UnexplainedError) as raised:
        prove(square, segments, Pattern.of("causal"), lambda: (extents, 1), np.zeros((1, 5), bool))
    assert raised.value.instead == Pattern.sliding(2)
    assert raised.value.rows == [(0, "rows that are not those of causal attention")]


# --- work and memory, counted


class Reads:
    """How many elements of a mask of B * S * S are read and compared, in units of the whole."""

    def __init__(self, monkeypatch):
        self.elements = 0
        for name in ("rows", "_as_they_lie"):
            monkeypatch.setattr(Square, name, self.counted(getattr(Square, name)))

    def counted(self, method):
        def read(square, b, low, high):
            self.elements += (high - low) * square.shape[1]
            return method(square, b, low, high)

        return read

    def of(self, full, **settings):
        self.elements = 0
        with contextlib.suppress(CollateError):
            derive_segments(full, **settings)
        return self.elements / full.numel()


S = 256
KINDS = {
    "right": Segments.from_lengths([S, 200, 150], S),
    "left": Segments.from_lengths([S, 200, 150], S, "left"),
    "packed": Segments.from_lengths([[100, 50, 60], [7, 9], [S]], S),
    "ones": Segments.from_lengths([[1] * (S - 3), [1] * 5, [1]], S),
    "holes": Segments.from_keep(torch.arange(3 * S).view(3, S) % 3 != 0),
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("kind", KINDS)
def test_plain_causal_attention_is_read_once_under_either_polarity(kind, dtype, monkeypatch):
    """int64 has its values looked at before; that is one more pass, of MaskValues."""
    reads = Reads(monkeypatch)
    for polarity in ("keep", "masked"):
        full = dense(KINDS[kind], polarity=polarity, dtype=dtype)
        assert reads.of(full, polarity=polarity) == 1
        assert reads.of(full) <= 1 + 1 / 3  # the other polarity ends in its first block, or before


@pytest.mark.parametrize("pattern", [Pattern.sliding(9), Pattern.chunked(9), Pattern.prefix(9), Pattern.of("bidirectional")])
@pytest.mark.parametrize("kind", KINDS)
def test_no_mask_is_read_more_than_a_few_times(kind, pattern, monkeypatch):
    reads = Reads(monkeypatch)
    full = dense(KINDS[kind], polarity="masked", pattern=pattern)
    wrong = full.clone()
    wrong[0, 0, S // 2, S // 4] ^= True
    for mask in (full, wrong):
        for declared in (None, "causal", pattern):
            assert reads.of(mask, polarity="masked", pattern=declared) <= 7
            assert reads.of(mask, pattern=declared) <= 14


def traced(work):
    """The most bytes of numpy's arrays at once."""
    work()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


WIDE = 1024


@pytest.mark.parametrize("kind", ["right", "packed", "holes", "refused"])
@pytest.mark.parametrize(
    "written", [("masked", None), ("bias", torch.float32), ("bias", torch.bfloat16), ("keep", torch.uint8)]
)
@pytest.mark.parametrize("declared", [True, False])
def test_a_derivation_takes_no_more_than_its_input_once_again(kind, written, declared):
    segments = {
        "packed": Segments.from_lengths([[300, 200]], WIDE),
        "holes": Segments.from_keep(torch.arange(WIDE)[None] % 3 > 0),
    }
    polarity, dtype = written
    full = dense(segments.get(kind, Segments.from_lengths([700], WIDE)), polarity=polarity, dtype=dtype)
    if kind == "refused":
        full[0, 0, 500, 20] = full[0, 0, 0, 1]

    def derive():
        with contextlib.suppress(CollateError):
            derive_segments(full, polarity=polarity if declared else None)

    assert traced(derive) <= full.nbytes
    peak_bytes(derive)  # the first look imports
    assert peak_bytes(derive) <= 1.01 * full.nbytes  # torch holds the input alone


def test_many_heads_are_read_together_in_small_blocks():
    full = dense(Segments.from_lengths([200], 256), polarity="masked").repeat(1, 16, 1, 1)
    assert traced(lambda: derive_segments(full)) <= full.nbytes
