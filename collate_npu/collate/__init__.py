"""Collate: features in, a batch out whose masks agree with each other."""

from collate_npu.collate.collators import Layout, PaddingCollator
from collate_npu.collate.wrapping import wrap_collator

__all__ = ["Layout", "PaddingCollator", "wrap_collator"]
