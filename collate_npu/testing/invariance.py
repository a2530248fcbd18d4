"""Padding invariance: a batch of somebody's collator gives every real token what its sample gives alone.

For a test suite of your own::

    from collate_npu.testing import assert_padding_invariant, tiny_model

    def test_my_collator():
        model = tiny_model("qwen3_next", vocab_size=257)
        assert_padding_invariant(model, my_collator, [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]])

Costs a forward and a backward pass for each sample, and five for the batch and the noise.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from collate_npu.consumers.models import text_config
from collate_npu.errors import CollateError, UnsupportedFormError, explain, explain_rows
from collate_npu.integrations.delivery.alone import TIMES, evaluating
from collate_npu.segments import Segments
from collate_npu.testing.advice import what_to_change
from collate_npu.testing.located import Located, locate
from collate_npu.testing.measure import Batch, Errors, Numbers, alone, errors, run
from collate_npu.testing.yardstick import Yardstick, measure_noise

Collator = Callable[[list[Batch]], Mapping[str, Any]]
"""Features, dicts of `input_ids`, `labels` and `attention_mask` (lists of ints), to a batch of tensors `[B, S]`."""
Samples = Sequence[Sequence[int]] | Sequence[Mapping[str, Any]]
"""Token ids, or mappings with `input_ids` and, where they differ, `labels`."""


def assert_padding_invariant(
    model: Any, collator: Collator, samples: Samples, *, tolerance: float | None = None, gradients: bool = True
) -> None:
    """Assert that a batch of `collator` gives each sample the logits, loss and gradient that it has alone.

    `model` is a module of transformers: a decoder, a hybrid or an encoder, with a head or without. `collator` may pad on
    any side, permute rows or pack them: samples are found by their tokens. What passes is six times the rounding that is
    measured here, or with `tolerance` an absolute difference of a logit and a relative one of loss and gradient.

    Raises `AssertionError` with the worst sample, its token, the errors and what to change; `CollateError` where nothing
    can be compared: samples of equal lengths, other tokens in the batch, an encoder-decoder. The model keeps its mode.

    >>> from collate_npu import PaddingCollator
    >>> from collate_npu.testing import byte_tokenizer, tiny_model
    >>> model, samples = tiny_model("qwen3_next", vocab_size=257), [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
    >>> collator = PaddingCollator(byte_tokenizer(padding_side="left"), model=model)
    >>> assert_padding_invariant(model, collator, samples)
    >>> try:
    ...     assert_padding_invariant(model, lambda rows: {**collator(rows), "attention_mask": None}, samples)
    ... except AssertionError as error:
    ...     print(str(error).split()[0])
    sample
    """
    features = features_of(samples)
    check_one_stack(model)
    check_unequal(features)
    with evaluating(model):
        given = Given(*collated(collator, features), features)
        reference, mine = given.reference(model, None, gradients), given.numbers(model, gradients)
        noise = measure_noise(model, [given.labelled], [reference], gradients=gradients)
    found, yardstick = errors(mine, reference), Yardstick(noise)
    right = yardstick.passes(found) if tolerance is None else _within(found, tolerance)
    if not right:
        limit = f"{TIMES * noise.logits:.1e} is rounding" if tolerance is None else f"the tolerance is {tolerance:g}"
        numbers = f"{_numbers(found)} ({limit})."
        raise AssertionError(
            "\n".join([_worst(mine, reference, given.located), numbers, given.advice(model, found, yardstick)])
        )


class Given:
    """A batch that was given, or made by a collator that was; where its samples stand, and with which labels."""

    def __init__(self, batch: Batch, located: Located, features: Sequence[Batch]) -> None:
        self.batch, self.located, self.features = batch, located, list(features)
        self.labelled = located.labelled(batch, features)

    def numbers(self, model: Any, gradients: bool) -> Numbers:
        """What the model makes of the batch as it is."""
        batch = self.located.with_labels(self.batch)
        return run(model, uncached(model, batch), self.located.rows, gradients)

    def reference(self, model: Any, known: Numbers | None, gradients: bool) -> Numbers:
        """What it makes of the samples alone, with the labels of the batch; `known` is that with their own labels."""
        unchanged = known is not None and self.labelled == self.features
        return known if unchanged else alone(model, self.labelled, gradients)  # type: ignore[return-value]

    def errors(self, model: Any, known: Numbers, *, gradients: bool) -> Errors:
        """How far the batch is from the samples alone."""
        return errors(self.numbers(model, gradients), self.reference(model, known, gradients))

    def advice(self, model: Any, found: Errors, yardstick: Yardstick) -> str:
        """What to change, of a batch that is wrong."""
        logits = not found.logits <= TIMES * yardstick.noise.logits
        return what_to_change(model, self.batch, self.located.segments, logits=logits)


def layout_of(given: Sequence[Segments]) -> Literal["left", "right", "packed"]:
    """How batches are laid out: packed where a row holds several samples, left where rows end together."""
    if any(segments.packed for segments in given):
        return "packed"
    return "left" if any(segments.padding_side == "left" for segments in given) else "right"


def features_of(samples: Samples) -> list[Batch]:
    """Features with `input_ids` and `labels` (by default the same). Raises `CollateError` for what is no token ids."""
    features, bad = [], []
    for n, sample in enumerate(samples):
        given = sample if isinstance(sample, Mapping) else {"input_ids": sample}
        ids = _whole(given.get("input_ids"))
        labels = ids if given.get("labels") is None else _whole(given["labels"])
        if not ids or labels is None or len(labels) != len(ids):
            got = "no input_ids: a list of whole numbers" if not ids else f"{len(ids)} input_ids and other labels"
            bad.append((n, got))
            continue
        features.append({"input_ids": ids, "labels": labels})
    if bad:
        rule = "A sample has input_ids, whole numbers, and where it has labels, as many."
        raise CollateError(explain_rows("samples", bad, rule, "Tokenize text first, and leave out empty samples."))
    return features


def _whole(values: Any) -> list[int] | None:
    values = values.tolist() if hasattr(values, "tolist") else values
    whole = isinstance(values, (list, tuple)) and all(isinstance(x, int) and not isinstance(x, bool) for x in values)
    return list(values) if whole else None


def check_one_stack(model: Any) -> None:
    """Refuse an encoder-decoder: its batch is two sequences, and one side's padding is not the other's."""
    config = getattr(model, "config", model)
    if getattr(config, "is_encoder_decoder", False) or getattr(text_config(config), "is_encoder_decoder", False):
        rule = "An encoder-decoder reads two sequences with masks of their own, and no sample is alone in it."
        remedy = "Name its encoder (model.get_encoder()), or a model of one stack."
        raise UnsupportedFormError(explain("model", str(getattr(config, "model_type", "")), rule, remedy))


def check_unequal(features: Sequence[Batch]) -> None:
    """Refuse samples that need no padding."""
    if len({len(feature["input_ids"]) for feature in features}) < 2:
        rule = "Without padding every mask is right, and a comparison would prove nothing."
        raise CollateError(explain("samples", "one length", rule, "Give samples of unequal lengths."))


def collated(collator: Collator, features: Sequence[Batch]) -> tuple[Batch, Located]:
    """The batch of a collator, and where the samples stand in it. The features it gets are copies.

    They have labels, unless it fails on them: collators that make labels pad nothing of that name (transformers'
    `DataCollatorForLanguageModeling`). Raises what the collator raises, and `CollateError` of `locate`.
    """
    given = [{**copy.deepcopy(feature), "attention_mask": [1] * len(feature["input_ids"])} for feature in features]
    try:
        batch = collator([dict(feature) for feature in copy.deepcopy(given)])
    except Exception as error:
        try:
            batch = collator([{k: v for k, v in feature.items() if k != "labels"} for feature in given])
        except Exception:
            raise error from None
    located = locate(batch, features)
    return {key: batch[key] for key in batch}, located


def uncached(model: Any, batch: Mapping[str, Any]) -> Batch:
    """The batch, run without a cache as trainers run it, where the model has one."""
    takes = "use_cache" in inspect.signature(model.forward).parameters
    return {"use_cache": False, **batch} if takes else dict(batch)


def _within(found: Errors, tolerance: float) -> bool:
    return all(error <= tolerance for error in (found.largest, found.loss, found.gradient))


def _numbers(found: Errors) -> str:
    if not math.isfinite(found.logits):
        return "A number in the batch, or of a sample alone, is not finite"
    each = {"of all logits": found.logits, "of the loss": found.loss, "of the gradient": found.gradient}
    return "Relative errors: " + ", ".join(f"{error:.1e} {what}" for what, error in each.items())


def _worst(mine: Numbers, reference: Numbers, located: Located) -> str:
    """The sample and token whose logits are furthest from those alone."""
    apart = [(x.cpu() - y.cpu()).abs().amax(-1).nan_to_num(torch.inf) for x, y in zip(mine.logits, reference.logits)]
    sample = max(range(len(apart)), key=lambda n: float(apart[n].max()))
    token = int(apart[sample].argmax())
    row, start, _ = located.segments.spans[located.order.index(sample)]
    where = f"sample {sample} (row {row}, from place {start}), token {token} of {len(apart[sample])}"
    return f"{where}: a logit is {float(apart[sample].max()):.2g} from that of the sample alone."
