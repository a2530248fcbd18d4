"""Received: what each layer of a model is really given as its masks, recorded while the model runs.

A mask that is dropped on its way is dropped without an error, so nothing else can tell.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from collate_npu.errors import shape_of
from collate_npu.keys import KEEP_KEY, KEYS, of_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One call of one layer."""

    module: nn.Module
    attention_mask: Any
    """A tensor, a BlockMask, or None."""
    keep: Tensor | None
    """A 2D mask that came as `attention_mask_2d`."""
    offsets: Mapping[str, Any]
    """Offsets of a flat row that came as keywords: `cu_seq_lens_q`, `seq_idx`, `packed_seq_params` ..."""
    hidden: tuple[int, ...]
    """Shape of its first tensor."""
    crosses: bool
    """Does it look at another row than its own (cross attention)?"""

    def __str__(self) -> str:
        masks = {"attention_mask": self.attention_mask, KEEP_KEY: self.keep}
        told = [f"{key} {_said(value)}" for key, value in masks.items() if value is not None]
        return ", ".join([*told, *self.offsets]) or "no mask"


def _said(value: Any) -> str:
    return shape_of(value) if isinstance(value, Tensor) else type(value).__name__


@contextmanager
def received_masks(model: nn.Module) -> Iterator[dict[str, list[Tensor | None]]]:
    """Record what every layer receives as `attention_mask`: `{module name: [mask of each call]}`.

    Costs a copy of each mask. For tests and debugging.

    >>> import torch
    >>> from collate_npu.testing import tiny_model
    >>> model = tiny_model("qwen3_next", vocab_size=257)
    >>> with received_masks(model) as masks:
    ...     out = model(input_ids=torch.tensor([[256, 7], [4, 5]]), attention_mask=torch.tensor([[0, 1], [1, 1]]))
    >>> masks["model.layers.0.linear_attn"]
    [tensor([[0, 1],
            [1, 1]])]
    """
    masks: dict[str, list[Tensor | None]] = {}

    def keep(name: str, received: Received) -> None:
        found = received.attention_mask
        masks.setdefault(name, []).append(found.detach().clone() if isinstance(found, Tensor) else None)

    with _hooks(model, keep):
        yield masks


@contextmanager
def received_calls(model: nn.Module) -> Iterator[dict[str, Received]]:
    """Record the last call of every module that takes `attention_mask`. Holds no copies: look at once."""
    received: dict[str, Received] = {}
    with _hooks(model, received.__setitem__):
        yield received


def by_readers(received: Mapping[str, Received]) -> dict[str, Received]:
    """Those of the innermost modules: what stands around them hands a mask on, or acts on `attention_mask_2d` for them."""
    around = {name: [name[:end] for end, letter in enumerate(name) if letter == "."] for name in received}
    readers = received.keys() - {outer for names in around.values() for outer in names}
    return {name: _with_keep(what, received, around[name]) for name, what in received.items() if name in readers}


def _with_keep(what: Received, received: Mapping[str, Received], around: list[str]) -> Received:
    given = [what.keep, *(received[name].keep for name in around if name in received)]
    return replace(what, keep=next((keep for keep in given if keep is not None), None))


@contextmanager
def _hooks(model: nn.Module, record: Callable[[str, Received], None]) -> Iterator[None]:
    handles = [
        module.register_forward_pre_hook(_hook(name, record), with_kwargs=True)
        for name, module in model.named_modules()
        if name.count(".") > 1 and _may_take_masks(module)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _may_take_masks(module: nn.Module) -> bool:
    if type(module).__name__.startswith("Identity"):  # Megatron's, in the place of a cross attention that is not there
        return False
    parameters = inspect.signature(module.forward).parameters
    return "attention_mask" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _hook(name: str, record: Callable[[str, Received], None]) -> Any:
    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        signature = inspect.signature(module.forward)
        takes, bound = signature.parameters, signature.bind_partial(*args, **kwargs)
        named = {**bound.arguments, **bound.arguments.get("kwargs", {})}
        if "attention_mask" not in takes and not {"attention_mask", KEEP_KEY} & named.keys():
            return
        first = next((value for value in named.values() if isinstance(value, Tensor)), None)
        offsets = {key: named[key] for key in of_kind(KEYS, "offsets") if named.get(key) is not None}
        record(
            name,
            Received(
                module=module,
                attention_mask=named.get("attention_mask"),
                keep=named.get(KEEP_KEY),
                offsets=offsets,
                hidden=() if first is None else tuple(first.shape),
                crosses=any(named.get(key) is not None for key in ("encoder_hidden_states", "key_value_states")),
            ),
        )

    return look
