"""Tables: a row a way, a column a case; what is summed up is what stands in them."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
from found import finding, lacking, refused, report, wide_report

from collate_npu.tools.audit.tables import legend, model_tables, summary, titles


def test_a_table_holds_each_finding_once():
    made = wide_report()
    tables = list(model_tables(made, every=True))
    assert [(table.model, table.kind) for table in tables[:3]] == [("m", "padded"), ("m", "packed"), ("m", "cp")]
    (padded, *_) = tables
    assert [(whose, title) for whose, title, _ in padded.rows] == [
        ("ours", "collator"),
        ("ours", "mask per layer kind"),
        ("yours", "my_package.data:make_collator"),
        ("elsewhere", "no mask"),
    ]
    places = [(attn, side) for attn in ("sdpa", "eager", "flash_attention_2") for side in ("left", "right")]
    assert [tuple(case) for case in padded.cases] == [(m, *place) for m in ("logits", "gradient") for place in places]
    wrong = {(title, case.side) for _, title, cells in padded.rows for case, cell in cells.items() if cell.state == "wrong"}
    assert wrong == {("my_package.data:make_collator", "left"), ("no mask", "left")}


@pytest.mark.parametrize(
    ("astray", "marked"),
    [
        (("logits", "loss", "gradient"), {"logits", "gradient"}),
        (("loss", "gradient"), {"gradient"}),
        (("logits",), {"logits"}),
        (("loss",), {"logits", "gradient"}),  # has no column
    ],
)
def test_the_number_that_is_wrong_is_marked(astray, marked):
    (table,) = model_tables(report(finding(False, gradient=0.06, astray=astray)), every=True)
    ((_, _, cells),) = table.rows
    assert {case.measure for case, cell in cells.items() if cell.state == "wrong"} == marked


def test_models_that_are_right_need_no_table():
    made = report(finding(), finding(False, model="bad"), lacking(model="kernel"))
    assert [table.model for table in model_tables(made, every=False)] == ["bad"]
    assert [table.model for table in model_tables(made, every=True)] == ["m", "bad", "kernel"]


def test_the_summary_of_a_model():
    others = [finding(False, logits=3.0, column="None"), finding(column="bare 4D")]
    made = report(finding(), finding(side="packed", logits=2e-6), refused(), *others)
    (row,) = made.rows()
    assert summary(made, row) == ["m", "sdpa", "left, packed", "2 of 2", "2.0e-06", "1 of 2"]
    made = report(finding(), finding(False, logits=7.0, column="mine", whose="yours"))
    assert titles(made)[4] == "YOURS\nright"
    assert summary(made, made.rows()[0])[3:] == ["1 of 1", "0 of 1", "7.00", "-"]


def test_the_legend_explains_each_word_of_the_tables():
    made = wide_report()
    tables = list(model_tables(made, every=True))
    explained = [word.strip() for word, _ in legend(made, tables)]
    for _, title, _ in (row for table in tables for row in table.rows):
        assert title in explained
    assert {"logit", "gradient", "ours", "YOURS", "elsewhere", "refused"} <= set(explained)
    padded = [table for table in tables if table.kind == "padded"]
    assert "positions" not in [word.strip() for word, _ in legend(made, padded)]
