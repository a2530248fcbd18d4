"""Collate: features in, a batch out whose masks agree with each other; and which samples stand together in a batch."""

from collate_npu.collate.batch_sampler import BalancedBatchSampler, lengths_of, loss_weights
from collate_npu.collate.collators import PaddingCollator
from collate_npu.collate.wrapping import wrap_collator

__all__ = ["BalancedBatchSampler", "PaddingCollator", "lengths_of", "loss_weights", "wrap_collator"]
