"""Derive: from a mask someone else built to `Segments`, or a refusal that names the readings.

Takes every rank, dtype and polarity in use (transformers, Megatron-LM, ms-swift, verl, torch_npu). Key masks cost O(B * S),
square ones a few passes over their bytes. Legend: B batch, S width, H heads, Q/K query and key rows.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from collate_npu.arrays import host_tensor
from collate_npu.errors import AmbiguousMaskError, CollateError, PolarityError, UnsupportedFormError, explain, explain_rows
from collate_npu.masks.dense_mask import (
    REMEDY_CARRY_2D,
    REMEDY_DECLARE_POLARITY,
    Bools,
    Known,
    MaskValues,
    Polarity,
    Reading,
    Square,
    polarities_of,
)
from collate_npu.masks.dense_reader import UnexplainedError, read_square
from collate_npu.masks.patterns import Pattern, Prefix
from collate_npu.masks.sources import wrong_shape_error
from collate_npu.segments import Segments, Values, of_keep, ready
from collate_npu.validation import checked

MASK_KEY = "attention_mask"


@checked
def derive_segments(
    attention_mask: Values,
    *,
    polarity: Polarity | None = None,
    keep: Values | None = None,
    pattern: str | Pattern | None = None,
    prove: bool = True,
    unmasked_rows: bool = False,
) -> Segments:
    """Return the `Segments` of a mask `[B,S]`, `[B,1,1,S]`, `[B,S,S]`, `[S,S]`, `[1,1,S,S]`, `[B,1,S,S]` or `[B,H,S,S]`.

    It is the inverse of `dense` for every polarity, pattern and padding side, or raises an error. The dtype is bool, 0/1 of
    any number type, or an additive float (blocked at or below -9984, so ALiBi and position biases pass). All heads must
    block the same keys. A `[B, S]` mask is read as keep, 1 = real, and each row must have a real token, unless you pass
    `polarity`. Whole numbers above 1 are packing ids (`1 1 2 2 0`).

    * `attention_mask`: the mask, in one of these shapes: bool, 0/1, additive, or packing ids.
    * `polarity`: "keep", "masked" or "bias". None: the mask is read in both ways, and the way that is proved counts. Declare
      it for `[B,1,1,S]`.
    * `keep`: `[B, S]`, 1 = real. It decides what the mask leaves open: the polarity, and whether a token that sees only
      itself is padding. The mask must agree with it at real tokens.
    * `pattern`: what attention sees, if two patterns would explain the mask. "chunked" also means that rows are not packed.
    * `prove`: False skips the proof (rebuilding the mask) and compares its diagonal with its columns: for custom attention.
    * `unmasked_rows`: True if the producer fills fully blocked rows with True (transformers 4.x `_unmask_unattended`).
      False: this is assumed only if a row of this batch shows it. All rows of a batch must be padded on one side.

    Raises `PolarityError`, `AmbiguousMaskError` (both name the readings), or `CollateError` for values and shapes that
    no mask has. Derive before a context-parallel split: a shard has lost the columns this reads.

    >>> from collate_npu import Segments
    >>> from collate_npu.masks import dense
    >>> masked = dense(Segments.from_lengths([3, 5], side="left"), polarity="masked")
    >>> derive_segments(masked), derive_segments(~masked) == derive_segments(masked)
    (Segments(B=2, S=5, lengths=[3, 5], padding='left'), True)
    >>> derive_segments([[1, 1, 2, 2, 0]]).lengths
    ((2, 2),)
    """
    values = MaskValues(host_tensor(MASK_KEY, attention_mask), polarity)
    how = None if pattern is None else Pattern.of(pattern)
    if keep is None:
        known = Known(pattern=how, unmasked_rows=unmasked_rows, prove=prove)
        return ready(read_bare_mask(values, known, batch_size=None).segments)
    truth = read_keys(MaskValues(host_tensor("keep", keep), "keep", "keep"))
    known = Known(segments=of_keep(truth.array != 0), parted=False, pattern=how, prove=prove)
    return ready(read_mask(values, known).segments)


def read_mask(values: MaskValues, known: Known) -> Reading:
    """Read a mask of any rank beside a keep mask or the Segments of its batch; both must agree on what is real."""
    truth, full = known.segments, values.full
    assert truth is not None
    B, S = truth.shape
    rows = (B, S) if full.ndim == 2 else (1, B)
    if full.ndim not in (2, 3, 4) or full.shape[-1] != S or full.shape[0] not in rows:
        raise wrong_shape_error(values.key, values.got, (B, S))
    if tuple(full.shape[:-1]) in ((B,), (B, 1, 1)) and not (full.ndim == 4 and S == 1):
        found = _key_mask(values, truth.array != 0)
        check_same_padding(truth, values.key, found)
        return Reading(truth if known.parted else found, None)
    if full.shape[-2] != full.shape[-1]:
        raise _no_shape(values)
    return _square(values, known, B) if full.numel() else Reading(truth, None)


def _key_mask(values: MaskValues, keep_BS: Bools) -> Segments:
    """Return the Segments of a key mask: of its two polarities, the one that agrees with the keep mask."""
    if values.packing_ids:
        return Segments.from_ids(values.raw)
    readings = [values.read(polarity).reshape(keep_BS.shape) for polarity in polarities_of(values, None)]
    return of_keep(next((x for x in readings if np.array_equal(x, keep_BS)), readings[0]))


def check_same_padding(segments: Segments, name: str, other: Segments) -> None:
    """Raise unless another source of the same rows (a 2D mask, lengths) names the same padding; lists the rows."""
    wrong = np.flatnonzero(((other.array != 0) != (segments.array != 0)).any(axis=1))
    if len(wrong):
        rows = [(int(b), f"{other.row_lengths[b]} real tokens, not {segments.row_lengths[b]}") for b in wrong]
        rule = "It disagrees with the other mask of the same batch about which tokens are real."
        remedy = "Remove the wrong one, or rebuild both from the lengths; both mark alignment padding as padding."
        raise CollateError(explain_rows(name, rows, rule, remedy, more="sources-disagree"))


def read_bare_mask(values: MaskValues, known: Known, *, batch_size: int | None) -> Reading:
    """Read a mask of any rank by itself, for a batch of `batch_size` rows where that is known."""
    shape = values.full.shape
    _refuse_compressed(values)
    if not values.full.numel() and len(shape) in (2, 3, 4):
        if shape[-1] and batch_size not in (None, shape[0]):
            raise _of_other_rows(values, batch_size)
        return Reading(Segments(np.zeros((batch_size or shape[0], shape[-1]), np.int32)), None)
    if len(shape) == 2:
        return _from_two_dims(values, batch_size, known)
    if len(shape) == 4 and shape[1:3] == (1, 1) and shape[3] > 1:
        if values.declared is None:
            rule = "True is 'attends' (SDPA) or 'blocked' (TransformerEngine's padding mask), and a key mask shows neither."
            raise PolarityError(explain(values.key, values.got, rule, REMEDY_DECLARE_POLARITY, more="polarity"))
        return _repeat(values, Reading(of_keep(values.read(values.declared)[:, 0, 0]), None), batch_size)
    if len(shape) in (3, 4) and shape[-1] == shape[-2]:
        return _repeat(values, _square(values, known, shape[0]), batch_size)
    raise _no_shape(values)


def _from_two_dims(values: MaskValues, batch_size: int | None, known: Known) -> Reading:
    rows, S = values.full.shape
    low, high = values.range
    if rows != S or low == high or high > 1:
        if batch_size not in (None, rows):
            raise _of_other_rows(values, batch_size)
        return Reading(_rows_with_tokens(values), None)
    if batch_size not in (None, S):
        return _repeat(values, _square(values, known, 1), batch_size)
    if not _readings(values, known, 1)[0]:
        return Reading(_rows_with_tokens(values), None)
    rule = f"It is a keep mask of {S} rows [B, S], or one square mask [S, S] that all rows share."
    raise AmbiguousMaskError(explain(values.key, values.got, rule, "Pass [B, 1, S, S], or attention_mask_2d."))


def _rows_with_tokens(values: MaskValues) -> Segments:
    """Return `read_keys` of a mask that stands alone. Raises where a row has no token: the mask may be inverted."""
    segments = read_keys(values)
    if segments.empty_rows and values.declared is None:
        rows = [(b, "no real token") for b in segments.empty_rows]
        rule = "A [B, S] mask is read as keep, 1 = real token; here it may be inverted."
        remedy = "Pass polarity='keep' if those rows are only padding, polarity='masked' if 1 means padding."
        raise PolarityError(explain_rows(values.key, rows, rule, remedy, more="inverted-mask"))
    return segments


def read_keys(values: MaskValues) -> Segments:
    """Return the `Segments` of a mask `[B, S]`: keep, the declared polarity, or packing ids `1 1 2 2 0`."""
    if values.full.ndim != 2:
        raise _no_shape(values)
    if values.packing_ids:
        if values.declared not in (None, "keep"):
            rule = "Numbers above 1 are packing ids, 0 = padding."
            raise PolarityError(explain(values.key, values.got, rule, "Pass polarity=None."))
        return Segments.from_ids(values.raw)
    if values.declared is None and not values.range[1] and values.full.numel():
        got = f"{values.got} of zeros"
        rule = "Read as keep, every token is padding; read as masked or additive, none is."
        raise PolarityError(explain(values.key, got, rule, REMEDY_DECLARE_POLARITY, more="polarity"))
    return of_keep(values.read(values.declared or "keep"))


def _readings(
    values: MaskValues, known: Known, batch_size: int
) -> tuple[dict[str, Reading | AmbiguousMaskError], dict[str, UnexplainedError]]:
    """Return, for each possible polarity, the reading of a square mask or why it is ambiguous; and why a polarity fails."""
    found: dict[str, Reading | AmbiguousMaskError] = {}
    failed: dict[str, UnexplainedError] = {}
    for polarity in polarities_of(values, known.segments):
        try:
            found[polarity] = read_square(Square(values, polarity, batch_size), known)
        except AmbiguousMaskError as error:
            found[polarity] = error.with_traceback(None)  # whose frames would hold the whole matrix
        except UnexplainedError as error:
            failed[polarity] = error.with_traceback(None)
    if len(found) == 2 and found["keep"] == found["masked"]:
        del found["masked"]  # a batch of padding alone, known from the 2D mask: both readings say so
    return found, failed


def _square(values: MaskValues, known: Known, batch_size: int) -> Reading:
    """Return the reading of `[B, S, S]` or `[B, H, S, S]`, by the declared or the proved polarity; heads are alike."""
    if values.full.ndim == 4 and values.full.shape[1] > 1 and _heads_differ(values):
        raise heads_differ_error(values)
    found, failed = _readings(values, known, batch_size)
    if not found:
        raise _unexplained(values, known, failed)
    # where a pattern was declared, that may be what is wrong, and not the other reading
    others = {name: str(error.instead) for name, error in failed.items() if error.instead is not None}
    result = next(iter(found.values()))
    if len(found) + len(others) > 1 and (len(found) > 1 or isinstance(result, Reading)):
        readings = {name: repr(x.segments) if isinstance(x, Reading) else "ambiguous too" for name, x in found.items()}
        text = "; ".join(f"as '{name}' it is {found_as}" for name, found_as in (readings | others).items())
        rule = f"Both readings are possible: {text}."
        raise PolarityError(explain(values.key, values.got, rule, REMEDY_DECLARE_POLARITY, more="polarity"))
    if isinstance(result, AmbiguousMaskError):
        raise result
    return result


def _heads_differ(values: MaskValues) -> bool:
    """True if a head attends other keys than the first."""
    if values.raw.strides[1] == 0:  # one head, repeated
        return False
    read = partial(values.attending, polarity=values.declared or "keep")
    return any(bool((read(head_QK) != read(heads[0])).any()) for heads in values.raw for head_QK in heads[1:])


def heads_differ_error(values: MaskValues) -> AmbiguousMaskError:
    """Return the error for heads that attend different keys."""
    remedy = "Let the model build it, and pass attention_mask_2d (1 = real token) in its place."
    return AmbiguousMaskError(explain(values.key, f"{values.got}, different from head to head", "Heads share one.", remedy))


def _unexplained(values: MaskValues, known: Known, failed: dict[str, UnexplainedError]) -> AmbiguousMaskError:
    rows = [(row, f"as '{name}': {text}") for name, error in failed.items() for row, text in error.rows]
    instead = next((error.instead for error in failed.values() if error.instead is not None), None)
    got = values.got
    if instead is not None:
        rule = f"{got} is not {known.pattern} attention on these tokens; {instead} would explain it."
        remedy = f"Pass pattern={spell_pattern(instead)} if the model attends so, or pass attention_mask_2d in its place."
    elif known.segments is not None:
        rule = f"{got} and the other keys of the batch name different real tokens, under every pattern."
        remedy = "Remove the wrong one; if attention_mask_2d is in the batch, this mask can be left out."
    else:
        rule = f"{got} is no padding and no pattern (causal, sliding, chunked, prefix, bidirectional)."
        remedy = f"{REMEDY_CARRY_2D} If True means the opposite, pass the other polarity=. In derive_segments: if the "
        remedy += "attention is custom, pass prove=False; if padding attends itself, pass keep=."
    return AmbiguousMaskError(explain_rows(values.key, rows, rule, remedy, more="mask-pattern"))


def spell_pattern(pattern: Pattern) -> str:
    """Return the Python expression for this pattern."""
    if isinstance(pattern, Prefix):
        return f"Pattern.prefix({list(pattern.lengths)})"
    return f"Pattern.{pattern}" if "(" in str(pattern) else repr(str(pattern))


def _repeat(values: MaskValues, reading: Reading, batch_size: int | None) -> Reading:
    rows = reading.segments.shape[0]
    if batch_size in (None, rows):
        return reading
    if rows == 1 and batch_size:
        return Reading(Segments(np.repeat(reading.segments.array, batch_size, axis=0)), reading.pattern)
    raise _of_other_rows(values, batch_size)


def _of_other_rows(values: MaskValues, batch_size: int | None) -> CollateError:
    rule = f"The batch has {batch_size} rows."
    return CollateError(explain(values.key, values.got, rule, "Pass the mask of this batch, before any split."))


def _refuse_compressed(values: MaskValues) -> None:
    """Raise for torch_npu's compressed causal masks: [2048, 2048] (sparse_mode 2-4), [3072, 2048] (mode 6); op-plugin
    doc:554-606."""
    if tuple(values.full.shape) not in ((2048, 2048), (3072, 2048), (1, 1, 2048, 2048)):
        return
    below_QK = (values.full.reshape(-1, 2048)[:2048] != 0).numpy() == np.tri(2048, dtype=bool)
    if below_QK.all() or not below_QK.any():
        rule = "It is torch_npu's compressed causal triangle, which holds no padding, or 2048 tokens without padding."
        raise AmbiguousMaskError(explain(values.key, values.got, rule, REMEDY_CARRY_2D))


def _no_shape(values: MaskValues) -> CollateError:
    if values.full.ndim in (3, 4):
        Q, K = values.full.shape[-2:]
        rule = f"{Q} query rows and {K} keys: a context-parallel shard, or a KV cache."
        remedy = "Derive from the whole mask, before the split; self-attention has as many rows as keys."
        return AmbiguousMaskError(explain(values.key, values.got, rule, remedy))
    rule = "Masks are [B,S], [B,1,1,S], [B,S,S], [S,S], [1,1,S,S], [B,1,S,S] or [B,H,S,S]."
    return UnsupportedFormError(explain(values.key, values.got, rule, "Reshape it, or pass attention_mask_2d."))
