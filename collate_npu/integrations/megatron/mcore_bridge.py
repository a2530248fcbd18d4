"""mcore-bridge 1.6.5: the 2D mask and the router's padding mask, handed on until the layer that reads them.

Measured on 1.6.5 with megatron-core 0.16.1, such a key gets lost or crashes at three places: the text model's forward has
no `**kwargs` (gpt_model.py:255-269), the multimodal forward empties its own where there is a vision tower and on later
pipeline stages (mm_gpt_model.py:71, 123), and every layer refuses it, because megatron-core's `_forward_attention` lists
its arguments (core/transformer/transformer_layer.py:521-538). `pass_through_forward` picks
the way in, `install` opens the other two. Costs nothing per token.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import Tensor

from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.integrations import patching
from collate_npu.parallel import ContextParallel, split_tensor

PACKAGE, TESTED = "mcore-bridge", "1.6.5"

_EXTRAS = ("attention_mask_2d", "padding_mask")


def install(*, holder: str = PACKAGE) -> None:
    """Let the multimodal forward keep the two masks, and each layer hand the 2D one to the attention that takes it.

    `USE_MCORE_GDN=0` then also builds Qwen3-Next beside transformers 5. Call it before the model is built.
    It stays until every `holder` that installed it has let it go: `swift.uninstall` leaves your own in place.
    """
    from mcore_bridge.model import MultimodalGPTModel
    from mcore_bridge.model.modules import TransformerLayer

    patching.patch(holder, MultimodalGPTModel, "forward", _multimodal_forward)
    patching.patch(holder, TransformerLayer, "forward", _layer_forward)
    from mcore_bridge.model.gpts import qwen3_next

    patching.patch(holder, qwen3_next.Qwen3NextGatedDeltaNet, "__init__", _gated_delta_net_init)


def uninstall() -> None:
    """Undo your own `install`."""
    patching.release(PACKAGE)


def pass_through_forward(model_class: type, batch: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with `extras` where `model_class.forward` passes them on to its layers. Raises where it has no such door.

    Warns, once for each class, where the forward takes them and then drops them, as a multimodal one does that has
    no `extra_forward_keys` for `install` to use.
    """
    if not extras:
        return dict(batch)
    parameters = inspect.signature(inspect.unwrap(model_class.forward)).parameters  # type: ignore[attr-defined]
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        _warn_if_dropped(model_class)
        return {**batch, **extras}
    if "extra_block_kwargs" in parameters:
        return {**batch, "extra_block_kwargs": {**(batch.get("extra_block_kwargs") or {}), **extras}}
    rule = f"{model_class.__qualname__}.forward takes neither it nor extra_block_kwargs, so no layer would see it."
    raise UnsupportedFormError(explain(", ".join(extras), "a mask", rule, "Pad right, or use padding_free=True."))


def router_padding(padding: Tensor, cp: ContextParallel | None, tp: tuple[int, int] = (0, 1)) -> Tensor:
    """This rank's part of an MoE router's padding mask, bool `[B, S]`, True = padding.

    Cut as mcore-bridge cuts what it derives from a dense mask (model/gpt_model.py:307-316); `tp` is the rank and the
    number of the tensor-parallel ranks that share the tokens again (`sequence_parallel`).
    """
    local = padding if cp is None else split_tensor(padding, cp)
    rank, size = tp
    if local.shape[1] % size:
        rule = f"{size} tensor-parallel ranks share the tokens of a row."
        raise CollateError(explain("width", str(local.shape[1]), rule, f"Pad to a multiple of {size} on each rank."))
    return local.chunk(size, dim=1)[rank].contiguous()


@cache
def _warn_if_dropped(model_class: Any) -> None:
    language = getattr(model_class, "language_model_cls", None)
    if language is not None and not (patching.in_place(_multimodal_forward) and hasattr(language, "extra_forward_keys")):
        warnings.warn(
            f"{model_class.__qualname__}.forward drops attention_mask_2d and padding_mask on their way to the layers. Real "
            "tokens stay exact while padding is on the right; MoE routers count padding. Remedy: collate_npu.integrations."
            f"swift.install() with mcore-bridge >= 1.6.5, or {language.__qualname__}.extra_forward_keys += {[*_EXTRAS]}.",
            stacklevel=2,
        )


def _multimodal_forward(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """`extra_forward_keys` name what survives (mm_gpt_model.py:105, 124); a missing one is a KeyError, hence per call."""
    language = self.language_model
    before = getattr(language, "extra_forward_keys", None)
    if before is None:
        return original(self, *args, **kwargs)
    language.extra_forward_keys = [*before, *(key for key in _EXTRAS if key in kwargs)]
    try:
        return original(self, *args, **kwargs)
    finally:
        language.extra_forward_keys = before


def _gated_delta_net_init(
    original: Callable[..., Any], self: Any, config: Any, submodules: Any, layer_number: int, **kwargs: Any
) -> Any:
    """transformers' layer asks its config which kind it is (5.19 modeling_qwen3_next.py:616), which mcore-bridge's does
    not say for Qwen3-Next as it does for Qwen3.5 (gpts/qwen3_next.py:455-462, mm_gpts/qwen3_5.py:39-43)."""
    if getattr(config, "layer_types", None) is not None:
        return original(self, config, submodules, layer_number, **kwargs)
    config.layer_types = {layer_number: "linear_attention"}
    try:
        return original(self, config, submodules, layer_number, **kwargs)
    finally:
        del config.layer_types


def _layer_forward(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Past `_forward_attention`, straight to an attention that takes `**kwargs` (gpts/qwen3_next.py:58-66 reads it)."""
    keep = kwargs.pop("attention_mask_2d", None)
    attention = self.self_attention
    if keep is None or not _takes_any(type(attention).forward):
        return original(self, *args, **kwargs)
    hook = attention.register_forward_pre_hook(
        lambda module, given, named: (given, {**named, "attention_mask_2d": keep}), with_kwargs=True
    )
    try:
        return original(self, *args, **kwargs)
    finally:
        hook.remove()


@cache
def _takes_any(forward: Callable[..., Any]) -> bool:
    parameters = inspect.signature(forward).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)
