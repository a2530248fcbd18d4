"""Stacks: which kernels each installed stack would run on this machine, and what is refused here, asked of the real things.

transformers is asked for a tiny Qwen3-Next and the functions that its layers resolved; what is refused is what the
consumers refuse. Needs torch; costs what building that model costs.
"""

from __future__ import annotations

from contextlib import suppress

from collate_npu.consumers.consumer import Case, Consumer, Model, consumers
from collate_npu.errors import CollateError
from collate_npu.releases import KERNELS_TOLD, installed
from collate_npu.segments import Segments
from collate_npu.testing import tiny_model
from collate_npu.tools.refusals import said

_FLAT = "flat rows (padding_free=True)"
_BATCHES = {
    "padded right": Segments.from_lengths([3, 5]),
    "padded left": Segments.from_lengths([3, 5], side="left"),
    "several sequences in a row": Segments.from_lengths([[3, 2], [5]]),
    _FLAT: Segments.from_lengths([[3, 5]]),
}


def runs() -> dict[str, str]:
    """Stack -> what it computes attention and Gated DeltaNet with here."""
    found, asked = {}, {"transformers, attention": _attentions, "transformers, Gated DeltaNet": _gated_delta_net}
    for stack, question in asked.items() if installed("transformers") else ():
        try:
            found[stack] = question()
        except Exception as error:  # a package that is half there
            found[stack] = f"not known: {said(error)}"
    return found


def _attentions() -> str:
    """By the names of `attn_implementation`."""
    from transformers import utils

    def has(name: str) -> bool:
        return bool(getattr(utils, name, bool)())

    here = ["sdpa", "eager", *(f"flash_attention_{n}" for n in (2, 3, 4) if has(f"is_flash_attn_{n}_available"))]
    if has("is_torch_npu_available"):
        here.append("flash_attention_2 (npu_fusion_attention)")
    return ", ".join([*here, *["owner/kernel of the hub"] * bool(installed("kernels"))])


def _gated_delta_net() -> str:
    """What each function of its layers gave way to, in the model itself."""
    if not KERNELS_TOLD.holds():
        return f"transformers before {KERNELS_TOLD} does not say which functions it resolved"
    from collate_npu.tools.audit.candidates import resolved_kernels

    chosen = resolved_kernels(tiny_model("qwen3_next", vocab_size=8))
    return ", ".join(f"{name}: {'plain torch' if package == 'torch' else package}" for name, package in chosen.items())


def refused() -> dict[str, dict[str, str]]:
    """Stack -> kind of batch -> "" where it is computed right, else why it is refused; for a Qwen3-Next on each stack."""
    found = {}
    for name, consumer in consumers().items():
        with suppress(Exception):  # a package that is half there: `runs` names it
            if consumer.here():
                hybrid = Model(model_type="qwen3_next", needs_mask_2d=True)
                model = Model.of(tiny_model("qwen3_next", vocab_size=8)) if name == "transformers" else hybrid
                found[name] = {kind: _refusal(consumer, model, kind) for kind in _BATCHES}
    return found


def _refusal(consumer: Consumer, model: Model, kind: str) -> str:
    try:
        consumer.route(Case(segments=_BATCHES[kind], model=model, padding_free=kind == _FLAT))
    except CollateError as error:  # the batch here is made up: what it was says nothing
        return str(error).partition("\n")[0].partition(". ")[2]
    return ""
