"""Context parallelism under audit, between two real ranks: ours is right, left padding is not, a lost rank is told."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("rich")
from rich.console import Console

from collate_npu import CollateError
from collate_npu.tools.audit.session import audit_all
from collate_npu.tools.audit.sharded import audit_sharded, check_ranks

pytestmark = pytest.mark.models


def audited(*models, plugins=(), seconds=300.0, **settings):
    asked = {
        "models": models, "data": None, "tokenizer": None, "sides": ["right"], "attentions": ["sdpa"], "device": "cpu",
        "dtype": "float32", "batch_size": 3, "batches": 1, "max_length": 48, "gradients": True, "tolerance": None, "seed": 0,
        "console": Console(quiet=True), "ranks": 2, "plugins": plugins, "seconds": seconds,
    }  # fmt: skip
    report = audit_all(**{**asked, **settings})
    return report, {(f.model, f.column): f for f in report.findings if f.side == "cp 2"}


def test_two_ranks_give_the_numbers_of_each_sample_alone_and_a_wrong_shard_is_exit_code_1(monkeypatch):
    """That right shards alone are exit code 0 is in test_cli."""
    monkeypatch.setenv("BROKEN_RANK", "pads left")
    report, found = audited("llama", "qwen3_next", plugins=["broken_rank"])
    for column in ("accelerate", "Trainer"):
        assert found["llama", column].right
        assert found["llama", column].gradient < 1e-5
        assert found["qwen3_next", column].refused
        assert "without the state of the tokens before it" in found["qwen3_next", column].note
    assert found["llama", "Trainer, left"].right is False
    assert found["llama", "Trainer, left"].logits > 1
    assert found["llama", "Trainer, left"].gradient > 0.1
    assert report.yardsticks["llama (sdpa) cp 2"].tells()
    assert found["llama", "broken"].right is False
    assert found["llama", "broken"].ours
    assert report.exit_code == 1


def test_a_rank_that_hangs_is_told_in_time_and_is_exit_code_2(monkeypatch):
    monkeypatch.setenv("BROKEN_RANK", "hangs")
    report, found = audited("llama", plugins=["broken_rank"], seconds=5.0, gradients=False)
    assert not found
    assert "1 within 5 s" in report.not_run["llama (sdpa) cp 2"]
    assert report.exit_code == 2
    assert any(f.right for f in report.findings)  # what ran in one process is kept


@pytest.mark.parametrize(
    ("device", "attentions", "held", "said"),
    [
        ("cpu", ["eager"], 0, "reads sdpa alone"),
        ("cuda", ["sdpa"], 1, "1 of cuda are here.*at most 1"),
        ("mps", ["sdpa"], 4, "gloo, nccl, hccl"),
    ],
)
def test_ranks_without_a_device_or_with_another_attention_are_refused(monkeypatch, device, attentions, held, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: held)
    with pytest.raises(CollateError, match=said):
        check_ranks(2, device, attentions)
    check_ranks(2, "cpu", ["eager", "sdpa"])


def test_a_refusal_starts_no_process(monkeypatch):
    from collate_npu.tools.audit.candidates import Candidate

    monkeypatch.setattr("collate_npu.tools.audit.sharded.together", lambda *a, **k: pytest.fail("processes were started"))
    candidate = Candidate(name="bamba", attn="sdpa", tokenizer=None, device="cpu", dtype=torch.float32, seed=0)
    found, yardstick = audit_sharded(candidate, {}, size=2, batch_size=2, gradients=True, seconds=1.0, plugins=[])
    assert {f.column for f in found} == {"accelerate", "Trainer"}
    assert all(f.refused and f.ours for f in found)
    assert yardstick is None
