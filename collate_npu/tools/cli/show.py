"""`collate-npu show`."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console
from rich.text import Text

from collate_npu.errors import CollateError, explain
from collate_npu.tools.cli.console import Side, needs

if TYPE_CHECKING:
    from collate_npu.parallel import ContextParallel
    from collate_npu.tools.show.sheet import Panel, Sheet

EXAMPLES = (
    "Examples:\n\n`collate-npu show --lengths 3,5 --side left`\n\n"
    "`collate-npu show --lengths 3+2,5 --consumer megatron --consumer transformers --model-type qwen3`\n\n"
    "`collate-npu show --batch batch.pt --tokenizer ./checkpoint` — the batch of a run that went wrong\n\n"
    "`collate-npu show --data my.jsonl --tokenizer ./checkpoint --out batch.html`\n\n"
    "`collate-npu show --lengths 6,8 --cp 2 --layout zigzag` — which tokens each rank gets"
)


@needs("torch")
def show_command(
    lengths: Annotated[
        Optional[str],  # noqa: UP045 (typer reads it at run time on Python 3.10)
        typer.Option(help="Tokens of each row, 3,5; several sequences in a row, 3+2,5."),
    ] = None,
    batch: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A saved batch: .pt with a dict of tensors, .safetensors or .npz."),
    ] = None,
    data: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="As in audit: .txt, .jsonl, .json, .parquet, .csv or -; its first batch."),
    ] = None,
    mask: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A saved mask alone: .pt, .npy, .npz or .safetensors."),
    ] = None,
    tokenizer: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Folder of a tokenizer, to name the tokens. Default: bytes for --data, none for --batch."),
    ] = None,
    side: Annotated[Side, typer.Option(help="Padding side, of --lengths and --data.")] = Side.right,
    packed: Annotated[bool, typer.Option("--packed", help="One flat row, all samples one after another.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Lines of --data in the batch.")] = 4,
    max_length: Annotated[int, typer.Option(min=2, help="Longest line of --data, in tokens.")] = 96,
    row: Annotated[Optional[int], typer.Option(min=0, help="Squares of this row alone.")] = None,  # noqa: UP045
    consumer: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Who reads the batch. Repeatable, side by side; default: the neutral form alone."),
    ] = None,
    model_type: Annotated[str, typer.Option(help="Whose layers decide about attention_mask_2d.")] = "qwen3_next",
    cp: Annotated[Optional[int], typer.Option(min=2, help="What each of so many ranks holds.")] = None,  # noqa: UP045
    layout: Annotated[
        str, typer.Option(help="How ranks share a row: zigzag, contiguous, ulysses, ulysses_ring; document_zigzag ...")
    ] = "zigzag",
    ulysses: Annotated[int, typer.Option(min=1, help="Ulysses ranks in a ring, with ulysses_ring.")] = 1,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write a figure too: .png, .svg or .html."),
    ] = None,
) -> None:
    """Draw a batch: its rows, tokens, labels and masks, what each consumer and each rank gets of it, and why.

    A mask that is refused is drawn all the same, with the places that speak against it. What is wide is folded by blocks.
    """
    from collate_npu.tools.describe import describe
    from collate_npu.tools.saved import mask_of_file
    from collate_npu.tools.show.saving import check_out
    from collate_npu.tools.show.sheet import sheet_of

    _exactly_one(lengths=lengths, batch=batch, data=data, mask=mask)
    if out is not None:
        check_out(out)
    ranks = None if cp is None else _ranks(cp, layout, ulysses, packed)
    if mask is not None:
        return _print(sheet_of(mask_of_file(mask), row=row), "", out)
    shown, reader = _batch(lengths, batch, data, tokenizer, side, packed, batch_size, max_length, ranks)
    panels = _asked(shown, consumer or [], model_type, packed, ranks)
    sheet = sheet_of(shown, row=row, tokenizer=reader)
    kept = sheet.panels if not panels else tuple(p for p in sheet.panels if not (p.derived and p.squares))
    return _print(replace(sheet, panels=(*kept, *panels)), describe(shown), out)


def _exactly_one(**inputs: Any) -> None:
    given = [f"--{name}" for name, value in inputs.items() if value is not None]
    if len(given) != 1:
        rule = "One thing is shown: --lengths, --batch, --data or --mask."
        raise CollateError(explain("input", " and ".join(given) or "none", rule, "Name one of them."))


def _ranks(size: int, layout: Any, ulysses: int, packed: bool) -> ContextParallel:
    from collate_npu.parallel import ContextParallel

    ranks = ContextParallel(size, 0, layout=layout, ulysses=ulysses)
    return ranks.for_documents() if packed else ranks


def _batch(
    lengths: str | None, batch: Path | None, data: Path | None, tokenizer: Path | None,
    side: Side, packed: bool, batch_size: int, max_length: int, ranks: ContextParallel | None,
) -> tuple[dict[str, Any], Any]:  # fmt: skip
    """The batch, and what reads its tokens."""
    from collate_npu.tools.saved import batch_of_file
    from collate_npu.tools.show import inputs

    how: dict[str, Any] = {"side": side.value, "packed": packed, "context_parallel": ranks}
    if lengths is not None:
        return inputs.batch_of_lengths(lengths, inputs.collator_of(**how)), None
    reader = None
    if tokenizer is not None:
        from collate_npu.tools.audit.candidates import load_tokenizer

        reader = load_tokenizer(tokenizer)
    if batch is not None:
        return batch_of_file(batch), reader
    from collate_npu.testing import byte_tokenizer
    from collate_npu.tools.audit.data import read_rows

    reader = reader or byte_tokenizer()
    collate = inputs.collator_of(**how, tokenizer=reader)
    return inputs.batch_of_rows(read_rows(Path(str(data)))[:batch_size], reader, collate, max_length=max_length), reader


def _asked(
    batch: dict[str, Any], consumers: list[str], model_type: str, packed: bool, ranks: ContextParallel | None
) -> list[Panel]:
    """The views of consumers and of ranks."""
    from collate_npu.tools.show.readers import consumer_panels, rank_panels

    if consumers and find_spec("transformers") is None:
        rule = "What a consumer is given depends on the layers of --model-type, which transformers knows."
        raise CollateError(explain("--consumer", "no transformers", rule, "Run pip install transformers, or leave it out."))
    how: dict[str, Any] = {"model_type": model_type, "padding_free": packed, "context_parallel": ranks}
    panels = [panel for name in consumers for panel in consumer_panels(batch, name, **how)]
    return panels if ranks is None else [*panels, *rank_panels(batch, ranks)]


def _print(sheet: Sheet, words: str, out: Path | None) -> None:
    """The words, then the picture, which is what stays on the screen; signs of ASCII where there are no others."""
    from collate_npu.tools.show.signs import ASCII, printable
    from collate_npu.tools.show.text import encodable, lines

    console = Console()
    height = console.height if console.is_terminal else 40
    if out is not None:
        from collate_npu.tools.show.saving import save

        save(sheet, out)
    plain = not printable(console.encoding)
    drawn = lines(encodable(sheet, console.encoding) if plain else sheet, console.width, height)
    if words:
        said = words.encode(console.encoding, "backslashreplace").decode(console.encoding)
        console.print(f"{said}\n", highlight=False, markup=False)
    for line in drawn:
        parts = [(text.translate(ASCII) if plain else text, style) for text, style in line]
        console.print(Text.assemble(*parts), no_wrap=True, overflow="crop")
    if out is not None:
        console.print(f"written: {out}", highlight=False, markup=False)
