"""Validation: whatever stands in the place of data, an entry gives a result or a refusal in the words of the house."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch
from entries import ADAPTER, ARRAYS, BATCH, CP, ENTRIES, FEATURES, HELD, PLACES, ROWS
from laws.compared import leaves
from strategies import Drawn

from collate_npu import CollateError, Pattern, Segments
from collate_npu.keys import KEYS

NAMES = ("", "keep", "masked", "causal", "sliding", "left", "4d", "auto", "megatron", "fla", "zigzag", "input_ids", "labels")
NAMES += ("attention_mask", "cu_seqlens", "position_ids", "Keep", "e\u0301", "\ud800", "\x1b[0m", "%s {0}", "x" * 3000)
WHOLE = (0, 1, 2, 3, 4, 5, 7, -1, -100, 255, 256, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, 1 << 70, -(1 << 63), -(1 << 70))
"""None of some millions: it would be a width that a user may ask for, and has to pay."""
FLOATS = (0.5, 2.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e300)
DTYPES = ("bool", "int8", "uint8", "int16", "uint16", "int32", "int64", "uint64", "float16", "float32", "float64")
DTYPES += ("complex64",)
TORCH = (*(name for name in DTYPES if name != "uint64"), "bfloat16", "float8_e5m2", "uint32")
OBJECTS = (
    None, ..., NotImplemented, object(), type, len, range(3), b"ab", bytearray(b"ab"), memoryview(b"ab"), slice(1, 2),
    torch.int64, torch.device("cpu"), np.int64, Exception("x"), ROWS, Pattern.sliding(2), KEYS, CP, ADAPTER, BATCH,
    FEATURES, [FEATURES], Segments.from_lengths([7]), torch.nn.Linear(2, 2), lambda *given, **named: given, iter((1, 2)),
    [[1, 0, 1, 0], [0, 0, 0, 0]], [[2, 1, 2, 0], [1, 1, 1, 1]], [[1, 2], [3]], {"input_ids": [1]}, ROWS.keep & False,
    torch.Size((2, 4)), torch.arange(9)[::2], np.array([(1, 2)], [("a", int), ("b", int)]), np.array([[True], [False]]),
    np.full((2, 4), 2**64 - 1, np.uint64), torch.full((2, 4), torch.nan), torch.full((2, 1, 4, 4), torch.nan),
)  # fmt: skip


def number(drawn: Drawn):
    value = drawn.pick((*WHOLE, *FLOATS, True, False))
    kind = drawn.below(10)
    try:
        if kind > 6:
            return (np.dtype(drawn.pick(DTYPES)).type, np.array, torch.tensor)[kind - 7](value)
        return (Decimal, Fraction, complex, str)[kind - 3](value) if kind > 2 else value
    except (OverflowError, ValueError, RuntimeError):
        return value


def array(drawn: Drawn):
    """Of up to four dimensions: ones, places, or one number all over; with the memory that a producer leaves."""
    shape = drawn.pick(((2, 4), (2, 4), (4,), (1, 5), (2, 1, 4, 4), tuple(drawn.many(drawn.below(5), 5))))
    count, fill = int(np.prod(shape)), drawn.pick((1, 1, 0, -1, 7, *FLOATS))
    if drawn.chance():
        with np.errstate(all="ignore"):
            made = (np.arange(count) if drawn.chance() else np.full(count, fill)).reshape(shape).astype(drawn.pick(DTYPES))
        layouts = (lambda x: x, lambda x: x[::-1], np.transpose, lambda x: x.astype(x.dtype.newbyteorder()), np.ma.array)
        return drawn.pick(layouts)(made) if made.ndim else made
    made = (torch.arange(count) if drawn.chance() else torch.full((count,), fill, dtype=torch.float64)).reshape(shape)
    layouts = (lambda x: x, lambda x: x.movedim(0, -1), lambda x: x.to("meta"), lambda x: x.float().requires_grad_())
    layouts += (lambda x: x.to_sparse(), lambda x: x[None].expand(2, *x.shape), lambda x: torch.nested.nested_tensor([x, x]))
    made = drawn.pick(layouts)(made) if made.ndim else made
    return made.to(getattr(torch, drawn.pick(TORCH))) if made.layout is torch.strided and not made.is_nested else made


def anything(drawn: Drawn, deep: int = 2):
    kind = drawn.below(8 if deep else 5)
    if kind < 2:
        return (number, array)[kind](drawn)
    if kind < 4:
        return drawn.pick((NAMES, OBJECTS)[kind - 2])
    if kind == 4:
        return drawn.many(drawn.below(5), 4)
    parts = [anything(drawn, deep - 1) for _ in range(drawn.below(4))]
    if kind == 5:
        return {drawn.pick((*NAMES, 1, None)): part for part in parts}
    return tuple(parts) if drawn.below(8) == 7 else parts


def validate(drawn: Drawn) -> None:
    name = drawn.pick(SINGLE)
    made = in_words(lambda: ENTRIES[name](anything(drawn)))
    read = name in ARRAYS and not name.endswith(("batch", "features"))  # which have keys that are not
    assert not any(np.isnan(x).any() for x in leaves(made) if read and x.dtype.kind == "f"), f"{name}: NaN is read"


def beside(drawn: Drawn) -> None:
    """Whatever a key of a batch or a sample holds, wherever it is read."""
    call, keys = drawn.pick([*PLACES.values()]), drawn.many(1 + drawn.below(2), len(HELD))
    in_words(lambda: call({HELD[key]: anything(drawn) for key in keys}))


SINGLE = tuple(ENTRIES)


def in_words(call):
    """What came out; None for a refusal, whose words say what arrived."""
    try:
        return call()
    except CollateError as error:
        said = str(error)
        assert 30 < len(said) < 60_000, said[:200]
        assert "got" in said or "bad row" in said, said[:200]
        return None
