"""What ranks do in a round of the soak: calls whose right answers plain slices tell, and a fault that one of them has."""

import os
import random
import signal
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import oracle
import shared_work as shared
import torch
import torch.distributed as dist

from collate_npu import BatchAdapter, CollateError, Segments, adapt
from collate_npu.collate import BalancedBatchSampler, loss_weights
from collate_npu.parallel import ContextParallel, gather_sequence, ranks_agree, split_batch

CALLS = ("split", "adapter", "gather", "same", "local", "objects", "plan", "weights", "shared")
ANYWHERE = ("skip", "swap", "late", "stop", "kill")
BY_CALL = {"objects": ANYWHERE, "plan": (*ANYWHERE, "other plan"), "weights": ("late", "stop", "kill")}
BY_CALL |= {**dict.fromkeys(("gather", "same", "local"), (*ANYWHERE, "layout", "truth", "raise"))}
INSIDE = {f"{fault} inside": fault for fault in ("late", "stop", "kill")}
"""After all ranks have agreed to run a model, before its first exchange or its backward."""
BY_CALL |= {"shared": (*ANYWHERE, *INSIDE, "no backward", "layout", "width", "keys", "labels", "error")}
FAULTS = {**BY_CALL, **dict.fromkeys(("split", "adapter"), (*ANYWHERE, "layout", "truth", "raise", "tokens"))}
"""What can be wrong with a call so that the others can know."""
HARMLESS = ("", "slow")
FAMILIES = ("qwen3_next", "lfm2", "olmo_hybrid")
"""Heads for tokens, or whole sequences."""
Said = tuple[str, int, float]
"""What ended the round, "" if nothing did; at which call; and how many seconds that one took."""


def warm() -> None:
    """The models of "shared", and what adapt asks of each once."""
    for family in FAMILIES:
        adapt(shared.model_of(family)).remove()


def meet(path: str, number: int, seconds: float) -> None:
    """A world made again: no call of the round before is waited for."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    store = dist.PrefixStore(f"round {number}", dist.FileStore(path, size))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
    dist.barrier()


def round_of(seed: int, calls: list[str], fault: str, odd: int, at: int, seconds: float) -> Said:
    """All calls in order; rank `odd` has the fault at one of them."""
    mine = fault if dist.get_rank() == odd else ""
    order = [(n, name, mine if n == at else "") for n, name in enumerate(calls)]
    if mine in ("skip", "swap"):
        order[at : at + 2] = order[at + 1 : at + 2] + [order[at]] * (mine == "swap")
    for n, name, wrong in order:
        start = monotonic()
        try:
            _ill(wrong, seconds)
            draw = random.Random(f"{seed} {n}")
            if problem := _shared(draw, wrong, seconds) if name == "shared" else _call(name, draw, wrong):
                return f"WRONG in silence: {name}: {problem}", n, monotonic() - start
        except (CollateError, RuntimeError) as error:
            if name not in ("weights", "shared") and not isinstance(error, CollateError):  # these meet in Gloo, too
                raise
            return f"refused: {error}", n, monotonic() - start
    return "", len(calls), 0.0


def _ill(wrong: str, seconds: float) -> None:
    if wrong == "slow":
        sleep(0.2 * seconds)
    elif wrong == "late":
        sleep(2 * seconds)
    elif wrong in ("stop", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if wrong == "stop" else signal.SIGKILL)


def _call(name: str, draw: random.Random, wrong: str) -> str:
    """What is wrong with its answer, "" if nothing is."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if name == "objects":
        return "" if _objects((rank, draw.random()))[rank][0] == rank else "another's object"
    if name in ("plan", "weights"):
        return (_planned if name == "plan" else _weighed)(draw, wrong)
    layout = draw.choice(("contiguous", "zigzag"))
    other = {"contiguous": "zigzag", "zigzag": "contiguous"}[layout]
    cp = ContextParallel.from_group(dist.group.WORLD, layout=other if wrong == "layout" else layout)
    S = 2 * size * draw.randint(2, 12)
    lengths = [draw.randint(S // 2 + 1, S - 1) for _ in range(draw.randint(1, 4))]
    segments = Segments.from_lengths([n - (wrong == "truth") for n in lengths], width=S, side="right")
    ids = torch.tensor([[draw.randint(1, 99) for _ in range(S)] for _ in lengths]).where(segments.keep, 0)
    ids[0, 0] += 100 * (wrong == "tokens")
    wanted = ids[:, oracle.share(S, size, rank, layout)]
    if name in ("split", "adapter"):
        return _split(name, cp, segments, ids[:, 1:] if wrong == "raise" else ids, wanted)
    return _gathered(name, cp, segments, ids.float(), wanted[:, 1:] if wrong == "raise" else wanted)


def _objects(value: Any) -> list[Any]:
    """One of each rank, exchanged after the ranks have agreed to."""
    with ranks_agree(ContextParallel.from_group(dist.group.WORLD)):
        values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _planned(draw: random.Random, wrong: str) -> str:
    """No rank asks another for the plan; what a checkpoint keeps of it tells whether they have one. With another seed or
    other lengths a rank does not take it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lengths = [draw.randint(1, 20) for _ in range(draw.randint(4 * size, 40))]
    options = {"max_tokens": draw.randint(20, 60), "pack": draw.random() < 0.5, "seed": draw.randint(0, 9)}
    if wrong == "other plan":
        options |= draw.choice(({"seed": 10}, {"max_tokens": 61}, {"pack": not options["pack"]}))
    sampler = BalancedBatchSampler(lengths, num_replicas=size, rank=rank, drop_last=True, **options)
    sampler.set_epoch(draw.randint(0, 3))
    told = _objects((sampler.state_dict(), list(sampler)))
    for state, _ in told:
        sampler.load_state_dict(state)
    samples = [n for _, batches in told for batch in batches for n in batch]
    if len({len(batches) for _, batches in told}) > 1 or len({*samples}) < len(samples):
        return "a sample twice, or fewer steps on a rank"
    over = [batch for _, batches in told for batch in batches if _cost(batch, lengths, options) > options["max_tokens"]]
    return f"over the budget: {over}" if over else ""


def _cost(batch: list[int], lengths: list[int], options: dict[str, Any]) -> int:
    sizes = [lengths[n] for n in batch]
    return sum(sizes) if options["pack"] else len(sizes) * max(sizes)


def _weighed(draw: random.Random, _: str) -> str:
    """Each batch by its share of the labels of all ranks, times the ranks, whose gradients are averaged."""
    size = dist.get_world_size()
    labels = [[draw.choice((-100, 3)) for _ in range(draw.randint(2, 9))] for _ in range(2 * size)]
    labels[0][-1] = 3
    counts = [len([label for label in row[1:] if label != -100]) for row in labels]
    own = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    found = loss_weights([{"labels": [row]} for row in labels[own]])
    wanted = [size * count / sum(counts) for count in counts[own]]
    return "" if found == wanted else f"weights {found}, not {wanted}"


def _split(name: str, cp: ContextParallel, segments: Segments, ids: torch.Tensor, wanted: torch.Tensor) -> str:
    learned = ids.masked_fill(~segments.keep[:, -ids.shape[1] :], -100)
    batch: dict[str, Any] = {"input_ids": ids, "labels": learned, "attention_mask_2d": segments.keep}
    if name == "split":
        shard = split_batch(batch, cp, segments=segments)
    else:
        shard = BatchAdapter(needs_mask_2d=False, consumer="megatron", context_parallel=cp)(batch)
    return "" if torch.equal(shard["input_ids"], wanted) else "other tokens than its share"


def _gathered(name: str, cp: ContextParallel, segments: Segments, whole: torch.Tensor, mine: torch.Tensor) -> str:
    """Each rank's gradient is its number plus one, times that of all (`same` has one loss, `local` each its own)."""
    shard = mine.float().requires_grad_(name != "gather")
    found = gather_sequence(shard, cp, segments, loss="local" if name == "local" else "same")
    if not torch.equal(found, whole):
        return "another row than the whole"
    if name == "gather":
        return ""
    weight = dist.get_rank() + 1 if name == "local" else 5
    (found * weight).sum().backward()
    wanted = sum(range(1, dist.get_world_size() + 1)) if name == "local" else 5
    return "" if shard.grad.unique().tolist() == [wanted] else f"gradient {shard.grad.unique().tolist()}, not {wanted}"


def _shared(draw: random.Random, wrong: str, seconds: float) -> str:
    """A hybrid on rows of which each rank has a part: its logits, and the gradient of all, as of each sample alone."""
    family, layouts = draw.choice(FAMILIES), draw.sample(("contiguous", "head_tail"), 2)
    keys = draw.choice((["attention_mask"], ["position_ids"], ["attention_mask", "position_ids"]))
    rows = 1 if keys == ["position_ids"] else draw.randint(1, 3)
    S, model = 2 * dist.get_world_size() * draw.randint(2, 8), shared.model_of(family)
    several = [1 if keys == ["attention_mask"] else draw.randint(2, 4) for _ in range(rows)]
    lengths = [[draw.randint(1, S // n) for _ in range(n)] for n in several]
    ids = Segments.from_lengths(lengths, S, draw.choice(("left", "right")) if keys == ["attention_mask"] else "right").ids
    _, _, batch, *own, samples = shared.parts(ids, keys, layouts[0])
    batch, truth = shared.odd(batch, wrong), shared.alone(model, samples)
    with adapt(model, sequence_group=dist.group.WORLD, layout=layouts[wrong == "layout"]):
        hooked = draw.choice((model.register_forward_pre_hook, model.register_forward_hook))
        with hooked(lambda *_: _ill(INSIDE.get(wrong, ""), seconds)):
            if wrong == "no backward":
                model(**batch)
                return ""
            found = shared.gaps(model, batch, *own, *truth)
    return "" if max(found) < 1e-4 else f"{family}, {layouts[0]}, {keys}, {ids.tolist()}: off by {found}"
