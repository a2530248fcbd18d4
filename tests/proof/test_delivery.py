"""Delivery of a stack that nobody knows: each planted fault is found at its kernel, by the check and by the guard."""

import gc
import sys
import threading
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import stranger
import torch
from stranger import DeltaLayer, Model
from torch import nn
from toys import IDS, OFFSETS, planted

from collate_npu import CollateError, ContextParallel, Segments, check_delivery, guard_first_batch
from collate_npu.consumers.mask_choice import Case, Model as Facts
from collate_npu.masks import dense
from collate_npu.parallel import query_rows, split_tensor
from collate_npu.proof import delivery, watch
from collate_npu.proof.leaks import check_alone

BATCH = {"input_ids": IDS, "cu_seqlens": OFFSETS}


def test_a_right_run_passes_and_says_what_was_looked_at(capsys):
    model = Model()
    found = check_delivery(model, BATCH)
    each = "convolution [0, 6, 11, 16], rule [0, 6, 11, 16]"
    assert found.layers == {"layers.0": each, "layers.1": each, "layers.2": "[0, 6, 11, 16]"}
    assert found.unchecked == ()
    report = "2 recurrent: convolution [0, 6, 11, 16] ✔ · rule [0, 6, 11, 16] ✔ · 1 attention: [0, 6, 11, 16] ✔"
    assert found.report == f"{report} · positions not checked"
    assert str(found).startswith("collate_npu: every layer got what the batch says: ")
    guard_first_batch(model)
    for _ in range(2):
        model(IDS, OFFSETS)
    said = f"collate_npu: every layer with a known kernel got what the batch says: {found.report}\n"
    assert capsys.readouterr().out == said, "once"


def test_a_layer_alone_is_called_with_hidden_states():
    layer, hidden = DeltaLayer({}), torch.randn(1, 16, 16)
    found = check_delivery(layer, {"hidden": hidden, "cu_seqlens": OFFSETS})
    assert found.report == "1 recurrent: convolution [0, 6, 11, 16] ✔ · rule [0, 6, 11, 16] ✔ · positions not checked"
    with pytest.raises(CollateError, match="goes on from another sequence"):
        check_delivery(DeltaLayer({"seq_idx": planted()}), {"hidden": hidden, "cu_seqlens": OFFSETS})
    with pytest.raises(CollateError, match=r"calls of shape \[1, 16\]"):
        check_delivery(layer, {"hidden": hidden, "cu_seqlens": OFFSETS}, segments=Segments.from_lengths([[6, 5]]))


def test_a_vision_tower_has_other_tokens_though_as_many():
    class Seeing(nn.Module):
        def __init__(self):
            super().__init__()
            self.vision, self.language = Model(), Model()

        def forward(self, input_ids, cu_seqlens):
            return self.vision(IDS.flip(1), torch.tensor([0, 16])) + self.language(input_ids, cu_seqlens)

    assert check_delivery(Seeing(), BATCH).unchecked == tuple(f"vision.layers.{n}" for n in range(3))


def test_kernels_of_a_rank_are_judged_where_they_have_whole_rows():
    """What one is told of a part may be a step of a ring."""
    model, rank = Model({0: {"rule": planted(0, 5, 11, 16)}}), ContextParallel(2, 0)
    with pytest.raises(CollateError, match=r"layers\.0: stranger\.chunk_gated_delta_rule got \[0, 5, 11, 16\]"):
        check_delivery(model, BATCH, segments=Segments.from_lengths([[6, 5, 5]]), context_parallel=rank)
    found = check_delivery(model, BATCH, segments=Segments.from_lengths([[6, 26]]), context_parallel=rank)
    assert str(found).startswith("collate_npu: NOT JUDGED: ")


def test_nothing_is_kept_of_a_model_that_was_checked():
    model = Model()
    check_delivery(model, BATCH)
    guard_first_batch(model)
    model(**BATCH)
    with watch(say=False):
        model(**BATCH)
    kept = weakref.ref(model)
    del model
    gc.collect()
    assert kept() is None


UNTOUCHED = (nn.Module._call_impl, nn.functional.scaled_dot_product_attention, torch.conv1d)


def touched():
    return (nn.Module._call_impl, nn.functional.scaled_dot_product_attention, nn.functional.conv1d) != UNTOUCHED


def test_a_kernel_of_the_model_itself_says_nothing_of_its_layers():
    class Sided(Model):
        def forward(self, input_ids, cu_seqlens):
            x = torch.ones(1, 1, 16, 4)
            allowed = torch.block_diag(*[torch.ones(n, n).tril() for n in (6, 5, 5)]).bool()
            nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=allowed)
            return self.embed(input_ids)  # no layer runs

    found = check_delivery(Sided(), BATCH)
    assert found.unchecked == ("layers.0", "layers.1", "layers.2")


def test_what_cannot_be_judged_is_not_looked_at(monkeypatch):
    class Sided(Model):
        def forward(self, input_ids, cu_seqlens):
            x = torch.ones(1, 1, 16, 4)
            nn.functional.scaled_dot_product_attention(x, x[:, :, 1:], x[:, :, 1:])
            return super().forward(input_ids, cu_seqlens)

    class KeyAttention(nn.Module):
        def forward(self, hidden, cu_seqlens):
            x = torch.ones(1, 1, 16, 4)
            nn.functional.scaled_dot_product_attention(x, x[:, :, 1:], x[:, :, 1:])
            return hidden

    model = Sided()
    model.layers.append(KeyAttention())
    found = check_delivery(model, BATCH)
    assert str(found).startswith("collate_npu: these layers got what the batch says: ")
    assert "not checked: layers.3, (model) (" in str(found)
    name, *unread = found.unchecked
    assert (name, [each.partition(" (")[0] for each in unread]) == ("layers.3", ["(model)", "layers.3"])
    assert all("keys" in each for each in unread)
    monkeypatch.setattr(stranger, "chunk_gated_delta_rule", lambda q, k, v, *_, **__: v)
    assert check_delivery(Model(), BATCH).unchecked == ("layers.0", "layers.1")  # their convolutions alone


def test_kernels_of_another_model_say_nothing_of_this_one():
    with pytest.raises(CollateError, match="no known kernel in Model"):
        check_delivery(Model(), BATCH, forward=lambda **batch: Model()(**batch))


def test_guards_beside_one_another_leave_nothing(capsys):
    model = Model()
    for _ in range(2):
        guard_first_batch(model)
    broken = model.layers[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**BATCH)
    broken.remove()
    assert (capsys.readouterr().out, touched()) == ("", False)
    model(**BATCH)
    assert (capsys.readouterr().out.count("got what the batch says"), touched()) == (2, False)
    assert [*model._forward_hooks, *model._forward_pre_hooks] == []


def test_threads_do_not_hear_one_another(request):
    """The last one that listens takes the wrappers off while the next one puts them on."""
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    found = []

    def check():
        model = Model()
        found.extend(check_delivery(model, BATCH).unchecked for _ in range(5))

    threads = [threading.Thread(target=check) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [()] * 20
    assert not touched()


class InMegatron(type("MegatronModule", (Model,), {"__module__": "megatron.core.transformer.module"})):
    config = SimpleNamespace()


@pytest.mark.parametrize("end", ["pre_process", "post_process"])
def test_a_stage_of_a_pipeline_runs_by_a_function_alone(end):
    stage = Model()
    setattr(stage, end, False)
    with pytest.raises(CollateError, match="pipeline"):
        check_delivery(stage, BATCH)
    assert check_delivery(stage, BATCH, forward=lambda **batch: stage(**batch)).unchecked == ()


def test_a_release_is_looked_at_of_the_stack_that_runs_the_model(monkeypatch):
    said = []
    monkeypatch.setattr(delivery, "say_outside", said.append)
    for kind in (Model, InMegatron):
        guard_first_batch(kind())()
    assert said == ["megatron-core"]


def test_compiled_code_is_checked_uncompiled():
    model = Model()
    model.layers[0].compile(backend="eager")
    assert check_delivery(model, BATCH).report == check_delivery(Model(), BATCH).report


def test_compiled_code_is_not_guarded():
    model = Model()
    for compiled in (torch.compile(model, backend="eager"), model):
        model.layers[0].compile(backend="eager")
        with pytest.raises(CollateError, match="a compiled Model"):
            guard_first_batch(compiled)


class OfOthers(torch.nn.Module):
    """As litgpt's GPT: no key of its forward is one of ours."""

    def forward(self, idx, input_pos=None):
        return idx


def test_a_model_of_other_keys_is_named_and_not_its_type_error():
    batch = {"input_ids": torch.arange(6).view(2, 3), "attention_mask": torch.ones(2, 3)}
    with pytest.raises(CollateError, match=r"'input_ids'.*forward= that calls the model"):
        check_delivery(OfOthers(), batch)


# --- ranks that have a part of the queries, and all keys, or a part of both and no mask


class OfARank(nn.Module):
    def __init__(self, mask=None):
        super().__init__()
        self.mask, self.attention = mask, SelfAttention()

    def forward(self, input_ids, attention_mask=None):
        return self.attention(input_ids, self.mask)


class SelfAttention(nn.Module):
    def forward(self, ids, mask):
        q = torch.ones(len(ids), 1, ids.shape[1], 4)
        keys = q if mask is None else torch.ones(len(ids), 1, mask.shape[-1], 4)
        return nn.functional.scaled_dot_product_attention(q, keys, keys, attn_mask=mask, is_causal=mask is None)


@pytest.mark.parametrize("cp", [ContextParallel(2, 0), ContextParallel(2, 1), ContextParallel(2, 0, layout="contiguous")])
@pytest.mark.parametrize("side", ["left", "right"])
def test_kernels_of_a_rank_are_judged_by_its_part(side, cp):
    segments = Segments.from_lengths([8, 5], side=side)
    rows, ids = query_rows(8, cp), split_tensor(torch.arange(16).reshape(2, 8), cp)
    settings = {"segments": segments, "context_parallel": cp}
    right = OfARank(dense(segments, rows=rows))
    assert "mask" in str(check_delivery(right, {"input_ids": ids}, **settings))
    other = query_rows(8, ContextParallel(2, 1 - cp.rank, layout=cp.layout))
    for wrong in (dense(segments, rows=other), dense(segments, polarity="masked", rows=rows)):
        with pytest.raises(CollateError, match=r"attention.*row \d"):
            check_delivery(OfARank(wrong), {"input_ids": ids}, **settings)
    with nullcontext() if side == "right" else pytest.raises(CollateError, match="goes on from padding"):
        check_delivery(OfARank(), {"input_ids": ids}, **settings)


# --- alone: which sequences are run again, and what a model of Megatron is handed. On real models: test_delivered_models

MegatronModule = type("MegatronModule", (nn.Module,), {"__module__": "megatron.core.transformer.module"})


class Places(MegatronModule):
    """A causal model of Megatron: what it gives for a token depends on it, its place and what its mask lets it see."""

    def __init__(self, kernel):
        super().__init__()
        home = {"DotProductAttention": "transformer", "TEDotProductAttention": "extensions"}[kernel]
        self.core = type(kernel, (nn.Module,), {"__module__": f"megatron.core.{home}"})()
        self.weight = nn.Parameter(torch.eye(4))
        self.config = SimpleNamespace(masked_softmax_fusion=False)
        self.calls = []

    def forward(self, input_ids, position_ids, attention_mask=None, token_type_ids=None):
        self.calls.append((input_ids.tolist(), position_ids.tolist(), attention_mask))
        seen = torch.ones(input_ids.shape[1], input_ids.shape[1]).tril() if attention_mask is None else ~attention_mask[:, 0]
        past = seen.float() @ (input_ids * (1 + position_ids)).float()[..., None]
        return past * torch.ones(4)


def alone_of(kernel, logits=None, below=None, forward=None):
    model, segments = Places(kernel).eval(), Segments.from_lengths([3, 2, 1])
    model.base_model = below
    ids = torch.arange(1, 10).reshape(3, 3)
    batch = {"input_ids": ids, "labels": ids, "token_type_ids": None, "position_ids": segments.position_ids}
    case = Case(segments=segments, model=Facts(needs_mask_2d=False))
    logits = model(ids, segments.position_ids, None) if logits is None else logits
    return check_alone(model, batch, case, logits, forward), model.calls[1:]


@pytest.mark.parametrize(("kernel", "dense"), [("DotProductAttention", True), ("TEDotProductAttention", False)])
def test_megatron_gets_positions_and_a_mask_where_its_kernels_read_one(kernel, dense):
    found, calls = alone_of(kernel)
    assert found.errors == {0: 0.0, 1: 0.0}
    assert [ids for ids, *_ in calls] == [[[1, 2, 3]], [[1, 2, 3, 1]], [[4, 5]], [[4, 5, 4]]], "alone, and wider"
    for ids, positions, mask in calls:
        assert positions == [[*range(len(ids[0]))]]
        assert (mask is not None) == dense
        assert mask is None or torch.equal(~mask[0, 0], torch.ones(len(ids[0]), len(ids[0])).tril().bool())


def test_wrong_logits_are_told_and_those_of_other_rows_cannot_be_compared():
    with pytest.raises(CollateError, match=r"sequence 0: .*sequence 1: "):
        alone_of("TEDotProductAttention", torch.ones(3, 3, 4), below=Places("TEDotProductAttention"))
    for shape in ((3, 4), (3, 2, 4), (1, 9, 4)):
        with pytest.raises(CollateError, match="gathers the whole rows"):
            alone_of("TEDotProductAttention", torch.ones(shape))


def test_a_model_that_pools_is_compared_by_its_states_and_not_a_function_in_its_place():
    below = Places("TEDotProductAttention")
    assert alone_of("TEDotProductAttention", torch.ones(3, 4), below)[0].errors == {0: 0.0, 1: 0.0}
    with pytest.raises(CollateError, match="gathers the whole rows"):
        alone_of("TEDotProductAttention", torch.ones(3, 4), below, forward=below)


def test_sequences_of_a_stack_that_nobody_knows_are_not_run_alone():
    with pytest.raises(CollateError, match=r"Model.*Leave alone= out"):
        check_delivery(Model(), BATCH, alone=True)
