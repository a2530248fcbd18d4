"""MindSpeed-LLM's Qwen3-Next: no layer of it reads a padding mask, and its convolution never asks where a sequence begins.

Read in c77308a1 (master) and ad615b3b (26.1.0), whose files are the same::

                        mcore (tasks/models/transformer)               fsdp2 (models/qwen3_next)
    full attention      MindSpeed's: None = the causal triangle        always the causal triangle, mode 2
    recurrent layers    mask a rank-2 mask, ignore a rank-4 one        never get a mask
    a flat row          packed_seq_params ignored                      actual_seq_len read, but not by the convolution
    context parallel    refused by MindSpeed-LLM itself                recurrent layers wrong in silence

The one mask of mcore goes to attention too, which takes no rank-2 mask: nothing serves both but None.
Under cp_type=ulysses, the only one it lets Qwen3-Next have (fsdp2/utils/arguments.py:819-823), fsdp2 hands out contiguous
slices (fsdp2/train/trainer.py:526-565), and its Gated DeltaNet undoes a zigzag that never was (gdn_context_parallel.py:
150-151): run between two processes, chunks 0 1 2 3 of a row are computed in the order 0 2 3 1.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from collate_npu.consumers.consumer import PACKED_RECURRENT, Case, Consumer, Form, Refusal, not_exact


def _flat_state(case: Case) -> str:
    return "seq_idx=None is written in its source" if case.padding_free and case.recurrent and case.segments.packed else ""


_FLAT = Refusal(
    of="flat rows of several sequences, on recurrent layers",
    when=_flat_state,
    rule="MindSpeed-LLM's Gated DeltaNet convolves from one sequence of a flat row into the next: {why}.",
    remedy="Give each sequence its own row, padded right (padding_free=False; no reset_attention_mask).",
)
_PACKED = replace(PACKED_RECURRENT, remedy=_FLAT.remedy)
_NOT_EXACT = Refusal(
    of="every batch where None is not exact",
    when=not_exact,
    rule="MindSpeed-LLM computes plain causal attention and an unmasked recurrence, and here {why}.",
    remedy="Pad right with one sequence a row.",
)

MINDSPEED_LLM = Consumer(
    name="mindspeed_llm",
    forms=(Form(form="none", reads="None; its recurrent layers ignore a dense mask"),),
    refuses=(_PACKED, _FLAT, _NOT_EXACT),
    keeps_mask_2d="never",
    not_shared="its layer refuses context parallelism itself (qwen3_next_gated_deltanet_attention.py:218-221)",
    source="MindSpeed-LLM c77308a1 tasks/models/transformer/qwen3_next_gated_deltanet_attention.py:47-57, 217-221, 361-362, "
    "401-410; core/transformer/custom_dot_product_attention.py:205-206",
)

MINDSPEED_LLM_FSDP2 = Consumer(
    name="mindspeed_llm_fsdp2",
    forms=(Form(form="keep_2d", reads="the 2D mask, int64, which its router's loss alone reads"),),
    refuses=(_PACKED, _FLAT, _NOT_EXACT),
    keep_dtype=torch.int64,
    keeps_mask_2d="never",
    not_shared="its loader hands out contiguous slices, which its layer takes for zigzag and puts out of order "
    "(fsdp2/train/trainer.py:526-565, fsdp2/distributed/context_parallel/gdn_context_parallel.py:150-151)",
    source="MindSpeed-LLM c77308a1 fsdp2/models/qwen3_next/modeling_qwen3_next.py:836-843, 1239-1248, 1281-1291, 1463-1468",
)
