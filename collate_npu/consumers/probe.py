"""Probe: what a model does with padded and packed rows is tried on a tiny copy of it, not looked up.

The copy has the class and settings of the model, stands on its device and calls the functions that this process resolved; on
a CPU, where kernels of a card do not run, torch functions that read the same boundaries. It gets rows as the adapter makes
them; every sequence must come out as it does alone. That takes 50 to 200 milliseconds once for the code of the layers, where
no kernel is compiled, and is the same on every rank. No parameter of the model is read: they may be sharded, or elsewhere.
A random model would hide a wrong mask. Here weights are scaled up until a wrong mask moves the logits, layers remember about
ten tokens, and the row of the pad token is neither zero nor frozen, so that padding which enters a layer shows.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from collate_npu.consumers.mask_routing import Model
from collate_npu.consumers.model_traits import config_of, is_encoder, text_config, unwrap
from collate_npu.consumers.recurrent import as_it_is, cpu_kernels, kernel_calls, mend, reads_boundaries_itself, variables_of
from collate_npu.errors import CollateError
from collate_npu.masks.sources import Sources
from collate_npu.segments import Segments, of_keep, of_lengths

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' notices on default configs and on CUDA kernels that a CPU cannot use."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


# Field name -> tiny value, the first pattern that matches the whole name. Zeros and Nones of the default are kept: they
# switch something off. `hidden_size` 64 with 4 heads of 32 makes every inner width 128 = 2 * 64, as mamba families demand.
_SHRINK: tuple[tuple[str, Any], ...] = (
    (
        r"((text|router|out)_)?hidden_size|n_embd|lru_width|ple_embed_dim|embedding_dim|.*intermediate_size|d_model|d_inner",
        64,
    ),
    (r"d_ff|n_inner|.*ffn_dim|dim_ff|hidden_dim|emb_dim|embed_dim|ffn_hidden_size|embedding_size|true_hidden_size", 64),
    (r"(pronunciation|shape|entity)_vocab_size|vocab_size_.+|hidden_size_per_layer_input", 64),
    (r"(encoder|decoder)_layers|num_(decoder_)?layers|n_layers|attn_layer_period|layer_group_size", 2),
    (r"(en|de)coder_attention_heads|n_heads|expert_capacity|index_block_size", 4),
    (r"num_kv_shared_layers", 0),
    (r"rotary_dim", 16),
    (r"d_kv|dim_head|.*(head_dim|d_head|headdim)", 32),
    (r"(swa_)?num_attention_heads|num_heads|n_head|linear_num(_value)?_heads|(n_mamba|mamba_n|mamba_num)_heads", 4),
    (r"num_experts|n_routed_experts|num_local_experts", 4),
    (r"(swa_)?num_key_value_heads|linear_num_key_heads|index_n_heads|num_experts_per_tok(en)?", 2),
    (r"index_(topk|local)_blocks|(en|de)coder_sparse_step", 1),
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
    "helium": {"head_dim": 16},
    "xlnet": {"d_head": 16},
    "funnel": {"block_sizes": [1, 1], "d_head": 16},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "mobilebert": {"intra_bottleneck_size": 64, "embedding_size": 64},
    "falcon_h1": {"mamba_d_head": 32},  # its default of 8 is smaller than tiny, and breaks heads * head_dim == d_ssm
    # All hybrid layers share one block, and tying it takes two of them.
    "zamba": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4},
    # Logits are divided by the width of the real model.
    "inkling_text": {"logits_mup_width_multiplier": 1.0},
    # Attention by an indexer: its sizes have no default, or a budget no tiny text exceeds (leaks.width_dependence).
    "glm5_next_text": {"index_topk": 1024, "index_kpool": 4},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 32}
    | {"indexer_budget": 8, "indexer_compress_ratio": 4},
}
_AXES = {"rope_type": "default", "mrope_section": [2, 3, 3]}  # the default splits the frequencies of wide heads
_FAMILY |= {f"{name}_text": {"rope_scaling": _AXES} for name in ("qwen2_vl", "qwen2_5_vl", "glm4v")}


def shrunk(default: PretrainedConfig) -> dict[str, Any]:
    """The fields of `default` that must be smaller, with their tiny values."""
    fields, count = default.to_dict(), getattr(default, "num_hidden_layers", None)
    tiny = {name: small for name, value in fields.items() if value and (small := _small(name, value)) is not None}
    tiny |= {a: tiny[b] for a, b in _EQUAL if a in tiny and fields[a] == fields.get(b)}
    lists = {name: value for name, value in fields.items() if isinstance(value, list) and len(value) == count}
    layers = {name: _few(value) for name, value in lists.items() if isinstance(value[0], str)}
    depth = max((len(value) for value in layers.values()), default=3)
    tiny |= {name: (value + value[-1:] * depth)[:depth] for name, value in layers.items()}
    tiny |= {name: depth for name in ("num_hidden_layers", "num_blocks", "n_layer") if fields.get(name)}
    return tiny | _FAMILY.get(default.model_type, {})


def _small(name: str, value: Any) -> Any:
    small = next((small for pattern, small in _SHRINK if re.fullmatch(pattern, name)), None)
    return min(small, value) if isinstance(value, (int, float)) and small is not None else small


def _few(kinds: list[str]) -> list[str]:
    """One layer of each kind, and the first kind again, so that each kind also comes after the other."""
    distinct = list(dict.fromkeys(kinds))[:3]
    return [*distinct, distinct[0]]


# Parameters that set how long a layer remembers, and the range they are drawn from: about ten tokens, where the usual
# initial values of Gated DeltaNet forget within five and hide whatever leaks in from further away.
_MEMORY = ((re.compile(r"A_log$"), -1.0, 0.0), (re.compile(r"dt_(proj[._])?bias$"), -2.5, -1.5))


def build(config: PretrainedConfig, attn_implementation: str | None) -> PreTrainedModel:
    """A model of this config with the head that predicts tokens, or none; None leaves its attention to transformers."""
    import transformers

    heads = ("Seq2SeqLM",) if getattr(config, "is_encoder_decoder", False) else ("CausalLM", "ImageTextToText")
    heads = ("MaskedLM",) if is_encoder(config) else heads
    autos = [getattr(transformers, f"AutoModelFor{head}") for head in heads]
    auto = next((auto for auto in autos if type(config) in auto._model_mapping), transformers.AutoModel)
    given = attn_implementation and hasattr(text_config(config), "num_attention_heads")  # else nothing to implement
    return auto.from_config(config, **({"attn_implementation": attn_implementation} if given else {}))


def make_honest(model: PreTrainedModel, scale: float) -> None:
    """Change its parameters in place, so that what leaks shows."""
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


_OTHERS = {"architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "quantization_config", "model_type"}
_WIDE = dict.fromkeys(("sliding_window", "attention_window_size", "local_attention", "window_size"), 512)
# windows and sparse blocks, which no row of a probe fills, and the router's loss, which some lack: the config tells
_WIDE |= {"attention_chunk_size": 512, "block_size": 512, "max_position_embeddings": 512, "output_router_logits": False}


def copy_of(model: Any, *, vocab_size: int = 64) -> Any:
    """A tiny honest copy of this transformers module, or of a model of this config, on its device, that runs there.

    With its settings and tiny sizes; where these do not go together, with tiny defaults and what its config switches on or
    off. Raises what transformers raises where neither runs.
    """
    config = config_of(model)
    text = _text(config)
    fields = {name: value for name, value in text.to_dict().items() if name not in _OTHERS}
    switches = {name: value for name, value in fields.items() if isinstance(value, bool)}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), vocab_size - 1)
    small = {"vocab_size": vocab_size, **ids, **{name: size for name, size in _WIDE.items() if fields.get(name)}}
    small |= {name: 0.0 for name, value in fields.items() if isinstance(value, float) and re.search("drop|jitter", name)}
    if (fields.get("num_experts_per_tok") or 0) > 1:  # all: no choice that rounding turns
        small["num_experts_per_tok"] = 4
    kind: Any = type(text)
    attention = getattr(text_config(config), "_attn_implementation", None)
    try:
        return _copy(model, config, kind(**{**fields, **shrunk(text), **small}), attention)
    except Exception:  # each config validates in its own way, and each model fails in its own
        own = attention if attention in ("sdpa", "eager") else None  # flash attention runs on no CPU
        return _copy(model, config, kind(**{**shrunk(kind()), **switches, **small}), own)


def _text(config: Any) -> Any:
    """Return the config that lists its layers: of an encoder beside a decoder, that of both."""
    return config if getattr(config, "is_encoder_decoder", False) else text_config(config)


def _copy(model: Any, config: Any, small: Any, attention: str | None) -> Any:
    if _text(config) is not config:
        parts = {name: shrunk(getattr(config, name)) for name in type(config).sub_configs if name != "text_config"}
        small = type(config)(**parts, text_config=small.to_dict())
    with quiet(), torch.random.fork_rng(devices=[]), torch.no_grad():
        with torch.device("meta"):
            if sum(each.numel() for each in _made(model, small, attention).parameters()) > 10_000_000:
                raise MemoryError  # what should be tiny is not
        torch.default_generator.manual_seed(0)  # those of cards go on
        with torch.device("cpu"):
            made = _made(model, small, attention)
            make_honest(made.to(torch.float32).train(), 5.0)
            for part in made.modules():
                if isinstance(part, nn.Dropout):
                    part.p = 0.0
            for name, parameter in made.named_parameters():
                if name.endswith("bias") and "norm" not in name.lower() and not parameter.any():
                    nn.init.normal_(parameter, std=0.5)  # what a projection makes of masked padding
            made.is_probe = True  # a run that is watched does not count it
        with cpu_kernels(made.to(_device(model))):
            made(**run_alone(made, torch.arange(3, device=_device(made))[None]))
    return made


def run_alone(model: Any, tokens_BS: Any) -> dict[str, Any]:
    """Return what a model is called with to show the states of these tokens."""
    taken = inspect.signature(model.forward).parameters
    options = {"use_cache": False, "output_hidden_states": True}
    return {"input_ids": tokens_BS, **{name: value for name, value in options.items() if name in taken or "kwargs" in taken}}


def _made(model: Any, small: Any, attention: str | None) -> Any:
    small = copy.deepcopy(small)  # which a model may change
    if not isinstance(model, nn.Module):
        return build(small, attention)
    kind: Any = next(base for base in type(model).__mro__ if not base.__module__.startswith("torch."))  # FSDP2 makes its own
    return kind._from_config(small, **({"attn_implementation": attention} if attention else {}))


def _rows(*lengths: int) -> dict[str, Segments]:
    real_S = ~np.isin(np.arange(76), (1, 2, 5))
    rows = [[length] for length in lengths]
    return {
        "flat": of_lengths([lengths], sum(lengths)),
        "packed": of_lengths([lengths[:2], lengths[2:]], sum(lengths[2:]) + 3, "left"),
        "right": of_lengths(rows, 76),
        "left": of_lengths(rows, 76, "left"),
        "one": of_lengths(rows[:1], 40, "left"),
        "holes": of_keep(real_S & (real_S.cumsum() <= np.array(lengths)[:, None])),
    }


ROWS: Mapping[bool, Mapping[str, Segments]] = {True: _rows(37, 9, 1, 70), False: _rows(37, 9, 5, 70)}
"""For recurrent layers and others, the rows of each form. Funnel pools, and takes no single token."""
_ANSWERS: dict[Any, Mapping[str, str]] = {}


def rows_move_reason(
    model: Any, adapter: Callable[..., Any], *forms: str, attention: str | None = None, mended: bool = False
) -> dict[str, str]:
    """Return for each of these forms (`ROWS`) why its sequences do not come out of this transformers module as alone; ""
    where they do. For a config, a model of it is built. Raises what transformers raises where no copy runs.

    `adapter` is `BatchAdapter`, of `attention` (None: the module's own); `mended`: its functions are mended (recurrent.py).
    """
    whole = unwrap(model)
    if isinstance(whole, nn.Module) and any(map(reads_boundaries_itself, whole.modules())):  # alone they raise without, too
        return dict.fromkeys(forms, "its layers hand their kernels the offsets themselves" if mended else "")
    seen = (_device(whole), _code(whole), _limit(_device(whole))) if isinstance(whole, nn.Module) else ()
    key = (mended, forms, attention, repr(config_of(whole).to_dict()), *seen)
    if key not in _ANSWERS:
        _ANSWERS[key] = _asked(whole, adapter(consumer="transformers", needs_mask_2d=False), forms, attention, mended)
    return dict(_ANSWERS[key])


def sequences_mix_reason(
    model: Any, adapter: Callable[..., Any], *, attention: str | None = None, mended: bool = False
) -> str:
    """Why packed rows move in recurrent layers; "" where they do not: a flat row, and of a mended model rows, too."""
    try:
        found = rows_move_reason(model, adapter, "flat", *(["packed"] if mended else []), attention=attention, mended=mended)
    except Exception as error:  # each config validates in its own way, and each model fails in its own
        return _text_of(error)
    return found["flat"] or found.get("packed", "")


def _text_of(error: Exception) -> str:
    """Return the message of an error that transformers, a kernel or a patch raised; of a `CollateError`, its rule."""
    text = str(error).partition("\n")[0][:400]
    return text.split(". ")[1] if isinstance(error, CollateError) and ". " in text else f"{type(error).__name__}: {text}"


def _copy_for(adapter: Any, whole: Any, attention: str | None, **known: Any) -> Any:
    """Return a copy of the model, and let the adapter make rows for it."""
    copy = copy_of(whole)
    own = getattr(text_config(config_of(whole)), "_attn_implementation", None) or "sdpa"
    model = Model.of(copy, attn_implementation=None if attention == own else attention)
    adapter.model = replace(model, boundaries_unread="", pooling="", moves=dict.fromkeys(ROWS[True], ""), **known)
    return copy


def _asked(whole: Any, adapter: Any, forms: Sequence[str], attention: str | None, mended: bool) -> dict[str, str]:
    copy = _copy_for(adapter, whole, attention, keeps_apart=mended)
    rows = ROWS[bool(adapter.model.needs_mask_2d)]
    draw, device = torch.Generator().manual_seed(0), _device(copy)
    sequences = [torch.randint(3, 60, (length,), generator=draw).to(device) for length in rows["flat"].sequence_lengths]
    with torch.no_grad(), torch.autocast(device.type, enabled=False), ExitStack() as stack:
        stack.enter_context(cpu_kernels(copy))
        states = [_hidden(copy, input_ids=tokens[None]) for tokens in sequences]
        alone = torch.cat([each[0] for each in states])
        if mended:
            stack.callback(mend(copy).remove)
        else:
            stack.enter_context(as_it_is())
        return {form: _why_moved(copy, adapter, rows[form], form == "flat", torch.cat(sequences), alone) for form in forms}


def _why_moved(copy: Any, adapter: Any, segments: Segments, flat: bool, tokens: Tensor, alone: Tensor) -> str:
    device, keep_BS = tokens.device, segments.keep.to(tokens.device)
    tokens_BS = torch.full(segments.shape, copy.config.get_text_config().vocab_size - 1, device=device)
    tokens_BS[keep_BS] = tokens[: keep_BS.sum()]
    try:
        batch = adapter.routed(Sources({"input_ids": tokens_BS}), segments, flat, device)
    except CollateError as error:
        return _text_of(error) if flat else ""  # such rows are refused behind the probe, too
    try:
        found = _hidden(copy, **batch)
    except Exception as error:
        return _text_of(error)
    worst = float((found[keep_BS] - alone[: keep_BS.sum()]).abs().max() / alone.abs().max())
    beside = "another sequence of its row" if segments.packed else "padding"
    return "" if worst < _limit(device) else f"{beside} moves a sequence (by {worst:.1g} of the largest value)"


def _limit(device: torch.device) -> float:
    """Float32 moves the largest value by 1e-6, products of ten bits, as on cards, by 2e-3; leaks by 0.02, in hybrids 0.3."""
    x = torch.full((1, 1), 1 + 2.0**-12, device=device)
    return 1e-3 if device.type == "cpu" and float(x @ x) > 1 else 2e-2


def _hidden(copy: Any, **batch: Any) -> Any:
    """Return the last hidden states `[B, S, D]`, and what its head makes of them where that is of tokens."""
    out = copy(**{**run_alone(copy, batch["input_ids"]), **batch})  # a batch may say use_cache, too
    B, S = batch["input_ids"].shape
    states = (getattr(out, "hidden_states", None) or [None])[-1]
    shown = [each.float().reshape(B, S, -1) for each in (states, out[0]) if getattr(each, "shape", ())[:2] == (B, S)]
    return torch.cat(shown, -1)


def _device(model: Any) -> torch.device:
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    return next((each.device for each in parameters if each.device.type != "meta"), torch.device("cpu"))


def _code(whole: Any) -> tuple[Any, ...]:
    """What its layers run: the forwards of their classes, and the functions that they call."""
    forwards = dict.fromkeys(type(module).forward for module in whole.modules())
    return (*forwards, *(variables_of(call.function).get("implementation") for call in kernel_calls(whole)))
