"""The terminal and the page: nothing is wider than it, nothing is said by colour alone, no encoding or name breaks it."""

import html
import io
import re

import pytest

pytest.importorskip("rich")
pytest.importorskip("transformers")
from found import MINE, NAN, finding, lacking, raised, refused, report, wide_report
from rich.console import Console

from collate_npu.proof.kernel_runs import Run
from collate_npu.tools.audit import terminal
from collate_npu.tools.audit.terminal import errors, legend, looked_at, page, pictures, print_report, summary, table, terms

ROWS = ((0.0, 1e-6, 2e-6), (0.0, 5e-6))


def printed(made, *, verbose=False, encoding="utf-8", width=80, **settings):
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding=encoding), width=width, **settings)
    print_report(console, made, verbose=verbose)
    console.file.flush()
    return raw.getvalue().decode(encoding)


def rows_of(drawn, width=300):
    """The words of each line."""
    console = Console(file=io.StringIO(), width=width)
    console.print(drawn)
    lines = [line.split("  ") for line in console.file.getvalue().splitlines()]
    return [[word.strip() for word in line if word.strip()] for line in lines]


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_cut(width, verbose):
    text = printed(wide_report(), width=width, verbose=verbose)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    words = ("handed over by", "mask per layer kind", MINE["column"], "no mask", "1.0e-06", "4.00 ✘", "YOURS", "left out")
    for said in (*words, "flash_attention_2", "NOT RUN", "padded batches", "flat rows"):
        assert said in text, said
    assert re.search(r"/home\S*\.\.\.\S*next", text)


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


@pytest.mark.parametrize(("encoding", "wrong"), [("ascii", "!"), ("gbk", "!"), ("utf-8", "✘")])
def test_signs_that_the_terminal_cannot_print_give_way(encoding, wrong):
    text = printed(report(finding(False, logits=4.0)), encoding=encoding)
    assert text.startswith(f"{wrong} FAIL")
    assert f"4.00 {wrong}" in text


def test_a_table_holds_each_finding_once():
    shown = looked_at(wide_report(), every=True)
    assert list(shown)[:2] == [("m", "sdpa", "padded batches"), ("m", "sdpa", "flat rows")]
    titles, sides, _, first, second, yours, elsewhere = rows_of(table(shown["m", "sdpa", "padded batches"], None))
    assert (titles, sides[1:]) == (["logits", "logits", "gradient", "gradient"], ["left", "right"] * 2)
    assert first == ["ours", "collator", *["1.0e-06"] * 2, *["0.0e+00"] * 2]
    assert second[0] == "mask per layer kind"
    assert yours[:3] == ["YOURS", MINE["column"], "4.00 ✘"]
    assert elsewhere[:4] == ["elsewhere", "no mask", "1.0e-06 ✘", "1.0e-06"]  # left padding is wrong, right padding is not


@pytest.mark.parametrize(
    ("astray", "marked"),
    [
        (("logits", "loss", "gradient"), [True, True]),
        (("loss", "gradient"), [False, True]),
        (("logits",), [True, False]),
        (("loss",), [True, True]),  # has no column
    ],
)
def test_the_number_that_is_wrong_is_marked(astray, marked):
    *_, row = rows_of(table([finding(False, gradient=0.06, astray=astray)], None))
    assert ["✘" in cell for cell in row[2:]] == marked


def test_a_word_stands_where_there_is_no_number():
    for found, word in ((refused(), "refused"), (raised(), "raises"), (lacking(), "no kernel")):
        assert rows_of(table([found], None))[-1][-1] == word


def test_models_that_are_right_need_no_table():
    def models(made, *, every=False):
        return [model for model, _, _ in looked_at(made, every=every)]

    made = report(finding(), finding(False, model="bad"), lacking(model="kernel"))
    assert models(made) == ["bad"]
    assert models(made, every=True) == ["m", "bad", "kernel"]
    assert models(report(finding(model="first"), finding(model="second"), interrupted=True)) == ["second"]  # it was at


def test_the_summary_of_a_model():
    others = [finding(False, logits=3.0, column=column) for column in ("no mask", "mask")]
    others.append(finding(column="4D mask alone"))
    *_, row = rows_of(summary(report(finding(), finding(side="packed", logits=2e-6), refused(), *others)))
    assert row[-6:] == ["m", "sdpa", "left, packed", "2 of 2", "2.0e-06", "2 of 3"]
    titles, _, _, row = rows_of(summary(report(finding(), finding(False, logits=7.0, **MINE))))
    assert titles == ["ours", "YOURS", "elsewhere"]
    assert row[-4:] == ["1 of 1", "0 of 1", "7.00", "-"]


@pytest.mark.parametrize(
    ("made", "summed", "explained"),
    [
        (report(), False, False),
        (report(finding()), True, False),
        (report(not_run={"m (sdpa)": "gone"}), True, False),
        (report(finding(False)), True, True),
    ],
)
def test_models_are_summed_up_and_words_explained_where_there_are_any(made, summed, explained):
    text = printed(made, width=200)
    assert (terminal.SUMMED_UP in text, terminal.MEASURES["logits"] in text) == (summed, explained)


def test_a_narrow_terminal_breaks_no_number_and_cuts_no_word():
    made = wide_report()
    padded = looked_at(made, every=True)["m", "sdpa", "padded batches"]
    for drawn, said in ((summary(made), "15 of 15"), (table(padded, None), "1.0e-06 ✘")):
        assert any(said in row for row in rows_of(drawn, 50))
    assert "".join(part for row in rows_of(terms([("", "x" * 200)]), 50) for part in row) == "x" * 200


def test_the_legend_explains_each_word_of_the_tables():
    made = wide_report()
    explained = [word.strip() for word, _ in legend(made.findings)]
    assert {"logits", "gradient", "ours", "YOURS", "elsewhere", "refused", MINE["column"], "no mask"} <= set(explained)
    assert len(explained) == len(set(explained))
    assert "positions" not in [word.strip() for word, _ in legend([f for f in made.findings if f.side != "packed"])]


def text_of(written):
    return html.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", "", written, flags=re.S))


def test_the_page_says_what_the_terminal_says_and_more():
    assert "Settings" in text_of(page(report(interrupted=True)))
    assert "handed over by" in text_of(page(report(finding(True))))
    text = text_of(page(wide_report()))
    assert text.lstrip().startswith("collate-npu audit: FAIL")
    titles = ("The error at each token", "The first batch", "What the words mean", "Settings")
    for said in (*titles, "✘ FAIL: ", "4.00 ✘", MINE["column"], "NOT RUN", "OSError: no weights", "never reads it"):
        assert said in text, said


def test_each_batch_shows_who_attends_to_whom():
    drawn = "\n".join(line.plain for line in pictures(wide_report()))
    left, flat = drawn.split("packed: one flat row, of m: 1 row of 5, 2 sequences; no padding")
    assert "padded on the left, of m: 2 rows of 5, one sequence each" in left
    assert re.search(r"2 ⬚ ⬚ ■ ⬚ ⬚ +2 ■ ■ ■ ⬚ ⬚\n", left)
    assert "   0 ■ ■ ⬚ ⬚ ⬚\n   1 ■ ■ ⬚ ⬚ ⬚\n   2 ⬚ ⬚ ■ ■ ■\n" in flat  # a model that looks both ways


def test_names_are_escaped_in_a_page():
    made = report(finding(False, logits=4.0, model="<b>&m", by_position=((0.0, 4.0),)), not_run={"<u> (sdpa)": "<u>[red]"})
    written = page(made)
    assert not re.search("<b>|<u>", written)
    assert "<b>&m" in text_of(written)
    assert "<u>[red]" in text_of(written)


def test_a_line_a_sample_of_the_worst_case_of_each_kind():
    other = finding(False, logits=4.0, column="no mask", by_position=((4.0, 3.0), (0.1, 0.02)))
    found = errors(
        report(finding(by_position=ROWS), finding(logits=1e-7, column="mask per layer kind", whose="ours"), other)
    )
    assert [(line.plain.strip(), str(line.style)) for line in found] == [
        ("ours, the worst: collator on m, sdpa, left", "bold"),
        ("sample 1   ·▃▃ 2.0e-06", ""),
        ("sample 2   ·▃ 5.0e-06", "bold"),
        ("elsewhere, the worst: no mask on m, sdpa, left", "bold"),
        ("sample 1   ██ 4.00", "bold"),
        ("sample 2   █▇ 0.10", ""),
    ]


def test_a_bar_shows_the_worst_of_its_block_and_what_is_not_finite():
    _, first, second = errors(report(finding(False, logits=NAN, by_position=((1e-6, NAN, 1e-6), (1.0, 2.0)))))
    assert (first.plain, str(first.style)) == ("  sample 1   ▃×▃ nan", "bold")
    assert second.plain == "  sample 2   ██ 2.00"
    *_, line = errors(report(finding(by_position=((*[1e-9] * 148, 1.0, 1e-9),))))
    assert line.plain == f"  sample 1   {'▁' * 74}█ 1.00"


def test_a_note_is_marked_and_a_name_that_begins_with_a_number_is_not():
    labels = terms([("NOT RUN", "a"), ("YOURS is wrong", "b"), ("  4D mask alone", "c"), ("refused", "d")]).columns[0].cells
    assert [label.style for label in labels] == ["bold yellow", "bold yellow", "dim", "dim"]


@pytest.mark.parametrize("verbose", [False, True])
def test_of_kernels_the_wrong_are_shown_and_all_where_asked(verbose):
    runs = [Run(operator=f"a.{state}.one", truth="padded left", form="TND", state=state) for state in ("right", "wrong")]
    said = printed(report(finding(), operators=runs), verbose=verbose)
    assert ("a.wrong.one" in said, "a.right.one" in said) == (True, verbose)
