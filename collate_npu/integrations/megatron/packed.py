"""PackedSeqParams: the sequences of one flat row as Megatron-core's thd attention reads them.

Real offsets count tokens, physical ones say where sequences stand in the row with the padding behind each of them:
`0 3 5` and `0 4 8` for `1 1 1 0 2 2 0 0`. Costs O(N). Legend: N sequences, S width.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import torch

from collate_npu.consumers import mindspeed
from collate_npu.consumers.megatron import npu_engine
from collate_npu.consumers.model_traits import config_of, unwrap
from collate_npu.errors import CollateError, UnsupportedFormError, explain, explain_rows
from collate_npu.integrations.megatron.experts import depths
from collate_npu.kernels.check import log_call
from collate_npu.kernels.gated_delta import flat_offsets, gated_delta_kwargs
from collate_npu.parallel import ContextParallel
from collate_npu.segments import Segments


def packed_seq_params(
    segments: Segments,
    *,
    padding_counts: bool = False,
    context_parallel: ContextParallel | None = None,
    device: torch.device | str = "cpu",
) -> Any:
    """`megatron.core.packed_seq_params.PackedSeqParams` of a flat row `[1, S]`: `qkv_format="thd"`, int32 offsets `[N + 1]`.

    Under context parallelism pass the Segments of the whole row, as `pad_documents` returns them. `context_parallel` is
    Megatron's own where `parallel_state` has one. `max_seqlen_*` are physical, because rotary positions are made for those
    (core/transformer/attention.py:1082-1089), and `total_tokens` is S, for Mamba's sequence numbers (`__post_init__`).

    `padding_counts=True` hands over the physical offsets as the real ones, for readers that take `cu_seqlens_q` for places
    in the row (`takes_places`, FlashAttention 2). Causal attention stays exact; what counts tokens by them counts padding.
    Done unasked beside MindSpeed, whose attention takes them so (core_r0.16.0 core/transformer/dot_product_attention.py:282,
    0.18 flash_attention/adaptor.py:50-55), and beside TransformerEngineNPU (consumers.megatron); and where padding stands
    behind the last sequence alone, before 0.19 with `pad_between_seqs`: TransformerEngine up to 2.16 then reads wrong rows
    in silence under context parallelism (issue 3331).

    Raises `CollateError` for padding before or inside a sequence, and where the ranks cannot share out each sequence: Gated
    DeltaNet of 0.18 to 0.19.2 takes such in silence (0.19.2 core/ssm/gated_delta_net/common.py:466, 574-600).

    >>> packed_seq_params(Segments.from_lengths([[3, 2]])).cu_seqlens_q.tolist()  # doctest: +SKIP
    [0, 3, 5]
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    names = {field.name for field in dataclasses.fields(PackedSeqParams)}
    offsets = flat_row_offsets(segments)
    _check_shared_out(offsets, context_parallel or megatron_ranks())
    fields = gated_delta_kwargs(segments, kernel="megatron", device=device)
    real = segments.cu_seqlens_host
    unseen = "pad_between_seqs" not in names and real[:-1] == offsets[:-1]
    places = padding_counts or mindspeed.is_installed() or npu_engine()
    apart = not (places or unseen or real == offsets)
    for side in ("q", "kv"):
        # The very same tensor where they are equal: TransformerEngine's main branch reads "no padding" off the identity.
        padded = fields[f"cu_seqlens_{side}_padded"]
        fields[f"cu_seqlens_{side}"] = segments.cu_seqlens.to(device) if apart else padded
    fields["pad_between_seqs"] = apart
    newest = {"megatron": "main"}  # attention reads them too: which layers a release has is not judged here
    log_call("megatron_core.GatedDeltaNet", fields, B=1, T=offsets[-1], segments=segments, versions=newest)
    return PackedSeqParams(**{name: value for name, value in fields.items() if name in names})


def takes_places(model: Any) -> bool:
    """True if this model takes `cu_seqlens_q` for where sequences stand, whatever the padded offsets say.

    Multi-token prediction does (core/transformer/multi_token_prediction.py:236 of 0.16.1, 249 of 0.19.2), and mcore-bridge's
    Gated DeltaNets and latent attention (1.6.5 gpts/qwen3_next.py:477, modules/multi_latent_attention.py:35).
    """
    return depths(config_of(model)) > 0 or type(unwrap(model)).__module__.startswith("mcore_bridge")


def megatron_ranks(*, shared: bool = False) -> ContextParallel | None:
    """The ranks among which Megatron's `parallel_state` shares a row, with `shared` the tensor-parallel ones too."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return None
    cp = ContextParallel.from_megatron(**({} if shared else {"tensor_parallel": 1}))
    return cp if cp.size * cp.tensor_parallel > 1 else None


def flat_row_offsets(segments: Segments) -> tuple[int, ...]:
    """Where the sequences of a flat row stand: `(0, start of the second, ..., S)`, each with the padding behind it.

    Raises `UnsupportedFormError` where there is not one row, no sequence, or padding before or inside a sequence.
    """
    if segments.shape[0] != 1 or not segments.num_sequences:
        rule = "Offsets speak of one flat row [1, S] with at least one sequence."
        raise UnsupportedFormError(explain("segments", repr(segments), rule, "Collate with padding_free=True."))
    return flat_offsets(segments, padding="behind")


def _check_shared_out(offsets: tuple[int, ...], cp: ContextParallel | None) -> None:
    multiple = 1 if cp is None else cp.document_multiple
    bad = [(n, f"{b - a} places") for n, (a, b) in enumerate(pairwise(offsets)) if (b - a) % multiple]
    if cp is not None and bad:
        rule = f"{cp.size} ranks ({cp.layout}) share each sequence out in parts of equal size: lengths % {multiple} == 0."
        remedy = "Use the row and Segments of pad_documents(batch, cp), or gpt_batch, which does so."
        raise CollateError(explain_rows("segments (rows are sequences)", bad, rule, remedy))
