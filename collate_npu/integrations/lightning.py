"""Lightning: the adapter in `on_before_batch_transfer`, the last hook that sees the batch on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collate_npu.consumers.adapter import BatchAdapter

PACKAGE, TESTED = "lightning", "2.6.0"


class AdaptsBatches:
    """Mix into a LightningModule that sets `self.adapter = BatchAdapter(self.model)`."""

    adapter: BatchAdapter

    def on_before_batch_transfer(self, batch: Mapping[str, Any], dataloader_idx: int) -> dict[str, Any]:
        """The batch the model takes."""
        return self.adapter(batch)
