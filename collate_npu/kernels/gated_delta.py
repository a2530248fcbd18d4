"""Gated DeltaNet: the boundaries of a recurrent kernel's call from `Segments`, in the spelling that this kernel reads.

Six spellings of the same two sequences, of 3 and 70 tokens, all of them integers in one row: a kernel takes any for its own.

| kernel              | arguments                                                | container, dtype        |
|---------------------|----------------------------------------------------------|-------------------------|
| `transformers`      | `cu_seq_lens_q` 0 3 73, `seq_idx` 0 0 0 1 1 ...          | device, int32           |
| the same, padded    | `attention_mask` `[B, S]`                                | device, int64           |
| `fla`, `fla_conv`   | `cu_seqlens` 0 3 73, `cu_seqlens_cpu` 0 3 73             | device and host, int64  |
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

Recurrent kernels have no mask. What no sequence covers stays unwritten memory, whose NaN reach the weights' gradients
(0 * NaN is NaN; flash-linear-attention #892), so each run of padding either is a sequence of its own, or lies behind the
sequence before it, whose real tokens come first and cannot see it. `1 1 1 0 2 2 0 0`::

    own       0 3 4 6 8
    behind    0   4   8     as Megatron's padded offsets, and for kernels whose short last chunks are wrong
    0 4 6 8   0   4 6 8     a batch's own physical offsets: which padding belongs to a sequence, and how the tail is cut

Chunks start again at every sequence, so there are sum(ceil(length / C)) of them, not ceil(T / C). Lengths 3 and 70 in
chunks of 64::

    ■■■|■■■■ ... ■■|■■■■■■     (sequence, chunk): (0, 0) (1, 0) (1, 1)

Padded rows `[B, S]` need no boundary where nothing is written at padding: a state begins at zero, and decay of nothing is
nothing. The convolution mixes W - 1 neighbours before the rule, so its *input* must be zero on the left; without biases
before the rule, zeroing the layer's input does both (measured: guide, kernels).

Legend: B rows, S width, T tokens of the flat row, N sequences, C tokens a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from collate_npu.errors import CollateError, UnsupportedFormError, explain, explain_rows
from collate_npu.masks.forms import fitting_places
from collate_npu.segments import Segments, Values, as_offsets
from collate_npu.validation import check_of_batch, checked

Padding = Literal["own", "behind"]
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
    keep_padding: bool | None = None,
    padding: Padding | Values = "own",
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Return the boundary arguments of a recurrent kernel for this batch, under its own names, as a dict of fresh values.

    The tensors of the call are one flat row. One row of Segments stays as it is, `[1, S]`, and each run of padding
    becomes a sequence of its own; several rows become those of `unpad`, `[1, T]`, and `repad` is the way back.
    `keep_padding` and `padding` are those of `flat_offsets`. `transformers` takes padded rows as they are, with a 2D mask,
    unless `keep_padding=False`. `fla_npu` is for each operator of the Gated DeltaNet chain, in chunks of 64, but
    `npu_chunk_local_cumsum`, which is `fla_npu_cumsum`; `fla_npu_flash` is the vendor's `flash_gated_delta_rule`. The
    tensor of `fla_npu_conv` is `[T, D]`: of `[1, T, D]` it reads no boundaries. fla builds its chunk tables itself and
    remembers them by the offsets' identity: never refill the offsets in place.

    Raises `UnsupportedFormError` where padding that is kept stands inside a sequence, and where the kernel cannot compute
    the batch.

    >>> flat = Segments.from_lengths([[3, 2]], width=8)
    >>> {name: value.tolist() for name, value in gated_delta_kwargs(flat, kernel="fla").items()}
    {'cu_seqlens': [0, 3, 5, 8], 'cu_seqlens_cpu': [0, 3, 5, 8]}
    >>> gated_delta_kwargs(flat, kernel="fla_npu")["cu_seqlens"]
    (0, 3, 5, 8)
    >>> gated_delta_kwargs(Segments.from_lengths([1, 3], side="left"), kernel="transformers")["attention_mask"].tolist()
    [[0, 0, 1], [1, 1, 1]]
    """
    device = torch.device(device)
    padded = segments.shape[0] > 1 or (not segments.packed and segments.padding_side != "none")
    if kernel == "transformers" and padded and keep_padding is not False and isinstance(padding, str):
        check_one_sided(segments)
        return {"attention_mask": segments.keep.to(device, torch.int64)}
    if kernel == "megatron" and isinstance(padding, str):
        padding = "behind"
    spelled = _SPELLINGS[kernel](flat_offsets(segments, keep_padding=keep_padding, padding=padding))
    on_device = {name: x.to(device) for name, x in spelled.items() if isinstance(x, Tensor) and not name.endswith("_cpu")}
    return spelled | on_device


# --- spellings of offsets


def _int32(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _lengths(offsets: Sequence[int]) -> list[int]:
    lengths: list[int] = np.diff(offsets).tolist()
    return lengths


def _numbers(offsets: Sequence[int]) -> Tensor:
    """int32 `[1, T]`: neighbours always differ."""
    return torch.repeat_interleave(torch.tensor(_lengths(offsets)))[None].int()


def _chunks(offsets: Sequence[int], size: int) -> tuple[int, ...]:
    """Return `sequence, chunk within it` for each chunk, in the order of the tokens (fla 0.5.2 ops/utils/index.py:156)."""
    return tuple(x for n, length in enumerate(_lengths(offsets)) for c in range(-(-length // size)) for x in (n, c))


def _of_decoding(offsets: Sequence[int]) -> dict[str, Any]:
    if (longest := max(_lengths(offsets))) > MOST_DECODED:
        rule = f"The decoding rule takes 1 to {MOST_DECODED} tokens of each sequence, and does not check it."
        remedy = "Use kernel='fla_npu', the chunked rule, for prompts and for training."
        raise UnsupportedFormError(explain("segments", f"a sequence of {longest} tokens", rule, remedy))
    return {"actual_seq_lengths": _int32([0, *_lengths(offsets)])}


def _of_megatron(offsets: Sequence[int]) -> dict[str, Any]:
    """Return the fields of `PackedSeqParams`."""
    longest = max(_lengths(offsets))
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    fields: dict[str, Any] = {"qkv_format": "thd", "max_seqlen_q": longest, "max_seqlen_kv": longest}
    return fields | {name: _int32(offsets) for name in names} | {"total_tokens": offsets[-1]}


def _of_fla(offsets: Sequence[int]) -> dict[str, Any]:
    return {"cu_seqlens": torch.tensor(offsets), "cu_seqlens_cpu": torch.tensor(offsets)}


CHUNK = 64
"""Tokens of a chunk of the rule."""
CUMSUM_CHUNK = 2048
"""Tokens of a chunk of `npu_chunk_local_cumsum`: 2**17 / 64 (flash-linear-attention-npu 17e24fd,
chunk_local_cumsum_tiling.cpp:275)."""
MOST_DECODED = 8
"""Tokens of a sequence in the decoding rule (flash-linear-attention-npu 17e24fd, _aclnn_ctypes.py:654-830)."""
_SPELLINGS: dict[str, Callable[[tuple[int, ...]], dict[str, Any]]] = {
    "transformers": lambda offsets: {"cu_seq_lens_q": _int32(offsets), "seq_idx": _numbers(offsets)},
    "fla": _of_fla,
    "fla_conv": _of_fla,
    "fla_cp": lambda offsets: {"cu_seqlens": torch.tensor(offsets)},
    "causal_conv1d": lambda offsets: {"seq_idx": _numbers(offsets)},
    "fla_npu": lambda offsets: {"cu_seqlens": offsets, "chunk_indices": _chunks(offsets, CHUNK)},
    "fla_npu_cumsum": lambda offsets: {"cu_seqlens": offsets, "chunk_indices_out": _chunks(offsets, CUMSUM_CHUNK)},
    "fla_npu_flash": lambda offsets: {"cu_seqlens": torch.tensor(offsets), "cu_seqlens_list": [*offsets]},
    "fla_npu_conv": lambda offsets: {"query_start_loc": offsets},
    "fla_npu_recurrent": _of_decoding,
    "torch_npu": lambda offsets: {"actual_seq_lengths": _int32(_lengths(offsets))},
    "megatron": _of_megatron,
}


# --- offsets of the flat row


@checked
def flat_offsets(
    segments: Segments, *, keep_padding: bool | None = None, padding: Padding | Values = "own"
) -> tuple[int, ...]:
    """Return `(0, ..., T)`, strictly rising: where sequences begin in the tensors of a call.

    `keep_padding=True`: the tensors are the rows as they are, one behind the other, `[1, B * S]`. False: those of
    `unpad`, `[1, T]`. Default: one row is kept as it is, of several the padding is taken out. `padding` says where the
    padding that is kept belongs (`"behind"`: with the sequence before it, as `pad_documents` and Megatron have it), or is
    the physical offsets of this very row, `batch["cu_seqlens_padded"]`. No sequence is ever empty.

    Raises `UnsupportedFormError` without a real token; where padding that is kept stands inside a sequence; for `"behind"`
    where it stands before the first one; and for offsets that do not fit the row.
    """
    if isinstance(padding, str) and padding not in get_args(Padding):
        how = "'own', 'behind', or the physical offsets of the row"
        raise CollateError(explain("padding", repr(padding), f"It is {how}.", "Name one of them."))
    if not segments.num_tokens:
        rule = "A recurrent kernel takes at least one token."
        raise UnsupportedFormError(explain("segments", repr(segments), rule, "Drop batches without tokens."))
    if not isinstance(padding, str):
        return _given(padding, segments)
    if not (segments.shape[0] == 1 if keep_padding is None else keep_padding) or segments.padding_side == "none":
        return segments.cu_seqlens_host
    return _of_padded_rows(segments, own=padding == "own")


def _given(physical: Values, segments: Segments) -> tuple[int, ...]:
    """Return the offsets that a batch carries, without the empty sequences that attention alone takes."""
    offsets = as_offsets("padding", physical)
    places = fitting_places(offsets, segments)
    if places is None:
        rule = "Physical offsets begin at 0, end at the width of one flat row, and each sequence begins at one."
        remedy = "Pass cu_seqlens_padded of this very batch, or 'own'."
        raise UnsupportedFormError(explain("padding", str(offsets.tolist())[:80], rule, remedy))
    return (0, *np.cumsum([place for place in places if place]).tolist())


def _of_padded_rows(segments: Segments, *, own: bool) -> tuple[int, ...]:
    """Rows one behind the other, each run a sequence: of padding too, or else counted to what stands before it."""
    ids_BS = segments.array
    if bad := [(b, "padding inside a sequence") for b in segments.hole_rows]:
        rule = "The state would run through the padding, and the convolution would read it."
        remedy = "Use the tensors of unpad(), which have no holes, with keep_padding=False."
        raise UnsupportedFormError(explain_rows("segments", bad, rule, remedy))
    begins_BS = np.diff(ids_BS, axis=1, prepend=-1) != 0
    if not own:
        if bad := [(int(b), "padding before the first sequence") for b in np.flatnonzero(ids_BS[:, 0] == 0)]:
            rule = "Padding may follow a sequence but not precede the first: the state would begin with it."
            remedy = "unpad() first, or make it a sequence of its own (padding='own')."
            raise UnsupportedFormError(explain_rows("segments", bad, rule, remedy))
        begins_BS &= ids_BS != 0
    return (*np.flatnonzero(begins_BS).tolist(), ids_BS.size)


@checked
def zero_padding(hidden: Tensor, segments: Segments) -> Tensor:
    """Return `[B, S, ...]` with zeros at padding: the input of a Gated DeltaNet layer, or of its convolution. A new tensor.

    Exact for one sequence a row, padded on the left, the right or both, where projections and convolution have no bias
    (Qwen3-Next, Qwen3.5). Raises for packed rows, which need boundaries, and for padding inside a sequence: `unpad` the
    batch and take `gated_delta_kwargs` there.

    >>> import torch
    >>> zero_padding(torch.ones(2, 3, 1), Segments.from_lengths([1, 3], side="left"))[..., 0].tolist()
    [[0.0, 0.0, 1.0], [1.0, 1.0, 1.0]]
    """
    check_of_batch("hidden", hidden, segments.shape, "Pass the padded tensor, tokens second.")
    check_one_sided(segments)
    keep_BS = segments.keep.to(hidden.device)
    return torch.where(keep_BS.view(*keep_BS.shape, *[1] * (hidden.ndim - 2)), hidden, hidden.new_zeros(()))


def check_one_sided(segments: Segments) -> None:
    """Raise where no mask helps a recurrent layer: several sequences in a row, or padding inside one; all rows at once."""
    bad = [(b, f"{len(row)} sequences") for b, row in enumerate(segments.lengths) if len(row) > 1]
    bad += [(b, "padding inside a sequence") for b in segments.hole_rows if len(segments.lengths[b]) == 1]
    if bad:
        rule = "A mask, or zeros at padding, only keep one sequence a row apart from the padding beside it."
        remedy = "unpad() the batch and use keep_padding=False, or collate with padding_free=True."
        raise UnsupportedFormError(explain_rows("segments", bad, rule, remedy))
