"""Rules of one operator or stack alone, by its name: its releases, its partners, its modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from collate_npu.kernels.breach import Breach
from collate_npu.kernels.gated_delta import ascend_rules, fla_rules, megatron_rules, transformers_rules
from collate_npu.kernels.gated_delta.operator_call import Call


def breaches(call: Call) -> Iterator[Breach]:
    """What the stack that holds the operator forbids, by its own rules."""
    if call.training and not call.operator.backward:
        says = "The operator has no backward: it is for decoding and inference."
        remedy = "Use the chunked rule for training, or check with training=False."
        yield call.breach("backward", "training", "True", says, remedy)
    for name in (call.operator.name, call.operator.name.split(".")[0]):
        if rule := RULES.get(name):
            yield from rule(call)


RULES: dict[str, Callable[[Call], Iterator[Breach]]] = {
    "fla": fla_rules.fla,
    "fla.causal_conv1d": fla_rules.fla_conv,
    "causal_conv1d": fla_rules.conv1d,
    "mamba": fla_rules.mamba,
    "transformers": transformers_rules.transformers,
    "fla_npu": ascend_rules.npu,
    "fla_npu.causal_conv1d": ascend_rules.npu_conv,
    "fla_npu.causal_conv1d_bwd": ascend_rules.npu_conv,
    "megatron_core": megatron_rules.megatron,
    "mcore_bridge.GatedDeltaNet": megatron_rules.fields,
    "mcore_bridge.Qwen3_5MoeGatedDeltaNet(USE_MCORE_GDN=0)": transformers_rules.bridge_transformers,
    "mcore_bridge.Qwen3NextGatedDeltaNet(USE_MCORE_GDN=0)": megatron_rules.bridge_next,
    "mindspeed": megatron_rules.mindspeed,
    "mindspeed_llm": megatron_rules.mindspeed_llm,
    "torchtitan": megatron_rules.torchtitan,
    "te": megatron_rules.te,
    "fla_npu.recurrent_gated_delta_rule": ascend_rules.recurrent,
    "torch_npu.npu_recurrent_gated_delta_rule": ascend_rules.recurrent,
    "torch_npu.npu_chunk_gated_delta_rule": ascend_rules.torch_npu_chunk,
    "torch_npu.npu_masked_causal_conv1d": ascend_rules.masked_conv,
}
"""By operator or by package, the part before the dot."""
