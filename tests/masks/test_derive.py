"""Derive: real producers' masks, every shape and dtype, both polarities; and what is refused, by name.

The exhaustive proof that nothing is read wrong is law 2, in test_laws.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from collate_npu import (
    AmbiguousMaskError,
    CollateError,
    Pattern,
    PolarityError,
    Segments,
    UnsupportedFormError,
    dense,
    derive_segments,
)

RIGHT = Segments.from_lengths([3, 5])
LEFT = Segments.from_lengths([3, 5], side="left")
PACKED = Segments.from_lengths([[3, 2], [4]], 6)
HOLES = Segments.from_ids([[1, 0, 1, 1, 0], [1, 1, 1, 1, 1]])
ALL = {"right": RIGHT, "left": LEFT, "packed": PACKED, "holes": HOLES}


def additive(keep, fill, dtype=torch.float32):
    return torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, fill)


# --- what producers really build


def megatron_dataset(segments):
    """True = masked, [B, 1, S, S], keys only (ms-swift) beside causal."""
    return dense(segments, polarity="masked"), segments


def verl_npu(segments):
    """True = masked, rows and keys: padded rows are fully masked (verl models/mcore/util.py:649-655)."""
    rows_and_keys = segments.keep[:, None, :, None] & segments.keep[:, None, None, :]
    return ~(dense(segments) & rows_and_keys), segments


def transformers_eager(segments):
    """Additive, finfo.min (transformers masking_utils.py:632)."""
    return dense(segments, polarity="bias"), segments


def transformers_before(segments):
    """Additive, empty rows unmasked, as `_unmask_unattended` did for SDPA."""
    keep = dense(segments)
    return additive(keep | ~keep.any(dim=-1, keepdim=True), torch.finfo(torch.float32).min), segments


def sdpa(segments):
    return dense(segments), segments


@pytest.mark.parametrize("build", [megatron_dataset, verl_npu, transformers_eager, sdpa])
@pytest.mark.parametrize("name", ALL)
def test_masks_of_real_producers(build, name):
    built, segments = build(ALL[name])
    assert derive_segments(built) == segments


def test_rows_that_see_nothing_were_unmasked():
    built, segments = transformers_before(LEFT)
    assert derive_segments(built) == segments


def test_transformers_of_old_pads_by_one_and_cannot_be_read():
    """Right padding by one, rows and keys masked, unmasked again: the last row is that of a whole sequence."""
    segments = Segments.from_lengths([2, 3])
    keep = dense(segments) & segments.keep[:, None, :, None]
    built = keep | ~keep.any(dim=-1, keepdim=True)
    assert torch.equal(built[0], built[1])
    with pytest.raises(AmbiguousMaskError, match="real tokens throughout, or end in padding"):
        derive_segments(built, polarity="keep", unmasked_rows=True)


def test_the_same_tensor_without_such_a_producer_is_no_padding():
    assert derive_segments(dense(Segments.from_lengths([3, 3])), polarity="keep") == Segments.from_lengths([3, 3])


# --- shapes


SHAPES = {
    "BSS": dense(RIGHT)[:, 0],
    "B1SS": dense(RIGHT),
    "BHSS": dense(RIGHT).expand(-1, 4, -1, -1),
    "not contiguous": dense(RIGHT).transpose(2, 3).contiguous().transpose(2, 3),
}


@pytest.mark.parametrize("name", SHAPES)
def test_square_shapes(name):
    assert derive_segments(SHAPES[name]) == RIGHT
    assert derive_segments(~SHAPES[name]) == RIGHT
    assert derive_segments(SHAPES[name], batch_size=2) == RIGHT


@pytest.mark.parametrize("leading", [(), (1,), (1, 1)])
def test_one_square_for_all_rows(leading):
    triangle = torch.ones(5, 5, dtype=torch.bool).tril().view(*leading, 5, 5)
    assert derive_segments(triangle, batch_size=3) == Segments.from_lengths([5, 5, 5])
    assert derive_segments(~triangle, batch_size=3) == Segments.from_lengths([5, 5, 5])


def test_a_key_is_real_if_any_head_uses_it():
    heads = torch.cat([dense(LEFT, pattern=Pattern.sliding(1)), dense(LEFT)], dim=1)
    assert derive_segments(heads) == LEFT
    assert derive_segments(heads.flip(1)) == LEFT
    assert derive_segments(additive(heads, -torch.inf)) == LEFT


def test_alibi_slopes_of_each_head_are_no_padding():
    place = torch.arange(5)
    slopes = -(place[:, None] - place).abs() * torch.tensor([0.5, 0.25])[:, None, None]
    assert derive_segments(additive(dense(LEFT), torch.finfo(torch.float32).min) + slopes) == LEFT


@pytest.mark.parametrize(("polarity", "keys"), [("keep", RIGHT.keep), ("masked", ~RIGHT.keep)])
def test_key_masks_of_a_declared_polarity(polarity, keys):
    assert derive_segments(keys[:, None, None], polarity=polarity) == RIGHT
    assert derive_segments(keys, polarity=polarity) == RIGHT
    assert derive_segments(keys.long(), polarity=polarity) == RIGHT


def test_additive_key_masks_need_no_declaration():
    assert derive_segments(additive(LEFT.keep, -torch.inf)) == LEFT
    assert derive_segments(additive(LEFT.keep[:, None, None], -1e4)) == LEFT


def test_packing_ids_are_sequences():
    assert derive_segments(torch.tensor([[1, 1, 2, 2, 0], [3, 3, 3, 0, 0]])).lengths == ((2, 2), (3,))


def test_two_dims_are_keys_unless_the_batch_is_another_size():
    triangle = torch.ones(4, 4, dtype=torch.bool).tril()
    assert derive_segments(triangle, batch_size=2) == Segments.from_lengths([4, 4])
    with pytest.raises(AmbiguousMaskError, match=r"keep mask of 4 rows .* or one square mask"):
        derive_segments(triangle)
    assert derive_segments(Segments.from_lengths([4, 2, 1, 3]).keep) == Segments.from_lengths([4, 2, 1, 3])
    assert derive_segments(torch.ones(4, 4, dtype=torch.bool)) == Segments.from_lengths([4] * 4)


# --- values


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ALL)
def test_ones_and_zeros_of_every_dtype(name, dtype):
    """Not `~`: on ints that would make 0 and 1 into -1 and -2, which are both true."""
    keep = dense(ALL[name])
    assert derive_segments(keep.to(dtype)) == ALL[name]
    assert derive_segments((~keep).to(dtype)) == ALL[name]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("fill", ["min", "-inf", "-5e4"])
def test_additive_fills(dtype, fill):
    value = torch.finfo(dtype).min if fill == "min" else float(fill)
    assert derive_segments(additive(dense(LEFT), value, dtype)) == LEFT
    assert derive_segments(additive(dense(LEFT), value, dtype), polarity="bias") == LEFT


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_bias_of_far_tokens_does_not_block(dtype):
    """ALiBi's slope reaches -20000 in long rows; what blocks there is the minimum alone."""
    keep = dense(LEFT)
    far = additive(keep, torch.finfo(dtype).min, dtype) + additive(~keep | torch.eye(5, dtype=torch.bool), -2e4, dtype)
    assert derive_segments(far) == LEFT


def test_a_minimum_plus_a_bias_still_blocks():
    keep = dense(LEFT)
    for dtype in (torch.float16, torch.float32):
        least = torch.finfo(dtype).min
        assert derive_segments(additive(keep, least, dtype) + additive(keep, 20.0, dtype)) == LEFT
        assert derive_segments(additive(keep, least, dtype) + additive(keep, least, dtype)) == LEFT


def test_minus_ten_thousand_in_bfloat16():
    assert derive_segments(additive(dense(LEFT), -1e4, torch.bfloat16)) == LEFT


def test_a_square_of_packing_ids_is_not_read_as_zeros_and_ones():
    ids = torch.tensor([[1, 1, 2, 2, 0]])
    square = (ids[:, None] == ids[:, :, None]) * ids[:, None] * torch.ones(5, 5, dtype=torch.int64).tril()
    try:
        found = derive_segments(square)
    except CollateError:
        return
    assert found.ids.tolist() == ids.tolist()


@pytest.mark.parametrize("polarity", [None, "keep"])
def test_bytes_of_255_are_not_read_as_padding(polarity):
    try:
        found = derive_segments(dense(LEFT).to(torch.uint8) * 255, polarity=polarity)
    except CollateError:
        return
    assert found == LEFT


# --- what a truth beside the mask decides


@pytest.mark.parametrize("name", ALL)
def test_keep_decides_the_polarity_of_key_masks(name):
    keep = ALL[name].keep
    for keys in (keep, ~keep, keep.long(), keep[:, None, None], ~keep[:, None, None]):
        assert torch.equal(derive_segments(keys, keep=keep).keep, keep)


def test_keep_decides_about_padding_that_attends_itself():
    keep = dense(RIGHT) & RIGHT.keep[:, None, :, None] | torch.eye(5, dtype=torch.bool)
    with pytest.raises(AmbiguousMaskError, match="padding that attends itself"):
        derive_segments(keep, polarity="keep")
    assert derive_segments(keep, polarity="keep", keep=RIGHT.keep) == RIGHT


def test_keep_decides_about_a_mask_that_blocks_nothing():
    keep = torch.ones(2, 5, dtype=torch.bool)
    assert derive_segments(torch.ones(2, 1, 5, 5, dtype=torch.bool), keep=keep) == Segments.from_keep(keep)
    assert derive_segments(torch.zeros(2, 1, 5, 5, dtype=torch.bool), keep=keep) == Segments.from_keep(keep)


def test_the_compressed_triangle_beside_a_truth_is_an_ordinary_one():
    triangle = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    assert derive_segments(triangle[None, None], keep=torch.ones(1, 2048)) == Segments.from_lengths([2048])


def test_disagreement_names_all_rows():
    segments = Segments.from_lengths([3, 5, 4])
    other = Segments.from_lengths([4, 5, 5]).keep
    with pytest.raises(CollateError) as raised:
        derive_segments(dense(segments, polarity="bias"), keep=other)
    text = str(raised.value)
    assert "row 0" in text
    assert "row 2" in text
    assert "row 1" not in text
    with pytest.raises(CollateError) as raised:
        derive_segments(segments.keep, keep=other)
    assert "row 0: got 3 real tokens, not 4\n  row 2: got 4 real tokens, not 5" in str(raised.value)
    with pytest.raises(CollateError, match="row 0: got 4 real tokens, not 3"):
        derive_segments(other, keep=segments.keep)


def test_a_causal_mask_without_padding_agrees_with_padding_on_the_right():
    """No real token attends what the 2D mask calls padding, so both compute the same."""
    causal = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    assert derive_segments(causal, keep=RIGHT.keep) == RIGHT
    with pytest.raises(CollateError, match="row 0"):
        derive_segments(causal, keep=LEFT.keep)


def test_plus_infinity_is_refused():
    with pytest.raises(CollateError):
        derive_segments(torch.where(dense(LEFT), torch.inf, -torch.inf))


def test_masks_of_another_width_disagree():
    with pytest.raises(CollateError, match=r"attention_mask: got bool \[2, 5\] beside tokens \[2, 4\]"):
        derive_segments(RIGHT.keep, keep=RIGHT.keep[:, :4])
    with pytest.raises(CollateError, match=r"attention_mask: got bool \[2, 1, 5, 5\] beside tokens \[2, 4\]"):
        derive_segments(dense(RIGHT), keep=RIGHT.keep[:, :4])


# --- declared patterns, and no proof


def test_a_declared_pattern_settles_packed_or_chunked():
    real = Segments.from_lengths([4, 4], 5)
    chunked = dense(real, pattern=Pattern.chunked(2)) & real.keep[:, None, :, None]
    with pytest.raises(AmbiguousMaskError, match=r"Declare pattern='causal' or pattern=Pattern.chunked\(2\)"):
        derive_segments(chunked)
    assert derive_segments(chunked, pattern="causal").lengths == ((2, 2), (2, 2))
    assert derive_segments(chunked, pattern=Pattern.chunked(2)) == real


def test_packed_rows_without_plain_padding_may_end_in_padding_that_attends_itself():
    """Whatever pattern is declared: a padding document, or a forced diagonal, is a block like any other."""
    packed = Segments([[1, 1, 1, 2, 2]])
    for pattern in (None, "causal"):
        with pytest.raises(AmbiguousMaskError, match="padding that attends itself"):
            derive_segments(dense(packed), pattern=pattern)
    assert derive_segments(dense(packed), keep=packed.keep, pattern="causal") == packed


def test_a_declared_pattern_settles_gaps_and_windows():
    segments = Segments.from_ids([[1, 1, 0, 2, 2]])
    apart = dense(segments) & segments.keep[:, None, :, None]
    with pytest.raises(AmbiguousMaskError, match="two sequences, or one under a window of 2"):
        derive_segments(apart)
    assert derive_segments(apart, pattern="causal").lengths == ((2, 2),)


def test_a_declared_pattern_must_explain_the_mask():
    with pytest.raises(AmbiguousMaskError, match="rows that are not those of causal attention"):
        derive_segments(dense(RIGHT, pattern="bidirectional"), polarity="keep", pattern="causal")


def test_custom_attention_is_read_without_proof():
    keep = dense(LEFT)
    keep[:, :, 4, 2] = False
    with pytest.raises(AmbiguousMaskError, match="prove=False"):
        derive_segments(keep)
    assert derive_segments(keep, polarity="keep", prove=False) == LEFT


# --- refusals


@pytest.mark.parametrize(
    ("attention_mask", "settings", "error", "told"),
    [
        (torch.ones(2, 1, 4, 4, dtype=torch.bool), {}, PolarityError, "lengths=[4, 4]"),
        (torch.zeros(2, 1, 4, 4), {}, PolarityError, "Both readings are possible"),
        (torch.zeros(2, 4), {}, PolarityError, "float32 [2, 4] of zeros"),
        (torch.ones(2, 1, 1, 4), {}, PolarityError, "a key mask proves neither"),
        (dense(RIGHT), {"polarity": "bias"}, PolarityError, "A bias is a float tensor"),
        (dense(RIGHT).float(), {"polarity": "bias"}, PolarityError, "more likely a 0/1 mask"),
        (dense(RIGHT, polarity="bias"), {"polarity": "keep"}, PolarityError, "It is additive, not 'keep'"),
        (dense(RIGHT), {"polarity": "true"}, CollateError, "polarity: got 'true'"),
        (dense(RIGHT), {"polarity": "masked"}, AmbiguousMaskError, "row 0: got as 'masked'"),
        (torch.tensor([[1, 2, 0]]), {"polarity": "masked"}, PolarityError, "packing ids"),
        (dense(RIGHT).float() * -5, {}, AmbiguousMaskError, "No value blocks for certain"),
        (dense(RIGHT).long() * -1, {}, CollateError, "An additive mask is a float tensor"),
        (torch.ones(2, 1, 3, 6), {}, AmbiguousMaskError, "3 query rows and 6 keys"),
        (torch.ones(2, 3, 6), {}, AmbiguousMaskError, "context-parallel shard"),
        (torch.ones(6), {}, UnsupportedFormError, "float32 [6]"),
        (torch.ones(1, 1, 1, 4, 4), {}, UnsupportedFormError, "[B,H,S,S]"),
        (dense(RIGHT), {"batch_size": 3}, CollateError, "The batch has 3 rows"),
        (RIGHT.keep, {"batch_size": 3}, CollateError, "The batch has 3 rows"),
        (torch.ones(2048, 2048, dtype=torch.bool).tril(), {}, AmbiguousMaskError, "compressed causal triangle"),
        (torch.ones(2048, 2048, dtype=torch.uint8).triu(1), {}, AmbiguousMaskError, "compressed causal triangle"),
        (torch.ones(1, 1, 2048, 2048).triu(1), {"batch_size": 4}, AmbiguousMaskError, "compressed causal triangle"),
    ],
)
def test_refusals(attention_mask, settings, error, told):
    with pytest.raises(CollateError) as raised:
        derive_segments(attention_mask, **settings)
    assert type(raised.value) is error
    assert told in str(raised.value)


def test_the_compressed_prefix_triangle_is_refused():
    top = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    with pytest.raises(AmbiguousMaskError, match="compressed"):
        derive_segments(torch.cat([top, torch.ones(1024, 2048, dtype=torch.bool)]))


def test_another_square_of_2048_is_derived():
    segments = Segments.from_lengths([2000], 2048)
    assert derive_segments(dense(segments)) == segments
    assert derive_segments(dense(segments)[0, 0], batch_size=1) == segments


@pytest.mark.parametrize(
    "attention_mask",
    [
        torch.zeros(0, 4),
        torch.zeros(0, 1, 4, 4),
        torch.zeros(2, 1, 0, 0),
    ],
)
def test_masks_of_nothing_do_not_crash(attention_mask):
    with contextlib.suppress(CollateError):
        assert derive_segments(attention_mask).num_tokens == 0


def test_the_given_mask_is_left_alone():
    built = dense(LEFT, polarity="bias")
    before = built.clone()
    derive_segments(built)
    assert torch.equal(built, before)


def test_a_declared_pattern_does_not_choose_the_polarity():
    """Turned around, a hole in an encoder's sequence is a causal sequence of one token."""
    keep = dense(Segments.from_ids([[1, 1, 0, 1]]), pattern="bidirectional")
    with pytest.raises(PolarityError, match=r"as 'masked' it is .*, as 'keep' it is bidirectional"):
        derive_segments(keep, pattern="causal")
    assert derive_segments(keep, pattern="bidirectional", polarity="keep").lengths == ((3,),)
