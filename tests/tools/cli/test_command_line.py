"""The command line: how it is typed; and what it says where torch and numpy are all that loads: `--version`, `env` and
`guide` answer, the others name what to install."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from typed import typed

import collate_npu

ROOT = Path(collate_npu.__file__).parents[1]
ABSENT = ("rich", "transformers", "accelerate", "wrapt", "datasets")
GONE = f"import sys; sys.modules.update(dict.fromkeys({ABSENT}))\nfrom collate_npu.__main__ import main\nmain()"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--version", f"collate-npu {collate_npu.__version__}\n"),
        ("--help", "Print the version and end."),
        ("audit --help", "--tolerance TOLERANCE"),
        ("guide", "[Errors](errors.md)"),
        ("guide errors#polarity", "### `PolarityError`\n"),
        ("guide masked_select", "FlashAttentionScore refuses a mask"),
        pytest.param("env", "- torch: ", marks=pytest.mark.slow),
    ],
)
def test_what_needs_neither_runs_without_them(args, words):
    done = subprocess.run([sys.executable, "-c", GONE, *args.split()], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert words in done.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("audit", "collate-npu: transformers does not load: "),
        ("conformance os:getpid", "pip install rich."),
        ("watch -- python", "pip install wrapt."),
        ("show --lengths 3", "pip install rich."),
    ],
)
def test_the_others_say_in_one_line_what_to_install(monkeypatch, args, words):
    for name in ABSENT:
        monkeypatch.setitem(sys.modules, name, None)
    done = typed(*args.split())
    assert (done.exit_code, done.stdout, done.stderr.count("\n"), words in done.stderr) == (2, "", 1, True)


def test_a_package_that_breaks_is_named_with_its_error(tmp_path, monkeypatch):
    (tmp_path / "wrapt.py").write_text("raise RuntimeError('gone')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wrapt", raising=False)
    done = typed("watch", "--", "python")
    assert done.stderr == "collate-npu: wrapt does not load: RuntimeError: gone. `collate-npu env` says more.\n"


def test_env_is_words_or_json_and_an_interrupt_is_one(monkeypatch):
    monkeypatch.setattr("collate_npu.tools.env.report", lambda as_json: f"json: {as_json}")
    assert [typed("env", *more).stdout for more in ([], ["--json"])] == ["json: False\n", "json: True\n"]
    monkeypatch.setattr("collate_npu.tools.env.report", lambda as_json: signal.default_int_handler(2, None))
    done = typed("env")
    assert (done.exit_code, done.stderr) == (130, "collate-npu: INTERRUPTED: nothing was measured.\n")


# --- how it is typed


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("nonsense", "invalid choice: 'nonsense'"),
        ("--nonsense", "arguments are required: COMMAND"),
        ("show --len 3", "unrecognized arguments: --len 3"),
        ("show --lengths 3 more", "unrecognized arguments: more"),
        ("watch --steps 1.5 -- true", "--steps: invalid whole_number value: '1.5'"),
        ("watch --steps 1048577 -- a", "--steps: 1048577 is not in the range 1..1048576."),
        ("conformance", "required: run"),
        ("audit --batch-size 1", "--batch-size: 1 is not in the range 2..inf."),
        ("audit --side both", "invalid choice: 'both'"),
        ("shw --lengths 3", "Did you mean show?"),
        ("show --lenghts 3", "Did you mean --lengths"),
        ("show --side lft", "Did you mean left?"),
        ("env \x1b[31m", "unrecognized arguments: \\x1b[31m"),
    ],
)
def test_what_is_typed_wrongly_is_said_on_stderr_and_ends_with_2(args, words):
    done = typed(*args.split())
    assert (done.exit_code, done.stdout, words in done.stderr, "\x1b" in done.stderr) == (2, "", True, False)
    assert done.stderr.startswith("Try 'collate-npu ")


def test_a_help_says_each_option_with_its_default_and_examples():
    said = {args: " ".join(typed(*args.split()).stdout.split()) for args in ("", "--help", "show --help", "audit --help")}
    assert (said[""], typed().exit_code, typed("--help").exit_code) == (said["--help"], 2, 0)
    assert "watch Run a command, and print the boundaries" in said[""]
    assert "Draw a batch: its rows and masks." in said["show --help"]
    assert "--max-length MAX_LENGTH Longest sample of text, in tokens. [default: 96]" in said["audit --help"]
    assert "--side {left,right} Padding side of --lengths. [default: right]" in said["show --help"]
    assert "Examples: collate-npu show --lengths 3,5 --side left collate-npu" in said["show --help"]
    assert "--gradients, --no-gradients Compare gradients too." in said["audit --help"]
    assert "--seed SEED Which lines are drawn, and the random weights. [default: 0]" in said["audit --help"]
    assert all("SUPPRESS" not in text for text in said.values())


def test_what_stands_behind_the_command_of_a_watch_is_its_own(capfd):
    for args in ("--steps 1 /bin/echo --stop -- b --help", "--steps=1 -- /bin/echo --stop -- b --help"):
        assert typed("watch", *args.split()).exit_code == 0
        assert capfd.readouterr().out == "--stop -- b --help\n"
    for args in ((), ("--",), ("--", "no-such-command")):
        done = typed("watch", *args)
        assert (done.exit_code, "no such command. Write what you would type" in done.stderr) == (2, True)


# --- a process of its own


@pytest.fixture
def started():
    """Start an audit as a user runs it, in a group of its own, as a terminal does."""
    pytest.importorskip("rich")
    pytest.importorskip("transformers")

    def start(line):
        command = [sys.executable, "-m", "collate_npu", "audit", "--model", "llama", *line.split()]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        # a shell starts what it sends to the background deaf to Ctrl-C, and children stay so
        hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen(command, start_new_session=True, preexec_fn=hears, **streams)

    return start


QUICK = "--attn sdpa --batch-size 3 --max-length 48"


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupted_audit_says_what_it_found(started, name):
    with started(f"{QUICK} --attn eager --batches 8 --json") as process:
        assert process.stderr.readline().startswith("[1/2]")
        os.killpg(process.pid, signal.Signals[name])
        out, err = process.communicate(timeout=120)
    assert (process.returncode, "Traceback" in err) == (130, False), err
    found = json.loads(out)
    assert (found["passed"], found["verdict"], found["interrupted"]) == (False, "INTERRUPTED", True)
    assert found["findings"]


@pytest.mark.parametrize("line", ["guide", "guide errors", "env", "show --lengths 3,5", "conformance --help"])
def test_a_pipe_that_nobody_reads_leaves_the_exit_code(line):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "collate_npu", *line.split()]
    with open(writing, "wb") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.models
def test_a_reader_who_leaves_does_not_make_it_fail(started):
    """`collate-npu audit | head -1` under pipefail: the exit code stays the audit's."""
    with started(f"{QUICK} --batches 1") as process:
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=120)
    assert (process.returncode, "Traceback" in err) == (0, False), err
