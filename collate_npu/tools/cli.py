"""CLI, the command line: `collate-npu audit | conformance | watch | show | env | guide`.

A command is a function; its options are its parameters. Exit codes: 0 done and right; 1 something of this library, or of
what you gave, is wrong (`audit`, `conformance`); 2 it could not do what was named, and a line says why; 130 interrupted.
Nothing here imports torch or rich before a command needs it: `env` explains why torch does not load.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import warnings
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, HelpFormatter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from math import inf
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from collate_npu.errors import CollateError, did_you_mean, explain, printable
from collate_npu.tools.guide import read_page
from collate_npu.tools.user_code import as_user_code, describe_error, find_callable, watch_processes

# --- options


@dataclass(frozen=True)
class Option:
    """A parameter on the command line: `--its-name`, or `names`; a name without a dash is given by its place."""

    help: str
    names: tuple[str, ...] = ()
    least: int = 0
    most: float = inf

    def whole_number(self, text: str) -> int:
        """Return the number in a text, if it is in the range."""
        if not self.least <= int(text) <= self.most:
            raise ArgumentTypeError(f"{int(text)} is not in the range {self.least}..{self.most}.")
        return int(text)


class Parser(ArgumentParser):
    """Read the parameters of a command, `Annotated[type, Option(...)]`. What was typed is shown escaped."""

    def add_command(self, command: Callable[..., int]) -> None:
        """Add an option for each parameter; the parsed arguments hold the command as `called`, and this `parser`."""
        for name, each in inspect.signature(command, eval_str=True).parameters.items():
            kind, option = get_args(each.annotation)
            how = _read(get_args(kind)[0] if NoneType in get_args(kind) else kind, option, each.default)
            shown = "" if each.default in (each.empty, None) or each.default is False else f" [default: {each.default}]"
            added = self.add_argument(*(option.names or (f"--{name.replace('_', '-')}",)), **how)
            added.help = f"{option.help}{shown}".replace("%", "%%")  # argparse writes the default of a switch by itself
            added.dest, added.default = name, None if each.default is each.empty else each.default
            added.required = each.default is each.empty
        self.set_defaults(called=command, parser=self)

    def _print_message(self, message: str, file: Any = None) -> None:
        with pipe_may_close():  # before Python 3.11 argparse minds
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        typed = re.search(r"invalid choice: '(.*?)'|unrecognized arguments: (-\S+)", message)
        known = re.findall(r"[\w.-]+", message.partition("(choose from ")[2]) or self._option_string_actions
        near = did_you_mean(typed[1] or typed[2], known) if typed else ""
        words = f"{message.rstrip('.')}. {near}" if near else message
        self.exit(2, printable(f"Try '{self.prog} --help' for help.\n\nError: {words}\n"))


def _read(kind: Any, option: Option, default: Any) -> dict[str, Any]:
    """Return how argparse reads a value of this type."""
    if kind is bool:
        return {"action": BooleanOptionalAction if default else "store_true"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is list:
        return {"nargs": "*" if default is None else "..."} if option.names else {"action": "append", "metavar": "TEXT"}
    how = {"type": option.whole_number if kind is int else kind}
    shown = {str: "TEXT", int: f"{option.least}..{option.most}"}
    return how if option.names else how | {"metavar": shown.get(kind, kind.__name__.upper())}


class Help(HelpFormatter):
    """Fill each paragraph by itself, and each example."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.replace("`", "").replace("\ncollate-npu", "\n\ncollate-npu").split("\n\n")
        return "\n\n".join(super(Help, self)._fill_text(part, width, indent) for part in parts)


def load(*packages: str) -> None:
    """Import what a command needs. Raises `CollateError` for the first that does not load."""
    for package in packages:
        try:
            import_module(package)
        except (Exception, SystemExit) as error:  # torch raises RuntimeError where it cannot load torch_npu
            absent = isinstance(error, ModuleNotFoundError) and error.name == package
            remedy = f"pip install {package}." if absent else "`collate-npu env` says more."
            raise CollateError(f"{package} does not load: {describe_error(error)}. {remedy}") from None


# --- commands

DATA = (
    ".txt (one sample a line), .jsonl, both also as .gz, .json, .parquet, .csv, or - (standard input). "
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
Side = Literal["left", "right"]
Dtype = Literal["float32", "bfloat16", "float16"]
Verbose = ("--verbose", "-v")
AsJson = Annotated[bool, Option('Print one JSON object instead of the text; its first key is "passed".', ("--json",))]


def audit_command(
    model: Annotated[
        list[str] | None, Option("A model type (tiny, random), or a checkpoint's folder. Repeatable; default: all hybrids.")
    ] = None,
    data: Annotated[Path | None, Option(DATA)] = None,
    batch: Annotated[
        Path | None, Option("A batch dumped from your trainer, .pt or .safetensors, compared with each sample alone.")
    ] = None,
    collator: Annotated[list[str] | None, Option(COLLATOR)] = None,
    tokenizer: Annotated[
        Path | None, Option("Folder of a tokenizer. Default: the checkpoint's own, or bytes for tiny models.")
    ] = None,
    trust_remote_code: Annotated[
        bool, Option("Run Python code in these folders; without it such folders are refused.")
    ] = False,
    side: Annotated[Side | None, Option("left or right. Default: both.")] = None,
    attn: Annotated[
        list[str] | None, Option("Attention, by transformers' name. Repeatable; default: sdpa and eager.")
    ] = None,
    packed: Annotated[bool, Option("Flat rows too: all samples of a batch in one row.")] = False,
    device: Annotated[str, Option("cpu, cuda, npu, or any torch device.")] = "cpu",
    dtype: Annotated[Dtype, Option("float32, bfloat16 or float16.")] = "float32",
    batch_size: Annotated[int, Option("Samples in a batch, or in a flat row.", least=2)] = 4,
    batches: Annotated[int, Option("Batches per model and side.", least=1)] = 2,
    max_length: Annotated[int, Option("Longest sample of text, in tokens.", least=2, most=1 << 20)] = 96,
    gradients: Annotated[bool, Option("Compare gradients too.")] = True,
    tolerance: Annotated[float | None, Option("Error of ours that passes. Default: six times the noise here.")] = None,
    seed: Annotated[int, Option("Which lines are drawn, and the random weights.", most=(1 << 63) - 1)] = 0,
    verbose: Annotated[bool, Option("The table of every model, and every reason.", Verbose)] = False,
    as_json: AsJson = False,
    html: Annotated[Path | None, Option("Write a page too, with the table of every model.")] = None,
) -> int:
    """Does a padded batch give the same numbers as each sample alone? And a flat row?

    For each model, attention and padding side: the largest difference of a logit at a real token, and of the gradient,
    when the batch is handed over by this library, and as elsewhere. --collator and --batch put your own beside them. Exit
    code 0: all measured and right. 1: something is wrong, of ours or of yours, and the words say whose. 2: something named
    could not be run, or wrong could not be told from right.

    Examples:
    `collate-npu audit` — every hybrid family of the installed transformers, tiny and random
    `collate-npu audit --model qwen3_5_text --side left` — one family, left padding alone
    `collate-npu audit --model ./checkpoint --data my.jsonl --collator my_collator.py:collate` — all your own
    `collate-npu audit --model ./checkpoint --batch dump.pt` — a batch dumped from your trainer
    `collate-npu audit --packed --attn flash_attention_2 --device npu --dtype bfloat16` — what trainers run on a card
    """
    load("torch", "transformers", "rich")
    if "TRANSFORMERS_VERBOSITY" not in os.environ:  # notices of kernels that are missing: the report says what matters
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()  # of loading weights: the audit's own says where it is
    from collate_npu.tools.audit import audit_all, page
    from collate_npu.tools.files import check_place
    from collate_npu.tools.terminal import put, screen

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
    if as_json:
        _print_json(report.as_json())
    else:
        with pipe_may_close():
            put(screen(), *report.drawn(verbose=verbose))
    return report.exit_code


def _print_json(found: dict[str, Any]) -> None:
    with pipe_may_close():
        print(json.dumps(found, indent=2, allow_nan=False), flush=True)


@contextmanager
def pipe_may_close() -> Iterator[None]:
    """Print to a reader who may have left, as `head` does: the exit code stays the command's."""
    try:
        yield
    except (BrokenPipeError, SystemExit):  # the second is what rich raises, from 13.8 on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def conformance_command(
    run: Annotated[str, Option(RUN, ("run",))],
    layout: Annotated[
        list[str] | None, Option("Ask run(samples, layout=NAME). Repeatable; default: left and right where it takes layout.")
    ] = None,
    vocab_size: Annotated[int, Option("Samples are drawn from ids 3 to below this.", least=16, most=1 << 24)] = 256,
    pad_id: Annotated[int | None, Option("The pad id; some samples hold it as text.")] = None,
    seed: Annotated[int | None, Option("Seed of the samples; pass an earlier run's seed to repeat it.")] = None,
) -> int:
    """Does a stack give every token in a batch the log-probability that its sample gets alone?

    Nothing is asked of it but answers: ranks, Ray or a server may stand behind `run`. The table says which batches are
    wrong, and what the pattern of their errors means. Exit code 0: all is right. 1: a batch is wrong. 2: what was named
    could not be run, or wrong could not be told from right.

    Examples:
    `collate-npu conformance my_stack.py:run` — batches as the stack makes them
    `collate-npu conformance my_stack.py:run --layout left --layout packed --pad-id 151643 --vocab-size 151643`
    `collate-npu conformance my_package.serving:run --seed 7` — the same samples as in a run before
    """
    load("torch", "rich")
    from rich.text import Text

    from collate_npu.proof.conformance import CALLS, CALLS_OF_LAYOUT, conformance
    from collate_npu.tools.terminal import progress, put, screen, verdict_line

    stack = find_callable("run", run, "my_stack.py:run", "Name a function of samples.")
    if not isinstance(stack, type):
        stack = as_user_code(stack, "run", run, "It is called with samples, lists of token ids.", "Mend it there.")
    settings: dict[str, Any] = {"vocab_size": vocab_size, "pad_token_id": pad_id, "layouts": layout or None}
    with progress(CALLS + (len(layout or ()) or 2) * CALLS_OF_LAYOUT) as show:
        done = count()

        @wraps(stack)
        def shown(*args: Any, **kwargs: Any) -> Any:
            show(f"{getattr(stack, '__name__', 'run')}: call {(n := next(done)) + 1}", n)
            return stack(*args, **kwargs)

        found = conformance(stack if isinstance(stack, type) else shown, **settings, seed=seed)
    code = 0 if found.passed else 1
    headline, *lines = str(found).splitlines()
    with pipe_may_close():
        put(screen(), verdict_line(code, headline), *map(Text, lines))
    return code


def watch_command(
    command: Annotated[list[str], Option("What to run, unchanged, behind --.", ("command",))],
    steps: Annotated[int, Option("Steps to look at, in each process.", least=1, most=1 << 20)] = 2,
    stop: Annotated[bool, Option("End the run at the first fault.")] = False,
    out: Annotated[Path | None, Option("Append a line of JSON for each forward.")] = None,
) -> int:
    """Run a command, and print the boundaries and the padding that each kernel gets, in all its processes.

    Any stack is seen, without an integration: flash-attn, fla, causal-conv1d, mamba, TransformerEngine, torch_npu, torch's
    own attention and transformers' plain functions. The first steps are looked at; then everything is taken off.
    The exit code is the command's own; with --stop 1 after a fault or a batch that contradicts itself, 2 if none is judged.

    Examples:
    `collate-npu watch -- torchrun --nproc-per-node 8 train.py --config my.yaml`
    `collate-npu watch --stop -- python train.py` — ends the run at the first fault, with exit code 1
    `collate-npu watch --steps 5 --out seen.jsonl -- accelerate launch train.py`
    """
    load("wrapt", "torch")
    return watch_processes(command, steps=steps, stop=stop, out=out)


def show_command(
    lengths: Annotated[str | None, Option("Tokens of each row, 3,5; several sequences in a row, 3+2,5.")] = None,
    batch: Annotated[Path | None, Option("A saved batch: .pt with a dict of tensors, .safetensors or .npz.")] = None,
    mask: Annotated[Path | None, Option("A saved mask alone: .pt, .npy, .npz or .safetensors.")] = None,
    side: Annotated[Side, Option("Padding side of --lengths.")] = "right",
    packed: Annotated[bool, Option("One padding-free row, all sequences one after another.")] = False,
    consumer: Annotated[list[str] | None, Option("The model stack that reads the batch. Repeatable; default: none.")] = None,
    model_type: Annotated[str, Option("Whose layers decide about attention_mask_2d.")] = "qwen3_next",
    cp: Annotated[int | None, Option("Context parallel size: draw what each rank holds.", least=2, most=1024)] = None,
    layout: Annotated[str, Option("How ranks share a row: zigzag, contiguous ...")] = "zigzag",
    out: Annotated[Path | None, Option("Write a page too: .html.")] = None,
) -> int:
    """Draw a batch: its rows and masks, what each consumer and each rank gets of it, and why.

    A refused mask is drawn too; the exit code is then 1. Wide masks are folded.

    Examples:
    `collate-npu show --lengths 3,5 --side left`
    `collate-npu show --lengths 3+2,5 --consumer megatron --consumer transformers --model-type qwen3`
    `collate-npu show --batch batch.pt` — the batch of a run that went wrong
    `collate-npu show --lengths 6,8 --cp 2 --layout zigzag` — which tokens each rank gets
    """
    load("torch", "rich")
    from collate_npu.parallel import ContextParallel
    from collate_npu.tools import files, show
    from collate_npu.tools.describe import describe
    from collate_npu.tools.terminal import html_of, picture_text, put, screen

    named = [name for name, value in {"--lengths": lengths, "--batch": batch, "--mask": mask}.items() if value is not None]
    if len(named) != 1:
        rule = "One thing is shown: --lengths, --batch or --mask."
        raise CollateError(explain("input", " and ".join(named) or "none", rule, "Name one of them."))
    if out is not None:
        files.check_place(out, ".html")
    if mask is not None:
        words = str(show.picture(files.mask_of_file(mask)))
    else:
        shown = files.batch_of_file(batch) if batch else show.batch_of_lengths(str(lengths), side=side, packed=packed)
        ranks = None if cp is None else ContextParallel(cp, 0, layout=layout)  # type: ignore[arg-type]
        ranks = ranks.for_documents() if ranks is not None and packed else ranks
        views = show.views_of(shown, consumer or [], ranks, model_type=model_type, padding_free=packed)
        words = f"{describe(shown)}\n\n{views}"
    if out is not None:
        out.write_text(html_of("collate-npu show", picture_text(words)), encoding="utf-8")
    with pipe_may_close():
        put(screen(), picture_text(words))
    return int("padding: not known" in words or "\nrefused: " in f"\n{words}")


def guide_command(
    name: Annotated[
        list[str] | None, Option("A page, page#section, words, or an error; default: the first page.", ("name",))
    ] = None,
) -> int:
    """Read the guide: what to do for each trainer, which mask a stack reads, what a message means.

    Examples:
    `collate-npu guide` — the first page, which names the others
    `collate-npu guide ms-swift`
    `collate-npu guide verl#measured` — which model is right on this stack, as measured
    `collate-npu guide errors#polarity`
    `collate-npu guide masked_select` — the words of an error
    `collate-npu guide zh/index`
    """
    return _print_page(read_page(" ".join(name or ["index"])))


def _print_page(text: str) -> int:
    with pipe_may_close():
        if find_spec("rich"):
            from collate_npu.tools.terminal import Page, screen

            if screen().is_terminal:
                screen().print(Page(text))
                return 0
        print(text, end="", flush=True)
    return 0


def env_command(as_json: Annotated[bool, Option("Print the same as JSON.", ("--json",))] = False) -> int:
    """What is installed and set, whether torch and torch_npu load, and known hazards; made for pasting into an issue.

    Also where torch or rich do not load: `python -m collate_npu env`.
    """
    from collate_npu.tools.env import report

    with pipe_may_close():
        print(report(as_json=as_json), flush=True)
    return 0


COMMANDS = (
    audit_command, conformance_command, watch_command, show_command, env_command,
    guide_command,
)  # fmt: skip


def parsers() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the whole command line, and that of each command by its name."""
    from collate_npu import __version__

    how: Any = {"formatter_class": Help, "allow_abbrev": False}
    whole = Parser(
        "collate-npu", description="Batches whose padding means the same to every layer, kernel and trainer.", **how
    )
    whole.add_argument("--version", action="version", version=f"%(prog)s {__version__}", help="Print the version and end.")
    adding = whole.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        words, _, examples = str(inspect.getdoc(command)).partition("\n\nExamples:\n")
        how["epilog"] = f"Examples:\n{examples}" if examples else None
        name = command.__name__.removesuffix("_command")
        adding.add_parser(name, help=words.partition("\n")[0], description=words, **how).add_command(command)
    return whole, adding.choices


def run_command_line(args: Sequence[str]) -> int:
    """Run a command, and return its exit code; where it is refused or fails, a line on stderr says why.

    Raises `SystemExit` for help, the version and what is typed wrongly.
    """
    whole, _ = parsers()
    if not args:
        whole.print_help()
        return 2
    found, unknown = whole.parse_known_args(args)
    options = vars(found)
    parser = options.pop("parser")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    # the commands hand the neutral form to an adapter or to the reader's eyes, never to a model
    warnings.filterwarnings("ignore", message="collate_npu: this batch has a 4D")
    code = 2
    try:
        return int(options.pop("called")(**options))
    except KeyboardInterrupt:  # before there was anything to report
        code, message = 130, "INTERRUPTED: nothing was measured."
    except CollateError as error:
        message = str(error)
    except BaseException as error:  # a fault, here or elsewhere: the code must say neither pass nor fail
        message = describe_error(error)
    print(printable(f"collate-npu: {message}"), file=sys.stderr, flush=True)
    return code
