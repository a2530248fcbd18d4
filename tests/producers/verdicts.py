"""Verdicts: whether what came out of a public entry is what the producer meant.

`right`: every real token attends what the producer says, the 2D mask is the truth, positions that were added count.
`refused`: a `CollateError`. `raw`: any other exception. `wrong`: anything else; it was silent.
Legend: B rows, S width, Q/K query and key places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from drawing import SIDED, Draw, canonical, causal, positions
from torch import Tensor

from collate_npu import CollateError, Pattern, Segments

Verdict = Literal["right", "refused", "raw", "wrong"]
OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_kv")


@dataclass(frozen=True)
class Case:
    """A batch as some software emits it, and what that software means by it."""

    draw: Draw
    batch: dict[str, Any]
    ids: np.ndarray
    """The truth, `[B, S]`, 0 = padding."""
    attends: np.ndarray
    """bool `[B, S, S]`, at real queries."""
    pattern: Pattern | None
    """What a user would declare; None where no pattern of ours says it."""
    polarity: Any = None
    flat: bool = False
    silent: bool | np.ndarray = False
    """The emission, or that of some rows (`[B]`), says nothing of padding: alone it means that all tokens are real."""
    richer: bool = False
    """It says more than who attends whom: values, or another thing to each head. No other mask stands for it."""
    contrary: bool = False
    """A 2D mask of the other polarity: alone, and undeclared, it is read as every stack reads one, and that is no fault."""
    features: list[dict[str, Any]] = field(default_factory=list)
    form: Callable[[dict[str, Any]], Any] = dict
    """What holds the batch."""
    unpadded: bool = False
    """Rows of their own lengths: samples, and no batch yet."""

    @cached_property
    def keep(self) -> np.ndarray:
        return self.ids > 0

    @cached_property
    def packed(self) -> bool:
        return bool((self.ids > 1).any())

    @cached_property
    def gapped(self) -> bool:
        """Does padding stand between real tokens of a row?"""
        return any((np.diff(np.flatnonzero(row)) > 1).any() for row in self.keep)

    @property
    def mask(self) -> Any:
        return self.batch.get("attention_mask")

    @property
    def told_by_samples(self) -> bool:
        """Do the samples stand whole at one end of their rows, so that their lengths tell the padding?"""
        whole = self.draw.style in SIDED and len(self.features) == len(self.ids)
        return whole and all("input_ids" in feature for feature in self.features)

    @property
    def keys_alone(self) -> bool:
        """A 2D mask of 0 and 1 says who is real, not where a sequence ends."""
        mask = self.mask
        return isinstance(mask, Tensor) and tuple(mask.shape) == self.ids.shape and bool((mask <= 1).all())

    @cached_property
    def plain(self) -> bool:
        """Is it plain causal attention for these lengths?"""
        return bool((self.attends == causal(self.ids)).all())

    def bare(self) -> Case:
        """What the emission means alone."""
        if not np.any(self.silent):
            return self
        silent_B11 = np.broadcast_to(self.silent, len(self.ids))[:, None, None]
        ids = np.where(silent_B11[:, 0], 1, self.ids)
        return replace(self, ids=ids, attends=np.where(silent_B11, causal(ids), self.attends), silent=False)


class Result(NamedTuple):
    """The verdict, and what was seen."""

    verdict: Verdict
    told: str = ""


class _WrongError(AssertionError):
    pass


def judge(entry: Callable[[Case], None], case: Case) -> Result:
    """Run one entry, which returns in silence where all is right."""
    try:
        entry(case)
    except _WrongError as wrong:
        return Result("wrong", str(wrong))
    except CollateError as error:
        return Result("refused", " ".join(str(error).split()))
    except Exception as error:
        return Result("raw", f"{type(error).__name__}: {error}")
    return Result("right")


def demand(fact: Any, told: str) -> None:
    if not fact:
        raise _WrongError(told)


# --- what comes out


def same(key: str, found: Any, truth: np.ndarray, at: Any = ...) -> None:
    found = np.asarray(found)
    demand(found.shape == truth.shape, f"{key} of shape {found.shape}, truth {truth.shape}")
    demand((found == truth)[at].all(), f"{key} {found.tolist()}, truth {truth.tolist()}")


def check_segments(found: Any, case: Case) -> None:
    same("segments", canonical(found.ids if isinstance(found, Segments) else found), canonical(case.ids))


def check_batch(
    out: dict[str, Any], case: Case, consumer: str, implementation: str = "sdpa", needs_2d: bool = False
) -> None:
    """Everything a model of this consumer would read."""
    carried, keep = out.get("attention_mask"), out.get("attention_mask_2d")
    kept = isinstance(carried, Tensor) and isinstance(case.mask, Tensor) and torch.equal(carried, case.mask)
    demand(kept or not case.richer, "a mask of values or heads was replaced")
    check_attention(attention_of(out, case.ids.shape, consumer, implementation), case)
    demand(keep is not None or not (needs_2d or consumer == "neutral"), "attention_mask_2d is gone")
    if keep is not None:
        same("attention_mask_2d", keep.bool(), case.keep)
    check_positions(out, case)
    if "segment_ids" in out:
        check_segments(out["segment_ids"], case)


def check_attention(attends: np.ndarray, case: Case) -> None:
    wrong = (attends != case.attends) & case.keep[:, :, None]
    if wrong.any():
        b, q, k = np.argwhere(wrong)[0].tolist()
        verb = "attends" if attends[b, q, k] else "does not attend"
        raise _WrongError(f"row {b} token {q} {verb} {k}; truth {case.ids.tolist()}")


def attention_of(out: dict[str, Any], shape: tuple[int, int], consumer: str, implementation: str) -> np.ndarray:
    """bool `[B, S, S]`: what the layers of the consumer compute of this batch."""
    carried, (B, S) = out.get("attention_mask"), shape
    if carried is None:
        return _unmasked(out, shape, consumer)
    if not isinstance(carried, Tensor):
        return block_mask_attends(carried, shape)
    if carried.ndim == 2:
        demand(consumer == "transformers", f"{consumer} got a 2D attention_mask")
        demand(tuple(carried.shape) == shape, f"attention_mask {list(carried.shape)} for tokens {shape}")
        demand(((carried == 0) | (carried == 1)).all(), "a 2D mask of other values than 0 and 1")
        return carried.numpy().astype(bool)[:, None, :] & np.tri(S, dtype=bool)
    demand(tuple(carried.shape) == (B, 1, S, S), f"attention_mask {list(carried.shape)} for tokens {shape}")
    if consumer == "transformers" and implementation == "eager":
        demand(carried.is_floating_point(), "eager adds the mask: a bool one is 1 or 0")
        return (carried[:, 0] > -1e3).numpy()
    demand(carried.dtype == torch.bool, f"a {carried.dtype} mask for {consumer}")
    return (carried if consumer == "transformers" else ~carried)[:, 0].numpy()


def _unmasked(out: dict[str, Any], shape: tuple[int, int], consumer: str) -> np.ndarray:
    """No mask is the causal triangle; transformers then looks for sequences in the positions (masking_utils.py:876-882)."""
    ids = np.ones(shape, np.int64)
    if consumer == "transformers" and isinstance(out.get("position_ids"), Tensor) and out["position_ids"].ndim == 2:
        steps = np.diff(out["position_ids"].numpy(), axis=1) != 1
        ids[:, 1:] += np.cumsum(np.broadcast_to(steps, (shape[0], shape[1] - 1)), axis=1)
    return causal(ids)


def block_mask_attends(block_mask: Any, shape: tuple[int, int]) -> np.ndarray:
    """A BlockMask's predicate at every place."""
    B, S = shape
    b, q, k = torch.meshgrid(torch.arange(B), torch.arange(S), torch.arange(S), indexing="ij")
    return block_mask.mask_mod(b, torch.zeros_like(b), q, k).expand(B, S, S).numpy()


def check_positions(out: dict[str, Any], case: Case) -> None:
    """Positions that were added count each sequence's real tokens; those that were there stay."""
    found, given = out.get("position_ids"), case.batch.get("position_ids")
    if isinstance(given, Tensor):
        demand(isinstance(found, Tensor) and torch.equal(found, given), "position_ids of the batch were changed")
    elif isinstance(found, Tensor):
        same("position_ids", found, positions(case.ids), case.keep)


def check_flat(out: dict[str, Any], case: Case) -> None:
    """A flat row: every set of boundaries in it is the truth's; at least one set is there."""
    if (mask := out.get("attention_mask")) is not None:  # transformers separates sequences by nothing else on sdpa
        check_attention((mask[:, 0] == 0 if mask.is_floating_point() else mask[:, 0]).numpy().astype(bool), case)
    ends = np.concatenate([[0], np.bincount(case.ids[0])[1:].cumsum()]).tolist()
    seen = {key: out[key] for key in OFFSETS if isinstance(out.get(key), Tensor)}
    if (params := out.get("packed_seq_params")) is not None:
        seen["packed_seq_params"] = params.cu_seqlens_q
    for key, offsets in seen.items():
        found = offsets.reshape(-1).tolist()
        padded = [*ends[:-1], case.ids.shape[1]]  # a tail behind the last sequence is nothing to causal layers
        demand(found[: len(ends)] == ends or found == padded, f"{key} {found}, truth {ends}")
        demand(max(found) <= case.ids.shape[1] and sorted(found) == found, f"{key} {found}, {case.ids.shape[1]} tokens")
    if isinstance(given := out.get("position_ids"), Tensor):
        same("position_ids", given, positions(case.ids), case.keep)
    demand(seen or isinstance(given, Tensor) or not case.packed, "no boundaries at all")
    if isinstance(out.get("seq_idx"), Tensor):
        same("seq_idx", out["seq_idx"].reshape(case.ids.shape), case.ids - 1, case.keep)
