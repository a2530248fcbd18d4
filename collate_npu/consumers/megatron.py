"""Megatron-core: local kernels read a dense mask; those of TransformerEngine and TransformerEngineNPU read none.

`kernel_of` returns which of them a model runs, `kernel_of_args` which one its arguments name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from collate_npu.consumers import mask_choice, mindspeed
from collate_npu.consumers.mask_choice import HOLES_RECURRENT, PACKED_RECURRENT, Case, Consumer, Form
from collate_npu.consumers.model_traits import config_of
from collate_npu.errors import UnsupportedFormError, explain
from collate_npu.masks.forms import none_is_exact
from collate_npu.releases import MEGATRON_PACKED
from collate_npu.segments import Segments

_LOCAL = "else bool [B, 1, S, S], True = blocked: its local kernels"
MEGATRON = Consumer(
    name="megatron",
    forms=(
        Form(form="none", reads="None where exact", when=lambda case: bool(case.exact) and case.exact.why),
        Form(form="masked", reads=_LOCAL, when=lambda case: case.exact.why),
    ),
    refuses=(PACKED_RECURRENT, HOLES_RECURRENT),
    shares_recurrent=True,
    source="megatron-core core/transformer/utils.py:54-55, core/datasets/gpt_dataset.py:833-872; "
    "ms-swift 4.6.0 megatron/trainers/utils.py:358-407",
)

TRANSFORMER_ENGINE = Consumer(
    name="transformer_engine",
    forms=(Form(form="none", reads="None: causal attention, whatever mask is given"),),
    refuses=(
        PACKED_RECURRENT,
        replace(
            mindspeed.NOT_EXACT,
            rule="TransformerEngine's causal kernels, and Megatron's fused softmax, read no dense mask, and {why}.",
            remedy="Pad right with one sequence a row, use padding_free=True, or run local kernels with "
            "masked_softmax_fusion=False (consumer='megatron').",
        ),
    ),
    shares_recurrent=True,
    source="megatron-core core/extensions/transformer_engine.py:2307-2315, core/transformer/enums.py:40-48, "
    "core/fusions/fused_softmax.py:285-290",
)


TRANSFORMER_ENGINE_NPU = replace(
    TRANSFORMER_ENGINE,
    name="transformer_engine_npu",
    forms=(Form(form="none", reads="None, for which it takes a compressed causal triangle, as for any mask"),),
    refuses=(
        PACKED_RECURRENT,
        replace(
            mindspeed.NOT_EXACT,
            rule="TransformerEngineNPU's attention runs a compressed causal triangle, and here {why}.",
            remedy="Pad right with one sequence a row, or use padding_free=True.",
        ),
    ),
    source="flagos-ai/TransformerEngine-FL 5ec1601 transformer_engine/plugin/core/backends/vendor/npu/flash_attention.py:"
    "91-110, 157-219",
)


def npu_engine() -> bool:
    """Return True if TransformerEngineNPU stands in TransformerEngine's place. Beside MindSpeed it does not: MindSpeed says
    what does (`mindspeed.transformer_engine`). Nothing is imported."""
    here = mindspeed.is_installed("transformer_engine_npu") or mindspeed.is_installed("megatron_adaptor")
    return here and not mindspeed.is_installed()


def kernel_of(model: Any) -> str:
    """Return the consumer of a Megatron module: "megatron" if its attention is local and its softmax not fused. The fused
    local softmax ignores a dense mask under causal attention (core/fusions/fused_softmax.py:285-290). If MindSpeed has
    replaced the attention, `consumers.mindspeed` knows what it reads."""
    if found := mindspeed.kernel_of_modules(model.modules(), config_of(model)):
        return found
    kinds = {type(module).__name__ for module in model.modules()}
    engine = "transformer_engine_npu" if npu_engine() else "transformer_engine"
    fused = bool(getattr(config_of(model), "masked_softmax_fusion", False))
    return "megatron" if "DotProductAttention" in kinds and not fused else engine


def kernel_of_args(args: Any) -> str:
    """Return the consumer that arguments of ms-swift or Megatron-LM name (`attention_backend`, `masked_softmax_fusion`).
    Only the backend "local" runs local kernels; the fusion is on by default (ms-swift 4.6.0 and Megatron-LM arguments).
    MindSpeed, if installed, computes the attention instead; if it is not, TransformerEngineNPU, if installed."""
    if mindspeed.is_installed():
        return mindspeed.kernel_of_settings(args)
    backend = getattr(args, "attention_backend", None)
    local = getattr(backend, "name", backend) == "local"  # an enum in Megatron's own arguments
    engine = "transformer_engine_npu" if npu_engine() else "transformer_engine"
    return "megatron" if local and not getattr(args, "masked_softmax_fusion", True) else engine


def refuse_unread_padding(segments: Segments, kernel: str, *, recurrent: bool) -> None:
    """Raise if None is wrong, and neither this attention kernel nor `recurrent` layers of megatron-core, whose GatedDeltaNet
    takes no mask (core/ssm/gated_delta_net), read one."""
    exact = none_is_exact(segments)
    if not exact:
        mask_choice.consumer_named(kernel).choose(Case(segments=segments))
    if recurrent and not exact:
        rule = f"GatedDeltaNet of megatron-core reads no padding mask, and {exact.why}."
        remedy = "Pad right, with one sequence a row, or use padding_free=True (Megatron's own takes it from "
        remedy += f"{MEGATRON_PACKED} on). On mcore-bridge: mcore_bridge.install()."
        raise UnsupportedFormError(explain("attention_mask", repr(segments), rule, remedy))
