"""Columns: whoever holds the samples, the batch is the same; and what is no batch of samples is refused by name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from collate_npu import CollateError, PaddingCollator, wrap_collator

SETTINGS = ({"attention_mask": "2d"}, {"padding_side": "left"}, {"padding_free": True})


def samples_of(lengths):
    tokens = iter(range(100, 1000))
    rows = [[next(tokens) for _ in range(n)] for n in lengths]
    return [{"input_ids": row, "labels": [n + 20 for n in row], "loss_scale": [n / 4 for n in row]} for row in rows]


def same(one, other):
    assert list(one) == list(other)
    for key, value in one.items():
        assert torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key], key


ROWS = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=5)


@given(ROWS, st.booleans(), st.sampled_from([list, np.array, torch.tensor]), st.sampled_from(SETTINGS))
def test_the_batch_of_columns_is_that_of_the_list_of_samples(parts, packed, form, settings):
    """Also where `seq_lengths` of each sample say where its sequences part."""
    samples = samples_of([sum(row) for row in parts])
    samples = [{**sample, **({"seq_lengths": row} if packed else {})} for sample, row in zip(samples, parts)]
    collate = PaddingCollator(pad_token_id=0, **settings)
    same(collate(samples), collate({key: [form(sample[key]) for sample in samples] for key in samples[0]}))


def test_a_table_is_refused_with_the_rows_that_are_taken():
    table = pytest.importorskip("pyarrow").table({"input_ids": [[1, 2], [3]]})
    collate = PaddingCollator(pad_token_id=0)
    with pytest.raises(CollateError, match=r"Pass table\.to_pylist\(\)"):
        collate(table)
    assert collate(table.to_pylist())["input_ids"].tolist() == [[1, 2], [3, 0]]


@pytest.mark.parametrize("name", ["numpy", "torch", None])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_formatted_datasets_through_a_dataloader(name, whole, workers):
    datasets = pytest.importorskip("datasets")
    samples = samples_of([3, 5, 2, 4, 1])
    dataset = datasets.Dataset.from_list(samples).with_format(name)
    collate = PaddingCollator(pad_token_id=0)
    whole_batches = {"sampler": BatchSampler(SequentialSampler(dataset), 2, False), "batch_size": None}
    split = whole_batches if whole else {"batch_size": 2}
    loaded = list(DataLoader(dataset, collate_fn=collate, num_workers=workers, **split))
    for n, batch in enumerate(loaded):
        same(collate(samples[2 * n : 2 * n + 2]), batch)
        assert not any(isinstance(value, torch.Tensor) and value.is_shared() for value in batch.values()), "sent by torch"
    assert len(loaded) == 3


# --- rows that a loader packed


PLACES = [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]
PACKED_ROWS = [{"input_ids": [*range(3 + 9 * n, 8 + 9 * n)], "position_ids": row} for n, row in enumerate(PLACES)]


@pytest.mark.parametrize("form", [list, np.array, torch.tensor])
def test_positions_that_restart_part_a_row_as_the_door_would(form):
    rows = [{key: form(value) for key, value in row.items()} for row in PACKED_ROWS]
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    for features in (rows, columns):
        batch = PaddingCollator(pad_token_id=0)(features)
        assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2], [1, 1, 2, 2, 2]]
        flat = PaddingCollator(padding_free=True)(features)
        assert flat["cu_seq_lens_q"].tolist() == [0, 3, 5, 7, 10]
        assert flat["position_ids"].tolist() == [PLACES[0] + PLACES[1]]
    made = {key: torch.tensor([row[key] for row in PACKED_ROWS]) for key in PACKED_ROWS[0]}
    wrapped = wrap_collator(lambda _: dict(made))(rows)
    assert wrapped["segment_ids"].tolist() == [[1, 1, 1, 2, 2], [1, 1, 2, 2, 2]]
    ragged = PaddingCollator(pad_token_id=0, padding_side="left")([rows[0], {key: row[:2] for key, row in rows[1].items()}])
    assert ragged["segment_ids"].tolist() == [[1, 1, 1, 2, 2], [0, 0, 0, 1, 1]]


def test_positions_beside_a_mask_part_it_or_agree_with_it():
    row = PACKED_ROWS[0] | {"attention_mask": [1, 1, 1, 1, 0]}
    assert PaddingCollator(padding_free=True)([row])["cu_seq_lens_q"].tolist() == [0, 3, 4]
    with pytest.raises(CollateError, match="Positions restart at other tokens"):
        PaddingCollator(padding_free=True)([row | {"attention_mask": [1, 1, 2, 2, 2]}])


def test_samples_that_are_no_dicts_are_refused_with_what_makes_dicts_of_them():
    @dataclass
    class Sample:
        input_ids: list

    collator = PaddingCollator(pad_token_id=0)
    rows = [Sample([1, 2]), Sample([3])]
    with pytest.raises(CollateError, match=r"Pass dicts"):
        collator(rows)
    assert collator([vars(row) for row in rows])["input_ids"].tolist() == [[1, 2], [3, 0]]
    with pytest.raises(CollateError, match=r"dict\(zip\("):
        collator([([1, 2], [1, 2])])
    inside = [{"__key__": "a", "json": {"input_ids": [1, 2]}}]
    with pytest.raises(CollateError, match=r"sample\['json'\]"):
        collator(inside)
    assert collator([sample["json"] for sample in inside])["input_ids"].tolist() == [[1, 2]]
