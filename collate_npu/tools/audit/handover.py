"""Handing over: the ways a padded batch reaches a model, by this library (`OURS`) and as elsewhere (`OTHERS`).

Dense masks are for eager and sdpa. Flash kernels and attention of other names read the 2D mask: a dense one would make
them read past their tensors, which on a card ends the process. flex_attention reads a BlockMask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from collate_npu.collate.collators import PaddingCollator
from collate_npu.collate.wrapping import wrap_collator
from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.models import layer_masks, pattern_of
from collate_npu.masks.forms import block_mask, dense
from collate_npu.masks.polarity import Polarity
from collate_npu.rows import Side
from collate_npu.segments import Segments
from collate_npu.testing.measure import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Handover = Callable[["Subject", list[Batch]], Batch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model under audit, the way its batches are padded, and what a mask must look like for its attention."""

    name: str
    model: PreTrainedModel
    attn_implementation: str
    side: Side
    pad_token_id: int

    @property
    def pattern(self) -> str | None:
        """What is declared of its attention: that an encoder looks both ways, else nothing."""
        return "bidirectional" if pattern_of(self.model) == "bidirectional" else None

    def collator(self, **settings: Any) -> PaddingCollator:
        """This library's collator for the subject."""
        how = {"pad_token_id": self.pad_token_id, "padding_side": self.side, "pattern": self.pattern}
        return PaddingCollator(**how, **settings)  # type: ignore[arg-type]

    def truth(self, features: list[Batch]) -> Segments:
        """What is real, by the lengths alone."""
        return Segments.from_lengths([len(feature["input_ids"]) for feature in features], side=self.side)

    def dense(self, features: list[Batch]) -> Tensor:
        """A correct 4D mask, in the form its attention takes."""
        polarity: Polarity = "bias" if self.attn_implementation == "eager" else "keep"
        return dense(self.truth(features), polarity=polarity, pattern=self.pattern or "causal")

    def prepared(self, features: list[Batch]) -> Any:
        """A correct mask in the form that this attention takes it from a mapping, where nothing is made of it."""
        if self.attn_implementation == "flex_attention":
            return block_mask(self.truth(features), pattern=self.pattern or "causal")
        return self.dense(features) if reads_dense(self.attn_implementation) else self.truth(features).keep


def reads_dense(attn_implementation: str) -> bool:
    """Is a dense mask a form that this attention implementation of transformers reads?"""
    return attn_implementation in ("eager", "sdpa")


def others_on(attn_implementation: str) -> list[str]:
    """The ways of `OTHERS` that can be tried on an attention implementation."""
    return [name for name in OTHERS if name == "None" or reads_dense(attn_implementation)]


def _by_collator(subject: Subject, features: list[Batch]) -> Batch:
    return subject.collator(consumer="transformers", model=subject.model)(features)


def _by_adapter(subject: Subject, features: list[Batch]) -> Batch:
    """The neutral wire form (4D masked beside the 2D), then the adapter at the model."""
    return BatchAdapter(subject.model, consumer="transformers", pattern=subject.pattern)(
        subject.collator(attention_mask="4d")(features)
    )


def _by_wrapping(subject: Subject, features: list[Batch]) -> Batch:
    """Somebody else's collator, which knows 4D masks alone."""

    def theirs(features: list[Batch]) -> Batch:
        return {**_plain(subject, features), "attention_mask": subject.dense(features)}

    wrapped = wrap_collator(theirs, consumer="transformers", model=subject.model, pattern=subject.pattern)
    return wrapped(features)


def _by_mapping(subject: Subject, features: list[Batch]) -> Batch:
    kinds = layer_masks(subject.model.config)
    full, keep = subject.prepared(features), subject.truth(features).keep
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
