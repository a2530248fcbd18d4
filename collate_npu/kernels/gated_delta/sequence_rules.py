"""Rules of the boundaries themselves: which arguments, in which container, of which row, and their chunk tables.

Groups build on one another: the first that is broken ends the reading, because the next could not read on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from collate_npu.errors import shape_of
from collate_npu.host import host_tensor
from collate_npu.kernels.breach import Breach
from collate_npu.kernels.gated_delta.chunks import chunk_indices, cumsum_block
from collate_npu.kernels.gated_delta.operator_call import HOLDERS, Call, UnreadableError, numbers

_BOUNDARY = re.compile(
    r"seq_?lens?|cu_|seq_idx|mask|chunk_ind|start_loc|seq_length|segment_id|position_id|total_tokens|qkv_format"
)
"""Argument names that look like boundaries, tables or masks."""
UNREADABLE = frozenset({"container", "count", "falling"})
"""Rules without which no other can read the boundaries."""
FLA_EMPTIES = "0.5.1"
"""From this release on fla's chunk builder counts empty sequences (#909)."""


def breaches(call: Call) -> Iterator[Breach]:
    for group in (_arguments, _containers, _sequences, _tables):
        found = list(group(call))
        yield from found
        if found and group is not _arguments:
            return


# --- names


def _arguments(call: Call) -> Iterator[Breach]:
    row = call.operator
    known = {*row.offsets, *row.copies, *row.tables, *row.reads, row.numbers}
    for name, value in call.arguments.items():
        if name not in known and name not in HOLDERS and _BOUNDARY.search(name) and not name.startswith("max_"):
            takes = ", ".join(filter(None, (*row.offsets, row.numbers, *sorted(row.reads)))) or "no boundaries"
            says = f"{row.name} does not read it, and where keywords are filtered nobody says so; it takes {takes}."
            yield call.breach("unread", name, _short(value), says, f"Leave {name} out; " + _remedy(call))
    if not call.where:
        yield from _without_boundaries(call)
    elif missing := [name for name in row.needs if not _has_table(call, name) and name != "a host copy"]:
        says = "It takes boundaries only together with their chunk tables."
        yield call.breach("missing", ", ".join(sorted(missing)), "nothing", says)
    elif "a host copy" in row.needs and not any(name in call.arguments for name in row.copies):
        says, remedy = (
            "It sizes its launches by a copy of the offsets on the host.",
            "Build it with include_host_offsets=True.",
        )
        yield call.breach("missing", " or ".join(row.copies), "nothing", says, remedy)


def _has_table(call: Call, name: str) -> bool:
    tables = call.operator.tables
    return any(other in call.arguments for other in tables if tables[other] == tables.get(name)) or name in call.arguments


def _without_boundaries(call: Call) -> Iterator[Breach]:
    row = call.operator
    for name in (*row.tables, *row.copies):
        if name in call.arguments and "cp_context" not in call.arguments:
            says = "A table or a copy belongs to offsets, and without them nothing keeps sequences apart."
            yield call.breach("alone", name, _short(call.get(name)), says, silent="missing" not in row.checks)
    if row.offsets and row.offsets[0] in row.needs:
        yield call.breach("missing", row.offsets[0], "nothing", "The operator takes no call without it.")


def _remedy(call: Call) -> str:
    return f"take the boundaries from gated_delta_kwargs(segments, kernel={call.operator.kernel!r})."


# --- containers


def _containers(call: Call) -> Iterator[Breach]:
    read: dict[str, Callable[[], Any]] = {call.where: lambda: call.given, call.operator.numbers: lambda: call.numbers_BT}
    if call.where.endswith("_padded") and "cu_seqlens_q" in call.arguments:
        read["cu_seqlens_q"] = lambda: numbers(call, "cu_seqlens_q", host=False)
    unreadable = {name: got for name, reader in read.items() if name and (got := _unreadable(reader))}
    for name, got in unreadable.items():
        yield call.breach("container", name, got, "The operator takes no other form of the same numbers.")
    if call.where and not unreadable and len(call.offsets) < 2:
        says = "There is at least one sequence, behind the leading 0 where there is one."
        yield call.breach("count", call.where, f"{len(call.given)} entries", says)


def _unreadable(read: Any) -> str:
    try:
        read()
    except UnreadableError as error:
        return str(error)
    return ""


# --- the sequences


def _sequences(call: Call) -> Iterator[Breach]:
    yield from _numbers(call)
    if not call.where:
        return
    offsets, lengths, where, got = call.offsets, call.lengths, call.where, str(list(call.given[:12]))
    if offsets[0] != 0:
        yield call.breach("first", where, got, _first_says(call))
    if any(length < 0 for length in lengths):
        yield call.breach("falling", where, got, "No sequence ends before it begins.")
        return
    if offsets[-1] != call.total:
        below = offsets[-1] < call.total
        says = f"The call has {call.total} tokens, and what no sequence covers stays unwritten memory: NaN in gradients."
        says = says if below else f"The call has {call.total} tokens, and what lies behind them is somebody else's memory."
        remedy = (
            "Count the tail as one more sequence: " + _remedy(call) if below else "Take the offsets from this very batch."
        )
        checked = {"last"} if below else {"last", "above"}
        yield call.breach("last", where, got, says + _guess(call), remedy, silent=not checked & call.operator.checks)
    yield from _empties(call)
    yield from _rows(call)
    yield from _limits(call)


def _first_says(call: Call) -> str:
    if call.operator.form == "prefix and lengths":
        return "The first entry counts tokens before the first sequence and is 0; lengths follow it." + _guess(call)
    return "Offsets begin with 0." + _guess(call)


def _guess(call: Call) -> str:
    """What the same numbers would mean in another spelling."""
    given, total, form = call.given, call.total, call.operator.form
    for name, right in (
        ("lengths", sum(given) == total and form != "lengths"),
        ("ends without the leading 0", given[-1] == total and given[0] != 0 and form == "offsets"),
        ("offsets", given[0] == 0 and given[-1] == total and form != "offsets"),
        ("a first entry and lengths", given[0] == 0 and sum(given) == total and form == "offsets"),
    ):
        if right:
            return f" They look like {name}."
    return ""


def _empties(call: Call) -> Iterator[Breach]:
    empty = [n for n, length in enumerate(call.lengths) if length == 0]
    if not empty:
        return
    kind, got = call.operator.empties, f"{list(call.given[:12])}: sequence {', '.join(map(str, empty[:8]))} is empty"
    inner = empty[0] < len(call.lengths) - len(empty)
    old = kind == "fla" and call.releases.before("fla", FLA_EMPTIES) and inner
    if kind == "never" or old:
        says = "An empty sequence makes chunk tables name the wrong one, or has no last token."
        says += (
            f" fla {call.releases.text('fla')} counts the others alone, since {FLA_EMPTIES} it does not (#909)."
            if old
            else ""
        )
        yield call.breach("empty", call.where, got, says, "Drop empty sequences: " + _remedy(call))


def _rows(call: Call) -> Iterator[Breach]:
    if call.B == 1 or call.operator.folds or (call.total == call.B * call.T and call.word("backend", "triton") == "triton"):
        return
    says = "Offsets are of one flat row." + (
        " The convolution's weight gradient is summed over memory nobody wrote."
        if "conv" in call.operator.name.lower()
        else ""
    )
    yield call.breach("rows", "B", f"{call.B} rows with {call.where}", says, "unpad() the batch to [1, T] first.")


def _limits(call: Call) -> Iterator[Breach]:
    row = call.operator
    count = sum(length > 0 for length in call.lengths) if row.empties != "legal" else len(call.lengths)
    if row.most_sequences and count > row.most_sequences:
        says, remedy = f"It takes at most {row.most_sequences} sequences in a call.", "Pack fewer sequences into a row."
        yield call.breach("limit", call.where, f"{count} sequences", says, remedy)
    if row.longest and max(call.lengths) > row.longest:
        says, remedy = f"A sequence has 1 to {row.longest} tokens in a call of the decoding rule.", "Use the chunked rule."
        yield call.breach("length", call.where, f"{max(call.lengths)} tokens", says, remedy)


def _numbers(call: Call) -> Iterator[Breach]:
    """A number for each token, of which only equality with the neighbours counts."""
    name = call.operator.numbers
    given = call.get(name) if name else None
    if not isinstance(given, Tensor):
        return
    got = shape_of(given)
    if "numbers-dtype" in call.operator.checks and got.split()[0] != "int32":
        yield call.breach("numbers-dtype", name, got, "It is int32.", "Pass seq_idx.to(torch.int32).")
    if tuple(given.shape) != (call.B, call.T):
        remedy = "Pass it as [B, T]: seq_idx.reshape(B, T)."
        yield call.breach("numbers-shape", name, got, f"It is [{call.B}, {call.T}].", remedy)
    elif not given.is_contiguous():
        says, remedy = "It is read as contiguous memory.", "Call .contiguous()."
        yield call.breach("strides", name, f"strides {given.stride()}", says, remedy, silent=False)


# --- tables and copies


def _tables(call: Call) -> Iterator[Breach]:
    row = call.operator
    if row.chunk_sizes and call.chunk_size not in row.chunk_sizes:
        taken = ", ".join(map(str, row.chunk_sizes))
        yield call.breach("chunk-size", "chunk_size", str(call.chunk_size), f"It takes {taken}.", f"Pass one of {taken}.")
        return
    if not call.where:
        return
    for name in row.copies:
        if name in call.arguments:
            yield from _copy(call, name)
    for name, chunk in row.tables.items():
        if name in call.arguments:
            block = {"rule": call.chunk_size, "conv": 64, "cumsum": cumsum_block(call.chunk_size)}[chunk]
            yield from _table(call, name, block)


def _copy(call: Call, name: str) -> Iterator[Breach]:
    host = name.endswith("_host")
    if got := _unreadable(lambda: numbers(call, name, host=host)):
        yield call.breach("container", name, got, "The copy lies on the host.", silent=False)
        return
    copy = numbers(call, name, host=host)
    if copy != call.given:
        says = f"It is a copy of {call.where}, {list(call.given[:8])}; tables follow the one, lengths the other."
        yield call.breach("copy", name, str(list(copy[:12])), says)


def _table(call: Call, name: str, block: int) -> Iterator[Breach]:
    right = chunk_indices(call.offsets, block)
    value = call.get(name)
    says = f"It holds (sequence, chunk) for each piece of {block} tokens in their order, {len(right)} pairs here"
    if call.operator.host:
        if got := _unreadable(lambda: numbers(call, name, host=True)):
            yield call.breach("container", name, got, f"{says}, as one flat list.")
        elif (flat := numbers(call, name, host=True)) != tuple(right.reshape(-1).tolist()):
            rule = "table-odd" if len(flat) % 2 else "table"
            says = f"{says}, {right[:4].reshape(-1).tolist()} ..."
            yield call.breach(rule, name, f"{list(flat[:12])}, {len(flat)} numbers", says)
        return
    if not isinstance(value, Tensor) or value.is_meta or value.is_floating_point():
        yield call.breach("container", name, _short(value), f"{says}, as a tensor [{len(right)}, 2].", silent=False)
        return
    table = host_tensor(name, value).numpy()
    if table.shape != right.shape or not np.array_equal(table, right):
        got, says = f"{shape_of(value)} {table[:4].tolist() if table.ndim else table}", f"{says}: {right[:4].tolist()} ..."
        remedy = f"Leave it out, or pass chunk_indices(offsets, {block}) of kernels.gated_delta."
        yield call.breach("table", name, got, says, remedy)


def _short(value: Any) -> str:
    return shape_of(value) if isinstance(value, Tensor) else repr(value)[:60]
