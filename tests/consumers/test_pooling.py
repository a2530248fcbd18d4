"""Heads that give one answer a row: that of each sample alone, on either side, or a refusal; every class of transformers."""

import random

import pytest
import torch
from rotation import SEED

from collate_npu import BatchAdapter, CollateError, PaddingCollator

transformers = pytest.importorskip("transformers")

from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES,
    MODEL_MAPPING_NAMES as BARE,
)

from collate_npu.consumers.forwards import pooling  # noqa: E402
from collate_npu.testing import tiny_config  # noqa: E402

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]
VOCAB, LENGTHS = 61, (4, 9)
OTHERS = sorted({*NAMES} - {"perceiver", *(("doge",) if transformers.__version__ < "5" else ())})
"""A full row of perceiver differs beside a padded one, whatever its mask. So does one of Doge on 4.57: without a mask its
queries see what comes behind them, and padded rows have 5.23's answers."""
FEW = ("bert", "roberta", "llama", "gpt2", "qwen3_next", "modernbert", "eurobert", "biogpt")


def drawn(model):
    """Of weights so far apart that padding would be seen: no row of its embedding is zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2) if parameter.ndim > 1 else None
    return model.eval()


def classifier(name):
    """A random one, or a skip where it does not build tiny."""
    if name not in NAMES:
        pytest.skip("this transformers has none")
    kind = NAMES[name] if isinstance(NAMES[name], str) else NAMES[name][0]
    torch.manual_seed(0)
    try:
        config = tiny_config(name, vocab_size=VOCAB)
        config.num_labels = 3
        return drawn(getattr(transformers, kind)(config))
    except Exception as error:  # whatever its config refuses
        pytest.skip(f"{type(error).__name__}: {error}"[:80])


def answers(model, batch):
    with torch.no_grad():
        return model(**batch).logits.double()


def laid(rows, side, fill):
    width = max(map(len, rows))
    empty = [[fill] * (width - len(row)) for row in rows]
    return torch.tensor([pad + row if side == "left" else row + pad for row, pad in zip(rows, empty)])


def compare(name, side, fill):
    model, rng = classifier(name), random.Random(3)
    rows = [[rng.randrange(3, 55) for _ in range(n)] for n in LENGTHS]
    try:
        alone = torch.cat([answers(model, {"input_ids": torch.tensor([row])}) for row in rows])
    except Exception as error:  # it does not run tiny
        pytest.skip(f"{type(error).__name__}: {error}"[:80])
    ids = laid(rows, side, fill)
    batch = {"input_ids": ids, "attention_mask": laid([[1] * n for n in LENGTHS], side, 0), "labels": torch.tensor([1, 2])}
    try:
        handed = BatchAdapter(model)(batch)
    except CollateError as refused:
        return str(refused)
    assert torch.equal(batch["input_ids"], ids)
    assert torch.equal(handed.pop("labels"), batch["labels"])
    assert float((answers(model, handed) - alone).norm() / alone.norm()) <= 1e-3
    return ""


@pytest.mark.parametrize("fill", [VOCAB - 1, 57], ids=["pad id", "another id"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", FEW)
def test_a_classifier_gives_the_answers_of_its_samples_alone(name, side, fill):
    said = compare(name, side, fill)
    assert ("it takes the first place of a row" in said) == (side == "left" and name in ("bert", "roberta", "modernbert"))
    counts = name == "biogpt" and side == "left" and transformers.__version__ < "5"
    assert ("it counts its place from the start of a row" in said) == counts
    assert not (said and side == "right")


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", random.Random(SEED).sample(OTHERS, 12))
def test_every_class_is_right_or_refused(name, side):
    compare(name, side, 57)


def embedder(name, **settings):
    torch.manual_seed(0)
    return drawn(getattr(transformers, BARE[name])(tiny_config(name, vocab_size=VOCAB), **settings))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["bert", "roberta", "albert", "dpr"])
def test_an_embedding_model_pools_as_alone_or_is_refused(name, side):
    model, rows = embedder(name), [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15]]
    batch = {"input_ids": laid(rows, side, 57), "attention_mask": laid([[1] * len(row) for row in rows], side, 0)}
    if side == "left":
        with pytest.raises(CollateError, match="add_pooling_layer=False"):
            BatchAdapter(model)(batch)
        return
    with torch.no_grad():
        alone = torch.cat([model(torch.tensor([row])).pooler_output for row in rows])
        assert torch.allclose(model(**BatchAdapter(model)(batch)).pooler_output, alone, atol=1e-5)


def test_an_encoder_without_its_pooler_takes_left_padding():
    model, rows = embedder("bert", add_pooling_layer=False), [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15]]
    batch = {"input_ids": laid(rows, "left", 57), "attention_mask": laid([[1] * len(row) for row in rows], "left", 0)}
    with torch.no_grad():
        found = model(**BatchAdapter(model)(batch)).last_hidden_state
        assert torch.allclose(found[0, 3:], model(torch.tensor([rows[0]])).last_hidden_state[0], atol=1e-5)


def test_a_decoder_that_knows_no_pad_id_is_refused_padded_right():
    model = classifier("llama")
    model.config.pad_token_id = None
    batch = {"input_ids": laid([[5], [6, 7]], "right", 0), "attention_mask": laid([[1], [1, 1]], "right", 0)}
    with pytest.raises(CollateError, match=r"set model\.config\.pad_token_id"):
        BatchAdapter(model)(batch)
    model.config.pad_token_id = 0
    assert BatchAdapter(model)(batch)["input_ids"].tolist() == [[5, 0], [6, 7]]


ROWS = [[5, 7, 9], [11, 13, 17, 19, 23, 29], [31, 37]]
KEEP = [[1] * len(row) for row in ROWS]


def head(kind, **fields):
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    config = tiny_config(cls.config_class.model_type, vocab_size=VOCAB)
    for name, value in fields.items():
        setattr(config, name, value)
    return drawn(cls(config))


def padded(side):
    return {"input_ids": laid(ROWS, side, 57), "attention_mask": laid(KEEP, side, 0)}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["LlamaForSequenceClassification", "GPT2ForSequenceClassification", "RobertaForMaskedLM"])
def test_vectors_in_place_of_ids_give_the_answers_of_samples_alone_or_are_refused(kind, side):
    model, batch = head(kind), padded(side)
    batch["inputs_embeds"] = embedded = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    if side == "right" and "Sequence" in kind:
        with pytest.raises(CollateError, match="pad inputs_embeds left"):
            BatchAdapter(model)(batch)
        return
    found = answers(model, BatchAdapter(model)(batch))
    for vectors, real, mine in zip(embedded, batch["attention_mask"].bool(), found):
        alone = answers(model, {"inputs_embeds": vectors[real][None]})[0]
        assert torch.allclose(mine if mine.ndim == 1 else mine[real], alone, atol=1e-5)


def test_a_decoder_that_knows_no_pad_id_takes_the_last_place_with_padding_at_both_ends():
    model = classifier("llama")
    model.config.pad_token_id = None
    ids, keep = torch.tensor([[3, 5, 7, 9, 3]]), torch.tensor([[0, 1, 1, 1, 0]])
    with pytest.raises(CollateError, match=r"set model\.config\.pad_token_id"):
        BatchAdapter(model)({"input_ids": ids, "attention_mask": keep})
    found = answers(model, BatchAdapter(model)({"input_ids": ids[:, :4], "attention_mask": keep[:, :4]}))
    assert torch.allclose(found, answers(model, {"input_ids": ids[:, 1:4]}), atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_xlnets_classifier_takes_the_last_place(side):
    config = transformers.XLNetConfig(vocab_size=VOCAB, d_model=32, n_layer=1, n_head=2, d_inner=48)
    model = transformers.XLNetForSequenceClassification(config).eval()
    if side == "right":
        with pytest.raises(CollateError, match="XLNet left"):
            BatchAdapter(model)(padded(side))
        return
    alone = torch.cat([answers(model, {"input_ids": torch.tensor([row])}) for row in ROWS])
    assert torch.allclose(answers(model, BatchAdapter(model)(padded(side))), alone, atol=1e-5)


TOKENWISE = ("BigBirdForMaskedLM", "LayoutLMForMaskedLM", "LukeForMaskedLM", "BrosForTokenClassification")


@pytest.mark.parametrize("kind", [*TOKENWISE, "CanineForTokenClassification", "SplinterForQuestionAnswering"])
def test_heads_of_tokens_leave_a_pooler_unread(kind):
    cls = getattr(transformers, kind)
    with torch.device("meta"):
        assert pooling(cls(cls.config_class())) == ""


def test_a_head_of_tokens_with_an_unread_pooler_takes_left_padding():
    model = head("BigBirdForMaskedLM", attention_type="original_full")
    for row, mine in zip(ROWS, answers(model, BatchAdapter(model)(padded("left")))):
        assert torch.allclose(mine[-len(row) :], answers(model, {"input_ids": torch.tensor([row])})[0], atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["BertForQuestionAnswering", "LlamaForQuestionAnswering", "GPT2ForQuestionAnswering"])
@torch.no_grad()
def test_the_loss_of_a_span_counts_padding_and_its_logits_do_not(kind, side):
    model, batch = head(kind), padded(side)
    asked = {"start_positions": torch.tensor([0, 1, 1]), "end_positions": torch.tensor([1, 1, 1])}
    with pytest.raises(CollateError, match="rows of one length"):
        BatchAdapter(model)(batch | asked)
    found = model(**BatchAdapter(model)(batch)).start_logits
    for row, keep, mine in zip(ROWS, batch["attention_mask"].bool(), found):
        assert torch.allclose(mine[keep], model(torch.tensor([row])).start_logits[0], atol=1e-5)
    equal = {"input_ids": torch.tensor([row[:2] for row in ROWS]), "attention_mask": torch.ones(3, 2).long(), **asked}
    alone = [model(**{key: value[b : b + 1] for key, value in equal.items()}).loss for b in range(3)]
    assert torch.allclose(model(**BatchAdapter(model)(equal)).loss, sum(alone) / 3, atol=1e-5)


def test_padding_before_a_sample_would_move_the_places_of_its_span():
    features = [{"input_ids": row, "start_positions": 1, "end_positions": 1} for row in ROWS]
    with pytest.raises(CollateError, match="padding_side='right'"):
        PaddingCollator(pad_token_id=0, padding_side="left")(features)
    assert PaddingCollator(pad_token_id=0, padding_side="left")(features[:1])["start_positions"].tolist() == [1]
    assert PaddingCollator(pad_token_id=0)(features)["input_ids"][:, 1].tolist() == [7, 13, 37]
