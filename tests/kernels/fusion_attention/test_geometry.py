"""The compressed masks and the bands, element by element. What each mode blocks is tested with the reference, and that
blocks of query rows, put together, are the whole, with the check."""

import itertools

import torch

from collate_npu.kernels.fusion_attention import prefix_triangle, triangle
from collate_npu.kernels.fusion_attention.operator_call import band_leaves_rows_empty, outside_band, outside_prefix


def test_the_compressed_masks_are_the_documents() -> None:
    rows, columns = torch.arange(2048)[:, None], torch.arange(2048)
    assert torch.equal(triangle(), columns > rows)
    assert torch.equal(prefix_triangle()[:2048], triangle())
    assert torch.equal(prefix_triangle()[2048:], (columns >= 1024).expand(1024, 2048))
    for make in (triangle, prefix_triangle):
        make().logical_not_()
        assert not make()[0, 0], "each call returns a tensor of its own"


def test_bands_count_from_their_corner() -> None:
    for made, rows in {
        outside_band(3, 5, 1, 0): "⬚■■■■ ⬚⬚■■■ ■⬚⬚■■",
        outside_band(3, 5, 1, 0, 5 - 3): "■⬚⬚■■ ■■⬚⬚■ ■■■⬚⬚",
        outside_band(4, 4, 2, -1): "■■■■ ⬚■■■ ⬚⬚■■ ■⬚⬚■",
        outside_band(2, 4, 9, 0): "⬚■■■ ⬚⬚■■",
        outside_band(4, 2, 9, 0, 2 - 4): "■■ ■■ ⬚■ ⬚⬚",
        outside_prefix(3, 3, 2): "⬚⬚■ ⬚⬚■ ⬚⬚⬚",
    }.items():
        assert " ".join("".join("■" if x else "⬚" for x in row) for row in made.tolist()) == rows


def test_a_band_that_leaves_rows_empty_is_told_without_building_it() -> None:
    seen = set()
    for Q, K, before, after in itertools.product(range(1, 5), range(1, 5), range(-3, 4), range(-3, 4)):
        for shift in (0, K - Q):
            empty = bool(outside_band(Q, K, before, after, shift).all(-1).any())
            assert band_leaves_rows_empty(Q, K, before, after, shift) == empty
            seen.add(empty)
    assert seen == {False, True}
