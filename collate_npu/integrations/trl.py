"""TRL 1.16.0: a collator where the trainer takes one, `adapt(trainer.model)` where it makes its batches itself.

SFT on padded rows, DPO, KTO and reward trainers take `data_collator=wrap_collator(theirs, model=model)`. GRPO and RLOO
collate nothing (grpo_trainer.py:964), ORPO and CPO join rows behind the collator (experimental/orpo/orpo_trainer.py:606),
and SFT refuses a collator with `packing` or `padding_free` (sft_trainer.py:917). There the model itself is the place.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.masks.sources import Sources
from collate_npu.releases import say_outside

PACKAGE, TESTED = "trl", "1.16.0"


def adapt(model: nn.Module, **settings: Any) -> RemovableHandle:
    """Let every batch go through `BatchAdapter(model, **settings)` on its way into `model(...)`; undone by `.remove()`.

    Whatever the trainer put together is proved, made right for this model, or refused there; its own batch stays as it
    was. A single row without a mask is read as a flat one. Steps of generation behind the prompt pass as they are. Works
    with any trainer of transformers models. Costs a copy of the mask to the host each step: prefer a collator.

    >>> import torch
    >>> from collate_npu.testing import tiny_model
    >>> model = tiny_model("qwen3_next", vocab_size=257)
    >>> handle = adapt(model)
    >>> model(input_ids=torch.tensor([[256, 1], [2, 3]]), attention_mask=torch.tensor([[0, 1], [1, 1]])).logits.shape
    torch.Size([2, 2, 257])
    >>> handle.remove()
    """
    say_outside("transformers")
    adapter = BatchAdapter(model, **settings)
    names = list(inspect.signature(type(model).forward).parameters)[1:]

    def through_adapter(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]] | None:
        batch = Sources({**dict(zip(names, args)), **kwargs})
        if _decodes(batch):
            return None
        flat = batch.get("attention_mask") is None and batch.shape()[0] == 1
        return (), adapter.mended(batch, padding_free=flat)[0]

    return model.register_forward_pre_hook(through_adapter, with_kwargs=True)


def _decodes(batch: Sources) -> bool:
    """Is this a step of generation? Its mask, if any, covers the tokens of the cache too; `generate` makes None of a mask of
    ones (transformers 5.23 generation/utils.py:2899), so that a prefill without one has no padding. Of an encoder-decoder
    every step has what its encoder made of the prompt, and the prompt no more."""
    if batch.get("encoder_outputs") is not None:
        return True
    mask, width = batch.get("attention_mask"), batch.shape()[1]
    cached = any(batch.get(name) is not None for name in ("past_key_values", "cache_params", "state"))
    return cached and (width == 1 or mask is None or mask.shape[-1] > width)
