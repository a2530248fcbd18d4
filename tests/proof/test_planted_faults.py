"""Planted faults, a row each, over six stacks: who claims to see one sees it, and names its layer where it can; and right
runs, of which nobody says anything.

Entrances: c check_delivery, w watch, n watch says that it was not looked at, i assert_padding_invariant, f conformance. A
capital names the layer. What is not claimed is not judged: a kernel that nobody
knows is not heard by watch, and so on.
"""

from contextlib import suppress
from functools import partial

import pytest
import strategies
import torch
import toys
from hypothesis import given as drawn, settings, strategies as st
from stranger import Model, causal_conv1d_fn
from torch import nn
from torch.nn import functional as F
from toys import IDS, OFFSETS, Net, core, flex, fusion, heads, joined, own, packed, padded, rule, sdpa, softmax, varlen

from collate_npu import CollateError, check_delivery, guard_first_batch
from collate_npu.kernels.fusion_attention import triangle
from collate_npu.proof import watch
from collate_npu.proof.conformance import conformance
from collate_npu.proof.invariance import assert_padding_invariant


def rows_of(lengths):
    each = ([(5 + 7 * n + 3 * t) % 50 + 5 for t in range(S)] for n, S in enumerate(lengths))
    return [{"input_ids": ids, "labels": ids} for ids in each]


ROWS = rows_of((9, 5, 12))


def but(**changes):
    """The part's own way, told something else."""
    return lambda part, x, told, way: way(part, x, {**told, **{key: change(told) for key, change in changes.items()}})


def out(change):
    """The part's own way, whose answer is changed."""
    return lambda part, x, told, way: change(way(part, x, told))


def into(change):
    """The part's own way, called with other states."""
    return lambda part, x, told, way: way(part, change(x), told)


def instead(of):
    return lambda part, x, told, way: of(part, x, told)


def training(fault):
    return lambda part, x, told, way: fault(part, x, told, way) if part.training else way(part, x, told)


def of_flat_rows(fault):
    return lambda part, x, told, way: way(part, x, told) if told["cu"] is None else fault(part, x, told, way)


def causal(told):
    return torch.ones_like(told["allowed"]).tril()


def of_head(h, lost):
    """A mask of each head, of which one is another."""

    def change(told):
        allowed = told["allowed"].repeat(1, 4, 1, 1)
        allowed[:, h] = lost(told)[:, 0]
        return allowed

    return change


def tells(change):
    """What a mask_mod says, by `change(told, b, h, q, k, right)`."""

    def of(told):
        ids = told["ids"]
        return lambda b, h, q, k: change(told, b, h, q, k, (q >= k) & (ids[b, q] == ids[b, k]) & (ids[b, k] > 0) | (q == k))

    return of


def scored(blocks):
    def of(told):
        return lambda score, b, h, q, k: torch.where(blocks(told, b, h, q, k), -float("inf"), score)

    return of


def itself(told):
    return torch.eye(told["allowed"].shape[-1]).bool().expand_as(told["allowed"])


def bare(part, x, told):
    return joined(F.scaled_dot_product_attention(*heads(part, x), is_causal=True))


def half(part, x, told, way):
    """Half of the heads by the known kernel, half by a softmax of its own that knows no mask."""
    q, k, v = heads(part, x)
    known = F.scaled_dot_product_attention(q[:, :2], k[:, :2], v[:, :2], attn_mask=told["allowed"])
    return joined(torch.cat([known, softmax(q[:, 2:], k[:, 2:], v[:, 2:], causal(told))], 1))


def rnn(kind, **settings):
    torch.manual_seed(1)
    held = kind(24, 24, batch_first=True, **settings)
    return lambda part, x, told: held(x)[0][..., :24]


def scan(part, x, told):
    state, found = torch.zeros(len(x), 24), []
    for t in range(x.shape[1]):
        state = 0.8 * state + part.qkv(x)[:, t, :24]
        found.append(state)
    return torch.stack(found, 1)


def convolved(part, x, told):
    numbers = told["ids"].int() - 1
    return causal_conv1d_fn(part.qkv(x).transpose(1, 2), part.weight, numbers)[:, :24].transpose(1, 2).cumsum(1)


def chosen_by_experts(part, x, told):
    """Each of two experts takes half of all tokens."""
    scores = part.qkv(x)[..., :2].flatten(0, 1).softmax(0)
    taken = torch.zeros_like(scores).scatter(0, scores.topk(len(scores) // 2, dim=0).indices, 1.0)
    return x * (scores * taken).sum(-1).reshape(*x.shape[:2], 1) * 9


def weighted(part, x, told):
    """Masked behind the softmax: padding has its share."""
    q, k, v = heads(part, x)
    scores = (q @ k.transpose(-1, -2)).masked_fill(~causal(told), -1e9).softmax(-1)
    return joined((scores * told["allowed"]) @ v)


def weakly(part, x, told):
    q, k, v = heads(part, x)
    return joined(((q @ k.transpose(-1, -2)).masked_fill(~causal(told), -1e9) - 2.0 * ~told["allowed"]).softmax(-1) @ v)


BATCH_NORM = nn.BatchNorm1d(24)


def shifted(cu):
    return torch.cat([cu[:1], cu[1:-1] + 1, cu[-1:]])


LEAKS = "cif"
"""By code that no kernel tells of."""
TOLD = "CWif"
OWN = {
    "a softmax without a mask": instead(lambda p, x, t: own(p, x, {"allowed": causal(t)})),
    "a softmax that looks ahead": instead(lambda p, x, t: own(p, x, {"allowed": torch.ones_like(t["allowed"])})),
    "a mask of the row beside it": but(allowed=lambda t: t["allowed"].roll(1, 0)),
    "one row's mask for all": but(allowed=lambda t: t["allowed"][-1:].expand_as(t["allowed"])),
    "a mask turned around": but(allowed=lambda t: t["allowed"].flip(-1) | causal(t) & ~t["allowed"]),
    "a mask that is one token short": but(allowed=lambda t: t["allowed"] | t["allowed"].roll(-1, -1) & causal(t)),
    "a mask behind the softmax": instead(weighted),
    "a mask that is too weak": instead(weakly),
    "padding that is asked": instead(lambda p, x, t: own(p, x, {"allowed": causal(t)}) * t["keep"][..., None]),
    "a sum over all rows": out(lambda x: x + 0.1 * x.flatten(0, 1).cumsum(0).reshape(x.shape)),
    "the mean of the row": into(lambda x: x - x.mean(1, keepdim=True)),
    "a Fourier transform": instead(lambda p, x, t: torch.fft.fft(x, dim=1).real),
    "a first token for all": into(lambda x: x + x[:, :1]),
    "a last token for all": (into(lambda x: x + x[:, -1:]), "if"),
    "states rolled by one": out(lambda x: x.roll(1, 1)),
    "rows swapped": out(lambda x: x.flip(0)),
    "a mask lost in training": training(but(allowed=causal)),
    "a GRU": instead(rnn(nn.GRU)),
    "a loop over tokens": instead(scan),
    "experts choose tokens": instead(chosen_by_experts),
    "a convolution without a gap": instead(lambda p, x, t: F.pad(x, (0, 0, 3, 0)).unfold(1, 4, 1) @ p.weight[0]),
    "a batch norm that trains": into(lambda x: BATCH_NORM(x.mT).mT),
    "a difference to the token before": into(lambda x: x - F.pad(x, (0, 0, 1, 0))[:, :-1]),
}
IN_SDPA = {
    "one head attends padding": but(allowed=of_head(2, causal)),
    "one head attends ahead": (but(allowed=of_head(1, lambda t: torch.ones_like(t["allowed"]))), "CWfi"),
    "one head loses keys": (but(allowed=of_head(3, itself)), "CW"),
    "a key is lost": but(allowed=lambda t: t["allowed"] & (torch.arange(t["keep"].shape[1]) != 9) | itself(t)),
    "masks of rows in another order": but(allowed=lambda t: t["allowed"].flip(0)),
    "the mask transposed": but(allowed=lambda t: t["allowed"].transpose(-1, -2)),
    "half of the heads by a softmax": (half, LEAKS),
    "a mask lost in training": training(but(allowed=causal)),
    "a kernel for each row": (instead(lambda p, x, t: torch.cat([bare(p, row[None], t) for row in x])), LEAKS),
    "no mask, and causal": instead(bare),
}
IN_RULE = {
    "padding is written": but(written=lambda t: 1.0),
    "a shift over all rows": (but(behind=lambda t: lambda x: x + x.flatten(0, 1).roll(1, 0).view(x.shape)), LEAKS),
    "a mean behind the convolution": (but(behind=lambda t: lambda x: x - 0.5 * x.mean(1, keepdim=True)), "if"),
    "real tokens count for nothing": but(keep=lambda t: t["keep"] & (torch.arange(t["keep"].shape[1]) != 10)),
    "the mask of the row beside it": but(keep=lambda t: t["keep"].roll(1, 0)),
}
IN_CORE = {
    "what blocks for what attends": but(blocked=lambda t: t["allowed"]),
    "a kernel that does not read its mask": (but(kind=lambda t: "no_mask"), LEAKS),
    "a triangle alone": but(blocked=lambda t: ~causal(t)),
    "no mask": but(blocked=lambda t: None),
    "one head attends padding": but(blocked=lambda t: ~of_head(0, causal)(t)),
    "halves in another order": (out(lambda x: x.roll(x.shape[1] // 2, 1)), LEAKS),
}
IN_FLEX = {
    "one head attends padding": but(tells=tells(lambda t, b, h, q, k, right: right | (h == 2) & (q >= k))),
    "one head loses keys": (but(tells=tells(lambda t, b, h, q, k, right: right & ((h != 3) | (q == k)))), "CW"),
    "the row beside it": but(tells=tells(lambda t, b, h, q, k, right: (q >= k) & (t["ids"][b - 1, k] > 0) | (q == k))),
    "a score that loses keys": (but(score=scored(lambda t, b, h, q, k: q - k == 2)), "CW"),
    "a score alone that reads padding": but(bare=lambda t: True, score=scored(lambda t, b, h, q, k: q < k)),
    "a score of one head": (but(score=scored(lambda t, b, h, q, k: (h == 0) & (q != k))), "CW"),
    "nothing at all": but(bare=lambda t: True),
    "ahead by one": but(tells=tells(lambda t, b, h, q, k, right: right | (k == q + 1))),
}
IN_PACKED_FLEX = {
    "sequences run together": but(tells=tells(lambda t, b, h, q, k, right: q >= k)),
    "numbers one late": but(ids=lambda t: t["ids"].roll(1, 1).index_fill(1, torch.tensor([0]), 1)),
    "one head over boundaries": but(tells=tells(lambda t, b, h, q, k, right: right | (h == 3) & (q >= k))),
    "a score alone without boundaries": but(bare=lambda t: True, score=scored(lambda t, b, h, q, k: q < k)),
}
IN_VARLEN = {
    "keys of other sequences": (but(keys=lambda t: shifted(t["cu"])), "CW"),
    "offsets one late": but(cu=lambda t: shifted(t["cu"])),
    "one sequence": but(cu=lambda t: t["cu"][[0, -1]]),
    "two sequences as one": but(cu=lambda t: t["cu"][[0, *range(min(2, len(t["cu"]) - 1), len(t["cu"]))]]),
    "a boundary too many": (but(cu=lambda t: torch.cat([t["cu"][:1], t["cu"][:1] + 2, t["cu"][1:]])), "CWf"),
    "to both sides": but(causal=lambda t: False),
    "ahead by a window": but(causal=lambda t: False, window=lambda t: (-1, 1)),
    "a softmax over the row": (instead(lambda p, x, t: own(p, x, {"allowed": causal(t)})), "ncif"),
    "answers rolled by one": (out(lambda x: x.roll(1, 1)), LEAKS),
    "a GRU over the row": (instead(rnn(nn.GRU)), "ncif"),
}
IN_PACKED_RULE = {
    "a rule of other offsets": but(offsets=lambda t: shifted(t["cu"])),
    "a rule without offsets": but(offsets=lambda t: None),
    "a convolution of other numbers": but(numbers=lambda t: t["ids"].roll(1, 1) - 1),
    "a convolution of one number": but(numbers=lambda t: torch.zeros_like(t["ids"])),
    "a shift behind the convolution": (but(behind=lambda t: lambda x: x + x.roll(1, 1)), LEAKS),
    "a sum behind the convolution": (but(behind=lambda t: lambda x: x.cumsum(1)), LEAKS),
    "a scan of its own behind the convolution": (instead(convolved), "ncif"),
}


def given(**arguments):
    """The operator is called with these, a function's made from what is told."""
    return but(given=lambda told: {name: x(told) if callable(x) else x for name, x in arguments.items()})


IN_FUSION = {
    "a mask [B, S]": given(atten_mask=lambda t: ~t["keep"]),
    "a mask [B, 1, 1, S]": given(atten_mask=lambda t: ~t["keep"][:, None, None]),
    "a mask of key heads": given(atten_mask=lambda t: ~t["allowed"].expand(-1, 2, -1, -1)),
    "a mask of floats": given(atten_mask=lambda t: (~t["allowed"]).float()),
    "a mask of int64": given(atten_mask=lambda t: (~t["allowed"]).long()),
    "a dense mask in a compressed mode": given(sparse_mode=3),
    "a triangle as large as the row": given(atten_mask=lambda t: ~causal(t)[0, 0], sparse_mode=2),
    "None": given(atten_mask=None),
    **{f"None in mode {n}": given(atten_mask=None, sparse_mode=n) for n in range(9) if n != 1},
    "None and a band": given(atten_mask=None, sparse_mode=0, next_tockens=0),
    "what attends for what blocks": given(atten_mask=lambda t: t["allowed"]),
    "what attends, by heads": given(atten_mask=lambda t: t["allowed"].expand(-1, 4, -1, -1)),
    "a mask of ones and zeros turned around": given(atten_mask=lambda t: t["allowed"].to(torch.uint8)),
    **{f"a triangle that hides padding, mode {n}": given(atten_mask=triangle(), sparse_mode=n) for n in (2, 3)},
    "a band that hides padding": given(atten_mask=triangle(), sparse_mode=4, pre_tockens=2048, next_tockens=0),
    "a triangle turned around": given(atten_mask=~triangle(), sparse_mode=3),
    "a triangle of nothing": given(atten_mask=triangle() & False, sparse_mode=2),
    "a band that cuts the past": (given(sparse_mode=0, pre_tockens=2, next_tockens=0), "CW"),
    "the mask of the row beside it": given(atten_mask=lambda t: ~t["allowed"].roll(1, 0)),
    "one row's mask for all": given(atten_mask=lambda t: ~t["allowed"][-1:]),
}
IN_PACKED_FUSION = {
    "one sequence": but(ends=lambda t: t["cu"][-1:]),
    "ends one late": but(ends=lambda t: shifted(t["cu"])[1:]),
    "lengths for ends": but(ends=lambda t: t["cu"].diff()),
    "None": given(atten_mask=None, sparse_mode=0),
    "None in mode 3": given(atten_mask=None),
    "a triangle turned around": given(atten_mask=~triangle()),
    "a mask of floats": given(atten_mask=triangle().float()),
    "a window nobody has": (given(sparse_mode=4, pre_tockens=1, next_tockens=0), "CWi"),
    "ahead by a band": (given(sparse_mode=4, pre_tockens=2048, next_tockens=1), "CWi"),
}
BEHIND = {
    "logits rolled by one": lambda x, told: x.roll(1, 1),
    "logits of rows in another order": lambda x, told: x.flip(0),
    "logits times the width": (lambda x, told: x * x.shape[1] / 8, "if"),
    "logits less their mean": lambda x, told: x - x.mean((0, 1)),
}
STACKS = {
    "a stranger's loop": ((own, own), padded, 0, LEAKS, OWN),
    "sdpa": ((sdpa, rule), padded, 0, TOLD, IN_SDPA),
    "a padded rule": ((sdpa, rule), padded, 1, TOLD, IN_RULE),
    "Megatron": ((core, rule), padded, 0, TOLD, IN_CORE),
    "flex": ((flex, flex), padded, 0, "CWi", IN_FLEX),
    "packed flex": ((flex, flex), packed, 0, "CWi", IN_PACKED_FLEX),
    "varlen": ((varlen, rule), packed, 0, TOLD, IN_VARLEN),
    "fla": ((varlen, rule), packed, 1, TOLD, IN_PACKED_RULE),
    "fusion": ((fusion, rule), padded, 0, TOLD, IN_FUSION),
    "packed fusion": ((fusion, rule), packed, 0, TOLD, IN_PACKED_FUSION),
    "behind all layers": ((sdpa, rule), padded, 2, "cif", BEHIND),
}
FAULTS = [(stack, name) for stack, (*_, faults) in STACKS.items() for name in faults]


def planted(stack, name):
    """The model, its collator, the layer that is wrong, and who claims to see it."""
    ways, collate, at, claimed, faults = STACKS[stack]
    fault, claims = faults[name] if isinstance(faults[name], tuple) else (faults[name], claimed)
    fault = of_flat_rows(fault) if collate is packed else fault
    parts = [fault if n == at else None for n in range(2)]
    model = Net(ways, parts, fault) if at == 2 else Net(ways, parts)
    return model.train("train" in name), collate, f"layers.{at}", claims


def batch_of(collate):
    return {key: value for key, value in collate(ROWS).items() if key != "labels"}


def told_by(entrance, model, collate):
    """What an entrance says of a run, "" where it is content."""
    batch, kind = batch_of(collate), entrance.lower()
    try:
        if kind == "c":
            check_delivery(model, batch)
        elif kind in "wn":
            with watch(say=False) as seen, torch.no_grad():
                model(**batch)
            return "; ".join(map(str, seen.faults)) if kind == "w" else seen.summary()
        elif kind == "i":
            gradients = flex not in [each.way for each in model.layers]  # it has none on a CPU
            assert_padding_invariant(model, collate, [each["input_ids"] for each in ROWS], gradients=gradients)
        else:
            conformance(toys.stack_of(model, collate), vocab_size=61, seed=1).check()
    except (CollateError, AssertionError) as error:
        return str(error)
    return ""


def verdict(entrance, stack, name):
    model, collate, layer, _ = planted(stack, name)
    said = told_by(entrance, model, collate)
    if entrance == "n":
        return "named" if layer in said.partition("ran in")[2] else "missed"
    return "named" if said and layer in said else "seen" if said else "missed"


@pytest.mark.draws(3)
@pytest.mark.parametrize(("stack", "name"), FAULTS)
def test_who_claims_to_see_a_fault_sees_it(stack, name):
    claims = planted(stack, name)[-1]
    found = {each: verdict(each, stack, name) for each in claims}
    assert {each: what for each, what in found.items() if what == "missed" or (each.isupper() and what != "named")} == {}


lost = toys.planted
IN_A_STRANGER = {
    "rule without the tail": (0, {"rule": lost(0, 6, 11)}),
    "offsets without the leading 0": (0, {"rule": lost(6, 11, 16)}),
    "offsets that fall": (0, {"rule": lost(16, 11, 6, 0)}),
    "offsets of a longer row": (1, {"rule": lost(0, 6, 11, 20)}),
    "lengths for offsets": (0, {"rule": lost(6, 5, 5)}),
    "convolution of other sequences": (1, {"seq_idx": lost([0] * 5 + [1] * 6 + [2] * 5)}),
    "a window nobody has": (2, {"window": (2, 0)}),
}
"""Of a stack that nobody knows: the layer, and what it hands to its kernel by the kernel's argument. Others: STACKS."""
OF_LAYER = {"rule": "chunk_gated_delta_rule", "seq_idx": "causal_conv1d_fn"}


@pytest.mark.parametrize("name", IN_A_STRANGER)
def test_a_stack_nobody_knows(name):
    """By watch, by the check and by the guard; a reference that refuses its arguments was told them all the same."""
    at, fault = IN_A_STRANGER[name]
    refused, call = (CollateError, ValueError, RuntimeError, IndexError), {"input_ids": IDS, "cu_seqlens": OFFSETS}
    with watch(say=False) as seen, torch.no_grad(), suppress(*refused):
        Model({at: fault})(**call)
    assert {each.layer for each in seen.faults} == {f"layers.{at}"}
    kernel = OF_LAYER.get(*fault, "flash_attn_varlen_func")
    assert {each.kernel.rpartition(".")[2] for each in seen.faults} <= {kernel, "scaled_dot_product_attention"}
    with pytest.raises(refused) as error:
        check_delivery(Model({at: fault}), call)
    assert "delivery" not in str(error.value) or f"got layers.{at}: " in str(error.value)
    guard_first_batch(model := Model({at: fault}))
    with pytest.raises(refused):
        model(**call)


padded_right = partial(padded, side="right")
ALSO = {
    "a window as wide as it needs": ((varlen, varlen), packed, but(window=lambda t: (12, 0))),
    "causal by its window": ((varlen, varlen), packed, but(causal=lambda t: False, window=lambda t: (-1, 0))),
    "scores by distance": ((flex, own), padded, but(score=lambda t: lambda score, b, h, q, k: score - 0.1 * (q - k))),
    "scores by head": ((flex, own), padded, but(score=lambda t: lambda score, b, h, q, k: score * (1 + h))),
    "a mask of ones and zeros": ((fusion, own), padded, given(atten_mask=lambda t: (~t["allowed"]).to(torch.uint8))),
    "a triangle over right padding": ((fusion, own), padded_right, given(atten_mask=triangle(), sparse_mode=3)),
    "a band as wide as the row": ((fusion, own), padded, given(sparse_mode=0, pre_tockens=12)),
    "a band of packed rows": ((fusion, fusion), packed, given(sparse_mode=4, pre_tockens=99, next_tockens=0)),
    "a mode that counts from the other corner": ((fusion, fusion), packed, given(sparse_mode=2)),
    "a packed flex": ((flex, flex), packed, None),
    "a GRU of even rows": ((own, own), lambda rows: padded([rows[1]] * 2), instead(rnn(nn.GRU))),
    "an expert for each token": ((own, own), padded, into(lambda x: torch.where(x[..., :1] > 0, x, -x))),
    "padding asks": ((sdpa, own), padded, but(allowed=lambda t: t["allowed"] | ~t["keep"][:, None, :, None] & causal(t))),
    "one mask a head": ((sdpa, own), padded, but(allowed=lambda t: t["allowed"].expand(-1, 4, -1, -1))),
}


def check_right(model, batch):
    """Check it, and watch it: nobody says anything."""
    ways = {each.way for each in model.layers}
    if ways != {own} or len(batch["input_ids"]) > 1:
        assert "NOT JUDGED" not in str(check_delivery(model, batch))
    with watch(say=False) as seen, torch.no_grad():
        model(**batch)
    assert seen.faults == []
    assert ("no fault" in seen.summary()) == (ways != {own})


WAYS = [(own, own), (sdpa, rule), (fusion, rule), (sdpa, sdpa), (core, rule), (core, own), (rule, own)]
WAYS += [(varlen, rule), (varlen, varlen)]


@settings(max_examples=8, deadline=None)
@drawn(
    st.sampled_from(WAYS), strategies.row_lengths(longest=12).filter(lambda x: max(x) > 1), strategies.sides(), st.booleans()
)
def test_nobody_says_anything_of_a_right_run(ways, lengths, side, trains):
    rows = rows_of(lengths)
    collate = packed if varlen in ways else partial(padded, side=side)
    check_right(Net(ways).train(trains), {key: value for key, value in collate(rows).items() if key != "labels"})


@pytest.mark.parametrize("name", ALSO)
def test_nobody_says_anything_of_what_is_right_in_another_way(name):
    ways, collate, fault = ALSO[name]
    check_right(Net(ways, (fault, None)), batch_of(collate))
