"""`help()` reads as a reference: every option is said, two or three screens hold it, and no default fills one by itself."""

import inspect
import pydoc
import re

import lists
import pytest

import collate_npu

OPTIONS = {
    "PaddingCollator": "options", "wrap_collator": "options", "BatchAdapter": "options", "ContextParallel": "options",
    "derive_segments": "masks",
}  # fmt: skip
"""A name whose docstring lists its options, and the page of the guide that is written from it."""


@pytest.mark.parametrize("name", collate_npu.__all__)
def test_what_help_prints_is_short(name):
    printed = pydoc.plain(pydoc.render_doc(getattr(collate_npu, name)))
    assert len(printed) < 8000
    assert max(map(len, printed.splitlines())) < 640
    assert not re.search(r"\bat 0x|<lambda>|Key\(kind", printed)


@pytest.mark.parametrize(("name", "page"), OPTIONS.items())
def test_every_option_of_a_signature_stands_in_the_table_and_no_other(name, page):
    text = (lists.PACKAGE / "guide" / f"{page}.md").read_text("utf-8")
    start = f"## {name}\n" if page == "options" else "<!-- derive -->\n"
    text = text.partition(start)[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (?:`.*`|required) \| .+ \|$", text, flags=re.M)
    assert rows == [*inspect.signature(getattr(collate_npu, name)).parameters]
