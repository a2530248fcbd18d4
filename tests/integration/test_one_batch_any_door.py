"""Law 15: a stranger's batch has one meaning, whatever door it comes by: loss and gradient of the samples alone.

Batches are laid out here by hand, as the collators of transformers, TRL and packing trainers lay them out: labels that copy
the ids, positions by place, 2D masks, packing ids.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, strategies as st

from collate_npu import BatchAdapter, PaddingCollator, adapt, wrap_collator

transformers = pytest.importorskip("transformers")

from collate_npu.testing import tiny_model  # noqa: E402

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]
FAMILIES = ("llama", "gpt2", "mistral", "gemma3_text", "qwen3_next", "qwen3_5_text", "bamba", "lfm2")
VOCAB, PAD = 61, 60


@cache
def model_of(family):
    return tiny_model(family, vocab_size=VOCAB)


def numbers(model, batches):
    """The mean loss over all targets of the batches, and its gradient."""
    model.zero_grad(set_to_none=True)
    total, count = 0.0, 0
    for batch in batches:
        targets = int((batch["labels"][:, 1:] >= 0).sum())
        total = total + model(**batch, use_cache=False).loss * targets if targets else total
        count += targets
    loss = total / count
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@st.composite
def samples(draw):
    """Token ids and labels of some samples of unequal length; labels copy the ids, or begin behind a prompt."""
    lengths = draw(st.lists(st.integers(2, 12), min_size=2, max_size=3).filter(lambda n: len(set(n)) > 1))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    found = []
    for n in lengths:
        ids = torch.randint(0, PAD, (n,), generator=generator).tolist()
        prompt = draw(st.sampled_from([0, 0, 1, n // 2]))
        found.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return found


def padded(rows, side, positions):
    """As transformers' DataCollatorForSeq2Seq pads: labels with -100, a 2D mask; perhaps positions by place."""
    width = max(len(row["input_ids"]) for row in rows)

    def laid(row, fill):
        empty = [fill] * (width - len(row))
        return [*empty, *row] if side == "left" else [*row, *empty]

    out = {
        "input_ids": torch.tensor([laid(row["input_ids"], PAD) for row in rows]),
        "attention_mask": torch.tensor([laid([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor([laid(row["labels"], -100) for row in rows]),
    }
    if positions == "by place":
        out["position_ids"] = torch.arange(width).expand(len(rows), width).clone()
    return out


def packed(rows, side, positions):
    """As a packing trainer without kernels of its own: one row, packing ids for a mask."""
    ids, labels = ([x for row in rows for x in row[key]] for key in ("input_ids", "labels"))
    numbered = [n for n, row in enumerate(rows, 1) for _ in row["input_ids"]]
    laid = {"input_ids": torch.tensor([ids]), "attention_mask": torch.tensor([numbered]), "labels": torch.tensor([labels])}
    return laid | ({"position_ids": torch.arange(len(ids))[None]} if positions == "by place" else {})


def by_adapter(model, batch, rows):
    return BatchAdapter(model)(batch)


def by_wrapping(model, batch, rows):
    return wrap_collator(lambda _: batch, model=model)(rows)


def by_collator(model, batch, rows):
    return PaddingCollator(pad_token_id=PAD, model=model)(rows)


DOORS = {"adapter": by_adapter, "wrapped": by_wrapping, "our collator": by_collator, "adapt": None}


def through(door, model, batch, rows):
    before = {key: value.clone() for key, value in batch.items()}
    if door == "adapt":
        handle = adapt(model)
        try:
            found = numbers_of_own_labels(model, batch)
        finally:
            handle.remove()
    else:
        found = numbers(model, [DOORS[door](model, batch, rows)])
    assert all(torch.equal(before[key], batch[key]) for key in before)  # never written to
    return found


def numbers_of_own_labels(model, batch):
    """The adapter stands before the forward: the loss is what the model itself makes of the batch."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", FAMILIES)
@given(
    samples(),
    st.sampled_from(sorted(DOORS)),
    st.sampled_from(["left", "right"]),
    st.sampled_from([padded, packed]),
    st.sampled_from(["none", "by place"]),
)
def test_a_strangers_batch_has_one_meaning(family, rows, door, side, layout, positions):
    model = model_of(family)
    if layout is packed and family in ("qwen3_next", "qwen3_5_text", "bamba", "lfm2"):
        layout = padded  # several sequences in a row of a hybrid are refused
    alone = numbers(model, [padded([row], "right", "none") for row in rows])
    found = through(door, model, layout(rows, side, positions), rows)
    for mine, reference in zip(found, alone):
        assert float((mine - reference).norm() / reference.norm()) <= 1e-4
