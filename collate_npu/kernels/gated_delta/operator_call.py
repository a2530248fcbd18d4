"""One call of a recurrent kernel as its host code sees it: arguments by name, boundaries as numbers on the host.

Legend: B rows, T tokens of a row, N sequences.
"""

from __future__ import annotations

import operator as operators_of_python
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from torch import Tensor

from collate_npu.errors import CollateError, explain, shape_of
from collate_npu.host import Array, host_tensor, whole_number
from collate_npu.kernels.breach import Breach
from collate_npu.kernels.gated_delta.operators import Operator
from collate_npu.kernels.gated_delta.releases import Releases
from collate_npu.parallel.layout import ContextParallel

FIELDS = (
    *("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "qkv_format", "total_tokens"),
    *("cu_seq_q", "cu_seq_k", "cu_seq_q_host", "num_samples"),
)
"""What is read of Megatron's `PackedSeqParams` and torchtitan's `VarlenMetadata`."""
HOLDERS = ("packed_seq_params", "attention_masks", "masks")
ALIASES = {"query": "q", "key": "k", "value": "v"}


class UnreadableError(Exception):
    """An argument that is no row of whole numbers in the container that the operator takes."""


@dataclass(frozen=True)
class Call:
    """Arguments by their names, those of a parameter object among them, and what the caller says of the call."""

    operator: Operator
    arguments: Mapping[str, Any]
    B: int
    T: int
    chunk_size: int
    training: bool
    releases: Releases
    context_parallel: ContextParallel | None = None
    trusted: bool = False
    """The truth is at hand (Segments): what is only evidence of it need not be judged."""

    @classmethod
    def read(
        cls,
        kwargs: Mapping[str, Any],
        operator: Operator,
        *,
        B: int | None,
        T: int,
        chunk_size: int,
        training: bool,
        versions: Mapping[str, str] | None,
        context_parallel: ContextParallel | None,
        trusted: bool,
    ) -> Call:
        """Raises `CollateError` for sizes that are no whole numbers, and for nested tensors."""
        arguments = {ALIASES.get(name, str(name)): value for name, value in kwargs.items() if value is not None}
        for holder in HOLDERS:
            for name in FIELDS:
                held = _field(kwargs.get(holder), name)
                if held is not None:
                    arguments.setdefault(name, held)
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.is_nested:
                rule, remedy = "Recurrent kernels take dense tensors.", "Pass values() and offsets."
                raise CollateError(explain(name, "a nested tensor", rule, remedy))
        rows = 1 if B is None else whole_number("B", B, least=1)
        own = arguments.get("chunk_size", chunk_size) if operator.chunk_sizes else chunk_size
        chunk = whole_number("chunk_size", own, least=1)
        releases = Releases.of(versions)
        T = whole_number("T", T, least=1)
        return cls(operator, arguments, rows, T, chunk, training, releases, context_parallel, trusted)

    def breach(
        self, rule: str, where: str, got: str, says: str, remedy: str = "", *, silent: bool | None = None, source: str = ""
    ) -> Breach:
        """A broken rule; silent where the operator's own host code does not check it."""
        remedy = remedy or f"Take it from gated_delta_kwargs(segments, kernel={self.operator.kernel!r})."
        told = rule not in self.operator.checks if silent is None else silent
        source = source or self.operator.source
        return Breach(rule=rule, where=where, got=got, says=says, remedy=remedy, source=source, silent=told)

    def get(self, name: str) -> Any:
        return self.arguments.get(name)

    def is_set(self, name: str) -> bool:
        """Given, and neither None nor False."""
        return name in self.arguments and self.arguments[name] is not False

    def word(self, name: str, default: str = "") -> str:
        """A setting that is text; the name of its type where it is not."""
        value = self.arguments.get(name, default)
        return value if isinstance(value, str) else _kind(value)

    @property
    def total(self) -> int:
        """Tokens that the offsets run over."""
        folded = self.operator.folds or (self.operator.name == "fla.causal_conv1d" and not self.training)
        return self.B * self.T if folded else self.T

    @property
    def ranks(self) -> int:
        return 1 if self.context_parallel is None else self.context_parallel.size

    @property
    def where(self) -> str:
        """The argument that holds the boundaries, `""` where none is given."""
        return next((name for name in self.operator.offsets if name in self.arguments), "")

    @property
    def wants_gradients(self) -> bool:
        """In training, and a tensor of the call asks for a gradient."""
        return self.training and any(isinstance(x, Tensor) and x.requires_grad for x in self.arguments.values())

    @cached_property
    def given(self) -> tuple[int, ...]:
        """The boundaries as they are given. Raises `UnreadableError`."""
        return numbers(self, self.where, host=self.operator.host) if self.where else ()

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The boundaries as offsets, `()` where none are given: as the operator reads them, right or wrong."""
        given, form = self.given, self.operator.form
        if form == "offsets":
            repaired = self.operator.repairs_ends and given and given[0] != 0 and given[-1] == self.total
            return (0, *given) if repaired else given
        if not given:
            return ()
        if form == "ends":
            return given if given[0] == 0 else (0, *given)
        return tuple(accumulate(given)) if form != "lengths" else (0, *accumulate(given))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in pairwise(self.offsets))

    @property
    def packed(self) -> bool:
        """Are there boundaries of more than one sequence with tokens?"""
        return sum(length > 0 for length in self.lengths) > 1 or len(np.unique(self.numbers_BT)) > 1

    @cached_property
    def numbers_BT(self) -> Array:
        """The sequence number of each token as given, int64 `[B, T]`; empty where none are. Raises `UnreadableError`."""
        given = self.get(self.operator.numbers) if self.operator.numbers else None
        if given is None:
            return np.zeros((0, 0), np.int64)
        if not isinstance(given, Tensor) or given.is_floating_point() or given.is_meta:
            raise UnreadableError(f"{shape_of(given)}: it takes a tensor of whole numbers with values")
        array: Array = host_tensor(self.operator.numbers, given).numpy().astype(np.int64)
        return array


def _field(holder: Any, name: str) -> Any:
    if isinstance(holder, Mapping):
        return holder.get(name)
    return None if isinstance(holder, Tensor) else getattr(holder, name, None)


def numbers(call: Call, name: str, *, host: bool) -> tuple[int, ...]:
    """A row of whole numbers in the container that the operator takes; one sync where it lies on the device."""
    value = call.get(name)
    if host:
        if isinstance(value, (list, tuple)) and all(_is_whole(n) for n in value):
            return tuple(operators_of_python.index(n) for n in value)
        raise UnreadableError(f"{_kind(value)}: it takes a list or tuple of ints on the host")
    if not isinstance(value, Tensor) or value.ndim != 1:
        raise UnreadableError(f"{_kind(value)}: it takes a tensor of one dimension")
    if value.is_meta:
        raise UnreadableError("a tensor on device meta: there are no values to check")
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in call.operator.dtypes:
        raise UnreadableError(f"{dtype}: it takes {' or '.join(call.operator.dtypes)}")
    return tuple(host_tensor(name, value).tolist())


def _is_whole(n: Any) -> bool:
    return isinstance(n, (int, np.integer)) and not isinstance(n, bool)


def _kind(value: Any) -> str:
    return shape_of(value) if isinstance(value, (Tensor, np.ndarray)) else f"a {type(value).__name__}"


def known_context(context_parallel: Any) -> ContextParallel | None:
    """Raises `CollateError` for what is no ContextParallel."""
    if context_parallel is None or isinstance(context_parallel, ContextParallel):
        return context_parallel
    rule, remedy = "It is a ContextParallel.", "Pass ContextParallel(size, rank, layout=...)."
    raise CollateError(explain("context_parallel", type(context_parallel).__name__, rule, remedy))
