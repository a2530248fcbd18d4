"""Patching: what is taken over comes back exactly, and nobody else's patch is lost by it."""

import functools
import importlib
import inspect
import pickle
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, strategies as st

from collate_npu import releases
from collate_npu.integrations import patching, trainers


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


def test_loading_the_module_again_wraps_nothing_twice():
    patching.patch("one", Base, "greet", polite)
    again = importlib.reload(patching)
    again.patch("one", Base, "greet", polite)
    assert Base().greet() == "hello you, please"
    again.release("one")
    assert Base().greet() == "hello you"


def test_ours_is_given_the_original_looks_like_it_and_travels_to_workers():
    original = Base.greet
    with pytest.raises(AttributeError, match="missing"):
        patching.patch("one", Base, "missing", louder)
    patching.patch("one", Base, "greet", louder)
    assert pickle.loads(pickle.dumps(Base())).greet() == "HELLO YOU"
    assert Base().greet() == "HELLO YOU"
    assert Base().greet(name="me") == "HELLO ME"
    assert Base.greet.__doc__ == "Greets."
    assert inspect.unwrap(Base.greet) is original
    patching.release("one")
    assert Base.__dict__["greet"] is original


def test_a_name_that_the_owner_inherits_is_inherited_again_and_a_static_method_stays_one():
    patching.patch("one", Child, "greet", louder)
    assert (Child().greet(), Base().greet()) == ("HELLO YOU", "hello you")
    patching.release("one")
    assert "greet" not in vars(Child)
    before = vars(Base)["alone"]
    patching.patch("one", Base, "alone", lambda original, name: original(name) + "!")
    assert (Base.alone("a"), Base().alone("a")) == ("alone a!", "alone a!")
    patching.release("one")
    assert vars(Base)["alone"] is before


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


class InCircles:
    """A wrapper that leads to itself."""

    looks = 0

    def __call__(self): ...

    @property
    def __wrapped__(self):
        self.looks += 1
        assert self.looks == 1, "looked at twice"
        return self


def test_a_strangers_patch_that_names_ours_as_a_global_is_seen_to_call_it(monkeypatch):
    patching.patch("one", Base, "greet", louder)
    scope = {"kept": Base.greet}
    exec("def stranger(self, name='you'): return '<' + kept(self, name) + '>'", scope)
    monkeypatch.setattr(Base, "greet", scope["stranger"])
    patching.patch("one", Base, "greet", louder)
    assert Base.greet is scope["stranger"]
    assert patching.in_place(louder)
    monkeypatch.setattr(Base, "greet", InCircles())
    assert not patching.in_place(louder)
    monkeypatch.setattr(Base, "greet", lambda self: "another")
    patching.patch("one", Base, "greet", louder)
    assert Base().greet() == "ANOTHER"
    patching.release("one")


# --- functions that other modules imported by name


work = abs  # some function


def modules(monkeypatch, *names):
    made = [ModuleType(name) for name in names]
    for module in made:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


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


def test_nothing_is_looked_up_that_a_lazy_module_would_have_to_import(monkeypatch):
    class Lazy(ModuleType):
        def __getattr__(self, name):
            raise AssertionError(f"{name} was asked for")

    (home,) = modules(monkeypatch, "peer.home")
    home.work = work
    monkeypatch.setitem(sys.modules, "peer.lazy", Lazy("peer.lazy"))
    patching.patch("one", home, "work", lambda original, value: original(value), everywhere="peer")


@given(st.lists(st.tuples(st.sampled_from(["one", "two"]), st.sampled_from([louder, polite, None])), max_size=8))
def test_a_patch_is_in_place_while_somebody_holds_it_the_later_ones_on_top(history):
    """Holding it twice is holding it once; whoever imported the function has what its home has; the original comes back."""
    with pytest.MonkeyPatch.context() as patch:
        home, friend = modules(patch, "peer.home", "peer.friend")
        home.greet = friend.greet = original = lambda name: f"hello {name}"
        held = {}
        for holder, ours in [*history, ("one", None), ("two", None)]:
            if ours is None:
                patching.release(holder)
                held = {each: holders - {holder} for each, holders in held.items() if holders - {holder}}
            else:
                patching.patch(holder, home, "greet", ours, everywhere="peer")
                held[ours] = held.get(ours, set()) | {holder}
            said = "hello you"
            for each in held:
                said = said.upper() if each is louder else said + ", please"
            assert home.greet("you") == friend.greet("you") == said
        assert home.greet is friend.greet is original


@pytest.mark.parametrize("edited", [False, True])
def test_a_module_that_is_run_again_is_patched_again(tmp_path, monkeypatch, edited):
    """`importlib.reload`: what the second install is for; everybody has ours again, and once only."""
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "reloaded_here.py"
    source.write_text("def work(x): return x\n")
    home = importlib.import_module("reloaded_here")
    (friend,) = modules(monkeypatch, "reloaded_here.friend")
    friend.work = home.work

    def install():
        for ours in (more, double):
            patching.patch("one", home, "work", ours, everywhere="reloaded_here")

    install()
    assert (home.work(1), friend.work(1)) == (4, 4)
    source.write_text("def work(x): return x + 10\n" if edited else source.read_text())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    importlib.reload(home)
    for _ in range(2):
        install()
        assert [home.work(1), friend.work(1)] == [24 if edited else 4] * 2
    patching.release("one")
    assert home.work(1) == friend.work(1) == (11 if edited else 1)
    assert home.work is friend.work
    del sys.modules["reloaded_here"]


def more(original, value):
    return original(value) + 1


def double(original, value):
    return original(value) * 2


# --- releases that were not run


@pytest.fixture
def has(monkeypatch):
    """Packages of these versions."""
    for known in (releases.say_outside, trainers):
        known.cache_clear()
    yield lambda **found: monkeypatch.setattr(releases, "_FOUND", {k.replace("_", "-"): v for k, v in found.items()})
    releases.say_outside.cache_clear()


SILENT, SAID = ("4.6.0", "4.6.0+local", "4.6.0.dev0", ""), ("4.6.1", "5.0", "3.9.3", "main", releases.UNKNOWN)


@pytest.mark.parametrize("version", [*SILENT, *SAID])
def test_an_install_says_once_that_a_release_was_not_run(recwarn, has, version):
    has(ms_swift=version)
    for ours in (louder, polite):
        patching.patch("ms-swift", Base, "greet", ours)
    patching.release("ms-swift")
    texts = [str(warning.message) for warning in recwarn.list]
    assert [f"ms-swift {version} is not among" in text for text in texts] == [True] * (version in SAID)
    assert all("collate-npu guide ms-swift" in text and "4.6.0" in text for text in texts)


def test_so_does_one_of_the_package_that_is_patched(recwarn, has):
    has(ms_swift="4.6.0", mcore_bridge="9.0")
    owner = type("Layer", (), {"__module__": "mcore_bridge.model", "forward": lambda self: None})
    patching.patch("ms-swift", owner, "forward", lambda original, self: original(self))
    patching.release("ms-swift")
    assert "mcore-bridge 9.0" in str(recwarn.pop().message)


def test_each_trainer_has_a_page_that_names_its_release():
    guide = Path(releases.__file__).parent / "guide"
    for package, tested in trainers().values():
        assert releases.page_of(package) != "index", package
        page = (guide / f"{releases.page_of(package)}.md").read_text(encoding="utf-8")
        assert package in ("accelerate", "transformers") or tested in page, package


@pytest.mark.parametrize("version", ["4.57.1", "5.1", "5.23.0", "5.24.0", "4.56.0"])
def test_the_guard_and_adapt_say_it_too(recwarn, has, version):
    pytest.importorskip("transformers")
    from collate_npu import adapt, guard_first_batch
    from collate_npu.testing import tiny_model

    model = tiny_model("llama", vocab_size=8)
    has(transformers=version)
    for _ in range(2):
        guard_first_batch(model)()
        adapt(model).remove()
    said = [text for warning in recwarn.list if "is not among" in (text := str(warning.message))]
    assert [f"transformers {version}" in text for text in said] == [True] * (version in ("5.24.0", "4.56.0"))
