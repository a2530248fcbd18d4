"""`collate-npu conformance`: what it prints, and how it ends."""

import pytest

pytest.importorskip("rich")
from typed import typed

STACK = """
import torch
from beside import weights
def score(ids):
    x = weights[ids].cumsum(0) / torch.arange(1, len(ids) + 1)[:, None]
    return torch.log_softmax(x[:-1], -1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]
def run(samples, layout="right"): return [score(ids) for ids in samples]
def turned(samples):
    from later import rolled
    return rolled(run(samples))
def constant(samples): return [[-1.0] * (len(ids) - 1) for ids in samples]
def fails(samples): raise KeyError("logprobs[0]")
def ends(samples): raise SystemExit(0)
number = 3
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "my_stack.py").write_text(STACK, encoding="utf-8")
    drawn = "import torch\nweights = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))\n"
    (tmp_path / "stacks" / "beside.py").write_text(drawn, encoding="utf-8")
    (tmp_path / "stacks" / "later.py").write_text("def rolled(rows): return rows[1:] + rows[:1]\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("sys.path", [*__import__("sys").path])


def called(name, *options):
    return typed("conformance", f"stacks/my_stack.py:{name}", *options)


def test_a_right_stack_ends_with_0_and_says_what_was_asked():
    done = called("run", "--seed", "5", "--vocab-size", "300", "--pad-id", "299", "--layout", "left", "--layout", "mine")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "✔ conformance: right in all 23 batches (seed=5)"
    assert "passes" in lines[1]
    assert {line.split()[0] for line in lines[4:-2]} == {"left", "mine"}
    assert sum("pad id as text" in line for line in lines) == 2


def test_a_wrong_one_ends_with_1_and_says_what_its_errors_mean():
    done = called("turned")
    assert done.exit_code == 1
    assert done.stdout.startswith("✘ conformance: WRONG in ")
    assert "the order of the samples is lost" in done.stdout


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("constant", (), "do not depend on the tokens"),
        ("fails", (), "my_stack.py, line 12: KeyError: 'logprobs[0]'"),
        ("ends", (), "SystemExit"),
        ("number", (), "a int"),
        ("nothing", (), "no nothing in stacks/my_stack.py"),
        ("constant", ("--layout", "left"), "does not take layout"),
        ("run", ("--pad-id", "256"), "pad_token_id"),
        ("run", ("--vocab-size", str(2**62)), "16777216"),
    ],
)
def test_what_cannot_be_run_or_judged_ends_with_2(name, options, said):
    done = called(name, *options)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
