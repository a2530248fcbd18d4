"""A flat row on a real model, against each of its sequences alone; and attention by offsets, as a flash kernel reads it."""

from functools import cache
from itertools import pairwise

import torch
from strategies import flat_collator
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from collate_npu import Segments
from collate_npu.segments import of_keep
from collate_npu.testing import hybrid_model_types, tiny_model

HERE = hybrid_model_types()
PAD = 256
RIGHT, WRONG = 1e-4, 0.5
ROWS = {"short": (6, 8, 5), "turned": (5, 8, 6), "single tokens": (1, 7, 1, 1, 9), "shorter than the taps": (3, 2, 1, 4, 3)}
ROWS |= {"chunk borders": (63, 64, 65, 2), "a long one first": (127, 1, 17)}
BY_OFFSETS = "by_offsets"


@cache
def built(name, attn="sdpa"):
    return tiny_model(name, vocab_size=PAD + 1, attn_implementation=attn)


def samples(lengths):
    drawn = torch.randint(3, PAD, (sum(lengths),), generator=torch.Generator().manual_seed(sum(lengths)))
    return [{"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in drawn.split(lengths)]


def ours(model, **settings):
    return flat_collator(PAD, model=model, **settings)


def places(batch, features):
    """Where the samples stand in the row, by its offsets: sequences of padding come behind theirs."""
    ids = torch.zeros_like(batch["input_ids"], dtype=torch.int32)
    for n, (start, each) in enumerate(zip(batch["cu_seq_lens_q"].tolist(), features), start=1):
        stop = start + len(each["input_ids"])
        assert batch["input_ids"][0, start:stop].tolist() == each["input_ids"]
        ids[0, start:stop] = n
    return Segments(ids).indices


def outcome(model, batches):
    """Logits of the tokens, and the gradient of every parameter that got one, over all batches together."""
    model.zero_grad()
    found, start = [], 0
    for batch, at in batches:
        given = {key: value for key, value in batch.items() if key != "labels"}
        logits = model(**{"use_cache": False} | given).logits.flatten(0, 1)[at]
        drawn = torch.randn(logits.shape[1], generator=torch.Generator().manual_seed(1)).to(logits) / logits.shape[1] ** 0.5
        torch.sin(logits @ drawn + torch.arange(start, start + len(at))).sum().backward()  # each place weighs otherwise
        found.append(logits.detach())
        start += len(at)
    return torch.cat(found), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alone(model, features):
    ids = [torch.tensor([each["input_ids"]]) for each in features]
    return outcome(model, [({"input_ids": own}, torch.arange(own.shape[1])) for own in ids])


def errors(model, batch, truth, at=None):
    return apart(outcome(model, [(batch, torch.arange(len(truth[0])) if at is None else at)]), truth)


def apart(found, truth):
    """The largest difference of a logit; and of a gradient, as a part of the largest gradient."""
    logits, gradients = found
    assert gradients.keys() == truth[1].keys()
    largest = max(float(each.abs().max()) for each in truth[1].values())
    wrong = [(gradients[name] - own).abs().max().nan_to_num(torch.inf) / largest for name, own in truth[1].items()]
    return float((logits - truth[0]).abs().max().nan_to_num(torch.inf)), float(max(wrong))


def by_offsets(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, **_):
    """Causal attention of `[B, H, T, D]`, rows one behind the other, by sequences; empty ones are passed over, a tail is
    not written. As flash attention reads it: a row each where nothing is told."""
    (B, _, T, _), groups = query.shape, query.shape[1] // key.shape[1]
    every = (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
    every = [x.transpose(0, 1).flatten(1, 2)[None] for x in every]
    spans, ends = [(b * T, b * T + T) for b in range(B)], [B * T]
    if attention_mask is not None:
        spans = [(b * T + a, b * T + e) for b, a, e in of_keep(attention_mask.bool().numpy()).spans]
    elif cu_seq_lens_q is not None:
        ends = cu_seq_lens_q.tolist()
        spans = [(a, b) for a, b in pairwise(ends) if b > a]
    out = torch.zeros(1, query.shape[1], B * T, value.shape[-1], dtype=query.dtype)
    out[:, :, ends[-1] :] = torch.nan
    for a, b in spans:
        out[:, :, a:b] = sdpa(*(x[:, :, a:b] for x in every), is_causal=True, scale=scaling)
    return out[0].transpose(0, 1).unflatten(0, (B, T)), None


AttentionInterface.register(BY_OFFSETS, by_offsets)
AttentionMaskInterface.register(BY_OFFSETS, flash_attention_mask)
