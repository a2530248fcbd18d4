"""`collate-npu show`: each input, each view, what it exits with."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")
from rich.cells import cell_len
from typer.testing import CliRunner

import collate_npu.tools.cli as cli
from collate_npu import PaddingCollator, Segments, dense
from collate_npu.testing import byte_tokenizer

WIDTHS = [60, 80, 120]


def show(*args, width=100, **env):
    return CliRunner().invoke(cli.app, ["show", *map(str, args)], env={"COLUMNS": str(width), **env})


def shown(*args, width=100):
    result = show(*args, width=width)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def saved(tmp_path):
    batch = PaddingCollator(pad_token_id=0, padding_side="left", consumer="megatron", model_type="qwen3_next")(
        [{"input_ids": [65] * n, "labels": [65] * n} for n in (3, 8)]
    )
    torch.save(batch, tmp_path / "batch.pt")
    batch["attention_mask"][1, 0, 5, 2] = True
    torch.save(batch, tmp_path / "wrong.pt")
    np.save(tmp_path / "mask.npy", dense(Segments.from_lengths([2, 3], side="left")).numpy())
    (tmp_path / "lines.txt").write_text("hi 中文 😀\nanother line\nthird\nfourth\nfifth\n", encoding="utf-8")
    (tmp_path / "lines.jsonl").write_text(json.dumps({"text": "from a record"}) + "\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("width", WIDTHS)
def test_lengths(width):
    text = shown("--lengths", "3,5", "--side", "left", width=width)
    assert "attention_mask: bool [2, 1, 5, 5]" in text
    assert "  0 ⬚ ⬚ ■ ■ ■  40% padding ██░░░░\n  1 ■ ■ ■ ■ ■   0% padding ░░░░░░\n" in text
    assert max(map(cell_len, text.splitlines())) <= width


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "args",
    [
        ["--lengths", "3+4,6", "--consumer", "megatron", "--consumer", "transformers"],
        ["--lengths", "6,8", "--cp", "2"],
        ["--lengths", "6,8", "--cp", "4", "--layout", "ulysses_ring", "--ulysses", "2", "--consumer", "megatron"],
        ["--lengths", "5,8", "--cp", "2", "--packed"],
        ["--lengths", "4096,3000,10", "--side", "left"],
        ["--batch", "{}/wrong.pt"],
        ["--mask", "{}/mask.npy"],
    ],
)
def test_no_view_is_wider_than_the_console(saved, args, width):
    text = shown(*(arg.replace("{}", str(saved)) for arg in args), width=width)
    assert max(map(cell_len, text.splitlines())) <= width


def test_consumers_side_by_side_and_a_refusal_in_words():
    text = shown("--lengths", "3+2,5", "--consumer", "megatron", "--consumer", "transformer_engine", "--model-type", "qwen3")
    assert "attention_mask 4D, True is blocked" in text.replace("\n", " ")
    assert "transformer_engine" in text
    assert "refused: attention_mask" in text


def test_ranks():
    text = " ".join(shown("--lengths", "8,6", "--cp", "2", width=180).split())
    assert "rank 0 of 2: zigzag, holds places 0-1, 6-7" in text
    assert "rank 1 of 2: zigzag, holds places 2-5" in text
    assert "· on another rank" in text


def test_packed_is_one_flat_row():
    text = shown("--lengths", "3,2", "--packed")
    assert "  0 1 1 1 2 2   0% padding" in text
    assert "cu_seq_lens_q" in text


def test_a_batch_that_went_wrong_shows_where(saved):
    text = shown("--batch", saved / "wrong.pt")
    assert "refused: attention_mask:" in text
    assert "1 wrong" in text
    assert "   5 ■ ■ - ■ ■ ■ ⬚ ⬚" in text
    assert "is blocked and ought to attend" in text


def test_one_row_of_a_batch(saved):
    text = shown("--batch", saved / "batch.pt", "--row", 1)
    assert "row 1 " in text
    assert "row 0 " not in text


def test_a_mask_alone(saved):
    text = shown("--mask", saved / "mask.npy")
    assert "bool [2, 1, 3, 3], True attends" in text
    assert "found: 2 x 3, 2 sequences, 16.7% padding" in text


@pytest.mark.models
def test_lines_with_their_tokens(saved):
    pytest.importorskip("transformers")
    text = shown("--data", saved / "lines.txt", "--side", "left", "--batch-size", 2, "--max-length", 12, width=120)
    assert "hi 中文" in text
    assert "another line" in text
    assert "third" not in text
    assert "   1 n " in text
    assert max(map(cell_len, text.splitlines())) <= 120
    assert "from a" in shown("--data", saved / "lines.jsonl")


@pytest.mark.models
def test_a_tokenizer_names_the_tokens_of_a_saved_batch(saved):
    pytest.importorskip("transformers")
    byte_tokenizer().save_pretrained(saved / "tokenizer")
    assert "AAA" in shown("--batch", saved / "batch.pt", "--tokenizer", saved / "tokenizer")


@pytest.mark.parametrize("ending", ["png", "svg", "html"])
def test_out(saved, ending):
    pytest.importorskip("matplotlib")
    text = shown("--batch", saved / "batch.pt", "--out", saved / f"x.{ending}")
    assert "written: " in text
    assert (saved / f"x.{ending}").stat().st_size > 1000


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "got none. One thing is shown"),
        (["--lengths", "3", "--mask", "x.pt"], "got --lengths and --mask"),
        (["--lengths", "3,x"], "Write 3,5 or 3+2,5"),
        (["--lengths", "3,5", "--consumer", "nobody"], "Known are"),
        (["--lengths", "3,5", "--side", "up"], "up"),
        (["--lengths", "3", "--cp", "1"], "--cp"),
        (["--lengths", "3", "--cp", "2", "--layout", "spiral"], "Layouts are 'zigzag'"),
        (["--lengths", "3", "--out", "x.gif"], "End the name with one of them"),
        (["--batch", "nothing.pt"], "No such file"),
        (["--batch", "nothing.bin"], "Files of tensors end with"),
        (["--mask", "nothing.npy"], "No such file"),
        (["--data", "nothing.txt"], "No such file"),
        (["--lengths", "3", "--row", "-1"], "--row"),
    ],
)
def test_what_cannot_be_shown_is_exit_code_2_and_one_line(args, said):
    result = show(*args)
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output


def run(*args, **env):
    command = [sys.executable, "-W", "always", "-m", "collate_npu", "show", *args]
    return subprocess.run(command, capture_output=True, timeout=120, env={**os.environ, **env}, check=False)


def test_a_command_does_not_warn_of_its_own_batches():
    done = run("--lengths", "3,5", "--side", "left", PYTHONIOENCODING="utf-8")
    assert done.returncode == 0
    assert b"this batch has a 4D" not in done.stderr
    assert "■" in done.stdout.decode()


@pytest.mark.parametrize("encoding", ["ascii", "gbk"])
def test_a_terminal_that_cannot_print_the_signs(encoding):
    done = run("--lengths", "3,5", "--side", "left", PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    assert "  0 . . # # #  40% padding ##...." in done.stdout.decode(encoding)
