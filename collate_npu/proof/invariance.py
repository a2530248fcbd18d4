"""Padding invariance: a batch of somebody's collator gives every real token what its sample gives alone.

Costs a forward and a backward pass for each sample, and five for the batch and the noise. Legend: B rows, S width.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collate_npu.arrays import Array, host_array
from collate_npu.consumers.labels_and_positions import IGNORED
from collate_npu.consumers.model_traits import needs_mask_2d
from collate_npu.errors import CollateError, a_type, explain, explain_rows
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.masks.patterns import Pattern
from collate_npu.outputs import per_sequence
from collate_npu.proof import measure
from collate_npu.proof.measure import Batch, Errors, Numbers, Yardstick, own_loss, predicts_next, unpadded
from collate_npu.segments import Segments, keep_array
from collate_npu.validation import check_collator, check_model

# --- where samples stand in a batch, found by their tokens: who made it chose its side, its order and whether rows are
# packed. Its mask is under test, so it only decides between places where the tokens fit equally well. O(B * S) a sample.

REMEDY_SAME_TOKENS = "Switch off what changes tokens (bos, eos, truncation, masking), or pass samples as they are collated."


@dataclass(frozen=True, slots=True)
class Located:
    """The samples of a batch as Segments, and which sample each sequence is."""

    segments: Segments
    order: tuple[int, ...]
    """The sample of each of the N sequences, which are counted row by row."""
    batch: Mapping[str, Any] = field(default_factory=dict)
    features: Sequence[Batch] = ()
    """The samples, with labels of their own."""

    @classmethod
    def in_order(cls, segments: Segments, batch: Mapping[str, Any] | None = None, features: Sequence[Batch] = ()) -> Located:
        """Samples that stand in their order."""
        return cls(segments, tuple(range(segments.num_sequences)), batch or {}, features)

    def rows(self, x: Tensor) -> list[Tensor]:
        """`[B, S, ...]` to N tensors `[length, ...]`, `[B, V]` to N tensors `[1, V]`, in the order of the samples."""
        if x.ndim == 2 and self.segments.packed:
            rule = "This model gives one answer a row, and these rows hold several samples."
            raise CollateError(explain("batch", f"rows of {self.segments.lengths}", rule, "Give each sample its own row."))
        found = per_sequence(x, self.segments) if x.ndim > 2 else list(x.split(1))  # type: ignore[no-untyped-call]
        return [found[self.order.index(n)] for n in range(len(found))]

    def label_fault(self) -> str:
        """How the labels of the batch differ from those of its samples, "" where they do not. Nothing predicts a first
        label, which may be ignored; a batch without labels may leave them to others where they are the tokens."""
        found, own = self._labels(), [feature["labels"] for feature in self.features]
        if found is None:
            asked = any(feature["labels"] != feature["input_ids"] for feature in self.features)
            return "The batch has no labels, and those of the samples are not their tokens" if asked else ""
        pairs = ((n, t, *pair) for n, row in enumerate(zip(found, own)) for t, pair in enumerate(zip(*row)))
        bad = [(n, t, given, mine) for n, t, given, mine in pairs if given != mine and (t or given != IGNORED)]
        if not bad:
            return ""
        n, t, given, mine = bad[0]
        count = f"{len(bad)} label{'s' * (len(bad) > 1)}"
        where = f"{count} differ from the samples: sample {n}, token {t} has {given} in place of {mine}"
        after = [[*feature["input_ids"][1:], IGNORED] for feature in self.features]
        if given != IGNORED and all(x in (IGNORED, y) for pair in zip(found, after) for x, y in zip(*pair)):
            return f"{where}. They are shifted, and the model shifts them itself: leave labels at their own tokens"
        lost = sum(given == IGNORED for *_, given, _ in bad)
        return f"{where}; {lost} are ignored, as where labels are made by labels == pad_token_id" if lost else where

    def _labels(self) -> list[list[int]] | None:
        """Return the labels in the batch of each sample's tokens; None if it has no labels of tokens."""
        labels = None if self.batch.get("labels") is None else _tensor(self.batch, "labels")
        if labels is None or tuple(labels.shape) != self.segments.shape:
            return None
        return [row[:, 0].tolist() for row in self.rows(labels[..., None])]

    def with_labels(self) -> Batch:
        """Return the batch; if it has no labels, its tokens are the labels."""
        if self.batch.get("labels") is not None:
            return {**self.batch, "labels": _tensor(self.batch, "labels")}
        unread_BS = (self.segments.position_ids == 0) | ~self.segments.keep
        return {**self.batch, "labels": _tensor(self.batch, "input_ids").masked_fill(unread_BS, IGNORED)}

    def numbers(self, model: Any, gradients: bool) -> Numbers:
        """Return the numbers of the batch as it is."""
        return measure.measure(model, measure.uncached(model, self.with_labels()), self.rows, gradients)


def _tensor(batch: Mapping[str, Any], key: str) -> Tensor:
    return torch.as_tensor(host_array(key, batch[key])).long()


def keep_of(batch: Mapping[str, Any]) -> Array | None:
    """Return the 2D mask of a batch, bool `[B, S]`; None without one."""
    for key in ("attention_mask_2d", "attention_mask"):
        if len(getattr(batch.get(key), "shape", ())) == 2:
            keep: Array = host_array(key, batch[key]) > 0
            return keep
    return None


def locate(batch: Mapping[str, Any], features: Sequence[Batch]) -> Located:
    """Return where each sample stands in `input_ids` `[B, S]`, by its tokens. Raises `CollateError` where one is not
    there whole, where there are other tokens, or where tokens do not tell."""
    given = batch.get("input_ids") if isinstance(batch, Mapping) else None
    ids_BS: Array = np.zeros(0) if given is None else host_array("input_ids", given)
    if ids_BS.ndim != 2 or ids_BS.dtype.kind not in "iu":
        got = type(batch).__name__ if given is None else f"input_ids {ids_BS.dtype} {list(ids_BS.shape)}"
        rule = "The samples are found by their tokens: the batch is a dict with whole numbers [B, S]."
        raise CollateError(explain("batch", got, rule, "Let the collator return input_ids."))
    samples = [np.asarray(feature["input_ids"]) for feature in features]
    batch = {key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in batch.items()}
    keep_BS = keep_of(batch)
    if keep_BS is not None and keep_BS.shape == ids_BS.shape:
        kept = [ids[keep] for ids, keep in zip(ids_BS, keep_BS)]  # of each row exactly its sample?
        if len(samples) == len(kept) and all(map(np.array_equal, kept, samples)):
            return Located.in_order(Segments.from_keep(keep_BS), batch, features)
    starts = _starts(ids_BS, samples, keep_BS)
    order = sorted(range(len(samples)), key=lambda n: starts[n])
    found = np.zeros(ids_BS.size, np.int32)
    for number, n in enumerate(order, 1):
        found[starts[n] : starts[n] + len(samples[n])] = number
    return Located(Segments.from_ids(found.reshape(ids_BS.shape)), tuple(order), batch, features)


def _starts(ids_BS: Array, samples: Sequence[Array], keep_BS: Array | None) -> list[int]:
    """The place of each sample in the flat batch. The longest is placed first, for a shorter one may be a part of it; equal
    ones stand in their order. The mask decides where one is of padding alone."""
    free, starts, unsure = np.ones(ids_BS.size, bool), [-1] * len(samples), set()
    for n in sorted(range(len(samples)), key=lambda n: -len(samples[n])):
        fits = [at for at in _matches(ids_BS, samples[n]) if free[at : at + len(samples[n])].all()]
        kept = [at for at in fits if keep_BS is not None and keep_BS.reshape(-1)[at : at + len(samples[n])].all()]
        if fits:
            starts[n] = (kept or fits)[0]
            free[starts[n] : starts[n] + len(samples[n])] = False
        if len(kept or fits) > 1:
            unsure.add(n)
    whole = "tokens that the batch does not hold in one piece"
    if lost := [(n, f"{len(ids)} {whole}") for n, ids in enumerate(samples) if starts[n] < 0]:
        rule = "Each sample is compared with its own tokens in the batch."
        raise CollateError(explain_rows("samples", lost, rule, REMEDY_SAME_TOKENS))
    left = ids_BS.reshape(-1)[free]
    if left.size and (left != left[0]).any():
        rule = "Besides the samples a batch may hold only padding of one value; other tokens would change the result."
        raise CollateError(explain("batch", "tokens that no sample has", rule, REMEDY_SAME_TOKENS))
    if left.size and any((samples[n] == left[0]).all() for n in unsure):
        rule = "A sample of only padding fits several places, and no mask shows which."
        remedy = "Pass samples whose tokens differ from the padding."
        raise CollateError(explain("batch", "several places for one sample", rule, remedy))
    return starts


def _matches(ids_BS: Array, sample: Array) -> list[int]:
    """Return the places of the flat batch where these tokens stand in one row."""
    S, L = ids_BS.shape[1], len(sample)
    if not L or L > S:
        return []
    ends = (ids_BS[:, : S - L + 1] == sample[0]) & (ids_BS[:, L - 1 :] == sample[-1])
    return [int(b * S + s) for b, s in zip(*np.nonzero(ends)) if np.array_equal(ids_BS[b, s : s + L], sample)]


def samples_of(batch: Mapping[str, Any], pattern: str | Pattern | None = None, *, next_token: bool = False) -> Located:
    """The samples of a batch, with the labels it gives them, and where they stand. Raises what the door raises.

    What predicts the `next_token` moves the labels itself: there a label that is not ignored is its token.
    """
    segments = segments_from_batch(batch, pattern=pattern)
    keys = ("input_ids", "input_ids" if batch.get("labels") is None else "labels")
    ids, labels = ([row.tolist() for row in per_sequence(batch[key], segments)] for key in keys)
    if next_token:
        labels = [[x if y != IGNORED else y for x, y in zip(*pair)] for pair in zip(ids, labels)]
    return Located.in_order(segments, batch, [{"input_ids": x, "labels": y} for x, y in zip(ids, labels)])


Collator = Callable[[list[Batch]], Mapping[str, Any]]
"""Features, dicts of `input_ids`, `labels` and `attention_mask` (lists of ints), to a batch of tensors `[B, S]`."""
AnySamples = Sequence[Sequence[int]] | Sequence[Mapping[str, Any]]
"""Token ids, or mappings with `input_ids` and, where they differ, `labels`."""


def assert_padding_invariant(
    model: Any, collator: Collator, samples: AnySamples, *, tolerance: float | None = None, gradients: bool = True
) -> None:
    """Assert that a batch of `collator` gives each sample the logits, loss and gradient it has alone, by its own labels.

    `model` is a module of transformers: a decoder, a hybrid or an encoder, with a head or without. `collator` may pad on
    any side, permute rows or pack them: samples are found by their tokens. We accept six times the rounding noise measured
    on the model, or with `tolerance` an absolute difference of a logit and a relative one of loss and gradient. The loss
    is that of the next token, and the one that the model itself gives.

    Raises `AssertionError` with the worst sample, its token, the errors and what to change; `CollateError` where nothing
    can be compared: samples of equal lengths, other tokens in the batch, an encoder-decoder. The model runs in its own
    mode, without dropout: call `model.train()` before to prove what trains.

    >>> from collate_npu import PaddingCollator
    >>> from collate_npu.testing import byte_tokenizer, tiny_model
    >>> model, samples = tiny_model("qwen3_next", vocab_size=257), [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
    >>> collator = PaddingCollator(byte_tokenizer(padding_side="left"), model=model)
    >>> assert_padding_invariant(model, collator, samples)
    """
    check_collator(collator)
    features = features_of(samples)
    check_unequal(features)
    reference = Reference(model, [features], gradients=gradients, tolerance=tolerance)
    _, fault = reference.compare([collated(collator, features)])
    if fault:
        raise AssertionError(fault)


class Reference:
    """Batches of samples, each sample alone on one model, and what passes beside them.

    Raises `CollateError` for a model or samples of which nothing can be compared.
    """

    def __init__(
        self, model: Any, batches: Sequence[Sequence[Batch]], *, gradients: bool = True, tolerance: float | None = None
    ) -> None:
        check_model(model)
        check_tolerance(tolerance)
        measure.check_one_stack(model)
        rows = model.get_input_embeddings().weight.shape[0]
        used = [token for batch in batches for feature in batch for token in feature["input_ids"]]
        if astray := [token for token in (max(used), min(used)) if not 0 <= token < rows]:  # on a card they end the process
            remedy = "Pass the model that the tokens were made for, and its tokenizer."
            raise CollateError(explain("samples", f"token id {astray[0]}", f"This model has ids 0 to {rows - 1}.", remedy))
        self.batches = batches
        self._model, self._gradients, self._tolerance = model, gradients, tolerance
        self._alone = [measure.alone(model, features, gradients) for features in batches]
        self._noise = measure.measure_noise(model, batches, self._alone, gradients=gradients)

    def compare(self, located: Sequence[Located]) -> tuple[Errors, str]:
        """Compare a batch of each batch of samples with them. Return the worst errors of all batches, and what is wrong with
        the first batch that is wrong, and what to change; "" where all are right."""
        errors, fault = [], ""
        for each, features, own in zip(located, self.batches, self._alone):
            mine = each.numbers(self._model, self._gradients)
            errors.append(measure.errors_between(mine, own))
            fault = fault or self._fault(each, features, errors[-1], zip(mine.logits, own.logits))
        return measure.worst(errors), fault

    def tells(self, lost: Sequence[Located]) -> bool:
        """Return True if batches without their mask are seen to be wrong; else a wrong mask would not show."""
        pairs = ((each.numbers(self._model, self._gradients), own) for each, own in zip(lost, self._alone))
        wrong = measure.worst(measure.errors_between(*pair) for pair in pairs)
        return Yardstick(self._noise, wrong).tells(self._tolerance)

    def _fault(self, located: Located, features: Sequence[Batch], found: Errors, logits: Iterable[Any]) -> str:
        astray = Yardstick(self._noise).astray(found)
        right, limit = not astray, f"{measure.TIMES * self._noise.logits:.1e} is rounding"
        if self._tolerance is not None:
            right = all(error <= self._tolerance for error in (found.largest, found.loss, found.gradient))
            limit = f"the tolerance is {self._tolerance:g}"
        if right and not located.label_fault():
            most = max(measure.TIMES * self._noise.loss, self._tolerance or 0.0)
            return _own_loss_fault(self._model, located, features, most)
        errors = f"{found.logits:.1e} of all logits, {found.loss:.1e} of the loss, {found.gradient:.1e} of the gradient"
        errors = f"Relative errors: {errors}" if math.isfinite(found.logits) else "A number is not finite"
        off = [(x - y).abs().flatten(0, -2).amax(-1).tolist() for x, y in logits if x.shape == y.shape]  # of each token
        each = [(x, n, token) for n, row in enumerate(off) for token, x in enumerate(row)]
        most, n, token = max(each, key=lambda one: one[0] if math.isfinite(one[0]) else math.inf)
        row, start, _ = located.segments.spans[located.order.index(n)]
        where = f"sample {n} (row {row}, from place {start}), token {token} of {len(off[n])}"
        worst = f"{where}: a logit is {most:.2g} from that of the sample alone."
        return "\n".join([worst, f"{errors} ({limit}).", advice(located, self._model, astray)])


def _own_loss_fault(model: Any, located: Located, features: Sequence[Batch], limit: float) -> str:
    """How the loss that the model itself gives for the batch differs from that of its samples: their mean by tokens or by
    samples, or their sum. "" where it gives none."""
    if "labels" not in inspect.signature(model.forward).parameters or not predicts_next(model):
        return ""
    ones = [{key: torch.tensor([feature[key]]) for key in ("input_ids", "labels")} for feature in features]
    counts = [int((one["labels"][:, 1:] != IGNORED).sum()) for one in ones]
    each = [(loss, n) for one, n in zip(ones, counts) if n and (loss := unpadded(partial(own_loss, model), one)) is not None]
    if len(each) < 2 or (whole := own_loss(model, located.with_labels())) is None:
        return ""
    total, by_tokens = sum(x for x, _ in each), sum(x * n for x, n in each) / sum(n for _, n in each)
    if any(abs(whole - right) <= limit * abs(right) for right in (by_tokens, total, total / len(each))):
        return ""
    counted = "it divides by another number than the tokens with a label"
    return f"The model's own loss is {whole:.4g} for the batch, and {by_tokens:.4g} for its samples alone: {counted}."


def features_of(samples: AnySamples) -> list[Batch]:
    """Features with `input_ids` and `labels` (by default the same). Raises `CollateError` for what is no token ids."""
    if isinstance(samples, (str, Mapping)) or not isinstance(samples, Iterable):
        rule = "Samples are lists of token ids, or mappings of input_ids and labels."
        raise CollateError(explain("samples", a_type(samples), rule, "Pass a list of them."))
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


def check_tolerance(tolerance: float | None) -> None:
    """Refuse what is no error."""
    if tolerance is not None and not (isinstance(tolerance, (int, float)) and 0 <= tolerance < math.inf):
        raise CollateError(explain("tolerance", repr(tolerance), "An error is 0 or more.", "Give such a number, or none."))


def check_unequal(*batches: Sequence[Batch]) -> None:
    """Refuse samples of which no batch needs padding."""
    if all(len({len(feature["input_ids"]) for feature in batch}) < 2 for batch in batches):
        rule = "Without padding every mask is right, and a comparison would prove nothing."
        raise CollateError(explain("samples", "batches of equal lengths", rule, "Give samples of unequal lengths."))


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
    remedy = "adapt(model) runs each sample by itself"
    if not (located.segments.packed and needs_mask_2d(model)):
        remedy += ", and wrap_collator(your collator, consumer='transformers', model=model) emits what this model reads"
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
    if segments.packed:
        return "A row holds several samples, and layers run over their boundaries"
    by_place = batch.get("position_ids") is None and segments.padding_side == "left"
    return "Rows are padded left without position_ids, and this model counts places from the left edge" if by_place else ""


def _faults_of_labels(labels_BS: Tensor, segments: Segments) -> Iterator[str]:
    read_BS = labels_BS != IGNORED
    read_BS[:, 0] = False  # the shift drops it
    if padded := int((read_BS & ~segments.keep).sum()):
        yield f"Labels stand at padding ({padded}): set them to {IGNORED}, or the mask drops real tokens"
    if first := int((read_BS & (segments.position_ids == 0) & segments.keep).sum()):
        yield f"First labels are predicted from padding or from another sample ({first}): set them to {IGNORED}"
