"""Law 4: on real models, a padded batch gives the logits, the loss and the gradients of each sample alone.

Every hybrid family runs once each way; random lengths stand in test_one_batch_any_door. The pad id is eos, its embedding
row is not zero, and every left-padded batch has power: the bare 4D mask is wrong on it.
"""

from itertools import product

import pytest
from rotation import rotating

pytest.importorskip("transformers")
from text import sample_ids

from collate_npu.testing import byte_tokenizer, hybrid_model_types, left_out, tiny_model
from collate_npu.tools.audit.case import audit

pytestmark = pytest.mark.long

TOKENIZER = byte_tokenizer()
PAD = TOKENIZER.pad_token_id
TOLERANCE = 1e-4


@pytest.mark.parametrize(("name", "attn"), rotating(product(hybrid_model_types(), ("sdpa", "eager")), 2, slow=12))
def test_every_hybrid_family_both_sides_with_gradients(name, attn):
    if why := left_out(attn).get(name):
        pytest.skip(why)
    model = tiny_model(name, vocab_size=len(TOKENIZER), attn_implementation=attn)
    samples = sample_ids(TOKENIZER, count=4, max_length=40, seed=1)
    findings = list(audit(model, samples, pad_token_id=PAD, tolerance=TOLERANCE))
    ours = [finding for finding in findings if finding.whose == "ours"]
    assert all(finding.right or finding.refused for finding in ours), ours
    assert sum(finding.logits is not None for finding in ours) >= 6  # those of the collator, left and right
    others = [f for f in findings if f.whose != "ours" and f.side == "left"]
    assert all(finding.logits is None or finding.logits > 0.1 for finding in others), "this batch hides mistakes"
    assert not any(f.right for f in others)
