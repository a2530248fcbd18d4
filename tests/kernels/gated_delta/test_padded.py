"""Padded rows without a mask: what must be zero, measured; and that it is enough."""

from __future__ import annotations

import pytest
import torch
from rule_inputs import D, Layer, alone, apart, rule_inputs

from collate_npu import Segments, UnsupportedFormError, unpad
from collate_npu.kernels.gated_delta import reference_gated_delta_rule, zero_padding

PLACES = {"left": [0] * 5 + [1] * 20, "right": [1] * 20 + [0] * 5, "hole": [1] * 10 + [0] * 5 + [1] * 10}
ZEROED = {"nothing": (), "q, k and v": (0, 1, 2), "g and beta": (3, 4)}


def rule_error(where, zeroed):
    """Of the rule alone, in float64: of real tokens, and of the final state."""
    keep = torch.tensor(PLACES[where], dtype=torch.bool)
    inputs = list(rule_inputs(1, 25, dtype=torch.float64))
    for i in ZEROED[zeroed]:
        inputs[i][:, ~keep] = 0
    out, state = reference_gated_delta_rule(*inputs, output_final_state=True, use_qk_l2norm_in_kernel=True)
    expected, final = reference_gated_delta_rule(
        *(x[:, keep] for x in inputs), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    return float((out[:, keep] - expected).abs().max()), float((state - final).abs().max())


@pytest.mark.parametrize(
    ("zeroed", "where", "tokens", "state"),
    [
        ("nothing", "left", False, False), ("nothing", "right", True, False), ("nothing", "hole", False, False),
        ("q, k and v", "left", True, True), ("q, k and v", "right", True, False), ("q, k and v", "hole", False, False),
        ("g and beta", "left", True, True), ("g and beta", "right", True, True), ("g and beta", "hole", True, True),
    ],
)  # fmt: skip
def test_the_table(zeroed, where, tokens, state):
    """A row of the module's table, exact or not."""
    assert [error < 1e-12 for error in rule_error(where, zeroed)] == [tokens, state]


@pytest.mark.parametrize("side", ["left", "right"])
def test_zeros_at_padding_make_a_layer_exact_where_nothing_has_a_bias(side):
    segments = Segments.from_lengths([3, 9, 1], side=side)
    hidden = torch.randn(*segments.shape, D, generator=torch.Generator().manual_seed(3)).requires_grad_()
    layer = Layer()
    out, expected = unpad(layer(zero_padding(hidden, segments)), segments), alone(layer, hidden, segments)
    assert apart(out, expected, layer, hidden) < 1e-5
    if side == "left":
        assert apart(unpad(layer(hidden), segments), expected, layer, hidden) > 0.1
        biased = Layer(bias=True)
        wrong = unpad(biased(zero_padding(hidden, segments)), segments)
        assert apart(wrong, alone(biased, hidden, segments), biased, hidden) > 0.1


def test_it_is_a_new_tensor_and_the_last_row_without_tokens_is_zero():
    segments, hidden = Segments.from_lengths([2, 0], width=3), torch.ones(2, 3, 2, 2)
    zeroed = zero_padding(hidden, segments)
    assert zeroed.sum() == 8
    assert hidden.sum() == 24


def test_packed_rows_holes_and_other_shapes_are_refused():
    bad = Segments.from_ids([[1, 1, 2, 2], [1, 0, 1, 1], [1, 1, 1, 0]])
    with pytest.raises(UnsupportedFormError, match=r"2 bad rows\.\n  row 0: got 2 sequences\n  row 1: got padding inside"):
        zero_padding(torch.ones(3, 4, 1), bad)
    with pytest.raises(UnsupportedFormError, match=r"\[3, 4\]"):
        zero_padding(torch.ones(4, 3, 1), bad)
