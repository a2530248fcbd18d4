"""Watch: each way to lose a fact between batch and kernel is found, and named where it happens; right runs have no fault."""

from contextlib import suppress
from functools import wraps
from types import FunctionType, SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from stranger import Model
from torch import nn
from torch.overrides import TorchFunctionMode

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
    "offsets without the leading 0": ({0: {"rule": instead(6, 11, 16)}}, "layers.0", "chunk_gated_delta_rule"),
    "offsets that fall": ({0: {"rule": instead(16, 11, 6, 0)}}, "layers.0", "chunk_gated_delta_rule"),
    "offsets of a longer row": ({1: {"rule": instead(0, 6, 11, 20)}}, "layers.1", "chunk_gated_delta_rule"),
    "lengths for offsets": ({0: {"rule": LENGTHS}}, "layers.0", "chunk_gated_delta_rule"),
    "convolution told nothing": ({0: {"seq_idx": NOTHING}}, "layers.0", "causal_conv1d_fn"),
    "convolution of other sequences": ({1: {"seq_idx": OTHER_NUMBERS}}, "layers.1", "causal_conv1d_fn"),
    "convolution of one sequence": ({1: {"seq_idx": ONE_NUMBER}}, "layers.1", "causal_conv1d_fn"),
    "attention of one sequence": ({2: {"attention": ONE}}, "layers.2", "flash_attn_varlen_func"),
    "attention of another batch": ({2: {"attention": STALE}}, "layers.2", "flash_attn_varlen_func"),
    "attention shifted": ({2: {"attention": SHIFTED}}, "layers.2", "flash_attn_varlen_func"),
    "attention that looks ahead": ({2: {"causal": False}}, "layers.2", "flash_attn_varlen_func"),
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
    assert "4 forwards (4 compared with their batch)" in seen.summary()
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


def test_computed_again_with_another_mask(capsys):
    model = Model()
    model.again = True
    with watch(say=False) as seen:
        model(IDS, OFFSETS).sum().backward()
    assert seen.faults == []
    assert sum(forward.again for forward in seen.forwards) == 3
    with watch():
        model(IDS, OFFSETS).sum().backward()
    assert capsys.readouterr().err.count("step 0 rank 0") == 1  # what is right a second time is not said twice
    model = Model({0: {"seq_idx": lambda given: given if torch._C._current_graph_task_id() == -1 else OTHER_NUMBERS(given)}})
    model.again = True
    with watch(say=False) as seen:
        model(IDS, OFFSETS).sum().backward()
    assert [each.layer for each in seen.faults] == ["layers.0"]
    assert "computed again" in seen.faults[0].why


@pytest.mark.parametrize("change", [{"window": (2, 0)}, {"causal": False}])
def test_computed_again_with_another_width(change):
    model = Model()
    model.again = True
    model.layers[2].faults = Later(change)
    with watch(say=False) as seen:
        model(IDS, OFFSETS).sum().backward()
    assert [(each.layer, "computed again" in each.why) for each in seen.faults] == [("layers.2", True)]


class Later(dict):
    """What holds in the backward pass alone."""

    def get(self, name, default=None):
        return default if torch._C._current_graph_task_id() == -1 else super().get(name, default)


def test_nothing_seen_is_no_pass(capsys):
    with watch() as seen:
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert "NOTHING WAS SEEN" in seen.summary()
    assert seen.summary() in capsys.readouterr().err


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


@pytest.mark.parametrize("told", [(16, 11, 6, 0), (0, 6, 11, 20)])
def test_offsets_that_do_not_fit_need_no_batch(told):
    with watch(say=False) as seen, torch.no_grad():
        _run_unsaid(Unsaid({0: {"rule": instead(*told)}}))
    assert {each.layer for each in seen.faults} == {"model.layers.0"}
    assert "that are no offsets of its 16 tokens" in seen.faults[0].told


def test_holes_are_no_tokens_of_a_sequence():
    with watch(say=False) as seen:
        Unpadding(0, 3)(input_ids=IDS[:, :4], attention_mask=torch.tensor([[1, 1, 0, 1]]))
    assert seen.faults == []
    assert seen.forwards[0].truth is not None


class Two(nn.Module):
    """A policy and its reward model, on other rows, inside one module."""

    def __init__(self):
        super().__init__()
        self.policy, self.reward = Model(), Model({0: {"rule": SHIFTED}})

    def forward(self, input_ids, cu_seqlens):
        other = self.reward(input_ids=IDS.flip(1), cu_seqlens=torch.tensor([0, 6, 11, 16]))
        return self.policy(input_ids=input_ids, cu_seqlens=cu_seqlens) + other.mean()


def test_a_model_within_another_has_a_batch_of_its_own():
    with watch(say=False) as seen:
        Two()(IDS, torch.tensor([0, 4, 16]))
    assert {each.layer for each in seen.faults} == {"reward.layers.0"}
    assert len(seen.forwards) == 2


class Unpadding(nn.Module):
    """A stack that takes padding out of its rows, and hands its model offsets."""

    def __init__(self, *offsets):
        super().__init__()
        self.model, self.offsets = Model(), torch.tensor(offsets)

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids[attention_mask.bool()][None], cu_seqlens=self.offsets)


def test_rows_without_their_padding_are_the_batchs():
    keep = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]])
    with watch(say=False) as seen:
        Unpadding(0, 3, 7, 9)(input_ids=IDS[:, :12].reshape(3, 4), attention_mask=keep)
    assert seen.faults == []
    assert len(seen.forwards) == 1
    for wrong in ((0, 4, 8, 9), (0, 9)):
        with watch(say=False) as seen:
            Unpadding(*wrong)(input_ids=IDS[:, :12].reshape(3, 4), attention_mask=keep)
        assert len(seen.faults) == 5


@pytest.mark.parametrize("kept", ["named", "once", "twice", "by a layer"])
def test_a_kernel_that_a_function_around_it_keeps(kept, monkeypatch):
    import stranger

    model, right = Model(), stranger.chunk_gated_delta_rule

    def lossy(*args, cu_seqlens=None):
        return right(*args)

    def by_layer(*args, cu_seqlens=None):
        return model.layers[0].rule(*args)

    model.layers[0].rule = FunctionType(right.__code__, right.__globals__, argdefs=(None,)) if kept == "by a layer" else None
    ways = {"named": wraps(right)(lossy), "once": lossy, "twice": lambda *args, **kwargs: lossy(*args, **kwargs)}
    monkeypatch.setattr(stranger, "chunk_gated_delta_rule", ways.get(kept, by_layer))
    with watch(say=False) as seen:
        model(IDS, OFFSETS)
    assert {each.kernel for each in seen.faults} == {"stranger.chunk_gated_delta_rule"}
    assert {each.told for each in seen.faults} == {"nothing"}


def test_what_a_run_put_in_place_of_a_kernel_stays():
    import stranger

    right = stranger.chunk_gated_delta_rule

    def mine(*args, **kwargs):
        return right(*args, **kwargs)

    try:
        with watch(say=False):
            Model()(IDS, OFFSETS)
            stranger.chunk_gated_delta_rule = mine
        assert stranger.chunk_gated_delta_rule is mine
    finally:
        stranger.chunk_gated_delta_rule = right


class Told(TorchFunctionMode):
    """Which functions torch says are called."""

    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.functions.append(function)
        return function(*args, **(kwargs or {}))


def test_a_function_mode_is_told_the_function_itself():
    x, attends, convolves = torch.ones(1, 2, 3, 4), nn.functional.scaled_dot_product_attention, torch.conv1d
    with watch(say=False), Told() as told:
        nn.functional.scaled_dot_product_attention(x, x, x)
        nn.functional.conv1d(x[0], torch.ones(3, 1, 1), groups=3)
    assert attends in told.functions
    assert convolves in told.functions


def test_scripted_and_compiled_code_means_the_function_itself():
    def attends(q):
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    q = torch.randn(1, 1, 4, 8)
    with watch(say=False):
        assert torch.jit.script(attends)(q).shape == q.shape
        assert torch.compile(attends, backend="eager", fullgraph=True)(q).shape == q.shape
    torch._dynamo.reset()
    assert torch.compile(attends, backend="eager", fullgraph=True)(q).shape == q.shape


# --- ranks that share a flat row


class TEDotProductAttention(nn.Module):
    """As Megatron's: a rank's queries, and offsets of the whole row."""

    def __init__(self, ranks):
        super().__init__()
        self.config = SimpleNamespace(context_parallel_size=ranks)

    def forward(self, query, key, packed_seq_params):
        return query


class Sharing(nn.Module):
    def __init__(self, ranks):
        super().__init__()
        self.embed, self.core_attention = nn.Embedding(64, 4), TEDotProductAttention(ranks)

    def forward(self, input_ids, packed_seq_params):
        x = self.embed(input_ids)[0][:, None]
        return self.core_attention(x, x, packed_seq_params=packed_seq_params)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_offsets_of_the_whole_row_are_no_fault_where_two_ranks_share_it(ranks):
    params = SimpleNamespace(qkv_format="thd", cu_seqlens_q=2 * OFFSETS, cu_seqlens_kv=2 * OFFSETS)
    with watch(say=False) as seen:
        Sharing(ranks)(input_ids=IDS, packed_seq_params=params)
    assert [fault.why for fault in seen.faults] == ["they begin at 0, never fall, and end with its tokens"] * (ranks != 2)
