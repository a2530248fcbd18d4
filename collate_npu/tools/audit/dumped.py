"""Dumped: a batch that somebody's trainer made, read from a file; its samples are what the one door reads in it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collate_npu.consumers.models import pattern_of
from collate_npu.errors import CollateError, explain
from collate_npu.masks.find import segments_from_batch
from collate_npu.masks.patterns import Pattern
from collate_npu.outputs import per_sequence
from collate_npu.testing.invariance import Collator, Given
from collate_npu.testing.located import Located
from collate_npu.testing.measure import Batch
from collate_npu.tools.audit.attentions import first_line
from collate_npu.tools.audit.case import Audit, Layout

RECIPE = (
    "Dump it in your training loop: torch.save({k: v.cpu() for k, v in batch.items() if torch.is_tensor(v)}, 'dump.pt')."
)


def read_batch(path: Path) -> Batch:
    """The batch of a `.pt` file (a dict of tensors, no code is run) or of a `.safetensors` file."""
    rule = "A dumped batch is a dict of tensors, with input_ids [B, S]."
    try:
        batch = _loaded(path)
    except OSError as error:
        raise CollateError(explain("--batch", f"{path}: {error.strerror or error}", rule, RECIPE)) from None
    except Exception as error:  # pickle, torch, zipfile and safetensors have classes of their own
        code = "Other classes are not loaded, since they can run code. " if isinstance(error, pickle.UnpicklingError) else ""
        got = f"{path} ({type(error).__name__}: {first_line(error).partition('. ')[0]})"
        raise CollateError(explain("--batch", got, f"{rule} {code}".strip(), RECIPE)) from None
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        got = f"keys {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise CollateError(explain("--batch", f"{path}: {got}", rule, RECIPE))
    return {str(key): value for key, value in batch.items()}


def _loaded(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return import_module("safetensors.torch").load(path.read_bytes())
    return torch.load(path, map_location="cpu", weights_only=True)


def samples_of(batch: Mapping[str, Any], pattern: str | Pattern | None = None) -> tuple[list[Batch], Located]:
    """The samples of a batch, with the labels it gives them, and where they stand. Raises what the door raises."""
    segments = segments_from_batch(batch, pattern=pattern)
    ids = [row.tolist() for row in per_sequence(batch["input_ids"], segments)]
    labels = batch.get("labels")
    given = ids if labels is None else [row.tolist() for row in per_sequence(labels, segments)]
    features = [{"input_ids": x, "labels": y} for x, y in zip(ids, given)]
    return features, Located(segments, tuple(range(len(features))))


def of_batch(
    model: Any, batch: Mapping[str, Any], *, sides: Sequence[Layout], handovers: Mapping[str, Collator], **about: Any
) -> Audit:
    """The audit of a dumped batch: its samples in every way of handing over, and the batch as it is.

    Rows of several samples are compared as flat rows, others as padded on `sides`. Raises what the door raises.
    """
    features, located = samples_of(batch, pattern_of(model))
    laid_out: list[Layout] = ["packed"] if located.segments.packed else [side for side in sides if side != "packed"]
    about |= {"batch_size": len(features), "sides": laid_out, "handovers": handovers}
    return Audit(model, features, **about, dumped=Given(dict(batch), located, features))
