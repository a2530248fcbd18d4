"""transformers' own mask functions (5.x: masking_utils), one implementation and pattern each."""

from __future__ import annotations

from functools import cache, partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from drawing import ONE_SEQUENCE, Draw, causal, chunked, first_places, prefix, sliding, together
from producing import BIDIRECTIONAL, CAUSAL, Producer, case, keep_2d, restarting, varies
from verdicts import Case

from collate_npu import Pattern

HF = ("transformers",)
NEW = ("transformers>=5",)
FULL_PACKS = ("packed",)
"""Positions alone cannot say where padding is, so transformers finds packed rows only where nothing is padded."""


@cache
def config(implementation: str, **more: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = LlamaConfig(vocab_size=128, **sizes, **more)
    made._attn_implementation = implementation
    return made


def made(draw: Draw, name: str, implementation: str, *, two_d: bool = True, dtype: Any = torch.float32, **more: Any) -> Any:
    """The mask that `masking_utils.<name>` gives for this draw."""
    from transformers import masking_utils

    settings = {key: more.pop(key) for key in ("sliding_window", "attention_chunk_size") if key in more}
    embeds = torch.zeros(*draw.shape, 1, dtype=dtype)
    function = getattr(masking_utils, name)
    given = {"config": config(implementation, **settings), "past_key_values": None, **more}
    given |= {"attention_mask": keep_2d(draw) if two_d else None}
    # transformers 4.57 calls the embeddings `input_embeds` and asks for the places of the cache.
    given |= {"inputs_embeds": embeds, "input_embeds": embeds, "cache_position": torch.arange(draw.shape[1])}
    names = signature(function).parameters
    with torch._dynamo.config.patch(disable=True):  # flex_attention's mask is compiled otherwise, for seconds
        return function(**{key: value for key, value in given.items() if key in names})


def plain(draw: Draw, implementation: str, **more: Any) -> Case:
    return case(draw, made(draw, "create_causal_mask", implementation, **more), polarity=polarity_of(implementation))


def polarity_of(implementation: str) -> str | None:
    return {"sdpa": "keep", "eager": "bias"}.get(implementation)


def from_positions(draw: Draw, implementation: str, beside: bool) -> Case:
    """Packed rows that transformers finds by their positions."""
    positions = restarting(draw)
    mask = made(draw, "create_causal_mask", implementation, two_d=False, position_ids=positions)
    more = {"position_ids": positions} if beside else {}
    return case(draw, mask, polarity=polarity_of(implementation), **more)


def window(draw: Draw, implementation: str) -> Case:
    size = int(draw.rng.integers(1, draw.shape[1] + 2))
    mask = made(draw, "create_sliding_window_causal_mask", implementation, sliding_window=size)
    attends = sliding(draw.ids, size)
    return case(draw, mask, attends=attends, pattern=Pattern.sliding(size), polarity=polarity_of(implementation))


def packed_window(draw: Draw) -> Case:
    size = int(draw.rng.integers(1, draw.shape[1] + 2))
    positions = restarting(draw)
    name = "create_sliding_window_causal_mask"
    mask = made(draw, name, "sdpa", two_d=False, position_ids=positions, sliding_window=size)
    attends = sliding(draw.ids, size)
    return case(draw, mask, attends=attends, pattern=Pattern.sliding(size), polarity="keep", position_ids=positions)


def chunks(draw: Draw, implementation: str) -> Case:
    size = int(draw.rng.integers(1, draw.shape[1] + 2))
    mask = made(draw, "create_chunked_causal_mask", implementation, attention_chunk_size=size)
    attends = chunked(draw.ids, size)
    return case(draw, mask, attends=attends, pattern=Pattern.chunked(size), polarity=polarity_of(implementation))


def encoder(draw: Draw, implementation: str, **more: Any) -> Case:
    mask = made(draw, "create_bidirectional_mask", implementation, **more)
    attends = together(draw.ids)
    return case(draw, mask, attends=attends, pattern=BIDIRECTIONAL, polarity=polarity_of(implementation))


def encoder_window(draw: Draw) -> Case:
    size = int(draw.rng.integers(1, draw.shape[1] + 1))
    mask = made(draw, "create_bidirectional_sliding_window_mask", "sdpa", sliding_window=size)
    at = np.arange(draw.shape[1])
    attends = together(draw.ids) & (abs(at[:, None] - at) <= size)
    pattern = BIDIRECTIONAL if (attends == together(draw.ids)).all() else None
    return case(draw, mask, attends=attends, pattern=pattern, polarity="keep")


def prefix_or(draw: Draw) -> Case:
    """A prefix that every token sees, through `or_mask_function`."""
    size = int(draw.rng.integers(0, draw.shape[1] + 1))
    first = torch.from_numpy(first_places(draw.ids).max(axis=1))
    mask = made(draw, "create_causal_mask", "sdpa", or_mask_function=lambda b, h, q, k: k < first[b] + size)
    attends = causal(draw.ids) | (together(draw.ids) & (np.arange(draw.shape[1]) < first.numpy()[:, None, None] + size))
    return case(draw, mask, attends=attends, pattern=Pattern.prefix(size), polarity="keep")


def documents_and(draw: Draw) -> Case:
    """Sequences kept apart through `and_mask_function`, padding blocked through the 2D mask."""
    ids = torch.from_numpy(draw.ids)
    mask = made(draw, "create_causal_mask", "sdpa", and_mask_function=lambda b, h, q, k: ids[b, q] == ids[b, k])
    return case(draw, mask, polarity="keep")


def image_blocks(draw: Draw) -> Case:
    """Gemma 3: tokens of one image see each other, text is causal."""
    from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask

    kinds = torch.from_numpy((draw.rng.random(draw.shape) < 0.4) & draw.keep).long()
    groups = get_block_sequence_ids_for_mask(kinds)
    mask = made(draw, "create_causal_mask", "sdpa", block_sequence_ids=groups)
    blocks = groups.numpy()
    same = (blocks[:, :, None] == blocks[:, None, :]) & (blocks >= 0)[:, :, None] & together(draw.keep.astype(np.int64))
    attends = causal(draw.ids) | same
    pattern = CAUSAL if (attends == causal(draw.ids)).all() else None
    return case(draw, mask, attends=attends, pattern=pattern, polarity="keep", token_type_ids=kinds)


def paligemma(draw: Draw) -> Case:
    """PaliGemma: `token_type_ids` 0 is prefix, in both directions; 1 is the answer (modeling_paligemma.py:258)."""
    ids = draw.ids
    lengths = draw.keep.sum(axis=1)
    sizes = (lengths * draw.rng.random(len(ids))).astype(int)
    place = np.arange(ids.shape[1]) - first_places(ids)
    kinds = torch.from_numpy((place >= sizes[:, None]) & draw.keep).long()
    mask = made(draw, "create_causal_mask", "sdpa", block_sequence_ids=torch.where(kinds == 0, 0, -1))
    attends = np.concatenate([prefix(ids[b : b + 1], int(size)) for b, size in enumerate(sizes)])
    # One prefix for each sequence that exists: a row of padding alone has none.
    pattern = Pattern.prefix([int(size) for size, length in zip(sizes, lengths) if length] or 0)
    return case(draw, mask, attends=attends, pattern=pattern, polarity="keep", token_type_ids=kinds)


def bloom(draw: Draw, model: str) -> Case:
    """Causal, additive, with each head's own slope: `[B, H, S, S]`."""
    import importlib

    build = importlib.import_module(f"transformers.models.{model}.modeling_{model}").build_alibi_tensor
    alibi = build(keep_2d(draw), 4, torch.float32).view(draw.shape[0], 4, 1, -1)
    mask = made(draw, "create_causal_mask", "eager")
    low = torch.finfo(torch.float32).min
    biased = torch.masked_fill(alibi.expand(-1, -1, draw.shape[1], -1), mask < -1, low)
    return case(draw, biased, pattern=None, polarity="bias", richer=varies(biased, draw))


def mpt(draw: Draw) -> Case:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    S = draw.shape[1]
    alibi = build_mpt_alibi_tensor(4, S).expand(draw.shape[0], 4, S, S)
    blocked = made(draw, "create_causal_mask", "eager") < -1
    biased = torch.masked_fill(alibi, blocked, torch.finfo(torch.float32).min)
    return case(draw, biased, pattern=None, polarity="bias", richer=varies(biased, draw))


def direct(draw: Draw, name: str, **more: Any) -> Case:
    """A mask function called by itself, as custom attention code does."""
    from transformers import masking_utils

    B, S = draw.shape
    function = getattr(masking_utils, name)
    sizes = {"batch_size": B, "q_length": S, "kv_length": S, "cache_position": torch.arange(S)}
    given = {key: value for key, value in sizes.items() if key in signature(function).parameters}
    mask = function(attention_mask=keep_2d(draw, torch.bool), **given, **more)
    return case(draw, mask, polarity="keep" if name == "sdpa_mask" else "bias")


def packed_and_padded(draw: Draw) -> Case:
    """transformers' own document predicate together with a padding mask: nothing of a sequence sees another."""
    from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function

    both = and_masks(causal_mask_function, packed_sequence_mask_function(torch.from_numpy(draw.ids)))
    return direct(draw, "sdpa_mask", mask_function=both, allow_is_causal_skip=False)


def _plain(name: str, implementation: str, ambiguous: tuple[str, ...] = (), **more: Any) -> Producer:
    return Producer(name, HF, partial(plain, implementation=implementation, **more), ONE_SEQUENCE, ambiguous)


PRODUCERS = [
    _plain("hf causal sdpa", "sdpa"),
    _plain("hf causal sdpa, never skipped", "sdpa", allow_is_causal_skip=False),
    _plain("hf causal eager", "eager"),
    _plain("hf causal eager bf16", "eager", dtype=torch.bfloat16),
    _plain("hf causal eager fp16", "eager", dtype=torch.float16),
    _plain("hf causal flash", "flash_attention_2"),
    _plain("hf causal flex", "flex_attention", ("no tensor",)),
    Producer("hf packed sdpa", HF, partial(from_positions, implementation="sdpa", beside=False), FULL_PACKS),
    Producer("hf packed sdpa, positions", HF, partial(from_positions, implementation="sdpa", beside=True), FULL_PACKS),
    Producer("hf packed eager, positions", HF, partial(from_positions, implementation="eager", beside=True), FULL_PACKS),
    Producer(
        "hf packed flex, positions",
        HF,
        partial(from_positions, implementation="flex_attention", beside=True),
        FULL_PACKS,
        ("no tensor",),
    ),
    Producer("hf packed and padded", HF, packed_and_padded),
    Producer("hf and_mask documents", HF, documents_and),
    Producer("hf sliding sdpa", HF, partial(window, implementation="sdpa"), ONE_SEQUENCE),
    Producer("hf sliding eager", HF, partial(window, implementation="eager"), ONE_SEQUENCE),
    Producer("hf sliding packed", HF, packed_window, FULL_PACKS),
    Producer("hf chunked sdpa", HF, partial(chunks, implementation="sdpa"), ONE_SEQUENCE),
    Producer("hf chunked eager", HF, partial(chunks, implementation="eager"), ONE_SEQUENCE),
    Producer("hf bidirectional sdpa", NEW, partial(encoder, implementation="sdpa"), ONE_SEQUENCE, ("either polarity",)),
    Producer("hf bidirectional eager", NEW, partial(encoder, implementation="eager"), ONE_SEQUENCE),
    Producer("hf bidirectional sliding", NEW, encoder_window, ONE_SEQUENCE, ("either polarity",)),
    Producer("hf prefix by or_mask", HF, prefix_or, ("none", "right", "left"), ("either polarity",)),
    Producer("hf PaliGemma prefix", NEW, paligemma, ("none", "right", "left", "empty_row"), ("either polarity",)),
    Producer("hf Gemma3 image blocks", NEW, image_blocks, ONE_SEQUENCE, ("either polarity",)),
    Producer("hf BLOOM alibi", HF, partial(bloom, model="bloom"), ONE_SEQUENCE),
    Producer("hf Falcon alibi", HF, partial(bloom, model="falcon"), ONE_SEQUENCE),
    Producer("hf MPT alibi", HF, mpt, ONE_SEQUENCE),
    Producer("hf sdpa_mask", HF, partial(direct, name="sdpa_mask", allow_is_causal_skip=False), ONE_SEQUENCE),
    Producer("hf eager_mask", HF, partial(direct, name="eager_mask"), ONE_SEQUENCE),
]
