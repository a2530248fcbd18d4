"""Rows that ranks share: a stack is looked for by its module, and what its ranks do not exchange is refused."""

import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from collate_npu import adapt
from collate_npu.errors import CollateError, UnsupportedFormError
from collate_npu.testing import tiny_model

pytestmark = pytest.mark.models
SECOND = {"input_ids": torch.tensor([[3, 4, 5, 6]]), "position_ids": torch.tensor([[4, 5, 0, 1]])}
"""What the second of two ranks has of a row of 6 and 2 tokens."""
CASES = [("qwen3", "flash_attention_2"), ("qwen3", "sdpa"), ("qwen3_next", "sdpa"), ("qwen3_next", "flash_attention_2")]
TWO = {
    "openrlhf": ("openrlhf.models.ring_attn_utils", {"RING_ATTN_GROUP": SimpleNamespace(size=lambda: 2)}),
    "skyrl": ("skyrl.backends.skyrl_train.distributed.ulysses.utils",
              {"get_ulysses_sequence_parallel_world_size": lambda: 2}),
    "veomni": ("veomni.distributed.parallel_state", {"_PARALLEL_STATE": SimpleNamespace(ulysses_size=2)}),
}  # fmt: skip


@pytest.mark.parametrize("stack", TWO)
@pytest.mark.parametrize(("family", "attention"), CASES)
def test_a_part_of_a_row_passes_as_it_is_or_is_refused(stack, family, attention, monkeypatch):
    name, two = TWO[stack]
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**two))
    model, seen = tiny_model(family, vocab_size=61), []
    with adapt(model, attn_implementation=attention):
        model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
        if (family, attention) == CASES[0]:
            model(**SECOND)
            assert all(seen[0][key] is value for key, value in SECOND.items())
        else:
            with pytest.raises(UnsupportedFormError, match="2 ranks share each row"):
                model(**SECOND)


def test_offsets_must_be_those_of_the_whole_row_and_a_stack_that_is_not_used_shares_nothing(monkeypatch):
    state, model = SimpleNamespace(_PARALLEL_STATE=None), tiny_model("qwen3", vocab_size=61)
    monkeypatch.setitem(sys.modules, "veomni.distributed.parallel_state", state)
    with adapt(model):
        assert model(torch.tensor([[3, 4]]), torch.tensor([[1, 1]])).logits.shape == (1, 2, 61)
    state._PARALLEL_STATE = SimpleNamespace(ulysses_size=2)
    with adapt(model, attn_implementation="flash_attention_2"), pytest.raises(CollateError, match="The row has 8 tokens"):
        model(**SECOND, cu_seq_lens_q=torch.tensor([0, 6, 9]))
