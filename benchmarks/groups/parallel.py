"""Context parallelism: this rank's share of a batch, against megatron-core's own split and a copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.peers import rival
from benchmarks.timing import Case, Contestant
from collate_npu import Segments
from collate_npu.masks import dense
from collate_npu.parallel import ContextParallel, query_rows, split_batch, split_tensor
from collate_npu.parallel.agreement import batch_facts

RANK = 1
COPY = "copy of as many bytes"


def cases(quick: bool) -> Iterator[Case]:
    yield zigzag(8, 131072, 1.2)
    yield zigzag(8, 8192, None)
    peers.leave_ranks()
    yield expanded(8, 131072)
    yield contiguous(8, 131072)
    yield by_document()
    yield batch_of_four(8, 131072)
    yield compared(8, 4096, 256)
    if not quick:
        yield own_rows()


def zigzag(B: int, S: int, target: float | None, size: int = 8) -> Case:
    x, cp = torch.randint(0, 1000, (B, S)), ContextParallel(size, RANK)
    shard = split_tensor(x, cp)
    theirs = rival(
        "megatron-core", lambda: peers.megatron_split(size, RANK), fresh=lambda: {"tokens": x}, agrees=_same_tokens
    )
    rivals = [theirs, _copy(shard, target=target)]
    return Case("parallel", f"zigzag [{B}, {S}], cp {size}", _ours(lambda: split_tensor(x, cp)), rivals)


def expanded(B: int, S: int) -> Case:
    """Positions that all rows share: a stride of 0."""
    positions, cp = torch.arange(S).expand(B, S), ContextParallel(8, RANK)
    floor = _copy(split_tensor(positions, cp).contiguous())
    return Case("parallel", f"zigzag [{B}, {S}] expanded, cp 8", _ours(lambda: split_tensor(positions, cp)), [floor])


def contiguous(B: int, S: int) -> Case:
    x, cp = torch.randint(0, 1000, (B, S)), ContextParallel(8, RANK, layout="contiguous")
    floor = _copy(split_tensor(x, cp).contiguous())
    return Case("parallel", f"contiguous [{B}, {S}], cp 8", _ours(lambda: split_tensor(x, cp)), [floor])


def by_document() -> Case:
    cp, offsets = ContextParallel(8, RANK, layout="document_zigzag"), list(range(0, 131073, 1024))
    x = torch.randint(0, 1000, (1, 131072))
    floor = _copy(split_tensor(x, cp, cu_seqlens=offsets))
    ours = _ours(lambda: split_tensor(x, cp, cu_seqlens=offsets))
    return Case("parallel", "128 sequences of a flat row, cp 8", ours, [floor])


def batch_of_four(B: int, S: int) -> Case:
    segments, cp = Segments.from_lengths([S - 100 * n for n in range(B)]), ContextParallel(8, RANK)
    ids = torch.randint(0, 1000, segments.shape)
    batch = {
        "input_ids": ids, "labels": ids.clone(), "position_ids": segments.position_ids, "attention_mask": None,
        "attention_mask_2d": segments.keep,
    }  # fmt: skip
    copied = [x.contiguous() for x in split_batch(batch, cp, segments=segments).values() if isinstance(x, Tensor)]
    floor = Contestant(COPY, lambda _: [x.clone() for x in copied], against="floor")
    ours = Contestant("ours", lambda batch: split_batch(batch, cp, segments=segments), lambda: dict(batch))
    return Case("parallel", f"batch of 4 keys [{B}, {S}], cp 8", ours, [floor])


def compared(B: int, S: int, H: int) -> Case:
    """What ranks that share rows tell each other of a batch with vectors, before they exchange it, against its copy."""
    x = torch.randn(B, S, H)
    batch = {"inputs_embeds": x, "labels": torch.randint(0, 1000, (B, S))}

    def told(_: Any) -> list[str]:
        return [value if isinstance(value, str) else value() for value in batch_facts(batch, None).values()]

    return Case("parallel", f"facts of vectors [{B}, {S}, {H}]", Contestant("ours", told), [_copy(x)])


def own_rows() -> Case:
    """A dense mask under context parallelism: this rank's rows alone, or all of them, then split."""
    segments, cp = Segments.from_lengths([4000, 8192]), ContextParallel(8, RANK)
    rows = query_rows(8192, cp)

    def whole(_: Any) -> Tensor:
        batch = {"attention_mask": dense(segments, polarity="masked")}
        return split_batch(batch, cp, segments=segments)["attention_mask"]

    ours = _ours(lambda: dense(segments, polarity="masked", rows=rows))
    rivals = [Contestant("the whole mask, then our split", whole, agrees=_same)]
    return Case("parallel", "4D rows [2, 1, 8192, 8192], cp 8", ours, rivals)


def _ours(work: Callable[[], Any]) -> Contestant:
    return Contestant("ours", lambda _: work())


def _copy(x: Tensor, target: float | None = None) -> Contestant:
    return Contestant(COPY, lambda _: x.clone(), against="floor", target=target)


def _same(ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours, theirs), "the shards differ"


def _same_tokens(ours: Tensor, theirs: dict[str, Tensor]) -> None:
    _same(ours, theirs["tokens"])
