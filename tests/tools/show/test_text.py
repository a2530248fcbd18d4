"""A sheet on a terminal: never wider than it, and every sign counted."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import free, sided

from collate_npu import ContextParallel, PaddingCollator, Segments, dense
from collate_npu.tools.show.readers import consumer_panels, rank_panels
from collate_npu.tools.show.sheet import Sheet, sheet_of
from collate_npu.tools.show.signs import ASCII, columns, string_of
from collate_npu.tools.show.text import encodable, lines, plain
from collate_npu.tools.show.tokens import Tokens

pytest.importorskip("rich")
pytest.importorskip("transformers")


def drawn(sheet, width=80, height=24):
    return "\n".join(string_of(line) for line in lines(sheet, width, height))


def batch_of(lengths, side="left", **more):
    features = [{"input_ids": [1] * n, "labels": [1] * n, **more} for n in lengths]
    return PaddingCollator(pad_token_id=0, padding_side=side, consumer="megatron", model_type="qwen3")(features)


def squares_of(text):
    """Everything below the last heading of a panel of squares, without the legend."""
    return text.rpartition("row 0")[2].rpartition("\n\n")[0]


@given(free(rows=4, width=30), st.integers(40, 200), st.integers(20, 60))
def test_no_line_is_wider_than_the_terminal(truth, width, height):
    assert max(map(columns, lines(sheet_of(truth), width, height)), default=0) <= width


@given(sided(rows=3, longest=30), st.integers(40, 200))
def test_views_side_by_side_are_no_wider(truth, width):
    batch = {"input_ids": truth.ids, "attention_mask_2d": truth.keep}
    panels = [panel for name in ("megatron", "transformers") for panel in consumer_panels(batch, name, model_type="qwen3")]
    panels += rank_panels(batch, ContextParallel(2, 0, layout="contiguous"))
    sheet = sheet_of(batch)
    out = lines(Sheet(panels=(*sheet.panels, *panels)), width, 40)
    assert max(map(columns, out)) <= width


@given(st.lists(st.integers(1, 1500), min_size=1, max_size=40), st.sampled_from([(80, 24), (120, 40)]))
def test_long_and_many_rows_fit_the_screen(lengths, screen):
    sheet = sheet_of(Segments.from_lengths([41, *lengths], side="left"))
    out = lines(sheet, *screen)
    assert len(out) <= screen[1]
    assert max(map(columns, out)) <= screen[0]


@pytest.mark.parametrize("screen", [(80, 24), (120, 40)])
def test_labels_and_tokens_fit_as_well(screen):
    batch = batch_of([4096, 3000, 100, 7])
    sheet = sheet_of({**batch, "attention_mask_2d": batch["input_ids"] > 0})
    sheet = Sheet(panels=sheet.panels, tokens=Tokens(lambda numbers: "中文😀" * len(numbers), batch["input_ids"]))
    out = lines(sheet, *screen)
    assert len(out) <= screen[1]
    assert max(map(columns, out)) <= screen[0]
    assert "... 2 more rows" in drawn(sheet, 80, 24)


@given(sided(rows=1, longest=12))
def test_signs_are_counted(truth):
    text = squares_of(drawn(sheet_of(truth), 120, 60))
    full = dense(truth)
    assert text.count("■") == full.sum()
    assert text.count("⬚") == full.numel() - full.sum()


def test_a_square_has_as_many_signs_as_places_in_plain_text():
    full = dense(Segments.from_lengths([5, 7], side="left"))
    text = plain(sheet_of(full), 64)
    assert (text.count("■"), text.count("⬚")) == (full.sum(), (~full).sum())


def test_a_cell_says_how_many_places_it_stands_for():
    text = drawn(sheet_of(Segments.from_lengths([4096])))
    assert "(192 places a cell)" in text
    assert "x 384 a cell)" in text or "x 320 a cell)" in text or "x 256 a cell)" in text
    assert "◧ a part of the block" in text
    assert "a cell" not in drawn(sheet_of(Segments.from_lengths([8])))


def test_labels_that_are_ignored_and_labels_on_padding():
    ids = torch.tensor([[0, 5, 6, 7]])
    batch = {"input_ids": ids, "attention_mask_2d": ids > 0, "labels": torch.tensor([[3, -100, 6, 7]])}
    below = drawn(sheet_of(batch)).splitlines()[2]
    assert below.split() == ["!", "×", "o", "o"]
    styles = {part.strip(): style for line in lines(sheet_of(batch), 80, 24) for part, style in line}
    assert styles["×"] == "red"
    assert styles["!"] == "bold red"


def test_the_legend_explains_what_is_drawn_and_no_more():
    legend = drawn(sheet_of(Segments.from_lengths([2, 3]))).splitlines()[-1]
    assert legend == "■ attends, real   ⬚ blocked, padding"
    wrong = dense(Segments.from_lengths([5, 5]))
    wrong[0, 0, 2, 4] = True
    legend = " ".join(drawn(sheet_of(wrong)).split("■ attends, real")[-1].split())
    assert legend == "⬚ blocked, padding + attends and ought not to"
    assert "1 wrong" in drawn(sheet_of(wrong))


def test_packed_rows_are_numbered_and_coloured():
    sheet = sheet_of(Segments.from_lengths([[2, 1], [3]], width=4))
    first = lines(sheet, 80, 24)[1]
    assert string_of(first).startswith("  0 1 1 2 ⬚  25% padding")
    assert len({style for part, style in first if part.strip() in ("1 1", "2")}) == 2
    assert "the first, the second sequence" in drawn(sheet)


def test_a_terminal_without_the_signs_gets_others():
    batch = batch_of([2, 3])
    sheet = sheet_of({**batch, "attention_mask_2d": batch["input_ids"] > 0})
    sheet = Sheet(panels=sheet.panels, tokens=Tokens(lambda numbers: "中" * len(numbers), batch["input_ids"]))
    for width in (60, 100):
        out = [string_of(line).translate(ASCII) for line in lines(encodable(sheet, "ascii"), width, 24)]
        assert "\n".join(out).isascii()
        assert max(map(len, out)) <= width
        assert any("\\u4e2d" in line for line in out)


def test_eight_rows_of_4096_build_no_square():
    sheet = sheet_of(Segments.from_lengths([4096, 3000, 100, 2000, 4000, 4096, 10, 7], side="left"))
    tracemalloc.start()
    lines(sheet, 120, 40)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4096 * 4096 / 2
