"""What a batch costs, counted: calls follow the rows and never the tokens, and no byte is written that does not go out.

The limits stand a third above what was counted when they were written (Python 3.11). A change that goes beyond them is
either a mistake, or worth its price: then say so, and raise them. Times are in `benchmarks`. And what the package keeps for
the next batch has an end.
"""

import gc
import sys
from functools import partial
from types import SimpleNamespace

import counting
import live_bytes
import numpy as np
import pytest
import torch
from house import ROOT

from collate_npu import BatchAdapter, PaddingCollator

sys.path.insert(0, str(ROOT))

from benchmarks.groups import long

HOLDERS = {"lists": lambda ids: ids.tolist(), "arrays": np.copy, "tensors": lambda ids: torch.from_numpy(ids.copy())}
by_holder = pytest.mark.parametrize("holder", HOLDERS)


def samples(rows, width, holder="lists"):
    """From half the width on, so that there is padding."""
    lengths = np.linspace(width // 2, width, rows).astype(int)
    make = HOLDERS[holder]
    return [{"input_ids": make(np.arange(300, 300 + n)), "labels": make(np.arange(300, 300 + n))} for n in lengths]


LLAMA = SimpleNamespace(layer_types=["full_attention"], model_type="llama", _attn_implementation="flash_attention_2")
SETTINGS = {
    "right": ({}, 200, 13),
    "left": ({"padding_side": "left", "attention_mask": "2d"}, 200, 12),
    "flat": ({"padding_free": True}, 235, 11),
    "packed": ({"packing": True, "attention_mask": "2d"}, 195, 25),
    "megatron": ({"consumer": "megatron", "model": SimpleNamespace(layer_types=["linear_attention"])}, 260, 13),
    "transformers": ({"consumer": "transformers", "model": LLAMA, "padding_side": "left"}, 315, 13),
    "transformers, flat": ({"consumer": "transformers", "model": LLAMA, "padding_free": True}, 365, 11),
}
"""Settings of the collator, and of lists: calls of a batch, and of each of its rows."""
PASSES = {"flat": 4, "transformers": 1, "transformers, flat": 4}
"""In torch: offsets are a few small ones, and a model's 2D mask is int64."""
MORE = {"lists": (0, 0), "arrays": (16, -7), "tensors": (24, -7)}
"""More, or less, for what holds the rows."""


def counted(work_of):
    """`(calls of a batch, of each row, of 64 times the tokens)`."""
    made = {shape: counting.calls(work_of(*shape)) for shape in ((4, 64), (4, 4096), (36, 64))}
    each = (made[36, 64] - made[4, 64]) / 32
    return made[4, 64] - 4 * each, each, made[4, 4096] - made[4, 64]


@by_holder
@pytest.mark.parametrize("setting", SETTINGS)
def test_calls_of_the_collator_follow_the_rows_and_not_the_tokens(setting, holder):
    settings, fixed, each = SETTINGS[setting]
    collate = PaddingCollator(pad_token_id=0, **settings)
    found = counted(lambda rows, width: partial(collate, samples(rows, width, holder)))
    assert np.less_equal(found, (fixed + MORE[holder][0], each + MORE[holder][1], 8)).all(), found


def test_calls_of_the_adapter_follow_neither_rows_nor_tokens():
    adapter, collate = BatchAdapter(needs_mask_2d=True, consumer="megatron"), PaddingCollator(pad_token_id=0)
    found = counted(lambda rows, width: partial(adapter, collate(samples(rows, width))))
    assert np.less_equal(found, (250, 5, 8)).all(), found


@by_holder
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_collator_makes_no_pass_in_torch(setting, holder):
    """Numpy's copies begin ten times sooner; what torch sees are the finished tensors. Offsets are a few small ones."""
    collate = PaddingCollator(pad_token_id=0, **SETTINGS[setting][0])
    features = samples(4, 64, holder)
    found = counting.operations(lambda: collate(features))
    passes = [name for name in found if name not in ("aten.lift_fresh.default", "aten.detach.default")]
    assert len(passes) <= PASSES.get(setting, 0), passes


@pytest.mark.parametrize("holder", ["lists", "arrays"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_a_batch_takes_is_what_goes_out(setting, holder):
    collate = PaddingCollator(pad_token_id=0, **SETTINGS[setting][0])
    features = samples(8, 4096, holder)
    batch = collate(features)
    size = sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))
    assert live_bytes.peak_bytes(lambda: collate(features)) <= (1.2 if "flat" in setting else 1.1) * size


# --- caches

BATCHES, ENTRIES = 300, 256
"""How many come before, and then again; and what one cache may hold."""


def test_no_cache_of_the_package_grows_without_a_bound():
    gc.unfreeze()  # what is frozen is not among its objects
    batches = long.Batches(seed=1)
    for _ in range(BATCHES):
        batches.step()
    before = long.held()
    for _ in range(BATCHES):
        batches.step()
    gc.freeze()
    assert long.grown(before) == {}
    assert max(most for _, most in before.values() if most) <= ENTRIES
    assert "segments" in {name.split(".")[1] for name in before}
