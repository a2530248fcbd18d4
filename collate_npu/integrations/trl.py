"""TRL 1.16.0: a collator where the trainer takes one, `adapt(trainer.model)` where it makes its batches itself.

SFT on padded rows, DPO, KTO and reward trainers take `data_collator=wrap_collator(theirs, model=model)`. GRPO and RLOO
collate nothing (grpo_trainer.py:964), ORPO and CPO join rows behind the collator (experimental/orpo/orpo_trainer.py:606),
and SFT refuses a collator with `packing` or `padding_free` (sft_trainer.py:917). There the model itself is the place.
"""

from __future__ import annotations

PACKAGE, TESTED = "trl", "1.16.0"
