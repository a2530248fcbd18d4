"""The boundaries of a recurrent kernel's call from `Segments`, in the spelling that this kernel reads.

Six spellings of the same two sequences, of 3 and 70 tokens, all of them integers in one row: a kernel takes any for its own.

| kernel              | arguments                                                | container, dtype        |
|---------------------|----------------------------------------------------------|-------------------------|
| `transformers`      | `cu_seq_lens_q` 0 3 73, `seq_idx` 0 0 0 1 1 ...          | device, int32           |
| the same, padded    | `attention_mask` `[B, S]`                                | device, int64           |
| `fla`               | `cu_seqlens` 0 3 73, `cu_seqlens_cpu` (`chunk_indices`)  | device and host, int64  |
| `fla_conv`          | the same, its table always in blocks of 64               | device and host, int64  |
| `fla_cp`            | `cu_seqlens` of the whole row, on every rank             | device, int64           |
| `causal_conv1d`     | `seq_idx` `[1, T]`                                       | device, int32           |
| `fla_npu`           | `cu_seqlens` 0 3 73, `chunk_indices` 0 0 1 0 1 1, `chunk_indices_out` | host tuples |
| `fla_npu_conv`      | `query_start_loc` 0 3 73                                 | host tuple              |
| `fla_npu_recurrent` | `actual_seq_lengths` 0 3 70: a first entry, then lengths | device, int32           |
| `torch_npu`         | `actual_seq_lengths` 3 70: lengths                       | device, int32           |
| `megatron`          | `cu_seqlens_q`, `cu_seqlens_q_padded`, ..., `total_tokens` | device, int32         |

Sources: fla 0.5.2 ops/gated_delta_rule/chunk.py:280-560, modules/conv/triton/ops.py:383-386, ops/cp/context.py;
causal-conv1d 1.6.1 csrc/causal_conv1d.cpp:175-198; flash-linear-attention-npu 17e24fd torch_custom/fla_npu/_aclnn_ctypes.py;
op-plugin docs of npu_chunk_gated_delta_rule; transformers 5.23 integrations/hub_kernels.py:1033-1050.
Legend: B rows, S width, T tokens of the flat row, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.kernels.gated_delta.boundaries import Padding, flat_offsets
from collate_npu.kernels.gated_delta.chunks import chunk_indices, cumsum_block
from collate_npu.kernels.gated_delta.padded import check_one_sided
from collate_npu.segments import Segments, Values

Kernel = Literal[
    "transformers", "fla", "fla_conv", "causal_conv1d", "fla_npu", "fla_npu_conv", "fla_npu_recurrent", "torch_npu",
    "megatron", "fla_cp",
]  # fmt: skip
CHUNK_SIZES: dict[str, tuple[int, ...]] = {"fla": (16, 32, 64), "fla_npu": (64, 128)}
"""What chunked rules take (fla 0.5.2 ops/gated_delta_rule/chunk.py:538-540; fla_npu's training chain)."""
CONV_BLOCK = 64
"""fla's convolution works in blocks of 64, whatever the chunk of the rule (modules/conv/triton/ops.py:383-386)."""
MAX_DECODED = 8
"""Tokens of a sequence in one call of the decoding rules on Ascend (flash-linear-attention-npu README; its issue 641)."""


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
    becomes a sequence of its own. Several rows become those of `unpad`, `[1, T]`; `repad` is the way back.
    `keep_padding=False` takes the padding out of one row too, `True` keeps that of several (rows one behind the other,
    `[1, B * S]`). `padding="behind"` counts padding to the sequence before it, as `pad_documents` and Megatron do;
    `padding=batch["cu_seqlens_padded"]` takes the places that a collator gave. `max_sequences=N` makes N sequences, for
    graphs and compilers, by cutting the padding at the end: offsets `[N + 1]` for batch after batch. Chunk tables keep
    their shape too where every place is a multiple of the chunk (`PaddingCollator(sequence_multiple=64)`).
    `transformers` takes padded rows as they are, with a 2D mask, unless `keep_padding=False`.

    `chunk_size` is that of the rule. `tables=True` adds `chunk_indices` for fla, which else builds them itself and
    remembers them by the offsets' identity: never refill the offsets in place. Nothing here is shared with another call.

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
    if kernel not in get_args(Kernel):
        rule, remedy = f"The kernels are {', '.join(get_args(Kernel))}.", "Name the one you call."
        raise CollateError(explain("kernel", repr(kernel), rule, remedy))
    _check_chunk(kernel, chunk_size)
    flat = keep_padding is False or max_sequences is not None or not isinstance(padding, str)
    if kernel == "transformers" and not flat and _padded(segments):
        check_one_sided(segments)
        return {"attention_mask": segments.keep.to(device, torch.int64)}
    if kernel == "megatron" and isinstance(padding, str):
        padding = "behind"
    offsets = flat_offsets(segments, keep_padding=keep_padding, padding=padding, max_sequences=max_sequences)
    spelled = _SPELLINGS[kernel](offsets, chunk_size, tables)
    return {name: _placed(value, device if not name.endswith("_cpu") else "cpu") for name, value in spelled.items()}


def _padded(segments: Segments) -> bool:
    """Rows as they are: several, or one with padding beside a single sequence."""
    return segments.shape[0] > 1 or (not segments.packed and segments.padding_side != "none")


def _check_chunk(kernel: str, chunk_size: int) -> None:
    taken = CHUNK_SIZES.get(kernel)
    if taken is not None and chunk_size not in taken:
        rule = f"{kernel} takes chunks of {', '.join(map(str, taken))} tokens."
        raise UnsupportedFormError(explain("chunk_size", repr(chunk_size), rule, "Pass one of them, to the kernel too."))


def _placed(value: Any, device: torch.device | str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


# --- spellings


def _tensor(numbers: Sequence[int] | np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.array(numbers, np.int64)).to(dtype)


def _numbers(offsets: Sequence[int]) -> Tensor:
    """int32 `[1, T]`: 0 0 0 1 1 ..., another number for each sequence, so that neighbours always differ."""
    lengths_N = np.diff(offsets)
    return _tensor(np.repeat(np.arange(len(lengths_N)), lengths_N)[None], torch.int32)


def _flat(table: np.ndarray[Any, Any]) -> tuple[int, ...]:
    return tuple(table.reshape(-1).tolist())


def _transformers(offsets: Sequence[int], chunk: int, tables: bool) -> dict[str, Any]:
    """Both, always: the rule reads the one, the convolution the other, and either alone runs on in silence."""
    return {"cu_seq_lens_q": _tensor(offsets, torch.int32), "seq_idx": _numbers(offsets)}


def _fla(offsets: Sequence[int], chunk: int, tables: bool) -> dict[str, Any]:
    spelled = {"cu_seqlens": _tensor(offsets, torch.int64), "cu_seqlens_cpu": _tensor(offsets, torch.int64)}
    return spelled | ({"chunk_indices": _tensor(chunk_indices(offsets, chunk), torch.int64)} if tables else {})


def _fla_npu(offsets: Sequence[int], chunk: int, tables: bool) -> dict[str, Any]:
    return {
        "cu_seqlens": tuple(offsets),
        "chunk_indices": _flat(chunk_indices(offsets, chunk)),
        "chunk_indices_out": _flat(chunk_indices(offsets, cumsum_block(chunk))),
    }


def _fla_npu_recurrent(offsets: Sequence[int], chunk: int, tables: bool) -> dict[str, Any]:
    longest = int(np.diff(offsets).max())
    if longest > MAX_DECODED:
        rule = f"The decoding rule takes 1 to {MAX_DECODED} tokens of each sequence, and does not check it."
        remedy = "Use kernel='fla_npu', the chunked rule, for prompts and for training."
        raise UnsupportedFormError(explain("segments", f"a sequence of {longest} tokens", rule, remedy))
    return {"actual_seq_lengths": _tensor([0, *np.diff(offsets)], torch.int32)}


def _megatron(offsets: Sequence[int], chunk: int, tables: bool) -> dict[str, Any]:
    longest = int(np.diff(offsets).max())
    fields: dict[str, Any] = {"qkv_format": "thd", "max_seqlen_q": longest, "max_seqlen_kv": longest}
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    return fields | {name: _tensor(offsets, torch.int32) for name in names} | {"total_tokens": offsets[-1]}


_SPELLINGS: dict[str, Callable[[Sequence[int], int, bool], dict[str, Any]]] = {
    "transformers": _transformers,
    "fla": _fla,
    "fla_conv": lambda offsets, _, tables: _fla(offsets, CONV_BLOCK, tables),
    "fla_cp": lambda offsets, *_: {"cu_seqlens": _tensor(offsets, torch.int64)},
    "causal_conv1d": lambda offsets, *_: {"seq_idx": _numbers(offsets)},
    "fla_npu": _fla_npu,
    "fla_npu_conv": lambda offsets, *_: {"query_start_loc": tuple(offsets)},
    "fla_npu_recurrent": _fla_npu_recurrent,
    "torch_npu": lambda offsets, *_: {"actual_seq_lengths": _tensor(np.diff(offsets), torch.int32)},
    "megatron": _megatron,
}
