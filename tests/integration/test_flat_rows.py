"""A flat row on real models: each sequence keeps its own logits, or the row is refused, by us or by transformers itself."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

pytest.importorskip("transformers")
from transformers import AttentionInterface, AttentionMaskInterface, DataCollatorWithFlattening
from transformers.masking_utils import flash_attention_mask

from collate_npu import BatchAdapter, PaddingCollator, UnsupportedFormError, wrap_collator
from collate_npu.consumers.models import transformers_version
from collate_npu.consumers.recurrent_kernels import kernel_calls
from collate_npu.consumers.transformers import _STATES_READ_OFFSETS
from collate_npu.testing import hybrid_model_types, reference_kernels, tiny_model

PAD = 256
IDS = [[5, 9, 2, 77, 3, 8], [7, 1, 8, 3, 200, 31, 64, 12], [40, 41, 42, 43, 44]]
SAMPLES = [{"input_ids": ids, "labels": ids} for ids in IDS]


@torch.no_grad()
def error(model, batch):
    alone = torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids in IDS])
    return float((model(**batch).logits[0] - alone).abs().max().nan_to_num(nan=torch.inf))


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3_text"])
def test_models_of_attention_alone_get_a_dense_mask_beside_the_offsets(name, attn):
    """They look at positions only where they make no cache, and some never: the mask does not depend on either."""
    model = tiny_model(name, vocab_size=PAD + 1, attn_implementation=attn)
    batch = PaddingCollator(pad_token_id=PAD, model=model, padding_free=True)(SAMPLES)
    assert batch["attention_mask"] is not None
    assert batch["cu_seq_lens_q"].tolist() == [0, 6, 14, 19]
    assert error(model, batch) < 1e-4
    assert error(model, {**batch, "attention_mask": None}) > 0.1  # the control: without it they run into each other


def test_a_flat_row_of_transformers_own_collator_is_the_same_row():
    model = tiny_model("llama", vocab_size=PAD + 1)
    ours = PaddingCollator(pad_token_id=PAD, model=model, padding_free=True)(SAMPLES)
    theirs = wrap_collator(DataCollatorWithFlattening(), model=model)(SAMPLES)
    for key in ("input_ids", "labels", "position_ids", "attention_mask", "cu_seq_lens_q"):
        assert torch.equal(ours[key], theirs[key]), key


@pytest.mark.parametrize("name", hybrid_model_types())
def test_recurrent_families_refuse_a_flat_row_here(name):
    """Without kernels that read offsets nothing keeps the state apart: we say so where the model is known."""
    with pytest.raises(UnsupportedFormError, match="padding_free=False"):
        PaddingCollator(pad_token_id=PAD, model=build(name), padding_free=True)(SAMPLES)


NEWER = pytest.mark.skipif(transformers_version() < (5, 19), reason="before 5.19 kernels are resolved in other ways")
UNMEASURED = {
    "qwen4_exp_text": "its indexer reads a dense mask of one kind, and so no flat row is taken (modeling_qwen4_exp.py:718)",
    "xlstm": "its own code fails beside a cache of another batch size (modeling_xlstm.py)",
}


@NEWER
@pytest.mark.parametrize("name", sorted(set(hybrid_model_types()) - set(UNMEASURED)))
def test_the_families_taken_are_those_that_reference_kernels_make_right(name):
    """Attention by offsets stands for a flash kernel, so that nothing but recurrent layers can mix the sequences."""
    with kernels_of(model := build(name, attn_implementation=BY_OFFSETS)) as taken:
        adapter = BatchAdapter(model, padding_free=True, attn_implementation="flash_attention_2")
        flat = DataCollatorWithFlattening()(SAMPLES)
        if not taken:
            with pytest.raises(UnsupportedFormError, match="do not ask where a sequence begins"):
                adapter(flat)
        adapter.model = replace(adapter.model, boundaries_unread="", model_type=next(iter(_STATES_READ_OFFSETS)))
        batch = adapter(flat)
        assert batch["attention_mask"] is None
        assert error(model, batch) < 1e-4 if taken else error(model, batch) > 0.1
        assert error(model, {**batch, "seq_idx": None}) > 0.1


@contextmanager
def kernels_of(model):
    """Whether this family is taken; with reference kernels where it calls any."""
    context = reference_kernels(model) if kernel_calls(model) else nullcontext()
    with context:
        yield model.config.get_text_config().model_type in _STATES_READ_OFFSETS


BY_OFFSETS = "reads_offsets"


def by_offsets(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, **kwargs):
    """As a flash kernel reads a flat row: `[B, H, S, D]`, each sequence attends itself."""
    heads = query.shape[1] // key.shape[1]
    ends = [0, query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    every = (query, key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1))
    parts = [sdpa(*(x[:, :, a:b] for x in every), is_causal=True, scale=scaling) for a, b in pairwise(ends)]
    return torch.cat(parts, 2).transpose(1, 2), None


AttentionInterface.register(BY_OFFSETS, by_offsets)
AttentionMaskInterface.register(BY_OFFSETS, flash_attention_mask)


def build(name, **settings):
    try:
        return tiny_model(name, vocab_size=PAD + 1, **settings)
    except (ValueError, TypeError, NotImplementedError) as reason:
        pytest.skip(str(reason)[:100])
