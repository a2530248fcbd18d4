"""Flat rows: the ways several sequences in one row reach a model, by this library (`FLAT_OURS`) and as elsewhere.

Each of `FLAT_OTHERS` leaves a boundary out that some layer needs, so that one sees what it costs: a scan of a recurrent
layer reads `cu_seq_lens_q`, its convolution `seq_idx`, attention positions that restart (where no cache is made) or
offsets. Rows go in without a cache, as trainers run them.
"""

from __future__ import annotations

import inspect
import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from collate_npu.collate.wrapping import wrap_collator
from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.recurrent_kernels import PLAIN_TORCH, kernel_calls, variables_of
from collate_npu.errors import CollateError, explain
from collate_npu.segments import Segments
from collate_npu.testing import reference_kernels
from collate_npu.testing.measure import Batch
from collate_npu.tools.audit.handover import Handover, Subject

Kernels = Literal["installed", "reference"]

_NO_KERNEL = "can't keep packed sequences apart"
"""transformers 5.20 and later (integrations/hub_kernels.py:1037): an offset arrives, and there is torch code alone."""


def flat_truth(features: list[Batch]) -> Segments:
    """One row that holds every sample, one after another."""
    return Segments.from_lengths([[len(feature["input_ids"]) for feature in features]])


def check_packed(batches: list[list[Batch]]) -> None:
    """Refuse rows of one sequence: nothing can run into it, and any result would look exact."""
    if any(len(batch) < 2 for batch in batches):
        rule = "A row of one sequence has no boundary to keep, and a comparison with itself alone proves nothing."
        raise CollateError(explain("--packed", "a row of one sequence", rule, "Give a --batch-size of 2 or more."))


def no_kernel(error: Exception, device: str) -> str:
    """Why a flat row could not run for want of a kernel, by our refusal or transformers'; nothing where it says else."""
    said = "; ".join(re.findall(rf"\w+ {PLAIN_TORCH} \w+", str(error)))
    if _NO_KERNEL in str(error):
        said = str(error).partition(" Install ")[0]
    if not said:
        return ""
    remedy = (
        "none exists for transformers on an NPU: give each sequence its own row, or pack on a Megatron-style stack"
        if device == "npu"
        else "run on a card with flash-linear-attention and causal-conv1d, or try --kernels reference"
    )
    return f"no kernel here that keeps packed sequences apart: {said} ({remedy})"


def kernels_for(model: Any, kernels: Kernels) -> AbstractContextManager[None]:
    """What recurrent layers run on while a model is audited: what is installed, or this library's reference kernels."""
    return reference_kernels(model) if kernels == "reference" and kernel_calls(model) else nullcontext()


def _by_collator(subject: Subject, features: list[Batch]) -> Batch:
    return _uncached(subject, subject.collator(consumer="transformers", model=subject.model, padding_free=True)(features))


def _by_adapter(subject: Subject, features: list[Batch]) -> Batch:
    """The neutral wire form (offsets), then the adapter at the model."""
    adapter = BatchAdapter(subject.model, consumer="transformers", pattern=subject.pattern, padding_free=True)
    return _uncached(subject, adapter(subject.collator(padding_free=True)(features)))


def _by_wrapping(subject: Subject, features: list[Batch]) -> Batch:
    """transformers' own collator, which by default tells positions alone."""
    theirs = wrap_collator(_flattening(), consumer="transformers", model=subject.model, pattern=subject.pattern)
    return _uncached(subject, theirs(features))


def _told(**told: bool) -> Handover:
    return lambda subject, features: _uncached(subject, _flattening(**told)(features))


def _untold(subject: Subject, features: list[Batch]) -> Batch:
    return _told(return_position_ids=False)(subject, features)


def _flattening(**told: bool) -> Any:
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening(**told)


def _uncached(subject: Subject, batch: Any) -> Batch:
    taken = "use_cache" in inspect.signature(subject.model.forward).parameters
    return {**batch, "use_cache": False} if taken else dict(batch)


FLAT_OURS: dict[str, Handover] = {
    "collator": _by_collator,
    "adapter": _by_adapter,
    "wrapped": _by_wrapping,
}
FLAT_OTHERS: dict[str, Handover] = {
    "positions": _told(),
    "cu_seq_lens_q": _told(return_flash_attn_kwargs=True),
    "seq_idx": _told(return_seq_idx=True),
    "nothing": _untold,
}


def resolved_kernels(model: Any) -> dict[str, str]:
    """Each function of a recurrent layer that gives way to a kernel, and the package it was found in ("torch": none)."""
    chosen = {call.kernel: variables_of(call.function)["implementation"] for call in kernel_calls(model)}
    packages = {name: getattr(function, "__module__", "").partition(".")[0] for name, function in chosen.items()}
    return {name: "torch" if package == "transformers" else package for name, package in packages.items()}
