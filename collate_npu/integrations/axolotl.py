"""axolotl 0.19.0: one line of its YAML, `plugins: [collate_npu.integrations.axolotl.CollatePlugin]`.

`post_trainer_create` (train.py:607) wraps the collator that axolotl chose. The trainers of `rl:` make rows behind their
collator, and recurrent models may pack, so there the models are adapted.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

from collate_npu import adapt
from collate_npu.collate.wrapping import WrappedCollator, wrap_collator
from collate_npu.consumers.model_traits import needs_mask_2d, unwrap
from collate_npu.releases import say_outside

PACKAGE, TESTED = "axolotl", "0.19.0"


class CollatePlugin(BasePlugin):  # type: ignore[misc]  # axolotl is not there when types are checked
    """Every batch of an axolotl run is proved, made right for its model, or refused.

    With `sample_packing`, recurrent models and flash attention get one flat row with its offsets; sdpa and eager keep rows.

    >>> CollatePlugin().post_trainer_create(cfg, trainer)  # doctest: +SKIP
    """

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Wrap the collators of a trainer, or adapt its models if it makes rows behind its collator."""
        say_outside(PACKAGE, TESTED)
        if cfg.rl:
            for model in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
                adapt(model)
            return
        packs = cfg.sample_packing or cfg.eval_sample_packing
        if packs and needs_mask_2d(trainer.model) and not _is_patched(trainer.model):
            adapt(trainer.model)
        for name, packs in (("data_collator", cfg.sample_packing), ("eval_data_collator", cfg.eval_sample_packing)):
            if (inner := getattr(trainer, name, None)) is not None:
                setattr(trainer, name, _wrap(inner, trainer.model, bool(packs)))


def _wrap(inner: Any, model: Any, packs: bool) -> WrappedCollator:
    if packs and _is_patched(model):  # its layers read the beginnings of sequences from the positions of one flat row
        return wrap_collator(inner, padding_free=True)
    flash = "flash" in str(getattr(unwrap(model).config, "_attn_implementation", ""))
    return wrap_collator(inner, model=model, padding_free=packs and (flash or needs_mask_2d(model)))


def _is_patched(model: Any) -> bool:
    """True if axolotl put its own recurrent layers in, as it does on CUDA (loaders/patch_manager.py:573)."""
    return any(type(module).forward.__module__.startswith("axolotl.monkeypatch") for module in model.modules())
