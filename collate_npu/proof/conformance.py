"""Conformance: a stack of which only `run(samples) -> log-probabilities` is known gives each token in a batch what it gives
its sample alone.

Samples are drawn, asked for alone, then in batches on which padding, packing, chunks and order go wrong. What passes follows
from the noise of the stack's own answers (`proof.scale`). Costs about 110 calls with one sample or two, and 10 with a batch
in each layout. Legend: L tokens of a sample.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from collate_npu.arrays import whole_number
from collate_npu.checked import checked
from collate_npu.errors import CollateError, explain, printable
from collate_npu.proof.asking import Run, Sample, ways_of
from collate_npu.proof.scale import Draw, Scale, alone, difference, measured
from collate_npu.proof.symptoms import meaning

LENGTHS: dict[str, tuple[int, ...]] = {
    "ragged": (9, 17, 5, 30, 12),
    "chunk edges": (64, 129, 63, 130, 65, 128, 66, 127),
    "one length": (12, 12, 12, 12),
    "single tokens": (1, 7, 1, 2, 1),
    "two": (3, 8),
    "many short": (3, 2, 5, 4, 6, 2, 4, 3, 5, 6, 2, 4),
    "one long": (4, 200, 3, 5),
}
"""What is drawn. The longest sample never stands first: lost boundaries spare the first, padding the longest."""
_BEHIND = (1, 33)
"""Tokens that are put behind a sample: no answer before them may notice, though it is another width and another chunk."""
_AHEAD = "tokens behind move what is before them: a padded end is read, or the model looks ahead"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found in one batch: the relative error over all of its tokens, and where one is furthest off."""

    layout: str
    batch: str
    error: float
    largest: float
    """Difference of one log-probability, in nats."""
    sample: int
    token: int
    """Counted from 0: the token whose log-probability it is."""
    right: bool
    meaning: str


@dataclass(frozen=True, slots=True)
class Conformance:
    """What `conformance` found: true where every batch is right. `str()` is the table."""

    verdicts: tuple[Verdict, ...]
    scale: Scale
    seed: int

    @property
    def passed(self) -> bool:
        """Is every batch right?"""
        return all(each.right for each in self.verdicts)

    def __bool__(self) -> bool:
        return self.passed

    def check(self) -> Conformance:
        """Itself. Raises `AssertionError` with the table where a batch is wrong."""
        if not self.passed:
            raise AssertionError(str(self))
        return self

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        wrong, all_ = sum(not each.right for each in self.verdicts), len(self.verdicts)
        return (
            f"conformance: {f'WRONG in {wrong} of {all_}' if wrong else f'right in all {all_}'} batches (seed={self.seed})"
        )

    @property
    def terms(self) -> str:
        """What passes, and what it was chosen by."""
        passes = f"A relative error up to {self.scale.limit:.1e} passes (noise: {self.scale.noise:.1e})."
        return f"{passes} A lost past, a text before each sample, makes {self.scale.lost:.1e}."

    @property
    def legend(self) -> str:
        """What the columns are."""
        return "error: relative, over all tokens of a batch; largest: of one log-probability, in nats; at: where that is"

    @property
    def table(self) -> list[tuple[str, ...]]:
        """A line for each batch, under the names of the columns."""
        names = ("layout", "batch", "", "error", "largest", "at", "what it means")
        return [names, *(_line(each) for each in self.verdicts)]

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.table)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in self.table)
        return printable("\n".join([self.headline, self.terms, "", *lines, "", self.legend]))

    __repr__ = __str__  # as the last line of a cell


def _line(found: Verdict) -> tuple[str, ...]:
    at = "" if found.right else f"sample {found.sample}, token {found.token}"
    word = "right" if found.right else "WRONG"
    return (found.layout, found.batch, word, f"{found.error:.1e}", f"{found.largest:.1e}", at, found.meaning)


@checked
def conformance(
    run: Run,
    *,
    vocab_size: int = 256,
    pad_token_id: int | None = None,
    layouts: Sequence[str] | None = None,
    seed: int | None = None,
) -> Conformance:
    """Does each sample get in a batch the log-probabilities that it gets alone? Asked of a whole stack, by its answers.

    `run(samples)` is called with the samples of one batch, lists of token ids from 3 to below `vocab_size`; it pads or packs
    them as the stack does, and returns for each a list, array or tensor [L - 1]: the natural logarithm of what each token
    from the second on was given. If it takes `layout`, it is asked for each of `layouts`, names that it understands (by
    default "left" and "right"). With `pad_token_id` samples hold that id as text, too. Under torchrun give each rank the
    same `seed`. What passes is told with the table; what is not a number never does.

    Raises `CollateError` where nothing can be told: answers of another form, an error in `run`, answers that are others when
    asked again (dropout), that do not depend on the tokens, or whose noise is as large as what is wrong.

    >>> import torch
    >>> weights = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    >>> def score(ids):  # each token is predicted from the mean of those before it
    ...     x = weights[ids].cumsum(0) / torch.arange(1, len(ids) + 1)[:, None]
    ...     return torch.log_softmax(x[:-1], -1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]
    >>> conformance(lambda samples: [score(ids) for ids in samples]).check().passed
    True
    >>> def packed(samples):  # one row, and its boundaries are lost
    ...     row = score(sum(samples, []))
    ...     starts = [sum(map(len, samples[:n])) for n in range(len(samples))]
    ...     return [row[start : start + len(ids) - 1] for start, ids in zip(starts, samples)]
    >>> {each.meaning for each in conformance(packed, seed=0).verdicts if each.batch == "two"}
    {'begins at the second sequence: boundaries are lost'}
    """
    ways = ways_of(run, layouts)
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else whole_number("seed", seed)
    draw = _drawer(seed, vocab_size, pad_token_id)
    batches = _batches(draw, pad_token_id)
    first, ask = next(iter(ways.items()))
    known = {tuple(ids): ask("alone", [ids])[0] for samples in batches.values() for ids in samples}
    probes = batches["ragged"] + batches["chunk edges"][:4]
    own = [known[tuple(ids)] for ids in probes]
    longer = {f"{n} behind": alone(ask, [ids + draw(n) for ids in probes]) for n in _BEHIND}
    behind = {name: [x[: len(y)] for x, y in zip(found, own)] for name, found in longer.items()}
    scale = measured(ask, probes, own, [*behind.values()], draw)
    verdicts = [_judged(first, name, found, own, scale, lambda *_: _AHEAD) for name, found in behind.items()]
    for layout, way in ways.items():
        if layout != first:
            verdicts.append(_judged(layout, "alone", alone(way, probes), own, scale, meaning))
        for name, samples in batches.items():
            said = partial(meaning, holding=[pad_token_id in ids for ids in samples])
            wanted = [known[tuple(ids)] for ids in samples]
            verdicts.append(_judged(layout, name, way(name, samples), wanted, scale, said))
    return Conformance(tuple(verdicts), scale, seed)


def _drawer(seed: int, vocab_size: int, pad_token_id: int | None) -> Draw:
    """Samples of a length; the first ids are left out, which often mean something, and the pad id."""
    whole_number("vocab_size", vocab_size, least=16)
    if pad_token_id is not None and not whole_number("pad_token_id", pad_token_id) < vocab_size:
        rule = f"It is an id of the vocabulary, below {vocab_size}."
        raise CollateError(explain("pad_token_id", str(pad_token_id), rule, "Give vocab_size= as the model has it."))
    drawn, ids = random.Random(seed), [x for x in range(3, vocab_size) if x != pad_token_id]
    return lambda length: drawn.choices(ids, k=length)


def _batches(draw: Draw, pad_token_id: int | None) -> dict[str, list[Sample]]:
    out = {name: [draw(length) for length in lengths] for name, lengths in LENGTHS.items()}
    out["ragged, turned"] = out["ragged"][::-1]
    out["copies"] = [out["chunk edges"][1]] * 3
    if pad_token_id is not None:
        pad = [pad_token_id]
        out["pad id as text"] = [draw(6), pad + draw(8), draw(4) + pad + draw(7), draw(5) + pad * 2, draw(14)]
    return out


def _judged(
    layout: str, batch: str, found: list[Tensor], known: list[Tensor], scale: Scale, said: Callable[..., str]
) -> Verdict:
    """What `said` makes of it where it is wrong."""
    error = difference(found, known)
    far = [(x - y).abs() if len(x) == len(y) else y.new_full((1,), math.inf) for x, y in zip(found, known)]
    each = [(d, n, t) for n, x in enumerate(far) for t, d in enumerate(x.tolist())]
    largest, n, t = max(each, key=lambda one: math.inf if math.isnan(one[0]) else one[0])
    right = error <= scale.limit  # what is not a number is not
    return Verdict(layout, batch, error, largest, n, t + 1, right, "" if right else said(found, known, scale.bound))
