"""Bad input: every public entry, and what may stand in the place of its data.

One law: a result, or a `CollateError` of four facts, and nothing else. Where arrays are read, what holds no numbers is
refused. Then single calls, with the words of their refusals. What holds numbers: fuzz/validating.py.
"""

import inspect
from contextlib import suppress
from functools import cache, partial
from itertools import product
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from entries import ADAPTER, ARRAYS, BATCH, BESIDE, CALLS, ENTRIES, HELD, IDS, PLACES, ROWS
from rotation import some
from torch.nn.attention.bias import causal_lower_right

import collate_npu
from collate_npu import CollateError, PaddingCollator, Pattern, Segments, check_delivery, describe, wrap_collator
from collate_npu.arrays import host_array
from collate_npu.keys import Key
from collate_npu.masks import dense

pytestmark = pytest.mark.filterwarnings("ignore:collate_npu")

# --- what stands there

LONG, MOST = 100_000, 60_000
"""Characters of a text that is given, and the most that may come back, in words or in a picture."""
NO_NUMBERS = (
    *(letter * LONG for letter in ("x", "\x1b", "\U0001f600")),
    object(), "x", b"x", {1, 2}, len, type, 1j, ["a", "b"], [[1], 2], [None, 1], (x for x in (1, 2)), np.array(["a", "b"]),
    np.array([None, 1]), np.array([1j, 2]), torch.tensor([1j, 2]), np.array(["2020-01-01"], "datetime64[D]"), [{}, []],
    torch.ones(2, 4, device="meta"), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    *([] if torch.__version__.startswith("2.6.") else [causal_lower_right(3, 3)]),  # where it answers nothing, not its shape
)  # fmt: skip


@pytest.mark.parametrize("name", ENTRIES | BESIDE)
def test_a_result_or_a_refusal_in_words(name):
    wrong = []
    for value in NO_NUMBERS:
        try:
            made = (ENTRIES | BESIDE)[name](value)
        except CollateError as error:
            few = len(str(error)) <= 30 or "got" not in str(error)
            wrong += [f"{value!r:.100}: {error!s:.100}"] if few or len(str(error)) > MOST else []
        except Exception as error:
            wrong.append(f"{value!r:.100}: {type(error).__name__}: {error}"[:250])
        else:
            long = isinstance(made, str) and len(made) > MOST
            wrong += [f"{value!r:.100} is taken: {made!r:.100}"] if name in ARRAYS or long else []
    assert wrong == []


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__qualname__)
def test_a_right_call_passes_and_a_flag_is_true_or_false_and_a_name_one_of_its_names(function):
    function(**CALLS[function])
    made = inspect.unwrap(function.__init__ if isinstance(function, type) else function)
    for name, hint in get_type_hints(made).items():
        parts = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)
        if all(get_origin(part) is Literal for part in parts if part is not NoneType) and parts[0] is not NoneType:
            wrong = 7 if isinstance(get_args(parts[0])[0], int) else "nobody"
            with pytest.raises(CollateError, match=f"{name}: got .*{wrong}.* It is one of"):
                function(**{**CALLS[function], name: wrong})
    for name, one in inspect.signature(function).parameters.items():
        for said in ("no", 0, torch.tensor(False)) if one.annotation == "bool" else ():
            with pytest.raises(CollateError, match=f"{name}: got an? .* Pass True or False"):
                function(**{**CALLS[function], name: said})


HOLDERS = {
    "numpy": lambda x: x.numpy(),
    "lists": lambda x: x.tolist(),
    "tuples": lambda x: tuple(map(tuple, x.tolist())),
    "sparse": lambda x: x.to_sparse(),
    "requires grad": lambda x: x.float().requires_grad_(),
    "not contiguous": lambda x: x.t().contiguous().t(),
    "expanded": lambda x: x[:, :, None].expand(*x.shape, 2)[..., 0],
    **{name: lambda x, name=name: x.numpy().astype(name) for name in ("uint64", "longdouble", ">i4")},
    "places in another order": lambda x: x.numpy()[:, ::-1].copy()[:, ::-1],
    **{name: lambda x, name=name: x.to(getattr(torch, name)) for name in ("uint8", "uint16", "float8_e4m3fn", "bfloat16")},
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_whatever_holds_numbers_is_read(holder):
    held, expected = holder(ROWS.keep.long()), Segments.from_keep(ROWS.keep)
    assert Segments.from_keep(held) == collate_npu.derive_segments(held) == expected
    for key in ("attention_mask", "attention_mask_2d"):
        assert ADAPTER.with_segments({"input_ids": IDS, key: held})[1] == expected


RIGHT = [ROWS.keep.long(), IDS + 1, *(torch.tensor([row]) for row in ([1, 1, 0, 1, 1], [0, 2, 5], [0, 1, 0, 1, 2], [4, 5]))]


@pytest.mark.parametrize("place", PLACES)
def test_a_key_gives_the_same_numbers_whatever_holds_them_or_is_refused(place):
    wrong = []
    for key, right in product(HELD, RIGHT[2:] if "flat " in place or "sample" in place else RIGHT[:2]):
        made = {}
        for name in ("as it is", *some([*HOLDERS], 4)):
            held = HOLDERS.get(name, torch.clone)(right)
            targets = "labels" in key and "float" in str(getattr(held, "dtype", ""))
            with suppress(CollateError):
                made[name] = numbers(PLACES[place]({key: held[0] if "sample" in place else held})) if not targets else None
            if not made:
                break
        wrong += [(key, right, name) for name, found in made.items() if found not in (None, made["as it is"])]
    assert wrong == []


def numbers(made):
    """The same for equal numbers, whatever holds them."""
    if isinstance(made, dict):
        return {key: numbers(x) for key, x in made.items()}
    try:
        return np.asarray(host_array("", made), float).tolist()
    except CollateError:
        return [numbers(x) for x in made] if isinstance(made, list) else None


# --- single calls


def collate(features, **settings):
    return PaddingCollator(**{"pad_token_id": 0, **settings})(features)


def one(**keys):
    return collate([{"input_ids": [1, 2], **keys}])


def series(*rows):
    return pytest.importorskip("pandas").Series(list(rows))


WIDE = torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.int64), torch.ones(1), (1 << 20, 1 << 20))
META, HUGE, TOO_WIDE = torch.ones(2, dtype=torch.int64, device="meta"), 1 << 60, "2147483647"
HUGE_WIDTHS = [{"padding": "max_length", "max_length": HUGE}, {"pad_to_multiple_of": HUGE}, {"padding": (HUGE,)}]
HUGE_WIDTHS += [{"padding_free": True, "pad_to_multiple_of": HUGE}]
REFUSED = [
    (lambda: collate(series([1, 2])), "Pass a list of samples"),
    (lambda: collate([{"input_ids": series(1, 2)}]), "is a list, array or tensor"),
    (lambda: collate([{"input_ids": META}]), "without values"),
    (lambda: collate([{"tokens": [1, 2]}]), "Rename the column to input_ids"),
    (lambda: collate([{"input_ids": [1] * 3, "attention_mask": [1, 2, 1]}], padding_free=True), "return"),
    (lambda: one(seq_lengths=[1 << 62] * 4 + [2]), "sum to its number of input_ids"),
    (lambda: one(pixel_values="x"), "pixel_values: got a str"),
    (lambda: one(pixel_values=[[1], [1, 2]]), "unequal length"),
    *((partial(collate, [{"input_ids": [1, 2]}], **widths), TOO_WIDE) for widths in HUGE_WIDTHS),
    (lambda: collate([{"input_ids": [1]}, {"input_ids": [1, 2]}], pad_token_id=1 << 70), "2**63"),
    (lambda: Segments(torch.tensor([[1, 3]])), "row 0: got ids [1, 3]"),
    (lambda: Segments(torch.tensor([[1, 1], [2, 1]])), "row 1: got ids [2, 1]"),
    (lambda: Segments(torch.tensor([[1, 2, 0, 1], [1, 2, 0, 2]])), "1 bad row.\n  row 0: got ids [1, 2, 0, 1]"),
    (lambda: Segments(torch.tensor([[1.0, 1.0]])), "segment ids: got float32 [1, 2]"),
    (lambda: Segments(torch.tensor([1, 1])), "segment ids: got int64 [2]"),
    (lambda: Segments.from_ids([[1, 2, 1], [1, 1, 1], [5, 0, 3]][:2]), "row 0: got ids [1, 2, 1]"),
    (lambda: Segments.from_ids([[0, 0, -1], [0, 1, 1]]), "1 bad row.\n  row 0: got the id -1"),
    (lambda: Segments.from_lengths([3, -1]), "row 1: got lengths [-1]"),
    (lambda: Segments.from_lengths([3, 9, [4, 4]], width=7), "row 1: got lengths [9]\n  row 2: got lengths [4, 4]"),
    (lambda: Segments.from_keep([[1, 2]]), "Segments.from_ids"),
    (lambda: Segments.from_keep([[0.5, 1.0]]), "keep: got float64 [1, 2] with values 0.5, 1.0"),
    (lambda: Segments.from_keep([1, 0]), "keep: got int64 [2]"),
    (lambda: Segments.from_cu_seqlens([3, 8]), "no leading 0"),
    (lambda: Segments.from_cu_seqlens([[-1]]), "cu_seqlens: got [-1]"),
    (lambda: Segments.from_lengths(np.ones((1, 2, 2), int)), "lengths: got int64 [1, 2, 2]"),
    (lambda: Segments.from_cu_seqlens([0, 9], width=8), "row 0: got lengths [9]"),
    (lambda: Segments.from_position_ids([0, 1, 2]), "position_ids: got int64 [3]"),
    (lambda: Pattern.of("sliding"), "Pattern.sliding(window)"),
    (lambda: Pattern.of("Causal"), "'Causal'"),
    (lambda: Pattern.sliding(0), "window: got 0"),
    (lambda: Pattern.chunked(-1), "chunk size: got -1"),
    (lambda: Pattern.prefix(-1), "prefix: got [-1]"),
    (lambda: Pattern.prefix([]), "prefix: got []"),
    (lambda: Segments.from_lengths([HUGE]), TOO_WIDE),
    (lambda: Segments.from_ids(np.array([[1, 1 << 63]], np.uint64)), "It wrapped around"),
    (lambda: Segments.from_lengths([1], width=HUGE), TOO_WIDE),
    (lambda: Segments.from_cu_seqlens([0, HUGE]), TOO_WIDE),
    (lambda: Key(kind="tokenz"), "Key.kind: got 'tokenz'"),
    (lambda: dense(ROWS, dtype=torch.float8_e5m2), "float of 16 bits or more"),
    (lambda: dense(ROWS, polarity="bias", dtype=torch.int64), "A bias is added to scores"),
    *((partial(describe, x), "A batch is a dict") for x in (None, "text")),
    (lambda: describe([BATCH]), "batch: got a list"),
    (lambda: ADAPTER({**BATCH, "labels": IDS.byte()}), "learned at padding, the first at place"),
    (lambda: wrap_collator(lambda features: {**BATCH, "labels": IDS.bool()})([]), "masked_fill"),
    (lambda: describe(IDS), "picture draws a mask alone"),
    (lambda: describe({"input_ids": WIDE}), TOO_WIDE),
    (lambda: PaddingCollator(padding_free=True, pad_to_multiple_of=8), "pad_token_id: got None"),
    *((partial(PaddingCollator, pad_token_id=0, **settings), "")
      for settings in ({"padding": ()}, {"padding": (0, 8)}, {"padding": (8, "16")}, {"padding": "max_length"},
                       {"padding": 8}, {"model": "Qwen/Qwen3"})),
    (lambda: collate([{"input_ids": [1]}, {"input_ids": [1, 2]}], padding=False), "padding=False takes rows of one length"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_it_is_refused_in_words(call, words):
    with pytest.raises(CollateError) as refusal:
        call()
    assert words in str(refusal.value)


def test_what_stands_close_to_it_is_read():
    rows = [{"input_ids": [1, 2, 3], "attention_mask": [7, 7, 2 * 10**9]}, {"input_ids": [4, 5], "attention_mask": [9, 1]}]
    assert collate([dict(row) for row in rows], padding_free=True)["cu_seq_lens_q"].tolist() == [0, 2, 3, 4, 5]
    assert collate(rows)["segment_ids"].tolist() == [[1, 1, 2], [1, 2, 0]]
    assert collate({"input_ids": torch.nested.nested_tensor([IDS[0], IDS[1, :2]])})["input_ids"].shape == (2, 4)
    assert one(lengths=1 << 70)["lengths"] == [1 << 70]
    assert ADAPTER({**BATCH, "mine": (hashes := np.full(2, 2**64 - 1, np.uint64))})["mine"] is hashes
    assert PaddingCollator(pad_token_id=np.int64(0), max_length=torch.tensor(4))([{"input_ids": (1, 2)}])
    assert Segments.from_lengths(np.array([2, 3])) == Segments.from_lengths(torch.tensor([2, 3]))
    assert Segments.from_lengths([np.array([1, 2]), [3]]).lengths == ((1, 2), (3,))
    assert collate_npu.ContextParallel(np.int64(2), 0).multiple == 4


# --- with a model


@cache
def model():
    pytest.importorskip("transformers")
    from collate_npu.testing import tiny_model

    return tiny_model("llama", vocab_size=16)


def proved(collator=PaddingCollator(pad_token_id=0, attention_mask="2d"), samples=((1, 2), (3,)), **settings):  # noqa: B008
    from collate_npu.testing import assert_padding_invariant

    assert_padding_invariant(settings.pop("of", model()), collator, samples, **settings)


PROVED = {
    **{f"delivery of {x!r}": (lambda x=x: check_delivery(model(), x), "batch: got a") for x in (None, [1])},
    "no collator": (lambda: proved(None), "a NoneType"),
    "samples of text": (lambda: proved(samples="ab"), "samples: got a str"),
    "an id too large": (lambda: proved(samples=[[1, 99], [3]]), "token id 99. This model has ids 0 to 15"),
    "an id below 0": (lambda: proved(samples=[[1, -5], [3]]), "token id -5"),
    "a tolerance that is no number": (lambda: proved(tolerance=float("nan")), "An error is 0 or more"),
}


@pytest.mark.models
@pytest.mark.parametrize("name", PROVED)
def test_so_is_what_cannot_be_proved(name):
    model()
    test_it_is_refused_in_words(*PROVED[name])
