"""MindSpeed's `repatch(args)` after our install: what it replaced is told, and the next install mends it.

`Patch` does in lines of ours what MindSpeed's does (core_r0.16.0 patch_utils.py:38-134, megatron_adaptor.py `repatch`): it
keeps what it found at first, sets its own in the module whatever stands there, and by identity wherever a module has it.
"""

import sys
from types import ModuleType

import pytest
from hypothesis import given, strategies as st

from collate_npu.integrations import patching


class Patch:
    def __init__(self, module, name):
        self.module, self.name, self.found, self.final, self.wrappers = module, name, None, None, []

    def apply(self, new, wrappers):
        current = getattr(self.module, self.name)
        self.found = current if self.found is None else self.found
        self.final = self.found if new is None else new
        for wrapper in wrappers:
            self.final = wrapper(self.final)
        setattr(self.module, self.name, self.final)
        self._everywhere(current, self.final)

    def repatch(self, new, wrappers):
        self._everywhere(self.final, self.found)
        self.apply(new, wrappers)

    def _everywhere(self, old, new):
        for module in list(sys.modules.values()):
            if vars(module).get(self.name) is old:
                setattr(module, self.name, new)


def wrapper(function):
    return lambda text: f"<{function(text)}>"


def replacement(text):
    return f"npu {text}"


def louder(original, text):
    OURS.append(text)
    return original(text).upper()


OURS = []
STEPS = ("install", "install", "uninstall", "wrap", "replace", "repatch wrap", "repatch replace", "repatch nothing")


def said_by(home, text):
    """What a call gives, and how often ours ran in it."""
    OURS.clear()
    return home.greet(text), len(OURS)


@given(st.lists(st.sampled_from(STEPS), max_size=8), st.booleans())
def test_ours_is_called_once_or_known_to_be_lost_and_an_install_mends_it(steps, imported):
    with pytest.MonkeyPatch.context() as patch:
        home, friend = ModuleType("repatched.home"), ModuleType("repatched.friend")
        for module in (home, friend):
            patch.setitem(sys.modules, module.__name__, module)
        home.greet = original = lambda text: f"hello {text}"
        if imported:
            friend.greet = original
        theirs = Patch(home, "greet")
        for step in [*steps, "install"]:
            kind = step.removeprefix("repatch ")
            if kind == "install":
                patching.patch("one", home, "greet", louder, everywhere="repatched")
            elif kind == "uninstall":
                patching.release("one")
            else:
                made = ({"replace": replacement}.get(kind), [wrapper] if kind == "wrap" else [])
                (theirs.repatch if theirs.found is not None and step != kind else theirs.apply)(*made)
            said, times = said_by(home, "you")
            assert times == patching.in_place(louder), step
            assert times == 1 or step != "install"
            assert times == said.isupper()
        patching.release("one")
        assert said_by(home, "you")[1] == 0


def test_what_repatch_replaced_is_not_in_place(monkeypatch):
    home = ModuleType("repatched.home")
    monkeypatch.setitem(sys.modules, home.__name__, home)
    home.greet = lambda text: f"hello {text}"
    theirs = Patch(home, "greet")
    theirs.apply(replacement, [])
    patching.patch("one", home, "greet", louder)
    assert (said_by(home, "you"), patching.in_place(louder)) == (("NPU YOU", 1), True)
    theirs.repatch(replacement, [wrapper])
    assert (said_by(home, "you"), patching.in_place(louder)) == (("<npu you>", 0), False)
    patching.patch("one", home, "greet", louder)
    assert (said_by(home, "you"), patching.in_place(louder)) == (("<NPU YOU>", 1), True)
    patching.release("one")
    assert said_by(home, "you") == ("<npu you>", 0)
