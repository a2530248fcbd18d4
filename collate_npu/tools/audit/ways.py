"""Ways: what a report calls each way of handing over, and what that way does.

Findings carry short names (`column`), which do not change; people read the titles of this file.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from collate_npu.tools.audit.case import Finding

Kind = Literal["padded", "packed", "cp"]


class Way(NamedTuple):
    """A title of at most 20 letters, and what is handed over."""

    title: str
    meaning: str


KINDS: dict[str, str] = {
    "padded": "padded batches",
    "packed": "flat rows",
    "cp": "batches shared out between ranks",
}
WAYS: dict[str, dict[str, Way]] = {
    "padded": {
        "collator": Way("collator", 'PaddingCollator(consumer="transformers", model=model) makes the batch'),
        "adapter": Way("collator + adapter", "PaddingCollator's neutral batch, made ready by BatchAdapter at the model"),
        "wrapped 4D": Way("wrapped collator", "a collator that knows 4D masks alone, inside wrap_collator"),
        "mapping": Way("mask per layer kind", "a dict of masks: the 4D for attention layers, the 2D for recurrent ones"),
        "bare 4D": Way("4D mask alone", "a correct 4D mask, and no 2D for the recurrent layers"),
        "None": Way("no mask", "attention_mask is left out"),
        "4D + 2D keyword": Way("4D + 2D keyword", "the 4D, and attention_mask_2d as a keyword that the model need not read"),
    },
    "packed": {
        "collator": Way("collator", "PaddingCollator(padding_free=True) makes the row"),
        "adapter": Way("collator + adapter", "PaddingCollator's neutral row, made ready by BatchAdapter at the model"),
        "wrapped": Way("wrapped collator", "transformers' DataCollatorWithFlattening, inside wrap_collator"),
        "positions": Way("positions", "DataCollatorWithFlattening: position_ids that restart, and nothing else"),
        "cu_seq_lens_q": Way("positions + offsets", "position_ids, and cu_seq_lens_q for kernels of attention and scans"),
        "seq_idx": Way("positions + seq_idx", "position_ids, and seq_idx for the convolution of recurrent layers"),
        "nothing": Way("no boundaries", "the tokens alone: nothing says where a sequence begins"),
    },
    "cp": {
        "accelerate": Way("accelerate", "context_parallel() around accelerate's context, right padding"),
        "Trainer": Way("Trainer", "context_parallel_collator() as Trainer's data_collator, right padding"),
        "Trainer, left": Way("Trainer, left", "an ordinary left-padded batch: Trainer drops its mask"),
    },
}


def kind_of(finding: Finding) -> str:
    """A table for each kind of case: the ways of handing over differ."""
    return "padded" if finding.side in ("left", "right") else finding.side.partition(" ")[0]


def way_of(finding: Finding) -> Way:
    """Its title and meaning; a collator of yours goes by the name it was given by."""
    return WAYS[kind_of(finding)].get(finding.column) or Way(finding.column, "YOUR collator, as you gave it to the audit")


def shortened(text: str, most: int) -> str:
    """Of at most so many letters: what is left out of a long path is its middle."""
    if len(text) <= most:
        return text
    tail = (most - 3) * 2 // 3
    return f"{text[: most - 3 - tail]}...{text[-tail:]}"


def listed(names: Iterable[str], most: int = 0) -> str:
    """Each name once; after the first few, how many more (`most` 0: all)."""
    unique = list(dict.fromkeys(names))
    more = len(unique) - most
    return ", ".join(unique) if not most or more <= 1 else f"{', '.join(unique[:most])} and {more} more"
