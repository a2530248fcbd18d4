"""Testing: tiny random models of every hybrid family in the installed transformers, and a tokenizer, without a download.

The models are real: transformers' own classes with each kind of layer the family mixes, two to four of them, width 64.
A usual random model hides errors. In these, weights are scaled up until a wrong mask changes the logits, and the row of the
pad token is neither zero nor frozen, so that padding which leaks into a layer shows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.model_traits import family_needs_mask_2d, text_config
from collate_npu.consumers.probe import leak_reasons
from collate_npu.consumers.tiny_models import default_config, tiny_config as tiny_config, tiny_model as tiny_model
from collate_npu.proof.conformance import check_step as check_step, conformance as conformance
from collate_npu.proof.invariance import assert_padding_invariant as assert_padding_invariant

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def hybrid_model_types() -> list[str]:
    """Return the model types of the installed transformers whose language model needs a 2D mask, sorted.

    A family is listed once, under the name of its text config (`qwen3_5_text`, not `qwen3_5`). A multimodal name is
    listed only where transformers has no causal language model of the text alone. `left_out` says which cannot be tested.

    >>> "qwen3_next" in hybrid_model_types(), "llama" in hybrid_model_types()
    (True, False)
    """
    from transformers.models.auto import modeling_auto

    causal = {text for name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if (text := _hybrid_text(name))}
    composite = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return sorted(causal | {name for name in composite if (_hybrid_text(name) or name) not in {name, *causal}})


@cache
def _hybrid_text(model_type: str) -> str | None:
    """Return the model type of this type's text config, if that family needs the 2D mask."""
    try:
        config = default_config(model_type)
        return text_config(config).model_type if family_needs_mask_2d(config) else None
    except Exception:  # a config that cannot be built bare (musicgen: ValueError; others raise their validator's class)
        return None


def byte_tokenizer(*, pad_is_eos: bool = True, padding_side: str = "right") -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer, built in memory: an id for each byte, then eos (256), then pad (257, or eos itself).

    `len(tokenizer)` is the vocabulary size that fits `tiny_model`.

    >>> tokenizer = byte_tokenizer(padding_side="left")
    >>> tokenizer("hi")["input_ids"], tokenizer.pad_token_id == tokenizer.eos_token_id, len(tokenizer)
    ([104, 105], True, 257)
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    # A printable byte is its own letter; the others stand in order from U+0100 on. Each id is then the byte itself.
    letters = {chr(byte): byte for byte in range(256) if chr(byte) in alphabet}
    letters |= zip(sorted(alphabet - set(letters)), (byte for byte in range(256) if chr(byte) not in alphabet))
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|eos|>", "pad_token": "<|eos|>" if pad_is_eos else "<|pad|>"}
    names = ["input_ids", "attention_mask"]
    sizes: dict[str, Any] = {"padding_side": padding_side, "model_max_length": 512, "model_input_names": names}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special, **sizes)


@cache
def left_out(attn_implementation: str = "sdpa") -> Mapping[str, str]:
    """Return the model types whose padding cannot be tested in the installed transformers, each with the reason.

    Measured, not listed: either the tiny model does not build or run, and the reason is its error, or a left-padded
    batch, which is right by transformers' own contract, moves its tokens.

    >>> "qwen3_next" in left_out()
    False
    """
    return {name: why for name in hybrid_model_types() if (why := _why_not(name, attn_implementation))}


def _why_not(model_type: str, attn_implementation: str) -> str:
    try:
        model = tiny_model(model_type, vocab_size=257, attn_implementation=attn_implementation)
        return leak_reasons(model, BatchAdapter, "left")["left"]
    except Exception as error:  # whatever transformers raises is the reason
        return f"{type(error).__name__}: {re.split(r'(?<=[.]) |$', str(error), maxsplit=1, flags=re.M)[0]}"
