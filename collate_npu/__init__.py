"""Batches whose padding means the same to every layer, kernel and trainer.

Names are imported when they are asked for: `import collate_npu` loads nothing, so that `collate-npu env` can say why
`import torch` fails.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing itself would be most of what this import costs
if TYPE_CHECKING:
    from typing import Any

    from collate_npu.collate.collators import PaddingCollator as PaddingCollator
    from collate_npu.collate.wrapping import wrap_collator as wrap_collator
    from collate_npu.consumers.adapter import BatchAdapter as BatchAdapter
    from collate_npu.consumers.models import needs_mask_2d as needs_mask_2d
    from collate_npu.errors import AmbiguousMaskError as AmbiguousMaskError
    from collate_npu.errors import CollateError as CollateError
    from collate_npu.errors import PolarityError as PolarityError
    from collate_npu.errors import UnsupportedFormError as UnsupportedFormError
    from collate_npu.integrations.delivery import check_delivery as check_delivery
    from collate_npu.integrations.delivery import guard_first_batch as guard_first_batch
    from collate_npu.masks.derive import derive_segments as derive_segments
    from collate_npu.masks.forms import Varlen as Varlen
    from collate_npu.masks.forms import Verdict as Verdict
    from collate_npu.masks.forms import block_mask as block_mask
    from collate_npu.masks.forms import dense as dense
    from collate_npu.masks.forms import mask_mod as mask_mod
    from collate_npu.masks.forms import none_is_exact as none_is_exact
    from collate_npu.masks.forms import varlen as varlen
    from collate_npu.masks.patterns import Pattern as Pattern
    from collate_npu.outputs import last_token as last_token
    from collate_npu.outputs import per_sequence as per_sequence
    from collate_npu.outputs import repad as repad
    from collate_npu.outputs import to_nested as to_nested
    from collate_npu.outputs import unpad as unpad
    from collate_npu.parallel import ContextParallel as ContextParallel
    from collate_npu.parallel import gather_sequence as gather_sequence
    from collate_npu.parallel import split_batch as split_batch
    from collate_npu.segments import Segments as Segments
    from collate_npu.tools.describe import describe as describe
    from collate_npu.tools.show.pictures import picture as picture

__version__ = "0.6.0"

_HOMES = {
    "collate.collators": "PaddingCollator",
    "collate.wrapping": "wrap_collator",
    "consumers.adapter": "BatchAdapter",
    "consumers.models": "needs_mask_2d",
    "errors": "AmbiguousMaskError CollateError PolarityError UnsupportedFormError",
    "integrations.delivery": "check_delivery guard_first_batch",
    "masks.derive": "derive_segments",
    "masks.forms": "Varlen Verdict block_mask dense mask_mod none_is_exact varlen",
    "masks.patterns": "Pattern",
    "outputs": "last_token per_sequence repad to_nested unpad",
    "parallel": "ContextParallel gather_sequence split_batch",
    "segments": "Segments",
    "tools.describe": "describe",
    "tools.show.pictures": "picture",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
