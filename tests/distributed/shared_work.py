"""What ranks do for test_distributed_shared: rows of which each rank has a part, and an attention that exchanges them."""

from datetime import timedelta
from functools import cache

import numpy as np
import oracle
import pytest
import torch
from torch import distributed as dist
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface

from collate_npu import BatchAdapter, CollateError, Segments, adapt, check_delivery
from collate_npu.consumers.shared_rows import SharedPlan
from collate_npu.consumers.tiny_models import build, make_honest
from collate_npu.parallel import ContextParallel, gather_sequence, query_rows, split_tensor
from collate_npu.testing import tiny_config

VOCAB, PAD = 61, 7


class Exchanged:
    """Attention of a stack that shares rows: a rank's own queries, the keys of all."""

    cp = seen_BQK = None

    def __call__(self, module, query, key, value, mask, scaling=None, **kwargs):
        key, value = (gather_sequence(x, self.cp, dim=2, loss="local") for x in (key, value))
        gqa = query.shape[1] != key.shape[1]
        out = scaled_dot_product_attention(query, key, value, self.seen_BQK[:, None], scale=scaling, enable_gqa=gqa)
        return out.transpose(1, 2), None


ATTENTION = Exchanged()
AttentionInterface.register("exchanged", ATTENTION)


@cache
def model_of(family, heads=(), attention="", mode=""):
    config = tiny_config(family, vocab_size=VOCAB)
    if heads:
        config.linear_num_key_heads, config.linear_num_value_heads = heads
    torch.manual_seed(0)
    with torch.no_grad():
        make_honest(model := build(config, "sdpa"), 5.0)
    if attention:
        model.set_attn_implementation(attention)
    if mode:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": mode == "reentrant"})
    return model.train()


def padded(rows, width=None, side="right", pad=PAD):
    """What an ordinary collator makes of these samples: ids, labels and a 2D mask."""
    rows = [torch.tensor(row["input_ids"]) if isinstance(row, dict) else row for row in rows]
    keep = Segments.from_lengths(list(map(len, rows)), width, side).keep
    ids = torch.full(keep.shape, pad).masked_scatter(keep, torch.cat(rows))
    return {"input_ids": ids, "labels": ids.masked_fill(~keep, -100), "attention_mask": keep.long()}


def gradient(model):
    """Of all parameters, as one vector; it is taken from them."""
    grads = [torch.zeros(p.shape) if p.grad is None else p.grad for p in model.parameters()]
    found = torch.cat([(grad.full_tensor() if hasattr(grad, "full_tensor") else grad).flatten() for grad in grads])
    model.zero_grad()
    return found


def alone(model, rows):
    """Logits `[T, V]` of each sample by itself, and the gradient of all."""
    gradient(model)  # of a call that was not finished
    logits = [model(input_ids=row[None], use_cache=False).logits[0] for row in rows]
    for out, row in zip(logits, rows):
        cross_entropy(out[:-1], row[1:], reduction="sum").backward()
    return torch.cat(logits).detach(), gradient(model)


def parts(ids_BS, told, layout):
    """The whole tokens; this rank's part of a batch with these keys beside tokens, with targets and places in the samples;
    and the samples."""
    cp = ContextParallel.from_group(dist.group.WORLD, layout="zigzag" if layout == "head_tail" else layout)
    tokens = torch.randint(8, VOCAB, ids_BS.shape, generator=torch.Generator().manual_seed(0)).where(ids_BS > 0, PAD)
    targets, positions, places, rows = torch.full_like(tokens, -100), 0 * tokens, torch.full_like(tokens, -1), []
    for b, at in oracle.sequences(ids_BS.tolist()):
        targets[b, at[:-1]], positions[b, at] = tokens[b, at[1:]], torch.arange(len(at))
        places[b, at] = positions[b, at] + sum(map(len, rows))
        rows.append(tokens[b, at])
    same_BSK = (ids_BS[:, :, None] == ids_BS[:, None]) & torch.ones(*ids_BS.shape[1:] * 2).tril().bool()
    ATTENTION.cp, ATTENTION.seen_BQK = cp, same_BSK[:, query_rows(ids_BS.shape[1], cp)]
    given = {"input_ids": tokens, "attention_mask": ids_BS, "position_ids": positions, "segment_ids": ids_BS}
    batch = {key: split_tensor(x, cp) for key, x in given.items() if key in ("input_ids", *told)}
    return cp, tokens, batch, split_tensor(targets, cp), split_tensor(places, cp), rows


def gaps(model, batch, targets, places, logits, wanted):
    """How far this rank's logits and the gradient of all are from each sample alone: of the largest value, of the norm."""
    out = model(**batch).logits
    cross_entropy(out.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    found, off = gradient(model), (out.detach() - logits[places]) * (places >= 0)[..., None]
    dist.all_reduce(found)
    gaps = off.abs().max() / logits.abs().max(), (found - wanted).norm() / wanted.norm().clamp(min=1e-9)
    return torch.stack(gaps).nan_to_num(nan=torch.inf).tolist()


def errors(family, layout, ids, told, mode="", heads=(), attention="", cut_by="us"):
    """`gaps` for these segment ids and the keys that tell of them."""
    cp, tokens, batch, targets, places, rows = parts(ids_BS := torch.tensor(ids), told, layout)
    truth, model = alone(model_of(family, heads), rows), model_of(family, heads, attention, mode)
    with adapt(model, sequence_group=dist.group.WORLD, layout=layout):
        if cut_by == "BatchAdapter":
            ids = {key: part for key, part in batch.items() if key == "segment_ids"}
            batch = ids | BatchAdapter(model, context_parallel=cp)({"input_ids": tokens, "segment_ids": ids_BS})
        found = gaps(model, batch, targets, places, *truth)
    dist.barrier()
    return found


def odd(batch, fault):
    """What a rank with this fault has for its part of a batch."""
    names = {"attention_mask": "position_ids", "position_ids": "attention_mask"} if fault == "keys" else {}
    cut, keys = -2 if fault == "width" else None, [*batch][: 2 if names else None]
    if fault == "boundary":
        return batch | {"cu_seq_lens_q": batch["cu_seq_lens_q"] - torch.tensor([0, 0, 1, 0, 0])}
    more = {"labels": {"labels": batch["input_ids"]}, "error": {"attention_mask": batch["input_ids"].to_sparse()}}
    return {names.get(key, key): batch[key][:, :cut] for key in keys} | more.get(fault, {})


def apart(fault):
    """What each rank raises in its first step where one of them differs."""
    rank, model = dist.get_rank(), model_of.__wrapped__("qwen3_next")
    flat = fault in ("boundary", "targets")
    rows = Segments.from_lengths([[23, 40, 31, 50]] if flat else [23, 40, 31, 50], None if flat else 64, "left")
    batch, targets = parts(rows.ids, ["position_ids" if flat else "attention_mask"], "contiguous")[2:4]
    batch |= {"cu_seq_lens_q": torch.tensor([0, 23, 63, 94, 144])} if fault == "boundary" else {}
    batch |= {"shift_labels": targets.masked_fill(targets < 0, 9)} if fault == "targets" else {}  # as DeepSpeed's loader
    group = dist.new_group(timeout=timedelta(seconds=6))
    batch = odd(batch, fault) if rank or fault == "labels" else batch
    if fault == "way" and rank:
        model.model.layers[0].linear_attn.register_forward_hook(lambda *_: None)
    adapt(model, sequence_group=group, layout="head_tail" if fault == "layout" and rank else "contiguous")
    try:
        loss = model(**batch).logits.sum()
        if fault != "no backward" or not rank:
            loss.backward()
    except (CollateError, RuntimeError) as error:
        return str(error)
    return ""


def planted(fault):
    """What `check_delivery` says on this rank where the exchange of shared rows has a fault."""
    rows, model = Segments.from_lengths([[23, 40, 31, 50]]), model_of.__wrapped__("qwen3_next").eval()
    cp, _, batch, *_ = parts(rows.ids, ["position_ids"], "contiguous")
    adapt(model, sequence_group=dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        if fault:
            patch.setattr(SharedPlan, *FAULTS[fault])
        try:
            return check_delivery(model, batch, segments=rows, context_parallel=cp, alone=True).verdict
        except CollateError as error:
            return str(error)


OWN = {name: getattr(SharedPlan, name) for name in ("_route", "_by_token")}


def other_halo(self, wanted, owner_T, local_T):
    """The tokens before a piece are of this rank in the place of the one that has them."""
    mine = [np.where(owner_T[w] == n, w, w[owner_T[w] == n][:1]) if len(w) else w for n, w in enumerate(wanted)]
    return OWN["_route"](self, mine, owner_T, local_T)


FAULTS = {"halo": ("_route", other_halo), "heads": ("_by_token", lambda *xs: [x.roll(1, 1) for x in OWN["_by_token"](*xs)])}
