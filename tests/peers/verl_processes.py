"""What a fresh process has of verl's Megatron functions: `wraps` leaves `__wrapped__` on ours."""

from typing import Any


def ours() -> dict[str, Any]:
    """Of a name taken by itself first, and of verl's modules."""
    from verl.models.mcore.util import preprocess_bshd_engine as taken_first

    first = _TAKEN.setdefault("first", taken_first)
    return {"taken first": hasattr(first, "__wrapped__"), "ours": [hasattr(each, "__wrapped__") for each in _functions()]}


_TAKEN: dict[str, Any] = {}


def _functions() -> list[Any]:
    from verl.models.mcore import model_forward, registry, util

    return [
        model_forward.preprocess_bshd_engine, registry.model_forward_gen, registry.gptmodel_forward_model_engine,
        util.postprocess_bshd_engine, registry.fused_forward_model_engine,
    ]  # fmt: skip


def afterwards() -> list[bool]:
    """The same of two, when ours is uninstalled."""
    from collate_npu.integrations import verl as engine

    engine.uninstall()
    return [hasattr(each, "__wrapped__") for each in _functions()[:2]]


def asked() -> bool:
    """In a spawned process: is ours in place as soon as verl's Megatron functions can be taken?"""
    import verl  # noqa: F401
    from verl.models.mcore.registry import get_mcore_engine_forward_fn

    return hasattr(get_mcore_engine_forward_fn(type("Config", (), {"architectures": ["Qwen3ForCausalLM"]})), "__wrapped__")
