"""verl 0.9.1: the masks that its Megatron engine passes to its models. Its FSDP engine goes through `collate-npu run`.

verl pads jagged rows itself. It keeps its 2D mask on every device, and makes no `[B, 1, S, S]` for an NPU: None is exact for
jagged rows and causal attention. `install` patches the engine. Legend: B rows, S width.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib import import_module
from typing import Any

from collate_npu.consumers.mindspeed import adaptors
from collate_npu.consumers.model_traits import unwrap
from collate_npu.errors import UnsupportedFormError, explain
from collate_npu.integrations import patching
from collate_npu.integrations.megatron.mcore_bridge import router_padding

PACKAGE, TESTED = "verl", "0.9.1"


def keep_2d(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Run verl's padding, and its way back, as without an NPU: with this rank's 2D mask. On an NPU verl makes a dense one.
    Verl's code runs with a flag of its own. Every other caller reads the module's flag."""
    return patching.with_globals(original, is_npu_available=False)(*args, **kwargs)


def engine_forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run verl's forward of jagged ids, padded or packed (model_forward.py `gptmodel_forward_model_engine`)."""
    given = _arguments_of(original, args, kwargs)
    return _with_masks(original, given, given["vision_model"])


def generated_forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return verl's forward of a generator (`model_forward_gen`, and both of the fused kernels, which always pack rows)."""
    inner = original(*args, **kwargs)
    vision = _arguments_of(original, args, kwargs)["vision_model"]

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not patching.in_place(generated_forward):
            return inner(*args, **kwargs)
        given = _arguments_of(inner, args, kwargs)
        if not given["input_ids"].is_nested:  # verl indexes by integers, without an error
            given["attention_mask"] = given["attention_mask"].bool()
        return _with_masks(inner, given, vision)

    return forward


def _with_masks(function: Callable[..., Any], given: dict[str, Any], vision: bool) -> Any:
    """Return `function(**given)`, in which the model of one batch gets the masks that it reads, and its routers the
    `padding_mask`, which verl passes for packed rows alone. Megatron's own attention reads True = blocked, so it gets None
    in place of verl's [B, S], True = real."""
    from verl.models.mcore.util import is_npu_available  # verl looked for one when it was imported

    model = unwrap(given["model"])
    if is_npu_available:
        _refuse_window(getattr(model.config, "window_size", None), given)
    unread = is_npu_available or any(type(module).__name__ == "DotProductAttention" for module in model.modules())

    def masks(_: Any, args: Any, batch: dict[str, Any]) -> Any:
        if batch.get("packed_seq_params") is not None:
            return None
        keep = batch["attention_mask"]
        routed = not vision and getattr(model.config, "num_moe_experts", None)
        if keep is not None and routed and "padding_mask" in inspect.signature(inspect.unwrap(model.forward)).parameters:
            # megatron-core's text model cuts it on the first pipeline stage alone (0.16.1 gpt_model.py:291-321)
            shared = model.config.sequence_parallel and not model.pre_process
            batch = {"padding_mask": router_padding(~keep.bool(), shared=shared), **batch}
        return args, {**batch, "attention_mask": None if unread else keep}

    with given["model"].register_forward_pre_hook(masks, with_kwargs=True):
        return function(**given)


def _refuse_window(window: Any, given: dict[str, Any]) -> None:
    """Raise for a window that a row fills: MindSpeed's kernel gets none (0.12 to 0.18 te/.../dot_product_attention.py)."""
    left, ids = window[0] if isinstance(window, (tuple, list)) else window, given["input_ids"]
    longest = int((ids.offsets().diff() if ids.is_nested else given["attention_mask"].bool().sum(-1)).max())
    if left is None or left < 0 or longest <= left + 1:
        return
    rule = f"MindSpeed's attention reads no window, and rows of {longest} tokens are longer than {left} + 1."
    remedy = f"Keep rows to {left + 1} tokens (data.max_prompt_length, data.max_response_length), or use strategy=fsdp."
    raise UnsupportedFormError(explain("window_size", str(window), rule, remedy))


def _arguments_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def start_adaptor() -> None:
    """Let MindSpeed, or else MegatronAdaptor, patch Megatron now, if one is installed and Megatron is not imported yet. Does
    nothing if it does not load, as in a driver process without CANN (so does verl: workers/engine/__init__.py:54-60)."""
    if (found := adaptors()) and "megatron.core" not in sys.modules:
        with suppress(ImportError):
            import_module(found[0])


def install() -> None:
    """Swap verl's functions for these in every module of verl that has them."""
    start_adaptor()  # verl imports Megatron here, and MindSpeed's adaptor only where its workers begin
    from verl.models.mcore import model_forward, model_forward_fused

    for name in ("preprocess_bshd_engine", "postprocess_bshd_engine", "build_vlm_attn_mask_bshd"):
        patching.patch(PACKAGE, model_forward, name, keep_2d, everywhere="verl")
    patching.patch(PACKAGE, model_forward, "gptmodel_forward_model_engine", engine_forward, everywhere="verl")
    patching.patch(PACKAGE, model_forward, "model_forward_gen", generated_forward, everywhere="verl")
    for name in ("fused_forward_model_gen", "fused_forward_model_engine"):
        patching.patch(PACKAGE, model_forward_fused, name, generated_forward, everywhere="verl")


def uninstall() -> None:
    """Put verl's own functions back."""
    patching.release(PACKAGE)
