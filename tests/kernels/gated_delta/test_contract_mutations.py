"""No wrong call passes with the Segments at hand, and no right one is refused: judged by readings that are not the check.

Wrong calls are made from right ones: each argument dropped, shifted, spelled otherwise or taken from elsewhere. Some changes
are harmless (other numbers, int32 for int64); which ones is for the readings to say.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np
import pytest
import torch
from kernel_readings import RANKS, RefusedError, WildError, alone, computed, values
from torch import Tensor

from collate_npu import CollateError, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.kernels.check import call_breaches, check_call
from collate_npu.kernels.gated_delta import chunk_indices, gated_delta_kwargs
from collate_npu.kernels.gated_delta.arguments import Kernel

pytestmark = pytest.mark.long

Kwargs = dict[str, Any]
KERNELS = get_args(Kernel)
STACKS = {"mamba.mamba_chunk_scan_combined": "causal_conv1d"}
"""Operators whose arguments `gated_delta_kwargs` makes under the name of a kernel. Other layers stand in `contract_cases`,
and their real packages are run by the peers."""
NEWEST = {"transformers": "5.23.0", "fla": "0.5.2", "causal_conv1d": "1.6.1", "megatron": "0.19.0"}
DECODED = 8


# --- right calls


def drawn(draw: random.Random, longest: int) -> Segments:
    """Rows padded on a side, packed rows, rows with gaps and holes."""
    rows = draw.choice((1, 1, 1, 2, 3))
    kind = draw.choice(("padded", "packed", "packed", "gaps", "holes"))
    ids: list[list[int]] = []
    for _ in range(rows):
        row: list[int] = []
        for n in range(1, draw.randint(1, 1 if kind == "padded" else 4) + 1):
            row += [0] * draw.randint(0, 2) if kind in ("gaps", "holes") else []
            length = draw.randint(1, draw.choice((3, 8, longest)))
            hole = draw.randint(1, length) if kind == "holes" and draw.random() < 0.3 else length
            row += [n] * hole + [0] * (hole < length) + [n] * (length - hole)
        ids.append(row)
    width = max(map(len, ids)) + draw.choice((0, 0, 1, 3))
    left = draw.random() < 0.4
    return Segments(torch.tensor([[0] * (width - len(r)) + r if left else r + [0] * (width - len(r)) for r in ids]))


def outputs(kernel: str) -> dict[str, bool]:
    """What of a layer the operator computes."""
    alone_conv = kernel.endswith(("conv", "conv1d"))
    return {"rule": not alone_conv, "conv": alone_conv or kernel == "transformers"}


class Spelled:
    """A right call: a batch, a kernel, its arguments, and the tensor that they speak of."""

    def __init__(self, draw: random.Random, operator: str) -> None:
        kernel: Any = STACKS.get(operator, operator)
        chunk = draw.choice({"fla": (16, 32, 64), "fla_npu": (64, 128), "fla_npu_cumsum": (64, 128)}.get(kernel, (64,)))
        self.kernel, self.chunk = operator, chunk if operator in KERNELS else 64
        self.batch = drawn(draw, DECODED if kernel == "fla_npu_recurrent" else draw.choice((8, 40, 150)))
        keep, padding, tables = draw.choice((None, None, False, True)), draw.choice(("own", "behind")), draw.random() < 0.5
        B, S = self.batch.shape
        more: Any = {"keep_padding": keep, "padding": padding, "tables": tables and operator in KERNELS}
        self.kwargs: Kwargs = gated_delta_kwargs(self.batch, kernel=kernel, chunk_size=chunk, **more)
        self.kwargs |= {"scale": 0.5} if "actual_seq_lengths" in self.kwargs else {}
        rows = "attention_mask" in self.kwargs
        whole = rows or keep or (keep is None and B == 1)
        self.places = np.arange(B * S) if whole else np.flatnonzero(self.batch.array)
        self.B, self.T = (B, S) if rows else (1, len(self.places))
        if kernel == "fla_cp" and (self.T % RANKS or self.T < 3 * RANKS):
            raise UnsupportedFormError("the row cannot be shared out")
        self.says: Kwargs = {"B": self.B, "T": self.T, "chunk_size": self.chunk, "versions": NEWEST}
        self.says["training"] = self.kernel not in ("fla_npu_recurrent", "torch_npu")

    def broken(self, kwargs: Kwargs) -> set[str]:
        """The rules that the check finds broken, none where it passes the call."""
        try:
            found = call_breaches(self.kernel, kwargs, segments=self.batch, **self.says)
        except CollateError:
            return {"unreadable"}
        assert all(breach.remedy and breach.source for breach in found)
        return {breach.rule for breach in found}

    def wrong(self, kwargs: Kwargs) -> bool | None:
        """Does the kernel leave something unwritten, or give a real token another output? None where it raises."""
        x, decay = (a[self.places] for a in values(self.batch.array.size))
        right = alone(self.batch, self.places, **outputs(self.kernel))
        try:
            out = computed(self.kernel, kwargs, x, decay, B=self.B, T=self.T, chunk=self.chunk)
        except RefusedError:
            return None
        except WildError:
            return True
        real = ~np.isnan(right)
        return bool(np.isnan(out).any()) or not np.allclose(out[real], right[real], atol=1e-9, rtol=0)


def calls(kernel: str, seed: int) -> Iterator[tuple[random.Random, Spelled]]:
    draw = random.Random(f"{kernel} {seed}")
    while True:
        try:
            yield draw, Spelled(draw, kernel)
        except UnsupportedFormError:
            continue


# --- wrong ones

OFFSETS = ("cu_seqlens", "cu_seqlens_cpu", "cu_seqlens_list", "cu_seq_lens_q", "query_start_loc", "actual_seq_lengths")
FIELDS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
HOLDERS: tuple[Callable[[list[int]], Any], ...] = (
    *(lambda row, dtype=dtype: torch.tensor(row, dtype=dtype) for dtype in (torch.int16, torch.int32, torch.int64)),
    *(list, tuple, np.array, str, lambda row: torch.tensor([row]), lambda row: torch.tensor(row, dtype=torch.float32)),
    lambda row: torch.empty(len(row), dtype=torch.int64, device="meta"),
)
NUMBERS: tuple[Callable[[Tensor], Any], ...] = (
    *(lambda n: n + 5, lambda n: -n, lambda n: n % 2, lambda n: n % 3, lambda n: n // 2, lambda n: n * 0),
    *(lambda n: n.long(), lambda n: n.float(), lambda n: n[0], lambda n: n.T.contiguous(), lambda n: n.tolist()),
    *(lambda n: n.roll(1, 1), lambda n: n.roll(-1, 1), lambda n: n[:, :-1].contiguous()),
    *(lambda n: torch.stack([n, n], -1)[..., 0], lambda n: torch.arange(n.numel(), dtype=n.dtype).reshape(n.shape)),
)
MASKS: tuple[Callable[[Tensor], Any], ...] = (
    *(lambda m: None, lambda m: 1 - m, lambda m: m * 0 + 1, lambda m: m * 0, lambda m: m * 2, lambda m: m.tolist()),
    *(lambda m: m.bool(), lambda m: m.float(), lambda m: (1 - m).float() * -1e9, lambda m: m[:, None, None].bool()),
    *(lambda m: m.flip(1), lambda m: m.flip(0), lambda m: m.roll(1, 1), lambda m: m.roll(-1, 1), lambda m: m.T),
    *(lambda m: m[:1], lambda m: torch.cat([m, m[:, -1:]], 1)),
    lambda m: (m[:, None, :, None] * m[:, None, None] * torch.ones(m.shape[1], m.shape[1]).tril()).bool(),
)


def mutations(call: Spelled, draw: random.Random) -> Iterator[Kwargs]:
    """The arguments with one thing changed."""
    kwargs = call.kwargs
    yield from ({key: value for key, value in kwargs.items() if key != name} for name in kwargs)
    yield {}
    if rows := [name for name in (*OFFSETS, *FIELDS) if name in kwargs]:
        given = [int(n) for n in kwargs[rows[0]]]
        for changed in changed_rows(given, draw):
            new = {name: _like(kwargs[name], changed) for name in rows}
            yield from (kwargs | new, kwargs | {rows[-1]: new[rows[-1]]}, kwargs | new | _tables(call, changed))
        yield from (kwargs | {rows[0]: hold(given)} for hold in HOLDERS)
    for name in (name for name in kwargs if name.startswith("chunk_indices")):
        yield from (kwargs | {name: table} for table in changed_tables(kwargs[name], given))
    for name, changes in (("seq_idx", NUMBERS), ("attention_mask", MASKS)):
        if name in kwargs:
            yield from (kwargs | {name: change(kwargs[name])} for change in changes)
            one = kwargs[name].clone()
            b, t = draw.randrange(one.shape[0]), draw.randrange(one.shape[1])
            one[b, t] = 1 - one[b, t] if name == "attention_mask" else one[b, t] + draw.choice((-1, 1, 7))
            yield kwargs | {name: one}
    for other in elsewhere(call):
        yield from (other, kwargs | other)
    foreign: Kwargs = {
        **{
            name: torch.ones(1, call.T, dtype=torch.int64) for name in ("attention_mask", "attention_mask_2d", "segment_ids")
        },
        **dict.fromkeys(("cu_seqlens", "cu_seqlen"), torch.tensor([0, call.T])),
        "seq_idx": torch.zeros(1, call.T, dtype=torch.int32),
        "position_ids": torch.arange(call.T)[None],
        "total_tokens": call.T + 1,
        "qkv_format": "sbhd",
    }
    yield from (kwargs | {name: value} for name, value in foreign.items() if name not in kwargs)


def changed_rows(row: list[int], draw: random.Random) -> list[list[int]]:
    lengths, sums, i = np.diff(row).tolist(), np.cumsum(row).tolist(), draw.randrange(len(row))
    before, after = row[:i], row[i + 1 :]
    return [
        *(lengths, [0, *lengths], row[1:], [0, *sums], sums, row[::-1], [row[0], row[-1]], row[:-1], []),
        *([*row, row[-1] + 1], [*row, row[-1]], [row[0], *row], [n + 1 for n in row], [2 * n for n in row]),
        *([row[0], *row[1:-1][::-1], *row[1:][-1:]], [*row[1::-1], *row[2:]], before + after),
        *([*before, row[i] + step, *after] for step in (-2, -1, 1, 2)),
        *([*before, row[i], row[i], *after], [*before, row[i] - 1, row[i], *after]),
    ]


def _like(value: Any, row: list[int]) -> Any:
    return torch.tensor(row, dtype=value.dtype) if isinstance(value, Tensor) else tuple(row)


def _table(value: Any, flat: list[int]) -> Any:
    return torch.tensor(flat).reshape(-1, 2) if isinstance(value, Tensor) else tuple(flat)


def _tables(call: Spelled, row: list[int]) -> Kwargs:
    """The tables that belong to a changed row, where there are any."""
    blocks = (
        {"chunk_indices": call.chunk, "chunk_indices_out": 2**17 // call.chunk}
        if row == sorted(row) and row[:1] == [0] and row[1:]
        else {}
    )
    made = {name: chunk_indices(row, block).reshape(-1).tolist() for name, block in blocks.items() if name in call.kwargs}
    return {name: _table(call.kwargs[name], flat) for name, flat in made.items()}


def changed_tables(value: Any, row: list[int]) -> Iterator[Any]:
    flat = np.array(value).reshape(-1).tolist()
    yield from (flat, torch.tensor(flat))
    for changed in (
        *(flat[:-2], [*flat, *flat[-2:]], flat[::-1], [*flat[:-1], flat[-1] + 1]),
        [n for pair in zip(flat[1::2], flat[::2]) for n in pair],
        *(chunk_indices(row, block).reshape(-1).tolist() for block in (16, 32, 64, 128, 1024, 2048)),
    ):
        yield _table(value, changed)
    if isinstance(value, tuple):
        yield value[:-1]


def elsewhere(call: Spelled) -> Iterator[Kwargs]:
    """The arguments of other batches of as many tokens, and of other kernels."""
    for n in {1, call.T // 2} - {0, call.T}:
        other = Segments.from_lengths([[n, call.T - n]])
        for kernel in ("fla", "causal_conv1d", "torch_npu", STACKS.get(call.kernel, call.kernel)):
            try:
                yield gated_delta_kwargs(other, kernel=kernel, chunk_size=call.chunk)  # type: ignore[arg-type]
            except UnsupportedFormError:
                continue


STRICTER = {"copy", "numbers-return", "mask-form", "mask-values", "mask-and-offsets", "hole", "pair"}
"""Refused although the outcome may be right: two sources of one call that differ, numbers that come back in padding, masks
in a form that nobody reads as it is meant or that call padding real, and half a pair that divides padding alone."""
MUTATIONS, EACH, HARMLESS = 1000, 40, 15
"""Of each kernel, at least; ten thousand in all."""


@pytest.mark.parametrize("kernel", [*KERNELS, *STACKS])
def test_no_wrong_call_passes_and_no_right_one_is_refused(kernel: str) -> None:
    counts: Counter[str] = Counter()
    for draw, call in calls(kernel, 0):
        assert not call.wrong(call.kwargs), "the judge must know a right call"
        check_call(kernel, call.kwargs, segments=call.batch, **call.says)
        check_call(kernel, call.kwargs, **call.says)
        found = list(mutations(call, draw))
        for kwargs in draw.sample(found, min(len(found), EACH)):
            wrong, broken = call.wrong(kwargs), call.broken(kwargs)
            assert broken or not wrong, (kwargs, call.batch.array.tolist())
            assert wrong is not False or broken <= STRICTER, (broken, kwargs, call.batch.array.tolist())
            counts["same, passed"] += wrong is False and not broken
            counts["calls"] += 1
        if counts["calls"] >= MUTATIONS:
            break
    assert counts["same, passed"] >= HARMLESS, "a check that refuses all is no check"
