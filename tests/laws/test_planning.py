"""Planning against the oracle: every sample once, no batch over its budget, as many on each rank, and weights of a step.

Legend: N samples, R ranks, K batches of all ranks, L tokens of one sample.
"""

import json

import numpy as np
import oracle
import strategies as make
import torch
from laws.compared import refused, taken
from strategies import Drawn, law

from collate_npu.collate import BalancedBatchSampler, loss_weights


def options_of(drawn: Drawn):
    options = {"max_tokens": 1 + drawn.below(40), "num_replicas": 1 + drawn.below(4), "seed": drawn.below(5)}
    options |= {name: drawn.chance() for name in ("pack", "shuffle", "drop_last")}
    return options | {"width": drawn.pick((None, 1 + drawn.below(24)))}


@law
def test_a_plan_keeps_its_promises(drawn):
    options, L, epoch = options_of(drawn), drawn.pick((3, 12, 40)), drawn.below(3)
    lengths = [1 + drawn.below(L) for _ in range(1 + drawn.below(24))]
    R, room = options["num_replicas"], options["width"] or options["max_tokens"]
    given = make.held(drawn, lengths)
    bad = room > options["max_tokens"] or max(lengths) > room
    made = taken(lambda: BalancedBatchSampler(given, rank=None, **options), bad, "something is over the budget", given)
    if made is None:
        return
    made.set_epoch(epoch)
    whole = refused(lambda: list(made), len(lengths) < R, "a rank has no sample")
    if whole is None:
        assert len(lengths) < R or (not options["drop_last"] and not oracle.fills_steps(lengths, R, options)), "refused"
        return
    assert len(whole) == len(made)
    assert len(whole) % R == 0
    keeps_promises(whole, lengths, room, options)
    made.set_epoch(epoch + 1)
    assert len(list(made)) == len(whole)
    assert options["shuffle"] or list(made) == whole
    goes_on(drawn, lengths, options, epoch, whole)


def keeps_promises(whole, lengths, room, options) -> None:
    samples = [n for batch in whole for n in batch]
    out = [length for n, length in enumerate(lengths) if n not in samples]
    assert len(set(samples)) == len(samples)
    assert options["drop_last"] or not out
    assert oracle.fewest(out, options) < options["num_replicas"], "more is left out than fills no step"
    for batch in whole:
        sizes = [lengths[n] for n in batch]
        assert sizes
        assert oracle.computed(sizes, options) <= options["max_tokens"]


def goes_on(drawn: Drawn, lengths, options, epoch, whole) -> None:
    """Each rank has its part of one plan; what was saved in the middle gives the rest, and then all again."""
    R = options["num_replicas"]
    rank, done = drawn.below(R), drawn.below(len(whole) // R + 1)
    make_one = lambda **other: BalancedBatchSampler(lengths, rank=rank, **options | other)  # noqa: E731
    one, other = make_one(), make_one()
    one.set_epoch(epoch)
    assert len(one) == len(whole) // R
    running = iter(one)
    assert [next(running) for _ in range(done)] == whole[rank::R][:done]
    state = json.loads(json.dumps(one.state_dict()))
    other.load_state_dict(state)
    assert list(other) == list(running) == whole[rank::R][done:]
    assert list(other) == whole[rank::R]
    unlike = drawn.pick(({"seed": 5}, {"max_tokens": 41}, *({name: not options[name]} for name in ("pack", "shuffle"))))
    refused(lambda: make_one(**unlike).load_state_dict(state), True, f"it was saved without {unlike}")


@law
def test_weights_make_the_mean_of_a_step(drawn):
    """The mean losses of a step, weighed, are the mean over all that the step predicts."""
    per, key = drawn.pick(("token", "label", "sequence")), drawn.pick(("labels", "labels", "shift_labels"))
    step, counts = [], []
    for _ in range(1 + drawn.below(3)):
        rows = make.rows_of(drawn, width=6)
        labels = [[3 if n and drawn.chance() else oracle.IGNORED for n in row] for row in rows]
        batch = {key: drawn.pick((torch.tensor, np.array, list))(labels)}
        batch |= {"attention_mask_2d": torch.tensor(oracle.keep(rows))}
        step.append(batch | ({"segment_ids": torch.tensor(rows)} if max(map(max, rows)) > 1 else {}))
        first = int(per == "token" and key == "labels")
        predicted = [label for row in labels for label in row[first:] if label != oracle.IGNORED]
        counts.append(len(oracle.lengths(rows)) if per == "sequence" else len(predicted))
    if lacks := per != "sequence" and drawn.below(8) == 7:
        del step[-1][key]
    found = taken(lambda: loss_weights(step, per=per), lacks or not sum(counts), "a step needs a label on", step)
    assert found in (None, [count / (sum(counts) or 1) for count in counts])
