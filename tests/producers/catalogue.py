"""The catalogue: every producer, whatever package it needs."""

from __future__ import annotations

import from_collators
import from_torch
import from_transformers
import from_transformers_old
from producing import Producer

PRODUCERS: dict[str, Producer] = {
    producer.name: producer
    for module in (from_transformers, from_transformers_old, from_collators, from_torch)
    for producer in module.PRODUCERS
}
