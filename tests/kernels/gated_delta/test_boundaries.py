"""Boundaries of a flat row: every token covered once, and no real token in the sequence of another."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import segment_ids

from collate_npu import Segments, UnsupportedFormError
from collate_npu.kernels.gated_delta import flat_offsets

ROW = Segments.from_ids([[1, 1, 1, 0, 2, 2, 0, 0]])


def test_the_picture():
    assert flat_offsets(ROW) == (0, 3, 4, 6, 8)
    assert flat_offsets(ROW, padding="behind") == (0, 4, 8)
    assert flat_offsets(ROW, keep_padding=False) == (0, 3, 5)


def test_of_several_rows_the_padding_is_taken_out_unless_it_is_kept():
    rows = Segments.from_lengths([3, 5])
    assert flat_offsets(rows) == (0, 3, 8)
    assert flat_offsets(rows, keep_padding=True) == (0, 3, 5, 10)
    assert flat_offsets(rows, keep_padding=True, padding="behind") == (0, 5, 10)


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


def test_refusals_name_row_and_way_out():
    with pytest.raises(UnsupportedFormError, match=r"row 0: got padding inside a sequence[\s\S]*keep_padding=False"):
        flat_offsets(Segments.from_keep([[1, 0, 1]]))
    assert flat_offsets(Segments.from_keep([[1, 0, 1]]), keep_padding=False) == (0, 2)
    left = Segments.from_lengths([2], width=4, side="left")
    with pytest.raises(UnsupportedFormError, match=r"before the first[\s\S]*padding='own'"):
        flat_offsets(left, padding="behind")
    assert flat_offsets(left) == (0, 2, 4)
    with pytest.raises(UnsupportedFormError, match="at least one token"):
        flat_offsets(Segments.from_lengths([0], width=4))
