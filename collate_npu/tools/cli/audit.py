"""`collate-npu audit`."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console

from collate_npu.tools.cli.console import Side, needs

EXAMPLES = (
    "Examples:\n\n"
    "`collate-npu audit` — every hybrid family of the installed transformers, tiny and random\n\n"
    "`collate-npu audit --model qwen3_5_text --side left` — one family, left padding alone\n\n"
    "`collate-npu audit --model ./checkpoint --data my.jsonl --dtype bfloat16` — your own\n\n"
    "`collate-npu audit --model ./checkpoint --collator my_collator.py:collate` — your own collator, beside ours\n\n"
    "`collate-npu audit --model ./checkpoint --batch dump.pt` — a batch dumped from your trainer\n\n"
    "`zcat text.gz | collate-npu audit --model llama --data -` — text from standard input\n\n"
    "`collate-npu audit --packed --attn flash_attention_2 --device npu --dtype bfloat16` — what trainers run on a card\n\n"
    "`collate-npu audit --model qwen3 --cp 2` — between two ranks"
)

MODEL, DATA, RUN = "Model", "Data", "What is run"
"""Panels of the help."""


class Kernels(str, Enum):
    """What recurrent layers run on."""

    installed = "installed"
    reference = "reference"


class Dtype(str, Enum):
    """In which dtype to audit."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@needs("torch", "transformers")
def audit_command(
    model: Annotated[
        Optional[list[str]],  # noqa: UP045 (typer reads it at run time on Python 3.10)
        typer.Option(
            help="A model type (tiny, random) or the folder of a local checkpoint, an encoder too. Repeatable; default: all "
            "hybrids.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    data: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Your data: .txt (one sample a line), .jsonl, .json, .parquet, .csv, each also as .gz, or - (lines from "
            "standard input). Columns: text, content, messages, conversations, or input_ids with labels. Default: text "
            "shipped in the package.",
            rich_help_panel=DATA,
        ),
    ] = None,
    batch: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="A batch dumped from your trainer, .pt (a dict of tensors) or .safetensors: it goes to the --model as it "
            "is, and is compared with each of its samples alone.",
            rich_help_panel=DATA,
        ),
    ] = None,
    collator: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            help="Your collator, audited beside ours: module:function or file.py:function, called with features; a class, "
            "or a function with arguments tokenizer, model or pad_token_id, makes one. Repeatable.",
            rich_help_panel=RUN,
        ),
    ] = None,
    tokenizer: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Folder of a tokenizer. Default: the checkpoint's own, or bytes for tiny models.", rich_help_panel=MODEL
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run Python code that the folders of --model and --tokenizer bring. Without it none runs, and such a "
            "folder is refused.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    side: Annotated[Optional[Side], typer.Option(help="Padding side. Default: both.", rich_help_panel=RUN)] = None,  # noqa: UP045
    attn: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            help="Attention implementation, by transformers' name. Repeatable; default: both (sdpa and eager).",
            rich_help_panel=RUN,
        ),
    ] = None,
    packed: Annotated[
        bool, typer.Option("--packed", help="Flat rows too: all samples of a batch in one row.", rich_help_panel=RUN)
    ] = False,
    cp: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=2, help="Context parallelism too, on so many ranks of this machine (sdpa alone).", rich_help_panel=RUN
        ),
    ] = None,
    kernels: Annotated[
        Kernels,
        typer.Option(
            help="What recurrent layers run on: what is installed, or slow reference kernels.", rich_help_panel=RUN
        ),
    ] = Kernels.installed,
    plugin: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            help="Module to import first, which may register an attention implementation. Repeatable.", rich_help_panel=RUN
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that the ranks of --cp have for a model.", rich_help_panel=RUN)
    ] = 600,
    device: Annotated[str, typer.Option(help="cpu, cuda, npu, or any torch device.", rich_help_panel=MODEL)] = "cpu",
    dtype: Annotated[Dtype, typer.Option(help="In which dtype.", rich_help_panel=MODEL)] = Dtype.float32,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a batch, or in a flat row.", rich_help_panel=DATA)] = 4,
    batches: Annotated[int, typer.Option(min=1, help="Batches per model and side.", rich_help_panel=DATA)] = 2,
    max_length: Annotated[int, typer.Option(min=2, help="Longest sample of text, in tokens.", rich_help_panel=DATA)] = 96,
    gradients: Annotated[bool, typer.Option(help="Compare gradients too.", rich_help_panel=RUN)] = True,
    tolerance: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            help="Largest error of ours that passes. Default: six times the noise measured here.", rich_help_panel=RUN
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Which lines are drawn, and the random weights.", rich_help_panel=DATA)
    ] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="The table of every model, and every reason.")] = False,
    as_json_: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout in the place of the text: passed (bool) comes first.")
    ] = False,
    html: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write a page too: tables, pictures of the batches, the error at each token. Needs matplotlib."),
    ] = None,
) -> None:
    """Does a padded batch give the same numbers as each sample alone? And a flat row, and a batch shared out by ranks?

    For each model, attention and padding side: the largest difference of a logit at a real token, and of the gradient,
    when the batch is handed over by this library, and when it is handed over as elsewhere. --packed adds flat rows, --cp
    adds ranks: one command line covers what a trainer runs. --collator and --batch put your own beside them: their
    samples are found by their tokens. Exit code 0: all measured and right. 1: something of ours is wrong, or a collator or
    batch of yours, and the words say whose. 2: something named could not be run, or wrong could not be told from right.
    """
    if "TRANSFORMERS_VERBOSITY" not in os.environ:  # notices of kernels that are missing: the report says what matters
        from transformers.utils import logging

        os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # for the ranks
        logging.set_verbosity_error()
        logging.disable_progress_bar()  # of loading weights: the audit's own says where it is
    from collate_npu.tools.audit.page import check_page, page
    from collate_npu.tools.audit.session import audit_all
    from collate_npu.tools.audit.terminal import print_report

    console = Console(stderr=True)
    if html:
        check_page(html)
    sides: list[Any] = [side.value] if side else ["left", "right"]
    sides += ["packed"] if packed else []
    report = audit_all(
        models=model or [], data=data, tokenizer=tokenizer, sides=sides,
        attentions=attn or [], device=device, dtype=dtype.value, batch_size=batch_size, batches=batches,
        max_length=max_length, gradients=gradients, tolerance=tolerance, seed=seed, console=console, ranks=cp or 0,
        kernels=kernels.value, plugins=plugin or [], seconds=timeout,
        collators=collator or [], batch=batch, trust=trust_remote_code,
    )  # fmt: skip
    if html:
        html.write_text(page(report), encoding="utf-8")
    if as_json_:
        typer.echo(json.dumps(report.as_json(), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        with suppress(SystemExit):  # how rich ends where nobody reads the pipe any more
            print_report(Console(), report, verbose=verbose)
    raise typer.Exit(report.exit_code)
