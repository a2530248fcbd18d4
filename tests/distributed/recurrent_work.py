"""Gated DeltaNet whose row is shared out between ranks, as released stacks do it, in plain torch on Gloo.

`Net` is an embedding, two recurrent layers and a head. Its layers differ in one thing: how they come by the tokens and
the state that this rank has not. The exchanges know nothing of our layouts: they are written after the stacks' own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collate_npu import Segments
from collate_npu.errors import CollateError
from collate_npu.kernels.gated_delta import gated_delta_kwargs, reference_causal_conv1d, reference_gated_delta_rule
from collate_npu.parallel import (
    ContextParallel,
    check_recurrent_split,
    gather_sequence,
    pad_documents,
    rank_offsets,
    split_tensor,
)

WIDTH, TAPS, KEYS, VALUES, SIZE = 12, 4, 4, 8, 3
"""Hidden size, taps of the convolution, key heads, value heads, size of a head."""
Offsets = Sequence[int]
Exchange = Callable[["Recurrent", dict[str, Tensor]], Tensor]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = {"q": (KEYS, SIZE), "k": (KEYS, SIZE), "v": (VALUES, SIZE), "b": (VALUES, 1), "a": (VALUES, 1)}
        self.project = nn.ModuleDict({part: nn.Linear(WIDTH, n * d, bias=False) for part, (n, d) in self.heads.items()})
        self.taps = nn.ParameterDict({part: nn.Parameter(torch.randn(self.sizes(part), TAPS)) for part in "qkv"})
        self.decay = nn.Parameter(torch.randn(VALUES))
        self.shift = nn.Parameter(torch.randn(VALUES))
        self.out = nn.Linear(VALUES * SIZE, WIDTH, bias=False)

    def sizes(self, part: str) -> int:
        heads, size = self.heads[part]
        return heads * size

    def forward(self, x: Tensor, exchange: Exchange) -> Tensor:
        parts = {part: self.project[part](x).unflatten(-1, self.heads[part]) for part in self.heads}
        return x + self.out(exchange(self, parts).flatten(-2))

    def mix(
        self, parts: dict[str, Tensor], offsets: Any, share: tuple[int, int] = (0, 1), halo: Any = None, state: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Convolution and rule for a share of the heads: `[B, T, VALUES / ranks, SIZE]`, and the final states."""
        own = {part: tensor.chunk(share[1])[share[0]] for part, tensor in {**self.taps, "g": self.decay}.items()}
        mixed, at = {}, 0
        for part in "qkv":
            flat = parts[part].flatten(-2)
            before = None if halo is None else halo[:, at : at + flat.shape[-1]]
            made = reference_causal_conv1d(flat, own[part], activation="silu", cu_seqlens=offsets, initial_state=before)
            mixed[part], at = made.unflatten(-1, parts[part].shape[-2:]), at + flat.shape[-1]
        shift = self.shift.chunk(share[1])[share[0]]
        gate = -own["g"].exp() * nn.functional.softplus(parts["a"][..., 0] + shift)
        out, final = reference_gated_delta_rule(
            mixed["q"],
            mixed["k"],
            mixed["v"],
            gate,
            parts["b"][..., 0].sigmoid(),
            cu_seqlens=offsets,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        assert final is not None
        return out, final


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, WIDTH)
        self.layers = nn.ModuleList([Recurrent(), Recurrent()])
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.double()

    def forward(self, ids: Tensor, exchange: Exchange) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, exchange)
        return self.head(x)


def by_itself(offsets: Offsets | None) -> Exchange:
    return lambda layer, parts: layer.mix(parts, offsets)[0]


# --- state passing: the end of the state, and the last inputs of the convolution, from the rank before


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trigger: Tensor, shape: tuple[int, ...], tag: int) -> Tensor:
        ctx.tag, got = tag, trigger.new_zeros(shape)
        if dist.get_rank():
            dist.recv(got, dist.get_rank() - 1, tag=tag)
        return got

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        if dist.get_rank():
            held = grads[0].contiguous()
            _later.append((held, dist.isend(held, dist.get_rank() - 1, tag=ctx.tag + 100)))
        return grads[0].new_zeros(()), None, None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tag: int) -> Tensor:
        ctx.tag, ctx.shape, ctx.last = tag, x.shape, dist.get_rank() == dist.get_world_size() - 1
        if not ctx.last:
            held = x.detach().contiguous()
            _later.append((held, dist.isend(held, dist.get_rank() + 1, tag=tag)))
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        grad = grads[0].new_zeros(ctx.shape)
        if not ctx.last:
            dist.recv(grad, dist.get_rank() + 1, tag=ctx.tag + 100)
        return grad, None


_later: list[tuple[Tensor, Any]] = []
"""What is on its way, with its tensor, until it has arrived."""


def state_passing(offsets: Offsets, cp: ContextParallel, *, alone: bool = False) -> Exchange:
    """`alone` is the fault of shard-local offsets: each rank takes its slice for a row of its own."""
    local, before = rank_offsets(offsets, cp)
    before = 0 if alone else before

    def exchange(layer: Recurrent, parts: dict[str, Tensor]) -> Tensor:
        inputs = torch.cat([parts[part].flatten(-2) for part in "qkv"], -1)[0]
        trigger = inputs.sum() * 0
        halo = _Receive.apply(trigger, (TAPS - 1, inputs.shape[-1]), 1)
        sent = _Send.apply(inputs[-(TAPS - 1) :], 1)
        came = _Receive.apply(trigger, (VALUES, SIZE, SIZE), 2)
        known = torch.arange(TAPS - 1) >= TAPS - 1 - min(TAPS - 1, before)
        halos = inputs.new_zeros(len(local) - 1, inputs.shape[-1], TAPS - 1)
        states = inputs.new_zeros(len(local) - 1, VALUES, SIZE, SIZE)
        halos = torch.cat([(halo * known[:, None]).T[None], halos[1:]])
        states = torch.cat([(came * (before > 0))[None], states[1:]])
        out, final = layer.mix(parts, local, halo=halos, state=states)
        return out + sent + _Send.apply(final[-1], 2)

    return exchange


# --- head exchange: all heads of this rank's tokens for some heads of all tokens, rank after rank


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _to_heads(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return _to_tokens(grads[0])


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _to_tokens(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return _to_heads(grads[0])


def _to_heads(x: Tensor) -> Tensor:
    pieces = torch.stack(x.chunk(dist.get_world_size(), dim=2)).contiguous()
    dist.all_to_all_single(got := torch.empty_like(pieces), pieces)
    return torch.cat(list(got), dim=1)


def _to_tokens(x: Tensor) -> Tensor:
    pieces = torch.stack(x.chunk(dist.get_world_size(), dim=1)).contiguous()
    dist.all_to_all_single(got := torch.empty_like(pieces), pieces)
    return torch.cat(list(got), dim=2)


def head_exchange(offsets: Offsets | None, undone: Offsets | None = None) -> Exchange:
    """`undone`: zigzag is undone between each two of these before the rule, and made again behind it."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def exchange(layer: Recurrent, parts: dict[str, Tensor]) -> Tensor:
        whole = {part: _ToHeads.apply(tensor) for part, tensor in parts.items()}
        if undone is None:
            return _ToTokens.apply(layer.mix(whole, offsets, (rank, size))[0])
        order = out_of_zigzag(undone, size)
        ordered = {part: tensor[:, order] for part, tensor in whole.items()}
        return _ToTokens.apply(layer.mix(ordered, offsets, (rank, size))[0][:, order.argsort()])

    return exchange


def out_of_zigzag(offsets: Offsets, size: int) -> Tensor:
    """Where the n-th token stands after the exchange: a rank holds chunks r and 2 * size - 1 - r of each sequence."""
    places, share = [], offsets[-1] // size
    for start, stop in pairwise(offsets):
        half = (stop - start) // (2 * size)
        for chunk in range(2 * size):
            rank, second = (chunk, 0) if chunk < size else (2 * size - 1 - chunk, 1)
            first = rank * share + start // size + second * half
            places += range(first, first + half)
    return torch.tensor(places)


# --- one batch, every way


@dataclass
class Batch:
    cp: ContextParallel
    segments: Segments
    ids: Tensor
    offsets: list[int] | None
    """Where the sequences of a flat row stand, as the kernels are told; None for padded rows."""


def batch_of(layout: str, lengths: list[int], *, padding_free: bool, documents: bool = False) -> Batch:
    """Random ids, those of padding too. A flat row has its padding in a tail, or with `documents` behind each sequence."""
    cp = ContextParallel.from_group(dist.group.WORLD, layout=layout)
    segments = Segments.from_lengths([lengths] if padding_free else lengths)
    ids = torch.randint(0, 40, segments.shape, generator=torch.Generator().manual_seed(1))
    if cp.documents or documents:
        each = ContextParallel(cp.size, 0, layout="document_zigzag")
        row = {"input_ids": ids, "cu_seqlens": segments.cu_seqlens}
        padded, segments = pad_documents(row, each, segments=segments, pad_token_id=39)
        kwargs = gated_delta_kwargs(segments, kernel="megatron")
        assert torch.equal(padded["cu_seqlens_padded"], kwargs["cu_seqlens_q_padded"])
        return Batch(cp, segments, padded["input_ids"], kwargs["cu_seqlens_q_padded"].tolist())
    width = -(-segments.shape[1] // (2 * cp.size)) * 2 * cp.size
    ids = nn.functional.pad(ids, (0, width - segments.shape[1]), value=39)
    segments = Segments.from_lengths(segments.lengths, width=width)
    told = gated_delta_kwargs(segments, kernel="fla_cp")["cu_seqlens"].tolist() if padding_free else None
    return Batch(cp, segments, ids, told)


def given_to(batch: Batch, wrong: str) -> Any:
    """The offsets that the check and the layers are given."""
    width = batch.segments.shape[1]
    if wrong == "one sequence":
        return [0, width]
    if wrong == "own" and batch.offsets is not None:
        return list(rank_offsets(batch.offsets, ContextParallel(batch.cp.size, batch.cp.rank, layout="contiguous"))[0])
    return batch.offsets


def exchange_of(scheme: str, batch: Batch, wrong: str) -> Exchange:
    given, width = given_to(batch, wrong), batch.segments.shape[1]
    if scheme == "state_passing":
        place = ContextParallel(batch.cp.size, batch.cp.rank, layout="contiguous")
        alone = wrong == "own"
        return state_passing(batch.offsets if alone else given, place, alone=alone)
    if scheme == "head_exchange":
        return head_exchange(given)
    by_row = scheme == "row_zigzag" or given is None
    return head_exchange(given, [0, width] if by_row else batch.offsets)


def measure(
    scheme: str, layout: str, lengths: list[int], padding_free: bool, wrong: str = "", documents: bool = False
) -> dict[str, Any]:
    """How far the ranks together are from one process, and from each sequence alone; and what our check says."""
    batch = batch_of(layout, lengths, padding_free=padding_free, documents=documents)
    one, lonely = step(batch, by_itself(batch.offsets), split=False), alone(batch)
    shared = step(batch, exchange_of(scheme, batch, wrong), split=True)
    settings: dict[str, Any] = {"padding_free": padding_free, "offsets": given_to(batch, wrong), "heads": (KEYS, VALUES)}
    try:
        check_recurrent_split(batch.cp, scheme, batch.segments, **settings)
        refused = ""
    except CollateError as error:
        refused = str(error)
    return {"refused": refused, "one": apart(shared, one), "alone": apart(shared, lonely)}


def step(batch: Batch, exchange: Exchange, *, split: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of the real tokens, and the gradient of one loss of them in every weight, all ranks together."""
    net, cp, segments = Net(), batch.cp, batch.segments
    offsets = batch.offsets if cp.documents else None
    ids = split_tensor(batch.ids, cp, cu_seqlens=offsets) if split else batch.ids
    logits = net(ids, exchange)
    if split:
        logits = gather_sequence(logits, cp, segments, cu_seqlens=offsets)
    real = logits.flatten(0, 1)[segments.indices]
    (real * weights(segments)).sum().backward()
    for _, sent in _later:
        sent.wait()
    _later.clear()
    grads = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    for grad in grads.values() if split else ():
        dist.all_reduce(grad)
    return real.detach(), grads


def alone(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Each sequence by itself; the gradients of all of them added up."""
    net, found, segments = Net(), [], batch.segments
    wanted = weights(segments).split(list(segments.sequence_lengths))
    for (row, start, stop), weight in zip(segments.spans, wanted, strict=True):
        logits = net(batch.ids[row : row + 1, start:stop], by_itself(None))[0]
        (logits * weight).sum().backward()
        found.append(logits.detach())
    return torch.cat(found), {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def weights(segments: Segments) -> Tensor:
    return torch.randn(segments.num_tokens, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def apart(ours: tuple[Tensor, dict[str, Tensor]], theirs: tuple[Tensor, dict[str, Tensor]]) -> float:
    """The largest difference of a logit or a gradient, by what is usual for it; what is not finite is infinitely far."""
    assert ours[1].keys() == theirs[1].keys()
    pairs = [(ours[0], theirs[0]), *((ours[1][name], grad) for name, grad in theirs[1].items())]
    far = torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs])
    return float(far.max()) if far.isfinite().all() else float("inf")
