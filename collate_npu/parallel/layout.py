"""Layouts: which tokens a rank holds, as a few runs `[start, stop)` of the row, in the order of the shard.

Also the process groups of these ranks, and which layouts are right for recurrent layers. The code here reads no tensor of a
batch; the cost is O(runs). Eight tokens on two ranks::

    zigzag        0 1 . . . . 6 7   |  . . 2 3 4 5 . .      chunks r and 2 * size - 1 - r: causal work is level
    contiguous    0 1 2 3 . . . .   |  . . . . 4 5 6 7
    document_...  zigzag inside each document of one flat row (padding-free batches)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import timedelta
from itertools import pairwise
from math import lcm
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from collate_npu.arrays import OF_A_BATCH, check_places, whole_number
from collate_npu.errors import CollateError, UnsupportedFormError, explain, explain_rows
from collate_npu.masks.forms import check_cuts
from collate_npu.segments import Segments, as_offsets
from collate_npu.validation import checked

_GLOO: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
"""The groups that `gloo_group` made, by their world and their ranks."""


def group_of(group: Any, size: int | None = None, rank: int | None = None) -> Any:
    """Return the process group of a DeviceMesh, or the group itself. Raises `CollateError` if it is missing, or if this
    process is not rank `rank` of `size` in it."""
    remedy = "Pass group=torch.distributed.group.WORLD, a group of new_group(), or use ContextParallel.from_mesh(mesh)."
    if group is None:
        raise CollateError(explain("group", "None", "Gathering needs the process group of these ranks.", remedy))
    if not dist.is_available() or not dist.is_initialized():
        rule = "torch.distributed is not initialised in this process."
        raise CollateError(explain("group", type(group).__name__, rule, "Call init_process_group() (torchrun) first."))
    group = mesh_group(group)
    held, here = dist.get_world_size(group), dist.get_rank(group)
    if here < 0:
        raise CollateError(explain("group", "a group without this rank", "A rank gathers with its own group.", remedy))
    if size is not None and (held, here) != (size, rank):
        got, rule = f"size {size}, rank {rank}", f"The group has {held} ranks and this process is its rank {here}."
        raise CollateError(explain("ContextParallel", got, rule, "Use ContextParallel.from_group."))
    return group


def mesh_group(group: Any) -> Any:
    """Return the process group of a DeviceMesh of one dimension, or the group itself."""
    if isinstance(group, dist.ProcessGroup) or not hasattr(group, "mesh_dim_names"):
        return group
    if group.ndim == 1:
        return group.get_group()
    rule = "A context-parallel mesh has one dimension."
    raise CollateError(explain("DeviceMesh", f"{group.ndim} dimensions", rule, "Pass mesh['cp']."))


def timeout_of(group: Any) -> timedelta:
    """Return how long ranks of this group wait for each other: the timeout of `init_process_group` or `new_group`."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if isinstance(timeout := getattr(options, "_timeout", None), timedelta):
            return timeout
    return timedelta(minutes=10)  # as long as the collectives of NCCL wait by default


def gloo_group(group: Any = None) -> Any:
    """Return the Gloo group that carries Python objects between the ranks of `group`, by default those of `data_group`.

    It is made at the first call, which every rank of the group must make, and kept. A group whose CPU side is Gloo is
    returned as it is. Raises `CollateError` where there is no group, or no Gloo: objects never go to HCCL or NCCL instead.

    >>> dist.all_gather_object(values, {"loss": 0.5}, group=gloo_group())  # doctest: +SKIP
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = data_group()
    group = group_of(group)
    if is_gloo(group):
        return group
    if not dist.is_gloo_available():
        rule = "Python objects travel by Gloo, never by HCCL or NCCL, and this torch is built without it."
        raise CollateError(explain("group", dist.get_backend(group), rule, "Install a torch that has Gloo."))
    ranks = tuple(dist.get_process_group_ranks(group))
    made = _GLOO.setdefault(dist.group.WORLD, {})
    if ranks not in made:
        # torch hands the device of init_process_group(device_id=) on to each new group, and Gloo has no backend for it
        # ("No backend type associated with device type npu")
        world: Any = dist.group.WORLD
        device, world.bound_device_id = getattr(world, "bound_device_id", None), None
        try:
            made[ranks] = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        finally:
            world.bound_device_id = device
    return made[ranks]


def data_group() -> Any:
    """Return the ranks that share out the data of a step: under Megatron those of data and context parallelism, else all.

    A context-parallel rank holds a part of each row, so whoever counts tokens or losses needs both. It is Megatron's own
    Gloo group if there is one (`get_data_parallel_group_gloo`, parallel_state.py:1442-1458 of megatron-core 0.16.1).
    """
    state = sys.modules.get("megatron.core.parallel_state")  # an import here could come before MindSpeed's patches
    if state is None or not state.model_parallel_is_initialized():
        return dist.group.WORLD
    with suppress(AssertionError):  # create_gloo_process_groups=False
        if own := state.get_data_parallel_group_gloo(with_context_parallel=True):
            return own
    return state.get_data_parallel_group(with_context_parallel=True)


def is_gloo(group: Any) -> bool:
    """True if CPU objects of this group travel by Gloo (`gloo`, or `cpu:gloo,npu:hccl`)."""
    config = dict(part.split(":") for part in str(dist.get_backend_config(group)).split(",") if ":" in part)
    return config.get("cpu") == "gloo"


Layout = Literal["zigzag", "contiguous", "document_zigzag"]
Run = tuple[int, int]


@checked
@dataclass(frozen=True, slots=True)
class ContextParallel:
    """One rank's place in a group of `size` ranks that share every row of the batch.

    `from_group`, `from_mesh` and `from_megatron` read size and rank from a group.

    * `size`: the number of ranks that share a row.
    * `rank`: the number of this rank among them.
    * `layout`: which rank holds which tokens: "zigzag", "document_zigzag" (for flat rows), or "contiguous".
    * `tensor_parallel`: the number of ranks that split this rank's tokens again (Megatron's sequence_parallel).
    * `group`: their process group, or DeviceMesh of one dimension. Without it rows can be split but not gathered.

    >>> cp = ContextParallel(size=2, rank=0)
    >>> token_runs(8, cp), token_runs(8, cp.with_rank(1))
    (((0, 2), (6, 8)), ((2, 6),))
    >>> cp.multiple, cp.min_multiple, ContextParallel(2, 0, tensor_parallel=4).multiple
    (4, 4, 16)
    >>> cp.for_documents().layout, cp.for_documents().documents, cp.for_documents().document_multiple
    ('document_zigzag', True, 4)
    """

    size: int
    rank: int
    _: KW_ONLY
    layout: Layout = "zigzag"
    tensor_parallel: int = 1
    group: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("size", "tensor_parallel"):
            whole_number(name, getattr(self, name), least=1)
        if not 0 <= whole_number("rank", self.rank, least=-self.size) < self.size:
            rule = f"Ranks of a group of {self.size} count from 0 to {self.size - 1}."
            raise CollateError(explain("rank", str(self.rank), rule, "Pass the rank inside the group, not the global rank."))
        if self.group is not None:
            group_of(self.group, self.size, self.rank)

    @classmethod
    def from_group(cls, group: Any, **settings: Any) -> ContextParallel:
        """Read size and rank from a torch process group (Gloo, NCCL, HCCL), such as `torch.distributed.group.WORLD`.

        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ContextParallel.from_group(dist.group.WORLD, layout="contiguous").size
        1
        >>> dist.destroy_process_group()
        """
        group_of(group)
        return cls(dist.get_world_size(group), dist.get_rank(group), group=group, **settings)

    @classmethod
    def from_mesh(cls, mesh: Any, **settings: Any) -> ContextParallel:
        """Read size and rank from a DeviceMesh of one dimension.

        >>> ContextParallel.from_mesh(mesh["cp"])  # doctest: +SKIP
        """
        return cls.from_group(mesh_group(mesh), **settings)

    @classmethod
    def from_megatron(cls, **settings: Any) -> ContextParallel:
        """Read Megatron's `parallel_state` (megatron/core/parallel_state.py): its context-parallel group and its
        tensor-parallel size.

        >>> ContextParallel.from_megatron(layout="zigzag")  # doctest: +SKIP
        """
        try:
            from megatron.core import parallel_state
        except ImportError as error:
            rule = "megatron-core is not installed here."
            raise CollateError(explain("from_megatron", repr(error), rule, "Use from_group or from_mesh.")) from error
        if not parallel_state.model_parallel_is_initialized():
            rule = "Megatron's parallel groups do not exist yet."
            remedy = "Call parallel_state.initialize_model_parallel(context_parallel_size=...) first."
            raise CollateError(explain("from_megatron", "an uninitialised parallel_state", rule, remedy))
        settings = {"tensor_parallel": parallel_state.get_tensor_model_parallel_world_size(), **settings}
        return cls.from_group(parallel_state.get_context_parallel_group(), **settings)

    @property
    def documents(self) -> bool:
        """True if each document of a flat row is shared out by itself."""
        return self.layout == "document_zigzag"

    @property
    def multiple(self) -> int:
        """The number whose multiples a padded width is: `tp * 2 * cp` for zigzag, `tp * cp` for contiguous.

        The product and not `lcm(tp, 2 * cp)`: a rank's S / cp tokens are cut by tp again (verl mcore/util.py:686-690).
        """
        return self.tensor_parallel * self._chunks * self.size

    @property
    def min_multiple(self) -> int:
        """The number whose multiples are the widths that can be shared out at all. Pad to `multiple`, a multiple of it."""
        return self.size * lcm(self._chunks, self.tensor_parallel)

    @property
    def document_multiple(self) -> int:
        """The number whose multiples documents are in `document_zigzag`; the whole flat row keeps to `multiple`."""
        return self._chunks * self.size

    def for_documents(self) -> ContextParallel:
        """Return the same ranks for a padding-free row: zigzag becomes document by document, contiguous stays.

        Kernels that read cu_seqlens expect that order (ms-swift sequence_parallel.py:505-515; mcore_bridge
        utils/megatron_utils.py:56-91; Transformer Engine's thd).
        """
        return replace(self, layout="document_zigzag") if self.layout == "zigzag" else self

    def with_rank(self, rank: int) -> ContextParallel:
        """Return the place of another rank of the same group, without the group."""
        return replace(self, rank=rank, group=None)

    @property
    def _chunks(self) -> int:
        return 2 if self.size > 1 and self.layout.endswith("zigzag") else 1


def token_runs(width: int, cp: ContextParallel, cu_seqlens: Tensor | Sequence[int] | None = None) -> tuple[Run, ...]:
    """Return the runs `[start, stop)` of the tokens that this rank holds, in the order of its shard.

    `cu_seqlens` (`0, end, end, ...` up to the width) is for `document_zigzag`; the others ignore it. Raises
    `CollateError`, with the multiple to pad to, if the ranks cannot share out the width or a document.

    >>> token_runs(8, ContextParallel(2, 0)), token_runs(8, ContextParallel(2, 0, layout="contiguous"))
    (((0, 2), (6, 8)), ((0, 4),))
    >>> token_runs(6, ContextParallel(2, 0))
    Traceback (most recent call last):
        ...
    collate_npu.errors.CollateError: width: got 6 tokens. zigzag takes a width that is a multiple of 4 (2 * 2 ranks).
        Pad to 8: pad_to_multiple_of=4 in the collator (ContextParallel.multiple).
    More: collate-npu guide errors#shard-width
    """
    if cu_seqlens is not None and not cp.documents:
        as_offsets("cu_seqlens", cu_seqlens)
    _check_width(width, cp)
    return _runs(_documents(width, cp, cu_seqlens) if cp.documents else [(0, width)], cp)


def row_pieces(width: int, cp: ContextParallel, cu_seqlens: Sequence[int] | None) -> list[tuple[int, int, int, int]]:
    """Return `(place in the whole row, rank, place in its shard, length)` of all that the ranks hold, in order."""
    pieces = []
    for rank in range(cp.size):
        at = 0
        for start, stop in token_runs(width, cp.with_rank(rank), cu_seqlens):
            pieces.append((start, rank, at, stop - start))
            at += stop - start
    return sorted(pieces)


def _runs(bounds: Sequence[Run], cp: ContextParallel) -> tuple[Run, ...]:
    """Return this rank's part of each document: one chunk, or under zigzag one from each end."""
    runs: list[Run] = []
    for start, stop in bounds:
        size = (stop - start) // (cp._chunks * cp.size)
        runs.append((start + cp.rank * size, start + (cp.rank + 1) * size))
        if cp._chunks == 2:
            runs.append((stop - (cp.rank + 1) * size, stop - cp.rank * size))
    merged: list[Run] = []
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif start < stop:
            merged.append((start, stop))
    return tuple(merged)


@checked
def query_rows(width: int, cp: ContextParallel, cu_seqlens: Tensor | Sequence[int] | None = None) -> Tensor:
    """Return the query rows that this rank's attention computes, int64 `[Q]`, for `dense(segments, rows=...)`.

    They are the rank's tokens; keys stay whole. Errors as `token_runs`.

    >>> query_rows(8, ContextParallel(2, 0)).tolist()
    [0, 1, 6, 7]
    """
    return indices(token_runs(width, cp, cu_seqlens))


def indices(runs: Sequence[Run]) -> Tensor:
    """Return the places that the runs cover, one after the other, int64."""
    bounds = np.asarray(runs, np.int64).reshape(-1, 2)
    lengths = bounds[:, 1] - bounds[:, 0]
    before = np.cumsum(lengths) - lengths
    return torch.from_numpy(np.arange(lengths.sum()) + np.repeat(bounds[:, 0] - before, lengths))


def _documents(width: int, cp: ContextParallel, cu_seqlens: Tensor | Sequence[int] | None) -> list[Run]:
    if cu_seqlens is None:
        rule = f"The layout {cp.layout} shares out each document, so it needs their offsets."
        remedy = "Pass cu_seqlens, or leave cu_seq_lens_q (cu_seqlens_padded) in the batch."
        raise CollateError(explain("cu_seqlens", "None", rule, remedy))
    bounds = list(pairwise(as_offsets("cu_seqlens", cu_seqlens, width, whole=True).tolist()))
    multiple = cp.document_multiple
    bad = [(n, f"{stop - start} tokens") for n, (start, stop) in enumerate(bounds) if (stop - start) % multiple]
    if bad:
        rule = f"{cp.layout} over {cp.size} ranks takes documents of a multiple of {multiple} tokens."
        remedy = f"pad_documents(batch, cp) pads each to {multiple} and carries the real lengths."
        raise CollateError(explain_rows("cu_seqlens (rows are documents)", bad, rule, remedy, more="shard-width"))
    return bounds


def _check_width(width: int, cp: ContextParallel) -> None:
    check_places("width", whole_number("width", width), OF_A_BATCH)
    if width % cp.min_multiple:
        rest = f", {cp.size} * {cp.tensor_parallel} tp" if cp.tensor_parallel > 1 else ""
        parts = f"{cp._chunks} * " if cp._chunks == 2 else ""
        rule = f"{cp.layout} takes a width that is a multiple of {cp.min_multiple} ({parts}{cp.size} ranks{rest})."
        to = -(-width // cp.multiple) * cp.multiple
        remedy = f"Pad to {to}: pad_to_multiple_of={cp.multiple} in the collator (ContextParallel.multiple)."
        raise CollateError(explain("width", f"{width} tokens", rule, remedy, more="shard-width"))


# --- recurrent layers whose rows are shared out


@checked
def check_recurrent_split(
    cp: ContextParallel,
    segments: Segments,
    *,
    padding_free: bool = False,
    offsets: Tensor | Sequence[int] | None = None,
    heads: Sequence[int] = (),
) -> None:
    """Raise unless the recurrent layers of Megatron compute this batch right, shared out as `cp` says.

    A recurrent layer needs the state of the tokens before its own. Megatron's trades heads for tokens and then undoes a
    zigzag, in a flat row that of each sequence; any other order of the tokens is silently wrong.

    `segments` are of the whole, unsplit batch. `offsets` are those by which a flat row is split, and which the layer gets:
    always of the whole row, never a rank's own. By default they are where the sequences of `segments` begin, padding behind
    each. `heads` are the numbers of key and of value heads. A 2D mask is this rank's part. Costs O(N).

    Raises `UnsupportedFormError` for a layout whose tokens the layers would take in another order, `CollateError` for
    offsets, widths, sequences or heads that the ranks cannot share out.

    Sources: megatron-core 0.19.2 ssm/gated_delta_net/common.py:448-602, 671-731, mcore-bridge 1.6.5
    modules/gated_delta_net.py:273-294, MindSpeed core_r0.16.0 core/ssm/gated_delta_net.py:338-381.

    >>> segments = Segments.from_lengths([6, 8], side="left")
    >>> check_recurrent_split(ContextParallel(2, 0, layout="zigzag"), segments)
    >>> check_recurrent_split(ContextParallel(2, 0, layout="contiguous"), segments)
    Traceback (most recent call last):
        ...
    collate_npu.errors.UnsupportedFormError: layout: got 'contiguous'. Recurrent layers put tokens in order only from the
        layout 'zigzag'. Use ContextParallel(layout='zigzag'); ms-swift: cp_partition_mode='zigzag', MindSpeed:
        context_parallel_algo='megatron_cp_algo'.
    """
    if cp.size == 1:
        return
    B, width = segments.shape
    bounds: Sequence[int] = (0, width)
    if padding_free and B != 1:
        rule = "A flat row is [1, S]."
        raise CollateError(explain("segments", repr(segments), rule, "Collate padding_free, or pass padding_free=False."))
    if padding_free and offsets is None:
        bounds = sorted({0, width, *(start for _, start, _ in segments.spans)})
    elif padding_free:
        whole = as_offsets("offsets", offsets, width, whole=True)
        check_cuts("offsets", whole, segments)
        bounds = whole.tolist()
    right = "document_zigzag" if len(set(bounds)) > 2 else "zigzag"
    if cp.layout not in (right, "document_zigzag"):  # by document is the same in a row of one
        rule = f"Recurrent layers put tokens in order only from the layout {right!r}."
        stacks = "ms-swift: cp_partition_mode='zigzag', MindSpeed: context_parallel_algo='megatron_cp_algo'."
        remedy = f"Use ContextParallel(layout={right!r}); {stacks}"
        raise UnsupportedFormError(explain("layout", repr(cp.layout), rule, remedy))
    token_runs(width, cp, bounds)
    ranks = cp.size * cp.tensor_parallel
    if any(n % ranks for n in heads):
        rule = f"A recurrent layer's key heads and value heads are shared out over {ranks} ranks."
        remedy = "Use a context parallel size that divides both numbers."
        raise CollateError(explain("heads", f"{list(heads)}", rule, remedy))
