"""transformers: the 2D mask if it says everything, else the dense masks that the attention implementation takes.

The rules depend on the installed release (4.57 to 5.23 were read and run) and on the model's config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from collate_npu.consumers import model_traits
from collate_npu.consumers.mask_choice import PACKED_RECURRENT, Case, Consumer, Form, Refusal, packed_reason
from collate_npu.errors import UnsupportedFormError, explain
from collate_npu.keys import of_kind
from collate_npu.masks.patterns import CAUSAL, Chunked, Pattern, Sliding
from collate_npu.segments import PADS_BEFORE


def _by_2d(case: Case) -> str:
    """Return why a 2D mask says everything: attention is plain, or the model applies its window itself."""
    if case.padding_free or case.segments.packed:
        return ""
    return "every layer of a transformers model reads the 2D mask" if case.plain else _of_its_own(case)


def _of_its_own(case: Case) -> str:
    """Return why the model itself attends by this pattern, with a 2D mask or with none."""
    own = case.pattern != CAUSAL and {*case.model.own_patterns.values()} == {case.pattern}
    return "the model makes its own window of the 2D mask" if own else ""


def _needs_dense(case: Case) -> str:
    """Return why a dense mask is needed. On a flat row flash kernels read offsets instead."""
    another = case.padding_free and _another_pattern(case)
    if _by_2d(case) or (case.padding_free and not (another or _masked_flat_row(case))):
        return ""
    return "the row holds several sequences" if case.segments.packed and not another else f"attention is {case.pattern}"


def _masked_flat_row(case: Case) -> bool:
    """Return True if a flat row needs a mask: many families never look at restarting positions, the others only without a
    cache (masking_utils.py:876-882)."""
    by_offsets = "flash" in case.model.attn_implementation  # hub kernels too
    needed = case.segments.packed or _another_pattern(case)
    return case.padding_free and needed and not by_offsets


def _another_pattern(case: Case) -> bool:
    """Return True if only a mask can make this pattern: the layers do not, and offsets cannot say it."""
    return case.pattern.reaches(case.segments.longest_span) and not _of_its_own(case)


def _on(*implementations: str) -> Any:
    return lambda case: case.model.attn_implementation in implementations and _needs_dense(case)


def patterns_by_kind(case: Case) -> Mapping[str, Pattern]:
    """Return the pattern of each mask that the model takes. A dense mask replaces the model's own window in every layer of
    its kind (masking_utils.py:833-846)."""
    found = {kind: _windowed(case, kind, own) for kind, own in case.model.own_patterns.items()}
    return found if len(found) > 1 else {"": next(iter(found.values()))}


def _windowed(case: Case, kind: str, own: Pattern) -> Pattern:
    if not isinstance(own, (Sliding, Chunked)) or not own.reaches(case.segments.longest_span):
        return case.pattern
    if case.pattern not in (CAUSAL, own):
        rule = f"{kind or 'its'} layers have a window of {own.size} of their own, and attention is {case.pattern}."
        remedy = "Use rows no longer than the window, or one sequence a row with the model's own pattern."
        raise UnsupportedFormError(explain("attention_mask", repr(case.segments), rule, remedy))
    return own


def _leak(case: Case) -> str:
    """Return why padding changes real tokens of this batch on this model. Behind a flat row it is padding on the right."""
    if case.segments.padding_side == "none" or (case.padding_free and case.segments.padding_side != "right"):
        return ""
    if not case.segments.hole_rows:
        one = "one" if case.segments.shape[0] == 1 and "one" in case.model.leaks else "left"
        return case.model.leaks.get(one if case.segments.padding_side in PADS_BEFORE else "right", "")
    if case.recurrent:
        return "padding inside a sequence changes the state of a recurrent layer, and its convolution reads it"
    narrow = next((size for size in case.model.windows if size < case.segments.longest_span), 0)
    cut = f"its window of {narrow} tokens also counts the padding inside a sequence" if narrow else ""
    return case.model.leaks.get("holes", "") or cut


def _width(case: Case) -> str:
    """Return why a sequence attends other keys than alone: the tensor is wider than the sequence."""
    limit, S = case.model.width_limit, case.segments.shape[1]
    if limit is None or not any(n > limit and n != S for n in case.segments.sequence_lengths):
        return ""
    return f"the keys that its indexer chooses from more than {limit} depend on the width"


def _pooled(case: Case) -> str:
    """Return why the head of this model would pool another token than for each sequence alone."""
    if not case.model.pooling:
        return ""
    if case.segments.packed:
        return "a row holds several sequences, and it gives one answer a row"
    blind = " where config.pad_token_id is None"
    if getattr(case.model.text, "pad_token_id", None) is not None:
        blind = " of inputs_embeds"  # it finds padding by its id (modeling_layers.py:180)
        if "inputs_embeds" not in case.keys:
            counted = case.segments.padding_side in PADS_BEFORE and case.model.pooling == "counted_by_id"
            return "it counts its place from the start of a row, which is padding" if counted else ""
    return "" if bool(case.segments.keep[:, -1].all()) else f"it takes the last place{blind}, which is padding"


def _lost_window(case: Case) -> str:
    """Return why the model's own window is lost, if some sequence is longer than the window."""
    implementation, sizes = case.model.attn_implementation, case.model.windows
    if not sizes or sizes[0] >= case.segments.longest_span:
        return ""
    where = "a BlockMask goes to every layer as it is (masking_utils.py:833)"
    lost = implementation == "flex_attention" and bool(_needs_dense(case))
    if "flash" in implementation:
        where = "its NPU flash attention drops windows in silence (npu_flash_attention.py:54-104)"
        lost = find_spec("torch_npu") is not None
    return f"{where}, and some layers look back {sizes[0]} places" if lost else ""


def _unreadable(case: Case) -> str:
    implementation = case.model.attn_implementation
    why = "" if implementation in ("sdpa", "eager", "flex_attention") else _needs_dense(case)
    return f"{why}, on {implementation}" if why else ""


def _lowest_is_infinite(case: Case) -> str:
    """Return where a query attends nothing in float64. transformers makes the mask in the model's dtype, and eager attention
    takes its softmax in float32, where the lowest float64 is -inf (5.23 models/llama/modeling_llama.py)."""
    segments, model = case.segments, case.model
    eager = model.attn_implementation == "eager" and hasattr(model.text, "num_attention_heads")
    if model.dtype != torch.float64 or not eager or segments.packed:
        return ""
    sees_all = segments.padding_side not in PADS_BEFORE and not segments.empty_rows
    return "" if sees_all else "float64, and padding before a row's first token, or a row of padding alone"


def _looks_ahead(case: Case) -> str:
    """Return why a dense mask must not replace the model's own, by which the tokens of an image see each other."""
    if not case.model.looks_ahead or not _needs_dense(case):
        return ""
    given = {"images": of_kind(case.keys, "vision"), "types": "token_type_ids" in case.keys}
    own = "an image's tokens see each other by a mask of its own, which a dense one would replace"
    return own if any(given.get(by) for by in case.model.looks_ahead) else ""


ADAPT = 'call adapt(model) before you make the collator: packed rows are right if its .way is "by sequence"'
_FLEX = "for packed rows and other patterns a BlockMask on flex_attention"
TRANSFORMERS = Consumer(
    name="transformers",
    forms=(
        Form(form="keep_2d", reads="the 2D mask itself, int64", when=_by_2d),
        Form(form="block_mask", reads=_FLEX, when=_on("flex_attention")),
        Form(
            form="mapping",
            reads="{kind of layer: mask} where layers differ in their windows",
            when=lambda case: _needs_dense(case) if "" not in patterns_by_kind(case) else "",
        ),
        Form(form="bias", reads="an additive mask on eager", when=_on("eager")),
        Form(form="keep", reads="else bool [B, 1, S, S], True attends", when=_on("sdpa")),
    ),
    refuses=(
        Refusal(
            of="padding that changes real tokens: holes, or a projection with a bias, in recurrent layers; layers that "
            "ignore masks or mix neighbouring places",
            when=_leak,
            rule="Padding there changes the real tokens of this model: {why}.",
            remedy="If it mixes neighbouring tokens, batch sequences of one length, one a row. Else pad right, and remove "
            f"padding inside a sequence, or {ADAPT}. Before transformers 5.15 recurrent layers get no mask "
            "if the batch has one row: batch two rows.",
        ),
        Refusal(
            of="padding, if the model chooses keys by the width of its rows (small indexers)",
            when=_width,
            always=True,
            rule="The result of a sequence depends on the width of its batch: {why}.",
            remedy="Batch sequences of one length, so that nothing is padded.",
        ),
        replace(
            PACKED_RECURRENT,
            of="several sequences in a row, flat or padded, in a hybrid model; adapt(model) runs them sequence by sequence",
            when=packed_reason,
            remedy=f"Give each sequence its own row (padding_free=False), or {ADAPT}.",
        ),
        Refusal(
            of="4D masks in a hybrid model",
            when=lambda case: case.recurrent and not case.plain and _needs_dense(case),
            rule="Recurrent layers read no 4D mask; {why}.",
            remedy="Keep the model's own pattern (no pattern=, attention_mask_2d for a 4D mask), one sequence a row.",
        ),
        Refusal(
            of="rows of which the head would take a wrong token: padding at its place, packed rows, no pad_token_id",
            when=_pooled,
            always=True,
            rule="The head of this model takes a token by its place in the row: {why}.",
            remedy="One sequence a row: set model.config.pad_token_id, pad inputs_embeds left, and BioGPT right.",
        ),
        Refusal(
            of="rows longer than a sliding window that would be lost: on flash attention beside torch_npu, and in packed "
            "rows on flex_attention",
            when=_lost_window,
            always=True,
            rule="The window of some layers would be lost: {why}.",
            remedy="Use attn_implementation='sdpa' or 'eager', or rows no longer than the window.",
        ),
        Refusal(
            of="left padding in float64 on eager attention",
            when=_lowest_is_infinite,
            rule="A query that attends nothing gives NaN, and NaN reaches every token of its row in the next layer: {why}.",
            remedy="Use attn_implementation='sdpa', or pad right, without rows of padding alone.",
        ),
        Refusal(
            of="4D masks on flash attention",
            when=_unreadable,
            rule="This attention reads a 2D mask, or offsets; {why}.",
            remedy="Use attn_implementation='sdpa' or 'eager'; or, with the model's own pattern, padding_free=True on flash "
            "attention.",
        ),
        Refusal(
            of="4D masks and packed rows, if the model takes neither or its images see both sides",
            when=lambda case: (
                # if padding before a sequence leaks into it, so does another sequence
                (case.segments.packed and not case.recurrent and case.model.config and case.model.leaks.get("left", ""))
                or _looks_ahead(case)
                or (case.model.leaks.get("packed", "") and _needs_dense(case) and case.model.leaks["packed"])
            ),
            rule="No layer of this model reads where a sequence begins: {why}.",
            remedy="Give each sequence its own row, with the model's own pattern; where it mixes neighbouring places, rows "
            "of one length.",
        ),
        Refusal(
            of="short sequences beside a longer one, if the rotary frequencies follow the longest",
            when=lambda case: (
                case.model.rope_limit is not None
                and model_traits.lengths_clash_reason(case.model.named, case.segments.sequence_lengths)
            ),
            always=True,
            rule="The rotary frequencies of a sequence depend on the longest one in its batch: {why}.",
            remedy="Batch sequences on the same side of that length together.",
        ),
        Refusal(
            of="4D masks beside a router's loss",
            when=lambda case: _needs_dense(case) if case.model.option("output_router_logits", case.call) else "",
            rule="The router's aux loss indexes a 2D mask, and {why}.",
            remedy="Set output_router_logits=False, or keep plain causal attention, one sequence a row.",
        ),
    ),
    keep_dtype=torch.int64,  # as tokenizers emit it: code downstream subtracts and counts it
    keeps_mask_2d="never",  # an attention_mask_2d keyword is accepted and never read
    not_shared="a transformers model runs them on this rank's shard alone, out of order, in silence",
    counts_positions=True,
    masks_flat_row=_masked_flat_row,
    # a scan reads `cu_seq_lens_q`, a convolution `seq_idx`
    reads_offsets=lambda case: case.segments.packed and case.padding_free and not _masked_flat_row(case),
    patterns=patterns_by_kind,
    source="transformers 5.23 masking_utils.py:833-846, 1499-1529, modeling_qwen3_next.py:1016-1038",
)
