"""`collate-npu show`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from collate_npu.errors import CollateError, explain
from collate_npu.tools.cli.console import Side, needs

EXAMPLES = (
    "Examples:\n\n`collate-npu show --lengths 3,5 --side left`\n\n"
    "`collate-npu show --lengths 3+2,5 --consumer megatron --model-type qwen3`"
)


@needs("torch")
def show_command(
    lengths: Annotated[str, typer.Option(help="Tokens of each row, 3,5; several sequences in a row, 3+2,5.")],
    side: Annotated[Side, typer.Option(help="Padding side.")] = Side.right,
    consumer: Annotated[str, typer.Option(help="Who reads the batch; default: the neutral form.")] = "",
    model_type: Annotated[str, typer.Option(help="Whose layers decide about attention_mask_2d.")] = "qwen3_next",
) -> None:
    """Draw the masks of a batch, and say why they are what they are."""
    from collate_npu import BatchAdapter, PaddingCollator
    from collate_npu.consumers.consumer import consumer_named
    from collate_npu.tools.describe import describe
    from collate_npu.tools.show.pictures import picture

    try:
        rows = [[int(n) for n in row.split("+")] for row in lengths.split(",")]
    except ValueError:
        raise CollateError(explain("--lengths", lengths, "Lengths are whole numbers.", "Write 3,5 or 3+2,5.")) from None
    features = [{"input_ids": [1] * sum(row), "seq_lengths": row} for row in rows]
    batch = PaddingCollator(pad_token_id=0, padding_side=side.value)(features)
    if consumer:
        batch = BatchAdapter(model_type=model_type, consumer=consumer_named(consumer))(batch)
    Console().print(f"{picture(batch)}\n\n{describe(batch)}", highlight=False, markup=False)
