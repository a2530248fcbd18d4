"""Positions: who is given them, and which; that real models read them so: tests/integration/test_model_sweeps.py."""

from types import SimpleNamespace

import pytest
import torch

from collate_npu import CollateError, Segments
from collate_npu.consumers.mask_routing import Case, Model, consumer_named
from collate_npu.consumers.positions import kind_of, positions_for, restart
from collate_npu.errors import UnsupportedFormError
from collate_npu.masks.sources import Sources

LEFT, RIGHT = (Segments.from_lengths([2, 4], side=side) for side in ("left", "right"))
WHOLE, PACKED = Segments.from_lengths([4, 4]), Segments.from_lengths([[3, 2]])
IMAGE = {"pixel_values": torch.zeros(1)}
BY_AXES = Model(config=SimpleNamespace(), positions="axes", needs_mask_2d=False)
BY_IDS = Model(config=SimpleNamespace(), positions="padding_idx", first_position=2, needs_mask_2d=False)


def given(model, segments, keys, counted=False):
    sources = Sources.of({"input_ids": torch.full(segments.shape, 5).masked_fill(~segments.keep, 1)} | keys)
    sources.counted = counted
    case = Case(segments=segments, model=model, call=sources)
    return positions_for(consumer_named("transformers"), case, sources, None)


def axes(segments, count=3):
    return torch.stack([segments.position_ids + n for n in range(count)])


def test_a_model_of_several_axes_makes_them_where_it_can():
    assert given(BY_AXES, LEFT, IMAGE) is None
    assert torch.equal(given(BY_AXES, LEFT, {}), LEFT.position_ids)
    assert torch.equal(given(BY_AXES, PACKED, {}), PACKED.position_ids.expand(4, 1, 5))
    own, four = axes(PACKED), axes(PACKED, 4)
    assert torch.equal(given(BY_AXES, PACKED, {"position_ids": own}), torch.cat([PACKED.position_ids[None], own]))
    assert torch.equal(given(BY_AXES, PACKED, {"position_ids": four}), four)
    flat = torch.tensor([[0, 1, 2, 0, 9]])
    assert torch.equal(given(BY_AXES, PACKED, {"position_ids": flat}), torch.stack([PACKED.position_ids, flat, flat, flat]))
    with pytest.raises(UnsupportedFormError, match="Where images stand"):
        given(BY_AXES, PACKED, IMAGE)


@pytest.mark.parametrize("positions", [[[0] * 4] * 2, [[0, 1, 2, 1], [0, 1, 2, 3]], [[0, 1, 5, 4], [0, 3, 2, 1]]], ids=str)
def test_positions_that_fall_or_stand_are_nobodys(positions):
    """With a left mask they were passed on, and the answer was off by 0.12."""
    model = Model(config=SimpleNamespace(), needs_mask_2d=False)
    for segments in (LEFT, WHOLE):
        with pytest.raises(CollateError, match=r"position_ids: \d bad row"):
            given(model, segments, {"position_ids": torch.tensor(positions)})
        assert given(model, segments, {"position_ids": torch.tensor([[0, 4, 5, 9]] * 2)}).tolist() == [[0, 4, 5, 9]] * 2
    right = LEFT.position_ids.masked_fill(~LEFT.keep, 1)
    assert given(model, LEFT, {"position_ids": right}) is right, "with what they say of padding"


@pytest.mark.parametrize("counted", [False, True])
def test_axes_that_are_given_stay_and_a_model_that_counts_from_two_is_given_them_so(counted):
    own = axes(LEFT)
    assert given(BY_AXES, LEFT, {"position_ids": own}, counted) is own
    assert torch.equal(given(BY_AXES, PACKED, {"position_ids": axes(PACKED)}, counted)[1:], axes(PACKED))
    model = Model(config=SimpleNamespace(), positions="places", first_position=2, needs_mask_2d=False)
    assert torch.equal(given(model, LEFT, {"position_ids": LEFT.position_ids}, counted), LEFT.position_ids + 2)
    own = {"position_ids": LEFT.position_ids + 7, "text_position_ids": LEFT.position_ids}
    assert given(model, LEFT, own, counted=True) is own["position_ids"]


@pytest.mark.parametrize("start", range(-3, 5))
@pytest.mark.parametrize("first", [0, 2])
def test_what_positions_count_and_from_where(start, first):
    begins, places = start in (0, first), torch.arange(4)[None]
    assert kind_of(LEFT.position_ids + start, LEFT, first) == ("derived" if start == 0 else "own")
    assert kind_of(RIGHT.position_ids + start, RIGHT, first) == ("derived" if start == 0 else "own")
    assert kind_of(places + start, LEFT, first) == ("places" if begins else "own")
    assert kind_of(places[:, :3] + start, LEFT, first) == kind_of((places + start).expand(3, 2, 4), LEFT, first) == "own"


def test_a_model_that_counts_by_ids_is_told_where_padding_is_none_of_its():
    assert given(BY_IDS, RIGHT, {}) is None
    assert given(BY_IDS, WHOLE, {}) is None
    strange = {"input_ids": torch.full((2, 4), 5)}
    assert given(BY_IDS, RIGHT, strange).tolist() == [[2, 3, 1, 1], [2, 3, 4, 5]]
    own = {"input_ids": torch.tensor([[5, 1, 5, 5, 5]])}  # its padding id among the tokens
    assert given(BY_IDS, PACKED, own).tolist() == [[2, 1, 3, 2, 3]]


def test_whether_positions_begin_again_with_each_sequence_and_there_alone():
    two = Segments.from_lengths([[3, 2], [1, 4]])
    for segments in (PACKED, WHOLE, two):
        text = segments.position_ids
        for positions in (text, text + 7, torch.stack([text, 0 * text, 5 * text])):
            assert restart(positions, segments)
            assert not restart(positions, Segments.from_lengths([[1, 4]] * len(segments.ids)))
        assert not restart(2 * text, segments)
    assert not restart(LEFT.position_ids, LEFT)
    assert not restart(None, PACKED)
