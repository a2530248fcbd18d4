"""verl's own functions (models/mcore/util.py, 0.9.1) with a 2D mask on every device, and `install` to put them in place.

In its forwards (models/mcore/model_forward.py and model_forward_fused.py) padded rows reach the model with None on an NPU,
and where Megatron's local attention would misread the 2D mask, which the way back keeps. Packed rows (thd) keep what verl
gives. MoE routers of padded text rows learn which tokens are padding. A sliding window shorter than a row is refused on an
NPU, where no attention of MindSpeed's reads one. Legend: B rows, S width, L = S / cp.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch import Tensor

from collate_npu.errors import CollateError, UnsupportedFormError, explain, shape_of
from collate_npu.integrations import mindspeed, patching
from collate_npu.integrations.megatron.mcore_bridge import router_padding
from collate_npu.integrations.verl import PACKAGE, on_npu, pad_jagged, segments_from_jagged, to_jagged
from collate_npu.outputs import repad
from collate_npu.parallel import ContextParallel, gather_sequence
from collate_npu.segments import Segments


def preprocess_bshd_engine(
    input_ids: Tensor,
    pre_process: bool = True,
    need_roll: bool = False,
    use_fp8_padding: bool = False,
    forced_max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids `[B, L, ...]`, the 2D mask that `postprocess_bshd_engine` takes (on every device), and positions."""
    padded = pad_jagged(input_ids, npu=False, width=forced_max_seqlen, fp8=use_fp8_padding, roll=need_roll)
    return padded.values, padded.attention_mask_2d, padded.position_ids


def postprocess_bshd_engine(output: Tensor, attention_mask: Tensor | None, post_process: bool = True) -> Tensor:
    """A jagged tensor of `[B, L, ...]`, by this rank's 2D mask."""
    if not post_process:
        return output
    if attention_mask is None or attention_mask.ndim != 2:
        got = "None" if attention_mask is None else shape_of(attention_mask)
        rule = "This rank's 2D mask says which of its tokens are real."
        raise CollateError(explain("attention_mask", got, rule, "Pass Padded.attention_mask_2d."))
    cp = ContextParallel.from_megatron()
    return to_jagged(output, Segments.from_keep(gather_sequence(attention_mask.bool(), cp)), cp)


def build_vlm_attn_mask_bshd(
    input_ids: Tensor,
    batch_size: int,
    pad_token_id: int = 0,
    forced_max_seqlen: int | None = None,
    use_fp8_padding: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Whole rows `[B, S]` for a vision model, with fp8 as wide as `preprocess_bshd_engine`'s; the mask is None on NPU."""
    segments = segments_from_jagged(input_ids, ContextParallel.from_megatron(), width=forced_max_seqlen, fp8=use_fp8_padding)
    return repad(input_ids.values(), segments, pad_token_id), None if on_npu() else segments.keep.to(input_ids.device)


def engine_forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """verl's forward of jagged ids, padded or packed (model_forward.py `gptmodel_forward_model_engine`)."""
    given = _named(original, args, kwargs)
    return original(**{**given, "model": _Reader(given)})


def generated_forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """verl's generators of forwards (`model_forward_gen`, and both of the fused kernels, which pack their rows always)."""
    inner = original(*args, **kwargs)
    vision = _named(original, args, kwargs)["vision_model"]

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not patching.in_place(generated_forward):
            return inner(*args, **kwargs)
        given = _named(inner, args, kwargs)
        if not given["input_ids"].is_nested:  # verl takes integers for places, without an error
            given["attention_mask"] = given["attention_mask"].bool()
        return inner(**{**given, "model": _Reader({**given, "vision_model": vision})})

    return forward


class _Reader:
    """The model of one batch, called with the masks that it reads. Megatron's own attention takes True = blocked: verl's
    [B, S], True = real, blocks what it should not there."""

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
        unread = on_npu() or any(type(module).__name__ == "DotProductAttention" for module in self.modules())
        return self._model(**{**batch, "attention_mask": None if unread else keep})


def _router_padding(model: Any, padding: Tensor) -> dict[str, Any]:
    """verl gives it for packed rows alone; megatron-core's text model takes it, and cuts it for the ranks that share the
    tokens on the first pipeline stage alone (0.16.1 gpt_model.py:291-321)."""
    if "padding_mask" not in inspect.signature(inspect.unwrap(model.forward)).parameters:
        return {}
    return {"padding_mask": router_padding(padding, shared=model.config.sequence_parallel and not model.pre_process)}


def _refuse_window(window: Any, given: dict[str, Any]) -> None:
    """MindSpeed hands none to its kernel, padded or packed (0.12 to 0.18, te/.../dot_product_attention.py `forward`)."""
    left, ids = window[0] if isinstance(window, (tuple, list)) else window, given["input_ids"]
    longest = int((ids.offsets().diff() if ids.is_nested else given["attention_mask"].bool().sum(-1)).max())
    if left is None or left < 0 or longest <= left + 1:
        return
    rule = f"No attention of MindSpeed's reads a window, and rows of {longest} tokens are longer than {left} + 1."
    remedy = f"Keep rows to {left + 1} tokens (data.max_prompt_length, data.max_response_length), or use strategy=fsdp."
    raise UnsupportedFormError(explain("window_size", str(window), rule, remedy))


def _named(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def install() -> None:
    """Swap verl's functions for these in every module of verl that has them.

    >>> install()  # doctest: +SKIP
    """
    mindspeed.start()  # verl imports Megatron here, and MindSpeed's adaptor only where its workers begin
    from verl.models.mcore import model_forward, model_forward_fused

    for ours in (preprocess_bshd_engine, postprocess_bshd_engine, build_vlm_attn_mask_bshd):
        patching.patch(PACKAGE, model_forward, ours.__name__, _instead(ours), everywhere="verl")
    patching.patch(PACKAGE, model_forward, "gptmodel_forward_model_engine", engine_forward, everywhere="verl")
    patching.patch(PACKAGE, model_forward, "model_forward_gen", generated_forward, everywhere="verl")
    for name in ("fused_forward_model_gen", "fused_forward_model_engine"):
        patching.patch(PACKAGE, model_forward_fused, name, generated_forward, everywhere="verl")


def uninstall() -> None:
    """Put verl's own functions back."""
    patching.release(PACKAGE)


@cache
def _instead(ours: Callable[..., Any]) -> Callable[..., Any]:
    """The same function for `patching`, which offers the original first."""
    return lambda original, *args, **kwargs: ours(*args, **kwargs)
