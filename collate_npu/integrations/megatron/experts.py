"""Padding in Megatron-core's mixture of experts: the mask its routers read, and where a mask does not help.

`padding_mask` is True = padding (the docstrings of core/transformer/moe say the opposite of their code). A router leaves it
out of its losses and its expert bias (router.py:471-626), and still routes it: three settings let that reach real tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from collate_npu.consumers.model_traits import config_of
from collate_npu.errors import UnsupportedFormError, explain
from collate_npu.masks.forms import none_is_exact
from collate_npu.segments import Segments


def router_padding_mask(segments: Segments, model: Any) -> Tensor | None:
    """bool `[B, S]`, True = padding, for a model with experts; None for one without. Given without padding too: ranks must
    count tokens in the same way (moe_utils.py:214-233). Raises `UnsupportedFormError` where padding would change the experts
    of real tokens; warns, once, where the auxiliary loss is of rows."""
    config = config_of(model)
    if not getattr(config, "num_moe_experts", None):
        return None
    if segments.padding_side != "none" and (setting := _shares_places(config)):
        rule = f"With {setting} padding takes experts' places from real tokens, or moves the balance they are chosen by."
        remedy = "Drop that setting, or use padding_free=True with lengths that need no alignment."
        raise UnsupportedFormError(explain("padding_mask", repr(segments), rule, remedy))
    if "seq_aux_loss" in balancing(config) and (segments.packed or len(set(segments.lengths)) > 1):
        _warn_of_rows()
    return None if "quantile_balancing" in balancing(config) else ~segments.keep


def balancing(config: Any) -> tuple[str, ...]:
    """The kinds of load balancing that are on: one, or several with coefficients of their own."""
    kinds = getattr(config, "moe_router_load_balancing_type", None) or "none"
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)


def counts_tokens(config: Any) -> bool:
    """True if a router of this model adds something to the loss, or to its bias, that counts tokens."""
    names = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_enable_expert_bias")
    told = [getattr(config, name, None) for name in names]
    return any(any(each) if isinstance(each, (list, tuple)) else each for each in told)


def _shares_places(config: Any) -> str | None:
    """The setting by which a token's experts depend on the other tokens of the batch (router.py:566-595; 0.19: 764-800)."""
    if getattr(config, "moe_expert_capacity_factor", None) is not None:
        return f"moe_expert_capacity_factor={config.moe_expert_capacity_factor}"
    return next((kind for kind in balancing(config) if kind in ("sinkhorn", "quantile_balancing")), None)


def real_tokens_alone(
    original: Callable[..., Any], self: Any, routing_map: Tensor, padding_mask: Tensor | None = None
) -> Any:
    """In place of a router's `_apply_expert_bias`: `routing_map` is bool `[T, E]`, the mask `[T]`, True = padding."""
    return original(self, routing_map if padding_mask is None else routing_map & ~padding_mask.reshape(-1, 1))


@cache
def _warn_of_rows() -> None:
    warnings.warn(
        "seq_aux_loss of megatron-core divides by the mean length of the rows and takes a packed row for one sequence "
        "(core/transformer/moe/router.py:317-369): with these lengths the auxiliary loss is not that of the samples alone. "
        "Logits and the language-model loss are. Remedy: moe_router_load_balancing_type='aux_loss' or 'global_aux_loss'.",
        stacklevel=5,
    )


# --- multi-token prediction: at depth k Megatron moves ids, positions, labels and loss mask k places to the left itself,
# along the whole row, or inside the sequences that `cu_seqlens_q` tells (0.16.1 to 0.19.2, core/transformer/
# multi_token_prediction.py:115-318). For a loss of your own: `shift_labels(labels, segments, steps=1 + k)`.


def depths(config: Any) -> int:
    """How many tokens ahead of the next one the model predicts."""
    return getattr(config, "mtp_num_layers", None) or 0


def refuse_crossing(segments: Segments, config: Any, *, padding_free: bool) -> None:
    """Raise where a model with multi-token prediction would learn across sequences, or count padding: its routers hear of
    none in 0.16.1 and 0.17; later ones move the padding mask with a 0, "real", at the end of the row."""
    if not depths(config):
        return
    exact = none_is_exact(segments)
    if not exact and not padding_free:
        rule = f"Multi-token prediction moves labels along the whole row, and {exact.why}."
        remedy = "Pad right with one sequence a row, or use padding_free=True."
        raise UnsupportedFormError(explain("labels", repr(segments), rule, remedy))
    if getattr(config, "num_moe_experts", None) and counts_tokens(config) and segments.padding_side != "none":
        rule = "Routers of the multi-token prediction layers count padding: no padding_mask reaches them."
        remedy = "Use padding_free=True with lengths that need no alignment, or set moe_aux_loss_coeff=0 (and no z-loss)."
        raise UnsupportedFormError(explain("padding_mask", repr(segments), rule, remedy))
