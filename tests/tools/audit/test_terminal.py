"""The terminal: nothing is wider than it, nothing is said by colour alone, and no encoding ends a report."""

from __future__ import annotations

import io
import re

import pytest

pytest.importorskip("rich")
pytest.importorskip("transformers")
from found import finding, lacking, raised, refused, report, wide_report
from rich.console import Console

from collate_npu.tools.audit.terminal import print_report


def printed(made, *, verbose=False, encoding="utf-8", width=80, **settings):
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding=encoding), width=width, **settings)
    print_report(console, made, verbose=verbose)
    console.file.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_cut(width, verbose):
    text = printed(wide_report(), width=width, verbose=verbose)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    words = (
        "handed over by",
        "collator",
        "mask per layer kind",
        "my_package.data:make_collator",
        "no mask",
        "1.0e-06",
        "4.00 ✘",
    )
    for said in (*words, "YOURS", "flash_attention_2", "cp 2", "left out", "NOT RUN", "padded batches", "flat rows"):
        assert said in text, said
    assert re.search(r"/home/somebody\S*\.\.\.\S*qwen3-next", text) or re.search(r"/home\S*\.\.\.\S*next", text)


def test_the_width_is_used():
    narrow, wide = (printed(wide_report(), width=width).splitlines() for width in (80, 120))
    assert len(wide) < len(narrow)
    assert max(map(len, wide)) > 100


@pytest.mark.parametrize(
    ("settings", "env"),
    [
        ({"no_color": True}, {}),
        ({"force_terminal": True}, {}),
        ({"force_terminal": True}, {"NO_COLOR": "1"}),
        ({}, {"TERM": "dumb"}),
    ],
)
def test_pass_and_fail_need_no_colour(monkeypatch, settings, env):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    right, wrong = printed(report(finding()), **settings), printed(report(finding(False, logits=4.0)), **settings)
    plain = {re.sub(r"\x1b\[[\d;]*m", "", text) for text in (right, wrong)}
    assert {text[:6] for text in plain} == {"✔ PASS", "✘ FAIL"}
    assert sum("4.00 ✘" in text for text in plain) == 1
    if settings.get("no_color") or env:
        assert not re.search(r"\x1b\[[\d;]*3[1-7]", right + wrong)


@pytest.mark.parametrize(("encoding", "right", "wrong"), [("ascii", "+", "!"), ("gbk", "+", "!"), ("utf-8", "✔", "✘")])
def test_signs_that_the_terminal_cannot_print_give_way(encoding, right, wrong):
    assert printed(report(finding()), encoding=encoding).startswith(f"{right} PASS")
    text = printed(report(finding(False, logits=4.0)), encoding=encoding)
    assert text.startswith(f"{wrong} FAIL")
    assert f"4.00 {wrong}" in text


def test_a_model_that_is_right_is_a_line_and_one_that_is_not_a_table():
    made = report(finding(model="right"), finding(False, logits=4.0, model="wrong"))
    text = printed(made)
    assert "wrong: padded batches" in text
    assert "right: padded batches" not in text
    assert "right: padded batches" in printed(made, verbose=True)
    assert "handed over by" not in printed(report(finding()))


def test_an_interrupted_audit_shows_the_model_it_was_at():
    text = printed(report(finding(model="first"), finding(model="second"), interrupted=True))
    assert text.startswith("? INTERRUPTED: 2 of 2 cases measured until then are right.")
    assert "second: padded batches" in text
    assert "first: padded batches" not in text


def test_a_word_stands_where_there_is_no_number():
    text = printed(report(finding(), refused(), raised(), lacking()), verbose=True)
    for said in ("refused", "raises", "no kernel"):
        assert re.search(rf"^ .*(collator|mask per layer kind).* {said} *$", text, flags=re.M), said


def test_nothing_found_is_printed_too():
    assert printed(report()).startswith("? NOT PROVED: nothing of ours could be measured.")
