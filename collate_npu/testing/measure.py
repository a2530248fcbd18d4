"""Measuring: what a model computes on samples, alone or in a batch, and how far two such results are apart.

A number that is not finite, anywhere in what the model returned, makes every error of that result NaN: it can equal
nothing, and nothing below lets it go by (Python's `max` would drop a NaN that is not first).

A causal language model is measured by its logits and the loss of the next token. An encoder, and a model without such a
head, by what it gives at real tokens (logits or the last hidden state): the loss is half the sum of the squares of that.

Legend: B rows, S width, V what a model gives for a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from collate_npu.consumers.models import is_transformers, pattern_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IGNORED = -100
Batch = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a model gave for some samples: logits of real tokens, the summed loss, the gradient of all parameters."""

    logits: list[Tensor]
    """`[length, V]` for each sample; of a model that pools, `[1, V]`."""
    loss: float
    gradients: dict[str, Tensor]
    finite: bool
    """Of every logit, those at padding too, of the loss and of the gradient."""


@dataclass(frozen=True, slots=True)
class Errors:
    """How far two `Numbers` are apart. All but `largest` are relative."""

    largest: float
    """The largest difference of one logit."""
    logits: float
    """|x - y| / |y| over the logits of all real tokens at once."""
    loss: float
    gradient: float
    """|g - h| / |h| over all parameters at once; 0 where no gradient was asked for."""


def run(model: PreTrainedModel, batch: Batch, rows: Callable[[Tensor], list[Tensor]], gradients: bool) -> Numbers:
    """One forward pass, and one backward pass of the summed loss if asked for.

    `rows` picks the real tokens of `[B, S, V]`, and the samples of the `[B, V]` that a model which pools gives.
    """
    model.zero_grad(set_to_none=True)
    inputs = _on(batch, model.device)
    labels = inputs.pop("labels", None)
    with torch.set_grad_enabled(gradients):
        scores = _scores(model(**inputs))
        real = rows(scores)
        next_token = labels is not None and predicts_next(model) and scores.ndim > 2
        loss = _loss(scores, labels) if next_token else torch.stack([x.float().square().sum() for x in real]).sum() / 2
    if gradients:
        torch.autograd.backward(loss)
    found = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)  # `found` keeps them; the model stays as it was
    finite = all(bool(torch.isfinite(x).all()) for x in (scores.detach(), loss.detach(), *found.values()))
    return Numbers([x.detach().float() for x in real], float(loss.detach()), found, finite)


def predicts_next(model: Any) -> bool:
    """Is it a causal language model? Not an encoder, and not a model without a head of its vocabulary."""
    headless = is_transformers(model) and model.get_output_embeddings() is None
    return not headless and pattern_of(model) != "bidirectional"


def _scores(output: Any) -> Tensor:
    scores: Tensor = output.logits if getattr(output, "logits", None) is not None else output.last_hidden_state
    return scores


def alone(model: PreTrainedModel, features: Sequence[Batch], gradients: bool, *, copies: int = 1) -> Numbers:
    """Each sample in a batch of its own, without padding and without a mask; losses and gradients add up.

    With `copies` its batch has so many rows of it, and the first is looked at.
    """
    logits: list[Tensor] = []
    loss, finite = 0.0, True
    total: dict[str, Tensor] = {}
    for feature in features:
        ids, labels = (torch.tensor([feature[key]]) for key in ("input_ids", "labels"))
        others = torch.full((copies - 1, ids.shape[1]), IGNORED)
        batch = {"input_ids": ids.repeat(copies, 1), "labels": torch.cat([labels, others])}
        part = run(model, batch, lambda scores: [scores[0] if scores.ndim > 2 else scores[:1]], gradients)
        logits += part.logits
        loss += part.loss
        finite = finite and part.finite
        for name, gradient in part.gradients.items():
            total[name] = total[name] + gradient if name in total else gradient
    return Numbers(logits, loss, total, finite)


def errors(mine: Numbers, reference: Numbers) -> Errors:
    """How far `mine` is from the reference; NaN throughout if anything in either is not finite, or is missing."""
    if not (mine.finite and reference.finite) or [x.shape for x in mine.logits] != [x.shape for x in reference.logits]:
        return Errors(*[float("nan")] * 4)
    x, y = (torch.cat([row.flatten() for row in numbers.logits]) for numbers in (mine, reference))
    loss = abs(mine.loss - reference.loss) / max(abs(reference.loss), 1e-12)
    return Errors(float((x - y).abs().max()), _apart([x], [y]), loss, _gradient_error(mine.gradients, reference.gradients))


def by_position(mine: Numbers, reference: Numbers) -> list[tuple[float, ...]]:
    """The largest difference of a logit at each token of each sample; nothing where a sample has another shape."""
    pairs = [(x, y) for x, y in zip(mine.logits, reference.logits) if x.shape == y.shape]
    return [tuple((x - y).abs().amax(-1).tolist()) for x, y in pairs]


def worst(found: Iterable[Errors]) -> Errors:
    """The largest of each error; NaN where one of them is."""
    table = torch.tensor([astuple(each) for each in found], dtype=torch.float64)
    return Errors(*torch.amax(table, dim=0).tolist())


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Next-token cross entropy, summed, so that samples alone add up to their batch."""
    shifted = labels[:, 1:].flatten()
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), shifted, ignore_index=IGNORED, reduction="sum")


def _gradient_error(mine: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """A missing gradient is one of zeros."""
    names = sorted(mine.keys() | reference.keys())
    zero = torch.zeros(())
    pairs = [(mine.get(name, zero), reference.get(name, zero)) for name in names]
    return _apart([x for x, _ in pairs], [y for _, y in pairs])


def _apart(mine: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """|mine - reference| / |reference|, over all tensors at once, in float64 on the host."""
    wrong = sum(_square(x.to(y.device).float() - y.float()) for x, y in zip(mine, reference))
    size = sum(_square(y) for y in reference)
    return float((wrong / size) ** 0.5) if size else float("inf") if wrong else 0.0


def _square(x: Tensor) -> float:
    return float(x.float().cpu().double().square().sum())


def _on(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: _moved(value, device) for key, value in batch.items()}


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return _on(value, device)
    return value.to(device) if hasattr(value, "to") else value  # a tensor, or a BlockMask
