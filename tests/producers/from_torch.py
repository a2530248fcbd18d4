"""torch's own masks, numpy, accelerate: flex document masks, nn.Transformer, MultiheadAttention, CausalBias.

Legend: B rows, S width, H heads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from drawing import ONE_SEQUENCE, Draw, causal, sliding, together
from producing import BIDIRECTIONAL, Producer, case, keep_2d, plain_rows, varies
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask
from verdicts import Case

NEVER_EMPTY = tuple(style for style in ONE_SEQUENCE if style != "empty_row")
ACCELERATE = ("accelerate",)


def document(draw: Draw, *, padding: str, block: bool) -> Case:
    """FlexAttention's document mask: ids compared; padding is document 0 and attends itself, or is blocked."""
    ids = torch.from_numpy(draw.ids)
    parts = [lambda b, h, q, k: q >= k, lambda b, h, q, k: ids[b, q] == ids[b, k]]
    if padding == "blocked":
        parts.append(lambda b, h, q, k: (ids[b, k] > 0) & (ids[b, q] > 0))
    B, S = draw.shape
    build = create_block_mask if block else create_mask
    mask = build(and_masks(*parts), B, 1, S, S, device="cpu")
    return case(draw, mask) if block else case(draw, mask, polarity="keep", silent=plain_rows(mask, draw))


def flex_window(draw: Draw) -> Case:
    """A BlockMask with a window: another pattern in a form that holds no numbers."""
    B, S = draw.shape
    keep, size = keep_2d(draw, torch.bool), int(draw.rng.integers(1, S + 1))
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < size) & keep[b, k], B, 1, S, S, device="cpu")
    from collate_npu import Pattern

    return case(draw, mask, attends=sliding(draw.ids, size), pattern=Pattern.sliding(size))


def flex_block_causal(draw: Draw) -> Case:
    """transformers' BlockMask of packing ids `1 1 2 2 0` (integrations/flex_attention.py)."""
    from transformers.integrations.flex_attention import make_flex_block_causal_mask

    with torch._dynamo.config.patch(disable=True):
        mask = make_flex_block_causal_mask(torch.from_numpy(draw.ids))
    return case(draw, mask)


def square_subsequent(draw: Draw, *, padded: bool) -> Case | None:
    """nn.Transformer: -inf above the diagonal, shared by all rows; the second adds the key padding to it."""
    B, S = draw.shape
    if S in (B, 1):
        return None  # in a batch, `[B, S]` has a meaning of its own
    mask = torch.nn.Transformer.generate_square_subsequent_mask(S)
    if padded:
        blocked = torch.zeros(draw.shape).masked_fill(~keep_2d(draw, torch.bool), -torch.inf)
        mask = mask + blocked[:, None, None, :]
    return case(draw, mask, polarity="bias", silent=not padded)


def merged(draw: Draw) -> Case:
    """nn.MultiheadAttention.merge_masks: `[B, H, S, S]`, True = blocked, the same for each head."""
    B, S = draw.shape
    attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    square = torch.ones(S, S, dtype=torch.bool).triu(1)
    mask, _ = attention.merge_masks(square, ~keep_2d(draw, torch.bool), torch.zeros(B, S, 4))
    return case(draw, mask, polarity="masked")


def key_padding(draw: Draw) -> Case:
    """nn.TransformerEncoder's `src_key_padding_mask`: `[B, S]`, True = padding, where a keep mask is expected."""
    return case(draw, ~keep_2d(draw, torch.bool), polarity="masked", contrary=True)


def causal_bias(draw: Draw, name: str) -> Case | None:
    """torch.nn.attention.bias: a tensor of uninitialised numbers that stands for a triangle."""
    from torch.nn.attention import bias

    B, S = draw.shape
    if S in (B, 1):
        return None
    mask = getattr(bias, name)(S, S)
    with torch._C.DisableTorchFunctionSubclass():
        mask.zero_()  # the same each time; what lies there is nobody's
    return case(draw, mask, polarity="keep", silent=True)


def by_hand(draw: Draw, form: str) -> Case:
    """Forms that user code builds in one line."""
    keep, S = draw.keep, draw.shape[1]
    square = keep[:, None, None, :] & np.tri(S, dtype=bool)
    tensor = torch.from_numpy(square.copy())
    low = torch.finfo(torch.float32).min
    forms: dict[str, tuple[Any, str | None]] = {
        "numpy bool": (square, "keep"),
        "numpy additive": (np.where(square, 0, low).astype(np.float32), "bias"),
        "numpy 2D": (keep.astype(np.int64), "keep"),
        "list 2D": (keep.astype(int).tolist(), "keep"),
        "uint8": (tensor.to(torch.uint8), "keep"),
        "int64": (tensor.long(), "keep"),
        "float 0/1": (tensor.float(), "keep"),
        "masked": (~tensor, "masked"),
        "masked uint8": ((~tensor).to(torch.uint8), "masked"),
        "3D": (tensor[:, 0], "keep"),
        "-1e4": (torch.zeros(tensor.shape).masked_fill(~tensor, -1e4), "bias"),
        "-inf": (torch.zeros(tensor.shape).masked_fill(~tensor, -torch.inf), "bias"),
        "row and column": (tensor & torch.from_numpy(keep.copy())[:, None, :, None], "keep"),
        "diagonal forced": (tensor | torch.eye(S, dtype=torch.bool), "keep"),
        "heads": (tensor.expand(-1, 3, -1, -1), "keep"),
    }
    mask, polarity = forms[form]
    silent = plain_rows(mask, draw) if form == "diagonal forced" else False
    return case(draw, mask, polarity=polarity, silent=silent)


def key_row(draw: Draw, form: str) -> Case:
    """`[B, 1, 1, S]` of an encoder, in either polarity, or additive."""
    keep = keep_2d(draw, torch.bool)[:, None, None, :]
    additive = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    mask = {"keep": keep, "masked": ~keep, "bias": additive}[form]
    return case(draw, mask, attends=together(draw.ids), pattern=BIDIRECTIONAL, polarity=form)


def head_windows(draw: Draw) -> Case:
    """Each head has a window of its own."""
    sizes = [1, 2, draw.shape[1]]
    mask = torch.from_numpy(np.stack([sliding(draw.ids, size) for size in sizes], axis=1))
    alike = bool((mask == mask[:, :1]).all())
    return case(draw, mask, attends=causal(draw.ids), pattern=None, polarity="keep", richer=not alike)


def position_bias(draw: Draw) -> Case:
    """A learned bias of up to +-200 added to a causal mask filled with -1e4."""
    blocked = torch.from_numpy(~causal(draw.ids))[:, None]
    numbers = torch.from_numpy(draw.rng.uniform(-200, 200, (1, 1, *draw.shape[1:] * 2)).astype(np.float32))
    mask = numbers + blocked * -1e4
    return case(draw, mask, pattern=None, polarity="bias", richer=varies(mask, draw))


def accelerate_t5(draw: Draw) -> Case:
    """accelerate's Megatron encoder mask: `[B, S, S]`, True = blocked, rows and columns."""
    from accelerate.utils.megatron_lm import T5TrainStep

    mask = T5TrainStep.attn_mask_postprocess(keep_2d(draw))
    return case(draw, mask, attends=together(draw.ids), pattern=BIDIRECTIONAL, polarity="masked")


def accelerate_decoder(draw: Draw) -> Case:
    """accelerate's Megatron decoder mask: `[1, S, S]`, True = blocked, without padding."""
    from accelerate.utils.megatron_lm import T5TrainStep

    return case(draw, T5TrainStep.get_decoder_mask(draw.shape[1], "cpu"), polarity="masked", silent=True)


def _document(padding: str, block: bool) -> Producer:
    name = f"flex documents, padding {padding}" + ", BlockMask" * block
    ambiguous = ("no tensor",) * block + ("self-attending padding",) * (padding == "is document 0")
    return Producer(name, (), partial(document, padding=padding, block=block), ambiguous=ambiguous)


def _hand(form: str, *ambiguous: str) -> Producer:
    return Producer(f"by hand: {form}", (), partial(by_hand, form=form), ONE_SEQUENCE, ambiguous)


PRODUCERS = [
    _document("is document 0", False),
    _document("is document 0", True),
    _document("blocked", False),
    _document("blocked", True),
    Producer("flex window, BlockMask", (), flex_window, ONE_SEQUENCE, ("no tensor",)),
    Producer("hf make_flex_block_causal_mask", ("transformers",), flex_block_causal, ambiguous=("no tensor",)),
    Producer("nn.Transformer triangle", (), partial(square_subsequent, padded=False), NEVER_EMPTY, ("says nothing",)),
    Producer("nn.Transformer triangle + key padding", (), partial(square_subsequent, padded=True), ONE_SEQUENCE),
    Producer("nn.MultiheadAttention merged", (), merged, ONE_SEQUENCE),
    Producer("nn key_padding_mask", (), key_padding, ONE_SEQUENCE, ("key row",)),
    Producer("causal_lower_right", (), partial(causal_bias, name="causal_lower_right"), NEVER_EMPTY, ("no tensor",)),
    Producer("causal_upper_left", (), partial(causal_bias, name="causal_upper_left"), NEVER_EMPTY, ("no tensor",)),
    _hand("numpy bool", "no tensor"),
    _hand("numpy additive", "no tensor"),
    _hand("numpy 2D", "no tensor"),
    _hand("list 2D", "no tensor"),
    *map(_hand, ("uint8", "int64", "float 0/1", "masked", "masked uint8", "3D", "-1e4", "-inf", "row and column")),
    _hand("diagonal forced", "self-attending padding"),
    _hand("heads"),
    Producer("key row, keep", (), partial(key_row, form="keep"), ONE_SEQUENCE, ("key row",)),
    Producer("key row, masked", (), partial(key_row, form="masked"), ONE_SEQUENCE, ("key row",)),
    Producer("key row, additive", (), partial(key_row, form="bias"), ONE_SEQUENCE),
    Producer("a window for each head", (), head_windows, ONE_SEQUENCE),
    Producer("position bias beside -1e4", (), position_bias, ONE_SEQUENCE),
    Producer("accelerate T5 encoder", ACCELERATE, accelerate_t5, ONE_SEQUENCE, ("either polarity",)),
    Producer("accelerate decoder", ACCELERATE, accelerate_decoder, NEVER_EMPTY, ("says nothing",)),
]
