"""Megatron's indexed datasets (megatron-core 0.16.1 datasets/gpt_dataset.py:225-296): rows of one length under `tokens`,
labels that stand with the token before, `loss_mask` and positions, by torch's own collation. Wrapped they keep their names,
and documents are told apart where positions or masks say so.
"""

from functools import cache

import numpy as np
import pytest
import torch

NEEDS = ("megatron",)

# ruff: noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from torch.utils.data import DataLoader, default_collate

from collate_npu import wrap_collator
from collate_npu.errors import UnsupportedFormError
from collate_npu.masks import segments_from_batch

pytestmark = pytest.mark.filterwarnings("ignore")
EOD = 1
OURS = wrap_collator(default_collate)
PARTED = {"reset_position_ids": True}
MASKED = {"reset_position_ids": True, "reset_attention_mask": True, "create_attention_mask": True}


class Tokens:
    vocab_size, eod, pad, unique_identifiers = 300, EOD, 2, {"class": "numbers"}


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    """`indexed(**settings)`: the rows of eight tokens that Megatron cuts from six documents."""
    path = str(tmp_path_factory.mktemp("indexed") / "documents")
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.int32)
    for n, length in enumerate((5, 7, 3, 9, 4, 6)):
        builder.add_document(torch.tensor([*range(10 + 20 * n, 9 + 20 * n + length), EOD], dtype=torch.int32), [length])
    builder.finalize(f"{path}.idx")

    @cache
    def made(**settings):
        names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask")
        asked = dict.fromkeys(names, False)
        where = {"blend": ([path], None), "split": "1,0,0", "tokenizer": Tokens(), "random_seed": 1, "sequence_length": 8}
        config = GPTDatasetConfig(**where, **{**asked, **settings})
        dataset = BlendedMegatronDatasetBuilder(GPTDataset, [4, 0, 0], lambda: True, config).build()[0]
        return [dataset[n] for n in range(4)]

    return made


def ends(row):
    """The documents of a row of tokens, each with its end."""
    places = [n + 1 for n, token in enumerate(row.tolist()) if token == EOD]
    return [n for n in np.diff([0, *places, len(row)]).tolist() if n]


@pytest.mark.parametrize("settings", [{}, {"create_attention_mask": True}], ids=["no mask", "mask"])
def test_rows_that_are_one_sequence_stay_as_megatron_made_them(indexed, settings):
    rows = indexed(**settings)
    theirs, (batch,) = default_collate(rows), DataLoader(rows, batch_size=4, collate_fn=OURS, num_workers=1)
    assert all(batch[key].equal(theirs[key]) for key in ("tokens", "labels", "loss_mask", "position_ids"))
    assert batch["attention_mask"] is None
    assert batch["attention_mask_2d"].all()
    model = wrap_collator(default_collate, model_type="qwen3_next", consumer="megatron")
    assert model(rows)["attention_mask"] is None


@pytest.mark.parametrize("settings", [PARTED, MASKED], ids=["positions", "masks"])
def test_documents_are_parted_and_nothing_is_predicted_across_them(indexed, settings):
    rows = indexed(**settings)
    batch = OURS(rows)
    segments = segments_from_batch(batch)
    assert [list(lengths) for lengths in segments.lengths] == [ends(row["tokens"]) for row in rows]
    for b, row in enumerate(rows):
        last = row["tokens"] == EOD
        last[-1] = False
        assert batch["labels"][b].equal(row["labels"].masked_fill(last, -100))
        assert batch["loss_mask"][b].equal(row["loss_mask"].masked_fill(last, 0)), "Megatron's loss reads this, not -100"
    with pytest.raises(UnsupportedFormError, match="Give each sequence its own row"):
        wrap_collator(default_collate, model_type="qwen3_next", consumer="megatron")(rows)


def test_labels_under_tokens_that_are_not_moved_lose_the_first_of_each_document():
    """torchtune's samples are named so too, and its recipes move the labels."""
    tokens, positions = torch.arange(10, 18), torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])
    rows = [{"tokens": tokens + 20 * n, "labels": tokens + 20 * n, "position_ids": positions} for n in range(2)]
    assert OURS(rows)["labels"][0].tolist() == [10, 11, 12, -100, 14, 15, 16, 17]
