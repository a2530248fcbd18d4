"""PackedSeqParams: the sequences of one flat row as Megatron-core's thd attention reads them.

Real offsets count tokens, physical ones say where sequences stand in the row with the padding behind each of them:
`0 3 5` and `0 4 8` for `1 1 1 0 2 2 0 0`. Costs O(N). Legend: N sequences, S width.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from collate_npu.errors import CollateError, UnsupportedFormError, explain, explain_rows
from collate_npu.segments import Segments


def packed_seq_params(segments: Segments, *, padding_counts: bool = False, device: torch.device | str = "cpu") -> Any:
    """`megatron.core.packed_seq_params.PackedSeqParams` of a flat row `[1, S]`: `qkv_format="thd"`, int32 offsets `[N + 1]`.

    Under context parallelism pass the Segments of the whole row, as `pad_documents` returns them: the kernels divide the
    offsets themselves. `max_seqlen_*` are physical, because rotary positions are made for the physical lengths
    (core/models/common/embeddings/rotary_pos_embedding.py:238-241, core/transformer/attention.py:1082-1089).

    `padding_counts=True` hands over the physical offsets as the real ones. Causal attention is exact all the same, because
    padding stands behind its sequence; what counts tokens by them counts padding. It is for kernels that take no padding
    between sequences (FlashAttention 2) and for Megatron's multi-token prediction, and happens by itself where
    TransformerEngine would not see the padding. Raises where padding stands before or inside a sequence.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    names = {field.name for field in dataclasses.fields(PackedSeqParams)}
    physical = torch.tensor(physical_offsets(segments), dtype=torch.int32)
    real = segments.cu_seqlens
    if padding_counts or torch.equal(real, physical) or ("pad_between_seqs" not in names and _unseen(real, physical)):
        real = physical  # the very same tensor: TransformerEngine's main branch reads "no padding" off the identity
    longest = int(physical.diff().max())
    fields: dict[str, Any] = {"qkv_format": "thd", "max_seqlen_q": longest, "max_seqlen_kv": longest}
    held = {"": real.to(device), "_padded": physical.to(device)}
    if real is physical:
        held["_padded"] = held[""]
    fields |= {f"cu_seqlens_{side}{kind}": offsets for side in ("q", "kv") for kind, offsets in held.items()}
    # Megatron >= 0.17 tells Mamba's layers where sequences end only where it knows the width (seq_idx of __post_init__).
    fields |= {"total_tokens": segments.shape[1], "pad_between_seqs": real is not physical}
    return PackedSeqParams(**{name: value for name, value in fields.items() if name in names})


def physical_offsets(segments: Segments) -> tuple[int, ...]:
    """Where the sequences of a flat row stand: `(0, start of the second, ..., S)`, each with the padding behind it.

    Raises `CollateError` where there is not one row, no sequence, or padding before or inside a sequence.
    """
    B, S = segments.shape
    if B != 1 or not segments.num_sequences:
        rule = "Offsets speak of one flat row [1, S] with at least one sequence."
        raise UnsupportedFormError(explain("segments", repr(segments), rule, "Collate with padding_free=True."))
    starts = [start for _, start, _ in segments.spans]
    bad = [
        (n, "padding inside it")
        for n, (length, span) in enumerate(zip(segments.sequence_lengths, segments.spans))
        if span[2] - span[1] != length
    ]
    if bad or starts[0]:
        rows = bad or [(0, f"{starts[0]} tokens of padding before it")]
        rule = "In a flat row padding stands behind a sequence."
        raise CollateError(explain_rows("segments (rows are sequences)", rows, rule, "unpad() the row first."))
    return (*starts, S)


def _unseen(real: Tensor, physical: Tensor) -> bool:
    """Is padding behind the last sequence alone? TransformerEngine up to 2.16 compares the offsets without the last one,
    and under context parallelism then reads wrong rows in silence (dot_product_attention.py:1519-1529; TE issue 3331)."""
    return torch.equal(real[:-1], physical[:-1])
