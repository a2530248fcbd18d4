"""No wrong call passes with the Segments at hand, and no right one is refused: judged by readings that are not the check."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, get_args

import numpy as np
import pytest
import torch
from contract_mutations import mutations
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_readings import RANKS, RefusedError, WildError, alone, computed, values
from strategies import segments

from collate_npu import CollateError, ContextParallel, Segments, UnsupportedFormError
from collate_npu.kernels.gated_delta import (
    check_gated_delta_contract,
    gated_delta_breaches,
    gated_delta_kwargs,
    reference_causal_conv1d,
    reference_gated_delta_rule,
)
from collate_npu.kernels.gated_delta.arguments import Kernel

KERNELS = get_args(Kernel)
STACKS = {
    "fla.GatedDeltaNet": "transformers",
    "mcore_bridge.GatedDeltaNet": "megatron",
    "verl.qwen3_5_gdn": "fla",
    "torchtitan.qwen3_5_gdn": "fla",
    "mamba.mamba_chunk_scan_combined": "causal_conv1d",
}
"""Operators whose arguments `gated_delta_kwargs` makes under the name of a kernel."""
INFERENCE = ("fla_npu_recurrent", "torch_npu")
NEWEST = {"transformers": "5.23.0", "fla": "0.5.2", "causal_conv1d": "1.6.1", "megatron": "0.19.0"}
DECODED = 8


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


class Spelled:
    """A right call: a batch, a kernel, its arguments, and the tensor that they speak of."""

    def __init__(self, draw: random.Random, operator: str) -> None:
        kernel = STACKS.get(operator, operator)
        chunk = draw.choice({"fla": (16, 32, 64), "fla_npu": (64, 128)}.get(kernel, (64,)))
        batch = drawn(draw, DECODED if kernel == "fla_npu_recurrent" else draw.choice((8, 40, 150)))
        keep, padding, tables = draw.choice((None, None, False, True)), draw.choice(("own", "behind")), draw.random() < 0.5
        self.kernel, self.batch, self.chunk = operator, batch, chunk if operator in KERNELS else 64
        if operator == "fla.GatedDeltaNet":
            self._masked(batch)
            return
        self.kwargs: dict[str, Any] = gated_delta_kwargs(
            batch,
            kernel=kernel,  # type: ignore[arg-type]
            chunk_size=chunk,
            keep_padding=keep,
            padding=padding,  # type: ignore[arg-type]
            tables=tables and operator in KERNELS,
        )
        B, S = batch.shape
        rows = "attention_mask" in self.kwargs
        whole = rows or keep or (keep is None and B == 1)
        self.places = np.arange(B * S) if whole else np.flatnonzero(batch.array)
        self.B, self.T = (B, S) if rows else (1, len(self.places))
        if kernel == "fla_cp" and (self.T % RANKS or self.T < 3 * RANKS):
            raise UnsupportedFormError("the row cannot be shared out")

    def _masked(self, batch: Segments) -> None:
        """Rows with a mask, which may have holes: fla's layer takes its padding out."""
        if batch.packed:
            raise UnsupportedFormError("a mask knows one sequence a row")
        self.kwargs, self.places = {"attention_mask": batch.keep.long()}, np.arange(batch.array.size)
        self.B, self.T = batch.shape

    @property
    def says(self) -> dict[str, Any]:
        ranks = {"context_parallel": ContextParallel(RANKS, 0, layout="contiguous")} if self.kernel == "fla_cp" else {}
        training = self.kernel not in INFERENCE
        sizes = {"B": self.B, "T": self.T, "chunk_size": self.chunk}
        return ranks | sizes | {"kernel": self.kernel, "training": training, "versions": NEWEST}

    def broken(self, kwargs: dict[str, Any]) -> set[str]:
        """The rules that the check finds broken, none where it passes the call."""
        found = gated_delta_breaches(kwargs, segments=self.batch, **self.says)
        assert all(breach.remedy and breach.source for breach in found)
        return {breach.rule for breach in found}

    def wrong(self, kwargs: dict[str, Any]) -> bool:
        """Does the kernel refuse it, leave something unwritten, or give a real token another output?"""
        conv = self.kernel.endswith(("conv", "conv1d")) or self.kernel == "transformers"
        rule = not self.kernel.endswith(("conv", "conv1d"))
        x, decay = (a[self.places] for a in values(self.batch.array.size))
        right = alone(self.batch, self.places, rule, conv)
        try:
            out = computed(self.kernel, kwargs, x, decay, B=self.B, T=self.T, chunk=self.chunk)
        except (RefusedError, WildError):
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


def elsewhere(call: Spelled) -> Iterator[dict[str, Any]]:
    """The arguments of other batches of as many tokens, and of other kernels."""
    for n in {1, call.T // 2} - {0, call.T}:
        other = Segments.from_lengths([[n, call.T - n]])
        for kernel in ("fla", "causal_conv1d", "torch_npu", STACKS.get(call.kernel, call.kernel)):
            try:
                yield gated_delta_kwargs(other, kernel=kernel, chunk_size=call.chunk)  # type: ignore[arg-type]
            except UnsupportedFormError:
                continue


STRICTER = {"copy", "numbers-return", "mask-rank", "mask-shape", "mask-values", "mask-and-offsets", "hole", "pair"}
"""Refused although the outcome may be right: two sources of one call that differ, numbers that come back in padding, masks
in a form that nobody reads as it is meant or that call padding real, and half a pair that divides padding alone."""
MUTATIONS, EACH, HARMLESS = 1000, 40, 15
"""Of each kernel, at least; ten thousand in all."""


@pytest.mark.parametrize("kernel", [*KERNELS, *STACKS])
def test_no_wrong_call_passes_and_no_right_one_is_refused(kernel: str) -> None:
    counts: Counter[str] = Counter()
    strict: Counter[str] = Counter()
    for draw, call in calls(kernel, 0):
        assert not call.wrong(call.kwargs), "the judge must know a right call"
        check_gated_delta_contract(call.kwargs, segments=call.batch, **call.says)
        check_gated_delta_contract(call.kwargs, **call.says)
        counts["right, passed"] += 1
        others = list(elsewhere(call))
        found = list(mutations(call.kwargs, draw, call.T, call.chunk, others))
        for what, kwargs in draw.sample(found, min(len(found), EACH)):
            wrong, broken = call.wrong(kwargs), call.broken(kwargs)
            assert broken or not wrong, (what, kwargs, call.batch.array.tolist())
            assert wrong or broken <= STRICTER, (what, broken, kwargs, call.batch.array.tolist())
            counts[f"{'wrong' if wrong else 'same'}, {'refused' if broken else 'passed'}"] += 1
            strict.update(broken if not wrong else ())
        if sum(counts.values()) - counts["right, passed"] >= MUTATIONS:
            break
    print(f"{kernel}: {dict(counts)}; harmless but refused by {dict(strict)}")
    assert counts["same, passed"] >= HARMLESS, "a check that refuses all is no check"


# --- right calls


@settings(max_examples=300, deadline=None)
@given(segments(), st.sampled_from(KERNELS), st.data())
def test_what_the_library_makes_passes(batch: Segments, kernel: str, data: st.DataObject) -> None:
    chunk = data.draw(st.sampled_from({"fla": (16, 32, 64), "fla_npu": (64, 128)}.get(kernel, (64,))))
    keep, padding = data.draw(st.sampled_from((None, False, True))), data.draw(st.sampled_from(("own", "behind")))
    try:
        kwargs = gated_delta_kwargs(
            batch,
            kernel=kernel,  # type: ignore[arg-type]
            chunk_size=chunk,
            keep_padding=keep,
            padding=padding,  # type: ignore[arg-type]
            tables=data.draw(st.booleans()),
        )
    except UnsupportedFormError:
        return
    B, S = batch.shape
    whole = keep or (keep is None and B == 1)
    rows, T = (B, S) if "attention_mask" in kwargs else (1, B * S if whole else batch.num_tokens)
    says: dict[str, Any] = {"B": rows, "T": T, "chunk_size": chunk, "training": kernel not in INFERENCE, "versions": NEWEST}
    check_gated_delta_contract(kwargs, kernel=kernel, segments=batch, **says)
    check_gated_delta_contract(kwargs, kernel=kernel, **says)


@settings(max_examples=200, deadline=None)
@given(
    segments(), st.sampled_from(("fla", "fla_conv", "fla_npu", "fla_npu_conv", "megatron", "transformers", "causal_conv1d"))
)
def test_rows_without_boundaries_pass_where_they_are_right(batch: Segments, kernel: str) -> None:
    if not batch.num_tokens:
        return
    B, S = batch.shape
    x, decay = values(B * S)
    conv, rule = kernel.endswith(("conv", "conv1d", "transformers")), not kernel.endswith(("conv", "conv1d"))
    right = alone(batch, np.arange(B * S), rule, conv)
    out = computed(kernel, {}, x, decay, B=B, T=S, chunk=64)
    wrong = not np.allclose(out[~np.isnan(right)], right[~np.isnan(right)], atol=1e-9, rtol=0)
    assert bool(gated_delta_breaches({}, kernel=kernel, B=B, T=S, segments=batch, versions=NEWEST)) == wrong


# --- the judge


@pytest.mark.parametrize("kernel", ["fla", "fla_conv"])
def test_the_references_judge_alike(kernel: str) -> None:
    """The rule and the convolution in full, over offsets as given, say of a mutated call what the judge says."""
    counts: Counter[bool] = Counter()
    for draw, call in calls(kernel, 1):
        if call.T > 60:
            continue
        for _, kwargs in draw.sample(list(mutations(call.kwargs, draw, call.T, call.chunk, [])), 10):
            offsets = kwargs.get("cu_seqlens")
            form = isinstance(offsets, torch.Tensor) and (offsets.ndim, offsets.dtype, offsets.is_meta)
            if set(kwargs) == {"cu_seqlens", "cu_seqlens_cpu"} and form == (1, torch.int64, False):
                differs = referred(call, offsets)
                assert differs is None or differs == call.wrong(kwargs | {"cu_seqlens_cpu": None})
                counts[bool(differs)] += 1
        if min(counts[True], counts[False]) >= 15:
            return


def referred(call: Spelled, offsets: torch.Tensor) -> bool | None:
    """Do the references give real tokens another output than alone? None where they refuse the offsets."""
    generator = torch.Generator().manual_seed(3)
    B, S = call.batch.shape
    draw = (torch.randn(1, B * S, 2, 3, dtype=torch.float64, generator=generator) for _ in range(4))
    q, k, v, z = draw
    g, beta = -z[..., 0].abs(), z[..., 1].sigmoid()
    weight = torch.randn(6, 4, dtype=torch.float64, generator=generator)

    def layer(at: torch.Tensor, cu: torch.Tensor | None) -> torch.Tensor:
        if call.kernel == "fla_conv":
            return reference_causal_conv1d(v[:, at].flatten(2), weight, cu_seqlens=cu)[0]
        return reference_gated_delta_rule(*(x[:, at] for x in (q, k, v, g, beta)), cu_seqlens=cu)[0][0].flatten(1)

    try:
        out = layer(torch.from_numpy(call.places), offsets)
    except CollateError:
        return None
    if bool(out.isnan().any()):
        return True
    flat = torch.zeros(B * S, 6, dtype=torch.float64)
    flat[call.places] = out
    for b, ids in enumerate(call.batch.ids):
        for n in range(1, int(ids.max()) + 1):
            at = b * S + (ids == n).nonzero()[:, 0]
            if not torch.allclose(flat[at], layer(at, None), atol=1e-9, rtol=0):
                return True
    return False
