"""Sources: a batch as the house reads it: each value once, in any container; what has no rows or counts is refused."""

import pytest
import torch

from collate_npu import CollateError
from collate_npu.masks import block_mask, sources
from collate_npu.masks.sources import Sources
from collate_npu.segments import Segments


def test_a_value_is_read_once_and_that_of_a_changed_batch_anew():
    batch = Sources({"input_ids": [[1, 2]]})
    changed = batch | {"input_ids": [[3, 4]]}
    assert batch.array("input_ids") is batch.array("input_ids")
    assert changed.array("input_ids").tolist() == [[3, 4]]
    assert batch.array("input_ids").tolist() == [[1, 2]]
    assert not batch.counted  # nobody looked at positions yet


NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@pytest.mark.parametrize(
    "read",
    [
        lambda: Sources([("input_ids", [[1]])]),
        lambda: Sources({"input_ids": torch.ones(3)}).shape(),
        lambda: Sources({"input_ids": NESTED}).shape(),
        lambda: Sources({"seq_lens": [[2.5], [1]]}).lengths,
        lambda: Sources({"seq_lens": [[[2]], [[1]]]}).lengths,
    ],
)
def test_what_is_no_batch_no_tokens_and_no_lengths_is_refused(read):
    with pytest.raises(CollateError):
        read()


def test_one_row_of_positions_is_that_of_all():
    row = torch.arange(3)[None]
    for positions in (row, row.expand(2, 3), row.expand(4, 1, 3)):
        assert Sources({"position_ids": positions}).text_positions((2, 3)).tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("limit", [128 * 128, 128 * 128 - 1])
def test_a_predicate_takes_a_byte_a_place(limit, monkeypatch):
    monkeypatch.setattr(sources, "MAX_MASK_BYTES", limit)
    batch = Sources({"attention_mask": block_mask(Segments.from_lengths([100], 128))})
    if limit == 128 * 128:
        assert batch.masks["attention_mask"].shape == (1, 1, 128, 128)
        return
    with pytest.raises(CollateError, match="attention_mask"):
        _ = batch.masks
