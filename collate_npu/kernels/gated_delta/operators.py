"""Operators: the one table of recurrent kernels and layers that the contract knows, and one call as its host code reads it.

Releases read: fla 0.5.2 and 0.6.0, flash-linear-attention-npu 17e24fd (after v26.6.0), causal-conv1d 1.6.1 (0d2252d), mamba
e9594ce, transformers 4.57 to 5.23, megatron-core 0.16.1 to 0.19, op-plugin 517f2e7 (documentation).

Legend: B rows, T tokens of a row, N sequences; of shapes: H query and key heads, N value heads, K and V head sizes, D
channels, W taps, S states.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
from torch import Tensor

from collate_npu.arrays import Array, check_places, host_tensor, once, whole_number
from collate_npu.errors import CollateError, did_you_mean, explain, not_one_of
from collate_npu.kernels import Breach
from collate_npu.kernels.call_boundaries import offset_values
from collate_npu.releases import NEWEST, Since, installed
from collate_npu.segments import Segments
from collate_npu.validation import check_fields

FIELDS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "qkv_format", "total_tokens")
"""What is read of Megatron's `PackedSeqParams`."""
HOLDER = "packed_seq_params"
ALIASES = {"query": "q", "key": "k", "value": "v"}
MAX_TAPS = 4
"""The widest convolution of causal-conv1d (csrc/causal_conv1d.cpp:183)."""
_BRANCHES = ("main", "master", "nightly", "dev")


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator. Arguments are named as its call names them."""

    name: str
    source: str
    kernel: str = "fla"  # the `kernel` of gated_delta_kwargs that makes its arguments
    offsets: tuple[str, ...] = ()  # arguments that hold the boundaries; the first that is given counts
    form: Literal["offsets", "offsets or ends", "lengths", "prefix and lengths"] = "offsets"  # ends: without the 0
    numbers: str = ""  # the argument that holds a sequence number for each token
    copies: tuple[str, ...] = ()  # host copies of the offsets
    # Chunk tables, and what a chunk of each is: "rule" (chunk_size), "conv" (64), "cumsum" (2**17 / chunk_size).
    tables: Mapping[str, str] = field(default_factory=dict)
    reads: tuple[str, ...] = ()  # other arguments of its own whose names look like boundaries or masks
    host: bool = False  # boundaries are ints on the host (a list or tuple), not tensors
    chunk_sizes: tuple[int, ...] = ()
    empties: Literal["legal", "fla", "never"] = "never"
    masks: Literal["none", "multiplied", "ignored"] = "none"
    # The order of dimensions of its tensors; the first that is given tells B and T.
    shapes: Mapping[str, str] = field(default_factory=dict)
    most_tokens: int | None = None  # of a sequence
    backward: bool = True

    @property
    def remedy(self) -> str:
        """Where right arguments come from."""
        return f"Take the boundaries from gated_delta_kwargs(segments, kernel={self.kernel!r})."

    @property
    def names(self) -> tuple[str, ...]:
        """All of its arguments that hold boundaries, tables or masks."""
        named = (*self.offsets, self.numbers, *self.copies, *self.tables, *self.reads)
        return tuple(dict.fromkeys(filter(None, named)))

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]


# --- rows

_RULE = {"q": "BTHK", "k": "BTHK", "v": "BTNV", "g": "BTN", "beta": "BTN", "initial_state": "SNKV"}
_THD = {"q": "THK", "k": "THK", "v": "TNV", "g": "TN", "beta": "TN"}
_FLA = Operator(
    "fla.chunk_gated_delta_rule", "fla 0.5.2 ops/gated_delta_rule/chunk.py:505-560, ops/utils/index.py:156",
    offsets=("cu_seqlens",), copies=("cu_seqlens_cpu",), tables={"chunk_indices": "rule"}, chunk_sizes=(16, 32, 64),
    empties="fla", shapes=_RULE,
)  # fmt: skip
_MAMBA = Operator(
    "mamba.mamba_chunk_scan_combined", "mamba e9594ce ops/triton/ssd_combined.py:274, 599-604, 642; mamba #1015",
    kernel="causal_conv1d", numbers="seq_idx", reads=("cu_seqlens",), shapes={"x": "BTHV", "dt": "BTH"},
)  # fmt: skip
_NPU = "flash-linear-attention-npu 17e24fd "
_FLA_NPU = Operator(
    "fla_npu", _NPU + "recompute_w_u_fwd_tiling_processor.h:299-385, chunk_local_cumsum_tiling.cpp:259-288",
    kernel="fla_npu", offsets=("cu_seqlens",), tables={"chunk_indices": "rule"}, host=True, chunk_sizes=(64, 128),
    shapes={"q": "BHTK", "k": "BHTK", "v": "BNTV", "g": "BNT", "beta": "BNT", "initial_state": "SNKV"},
)  # fmt: skip
_MEGATRON = Operator(
    "megatron_core.GatedDeltaNet",
    "Megatron-LM d98e8a6 ssm/gated_delta_net/common.py:469-618; 0.16.1 ssm/gated_delta_net.py:297",
    kernel="megatron", offsets=("cu_seqlens_q_padded", "cu_seqlens_q"), reads=("attention_mask", *FIELDS, HOLDER),
    empties="fla", masks="ignored",
)  # fmt: skip
_ROWS = (
    _FLA,
    replace(
        _FLA, name="fla.chunk_kda", source="fla 0.5.2 ops/kda/chunk.py:365-420", chunk_sizes=(32, 64),
        shapes=_RULE | {"g": "BTNK"},
    ),
    replace(
        _FLA, name="fla.causal_conv1d", kernel="fla_conv", tables={"chunk_indices": "conv"}, chunk_sizes=(),
        source="fla 0.5.2 modules/conv/triton/ops.py:64, 191, 383-386, cuda/ops.py:202; fla #955",
        shapes={"x": "BTD", "residual": "BTD", "weight": "DW", "bias": "D"},
    ),
    replace(
        _FLA, name="fla.build_cp_context", kernel="fla_cp", tables={}, chunk_sizes=(), empties="legal", shapes={},
        source="fla 0.6.0 ops/cp/context.py:177-316; 0.5.2 drops what ranks cannot share",
    ),
    replace(
        _FLA, name="fla.fused_recurrent_gated_delta_rule", kernel="fla_cp", copies=(), tables={}, chunk_sizes=(),
        source="fla 0.5.2 ops/gated_delta_rule/fused_recurrent.py:432",
    ),
    Operator(
        "causal_conv1d.causal_conv1d_fn",
        "causal-conv1d 1.6.1 csrc/causal_conv1d.cpp:175-198, causal_conv1d_interface.py:28-34",
        kernel="causal_conv1d", numbers="seq_idx", shapes={"x": "BDT", "weight": "DW", "bias": "D"},
    ),
    _MAMBA,
    replace(_MAMBA, name="mamba.mamba_split_conv1d_scan_combined", shapes={"zxbcdt": "BTD"}),
    _FLA_NPU,
    replace(
        _FLA_NPU, name="fla_npu.chunk_local_cumsum", kernel="fla_npu_cumsum", tables={"chunk_indices_out": "cumsum"},
        chunk_sizes=tuple(1 << n for n in range(9)), shapes={"g": "BNT"},
        source=_NPU + "chunk_local_cumsum_tiling.cpp:211, 231, 252-279",
    ),
    replace(
        _FLA, name="fla_npu.flash_gated_delta_rule", source=_NPU + "examples/flash_gated_delta_rule.py:481-516, 1126-1225",
        kernel="fla_npu_flash", copies=("cu_seqlens_list",), tables={}, reads=("chunk_indices", "chunk_indices_list"),
        chunk_sizes=(64, 128), empties="never",
        shapes={"q": "BHTK", "k": "BHTK", "v": "BHTV", "g": "BTH", "beta": "BTH", "initial_state": "SHKV"},
    ),
    Operator(
        "fla_npu.causal_conv1d", _NPU + "causal_conv1d_tiling_validation.h:190-265, op_kernel/causal_conv1d.h:50-60, "
        "ops/ascendc/__init__.py:321-329",
        kernel="fla_npu_conv", offsets=("query_start_loc",), host=True, empties="legal",
    ),
    Operator(
        "fla_npu.recurrent_gated_delta_rule", _NPU + "_aclnn_ctypes.py:654-830; #641", kernel="fla_npu_recurrent",
        offsets=("actual_seq_lengths",), form="prefix and lengths", most_tokens=8, backward=False,
        shapes=_THD | {"state": "SNVK"},
    ),
    Operator(
        "torch_npu.npu_chunk_gated_delta_rule", "op-plugin 517f2e7 documentation of npu_chunk_gated_delta_rule",
        kernel="torch_npu", offsets=("actual_seq_lengths",), form="lengths", shapes=_THD | {"initial_state": "SNVK"},
        backward=False,
    ),
    # layers of training stacks, whose forward a user calls
    Operator(
        "transformers.gdn_layer", "transformers 5.23 integrations/hub_kernels.py:1033-1050, masking_utils.py:1521-1529",
        kernel="transformers", offsets=("cu_seq_lens_q",), numbers="seq_idx", empties="fla", masks="multiplied",
        reads=("cu_seq_lens_k", "attention_mask", "position_ids", "seq_lens"), shapes={"hidden_states": "BTD"},
    ),
    _MEGATRON,
    replace(
        _MEGATRON, name="mindspeed.GatedDeltaNet", form="offsets or ends", empties="never",
        source="MindSpeed core_r0.16.0 ssm/gated_delta_net.py:592-665, ops/triton/utils.py:73-78",
    ),
)  # fmt: skip
OPERATORS: dict[str, Operator] = {row.name: row for row in _ROWS}
"""`fla_npu` is what a whole training chain takes, the intersection of its operators."""
KERNELS = {row.kernel: row.name for row in reversed(_ROWS)} | {"mindspeed": "mindspeed.GatedDeltaNet"}
"""The operator that stands for a kernel of `gated_delta_kwargs`: the first that takes its arguments."""


def find_operator(name: str) -> Operator | None:
    """Return the row of this kernel, if there is one. Modules between package and name do not count, nor does `npu_`."""
    package, _, path = name.partition(".")
    package, last = "mamba" if package == "mamba_ssm" else package, path.rpartition(".")[2]
    tried = (name, f"{package}.{last.removeprefix('npu_' if package == 'fla_npu' else '')}", f"{package}.npu_{path}")
    found = (OPERATORS.get(KERNELS.get(each, each)) for each in tried)
    return next((row for row in found if row is not None), None)


def operator_named(kernel: str) -> Operator:
    """Return the row of this kernel. Raises `CollateError` with close matches for names that are not known."""
    if (row := find_operator(str(kernel))) is None:
        remedy = did_you_mean(str(kernel), [*KERNELS, *OPERATORS], f"Name one of {', '.join(KERNELS)}.")
        rule = "Kernels are those of gated_delta_kwargs, and the operators that kernels/gated_delta knows."
        raise CollateError(explain("kernel", repr(kernel), rule, remedy))
    return row


# --- one call


def by_own_names(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are given, as rows name them."""
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

    def __post_init__(self) -> None:
        check_fields(self)
        held = self.arguments.get(HOLDER)
        self.named = _named(self.versions or {})
        self.arguments = arguments = by_own_names(self.arguments)
        read = held.get if isinstance(held, Mapping) else partial(getattr, held)
        arguments |= by_own_names({name: read(name, None) for name in FIELDS if name not in arguments})
        for name, value in arguments.items():
            if isinstance(value, Tensor) and value.is_nested:
                rule, remedy = "Recurrent kernels take dense tensors.", "Pass values() and offsets."
                raise CollateError(explain(name, "a nested tensor", rule, remedy))
        if self.operator.chunk_sizes:
            self.chunk_size = arguments.get("chunk_size", self.chunk_size)
        self.B = whole_number("B", 1 if self.B is None else self.B, least=1)
        self.T = whole_number("T", self.T, least=1)
        check_places("B, T", self.B * self.T, "Pass the sizes of the call's tensors.")
        self.chunk_size = whole_number("chunk_size", self.chunk_size, least=1)

    def breach(self, rule: str, where: str, got: str, says: str, remedy: str = "") -> Breach:
        """Return a broken rule, with the source of the operator."""
        return Breach(rule, where, got, says, remedy or self.operator.remedy, self.operator.source)

    def release(self, package: str) -> str | None:
        """Return the release that the caller names, else the installed, else the newest that was read; None for none."""
        return self.named[package] if package in self.named else installed(package) or NEWEST.get(package, "")

    def before(self, since: Since) -> bool:
        """True if its package is there, and older. A branch name without a number (`main`) is newer than any release."""
        text = self.release(since.package)
        return text is not None and not since.holds(text)

    def get(self, name: str) -> Any:
        return self.arguments.get(name)

    def is_set(self, name: str) -> bool:
        """True if it is given, and neither None nor False."""
        return name in self.arguments and self.arguments[name] is not False

    @property
    def total(self) -> int:
        """Tokens that the offsets run over; fla_npu's convolution counts batch * seqlen (..._validation.h:131)."""
        inference = self.operator.name == "fla.causal_conv1d" and not self.training
        return self.B * self.T if inference or self.operator.name == "fla_npu.causal_conv1d" else self.T

    @property
    def where(self) -> str:
        """The argument that holds the boundaries, `""` where none is given."""
        return next((name for name in self.operator.offsets if name in self.arguments), "")

    @once
    def given(self) -> tuple[int, ...]:
        """The boundaries as they are given, `()` where none are."""
        return offset_values(self.arguments, self.where)

    @once
    def offsets(self) -> tuple[int, ...]:
        """The boundaries as offsets, as the operator reads them, right or wrong."""
        ends = self.operator.form == "offsets or ends" and self.given[-1:] == (self.total,) and self.given[0] != 0
        if ends or (self.operator.form == "lengths" and self.given):
            return (0, *(self.given if ends else accumulate(self.given)))
        return tuple(accumulate(self.given)) if self.operator.form == "prefix and lengths" else self.given

    @once
    def lengths(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in pairwise(self.offsets))

    @once
    def numbers_BT(self) -> Array:
        """The sequence number of each token, int64 `[B, T]`; `[0, 0]` where none are given, or in a form that is refused."""
        given = self.get(self.operator.numbers)
        whole = isinstance(given, Tensor) and not given.is_floating_point() and not given.is_meta
        if not whole or tuple(given.shape) != (self.B, self.T):
            return np.zeros((0, 0), np.int64)
        array: Array = host_tensor(self.operator.numbers, given).numpy().astype(np.int64)
        return array

    @property
    def taps(self) -> int:
        """W of the convolution, the widest there is where no weight tells it."""
        weight = self.get("weight")
        return int(weight.shape[-1]) if isinstance(weight, Tensor) and weight.ndim == 2 else MAX_TAPS


def _named(versions: Mapping[str, str]) -> dict[str, str | None]:
    """Return the release of each package, None for one that is not installed (`""`)."""
    for package, version in versions.items():
        if package not in NEWEST:
            raise not_one_of("versions", package, NEWEST)
        if version and not (re.search(r"\d", str(version)) or version in _BRANCHES):
            rule, remedy = "It is a release, a branch or a commit.", f"Pass {dict(NEWEST)}, '' for what is not there."
            raise CollateError(explain(f"versions[{package!r}]", repr(version)[:60], rule, remedy))
    return {package: str(version) if version else None for package, version in versions.items()}


def tensor_orders(row: Operator, arguments: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the order of dimensions of each tensor, as the call says it."""
    x = arguments.get("x")
    if row.name == "fla_npu.causal_conv1d":
        return {"x": "TD" if isinstance(x, Tensor) and x.ndim == 2 else "BTD", "weight": "WD", "bias": "D"}
    if "initial_state" in row.shapes and any(arguments.get(name) is True for name in V_FIRST):
        return {**row.shapes, "initial_state": "SNVK"}
    return row.shapes


V_FIRST = ("state_v_first", "transpose_state_layout")
"""The second is the old name of the first (fla 0.5.2 ops/gated_delta_rule/chunk.py:506-514)."""


def rows_and_tokens(row: Operator, arguments: Mapping[str, Any]) -> tuple[int | None, int] | None:
    """Return B and T of the first tensor that tells them; B is None where it has no rows."""
    for name, order in tensor_orders(row, arguments).items():
        x = arguments.get(name)
        if isinstance(x, Tensor) and "T" in order and x.ndim == len(order):
            return x.shape[order.index("B")] if "B" in order else None, x.shape[order.index("T")]
    return None
