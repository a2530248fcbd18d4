"""transformers' own mask functions (5.x: masking_utils) and the builders of 4.x, one implementation and pattern each.

`_unmask_unattended` runs on a card alone; here it is called by hand, as 4.x calls it (modeling_attn_mask_utils.py:410).
"""

import importlib
from functools import cache, partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from drawing import ONE_SEQUENCE, SIDED, Draw, causal, first_places, prefix, together
from producing import Producer, bias_of, case, keep_2d, otherwise, restarting, said
from torch import Tensor
from verdicts import Case

from collate_npu import Pattern

HF, NEW = ("transformers",), ("transformers>=5",)
PACKED = ("packed",)
"""Positions alone cannot say where padding is, so transformers finds packed rows only where nothing is padded."""
POLARITY = {"sdpa": "keep", "eager": "bias"}
WINDOWS = {
    "sliding": ("create_sliding_window_causal_mask", "sliding_window"),
    "chunked": ("create_chunked_causal_mask", "attention_chunk_size"),
}


@cache
def config(implementation: str, **more: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = LlamaConfig(vocab_size=128, **sizes, **more)
    made._attn_implementation = implementation
    return made


def made(draw: Draw, name: str, implementation: str, *, two_d: bool = True, **more: Any) -> Any:
    """The mask that `masking_utils.<name>` gives for this draw."""
    from transformers import masking_utils

    settings = {key: more.pop(key) for key in ("sliding_window", "attention_chunk_size") if key in more}
    embeds = torch.zeros(*draw.shape, 1)
    function = getattr(masking_utils, name)
    given = {"config": config(implementation, **settings), "past_key_values": None, **more}
    given |= {"attention_mask": keep_2d(draw) if two_d else None}
    # transformers 4.57 calls the embeddings `input_embeds` and asks for the places of the cache.
    given |= {"inputs_embeds": embeds, "input_embeds": embeds, "cache_position": torch.arange(draw.shape[1])}
    names = signature(function).parameters
    with torch._dynamo.config.patch(disable=True):  # flex_attention's mask is compiled otherwise, for seconds
        return function(**{key: value for key, value in given.items() if key in names})


def plain(draw: Draw, implementation: str, **more: Any) -> Case:
    mask = made(draw, "create_causal_mask", implementation, **more)
    return case(draw, mask, told={"polarity": POLARITY.get(implementation)})


def from_positions(draw: Draw, implementation: str, beside: bool = True) -> Case:
    """Packed rows that transformers finds by their positions."""
    positions = {"position_ids": restarting(draw)}
    mask = made(draw, "create_causal_mask", implementation, two_d=False, **positions)
    return case(draw, mask, told={"polarity": POLARITY.get(implementation)}, **(positions if beside else {}))


def window(draw: Draw, implementation: str, pattern: str, packed: bool = False) -> Case:
    name, setting = WINDOWS[pattern]
    size = draw.number(1, draw.shape[1] + 1)
    more = {"position_ids": restarting(draw)} if packed else {}
    mask = made(draw, name, implementation, two_d=not packed, **{setting: size}, **more)
    return case(draw, mask, told={**said(draw, pattern, size), "polarity": POLARITY[implementation]}, **more)


def encoder(draw: Draw, implementation: str) -> Case:
    mask = made(draw, "create_bidirectional_mask", implementation)
    return case(draw, mask, told={**said(draw, "bidirectional"), "polarity": POLARITY[implementation]})


def encoder_window(draw: Draw) -> Case:
    size, at = draw.number(1, draw.shape[1]), np.arange(draw.shape[1])
    mask = made(draw, "create_bidirectional_sliding_window_mask", "sdpa", sliding_window=size)
    both = said(draw, "bidirectional")
    attends = both["attends"] & (abs(at[:, None] - at) <= size)
    pattern = both["pattern"] if (attends == both["attends"]).all() else None
    return case(draw, mask, told={"attends": attends, "pattern": pattern, "polarity": "keep"})


def prefix_or(draw: Draw) -> Case:
    """A prefix that every token sees, through `or_mask_function`."""
    size = draw.number(0, draw.shape[1])
    first = torch.from_numpy(first_places(draw.ids).max(axis=1))
    mask = made(draw, "create_causal_mask", "sdpa", or_mask_function=lambda b, h, q, k: k < first[b] + size)
    attends = causal(draw.ids) | (together(draw.ids) & (np.arange(draw.shape[1]) < first.numpy()[:, None, None] + size))
    return case(draw, mask, told={"attends": attends, "pattern": Pattern.prefix(size), "polarity": "keep"})


def documents_and(draw: Draw) -> Case:
    """Sequences kept apart through `and_mask_function`, padding blocked through the 2D mask."""
    ids = torch.from_numpy(draw.ids)
    return plain(draw, "sdpa", and_mask_function=lambda b, h, q, k: ids[b, q] == ids[b, k])


def image_blocks(draw: Draw) -> Case:
    """Gemma 3: tokens of one image see each other, text is causal."""
    from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask

    kinds = torch.from_numpy((draw.rng.random(draw.shape) < 0.4) & draw.keep).long()
    groups = get_block_sequence_ids_for_mask(kinds)
    mask = made(draw, "create_causal_mask", "sdpa", block_sequence_ids=groups)
    blocks = groups.numpy()
    same = (blocks[:, :, None] == blocks[:, None, :]) & (blocks >= 0)[:, :, None] & together(draw.keep.astype(np.int64))
    told = otherwise(draw, causal(draw.ids) | same)
    return case(draw, mask, told={**told, "polarity": "keep"}, token_type_ids=kinds)


def paligemma(draw: Draw) -> Case:
    """PaliGemma: `token_type_ids` 0 is prefix, in both directions; 1 is the answer (modeling_paligemma.py:258)."""
    ids, lengths = draw.ids, draw.keep.sum(axis=1)
    sizes = (lengths * draw.rng.random(len(ids))).astype(int)
    place = np.arange(ids.shape[1]) - first_places(ids)
    kinds = torch.from_numpy((place >= sizes[:, None]) & draw.keep).long()
    mask = made(draw, "create_causal_mask", "sdpa", block_sequence_ids=torch.where(kinds == 0, 0, -1))
    attends = np.concatenate([prefix(ids[b : b + 1], int(size)) for b, size in enumerate(sizes)])
    # One prefix for each sequence that exists: a row of padding alone has none.
    pattern = Pattern.prefix([int(size) for size, length in zip(sizes, lengths) if length] or 0)
    return case(draw, mask, told={"attends": attends, "pattern": pattern, "polarity": "keep"}, token_type_ids=kinds)


def alibi(draw: Draw, model: str) -> Case:
    """Causal, additive, with each head's own slope: `[B, H, S, S]`."""
    modeling, (B, S) = importlib.import_module(f"transformers.models.{model}.modeling_{model}"), draw.shape
    if model == "mpt":
        slopes = modeling.build_mpt_alibi_tensor(4, S).expand(B, 4, S, S)
    else:
        slopes = modeling.build_alibi_tensor(keep_2d(draw), 4, torch.float32).view(B, 4, 1, -1).expand(-1, -1, S, -1)
    blocked = made(draw, "create_causal_mask", "eager") < -1
    mask = torch.masked_fill(slopes, blocked, torch.finfo(torch.float32).min)
    return case(draw, mask, told=bias_of(draw, mask))


def direct(draw: Draw, name: str, **more: Any) -> Case:
    """A mask function called by itself, as custom attention code does."""
    from transformers import masking_utils

    B, S = draw.shape
    function = getattr(masking_utils, name)
    sizes = {"batch_size": B, "q_length": S, "kv_length": S, "cache_position": torch.arange(S)}
    given = {key: value for key, value in sizes.items() if key in signature(function).parameters}
    mask = function(attention_mask=keep_2d(draw, torch.bool), **given, **more)
    return case(draw, mask, told={"polarity": "keep" if name == "sdpa_mask" else "bias"})


def packed_and_padded(draw: Draw) -> Case:
    """transformers' own document predicate together with a padding mask: nothing of a sequence sees another."""
    from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function

    both = and_masks(causal_mask_function, packed_sequence_mask_function(torch.from_numpy(draw.ids)))
    return direct(draw, "sdpa_mask", mask_function=both, allow_is_causal_skip=False)


def block_causal(draw: Draw) -> Case:
    """A BlockMask of packing ids `1 1 2 2 0` (integrations/flex_attention.py)."""
    from transformers.integrations.flex_attention import make_flex_block_causal_mask

    with torch._dynamo.config.patch(disable=True):
        return case(draw, make_flex_block_causal_mask(torch.from_numpy(draw.ids)))


# --- 4.x


def builders() -> Any:
    from transformers import modeling_attn_mask_utils

    return modeling_attn_mask_utils


def decoder(draw: Draw, *, sdpa: bool = False, **more: Any) -> Tensor:
    """`_prepare_4d_causal_attention_mask`, or its form for SDPA, which may be None."""
    function = getattr(builders(), "_prepare_4d_causal_attention_mask" + "_for_sdpa" * sdpa)
    return function(keep_2d(draw), draw.shape, torch.zeros(*draw.shape, 1), 0, **more)


def old(draw: Draw, **settings: Any) -> Case:
    return case(draw, decoder(draw, **settings), told={"polarity": "bias"})


def old_window(draw: Draw) -> Case:
    """The converter's window counts without the token itself: one more than `create_sliding_window_causal_mask` sees."""
    size = draw.number(1, draw.shape[1] + 1)
    mask = decoder(draw, sliding_window=size)
    return case(draw, mask, told={**said(draw, "sliding", size + 1), "polarity": "bias"})


def triangle(draw: Draw) -> Case:
    """`to_causal_4d`: no padding at all."""
    B, S = draw.shape
    mask = builders().AttentionMaskConverter(is_causal=True).to_causal_4d(B, S, S, dtype=torch.float32)
    return case(draw, mask, told={"polarity": "bias", "silent": True})


def unmasked(draw: Draw) -> Case | None:
    """Rows that attend nothing are made to attend everything; of a single place that is not to be told from a token."""
    if draw.shape[1] == 1:
        return None
    low, convert = torch.finfo(torch.float32).min, builders().AttentionMaskConverter._unmask_unattended
    return case(draw, convert(decoder(draw), min_dtype=low), told={"polarity": "bias"})


def old_encoder(draw: Draw, *, sdpa: bool = False) -> Case:
    mask = getattr(builders(), "_prepare_4d_attention_mask" + "_for_sdpa" * sdpa)(keep_2d(draw), torch.float32)
    return case(draw, mask, told={**said(draw, "bidirectional"), "polarity": "bias"})


def row(name: str, make: Any, /, *ambiguous: str, needs: Any = HF, styles: Any = ONE_SEQUENCE, **settings: Any) -> Producer:
    return Producer(f"hf {name}", needs, partial(make, **settings), styles, ambiguous)


PRODUCERS = [
    row("causal sdpa", plain, implementation="sdpa"),
    row("causal eager", plain, implementation="eager"),
    row("causal flash", plain, implementation="flash_attention_2"),
    row("causal flex", plain, "no tensor", implementation="flex_attention"),
    row("packed sdpa", from_positions, implementation="sdpa", beside=False, styles=PACKED),
    row("packed sdpa, positions", from_positions, implementation="sdpa", styles=PACKED),
    row("packed eager, positions", from_positions, implementation="eager", styles=PACKED),
    row("packed flex, positions", from_positions, "no tensor", implementation="flex_attention", styles=PACKED),
    Producer("hf packed and padded", HF, packed_and_padded),
    Producer("hf and_mask documents", HF, documents_and),
    Producer("hf make_flex_block_causal_mask", HF, block_causal, ambiguous=("no tensor",)),
    row("sliding sdpa", window, implementation="sdpa", pattern="sliding"),
    row("sliding eager", window, implementation="eager", pattern="sliding"),
    row("sliding packed", window, implementation="sdpa", pattern="sliding", packed=True, styles=PACKED),
    row("chunked sdpa", window, implementation="sdpa", pattern="chunked"),
    row("chunked eager", window, implementation="eager", pattern="chunked"),
    row("bidirectional sdpa", encoder, "either polarity", implementation="sdpa", needs=NEW),
    row("bidirectional eager", encoder, implementation="eager", needs=NEW),
    row("bidirectional sliding", encoder_window, "either polarity", needs=NEW),
    row("prefix by or_mask", prefix_or, "either polarity", styles=SIDED),
    row("PaliGemma prefix", paligemma, "either polarity", needs=NEW, styles=(*SIDED, "empty_row")),
    row("Gemma3 image blocks", image_blocks, "either polarity", needs=NEW),
    *(row(f"{model} alibi", alibi, model=model) for model in ("bloom", "falcon", "mpt")),
    row("eager_mask", direct, name="eager_mask"),
    row("_prepare_4d_causal", old),
    row("_prepare_4d_causal for sdpa", old, sdpa=True),
    row("_prepare_4d_causal, sliding", old_window),
    row("to_causal_4d", triangle, "says nothing", styles=SIDED),
    row("_unmask_unattended", unmasked, "unmasked rows"),
    row("_prepare_4d (encoder)", old_encoder),
    row("_prepare_4d (encoder) for sdpa", old_encoder, sdpa=True),
]
