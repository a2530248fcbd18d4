"""Watch: each way to lose a fact between batch and kernel is found, and named where it happens; right runs have no fault."""

from contextlib import suppress

import pytest
import torch
import torch.utils.checkpoint
from stranger import Model
from torch import nn

from collate_npu import CollateError
from collate_npu.proof import watch

OFFSETS = torch.tensor([0, 6, 11, 16])
IDS = torch.arange(16)[None] % 60 + 1


def instead(*given):
    """What a faulty stack hands over, whatever was right."""
    return lambda right: torch.tensor(given).int() if given else None


NOTHING, SHIFTED, STALE, ONE = instead(), instead(0, 5, 11, 16), instead(0, 3, 9, 16), instead(0, 16)
SHORT, LENGTHS = instead(0, 6, 11), instead(6, 5, 5)
OTHER_NUMBERS, ONE_NUMBER = instead([0] * 5 + [1] * 6 + [2] * 5), instead([0] * 16)

PLANTED = {
    "rule told nothing": ({0: {"rule": NOTHING}}, "layers.0", "chunk_gated_delta_rule"),
    "rule shifted": ({0: {"rule": SHIFTED}}, "layers.0", "chunk_gated_delta_rule"),
    "rule of another batch": ({1: {"rule": STALE}}, "layers.1", "chunk_gated_delta_rule"),
    "rule of one sequence": ({1: {"rule": ONE}}, "layers.1", "chunk_gated_delta_rule"),
    "rule without the tail": ({0: {"rule": SHORT}}, "layers.0", "chunk_gated_delta_rule"),
    "lengths for offsets": ({0: {"rule": LENGTHS}}, "layers.0", "chunk_gated_delta_rule"),
    "convolution told nothing": ({0: {"seq_idx": NOTHING}}, "layers.0", "causal_conv1d_fn"),
    "convolution of other sequences": ({1: {"seq_idx": OTHER_NUMBERS}}, "layers.1", "causal_conv1d_fn"),
    "convolution of one sequence": ({1: {"seq_idx": ONE_NUMBER}}, "layers.1", "causal_conv1d_fn"),
    "attention of one sequence": ({2: {"attention": ONE}}, "layers.2", "flash_attn_varlen_func"),
    "attention of another batch": ({2: {"attention": STALE}}, "layers.2", "flash_attn_varlen_func"),
    "attention shifted": ({2: {"attention": SHIFTED}}, "layers.2", "flash_attn_varlen_func"),
    "a window nobody has": ({2: {"window": (2, 0)}}, "layers.2", "flash_attn_varlen_func"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_stack_nobody_knows(fault):
    faults, layer, kernel = PLANTED[fault]
    with watch(say=False) as seen, torch.no_grad():
        _run(Model(faults))
    assert {each.layer for each in seen.faults} == {layer}
    assert {each.kernel.rpartition(".")[2] for each in seen.faults} <= {kernel, "scaled_dot_product_attention"}


def _run(model):
    with suppress(ValueError, RuntimeError, IndexError, CollateError):  # a reference that refuses: what it was told is seen
        model(input_ids=IDS, cu_seqlens=OFFSETS)


def test_right_runs_have_no_fault():
    model = Model()
    with watch(say=False, steps=9) as seen:
        for offsets in ([0, 16], [0, 6, 11, 16], [0, 1, 2, 16], [0, 15, 16]):
            model(input_ids=IDS, cu_seqlens=torch.tensor(offsets))
    assert seen.faults == []
    assert all(forward.truth is not None for forward in seen.forwards)
    assert sum(seen.kernels.values()) == 4 * 5


class Unsaid(nn.Module):
    """Its batch says nothing of sequences: the kernels have one another alone."""

    def __init__(self, faults=()):
        super().__init__()
        self.model = Model(faults)

    def forward(self, tokens_and_offsets):
        return self.model(*tokens_and_offsets)


@pytest.mark.parametrize(
    "fault", ["rule told nothing", "convolution told nothing", "rule shifted", "attention of one sequence"]
)
def test_kernels_of_one_forward_against_one_another(fault):
    faults, layer, _ = PLANTED[fault]
    with watch(say=False) as seen, torch.no_grad():
        _run_unsaid(Unsaid(faults))
        right = Unsaid()
    assert {each.layer for each in seen.faults} == {f"model.{layer}"}
    assert "was told [0, 6, 11, 16]" in seen.faults[0].why
    with watch(say=False) as seen, torch.no_grad():
        _run_unsaid(right)
    assert seen.faults == []
    assert seen.forwards[0].beside()


def _run_unsaid(model):
    with suppress(ValueError, RuntimeError, CollateError):
        model((IDS, OFFSETS))


def test_computed_again_with_another_mask():
    model = Model()
    model.again = True
    with watch(say=False) as seen:
        model(IDS, OFFSETS).sum().backward()
    assert seen.faults == []
    assert sum(forward.again for forward in seen.forwards) == 3
    model = Model({0: {"seq_idx": lambda given: given if torch._C._current_graph_task_id() == -1 else OTHER_NUMBERS(given)}})
    model.again = True
    with watch(say=False) as seen:
        model(IDS, OFFSETS).sum().backward()
    assert [each.layer for each in seen.faults] == ["layers.0"]
    assert "computed again" in seen.faults[0].why


def test_nothing_seen_is_no_pass():
    with watch(say=False) as seen:
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert "NOTHING WAS SEEN" in seen.summary()


def test_stop_raises_behind_the_forward():
    with pytest.raises(CollateError, match=r"layers\.0"), watch(say=False, stop=True):
        Model({0: {"seq_idx": ONE_NUMBER}})(IDS, OFFSETS)


def test_an_error_of_the_model_is_its_own():
    class Broken(Model):
        def forward(self, input_ids, cu_seqlens):
            super().forward(input_ids, cu_seqlens)
            raise KeyError("mine")

    with watch(say=False) as seen, pytest.raises(KeyError, match="mine"):
        Broken()(IDS, OFFSETS)
    assert seen.forwards[0].calls
