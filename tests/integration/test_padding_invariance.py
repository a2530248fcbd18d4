"""Law 4: on real models, a padded batch gives the logits, the loss and the gradients of each sample alone.

Random lengths and sides drive the Gated DeltaNet models; every other hybrid family runs once each way. The pad id is eos,
its embedding row is not zero, and every left-padded batch has power: the bare 4D mask is wrong on it.
"""

from functools import cache

import pytest
import torch
from hypothesis import given, settings, strategies as st
from rotation import rotating

pytest.importorskip("transformers")
from text import sample_ids

from collate_npu.testing import byte_tokenizer, hybrid_model_types, left_out, tiny_model
from collate_npu.tools.audit.case import audit

TOKENIZER = byte_tokenizer()
PAD = TOKENIZER.pad_token_id
GDN = [name for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text") if name in hybrid_model_types()]
TOLERANCE = 1e-4
ROUNDING = 2e-3
"""Gradients of a few random tokens: two equal rows of two tokens, without any padding, already differ from one alone by
4e-4 in float32 (and one alone from float64 by 1e-4). A wrong mask moves them by 0.05 to 1."""

lengths = st.lists(st.integers(1, 24), min_size=2, max_size=4).filter(lambda n: len(set(n)) > 1)


@cache
def model_of(name, attn="sdpa"):
    return tiny_model(name, vocab_size=len(TOKENIZER), attn_implementation=attn)


def samples_of(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, len(TOKENIZER), (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", rotating(GDN, slow=0))
@settings(deadline=None)
@given(
    lengths=lengths,
    side=st.sampled_from(["left", "right"]),
    column=st.sampled_from(["collator", "collator + adapter"]),
    seed=st.integers(0, 99),
)
def test_any_batch_gives_what_its_samples_give_alone(name, attn, lengths, side, column, seed):
    samples, chosen = samples_of(lengths, seed), {"sides": [side], "columns": [column]}
    (finding,) = audit(
        model_of(name, attn), samples, pad_token_id=PAD, batch_size=len(samples), gradients=seed % 4 == 0, **chosen
    )
    assert finding.logits is not None or finding.refused, finding.note
    assert (finding.logits or 0) <= TOLERANCE
    assert (finding.loss or 0) <= TOLERANCE
    assert (finding.gradient or 0) <= ROUNDING


def families():
    for attn in ("sdpa", "eager"):
        excluded = left_out(attn)
        for name in hybrid_model_types():
            marks = [pytest.mark.skip(reason=excluded[name])] if name in excluded else []
            yield pytest.param(name, attn, marks=marks, id=f"{name}-{attn}")


@pytest.mark.parametrize(("name", "attn"), rotating(families(), 2, slow=12))
def test_every_hybrid_family_both_sides_with_gradients(name, attn):
    samples = sample_ids(TOKENIZER, count=4, max_length=40, seed=1)
    findings = list(audit(model_of(name, attn), samples, pad_token_id=PAD))
    ours = [finding for finding in findings if finding.whose == "ours"]
    assert all(finding.within(TOLERANCE) for finding in ours), ours
    assert sum(finding.logits is not None for finding in ours) >= 6  # those of the collator, left and right
    others = [f for f in findings if f.whose != "ours" and f.side == "left"]
    assert all(finding.logits is None or finding.logits > 0.1 for finding in others), "this batch hides mistakes"
    assert not any(f.right for f in others)
