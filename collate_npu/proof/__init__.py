"""Proof: what every layer and kernel received, and the numbers of a batch against those of each sample alone."""

from collate_npu.proof.delivery import Watch, watch

__all__ = ["Watch", "watch"]
