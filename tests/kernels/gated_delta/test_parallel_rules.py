"""The check of a call and the check of a split judge the same ranks, layouts and rows alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collate_npu import CollateError, ContextParallel, Segments
from collate_npu.kernels.gated_delta.contract import gated_delta_breaches
from collate_npu.parallel import check_recurrent_split

SCHEMES = {
    "fla_cp": ("state_passing", "cu_seqlens", torch.int64),
    "fla": ("head_exchange", "cu_seqlens", torch.int64),
    "megatron": ("head_exchange_zigzag", "cu_seqlens_q_padded", torch.int32),
}


@pytest.mark.parametrize("kernel", SCHEMES)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    size=st.sampled_from((2, 3, 4)),
    layout=st.sampled_from(("zigzag", "contiguous", "document_zigzag", "document_contiguous", "ulysses")),
)
def test_a_call_passes_where_its_split_does(kernel, lengths, size, layout):
    """But for two readings of a call: contiguous ranks of a plain kernel exchange nothing, and Megatron's zigzag goes
    sequence by sequence on a flat row."""
    scheme, name, dtype = SCHEMES[kernel]
    cp = ContextParallel(size, 0, layout=layout)
    offsets, T = np.cumsum([0, *lengths]), sum(lengths)
    kwargs = {name: torch.tensor(offsets, dtype=dtype)} | ({"qkv_format": "thd"} if kernel == "megatron" else {})
    refused = {b.rule for b in gated_delta_breaches(kwargs, kernel=kernel, B=1, T=T, context_parallel=cp)}
    split = cp.for_documents() if kernel == "megatron" else cp
    try:
        check_recurrent_split(split, scheme, Segments.from_lengths([lengths]), padding_free=True, offsets=offsets)
        right = kernel != "fla" or layout == "ulysses"
    except CollateError:
        right = False
    assert right == (not refused), refused
