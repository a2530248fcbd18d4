"""A batch in words: what it is, how that is known, and what can go wrong."""

import re

import pytest
import torch

from collate_npu import CollateError, PaddingCollator, Pattern, Segments
from collate_npu.masks import dense
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.tools.describe import describe

FEATURES = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]


def known(text, how):
    """The keys that say so."""
    return set(re.findall(rf"^known by (\w+): {how}", text, flags=re.M))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_its_side(side):
    text = describe(PaddingCollator(pad_token_id=0, padding_side=side)(FEATURES))
    assert "2 sequences, 4 real tokens of 6 (67%)" in text
    assert f"2 rows of 3, one sequence each; padding on the {side}, 2 of 6 places (33%)" in text
    assert ("no mask is exact: causal attention" if side == "right" else "no mask is not exact: padding stands on") in text
    assert ("attention_mask: None" if side == "right" else "attention_mask: bool [2, 1, 3, 3], True = blocked") in text
    assert f"cheapest exact form: {'the 2D mask, 6' if side == 'left' else 'None with a causal kernel'}" in text
    assert "hazard" not in text
    assert known(text, "") == {"attention_mask_2d", "position_ids"} | ({"attention_mask"} if side == "left" else set())


def test_a_notebook_and_a_prompt_show_lines():
    text = describe(PaddingCollator(pad_token_id=0)(FEATURES))
    assert repr(text) == str(text) != str.__repr__(text)
    assert type(str(text)) is str
    assert len(repr(text).splitlines()) > 5


def test_a_flat_row():
    text = describe(PaddingCollator(padding_free=True)(FEATURES))
    for said in (
        "2 sequences, 4 real tokens of 4",
        "1 row of 4, 2 sequences; no padding",
        "form: offsets of a flat row, 12",
    ):
        assert said in text
    assert "hazard" not in text
    all_of_it = {"seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "position_ids"}
    assert known(text, "says all of it, alone") == all_of_it
    assert known(text, "") == {*all_of_it, "seq_idx"}
    one = describe(PaddingCollator(padding_free=True)(FEATURES[:1]))
    assert known(one, "says all of it, alone") >= {"cu_seq_lens_q", "position_ids"}


def test_a_refused_batch_is_described_with_the_reason():
    batch = {"input_ids": torch.ones(1, 4), "attention_mask": dense(Segments.from_lengths([4]), pattern=Pattern.sliding(2))}
    with pytest.raises(CollateError) as error:
        segments_from_batch(batch)
    assert f"padding: not known. {error.value}" in describe(batch)


def test_values_that_are_no_tensors():
    large = torch.ones(1, 1 << 17, dtype=torch.int64)
    more = {"n": 1, "none": None, "sparse": torch.eye(2).to_sparse()}
    more["more"] = more
    text = describe({"input_ids": large, "params": object(), "names": ["a", "b"], "more": more})
    assert "padding: not known" in text
    for said in ("params: object", "names: list of 2", "input_ids: int64 [1, 131072], 1.0 MiB"):
        assert said in text
    inside = "n: 1, none: None, sparse: float32 [2, 2], more: "
    assert f"\nmore: {f'{{{inside}' * 4}dict of 4{'}' * 4}\n" in text


def test_sparse_masks_are_read_and_rows_of_their_own_lengths_named():
    segments = Segments.from_lengths([2, 1], side="left")
    batch = {"input_ids": segments.ids, "attention_mask": segments.keep}
    assert "attention_mask: bool [2, 2]\n" in describe(batch)
    for mask in (segments.keep, dense(segments).to(torch.int8), dense(segments, polarity="bias")):
        assert describe({**batch, "attention_mask": mask.to_sparse()}) == describe({**batch, "attention_mask": mask})
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert "padding: not known. input_ids: got a nested" in describe({**batch, "input_ids": nested})


@pytest.mark.parametrize(
    ("polarity", "said"), [("keep", "True = attends"), ("masked", "True = blocked"), ("bias", "additive")]
)
def test_every_polarity_is_named_of_masks_with_and_without_heads(polarity, said):
    segments = Segments.from_lengths([2, 3], side="left")
    batch = {"input_ids": segments.ids, "attention_mask": dense(segments, polarity=polarity)}
    assert f", {said}\n" in describe(batch).partition("attention_mask: ")[2]
    batch = {"attention_mask": batch["attention_mask"][:, 0], "attention_mask_2d": segments.keep}
    assert f", {said}\n" in describe(batch).partition("attention_mask: ")[2]


def test_what_each_source_says_alone():
    packed = Segments.from_lengths([[2, 2], [3]], width=5)
    batch = {"input_ids": packed.ids, "attention_mask_2d": packed.keep, "segment_ids": packed.ids}
    text = describe({**batch, "position_ids": packed.position_ids})
    assert "known by segment_ids: says all of it, alone" in text
    assert "known by attention_mask_2d: says what is padding, not where sequences part" in text
    assert "known by position_ids: agrees; alone it does not say all" in text


def test_hazards_are_named_once_each():
    ids = torch.tensor([[7, 5, 7], [5, 6, 4]])
    mask = dense(Segments.from_lengths([2, 3], side="left")).to(torch.int8)
    text = describe({"input_ids": ids, "labels": ids, "attention_mask": mask})
    found = [line for line in text.splitlines() if line.startswith("hazard: ")]
    says = ("4D and alone", "int8 and 4D, 1 = attends", "1 labels stand on padding (rows [0])",
            "padding holds the id 7, as do 1 of 5 real tokens")  # fmt: skip
    assert [said in line for said, line in zip(says, found, strict=True)] == [True] * 4
