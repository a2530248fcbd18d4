"""Batches whose padding means the same to every layer, kernel and trainer.

Eighteen names stand here, one for each job; the rest lives in its room: `collate_npu.masks`, `.outputs`, `.parallel`,
`.kernels`, `.proof`, `.testing`, `.errors`. Names are imported when they are used: `import collate_npu` loads nothing,
so that `collate-npu env` can say why `import torch` fails.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing itself would be most of what this import costs
if TYPE_CHECKING:
    from typing import Any

    from collate_npu.collate.collators import PaddingCollator as PaddingCollator
    from collate_npu.collate.wrapping import wrap_collator as wrap_collator
    from collate_npu.consumers.adapter import BatchAdapter as BatchAdapter
    from collate_npu.consumers.model_traits import needs_mask_2d as needs_mask_2d
    from collate_npu.errors import CollateError as CollateError
    from collate_npu.integrations.adapt import adapt as adapt
    from collate_npu.masks.dense_mask import derive_segments as derive_segments
    from collate_npu.masks.patterns import Pattern as Pattern
    from collate_npu.outputs import last_token as last_token, repad as repad, unpad as unpad
    from collate_npu.parallel import (
        ContextParallel as ContextParallel,
        gather_sequence as gather_sequence,
        split_batch as split_batch,
    )
    from collate_npu.proof.delivery import check_delivery as check_delivery, guard_first_batch as guard_first_batch
    from collate_npu.segments import Segments as Segments
    from collate_npu.tools.describe import describe as describe

__version__ = "0.8.0"

_HOMES = {
    "collate.collators": "PaddingCollator",
    "collate.wrapping": "wrap_collator",
    "consumers.adapter": "BatchAdapter",
    "consumers.model_traits": "needs_mask_2d",
    "errors": "CollateError",
    "integrations.adapt": "adapt",
    "masks.dense_mask": "derive_segments",
    "masks.patterns": "Pattern",
    "outputs": "last_token repad unpad",
    "parallel": "ContextParallel gather_sequence split_batch",
    "proof.delivery": "check_delivery guard_first_batch",
    "segments": "Segments",
    "tools.describe": "describe",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
