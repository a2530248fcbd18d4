"""Refusals: their texts are part of the interface. Key and row, what arrived, the rule, and a remedy that works.

Whatever a caller hands in is read or refused by name: nothing raw, nothing silently rounded; all bad rows at once.
"""

import ast
import re

import numpy as np
import pytest
import refusals as table
import torch
from house import FILES, PACKAGE, module_of, room_of, tree_of

from collate_npu import CollateError, derive_segments
from collate_npu.errors import explain, explain_rows, shape_of, short

pytestmark = [pytest.mark.usefixtures("newest_transformers"), pytest.mark.filterwarnings("ignore:collate_npu")]


def said(cause) -> Exception:
    with pytest.raises(ValueError) as raised:
        cause()
    return raised.value


@pytest.mark.parametrize(("cause", "words", "follow"), table.FOLLOWED)
def test_the_remedy_of_a_refusal_works(cause, words, follow):
    refusal = said(cause)
    assert isinstance(refusal, CollateError)
    assert words in str(refusal)
    assert follow()


@pytest.mark.parametrize(("mask", "wrong", "words", "other", "right", "ids"), table.MASKS)
def test_what_a_mask_alone_asks_for_is_read(mask, wrong, words, other, right, ids):
    assert words in str(said(lambda: derive_segments(mask, **wrong)))
    assert derive_segments(other, **right).ids.tolist() == ids


@pytest.mark.parametrize(("refused", "wrong", "words", "segments", "right", "chosen"), table.ROUTES)
def test_what_a_consumer_asks_for_has_a_form(refused, wrong, words, segments, right, chosen):
    assert words in str(said(lambda: table.form(refused, **wrong)))
    assert table.form(segments, **right) == chosen


@pytest.mark.parametrize(("wrong", "words", "right", "offsets"), table.FLAT_ROWS)
def test_what_a_flat_row_asks_for_makes_one(wrong, words, right, offsets):
    assert words in str(said(lambda: table.collate(table.THREE_FIVE, padding_free=True, **wrong)))
    assert table.collate(table.THREE_FIVE, padding_free=True, **right)["cu_seq_lens_q"].tolist() == offsets


@pytest.mark.parametrize(("wrong", "words", "right", "ids", "mask"), table.PADDED_ROWS)
def test_what_padded_rows_ask_for_makes_them(wrong, words, right, ids, mask):
    assert words in str(said(lambda: table.collate(table.THREE_FIVE, **wrong)))
    out = table.collate(table.THREE_FIVE, **right)
    assert (out["input_ids"].shape, None if table.bare(out) else table.shape(out)) == (ids, mask)


@pytest.mark.parametrize("name", table.WORDED)
def test_the_text_names_every_bad_row(name):
    cause, text = table.WORDED[name]
    assert str(said(cause)).startswith(text)


# --- how texts are made


def test_one_line_of_four_facts():
    line = "key: got this. The rule. The remedy."
    assert explain("key", "this", "The rule.", "The remedy.") == line
    assert explain("key", "this", "The rule.", "The remedy.", more="x") == f"{line}\nMore: collate-npu guide errors#x"


def test_rows_are_sorted_and_counted():
    assert explain_rows("key", [(2, "b"), (0, "a")], "Rule.", "Remedy.") == (
        "key: 2 bad rows.\n  row 0: got a\n  row 2: got b\nRule.\nRemedy."
    )
    assert explain_rows("key", [(2, "b")], "Rule.", "Remedy.").startswith("key: 1 bad row.\n")


def test_of_a_long_text_its_beginning_and_end_are_shown():
    text = "".join(map(str, range(10)))
    assert [short(text, most) for most in (10, 8)] == [text, "0123 ... 10 characters ... 89"]


def test_what_arrived():
    assert shape_of(torch.zeros(2, 3, dtype=torch.bfloat16)) == "bfloat16 [2, 3]"
    assert shape_of(np.zeros(2, np.int32)) == "int32 [2]"
    assert shape_of("text") == "str of 4"


ROOMS = ("segments", "masks", "outputs", "consumers", "collate")


def is_bare(node) -> bool:
    """An error of ours that is made with a text of its own."""
    if not (isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("Error")):
        return False
    made = node.args[0]
    explained = isinstance(made, ast.Call) and getattr(made.func, "id", "") in ("explain", "explain_rows")
    return node.func.id != "UnexplainedError" and not explained


def pointers():
    """Every `more=` that a raise site, or a row of a consumer, says: where it stands, and the section it names."""
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.keyword) and node.arg == "more":
                named = [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
                assert named or ast.unparse(node.value) == "refusal.more", "written where it is said"
                yield from ((f"{module_of(path)}:{node.value.lineno}", name) for name in named)


def test_sections_that_errors_name_are_there_in_both_languages():
    named = dict(pointers())
    assert len(named) > 20
    for page in ("errors", "zh/errors"):
        text = (PACKAGE / "guide" / f"{page}.md").read_text(encoding="utf-8")
        assert {where: name for where, name in named.items() if f'<a id="{name}"></a>' not in text} == {}


def test_every_section_of_what_is_refused_here_is_named_by_an_error():
    text = (PACKAGE / "guide" / "errors.md").read_text(encoding="utf-8")
    refused = text.partition("## Refused here")[2].partition("\n## ")[0]
    assert set(re.findall(r'<a id="([\w-]+)">', refused)) <= {name for _, name in pointers()}


def test_every_error_of_the_core_is_explained():
    """No raise with a text of its own: each goes through explain or explain_rows, which ask for all four facts."""
    core = [path for path in FILES if room_of(path) in ROOMS]
    assert [f"{module_of(path)}:{node.lineno}" for path in core for node in ast.walk(tree_of(path)) if is_bare(node)] == []
