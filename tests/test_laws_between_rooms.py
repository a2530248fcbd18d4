"""Laws 9, 10 and 13: what a collator knew comes out of the door, nothing shares memory, no pattern is replaced.

Law 11 (two sources that differ raise) is in masks/test_batch_reader.py, law 12 (every remedy works) in test_refusals.py.
Legend: B rows, S width.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given, strategies as st
from strategies import laid_out
from torch import Tensor

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Segments, wrap_collator
from collate_npu.errors import AmbiguousMaskError
from collate_npu.keys import KEYS, TOKENS
from collate_npu.masks import dense, varlen
from collate_npu.masks.batch_reader import segments_from_batch

pytestmark = [pytest.mark.usefixtures("newest_transformers"), pytest.mark.filterwarnings("ignore:collate_npu")]
DENSE = SimpleNamespace(layer_types=["full_attention"])
MODES = ["auto", "4d", "2d", "omit"]
EXTRAS = {
    "nothing": lambda L: {},
    "positions that count on": lambda L: {"position_ids": list(range(5, 5 + L))},
    "positions of three axes": lambda L: {"position_ids": np.arange(3 * L).reshape(3, L)},
    "images": lambda L: {"pixel_values": torch.ones(1, 3, 2, 2), "position_ids": np.zeros((3, L), int)},
    "vectors as long as a row of three": lambda L: {"vector": [0.5, 1.0, 1.5]},
    "targets of three classes": lambda L: {"labels": [0.0, 1.0, 0.0]},
}


def truth_of(features, side):
    """The Segments of features by themselves, padded on one side."""
    rows = [strategies.own_ids(feature) for feature in features]
    width = max(map(len, rows))
    pad = [(0, width - len(row)) if side == "right" else (width - len(row), 0) for row in rows]
    return Segments.from_ids(np.stack([np.pad(row, at) for row, at in zip(rows, pad)]))


# --- law 9


@given(
    strategies.features(),
    strategies.sides(),
    st.sampled_from(MODES),
    st.sampled_from([None, 4]),
    st.sampled_from(list(EXTRAS)),
    st.booleans(),
)
def test_law_9_the_door_gives_back_what_the_collator_knew(features, side, mode, multiple, extra, packing):
    features = [{**feature, **EXTRAS[extra](len(feature["input_ids"]))} for feature in strategies.marked(features)]
    settings = {
        "attention_mask": mode,
        "pad_to_multiple_of": multiple,
        "packing": packing,
        "max_length": 9 if packing else None,
    }
    batch = PaddingCollator(pad_token_id=7, padding_side=side, keys={**KEYS, "place": TOKENS}, **settings)(features)
    assert segments_from_batch(batch) == strategies.standing(features, batch["place"])


def flat_truth(features, width, each=1):
    """The Segments of one flat row of features, each sequence at a multiple of `each`."""
    rows = [[n for n in strategies.own_ids(feature) if n] for feature in features]
    lengths = [row.count(n) for row in rows for n in dict.fromkeys(row)]
    held = [[n] * length + [0] * (-length % each) for n, length in enumerate(lengths, start=1)]
    ids = [n for sequence in held for n in sequence]
    return Segments([ids + [0] * (width - len(ids))])


FLAT_SHAPES = st.fixed_dictionaries(
    {
        "pad_to_multiple_of": st.sampled_from([None, 4]),
        "padding": st.sampled_from(["longest", "max_length", (96, 160)]),
        "sequence_multiple": st.sampled_from([None, 1, 3, 4]),
        "max_sequences": st.sampled_from([None, 16]),
        "max_length": st.just(160),
    }
)


@given(strategies.features(), FLAT_SHAPES)
def test_law_9_the_door_gives_back_a_flat_row(features, settings):
    batch = PaddingCollator(pad_token_id=7, padding_free=True, **laid_out(settings))(features)
    width = batch["input_ids"].shape[1]
    expected = flat_truth(features, width, settings["sequence_multiple"] or 1)
    assert segments_from_batch(batch) == segments_from_batch(batch, padding_free=True) == expected
    assert settings["padding"] == "longest" or width >= 96


@given(strategies.features(), FLAT_SHAPES)
def test_law_9_a_flat_row_goes_through_a_wrapped_collator_and_an_adapter(features, settings):
    """Both give it back, with the offsets that came: alignment and offsets of one length survive."""
    inner = PaddingCollator(pad_token_id=7, padding_free=True, **laid_out(settings))
    batch, wrapped = inner(features), wrap_collator(inner)(features)
    adapted, segments = BatchAdapter(DENSE, consumer="megatron", padding_free=True).with_segments(batch)
    assert segments_from_batch(wrapped) == segments_from_batch(adapted) == segments == segments_from_batch(batch)
    for key, value in batch.items():
        for other in (wrapped, adapted):
            same = torch.equal(other[key], value) if isinstance(value, Tensor) else other[key] == value
            assert same or (key == "position_ids" and torch.equal(other[key][segments.keep], value[segments.keep])), key


@given(strategies.features(), FLAT_SHAPES)
def test_law_9_a_transformers_model_gets_one_set_of_offsets(features, settings):
    """Whatever of them arrives: the others are made of it, and the longest is not below any place."""
    model = SimpleNamespace(layer_types=["full_attention"], _attn_implementation="flash_attention_2", model_type="llama")
    adapter = BatchAdapter(model, consumer="transformers", padding_free=True)
    batch = PaddingCollator(pad_token_id=7, padding_free=True, **laid_out(settings))(features)
    others = [("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")] if "cu_seqlens_padded" in batch else []
    for left_out in ((), ("max_length_q", "max_length_k", "cu_seq_lens_k"), *others):
        out = adapter({key: value for key, value in batch.items() if key not in left_out})
        if segments_from_batch(batch).packed or not left_out:
            assert torch.equal(out["cu_seq_lens_q"], out["cu_seq_lens_k"])
            assert out["cu_seq_lens_q"][-1] == batch["input_ids"].shape[1]
            assert out["cu_seq_lens_q"].diff().max() <= min(out["max_length_q"], out["max_length_k"])
            if settings["sequence_multiple"]:
                assert torch.equal(out["cu_seq_lens_q"], batch["cu_seqlens_padded"])


@given(strategies.features(), strategies.sides(), st.sampled_from(MODES))
def test_law_9_a_wrapped_collator_knows_what_its_samples_tell(features, side, mode):
    """Packing ids, seq_lengths and holes of the samples, behind a collator that makes no mask, or one of the lengths."""

    def theirs(features):
        known = PaddingCollator(pad_token_id=7, padding_side=side)(features)
        return {"input_ids": known["input_ids"]}

    def masked(features):
        return {**theirs(features), "attention_mask": truth_of(features, side).keep.long()}

    expected = truth_of(features, side)
    for inner in (theirs, masked):
        try:
            batch = wrap_collator(inner, attention_mask=mode)(features)
        except AmbiguousMaskError:
            assert inner is theirs  # ids alone may stand at both ends alike
            continue
        assert segments_from_batch(batch) == expected


# --- law 10


def scribble(x):
    """Write to every element; raises where the tensor is expanded onto itself."""
    x.logical_not_() if x.dtype == torch.bool else x.add_(7)


@given(strategies.segments())
def test_law_10_segments_never_change(segments):
    before = segments.ids
    given_ids = np.array(segments.array)
    built = Segments(given_ids)
    given_ids[:] = 9
    assert built == segments
    for _ in range(2):
        parts = {
            name: getattr(segments, name)
            for name in ("ids", "keep", "indices", "last_indices", "position_ids", "cu_seqlens")
        }
        parts |= {"varlen": varlen(segments).cu_seqlens, "dense": dense(segments)}
        for value in parts.values():
            scribble(value)
        assert torch.equal(segments.ids, before)
        assert torch.equal(segments.keep, before != 0)


# --- law 13


def attention_of(mask, segments, consumer):
    """bool `[B, S, S]`: what the consumer then computes."""
    B, S = segments.shape
    causal = torch.ones(S, S, dtype=torch.bool).tril().expand(B, S, S)
    if mask is None:
        return causal
    if mask.ndim == 2:
        return causal & mask.bool()[:, None]
    return (~mask if consumer == "megatron" else mask)[:, 0]


@given(
    strategies.attentions(),
    st.sampled_from(["keep", "masked", "bias"]),
    st.sampled_from(["megatron", "transformers"]),
    st.sampled_from([None, "causal", "its own"]),
    st.booleans(),
    st.booleans(),
)
def test_law_13_a_pattern_is_never_replaced(attention, polarity, consumer, declared, beside, wrapped):
    segments, pattern = attention
    mask = dense(segments, polarity=polarity, pattern=pattern)
    batch = {"input_ids": segments.ids.long(), "attention_mask": mask}
    batch |= {"attention_mask_2d": segments.keep, "segment_ids": segments.ids} if beside else {}
    settings = {"consumer": consumer, "pattern": pattern if declared == "its own" else declared}
    way = wrap_collator(lambda _: batch, model=DENSE, **settings) if wrapped else BatchAdapter(DENSE, **settings)
    try:
        out = way([] if wrapped else batch)
    except CollateError:
        undeclared = declared != "its own" and pattern.reaches(segments.longest_span)
        assert not beside or undeclared or consumer == "transformers"
        return
    found = attention_of(out["attention_mask"], segments, consumer)
    assert torch.equal(found[segments.keep], dense(segments, pattern=pattern)[:, 0][segments.keep])
