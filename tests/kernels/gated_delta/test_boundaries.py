"""Boundaries of a flat row: every token covered once, no real token in the sequence of another; chunk tables equal to their
definition; and padded rows without a mask, whose padding is zeroed."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from rule_inputs import D, Layer, alone, apart
from strategies import segment_ids

from collate_npu import CollateError, Segments, unpad
from collate_npu.errors import UnsupportedFormError
from collate_npu.kernels.gated_delta import chunk_indices, chunk_offsets, flat_offsets, zero_padding
from collate_npu.kernels.gated_delta.arguments import table_block

ROW = Segments.from_ids([[1, 1, 1, 0, 2, 2, 0, 0]])


@pytest.mark.parametrize(
    ("segments", "kept", "own", "behind"),
    [(ROW, (0, 3, 5), (0, 3, 4, 6, 8), (0, 4, 8)), (Segments.from_lengths([3, 5]), (0, 3, 8), (0, 3, 5, 10), (0, 5, 10))],
)
def test_the_pictures(segments, kept, own, behind):
    """Of several rows the padding is taken out unless it is kept."""
    assert flat_offsets(segments, keep_padding=False) == kept
    assert flat_offsets(segments) == (own if len(segments.array) == 1 else kept)
    assert flat_offsets(segments, keep_padding=True) == own
    assert flat_offsets(segments, keep_padding=True, padding="behind") == behind


@given(segment_ids(), st.sampled_from((None, True, False)), st.sampled_from(("own", "behind")))
def test_every_token_is_in_one_sequence_and_no_sequence_holds_two(ids, keep_padding, padding):
    """The oracle walks the places: within one run of offsets all real tokens are of one sequence, and begin it."""
    segments = Segments.from_ids(ids)
    try:
        offsets = flat_offsets(segments, keep_padding=keep_padding, padding=padding)
    except UnsupportedFormError:
        kept = segments.shape[0] == 1 if keep_padding is None else keep_padding
        leading = padding == "behind" and (segments.array[:, 0] == 0).any()
        assert not segments.num_tokens or (kept and (segments.hole_rows or leading))
        return
    kept = offsets[-1] == segments.array.size
    labels = np.where(segments.array > 0, segments.array + 100 * np.arange(len(segments.array))[:, None], 0).reshape(-1)
    labels = labels if kept else labels[labels > 0]
    assert offsets[0] == 0
    assert offsets[-1] == len(labels)
    assert all(a < b for a, b in pairwise(offsets))
    held = [labels[a:b] for a, b in pairwise(offsets)]
    assert all(len({*run[run > 0].tolist()}) <= 1 and (run > 0).tolist() == sorted(run > 0, reverse=True) for run in held)
    assert len({label for run in held for label in {*run[run > 0].tolist()}}) == segments.num_sequences
    assert sum(bool((run > 0).any()) for run in held) == segments.num_sequences


def test_a_batchs_own_offsets_are_taken_as_they_are():
    assert flat_offsets(ROW, padding=[0, 4, 6, 8]) == (0, 4, 6, 8)
    assert flat_offsets(ROW, padding=torch.tensor([0, 4, 6, 8, 8])) == (0, 4, 6, 8)  # an empty one is left out
    assert flat_offsets(ROW, max_sequences=5) == (0, 3, 4, 6, 7, 8)
    assert flat_offsets(ROW, padding="behind", max_sequences=2) == (0, 4, 8)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 8), st.integers(1, 9))
def test_offsets_of_one_length_move_no_sequence(lengths, tail, count):
    segments = Segments.from_lengths([lengths], sum(lengths) + tail)
    try:
        offsets = flat_offsets(segments, max_sequences=count)
    except CollateError:
        assert count < len(lengths) or count > len(lengths) + tail
        return
    assert len(offsets) == count + 1
    assert offsets[-1] == segments.shape[1]
    assert all(a < b for a, b in pairwise(offsets))
    assert [offsets[n] for n in range(len(lengths))] == [start for _, start, _ in segments.spans]


# --- chunk tables


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.sampled_from((16, 32, 64, 128)))
def test_a_table_is_its_definition(lengths, chunk):
    """A row for each chunk that begins inside a sequence: its sequence, and how many chunks of it stand before."""
    offsets = [0, *np.cumsum(lengths).tolist()]
    expected = [[n, start // chunk] for n, length in enumerate(lengths) for start in range(0, length, chunk)]
    assert chunk_indices(offsets, chunk).tolist() == expected
    assert chunk_offsets(offsets, chunk).tolist() == [*(expected.index([n, 0]) for n in range(len(lengths))), len(expected)]


def test_the_sequence_is_named_by_its_place_in_the_offsets():
    """An empty one has no chunk and keeps its number (fla #909)."""
    assert chunk_indices([0, 3, 3, 73], 64).tolist() == [[0, 0], [2, 0], [2, 1]]


@pytest.mark.parametrize(("chunk", "block"), [(1, 1 << 17), (16, 8192), (32, 4096), (64, 2048), (128, 1024), (1 << 16, 2)])
def test_the_cumsum_counts_in_blocks_of_its_own(chunk, block):
    assert [table_block(kind, chunk) for kind in ("rule", "conv", "cumsum")] == [chunk, 64, block]


# --- padded rows without a mask


@pytest.mark.parametrize("side", ["left", "right"])
def test_zeros_at_padding_make_a_layer_exact_where_nothing_has_a_bias(side):
    segments = Segments.from_lengths([3, 9, 1], side=side)
    hidden = torch.randn(*segments.shape, D, generator=torch.Generator().manual_seed(3)).requires_grad_()
    layer = Layer()
    out, expected = unpad(layer(zero_padding(hidden, segments)), segments), alone(layer, hidden, segments)
    assert apart(out, expected, layer, hidden) < 1e-5
    if side == "left":
        assert apart(unpad(layer(hidden), segments), expected, layer, hidden) > 0.1
        biased = Layer(bias=True)
        wrong = unpad(biased(zero_padding(hidden, segments)), segments)
        assert apart(wrong, alone(biased, hidden, segments), biased, hidden) > 0.1


def test_it_is_a_new_tensor_and_packed_rows_holes_and_other_shapes_are_refused():
    hidden = torch.ones(2, 3, 2, 2)
    assert (zero_padding(hidden, Segments.from_lengths([2, 0], width=3)).sum(), hidden.sum()) == (8, 24)
    bad = Segments.from_ids([[1, 1, 2, 2], [1, 0, 1, 1], [1, 1, 1, 0]])
    with pytest.raises(UnsupportedFormError, match=r"2 bad rows\.\n  row 0: got 2 sequences\n  row 1: got padding inside"):
        zero_padding(torch.ones(3, 4, 1), bad)
    with pytest.raises(CollateError, match=r"\[3, 4\]"):
        zero_padding(torch.ones(4, 3, 1), bad)
