"""axolotl 0.19.0: one line of its YAML, `plugins: [collate_npu.integrations.axolotl.CollatePlugin]`.

axolotl makes its plugins by name and calls `post_trainer_create` with the trainer it built (train.py:607). Whatever
collator it chose is wrapped there; the trainers of `rl:` make rows behind theirs, so there each forward is looked at.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

from collate_npu.collate.wrapping import wrap_collator
from collate_npu.consumers.models import needs_mask_2d, unwrap
from collate_npu.integrations.trl import adapt_forward

PACKAGE, TESTED = "axolotl", "0.19.0"


class CollatePlugin(BasePlugin):  # type: ignore[misc]  # axolotl is not there when types are checked
    """Every batch of an axolotl run is proved, made right for its model, or refused.

    With `sample_packing` a recurrent model, and flash attention, get one flat row with its offsets; sdpa and eager keep
    their rows.
    """

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Wrap the collators of a trainer, or watch the forwards of one that needs it."""
        if cfg.rl:
            for model in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
                adapt_forward(model)
            return
        for name, packs in (("data_collator", cfg.sample_packing), ("eval_data_collator", cfg.eval_sample_packing)):
            inner = getattr(trainer, name, None)
            if inner is not None:
                flat = bool(packs) and _reads_offsets(trainer.model)
                setattr(trainer, name, wrap_collator(inner, model=trainer.model, padding_free=flat))


def _reads_offsets(model: Any) -> bool:
    return bool(needs_mask_2d(model)) or "flash" in str(getattr(unwrap(model).config, "_attn_implementation", ""))
