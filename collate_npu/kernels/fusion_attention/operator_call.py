"""One call of the operator as its host code sees it.

Legend: B batch, N query heads, Sq/Skv query and key rows, D head size, Tq/Tkv packed tokens (layout TND).

The sources that rules cite, none of which is copied here:

    T   hicann/ops-transformer c29bc106 (CANN 8.5.0.alpha001), flash_attention_score_tiling_general.cpp
    A   the same, op_host/op_api/aclnn_flash_attention_score.cpp
    G   the same, flash_attention_score_grad_tiling_s1s2_bn2gs1s2.cpp
    K   the same, attention/flash_attention_score/op_kernel
    P   Ascend/op-plugin 517f2e7d, FlashAttentionKernelNpuOpApi.cpp
    PD  the same, docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention.md
    D   hicann/ops-transformer, sparse_mode documentation
    MS  Ascend/MindSpeed 028de58c, docs/zh/ops/fusion_attention.md
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import NoneType
from typing import Any

from torch import Tensor

from collate_npu.errors import CollateError, explain
from collate_npu.kernels.fusion_attention.geometry import UNLIMITED

DEFAULTS: dict[str, Any] = {
    "input_layout": None,
    "pse": None,
    "padding_mask": None,
    "atten_mask": None,
    "scale": 1.0,
    "keep_prob": 1.0,
    "pre_tockens": UNLIMITED,
    "next_tockens": UNLIMITED,
    "inner_precise": 0,
    "prefix": None,
    "actual_seq_qlen": None,
    "actual_seq_kvlen": None,
    "sparse_mode": 0,
    "gen_mask_parallel": True,
    "sync": False,
    "softmax_layout": "",
    "sink": None,
    "dropout_mask": None,
    "seed": 0,
    "offset": 0,
}
"""`npu_fusion_attention` behind query, key, value and head_num (torch_npu 2.13.0); `_v3` lacks the last three."""
INTEGERS = ("pre_tockens", "next_tockens", "inner_precise", "sparse_mode")
INTEGER_LISTS = ("prefix", "actual_seq_qlen", "actual_seq_kvlen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of query and key, None for not given: the lists of TND say B (sequences), Sq and Skv (the longest) as well."""

    N: int
    Nkv: int
    D: int
    B: int | None = None
    Sq: int | None = None
    Skv: int | None = None
    Tq: int | None = None
    Tkv: int | None = None


@dataclass(frozen=True)
class Call:
    """Arguments with the operator's defaults filled in, lists read as tuples of host numbers, and the sizes."""

    arguments: Mapping[str, Any]
    sizes: Sizes
    given: frozenset[str] = frozenset()
    """The arguments that were passed; the others are the operator's defaults."""

    @classmethod
    def read(cls, kwargs: Mapping[str, Any], sizes: Sizes) -> Call:
        """Raises `CollateError` for values that the operator's schema does not take."""
        given = {name: value for name, value in kwargs.items() if name not in ("query", "key", "value", "head_num")}
        arguments = DEFAULTS | given
        for name in INTEGER_LISTS:
            arguments[name] = _integers(name, arguments[name])
        for name in INTEGERS:
            arguments[name] = _integer(name, arguments[name])
        if not isinstance(arguments["atten_mask"], (Tensor, NoneType)):
            got, rule = type(arguments["atten_mask"]).__name__, "A mask is a tensor, True = blocked, or None."
            raise CollateError(explain("atten_mask", got, rule, "Use dense(segments, polarity='masked')."))
        return cls(arguments, sizes, frozenset(given))

    @property
    def unknown(self) -> list[str]:
        return sorted(self.given - DEFAULTS.keys())

    @property
    def layout(self) -> Any:
        return self.arguments["input_layout"]

    @property
    def tnd(self) -> bool:
        return bool(self.layout == "TND")

    @property
    def atten_mask(self) -> Tensor | None:
        """None also for a mask of rank 0, which the host code counts as none (T:1498)."""
        given: Tensor | None = self.arguments["atten_mask"]
        return None if given is None or given.ndim == 0 else given

    @property
    def mode(self) -> int:
        mode: int = self.arguments["sparse_mode"]
        return mode

    @property
    def tokens(self) -> tuple[int, int]:
        """`(pre, next)` as given; mode 0 counts them from the top-left corner, modes 4, 7 and 8 from the bottom-right."""
        return self.arguments["pre_tockens"], self.arguments["next_tockens"]

    @property
    def prefix(self) -> tuple[int, ...] | None:
        given: tuple[int, ...] | None = self.arguments["prefix"]
        return given

    @property
    def ends(self) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """`(actual_seq_qlen, actual_seq_kvlen)`."""
        return self.arguments["actual_seq_qlen"], self.arguments["actual_seq_kvlen"]

    @cached_property
    def lengths(self) -> list[tuple[int, int]]:
        """`(Sq, Skv)` of each sequence; outside TND the same for each of the B rows. Raises where no size says it."""
        q_ends, kv_ends = self.ends
        if self.tnd:
            return list(zip(lengths_of(q_ends or ()), lengths_of(kv_ends or ())))
        B, Sq, Skv = self.sizes.B, self.sizes.Sq, self.sizes.Skv
        if B is None or Sq is None or Skv is None:
            rule = f"Layout {self.layout} needs the rows of query and key, and their number."
            raise CollateError(explain("B, Sq, Skv", f"{B}, {Sq}, {Skv}", rule, "Pass all three, or segments."))
        return [(Sq, Skv)] * B

    @cached_property
    def longest(self) -> tuple[int, int]:
        """`(max Sq, max Skv)`: the size of a dense mask."""
        return max((q for q, _ in self.lengths), default=0), max((kv for _, kv in self.lengths), default=0)

    @cached_property
    def prefix_is_legal(self) -> bool:
        """One entry for each sequence, in `[max(0, Skv - Sq), Skv]` (T:1325-1352, TND T:4045-4082)."""
        pairs = self.lengths
        if self.prefix is None or len(self.prefix) != len(pairs):
            return False
        return all(max(0, kv - q) <= n <= kv for n, (q, kv) in zip(self.prefix, pairs))


def lengths_of(ends: Sequence[int]) -> list[int]:
    """Lengths from cumulative ends; one that falls counts 0, as in the host code (T `GetActualSeqLenData`)."""
    return [max(end - start, 0) for start, end in zip((0, *ends), ends)]


def _integers(name: str, values: Any) -> tuple[int, ...] | None:
    if values is None:
        return None
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, Sequence) and not isinstance(values, str):
        return tuple(_integer(name, n) for n in values)
    rule = "The operator takes a list of whole numbers on the host."
    raise CollateError(explain(name, type(values).__name__, rule, "Pass a list, or for _v3 an int64 tensor."))


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        rule, remedy = "The operator takes whole numbers alone.", "Pass ints."
        raise CollateError(explain(name, f"{type(value).__name__} {value!r}", rule, remedy)) from None
