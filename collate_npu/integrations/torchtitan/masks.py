"""torchtitan 0.3.0: attention masks as an argument of the model, made from Segments; padding is a document of its own.

`get_attention_masks` gives what a model's own method of that name gives, for padding, holes, windows and chunks too.
`positions` alone is enough where the trainer builds the masks: torchtitan begins a document at every position 0.
Offsets cost O(B * S). A BlockMask is built by torchtitan's compiled `create_attention_mask`, without a dense mask.

Legend: B rows, S width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from collate_npu.errors import UnsupportedFormError, explain, explain_rows
from collate_npu.host import Array
from collate_npu.keys import KEEP_KEY
from collate_npu.masks.find import segments_from_batch
from collate_npu.masks.forms import mask_mod
from collate_npu.masks.patterns import Pattern
from collate_npu.segments import Segments

Kind = str | Pattern | None
Layers = Kind | Mapping[str, Kind]
"""What layers read: a pattern (a BlockMask), `"varlen"` (offsets), None, or a mapping of those by kind of layer."""


def get_attention_masks(
    segments: Segments,
    layers: Layers = "causal",
    *,
    device: torch.device | str = "cpu",
    block_size: int | tuple[int, int] = 128,
    compiled: bool = True,
) -> Any:
    """`attention_masks` for a torchtitan model's forward: a BlockMask, VarlenMetadata, or a mapping by kind of layer.

    qwen3: `"causal"`. qwen3_5: `{"quadratic_attention": "causal", "deltanet": "varlen"}`. gpt_oss: `{"basic_mask":
    "causal", "sliding_window_mask": Pattern.sliding(128)}`. `layers_of(model)` reads it off a model. `block_size` is
    that of its FlexAttention.Config. `compiled=False` is for a few small masks: it builds `[B, 1, S, S]` on the way.

    >>> masks = get_attention_masks(Segments.from_lengths([3, 5], side="left"), layers_of(model))  # doctest: +SKIP
    >>> model(tokens, attention_masks=masks)  # doctest: +SKIP
    """
    if isinstance(layers, Mapping):
        return {key: _one(segments, kind, device, block_size, compiled) for key, kind in layers.items()}
    return _one(segments, layers, device, block_size, compiled)


def layers_of(model: Any) -> Layers:
    """What the layers of a `Decoder` read, by its config; raises for models whose masks have names of their own.

    >>> layers_of(model)  # doctest: +SKIP
    """
    from torchtitan.models.common.attention import FlexAttention, VarlenAttention
    from torchtitan.models.common.decoder import Decoder

    inner = getattr(model.config.first_attention, "inner_attention", None)
    backends = {FlexAttention.Config: "causal", VarlenAttention.Config: "varlen"}
    full = next((kind for config, kind in backends.items() if isinstance(inner, config)), None)
    if any(getattr(layer, "delta_net", None) is not None for layer in model.config.layers):
        return {"quadratic_attention": full, "deltanet": "varlen"}
    if full is not None and type(model).get_attention_masks is Decoder.get_attention_masks:
        return full
    rule = "Its layers take their masks by names of their own, or take none."
    raise UnsupportedFormError(explain("model", type(model).__name__, rule, "Pass layers={name of the mask: pattern}."))


def positions(segments: Segments) -> Tensor:
    """int64 `[B, S]`: 0 at the first token of every sequence, and of every stretch of padding.

    From these torchtitan's own `get_attention_masks` makes the same masks as ours, where no sequence has holes.

    >>> positions(Segments.from_lengths([2, 4], side="left")).tolist()
    [[0, 1, 0, 1], [0, 1, 2, 3]]
    """
    begins_BS = _begins(segments.ids.numpy())
    begins = np.flatnonzero(begins_BS)
    inside = np.arange(begins_BS.size) - begins[np.cumsum(begins_BS) - 1]
    return torch.where(segments.keep, segments.position_ids, torch.from_numpy(inside).view(segments.shape))


def documents(tokens: Tensor, eos_id: int, *, keep: Tensor | None = None) -> Segments:
    """Segments of rows `[B, S]` in which each document ends with `eos_id`, the eos included.

    `keep`, bool `[B, S]`, says which tokens are real: with pad == eos nothing else can. Without it all are.

    >>> documents(torch.tensor([[5, 6, 9, 7, 9]]), eos_id=9).ids.tolist()
    [[1, 1, 1, 2, 2]]
    """
    keep = torch.ones_like(tokens, dtype=torch.bool) if keep is None else keep
    real = segments_from_batch({"tokens": tokens, KEEP_KEY: keep}).keep
    ends = (tokens == eos_id).to("cpu", torch.int64)
    return Segments.from_ids((ends.cumsum(1) - ends + 1) * real)


def varlen_metadata(segments: Segments, *, device: torch.device | str = "cpu") -> Any:
    """VarlenMetadata of the B * S tokens, row after row, padding included as documents, with host offsets for GDN.

    Raises where a sequence has holes: kernels that read offsets cannot leave tokens out (`padding_free` can).
    """
    from torchtitan.models.common.attention import VarlenMetadata

    begins_BS = _begins(segments.ids.numpy())
    if torn := torn_rows(segments):
        rule = "Offsets say where a sequence begins and ends, and nothing of tokens inside it to leave out."
        raise UnsupportedFormError(explain_rows("segments", torn, rule, "unpad() the rows, or use FlexAttention."))
    host = (*np.flatnonzero(begins_BS).tolist(), begins_BS.size)
    offsets = torch.tensor(host, dtype=torch.int32, device=device)
    longest = int(np.diff(host).max(initial=0))
    return VarlenMetadata(offsets, offsets, longest, longest, host)


def torn_rows(segments: Segments) -> list[tuple[int, str]]:
    """Rows in which padding stands inside a sequence."""
    ids_BS = segments.ids.numpy()
    pieces_B = (_begins(ids_BS) & (ids_BS > 0)).sum(1)
    return [(b, "holes") for b, row in enumerate(segments.lengths) if pieces_B[b] != len(row)]


def _one(
    segments: Segments, kind: Kind, device: torch.device | str, block_size: int | tuple[int, int], compiled: bool
) -> Any:
    if kind is None or kind == "varlen":
        return None if kind is None else varlen_metadata(segments, device=device)
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtitan.models.common.attention import create_attention_mask

    create = cast(Any, create_attention_mask if compiled else create_block_mask)
    B, S = segments.shape
    return create(_attends(segments, kind, device), B, None, S, S, device=str(device), BLOCK_SIZE=block_size)


def _attends(segments: Segments, pattern: str | Pattern, device: torch.device | str) -> Callable[..., Tensor]:
    """The core's predicate for real queries; padding attends its own stretch, so that no row is empty."""
    real = mask_mod(segments, pattern, device)
    ids_BS = segments.ids.numpy()
    stretch = torch.from_numpy(np.where(ids_BS == 0, np.cumsum(_begins(ids_BS), axis=1), 0)).to(device)

    def attends(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        padding = stretch[b, q] > 0
        own = (stretch[b, q] == stretch[b, k]) & (k <= q)
        return (padding & own) | (~padding & real(b, h, q, k))

    return attends


def _begins(ids_BS: Array) -> Array:
    """True where a row, a sequence or a stretch of padding begins."""
    begins_BS = np.ones(ids_BS.shape, bool)
    begins_BS[:, 1:] = ids_BS[:, 1:] != ids_BS[:, :-1]
    return begins_BS
