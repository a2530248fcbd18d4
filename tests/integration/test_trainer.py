"""transformers' Trainer, really run: tiny hybrid models, real text, the mask recorded where it arrives."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import Trainer, TrainingArguments  # noqa: E402

from collate_npu import (  # noqa: E402
    BatchAdapter,
    CollateError,
    PaddingCollator,
    Pattern,
    Segments,
    UnsupportedFormError,
    dense,
    wrap_collator,
)
from collate_npu.integrations.delivery import check_delivery, received_masks  # noqa: E402
from collate_npu.integrations.transformers import declare_columns  # noqa: E402
from collate_npu.testing import byte_tokenizer, hybrid_model_types, tiny_model  # noqa: E402
from collate_npu.tools.audit.data import shipped_text  # noqa: E402
from collate_npu.tools.audit.samples import sample_ids  # noqa: E402

TOKENIZER = byte_tokenizer()  # pad is eos, and every sample ends with a real eos
IDS = sample_ids(shipped_text(), TOKENIZER, count=8, max_length=90, seed=3)
# Nothing predicts a first token, and the Trainer before 5.0 counts its label among the items it divides by.
SAMPLES = [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in IDS]
SIDES = ["left", "right"]
MODERN = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 0)


def model_of(name, **config):
    model = tiny_model(name, vocab_size=len(TOKENIZER))
    for key, value in config.items():
        setattr(model.config, key, value)
    return model


def arguments(tmp_path, **settings):
    given = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 1, "report_to": [], "seed": 0}
    return TrainingArguments(tmp_path, use_cpu=True, save_strategy="no", disable_tqdm=True, **{**given, **settings})


def trainer_of(model, tmp_path, collator, samples=SAMPLES, **settings):
    args = arguments(tmp_path, **settings)
    return Trainer(model, args, data_collator=collator, train_dataset=samples, eval_dataset=samples)


def loss_alone(model, ids=IDS):
    """Mean loss over all predicted tokens, each sample without padding and without a mask."""
    total, count = 0.0, 0
    with torch.no_grad():
        for row in ids:
            tokens = torch.tensor([row])
            logits = model(input_ids=tokens).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
            count += len(row) - 1
    return total / count


class Emitted:
    """A collator that remembers what it emitted."""

    def __init__(self, inner):
        self.inner, self.batches = inner, []

    def __call__(self, features):
        self.batches.append(self.inner(features))
        return dict(self.batches[-1])


def in_linear_layers(received):
    """What each Gated DeltaNet layer received, call by call."""
    return [calls for name, calls in received.items() if name.endswith("linear_attn")]


@pytest.fixture(params=["qwen3_next", "qwen3_5_text"])
def name(request):
    if request.param not in hybrid_model_types():
        pytest.skip(f"{request.param} is not in transformers {transformers.__version__}")
    return request.param


@pytest.mark.parametrize("side", SIDES)
def test_training_loss_is_that_of_the_samples_alone(name, side, tmp_path):
    model = model_of(name)
    alone = loss_alone(model)
    collator = Emitted(PaddingCollator(TOKENIZER, padding_side=side, model=model))
    trainer = trainer_of(model, tmp_path, collator, gradient_accumulation_steps=2, learning_rate=0.0, logging_steps=1)
    with received_masks(model) as received:
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx([alone], abs=2e-4)  # the Trainer rounds what it logs
    emitted = [batch["attention_mask"] for batch in collator.batches]
    assert sum(int(keep.sum()) for keep in emitted) == sum(map(len, IDS))
    for calls in in_linear_layers(received):
        for keep, mask in zip(emitted, calls):
            # transformers drops a mask of ones itself
            assert torch.equal(mask, keep) if mask is not None else keep.all()
    assert not all(keep.all() for keep in emitted)


def test_a_bare_4d_mask_trains_on_another_loss_without_a_word(tmp_path):
    """What the library is for; the day transformers refuses such a mask, this test says so."""
    model = model_of("qwen3_next")
    alone = loss_alone(model)
    inner = PaddingCollator(TOKENIZER, padding_side="left", attention_mask="2d")

    def bare(features):
        batch = inner(features)
        keep = Segments.from_keep(batch["attention_mask_2d"])
        return batch | {"attention_mask": dense(keep)}

    trainer = trainer_of(model, tmp_path, bare, gradient_accumulation_steps=2, learning_rate=0.0, logging_steps=1)
    with received_masks(model) as received:
        trainer.train()
    assert not any(mask is not None and mask.ndim == 2 for calls in in_linear_layers(received) for mask in calls)
    assert abs(trainer.state.log_history[0]["loss"] - alone) > 1e-3


@pytest.mark.parametrize("side", SIDES)
def test_evaluate_and_predict(name, side, tmp_path):
    model = model_of(name)
    trainer = trainer_of(model, tmp_path, PaddingCollator(TOKENIZER, padding_side=side, model=model))
    batch_losses = [loss_alone(model, IDS[:4]), loss_alone(model, IDS[4:])]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(sum(batch_losses) / 2, abs=1e-4)
    predictions = trainer.predict(SAMPLES).predictions
    with torch.no_grad():
        for row, ids in zip(predictions, IDS):
            own = model(input_ids=torch.tensor([ids])).logits[0]
            # the Trainer pads each batch's output on the right with -100, behind its own left or right padding
            real = torch.as_tensor(row[(row != -100).all(-1)])
            mine = real[: len(ids)] if side == "right" else real[-len(ids) :]
            assert (mine - own).abs().max() < 1e-4


@pytest.mark.parametrize("side", SIDES)
def test_label_smoothing_moves_with_the_samples_and_not_with_the_padding(side, tmp_path):
    model = model_of("qwen3_next")
    collator = PaddingCollator(TOKENIZER, padding_side=side, model=model)
    wider = PaddingCollator(TOKENIZER, padding_side=side, model=model, pad_to_multiple_of=128)
    losses = []
    for chosen in (collator, wider):
        trainer = trainer_of(model, tmp_path, chosen, label_smoothing_factor=0.1, learning_rate=0.0, logging_steps=1)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)


def test_non_padding_tokens_are_counted(tmp_path):
    model = model_of("qwen3_next")
    collator = PaddingCollator(TOKENIZER, padding_side="left", model=model)
    setting = {"include_num_input_tokens_seen": "non_padding"} if MODERN else {"include_num_input_tokens_seen": True}
    trainer = trainer_of(model, tmp_path, collator, gradient_accumulation_steps=2, **setting)
    trainer.train()
    padded = sum(4 * max(map(len, IDS[i : i + 4])) for i in (0, 4))
    real = sum(map(len, IDS))
    assert trainer.state.num_input_tokens_seen == (real if MODERN else pytest.approx(padded, rel=0.5))
    assert real < padded


@pytest.mark.skipif(not MODERN, reason="transformers before 5 counts experts in the aux loss of tiny models wrongly")
def test_moe_aux_loss_does_not_count_padding(tmp_path):
    model = model_of("qwen3_5_moe_text", output_router_logits=True)
    features = SAMPLES[:4]
    losses = []
    for multiple in (None, 128):
        collator = PaddingCollator(TOKENIZER, padding_side="left", model=model, pad_to_multiple_of=multiple)
        with torch.no_grad():
            losses.append(model(**collator(features)).aux_loss)
        trainer_of(model, tmp_path, collator, features, learning_rate=0.0).train()
    assert float(losses[0]) == pytest.approx(float(losses[1]), abs=1e-5)
    with torch.no_grad():
        bare = model(**{**collator(features), "attention_mask": None}).aux_loss
    assert abs(bare - losses[1]) > 1e-3


def test_a_mapping_beside_moe_aux_loss_is_refused():
    model = model_of("qwen3_next", output_router_logits=True)
    adapter = BatchAdapter(model, pattern=Pattern.prefix(2))
    batch = PaddingCollator(TOKENIZER, padding_side="left", attention_mask="2d")(SAMPLES[:2])
    with pytest.raises(UnsupportedFormError, match=r"aux loss"):
        adapter(batch)


def test_columns_survive_remove_unused_columns(tmp_path):
    """`seq_lengths` is no argument of any forward: undeclared, packed samples look like one sequence."""
    datasets = pytest.importorskip("datasets")
    model = model_of("qwen3_next")
    rows = [{"input_ids": [1, 2, 3, 4, 5], "labels": [1, 2, 3, 4, 5], "seq_lengths": [2, 3]}] * 2
    seen = []

    def collator(features):
        seen.append(sorted(features[0]))
        return PaddingCollator(TOKENIZER, model=model)([{"input_ids": [1], "labels": [1]}] * 2)

    for declare in (False, True):
        trainer = trainer_of(model, tmp_path, collator, datasets.Dataset.from_list(rows), per_device_train_batch_size=2)
        if declare:
            declare_columns(trainer)
        trainer.train()
    assert "seq_lengths" not in seen[0]
    assert "seq_lengths" in seen[-1]


def test_packed_rows_on_a_recurrent_model_are_refused():
    """The state would run from one sequence into the next; no mask of any form stops it."""
    model = model_of("qwen3_next")
    collator = PaddingCollator(TOKENIZER, model=model)
    with pytest.raises(UnsupportedFormError, match="recurrent layer carries its state"):
        collator([{"input_ids": [1, 2, 3, 4], "seq_lengths": [2, 2]}])


INNER = {
    "DataCollatorForSeq2Seq": lambda: transformers.DataCollatorForSeq2Seq(left(), padding=True),
    "DataCollatorWithPadding": lambda: transformers.DataCollatorWithPadding(left()),
    "DataCollatorForLanguageModeling": lambda: transformers.DataCollatorForLanguageModeling(left(), mlm=False),
}


def left():
    return byte_tokenizer(padding_side="left", pad_is_eos=False)


@pytest.mark.parametrize("kind", INNER)
def test_wrapped_collators_reach_the_layers(kind, name):
    model = tiny_model(name, vocab_size=len(left()))
    features = [{"input_ids": ids} for ids in IDS[:4]]
    if kind == "DataCollatorForSeq2Seq":
        features = [dict(feature, labels=list(feature["input_ids"])) for feature in features]
    batch = wrap_collator(INNER[kind](), model=model)(features)
    check_delivery(model, batch)
    with torch.no_grad():
        logits = model(**batch).logits
        for row, ids in zip(logits, IDS):
            assert (row[-len(ids) :] - model(input_ids=torch.tensor([ids])).logits[0]).abs().max() < 1e-4


@pytest.mark.parametrize("attn", ["sdpa", "flash_attention_2"])
def test_flattening_keeps_one_row_and_gets_all_its_offsets(attn):
    """Flash kernels read the offsets; sdpa reads neither them nor positions that restart, so it gets a mask beside them."""
    inner = transformers.DataCollatorWithFlattening()
    features = [{"input_ids": ids, "labels": ids} for ids in IDS[:3]]
    config = transformers.Qwen3Config()
    config._attn_implementation = attn
    batch = wrap_collator(inner, consumer="transformers", model=config)(features)
    lengths = [len(ids) for ids in IDS[:3]]
    if attn == "sdpa":
        assert torch.equal(batch["attention_mask"], dense(Segments.from_lengths([lengths])))
    else:
        assert batch["attention_mask"] is None
    assert "attention_mask_2d" not in batch
    assert batch["cu_seq_lens_q"].tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert batch["seq_idx"].unique().tolist() == [0, 1, 2]
    assert batch["max_length_q"] == max(lengths)


def test_check_delivery_names_the_deaf_layers():
    model = model_of("qwen3_next")
    collator = PaddingCollator(TOKENIZER, padding_side="left", attention_mask="2d")
    batch = collator(SAMPLES[2:4])
    truth = Segments.from_keep(batch["attention_mask_2d"])
    with pytest.raises(CollateError, match=r"layers\.0|in no layer"):
        check_delivery(model, batch | {"attention_mask": dense(truth)})
    check_delivery(model, BatchAdapter(model)(batch))


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_prefix_pattern_leaves_as_a_mapping_that_is_exact(attn):
    """Attention sees the prefix both ways, recurrent layers keep the 2D mask; alone, the same mapping without padding."""
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 13):
        pytest.skip("a mapping of masks needs transformers 5.13")
    model = tiny_model("qwen3_next", vocab_size=len(TOKENIZER), attn_implementation=attn)
    adapter = BatchAdapter(model, pattern=Pattern.prefix(3))
    collator = PaddingCollator(TOKENIZER, padding_side="left", attention_mask="2d")
    batch = adapter(collator(SAMPLES[:4]))
    assert set(batch["attention_mask"]) == {"full_attention", "linear_attention"}
    with torch.no_grad():
        logits = model(**batch).logits
        for row, sample in zip(logits, SAMPLES):
            own = model(**adapter(collator([sample]))).logits[0]
            assert (row[-len(own) :] - own).abs().max() < 1e-4
        causal = model(input_ids=torch.tensor([IDS[0]])).logits[0]
    assert (logits[0, -len(IDS[0]) :] - causal).abs().max() > 1e-2
