"""Masks without a trainer's package: torch's own, accelerate's, forms that user code builds in one line, and packing.

Packing is LLaMA-Factory 0.9.5's and axolotl 0.19.0's: both need more than a test environment has, so their documented forms
are written here. They were compared once with `prepare_4d_attention_mask` (llamafactory.data.collator) and
`V2BatchSamplerDataCollatorForSeq2Seq` (axolotl.utils.collators). Legend: B rows, S width, H heads.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from drawing import ONE_SEQUENCE, PACKED, SIDED, Draw, causal, sliding
from producing import Producer, bias_of, case, keep_2d, plain_rows, restarting, said
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask
from verdicts import Case

NEVER_EMPTY = tuple(style for style in ONE_SEQUENCE if style != "empty_row")
ACCELERATE = ("accelerate",)
LOW = torch.finfo(torch.float32).min


def document(draw: Draw, *, blocked: bool, block: bool) -> Case:
    """FlexAttention's document mask: ids compared; padding is document 0 and attends itself, or is blocked."""
    ids = torch.from_numpy(draw.ids)
    parts = [lambda b, h, q, k: q >= k, lambda b, h, q, k: ids[b, q] == ids[b, k]]
    if blocked:
        parts.append(lambda b, h, q, k: (ids[b, k] > 0) & (ids[b, q] > 0))
    B, S = draw.shape
    mask = create_mask(and_masks(*parts), B, 1, S, S, device="cpu")
    silent = plain_rows(mask, draw)
    if block:
        return case(draw, create_block_mask(and_masks(*parts), B, 1, S, S, device="cpu"), told={"silent": silent})
    return case(draw, mask, told={"polarity": "keep", "silent": silent})


def flex_window(draw: Draw) -> Case:
    """A BlockMask with a window: another pattern in a form that holds no numbers."""
    B, S = draw.shape
    keep, size = keep_2d(draw, torch.bool), draw.number(1, S)
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < size) & keep[b, k], B, 1, S, S, device="cpu")
    return case(draw, mask, told=said(draw, "sliding", size))


def square_subsequent(draw: Draw, *, padded: bool) -> Case | None:
    """nn.Transformer: -inf above the diagonal, shared by all rows; the second adds the key padding to it."""
    B, S = draw.shape
    if S in (B, 1):
        return None  # in a batch, `[B, S]` has a meaning of its own
    mask = torch.nn.Transformer.generate_square_subsequent_mask(S)
    if padded:
        blocked = torch.zeros(draw.shape).masked_fill(~keep_2d(draw, torch.bool), -torch.inf)
        mask = mask + blocked[:, None, None, :]
    return case(draw, mask, told={"polarity": "bias", "silent": not padded})


def key_padding(draw: Draw) -> Case:
    """nn.TransformerEncoder's `src_key_padding_mask`: `[B, S]`, True = padding, where a keep mask is expected."""
    return case(draw, ~keep_2d(draw, torch.bool), told={"polarity": "masked", "contrary": True})


def by_hand(draw: Draw, form: str) -> Case:
    """Forms that user code builds in one line; of plain ones every dtype, rank and polarity is read in law 2."""
    square = draw.keep[:, None, None, :] & np.tri(draw.shape[1], dtype=bool)
    if form == "diagonal forced":
        mask = torch.from_numpy(square) | torch.eye(draw.shape[1], dtype=torch.bool)
        return case(draw, mask, told={"polarity": "keep", "silent": plain_rows(mask, draw)})
    if form == "numpy additive":
        return case(draw, np.where(square, 0, LOW).astype(np.float32), told={"polarity": "bias"})
    return case(draw, ~square, told={"polarity": "masked"})


def key_row(draw: Draw, form: str) -> Case:
    """`[B, 1, 1, S]` of an encoder, in either polarity, or additive."""
    keep = keep_2d(draw, torch.bool)[:, None, None, :]
    mask = {"keep": keep, "masked": ~keep, "bias": torch.zeros(keep.shape).masked_fill(~keep, LOW)}[form]
    return case(draw, mask, told={**said(draw, "bidirectional"), "polarity": form})


def head_windows(draw: Draw) -> Case:
    """Each head has a window of its own."""
    mask = torch.from_numpy(np.stack([sliding(draw.ids, size) for size in (1, 2, draw.shape[1])], axis=1))
    return case(draw, mask, told={"pattern": None, "polarity": "keep", "richer": not (mask == mask[:, :1]).all()})


def position_bias(draw: Draw) -> Case:
    """A learned bias of up to +-200 added to a causal mask filled with -1e4."""
    blocked = torch.from_numpy(~causal(draw.ids))[:, None]
    numbers = torch.from_numpy(draw.rng.uniform(-200, 200, (1, 1, *draw.shape[1:] * 2)).astype(np.float32))
    mask = numbers + blocked * -1e4
    return case(draw, mask, told=bias_of(draw, mask))


def accelerate(draw: Draw, decoder: bool) -> Case:
    """accelerate's Megatron masks, True = blocked: of an encoder `[B, S, S]`, of a decoder `[1, S, S]` without padding."""
    from accelerate.utils.megatron_lm import T5TrainStep

    if decoder:
        return case(draw, T5TrainStep.get_decoder_mask(draw.shape[1], "cpu"), told={"polarity": "masked", "silent": True})
    mask = T5TrainStep.attn_mask_postprocess(keep_2d(draw))
    return case(draw, mask, told={**said(draw, "bidirectional"), "polarity": "masked"})


# --- packing


def numbers(draw: Draw, *, positions: bool, ones: bool = False) -> Case:
    """neat_packing's `1 1 2 2 0`, alone or with positions that restart, as axolotl's V2 collator emits it; `1 1 1 1 0` of
    axolotl's first multipack collator, where positions alone tell the sequences apart.

    Padding counts 0 (LLaMA-Factory processor/supervised.py:221, transformers' pad of `position_ids`).
    """
    more = {"position_ids": restarting(draw).masked_fill(torch.from_numpy(~draw.keep), 0)} if positions else {}
    return case(draw, keep_2d(draw) if ones else torch.from_numpy(draw.ids.copy()), **more)


def block_diagonal(draw: Draw) -> Case:
    """`prepare_4d_attention_mask`: additive, rows of padding blocked throughout."""
    mask = torch.zeros(()).where(torch.from_numpy(causal(draw.ids))[:, None], LOW)
    return case(draw, mask, told={"polarity": "bias"})


def _document(name: str, blocked: bool, block: bool) -> Producer:
    ambiguous = ("no tensor",) * block + ("self-attending padding",) * (not blocked)
    make = partial(document, blocked=blocked, block=block)
    return Producer(f"flex documents, padding {name}" + ", BlockMask" * block, (), make, ambiguous=ambiguous)


def row(name: str, make: Any, /, *ambiguous: str, needs: Any = (), styles: Any = ONE_SEQUENCE, **settings: Any) -> Producer:
    return Producer(name, needs, partial(make, **settings), styles, ambiguous)


packing = partial(row, styles=(*SIDED, *sorted(PACKED)))
PRODUCERS = [
    *(_document(name, name == "blocked", block) for name in ("is document 0", "blocked") for block in (False, True)),
    row("flex window, BlockMask", flex_window, "no tensor"),
    row("nn.Transformer triangle", square_subsequent, "says nothing", padded=False, styles=NEVER_EMPTY),
    row("nn.Transformer triangle + key padding", square_subsequent, padded=True),
    row("nn key_padding_mask", key_padding, "key row"),
    *(row(f"by hand: {form}", by_hand, "no tensor", form=form) for form in ("numpy masked", "numpy additive")),
    row("by hand: diagonal forced", by_hand, "self-attending padding", form="diagonal forced"),
    row("key row, keep", key_row, "key row", form="keep"),
    row("key row, masked", key_row, "key row", form="masked"),
    row("key row, additive", key_row, form="bias"),
    row("a window for each head", head_windows),
    row("position bias beside -1e4", position_bias),
    row("accelerate T5 encoder", accelerate, "either polarity", needs=ACCELERATE, decoder=False),
    row("accelerate decoder", accelerate, "says nothing", needs=ACCELERATE, decoder=True, styles=NEVER_EMPTY),
    packing("LLaMA-Factory neat packing", numbers, positions=False),
    packing("LLaMA-Factory and axolotl, numbers, positions", numbers, positions=True),
    packing("axolotl multipack, ones", numbers, positions=True, ones=True),
    packing("LLaMA-Factory 4D", block_diagonal),
]  # fmt: skip
