"""Tiny models: random ones of a model type, and tiny copies of a model at hand, in which wrong masks and leaks show.

A random model hides a wrong mask. Here weights are scaled up until a wrong mask moves the logits, layers remember about ten
tokens, and the row of the pad token is neither zero nor frozen, so that padding which enters a layer shows.
"""

from __future__ import annotations

import copy
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from collate_npu.consumers.model_traits import classes_of, config_of, is_encoder, takes, text_config, unwrap
from collate_npu.masks.dialects import SEQUENCE_GROUPS

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
    """Return the fields of `default` that must be smaller, with their tiny values."""
    fields, count = default.to_dict(), getattr(default, "num_hidden_layers", None)
    tiny = {name: small for name, value in fields.items() if value and (small := _small(name, value)) is not None}
    tiny |= {a: tiny[b] for a, b in _EQUAL if a in tiny and fields[a] == fields.get(b)}
    lists = {name: value for name, value in fields.items() if isinstance(value, list) and len(value) == count}
    kinds = {name: list(dict.fromkeys(value))[:3] for name, value in lists.items() if isinstance(value[0], str)}
    layers = {name: [*value, value[0]] for name, value in kinds.items()}  # each kind also stands behind another
    depth = max((len(value) for value in layers.values()), default=3)
    tiny |= {name: (value + value[-1:] * depth)[:depth] for name, value in layers.items()}
    tiny |= {name: depth for name in ("num_hidden_layers", "num_blocks", "n_layer") if fields.get(name)}
    return tiny | _FAMILY.get(default.model_type, {})


def _small(name: str, value: Any) -> Any:
    small = next((small for pattern, small in _SHRINK if re.fullmatch(pattern, name)), None)
    return min(small, value) if isinstance(value, (int, float)) and small is not None else small


# Parameters that set how long a layer remembers, and the range they are drawn from: about ten tokens, where the usual
# initial values of Gated DeltaNet forget within five and hide whatever leaks in from further away.
_MEMORY = ((re.compile(r"A_log$"), -1.0, 0.0), (re.compile(r"dt_(proj[._])?bias$"), -2.5, -1.5))


def build(config: PretrainedConfig, attn_implementation: str | None) -> PreTrainedModel:
    """Return a model of this config, with a head that predicts tokens if there is one. None: transformers' own attention."""
    import transformers

    heads = ("MaskedLM",) if is_encoder(config) else ("CausalLM", "ImageTextToText")
    autos = [getattr(transformers, f"AutoModelFor{head}") for head in heads]
    auto = next((auto for auto in (*autos, transformers.AutoModel) if type(config) in auto._model_mapping), None)
    made: Any = classes_of(config.__class__)[-1]._from_config if auto is None else auto.from_config
    given = attn_implementation and hasattr(text_config(config), "num_attention_heads")  # else nothing to implement
    return made(config, **({"attn_implementation": attn_implementation} if given else {}))


def make_honest(model: PreTrainedModel, scale: float) -> None:
    """Change its parameters in place, so that a leak shows."""
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
        elif name.endswith("bias") and "norm" not in name.lower() and not parameter.any():
            parameter.normal_(std=0.5)  # what a projection makes of masked padding


def default_config(model_type: str) -> PretrainedConfig:
    """Return the config of this model type as transformers makes it."""
    from transformers import AutoConfig

    with quiet():
        return AutoConfig.for_model(model_type)


def tiny_config(model_type: str, *, vocab_size: int) -> PretrainedConfig:
    """Return the config of a tiny model of this type: width 64, two to four layers, each kind of layer of the family.

    The last id of the vocabulary is bos, eos and pad, so that padding cannot be known from its id.
    Raises the error of the config's own validation.

    >>> config = tiny_config("qwen3_next", vocab_size=257)
    >>> config.hidden_size, config.pad_token_id, sorted(set(config.layer_types))
    (64, 256, ['full_attention', 'linear_attention'])
    """
    default = default_config(model_type)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), vocab_size - 1)
    if text_config(default) is default:
        fields = {**shrunk(default), "vocab_size": vocab_size, **ids}
    else:
        fields = {name: shrunk(getattr(default, name)) for name in type(default).sub_configs} | ids
        fields["text_config"] |= {"vocab_size": vocab_size, **ids}
    with quiet():
        return type(default)(**fields)


def tiny_model(
    model_type: str,
    *,
    vocab_size: int,
    attn_implementation: str = "sdpa",
    seed: int = 0,
    scale: float = 5.0,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Return a random model of this type on the CPU, in eval mode, whose logits show padding that leaks into a layer.

    Linear, embedding and expert weights are `scale` times their initial size (logits of 2 to 5). The embedding has no
    `padding_idx`: a random model's pad row would be zero, which hides every leak, and frozen, which hides its gradient.
    The global random state stays as it is. Raises the error of transformers for this type.

    >>> model = tiny_model("qwen3_next", vocab_size=257)
    >>> model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 257])
    """
    config = tiny_config(model_type, vocab_size=vocab_size)
    with quiet(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = build(config, attn_implementation).to(dtype).eval()
        make_honest(model, scale)
    return model


_OTHERS = {"architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "quantization_config", "model_type"}
_WINDOWS = ("sliding_window", "attention_window_size", "local_attention", "window_size", "attention_chunk_size")
_WIDE = (*_WINDOWS, "block_size", "max_position_embeddings")
"""What no row of a probe fills, windows or sparse blocks; some families have no router's loss: the config tells."""


def copy_of(model: Any, *, vocab_size: int = 64, windows: int = 512) -> Any:
    """Return a tiny copy of this transformers module, or of a model of this config, that runs on its device and shows leaks.
    Its windows and chunks, if any, have this size.

    It has the settings of the config and tiny sizes. If these do not fit together, it has the family's default settings and
    the switches of the config. Raises what transformers raises if neither runs.
    """
    config = config_of(model)
    text = text_config(config)
    fields = {name: value for name, value in text.to_dict().items() if name not in _OTHERS}
    switches = {name: value for name, value in fields.items() if isinstance(value, bool)}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), vocab_size - 1)
    small = {name: windows if name in _WINDOWS else 512 for name in _WIDE if fields.get(name)}
    small |= {"vocab_size": vocab_size, **ids}
    small |= {"output_router_logits": False} if "output_router_logits" in fields else {}
    small |= {name: 0.0 for name, value in fields.items() if isinstance(value, float) and re.search("drop|jitter", name)}
    if (fields.get("num_experts_per_tok") or 0) > 1:  # all of them: rounding cannot change the choice
        small["num_experts_per_tok"] = 4
    kind: Any = type(text)
    attention = getattr(text, "_attn_implementation", None)
    try:
        return _copy(model, config, kind(**{**fields, **shrunk(text), **small}), attention)
    except Exception:  # each config validates in its own way, and each model fails in its own
        own = attention if attention in ("sdpa", "eager") else None  # flash attention runs on no CPU
        return _copy(model, config, kind(**{**shrunk(kind()), **switches, **small}), own)


def _copy(model: Any, config: Any, small: Any, attention: str | None) -> Any:
    if text_config(config) is not config:
        parts = {name: shrunk(getattr(config, name)) for name in type(config).sub_configs if name != "text_config"}
        small = type(config)(**parts, text_config=small.to_dict())
    with quiet(), torch.random.fork_rng(devices=[]), torch.no_grad():
        with torch.device("meta"):
            if sum(each.numel() for each in _made(model, small, attention).parameters()) > 10_000_000:
                raise MemoryError  # what should be tiny is not
        torch.default_generator.manual_seed(0)  # not those of cards
        with torch.device("cpu"):
            made = _made(model, small, attention)
            make_honest(made.to(torch.float32).train(), 5.0)
            for part in made.modules():
                if isinstance(part, nn.Dropout):
                    part.p = 0.0
            made.is_probe = True  # a run that is watched does not count it
        with cpu_kernels(made.to(device_of(model))):
            made(**run_alone(made, torch.arange(3, device=device_of(made))[None]))
    return made


def run_alone(model: Any, tokens_BS: Any) -> dict[str, Any]:
    """Return what a model is called with to show the states of these tokens."""
    kept = {name: value for name, value in (("use_cache", False), ("output_hidden_states", True)) if takes(model, name)}
    return {"input_ids": tokens_BS, **kept, **offsets_asked(model, [*map(len, tokens_BS)], tokens_BS.device)}


def offsets_asked(model: Any, lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Return the offsets of a flat row if the model's decoder layers raise without them, as VeOmni's own do; {} else."""
    if "veomni" not in sys.modules or "cu_seq_lens_q" not in map(exchanges, model.modules()):
        return {}
    return {"cu_seq_lens_q": torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)}


def exchanges(layer: Any) -> str:
    """Return by which name a stack's own Gated DeltaNet takes the offsets of whole rows: VeOmni's (0.1.12 qwen3_5/generated/
    patched_modeling_qwen3_5_gpu.py:626-803), verl's (0.9.1 models/transformers/qwen3_5.py:193); "" for another layer."""
    forward, stacks = type(layer).forward, {name.partition(".")[0] for name in SEQUENCE_GROUPS}
    own = forward.__module__.partition(".")[0] in stacks and hasattr(layer, "chunk_gated_delta_rule")
    return next((key for key in ("cu_seq_lens_q", "cu_seqlens") if own and key in inspect.signature(forward).parameters), "")


def _made(model: Any, small: Any, attention: str | None) -> Any:
    small = copy.deepcopy(small)  # which a model may change
    if not isinstance(model, nn.Module):
        return build(small, attention)
    kind: Any = next(base for base in type(model).__mro__ if not base.__module__.startswith("torch."))  # FSDP2 makes its own
    if attention:
        small._attn_implementation = attention
    return kind(small)  # by itself: `_from_config` would share it out over ranks under ZeRO-3 (5.15 modeling_utils.py)


def device_of(model: Any) -> torch.device:
    """Return the device of the first parameter that has values; the CPU without one."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    return next((each.device for each in parameters if each.device.type != "meta"), torch.device("cpu"))


def limit_of(device: torch.device) -> float:
    """Return how far rounding may move the largest value. Float32 moves it by 1e-6, ten-bit products by 2e-3, leaks by
    0.02."""
    x = torch.full((1, 1), 1 + 2.0**-12, device=device)
    return 1e-3 if device.type == "cpu" and float(x @ x) > 1 else 2e-2


def states_of(copy: Any, **batch: Any) -> Any:
    """Return the last hidden states `[B, S, D]`, followed by what its head gives for each token, if it does."""
    out = copy(**{**run_alone(copy, batch["input_ids"]), **batch})  # the batch may hold use_cache, too
    B, S = batch["input_ids"].shape
    states = (getattr(out, "hidden_states", None) or [None])[-1]
    shown = [each.float().reshape(B, S, -1) for each in (states, out[0]) if getattr(each, "shape", ())[:2] == (B, S)]
    return torch.cat(shown, -1)


def settled(copy: Any, run: Callable[[], Tensor]) -> Tensor:
    """Return what `run()` gives; of a model that draws noise in training (stochastic depth), in evaluation."""
    before, first = torch.get_rng_state(), run()
    if not torch.equal(before, torch.get_rng_state()) or not torch.equal(first, run()):
        copy.eval()
        first = run()
    return first


# --- functions of recurrent layers. transformers chooses them when it imports the modeling file: the kernel of a package,
# else a torch function (5.23 integrations/hub_kernels.py:1008-1055).

_DISPATCH = {"implementation", "is_new_implementation", "applicable_params"}
"""What transformers' wrapper of such a function closes over, from 5.16 on."""
_ONE_AT_A_TIME = RLock()
"""Other threads wait: else one would save the replacements as originals, and restore those."""


def code_of(model: Any) -> tuple[Any, ...]:
    """Return what its layers run: the forwards of their classes, and the functions that these call."""
    forwards = dict.fromkeys(type(module).forward for module in unwrap(model).modules())
    called = (variables_of(wrapper)["implementation"] for wrapper in _wrappers(model))
    return (type(unwrap(model)), _attention_of(model)[2], *forwards, *called)


def _attention_of(model: Any) -> tuple[Any, Any, Any]:
    """Return transformers' attention functions, the name of that of this model, and what stands there."""
    functions = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", {})
    name = getattr(text_config(config_of(model)), "_attn_implementation", None)
    return functions, name, functions.get(name)


def ulysses_of(model: Any) -> Any:
    """Return the attention that DeepSpeed's Ulysses put in the place of this model's (0.19.6 ulysses_sp.py:520-572); None
    without it."""
    return variables_of(_attention_of(model)[2]).get("uattn")


@contextmanager
def unshared(model: nn.Module) -> Iterator[None]:
    """Inside the block each rank has whole rows: no stack shares those of this model, and adapt takes none for parts."""
    undo: list[Callable[[], None]] = []
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values() if hasattr(hook, "share"))
    try:
        for hook in hooks:
            undo.append(partial(setattr, hook, "share", hook.share))
            hook.share = lambda _: None
        if (ulysses := ulysses_of(model)) is not None:
            functions, attention, put = _attention_of(model)
            undo.append(partial(functions.__setitem__, attention, put))
            functions[attention] = ulysses.attn
        for by, name in SEQUENCE_GROUPS.items():
            path, _, last = name.rpartition(".")
            if (owner := getattr(sys.modules.get(by), path, None) if path else sys.modules.get(by)) is not None:
                last, alone = ("ulysses_size", 1) if path else (last, None)  # VeOmni makes the group of the size
                undo.append(partial(vars(owner).__setitem__, last, vars(owner).get(last)))
                vars(owner)[last] = alone
        yield
    finally:
        for put_back in undo:
            put_back()


@contextmanager
def cpu_kernels(model: Any) -> Iterator[None]:
    """Inside the block, if the model is on a CPU, replace kernels that need a card by torch functions; rows are whole."""
    before: list[tuple[Any, Any]] = []
    with _ONE_AT_A_TIME, unshared(model):
        try:
            for wrapper in filter(_of_card, _wrappers(model)) if next(model.parameters()).is_cpu else ():
                plain = inspect.unwrap(wrapper)
                taken = tuple(inspect.signature(plain).parameters)
                held = dict(zip(("implementation", "is_new_implementation", "applicable_params"), (plain, False, taken)))
                for name, cell in zip(wrapper.__code__.co_freevars, wrapper.__closure__):
                    if name in held:
                        before.append((cell, cell.cell_contents))
                        cell.cell_contents = held[name]
            yield
        finally:
            for cell, contents in before:
                cell.cell_contents = contents


def _of_card(wrapper: Any) -> bool:
    package = (getattr(variables_of(wrapper)["implementation"], "__module__", None) or "").partition(".")[0]
    return package in ("fla", "causal_conv1d", "mamba_ssm") and os.environ.get("TRITON_INTERPRET") != "1"


def _wrappers(model: Any) -> list[Any]:
    """Return transformers' wrapper of each such function that the layers of a module call."""
    # below the wrappers of transformers, accelerate's hooks and torch.compile
    bare = [inspect.unwrap(layer.forward) for layer in unwrap(model).modules() if inspect.isroutine(layer.forward)]
    forwards = filter(inspect.isfunction, dict.fromkeys(getattr(function, "__func__", function) for function in bare))
    found = [_wrapper_of(forward.__globals__.get(name)) for forward in forwards for name in forward.__code__.co_names]
    return [*{id(each): each for each in found if each is not None}.values()]


def _wrapper_of(found: Any) -> Any:
    """Return the wrapper that stands here, or None. The package `kernels` holds it in a module (0.17 layer/layer.py)."""
    while hasattr(found, "__collate_npu__"):  # below the wrappers of proof.hooks
        found = found.__collate_npu__
    function = variables_of(type(found).forward).get("func") if isinstance(found, nn.Module) else found
    return function if variables_of(function).keys() >= _DISPATCH else None


def variables_of(function: Any) -> dict[str, Any]:
    """Return the variables that a function closes over; {} for anything else."""
    if not inspect.isfunction(function):
        return {}
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ())}
