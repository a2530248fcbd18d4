"""Places: what each sequence of a flat row takes up, and a tail that is cut so that offsets keep one length."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from strategies import segment_ids

from collate_npu import CollateError, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.masks.forms import add_tail, aligned, fitting_places, least_room, own_places
from collate_npu.masks.sources import Sources, physical_offsets

lengths = st.lists(st.integers(1, 20), min_size=1, max_size=5)
multiples = st.sampled_from([1, 2, 4, 6])
APART = Segments([[1, 1, 1, 0, 2, 2, 0, 0]])


def offsets(places):
    return [0, *np.cumsum(places).tolist()]


def test_the_picture():
    held = aligned([3, 2], 4)
    assert offsets(held) == [0, 4, 8]
    assert offsets(add_tail(held, 16)) == [0, 4, 8, 16]
    assert offsets(add_tail(held, 16, max_sequences=4, multiple=4)) == [0, 4, 8, 12, 16]
    assert offsets(add_tail(held, 16, max_sequences=4, multiple=4, repeats=True)) == [0, 4, 8, 16, 16]


def test_places_are_those_of_one_row():
    with pytest.raises(UnsupportedFormError, match="unpad"):
        own_places(Segments([[1, 0], [1, 1]]))


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


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([0, 4, 8], [4, 4]),
        ([0, 4, 6, 8], [4, 2, 2]),
        ([0, 4, 6, 8, 8], [4, 2, 2, 0]),
        ([0, 4, 6], None),  # two places of the row are in none
        ([0, 3, 8], None),  # the second sequence begins inside its place
        ([0, 2, 4, 8], None),
        ([0, 8], None),
        ([0, 4, 4, 8], None),  # an empty one before a sequence
    ],
)
def test_offsets_of_a_batch_count_where_they_fit(ends, expected):
    assert fitting_places(np.array(ends), APART) == expected
    batch = {"cu_seqlens": torch.tensor([0, 3, 5]), "cu_seqlens_padded": torch.tensor(ends)}
    assert physical_offsets(Sources(batch), APART) == expected
    assert fitting_places(np.array(ends), Segments([[1, 1, 1, 0, 2, 2, 0, 0]] * 2)) is None


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


def test_more_sequences_than_a_row_has_places_are_refused():
    with pytest.raises(CollateError, match="the most sequences that a row may hold"):
        add_tail([4], 8, max_sequences=1 << 40, repeats=True)


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


def test_no_room_is_needed_where_no_sequence_is_missing_or_empty_ones_may_stand():
    assert least_room(3, None) == least_room(3, 5, repeats=True) == least_room(3, 2) == least_room(3, 3) == 0


@given(lengths, multiples, st.integers(1, 8))
def test_the_least_room_is_the_least(lengths, multiple, more):
    held = aligned(lengths, multiple)
    count = len(held) + more
    room = least_room(len(held), count, multiple=multiple)
    assert len(add_tail(held, sum(held) + room, max_sequences=count, multiple=multiple)) == count
    with pytest.raises(CollateError, match="Raise the width"):
        add_tail(held, sum(held) + room - 1, max_sequences=count, multiple=multiple)


def test_more_tokens_than_the_row_is_wide():
    with pytest.raises(CollateError, match=r"5 tokens with their alignment.*4 tokens wide"):
        add_tail([3, 2], 4)
