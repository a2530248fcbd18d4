"""The silent traps of recurrent kernels: each is refused by name, and what its remedy says is taken."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from contract_cases import (
    BOTH,
    CC,
    CONTEXT,
    CONV,
    CU,
    CUMSUM,
    DHU,
    FLAT,
    FULL,
    HF,
    HOLE,
    HOST,
    KDA_BWD,
    KDA_FWD,
    KDA_INTRA,
    LEFT,
    MAIN,
    MAMBA,
    MASKED,
    MBR,
    MG,
    MS,
    MSL,
    NPU_CONV,
    NPU_GDR,
    PACKED,
    ROWS,
    RULE,
    TABLE,
    TAILED,
    cp,
    dev,
    fla_conv,
    i32,
    ids,
    meta,
    padded,
    pairs,
    qkv,
    thd,
)

from collate_npu import UnsupportedFormError
from collate_npu.kernels.gated_delta import (
    check_gated_delta_contract,
    gated_delta_breaches,
    gated_delta_kwargs,
)


class Trap(NamedTuple):
    number: int
    operator: str
    rule: str
    wrong: dict[str, Any]
    right: dict[str, Any]
    says: dict[str, Any]
    """Sizes and more of both calls; `mended` says what else is other in the right one."""
    mended: dict[str, Any] = {}


X = {"x": meta(73, 16), "weight": meta(4, 16)}
LEARNING = {"x": torch.empty(73, 16, device="meta", requires_grad=True)}
STATES = {"initial_state": meta(2, 4, 128, 128)}
TRAPS = [
    Trap(1, HF, "pair", {"cu_seq_lens_q": BOTH["cu_seq_lens_q"]}, BOTH, FLAT | {"versions": FULL}),
    Trap(1, HF, "pair", {"seq_idx": BOTH["seq_idx"]}, BOTH, FLAT | {"versions": FULL}),
    Trap(
        2,
        HF,
        "pair",
        {"cu_seq_lens_q": BOTH["cu_seq_lens_q"]},
        BOTH,
        FLAT | {"versions": FULL | {"causal_conv1d": ""}},
        {"versions": FULL},
    ),
    Trap(
        2,
        HF,
        "package",
        BOTH,
        BOTH,
        FLAT | {"versions": {"transformers": "5.19.0", "fla": "0.5.2"}},
        {"versions": FULL | {"transformers": "5.19.0"}},
    ),
    Trap(3, RULE, "first", {"cu_seqlens": dev(3, 70)}, CU, FLAT),
    Trap(3, RULE, "first", {"cu_seqlens": dev(3, 73)}, CU, FLAT),
    Trap(3, RULE, "last", {"cu_seqlens": dev(0, 3, 70)}, CU, FLAT),
    Trap(
        3,
        NPU_GDR,
        "first",
        {"actual_seq_lengths": i32(4, 4)},
        {"actual_seq_lengths": i32(0, 4, 4)},
        {"T": 8, "training": False},
    ),
    Trap(
        3,
        "torch_npu",
        "empty",
        {"actual_seq_lengths": i32(0, 4, 4)},
        {"actual_seq_lengths": i32(4, 4)},
        {"T": 8, "training": False},
    ),
    Trap(4, RULE, "last", CU, gated_delta_kwargs(TAILED, kernel="fla"), {"B": 1, "T": 80}),
    Trap(5, RULE, "last", {"cu_seqlens": dev(0, 3, 80)}, CU, FLAT),
    Trap(5, RULE, "falling", {"cu_seqlens": dev(0, 70, 3, 73)}, CU, FLAT),
    Trap(6, RULE, "empty", {"cu_seqlens": dev(0, 3, 3, 73)}, CU, FLAT | {"versions": {"fla": "0.5.0"}}),
    Trap(6, MS, "empty", thd(0, 3, 3, 73), thd(0, 3, 73), FLAT | {"versions": {"mindspeed": "0.16"}}),
    Trap(
        6,
        "fla.GatedDeltaNet",
        "empty",
        {"attention_mask": padded() * torch.tensor([[0], [1]])},
        {"attention_mask": padded()},
        ROWS | {"versions": {"fla": "0.5.0"}},
    ),
    Trap(
        7, RULE, "table", CU | {"chunk_indices": pairs([0, 3, 73], 32)}, CU | {"chunk_indices": pairs([0, 3, 73], 64)}, FLAT
    ),
    Trap(
        7,
        CONV,
        "table",
        CU | {"chunk_indices": pairs([0, 3, 73], 32)},
        CU | {"chunk_indices": pairs([0, 3, 73], 64)},
        FLAT | {"chunk_size": 32},
    ),
    Trap(
        7,
        CUMSUM,
        "table",
        {"cu_seqlens": [0, 1500], "chunk_indices_out": [0, 0]},
        {"cu_seqlens": [0, 1500], "chunk_indices_out": [0, 0, 0, 1]},
        {"B": 1, "T": 1500, "chunk_size": 128},
    ),
    Trap(8, RULE, "copy", CU | {"cu_seqlens_cpu": dev(0, 40, 73)}, CU | {"cu_seqlens_cpu": dev(0, 3, 73)}, FLAT),
    Trap(9, CONV, "rows", fla_conv(dev(0, 73, 146)), fla_conv(dev(0, 73, 146)), {"B": 2, "T": 73}, {"B": 1, "T": 146}),
    Trap(9, "fla.ShortConvolution", "rows", CU, CU, FLAT | {"B": 2}, {"B": 1}),
    Trap(
        10,
        CC,
        "differs-from-segments",
        {"seq_idx": ids(73)},
        gated_delta_kwargs(PACKED, kernel="causal_conv1d"),
        FLAT | {"segments": PACKED},
    ),
    Trap(
        10,
        CC,
        "numbers-return",
        {"seq_idx": i32(0, 0, 1, 0, 0)[None]},
        {"seq_idx": i32(0, 0, 1, 2, 2)[None]},
        {"B": 1, "T": 5},
    ),
    Trap(
        10,
        MAMBA,
        "numbers-return",
        {"seq_idx": torch.cat([ids(9), ids(9) + 1, ids(9)], 1)},
        {"seq_idx": ids(9, 9, 9)},
        {"B": 1, "T": 27},
    ),
    Trap(11, HF, "mask-rank", {"attention_mask": padded("left")[:, None, None]}, {"attention_mask": padded("left")}, ROWS),
    Trap(11, HF, "mask-values", {"attention_mask": padded("left") * 2}, {"attention_mask": padded("left")}, ROWS),
    Trap(
        11,
        HF,
        "mask-values",
        {"attention_mask": (1 - padded("left")).float() * -1e9},
        {"attention_mask": padded("left")},
        ROWS,
    ),
    Trap(
        11,
        HF,
        "differs-from-segments",
        {"attention_mask": padded() * 0 + 1},
        {"attention_mask": LEFT.keep.long()},
        ROWS | {"segments": LEFT},
    ),
    Trap(11, "fla.GatedDeltaNet", "mask-values", {"attention_mask": padded() * 2}, {"attention_mask": padded()}, ROWS),
    Trap(12, "fla.GatedDeltaNet", "mask-and-offsets", CU | {"attention_mask": ids(3, 70).long() * 0 + 1}, CU, FLAT),
    Trap(
        12,
        HF,
        "mask-and-offsets",
        BOTH | {"attention_mask": (torch.arange(73) > 5).long()[None]},
        BOTH,
        FLAT | {"versions": FULL},
    ),
    Trap(
        13,
        HF,
        "hole",
        {"attention_mask": padded("hole")},
        gated_delta_kwargs(HOLE, kernel="transformers", keep_padding=False),
        ROWS | {"segments": HOLE, "versions": FULL},
        {"B": 1, "T": 45},
    ),
    Trap(13, MASKED, "hole", {"mask": padded("hole").bool()}, {"mask": padded().bool()}, ROWS),
    Trap(
        14, MSL, "mask-dropped", {"attention_mask": padded("left", B=1)}, {"attention_mask": padded(B=1)}, {"B": 1, "T": 25}
    ),
    Trap(
        14,
        HF,
        "mask-dropped",
        {"attention_mask": padded("left", B=1)},
        {"attention_mask": padded(B=1)},
        {"B": 1, "T": 25, "versions": {"transformers": "4.57.1"}},
    ),
    Trap(15, MG, "mask-unread", {"attention_mask": padded("left")}, {"attention_mask": padded()}, ROWS),
    Trap(15, MBR, "mask-unread", {"attention_mask": padded("hole")}, {"attention_mask": padded()}, ROWS),
    Trap(
        15,
        MG,
        "differs-from-segments",
        {},
        thd(*gated_delta_kwargs(LEFT, kernel="fla")["cu_seqlens"].tolist()),
        ROWS | {"segments": LEFT, "versions": MAIN},
        {"B": 1, "T": 45},
    ),
    Trap(16, MBR, "last", thd(0, 3, 73, padded_to=(0, 4, 76)), thd(0, 3, 73, padded_to=(0, 4, 80)), {"B": 1, "T": 80}),
    Trap(
        16,
        MG,
        "padded-actual",
        thd(0, 5, 73, padded_to=(0, 4, 76)),
        thd(0, 3, 73, padded_to=(0, 4, 76)),
        {"B": 1, "T": 76, "versions": MAIN},
    ),
    Trap(
        17,
        MG,
        "ranks-pieces",
        thd(0, 6, 12),
        thd(0, 6, 12, padded_to=(0, 8, 16)),
        {"B": 1, "T": 12, "versions": MAIN} | cp("document_zigzag"),
        {"T": 16},
    ),
    Trap(18, CONTEXT, "last", {"cu_seqlens": dev(0, 3, 64)}, {"cu_seqlens": dev(0, 3, 73, 128)}, {"B": 1, "T": 128} | cp()),
    Trap(
        18,
        CONTEXT,
        "layout",
        {"cu_seqlens": dev(0, 3, 128)},
        {"cu_seqlens": dev(0, 3, 128)},
        {"B": 1, "T": 128} | cp("zigzag"),
        cp(),
    ),
    Trap(
        18,
        RULE,
        "layout",
        {"cu_seqlens": dev(0, 3, 128)},
        {"cu_seqlens": dev(0, 3, 128)},
        {"B": 1, "T": 128} | cp(),
        cp("ulysses"),
    ),
    Trap(18, MG, "layout", thd(0, 8, 16), thd(0, 8, 16), {"B": 1, "T": 16, "versions": MAIN} | cp(), cp("zigzag")),
    Trap(19, CONV, "look-alike", {"x": meta(1, 16, 16)}, {"x": meta(1, 17, 16)}, {"B": 1, "T": 16}, {"T": 17}),
    Trap(19, RULE, "shape", CU | {"q": meta(1, 4, 73, 128)}, CU | {"q": meta(1, 73, 4, 128)}, FLAT),
    Trap(19, RULE, "look-alike", qkv(T=4), qkv(T=5), {"B": 1, "T": 4}, {"T": 5}),
    Trap(
        20,
        NPU_CONV,
        "history",
        {"query_start_loc": [0, 3, 73]} | LEARNING,
        {"query_start_loc": [0, 3, 73]} | LEARNING,
        {"B": None, "T": 73},
        {"training": False},
    ),
    Trap(
        20,
        NPU_CONV,
        "history",
        X | {"activation_mode": 1, "query_start_loc": [0, 73]},
        X | {"query_start_loc": [0, 73]},
        {"B": None, "T": 73},
    ),
    Trap(
        21,
        KDA_INTRA,
        "limit",
        {"cu_seqlens": list(range(66))},
        {"cu_seqlens": list(range(65))},
        {"B": None, "T": 65},
        {"T": 64},
    ),
    Trap(
        21,
        KDA_FWD,
        "limit",
        {"cu_seqlens": list(range(66)), "beta": torch.empty(1, 65, 4, device="meta", requires_grad=True)},
        {"cu_seqlens": list(range(66))},
        {"B": 1, "T": 65},
    ),
    Trap(21, KDA_BWD, "limit", {"cu_seqlens": [0, 65664]}, {"cu_seqlens": [0, 65536]}, {"B": 1, "T": 65664}, {"T": 65536}),
    Trap(21, KDA_BWD, "limit", {"q": meta(1, 65536, 32, 128)}, {"q": meta(1, 65536, 16, 128)}, {"B": 1, "T": 65536}),
    Trap(21, KDA_BWD, "tails", {"cu_seqlens": [0, 65, 128]}, {"cu_seqlens": [0, 128, 192]}, {"B": 1, "T": 128}, {"T": 192}),
    Trap(
        21, DHU, "dht", HOST | {"chunk_indices": TABLE, "dht": meta(2, 4, 128, 128)}, HOST | {"chunk_indices": TABLE}, FLAT
    ),
    Trap(21, "fla.fused_recurrent_gated_delta_rule", "backward", CU, CU, FLAT, {"training": False}),
    Trap(22, HF, "unread", {"attention_mask_2d": padded("left")}, {"attention_mask": padded("left")}, ROWS),
    Trap(22, HF, "unread", BOTH | CU, BOTH, FLAT | {"versions": FULL}),
    Trap(22, RULE, "unread", {"cu_seqlen": dev(0, 3, 73)}, CU, FLAT),
    Trap(22, RULE, "unread", {"attention_mask": padded("left")}, {}, ROWS),
    Trap(23, MASKED, "left-padding", {"mask": padded("left").bool()}, {"mask": padded().bool()}, ROWS),
    Trap(24, MAMBA, "offsets-alone", CU, CU | {"seq_idx": ids(3, 70)}, FLAT),
]


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: f"{trap.number}-{trap.operator}-{trap.rule}")
def test_each_trap_is_refused_and_its_remedy_is_taken(trap: Trap) -> None:
    says = {"B": 1} | trap.says
    found = gated_delta_breaches(trap.wrong, kernel=trap.operator, **says)
    assert trap.rule in [breach.rule for breach in found]
    with pytest.raises(UnsupportedFormError):
        check_gated_delta_contract(trap.wrong, kernel=trap.operator, **says)
    check_gated_delta_contract(trap.right, kernel=trap.operator, **(says | trap.mended))


def test_every_trap_is_here() -> None:
    assert {trap.number for trap in TRAPS} == set(range(1, 25))
