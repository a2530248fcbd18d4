"""Patching: what is taken over comes back exactly, nobody else's patch is lost by it, and what replaced ours is mended."""

import functools
import importlib
import inspect
import pickle
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import example, given, strategies as st

from collate_npu import releases
from collate_npu.integrations import patching, trainers


@pytest.fixture(autouse=True)
def released():
    yield
    for holder in ("one", "two"):
        patching.release(holder)
    assert not any(map(patching.in_place, (louder, polite, more, double)))


class Base:
    def greet(self, name: str = "you") -> str:
        """Greets."""
        return f"hello {name}"

    @staticmethod
    def alone(name: str = "you") -> str:
        """Greets."""
        return f"alone {name}"


class Child(Base): ...


HEARD = []


def louder(original, *args, **kwargs):
    HEARD.append(args)
    return original(*args, **kwargs).upper()


def polite(original, *args, **kwargs):
    return original(*args, **kwargs) + ", please"


def more(original, value):
    return original(value) + 1


def double(original, value):
    return original(value) * 2


@pytest.mark.parametrize("name", ["greet", "alone"])
@pytest.mark.parametrize("owner", [Base, Child])
def test_ours_is_given_the_original_looks_like_it_travels_to_workers_and_goes_exactly(owner, name):
    """A name that the owner inherits is inherited again; loading the module again wraps nothing twice."""
    before, original = vars(owner).get(name), getattr(owner, name)
    said = original() if name == "alone" else original(owner())
    with pytest.raises(AttributeError, match="missing"):
        patching.patch("one", owner, "missing", louder)
    patching.patch("one", owner, name, louder)
    again = importlib.reload(patching)
    again.patch("one", owner, name, louder)
    assert getattr(pickle.loads(pickle.dumps(owner())), name)() == getattr(owner(), name)() == said.upper()
    assert getattr(owner(), name)(name="me") == said.upper().replace("YOU", "ME")
    assert name != "alone" or owner.alone("a") == "ALONE A"
    assert owner is Base or getattr(Base(), name)() == said
    assert (getattr(owner, name).__doc__, inspect.unwrap(getattr(owner, name))) == ("Greets.", original)
    again.release("one")
    assert (vars(owner).get(name), name in vars(owner)) == (before, before is not None)


def test_a_strangers_later_patch_stays_and_ours_lets_through(monkeypatch):
    monkeypatch.setattr(Base, "greet", Base.greet)  # its wrapper stays below the stranger's
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


def test_a_strangers_patch_that_names_ours_as_a_global_is_seen_to_call_it(monkeypatch):
    monkeypatch.setattr(Base, "greet", Base.greet)
    patching.patch("one", Base, "greet", louder)
    scope = {"kept": Base.greet}
    exec("def stranger(self, name='you'): return '<' + kept(self, name) + '>'", scope)
    monkeypatch.setattr(Base, "greet", scope["stranger"])
    patching.patch("one", Base, "greet", louder)
    assert Base.greet is scope["stranger"]
    assert patching.in_place(louder)
    monkeypatch.setattr(Base, "greet", lambda self: "another")
    patching.patch("one", Base, "greet", louder)
    assert Base().greet() == "ANOTHER"
    patching.release("one")


def modules(monkeypatch, *names):
    made = [ModuleType(name) for name in names]
    for module in made:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


class Lazy(ModuleType):
    def __getattr__(self, name):
        raise AssertionError(f"{name} was asked for, which it would have to import")


@pytest.mark.parametrize("patched", [False, True])
def test_everyone_below_the_package_gets_ours_under_whatever_name_and_gives_it_back(monkeypatch, patched):
    """A module that a stranger patched keeps theirs, and the others get the original."""
    home, friend, other, late = modules(monkeypatch, "peer.home", "peer.friend", "peerless", "peer.late")
    monkeypatch.setitem(sys.modules, "peer.lazy", Lazy("peer.lazy"))
    home.work = friend.w = other.work = abs
    patching.patch("one", home, "work", more, everywhere="peer")
    assert (home.work(1), friend.w(1), other.work(1)) == (2, 2, 1)
    assert friend.w is home.work
    late.work = ours = home.work  # a module of theirs that is imported while ours is there
    if patched:
        home.work = lambda value: -ours(value)
    patching.release("one")
    assert (friend.w, late.work, home.work(1)) == (abs, abs, -1 if patched else 1)
    assert patched or home.work is abs


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


@pytest.fixture
def has(monkeypatch):
    """Packages of these versions."""
    for known in (releases.say_outside, trainers):
        known.cache_clear()
    yield lambda **found: monkeypatch.setattr(releases, "_FOUND", {k.replace("_", "-"): v for k, v in found.items()})
    releases.say_outside.cache_clear()


LAYER = type("Layer", (), {"__module__": "mcore_bridge.model", "greet": lambda self: None})
SILENT, SAID = ("4.6.0", "4.6.0+local", "4.6.0.dev0", ""), ("4.6.1", "5.0", "3.9.3", "main", releases.UNKNOWN)


@pytest.mark.parametrize(
    ("owner", "found", "said"),
    [
        *((Base, {"ms_swift": version}, "") for version in SILENT),
        *((Base, {"ms_swift": version}, f"ms-swift {version} is not among") for version in SAID),
        (LAYER, {"ms_swift": "4.6.0", "mcore_bridge": "9.0"}, "mcore-bridge 9.0"),
    ],
)
def test_an_install_says_once_that_a_release_was_not_run(recwarn, has, owner, found, said):
    """Of who installs, and of the package that is patched."""
    has(**found)
    for ours in (louder, polite):
        patching.patch("ms-swift", owner, "greet", ours)
    patching.release("ms-swift")
    texts = [str(warning.message) for warning in recwarn.list]
    assert [said in text for text in texts] == [True] * bool(said)
    assert owner is LAYER or all("collate-npu guide ms-swift" in text and "4.6.0" in text for text in texts)


def test_each_trainer_has_a_page_that_names_its_release():
    guide = Path(releases.__file__).parent / "guide"
    for package, tested in trainers().items():
        assert releases.page_of(package) != "index", package
        page = (guide / f"{releases.page_of(package)}.md").read_text(encoding="utf-8")
        assert package in ("accelerate", "transformers") or tested in page, package


# --- MindSpeed's `repatch(args)` after our install: what it replaced is told, and the next install mends it


class Patch:
    """Does in lines of ours what MindSpeed's does (core_r0.16.0 patch_utils.py:38-134, megatron_adaptor.py `repatch`): it
    keeps what it found at first, sets its own in the module whatever stands there, and by identity wherever it is."""

    def __init__(self, module, name):
        self.module, self.name, self.found, self.final = module, name, None, None

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


MADE = {"wrap": (None, [wrapper]), "replace": (replacement, []), "nothing": (None, [])}
STEPS = ("install", "install", "uninstall", "wrap", "replace", "repatch wrap", "repatch replace", "repatch nothing")


@example(["replace", "install", "repatch wrap", "install", "uninstall"], False)
@given(st.lists(st.sampled_from(STEPS), max_size=8), st.booleans())
def test_ours_is_called_once_or_known_to_be_lost_and_an_install_mends_it(steps, imported):
    with pytest.MonkeyPatch.context() as patch:
        home, friend = modules(patch, "repatched.home", "repatched.friend")
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
                (theirs.repatch if theirs.found is not None and step != kind else theirs.apply)(*MADE[kind])
            HEARD.clear()
            said, times = home.greet("you"), len(HEARD)
            assert times == patching.in_place(louder), step
            assert times == 1 or step != "install"
            assert times == said.isupper()
        patching.release("one")
        HEARD.clear()
        assert (home.greet("you").islower(), HEARD) == (True, [])
