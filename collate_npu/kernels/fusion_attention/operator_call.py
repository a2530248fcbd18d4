"""One call of the operator as its host code sees it, and what a call can break.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from collate_npu.errors import explain
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of query and key: under TND, B counts sequences and Sq, Skv are the longest ones."""

    B: int
    N: int
    Nkv: int
    Sq: int
    Skv: int
    D: int
    Tq: int | None = None
    Tkv: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """One rule that a call breaks. `silent`: the card takes the call and computes something else."""

    rule: str
    where: str
    got: str
    says: str
    remedy: str
    source: str
    silent: bool = False

    def __str__(self) -> str:
        return f"[{self.rule}] {explain(self.where, self.got, self.says, self.remedy)} ({self.source})"


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments with the operator's defaults filled in, lists read as tuples of host numbers, and the sizes."""

    arguments: Mapping[str, Any]
    sizes: Sizes
    unknown: tuple[str, ...] = ()

    @classmethod
    def read(cls, kwargs: Mapping[str, Any], sizes: Sizes) -> Call:
        given = {name: value for name, value in kwargs.items() if name not in ("query", "key", "value", "head_num")}
        arguments = DEFAULTS | given
        for name in ("prefix", "actual_seq_qlen", "actual_seq_kvlen"):
            arguments[name] = _integers(arguments[name])
        return cls(arguments, sizes, tuple(sorted(given.keys() - DEFAULTS.keys())))

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
        return int(self.arguments["sparse_mode"])

    @property
    def tokens(self) -> tuple[int, int]:
        """`(pre, next)` as given; mode 0 counts them from the top-left corner, modes 4, 7 and 8 from the bottom-right."""
        return int(self.arguments["pre_tockens"]), int(self.arguments["next_tockens"])

    @property
    def prefix(self) -> tuple[int, ...] | None:
        given: tuple[int, ...] | None = self.arguments["prefix"]
        return given

    @property
    def ends(self) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
        """`(actual_seq_qlen, actual_seq_kvlen)`."""
        return self.arguments["actual_seq_qlen"], self.arguments["actual_seq_kvlen"]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """`(Sq, Skv)` of each sequence; outside TND the same for each of the B rows."""
        q_ends, kv_ends = self.ends
        if self.tnd and q_ends is not None and kv_ends is not None:
            return list(zip(lengths_of(q_ends), lengths_of(kv_ends)))
        return [(self.sizes.Sq, self.sizes.Skv)] * self.sizes.B

    @property
    def longest(self) -> tuple[int, int]:
        """`(max Sq, max Skv)`: the size of a dense mask."""
        return max((q for q, _ in self.lengths), default=0), max((kv for _, kv in self.lengths), default=0)

    @property
    def prefix_is_legal(self) -> bool:
        """One entry for each sequence, in `[max(0, Skv - Sq), Skv]` (T:1325-1352, TND T:4045-4082)."""
        pairs = self.lengths
        if self.prefix is None or len(self.prefix) != len(pairs):
            return False
        return all(max(0, kv - q) <= n <= kv for n, (q, kv) in zip(self.prefix, pairs))


def lengths_of(ends: Sequence[int]) -> list[int]:
    """Lengths from cumulative ends; one that falls counts 0, as in the host code (T `GetActualSeqLenData`)."""
    return [max(end - start, 0) for start, end in zip((0, *ends), ends)]


def _integers(values: Tensor | Sequence[int] | None) -> tuple[int, ...] | None:
    if values is None:
        return None
    return tuple(int(n) for n in (values.tolist() if isinstance(values, Tensor) else values))
