"""Notes: everything that did not run is said, each reason once."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
from found import NOISE, UNSEEN, finding, lacking, raised, refused, report

from collate_npu.testing.yardstick import Yardstick
from collate_npu.tools.audit.notes import notes


def said(made, verbose=False):
    return [f"{label}: {text}" for label, text in notes(made, verbose=verbose)]


def test_everything_that_did_not_run_is_said():
    made = report(
        refused(), raised(), not_run={"n (sdpa)": "OSError: gone"}, yardsticks=UNSEEN, left_out={"r (sdpa)": "deaf"}
    )
    assert said(made, verbose=True)[:3] == [
        "refused: m, padded batches (mask per layer kind): no mapping",
        "raises: m, padded batches (collator + adapter): RuntimeError: no",
        "NOT RUN: n (sdpa): OSError: gone",
    ]
    assert said(made, verbose=True)[3].startswith("CANNOT TELL: m (sdpa): what is wrong moves the logits by 1.0e-06")
    assert said(made, verbose=True)[4] == "left out: r (sdpa): deaf"
    assert said(made)[4] == "left out: r: known not to be testable (--verbose says why)"


def test_nothing_wrong_beside_it_proves_nothing():
    (line,) = said(report(finding(), yardsticks={"m (sdpa)": Yardstick(NOISE)}))
    assert line.startswith("CANNOT TELL: m (sdpa): nothing wrong could be run beside it")


def test_a_reason_is_said_once_and_briefly():
    rule = "A mapping is known for attention. Keep the 2D."
    found = [refused(f"layer_types: got kind_{n}. {rule}", model=f"m{n}") for n in range(7)]
    assert said(report(*found)) == [
        "refused: m0, m1, m2, m3 and 3 more, padded batches (mask per layer kind): A mapping is known for attention"
    ]
    assert len(said(report(*found), verbose=True)) == 7
    assert "got kind_6" in said(report(*found), verbose=True)[6]


def test_what_lacks_a_kernel_names_every_model_and_the_remedy():
    found = [lacking(c, model=f"m{n}") for n in range(7) for c in ("collator", "adapter")]
    (line,) = said(report(*found))
    assert line.startswith(
        "NOT RUN: m0, m1, m2, m3, m4, m5, m6, flat rows (collator, collator + adapter): no kernel here (try"
    )
    assert "f is plain torch" in said(report(*found), verbose=True)[0]


def test_what_to_change_of_yours_is_said():
    (line,) = said(report(finding(False, logits=4.0, column="my:collate", whose="yours", note="No mask: wrap it.")))
    assert line == "YOURS is wrong: m, padded batches (my:collate): No mask: wrap it."
    (line,) = said(report(finding(False, logits=float("nan"), note="a number is not finite")))
    assert line.startswith("not finite: m, padded batches (collator): ")


def test_where_kernels_come_from_is_said():
    made = report(kernels={"a": {"f": "torch", "g": "torch"}, "b": {"f": "fla"}, "c": {"f": "torch", "g": "torch"}})
    assert said(made, verbose=True) == [
        "kernels: recurrent layers of a, c run on torch alone",
        "kernels: recurrent layers of b run on fla (f)",
    ]
    assert said(made) == []
