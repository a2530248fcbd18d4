"""Arguments of public functions: whatever stands in the place of one, the call works or is refused in words."""

import inspect
from typing import Literal

import numpy as np
import pytest
import torch

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Segments, outputs, wrap_collator
from collate_npu.collate.collators import Layout
from collate_npu.kernels import check, fusion_attention, gated_delta
from collate_npu.masks import (
    Pattern,
    block_mask,
    dense,
    derive_segments,
    mask_mod,
    none_is_exact,
    segments_from_batch,
    varlen,
)
from collate_npu.parallel import (
    ContextParallel,
    check_recurrent_split,
    gather_sequence,
    join_shards,
    pad_documents,
    query_rows,
    split_batch,
    split_tensor,
    token_rows,
)
from collate_npu.validation import checked, dimension, here

ROWS, FLAT = Segments.from_lengths([2, 3]), Segments.from_lengths([[2, 3]])
IDS, CP = torch.ones(2, 3, dtype=torch.int64), ContextParallel(1, 0)
FLAT_BATCH = {"input_ids": torch.ones(1, 5, dtype=torch.int64), "cu_seq_lens_q": torch.tensor([0, 2, 5])}
ADAPTER = BatchAdapter(needs_mask_2d=True, consumer="megatron")
HEADS = torch.ones(1, 5, 2, 4)
FLAT_MASK = fusion_attention.fusion_attention_kwargs(FLAT) | {"scale": 0.5}
KERNELS = {  # of these every argument, those with a default too, and a number no memory holds
    fusion_attention.choose_form: {"segments": FLAT},
    fusion_attention.fusion_attention_kwargs: {"segments": ROWS},
    fusion_attention.check_contract: {"kwargs": FLAT_MASK, "N": 2, "Nkv": 2, "D": 4, "segments": FLAT},
    fusion_attention.triangle: {},
    fusion_attention.prefix_triangle: {},
    gated_delta.gated_delta_kwargs: {"segments": FLAT, "kernel": "fla"},
    gated_delta.flat_offsets: {"segments": FLAT},
    gated_delta.chunk_indices: {"offsets": [0, 3, 5], "chunk_size": 64},
    gated_delta.chunk_offsets: {"offsets": [0, 3, 5], "chunk_size": 64},
    gated_delta.check_gated_delta_contract: {"kwargs": {}, "kernel": "fla", "B": 1, "T": 5},
}
CALLS = KERNELS | {
    outputs.unpad: {"x": IDS, "segments": ROWS},
    outputs.repad: {"y": torch.ones(5), "segments": ROWS, "fill": 0},
    outputs.last_token: {"x": IDS, "segments": ROWS},
    outputs.per_sequence: {"x": IDS, "segments": ROWS},
    outputs.to_nested: {"x": IDS, "segments": ROWS},
    outputs.shift_labels: {"labels": IDS, "segments": ROWS, "steps": 1, "ignore_index": -100},
    outputs.ignore_first_labels: {"labels": IDS, "segments": ROWS, "ignore_index": -100},
    dense: {"segments": ROWS, "polarity": "keep", "pattern": "causal", "max_mask_bytes": 1 << 20},
    block_mask: {"segments": ROWS, "pattern": "causal", "compiled": False},
    mask_mod: {"segments": ROWS, "pattern": "causal"},
    none_is_exact: {"segments": ROWS},
    varlen: {"segments": FLAT, "keep_tail": False},
    derive_segments: {"attention_mask": dense(ROWS, polarity="keep"), "polarity": "keep", "prove": True},
    segments_from_batch: {"batch": {"input_ids": IDS, "attention_mask_2d": ROWS.keep}, "padding_free": False},
    split_batch: {"batch": {"input_ids": IDS}, "cp": CP, "segments": ROWS, "keys": {}},
    split_tensor: {"x": IDS, "cp": CP, "dim": 1},
    gather_sequence: {"output": IDS, "cp": CP, "segments": ROWS, "dim": 1, "loss": "same"},
    join_shards: {"shards": [IDS], "cp": CP, "dim": 1},
    pad_documents: {"batch": FLAT_BATCH, "cp": CP, "multiple": 4, "segments": FLAT, "pad_token_id": 0},
    token_rows: {"width": 4, "cp": CP},
    query_rows: {"width": 4, "cp": CP},
    check_recurrent_split: {"cp": CP, "scheme": "head_exchange_zigzag", "segments": ROWS, "padding_free": False},
    check.check_call: {"name": "fla.chunk_gated_delta_rule", "arguments": {"q": HEADS}},
    gated_delta.zero_padding: {"hidden": IDS[..., None].float(), "segments": ROWS},
    gated_delta.reference_causal_conv1d: {"x": HEADS.flatten(2), "weight": torch.ones(8, 2), "activation": "silu"},
    ADAPTER.__call__: {"batch": {"input_ids": IDS, "attention_mask_2d": ROWS.keep}},
    ADAPTER.render: {"batch": {"input_ids": IDS}, "segments": ROWS, "padding_free": False},
    ADAPTER.masks: {"segments": ROWS},
    BatchAdapter: {"needs_mask_2d": True, "consumer": "megatron", "padding_free": False, "labels_shifted": None},
    PaddingCollator: {"pad_token_id": 0, "padding": True, "padding_free": False, "label_pad_token_id": -100},
    wrap_collator: {"inner": lambda rows: {}, "padding_free": False, "polarity": None},
    Layout: {"separator_id": -100, "allow_empty": False, "labels_shifted": False},
}


class Anything:
    pass


ODD = {
    "None": None,
    "an object": Anything(),
    "a class": Anything,
    "text": "x",
    "a name of another": "front",
    "bytes": b"ab",
    "0": 0,
    "3": 3,
    "-3": -3,
    "2.5": 2.5,
    "nan": float("nan"),
    "True": True,
    "[]": [],
    "ragged": [[1], [1, 2]],
    "a number and a text": [1, "a"],
    "(None,)": (None,),
    "{}": {},
    "a dict": {"a": 1},
    "a number in a tensor": torch.tensor(1),
    "a vector": torch.ones(2),
    "no numbers": torch.zeros(0),
    "half": torch.tensor([0.5]),
    "a matrix": torch.zeros(2, 2),
    "sparse": torch.eye(3).to_sparse(),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "meta": torch.ones(2, 3, device="meta"),
    "complex": torch.ones(2, 3, dtype=torch.complex64),
    "numpy": np.ones((2, 3)),
    "a numpy vector": np.zeros(3),
    "names": np.array(["x"]),
    "objects": np.array([None]),
    "an object in numpy": np.array(None),
    "Segments": Segments.from_lengths([7]),
    "Pattern": Pattern.sliding(2),
    "a function": len,
}
HUGE = {"2**60": 2**60}


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__qualname__)
def test_nothing_raw_comes_out(function):
    right = CALLS[function]
    function(**right)
    raw = []
    names, values = (right, ODD) if function not in KERNELS else (inspect.signature(function).parameters, ODD | HUGE)
    for name in names:
        for what, odd in values.items():
            try:
                function(**{**right, name: odd})
            except CollateError:
                continue
            except Exception as error:
                raw.append(f"{name}={what}: {type(error).__name__}: {error}"[:150])
    assert raw == []


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__qualname__)
@pytest.mark.parametrize("said", ["no", "false", 0, torch.tensor(False)], ids=str)
def test_a_flag_is_true_or_false(function, said):
    flags = [name for name, one in inspect.signature(function).parameters.items() if one.annotation == "bool"]
    for name in flags:
        with pytest.raises(CollateError, match=f"{name}: got a .* takes True or False"):
            function(**{**CALLS[function], name: said})


def test_every_public_function_that_takes_ours_is_in_the_table():
    rooms = (outputs, fusion_attention, gated_delta)
    held = {name for room in rooms for name, one in vars(room).items() if hasattr(one, "__wrapped__")}
    named = {function.__name__ for function in CALLS}
    assert held - named == {
        "contract_breaches",
        "gated_delta_breaches",
        "reference_fusion_attention",
        "reference_gated_delta_rule",
    }


def test_a_device_is_tried_unless_its_name_alone_is_asked():
    assert here("cuda:99", now=False).index == 99
    with pytest.raises(CollateError, match="torch makes no tensor there"):
        here("cuda:99")


def test_what_is_not_judged_passes():
    @checked
    def told(
        rows: list[int], width: int | None = None, *, side: object = None, way: Literal["one"] = "one"
    ) -> tuple[object, ...]:
        return rows, width, side

    assert told("x", torch.tensor(3), side=3) == ("x", 3, 3)
    with pytest.raises(CollateError, match="width: got a str"):
        told([], "x")
    with pytest.raises(CollateError, match="way: got a int"):
        told([], way=1)


@pytest.mark.parametrize("dim", [-3, -2, -1, 0, 1, 2, 1.0])
@pytest.mark.parametrize("kind", [lambda dim: dim, np.float32, np.int64])
def test_a_dimension_is_a_whole_number_of_any_kind(dim, kind):
    if isinstance(kind(dim), (int, np.integer)) and -2 <= dim < 2:
        assert dimension("x", torch.ones(2, 3), kind(dim)) == int(dim) % 2
    else:
        with pytest.raises(CollateError, match="2 dimensions"):
            dimension("x", torch.ones(2, 3), kind(dim))
