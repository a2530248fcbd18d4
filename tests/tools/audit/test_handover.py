"""Handing over: ours and the others are told apart, and each gives what its name says."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
from collate_npu import CollateError, Segments
from collate_npu.testing import tiny_model
from collate_npu.tools.audit.case import Audit
from collate_npu.tools.audit.handover import FLAT, PADDED, Subject

pytestmark = pytest.mark.models

FEATURES = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]


@pytest.fixture(scope="module")
def padded():
    return Subject(model=tiny_model("qwen3_next", vocab_size=8), side="left", pad_token_id=7)


@pytest.fixture(scope="module")
def flat():
    return Subject(model=tiny_model("llama", vocab_size=8), side="packed", pad_token_id=7)


@pytest.mark.parametrize("ways", [PADDED, FLAT], ids=["padded", "flat"])
def test_every_way_has_a_title_of_its_own(ways):
    assert [way.ours for way in ways.values()] == sorted((way.ours for way in ways.values()), reverse=True)
    assert len({way.name for way in ways.values()}) == len(ways)
    assert all(len(way.name) <= 20 for way in ways.values())


@pytest.mark.usefixtures("newest_transformers")
@pytest.mark.parametrize("column", PADDED)
def test_every_way_pads_the_same_tokens(padded, column):
    batch = PADDED[column].hand(padded, FEATURES)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [7, 4, 5]]
    first = 4 if column == "tokenizer's 2D mask" else -100  # else no padding predicts a token
    assert batch["labels"].tolist() == [[1, 2, 3], [-100, first, 5]]


@pytest.mark.parametrize(("attn", "dtype"), [("eager", torch.float32), ("sdpa", torch.bool)])
def test_a_dense_mask_has_the_form_that_its_attention_takes(attn, dtype):
    model = tiny_model("llama", vocab_size=8, attn_implementation=attn)
    assert Subject(model=model, side="left", pad_token_id=7).dense(FEATURES).dtype == dtype


def test_what_cannot_be_audited_is_refused():
    settings = {"name": "m", "pad_token_id": 7, "batch_size": 2, "gradients": False}
    with pytest.raises(CollateError, match="from_pretrained"):
        Audit("Qwen/Qwen3", FEATURES, **settings)
    pair = torch.nn.Linear(1, 1)
    pair.config = SimpleNamespace(is_encoder_decoder=True)
    with pytest.raises(CollateError, match="encoder"):
        Audit(pair, FEATURES, **settings)


def test_the_others_hand_over_what_their_names_say(padded):
    made = {column: PADDED[column].hand(padded, FEATURES) for column in ("no mask", "4D mask alone", "4D + 2D keyword")}
    assert "attention_mask" not in made["no mask"]
    assert "attention_mask_2d" not in made["no mask"]
    assert torch.equal(made["4D mask alone"]["attention_mask"], padded.dense(FEATURES))
    assert "attention_mask_2d" not in made["4D mask alone"]
    assert torch.equal(made["4D + 2D keyword"]["attention_mask_2d"], padded.truth(FEATURES).keep)


@pytest.mark.usefixtures("newest_transformers")
def test_no_dense_mask_goes_to_attention_that_does_not_read_one():
    """On a card a dense mask in the place of a 2D one makes a flash kernel read past its tensors."""
    model = tiny_model("qwen3", vocab_size=8)
    case = Audit(model, FEATURES, name="", pad_token_id=7, batch_size=2, gradients=False)
    assert case.columns("left") == list(PADDED)
    subject = Subject(model=model, side="left", pad_token_id=7)
    for name in ("flash_attention_2", "kernels-community/flash-attn2", "mine"):
        model.config._attn_implementation = name
        assert set(PADDED) - set(case.columns("left")) == {"4D mask alone", "4D + 2D keyword"}
        for column in case.columns("left"):
            mask = PADDED[column].hand(subject, FEATURES).get("attention_mask", torch.ones(1, 1))
            masks = mask.values() if isinstance(mask, dict) else [mask]
            assert all(each.ndim == 2 for each in masks), (name, column)


@pytest.mark.parametrize("column", FLAT)
def test_every_way_is_the_same_row(flat, column):
    batch = FLAT[column].hand(flat, FEATURES)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5]]
    assert batch["labels"][0, [1, 2, 4]].tolist() == [2, 3, 5]
    assert batch["labels"][0, 3] == -100  # no sequence predicts the next one's first token
    assert flat.truth(FEATURES) == Segments.from_lengths([[3, 2]])


def test_the_other_rows_tell_what_their_names_say(flat):
    told = {column: set(way.hand(flat, FEATURES)) - {"input_ids", "labels"} for column, way in FLAT.items() if not way.ours}
    assert told == {
        "positions": {"position_ids"},
        "positions + offsets": {"position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"},
        "positions + seq_idx": {"position_ids", "seq_idx"},
        "no boundaries": set(),
    }
