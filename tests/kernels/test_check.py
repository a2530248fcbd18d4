"""The entry: whoever makes a call, the contract of its name judges it, with sizes read off its tensors."""

import pytest
import torch

from collate_npu import CollateError, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.kernels.check import check_call, knows
from collate_npu.kernels.gated_delta import gated_delta_kwargs

FLAT, LEFT = Segments.from_lengths([[3, 4]], width=9), Segments.from_lengths([2, 4], side="left")
BOTH = gated_delta_kwargs(FLAT, kernel="transformers")


@torch.no_grad()
def test_a_call_without_gradients_is_one_of_inference() -> None:
    lengths = {"actual_seq_lengths": torch.tensor([3, 4, 2], dtype=torch.int32), "scale": 0.5}
    check_call("torch_npu.npu_chunk_gated_delta_rule", {"q": torch.zeros(9, 2, 4), **lengths})


def test_without_a_contract_or_sizes_it_says_so() -> None:
    assert not knows("mamba_ssm.selective_scan_fn")
    with pytest.raises(CollateError, match="Did you mean"):
        check_call("fla.chunk_gated_delta_rul", {})
    with pytest.raises(CollateError, match="number of tokens"):
        check_call("fla.chunk_gated_delta_rule", gated_delta_kwargs(FLAT, kernel="fla"))
    with pytest.raises(UnsupportedFormError, match="query, key: got NoneType"):
        check_call("npu_fusion_attention", {"input_layout": "BSND"}, N=2, segments=FLAT)
    with pytest.raises(UnsupportedFormError, match="3 dimensions"):
        check_call("npu_fusion_attention", {"query": 3, "head_num": 2, "input_layout": "BSND"})
