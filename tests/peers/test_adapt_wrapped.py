"""`adapt` beside PEFT, before and behind it, and under DeepSpeed's ZeRO-3 on two ranks."""

import peft
import pytest
import torch
from processes import found_by, free_port

from collate_npu import CollateError, adapt
from collate_npu.errors import UnsupportedFormError
from collate_npu.testing import tiny_model

NEEDS = ("peft", "deepspeed")
ROWS = [torch.randint(3, 60, (n,), generator=torch.Generator().manual_seed(n)) for n in (7, 12, 4)]


def padded():
    ids = torch.stack([torch.cat([torch.full((12 - len(row),), 7), row]) for row in ROWS])
    return {"input_ids": ids, "attention_mask": torch.stack([torch.arange(12) >= 12 - len(row) for row in ROWS]).long()}


def lora(model):
    torch.manual_seed(0)
    settings = {"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**settings)).eval()


@torch.no_grad()
def worst(model, prompt=0):
    """The largest difference of a logit to the sample alone, behind the tokens of a prompt that PEFT puts before it."""
    found, gaps = model(**padded()).logits, []
    for row, ids in zip(found, ROWS):
        own = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None]).logits[0, prompt:]
        gaps.append(float((row[-len(ids) :] - own).abs().max()))
    return max(gaps)


def adapted(model):
    try:
        model(input_ids=padded()["input_ids"])
    except CollateError:
        return True
    return False


@pytest.mark.parametrize("family", ["qwen3_next", "gpt2"])
def test_lora_and_what_is_merged_of_it(family):
    model = lora(tiny_model(family, vocab_size=61))
    own = worst(model)
    assert own > 0.1 if family == "gpt2" else own < 1e-4  # absolute positions count padding
    handle = adapt(model)
    assert worst(model) < 1e-4
    assert adapted(model)
    prompt = {**padded(), "max_new_tokens": 3, "do_sample": False}
    with_ours = model.generate(**prompt)
    merged = model.merge_and_unload()
    assert worst(merged) < 1e-4
    assert adapted(merged)
    handle.remove()
    assert torch.equal(lora(tiny_model(family, vocab_size=61)).generate(**prompt), with_ours)


def test_behind_adapt_lora_is_refused_until_it_is_merged():
    """LoRA's wrapper calls `model.forward`, and no hook of the model runs: in silence, were the backbone not asked."""
    model = tiny_model("qwen3_next", vocab_size=61)
    adapt(model)
    wrapped = lora(model)
    with pytest.raises(UnsupportedFormError, match="Call adapt on what get_peft_model returned"):
        worst(wrapped)
    assert worst(wrapped.merge_and_unload()) < 1e-4


def test_virtual_tokens_stand_before_the_padding():
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(tiny_model("qwen3", vocab_size=61), settings).eval()
    assert worst(model, prompt=3) > 0.1  # PEFT's own
    with adapt(model):
        assert worst(model, prompt=3) < 1e-4


@pytest.mark.parametrize("layout", ["padded left", "packed"])
def test_zero_3_on_two_ranks(layout, tmp_path):
    family = "qwen3_next" if layout == "padded left" else "qwen3"
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"}
    (found,) = found_by("zero_work", tmp_path, family, layout, variants=(place,), ranks=2)
    assert found["partitioned"] > 0
    assert found["before"] < 1e-4
    assert found["behind"] < 1e-4
