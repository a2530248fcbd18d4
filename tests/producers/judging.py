"""The public entries, what comes out of them, and where a refusal is honest.

An entry is given one batch of a producer and returns in silence where what comes out is `right`: every real token attends
what the producer says, the 2D mask is the truth, positions that were added count. `refused` is a `CollateError`, `raw` any
other exception, `wrong` anything else; it was silent. `make` stands for the class or function under test, so that
`test_verdicts` can put a wrong one in its place.

A refusal without a reason is a failure. Reasons of `EVERYWHERE` hold for every producer; a producer names those of
`BY_NAME` that its form brings. `LIMITS` are the batches that no reader could read otherwise: what the library answers there
is what the batch says, and not what its maker meant.
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
from batches import PAD, SIDED, Case, canonical, causal, chunked, positions, together
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


def _declared(case: Case, declared: bool) -> dict[str, Any]:
    return {"polarity": case.polarity, "pattern": case.pattern} if declared else {}


def adapt(
    case: Case, consumer: str = "megatron", *, with_2d: bool = False, declared: bool = False, make: Any = BatchAdapter
) -> None:
    """By chance, from the seed: recurrent layers on Megatron, where they can take it, and eager attention else."""
    odd = bool(case.draw.tokens.sum() % 2)
    needs_2d = odd and consumer == "megatron" and (case.flat or not (case.packed or case.gapped))
    implementation = "eager" if odd and consumer == "transformers" else "sdpa"
    named = {"needs_mask_2d": needs_2d, "attn_implementation": implementation, "padding_free": case.flat}
    model = DENSE if consumer == "transformers" else None
    out = make(model, consumer=consumer, **named, **_declared(case, declared))(_batch(case, with_2d))
    if case.flat:
        check_flat(out, case)
    else:
        check_batch(out, case, consumer, implementation, needs_2d=needs_2d)


def wrap(case: Case, *, with_2d: bool = False, declared: bool = False, make: Any = wrap_collator) -> None:
    out = make(lambda features: _batch(case, with_2d), **_declared(case, declared))(case.features)
    if case.ids.shape[0] == 1 and "cu_seq_lens_q" in out and out.get("attention_mask") is None:
        check_flat(out, case)
    else:
        check_batch(out, case, "neutral")


WAYS = {
    "derive": derive,
    "megatron": adapt,
    "transformers": partial(adapt, consumer="transformers"),
    "wrap": wrap,
    "collate": collate,
}


def _entry(name: str, with_2d: bool = False, declared: bool = False) -> Entry:
    title = name + " declared" * declared + " +2D" * with_2d
    return Entry(title, partial(WAYS[name], with_2d=with_2d, declared=declared), with_2d, declared)


ENTRIES = (
    *(_entry(name, *told) for name in WAYS for told in ((), (True,)) if name != "collate" or not told),
    *(_entry(name, declared=True) for name in ("derive", "megatron", "wrap")),
    _entry("transformers", with_2d=True, declared=True),
)


# --- where a refusal is honest

Reason = Callable[[Case, Entry], bool]


def undecided(case: Case, entry: Entry) -> bool:
    """The bare mask, and nobody said how to read it."""
    return not entry.with_2d and not entry.declared


def _dimensions(case: Case) -> int:
    return getattr(case.mask, "ndim", 0)


def _one_value(case: Case, entry: Entry) -> bool:
    alike = isinstance(case.mask, Tensor) and bool((case.mask == case.mask.flatten()[0]).all()) and case.mask.ndim > 2
    return alike and not entry.with_2d and not (entry.declared and case.polarity)


def _one_token(case: Case, entry: Entry) -> bool:
    lone = case.attends.sum(axis=2) == 1
    lone &= (case.attends & case.keep[:, :, None]).sum(axis=1) == 1
    return bool((lone & case.keep).any()) and undecided(case, entry) and _dimensions(case) != 2


def _chunks(case: Case, entry: Entry) -> bool:
    if entry.declared or (case.plain and not case.packed) or (not entry.derives and _positions_tell(case)):
        return False
    one = case.keep.astype(np.int64)
    return any((chunked(one, size) == case.attends).all() for size in range(1, case.ids.shape[1]))


def _positions_tell(case: Case) -> bool:
    given = case.batch.get("position_ids")
    same = isinstance(given, Tensor) and bool((given.numpy() == positions(case.ids))[case.keep].all())
    return same and not _lone(case)


def _lone(case: Case) -> bool:
    """Rows of several sequences of one token each: their positions never count up, so they say nothing."""
    rows = [row[row > 0] for row in case.ids]
    return any(len(row) > 1 and len(set(row.tolist())) == len(row) for row in rows)


def _hidden_steps(case: Case, entry: Entry) -> bool:
    pattern = case.pattern
    hides = pattern is not None and (pattern.name == "sliding" or (pattern.name == "chunked" and not entry.declared))
    return hides and any((np.diff(np.flatnonzero(row)) >= pattern.size).any() for row in case.keep)


def _samples_against_mask(case: Case, entry: Entry) -> bool:
    said_less = case.keep.shape == case.draw.keep.shape and bool((case.keep != case.draw.keep).any())
    hidden = any(
        "attention_mask" not in feature and len(feature.get("input_ids", ())) > real
        for feature, real in zip(case.features, case.keep.sum(axis=1))
    )
    return entry.wraps and (hidden or (not entry.with_2d and (said_less or bool(np.any(case.silent)))))


def _visible_padding(case: Case, entry: Entry) -> bool:
    told = entry.with_2d or (not entry.derives and _positions_tell(case))
    return getattr(case.mask, "ndim", 4) != 2 and case.packed and bool(case.keep.all()) and not told


def _looks_padded(case: Case, entry: Entry) -> bool:
    tokens = np.asarray(() if case.unpadded else case.batch.get("input_ids", ()))
    ends = tokens.ndim == 2 and tokens.shape[1] > 1
    repeated = ends and bool(((tokens[:, 0] == tokens[:, 1]) | (tokens[:, -1] == tokens[:, -2])).any())
    return not entry.with_2d and bool(case.keep.all()) and repeated


def _says_nothing(case: Case, entry: Entry) -> bool:
    return not entry.with_2d or bool((case.keep[:, 1:] & ~case.keep[:, :-1]).any())


EVERYWHERE: dict[str, Reason] = {
    # A row of single tokens beside padding that attends padding: so does a 2D mask that is turned around look.
    "turned around": lambda case, entry: entry.with_2d and _lone(case),
    "single tokens": lambda case, entry: case.flat and not positions(case.ids).any() and "cu_seq_lens_q" not in case.batch,
    # Packed rows without padding that nobody sees: some sequences may be padding that attends itself.
    "visible padding": _visible_padding,
    # A 2D mask of the other polarity: beside a keep mask the two disagree, alone its labels are on padding.
    "contrary": lambda case, entry: case.contrary and not entry.declared,
    # `[B, 1, 1, S]`: padding beside causal attention, or attention to both sides.
    "keys for all queries": lambda case, entry: not entry.declared and _dimensions(case) == 4 and case.mask.shape[-2] == 1,
    # Another pattern than the causal one that this entry declares, or one that no declaration says.
    "foreign pattern": lambda case, entry: case.pattern is None or not (case.plain or entry.declared or entry.derives),
    # An inverted 2D mask looks like that, and a 4D one may have unmasked it.
    "empty row": lambda case, entry: bool((~case.keep).all(axis=1).any()),
    # Without a mask the samples must stand at one end of their rows, alike, to tell where padding is.
    "no mask": lambda case, entry: (
        case.mask is None and not (entry.with_2d or case.flat) and not (entry.wraps and case.draw.style in SIDED)
    ),
    # All places alike: all real, or all padding.
    "one value": _one_value,
    # Nothing blocked in a float mask: no padding (additive), or nothing but padding (0/1).
    "additive zeros": lambda case, entry: (
        isinstance(case.mask, Tensor) and case.mask.is_floating_point() and not case.mask.any() and not entry.declared
    ),
    # `[B, S]` with B == S may be one square mask that all rows share; its place in a batch would tell.
    "square 2D": lambda case, entry: (
        entry.derives and not entry.with_2d and _dimensions(case) == 2 and case.ids.shape[0] == case.ids.shape[1]
    ),
    # A token that attends nothing but itself: a sequence of one, or padding whose diagonal was forced.
    "one token": _one_token,
    # Packed rows that are chunked attention over one sequence as well; positions in the batch would tell.
    "chunks": _chunks,
    # Two sequences with padding between, or one whose hole is wider than its window.
    "wide gap": lambda case, entry: (
        case.draw.style in ("packed_gaps", "holes") and not entry.declared and (case.packed or not case.plain)
    ),
    # Two neighbours of a row that no window of this size joins: one sequence with a hole, or two sequences.
    "hidden steps": _hidden_steps,
    # A mask that shows no padding over rows that begin or end with one token again and again.
    "looks padded": _looks_padded,
    # The samples show padding where the mask shows none.
    "samples against mask": _samples_against_mask,
}
BY_NAME: dict[str, Reason] = {
    # Offsets that count padding to a sequence, beside positions that do not.
    "padding in offsets": lambda case, entry: "cu_seq_lens_q" in case.batch and not case.keep.all(),
    # Bidirectional attention with padding is, inverted, bidirectional attention of the padding.
    "either polarity": lambda case, entry: (
        isinstance(case.mask, Tensor) and case.mask.dtype == torch.bool and undecided(case, entry)
    ),
    # `[B, 1, 1, S]`, or `[B, S]` whose meaning is not the usual one: the numbers do not say which.
    "key row": undecided,
    # Another container, or a subclass that stands for numbers it does not hold.
    "no tensor": lambda case, entry: type(case.mask) is not Tensor,
    # Padding that attends itself is a sequence like any other, unless a 2D mask says what is real.
    "self-attending padding": lambda case, entry: not entry.with_2d and not case.keep.all(),
    # Empty rows were made to attend everything, so they look real.
    "unmasked rows": lambda case, entry: not entry.with_2d and not case.keep.all(),
    # A triangle has no word of padding; where some stands before a real token, it even says that it is attended.
    "says nothing": _says_nothing,
    # A flat row of several sequences without a word of where they meet; the samples beside it would tell.
    "no boundaries": lambda case, entry: not entry.wraps,
    # Rows of their own lengths: a collator pads them.
    "not padded yet": lambda case, entry: case.unpadded and entry.name != "collate",
    # A mask of ones and offsets say that the places of a tail are sequences, and the samples that they are none.
    "tail against samples": lambda case, entry: case.flat and entry.wraps,
    # Positions that restart beside a mask that goes on: two sources that tell different things.
    "positions against mask": lambda case, entry: not entry.derives,
}
REASONS = EVERYWHERE | BY_NAME


def _window_or_pack(case: Case, entry: Entry) -> bool:
    """A window that no hole lets through, or of one token, is, place by place, the attention of several sequences."""
    apart = np.where(case.keep, case.attends.argmax(2) + 1, 0)
    packs = (together(apart), causal(apart))
    return case.pattern is None and not case.plain and any((case.attends == pack).all() for pack in packs)


LIMITS: dict[str, Reason] = {
    # Positions are all that tells sequences of one token apart.
    "single tokens by positions": lambda case, entry: (
        _lone(case) and isinstance(case.batch.get("position_ids"), Tensor) and getattr(case.mask, "ndim", 2) == 2
    ),
    "window or pack": _window_or_pack,
    # One place behind the last sequence, counted as one more: a token alone that nobody learns looks the same.
    "a place alone": lambda case, entry: case.flat and entry.wraps and bool((case.ids[0, -2:] == 0).sum() == 1),
    # Sequences of the same one token at the end of a flat row, which nobody learns: a tail looks the same.
    "tokens alone": lambda case, entry: (
        case.flat and len(set(case.ids[0, -3:].tolist())) == 3 and case.draw.tokens[0, -2] == case.draw.tokens[0, -1]
    ),
}


def excuse(case: Case, entry: Entry, names: tuple[str, ...] = ()) -> str | None:
    """The first reason why a refusal is honest here, or None."""
    return next((name for name in (*EVERYWHERE, *names) if REASONS[name](case, entry)), None)
