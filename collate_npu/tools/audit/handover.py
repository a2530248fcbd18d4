"""Handing over: the ways a batch reaches a model, padded or as one flat row, by this library and as elsewhere.

Dense masks are for eager and sdpa. Flash kernels and attention of other names read the 2D mask: a dense one would make
them read past their tensors, which on a card ends the process. flex_attention reads a BlockMask.
Each way of a flat row that is not ours leaves a boundary out that some layer needs, so that one sees what it costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor

from collate_npu.collate.collators import PaddingCollator
from collate_npu.collate.wrapping import wrap_collator
from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.model_traits import layer_masks, pattern_of
from collate_npu.masks.dense_mask import Polarity
from collate_npu.masks.forms import block_mask, dense
from collate_npu.proof.measure import Batch
from collate_npu.segments import Segments
from collate_npu.testing import byte_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Layout = Literal["left", "right", "packed"]
"""Padded on a side, or all samples of a batch in one flat row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model under audit, the way its batches are laid out, and what a mask must look like for its attention."""

    model: PreTrainedModel
    side: Layout
    pad_token_id: int

    @property
    def attn_implementation(self) -> str:
        """By transformers' name."""
        return getattr(self.model.config, "_attn_implementation", None) or "sdpa"

    @property
    def reads_dense(self) -> bool:
        """Is a dense mask a form that its attention reads?"""
        return self.attn_implementation in ("eager", "sdpa")

    @property
    def pattern(self) -> str | None:
        """What is declared of its attention: that an encoder looks both ways, else nothing."""
        return "bidirectional" if pattern_of(self.model) == "bidirectional" else None

    def collator(self, **settings: Any) -> PaddingCollator:
        """This library's collator for the subject."""
        laid_out = {"padding_free": True} if self.side == "packed" else {"padding_side": self.side}
        return PaddingCollator(pad_token_id=self.pad_token_id, pattern=self.pattern, **laid_out, **settings)

    def truth(self, features: list[Batch]) -> Segments:
        """What is real, by the lengths alone."""
        lengths = [len(feature["input_ids"]) for feature in features]
        if self.side == "packed":
            return Segments.from_lengths([lengths])
        return Segments.from_lengths(lengths, side=self.side)

    def dense(self, features: list[Batch]) -> Tensor:
        """A correct 4D mask, in the form its attention takes."""
        polarity: Polarity = "bias" if self.attn_implementation == "eager" else "keep"
        return dense(self.truth(features), polarity=polarity, pattern=self.pattern or "causal")


Hand = Callable[[Subject, list[Batch]], Batch]


class Way(NamedTuple):
    """A way of handing over. Its name is the same in tables, in JSON and in `Finding.column`."""

    name: str
    """At most 20 letters."""
    meaning: str
    hand: Hand
    ours: bool = False
    dense: bool = False
    """Does it hand over a dense mask, whatever the attention reads?"""


def _by_collator(subject: Subject, features: list[Batch]) -> Batch:
    return subject.collator(consumer="transformers", model=subject.model)(features)


def _by_adapter(subject: Subject, features: list[Batch]) -> Batch:
    """4D masked beside the 2D, or offsets, are the neutral wire form."""
    flat = subject.side == "packed"
    neutral = subject.collator(**({} if flat else {"attention_mask": "4d"}))(features)
    return BatchAdapter(subject.model, consumer="transformers", pattern=subject.pattern, padding_free=flat)(neutral)


def _by_wrapping(subject: Subject, features: list[Batch]) -> Batch:
    theirs = partial(_flattened if subject.side == "packed" else _bare_4d, subject)
    return wrap_collator(theirs, consumer="transformers", model=subject.model, pattern=subject.pattern)(features)


def _by_mapping(subject: Subject, features: list[Batch]) -> Batch:
    """Nothing is made of a mask in a mapping: that of attention has the form which it takes."""
    kinds, keep = layer_masks(subject.model.config), subject.truth(features).keep
    full: Any = keep
    if subject.attn_implementation == "flex_attention":
        full = block_mask(subject.truth(features), pattern=subject.pattern or "causal")
    elif subject.reads_dense:
        full = subject.dense(features)
    masks = {key: full if kind == "attention" else keep for key, kind in kinds.items()}
    return {**_plain(subject, features), "attention_mask": masks}


def _bare_4d(subject: Subject, features: list[Batch]) -> Batch:
    return {**_plain(subject, features), "attention_mask": subject.dense(features)}


def _with_keyword(subject: Subject, features: list[Batch]) -> Batch:
    return {**_bare_4d(subject, features), "attention_mask_2d": subject.truth(features).keep}


def _plain(subject: Subject, features: list[Batch]) -> Batch:
    batch = subject.collator(attention_mask="omit")(features)
    return {key: value for key, value in batch.items() if key != "attention_mask_2d"}


def _by_tokenizer(subject: Subject, features: list[Batch]) -> Batch:
    """As its collator for language models has it too, with mlm=False. Samples come as a tokenizer makes them."""
    from transformers import DataCollatorForSeq2Seq

    batch: Batch = dict(DataCollatorForSeq2Seq(byte_tokenizer(padding_side=subject.side))(features))
    real_BS = batch["attention_mask"].bool()
    return {**batch, "input_ids": batch["input_ids"].where(real_BS, subject.pad_token_id)}


def _flattened(subject: Subject, features: list[Batch], **told: bool) -> Batch:
    from transformers import DataCollatorWithFlattening

    batch: Batch = DataCollatorWithFlattening(**told)(features)
    return batch


_COLLATOR = Way("collator", "PaddingCollator(model=model), for a row with padding_free=True", _by_collator, ours=True)
_ADAPTER = Way("collator + adapter", "a neutral batch, then BatchAdapter at the model", _by_adapter, ours=True)
_WRAPPED = Way("wrapped collator", "one of 4D masks alone, or of flat rows, inside wrap_collator", _by_wrapping, ours=True)
_MAPPING = Way("mask per layer kind", "a dict: 4D for attention layers, 2D for recurrent ones", _by_mapping, ours=True)
_OFFSETS, _INDEX = partial(_flattened, return_flash_attn_kwargs=True), partial(_flattened, return_seq_idx=True)
NO_MASK = Way("no mask", "attention_mask is left out", _plain)
DENSE_ALONE = Way("4D mask alone", "a correct 4D mask, and no 2D for the recurrent layers", _bare_4d, dense=True)
NO_BOUNDARIES = Way("no boundaries", "the tokens alone", partial(_flattened, return_position_ids=False))


def _by_name(*ways: Way) -> dict[str, Way]:
    return {way.name: way for way in ways}


PADDED = _by_name(
    _COLLATOR,
    _ADAPTER,
    _WRAPPED,
    _MAPPING,
    DENSE_ALONE,
    NO_MASK,
    Way("4D + 2D keyword", "attention_mask_2d too, which need not be read", _with_keyword, dense=True),
    Way("tokenizer's 2D mask", "DataCollatorForSeq2Seq: on the left first tokens are taught from padding", _by_tokenizer),
)
FLAT = _by_name(
    _COLLATOR,
    _ADAPTER,
    _WRAPPED,
    Way("positions", "DataCollatorWithFlattening: position_ids that restart alone", _flattened),
    Way("positions + offsets", "cu_seq_lens_q too, for kernels of attention and scans", _OFFSETS),
    Way("positions + seq_idx", "seq_idx too, for the convolution of recurrent layers", _INDEX),
    NO_BOUNDARIES,
)
WAYS: dict[Layout, dict[str, Way]] = {"left": PADDED, "right": PADDED, "packed": FLAT}
