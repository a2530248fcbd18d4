"""Known kernels: what the arguments of a call say of sequences, Megatron's by its own reading of masks and offsets."""

import csv
import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import strategies
import torch
from hypothesis import given
from torch import nn

from benchmarks.operators import KERNELS as OPERATORS, Truth
from collate_npu import CollateError, Segments
from collate_npu.kernels import prefix_triangle, triangle
from collate_npu.masks import dense
from collate_npu.masks.patterns import CAUSAL
from collate_npu.proof import boundaries
from collate_npu.proof.boundaries import attention_reason, boundary_reason
from collate_npu.proof.known_kernels import KERNELS, MODULES, MisusedError, UnreadError

KERNEL, (_, READ) = "megatron.DotProductAttention", MODULES["DotProductAttention"]
LOCAL = type("DotProductAttention", (nn.Module,), {"__module__": "megatron.core.transformer.dot_product_attention"})
FUSED = type("TEDotProductAttention", (nn.Module,), {"__module__": "transformer_engine.pytorch"})
LEFT = Segments.from_lengths([4, 6], side="left")
ROWS = torch.ones(6, 2, 1, 4)


def told(module, mask):
    return READ(KERNEL, {"self": module(), "query": ROWS, "key": ROWS, "attention_mask": mask})


def test_a_mask_is_all_that_the_local_one_reads_and_nothing_to_the_fused_one():
    mask = dense(LEFT, polarity="masked")
    local = told(LOCAL, mask)
    assert boundary_reason(local, LEFT) == ""
    assert not torch.triu(local.allowed(1)[0], 1).any()
    assert torch.triu(told(LOCAL, torch.zeros_like(mask)).allowed(1)[0], 1).any()  # it looks ahead
    assert (told(LOCAL, None).causal, told(FUSED, mask).causal, str(told(FUSED, mask))) == (True, True, "nothing")


@pytest.mark.parametrize(("layout", "tokens"), [("sbhd", 0), ("bshd", 1)])
def test_queries_and_keys_are_the_same_tokens_in_every_layout(layout, tokens):
    q = ROWS.movedim(0, tokens)
    read = {"self": LOCAL(), "query": q, "key": q, "qkv_format": layout}
    assert READ(KERNEL, read).shape == (2, 6)
    with pytest.raises(UnreadError):
        READ(KERNEL, read | {"key": q.narrow(tokens, 0, 5)})


def test_what_the_other_kernels_are_told():
    x, v = torch.ones(1, 5, 1, 4), torch.ones(1, 5, 1, 4)
    v[:, [0, 1, 3]] = 0  # where no state is there yet, and where one is
    rule = KERNELS["chunk_gated_delta_rule"][1]("fla.chunk_gated_delta_rule", {"q": x, "k": x, "v": v})
    assert rule.neutral_T.tolist() == [True, True, False, False, False]
    flash = KERNELS["flash_attn_func"][1]("flash_attn.flash_attn_func", {"q": x, "causal": True, "window_size": (2, 0)})
    assert flash.reach == 3
    assert KERNELS["flash_attn_func"][1]("flash_attn.flash_attn_func", {"q": X}).shape == (2, 6)
    rule = KERNELS["chunk_gated_delta_rule"][1]("fla", {"q": x, "k": v, "cu_seqlens": torch.tensor([0])})
    assert rule.neutral_T.tolist() == [True, True, False, True, False]
    assert str(rule) == "zeros [2]"  # offsets of no sequence say nothing
    for unknown in ({"v": v}, {"k": v.to("meta"), "v": v}):  # no key, or one without values
        rule = KERNELS["chunk_gated_delta_rule"][1]("fla.chunk_gated_delta_rule", {"q": x, **unknown})
        assert not rule.neutral_T.any()
    rule = KERNELS["chunk_gated_delta_rule"][1]("stranger.chunk_gated_delta_rule", {"args": (x, x, v), "beta": x[..., 0]})
    assert (rule.shape, str(rule)) == ((1, 5), "nothing")  # a wrapper whose q, k and v have no names
    for q in (X[:, :, 0], X[0, :, 0]):
        assert KERNELS["scaled_dot_product_attention"][1]("torch.sdpa", {"query": q, "key": q}).shape == (q.numel() // 24, 6)


@pytest.mark.parametrize(("size", "reach"), [((2, 0), 3), ([0, 0], 1), (2, 3), ((-1, 0), 6), (-1, 6), (None, 6)])
def test_a_window_is_the_tokens_before_a_query_and_itself(size, reach):
    assert KERNELS["flash_attn_func"][1]("flash_attn.flash_attn_func", {"q": X, "window_size": size}).reach == reach


def test_a_bias_blocks_at_a_number_beside_a_score_mod_too():
    x, mask = torch.ones(1, 1, 2, 4), torch.tensor([[0.0, -9984.0], [-9983.0, 0.0]])
    told = KERNELS["scaled_dot_product_attention"][1]("torch.sdpa", {"query": x, "key": x, "attn_mask": mask})
    assert told.allowed(0)[0].tolist() == [[True, False], [True, True]]
    flex = {"query": x, "key": x, "attention_mask": mask[None, None]}
    assert KERNELS["flex_attention"][1]("flex", flex).allowed(0)[0].tolist() == told.allowed(0)[0].tolist()
    both = KERNELS["flex_attention"][1]("flex", {**flex, "score_mod": lambda score, b, h, q, k: score - 1e6 * (q == k)})
    assert both.allowed(0)[0].tolist() == [[False, False], [True, False]]
    assert KERNELS["flex_attention"][1]("flex", {"query": x, "key": x}).allowed(0)[0].all()


class OnCard(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize("fuses", [None, False, True])
@pytest.mark.parametrize("kind", [torch.Tensor, OnCard])
def test_megatrons_fused_softmax_reads_no_mask_on_a_card(kind, fuses):
    module, q = LOCAL(), ROWS.as_subclass(kind)
    module.scale_mask_softmax = SimpleNamespace(**{} if fuses is None else {"scaled_masked_softmax_fusion": fuses})
    found = READ(KERNEL, {"self": module, "query": q, "key": q, "attention_mask": dense(LEFT, polarity="masked")})
    assert (str(found) == "nothing") == (kind is OnCard and fuses is True)


def packed(**offsets):
    params = SimpleNamespace(qkv_format="thd", **{name: torch.tensor(each) for name, each in offsets.items()})
    return READ(KERNEL, {"self": FUSED(), "query": torch.ones(12, 1, 4), "packed_seq_params": params})


def test_offsets_of_padded_rows_are_not_read():
    params = SimpleNamespace(qkv_format="sbhd", cu_seqlens_q=torch.tensor([0, 3, 6]))
    assert READ(KERNEL, {"self": FUSED(), "query": ROWS, "packed_seq_params": params}).shape == (2, 6)


def test_places_by_padded_offsets_and_tokens_by_the_others():
    found = packed(cu_seqlens_q=[0, 3, 7], cu_seqlens_q_padded=[0, 6, 12])
    assert np.flatnonzero(~found.neutral_T).tolist() == [0, 1, 2, 6, 7, 8, 9]
    truth = Segments.from_ids(torch.tensor([[1, 1, 1, 0, 0, 0, 2, 2, 2, 2, 0, 0]]))
    assert boundary_reason(found, truth) == ""
    less = packed(cu_seqlens_q=[0, 2, 6], cu_seqlens_q_padded=[0, 6, 12])
    assert "the kernel treats it as padding" in boundary_reason(less, truth)
    assert not packed(cu_seqlens_q=[0, 7], cu_seqlens_q_padded=[0, 6, 12]).fits
    assert packed(cu_seqlens_q_padded=[0, 6, 12]).fits
    assert not packed(cu_seqlens_q=[0, 12, 24]).fits
    row, sides = Segments.from_lengths([[6, 6]]), {"cu_seqlens_q": [0, 6, 12]}
    assert boundary_reason(packed(**sides, cu_seqlens_kv=[0, 6, 12]), row) == ""
    assert "goes on from another sequence" in boundary_reason(packed(**sides, cu_seqlens_kv=[0, 5, 12]), row)
    assert "does not read the first 1" in boundary_reason(packed(**sides, cu_seqlens_kv=[0, 7, 12]), row)
    with pytest.raises(UnreadError, match="other tokens than its keys"):
        packed(**sides, cu_seqlens_kv=[0, 5, 11])


X = torch.ones(2, 6, 1, 4)
UNREAD = {
    "it goes on from a state": ("chunk_gated_delta_rule", {"q": X, "k": X, "v": X, "initial_state": X}),
    "no tensor has its tokens": ("chunk_gated_delta_rule", {"scale": 1.0}),
    "is not rows of tokens": ("flash_attn_func", {"q": X[0]}),
    "it has no offsets": ("flash_attn_varlen_func", {"q": X[0], "k": X[0]}),
    "other tokens than its keys": (
        "flash_attn_varlen_func",
        {"q": X[0], "k": X[0], "cu_seqlens_q": torch.tensor([0, 2, 6]), "cu_seqlens_k": torch.tensor([0, 3, 5])},
    ),
    "its queries are other tokens": (
        "npu_fusion_attention",
        {"query": X, "key": X[:, :5], "value": X[:, :5], "head_num": 1, "input_layout": "BSND"},
    ),
}


@pytest.mark.parametrize("says", UNREAD)
def test_a_call_that_is_not_read_says_why(says):
    name, values = UNREAD[says]
    with pytest.raises(UnreadError, match=says):
        KERNELS[name][1](name, values)


# --- the vendor's own verdicts, and cases derived from the tiling code, with the line of each rule

with (Path(__file__).parents[1] / "data" / "npu-mask-cases.csv").open(encoding="utf-8", newline="") as facts:
    CASES = [case for case in csv.DictReader(facts) if case["Sq"] == case["Skv"] or case["atten_mask_shape"] == "None"]
STRICTER = (*(f"SpecCore_Case_0{n}" for n in (13, 25, 27)), "becomes full attention", "full attention per sequence")
"""Taken by the operator, but meant by nobody: None in a sparse mode, a dense mask in a compressed one. How sources end."""
OF_MASKS = ("mask", "4-D mask", "2-D mask", "compressed mask")
"""How rules of masks begin; those of tokens are left to the card."""


def fusion_call(case):
    """The arguments of a case; the mask has the contents that its mode asks for."""
    B, N, S, D, mode = (int(case[name]) for name in ("B", "N1", "Sq", "D", "sparse_mode"))
    lists = ("prefix", "actual_seq_qlen", "actual_seq_kvlen")
    kwargs = {name: json.loads(case[name]) if case[name] else None for name in lists}
    T = (kwargs["actual_seq_qlen"] or [0])[-1]
    shapes = {"BSND": (B, S, N, D), "BNSD": (B, N, S, D), "BSH": (B, S, N * D), "SBH": (S, B, N * D), "TND": (T, N, D)}
    q = torch.empty(shapes[case["layout"]], device="meta")
    kwargs |= {"query": q, "key": q, "head_num": N, "input_layout": case["layout"], "sparse_mode": mode}
    if case["atten_mask_shape"] != "None":
        shape = tuple(json.loads(case["atten_mask_shape"]))
        made = {(2048, 2048): triangle, (3072, 2048): prefix_triangle}.get(shape) if mode > 1 else None
        kwargs["atten_mask"] = (torch.zeros(shape) if made is None else made()).to(getattr(torch, case["dtype"]))
    return kwargs | {"pre_tockens": int(case["pre"]), "next_tockens": int(case["next"])}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["source"].split("/")[-1][-40:])
def test_the_vendors_verdict_on_masks_holds(case, monkeypatch):
    monkeypatch.setattr(boundaries, "by_mask", lambda rows, B, T: (np.zeros(B * T, int), np.zeros(B * T, bool), 0))
    misused = False
    with suppress(UnreadError):
        try:
            KERNELS["npu_fusion_attention"][1]("torch_npu.npu_fusion_attention", fusion_call(case))
        except MisusedError as error:
            misused = bool(error.remedy)
    wanted = case["source"].endswith(STRICTER) if case["verdict"] == "ACCEPT" else case["rule"].startswith(OF_MASKS)
    assert misused == wanted


class AskedError(Exception):
    """Raised in the place of the operator."""


@pytest.mark.parametrize("kernel", OPERATORS, ids=lambda kernel: kernel.name)
@given(segments=strategies.segments())
def test_what_our_arguments_say_is_read_off_them(kernel, segments):
    """Of every operator, in each of its forms: no real token goes on from others, or attends others, than its own."""
    for form in kernel.forms:
        held = {}

        def ask(_, held=held, **arguments):
            held.update(arguments)
            raise AskedError

        with suppress(AskedError, CollateError):
            kernel.call(ask, Truth("", segments), kernel.problem.draw(segments), form)
        if held and "initial_state" not in held:  # else it has no form for these, or is not read
            told = KERNELS[kernel.name.rpartition(".")[2]][1](kernel.name, held)
            rows = range(0 if told.allowed is None else told.shape[0])
            assert [*filter(None, (attention_reason(segments, CAUSAL, b, told.allowed(b)) for b in rows))] == []
            assert rows or boundary_reason(told, segments) == ""
