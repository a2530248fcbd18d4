"""TransformerEngineNPU under Megatron: which batches its one public caller computes right, and how it is told apart.

The arguments are those that TransformerEngine-FL 5ec1601 (plugin/core/backends/vendor/npu/flash_attention.py:157-219) hands
to the attention of TransformerEngineNPU. Its own file could not be read: the mode of a compressed triangle, 2, is assumed.
"""

from types import SimpleNamespace

import pytest
from torch import nn

from collate_npu import BatchAdapter, Segments
from collate_npu.consumers import megatron
from collate_npu.consumers.mask_routing import consumer_named
from collate_npu.consumers.megatron import kernel_of, kernel_of_args
from collate_npu.errors import UnsupportedFormError
from collate_npu.kernels.fusion_attention import contract_breaches, triangle

HEADS, D = 2, 8
RIGHT, LEFT = Segments.from_lengths([3, 8], 8), Segments.from_lengths([3, 8], 8, side="left")
PACKED = Segments.from_lengths([[3, 5], [4]])


@pytest.mark.parametrize(
    ("segments", "accepted"), [(RIGHT, True), (LEFT, False), (PACKED, False), (Segments.from_lengths([8, 8]), True)]
)
def test_rows_that_the_triangle_is_right_for_are_accepted(segments, accepted):
    """Any mask gives way to the compressed triangle, in mode 2, where attention is causal."""
    adapter = BatchAdapter(needs_mask_2d=False, consumer="transformer_engine_npu")
    handed = {"atten_mask": triangle(), "input_layout": "SBH", "sparse_mode": 2, "scale": D**-0.5}
    handed |= {"pre_tockens": 65536, "next_tockens": 0, "inner_precise": 0}
    assert (contract_breaches(handed, N=HEADS, Nkv=HEADS, D=D, segments=segments) == ()) == accepted
    if accepted:
        assert adapter.render({"input_ids": segments.ids}, segments)["attention_mask"] is None
    else:
        with pytest.raises(UnsupportedFormError, match=r"compressed causal triangle.*Pad right"):
            adapter.route(segments)


# --- which packages, which attention


@pytest.fixture
def install(tmp_path, monkeypatch):
    def packages(*names):
        for name in names:
            (tmp_path / name).mkdir()
            (tmp_path / name / "__init__.py").write_text("raise ImportError('looking must not import it')")
        monkeypatch.syspath_prepend(str(tmp_path))

    return packages


def model_of(kind):
    model = nn.Sequential(type(kind, (nn.Module,), {})())
    model.config = SimpleNamespace(masked_softmax_fusion=False)
    return model


@pytest.mark.parametrize(
    ("names", "flash", "here"),
    [
        ((), "transformer_engine", False),
        (("transformer_engine_npu",), "transformer_engine_npu", True),
        (("megatron_adaptor",), "transformer_engine_npu", True),
        (("megatron_adaptor", "transformer_engine_npu"), "transformer_engine_npu", True),
        (("megatron_adaptor", "mindspeed"), "mindspeed", False),
    ],
)
def test_packages_tell_whose_attention_it_is(install, names, flash, here):
    assert not megatron.npu_engine()
    install(*names)
    assert megatron.npu_engine() is consumer_named("transformer_engine_npu").here() is here
    assert kernel_of_args(SimpleNamespace(attention_backend="flash")) == flash
    local = SimpleNamespace(attention_backend="local", masked_softmax_fusion=False, use_flash_attn=True)
    assert kernel_of_args(local) == ("megatron" if "mindspeed" not in names else "mindspeed")
    assert kernel_of(model_of("DotProductAttention")) == "megatron"
    if "mindspeed" not in names:
        assert kernel_of(model_of("TEDotProductAttention")) == flash
