"""Whom the queries of a kernel attend, by each head, and on a rank that has a part of them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from collate_npu import CollateError, ContextParallel, Segments, check_delivery
from collate_npu.kernels.call_boundaries import attention_reason
from collate_npu.masks import dense
from collate_npu.masks.patterns import CAUSAL
from collate_npu.parallel import query_rows, split_tensor

RIGHT, TWO = Segments.from_lengths([8, 5]), Segments.from_lengths([[3, 5], [5]])
LEFT = Segments.from_lengths([8, 5], side="left")
ALL = "does not attend all of its sequence"
PAST = dense(Segments.from_lengths([8]))[0, 0]
RANKS = [ContextParallel(2, 0), ContextParallel(2, 1), ContextParallel(2, 0, layout="contiguous")]


@pytest.mark.parametrize(
    ("segments", "b", "any_head", "every_head", "said"),
    [
        (LEFT, 1, dense(LEFT)[1, 0], None, ""),
        (LEFT, 1, PAST, None, "attends padding: query 3 attends key 0 of 8"),
        (LEFT, 1, PAST, dense(LEFT)[1, 0], "attends padding: query 3 attends key 0 of 8"),
        (TWO, 0, PAST, None, "attends another sequence: query 3 attends key 0 of 8"),
        (RIGHT, 0, torch.ones(8, 8).bool(), None, "attends more than causal attention does: query 0 attends key 1 of 8"),
        (RIGHT, 0, PAST & ~torch.eye(8).bool(), None, f"{ALL}: query 0 does not attend key 0 of 8"),
        (RIGHT, 0, PAST, PAST.triu(-1), f"{ALL}: query 2 does not attend key 0 of 8 in one of its heads"),
        (RIGHT, 0, PAST[:4], None, "has [4, 8] queries and keys, not [8, 8]"),
    ],
)  # fmt: skip
def test_a_row_that_is_wrong_says_which_query_and_key(segments, b, any_head, every_head, said):
    attended = any_head, any_head if every_head is None else every_head
    said = said and f"row {b} {said}"
    assert attention_reason(segments, CAUSAL, b, attended) == said
    ours = attention_reason(segments, None, b, attended)
    assert ours == ("" if "all of" in said or "more than" in said else said), "without a pattern only whose tokens they are"


class OfARank(nn.Module):
    """Its attention has a part of the queries, and all keys, or a part of both and no mask."""

    def __init__(self, mask=None):
        super().__init__()
        self.mask, self.attention = mask, SelfAttention()

    def forward(self, input_ids, attention_mask=None):
        return self.attention(input_ids, self.mask)


class SelfAttention(nn.Module):
    def forward(self, ids, mask):
        q = torch.ones(len(ids), 1, ids.shape[1], 4)
        keys = q if mask is None else torch.ones(len(ids), 1, mask.shape[-1], 4)
        return F.scaled_dot_product_attention(q, keys, keys, attn_mask=mask, is_causal=mask is None)


@pytest.mark.parametrize("cp", RANKS, ids=str)
@pytest.mark.parametrize("segments", [LEFT, RIGHT], ids=["left", "right"])
def test_kernels_of_a_rank_are_judged_by_its_part(segments, cp):
    rows, ids = query_rows(8, cp), split_tensor(torch.arange(16).reshape(2, 8), cp)
    settings = {"segments": segments, "context_parallel": cp}
    right = OfARank(dense(segments, rows=rows))
    assert "mask" in str(check_delivery(right, {"input_ids": ids}, **settings))
    other = query_rows(8, ContextParallel(2, 1 - cp.rank, layout=cp.layout))
    for wrong in (dense(segments, rows=other), dense(segments, polarity="masked", rows=rows)):
        with pytest.raises(CollateError, match=r"attention.*row \d"):
            check_delivery(OfARank(wrong), {"input_ids": ids}, **settings)
    if segments is RIGHT:
        check_delivery(OfARank(), {"input_ids": ids}, **settings)
    else:
        with pytest.raises(CollateError, match="goes on from padding"):
            check_delivery(OfARank(), {"input_ids": ids}, **settings)
