"""Split: every key of a batch, by its row of `KEYS`, into what one rank holds.

Costs one copy a key. Legend: B batch, S width, Q query rows, K keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import as_offsets
from collate_npu.checked import checked, dimension
from collate_npu.errors import AmbiguousMaskError, CollateError, UnsupportedFormError, explain, shape_of
from collate_npu.keys import KEYS, SAMPLE, TOKENS, Key, of_kind, with_role
from collate_npu.masks.find import check_known
from collate_npu.masks.offsets import kept_apart
from collate_npu.masks.places import check_cuts
from collate_npu.masks.sources import Sources
from collate_npu.parallel.agreement import batch_facts, digest_offsets, ranks_agree, uncompiled
from collate_npu.parallel.documents import as_tensor, cu_seqlens_of, jagged, jagged_cu_seqlens
from collate_npu.parallel.layout import ContextParallel, Run, indices, query_runs, token_runs
from collate_npu.segments import Segments

_RECURRENT_KINDS = ("linear_attention", "conv")
_FEW_RUNS = 16
_FEW_BYTES = 1 << 19
_PLAIN = frozenset((torch.int64, torch.int32, torch.bool, torch.float32))


@uncompiled
@checked
def split_batch(
    batch: Mapping[str, Any],
    cp: ContextParallel,
    *,
    segments: Segments | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    keys: Mapping[str, Key] = KEYS,
) -> dict[str, Any]:
    """This rank's batch: per key as `keys` says, keys in the same order. `gather_sequence` undoes it, key by key.

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
        if segments is not None and sources.named["tokens"] and not _is_nested(sources[sources.named["tokens"][0]]):
            check_known(sources, segments)
        return share_out(sources, cp, segments=segments, cu_seqlens=cu_seqlens, keys=keys)


@uncompiled
def share_out(
    batch: Mapping[str, Any],
    cp: ContextParallel,
    *,
    segments: Segments | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    keys: Mapping[str, Key] = KEYS,
) -> dict[str, Any]:
    """`split_batch` of a batch that is known to be that of its Segments."""
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
    """This rank's part of one tensor along `dim`. `gather_sequence` and `join_shards` undo it.

    A jagged tensor `[N, j, ...]` is split document by document and stays jagged (layouts `document_*`).

    >>> import torch
    >>> split_tensor(torch.arange(8)[None], ContextParallel(2, 1)).tolist()
    [[2, 3, 4, 5]]
    """
    if x.is_nested:
        offsets = jagged_cu_seqlens(x, cp)
        return jagged(take_runs(x.values(), 0, token_runs(int(offsets[-1]), cp, offsets)), offsets // cp.size)
    _refuse_sparse("x", x)
    dim = dimension("x", x, dim)
    return take_runs(x, dim, token_runs(x.shape[dim], cp, cu_seqlens))


def _shape(batch: Sources, segments: Segments | None) -> tuple[int, int]:
    """Rows and width, off the first key that has them; the Segments must speak of the same."""
    tokens, positions = with_role(batch, "tokens"), of_kind(batch, "positions")
    for key in (*tokens, *positions, *with_role(batch, "labels", "segment_ids", "keep")):
        value = batch[key]
        if _is_nested(value):
            B, S = 1, value.values().shape[0]
        else:
            size = () if value is None else value.shape if isinstance(value, Tensor) else batch.array(key).shape
            if len(size) < 2:
                continue
            B, S = size[-2:] if KEYS[key].kind == "positions" else size[:2]
        if segments is not None and segments.shape != (B, S):
            rule = f"The segments speak of {list(segments.shape)} (rows, width)."
            raise CollateError(explain(key, shape_of(value), rule, "Pass the unsplit batch and its own Segments."))
        return B, S
    if segments is not None:
        return segments.shape
    rule = "The width is read off input_ids, positions, labels or a mask of tokens."
    raise CollateError(explain("batch", f"the keys {sorted(batch)}", rule, "Pass segments= with the batch."))


def _offsets(
    batch: Sources, shape: tuple[int, int], cp: ContextParallel, segments: Segments | None, given: Any
) -> list[int] | None:
    """Where documents stand: as given, which must fit what the batch says, or by the batch."""
    if given is None:
        found = cu_seqlens_of(batch, segments if cp.documents else None) if cp.documents or shape[0] == 1 else None
        return None if found is None else as_offsets("cu_seqlens", found).tolist()
    offsets = as_offsets("cu_seqlens", given, shape[1] if shape[0] == 1 else None)
    if segments is not None and shape[0] == 1:
        check_cuts("cu_seqlens", offsets, segments)
    if batch.offsets:
        name, held, _ = kept_apart(batch.offsets)
        real = held[-1] < offsets[-1] and len(held) == len(offsets) and (np.diff(held) <= np.diff(offsets)).all()
        if not real and not np.array_equal(held, offsets):
            rule = f"{name} of the batch is {held[:16].tolist()}."
            remedy = "Pass the offsets by which documents stand in this row, or none: the batch has them."
            raise CollateError(explain("cu_seqlens", str(offsets.tolist())[:80], rule, remedy, more="sources-disagree"))
    return offsets.tolist()  # type: ignore[no-any-return]


def _is_nested(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_nested


@dataclass(frozen=True, slots=True)
class _Shard:
    """What one rank holds of a batch `[B, S]`."""

    cp: ContextParallel
    shape: tuple[int, int]
    tokens: tuple[Run, ...]
    queries: tuple[Run, ...]

    @classmethod
    def of(cls, cp: ContextParallel, shape: tuple[int, int], cu_seqlens: Sequence[int] | None) -> _Shard:
        """Raises `UnsupportedFormError` where the layout takes one flat row, or would cut across its sequences."""
        B, S = shape
        if cp.documents and B != 1:
            rule = f"{cp.layout} shares out the documents of one flat row [1, S]."
            raise UnsupportedFormError(explain("batch", f"{B} rows", rule, "Collate padding_free, or use layout='zigzag'."))
        if cp.size > 1 and cp != cp.for_documents() and cu_seqlens is not None and B == 1 and len(set(cu_seqlens)) > 2:
            rule = f"{cp.layout} would cut across documents; kernels that read cu_seqlens share out each one (TE thd)."
            got = f"{len(cu_seqlens) - 1} documents in one flat row"
            raise UnsupportedFormError(explain("cu_seqlens", got, rule, "Use cp.for_documents() for padding-free batches."))
        return cls(cp, shape, token_runs(S, cp, cu_seqlens), query_runs(S, cp, cu_seqlens))

    def of_key(self, key: str, value: Any, rule: Key | None) -> Any:
        """What this rank holds of one key, by its row of `KEYS`."""
        if rule is not None and rule.share == "rows":
            return self.of_mask(key, value)
        if rule is not None and rule.share == "replicate":
            return value
        value = as_tensor(key, value, rule, self.shape)
        if not isinstance(value, Tensor):
            return value
        if value.is_nested:
            return split_tensor(value, self.cp)
        rule = rule or self._guess(key, value)
        whole = rule.share == "replicate" or (rule.share == "scope" and self.cp.mask_2d == "global")
        return value if whole else self.of_tokens(key, value, rule.dim)

    def of_tokens(self, key: str, value: Tensor, dim: int) -> Tensor:
        """This rank's tokens along `dim`; raises where that dimension is not S wide."""
        B, S = self.shape
        if value.ndim == 1 and dim == 1 and value.shape[0] == B:  # one entry a row: the label of a classifier
            return value
        _refuse_sparse(key, value)
        dim = min(dim, value.ndim - 1) % max(value.ndim, 1)
        if value.ndim and value.shape[dim] == S and (value.ndim > 1 or B == 1):
            return take_runs(value, dim, self.tokens)
        rule = f"Dimension {dim} is tokens, and the batch is {[B, S]} (rows, width)."
        remedy = f"Pad it with the batch, or pass keys={{**KEYS, {key!r}: SAMPLE}} if it is not per token."
        raise CollateError(explain(key, shape_of(value), rule, remedy))

    def of_mask(self, key: str, value: Any, recurrent: bool = False) -> Any:
        """A 2D mask by its scope, a dense one by query rows, a mapping by layer kind entry by entry."""
        if value is None:
            return None
        if isinstance(value, Mapping):
            return {kind: self.of_mask(f"{key}[{kind!r}]", part, kind in _RECURRENT_KINDS) for kind, part in value.items()}
        if not isinstance(value, Tensor) or value.is_nested or value.layout is not torch.strided:
            rule = "Under context parallelism a mask is None, 2D, dense, or a mapping of those by layer kind."
            remedy = "Build a BlockMask for the shard itself (torch's create_cp_block_mask)."
            raise UnsupportedFormError(explain(key, type(value).__name__, rule, remedy))
        if recurrent:
            return value if self.cp.mask_2d == "global" else self.of_tokens(key, value, 1)
        if tuple(value.shape) == self.shape:
            return self._of_2d(key, value)
        B, S = self.shape
        if value.ndim == 4 and tuple(value.shape[-2:]) == (1, S) != (S, S):  # one row for every query
            return value
        if value.ndim not in (2, 3, 4) or tuple(value.shape[-2:]) != (S, S):
            rule = f"Before the split a mask is [{B}, {S}], or dense with {S} query rows and {S} keys."
            remedy = "Split the whole mask, or split without it and build dense(segments, rows=query_rows(S, cp))."
            raise CollateError(explain(key, shape_of(value), rule, remedy))
        return take_runs(value, value.ndim - 2, self.queries)

    def _of_2d(self, key: str, value: Tensor) -> Tensor:
        if value.shape[0] == value.shape[1] > 1 and value.is_floating_point():
            rule = "With as many rows as tokens an additive one is a [B, S] padding mask or an [S, S] attention mask."
            remedy = "Pass attention_mask_2d, or the attention mask as [1, 1, S, S]."
            raise AmbiguousMaskError(explain(key, shape_of(value), rule, remedy))
        # After Ulysses' all-to-all attention sees every token of the row, and so needs the padding of every token.
        whole = self.cp.mask_2d == "global" or self.cp.ulysses_size > 1
        return value if whole else take_runs(value, 1, self.tokens)

    def _guess(self, key: str, value: Tensor) -> Key:
        if tuple(value.shape[:2]) == self.shape:
            return TOKENS
        if self.shape[1] not in value.shape:
            return SAMPLE
        rule = f"A key that KEYS does not list is per token if it begins {list(self.shape)}: the width stands elsewhere."
        remedy = f"Say what it is: keys={{**KEYS, {key!r}: Key(kind='tokens', dim=...)}}, or SAMPLE."
        raise CollateError(explain(key, shape_of(value), rule, remedy))


def _refuse_sparse(name: str, x: Tensor) -> None:
    if x.layout is not torch.strided:
        got = str(x.layout).removeprefix("torch.")
        raise CollateError(explain(name, got, "Tokens are taken out of dense tensors.", "Pass x.to_dense()."))


def take_runs(x: Tensor, dim: int, runs: tuple[Run, ...]) -> Tensor:
    """The runs of `x` along `dim` (not negative), in their order, as a tensor of its own; autograd flows."""
    if runs == ((0, x.shape[dim]),):
        return x
    if len(runs) == 1:
        return x.narrow(dim, runs[0][0], runs[0][1] - runs[0][0]).clone(memory_format=torch.contiguous_format)
    if len(runs) > _FEW_RUNS:
        return x.index_select(dim, indices(runs).to(x.device))
    runs = runs or ((0, 0),)
    if _copies_faster_by_numpy(x, dim, runs):
        values, at = x.numpy(), [(*(slice(None),) * dim, slice(*run)) for run in runs]
        return torch.from_numpy(np.concatenate([values[places] for places in at], dim))
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in runs], dim)


def _copies_faster_by_numpy(x: Tensor, dim: int, runs: tuple[Run, ...]) -> bool:
    """numpy's copy starts faster; torch's has threads, which help from half a megabyte on."""
    if x.dtype not in _PLAIN or not x.is_cpu or x.requires_grad or not x.is_contiguous():
        return False
    taken = sum(stop - start for start, stop in runs)
    return torch.get_num_threads() == 1 or x.nbytes * taken < _FEW_BYTES * x.shape[dim]
