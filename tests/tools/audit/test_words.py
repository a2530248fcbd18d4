"""One word for one thing, in every command: a name in a table is the name in JSON, and what a column means stands with its
table."""

import re
from dataclasses import fields

import pytest

pytest.importorskip("rich")
pytest.importorskip("transformers")
from found import finding, wide_report

from collate_npu.proof.conformance import BatchVerdict, Conformance, Scale
from collate_npu.proof.kernel_runs import Run
from collate_npu.tools import env
from collate_npu.tools.audit.case import WAYS, Finding
from collate_npu.tools.audit.report import MEASURES, SUMMED_UP, WHOSE, legend, looked_at, summary, table
from collate_npu.tools.env import Environment
from collate_npu.tools.kernels import LEGEND, tables

REPORT = wide_report()


def headings(drawn):
    """Their words, without the signs' own column."""
    return {word for column in drawn.columns for word in str(column.header).split("\n") if word}


def names(model):
    return {field.name for field in fields(model)}


def explained(text):
    """What a legend has a meaning for: `error: ...; at: ...`."""
    return {word for each in re.findall(r"(?:^|; )([\w, ]+): ", text) for word in each.split(", ")}


def test_a_way_has_one_name_in_the_table_and_in_json():
    shown = {str(cell) for found in looked_at(REPORT, every=True).values() for cell in table(found, None).columns[1].cells}
    assert shown == {each["column"] for each in REPORT.as_json()["findings"]}
    assert all(way.name == name for ways in WAYS.values() for name, way in ways.items())


def test_a_column_of_the_audit_is_a_field_of_its_json_and_is_explained():
    drawn = table(REPORT.findings, None)
    assert headings(drawn) - {"handed over by"} <= {*MEASURES} | {"left", "right", "packed"}
    assert {*MEASURES} | {"model", "attention", "side"} <= names(Finding)
    meanings = dict(legend(REPORT.findings))
    assert headings(drawn) & {*MEASURES} <= {*meanings}
    said = {name.lower() for name, _ in WHOSE.values()}
    assert said == {*WHOSE} == {*REPORT.as_json()["worst"]}
    rest = headings(summary(REPORT)) - {"model", "attention", "side"}
    assert {word.lower() for word in rest} - said <= explained(SUMMED_UP)
    assert "elsewhere" in explained(SUMMED_UP)


@pytest.mark.parametrize(("gradient", "shown"), [(0.07, "gradient"), (None, "loss")])
def test_what_is_wrong_has_a_column(gradient, shown):
    """A first label that is taught from padding moves the loss, and no logit."""
    astray = ("loss", "gradient")[: 2 if gradient else 1]
    drawn = table([finding(False, gradient=gradient, loss=0.06, astray=astray, column="tokenizer's 2D mask")], None)
    assert headings(drawn) - {"handed over by", "left"} == {"logits", shown}
    marked = [str(column.header).split("\n")[0] for column in drawn.columns if "✘" in str(next(iter(column.cells)))]
    assert marked == [shown]


def test_columns_of_the_kernels():
    run = Run(operator="o", state="right", truth="packed", form="TND", forward=1e-7, backward=1e-7, passes=1e-6)
    _, drawn, said = tables([run])
    assert headings(drawn) <= names(Run) & explained(LEGEND)
    assert str(said).strip() == LEGEND
    assert [*tables([Run(operator="o", state="not here")])] == []


def test_columns_of_the_conformance():
    found = Conformance((BatchVerdict("left", "two", 0.0, 0.0, 0, 0, True, ""),), Scale(0.0, 1.0, 2.0, 3.0), 0)
    _, table, legend = str(found).split("\n\n")
    assert {*re.split("  +", table.splitlines()[0])} - {"layout", "batch", "what it means"} == explained(legend)


def test_labels_of_the_environment(monkeypatch):
    """Each package and each setting has a line of its own."""
    here = Environment(
        system="s", packages={"torch": "1"}, settings={}, cann="c", devices="d", npu="n", hazards=("h",),
    )  # fmt: skip
    monkeypatch.setattr(env, "environment", lambda: here)
    labels = {re.match(r"- (\w+):", line)[1] for line in env.report().splitlines()}
    assert {label if label in names(Environment) else f"{label}s" for label in labels - {"torch"}} <= names(Environment)
