"""`collate-npu conformance`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any

from collate_npu.tools.cli.console import Option, load

if TYPE_CHECKING:
    from rich.table import Table

    from collate_npu.proof.conformance import Conformance

EXAMPLES = (
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
    from collate_npu.tools.named import named
    from collate_npu.tools.paper import put, screen

    asked = _at_home(run, named("run", run, "my_stack.py:run", "Name a function of samples."))
    found = conformance(asked, vocab_size=vocab_size, pad_token_id=pad_id, layouts=layout or None, seed=seed)
    sign, style = ("✔", "green") if found.passed else ("✘", "red")
    put(
        screen(),
        Text(f"{sign} {found.headline}", f"bold {style}"),
        Text(found.terms, "dim"),
        Text(),
        _table(found),
        Text(f"\n{found.legend}", "dim"),
    )
    return 0 if found.passed else 1


def _at_home(spec: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, which finds the modules beside it as when it was imported."""
    from collate_npu.tools.named import theirs

    if isinstance(run, type):  # said of itself: what wraps it is a function
        return run

    @wraps(run)
    def asked(*args: Any, **kwargs: Any) -> Any:
        with theirs("run", spec, "It is called with samples, lists of token ids.", "Mend it there."):
            return run(*args, **kwargs)

    return asked


def _table(found: Conformance) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    head, *rows = found.table
    for n, title in enumerate(head):
        drawn.add_column(title, overflow="fold", justify="right" if n in (3, 4) else "left", no_wrap=n < 5)
    for each, cells in zip(found.verdicts, rows):
        drawn.add_row(*(Text(cell, "" if each.right else "red") for cell in cells))
    return drawn
