"""Moved: every old name still gives the thing, and says where it is and when it goes."""

import re
import warnings
from importlib import import_module
from pathlib import Path

import pytest

import collate_npu
from collate_npu.moved import GONE_IN, MOVED

CHANGES = Path(collate_npu.__file__).parent / "guide" / "changelog.md"


def thing(dotted):
    module, _, name = dotted.rpartition(".")
    return getattr(import_module(module), name)


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_name_gives_the_thing_and_says_where_it_is(old, new):
    module, _, name = old.rpartition(".")
    with pytest.warns(DeprecationWarning, match=f"^{re.escape(f'{old} is {new} now')}.* goes in {GONE_IN}") as said:
        exec(f"from {module} import {name}", found := {})
    assert {each.filename for each in said} == {"<string>"}  # the line that names it, none of ours
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found[name] is thing(new)


@pytest.mark.parametrize("module", sorted({old.rpartition(".")[0] for old in MOVED}))
def test_a_name_that_was_never_there_says_so(module):
    with pytest.raises(AttributeError, match=re.escape(f"module '{module}' has no attribute 'dens'")):
        import_module(module).dens  # noqa: B018


def test_things_keep_their_names():
    renamed = {old: new for old, new in MOVED.items() if old.rpartition(".")[2] != new.rpartition(".")[2]}
    assert renamed == {"collate_npu.integrations.trl.adapt_forward": "collate_npu.adapt"}


def test_no_row_hides_a_name_of_today():
    assert not {old for old in MOVED if old.rpartition(".")[2] in vars(import_module(old.rpartition(".")[0]))}


def test_old_names_go_after_this_edition_and_stand_in_the_changelog():
    assert tuple(map(int, collate_npu.__version__.split(".")[:2])) < tuple(map(int, GONE_IN.split(".")))
    text = CHANGES.read_text(encoding="utf-8")
    told = [{old.rpartition(".")[2], old.rpartition(".")[0].partition(".")[2] or old} for old in MOVED]
    assert [names for names in told if not any(name in text for name in names)] == []
