"""CLI, the command line: `collate-npu need | run | audit | conformance | watch | show | env | guide`.

Exit codes: 0 all was measured and is right; 1 something is wrong; 2 it could not do what was named, and a line says why; 130
interrupted. Nothing here imports torch or rich before a command needs it: `env` explains why torch does not load.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import sys
import warnings
from argparse import REMAINDER, ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from collate_npu.errors import CollateError, did_you_mean, explain, printable
from collate_npu.tools.guide import read_page
from collate_npu.tools.user_code import as_user_code, describe_error, find_callable, inherited_env, run_processes


class Parser(ArgumentParser):
    """A parser whose errors escape what was typed, and name the nearest known name."""

    def error(self, message: str) -> NoReturn:
        typed = re.search(r"invalid choice: '(.*?)'|unrecognized arguments: (-\S+)", message)
        known = re.findall(r"[\w.-]+", message.partition("(choose from ")[2]) or self._option_string_actions
        near = did_you_mean(typed[1] or typed[2], known) if typed else ""
        words = f"{message.rstrip('.')}. {near}" if near else message
        self.exit(2, printable(f"Try '{self.prog} --help' for help.\n\nError: {words}\n"))

    def print_help(self, file: Any = None) -> None:
        """Print the help, also to a reader who has left (Python 3.11.2 raises)."""
        with pipe_may_close():
            super().print_help(file)
            sys.stdout.flush()


def in_range(least: int, most: float = inf) -> Callable[[str], int]:
    """Return an argparse `type` for whole numbers in this range."""

    def whole_number(text: str) -> int:
        if not least <= int(text) <= most:
            raise ArgumentTypeError(f"{int(text)} is not in the range {least}..{most}.")
        return int(text)

    return whole_number


def load(*packages: str) -> None:
    """Import what a command needs. Raises `CollateError` for the first that does not load."""
    for package in packages:
        try:
            import_module(package)
        except (Exception, SystemExit) as error:  # torch raises RuntimeError where it cannot load torch_npu
            absent = isinstance(error, ModuleNotFoundError) and error.name == package
            remedy = f"pip install {package}." if absent else "`collate-npu env` says more."
            raise CollateError(f"{package} does not load: {describe_error(error)}. {remedy}") from None


def load_transformers() -> None:
    """Import what a model needs. Its notices are left out: of kernels that are missing, and of loading weights."""
    load("torch", "transformers", "rich")
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()


def _say(text: str, end: str = "\n") -> None:
    with pipe_may_close():
        print(text, end=end, flush=True)


def _report(report: Any, as_json: bool, **how: Any) -> int:
    """Print a report, drawn or as JSON, and return its exit code."""
    if as_json:
        _say(json.dumps(report.as_json(), indent=2, allow_nan=False))
    else:
        _print(*report.drawn(**how).values())
    return int(report.exit_code)


def _print(*drawn: Any) -> None:
    """Print what rich draws."""
    from collate_npu.tools.terminal import put, screen

    with pipe_may_close():
        put(screen(), *drawn)


@contextmanager
def pipe_may_close() -> Iterator[None]:
    """Ignore a closed stdout inside the block, as behind `| head`: the exit code does not change."""
    try:
        yield
    except (BrokenPipeError, SystemExit):  # the second is what rich raises, from 13.8 on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- commands


def run_need(options: Namespace) -> int:
    """Do you need this library? Each trainer that is installed here trains tiny models, without it and with the line to add.

    The trainers are transformers' Trainer, TRL's SFTTrainer and ms-swift's. The table says whether the gradient of a step is
    that of each sequence alone, how far it is off, the line, and how much faster a step is with it. Exit code 0: all is
    right with its line. 1: something is wrong, or was right without the line. 2: something else was refused.

    Examples:
    collate-npu need — a Qwen3-Next and a Qwen3, tiny and random
    collate-npu need --model qwen3_5_text --model ./checkpoint — another model type; your own, on the CPU in float32
    """
    load_transformers()
    from collate_npu.tools.need import measure_need

    return _report(measure_need(models=options.model, trust=options.trust_remote_code), options.json)


def run_audit(options: Namespace) -> int:
    """Does a batch give each sample the numbers that it has alone?

    For each model, attention and padding side: the largest difference of a logit at a real token, and the relative errors
    of loss and gradient, for batches of this library, of your collator, or one that you saved. Exit code 0: all was
    measured and is right. 1: something is wrong. 2: something named could not be run, or the result is undecided.

    Examples:
    collate-npu audit — every hybrid family of the installed transformers, tiny and random
    collate-npu audit --model qwen3_5_text --side left — one family, left padding alone
    collate-npu audit --model ./checkpoint --data my.jsonl --collator my_collator.py:collate — all your own
    collate-npu audit --model ./checkpoint --batch dump.pt — a batch saved in your trainer
    collate-npu audit --packed --attn flash_attention_2 --device npu --dtype bfloat16 — what trainers run on a card
    """
    load_transformers()
    from collate_npu.tools.audit import audit_all
    from collate_npu.tools.files import check_place
    from collate_npu.tools.terminal import html_of, screen, terms

    asked = vars(options)
    html, as_json, verbose, side, packed = (asked.pop(name) for name in ("html", "json", "verbose", "side", "packed"))
    if html:
        check_place(html)
    sides: list[Any] = [*([side] if side else ["left", "right"]), *["packed"] * packed]
    names = {"model": "models", "attn": "attentions", "collator": "collators", "trust_remote_code": "trust"}
    named = {names.get(name, name): value for name, value in asked.items()}
    report = audit_all(**named, sides=sides, console=screen(stderr=True))
    if html:
        settings = terms((key, str(value)) for key, value in report.settings.items())
        page = html_of("collate-npu audit", {**report.drawn(verbose=True), "Settings": settings})
        html.write_text(page, encoding="utf-8")
        print(f"collate-npu: wrote {printable(str(html))}", file=sys.stderr, flush=True)
    return _report(report, as_json, verbose=verbose)


def run_conformance(options: Namespace) -> int:
    """Does a stack give every token in a batch the log-probability that its sample gets alone?

    Only what `run` returns is used: ranks, Ray or a server may compute it. The table says which batches are
    wrong, and what the pattern of their errors means. Exit code 0: all is right. 1: a batch is wrong. 2: what was named
    could not be run, or the result is undecided.

    Examples:
    collate-npu conformance my_stack.py:run — batches as the stack makes them
    collate-npu conformance my_stack.py:run --layout left --layout packed --pad-id 151643 --vocab-size 151643
    collate-npu conformance my_package.serving:run --seed 7 — the same samples as in a run before
    """
    load("torch", "rich")
    from rich.text import Text

    from collate_npu.proof.conformance import CALLS, CALLS_OF_LAYOUT, conformance
    from collate_npu.tools.terminal import progress, verdict_line

    spec, layouts = options.run, options.layout
    stack = find_callable("run", spec, "my_stack.py:run", "Name a function that takes samples.")
    if not isinstance(stack, type):
        stack = as_user_code(stack, "run", spec, "It is called with samples, lists of token ids.", "Correct that function.")
    with progress(CALLS + (len(layouts or ()) or 2) * CALLS_OF_LAYOUT) as show:
        done = count()

        @wraps(stack)
        def shown(*args: Any, **kwargs: Any) -> Any:
            show(f"{getattr(stack, '__name__', 'run')}: call {(n := next(done)) + 1}", n)
            return stack(*args, **kwargs)

        settings = {"vocab_size": options.vocab_size, "pad_token_id": options.pad_id, "layouts": layouts}
        found = conformance(stack if isinstance(stack, type) else shown, **settings, seed=options.seed)
    code = 0 if found.passed else 1
    headline, *lines = str(found).splitlines()
    _print(verdict_line(code, headline), *map(Text, lines))
    return code


def run_watched(options: Namespace) -> int:
    """Run a command, and print the boundaries and the padding that each kernel gets, in all its processes.

    Any stack is seen, without an integration: flash-attn, fla, causal-conv1d, mamba, TransformerEngine, torch_npu, torch's
    own attention and transformers' plain functions. The first steps are looked at; then everything is taken off.
    The exit code is the command's own; with --stop 1 after a fault or a batch that contradicts itself, 2 if none is
    judged.

    Examples:
    collate-npu watch -- torchrun --nproc-per-node 8 train.py --config my.yaml
    collate-npu watch --stop -- python train.py — ends the run at the first fault, with exit code 1
    collate-npu watch --steps 5 --out seen.jsonl -- accelerate launch train.py
    """
    load("wrapt", "torch")
    from collate_npu.proof.delivery import summarize

    settings = {"steps": options.steps, "out": None if options.out is None else str(options.out.resolve())}

    def is_wrong(records: list[dict[str, Any]]) -> bool:
        return options.stop and any(record["faults"] for record in records)

    code, records = run_processes(options.command, "COLLATE_NPU_WATCH", settings, is_wrong)
    print(printable(f"collate-npu watch: {summarize(records)}"), file=sys.stderr, flush=True)
    if is_wrong(records):
        return 1
    return 2 if options.stop and not any(record["judged"] for record in records) else code


def run_adapted(options: Namespace) -> int:
    """Run a command with every transformers model adapted, in all its processes: batches run sequence by sequence.

    Any trainer that calls such models, unchanged, inside DDP, FSDP, DeepSpeed or PEFT. A model that is no causal language
    model is left as it came. The first step is checked. The last line says what was adapted, how much padding was not
    computed, and what was refused. The exit code is the command's own.

    Examples:
    collate-npu run -- axolotl train config.yml
    collate-npu run -- torchrun --nproc-per-node 8 train.py
    collate-npu watch -- collate-npu run -- llamafactory-cli train config.yaml — both at once
    collate-npu run --env — what a Ray cluster that runs already needs
    """
    load("wrapt", "torch", "transformers")
    from collate_npu.integrations.every_model import run_summary

    settings = {"check": options.check}
    if options.env:
        _say(json.dumps({"env_vars": inherited_env("COLLATE_NPU_RUN", settings, own="${PYTHONPATH}")}))  # in Ray's words
        return 0
    code, records = run_processes(options.command, "COLLATE_NPU_RUN", settings)
    print(printable(f"collate-npu run: {run_summary(records)}"), file=sys.stderr, flush=True)
    return code


def show_batch(options: Namespace) -> int:
    """Draw a batch: its rows and masks.

    A refused mask is drawn too; the exit code is then 1. Wide masks are folded.

    Examples:
    collate-npu show --lengths 3,5 --side left
    collate-npu show --lengths 3+2,5
    collate-npu show --batch batch.pt — the batch of a run that went wrong
    """
    load("torch", "rich")
    from collate_npu.tools import files, show
    from collate_npu.tools.describe import describe
    from collate_npu.tools.terminal import html_of, picture_text

    if (options.lengths is None) == (options.batch is None):
        got, rule = "none" if options.batch is None else "--lengths and --batch", "One thing is shown: --lengths or --batch."
        raise CollateError(explain("input", got, rule, "Name one of them."))
    if options.out:
        files.check_place(options.out, ".html")
    layout = {"side": options.side, "packed": options.packed}
    shown = files.batch_of_file(options.batch) if options.batch else show.batch_of_lengths(options.lengths, **layout)
    words = f"{describe(shown)}\n\n{show.picture(shown)}"
    if options.out:
        options.out.write_text(html_of("collate-npu show", {"Batch": picture_text(words)}), encoding="utf-8")
    _print(picture_text(words))
    return int("padding: not known" in words or "\nrefused: " in f"\n{words}")


def show_env(options: Namespace) -> int:
    """List packages, settings, whether torch and torch_npu load, and known hazards, to paste into an issue.

    Also where torch or rich do not load: python -m collate_npu env
    """
    from collate_npu.tools.env import report

    _say(report(as_json=options.json))
    return 0


def show_page(options: Namespace) -> int:
    """Read the guide: what to do for each trainer, which mask a stack reads, what a message means.

    Examples:
    collate-npu guide — the first page, which names the others
    collate-npu guide ms-swift
    collate-npu guide verl#measured — which model is right on this stack, as measured
    collate-npu guide errors#polarity
    collate-npu guide masked_select — the words of an error
    collate-npu guide zh/index
    """
    text = read_page(" ".join(options.name or ["index"]))
    if find_spec("rich"):
        from collate_npu.tools.terminal import Page, screen

        if screen().is_terminal:
            with pipe_may_close():
                screen().print(Page(text))
            return 0
    _say(text, end="")
    return 0


# --- options

DATA = (
    ".txt (one sample a line), .jsonl, .json, .parquet, .csv, or - (standard input). "
    "Columns: text, content, messages, conversations, or input_ids with labels. Default: a text that ships with the package."
)
COLLATOR = (
    "Your collator: module:function or file.py:function, called with features. A class, or a function with "
    "arguments tokenizer, model or pad_token_id, is called first to make the collator. Repeatable."
)
RUN = (
    "module:function or file.py:function. It is called with the samples of one batch, lists of token ids, and returns the "
    "log-probabilities of the next tokens, one list a sample."
)


def _option(name: str, words: str, **how: Any) -> tuple[str, dict[str, Any]]:
    """Return how argparse reads an option; its help ends with the default, if it has one."""
    shown = "default" in how and how["default"] != [] and "action" not in how
    return name, {"help": words.replace("%", "%%") + " [default: %(default)s]" * shown, **how}


def _flag(name: str, words: str) -> tuple[str, dict[str, Any]]:
    return _option(name, words, action="store_true")


def _list(name: str, words: str) -> tuple[str, dict[str, Any]]:
    return _option(name, words, action="append", default=[])


AS_JSON = _flag("--json", 'Print one JSON object instead of the text; of a verdict its first key is "passed".')
SIDES, DTYPES = ("left", "right"), ("float32", "bfloat16", "float16")
TRUST = _flag("--trust-remote-code", "Run Python code in model and tokenizer folders; else they are refused.")
COMMANDS: dict[str, tuple[Any, ...]] = {
    "need": (
        run_need,
        _list("--model", "A model type (tiny, random), or a checkpoint's folder. Repeatable; default: qwen3_next, qwen3."),
        TRUST,
        AS_JSON,
    ),
    "audit": (
        run_audit,
        _list("--model", "A model type (tiny, random), or a checkpoint's folder. Repeatable; default: all hybrids."),
        _option("--data", DATA, type=Path),
        _option("--batch", "A batch saved in your trainer (.pt), compared with each of its samples alone.", type=Path),
        _list("--collator", COLLATOR),
        _option("--tokenizer", "Folder of a tokenizer. Default: the checkpoint's own, or bytes for tiny models.", type=Path),
        TRUST,
        _option("--side", "left or right. Default: both.", choices=SIDES),
        _list("--attn", "Attention, by transformers' name. Repeatable; default: sdpa and eager."),
        _flag("--packed", "Flat rows too: all samples of a batch in one row."),
        _option("--device", "cpu, cuda, npu, or any torch device.", default="cpu"),
        _option("--dtype", "The dtype of the model.", choices=DTYPES, default="float32"),
        _option("--batch-size", "Samples in a batch, or in a flat row.", type=in_range(2), default=4),
        _option("--batches", "Batches per model and side.", type=in_range(1), default=2),
        _option("--max-length", "Longest sample of text, in tokens.", type=in_range(2, 1 << 20), default=96),
        _option("--gradients", "Compare gradients too.", action=argparse.BooleanOptionalAction, default=True),
        _option("--tolerance", "Error that is accepted. Default: 6 times the rounding noise, measured.", type=float),
        _option("--seed", "Which lines are drawn, and the random weights.", type=in_range(0, (1 << 63) - 1), default=0),
        _flag("--verbose", "A line for each case of every model."),
        AS_JSON,
        _option("--html", "Write a page too, with a line for each case.", type=Path),
    ),
    "conformance": (
        run_conformance,
        _option("run", RUN),
        _option("--layout", "Ask run(samples, layout=NAME). Repeatable; default: left and right where it takes layout.",
                action="append"),
        _option("--vocab-size", "Ids of samples are 3 to this number minus 1.", type=in_range(16, 1 << 24), default=256),
        _option("--pad-id", "The pad id; some samples have it as a real token.", type=in_range(0)),
        _option("--seed", "Seed of the samples; pass an earlier run's seed to repeat it.", type=in_range(0)),
    ),
    "run": (
        run_adapted,
        _option("--check", "Check the first step of each model.", action=argparse.BooleanOptionalAction, default=True),
        _flag("--env", "Print the environment that processes need, as JSON: a runtime_env of Ray."),
        _option("command", "The command to run, as it is, after --.", nargs=REMAINDER),
    ),
    "watch": (
        run_watched,
        _option("--steps", "Steps to look at, in each process.", type=in_range(1, 1 << 20), default=2),
        _flag("--stop", "End the run at the first fault."),
        _option("--out", "Append a line of JSON for each forward.", type=Path),
        _option("command", "The command to run, as it is, after --.", nargs=REMAINDER),
    ),
    "show": (
        show_batch,
        _option("--lengths", "Tokens of each row: 3,5. Several sequences in one row: 3+2,5."),
        _option("--batch", "A saved batch: .pt with a dict of tensors, .safetensors or .npz.", type=Path),
        _option("--side", "Padding side of --lengths.", choices=SIDES, default="right"),
        _flag("--packed", "One padding-free row, all sequences one after another."),
        _option("--out", "Write a page too: .html.", type=Path),
    ),
    "env": (show_env, AS_JSON),
    "guide": (show_page, _option("name", "A page, page#section, words, or an error; default: the first page.", nargs="*")),
}  # fmt: skip
"""What each command runs, and its options."""


def parsers() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the whole command line, and that of each command by its name."""
    from collate_npu import __version__

    how: Any = {"formatter_class": RawDescriptionHelpFormatter, "allow_abbrev": False}
    purpose = "Batches whose padding means the same to every layer, kernel and trainer."
    whole = Parser("collate-npu", description=purpose, **how)
    whole.add_argument("--version", action="version", version=f"%(prog)s {__version__}", help="Print the version and end.")
    adding = whole.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (command, *options) in COMMANDS.items():
        words, _, examples = str(inspect.getdoc(command)).partition("\n\nExamples:\n")
        listed = f"Examples:\n{examples}".replace("\n", "\n  ") if examples else None
        parser = adding.add_parser(name, help=words.partition("\n")[0], description=words, epilog=listed, **how)
        parser.set_defaults(called=command, parser=parser)
        for option, settings in options:
            parser.add_argument(option, **settings)
    return whole, adding.choices


def run_command_line(args: Sequence[str]) -> int:
    """Run a command, and return its exit code; where it is refused or fails, a line on stderr says why.

    Raises `SystemExit` for help, the version and wrong arguments.
    """
    whole, _ = parsers()
    if not args:
        whole.print_help()
        return 2
    options, unknown = whole.parse_known_args(args)
    called, parser = options.__dict__.pop("called"), options.__dict__.pop("parser")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    # the commands draw such a batch or hand it to an adapter, never to a model
    warnings.filterwarnings("ignore", message="collate_npu: this batch has a 4D")
    code = 2
    try:
        return int(called(options))
    except KeyboardInterrupt:  # a command that has results reports them itself
        code, message = 130, "INTERRUPTED: nothing was measured."
    except CollateError as error:
        message = str(error)
    except BaseException as error:  # a fault, here or elsewhere: the exit code must be neither 0 nor 1
        message = describe_error(error)
    print(printable(f"collate-npu: {message}"), file=sys.stderr, flush=True)
    return code
