"""The entry: whoever makes a call, the contract of its name judges it, with sizes read off its tensors."""

from typing import Any

import pytest
import torch

from collate_npu import CollateError, Segments, errors
from collate_npu.errors import UnsupportedFormError
from collate_npu.kernels.check import check_call, knows, log_batch, log_call, named
from collate_npu.kernels.fusion_attention import fusion_attention_kwargs
from collate_npu.kernels.gated_delta import gated_delta_kwargs
from collate_npu.releases import KERNELS_TOLD
from collate_npu.testing import reference_kernels, tiny_model

FLAT, LEFT = Segments.from_lengths([[3, 4]], width=9), Segments.from_lengths([2, 4], side="left")
BOTH = gated_delta_kwargs(FLAT, kernel="transformers")


@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize(("segments", "keep_tail"), [(LEFT, False), (FLAT, False), (FLAT, True)])
def test_attention_is_judged_by_the_sizes_of_its_tensors(layout: Any, segments: Segments, keep_tail: bool) -> None:
    kwargs = {"scale": 0.5, **fusion_attention_kwargs(segments, layout=layout, keep_tail=keep_tail)}
    T = segments.array.size if keep_tail else segments.num_tokens
    q = torch.zeros((*segments.shape, 4, 8) if layout == "BSND" else (T, 4, 8))
    call = {"query": q, "key": q[..., :2, :], "value": q[..., :2, :], "head_num": 4, **kwargs}
    check_call("torch_npu.npu_fusion_attention", call, segments=segments)
    other = Segments.from_lengths([[6, 1]], width=9) if segments is FLAT else Segments.from_lengths([4, 2], side="left")
    with pytest.raises(UnsupportedFormError, match="differs-from-segments"):
        check_call("torch_npu.npu_fusion_attention", call, segments=other)


def test_a_call_without_gradients_is_one_of_inference() -> None:
    lengths = {"actual_seq_lengths": torch.tensor([3, 4, 2], dtype=torch.int32), "scale": 0.5}
    with pytest.raises(UnsupportedFormError, match="backward"):
        check_call("torch_npu.npu_chunk_gated_delta_rule", {"q": torch.zeros(9, 2, 4), **lengths})
    with torch.no_grad():
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


def test_positional_arguments_get_their_names() -> None:
    def kernel(q: Any, k: Any, scale: float = 1.0, **kwargs: Any) -> None: ...

    assert named(kernel, (1, 2), {"cu_seqlens": 3}) == {"q": 1, "k": 2, "cu_seqlens": 3}
    assert named(lambda q: q, (1,), {}) == {"q": 1}


@pytest.mark.models
def test_reference_kernels_have_each_call_judged() -> None:
    pytest.importorskip("transformers")
    if not KERNELS_TOLD.holds():
        pytest.skip("older releases hand no boundaries to kernels")
    model = tiny_model("qwen3_next", vocab_size=257)
    tokens = {"input_ids": torch.ones(1, 9, dtype=torch.long), "use_cache": False}
    with reference_kernels(model):
        model(**tokens, **BOTH)
        with pytest.raises(UnsupportedFormError, match=r"chunk_gated_delta_rule[\s\S]*\[last\]"):
            model(**tokens, cu_seq_lens_q=torch.tensor([0, 3, 7], dtype=torch.int32), seq_idx=BOTH["seq_idx"])


# --- said, not raised


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(errors, "DEBUG", True)
    monkeypatch.setattr(errors, "log_once", lambda what, text: texts.append(text))
    return texts


def test_debug_says_what_a_batch_breaks(said: list[str], newest_transformers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    log_batch("transformers", {"input_ids": 1, "loss_mask": 2, **BOTH}, FLAT)
    log_batch("transformers", {"attention_mask": torch.ones(2, 1, 4, 4), "attention_mask_2d": LEFT.keep}, LEFT)
    log_batch("a consumer of nobody", {}, FLAT)
    log_call("a.kernel_of_nobody", {})
    assert said == []
    log_batch("transformers", {"cu_seq_lens_q": BOTH["cu_seq_lens_q"]}, FLAT)
    log_batch("megatron", {"attention_mask": None}, LEFT)
    assert ["[pair]" in said[0], "[differs-from-segments]" in said[1]] == [True, True]
    log_call("fla.chunk_gated_delta_rule", {})
    assert "not judged" in said[-1]
    monkeypatch.setattr(errors, "DEBUG", False)
    count = len(said)
    log_batch("transformers", {"cu_seq_lens_q": BOTH["cu_seq_lens_q"]}, FLAT)
    assert len(said) == count, "without debug nothing is looked at"
