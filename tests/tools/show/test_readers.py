"""What is drawn for a consumer and for a rank is what the adapter and the split give them."""

from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")
import torch
from hypothesis import example, given, strategies as st
from strategies import packed, sided
from torch.nn.attention.flex_attention import create_mask

from collate_npu import BatchAdapter, CollateError, ContextParallel, PaddingCollator, Pattern, Segments
from collate_npu.collate import Layout
from collate_npu.consumers.consumer import consumers
from collate_npu.masks import dense
from collate_npu.masks.find import segments_from_batch
from collate_npu.masks.patterns import CAUSAL
from collate_npu.parallel import query_rows
from collate_npu.tools.show.readers import consumer_panels, rank_panels

NAMES = sorted(consumers())


def batch_of(truth):
    return {"input_ids": truth.ids, "attention_mask_2d": truth.keep, "segment_ids": truth.ids}


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


@given(st.sampled_from(NAMES), sided(rows=3) | packed(rows=2), st.sampled_from(["qwen3", "qwen3_next"]))
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


def test_layers_with_a_window_have_a_square_of_their_own():
    truth, kinds = Segments.from_lengths([[4, 1], [5]]), ["full_attention", "sliding_attention"]
    model = SimpleNamespace(layer_types=kinds, sliding_window=2)
    panels = list(consumer_panels(batch_of(truth), "transformers", model=model))
    assert [panel.heading for panel in panels] == [f"transformers {kind}" for kind in kinds]
    for panel, pattern in zip(panels, (CAUSAL, Pattern.sliding(2))):
        expected = dense(truth, pattern=pattern)[:, 0].long().tolist()
        assert [square.grid(1).cells.tolist() for square in panel.squares] == expected


def test_a_flat_row_is_drawn_sequence_by_sequence():
    batch = PaddingCollator(pad_token_id=0, padding_free=True)([{"input_ids": [1] * 3}, {"input_ids": [2] * 2}])
    (panel,) = consumer_panels(batch, "megatron", model_type="qwen3", padding_free=True)
    assert panel.squares[0].grid(1).cells.tolist() == dense(Segments.from_lengths([[3, 2]]))[0, 0].long().tolist()


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_ranks_hold_every_place_once_and_their_own_queries(layout):
    cp, truth = ContextParallel(4, 0, layout=layout), Segments.from_lengths([5, 16], width=16, side="left")
    panels = list(rank_panels(batch_of(truth), cp))
    assert sorted(place for panel in panels for place in panel.squares[0].queries) == list(range(16))
    assert all(panel.derived for panel in panels)
    for rank, panel in enumerate(panels):
        expected = dense(truth, rows=query_rows(16, cp.with_rank(rank)))
        assert [square.grid(1).cells.tolist() for square in panel.squares] == expected[:, 0].long().tolist()


def test_documents_are_shared_out_one_by_one():
    cp = ContextParallel(2, 0, layout="document_zigzag")
    collate = PaddingCollator(pad_token_id=0, padding_free=True, layout=Layout(sequence_multiple=4))
    panels = rank_panels(collate([{"input_ids": [1] * 5}, {"input_ids": [1] * 8}]), cp)
    places = ("0-1, 6-9, 14-15", "2-5, 10-13")
    assert [panel.facts for panel in panels] == [f"document_zigzag, holds places {told}" for told in places]


def test_what_cannot_be_shared_or_read_is_drawn_as_its_refusal():
    cp, whole = ContextParallel(2, 0), batch_of(Segments.from_lengths([8]))
    (panel,) = rank_panels(batch_of(Segments.from_lengths([5])), cp)
    assert (panel.heading, panel.derived) == ("2 ranks", True)
    assert "Pad to 8" in panel.refused
    (panel,) = consumer_panels(whole, "transformers", model_type="qwen3_next", context_parallel=cp)
    assert panel.refused.startswith("context_parallel: got size 2")
    assert panel.derived
    batch = {**whole, "attention_mask": dense(Segments.from_lengths([7], width=8))}
    with pytest.raises(CollateError) as error:
        segments_from_batch(batch)
    (panel,) = consumer_panels(batch, "megatron", model_type="qwen3")
    assert panel.refused == str(error.value)
    with pytest.raises(CollateError, match="Known are"):
        list(consumer_panels(whole, "nobody", model_type="qwen3"))
