"""Tiny random models of every hybrid family in the installed transformers, and a tokenizer, built without a download.

The models are real: transformers' own classes with each kind of layer the family mixes, two to four of them, width 64.
They are also honest, which a random model is not by itself: weights are scaled up until a wrong mask moves the logits,
and the row of the pad token is neither zero nor frozen, so that padding which leaks into a layer shows.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from collate_npu.consumers.leaks import MODELS_IGNORING_MASK
from collate_npu.consumers.models import family_needs_mask_2d, is_encoder, text_config
from collate_npu.proof.conformance import conformance as conformance
from collate_npu.proof.invariance import Located, assert_padding_invariant as assert_padding_invariant, features_of
from collate_npu.proof.measure import alone, errors, measure, uncached
from collate_npu.segments import Segments
from collate_npu.testing.kernels import reference_kernels as reference_kernels

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast


def hybrid_model_types() -> list[str]:
    """Model types of the installed transformers whose language model needs a 2D padding mask, sorted.

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
    """The model type of this type's text config, if that family needs the 2D mask."""
    try:
        config = _default_config(model_type)
        return text_config(config).model_type if family_needs_mask_2d(config) else None
    except Exception:  # a config that cannot be built bare (musicgen: ValueError; others raise their validator's class)
        return None


def _default_config(model_type: str) -> PretrainedConfig:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with _quiet():
        return CONFIG_MAPPING[model_type]()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back transformers' notices on configs nobody chose and on CUDA kernels that a CPU cannot use."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


# Field name -> tiny value, the first pattern that matches the whole name. Zeros and Nones of the default are kept: they
# switch something off. `hidden_size` 64 with 4 heads of 32 makes every inner width 128 = 2 * 64, as the mamba
# families demand (`heads * head_dim == expand * hidden_size`).
_SHRINK: tuple[tuple[str, Any], ...] = (
    (r"((text|router|out)_)?hidden_size|n_embd|lru_width|ple_embed_dim|embedding_dim|.*intermediate_size", 64),
    (r".*(head_dim|d_head|headdim)", 32),
    (r"(swa_)?num_attention_heads|num_heads|n_head|linear_num(_value)?_heads|(n_mamba|mamba_n|mamba_num)_heads", 4),
    (r"num_experts|n_routed_experts|num_local_experts", 4),
    (r"(swa_)?num_key_value_heads|linear_num_key_heads|index_n_heads|num_experts_per_tok(en)?", 2),
    (r"attn_layer_period|layer_group_size", 2),
    (r"n_group|n_groups|num_expert_group|topk_group|mamba_n_groups|attn_layer_offset|expert_layer_offset|depth", 1),
    (r"mamba_d_ssm", 128),
    (r".*(state_size|d_state|_rank|_lowrank|chunk_size)|block_size|d_rel", 8),
    (r"(attention_)?(window_size|sliding_window|sliding_window_size)", 8),
    (r"use_mamba_kernels", False),
    (r"max_position_embeddings|n_positions|context_length|model_max_length", 512),
    (r"initializer_range", 0.02),
)

# The first stays equal to the second where the default has them equal.
_EQUAL = (("num_key_value_heads", "num_attention_heads"), ("linear_num_key_heads", "linear_num_value_heads"))

# What the defaults do not tell, by model type.
_FAMILY: dict[str, dict[str, Any]] = {
    # The default config lists one kind of layer only. Old names of layers: they are understood by every version.
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "recurrent_gemma": {"head_dim": 16},  # 4.57 derives the width of its projections from hidden_size / heads
    "falcon_h1": {"mamba_d_head": 32},  # its default of 8 is smaller than tiny, and breaks heads * head_dim == d_ssm
    # All hybrid layers share one block, and tying it takes two of them.
    "zamba": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4},
    # Logits are divided by the width of the real model.
    "inkling_text": {"logits_mup_width_multiplier": 1.0},
    # Attention by an indexer: its sizes have no default, or a budget no tiny text exceeds.
    # glm5_next keeps a budget no tiny text exceeds: its scores pass a ReLU (modeling_glm5_next.py:863), and which of many
    # zeros win a place depends on the width of the tensor, with real tokens appended as with padding.
    "glm5_next_text": {"index_topk": 1024, "index_kpool": 4},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32}
    | {"indexer_budget": 8, "indexer_compress_ratio": 4},
}


def tiny_config(model_type: str, *, vocab_size: int) -> PretrainedConfig:
    """The config of a tiny model of this type: width 64, two to four layers, each kind of layer of the family.

    The last id of the vocabulary is bos, eos and pad, the hard case: padding cannot be told from text by its id.
    Raises what the config's own validation raises.

    >>> config = tiny_config("qwen3_next", vocab_size=257)
    >>> config.hidden_size, config.pad_token_id, sorted(set(config.layer_types))
    (64, 256, ['full_attention', 'linear_attention'])
    """
    default = _default_config(model_type)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), vocab_size - 1)
    if text_config(default) is default:
        fields = {**_shrink(default), "vocab_size": vocab_size, **ids}
    else:
        fields = {name: _shrink(getattr(default, name)) for name in type(default).sub_configs} | ids
        fields["text_config"] |= {"vocab_size": vocab_size, **ids}
    with _quiet():
        return type(default)(**fields)


def _shrink(default: PretrainedConfig) -> dict[str, Any]:
    """The fields of `default` that must be smaller, with their tiny values."""
    fields = default.to_dict()
    tiny = {name: small for name, value in fields.items() if value and (small := _small(name, value)) is not None}
    tiny |= {a: tiny[b] for a, b in _EQUAL if a in tiny and fields[a] == fields[b]}
    layers = {name: _few(value) for name, value in fields.items() if _is_layer_list(value, default)}
    depth = max((len(value) for value in layers.values()), default=3)
    tiny |= {name: (value + value[-1:] * depth)[:depth] for name, value in layers.items()}
    tiny |= {name: depth for name in ("num_hidden_layers", "num_blocks", "n_layer") if fields.get(name)}
    return tiny | _FAMILY.get(default.model_type, {})


def _small(name: str, value: Any) -> Any:
    small = next((small for pattern, small in _SHRINK if re.fullmatch(pattern, name)), None)
    return min(small, value) if isinstance(value, (int, float)) and small is not None else small


def _is_layer_list(value: Any, default: PretrainedConfig) -> bool:
    depth = getattr(default, "num_hidden_layers", None)
    return isinstance(value, list) and len(value) == depth and isinstance(value[0], str)


def _few(kinds: list[str]) -> list[str]:
    """One layer of each kind, and the first kind again, so that each kind also comes after the other."""
    distinct = list(dict.fromkeys(kinds))[:3]
    return [*distinct, distinct[0]]


# Parameters that set how long a layer remembers, and the range they are drawn from: about ten tokens, where the usual
# initial values of Gated DeltaNet forget within five and hide whatever leaks in from further away.
_MEMORY = ((re.compile(r"A_log$"), -1.0, 0.0), (re.compile(r"dt_(proj[._])?bias$"), -2.5, -1.5))


def tiny_model(
    model_type: str,
    *,
    vocab_size: int,
    attn_implementation: str = "sdpa",
    seed: int = 0,
    scale: float = 5.0,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """A random model of this type on the CPU, in eval mode, on which padding that leaks into a layer shows.

    Linear, embedding and expert weights are `scale` times their initial size (logits of 2 to 5). The embedding has no
    `padding_idx`: a random model's pad row would be zero, which hides every leak, and frozen, which hides its gradient.
    The global random state is left as it was. Raises what transformers raises for this type.

    >>> model = tiny_model("qwen3_next", vocab_size=257)
    >>> model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 257])
    """
    config = tiny_config(model_type, vocab_size=vocab_size)
    with _quiet(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = _build(config, attn_implementation).to(dtype).eval()
        _make_honest(model, scale)
    return model


def _build(config: PretrainedConfig, attn_implementation: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMaskedLM

    auto = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
    auto = AutoModelForMaskedLM if is_encoder(config) else auto
    if not hasattr(text_config(config), "num_attention_heads"):  # no attention at all: there is nothing to implement
        return auto.from_config(config)
    return auto.from_config(config, attn_implementation=attn_implementation)


def _make_honest(model: PreTrainedModel, scale: float) -> None:
    table = model.get_input_embeddings()
    if table.padding_idx is not None:
        table.weight[table.padding_idx].normal_(std=float(table.weight.std()))
        table.padding_idx = None
    convolutions = {module.weight for module in model.modules() if isinstance(module, nn.Conv1d)}
    for name, parameter in model.named_parameters():
        if drawn := next(((low, high) for pattern, low, high in _MEMORY if pattern.search(name)), None):
            parameter.uniform_(*drawn)
        elif parameter in convolutions:  # some families start them at 0.02, and three layers of that carry nothing
            parameter.normal_(std=parameter[0].numel() ** -0.5)
        elif parameter.ndim >= 2:
            parameter.mul_(scale)


def byte_tokenizer(*, pad_is_eos: bool = True, padding_side: str = "right") -> PreTrainedTokenizerFast:
    """A byte-level tokenizer built in memory: one id for each byte, then eos (256), then pad (257, or eos itself).

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
    """Model types on which padding invariance cannot be tested in the installed transformers, each with the reason.

    Measured, not listed: either the tiny model does not build or run, and the reason is its error, or a left-padded
    batch with the plain 2D `attention_mask`, which is right by transformers' own contract, moves the logits.

    >>> "qwen3_next" in left_out()
    False
    """
    return {name: why for name in hybrid_model_types() if (why := _why_not(name, attn_implementation))}


def _why_not(model_type: str, attn_implementation: str) -> str | None:
    try:
        with _quiet():
            moved = _left_padding_error(tiny_model(model_type, vocab_size=257, attn_implementation=attn_implementation))
    except Exception as error:  # whatever transformers raises is the reason
        return f"{type(error).__name__}: {re.split(r'(?<=[.]) |$', str(error), maxsplit=1, flags=re.M)[0]}"
    if moved <= 1e-4:
        return None
    why = f": {MODELS_IGNORING_MASK[model_type][1]}" if model_type in MODELS_IGNORING_MASK else ""
    return f"left padding with a 2D attention_mask moves logits by {moved:.2g}{why}"


def _left_padding_error(model: PreTrainedModel) -> float:
    """The largest difference of a logit between a left-padded batch with its 2D mask and each sample alone."""
    segments = Segments.from_lengths([5, 17], side="left")
    features = features_of([[7 * token % 256 for token in range(3, 3 + n)] for n in segments.sequence_lengths])
    tokens = torch.tensor([token for feature in features for token in feature["input_ids"]])
    ids = torch.full(segments.shape, 256).masked_scatter(segments.keep, tokens)
    batch = {"input_ids": ids, "attention_mask": segments.keep.long(), "position_ids": segments.position_ids}
    taken = {key: batch[key] for key in batch if key in inspect.signature(model.forward).parameters}
    found = measure(model, uncached(model, taken), Located.in_order(segments).rows, gradients=False)
    return errors(found, alone(model, features, gradients=False)).largest
