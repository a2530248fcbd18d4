"""verl's own functions (models/mcore/util.py, 0.9.1) with a 2D mask on every device, and `install` to put them in place.

Names and arguments are verl's. `install` swaps them wherever verl has them, and its forwards for those of `forward.py`,
so the model gets None on an NPU while the way back keeps its 2D mask; `uninstall` undoes it.
Legend: B rows, S width, L = S / cp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from collate_npu.collate.padding import round_up
from collate_npu.errors import CollateError, UnsupportedFormError, explain, shape_of
from collate_npu.integrations import mindspeed, patching
from collate_npu.integrations.verl import PACKAGE, on_npu, pad_jagged, segments_from_jagged, to_jagged
from collate_npu.integrations.verl.forward import engine_forward, generated_forward
from collate_npu.masks.derive import derive_segments
from collate_npu.masks.find import segments_from_batch
from collate_npu.outputs import repad, unpad
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


def postprocess_bshd_engine(
    output: Tensor, attention_mask: Tensor | None, post_process: bool = True, *, input_ids: Tensor | None = None
) -> Tensor:
    """A jagged tensor of `[B, L, ...]`, by this rank's 2D mask, a 4D one (CP 1), or the jagged `input_ids` and None."""
    if not post_process:
        return output
    cp = ContextParallel.from_megatron()
    if input_ids is not None:
        return to_jagged(output, segments_from_jagged(input_ids, cp, width=output.shape[1] * cp.size), cp)
    if attention_mask is None:
        rule = "Without a mask only the jagged ids say how long each row is."
        raise CollateError(explain("attention_mask", "None", rule, "Pass input_ids=, or Padded.attention_mask_2d."))
    if attention_mask.ndim == 2:
        return to_jagged(output, Segments.from_keep(gather_sequence(attention_mask.bool(), cp)), cp)
    if cp.size > 1:
        rule = "Under context parallelism a 4D mask holds this rank's rows alone."
        raise UnsupportedFormError(explain("attention_mask", shape_of(attention_mask), rule, "Pass the 2D mask."))
    return to_jagged(output, derive_segments(attention_mask, polarity="masked", batch_size=len(output)), cp)


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


def build_vlm_attn_mask_thd(input_ids: Tensor, pad_token_id: int = 0) -> tuple[Tensor, Tensor]:
    """Whole rows, and the 2D mask by which the model packs them itself, on an NPU too (verl#7250, verl#7372)."""
    segments = segments_from_jagged(input_ids, ContextParallel.from_megatron())
    return repad(input_ids.values(), segments, pad_token_id), segments.keep.to(input_ids.device)


def preprocess_bshd(
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    sequence_parallel: bool = False,
    pre_process: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows padded on any side to rows padded right; 0/1 masks of any dtype, holes included, where verl wants bool."""
    cp = ContextParallel.from_megatron()
    if cp.size > 1:
        rule = "verl's path for padded rows without packing is not split."
        raise UnsupportedFormError(explain("context parallelism", f"{cp.size} ranks", rule, "Pass jagged input ids."))
    before = segments_from_batch({"input_ids": input_ids, "attention_mask": attention_mask}, polarity="keep")
    width = round_up(max(before.row_lengths), cp.tensor_parallel if sequence_parallel else 1)
    after = Segments.from_lengths(before.row_lengths, width)
    ids = repad(unpad(input_ids, before), after) if pre_process else input_ids
    return ids, after.keep.to(attention_mask.device), repad(unpad(position_ids, before), after)


def postprocess_bshd(
    result: Tensor, attention_mask: Tensor, original_attention_mask: Tensor, origin_seqlen: int, post_process: bool = True
) -> Tensor:
    """The output back where its tokens stood. Undoes `preprocess_bshd`, by the masks it took and gave."""
    if not post_process:
        return result
    return repad(unpad(result, Segments.from_keep(attention_mask)), Segments.from_keep(original_attention_mask))


_REPLACEMENTS: tuple[Callable[..., Any], ...] = (
    preprocess_bshd_engine,
    postprocess_bshd_engine,
    build_vlm_attn_mask_bshd,
    build_vlm_attn_mask_thd,
    preprocess_bshd,
    postprocess_bshd,
)


def install() -> None:
    """Swap verl's functions for these in every module of verl that has them. Does nothing the second time.

    verl imports Megatron here, and imports MindSpeed's adaptor first only where its workers begin: it is started now.

    >>> install()  # doctest: +SKIP
    """
    mindspeed.start()
    from verl.models.mcore import model_forward, model_forward_fused

    for ours in _REPLACEMENTS:
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
