"""Dumped: a batch that somebody's trainer made, read from a file; its samples are what the one door reads in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from collate_npu.consumers.models import pattern_of
from collate_npu.errors import CollateError, explain
from collate_npu.masks.find import segments_from_batch
from collate_npu.masks.patterns import Pattern
from collate_npu.outputs import per_sequence
from collate_npu.testing.invariance import Collator, Given
from collate_npu.testing.located import Located
from collate_npu.testing.measure import Batch
from collate_npu.tools.audit.case import Audit, Layout
from collate_npu.tools.saved import RECIPE, batch_of_file


def read_batch(path: Path) -> Batch:
    """The saved batch of a file. Raises `CollateError` where it has no `input_ids` `[B, S]`."""
    batch = batch_of_file(path)
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        rule = "A batch of samples has input_ids [B, S], whole numbers."
        raise CollateError(explain("--batch", f"{path}: keys {', '.join(batch)}", rule, RECIPE))
    return batch


def samples_of(batch: Mapping[str, Any], pattern: str | Pattern | None = None) -> tuple[list[Batch], Located]:
    """The samples of a batch, with the labels it gives them, and where they stand. Raises what the door raises."""
    segments = segments_from_batch(batch, pattern=pattern)
    ids = [row.tolist() for row in per_sequence(batch["input_ids"], segments)]
    labels = batch.get("labels")
    given = ids if labels is None else [row.tolist() for row in per_sequence(labels, segments)]
    features = [{"input_ids": x, "labels": y} for x, y in zip(ids, given)]
    return features, Located(segments, tuple(range(len(features))))


def of_batch(
    model: Any, batch: Mapping[str, Any], *, sides: Sequence[Layout], handovers: Sequence[tuple[str, Collator]], **about: Any
) -> Audit:
    """The audit of a dumped batch: its samples in every way of handing over, and the batch as it is.

    Rows of several samples are compared as flat rows, others as padded on `sides`. Raises what the door raises.
    """
    features, located = samples_of(batch, pattern_of(model))
    laid_out: list[Layout] = ["packed"] if located.segments.packed else [side for side in sides if side != "packed"]
    about |= {"batch_size": len(features), "sides": laid_out, "handovers": handovers}
    return Audit(model, features, **about, dumped=Given(dict(batch), located, features))
