"""Received: what was really told to each layer of a model, recorded while the model runs.

A mask that is dropped on its way is dropped without an error, so nothing else can tell. A record says whose it is, where it
was taken (`source`) and what was told by which keyword: it is the same for a layer and for a kernel under it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from collate_npu.errors import shape_of
from collate_npu.given import check_model
from collate_npu.keys import KEEP_KEY, KEYS, of_kind

MASK = "attention_mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One call."""

    name: str
    """The module's, in its model."""
    source: Literal["layer"] = "layer"
    """Where it was taken."""
    reader: Any
    """Who was called: a module."""
    told: Mapping[str, Any]
    """What came of masks and offsets, by keyword: `attention_mask` (a tensor or a BlockMask), `attention_mask_2d`,
    `cu_seq_lens_q`, `packed_seq_params` ..."""
    hidden: tuple[int, ...]
    """Shape of its first tensor."""
    crosses: bool = False
    """Does it look at another row than its own (cross attention)?"""

    @property
    def offsets(self) -> set[str]:
        """The names of the offsets of a flat row that came."""
        return self.told.keys() - {MASK, KEEP_KEY}

    def __str__(self) -> str:
        masks = [(key, self.told[key]) for key in (MASK, KEEP_KEY) if key in self.told]
        said = [f"{key} {shape_of(each) if isinstance(each, Tensor) else type(each).__name__}" for key, each in masks]
        return ", ".join([*said, *(key for key in self.told if key in self.offsets)]) or "no mask"


@contextmanager
def received_masks(model: nn.Module) -> Iterator[dict[str, list[Tensor | None]]]:
    """Record copies of what every layer receives as `attention_mask`: `{module name: [mask of each call]}`.

    >>> import torch
    >>> from collate_npu.testing import tiny_model
    >>> model = tiny_model("qwen3_next", vocab_size=257)
    >>> with received_masks(model) as masks:
    ...     out = model(input_ids=torch.tensor([[256, 7], [4, 5]]), attention_mask=torch.tensor([[0, 1], [1, 1]]))
    >>> masks["model.layers.0.linear_attn"]
    [tensor([[0, 1],
            [1, 1]])]
    """
    check_model(model)
    masks: dict[str, list[Tensor | None]] = {}

    def keep(received: Received) -> None:
        found = received.told.get(MASK)
        masks.setdefault(received.name, []).append(found.detach().clone() if isinstance(found, Tensor) else None)

    with _hooks(model, keep):
        yield masks


@contextmanager
def received_calls(model: nn.Module) -> Iterator[dict[str, Received]]:
    """Record the last call of every module that takes `attention_mask`, by its name. Holds no copies: look at once."""
    received: dict[str, Received] = {}
    with _hooks(model, lambda call: received.__setitem__(call.name, call)):
        yield received


def by_readers(received: Mapping[str, Received]) -> list[Received]:
    """Those of the innermost modules: what stands around them hands a mask on, or acts on `attention_mask_2d` for them."""
    around = {name: [name[:end] for end, letter in enumerate(name) if letter == "."] for name in received}
    handing_on = {outer for names in around.values() for outer in names}
    readers = []
    for name in (each for each in received if each not in handing_on):
        calls = [received[name], *(received[outer] for outer in around[name] if outer in received)]
        keep = next((call.told[KEEP_KEY] for call in calls if KEEP_KEY in call.told), None)
        readers.append(calls[0] if keep is None else replace(calls[0], told={**calls[0].told, KEEP_KEY: keep}))
    return readers


@contextmanager
def _hooks(model: nn.Module, record: Callable[[Received], None]) -> Iterator[None]:
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
    return MASK in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _hook(name: str, record: Callable[[Received], None]) -> Any:
    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        signature = inspect.signature(module.forward)
        bound = signature.bind_partial(*args, **kwargs)
        named = {**bound.arguments, **bound.arguments.get("kwargs", {})}
        if MASK not in signature.parameters and not {MASK, KEEP_KEY} & named.keys():
            return
        first = next((value for value in named.values() if isinstance(value, Tensor)), None)
        told = {key: named[key] for key in (MASK, KEEP_KEY, *of_kind(KEYS, "offsets")) if named.get(key) is not None}
        crosses = any(named.get(key) is not None for key in ("encoder_hidden_states", "key_value_states"))
        hidden = () if first is None else tuple(first.shape)
        record(Received(name=name, reader=module, told=told, hidden=hidden, crosses=crosses))

    return look
