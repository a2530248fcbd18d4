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

Recurrent kernels have no mask. What no sequence covers stays unwritten memory, whose NaN reach the weights' gradients
(0 * NaN is NaN; flash-linear-attention #892), so each run of padding either is a sequence of its own, or lies behind the
sequence before it, whose real tokens come first and cannot see it. `1 1 1 0 2 2 0 0`::

    own       0 3 4 6 8
    behind    0   4   8     as Megatron's padded offsets, and for kernels whose short last chunks are wrong
    0 4 6 8   0   4 6 8     a batch's own physical offsets: which padding belongs to a sequence, and how the tail is cut

Chunks start again at every sequence, so there are sum(ceil(length / C)) of them, not ceil(T / C). Lengths 3 and 70 in
chunks of 64, where builders that count non-empty sequences alone name the wrong one behind an empty one (fla #909)::

    ■■■|■■■■ ... ■■|■■■■■■     chunk_indices (0, 0) (1, 0) (1, 1)     chunk_offsets 0 1 3

Padded rows `[B, S]` need no boundary where nothing is written at padding: a state begins at zero, and decay of nothing is
nothing. The convolution mixes W - 1 neighbours before the rule, so its *input* must be zero on the left; without biases
before the rule, zeroing the layer's input does both (measured: guide, kernels).

Legend: B rows, S width, T tokens of the flat row, N sequences, C tokens a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import Array, whole_number
from collate_npu.errors import CollateError, UnsupportedFormError, explain, explain_rows
from collate_npu.kernels.gated_delta.operators import operator_named
from collate_npu.masks.forms import add_tail, fitting_places
from collate_npu.segments import Segments, Values, as_offsets
from collate_npu.validation import check_of_batch, checked, here

Padding = Literal["own", "behind"]
MAX_CHUNKS = 1 << 24
"""Pairs of a table: some 250 MiB, and 2**30 tokens in chunks of 64."""
CONV_BLOCK = 64
"""fla's convolution works in blocks of 64, whatever the chunk of the rule (modules/conv/triton/ops.py:383-386)."""
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
    the batch, and for a `chunk_size` it does not take. `kernels.check.check_call` checks a call as a whole.

    >>> flat = Segments.from_lengths([[3, 2]], width=8)
    >>> {name: value.tolist() for name, value in gated_delta_kwargs(flat, kernel="fla").items()}
    {'cu_seqlens': [0, 3, 5, 8], 'cu_seqlens_cpu': [0, 3, 5, 8]}
    >>> gated_delta_kwargs(flat, kernel="fla_npu")["cu_seqlens"]
    (0, 3, 5, 8)
    >>> gated_delta_kwargs(Segments.from_lengths([1, 3], side="left"), kernel="transformers")["attention_mask"].tolist()
    [[0, 0, 1], [1, 1, 1]]
    """
    device, chunk_size = here(device), whole_number("chunk_size", chunk_size, least=1)
    taken = operator_named(kernel).chunk_sizes
    if taken and chunk_size not in taken:
        rule = f"{kernel} takes chunks of {', '.join(map(str, taken))} tokens."
        raise UnsupportedFormError(explain("chunk_size", repr(chunk_size), rule, "Pass one of them, to the kernel too."))
    flat = keep_padding is False or max_sequences is not None or not isinstance(padding, str)
    padded = segments.shape[0] > 1 or (not segments.packed and segments.padding_side != "none")
    if kernel == "transformers" and not flat and padded:
        check_one_sided(segments)
        return {"attention_mask": segments.keep.to(device, torch.int64)}
    if kernel == "megatron" and isinstance(padding, str):
        padding = "behind"
    offsets = flat_offsets(segments, keep_padding=keep_padding, padding=padding, max_sequences=max_sequences)
    spelled = _megatron_fields(offsets) if kernel == "megatron" else _spelled(kernel, offsets, chunk_size, tables)
    on_device = {name: x.to(device) for name, x in spelled.items() if isinstance(x, Tensor) and not name.endswith("_cpu")}
    return spelled | on_device


def _spelled(kernel: Kernel, offsets: Sequence[int], chunk_size: int, tables: bool) -> dict[str, Any]:
    """Spell the boundaries by the operator's row. transformers gets both: its rule and convolution read one each."""
    row, lengths_N = operator_named(kernel), np.diff(offsets)
    if row.most_tokens is not None and (longest := int(lengths_N.max())) > row.most_tokens:
        rule = f"The decoding rule takes 1 to {row.most_tokens} tokens of each sequence, and does not check it."
        remedy = "Use kernel='fla_npu', the chunked rule, for prompts and for training."
        raise UnsupportedFormError(explain("segments", f"a sequence of {longest} tokens", rule, remedy))
    given: Any = {"offsets": offsets, "lengths": lengths_N, "prefix and lengths": [0, *lengths_N]}[row.form]
    dtype = torch.int64 if "cu_seqlens" in row.offsets else torch.int32
    spelled: dict[str, Any] = {name: tuple(given) if row.host else torch.tensor(given, dtype=dtype) for name in row.offsets}
    if row.numbers:  # neighbours always differ
        spelled[row.numbers] = torch.repeat_interleave(torch.tensor(lengths_N))[None].int()
    for name in row.copies if kernel != "fla_cp" else ():
        spelled[name] = [*offsets] if name.endswith("_list") else torch.tensor(offsets)
    for name in row.tables if tables or row.host else ():
        table = chunk_indices(offsets, table_block(row.tables[name], chunk_size))
        spelled[name] = tuple(table.reshape(-1).tolist()) if row.host else torch.from_numpy(table)
    return spelled


def _megatron_fields(offsets: Sequence[int]) -> dict[str, Any]:
    """Return the fields of `PackedSeqParams`."""
    longest = int(np.diff(offsets).max())
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    fields: dict[str, Any] = {"qkv_format": "thd", "max_seqlen_q": longest, "max_seqlen_kv": longest}
    return fields | {name: torch.tensor(offsets, dtype=torch.int32) for name in names} | {"total_tokens": offsets[-1]}


# --- offsets of the flat row


@checked
def flat_offsets(
    segments: Segments,
    *,
    keep_padding: bool | None = None,
    padding: Padding | Values = "own",
    max_sequences: int | None = None,
) -> tuple[int, ...]:
    """`(0, ..., T)`, strictly rising: where sequences begin in the tensors of a call.

    `keep_padding=True`: the tensors are the rows as they are, one behind the other, `[1, B * S]`. False: those of
    `unpad`, `[1, T]`. Default: one row is kept as it is, of several the padding is taken out. `padding` says where the
    padding that is kept belongs (`"behind"`: with the sequence before it, as `pad_documents` and Megatron have it), or is
    the physical offsets of this very row, `batch["cu_seqlens_padded"]`. `max_sequences=N` makes N sequences, for graphs
    and compilers, by cutting the padding at the end (`masks.forms.add_tail`); no sequence is ever empty.

    Raises `UnsupportedFormError` without a real token; where padding that is kept stands inside a sequence; for `"behind"`
    where it stands before the first one; and for offsets that do not fit the row.
    """
    how = "'own', 'behind', or the physical offsets of the row"
    if isinstance(padding, str) and padding not in get_args(Padding):
        raise CollateError(explain("padding", repr(padding), f"It is {how}.", "Name one of them."))
    if not segments.num_tokens:
        rule = "A recurrent kernel takes at least one token."
        raise UnsupportedFormError(explain("segments", repr(segments), rule, "Drop batches without tokens."))
    if not isinstance(padding, str):
        offsets = _given(padding, segments)
    elif not (segments.shape[0] == 1 if keep_padding is None else keep_padding) or segments.padding_side == "none":
        offsets = segments.cu_seqlens_host
    else:
        offsets = _of_padded_rows(segments, own=padding == "own")
    return offsets if max_sequences is None else _of_one_length(offsets, segments, padding, max_sequences)


def _given(physical: Values, segments: Segments) -> tuple[int, ...]:
    """The offsets that a batch carries, without the empty sequences that attention alone takes."""
    offsets = as_offsets("padding", physical)
    places = fitting_places(offsets, segments)
    if places is None:
        rule = "Physical offsets begin at 0, end at the width of one flat row, and each sequence begins at one."
        remedy = "Pass cu_seqlens_padded of this very batch, or 'own'."
        raise UnsupportedFormError(explain("padding", str(offsets.tolist())[:80], rule, remedy))
    return (0, *np.cumsum([place for place in places if place]).tolist())


def _of_one_length(
    offsets: tuple[int, ...], segments: Segments, padding: Padding | Values, max_sequences: int
) -> tuple[int, ...]:
    if len(offsets) == whole_number("max_sequences", max_sequences, least=1) + 1:
        return offsets
    if not isinstance(padding, str) or padding == "behind":
        rule = f"They are offsets of {len(offsets) - 1} sequences, and where the padding of the last one ends is not known."
        remedy = "Pass padding=batch['cu_seqlens_padded'] of PaddingCollator(max_sequences=), or padding='own'."
        raise UnsupportedFormError(explain("max_sequences", str(max_sequences), rule, remedy))
    tail = offsets[-1] == segments.array.size and not segments.array[-1, -1]
    places = np.diff(offsets[:-1] if tail else offsets).tolist()
    return (0, *np.cumsum(add_tail(places, offsets[-1], max_sequences=max_sequences)).tolist())


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


def chunk_indices(offsets: Sequence[int], chunk_size: int) -> Array:
    """int64 `[chunks, 2]`: `(sequence, chunk within it)`, in the order of the tokens (fla 0.5.2 ops/utils/index.py:156).

    >>> chunk_indices([0, 3, 70], 64)
    array([[0, 0],
           [1, 0],
           [1, 1]])
    """
    firsts = chunk_offsets(offsets, chunk_size)
    if firsts[-1] > MAX_CHUNKS:
        remedy = "Pass the offsets of one call."
        raise CollateError(explain("offsets", f"{firsts[-1]} chunks", f"A table has at most {MAX_CHUNKS}.", remedy))
    sequence = np.repeat(np.arange(len(firsts) - 1), np.diff(firsts))
    return np.stack([sequence, np.arange(len(sequence)) - firsts[sequence]], axis=1)


def chunk_offsets(offsets: Sequence[int], chunk_size: int) -> Array:
    """int64 `[N + 1]`: the number of the first chunk of each sequence, and of all chunks."""
    array, size = as_offsets("offsets", offsets), whole_number("chunk_size", chunk_size, least=1)
    chunks_N = -(-np.diff(array) // size)  # the last one may be short
    return np.concatenate([[0], np.cumsum(chunks_N)]).astype(np.int64)


def table_block(kind: str, chunk_size: int) -> int:
    """Return the tokens of a table's chunk: of the rule, of fla's convolution, or of `npu_chunk_local_cumsum`.

    The last is 2**17 / chunk_size, rounded up to a power of two: 2048 for 64, 1024 for 128 (flash-linear-attention-npu
    17e24fd, chunk_local_cumsum_tiling.cpp:275).
    """
    cumsum = 1 << (-(-(1 << 17) // chunk_size) - 1).bit_length()
    return {"rule": chunk_size, "conv": CONV_BLOCK, "cumsum": cumsum}[kind]


@checked
def zero_padding(hidden: Tensor, segments: Segments) -> Tensor:
    """`[B, S, ...]` with zeros at padding: the input of a Gated DeltaNet layer, or of its convolution. A new tensor.

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
