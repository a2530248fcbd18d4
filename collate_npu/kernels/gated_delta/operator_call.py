"""What is known of an operator that takes recurrent boundaries, and one call of it as its host code sees it.

One row an operator (`kernels`, `stacks`). Rules are judged for all of them alike (`rules`, `contract`): one that stands in
`checks` is refused by the operator itself, any other is taken without a word. What is true of one family alone, a row names
as its `own`. Left to the operators: dtypes, channels, strides, arguments that are missing or that a release does not have.

Releases read: fla 0.5.2 and 0.6.0, flash-linear-attention-npu 17e24fd (after v26.6.0), causal-conv1d 1.6.1
(0d2252d), mamba e9594ce, transformers 4.57 to 5.23, megatron-core 0.16.1 to 0.19, mcore-bridge 1.6.5, MindSpeed core_r0.15.3
to 0.18, MindSpeed-LLM c77308a, verl 0.9.1, torchtitan 0.3.0, op-plugin 517f2e7 (documentation).

Legend: B rows, T tokens of a row, N sequences; of shapes: H query and key heads, N value heads, K and V head sizes, D
channels, W taps, C tokens of a chunk, S states.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
from torch import Tensor

from collate_npu.arrays import Array, host_tensor, once, whole_number
from collate_npu.errors import CollateError, explain, shape_of
from collate_npu.kernels import Breach
from collate_npu.parallel.layout import ContextParallel
from collate_npu.parallel.recurrent import RecurrentScheme
from collate_npu.releases import NEWEST, Since, installed
from collate_npu.segments import Segments
from collate_npu.validation import check_fields

FIELDS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "qkv_format", "total_tokens")
"""What is read of Megatron's `PackedSeqParams`."""
HOLDER = "packed_seq_params"
ALIASES = {"query": "q", "key": "k", "value": "v"}
MAX_TAPS = 4
"""The widest convolution of causal-conv1d (csrc/causal_conv1d.cpp:183)."""
_ABSENT = ("none", "absent", "missing", "not installed")
_BRANCHES = ("main", "master", "nightly", "dev")
_SPELLINGS = {"flash_linear_attention": "fla", "fla_core": "fla", "megatron_core": "megatron", "hf": "transformers"}

Rule = Callable[["Call"], Iterator[Breach]]


def words(text: str) -> frozenset[str]:
    """The words of a row's text."""
    return frozenset(text.split())


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator. Arguments are named as its call names them."""

    name: str
    source: str
    kernel: str = "fla"  # the `kernel` of gated_delta_kwargs that makes its arguments
    offsets: tuple[str, ...] = ()  # arguments that hold the boundaries; the first that is given counts
    # "offsets or ends": those without the leading 0 that end at T get one.
    form: Literal["offsets", "offsets or ends", "lengths", "prefix and lengths"] = "offsets"
    numbers: str = ""  # the argument that holds a sequence number for each token
    copies: tuple[str, ...] = ()  # host copies of the offsets
    # Chunk tables, and what a chunk of each is: "rule" (chunk_size), "conv" (64), "cumsum" (2**17 / chunk_size).
    tables: Mapping[str, str] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()  # other arguments of its own whose names look like boundaries or masks
    host: bool = False  # boundaries are ints on the host (a list or tuple), not tensors
    chunk_sizes: tuple[int, ...] = ()
    checks: frozenset[str] = frozenset()
    own: tuple[Rule, ...] = ()  # rules of its family alone
    empties: Literal["legal", "fla", "never"] = "never"
    masks: Literal["none", "multiplied", "ignored"] = "none"
    # The order of dimensions of its tensors; the first that is given tells B and T.
    shapes: Mapping[str, str] = field(default_factory=dict)
    most_tokens: int | None = None  # of a sequence
    backward: bool = True
    ranks: RecurrentScheme = "head_exchange"

    @property
    def remedy(self) -> str:
        """Where right arguments come from, to stand behind "Take them"."""
        return f"from gated_delta_kwargs(segments, kernel={self.kernel!r})."

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]


def by_own_names(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are given, as rows name them."""
    return {ALIASES.get(name, str(name)): value for name, value in kwargs.items() if value is not None}


@dataclass
class Call:
    """Arguments by their names, those of a parameter object among them, and what the caller says of the call.

    Raises `CollateError` for sizes that are no whole numbers, for other types than these, and for nested tensors.
    """

    operator: Operator
    arguments: Mapping[str, Any]
    B: Any  # an int; None where the tensors have no rows, which counts as one
    T: int
    chunk_size: int = 64
    training: bool = True
    segments: Segments | None = None  # the truth: with it at hand, what is only evidence of it need not be judged
    versions: Mapping[str, str] | None = None
    context_parallel: ContextParallel | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        given = self.arguments
        self.named = _named(self.versions or {})
        self.arguments = arguments = by_own_names(given)
        held = given.get(HOLDER)
        read = held.get if isinstance(held, Mapping) else partial(getattr, held)
        arguments |= by_own_names({name: read(name, None) for name in FIELDS if name not in arguments})
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.is_nested:
                rule, remedy = "Recurrent kernels take dense tensors.", "Pass values() and offsets."
                raise CollateError(explain(name, "a nested tensor", rule, remedy))
        if self.operator.chunk_sizes:
            self.chunk_size = self.arguments.get("chunk_size", self.chunk_size)
        self.B = whole_number("B", 1 if self.B is None else self.B, least=1)
        self.T = whole_number("T", self.T, least=1)
        self.chunk_size = whole_number("chunk_size", self.chunk_size, least=1)

    def breach(self, rule: str, where: str, got: str, says: str, remedy: str = "", *, silent: bool | None = None) -> Breach:
        """A broken rule; silent where the operator's own host code does not check it."""
        remedy = remedy or f"Take it {self.operator.remedy}"
        silent = rule not in self.operator.checks if silent is None else silent
        return Breach(rule=rule, where=where, got=got, says=says, remedy=remedy, source=self.operator.source, silent=silent)

    def release(self, package: str) -> str | None:
        """Named by the caller, else installed, else the newest that was read; None for one that is not there."""
        return self.named[package] if package in self.named else installed(package) or NEWEST.get(package, "")

    def before(self, since: Since) -> bool:
        """Is its package there, and older? A branch name without a number (`main`) is newer than any release."""
        text = self.release(since.package)
        return text is not None and not since.holds(text)

    def get(self, name: str) -> Any:
        return self.arguments.get(name)

    def is_set(self, name: str) -> bool:
        """Given, and neither None nor False."""
        return name in self.arguments and self.arguments[name] is not False

    def word(self, name: str, default: str = "") -> str:
        """A setting that is text; the name of its type where it is not."""
        value = self.arguments.get(name, default)
        return value if isinstance(value, str) else _kind(value)

    def row(self, name: str, *, host: bool = False) -> tuple[tuple[int, ...], str]:
        """Whole numbers in the container that the operator takes, or none and why; a sync where they lie on the device."""
        value = self.get(name)
        if host:
            whole = isinstance(value, (list, tuple)) and all(isinstance(n, (int, np.integer)) for n in value)
            if whole and not any(isinstance(n, bool) for n in value):
                return tuple(map(int, value)), ""
            return (), f"{_kind(value)}: it takes a list or tuple of ints on the host"
        if not isinstance(value, Tensor) or value.ndim != 1:
            return (), f"{_kind(value)}: it takes a tensor of one dimension"
        if value.is_meta:
            return (), "a tensor on device meta: there are no values to check"
        dtypes = ("int32",) if "lengths" in self.operator.form else ("int32", "int64")
        if (dtype := str(value.dtype).removeprefix("torch.")) not in dtypes:
            return (), f"{dtype}: it takes {' or '.join(dtypes)}"
        return tuple(host_tensor(name, value).tolist()), ""

    @property
    def total(self) -> int:
        """Tokens that the offsets run over; fla_npu's convolution counts batch * seqlen (..._validation.h:131)."""
        inference = self.operator.name == "fla.causal_conv1d" and not self.training
        return self.B * self.T if inference or self.operator.name == "fla_npu.causal_conv1d" else self.T

    @property
    def where(self) -> str:
        """The argument that holds the boundaries, `""` where none is given."""
        return next((name for name in self.operator.offsets if name in self.arguments), "")

    @property
    def wants_gradients(self) -> bool:
        """In training, and a tensor of the call asks for a gradient."""
        return self.training and any(isinstance(x, Tensor) and x.requires_grad for x in self.arguments.values())

    @once
    def given(self) -> tuple[int, ...]:
        """The boundaries as they are given, `()` where none are or nobody can read them."""
        return self.row(self.where, host=self.operator.host)[0] if self.where else ()

    @once
    def offsets(self) -> tuple[int, ...]:
        """The boundaries as offsets, as the operator reads them, right or wrong."""
        given, form = self.given, self.operator.form
        if form == "lengths" and given:
            return (0, *accumulate(given))
        if form == "prefix and lengths":
            return tuple(accumulate(given))
        ends = form == "offsets or ends" and given[-1:] == (self.total,)
        return (0, *given) if ends and given[0] != 0 else given

    @once
    def lengths(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in pairwise(self.offsets))

    @property
    def packed(self) -> bool:
        """Are there boundaries of more than one sequence with tokens?"""
        return sum(length > 0 for length in self.lengths) > 1 or len(np.unique(self.numbers_BT)) > 1

    @once
    def numbers_BT(self) -> Array:
        """The sequence number of each token, int64 `[B, T]`; `[0, 0]` where none are given, or in another form."""
        given = self.get(self.operator.numbers)
        if not is_whole_tensor(given) or tuple(given.shape) != (self.B, self.T):
            return np.zeros((0, 0), np.int64)
        array: Array = host_tensor(self.operator.numbers, given).numpy().astype(np.int64)
        return array

    @property
    def taps(self) -> int:
        """W of the convolution, the widest there is where no weight tells it."""
        weight = self.get("weight")
        return int(weight.shape[-1]) if isinstance(weight, Tensor) and weight.ndim == 2 else MAX_TAPS


def is_whole_tensor(value: Any) -> bool:
    """Whole numbers with values, whatever the shape."""
    return isinstance(value, Tensor) and not value.is_floating_point() and not value.is_meta


def _named(versions: Mapping[str, str]) -> dict[str, str | None]:
    """`{"fla": ""}` says that fla is not installed; so does `{"fla": "0.5.2"}` of the convolution beside it."""
    written = {str(package).replace("-", "_").lower(): str(version or "").strip() for package, version in versions.items()}
    for name, version in written.items():
        if name not in _SPELLINGS and (near := get_close_matches(name, NEWEST, n=1, cutoff=0.75)) and near[0] != name:
            rule = f"The packages are {', '.join(NEWEST)}."
            raise CollateError(explain("versions", repr(name)[:60], rule, f"Write {near[0]!r}."))
        if not (re.search(r"\d", version) or version.lower() in ("", *_BRANCHES, *_ABSENT)):
            rule, remedy = "It is a release, a branch or a commit.", f"Pass {dict(NEWEST)}, '' for what is not there."
            raise CollateError(explain(f"versions[{name!r}]", repr(version)[:60], rule, remedy))
    there = {name: version for name, version in written.items() if version.lower() not in _ABSENT}
    named = {_SPELLINGS.get(name, name): there.get(name) or None for name in written}
    if named.get("fla") and "transformers" in named:
        named.setdefault("causal_conv1d", None)
    return named


def _kind(value: Any) -> str:
    return shape_of(value) if isinstance(value, (Tensor, np.ndarray)) else f"a {type(value).__name__}"
