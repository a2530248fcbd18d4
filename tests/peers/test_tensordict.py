"""TensorDict and nested tensors, as TransferQueue and verl hold batches, through every public entry: read, or refused in
words. Never a bare error, and nothing left out of a row.

Legend: B rows, S width.
"""

from functools import cache

import pytest
import torch

NEEDS = ("tensordict",)

# ruff: noqa: E402
from tensordict import MemoryMappedTensor, NonTensorStack, TensorDict, lazy_stack

import collate_npu
from collate_npu import BatchAdapter, CollateError, PaddingCollator, check_delivery, describe, split_batch, wrap_collator
from collate_npu.masks import segments_from_batch
from collate_npu.testing import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
PAD = 250
RAGGED = [torch.tensor(row) for row in ([5, 6, 7, 8], [9], [10, 11])]
EQUAL = [torch.tensor(row) for row in ([5, 6, 7], [8, 1, 2], [9, 10, 3])]
PADDED = torch.tensor([[PAD, PAD, 7, 8], [4, 5, 6, 7], [PAD, 1, 2, 3]])
KEEP = (PADDED != PAD).long()


def nested(rows, layout=torch.jagged):
    return torch.nested.as_nested_tensor(rows, layout=layout)


def held(ids, rows=3, **more):
    return TensorDict({"input_ids": ids, **more}, [rows])


SAMPLES = {
    "jagged": lambda rows: {"input_ids": nested(rows)},
    "strided": lambda rows: {"input_ids": nested(rows, torch.strided)},
    "TensorDict of jagged": lambda rows: held(nested(rows)),
    "locked": lambda rows: held(nested(rows)).lock_(),
    "with strings": lambda rows: held(nested(rows), uid=NonTensorStack("a", "b", "c")),
    "a lazy stack": lambda rows: lazy_stack([TensorDict({"input_ids": row, "uid": "a"}, []) for row in rows]),
    "a list of TensorDicts": lambda rows: [TensorDict({"input_ids": row, "uid": "a"}, []) for row in rows],
    "a jagged mask beside it": lambda rows: held(nested(rows), attention_mask=nested([torch.ones_like(x) for x in rows])),
}
DENSE = {
    "no batch size": lambda rows: TensorDict({"input_ids": torch.stack(rows)}, []),
    "a memory map": lambda rows: {"input_ids": MemoryMappedTensor.from_tensor(torch.stack(rows))},
    "rows of a memory map": lambda rows: list(held(MemoryMappedTensor.from_tensor(torch.stack(rows)))),
}


@pytest.mark.parametrize("collate", [PaddingCollator, lambda **told: wrap_collator(PaddingCollator(**told))])
@pytest.mark.parametrize("form", [*SAMPLES, *DENSE])
def test_a_collator_takes_it_and_every_row_is_the_samples(form, collate):
    for rows in (EQUAL,) if form in DENSE else (RAGGED, EQUAL):
        batch = collate(pad_token_id=PAD)((SAMPLES | DENSE)[form](rows))
        for row, ids, keep in zip(rows, batch["input_ids"], batch["attention_mask_2d"]):
            assert ids[keep].tolist() == row.tolist()
            assert keep.sum() == len(row)
        assert type(batch) is dict
        assert batch.get("uid", ["a", "a", "a"]) in (["a", "a", "a"], ["a", "b", "c"])
        assert all(type(value) in (torch.Tensor, list, type(None)) for value in batch.values())


@pytest.mark.parametrize("rows", [RAGGED, EQUAL], ids=["ragged", "equal"])
def test_a_key_that_one_row_of_a_stack_lacks_is_named_and_not_dropped(rows):
    """The stack's own keys are those that all rows have."""
    held = [{"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x} for x in rows]
    held[0].pop("labels")
    stack = lazy_stack([TensorDict(row, []) for row in held])
    for call in (PaddingCollator(pad_token_id=PAD), BatchAdapter(consumer="megatron", needs_mask_2d=True)):
        with pytest.raises(CollateError, match=r"Either every sample has labels|unequal rows"):
            call(stack)


UNPADDED = {name: SAMPLES[name] for name in ("jagged", "strided", "TensorDict of jagged", "a lazy stack")}


@cache
def model():
    return tiny_model("qwen3_next", vocab_size=257)


ENTRIES = {
    "the adapter": lambda batch: BatchAdapter(model())(batch),
    "the door": segments_from_batch,
    "a wrapped collator": lambda batch: wrap_collator(lambda _: batch)([{"input_ids": row} for row in RAGGED]),
    "delivery": lambda batch: check_delivery(model(), batch),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("form", UNPADDED)
def test_elsewhere_rows_that_are_not_padded_are_refused_and_the_remedy_works(form, entry):
    with pytest.raises(CollateError, match="PaddingCollator, which takes them"):
        ENTRIES[entry](UNPADDED[form](RAGGED))
    batch = PaddingCollator(pad_token_id=PAD, model=model())(UNPADDED[form](RAGGED))
    assert check_delivery(model(), batch).layers


PADDED_FORMS = {
    "TensorDict": lambda: held(PADDED, attention_mask=KEEP),
    "no batch size": lambda: TensorDict({"input_ids": PADDED, "attention_mask": KEEP}, []),
    "a memory map": lambda: held(PADDED, attention_mask=KEEP).memmap(),
    "a lazy stack": lambda: lazy_stack(list(held(PADDED, attention_mask=KEEP, uid=NonTensorStack("a", "b", "c")))),
}


@pytest.mark.parametrize("form", PADDED_FORMS)
def test_a_padded_one_is_a_batch_like_any_other(form):
    batch, plain = PADDED_FORMS[form](), {"input_ids": PADDED, "attention_mask": KEEP}
    assert segments_from_batch(batch) == segments_from_batch(plain)
    out, same = BatchAdapter(model())(batch), BatchAdapter(model())(plain)
    assert out.pop("uid", ["a", "b", "c"]) == ["a", "b", "c"]
    assert {key: value.tolist() for key, value in out.items()} == {key: value.tolist() for key, value in same.items()}
    assert "lengths=[2, 4, 3]" in describe(batch)
    assert check_delivery(model(), batch).layers
    wrapped = wrap_collator(lambda _: batch)([{"input_ids": row[row != PAD]} for row in PADDED])
    assert wrapped["attention_mask_2d"].equal(KEEP.bool())
    cp = collate_npu.ContextParallel(2, 0)
    shard = split_batch({**plain, "attention_mask_2d": KEEP.bool()}, cp)["input_ids"]
    if form not in ("no batch size", "a lazy stack"):
        assert split_batch(batch, cp)["input_ids"].equal(shard)
