"""Arrays: what a caller hands in, as a CPU tensor or an array; and what ids, keep masks and positions `[B, S]` show of
their rows: where padding stands, where sequences begin. Everything public takes tensors, numpy arrays and nested lists.
What is read of rows costs O(B * S). Legend: B batch rows, S width, T tokens without padding.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from collate_npu.errors import CollateError, explain, explain_rows, shape_of

if TYPE_CHECKING:
    from functools import cached_property

    once = cached_property
else:

    class once:  # noqa: N801 (it decorates)
        """`functools.cached_property` without its lock, which before Python 3.12 all objects of a class share: two threads
        that ask two of them in another order would wait for each other for ever. Here both compute, and agree."""

        def __init__(self, function):
            self.function, self.__doc__ = function, function.__doc__

        def __set_name__(self, owner, name):
            self.name = name

        def __get__(self, held, owner=None):
            if held is None:
                return self
            value = held.__dict__[self.name] = self.function(held)
            return value


Array = npt.NDArray[Any]
Side = Literal["right", "left"]
PaddingSide = Literal["none", "left", "right", "mixed"]

MOST_PLACES = 2**31 - 1
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_PLAIN = frozenset((*_WHOLE, torch.float16, torch.bfloat16, torch.float32, torch.float64))
_REMEDY = "Pass a dense tensor, a numpy array or nested lists of numbers."
_UNPADDED = "Rows of their own lengths are padded first.", "PaddingCollator takes such a batch as it is, a TensorDict too."


def entries(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys and values of a mapping as a new dict; a TensorDict's non-tensor values as Python objects.

    Raises `CollateError` for a lazy stack whose rows differ in length or in keys (tensordict 0.15.3 _lazy.py).
    """
    if "tensordict" not in sys.modules:
        return dict(batch.items())
    from tensordict import LazyStackedTensorDict, is_non_tensor, is_tensor_collection  # type: ignore[import-not-found]

    if not is_tensor_collection(batch):
        return dict(batch.items())
    if isinstance(batch, LazyStackedTensorDict):
        try:
            same = len({frozenset(row.keys()) for row in batch.tensordicts}) == 1
            batch = batch.to_tensordict() if same else batch
        except RuntimeError:
            same = False
        if not same:
            raise CollateError(explain("batch", "a LazyStackedTensorDict of unequal rows", *_UNPADDED))
    return {key: value.tolist() if is_non_tensor(value) else value for key, value in batch.items()}


def host_tensor(name: str, value: Any) -> Tensor:
    """`value` as a dense CPU tensor, detached; it may share memory with `value`.

    Sparse tensors become dense and 8-bit floats float32. Raises `CollateError` for what has no numbers to read (meta,
    fake, nested and complex tensors, objects, strings) and for unsigned numbers beyond int64.
    """
    if (
        type(value) is Tensor
        and value.dtype in _PLAIN
        and value.is_cpu
        and value.layout is torch.strided
        and not value.is_nested
    ):
        return value.detach()
    if not isinstance(value, Tensor):
        return torch.from_numpy(np.ascontiguousarray(host_array(name, value)))
    if type(value).__name__ == "MemoryMappedTensor":  # tensordict's: a plain tensor whose memory is a file
        value = value.as_subclass(Tensor)
    with torch._C.DisableTorchFunctionSubclass():  # torch 2.6's CausalBias answers nothing
        nested = value.is_nested
    if nested:
        raise CollateError(explain(name, f"a nested {type(value).__name__}", *_UNPADDED))
    if _means_something_else(type(value)):
        rule = "It is a tensor by name only: what it means is in its class (torch's CausalBias holds no numbers)."
        raise CollateError(explain(name, f"a {type(value).__name__}", rule, _REMEDY))
    if value.is_complex() or value.is_quantized or value.device.type == "meta" or _is_fake(value):
        what = "complex" if value.is_complex() else "without values"
        raise CollateError(explain(name, f"{type(value).__name__}, {what}", "Its values are read on the host.", _REMEDY))
    if value.layout != torch.strided:
        check_places(name, value.numel(), _REMEDY)
        value = value.to_dense()
    if value.is_floating_point() and value.element_size() == 1:
        value = value.float()
    value = value.detach().cpu()
    wide = value.dtype in (torch.uint16, torch.uint32, torch.uint64)
    return torch.from_numpy(host_array(name, value.numpy())) if wide else value


def host_array(name: str, value: Any) -> Array:
    """`value` as a numpy array of bools, whole numbers or floats (bfloat16 as float32). Errors as `host_tensor`."""
    if isinstance(value, Tensor):
        held = host_tensor(name, value)
        return (held.float() if held.dtype == torch.bfloat16 else held).numpy()
    if not isinstance(value, (list, tuple, np.ndarray, np.generic, int, float)):
        raise CollateError(explain(name, f"a {type(value).__name__}", "It holds numbers.", _REMEDY))
    if isinstance(value, np.ma.MaskedArray):
        raise CollateError(
            explain(name, "a masked array", "Its mask would be lost.", "Pass x.filled() and a mask of its own.")
        )
    try:
        if isinstance(value, (list, tuple)) and any(issubclass(kind, Tensor) for kind in set(map(type, value))):
            value = [host_array(name, each) for each in value]
        array = np.asarray(value)
    except ValueError:
        raise CollateError(explain(name, "nested lists of unequal length", "Its rows are equally long.", _REMEDY)) from None
    if array.dtype.kind not in "biuf":
        raise CollateError(explain(name, f"values of type {array.dtype}", "It holds numbers.", _REMEDY))
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        if array.size and array.max() > np.iinfo(np.int64).max:
            rule = "Whole numbers are at most 64 bits with a sign."
            raise CollateError(explain(name, f"the value {array.max()}", rule, "Count again: it wrapped around."))
        array = array.astype(np.int64)
    if not array.dtype.isnative or min(array.strides, default=0) < 0:  # a flipped one: torch takes neither
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    return array


def _means_something_else(kind: type) -> bool:
    """True if this class answers torch's functions by itself, before Tensor does."""
    return next(base for base in kind.__mro__ if "__torch_function__" in vars(base)) not in (Tensor, torch.nn.Parameter)


def _is_fake(value: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def whole_number(name: str, value: Any, *, least: int = 0) -> int:
    """`value` as an int. Raises `CollateError` for anything else: a float, a bool, a list."""
    if isinstance(value, Tensor) and value.ndim == 0 and not value.is_floating_point():
        value = int(value)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or value < least:
        got = shape_of(value) if isinstance(value, (Tensor, np.ndarray)) else repr(value)
        raise CollateError(explain(name, got, f"It is a whole number, at least {least}.", f"Pass {name} as an int."))
    return int(value)


OF_A_BATCH = "Pass the rows of one batch; a tensor that is expanded holds as many as its shape says."


def check_places(name: str, places: int, remedy: str) -> None:
    """Raise `CollateError` for more places than int32 offsets can count, before memory is allocated."""
    if places > MOST_PLACES:
        rule = f"Offsets are int32, so a batch has at most {MOST_PLACES} places."
        raise CollateError(explain(name, f"{places} places", rule, remedy))


def one_run(keep_BS: Array, side: Side) -> list[int]:
    """Return the real tokens of each row, for rows whose padding is all on this side."""
    B, S = keep_BS.shape
    if not S:
        return [0] * B
    at_B = keep_BS.argmin(axis=1) if side == "right" else keep_BS.argmax(axis=1)  # where padding begins, or ends
    real_B = keep_BS[np.arange(B), at_B]
    lengths_B = np.where(real_B, S, at_B) if side == "right" else np.where(real_B, S - at_B, 0)
    lengths: list[int] = lengths_B.tolist()
    return lengths


def side_around(totals: Sequence[int], width: int, side: Side) -> PaddingSide:
    """Return where padding stands, for rows of so many tokens without gaps."""
    if min(totals, default=width) == width:
        return "none"
    if side == "right" or not any(0 < n < width for n in totals):
        return "right"
    return "left" if all(totals) else "mixed"


def side_of(keep_BS: Array) -> PaddingSide:
    """Return where padding stands, over all rows."""
    if keep_BS.all():
        return "none"
    grows, falls = keep_BS[:, 1:] > keep_BS[:, :-1], keep_BS[:, 1:] < keep_BS[:, :-1]
    if not grows.any():
        return "right"
    return "left" if not falls.any() and keep_BS[:, -1].all() else "mixed"


def run_starts(values_BS: Array, keep_BS: Array, step: int) -> Array:
    """Return bool `[B, S]`: real tokens whose value is not `step` more than that of the real token before in the row."""
    real_T = np.flatnonzero(keep_BS)
    values_T, rows_T = values_BS.reshape(-1)[real_T], real_T // max(keep_BS.shape[1], 1)
    follows_T = (values_T[1:] == values_T[:-1] + step) & (rows_T[1:] == rows_T[:-1])
    starts_BS: Array = keep_BS.copy()
    starts_BS.reshape(-1)[real_T[1:][follows_T]] = False
    return starts_BS


def sequence_starts(positions_BS: Array, keep_BS: Array) -> tuple[Array, Array]:
    """Return where sequences begin by their positions, bool `[B, S]`, and which rows count 0, 1, 2, bool `[B]`."""
    starts_BS = run_starts(positions_BS, keep_BS, step=1)
    return starts_BS, ~(starts_BS & (positions_BS != 0)).any(axis=1)


def as_ids(ids: Any) -> Array:
    """Return segment ids as int64 `[B, S]`. Raises `CollateError` for negative ids and other shapes."""
    ids_BS = host_array("segment ids", ids)
    check_places("segment ids", ids_BS.size, OF_A_BATCH)
    if ids_BS.ndim != 2 or ids_BS.dtype.kind not in "iub":
        rule = "Segment ids are a [B, S] tensor of whole numbers."
        raise CollateError(explain("segment ids", shape_of(ids_BS), rule, "Pass an int32 tensor."))
    if ids_BS.size and ids_BS.min() < 0:
        bad = [(int(b), f"the id {ids_BS[b].min()}") for b in np.flatnonzero((ids_BS < 0).any(axis=1))]
        rule = "0 is padding and sequences count from 1; no id is negative."
        raise CollateError(explain_rows("segment ids", bad, rule, "Add 1 to ids that count from -1 or 0."))
    return ids_BS.astype(np.int64, copy=False)


def as_offsets(name: str, given: Any, width: int | None = None, *, whole: bool = False) -> Array:
    """int64 `[N + 1]` of cumulative offsets: 0, then the end of each sequence, in a row of `width` tokens, of which they are
    the `whole`. One row `[1, N + 1]` is taken too (MindSpeed-MM 57069cd fsdp/data/data_utils/func_utils/convert.py:988); -1
    may fill its end (Megatron-Bridge 0.3.1 data/datasets/sft.py:963)."""
    offsets = host_array(name, given)
    if offsets.ndim == 2 and len(offsets) == 1:
        offsets = offsets[0][: np.flatnonzero(offsets[0] != -1)[-1] + 1] if (offsets != -1).any() else offsets[0]
    whole_numbers = offsets.dtype.kind in "iuf" and (np.isfinite(offsets) & (offsets == np.round(offsets))).all()
    rising = whole_numbers and offsets.ndim == 1 and len(offsets) > 0 and (offsets[1:] >= offsets[:-1]).all()
    if rising and width is None:
        check_places(name, int(offsets[-1]), "Count the tokens again.")
    most = MOST_PLACES if width is None else width
    if not rising or offsets[0] != 0 or offsets[-1] > most or (whole and offsets[-1] != most):
        of_row = "" if width is None else f" The row has {width} tokens{', all of which they count' * whole}."
        rule = f"Offsets are one row of whole numbers: 0 first, then the end of each sequence, never falling.{of_row}"
        remedy = "Pass [0, *accumulate(lengths)] of this very row, its tail counted; a batch may hold old ones, or a rank's."
        if offsets.ndim == 2:  # NeMo Automodel 0.7.0 datasets/packing.py:148, one row of offsets for each row of tokens
            remedy = "Leave it out of a batch of several rows, and carry segment_ids."
        elif rising and offsets[0] > 0:
            remedy = "torch_npu's actual_seq_qlen has no leading 0: put one in front."
        raise CollateError(explain(name, str(offsets.tolist())[:80], rule, remedy))
    return offsets.astype(np.int64, copy=False)


def check_order(ids_BS: Array) -> None:
    """Raise where the sequences of a row are not numbered 1, 2, ... in their order."""
    bad = np.flatnonzero((ids_BS != _numbered(ids_BS)[0]).any(axis=1))
    if len(bad):
        rule = "The n-th sequence of a row has the id n, and sequences stand in order."
        rows = [(int(b), f"ids {ids_BS[b].tolist()[:24]}") for b in bad]
        raise CollateError(explain_rows("segment ids", rows, rule, "Use Segments.from_ids, which renumbers."))


def _numbered(ids_BS: Array) -> tuple[Array, Array]:
    """1, 2, ... for each run of one label in a row, and where each begins."""
    starts_BS = run_starts(ids_BS, ids_BS != 0, step=0)
    return np.where(ids_BS != 0, np.cumsum(starts_BS, axis=1), 0), starts_BS


def renumber(ids_BS: Array) -> Array:
    """Any labels as 1, 2, ... in order of appearance. Raises where a label comes back."""
    numbered_BS, starts_BS = _numbered(ids_BS)
    labels = [ids_S[starts_S].tolist() for ids_S, starts_S in zip(ids_BS, starts_BS)]
    bad = [b for b, row in enumerate(labels) if len(set(row)) < len(row)]
    if bad:
        rule = "A sequence's tokens stand together; its label does not come back after another sequence."
        rows = [(b, f"ids {ids_BS[b].tolist()[:24]}") for b in bad]
        raise CollateError(explain_rows("segment ids", rows, rule, "Give each sequence of a row a label of its own."))
    return numbered_BS


def length_rows(lengths: Any, name: str = "lengths", *, filler: int = 0) -> list[list[int]]:
    """One list of token counts for each row of the batch, without what fills short lists; raises for what is no count."""
    if not isinstance(lengths, (list, tuple)):
        lengths = host_array(name, lengths)
        if lengths.ndim not in (1, 2):
            raise CollateError(explain(name, shape_of(lengths), "They are [B], or a list a row.", "Reshape them."))
    rows: list[list[int]] = []
    bad: list[tuple[int, str]] = []
    for b, row in enumerate(lengths):
        counts = np.atleast_1d(host_array(name, row)) if np.ndim(row) == 0 or len(row) else np.zeros(0, np.int64)
        counts = counts[counts != filler] if filler and counts.ndim == 1 else counts
        if counts.dtype.kind not in "iu" or counts.ndim != 1 or (counts < 0).any():
            bad.append((b, f"lengths {counts.tolist()}"[:80]))
        rows.append(counts.tolist())
    if bad:
        raise CollateError(explain_rows(name, bad, "Lengths are whole numbers, 0 or more.", "Count the tokens again."))
    return rows
