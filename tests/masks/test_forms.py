"""Forms: every builder gives the same truth as a loop over queries and keys, and the pictures of the docstrings."""

from __future__ import annotations

from functools import partial

import pytest
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import peak_bytes

from collate_npu import (
    CollateError,
    Pattern,
    Segments,
    UnsupportedFormError,
    block_mask,
    dense,
    mask_mod,
    none_is_exact,
    varlen,
)
from collate_npu.masks.forms import EVALUATED_BYTES, _query_rows, open_empty_rows

DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def within(pattern, q, k, prefix):
    """The definition of each pattern, for places counted from the sequence's first token."""
    if pattern.name == "bidirectional":
        return True
    if pattern.name == "prefix":
        return k <= q or k < prefix
    if pattern.name == "sliding":
        return q - pattern.size < k <= q
    if pattern.name == "chunked":
        return k <= q and q // pattern.size == k // pattern.size
    return k <= q if pattern.name == "causal" else bool(pattern.attends(q, k, 0))


def keep_by_hand(segments, pattern):
    """`[B, S, S]` bool, slowly: keys of the query's sequence; padding belongs to the sequence before it, or the first."""
    pattern = Pattern.of(pattern)
    B, S = segments.shape
    out = torch.zeros(B, S, S, dtype=torch.bool)
    before, N = 0, segments.num_sequences
    prefixes = pattern.of_each(N) if pattern.name == "prefix" else (0,) * N
    for b, ids in enumerate(segments.ids.tolist()):
        owner = 1
        for q in range(S):
            owner = ids[q] or owner
            if owner not in ids:
                continue
            start = ids.index(owner)
            prefix = prefixes[before + owner - 1]
            for k in range(S):
                out[b, q, k] = ids[k] == owner and within(pattern, q - start, k - start, prefix)
        before += max(ids, default=0)
    return out


def drawn(text):
    """A picture of ■ and ⬚ as a bool tensor."""
    return torch.tensor([[char == "■" for char in line.split()] for line in text.strip().splitlines()])


# --- dense against the definition


@given(strategies.attentions())
def test_dense_is_the_definition(attention):
    segments, pattern = attention
    assert torch.equal(dense(segments, pattern=pattern)[:, 0], keep_by_hand(segments, pattern))


@given(strategies.attentions(), st.data())
def test_dense_and_the_predicate_say_the_same(attention, data):
    segments, pattern = attention
    B, S = segments.shape
    rows = data.draw(st.none() | st.lists(st.integers(0, S - 1), max_size=S))
    b, q = torch.arange(B)[:, None, None, None], torch.from_numpy(_query_rows(rows, S))[:, None]
    evaluated = mask_mod(segments, pattern)(b, b, q, torch.arange(S))
    assert torch.equal(evaluated, dense(segments, pattern=pattern, rows=rows))


@given(strategies.attentions(), st.data())
def test_rows_are_rows_of_the_whole(attention, data):
    segments, pattern = attention
    S = segments.shape[1]
    picked = data.draw(st.lists(st.integers(0, S - 1), max_size=2 * S))
    whole = dense(segments, pattern=pattern)
    assert torch.equal(dense(segments, pattern=pattern, rows=picked), whole[:, :, picked])
    assert torch.equal(dense(segments, pattern=pattern, rows=torch.tensor(picked, dtype=torch.int64)), whole[:, :, picked])
    start, stop, step = data.draw(st.tuples(st.integers(-S, S), st.integers(-S, S), st.integers(1, 3)))
    assert torch.equal(dense(segments, pattern=pattern, rows=slice(start, stop, step)), whole[:, :, start:stop:step])


@given(strategies.attentions(), st.sampled_from(DTYPES))
def test_keep_and_masked_are_opposites_in_every_dtype(attention, dtype):
    segments, pattern = attention
    keep, masked = (dense(segments, polarity=polarity, pattern=pattern, dtype=dtype) for polarity in ("keep", "masked"))
    truth = keep_by_hand(segments, pattern)[:, None]
    assert keep.dtype == masked.dtype == dtype
    assert torch.equal(keep, truth.to(dtype))
    assert torch.equal(masked, (~truth).to(dtype))


@given(strategies.attentions(), st.sampled_from(FLOATS))
def test_bias_is_zero_or_the_minimum_of_its_dtype(attention, dtype):
    segments, pattern = attention
    bias = dense(segments, polarity="bias", pattern=pattern, dtype=dtype)
    truth = keep_by_hand(segments, pattern)[:, None]
    assert bias.dtype == dtype
    assert torch.equal(bias, torch.zeros(truth.shape, dtype=dtype).masked_fill(~truth, torch.finfo(dtype).min))


@settings(max_examples=25)
@given(strategies.attentions())
def test_other_devices_get_the_shapes_and_dtypes_of_the_cpu(attention):
    segments, pattern = attention
    for polarity, dtype in (("keep", None), ("masked", torch.uint8), ("bias", torch.bfloat16)):
        here, there = (
            dense(segments, polarity=polarity, pattern=pattern, dtype=dtype, device=device) for device in ("cpu", "meta")
        )
        assert (here.shape, here.dtype) == (there.shape, there.dtype)


# --- pictures

RIGHT = drawn("""
■ ⬚ ⬚ ⬚ ⬚
■ ■ ⬚ ⬚ ⬚
■ ■ ■ ⬚ ⬚
■ ■ ■ ⬚ ⬚
■ ■ ■ ⬚ ⬚
""")
LEFT = drawn("""
⬚ ⬚ ⬚ ⬚ ⬚
⬚ ⬚ ⬚ ⬚ ⬚
⬚ ⬚ ■ ⬚ ⬚
⬚ ⬚ ■ ■ ⬚
⬚ ⬚ ■ ■ ■
""")
FULL = drawn("""
■ ⬚ ⬚ ⬚ ⬚
■ ■ ⬚ ⬚ ⬚
■ ■ ■ ⬚ ⬚
■ ■ ■ ■ ⬚
■ ■ ■ ■ ■
""")
PACKED = drawn("""
■ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚
■ ■ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚
■ ■ ■ ⬚ ⬚ ⬚ ⬚ ⬚ ⬚
⬚ ⬚ ⬚ ■ ⬚ ⬚ ⬚ ⬚ ⬚
⬚ ⬚ ⬚ ■ ■ ⬚ ⬚ ⬚ ⬚
⬚ ⬚ ⬚ ■ ■ ■ ⬚ ⬚ ⬚
⬚ ⬚ ⬚ ■ ■ ■ ■ ⬚ ⬚
⬚ ⬚ ⬚ ■ ■ ■ ■ ■ ⬚
⬚ ⬚ ⬚ ■ ■ ■ ■ ■ ⬚
""")


@pytest.mark.parametrize(("side", "first"), [("right", RIGHT), ("left", LEFT)])
def test_lengths_three_and_five(side, first):
    segments = Segments.from_lengths([3, 5], side=side)
    keep = dense(segments)
    assert keep.shape == (2, 1, 5, 5)
    assert torch.equal(keep[0, 0], first)
    assert torch.equal(keep[1, 0], FULL)
    assert torch.equal(dense(segments, polarity="masked")[0, 0], ~first)


def test_three_and_five_in_one_row():
    assert torch.equal(dense(Segments.from_lengths([[3, 5]], 9))[0, 0], PACKED)


PATTERNS = {
    Pattern.sliding(2): """
■ ⬚ ⬚ ⬚
■ ■ ⬚ ⬚
⬚ ■ ■ ⬚
⬚ ⬚ ■ ■""",
    Pattern.chunked(2): """
■ ⬚ ⬚ ⬚
■ ■ ⬚ ⬚
⬚ ⬚ ■ ⬚
⬚ ⬚ ■ ■""",
    Pattern.prefix(2): """
■ ■ ⬚ ⬚
■ ■ ⬚ ⬚
■ ■ ■ ⬚
■ ■ ■ ■""",
    Pattern.of("bidirectional"): """
■ ■ ■ ■
■ ■ ■ ■
■ ■ ■ ■
■ ■ ■ ■""",
}


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_four_tokens_alone_and_after_left_padding(pattern):
    picture = drawn(PATTERNS[pattern])
    assert torch.equal(dense(Segments.from_lengths([4]), pattern=pattern)[0, 0], picture)
    padded = dense(Segments.from_lengths([4], 7, "left"), pattern=pattern)[0, 0]
    assert torch.equal(padded[3:, 3:], picture)
    assert not padded[:, :3].any()


def test_a_hole_is_blocked_for_all_and_its_distance_still_counts():
    picture = drawn("""
■ ⬚ ⬚ ⬚
■ ⬚ ⬚ ⬚
⬚ ⬚ ■ ⬚
⬚ ⬚ ■ ■""")
    assert torch.equal(dense(Segments.from_ids([[1, 0, 1, 1]]), pattern=Pattern.sliding(2))[0, 0], picture)


def test_prefixes_of_their_own():
    keep = dense(Segments.from_lengths([[2, 2]]), pattern=Pattern.prefix((0, 2)))[0, 0]
    assert torch.equal(keep, drawn("■ ⬚ ⬚ ⬚\n■ ■ ⬚ ⬚\n⬚ ⬚ ■ ■\n⬚ ⬚ ■ ■"))


# --- refusals


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        ({"polarity": "attend"}, "polarity: got 'attend'"),
        ({"polarity": "bias", "dtype": torch.int32}, "dtype: got torch.int32"),
        ({"rows": [0, 5]}, "rows: got 0..5. Query rows lie in 0..4"),
        ({"rows": [-1]}, "rows: got -1..-1"),
        ({"pattern": "sliding"}, "Pattern.sliding(window)"),
        ({"pattern": Pattern.prefix((1, 2, 3))}, "The batch holds 2 sequences"),
    ],
)
def test_settings_without_a_meaning_are_refused(ask, told):
    with pytest.raises(CollateError) as raised:
        dense(Segments.from_lengths([3, 5]), **ask)
    assert told in str(raised.value)


def test_the_byte_limit_counts_what_would_be_built():
    segments = Segments.from_lengths([3, 5])
    assert dense(segments, max_mask_bytes=50).numel() == 50
    for ask in ({"max_mask_bytes": 49}, {"max_mask_bytes": 199, "polarity": "bias"}):
        with pytest.raises(UnsupportedFormError, match=r"\[2, 1, 5, 5\].*max_mask_bytes"):
            dense(segments, **ask)
    assert dense(segments, rows=[4], max_mask_bytes=10).numel() == 10


def test_the_byte_limit_is_checked_before_anything_is_built():
    with pytest.raises(UnsupportedFormError, match=r"16.00 GiB .*varlen"):
        dense(Segments.from_lengths([1 << 17]))


# --- predicates and BlockMask


@settings(max_examples=40)
@given(strategies.attentions(strategies.segments(width=6)))
def test_block_mask_keeps_what_dense_keeps(attention):
    from torch.nn.attention.flex_attention import create_mask

    segments, pattern = attention
    B, S = segments.shape
    block = block_mask(segments, pattern=pattern, block_size=4)
    keep = dense(segments, pattern=pattern)
    assert torch.equal(create_mask(block.mask_mod, B, None, S, S, device="cpu"), keep)
    blocks = -(-S // 4)
    kept = torch.nn.functional.pad(keep, (0, 4 * blocks - S, 0, 4 * blocks - S)).view(B, 1, blocks, 4, blocks, 4)
    assert torch.equal(block.to_dense().bool(), kept.any(dim=(3, 5)))


def test_mask_mod_takes_the_indices_flex_attention_gives():
    attends = mask_mod(Segments.from_lengths([3, 5], side="left"))
    b, h, q, k = (torch.tensor(n) for n in (0, 0, 4, 2))
    assert attends(b, h, q, k)
    assert not attends(b, h, k, q)
    assert not attends(b, h, q, torch.tensor(1))


# --- None


@given(strategies.attentions())
def test_none_is_exact_where_plain_causal_attention_shows_every_real_token_the_same(attention):
    segments, pattern = attention
    S = segments.shape[1]
    verdict = none_is_exact(segments, pattern)
    plain = torch.ones(S, S, dtype=torch.bool).tril()
    same = all(
        torch.equal(dense(segments, pattern=pattern)[b, 0][real], plain[real]) for b, real in enumerate(segments.keep)
    )
    assert verdict.why
    assert bool(verdict) == verdict.ok
    if verdict:
        assert same
    elif pattern.name == "causal":
        assert not same


@pytest.mark.parametrize(
    ("segments", "pattern", "why"),
    [
        (Segments.from_lengths([3, 5]), "causal", None),
        (Segments.from_lengths([3, 5], 9), "causal", None),
        (Segments.from_lengths([5, 5], side="left"), "causal", None),
        (Segments.from_lengths([3, 5], side="left"), "causal", "on the left"),
        (Segments.from_ids([[1, 0, 1]]), "causal", "between real tokens"),
        (Segments.from_lengths([[3, 5]]), "causal", "several sequences"),
        (Segments.from_lengths([3, 5]), Pattern.sliding(4), "sliding(4)"),
        (Segments.from_lengths([3, 5]), Pattern.chunked(4), "chunked(4)"),
        (Segments.from_lengths([3, 5]), "bidirectional", "bidirectional"),
        (Segments.from_lengths([3, 5]), Pattern.prefix(2), "prefix(2)"),
    ],
)
def test_when_none_is_exact(segments, pattern, why):
    verdict = none_is_exact(segments, pattern)
    assert verdict.ok == (why is None)
    assert (why or "padding on the right only") in verdict.why


# --- varlen


@given(strategies.segments())
def test_varlen_lays_out_the_real_tokens(segments):
    form = varlen(segments)
    lengths = [n for row in segments.lengths for n in row]
    assert form.cu_seqlens.tolist() == list(form.cu_seqlens_host) == list(segments.cu_seqlens_host)
    assert form.position_ids.tolist() == [[p for n in lengths for p in range(n)]]
    assert form.seq_idx.tolist() == [[i for i, n in enumerate(lengths) for _ in range(n)]]
    assert (form.max_length, form.num_sequences) == (max(lengths, default=0), len(lengths))
    assert (form.cu_seqlens.dtype, form.position_ids.dtype, form.seq_idx.dtype) == (torch.int32, torch.int64, torch.int32)


def test_a_tail_is_one_more_sequence_and_not_a_real_one():
    form = varlen(Segments.from_lengths([[3, 5]], 10), keep_tail=True)
    assert form.cu_seqlens_host == (0, 3, 8, 10)
    assert form.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 0, 1]]
    assert form.seq_idx.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, 2, 2]]
    assert form.num_sequences == 2
    assert varlen(Segments.from_lengths([[3, 5]]), keep_tail=True).cu_seqlens_host == (0, 3, 8)


def test_the_longest_may_be_the_tail():
    assert varlen(Segments.from_lengths([[1]], 8), keep_tail=True).max_length == 7


@pytest.mark.parametrize(
    "segments", [Segments.from_lengths([3, 5]), Segments.from_lengths([3], 5, "left"), Segments.from_ids([[1, 0, 2]])]
)
def test_a_tail_needs_one_flat_row(segments):
    with pytest.raises(UnsupportedFormError, match="one flat row"):
        varlen(segments, keep_tail=True)


# --- memory

WIDE = Segments.from_lengths([700, 1024], side="left")


TALL = {
    "right": Segments.from_lengths([1000, 600], 1024),
    "left": Segments.from_lengths([1000, 600], 1024, "left"),
    "packed": Segments.from_lengths([[500, 300, 224], [100] * 10]),
    "holes": Segments.from_keep(torch.arange(2048).view(2, 1024) % 7 > 0),
}
DRAWN = ("causal", "bidirectional", Pattern.sliding(100), Pattern.chunked(64), Pattern.prefix(30))


@pytest.mark.parametrize("shape", TALL)
@pytest.mark.parametrize("pattern", DRAWN, ids=str)
@pytest.mark.parametrize(("polarity", "dtype"), [("keep", None), ("masked", None), ("bias", None), ("bias", torch.bfloat16)])
def test_a_dense_form_takes_its_own_bytes_and_a_fiftieth_more(shape, pattern, polarity, dtype):
    build = partial(dense, TALL[shape], polarity=polarity, dtype=dtype, pattern=pattern)
    size = build().nbytes
    peak_bytes(build)  # first calls import and cache
    assert peak_bytes(build) <= 1.02 * size


@pytest.mark.parametrize("polarity", ["keep", "masked", "bias"])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_dense_form_takes_what_the_limit_counts(polarity, dtype):
    """`max_mask_bytes` counts the mask; nothing of its size stands beside it while it is built."""
    build = partial(dense, WIDE, polarity=polarity, dtype=dtype if polarity == "bias" else None)
    size = build().nbytes  # first calls import and cache
    assert peak_bytes(build) <= 1.05 * size
    with pytest.raises(UnsupportedFormError):
        build(max_mask_bytes=size - 1)
    assert build(max_mask_bytes=size).nbytes == size


def test_a_block_mask_takes_what_the_limit_counts():
    B, S = WIDE.shape
    block_mask(WIDE)
    assert peak_bytes(lambda: block_mask(WIDE)) <= EVALUATED_BYTES * B * S * S
    with pytest.raises(UnsupportedFormError):
        block_mask(WIDE, max_mask_bytes=EVALUATED_BYTES * B * S * S - 1)


def test_a_query_that_sees_no_key_sees_itself_and_no_other_changes():
    segments = Segments.from_lengths([1, 3, 0], 3, side="left")
    before = dense(segments, polarity="masked")
    opened = open_empty_rows(before.clone())
    changed = (opened != before).nonzero().tolist()
    assert changed == [[0, 0, 0, 0], [0, 0, 1, 1], *([2, 0, n, n] for n in range(3))]
    assert not opened.all(-1).any()
