"""`collate-npu show` and `picture`: each input, each view, what a notebook shows, and what it exits with."""

import json
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("transformers")
from rich.cells import cell_len
from typed import typed

from collate_npu import CollateError, PaddingCollator, Segments
from collate_npu.masks import dense
from collate_npu.testing import byte_tokenizer
from collate_npu.tools.show import picture
from collate_npu.tools.terminal import ASCII

HYBRID = SimpleNamespace(layer_types=["linear_attention", "full_attention"])


def show(*args, width=100, **env):
    return typed("show", *args, COLUMNS=str(width), **env)


def shown(*args, width=100):
    result = show(*args, width=width)
    assert result.exit_code == int("padding: not known" in result.output), result.output
    assert max(map(cell_len, result.output.splitlines())) <= width
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
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n', encoding="utf-8")
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path


@pytest.mark.models
@pytest.mark.parametrize("width", [60, 120])
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("--lengths 3,5 --side left", ["attention_mask: bool [2, 1, 5, 5]", "  0 ⬚ ⬚ ■ ■ ■"]),
        ("--lengths 3+2,6", ["  0 1 1 1 2 2 ⬚"]),
        ("--lengths 3,2 --packed", ["  0 1 1 1 2 2", "cu_seq_lens_q"]),
        ("--lengths 3+2,5 --consumer megatron --consumer transformer_engine --model-type qwen3",
         ["megatron: attention_mask 4D, True is blocked", "transformer_engine\nrefused: attention_mask"]),
        ("--lengths 8,6 --cp 2", ["rank 0 of 2: zigzag, holds places 0-1, 6-7", "rank 1 of 2: zigzag, holds places 2-5"]),
        ("--lengths 6,8 --cp 4 --layout ulysses_ring --ulysses 2 --consumer megatron", ["rank 3 of 4: ulysses_ring"]),
        ("--lengths 5,8 --cp 2 --packed", ["rank 1 of 2: document_zigzag", "places 2-5, 10-13"]),
        ("--batch {}/wrong.pt",
         ["refused: attention_mask:", "1 wrong", "   5 ■ ■ - ■ ■ ■ ⬚ ⬚", "- is blocked and ought to attend"]),
        ("--batch {}/batch.pt --tokenizer {}/tokenizer --row 1", ["   7 ■ ■ ■ ■ ■ ■ ■ ■ A", "row 1 "]),
        ("--mask {}/mask.npy", ["bool [2, 1, 3, 3], True attends", "found: 2 rows of 3, one sequence each; padding"]),
        ("--data {}/lines.txt --side left --batch-size 2 --max-length 12", ["[2, 12]", "■ ⬚ n"]),
        ("--data {}/lines.jsonl", ["1 row of 13", "o o o"]),
    ],
)  # fmt: skip
def test_each_input_and_each_view_fits_the_console(saved, args, said, width):
    text = shown(*args.replace("{}", str(saved)).split(), width=width)
    for words in said:
        assert words in text or " ".join(words.split()) in " ".join(text.split())


def test_what_is_too_large_to_be_looked_at(monkeypatch):
    monkeypatch.setattr("collate_npu.tools.show.MOST_SQUARE", 32)
    assert ["attention_mask: bool [2, 1," in shown("--side=left", "--lengths", n) for n in ("3,4", "3,5")] == [True, False]


@pytest.mark.parametrize("encoding", ["ascii", "gbk"])
def test_a_terminal_that_cannot_print_the_signs(recwarn, encoding):
    """And nothing is said of the batches it makes."""
    done = typed("show", "--lengths", "3,5", "--side", "left", encoding=encoding)
    assert "  0 . . # # #" in done.stdout
    assert "# attends, real   . blocked, padding" in done.stdout
    assert not recwarn.list
    assert all(chr(sign).translate(ASCII).isascii() for sign in ASCII)


def test_one_row_of_a_batch_is_written_too(saved):
    text = shown("--batch", saved / "batch.pt", "--row", 1, "--out", saved / "x.html")
    assert "written: " in text.replace("\n", " ")
    page = re.sub("<.*?>", "", (saved / "x.html").read_text(encoding="utf-8"))
    for found in (text, page):
        assert ("row 1 " in found, "row 0 " in found) == (True, False)


@pytest.mark.models
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("", "got none. One thing is shown"),
        ("--lengths 3 --mask x.pt", "got --lengths and --mask"),
        *((f"--lengths={lengths}", "Write 3,5 or 3+2,5") for lengths in ("3,x", "3,,5", ",")),
        *((f"--lengths={lengths}", "0 or more, and at most") for lengths in ("-1,3", "3+-1,3", "9999999", "2,9999999+1")),
        ("--lengths 4,0", "row 1: got no tokens"),
        ("--lengths 3,5 --consumer nobody", "It is one of megatron"),
        ("--lengths 3 --cp 1", "--cp"),
        ("--lengths 3 --cp 2 --layout spiral", "It is one of zigzag"),
        ("--lengths 3 --out x.gif", "End the name with .html"),
        ("--batch nothing.bin", "Such files end with"),
        ("--mask nothing.npy", "no such file"),
        ("--data {}/empty.jsonl", "Name a file with text"),
        ("--lengths 3 --row -1", "--row"),
        ("--lengths 3 --row 1", "The rows are 0 to 0"),
    ],
)
def test_what_cannot_be_shown_is_exit_code_2_and_one_line(saved, args, said):
    result = show(*args.replace("{}", str(saved)).split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_notebook_shows_each_token_without_scrolling(side, tmp_path):
    rows = [{"input_ids": [65] * 300}, {"input_ids": [66, 67]}]
    batch = PaddingCollator(pad_token_id=0, padding_side=side, attention_mask="2d")(rows)
    drawn = picture(batch, tokenizer=SimpleNamespace(decode=lambda ids: "".join(map(chr, ids))))
    assert (pickle.loads(pickle.dumps(str(drawn))), repr(drawn)) == (drawn, str(drawn))  # what a cell or a prompt shows
    text = re.sub(r"<style>.*?</style>|<[^>]+>", "", drawn._repr_html_(), flags=re.S)
    row = next(line for line in text.splitlines() if line.startswith("  1 "))
    assert row.rstrip().endswith("BC")
    assert max(map(len, text.splitlines())) <= 88


def test_what_is_no_mask_is_refused():
    for shown, said in ((torch.ones(3), "two to four"), (torch.ones(1, 1, 1, 2, 2), "two to four")):
        with pytest.raises(CollateError, match=said):
            picture(shown)
    with pytest.raises(CollateError, match="decode"):
        picture({"input_ids": torch.ones(1, 2).long(), "attention_mask_2d": torch.ones(1, 2)}, tokenizer="gpt2")
