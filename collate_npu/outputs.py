"""Outputs: real tokens, sequences and last tokens of a padded output, by the Segments of its batch; and labels shifted
within each sequence.

Each function is an index_select or an index_put on the device of `x`, so gradients flow. The index is built on the host
and costs one small copy. Legend: B batch, S width, T tokens without padding, N sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from collate_npu.arrays import whole_number
from collate_npu.errors import CollateError, explain, refuse_rows, shape_of
from collate_npu.segments import Segments
from collate_npu.validation import check_held, check_of_batch, checked, is_plain

_WHOLE = "Pass the whole output: under context parallelism, gather_sequence first."


@checked
def unpad(x: Tensor, segments: Segments) -> Tensor:
    """Return the real tokens of `[B, S, ...]` as `[T, ...]`, row after row. Inverse of `repad`.

    >>> segments = Segments.from_lengths([1, 3], side="left")
    >>> unpad(torch.tensor([[0, 0, 7], [4, 5, 6]]), segments).tolist()
    [7, 4, 5, 6]
    """
    check_of_batch("output", x, segments.shape, _WHOLE)
    return x.flatten(0, 1).index_select(0, segments.indices.to(x.device))


@checked
def repad(y: Tensor, segments: Segments, fill: float = 0) -> Tensor:
    """Return `[T, ...]` as `[B, S, ...]`, with `fill` at padding. Inverse of `unpad`, but for the values at padding.

    >>> repad(torch.tensor([7, 4, 5, 6]), Segments.from_lengths([1, 3], side="left"), fill=-1).tolist()
    [[-1, -1, 7], [4, 5, 6]]
    """
    if not is_plain(y) or y.shape[:1] != (segments.num_tokens,):
        rule = f"The batch has {segments.num_tokens} real tokens, and y has one row for each."
        raise CollateError(explain("repad", shape_of(y), rule, "Pass the output of unpad."))
    check_held("fill", fill, y.dtype)
    B, S = segments.shape
    try:
        out = y.new_full((B * S, *y.shape[1:]), fill)
    except (RuntimeError, OverflowError) as error:
        raise CollateError(explain("fill", repr(fill), f"y is {y.dtype}.", "Pass a value that this dtype holds.")) from error
    return out.index_put((segments.indices.to(y.device),), y).reshape(B, S, *y.shape[1:])


@checked
def last_token(x: Tensor, segments: Segments) -> Tensor:
    """Return the last real token of each sequence, `[N, ...]` from `[B, S, ...]`, whichever side is padded.

    It does not read token ids, so it is right where pad == eos. Raises `CollateError` for a row without a real token.

    >>> left, right = Segments.from_lengths([1, 3], side="left"), Segments.from_lengths([1, 3])
    >>> last_token(torch.tensor([[0, 0, 7], [4, 5, 6]]), left).tolist()
    [7, 6]
    >>> last_token(torch.tensor([[7, 0, 0], [4, 5, 6]]), right).tolist()
    [7, 6]
    """
    check_of_batch("output", x, segments.shape, _WHOLE)
    bad = [(b, "only padding") for b in segments.empty_rows]
    refuse_rows("last_token", bad, "A row of padding has no last token.", "Drop those rows.")
    return x.flatten(0, 1).index_select(0, segments.last_indices.to(x.device))


@checked
def per_sequence(x: Tensor, segments: Segments) -> list[Tensor]:
    """Return a list of N tensors `[length, ...]` from `[B, S, ...]`: one a sequence, in the order of the samples.

    >>> packed = Segments.from_lengths([[2, 1], [1]], width=4)
    >>> [x.tolist() for x in per_sequence(torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0]]), packed)]
    [[1, 2], [3], [4]]
    """
    return list(torch.split(unpad(x, segments), list(segments.sequence_lengths)))


@checked
def to_nested(x: Tensor, segments: Segments) -> Tensor:
    """Return `[B, S, ...]` as a jagged nested tensor `[N, j, ...]`, the form of torch and verl for rows of several lengths.

    There is one entry a sequence, and none for a row without real tokens.

    >>> nested = to_nested(torch.tensor([[0, 0, 7], [4, 5, 6]]), Segments.from_lengths([1, 3], side="left"))
    >>> [row.tolist() for row in nested.unbind()]
    [[7], [4, 5, 6]]
    """
    if x.is_complex():
        rule = "torch has no nested tensor of complex numbers."
        raise CollateError(explain("output", shape_of(x), rule, "Pass torch.view_as_real(x)."))
    offsets = segments.cu_seqlens.to(x.device, torch.int64)
    nested: Tensor = torch.nested.nested_tensor_from_jagged(unpad(x, segments), offsets)
    return nested


@checked
def shift_labels(labels: Tensor, segments: Segments | None = None, *, steps: int = 1, ignore_index: int = -100) -> Tensor:
    """Return the labels `[B, S]` shifted one place to the left, as the loss reads them; `ignore_index` if no token follows.

    With `segments` the last token of a sequence has no label. Without, it has the first token of the next sequence in the
    row. Losses of transformers take the result as `shift_labels` (loss/loss_utils.py, ForCausalLMLoss). `steps=1 + k` gives
    the labels of multi-token prediction at depth k; the last `1 + k` tokens of a sequence then have none.

    >>> packed = Segments.from_lengths([[2, 3]])
    >>> shift_labels(torch.tensor([[1, 2, 3, 4, 5]]), packed).tolist()
    [[2, -100, 4, 5, -100]]
    """
    ends_BS = None
    _check_labels(labels, segments, ignore_index)
    if segments is not None:
        ids_BS = segments.ids.to(labels.device)
        ends_BS = (pad(ids_BS[:, 1:], (0, 1)) != ids_BS) | (ids_BS == 0)
    for _ in range(min(whole_number("steps", steps, least=1), labels.shape[1])):
        labels = pad(labels[:, 1:], (0, 1), value=ignore_index)
        labels = labels if ends_BS is None else labels.masked_fill(ends_BS, ignore_index)
    return labels


@checked
def ignore_first_labels(labels: Tensor, segments: Segments, *, ignore_index: int = -100) -> Tensor:
    """Return the labels with `ignore_index` at padding and at the first token of every sequence, which no token predicts.

    A token behind a hole is a first one. Pass labels `[B, S]` not shifted yet. Those of column 0 stay: the shift drops them.

    >>> left = Segments.from_lengths([3, 4], side="left")
    >>> ignore_first_labels(torch.tensor([[9, 1, 2, 3], [4, 5, 6, 7]]), left).tolist()
    [[-100, -100, 2, 3], [4, 5, 6, 7]]
    """
    _check_labels(labels, segments, ignore_index)
    ids_BS = segments.ids.to(labels.device)
    ignored_BS = ids_BS == 0
    ignored_BS[:, 1:] |= ids_BS[:, 1:] != ids_BS[:, :-1]
    return labels.masked_fill(ignored_BS, ignore_index)


def _check_labels(labels: Tensor, segments: Segments | None, ignore_index: int) -> None:
    bits = labels.is_floating_point() and labels.element_size() == 1  # torch cannot fill these
    shape = tuple(labels.shape) if is_plain(labels) and labels.ndim == 2 and not bits else None
    if shape is None or (segments is not None and shape != segments.shape):
        rows = "[B, S]" if segments is None else f"{list(segments.shape)} (rows, width)"
        rule = f"There is one label for each token, and the batch is {rows}."
        raise CollateError(explain("labels", shape_of(labels), rule, "Pad them with the tokens (-100), or leave them out."))
    check_held("ignore_index", whole_number("ignore_index", ignore_index, least=-(1 << 63)), labels.dtype)
