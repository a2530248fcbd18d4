"""Flat rows under audit: a lost boundary is seen, a row of one sequence is no proof, a missing kernel is no failure."""

from __future__ import annotations

from functools import wraps

import pytest
import torch

pytest.importorskip("transformers")

from collate_npu import CollateError, Segments
from collate_npu.consumers.models import transformers_version
from collate_npu.testing import byte_tokenizer, kernels, reference_kernels, tiny_model
from collate_npu.tools.audit.case import Audit, audit
from collate_npu.tools.audit.data import shipped_text
from collate_npu.tools.audit.flat import FLAT_OTHERS, FLAT_OURS, flat_truth, no_kernel, resolved_kernels
from collate_npu.tools.audit.handover import Subject
from collate_npu.tools.audit.samples import sample_ids

pytestmark = pytest.mark.models
NEWER = pytest.mark.skipif(transformers_version() < (5, 20), reason="5.20 is the first release that asks for boundaries")

TOKENIZER = byte_tokenizer()
SAMPLES = sample_ids(shipped_text(), TOKENIZER, count=4, max_length=64, seed=3)
FEATURES = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]


def audited(name, **settings):
    model = tiny_model(name, vocab_size=len(TOKENIZER), **settings)
    return Audit(
        model, SAMPLES, name=name, pad_token_id=TOKENIZER.pad_token_id, batch_size=4, gradients=True, sides=["packed"]
    )


def findings_of(case):
    return {column: case.finding("packed", column) for column in case.columns("packed")}


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_families_of_attention_alone_are_proved(attn):
    case = audited("llama", attn_implementation=attn)
    found = findings_of(case)
    assert all(found[column].right and found[column].gradient < 1e-5 for column in FLAT_OURS)
    assert found["nothing"].logits > 1
    assert found["nothing"].gradient > 0.1
    assert case.yardstick("packed").tells()


def test_a_model_that_loses_a_boundary_is_caught():
    model = tiny_model("llama", vocab_size=len(TOKENIZER))
    forward = model.forward

    def deaf(attention_mask=None, position_ids=None, use_cache=None, **kwargs):
        return forward(use_cache=use_cache, **kwargs)

    model.forward = deaf
    made = audit(model, SAMPLES, pad_token_id=TOKENIZER.pad_token_id, sides=["packed"], columns=["collator"])
    found = next(iter(made))
    assert found.right is False
    assert found.side == "packed"


@NEWER
def test_without_a_kernel_nothing_of_ours_ran_and_what_a_boundary_costs_is_shown():
    found = findings_of(audited("qwen3_next"))
    for column in FLAT_OURS:
        assert found[column].no_kernel
        assert not found[column].refused
        assert "no kernel here that keeps packed sequences apart" in found[column].note
    assert found["positions"].logits > 1
    assert found["nothing"].logits > 1


@NEWER
def test_with_kernels_ours_are_right_and_each_boundary_left_out_costs():
    case = audited("qwen3_next")
    with reference_kernels(case._model):
        found = findings_of(case)
        assert all(found[column].right for column in FLAT_OURS)
        for column in FLAT_OTHERS:
            assert found[column].logits > 0.1, column
            assert found[column].gradient > 0.01, column
        assert case.yardstick("packed").wrong.logits == min(found[column].relative for column in FLAT_OTHERS)


@NEWER
@pytest.mark.parametrize("kernel", ["causal_conv1d_fn", "chunk_gated_delta_rule"])
def test_a_kernel_that_drops_its_offsets_in_silence_is_caught(monkeypatch, kernel):
    monkeypatch.setitem(kernels._KERNELS, kernel, deaf(kernels._KERNELS[kernel]))
    case = audited("qwen3_next")
    with reference_kernels(case._model):
        found = findings_of(case)
    assert not any(found[column].right for column in FLAT_OURS)


def deaf(kernel):
    """Takes boundaries, and does not read them."""

    @wraps(kernel)
    def run(*args, seq_idx=None, cu_seqlens=None, **kwargs):
        return kernel(*args, **kwargs)

    return run


def test_a_family_that_never_asks_is_refused():
    found = findings_of(audited("jamba"))
    assert all(found[column].refused for column in FLAT_OURS)
    assert found["positions"].right is False


@pytest.mark.parametrize("samples", [SAMPLES[:1], SAMPLES[:3]])
def test_a_row_of_one_sequence_is_no_proof(samples):
    model = tiny_model("llama", vocab_size=len(TOKENIZER))
    with pytest.raises(CollateError, match=r"a row of one sequence.*Give a --batch-size of 2 or more"):
        next(audit(model, samples, pad_token_id=0, sides=["packed"], batch_size=2))


def test_sequences_of_one_length_are_a_proof_in_a_row_and_none_in_a_padded_batch():
    model = tiny_model("llama", vocab_size=8)
    settings = {"pad_token_id": 7, "gradients": False, "columns": ["collator"]}
    assert next(audit(model, [[1, 2], [3, 4]], sides=["packed"], **settings)).right
    with pytest.raises(CollateError, match="prove nothing"):
        next(audit(model, [[1, 2], [3, 4]], sides=["packed", "left"], **settings))


@pytest.mark.parametrize("column", [*FLAT_OURS, *FLAT_OTHERS])
def test_every_way_is_the_same_row_without_a_cache(column):
    model = tiny_model("llama", vocab_size=8)
    subject = Subject(name="", model=model, attn_implementation="sdpa", side="right", pad_token_id=7)
    batch = {**FLAT_OURS, **FLAT_OTHERS}[column](subject, FEATURES)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5]]
    assert batch["labels"][0, [1, 2, 4]].tolist() == [2, 3, 5]
    assert batch["labels"][0, 3] == -100  # no sequence predicts the next one's first token
    assert batch["use_cache"] is False
    assert flat_truth(FEATURES) == Segments.from_lengths([[3, 2]])


def test_the_others_tell_what_their_names_say():
    model = tiny_model("llama", vocab_size=8)
    subject = Subject(name="", model=model, attn_implementation="sdpa", side="right", pad_token_id=7)
    told = {
        column: set(way(subject, FEATURES)) - {"input_ids", "labels", "use_cache"} for column, way in FLAT_OTHERS.items()
    }
    assert told == {
        "positions": {"position_ids"},
        "cu_seq_lens_q": {"position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"},
        "seq_idx": {"position_ids", "seq_idx"},
        "nothing": set(),
    }


def test_the_remedy_for_a_missing_kernel_is_one_of_this_device():
    raised = ValueError("`f` can't keep packed sequences apart without `g`. Install `g` to train on packed sequences.")
    assert "Megatron-style stack" in no_kernel(raised, "npu")
    assert "causal-conv1d" not in no_kernel(raised, "npu")
    assert "--kernels reference" in no_kernel(raised, "cpu")
    assert "Install" not in no_kernel(raised, "npu")
    assert no_kernel(ValueError("else"), "cpu") == ""


@NEWER
def test_where_each_function_comes_from():
    model = tiny_model("qwen3_next", vocab_size=8)
    assert resolved_kernels(model)["causal_conv1d_fn"] == "torch"
    assert resolved_kernels(tiny_model("llama", vocab_size=8)) == {}
    assert resolved_kernels(torch.nn.Linear(1, 1)) == {}
