"""A second `--external_plugins` file: what the model and its layers received inside the process that ms-swift started.

One JSON a rank goes to `$SWIFT_RECORD`. Padded samples are run again alone, by the same model, in the same process. Truth is
told by the ids: the pad token stands in no text.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from stand_ins import put_module, varlen_attention

PAD = 257


@contextmanager
def hooked(model: torch.nn.Module, ending: str, key: str) -> Iterator[dict[str, Any]]:
    """What each module whose name ends so received under this keyword, in its first call: rows of numbers, or None."""
    seen: dict[str, Any] = {}

    def note(name: str, module: torch.nn.Module, args: Any, given: Any) -> None:
        mask = given.get(key)
        seen.setdefault(f"{name}: {type(module).__name__}", None if mask is None else mask.int().tolist())

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name.endswith(ending):
                hooks.enter_context(module.register_forward_pre_hook(partial(note, name), with_kwargs=True))
        yield seen


def watch_megatron() -> None:
    from swift.megatron.trainers import MegatronTrainer

    forward_step = MegatronTrainer.forward_step

    def watched(self: Any, data_iterator: Any, model: Any) -> Any:
        data, inner = next(data_iterator), self.unwrapped_models[0]
        raw = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in data.items()}
        with hooked(inner, "self_attention", "attention_mask") as masks, hooked(inner, "mlp", "padding_mask") as padding:
            out = forward_step(self, iter([data]), model)
        found = {"trainer": type(self).__qualname__, "layers": masks, "routers": padding, "sent": sorted(raw)}
        found |= {"keep": [str(raw["attention_mask_2d"].dtype), raw["attention_mask_2d"].int().tolist()]}
        found |= megatron_alone(self, inner, raw)
        Path(os.environ["SWIFT_RECORD"], f"rank{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found))
        return out

    MegatronTrainer.forward_step = watched


@torch.no_grad()
def megatron_alone(trainer: Any, model: Any, raw: dict[str, Any]) -> dict[str, Any]:
    """How long each row is, and how far its logits are from those of its sample alone."""
    ids, keep = raw["input_ids"], raw["input_ids"] != PAD
    padded = logits(trainer, model, {key: value for key, value in raw.items() if key != "channel"})
    gaps = [padded[b, real] - logits(trainer, model, batch_of(ids[b, real][None]))[0] for b, real in enumerate(keep)]
    assert all(gap.isfinite().all() for gap in gaps)
    return {"lengths": keep.sum(1).tolist(), "error": max(float(gap.abs().max()) for gap in gaps)}


def batch_of(ids: torch.Tensor) -> dict[str, Any]:
    """One row without padding, as a collator of the user's own sends it, with one 2D mask."""
    positions = torch.arange(ids.shape[1])[None]
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids), "position_ids": positions}


def logits(trainer: Any, model: Any, batch: dict[str, Any]) -> torch.Tensor:
    given = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    prepared = trainer._prepare_batch(given)
    return model(**{key: value for key, value in prepared.items() if key not in ("labels", "loss_scale", "channel")})


def flash_attention() -> None:
    """For `swift sft`: flash_attn, on a device that has it (transformers 5.19 modeling_flash_attention_utils.py:97)."""
    from transformers import modeling_flash_attention_utils as flash

    def varlen(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **_: Any) -> Any:
        return varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k)

    def whole(q: Any, k: Any, v: Any, **_: Any) -> Any:
        return torch.stack([varlen_attention(*row, *[torch.tensor([0, len(row[0])])] * 2) for row in zip(q, k, v)])

    put_module("flash_attn", flash_attn_func=whole, flash_attn_varlen_func=varlen, flash_attn_with_kvcache=None)
    put_module("flash_attn.bert_padding", unpad_input=None, pad_input=None)
    there = {"general_availability_check": lambda **_: True, "supported_devices": ((lambda: True, "cpu"),)}
    flash.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2] |= there
    flash.is_flash_attn_2_available = lambda: True


watch_megatron() if "_megatron" in sys.argv[0] else flash_attention()
