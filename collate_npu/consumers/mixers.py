"""Mixers: which layers of a model read other tokens than their own, and whether it runs by sequence. The model is asked.

On a tiny copy each child of a decoder layer runs again with one token changed: where other tokens move, it mixes. Then a
flat row of several sequences runs by a plan, and each sequence must come out as it does alone. What a copy cannot run that
way goes the padded way. Legend: B rows, S width, T tokens of a flat row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from collate_npu.consumers.by_sequence import BySequence, MaskKind, Way, plan_of, run_under
from collate_npu.consumers.flat_row import flat_keys
from collate_npu.consumers.model_traits import config_of, is_transformers, layer_kinds, position_rule, text_config, unwrap
from collate_npu.consumers.shared_rows import SharedPlan, rule_of
from collate_npu.consumers.tiny_models import (
    code_of,
    copy_of,
    cpu_kernels,
    device_of,
    limit_of,
    run_alone,
    settled,
    states_of,
)
from collate_npu.masks.dialects import TOKEN_BY_TOKEN
from collate_npu.parallel import ContextParallel

_WAYS: dict[Any, Way] = {}


def way_of(model: Any) -> Way:
    """Return how this transformers module runs: its tiny copy is asked, once for its code, its config and its attention."""
    whole, config = unwrap(model), config_of(model)
    attention = getattr(text_config(config), "_attn_implementation", None)  # which to_dict leaves out
    key = (repr(config.to_dict()), attention, device_of(whole), code_of(whole))
    if key not in _WAYS:
        try:
            _WAYS[key] = _asked(whole)
        except Exception as error:  # each model fails in its own way
            _WAYS[key] = Way(f"no tiny copy of it runs ({type(error).__name__}: {str(error).partition(chr(10))[0][:200]})")
    return _WAYS[key]


def mixers_of(model: nn.Module, way: Way) -> dict[str, nn.Module]:
    """Return the mixers of a model by name, outermost ones."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if _class_in(way, module) is not None and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def place_of(model: nn.Module, mixers: dict[str, nn.Module]) -> nn.Module:
    """Return the innermost transformers module that holds all mixers: the backbone, of text alone."""
    held = set(mixers.values())
    return [each for each in model.modules() if is_transformers(each) and held <= set(each.modules())][-1]


_OF_TORCH = (nn.modules.conv._ConvNd, nn.RNNBase, nn.MultiheadAttention)
"""Modules of torch that mix places."""


def changed_reason(model: nn.Module, way: Way, *, wrapped: bool = True) -> str:
    """Return what stands on this model that its copy did not have, and that may mix tokens or read rows: another module, a
    forward or a hook of somebody's own; "" if nothing. What was a mixer's forward when it was `wrapped` runs on rows."""
    for name, module in model.named_modules() if way.looked_at else ():
        kind, held = type(module), vars(module).get("forward")
        bases = () if kind in way.looked_at else kind.__mro__[1:]  # FSDP2 derives a class
        known = way.looked_at.intersection(bases) or (_is_known(kind) and not issubclass(kind, _OF_TORCH))
        if bases and not known:
            return f"{name} is a {kind.__name__}, which its tiny copy does not have"
        laid = isinstance(held, BySequence) or (not wrapped and _class_in(way, module))
        put = (None if laid else held, *module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if foreign := [each for each in put if each is not None and module is not model and not _is_known(each)]:
            return f"{str(foreign[0])[:80]} stands on {name}, and not on its tiny copy"
    return ""


def _is_known(put: Any) -> bool:
    """True if one of these packages made it. NEFTune's noise follows the length of a row."""
    package = getattr(getattr(put, "func", put), "__module__", None) or type(put).__module__
    return package.partition(".")[0] in TOKEN_BY_TOKEN and "neftune" not in str(put)


def wrap(model: nn.Module, way: Way) -> None:
    """Let the mixers of a model run by sequence wherever a plan is there."""
    for name, module in mixers_of(model, way).items():
        if not isinstance(vars(module).get("forward"), BySequence):
            config = text_config(config_of(model))
            ruled = _class_in(way, module) in way.ruled
            module.forward = BySequence(module, config, _kind_of(model, name, config, way), way.explicit, ruled)


def _class_in(way: Way, module: nn.Module) -> type | None:
    return next((base for base in type(module).__mro__ if base in way.mixers), None)  # FSDP2 derives a class


def _kind_of(model: nn.Module, name: str, config: Any, way: Way) -> MaskKind | None:
    """Return the mask of a layer as its config tells, by its number or for all layers (5.23 masking_utils.py:1499-1529)."""
    if (taken := way.mixers[_class_in(way, model.get_submodule(name)) or nn.Module]) < 3:
        return "2d" if taken else None
    numbers = [part for part in name.split(".") if part.isdigit()]
    kinds = layer_kinds(config)
    n = getattr(model.get_submodule(name), "layer_idx", None)
    n = int(numbers[0]) if n is None and numbers else n
    kind = kinds[n] if isinstance(n, int) and 0 <= n < len(kinds) else ""
    if not kinds:
        kind = next((name for name in ("sliding_window", "attention_chunk_size") if getattr(config, name, None)), "")
    if not way.windows or not re.search("sliding|chunk", kind):
        return "causal"
    return "sliding_window_causal" if "sliding" in kind else "chunked_causal"


# --- asking

_LENGTHS = (13, 1, 21, 5, 21)
_LADDER: Any = list(product(("few", "even"), (True, False), (False, True), ("all", "ones")))


def _asked(whole: Any) -> Way:
    copy = copy_of(whole, windows=8)
    with torch.no_grad(), torch.autocast(device_of(copy).type, enabled=False), cpu_kernels(copy):
        if not (mixers := _mixing(copy)):
            return Way("no layer of it mixes tokens where it is looked for")
        draw = torch.Generator().manual_seed(0)
        rows = [torch.randint(3, 60, (1, length), generator=draw).to(device_of(copy)) for length in _LENGTHS]
        alone = settled(copy, lambda: torch.cat([states_of(copy, **run_alone(copy, row))[0] for row in rows]))
        for buckets, windows, explicit, mask in _LADDER:
            way = Way("", mixers, buckets, mask, explicit, windows, looked_at=frozenset(map(type, copy.modules())))
            if not (why := _moved(copy, way, torch.cat(rows, 1), alone)):
                rules = {type(each): rule for each in mixers_of(copy, way).values() if (rule := rule_of(each))}
                shared = replace(way, ruled=frozenset(rules))
                why = _moved(copy, shared, torch.cat(rows, 1), alone) if rules else "it has no rule"
                for held, name in rules.values():
                    held[name] = getattr(held[name], "traded", held[name])
                return way if why else shared
    return Way(f"by sequence its tiny copy comes out otherwise: {why}")


def _moved(copy: Any, way: Way, tokens_1T: Tensor, alone: Tensor) -> str:
    """Return how far a flat row of sequences is from each of them alone; "" if it is not."""
    for mixer in mixers_of(copy, way).values():
        vars(mixer).pop("forward", None)
    wrap(copy, way)
    plan = plan_of(_LENGTHS, tokens_1T.device, way.buckets, call_cost=0)
    call = {**run_alone(copy, tokens_1T), **flat_keys(copy, way, plan, position_rule(copy))}
    one = ContextParallel(1, 0, layout="contiguous")
    shared = SharedPlan.of(plan.rows_of(None), one, tokens_1T.device, attention=plan, most=4)
    try:
        found = run_under(shared if way.ruled else plan, states_of, copy, **call)[0]
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    worst = float((found - alone).abs().max() / alone.abs().max())
    return "" if worst < limit_of(tokens_1T.device) else f"a sequence moves by {worst:.1g} of the largest value"


_WIDTH = 24


def _mixing(copy: nn.Module) -> dict[type, int]:
    """Return the classes of the mixers of a tiny copy, and the dimensions of the mask that each is given."""
    seen: dict[nn.Module, tuple[Any, Any]] = {}
    parts = _parts(layer for layers in copy.modules() if isinstance(layers, nn.ModuleList) for layer in layers)
    note = lambda part, args, kwargs: seen.setdefault(part, (args, kwargs)) and None  # noqa: E731
    hooks = [part.register_forward_pre_hook(note, with_kwargs=True) for part in parts]
    text, found = text_config(config_of(copy)), dict[type, int]()
    before, text._attn_implementation = text._attn_implementation, "eager"  # which is given every mask
    try:
        copy(**run_alone(copy, torch.arange(3, 3 + _WIDTH, device=device_of(copy))[None]))
        for hook in hooks:
            hook.remove()
        for part, given in seen.items():
            if _mixes(part, *given) and not _parts_itself(part, *given):
                masks = [x.ndim for x in tree_flatten(given)[0] if _is_mask(x)]
                found[type(part)] = max(found.get(type(part), 0), *masks, 0)
    finally:
        text._attn_implementation = before
    return found


def _parts(layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield what decoder layers are made of; of a decoder layer within one, its parts."""
    for part in (part for layer in layers for part in layer.children()):
        yield from _parts([part]) if type(part).__name__.endswith("DecoderLayer") else [part]


def _parts_itself(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return True if no token moves behind positions that restart, whatever its mask says: the flat row is right for it, as
    for the layers that axolotl 0.19 puts in on CUDA."""
    if not isinstance(positions_1S := kwargs.get("position_ids"), Tensor) or positions_1S.shape != (1, _WIDTH):
        return False
    return not _mixes(module, args, kwargs | {"position_ids": positions_1S % 4}, begin=4)


def _mixes(module: nn.Module, args: Any, kwargs: Any, begin: int = 0) -> bool:
    """Return True if another token than the one that is changed moves, from `begin` on."""
    values, spec = tree_flatten((args, kwargs))
    at = next((n for n, x in enumerate(values) if _is_states(x)), None)
    if at is None:
        return False
    changed = values[at].clone()
    changed[:, 3] += 1
    runs = []
    for x in (values[at], changed):
        args, kwargs = tree_unflatten([*values[:at], x.clone(), *values[at + 1 :]], spec)
        runs.append(next((out for out in tree_flatten(module(*args, **kwargs))[0] if _is_states(out)), None))
    if runs[0] is None or runs[1] is None:
        return False
    moved_S = (runs[0] - runs[1]).abs().flatten(2).amax((0, 2)) > 1e-6
    moved_S[3] = False
    return bool(moved_S[begin:].any())


def _is_mask(x: Any) -> bool:
    dense = isinstance(x, Tensor) and x.ndim > 2 and x.shape[-2] == _WIDTH <= x.shape[-1] <= _WIDTH + 1
    return dense or (isinstance(x, Tensor) and x.shape == (1, _WIDTH) and not x.is_floating_point() and int(x.max()) <= 1)


def _is_states(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 2 and x.shape[1] == _WIDTH
