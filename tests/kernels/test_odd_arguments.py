"""Whatever a kernel's function is given, it answers or raises `CollateError`: nothing raw, and nothing taken for another."""

import contextlib
import inspect
from typing import Any

import numpy as np
import pytest
import torch

from collate_npu import CollateError, Segments
from collate_npu.kernels import check, fusion_attention, gated_delta

FLAT = Segments.from_lengths([[3, 2]])
X = torch.zeros(1, 5, 2, 4)
MASK = fusion_attention.fusion_attention_kwargs(FLAT) | {"scale": 0.5}
CALLS: dict[Any, dict[str, Any]] = {
    gated_delta.gated_delta_kwargs: {"segments": FLAT, "kernel": "fla"},
    gated_delta.flat_offsets: {"segments": FLAT},
    gated_delta.chunk_indices: {"offsets": [0, 3, 5], "chunk_size": 64},
    gated_delta.chunk_offsets: {"offsets": [0, 3, 5], "chunk_size": 64},
    gated_delta.zero_padding: {"hidden": torch.zeros(1, 2, 1), "segments": Segments.from_lengths([1], width=2)},
    gated_delta.check_gated_delta_contract: {"kwargs": {}, "kernel": "fla", "B": 1, "T": 5},
    fusion_attention.choose_form: {"segments": FLAT},
    fusion_attention.fusion_attention_kwargs: {"segments": FLAT},
    fusion_attention.check_contract: {"kwargs": MASK, "N": 2, "Nkv": 2, "D": 4, "segments": FLAT},
    fusion_attention.triangle: {},
    fusion_attention.prefix_triangle: {},
    check.check_call: {"name": "fla.chunk_gated_delta_rule", "arguments": {"q": X}},
}
ODD: tuple[Any, ...] = (
    *(None, True, -2, 0, 2**60, 2.5, float("nan"), "banana", "front", b"x", object(), [], [1, "a"], {}, {"a": 1}, (None,)),
    *(np.zeros(3), np.array(["a"]), np.array(None), torch.zeros(2, 2), torch.zeros(0), torch.tensor(3), torch.tensor([0.5])),
    *(torch.empty(2, device="meta"), torch.eye(3).to_sparse(), torch.ones(2, dtype=torch.complex64), FLAT, len),
    torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
)


@pytest.mark.parametrize("entry", CALLS, ids=lambda entry: entry.__name__)
def test_nothing_raw_comes_out(entry: Any) -> None:
    entry(**CALLS[entry])
    named = (each for each in inspect.signature(entry).parameters.values() if each.kind is not each.VAR_KEYWORD)
    for name in [each.name for each in named]:
        for value in ODD:
            with contextlib.suppress(CollateError):
                entry(**CALLS[entry] | {name: value})
