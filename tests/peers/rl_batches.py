"""What stacks on Megatron hand to their model, rebuilt in lines of ours after sources that no package installs.

* slime 624b824 `slime/backends/megatron_utils/data.py:17-148`, `cp_utils.py:179-209`; vime 0696c9b and Relax 02c394d hand
  the same rows. `bshd` in those two and in miles 31f1ca9 `miles/backends/training_utils/data.py:124-330`.
* ROLL 8eb27cc `roll/distributed/strategy/megatron_strategy.py:312-605`, `mcore_adapter/.../model_factory.py:288-320`.
* MindSpeed-MM 57069cd `mindspeed_mm/mcore/models/qwen3_5/modeling_qwen3_5.py:411-460` (mcore), `mindspeed_mm/fsdp/data/
  data_utils/func_utils/{convert.py:955-990, collator.py:60-240}` (fsdp, packed).

A sample is its token ids; the response is its second half. Legend: B rows, S width, T tokens of a flat row.
"""

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

Rows = list[list[int]]


def part(row: Tensor, size: int, rank: int, width: int | None = None) -> Tensor:
    """A rank's two chunks of a sequence that is padded with zeros to twice as many."""
    if size == 1:
        return row if width is None else pad(row, (0, width - len(row)))
    chunk = -(-(width or len(row)) // (2 * size))
    chunks = pad(row, (0, 2 * size * chunk - len(row))).split(chunk)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def loss_of(row: list[int]) -> Tensor:
    """A response of half the sample, each token predicted from the one before it."""
    response = max(len(row) // 2, 1)
    return pad(torch.ones(response), (max(len(row) - response - 1, 0), 1))[-len(row) :]


def params_of(offsets: Tensor, padded: Tensor | None = None) -> Any:
    longest = int(offsets.diff().max())
    fields = {"qkv_format": "thd", "cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded}
    fields |= {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "max_seqlen_q": longest, "max_seqlen_kv": longest}
    try:
        from megatron.core.packed_seq_params import PackedSeqParams
    except ImportError:
        return SimpleNamespace(**fields)
    return PackedSeqParams(**fields)


def handed(ids: Tensor, params: Any, loss: Tensor, **more: Any) -> dict[str, Any]:
    """`model(**these)`: slime model.py:619-630."""
    bare = {"input_ids": ids, "position_ids": None, "attention_mask": None, "labels": None}
    return {**bare, "packed_seq_params": params, "loss_mask": loss, **more}


def slime(rows: Rows, *, size: int = 1, rank: int = 0, multiple: int = 16) -> dict[str, Any]:
    """One flat row of this rank's chunks; padding behind is one more sequence, and offsets are of all ranks together."""
    parts = [part(torch.tensor(row), size, rank) for row in rows]
    loss = torch.cat([part(loss_of(row), size, rank) for row in rows])
    ends = [0, *accumulate(map(len, parts))]
    if tail := -ends[-1] % multiple:
        ends.append(ends[-1] + tail)
    ids = pad(torch.cat(parts), (0, tail))[None]
    return handed(ids, params_of(torch.tensor(ends, dtype=torch.int32) * size), pad(loss, (0, tail))[None])


def roll_packed(rows: Rows, *, size: int = 1, rank: int = 0, multiple: int = 16) -> dict[str, Any]:
    """Each sequence padded to the multiple, the padded offsets in all four fields."""
    held = [-(-len(row) // multiple) * multiple for row in rows]
    whole = [pad(torch.tensor(row), (0, width - len(row))) for row, width in zip(rows, held)]
    loss = [pad(loss_of(row), (0, width - len(row))) for row, width in zip(rows, held)]
    offsets = torch.tensor([0, *accumulate(held)], dtype=torch.int32)
    flat = [torch.cat([part(row, size, rank) for row in each])[None] for each in (whole, loss)]
    return handed(flat[0], params_of(offsets, offsets), flat[1])


def mindspeed_mm_packed(rows: Rows, *, multiple: int = 16) -> dict[str, Any]:
    """Its fsdp example, packed: `cu_seqlens` `[1, N + 1]`, positions that begin again, and zeros of padding behind."""
    ids = torch.tensor([token for row in rows for token in row])
    tail = -len(ids) % multiple
    places = torch.cat([torch.arange(len(row)) for row in rows])
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), "position_ids": places}
    fills = {"labels": -100}
    batch = {key: pad(value, (0, tail), value=fills.get(key, 0))[None] for key, value in batch.items()}
    return {**batch, "cu_seqlens": torch.tensor([[0, *accumulate(map(len, rows))]])}
