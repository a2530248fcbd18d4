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
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from collate_npu.consumers.consumer import HOLES_RECURRENT, PACKED_RECURRENT, Case, Consumer, Form, Refusal, not_exact
from collate_npu.errors import UnsupportedFormError, explain
from collate_npu.parallel.layout import Layout

TransformerEngine = Literal["own", "local", "separate"]
"""Whose attention runs where Megatron asks for TransformerEngine's."""


def _dropped_window(case: Case) -> str:
    """Why a window of the model is lost: MindSpeed never hands it on (0.16.0 te/.../dot_product_attention.py:576-640)."""
    window = getattr(case.model.config, "window_size", None)
    back = window[0] if isinstance(window, (tuple, list)) and window else -1
    short = case.pattern.name == "causal" and 0 <= back < case.segments.longest_span - 1
    return f"its window_size is {tuple(window)}" if short else ""  # type: ignore[arg-type]


_WINDOW = Refusal(
    of="windows shorter than a sequence",
    when=_dropped_window,
    rule="MindSpeed's attention drops Megatron's window_size in silence, and {why}.",
    remedy="Use rows no longer than the window.",
)

NOT_EXACT = Refusal(
    of="every batch where None is not exact",
    when=not_exact,
    rule="MindSpeed's flash kernel runs a compressed causal triangle, and here {why}.",
    remedy="Pad right with one sequence a row, or use padding_free=True. MindSpeed 0.14 to 0.16 with one rank a row reads a "
    "dense mask under attention_mask_type=general (consumer='mindspeed_dense').",
)

MINDSPEED = Consumer(
    name="mindspeed",
    forms=(Form(form="none", reads="None, which its kernel turns into a compressed causal triangle"),),
    refuses=(PACKED_RECURRENT, _WINDOW, NOT_EXACT),
    recurrent_scheme="head_exchange_zigzag",
    source="MindSpeed 0.16.0 te/pytorch/attention/dot_product_attention/dot_product_attention.py:662-681, backend.py:12-28; "
    "core/transformer/flash_attention/generate_mask/adaptor.py:26-31",
)

MINDSPEED_DENSE = Consumer(
    name="mindspeed_dense",
    forms=(Form(form="masked", reads="bool [B, 1, S, S], True = blocked, always; padding that sees no key sees itself"),),
    refuses=(
        PACKED_RECURRENT,
        HOLES_RECURRENT,
        _WINDOW,
        Refusal(
            of="flat rows",
            when=lambda case: "it reads no mask of a flat row" if case.padding_free else "",
            rule="Under attention_mask_type=general a flat row meets the 2048 triangle as its mask, which the card refuses.",
            remedy="Set attention_mask_type=causal and use_flash_attn for flat rows (consumer='mindspeed').",
        ),
    ),
    splits_rows=False,
    opens_empty_rows=True,
    source="MindSpeed 0.16.0 te/pytorch/attention/dot_product_attention/backend.py:24-26, 90-106; "
    "core/context_parallel/get_batch_utils.py:180-203",
)


def installed() -> bool:
    """Is MindSpeed here? Nothing of it is imported."""
    try:
        return find_spec("mindspeed") is not None
    except ValueError:  # imported, without a spec
        return True


def transformer_engine() -> TransformerEngine:
    """Whose attention the installed release puts in TransformerEngine's place, by its files.

    Not by its version: 26.0.0, 26.1.0, 0.17.0 and 0.18.0 all say 0.12.1 (setup.py:11 of each branch). "own": 0.14 to 0.16
    and 26.x; "local": 2.3.0 and before, Megatron's local attention; "separate": from 0.17, the package
    TransformerEngineNPU, whose source could not be read here.
    """
    spec = find_spec("mindspeed")
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    if any((place / "te/pytorch/attention/dot_product_attention").is_dir() for place in places):
        return "own"
    return "local" if any((place / "te").is_dir() for place in places) else "separate"


def kernel_of_settings(settings: Any, *, te: TransformerEngine | None = None) -> str:
    """Which consumer MindSpeed's attention is, by its settings: an argument namespace or a Megatron config.

    Reads `attention_mask_type`, `use_flash_attn`, `transformer_impl`, `attention_backend` and `context_parallel_size`; `te`
    is the installed release's. Raises `UnsupportedFormError` where no mask is right under these settings.

    >>> from types import SimpleNamespace
    >>> kernel_of_settings(SimpleNamespace(attention_mask_type="general"), te="own")
    'mindspeed_dense'
    >>> kernel_of_settings(SimpleNamespace(attention_mask_type="causal"), te="own")
    'mindspeed'
    """
    general = getattr(settings, "attention_mask_type", None) == "general"
    slow = getattr(settings, "use_flash_attn", None) is False
    if (getattr(settings, "context_parallel_size", 1) or 1) > 1:
        if general:
            rule = "Under context parallelism general attention reads blocks of one mask for all rows, which no batch sends."
            remedy = "Set attention_mask_type=causal, and pad right or use padding_free=True."
            raise UnsupportedFormError(explain("attention_mask_type", "general", rule, remedy))
        return "mindspeed"
    reader = "local" if _is_local(settings) else te or transformer_engine()
    if reader == "own":
        if slow and not general:
            rule = "Without flash attention MindSpeed hands its kernel a mask that the card refuses, or raises."
            raise UnsupportedFormError(explain("use_flash_attn", "False", rule, "Set use_flash_attn=True."))
        return "mindspeed_dense" if general else "mindspeed"
    return "mindspeed_dense" if reader == "local" and slow else "mindspeed"


def layout_of_settings(settings: Any) -> Layout:
    """How ranks share a row, by an argument namespace: MindSpeed's `context_parallel_algo`; zigzag without it.

    Source: MindSpeed 0.16.0 core/context_parallel/get_batch_utils.py:112-136, 244-277. Raises for its other algorithms.
    """
    algorithm = getattr(settings, "context_parallel_algo", None) or "megatron_cp_algo"
    if algorithm not in _LAYOUTS:
        rule = f"The layouts known here are those of {' and '.join(_LAYOUTS)}."
        raise UnsupportedFormError(
            explain("context_parallel_algo", algorithm, rule, "Use one of them, or context_parallel=.")
        )
    return _LAYOUTS[algorithm]


_LAYOUTS: dict[str, Layout] = {"megatron_cp_algo": "zigzag", "ulysses_cp_algo": "ulysses"}


def kernel_of_modules(modules: Iterable[Any], config: Any) -> str:
    """The same for the modules of a model; "" where MindSpeed computes the attention of none of them."""
    for module in modules:
        if "DotProductAttention" in type(module).__name__:
            home = getattr(type(module).forward, "__globals__", {}).get("__name__", "")  # a wrapper's own, not its name's
            if home.startswith("mindspeed."):
                return kernel_of_settings(config, te="own" if home.startswith("mindspeed.te.") else "local")
    return ""


def _is_local(settings: Any) -> bool:
    backend = getattr(settings, "attention_backend", None)
    return "local" in (getattr(settings, "transformer_impl", None), getattr(backend, "name", backend))
