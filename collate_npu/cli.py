"""The command line: `collate-npu audit`. Tables and progress bars by rich, arguments by typer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Optional, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from collate_npu.audit import OTHERS, OURS, TOLERANCE, Finding, as_json, audit, read_text, sample_ids, shipped_text
from collate_npu.errors import CollateError

K = TypeVar("K")

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
        _print(console, findings, left_out, settings, tolerance)
    ours = [finding for finding in findings if finding.ours]
    raise typer.Exit(0 if _passes(ours, tolerance) else 1)


def _passes(ours: Sequence[Finding], tolerance: float) -> bool:
    return any(f.logits is not None for f in ours) and all(f.within(tolerance) for f in ours)


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
        return model.to(self._device), tokenizer

    def audit(self, text: list[str], drawn: dict[str, int], how: dict[str, Any]) -> Iterator[Finding]:
        model, tokenizer = self.build()
        samples = sample_ids(text, tokenizer, **drawn)
        yield from audit(model, samples, name=self.name, pad_token_id=tokenizer.pad_token_id, **how)


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


# --- printing


def _print(
    console: Console, findings: Sequence[Finding], left_out: Mapping[str, str], settings: Mapping[str, Any], tolerance: float
) -> None:
    for title, measure in (("largest difference of a logit", "logits"), ("relative error of the gradient", "gradient")):
        if any(getattr(finding, measure) is not None for finding in findings):
            console.print(_table(findings, measure, title, tolerance))
    for (column, note), names in _grouped(((f.column, f.note), f.model) for f in findings if f.note).items():
        what = "refused" if any(f.refused for f in findings if f.note == note) else "raises"
        console.print(Text(f"{what}: {column} on {', '.join(names)}: {note}", style="dim"))
    for why, names in _grouped((why, name) for name, why in left_out.items()).items():
        console.print(Text(f"left out: {', '.join(names)}: {why}", style="dim"))
    console.print(_verdict(findings, tolerance, settings))


def _grouped(pairs: Iterable[tuple[K, str]]) -> dict[K, list[str]]:
    groups: dict[K, dict[str, None]] = {}
    for key, name in pairs:
        groups.setdefault(key, {})[name] = None
    return {key: list(names) for key, names in groups.items()}


def _table(findings: Sequence[Finding], measure: str, title: str, tolerance: float) -> Table:
    table = Table(title=f"Padded batch against each sample alone: {title}", title_justify="left", header_style="bold")
    for name in ("model", "attention", "padding"):
        table.add_column(name, no_wrap=True)
    for column in (*OURS, *OTHERS):
        table.add_column(column, justify="right", header_style="green" if column in OURS else "yellow")
    last = ""
    for (name, attn, side), row in _rows(findings):
        if last and name != last:
            table.add_section()
        cells = [_cell(row.get(column), measure, tolerance) for column in (*OURS, *OTHERS)]
        table.add_row(name if name != last else "", attn, side, *cells)
        last = name
    return table


def _rows(findings: Sequence[Finding]) -> Iterator[tuple[tuple[str, str, str], dict[str, Finding]]]:
    rows: dict[tuple[str, str, str], dict[str, Finding]] = {}
    for f in findings:
        rows.setdefault((f.model, f.attn_implementation, f.side), {})[f.column] = f
    yield from rows.items()


def _cell(finding: Finding | None, measure: str, tolerance: float) -> Text:
    if finding is None:
        return Text("")
    error = getattr(finding, measure)
    if error is None:
        return Text("refused" if finding.refused else "raises" if finding.note else "-", style="dim")
    wrong = not error <= tolerance
    return Text(f"{error:.1e}" if error < 0.01 else f"{error:.2f}", style="bold red" if wrong else "green")


def _verdict(findings: Sequence[Finding], tolerance: float, settings: Mapping[str, Any]) -> Text:
    ours = [f for f in findings if f.ours and not f.refused]
    wrong = [f for f in ours if not f.within(tolerance)]
    others = [f for f in findings if not f.ours and f.logits is not None]
    astray = [f for f in others if not f.within(tolerance)]
    head = f"ours: {len(ours) - len(wrong)} of {len(ours)} cases within {tolerance:g}"
    worst = max((f.logits or 0.0 for f in ours), default=0.0)
    tail = f"elsewhere: {len(astray)} of {len(others)} wrong without an error, by up to "
    tail += f"{max((f.logits or 0.0 for f in astray), default=0.0):.2f}"
    where = f"{settings['device']}, {settings['dtype']}, torch {settings['torch']}, transformers {settings['transformers']}"
    text = Text(f"{head} (worst {worst:.1e}); {tail}.  [{where}]", style="bold")
    return text if _passes(ours, tolerance) else Text("FAILED  ", style="bold red").append_text(text)
