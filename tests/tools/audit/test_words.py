"""One word for one thing, in every command: a name in a table is the name in JSON, and what a column means stands with its
table."""

import re
from dataclasses import fields

import pytest

pytest.importorskip("rich")
pytest.importorskip("transformers")
from collate_npu.proof.conformance import BatchVerdict, Conformance, Scale
from collate_npu.tools.audit.case import Finding
from collate_npu.tools.audit.report import MEASURES, SUMMED_UP, WHOSE, Report, legend, summary, table


def headings(drawn):
    """Their words, without the signs' own column."""
    return {word for column in drawn.columns for word in str(column.header).split("\n") if word}


def names(model):
    return {field.name for field in fields(model)}


def explained(text):
    """What a legend has a meaning for: `error: ...; at: ...`."""
    return {word for each in re.findall(r"(?:^|; )([\w, ]+): ", text) for word in each.split(", ")}


def test_columns_of_the_audit():
    found = Finding(model="m", attention="sdpa", side="left", column="collator", whose="ours", logits=0.0)
    assert headings(table([found])) - {"handed over by"} == {*MEASURES, "side"} <= names(Finding)
    assert {*MEASURES, "ours", "  collator"} == {*dict(legend([found]))}
    report = Report(settings={}, findings=[found])
    assert {name.lower() for name, _ in WHOSE.values()} == {*WHOSE} == {*report.as_json()["worst"]}
    rest = headings(summary(report)) - {"model", "attention", "side", "ours"}
    assert rest <= explained(SUMMED_UP)


def test_columns_of_the_conformance():
    found = Conformance((BatchVerdict("left", "two", 0.0, 0.0, 0, 0, True, ""),), Scale(0.0, 1.0, 2.0, 3.0), 0)
    _, drawn, meanings = str(found).split("\n\n")
    assert {*re.split("  +", drawn.splitlines()[0])} - {"layout", "batch", "what it means"} == explained(meanings)
