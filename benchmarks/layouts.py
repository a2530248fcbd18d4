"""Any layout under `adapt`, against each sequence alone: every causal family, hybrids first.

`python -m benchmarks.layouts [--each] [--device cuda] [FAMILY ...]` prints a line a family, and with `--each` one a case:
the largest difference of a logit, as a part of the largest, and of the gradient, as a part of its size. Layouts: padded
right, padded left, with holes, packed rows, one flat row; modes: evaluated, trained, checkpointed, reentrant.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from collate_npu import Segments, adapt
from collate_npu.consumers import by_sequence
from collate_npu.consumers.tiny_models import quiet
from collate_npu.segments import of_lengths
from collate_npu.testing import hybrid_model_types, tiny_model

VOCABULARY = 257
LENGTHS = (5, 40, 13, 1, 64, 70)
EACH = [[n] for n in LENGTHS]
LAYOUTS = {
    "right": of_lengths(EACH, 75),
    "left": of_lengths(EACH, 75, "left"),
    "holes": Segments(torch.stack([(torch.arange(75) < n + 2) & ~torch.isin(torch.arange(75), torch.tensor([1, 2])) | (
        torch.arange(75) == 0) for n in LENGTHS]).int()),
    "packed": of_lengths([LENGTHS[:3], LENGTHS[3:]], 140, "left"),
    "flat": of_lengths([LENGTHS], sum(LENGTHS)),
}  # fmt: skip
MODES = ("evaluated", "trained", "checkpointed", "reentrant")
RIGHT = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser("layouts", description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    by_sequence.CALL_COST = 4  # else short rows share one bucket
    wrong = 0
    for family in given.families or [*hybrid_model_types(), *_others()]:
        with quiet():
            cells = dict(_measured(family, given.device))
        numbers = [each for each in cells.values() if not isinstance(each, str)]
        said = [each for each in cells.values() if isinstance(each, str)]
        worst = [max(column) for column in zip(*numbers)] or [0.0, 0.0]
        bad = not max(worst) < RIGHT
        wrong += bad
        for at, each in cells.items() if given.each else ():
            print(f"  {', '.join(at):22}{each if isinstance(each, str) else '{:10.1e}{:10.1e}'.format(*each)}")
        told = "; ".join(dict.fromkeys(said))
        print(f"{family:22}{len(numbers):4} right to {worst[0]:.1e}, {worst[1]:.1e}  {told}{'  WRONG' * bad}", flush=True)
    sys.exit(bool(wrong))


def _others() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*hybrid_model_types()})


def _measured(family: str, device: str) -> Iterator[tuple[tuple[str, ...], tuple[float, float] | str]]:
    """Yield, for each layout and mode, the errors of logits and gradient; or why there are none."""
    try:
        model = _built(family, device)
        draw = torch.Generator().manual_seed(0)
        tokens = [torch.randint(0, VOCABULARY - 1, (n,), generator=draw).to(device) for n in LENGTHS]
        truth = _run(model, [{"input_ids": each[None], "labels": each[None]} for each in tokens], None)
        handle = adapt(model)
    except Exception as error:
        yield (), f"does not run alone: {str(error).strip().partition(chr(10))[0][:60]}"
        return
    if handle.way != "by sequence":
        yield (), handle.way[:100] or "left as it came"
        return
    own = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    for mode in MODES:
        model.train(mode != "evaluated")
        if mode in MODES[2:] and model.supports_gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": mode == "reentrant"})
            model.enable_input_require_grads()
        for layout, segments in LAYOUTS.items():
            if layout == "holes" and not own:  # its head sees rows, and ignores the label behind a hole
                continue
            ids = torch.full(segments.shape, VOCABULARY - 1, device=device)
            ids[segments.keep.to(device)] = torch.cat(tokens)
            labels = ids.masked_fill(~segments.keep.to(device), -100)
            batch = {"input_ids": ids, "segment_ids": segments.ids.to(device), "labels": labels}
            logits, gradient = _run(model, [batch], segments.indices.to(device))
            far = float((logits - truth[0]).abs().max() / truth[0].abs().max())
            yield (layout, mode), (far, float((gradient - truth[1]).norm() / truth[1].norm()))


def _built(family: str, device: str) -> Any:
    try:
        model: Any = tiny_model(family, vocab_size=VOCABULARY)
    except ValueError:  # no sdpa
        model = tiny_model(family, vocab_size=VOCABULARY, attn_implementation="eager")
    for module in (*model.modules(), model.config):
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or isinstance(module, nn.Dropout)):
                setattr(module, name, 0.0)
    model.config.output_router_logits = False
    return model.to(device)


def _run(model: Any, batches: list[dict[str, Tensor]], at: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the logits of the real tokens, and the gradient of the loss of every next one, by the model's own loss."""
    model.zero_grad(set_to_none=True)
    found, total = [], sum(LENGTHS) - len(LENGTHS)
    for batch in batches:
        out = model(**batch, use_cache=False)
        rows = batch["labels"]
        if at is None and rows.shape[1] > 1:  # one sample: its part of the mean over all
            (cross_entropy(out.logits[0, :-1].float(), rows[0, 1:], reduction="sum") / total).backward()
        elif at is not None:
            out.loss.backward()
        logits = out.logits.detach().flatten(0, 1)
        found.append(logits if at is None else logits[at])
    return torch.cat(found), torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


if __name__ == "__main__":
    main()
