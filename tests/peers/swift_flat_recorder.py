"""A second `--external_plugins` file for flat rows on Megatron: what reached the recurrent layers, and each sample alone.

fla's kernels and the flash kernel are stand-ins; the offsets they are handed go to one JSON a rank in `$SWIFT_RECORD`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from gpt_on_cpu import attend, rows_of
from mcore_bridge.model.modules import gated_delta_net as native
from megatron.core.transformer.dot_product_attention import DotProductAttention
from swift.megatron.trainers import MegatronTrainer

from collate_npu.kernels.gated_delta import reference_causal_conv1d, reference_gated_delta_rule

SEEN: list[Any] = []
STEPS: list[dict[str, Any]] = []


def convolution(x: torch.Tensor, weight: torch.Tensor, *, cu_seqlens: Any = None, **given: Any) -> Any:
    SEEN.append([None if cu_seqlens is None else cu_seqlens.tolist(), x.shape[1]])
    return reference_causal_conv1d(x, weight, cu_seqlens=cu_seqlens, **given), None


def attention(original: Any, self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    params = kwargs.pop("packed_seq_params", None)
    if params is None:
        return original(self, query, key, value, *args, **kwargs)
    key, value = (x.repeat_interleave(query.shape[-2] // x.shape[-2], dim=-2) for x in (key, value))
    return torch.cat([attend(*row) for row in rows_of(params, query, key, value)])


def watched(forward_step: Any, self: Any, data_iterator: Any, model: Any) -> Any:
    data, inner = next(data_iterator), self.unwrapped_models[0]
    raw = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in data.items()}
    SEEN.clear()
    out = forward_step(self, iter([data]), model)
    step = {"reached": SEEN[0], "layers": len(SEEN), "lengths": list(raw["seq_lens"]), "width": raw["input_ids"].shape[1]}
    STEPS.append(step | alone(self, inner, raw))
    Path(os.environ["SWIFT_RECORD"], f"rank{os.environ.get('RANK', 0)}.json").write_text(json.dumps({"steps": STEPS}))
    return out


@torch.no_grad()
def alone(trainer: Any, model: Any, raw: dict[str, Any]) -> dict[str, Any]:
    """The flat row again, as the trainer prepares it, and each sample by itself without us."""
    prepared = trainer._prepare_batch({key: value for key, value in raw.items() if key != "channel"})
    starts = prepared["packed_seq_params"].cu_seqlens_q.tolist()
    given = {key: value for key, value in prepared.items() if key not in ("labels", "loss_scale", "channel")}
    flat, errors = model(**given)[0], []
    for start, length in zip(starts, raw["seq_lens"]):
        ids = raw["input_ids"][:, start : start + length]
        row = model(input_ids=ids, position_ids=torch.arange(length)[None], attention_mask=None)[0]
        errors.append(float((flat[start : start + length] - row).abs().max()))
    return {"errors": errors, "starts": starts}


native.causal_conv1d, native.chunk_gated_delta_rule = convolution, reference_gated_delta_rule
for _owner, _name, _ours in ((DotProductAttention, "forward", attention), (MegatronTrainer, "forward_step", watched)):
    _original = getattr(_owner, _name)
    setattr(_owner, _name, lambda *args, _o=_original, _f=_ours, **kwargs: _f(_o, *args, **kwargs))
assert "swift.megatron" in sys.modules
