"""Forms: every builder gives the same truth as a loop over queries and keys; places of a flat row hold one sequence each."""

import oracle
import pytest
import strategies
import torch
from hypothesis import assume, given, settings, strategies as st
from live_bytes import peak_bytes
from torch.fx.experimental.proxy_tensor import make_fx

from collate_npu import BatchAdapter, CollateError, Pattern, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.masks import block_mask, dense, none_is_exact, varlen
from collate_npu.masks.forms import EVALUATED_BYTES, mask_mod

DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


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


@given(strategies.attentions(), st.sampled_from(DTYPES), st.sampled_from(FLOATS))
def test_each_polarity_writes_the_truth_in_every_dtype(attention, dtype, floats):
    segments, pattern = attention
    sizes = {*pattern.of_each(segments.num_sequences)} if pattern.name == "prefix" else {getattr(pattern, "size", 0)}
    assume(len(sizes) == 1)
    truth = torch.tensor(oracle.dense(segments.ids.tolist(), pattern.name, *sizes), dtype=torch.bool)
    bias = torch.zeros(truth.shape, dtype=floats).masked_fill(~truth, torch.finfo(floats).min)
    for polarity, written in (("keep", truth.to(dtype)), ("masked", (~truth).to(dtype)), ("bias", bias)):
        built = dense(segments, polarity=polarity, pattern=pattern, dtype=written.dtype)
        assert built.dtype == written.dtype
        assert torch.equal(built, written)


def test_each_sequence_has_its_own_prefix():
    segments, prefixes = Segments([[1, 1, 0, 2, 2, 2], [0, 1, 1, 1, 2, 2]]), (2, 3, 1, 0)
    found, rows = dense(segments, pattern=Pattern.prefix(prefixes)), segments.ids.tolist()
    for n, size in enumerate(prefixes):
        own = segments.ids[n // 2] == n % 2 + 1
        truth = torch.tensor(oracle.dense(rows, "prefix", size), dtype=torch.bool)
        assert torch.equal(found[n // 2, 0, own], truth[n // 2, 0, own])


def test_the_byte_limit_counts_what_would_be_built():
    width = 1 << 15  # four rows of it are 4 GiB of bool
    for rows, ask in ((5, {}), (2, {"polarity": "bias"})):
        with pytest.raises(UnsupportedFormError, match=rf"\[{rows}, 1, {width}, {width}\].*max_mask_bytes"):
            dense(Segments.from_lengths([width] * rows), **ask)
    assert dense(Segments.from_lengths([width] * 5), rows=[4]).numel() == 5 * width
    segments = Segments.from_lengths([3, 5], side="left")
    batch = {"input_ids": torch.ones(2, 5, dtype=torch.int64), "attention_mask_2d": segments.keep}
    made = BatchAdapter(consumer="mindspeed_dense", needs_mask_2d=True, max_mask_bytes=50)(batch)
    assert made["attention_mask"].numel() == 50
    with pytest.raises(UnsupportedFormError, match=r"\[2, 1, 5, 5\].*max_mask_bytes"):
        BatchAdapter(consumer="mindspeed_dense", needs_mask_2d=True, max_mask_bytes=49)(batch)


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


@pytest.mark.parametrize("pattern", ["causal", Pattern.sliding(2), Pattern.chunked(2), Pattern.prefix([1, 2])])
def test_no_predicate_makes_a_tensor(pattern):
    """Inductor lowers none of a constant: flex_attention with a prefix raised on a card."""
    traced = make_fx(mask_mod(Segments.from_lengths([3, 5]), pattern))(*torch.arange(4)[:, None])
    assert not [node for node in traced.graph.nodes if "lift_fresh" in str(node.target)]


@pytest.mark.parametrize("form", [dense, mask_mod])
def test_a_prefix_has_one_length_or_one_for_each_sequence(form):
    with pytest.raises(CollateError, match=r"3 lengths.*holds 2 sequences"):
        form(Segments.from_lengths([3, 5]), pattern=Pattern.prefix([1, 2, 3]))


@given(strategies.attentions())
def test_none_is_exact_where_plain_causal_attention_shows_every_real_token_the_same(attention):
    segments, pattern = attention
    S = segments.shape[1]
    verdict = none_is_exact(segments, pattern)
    plain = torch.ones(S, S, dtype=torch.bool).tril()
    shown = dense(segments, pattern=pattern)[:, 0]
    same = all(torch.equal(shown[b][real], plain[real]) for b, real in enumerate(segments.keep))
    assert verdict.why
    assert bool(verdict) == verdict.ok
    if verdict:
        assert same
    elif pattern.name == "causal":
        assert not same


@given(strategies.segments())
def test_varlen_lays_out_the_real_tokens_and_a_tail_as_one_more_sequence(segments):
    lengths = [n for row in segments.lengths for n in row]
    assert varlen(segments) == Segments.from_lengths([lengths])
    flat = Segments.from_lengths([lengths], sum(lengths) + 2)
    assert varlen(flat, keep_tail=True) == Segments.from_lengths([[*lengths, 2]])
    assert varlen(varlen(segments), keep_tail=True) == varlen(segments)
    with pytest.raises(UnsupportedFormError, match=r"Pass keep_tail=False \(tensors of unpad\)"):
        varlen(Segments([[1, 1, 0, 2]]), keep_tail=True)


WIDE = Segments.from_lengths([700, 1024], side="left")


def test_a_block_mask_takes_what_the_limit_counts():
    B, S = WIDE.shape
    limit = EVALUATED_BYTES * B * S * S
    assert peak_bytes(lambda: block_mask(WIDE)) <= limit
    batch = {"input_ids": torch.ones(B, S, dtype=torch.int64), "attention_mask_2d": WIDE.keep}
    BatchAdapter(consumer="torchtitan", max_mask_bytes=limit)(batch)
    with pytest.raises(UnsupportedFormError, match="block mask being built"):
        BatchAdapter(consumer="torchtitan", max_mask_bytes=limit - 1)(batch)
