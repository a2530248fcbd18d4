"""What verl's forwards (models/mcore/model_forward.py and model_forward_fused.py, 0.9.1) hand to the model.

Padded rows reach it with None on an NPU, and where Megatron's local attention would misread the 2D mask: text and vision,
in the engine's forward and in the older one that takes rows padded on any side. The 2D mask stays outside, for the way
back. Packed rows (thd) keep what verl gives. MoE routers of padded text rows learn which tokens are padding. A sliding
window shorter than a row is refused on an NPU, where no attention of MindSpeed's reads one. Costs nothing per token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from collate_npu.errors import UnsupportedFormError, explain
from collate_npu.integrations import patching
from collate_npu.integrations.megatron.mcore_bridge import router_padding
from collate_npu.integrations.verl import on_npu

Forward = Callable[..., Any]


def engine_forward(original: Forward, *args: Any, **kwargs: Any) -> Any:
    """verl's forward of jagged ids, padded or packed (model_forward.py `gptmodel_forward_model_engine`)."""
    given = _named(original, args, kwargs)
    return original(**{**given, "model": _Reader(given)})


def generated_forward(original: Forward, *args: Any, **kwargs: Any) -> Forward:
    """verl's generators of forwards (`model_forward_gen`, and both of the fused kernels, which pack their rows always)."""
    inner = original(*args, **kwargs)
    vision = _named(original, args, kwargs)["vision_model"]

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not patching.in_place(generated_forward):
            return inner(*args, **kwargs)
        given = _named(inner, args, kwargs)
        return inner(**{**given, "model": _Reader({**given, "vision_model": vision})})

    return forward


class _Reader:
    """The model of one batch, called with the masks that it reads."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._model, self._vision = given["model"], given["vision_model"]
        if on_npu():
            _refuse_window(getattr(self.config, "window_size", None), given)

    def __getattr__(self, name: str) -> Any:
        from verl.utils.megatron_utils import unwrap_model

        return getattr(unwrap_model(self._model), name)

    def __call__(self, **batch: Any) -> Any:
        if batch.get("packed_seq_params") is not None:
            return self._model(**batch)
        keep = batch["attention_mask"]
        if keep is not None and not self._vision and getattr(self.config, "num_moe_experts", None):
            batch = {**_router_padding(self, ~keep.bool()), **batch}
        unread = on_npu() or self._runs_local_kernels()
        return self._model(**{**batch, "attention_mask": None if unread else keep})

    def _runs_local_kernels(self) -> bool:
        """Megatron's own attention takes True = blocked: verl's [B, S], True = real, blocks what it should not there."""
        return any(type(module).__name__ == "DotProductAttention" for module in self.modules())


def _router_padding(model: Any, padding: Tensor) -> dict[str, Any]:
    """verl gives it for packed rows alone; megatron-core's text model takes it, and cuts it for the ranks that share the
    tokens on the first pipeline stage alone (0.16.1 gpt_model.py:291-321)."""
    if "padding_mask" not in inspect.signature(inspect.unwrap(model.forward)).parameters:
        return {}
    if model.config.sequence_parallel and not model.pre_process:
        from megatron.core import parallel_state

        tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
        padding = router_padding(padding, None, tp)
    return {"padding_mask": padding}


def _refuse_window(window: Any, given: dict[str, Any]) -> None:
    """MindSpeed hands none to its kernel, padded or packed (0.12 to 0.18, te/.../dot_product_attention.py `forward`)."""
    left = window[0] if isinstance(window, (tuple, list)) else window
    if left is None or left < 0 or (longest := _longest(given)) <= left + 1:
        return
    rule = f"No attention of MindSpeed's reads a window, and rows of {longest} tokens are longer than {left} + 1."
    remedy = (
        f"Keep rows to {left + 1} tokens (data.max_prompt_length, data.max_response_length), or use actor.strategy=fsdp."
    )
    raise UnsupportedFormError(explain("window_size", str(window), rule, remedy))


def _longest(given: dict[str, Any]) -> int:
    ids = given["input_ids"]
    rows = ids.offsets().diff() if ids.is_nested else given["attention_mask"].bool().sum(-1)
    return int(rows.max())


def _named(function: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
