"""`adapt` beside PEFT, before and behind it, and under DeepSpeed's ZeRO-3 on two ranks.

`python test_adapt_wrapped.py OUT FAMILY LAYOUT` is one of them.
"""

# ruff: noqa: E402
import sys

import openrlhf_world

openrlhf_world.deepspeed_on_cpu()
import deepspeed
import peft
import pytest
import torch
import torch.distributed as dist
from adapt_work import PARTS, ROWS, VOCAB, batch_of, mean_of_ranks
from deepspeed.utils import safe_get_full_grad
from processes import found_by, write

from collate_npu import CollateError, adapt
from collate_npu.errors import UnsupportedFormError
from collate_npu.testing import tiny_model

NEEDS = ("peft", "deepspeed")
PADDED = {key: value for key, value in batch_of(ROWS, "padded left").items() if key != "labels"}


def lora(model):
    torch.manual_seed(0)
    settings = {"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**settings)).eval()


@torch.no_grad()
def worst(model):
    """The largest difference of a logit to the sample alone."""
    found, gaps = model(**PADDED).logits, []
    for row, ids in zip(found, ROWS):
        own = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None]).logits[0]
        gaps.append(float((row[-len(ids) :] - own).abs().max()))
    return max(gaps)


def adapted(model):
    try:
        model(input_ids=PADDED["input_ids"])
    except CollateError:
        return True
    return False


@pytest.mark.parametrize("family", ["qwen3_next", "gpt2"])
def test_lora_and_what_is_merged_of_it(family):
    model = lora(tiny_model(family, vocab_size=VOCAB))
    own = worst(model)
    assert own > 0.1 if family == "gpt2" else own < 1e-4  # absolute positions count padding
    handle = adapt(model)
    assert worst(model) < 1e-4
    assert adapted(model)
    prompt = {**PADDED, "max_new_tokens": 3, "do_sample": False}
    with_ours = model.generate(**prompt)
    merged = model.merge_and_unload()
    assert worst(merged) < 1e-4
    assert adapted(merged)
    handle.remove()
    assert torch.equal(lora(tiny_model(family, vocab_size=VOCAB)).generate(**prompt), with_ours)


def test_behind_adapt_lora_is_refused_until_it_is_merged():
    """LoRA's wrapper calls `model.forward`, and no hook of the model runs: in silence, were the backbone not asked."""
    model = tiny_model("qwen3_next", vocab_size=VOCAB)
    adapt(model)
    wrapped = lora(model)
    with pytest.raises(UnsupportedFormError, match="Call adapt on what get_peft_model returned"):
        worst(wrapped)
    assert worst(wrapped.merge_and_unload()) < 1e-4


@pytest.mark.parametrize("layout", ["padded left", "packed"])
def test_zero_3_on_two_ranks(layout, tmp_path):
    family = "qwen3_next" if layout == "padded left" else "qwen3"
    (found,) = found_by("test_adapt_wrapped", tmp_path, family, layout, ranks=2)
    assert found["partitioned"] > 0
    assert max(found["before"], found["behind"]) < 1e-4


# --- a rank of two

CONFIG = {
    "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.0}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}  # fmt: skip


def gradient_error(family, layout, first):
    """How far a step's gradient is from that of the samples alone; and how many parameters are not whole on this rank."""
    model, wanted = tiny_model(family, vocab_size=VOCAB), mean_of_ranks(family)
    if first == "before":
        adapt(model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=CONFIG)
    if first == "behind":
        adapt(engine)
    engine.backward(engine(**batch_of(PARTS[dist.get_rank()], layout)).loss)
    grads = [(safe_get_full_grad(p), p.ds_shape) for p in model.parameters()]
    found = torch.cat([(torch.zeros(shape) if grad is None else grad).flatten() for grad, shape in grads])
    return float((found - wanted).norm() / wanted.norm()), sum(p.numel() == 0 for p in model.parameters())


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    errors = {first: gradient_error(*sys.argv[2:], first) for first in ("before", "behind")}
    write({first: error for first, (error, _) in errors.items()} | {"partitioned": errors["before"][1]})
    dist.barrier()
