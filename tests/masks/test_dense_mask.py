"""Dense masks by `derive_segments`: real producers' masks, every shape and dtype, both polarities; what is refused, by name;
where another reading is possible; one flipped place; and memory.

The exhaustive proof that nothing is read wrong is law 2, in test_laws.
"""

import contextlib
import re
import tracemalloc

import numpy as np
import pytest
import strategies
import torch
from hypothesis import assume, given, strategies as st
from live_bytes import peak_bytes

from collate_npu import CollateError, Pattern, Segments, derive_segments
from collate_npu.errors import AmbiguousMaskError, PolarityError, UnsupportedFormError
from collate_npu.masks import dense, segments_from_batch

RIGHT = Segments.from_lengths([3, 5])
LEFT = Segments.from_lengths([3, 5], side="left")
PACKED = Segments.from_lengths([[3, 2], [4]], 6)
HOLES = Segments.from_ids([[1, 0, 1, 1, 0], [1, 1, 1, 1, 1]])
ALL = {"right": RIGHT, "left": LEFT, "packed": PACKED, "holes": HOLES}


def additive(keep, fill, dtype=torch.float32):
    return torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, fill)


HEADS = {
    "a window in one": torch.cat([dense(LEFT, pattern=Pattern.sliding(1)), dense(LEFT)], dim=1),
    "left in one, right in another": torch.cat([dense(LEFT), dense(RIGHT)], dim=1),
    "packed in one": torch.cat([dense(Segments([[1, 1, 2]] * 2)), dense(Segments.from_lengths([3, 3]))], dim=1),
}


@pytest.mark.parametrize("heads", HEADS)
def test_heads_that_differ_have_no_truth_of_all(heads):
    for full in (HEADS[heads], ~HEADS[heads].flip(1), additive(HEADS[heads], -torch.inf)):
        with pytest.raises(AmbiguousMaskError, match="different from head to head"):
            derive_segments(full)
    valued = additive(dense(LEFT).expand(-1, 2, -1, -1), -torch.inf) + torch.tensor([0.0, -1.0])[:, None, None]  # ALiBi
    assert derive_segments(valued) == LEFT


@pytest.mark.parametrize("full", [[[0, 0, 0], [1, 1, 1]], [[0, 0, 0], [1, 2, 2]], [[True, False]] * 2 + [[False, False]]])
def test_a_row_without_a_token_is_declared(full):
    with pytest.raises(PolarityError, match="no real token"):
        derive_segments(full)
    assert 0 in derive_segments(full, polarity="keep").row_lengths  # the remedy


def test_two_dims_are_keys_unless_the_batch_is_another_size():
    triangle = torch.ones(4, 4, dtype=torch.bool).tril()
    tokens = {"input_ids": [[5, 6, 7, 8]] * 2, "labels": [[5, 6, 7, 8]] * 2}
    assert segments_from_batch({**tokens, "attention_mask": triangle}) == Segments.from_lengths([4, 4])
    with pytest.raises(AmbiguousMaskError, match=r"keep mask of 4 rows .* or one square mask"):
        derive_segments(triangle)
    assert derive_segments(Segments.from_lengths([4, 2, 1, 3]).keep) == Segments.from_lengths([4, 2, 1, 3])
    assert derive_segments(torch.ones(4, 4, dtype=torch.bool)) == Segments.from_lengths([4] * 4)


# --- what a truth beside the mask decides


@pytest.mark.parametrize("name", ALL)
def test_keep_decides_the_polarity_of_key_masks(name):
    keep = ALL[name].keep
    for keys in (keep, ~keep, keep.long(), keep[:, None, None], ~keep[:, None, None]):
        assert torch.equal(derive_segments(keys, keep=keep).keep, keep)


def test_a_causal_mask_without_padding_agrees_with_padding_on_the_right():
    """No real token attends what the 2D mask calls padding, so both compute the same."""
    causal = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    for written in (causal, causal[:, 0], causal[:1], causal[0], causal[0, 0]):
        assert derive_segments(written, keep=RIGHT.keep) == RIGHT
    with pytest.raises(CollateError, match="row 0"):
        derive_segments(causal, keep=LEFT.keep)


# --- refusals

BOTH = (
    "attention_mask: got bool [2, 1, 4, 4]. Both readings are possible: as 'keep' it is Segments(B=2, S=4, "
    "lengths=[4, 4], padding='none'); as 'masked' it is Segments(B=2, S=4, lengths=[0, 0], padding='right'). "
)
TWO, PREFIX = Segments([[0, 1, 1, 2, 2]]), Pattern.prefix([2, 2])
FILLED = torch.tensor([[True] * 3, [False] * 3, [True] * 3])
FIRST = torch.tensor([[True, False, False]] * 3)  # one token, or two that attend both ways
KEPT = torch.tensor([[[True, False], [True, True]]])
SHARD = (
    "attention_mask: got float32 [2, 1, 3, 6]. 3 query rows and 6 keys: a context-parallel shard, or a KV cache. "
    "Derive from the whole mask, before the split; self-attention has as many rows as keys."
)


@pytest.mark.parametrize(
    ("attention_mask", "settings", "error", "told"),
    [
        (torch.ones(2, 1, 4, 4, dtype=torch.bool), {}, PolarityError, BOTH),
        (torch.zeros(2, 1, 4, 4), {}, PolarityError, "Both readings are possible"),
        (torch.ones(1, 1, 1, 1), {"polarity": "keep", "unmasked_rows": True}, AmbiguousMaskError, "all see everything"),
        (torch.zeros(2, 4), {}, PolarityError, "float32 [2, 4] of zeros"),
        (torch.ones(2, 1, 1, 4), {}, PolarityError, "a key mask shows neither"),
        (dense(RIGHT), {"polarity": "masked"}, AmbiguousMaskError, "row 0: got as 'masked'"),
        (torch.tensor([[1, 2, 0]]), {"polarity": "masked"}, PolarityError, "packing ids"),
        (torch.ones(2, 1, 3, 6), {}, AmbiguousMaskError, SHARD),
        (dense(Segments([[1, 1, 1, 2, 2]])), {"pattern": "causal"}, AmbiguousMaskError, "padding that attends itself"),
        (torch.ones(2, 3, 6), {}, AmbiguousMaskError, "3 query rows and 6 keys"),
        (torch.ones(6), {}, UnsupportedFormError, "float32 [6]"),
        (RIGHT.keep, {"keep": torch.ones(5)}, UnsupportedFormError, "float32 [5]"),
        (RIGHT.keep[:, None, None], {"keep": LEFT.keep, "polarity": "keep"}, CollateError, "row 0: got 3 real tokens"),
        (FIRST[None], {"pattern": "causal"}, PolarityError, "as 'masked' it is bidirectional"),
        (FILLED[None], {}, PolarityError, "as 'keep' it is ambiguous too"),
        (torch.stack([FILLED, FIRST]), {"pattern": "causal"}, AmbiguousMaskError, "last rows that see everything"),
        (dense(RIGHT, pattern="bidirectional"), {"pattern": "causal"}, AmbiguousMaskError, "pattern='bidirectional'"),
        (dense(RIGHT, pattern=Pattern.sliding(2)), {"pattern": "causal"}, AmbiguousMaskError, "pattern=Pattern.sliding(2)"),
        (torch.eye(3)[None], {"pattern": Pattern.chunked(2)}, AmbiguousMaskError, "pattern=Pattern.sliding(1)"),
        (dense(TWO, pattern=PREFIX)[0, 0], {"pattern": PREFIX}, AmbiguousMaskError, "or one square mask"),
        (torch.ones(1, 1, 1, 4, 4), {}, UnsupportedFormError, "[B,H,S,S]"),
        (dense(Segments([[1, 1, 2, 2]]))[0, 0], {}, AmbiguousMaskError, "or one square mask"),
        (dense(Segments([[1, 1, 2, 0]]), polarity="bias")[0, 0], {}, AmbiguousMaskError, "or one square mask"),
        (torch.ones(2048, 2048, dtype=torch.bool).tril(), {}, AmbiguousMaskError, "is torch_npu's compressed causal"),
        (torch.ones(2048, 2048, dtype=torch.uint8).triu(1), {}, AmbiguousMaskError, "compressed causal triangle"),
        (torch.ones(1, 1, 2048, 2048).triu(1), {}, AmbiguousMaskError, "compressed causal triangle"),
        (torch.ones(3072, 2048, dtype=torch.bool).triu(1), {}, AmbiguousMaskError, "compressed causal triangle"),
        (torch.full((1, 1, 2048, 2048), -1e4).triu(1), {}, AmbiguousMaskError, "compressed causal triangle"),
        # numbers that mean nothing certain
        (torch.where(KEPT.repeat(2, 1, 1), 0.0, torch.nan), {}, CollateError, "row 0: got NaN\n  row 1: got NaN"),
        (torch.where(KEPT, torch.inf, -torch.inf), {}, CollateError, "+inf"),
        (torch.where(KEPT, 0, -10000), {}, CollateError, "An additive mask is a float tensor"),
        *((torch.where(KEPT, 0.0, n), {}, AmbiguousMaskError, "No value is low enough to block") for n in (-100.0, -6000.0)),
        (torch.where(KEPT, 2, 0), {}, CollateError, "packing ids"),
        (torch.where(KEPT, 0.0, -1e9), {"polarity": "keep"}, PolarityError, "It is additive"),
        (KEPT, {"polarity": "bias"}, PolarityError, "A bias is a float tensor"),
        (KEPT.float(), {"polarity": "bias"}, PolarityError, "blocks nothing"),
        (KEPT, {"polarity": "additive"}, CollateError, "Pass polarity="),
    ],
)
def test_refusals(attention_mask, settings, error, told):
    with pytest.raises(CollateError) as raised:
        derive_segments(attention_mask, **settings)
    assert type(raised.value) is error
    assert told in str(raised.value)


@pytest.mark.parametrize("full", [dense(RIGHT), RIGHT.keep, torch.zeros(0, 5), torch.zeros(0, 1, 5, 5)])
def test_a_mask_of_other_rows_than_its_batch_is_refused(full):
    with pytest.raises(CollateError, match="The batch has 3 rows"):
        segments_from_batch({"input_ids": [[5, 6, 7, 8, 9]] * 3, "attention_mask": full})


@pytest.mark.parametrize(
    ("written", "declared", "attends"),
    [
        ([0, -9984], None, [True, False]),
        ([0, -5000], "bias", [True, False]),
        ([0, -5000, -1e4], None, [True, False, False]),  # half-way is blocked
        ([0, -4999, -1e4], None, [True, True, False]),
        ([0, -100, -torch.inf], None, [True, True, False]),
        ([0, -6e4, -torch.inf], None, [True, False, False]),
        ([0, -2.5e4, -6e4, -torch.inf], None, [True, True, False, False]),
    ],
)
def test_where_a_bias_begins_to_block(written, declared, attends):
    assert derive_segments(torch.tensor([written]).float(), polarity=declared).keep.tolist() == [attends]


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 1, 4, 4), (2, 1, 0, 0), (2, 0, 0)])
def test_masks_of_nothing_hold_no_token(shape):
    assert derive_segments(torch.zeros(shape)).shape == (shape[0], shape[-1])


@pytest.mark.parametrize("shape", [(4,), (2, 5), (3, 4), (3, 1, 4, 4), (2, 1, 4, 5), (2, 1, 5, 4)])
def test_a_mask_that_does_not_fit_its_keep_mask_is_refused_by_its_shape(shape):
    with pytest.raises(CollateError, match=re.escape(str(list(shape)))):
        derive_segments(torch.ones(shape, dtype=torch.bool), polarity="keep", keep=torch.ones(2, 4, dtype=torch.bool))


def test_packing_ids_beside_a_keep_mask():
    ids = torch.tensor([[1, 1, 2, 2, 0], [1, 1, 1, 0, 0]])
    assert derive_segments(ids, keep=ids != 0).ids.tolist() == ids.tolist()
    square = torch.tensor([[1, 2, 2], [1, 1, 2], [1, 1, 1]])  # 1 is a triangle, were it a matrix
    assert derive_segments(square) == Segments(square)


CAUSAL = {"pattern": "causal"}
GAP, LONE, WHOLE = "■⬚⬚⬚⬚ ■■⬚⬚⬚ ⬚⬚⬚⬚⬚ ⬚⬚⬚■⬚ ⬚⬚⬚■■", "■⬚⬚ ■■⬚ ⬚⬚■", "■■■ ■■■ ■■■"
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
        ("■⬚⬚ ■■⬚ ■⬚■", {"prove": False}, [1, 1, 2]),
        ("■⬚⬚⬚⬚ ■■⬚⬚⬚ ■■■⬚⬚ ⬚⬚⬚■⬚ ⬚⬚⬚■■", {"keep": [[1, 1, 1, 0, 0]], **CAUSAL}, [1, 1, 1, 0, 0]),
        ("■■⬚■ ■■⬚■ ⬚⬚⬚⬚ ■■⬚■", {"pattern": "bidirectional"}, [1, 1, 0, 1]),
        (LONE, {"keep": [[1, 1, 0]]}, [1, 1, 0]),
        (LONE, {"keep": [[0, 0, 1]]}, [0, 0, 1]),
        ("■⬚⬚⬚ ■⬚⬚⬚ ■⬚■⬚ ■⬚■■", {"keep": [[1] * 4]}, "token 1 is real in the 2D mask, and does not attend itself"),
        ("■⬚⬚ ■⬚⬚ ■■■", {}, "token 1 is attended by other tokens, and is padding"),
        ("■⬚⬚ ■■⬚ ■⬚■", {}, "rows that no pattern gives"),
        (HOLE_AND_END_FILLED, {"unmasked_rows": True}, [1, 1, 0, 1, 0]),
        (UNFORCED_BETWEEN, CAUSAL, [1, 1, 0, 0, 2]),
        (WHOLE, {"pattern": Pattern.prefix(3)}, [1, 1, 1]),
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
