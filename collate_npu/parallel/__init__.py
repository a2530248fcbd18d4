"""Sequence parallelism: split a batch along the sequence by one visible table, gather outputs back exactly."""

from collate_npu.parallel.agreement import ranks_agree
from collate_npu.parallel.gather import gather_objects, gather_sequence, join_shards
from collate_npu.parallel.layout import BLOCKS, ContextParallel, data_group, gloo_group, query_rows, token_rows, token_runs
from collate_npu.parallel.recurrent import RecurrentScheme, check_recurrent_split, recurrent_parallel
from collate_npu.parallel.split import cu_seqlens_of, pad_documents, split_batch, split_tensor

__all__ = [
    "BLOCKS", "ContextParallel", "RecurrentScheme", "check_recurrent_split", "cu_seqlens_of", "data_group",
    "gather_objects", "gather_sequence", "gloo_group", "join_shards", "pad_documents", "query_rows",
    "ranks_agree", "recurrent_parallel", "split_batch", "split_tensor", "token_rows", "token_runs",
]  # fmt: skip
