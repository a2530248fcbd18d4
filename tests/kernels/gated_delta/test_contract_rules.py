"""Every rule of the recurrent kernels' contract says its name; what breaks none passes."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from contract_cases import (
    BOTH,
    BRIDGED,
    CC,
    CONV,
    CU,
    CUMSUM,
    FLAT,
    FULL,
    HF,
    HOST,
    KDA_INTRA,
    MAIN,
    MAMBA,
    MASKED,
    MBR,
    MG,
    MS,
    MSL,
    NPU_CONV,
    NPU_GDR,
    NPU_KDA,
    PACKED,
    RIGHT,
    ROWS,
    RULE,
    TABLE,
    TE,
    TITAN,
    cp,
    dev,
    i32,
    ids,
    meta,
    padded,
    pairs,
    qkv,
    thd,
)

from collate_npu import CollateError, ContextParallel, Segments, UnsupportedFormError, dense
from collate_npu.kernels.gated_delta import (
    check_gated_delta_contract,
    gated_delta_breaches,
    gated_delta_kwargs,
    releases,
)
from collate_npu.kernels.gated_delta.operator_names import OPERATORS

LONG = Segments.from_lengths([[3, 125]])
X = {"x": meta(73, 16), "weight": meta(4, 16)}
STATES = {"initial_state": meta(2, 4, 128, 128)}

# --- rules beside the traps


@pytest.mark.parametrize(
    ("operator", "rule", "kwargs", "says"),
    [
        (RULE, "context", CU | {"cp_context": object(), "output_final_state": True}, FLAT),
        (RULE, "context-unread", {"cp_context": object()}, FLAT | {"segments": PACKED}),
        (RULE, "alone", {"chunk_indices": pairs([0, 3, 73], 64)}, FLAT),
        (RULE, "states", STATES, FLAT),
        (RULE, "container", {"cu_seqlens": torch.empty(3, dtype=torch.int64, device="meta")}, FLAT),
        (RULE, "container", CU | {"cu_seqlens_cpu": [0, 3, 73]}, FLAT),
        (RULE, "container", CU | {"chunk_indices": TABLE}, FLAT),
        (RULE, "count", {"cu_seqlens": dev(0)}, FLAT),
        (RULE, "sizes-differ", {"cu_seqlens": dev(0, 3, 74)}, {"B": 1, "T": 74, "segments": PACKED}),
        (RULE, "ranks-total", CU, FLAT | cp("ulysses")),
        ("fla_cp", "ranks-total", CU | {"world_size": 2}, FLAT),
        ("fla_npu.chunk_kda_fwd", "shape", HOST | {"q": meta(1, 4, 73, 128)}, FLAT),
        (CONV, "cuda-state", CU | STATES | {"backend": "cuda"}, FLAT),
        (CONV, "strides", CU | {"dy": meta(1, 16, 73).transpose(1, 2)}, FLAT),
        (CONV, "short-state", {"cu_seqlens": dev(0, 2, 73), "dht": meta(2, 16, 4)}, FLAT),
        ("fla.chunk_kda", "state-dtype", CU | STATES, FLAT),
        ("fla.chunk_kda", "head-size", {"q": meta(1, 73, 4, 512)}, FLAT),
        ("fla.ShortConvolution", "mask-and-offsets", CU | {"mask": ids(73).long() + 1}, FLAT),
        ("fla.GatedDeltaNet", "mask-rank", {"attention_mask": padded()[:, None]}, ROWS),
        (CC, "taps", {"seq_idx": ids(3, 70), "weight": meta(16, 5)}, FLAT),
        (CC, "strides", {"seq_idx": torch.zeros(73, 2, dtype=torch.int32)[:, :1].T}, FLAT),
        (MAMBA, "tokens", {"seq_idx": ids(70_000)}, {"B": 1, "T": 70_000}),
        (
            HF,
            "positions-alone",
            {"position_ids": torch.cat([torch.arange(3), torch.arange(70)])[None]},
            FLAT | {"versions": FULL},
        ),
        (HF, "disagree", BOTH | {"seq_idx": ids(4, 69)}, FLAT | {"versions": FULL}),
        (HF, "release", BOTH, FLAT | {"versions": {"transformers": "4.57.1"}}),
        (HF, "mask-form", {"attention_mask": [[1] * 25] * 2}, ROWS),
        (HF, "mask-shape", {"attention_mask": padded()[:, 1:]}, ROWS),
        (
            "fla_npu",
            "release",
            gated_delta_kwargs(Segments.from_lengths([[40000]]), kernel="fla_npu"),
            {"B": 1, "T": 40000, "versions": {"fla_npu": "26.6.0"}},
        ),
        ("fla_npu.chunk_gated_delta_rule_fwd_h", "release", HOST, FLAT | {"versions": {"fla_npu": "v26.6.0"}}),
        ("fla_npu.chunk_fwd_o", "table-odd", HOST | {"chunk_indices": TABLE[:-1]}, FLAT),
        (KDA_INTRA, "layout", HOST | {"safe_gate": False}, FLAT),
        ("fla_npu.causal_conv1d_bwd", "layout", {"query_start_loc": [0, 3, 73], "input_layout": "BSND"}, FLAT),
        ("fla_npu.causal_conv1d_bwd", "missing", {"query_start_loc": [0, 73], "input_layout": "TND", "activation": 1}, FLAT),
        (NPU_CONV, "missing", X, {"B": None, "T": 73}),
        (NPU_CONV, "states", {"query_start_loc": [0, 3, 73], "initial_state_mode": [0]}, {"B": None, "T": 73}),
        (NPU_CONV, "channels", {"query_start_loc": [0, 3, 73], "x": meta(73, 24)}, {"B": None, "T": 73}),
        (NPU_CONV, "taps", {"query_start_loc": [0, 3, 73], "weight": meta(16, 4)}, {"B": None, "T": 73}),
        (NPU_GDR, "length", {"actual_seq_lengths": i32(0, 9)}, {"T": 9, "training": False}),
        (
            NPU_GDR,
            "states",
            {"actual_seq_lengths": i32(0, 4, 4), "ssm_state_indices": i32(*[0] * 7, 5), "state": meta(5, 4, 8, 8)},
            {"T": 8, "training": False},
        ),
        (
            NPU_GDR,
            "states",
            {"actual_seq_lengths": i32(0, 4, 4), "ssm_state_indices": i32(0, 1)},
            {"T": 8, "training": False},
        ),
        ("torch_npu", "backward", {"actual_seq_lengths": i32(4, 4)}, {"T": 8}),
        ("torch_npu", "missing", {"actual_seq_lengths": i32(8), "q": meta(8, 4, 128)}, {"T": 8, "training": False}),
        ("torch_npu", "missing", {}, {"T": 8, "training": False}),
        (
            "torch_npu",
            "dtype",
            {"actual_seq_lengths": i32(8), "q": torch.empty(8, 4, 128, device="meta")},
            {"T": 8, "training": False},
        ),
        ("torch_npu", "heads", {"actual_seq_lengths": i32(8), "q": meta(8, 65, 128)}, {"T": 8, "training": False}),
        (MASKED, "taps", {"mask": padded().bool(), "weight": meta(4, 16)}, ROWS),
        (MASKED, "mask-dtype", {"mask": padded()}, ROWS),
        (MG, "format", thd(0, 3, 73, qkv_format="sbhd"), FLAT | {"versions": MAIN}),
        (MG, "missing", {"qkv_format": "thd"}, FLAT),
        (MG, "total", thd(0, 3, 73, total_tokens=74), FLAT | {"versions": MAIN}),
        (MG, "keys", thd(0, 3, 73, cu_seqlens_kv=i32(0, 4, 73)), FLAT | {"versions": MAIN}),
        (MG, "ranks-pieces", {}, {"B": 2, "T": 74} | cp("zigzag")),
        (MG, "mask-unread", {"attention_mask": torch.zeros(2, 1, 25, 25, dtype=torch.bool)}, ROWS),
        (MBR, "mask-unread", {"attention_mask": ids(3, 70).long() + 1}, FLAT),
        (
            BRIDGED,
            "package",
            {"cu_seq_lens_q": i32(0, 3, 73)},
            FLAT | {"versions": {"transformers": "5.12.0", "fla": "", "causal_conv1d": "1.6.1"}},
        ),
        (
            BRIDGED,
            "ranks",
            {"cu_seq_lens_q": i32(0, 4, 8)},
            {"B": 1, "T": 8, "versions": FULL | {"transformers": "5.12.0"}} | cp("ulysses"),
        ),
        ("mcore_bridge.Qwen3NextGatedDeltaNet(USE_MCORE_GDN=0)", "samples", thd(0, 3, 73, num_samples=3), FLAT),
        (MS, "release", {}, FLAT | {"versions": {"mindspeed": "core_r0.15.3"}}),
        (MS, "release", thd(0, 3, 73), FLAT | {"versions": {"mindspeed": "0.17"}}),
        (MS, "float32", {"q": torch.empty(1, 73, 4, 8, device="meta")}, FLAT | {"versions": {"mindspeed": "0.18"}}),
        (MSL, "boundaries-unused", {"packed_seq_params": SimpleNamespace(cu_seqlens_q=i32(0, 3, 73))}, FLAT),
        ("mindspeed_llm.qwen3_next_fsdp2", "boundaries-unused", {"actual_seq_len": dev(3, 73)}, FLAT),
        ("mindspeed_llm.qwen3_next_fsdp2", "ranks-pieces", {}, {"B": 1, "T": 74} | cp("zigzag")),
        ("veomni.qwen3_5_gdn", "missing", {}, FLAT),
        (TITAN, "ranks", {}, {"B": 1, "T": 74} | cp("ulysses")),
        (TITAN, "copy", {"attention_masks": SimpleNamespace(cu_seq_q=dev(0, 3, 73), cu_seq_q_host=(0, 4, 73))}, FLAT),
        (TE, "unread", {"cu_seqlens_q": i32(0, 3, 73), "cu_seqlens_kv": i32(0, 3, 73)}, FLAT),
        (TE, "missing", {}, FLAT),
    ],
)
def test_each_rule_says_its_name(operator: str, rule: str, kwargs: dict[str, Any], says: dict[str, Any]) -> None:
    found = gated_delta_breaches(kwargs, kernel=operator, **({"B": 1} | says))
    assert rule in [breach.rule for breach in found]


@pytest.mark.parametrize(
    ("operator", "kwargs", "says"),
    [
        (RULE, {}, {"B": 2, "T": 73}),
        (RULE, CU | {"attention_mask": None, "position_ids_unused": None}, FLAT),
        (RULE, CU | qkv(4, 8) | {"g": meta(1, 73, 8), "beta": meta(1, 73, 8)} | STATES, FLAT),
        (RULE, {"cp_context": object()}, FLAT),
        (MG, {"attention_mask": dense(RIGHT, polarity="bias")}, ROWS),
        (NPU_CONV, {"x": torch.empty(1, 73, 16, device="meta", requires_grad=True)}, FLAT),
        (RULE, {"cu_seqlens": dev(0, 3, 3, 73), "output_final_state": True}, FLAT | {"versions": {"fla": "0.5.1"}}),
        (RULE, qkv(T=1), {"B": 1, "T": 1}),
        (RULE, qkv(4, 8, T=4), {"B": 1, "T": 4}),
        (CONV, {"cu_seqlens": dev(0, 73, 146)}, {"B": 2, "T": 73, "training": False}),
        (CONV, {"x": meta(1, 73, 4, 8), "weight": meta(32, 4)}, FLAT),
        (CC, {"seq_idx": ids(3, 70) + 9, "weight": meta(16, 4)}, FLAT),
        (CC, {"seq_idx": i32(1, 0, 0, 0, 1)[None]}, {"B": 1, "T": 5}),
        (CC, {"seq_idx": i32(1, 0, 1)[None], "weight": meta(16, 2)}, {"B": 1, "T": 3}),
        (HF, {"attention_mask": padded("left", B=1)}, {"B": 1, "T": 25, "versions": FULL}),
        (
            HF,
            BOTH | {"attention_mask": (torch.arange(73) < 60).long()[None], "position_ids": torch.arange(73)[None]},
            FLAT | {"versions": FULL},
        ),
        ("fla.GatedDeltaNet", {"attention_mask": padded("hole")}, ROWS),
        ("fla.layers.GatedDeltaNet", {"attention_mask": padded("left")}, ROWS),
        ("fla_npu.npu_chunk_scaled_dot_kkt", {}, {"B": 2, "T": 73}),
        (CUMSUM, HOST | {"chunk_indices_out": (0, 0, 1, 0), "head_first": False, "g": meta(1, 73, 4)}, FLAT),
        (NPU_CONV, X | {"x": meta(1, 73, 16)}, {"B": 1, "T": 73}),
        (MBR, thd(3, 73), FLAT),
        (RULE, {"cu_seqlens": dev(0, 3, 128), "cp_context": object()}, {"B": 1, "T": 128, "segments": LONG} | cp()),
        ("fla_npu.chunk_kda_fwd", HOST | {"q": meta(1, 4, 73, 128), "layout": "BNSD"}, FLAT),
        ("fla_cp", {"cu_seqlens": dev(0, 3, 74), "world_size": 2}, {"B": 1, "T": 74}),
        (
            NPU_GDR,
            {"actual_seq_lengths": i32(0, 4, 4), "ssm_state_indices": i32(*range(8)), "state": meta(8, 4, 8, 8)},
            {"T": 8, "training": False},
        ),
        (MG, {"packed_seq_params": SimpleNamespace(**thd(0, 3, 73))}, FLAT | {"versions": {"megatron": "0.18.0"}}),
        (
            MG,
            {"attention_mask": torch.ones(1, 1, 25, 25).tril() == 0},
            {"B": 1, "T": 25, "segments": Segments.from_lengths([20], 25)},
        ),
        (MS, thd(0, 3, 73), FLAT | {"versions": {"mindspeed": "0.18"}}),
        ("twinkle.qwen3_5_gdn", {"cu_seq_lens_q": i32(0, 3, 73)}, FLAT),
        ("verl.qwen3_5_gdn", gated_delta_kwargs(PACKED, kernel="fla"), FLAT | {"segments": PACKED}),
        (
            TITAN,
            {"attention_masks": SimpleNamespace(cu_seq_q=i32(0, 20, 25, 50), cu_seq_q_host=(0, 20, 25, 50))},
            ROWS | {"segments": RIGHT},
        ),
        (TE, {"cu_seqlens_q": i32(0, 3, 73), "qkv_format": "thd"}, FLAT),
    ],
)
def test_what_is_right_passes(operator: str, kwargs: dict[str, Any], says: dict[str, Any]) -> None:
    check_gated_delta_contract(kwargs, kernel=operator, **({"B": 1} | says))


def test_a_rule_is_silent_where_the_operator_does_not_check_it() -> None:
    (below,) = gated_delta_breaches({"cu_seqlens": dev(0, 4, 7)}, kernel=NPU_KDA, B=1, T=8)
    (above,) = gated_delta_breaches({"cu_seqlens": dev(0, 4, 9)}, kernel=NPU_KDA, B=1, T=8)
    assert (below.rule, below.silent, above.rule, above.silent) == ("last", True, "last", False)
    assert "one more sequence" in below.remedy


# --- names, values, messages


def test_names_that_are_not_known_say_which_are_near() -> None:
    with pytest.raises(CollateError, match=r"'fla_con'.*Close to it: .*fla_conv"):
        check_gated_delta_contract({}, kernel="fla_con", B=1, T=3)
    with pytest.raises(CollateError, match="Close to it"):
        check_gated_delta_contract({}, kernel="", B=1, T=3)
    for wrong in ({"T": 0}, {"B": 0}, {"T": 2.5}, {"chunk_size": "64"}, {"context_parallel": 2}):
        with pytest.raises(CollateError):
            check_gated_delta_contract({}, **({"kernel": "fla", "B": 1, "T": 3} | wrong))  # type: ignore[arg-type]
    for wrong in ({"versions": "0.5.2"}, {"versions": ["fla"]}):
        with pytest.raises(CollateError, match="versions"):
            check_gated_delta_contract({}, **({"kernel": "fla", "B": 1, "T": 3} | wrong))  # type: ignore[arg-type]
    with pytest.raises(CollateError, match="kwargs"):
        check_gated_delta_contract([("cu_seqlens", 3)], kernel="fla", B=1, T=3)  # type: ignore[arg-type]


def test_the_message_names_tokens_and_releases() -> None:
    with pytest.raises(UnsupportedFormError) as error:
        check_gated_delta_contract({"cu_seqlens": dev(0, 4, 73)}, kernel="fla", B=1, T=73, segments=PACKED)
    assert str(error.value) == (
        "fla:\n[differs-from-segments] cu_seqlens: got the token at (row, column) (0, 3) reads (0, 2), and is the first of "
        "its sequence. The segments say otherwise. Use gated_delta_kwargs(segments, kernel='fla'), or unpad() the batch and "
        "its tensors; or pass the segments that this call is for. (Segments)"
    )
    (breach,) = gated_delta_breaches(BOTH, kernel="transformers", B=1, T=73, versions={"transformers": "5.9.1"})
    assert "transformers 5.9.1" in breach.says
    (breach,) = gated_delta_breaches({"cu_seqlens": dev(0, 2, 2, 9)}, kernel="fla", B=1, T=9, versions={"fla": "0.4.2"})
    assert "fla 0.4.2" in breach.says


def test_arguments_are_only_read() -> None:
    kwargs = gated_delta_kwargs(PACKED, kernel="fla", tables=True)
    before = {name: value.clone() for name, value in kwargs.items()}
    check_gated_delta_contract(kwargs, kernel="fla", B=1, T=73, segments=PACKED, context_parallel=ContextParallel(1, 0))
    assert kwargs.keys() == before.keys()
    assert all(torch.equal(kwargs[name], value) for name, value in before.items())


ODD: dict[str, Any] = {
    "text": "0 3 73",
    "an object": object(),
    "a number": 3,
    "true": True,
    "ragged lists": [[0], [3, 73]],
    "None in a list": [0, None, 73],
    "floats": torch.tensor([0.0, 3.0, 73.0]),
    "bools": torch.tensor([True, False]),
    "complex": torch.zeros(3, dtype=torch.complex64),
    "sparse": torch.tensor([0, 3, 73]).to_sparse(),
    "meta": torch.empty(3, dtype=torch.int64, device="meta"),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "no dimension": torch.tensor(3),
    "a matrix": torch.zeros(73, 73, dtype=torch.int64),
    "an array": np.array([0, 3, 73]),
    "an empty list": [],
    "an empty tensor": torch.zeros(0, dtype=torch.int64),
    "huge": torch.tensor([0, 2**62]),
}


@pytest.mark.parametrize("operator", [*OPERATORS])
def test_odd_values_are_read_or_refused_never_a_raw_error(operator: str) -> None:
    own = OPERATORS[operator]
    settings = (
        "chunk_size",
        "layout",
        "input_layout",
        "qkv_format",
        "backend",
        "total_tokens",
        "num_samples",
        "activation_mode",
    )
    tensors = (
        "q",
        "x",
        "weight",
        "initial_state",
        "state",
        "ssm_state_indices",
        "dht",
        "dy",
        "initial_state_mode",
        "cp_context",
    )
    names = {*own.offsets, *own.copies, *own.tables, *own.reads, own.numbers, *own.shapes, *settings, *tensors} - {""}
    right = {"cu_seqlens": [0, 3, 73]} if own.host else {name: i32(0, 3, 73) for name in own.offsets[:1]}
    for name, value in itertools.product(sorted(names), ODD.values()):
        for kwargs, segments in (({name: value}, PACKED), (right | {name: value}, None), (right | {name: value}, PACKED)):
            with contextlib.suppress(CollateError):
                gated_delta_breaches(kwargs, kernel=operator, B=1, T=73, segments=segments, versions=FULL | MAIN)


@pytest.mark.parametrize("name", ["flash-linear-attention-npu", "flash-linear-attention-npu-a2"])
def test_the_release_of_fla_npu_is_read_by_the_names_it_ships_under(monkeypatch, name):
    monkeypatch.setattr(releases.metadata, "version", lambda asked: _installed(asked, name))
    assert releases.Releases.of(None).text("fla_npu") == "26.6.0"


def _installed(asked, name):
    if asked == name:
        return "26.6.0"
    raise releases.metadata.PackageNotFoundError(asked)
