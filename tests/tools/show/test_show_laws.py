"""Laws of what is drawn: a square is the dense mask, a consumer's is what the adapter gives it, and no text moves the
cursor. What is wrong in a mask, each polarity and each rank: test_drawn."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("rich")
import torch
from hypothesis import example, given, strategies as st
from strategies import attentions, free, packed, sided
from torch.nn.attention.flex_attention import create_mask

from collate_npu import BatchAdapter, CollateError, Pattern, Segments
from collate_npu.consumers.mask_routing import consumers
from collate_npu.masks import dense
from collate_npu.tools.sheet import SIGNS, Cell, attention_of, escaped, one_owner, sheet_of
from collate_npu.tools.show import consumer_panels, lines

BLOCKS = st.integers(1, 9)


def batch_of(truth):
    return {"input_ids": truth.ids, "attention_mask_2d": truth.keep, "segment_ids": truth.ids}


def kinds(square, block):
    """Full, partial and empty blocks, from the dense mask alone."""
    Q, K = square.shape
    parts = [[square[q : q + block, k : k + block] for k in range(0, K, block)] for q in range(0, Q, block)]
    return [[Cell.WHOLE if x.all() else Cell.PART if x.any() else Cell.BLOCKED for x in row] for row in parts]


@given(attentions(), BLOCKS)
def test_blocks_are_those_of_the_dense_mask(attention, block):
    truth, pattern = attention
    full, ought = dense(truth, pattern=pattern), dense(truth, pattern=Pattern.sliding(1))
    for b, ids in enumerate(truth.array):
        square, differ = attention_of(truth, b, pattern=pattern), full[b, 0] & ~ought[b, 0]
        cells, wrong = replace(square, ought=lambda q, k, b=b: ought[b, 0, q:k].numpy()).fold(block)
        plain, none = square.fold(block)
        assert plain.tolist() == kinds(full[b, 0], block)
        assert ((cells == Cell.TOO_MUCH) == (np.array(kinds(differ, block)) != Cell.BLOCKED)).all()
        assert (none, wrong) == (0, differ.sum() + (~full[b, 0] & ought[b, 0]).sum())
        held = [set(ids[s : s + block].tolist()) - {0} for s in range(0, len(ids), block)]
        assert one_owner(ids, block).tolist() == [next(iter(one)) if len(one) == 1 else 0 for one in held]


@given(free(rows=4, width=30), st.integers(20, 200))
def test_no_line_is_wider_than_the_terminal(truth, width):
    assert max(len("".join(text for text, _ in line).rstrip()) for line in lines(sheet_of(truth), width)) <= width


def test_eight_rows_of_4096_build_no_square():
    sheet = sheet_of(Segments.from_lengths([4096, 3000, 100, 2000, 4000, 4096, 10, 7], side="left"))
    tracemalloc.start()
    assert len(lines(sheet, 120)) <= 75
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4096 * 4096 / 2


@given(st.text())
def test_a_token_moves_no_cursor(text):
    assert all(letter.isprintable() or letter == "\u200d" for letter in escaped(text))
    assert (len({sign for sign, *_ in SIGNS.values()}), set(SIGNS)) == (len(Cell), set(Cell))


def test_spaces_and_lines_are_seen():
    assert [escaped(text) for text in (" the", "a b ", "\n", "\t", "  ")] == ["·the", "a b·", "\\n", "\\t", "··"]


def attended(form, facts, segments):
    """bool `[B, S, S]`: what attends whom, by what the adapter really emits."""
    B, S = segments.shape
    if form is None:
        return torch.ones(S, S).tril().bool().expand(B, S, S)
    if hasattr(form, "mask_mod"):
        return create_mask(form.mask_mod, B, 1, S, S, device="cpu")[:, 0]
    if form.ndim == 2:
        return dense(segments)[:, 0]
    if form.is_floating_point():
        return (form == 0)[:, 0]
    return ~form[:, 0] if "True is blocked" in facts else form[:, 0]


@given(st.sampled_from(sorted(consumers())), sided(rows=3) | packed(rows=2), st.sampled_from(["qwen3", "qwen3_next"]))
@example("megatron", Segments.from_lengths([2, 3], side="left"), "qwen3")
@example("mindspeed_dense", Segments.from_lengths([2, 3], side="left"), "qwen3")
def test_each_consumer_is_drawn_as_the_adapter_serves_it(name, truth, model_type):
    panels = list(consumer_panels(batch_of(truth), name, model_type=model_type))
    assert all(panel.derived for panel in panels)
    adapter = BatchAdapter(model_type=model_type, consumer=name)
    if panels[0].refused:
        with pytest.raises(CollateError) as error:
            adapter(batch_of(truth))
        assert [panel.refused for panel in panels] == [str(error.value)]
        return
    given_to = adapter(batch_of(truth))
    mask = given_to[adapter.consumer.key]
    masks = mask if isinstance(mask, dict) else {"": mask}
    drawn = {panel.heading.removeprefix(name).strip(): panel for panel in panels}
    assert drawn.keys() == {kind for kind, form in masks.items() if not (kind and form is not None and form.ndim == 2)}
    for kind, panel in drawn.items():
        shown = torch.stack([torch.from_numpy(square.rows(0, truth.shape[1])) for square in panel.squares])
        assert torch.equal(shown, attended(masks[kind], panel.facts, truth))
        assert ("stays" in panel.facts) == ("attention_mask_2d" in given_to)
