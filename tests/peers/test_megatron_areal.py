"""AReaL 1.0.4: the flat batches its Megatron engine makes, by its own functions, through `gpt_batch`.

The packages above those functions ask for launchers and inference servers, so only the files that pack, pad and call the
model are imported (utils/data.py, engine/megatron_utils/packed_context_parallel.py).
"""

import importlib
import importlib.util
import sys
import types

import pytest
import torch
from megatron_world import PAD, TEDotProductAttention, apart, build, outcome, samples

from collate_npu import PaddingCollator, Segments
from collate_npu.integrations.megatron import gpt_batch, packed_seq_params
from collate_npu.outputs import per_sequence
from collate_npu.parallel import ContextParallel

NEEDS = ("megatron", "areal", "colorlog", "uvloop", "torchdata", "numba")
pytestmark = pytest.mark.usefixtures("cpu")

ALIGN, PAGE = 4, 256
"""tp * cp * 2, and what the whole is padded to (utils/data.py:815)."""
ROWS = samples(7, 3, 6)


@pytest.fixture(scope="module")
def areal(cpu):
    """The two modules, imported past the `__init__` of their packages."""
    root = importlib.util.find_spec("areal").submodule_search_locations[0]
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "areal"}
    for name in ("areal", "areal.api", "areal.engine", "areal.engine.megatron_utils", "areal.infra", "areal.utils"):
        package = types.ModuleType(name)
        package.__path__ = ["/".join([root, *name.split(".")[1:]])]
        sys.modules[name] = package
    data = importlib.import_module("areal.utils.data")
    packed = importlib.import_module("areal.engine.megatron_utils.packed_context_parallel")
    yield types.SimpleNamespace(data=data, packed=packed)
    for name in [name for name in sys.modules if name.partition(".")[0] == "areal"]:
        del sys.modules[name]
    sys.modules.update(before)


def rollout():
    """What AReaL's workflows hand over: padded rows, 1 = real token."""
    batch = PaddingCollator(pad_token_id=PAD, consumer="transformers")(ROWS)
    keep = batch["attention_mask"]
    return {"input_ids": batch["input_ids"], "attention_mask": keep.long(), "loss_mask": keep.long()}


def micro_batch(areal, batch):
    """As `_prepare_mb_list` packs and aligns it (megatron_engine.py:2023-2110); beside it the real offsets."""
    flat = areal.data.pack_tensor_dict(areal.data.amend_position_ids(batch))
    padded, _, real, _ = areal.data.pad_packed_tensor_dict(flat, PAGE, seq_align_to=ALIGN)
    return padded, real


def alone(model):
    one = PaddingCollator(pad_token_id=PAD)
    return outcome(model, *(gpt_batch(one([row]), model) for row in ROWS))["logits"]


def test_the_offsets_are_those_that_areal_makes(areal):
    batch, _ = micro_batch(areal, rollout())
    ids, theirs = areal.packed.preprocess_packed_seqs_context_parallel(batch["input_ids"], batch["cu_seqlens"])
    model = build(attention=TEDotProductAttention, positions="rope")
    mine, _ = gpt_batch({"input_ids": ids, "cu_seqlens": batch["cu_seqlens"]}, model, padding_free=True)
    for name, value in vars(theirs).items():
        ours = getattr(mine["packed_seq_params"], name)
        assert torch.equal(ours, value) if isinstance(value, torch.Tensor) else ours == value, name
    truth = Segments([[*[1] * 7, 0, *[2] * 3, 0, *[3] * 6, 0, 0]])
    physical = packed_seq_params(truth, padding_counts=True)
    assert torch.equal(physical.cu_seqlens_q, theirs.cu_seqlens_q[:4])


def test_flat_rows_equal_samples_alone_with_real_offsets_beside_the_physical_ones(areal):
    batch, real = micro_batch(areal, rollout())
    model = build(attention=TEDotProductAttention, positions="rope", experts=True)
    row = {"input_ids": batch["input_ids"][None], "cu_seqlens_padded": batch["cu_seqlens"]}
    row["cu_seqlens"] = torch.cat([real, real[-1:]])  # the page is a sequence without a real token
    mine, truth = gpt_batch(row, model, padding_free=True)
    assert truth.lengths == ((7, 3, 6),)
    assert mine["packed_seq_params"].cu_seqlens_q.tolist() == [0, 7, 10, 16]
    assert mine["padding_mask"].sum() == PAGE - 16
    assert apart(per_sequence(model(**mine), truth), alone(model)) <= 1e-5
    cut, _ = gpt_batch(row, model, padding_free=True, context_parallel=ContextParallel(2, 0))
    assert cut["packed_seq_params"].cu_seqlens_q_padded.tolist() == [0, 8, 12, 20]
