"""A session: what raises whatever is handed over did not run; what a model has not is forgiven where others ran."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("rich")
from rich.console import Console

from collate_npu.testing import tiny_model
from collate_npu.tools.audit import candidates
from collate_npu.tools.audit.session import audit_all

pytestmark = pytest.mark.models


def audited(*models, **settings):
    asked = {
        "models": models, "data": None, "tokenizer": None, "sides": ["right"], "attentions": ["sdpa"], "device": "cpu",
        "dtype": "float32", "batch_size": 3, "batches": 1, "max_length": 48, "gradients": False, "tolerance": None,
        "seed": 0, "console": Console(quiet=True),
    }  # fmt: skip
    return audit_all(**{**asked, **settings})


def test_a_side_that_raises_whatever_is_handed_over_did_not_run(monkeypatch):
    """Seen: flex_attention on a CPU compiles some shapes and not others."""

    def built(*args, **settings):
        model = tiny_model(*args, **settings)
        forward = model.forward

        def no_flat_rows(use_cache=None, **kwargs):
            if use_cache is False:
                raise RuntimeError("does not compile")
            return forward(**kwargs)

        model.forward = no_flat_rows
        return model

    monkeypatch.setattr(candidates, "tiny_model", built)
    report = audited("llama", sides=["right", "packed"])
    assert report.not_run == {"llama (sdpa) packed": "RuntimeError: does not compile"}
    assert {f.side for f in report.findings} == {"right"}
    assert report.exit_code == 2


def test_an_attention_that_a_named_model_has_not_is_not_run_and_of_the_default_ones_left_out(monkeypatch):
    monkeypatch.setattr(candidates, "hybrid_model_types", lambda: ["qwen3_next", "llama"])
    monkeypatch.setattr("collate_npu.tools.audit.session.check_attentions", lambda *a, **k: None)
    report = audited("qwen3_next", attentions=["flex_attention"])
    assert "does not support" in report.not_run["qwen3_next (flex_attention)"]
    assert report.exit_code == 2
    monkeypatch.setattr("torch.compile", lambda function, **settings: function)
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr("transformers.integrations.flex_attention.WrappedFlexAttention._instance", None)
    report = audited(attentions=["flex_attention"])
    assert list(report.left_out) == ["qwen3_next (flex_attention)"]
    assert not report.not_run
    assert {f.model for f in report.findings} == {"llama"}
    assert report.yardsticks["llama (flex_attention)"].tells()
