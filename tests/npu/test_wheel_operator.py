"""The real operator's schema and its meta kernel.

That meta and FakeTensor take a call says its argument names and types are right; about masks it says nothing, for they
take a mask of any shape.
"""

import itertools
from typing import Any

import pytest
import torch
from attention_oracle import DEFAULTS, reference_fusion_attention
from torch._subclasses.fake_tensor import FakeTensorMode

from collate_npu import Pattern, Segments
from collate_npu.kernels import fusion_attention_kwargs

HEADS, KEY_HEADS, HEAD_DIM = 4, 2, 16
OPERATORS = ("npu_fusion_attention", "npu_fusion_attention_v3")
LAYOUTS = ("BSND", "BNSD", "BSH", "SBH", "TND")
PATTERNS = ("causal", "bidirectional", Pattern.sliding(2), Pattern.chunked(2), Pattern.prefix([1, 2]))
BATCHES = [Segments.from_lengths([3, 5], side="right"), Segments.from_lengths([3, 5], side="left")]

pytestmark = pytest.mark.usefixtures("torch_npu")


def tensors(layout: str, batch: Segments, device: str) -> list[torch.Tensor]:
    B, S = batch.shape
    shapes = {
        "BSND": lambda heads: (B, S, heads, HEAD_DIM),
        "BNSD": lambda heads: (B, heads, S, HEAD_DIM),
        "BSH": lambda heads: (B, S, heads * HEAD_DIM),
        "SBH": lambda heads: (S, B, heads * HEAD_DIM),
        "TND": lambda heads: (batch.num_tokens, heads, HEAD_DIM),
    }
    return [torch.zeros(shapes[layout](heads), device=device) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]


def shapes(outputs: tuple[Any, ...]) -> list[list[int]]:
    return [list(x.shape) for x in outputs[:4]]


@pytest.mark.parametrize("name", OPERATORS)
def test_our_argument_names_and_defaults_are_the_wheels(name: str) -> None:
    wheels = getattr(torch.ops.npu, name).default._schema.arguments
    defaults = {argument.name: argument.default_value for argument in wheels}
    assert list(defaults)[:5] == ["query", "key", "value", "head_num", "input_layout"]
    ours = {key: value for key, value in DEFAULTS.items() if key in defaults}
    assert ours == {key: value for key, value in defaults.items() if key not in ("query", "key", "value", "head_num")}
    assert DEFAULTS.keys() - defaults.keys() == (set() if name == OPERATORS[0] else {"dropout_mask", "seed", "offset"})


def kwargs_of(name: str, batch: Segments, **settings: Any) -> dict[str, Any]:
    """`_v3` takes its lists as tensors on the host."""
    kwargs = fusion_attention_kwargs(batch, **settings)
    lists = {key: torch.tensor(kwargs[key]) for key in kwargs if key.startswith("actual_seq") and name.endswith("_v3")}
    return kwargs | lists


@pytest.mark.parametrize(("name", "layout"), itertools.product(OPERATORS, LAYOUTS))
def test_meta_and_fake_tensors_take_every_argument_set(name: Any, layout: Any) -> None:
    operator = getattr(torch.ops.npu, name)
    for pattern, batch in itertools.product(PATTERNS, BATCHES):
        kwargs = kwargs_of(name, batch, pattern=pattern, layout=layout)
        ours = reference_fusion_attention(*tensors(layout, batch, "cpu"), HEADS, **kwargs)
        on_meta = kwargs_of(name, batch, pattern=pattern, layout=layout, device="meta")
        assert shapes(operator(*tensors(layout, batch, "meta"), HEADS, **on_meta)) == shapes(ours)
        # FakeTensorMode takes one device a call, and _v3 wants its lists on the host.
        device = "cpu" if name == OPERATORS[1] and layout == "TND" else "npu"
        placed = kwargs_of(name, batch, pattern=pattern, layout=layout, device=device)
        with FakeTensorMode() as mode:
            faked = {key: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for key, x in placed.items()}
            assert shapes(operator(*tensors(layout, batch, device), HEADS, **faked)) == shapes(ours)
