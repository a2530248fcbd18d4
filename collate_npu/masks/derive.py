"""Derive: from a mask someone else built to `Segments`, or a refusal that names the readings.

Takes every rank, dtype and polarity in use (transformers, Megatron-LM, ms-swift, verl, torch_npu); reads the whole mask,
before any context-parallel split. Key masks cost O(B * S), square ones a few passes over their bytes.

Legend: B batch, S width, H heads, Q/K query and key rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from collate_npu.errors import (
    AmbiguousMaskError,
    CollateError,
    PolarityError,
    UnsupportedFormError,
    explain,
    explain_rows,
    shape_of,
)
from collate_npu.masks.evidence import CARRY, Bools, UnexplainedError, read_square
from collate_npu.masks.forms import Polarity
from collate_npu.masks.patterns import Pattern
from collate_npu.masks.polarity import DECLARE, KEY, MaskValues
from collate_npu.segments import Segments

SAME_TOKENS = "All masks of a batch describe the same tokens."


def derive_segments(
    attention_mask: Tensor,
    *,
    polarity: Polarity | None = None,
    keep: Tensor | None = None,
    batch_size: int | None = None,
    pattern: str | Pattern | None = None,
    prove: bool = True,
    unmasked_rows: bool = False,
) -> Segments:
    """`Segments` of a mask `[B,S]`, `[B,1,1,S]`, `[B,S,S]`, `[S,S]`, `[1,1,S,S]`, `[B,1,S,S]` or `[B,H,S,S]`.

    Inverse of `dense` for every polarity, pattern and padding side, or an error. dtype bool, 0/1 of any number type, or
    an additive float (blocked at or below -9984, so ALiBi and position biases pass). A `[B, S]` mask is read as keep,
    1 = real, as in every stack that carries one; whole numbers above 1 are packing ids (`1 1 2 2 0`).

    `polarity=None` reads a square mask both ways and takes the one that is proved; `[B,1,1,S]` must be declared. `keep`
    is a 2D truth of the same batch, bool `[B, S]`: the mask must agree with it, and what the mask alone leaves open
    (polarity, padding that attends itself) it decides. `batch_size` is needed to tell `[S, S]` from `[B, S]` and to
    repeat a shared mask. `pattern` declares the attention where two patterns would explain the mask; a declared `chunked`
    also says that rows are not packed. `prove=False` takes the evidence (diagonal == columns) without rebuilding the
    mask, for custom attention. `unmasked_rows=True` says that the producer unmasks empty rows (transformers' former
    `_unmask_unattended`); otherwise none is assumed to, unless the batch shows such rows; one batch pads to one side.

    Raises `PolarityError`, `AmbiguousMaskError` (both name the readings), or `CollateError` for values and shapes that
    no mask has. Derive before a context-parallel split: a shard has lost the columns this reads.
    """
    keep_BS = None if keep is None else keep.detach().cpu().numpy() != 0
    batch_size = batch_size if keep_BS is None else len(keep_BS)

    def square(values: MaskValues) -> Segments:
        how = None if pattern is None else Pattern.of(pattern)
        return _square(values, _Given(keep_BS, how, prove, unmasked_rows))

    full = attention_mask.detach().cpu()
    if keep_BS is None:
        _refuse_compressed(full)
        return _by_shape(MaskValues(full, polarity), batch_size, square)
    if full.ndim and keep_BS.shape[-1] != full.shape[-1]:
        got = f"{list(keep_BS.shape)} beside {[full.shape[0], full.shape[-1]]}"
        raise CollateError(explain("attention_mask_2d", got, SAME_TOKENS, "Build them together, and split them together."))
    values = MaskValues(full, polarity)
    segments = _with_truth(values, keep_BS, square)
    agree(segments, {"attention_mask_2d": Segments.from_keep(keep_BS)})
    return segments


def _with_truth(values: MaskValues, keep_BS: Bools, square: Callable[[MaskValues], Segments]) -> Segments:
    """Key masks may have either polarity here: one that tells the truth is right."""
    if values.full.shape[:-1] not in ((len(keep_BS),), (len(keep_BS), 1, 1)) or values.high > 1:
        return _by_shape(values, len(keep_BS), square)
    polarities: tuple[Polarity, ...] = (values.declared,) if values.declared else ("keep", "masked")
    readings = [values.read(polarity).reshape(len(keep_BS), -1) for polarity in polarities]
    return Segments.from_keep(next((x for x in readings if np.array_equal(x, keep_BS)), readings[0]))


def _by_shape(values: MaskValues, batch_size: int | None, square: Callable[[MaskValues], Segments]) -> Segments:
    shape = values.full.shape
    if not values.full.numel() and len(shape) in (2, 3, 4):
        return Segments(torch.zeros(batch_size or shape[0], shape[-1], dtype=torch.int32))
    if len(shape) == 2:
        return _from_two_dims(values, batch_size, square)
    if len(shape) == 4 and shape[1:3] == (1, 1) and shape[3] > 1:
        return _repeat(_from_key_row(values), batch_size)
    if len(shape) in (3, 4) and shape[-1] == shape[-2]:
        return _repeat(square(values), batch_size)
    return _refuse_shape(values.full)


@dataclass(frozen=True, slots=True)
class _Given:
    """What the caller knows beside the mask."""

    keep: Bools | None
    pattern: Pattern | None
    prove: bool
    unmasked_rows: bool


def key_segments(attention_mask_2d: Tensor) -> Segments:
    """`Segments` of a mask known to be `[B, S]` by its place in a batch: keep, additive, or packing ids `1 1 2 2 0`.

    Zeros alone are padding throughout. Unlike `derive_segments`, never takes a square one for `[S, S]`.
    """
    values = MaskValues(attention_mask_2d.detach().cpu(), None)
    if values.array.ndim != 2:
        _refuse_shape(values.full)
    if values.array.dtype.kind in "iu" and values.high > 1:
        return Segments.from_ids(values.array)
    return Segments.from_keep(values.read(values.declared or "keep"))


def agree(segments: Segments, others: dict[str, Segments]) -> None:
    """Raise where another source of the same batch (a 2D mask, lengths) tells another padding, with the row numbers."""
    for name, other in others.items():
        if other.shape != segments.shape:
            got = f"{list(other.shape)} beside {list(segments.shape)}"
            raise CollateError(explain(name, got, SAME_TOKENS, "Build them together, and split them together."))
        wrong = np.flatnonzero((other.keep != segments.keep).any(dim=1).numpy())
        if len(wrong):
            rows = [(int(b), f"{other.row_lengths[b]} real tokens, not {segments.row_lengths[b]}") for b in wrong]
            rule = "It disagrees with the other mask of the same batch about which tokens are real."
            remedy = "Alignment padding is padding in both; remove the wrong one, or rebuild both from the lengths."
            raise CollateError(explain_rows(name, rows, rule, remedy))


# --- shapes


def _from_two_dims(values: MaskValues, batch_size: int | None, square: Callable[[MaskValues], Segments]) -> Segments:
    rows, S = values.array.shape
    if rows != S or values.low == values.high or values.high > 1:
        if batch_size not in (None, rows):
            _refuse_batch(values.full, batch_size)
        return _from_keys(values)
    if batch_size not in (None, S):
        return _repeat(square(values), batch_size)
    try:
        square(values)
    except (UnexplainedError, AmbiguousMaskError):
        return _from_keys(values)
    except PolarityError:
        pass
    rule = f"It is a keep mask of {S} rows [B, S], or one square mask [S, S] that all rows share."
    raise AmbiguousMaskError(explain(KEY, shape_of(values.full), rule, "Pass [B, 1, S, S], or attention_mask_2d."))


def _from_keys(values: MaskValues) -> Segments:
    """`[B, S]`: keep unless declared otherwise, or packing ids."""
    if values.array.dtype.kind in "iu" and values.high > 1:
        if values.declared not in (None, "keep"):
            rule = "Numbers above 1 are packing ids, 0 = padding."
            raise PolarityError(explain(KEY, shape_of(values.full), rule, "Pass polarity=None."))
        return Segments.from_ids(values.array)
    if values.declared is None and not values.high and values.array.size:
        got = f"{shape_of(values.full)} of zeros"
        rule = "It says that all is padding (keep), or that nothing is (masked, additive)."
        raise PolarityError(explain(KEY, got, rule, DECLARE))
    return Segments.from_keep(values.read(values.declared or "keep"))


def _from_key_row(values: MaskValues) -> Segments:
    """`[B, 1, 1, S]` holds keys alone, so nothing in it proves a polarity."""
    if values.declared is None:
        rule = "True is 'attends' (SDPA) or 'blocked' (TransformerEngine's padding mask); a key mask proves neither."
        raise PolarityError(explain(KEY, shape_of(values.full), rule, DECLARE))
    return Segments.from_keep(values.read(values.declared)[:, 0, 0])


def _square(values: MaskValues, given: _Given) -> Segments:
    """`[B, S, S]` or `[B, H, S, S]` (a key is real if any head uses it), read by the declared or the proved polarity."""

    def read(polarity: Polarity) -> Segments:
        attends = values.read(polarity)
        shape = attends.shape
        heads: Bools = attends.reshape(-1, *shape[-2:]) if attends.ndim < 4 else np.logical_or.reduce(attends, axis=1)
        if given.keep is not None and len(heads) == 1:
            heads = np.broadcast_to(heads, (len(given.keep), *heads.shape[1:]))
        return read_square(
            heads,
            keep_BS=given.keep,
            pattern=given.pattern,
            prove=given.prove,
            unmasked_rows=given.unmasked_rows,
        )

    if values.declared is not None:
        try:
            return read(values.declared)
        except UnexplainedError as error:
            _refuse_unexplained(values, {values.declared: error})
    return _proved(values, read)


def _proved(values: MaskValues, read: Callable[[Polarity], Segments]) -> Segments:
    found: dict[str, Segments | AmbiguousMaskError] = {}
    failed: dict[str, UnexplainedError] = {}
    polarities: tuple[Polarity, Polarity] = ("keep", "masked")
    for polarity in polarities:
        try:
            found[polarity] = read(polarity)
        except AmbiguousMaskError as error:
            found[polarity] = error
        except UnexplainedError as error:
            failed[polarity] = error
    if len(found) == 2 and found["keep"] == found["masked"]:
        del found["masked"]  # a batch of padding alone, known from the 2D mask: both readings say so
    if len(found) == 2:
        told = "; ".join(f"as '{name}' {_told(result)}" for name, result in found.items())
        raise PolarityError(explain(KEY, shape_of(values.full), f"Both readings are possible: {told}.", DECLARE))
    if not found:
        _refuse_unexplained(values, failed)
    (result,) = found.values()
    if isinstance(result, AmbiguousMaskError):
        raise result
    return result


def _told(result: Segments | AmbiguousMaskError) -> str:
    return "it is ambiguous too" if isinstance(result, AmbiguousMaskError) else f"it is {result!r}"


def _refuse_unexplained(values: MaskValues, failed: dict[Any, UnexplainedError]) -> NoReturn:
    rows = [(row, f"as '{name}': {text}") for name, error in failed.items() for row, text in error.rows]
    rule = f"{shape_of(values.full)} is no padding and no pattern (causal, sliding, chunked, prefix, bidirectional)."
    remedy = f"{CARRY} Custom attention: prove=False. Wrong way round: polarity=. Padding that attends itself: neither."
    raise AmbiguousMaskError(explain_rows(KEY, rows, rule, remedy))


def _repeat(segments: Segments, batch_size: int | None) -> Segments:
    rows = segments.shape[0]
    if batch_size in (None, rows):
        return segments
    if rows == 1 and batch_size:
        return Segments.from_ids(segments.ids.expand(batch_size, -1))
    return _refuse_batch(segments.ids, batch_size)


def _refuse_batch(full: Tensor, batch_size: int | None) -> NoReturn:
    rule = f"The batch has {batch_size} rows."
    raise CollateError(explain(KEY, shape_of(full), rule, "Pass the mask of this batch, before any split."))


def _refuse_compressed(full: Tensor) -> None:
    """torch_npu's compressed causal masks: [2048, 2048] (sparse_mode 2-4), [3072, 2048] (mode 6); op-plugin doc:554-606."""
    if tuple(full.shape) not in ((2048, 2048), (3072, 2048), (1, 1, 2048, 2048)):
        return
    top: npt.NDArray[Any] = full.reshape(-1, 2048)[:2048].float().numpy() != 0
    if (top == np.tri(2048, dtype=bool)).all() or (top != np.tri(2048, dtype=bool)).all():
        rule = "It is torch_npu's compressed causal triangle, which holds no padding, or 2048 tokens without padding."
        raise AmbiguousMaskError(explain(KEY, shape_of(full), rule, CARRY))


def _refuse_shape(full: Tensor) -> NoReturn:
    got = shape_of(full)
    if full.ndim in (3, 4):
        rule = f"{full.shape[-2]} query rows and {full.shape[-1]} keys: a context-parallel shard, or a KV cache."
        remedy = "Derive from the whole mask, before the split; self-attention has as many rows as keys."
        raise AmbiguousMaskError(explain(KEY, got, rule, remedy))
    rule = "Masks are [B,S], [B,1,1,S], [B,S,S], [S,S], [1,1,S,S], [B,1,S,S] or [B,H,S,S]."
    raise UnsupportedFormError(explain(KEY, got, rule, "Reshape it, or pass attention_mask_2d."))
