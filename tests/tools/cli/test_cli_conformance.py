"""`collate-npu conformance`: what it prints, and how it ends; and how a function of the user's is named and refused."""

import re
import sys

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
def long(samples): raise ValueError("x" * 500)
class Held: run = staticmethod(run)
number = 3
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "my_stack.py").write_text(STACK, encoding="utf-8")
    drawn = "import torch\nweights = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))\n"
    (tmp_path / "stacks" / "beside.py").write_text(drawn, encoding="utf-8")
    (tmp_path / "stacks" / "later.py").write_text("def rolled(rows): return rows[1:] + rows[:1]\n", encoding="utf-8")
    (tmp_path / "stacks" / "broken.py").write_text("\ndef run(:\n", encoding="utf-8")
    (tmp_path / "stacks" / "text.bin").write_bytes(b"\x00")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "installed.py").write_text("def run(samples): {}[3]\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")


def called(name, *options):
    """A function of the stack, or what is named by its place too. Nothing stays on the path."""
    before = [*sys.path]
    done = typed("conformance", name if "/" in name or ":" in name else f"stacks/my_stack.py:{name}", *options)
    assert sys.path == before
    return done


def test_a_right_stack_ends_with_0_and_says_what_was_asked_by_a_name_that_may_have_dots():
    done = called("Held.run", "--seed=5", "--vocab-size=300", "--pad-id=299", "--layout=left", "--layout=mine")
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
        ("fails", (), "^collate-npu: stacks/my_stack.py, line 12: KeyError: 'logprobs.0.'. run: got stacks/my_st"),
        ("ends", (), "line 13: SystemExit"),
        ("long", (), "ValueError: x{400}. run"),
        ("number", (), "an int.* Name a function that takes samples."),
        ("nothing", (), "no nothing in stacks/my_stack.py"),
        ("Held.rum", (), "no rum in stacks/my_stack.py.*Did you mean run"),
        ("stacks/my_stack.py", (), "It is named as module:function or file.py:function. For example my_stack.py:run."),
        ("stacks/zzzzzz.py:run", (), "stacks/zzzzzz.py: got no such file.*Write the path of its file"),
        ("stacks/my_stak.py:run", (), r"got no such file\..*Did you mean my_stack.py\?"),
        ("stacks/broken.py:run", (), "^collate-npu: stacks/broken.py, line 2: SyntaxError"),
        ("stacks/text.bin:run", (), "got a file that ends with '.bin'"),
        ("gone:run", (), r"run: got gone:run \(ModuleNotFoundError"),
        ("site-packages/installed.py:run", (), r"^collate-npu: run: got site-packages/installed.py:run \(KeyError: 3\)"),
        ("constant", ("--layout", "left"), "does not take layout"),
        ("run", ("--pad-id", "256"), "pad_token_id"),
        ("run", ("--vocab-size", str(2**62)), "16777216"),
    ],
)
def test_what_cannot_be_run_or_judged_ends_with_2(name, options, said):
    done = called(name, *options)
    assert done.exit_code == 2
    assert re.search(said, " ".join(done.stderr.split())), done.stderr
