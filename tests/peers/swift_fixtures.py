"""Fixtures and batches of the test_swift files: `pytest_plugins = "swift_fixtures"`; skipped where a peer is missing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]
for _name in ("swift", "mcore_bridge", "megatron"):
    if importlib.util.find_spec(_name) is None:
        pytest.skip(f"{_name} is not installed", allow_module_level=True)

import te_stub  # noqa: E402, F401

# isort: split  (the stand-ins stand before mcore_bridge and swift.megatron are imported)
import torch  # noqa: E402
from mcore_bridge.model import MultimodalGPTModel  # noqa: E402
from mcore_bridge.model.gpts.qwen3_next import Qwen3NextGatedDeltaNet  # noqa: E402
from mcore_bridge.model.modules import TransformerLayer  # noqa: E402
from swift.megatron.trainers import base, utils  # noqa: E402
from swift.template.base import Template  # noqa: E402
from swift_world import PAD, World, collate  # noqa: E402

from collate_npu import Segments, dense  # noqa: E402
from collate_npu.integrations import swift  # noqa: E402

LENGTHS = (7, 3, 5)
LOCAL = {"attention_backend": "local", "masked_softmax_fusion": False}
"""The kernels that read a dense mask."""
KINDS = ("template", "2d", "4d masked", "4d keep", "4d additive", "2d beside 4d")


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


@pytest.fixture
def installed(nothing_left_behind):
    swift.install()
    yield
    swift.uninstall()


@pytest.fixture
def nothing_left_behind():
    watched = [
        (Template, "_data_collator"),
        (utils, "prepare_batch"),
        (base, "prepare_batch"),
        (base.BaseMegatronTrainer, "get_last_tokens"),
        (MultimodalGPTModel, "forward"),
        (TransformerLayer, "forward"),
        (Qwen3NextGatedDeltaNet, "__init__"),
    ]
    before = [getattr(owner, name) for owner, name in watched]
    yield
    assert [getattr(owner, name) for owner, name in watched] == before


def as_kind(args, kind, lengths=LENGTHS, side="right"):
    """A batch as some collator sends it, and the truth of it."""
    if kind == "template":
        data = collate(args, *lengths)
        return data, Segments.from_lengths(lengths, data["input_ids"].shape[1])
    width = -(-max(lengths) // 4) * 4
    truth = Segments.from_lengths(lengths, width, side)
    ids = torch.where(truth.keep, torch.arange(truth.ids.numel()).view(truth.shape) % 200 + 3, PAD)
    data = {"input_ids": ids, "labels": torch.where(truth.keep, ids, -100), "position_ids": truth.position_ids.clone()}
    polarity = {"4d keep": "keep", "4d additive": "bias"}.get(kind, "masked")
    if "4d" in kind:
        data["attention_mask"] = dense(truth, polarity=polarity)
    if kind == "2d":
        data["attention_mask"] = truth.keep.long()
    if kind == "2d beside 4d":
        data["attention_mask_2d"] = truth.keep.long()
    return data, truth
