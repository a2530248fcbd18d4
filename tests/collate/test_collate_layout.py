"""Layout: what a wrapped collator can do of it; the rest is tested with the collator."""

from __future__ import annotations

import pytest

from collate_npu import CollateError, wrap_collator
from collate_npu.collate import Layout


@pytest.mark.parametrize(
    "asked", [{"sequence_multiple": 4}, {"max_sequences": 4}, {"separator_id": 0}, {"allow_empty": True}]
)
def test_a_wrapped_collator_lays_nothing_out(asked):
    with pytest.raises(CollateError, match=f"layout.{next(iter(asked))}: got .*as the inner one lays them out"):
        wrap_collator(dict.fromkeys, layout=Layout(**asked))
    wrap_collator(dict.fromkeys, layout=Layout(labels_shifted=True, max_mask_bytes=8))
