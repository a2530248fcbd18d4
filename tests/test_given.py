"""What is no model and no tokenizer is refused at every public door, in words that say what to pass instead."""

import re
from functools import partial
from pathlib import Path

import pytest
from torch import nn

pytest.importorskip("transformers")
from transformers import LlamaForCausalLM

import collate_npu
from collate_npu import CollateError, PaddingCollator, testing
from collate_npu.integrations.megatron import gpt_batch
from collate_npu.integrations.torchtitan import masks_in_forward
from collate_npu.integrations.transformers import DeliveryCallback
from collate_npu.testing import byte_tokenizer, tiny_model

pytestmark = pytest.mark.models
TOKENIZER = byte_tokenizer()
BATCH = PaddingCollator(TOKENIZER)([{"input_ids": [1, 2]}])
COLLATOR = {"consumer": "transformers"}
DOORS = {
    "PaddingCollator": lambda x: PaddingCollator(TOKENIZER, model=x, **COLLATOR),
    "wrap_collator": lambda x: collate_npu.wrap_collator(PaddingCollator(TOKENIZER), model=x, **COLLATOR),
    "BatchAdapter": lambda x: collate_npu.BatchAdapter(x, needs_mask_2d=True, **COLLATOR),
    "adapt": collate_npu.adapt,
    "check_delivery": lambda x: collate_npu.check_delivery(x, BATCH),
    "guard_first_batch": collate_npu.guard_first_batch,
    "assert_padding_invariant": lambda x: testing.assert_padding_invariant(x, PaddingCollator(TOKENIZER), [[1], [2, 3]]),
    "needs_mask_2d": collate_npu.needs_mask_2d,
    "gpt_batch": lambda x: gpt_batch(BATCH, x),
    "masks_in_forward": masks_in_forward,
}
NO_MODELS = {
    "a name": ("Qwen/Qwen3-Next", "from_pretrained('Qwen/Qwen3-Next')"),
    "a folder": (Path("checkpoint"), "Load it: AutoModelForCausalLM.from_pretrained('checkpoint')"),
    "a class": (LlamaForCausalLM, "Make one of it: LlamaForCausalLM.from_pretrained(...)"),
    "a module's class": (nn.Linear, "Make one of it: Linear(...)"),
    "a tokenizer": (TOKENIZER, "That is a tokenizer: pass the model"),
    "a number": (3, "Pass the model"),
    "a list": ([3], "Pass the model"),
}


def refusal(call, given):
    with pytest.raises(CollateError) as error:
        call(given)
    return str(error.value)


@pytest.mark.parametrize("kind", NO_MODELS)
@pytest.mark.parametrize("door", DOORS)
def test_what_is_no_model_is_told_what_to_pass(door, kind):
    given, said = NO_MODELS[kind]
    assert said in refusal(DOORS[door], given)


NO_TOKENIZERS = {
    "a name": ("gpt2", "Load it: AutoTokenizer.from_pretrained('gpt2')."),
    "a class": (type(TOKENIZER), "Make one of it: "),
    "a number": (0, "Pass the tokenizer"),
}


@pytest.mark.parametrize("kind", NO_TOKENIZERS)
def test_what_is_no_tokenizer_is_told_what_to_pass(kind):
    given, said = NO_TOKENIZERS[kind]
    assert said in refusal(PaddingCollator, given)


def test_a_model_and_a_processor_in_the_place_of_a_tokenizer():
    assert "pass the tokenizer first, and model= by its name" in refusal(PaddingCollator, tiny_model("llama", vocab_size=8))
    processor = type("Processor", (), {"tokenizer": TOKENIZER})()
    assert "Pass processor.tokenizer." in refusal(PaddingCollator, processor)


def broken(features):
    return None


COLLATES = {
    "wrap_collator": collate_npu.wrap_collator,
    "DeliveryCallback": DeliveryCallback,
    "assert_padding_invariant": lambda x: testing.assert_padding_invariant(nn.Linear(1, 1), x, [[1], [2, 3]]),
}


@pytest.mark.parametrize("door", COLLATES)
def test_what_is_no_collator_is_told_what_to_pass(door):
    assert "Make one of it: PaddingCollator(...)." in refusal(COLLATES[door], PaddingCollator)
    for given in ("my.py:collate", 3):
        assert "Pass that function." in refusal(COLLATES[door], given)


def test_a_collator_that_returns_no_batch_is_named_by_its_line():
    line = broken.__code__.co_firstlineno
    for inner in (broken, partial(broken), type("Mine", (), {"__call__": lambda self, features: broken(features)})()):
        said = refusal(collate_npu.wrap_collator(inner), [{"input_ids": [1]}])
        assert re.match(rf"{re.escape(__file__)}, line \d+: got a NoneType from ", said)
    assert f"{__file__}, line {line}: " in refusal(collate_npu.wrap_collator(broken), [{"input_ids": [1]}])
