"""`collate-npu show`: each input, each view, what it exits with."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")
from rich.cells import cell_len
from typer.testing import CliRunner

import collate_npu.tools.cli as cli
from collate_npu import PaddingCollator, Segments
from collate_npu.masks import dense
from collate_npu.testing import byte_tokenizer

HYBRID = SimpleNamespace(layer_types=["linear_attention", "full_attention"])


def show(*args, width=100, **env):
    return CliRunner().invoke(cli.app, ["show", *map(str, args)], env={"COLUMNS": str(width), **env})


def shown(*args, width=100):
    result = show(*args, width=width)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def saved(tmp_path):
    batch = PaddingCollator(pad_token_id=0, padding_side="left", consumer="megatron", model=HYBRID)(
        [{"input_ids": [65] * n, "labels": [65] * n} for n in (3, 8)]
    )
    torch.save(batch, tmp_path / "batch.pt")
    batch["attention_mask"][1, 0, 5, 2] = True
    torch.save(batch, tmp_path / "wrong.pt")
    np.save(tmp_path / "mask.npy", dense(Segments.from_lengths([2, 3], side="left")).numpy())
    (tmp_path / "lines.txt").write_text("hi 中文 😀\nanother line\nthird\nfourth\nfifth\n", encoding="utf-8")
    (tmp_path / "lines.jsonl").write_text(json.dumps({"text": "from a record"}) + "\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("width", [60, 120])
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("--lengths 3,5 --side left", ["attention_mask: bool [2, 1, 5, 5]", "  0 ⬚ ⬚ ■ ■ ■  40% padding\n  1 ■ ■ ■ ■ ■  "]),
        ("--lengths 3,2 --packed", ["  0 1 1 1 2 2   0% padding", "cu_seq_lens_q"]),
        ("--lengths 3+2,5 --consumer megatron --consumer transformer_engine --model-type qwen3",
         ["megatron: attention_mask 4D, True is blocked", "transformer_engine\nrefused: attention_mask"]),
        ("--lengths 8,6 --cp 2", ["rank 0 of 2: zigzag, holds places 0-1, 6-7", "rank 1 of 2: zigzag, holds places 2-5"]),
        ("--lengths 6,8 --cp 4 --layout ulysses_ring --ulysses 2 --consumer megatron", ["rank 3 of 4: ulysses_ring"]),
        ("--lengths 5,8 --cp 2 --packed", ["rank 1 of 2: document_zigzag"]),
        ("--batch {}/wrong.pt",
         ["refused: attention_mask:", "1 wrong", "   5 ■ ■ - ■ ■ ■ ⬚ ⬚", "- is blocked and ought to attend"]),
        ("--mask {}/mask.npy", ["bool [2, 1, 3, 3], True attends", "found: 2 rows of 3, one sequence each; padding"]),
    ],
)  # fmt: skip
def test_each_input_and_each_view_fits_the_console(saved, args, said, width):
    text = shown(*args.replace("{}", str(saved)).split(), width=width)
    assert max(map(cell_len, text.splitlines())) <= width
    for words in said:
        assert words in text or " ".join(words.split()) in " ".join(text.split())


@pytest.mark.parametrize(("args", "squares"), [("", 1), ("--consumer megatron", 1), ("--side left --consumer megatron", 2)])
def test_what_is_read_takes_the_place_of_what_was_derived_and_not_of_what_came(args, squares):
    text = shown("--lengths", "3,2", *args.split())
    assert (text.count("row 0 "), "33% padding" in text) == (squares, True)


def test_a_terminal_that_cannot_print_the_signs(recwarn):
    """And nothing is said of the batches it makes."""
    done = CliRunner(charset="ascii").invoke(cli.app, ["show", "--lengths", "3,5", "--side", "left"])
    assert b"  0 . . # # #  40% padding" in done.stdout_bytes
    assert b"# attends, real   . blocked, padding" in done.stdout_bytes
    assert not recwarn.list


def test_one_row_of_a_batch_is_written_too(saved):
    text = shown("--batch", saved / "batch.pt", "--row", 1, "--out", saved / "x.txt")
    assert "written: " in text
    for found in (text, (saved / "x.txt").read_text(encoding="utf-8")):
        assert "row 1 " in found
        assert "row 0 " not in found


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
        (["--batch", "nothing.pt"], "no such file"),
        (["--batch", "nothing.bin"], "Such files end with"),
        (["--mask", "nothing.npy"], "no such file"),
        (["--data", "nothing.txt"], "no such file"),
        (["--lengths", "3", "--row", "-1"], "--row"),
    ],
)
def test_what_cannot_be_shown_is_exit_code_2_and_one_line(args, said):
    result = show(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output
