"""The report as it is pasted."""

from __future__ import annotations

from pathlib import Path

import pytest

from collate_npu.tools.env import Environment
from collate_npu.tools.env.markdown import as_markdown, masked

FOUND = Environment(
    system="Linux x86_64",
    packages={"torch": "2.13.0"},
    settings={"LD_LIBRARY_PATH": f"{Path.home()}/lib:/opt/lib"},
    cann="8.5.0 in /usr/local/Ascend",
    devices="cpu only",
    npu="torch_npu is not installed",
    runs={"transformers, attention": "sdpa"},
    refused={"transformers": {"padded right": "", "padded left": "", "flat rows": "No kernel. Install one."}},
    hazards=("one", "two"),
)


def test_every_fact_is_a_line_of_a_list():
    lines = as_markdown(FOUND).splitlines()
    assert lines[:3] == ["- system: Linux x86_64", "- torch: 2.13.0", "- LD_LIBRARY_PATH=~/lib:/opt/lib"]
    assert "- runs: transformers, attention: sdpa" in lines
    assert lines[lines.index("- hazard: two") + 1 :] == [
        "",
        "<details><summary>What is refused here, for a Qwen3-Next</summary>",
        "",
        "- transformers: right for padded right, padded left",
        "- transformers, flat rows: refused. No kernel. Install one.",
        "",
        "</details>",
    ]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"{Path.home()}/x", "~/x"),
        (f"{Path.home()}2/x", None),
        ("/home/somebody/venv/lib.so: gone", "~/venv/lib.so: gone"),
        ("/Users/somebody/x", "~/x"),
        ("https://user:secret@host/x", "https://***@host/x"),
        ("hf_abcdefghijklmnop", "***"),
        ("HF_TOKEN=abc, x", "HF_TOKEN=***, x"),
        ("2.13.0+cpu", "2.13.0+cpu"),
    ],
)
def test_what_is_nobodys_business_is_left_out(text, left):
    if left is None and text.startswith("/home/"):
        pytest.skip("a home among homes")
    assert masked(text) == (text if left is None else left)
