"""`adapt(model)` wherever a model is wrapped, copied, compiled or called otherwise: each sample's own loss and gradient."""

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
from collate_npu.releases import KERNELS_TOLD  # noqa: E402
from collate_npu.testing import tiny_model  # noqa: E402

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]
VOCAB, PAD = 61, 7
ROWS = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in (7, 12, 4)]


def padded(side="left"):
    missing = [(12 - len(row), 0) if side == "left" else (0, 12 - len(row)) for row in ROWS]
    ids = torch.stack([nn.functional.pad(row, ends, value=PAD) for row, ends in zip(ROWS, missing)])
    keep = torch.stack([nn.functional.pad(torch.ones_like(row), ends) for row, ends in zip(ROWS, missing)])
    return {"input_ids": ids, "attention_mask": keep, "labels": ids.masked_fill(keep == 0, -100)}


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


class Holder(nn.Module):
    """As a stack's own actor or LightningModule."""

    def __init__(self, model):
        super().__init__()
        self.policy = model

    def forward(self, input_ids, **rest):
        return self.policy(input_ids, **rest)


def checkpointed(reentrant):
    def wrap(model):
        model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return model

    return wrap


WRAPPERS = {
    "as it is": lambda model: model,
    "in an actor": Holder,
    "checkpointed": checkpointed(False),
    "checkpointed, reentrant": checkpointed(True),
    "prepared by Accelerate": lambda model: pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(model),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(("family", "at"), [("qwen3", "in"), *(("qwen3_next", at) for at in ("in", "out", "in and out"))])
def test_every_layout_in_every_wrapper(family, at, wrapper, layout, monkeypatch):
    model, calls, mend = model_of(family), [], BatchAdapter.hand_over
    wanted = alone(model)
    handles = [adapt(model)] if "in" in at else []
    wrapped = WRAPPERS[wrapper](model)
    handles += [adapt(wrapped)] if "out" in at else []
    monkeypatch.setattr(BatchAdapter, "hand_over", lambda *a, **k: calls.append(1) or mend(*a, **k))
    assert_alone(wrapped, LAYOUTS[layout](), wanted)
    assert len(calls) == 1  # no recomputation comes by, and no second adapt
    for handle in handles:
        assert adapted(wrapped)
        handle.remove()
    assert not adapted(wrapped)


@pytest.mark.slow
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


@pytest.mark.parametrize("way", ["greedy", "beams", "a cache made before"])
def test_generation_is_as_without_it(way):
    model, prompt = model_of(), {key: value for key, value in padded().items() if key != "labels"}

    def said(keep=True, more=None):
        given = prompt if keep else {"input_ids": prompt["input_ids"][1:2]}
        more = {"num_beams": 2} if way == "beams" else {}
        if way == "a cache made before":
            more["past_key_values"] = transformers.DynamicCache(config=model.config)
        return model.generate(**given, max_new_tokens=4, do_sample=False, **more)

    if way == "a cache made before" and not KERNELS_TOLD.holds():
        pytest.skip("its caches are made otherwise")
    before = [said(), said(keep=False)]
    with adapt(model):
        assert all(map(torch.equal, before, [said(), said(keep=False)]))


def test_prompts_padded_right_are_refused_since_generation_goes_on_behind_padding():
    model, prompt = model_of(), {key: value for key, value in padded("right").items() if key != "labels"}
    with adapt(model):
        with pytest.raises(UnsupportedFormError, match=r"rows \[0, 2\] padded right") as error:
            model.generate(**prompt, max_new_tokens=2, do_sample=False)
        assert "padding_side" in str(error.value)
        with pytest.raises(UnsupportedFormError, match=r"rows \[0\] padded right"):  # by one column
            model.generate(**{key: value[:1, : len(ROWS[0]) + 1] for key, value in prompt.items()}, max_new_tokens=2)
        model(**prompt, logits_to_keep=2)  # a trainer's, of completions


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
    assert held(model) == before
    with adapt(model), torch.no_grad():
        model(**padded())
    assert not adapted(model)
    assert KNOWN_BATCHES.running == {}
    assert held(model) == before
    with pytest.raises(CollateError, match="from_pretrained"):
        adapt("Qwen/Qwen3")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_adapted_too_and_by_itself(copied):
    model = model_of("qwen3")
    wanted, handle = alone(model), adapt(model)
    other = copied(model)
    handle.remove()
    assert adapted(other)
    assert adapted(other.base_model)
    assert not adapted(model)
    assert_alone(other, padded(), wanted)


def test_after_an_error_inside_the_next_batch_is_looked_at():
    model = model_of()
    with adapt(model):
        with pytest.raises(IndexError):
            model(input_ids=torch.tensor([[VOCAB + 5]]), attention_mask=torch.ones(1, 1))
        assert adapted(model.base_model)


def test_another_attention_or_dtype_set_later_is_looked_at():
    model = model_of("qwen3")
    wanted = alone(model)
    with adapt(model):
        model.set_attn_implementation("eager")
        assert_alone(model, packed(), wanted)
        assert_alone(model, padded(), wanted)
        model.double()
        assert_alone(model, padded(), [each.double() for each in wanted])


# --- where it does not belong

MEGATRON = type("GPTModel", (type("MegatronModule", (nn.Module,), {"__module__": "megatron.core"}),), {})
REFUSED = {
    "no transformers model": lambda: nn.Linear(2, 2),
    "a layer of one": lambda: model_of().base_model.layers[0],
    "two of them": lambda: nn.ModuleList([model_of("qwen3"), model_of("qwen3")]),
    "a Megatron model": MEGATRON,
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_where_no_batch_of_transformers_comes_by(name):
    with pytest.raises(UnsupportedFormError, match="adapt takes one transformers model"):
        adapt(REFUSED[name]())


class Own(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, input_ids, attention_mask=None, position_ids=None, **more):
        return attention_mask


def test_a_model_of_the_callers_own_says_who_reads_and_of_a_hybrid_nobody_knows_the_boundaries():
    ids, keep = torch.tensor([[3, 4], [5, 6]]), torch.tensor([[0, 1], [1, 1]])
    for config in (SimpleNamespace(layer_types=["full_attention"]), model_of().config):
        with adapt(model := Own(config), consumer="transformers"):
            assert model(ids, keep).tolist() == keep.tolist()
    with adapt(model, consumer="transformers"), pytest.raises(UnsupportedFormError, match="Give each sequence its own row"):
        model(torch.tensor([[3, 4, 5]]), position_ids=torch.tensor([[0, 1, 0]]))


def test_tensors_without_values_are_refused():
    with adapt(model := model_of("qwen3").to("meta")), pytest.raises(CollateError, match="without values"):
        model(**{key: value.to("meta") for key, value in padded().items()})


def test_a_backbone_that_is_called_twice_in_a_forward_gets_what_the_model_got(monkeypatch):
    seen, mended = [], BatchAdapter.hand_over
    monkeypatch.setattr(BatchAdapter, "hand_over", lambda self, *args, **more: seen.append(1) or mended(self, *args, **more))
    model = tiny_model("qwen3", vocab_size=60)
    batch = {"input_ids": torch.tensor([[59, 1], [2, 3]]), "attention_mask": torch.tensor([[0, 1], [1, 1]])}
    model.lm_head.register_forward_pre_hook(lambda *_: model.model(**batch) and None)  # behind the first
    with adapt(model):
        model(**batch)
        model(**batch)
    assert len(seen) == 2


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
def test_a_forward_or_a_loss_of_others_sees_the_rows_that_came(put, monkeypatch):
    (model, seen), own = (model_of("qwen3"), []), nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda x, h: (x is model.lm_head and seen.append(h.shape[:2])) or own(x, h))
    with adapt(model):
        PUT[put](model)
        model(**padded())
    assert seen == [(1, 23) if put == "accelerate's" else (3, 12)]


def test_a_hook_that_stood_before_sees_the_rows_that_came():
    model, seen = model_of(), []
    model.register_forward_hook(lambda _, args, out: seen.append(out.logits.shape[:2]))
    with adapt(model):
        model(**padded())
    assert seen == [(3, 12)]


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


def test_a_class_that_differs_in_its_constructor_alone_is_asked_by_itself():
    """And an attention function that is registered anew: the answer that stands was of another model."""

    class Mixes(transformers.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model.norm = Mixing(self.model.norm)

    own = model_of("llama")
    assert adapt(own).way == "by sequence"
    assert adapt(Mixes(own.config)).way.startswith("padded: ")
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    BatchAdapter(model_of("llama"))(padded("left"))
    kept = functions["sdpa"]
    try:
        functions["sdpa"] = lambda module, q, k, v, mask, **rest: kept(module, q, k, v, None, **(rest | {"is_causal": True}))
        with pytest.raises(UnsupportedFormError, match="Padding there changes the real tokens"):
            BatchAdapter(model_of("llama"))(padded("left"))
    finally:
        functions["sdpa"] = kept


class Noisy(transformers.LlamaForCausalLM):
    """Stochastic depth, under a name that no rule knows."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        if self.training:
            out["logits"] = out["logits"] * torch.bernoulli(torch.tensor(0.7)).item()
        return out


@pytest.mark.parametrize("side", ["left", "right"])
def test_noise_of_training_is_no_leak(side):
    model = Noisy(model_of("llama").config)
    assert BatchAdapter(model)(padded(side))["labels"].shape == (3, 12)
    assert adapt(model).way == "by sequence"


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
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "lora" in name or "poly" in name:
                each.normal_(0, 0.2)
    batch = {key: value for key, value in padded(side).items() if key != "labels"} | more
    with torch.no_grad():
        plain = model(**batch, use_cache=False).logits
        with adapt(model):
            found = model(**batch, use_cache=False).logits
    keep = batch["attention_mask"].bool()
    assert torch.allclose(found[keep], plain[keep], atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("train", [True, False])
def test_an_empty_cache_beside_several_sequences_is_none(family, train):
    model = model_of(family).train(train)
    truth = [model(input_ids=row[None]).logits[0] for row in ROWS]
    batch = packed() | {"past_key_values": transformers.DynamicCache(config=model.config), "labels": None}
    with adapt(model):
        found = model(**batch).logits[0]
    assert torch.allclose(found, torch.cat(truth), atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("zeros", [False, True], ids=["a mask", "a mask of zeros"])
def test_a_micro_batch_that_learns_nothing_keeps_ranks_in_step(family, zeros):
    """EasyR1 1011: its loss is 0, and so is its gradient; a mean of none would be NaN."""
    model, batch = model_of(family).train(), padded()
    batch |= {"labels": torch.full_like(batch["labels"], -100)}
    batch |= {"attention_mask": torch.zeros_like(batch["attention_mask"])} if zeros else {}
    with adapt(model):
        loss, gradient = numbers(model, batch)
    assert float(loss) == 0
    assert float(gradient.abs().max()) == 0


def test_a_loss_outside_the_forward_is_told_of_first_labels():
    batch = {key: value for key, value in padded().items() if key != "labels"}
    with adapt(model := model_of("llama").train()), pytest.warns(UserWarning, match="unless its label is -100"):
        model(**batch)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_routers_loss_counts_no_tail_of_a_flat_row(family):
    model = model_of(family)
    rows = {"input_ids": torch.cat(ROWS)[None], "position_ids": packed()["position_ids"]}
    ends = {"input_ids": torch.zeros(1, 5, dtype=torch.long), "position_ids": torch.arange(5)[None]}
    tail = {key: torch.cat([value, ends[key]], 1) for key, value in rows.items()}
    labels = nn.functional.pad(rows["input_ids"], (0, 5), value=-100)
    with adapt(model):
        wanted = model(**rows, labels=rows["input_ids"], output_router_logits=True).aux_loss
        found = model(**tail, labels=labels, output_router_logits=True).aux_loss
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
    model, seen = model_of("qwen3"), []
    with adapt(model, attn_implementation="flash_attention_2"):
        model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
        model(**SECOND)
        assert all(seen[0][key] is value for key, value in SECOND.items())
        with pytest.raises(CollateError, match="The row has 8 tokens"):
            model(**SECOND, cu_seq_lens_q=torch.tensor([0, 6, 9]))
    adapt(model := model_of("mistral"), attn_implementation="flash_attention_2")
    with pytest.raises(UnsupportedFormError, match="other windows"):
        model(ids := torch.arange(8).repeat(1, 4))
    with pytest.raises(UnsupportedFormError, match="moves labels within this rank's part"):
        model(ids, labels=ids)
    model = model_of("qwen3_next")
    model.model.layers[0].linear_attn.register_forward_hook(lambda *_: None)
    with adapt(model), pytest.raises(UnsupportedFormError, match="2 ranks share each row"):
        model(**SECOND)


@pytest.mark.parametrize("state", [None, SimpleNamespace()])
def test_a_stack_that_is_not_used_shares_nothing(state, monkeypatch):
    model = model_of("qwen3")
    monkeypatch.setitem(sys.modules, "veomni.distributed.parallel_state", SimpleNamespace(_PARALLEL_STATE=state))
    with adapt(model):
        assert model(torch.tensor([[3, 4]]), torch.tensor([[1, 1]])).logits.shape == (1, 2, 61)
