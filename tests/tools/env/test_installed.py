"""Which packages are looked for, and how a version is read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import collate_npu
from collate_npu.tools.env.installed import PACKAGES, installed, release, version_of

PACKAGE = Path(collate_npu.__file__).parent


def test_what_is_here():
    assert installed()["torch"]
    assert version_of("no-such-package") == ""


def test_a_release_is_major_and_minor():
    assert release("2.13.0+cpu") == (2, 13)
    assert release("2.7.1.post2") == (2, 7)


@pytest.mark.parametrize("file", sorted((PACKAGE / "integrations").rglob("*.py")), ids=lambda file: file.stem)
def test_every_trainer_is_listed_and_installed_in_the_version_it_names(file):
    named = re.search(r'^PACKAGE, TESTED = "(.*)", "(.*)"$', file.read_text(encoding="utf-8"), flags=re.M)
    if named is None:
        pytest.skip("no trainer of its own")
    assert named[1] in PACKAGES
    assert f'"{named[1]}=={named[2]}"' in (PACKAGE.parent / "noxfile.py").read_text(encoding="utf-8")
