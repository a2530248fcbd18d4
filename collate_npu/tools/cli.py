"""CLI, the command line: `collate-npu audit | conformance | watch | show | env | kernels | guide`.

Nothing here imports torch or rich before a command needs it: `env` explains why torch does not load.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from importlib.util import find_spec
from inspect import getdoc
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any, Literal

from collate_npu.errors import CollateError, explain, printable
from collate_npu.tools.console import Help, Option, Parser, Side, exit_code_of, load
from collate_npu.tools.guide import listed, page
from collate_npu.tools.user_code import named, theirs
from collate_npu.tools.watch import WATCH_EXAMPLES, watch_command

if TYPE_CHECKING:
    from collate_npu.tools.sheet import Sheet

AUDIT_EXAMPLES = (
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
    html: Annotated[Path | None, Option("Write a page too: tables, and the error at each token.")] = None,
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
    from collate_npu.tools.audit.report import page, print_report
    from collate_npu.tools.audit.session import audit_all
    from collate_npu.tools.files import check_place
    from collate_npu.tools.terminal import screen

    if html:
        check_place(html)
    sides: list[Any] = [side] if side else ["left", "right"]
    sides += ["packed"] if packed else []
    report = audit_all(
        models=model or [], data=data, batch=batch, tokenizer=tokenizer, trust=trust_remote_code,
        sides=sides, attentions=attn or [], collators=collator or [],
        device=device, dtype=dtype, batch_size=batch_size, batches=batches, max_length=max_length,
        gradients=gradients, tolerance=tolerance, seed=seed, console=screen(stderr=True),
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


# --- kernels

KERNELS_EXAMPLES = (
    "Examples:\n\n`collate-npu kernels --device npu` — every operator that is installed, before you train on a card\n\n"
    "`collate-npu kernels --device npu --operator npu_fusion_attention` — one, in all its forms and layouts\n\n"
    "`collate-npu kernels` — what runs on a CPU"
)
_OPERATOR = "An operator, or a package, for example fla. Repeatable; default: all."


def kernels_command(
    device: Annotated[str, Option("cpu, cuda, npu, or one of several: npu:1.")] = "cpu",
    operator: Annotated[list[str] | None, Option(_OPERATOR)] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, Option("Default: float32 on a CPU, else bfloat16.")
    ] = None,
    verbose: Annotated[bool, Option("Why calls were refused, too.", ("--verbose", "-v"))] = False,
    as_json_: Annotated[bool, Option("One JSON object in the place of the text; passed is first.", ("--json",))] = False,
) -> int:
    """Does each operator compute what our arguments say, on this device?

    Operators of attention and of recurrent layers that are installed are called with this library's masks and boundaries,
    forward and backward, and compared with each sequence alone in float64. Exit code 0: all right, and something was
    measured. 1: something is wrong. 2: something named could not be run; without the card, what would run is listed.
    """
    load("torch", "rich")
    from rich.text import Text

    from collate_npu import __version__
    from collate_npu.tools import kernels
    from collate_npu.tools.audit.report import SIGNS, terms
    from collate_npu.tools.terminal import put, screen

    chosen, in_dtype = kernels.kernels_named(operator or []), kernels.dtype_of(dtype, device)
    no_card, console = kernels.why_no_card(device, in_dtype), screen(stderr=True)
    found = []
    with console.status("") as status:
        for run in kernels.measured(chosen, device, in_dtype, no_card):
            found.append(run)
            status.update(Text(f"{run.operator}: {run.truth}"))
    code = kernels.exit_code(found, no_card, named=operator or [])
    if as_json_:
        settings = {"device": device, "dtype": str(in_dtype).removeprefix("torch."), "collate_npu": __version__}
        print(json.dumps(kernels.as_json(found, settings, no_card, code), indent=2, allow_nan=False), flush=True)
        return code
    sign, style = SIGNS["right" if code == 0 else "wrong" if code == 1 else "unproved"]
    with suppress(SystemExit):  # how rich ends where nobody reads the pipe any more
        out = screen()
        put(out, Text(f"{sign} {kernels.headline(found, no_card, code)}", f"bold {style}"))
        put(out, terms(kernels.notes(found, no_card, verbose=verbose)), *kernels.tables(found))
    return code


# --- conformance

CONFORMANCE_EXAMPLES = (
    "Examples:\n\n`collate-npu conformance my_stack.py:run` — batches as the stack makes them\n\n"
    "`collate-npu conformance my_stack.py:run --layout left --layout packed --pad-id 151643 --vocab-size 151643`\n\n"
    "`collate-npu conformance my_package.serving:run --seed 7` — the same samples as in a run before"
)
RUN = (
    "module:function or file.py:function. It is called with the samples of one batch, lists of token ids, and returns the "
    "log-probabilities of the next tokens, one list a sample."
)
LAYOUT = "Ask run(samples, layout=NAME). Repeatable; default: left and right where it takes layout."


def conformance_command(
    run: Annotated[str, Option(RUN, ("run",))],
    layout: Annotated[list[str] | None, Option(LAYOUT)] = None,
    vocab_size: Annotated[int, Option("Samples are drawn from ids 3 to below this.", least=16, most=1 << 24)] = 256,
    pad_id: Annotated[int | None, Option("The pad id, which samples are to hold as text, too.", least=0)] = None,
    seed: Annotated[int | None, Option("Draw the samples of an earlier run again.", least=0)] = None,
) -> int:
    """Does a stack give every token in a batch the log-probability that its sample gets alone?

    Nothing is asked of it but answers: ranks, Ray or a server may stand behind `run`. The table says which batches are
    wrong, and what the pattern of their errors means. Exit code 0: all is right. 1: a batch is wrong. 2: what was named
    could not be run, or wrong could not be told from right.
    """
    load("torch", "rich")
    from rich.text import Text

    from collate_npu.proof.conformance import conformance
    from collate_npu.tools.terminal import put, screen

    asked = _at_home(run, named("run", run, "my_stack.py:run", "Name a function of samples."))
    found = conformance(asked, vocab_size=vocab_size, pad_token_id=pad_id, layouts=layout or None, seed=seed)
    sign, style = ("✔", "green") if found.passed else ("✘", "red")
    headline, *lines = str(found).splitlines()
    put(screen(), Text(f"{sign} {headline}", f"bold {style}"), *map(Text, lines))
    return 0 if found.passed else 1


def _at_home(spec: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, which finds the modules beside it as when it was imported."""
    if isinstance(run, type):  # said of itself: what wraps it is a function
        return run

    @wraps(run)
    def asked(*args: Any, **kwargs: Any) -> Any:
        with theirs("run", spec, "It is called with samples, lists of token ids.", "Mend it there."):
            return run(*args, **kwargs)

    return asked


# --- show

SHOW_EXAMPLES = (
    "Examples:\n\n`collate-npu show --lengths 3,5 --side left`\n\n"
    "`collate-npu show --lengths 3+2,5 --consumer megatron --consumer transformers --model-type qwen3`\n\n"
    "`collate-npu show --batch batch.pt --tokenizer ./checkpoint` — the batch of a run that went wrong\n\n"
    "`collate-npu show --data my.jsonl --tokenizer ./checkpoint --out batch.html`\n\n"
    "`collate-npu show --lengths 6,8 --cp 2 --layout zigzag` — which tokens each rank gets"
)


def show_command(
    lengths: Annotated[str | None, Option("Tokens of each row, 3,5; several sequences in a row, 3+2,5.")] = None,
    batch: Annotated[Path | None, Option("A saved batch: .pt with a dict of tensors, .safetensors or .npz.")] = None,
    data: Annotated[Path | None, Option("As in audit: .txt, .jsonl, .parquet, .csv or -; its first batch.")] = None,
    mask: Annotated[Path | None, Option("A saved mask alone: .pt, .npy, .npz or .safetensors.")] = None,
    tokenizer: Annotated[Path | None, Option("Folder of a tokenizer, to name the tokens; bytes for --data.")] = None,
    side: Annotated[Side, Option("Padding side, of --lengths and --data.")] = "right",
    packed: Annotated[bool, Option("One flat row, all samples one after another.")] = False,
    batch_size: Annotated[int, Option("Lines of --data in the batch.", least=1)] = 4,
    max_length: Annotated[int, Option("Longest line of --data, in tokens.", least=2, most=1 << 20)] = 96,
    row: Annotated[int | None, Option("Squares of this row alone.", least=0)] = None,
    consumer: Annotated[list[str] | None, Option("Who reads the batch. Repeatable; default: nobody yet.")] = None,
    model_type: Annotated[str, Option("Whose layers decide about attention_mask_2d.")] = "qwen3_next",
    cp: Annotated[int | None, Option("What each of so many ranks holds.", least=2, most=1024)] = None,
    layout: Annotated[str, Option("How ranks share a row: zigzag, contiguous, ulysses, ulysses_ring ...")] = "zigzag",
    ulysses: Annotated[int, Option("Ulysses ranks in a ring, with ulysses_ring.", least=1, most=1024)] = 1,
    out: Annotated[Path | None, Option("Write a page too: .html.")] = None,
) -> int:
    """Draw a batch: its rows, tokens, labels and masks, what each consumer and each rank gets of it, and why.

    A mask that is refused is drawn all the same, with the places that speak against it. What is wide is folded by blocks.
    """
    load("torch")
    from collate_npu.parallel import ContextParallel
    from collate_npu.tools import files
    from collate_npu.tools.describe import describe
    from collate_npu.tools.sheet import sheet_of
    from collate_npu.tools.show import (
        collated,
        consumer_panels,
        features_of_data,
        features_of_lengths,
        rank_panels,
        reader_of,
    )

    _exactly_one(lengths=lengths, batch=batch, data=data, mask=mask)
    if out is not None:
        load("rich")
        files.check_place(out, ".html")
    if mask is not None:
        return _print(sheet_of(files.mask_of_file(mask), row=row), "", out)
    ranks = None if cp is None else ContextParallel(cp, 0, layout=layout, ulysses=ulysses)  # type: ignore[arg-type]
    ranks = ranks.for_documents() if ranks is not None and packed else ranks
    how: dict[str, Any] = {"side": side, "packed": packed, "ranks": ranks}
    reader = reader_of(tokenizer, bytes_too=data is not None)
    if batch is not None:
        shown = files.batch_of_file(batch)
    elif data is not None:
        shown = collated(features_of_data(data, reader, batch_size, max_length), pad_token_id=reader.pad_token_id, **how)
    else:
        shown = collated(features_of_lengths(str(lengths)), **how)
    read: dict[str, Any] = {"model_type": model_type, "padding_free": packed, "context_parallel": ranks}
    panels = [panel for name in consumer or [] for panel in consumer_panels(shown, name, **read)]
    panels += [] if ranks is None else rank_panels(shown, ranks)
    sheet = sheet_of(shown, row=row, tokenizer=reader)
    kept = sheet.panels if not panels else tuple(p for p in sheet.panels if not (p.derived and p.squares))
    return _print(replace(sheet, panels=(*kept, *panels)), str(describe(shown)), out)


def _exactly_one(**inputs: Any) -> None:
    given = [f"--{name}" for name, value in inputs.items() if value is not None]
    if len(given) != 1:
        rule = "One thing is shown: --lengths, --batch, --data or --mask."
        raise CollateError(explain("input", " and ".join(given) or "none", rule, "Name one of them."))


def _print(sheet: Sheet, words: str, out: Path | None) -> int:
    """The words, then the picture, which is what stays on the screen; without rich in signs alone."""
    from collate_npu.tools.show import html_of, lines, text_of

    if not find_spec("rich"):
        print(f"{words}\n\n{text_of(lines(sheet, get_terminal_size().columns))}".lstrip(), flush=True)
        return 0
    from rich.text import Text

    from collate_npu.tools.terminal import assembled, put, screen

    console = screen()
    if out is not None:
        out.write_text(html_of(sheet), encoding="utf-8")
    with suppress(SystemExit):  # how rich ends where nobody reads the pipe any more
        put(console, *([Text(f"{words}\n")] if words else []), *map(assembled, lines(sheet, console.width)))
        put(console, *[Text(f"written: {out}")] * (out is not None))
    return 0


# --- guide and env

GUIDE_EXAMPLES = (
    "Examples:\n\n`collate-npu guide` — the list\n\n`collate-npu guide ms-swift`\n\n`collate-npu guide errors#polarity`\n\n"
    "`collate-npu guide masked_select` — the words of an error\n\n`collate-npu guide zh/index`"
)


def guide_command(
    name: Annotated[list[str] | None, Option("A page, page#section, words of an error; or the list.", ("name",))] = None,
) -> int:
    """Read the guide: what to do for each trainer, which mask a stack reads, what a message means."""
    text = page(" ".join(name)) if name else listed()
    if find_spec("rich"):
        from collate_npu.tools.terminal import Page, screen

        if screen().is_terminal:
            screen().print(Page(text))
            return 0
    sys.stdout.write(text)
    sys.stdout.flush()
    return 0


def env_command(as_json: Annotated[bool, Option("Print the same as JSON.", names=("--json",))] = False) -> int:
    """What is installed, which kernels it can run, and known hazards; made for pasting into an issue.

    Also where torch or rich do not load: `python -m collate_npu env`.
    """
    from collate_npu.tools.env import written

    print(written(as_json=as_json), flush=True)
    return 0


COMMANDS: dict[str, tuple[Callable[..., int], str | None]] = {
    "audit": (audit_command, AUDIT_EXAMPLES),
    "conformance": (conformance_command, CONFORMANCE_EXAMPLES),
    "watch": (watch_command, WATCH_EXAMPLES),
    "show": (show_command, SHOW_EXAMPLES),
    "env": (env_command, None),
    "kernels": (kernels_command, KERNELS_EXAMPLES),
    "guide": (guide_command, GUIDE_EXAMPLES),
}


def parsers() -> tuple[Parser, dict[str, Parser]]:
    """The whole command line, and each command by its name."""
    from collate_npu import __version__

    how: Any = {"formatter_class": Help, "allow_abbrev": False}
    whole = Parser(
        "collate-npu", description="Batches whose padding means the same to every layer, kernel and trainer.", **how
    )
    whole.add_argument("--version", action="version", version=f"%(prog)s {__version__}", help="Print the version and end.")
    adding = whole.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (command, examples) in COMMANDS.items():
        words = str(getdoc(command))
        adding.add_parser(name, help=words.partition("\n")[0], description=words, epilog=examples, **how).add_command(
            command
        )
    return whole, adding.choices


def run(args: Sequence[str]) -> int:
    """Run a command, and return its exit code. Raises `SystemExit` for help, the version and what is typed wrongly."""
    whole, _ = parsers()
    if not args:
        whole.print_help()
        return 2
    asked = vars(whole.parse_args(args))
    return exit_code_of(asked.pop("called"), asked)
