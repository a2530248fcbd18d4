"""Stacks: which kernels each installed stack would run on this machine, and what is refused here, asked of the real things.

transformers is asked for a tiny Qwen3-Next and the functions that its layers resolved; what is refused is what the
consumers refuse. Needs torch; costs what building that model costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from collate_npu.consumers.consumer import Case, Model, consumers
from collate_npu.consumers.mindspeed import installed as mindspeed_installed
from collate_npu.consumers.mindspeed import transformer_engine
from collate_npu.consumers.models import transformers_version
from collate_npu.errors import CollateError
from collate_npu.segments import Segments
from collate_npu.tools.env.installed import installed
from collate_npu.tools.env.reasons import reason

_FLASH = {
    "flash_attention_2": "is_flash_attn_2_available", "flash_attention_3": "is_flash_attn_3_available",
    "flash_attention_4": "is_flash_attn_4_available",
}  # fmt: skip
BATCHES = {
    "padded right": Segments.from_lengths([3, 5]),
    "padded left": Segments.from_lengths([3, 5], side="left"),
    "several sequences in a row": Segments.from_lengths([[3, 2], [5]]),
}
FLAT = {"flat rows (padding_free=True)": Segments.from_lengths([[3, 5]])}


def runs() -> dict[str, Any]:
    """Stack -> what it computes attention and Gated DeltaNet with here."""
    return {stack: _told(question) for stack, question in _questions(installed())}


def _told(question: Callable[[], str]) -> str:
    try:
        return question()
    except Exception as error:  # a package that is half there
        return f"not known: {reason(error)}"


def _questions(packages: Mapping[str, str]) -> Iterator[tuple[str, Callable[[], str]]]:
    if "transformers" in packages:
        yield "transformers, attention", partial(_attentions, packages)
        yield "transformers, Gated DeltaNet", _gated_delta_net
    if "megatron-core" in packages:
        te = "transformer-engine" in packages
        yield "Megatron-core, attention", lambda: "TransformerEngine, or local kernels" if te else "local kernels"
        fla = "fla-core" in packages or "flash-linear-attention" in packages
        yield "Megatron-core, Gated DeltaNet", lambda: "flash-linear-attention" if fla else _NO_FLA
    if mindspeed_installed():
        yield "MindSpeed, attention", lambda: _MINDSPEED[transformer_engine()]
    if names := [name for name in packages if name.startswith("flash-linear-attention-npu")]:
        yield "fla_npu, Gated DeltaNet", lambda: f"Ascend's operators, by {names[0]} {packages[names[0]]}"


_NO_FLA = "none: its layer refuses to be built without flash-linear-attention (core/ssm/gated_delta_net.py)"
_MINDSPEED = {
    "own": "its own npu_fusion_attention",
    "local": "Megatron's local attention, patched",
    "separate": "TransformerEngineNPU",
}


def _attentions(packages: Mapping[str, str]) -> str:
    """By the names of `attn_implementation`."""
    from transformers import utils

    def has(name: str) -> bool:
        return bool(getattr(utils, name, bool)())

    here = ["sdpa", "eager", *(name for name, question in _FLASH.items() if has(question))]
    if has("is_torch_npu_available"):
        here.append("flash_attention_2 (npu_fusion_attention)")
    missing = [name for name in _FLASH if name not in " ".join(here)]
    hub = f"kernels of the hub: {'can be fetched' if 'kernels' in packages else 'no, the package kernels is not installed'}"
    return f"{', '.join(here)}; not here: {', '.join(missing) or 'none'}; {hub}"


def _gated_delta_net() -> str:
    """What each function of its layers gave way to, in the model itself."""
    if transformers_version() < (5, 19):
        return "transformers before 5.19 does not say which functions it resolved"
    from collate_npu.tools.audit.flat import resolved_kernels

    chosen = resolved_kernels(_qwen3_next())
    return ", ".join(f"{name}: {'plain torch' if package == 'torch' else package}" for name, package in chosen.items())


def _qwen3_next() -> Any:
    from collate_npu.testing import tiny_model

    return tiny_model("qwen3_next", vocab_size=8)


def routes() -> dict[str, Any]:
    """Stack -> kind of batch -> "" where it is computed right, else why it is refused; for a Qwen3-Next on each stack."""
    return {name: _refusals(name, model) for name, model in _models(installed()).items()}


def _models(packages: Mapping[str, str]) -> dict[str, Model]:
    """The consumers that are installed, and what is known of a Qwen3-Next there."""
    found = {}
    if "transformers" in packages:
        found["transformers"] = Model.of(_qwen3_next())
    hybrid = Model(model_type="qwen3_next", needs_mask_2d=True)
    if "megatron-core" in packages:
        te = "transformer-engine" in packages
        found |= dict.fromkeys(["megatron", *(["transformer_engine"] if te else [])], hybrid)
    if mindspeed_installed():
        found |= dict.fromkeys(("mindspeed", "mindspeed_dense"), hybrid)
    if "verl" in packages:
        found["verl_npu" if "torch_npu" in packages else "verl"] = hybrid
    return found | ({"torchtitan": hybrid} if "torchtitan" in packages else {})


def _refusals(name: str, model: Model) -> dict[str, str]:
    cases = {said: Case(segments=segments, model=model) for said, segments in BATCHES.items()}
    cases |= {said: Case(segments=segments, model=model, padding_free=True) for said, segments in FLAT.items()}
    return {said: _refusal(name, case) for said, case in cases.items()}


def _refusal(name: str, case: Case) -> str:
    try:
        consumers()[name].route(case)
    except CollateError as error:  # the batch here is made up: what it was says nothing
        return str(error).partition(". ")[2]
    return ""
