"""Bad input: every public entry, and what may stand in the place of each of its arguments.

One law: a result, or a `CollateError` of four facts, and nothing else. Where arrays are read, what holds no numbers is
refused, and of what is read nothing that comes out is NaN. Then single calls, with the words of their refusals.
"""

import inspect
from functools import cache, partial
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

from collate_npu import (
    BatchAdapter,
    CollateError,
    ContextParallel,
    PaddingCollator,
    Pattern,
    Segments,
    check_delivery,
    derive_segments,
    describe,
    guard_first_batch,
    outputs,
    split_batch,
    wrap_collator,
)
from collate_npu.collate import BalancedBatchSampler, Layout, collators, lengths_of, loss_weights
from collate_npu.kernels import check, fusion_attention, gated_delta
from collate_npu.keys import KEYS, TOKENS, Key
from collate_npu.masks import block_mask, dense, mask_mod, none_is_exact, segments_from_batch, varlen
from collate_npu.parallel import (
    check_recurrent_split,
    gather_sequence,
    join_shards,
    pad_documents,
    query_rows,
    split_tensor,
    token_rows,
)
from collate_npu.tools.show import picture

pytestmark = pytest.mark.filterwarnings("ignore:collate_npu")

# --- entries

ROWS, FLAT, ONE_ROW = Segments.from_lengths([4, 2]), Segments.from_lengths([[2, 3]]), Segments([[1, 1, 2, 0]])
IDS, ALONE, CP = torch.tensor([[1, 2, 3, 7], [4, 5, 0, 0]]), ContextParallel(1, 0), ContextParallel(2, 1)
BATCH = {"input_ids": IDS, "attention_mask_2d": ROWS.keep, "labels": IDS.masked_fill(~ROWS.keep, -100)}
FLAT_BATCH = {"input_ids": torch.ones(1, 5, dtype=torch.int64), "cu_seq_lens_q": torch.tensor([0, 2, 5])}
FEATURES = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]
ADAPTER = BatchAdapter(needs_mask_2d=True, consumer="megatron")
READERS = (ADAPTER, BatchAdapter(needs_mask_2d=False, consumer="transformers"))
COLLATORS = tuple(
    PaddingCollator(keys={**KEYS, "weights": TOKENS}, **how)
    for how in ({"pad_token_id": 7, "padding_side": "left"}, {"padding_free": True})
)
FLAT_MASK = fusion_attention.fusion_attention_kwargs(FLAT) | {"scale": 0.5}
OFFSETS = {"offsets": [0, 3, 5], "chunk_size": 64}
CALLS = {
    fusion_attention.choose_form: {"segments": FLAT},
    fusion_attention.fusion_attention_kwargs: {"segments": ROWS},
    fusion_attention.triangle: {},
    fusion_attention.prefix_triangle: {},
    gated_delta.gated_delta_kwargs: {"segments": ONE_ROW, "kernel": "fla"},
    gated_delta.flat_offsets: {"segments": FLAT},
    gated_delta.chunk_indices: OFFSETS,
    gated_delta.chunk_offsets: OFFSETS,
    gated_delta.zero_padding: {"hidden": torch.ones(2, 4, 3), "segments": ROWS},
    check.check_call: {"name": "fla.chunk_gated_delta_rule", "arguments": {"q": torch.ones(1, 5, 2, 4)}},
    outputs.unpad: {"x": IDS, "segments": ROWS},
    outputs.repad: {"y": torch.ones(6), "segments": ROWS, "fill": 0},
    outputs.last_token: {"x": IDS, "segments": ROWS},
    outputs.per_sequence: {"x": IDS, "segments": ROWS},
    outputs.to_nested: {"x": IDS, "segments": ROWS},
    outputs.shift_labels: {"labels": IDS, "segments": ROWS, "steps": 1, "ignore_index": -100},
    outputs.ignore_first_labels: {"labels": IDS, "segments": ROWS, "ignore_index": -100},
    dense: {"segments": ROWS, "polarity": "keep", "pattern": "causal", "max_mask_bytes": 1 << 20, "rows": [0],
            "dtype": None, "device": "cpu"},
    block_mask: {"segments": ROWS, "pattern": "causal", "max_mask_bytes": 1 << 20, "block_size": 128, "device": "cpu"},
    mask_mod: {"segments": ROWS, "pattern": "causal", "device": "cpu"},
    none_is_exact: {"segments": ROWS},
    varlen: {"segments": FLAT, "keep_tail": False},
    derive_segments: {"attention_mask": dense(ROWS), "polarity": "keep", "prove": True, "keep": ROWS.keep, "batch_size": 2},
    segments_from_batch: {"batch": BATCH, "padding_free": False},
    split_batch: {"batch": {"input_ids": IDS}, "cp": CP, "segments": ROWS, "keys": KEYS},
    split_tensor: {"x": IDS, "cp": CP, "dim": 1},
    gather_sequence: {"output": IDS, "cp": ALONE, "segments": ROWS, "dim": 1, "loss": "same"},
    join_shards: {"shards": [IDS], "cp": ALONE, "dim": 1},
    pad_documents: {"batch": FLAT_BATCH, "cp": ALONE, "multiple": 4, "segments": FLAT, "pad_token_id": 0, "keys": KEYS},
    token_rows: {"width": 4, "cp": CP},
    query_rows: {"width": 4, "cp": CP},
    check_recurrent_split: {"cp": ALONE, "scheme": "head_exchange_zigzag", "segments": ROWS, "padding_free": False},
    ContextParallel: {"size": 2, "rank": 0, "layout": "zigzag", "mask_2d": "local", "block": 1, "tensor_parallel": 1},
    ADAPTER.__call__: {"batch": BATCH},
    ADAPTER.render: {"batch": {"input_ids": IDS}, "segments": ROWS, "padding_free": False},
    BatchAdapter: {"needs_mask_2d": True, "consumer": "megatron", "padding_free": False, "labels_shifted": None,
                   "pattern": None, "polarity": None, "context_parallel": None, "model_type": None, "keys": KEYS},
    PaddingCollator: {"pad_token_id": 0, "padding": True, "padding_free": False, "label_pad_token_id": -100,
                      "padding_side": "left", "max_length": 8, "pattern": "causal", "pad_to_multiple_of": 2,
                      "attention_mask": "auto", "packing": False, "layout": Layout(), "keys": KEYS},
    wrap_collator: {"inner": lambda rows: {}, "padding_free": False, "polarity": None},
    Layout: {"separator_id": -100, "allow_empty": False, "labels_shifted": False, "max_sequences": None,
             "sequence_multiple": None},
    Segments.from_lengths: {"lengths": [1], "width": 3},
    Segments.from_cu_seqlens: {"cu_seqlens": [0, 3], "width": 3},
    Segments.from_keep: {"keep": ROWS.keep},
    Segments.from_ids: {"ids": ROWS.ids},
    Segments.from_position_ids: {"position_ids": ROWS.position_ids},
    Segments: {"ids": ROWS.ids},
    Pattern.sliding: {"window": 2},
    Pattern.chunked: {"size": 2},
    Pattern.prefix: {"lengths": 2},
    BalancedBatchSampler: {"lengths": [1, 2], "max_tokens": 3, "pack": True, "shuffle": False, "drop_last": False},
    lengths_of: {"dataset": [{"input_ids": [1]}]},
    loss_weights: {"batches": [{"labels": [[1, 2]]}]},
}  # fmt: skip
KERNELS = [
    function for function in CALLS if "gated_delta" in function.__module__ or "fusion_attention" in function.__module__
]
"""Of these every argument, those with a default too."""


def sample(key, x):
    return [collator([{**feature, key: x} for feature in FEATURES]) for collator in COLLATORS]


def batch(key, x):
    return [adapter({**BATCH, key: x}) for adapter in READERS]


SAMPLE = ("input_ids", "attention_mask", "seq_lengths", "labels", "position_ids", "weights")
BESIDE = ("attention_mask", "attention_mask_2d", "segment_ids", "cu_seq_lens_q", "labels", "position_ids", "loss_mask")
ENTRIES = {
    **{f"sample {key}": partial(sample, key) for key in SAMPLE},
    **{f"batch {key}": partial(batch, key) for key in (*BESIDE, "input_ids", "max_length_q", "seq_lens")},
    **{
        f"split {key}": lambda x, key=key: split_batch({**BATCH, key: x}, CP)
        for key in ("mine", "attention_mask", "labels", "cu_seqlens")
    },
    "a key described": lambda x: describe({**BATCH, "note": x}),
    "ids described": lambda x: describe({"input_ids": x}),
    "features": COLLATORS[0],
    "a sample": lambda x: COLLATORS[0]([FEATURES[0], x]),
    "an inner batch": lambda x: wrap_collator(lambda features: x)(FEATURES),
    "an inner mask": lambda x: wrap_collator(lambda f: {"input_ids": IDS, "attention_mask": x})([]),
    "a shard": lambda x: join_shards([split_tensor(IDS, CP), x], CP),
    "physical offsets": lambda x: gated_delta.gated_delta_kwargs(ONE_ROW, kernel="fla", padding=x),
    "documents": lambda x: split_tensor(IDS[:1], ContextParallel(2, 0, layout="document_zigzag"), cu_seqlens=x),
    **{
        f"a text {where}": lambda x, call=call: call(x) if isinstance(x, str) else None
        for where, call in {
            "for a key, described": lambda text: describe({**BATCH, text: 1}),
            "for a key, split": lambda text: split_batch({**BATCH, text: torch.ones(3, 4)}, CP),
            "for a key of a sample": lambda text: COLLATORS[0]([{**FEATURES[0], text: [1]}]),
            "for a key of an inner batch": lambda text: wrap_collator(lambda features: {text: 1})(FEATURES),
        }.items()
    },
    **{
        f"{function.__qualname__} {name}": lambda x, function=function, name=name: function(**{**CALLS[function], name: x})
        for function, right in CALLS.items()
        for name in (inspect.signature(function).parameters if function in KERNELS else right)
    },
}
ARRAYS = {*(f"sample {key}" for key in SAMPLE[:3]), *(f"batch {key}" for key in BESIDE[:4])}
ARRAYS |= {"features", "a sample", "an inner batch", "an inner mask", "a shard", "physical offsets"}
ARRAYS |= {"derive_segments attention_mask", "derive_segments keep", "BatchAdapter.__call__ batch", "split_batch batch"}
ARRAYS |= {f"Segments.from_{way}" for way in ("keep keep", "ids ids", "cu_seqlens cu_seqlens", "position_ids position_ids")}
ARRAYS |= {"Segments ids"}
"""Where arrays are read."""

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
ODD = (
    None, True, 3, -1, 0, 2.5, float("nan"), float("inf"), 1 << 70, 1 << 60, -(1 << 63), [], [[]], {}, (), [1, 2], range(3),
    [[1, 2, 3, 4]], [[1, 0, 1, 0], [0, 0, 0, 0]], [[2, 1, 2, 0], [1, 1, 1, 1]], [[1, 2], [3]], {"input_ids": [1]},
    np.zeros((0, 4)), np.float32(2), np.int8(-3), np.array(3), np.arange(8).reshape(2, 4)[:, ::-1], np.array([1, 2], ">i4"),
    np.full((2, 4), 2**64 - 1, np.uint64), np.array([(1, 2)], [("a", int), ("b", int)]), np.ma.masked_array([1, 2], [0, 1]),
    np.array([[True], [False]]), torch.tensor(2), torch.tensor(torch.nan), torch.full((2, 4), 0.5), torch.empty(0),
    *(torch.full(shape, value) for shape in ((2, 4), (2, 1, 4, 4)) for value in (torch.nan, torch.inf, -torch.inf)),
    *(torch.ones(shape) for shape in ((5, 4), (2, 1, 4, 4), (2, 1, 3, 4), (2, 4, 4, 4, 4))), torch.ones(2, 4).to_sparse(),
    ROWS.keep & False, -torch.ones(2, 4).char(), torch.ones(4, 2).T, torch.ones(2, 4, requires_grad=True),
    torch.arange(9)[::2], torch.Size((2, 4)), memoryview(b"ab"), [torch.tensor(1), torch.ones(2)], IDS.to(torch.float8_e5m2),
    [FEATURES], "front", torch.int64, Segments.from_lengths([7]), Pattern.sliding(2),
)  # fmt: skip


def leaves(made):
    """Floats that came out."""
    if isinstance(made, dict):
        made = list(made.values())
    if isinstance(made, (list, tuple)):
        return [each for part in made for each in leaves(part)]
    plain = isinstance(made, torch.Tensor) and made.is_floating_point() and made.layout is torch.strided
    return [made.detach().float()] if plain and not (made.is_nested or made.is_meta) else []


@pytest.mark.parametrize("name", ENTRIES)
def test_a_result_or_a_refusal_in_words(name):
    wrong = []
    for value in (*NO_NUMBERS, *ODD):
        never = any(value is each for each in NO_NUMBERS) and name in ARRAYS
        try:
            made = ENTRIES[name](value)
        except CollateError as error:
            few = len(str(error)) <= 30 or "got" not in str(error) + "bad row"
            wrong += [f"{value!r:.100}: {error!s:.100}"] if few or len(str(error)) > MOST else []
        except Exception as error:
            wrong.append(f"{value!r:.100}: {type(error).__name__}: {error}"[:250])
        else:
            nan = name in ARRAYS and any(x.isnan().any() for x in leaves(made))
            long = isinstance(made, str) and len(made) > MOST
            wrong += [f"{value!r:.100} is taken: {made!r:.100}"] if never or nan or long else []
    assert wrong == []


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__qualname__)
def test_a_right_call_passes_and_a_flag_is_true_or_false_and_a_name_one_of_its_names(function):
    function(**CALLS[function])
    made = inspect.unwrap(function.__init__ if isinstance(function, type) else function)
    hints = get_type_hints(made, localns=vars(collators))  # which a dataclass of another module names, too
    for name, hint in hints.items():
        parts = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)
        if all(get_origin(part) is Literal for part in parts if part is not NoneType) and parts[0] is not NoneType:
            wrong = 7 if isinstance(get_args(parts[0])[0], int) else "nobody"
            with pytest.raises(CollateError, match=f"{name}: got .*{wrong}.* It is one of"):
                function(**{**CALLS[function], name: wrong})
    for name, one in inspect.signature(function).parameters.items():
        for said in ("no", 0, torch.tensor(False)) if one.annotation == "bool" else ():
            with pytest.raises(CollateError, match=f"{name}: got an? .* takes True or False"):
                function(**{**CALLS[function], name: said})


def test_every_public_function_that_takes_segments_is_an_entry():
    rooms = (outputs, fusion_attention, gated_delta)
    held = {name for room in rooms for name, one in vars(room).items() if hasattr(one, "__wrapped__")}
    judges = {"reference_fusion_attention", "reference_gated_delta_rule"}
    judges |= {"reference_causal_conv1d"}  # torch refuses loudly
    assert held - {function.__name__ for function in CALLS} == judges


HOLDERS = {
    "numpy": lambda x: x.numpy(),
    "lists": lambda x: x.tolist(),
    "tuples": lambda x: tuple(map(tuple, x.tolist())),
    "sparse": lambda x: x.to_sparse(),
    "requires grad": lambda x: x.float().requires_grad_(),
    "not contiguous": lambda x: x.t().contiguous().t(),
    "expanded": lambda x: x[:, :, None].expand(*x.shape, 2)[..., 0],
    "uint64": lambda x: x.numpy().astype(np.uint64),
    "bytes in another order": lambda x: x.numpy().astype(">i4"),
    "places in another order": lambda x: x.numpy()[:, ::-1].copy()[:, ::-1],
    **{name: lambda x, name=name: x.to(getattr(torch, name)) for name in ("uint8", "uint16", "float8_e4m3fn", "bfloat16")},
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_whatever_holds_numbers_is_read(holder):
    held, expected = holder(ROWS.keep.long()), Segments.from_keep(ROWS.keep)
    assert Segments.from_keep(held) == derive_segments(held) == expected
    for key in ("attention_mask", "attention_mask_2d"):
        assert ADAPTER.with_segments({"input_ids": IDS, key: held})[1] == expected


# --- single calls


def collate(features, **settings):
    return PaddingCollator(**{"pad_token_id": 0, **settings})(features)


def one(**keys):
    return collate([{"input_ids": [1, 2], **keys}])


class Produced:
    """Something that says it speaks Arrow's C interface."""

    def __init__(self, made):
        self.made = made

    def __arrow_c_stream__(self, requested_schema=None):
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


def series(*rows):
    return pytest.importorskip("pandas").Series(list(rows))


WIDE = torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.int64), torch.ones(1), (1 << 20, 1 << 20))
META, HUGE, PLACES = torch.ones(2, dtype=torch.int64, device="meta"), 1 << 60, "2147483647"
HUGE_WIDTHS = (
    {"padding": "max_length", "max_length": HUGE},
    {"pad_to_multiple_of": HUGE},
    {"padding_free": True, "pad_to_multiple_of": HUGE},
    {"padding": (HUGE,)},
    {"padding_free": True, "layout": Layout(max_sequences=HUGE)},
)
REFUSED = [
    (lambda: collate(Produced(3)), "cannot be read ("),
    (lambda: collate(series([1, 2])), "cannot be read"),
    (lambda: collate([{"input_ids": series(1, 2)}]), "is a list, array or tensor"),
    (lambda: collate({"input_ids": META, "seq_lengths": [2]}), "without values"),
    (lambda: collate([{"tokens": [1, 2]}]), "Rename the column to input_ids"),
    (lambda: collate([{"input_ids": [1] * 3, "attention_mask": [1, 2, 1]}], padding_free=True), "return"),
    (lambda: one(seq_lengths=[1 << 62] * 4 + [2]), "sum to its number of input_ids"),
    (lambda: one(labels={"class": 3}), "row 0: got a dict"),
    (lambda: one(pixel_values="x"), "pixel_values: got a str"),
    (lambda: one(pixel_values=[[1], [1, 2]]), "unequal length"),
    *((partial(collate, [{"input_ids": [1, 2]}], **widths), PLACES) for widths in HUGE_WIDTHS),
    (lambda: collate([{"input_ids": [1]}, {"input_ids": [1, 2]}], pad_token_id=1 << 70), "2**63"),
    (lambda: Segments.from_lengths([HUGE]), PLACES),
    (lambda: Segments.from_ids(np.array([[1, 1 << 63]], np.uint64)), "It wrapped around"),
    (lambda: Segments.from_lengths([1], width=HUGE), PLACES),
    (lambda: Segments.from_cu_seqlens([0, HUGE]), PLACES),
    (lambda: Key(kind="tokenz"), "Key.kind: got 'tokenz'"),
    (lambda: dense(ROWS, dtype=torch.float8_e5m2), "float of 16 bits or more"),
    (lambda: dense(ROWS, polarity="bias", dtype=torch.int64), "A bias is added to scores"),
    (lambda: gated_delta.chunk_indices([0, 1 << 30], 1), "A table has at most"),
    (lambda: check.call_breaches("fla", {}, B=1, T=1, versions={"flaa": "0.5.2"}), "Did you mean fla"),
    *((partial(describe, x), "A batch is a dict") for x in (None, "text")),
    (lambda: describe([BATCH]), "batch: got a list"),
    (lambda: describe(IDS), "picture draws a mask alone"),
    (lambda: describe({"input_ids": WIDE}), PLACES),
    (lambda: picture(BATCH, row=9), "The rows are 0 to 1"),
    (lambda: picture(ROWS, row=-1), "row: got -1"),
    (lambda: PaddingCollator(padding_free=True, pad_to_multiple_of=8), "pad_token_id: got None"),
    *((partial(PaddingCollator, pad_token_id=0, **settings), "")
      for settings in ({"padding": ()}, {"padding": (0, 8)}, {"padding": (8, "16")}, {"padding": "max_length"},
                       {"padding": 8}, {"layout": Layout(sequence_multiple=4)}, {"layout": Layout(max_sequences=4)},
                       {"packing": True, "layout": Layout(sequence_multiple=4)}, {"model": "Qwen/Qwen3"})),
    (lambda: collate([{"input_ids": [1]}, {"input_ids": [1, 2]}], padding=False), "padding=False takes rows of one length"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_it_is_refused_in_words(call, words):
    with pytest.raises(CollateError) as refusal:
        call()
    assert words in str(refusal.value)


def test_what_stands_close_to_it_is_read():
    rows = [
        {"input_ids": [1, 2, 3], "attention_mask": [7, 7, 2_000_000_000]},
        {"input_ids": [4, 5], "attention_mask": [9, 1]},
    ]
    assert collate([dict(row) for row in rows], padding_free=True)["cu_seq_lens_q"].tolist() == [0, 2, 3, 4, 5]
    assert collate(rows)["segment_ids"].tolist() == [[1, 1, 2], [1, 2, 0]]
    assert collate({"input_ids": torch.nested.nested_tensor([IDS[0], IDS[1, :2]])})["input_ids"].shape == (2, 4)
    assert one(lengths=1 << 70)["lengths"] == [1 << 70]
    assert PaddingCollator(pad_token_id=np.int64(0), max_length=torch.tensor(4))([{"input_ids": (1, 2)}])
    assert Segments.from_lengths(np.array([2, 3])) == Segments.from_lengths(torch.tensor([2, 3]))
    assert Segments.from_lengths([np.array([1, 2]), [3]]).lengths == ((1, 2), (3,))
    assert ContextParallel(np.int64(2), 0).multiple == 4


# --- with a model


@cache
def model():
    pytest.importorskip("transformers")
    from collate_npu.testing import tiny_model

    return tiny_model("llama", vocab_size=16)


def proved(collator=PaddingCollator(pad_token_id=0, attention_mask="2d"), samples=((1, 2), (3,)), **settings):  # noqa: B008
    from collate_npu.testing import assert_padding_invariant

    assert_padding_invariant(settings.pop("of", model()), collator, samples, **settings)


SETTINGS = {"segments": IDS, "context_parallel": 2, "pattern": 3, "forward": 3}
PROVED = {
    **{f"delivery of {x!r}": (lambda x=x: check_delivery(model(), x), "batch: got a") for x in (None, [1])},
    **{
        f"guard {name}": (lambda name=name, odd=odd: guard_first_batch(model(), **{name: odd}), f"{name}: got a")
        for name, odd in SETTINGS.items()
    },
    **{
        f"delivery {name}": (lambda name=name: check_delivery(model(), BATCH, **{name: SETTINGS[name]}), f"{name}: got a")
        for name in ("segments", "context_parallel", "forward")
    },
    "a guard that reports to a number": (lambda: guard_first_batch(model(), report=3), "report: got an int"),
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
