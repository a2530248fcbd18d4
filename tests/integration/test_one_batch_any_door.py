"""Law 15: a stranger's batch has one meaning, whatever door it comes by: loss and gradient of the samples alone.

Batches are laid out here by hand, as the collators of transformers, TRL and packing trainers lay them out: labels that copy
the ids, positions by place, 2D masks, packing ids.
"""

from functools import cache

import pytest
import torch
from hypothesis import given, strategies as st

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Pattern, Segments, adapt, wrap_collator
from collate_npu.masks import dense

transformers = pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # noqa: E402

from collate_npu.testing import tiny_model  # noqa: E402

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]
HYBRIDS, ENCODERS = ("qwen3_next", "qwen3_5_text", "bamba", "lfm2"), ("bert", "roberta")
FAMILIES = ("llama", "gpt2", "mistral", "gemma3_text", *HYBRIDS, *ENCODERS)
VOCAB, PAD = 61, 60


@cache
def model_of(family):
    if family not in CONFIG_MAPPING_NAMES or (family == "lfm2" and transformers.__version__ < "5"):
        pytest.skip("this transformers has none that reads its mask")
    return tiny_model(family, vocab_size=VOCAB)


def numbers(model, batches):
    """The mean loss over all targets of the batches, and its gradient."""
    model.zero_grad(set_to_none=True)
    total, count = 0.0, 0
    in_place = model.config.model_type in ENCODERS
    moved = slice(0 if in_place else 1, None)
    for batch in batches:
        targets = int((batch["labels"][:, moved] >= 0).sum())
        total = total + run(model, batch).loss * targets if targets else total
        count += targets
    loss = total / count
    loss.backward()
    return loss.detach(), gradient_of(model)


def gradient_of(model):
    """Of experts that no token chose it is zero, or nothing."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([grad.flatten() for grad in grads])


def run(model, batch):
    return model(**batch) if model.config.model_type in ENCODERS else model(**batch, use_cache=False)


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


DOORS = {
    "adapter": lambda model, batch, rows: BatchAdapter(model)(batch),
    "wrapped": lambda model, batch, rows: wrap_collator(lambda _: batch, model=model)(rows),
    "our collator": lambda model, batch, rows: PaddingCollator(pad_token_id=PAD, model=model)(rows),
    "adapt": None,
}


def through(door, model, batch, rows):
    before = {key: value.clone() for key, value in batch.items()}
    if door == "adapt":
        handle = adapt(model)
        try:
            found = own_loss(model, batch)
        finally:
            handle.remove()
    else:
        found = numbers(model, [DOORS[door](model, batch, rows)])
    assert all(torch.equal(before[key], batch[key]) for key in before)  # never written to
    return found


def own_loss(model, batch):
    """The adapter stands before the forward: the loss is what the model itself makes of the batch."""
    model.zero_grad(set_to_none=True)
    loss = run(model, batch).loss
    loss.backward()
    return loss.detach(), gradient_of(model)


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
    if family in (*HYBRIDS, *ENCODERS):
        layout = padded  # several sequences in a row are refused there, or never packed
    alone = numbers(model, [padded([row], "right", "none") for row in rows])
    found = through(door, model, layout(rows, side, positions), rows)
    for mine, reference in zip(found, alone):
        assert float((mine - reference).norm() / reference.norm()) <= 1e-4


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("family", "first"), [("gpt2", 0), ("bert", 0), ("roberta", 0), ("roberta", PAD + 1)])
def test_one_row_of_places_is_that_of_all_rows(family, first, side):
    model, rows = model_of(family), [{"input_ids": [*range(1, n)], "labels": [*range(1, n)]} for n in (5, 9, 3)]
    batch = padded(rows, side, "by place")
    batch["position_ids"] = batch["position_ids"][:1] + first
    alone = numbers(model, [padded([row], "right", "none") for row in rows])
    for mine, reference in zip(through("adapter", model, batch, rows), alone):
        assert float((mine - reference).norm() / reference.norm()) <= 1e-4


def test_a_mask_of_the_models_own_window_is_taken():
    model, segments = model_of("mistral"), Segments.from_lengths([12, 9], side="left")
    rows = [{"input_ids": list(range(1, n + 1)), "labels": list(range(1, n + 1))} for n in (12, 9)]
    window = dense(segments, polarity="keep", pattern=Pattern.sliding(model.config.sliding_window))
    batch = {**padded(rows, "left", "none"), "attention_mask": window}
    alone = numbers(model, [padded([row], "right", "none") for row in rows])
    chunks = dense(segments, polarity="keep", pattern=Pattern.chunked(model.config.sliding_window))
    with pytest.raises(CollateError, match=r"Pattern\.chunked\(8\)"):  # of the same size, and another pattern
        BatchAdapter(model)({**batch, "attention_mask": chunks, "attention_mask_2d": segments.keep})
    for door in ("adapter", "wrapped", "adapt"):
        for mine, reference in zip(through(door, model, batch, rows), alone):
            assert float((mine - reference).norm() / reference.norm()) <= 1e-4


@pytest.mark.parametrize("multiple", [None, 8], ids=["whole", "with a tail"])
def test_one_sample_in_a_flat_row_of_a_hybrid_needs_no_kernels(multiple):
    """Two are refused with a remedy; one has no boundary to keep."""
    model, row = model_of("qwen3_next"), {"input_ids": [1, 2, 3, 4, 5], "labels": [1, 2, 3, 4, 5]}
    collate = PaddingCollator(pad_token_id=PAD, padding_free=True, pad_to_multiple_of=multiple, model=model)
    alone = numbers(model, [padded([row], "right", "none")])
    for mine, reference in zip(numbers(model, [collate([row])]), alone):
        assert float((mine - reference).norm() / reference.norm()) <= 1e-4
    with pytest.raises(CollateError, match="Give each sequence its own row"):
        collate([row, row])
