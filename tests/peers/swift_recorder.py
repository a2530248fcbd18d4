"""A second `--external_plugins` file: what the model and its layers received inside the process that ms-swift started.

One JSON a rank goes to `$SWIFT_RECORD`. Padded samples are run again alone, by the same model, in the same process. Truth is
told by the ids: the pad token stands in no text.
"""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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


@contextmanager
def hooked(model: torch.nn.Module, endings: tuple[str, ...], key: str) -> Iterator[dict[str, Any]]:
    """What each module whose name ends so received under this keyword, in its first call."""
    seen: dict[str, Any] = {}
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name.endswith(endings):
                note = lambda module, args, given, name=name: (  # noqa: E731
                    seen.setdefault(f"{name}: {type(module).__name__}", told(given.get(key))) and None
                )
                hooks.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
        yield seen


def record(step: dict[str, Any]) -> None:
    STEPS.append(step)
    Path(os.environ["SWIFT_RECORD"], f"rank{os.environ.get('RANK', 0)}.json").write_text(json.dumps({"steps": STEPS}))


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float("inf") if a.shape != b.shape or not a.isfinite().all() else float((a - b).abs().max())


def watch_megatron() -> None:
    from swift.megatron.trainers import MegatronTrainer

    forward_step = MegatronTrainer.forward_step

    def watched(self: Any, data_iterator: Any, model: Any) -> Any:
        data, inner = next(data_iterator), self.unwrapped_models[0]
        raw = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in data.items()}
        layers, routers = hooked(inner, ("self_attention",), "attention_mask"), hooked(inner, ("mlp",), "padding_mask")
        with layers as masks, routers as padding:
            out = forward_step(self, iter([data]), model)
        found = {"sent": {key: told(value) for key, value in raw.items()}, "layers": masks, "routers": padding}
        record({**found, "trainer": type(self).__qualname__, **megatron_alone(self, inner, raw)})
        return out

    MegatronTrainer.forward_step = watched


@torch.no_grad()
def megatron_alone(trainer: Any, model: Any, raw: dict[str, Any]) -> dict[str, Any]:
    ids, keep = raw["input_ids"], raw["input_ids"] != PAD
    alone = [logits(trainer, model, batch_of(ids[b, keep[b]][None]))[0] for b in range(len(ids))]
    padded = logits(trainer, model, {key: value for key, value in raw.items() if key != "channel"})
    error = max(far(padded[b, keep[b]], alone[b]) for b in range(len(ids)))
    return {"lengths": keep.sum(1).tolist(), "error": error}


def batch_of(ids: torch.Tensor) -> dict[str, Any]:
    """One row without padding, as a collator of the user's own sends it, with one 2D mask."""
    positions = torch.arange(ids.shape[1])[None]
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids), "position_ids": positions}


def logits(trainer: Any, model: Any, batch: dict[str, Any]) -> torch.Tensor:
    given = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    prepared = trainer._prepare_batch(given)
    return model(**{key: value for key, value in prepared.items() if key not in ("labels", "loss_scale", "channel")})


watch_megatron()
