"""The dense reader, by `derive_segments`: where another reading is possible, one flipped place, and memory."""

import contextlib
import tracemalloc

import numpy as np
import pytest
import strategies
import torch
from hypothesis import assume, given, strategies as st
from live_bytes import peak_bytes

from collate_npu import CollateError, Pattern, Segments, derive_segments
from collate_npu.errors import AmbiguousMaskError
from collate_npu.masks import dense

CAUSAL = {"pattern": "causal"}
GAP, LONE, FULL = "■⬚⬚⬚⬚ ■■⬚⬚⬚ ⬚⬚⬚⬚⬚ ⬚⬚⬚■⬚ ⬚⬚⬚■■", "■⬚⬚ ■■⬚ ⬚⬚■", "■■■ ■■■ ■■■"
HOLE_AND_END_FILLED, UNFORCED_BETWEEN = "■⬚⬚⬚⬚ ■■⬚⬚⬚ ■■■■■ ■■⬚■⬚ ■■■■■", "■⬚⬚⬚⬚ ■■⬚⬚⬚ ■■■■■ ■■■■■ ⬚⬚⬚⬚■"


@pytest.mark.parametrize(
    ("picture", "settings", "found"),
    [
        ("■■■■ ■■■■ ⬚⬚■⬚ ⬚⬚■■", {}, [0, 0, 1, 1]),
        ("■⬚⬚⬚ ■■⬚⬚ ■■■■ ■■■■", {"unmasked_rows": True}, [1, 1, 0, 0]),
        ("■⬚⬚⬚ ■■⬚⬚ ■■■■ ■■■■", {}, "last rows that see everything"),  # or an image, which attends to both sides
        ("■⬚⬚ ■■⬚ ■■■", {"unmasked_rows": True}, "a last row that sees everything"),
        (GAP, {}, "tokens 1 and 3 that do not attend each other"),
        (GAP, CAUSAL, [1, 1, 0, 2, 2]),
        (GAP, {"pattern": Pattern.sliding(2)}, "looks back more than 1"),
        (GAP, {"pattern": Pattern.sliding(3)}, [1, 1, 0, 2, 2]),  # which one sequence would not be
        ("■■⬚⬚⬚ ■■⬚⬚⬚ ⬚⬚⬚⬚⬚ ⬚⬚⬚■■ ⬚⬚⬚■■", {}, [1, 1, 0, 2, 2]),
        (LONE, {}, "sequences of 2, 1 tokens"),
        (LONE, {"prove": False}, [1, 1, 2]),
        (LONE, {"keep": [[1, 1, 0]]}, [1, 1, 0]),
        (LONE, {"keep": [[0, 0, 1]]}, [0, 0, 1]),
        ("■⬚⬚⬚ ■⬚⬚⬚ ■⬚■⬚ ■⬚■■", {"keep": [[1] * 4]}, "token 1 is real in the 2D mask, and does not attend itself"),
        ("■⬚⬚ ■⬚⬚ ■■■", {}, "token 1 is attended by other tokens, and is padding"),
        ("■⬚⬚ ■■⬚ ■⬚■", {}, "rows that no pattern gives"),
        (HOLE_AND_END_FILLED, {"unmasked_rows": True}, [1, 1, 0, 1, 0]),
        (UNFORCED_BETWEEN, CAUSAL, [1, 1, 0, 0, 2]),
        (FULL, {"pattern": Pattern.prefix(3)}, [1, 1, 1]),
        ("■⬚⬚⬚ ■■⬚⬚ ⬚⬚■⬚ ⬚⬚⬚■", {"keep": [[0, 0, 1, 1]], **CAUSAL}, "inverted"),
    ],
)
def test_what_a_picture_means_or_may_mean(picture, settings, found):
    """True is ■. Every smaller matrix is in law 2."""
    matrix = torch.tensor([[char == "■" for char in row] for row in picture.split()])[None]
    ask = {"polarity": "keep", **settings} | ({"keep": torch.tensor(settings["keep"])} if "keep" in settings else {})
    if isinstance(found, list):
        assert derive_segments(matrix, **ask).ids.tolist() == [found]
    else:
        with pytest.raises(AmbiguousMaskError, match=found):
            derive_segments(matrix, **ask)


@pytest.mark.parametrize(
    ("ids", "size"),
    [
        ([[1, 1, 1, 2, 2, 2]], 3),
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
    if size is None:
        assert derive_segments(dense(packed), keep=packed.keep) == packed
        return
    with pytest.raises(AmbiguousMaskError, match=rf"chunked\({size}\)"):
        derive_segments(dense(packed), keep=packed.keep)


def test_a_2d_mask_turned_around_is_not_a_row_of_single_tokens():
    """Padding with a forced diagonal: inverted, it looks like sequences of one token beside padding."""
    segments = Segments.from_lengths([3], 6, "left")
    matrix = dense(segments) | torch.eye(6, dtype=torch.bool)
    assert derive_segments(matrix, keep=segments.keep) == segments
    with pytest.raises(AmbiguousMaskError, match="inverted"):
        derive_segments(matrix, keep=~segments.keep)
    ones = Segments.from_lengths([[1] * 6], 8)  # nor is padding that attends itself alone
    assert derive_segments(torch.eye(8, dtype=torch.bool)[None], keep=ones.keep, **CAUSAL) == ones


@given(strategies.attentions(), st.sampled_from(["keep", "masked"]), st.data())
def test_one_flipped_place_is_noticed_in_every_real_row_and_in_no_other(attention, polarity, data):
    """Beside the 2D mask, with all declared: what is found then gives the rows of all real tokens, to the place."""
    segments, pattern = attention
    assume(segments.num_tokens and not (segments.packed and pattern.cuts))
    B, S = segments.shape
    full = dense(segments, pattern=pattern, polarity=polarity)
    at = b, _, q, _ = tuple(data.draw(st.integers(0, n - 1)) for n in (B, 1, S, S))
    full[at] = ~full[at]
    with contextlib.suppress(CollateError):
        found = derive_segments(full, polarity=polarity, pattern=pattern, keep=segments.keep)
        assert found != segments or not segments.array[b, q]
        same = dense(found, pattern=pattern, polarity=polarity) == full
        assert same[:, 0][segments.keep].all()


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
    "holes": Segments.from_keep(np.arange(WIDE)[None] % 3 > 0),
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
