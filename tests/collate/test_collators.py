"""PaddingCollator: every key of every row beside its token, on either side, and masks from lengths, never from ids."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given
from strategies import flat_collator

from collate_npu import CollateError, PaddingCollator, wrap_collator
from collate_npu.errors import UnsupportedFormError
from collate_npu.keys import KEYS, SAMPLE, TOKENS
from collate_npu.masks import dense, none_is_exact
from collate_npu.testing import tiny_model

pytestmark = pytest.mark.usefixtures("newest_transformers")

PAD = strategies.PAD
HYBRID = SimpleNamespace(layer_types=["linear_attention", "full_attention"])
DENSE = SimpleNamespace(layer_types=["full_attention"])
THREE_AND_FIVE = [{"input_ids": row, "labels": row} for row in ([1, 2, 3], [4, 5, 6, 7, 8])]


def tokenizer(**fields):
    return SimpleNamespace(**{"pad_token_id": PAD, "padding_side": "right", **fields})


def test_what_is_one_value_a_sample_follows_the_packed_rows():
    rows = enumerate([[1] * n for n in (3, 6, 2, 5)])
    features = [{"input_ids": ids, "labels": [b / 2, 1], "name": f"{b}", "advantages": b / 2} for b, ids in rows]
    for b, row in enumerate(features):
        row |= {"pixel_values": torch.full((1 + b % 2, 1), b), "position_ids": np.full((3, len(row["input_ids"])), b)}
    batch = PaddingCollator(tokenizer(), packing=True, max_length=8, attention_mask="2d")(features)
    assert batch["position_ids"][2].tolist() == [[0, 0, 0, 3, 3, 3, 3, 3], [1, 1, 1, 1, 1, 1, 2, 2]]
    assert batch["pixel_values"][:, 0].tolist() == [0, 3, 3, 1, 1, 2]
    assert batch["name"] == ["0", "3", "1", "2"]
    assert batch["labels"][:, 0].tolist() == batch["advantages"].tolist() == [0, 1.5, 0.5, 1]


def test_unknown_and_vision_keys_strings_and_none():
    first = {"input_ids": [1, 2], "mine": [0.5, 1.5], "text": "ab", "score": 1, "tags": ["x"], "nothing": None}
    second = {"input_ids": [3], "mine": [2.5], "text": "c", "score": 2, "tags": ["y", "z"], "nothing": None}
    features = [{**first, "pixel_values": torch.ones(2, 3)}, second]
    batch = PaddingCollator(tokenizer(padding_side="left"), keys={**KEYS, "mine": TOKENS})(features)
    assert batch["mine"].tolist() == [[0.5, 1.5], [0.0, 2.5]]
    assert batch["text"] == ["ab", "c"]
    assert batch["score"].tolist() == [1, 2]
    assert batch["tags"] == [["x"], ["y", "z"]]
    assert batch["pixel_values"].shape == (2, 3)
    assert "nothing" not in batch
    assert "position_ids" not in batch  # mRoPE needs the grids: the model makes them


def test_positions_of_the_samples_stay():
    features = [{"input_ids": [1, 2], "position_ids": [5, 6]}, {"input_ids": [3], "position_ids": [9]}]
    assert PaddingCollator(tokenizer(padding_side="left"))(features)["position_ids"].tolist() == [[5, 6], [0, 9]]
    axes = [{"input_ids": [3] * n, "position_ids": np.ones((3, n), int)} for n in (2, 1)]
    assert PaddingCollator(tokenizer())(axes)["position_ids"].tolist() == [[[1, 1], [1, 0]]] * 3
    flat = PaddingCollator(padding_free=True)(axes)
    assert flat["position_ids"].tolist() == [[[1, 1, 1]]] * 3
    assert flat["text_position_ids"].tolist() == [[0, 1, 0]]
    with pytest.raises(CollateError, match="whole numbers"):
        PaddingCollator(tokenizer())([{"input_ids": [3], "position_ids": np.full((3, 1), 0.5)}])


def test_shifted_labels_stay_where_they_are():
    features = [{"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, {"input_ids": [4], "labels": [9]}]
    batch = PaddingCollator(tokenizer(padding_side="left"), labels_shifted=True)(features)
    assert batch["labels"].tolist() == [[2, 3, -100], [-100, -100, 9]]
    flat = PaddingCollator(padding_free=True, labels_shifted=True)(features)
    assert flat["labels"].tolist() == [[2, 3, -100, 9]]
    both = PaddingCollator(padding_free=True, pattern="bidirectional")(features)  # predicted in place
    assert both["labels"].tolist() == [[2, 3, -100, 9]]


# --- settings


def test_max_length_is_a_limit_or_a_width():
    assert PaddingCollator(tokenizer(), max_length=9)(THREE_AND_FIVE)["input_ids"].shape == (2, 5)
    for multiple, width in ((None, 9), (4, 12)):
        collator = PaddingCollator(tokenizer(), max_length=9, padding="max_length", pad_to_multiple_of=multiple)
        assert collator(THREE_AND_FIVE)["labels"].shape == (2, width)
    for settings, shape in (
        ({}, (2, 5)),
        ({"padding": (4, 8, 16)}, (1, 8)),
        ({"max_length": 7, "pad_to_multiple_of": 4}, (2, 8)),
    ):
        assert PaddingCollator(tokenizer(), packing=True, **settings)(THREE_AND_FIVE)["labels"].shape == shape


def test_arguments_go_before_the_tokenizer():
    collator = PaddingCollator(tokenizer(padding_side="left"), pad_token_id=0, padding_side="right")
    assert collator(THREE_AND_FIVE)["input_ids"].tolist()[0] == [1, 2, 3, 0, 0]
    assert PaddingCollator(tokenizer(pad_token_id=0))(THREE_AND_FIVE)["input_ids"].tolist()[0] == [1, 2, 3, 0, 0]
    assert (collator.pad_token_id, collator.padding_side, collator.max_length) == (0, "right", None)
    with pytest.raises(CollateError, match=r"tokenizer\.padding_side: got 'Left'.*Did you mean left"):
        PaddingCollator(tokenizer(padding_side="Left"))


def test_model_and_return_tensors_are_taken_as_transformers_takes_them():
    for make in (PaddingCollator, lambda given, *more, **settings: wrap_collator(PaddingCollator(given), *more, **settings)):
        by_place = make(tokenizer(), HYBRID, consumer="megatron")
        by_name = make(tokenizer(), model=HYBRID, consumer="megatron")
        assert "attention_mask_2d" in by_place(THREE_AND_FIVE, "pt")
        assert by_place(THREE_AND_FIVE).keys() == by_name(THREE_AND_FIVE).keys()
        for name in ("np", "tf", 3):
            with pytest.raises(CollateError, match=r"return_tensors: got .*Pass 'pt'"):
                make(tokenizer(), return_tensors=name)
        with pytest.raises(CollateError, match=r"return_tensors: got .*Pass 'pt'"):
            by_place(THREE_AND_FIVE, return_tensors="np")


@pytest.mark.parametrize(("side", "places"), [("left", [[0, 1]]), ("right", None)])
def test_on_the_left_a_consumer_has_positions_without_padding_too(side, places):
    collator = PaddingCollator(tokenizer(padding_side=side), consumer="transformers")
    found = collator([{"input_ids": [1, 2]}]).get("position_ids")
    assert found is places or found.tolist() == places


@pytest.mark.parametrize(("consumer", "model"), [("transformers", HYBRID), ("megatron", DENSE)])
def test_omit_does_not_drop_a_mask_that_is_needed(consumer, model):
    collator = PaddingCollator(tokenizer(padding_side="left"), consumer=consumer, model=model, attention_mask="omit")
    with pytest.raises(CollateError, match="reads padding from this key only"):
        collator(THREE_AND_FIVE)
    PaddingCollator(tokenizer(), consumer="torchtitan", model=DENSE, attention_mask="omit")(THREE_AND_FIVE)


# --- flat rows: alignment, widths, offsets of one length

THREE_AND_TWO = [{"input_ids": row, "labels": row} for row in ([1, 2, 3], [4, 5])]
FLASH = SimpleNamespace(layer_types=["full_attention"], _attn_implementation="flash_attention_2", model_type="llama")


def flat(features=THREE_AND_TWO, **settings):
    return flat_collator(PAD, **settings)(features)


@pytest.mark.parametrize("settings", [{}, {"consumer": "verl"}, {"consumer": "transformers", "model": FLASH}], ids=len)
def test_offsets_rise_up_to_the_sequences_that_are_missing(settings):
    """What a transformers model would pass on as a second argument is left out."""
    batch = flat(multiple=4, padding=(8, 16), max_sequences=4, **settings)
    assert batch["cu_seq_lens_q"].tolist() == [0, 4, 8, 12, 16]
    assert batch["input_ids"].shape == (1, 16)
    assert batch["max_length_q"] == 16
    assert bool({"cu_seqlens", "cu_seqlens_padded", "seq_lens"} & set(batch)) == ("model" not in settings)


def test_where_all_sequences_are_used_the_last_takes_the_tail():
    batch = flat(padding=(8,), max_sequences=2)
    assert batch["cu_seqlens_padded"].tolist() == [0, 3, 8]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    with pytest.raises(CollateError, match="Raise max_sequences"):
        flat(max_sequences=1)
    assert flat(padding=(6,), max_sequences=4)["cu_seqlens_padded"].tolist() == [0, 3, 5, 6, 7]  # it grows


@pytest.mark.parametrize("labels", [[1, 0], [[0.5, 1.0, 0.0, 1.0, 0.0], [0.0] * 5]])
@pytest.mark.parametrize("settings", [{}, {"multiple": 4}])
def test_labels_of_whole_samples_in_flat_rows(labels, settings):
    features = [{"input_ids": f["input_ids"], "labels": label} for f, label in zip(THREE_AND_TWO, labels)]
    assert flat(features, **settings)["labels"].tolist() == torch.tensor(labels).tolist()


def test_ignored_labels_and_token_types_have_the_collators_own_fill():
    features = [{**feature, "token_type_ids": [1] * len(feature["input_ids"])} for feature in THREE_AND_TWO]
    settings = {"label_pad_token_id": -1, "pad_to_multiple_of": 8}
    batch = PaddingCollator(tokenizer(pad_token_type_id=3), padding_free=True, **settings)(features)
    assert batch["labels"].tolist() == [[-1, 2, 3, -1, 5, -1, -1, -1]]
    assert batch["token_type_ids"].tolist() == [[1, 1, 1, 1, 1, 3, 3, 3]]


@pytest.mark.parametrize("side", ["right", "left"])
def test_labels_of_several_values_a_token_stay_as_they_are(side):
    """Which of them the token before predicts, nobody here can say."""
    rows = [np.arange(2 * n).reshape(n, 2) + 1 for n in (2, 3)]
    features = [{"input_ids": [1] * len(row), "labels": row} for row in rows]
    batch = PaddingCollator(pad_token_id=0, padding_side=side, attention_mask="2d")(features)
    assert np.array_equal(batch["labels"][batch["attention_mask_2d"]].numpy(), np.concatenate(rows))
    assert (batch["labels"][~batch["attention_mask_2d"]] == -100).all()


@given(strategies.attentions(strategies.segments().filter(lambda segments: not segments.empty_rows)))
def test_modes_without_a_consumer(attention):
    segments, pattern = attention
    exact = none_is_exact(segments, pattern)
    masked = dense(segments, polarity="masked", pattern=pattern)
    for mode in ("auto", "none", "4d", "2d", "omit"):
        inner = {"input_ids": torch.ones(segments.shape, dtype=torch.int64), "segment_ids": segments.ids}
        wrapped = wrap_collator(lambda _: inner, attention_mask=mode, pattern=pattern)  # noqa: B023
        if mode == "none" and not exact:
            with pytest.raises(UnsupportedFormError, match="attention_mask='none' is set"):
                wrapped([{}])
            continue
        out = wrapped([{}])
        assert torch.equal(out["attention_mask_2d"], segments.keep)
        assert ("attention_mask" in out) == (mode != "omit")
        assert ("segment_ids" in out) == segments.packed
        if mode == "2d":
            assert torch.equal(out["attention_mask"], segments.keep)
        elif mode == "4d" or (mode == "auto" and not exact):
            assert torch.equal(out["attention_mask"], masked)
        elif mode != "omit":
            assert out["attention_mask"] is None


@pytest.mark.parametrize(
    ("told", "longest"), [({}, 4), ({"max_length_q": 8, "max_length_k": None}, 8), ({"max_seqlen": torch.tensor(8)}, 8)]
)
def test_physical_offsets_that_fit_stay_and_their_longest_does(told, longest):
    ids, offsets = torch.tensor([[1, 2, 3, 0, 4, 5, 0, 0]]), {"cu_seqlens": [0, 3, 5], "cu_seqlens_padded": [0, 4, 8]}
    inner = {"input_ids": ids, **{key: torch.tensor(value) for key, value in offsets.items()}, **told}
    out = wrap_collator(lambda _: inner)([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
    assert out["cu_seq_lens_q"].tolist() == [0, 4, 8]
    assert out["max_length_q"] == out["max_length_k"] == longest


PLACED = {"image_positions": [[1, 2], [2], []], "span_indices": [[[1, 3]], [[2, 5]], [[0, 2]]]}
PLACED |= {"completion_start": [2, 4, 1]}


@pytest.mark.parametrize("key", PLACED)
@pytest.mark.parametrize("how", [{"padding_side": "left"}, {"padding_free": True}, {"packing": True}])
def test_places_of_a_sample_are_not_copied_where_its_tokens_move(key, how):
    """By name and value; a key that its user declares, numbers beyond the row and right padding stay."""
    rows = [{"input_ids": [5] * n, key: value} for n, value in zip((5, 9, 3), PLACED[key])]
    with pytest.raises(CollateError, match=rf"{key}: .*\n.*tokens moved by"):
        PaddingCollator(pad_token_id=0, **how)(rows)
    declared = PaddingCollator(pad_token_id=0, keys={**KEYS, key: SAMPLE}, **how)(rows)
    assert len(declared[key]) == len(PaddingCollator(pad_token_id=0)(rows)[key]) == 3
    far = [row | {key: 100 + b} for b, row in enumerate(rows)]
    assert PaddingCollator(pad_token_id=0, **how)(far)[key].sort().values.tolist() == [100, 101, 102]


@pytest.mark.models
def test_a_pad_id_that_no_embedding_holds_is_refused():
    pytest.importorskip("transformers")
    model = tiny_model("llama", vocab_size=64)
    for pad in (64, 2**31):
        with pytest.raises(CollateError, match="vocabulary has 64 tokens"):
            PaddingCollator(pad_token_id=pad, model=model)
