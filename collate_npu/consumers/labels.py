"""Labels: those that no sample alone learns from are ignored: of padding, and the first of every sequence, which a batch
would predict from padding or from the sequence before.

A transformers model moves labels itself, and one of Megatron's kin takes them moved. Whose they are is told, or read off the
tokens: each equals its own token, or the next one. Where neither holds, padding's alone are ignored. Costs O(B * S).
Legend: B rows, S width.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import Array
from collate_npu.masks.patterns import Bidirectional, Pattern
from collate_npu.masks.sources import Sources
from collate_npu.segments import Segments, keep_array

IGNORED = -100


def labels_for(sources: Sources, segments: Segments, pattern: Pattern, shifted: bool | None) -> dict[str, Tensor]:
    """`labels` and `shift_labels` int64 `[B, S]` of this batch where they must change; those of whole samples are left.

    `shifted`: do the labels stand with the token that predicts them? None: by the tokens.
    """
    moved, out = {"labels": shifted, "shift_labels": True}, {}
    for key in ("labels", "shift_labels"):
        if not isinstance(labels := sources.get(key), Tensor) or labels.is_floating_point():
            continue
        wrong_BS = _unread(sources, sources.array(key), segments, pattern, moved[key])
        if wrong_BS.any():
            out[key] = labels.masked_fill(torch.from_numpy(wrong_BS).to(labels.device), IGNORED)
    return out


def _unread(sources: Sources, labels_BS: Array, segments: Segments, pattern: Pattern, shifted: bool | None) -> Array:
    """bool `[B, S]`: labels of padding, and of the first places of sequences, or of their last where labels are moved."""
    unread_BS = ~keep_array(segments)
    if labels_BS.shape != unread_BS.shape:
        return np.zeros(0, bool)
    rows_N, first_N, ends_N = np.array(segments.spans, np.int64).reshape(-1, 3).T
    if shifted is None and sources.named["tokens"] == ("input_ids",):
        shifted = _are_moved(sources.array("input_ids"), labels_BS, rows_N, first_N, ends_N - 1)
    if shifted is not None and not isinstance(pattern, Bidirectional):  # tokens are predicted in place there
        unread_BS[rows_N, ends_N - 1 if shifted else first_N] = shifted | (first_N > 0)  # the shift drops a row's first
    unread_BS &= labels_BS >= 0
    return unread_BS


def _are_moved(tokens_BS: Array, labels_BS: Array, rows_N: Array, first_N: Array, last_N: Array) -> bool | None:
    """Do the labels at both ends of each sequence equal the next token, or their own? None where both do, or neither."""
    if tokens_BS.shape != labels_BS.shape:
        return None

    def equal(at_N: Array, ahead: int) -> bool:
        found_N = labels_BS[rows_N, at_N]
        told_N = (found_N >= 0) & (at_N + ahead <= last_N)
        return bool((found_N == tokens_BS[rows_N, np.minimum(at_N + ahead, last_N)])[told_N].all())

    before_N = np.maximum(last_N - 1, first_N)
    own = all(equal(at_N, 0) for at_N in (first_N, before_N, last_N))
    following = all(equal(at_N, 1) for at_N in (first_N, before_N))
    return None if own == following else following
