"""Conformance: a stack gives each token in a batch the log-probability that it gives it in its sample alone. Only
`run(samples) -> log-probabilities` of the stack is called.

Samples are drawn, run alone, then in batches that show errors of padding, packing, chunks and order. The noise is measured
on the stack's own answers: the same sample again, beside a copy of itself, and with tokens behind it. A wrong answer is that
to a sample behind another text. If all noise is that of float32, we accept six times the noise. Else one token in a thousand
is much further off (another expert is chosen), and we accept six times the least noise, and a tenth of a wrong answer. Which
samples are wrong, and from which token on, tells the cause.
Legend: N samples, L tokens of a sample; the log-probability at t, of L - 1, is that of token t + 1.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from collate_npu.arrays import host_tensor, whole_number
from collate_npu.errors import CollateError, a_type, explain, explain_rows, printable, shape_of
from collate_npu.proof.measure import MARGIN, REMEDY, TIMES, apart, noise_limit
from collate_npu.validation import checked

Sample = list[int]
Ask = Callable[[str, list[Sample]], list[Tensor]]
"""The name of a batch and its samples to their log-probabilities, float64 `[L - 1]` each."""
RULE = "A sample of L tokens has L - 1 log-probabilities, one for each token from the second on."


def _ways_of(run: Any, layouts: Sequence[str] | None) -> dict[str, Ask]:
    """Return how each layout is asked for."""
    try:
        takes = "layout" in inspect.signature(run).parameters
    except (TypeError, ValueError):  # of a class of C
        takes = False
    if layouts is None:
        layouts = ("left", "right") if takes else ()
    if isinstance(layouts, str) or bool(layouts) != takes:
        got = f"{layouts!r} for a run that {'takes' if takes else 'does not take'} layout"
        rule = "layouts are names, each passed to run(samples, layout=name)."
        raise CollateError(explain("layouts", got, rule, "Write def run(samples, layout), or leave layouts out."))
    if not takes:
        return {"as it is": partial(_ask, run, "run")}
    return {name: partial(_ask, partial(run, layout=name), f"run, layout {name!r}") for name in layouts}


def _ask(run: Callable[..., Any], asked: str, name: str, samples: list[Sample]) -> list[Tensor]:
    """Return the answers to one batch, float64 `[L - 1]` each. Raises for what is no log-probabilities."""
    where = f"{asked}, batch {name!r}"
    try:
        given = run([list(ids) for ids in samples])  # of its own: it may write in them
        rows = [*given] if isinstance(given, Iterable) and not isinstance(given, (str, bytes, Mapping)) else None
    except CollateError as error:
        raise CollateError(f"{error} ({where})") from error
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        rule = f"run got {len(samples)} samples of {[len(ids) for ids in samples]} tokens."
        remedy = "Return a list, with one list for each sample; leave a layout that run refuses out of layouts."
        raise CollateError(explain(where, got, rule, remedy)) from error
    if rows is None or len(rows) != len(samples):
        got = a_type(given) if rows is None else f"{len(rows)} answers to {len(samples)} samples"
        raise CollateError(explain(where, got, RULE, "Return a list, with one list for each sample."))
    found = [host_tensor(f"{where}, sample {n}", row).double() for n, row in enumerate(rows)]
    lengths = [len(ids) - 1 for ids in samples]  # all there in another order: judged, not refused
    if not all(x.ndim == 1 for x in found) or sorted(map(len, found)) != sorted(lengths):
        bad = [(n, f"{shape_of(x)}, not [{L}]") for n, (x, L) in enumerate(zip(found, lengths)) if tuple(x.shape) != (L,)]
        remedy = "Return a list, an array or a tensor for each sample, without the first token, which nothing predicts."
        raise CollateError(explain_rows(where, bad, RULE, remedy))
    above = [(n, f"values up to {x.max():.3g}") for n, x in enumerate(found) if len(x) and (x.max() > 0.5 or x.sum() > 0)]
    if above:
        rule = "A log-probability is at most 0, rounding aside."
        raise CollateError(explain_rows(where, above, rule, "Return log_softmax of the logits: no loss, no probability."))
    return found


NAN = "not a number"
ORDER = "answers are another sample's: the order of the samples is lost"
MOVED = "moved by one token: each answer stands at its neighbour's place"
BOUNDARIES = "begins at the second sequence: boundaries are lost"
PADDING = "wrong with padding, right in the longest: padding is read"
PAD_ID = "only where a token is the pad id: real tokens are masked"


def meaning(found: Sequence[Tensor], known: Sequence[Tensor], bound: float, holding: Sequence[bool] = ()) -> str:
    """Return what it means that `found` differs from `known`, N float tensors `[L - 1]` each, by more than `bound` at a
    token.

    `holding` says which samples hold the pad id as text. "" for a pattern that is not known.

    >>> known = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -4.0]), torch.tensor([-5.0, -6.0])]
    >>> meaning(known[::-1], known, 1e-3)
    "answers are another sample's: the order of the samples is lost"
    """
    if not all(bool(x.isfinite().all()) for x in found):
        return NAN
    if [len(x) for x in found] != [len(y) for y in known]:  # as many of each length, or they were refused
        return ORDER
    far = [(x - y).abs() for x, y in zip(found, known)]
    wrong = [n for n, x in enumerate(far) if bool((x > bound).any())]
    longer = [n for n in wrong if len(known[n]) > 1]  # one number alone may be near by chance
    if longer and all(any(m != n and _near(found[n], known[m], bound) for m in range(len(known))) for n in longer):
        return ORDER
    pairs = [(found[n], known[n]) for n in longer]
    if pairs and all(_near(x[1:], y[:-1], bound) or _near(x[:-1], y[1:], bound) for x, y in pairs):
        return MOVED
    if wrong and any(holding) and all(holding[n] for n in wrong):
        return PAD_ID
    if wrong and max(len(known[n]) for n in wrong) < max(map(len, known)):
        return PADDING
    return BOUNDARIES if wrong and 0 not in wrong else ""


def _near(x: Tensor, y: Tensor, bound: float) -> bool:
    return x.shape == y.shape and bool(((x - y).abs() <= bound).all())


_FINE, _ROUGH = 5e-6, 10
"""Up to this the noise is that of float32. Else a part of what is lost passes: an expert may be chosen otherwise."""
_BEFORE = 8
"""Tokens of a text before a sample."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Relative errors over all log-probabilities of some samples, and what they say of one."""

    noise: float
    limit: float
    """What is accepted."""
    lost: float
    """Of a lost past: a text before each sample."""
    bound: float
    """Of one log-probability, in nats: what is further off is wrong."""


Draw = Callable[[int], Sample]
"""Another sample of a length."""


def _behind(ask: Ask, samples: Sequence[Sample], n: int, draw: Draw, steady: bool) -> tuple[list[Tensor], bool]:
    """Answers to samples with n tokens behind them, float64 `[L - 1]` each, and whether they read these tokens.

    As many other tokens behind are as wide: what differs between the two was read. Where experts are chosen by rounding
    that shows nothing: steady is a stack that rounds as float32 does beside a copy.
    """
    longer = [_each_alone(ask, [ids + draw(n) for ids in samples]) for _ in range(2)]
    found, others = ([x[: len(ids) - 1] for x, ids in zip(answers, samples)] for answers in longer)
    return found, steady and difference(others, found) > _FINE


def _scale_of(ask: Ask, samples: Sequence[Sample], own: list[Tensor], rounded: Sequence[list[Tensor]], draw: Draw) -> Scale:
    """The scale, from answers to samples alone, float64 `[L - 1]` each, and others to them that differ by rounding.

    Raises `CollateError` where a right answer and a wrong one look the same, or is none.
    """
    if not all(bool(x.isfinite().all()) for x in own):
        got = "NaN or infinity for a sample alone"
        raise CollateError(explain("run", got, "Batches are compared with samples alone.", "Correct run first."))
    short = [n for n, ids in enumerate(samples) if len(ids) < 48]  # in a long sample the past is far away
    later = _each_alone(ask, [draw(_BEFORE) + samples[n] for n in short])
    lost = difference([x[_BEFORE:] for x in later], [own[n] for n in short])
    again = _each_alone(ask, samples[::-1])[::-1]
    if not difference(again, own) <= lost / (MARGIN * TIMES):
        got = f"different numbers for the same sample alone, asked twice (relative difference {difference(again, own):.1e})"
        raise CollateError(explain("run", got, "run is repeatable.", "Switch dropout off."))
    if not lost > _limit(0.0):
        got = "answers that do not depend on the tokens"
        raise CollateError(explain("run", got, "They prove nothing.", "Let it run the model."))
    equal = [found for found in rounded if difference(found, own) < lost / (MARGIN * TIMES)]
    if not equal:
        got = f"noise of {difference(rounded[0], own):.1e}, where a text before a sample makes {lost:.1e}"
        rule = f"A wrong answer must differ by {MARGIN * TIMES} times the noise, or nothing is proved."
        raise CollateError(explain("run", got, rule, f"{REMEDY}, or with a trained model."))
    equal.insert(0, again)  # those without a difference tell nothing; one coarser than float32 shows that the stack is
    errors = [error for found in equal if (error := difference(found, own)) > 0]
    fine = bool(errors) and max(errors) <= _FINE
    noise = max(errors) if fine else min(errors, default=0.0)
    limit = _limit(noise) if fine else max(_limit(noise), lost / _ROUGH)
    whole = torch.cat(own)
    furthest = [float((torch.cat(x) - whole).abs().max()) for x in equal if difference(x, own) <= TIMES * noise]
    return Scale(noise, limit, lost, max(limit * float(whole.square().mean().sqrt()), TIMES * max(furthest, default=0.0)))


def _limit(noise: float) -> float:
    """Return what is accepted: at least the rounding of float32 on any device."""
    return noise_limit(noise, torch.zeros(()))


def _each_alone(ask: Ask, samples: Iterable[Sample]) -> list[Tensor]:
    """Return the answer to each sample alone."""
    return [ask("alone", [ids])[0] for ids in samples]


def difference(found: Sequence[Tensor], known: Sequence[Tensor]) -> float:
    """|found - known| / |known| over all tokens; infinite where the lengths differ."""
    same = [len(x) for x in found] == [len(y) for y in known]
    return apart(found, known) if same else math.inf


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
CALLS, CALLS_OF_LAYOUT = 98, 18
"""How often a stack is called, mostly with one sample, and once more for each layout."""
_BEHIND = (1, 33)
"""Tokens that are put behind a sample: no answer before them may notice, though it is another width and another chunk."""
_AHEAD = "tokens behind move what is before them: a padded end is read, or the model looks ahead"


@dataclass(frozen=True, slots=True)
class BatchVerdict:
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


LEGEND = "error: relative, over all tokens of a batch; largest: of one log-probability, in nats; at: where that is"
"""What the columns of the table are."""


@dataclass(frozen=True, slots=True)
class Conformance:
    """The result of `conformance`: true if every batch is right. `str()` is the table."""

    verdicts: tuple[BatchVerdict, ...]
    scale: Scale
    seed: int

    @property
    def passed(self) -> bool:
        """Return True if every batch is right."""
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
        """Return the verdict in one line."""
        wrong, all_ = sum(not each.right for each in self.verdicts), len(self.verdicts)
        return f"conformance: {f'WRONG in {wrong} of' if wrong else 'right in all'} {all_} batches (seed={self.seed})"

    def __str__(self) -> str:
        table = [("layout", "batch", "", "error", "largest", "at", "what it means")]
        for one in self.verdicts:
            word, at = ("right", "") if one.right else ("WRONG", f"sample {one.sample}, token {one.token}")
            table.append((one.layout, one.batch, word, f"{one.error:.1e}", f"{one.largest:.1e}", at, one.meaning))
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table)
        passes = f"A relative error up to {self.scale.limit:.1e} passes (noise: {self.scale.noise:.1e})."
        passes += f" A lost past, a text before each sample, makes {self.scale.lost:.1e}."
        return printable("\n".join([self.headline, passes, "", *lines, "", LEGEND]))

    __repr__ = __str__  # as the last line of a cell


@checked
def conformance(
    run: Callable[..., Any],
    *,
    vocab_size: int = 256,
    pad_token_id: int | None = None,
    layouts: Sequence[str] | None = None,
    seed: int | None = None,
) -> Conformance:
    """Compare the log-probabilities that a stack gives to samples in a batch with those of each sample alone.

    `run(samples)` is called with the samples of one batch, lists of token ids from 3 to below `vocab_size`; it pads or packs
    them as the stack does, and returns for each a list, array or tensor [L - 1]: the natural logarithm of what each token
    from the second on was given. If it takes `layout`, it is asked for each of `layouts`, names that it understands (by
    default "left" and "right"). With `pad_token_id` samples hold that id as text, too. Under torchrun give each rank the
    same `seed`. The table shows what passes; what is not a number never does.

    Raises `CollateError` where nothing can be proved: answers of another form, an error in `run`, answers that are others
    when asked again (dropout), that do not depend on the tokens, or whose noise is as large as what is wrong.

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
    ways = _ways_of(run, layouts)
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else whole_number("seed", seed)
    draw = _drawer(seed, vocab_size, pad_token_id)
    batches = {name: [draw(length) for length in lengths] for name, lengths in LENGTHS.items()}
    batches["ragged, turned"] = batches["ragged"][::-1]
    batches["copies"] = [batches["chunk edges"][1]] * 3
    if pad_token_id is not None:
        pad = [pad_token_id]
        batches["pad id as text"] = [draw(6), pad + draw(8), draw(4) + pad + draw(7), draw(5) + pad * 2, draw(14)]
    first, ask = next(iter(ways.items()))
    known = {tuple(ids): ask("alone", [ids])[0] for samples in batches.values() for ids in samples}
    probes = batches["ragged"] + batches["chunk edges"][:4]
    own = [known[tuple(ids)] for ids in probes]
    copied = [ask("copies", [ids, ids])[0] for ids in probes]  # the first stands behind nothing, whatever is lost
    behind = {n: _behind(ask, probes, n, draw, difference(copied, own) <= _FINE) for n in _BEHIND}
    scale = _scale_of(ask, probes, own, [copied, *(found for found, read in behind.values() if not read)], draw)
    strict = replace(scale, limit=_limit(0.0))
    verdicts = [
        _judged(first, f"{n} behind", found, own, strict if read else scale, lambda *_: _AHEAD)
        for n, (found, read) in behind.items()
    ]
    for layout, way in ways.items():
        if layout != first:
            verdicts.append(_judged(layout, "alone", _each_alone(way, probes), own, scale, meaning))
        for name, samples in batches.items():
            explained = partial(meaning, holding=[pad_token_id in ids for ids in samples])
            wanted = [known[tuple(ids)] for ids in samples]
            verdicts.append(_judged(layout, name, way(name, samples), wanted, scale, explained))
    return Conformance(tuple(verdicts), scale, seed)


@checked
def check_step(step: Callable[[list[Sample]], Any], *, vocab_size: int = 256, seed: int | None = None) -> float:
    """Compare a training step over several samples with these samples alone, and return the relative difference.

    `step(samples)` is called with lists of token ids. It shares them out over micro-batches and ranks as your training does,
    and returns the gradient of the step, before it is clipped, or its loss: the mean over all tokens that are predicted.

    Raises `AssertionError` for another mean, as where each micro-batch divides by its own tokens, and `CollateError` where
    nothing can be proved.

    >>> def tokens(ids):  # the loss of each token is its id
    ...     return torch.tensor(ids[1:]).double()
    >>> check_step(lambda samples: torch.cat([tokens(ids) for ids in samples]).mean()) < 1e-9
    True
    >>> check_step(lambda samples: sum(tokens(ids).mean() for ids in samples) / len(samples), seed=0)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    AssertionError: a step of several samples is wrong by 3.6e-02 (seed=0): it is the mean of its micro-batches...
    """
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else whole_number("seed", seed)
    draw = _drawer(seed, vocab_size, None)
    samples = [draw(length) for length in LENGTHS["ragged"]]
    alone = [_stepped(step, [ids]) for ids in samples]
    copies, found = [_stepped(step, [ids] * len(samples)) for ids in samples], _stepped(step, samples)
    if len(sizes := {len(x) for x in (*alone, *copies, found)}) > 1:
        got = f"{sorted(sizes)} numbers, by the samples"
        raise CollateError(explain("step", got, "They are as many each time.", "Return zeros for what has no gradient."))
    weights = torch.tensor([len(ids) - 1.0 for ids in samples]).double()
    known, mean = weights @ torch.stack(alone) / weights.sum(), torch.stack(alone).mean(0)  # of micro-batches of one sample
    lost, error = (apart([x], [known]) for x in (mean, found))
    noise = apart(*([x / x.norm() for x in each] for each in (copies, alone)))  # of directions: a factor is no noise
    limit = max(_limit(noise), _ROUGH * _FINE)  # a token of hardly any direction rounds more where it is padded
    if not lost > MARGIN * limit:
        got = f"samples whose plain mean is off by {lost:.1e}, where copies of a sample differ from it by {noise:.1e}"
        remedy = "Switch dropout off, use float32, and see that packed sequences do not see each other."
        raise CollateError(explain("step", got, "A wrong mean must differ by more.", remedy))
    if not error <= limit:
        alike = apart([found], [mean]) <= limit
        why = "it is the mean of its micro-batches, not of their tokens" if alike else "it is no mean of them alone"
        remedy = "Multiply the loss of each micro-batch by its loss_weights, or divide by the tokens of the whole step."
        remedy += " If you do, check_delivery names the layer that reads padding or another sequence." * (not alike)
        raise AssertionError(f"a step of several samples is wrong by {error:.1e} (seed={seed}): {why}. {remedy}")
    return error


def _stepped(step: Callable[[list[Sample]], Any], samples: list[Sample]) -> Tensor:
    return host_tensor("step", step([list(ids) for ids in samples])).double().flatten()


def _drawer(seed: int, vocab_size: int, pad_token_id: int | None) -> Draw:
    """Samples of a length; the first ids are left out, which often mean something, and the pad id."""
    whole_number("vocab_size", vocab_size, least=16)
    if pad_token_id is not None and not whole_number("pad_token_id", pad_token_id) < vocab_size:
        rule = f"It is an id of the vocabulary, below {vocab_size}."
        raise CollateError(explain("pad_token_id", str(pad_token_id), rule, "Give vocab_size= as the model has it."))
    drawn, passed = random.Random(seed), vocab_size if pad_token_id is None or pad_token_id < 3 else pad_token_id
    last = vocab_size - (passed < vocab_size)
    return lambda length: [x + (x >= passed) for x in (drawn.randrange(3, last) for _ in range(length))]


def _judged(
    layout: str, batch: str, found: list[Tensor], known: list[Tensor], scale: Scale, explained: Callable[..., str]
) -> BatchVerdict:
    """Return the verdict on one batch; if it is wrong, `explained` gives the meaning."""
    error = difference(found, known)
    far = [(x - y).abs() if len(x) == len(y) else y.new_full((1,), math.inf) for x, y in zip(found, known)]
    each = [(d, n, t) for n, x in enumerate(far) for t, d in enumerate(x.tolist())]
    largest, n, t = max(each, key=lambda one: math.inf if math.isnan(one[0]) else one[0])
    right = error <= scale.limit  # what is not a number is not
    means = "" if right else explained(found, known, scale.bound)
    return BatchVerdict(layout, batch, error, largest, n, t + 1, right, means)
