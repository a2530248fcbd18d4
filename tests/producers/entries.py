"""The entries: the public ways in, each given one batch of a producer and judged by `verdicts`.

An entry returns in silence where what comes out is right. `make` stands for the class or function under test, so that
`test_verdicts` can put a wrong one in its place.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from drawing import PAD
from torch import Tensor
from verdicts import Case, check_batch, check_flat, check_segments, same

from collate_npu import BatchAdapter, PaddingCollator, derive_segments, wrap_collator

DENSE = SimpleNamespace(layer_types=["full_attention"], model_type="llama")


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
        return replace(case, ids=case.keep.astype(np.int64)) if self.derives and case.keys_alone else case

    def applies(self, case: Case) -> bool:
        if self.name == "collate" or case.unpadded:
            return case.unpadded and not (self.derives or self.with_2d or self.declared)
        if case.mask is None and not case.plain and not case.flat:
            return False  # nothing in the batch says so: the model attends as it does
        if self.derives:
            return case.mask is not None and not case.flat and not (case.contrary and self.name == "derive")
        return not self.with_2d if case.flat else not self.declared or case.pattern is not None


def derive(case: Case, *, with_2d: bool, declared: bool) -> None:
    shape, B = getattr(case.mask, "shape", ()), len(case.ids)
    shared = len(shape) and (shape[0] != B or (len(shape) == 2 and shape[0] == shape[1]))  # the mask does not say the rows
    told: dict[str, Any] = {"keep": torch.from_numpy(case.keep)} if with_2d else {"batch_size": B if shared else None}
    check_segments(derive_segments(case.mask, **told, **_declared(case, declared)), case)


def _batch(case: Case, with_2d: bool) -> Any:
    more = {"attention_mask_2d": torch.from_numpy(case.keep.copy())} if with_2d else {}
    return case.form({key: x.clone() if isinstance(x, Tensor) else x for key, x in case.batch.items()} | more)


def collate(case: Case, *, with_2d: bool = False, declared: bool = False, make: Any = PaddingCollator) -> None:
    """Rows that are not padded yet."""
    out = make(pad_token_id=PAD)(_batch(case, with_2d))
    same("input_ids", out["input_ids"][torch.from_numpy(case.keep)], np.concatenate(case.draw.rows()))
    check_batch(out, case, "neutral")


def _declared(case: Case, declared: bool) -> dict[str, Any]:
    return {"polarity": case.polarity, "pattern": case.pattern} if declared else {}


def adapt(
    case: Case, consumer: str = "megatron", *, with_2d: bool = False, declared: bool = False, make: Any = BatchAdapter
) -> None:
    """By chance, from the seed: recurrent layers on Megatron, where they can take it, and eager attention else."""
    odd = bool(case.draw.tokens.sum() % 2)
    needs_2d = odd and consumer == "megatron" and (case.flat or not (case.packed or case.gapped))
    implementation = "eager" if odd and consumer == "transformers" else "sdpa"
    named = {"needs_mask_2d": needs_2d, "attn_implementation": implementation, "padding_free": case.flat}
    model = DENSE if consumer == "transformers" else None
    out = make(model, consumer=consumer, **named, **_declared(case, declared))(_batch(case, with_2d))
    if case.flat:
        check_flat(out, case)
    else:
        check_batch(out, case, consumer, implementation, needs_2d=needs_2d)


def wrap(case: Case, *, with_2d: bool = False, declared: bool = False, make: Any = wrap_collator) -> None:
    out = make(lambda features: _batch(case, with_2d), **_declared(case, declared))(case.features)
    if case.ids.shape[0] == 1 and "cu_seq_lens_q" in out and out.get("attention_mask") is None:
        check_flat(out, case)
    else:
        check_batch(out, case, "neutral")


WAYS = {
    "derive": derive,
    "megatron": adapt,
    "transformers": partial(adapt, consumer="transformers"),
    "wrap": wrap,
    "collate": collate,
}


def _entry(name: str, with_2d: bool = False, declared: bool = False) -> Entry:
    title = name + " declared" * declared + " +2D" * with_2d
    return Entry(title, partial(WAYS[name], with_2d=with_2d, declared=declared), with_2d, declared)


ENTRIES = (
    *(_entry(name, *told) for name in WAYS for told in ((), (True,)) if name != "collate" or not told),
    *(_entry(name, declared=True) for name in ("derive", "megatron", "wrap")),
    _entry("transformers", with_2d=True, declared=True),
)
