"""The public entries, and what comes out of them.

An entry is given one batch of a producer and returns in silence where what comes out is `right`: every real token attends
what the producer says, the 2D mask is the truth, positions that were added count. `refused` is a `CollateError`, `raw` any
other exception, `wrong` anything else; it was silent. `make` stands for the class or function under test, so that
`test_verdicts` can put a wrong one in its place.

A refusal is fair, unless nothing was left to doubt (`told_all`). `LIMITS` are the batches that no reader could
read otherwise: what the library answers there is what the batch says, and not what its maker meant.
Legend: B rows, S width, Q/K query and key places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from batches import PAD, SIDED, Case, canonical, causal, positions, together
from torch import Tensor

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Segments, derive_segments, wrap_collator

Verdict = Literal["right", "refused", "raw", "wrong"]
OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_kv")


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
    mask = out.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        same("attention_mask", mask.bool(), case.keep)
    elif mask is not None:  # transformers separates sequences by nothing else on sdpa
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


# --- entries

DENSE = SimpleNamespace(layer_types=["full_attention"], model_type="llama")


@dataclass(frozen=True)
class Entry:
    """One way in."""

    name: str
    run: Callable[[Case], None]
    with_2d: bool = False
    declared: bool = False

    @property
    def derives(self) -> bool:
        return self.name.startswith("derive")

    @property
    def wraps(self) -> bool:
        return self.name.startswith("wrap")

    def case(self, case: Case) -> Case:
        """What is true for someone who enters here."""
        told = self.with_2d or (self.wraps and case.told_by_samples)
        case = case if told else case.bare()
        return replace(case, ids=case.keep.astype(np.int64)) if self.derives and case.keys_alone else case

    def applies(self, case: Case) -> bool:
        if self.name == "collate" or case.unpadded:
            return case.unpadded and not (self.derives or self.with_2d or self.declared)
        if case.mask is None and not case.plain and not case.flat:
            return False  # nothing in the batch says so: the model attends as it does
        if self.derives:
            return case.mask is not None and not case.flat and not (case.contrary and self.name == "derive")
        return not self.with_2d if case.flat else not self.declared or case.pattern is not None


def derive(case: Case, *, with_2d: bool, declared: bool) -> None:
    shape, B = getattr(case.mask, "shape", ()), len(case.ids)
    shared = len(shape) and (shape[0] != B or (len(shape) == 2 and shape[0] == shape[1]))  # the mask does not say the rows
    told: dict[str, Any] = {"keep": torch.from_numpy(case.keep)} if with_2d else {"batch_size": B if shared else None}
    check_segments(derive_segments(case.mask, **told, **_declared(case, declared)), case)


def _batch(case: Case, with_2d: bool) -> Any:
    more = {"attention_mask_2d": torch.from_numpy(case.keep.copy())} if with_2d else {}
    return case.form({key: x.clone() if isinstance(x, Tensor) else x for key, x in case.batch.items()} | more)


def collate(case: Case, *, with_2d: bool = False, declared: bool = False, make: Any = PaddingCollator) -> None:
    """Rows that are not padded yet."""
    out = make(pad_token_id=PAD)(_batch(case, with_2d))
    same("input_ids", out["input_ids"][torch.from_numpy(case.keep)], np.concatenate(case.draw.rows()))
    check_batch(out, case, "neutral")


def _declared(case: Case, declared: bool, **more: Any) -> dict[str, Any]:
    return {"polarity": case.polarity, "pattern": case.pattern, **more} if declared else {}


def adapt(
    case: Case, consumer: str = "megatron", *, with_2d: bool = False, declared: bool = False, make: Any = BatchAdapter
) -> None:
    """By chance, from the seed: recurrent layers on Megatron, where they can take it, and eager attention else."""
    odd = bool(case.draw.tokens.sum() % 2)
    needs_2d = odd and consumer == "megatron" and (case.flat or not (case.packed or case.gapped))
    implementation = "eager" if odd and consumer == "transformers" else "sdpa"
    named = {"needs_mask_2d": needs_2d, "attn_implementation": implementation, "padding_free": case.flat}
    model = DENSE if consumer == "transformers" else None
    out = make(model, consumer=consumer, **named, **_declared(case, declared, labels_shifted=case.labels_shifted))(
        _batch(case, with_2d)
    )
    if case.flat:
        check_flat(out, case)
    else:
        check_batch(out, case, consumer, implementation, needs_2d=needs_2d)


def wrap(case: Case, *, with_2d: bool = False, declared: bool = False, make: Any = wrap_collator) -> None:
    told = _declared(case, declared, labels_shifted=case.labels_shifted)
    out = make(lambda features: _batch(case, with_2d), **told)(case.features)
    if case.ids.shape[0] == 1 and "cu_seq_lens_q" in out and out.get("attention_mask") is None:
        check_flat(out, case)
    else:
        check_batch(out, case, "neutral")


WAYS = {"derive": derive, "megatron": adapt, "transformers": partial(adapt, consumer="transformers"), "wrap": wrap}
WAYS["collate"] = collate


def _entry(name: str, with_2d: bool = False, declared: bool = False) -> Entry:
    title = name + " declared" * declared + " +2D" * with_2d
    return Entry(title, partial(WAYS[name], with_2d=with_2d, declared=declared), with_2d, declared)


ENTRIES = (
    *(_entry(name, *told) for name in WAYS for told in ((), (True,)) if name != "collate" or not told),
    *(_entry(name, declared=True) for name in ("derive", "megatron", "wrap")),
    _entry("transformers", with_2d=True, declared=True),
)


# --- what no reader could read otherwise, and where nothing is left to doubt


def told_all(case: Case, entry: Entry) -> bool:
    """Plain padding beside its 2D mask, with polarity and pattern declared: to refuse it is a fault."""
    plain = case.plain and not case.packed and case.draw.style in SIDED and min(case.draw.lengths) > 1
    return plain and entry.with_2d and entry.declared and case.keys_alone and not (case.contrary or case.flat)


def _lone(case: Case) -> bool:
    """Rows of several sequences of one token each: their positions never count up, so they say nothing."""
    rows = [row[row > 0] for row in case.ids]
    return any(len(row) > 1 and len(set(row.tolist())) == len(row) for row in rows)


def _window_or_pack(case: Case, entry: Entry) -> bool:
    """A window that no hole lets through, or of one token, is, place by place, the attention of several sequences."""
    apart = np.where(case.keep, case.attends.argmax(2) + 1, 0)
    packs = (together(apart), causal(apart))
    return case.pattern is None and not case.plain and any((case.attends == pack).all() for pack in packs)


LIMITS: dict[str, Callable[[Case, Entry], bool]] = {
    # Positions are all that tells sequences of one token apart.
    "single tokens by positions": lambda case, entry: (
        _lone(case) and isinstance(case.batch.get("position_ids"), Tensor) and getattr(case.mask, "ndim", 2) == 2
    ),
    "window or pack": _window_or_pack,
    # Padding is one id, and so are the real tokens: which is which?
    "one id of each": lambda case, entry: (
        case.contrary and any(len({*row[keep].tolist()}) < 2 for row, keep in zip(case.draw.tokens, case.keep))
    ),
    # One place behind the last sequence, counted as one more: a token alone that nobody learns looks the same.
    "a place alone": lambda case, entry: case.flat and entry.wraps and bool((case.ids[0, -2:] == 0).sum() == 1),
    # Sequences of the same one token at the end of a flat row, which nobody learns: a tail looks the same.
    "tokens alone": lambda case, entry: (
        case.flat and len(set(case.ids[0, -3:].tolist())) == 3 and case.draw.tokens[0, -2] == case.draw.tokens[0, -1]
    ),
}
