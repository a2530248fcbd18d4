"""`adapt(model)` wherever a model is wrapped, copied, compiled or called otherwise: each sample's own loss and gradient.

Recomputation, threads, errors inside a forward and every family: integration/test_any_layout. What a call may ask for (a
cache, generation, attention maps): integration/test_no_harm.
"""

import copy
import pickle
import sys
from dataclasses import make_dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

transformers = pytest.importorskip("transformers")


from collate_npu import BatchAdapter, CollateError, adapt  # noqa: E402
from collate_npu.consumers.adapter import KNOWN_BATCHES  # noqa: E402
from collate_npu.errors import UnsupportedFormError  # noqa: E402
from collate_npu.masks.dialects import SEQUENCE_GROUPS  # noqa: E402
from collate_npu.testing import tiny_model  # noqa: E402

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]
VOCAB, PAD = 61, 7
ROWS = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in (7, 12, 4)]


def padded(side="left", labels=True):
    missing = [(12 - len(row), 0) if side == "left" else (0, 12 - len(row)) for row in ROWS]
    ids = torch.stack([nn.functional.pad(row, ends, value=PAD) for row, ends in zip(ROWS, missing)])
    keep = torch.stack([nn.functional.pad(torch.ones_like(row), ends) for row, ends in zip(ROWS, missing)])
    learned = {"labels": ids.masked_fill(keep == 0, -100)} if labels else {}
    return {"input_ids": ids, "attention_mask": keep, **learned}


def packed(**more):
    """As OpenRLHF's `unpad_and_slice_tensor`: one row, no mask, positions that begin again."""
    ids, positions = torch.cat(ROWS)[None], torch.cat([torch.arange(len(row)) for row in ROWS])[None]
    return {"input_ids": ids, "position_ids": positions, "attention_mask": None, "labels": ids.clone(), **more}


NESTED = make_dataclass("FlashAttentionKwargs", ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"])


def nested(kind=dict, tail=0):
    """As NeMo RL's (7ea279a nemo_rl/models/huggingface/common.py:142): offsets in an object of their own, which transformers
    does not open, and a tail of padding with positions 0 (issues 2105, 4167)."""
    offsets = torch.tensor([0, 7, 19, 23], dtype=torch.int32)
    told = kind(cu_seqlens_q=offsets, cu_seqlens_k=offsets.clone(), max_seqlen_q=12, max_seqlen_k=12)
    batch = packed(flash_attn_kwargs=told)
    fills = {"input_ids": PAD, "position_ids": 0, "labels": -100}
    return batch | {key: nn.functional.pad(batch[key], (0, tail), value=fill) for key, fill in fills.items()}


LAYOUTS = {
    "padded left": padded,
    "padded right": lambda: padded("right"),
    "packed": packed,
    "packed beside a mask of ones": lambda: packed(attention_mask=torch.ones(1, 23, dtype=torch.long)),
    "packed, nested offsets": nested,
    "packed, nested offsets and a tail": lambda: nested(NESTED, tail=5),
}


def model_of(family="qwen3_next"):
    return tiny_model(family, vocab_size=VOCAB)


def numbers(model, batch):
    """The loss and its gradient."""
    model.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), torch.cat([(p * 0 if p.grad is None else p.grad).flatten() for p in model.parameters()]).detach()


def alone(model):
    """Each sample by itself, weighted by its targets."""
    found = [(*numbers(model, {"input_ids": row[None], "labels": row[None]}), len(row) - 1) for row in ROWS]
    total = sum(targets for *_, targets in found)
    return [sum(each[at] * each[2] for each in found) / total for at in (0, 1)]


def assert_alone(model, batch, wanted, within=1e-4):
    given = {key: value.clone() for key, value in batch.items() if isinstance(value, torch.Tensor)}
    for mine, expected in zip(numbers(model, batch), wanted):
        assert float((mine - expected).norm() / expected.norm()) <= within
    assert all(torch.equal(batch[key], value) for key, value in given.items())


def adapted(model):
    """Does a batch whose mask was lost meet the adapter, which refuses it?"""
    try:
        model(input_ids=padded()["input_ids"], attention_mask=None)
    except CollateError:
        return True
    return False


@pytest.fixture
def handed_over(monkeypatch):
    """The calls of the adapter, one of each batch that it reads."""
    calls, own = [], BatchAdapter.hand_over
    monkeypatch.setattr(BatchAdapter, "hand_over", lambda *args, **more: calls.append(1) or own(*args, **more))
    return calls


class Holder(nn.Module):
    """As a stack's own actor or LightningModule."""

    def __init__(self, model):
        super().__init__()
        self.policy = model

    def forward(self, input_ids, **rest):
        return self.policy(input_ids, **rest)


WRAPPERS = {
    "as it is": lambda model: model,
    "in an actor": Holder,
    "prepared by Accelerate": lambda model: pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(model),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(("family", "at"), [("qwen3", "in"), *(("qwen3_next", at) for at in ("in", "out", "in and out"))])
def test_every_layout_in_every_wrapper(family, at, wrapper, layout, handed_over):
    model = model_of(family)
    wanted = alone(model)
    handles = [adapt(model)] if "in" in at else []
    wrapped = WRAPPERS[wrapper](model)
    handles += [adapt(wrapped)] if "out" in at else []
    assert_alone(wrapped, LAYOUTS[layout](), wanted)
    assert len(handed_over) == 1  # a second adapt reads nothing again
    for handle in handles:
        assert adapted(wrapped)
        handle.remove()
    assert not adapted(wrapped)


@pytest.mark.slow
@pytest.mark.draws(1)
@pytest.mark.parametrize("order", ["adapt first", "wrapper first", "on the model inside"])
@pytest.mark.parametrize("in_place", [True, False])
def test_compiled(in_place, order):
    torch._dynamo.reset()
    model = model_of("qwen3")
    wanted = alone(model)
    handle = adapt(model) if order == "adapt first" else None
    compiled = model if in_place else torch.compile(model, backend="eager")
    if in_place:
        model.compile(backend="eager")
    if handle is None:
        compiled(**padded("right"))  # there is a graph already
        handle = adapt(compiled if order == "wrapper first" else model)
    for layout in ("padded left", "packed"):
        assert_alone(compiled, LAYOUTS[layout](), wanted)
    handle.remove()
    assert not adapted(compiled)


def held(model):
    """Everything that its modules hold, and what each of their hooks is, but for mixers that stay wrapped and do nothing."""
    named = [(name, key, x) for name, module in model.named_modules() for key, x in vars(module).items() if key != "forward"]
    return [(name, key, list(x.items()) if isinstance(x, dict) else id(x)) for name, key, x in named]


def test_nothing_is_left_behind():
    model = model_of()
    before, weights = held(model), list(model.state_dict())
    handle, again = adapt(model), adapt(model)
    assert list(model.state_dict()) == weights
    handle.remove()
    assert adapted(model)
    again.remove()
    handle.remove()
    with adapt(model), torch.no_grad():
        model(**padded())
    assert not adapted(model)
    assert (KNOWN_BATCHES.running, held(model)) == ({}, before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_adapted_too_and_by_itself(copied):
    model = model_of("qwen3")
    wanted, handle = alone(model), adapt(model)
    other = copied(model)
    handle.remove()
    assert (adapted(other), adapted(other.base_model), adapted(model)) == (True, True, False)
    assert_alone(other, padded(), wanted)


def test_another_attention_or_dtype_set_later_is_looked_at():
    model = model_of("qwen3")
    wanted = alone(model)
    with adapt(model):
        model.set_attn_implementation("eager")
        for batch in (packed(), padded()):
            assert_alone(model, batch, wanted)
        assert_alone(model.double(), padded(), [each.double() for each in wanted])


@pytest.mark.parametrize("more", [{}, {"num_beams": 2}])
def test_generation_is_as_without_it(more):
    model = model_of()
    prompts = [padded(labels=False), {"input_ids": padded()["input_ids"][1:2]}]  # the second has no padding, and no mask
    said = lambda: [model.generate(**each, max_new_tokens=4, do_sample=False, **more) for each in prompts]  # noqa: E731
    before = said()
    with adapt(model):
        assert all(map(torch.equal, before, said()))


# --- where it does not belong: a clear refusal


class Own(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, input_ids, attention_mask=None, position_ids=None, **more):
        return attention_mask


def called(model, batch, call="__call__", **settings):
    with adapt(model, **settings):
        getattr(model, call)(**batch)


PROMPTS, META = padded("right", labels=False), {key: value.to("meta") for key, value in padded().items()}
ONE_COLUMN = {key: value[:1, : len(ROWS[0]) + 1] for key, value in PROMPTS.items()}
GENERATED = {"max_new_tokens": 2, "do_sample": False}
FLAT = {"input_ids": torch.tensor([[3, 4, 5]]), "position_ids": torch.tensor([[0, 1, 0]])}
MEGATRON = type("GPTModel", (type("MegatronModule", (nn.Module,), {"__module__": "megatron.core"}),), {})
TAKES = "adapt takes one transformers model"
REFUSED = {
    "no transformers model": (lambda: adapt(nn.Linear(2, 2)), TAKES),
    "a layer of one": (lambda: adapt(model_of().base_model.layers[0]), TAKES),
    "two of them": (lambda: adapt(nn.ModuleList([model_of("qwen3"), model_of("qwen3")])), TAKES),
    "a Megatron model": (lambda: adapt(MEGATRON()), TAKES),
    "a name": (lambda: adapt("Qwen/Qwen3"), "from_pretrained"),
    "tensors without values": (lambda: called(model_of("qwen3").to("meta"), META), "without values"),
    "an own hybrid model, packed": (lambda: called(Own(model_of().config), FLAT, consumer="transformers"), "its own row"),
    "prompts padded right": (
        lambda: called(model_of(), PROMPTS | GENERATED, "generate"),
        r"rows \[0, 2\] padded right.*_side",
    ),
    "by one column": (lambda: called(model_of(), ONE_COLUMN | GENERATED, "generate"), r"rows \[0\] padded right"),
}
"""Generation goes on behind padding."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_right_form_is_refused(name):
    call, words = REFUSED[name]
    with pytest.raises(CollateError, match=words):
        call()


def test_a_model_of_the_callers_own_and_completions_padded_right_are_no_such_case():
    ids, keep = torch.tensor([[3, 4], [5, 6]]), torch.tensor([[0, 1], [1, 1]])
    for config in (SimpleNamespace(layer_types=["full_attention"]), model_of().config):
        with adapt(model := Own(config), consumer="transformers"):
            assert model(ids, keep).tolist() == keep.tolist()
    called(model_of(), PROMPTS | {"logits_to_keep": 2})  # a trainer's


# --- what somebody put on a model sees the rows that came


def test_a_backbone_that_is_called_twice_in_a_forward_gets_what_the_model_got(handed_over):
    model, batch = model_of("qwen3"), padded(labels=False)
    model.lm_head.register_forward_pre_hook(lambda *_: model.model(**batch) and None)  # behind the first
    with adapt(model):
        for _ in range(2):
            model(**batch)
    assert len(handed_over) == 2


def in_bf16(model):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state()  # else it has the dtype of the first one in this process
    accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)


PUT = {
    "accelerate's": in_bf16,
    "a loss": lambda model: setattr(model, "loss_function", lambda logits, labels, **_: logits.sum()),
    "a forward": lambda m: setattr(m, "forward", MethodType(lambda self, **call: type(m).forward(m, **call), m)),
}


@pytest.mark.parametrize("put", PUT)
def test_a_forward_a_loss_or_a_hook_of_others_sees_the_rows_that_came(put, monkeypatch):
    (model, seen, hooked), own = (model_of("qwen3"), [], []), nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda x, h: (x is model.lm_head and seen.append(h.shape[:2])) or own(x, h))
    with adapt(model):
        PUT[put](model)
        model.register_forward_hook(lambda _, args, out: hooked.append(out.logits.shape[:2]))
        model(**padded())
    assert (seen, hooked) == ([(1, 23) if put == "accelerate's" else (3, 12)], [(3, 12)])


def mixing(x):
    """What a convolution over neighbours does; to the first of what experts of 4.57.1 give."""
    if isinstance(x, tuple):
        return (mixing(x[0]), *x[1:])
    return x + 0.5 * nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


class Mixing(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **rest):
        return mixing(self.inner(*args, **rest))


def forward_of(module):
    own = module.forward
    module.forward = lambda *args, **rest: mixing(own(*args, **rest))


ON_THE_INSTANCE = {
    "a forward": lambda model: forward_of(model.model.layers[1].mlp),
    "a hook": lambda model: model.model.layers[1].mlp.register_forward_hook(lambda _, args, out: mixing(out)),
    "a hook before": lambda model: model.model.norm.register_forward_pre_hook(lambda _, args: (mixing(args[0]),)),
    "a module": lambda model: setattr(model.model.layers[1], "mlp", Mixing(model.model.layers[1].mlp)),
    "embeddings": lambda model: setattr(model.model, "embed_tokens", Mixing(model.model.embed_tokens)),
}


@pytest.mark.parametrize("behind", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("put", ON_THE_INSTANCE)
def test_what_mixes_tokens_on_the_instance_sees_the_rows_that_came(put, family, behind):
    """Right without us, so right with us: no copy has what somebody put on this model."""
    model, twin = model_of(family), model_of(family)
    handle = adapt(model) if behind else None
    for each in (model, twin):
        ON_THE_INSTANCE[put](each)
    handle = handle or adapt(model)
    assert_alone(model, padded("right"), alone(twin))
    assert behind or handle.way.startswith("padded: ")


class Mixes(transformers.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.norm = Mixing(self.model.norm)


class Noisy(transformers.LlamaForCausalLM):
    """Stochastic depth, under a name that no rule knows."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        if self.training:
            out["logits"] = out["logits"] * torch.bernoulli(torch.tensor(0.7)).item()
        return out


def test_a_class_is_asked_by_itself_and_noise_of_training_is_no_leak():
    """The answer that stands was of another class; and of another attention function, which is registered anew."""
    config = model_of("llama").config
    ways = {kind: adapt(kind(config)).way for kind in (transformers.LlamaForCausalLM, Mixes, Noisy)}
    assert [way.partition(":")[0] for way in ways.values()] == ["by sequence", "padded", "by sequence"]
    for kind in (Noisy, transformers.LlamaForCausalLM):
        assert BatchAdapter(kind(config))(padded())["labels"].shape == (3, 12)
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    kept = functions["sdpa"]
    try:
        functions["sdpa"] = lambda module, q, k, v, mask, **rest: kept(module, q, k, v, None, **(rest | {"is_causal": True}))
        with pytest.raises(UnsupportedFormError, match="Padding there changes the real tokens"):
            BatchAdapter(model_of("llama"))(padded("left"))
    finally:
        functions["sdpa"] = kept


PER_ROW = {
    "aLoRA": ("LoraConfig", {"alora_invocation_tokens": [7, 9]}, {}),
    "adapters by row": ("LoraConfig", {}, {"adapter_names": ["default", "__base__", "default"]}),
    "tasks by row": ("PolyConfig", {"n_tasks": 3}, {"task_ids": torch.tensor([0, 1, 2])}),
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", PER_ROW)
def test_weights_of_peft_that_follow_the_rows_get_the_rows(kind, side):
    peft = pytest.importorskip("peft")
    config, settings, more = PER_ROW[kind]
    made = getattr(peft, config)(task_type="CAUSAL_LM", target_modules=["q_proj"], **settings)
    model = peft.get_peft_model(model_of("llama"), made).eval()
    batch = padded(side, labels=False) | more
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "lora" in name or "poly" in name:
                each.normal_(0, 0.2)
        plain = model(**batch, use_cache=False).logits
        with adapt(model):
            found = model(**batch, use_cache=False).logits
    keep = batch["attention_mask"].bool()
    assert torch.allclose(found[keep], plain[keep], atol=1e-4)


# --- what a trainer's batch may be


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("train", [True, False])
def test_an_empty_cache_beside_several_sequences_is_none(family, train):
    model = model_of(family).train(train)
    truth = [model(input_ids=row[None]).logits[0] for row in ROWS]
    with adapt(model):
        found = model(**packed(past_key_values=transformers.DynamicCache(config=model.config), labels=None)).logits[0]
    assert torch.allclose(found, torch.cat(truth), atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("kept", [1, 0], ids=["a mask", "a mask of zeros"])
def test_a_micro_batch_that_learns_nothing_keeps_ranks_in_step(family, kept):
    """EasyR1 1011: its loss is 0, and so is its gradient; a mean of none would be NaN."""
    model, batch = model_of(family).train(), padded()
    batch |= {"labels": torch.full_like(batch["labels"], -100), "attention_mask": batch["attention_mask"] * kept}
    with adapt(model):
        loss, gradient = numbers(model, batch)
    assert (float(loss), float(gradient.abs().max())) == (0, 0)


def test_a_loss_outside_the_forward_is_told_of_first_labels():
    with adapt(model := model_of("llama").train()), pytest.warns(UserWarning, match="unless its label is -100"):
        model(**padded(labels=False))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_routers_loss_counts_no_tail_of_a_flat_row(family):
    model, rows = model_of(family), packed(output_router_logits=True)
    tail = {"input_ids": torch.zeros(1, 5).long(), "position_ids": torch.arange(5)[None], "labels": torch.full((1, 5), -100)}
    with adapt(model):
        wanted = model(**rows).aux_loss
        found = model(**rows | {key: torch.cat([rows[key], value], 1) for key, value in tail.items()}).aux_loss
    assert torch.allclose(found, wanted, atol=1e-5)


# --- rows that the ranks of a stack share: what they compute together stands in distributed/test_distributed_shared.py

SECOND = {"input_ids": torch.tensor([[3, 4, 5, 6]]), "position_ids": torch.tensor([[4, 5, 0, 1]])}
"""What the second of two ranks has of a row of 6 and 2 tokens."""


@pytest.fixture(params=SEQUENCE_GROUPS)
def two_ranks(request, monkeypatch):
    """The group of a stack, of which this process is the second rank; its collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    held: Any = dist.group.WORLD
    for name in reversed(SEQUENCE_GROUPS[request.param].split(".")):
        held = SimpleNamespace(**{name: held})
    monkeypatch.setitem(sys.modules, request.param, held)
    yield held
    dist.destroy_process_group()


def test_a_part_of_a_row_passes_as_it_is_or_is_refused(two_ranks):
    """Labels of a part: integration/test_page_of_errors."""
    model, seen, flash = model_of("qwen3"), [], {"attn_implementation": "flash_attention_2"}
    with adapt(model, **flash):
        model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
        model(**SECOND)
        assert all(seen[0][key] is value for key, value in SECOND.items())
        with pytest.raises(CollateError, match="The row has 8 tokens"):
            model(**SECOND, cu_seq_lens_q=torch.tensor([0, 6, 9]))
    with pytest.raises(UnsupportedFormError, match="other windows"):
        called(model_of("mistral"), {"input_ids": torch.arange(8).repeat(1, 4)}, **flash)
    model = model_of("qwen3_next")
    model.model.layers[0].linear_attn.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedFormError, match="2 ranks share each row"):
        called(model, SECOND)


@pytest.mark.parametrize("state", [None, SimpleNamespace()])
def test_a_stack_that_is_not_used_shares_nothing(state, monkeypatch):
    monkeypatch.setitem(sys.modules, "veomni.distributed.parallel_state", SimpleNamespace(_PARALLEL_STATE=state))
    called(model_of("qwen3"), {"input_ids": torch.tensor([[3, 4]]), "attention_mask": torch.tensor([[1, 1]])})
