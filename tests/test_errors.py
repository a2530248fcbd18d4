"""Errors: a name that is misspelt is answered with the nearest, at every entry."""

import pytest

from collate_npu.errors import CollateError

NEAR = {
    "PaddingCollator(None, paddingside='left')": "padding_side", "wrap_collator(print, polarty='keep')": "polarity",
    "ContextParallel(2, 0, layot='zigzag')": "layout", "ContextParallel(2, 0, layout='zig-zag')": "zigzag",
    "BatchAdapter(needs_mask_2d=True, consumr='megatron')": "consumer",
    "BatchAdapter(needs_mask_2d=True, consumer='Megatorn')": "megatron",
    "PaddingCollator(pad_token_id=0, padding_side='LEFT')": "left",
    "PaddingCollator(pad_token_id=0, attention_mask='2D')": "2d", "derive_segments([[1]], polarity='kep')": "keep",
    "derive_segments([[1]], patern='causal')": "pattern", "derive_segments([[1]], pattern='casual')": "causal",
}  # fmt: skip


@pytest.mark.parametrize("typed", NEAR)
def test_a_misspelt_name_is_answered_with_the_nearest(typed):
    with pytest.raises(CollateError, match=f"Did you mean {NEAR[typed]}"):
        exec(f"from collate_npu import *\n{typed}", {})
