"""Multi-token prediction of Megatron-core: at depth k the model moves ids, positions, labels and loss mask k places to the
left itself, along the whole row, or inside the sequences that `cu_seqlens_q` tells (0.16.1 to 0.19.2,
core/transformer/multi_token_prediction.py:115-318). For a loss of your own: `shift_labels(labels, segments, steps=1 + k)`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from collate_npu.errors import UnsupportedFormError, explain
from collate_npu.integrations.megatron.experts import counts_tokens
from collate_npu.masks.forms import none_is_exact
from collate_npu.outputs import shift_labels
from collate_npu.parallel import ContextParallel, split_tensor
from collate_npu.releases import MEGATRON_MTP_LOSS
from collate_npu.segments import Segments


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


def refuse_no_target(
    labels: Tensor, segments: Segments, config: Any, cp: ContextParallel | None, offsets: Tensor | None
) -> None:
    """Raise where a rank has no target at some depth and the release divides by their number (0.16.1 gpt_model.py:640-647).
    Every rank looks at all of them, so that all raise together."""
    if not depths(config) or getattr(config, "calculate_per_token_loss", False):
        return
    from megatron.core.package_info import MAJOR, MINOR

    if MEGATRON_MTP_LOSS.holds(f"{MAJOR}.{MINOR}"):
        return
    ranks = [cp.with_rank(rank) for rank in range(cp.size)] if cp else []
    for depth in range(1, depths(config) + 1):
        learned_BS = shift_labels(labels, segments, steps=1 + depth) != -100
        parts = [split_tensor(learned_BS, rank, cu_seqlens=offsets) for rank in ranks] or [learned_BS]
        if empty := [rank for rank, part in enumerate(parts) if not part.any()]:
            got = f"no target {1 + depth} tokens ahead" + (f" on ranks {empty}" if ranks else "")
            rule = "Multi-token prediction divides its loss by the number of targets, and 0 / 0 is NaN."
            remedy = "Set calculate_per_token_loss=True, or batch longer answers with short ones."
            raise UnsupportedFormError(explain("labels", got, rule, remedy))
