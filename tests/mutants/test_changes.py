"""What a change is, and that a module with a change asleep does what it did."""

import ast
import builtins

from mutants.changes import ASLEEP, SWITCH, Changer, Switch

SOURCE = '''
LIMIT = {"a": 3, "b": 4}  # runs at import

def count(rows, most=4):
    """Words are no code."""
    found = 0
    for row in rows:
        if not row:
            continue
        if len(row) > most and row[0] == 1:
            got = row[0] + len(row)
            raise ValueError(f"{len(row) + 1} is more than {most}: {got}")
        found += len(row) - 1
    return found if found else "nothing was found"
'''
WANTED = [
    "0 -> 1", "not row -> row", "continue -> pass", "len(row) > most and row[0] == 1 -> len(row) > most or row[0] == 1",
    "len(row) > most -> len(row) >= most", "row[0] == 1 -> row[0] != 1", "0 -> 1", "1 -> 2", "raise",
    "found += len(row) - 1", "len(row) - 1 -> len(row) + 1", "1 -> 2",
]  # fmt: skip
TABLE = ["toy.: {'a': 3, 'b': 4} [16] -> a row less   in: LIMIT = {'a': 3, 'b': 4}",
         *(f"toy.: {n} -> {n + 1}   in: LIMIT = {{'a': 3, 'b': 4}}" for n in (3, 4))]  # fmt: skip
"""At import."""


def made(numbers, monkeypatch):
    """`count` with these changes in it, and their switch."""
    changer, switch, names = Changer("toy", numbers), Switch(), {}
    tree = ast.fix_missing_locations(changer.visit(ast.parse(SOURCE)))
    monkeypatch.setattr(builtins, SWITCH, switch, raising=False)
    exec(compile(tree, "toy", "exec"), names)
    return names["count"], switch, changer.found


def test_changes_are_what_a_test_could_notice(monkeypatch):
    _, _, found = made({}, monkeypatch)
    assert [str(change) for change in found if change.at_import] == TABLE
    found = [change for change in found if not change.at_import]
    assert len(found) == len(WANTED)
    for change, wanted in zip(found, WANTED):
        assert f"{change.was} -> {change.becomes}".startswith(wanted)
        assert change.where == "count"


def outcome(count, rows):
    try:
        return count(rows)
    except Exception as error:
        return str(error)


def test_asleep_nothing_differs_and_awake_each_does(monkeypatch):
    batches = ([[1, 2, 3], [], [2]], [[1, 2, 3, 4]], [[1] * 5], [[2] * 5], [[1, 2, 2, 2, 2]], [[2, 1]], [], [[2, 9, 9]])
    first = len(TABLE)
    count, switch, found = made({n: n for n in range(first, first + len(WANTED))}, monkeypatch)
    plain = made({}, monkeypatch)[0]
    monkeypatch.setattr(builtins, SWITCH, switch)
    wanted = [outcome(plain, rows) for rows in batches]
    assert switch.awake == ASLEEP
    assert [outcome(count, rows) for rows in batches] == wanted
    assert switch.seen == set(range(first, len(found)))
    for number, change in list(enumerate(found))[first:]:
        switch.awake = number
        assert [outcome(count, rows) for rows in batches] != wanted, change
