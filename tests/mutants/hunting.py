"""A pytest plugin (`-p mutants.hunting`) that hunts mutants: the tests run once, in two processes, and note which changes
they come by; then each change wakes in a process of its own, and the tests that came by it run until one fails. A change to
what runs at import wakes in a Python of its own, before the package is imported, with the tests nearest to it.

COLLATE_NPU_MUTANTS says how many are drawn, COLLATE_NPU_SEED which. A survivor is a test that is missing, a change that
changes nothing, or a check that nothing needs: the share is a measure, printed at the end, and no list excuses any.
"""

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from mutants.changes import Change, Switch, all_changes, drawn, installed
from reported import report

COUNT = int(os.environ.get("COLLATE_NPU_MUTANTS", "40"))
SEED = int(os.environ.setdefault("COLLATE_NPU_SEED", str(time.time_ns() // 1000 % 1_000_000)))
ROOMS = tuple(filter(None, os.environ.get("COLLATE_NPU_MUTANTS_OF", "").split()))
"""Modules that begin so, alone."""
AWAKE = os.environ.pop("COLLATE_NPU_AWAKE", "")
"""The change that such a Python is for."""
ALLOWED, FEW, UNSEEN = 0.2, 13, 0.5
"""The share that may survive all tests; so many of a small sample of one room, which its own tests alone hunt (of 37 of
proof, the worst room, 13 lived: of 25 nine, more or less); and the share that no test may come by: more says that tests do
not run any more."""
WORKERS = 2
STARTS = 60.0
"""Seconds that a Python of its own may take to import all."""
PATIENCE = 60.0 if COUNT > 40 else 15.0
"""Seconds a mutant has beyond what its tests took without it, and the most that the tests of one may take."""


def candidates() -> list[Change]:
    return [change for change in all_changes() if change.module.startswith(ROOMS or "collate_npu")]


def chosen() -> list[Change]:
    """Those drawn; the one that is awake from the start;
    or those that an earlier run wrote into the file COLLATE_NPU_MUTANTS_FROM, a line each."""
    if again := os.environ.get("COLLATE_NPU_MUTANTS_FROM"):
        lines = Path(again).read_text("utf-8").splitlines()
        wanted = {line.rpartition("\t")[2] for line in lines if line.startswith(("survived", "no test"))}
        return [change for change in all_changes() if str(change) in wanted]
    if AWAKE:
        return [change for change in all_changes() if str(change) == AWAKE][:1]
    return drawn(COUNT, SEED, candidates())


CHANGES = chosen()
SWITCH = installed(CHANGES)  # before conftest imports the package
SWITCH.awake = 0 if AWAKE else SWITCH.awake


def pytest_report_header() -> str:
    return f"mutants: {len(CHANGES)} drawn with COLLATE_NPU_SEED={SEED}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if AWAKE:
        return None
    items = session.items
    _do_not_shrink(items)
    halves = [items[n * len(items) // WORKERS : (n + 1) * len(items) // WORKERS] for n in range(WORKERS)]
    reached = _reached([(half, _forked(lambda half=half: _noted(half, SWITCH))) for half in halves])
    every = sorted({item.nodeid: (took, item) for tests in reached.values() for took, item in tests}.values(), key=_took)
    reached |= {number: every for number, change in enumerate(CHANGES) if change.at_import}
    hunted = [number for number in range(len(CHANGES)) if reached.get(number)]
    hunts = {number: _nearest(CHANGES[number], reached[number]) for number in hunted}
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    fates = _hunted(hunts, terminal.write)
    session.config.stash[FATES] = fates
    session.config.stash[FILES] = {number: {item.path for _, item in reached[number]} for number in hunted}
    alive = sum(fate == "alive" for fate in fates.values())
    missed = len(CHANGES) - len(fates)
    session.testsfailed = alive * (alive > max(ALLOWED * len(fates), FEW)) or missed * (missed > UNSEEN * len(CHANGES))
    return True


FATES = pytest.StashKey[dict[int, str]]()
FILES = pytest.StashKey[dict[int, set[Path]]]()
"""The test files that come by each change."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Who survived, who was not come by, and the share of the killed among the others."""
    fates, say = config.stash.get(FATES, {}), terminalreporter.write_line
    missed = [change for number, change in enumerate(CHANGES) if number not in fates]
    alive = [CHANGES[number] for number, fate in fates.items() if fate == "alive"]
    for title, some in (("no test came by", missed), ("survived", alive)):
        for change in some:
            say(f"{title}: {change.module.replace('.', '/')}.py:{change.line}\t{change}")
    if COUNT > 100:
        _say_alone(config.stash.get(FILES, {}), {number for number, fate in fates.items() if fate == "killed"}, say)
    killed = len(fates) - len(alive)
    report({"mutants drawn": len(CHANGES), "not come by": len(missed), "killed": killed}, {})
    say(f"mutants: {len(CHANGES)} drawn, {len(missed)} not come by; {killed} of {len(fates)} killed; seed {SEED}")


def _say_alone(files: dict[int, set[Path]], killed: set[int], say: Callable[[str], Any]) -> None:
    """Of each test file of 100 lines the mutants that no other file comes by and that it kills, the fewest a line first."""
    alone = Counter(next(iter(paths)) for number, paths in files.items() if len(paths) == 1 and number in killed)
    sizes = {path: path.read_text("utf-8").count("\n") for path in set().union(*files.values())}
    for path in sorted(sizes, key=lambda path: alone[path] / sizes[path]):
        if sizes[path] >= 100:
            say(f"alone: {path.name} kills {alone[path]}, {100 * alone[path] / sizes[path]:.1f} a hundred lines")


def _do_not_shrink(items: Iterable[pytest.Item]) -> None:
    """The first failure is enough."""
    for item in items:
        function = getattr(item, "function", None)
        if getattr(function, "is_hypothesis_test", False):
            own = getattr(function, "_hypothesis_internal_use_settings", None) or settings.default
            function._hypothesis_internal_use_settings = settings(own, phases=[Phase.explicit, Phase.generate])


# --- the tests by themselves


Noted = list[tuple[str, float, list[int]]]


def _noted(items: list[pytest.Item], switch: Switch) -> Noted:
    """Of each test that passes what it took, and the changes it came by."""
    found: Noted = []
    for item, following in zip(items, [*items[1:], None]):
        switch.seen.clear()
        start = time.monotonic()
        if _passes(item, following):
            found.append((item.nodeid, time.monotonic() - start, sorted(switch.seen)))
    return found


def _passes(item: pytest.Item, following: pytest.Item | None) -> bool:
    from _pytest.runner import runtestprotocol

    return all(report.outcome != "failed" for report in runtestprotocol(item, nextitem=following, log=False))


def _reached(runs: Iterable[tuple[list[pytest.Item], Any]]) -> dict[int, list[tuple[float, pytest.Item]]]:
    reached: dict[int, list[tuple[float, pytest.Item]]] = {}
    for items, answer in list(runs):
        named = {item.nodeid: item for item in items}
        for nodeid, took, seen in answer():
            for number in seen:
                reached.setdefault(number, []).append((took, named[nodeid]))
    return reached


def _forked(work: Callable[[], Any]) -> Callable[[], Any]:
    """The work in a process of its own, and how to wait for what it found."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        with os.fdopen(writer, "w") as out:
            json.dump(work(), out)
        os._exit(0)
    os.close(writer)

    def answer() -> Any:
        with os.fdopen(reader) as told:
            found = json.load(told)
        os.waitpid(child, 0)
        return found

    return answer


# --- and with a change awake


def _took(test: tuple[float, pytest.Item]) -> float:
    return test[0]


def _nearest(change: Change, tests: list[tuple[float, pytest.Item]]) -> tuple[float, list[pytest.Item]]:
    """The tests of the module first, then the quickest, as long as the patience lasts; and what they took."""
    own = f"test_{change.module.rpartition('.')[2]}.py"
    ordered = sorted(tests, key=lambda test: (test[1].path.name != own or test[0] > 1, test[0]))
    spent, taken = 0.0, []
    for took, item in ordered:
        if spent + took > PATIENCE and taken:
            break
        spent += took
        taken.append(item)
    return spent, taken


def _hunted(hunts: dict[int, tuple[float, list[pytest.Item]]], say: Callable[[str], Any]) -> dict[int, str]:
    """The fate of each: killed by a test, by the clock, or alive."""
    waiting, running, fates = list(hunts.items()), dict[int, tuple[int, float]](), dict[int, str]()
    while waiting or running:
        while waiting and len(running) < WORKERS:
            number, (spent, items) = waiting.pop(0)
            more = PATIENCE + STARTS * CHANGES[number].at_import
            running[_awake(number, items)] = number, time.monotonic() + 3 * spent + more
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in running:
            number, _ = running.pop(child)
            fates[number] = "alive" if status == 0 else "killed"
            if status == 0:
                say(f"alive: {CHANGES[number]}\n")
            if len(fates) % 40 == 0:
                say(f"{len(fates)} of {len(hunts)} hunted\n")
        for late in [child for child, (_, until) in running.items() if time.monotonic() > until]:
            os.killpg(late, signal.SIGKILL)
        time.sleep(0 if child else 0.02)
    return fates


def _awake(number: int, items: list[pytest.Item]) -> int:
    """A process with this change awake; it ends with 0 where all its tests pass."""
    child = os.fork()
    if child:
        return child
    os.setpgid(0, 0)
    if CHANGES[number].at_import:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        said = ("-q", "-x", "-p", "no:cacheprovider", "-p", "mutants.hunting", *(item.nodeid for item in items))
        env = {**os.environ, "COLLATE_NPU_AWAKE": str(CHANGES[number])}
        os.execve(sys.executable, [sys.executable, "-m", "pytest", *said], env)
    SWITCH.awake = number
    for item, following in zip(items, [*items[1:], None]):
        try:
            passed = _passes(item, following)
        except BaseException:
            passed = False
        if not passed:
            os._exit(1)
    os._exit(0)
