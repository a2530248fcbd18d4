"""The audit: does a padded batch give the same numbers as each sample alone, on this model and this device?

Every sample is run alone, without padding and without a mask; then batches of the same samples are run as this library
hands them over (`OURS`), and as they are handed over elsewhere (`OTHERS`). Reported are the largest difference of a logit
at a real token, and the relative error of the loss and of the gradient of all parameters. A tiny model costs about a
second a case on one CPU core; a checkpoint costs one forward and backward pass a case and batch, and as many a sample.

Legend: B batch rows, S width.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from collate_npu.collate.collators import PaddingCollator
from collate_npu.collate.wrapping import wrap_collator
from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.models import layer_masks
from collate_npu.errors import CollateError, UnsupportedFormError, explain
from collate_npu.masks.forms import Polarity, dense
from collate_npu.outputs import per_sequence
from collate_npu.segments import Segments, Side

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Batch = dict[str, Any]
Handover = Callable[["Subject", list[Batch]], Batch]

IGNORED = -100
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model under audit, the way its batches are padded, and what a mask must look like for its attention."""

    name: str
    model: PreTrainedModel
    attn_implementation: str
    side: Side
    pad_token_id: int

    def collator(self, **settings: Any) -> PaddingCollator:
        """This library's collator for the subject."""
        return PaddingCollator(pad_token_id=self.pad_token_id, padding_side=self.side, **settings)

    def truth(self, features: list[Batch]) -> Segments:
        """What is real, by the lengths alone."""
        return Segments.from_lengths([len(feature["input_ids"]) for feature in features], side=self.side)

    def dense(self, features: list[Batch]) -> Tensor:
        """A correct 4D mask, in the form its attention takes."""
        polarity: Polarity = "bias" if self.attn_implementation == "eager" else "keep"
        return dense(self.truth(features), polarity=polarity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One way of handing over, on one model and side. Errors are None where the case did not run; `note` says why.

    `refused` marks this library's own clear refusal; any other exception is the model's.
    """

    model: str
    attn_implementation: str
    side: Side
    column: str
    ours: bool
    logits: float | None = None
    loss: float | None = None
    gradient: float | None = None
    note: str = ""
    refused: bool = False

    def within(self, tolerance: float) -> bool:
        """Is every error that was measured inside the tolerance, or was the case refused?"""
        if self.logits is None:
            return self.refused
        return all(error <= tolerance for error in (self.logits, self.loss, self.gradient) if error is not None)


# --- ways of handing over


def _by_collator(subject: Subject, features: list[Batch]) -> Batch:
    return subject.collator(consumer="transformers", model=subject.model)(features)


def _by_adapter(subject: Subject, features: list[Batch]) -> Batch:
    """The neutral wire form (4D masked beside the 2D), then the adapter at the model."""
    return BatchAdapter(subject.model, consumer="transformers")(subject.collator(attention_mask="4d")(features))


def _by_wrapping(subject: Subject, features: list[Batch]) -> Batch:
    """Somebody else's collator, which knows 4D masks alone."""

    def theirs(features: list[Batch]) -> Batch:
        return {**_plain(subject, features), "attention_mask": subject.dense(features)}

    return wrap_collator(theirs, consumer="transformers", model=subject.model)(features)


def _by_mapping(subject: Subject, features: list[Batch]) -> Batch:
    kinds = layer_masks(subject.model.config)
    full, keep = subject.dense(features), subject.truth(features).keep
    masks = {key: full if kind == "attention" else keep for key, kind in kinds.items()}
    return {**_plain(subject, features), "attention_mask": masks}


def _bare_4d(subject: Subject, features: list[Batch]) -> Batch:
    return {**_plain(subject, features), "attention_mask": subject.dense(features)}


def _no_mask(subject: Subject, features: list[Batch]) -> Batch:
    return _plain(subject, features)


def _with_keyword(subject: Subject, features: list[Batch]) -> Batch:
    return {**_bare_4d(subject, features), "attention_mask_2d": subject.truth(features).keep}


def _plain(subject: Subject, features: list[Batch]) -> Batch:
    batch = subject.collator(attention_mask="omit")(features)
    del batch["attention_mask_2d"]
    return batch


OURS: dict[str, Handover] = {
    "collator": _by_collator,
    "adapter": _by_adapter,
    "wrapped 4D": _by_wrapping,
    "mapping": _by_mapping,
}
OTHERS: dict[str, Handover] = {"bare 4D": _bare_4d, "None": _no_mask, "4D + 2D keyword": _with_keyword}


# --- measuring


@dataclass(frozen=True, slots=True)
class _Numbers:
    logits: list[Tensor]
    loss: float
    gradients: dict[str, Tensor]


def audit(
    model: PreTrainedModel,
    samples: Sequence[Sequence[int]],
    *,
    name: str = "",
    pad_token_id: int,
    sides: Sequence[Side] = ("left", "right"),
    batch_size: int = 4,
    columns: Sequence[str] = (*OURS, *OTHERS),
    gradients: bool = True,
) -> Iterator[Finding]:
    """Findings for each side and column, as they are measured. `samples` are token ids; the model stays as it is."""
    features: list[Batch] = [{"input_ids": list(ids), "labels": list(ids)} for ids in samples]
    batches = [features[i : i + batch_size] for i in range(0, len(features), batch_size)]
    if not any(len({len(feature["input_ids"]) for feature in batch}) > 1 for batch in batches):
        rule = "Without padding every mask is right, and the audit would prove nothing."
        raise CollateError(explain("samples", "batches of equal lengths", rule, "Give samples of unequal lengths."))
    model.eval()
    alone = [_alone(model, batch, gradients) for batch in batches]
    attention = getattr(model.config, "_attn_implementation", None) or "sdpa"
    for side in sides:
        subject = Subject(name=name, model=model, attn_implementation=attention, side=side, pad_token_id=pad_token_id)
        for column in columns:
            yield _finding(subject, column, batches, alone, gradients)


def _finding(subject: Subject, column: str, batches: list[list[Batch]], alone: list[_Numbers], gradients: bool) -> Finding:
    where: dict[str, Any] = {"model": subject.name, "attn_implementation": subject.attn_implementation, "side": subject.side}
    handover = {**OURS, **OTHERS}[column]
    try:
        errors = [
            _errors(_batched(subject, handover(subject, batch), batch, gradients), reference)
            for batch, reference in zip(batches, alone)
        ]
    except Exception as error:  # whatever the model raises is the finding: it refused, and says so
        refused = isinstance(error, UnsupportedFormError)
        note = str(error).splitlines()[0][:300]
        note = note if refused else f"{type(error).__name__}: {note}"
        return Finding(**where, column=column, ours=column in OURS, note=note, refused=refused)
    logits, loss, gradient = (max(values) for values in zip(*errors))
    measured = {"logits": logits, "loss": loss, "gradient": gradient if gradients else None}
    return Finding(**where, column=column, ours=column in OURS, **measured)


def _alone(model: PreTrainedModel, features: list[Batch], gradients: bool) -> _Numbers:
    """Each sample in a batch of its own; losses and gradients add up."""
    model.zero_grad(set_to_none=True)
    logits, total = [], 0.0
    for feature in features:
        ids = torch.tensor([feature["input_ids"]], device=model.device)
        with torch.set_grad_enabled(gradients):
            row = model(input_ids=ids).logits
            loss = _loss(row, ids)
        if gradients:
            torch.autograd.backward(loss)
        logits.append(row.detach()[0].float())
        total += float(loss.detach())
    return _Numbers(logits, total, _gradients(model) if gradients else {})


def _batched(subject: Subject, batch: Batch, features: list[Batch], gradients: bool) -> _Numbers:
    model = subject.model
    model.zero_grad(set_to_none=True)
    labels = batch.pop("labels").to(model.device)
    with torch.set_grad_enabled(gradients):
        logits = model(**_on(batch, model.device)).logits
        loss = _loss(logits, labels)
    if gradients:
        torch.autograd.backward(loss)
    rows = per_sequence(logits.detach().float(), subject.truth(features))
    return _Numbers(rows, float(loss.detach()), _gradients(model) if gradients else {})


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Next-token cross entropy, summed, so that samples alone add up to their batch."""
    shifted = labels[:, 1:].flatten()
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), shifted, ignore_index=IGNORED, reduction="sum")


def _gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def _errors(mine: _Numbers, reference: _Numbers) -> tuple[float, float, float]:
    logits = max((float((x - y).abs().max()) for x, y in zip(mine.logits, reference.logits)), default=0.0)
    loss = abs(mine.loss - reference.loss) / max(abs(reference.loss), 1e-12)
    return logits, loss, _gradient_error(mine.gradients, reference.gradients)


def _gradient_error(mine: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """|g - reference| / |reference| over all parameters at once; a missing gradient is one of zeros."""
    names = mine.keys() | reference.keys()
    zero = torch.zeros(())
    wrong = sum(float((mine.get(n, zero) - reference.get(n, zero)).double().square().sum()) for n in names)
    size = sum(float(gradient.double().square().sum()) for gradient in reference.values())
    return float((wrong / size) ** 0.5) if size else 0.0


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {key: _on(item, device) for key, item in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


# --- what is audited


def shipped_text() -> list[str]:
    """The lines shipped with the package, written for it: a few hundred, ragged, in several scripts."""
    return (resources.files("collate_npu") / "tools" / "data" / "text.txt").read_text(encoding="utf-8").splitlines()


def read_text(path: Path) -> list[str]:
    """Lines of a text file, or the `text` (or `content`) field of each line of a `.jsonl` file."""
    import json

    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if path.suffix != ".jsonl":
        return lines
    records = [json.loads(line) for line in lines]
    values = [record.get("text") or record.get("content") for record in records if isinstance(record, dict)]
    found = [text for text in values if isinstance(text, str)]
    if len(found) != len(lines):
        rule = "Each line of a .jsonl file is an object with a text field."
        raise CollateError(explain(str(path), "other lines", rule, "Rename the field to text, or pass a .txt file."))
    return found


def sample_ids(text: Sequence[str], tokenizer: Any, *, count: int, max_length: int, seed: int = 0) -> list[list[int]]:
    """Token ids of `count` lines drawn from the text, cut to lengths drawn up to `max_length`, and closed with eos.

    Lengths are drawn so that long lines are ragged too. Where pad is eos, as so often, the last token is real and looks
    like padding.
    """
    rng = random.Random(seed)
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    cut = {"add_special_tokens": False, "truncation": True, "max_length": max_length}
    encoded = [ids for line in text if (ids := tokenizer(line, **cut)["input_ids"])]
    if len(encoded) < count:
        rule = f"The audit draws {count} lines."
        raise CollateError(explain("data", f"{len(encoded)} lines with tokens", rule, "Give more text, or fewer batches."))
    longest = max(max_length - len(eos), 1)
    return [ids[: rng.randint(max(longest // 8, 1), longest)] + eos for ids in rng.sample(encoded, count)]


def as_json(findings: Sequence[Finding], left_out: Mapping[str, str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the audit found, for machines."""
    return {
        "settings": dict(settings),
        "findings": [asdict(finding) for finding in findings],
        "left_out": dict(left_out),
    }
