"""Loaders: batches as TransferQueue and tensordict hold them, as megatron-energon pads them, and rows of Megatron's indexed
datasets under torch's own collation.

Legend: B rows, S width.
"""

from typing import Any

import numpy as np
import torch
from drawing import ONE_SEQUENCE, SIDED, Draw
from from_collators import RIGHT, features_of
from producing import case, emitted, keep_2d, placed, producer, restarting
from torch.utils.data import default_collate
from verdicts import Case

TENSORDICT, ENERGON = ("tensordict",), ("megatron.energon",)


def padded(draw: Draw, *, form: str) -> Case:
    """A padded batch in a TensorDict: plain, locked, a lazy stack of its rows."""
    from tensordict import TensorDict, lazy_stack

    def held(batch: dict[str, Any]) -> Any:
        whole = TensorDict(batch, [len(draw.ids)])
        return {"plain": whole, "locked": whole.lock_(), "lazy": lazy_stack(list(whole))}[form]

    return case(draw, keep_2d(draw), told={"form": held})


def nested(draw: Draw, *, layout: torch.layout, held: bool) -> Case:
    """Rows that are not padded yet, ragged or equal, as `kv_batch_get` returns them."""
    rows = features_of(draw.rows())
    ids = torch.nested.as_nested_tensor([torch.tensor(row["input_ids"]) for row in rows], layout=layout)

    def in_tensordict(batch: dict[str, Any]) -> Any:
        from tensordict import TensorDict

        return TensorDict(batch, [len(rows)])

    told = {"ids": placed(draw.lengths, max(draw.lengths), "right"), "form": in_tensordict if held else dict}
    return emitted(draw, {"input_ids": ids}, features=rows, unpadded=True, **told)


def energon(draw: Draw) -> Case:
    """`generic_batch`: tensors of other lengths are padded behind with 0, and no key says so."""
    from megatron.energon.task_encoder.base import generic_batch

    rows = features_of(draw.rows())
    tensors = [{key: torch.tensor(value) for key, value in row.items()} for row in rows]
    batch = {"input_ids": generic_batch([row["input_ids"] for row in tensors])}
    return emitted(draw, batch, ids=placed(draw.lengths, batch["input_ids"].shape[1], "right"), features=rows)


def indexed(draw: Draw) -> Case:
    """`GPTDataset`'s keys without a mask: whole rows of tokens, labels that stand with the token before."""
    moved = torch.from_numpy(np.roll(draw.tokens, -1, 1))
    columns = {"tokens": torch.from_numpy(draw.tokens.copy()), "labels": moved, "loss_mask": torch.ones(draw.shape)}
    columns["position_ids"] = restarting(draw)
    rows = [{key: column[b] for key, column in columns.items()} for b in range(len(draw.ids))]
    return emitted(draw, default_collate(rows), features=rows)


PRODUCERS = [
    *(producer(f"loader: TensorDict, {form}", TENSORDICT, padded, ONE_SEQUENCE, form=form)
      for form in ("plain", "locked", "lazy")),
    *(producer(f"loader: {layout} rows{', TensorDict' * held}", TENSORDICT * held, nested, SIDED, "not padded yet",
               layout=layout, held=held) for layout in (torch.jagged, torch.strided) for held in (True, False)),
    producer("loader: Energon's own batch", ENERGON, energon, RIGHT),
    producer("loader: indexed tokens", (), indexed, ("none", "packed")),
]  # fmt: skip
