"""Limits: every public function that takes a batch is measured, and no text of any size comes back in what it says."""

import inspect
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch

import collate_npu
from collate_npu import CollateError, PaddingCollator, describe, masks, outputs, parallel, proof, split_batch, wrap_collator
from collate_npu.kernels import fusion_attention, gated_delta

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import public
from benchmarks.groups import growth

HUGE = 1_000_000
TEXTS = {"letters": "x" * HUGE, "what is escaped": "\x1b" * HUGE, "beyond Latin": "\U0001f600" * HUGE}
MOST_TEXT, TIMES = 60_000, 10
"""Characters, and the memory that a text may take by what it is itself."""
BATCH = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "attention_mask_2d": torch.ones(1, 4, dtype=torch.bool)}
ROW = {"input_ids": [1, 2]}


def test_every_public_function_that_takes_a_batch_is_measured():
    rooms = (collate_npu, masks, parallel, fusion_attention, gated_delta, proof)
    names = {"check_call", *(name for room in rooms for name in room.__all__)}
    here = {name: getattr(each, "__module__", "") for name, each in vars(outputs).items() if name[0] != "_"}
    names |= {name for name, module in here.items() if module == outputs.__name__}
    measured = {what.partition(",")[0].partition(".")[0] for what in public.CALLS}
    assert names == measured | public.FREE
    assert not measured & public.FREE


def said(call):
    """All that came back as text, and the memory it took."""
    tracemalloc.start()
    try:
        text = repr(call())
    except CollateError as error:
        text = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return len(text), peak


def options():
    """Public functions by their options that take a text."""
    for what, call in public.CALLS.items():
        function = getattr(call.work, "func", call.work)
        if "," in what or not hasattr(function, "__wrapped__"):
            continue
        for name, each in inspect.signature(function).parameters.items():
            if each.kind is each.KEYWORD_ONLY and any(kind in str(each.annotation) for kind in ("str", "int", "Literal")):
                yield pytest.param(call, name, id=f"{what} {name}")


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize(("call", "name"), options())
def test_an_option_of_any_size_is_refused_in_few_words(call, name, text):
    given = growth.unasked(call.made(growth.AXES[call.axes.split()[-1]](160)))
    found = said(lambda: call.work(*given, **{name: text}))
    assert found[0] <= MOST_TEXT
    assert found[1] <= TIMES * sys.getsizeof(text)


IN_A_BATCH = {
    "a value, described": lambda text: describe({**BATCH, "note": text}),
    "a key, described": lambda text: describe({**BATCH, text: 1}),
    "tokens, described": lambda text: describe({"input_ids": text}),
    "a value, split": lambda text: split_batch({**BATCH, "attention_mask": text}, public.CP),
    "a key, split": lambda text: split_batch({**BATCH, text: torch.ones(3, 4)}, public.CP),
    "keys alone, split": lambda text: split_batch({text: 1}, public.CP),
    "tokens": lambda text: PaddingCollator(pad_token_id=0)([{"input_ids": text}]),
    "labels": lambda text: PaddingCollator(pad_token_id=0)([{**ROW, "labels": text}]),
    "a key": lambda text: PaddingCollator(pad_token_id=0)([{**ROW, text: [1]}, {**ROW, text: [1, 2, 3]}]),
    "an option": lambda text: PaddingCollator(pad_token_id=0, padding=text),
    "a wrapped collator's": lambda text: wrap_collator(lambda rows: {text: 1})([ROW]),
    "an adapter's": lambda text: public.PADDED({**BATCH, "attention_mask": text}),
    "an adapter's keys": lambda text: public.PADDED({text: 1}),
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("where", IN_A_BATCH)
def test_nor_does_a_text_in_a_batch_come_back(where, text):
    found = said(lambda: IN_A_BATCH[where](text))
    kept = 10 * HUGE if where in ("a value, split", "tokens", "a key") else 0  # in the batch that goes out, it may
    assert found[0] <= MOST_TEXT + kept
    assert found[1] <= TIMES * sys.getsizeof(text)
