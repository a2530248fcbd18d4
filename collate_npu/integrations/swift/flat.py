"""ms-swift's flat rows on Megatron: do the offsets that its layers are handed fit the row and its samples?

They come from positions: a sequence begins at every 0, so that padding stands in sequences of its own, and all of them
cover the row (4.6.0 megatron/utils/utils.py:252-281, swift/utils/transformers_utils.py:354-372). Positions are padded beside
the tokens (template/base.py:2131-2139, 2160-2168), and not everywhere to the same width. Costs O(N).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from collate_npu.errors import CollateError, explain
from collate_npu.host import host_array
from collate_npu.segments import Segments

_REMEDY = "Set padding_free=False, or a tensor_model_parallel_size that makes padding_to a multiple of 2 * cp."


def number_sequences(params: Any) -> None:
    """Let Mamba's layers know the sequences: from 0.17 on megatron-core numbers them in the constructor, where it knows the
    width, which ms-swift says afterwards (megatron/utils/utils.py:272). Unnumbered they run into each other
    (core/ssm/mamba_mixer.py:744-750 of 0.19.2)."""
    if getattr(params, "total_tokens", None) is not None and params.seq_idx is None:
        params.__post_init__()


def flat_segments(data: Mapping[str, Any], params: Any, ranks: int = 1) -> Segments:
    """The Segments of a flat row: each real length at the start of its sequence. `data` is what the template sent.

    Raises `CollateError` unless the offsets rise from 0 to the end of the row, leave room for each sample, and can be
    shared out among the zigzag `ranks`; and unless queries and keys have the same, padded and not.
    """
    offsets = host_array("cu_seqlens_q", params.cu_seqlens_q).astype(np.int64)
    names = ("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    others = [getattr(params, name, None) for name in names]
    differ = any(each is not None and not np.array_equal(host_array("offsets", each), offsets) for each in others)
    tokens = data.get("input_ids")
    width = (data["position_ids"] if tokens is None else tokens).shape[-1]
    places_N, parts = np.diff(offsets), 2 * ranks if ranks > 1 else 1
    lengths_N = np.array(data["seq_lens"], np.int64)
    fits = len(lengths_N) <= len(places_N) and bool((lengths_N <= places_N[: len(lengths_N)]).all())
    covers = bool(len(places_N)) and offsets[0] == 0 and offsets[-1] == width and bool((places_N > 0).all())
    if differ or not fits or not covers or bool((places_N % parts).any()):
        rule = f"They rise from 0 to the {width} tokens of the row, and leave room for {lengths_N.tolist()[:8]}"
        rule += f", in multiples of {parts}." if parts > 1 else "."
        raise CollateError(explain("packed_seq_params", str(offsets.tolist())[:80], rule, _REMEDY))
    ids_S = np.zeros(width, np.int32)
    for n, (start, length) in enumerate(zip(offsets.tolist(), lengths_N.tolist()), start=1):
        ids_S[start : start + length] = n
    return Segments(ids_S[None])
