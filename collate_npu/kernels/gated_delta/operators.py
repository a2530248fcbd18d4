"""What is known of an operator that takes recurrent boundaries: what it reads, and what its host code checks.

One row an operator (`fla_operators`, `ascend_operators`, `stack_operators`). Rules are judged for all of them alike
(`sequence_rules`, `tensor_rules`, `padding_rules`, `parallel_rules`): one that stands in `checks` is refused by the operator
itself, any other is taken without a word. What is true of one stack alone is in `stack_rules`.

Releases read: fla 0.5.2 (bc3b101), flash-linear-attention-npu 17e24fd (after v26.6.0), causal-conv1d 1.6.1 (0d2252d), mamba
e9594ce, transformers 4.57 to 5.23, megatron-core 0.16.1 to 0.19, mcore-bridge 1.6.5, MindSpeed core_r0.15.3 to 0.18,
MindSpeed-LLM c77308a, verl 0.9.1, torchtitan 0.3.0, op-plugin 517f2e7 (documentation), TransformerEngine #3351 (text alone).

Legend of shapes: B rows, T tokens, H query and key heads, N value heads, K and V head sizes, D channels, W taps, S states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Form = Literal["offsets", "lengths", "prefix and lengths", "ends"]
Masks = Literal["none", "multiplied", "unpadded", "ignored", "output"]
Empties = Literal["legal", "fla", "never"]
Ranks = Literal["whole row", "zigzag row", "state", "documents", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator. Arguments are named as its call names them."""

    name: str
    package: str
    source: str
    kernel: str = "fla"
    """The `kernel` of `gated_delta_kwargs` that makes its arguments."""
    offsets: tuple[str, ...] = ()
    """Arguments that hold the boundaries; the first that is given counts."""
    form: Form = "offsets"
    numbers: str = ""
    """The argument that holds a sequence number for each token."""
    copies: tuple[str, ...] = ()
    """Host copies of the offsets."""
    tables: Mapping[str, str] = field(default_factory=dict)
    """Chunk tables, and what a chunk of each is: `"rule"` (chunk_size), `"conv"` (64), `"cumsum"` (2**17 / chunk_size)."""
    needs: frozenset[str] = frozenset()
    """Arguments without which boundaries are not taken."""
    reads: frozenset[str] = frozenset()
    """Other arguments of its own whose names look like boundaries or masks."""
    host: bool = False
    """Boundaries are ints on the host (a list or tuple), not tensors."""
    dtypes: tuple[str, ...] = ("int32", "int64")
    chunk_sizes: tuple[int, ...] = ()
    checks: frozenset[str] = frozenset()
    empties: Empties = "never"
    repairs_ends: bool = False
    """Offsets without the leading 0 that end at T get one."""
    folds: bool = False
    """Offsets run over all B * T tokens, row after row."""
    masks: Masks = "none"
    shapes: Mapping[str, str] = field(default_factory=dict)
    head_sizes: tuple[int, int] = (0, 0)
    """Largest K and V, 0 for no limit known."""
    most_sequences: int = 0
    longest: int = 0
    backward: bool = True
    ranks: Ranks = "whole row"
