"""`collate-npu audit --device npu`, as far as placement goes: the pretended device holds tensors and computes nothing."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from typed import typed

from collate_npu.testing import tiny_model
from collate_npu.tools.audit.case import audit

pytestmark = pytest.mark.usefixtures("torch_npu")


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
    list(audit(model, [[1, 2, 3], [4, 5, 6, 7, 8]], pad_token_id=60, gradients=False))
    assert any("attention_mask" in call for call in given)
    seen = [x for x in tree_leaves(given) if isinstance(x, torch.Tensor)]
    assert {tensor.device for tensor in seen} == {torch.device("npu:0")}


def test_the_command_line_refuses_a_device_that_does_not_compute() -> None:
    """On a pretended device every case would pass: the command says so instead, and exits with an error."""
    result = typed("audit", "--device", "npu", "--model", "qwen3_5_text")
    assert result.exit_code == 2
    assert "One and one is not two there" in result.output
