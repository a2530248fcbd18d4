"""Batches that loaders and stacks hand to the library, recorded in `recorded.json`: every commit reads them, without the
package that made them.

The session of each package makes its batch anew (`remade`, `test_loaders` and others); `COLLATE_NPU_CELLS=1` writes it down.
No code of ours runs in these packages: what they hand over is all that a new release can change.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from collate_npu import BatchAdapter, CollateError, PaddingCollator, adapt, wrap_collator
from collate_npu.errors import UnsupportedFormError
from collate_npu.masks import segments_from_batch
from collate_npu.testing import tiny_model

FILE = Path(__file__).with_name("recorded.json")
RECORDS: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
LENGTHS = (4, 1, 7, 3)
SAMPLES = [
    {"number": n, "input_ids": [*range(10 + 20 * n, 10 + 20 * n + length)], "labels": [-100, *range(1, length)]}
    for n, length in enumerate(LENGTHS)
]
"""What each loader is given."""
ROWS = [sample["input_ids"] for sample in SAMPLES]


# --- a batch as JSON, with the types of its values


def encoded(value: Any) -> Any:
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        return {"torch": str(value.dtype)[6:], "nested" if value.is_nested else "dense": [row.tolist() for row in value]}
    if isinstance(value, np.ndarray):
        return {
            "numpy": str(value.dtype),
            "dense": [encoded(row) for row in value] if value.dtype == object else value.tolist(),
        }
    if kind == "TensorDict":
        return {"TensorDict": {key: encoded(each) for key, each in value.items()}, "size": [*value.batch_size]}
    if hasattr(value, "keys"):
        return {"dict": {key: encoded(value[key]) for key in value.keys() if not key.startswith("__")}}  # noqa: SIM118
    if isinstance(value, np.generic):
        return {"numpy": str(value.dtype), "dense": value.item()}
    return [encoded(each) for each in value] if isinstance(value, list) else value


def decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "TensorDict" in value:
        fields = {key: decoded(each) for key, each in value["TensorDict"].items()}
        return pytest.importorskip("tensordict").TensorDict(fields, value["size"])
    if "torch" in value:
        dtype = getattr(torch, value["torch"])
        if "nested" in value:
            rows = [torch.tensor(row, dtype=dtype) for row in value["nested"]]
            return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return torch.tensor(value["dense"], dtype=dtype)
    if "numpy" in value:
        return _array(value["numpy"], value["dense"])
    return {key: decoded(each) for key, each in value["dict"].items()}


def _array(dtype: str, held: Any) -> Any:
    if dtype != "object":
        return np.array(held, dtype)[()]
    made = np.empty(len(held), object)
    made[:] = [decoded(each) for each in held]
    return made


def remade(name: str, handed: Any, door: str = "collate", rows: Any = ROWS, refused: str = "") -> None:
    """Hold what a package handed over now against its record, or write it down."""
    made = {"door": door, "refused": refused} if refused else {"door": door, "rows": rows}
    made = json.loads(json.dumps(made | {"handed": encoded(handed)}))
    if "COLLATE_NPU_CELLS" in os.environ:
        RECORDS[name] = made
        lines = (f" {json.dumps(key)}: {json.dumps(RECORDS[key])}" for key in sorted(RECORDS))
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    assert RECORDS[name] == made


# --- the doors: the rows of real tokens that come out


def collate(handed: Any, rows: Any) -> list[list[int]]:
    """The collator, labels at their tokens."""
    batch = PaddingCollator(pad_token_id=1, padding_side="left", attention_mask="2d")(handed)
    keep = batch["attention_mask_2d"]
    if "labels" in batch:
        assert [row[real].tolist()[1:] for row, real in zip(batch["labels"], keep)] == [
            each["labels"][1:] for each in SAMPLES
        ]
        assert (batch["labels"][~keep] == -100).all()
    return [row[real].tolist() for row, real in zip(batch["input_ids"], keep)]


def read(handed: Any, rows: Any) -> list[list[int]]:
    batch = BatchAdapter(consumer="transformers", needs_mask_2d=True)(handed)
    return [row[real].tolist() for row, real in zip(batch["input_ids"], batch["attention_mask"].bool())]


@torch.no_grad()
def run(handed: Any, rows: Any) -> Any:
    """An adapted hybrid: the rows are right if each has the logits that it has alone."""
    model = tiny_model("qwen3_next", vocab_size=258)
    wanted = [model(input_ids=torch.tensor([row])).logits[0] for row in rows or []]
    with adapt(model):
        logits = model(**handed).logits
    assert (logits[0, : sum(map(len, rows))] - torch.cat(wanted)).abs().max() < 1e-4
    return rows


def wrap(handed: Any, rows: Any) -> list[list[int]]:
    """Rows of Megatron's datasets in torch's own collation, wrapped: its keys as they are, and nothing predicted across
    documents. A hybrid takes one in a row."""
    theirs, batch = default_collate(handed), wrap_collator(default_collate)(handed)
    segments = segments_from_batch(batch)
    last = torch.nn.functional.pad(segments.ids.diff() != 0, (0, 1))
    wanted = theirs | {"labels": theirs["labels"].masked_fill(last, -100)}
    wanted["loss_mask"] = theirs["loss_mask"].masked_fill(last, 0)  # Megatron's loss reads this, not -100
    assert all(batch[key].equal(wanted[key]) for key in ("tokens", "labels", "loss_mask", "position_ids"))
    hybrid = wrap_collator(default_collate, model_type="qwen3_next", consumer="megatron")
    if segments.packed:
        with pytest.raises(UnsupportedFormError, match="Give each sequence its own row"):
            hybrid(handed)
    else:
        assert (batch["attention_mask"], hybrid(handed)["attention_mask"]) == (None, None)
        assert batch["attention_mask_2d"].all()
    return [batch["tokens"][b, start:stop].tolist() for b, start, stop in segments.spans]


DOORS = {"collate": collate, "read": read, "run": run, "wrap": wrap}


@pytest.mark.parametrize("name", RECORDS)
def test_what_was_handed_over_is_read_whole_or_refused(name):
    record = RECORDS[name]
    handed, door, rows = decoded(record["handed"]), DOORS[record["door"]], record.get("rows")
    if rows:
        assert door(handed, rows) == rows
    else:
        with pytest.raises(CollateError, match=record["refused"]):
            door(handed, rows)


def test_labels_under_tokens_that_are_not_moved_lose_the_first_of_each_document():
    """torchtune's samples are named as Megatron's, and its recipes move the labels."""
    tokens, positions = torch.arange(10, 18), torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])
    rows = [{"tokens": tokens + 20 * n, "labels": tokens + 20 * n, "position_ids": positions} for n in range(2)]
    assert wrap_collator(default_collate)(rows)["labels"][0].tolist() == [10, 11, 12, -100, 14, 15, 16, 17]
