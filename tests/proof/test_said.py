"""Said: many names are cut short, and none is lost from the count."""

import pytest

from collate_npu.proof.forward import few


@pytest.mark.parametrize(
    ("names", "said"), [("abcdefgh", "g, h"), ("abcdefghi", "h and 1 more"), ("abcdefghij", "h and 2 more")]
)
def test_the_first_eight_names_are_said(names, said):
    assert few(names).endswith(said)
