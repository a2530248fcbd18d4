"""mcore-bridge 1.6.5: padding kept out of Gated DeltaNet and out of the routers' counts, on every stage of a pipeline.

Its Gated DeltaNet is Megatron's own, and reads no mask (modules/gated_delta_net.py:212). With `install` its input is zero at
padding. That is exact where no padding stands inside a sequence: norm, projections and convolution have no bias, and an
empty state stays so. Costs one masked copy of a recurrent layer's input. Transformers' (`USE_MCORE_GDN=0`) is refused.

Of flat rows, offsets that the layer would misread in silence are refused: it takes the padded ones where they fit the row,
and else `cu_seqlens_q` (modules/gated_delta_net.py:240-251). Without fla it runs by sequence. Legend: B batch, S this
rank's width.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from collate_npu.consumers.by_sequence import plan_of
from collate_npu.consumers.mask_choice import Case, Model, consumer_named
from collate_npu.consumers.megatron import refuse_unread_padding
from collate_npu.errors import CollateError, UnsupportedFormError, explain, shape_of
from collate_npu.integrations import patching
from collate_npu.keys import KEEP_KEY
from collate_npu.masks.forms import dense, open_empty_rows
from collate_npu.parallel import ContextParallel, query_rows, split_tensor
from collate_npu.segments import Segments

PACKAGE, TESTED = "mcore-bridge", "1.6.5"

_EXTRAS = (KEEP_KEY, "padding_mask")
_REMEDY = "Build them with packed_seq_params(segments, padding_counts=True), or take gpt_batch's inputs."


def install(*, holder: str = PACKAGE) -> None:
    """Let both masks reach the layers, and zero the input of Gated DeltaNet at padding. Call it before you build the model.

    Patches stay until each `holder` releases them. Layers of `USE_MCORE_GDN=0` are refused when they are built.

    >>> install()  # doctest: +SKIP
    """
    from mcore_bridge.model import MultimodalGPTModel
    from mcore_bridge.model.gpts import qwen3_next
    from mcore_bridge.model.mm_gpts.qwen3_5 import Qwen3_5MoeGatedDeltaNet
    from mcore_bridge.model.modules import GatedDeltaNet, TransformerBlock, TransformerLayer

    patching.patch(holder, MultimodalGPTModel, "forward", _multimodal_forward)
    patching.patch(holder, TransformerBlock, "_checkpointed_forward", _checkpointed_forward)
    patching.patch(holder, TransformerLayer, "forward", _layer_forward)
    patching.patch(holder, GatedDeltaNet, "_resolve_cu_seqlens", _resolve_offsets)
    patching.patch(holder, GatedDeltaNet, "forward", _by_rows)
    for layer in (qwen3_next.Qwen3NextGatedDeltaNet, Qwen3_5MoeGatedDeltaNet):
        patching.patch(holder, layer, "__init__", _refuse_layer)


def uninstall() -> None:
    """Undo your own `install`."""
    patching.release(PACKAGE)


def masks_padding(mcore_model_type: str | None) -> bool:
    """True if the recurrent layers of such a model leave padding out. Measured on Qwen3-Next and Qwen3.5, dense and MoE."""
    return mcore_model_type in ("qwen3_next", "qwen3_5") and patching.in_place(_layer_forward)


def check_padding(segments: Segments, kernel: str, *, recurrent: bool, model_type: str | None) -> None:
    """Raise if this attention kernel, or the recurrent layers of such a model of mcore-bridge's, would compute these rows
    wrong. A zeroed input does not help rows of several sequences, or padding inside one. Recurrent layers of other models
    (`model_type` None) read no padding."""
    consumer_named("megatron").choose(Case(segments=segments, model=Model(needs_mask_2d=recurrent)))
    refuse_unread_padding(segments, kernel, recurrent=recurrent and not masks_padding(model_type))


def attention_mask(segments: Segments, kernel: str, cp: ContextParallel | None, *, device: torch.device) -> Tensor | None:
    """Return the dense mask of this rank's queries, True = blocked, for a kernel that reads one; None for the others.
    Megatron's local kernels always read it: without it they make a triangle on CUDA (core/transformer/utils.py:33-35)."""
    reader = consumer_named(kernel)
    if reader.forms[-1].form != "masked":
        return None
    rows = None if cp is None else query_rows(segments.shape[1], cp)
    blocked = dense(segments, polarity="masked", rows=rows, device=device)
    return open_empty_rows(blocked) if reader.opens_empty_rows else blocked


def pass_through_forward(model_class: type, batch: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch with `extras` as `model_class.forward` passes them on to its layers. Raises if it does not."""
    parameters = inspect.signature(inspect.unwrap(model_class.forward)).parameters  # type: ignore[attr-defined]
    if not extras:
        return dict(batch)
    if extras.keys() <= parameters.keys() or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return {**batch, **extras}
    if "extra_block_kwargs" in parameters:
        return {**batch, "extra_block_kwargs": {**(batch.get("extra_block_kwargs") or {}), **extras}}
    rule = f"{model_class.__qualname__}.forward takes neither it nor extra_block_kwargs, so no layer would see it."
    raise UnsupportedFormError(explain(", ".join(extras), "a mask", rule, "Pad right, or use padding_free=True."))


def router_padding(padding: Tensor, cp: ContextParallel | None = None, *, shared: bool = False) -> Tensor:
    """Return this rank's part of an MoE router's padding mask, bool `[B, S]`, True = padding. It is cut as mcore-bridge cuts
    its own (model/gpt_model.py:307-316): by `cp`, then if `shared` by tensor-parallel ranks."""
    local = padding if cp is None else split_tensor(padding, cp)
    if not shared:
        return local.contiguous()
    from megatron.core import parallel_state

    size = parallel_state.get_tensor_model_parallel_world_size()
    rank: int = parallel_state.get_tensor_model_parallel_rank()
    return local.chunk(size, dim=1)[rank].contiguous()


def _multimodal_forward(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Pass both masks through a multimodal forward. A vision tower and later stages clear its keywords;
    `extra_forward_keys` name what survives (mm_gpt_model.py:105, 123), and a missing one is a KeyError, hence per call."""
    language = self.language_model
    before = getattr(language, "extra_forward_keys", None)
    if before is None:
        return original(self, *args, **kwargs)
    language.extra_forward_keys = [*before, *(key for key in _EXTRAS if key in kwargs)]
    try:
        return original(self, *args, **kwargs)
    finally:
        language.extra_forward_keys = before


def _checkpointed_forward(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Pass the padding mask to layers that recompute_method="block" leaves out (modules/transformer_block.py:235)."""
    padding = kwargs.get("padding_mask")
    if padding is None:
        return original(self, *args, **kwargs)
    with ExitStack() as hooks:
        for layer in self.layers:
            with_padding = lambda _, args, given: (args, {**given, "padding_mask": padding})  # noqa: E731
            hooks.enter_context(layer.register_forward_pre_hook(with_padding, with_kwargs=True))
        return original(self, *args, **kwargs)


def _layer_forward(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Take the 2D mask out of a layer's keywords, and zero the input of Gated DeltaNet at padding."""
    keep, attention = kwargs.pop(KEEP_KEY, None), self.self_attention
    if keep is None or not any(base.__name__.endswith("GatedDeltaNet") for base in type(attention).__mro__):
        return original(self, *args, **kwargs)
    with attention.register_forward_pre_hook(partial(_zero_padding, keep, self.config)):
        return original(self, *args, **kwargs)


def _zero_padding(keep_BS: Tensor, config: Any, _: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with the input `[S, B, H]`, S shared by tp ranks, zeroed at padding; the residual stays."""
    hidden = args[0]
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    if keep_BS.shape != (hidden.shape[1], hidden.shape[0] * ranks):
        rule = f"This rank holds {hidden.shape[0] * ranks} tokens of {hidden.shape[1]} rows."
        raise CollateError(explain(KEEP_KEY, shape_of(keep_BS), rule, "Split it like the tokens (mask_2d='local')."))
    if ranks > 1:
        from megatron.core import mpu

        keep_BS = keep_BS.chunk(ranks, dim=1)[mpu.get_tensor_model_parallel_rank()]
    return (hidden.masked_fill(keep_BS.T.unsqueeze(-1) == 0, 0), *args[1:])


def refuse_unseparated(modules: Iterable[Any]) -> None:
    """Raise for transformers' layers, in which the convolution of a flat row runs across its sequences: from 5.15 on it does
    not call the one that mcore-bridge puts there (mm_gpts/qwen3_5.py:31, 48; measured on 5.19: 2.8 off)."""
    for module in modules:
        kind = f"{type(module).__module__}.{type(module).__name__}"
        if re.fullmatch(r"mcore_bridge\..*\.Qwen3(Next|_5Moe)GatedDeltaNet", kind):
            _refuse_layer(None, module)


def _refuse_layer(_: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    rule = f"{type(layer).__name__} of transformers runs from one sequence of a flat row into the next."
    remedy = "Unset it: Megatron's own Gated DeltaNet takes padded and flat rows."
    raise UnsupportedFormError(explain("USE_MCORE_GDN", "0", rule, remedy))


def _resolve_offsets(
    original: Callable[..., Any], padded: Tensor | None, actual: Tensor | None, total: int, cp_size: int = 1
) -> Any:
    """Return the offsets that Gated DeltaNet takes. Raises unless every sequence is a multiple of 2 * cp, the number of its
    parts (core/ssm/mamba_context_parallel.py:362-374)."""
    taken = original(padded, actual, total, cp_size=cp_size)
    given, parts = actual if padded is None else padded, 2 * cp_size if cp_size > 1 else 1
    if given is None:  # the object carries no offsets
        return taken
    if taken is None or bool(((lengths := torch.diff(taken)) < 0).any() or (lengths % parts).any()):
        rule = f"Gated DeltaNet takes offsets that rise from 0 to the {total} tokens of the row"
        rule += f", in steps of {parts} on {cp_size} ranks." if cp_size > 1 else "."
        raise CollateError(explain("packed_seq_params", str(given.tolist())[:80], rule, _REMEDY))
    return taken


def _by_rows(
    original: Callable[..., Any], self: Any, hidden: Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any
) -> Any:
    """Run the sequences of a flat row as rows of one each, where fla is not installed: there the layer takes no offsets, and
    has no rule but Megatron's own in torch. `hidden` is `[T, 1, H]`."""
    from mcore_bridge.model.modules import gated_delta_net as native
    from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule

    if native.chunk_gated_delta_rule is None:
        rule: Any = lambda *given, cu_seqlens=None, **more: torch_chunk_gated_delta_rule(*given, **more)  # noqa: E731
        length: Any = lambda x: torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)  # noqa: E731
        own: dict[str, Any] = {"chunk_gated_delta_rule": rule, "l2norm": lambda x: x * length(x)}
        original = patching.with_globals(original, **own)
    shared = self.config.context_parallel_size > 1 or (self.config.sequence_parallel and self.tp_size > 1)
    if packed_seq_params is None or native.causal_conv1d is not None or shared:
        return original(self, hidden, *args, packed_seq_params=packed_seq_params, **kwargs)
    padded, real = (getattr(packed_seq_params, f"cu_seqlens_q{kind}", None) for kind in ("_padded", ""))
    offsets = self._resolve_cu_seqlens(padded, real, len(hidden))
    plan = plan_of([n for n in offsets.diff().tolist() if n], hidden.device)
    outs = [original(self, rows.transpose(0, 1), *args, **kwargs) for rows in plan.lay(hidden.transpose(0, 1))]
    return plan.back([out.transpose(0, 1) for out, _ in outs]).transpose(0, 1), outs[0][1]
