"""The command line: `collate-npu audit`. Tables and progress bars by rich, arguments by typer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from collate_npu.errors import CollateError, explain
from collate_npu.tools.audit import OTHERS, OURS, TOLERANCE, Finding, as_json, audit, read_text, sample_ids, shipped_text
from collate_npu.tools.report import passes, print_findings

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False)


class Sides(str, Enum):
    """Which padding to audit."""

    both = "both"
    left = "left"
    right = "right"


class Attention(str, Enum):
    """Which attention implementation to audit."""

    both = "both"
    sdpa = "sdpa"
    eager = "eager"


@app.callback()
def _root() -> None:
    """Batches whose padding means the same to every layer, kernel and trainer."""


@app.command("env")
def env_command() -> None:
    """What is installed, which kernels it can run, and known hazards; made for pasting into an issue."""
    from collate_npu.tools.env import environment

    found = environment()
    lines = [f"- {name}: {value}" for name, value in found.packages.items()]
    lines += [f"- {name}={value}" for name, value in found.settings.items()]
    lines = [f"- system: {found.system}", *lines, f"- devices: {found.devices}", f"- NPU: {found.npu}"]
    typer.echo("\n".join([*lines, *(f"- hazard: {text}" for text in found.hazards)]))


@app.command(
    "show",
    epilog="Examples:\n\n`collate-npu show --lengths 3,5 --left`\n\n"
    "`collate-npu show --lengths 3+2,5 --consumer megatron --model-type qwen3`",
)
def show_command(
    lengths: Annotated[str, typer.Option(help="Tokens of each row, 3,5; several sequences in a row, 3+2,5.")],
    left: Annotated[bool, typer.Option("--left/--right", help="Padding side.")] = False,
    consumer: Annotated[str, typer.Option(help="Who reads the batch; default: the neutral form.")] = "",
    model_type: Annotated[str, typer.Option(help="Whose layers decide about attention_mask_2d.")] = "qwen3_next",
) -> None:
    """Draw the masks of a batch, and say why they are what they are."""
    from collate_npu import BatchAdapter, PaddingCollator
    from collate_npu.tools.show import describe, picture

    console = Console()
    try:
        rows = [[int(n) for n in row.split("+")] for row in lengths.split(",")]
        features = [{"input_ids": [1] * sum(row), "seq_lengths": row} for row in rows]
        batch = PaddingCollator(pad_token_id=0, padding_side="left" if left else "right")(features)
        if consumer:
            batch = BatchAdapter(model_type=model_type, consumer=consumer)(batch)
        console.print(f"{picture(batch)}\n\n{describe(batch)}", highlight=False, markup=False)
    except ValueError as error:
        console.print(f"{error}", style="red", highlight=False, markup=False)
        raise typer.Exit(2) from None


@app.command(
    "audit",
    epilog="Examples:\n\n"
    "`collate-npu audit` — every hybrid family of the installed transformers, tiny and random\n\n"
    "`collate-npu audit --model qwen3_5 --side left` — one family\n\n"
    "`collate-npu audit --model ./checkpoint --data my.jsonl --dtype bfloat16 --tolerance 0.1` — your own",
)
def audit_command(
    model: Annotated[
        Optional[list[str]],  # noqa: UP045 (typer reads it at run time on Python 3.10)
        typer.Option(
            help="A model type (tiny, random) or the folder of a local checkpoint. Repeatable; default: all hybrids."
        ),
    ] = None,
    data: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Text, one sample a line, or .jsonl with a text field. Default: text shipped in the package."),
    ] = None,
    tokenizer: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Folder of a tokenizer. Default: the checkpoint's own, or bytes for tiny models."),
    ] = None,
    side: Annotated[Sides, typer.Option(help="Padding side.")] = Sides.both,
    attn: Annotated[Attention, typer.Option(help="Attention implementation.")] = Attention.both,
    device: Annotated[str, typer.Option(help="cpu, cuda, npu, or any torch device.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in a batch.")] = 4,
    batches: Annotated[int, typer.Option(min=1, help="Batches per model and side.")] = 2,
    max_length: Annotated[int, typer.Option(min=2, help="Longest sample, in tokens.")] = 96,
    gradients: Annotated[bool, typer.Option(help="Compare gradients too.")] = True,
    tolerance: Annotated[float, typer.Option(help="Largest error of ours that passes.")] = TOLERANCE,
    seed: Annotated[int, typer.Option(help="Which lines are drawn, and the random weights.")] = 0,
    as_json_: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Does a padded batch give the same numbers as each sample alone?

    For each model, attention and padding side: the largest difference of a logit at a real token, and of the gradient,
    when the batch is handed over by this library, and when it is handed over as elsewhere. Exit code 1 if ours fails.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    console = Console(stderr=as_json_)
    settings = {
        "device": device, "dtype": dtype, "batch_size": batch_size, "batches": batches, "max_length": max_length,
        "tolerance": tolerance, "seed": seed, "data": str(data or "shipped with the package"), **_versions(),
    }  # fmt: skip
    try:
        subjects, left_out = _subjects(model, attn, tokenizer, device, dtype, seed)
        text = read_text(data) if data else shipped_text()
        drawn = {"count": batch_size * batches, "max_length": max_length, "seed": seed}
        sides = ["left", "right"] if side is Sides.both else [side.value]
        how = {"sides": sides, "batch_size": batch_size, "gradients": gradients}
        findings = _run(subjects, text, drawn, how, console, left_out)
    except CollateError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        raise typer.Exit(2) from None
    if as_json_:
        typer.echo(json.dumps(as_json(findings, left_out, settings), indent=2, ensure_ascii=False))
    else:
        print_findings(console, findings, left_out, settings, tolerance)
    ours = [finding for finding in findings if finding.ours]
    raise typer.Exit(0 if passes(ours, tolerance) else 1)


# --- running


class _Subject:
    """A model that is built only when its turn comes, and its tokenizer."""

    def __init__(self, name: str, attn: str, tokenizer: Path | None, device: str, dtype: str, seed: int) -> None:
        self.name, self.attn = name, attn
        self._tokenizer, self._device, self._dtype, self._seed = tokenizer, device, dtype, seed

    def build(self) -> tuple[Any, Any]:
        import torch

        from collate_npu.testing import byte_tokenizer, tiny_model

        dtype = getattr(torch, self._dtype)
        local = Path(self.name).is_dir()
        where = self._tokenizer or (Path(self.name) if local else None)
        tokenizer = _load_tokenizer(where) if where else byte_tokenizer()
        if local:
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(self.name, attn_implementation=self.attn, dtype=dtype)
        else:
            model = tiny_model(
                self.name, vocab_size=len(tokenizer), attn_implementation=self.attn, seed=self._seed, dtype=dtype
            )
        _check_device(self._device)
        return model.to(self._device), tokenizer

    def audit(self, text: list[str], drawn: dict[str, int], how: dict[str, Any]) -> Iterator[Finding]:
        model, tokenizer = self.build()
        samples = sample_ids(text, tokenizer, **drawn)
        yield from audit(model, samples, name=self.name, pad_token_id=tokenizer.pad_token_id, **how)


def _check_device(device: str) -> None:
    """A pretended device (CANN stand-ins) returns zeros: every case would pass there, and prove nothing."""
    import torch

    if device.startswith("npu"):
        import torch_npu  # noqa: F401
    if not torch.equal((torch.ones(3, device=device) + 1).cpu(), torch.full((3,), 2.0)):
        rule = "One and one is not two there: it is a stand-in, and an audit on it would prove nothing."
        raise CollateError(explain("--device", device, rule, "Run on a real device."))


def _load_tokenizer(where: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(where))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _subjects(
    names: list[str] | None, attn: Attention, tokenizer: Path | None, device: str, dtype: str, seed: int
) -> tuple[list[_Subject], dict[str, str]]:
    from collate_npu.testing import hybrid_model_types, left_out

    attentions = ["sdpa", "eager"] if attn is Attention.both else [attn.value]
    excluded = {} if names else {(name, a): why for a in attentions for name, why in left_out(a).items()}
    chosen = [(name, a) for name in names or hybrid_model_types() for a in attentions if (name, a) not in excluded]
    told = {f"{name} ({a})": why for (name, a), why in excluded.items()}
    return [_Subject(name, a, tokenizer, device, dtype, seed) for name, a in chosen], told


def _run(
    subjects: list[_Subject],
    text: list[str],
    drawn: dict[str, int],
    how: dict[str, Any],
    console: Console,
    left_out: dict[str, str],
) -> list[Finding]:
    findings: list[Finding] = []
    columns = [*OURS, *OTHERS]
    layout = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*layout, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(subjects) * len(how["sides"]) * len(columns))
        for subject in subjects:
            progress.update(task, description=f"{subject.name} ({subject.attn})")
            done = 0
            try:
                for finding in subject.audit(text, drawn, how):
                    findings.append(finding)
                    progress.advance(task)
                    done += 1
            except CollateError:
                raise
            except Exception as error:  # it does not build, or does not run alone: left out, and why is in the report
                left_out[f"{subject.name} ({subject.attn})"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                progress.advance(task, len(how["sides"]) * len(columns) - done)
    return findings


def _versions() -> dict[str, str]:
    import torch
    import transformers

    from collate_npu import __version__

    return {"collate_npu": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
