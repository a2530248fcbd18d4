"""Rules of the boundaries themselves: which arguments, in which container, of which row, and their chunk tables.

Groups build on one another: the first that is broken ends the reading, because the next could not read on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from collate_npu.arrays import host_tensor
from collate_npu.errors import shape_of
from collate_npu.kernels.breach import Breach
from collate_npu.kernels.gated_delta.boundaries import CONV_BLOCK, chunk_indices, cumsum_block
from collate_npu.kernels.gated_delta.operator_call import HOLDERS, Call, is_whole_tensor
from collate_npu.kernels.gated_delta.tensor_rules import orders
from collate_npu.releases import FLA_COUNTS_EMPTY

_BOUNDARY = re.compile(
    r"seq_?lens?|cu_|seq_idx|mask|chunk_ind|start_loc|seq_length|segment_id|position_id|total_tokens|qkv_format"
)
"""Argument names that look like boundaries, tables or masks."""
UNREADABLE = frozenset({"container", "count", "falling"})
"""Rules without which no other can read the boundaries."""


def breaches(call: Call) -> Iterator[Breach]:
    """What is wrong with the boundaries of a call."""
    yield from _arguments(call)
    for group in (_containers, _sequences, _tables):
        found = list(group(call))
        yield from found
        if found:
            return


def _arguments(call: Call) -> Iterator[Breach]:
    row = call.operator
    known = {*row.offsets, *row.copies, *row.tables, *row.reads, row.numbers, *HOLDERS}
    for name, value in call.arguments.items():
        if name not in known and _BOUNDARY.search(name) and not name.startswith("max_"):
            takes = ", ".join(filter(None, (*row.offsets, row.numbers, *sorted(row.reads)))) or "no boundaries"
            says = f"{row.name} does not read it, and where keywords are filtered nobody says so; it takes {takes}."
            yield call.breach("unread", name, _short(value), says, f"Leave {name} out; " + _remedy(call))
    if not call.where:
        for name in (*row.tables, *row.copies):
            if name in call.arguments and "cp_context" not in call.arguments:
                says = "A table or a copy belongs to offsets, and without them nothing keeps sequences apart."
                yield call.breach("alone", name, _short(call.get(name)), says, silent="missing" not in row.checks)
        if row.needs.intersection(row.offsets[:1]):
            yield call.breach("missing", row.offsets[0], "nothing", "The operator takes no call without it.")
    elif "copy" in row.needs and not any(name in call.arguments for name in row.copies):
        says = "It sizes its launches by a copy of the offsets on the host."
        yield call.breach("missing", " or ".join(row.copies), "nothing", says, "Build it with include_host_offsets=True.")
    elif missing := sorted(row.needs - call.arguments.keys() - {"copy"}):
        says = "It takes boundaries only together with their chunk tables."
        yield call.breach("missing", ", ".join(missing), "nothing", says)


def _remedy(call: Call) -> str:
    return f"take the boundaries {call.operator.remedy}"


def _containers(call: Call) -> Iterator[Breach]:
    where, numbers = call.where, call.operator.numbers
    rows = [where, "cu_seqlens_q"] if where.endswith("_padded") else [where]
    unreadable = [(name, call.row(name, host=call.operator.host)[1]) for name in rows if name in call.arguments]
    if numbers in call.arguments and not is_whole_tensor(call.get(numbers)):
        unreadable.append((numbers, f"{shape_of(call.get(numbers))}: it takes a tensor of whole numbers with values"))
    for name, got in unreadable:
        if got:
            yield call.breach("container", name, got, "The operator takes no other form of the same numbers.")
    if where and not any(got for _, got in unreadable) and len(call.offsets) < 2:
        says = "There is at least one sequence, behind the leading 0 where there is one."
        yield call.breach("count", where, f"{len(call.given)} entries", says)


def _sequences(call: Call) -> Iterator[Breach]:
    yield from _numbers(call)
    if not call.where:
        return
    offsets, where, got = call.offsets, call.where, str(list(call.given[:12]))
    if offsets[0] != 0:
        says = "Offsets begin with 0."
        if call.operator.form == "prefix and lengths":
            says = "The first entry counts tokens before the first sequence and is 0; lengths follow it."
        yield call.breach("first", where, got, says + _guess(call))
    if min(call.lengths) < 0:
        yield call.breach("falling", where, got, "No sequence ends before it begins.")
        return
    if offsets[-1] != call.total:
        says, remedy = "what lies behind them is somebody else's memory.", "Take the offsets from this very batch."
        if offsets[-1] < call.total:
            says = "what no sequence covers stays unwritten memory: NaN in gradients."
            remedy = "Count the tail as one more sequence: " + _remedy(call)
        says = f"The call has {call.total} tokens, and {says}" + _guess(call)
        yield call.breach("last", where, got, says, remedy + _turned(call))
    yield from _empties(call)
    flat = call.B == 1 or call.operator.folds
    if not flat and (call.total != call.B * call.T or call.word("backend", "triton") != "triton"):
        says = "Offsets are of one flat row."
        if "conv" in call.operator.name.lower():
            says += " The convolution's weight gradient is summed over memory nobody wrote."
        yield call.breach("rows", "B", f"{call.B} rows with {where}", says, "unpad() the batch to [1, T] first.")
    yield from _limits(call)


def _turned(call: Call) -> str:
    """The other remedy, where the first tensor has so many tokens along another axis."""
    given = ((name, order, call.get(name)) for name, order in orders(call.operator, call.arguments).items())
    name, order, x = next((each for each in given if isinstance(each[2], Tensor)), ("", "", None))
    turned = x is not None and call.offsets[-1] in x.shape
    return f" Or put {name} in the order [{', '.join(order)}]." if turned else ""


def _guess(call: Call) -> str:
    """What the same numbers would mean in another spelling."""
    given, form, meant = call.given, call.operator.form, ""
    if sum(given) == call.total and form != "lengths":
        meant = "lengths"
    elif given[-1] == call.total and form.startswith("offsets") == (given[0] != 0):
        meant = "ends without the leading 0" if given[0] else "offsets"
    return meant and f" They look like {meant}."


def _empties(call: Call) -> Iterator[Breach]:
    lengths, kind = call.lengths, call.operator.empties
    empty = [n for n, length in enumerate(lengths) if length == 0]
    inner = bool(empty) and empty[0] < len(lengths) - len(empty)
    old = kind == "fla" and inner and call.before(FLA_COUNTS_EMPTY)
    if old or (empty and kind == "never"):
        got = f"{list(call.given[:12])}: sequence {', '.join(map(str, empty[:8]))} is empty"
        says = "An empty sequence makes chunk tables name the wrong one, or has no last token."
        if old:
            says += f" fla {call.release('fla')} counts the others alone, since {FLA_COUNTS_EMPTY} it does not (#909)."
        yield call.breach("empty", call.where, got, says, "Drop empty sequences: " + _remedy(call))


def _limits(call: Call) -> Iterator[Breach]:
    limits, longest = call.operator.limits, max(call.lengths)
    if longest > limits.get("tokens", longest):
        says = f"A sequence has 1 to {limits['tokens']} tokens in a call of the decoding rule."
        yield call.breach("length", call.where, f"{longest} tokens", says, "Use the chunked rule.")


def _numbers(call: Call) -> Iterator[Breach]:
    """A number for each token, of which only equality with the neighbours counts."""
    name = call.operator.numbers
    given, got = call.get(name), shape_of(call.get(name))
    if given is None:
        return
    if "numbers-dtype" in call.operator.checks and got.split()[0] != "int32":
        yield call.breach("numbers-dtype", name, got, "It is int32.", "Pass seq_idx.to(torch.int32).")
    if tuple(given.shape) != (call.B, call.T):
        remedy = "Pass it as [B, T]: seq_idx.reshape(B, T)."
        yield call.breach("numbers-shape", name, got, f"It is [{call.B}, {call.T}].", remedy)


def _tables(call: Call) -> Iterator[Breach]:
    row = call.operator
    if row.chunk_sizes and call.chunk_size not in row.chunk_sizes:
        taken = ", ".join(map(str, row.chunk_sizes))
        yield call.breach("chunk-size", "chunk_size", str(call.chunk_size), f"It takes {taken}.", f"Pass one of {taken}.")
    elif call.where:
        for name in row.copies:
            if name in call.arguments:
                yield from _copy(call, name)
        for name, chunk in row.tables.items():
            if name in call.arguments:
                block = {"rule": call.chunk_size, "conv": CONV_BLOCK, "cumsum": cumsum_block(call.chunk_size)}[chunk]
                yield from _table(call, name, block)


def _copy(call: Call, name: str) -> Iterator[Breach]:
    copy, unreadable = call.row(name, host=name.endswith(("_host", "_list")))
    if unreadable:
        yield call.breach("container", name, unreadable, "The copy lies on the host.", silent=False)
    elif copy != call.given:
        says = f"It is a copy of {call.where}, {list(call.given[:8])}; tables follow the one, lengths the other."
        yield call.breach("copy", name, str(list(copy[:12])), says)


def _table(call: Call, name: str, block: int) -> Iterator[Breach]:
    right, value = chunk_indices(call.offsets, block), call.get(name)
    says = f"It holds (sequence, chunk) for each piece of {block} tokens in their order, {len(right)} pairs here"
    if call.operator.host:
        flat, unreadable = call.row(name, host=True)
        if unreadable:
            yield call.breach("container", name, unreadable, f"{says}, as one flat list.")
        elif flat != tuple(right.reshape(-1).tolist()):
            says = f"{says}, {right[:4].reshape(-1).tolist()} ..."
            yield call.breach("table", name, f"{list(flat[:12])}, {len(flat)} numbers", says)
    elif not is_whole_tensor(value):
        yield call.breach("container", name, _short(value), f"{says}, as a tensor [{len(right)}, 2].", silent=False)
    elif not np.array_equal(table := host_tensor(name, value).numpy(), right):
        got, says = f"{shape_of(value)} {table[:4].tolist() if table.ndim else table}", f"{says}: {right[:4].tolist()} ..."
        remedy = f"Leave it out, or pass chunk_indices(offsets, {block}) of kernels.gated_delta."
        yield call.breach("table", name, got, says, remedy)


def _short(value: Any) -> str:
    return shape_of(value) if isinstance(value, Tensor) else repr(value)[:60]
