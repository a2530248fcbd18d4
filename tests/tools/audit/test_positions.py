"""The error at each token: a line a sample, of the worst case of each kind."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
from found import NAN, finding, report

from collate_npu.tools.audit.positions import positions_svg

ROWS = ((0.0, 1e-6, 2e-6), (0.0, 5e-6))


def test_a_panel_for_each_kind_and_a_line_for_each_sample():
    other = finding(False, logits=4.0, column="None", by_position=((4.0, 3.0), (0.1, 0.2)))
    mine = finding(logits=1e-6, column="my:collate", whose="yours", by_position=ROWS)
    svg = positions_svg(report(finding(by_position=ROWS), finding(logits=1e-7, column="mapping", whose="ours"), other, mine))
    titles = ("ours, the worst: collator on m, sdpa, left", "YOURS, the worst: my:collate", "elsewhere, the worst: no mask")
    for title in titles:
        assert title in svg
    assert svg.count("rounding alone: up to 1.0e-06") == 3
    assert "(bold: sample 2, 5.0e-06)" in svg
    assert "(bold: sample 1, 4.00)" in svg
    assert len(re.findall("<g id=.axes_", svg)) == 3


def test_it_stands_alone_in_a_page():
    svg = positions_svg(report(finding(by_position=ROWS)))
    assert svg.startswith("<svg ")
    assert svg.rstrip().endswith("</svg>")
    assert "http" not in svg
    assert "<metadata" not in svg


def test_a_number_that_is_not_finite_is_drawn_and_named():
    svg = positions_svg(report(finding(False, logits=NAN, by_position=((1e-6, NAN, 1e-6), (1.0, 2.0)))))
    assert "(bold: sample 1, nan)" in svg
    assert positions_svg(report(finding(False, logits=NAN, by_position=((NAN, NAN),))))


def test_nothing_measured_is_nothing_drawn():
    assert positions_svg(report()) == ""
    assert positions_svg(report(finding())) == ""
