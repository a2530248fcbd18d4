"""What is no model, no tokenizer, no collator or no batch is refused, with what to pass."""

from pathlib import Path

import pytest
from torch import nn

pytest.importorskip("transformers")

from transformers import LlamaForCausalLM

import collate_npu
from collate_npu import CollateError, PaddingCollator, testing
from collate_npu.integrations.transformers import DeliveryCallback
from collate_npu.testing import byte_tokenizer

pytestmark = pytest.mark.models
TOKENIZER = byte_tokenizer()
BATCH = PaddingCollator(TOKENIZER)([{"input_ids": [1, 2]}])
MODELS = {
    "PaddingCollator": lambda x: PaddingCollator(TOKENIZER, model=x, consumer="transformers"),
    "wrap_collator": lambda x: collate_npu.wrap_collator(PaddingCollator(TOKENIZER), model=x, consumer="transformers"),
    "BatchAdapter": lambda x: collate_npu.BatchAdapter(x, needs_mask_2d=True, consumer="transformers"),
    "adapt": collate_npu.adapt,
    "check_delivery": lambda x: collate_npu.check_delivery(x, BATCH),
    "assert_padding_invariant": lambda x: testing.assert_padding_invariant(x, PaddingCollator(TOKENIZER), [[1], [2, 3]]),
    "needs_mask_2d": collate_npu.needs_mask_2d,
}
NO_MODELS = {
    "a name": ("Qwen/Qwen3-Next", "from_pretrained('Qwen/Qwen3-Next')"),
    "a folder": (Path("checkpoint"), "Load it: AutoModelForCausalLM.from_pretrained('checkpoint')"),
    "a class": (LlamaForCausalLM, "Pass the model"),
    "a tokenizer": (TOKENIZER, "That is a tokenizer: pass the model"),
}
COLLATES = {
    "wrap_collator": collate_npu.wrap_collator,
    "DeliveryCallback": DeliveryCallback,
    "assert_padding_invariant": lambda x: testing.assert_padding_invariant(nn.Linear(1, 1), x, [[1], [2, 3]]),
}
ROWS = [(call, *no) for call in MODELS.values() for no in NO_MODELS.values()]
ROWS += [(PaddingCollator, "gpt2", "Pass the tokenizer"), (PaddingCollator, nn.Linear(1, 1), "and model= by its name")]
ROWS += [(call, no, "Make one: Padding") for call in COLLATES.values() for no in (PaddingCollator, "my.py:collate")]
ROWS += [(lambda x: collate_npu.wrap_collator(x)([{"input_ids": [1]}]), lambda features: None, "Return the batch there.")]


@pytest.mark.parametrize(("call", "given", "words"), ROWS)
def test_it_is_told_what_to_pass(call, given, words):
    with pytest.raises(CollateError) as error:
        call(given)
    assert words in str(error.value)
