"""Random inputs of a Gated DeltaNet layer, and a small one built of the two references: convolution, then rule.

Legend: B rows, T tokens, H heads, K head size, D channels, W taps.
"""

import torch
from recurrent_oracle import reference_causal_conv1d, reference_gated_delta_rule
from torch import Tensor

from collate_npu import Segments, unpad

H, HV, K, V, W = 1, 2, 4, 3, 4
D = 2 * H * K + HV * V


def rule_inputs(B: int, T: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """query, key, value, g (at most 0), beta (0 to 1)."""
    draw = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(B, T, H, K, generator=draw, dtype=dtype) for _ in range(2))
    value = torch.randn(B, T, HV, V, generator=draw, dtype=dtype)
    g, beta = (torch.rand(B, T, HV, generator=draw, dtype=dtype) for _ in range(2))
    return query, key, value, -g, beta


class Layer(torch.nn.Module):
    """`[B, T, D]` in, `[B, T, HV, V]` out: projections without a bias, convolution, gates, rule, as Qwen3-Next has them."""

    def __init__(self, bias: bool = False, seed: int = 0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.project, self.gates, self.taps = (
            torch.nn.Parameter(torch.randn(shape, generator=draw) / 2) for shape in ((D, D), (D, 2 * HV), (D, W))
        )
        self.bias = torch.nn.Parameter(torch.ones(D)) if bias else None

    def forward(self, hidden: Tensor, **boundary) -> Tensor:
        mixed = reference_causal_conv1d(hidden @ self.project, self.taps, self.bias, "silu", **boundary)
        B, T, _ = mixed.shape
        query, key, value = mixed.split([H * K, H * K, HV * V], -1)
        g, beta = (hidden @ self.gates).split(HV, -1)
        shaped = query.view(B, T, H, K), key.view(B, T, H, K), value.view(B, T, HV, V)
        gates = -torch.nn.functional.softplus(g), beta.sigmoid()
        return reference_gated_delta_rule(*shaped, *gates, use_qk_l2norm_in_kernel=True, **boundary)[0]


def alone(layer: Layer, hidden: Tensor, segments: Segments) -> Tensor:
    """`[T, HV, V]`: every sequence run by itself."""
    real = unpad(hidden, segments).split(list(segments.sequence_lengths))
    return torch.cat([layer(part[None])[0] for part in real])


def apart(out: Tensor, expected: Tensor, layer: Layer, hidden: Tensor) -> float:
    """The largest difference of an output at a real token, of an input's gradient, or of a parameter's, over its size."""
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9))
    wanted = [hidden, *layer.parameters()]
    made = (torch.autograd.grad((x * weights).sum(), wanted, retain_graph=True) for x in (out, expected))
    pairs = [(out, expected), *zip(*made)]
    return max(float(((x - y).detach().abs().max() / y.detach().abs().max()).nan_to_num(nan=torch.inf)) for x, y in pairs)
