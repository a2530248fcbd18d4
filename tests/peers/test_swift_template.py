"""ms-swift 4.6.0: what its real template sends, with `install()` and on its transformers backend."""

import pytest
import torch
from swift.template.base import Template
from swift_world import LENGTHS, arguments, collate, template
from torch.utils._python_dispatch import TorchDispatchMode

from collate_npu.integrations import swift

NEEDS = ("swift", "mcore_bridge", "megatron")

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.device.type != "meta":
            self.elements = max(self.elements, out.numel())
        return out


def shipped_bytes(batch):
    return sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("cp", [1, 2])
def test_no_worker_builds_or_ships_a_dense_mask(cp):
    args = arguments("qwen3_next", cp=cp)
    lengths = (512, 301, 17, 400)
    with Largest() as upstream:
        theirs = collate(args, *lengths)
    swift.install()
    try:
        with Largest() as wrapped:
            ours = collate(args, *lengths)
    finally:
        swift.uninstall()
    assert upstream.elements == 4 * 512 * 512
    assert wrapped.elements == 4 * 512
    assert shipped_bytes(theirs) == 4 * 512 * 512 + 4 * 4 * 512 * 8  # four int64 keys beside it
    assert shipped_bytes(ours) == 3 * 4 * 512 * 8 + 4 * 512  # three, and a 2D mask of bools
    assert theirs.keys() - ours.keys() == {"attention_mask"}
    for key in ours.keys() - {"attention_mask_2d"}:
        assert torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key])), key
    assert torch.equal(ours["attention_mask_2d"], ~theirs["attention_mask"][:, 0, -1])


@pytest.mark.parametrize("task", ["seq_cls", "embedding", "reranker"])
@pytest.mark.usefixtures("installed")
def test_other_tasks_templates_send_the_2d_mask_alone(task):
    made = template(task=task)
    rows = [{"input_ids": [5] * n, "labels": 1, "length": n} for n in LENGTHS]
    if task == "embedding":
        rows = [
            {f"{side}_{k}": v for side in ("anchor", "positive") for k, v in row.items() if k != "labels"} for row in rows
        ]
    if task == "reranker":
        rows = [{"input_ids": [row["input_ids"]], "labels": [1], "length": [row["length"]]} for row in rows]
    batch = made.data_collator(rows)
    assert "attention_mask" not in batch
    assert batch["attention_mask_2d"].sum(1).tolist() == [n for n in LENGTHS for _ in range(2 if task == "embedding" else 1)]


@pytest.mark.usefixtures("installed")
def test_tensors_of_a_template_of_your_own_keep_their_memory(monkeypatch):
    """Squares of bools too: only the mask that the template itself builds has none."""

    class Vision(Template):
        def _data_collator(self, batch, *, padding_to=None):
            mine = torch.ones((3, 4, 4), dtype=torch.bool)
            return {**super()._data_collator(batch, padding_to=padding_to), "mine": mine}

        def _data_collator_mm_data(self, batch):
            return {"pixel_values": torch.ones((3, 8, 8)), "seen": torch.ones((2, 7, 7), dtype=torch.bool)}

    made = template()
    monkeypatch.setattr(made, "__class__", Vision)
    rows = [{"input_ids": [5] * n, "labels": [5] * n, "length": n} for n in (7, 3)]
    batch = made.data_collator(rows)
    assert all(batch[key].device.type == "cpu" for key in ("mine", "pixel_values", "seen"))
    assert batch["pixel_values"].sum() == 192
    assert batch["attention_mask_2d"].sum(1).tolist() == [7, 3]
