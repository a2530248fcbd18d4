"""ms-swift 4.6.0 on its transformers backend: what its real template sends is right for recurrent models, or refused."""

import pytest
import torch
from cells import Stack, verdict
from swift.model.models import qwen
from swift_world import LENGTHS, VOCABULARY, samples, template
from transformers.models.qwen3_5 import modeling_qwen3_5

from collate_npu import BatchAdapter, CollateError, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations import swift
from collate_npu.integrations.swift import check_batch
from collate_npu.kernels.gated_delta import reference_causal_conv1d, reference_gated_delta_rule
from collate_npu.testing import tiny_model

NEEDS = ("swift", "mcore_bridge", "megatron")

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def logits(model, batch):
    read = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids") if key in batch}
    with torch.no_grad():
        return model(**read).logits


def alone(model, *lengths):
    return [logits(model, {"input_ids": torch.tensor([row["input_ids"]])})[0] for row in samples(*lengths)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "qwen3"])
@pytest.mark.usefixtures("installed")
def test_its_padded_batches_are_what_our_adapter_makes_and_each_sample_is_as_alone(model_type, implementation, side):
    model = tiny_model(model_type, vocab_size=VOCABULARY, attn_implementation=implementation)
    batch = template(transformers=model_type, side=side).data_collator(samples(*LENGTHS))
    ours = BatchAdapter(model)(batch)
    assert batch["attention_mask"].dtype == ours["attention_mask"].dtype == torch.int64
    assert torch.equal(batch["attention_mask"], ours["attention_mask"])
    truth, padded = Segments.from_lengths(LENGTHS, side=side).keep, logits(model, batch)
    for row, keep, lonely in zip(padded, truth, alone(model, *LENGTHS)):
        assert (row[keep] - lonely).abs().max() < 2e-5


LAYOUTS = ("padded right", "padded left", "packed")


@pytest.fixture
def loaded(request, monkeypatch):
    """What its loader of Qwen3.5 puts into the layers, and fla's kernels, in whose place stand our references (model/models/
    qwen.py:1294-1435, 1558-1634)."""
    layers, before = modeling_qwen3_5.Qwen3_5GatedDeltaNet, dict(vars(modeling_qwen3_5.Qwen3_5GatedDeltaNet))
    monkeypatch.setattr(qwen, "causal_conv1d", reference_causal_conv1d if request.param else None)
    monkeypatch.setattr(qwen, "chunk_gated_delta_rule", reference_gated_delta_rule if request.param else None)
    qwen._patch_qwen3_5_linear_attention_sequence_parallel()
    yield
    for name in {*vars(layers)} - {*before}:
        delattr(layers, name)
    layers.forward = before["forward"]


@pytest.mark.parametrize(("layout", "loaded"), [("packed", False), ("packed, kernels there", True)], indirect=["loaded"])
@pytest.mark.usefixtures("loaded")
def test_it_packs_qwen3_5_itself_where_flas_kernels_are_and_raises_where_not(layout):
    """Its template of Qwen3.5 sends offsets. Ours refuses the batch, right or not: it does not know the loader's layers."""
    model, made = tiny_model("qwen3_5_text", vocab_size=VOCABULARY), template(transformers="qwen3_5_text", padding_free=True)
    wanted, found = alone(model, *LENGTHS), {}
    for who in ("alone", "ours"):
        try:
            swift.install() if who == "ours" else None
            batch = made.data_collator(samples(*LENGTHS))
            ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
            told = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
            with torch.no_grad():
                row = model(
                    input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False, **told
                ).logits[0]
            found[who] = verdict(max(float((x - y).abs().max()) for x, y in zip(row.split(list(LENGTHS)), wanted)))
        except (CollateError, ImportError) as error:
            found[who] = verdict(refused=f"{type(error).__name__}: {error}")
        finally:
            swift.uninstall()
    assert found["alone"]["verdict"] == ("right" if layout.endswith("there") else "refused")
    stack = Stack("ms-swift", ("ms-swift", "transformers"), "peers_swift")
    stack.tell("qwen3_5_text", layout, **found, line='--external_plugins "$PLUGIN"')


@pytest.mark.parametrize(
    ("family", "layout"),
    [(family, layout) for family in ("qwen3", "qwen3_next", "qwen3_5_text") for layout in LAYOUTS
     if (family, layout) != ("qwen3_5_text", "packed")],
)  # fmt: skip
def test_its_cells(family, layout):
    stack, found = Stack("ms-swift", ("ms-swift", "transformers"), "peers_swift"), {}
    model = tiny_model(family, vocab_size=VOCABULARY)
    model.config.use_cache = False  # as its trainer sets it (trainers/mixin.py:972)
    settings = {"padding_free": True} if layout == "packed" else {"side": layout.removeprefix("padded ")}
    for who in ("alone", "ours"):
        try:
            swift.install() if who == "ours" else None
            found[who] = verdict(furthest(model, template(transformers=family, **settings), layout))
        except CollateError as error:
            found[who] = verdict(refused=f"{type(error).__name__}: {error}")
        finally:
            swift.uninstall()
    stack.tell(family, layout, **found, line='--external_plugins "$PLUGIN"')


def furthest(model, made, layout):
    """Of all logits, from each sample alone."""
    rows = logits(model, made.data_collator(samples(*LENGTHS)))
    if layout == "packed":
        rows = rows[0].split(list(LENGTHS))
    else:
        rows = [
            row[keep] for row, keep in zip(rows, Segments.from_lengths(LENGTHS, side=layout.removeprefix("padded ")).keep)
        ]
    return float(torch.stack([(row - one).abs().max() for row, one in zip(rows, alone(model, *LENGTHS))]).max())


def test_upstream_a_flat_row_leaks_through_the_recurrent_layers():
    """Positions that restart keep attention apart, and nothing else: 4.6.0 sends no offsets."""
    model = tiny_model("qwen3_next", vocab_size=VOCABULARY)
    batch = template(transformers="qwen3_next", padding_free=True).data_collator(samples(7, 5))
    assert not {"cu_seq_lens_q", "seq_idx", "attention_mask"} & set(batch)
    first, second = alone(model, 7, 5)
    row = logits(model, batch)[0]
    assert (row[:7] - first).abs().max() < 2e-5
    assert (row[7:] - second).abs().max() > 0.5


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text"])
@pytest.mark.usefixtures("installed")
def test_several_samples_in_a_flat_row_are_refused_on_a_recurrent_model(model_type):
    made = template(transformers=model_type, padding_free=True)
    with pytest.raises(UnsupportedFormError, match=r"a config does not tell.* \(padding_free=False\)"):
        made.data_collator(samples(7, 5))
    assert made.data_collator(samples(7))["input_ids"].shape == (1, 7)  # one alone
    assert template(transformers="qwen3", padding_free=True).data_collator(samples(7, 5))["input_ids"].shape == (1, 12)


@pytest.mark.usefixtures("installed")
def test_ranks_that_share_a_row_are_refused_where_swift_has_no_forward_for_them():
    with pytest.raises(
        UnsupportedFormError, match=r"sequence_parallel_size: got 2\. .* layers of qwen3_next .*=1, or train with `megatron"
    ):
        template(transformers="qwen3_next", cp=2).data_collator(samples(7, 5))
    for model_type in ("qwen3", "qwen3_5_text"):
        assert template(transformers=model_type, cp=2).data_collator(samples(7, 5))["input_ids"].shape == (2, 7)
        flat = template(transformers=model_type, cp=2, padding_free=True).data_collator(samples(7, 5))
        assert flat["input_ids"].shape == (1, 12)


@pytest.mark.parametrize("lengths", [(12,), (7, 5)])
def test_a_multimodal_flat_row_is_told_by_its_text_positions(lengths):
    made = template(transformers="qwen3_5_text", padding_free=True)
    text = Segments.from_lengths([list(lengths)]).position_ids
    batch = {"input_ids": torch.ones(1, 12, dtype=torch.long), "position_ids": torch.zeros(3, 1, 12, dtype=torch.long)}
    batch["text_position_ids"] = text
    if len(lengths) == 1:
        check_batch(made, batch)
    else:
        with pytest.raises(UnsupportedFormError, match="where a kernel is missing, and a config does not tell"):
            check_batch(made, batch)


@pytest.mark.usefixtures("installed")
def test_batches_that_nobody_trains_on_are_let_through():
    made = template(transformers="qwen3_next", padding_free=True)
    made.set_mode("transformers")  # its name for inference
    assert made.data_collator(samples(7, 5))["input_ids"].shape == (1, 12)


@pytest.mark.usefixtures("installed")
def test_pairs_of_a_preference_are_checked_too():
    made = template(transformers="qwen3_next", padding_free=True)
    made.set_mode("rlhf")
    (row,) = samples(5)
    pair = {f"{name}_{key}": value for name in ("chosen", "rejected") for key, value in row.items()}
    with pytest.raises(UnsupportedFormError, match="where a kernel is missing, and a config does not tell"):
        made.data_collator([pair])
