"""What the probe says of padded and packed rows, beside what the model does with them: every causal family that builds.

`python -m benchmarks.probe_agreement [FAMILY ...]`. The probe asks a tiny copy of a config; the truth is a model of other
sizes, weights, tokens and lengths, which gets the same forms as an adapter hands them over that believes it. Each cell:
`right` both say that no token moves, `leaks` both say that one does, else who says what. A tiny copy has no sizes, and what
is refused for these is not asked. The first number is what asking costs.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from collate_npu import BatchAdapter, CollateError
from collate_npu.consumers.model_traits import needs_mask_2d
from collate_npu.consumers.probe import leak_reasons
from collate_npu.consumers.tiny_models import quiet
from collate_npu.segments import of_keep, of_lengths
from collate_npu.testing import tiny_config, tiny_model

VOCABULARY = 129
LENGTHS = (33, 12, 6, 55)
KEEP = ~torch.isin(torch.arange(60), torch.tensor([3, 4]))
ROWS = {
    "right": of_lengths([[n] for n in LENGTHS], 60),
    "left": of_lengths([[n] for n in LENGTHS], 60, "left"),
    "holes": of_keep((KEEP & (KEEP.cumsum(0) <= torch.tensor(LENGTHS)[:, None])).numpy()),
    "packed": of_lengths([LENGTHS[:2], LENGTHS[2:]], 64, "left"),
}
LIMIT = 1e-3
"""Of the largest logit; what leaks moves it by 0.02 and more."""


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for family in sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            with quiet():
                found, cost = cells(family)
        except Exception as error:
            counts["does not build tiny"] += 1
            print(f"{family:24} does not build tiny: {(str(error) or type(error).__name__).splitlines()[0][:80]}")
            continue
        counts += Counter(found.values())
        said = "  ".join(f"{form} {what}" for form, what in found.items())
        print(f"{family:24} {cost * 1e3:5.0f} ms  {said}", flush=True)
    print("; ".join(f"{n} {what}" for what, n in counts.most_common()))


def cells(family: str) -> tuple[Mapping[str, str], float]:
    """Of each form, what both say."""
    leak_reasons(tiny_config(family, vocab_size=VOCABULARY), BatchAdapter, "right")  # raises where a tiny one is not tiny
    try:
        model: Any = tiny_model(family, vocab_size=VOCABULARY, seed=5)
    except ValueError:  # no sdpa
        model = tiny_model(family, vocab_size=VOCABULARY, seed=5, attn_implementation="eager")
    hybrid = needs_mask_2d(model)
    forms = [form for form in ROWS if not (hybrid and form == "holes")]  # refused there without asking
    began = time.perf_counter()
    said = leak_reasons(model, BatchAdapter, *(forms[:2] if hybrid else forms))
    cost = time.perf_counter() - began
    return {form: _said_and_seen(said[form], _moved(model, form)) for form in forms if form in said}, cost


def _said_and_seen(why: str, moved: float | str) -> str:
    if moved == "refused":
        return "refused by sizes and settings"
    leaks = isinstance(moved, str) or not moved < LIMIT
    if bool(why) == leaks:
        return "leaks" if leaks else "right"
    return f"PROBE SAYS {why or 'right'}, MODEL {moved}"


def _moved(model: Any, form: str) -> float | str:
    """By how much other tokens of its batch move a sequence's logits, of the largest; or what stops it."""
    segments, known = ROWS[form], BatchAdapter(model).model
    known = replace(known, leaks=dict.fromkeys(ROWS, ""))
    adapter = BatchAdapter(known, consumer="transformers")
    draw = torch.Generator().manual_seed(9)
    tokens = [torch.randint(3, VOCABULARY - 1, (n,), generator=draw) for n in LENGTHS]
    ids = torch.full(segments.shape, VOCABULARY - 1)
    ids[segments.keep] = torch.cat(tokens)
    with torch.no_grad():
        alone = torch.cat([model(input_ids=each[None]).logits[0] for each in tokens])
        try:
            batch = adapter.write({"input_ids": ids}, segments, padding_free=False)
            found = model(**batch).logits.flatten(0, 1)[segments.keep.flatten()]
        except CollateError:
            return "refused"
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:60]}"
    return float((found - alone).abs().max() / alone.abs().max())


if __name__ == "__main__":
    main()
