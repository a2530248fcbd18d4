"""Packed hybrids: each family's packed rows under `adapt`, against each sequence alone, and untouched beside it.

`python -m benchmarks.packed_hybrids [--each] [--device cuda] [FAMILY ...]` prints a line each, and with `--each` one a case:
the largest difference of a logit and, as a part of its size, of the gradient, over attention (sdpa, eager), form (one flat
row, rows padded right, rows padded left) and mode (evaluated, trained, checkpointed). "Untouched" is the smallest
difference that the same rows have without us, given the mask and positions that attention needs; what the probe costs
stands last.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from collate_npu import BatchAdapter, CollateError, Segments, adapt
from collate_npu.consumers.probe import sequences_mix_reason
from collate_npu.segments import of_lengths
from collate_npu.testing import hybrid_model_types, tiny_model

VOCABULARY = 257
LENGTHS = (5, 13, 40, 1, 7, 70)
FORMS = {
    "flat": of_lengths([LENGTHS], sum(LENGTHS)),
    "right": of_lengths([LENGTHS[:3], LENGTHS[3:]], 81),
    "left": of_lengths([LENGTHS[:3], LENGTHS[3:]], 81, "left"),
}
MODES = ("evaluated", "trained", "checkpointed")
RIGHT = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser("packed_hybrids", description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wrong = 0
    print(f"{'family':18}{'cases':>6}{'logits':>10}{'gradient':>10}{'untouched':>11}{'probe':>8}  the way")
    families = given.families or hybrid_model_types()
    for family in families:
        cells = {
            (attention, *at): each
            for attention in ("sdpa", "eager")
            for at, each in _measured(family, attention, given.device)
        }
        found = list(cells.values())
        errors = [each for each in found if not isinstance(each, str)]
        if errors:
            worst = [max(column) for column in zip(*(each[:2] for each in errors))]
            wrong += not max(worst) < RIGHT
            control, (cost, way) = min(each[2] for each in errors), _asked(family, given.device)
            line = f"{len(errors):6}{worst[0]:10.1e}{worst[1]:10.1e}{control:11.2g}{cost * 1e3:5.0f} ms  {way}"
        else:
            line = f"     -         -         -          -       -  {found[0] if found else 'is not built'}"
        for at, each in cells.items() if given.each else ():
            told = each if isinstance(each, str) else "{:10.1e}{:10.1e}{:11.2g}".format(*each)
            print(f"  {', '.join(at):22}{told}")
        print(f"{family:18}{line}{'' if not errors or max(worst) < RIGHT else '  WRONG'}", flush=True)
    sys.exit(bool(wrong))


def _measured(
    family: str, attention: str, device: str
) -> Iterator[tuple[tuple[str, ...], tuple[float, float, float] | str]]:
    """Of each form and mode: errors of logits and gradient, and of the logits untouched; or why it is refused."""
    try:
        model: Any = tiny_model(family, vocab_size=VOCABULARY, attn_implementation=attention).to(device)
        draw = torch.Generator().manual_seed(0)
        tokens = [torch.randint(0, VOCABULARY - 1, (length,), generator=draw).to(device) for length in LENGTHS]
        truth = _run(
            model,
            [{"input_ids": each[None]} for each in tokens],
            [torch.arange(len(each), device=device) for each in tokens],
        )
    except Exception as error:
        yield (), f"does not run alone: {str(error)[:60]}"
        return
    for mode, (form, segments) in product(MODES, FORMS.items()):
        model.train(mode != "evaluated")
        model.gradient_checkpointing_enable() if mode == "checkpointed" else model.gradient_checkpointing_disable()
        ids = torch.full(segments.shape, VOCABULARY - 1, device=device)
        ids[segments.keep.to(device)] = torch.cat(tokens)
        batch = {"input_ids": ids, "segment_ids": segments.ids.to(device)}
        places = list(torch.split(segments.indices.to(device), list(LENGTHS)))
        try:
            with adapt(model):
                logits, gradient = _run(model, [batch], [torch.cat(places)], LENGTHS)
        except CollateError as error:
            yield (), f"refused: {str(error).partition(': ')[2].partition('. ')[2].partition('. ')[0]}"
            return
        norm = float((gradient - truth[1]).norm() / truth[1].norm())
        yield (form, mode), (float((logits - truth[0]).abs().max()), norm, _untouched(model, batch, segments, truth[0]))


def _run(
    model: Any, batches: list[dict[str, Tensor]], places: list[Tensor], lengths: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Logits of the real tokens, and the gradient of the loss of every next one."""
    model.zero_grad(set_to_none=True)
    found = []
    for batch, at in zip(batches, places):
        logits = model(**batch, use_cache=False).logits.flatten(0, 1)[at]
        targets = batch["input_ids"].flatten()[at]
        for mine, each in zip(logits.split(lengths or len(at)), targets.split(lengths or len(at))):
            cross_entropy(mine[:-1], each[1:], reduction="sum").backward(retain_graph=True)
        found.append(logits.detach())
    grown = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat(found), torch.cat(grown)


def _untouched(model: Any, batch: dict[str, Tensor], segments: Segments, truth: Tensor) -> float:
    """Off by so much where recurrent layers are told nothing, and all else is right."""
    known = BatchAdapter(model.config, consumer="transformers").model
    adapter = BatchAdapter(_as_kept_apart(known), consumer="transformers")
    told = adapter.write({"input_ids": batch["input_ids"]}, segments, padding_free=segments.shape[0] == 1)
    bare = {key: value for key, value in told.items() if key not in ("seq_idx", "cu_seq_lens_q", "cu_seqlens")}
    with torch.no_grad():
        return float((model(**bare).logits.flatten(0, 1)[segments.indices.to(truth.device)] - truth).abs().max())


def _as_kept_apart(known: Any) -> Any:
    from dataclasses import replace

    return replace(known, keeps_apart=True, boundaries_unread="")


def _asked(family: str, device: str) -> tuple[float, str]:
    """What asking costs, anew, and which way each function is told."""
    model: Any = tiny_model(family, vocab_size=VOCABULARY + 1).to(device)
    began = time.perf_counter()
    sequences_mix_reason(model, BatchAdapter, mended=True)
    cost = time.perf_counter() - began
    with adapt(model) as adapted:
        return cost, adapted.packed


if __name__ == "__main__":
    main()
