"""Sequence parallelism: split a batch along the sequence by one visible table, gather outputs back exactly."""

from collate_npu.parallel.agreement import ranks_agree
from collate_npu.parallel.layout import (
    ContextParallel,
    check_recurrent_split,
    data_group,
    gloo_group,
    query_rows,
    token_runs,
)
from collate_npu.parallel.split import cu_seqlens_of, gather_sequence, pad_documents, split_batch, split_tensor

__all__ = [
    "ContextParallel", "check_recurrent_split", "cu_seqlens_of", "data_group", "gather_sequence",
    "gloo_group", "pad_documents", "query_rows", "ranks_agree", "split_batch", "split_tensor", "token_runs",
]  # fmt: skip
