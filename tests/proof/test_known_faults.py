"""Faults that stacks had, rebuilt in small from their threads: what watch prints of each."""

from dataclasses import dataclass

import pytest
import torch
from stranger import Model
from test_watching import IDS, NOTHING, OFFSETS
from torch import nn

from collate_npu import CollateError, Segments, check_delivery
from collate_npu.masks import dense
from collate_npu.proof import watch

FLAT = Segments.from_lengths([[6, 5, 5]])
POSITIONS = FLAT.position_ids
TRUE = "[0, 6, 11, 16]"


def printed(capsys, model, **batch):
    """The block of one forward, and the layers that are named behind it."""
    with watch(steps=9) as seen:
        model(**batch)
    said = capsys.readouterr().err.splitlines()[0].partition(" · ")[2]
    return said, sorted({fault.layer for fault in seen.faults})


def test_slime_1686(capsys):
    """The convolution was told the sequences, the rule was not (THUDM/slime, pull request 1686)."""
    said, layers = printed(capsys, Model({n: {"rule": NOTHING} for n in (0, 1)}), input_ids=IDS, cu_seqlens=OFFSETS)
    assert said == f"2 recurrent: convolution {TRUE} ✔ · rule nothing ✘ · 1 attention: {TRUE} ✔ · positions not looked at"
    assert layers == ["layers.0", "layers.1"]


class Mailbox(Model):
    """Boundaries are left for the layers by packed forwards alone (radixark/miles, pull request 2213)."""

    def __init__(self, emptied):
        super().__init__()
        self.emptied, self.left = emptied, None
        for layer in self.layers[:2]:
            layer.faults = {"rule": lambda right: right if self.left is None else self.left}

    def forward(self, input_ids, cu_seqlens):
        if len(cu_seqlens) > 2 or self.emptied:
            self.left = cu_seqlens
        return super().forward(input_ids, cu_seqlens)


@pytest.mark.parametrize("emptied", [False, True])
def test_miles_2213_boundaries_of_the_batch_before(emptied):
    model, lone = Mailbox(emptied), {"input_ids": IDS, "cu_seqlens": torch.tensor([0, 16])}
    with watch(say=False, steps=9) as seen:
        model(IDS, OFFSETS)
        assert seen.faults == []
        model(**lone)
    assert {(each.layer, each.told) for each in seen.faults} == (
        set() if emptied else {(f"layers.{n}", TRUE) for n in (0, 1)}
    )
    model = Mailbox(emptied)
    model(IDS, OFFSETS)
    if emptied:
        check_delivery(model, lone)
    else:
        with pytest.raises(CollateError, match=r"layers\.0, layers\.1: stranger\.chunk_gated_delta_rule told"):
            check_delivery(model, lone)


@dataclass
class FlashAttentionKwargs:
    cu_seqlens_q: torch.Tensor


class Registered(nn.Module):
    """It takes its boundaries by other names, and drops what it does not know (NVIDIA-NeMo/RL, issue 2105)."""

    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, input_ids, cu_seqlens=None, **attn_kwargs):
        offsets = torch.tensor([0, input_ids.shape[1]]) if cu_seqlens is None else cu_seqlens
        return self.model(input_ids, offsets)


def test_nemo_rl_2105(capsys):
    held = FlashAttentionKwargs(cu_seqlens_q=OFFSETS.int())
    said, layers = printed(capsys, Registered(), input_ids=IDS, flash_attn_kwargs=held)
    assert said == "2 recurrent: convolution [0, 16] ✘ · rule [0, 16] ✘ · 1 attention: nothing ✘ · positions not looked at"
    assert len(layers) == 3
    assert printed(capsys, Registered(), input_ids=IDS, cu_seqlens=OFFSETS)[1] == []


transformers = pytest.importorskip("transformers")

from collate_npu.testing import hybrid_model_types, tiny_model  # noqa: E402

DENSE = "qwen3_5_text" if "qwen3_5_text" in hybrid_model_types() else "qwen3_next"
RECURRENT = ["model.layers.0.linear_attn", "model.layers.2.linear_attn"]
SAID = "2 recurrent: convolution nothing ✘ · rule nothing ✘ · 1 attention: mask [16] ✔ · positions ✔"


def test_miles_2213_a_family_that_the_patch_left_out(capsys):
    """Attention reads boundaries off positions, the recurrent layers of the dense family were not patched."""
    assert printed(capsys, tiny_model(DENSE, vocab_size=64), input_ids=IDS, position_ids=POSITIONS, use_cache=False) == (
        SAID,
        RECURRENT,
    )


def test_llama_factory_10436(capsys):
    """Neat packing: a dense mask of blocks for attention, nothing for recurrent layers (hiyouga, pull request 10436)."""
    batch = {"input_ids": IDS, "position_ids": POSITIONS, "attention_mask": dense(FLAT, polarity="bias"), "use_cache": False}
    assert printed(capsys, tiny_model(DENSE, vocab_size=64), **batch) == (SAID, RECURRENT)


class Indexed(nn.Module):
    """A 2D mask that counts sequences, made a dense one for attention (NVIDIA-NeMo/Automodel, pull request 2147)."""

    def __init__(self):
        super().__init__()
        self.inner = tiny_model(DENSE, vocab_size=64)

    def forward(self, input_ids, attention_mask):
        return self.inner(
            input_ids=input_ids, attention_mask=dense(FLAT, polarity="bias"), position_ids=POSITIONS, use_cache=False
        )


def test_automodel_2147(capsys):
    said, layers = printed(capsys, Indexed(), input_ids=IDS, attention_mask=FLAT.ids.long())
    assert said == SAID
    assert layers == [f"inner.{name}" for name in RECURRENT]
