"""The catalogue: every producer, whatever package it needs."""

from __future__ import annotations

import from_transformers
from producing import Producer

PRODUCERS: dict[str, Producer] = {
    producer.name: producer
    for module in (from_transformers,)
    for producer in module.PRODUCERS
}
