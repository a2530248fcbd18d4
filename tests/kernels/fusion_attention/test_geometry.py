"""The compressed masks and the bands, against the documents' words, element by element."""

from __future__ import annotations

import itertools

import pytest
import torch

from collate_npu.kernels.fusion_attention.geometry import (
    Corner,
    above_diagonal,
    band_leaves_rows_empty,
    outside_band,
    outside_prefix,
    prefix_triangle,
    triangle,
)


def test_the_triangle_is_true_above_the_diagonal() -> None:
    rows, columns = torch.arange(2048)[:, None], torch.arange(2048)
    assert torch.equal(triangle(), columns > rows)


def test_the_prefix_triangle_stands_on_a_half_open_block() -> None:
    mask = prefix_triangle()
    assert mask.shape == (3072, 2048)
    assert torch.equal(mask[:2048], triangle())
    assert not mask[2048:, :1024].any()
    assert mask[2048:, 1024:].all()


def test_each_call_returns_a_tensor_of_its_own() -> None:
    for make in (triangle, prefix_triangle):
        make().logical_not_()
        assert not make()[0, 0]


def rows(blocked: torch.Tensor) -> list[str]:
    return ["".join("■" if x else "⬚" for x in row) for row in blocked.tolist()]


def test_bands_count_from_their_corner() -> None:
    assert rows(outside_band(3, 5, 1, 0)) == ["⬚■■■■", "⬚⬚■■■", "■⬚⬚■■"]
    assert rows(outside_band(3, 5, 1, 0, "bottom-right")) == ["■⬚⬚■■", "■■⬚⬚■", "■■■⬚⬚"]
    assert rows(outside_band(4, 4, 2, -1)) == ["■■■■", "⬚■■■", "⬚⬚■■", "■⬚⬚■"]


@pytest.mark.parametrize("corner", ["top-left", "bottom-right"])
def test_a_band_that_leaves_rows_empty_is_told_without_building_it(corner: Corner) -> None:
    seen = set()
    for Q, K, before, after in itertools.product(range(1, 5), range(1, 5), range(-3, 4), range(-3, 4)):
        empty = bool(outside_band(Q, K, before, after, corner).all(-1).any())
        assert band_leaves_rows_empty(Q, K, before, after, corner) == empty
        seen.add(empty)
    assert seen == {False, True}


def test_causal_corners_and_prefixes() -> None:
    assert rows(above_diagonal(2, 4, "top-left")) == ["⬚■■■", "⬚⬚■■"]
    assert rows(above_diagonal(2, 4, "bottom-right")) == ["⬚⬚⬚■", "⬚⬚⬚⬚"]
    assert rows(above_diagonal(4, 2, "bottom-right")) == ["■■", "■■", "⬚■", "⬚⬚"]
    assert rows(outside_prefix(3, 3, 2)) == ["⬚⬚■", "⬚⬚■", "⬚⬚⬚"]
