"""The main path, counted: from features to model input, one left-padded batch, as a reader would follow it."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from collate_npu import BatchAdapter, ContextParallel, PaddingCollator, adapt, check_delivery, describe, wrap_collator
from collate_npu.arrays import host_array, host_tensor
from collate_npu.integrations.megatron import gpt_batch
from collate_npu.keys import KEYS as KEYS_OF_BATCHES
from collate_npu.testing import tiny_model

ROWS = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4, 5, 6, 7, 8], "labels": [4, 5, 6, 7, 8]}]


def called(work):
    """`(module, function)` of each call of ours, in order; comprehensions and what `once` does are no calls that a reader
    follows."""
    calls = []

    def note(frame, event, _):
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if event == "call" and module.startswith("collate_npu.") and code.co_name[0] != "<" and code.co_name != "__get__":
            calls.append((module, code.co_name))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


MOST = {"auto": (144, 14, 52), "2d": (106, 11, 38)}
"""Calls, modules and re-entries, with the collator's masks by default and on their way to an adapter."""


@pytest.mark.models
@pytest.mark.parametrize("masks", MOST)
def test_a_reader_follows_few_calls_through_few_modules(masks):
    pytest.importorskip("transformers")
    collator = PaddingCollator(pad_token_id=0, padding_side="left", attention_mask=masks)
    adapter = BatchAdapter(tiny_model("qwen3_next", vocab_size=257))
    adapter(collator(ROWS))  # what is read once a process is read
    calls = called(lambda: adapter(collator(ROWS)))
    modules = [module for module, _ in calls]
    visits = Counter(module for before, module in pairwise(["", *modules]) if before != module)
    found = len(calls), len(visits), sum(times - 1 for times in visits.values())
    assert all(each <= most for each, most in zip(found, MOST[masks], strict=True)), found


def wrapped(batch, **settings):
    return wrap_collator(lambda rows: batch, **settings)(ROWS)


def adapted(batch):
    model = tiny_model("qwen3_next", vocab_size=257)
    handle = adapt(model)
    model(**{key: value for key, value in batch.items() if key != "attention_mask_2d"})
    handle.remove()


def flat(batch):
    offsets = {"cu_seqlens": [0, 3, 8], "position_ids": [[0, 1, 2, 0, 1, 2, 3, 4]]}
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    wrapped({"input_ids": ids, "labels": ids.clone(), **offsets}, consumer="megatron", model_type="qwen3_next")


LOCAL = nn.Sequential(type("DotProductAttention", (nn.Module,), {})())
LOCAL.config = SimpleNamespace(num_moe_experts=None, linear_attention_freq=None, masked_softmax_fusion=False)
KEYS = {"attention_mask", "attention_mask_2d", "position_ids", "labels"}
SAMPLES = KEYS - {"labels"} | {"input_ids"}
"""The samples tell what labels would say."""
OF_TRANSFORMERS = {"wrap_collator for a model", "wrap_collator of a flat row", "adapt", "check_delivery"}
DOORS = {
    "adapter of megatron": (BatchAdapter(consumer="megatron", needs_mask_2d=False), KEYS),
    "adapter of transformers": (BatchAdapter(consumer="transformers", needs_mask_2d=False), KEYS),
    "wrap_collator": (wrapped, SAMPLES),
    "wrap_collator for a model": (lambda batch: wrapped(batch, consumer="transformers", model_type="llama"), SAMPLES),
    "wrap_collator into a flat row": (lambda batch: wrapped(batch, padding_free=True), SAMPLES),
    "wrap_collator of a flat row": (flat, {"input_ids", "cu_seqlens"}),
    "adapt": (adapted, KEYS - {"attention_mask_2d"}),
    "gpt_batch": (lambda batch: gpt_batch(batch, LOCAL, context_parallel=ContextParallel(1, 0)), KEYS),
    "check_delivery": (lambda batch: check_delivery(tiny_model("qwen3_next", vocab_size=257), batch), KEYS),
    "describe": (describe, KEYS),
}


@pytest.mark.parametrize("door", DOORS)
def test_each_key_comes_to_the_host_once(door, monkeypatch):
    """By the value, wherever a module of ours converts it, and by its name."""
    if door in OF_TRANSFORMERS:
        pytest.importorskip("transformers")
    converted = []

    def noted(convert):
        def note(name, value):
            converted.append((name, value))  # held, so that no other gets its id
            return convert(name, value)

        return note

    read, keys = DOORS[door]
    batch = PaddingCollator(pad_token_id=0, padding_side="left", attention_mask="2d")(ROWS)
    read(batch)  # what is imported late is there
    for name, module in list(sys.modules.items()):
        for convert in (host_array, host_tensor) if name.startswith("collate_npu.") and "arrays" not in name else ():
            if getattr(module, convert.__name__, None) is convert:
                monkeypatch.setattr(module, convert.__name__, noted(convert))
    read(batch)
    times = Counter((name, id(value)) for name, value in converted if name in KEYS_OF_BATCHES)
    assert {name for name, _ in times} >= keys
    assert max(times.values()) == 1
