"""Labels: those that no sample alone learns from are ignored: of padding; the first of every sequence, which a batch would
predict from padding or from the sequence before; and, where labels are moved, the first token of the next sequence.

A transformers model moves labels itself, and one of Megatron's kin takes them moved. Whose they are is told, or read off the
tokens: each equals its own token, or the next one. Where neither holds, padding's alone are ignored. Costs O(B * S).
Legend: B rows, S width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import Array
from collate_npu.consumers.model_traits import LabelRule
from collate_npu.errors import CollateError, explain_rows
from collate_npu.masks.sources import Sources
from collate_npu.segments import PADS_BEFORE, Segments

IGNORED = -100


def labels_for(
    sources: Sources, segments: Segments, rule: LabelRule, shifted: bool | None, *, ignored: int = IGNORED
) -> dict[str, Tensor]:
    """`labels`, `shift_labels`, `shifted_labels` and `loss_mask` `[B, S]` of this batch where they must change; others are
    left.

    `shifted`: do the labels stand with the token that predicts them? None: by the tokens.
    """
    out: dict[str, Tensor] = {}
    if rule == "decoder":
        return out
    for key, moved in (("labels", shifted), ("shift_labels", True), ("shifted_labels", True)):
        if isinstance(labels := sources.get(key), Tensor) and not labels.is_floating_point():
            wrong_BS = _wrong(sources, key, segments, rule, moved)
            if wrong_BS.any():
                wrong = torch.from_numpy(wrong_BS).to(labels.device)
                out[key] = labels.masked_fill(wrong, ignored)
                weights = sources.get("loss_mask")
                if isinstance(weights, Tensor) and weights.shape == labels.shape:  # Megatron's loss reads it, not labels
                    out["loss_mask"] = weights.masked_fill(wrong.to(weights.device), 0)
    return out


def check_decoder(sources: Sources, model_type: str) -> None:
    """Raise where the labels of an encoder-decoder are padded left: it makes its decoder's tokens of them, so that the start
    token stands before the padding, and padding is attended (5.23 models/t5/modeling_t5.py `_shift_right`)."""
    if sources.get("labels") is None or sources.get("decoder_input_ids") is not None:
        return
    read_BT = sources.array("labels") >= 0
    if bad := [b for b, row in enumerate(read_BT) if row.any() and not row.flat[0]]:
        raise labels_behind_padding_error(bad)
    if model_type == "prophetnet" and (bad := [b for b, row in enumerate(read_BT) if not row[-1:].all()]):
        rule = "Its decoder reads the width of a row (5.23 modeling_prophetnet.py `get_main_relative_pos_embeddings`)."
        raise CollateError(explain_rows("labels", [(b, "padding") for b in bad], rule, "Batch labels of one length."))


def labels_behind_padding_error(rows: Sequence[int]) -> CollateError:
    rule = "A decoder makes its tokens of the labels, and attends what stands before them; no mask says that it is padding."
    remedy = "Pad right: tokenizer.padding_side = 'right'; or pass decoder_input_ids beside the labels."
    return CollateError(explain_rows("labels", [(b, "padding before its labels") for b in rows], rule, remedy))


def _wrong(sources: Sources, key: str, segments: Segments, rule: LabelRule, moved: bool | None) -> Array:
    """bool `[B, S]`: labels of padding, or that reach across sequences; `[0]` where they are not one a token."""
    labels_BS = sources.array(key)
    if labels_BS.shape != segments.shape:
        return np.zeros(0, bool)
    read_BS: Array = labels_BS >= 0
    ids_BS = segments.array if segments.packed else segments._keep_BS
    real_BS = ids_BS != 0 if segments.packed else ids_BS  # numpy compares bool with a number in 20 times as long
    behind = segments.packed or segments.padding_side in PADS_BEFORE  # does a sequence begin behind anything?
    if not behind or rule != "next":
        return np.greater(read_BS, real_BS, out=read_BS)
    named = sources.named["tokens"]
    tokens_BS = sources.array(named[0]) if named in (("input_ids",), ("tokens",)) else None
    if moved is None and tokens_BS is not None:
        moved = labels_are_shifted(tokens_BS, labels_BS, segments)
    return read_BS & (~real_BS | _across(ids_BS, real_BS, labels_BS, tokens_BS, moved))


def _across(ids_BS: Array, real_BS: Array, labels_BS: Array, tokens_BS: Array | None, moved: bool | None) -> Array:
    """bool `[B, S]`: the first places of sequences (a hole ends one); of moved labels the last, where it is the token that
    stands next: any other is the sample's own."""
    across_BS = np.zeros(ids_BS.shape, bool)
    other_BS = ids_BS[:, 1:] != ids_BS[:, :-1]
    if moved:
        following = True if tokens_BS is None else labels_BS[:, :-1] == tokens_BS[:, 1:]
        across_BS[:, :-1] = other_BS & real_BS[:, :-1] & real_BS[:, 1:] & following
    elif moved is not None:  # the shift drops a row's first
        across_BS[:, 1:] = other_BS
    return across_BS


def labels_are_shifted(tokens_BS: Array, labels_BS: Array, segments: Segments) -> bool | None:
    """True if the labels at both ends of each sequence equal the next token, False if their own; None if both or neither."""
    if tokens_BS.shape != labels_BS.shape:
        return None
    rows_N, first_N, ends_N = np.array(segments.spans, np.int64).reshape(-1, 3).T
    at_3N = np.stack([first_N, np.maximum(ends_N - 2, first_N), ends_N - 1])
    found_3N, inside_3N = labels_BS[rows_N, at_3N], at_3N < ends_N - 1
    read_3N = found_3N >= 0
    own = (found_3N == tokens_BS[rows_N, at_3N])[read_3N].all()
    following = (found_3N == tokens_BS[rows_N, at_3N + inside_3N])[read_3N & inside_3N].all()
    return None if own == following else bool(following)
