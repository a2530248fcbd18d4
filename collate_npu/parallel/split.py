"""Split: what one rank holds of each key of a batch, by its row of `KEYS`, and gather: the whole output on every rank.

`pad_documents` pads each document of a flat row to what a layout can share out: `cu_seqlens` counts their real tokens,
`cu_seqlens_padded` says where they stand (the pair of Megatron's core/packed_seq_params.py). A split costs one copy a key, a
gather one all-gather of the shard and one copy, with gradients. Ranks compare what they hold before each (`agreement`).

Legend: B batch, S width, Q query rows, K keys, N documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import lcm
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from collate_npu.arrays import check_places, host_tensor, whole_number
from collate_npu.errors import AmbiguousMaskError, CollateError, UnsupportedFormError, explain, not_one_of, shape_of
from collate_npu.keys import KEYS, TOKENS, Key, Role, check_keys, of_kind, with_role
from collate_npu.masks.batch_reader import agreed, check_known
from collate_npu.masks.dialects import physical_and_real_offsets
from collate_npu.masks.forms import check_cuts, offsets_of
from collate_npu.masks.sources import Sources, wrong_shape_error
from collate_npu.outputs import to_nested
from collate_npu.parallel.agreement import batch_facts, digest_offsets, ranks_agree, turn_of, uncompiled
from collate_npu.parallel.layout import ContextParallel, Run, group_of, indices, row_pieces, token_runs
from collate_npu.segments import Segments, as_offsets
from collate_npu.validation import check_held, checked, dimension, is_plain

_RECURRENT_KINDS = ("linear_attention", "conv")
_FEW_RUNS, _FEW_PIECES = 16, 64
_from_jagged = torch.nested.nested_tensor_from_jagged

Loss = Literal["same", "local"]


@uncompiled
@checked
def split_batch(
    batch: Mapping[str, Any],
    cp: ContextParallel,
    *,
    segments: Segments | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return this rank's part of a batch: each key is split as its row of `KEYS` says. `gather_sequence` undoes it by key.

    A key that KEYS does not list is split where it begins `[B, S]`, replicated where no dimension is S wide, and refused
    otherwise. Labels are split as they are: where the model shifts them itself, put `shift_labels` in the batch first,
    because the label of a chunk's last token is on another rank. `segments`, of the whole batch, are checked against
    it. Offsets of documents come from `cu_seqlens`, or from the batch as `cu_seqlens_of` reads it. Raises one error
    that lists every key that does not fit. With `cp.group` every rank of it must call this: they compare what they hold
    first (`agreement`).

    >>> import torch
    >>> batch = {"input_ids": torch.arange(8)[None], "attention_mask_2d": torch.arange(8)[None] > 1}
    >>> [split_batch(batch, ContextParallel(2, rank))["input_ids"].tolist() for rank in (0, 1)]
    [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    >>> split_batch(batch, ContextParallel(2, 0))["attention_mask_2d"].tolist()
    [[False, False, True, True]]
    """
    with ranks_agree(cp, call="split"):
        sources = Sources.of(batch)
        nested = [getattr(sources[key], "is_nested", False) for key in sources.named["tokens"][:1]]
        if segments is not None and nested == [False]:
            check_known(sources, segments)
        return share_out(sources, cp, segments=segments, cu_seqlens=cu_seqlens)


@uncompiled
def share_out(
    batch: Mapping[str, Any], cp: ContextParallel, *, segments: Segments | None, cu_seqlens: Any = None, keys: Any = KEYS
) -> dict[str, Any]:
    """Return `split_batch` of a batch whose Segments were compared with it already."""
    with ranks_agree(cp, call="split") as facts:
        sources = Sources.of(batch)
        facts |= batch_facts(sources, segments, keys=keys) if cp.group is not None else {}
        shape = _shape(sources, segments)
        offsets = _offsets(sources, shape, cp, segments, cu_seqlens)
        facts["documents"] = partial(digest_offsets, offsets)
        shard = _Shard.of(cp, shape, offsets)
        out: dict[str, Any] = {}
        problems: list[CollateError] = []
        for key, value in sources.items():
            try:
                out[key] = shard.of_key(key, value, keys.get(key))
            except CollateError as error:
                problems.append(error)
        if problems:
            raise type(problems[0])("\n".join(map(str, problems)))
    return out


@checked
def split_tensor(
    x: Tensor, cp: ContextParallel, *, dim: int = 1, cu_seqlens: Tensor | Sequence[int] | None = None
) -> Tensor:
    """Return this rank's part of one tensor along `dim`. `gather_sequence` undoes it.

    A jagged tensor `[N, j, ...]` is split document by document and stays jagged (`document_zigzag`).

    >>> import torch
    >>> split_tensor(torch.arange(8)[None], ContextParallel(2, 1)).tolist()
    [[2, 3, 4, 5]]
    """
    if x.is_nested:
        offsets = _jagged_cu_seqlens(x, cp)
        return _from_jagged(_take_runs(x.values(), 0, token_runs(int(offsets[-1]), cp, offsets)), offsets // cp.size)
    _refuse_sparse("x", x)
    dim = dimension("x", x, dim)
    return _take_runs(x, dim, token_runs(x.shape[dim], cp, cu_seqlens))


def _shape(batch: Sources, segments: Segments | None) -> tuple[int, int]:
    """Return the rows and the width of the first key that has them. Raises if the Segments have others."""
    tokens, positions = with_role(batch, "tokens"), of_kind(batch, "positions")
    for key in (*tokens, *positions, *with_role(batch, "labels", "segment_ids", "keep")):
        value = batch[key]
        if getattr(value, "is_nested", False):
            B, S = 1, value.values().shape[0]
        else:
            size: Any = () if value is None else value.shape if isinstance(value, Tensor) else batch.array(key).shape
            if len(size) < 2:
                continue
            B, S = size[-2:] if KEYS[key].kind == "positions" else size[:2]
        if segments is not None and segments.shape != (B, S):
            rule = f"The segments are those of a batch {list(segments.shape)} (rows, width)."
            raise CollateError(explain(key, shape_of(value), rule, "Pass the unsplit batch and its own Segments."))
        return B, S
    if segments is not None:
        return segments.shape
    rule = "The width is read from input_ids, positions, labels or a mask of tokens."
    raise CollateError(explain("batch", f"the keys {sorted(map(str, batch))}", rule, "Pass segments= with the batch."))


def _offsets(
    batch: Sources, shape: tuple[int, int], cp: ContextParallel, segments: Segments | None, given: Any
) -> list[int] | None:
    """Return the offsets of the documents: those given, which must agree with the batch, or the batch's."""
    if given is None:
        found = cu_seqlens_of(batch, segments if cp.documents else None) if cp.documents or shape[0] == 1 else None
        return None if found is None else as_offsets("cu_seqlens", found).tolist()
    offsets = as_offsets("cu_seqlens", given, shape[1] if shape[0] == 1 else None)
    if segments is not None and shape[0] == 1:
        check_cuts("cu_seqlens", offsets, segments)
    if batch.offsets:
        name, held, _ = physical_and_real_offsets(batch.offsets)
        real = held[-1] < offsets[-1] and len(held) == len(offsets) and (np.diff(held) <= np.diff(offsets)).all()
        if not real and not np.array_equal(held, offsets):
            rule = f"{name} of the batch is {held[:16].tolist()}."
            remedy = "Pass the offsets of the documents of this row, or leave cu_seqlens out: the batch has them."
            raise CollateError(explain("cu_seqlens", str(offsets.tolist())[:80], rule, remedy, more="sources-disagree"))
    return offsets.tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Shard:
    """What one rank holds of a batch `[B, S]`."""

    cp: ContextParallel
    shape: tuple[int, int]
    tokens: tuple[Run, ...]

    @classmethod
    def of(cls, cp: ContextParallel, shape: tuple[int, int], cu_seqlens: Sequence[int] | None) -> _Shard:
        """Return what this rank holds. Raises if the layout takes one flat row alone, or would cut across its sequences."""
        B, S = shape
        if cp.documents and B != 1:
            rule = f"{cp.layout} shares out the documents of one flat row [1, S]."
            raise UnsupportedFormError(explain("batch", f"{B} rows", rule, "Collate padding_free, or use layout='zigzag'."))
        if cp.size > 1 and cp != cp.for_documents() and cu_seqlens is not None and B == 1 and len(set(cu_seqlens)) > 2:
            rule = f"{cp.layout} would cut across documents; kernels that read cu_seqlens share out each one (TE thd)."
            got = f"{len(cu_seqlens) - 1} documents in one flat row"
            raise UnsupportedFormError(explain("cu_seqlens", got, rule, "Use cp.for_documents() for padding-free batches."))
        return cls(cp, shape, token_runs(S, cp, cu_seqlens))

    def of_key(self, key: str, value: Any, rule: Key | None) -> Any:
        """Return what this rank holds of one key, by its row of `KEYS`."""
        if rule is not None and rule.share == "rows":
            return self.of_mask(key, value)
        if rule is not None and rule.share == "replicate":
            return value
        value = _as_tensor(key, value, rule, self.shape)
        if not isinstance(value, Tensor):
            return value
        if value.is_nested:
            return split_tensor(value, self.cp)
        if rule is None and tuple(value.shape[:2]) != self.shape:
            if self.shape[1] not in value.shape:
                return value
            said = f"A key that KEYS does not list is per token if its shape begins {list(self.shape)}."
            remedy = f"Split it with split_tensor(x, cp, dim=...), or pass BatchAdapter(keys={{**KEYS, {key!r}: SAMPLE}})."
            raise CollateError(explain(key, shape_of(value), said, remedy))
        return self.of_tokens(key, value, (rule or TOKENS).dim)

    def of_tokens(self, key: str, value: Tensor, dim: int) -> Tensor:
        """Return this rank's tokens along `dim`. Raises if that dimension is not S wide."""
        B, S = self.shape
        if value.ndim == 1 and dim == 1 and value.shape[0] == B:  # one entry a row: the label of a classifier
            return value
        _refuse_sparse(key, value)
        dim = min(dim, value.ndim - 1) % max(value.ndim, 1)
        if value.ndim and value.shape[dim] == S and (value.ndim > 1 or B == 1):
            return _take_runs(value, dim, self.tokens)
        rule = f"Dimension {dim} is tokens, and the batch is {[B, S]} (rows, width)."
        remedy = f"Pad it with the batch, or pass BatchAdapter(keys={{**KEYS, {key!r}: SAMPLE}}) if it is not per token."
        raise CollateError(explain(key, shape_of(value), rule, remedy))

    def of_mask(self, key: str, value: Any, recurrent: bool = False) -> Any:
        """Split a 2D mask like the tokens, a dense one by query rows, a mapping by layer kind entry by entry."""
        if value is None:
            return None
        if isinstance(value, Mapping):
            return {kind: self.of_mask(f"{key}[{kind!r}]", part, kind in _RECURRENT_KINDS) for kind, part in value.items()}
        if not isinstance(value, Tensor) or value.is_nested or value.layout is not torch.strided:
            rule = "Under context parallelism a mask is None, 2D, dense, or a mapping of those by layer kind."
            remedy = "Build a BlockMask for the shard itself (torch's create_cp_block_mask)."
            raise UnsupportedFormError(explain(key, type(value).__name__, rule, remedy))
        if recurrent:
            return self.of_tokens(key, value, 1)
        B, S = self.shape
        if value.shape == (B, S):
            if B == S > 1 and value.is_floating_point():
                rule = "With as many rows as tokens an additive one is a [B, S] padding mask or an [S, S] attention mask."
                remedy = "Pass attention_mask_2d, or the attention mask as [1, 1, S, S]."
                raise AmbiguousMaskError(explain(key, shape_of(value), rule, remedy))
            return _take_runs(value, 1, self.tokens)
        if value.ndim == 4 and tuple(value.shape[-2:]) == (1, S) != (S, S):  # one row for every query
            return value
        if value.ndim not in (2, 3, 4) or tuple(value.shape[-2:]) != (S, S):
            rule = f"Before the split a mask is [{B}, {S}], or dense with {S} query rows and {S} keys."
            remedy = "Split the whole mask, or split without it and build dense(segments, rows=query_rows(S, cp))."
            raise CollateError(explain(key, shape_of(value), rule, remedy))
        return _take_runs(value, value.ndim - 2, self.tokens)


def _refuse_sparse(name: str, x: Tensor) -> None:
    if x.layout is not torch.strided:
        got = str(x.layout).removeprefix("torch.")
        raise CollateError(explain(name, got, "A split takes tokens from dense tensors.", "Pass x.to_dense()."))


def _take_runs(x: Tensor, dim: int, runs: tuple[Run, ...]) -> Tensor:
    """Return the runs of `x` along `dim` (not negative), in their order, copied; gradients flow through it."""
    if runs == ((0, x.shape[dim]),):
        return x
    if len(runs) > _FEW_RUNS or not runs:
        return x.index_select(dim, indices(runs).to(x.device))
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in runs], dim)


@checked
def cu_seqlens_of(batch: Mapping[str, Any], segments: Segments | None = None) -> Tensor | None:
    """Return where the documents of a flat row stand: the offsets that `split_batch` and `gather_sequence` take.

    These are the offsets of padded sequences if the batch has them (`cu_seqlens_padded` ...), else `cu_seq_lens_q`,
    `cu_seqlens` ..., else those of the segments, if they are a flat row without padding. With padding the segments do not
    say to which document it belongs, and the result is None.

    >>> cu_seqlens_of({"cu_seqlens": [0, 3, 5], "cu_seqlens_padded": [0, 4, 8]}).tolist()
    [0, 4, 8]
    """
    sources = Sources.of(batch)
    if sources.offsets:
        name, physical, _ = physical_and_real_offsets(sources.offsets)
        value = sources.get(name)
        return value if isinstance(value, Tensor) and value.ndim == 1 else torch.from_numpy(physical)
    if segments is not None and segments.shape[0] == 1 and segments.padding_side == "none":
        return segments.cu_seqlens
    return None


def _as_tensor(key: str, value: Any, rule: Key | None, shape: tuple[int, int]) -> Any:
    """Return a list or array of tokens as a tensor; under an unknown key only numbers whose shape begins `[B, S]`."""
    if not isinstance(value, (list, tuple, np.ndarray)):
        return value
    if rule is not None:
        return value if rule.share == "replicate" else host_tensor(key, value)
    with suppress(CollateError):
        held = host_tensor(key, value)
        return held if isinstance(value, np.ndarray) or tuple(held.shape[:2]) == shape else value
    return value


def _jagged_cu_seqlens(x: Tensor, cp: ContextParallel) -> Tensor:
    """Return the offsets of a jagged tensor. Raises for a layout that does not share out each document."""
    if not cp.documents:
        rule = f"A jagged tensor is shared out document by document; the layout is {cp.layout}."
        remedy = "Use document_zigzag, or split the padded or flat tensor."
        raise UnsupportedFormError(explain("jagged tensor", shape_of(x.values()), rule, remedy))
    return cast(Tensor, cast(Any, x).offsets())


# --- gather


@uncompiled
@checked
def gather_sequence(
    output: Tensor,
    cp: ContextParallel,
    segments: Segments | None = None,
    *,
    dim: int = 1,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    loss: Loss = "same",
) -> Tensor:
    """Return the whole output, in order, on every rank, from all shards. Undoes `split_batch` and `split_tensor`.

    `dim` is the sequence, 1 in `[B, S / size, ...]` (0 in Megatron's `[S / size, B, H]`); a jagged output
    `[N, j, ...]` comes back jagged. `segments`, of the whole batch, are checked against the result, which
    `last_token`, `per_sequence` and `to_nested` then take. `document_zigzag` needs the offsets the batch was split
    by: `cu_seqlens=cu_seqlens_of(shard)`.

    Say how the ranks use the whole row, because the gradient depends on it:

    * `loss="same"`: every rank computes the same loss from it (pooling, rewards, a replicated head). Each shard gets
      its part of that one gradient, without communication; add parameter gradients up over the group.
    * `loss="local"`: each rank computes something of its own from it (its queries against gathered keys). Each shard
      gets the sum over ranks, by one reduce-scatter: the gradient of the sum of the ranks' losses.

    >>> gather_sequence(torch.tensor([[4, 5, 6]]), ContextParallel(size=1, rank=0)).tolist()  # README runs it on two ranks
    [[4, 5, 6]]
    """
    shard, offsets = output, cu_seqlens
    with turn_of(cp):
        with ranks_agree(cp, call="gather") as facts:  # whatever is wrong on one rank, it says so before the others wait
            dim = dimension("output", output, dim)
            if loss not in get_args(Loss):
                raise not_one_of("loss", loss, get_args(Loss), "Pass 'same' if every rank computes the same loss from it.")
            if output.is_nested:
                shard, dim, offsets = cast(Any, output).values(), 0, _jagged_cu_seqlens(output, cp) * cp.size
            if segments is not None:
                _check_shape(output, shard.shape, cp, segments, dim)
            offsets = None if offsets is None else as_offsets("cu_seqlens", offsets).tolist()  # one look at the device
            if segments is not None and offsets is not None and segments.shape[0] == 1:
                check_cuts("cu_seqlens", np.array(offsets), segments)
            facts |= {"output": shape_of(shard), "dim": str(dim), "loss": loss} | batch_facts({}, segments)
            facts["gradient"] = str(loss == "local" and shard.requires_grad and torch.is_grad_enabled())
            facts["documents"] = partial(digest_offsets, offsets)
            pieces = row_pieces(shard.shape[dim] * cp.size, cp, offsets)
            if cp.size > 1:
                group_of(cp.group, cp.size, cp.rank)
        if cp.size > 1:
            shard = _in_order(_all_gather(shard, cp, loss, str(facts.get("number"))).unbind(0), pieces, dim)
    if not output.is_nested:
        return shard
    return to_nested(shard[None], segments) if segments else _from_jagged(shard, torch.tensor(offsets, device=shard.device))


def _check_shape(output: Tensor, shard: torch.Size, cp: ContextParallel, segments: Segments, dim: int) -> None:
    rows = 1 if output.is_nested else shard[0] if dim == 1 else segments.shape[0]
    if (rows, shard[dim] * cp.size) != segments.shape:
        rule = f"The segments are those of a batch {list(segments.shape)} (rows, width), shared out over {cp.size} ranks."
        remedy = f"Pass the Segments of the unsplit rows, {[rows, shard[dim] * cp.size]}."
        raise CollateError(explain("output", shape_of(output), rule, remedy))


def _in_order(shards: Sequence[Tensor], pieces: list[tuple[int, int, int, int]], dim: int) -> Tensor:
    if 0 < len(pieces) <= _FEW_PIECES:
        return torch.cat([shards[rank].narrow(dim, at, length) for _, rank, at, length in pieces], dim)
    size = shards[0].shape[dim]
    order = indices([(rank * size + at, rank * size + at + length) for _, rank, at, length in pieces])
    return torch.cat(list(shards), dim).index_select(dim, order.to(shards[0].device))


def _all_gather(output: Tensor, cp: ContextParallel, loss: Loss, number: str) -> Tensor:
    if output.dtype == torch.bool:  # not every backend carries bool
        return _all_gather(output.view(torch.uint8), cp, loss, number).view(torch.bool)
    shards: Tensor = _AllGather.apply(output, cp, loss, number)  # type: ignore[no-untyped-call]
    return shards


class _AllGather(torch.autograd.Function):
    """Gather `[...]` on each rank to `[size, ...]` on all of them."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, cp: ContextParallel, loss: Loss, number: str) -> Tensor:
        ctx.cp, ctx.loss, ctx.number = cp, loss, number
        shards = shard.new_empty((cp.size, *shard.shape))
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed both
        all_gather(shards.flatten(), shard.contiguous().flatten(), group=group_of(cp.group))
        return shards

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        """Return this rank's part of one gradient (`same`), or the sum over ranks (`local`): all are at one gather."""
        (grad,) = grads
        if ctx.loss == "same":
            return grad[ctx.cp.rank], None, None, None
        total = torch.empty_like(grad[0], memory_format=torch.contiguous_format)
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        with turn_of(ctx.cp):
            with ranks_agree(ctx.cp, call="backward") as facts:
                facts |= {"the gather": ctx.number, "gradient": shape_of(grad)}
            reduce_scatter(total.view(-1), grad.contiguous().flatten(), group=group_of(ctx.cp.group))
        return total, None, None, None


# --- documents of a flat row, each padded to what the ranks can share out


@checked
def pad_documents(
    batch: Mapping[str, Any],
    cp: ContextParallel | None = None,
    *,
    multiple: int = 1,
    max_sequences: int | None = None,
    segments: Segments | None = None,
    pad_token_id: int = 0,
    keys: Mapping[str, Key] = KEYS,
) -> tuple[dict[str, Any], Segments]:
    """Return a flat row `[1, S]`, each document padded to `multiple` and `cp.document_multiple`, the row to `cp.multiple`.

    The last document takes the alignment tail, so no document is invented. Adds `cu_seqlens` (real) and
    `cu_seqlens_padded` (where documents stand); `cu_seq_lens_q/k` and `max_length_q/k` become the padded ones, since
    their kernels have no others. `segments` tell which tokens are real, where the row already holds padding; those
    returned tell how many places are padding now (`num_padding`, `padding_share`).

    `max_sequences` is for graphs and compilers, which want one shape: the offsets are those of so many documents, and
    `max_length_q/k` is the width. The row stays as wide as it came, or grows, and its rest is cut into the missing ones.
    Documents of 3 and 2 on 2 zigzag ranks, or with `multiple=4` on one; with `max_sequences=4` in a row of 16::

        1 1 1 2 2   ->   1 1 1 0 2 2 0 0                     cu_seqlens 0 3 5      cu_seqlens_padded 0 4 8
                         1 1 1 0 2 2 0 0 0 0 0 0 0 0 0 0     cu_seqlens 0 3 5 5 5  cu_seqlens_padded 0 4 8 12 16

    Padding stands behind its document, which is exact for causal layers. A multiple of the chunk (64) leaves recurrent
    kernels no shorter chunk at a document's end, where some are wrong (flash-linear-attention-npu issues 367, 544, 733).

    >>> row = {"input_ids": torch.tensor([[1, 2, 3, 4, 5]]), "cu_seq_lens_q": torch.tensor([0, 3, 5])}
    >>> batch, segments = pad_documents(row, multiple=4)
    >>> batch["input_ids"].tolist(), batch["cu_seqlens_padded"].tolist(), segments.num_padding
    ([[1, 2, 3, 0, 4, 5, 0, 0]], [0, 4, 8], 3)
    """
    check_keys(keys)
    sources = Sources.of(batch)
    segments = _flat_row(sources, segments)
    each = lcm(whole_number("multiple", multiple, least=1), 1 if cp is None else cp.document_multiple)
    places = _places(segments, each, lcm(each, 1 if cp is None else cp.multiple), max_sequences)
    plan = _Plan.of(segments, places)
    fills = {"pad": whole_number("pad_token_id", pad_token_id, least=-(1 << 63)), "pad_type": 0, "ignored": -100}
    keys = {key: replace(rule, fill=fills[rule.fill]) if rule.fill in fills else rule for key, rule in keys.items()}
    out = {key: plan.fill(key, value, keys.get(key)) for key, value in sources.items()}
    longest = max(places, default=0) if max_sequences is None else sum(places)
    out |= _boundaries(sources, segments.sequence_lengths, places, longest)
    if len(places) > segments.num_sequences:
        # their positions and numbers, as their offsets say, behind those of the others
        own, tail = offsets_of(plan.segments, places), sum(places[: plan.segments.num_sequences])
        for key in (*of_kind(sources, "positions"), *sources.named["sequence_index"]):
            if isinstance(out[key], Tensor) and out[key].ndim == 2:
                numbers = own["seq_idx" if key in sources.named["sequence_index"] else "position_ids"]
                out[key][:, tail:] = numbers[:, tail:].to(out[key])
    return out, plan.segments


def _flat_row(batch: Sources, segments: Segments | None) -> Segments:
    """Return the Segments of one flat row. Raises for other rows, and for keys that hold places of tokens and cannot be
    built again here."""
    for key, full in batch.masks.items():
        if full.ndim > 2:
            remedy = "Leave it out and build dense(segments) from what pad_documents returns."
            raise UnsupportedFormError(explain(key, shape_of(full), "pad_documents cannot pad a dense mask.", remedy))
    for key in of_kind(batch, "offsets"):
        if KEYS[key].role is None and batch[key] is not None:
            remedy = "Leave it out, and build it from what pad_documents returns."
            raise CollateError(explain(key, shape_of(batch[key]), "It holds offsets of the row before padding.", remedy))
    if segments is None:
        segments = agreed(batch, polarity=None, pattern=None, padding_free=True)
    else:
        check_known(batch, segments)
    if segments.shape[0] != 1 or segments.hole_rows:
        rule = "pad_documents needs one flat row [1, S], the padding of each document at its end."
        raise CollateError(explain("segments", repr(segments), rule, "Call unpad() first."))
    return segments


def _places(segments: Segments, each: int, whole: int, count: int | None) -> list[int]:
    """Return the places of each document, a multiple of `each`; their sum is a multiple of `whole`.

    With a `count` there are so many documents, and those that are missing have places too: recurrent kernels refuse or
    misread an empty sequence (fla up to 0.5.0, and Ascend's `recompute_w_u_fwd_tiling_processor.h:360`).
    """
    places = [-(-length // each) * each for length in segments.sequence_lengths]
    missing = 0 if count is None else whole_number("max_sequences", count, least=1) - len(places)
    if missing < 0:
        rule, remedy = f"The offsets are for {count} sequences.", "Raise max_sequences, or put fewer samples in a batch."
        raise CollateError(explain("max_sequences", f"{len(places)} sequences", rule, remedy))
    width = max(sum(places) + missing * each, 0 if count is None else segments.shape[1])
    width += -width % whole
    check_places("multiple", width, "Pass a smaller multiple (a chunk is 64), or fewer max_sequences.")
    rest = width - sum(places)
    if not missing:
        return [*places[:-1], places[-1] + rest] if places else []
    share, more = divmod(rest // each, missing)  # the largest last
    return [*places, *((share + (n >= missing - more)) * each for n in range(missing))]


def _boundaries(batch: Sources, lengths: Sequence[int], places: Sequence[int], longest: int) -> dict[str, Any]:
    """Return the batch's offsets and lengths as those of the new row, with `cu_seqlens` and `cu_seqlens_padded`."""
    lengths = [*lengths, *[0] * (len(places) - len(lengths))]
    real, padded = (torch.tensor([0, *accumulate(sizes)], dtype=torch.int32) for sizes in (lengths, places))
    bridge = "cu_seqlens_unpadded" in batch.named["offsets"]  # Megatron-Bridge: beside it the others are padded
    of_role: dict[Role, Tensor] = {"longest": torch.tensor(longest), "tail": torch.tensor(0)}
    of_role |= {"offsets": padded if bridge else real, "lengths": real.diff()}
    of_role |= {"padded_offsets": padded, "padded_lengths": padded.diff()}
    out: dict[str, Any] = {}
    for key, usual in ((key, usual) for role, usual in of_role.items() for key in batch.named[role]):
        # kernels that take cu_seq_lens_q have no padded ones beside it
        value = real if key.endswith("unpadded") else padded if key.startswith("cu_seq_lens") else usual
        held = batch[key]
        out[key] = value.to(held.device) if isinstance(held, Tensor) else value if value.ndim else value.item()
    return out | {"cu_seqlens": of_role["offsets"], "cu_seqlens_padded": padded}


@dataclass(frozen=True, slots=True)
class _Plan:
    """The place in the old row that fills each place of the new row. Legend: S old width, W new width."""

    width: int  # S
    source: Tensor  # int64 [W]: a place in the old row; for padding, that of the last real token before it
    steps: Tensor  # int64 [W]: 0 for a real token, k for the k-th padding behind it
    segments: Segments

    @classmethod
    def of(cls, segments: Segments, places: Sequence[int]) -> _Plan:
        """Return the plan of N documents with these places: the documents of the Segments, then empty ones."""
        places_N = np.array(places, np.int64)
        lengths_N, starts_N = np.zeros((2, len(places)), np.int64)
        lengths_N[: segments.num_sequences] = segments.sequence_lengths
        starts_N[: segments.num_sequences] = [start for _, start, _ in segments.spans]
        number_W = np.repeat(np.arange(len(places_N)), places_N)
        place_W = np.arange(len(number_W))
        at_W = place_W - (np.cumsum(places_N) - places_N)[number_W]
        real_W = at_W < lengths_N[number_W]
        source_W = np.maximum.accumulate(np.where(real_W, starts_N[number_W] + at_W, 0))
        steps_W = place_W - np.maximum.accumulate(np.where(real_W, place_W, -1))
        ids = ((number_W + 1) * real_W)[None]
        return cls(segments.shape[1], torch.from_numpy(source_W), torch.from_numpy(steps_W), Segments(ids))

    def fill(self, key: str, value: Any, rule: Key | None) -> Any:
        """Return a key of the batch as the new row has it. A value without a token dimension comes back as it is."""
        held = _as_tensor(key, value, rule, (1, self.width))
        sized = isinstance(held, Tensor) and not held.is_nested
        rule = rule or (TOKENS if sized and tuple(held.shape[:2]) == (1, self.width) else None)
        if not isinstance(held, Tensor) or rule is None or rule.share == "replicate":
            return value
        targets = rule.role == "labels" and held.is_floating_point()
        if rule.or_sample and sized and (targets or held.ndim == 1 or held.shape[1:2] == (1,) != (self.width,)):
            return value  # of whole samples: classes [B], or float targets
        dim = min(1 if rule.share == "rows" else rule.dim, held.ndim - 1) % max(held.ndim, 1)
        if not is_plain(held) or (held.is_floating_point() and held.element_size() == 1):
            raise CollateError(explain(key, shape_of(held), "torch cannot index it.", "Pass it dense, in int64 or float32."))
        if not held.ndim or held.shape[dim] != self.width:
            raise wrong_shape_error(key, shape_of(held), (1, self.width))
        held = held if self.width else held.new_zeros([1 if d == dim else n for d, n in enumerate(held.shape)])
        taken = held.index_select(dim, self.source.to(held.device))
        steps = self.steps.to(held.device).view([-1 if d == dim else 1 for d in range(held.ndim)])
        if rule.fill == "next":
            return taken + steps.to(held.dtype)
        if isinstance(rule.fill, str):
            return taken
        check_held(key, rule.fill, held.dtype)
        return taken.where(steps == 0, held.new_full((), rule.fill))
