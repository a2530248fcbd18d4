"""Commands and loaders on a pretended card, which holds tensors and pins memory but computes nothing: no card is no pass."""

import os
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from typed import typed

from benchmarks.operators import KERNELS, TRUTHS, of_kernel
from collate_npu import BatchAdapter, PaddingCollator
from collate_npu.proof.invariance import Reference
from collate_npu.testing import tiny_model
from collate_npu.tools.audit import Subject

pytestmark = pytest.mark.usefixtures("torch_npu")
EPOCHS = 10 if "COLLATE_NPU_NIGHTLY" in os.environ else 1
NO_CARD = "One and one is not two there"


def test_the_wheels_own_function_takes_our_calls(calls: list[dict[str, Any]]) -> None:
    """On the CPU, where the oracle stands behind the real operator's schema."""
    names = ("padded left", "window", "prefix", "packed rows", "chunks")
    truths = [truth for truth in TRUTHS if truth.name in names]
    (kernel,) = (kernel for kernel in KERNELS if kernel.name == "torch_npu.npu_fusion_attention")
    found = list(of_kernel(kernel, kernel.function("npu"), device="cpu", dtype=torch.float32, truths=truths))
    assert {run.state for run in found} == {"right"}, found
    assert len(calls) == len(found) > 20
    assert {call.get("sparse_mode", 0) for call in calls} == {0, 3, 4, 6}


def test_the_audit_refuses_a_device_that_does_not_compute() -> None:
    """There zeros would be compared with numbers, and every case would pass: it is said at once, and nothing is called."""
    pytest.importorskip("rich")
    result = typed("audit", "--model", "qwen3_5_text", "--device", "npu")
    assert result.exit_code == 2, result.output
    assert NO_CARD in " ".join(result.output.split())


ABOUT = {"model": "", "attention": "sdpa"}


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_5_text"])
def test_everything_the_audit_hands_the_model_is_where_the_model_is(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(model_type, vocab_size=64).to("npu:0")  # type: ignore[arg-type]
    assert {parameter.device for parameter in model.parameters()} == {torch.device("npu:0")}
    given: list[dict[str, Any]] = []

    def forward(**kwargs: Any) -> SimpleNamespace:
        given.append(kwargs)
        return SimpleNamespace(logits=torch.zeros(*kwargs["input_ids"].shape, 64).to("npu:0"))

    monkeypatch.setattr(model, "forward", forward)
    monkeypatch.setattr("collate_npu.proof.measure.check_noise", lambda *_: None)  # what the stand-in computes is no number
    samples = [{"input_ids": ids, "labels": ids} for ids in ([1, 2, 3], [4, 5, 6, 7, 8])]
    case = Subject(reference=Reference(model, [samples], gradients=False), model=model, pad_token_id=60, about=ABOUT)
    for side in ("left", "right"):
        case.ours(side)
    seen = [x for x in tree_leaves(given) if isinstance(x, torch.Tensor)]
    assert any("attention_mask" in call for call in given)
    assert {tensor.device for tensor in seen} == {torch.device("npu:0")}


class Rows(torch.utils.data.Dataset):
    def __init__(self, seed):
        draw = random.Random(seed)
        self.lengths = [draw.choice((1, 7, 300, 40_000 if n % 5 == 0 else 20)) for n in range(12)]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, n):
        return {"input_ids": torch.arange(self.lengths[n]) + n + 1}


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_pinned_batches_are_those_that_were_collated(start):
    """Workers of another start: a forked one would inherit the card."""
    collate = PaddingCollator(pad_token_id=0, padding_side="left", attention_mask="2d")
    adapter = BatchAdapter(needs_mask_2d=True, consumer="verl", device="npu")
    for seed in range(EPOCHS):
        rows = Rows(seed)
        loader = DataLoader(rows, 4, num_workers=2, collate_fn=collate, pin_memory=True, multiprocessing_context=start)
        wanted = [collate([rows[n] for n in range(at, at + 4)]) for at in range(0, 12, 4)]
        for batch, own in zip(loader, wanted, strict=True):
            assert batch.keys() == own.keys()
            assert all(page.is_pinned() and torch.equal(page, own[key]) for key, page in batch.items())
            moved = adapter(batch)["input_ids"]
            assert moved.device.type == "npu"
            assert torch.equal(moved.cpu(), own["input_ids"])
