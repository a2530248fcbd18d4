"""A plain Accelerate loop in two real processes (torchrun, gloo), the dispatcher among its ways to share batches out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from accelerate.utils import concatenate, find_batch_size, slice_tensors

from collate_npu import CollateError, PaddingCollator
from collate_npu.integrations.accelerate import DispatchCollator, dispatch_problems
from collate_npu.testing import byte_tokenizer, hybrid_model_types, tiny_model
from collate_npu.tools.audit.data import shipped_text
from collate_npu.tools.audit.samples import sample_ids

NO_QWEN3_5 = "qwen3_5_text" not in hybrid_model_types()
LOOP = Path(__file__).with_name("accelerate_loop.py")
ROOT = LOOP.parents[2]
FEATURES = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8], "labels": [8]}]


def run_loop(*args):
    """The report of the first of two processes; all of them are ended when one hangs."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*torchrun, str(LOOP), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, err[-3000:]
    (line,) = [line for line in out.splitlines() if line.startswith("REPORT ")]
    return json.loads(line.removeprefix("REPORT "))


def losses_alone(name, ids):
    model = tiny_model(name, vocab_size=257)
    losses = []
    with torch.no_grad():
        for row in ids:
            tokens = torch.tensor([row])
            logits = model(input_ids=tokens).logits[0, :-1]
            losses.append(float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum")))
    return losses


@pytest.mark.parametrize(
    ("name", "side", "mode"),
    [
        ("qwen3_next", "left", "dispatch"),
        pytest.param("qwen3_5_text", "left", "shard", marks=pytest.mark.skipif(NO_QWEN3_5, reason="not in this release")),
        ("qwen3_next", "right", "split"),
    ],
)
def test_two_processes_share_the_batches_and_lose_no_mask(name, side, mode):
    ids = sample_ids(shipped_text(), byte_tokenizer(), count=8, max_length=48)
    report = run_loop(name, side, mode)
    alone = losses_alone(name, ids)
    assert report["world"] == 2
    assert sorted(report["lengths"]) == sorted(map(len, ids))
    assert report["losses"] == pytest.approx([sum(alone[:4]), sum(alone[4:])], rel=1e-5)
    assert report["received"]
    assert all(report["received"])


def test_the_batch_survives_concatenate_slice_and_find_batch_size():
    collator = DispatchCollator(PaddingCollator(pad_token_id=0, padding_side="left", attention_mask="omit"))
    batch = collator(FEATURES)
    assert find_batch_size(batch) == 2
    both = concatenate([batch, batch])
    for key, value in slice_tensors(both, slice(2, 4)).items():
        assert torch.equal(value, batch[key])


def test_the_neutral_form_survives_too_where_none_is_not_exact():
    batch = DispatchCollator(PaddingCollator(pad_token_id=0, padding_side="left"))(FEATURES)
    assert batch["attention_mask"].shape == (2, 1, 3, 3)
    assert concatenate([batch, batch])["attention_mask"].shape == (4, 1, 3, 3)


def test_none_alone_breaks_the_dispatcher():
    """Why DispatchCollator is there; the day accelerate carries None, this test says so."""
    batch = PaddingCollator(pad_token_id=0)(FEATURES)
    assert batch["attention_mask"] is None
    with pytest.raises(TypeError, match="NoneType"):
        concatenate([batch, batch])


def test_what_accelerate_cannot_carry_is_named():
    features = [{**feature, "name": "a"} for feature in FEATURES]
    with pytest.raises(CollateError, match="name is a list"):
        DispatchCollator(PaddingCollator(pad_token_id=0))(features)
    flat = PaddingCollator(padding_free=True)(FEATURES)
    assert set(dispatch_problems(flat)) == {
        "attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_lens",
    }  # fmt: skip


def test_a_none_mask_is_left_out_and_the_rest_survives():
    batch = DispatchCollator(PaddingCollator(pad_token_id=0))(FEATURES)
    assert "attention_mask" not in batch
    assert batch["attention_mask_2d"].tolist() == [[True] * 3, [True, False, False]]
    assert len(concatenate([batch, batch])["input_ids"]) == 4
