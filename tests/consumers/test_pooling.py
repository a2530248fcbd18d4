"""Heads that give one answer a row: that of each sample alone, on either side, or a refusal; every class of transformers."""

from functools import partial

import pytest
import torch

from collate_npu import BatchAdapter, CollateError

transformers = pytest.importorskip("transformers")

from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES  # noqa: E402

from collate_npu.consumers.model_traits import out_of_scope_reason  # noqa: E402
from collate_npu.releases import KERNELS_TOLD  # noqa: E402
from collate_npu.testing import tiny_config  # noqa: E402

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]
VOCAB = 61
ROWS = [[5, 7, 9], [11, 13, 17, 19, 23, 29], [31, 37]]
OTHERS = sorted({*NAMES} - {*(("doge",) if transformers.__version__ < "5" else ())})
"""On 4.57 queries of Doge without a mask see what comes behind them, and padded rows have 5.23's answers."""
FEW = ("llama", "gpt2", "qwen3_next", "biogpt")


def drawn(cls, config, **settings):
    """Of weights so far apart that padding would be seen: no row of its embedding is zero."""
    torch.manual_seed(0)
    model = cls(config, **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2) if parameter.ndim > 1 else None
    return model.eval()


def classifier(name, **fields):
    """A random one, or a skip where it does not build tiny."""
    if name not in NAMES:
        pytest.skip("this transformers has none")
    kind = NAMES[name] if isinstance(NAMES[name], str) else NAMES[name][0]
    try:
        config = tiny_config(name, vocab_size=VOCAB)
        config.num_labels = 3
        model = drawn(getattr(transformers, kind), config)
        model(input_ids=torch.tensor(ROWS[:1]))
    except Exception as error:  # whatever its config refuses
        pytest.skip(f"{type(error).__name__}: {error}"[:80])
    if out_of_scope_reason(model):
        pytest.skip("it is no causal language model")
    vars(model.config).update(fields)
    return model


def head(kind):
    cls = getattr(transformers, kind)
    return drawn(cls, tiny_config(cls.config_class.model_type, vocab_size=VOCAB))


def laid(rows, side, fill):
    width = max(map(len, rows))
    empty = [[fill] * (width - len(row)) for row in rows]
    return torch.tensor([pad + row if side == "left" else row + pad for row, pad in zip(rows, empty)])


@torch.no_grad()
def refusal(model, side, *, fill=57, embeds=False, **beside):
    """ "" where each sample, or token, has the answer of its sample alone; else why the batch is refused."""
    keep = laid([[1] * len(row) for row in ROWS], side, 0)
    batch = {"input_ids": laid(ROWS, side, fill), "attention_mask": keep, **beside}
    alone = [{"input_ids": torch.tensor([row])} for row in ROWS]
    if embeds:
        batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids"))
        alone = [{"inputs_embeds": row[real][None]} for row, real in zip(batch["inputs_embeds"], keep.bool())]
    before = {key: value.clone() for key, value in batch.items()}
    try:
        handed = BatchAdapter(model)(batch)
    except CollateError as refused:
        return str(refused)
    assert all(torch.equal(batch[key], value) for key, value in before.items())
    assert all(torch.equal(handed.pop(key), value) for key, value in beside.items())
    for found, real, own in zip(model(**handed).logits, keep.bool(), alone):
        right = model(**own).logits[0].double()
        found = found if found.shape == right.shape else found[real]
        assert float((found.double() - right).norm() / right.norm()) <= 1e-3
    return ""


@pytest.mark.parametrize("fill", [VOCAB - 1, 57], ids=["pad id", "another id"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", FEW)
def test_a_classifier_gives_the_answers_of_its_samples_alone(name, side, fill):
    said = refusal(classifier(name), side, fill=fill, labels=torch.tensor([1, 2, 0]))
    counts = name == "biogpt" and side == "left" and not KERNELS_TOLD.holds()
    assert ("it counts its place from the start of a row" in said) == counts
    assert not (said and side == "right")


@pytest.mark.slow
@pytest.mark.draws(12)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", OTHERS)
def test_every_class_is_right_or_refused(name, side):
    refusal(classifier(name), side)


LLAMA, GPT2 = (partial(head, f"{name}ForSequenceClassification") for name in ("Llama", "GPT2"))
EMBEDS = {"embeds": True}
CASES = [
    (partial(classifier, "llama", pad_token_id=None), {}, None, "set model.config.pad_token_id"),  # left: below
    (partial(classifier, "llama", pad_token_id=57), {}, "", ""),
    *((made, EMBEDS, "", "pad inputs_embeds left") for made in (LLAMA, GPT2)),
]  # fmt: skip


@pytest.mark.parametrize(("made", "how", "left", "right"), CASES)
def test_a_head_answers_as_alone_or_is_refused(made, how, left, right):
    for side, expected in (("left", left), ("right", right)):
        said = refusal(made(), side, **how) if expected is not None else None
        assert expected in said if expected else said == expected


@torch.no_grad()
def test_a_decoder_that_knows_no_pad_id_takes_the_last_place_with_padding_at_both_ends():
    model = classifier("llama", pad_token_id=None)
    ids, keep = torch.tensor([[3, 5, 7, 9, 3]]), torch.tensor([[0, 1, 1, 1, 0]])
    with pytest.raises(CollateError, match=r"set model\.config\.pad_token_id"):
        BatchAdapter(model)({"input_ids": ids, "attention_mask": keep})
    found = model(**BatchAdapter(model)({"input_ids": ids[:, :4], "attention_mask": keep[:, :4]})).logits
    assert torch.allclose(found, model(input_ids=ids[:, 1:4]).logits, atol=1e-5)
