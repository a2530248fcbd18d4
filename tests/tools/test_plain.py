"""Plain: where typer, rich and transformers are not there, the commands that need none of them say the same."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import collate_npu
from collate_npu import PaddingCollator, Segments, describe
from collate_npu.collate import wire
from collate_npu.masks import dense
from collate_npu.tools import plain
from collate_npu.tools.show import picture

ROOT = Path(collate_npu.__file__).parents[1]
WHY = ModuleNotFoundError("No module named 'typer'")
ABSENT = ("typer", "rich", "transformers", "accelerate", "wrapt", "datasets", "matplotlib")
GONE = f"import sys; sys.modules.update(dict.fromkeys({ABSENT}))\nfrom collate_npu.__main__ import main\nmain()"
ROWS = [{"input_ids": [1] * n, "seq_lengths": [n]} for n in (3, 5)]


def alone(*args):
    """The command where torch and numpy are all that can be imported."""
    done = subprocess.run([sys.executable, "-c", GONE, *args], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--version"], f"collate-npu {collate_npu.__version__}\n"),
        (["guide"], "* `errors`: "),
        (["guide", "errors#polarity"], "### `PolarityError`\n"),
        (["guide", "masked_select"], "FlashAttentionScore refuses a mask"),
        (["show", "--lengths", "3,5", "--side", "left"], "\n⬚ ⬚ ■ ■ ■\n■ ■ ■ ■ ■\n"),
        pytest.param(["env"], "- torch: ", marks=pytest.mark.slow),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_needs_neither_runs_without_them(args, words):
    code, out, err = alone(*args)
    assert (code, err) == (0, "")
    assert words in out


@pytest.mark.parametrize(
    "args",
    [
        ["audit"],
        ["show", "--lengths", "3", "--consumer", "verl"],
        ["show", "--len", "3"],
        ["show", "--help"],
        ["env", "--nonsense"],
        [],
    ],
)
def test_the_others_say_in_one_line_what_to_install(args, capsys):
    assert plain.run(args, WHY) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(f"collate-npu: ModuleNotFoundError: {WHY}. `{' '.join(['collate-npu', *args])}` needs: ")
    assert plain.INSTALL in said


def test_that_is_what_the_package_depends_on():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = text.partition("\ndependencies = [")[2].partition("]")[0]
    assert {*plain.INSTALL.split()[2:], "torch", "numpy"} == set(re.findall(r'"(\w+)>=', table))


@pytest.mark.parametrize("side", ["left", "right"])
def test_show_says_what_describe_and_picture_say(side, capsys, recwarn):
    wire._warn_of_neutral_form.cache_clear()
    assert plain.run(["show", "--lengths", "3,5", "--side", side], WHY) == 0
    assert not recwarn.list
    batch = PaddingCollator(pad_token_id=0, padding_side=side)(ROWS)
    assert capsys.readouterr().out.startswith(f"{describe(batch)}\n\n{picture(batch)}\n")


def test_show_reads_saved_batches_and_masks(tmp_path, capsys):
    batch, mask = tmp_path / "batch.pt", tmp_path / "mask.pt"
    torch.save({"input_ids": torch.ones(2, 5), "attention_mask": Segments.from_lengths([3, 5]).keep}, batch)
    torch.save(dense(Segments.from_lengths([3], width=4, side="left")), mask)
    assert plain.run(["show", "--batch", str(batch), "--row", "1"], WHY) == 0
    assert plain.run(["show", "--mask", str(mask)], WHY) == 0
    assert capsys.readouterr().out.endswith("⬚ ⬚ ⬚ ⬚\n⬚ ■ ⬚ ⬚\n⬚ ■ ■ ⬚\n⬚ ■ ■ ■\n")


def test_env_is_words_or_json_and_an_interrupt_is_one(monkeypatch, capsys):
    monkeypatch.setattr("collate_npu.tools.env.written", lambda as_json: f"json: {as_json}")
    assert [plain.run(["env", *more], WHY) for more in ([], ["--json"])] == [0, 0]
    assert capsys.readouterr().out == "json: False\njson: True\n"
    monkeypatch.setattr(plain, "_answer", lambda args: signal.default_int_handler(2, None))
    assert plain.run(["env"], WHY) == 130


@pytest.mark.parametrize("args", [["show", "--lengths", "x"], ["guide", "ms-swfit"]])
def test_a_refusal_is_a_line_and_exit_code_2(args, capsys):
    assert plain.run(args, WHY) == 2
    assert capsys.readouterr().err.startswith("collate-npu: ")
