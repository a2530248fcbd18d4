"""ms-swift's pooling: which token of each row is the last one, told by the batch that is pooled and by no other.

A trainer's loss reads the mask out of its own batch with `data.get("attention_mask")`, or `data.get("attention_mask_2d")`
where that is None, and hands it to `get_last_tokens` (4.6.0 megatron/trainers/trainer.py:149). Legend: B batch, S width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from collate_npu.errors import CollateError, explain, explain_rows, shape_of
from collate_npu.keys import KEEP_KEY
from collate_npu.segments import Segments


class PooledBatch(dict[str, Any]):
    """`model(**batch)` and `batch[key]` give what the model reads: None, or this rank's part; `batch.get` of either mask the
    whole rows, bool `[B, S]`, True = real: on one rank of several, pooling gathers the output first."""

    def __init__(self, batch: Mapping[str, Any], keep: Tensor) -> None:
        super().__init__(batch)
        self._keep = keep

    def get(self, key: str, default: Any = None) -> Any:
        return self._keep if key in ("attention_mask", KEEP_KEY) else super().get(key, default)


def get_last_tokens(
    original: Any, trainer: Any, output_tensor: Tensor, packed_seq_params: Any = None, attention_mask: Any = None
) -> Any:
    """Pool by the mask that is given: bool or int `[B, S]` of whole rows, each with a real token."""
    if packed_seq_params is None:
        ranks = trainer.args.context_parallel_size
        attention_mask = _whole_rows(attention_mask, output_tensor, ranks).to(output_tensor.device)
    return original(trainer, output_tensor, packed_seq_params, attention_mask)


def _whole_rows(mask: Any, output: Tensor, ranks: int) -> Tensor:
    B, S = output.shape[0], output.shape[1] * ranks
    if not isinstance(mask, Tensor) or mask.shape != (B, S):
        got = "no mask" if mask is None else shape_of(mask)
        rule = f"A 2D mask of the whole rows names their last tokens; this output has {B} rows of {S} ({ranks} ranks)."
        remedy = "Pass the attention_mask_2d of the same batch, unsplit; data.get('attention_mask') gives it."
        raise CollateError(explain("get_last_tokens", got, rule, remedy))
    keep: Tensor = mask != 0
    if empty := (~keep.any(dim=1)).nonzero().flatten().tolist():
        rows, rule = [(b, "padding alone") for b in empty], "A row without tokens has no last one."
        raise CollateError(explain_rows("get_last_tokens", rows, rule, "Drop those rows."))
    return keep


def pooled(args: Any, batch: dict[str, Any], segments: Segments) -> dict[str, Any]:
    """The batch as it is for token losses; one that knows its whole rows for every task that pools."""
    if args.task_type == "causal_lm":
        return batch
    device = next(value.device for value in batch.values() if isinstance(value, Tensor))
    return PooledBatch(batch, segments.keep.to(device))
