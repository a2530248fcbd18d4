"""Forms: every builder gives the same truth as a loop over queries and keys; places of a flat row hold one sequence each."""

import re
from functools import partial
from itertools import product

import numpy as np
import oracle
import pytest
import strategies
import torch
from hypothesis import assume, given, settings, strategies as st
from live_bytes import peak_bytes
from rotation import some
from strategies import segment_ids

from collate_npu import CollateError, Pattern, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.masks import block_mask, dense, none_is_exact, varlen
from collate_npu.masks.forms import (
    EVALUATED_BYTES,
    add_tail,
    aligned,
    fitting_places,
    least_room,
    mask_mod,
    offsets_of,
    open_empty_rows,
    own_places,
)

DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


# --- dense against the definition


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


# --- refusals


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        *(({"rows": rows}, "rows") for rows in ([-1], [5], [0, 5], [[1]], [0.5], torch.ones(5, dtype=torch.bool))),
        ({"polarity": "bias", "dtype": torch.int64}, "dtype"),
        ({"polarity": "both"}, "polarity"),
    ],
)
def test_what_no_dense_form_has_is_refused(settings, key):
    with pytest.raises(CollateError, match=f"^{key}: "):
        dense(Segments.from_lengths([3, 5]), **settings)


def test_the_byte_limit_counts_what_would_be_built():
    segments = Segments.from_lengths([3, 5])
    assert dense(segments, max_mask_bytes=50).numel() == 50
    for ask in ({"max_mask_bytes": 49}, {"max_mask_bytes": 199, "polarity": "bias"}):
        with pytest.raises(UnsupportedFormError, match=r"\[2, 1, 5, 5\].*max_mask_bytes"):
            dense(segments, **ask)
    assert dense(segments, rows=[4], max_mask_bytes=10).numel() == 10


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


@pytest.mark.parametrize("form", [dense, mask_mod])
def test_a_prefix_has_one_length_or_one_for_each_sequence(form):
    with pytest.raises(CollateError, match=r"3 lengths.*holds 2 sequences"):
        form(Segments.from_lengths([3, 5]), pattern=Pattern.prefix([1, 2, 3]))


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


# --- varlen


@given(strategies.segments())
def test_varlen_lays_out_the_real_tokens_and_a_tail_as_one_more_sequence(segments):
    lengths = [n for row in segments.lengths for n in row]
    assert varlen(segments) == Segments.from_lengths([lengths])
    flat = Segments.from_lengths([lengths], sum(lengths) + 2)
    assert varlen(flat, keep_tail=True) == Segments.from_lengths([[*lengths, 2]])
    assert varlen(varlen(segments), keep_tail=True) == varlen(segments)
    with pytest.raises(UnsupportedFormError):
        varlen(Segments([[1, 1, 0, 2]]), keep_tail=True)


@pytest.mark.parametrize(
    ("places", "longest", "expected"),
    [
        (None, None, {"max_length_k": 3, "seq_idx": [[0, 0, 0, 1, 1, 2, 2, 2]], "seq_lens": [3, 2]}),
        (None, 5, {"max_length_q": 5, "cu_seq_lens_k": [0, 3, 5, 8]}),
        ([4, 2, 2], 2, {"max_length_q": 4, "cu_seqlens": [0, 3, 5, 5], "seq_lens": [3, 2, 0]}),
        ([4, 2, 2], 4, {"max_length_k": 4, "cu_seqlens_padded": [0, 4, 6, 8], "cu_seq_lens_q": [0, 4, 6, 8]}),
    ],
)
def test_offsets_of_a_flat_row(places, longest, expected):
    told = offsets_of(Segments.from_lengths([[3, 2]], 8), places, longest=longest)
    assert {key: torch.as_tensor(told[key]).tolist() for key in expected} == expected
    assert offsets_of(Segments.from_lengths([[]]))["max_length_q"] == 0


# --- memory

WIDE = Segments.from_lengths([700, 1024], side="left")


TALL = {
    "right": Segments.from_lengths([1000, 600], 1024),
    "left": Segments.from_lengths([1000, 600], 1024, "left"),
    "packed": Segments.from_lengths([[500, 300, 224], [100] * 10]),
    "holes": Segments.from_keep(torch.arange(2048).view(2, 1024) % 7 > 0),
}
DRAWN = ("causal", "bidirectional", Pattern.sliding(100), Pattern.chunked(64), Pattern.prefix(30))


WRITTEN = (("keep", None), ("masked", None), ("bias", None), ("bias", torch.bfloat16))


def test_a_dense_form_takes_its_own_bytes_and_a_fiftieth_more():
    more = []
    for shape, pattern, (polarity, dtype) in some([*product(TALL, DRAWN, WRITTEN)], 5):
        build = partial(dense, TALL[shape], polarity=polarity, dtype=dtype, pattern=pattern)
        size = build().nbytes
        if (peak := peak_bytes(build)) > 1.02 * size:
            more.append((shape, str(pattern), polarity, dtype, peak / size))
    assert more == []


def test_a_block_mask_takes_what_the_limit_counts():
    B, S = WIDE.shape
    limit = EVALUATED_BYTES * B * S * S
    assert peak_bytes(lambda: block_mask(WIDE, max_mask_bytes=limit)) <= limit
    with pytest.raises(UnsupportedFormError):
        block_mask(WIDE, max_mask_bytes=limit - 1)


def test_a_query_that_sees_no_key_sees_itself_and_no_other_changes():
    segments = Segments([[0, 0, 1], [1, 1, 1], [0, 0, 0], [1, 1, 0]])
    before = dense(segments, polarity="masked")
    opened = open_empty_rows(before.clone())
    changed = (opened != before).nonzero().tolist()
    assert changed == [[0, 0, 0, 0], [0, 0, 1, 1], *([2, 0, n, n] for n in range(3))]
    assert not opened.all(-1).any()


# --- places of a flat row, and a tail that is cut so that offsets keep one length


lengths = st.lists(st.integers(1, 20), min_size=1, max_size=5)
multiples = st.sampled_from([1, 2, 4, 6])


def offsets(places):
    return [0, *np.cumsum(places).tolist()]


@given(segment_ids(rows=1, width=10))
def test_own_places_hold_one_sequence_each_at_its_start(ids):
    segments = Segments(ids)
    try:
        places = own_places(segments)
    except UnsupportedFormError:
        assert segments.hole_rows or segments.array[0, 0] == 0
        return
    assert sum(places) == segments.shape[1]
    parts = np.split(segments.array[0], np.cumsum(places)[:-1])
    held = [part[part > 0] for part in parts]
    assert [len(h) for h in held if len(h)] == list(segments.sequence_lengths)
    assert all((part[: len(h)] == n).all() for n, (part, h) in enumerate(zip(parts, held), start=1))
    assert fitting_places(np.array(offsets(places)), segments) == places


@given(lengths, multiples, st.integers(0, 60), st.integers(1, 8) | st.none(), st.booleans(), st.booleans())
def test_a_tail_fills_the_row_and_moves_no_sequence(lengths, multiple, room, count, repeats, behind):
    held = aligned(lengths, multiple)
    width = sum(held) + room * multiple
    try:
        places = add_tail(held, width, max_sequences=count, multiple=multiple, repeats=repeats, behind=behind)
    except CollateError as error:
        for least in map(int, re.findall(r"Raise max_sequences to (\d+)", str(error))):
            assert len(add_tail(held, width, max_sequences=least, repeats=True, behind=behind)) == least
        short = not repeats and count > len(held) and width - sum(held) < least_room(len(held), count, multiple=multiple)
        assert count < len(held) or (count == len(held) and room and not behind) or short
        return
    assert sum(places) == width
    assert len(places) == (count or len(held) + bool(room))
    shared = len(places) == len(held) and room
    assert places[: len(held) - 1] == held[:-1]
    assert places[len(held) - 1] == held[-1] + (room * multiple if shared else 0)
    assert all(place % multiple == 0 for place in places)
    assert behind or not shared
    if repeats:
        assert sorted(places[len(held) :], reverse=True)[1:] == places[len(held) + 1 :]  # empty ones stand last
    else:
        assert min(places) > 0
        assert max(places[len(held) :], default=0) - min(places[len(held) :], default=0) <= multiple


@pytest.mark.parametrize(
    ("width", "count", "behind", "told"),
    [
        (8, None, True, [4, 4]),
        (12, None, True, [4, 4, 4]),
        (15, 5, True, [4, 4, 2, 2, 3]),
        (8, 2, True, [4, 4]),
        (8, 2, False, [4, 4]),
        (12, 2, True, [4, 8]),
        (12, 2, False, "to 3 "),  # where attention looks ahead the tail is one more
        (8, 1, True, "to 2 "),
        (8, 1, False, "to 2 "),
        (12, 1, True, "to 2 "),
        (12, 1, False, "to 3 "),
    ],
)
def test_a_row_without_a_sequence_to_spare(width, count, behind, told):
    if isinstance(told, list):
        assert add_tail([4, 4], width, max_sequences=count, behind=behind) == told
        return
    with pytest.raises(CollateError, match=f"Raise max_sequences {told}"):
        add_tail([4, 4], width, max_sequences=count, behind=behind)


@given(lengths, multiples, st.integers(1, 8))
def test_the_least_room_is_the_least(lengths, multiple, more):
    held = aligned(lengths, multiple)
    count = len(held) + more
    room = least_room(len(held), count, multiple=multiple)
    assert len(add_tail(held, sum(held) + room, max_sequences=count, multiple=multiple)) == count
    with pytest.raises(CollateError, match="Raise the width"):
        add_tail(held, sum(held) + room - 1, max_sequences=count, multiple=multiple)
