"""Patching: what is taken over comes back exactly, and nobody else's patch is lost by it."""

from __future__ import annotations

import functools
import inspect
import itertools
import pickle
import sys
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collate_npu.integrations import patching


@pytest.fixture(autouse=True)
def empty_table():
    assert not patching._TABLE
    yield
    for holder in ("one", "two"):
        patching.release(holder)
    assert not patching._TABLE


class Base:
    def greet(self, name: str = "you") -> str:
        """Greets."""
        return f"hello {name}"

    @staticmethod
    def alone(name: str) -> str:
        return f"alone {name}"


class Child(Base): ...


def louder(original, self, *args, **kwargs):
    return original(self, *args, **kwargs).upper()


def polite(original, self, *args, **kwargs):
    return original(self, *args, **kwargs) + ", please"


def test_ours_is_given_the_original_and_looks_like_it():
    original = Base.greet
    patching.patch("one", Base, "greet", louder)
    assert Base().greet() == "HELLO YOU"
    assert Base().greet(name="me") == "HELLO ME"
    assert Base.greet.__doc__ == "Greets."
    assert inspect.unwrap(Base.greet) is original
    patching.release("one")
    assert Base.__dict__["greet"] is original


def test_a_name_that_the_owner_inherits_is_inherited_again():
    patching.patch("one", Child, "greet", louder)
    assert (Child().greet(), Base().greet()) == ("HELLO YOU", "hello you")
    patching.release("one")
    assert "greet" not in vars(Child)


def test_a_static_method_stays_one():
    before = vars(Base)["alone"]
    patching.patch("one", Base, "alone", lambda original, name: original(name) + "!")
    assert (Base.alone("a"), Base().alone("a")) == ("alone a!", "alone a!")
    patching.release("one")
    assert vars(Base)["alone"] is before


def test_twice_by_one_holder_is_once_and_two_holders_are_counted():
    original = Base.greet
    patching.patch("one", Base, "greet", polite)
    patching.patch("one", Base, "greet", polite)
    patching.patch("two", Base, "greet", polite)
    assert Base().greet() == "hello you, please"
    patching.release("one")
    patching.release("one")
    assert Base().greet() == "hello you, please", "the other one still holds it"
    patching.release("two")
    assert Base.greet is original


@given(st.permutations(["one", "two"]))
def test_two_patches_of_one_name_come_off_in_any_order(order):
    original = Base.greet
    patching.patch("one", Base, "greet", louder)
    patching.patch("two", Base, "greet", polite)
    assert Base().greet() == "HELLO YOU, please"
    patching.release(order[0])
    assert Base().greet() == {"one": "hello you, please", "two": "HELLO YOU"}[order[0]]
    patching.release(order[1])
    assert Base.greet is original


def test_a_strangers_later_patch_stays_and_ours_lets_through(monkeypatch):
    original = Base.greet
    patching.patch("one", Base, "greet", louder)
    ours = Base.greet

    @functools.wraps(ours)  # copies all that hangs on ours
    def stranger(self, *args, **kwargs):
        return f"<{ours(self, *args, **kwargs)}>"

    monkeypatch.setattr(Base, "greet", stranger)
    assert Base().greet() == "<HELLO YOU>"
    patching.release("one")
    assert Base.greet is stranger
    assert Base().greet() == "<hello you>"
    patching.patch("one", Base, "greet", polite)  # on top of theirs
    assert Base().greet() == "<hello you>, please"
    patching.release("one")
    assert Base.greet is stranger
    Base.greet = ours  # the stranger undoes their own: what they found
    assert Base().greet() == "hello you"
    patching.patch("one", Base, "greet", polite)
    patching.release("one")
    assert Base.greet is original, "our own spent wrapper is taken off on the way"


def test_a_strangers_earlier_patch_is_what_comes_back(monkeypatch):
    monkeypatch.setattr(Base, "greet", stranger := lambda self: "theirs")
    patching.patch("one", Base, "greet", louder)
    assert Base().greet() == "THEIRS"
    patching.release("one")
    assert Base.greet is stranger


# --- functions that other modules imported by name


def modules(monkeypatch, *names):
    made = [ModuleType(name) for name in names]
    for module in made:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def work(value):
    return value


def test_everyone_below_the_package_gets_ours_under_whatever_name_and_gives_it_back(monkeypatch):
    home, friend, other, late = modules(monkeypatch, "peer.home", "peer.friend", "peerless", "peer.late")
    home.work = friend.w = other.work = work
    patching.patch("one", home, "work", lambda original, value: original(value) + 1, everywhere="peer")
    assert (home.work(1), friend.w(1), other.work(1)) == (2, 2, 1)
    assert friend.w is home.work
    late.work = home.work  # a module of theirs that is imported while ours is there
    patching.release("one")
    assert home.work is friend.w is late.work is work


def test_a_module_that_a_stranger_patched_keeps_theirs_and_the_others_get_the_original(monkeypatch):
    home, friend = modules(monkeypatch, "peer.home", "peer.friend")
    home.work = friend.work = work
    patching.patch("one", home, "work", lambda original, value: original(value) + 1, everywhere="peer")
    ours = home.work
    home.work = stranger = lambda value: -ours(value)
    patching.release("one")
    assert home.work is stranger
    assert friend.work is work
    assert home.work(1) == -1


def test_two_patches_of_a_function_that_was_imported_come_off_lower_one_first(monkeypatch):
    home, friend = modules(monkeypatch, "peer.home", "peer.friend")
    home.work = friend.work = work
    patching.patch("one", home, "work", lambda original, value: original(value) + 1, everywhere="peer")
    patching.patch("two", home, "work", lambda original, value: original(value) * 10, everywhere="peer")
    assert home.work(1) == friend.work(1) == 20
    patching.release("one")
    assert home.work(1) == friend.work(1) == 10
    patching.release("two")
    assert home.work is friend.work is work


def test_nothing_is_looked_up_that_a_lazy_module_would_have_to_import(monkeypatch):
    class Lazy(ModuleType):
        def __getattr__(self, name):
            raise AssertionError(f"{name} was asked for")

    (home,) = modules(monkeypatch, "peer.home")
    home.work = work
    monkeypatch.setitem(sys.modules, "peer.lazy", Lazy("peer.lazy"))
    patching.patch("one", home, "work", lambda original, value: original(value), everywhere="peer")


def test_a_missing_name_raises_and_leaves_nothing_behind():
    with pytest.raises(AttributeError, match="missing"):
        patching.patch("one", Base, "missing", louder)


def test_patched_classes_still_travel_to_workers():
    patching.patch("one", Base, "greet", louder)
    assert pickle.loads(pickle.dumps(Base())).greet() == "HELLO YOU"


@given(st.lists(st.tuples(st.sampled_from(["one", "two"]), st.sampled_from([louder, polite, None])), max_size=8))
def test_any_history_ends_with_the_original(history):
    original = Base.greet
    for holder, ours in history:
        patching.release(holder) if ours is None else patching.patch(holder, Base, "greet", ours)
    for holder in itertools.chain(["one", "two"]):
        patching.release(holder)
    assert Base.greet is original
