"""The law of entries: whatever stands in the place of a right value, an entry reads the same numbers or refuses in words.

A refusal is a `CollateError` of four parts. No entry raises another error, or takes another number in silence. Which entries
there are is asked of the package (entries.py). Offsets have a law of their own, because any list of numbers may be some.
"""

import inspect
import math
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate, chain, pairwise, product
from types import NoneType, SimpleNamespace, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from entries import ADAPTER, BATCH, CP, ENTRIES, HELD, IDS, OPTIONS, PLACES, READ, ROWS, SIGNATURES
from hypothesis import example, given, strategies as st
from rotation import some
from torch.nn.attention.bias import causal_lower_right

from collate_npu import BatchAdapter, CollateError, ContextParallel, Pattern, Segments, gather_sequence, split_batch
from collate_npu.kernels.gated_delta import flat_offsets, gated_delta_kwargs
from collate_npu.keys import KEYS
from collate_npu.masks import segments_from_batch
from collate_npu.outputs import per_sequence
from collate_npu.parallel import check_recurrent_split, cu_seqlens_of, pad_documents, query_rows, split_tensor

pytestmark = [pytest.mark.filterwarnings(f"ignore:{what}") for what in ("collate_npu", "invalid value", "overflow")]
LONG, MOST = 100_000, 60_000
"""Characters of a text that is passed, and the most that an error or a picture may have."""


def refused(call):
    """What came out, or None for a refusal: its key, what arrived, and a rule with a remedy."""
    try:
        made = call()
    except CollateError as error:
        text = str(error)
        assert "got" in text or "bad row" in text, text[:200]
        assert 30 < len(text) < MOST, text[:200]
        assert "\x1b" not in text, "a terminal obeys it"
        return None
    assert not isinstance(made, str) or (len(made) < MOST and "\x1b" not in made)
    return made


# --- odd values

HOLDERS = {
    "numpy": lambda x: x.numpy(),
    "lists": lambda x: x.tolist(),
    "tuples": lambda x: tuple(map(tuple, x.tolist())) if x.ndim > 1 else tuple(x.tolist()),
    "sparse": lambda x: x.to_sparse(),
    "requires grad": lambda x: x.float().requires_grad_(),
    "not contiguous": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "expanded": lambda x: x[..., None].expand(*x.shape, 2)[..., 0],
    "places in another order": lambda x: x.numpy()[..., ::-1].copy()[..., ::-1],
    **{name: lambda x, name=name: x.numpy().astype(name) for name in ("uint64", "longdouble", ">i4")},
    **{name: lambda x, name=name: x.to(getattr(torch, name)) for name in ("uint8", "uint16", "float8_e4m3fn", "bfloat16")},
}
"""All of these hold the same numbers, where the numbers are small."""
NO_HOLDERS = (
    lambda x: x.to("meta"), lambda x: torch.nested.nested_tensor([x, x]), lambda x: x.to(torch.complex64), lambda x: x.T,
    lambda x: x.numpy().astype(object), lambda x: x[None], lambda x: x.bool(), lambda x: x.half(), lambda x: x.char(),
    lambda x: np.ma.array(x.numpy()), lambda x: x.numpy().astype("uint64"), lambda x: [x, x], lambda x: x,
)  # fmt: skip
NO_NUMBERS = (
    *(letter * LONG for letter in ("x", "\x1b", "\U0001f600")),
    object(), "x", b"x", {1, 2}, len, type, 1j, ["a", "b"], [[1], 2], [None, 1], (x for x in (1, 2)), np.array(["a", "b"]),
    np.array([None, 1]), np.array([1j, 2]), torch.tensor([1j, 2]), np.array(["2020-01-01"], "datetime64[D]"), [{}, []],
    torch.full((2, 4), torch.nan), np.full((2, 4), np.nan), torch.ones(2, 4, device="meta"),
    torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    *([] if torch.__version__.startswith("2.6.") else [causal_lower_right(3, 3)]),  # where it answers nothing, not its shape
)  # fmt: skip
WHOLE = (0, 1, 2, 3, 4, 5, 7, -1, -100, 255, 256, *(sign << bits for bits in (31, 32, 63, 70) for sign in (1, -1)))
"""None of some millions: it would be a width that a user may ask for, and has to pay."""
NUMBERS = (
    *WHOLE, (1 << 63) - 1, 0.5, 2.0, -0.0, math.nan, math.inf, -math.inf, 1e300, True, False, np.uint8(7), np.float64(2.5),
    Decimal(1), Fraction(1, 2), np.bool_(True), "3",
)  # fmt: skip
TEXTS = (
    "", "keep", "masked", "causal", "sliding", "left", "4d", "auto", "megatron", "fla", "zigzag", "input_ids", "labels",
    "attention_mask", "cu_seqlens", "position_ids", "Keep", "e\u0301", "\ud800", "\x1b[0m", "%s {0}", "x" * 3000,
)  # fmt: skip
OBJECTS = (
    None, ..., NotImplemented, range(3), bytearray(b"ab"), slice(1, 2), torch.int64, torch.device("cpu"), np.int64, KEYS, CP,
    Exception("x"), ROWS, Pattern.sliding(2), ADAPTER, BATCH, [BATCH], torch.nn.Linear(2, 2), lambda *rows, **named: rows,
    [[1, 0, 1, 0], [0, 0, 0, 0]], [[2, 1, 2, 0], [1, 1, 1, 1]], {"input_ids": [1]}, ROWS.keep & False, torch.arange(9)[::2],
    np.array([(1, 2)], [("a", int), ("b", int)]), np.full((2, 4), 2**64 - 1, np.uint64),
    [torch.ones(2).to_sparse()], [torch.nested.nested_tensor([torch.ones(2)])], ROWS.keep[0, :1], ROWS.ids.to(torch.uint32),
)  # fmt: skip


@st.composite
def arrays(draw):
    """Of up to four dimensions: places, or one number all over; held in any way."""
    shape = draw(st.sampled_from([(2, 4), (4,), (1, 5), (2, 1, 4, 4)]) | st.lists(st.integers(0, 4), max_size=4).map(tuple))
    fill = draw(st.sampled_from([None, 1, 1, 0, -1, 7, 0.5, math.nan, math.inf, 1e300]))
    made = torch.arange(math.prod(shape)).reshape(shape) if fill is None else torch.tensor(fill).repeat(shape)
    with suppress(RuntimeError, TypeError, ValueError, IndexError, OverflowError):  # a holder that takes no such values
        return draw(st.sampled_from((*HOLDERS.values(), *NO_HOLDERS)))(made)
    return made


SIMPLE = st.sampled_from(NUMBERS) | st.sampled_from(TEXTS) | st.sampled_from(OBJECTS) | st.sampled_from(NO_NUMBERS[3:])
LEAVES = SIMPLE | arrays() | st.lists(st.integers(0, 3), max_size=4)
NAMES = st.sampled_from((*TEXTS, 1, None))
ODD = LEAVES | st.recursive(
    LEAVES, lambda part: st.lists(part, max_size=3) | st.tuples(part, part) | st.dictionaries(NAMES, part, max_size=3)
)
PLAIN = SIMPLE.filter(lambda x: not isinstance(x, (torch.Tensor, np.ndarray)))
"""For an option, which no array stands in the place of."""


ARRAYS = {name for name, of in ENTRIES.items() if name.split()[-1] in ("keep", "ids", "cu_seqlens", "position_ids")}
ARRAYS |= {"derive_segments attention_mask"}
"""They take nothing else than an array of numbers."""


@pytest.mark.parametrize("name", ENTRIES)
@given(ODD)
@example({1: [1], "": []})
def test_an_entry_gives_a_result_or_refuses_in_words(name, value):
    refused(lambda: ENTRIES[name](value))


@pytest.mark.parametrize("name", OPTIONS)
@given(PLAIN)
def test_so_does_an_option(name, value):
    refused(lambda: OPTIONS[name](value))


@pytest.mark.parametrize("place", PLACES)
@given(st.dictionaries(st.sampled_from(HELD), ODD, min_size=1, max_size=2))
def test_so_does_a_batch_and_a_sample_whatever_its_keys_hold(place, held):
    refused(lambda: PLACES[place](held))


@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda x: f"{type(x).__name__} {str(type(x))[:9]}")
def test_what_holds_no_numbers_is_read_nowhere(value):
    made = {name: refused(lambda name=name: ENTRIES[name](value)) for name in ENTRIES}
    for place, key in product(PLACES, {*some(HELD, 12), *chain(*READ.values())}):
        made[f"{key} {place}"] = refused(lambda: PLACES[place]({key: value}))  # noqa: B023 (called here)
    must = ARRAYS | {f"{key} {place}" for place, keys in READ.items() for key in keys}
    assert {name for name in must if made[name] is not None} == set()
    if isinstance(value, str):
        for place in PLACES:
            refused(lambda place=place: PLACES[place]({value: torch.ones(3, 4)}))


RIGHT = [ROWS.keep.long(), IDS + 1, *(torch.tensor([row]) for row in ([1, 1, 0, 1, 1], [0, 2, 5], [0, 1, 0, 1, 2], [4, 5]))]


@pytest.mark.parametrize("place", PLACES)
def test_a_key_gives_the_same_numbers_whatever_holds_them_or_is_refused(place):
    holders, keys = some([*HOLDERS], 4), dict.fromkeys((*some(HELD, 24), *READ["of a batch"]))
    for key, right in product(keys, RIGHT[2:] if "flat " in place or "sample" in place else RIGHT[:2]):
        made = {}
        for name in ("as it is", *holders):
            held = HOLDERS.get(name, torch.clone)(right)
            if "labels" in key and "float" in str(getattr(held, "dtype", "")):
                continue  # floats are targets of whole samples
            with suppress(CollateError):
                made[name] = numbers(PLACES[place]({key: held[0] if "sample" in place else held}))
            if not made:
                break
        assert {name for name, found in made.items() if found != made["as it is"]} == set(), (key, right)
        assert not made or key not in READ["of a batch"][:2] or place != "of a batch" or len(made) == 1 + len(holders), key


def numbers(made):
    """Equal for equal numbers, whatever holds them."""
    if isinstance(made, dict):
        return {key: numbers(x) for key, x in made.items()}
    if isinstance(made, (list, tuple)):
        return [numbers(x) for x in made]
    if isinstance(made, torch.Tensor):
        return made.detach().to_dense().double().tolist()
    return made.astype(float).tolist() if isinstance(made, np.ndarray) else made if isinstance(made, (int, float)) else None


# --- names of options, and the names that an option takes


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_right_call_passes_and_a_misspelt_name_is_answered_with_the_nearest(name):
    function, taken, right = SIGNATURES[name]
    function(**right)
    made = function.__init__ if isinstance(function, type) else function
    if (of := inspect.unwrap(made)) is made:
        return  # it has no options
    for each, hint in get_type_hints(of).items():
        parts = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)
        if len(each) > 3 and each in taken and "__call__" not in name:
            assert_says(f"Did you mean (.* )?{each}", function, right, each[:-1], right.get(each))
        for one in (one for part in parts if get_origin(part) is Literal for one in get_args(part)):
            if all(part is NoneType or get_origin(part) is Literal for part in parts) and each != "return":
                assert_says(f"Did you mean (.* )?{one}", function, right, each, one.swapcase())
        for one in ("no", 0, torch.tensor(False)) if hint is bool else ():
            assert_says("Pass True or False", function, right, each, one)


def assert_says(words, function, right, name, value):
    with pytest.raises(CollateError, match=f"{name}: got (.|\n)*{words}"):
        function(**{**right, name: value})


# --- offsets: the right tokens, or a refusal; and two that differ are refused

S = 16
ROW, ONE = torch.arange(1, S + 1)[None], Segments.from_lengths([S])
CUT, WHOLE_ROW = ContextParallel(2, 0, layout="document_zigzag"), ContextParallel(1, 0, layout="document_zigzag")
TELLS = BatchAdapter(needs_mask_2d=False, consumer="megatron")
OFFSETS = [key for key, rule in KEYS.items() if rule.role in ("offsets", "padded_offsets")]
OBJECTS_OF_OFFSETS = {"packed_seq_params": SimpleNamespace, "flash_attn_kwargs": dict}


def batch(key, held, **more):
    made = OBJECTS_OF_OFFSETS[key](cu_seqlens_q=held) if key in OBJECTS_OF_OFFSETS else held
    return {"input_ids": ROW, "labels": ROW, key: made, **more}


def sequences(x, segments):
    return [part.tolist() for part in per_sequence(x, segments)]


def documents(offsets):
    return [ROW[0, a:b].tolist() for a, b in pairwise(offsets) if a < b]


def outer_quarters(offsets):
    return [n for part in documents(offsets) for n in (*part[: len(part) // 4], *part[-(len(part) // 4) :])]


def inner(offsets):
    return sorted({*offsets} - {0})


def padded(key, held):
    out, segments = pad_documents(batch(key if key in OFFSETS else "cu_seqlens", held), multiple=8)
    again, twice = pad_documents(out, multiple=8)
    assert segments_from_batch(out) == segments == twice
    assert all(again[name].tolist() == out[name].tolist() for name in ("input_ids", "labels", "cu_seqlens_padded"))
    return sequences(out["labels"], segments)


def kernel_offsets(held):
    return gated_delta_kwargs(ONE, kernel="fla", padding=held)["cu_seqlens"].tolist()[1:]


WAYS = {
    "from_cu_seqlens": (lambda key, held: sequences(ROW, Segments.from_cu_seqlens(held, width=S)), documents),
    "cu_seqlens_of": (lambda key, held: cu_seqlens_of(batch("cu_seqlens", held)).tolist(), list),
    "flat_offsets": (lambda key, held: [*flat_offsets(ONE, padding=held)[1:]], inner),
    "gated_delta_kwargs": (lambda key, held: kernel_offsets(held), inner),
    "check_recurrent_split": (
        lambda key, held: check_recurrent_split(ContextParallel(2, 0), ONE, padding_free=True, offsets=held) or [S], inner
    ),
    "pad_documents": (padded, documents),
    "a batch": (lambda key, held: sequences(ROW, segments_from_batch(batch(key, held))), documents),
    "an adapter": (lambda key, held: sequences(ROW, TELLS.with_segments(batch(key, held))[1]), documents),
    "split_batch": (lambda key, held: split_batch(batch(key, held), CUT)["labels"][0].tolist(), outer_quarters),
    "split_batch, beside": (
        lambda key, held: split_batch({"labels": ROW}, CUT, cu_seqlens=held)["labels"][0].tolist(), outer_quarters
    ),
    "split_tensor": (lambda key, held: split_tensor(ROW, CUT, cu_seqlens=held)[0].tolist(), outer_quarters),
    "query_rows": (lambda key, held: (query_rows(S, CUT, held) + 1).tolist(), outer_quarters),
    "gather_sequence": (lambda key, held: gather_sequence(ROW, WHOLE_ROW, cu_seqlens=held).tolist(), lambda _: ROW.tolist()),
}  # fmt: skip
"""What each way makes of offsets, under a key where it reads one, and what is right."""
ENDS_EARLY, UNCUT = [*WAYS][:2], [*WAYS][2:5]
"""Offsets need not reach the end of the row; beside the Segments of one sequence, none may stand inside it."""
CUTS = [list(lengths) for n in range(1, 5) for lengths in product(range(0, S + 1, 4), repeat=n) if sum(lengths) == S]
OF_CUTS = st.sampled_from([[0, *accumulate(lengths)] for lengths in CUTS])
NOT_OFFSETS = st.one_of(
    st.lists(st.one_of(st.integers(-2, 10), st.sampled_from([2.5, math.nan, math.inf, 2.0**40, 2**62])), max_size=4),
    OF_CUTS.map(lambda offsets: offsets[:-1]), OF_CUTS.map(lambda offsets: offsets[1:]), OF_CUTS.flatmap(st.permutations),
    OF_CUTS.map(lambda offsets: [*offsets[:-1], offsets[-1] + 2]), st.lists(st.booleans(), max_size=3),
)  # fmt: skip
FORMS = {
    "list": list, "tuple": tuple, "array": np.array, "tensor": torch.tensor,
    "a row": lambda offsets: torch.tensor([offsets]),
    **{name: lambda offsets, name=name: torch.tensor(offsets, dtype=getattr(torch, name)) for name in ("int32", "uint8")},
    "unsigned": lambda offsets: np.array(offsets, np.uint8),
    "two rows": lambda offsets: np.array([offsets, offsets]),
    "masked": lambda offsets: np.ma.masked_array(offsets, [False] * len(offsets)),
    "bfloat16": lambda offsets: torch.tensor(offsets, dtype=torch.bfloat16),  # 351 would be 352 in it
    "float16": lambda offsets: [*np.array(offsets, np.float16)],
}  # fmt: skip
NEVER_OFFSETS = ("two rows", "masked", "bfloat16", "float16")


def legal(name, offsets, form):
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in offsets) and form not in NEVER_OFFSETS
    if not whole or len(offsets) < 2 or offsets[0] != 0 or offsets != sorted(offsets) or offsets[-1] > S:
        return False
    if name in UNCUT:
        return {*offsets} == {0, S} if name == "check_recurrent_split" else offsets[:2] == [0, S]
    return offsets[-1] == S or name in ENDS_EARLY


@pytest.mark.parametrize("name", WAYS)
@given(st.sampled_from([*OFFSETS, *OBJECTS_OF_OFFSETS]), OF_CUTS | NOT_OFFSETS, st.sampled_from(sorted(FORMS)))
@example("cu_seqlens", [0, math.inf], "list")
@example("cu_seqlens", [False, True], "tensor")
@example("cu_seqlens", [0, S], "bfloat16")
@example("cu_seqlens", [0, S], "float16")
@example("packed_seq_params", [0, 4, S], "list")
@example("flash_attn_kwargs", [0, 4, S], "tensor")
def test_offsets_give_the_right_tokens_or_are_refused(name, key, offsets, form):
    call, right = WAYS[name]
    try:
        held = FORMS[form](offsets)
    except (ValueError, TypeError, RuntimeError, OverflowError):
        return  # this container holds no such number
    if legal(name, offsets, form) and not any(n % 4 for n in offsets):
        assert call(key, held) == right(offsets)
    elif (found := refused(lambda: call(key, held))) is not None:
        flat = np.asarray(held).reshape(-1)
        read = flat.astype(int).tolist()
        assert flat.dtype != bool
        assert (flat == read).all()
        assert legal(name, read, form) or (name in ENDS_EARLY and read[0] == 0 and read == sorted(read))
        assert name in ENDS_EARLY or found == right(read)


def numbered(lengths):
    return {"input_ids": ROW, "segment_ids": Segments.from_lengths([lengths]).ids}


def offset_key(lengths, **more):
    return batch("cu_seqlens", [0, *accumulate(lengths)], **more)


SLICES = ContextParallel(2, 0, layout="contiguous")
BESIDE = {
    "segments and a key, split": lambda a, b: split_batch(offset_key(b), CUT, segments=a),
    "segments and ids, split": lambda a, b: split_batch(numbered(b), SLICES, segments=a),
    "offsets and a key, split": lambda a, b: split_batch(offset_key(b), CUT, cu_seqlens=a.cu_seqlens.tolist()),
    "gathered": lambda a, b: gather_sequence(ROW, WHOLE_ROW, a, cu_seqlens=[0, *accumulate(b)]),
    "segments and a key, padded": lambda a, b: pad_documents(offset_key(b), segments=a),
    "ids and a key, padded": lambda a, b: pad_documents(offset_key(b, segment_ids=a.ids)),
    "segments and ids, written": lambda a, b: TELLS.write(numbered(b), a),
    "lengths and a key": lambda a, b: segments_from_batch(batch("cu_seqlens", a.cu_seqlens, seq_lens=b)),
    "the longest": lambda a, b: segments_from_batch(batch("cu_seqlens", a.cu_seqlens, max_length_q=max(b))),
}


@pytest.mark.parametrize("name", BESIDE)
@given(*[st.sampled_from([lengths for lengths in CUTS if all(lengths)])] * 2)
def test_two_that_differ_are_refused(name, one, other):
    segments = Segments.from_lengths([one])
    BESIDE[name](segments, one)
    if max(other) < max(one) if name == "the longest" else one != other:
        assert refused(lambda: BESIDE[name](segments, other)) is None
