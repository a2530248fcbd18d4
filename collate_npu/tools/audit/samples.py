"""Samples: rows of data as token ids, drawn at random and cut to lengths that are drawn too."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from collate_npu.errors import CollateError, explain
from collate_npu.testing.measure import Batch
from collate_npu.tools.audit.attentions import first_line
from collate_npu.tools.audit.data import Row

_LOOKED_AT = 2_000
"""Rows that are tokenized at most: of more, so many are drawn first."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """From which rows a model's samples are drawn, and how; can be pickled, for ranks."""

    rows: Sequence[Row]
    count: int
    max_length: int
    seed: int = 0

    @property
    def tokenized(self) -> bool:
        """Do all rows hold tokens? Then no tokenizer is needed."""
        return all(isinstance(row, dict) for row in self.rows)

    @property
    def largest_id(self) -> int:
        """The largest token id of the rows; 0 where a tokenizer makes them."""
        return max((max(row["input_ids"]) for row in self.rows if isinstance(row, dict)), default=0)

    def samples(self, tokenizer: Any) -> list[Batch]:
        """Features with `input_ids` and `labels`, as this tokenizer makes them of the rows."""
        return draw(self.rows, tokenizer, count=self.count, max_length=self.max_length, seed=self.seed)


def sample_ids(text: Sequence[Row], tokenizer: Any, *, count: int, max_length: int, seed: int = 0) -> list[list[int]]:
    """The token ids of `draw`."""
    return [feature["input_ids"] for feature in draw(text, tokenizer, count=count, max_length=max_length, seed=seed)]


def draw(rows: Sequence[Row], tokenizer: Any, *, count: int, max_length: int, seed: int = 0) -> list[Batch]:
    """`count` samples drawn from the rows: text is cut to lengths drawn up to `max_length`, and closed with eos.

    Lengths are drawn so that long lines are ragged too. Where pad is eos, as so often, the last token is real and looks
    like padding. A row of `input_ids` is used as it is, with its labels.
    """
    rng = random.Random(seed)
    looked_at = rng.sample(rows, _LOOKED_AT) if len(rows) > _LOOKED_AT else rows
    given = [encoded(row, tokenizer, max_length) for row in looked_at]
    drawn = [feature for feature in given if feature["input_ids"]]
    if len(drawn) < count:
        rule = f"The audit draws {count} lines."
        raise CollateError(explain("data", f"{len(drawn)} lines with tokens", rule, "Give more text, or fewer batches."))
    eos = [] if tokenizer is None or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    longest = max(max_length - len(eos), 1)
    lengths_and_rows = [(rng.randint(max(longest // 8, 1), longest), feature) for feature in rng.sample(drawn, count)]
    return [feature if "labels" in feature else _closed(feature["input_ids"][:n] + eos) for n, feature in lengths_and_rows]


def _closed(ids: list[int]) -> Batch:
    return {"input_ids": ids, "labels": ids}


def encoded(row: Row, tokenizer: Any, max_length: int) -> Batch:
    """`input_ids` of a row, cut to `max_length`; a row of tokens as it is."""
    if isinstance(row, dict):
        return row
    text = row if isinstance(row, str) else _spoken(row, tokenizer)
    return {"input_ids": tokenizer(text, add_special_tokens=False, truncation=True, max_length=max_length)["input_ids"]}


def _spoken(messages: list[dict[str, str]], tokenizer: Any) -> str:
    """A conversation as text, by the tokenizer's chat template."""
    remedy = "Name, with --tokenizer, the folder of one that has it, or give a column text."
    if not getattr(tokenizer, "chat_template", None):
        rule = "Rows of messages become text by the chat template of the tokenizer."
        raise CollateError(explain("tokenizer", "no chat template", rule, remedy))
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # jinja2's classes, and what a template raises
        got = f"{type(error).__name__}: {first_line(error)}"
        rule = f"It does not take {str(messages)[:80]}."
        raise CollateError(explain("chat template", got, rule, remedy)) from None
    return text
