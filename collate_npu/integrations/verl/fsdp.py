"""verl 0.9.1, FSDP engine (strategy fsdp and fsdp2): what it hands to its transformers model, proved and made right.

`FSDPEngineWithLMHead.prepare_model_inputs` (workers/engine/fsdp/transformer_impl.py:1144-1317) makes of a jagged batch one
flat row `[1, T]` with positions and no mask (`use_remove_padding`, the default), or rows padded right with their 2D mask.
Layers that cannot tell where a sequence of a flat row begins get padded rows instead. Sharing out a row (Ulysses) is
refused where layers lose what other ranks hold: verl puts its exchange into flash attention alone
(models/transformers/monkey_patch.py:550-558), and into the recurrent layers of Qwen3.5's vision model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.model_traits import config_of, needs_mask_2d, text_config
from collate_npu.errors import UnsupportedFormError, explain
from collate_npu.integrations import patching
from collate_npu.integrations.context_parallel import refuse_model
from collate_npu.integrations.verl import PACKAGE
from collate_npu.masks.sources import Sources

SETTING = "actor_rollout_ref.model.use_remove_padding=False"


def prepare_model_inputs(original: Callable[..., Any], engine: Any, micro_batch: Any) -> Any:
    """The model's keyword arguments, and what verl keeps for the way back. On flash attention a model whose layers verl
    tells `cu_seqlens` keeps verl's flat rows; other engines that derive from this one keep all of theirs."""
    inputs, kept = original(engine, micro_batch)
    if not type(engine).__module__.startswith("verl.workers.engine.fsdp."):
        return inputs, kept
    kernel = str(getattr(text_config(config_of(engine.module)), "_attn_implementation", None))
    if engine.use_ulysses_sp:
        _refuse_shares(engine, kernel)
    if engine.use_ulysses_sp or ("cu_seqlens" in inputs and kernel.startswith("flash")):
        return inputs, kept
    flat = inputs["attention_mask"] is None
    try:
        return _adapter(engine).mended(Sources(inputs), padding_free=flat)[0], kept
    except UnsupportedFormError as refused:
        if not flat:
            raise
        warnings.warn(f"collate_npu: rows are padded here, as by {SETTING}. {refused}", stacklevel=2)
    from verl.utils import tensordict_utils

    tensordict_utils.assign_non_tensor(micro_batch, use_remove_padding=False)  # read again on the way back
    return prepare_model_inputs(original, engine, micro_batch)


def _adapter(engine: Any) -> BatchAdapter:
    """One for each model; a rebuilt engine has another."""
    held = vars(engine).get("_collate_npu")
    if held is None or held[0] is not engine.module:
        held = engine._collate_npu = (engine.module, BatchAdapter(engine.module))
    adapter: BatchAdapter = held[1]
    return adapter


def _refuse_shares(engine: Any, kernel: str) -> None:
    if needs_mask_2d(engine.module) and not engine.pass_packed_cu_seqlens:
        refuse_model(engine.module)
    if not kernel.startswith("flash"):
        rule = "verl's Ulysses gathers the row inside flash attention alone; others would see this rank's part of it."
        remedy = "Use flash attention, or actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=1."
        raise UnsupportedFormError(explain("attn_implementation", kernel, rule, remedy))


def install() -> None:
    """Let every FSDP engine of this process make its inputs so, those that exist too; `engine.uninstall` takes it back.

    >>> install()  # doctest: +SKIP
    """
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    patching.patch(PACKAGE, FSDPEngineWithLMHead, "prepare_model_inputs", prepare_model_inputs)
