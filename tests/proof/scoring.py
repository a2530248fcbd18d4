"""Stacks to ask: tiny models of transformers behind `run(samples, layout)`, and a toy of one line; with faults put in."""

from functools import cache

import pytest
import torch

from collate_npu import PaddingCollator, Segments
from collate_npu.consumers import probe
from collate_npu.outputs import per_sequence
from collate_npu.testing import tiny_model

PAD = 256
WEIGHTS = torch.randn(PAD + 1, PAD + 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@cache
def built(name, dtype=torch.float32):
    with pytest.MonkeyPatch.context() as patch:  # all experts: no choice that rounding turns
        patch.setitem(probe._FAMILY, "qwen3_next", {"num_experts_per_tok": 4})
        return tiny_model(name, vocab_size=PAD + 1, dtype=dtype)


def picked(logits, ids):
    """What each token from the second on was given, `[L - 1]`, by logits `[L, V]`."""
    return torch.log_softmax(logits[:-1].double(), -1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]


def stack(model, drop=()):
    """The right one; `drop` names keys of a batch of several samples that are lost on their way."""

    def run(samples, layout="right"):
        flat, lengths = layout == "packed", [len(ids) for ids in samples]
        settings = {"padding_free": True} if flat else {"padding_side": layout}
        collator = PaddingCollator(pad_token_id=PAD, model=model, **settings)
        batch = collator([{"input_ids": ids} for ids in samples])
        kept = {key: value for key, value in batch.items() if len(samples) == 1 or key not in drop}
        with torch.no_grad():
            logits = model(**kept, use_cache=False).logits
        segments = Segments.from_lengths([lengths] if flat else lengths, side="right" if flat else layout)
        return [picked(*pair) for pair in zip(per_sequence(logits, segments), samples)]

    return run


def score(ids):
    """A toy: each token is predicted from the mean of those before it, the last three weighing more."""
    rows = WEIGHTS[ids]
    near = sum(torch.cat([torch.zeros(n, rows.shape[1]), rows[: len(ids) - n]]) for n in range(3))
    return picked(rows.cumsum(0) / torch.arange(1, len(ids) + 1)[:, None] + near, ids)


def toy(samples):
    return [score(ids) for ids in samples]


def by(change, batch_of=2):
    """The toy, whose answers to a batch of so many samples and more are changed."""
    return lambda samples: change(toy(samples), samples) if len(samples) >= batch_of else toy(samples)
