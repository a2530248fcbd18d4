"""A pytest plugin (`-p mutants.hunting`) with two uses for mutants, small changes to the code that tests must notice.

The hunt measures: COLLATE_NPU_MUTANTS says how many are drawn, COLLATE_NPU_SEED which. The tests run once, in two processes,
and note which changes they come by; then each change wakes in a process of its own, and the tests that came by it run until
one fails. A change to what runs at import wakes in a Python of its own, before the package is imported, with the tests
nearest to it. A survivor is a test that is missing, a change that changes nothing, or a check that nothing needs. With
COLLATE_NPU_MUTANTS_WRITE the tests go on until a second function fails; what one function alone kills enters the ledger.

The gate, where none are drawn, wakes the mutants of the ledger, each for the one test function that kills it.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import accumulate
from math import comb
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from mutants.changes import ASLEEP, ROOT, Change, all_changes, drawn, installed
from reported import report

COUNT = int(os.environ.get("COLLATE_NPU_MUTANTS", "0"))
SEED = int(os.environ.setdefault("COLLATE_NPU_SEED", str(time.time_ns() // 1000 % 1_000_000)))
ROOMS = tuple(filter(None, os.environ.get("COLLATE_NPU_MUTANTS_OF", "").split()))
"""Modules that begin so, alone."""
WRITES = "COLLATE_NPU_MUTANTS_WRITE" in os.environ
"""The hunt adds to the ledger what it finds; the gate takes out what lives there, with another seed."""
WITHOUT = os.environ.pop("COLLATE_NPU_WITHOUT_TENTH", "")
"""A seed: a tenth of the test functions, at random, is gone, which turns the gate red."""
AWAKE = os.environ.pop("COLLATE_NPU_AWAKE", "")
"""The change that such a Python is for."""
LEDGER = Path(__file__).with_name("sole.txt")
"""A test function and a mutant that it alone kills, a line each. A function has one: renamed, it is one row alive."""
ROWS, LEFT = 120, 0.8
"""The most rows, and the share of them whose mutants the code must still hold."""
ALLOWED = 0.2
"""The share of a hunt that may survive all tests."""
WORKERS = 2
ENOUGH = 2 if WRITES and COUNT else 1
"""So many test functions fail, and the rest need not run."""
STARTS = 60.0
"""Seconds that a Python of its own may take to import all."""
PATIENCE = 60.0
"""Seconds a mutant has beyond what its tests took without it, and the most that the tests of one may take."""
LATE = ["the clock", "the clock"] if COUNT else []
"""Who kills what does not end: in the gate nobody."""


def bearable(rows: int) -> int:
    """The rows that may be alive: where each test is deleted at 0.1, so few are once in a thousand times, or less.

    Of 120 rows two, of 96 one, of fewer none: a ledger that code has left is a weaker gate, until a hunt fills it.
    """
    chances = accumulate(comb(rows, n) * 0.1**n * 0.9 ** (rows - n) for n in range(rows + 1))
    return max(sum(chance < 0.001 for chance in chances) - 1, 0)


def ledger() -> dict[str, str]:
    lines = LEDGER.read_text("utf-8").splitlines() if LEDGER.exists() else []
    return dict(line.split("\t") for line in lines)


def chosen() -> list[Change]:
    """Those drawn; the one that is awake from the start; those of the ledger;
    or those that end the lines of the file COLLATE_NPU_MUTANTS_FROM, as an earlier run wrote them."""
    again = os.environ.get("COLLATE_NPU_MUTANTS_FROM")
    if COUNT and not (again or AWAKE):
        return drawn(COUNT, SEED, [change for change in all_changes() if change.module.startswith(ROOMS or "collate_npu")])
    lines = [AWAKE] if AWAKE else Path(again or LEDGER).read_text("utf-8").splitlines()
    wanted = {line.rpartition("\t")[2] for line in lines}
    return list({str(change): change for change in all_changes(AWAKE) if str(change) in wanted}.values())


CHANGES = chosen()
SWITCH = installed(CHANGES)  # before conftest imports the package
SWITCH.awake = 0 if AWAKE else ASLEEP
NAMED = {ROOT / function.partition("::")[0] for function in ledger()}
"""The gate's files."""


def function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def pytest_configure() -> None:
    """The first failure is enough, and is not shrunk."""
    settings.register_profile("hunt", settings.default, phases=[Phase.explicit, Phase.generate])
    settings.load_profile("hunt")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if COUNT or collection_path.is_dir() else collection_path not in NAMED


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    functions = sorted({function_of(item) for item in items})
    gone = random.Random(WITHOUT).sample(functions, len(functions) // 10 if WITHOUT else 0)
    items[:] = [item for item in items if function_of(item) not in gone]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    say = session.config.pluginmanager.get_plugin("terminalreporter").write_line
    if AWAKE:
        say("".join(f"\nkiller: {killer}" for killer in _killers(0, session.items)))
    else:
        session.testsfailed = (_measured if COUNT else _gated)(session.items, say)
    return True


def _measured(items: list[pytest.Item], say: Callable[[str], Any]) -> int:
    """How many survive, if that is too many; it says which do as they come, and here who was not come by."""
    fates = _hunted(_drives(items), say)
    missed = [change for number, change in enumerate(CHANGES) if number not in fates]
    for change in missed:
        say(f"no test came by\t{change.place}\t{change}")
    alive = sum(not killers for killers in fates.values())
    counts = {"mutants drawn": len(CHANGES), "not come by": len(missed), "killed": len(fates) - alive}
    if WRITES:
        _write({killers[0]: str(CHANGES[number]) for number, killers in fates.items() if len(killers) == 1} | ledger())
    told = ", ".join(f"{value} {name}" for name, value in counts.items()) + f", of {len(fates)} hunted; seed {SEED}"
    return _said_red(alive * (alive > ALLOWED * len(fates)), counts, told, say)


def _gated(items: list[pytest.Item], say: Callable[[str], Any]) -> int:
    """How many rows are alive, if that is too many, or too few are left; and who fails without a mutant."""
    rows, fates = ledger(), _hunted(_named(items), say)
    broken = fates.pop(ASLEEP)
    for function in broken:
        say(f"fails with no mutant awake: {function}")
    alive = {str(CHANGES[number]) for number, killers in fates.items() if not killers}
    for function, name in rows.items():
        if name in alive:
            say(f"alive: {function}\t{name}")
    most = bearable(len(CHANGES)) if len(CHANGES) >= LEFT * len(rows) else -1
    say("where tests were renamed or code was moved: `nox -s mutants -- 400 --write` writes the ledger anew")
    if WRITES:
        sound = {*map(str, CHANGES)} - alive
        _write({function: name for function, name in rows.items() if name in sound and function not in broken})
    told = f"mutants: {len(rows)} rows, {len(CHANGES)} of them in the code; {len(alive)} alive, of {most} that may be"
    counts = {"mutants in the ledger": len(CHANGES), "killed": len(fates) - len(alive)}
    return _said_red(len(broken) + max(len(alive), 1) * (len(alive) > most), counts, told, say)


def _said_red(red: int, counts: dict[str, int], told: str, say: Callable[[str], Any]) -> int:
    report(counts, {"mutants": told} if red else {})
    say(told)
    return 0 if WRITES else red


def _write(rows: dict[str, str]) -> None:
    """Rooms with many rows give way."""
    rooms = {function: ".".join(name.split(".")[:2]) for function, name in rows.items()}
    while len(rooms) > ROWS:
        sizes = Counter(rooms.values())
        rooms.pop(max(rooms, key=lambda function: sizes[rooms[function]]))
    LEDGER.write_text("".join(f"{function}\t{rows[function]}\n" for function in sorted(rooms)), "utf-8")


# --- the tests by themselves


Hunt = tuple[float, list[pytest.Item]]
"""What the tests took without the change, and they."""


def _named(items: list[pytest.Item]) -> dict[int, Hunt]:
    """Of each row its test function; and what is quick of them all, with no change awake."""
    tests: dict[str, list[pytest.Item]] = {function: [] for function in ledger()}
    for item in sorted(items, key=_is_slow):
        tests.get(function_of(item), []).append(item)
    functions = {name: function for function, name in ledger().items()}
    hunts = {number: (0.0, tests[functions[str(change)]]) for number, change in enumerate(CHANGES)}
    quick = [item for some in tests.values() for item in some if not _is_slow(item)]
    return {ASLEEP: (PATIENCE, quick)} | hunts


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


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
            running[child] = number, reader, time.monotonic() + 3 * spent + PATIENCE + STARTS * _at_import(number)
        child, _ = os.waitpid(-1, os.WNOHANG)
        if child in running:
            number, reader, _ = running.pop(child)
            said = _said(reader)
            fates[number] = json.loads(said) if said else LATE
            if COUNT and len(fates[number]) < ENOUGH:
                change, (alone, *_) = CHANGES[number], (*fates[number], "")
                say(f"{alone and 'killed by '}{alone or 'survived'}\t{change.place}\t{change}")
            if len(fates) % 40 == 0:
                say(f"{len(fates)} of {len(hunts)} hunted")
        for late in [child for child, (_, _, until) in running.items() if time.monotonic() > until]:
            os.killpg(late, signal.SIGKILL)
        time.sleep(0 if child else 0.02)
    return fates


def _at_import(number: int) -> bool:
    return number != ASLEEP and CHANGES[number].at_import


def _killers_of(number: int, items: list[pytest.Item]) -> list[str]:
    """The same in a Python of its own for what runs at import. One that does not come to its tests is killed by all."""
    if not items or not _at_import(number):
        return _killers(number, items)
    said = ("-q", "-p", "no:cacheprovider", "-p", "mutants.hunting", *(item.nodeid for item in items))
    env = {**os.environ, "COLLATE_NPU_AWAKE": str(CHANGES[number])}
    done = subprocess.run([sys.executable, "-m", "pytest", *said], env=env, capture_output=True, text=True, cwd=ROOT)
    found = [line[8:] for line in done.stdout.splitlines() if line.startswith("killer: ")]
    return found or ([] if done.returncode in (0, 5) else ["all", "all"])


def _killers(number: int, items: list[pytest.Item]) -> list[str]:
    """The first test function that fails with this change awake; of a hunt that writes the first two."""
    SWITCH.awake = number
    found: list[str] = []
    for item, following in zip(items, [*items[1:], None]):
        if function_of(item) in found:
            continue
        try:
            passed = _passes(item, following)
        except BaseException:
            passed = False
        if not passed:
            found.append(function_of(item))
            if len(found) == ENOUGH and number != ASLEEP:
                break
            item.session._setupstate.teardown_exact(None)  # what follows may be passed over
    return found
