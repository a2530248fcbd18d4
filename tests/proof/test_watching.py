"""Watch: each way to lose a fact between batch and kernel is found, and named where it happens; right runs have no fault."""

import json
import sys
from contextlib import suppress
from functools import wraps
from importlib import import_module
from types import FunctionType, ModuleType, SimpleNamespace

import pytest
import stranger
import torch
import torch.utils.checkpoint
from stranger import Model
from torch import nn
from torch.overrides import TorchFunctionMode
from toys import IDS, OFFSETS, Two, planted

from collate_npu import BatchAdapter, CollateError, Segments
from collate_npu.proof import delivery, watch

ONE_NUMBER, OTHER_NUMBERS = planted([0] * 16), planted([0] * 5 + [1] * 6 + [2] * 5)


def test_the_block_of_a_forward_says_each_kind_of_kernel_once(capsys):
    """The convolution got the sequences, the rule did not (THUDM/slime, pull request 1686)."""
    with watch() as seen:
        Model({n: {"rule": lambda right: None} for n in (0, 1)})(input_ids=IDS, cu_seqlens=OFFSETS)
    told, right = capsys.readouterr().err.splitlines()[0].partition(" · ")[2], "[0, 6, 11, 16]"
    assert told == f"2 recurrent: convolution {right} ✔ · rule nothing ✘ · 1 attention: {right} ✔ · positions not checked"
    assert {fault.layer for fault in seen.faults} == {"layers.0", "layers.1"}


def windowed(**config):
    model = Model({2: {"window": (2, 0)}})
    model.config = SimpleNamespace(**config)
    return model


class MaskedAttention(nn.Module):
    """One kernel that has a mask, and one whose keys are other tokens, which is not read."""

    def __init__(self, allowed):
        super().__init__()
        self.allowed = allowed[:, None]

    def forward(self, input_ids=None, attention_mask=None):
        x = torch.ones(len(self.allowed), 1, self.allowed.shape[-1], 4)
        nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=self.allowed)
        return nn.functional.scaled_dot_product_attention(x, x[:, :, 1:], x[:, :, 1:])


KEEP = torch.tensor([[1, 1, 1], [1, 1, 0]])
PAST = torch.ones(3, 3).tril().bool() & KEEP.bool()[:, None]
AHEAD = PAST | torch.tensor([0, 0, 1]).bool() & torch.tensor([[[1], [0], [0]], [[0], [0], [0]]]).bool()


class Unsaid(nn.Module):
    """Its batch says nothing of sequences: the kernels have one another alone."""

    def __init__(self, faults=(), indexer=False):
        super().__init__()
        self.model = Model(faults)
        if indexer:
            self.model.layers[2].indexer = nn.Identity()

    def forward(self, tokens_and_offsets):
        return self.model(*tokens_and_offsets)


class Unpadding(nn.Module):
    """A stack that takes padding out of its rows, and hands its model offsets."""

    def __init__(self, *offsets):
        super().__init__()
        self.model, self.offsets = Model(), torch.tensor(offsets)

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids[attention_mask.bool()][None], cu_seqlens=self.offsets)


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


ROWS = IDS[:, :12].reshape(3, 4), torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]])
WHOLE_ROW = SimpleNamespace(qkv_format="thd", cu_seqlens_q=2 * OFFSETS, cu_seqlens_kv=2 * OFFSETS)
BATCH, OTHER, PAIR = (IDS, OFFSETS), (IDS, torch.tensor([0, 4, 16])), (IDS[:, :6].reshape(2, 3), KEEP)
TWO_IN_ONE = torch.block_diag(torch.ones(3, 3).tril(), torch.ones(2, 2).tril()).bool()[None]
KNOWN = {
    "a layer behind those listed": (windowed(layer_types=["sliding_attention"] * 2, sliding_window=3), BATCH, 0),
    "layers that differ": (windowed(layer_types=["sliding_attention", "full_attention"], sliding_window=3), BATCH, 0),
    "full attention": (windowed(layer_types=["full_attention"] * 2, sliding_window=3), BATCH, 1),
    "a window without kinds": (windowed(layer_types=[], sliding_window=3), BATCH, 0),
    "other kinds": (windowed(layer_types=["linear_attention"], sliding_window=3), BATCH, 1),
    "no window": (windowed(layer_types=[], sliding_window=None), BATCH, 1),
    "GPT-Neo's local layers": (windowed(attention_layers=["global", "local"]), BATCH, 0),
    "nothing stands ahead of one token": (Model({2: {"causal": False}}), (IDS, torch.arange(17)), 0),
    "another token stands ahead": (Model({2: {"causal": False}}), (IDS, torch.arange(0, 17, 2)), 1),
    "an encoder-decoder is not judged": (windowed(is_encoder_decoder=True), BATCH, 0),
    "the same, of one stack": (windowed(is_encoder_decoder=False), BATCH, 1),
    "a mask of padded rows": (MaskedAttention(PAST), PAIR, 0),
    "a mask that looks ahead": (MaskedAttention(AHEAD), PAIR, 1),
    "a mask of one row without padding": (MaskedAttention(TWO_IN_ONE), PAIR, 0),
    "offsets that fall need no batch": (Unsaid({0: {"rule": planted(16, 11, 6, 0)}}), (BATCH,), 1),
    "offsets of a longer row need no batch": (Unsaid({0: {"rule": planted(0, 6, 11, 20)}}), (BATCH,), 1),
    "holes are no tokens": (Unpadding(0, 3), (IDS[:, :4], torch.tensor([[1, 1, 0, 1]])), 0),
    "rows without their padding": (Unpadding(0, 3, 7, 9), ROWS, 0),
    "rows without their padding, of other lengths": (Unpadding(0, 4, 8, 9), ROWS, 5),
    "rows without their padding, in one": (Unpadding(0, 9), ROWS, 5),
    "a model within another has its own batch": (Two({0: {"rule": planted(0, 5, 11, 16)}}), OTHER, 1),
    **{f"offsets of the whole row, {n} ranks": (Sharing(n), (IDS, WHOLE_ROW), int(n != 2)) for n in (None, 1, 2, 4)},
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_of_a_layer_and_of_its_batch(name):
    model, batch, wrong = KNOWN[name]
    with watch(say=False) as seen, torch.no_grad(), suppress(ValueError, RuntimeError, IndexError):
        model(*batch)
    assert (len(seen.faults), seen.failed) == (wrong, set())
    held = [each.boundaries.allowed for forward in seen.forwards for each in forward.calls if each.boundaries]
    assert {*held} <= {None}, "masks are let go"


@pytest.mark.parametrize(("width", "judged"), [(1, False), (2, True)])
def test_one_token_a_row_is_not_judged(width, judged):
    keep = torch.ones(2, width).long()
    with watch(say=False) as seen:
        MaskedAttention(keep[:, None].bool())(IDS[:, : 2 * width].reshape(2, width), keep)
    assert (seen.forwards[0].truth is not None) == judged


def test_a_batch_of_our_adapter_is_known_by_its_tokens():
    class Bare(Model):
        def forward(self, input_ids):
            return super().forward(input_ids, OFFSETS)

    keep = torch.ones(1, 16).bool()
    with watch(say=False) as seen:
        batch = BatchAdapter(needs_mask_2d=True, consumer="megatron")({"input_ids": IDS, "attention_mask_2d": keep})
        Bare()(batch["input_ids"])
        Bare()(IDS + 1)
    assert [each.truth for each in seen.forwards] == [Segments(keep.long()), None]
    with watch(say=False) as seen:
        Bare()(batch["input_ids"])
    assert seen.forwards[0].truth is None, "nothing is kept when nobody watches"


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
    again = lambda given: given if torch._C._current_graph_task_id() == -1 else OTHER_NUMBERS(given)  # noqa: E731
    model = Model({0: {"seq_idx": again}, 1: {"seq_idx": OTHER_NUMBERS}})  # as another layer was told the first time
    model.again = True
    with watch(say=False) as seen:
        model(IDS, OFFSETS).sum().backward()
    assert [(each.layer, "computed again" in each.why) for each in seen.faults] == [("layers.1", False), ("layers.0", True)]


def test_computed_again_as_in_the_step_before():
    model = Model()
    model.again, optimizer = True, torch.optim.SGD(model.parameters(), 0.1)
    with watch(say=False) as seen:
        for model.layers[2].faults in ({"window": (2, 0)}, Later({"window": (2, 0)})):
            model(IDS, OFFSETS).sum().backward()
            optimizer.step()
    assert [(each.layer, "computed again" in each.why) for each in seen.faults] == [("layers.2", False), ("layers.2", True)]


@pytest.mark.parametrize(("trains", "looked_at", "ends"), [(True, 6, 10), (False, 2, 6)])
def test_so_many_forwards_are_looked_at_and_where_nobody_steps_all_is_taken_off(trains, looked_at, ends, monkeypatch):
    monkeypatch.setattr(delivery, "_MOST_PASSES", 3)
    attends, model, as_it_was = nn.functional.scaled_dot_product_attention, Model(), []
    with watch(say=False, steps=2) as seen, torch.set_grad_enabled(trains):
        for _ in range(12):
            model(IDS, OFFSETS)
            as_it_was.append(nn.functional.scaled_dot_product_attention is attends)
    assert (sum(not each.again for each in seen.forwards), as_it_was.index(True) + 1) == (looked_at, ends)


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
    with watch(say=False, stop=True):
        Model()(IDS, OFFSETS)
        with pytest.raises(CollateError, match=r"layers\.0"):
            Model({0: {"seq_idx": ONE_NUMBER}})(IDS, OFFSETS)
        Model({0: {"seq_idx": ONE_NUMBER}})(IDS, OFFSETS)  # which is not looked at


def test_what_is_said_and_written_of_each_forward(tmp_path, capsys):
    out, model = tmp_path / "seen.jsonl", Unsaid({0: {"rule": planted(0, 6, 11, 20)}})
    with watch(out=out) as seen:
        for _ in range(2):
            with suppress(ValueError, RuntimeError, CollateError):
                model(BATCH)
        Model()(IDS, OFFSETS)
    said = capsys.readouterr().err
    assert [said.count(each) for each in (f"✘ {seen.faults[0]}", seen.forwards[0].skip_reason, "not judged")] == [2, 1, 1]
    assert "1 recurrent: convolution [0, 6, 11, 16] · rule" in said
    assert "1 process, 2 of 3 forwards with a fault (model.layers.0, " in seen.summary()
    found = [[each["layer"] for each in json.loads(line)["faults"]] for line in out.read_text().splitlines()]
    assert found == [["model.layers.0"], ["model.layers.0"], []]


def test_an_error_of_the_model_is_its_own(capsys):
    class Broken(Model):
        def forward(self, input_ids, cu_seqlens):
            super().forward(input_ids, cu_seqlens)
            raise KeyError("mine")

    with watch() as seen, pytest.raises(KeyError, match="mine"):
        Broken()(IDS, OFFSETS)
    assert seen.forwards[0].calls
    assert "KeyError" in capsys.readouterr().err


@pytest.mark.parametrize("kept", ["named", "once", "twice", "itself", "by a layer", "by a class"])
def test_a_kernel_that_a_function_around_it_keeps(kept, monkeypatch):
    model, right = Model(), stranger.chunk_gated_delta_rule

    def lossy(*args, cu_seqlens=None):
        return right(*args)

    def by_layer(*args, cu_seqlens=None):
        return model.layers[0].rule(*args)

    copy = FunctionType(right.__code__, right.__globals__, argdefs=(None,))
    if kept == "by a class":
        monkeypatch.setattr(stranger.DeltaLayer, "rule", staticmethod(copy), raising=False)
    else:
        model.layers[0].rule = copy if kept == "by a layer" else None

    def turns(*args, **kwargs):
        return lossy(*args, **kwargs) if args else turns(1)

    ways = {"named": wraps(right)(lossy), "once": lossy, "itself": turns}
    ways["twice"] = lambda *args, **kwargs: lossy(*args, **kwargs)
    monkeypatch.setattr(stranger, "chunk_gated_delta_rule", ways.get(kept, by_layer))
    with watch(say=False) as seen:
        model(IDS, OFFSETS)
    assert {each.kernel for each in seen.faults} == {"stranger.chunk_gated_delta_rule"}
    assert {each.received for each in seen.faults} == {"nothing"}


def test_what_a_run_put_in_place_of_a_kernel_stays(monkeypatch):
    right = stranger.chunk_gated_delta_rule

    def mine(*args, **kwargs):
        return right(*args, **kwargs)

    monkeypatch.setattr(stranger, "chunk_gated_delta_rule", right)  # which comes back behind the test
    with watch(say=False):
        Model()(IDS, OFFSETS)
        stranger.chunk_gated_delta_rule = mine
    assert stranger.chunk_gated_delta_rule is mine


class PlainAttention(nn.Module):
    def __init__(self, *attend):
        super().__init__()
        self.attend = attend

    def forward(self, x):
        return sum(each()(x, x, x) for each in self.attend)


class LoadedLate:
    """As proxies of packages that are imported when somebody asks what they are."""

    @property
    def __class__(self):
        raise RuntimeError("nobody asked before")


def test_a_kernel_that_others_took_is_heard_and_given_back(monkeypatch):
    attends, others = nn.functional.scaled_dot_product_attention, ModuleType("others")
    registry = type("Registry", (), {"_global_mapping": {"sdpa": attends}})
    others.attends, others.registry, others.late = attends, registry(), LoadedLate()
    monkeypatch.setitem(sys.modules, "others", others)
    with watch(say=False) as seen:
        PlainAttention(lambda: others.attends, lambda: registry._global_mapping["sdpa"])(torch.ones(1, 1, 3, 4))
    assert sum(seen.kernels.values()) == 2
    assert others.attends is registry._global_mapping["sdpa"] is attends


def test_a_kernel_that_is_imported_meanwhile_is_heard_from_the_next_forward_on(monkeypatch, tmp_path):
    (tmp_path / "flash_attn_interface.py").write_text("def flash_attn_func(q, k, v):\n    return q\n")
    monkeypatch.syspath_prepend(tmp_path)
    model = PlainAttention(lambda: import_module("flash_attn_interface").flash_attn_func)
    with watch(say=False) as seen:
        for _ in range(2):
            model(torch.ones(1, 3, 1, 4))
    del sys.modules["flash_attn_interface"]
    assert seen.kernels == {"flash_attn_interface.flash_attn_func": 1}


def test_what_is_traced_or_compiled_is_not_looked_at():
    model, x = PlainAttention(lambda: nn.functional.scaled_dot_product_attention), torch.ones(1, 1, 3, 4)
    with watch(say=False) as seen:
        torch.jit.trace(model, x, check_trace=False)
        assert torch.compile(nn.Sequential(model), backend="eager", fullgraph=True)(x).shape == x.shape
    assert seen.kernels == {}


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
        attended = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        return attended + torch.nn.functional.conv1d(q[0], torch.ones(4, 1, 1), groups=4)

    q = torch.randn(1, 1, 4, 8)
    torch._dynamo.trace_rules.clear_lru_cache()  # as in a new process
    with watch(say=False):
        assert torch.jit.script(attends)(q).shape == q.shape
        assert torch.compile(attends, backend="eager", fullgraph=True)(q).shape == q.shape
    torch._dynamo.reset()
    assert torch.compile(attends, backend="eager", fullgraph=True)(q).shape == q.shape


def causal_conv1d_fn(x, weight):
    return torch.conv1d(x, weight[:, None], padding=3, groups=x.shape[1])[..., :-3]


class ConvolvedDelta(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, hidden):
        torch.conv1d(hidden, torch.ones(2, 4, 1))  # not by channels
        hidden = causal_conv1d_fn(hidden, self.weight)
        return torch.conv1d(hidden, self.weight[:, None], groups=4)


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layer, self.outside = nn.Embedding(9, 4), ConvolvedDelta(), nn.Conv1d(4, 4, 1, groups=4)

    def forward(self, input_ids):
        out = self.layer(self.embed(input_ids).mT)
        torch.conv1d(self.outside(out), torch.ones(4, 1, 1), groups=4)  # not in a layer
        return out


def test_a_convolution_of_torch_counts_in_a_layer_where_no_kernel_is_around_it():
    model = Mixing()
    with watch(say=False) as seen, torch.no_grad():
        for _ in range(2):
            model(torch.ones(1, 8).long())
            torch.conv1d(torch.ones(1, 4, 8), model.layer.weight[:, None], groups=4)
    for forward in seen.forwards:
        assert [each.kernel.rpartition(".")[2] for each in forward.calls] == ["causal_conv1d_fn", "conv1d"]
    assert len(seen.forwards) == 2
    assert not seen._recorder.failed


@pytest.mark.parametrize(("zero", "empty"), [(True, [1, 0, 0, 1]), (False, None)])
def test_what_the_models_own_embedding_leaves_zero(zero, empty):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.other = nn.Embedding(9, 4, padding_idx=0), nn.Embedding(9, 4, padding_idx=0)
            self.layer, self.config = ConvolvedDelta(), SimpleNamespace()

        def forward(self, input_ids):
            (self.embed if zero else self.other)(input_ids if zero else input_ids * 0)
            return self.layer(torch.tensor([0.0, 1, 1, 2])[None, :, None].expand(1, 4, 4))

    with watch(say=False) as seen, torch.no_grad():
        Two()(torch.tensor([[0, 3, 4, 0]]))
        nn.Sequential(nn.Sequential(nn.Identity()))(torch.ones(1))
    forward = seen.forwards[0]
    still = empty and [1, 0, 0, 0]
    for found, told in ((forward.empty_T, empty), (forward.calls[0].empty_T, still)):
        assert (found if found is None else found.astype(int).tolist()) == told
    assert not seen._recorder.failed
