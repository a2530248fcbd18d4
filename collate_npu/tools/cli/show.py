"""`collate-npu show`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from collate_npu.errors import CollateError, explain
from collate_npu.tools.cli.console import Option, Side, load

if TYPE_CHECKING:
    from collate_npu.tools.show.sheet import Sheet

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
    from collate_npu.tools import saved
    from collate_npu.tools.describe import describe
    from collate_npu.tools.show.readers import (
        collated,
        consumer_panels,
        features_of_data,
        features_of_lengths,
        rank_panels,
        reader_of,
    )
    from collate_npu.tools.show.sheet import sheet_of

    _exactly_one(lengths=lengths, batch=batch, data=data, mask=mask)
    if out is not None:
        load("rich")
        from collate_npu.tools.paper import check_place

        check_place(out, ".html")
    if mask is not None:
        return _print(sheet_of(saved.mask_of_file(mask), row=row), "", out)
    ranks = None if cp is None else ContextParallel(cp, 0, layout=layout, ulysses=ulysses)  # type: ignore[arg-type]
    ranks = ranks.for_documents() if ranks is not None and packed else ranks
    how: dict[str, Any] = {"side": side, "packed": packed, "ranks": ranks}
    reader = reader_of(tokenizer, bytes_too=data is not None)
    if batch is not None:
        shown = saved.batch_of_file(batch)
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
    from collate_npu.tools.show import text_of

    if not find_spec("rich"):
        legend = "■ attends, real   ⬚ blocked, padding"
        print("\n\n".join([words, text_of(sheet), legend] if words else [text_of(sheet)]), flush=True)
        return 0
    from rich.text import Text

    from collate_npu.tools import paper
    from collate_npu.tools.show import drawing

    console = paper.screen()
    with suppress(SystemExit):  # how rich ends where nobody reads the pipe any more
        paper.put(console, *([Text(f"{words}\n")] if words else []), *drawing.lines(sheet, console.width))
    if out is not None:
        drawing.save(sheet, out)
        paper.put(console, Text(f"written: {out}"))
    return 0
