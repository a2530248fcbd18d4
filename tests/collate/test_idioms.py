"""Lines that users of transformers and TRL type: ours gives what the original gives, or says what to type.

Each line is written once and called on both, with the release of transformers that is there.
"""

from __future__ import annotations

import copy
import pickle
from collections import UserDict

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.models

from collate_npu import CollateError, PaddingCollator, wrap_collator  # noqa: E402
from collate_npu.testing import tiny_model  # noqa: E402

SEQ2SEQ, PADDED = transformers.DataCollatorForSeq2Seq, transformers.DataCollatorWithPadding
LM = transformers.DataCollatorForLanguageModeling
IDS = [[3, 4, 5], [6, 7]]
BARE = [{"input_ids": ids} for ids in IDS]
ROWS = [{"input_ids": ids, "labels": ids} for ids in IDS]


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3_next", vocab_size=257)


@pytest.fixture
def tokenizer():
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1}, unk_token="<unk>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")


def held(batch):
    """What a loss and attention read; of the original as well as of ours. No loss reads the first label of a row."""
    read = dict(batch)
    if getattr(read.get("labels"), "ndim", 0) == 2 and not read["labels"].is_floating_point():
        read["labels"] = read["labels"][:, 1:]
    names = ("input_ids", "labels", "attention_mask")
    return {name: (read[name].dtype, read[name].tolist()) for name in names if read.get(name) is not None}


SAME = {
    "the tokenizer alone": (SEQ2SEQ, lambda make, t, m: make(t, m)(ROWS)),
    "padding by place": (SEQ2SEQ, lambda make, t, m: make(t, m, "longest")(ROWS)),
    "a width by place": (SEQ2SEQ, lambda make, t, m: make(t, m, "max_length", 8)(ROWS)),
    "a multiple by place": (SEQ2SEQ, lambda make, t, m: make(t, m, True, 64, 8)(ROWS)),
    "all by name": (
        SEQ2SEQ,
        lambda make, t, m: make(
            tokenizer=t, model=m, padding=True, max_length=64, pad_to_multiple_of=8, label_pad_token_id=-1
        )(features=ROWS, return_tensors="pt"),
    ),
    "a strategy": (SEQ2SEQ, lambda make, t, m: make(t, m, transformers.utils.PaddingStrategy.LONGEST)(ROWS)),
    "a framework": (SEQ2SEQ, lambda make, t, m: make(t, m, return_tensors=transformers.TensorType.PYTORCH)(ROWS, "pt")),
    "a dict of columns": (PADDED, lambda make, t, m: make(t, m)({"input_ids": IDS})),
    "UserDicts": (PADDED, lambda make, t, m: make(t, m)([UserDict(row) for row in BARE])),
    "encodings": (PADDED, lambda make, t, m: make(t, m)([transformers.BatchEncoding(row) for row in BARE])),
    "an encoding": (PADDED, lambda make, t, m: make(t, m)(transformers.BatchEncoding({"input_ids": IDS}))),
    "classes": (PADDED, lambda make, t, m: make(t, m)([row | {"label": n} for n, row in enumerate(BARE)])),
    "classes, label_ids": (PADDED, lambda make, t, m: make(t, m)([row | {"label_ids": n} for n, row in enumerate(BARE)])),
    "scores": (PADDED, lambda make, t, m: make(t, m)([row | {"label": n + 0.5} for n, row in enumerate(BARE)])),
    "targets": (PADDED, lambda make, t, m: make(t, m)([row | {"labels": [1.0, 0.5]} for row in BARE])),
    "a copy": (SEQ2SEQ, lambda make, t, m: copy.deepcopy(make(t, m))(ROWS)),
    "a pickle": (SEQ2SEQ, lambda make, t, m: pickle.loads(pickle.dumps(make(t, m)))(ROWS)),
    "lists, wrapped": (LM, lambda make, t, m: make(t, m)(IDS)),
}


@pytest.mark.parametrize(("original", "line"), SAME.values(), ids=SAME)
def test_a_line_gives_what_the_original_gives(original, line, tokenizer, model):
    def theirs(*args, **settings):
        if original is LM:
            return LM(args[0], mlm=False)
        return original(*args, **settings) if original is SEQ2SEQ else PADDED(args[0], **settings)

    def ours(*args, **settings):
        return wrap_collator(theirs(*args), model=args[1]) if original is LM else PaddingCollator(*args, **settings)

    expected, found = held(line(theirs, tokenizer, model)), held(line(ours, tokenizer, model))
    if original is LM:  # it makes no mask of lists
        found.pop("attention_mask")
    assert found.pop("attention_mask", None) == expected.pop("attention_mask", None)
    assert found == expected


SAID = {
    "PADDED(t, True)": (lambda t, m: PaddingCollator(t, True), "A model is a torch module"),
    "LM": (lambda t, m: PaddingCollator(t, m, mlm=False), r"wrap_collator\(DataCollatorForLanguageModeling\("),
    "flattening": (lambda t, m: PaddingCollator(padding_free=True, return_seq_idx=True), "Leave it out"),
    "a separator": (lambda t, m: PaddingCollator(t, m, separator_id=0), "becomes label_pad_token_id"),
    "processing_class": (lambda t, m: PaddingCollator(processing_class=t), "Pass tokenizer="),
    "a slip": (lambda t, m: PaddingCollator(t, m, pad_multiple=8), "Did you mean pad_to_multiple_of"),
    "no such thing": (lambda t, m: PaddingCollator(t, m, color=8), "It takes tokenizer, model, padding, max_length"),
    "texts": (lambda t, m: PaddingCollator(t, m)(["a", "b"]), "Tokenise first"),
    "tensors": (lambda t, m: PaddingCollator(t, m)([torch.tensor(ids) for ids in IDS]), 'Make dicts of them: .{"'),
    "the wrong way round": (lambda t, m: wrap_collator(m, SEQ2SEQ(t)), r"Make one: PaddingCollator\(tokenizer, model\)"),
    "data_collator=": (lambda t, m: wrap_collator(data_collator=SEQ2SEQ(t), model=m), "Pass the collator first"),
    "a side": (lambda t, m: wrap_collator(SEQ2SEQ(t), m, padding_side="left"), "Set it in the inner collator"),
}


@pytest.mark.parametrize(("line", "remedy"), SAID.values(), ids=SAID)
def test_a_line_that_is_not_taken_is_told_what_to_type(line, remedy, tokenizer, model):
    with pytest.raises(CollateError, match=remedy):
        line(tokenizer, model)


COUNTED = {
    "ours": lambda t, m, side: PaddingCollator(t, m, padding_side=side),
    "wrapped": lambda t, m, side: wrap_collator(SEQ2SEQ(t), m),
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", COUNTED.values(), ids=COUNTED)
def test_labels_are_as_many_as_each_sample_alone_learns(make, side, tokenizer, model):
    """A Trainer before transformers 5.16 divides the loss by `labels.ne(-100).sum()`."""
    tokenizer.padding_side = side
    collate, given = make(tokenizer, model, side), [{key: torch.tensor(ids) for key, ids in row.items()} for row in ROWS]
    assert int(collate(ROWS)["labels"].ne(-100).sum()) == sum(len(ids) - 1 for ids in IDS)
    assert int(collate(given[:1])["labels"].ne(-100).sum()) == len(IDS[0]) - 1
    assert given[0]["labels"].tolist() == IDS[0]  # the sample is as it was
