"""Batch sampler: it groups samples so that no batch is over its budget, every rank gets the same number of batches, and the
batches of a step cost about the same on all ranks.

One plan covers all ranks. It follows from the lengths, the options, the seed and the epoch, so no rank asks another. Padded
batches are cut from the sorted samples. Of packed ones each, longest first, goes to the emptiest row (Graham's LPT rule).

Legend: N samples, R ranks, K batches of all ranks.
"""

from __future__ import annotations

import operator
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from importlib import import_module
from importlib.util import find_spec
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from collate_npu.arrays import Array, host_array, whole_number
from collate_npu.collate.padding import best_fit, rank_of
from collate_npu.errors import CollateError, a_type, explain, explain_rows, shape_of
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.parallel.layout import is_gloo
from collate_npu.validation import checked

Plan = tuple[Array, Array, Array]
"""Numbers of samples, batch after batch; the end of each batch; its cost, the number of tokens that a model computes."""
_SAID, _NOISE = 20, 1.1
"""How many bad lengths a message lists; the largest random factor on a length when an epoch is shuffled."""


@checked
class BalancedBatchSampler(Sampler[list[int]]):
    """Yields the numbers of the samples of each batch of this rank: pass it as `batch_sampler=` to a `DataLoader`.

    * `lengths`: the number of tokens of each sample, `[N]`; `lengths_of(dataset)` counts them.
    * `max_tokens`: the most tokens in a batch: rows x width if rows are padded, real tokens if they are packed.
    * `num_replicas`, `rank`: of the data-parallel group, as in torch's `DistributedSampler`. `rank=None` yields the batches
      of all ranks, step by step, for a loader that gives them to the ranks itself (Accelerate).
    * `pack`: True if the collator packs: `padding_free=True`; if `width` is set, `packing=True, max_length=width`.
    * `width`: the width of every row, if it is constant. A batch then has up to `max_tokens // width` rows.
    * `shuffle`: False keeps one plan for all epochs.
    * `seed`: the same on all ranks.
    * `drop_last`: True leaves out random batches until all steps are full. False makes more, smaller batches.

    Every sample comes once in an epoch, but for what `drop_last` leaves out. Each rank, and each epoch, has the same number
    of batches. Call `set_epoch(epoch)` before each epoch.

    >>> options = {"max_tokens": 9, "num_replicas": 2, "pack": True, "shuffle": False}
    >>> [list(BalancedBatchSampler([5, 2, 2, 4, 1, 4], rank=rank, **options)) for rank in (0, 1)]
    [[[0, 1, 2]], [[3, 5, 4]]]
    """

    @checked
    def __init__(
        self,
        lengths: Any,
        *,
        max_tokens: int,
        num_replicas: int = 1,
        rank: int | None = 0,
        pack: bool = False,
        width: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.max_tokens = whole_number("max_tokens", max_tokens, least=1)
        self.num_replicas = R = whole_number("num_replicas", num_replicas, least=1)
        self.rank = None if rank is None else whole_number("rank", rank)
        self.width = None if width is None else whole_number("width", width, least=1)
        self.room = self.width or self.max_tokens
        """The most tokens that a sample may have."""
        if (self.rank or 0) >= R:
            remedy = "Pass rank and num_replicas of the data-parallel group."
            raise CollateError(explain("rank", str(rank), f"{R} ranks are numbered from 0 to {R - 1}.", remedy))
        if self.max_tokens < self.room:
            rule = f"A batch holds up to {max_tokens} tokens."
            raise CollateError(explain("width", str(width), rule, "Raise max_tokens."))
        self.pack, self.shuffle, self.drop_last = pack, shuffle, drop_last
        self.seed, self.epoch = whole_number("seed", seed), 0
        self.lengths = _checked_lengths(lengths, self.room)
        self._planned: tuple[int, Plan] | None = None
        self._begin = self._yielded = 0

    @property
    def plan(self) -> Plan:
        """Return the batches of this epoch for all ranks: those of one step stand together, rank by rank."""
        key = self.epoch if self.shuffle else 0
        if self._planned is None or self._planned[0] != key:
            self._planned = (key, _plan(self, np.random.default_rng((self.seed, key))))
        return self._planned[1]

    def set_epoch(self, epoch: int) -> None:
        """Go to the first batch of another epoch; the same epoch changes nothing."""
        if whole_number("epoch", epoch) != self.epoch:
            self.epoch, self._begin, self._yielded = epoch, 0, 0

    def __len__(self) -> int:
        ends = (self._planned[1] if self._planned else self.plan)[1]  # the same number in every epoch
        return len(ends) if self.rank is None else len(ends) // self.num_replicas

    def __iter__(self) -> Iterator[list[int]]:
        (order, ends, _), epoch = self.plan, self.epoch
        for n in range(self._begin, len(self)):
            if self.epoch == epoch:  # else set_epoch was called meanwhile
                self._yielded = n + 1
            k = n if self.rank is None else n * self.num_replicas + self.rank
            yield order[ends[k - 1] if k else 0 : ends[k]].tolist()
        if self.epoch == epoch:
            self._begin = self._yielded = 0

    def state_dict(self) -> dict[str, int]:
        """Return how many batches this epoch has yielded, and what checks it. A DataLoader with workers reads ahead, so its
        count is too high; torchdata's `StatefulDataLoader` counts right."""
        options = (self.max_tokens, self.pack, self.width, self.shuffle, self.seed, self.drop_last)
        plan = zlib.crc32(repr(options).encode(), zlib.crc32(self.lengths.tobytes()))
        return {"epoch": self.epoch, "yielded": self._yielded, "num_replicas": self.num_replicas, "plan": plan}

    @checked
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the middle of an epoch. Raises `CollateError` if lengths, options or the number of ranks differ."""
        begin, own = whole_number("yielded", state.get("yielded")), self.state_dict() | {"yielded": len(self)}
        wrong = [name for name in ("num_replicas", "plan") if state.get(name) != own[name]]
        if wrong := wrong or ["yielded"] * (begin > len(self)):
            got, has = (", ".join(f"{name} {held.get(name)}" for name in wrong) for held in (state, own))
            rule = f"A state fits the same lengths, options and number of ranks; this sampler has {has}."
            remedy = "Resume with the ones of the run that saved it, or begin another epoch with set_epoch."
            raise CollateError(explain("state", got, rule, remedy))
        self.epoch = whole_number("epoch", state.get("epoch"))
        self._begin = self._yielded = begin


@checked
def lengths_of(dataset: Any, of: str | Callable[[Any], int] = "input_ids") -> Array:
    """Return the number of tokens of each sample, `[N]`, for `BalancedBatchSampler`.

    `dataset` is a `datasets.Dataset` or an Arrow table, whose tokens are not read, or any object with `len()` and `[]`. `of`
    is a column of tokens or of lengths, or a function from a sample to its length. After a second a progress bar appears.

    >>> lengths_of([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]).tolist()
    [3, 1]
    """
    try:
        return _lengths_of(dataset, of)
    except Exception as error:  # whatever a dataset raises
        got = f"{a_type(dataset)} ({type(error).__name__}: {error})"
        remedy = "Pass of=: a column of tokens or of lengths ('input_ids'), or a function from a sample to its length."
        raise CollateError(explain("dataset", got, "A dataset needs len(), [] and what of= names.", remedy)) from error


def _lengths_of(dataset: Any, of: str | Callable[[Any], int]) -> Array:
    if isinstance(of, str) and hasattr(dataset, "select_columns") and not hasattr(dataset, "column"):
        dataset = dataset.select_columns([of]).with_format("arrow")
        return np.concatenate([_of_column(table[of]) for table in dataset.iter(100_000)])
    if isinstance(of, str) and hasattr(dataset, "column"):
        return _of_column(dataset.column(of))
    places: Any = range(len(dataset))
    if find_spec("tqdm"):
        places = import_module("tqdm.auto").tqdm(places, "lengths", delay=1)
    return np.array([_count(dataset[n][of]) if isinstance(of, str) else of(dataset[n]) for n in places])


def _count(row: Any) -> int:
    """Return the number of tokens of a row, or the length that stands there. Text and rows of rows have neither."""
    return len(row) if rank_of(row) == 1 else operator.index(row)


def _of_column(column: Any) -> Array:
    import pyarrow.compute

    if pyarrow.types.is_nested(getattr(column.type, "value_type", column.type)):
        return np.array([_count(row) for row in column.to_pylist()])
    return np.asarray(column if pyarrow.types.is_integer(column.type) else pyarrow.compute.list_value_length(column))


@checked
def loss_weights(
    batches: Sequence[Mapping[str, Any]],
    *,
    per: Literal["token", "label", "sequence"] = "token",
    group: Any = None,
    sampler: BalancedBatchSampler | None = None,
) -> list[float]:
    """Return a weight for the mean loss of each batch of a step, so that the gradient does not depend on how samples are
    batched: `(model(**batch).loss * weight).backward()` for each, then one optimizer step.

    * `batches`: this rank's micro-batches of one step, with `labels`.
    * `per`: what the loss of a batch averages over: tokens that a causal model predicts (it shifts labels), labels (T5,
      token classification), or sequences.
    * `group`: the ranks whose gradients DDP or FSDP averages; None: all. One all_reduce adds up their counts.
    * `sampler`: that of the batches. Ranks whose plans differ by seed, epoch, options or lengths raise.

    >>> labels = torch.tensor([[[-100, 1, 2, 3]], [[-100, 1, -100, -100]]])
    >>> loss_weights([{"labels": row} for row in labels])
    [0.75, 0.25]
    """
    counts: list[int] | None = None
    try:
        counts = _counts(batches, per)
    finally:  # where it raises, the other ranks wait
        plan = 0 if sampler is None else zlib.crc32(repr((sampler.state_dict()["plan"], sampler.epoch)).encode()) >> 8
        ranks, failed, total, plans, squares, *chosen = _of_all_ranks(counts, per, group, plan)
    if ranks * squares != plans**2:
        rule, remedy = "All ranks have one plan.", "Pass the same lengths, seed and options on each; set_epoch on each."
        raise CollateError(explain("sampler", "ranks whose plans differ", rule, remedy))
    if failed or max(chosen) != ranks:
        got, remedy = f"{failed} other ranks raised; ranks by per= {chosen}", "Look at their errors; pass one per=."
        raise CollateError(explain("batches", got, "All ranks weigh the same step.", remedy))
    if not total:
        raise CollateError(explain("labels", "none", "A step needs a label on at least one rank.", "Leave this step out."))
    return [ranks * count / total for count in counts]


def _of_all_ranks(counts: list[int] | None, per: str, group: Any, plan: int) -> list[int]:
    """Return the number of ranks and of those that raised, the sums of counts, plans and their squares, ranks by `per`."""
    chosen = (per == each for each in ("token", "label", "sequence"))
    own = torch.tensor([1, counts is None, sum(counts or ()), plan, plan**2, *chosen])
    if dist.is_available() and dist.is_initialized():
        own = own.to("cpu" if is_gloo(group) else torch.accelerator.current_accelerator())
        dist.all_reduce(own, group=group)
    return own.tolist()


def _counts(batches: Any, per: str) -> list[int]:
    """Return how many tokens, labels or sequences the loss of each batch averages over."""
    if not isinstance(batches, Sequence) or not all(hasattr(batch, "items") for batch in batches):
        rule = "They are the micro-batches of a step."
        raise CollateError(explain("batches", a_type(batches), rule, "Pass a list of dicts."))
    if per == "sequence":
        return [len(segments_from_batch(batch).spans) for batch in batches]
    key = "shift_labels" if batches and "shift_labels" in batches[0] else "labels"
    if wrong := [batch[key] for batch in batches if key in batch and host_array(key, batch[key]).ndim != 2]:
        remedy = "Pass per='sequence' for one label a sample."
        raise CollateError(explain(key, shape_of(wrong[0]), "Labels of tokens are [B, S].", remedy))
    if not all(key in batch for batch in batches):
        raise CollateError(explain("batches", f"no {key}", "Weights come from labels.", "Add labels to each batch."))
    first = int(per == "token" and key == "labels")  # nothing predicts the first token of a row
    return [int((host_array(key, batch[key])[..., first:] != -100).sum()) for batch in batches]


def _checked_lengths(lengths: Any, most: int) -> Array:
    """Return lengths as an array `[N]`. Raises `CollateError` if one is no whole number from 1 to `most`."""
    rule, remedy = "A length is the number of tokens of a sample, at least 1.", "Pass lengths_of(dataset)."
    if not hasattr(lengths, "__iter__") or getattr(lengths, "ndim", 1) != 1 or isinstance(lengths, (Set, Mapping)):
        got = shape_of(lengths) if hasattr(lengths, "ndim") else a_type(lengths)
        raise CollateError(explain("lengths", got, rule, remedy))
    values, refused = lengths if isinstance(lengths, (torch.Tensor, np.ndarray)) else list(lengths), None
    try:
        found = host_array("lengths", values)
        whole = found.ndim == 1 and found.dtype.kind in "iu" and not (isinstance(values, list) and bool in map(type, values))
    except CollateError as error:
        whole, refused = False, error
    looked = () if whole else enumerate(values)
    bad = [n for n, x in looked if isinstance(x, bool) or not isinstance(x, Integral) or int(x) >> 63]
    if not bad and refused:  # no element is bad: the whole is
        raise refused
    if not bad and len(values):
        bad = np.flatnonzero(found < 1).tolist()
        if not bad:
            bad = np.flatnonzero(found > most).tolist()
            rule, remedy = f"A row holds up to {most} tokens.", "Truncate the samples, or raise max_tokens (or width)."
    if bad:
        rows = [(n, str(values[n])[:60]) for n in bad[:_SAID]]
        raise CollateError(explain_rows("lengths", rows, f"{len(bad)} in all. " * (len(bad) > _SAID) + rule, remedy))
    if not len(values):
        raise CollateError(explain("lengths", shape_of(values), "A plan needs a sample.", "Check the dataset."))
    return found.astype(np.int32 if found.max() < 1 << 31 else np.int64)


# --- the plan of one epoch


def _plan(sampler: BalancedBatchSampler, rng: np.random.Generator) -> Plan:
    """Return the plan: the batches of a step cost about the same; if shuffled, steps and their ranks are in random order."""
    lengths, R = sampler.lengths, sampler.num_replicas
    drawn = rng.permutation(len(lengths)) if sampler.shuffle else np.arange(len(lengths))
    drawn = drawn[np.argsort(-lengths[drawn], kind="stable")]
    batch_of, costs = (_packed if sampler.pack else _padded)(sampler, lengths[drawn], rng)
    by_cost = np.argsort(-costs, kind="stable")
    if gone := len(costs) % R:  # drop_last
        by_cost = np.delete(by_cost, rng.choice(len(costs), gone, replace=False))
    steps = by_cost.reshape(-1, R)
    if sampler.shuffle:
        steps = rng.permuted(rng.permutation(steps), axis=1)
    place = np.zeros(len(costs), np.int64)  # 0: left out
    place[steps.ravel()] = 1 + np.arange(steps.size)
    placed = place[batch_of]
    ends = np.bincount(placed, minlength=steps.size + 1).cumsum()
    return drawn[np.argsort(placed, kind="stable")][ends[0] :], ends[1:] - ends[0], costs[steps.ravel()]


def _whole_steps(sampler: BalancedBatchSampler, K: int, N: int) -> int:
    """Return the number of batches: K, or the next that fills steps. Raises `CollateError` where N samples are too few."""
    K += 0 if sampler.drop_last and sampler.num_replicas <= K else -K % sampler.num_replicas
    if N < K:
        rule = f"Each of {sampler.num_replicas} ranks gets the same number of batches, and no batch is empty."
        remedy = "Pass fewer ranks, or more samples."
        remedy = remedy if sampler.num_replicas > N else "Pass drop_last=True, a larger max_tokens, or fewer ranks."
        raise CollateError(explain("lengths", f"{N} samples for {K} batches", rule, remedy))
    return K


def _padded(sampler: BalancedBatchSampler, lengths: Array, _: object) -> tuple[Array, Array]:
    """Return the batch of each sample, longest first, and the cost of each batch: rows x width, at most the budget."""
    R, most = sampler.num_replicas, sampler.max_tokens
    widths = lengths if sampler.width is None else np.full_like(lengths, sampler.width)
    K = len(_cut(widths, R, most))
    if not sampler.drop_last and len(widths) < K + -K % R:  # too few samples for equal steps: costs may differ
        R, K = 1, len(_cut(widths, 1, most))
    K = _whole_steps(sampler, K, len(widths))
    low = max(1, most - 2 * R * most // max(1, K))  # a smaller budget fills the last step too
    ends = _cut(widths, R, _least(widths, R, K, low, most), K)[: max(0, K - R)]
    rest, last = widths[ends[-1] if ends else 0 :], min(R, K)
    ends += [len(widths) - len(rest) + end for end in _cut(rest, 1, _least(rest, 1, last, 1, most), last)]
    sizes: Array = np.diff(np.array(ends, np.int64), prepend=0)
    return np.repeat(np.arange(K), sizes), sizes * widths[np.cumsum(sizes) - sizes]


def _least(widths: Array, R: int, K: int, low: int, most: int) -> int:
    """Return the least budget that makes at most K batches."""
    return low + bisect_left(range(low, most), True, key=lambda budget: len(_cut(widths, R, budget, K)) <= K)


def _cut(widths: Array, R: int, budget: int, K: int = 0) -> list[int]:
    """Return where batches end; if K is given, none of K batches is empty. The first batch of a step sets how many tokens
    the others may have: where samples are long, one row more or less changes the cost much."""
    ends: list[int] = []
    at, places = 0, memoryview(widths)  # type: ignore[arg-type]
    while at < len(widths):
        held = budget // places[at] * places[at] or budget
        for _ in range(R):
            if at < len(widths):
                at = min(at + max(1, held // places[at]), max(at + 1, len(widths) - K + len(ends) + 1))
                ends.append(at)
    return ends


def _packed(sampler: BalancedBatchSampler, lengths: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return the batch of each sample, longest first, and the cost of each batch. K rises until each batch is within its
    budget. It depends on the lengths alone, so it is the same in each epoch. A shuffled order is used if it fits too."""
    room, rows = sampler.room, sampler.max_tokens // sampler.room
    K = _whole_steps(sampler, -(-int(lengths.sum()) // (rows * room)), len(lengths))
    while (batch_of := _filled(lengths, K, rows, room)) is None:
        K = _whole_steps(sampler, K + 1 + K // 200, len(lengths))
    if sampler.shuffle:
        other = np.argsort(lengths * -rng.uniform(1, _NOISE, len(lengths)), kind="stable")
        if (filled := _filled(lengths[other], K, rows, room)) is not None:
            batch_of[other] = filled
    return batch_of, np.bincount(batch_of, lengths, K).astype(np.int64)


def _filled(sizes: Array, K: int, rows: int, room: int) -> Array | None:
    """Return the batch of each sample; None if the collator would pack a batch into more than `rows` rows."""
    row_of = _spread(sizes, K * rows, room)
    if row_of is None or rows == 1:
        return row_of
    dealt = np.empty(K * rows, np.int64)  # each batch gets full rows and emptier ones
    dealt[np.argsort(-np.bincount(row_of, sizes, K * rows), kind="stable")] = np.arange(K * rows) % max(1, K)
    batch_of: Array = dealt[row_of]
    parts = np.split(sizes[np.argsort(batch_of, kind="stable")], np.bincount(batch_of, minlength=K).cumsum()[:-1])
    return batch_of if all(len(best_fit(part.tolist(), room)) <= rows for part in parts) else None


def _spread(sizes: Array, rows: int, room: int) -> Array | None:
    """Return the row of each sample, None if a row would hold more than `room`. A round gives one sample to each row that
    is less than the next sample above the emptiest: as one sample at a time to the emptiest row would, but faster."""
    row_of, loads, at = np.empty(len(sizes), np.int32), np.zeros(rows, np.int64), 0
    while at < len(sizes):
        emptiest = np.argsort(loads, kind="stable")
        held = loads[emptiest]
        some = emptiest[: min(len(sizes) - at, int(np.searchsorted(held, held[0] + sizes[at])))]
        row_of[at : at + len(some)] = some
        loads[some] += sizes[at : at + len(some)]
        at += len(some)
        if loads[some].max() > room:
            return None
    return row_of
