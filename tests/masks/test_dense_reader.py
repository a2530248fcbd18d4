"""Readings: what a matrix means, in pictures (True = ■); each other reading that is looked for; and the proof: one flipped
place in a real row is noticed wherever it is, and a mask is read so often and no more."""

import contextlib
import tracemalloc

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given, strategies as st
from live_bytes import peak_bytes

from collate_npu import CollateError, Pattern, Segments, derive_segments
from collate_npu.errors import AmbiguousMaskError
from collate_npu.masks import dense, dense_mask, dense_reader
from collate_npu.masks.dense_mask import MaskValues, Square
from collate_npu.masks.dense_reader import Known, UnexplainedError, wrong_rows


def square(attends_BQK):
    return Square(MaskValues(torch.from_numpy(np.ascontiguousarray(attends_BQK)), "keep"), "keep", len(attends_BQK))


def read_square(attends_BQK, **known):
    if "keep" in known:
        known |= {"segments": Segments.from_keep(known.pop("keep")), "parted": False}
    return dense_reader.read_square(square(attends_BQK), Known(**known)).segments


def drawn(text):
    return np.array([[char == "■" for char in row] for row in text.split()])[None]


LEFT_FILLED, RIGHT_FILLED = "■■■■ ■■■■ ⬚⬚■⬚ ⬚⬚■■", "■⬚⬚⬚ ■■⬚⬚ ■■■■ ■■■■"
HOLE, GAP = "■⬚⬚⬚ ■⬚⬚⬚ ■⬚■⬚ ■⬚■■", "■⬚⬚⬚⬚ ■■⬚⬚⬚ ⬚⬚⬚⬚⬚ ⬚⬚⬚■⬚ ⬚⬚⬚■■"
LONE, LONE_BESIDE_UNFORCED = "■⬚⬚ ■■⬚ ⬚⬚■", "■⬚⬚⬚ ■■⬚⬚ ⬚⬚■⬚ ⬚⬚⬚⬚"
UNFORCED_BETWEEN, FULL = "■⬚⬚⬚⬚ ■■⬚⬚⬚ ■■■■■ ■■■■■ ⬚⬚⬚⬚■", "■■■ ■■■ ■■■"
HOLE_AND_END_FILLED, ONE_FILLED = "■⬚⬚⬚⬚ ■■⬚⬚⬚ ■■■■■ ■■⬚■⬚ ■■■■■", "■■■■ ⬚■⬚⬚ ⬚■■⬚ ⬚⬚⬚■"
TWO_LONE = "■⬚⬚⬚ ■■⬚⬚ ⬚⬚■⬚ ⬚⬚⬚■"
CAUSAL, NO_DIAGONAL, LONELY_ROW = "■⬚⬚ ■■⬚ ■■■", "■⬚⬚ ■⬚⬚ ■■■", "■⬚⬚ ■■⬚ ■⬚■"


@pytest.mark.parametrize(
    ("picture", "settings", "said"),
    [
        (LEFT_FILLED, {}, [0, 0, 1, 1]),
        (RIGHT_FILLED, {"unmasked_rows": True}, [1, 1, 0, 0]),
        (RIGHT_FILLED, {}, "last rows that see everything"),  # or an image: real tokens that attend to both sides
        (CAUSAL, {"unmasked_rows": True}, "a last row that sees everything"),
        (GAP, {}, "tokens 1 and 3 that do not meet"),
        (GAP, {"pattern": Pattern.of("causal")}, [1, 1, 0, 2, 2]),
        (LONE, {}, "sequences of 2, 1 tokens"),
        (LONE, {"prove": False}, [1, 1, 2]),
        (LONE_BESIDE_UNFORCED, {"pattern": Pattern.of("causal")}, [1, 1, 2, 0]),
        (LONE, {"keep": np.array([[True, True, False]])}, [1, 1, 0]),
        (HOLE, {"keep": np.ones((1, 4), bool)}, "3 real tokens where the 2D mask has 4"),
        (NO_DIAGONAL, {}, "key 1 is attended by other tokens, but token 1 is padding or does not attend itself"),
        (LONELY_ROW, {}, "rows that no pattern gives"),
        ("■", {"unmasked_rows": True}, "rows that all see everything"),
        (HOLE_AND_END_FILLED, {"unmasked_rows": True}, [1, 1, 0, 1, 0]),
        (ONE_FILLED, {"pattern": Pattern.of("causal")}, "sequences of 2, 1 tokens"),
        (UNFORCED_BETWEEN, {"pattern": Pattern.of("causal")}, [1, 1, 0, 0, 2]),
        (FULL, {"pattern": Pattern.prefix(3)}, [1, 1, 1]),
        (LONE, {"keep": np.array([[False, False, True]])}, [0, 0, 1]),
        (TWO_LONE, {"keep": np.array([[False, False, True, True]]), "pattern": Pattern.of("causal")}, "turned around"),
    ],
)
def test_what_a_picture_means_or_may_mean(picture, settings, said):
    if isinstance(said, list):
        assert read_square(drawn(picture), **settings).ids.tolist() == [said]
        return
    with pytest.raises((AmbiguousMaskError, UnexplainedError)) as raised:
        read_square(drawn(picture), **settings)
    assert said in (str(raised.value) or raised.value.rows()[0][1])


# --- what is known beside the matrix


@pytest.mark.parametrize(
    ("declared", "right"), [("causal", Pattern.sliding(2)), (Pattern.sliding(2), "causal"), ("causal", "bidirectional")]
)
def test_a_declared_pattern_that_does_not_fit_names_the_one_that_would(declared, right):
    segments, declared = Segments.from_lengths([5]), Pattern.of(declared)
    matrix = dense(segments, pattern=right)[:, 0].numpy()
    for known in (Known(pattern=declared), Known(segments=segments, pattern=declared)):
        with pytest.raises(UnexplainedError) as raised:
            dense_reader.read_square(square(matrix), known)
        assert raised.value.instead == Pattern.of(right)


@pytest.mark.parametrize(
    ("ids", "size"),
    [
        ([[1, 1, 1, 2, 2, 2]], 3),
        ([[1, 1, 2, 2, 3]], 2),
        ([[1, 1, 2, 2, 2]], None),
        ([[0, 1, 1, 2]], 2),
        ([[0, 0, 1, 1], [1, 1, 2, 2]], 2),
        ([[1, 1, 1, 1], [1, 1, 2, 2]], None),
        ([[1, 1, 1, 0, 2, 2]], 4),
        ([[1, 1, 2, 2, 0, 0]], None),  # padding that attends as the sequence before it belongs to its chunk
    ],
)
def test_packed_sequences_that_chunks_would_make_too(ids, size):
    packed = Segments(ids)
    matrix, keep = dense(packed)[:, 0].numpy(), packed.array != 0
    if size is None:
        assert read_square(matrix, keep=keep) == packed
        return
    with pytest.raises(AmbiguousMaskError, match=rf"chunked\({size}\)"):
        read_square(matrix, keep=keep)


def test_a_2d_mask_turned_around_is_not_a_row_of_single_tokens():
    """Padding with a forced diagonal: turned around, it looks like sequences of one token beside padding."""
    keep = np.array([[False, False, False, True, True, True]])
    matrix = dense(Segments.from_keep(keep))[:, 0].numpy() | np.eye(6, dtype=bool)
    assert read_square(matrix, keep=keep) == Segments.from_keep(keep)
    with pytest.raises(AmbiguousMaskError, match="turned around"):
        read_square(matrix, keep=~keep)
    ones = Segments.from_lengths([[1] * 6], 8)  # nor is padding that attends itself alone
    assert read_square(np.eye(8, dtype=bool)[None], keep=ones.keep.numpy(), pattern=Pattern.of("causal")) == ones
    beside = Segments([[1, 1, 1, 2, 2, 3, 3]])  # sequences of two are none of them
    read = read_square(dense(beside)[:, 0].numpy(), keep=beside.array > 1, pattern=Pattern.of("causal"))
    assert read == Segments([[0, 0, 0, 1, 1, 2, 2]])


# --- the proof


def square_of(full, polarity="keep"):
    return Square(MaskValues(full, polarity), polarity, full.shape[0])


@given(strategies.attentions(), st.sampled_from(["keep", "masked"]), st.sampled_from([1, 16, 1 << 19]), st.data())
def test_one_flipped_place_is_noticed_in_every_real_row_and_in_no_other(attention, polarity, block, data):
    segments, pattern = attention
    B, S = segments.shape
    full = dense(segments, pattern=pattern, polarity=polarity)
    at = b, _, q, _ = tuple(data.draw(st.integers(0, n - 1)) for n in (B, 1, S, S))
    before, dense_mask.BLOCK = dense_mask.BLOCK, block
    try:
        assert list(wrong_rows(square_of(full, polarity), segments, pattern)) == []
        full[at] = ~full[at]
        wrong = [b] if segments.array[b, q] else []
        assert list(wrong_rows(square_of(full, polarity), segments, pattern)) == wrong
        proved = np.zeros((B, S), bool)
        proved[b, q] = True
        assert list(wrong_rows(square_of(full, polarity), segments, pattern, proved)) == []
    finally:
        dense_mask.BLOCK = before


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


LARGE = {
    "right": Segments.from_lengths([700], WIDE),
    "packed": Segments.from_lengths([[300, 200]], WIDE),
    "holes": Segments.from_keep(torch.arange(WIDE)[None] % 3 > 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*LARGE, "refused"])
@pytest.mark.parametrize("written", [("masked", None), ("bias", torch.float32), ("bias", torch.bfloat16)])
@pytest.mark.parametrize("declared", [True, False])
def test_a_derivation_takes_no_more_than_its_input_once_again(kind, written, declared):
    full = dense(LARGE.get(kind, LARGE["right"]), polarity=written[0], dtype=written[1])
    if kind == "refused":
        full[0, 0, 500, 20] = full[0, 0, 0, 1]

    def derive():
        with contextlib.suppress(CollateError):
            derive_segments(full, polarity=written[0] if declared else None)

    assert traced(derive) <= full.nbytes
    assert peak_bytes(derive) <= 1.01 * full.nbytes  # torch holds the input alone


def test_many_heads_are_read_together_in_small_blocks():
    full = dense(Segments.from_lengths([200], 256), polarity="masked").repeat(1, 16, 1, 1)
    assert traced(lambda: derive_segments(full)) <= full.nbytes
