"""What ranks do for test_distributed_shared: rows of which each rank has a part, and an attention that exchanges them."""

from datetime import timedelta

import numpy as np
import pytest
import torch
from adapt_work import WRAPPERS
from torch import distributed as dist
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from collate_npu import BatchAdapter, CollateError, Segments, adapt, check_delivery
from collate_npu.consumers.shared_rows import SharedPlan
from collate_npu.consumers.tiny_models import build, make_honest
from collate_npu.parallel import ContextParallel, gather_sequence, query_rows, split_tensor
from collate_npu.testing import tiny_config, tiny_model

VOCAB, PAD = 61, 7
LENGTHS = (23, 40, 31, 50)
DRAW = torch.Generator().manual_seed(0)
ROWS = [torch.randint(8, VOCAB, (n,), generator=DRAW) for n in LENGTHS]
FORMS = {
    "right": (80, [(b, 0) for b in range(4)]),  # of four ranks the last one has padding alone
    "left": (64, [(b, 64 - n) for b, n in enumerate(LENGTHS)]),
    "flat": (144, [(0, sum(LENGTHS[:n])) for n in range(4)]),
    "one": (56, [(0, 0)]),
    "packed": (96, [(0, 0), (0, 23), (1, 0), (1, 31)]),
}
"""Each form's width, and the row and the place where each sequence begins."""


class Exchanged:
    """Attention of a stack that shares rows: a rank's own queries, the keys of all."""

    cp = seen_BQK = None

    def __call__(self, module, query, key, value, mask, scaling=None, **kwargs):
        key, value = (gather_sequence(x, self.cp, dim=2, loss="local") for x in (key, value))
        gqa = query.shape[1] != key.shape[1]
        out = scaled_dot_product_attention(query, key, value, self.seen_BQK[:, None], scale=scaling, enable_gqa=gqa)
        return out.transpose(1, 2), None


ATTENTION = Exchanged()


def laid(form):
    """Ids, targets, positions and segment ids `[B, S]` of this form."""
    width, places = FORMS[form]
    B = 1 + max(b for b, _ in places)
    ids, targets = torch.full((B, width), PAD), torch.full((B, width), -100)
    positions, segments = torch.zeros(B, width, dtype=torch.long), torch.zeros(B, width, dtype=torch.long)
    for n, (row, (b, at)) in enumerate(zip(ROWS[-len(places) :], places)):
        here = slice(at, at + len(row))
        ids[b, here], targets[b, at : at + len(row) - 1] = row, row[1:]
        positions[b, here], segments[b, here] = torch.arange(len(row)), n + 1
    return ids, targets, positions, segments


def model_of(family, heads=()):
    if not heads:
        return tiny_model(family, vocab_size=VOCAB).train()
    config = tiny_config(family, vocab_size=VOCAB)
    config.linear_num_key_heads, config.linear_num_value_heads = heads
    torch.manual_seed(0)
    with torch.no_grad():
        make_honest(model := build(config, "sdpa"), 5.0)
    return model.train()


def gradient(model):
    grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return torch.cat([torch.zeros(p.numel()) if g is None else g.flatten() for p, g in zip(model.parameters(), grads)])


def alone(model, rows):
    """Logits `[T, V]` of each sample by itself, and the gradient of all."""
    logits = []
    for row in rows:
        out = model(input_ids=row[None], use_cache=False).logits[0]
        cross_entropy(out[:-1], row[1:], reduction="sum").backward()
        logits.append(out.detach())
    found = gradient(model)
    model.zero_grad()
    return torch.cat(logits), found


def parts(form, layout):
    """This rank's part of a batch, its targets, and which tokens of the whole rows are real."""
    from transformers import AttentionInterface

    cp = ContextParallel.from_group(dist.group.WORLD, layout="zigzag" if layout == "head_tail" else layout)
    ids, targets, positions, segments = laid(form)
    same_BSK = (segments[:, :, None] == segments[:, None]) & torch.ones(*ids.shape[1:] * 2).tril().bool()
    ATTENTION.cp, ATTENTION.seen_BQK = cp, same_BSK[:, query_rows(ids.shape[1], cp)]
    AttentionInterface.register("exchanged", ATTENTION)
    batch = {"input_ids": split_tensor(ids, cp)}
    if form in ("flat", "packed", "one"):
        batch["position_ids"] = split_tensor(positions, cp)
    if form not in ("flat", "one"):
        batch["attention_mask"] = split_tensor((segments > 0).long() if form != "packed" else segments, cp)
    return cp, batch, split_tensor(targets, cp), segments


def errors(family, layout, form, mode, heads=(), attention="exchanged", adapted=True, wrapper=""):
    """How far logits and gradient of shared rows are from each sample alone: of the largest value, of the norm."""
    model = model_of(family, heads)
    logits, wanted = alone(model, ROWS[-len(FORMS[form][1]) :])
    cp, batch, targets, segments = parts(form, layout)
    if attention:
        model.set_attn_implementation(attention)
    if mode:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": mode == "reentrant"})
    if adapted:
        adapt(model, sequence_group=dist.group.WORLD, layout=layout)
    if adapted == "BatchAdapter":
        batch = BatchAdapter(model, context_parallel=cp)({"input_ids": laid(form)[0], "attention_mask": segments})
    if wrapper:
        WRAPPERS[wrapper](model)
    out = model(**batch).logits
    cross_entropy(out.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    found = gradient(model)
    dist.all_reduce(found) if not wrapper else found.mul_(cp.size)  # which FSDP takes the mean of
    whole = gather_sequence(out.detach(), cp)[segments > 0]
    order = torch.argsort(segments[segments > 0], stable=True)
    gaps = float((whole[order] - logits).abs().max() / logits.abs().max()), float((found - wanted).norm() / wanted.norm())
    dist.barrier()
    return gaps


def apart(fault):
    """What each rank raises in its first step where one of them differs."""
    rank, model = dist.get_rank(), model_of("qwen3_next")
    (_, batch, _, _), group = parts("left", "contiguous"), dist.new_group(timeout=timedelta(seconds=6))
    if fault == "length" and rank:
        batch = {key: value[:, :-4] for key, value in batch.items()}
    if fault == "way" and rank:
        model.model.layers[0].linear_attn.register_forward_hook(lambda *_: None)
    if fault == "labels":
        batch["labels"] = batch["input_ids"].clone()
    if fault == "targets":  # of the loader of DeepSpeed, across the end of a sequence
        _, batch, targets, _ = parts("flat", "contiguous")
        batch["shift_labels"] = targets.masked_fill(targets < 0, 9)
    if fault == "boundary":
        batch = parts("flat", "contiguous")[1]
        batch["cu_seq_lens_q"] = torch.tensor([0, 23, 63 - rank, 94, 144])
    if fault == "error" and rank:
        batch["attention_mask"] = batch["attention_mask"].to_sparse()
    if fault != "not adapted" or not rank:
        adapt(model, sequence_group=group, layout="head_tail" if fault == "layout" and rank else "contiguous")
    try:
        loss = model(**batch).logits.sum()
        if fault != "no backward" or not rank:
            loss.backward()
    except (CollateError, RuntimeError, NotImplementedError) as error:
        return str(error)
    return ""


def planted(fault, family="qwen3_next", form="flat"):
    """What `check_delivery` says on this rank where adapt's own exchange has a fault."""
    with pytest.MonkeyPatch.context() as patch:
        model = model_of(family).eval()
        cp, batch, _, segments = parts(form, "contiguous")
        adapt(model, sequence_group=dist.group.WORLD)
        if fault:
            patch.setattr(SharedPlan, *FAULTS[fault])
        try:
            found = check_delivery(model, batch, segments=Segments.from_ids(segments), context_parallel=cp, alone=True)
        except (CollateError, RuntimeError) as error:
            return str(error)
        finally:
            dist.barrier()
        return "" if fault else found.verdict


def other_halo(self, wanted, owner_T, local_T):
    """The tokens before a piece are of this rank in the place of the one that has them."""
    mine = [np.where(owner_T[w] == n, w, w[owner_T[w] == n][:1]) if len(w) else w for n, w in enumerate(wanted)]
    return OWN["_route"](self, mine, owner_T, local_T)


def other_heads(*given):
    return [x.roll(1, 1) for x in OWN["_by_token"](*given)]


OWN = {name: getattr(SharedPlan, name) for name in ("_route", "_by_token")}
FAULTS = {"halo": ("_route", other_halo), "heads": ("_by_token", other_heads)}
