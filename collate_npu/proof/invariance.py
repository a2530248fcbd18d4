"""Padding invariance: a batch of somebody's collator gives every real token what its sample gives alone.

Costs a forward and a backward pass for each sample, and five for the batch and the noise. Legend: B rows, S width.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from collate_npu.consumers.models import needs_mask_2d, text_config
from collate_npu.errors import CollateError, UnsupportedFormError, explain, explain_rows
from collate_npu.given import check_collator, check_model
from collate_npu.proof.located import Located, keep_of, locate
from collate_npu.proof.measure import IGNORED, Batch, Compared, Errors, alone, own_loss, predicts_next
from collate_npu.proof.noise import TIMES, Yardstick, measure_noise
from collate_npu.segments import Segments, keep_array

Collator = Callable[[list[Batch]], Mapping[str, Any]]
"""Features, dicts of `input_ids`, `labels` and `attention_mask` (lists of ints), to a batch of tensors `[B, S]`."""
Samples = Sequence[Sequence[int]] | Sequence[Mapping[str, Any]]
"""Token ids, or mappings with `input_ids` and, where they differ, `labels`."""


def assert_padding_invariant(
    model: Any, collator: Collator, samples: Samples, *, tolerance: float | None = None, gradients: bool = True
) -> None:
    """Assert that a batch of `collator` gives each sample the logits, loss and gradient it has alone, by its own labels.

    `model` is a module of transformers: a decoder, a hybrid or an encoder, with a head or without. `collator` may pad on
    any side, permute rows or pack them: samples are found by their tokens. What passes is six times the rounding that is
    measured here, or with `tolerance` an absolute difference of a logit and a relative one of loss and gradient. The loss
    is that of the next token, and the one that the model itself gives.

    Raises `AssertionError` with the worst sample, its token, the errors and what to change; `CollateError` where nothing
    can be compared: samples of equal lengths, other tokens in the batch, an encoder-decoder. It is run in the mode
    that it is in, without dropout: `model.train()` before it proves what trains.

    >>> from collate_npu import PaddingCollator
    >>> from collate_npu.testing import byte_tokenizer, tiny_model
    >>> model, samples = tiny_model("qwen3_next", vocab_size=257), [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
    >>> collator = PaddingCollator(byte_tokenizer(padding_side="left"), model=model)
    >>> assert_padding_invariant(model, collator, samples)
    """
    check_model(model)
    check_collator(collator)
    if tolerance is not None and not (isinstance(tolerance, (int, float)) and 0 <= tolerance < math.inf):
        raise CollateError(explain("tolerance", repr(tolerance), "An error is 0 or more.", "Give such a number, or none."))
    features = features_of(samples)
    check_one_stack(model)
    check_unequal(features)
    check_vocabulary(model, [features])
    located = collated(collator, features)
    reference, mine = alone(model, features, gradients), located.numbers(model, gradients)
    noise = measure_noise(model, [features], [reference], gradients=gradients)
    compared, astray = Compared.of([(mine, reference)]), Yardstick(noise).astray
    found = compared.worst
    right, limit = not astray(found), f"{TIMES * noise.logits:.1e} is rounding"
    if tolerance is not None:
        right = all(error <= tolerance for error in (found.largest, found.loss, found.gradient))
        limit = f"the tolerance is {tolerance:g}"
    if not right or located.label_fault():
        lines = [_worst(compared, located), f"{_numbers(found)} ({limit}).", advice(located, model, astray(found))]
        raise AssertionError("\n".join(lines))
    if lost := _own_loss_fault(model, located, features, max(TIMES * noise.loss, tolerance or 0.0)):
        raise AssertionError(lost)


def _own_loss_fault(model: Any, located: Located, features: Sequence[Batch], limit: float) -> str:
    """How the loss that the model itself gives for the batch differs from that of its samples: their mean by tokens or by
    samples, or their sum. "" where it gives none."""
    if "labels" not in inspect.signature(model.forward).parameters or not predicts_next(model):
        return ""
    ones = [{key: torch.tensor([feature[key]]) for key in ("input_ids", "labels")} for feature in features]
    counts = [int((one["labels"][:, 1:] != IGNORED).sum()) for one in ones]
    each = [(loss, n) for one, n in zip(ones, counts) if n and (loss := own_loss(model, one)) is not None]
    if len(each) < 2 or (whole := own_loss(model, located.with_labels())) is None:
        return ""
    total, by_tokens = sum(x for x, _ in each), sum(x * n for x, n in each) / sum(n for _, n in each)
    if any(abs(whole - right) <= limit * abs(right) for right in (by_tokens, total, total / len(each))):
        return ""
    counted = "it counts other tokens than those with a label"
    return f"The model's own loss is {whole:.4g} for the batch, and {by_tokens:.4g} for its samples alone: {counted}."


def features_of(samples: Samples) -> list[Batch]:
    """Features with `input_ids` and `labels` (by default the same). Raises `CollateError` for what is no token ids."""
    if isinstance(samples, (str, Mapping)) or not isinstance(samples, Iterable):
        rule = "Samples are lists of token ids, or mappings of input_ids and labels."
        raise CollateError(explain("samples", f"a {type(samples).__name__}", rule, "Pass a list of them."))
    features, bad = [], []
    for n, sample in enumerate(samples):
        given = sample if isinstance(sample, Mapping) else {"input_ids": sample}
        ids = _whole(given.get("input_ids"))
        labels = ids if given.get("labels") is None else _whole(given["labels"])
        if not ids or labels is None or len(labels) != len(ids):
            bad.append((n, f"{len(ids)} input_ids and other labels" if ids else "no input_ids: a list of whole numbers"))
        else:
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


def check_unequal(*batches: Sequence[Batch]) -> None:
    """Refuse samples of which no batch needs padding."""
    if all(len({len(feature["input_ids"]) for feature in batch}) < 2 for batch in batches):
        rule = "Without padding every mask is right, and a comparison would prove nothing."
        raise CollateError(explain("samples", "batches of equal lengths", rule, "Give samples of unequal lengths."))


def check_vocabulary(model: Any, batches: Sequence[Sequence[Batch]]) -> None:
    """Refuse token ids that the model has no embedding for; on a card they end the process."""
    rows = model.get_input_embeddings().weight.shape[0]
    used = [token for batch in batches for feature in batch for token in feature["input_ids"]]
    if astray := [token for token in (max(used), min(used)) if not 0 <= token < rows]:
        remedy = "Name the model that the tokens were made for, and its tokenizer."
        raise CollateError(explain("samples", f"token id {astray[0]}", f"This model has ids 0 to {rows - 1}.", remedy))


def collated(collator: Collator, features: Sequence[Batch]) -> Located:
    """The batch of a collator, and where the samples stand in it. The features it gets are copies. They have labels, unless
    it fails on them: collators that make labels pad nothing of that name (`DataCollatorForLanguageModeling`). Raises what
    the collator raises, and `CollateError` of `locate`."""
    given = [{**feature, "attention_mask": [1] * len(feature["input_ids"])} for feature in features]
    try:
        batch = collator(copy.deepcopy(given))
    except Exception as error:
        try:
            batch = collator([{k: v for k, v in copy.deepcopy(feature).items() if k != "labels"} for feature in given])
        except Exception:
            raise error from None
    return locate(batch, features)


def _numbers(found: Errors) -> str:
    if not math.isfinite(found.logits):
        return "A number in the batch, or of a sample alone, is not finite"
    losses = f"{found.loss:.1e} of the loss, {found.gradient:.1e} of the gradient"
    return f"Relative errors: {found.logits:.1e} of all logits, {losses}"


def _worst(compared: Compared, located: Located) -> str:
    """The sample and token whose logits are furthest from those alone."""
    each = [(x, n, token) for n, row in enumerate(compared.by_position) for token, x in enumerate(row)]
    furthest, n, token = max(each, key=lambda found: found[0] if math.isfinite(found[0]) else math.inf)
    row, start, _ = located.segments.spans[located.order.index(n)]
    where = f"sample {n} (row {row}, from place {start}), token {token} of {len(compared.by_position[n])}"
    return f"{where}: a logit is {furthest:.2g} from that of the sample alone."


def advice(located: Located, model: Any, astray: Sequence[str]) -> str:
    """Advice in one line: each fault seen in a batch whose numbers are wrong, and the remedy. `astray`: which of them."""
    keep_BS, real_BS = keep_of(located.batch), keep_array(located.segments)
    if keep_BS is not None and (keep_BS != real_BS).any():
        lost_B, added_B = (real_BS & ~keep_BS).sum(axis=1), (keep_BS & ~real_BS).sum(axis=1)
        row = int((lost_B + added_B).argmax())
        lost = f"drops {lost_B[row]} of {int(real_BS[row].sum())} real tokens of row {row}"
        remedy = "make it from the lengths, not from ids != pad_token_id; tokens that a collator adds belong in the samples"
        return f"The 2D mask {lost} and keeps {added_B[row]} of padding: {remedy}."
    faults = [_fault_of_masks(model, located.batch, located.segments) if "logits" in astray else "", located.label_fault()]
    if located.batch.get("labels") is not None and predicts_next(model):
        faults += _faults_of_labels(located.with_labels()["labels"], located.segments)
    remedy = "wrap_collator(your collator, consumer='transformers', model=model) emits what this model reads"
    return ". ".join(filter(None, [*faults, remedy])) + "."


def _fault_of_masks(model: Any, batch: Mapping[str, Any], segments: Segments) -> str:
    unmasked, mask = keep_of(batch) is None and segments.num_padding > 0, batch.get("attention_mask")
    if unmasked and mask is None:
        return "The batch has padding and no attention_mask"
    if isinstance(mask, Tensor) and mask.ndim == 4 and mask.dtype == torch.bool:
        itself_BS = torch.diagonal(mask[:, 0], dim1=-2, dim2=-1).cpu().expand(segments.shape)
        if not itself_BS[segments.keep].any():
            return "The 4D mask says True = blocked, and transformers reads True as attended"
    if unmasked and needs_mask_2d(model):
        return "The batch has no 2D mask, and the recurrent layers of this model read that alone"
    if segments.packed and needs_mask_2d(model):
        return "A row holds several samples: recurrent layers read cu_seq_lens_q and seq_idx where each begins"
    if segments.packed:
        return "A row holds several samples, and attention runs over their boundaries"
    by_place = batch.get("position_ids") is None and segments.padding_side == "left"
    return "Rows are padded left without position_ids, and this model counts places from the left edge" if by_place else ""


def _faults_of_labels(labels_BS: Tensor, segments: Segments) -> Iterator[str]:
    read_BS = labels_BS != IGNORED
    read_BS[:, 0] = False  # the shift drops it
    if padded := int((read_BS & ~segments.keep).sum()):
        yield f"Labels stand at padding ({padded}): set them to {IGNORED}, or the mask drops real tokens"
    if first := int((read_BS & (segments.position_ids == 0) & segments.keep).sum()):
        yield f"First labels are predicted from padding or from another sample ({first}): set them to {IGNORED}"
