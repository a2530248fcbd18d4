"""axolotl 0.19.0: one line of its YAML, `plugins: [collate_npu.integrations.axolotl.CollatePlugin]`.

`post_trainer_create` (train.py:607) adapts the models, and wraps the collator that axolotl chose. The trainers of `rl:` make
rows behind their collator.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

from collate_npu import adapt
from collate_npu.collate.wrapping import wrap_collator
from collate_npu.releases import say_outside

PACKAGE, TESTED = "axolotl", "0.19.0"


class CollatePlugin(BasePlugin):  # type: ignore[misc]  # axolotl is not there when types are checked
    """Every batch of an axolotl run is read, and runs sequence by sequence, or is refused.

    >>> CollatePlugin().post_trainer_create(cfg, trainer)  # doctest: +SKIP
    """

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Adapt the models of a trainer, and wrap its collators, whose labels it counts."""
        say_outside(PACKAGE, TESTED)
        for model in filter(None, (trainer.model, getattr(trainer, "ref_model", None) if cfg.rl else None)):
            if not _is_patched(model):
                adapt(model)
        for name in () if cfg.rl else ("data_collator", "eval_data_collator"):
            if (inner := getattr(trainer, name, None)) is not None:
                own = {"padding_free": True} if _is_patched(trainer.model) else {"model": trainer.model}
                setattr(trainer, name, wrap_collator(inner, **own))


def _is_patched(model: Any) -> bool:
    """True if axolotl put its own recurrent layers in, as it does on CUDA: they read the beginnings of sequences from the
    positions of one flat row (loaders/patch_manager.py:573)."""
    return any(type(module).forward.__module__.startswith("axolotl.monkeypatch") for module in model.modules())
