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

HEARD = []


def louder(original, *args, **kwargs):
    HEARD.append(louder)
    return original(*args, **kwargs).upper()


def polite(original, *args, **kwargs):
    HEARD.append(polite)
    return original(*args, **kwargs) + ", please"


@pytest.fixture(autouse=True)
def released():
    yield
    for holder in ("one", "two"):
        patching.release(holder)
    assert not any(map(patching.in_place, (louder, polite)))


class Base:
    def greet(self, name: str = "you") -> str:
        """Greets."""
        return f"hello {name}"

    @staticmethod
    def alone(name: str = "you") -> str:
        """Greets."""
        return f"alone {name}"


class Child(Base): ...


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


# --- one law of a function, of who holds our replacements of it, and of strangers who patch it too


def modules(monkeypatch, *names):
    made = [ModuleType(name) for name in names]
    for module in made:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def hello(name):
    return f"hello {name}"


class Stranger:
    """Patches `greet` of a module. `wrap`, `replace` and `repatch` do in lines of ours what MindSpeed does (core_r0.16.0
    patch_utils.py:38-134, megatron_adaptor.py `repatch(args)`): it keeps what it found at first, sets its own in the module
    whatever stands there, and by identity wherever it is."""

    MADE = {
        "wrap": lambda found: lambda name: f"<{found(name)}>",
        "replace": lambda found: lambda name: f"npu {name}",
        "nothing": lambda found: found,
    }

    def __init__(self, module):
        self.module, self.found, self.final, self.undone = module, None, None, module.greet

    def does(self, step):
        kind, again = step.removeprefix("repatch "), step.startswith("repatch")
        if kind in self.MADE:
            if again and self.found is not None:
                self.everywhere(self.final, self.found)
            self.found, current = self.found or self.module.greet, self.module.greet
            self.final = self.module.greet = self.MADE[kind](self.found)
            self.everywhere(current, self.final)
        elif kind == "load again":
            self.module.greet = lambda name: f"hello {name}"
        elif kind == "undo":  # puts back what it found
            self.module.greet = self.undone
        else:
            self.undone = self.module.greet
            getattr(self, kind)(self.module.greet)

    def everywhere(self, old, new):
        for module in list(sys.modules.values()):
            if vars(module).get("greet") is old:
                module.greet = new

    def closure(self, found):
        @functools.wraps(found)  # copies all that hangs on ours
        def greet(name):
            return f"({found(name)})"

        self.module.greet = greet

    def named(self, found):
        scope = {"kept": found}
        exec("def greet(name): return '[' + kept(name) + ']'", scope)
        self.module.greet = scope["greet"]


OURS = st.tuples(st.sampled_from(["one", "two"]), st.sampled_from([louder, polite, None]))
"""A holder, and what it puts in place of the function; None: it releases all it holds."""
THEIRS = ["wrap", "replace", "repatch wrap", "repatch replace", "repatch nothing", "load again", "undo", "closure", "named"]


@given(st.lists(OURS | st.sampled_from(THEIRS), max_size=8), st.booleans())
@example([("one", louder), "closure", ("one", None), ("one", polite), ("one", None), "undo"], True)
@example([("one", louder), "named", ("one", louder), "replace", ("one", louder)], True)
@example([("one", louder), "named", "named", ("one", louder)], True)
@example(["replace", ("one", louder), "repatch wrap", ("one", louder), ("one", None)], False)
@example([("one", louder), ("one", louder), ("two", polite), ("two", louder), ("one", None)], True)
@example([("one", louder), ("one", polite), "load again", ("one", louder)], True)
def test_ours_is_called_once_while_it_is_held_or_known_to_be_lost_and_a_patch_mends_it(steps, imported):
    """Without strangers the later replacement runs on top, whoever imported the function has what its home has, and the
    original comes back. With them theirs stays, and ours lets through when it is released."""
    with pytest.MonkeyPatch.context() as patch:
        home, friend = modules(patch, "peer.home", "peer.friend")
        home.greet = hello
        friend.greet = hello if imported else str
        stranger, strangers, held = Stranger(home), any(isinstance(step, str) for step in steps), {}
        for step in [*steps, ("one", louder), ("one", None), ("two", None)]:
            if isinstance(step, str):
                stranger.does(step)
            elif step[1] is None:
                patching.release(step[0])
                held = {ours: left for ours, holders in held.items() if (left := holders - {step[0]})}
            else:
                patching.patch(step[0], home, "greet", step[1], everywhere="peer")
                held[step[1]] = held.get(step[1], set()) | {step[0]}
                assert patching.in_place(step[1])
            HEARD.clear()
            said, wanted = home.greet("you"), "hello you"
            for ours in (louder, polite):
                calls, known = HEARD.count(ours), patching.in_place(ours)
                assert known == calls or (0 == known < calls == 1 and "named" in steps), step
            for ours in held:
                wanted = wanted.upper() if ours is louder else wanted + ", please"
            if not strangers:
                assert said == wanted
                assert not imported or friend.greet("you") == said
        assert HEARD == []  # behind the last release
        assert strangers or home.greet is hello


class Lazy(ModuleType):
    def __getattr__(self, name):
        raise AssertionError(f"{name} was asked for, which it would have to import")


def test_everyone_below_the_package_gets_ours_under_whatever_name_and_gives_it_back(monkeypatch):
    home, friend, other, late = modules(monkeypatch, "peer.home", "peer.friend", "peerless", "peer.late")
    monkeypatch.setitem(sys.modules, "peer.lazy", Lazy("peer.lazy"))
    home.greet = friend.g = other.greet = hello
    patching.patch("one", home, "greet", louder, everywhere="peer")
    assert (home.greet("x"), other.greet("x")) == ("HELLO X", "hello x")
    assert friend.g is home.greet
    late.greet = home.greet  # a module of theirs that is imported while ours is there
    home.greet = lambda name: f"again {name}"  # the module is loaded again, as `importlib.reload` does
    for _ in range(2):
        patching.patch("one", home, "greet", louder, everywhere="peer")
        assert (home.greet("x"), friend.g("x"), late.greet("x")) == ("AGAIN X",) * 3
    patching.release("one")
    assert home.greet("x") == "again x"
    assert home.greet is friend.g is late.greet


# --- releases


@pytest.fixture
def has(monkeypatch):
    """Packages of these versions."""
    for known in (releases.say_outside, trainers):
        known.cache_clear()
    yield lambda **found: monkeypatch.setattr(releases, "_FOUND", {k.replace("_", "-"): v for k, v in found.items()})
    releases.say_outside.cache_clear()


LAYER = type("Layer", (), {"__module__": "mcore_bridge.model", "greet": lambda self: None})
RELEASES = {**dict.fromkeys(("4.6.0", "4.6.0+local", "4.6.0.dev0", ""), False)}
RELEASES |= dict.fromkeys(("4.6.1", "5.0", "3.9.3", "main", releases.UNKNOWN), True)


@pytest.mark.parametrize(
    ("owner", "found", "said"),
    [
        *((Base, {"ms_swift": at}, f"ms-swift {at} is not among" * outside) for at, outside in RELEASES.items()),
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
