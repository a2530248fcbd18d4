"""A pytest plugin (`-p mutants.hunting`): of small changes to the code, how many do the tests notice? A measure, no gate.

COLLATE_NPU_MUTANTS says how many are drawn, COLLATE_NPU_SEED which. The tests run once, in two processes, and note which
changes they come by; then each change wakes in a process of its own, and the tests that came by it run until one fails. A
change to what runs at import wakes in a Python of its own, before the package is imported, with the tests nearest to it. A
survivor is a test that is missing, a change that changes nothing, or a check that nothing needs.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from mutants.changes import ASLEEP, ROOT, Change, all_changes, drawn, installed
from reported import report

COUNT = int(os.environ.get("COLLATE_NPU_MUTANTS", "0"))
SEED = int(os.environ.setdefault("COLLATE_NPU_SEED", str(time.time_ns() // 1000 % 1_000_000)))
ROOMS = tuple(filter(None, os.environ.get("COLLATE_NPU_MUTANTS_OF", "").split()))
"""Modules that begin so, alone."""
AWAKE = os.environ.pop("COLLATE_NPU_AWAKE", "")
"""The change that such a Python is for."""
WORKERS = 2
STARTS = 60.0
"""Seconds that a Python of its own may take to import all."""
PATIENCE = 60.0
"""Seconds a mutant has beyond what its tests took without it, and the most that the tests of one may take."""
LATE = ["the clock"]
"""Who kills what does not end."""


def chosen() -> list[Change]:
    """Those drawn; the one that is awake from the start;
    or those that end the lines of the file COLLATE_NPU_MUTANTS_FROM, as an earlier run wrote them."""
    again = os.environ.get("COLLATE_NPU_MUTANTS_FROM")
    if not (again or AWAKE):
        return drawn(COUNT, SEED, [change for change in all_changes() if change.module.startswith(ROOMS or "collate_npu")])
    lines = [AWAKE] if AWAKE else Path(again).read_text("utf-8").splitlines()
    wanted = {line.rpartition("\t")[2] for line in lines}
    return list({str(change): change for change in all_changes(AWAKE) if str(change) in wanted}.values())


CHANGES = chosen()
SWITCH = installed(CHANGES)  # before conftest imports the package
SWITCH.awake = 0 if AWAKE else ASLEEP


def pytest_configure() -> None:
    """The first failure is enough, and is not shrunk."""
    settings.load_profile("first")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    say = session.config.pluginmanager.get_plugin("terminalreporter").write_line
    if AWAKE:
        say("".join(f"\nkiller: {killer}" for killer in _killers(0, session.items)))
    else:
        session.testsfailed = _measured(session.items, say)
    return True


def _measured(items: list[pytest.Item], say: Callable[[str], Any]) -> int:
    """The share killed, of all drawn and of those that a test came by; it says which survive as they come, and here who was
    not come by."""
    fates = _hunted(_drives(items), say)
    missed = [change for number, change in enumerate(CHANGES) if number not in fates]
    for change in missed:
        say(f"no test came by\t{change.place}\t{change}")
    killed = sum(map(bool, fates.values()))
    counts = {"mutants drawn": len(CHANGES), "come by": len(fates), "killed": killed}
    shares = f"{killed / max(len(CHANGES), 1):.1%} of all drawn, {killed / max(len(fates), 1):.1%} of those come by"
    report(counts | {"share of all": shares}, {})
    say(", ".join(f"{value} {name}" for name, value in counts.items()) + f": {shares}; seed {SEED}")
    return 0


# --- the tests by themselves


Hunt = tuple[float, list[pytest.Item]]
"""What the tests took without the change, and they."""


def _drives(items: list[pytest.Item]) -> dict[int, Hunt]:
    """Of each change the tests that come by it."""
    halves = [items[n * len(items) // WORKERS : (n + 1) * len(items) // WORKERS] for n in range(WORKERS)]
    runs = [_forked(lambda half=half: _noted(half)) for half in halves]
    always = {number for number, change in enumerate(CHANGES) if change.at_import}
    reached: dict[int, list[tuple[float, pytest.Item]]] = defaultdict(list)
    for half, (child, reader) in zip(halves, runs):
        for n, took, seen in json.loads(_said(reader)):
            for number in always.union(seen):
                reached[number].append((took, half[n]))
        os.waitpid(child, 0)
    hunts = {number: _nearest(CHANGES[number], tests) for number, tests in reached.items()}
    return dict(sorted(hunts.items(), key=lambda hunt: hunt[1][0]))


def _noted(items: list[pytest.Item]) -> list[tuple[int, float, list[int]]]:
    """Of each test that passes what it took, and the changes it came by."""
    found = []
    for n, (item, following) in enumerate(zip(items, [*items[1:], None])):
        SWITCH.seen.clear()
        start = time.monotonic()
        if _passes(item, following):
            found.append((n, time.monotonic() - start, sorted(SWITCH.seen)))
    return found


def _passes(item: pytest.Item, following: pytest.Item | None) -> bool:
    from _pytest.runner import runtestprotocol

    return all(report.outcome != "failed" for report in runtestprotocol(item, nextitem=following, log=False))


def _forked(work: Callable[[], Any]) -> tuple[int, int]:
    """The work in a process of its own, and where to read what it found."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        with os.fdopen(writer, "w") as out:
            json.dump(work(), out)
        os._exit(0)
    os.close(writer)
    return child, reader


def _said(reader: int) -> str:
    with os.fdopen(reader) as said:
        return said.read()


# --- and with a change awake


def _nearest(change: Change, tests: list[tuple[float, pytest.Item]]) -> Hunt:
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


def _hunted(hunts: dict[int, Hunt], say: Callable[[str], Any]) -> dict[int, list[str]]:
    """Who kills each."""
    waiting, running, fates = list(hunts.items()), dict[int, tuple[int, int, float]](), dict[int, list[str]]()
    while waiting or running:
        while waiting and len(running) < WORKERS:
            number, (spent, items) = waiting.pop(0)
            child, reader = _forked(lambda number=number, items=items: _killers_of(number, items))
            running[child] = number, reader, time.monotonic() + 3 * spent + PATIENCE + STARTS * CHANGES[number].at_import
        child, _ = os.waitpid(-1, os.WNOHANG)
        if child in running:
            number, reader, _ = running.pop(child)
            said = _said(reader)
            fates[number] = json.loads(said) if said else LATE
            if not fates[number]:
                say(f"survived\t{CHANGES[number].place}\t{CHANGES[number]}")
            if len(fates) % 40 == 0:
                say(f"{len(fates)} of {len(hunts)} hunted")
        for late in [child for child, (_, _, until) in running.items() if time.monotonic() > until]:
            os.killpg(late, signal.SIGKILL)
        time.sleep(0 if child else 0.02)
    return fates


def _killers_of(number: int, items: list[pytest.Item]) -> list[str]:
    """The same in a Python of its own for what runs at import. One that does not come to its tests is killed by all."""
    if not CHANGES[number].at_import:
        return _killers(number, items)
    said = ("-q", "-p", "no:cacheprovider", "-p", "mutants.hunting", *(item.nodeid for item in items))
    env = {**os.environ, "COLLATE_NPU_AWAKE": str(CHANGES[number])}
    done = subprocess.run([sys.executable, "-m", "pytest", *said], env=env, capture_output=True, text=True, cwd=ROOT)
    found = [line[8:] for line in done.stdout.splitlines() if line.startswith("killer: ")]
    return found or ([] if done.returncode in (0, 5) else ["all"])


def _killers(number: int, items: list[pytest.Item]) -> list[str]:
    """The first test function that fails with this change awake, if any."""
    SWITCH.awake = number
    for item, following in zip(items, [*items[1:], None]):
        try:
            passed = _passes(item, following)
        except BaseException:
            passed = False
        if not passed:
            return [item.nodeid.partition("[")[0]]
    return []
