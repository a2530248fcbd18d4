"""Arguments of a recurrent kernel's call from `Segments`: its boundaries, in the spelling that this kernel reads.

Six spellings of the same two sequences, of 3 and 70 tokens, all of them integers in one row: a kernel takes any for its own.

| kernel              | arguments                                                | container, dtype        |
|---------------------|----------------------------------------------------------|-------------------------|
| `transformers`      | `cu_seq_lens_q` 0 3 73, `seq_idx` 0 0 0 1 1 ...          | device, int32           |
| the same, padded    | `attention_mask` `[B, S]`                                | device, int64           |
| `fla`               | `cu_seqlens` 0 3 73, `cu_seqlens_cpu` (`chunk_indices`)  | device and host, int64  |
| `fla_conv`          | the same, its table always in blocks of 64               | device and host, int64  |
| `fla_cp`            | `cu_seqlens` of the whole row, on every rank             | device, int64           |
| `causal_conv1d`     | `seq_idx` `[1, T]`                                       | device, int32           |
| `fla_npu`           | `cu_seqlens` 0 3 73, `chunk_indices` 0 0 1 0 1 1          | host tuples             |
| `fla_npu_cumsum`    | `cu_seqlens` 0 3 73, `chunk_indices_out` 0 0 1 0         | host tuples             |
| `fla_npu_flash`     | `cu_seqlens` 0 3 73, `cu_seqlens_list` 0 3 73            | device int64, host list |
| `fla_npu_conv`      | `query_start_loc` 0 3 73, for an x `[T, D]`              | host tuple              |
| `fla_npu_recurrent` | `actual_seq_lengths` 0 3 70: a first entry, then lengths | device, int32           |
| `torch_npu`         | `actual_seq_lengths` 3 70: lengths                       | device, int32           |
| `megatron`          | `cu_seqlens_q`, `cu_seqlens_q_padded`, ..., `total_tokens` | device, int32         |

Sources: fla 0.5.2 ops/gated_delta_rule/chunk.py:280-560, modules/conv/triton/ops.py:383-386, ops/cp/context.py;
causal-conv1d 1.6.1 csrc/causal_conv1d.cpp:175-198; flash-linear-attention-npu 17e24fd torch_custom/fla_npu/_aclnn_ctypes.py;
its examples/flash_gated_delta_rule.py:481-516; op-plugin docs of npu_chunk_gated_delta_rule; transformers 5.23
integrations/hub_kernels.py:1033-1050.
Legend: B rows, S width, T tokens of the flat row, N sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import whole_number
from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.kernels.gated_delta import boundaries
from collate_npu.kernels.gated_delta.boundaries import Padding, flat_offsets
from collate_npu.kernels.gated_delta.operators import operator_named
from collate_npu.segments import Segments, Values
from collate_npu.validation import checked, here

Kernel = Literal[
    "transformers", "fla", "fla_conv", "causal_conv1d", "fla_npu", "fla_npu_cumsum", "fla_npu_flash", "fla_npu_conv",
    "fla_npu_recurrent", "torch_npu", "megatron", "fla_cp",
]  # fmt: skip
"""Who reads the arguments, in which spelling."""


@checked
def gated_delta_kwargs(
    segments: Segments,
    *,
    kernel: Kernel,
    chunk_size: int = 64,
    keep_padding: bool | None = None,
    padding: Padding | Values = "own",
    max_sequences: int | None = None,
    tables: bool = False,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """The boundary arguments of a recurrent kernel for this batch, under its own names, as a dict of fresh values.

    The tensors of the call are one flat row. One row of Segments stays as it is, `[1, S]`, and each run of padding
    becomes a sequence of its own; several rows become those of `unpad`, `[1, T]`, and `repad` is the way back.
    `keep_padding`, `padding` and `max_sequences` are those of `flat_offsets`; with `max_sequences` chunk tables keep their
    shape too where every place is a multiple of the chunk (`PaddingCollator(sequence_multiple=64)`). `transformers` takes
    padded rows as they are, with a 2D mask, unless `keep_padding=False`. `chunk_size` is that of the rule. `tables=True`
    adds `chunk_indices` for fla, which else builds them itself and remembers them by the offsets' identity: never refill
    the offsets in place. `fla_npu` is for each operator of the Gated DeltaNet chain but `npu_chunk_local_cumsum`, which is
    `fla_npu_cumsum`; `fla_npu_flash` is the vendor's `flash_gated_delta_rule`. The tensor of `fla_npu_conv` is `[T, D]`: of
    `[1, T, D]` it reads no boundaries. Nothing here is shared with another call.

    Raises `UnsupportedFormError` where padding that is kept stands inside a sequence, where the kernel cannot compute
    the batch, and for a `chunk_size` it does not take. `check_gated_delta_contract` checks a call as a whole.

    >>> flat = Segments.from_lengths([[3, 2]], width=8)
    >>> {name: value.tolist() for name, value in gated_delta_kwargs(flat, kernel="fla").items()}
    {'cu_seqlens': [0, 3, 5, 8], 'cu_seqlens_cpu': [0, 3, 5, 8]}
    >>> gated_delta_kwargs(flat, kernel="fla_npu")["cu_seqlens"]
    (0, 3, 5, 8)
    >>> gated_delta_kwargs(Segments.from_lengths([1, 3], side="left"), kernel="transformers")["attention_mask"].tolist()
    [[0, 0, 1], [1, 1, 1]]
    """
    device, chunk_size = here(device), whole_number("chunk_size", chunk_size, least=1)
    if not isinstance(kernel, str) or kernel not in get_args(Kernel):
        rule, remedy = f"The kernels are {', '.join(get_args(Kernel))}.", "Name the one you call."
        raise CollateError(explain("kernel", repr(kernel), rule, remedy))
    taken = operator_named(kernel).chunk_sizes
    if taken and chunk_size not in taken:
        rule = f"{kernel} takes chunks of {', '.join(map(str, taken))} tokens."
        raise UnsupportedFormError(explain("chunk_size", repr(chunk_size), rule, "Pass one of them, to the kernel too."))
    flat = keep_padding is False or max_sequences is not None or not isinstance(padding, str)
    padded = segments.shape[0] > 1 or (not segments.packed and segments.padding_side != "none")
    if kernel == "transformers" and not flat and padded:
        boundaries.check_one_sided(segments)
        return {"attention_mask": segments.keep.to(device, torch.int64)}
    if kernel == "megatron" and isinstance(padding, str):
        padding = "behind"
    offsets = flat_offsets(segments, keep_padding=keep_padding, padding=padding, max_sequences=max_sequences)
    block = boundaries.CONV_BLOCK if kernel == "fla_conv" else chunk_size
    spelled = _spelled(kernel, offsets, block, tables)
    on_device = {name: x.to(device) for name, x in spelled.items() if isinstance(x, Tensor) and not name.endswith("_cpu")}
    return spelled | on_device


def _spelled(kernel: Kernel, offsets: Sequence[int], chunk: int, tables: bool) -> dict[str, Any]:
    lengths_N = np.diff(offsets)
    numbers_T = np.repeat(np.arange(len(lengths_N)), lengths_N)  # neighbours always differ
    longest, most = int(lengths_N.max()), operator_named(kernel).most_tokens
    match kernel:
        case "transformers":  # both, always: the rule reads the one, the convolution the other, and either alone runs on
            return {"cu_seq_lens_q": _int32(offsets), "seq_idx": _int32(numbers_T[None])}
        case "fla" | "fla_conv":
            table = {"chunk_indices": torch.from_numpy(boundaries.chunk_indices(offsets, chunk))} if tables else {}
            return {"cu_seqlens": torch.tensor(offsets), "cu_seqlens_cpu": torch.tensor(offsets)} | table
        case "fla_cp":
            return {"cu_seqlens": torch.tensor(offsets)}
        case "causal_conv1d":
            return {"seq_idx": _int32(numbers_T[None])}
        case "fla_npu":
            return {"cu_seqlens": tuple(offsets), "chunk_indices": _flat_table(offsets, chunk)}
        case "fla_npu_cumsum":
            return {"cu_seqlens": tuple(offsets), "chunk_indices_out": _flat_table(offsets, boundaries.cumsum_block(chunk))}
        case "fla_npu_flash":
            return {"cu_seqlens": torch.tensor(offsets), "cu_seqlens_list": [*offsets]}
        case "fla_npu_conv":
            return {"query_start_loc": tuple(offsets)}
        case "fla_npu_recurrent":
            if most is not None and longest > most:
                rule = f"The decoding rule takes 1 to {most} tokens of each sequence, and does not check it."
                remedy = "Use kernel='fla_npu', the chunked rule, for prompts and for training."
                raise UnsupportedFormError(explain("segments", f"a sequence of {longest} tokens", rule, remedy))
            return {"actual_seq_lengths": _int32([0, *lengths_N])}
        case "torch_npu":
            return {"actual_seq_lengths": _int32(lengths_N)}
        case "megatron":
            names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
            fields: dict[str, Any] = {"qkv_format": "thd", "max_seqlen_q": longest, "max_seqlen_kv": longest}
            return fields | {name: _int32(offsets) for name in names} | {"total_tokens": offsets[-1]}


def _flat_table(offsets: Sequence[int], block: int) -> tuple[int, ...]:
    return tuple(boundaries.chunk_indices(offsets, block).reshape(-1).tolist())


def _int32(numbers: Sequence[int] | np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(np.array(numbers, np.int32))
