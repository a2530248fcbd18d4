"""`check_call` takes what a kernel computes rightly, and refuses what it would compute wrongly in silence."""

import contextlib
import itertools
import math
from collections.abc import Callable
from itertools import permutations
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from collate_npu import CollateError, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.kernels.check import call_breaches, check_call, knows
from collate_npu.kernels.gated_delta import Kernel, gated_delta_kwargs
from collate_npu.kernels.gated_delta.operators import KERNELS, OPERATORS, operator_named
from collate_npu.masks import dense

# --- calls whose fate is known: arguments, the rules that they break, and what the caller says of them. Facts are those of
# gdn-kernel-contract, with the source in the operator's row. `dev` is a tensor, `meta` one whose shape alone counts.


def dev(*values: int) -> Tensor:
    return torch.tensor(values)


def i32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def meta(*shape: int, **more: Any) -> Tensor:
    return torch.empty(*shape, device="meta", **{"dtype": torch.bfloat16} | more)


def ids(*lengths: int) -> Tensor:
    """`[1, T]`: 0 0 0 1 1 ..."""
    return torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)])[None]


def cu(*values: int, **more: Any) -> dict[str, Any]:
    return {"cu_seqlens": dev(*values), **more}


def host(*values: int, **more: Any) -> dict[str, Any]:
    return {"cu_seqlens": [*values], **more}


def starts(*values: int, **more: Any) -> dict[str, Any]:
    return {"query_start_loc": [*values], **more}


def lengths(*values: int, **more: Any) -> dict[str, Any]:
    return {"actual_seq_lengths": i32(*values), **more}


def cu_q(*values: int, **more: Any) -> dict[str, Any]:
    return {"cu_seq_lens_q": i32(*values), **more}


def numbered(*lengths: int, **more: Any) -> dict[str, Any]:
    return {"seq_idx": ids(*lengths), **more}


def keep(side: str = "right", B: int = 2, **more: Any) -> dict[str, Any]:
    """A 2D mask `[B, 25]`, five columns of padding in the first row."""
    real = torch.ones(B, 25, dtype=torch.int64)
    real[0, {"left": slice(0, 5), "right": slice(20, 25), "hole": slice(9, 14)}[side]] = 0
    return {"attention_mask": real, **more}


def masked(change: Callable[[Tensor], Any], side: str = "left") -> dict[str, Any]:
    return {"attention_mask": change(keep(side)["attention_mask"])}


def thd(*actual: int, padded_to: tuple[int, ...] = (), **fields: Any) -> dict[str, Any]:
    given = {"qkv_format": "thd", "cu_seqlens_q": i32(*actual), "cu_seqlens_kv": i32(*actual)}
    return given | ({"cu_seqlens_q_padded": i32(*padded_to)} if padded_to else {}) | fields


def qkv(H: int = 4, HV: int = 4, T: int = 73, **more: Any) -> dict[str, Any]:
    return {"q": meta(1, T, H, 128), "k": meta(1, T, H, 128), "v": meta(1, T, HV, 128), **more}


def of(**releases: str) -> dict[str, Any]:
    return {"versions": {"transformers": "5.23.0", "fla": "0.6.0", "causal_conv1d": "1.6.1"} | releases}


PACKED, HOLE = Segments.from_lengths([[3, 70]]), Segments.from_keep(keep("hole")["attention_mask"])
LEFT, RIGHT = (Segments.from_lengths([20, 25], side=side) for side in ("left", "right"))  # type: ignore[arg-type]
BOTH, TABLE = gated_delta_kwargs(PACKED, kernel="transformers"), [0, 0, 1, 0, 1, 1]
CU, HOST = cu(0, 3, 73), host(0, 3, 73)
TABLE_32, TABLE_64 = (gated_delta_kwargs(PACKED, kernel="fla", chunk_size=n, tables=True)["chunk_indices"] for n in (32, 64))
PACK = (0, 3, 73, 75, 139)
ROWS, NEW, MAIN, INFER = {"B": 2, "T": 25}, of(), {"versions": {"megatron": "main"}}, {"training": False}
ONE, FLAT = {"B": 1, "T": 73}, {"B": None}

CALLS: dict[str, list[tuple[Any, ...]]] = {
    "fla.chunk_gated_delta_rule": [
        (CU, "", {"chunk_size": 16}), (cu(0, 1), "", {"T": 1}), (CU | {"attention_mask": None, "position_ids_un": None}, ""),
        (cu(3, 70), "first last"), (cu(3, 73), "first"), (cu(0, 3, 70), "last"), (cu(0, 3, 80), "last"),
        (CU, "last", {"T": 80}), (cu(0, 70, 3, 73), "falling"), (cu(0), "count"),
        (cu(0, 3, 3, 73), "empty", of(fla="0.5.0")), (cu(0, 3, 73, 73), "", of(fla="0.5.0")),
        (cu(0, 3, 3, 73), "", of(fla="0.5.1")), (cu(0, 3, 73, chunk_indices=TABLE_32), "table"),
        (cu(0, 3, 73, chunk_indices=TABLE_64), ""), (cu(0, 3, 73, cu_seqlens_cpu=dev(0, 40, 73)), "copy"),
        ({"chunk_indices": TABLE_64}, "alone"), ({"cu_seqlen": dev(0, 3, 73)}, "unread"), (keep("left"), "unread", ROWS),
        (qkv(4, 8, T=4), "", {"T": 4}), (CU | {"q": meta(1, 4, 73, 128)}, "shape"),
        (CU | qkv(4, 8, initial_state=meta(2, 4, 128, 128)), "shape"),
        (CU | qkv(4, 8, g=meta(1, 73, 8), beta=meta(1, 73, 8), initial_state=meta(2, 8, 128, 128)), ""),
        (gated_delta_kwargs(RIGHT, kernel="fla", keep_padding=True), "", {"T": 50, "segments": RIGHT}),
        (cu(0, 1, 2, 4), "", {"T": 4, "segments": Segments.from_lengths([[1, 1], [2]])}),
        (cu(0, 4, 73), "differs-from-segments", {"segments": PACKED}),
        (cu(0, 3, 74), "sizes-differ", {"T": 74, "segments": PACKED}),
        *((cu(0, 3, 73, scale=scale), rules) for scales, rules in (((5e-324, 1, np.float64(2)), ""),
          ((0.0, -1, math.inf, math.nan, np.float64(-2)), "scale")) for scale in scales),
        ({"cp_context": 1}, "differs-from-segments", {"segments": PACKED}), ({"cp_context": 1}, ""),
    ],
    "fla.chunk_kda": [(cu(0, 3, 73, initial_state=meta(2, 4, 128, 128, dtype=torch.float32)), "")],
    "fla.fused_recurrent_gated_delta_rule": [(CU, "", INFER), (cu(0, 3, 74), "last", INFER)],
    "fla.causal_conv1d": [
        (cu(0, 3, 73, backend="triton", x=meta(1, 73, 16)), ""), (CU, "last", {"T": 80}),
        (cu(0, 73, 146), "last rows", {"B": 2}), (cu(0, 73, 146), "", {"B": 2} | INFER),
        (cu(0, 3, 73, chunk_indices=TABLE_32), "table", {"chunk_size": 32}),
        ({"x": meta(1, 73, 4, 8), "weight": meta(32, 4)}, ""),
    ],
    "fla.build_cp_context": [
        (CU, ""), (cu(0, 3, 64), "last"), (cu(0, 73), "differs-from-segments", {"segments": PACKED}),
    ],
    "causal_conv1d.causal_conv1d_fn": [
        (numbered(3, 70, x=meta(1, 73, 16).transpose(1, 2)), ""), (numbered(9, 64), "", {"segments": None}),
        (numbered(73), "differs-from-segments", {"segments": PACKED}),
        ({"seq_idx": i32(0, 0, 1, 0, 0)[None]}, "numbers-return", {"T": 5}),
        ({"seq_idx": i32(1, 0, 0, 0, 1)[None]}, "", {"T": 5}),
        ({"seq_idx": i32(1, 0, 1)[None], "weight": meta(16, 2)}, "", {"T": 3}),
        ({"seq_idx": torch.stack([i32(0, 1, 2), i32(0, 0, 0)])}, "", {"B": 2, "T": 3}),
    ],
    "mamba.mamba_split_conv1d_scan_combined": [({"zxbcdt": meta(1, 73, 40)} | CU, "offsets-alone")],
    "mamba.mamba_chunk_scan_combined": [
        (CU, "offsets-alone"), (CU | numbered(3, 70), ""), (numbered(61_000), "", {"T": 61_000}),
        ({"seq_idx": torch.zeros(2, 30_501, dtype=torch.int32)}, "tokens", {"B": 2, "T": 30_501}),
        ({"seq_idx": torch.cat([ids(9), ids(9) + 1, ids(9)], 1)}, "numbers-return", {"T": 27}),
        ({"seq_idx": torch.zeros(2, 25, dtype=torch.int32)}, "", ROWS | {"segments": Segments.from_lengths([25, 25])}),
    ],
    "fla_npu": [
        (host(0, 3, 70, chunk_indices=TABLE), "last"), (host(0, 3, 73, chunk_indices=[1, 0, 0, 0, 1, 1]), "table"),
        (host(0, 3, 3, 73, chunk_indices=[0, 0, 2, 0, 2, 1]), "empty"), (host(0, 4, 73, chunk_indices=TABLE), "", {}),
        (host(0, 4, 73, chunk_indices=TABLE), "differs-from-segments", {"segments": PACKED}),
    ],
    "fla_npu.chunk_local_cumsum": [
        (host(0, 3, 73, chunk_indices_out=[0, 0, 1, 0]), "", {"chunk_size": 1}),
        (host(0, 1500, chunk_indices_out=[0, 0]), "table", {"T": 1500, "chunk_size": 128}),
        (host(0, 3, 73, chunk_indices=TABLE), "unread"), (host(3, 73), "first"), (host(0, 3, 3, 73), "empty"),
        (host(0, 3, 73, chunk_indices_out=[0, 0, 1, 0], scale=-1.44), ""),  # of a cumulative sum it has any sign
        (host(0, 3, 73, chunk_indices_out=[0, 0, 1, 0], g=meta(1, 4, 73)), ""),
        (host(0, 3, 73, chunk_indices_out=[0, 0, 1, 0], g=meta(1, 73, 4)), "shape"),
    ],
    "fla_npu.flash_gated_delta_rule": [
        (cu(0, 3, 73, cu_seqlens_list=[0, 3, 73]), "", {"segments": PACKED}),
        (cu(0, 3, 73, cu_seqlens_list=[0, 4, 73]), "copy"), ({"cu_seqlens_list": [0, 3, 73]}, "alone"),
        (cu(0, 3, 73, chunk_indices={"64": TABLE_64}, chunk_indices_list={"64": TABLE}), ""),
        (cu(0, 3, 73, chunk_indices_list={"64": [0, 0, 1, 0]}), "table"),
        (cu(0, 3, chunk_indices_list={"1": [0, 0, 0, 1, 0, 2]}), "", {"T": 3}),
    ],
    "fla_npu.causal_conv1d": [
        (starts(0, 3, 73, x=meta(73, 16), weight=meta(4, 16)), "", FLAT), (starts(0, 3, 3, 73), "", FLAT),
        # rows are read as rows whatever the boundaries say; another count the host refuses
        (starts(0, 4, 8, x=meta(2, 4, 16)), "", {"B": 2, "T": 4} | INFER),
        (starts(0, 3, 8, x=meta(2, 4, 16)), "rows", {"B": 2, "T": 4} | INFER),
        (starts(0, 2, 4, 8, x=meta(2, 4, 16)), "", {"B": 2, "T": 4} | INFER),
        (starts(0, 3, 8, x=meta(8, 16)), "", FLAT | {"T": 8} | INFER),
        (starts(0, 12, 8, 16), "falling", FLAT | {"T": 16}), ({"x": meta(1, 73, 16, requires_grad=True)}, ""),
        (starts(0, 3, 73, x=meta(73, 16, requires_grad=True)), "history", FLAT), ({"activation_mode": 1}, "history"),
        (starts(0, 3, 73, x=meta(73, 16, requires_grad=True)), "", FLAT | INFER),
    ],
    "fla_npu.recurrent_gated_delta_rule": [
        (lengths(4, 4), "first", {"T": 8} | INFER), (lengths(0, 4, 4), "", {"T": 8} | INFER),
        (lengths(0, 8), "last", FLAT | {"T": 4} | INFER), (lengths(0, 9), "length", {"T": 9} | INFER),
    ],
    "torch_npu.npu_chunk_gated_delta_rule": [
        (lengths(4, 4), "backward", {"T": 8}), (lengths(4, 4), "", {"T": 8} | INFER),
        (lengths(0, 4, 4), "empty", {"T": 8} | INFER), (lengths(0, 4, 8), "empty last", {"T": 8} | INFER),
        (lengths(3, 70), "scale", {"segments": PACKED} | INFER),
        (lengths(3, 70, scale=0.5), "", {"segments": PACKED} | INFER),
        (lengths(8, q=meta(8, 4, 128), initial_state=meta(2, 4, 128, 128)), "states", {"T": 8} | INFER),
    ],
    "transformers.gdn_layer": [
        (cu_q(*PACK) | numbered(3, 70, 2, 64), "", NEW | {"T": 139}), (BOTH | {"chunk_size": 32}, "", NEW),
        (cu_q(0, 3, 73), "pair", NEW), (numbered(3, 70), "pair", NEW), (cu_q(0, 3, 73), "pair", of(causal_conv1d="")),
        *((one, "", NEW) for one in (cu_q(0, 73), cu_q(0, 73, 73), numbered(73))), (cu_q(0, 1, 73), "pair", NEW),
        (BOTH, "package", of(transformers="5.19.0", causal_conv1d="")), (BOTH, "", of(causal_conv1d="")),
        (BOTH, "release", of(transformers="5.9.1")),
        (BOTH | CU, "unread", NEW), ({"attention_mask_2d": keep()["attention_mask"]}, "unread", ROWS),
        (BOTH | numbered(4, 69), "pair", NEW), (numbered(4, 69) | cu_q(0, 4, 73), "differs-from-segments",
         NEW | {"segments": PACKED}),
        *(({"position_ids": positions}, rules, NEW) for positions, rules in (
            (torch.arange(73)[None], ""), (torch.arange(73), ""),
            (torch.cat([torch.arange(3), torch.arange(70)])[None], "positions-alone"))),
        ({"position_ids": dev(-1, -1, 0, 1)[None]}, "", NEW | {"T": 4}),
        *(({"position_ids": dev(0, 0, 0, 1)[None], "attention_mask": mask[None]}, rules, NEW | {"T": 4})
          for mask, rules in ((dev(0, 0, 1, 1), ""), (dev(1, 1, 1, 1), "positions-alone"))),
        (keep("left"), "", NEW | ROWS), (keep("left", bias=meta(16)), "bias", ROWS), (keep("hole"), "hole", NEW | ROWS),
        (keep("hole"), "hole", NEW | ROWS | {"segments": HOLE}), (keep("left", B=1), "", NEW | {"T": 25}),
        (keep("left", B=1), "mask-dropped", of(transformers="4.57.1") | {"T": 25}),
        *((masked(change), "mask-form", ROWS) for change in
          (lambda m: m[:, None, None], Tensor.tolist, lambda m: m[:, 1:], lambda m: m.to("meta"))),
        *((masked(change), "mask-values", ROWS) for change in (lambda m: m * 2, lambda m: (1 - m).float() * -1e9)),
        (masked(torch.ones_like), "differs-from-segments", NEW | ROWS | {"segments": LEFT}),
        (BOTH | {"attention_mask": (torch.arange(73) > 5).long()[None]}, "mask-and-offsets", NEW),
        (BOTH | {"attention_mask": (torch.arange(73) < 60).long()[None], "position_ids": torch.arange(73)[None]}, "", NEW),
    ],
    "megatron_core.GatedDeltaNet": [
        (thd(0, 3, 73), "", MAIN), ({"packed_seq_params": SimpleNamespace(**thd(0, 3, 73))}, ""),
        (thd(0, 3, 73) | {"packed_seq_params": SimpleNamespace(**thd(0, 4, 74))}, ""),
        (thd(0, 3, 73, total_tokens=74), "total"), (thd(0, 3, 73, padded_to=(0, 4, 76)), "", {"T": 76}),
        (thd(0, 5, 73, padded_to=(0, 4, 76)), "padded-actual", {"T": 76}),
        (keep("right"), "", ROWS), (keep("left"), "mask-unread", ROWS), (masked(lambda m: "no mask"), "mask-unread", ROWS),
        ({"attention_mask": torch.zeros(2, 1, 25, 25, dtype=torch.bool)}, "mask-unread", ROWS),
        *(({"attention_mask": mask}, "", ROWS) for bias in [dense(RIGHT, polarity="bias")] for mask in (bias, bias[:, 0])),
        (keep("left"), "differs-from-segments", ROWS | {"segments": LEFT}),
        ({"attention_mask": torch.ones(1, 1, 25, 25).tril() == 0}, "",
         {"T": 25, "segments": Segments.from_lengths([20], 25)}),
        (thd(0, 8, 8, 16), "", {"T": 16}),
    ],
    "mindspeed.GatedDeltaNet": [
        (thd(0, 3, 73), ""), (thd(3, 73), ""), (thd(0, 3, 3, 73), "empty"), (thd(3, 80), "first last"),
    ],
}  # fmt: skip


def broken(operator: str, kwargs: dict[str, Any], says: dict[str, Any]) -> set[str]:
    """The rules that the call breaks, whoever is asked, and with a remedy and a source in the message."""
    says = {"B": 1, "T": 73} | says
    found = call_breaches(operator, kwargs, **says)
    with pytest.raises(UnsupportedFormError) if found else contextlib.nullcontext() as error:
        check_call(operator, kwargs, **says)
    for each in found:
        assert all(text and text in str(error.value) for text in (each.rule, each.says, each.remedy, each.source))
    return {each.rule for each in found}


@pytest.mark.parametrize("operator", CALLS)
def test_what_is_known_of_a_call_holds(operator: str) -> None:
    for kwargs, rules, *says in CALLS[operator]:
        assert broken(operator, kwargs, *(says or [{}])) == {*rules.split()}, (kwargs, says)


def test_every_operator_and_every_rule_is_in_the_table(rules_of: Callable[[str], set[str]]) -> None:
    assert {*CALLS} == {*OPERATORS}
    assert {rule for calls in CALLS.values() for call in calls for rule in call[1].split()} == rules_of("gated_delta")


def test_each_operator_is_found_by_its_name_and_by_that_of_its_kernel() -> None:
    for name, row in OPERATORS.items():
        assert knows(name)
        module, _, function = name.partition(".")
        assert not function or operator_named(f"{module}.some.module.{function}") is row
    assert {*get_args(Kernel), "mindspeed"} == {*KERNELS}
    assert operator_named("fla_npu.npu_chunk_local_cumsum").name == "fla_npu.chunk_local_cumsum"
    assert operator_named("mamba_ssm.mamba_chunk_scan_combined").package == "mamba"
    assert not knows("fla.something_else")


@pytest.mark.parametrize("name", OPERATORS)
def test_the_circle_of_remedies_ends(name: str) -> None:
    """What a remedy says to take is taken as a whole, and computed as it is meant."""
    row, segments = OPERATORS[name], Segments.from_lengths([[3, 4]], width=8)
    right = gated_delta_kwargs(segments, kernel=row.kernel) | ({"scale": 0.5} if not row.backward else {})  # type: ignore
    says = {"T": 8, "training": row.backward} | NEW
    for truth in (None, segments):
        assert not broken(name, right, says | {"segments": truth})
    (breach,) = call_breaches(name, {"cu_seqlen": 1}, B=1, **says)
    assert f"kernel={row.kernel!r}" in breach.remedy


# --- the tensors of an operator, as its vendor lists them: written from the hosts of flash-linear-attention-npu 17e24fd and
# from fla 0.5.2, not from the rows of the check. U: values of torch_npu

SIZES = {"B": 1, "T": 7, "H": 3, "N": 6, "K": 128, "V": 256, "S": 2, "U": 64}
RULE = "q:BTHK k:BTHK v:BTNV g:BTN beta:BTN initial_state:SNKV"
SHORT = Segments.from_lengths([[3, 4]])
ORDERS = {
    "fla_npu.npu_chunk_local_cumsum": ("fla_npu_cumsum", "g:BNT"),
    "fla.chunk_gated_delta_rule": ("fla", RULE),
    "fla.chunk_kda": ("fla", RULE.replace("g:BTN", "g:BTNK")),
    "fla_npu.flash_gated_delta_rule": ("fla_npu_flash", "q:BHTK k:BHTK v:BHTV g:BTH beta:BTH initial_state:SHKV"),
    "fla_npu.npu_recurrent_gated_delta_rule": ("fla_npu_recurrent", "q:THK k:THK v:TNV g:TN beta:TN state:SNVK"),
    "torch_npu.npu_chunk_gated_delta_rule": ("torch_npu", "q:THK k:THK v:TNU g:TN beta:TN initial_state:SNUK"),
}


def resized(orders: dict[str, str], **sizes: int) -> dict[str, Tensor]:
    """All tensors of the call, with an axis of another size."""
    return {x: meta(*((SIZES | sizes)[axis] for axis in order)) for x, order in orders.items()}


@pytest.mark.parametrize("name", ORDERS)
def test_tensors_that_lie_otherwise_are_refused_by_the_name_of_the_operator(name: str) -> None:
    kernel, text = ORDERS[name]
    orders = dict(pair.split(":") for pair in text.split())
    call = resized(orders) | gated_delta_kwargs(SHORT, kernel=kernel) | {"scale": 0.5}  # type: ignore[arg-type]
    wrong = [resized(orders, T=9), *({x: resized(orders, T=9)[x]} for x, order in orders.items() if "T" in order)]
    for x, order in orders.items():
        shape = tuple(SIZES[axis] for axis in order)
        others = {*permutations(shape), (*shape, 1), shape[:-1]} - {shape}
        wrong += [{x: meta(*other)} for other in others if "B" not in order or other[0] == 1]  # rows the host refuses
    for segments in (None, SHORT):
        assert not call_breaches(name, call, segments=segments, training=False)
        for change in wrong:
            with contextlib.suppress(CollateError):  # nothing tells how many tokens there are
                assert call_breaches(name, call | change, segments=segments, training=False), change


@pytest.mark.parametrize("flag", ["state_v_first", "transpose_state_layout"])
def test_a_state_lies_as_the_call_says(flag: str) -> None:
    for name in ("fla.chunk_gated_delta_rule", "fla_npu"):
        offsets = CU if name != "fla_npu" else host(0, 3, 73, chunk_indices=TABLE)
        for V_first, lies in itertools.product((True, False), repeat=2):
            x, v = ((1, 73, 4), (1, 73, 8)) if name != "fla_npu" else ((1, 4, 73), (1, 8, 73))
            state = meta(2, 8, *((256, 128) if lies else (128, 256)))
            call = offsets | {"q": meta(*x, 128), "v": meta(*v, 256), "initial_state": state, flag: V_first}
            assert broken(name, call, {}) == (set() if lies == V_first else {"shape"})


# --- names, values, messages


@pytest.mark.parametrize(
    ("kernel", "says", "message"),
    [
        ("fla_con", {}, r"'fla_con'.*Did you mean (?!.*megatron).*fla_conv"), ("", {}, r"Name one of \w"),
        *(("fla", {name: value}, name) for name, value in (
            ("training", "yes"), ("T", 0), ("B", 0), ("T", 2.5), ("chunk_size", "64"),
            ("versions", "0.5.2"), ("versions", {"fla": "banana"}), ("arguments", [("cu_seqlens", 3)]))),
        ("fla", {"versions": {"flaa": "5.23.0"}}, "Did you mean fla"),
    ],
)  # fmt: skip
def test_names_sizes_and_types_that_are_not_known_are_refused(kernel: str, says: dict[str, Any], message: str) -> None:
    for judge in (check_call, call_breaches):
        with pytest.raises(CollateError, match=message):
            judge(kernel, **{"arguments": {}} | ONE | says)


def test_the_message_names_tokens_and_releases() -> None:
    with pytest.raises(UnsupportedFormError) as error:
        check_call("fla", cu(0, 4, 73), segments=PACKED, **ONE)
    assert str(error.value) == (
        "fla:\n[differs-from-segments] cu_seqlens: got the token at (row, column) (0, 3) goes on from another sequence. "
        "The segments say otherwise. Take the boundaries from gated_delta_kwargs(segments, kernel='fla'). Or "
        "unpad() the batch and its tensors, or pass the segments that this call is for. (Segments)"
    )
    for kwargs, kernel, versions, text in (
        (BOTH, "transformers", {"transformers": "5.9.1"}, "transformers 5.9.1"),
        (cu(0, 3, 3, 73), "fla", {"fla": "0.4.2"}, "fla 0.4.2"),
        ({"seq_idx": ids(2, 1, 70) % 2}, "causal_conv1d", {}, "[0, 1, 0]"),
        (CU | {"cu_seqlens": dev(0, 3, 70)}, "fla", {}, "unwritten"), (cu(0, 3, 80), "fla", {}, "memory after them"),
    ):  # fmt: skip
        (breach,) = call_breaches(kernel, kwargs, **ONE, versions=versions)
        assert text in f"{breach.got} {breach.says}"


def test_arguments_are_only_read() -> None:
    kwargs = gated_delta_kwargs(PACKED, kernel="fla", tables=True)
    before = {name: value.clone() for name, value in kwargs.items()}
    check_call("fla", kwargs, **ONE, segments=PACKED)
    assert kwargs.keys() == before.keys()
    assert all(torch.equal(kwargs[name], value) for name, value in before.items())


ODD: tuple[Any, ...] = (
    *("0 3 73", object(), 3, True, [[0], [3, 73]], [0, None, 73], np.array([0, 3, 73]), []),
    *(torch.tensor([0.0, 3.0, 73.0]), torch.tensor([True, False]), torch.zeros(3, dtype=torch.complex64)),
    *(torch.tensor([0, 3, 73]).to_sparse(), torch.empty(3, dtype=torch.int64, device="meta"), torch.tensor(3)),
    torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    *(torch.zeros(73, 73, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.tensor([0, 2**62])),
)
OTHERS = (
    "chunk_size layout qkv_format backend total_tokens num_samples activation_mode initial_state_mode cp_context dht "
    "q x weight initial_state"
)


@pytest.mark.parametrize("operator", [*OPERATORS])
def test_odd_values_are_read_or_refused_never_a_raw_error(operator: str) -> None:
    own = OPERATORS[operator]
    names = {*own.offsets, *own.copies, *own.tables, *own.reads, own.numbers, *own.shapes, *OTHERS.split()}
    right = HOST if own.host else {name: CU["cu_seqlens"].int() for name in own.offsets[:1]}
    for name, value in itertools.product(sorted(names - {""}), ODD):
        for kwargs, segments in (({name: value}, PACKED), (right | {name: value}, None), (right | {name: value}, PACKED)):
            with contextlib.suppress(CollateError):
                call_breaches(operator, kwargs, **ONE, segments=segments, **NEW)
