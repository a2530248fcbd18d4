"""Where torch and numpy are all that loads, `--version`, `env`, `guide` and `show` answer in text; the others name what to
install."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typed import typed

import collate_npu
from collate_npu import PaddingCollator, Segments, describe
from collate_npu.collate import collators
from collate_npu.masks import dense
from collate_npu.tools.show import picture

ROOT = Path(collate_npu.__file__).parents[1]
ABSENT = ("rich", "transformers", "accelerate", "wrapt", "datasets", "matplotlib")
GONE = f"import sys; sys.modules.update(dict.fromkeys({ABSENT}))\nfrom collate_npu.__main__ import main\nmain()"
ROWS = [{"input_ids": [1] * n, "seq_lengths": [n]} for n in (3, 5)]


@pytest.fixture
def gone(monkeypatch):
    for name in ABSENT:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--version", f"collate-npu {collate_npu.__version__}\n"),
        ("--help", "Print the version and end."),
        ("audit --help", "--tolerance FLOAT"),
        ("guide", "* `errors`: "),
        ("guide errors#polarity", "### `PolarityError`\n"),
        ("guide masked_select", "FlashAttentionScore refuses a mask"),
        ("show --lengths 3,5 --side left", "  0 ⬚ ⬚ ■ ■ ■\n  1 ■ ■ ■ ■ ■\n"),
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
        ("kernels", "pip install rich."),
        ("conformance os:getpid", "pip install rich."),
        ("watch -- python", "pip install wrapt."),
        ("show --lengths 3 --out x.html", "pip install rich."),
        ("show --lengths x", "collate-npu: --lengths: got x"),
        ("guide ms-swfit", "Did you mean ms-swift"),
    ],
)
def test_the_others_say_in_one_line_what_to_install(gone, args, words):
    done = typed(*args.split())
    assert (done.exit_code, done.stdout, done.stderr.count("\n"), words in done.stderr) == (2, "", 1, True)


@pytest.mark.parametrize("side", ["left", "right"])
def test_show_says_what_describe_and_picture_say(gone, side, recwarn):
    collators._warn_of_neutral_form.cache_clear()
    shown = typed("show", "--lengths", "3,5", "--side", side)
    assert (shown.exit_code, recwarn.list) == (0, [])
    batch = PaddingCollator(pad_token_id=0, padding_side=side)(ROWS)
    assert shown.stdout.startswith(f"{describe(batch)}\n\nattention_mask_2d: ")
    assert all(f" {line}\n" in shown.stdout for line in str(picture(batch)).splitlines()[1:3])


def test_show_reads_saved_batches_and_masks(gone, tmp_path):
    batch, mask = tmp_path / "batch.pt", tmp_path / "mask.pt"
    torch.save({"input_ids": torch.ones(2, 5), "attention_mask": Segments.from_lengths([3, 5]).keep}, batch)
    torch.save(dense(Segments.from_lengths([3], width=4, side="left")), mask)
    assert typed("show", "--batch", batch, "--row", "1").exit_code == 0
    assert typed("show", "--mask", mask).stdout.startswith(
        "bool [1, 1, 4, 4], True attends\nrow 0\n   0 ⬚ ⬚ ⬚ ⬚\n   1 ⬚ ■ ⬚ ⬚\n   2 ⬚ ■ ■ ⬚\n"
    )


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
        ("show --row 1.5", "--row: invalid whole_number value: '1.5'"),
        ("watch --steps 1048577 -- a", "--steps: 1048577 is not in the range 1..1048576."),
        ("conformance", "required: run"),
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
    assert "watch Run a command, and say what each kernel was told" in said[""]
    assert "Draw a batch: its rows, tokens, labels and masks" in said["show --help"]
    assert "--max-length 2..1048576 Longest line of --data, in tokens. [default: 96]" in said["show --help"]
    assert "--side {left,right} Padding side, of --lengths and --data. [default: right]" in said["show --help"]
    assert "Examples: collate-npu show --lengths 3,5 --side left collate-npu" in said["show --help"]
    assert "--gradients, --no-gradients Compare gradients too. [default: True]" in said["audit --help"]
    assert (
        "--seed 0..9223372036854775807 Which lines are drawn, and the random weights. [default: 0]" in said["audit --help"]
    )
    assert "--verbose, -v The table of every model, and every reason. --json" in said["audit --help"]
    assert all("SUPPRESS" not in text and "`" not in text for text in said.values())


def test_what_stands_behind_the_command_of_a_watch_is_its_own(capfd):
    for args in ("--steps 1 /bin/echo --stop -- b --help", "--steps=1 -- /bin/echo --stop -- b --help"):
        assert typed("watch", *args.split()).exit_code == 0
        assert capfd.readouterr().out == "--stop -- b --help\n"
    for args in ((), ("--",), ("--", "no-such-command")):
        done = typed("watch", *args)
        assert (done.exit_code, "no such command. Write what you would type" in done.stderr) == (2, True)
