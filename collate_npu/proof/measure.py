"""Measuring: the one way a model is run here, what it computes on samples, and how far two such results are apart.

A number that is not finite, anywhere in what the model returned, makes every error of that result NaN: it can equal
nothing, and nothing below lets it go by (Python's `max` would drop a NaN that is not first). A causal language model is
measured by its logits and the loss of the next token. An encoder, and a model without such a head, by what it gives at
real tokens (logits or the last hidden state): the loss is half the sum of the squares of that.
Legend: B rows, S width, V what a model gives for a token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from collate_npu.consumers.labels_and_positions import IGNORED
from collate_npu.consumers.model_traits import config_of, is_transformers, pattern_of, text_config
from collate_npu.errors import AmbiguousMaskError, CollateError, UnsupportedFormError, explain, shape_of
from collate_npu.keys import LOSS_KEYS

Measured = TypeVar("Measured")
Batch = dict[str, Any]
Gradients = dict[str, Tensor]
"""By the name of the parameter."""
OF_THE_LOSS = frozenset({"labels", "shift_labels", "loss_mask", "num_items_in_batch", "advantages", *LOSS_KEYS})


def check_one_stack(model: Any) -> None:
    """Refuse an encoder-decoder (a model or a config): its batch is two sequences, each with padding of its own."""
    config = config_of(model)
    if getattr(config, "is_encoder_decoder", False) or getattr(text_config(config), "is_encoder_decoder", False):
        rule = "An encoder-decoder reads two sequences with separate masks, and a check reads one."
        remedy = "Pass its encoder (model.get_encoder()), or a model with one stack."
        raise UnsupportedFormError(explain("model", str(getattr(config, "model_type", "")), rule, remedy))


def called(model: nn.Module, batch: Mapping[str, Any], forward: Callable[..., Any] | None = None) -> Any:
    """Return what a model, or `forward` in its place, gives for a batch without labels, in its mode and without dropout."""
    given = {key: value for key, value in batch.items() if key not in OF_THE_LOSS}
    with without_dropout(model):
        try:
            return (forward or model)(**given)
        except TypeError as error:
            if "keyword argument" not in str(error) and "positional argument" not in str(error):
                raise
            remedy = "Pass forward= that calls the model: forward=lambda **batch: model(batch['input_ids'])."
            raise CollateError(explain("batch", str(error), "A batch is a dict of what the model takes.", remedy)) from error


class _WithoutDropout(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), dict(kwargs or {})
        if name.endswith("dropout") and name != "native_dropout":
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            args, kwargs = args[:4], {**dict(zip(("dropout_p", "is_causal"), args[4:])), **kwargs, "dropout_p": 0.0}
        return function(*args, **kwargs)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Run a model inside the block in its own mode, without dropout, and restore its buffers. So a mask that is lost only in
    training shows."""
    trains = any(module.training for module in model.modules())
    held = [(each, each.clone()) for each in model.buffers()] if trains else []
    try:
        with _WithoutDropout() if trains else nullcontext():
            yield
    finally:
        with torch.no_grad():
            for each, before in held:
                if not torch.equal(each, before):  # autograd may hold it still
                    each.copy_(before)


def scores_of(given: Any) -> Tensor:
    """Return the logits `[B, S, V]` of an output, `[B, V]` if the model pools; without a head the last hidden states."""
    for name in ("logits", "last_hidden_state"):
        given = given if getattr(given, name, None) is None else getattr(given, name)
    if not isinstance(given, Tensor):
        rule = "The model, or forward=, gives logits [B, S, V] where no labels are given."
        raise CollateError(explain("logits", shape_of(given), rule, "Pass forward= that returns them."))
    return given


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of some samples: logits of real tokens, the summed loss, the gradient of all parameters."""

    logits: list[Tensor]
    """`[length, V]` for each sample; of a model that pools, `[1, V]`."""
    loss: float
    gradients: Gradients
    finite: bool
    """True if the loss, the gradient and every logit are finite, also those at padding."""


@dataclass(frozen=True, slots=True)
class Errors:
    """How far two `Numbers` are apart: by one logit at most, and |x - y| / |y| of all real tokens, or all parameters."""

    largest: float
    logits: float
    loss: float
    gradient: float
    """0 where none was asked for."""


def worst(each: Iterable[Errors]) -> Errors:
    """Return the largest of each error over all batches; NaN if one is NaN."""
    table = torch.tensor([astuple(one) for one in each], dtype=torch.float64)
    return Errors(*torch.amax(table, dim=0).tolist())


def measure(model: Any, batch: Mapping[str, Any], rows: Callable[[Tensor], list[Tensor]], gradients: bool) -> Numbers:
    """Return the numbers of one forward pass and, with `gradients`, of a backward pass of the summed loss. `rows` picks the
    real tokens of `[B, S, V]`, or the samples of `[B, V]`."""
    inputs = {key: _on_device(value, model.device) for key, value in batch.items()}
    labels: Any = inputs.get("labels")
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(gradients):
        scores = scores_of(called(model, inputs))
        real = rows(scores)
        if labels is None or not predicts_next(model) or scores.ndim < 3:
            loss = torch.stack([x.float().square().sum() for x in real]).sum() / 2
        else:
            before, targets = scores[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
            loss = cross_entropy(before, targets, ignore_index=IGNORED, reduction="sum")
        if gradients:
            torch.autograd.backward(loss)
    found = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)  # the model keeps no gradient
    finite = all(bool(torch.isfinite(x).all()) for x in (scores, loss, *found.values()))
    return Numbers([x.detach().float() for x in real], float(loss.detach()), found, finite)


def unpadded(measured: Callable[[Batch], Measured], batch: Batch) -> Measured:
    """Return what is measured of rows without padding or a mask. An adapted model needs a mask, so it gets one of ones."""
    try:
        return measured(batch)
    except AmbiguousMaskError:
        return measured({**batch, "attention_mask": torch.ones_like(batch["input_ids"])})


@torch.no_grad()
def own_loss(model: Any, batch: Mapping[str, Any]) -> float | None:
    """Return the loss that a model itself gives for a batch with labels; None without one, and if it holds the loss of
    routers, which depends on the batch."""
    inputs = {key: _on_device(value, model.device) for key, value in uncached(model, batch).items()}
    with without_dropout(model):
        given = model(**inputs)
    found, of_routers = getattr(given, "loss", None), getattr(given, "aux_loss", None) is not None
    return float(found) if isinstance(found, Tensor) and found.numel() == 1 and not of_routers else None


def uncached(model: Any, batch: Mapping[str, Any]) -> Batch:
    """Return the batch with `use_cache=False`, as trainers run it: with a cache a model ignores positions that restart."""
    takes = "use_cache" in inspect.signature(model.forward).parameters
    return {"use_cache": False, **batch} if takes else dict(batch)


def predicts_next(model: Any) -> bool:
    """Return True for a causal language model with a head of its vocabulary."""
    headless = is_transformers(model) and model.get_output_embeddings() is None
    return not headless and pattern_of(model) != "bidirectional"


def alone(model: Any, features: Sequence[Batch], gradients: bool, *, copies: int = 1) -> Numbers:
    """Return the numbers of each sample alone, without padding and without a mask; losses and gradients add up. With
    `copies` the batch has so many rows of it, and the first is looked at."""
    parts: list[Numbers] = []
    total: Gradients = {}
    for feature in features:
        ids, labels = (torch.tensor([feature[key]]) for key in ("input_ids", "labels"))
        others = torch.full((copies - 1, ids.shape[1]), IGNORED)
        batch = uncached(model, {"input_ids": ids.repeat(copies, 1), "labels": torch.cat([labels, others])})
        part = unpadded(partial(measure, model, rows=lambda x: [x[0] if x.ndim > 2 else x[:1]], gradients=gradients), batch)
        for name, gradient in part.gradients.items():
            total[name] = total[name] + gradient if name in total else gradient
        parts.append(replace(part, gradients={}))
    logits = [x for part in parts for x in part.logits]
    return Numbers(logits, sum(part.loss for part in parts), total, all(part.finite for part in parts))


def errors_between(mine: Numbers, reference: Numbers) -> Errors:
    """Return how far `mine` is from the reference; NaN throughout if a number of either is not finite, or missing."""
    if not (mine.finite and reference.finite) or [x.shape for x in mine.logits] != [x.shape for x in reference.logits]:
        return Errors(*[float("nan")] * 4)
    largest = max(float((x - y).abs().max()) for x, y in zip(mine.logits, reference.logits))
    loss = abs(mine.loss - reference.loss) / max(abs(reference.loss), 1e-12)
    names, zero = sorted(mine.gradients.keys() | reference.gradients.keys()), torch.zeros(())  # a missing one is of zeros
    gradients = ([each.gradients.get(name, zero) for name in names] for each in (mine, reference))
    return Errors(largest, apart(mine.logits, reference.logits), loss, apart(*gradients))


def apart(mine: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """|mine - reference| / |reference|, over all tensors at once, in float64 on the host."""
    wrong = sum(_square(x.to(y.device).float() - y.float()) for x, y in zip(mine, reference))
    size = sum(_square(y) for y in reference)
    return float((wrong / size) ** 0.5) if size else float("inf") if wrong else 0.0


def _square(x: Tensor) -> float:
    return float(x.float().cpu().double().square().sum())


def _on_device(value: Any, device: Any) -> Any:
    """Return a tensor, a BlockMask or a mapping of them on this device; anything else as it is."""
    if isinstance(value, dict):
        return {key: _on_device(each, device) for key, each in value.items()}
    return value.to(device) if hasattr(value, "to") else value


# --- noise: how far apart two right results are on this model, dtype and device, and how far off a wrong one is
#
# 1e-6 in float32, 1e-2 in bfloat16, and anything between on a card whose matrix units round their inputs. So it is measured,
# from the same samples with other tokens appended and no mask, which no causal model may notice (an encoder, and a model
# that pools: each sample beside copies of itself), and alone, with rounding of each layer as other kernels have it; and the
# wrong, from left padding whose mask does not reach the layers.
# One logit is no measure: one expert chosen otherwise moves it by a tenth of what a wrong mask does. The relative error over
# all tokens stays within 4 times the noise (20 families, bfloat16, three seeds each); a wrong mask is 15 to 230 times it.

TIMES = 6
"""We accept up to 6 times the rounding noise that was measured on the model."""
FLOOR = 4
"""The noise is at least this many times the error of one matrix product here: a lucky run shows no noise."""
ROUNDED = 3
"""How much further than the noise a result is if each layer rounds otherwise: we accept twice that."""
MARGIN = 2
"""A wrong result must be at least this many times what is accepted, or the audit proves nothing."""
REMEDY = "Find what else the model reads (the width, the row, random numbers), or run it in a wider dtype"


@dataclass(frozen=True, slots=True)
class Yardstick:
    """The error that is accepted, and whether a wrong result is larger."""

    noise: Errors
    wrong: Errors | None = None
    """The smallest error of a wrong result; None if no wrong result could be made."""

    def astray(self, found: Errors) -> tuple[str, ...]:
        """Return which of logits, loss and gradient are further off than `TIMES` the noise, or NaN."""
        names = ("logits", "loss", "gradient")
        return tuple(name for name in names if not getattr(found, name) <= TIMES * getattr(self.noise, name))

    def tells(self, tolerance: float | None = None) -> bool:
        """Return True if logits or gradient would show a layer that ignores its mask; a number that is not finite shows."""
        if self.wrong is None:
            return False
        if tolerance is not None:
            return not (self.wrong.largest <= tolerance and self.wrong.gradient <= tolerance)
        pairs = ((self.wrong.logits, self.noise.logits), (self.wrong.gradient, self.noise.gradient))
        return any(not wrong < MARGIN * TIMES * right for wrong, right in pairs if right > 0)


def measure_noise(
    model: Any, batches: Sequence[Sequence[Batch]], references: Sequence[Numbers], *, gradients: bool
) -> Errors:
    """Return the errors of right results: the samples in a batch with other tokens appended and no mask (without a causal
    head each beside copies of itself), and a third of the errors of layers that round otherwise."""
    if predicts_next(model):  # wider, and one more chunk of 32 in a recurrent layer
        other: Callable[[Sequence[Batch]], Numbers] = partial(_widened, model, gradients=gradients)
    else:
        other = partial(alone, model, gradients=gradients, copies=4)
    noise = worst(errors_between(other(batch), known) for batch, known in zip(batches, references))
    check_noise(model, noise.logits)
    for seed in range(2):
        with rounded(model, seed):
            off = worst(errors_between(alone(model, one, gradients), known) for one, known in zip(batches, references))
        noise = Errors(*(max(x, y / ROUNDED) for x, y in zip(astuple(noise), astuple(off))))
    least = FLOOR * product_error(like(model))
    logits = max(noise.logits, least)  # the first: NaN is not replaced
    # the loss is one number, so its noise can be zero by luck; it averages that of hundreds of tokens, in float32
    loss = max(noise.loss, logits / 16, 4 * torch.finfo(torch.float32).eps)
    return Errors(noise.largest, logits, loss, max(noise.gradient, least) if gradients else 0.0)


@contextmanager
def rounded(model: nn.Module, seed: int) -> Iterator[None]:
    """What each innermost module gives is off by the error of one matrix product. In half precision right kernels are so far
    apart, while one kernel gives the same numbers in every batch."""
    size, draw = product_error(like(model)), torch.Generator().manual_seed(seed)

    def off(module: nn.Module, given: Any, out: Any) -> Any:
        if type(out) is not Tensor or not out.is_floating_point():
            return out
        return out * (1 + size * torch.randn(out.shape, generator=draw)).to(out)

    with ExitStack() as hooks:
        for module in model.modules():
            if next(module.children(), None) is None:
                hooks.enter_context(module.register_forward_hook(off))
        yield


def noise_limit(noise: float, x: Tensor) -> float:
    """Return the largest error that passes: `TIMES` the noise that was found, and at least what the dtype and device of this
    tensor lose; NaN stays."""
    return TIMES * max(noise, FLOOR * product_error(x))  # the first: NaN is not replaced


def like(model: nn.Module) -> Tensor:
    """Return a tensor of the dtype and device of a model."""
    return next((each for each in model.parameters() if each.is_floating_point()), torch.zeros(()))


def check_noise(model: nn.Module, noise: float) -> None:
    """Raise `CollateError` where right results of a model are further apart than its dtype can round: by half of its digits.
    A limit that is measured on a model that is wrong by itself passes what is wrong."""
    x = like(model)
    if noise > (most := max(torch.finfo(x.dtype).eps, product_error(x)) ** 0.5):
        dtype = str(x.dtype).removeprefix("torch.")
        got = f"the same tokens in another width, or beside copies, give numbers {noise:.2g} apart"
        rule = f"That is more than {dtype} can round ({most:.1g}), so nothing can be proved."
        raise CollateError(explain("noise", got, rule, f"{REMEDY}."))


def product_error(x: Tensor) -> float:
    """Return the relative error of one matrix product, in the dtype of this tensor and on its device, against float64."""
    drawn = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0)).to(x.dtype)
    one, other = drawn.to(x.device)
    exact = drawn[0].double() @ drawn[1].double()
    return float(((one @ other).cpu().double() - exact).norm() / exact.norm())


def widened(length: int, width: int) -> Tensor:
    """Places of the tokens of a sequence, and of the same tokens again after it, up to this width."""
    return torch.arange(max(length, width)) % length


def _widened(model: Any, features: Sequence[Batch], *, gradients: bool) -> Numbers:
    """All samples in one batch, 33 tokens wider than the longest of them."""
    lengths = [len(feature["input_ids"]) for feature in features]
    width = max(lengths) + 33
    ids = torch.stack([torch.tensor(feature["input_ids"])[widened(n, width)] for feature, n in zip(features, lengths)])
    labels = torch.tensor([(feature["labels"] + [IGNORED] * width)[:width] for feature in features])
    work = partial(measure, model, rows=lambda x: [row[:n] for row, n in zip(x, lengths)], gradients=gradients)
    return unpadded(work, {"input_ids": ids, "labels": labels})
