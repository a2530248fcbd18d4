"""The page: well-formed, alone, and with nothing in it that a model's name or an error could break."""

from __future__ import annotations

import builtins
import re
from html.parser import HTMLParser

import pytest

pytest.importorskip("transformers")
from found import finding, report, wide_report

from collate_npu import CollateError
from collate_npu.tools.audit import page as page_module
from collate_npu.tools.audit.page import check_page, page

VOID = {"meta", "br"}


class Parsed(HTMLParser):
    """Which elements are open, and all attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def written():
    pytest.importorskip("matplotlib")
    return page(wide_report())


def test_it_is_well_formed_and_says_what_the_terminal_says(written):
    parsed = Parsed(written)
    assert not parsed.open
    assert parsed.text.lstrip().startswith("collate-npu audit: FAIL")
    assert "✘ FAIL: 1 of 13 cases of YOUR collator is wrong." in parsed.text
    for said in (
        "4.00 ✘",
        "my_package.data:make_collator",
        "NOT RUN",
        "OSError: no weights",
        "never reads it",
        "transformers",
    ):
        assert said in parsed.text, said
    assert parsed.tags.count("table") == 1 + 7  # the summary, and each model and kind
    assert parsed.tags.count("svg") == 1 + 2 + 2 + 1  # the plot, a batch on each of two sides, its masks


def test_each_mask_shows_who_attends_to_whom(written):
    paths = re.findall(r'<svg class="mask"[^>]*viewBox="0 0 5 5"><path d="([^"]*)"/>', written)
    assert paths == ["M2 2L5 5L2 5Z", "M0 0L5 5L0 5Z", "M0 0L2 0L2 2L0 2ZM2 2L5 2L5 5L2 5Z"]
    bars = re.findall(r'<rect x="(\d)" y="(\d)" width="(\d)" height="3" class="(s\d)"/>', written)
    assert bars == [
        ("0", "0", "2", "s0"),
        ("2", "0", "3", "s1"),
        ("0", "4", "5", "s1"),
        ("0", "0", "2", "s1"),
        ("2", "0", "3", "s2"),
    ]


def test_nothing_of_it_comes_from_elsewhere(written):
    assert not re.search(r"(?i)https?:|url\(\s*['\"]?(?!#)|@import|<script|<link|<img", written)
    targets = [value for name, value in Parsed(written).attributes if name in ("src", "href", "xlink:href")]
    assert all(value.startswith("#") for value in targets)


def test_names_are_escaped():
    pytest.importorskip("matplotlib")
    made = report(finding(False, logits=4.0, model="<b>&m", by_position=((0.0, 4.0),)), not_run={"<i> (sdpa)": "<u>"})
    parsed = Parsed(page(made))
    assert {"b", "i", "u"}.isdisjoint(parsed.tags)
    assert "<b>&m" in parsed.text


@pytest.mark.parametrize("made", [report(), report(interrupted=True), report(finding())])
def test_a_report_with_little_in_it_is_a_page_too(made):
    pytest.importorskip("matplotlib")
    assert not Parsed(page(made)).open


def test_what_could_not_be_written_is_refused_before(tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "missing", list)
    for bad in (tmp_path, tmp_path / "absent" / "page.html"):
        with pytest.raises(CollateError, match="Name a file in a folder that is there"):
            check_page(bad)
    check_page(tmp_path / "page.html")


def test_a_machine_without_matplotlib_is_told_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **settings):
        if name.startswith("matplotlib"):
            raise ImportError(name, name="matplotlib")
        return real(name, *args, **settings)

    monkeypatch.setattr("collate_npu.tools.audit.positions.import_module", without)
    with pytest.raises(CollateError, match="pip install matplotlib"):
        check_page(tmp_path / "page.html")
