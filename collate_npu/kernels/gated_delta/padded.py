"""Padded rows `[B, S]` for kernels that have no mask: what must be zero, and why that is enough.

Measured on the rule alone in float64, error of real tokens (final states) with random padding:

| at padding                  | padding left | padding right | a hole       |
|-----------------------------|--------------|---------------|--------------|
| nothing                     | 0.2 (0.3)    | **0** (1.0)   | 0.2 (0.5)    |
| q, k and v zero             | **0** (0)    | **0** (0.6)   | 0.1 (0.3)    |
| g and beta zero             | **0** (0)    | **0** (0)     | **0** (0)    |

A state begins at zero, and decay of nothing is nothing: on the left it is enough that nothing is written. On the right
nothing is needed, because the rule is causal. Inside a sequence the state must also not decay. The convolution mixes
W - 1 neighbours before the rule, so its *input* must be zero on the left; where neither the projections before it nor
the convolution have a bias, zeroing the layer's input does both. Legend: B rows, S width, HV value heads.
"""

from __future__ import annotations

from torch import Tensor

from collate_npu.errors import UnsupportedFormError, explain, explain_rows, shape_of
from collate_npu.segments import Segments


def zero_padding(hidden: Tensor, segments: Segments) -> Tensor:
    """`[B, S, ...]` with zeros at padding: the input of a Gated DeltaNet layer, or of its convolution. A new tensor.

    Exact for one sequence a row, padded on the left, the right or both, where projections and convolution have no bias
    (Qwen3-Next, Qwen3.5). Raises for packed rows, which need boundaries, and for padding inside a sequence: `unpad` the
    batch and take `gated_delta_kwargs` there.

    >>> import torch
    >>> zero_padding(torch.ones(2, 3, 1), Segments.from_lengths([1, 3], side="left"))[..., 0].tolist()
    [[0.0, 0.0, 1.0], [1.0, 1.0, 1.0]]
    """
    if tuple(hidden.shape[:2]) != segments.shape:
        rule = f"The batch is {list(segments.shape)} (rows, width)."
        raise UnsupportedFormError(explain("hidden", shape_of(hidden), rule, "Pass the padded tensor, tokens second."))
    check_one_sided(segments)
    padding_BS = ~segments.keep.to(hidden.device)
    return hidden.masked_fill(padding_BS.view(*padding_BS.shape, *[1] * (hidden.ndim - 2)), 0)


def check_one_sided(segments: Segments) -> None:
    """Raise where no mask helps a recurrent layer: several sequences in a row, or padding inside one; all rows at once."""
    bad = [(b, f"{len(row)} sequences") for b, row in enumerate(segments.lengths) if len(row) > 1]
    bad += [(b, "padding inside a sequence") for b in segments.hole_rows if len(segments.lengths[b]) == 1]
    if bad:
        rule = "A mask, or zeros at padding, keep one sequence a row apart from padding beside it, and no more."
        remedy = "unpad() the batch and use keep_padding=False, or collate with padding_free=True."
        raise UnsupportedFormError(explain_rows("segments", bad, rule, remedy))
