"""Labels: those that no sample alone learns from are ignored: of padding, and the first of every sequence, which a batch
would predict from padding or from the sequence before.

A transformers model moves labels itself, and one of Megatron's kin takes them moved. Whose they are is told, or read off the
tokens: each equals its own token, or the next one. Where neither holds, padding's alone are ignored. Costs O(B * S).
Legend: B rows, S width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from collate_npu.consumers.consumer import Case
from collate_npu.masks.patterns import Bidirectional

IGNORED = -100


def labels_for(batch: Mapping[str, Any], case: Case, *, shifted: bool | None) -> dict[str, Tensor]:
    """`labels` and `shift_labels` int64 `[B, S]` of this batch as a loss should see them; those of whole samples are left.

    `shifted`: do the labels stand with the token that predicts them? None: by the tokens.
    """
    held = {key: x for key in ("labels", "shift_labels") if isinstance(x := batch.get(key), Tensor) and x.ndim == 2}
    if not held:
        return {}
    ids_BS = case.segments.ids
    of_tokens = {key: x for key, x in held.items() if x.shape == ids_BS.shape and not x.is_floating_point()}
    moved = {"labels": shifted, "shift_labels": True}
    unread = {key: _unread(batch, x, ids_BS.to(x.device), case, moved[key]) for key, x in of_tokens.items()}
    return {key: x.masked_fill(unread[key] & (x >= 0), IGNORED) for key, x in of_tokens.items()}


def _unread(batch: Mapping[str, Any], labels: Tensor, ids_BS: Tensor, case: Case, shifted: bool | None) -> Tensor:
    """bool `[B, S]`: padding, and the first places of sequences, or their last where labels are moved."""
    padding_BS = ids_BS == 0
    if isinstance(case.pattern, Bidirectional):  # tokens are predicted in place
        return padding_BS
    first_BS = pad(ids_BS[:, :-1], (1, 0)) != ids_BS
    first_BS[:, :1] = False  # which the shift drops
    last_BS = pad(ids_BS[:, 1:], (0, 1)) != ids_BS
    if shifted is None:
        shifted = _are_moved(batch.get("input_ids"), labels, padding_BS | first_BS, padding_BS | last_BS)
    return padding_BS if shifted is None else padding_BS | (last_BS if shifted else first_BS)


def _are_moved(tokens: Any, labels: Tensor, first_BS: Tensor, last_BS: Tensor) -> bool | None:
    """Do all labels equal the next token, or all their own? None where both do, or neither."""
    if not isinstance(tokens, Tensor) or tokens.shape != labels.shape:
        return None
    tokens, counted_BS = tokens.to(labels.device), labels >= 0
    own = bool((labels == tokens)[counted_BS & ~first_BS].all())
    following = bool((labels == pad(tokens[:, 1:], (0, 1)))[counted_BS & ~last_BS].all())
    return None if own == following else following
