"""The catalogue: every producer, whatever package it needs."""

from __future__ import annotations

import from_collators
import from_megatron
import from_misc
import from_packers
import from_torch
import from_transformers
import from_transformers_old
from producing import Producer

MODULES = (
    from_transformers,
    from_transformers_old,
    from_collators,
    from_torch,
    from_packers,
    from_megatron,
    from_misc,
)
PRODUCERS: dict[str, Producer] = {producer.name: producer for module in MODULES for producer in module.PRODUCERS}
