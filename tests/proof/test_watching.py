"""Watch: each way to lose a fact between batch and kernel is found, and named where it happens; right runs have no fault."""

import json
import pickle
from contextlib import suppress

import pytest
import torch
from stranger import Model
from torch import nn

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Segments
from collate_npu.proof import watch
from collate_npu.testing import tiny_model
from collate_npu.testing.kernels import reference_kernels

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


LEFT = {
    "input_ids": torch.tensor([[9, 9, 9, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7]]),
    "attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7]),
}


@pytest.mark.parametrize("family", ["qwen3_next", "llama", "mistral", "bamba", "lfm2"])
def test_a_left_padded_batch_of_transformers(family):
    model = tiny_model(family, vocab_size=64)
    with watch(say=False) as seen:
        model(**LEFT)
    assert seen.faults == []
    assert seen.forwards[0].truth == Segments.from_lengths([4, 7], side="left")
    assert all(seen.forwards[0].judges(call) for call in seen.forwards[0].calls)
    assert seen.forwards[0].silent == []


def replaced(model, layers, change):
    """A stack that hands other keywords to layers."""
    for name, layer in model.named_modules():
        if name.endswith(layers):
            layer.register_forward_pre_hook(lambda module, args, kwargs: (args, change(dict(kwargs))), with_kwargs=True)
    return model


def without_mask(kwargs):
    return kwargs | {"attention_mask": None}


def turned(kwargs):
    return kwargs | {"attention_mask": None if kwargs.get("attention_mask") is None else kwargs["attention_mask"] == 0}


def all_ones(kwargs):
    return kwargs | {"attention_mask": torch.ones_like(kwargs["attention_mask"])}


TRANSFORMERS = {
    "recurrent layers lose the mask": ("qwen3_next", "linear_attn", without_mask),
    "recurrent layers get ones": ("qwen3_next", "linear_attn", all_ones),
    "recurrent layers get it turned round": ("qwen3_next", "linear_attn", turned),
    "one recurrent layer alone loses it": ("qwen3_next", "0.linear_attn", without_mask),
    "attention loses the mask": ("qwen3_next", "self_attn", without_mask),
    "attention gets it turned round": ("llama", "self_attn", turned),
    "attention of one layer loses the mask": ("llama", "1.self_attn", without_mask),
    "convolutions lose the mask": ("lfm2", ".conv", without_mask),
    "scans lose the mask": ("bamba", "mamba", without_mask),
}


@pytest.mark.parametrize("fault", TRANSFORMERS)
def test_layers_of_transformers_that_lose_a_fact(fault):
    family, layers, change = TRANSFORMERS[fault]
    model = replaced(tiny_model(family, vocab_size=64), layers, change)
    with watch(say=False) as seen:
        model(**LEFT)
    assert seen.faults
    assert all(layers in each.layer for each in seen.faults), seen.faults


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_window_that_a_dense_mask_loses(family, attention):
    model = tiny_model(family, vocab_size=64, attn_implementation=attention)
    ids, full = torch.randint(1, 64, (1, 12)), torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    bias = torch.where(full, 0.0, torch.finfo(torch.float32).min)
    with watch(say=False, steps=3) as seen:
        model(input_ids=ids, attention_mask=torch.ones(1, 12).long())
        assert seen.faults == []
        model(input_ids=ids, attention_mask=bias)
    windowed = 2 if family == "gemma3_text" else 3
    assert [each.why for each in seen.faults] == ["row 0 attends more than sliding(8) attention does"] * windowed


@pytest.mark.parametrize("attention", ["eager", pytest.param("flex_attention", marks=pytest.mark.slow)])  # it compiles
@torch.no_grad()
def test_other_attention_of_transformers(attention):
    model = tiny_model("llama", vocab_size=64, attn_implementation=attention)
    with watch(say=False) as seen:
        model(**LEFT)
    assert seen.faults == []
    assert len(seen.forwards[0].calls) == 4
    with watch(say=False) as seen:
        replaced(model, "1.self_attn", without_mask)(**LEFT)
    assert {each.layer for each in seen.faults} == {"model.layers.1.self_attn"}


def test_positions_that_are_another_sequences():
    model = tiny_model("llama", vocab_size=64)
    with watch(say=False, steps=3) as seen:
        model(**LEFT, position_ids=torch.arange(7).expand(2, 7))  # rotary: what differs is right
        model(**LEFT, position_ids=torch.arange(7).flip(0).expand(2, 7))
    assert [each.kernel for each in seen.faults] == ["LlamaRotaryEmbedding"]
    gpt2 = tiny_model("gpt2", vocab_size=64)
    with watch(say=False, steps=3) as seen:
        gpt2(**LEFT)
        gpt2(**BatchAdapter(gpt2)(LEFT))
    assert [each.layer for each in seen.faults] == ["transformer.wpe"]


def test_flat_rows_of_our_collator_and_one_of_them_lost():
    model = tiny_model("qwen3_next", vocab_size=64)
    with reference_kernels(model):
        collator = PaddingCollator(model=model, padding_free=True)
        batch = collator([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])
        with watch(say=False, steps=3) as seen:
            model(**batch)
            assert seen.faults == []
            replaced(model, "linear_attn", lambda kwargs: kwargs | {"seq_idx": torch.zeros(1, 5).int()})(**batch)
    assert {each.kernel for each in seen.faults} == {"transformers.causal_conv1d_fn"}


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


def test_steps_end_with_the_optimizer_and_then_all_is_as_it_was():
    sdpa, call = torch.nn.functional.scaled_dot_product_attention, nn.Module._call_impl
    model = tiny_model("llama", vocab_size=64).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(say=False, steps=2) as seen:
        assert torch.nn.functional.scaled_dot_product_attention is not sdpa
        for _ in range(4):
            for _ in range(2):
                model(**LEFT, labels=LEFT["input_ids"]).loss.backward()
            optimizer.step()
        assert torch.nn.functional.scaled_dot_product_attention is sdpa
    assert [forward.step for forward in seen.forwards] == [0, 0, 1, 1]
    assert nn.Module._call_impl is call
    assert pickle.loads(pickle.dumps(model.config)).model_type == "llama"


def test_nothing_seen_is_no_pass():
    with watch(say=False) as seen:
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert "NOTHING WAS SEEN" in seen.summary()


def test_what_it_writes(tmp_path, capsys):
    out = tmp_path / "seen.jsonl"
    with watch(out=out):
        tiny_model("qwen3_next", vocab_size=64)(**LEFT)
    said = capsys.readouterr().err
    assert (
        "step 0 rank 0 · 2 recurrent: convolution zeros [4, 7] ✔ · rule zeros [4, 7] ✔ · 1 attention: mask [4, 7] ✔" in said
    )
    record = json.loads(out.read_text().splitlines()[0])
    assert record["faults"] == []
    assert record["kernels"]["transformers.torch_chunk_gated_delta_rule"] == 2


def test_a_full_disk_does_not_end_the_run(capsys):
    with watch(out="/dev/full") as seen:
        tiny_model("llama", vocab_size=64)(**LEFT)
    assert seen.forwards
    assert "nothing more is written there" in capsys.readouterr().err


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
