"""What a command line names is checked before any model is built."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
from collate_npu import CollateError
from collate_npu.testing import byte_tokenizer
from collate_npu.tools.audit.candidates import candidates, check_device, check_models, load_tokenizer

pytestmark = pytest.mark.models


def test_all_unknown_names_are_refused_at_once(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CollateError) as error:
        check_models(["qwen3_next", "qwen3_nxt", str(tmp_path / "empty")])
    assert "qwen3_nxt" in str(error.value)
    assert "empty" in str(error.value)
    assert "Did you mean" in str(error.value)
    assert "qwen3_next" in str(error.value)


def test_model_types_and_checkpoints_are_known(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    check_models(["qwen3_next", "llama", str(tmp_path)])


@pytest.mark.parametrize("device", ["cuda:x", "nonsense", "cuda:99", "npu", "meta", ""])
def test_a_device_that_does_not_compute_is_refused(device):
    with pytest.raises(CollateError, match=r"Name a device of this machine|Run on a real device"):
        check_device(device, torch.float32)


def test_the_cpu_computes():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check_device("cpu", dtype)


def test_tokenizers(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "good")
    assert load_tokenizer(tmp_path / "good").pad_token_id is not None
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "tokenizer.json").write_text("{", encoding="utf-8")
    for name in ("bad", "absent"):
        with pytest.raises(CollateError, match="It does not load"):
            load_tokenizer(tmp_path / name)


def test_names_are_taken_as_they_are_and_the_default_leaves_out_what_cannot_be_tested():
    settings = {"tokenizer": None, "device": "cpu", "dtype": torch.float32, "seed": 0}
    chosen, excluded = candidates(["rwkv"], ["eager"], **settings)
    assert [(c.name, c.attn) for c in chosen] == [("rwkv", "eager")]
    assert excluded == {}
    chosen, excluded = candidates([], ["eager"], **settings)
    assert ("rwkv", "eager") in excluded
    assert "qwen3_next" in {c.name for c in chosen}
