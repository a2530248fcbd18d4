"""The entries: the public ways in, each given one batch of a producer and judged by `verdicts`.

An entry returns in silence where what comes out is right. `make` stands for the class or function under test, so that
`test_verdicts` can put a wrong one in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verdicts import Case, check_batch, check_flat, check_segments

from collate_npu import BatchAdapter, derive_segments, wrap_collator


@dataclass(frozen=True)
class Entry:
    """One way in."""

    name: str
    run: Callable[[Case], None]
    with_2d: bool = False
    declared: bool = False

    @property
    def derives(self) -> bool:
        return self.name.startswith("derive")

    @property
    def wraps(self) -> bool:
        return self.name.startswith("wrap")

    def case(self, case: Case) -> Case:
        """What is true for someone who enters here."""
        told = self.with_2d or (self.wraps and case.told_by_samples)
        case = case if told else case.bare()
        if self.derives and case.keys_alone:
            return replace(case, ids=case.keep.astype(np.int64))
        return case

    def applies(self, case: Case) -> bool:
        if case.mask is None and not case.plain and not case.flat:
            return False  # nothing in the batch says so: the model attends as it does
        if self.derives:
            return case.mask is not None and not (case.contrary and self.name == "derive")
        if case.flat:
            return not self.with_2d
        return not self.declared or case.pattern is not None


def _shared(case: Case) -> int | None:
    """How many rows, where the mask does not say it."""
    shape = getattr(case.mask, "shape", ())
    B = len(case.ids)
    return B if len(shape) and (shape[0] != B or (len(shape) == 2 and shape[0] == shape[1])) else None


def derive(case: Case) -> None:
    check_segments(derive_segments(case.mask, batch_size=_shared(case)), case)


def derive_declared(case: Case) -> None:
    found = derive_segments(case.mask, polarity=case.polarity, pattern=case.pattern, batch_size=_shared(case))
    check_segments(found, case)


def derive_keep(case: Case) -> None:
    check_segments(derive_segments(case.mask, keep=torch.from_numpy(case.keep)), case)


def _batch(case: Case, with_2d: bool) -> dict[str, Any]:
    more = {"attention_mask_2d": torch.from_numpy(case.keep.copy())} if with_2d else {}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in case.batch.items()} | more


def _declared(case: Case) -> dict[str, Any]:
    return {"polarity": case.polarity, "pattern": case.pattern}


def megatron(case: Case, *, with_2d: bool = False, declared: bool = False, make: Any = BatchAdapter) -> None:
    needs_2d = bool(case.draw.tokens.sum() % 2)  # chance, from the seed
    settings = _declared(case) if declared else {}
    adapter = make(needs_mask_2d=needs_2d, consumer="megatron", padding_free=case.flat, **settings)
    out = adapter(_batch(case, with_2d))
    if case.flat:
        check_flat(out, case)
    else:
        check_batch(out, case, "megatron", needs_2d=needs_2d)


def transformers(case: Case, *, with_2d: bool = False, declared: bool = False, make: Any = BatchAdapter) -> None:
    implementation = ("sdpa", "eager")[int(case.draw.tokens.sum()) % 2]
    settings = _declared(case) if declared else {}
    config = dense_config()
    named = {"attn_implementation": implementation, "consumer": "transformers", "padding_free": case.flat}
    out = make(config, **named, **settings)(_batch(case, with_2d))
    if case.flat:
        check_flat(out, case)
    else:
        check_batch(out, case, "transformers", implementation)


_CONFIG: list[Any] = []


def dense_config() -> Any:
    """A model without recurrent layers."""
    if not _CONFIG:
        from transformers import LlamaConfig

        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        _CONFIG.append(LlamaConfig(vocab_size=128, **sizes))
    return _CONFIG[0]


def wrap(case: Case, *, with_2d: bool = False, declared: bool = False, make: Any = wrap_collator) -> None:
    settings = _declared(case) if declared else {}
    out = make(lambda features: _batch(case, with_2d), **settings)(case.features)
    if case.ids.shape[0] == 1 and "cu_seq_lens_q" in out:
        check_flat(out, case)
    else:
        check_batch(out, case, "neutral")


def _entry(name: str, run: Any, with_2d: bool = False, declared: bool = False) -> Entry:
    title = name + " declared" * declared + " +2D" * with_2d
    return Entry(title, lambda case: run(case, with_2d=with_2d, declared=declared), with_2d, declared)


ENTRIES = (
    Entry("derive", derive),
    Entry("derive declared", derive_declared, declared=True),
    Entry("derive +2D", derive_keep, with_2d=True),
    _entry("megatron", megatron),
    _entry("megatron", megatron, with_2d=True),
    _entry("megatron", megatron, declared=True),
    _entry("transformers", transformers),
    _entry("transformers", transformers, with_2d=True),
    _entry("transformers", transformers, with_2d=True, declared=True),
    _entry("wrap", wrap),
    _entry("wrap", wrap, with_2d=True),
    _entry("wrap", wrap, declared=True),
)
