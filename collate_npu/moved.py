"""Moved: names of earlier editions that stand elsewhere now. Their old place gives them, with a warning, until `GONE_IN`."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

GONE_IN = "0.9"
MOVED = {
    "collate_npu.AmbiguousMaskError": "collate_npu.errors.AmbiguousMaskError",
    "collate_npu.PolarityError": "collate_npu.errors.PolarityError",
    "collate_npu.UnsupportedFormError": "collate_npu.errors.UnsupportedFormError",
    "collate_npu.Verdict": "collate_npu.masks.Verdict",
    "collate_npu.block_mask": "collate_npu.masks.block_mask",
    "collate_npu.dense": "collate_npu.masks.dense",
    "collate_npu.mask_mod": "collate_npu.masks.mask_mod",
    "collate_npu.none_is_exact": "collate_npu.masks.none_is_exact",
    "collate_npu.varlen": "collate_npu.masks.varlen",
    "collate_npu.per_sequence": "collate_npu.outputs.per_sequence",
    "collate_npu.to_nested": "collate_npu.outputs.to_nested",
    "collate_npu.picture": "collate_npu.tools.show.picture",
    "collate_npu.consumers.consumer.Consumer": "collate_npu.consumers.mask_routing.Consumer",
    "collate_npu.consumers.consumer.Form": "collate_npu.consumers.mask_routing.Form",
    "collate_npu.consumers.consumer.Refusal": "collate_npu.consumers.mask_routing.Refusal",
    "collate_npu.integrations.trl.adapt_forward": "collate_npu.adapt",
    "collate_npu.integrations.delivery.Delivery": "collate_npu.proof.delivery.Delivery",
    "collate_npu.integrations.delivery.check_delivery": "collate_npu.check_delivery",
    "collate_npu.integrations.delivery.guard_first_batch": "collate_npu.guard_first_batch",
}
"""Old name -> new name."""


def moved(module: str, name: str) -> Any:
    """What a module's `__getattr__` answers for a name that it has not. Raises `AttributeError` for one it never had."""
    old = f"{module}.{name}"
    if old not in MOVED:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warnings.warn(f"{old} is {MOVED[old]} now; the old name goes in {GONE_IN}.", DeprecationWarning, stacklevel=3)
    home, _, new = MOVED[old].rpartition(".")
    return getattr(import_module(home), new)
