"""Integrations read a batch through the one door: what says nothing of padding, or two things, is refused by each."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from collate_npu import CollateError, ContextParallel, Segments
from collate_npu.integrations.context_parallel import context_parallel, ready_batch
from collate_npu.integrations.megatron import gpt_batch
from collate_npu.integrations.torchtitan import layers_of

LOCAL = nn.Sequential(type("DotProductAttention", (nn.Module,), {})())
LOCAL.config = SimpleNamespace(num_moe_experts=None, linear_attention_freq=None, masked_softmax_fusion=False)

READERS = {
    "ready_batch": lambda batch: ready_batch(batch, size=1),
    "context_parallel": lambda batch: context_parallel(SimpleNamespace(), batch).__enter__(),
    "gpt_batch": lambda batch: gpt_batch(batch, LOCAL, context_parallel=ContextParallel(1, 0)),
}
keep = Segments.from_lengths([4, 2]).keep


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize(
    ("masks", "said"),
    [
        ({}, "No key says which tokens are padding"),
        ({"attention_mask": keep.long(), "attention_mask_2d": keep.flip(1)}, "another padding|disagree"),
        ({"attention_mask": keep[:1].long()}, "The batch has 2 rows"),
        ({"attention_mask_2d": keep, "segment_ids": torch.tensor([[1, 1, 2, 2], [1, 0, 0, 0]])}, "another padding|disagree"),
        ({"attention_mask_2d": keep & torch.tensor([[True], [False]])}, "no real token"),
    ],
)
def test_a_batch_that_says_nothing_or_two_things_is_refused(read, masks, said):
    with pytest.raises(CollateError, match=said):
        read({"input_ids": torch.arange(8).view(2, 4), **masks})
    with pytest.raises(CollateError, match="A model is a module"):
        layers_of("llama3")
