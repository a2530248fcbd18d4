"""mcore-bridge 1.6.5: padding kept out of Gated DeltaNet and out of the routers' counts, on every stage of a pipeline.

Neither of its two Gated DeltaNets reads a 2D mask that arrives: Megatron's own, the default, reads no mask at all
(modules/gated_delta_net.py:212), and transformers' (`USE_MCORE_GDN=0`) reads one where megatron-core never passes it on
(core/transformer/transformer_layer.py:521-538). With `install` the input of either is zero at padding, which is exact
where no padding stands inside a sequence: norm, projections and convolution of Qwen3-Next and Qwen3.5 have no bias, and a
state that is empty stays so. `pass_through_forward` picks the way in. Costs one masked copy of a recurrent layer's input.
Legend: B batch, S this rank's width.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.metadata import version
from typing import Any

from torch import Tensor

from collate_npu.consumers.consumer import HOLES_RECURRENT, PACKED_RECURRENT, Case, Model
from collate_npu.errors import CollateError, UnsupportedFormError, explain, shape_of
from collate_npu.integrations import patching
from collate_npu.integrations.megatron import flat_rows
from collate_npu.keys import KEEP_KEY
from collate_npu.parallel import ContextParallel, split_tensor
from collate_npu.segments import Segments

PACKAGE, TESTED = "mcore-bridge", "1.6.5"

_EXTRAS = (KEEP_KEY, "padding_mask")


def install(*, holder: str = PACKAGE) -> None:
    """Let both masks reach the layers, and zero what a Gated DeltaNet is given at padding. Before the model is built.

    Of flat rows it refuses the offsets that a layer would misread (`flat_rows`).

    It stays until every `holder` that installed it has let it go: `swift.uninstall` leaves your own in place. With it
    `USE_MCORE_GDN=0` also builds Qwen3-Next beside transformers 5.13 and later; what cannot run is refused when it is built.

    >>> install()  # doctest: +SKIP
    """
    from mcore_bridge.model import MultimodalGPTModel
    from mcore_bridge.model.gpts import qwen3_next
    from mcore_bridge.model.modules import TransformerBlock, TransformerLayer
    from mcore_bridge.model.register import ModelLoader

    patching.patch(holder, ModelLoader, "__init__", _loader)
    patching.patch(holder, MultimodalGPTModel, "forward", _multimodal_forward)
    patching.patch(holder, TransformerBlock, "_checkpointed_forward", _checkpointed_forward)
    patching.patch(holder, TransformerLayer, "forward", _layer_forward)
    patching.patch(holder, qwen3_next.Qwen3NextGatedDeltaNet, "__init__", _gated_delta_net_init)
    flat_rows.install(holder)


def uninstall() -> None:
    """Undo your own `install`."""
    patching.release(PACKAGE)


def masks_padding(mcore_model_type: str | None) -> bool:
    """Do the recurrent layers of such a model leave padding out? Measured on Qwen3-Next and Qwen3.5, dense and MoE."""
    return mcore_model_type in ("qwen3_next", "qwen3_5") and patching.in_place(_layer_forward)


def refuse_unmaskable(segments: Segments) -> None:
    """Raise where no zeroed input helps a recurrent layer: several sequences in a row, or padding inside one."""
    case = Case(segments=segments, model=Model(needs_mask_2d=True))
    for refusal in (PACKED_RECURRENT, HOLES_RECURRENT):
        if why := refusal.when(case):
            raise UnsupportedFormError(explain(KEEP_KEY, repr(segments), refusal.rule.format(why=why), refusal.remedy))


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
    if extras.keys() <= parameters.keys():
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


def _loader(original: Callable[..., Any], self: Any, config: Any) -> None:
    """Every model is built by one (model/register.py `get_mcore_model`); the recurrent ones name their layer."""
    recurrent = getattr(type(self), "gated_delta_net", None)
    if recurrent is not None and any(config.linear_attention_freq or ()):
        _refuse_unrunnable(recurrent, config)
    original(self, config)


def _refuse_unrunnable(recurrent: type, config: Any) -> None:
    """What USE_MCORE_GDN=0 cannot run, said before the model is built, with the versions and the way out.

    Upstream it ends in an AssertionError (qwen3_next.py:456). Megatron's own layer under context parallelism is refused by
    its config, before 0.18 (core/transformer/transformer_config.py:982-986).
    """
    if (
        not any(base.__module__.startswith("transformers.") for base in recurrent.__mro__)
        or config.context_parallel_size == 1
    ):
        return
    installed = ", ".join(f"{name} {version(name)}" for name in (PACKAGE, "transformers", "megatron-core"))
    rule = f"{recurrent.__name__}, which it takes from transformers, runs on whole rows ({installed})."
    remedy = "Unset it: Megatron's own layer runs under context parallelism from megatron-core 0.18 on."
    raise UnsupportedFormError(explain("USE_MCORE_GDN", os.environ.get("USE_MCORE_GDN", "0"), rule, remedy))


def _multimodal_forward(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Its own are cleared by a vision tower and on later stages (mm_gpt_model.py:65, 122); `extra_forward_keys` name what
    survives (:105, 123), and a missing one is a KeyError, hence per call."""
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


def _checkpointed_forward(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Layers that recompute_method="block" leaves out get no padding mask (modules/transformer_block.py:235)."""
    padding = kwargs.get("padding_mask")
    if padding is None:
        return original(self, *args, **kwargs)
    hooks = [layer.register_forward_pre_hook(partial(_with_padding, padding), with_kwargs=True) for layer in self.layers]
    try:
        return original(self, *args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()


def _with_padding(padding: Tensor, _: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return args, {**kwargs, "padding_mask": padding}


def _layer_forward(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Every layer gets the 2D mask; none may hand it to megatron-core, and Gated DeltaNet gets its input zeroed."""
    keep, attention = kwargs.pop(KEEP_KEY, None), self.self_attention
    if keep is None or not _is_gated_delta_net(attention):
        return original(self, *args, **kwargs)
    hook = attention.register_forward_pre_hook(partial(_zero_padding, keep, self.config))
    try:
        return original(self, *args, **kwargs)
    finally:
        hook.remove()


def _is_gated_delta_net(attention: Any) -> bool:
    return any(base.__name__.endswith("GatedDeltaNet") for base in type(attention).__mro__)


def _zero_padding(keep_BS: Tensor, config: Any, _: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The layer's own input alone: the residual stream stays as it is. `args[0]` is `[S, B, H]`, S shared by tp ranks."""
    hidden = args[0]
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    if keep_BS.shape != (hidden.shape[1], hidden.shape[0] * ranks):
        rule = f"This rank holds {hidden.shape[0] * ranks} tokens of {hidden.shape[1]} rows."
        raise CollateError(explain(KEEP_KEY, shape_of(keep_BS), rule, "Split it like the tokens (mask_2d='local')."))
    if ranks > 1:
        from megatron.core import mpu

        keep_BS = keep_BS.chunk(ranks, dim=1)[mpu.get_tensor_model_parallel_rank()]
    return (hidden.masked_fill(keep_BS.T.unsqueeze(-1) == 0, 0), *args[1:])
