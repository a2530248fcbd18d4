"""MindSpeed: Ascend's attention under Megatron. What it makes of a mask depends on its release and on its settings.

With one rank a row, read and run in core_r0.12.1 (2.3.0, 26.0.0, 26.1.0), 0.14.0, 0.15.3, 0.16.0, 0.17.0, 0.18.0::

    attention                          None becomes                    a dense mask meets
    its own TE class, causal           the 2048 triangle, mode 2       mode 2: the card refuses it
    its own TE class, general          the 2048 triangle, mode 1: ...  mode 1: right; flat rows are refused
    local, use_flash_attn              the 2048 triangle, mode 2       mode 0: right, until the first None sets mode 2
    local, without it                  a dense mask of seq_length      Megatron's softmax: right
    TransformerEngineNPU (0.17, 0.18)  not MindSpeed's                 not MindSpeed's

"..." the card refuses it, unless rows are 2048 long. Under context parallelism causal rings run the triangle in mode 3, and
general ones read a list of blocks that MindSpeed cuts of one mask for all rows. `kernel_of_settings` says which it is.

MindSpeed-LLM's Qwen3-Next of Megatron (tasks/models/transformer), read in c77308a1 (master) and ad615b3b (26.1.0)::

    full attention      MindSpeed's: None = the causal triangle
    recurrent layers    mask a rank-2 mask, ignore a rank-4 one
    a flat row          packed_seq_params ignored
    context parallel    refused by MindSpeed-LLM itself

The one mask goes to attention too, which takes no rank-2 mask: nothing serves both but None.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from collate_npu.consumers.mask_choice import HOLES_RECURRENT, PACKED_RECURRENT, Case, Consumer, Form, Refusal, not_exact
from collate_npu.errors import UnsupportedFormError, explain

TransformerEngine = Literal["own", "local", "separate"]
"""Whose attention runs where Megatron asks for TransformerEngine's."""


def _dropped_window(case: Case) -> str:
    """Return why a window of the model is lost: MindSpeed drops it (0.16.0 te/.../dot_product_attention.py:576-640)."""
    window = getattr(case.model.config, "window_size", None)
    back = window[0] if isinstance(window, (tuple, list)) and window else -1
    longest, pattern = case.segments.longest_span, case.pattern
    if case.padding_free and pattern.name not in ("causal", "bidirectional") and pattern.reaches(longest):
        return f"attention is {pattern}"
    short = pattern.name == "causal" and 0 <= back < longest - 1
    return f"its window_size is {tuple(window)}" if short else ""  # type: ignore[arg-type]


WINDOW = Refusal(
    of="sequences longer than a sliding window",
    when=_dropped_window,
    rule="MindSpeed's attention drops Megatron's window_size in silence, and {why}.",
    remedy="Use rows no longer than the window.",
)

NOT_EXACT = Refusal(
    of="every batch for which None is wrong, such as left padding or packed rows",
    when=not_exact,
    rule="MindSpeed's flash kernel runs a compressed causal triangle, and here {why}.",
    remedy="With plain causal attention: pad right with one sequence a row, or use padding_free=True. MindSpeed 0.14 to "
    "0.16 with one rank a row reads a dense mask under attention_mask_type=general (consumer='mindspeed_dense').",
    more="causal-kernel",
)

MINDSPEED = Consumer(
    name="mindspeed",
    forms=(Form(form="none", reads="None, which its kernel turns into a compressed causal triangle"),),
    refuses=(PACKED_RECURRENT, WINDOW, NOT_EXACT),
    shares_recurrent=True,
    source="MindSpeed 0.16.0 te/pytorch/attention/dot_product_attention/dot_product_attention.py:662-681, backend.py:12-28; "
    "core/transformer/flash_attention/generate_mask/adaptor.py:26-31",
)

MINDSPEED_DENSE = Consumer(
    name="mindspeed_dense",
    forms=(Form(form="masked", reads="bool [B, 1, S, S], True = blocked, always; padding that sees no key sees itself"),),
    refuses=(
        replace(PACKED_RECURRENT, remedy="Give each sequence its own row, or use padding_free=True (consumer='mindspeed')."),
        HOLES_RECURRENT,
        WINDOW,
        Refusal(
            of="flat rows",
            when=lambda case: case.padding_free,
            rule="Under attention_mask_type=general a flat row meets the 2048 triangle as its mask.",
            remedy="Set attention_mask_type=causal and use_flash_attn for flat rows (consumer='mindspeed').",
        ),
    ),
    splits_rows=False,
    opens_empty_rows=True,
    source="MindSpeed 0.16.0 te/pytorch/attention/dot_product_attention/backend.py:24-26, 90-106; "
    "core/context_parallel/get_batch_utils.py:180-203",
)


_FLAT = Refusal(
    of="flat rows of several sequences, in a hybrid model",
    when=lambda case: case.padding_free and case.recurrent and case.segments.packed,
    rule="MindSpeed-LLM's Gated DeltaNet convolves from one sequence of a flat row into the next: it passes seq_idx=None.",
    remedy="Give each sequence its own row, padded right (padding_free=False; no reset_attention_mask).",
    more="packed-recurrent",
)
_LLM_NOT_EXACT = replace(
    NOT_EXACT,
    rule="MindSpeed-LLM computes plain causal attention and an unmasked recurrence, and here {why}.",
    remedy="Pad right with one sequence a row.",
)

MINDSPEED_LLM = Consumer(
    name="mindspeed_llm",
    forms=(Form(form="none", reads="None; its recurrent layers ignore a dense mask"),),
    refuses=(replace(PACKED_RECURRENT, remedy=_FLAT.remedy), _FLAT, _LLM_NOT_EXACT),
    keeps_mask_2d="never",
    not_shared="its layer refuses context parallelism itself (qwen3_next_gated_deltanet_attention.py:218-221)",
    source="MindSpeed-LLM c77308a1 tasks/models/transformer/qwen3_next_gated_deltanet_attention.py:47-57, 217-221, 361-362, "
    "401-410; core/transformer/custom_dot_product_attention.py:205-206",
)


def is_installed(package: str = "mindspeed") -> bool:
    """Return True if this package is installed. Nothing of it is imported."""
    try:
        return find_spec(package) is not None
    except ValueError:  # imported, without a spec
        return True


def transformer_engine() -> TransformerEngine:
    """Return whose attention the installed release puts in TransformerEngine's place.

    Its files tell, not its version: 26.0.0, 26.1.0, 0.17.0 and 0.18.0 all say 0.12.1 (setup.py:11 of each branch). "own":
    0.14 to 0.16 and 26.x; "local": 2.3.0 and before, Megatron's local attention; "separate": from 0.17, the package
    TransformerEngineNPU, whose source could not be read here.
    """
    spec = find_spec("mindspeed")
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    if any((place / "te/pytorch/attention/dot_product_attention").is_dir() for place in places):
        return "own"
    return "local" if any((place / "te").is_dir() for place in places) else "separate"


def kernel_of_settings(settings: Any, *, te: TransformerEngine | None = None) -> str:
    """Return which consumer MindSpeed's attention is under these settings, an argument namespace or a Megatron config.

    Reads `attention_mask_type`, `use_flash_attn`, `transformer_impl`, `attention_backend` and `context_parallel_size`; `te`
    defaults to the installed release's. Raises `UnsupportedFormError` where no mask is right under these settings.

    >>> from types import SimpleNamespace
    >>> kernel_of_settings(SimpleNamespace(attention_mask_type="general"), te="own")
    'mindspeed_dense'
    >>> kernel_of_settings(SimpleNamespace(attention_mask_type="causal"), te="own")
    'mindspeed'
    """
    general = getattr(settings, "attention_mask_type", None) == "general"
    if (getattr(settings, "context_parallel_size", 1) or 1) > 1:
        if general:
            rule = "Under context parallelism, general attention needs one mask for all rows; no batch has one."
            remedy = "Set attention_mask_type=causal, and pad right or use padding_free=True."
            raise UnsupportedFormError(explain("attention_mask_type", "general", rule, remedy))
        return "mindspeed"
    backend = getattr(settings, "attention_backend", None)
    local = "local" in (getattr(settings, "transformer_impl", None), getattr(backend, "name", backend))
    reader = "local" if local else te or transformer_engine()
    slow = reader == "local" and getattr(settings, "use_flash_attn", None) is False
    reads_dense = general if reader == "own" else slow
    return "mindspeed_dense" if reads_dense else "mindspeed"


def kernel_of_modules(modules: Iterable[Any], config: Any) -> str:
    """Return the consumer of a model's modules; "" if MindSpeed computes no attention there."""
    for module in modules:
        if "DotProductAttention" in type(module).__name__:
            home = getattr(type(module).forward, "__globals__", {}).get("__name__", "")  # a wrapper's own, not its name's
            if home.startswith("mindspeed."):
                return kernel_of_settings(config, te="own" if home.startswith("mindspeed.te.") else "local")
    return ""


def adaptors() -> list[str]:
    """Return the modules to import of the installed adaptors, which patch Megatron, before it is imported."""
    return [name for name in ("mindspeed.megatron_adaptor", "megatron_adaptor") if is_installed(name.partition(".")[0])]
