"""Batches whose padding means the same to every layer, kernel and trainer."""

from collate_npu.collate.collators import PaddingCollator
from collate_npu.collate.wrapping import wrap_collator
from collate_npu.consumers.adapter import BatchAdapter
from collate_npu.consumers.models import needs_mask_2d
from collate_npu.errors import AmbiguousMaskError, CollateError, PolarityError, UnsupportedFormError
from collate_npu.masks.derive import derive_segments
from collate_npu.masks.forms import Varlen, Verdict, block_mask, dense, mask_mod, none_is_exact, varlen
from collate_npu.masks.patterns import Pattern
from collate_npu.outputs import last_token, per_sequence, repad, to_nested, unpad
from collate_npu.parallel import ContextParallel, gather_sequence, split_batch
from collate_npu.segments import Segments
from collate_npu.tools.show import describe, picture

__version__ = "0.1.0"

__all__ = [
    "AmbiguousMaskError",
    "BatchAdapter",
    "CollateError",
    "ContextParallel",
    "PaddingCollator",
    "Pattern",
    "PolarityError",
    "Segments",
    "UnsupportedFormError",
    "Varlen",
    "Verdict",
    "block_mask",
    "dense",
    "derive_segments",
    "describe",
    "gather_sequence",
    "last_token",
    "mask_mod",
    "needs_mask_2d",
    "none_is_exact",
    "per_sequence",
    "picture",
    "repad",
    "split_batch",
    "to_nested",
    "unpad",
    "varlen",
    "wrap_collator",
]
