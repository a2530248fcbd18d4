"""What a target draws from bytes: rows, tokens, and the containers, dtypes and masks that producers use.

Legend: B rows, S width, L tokens of one sample.
"""

import numpy as np
import oracle
import torch

from collate_npu import Pattern

PAD = 7
"""Also an ordinary token: first, inside and last, as an eos that pads too."""
SIDES = ("right", "left")
PATTERNS = ("causal", "causal", "causal", "sliding", "chunked", "bidirectional", "prefix")
WHOLE = (torch.int64, torch.int32, torch.int16, torch.uint8)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
CONTAINERS = (
    list, tuple, torch.tensor, np.array,
    *(lambda xs, dtype=dtype: torch.tensor(xs, dtype=dtype) for dtype in (torch.int32, torch.int16)),
    *(lambda xs, dtype=dtype: np.array(xs, dtype) for dtype in (np.int32, np.uint16, ">i4")),
    lambda xs: np.array(xs[::-1])[::-1],
)  # fmt: skip


class Drawn:
    """Choices made by bytes, one after another; 0 when they run out."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def below(self, n: int) -> int:
        self.at += 1
        return self.data[self.at - 1] % n if self.at <= len(self.data) else 0

    def pick(self, choices):
        return choices[self.below(len(choices))]

    def chance(self) -> bool:
        return bool(self.below(2))

    def many(self, n: int, below: int) -> list[int]:
        return [self.below(below) for _ in range(n)]


def one_row(drawn: Drawn, style: str, S: int) -> list[int]:
    """At least one real token."""
    real = 1 + drawn.below(S)
    before = {"left": S - real, "mixed": drawn.below(S - real + 1)}.get(style, 0)
    row = [0] * before + [1] * real + [0] * (S - real - before)
    if style in ("packed", "holes"):
        labels = [1 + (style == "packed") * n for n in np.cumsum(drawn.many(S, 2)).tolist()]
        row = oracle.numbered([label * (drawn.below(8) > 0) * (n > 0) for label, n in zip(labels, row)])
    return row if any(row) else [1, *row[1:]]


STYLES = ("right", "left", "none", "mixed", "packed", "holes")


def rows_of(drawn: Drawn, styles=STYLES, *, width: int = 12, rows: int = 3) -> list[list[int]]:
    """Segment ids `[B, S]`, all rows in one style."""
    style, S = drawn.pick(styles), 1 + drawn.below(width)
    return [[1] * S if style == "none" else one_row(drawn, style, S) for _ in range(1 + drawn.below(rows))]


def tokens_of(drawn: Drawn, rows) -> list[list[int]]:
    """Ordinary tokens, PAD among them, and PAD at padding."""
    return [[drawn.below(10) if n else PAD for n in row] for row in rows]


def pattern_of(drawn: Drawn) -> tuple[str, int, Pattern | str]:
    """Its name, its size, and the pattern itself."""
    name, size = drawn.pick(PATTERNS), 1 + drawn.below(4)
    return name, size, getattr(Pattern, name)(size) if name in ("sliding", "chunked", "prefix") else name


def held(drawn: Drawn, values):
    """Whole numbers as some producer holds them."""
    return drawn.pick(CONTAINERS)(values)


def two_dims(drawn: Drawn, keep_BS):
    """A keep mask `[B, S]` as producers write it."""
    kind = drawn.pick(("tensor", "tensor", "numpy", "lists", "bools"))
    if kind == "lists":
        return [[int(x) for x in row] for row in keep_BS]
    if kind == "numpy":
        made = np.array(keep_BS).astype(drawn.pick((bool, np.int64, np.uint8, np.float32)))
        return made[:, ::-1].copy()[:, ::-1] if drawn.chance() else made
    return torch.tensor(keep_BS).to(torch.bool if kind == "bools" else drawn.pick((*WHOLE, *FLOATS)))


def four_dims(drawn: Drawn, keep_B1SS, polarity: str):
    """A keep matrix `[B, 1, S, S]` as producers write it, for one head or several."""
    keep_B1SS = torch.as_tensor(keep_B1SS)
    if polarity == "bias":
        dtype = drawn.pick(FLOATS)
        blocked = drawn.pick((torch.finfo(dtype).min, -torch.inf, -1e4))
        made = torch.zeros(keep_B1SS.shape, dtype=dtype).masked_fill_(~keep_B1SS, blocked)
    else:
        made = (keep_B1SS if polarity == "keep" else ~keep_B1SS).to(drawn.pick((torch.bool, torch.bool, *WHOLE, *FLOATS)))
    return drawn.pick((lambda x: x, lambda x: x[:, 0], lambda x: x.expand(-1, 2, -1, -1)))(made)
