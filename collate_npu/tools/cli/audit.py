"""`collate-npu audit`."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from collate_npu.errors import printable
from collate_npu.tools.cli.console import Option, Side, load

EXAMPLES = (
    "Examples:\n\n"
    "`collate-npu audit` — every hybrid family of the installed transformers, tiny and random\n\n"
    "`collate-npu audit --model qwen3_5_text --side left` — one family, left padding alone\n\n"
    "`collate-npu audit --model ./checkpoint --data my.jsonl --collator my_collator.py:collate` — all your own\n\n"
    "`collate-npu audit --model ./checkpoint --batch dump.pt` — a batch dumped from your trainer\n\n"
    "`zcat text.gz | collate-npu audit --model llama --data -` — text from standard input\n\n"
    "`collate-npu audit --packed --attn flash_attention_2 --device npu --dtype bfloat16` — what trainers run on a card"
)

of_model, of_data, of_run = (partial(Option, panel=panel) for panel in ("Model", "Data", "What is run"))
"""Options by the panels of the help."""
HELP = {
    "model": "A model type (tiny, random), or the folder of a checkpoint. Repeatable; default: all hybrids.",
    "data": ".txt (one sample a line), .jsonl, both also as .gz, .json, .parquet, .csv, or - (standard input). "
    "Columns: text, content, messages, conversations, or input_ids with labels. Default: a text of ours.",
    "batch": "A batch dumped from your trainer, .pt or .safetensors, compared with each of its samples alone.",
    "collator": "Your collator, audited beside ours: module:function or file.py:function, called with features; a class, "
    "or a function with arguments tokenizer, model or pad_token_id, makes one. Repeatable.",
    "tokenizer": "Folder of a tokenizer. Default: the checkpoint's own, or bytes for tiny models.",
    "trust": "Run Python code that these folders bring, else they are refused.",
    "attn": "Attention, by transformers' name. Repeatable; default: sdpa and eager.",
    "kernels": "What recurrent layers run on: what is installed, or reference, which is slow.",
}
"""Of the options that take many words."""


def audit_command(
    model: Annotated[list[str] | None, of_model(HELP["model"])] = None,
    data: Annotated[Path | None, of_data(HELP["data"])] = None,
    batch: Annotated[Path | None, of_data(HELP["batch"])] = None,
    collator: Annotated[list[str] | None, of_run(HELP["collator"])] = None,
    tokenizer: Annotated[Path | None, of_model(HELP["tokenizer"])] = None,
    trust_remote_code: Annotated[bool, of_model(HELP["trust"])] = False,
    side: Annotated[Side | None, of_run("left or right. Default: both.")] = None,
    attn: Annotated[list[str] | None, of_run(HELP["attn"])] = None,
    packed: Annotated[bool, of_run("Flat rows too: all samples of a batch in one row.")] = False,
    kernels: Annotated[Literal["installed", "reference"], of_run(HELP["kernels"])] = "installed",
    device: Annotated[str, of_model("cpu, cuda, npu, or any torch device.")] = "cpu",
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], of_model("float32, bfloat16 or float16.")] = "float32",
    batch_size: Annotated[int, of_data("Samples in a batch, or in a flat row.", least=2)] = 4,
    batches: Annotated[int, of_data("Batches per model and side.", least=1)] = 2,
    max_length: Annotated[int, of_data("Longest sample of text, in tokens.", least=2, most=1 << 20)] = 96,
    gradients: Annotated[bool, of_run("Compare gradients too.")] = True,
    tolerance: Annotated[float | None, of_run("Error of ours that passes. Default: six times the noise here.")] = None,
    seed: Annotated[int, of_data("Which lines are drawn, and the random weights.", least=0, most=(1 << 63) - 1)] = 0,
    verbose: Annotated[bool, Option("The table of every model, and every reason.", ("--verbose", "-v"))] = False,
    as_json_: Annotated[bool, Option("One JSON object in the place of the text; passed is first.", ("--json",))] = False,
    html: Annotated[Path | None, Option("Write a page too: tables, pictures, the error at each token.")] = None,
) -> int:
    """Does a padded batch give the same numbers as each sample alone? And a flat row?

    For each model, attention and padding side: the largest difference of a logit at a real token, and of the gradient,
    when the batch is handed over by this library, and as elsewhere. --collator and --batch put your own beside them. Exit
    code 0: all measured and right. 1: something is wrong, of ours or of yours, and the words say whose. 2: something named
    could not be run, or wrong could not be told from right.
    """
    load("torch", "transformers", "rich")
    if "TRANSFORMERS_VERBOSITY" not in os.environ:  # notices of kernels that are missing: the report says what matters
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()  # of loading weights: the audit's own says where it is
    from collate_npu.tools.audit.session import audit_all
    from collate_npu.tools.audit.terminal import page, print_report
    from collate_npu.tools.paper import check_place, screen

    if html:
        check_place(html)
    sides: list[Any] = [side] if side else ["left", "right"]
    sides += ["packed"] if packed else []
    report = audit_all(
        models=model or [], data=data, batch=batch, tokenizer=tokenizer, trust=trust_remote_code,
        sides=sides, attentions=attn or [], collators=collator or [],
        kernels=kernels, device=device, dtype=dtype, batch_size=batch_size, batches=batches,
        max_length=max_length, gradients=gradients, tolerance=tolerance, seed=seed, console=screen(stderr=True),
    )  # fmt: skip
    if html:
        html.write_text(page(report), encoding="utf-8")
        print(f"collate-npu: wrote {printable(str(html))}", file=sys.stderr, flush=True)
    if as_json_:
        print(json.dumps(report.as_json(), indent=2, allow_nan=False), flush=True)
    else:
        with suppress(SystemExit):  # how rich ends where nobody reads the pipe any more
            print_report(screen(), report, verbose=verbose)
    return report.exit_code
