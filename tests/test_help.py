"""`help()` reads as a reference: two or three screens hold it. The tables of options are written from it: test_readme."""

import pydoc
import re

import pytest

import collate_npu


@pytest.mark.parametrize("name", collate_npu.__all__)
def test_what_help_prints_is_short(name):
    printed = pydoc.plain(pydoc.render_doc(getattr(collate_npu, name)))
    assert len(printed) < 8000
    assert max(map(len, printed.splitlines())) < 640
    assert not re.search(r"\bat 0x|<lambda>|Key\(kind", printed)
