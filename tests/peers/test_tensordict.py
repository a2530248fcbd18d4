"""TensorDict and nested tensors, as TransferQueue and verl hold batches, through every public entry: read, or refused in
words. Never a bare error, and nothing left out of a row.
"""

from functools import cache

import pytest
import torch

NEEDS = ("tensordict",)

# ruff: noqa: E402
from tensordict import MemoryMappedTensor, NonTensorStack, TensorDict, lazy_stack

from collate_npu import BatchAdapter, CollateError, PaddingCollator, check_delivery, describe, wrap_collator
from collate_npu.masks import segments_from_batch
from collate_npu.parallel import ContextParallel, split_batch
from collate_npu.testing import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
PAD = 250
RAGGED = [torch.tensor(row) for row in ([5, 6, 7, 8], [9], [10, 11])]
EQUAL = [torch.tensor(row) for row in ([5, 6, 7], [8, 1, 2], [9, 10, 3])]
UIDS = ("a", "b", "c")


def nested(rows, layout=torch.jagged):
    return torch.nested.as_nested_tensor(rows, layout=layout)


def held(ids, **more):
    return TensorDict({"input_ids": ids, **more}, [3])


def each(rows):
    return [TensorDict({"input_ids": row, "uid": uid}, []) for row, uid in zip(rows, UIDS)]


UNPADDED = {
    "jagged": lambda rows: {"input_ids": nested(rows)},
    "strided": lambda rows: {"input_ids": nested(rows, torch.strided)},
    "TensorDict of jagged": lambda rows: held(nested(rows)),
    "a lazy stack": lambda rows: lazy_stack(each(rows)),
}
SAMPLES = UNPADDED | {
    "with strings": lambda rows: held(nested(rows), uid=NonTensorStack(*UIDS)).lock_(),
    "a list of TensorDicts": each,
    "a jagged mask beside it": lambda rows: held(nested(rows), attention_mask=nested([torch.ones_like(x) for x in rows])),
}
DENSE = {
    "no batch size": lambda rows: TensorDict({"input_ids": torch.stack(rows)}, []),
    "rows of a memory map": lambda rows: list(held(MemoryMappedTensor.from_tensor(torch.stack(rows)))),
}


@pytest.mark.parametrize("collate", [PaddingCollator, lambda **told: wrap_collator(PaddingCollator(**told))])
@pytest.mark.parametrize("form", [*SAMPLES, *DENSE])
def test_a_collator_takes_it_and_every_row_is_the_samples(form, collate):
    for rows in (EQUAL,) if form in DENSE else (RAGGED, EQUAL):
        batch = collate(pad_token_id=PAD)((SAMPLES | DENSE)[form](rows))
        found = [ids[keep].tolist() for ids, keep in zip(batch["input_ids"], batch["attention_mask_2d"])]
        assert found == [row.tolist() for row in rows]
        assert [*batch.get("uid", UIDS)] == [*UIDS]
        assert {type(batch), *map(type, batch.values())} <= {dict, torch.Tensor, list, type(None)}


@pytest.mark.parametrize("rows", [RAGGED, EQUAL], ids=["ragged", "equal"])
def test_a_key_that_one_row_of_a_stack_lacks_is_named_and_not_dropped(rows):
    """The stack's own keys are those that all rows have."""
    samples = [{"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x} for x in rows]
    samples[0].pop("labels")
    stack = lazy_stack([TensorDict(row, []) for row in samples])
    for call in (PaddingCollator(pad_token_id=PAD), BatchAdapter(consumer="megatron", needs_mask_2d=True)):
        with pytest.raises(CollateError, match=r"Either every sample has labels|unequal rows"):
            call(stack)


@cache
def model():
    return tiny_model("qwen3_next", vocab_size=257)


TAKEN = [{"input_ids": ids} for ids in RAGGED]
ENTRIES = {
    "the adapter": lambda batch: {
        key: value.tolist() for key, value in BatchAdapter(model())(batch).items() if key != "uid"
    },
    "the door": segments_from_batch,
    "a wrapped collator": lambda batch: wrap_collator(lambda _: batch)(TAKEN)["attention_mask_2d"].tolist(),
    "delivery": lambda batch: bool(check_delivery(model(), batch).layers),
    "ranks that share rows": lambda batch: split_batch(batch, ContextParallel(2, 0))["input_ids"].tolist(),
    "describe": lambda batch: "lengths=[4, 1, 2]" in describe(batch),
}
PADDED = PaddingCollator(pad_token_id=PAD, attention_mask="2d", padding_side="left")(TAKEN)
PLAIN = {"input_ids": PADDED["input_ids"], "attention_mask": PADDED["attention_mask_2d"].long()}
FORMS = {
    "TensorDict": lambda: TensorDict(PLAIN, [3]),
    "no batch size": lambda: TensorDict(PLAIN, []),
    "a memory map": lambda: TensorDict(PLAIN, [3]).memmap(),
    "a lazy stack": lambda: lazy_stack(list(TensorDict({**PLAIN, "uid": NonTensorStack(*UIDS)}, [3]))),
}


@pytest.mark.parametrize("entry", [name for name in ENTRIES if name not in ("describe", "ranks that share rows")])
@pytest.mark.parametrize("form", UNPADDED)
def test_rows_that_are_not_padded_are_refused_but_by_a_collator(form, entry):
    with pytest.raises(CollateError, match="PaddingCollator, which takes them"):
        ENTRIES[entry](UNPADDED[form](RAGGED))


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("form", FORMS)
def test_a_padded_one_is_a_batch_like_any_other(form, entry):
    assert (found := ENTRIES[entry](FORMS[form]())) == ENTRIES[entry](PLAIN)
    assert found
