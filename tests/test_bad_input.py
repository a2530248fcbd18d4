"""Bad input, one table: the call, and words of its refusal. Nothing raw, nothing believed, and no memory asked for."""

from functools import cache, partial

import numpy as np
import pytest
import torch
from typed import typed

from collate_npu import CollateError, PaddingCollator, Segments, check_delivery, describe, guard_first_batch
from collate_npu.kernels.gated_delta import gated_delta_breaches
from collate_npu.keys import Key
from collate_npu.tools.show import picture

pytestmark = pytest.mark.filterwarnings("ignore:collate_npu")


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


def twice():
    pyarrow = pytest.importorskip("pyarrow")
    return collate(pyarrow.table([pyarrow.array([[1, 2]]), pyarrow.array([[3, 4]])], names=["input_ids", "input_ids"]))


def series(*rows):
    return pytest.importorskip("pandas").Series(list(rows))


def nested_lists(depth):
    made = []
    for _ in range(depth):
        made = [made]
    return made


IDS = torch.tensor([[1, 2, 3], [4, 5, 0]])
OK = {"input_ids": IDS, "attention_mask": (IDS > 0).long()}
STRIDED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
WIDE = torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.int64), torch.ones(1), (1 << 20, 1 << 20))
META = torch.ones(2, dtype=torch.int64, device="meta")
HUGE = 1 << 60
PLACES = "at most 2147483647 places"

REFUSED = {
    "a column twice": (twice, "input_ids more than once"),
    "a producer that raises": (lambda: collate(Produced(RuntimeError("no disk"))), "RuntimeError: no disk"),
    "a capsule that is none": (lambda: collate(Produced(3)), "cannot be read (ValueError"),
    "a series": (lambda: collate(series([1, 2])), "cannot be read"),
    "rows of series": (lambda: collate([{"input_ids": series(1, 2)}]), "is a list, array or tensor"),
    "ids on meta": (lambda: collate([{"input_ids": META}]), "without values"),
    "flat ids on meta": (lambda: collate({"input_ids": META, "seq_lengths": [2]}), "without values"),
    "labels on meta": (lambda: one(labels=META), "without values"),
    "a nested row": (lambda: collate([{"input_ids": STRIDED}]), "nested"),
    "true ids": (lambda: collate([{"input_ids": [1]}, {"input_ids": [True]}]), "row 1: got values that are true or false"),
    "true ids of an array": (lambda: collate([{"input_ids": np.array([True])}]), "true or false"),
    "tokens": (lambda: collate([{"tokens": [1, 2]}]), "Rename the column to input_ids"),
    "ids that come back": (
        lambda: collate([{"input_ids": [1] * 3, "attention_mask": [1, 2, 1]}], padding_free=True),
        "back",
    ),
    "lengths as text": (lambda: one(seq_lengths="ab"), "seq_lengths: got a str"),
    "lengths that wrap": (lambda: one(seq_lengths=[1 << 62] * 4 + [2]), "sum to its number of input_ids"),
    "lengths in lists": (lambda: one(seq_lengths=[[1], [1]]), "sum to its number of input_ids"),
    "ragged axes": (lambda: one(position_ids=[[1, 2], [1]]), "unequal length"),
    "ragged labels": (lambda: one(labels=[[1], [2, 3]]), "labels"),
    "deep labels": (lambda: one(labels=nested_lists(99)), "labels"),
    "a label of two kinds": (lambda: one(labels={1, 2}), "row 0: got a set"),
    "a label by its name": (lambda: one(labels={"class": 3}), "row 0: got a dict"),
    "targets of two sizes": (
        lambda: collate([{"input_ids": [1], "labels": [0.5] * n} for n in (2, 3)]),
        "one number for each",
    ),
    "pixels of text": (lambda: one(pixel_values="x"), "pixel_values: got a str"),
    "ragged pixels": (lambda: one(pixel_values=[[1], [1, 2]]), "unequal length"),
    **{
        f"{name} of 2**60": (partial(collate, [{"input_ids": [1, 2]}], **settings), PLACES)
        for name, settings in {
            "max_length": {"padding": "max_length", "max_length": HUGE},
            "pad_to_multiple_of": {"pad_to_multiple_of": HUGE},
            "a flat row": {"padding_free": True, "pad_to_multiple_of": HUGE},
            "a width": {"padding": (HUGE,)},
        }.items()
    },
    "a pad id of 2**70": (lambda: collate([{"input_ids": [1]}, {"input_ids": [1, 2]}], pad_token_id=1 << 70), "64 bits"),
    "lengths of 2**60": (lambda: Segments.from_lengths([HUGE]), PLACES),
    "ids that wrapped around": (lambda: Segments.from_ids(np.array([[1, 1 << 63]], np.uint64)), "it wrapped around"),
    "a width of 2**60": (lambda: Segments.from_lengths([1], width=HUGE), PLACES),
    "offsets of 2**60": (lambda: Segments.from_cu_seqlens([0, HUGE]), PLACES),
    "a kind of key": (lambda: Key(kind="tokenz"), "Key.kind: got 'tokenz'"),
    "a package's name": (
        lambda: gated_delta_breaches({}, kernel="fla", B=1, T=1, versions={"flaa": "0.5.2"}),
        "Write 'fla'",
    ),
    "no lengths": (lambda: Segments.from_lengths(None), "lengths: got a NoneType"),
    **{f"describe {kind}": (partial(describe, x), "A batch is a mapping") for kind, x in (("None", None), ("text", "x"))},
    "describe a list": (lambda: describe([OK]), "batch: got a list"),
    "describe a tensor": (lambda: describe(IDS), "picture draws a mask alone"),
    "describe a sparse giant": (lambda: describe({"input_ids": WIDE}), PLACES),
    "a row that is not there": (lambda: picture(OK, row=9), "The rows are 0 to 1"),
    "a row before the first": (lambda: picture(Segments.from_lengths([1]), row=-1), "row: got -1"),
    "no cells": (lambda: picture(OK, limit=0), "limit: got 0"),
    "cells of text": (lambda: picture(OK, limit="x"), "limit: got 'x'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_words(name):
    if name in ("a producer that raises", "a capsule that is none"):
        pytest.importorskip("pyarrow")
    call, words = REFUSED[name]
    with pytest.raises(CollateError) as refusal:
        call()
    assert words in str(refusal.value)


def test_what_stands_close_to_it_is_read():
    rows = [
        {"input_ids": [1, 2, 3], "attention_mask": [7, 7, 2_000_000_000]},
        {"input_ids": [4, 5], "attention_mask": [9, 1]},
    ]
    for padding_free, lengths in ((True, [0, 2, 3, 4, 5]), (False, None)):
        batch = collate([dict(row) for row in rows], padding_free=padding_free)
        if lengths:
            assert batch["cu_seq_lens_q"].tolist() == lengths
        else:
            assert batch["segment_ids"].tolist() == [[1, 1, 2], [1, 2, 0]]
    flat = collate([{"input_ids": [1, 2, 3], "attention_mask": [2, 2, 1]}], padding_free=True)
    assert flat["cu_seq_lens_q"].tolist() == [0, 2, 3]
    assert collate({"input_ids": torch.nested.nested_tensor([IDS[0], IDS[1, :2]])})["input_ids"].shape == (2, 3)
    assert one(lengths=1 << 70)["lengths"] == [1 << 70]
    cycle = {"input_ids": IDS}
    cycle["self"] = cycle
    assert "dict of 2" in describe(cycle)
    sparse = {"input_ids": IDS, "attention_mask": (IDS > 0)[:, None, None].expand(2, 1, 3, 3).long().to_sparse()}
    assert "attention_mask: int64 [2, 1, 3, 3]" in describe(sparse)
    assert picture(OK, row=1)


# --- with a model


@cache
def model():
    pytest.importorskip("transformers")
    from collate_npu.testing import tiny_model

    return tiny_model("llama", vocab_size=16)


def proved(collator=PaddingCollator(pad_token_id=0, attention_mask="2d"), samples=((1, 2), (3,)), **settings):  # noqa: B008
    from collate_npu.testing import assert_padding_invariant

    assert_padding_invariant(settings.pop("of", model()), collator, samples, **settings)


SETTINGS = {
    "segments": [IDS, "x"],
    "context_parallel": [2, "x"],
    "pattern": [3],
    "forward": [3],
    "patern": ["causal"],
    "batches": [1],
}
PROVED = {
    **{f"delivery of {x!r}": (lambda x=x: check_delivery(model(), x), "batch: got a") for x in (None, [1])},
    **{
        f"the guard with {name}={value}": (
            lambda name=name, value=value: guard_first_batch(model(), **{name: value}),
            f"{name}: got a" if name in ("segments", "context_parallel", "pattern", "forward") else "has no such setting",
        )
        for name, values in SETTINGS.items()
        for value in values
    },
    **{
        f"delivery with {name}": (
            lambda name=name: check_delivery(model(), OK, **{name: SETTINGS[name][0]}),
            f"{name}: got a",
        )
        for name in ("segments", "context_parallel", "forward")
    },
    "a guard that reports to a number": (lambda: guard_first_batch(model(), report=3), "report: got a int"),
    "no model": (lambda: proved(of="llama"), "got the name 'llama'"),
    "no collator": (lambda: proved(None), "a NoneType"),
    "no samples": (lambda: proved(samples=None), "samples: got a NoneType"),
    "samples of text": (lambda: proved(samples="ab"), "samples: got a str"),
    "an id too large": (lambda: proved(samples=[[1, 99], [3]]), "token id 99. This model has ids 0 to 15"),
    "an id below 0": (lambda: proved(samples=[[1, -5], [3]]), "token id -5"),
    "a tolerance that is no number": (lambda: proved(tolerance=float("nan")), "An error is 0 or more"),
}


@pytest.mark.models
@pytest.mark.parametrize("name", PROVED)
def test_so_is_what_cannot_be_proved(name):
    call, words = PROVED[name]
    model()
    with pytest.raises(CollateError) as refusal:
        call()
    assert words in str(refusal.value)


# --- on the command line

TYPED = {
    "show --lengths 99999999999": "at most 4194304 places",
    "show --lengths 3,-1": "Lengths are 0 or more",
    "show --lengths 3 --cp 99999999": "--cp",
    "show --lengths 3 --ulysses 99999999": "--ulysses",
    "show --lengths 3,5 --row 9": "The rows are 0 to 1",
    "show --data rows.jsonl --max-length 99999999999": "--max-length",
    "show --data deep.jsonl": "RecursionError",
    "audit --model llama --batch sparse.pt": "A batch of samples has input_ids [B, S]",
    "audit --model llama --batch empty.pt": "A batch of samples has input_ids [B, S]",
    "audit --model llama --data wide.jsonl": "no text field",
    "audit --model llama --data large.jsonl": "A tiny model is built for ids below",
    "audit --model llama --seed 99999999999999999999": "--seed",
    "audit --model llama --max-length 99999999999999999999": "--max-length",
}


@pytest.mark.models
@pytest.mark.parametrize("columns", ["0", "100"])
@pytest.mark.parametrize("line", TYPED)
def test_so_is_what_was_typed_in_one_line(tmp_path, monkeypatch, line, columns):
    for package in ("rich", "transformers"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    torch.save({**OK, "input_ids": IDS.to_sparse()}, "sparse.pt")
    torch.save({key: x[:0] for key, x in OK.items()}, "empty.pt")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}')
    for name, number in (("wide", 1 << 70), ("large", 1 << 30)):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"input_ids": [1, {number}]}}\n{{"input_ids": [1]}}\n' * 8)
    result = typed(*line.split(), COLUMNS=columns)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    if columns != "0":
        assert words_of(TYPED[line]) in words_of(result.output)


def words_of(text):
    return "".join(text.replace("│", " ").split())


def test_a_terminal_of_no_width_is_drawn_on():
    done = typed("show", "--lengths", "3,5", COLUMNS="0")
    assert (done.exit_code, "■" in done.output) == (0, True)
