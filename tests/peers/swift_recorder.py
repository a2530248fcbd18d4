"""A second `--external_plugins` file: what the model and its layers received inside the process that ms-swift started.

One JSON a rank goes to `$SWIFT_RECORD`. Padded samples are run again alone, by the same model, in the same process. Truth is
told by the ids: the pad token stands in no text. `$SWIFT_NPU` makes ms-swift's Megatron and mcore-bridge believe in an NPU.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

PAD = 257
STEPS: list[dict[str, Any]] = []


def told(value: Any) -> Any:
    """A tensor in words: dtype, shape, and what a 2D one holds."""
    if not isinstance(value, torch.Tensor):
        return None if value is None else type(value).__name__
    rows = value.int().tolist() if value.ndim == 2 and value.numel() < 4000 else None
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "rows": rows}


class Hooks:
    """What each module whose name ends so received as keyword, in the first call."""

    def __init__(self, model: torch.nn.Module, endings: tuple[str, ...], keys: tuple[str, ...]) -> None:
        self.seen: dict[str, dict[str, Any]] = {}
        self._handles = []
        for name, module in model.named_modules():
            if name.endswith(endings):
                self._handles.append(module.register_forward_pre_hook(self._hook(name, keys), with_kwargs=True))

    def _hook(self, name: str, keys: tuple[str, ...]) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            found = {key: told(kwargs[key]) for key in keys if key in kwargs}
            self.seen.setdefault(f"{name}: {type(module).__name__}", found)

        return hook

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def record(step: dict[str, Any]) -> None:
    STEPS.append(step)
    said = {"argv": sys.argv[1:], "rank": int(os.environ.get("RANK", 0)), "steps": STEPS}
    Path(os.environ["SWIFT_RECORD"], f"rank{said['rank']}.json").write_text(json.dumps(said))


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float("inf") if a.shape != b.shape or not a.isfinite().all() else float((a - b).abs().max())


def shifted_loss(logits: list[torch.Tensor], labels: list[torch.Tensor]) -> float:
    sums = [torch.nn.functional.cross_entropy(x[:-1], y[1:], reduction="sum") for x, y in zip(logits, labels)]
    return float(sum(sums))


# --- the transformers backend


def watch_transformers() -> None:
    from swift.trainers import Seq2SeqTrainer

    compute_loss = Seq2SeqTrainer.compute_loss

    def watched(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inner = self.accelerator.unwrap_model(model)
        given = {key: value.clone() for key, value in inputs.items() if isinstance(value, torch.Tensor)}
        items = kwargs.get("num_items_in_batch")
        hooks = Hooks(inner, ("self_attn", "linear_attn"), ("attention_mask",))
        loss = compute_loss(self, model, inputs, *args, **kwargs)
        hooks.remove()
        record({"keys": sorted(given), "layers": hooks.seen, "loss": float(loss), **transformers_alone(inner, given, items)})
        return loss

    Seq2SeqTrainer.compute_loss = watched


@torch.no_grad()
def transformers_alone(model: Any, given: dict[str, torch.Tensor], items: Any) -> dict[str, Any]:
    ids, keep = given["input_ids"], given["input_ids"] != PAD
    if os.environ.get("SWIFT_RANKS_SHARE_A_ROW"):
        return shared_row(model, given)
    read = {key: given[key] for key in ("input_ids", "attention_mask", "position_ids") if key in given}
    padded = model(**read).logits
    rows = [ids[b, keep[b]] for b in range(len(ids))]
    alone = [model(input_ids=row[None]).logits[0] for row in rows]
    labels = [given["labels"][b, keep[b]] for b in range(len(ids))]
    return {
        "lengths": keep.sum(1).tolist(),
        "right": bool((keep[:, 0]).all()),
        "mask": told(given.get("attention_mask")),
        "error": max(far(padded[b, keep[b]], alone[b]) for b in range(len(ids))),
        "blind": max(far(model(input_ids=ids).logits[b, keep[b]], alone[b]) for b in range(len(ids))),
        "size": max(float(x.abs().max()) for x in alone),
        "alone_loss": shifted_loss(alone, labels) / float(items) if items is not None else None,
    }


def shared_row(model: Any, given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Sequence parallelism: this rank's logits of a row, gathered by hand, against the row without it."""
    from swift.sequence_parallel import sequence_parallel

    read = {key: given[key] for key in ("input_ids", "attention_mask", "position_ids") if key in given}
    local = model(**read).logits
    parts = [torch.empty_like(local) for _ in range(2)]
    torch.distributed.all_gather(parts, local.contiguous())
    keep = given["input_ids"] != PAD
    whole = torch.cat(parts, dim=1)[:, : keep.shape[1]]
    sequence_parallel.world_size = 1
    alone = model(**read).logits
    sequence_parallel.world_size = 2
    return {"error": far(whole[keep], alone[keep]), "size": float(alone[keep].abs().max())}


# --- Megatron


def believe_in_an_npu() -> None:
    """Until the checkpoint is saved, which would ask torch itself for one."""
    import transformers.utils
    from swift.megatron.trainers import MegatronTrainer

    held = [transformers.utils]
    for name, module in list(sys.modules.items()):
        if name.startswith(("swift.megatron", "mcore_bridge")) and "is_torch_npu_available" in vars(module):
            held.append(module)
    before = transformers.utils.is_torch_npu_available

    def say(there: Any) -> None:
        for module in held:
            module.is_torch_npu_available = there  # type: ignore[attr-defined]

    save = MegatronTrainer.save_checkpoint
    MegatronTrainer.save_checkpoint = lambda self: (say(before), save(self))[1]  # type: ignore[method-assign]
    say(lambda *args, **kwargs: True)


def watch_megatron() -> None:
    from swift.megatron.trainers import MegatronTrainer

    forward_step = MegatronTrainer.forward_step

    def watched(self: Any, data_iterator: Any, model: Any) -> Any:
        data, inner = next(data_iterator), self.unwrapped_models[0]
        raw = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in data.items()}
        hooks = Hooks(inner, ("self_attention",), ("attention_mask",))
        routers = Hooks(inner, ("mlp",), ("padding_mask",))
        states, handles = watch_states(inner)
        out = forward_step(self, iter([data]), model)
        hooks.remove(), routers.remove()
        for handle in handles:
            handle.remove()
        found = {"sent": {key: told(value) for key, value in raw.items()}, "layers": hooks.seen, "routers": routers.seen}
        found["states"] = states
        found |= {"trainer": type(self).__qualname__, "model": type(inner).__qualname__}
        record({**found, **megatron_alone(self, inner, raw)})
        return out

    MegatronTrainer.forward_step = watched


@torch.no_grad()
def megatron_alone(trainer: Any, model: Any, raw: dict[str, Any]) -> dict[str, Any]:
    ids, keep = raw["input_ids"], raw["input_ids"] != PAD
    rows = [ids[b, keep[b]] for b in range(len(ids))]
    alone = [logits(trainer, model, batch_of(row[None], torch.ones_like(row[None])))[0] for row in rows]
    sides = {"right": logits(trainer, model, {key: value for key, value in raw.items() if key != "channel"})}
    found = {"lengths": keep.sum(1).tolist(), "size": max(float(x.abs().max()) for x in alone)}
    found["error"] = max(far(sides["right"][b, keep[b]], alone[b]) for b in range(len(ids)))
    if os.environ.get("SWIFT_LEFT"):
        left = torch.stack([row.roll(int((~real).sum())) for row, real in zip(ids, keep)])
        kept = left != PAD
        padded = logits(trainer, model, batch_of(left, kept.long()))
        blind = logits(trainer, model, batch_of(left, kept.long()), states=False)
        found["left_error"] = max(far(padded[b, kept[b]], alone[b]) for b in range(len(ids)))
        found["left_blind"] = max(far(blind[b, kept[b]], alone[b]) for b in range(len(ids)))
    return found


def watch_states(model: torch.nn.Module) -> tuple[list[Any], list[Any]]:
    """What each recurrent layer works on: 1 where the input of its projection is not zero, `[B, S]`; and the hooks."""
    seen: list[Any] = []
    take = lambda module, given: seen.append(told(given[0].ne(0).any(-1)))  # noqa: E731
    parts = [
        part for name, part in model.named_modules() if name.endswith("linear_attn") or "GatedDelta" in type(part).__name__
    ]
    projections = [part.in_proj_qkvz for part in parts if hasattr(part, "in_proj_qkvz")]
    return seen, [projection.register_forward_pre_hook(take) for projection in projections]


def batch_of(ids: torch.Tensor, keep: torch.Tensor) -> dict[str, Any]:
    """As a collator of the user's own sends it: on either side, with one 2D mask."""
    positions = (keep.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": keep, "position_ids": positions}


def logits(trainer: Any, model: Any, batch: dict[str, Any], *, states: bool = True) -> torch.Tensor:
    """`states=False`: what the same model makes of the batch when its recurrent layers are told nothing."""
    from mcore_bridge.model.gpts import qwen3_next

    from collate_npu.integrations.megatron import mcore_bridge

    given = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    prepared = trainer._prepare_batch(given)
    resolve, zero = qwen3_next.resolve_gdn_attention_mask, mcore_bridge._zero_padding
    if not states:
        qwen3_next.resolve_gdn_attention_mask = lambda kwargs: None
        mcore_bridge._zero_padding = lambda keep, config, module, args: args
    try:
        return model(**{key: value for key, value in prepared.items() if key not in ("labels", "loss_scale", "channel")})
    finally:
        qwen3_next.resolve_gdn_attention_mask, mcore_bridge._zero_padding = resolve, zero


if os.environ.get("SWIFT_NPU"):
    believe_in_an_npu()
watch_megatron() if "swift.megatron" in sys.modules else watch_transformers()
