"""Rules of context parallelism: what a rank must hold so that states and the convolution's halo reach it.

| ranks        | a rank holds                 | divisible             | who                               |
|--------------|------------------------------|-----------------------|-----------------------------------|
| `state`      | a contiguous slice           | the row, by cp        | fla `build_cp_context`, verl      |
| `whole row`  | the row, a share of heads    | the row, by cp        | kernels behind a head all-to-all  |
| `zigzag row` | 2 pieces of the row          | the row, by 2cp       | MindSpeed-LLM FSDP2               |
| `documents`  | 2 pieces of each sequence    | each sequence, by 2cp | Megatron, MindSpeed, mcore-bridge |

T and the boundaries are those of the whole row, for `documents` padded ones.
Sources: fla 0.5.2 ops/cp/context.py:60-91; Megatron-LM d98e8a6
ssm/gated_delta_net/common.py:487, 586-618; prime-rl #3002; mcore-bridge #162.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from collate_npu.kernels.breach import Breach
from collate_npu.kernels.gated_delta.fla_rules import taps
from collate_npu.kernels.gated_delta.operator_call import Call
from collate_npu.parallel.recurrent import same_tokens

_CONTIGUOUS = ("contiguous", "ulysses")
_ZIGZAG = ("zigzag", "document_zigzag")


def breaches(call: Call) -> Iterator[Breach]:
    """What is wrong with the way ranks share the row, if they share one."""
    cp = call.context_parallel
    if cp is None or cp.size == 1:
        return
    kind = "state" if "cp_context" in call.arguments else call.operator.ranks
    if kind == "never":
        says, remedy = f"{call.operator.name} has no context parallelism.", "Use one rank a row."
        yield call.breach("ranks", "context_parallel", f"{cp.size} ranks", says, remedy)
    elif kind == "documents":
        yield from _documents(call)
    elif kind == "zigzag row":
        yield from _layout(call, ("zigzag",))
        yield from _total(call, 2 * cp.size, "ranks-pieces")
    else:
        yield from _layout(call, ("ulysses",) if kind == "whole row" else _CONTIGUOUS)
        yield from _total(call, cp.size, "ranks-total")
        if kind == "state" and call.T // cp.size < taps(call) - 1:
            says = f"The convolution reads {taps(call) - 1} tokens back, and asks the rank before it alone."
            got, remedy = f"{call.T} tokens on {cp.size} ranks", f"Pad the row to {cp.size * (taps(call) - 1)} or more."
            yield call.breach("ranks-halo", "T", got, says, remedy, silent=True)


def _layout(call: Call, taken: tuple[str, ...]) -> Iterator[Breach]:
    cp = call.context_parallel
    assert cp is not None
    slices = replace(cp, layout="contiguous", ulysses=1)
    if cp.layout not in taken and not ("contiguous" in taken and same_tokens(cp, slices, len(call.lengths))):
        what = "slices that follow one another" if "contiguous" in taken else "the whole row behind a head all-to-all"
        what = "two pieces of each sequence, zigzag" if "zigzag" in taken else what
        says = f"The layer expects {what} on a rank; with others states and the convolution run over wrong neighbours."
        remedy = f"Use ContextParallel(..., layout={taken[-1]!r})."
        if taken == ("ulysses",):
            remedy += " Or pass states between contiguous slices: kernel='fla_cp'."
        yield call.breach("layout", "context_parallel", f"layout {cp.layout!r}", says, remedy, silent=True)


def _total(call: Call, multiple: int, rule: str) -> Iterator[Breach]:
    if call.T % multiple:
        to = -(-call.T // multiple) * multiple
        says, remedy = f"The row is a multiple of {multiple} tokens.", f"Pad it to {to}, the tail a sequence of its own."
        yield call.breach(rule, "T", f"{call.T} tokens on {call.ranks} ranks", says, remedy)


def _documents(call: Call) -> Iterator[Breach]:
    yield from _layout(call, _ZIGZAG if call.where else ("zigzag",))
    multiple = 2 * call.ranks
    if not call.where:
        yield from _total(call, multiple, "ranks-pieces")
        return
    odd = [(n, length) for n, length in enumerate(call.lengths) if length % multiple]
    if odd:
        checked = any(length % call.ranks for _, length in odd) and "ranks" in call.operator.checks
        got = ", ".join(f"sequence {n} of {length}" for n, length in odd[:8])
        says = f"Each sequence is cut into {multiple} equal pieces; the check asks for a multiple of {call.ranks} at most."
        remedy = f"pad_documents(batch, cp) pads each to a multiple of {multiple}, with padded and actual offsets."
        yield call.breach("ranks-pieces", call.where, got, says, remedy, silent=not checked)
