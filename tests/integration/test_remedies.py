"""Each remedy is followed, through each door that shows it, two steps deep: the call is then right, or it is a dead end.

`FAULTS` are batches of a user, and what they truly are. `REMEDIES` are the words of errors, and what a user does who reads
them. An error without words of this table fails: a remedy that nobody follows may be dead.
"""

import re
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Pattern, Segments, adapt, wrap_collator
from collate_npu.integrations.accelerate import DispatchCollator
from collate_npu.integrations.torchtitan import TitanCollator
from collate_npu.masks import dense
from collate_npu.testing import tiny_model

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("newest_transformers")]
NO, EOS, STEPS = -100, 63, 2
RIGHT, LEFT, EVEN = Segments.from_lengths([4, 6]), Segments.from_lengths([4, 6], side="left"), Segments.from_lengths([6, 6])
PACKED, FLAT = Segments([[1, 1, 1, 2, 2, 2], [1, 1, 2, 2, 2, 2]]), Segments.from_lengths([[4, 6]])
HOLE, TOKENS = Segments([[1, 1, 0, 1, 1, 1], [1] * 6]), torch.tensor([5, 9, 31, 7, 22, 13, 8, 40, 11, 6, 27, 50])
TAIL, NARROW = Segments([[1] * 4 + [2] * 5 + [0]]), Segments.from_lengths([2, 6], side="left")
SLIDING, KEEP = Pattern.sliding(2), {"polarity": "keep", "pattern": "causal"}


@dataclass(frozen=True)
class Call:
    """What a user has at a door, and what is true of it: the sequences, ids and labels `[B, S]`, the options that describe
    the masks. `numbers`: False where the samples alone do not tell the loss."""

    batch: Any
    segments: Segments
    ids: torch.Tensor
    labels: torch.Tensor
    declared: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    titan: dict[str, Any] = field(default_factory=dict)
    door: str = ""
    adapted: bool = False
    numbers: bool = True
    wanted: float = 0.0

    @property
    def keep(self):
        return self.segments.keep

    def having(self, **keys):
        """This call with these keys of the batch; None takes one out."""
        return replace(self, batch={key: value for key, value in {**self.batch, **keys}.items() if value is not None})

    def choosing(self, **options):
        """This call with these options; None takes one out."""
        chosen = {name: value for name, value in {**self.options, **options}.items() if value is not None}
        return replace(self, options=chosen)

    def declaring(self, *names):
        known = {name: self.declared[name] for name in names if name in self.declared}
        plain = known.get("pattern", "causal") == "causal"
        return replace(self.choosing(**known), numbers=self.numbers and plain) if known else None

    def through(self, door):
        return replace(self, door=f"{door} {self.door.partition(' ')[2]}")

    def told(self, **more):
        """This call with the mask of its lengths as the only word about them."""
        told = {key: None for key in self.batch if key not in ("input_ids", "labels")}
        return self.having(**told | {"attention_mask": self.keep.long(), **more})

    def samples(self):
        kept = [(b, slice(at, to), self.keep[b, at:to]) for b, at, to in self.segments.spans]
        return [(self.ids[b, at][keep], self.labels[b, at][keep]) for b, at, keep in kept]

    def laid(self, lengths):
        """The same sequences at the places of rows of such lengths."""
        again = laid(self.samples(), Segments.from_lengths(lengths))
        held = {name: getattr(again, name) for name in ("batch", "segments", "ids", "labels")}
        return replace(self, **held).choosing(pattern=None)

    def rows(self):
        """Each sequence in a row of its own, padded right."""
        return self.laid([len(ids) for ids, _ in self.samples()])

    def flat(self):
        """All sequences in one flat row."""
        known = self.laid([[len(ids) for ids, _ in self.samples()]])
        row = known.segments
        return known.told(attention_mask=None, cu_seq_lens_q=row.cu_seqlens, position_ids=row.position_ids)

    def only(self, rows):
        """These rows of the batch."""
        kept = {key: value[rows] for key, value in self.batch.items()}
        segments, ids = Segments(self.segments.ids[rows]), self.ids[rows]
        return replace(self, batch=kept, segments=segments, ids=ids, labels=self.labels[rows], numbers=False)

    def truth(self, key):
        """What this key should hold."""
        segments, given = self.segments, self.batch.get(key)
        offsets = torch.cat([segments.cu_seqlens[:-1], torch.tensor([segments.shape[1]])])
        mask = dense(segments, polarity="bias") if getattr(given, "ndim", 2) == 4 else self.keep.long()
        own = {"input_ids": self.ids, "labels": self.labels, "attention_mask": mask, "attention_mask_2d": self.keep}
        own |= dict.fromkeys(("cu_seq_lens_q", "cu_seqlens"), offsets)
        own |= {"position_ids": segments.position_ids, "segment_ids": segments.ids, "max_length_q": segments.longest_span}
        return own.get(key)

    def is_true(self, key):
        true = self.truth(key)
        return true is not None and key in self.batch and torch.equal(true, self.batch[key].to(true))


def laid(samples, segments, **keys):
    """Samples at the places of these Segments, and the mask of their lengths."""
    ids, labels = torch.zeros(segments.shape, dtype=torch.long), torch.full(segments.shape, NO)
    for whole, part in ((ids, 0), (labels, 1)):
        whole[segments.keep] = torch.cat([sample[part] for sample in samples])
    batch = {"input_ids": ids, "labels": labels, "attention_mask": segments.keep.long()}
    return Call(batch, segments, ids, labels).having(**keys)


def of(segments, declared=None, **keys):
    real = TOKENS[: segments.num_tokens]
    call = laid([(real, real)], segments, **keys)
    return replace(call, declared=declared or {})


def moved(call):
    return call.having(labels=nn.functional.pad(call.labels[:, 1:], (0, 1), value=NO))


def lying(**keys):
    return of(FLAT).flat().having(**keys)


def copied(call):
    """Labels are a copy of the ids, at padding too."""
    return call.having(labels=call.batch["input_ids"])


def taught(segments, ignored=(), pad=EOS, by_ids=False):
    """As data sets write it: an end token, which may be the id of padding; these tokens of each sequence are not learned."""
    lengths = [n for row in segments.lengths for n in row]
    own = [torch.cat([part[:-1], torch.tensor([EOS])]) for part in TOKENS[: sum(lengths)].split(lengths)]
    call = laid([(ids, ids.index_fill(0, torch.tensor(ignored).long() % len(ids), NO)) for ids in own], segments)
    ids = call.ids.masked_fill(~segments.keep, pad)
    return call.having(input_ids=ids, attention_mask=(ids != EOS if by_ids else segments.keep).long())


INVERTED, BIAS, EYE = (~RIGHT.keep).long(), dense(RIGHT, polarity="bias"), torch.eye(6, dtype=torch.bool)
UNLEARNED = of(HOLE).labels.index_put((torch.tensor(0), torch.tensor(3)), torch.tensor(NO))  # which padding would predict
STARTS = torch.tensor([[0, 0, 0, 0, 5, 9], [22, 13, 8, 40, 11, 6]])
LIKE_PADDING = STARTS.masked_fill(STARTS == 0, NO)
FAULTS = {
    "labels at padding, left": copied(taught(LEFT)),
    "moved": moved(of(RIGHT)),
    **{f"moved, ends not learned, {rows.padding_side}": moved(taught(rows, (0, 1, -1))) for rows in (RIGHT, LEFT)},
    "copied, ids != pad": copied(taught(RIGHT, by_ids=True)),
    "a mask of learned tokens": of(RIGHT, labels=RIGHT.keep),
    "float ids": of(RIGHT, input_ids=of(RIGHT).ids.float()),
    "labels cut": of(RIGHT, labels=of(RIGHT).labels[:, :4]),
    "inverted, without labels": of(RIGHT, {"polarity": "masked"}, attention_mask=INVERTED, labels=None),
    "zeros": of(EVEN, {"polarity": "bias"}, attention_mask=torch.zeros(2, 6)),
    "no mask": of(RIGHT, attention_mask=None),
    "additive, two dimensions": of(RIGHT, attention_mask=(1 - RIGHT.keep.float()) * -1e9),
    "a mask cut": of(RIGHT, attention_mask=RIGHT.keep[:, :4]),
    "a mask of other rows": of(RIGHT, attention_mask=torch.ones(3, 6)),
    "ids and mask": of(RIGHT, attention_mask=torch.ones(2, 6), segment_ids=RIGHT.ids),
    "packed": of(PACKED, attention_mask=PACKED.ids),
    "packed, dense alone": of(PACKED, attention_mask=dense(PACKED)),
    "a hole": replace(of(HOLE, labels=UNLEARNED), labels=UNLEARNED),
    "left": of(LEFT),
    "sliding": of(RIGHT, {"pattern": SLIDING}, attention_mask=dense(RIGHT, pattern=SLIDING)),
    "dense, unexplained": of(RIGHT, attention_mask=dense(RIGHT) | EYE.flip(0)),
    "dense, causal over padding": of(LEFT, attention_mask=dense(EVEN)),
    "dense, as bidirectional": of(RIGHT, {"polarity": "keep"}, attention_mask=dense(RIGHT, pattern="bidirectional")),
    "heads": of(LEFT, attention_mask=torch.cat([dense(LEFT), dense(LEFT, pattern=SLIDING)], 1)),
    "ALiBi": of(RIGHT, attention_mask=BIAS - torch.rand(2, 1, 6, 6)),
    "NaN": of(RIGHT, attention_mask=BIAS * torch.nan),
    "one row of keys": of(RIGHT, KEEP, attention_mask=RIGHT.keep[:, None, None]),
    "a shard": of(RIGHT, attention_mask=BIAS[:, :, :3]),
    "offsets that fall": lying(cu_seq_lens_q=torch.tensor([0, 6, 4, 10])),
    "offsets beside positions": lying(cu_seq_lens_q=torch.tensor([0, 6, 10])),
    "two offsets": lying(cu_seqlens=torch.tensor([0, 6, 10])),
    "flat, nothing beside": lying(cu_seq_lens_q=None, position_ids=None),
    "one flat row, nothing beside": of(Segments.from_lengths([10]), attention_mask=None),
    "flat": lying(),
    "a wrong longest length": lying(max_length_q=2),
    "a wrong tail": lying(num_padding=2),
    "positions as floats": of(RIGHT, position_ids=torch.rand(2, 6)),
    "positions cut": of(RIGHT, position_ids=torch.arange(4).expand(2, 4)),
    "old lengths": of(RIGHT, seq_lens=torch.tensor([4, 4])),
    "one row": replace(of(Segments.from_lengths([6])), batch={"input_ids": TOKENS[:6], "attention_mask": torch.ones(6)}),
    "tokens of two widths": of(RIGHT, tokens=torch.ones(2, 3, dtype=torch.long)),
    "text": of(RIGHT, input_ids=[["a"] * 6] * 2),
    "rows of preference data": of(RIGHT).having(input_ids=None, chosen_input_ids=of(RIGHT).ids),
    "a row of padding alone": of(Segments.from_lengths([0, 6])),
    "a row that looks padded": replace(of(EVEN, input_ids=STARTS, labels=LIKE_PADDING), ids=STARTS, labels=LIKE_PADDING),
    "the other polarity": of(RIGHT, {"polarity": "masked"}, attention_mask=~dense(RIGHT)).choosing(polarity="keep"),
    "a tail that nothing tells": of(TAIL, labels=None, attention_mask=None, cu_seq_lens_q=torch.tensor([0, 4, 9])),
    "a key of one's own": of(RIGHT, mine=torch.rand(2, 6)),
    "an id that returns": of(RIGHT, attention_mask=None, segment_ids=torch.tensor([[1, 2, 1, 2, 0, 0], [1] * 6])),
    "ids of sequences as floats": of(RIGHT, attention_mask=None, segment_ids=torch.rand(2, 6)),
}
IDIOMS = {
    "text": {}, "another pad id": {"pad": 0}, "completion only": {"ignored": (0, 1)}, "assistant only": {"ignored": (0, 2)},
    "ends not learned": {"ignored": (0, 1, -1)}, "eos by ids != pad": {"by_ids": True},
    "eos by ids != pad, completion only": {"ignored": (0, 1), "by_ids": True},
}  # fmt: skip
RIGHT_AT_ONCE = {
    f"{name}, {rows.padding_side}": taught(rows, **how) for name, how in IDIOMS.items() for rows in (RIGHT, LEFT)
}
"""No fault of data sets: doors of transformers models ask for nothing."""


# --- doors


@cache
def model_of(family):
    return tiny_model(family, vocab_size=64).eval()


def through_adapt(model, call):
    with adapt(model, **call.options):
        return model(**call.batch)


def of_rows(model, call):
    """Each row is a sample, with the mask that it has there."""
    rows = range(len(call.batch["input_ids"]))
    held = {key: value for key, value in call.batch.items() if not isinstance(value, int) and len(value) == len(rows)}
    samples = [{key: value[b] for key, value in held.items()} for b in rows]
    return PaddingCollator(pad_token_id=0, model=model, **call.options)(samples)


def behind(call, model=None, **options):
    return wrap_collator(lambda _: call.batch, model, **options, **call.options)


STACKS = ("megatron", "mindspeed", "mindspeed_dense", "verl_npu", "torchtitan")
DOORS = {
    "adapt": through_adapt,
    "BatchAdapter": lambda model, call: BatchAdapter(model, **call.options)(call.batch),
    "wrap_collator": lambda model, call: behind(call, model)([{}]),
    "PaddingCollator": of_rows,
    **{
        name: lambda model, call, name=name: BatchAdapter(model.config, **{"consumer": name} | call.options)(call.batch)
        for name in STACKS
    },
    "DispatchCollator": lambda model, call: DispatchCollator(behind(call, attention_mask="2d"))([{}]),
    "TitanCollator": lambda model, call: TitanCollator(behind(call, attention_mask="2d"), **call.titan)([{}]),
}


ELSEWHERE = {
    ("flat, nothing beside", "PaddingCollator"): "a sample without boundaries is one sequence",
    ("rows of preference data", "PaddingCollator"): "these are no samples",
    ("the other polarity", "PaddingCollator"): "it has no such option",
    ("rows of preference data", "adapt"): "the model's own error: it gets no tokens",
}
"""Faults that are none at this door."""


def wanted(model, call):
    """The loss of each sequence alone, weighted by its targets."""
    alone = [(model(input_ids=ids[None], labels=own[None]).loss, (own[1:] >= 0).sum()) for ids, own in call.samples()]
    return sum(loss * n for loss, n in alone if n) / sum(n for _, n in alone)


def run(call):
    """Raise what the door raises; fail where its numbers are not those of the samples."""
    name, _, family = call.door.partition(" ")
    model = model_of(family)
    with torch.no_grad(), adapt(model) if call.adapted else nullcontext():
        out = DOORS[name](model, call)
        if name not in (*STACKS, "TitanCollator", "DispatchCollator") and call.numbers and "labels" in call.batch:
            loss = out.loss if name == "adapt" else model(**out).loss
            assert abs(loss - call.wanted) < 1e-4, f"{loss} for {call.wanted}"


# --- what a user does

ANEW = (
    "Build them together|Cut or build both together|Pass a dense tensor|Convert them where the sample is|Pass ids, or|"
    r"Pass input_ids.long|Convert the tensor first|Give each sequence of a row its own id|Pass int32 \[B, S\]|"
    r"Look for inf - inf|Derive from the whole mask|Let the last offset count the tail|Pass \[0, \*accumulate|"
    r"Convert additive masks with|Pad labels with -100|Pad them with the|Let each sample carry labels|"
    r"or a copy of input_ids with -100|np.where\(learned|input_ids.masked_fill\(~learned|Pass max_length_q=\d"
)
"""All of these say what the key that the error names should hold."""


def keys(when=lambda call: True, **to):
    """The call with these keys of the batch anew, where the words speak of such a case; None takes a key out."""

    def follow(call, _):
        found = {key: value(call, key) if callable(value) else value for key, value in to.items()}
        return call.having(**found) if when(call) else None

    return follow


def if_packed(call, key):
    return call.truth(key) if call.segments.packed else None


def drops_padding(call):
    """True if what the mask drops is padding, and nothing else."""
    given = call.batch.get("attention_mask")
    return given is not None and torch.equal(given != 0, call.keep)


def inverted(call):
    given = call.batch.get("attention_mask")
    return given is not None and given.shape == call.keep.shape and torch.equal(given == 0, call.keep)


def miscounted(call):
    return not call.is_true("position_ids")


def starts_twice(call):
    """True if a first token that is real comes twice, as padding would."""
    return call.segments.padding_side == "none" and torch.equal(call.ids[0, :1], call.ids[0, 1:2])


def with_right_keys(call, _):
    """The keys that say what is true stay, of others none."""
    others = [key for key in call.batch if key not in ("input_ids", "labels")]
    right = {key: call.batch[key] for key in others if call.is_true(key)}
    return call.having(**dict.fromkeys(others) | right) if right else call.told()


def with_a_label(call, _):
    labels = call.labels.clone()
    labels[0, 1] = call.ids[0, 1]
    return replace(call.having(labels=labels), labels=labels, numbers=False) if starts_twice(call) else None


def with_padding_free(call, _, **chosen):
    inside = call.door.startswith(("PaddingCollator", "wrap_collator", "TitanCollator"))
    return (call.rows() if inside else call.flat()).choosing(padding_free=True, **chosen)


def in_rows(call, _):
    return call.rows().choosing(padding_free=False if "padding_free" in call.options else None)


true = Call.truth
REMEDIES: dict[str, Any] = {
    # words: the call as they say; None where they speak of another case
    ANEW: lambda call, key: keys(**{"segment_ids" if key == "segment" else key: true})(call, key),
    r"If they are padding: labels\[attention_mask == 0\] = -100": keys(drops_padding, labels=true),
    "[mM]ake (the masks?|it) from the lengths|rebuild both from the lengths": lambda call, _: (
        None if drops_padding(call) else call.told()
    ),
    r"inverted: mask == 0|Invert it \(mask == 0\)|or invert them \(mask == 0\)": keys(inverted, attention_mask=true),
    "polarity='masked' to what reads": lambda call, _: call.declaring("polarity") if inverted(call) else None,
    "if it is right, pass segment_ids too": keys(drops_padding, segment_ids=true),
    "Pass labels_shifted=True": lambda call, _: call.choosing(labels_shifted=True),
    r"Pass polarity='keep' \(True attends\)|pass the other polarity=": lambda call, _: call.declaring("polarity"),
    "Pass polarity= and pattern=": lambda call, _: call.declaring("polarity", "pattern"),
    "Pass pattern=": lambda call, _: call.declaring("pattern"),
    r"Pass attention_mask \[B, S\]|Let the inner collator emit attention_mask|Pass the mask of this batch": keys(
        attention_mask=true, segment_ids=if_packed
    ),
    "(or collate with|or use|Collate them with) PaddingCollator": lambda call, _: replace(call.rows(), options={}).through(
        "PaddingCollator"
    ),
    "give one of them a label": with_a_label,
    "or batch them alone": lambda call, _: call.only(torch.tensor([True, False])) if starts_twice(call) else None,
    r"Remove the wrong one|Keep one of them\.|Keep one set of offsets": with_right_keys,
    "Offsets: padding_free=False|Give each sequence its own row|[pP]ad right|Take the holes out|remove it from the sample|"
    "Move the padding to one side|remove padding inside a sequence": in_rows,
    "Keep the model's own pattern": lambda call, _: replace(
        call.having(attention_mask_2d=call.keep, attention_mask=None), options={}, numbers=False
    ),
    r"call adapt\(model\) before you make the collator": lambda call, _: replace(call, adapted=True),
    r"use padding_free=True(?! \(consumer)|or pack the rows": with_padding_free,
    r"padding_free=True \(consumer='mindspeed'\)|for flat rows \(consumer='mindspeed'\)": partial(
        with_padding_free, consumer="mindspeed"
    ),
    r"\(consumer='mindspeed_dense'\)": lambda call, _: call.choosing(consumer="mindspeed_dense"),
    "Let the collator emit attention_mask_2d too": keys(attention_mask_2d=true, segment_ids=if_packed),
    r"Pass attention_mask_2d \(True = real token\): beside .* else in its place": lambda call, _: keys(
        attention_mask_2d=true, **({} if call.keep.all() else {"attention_mask": None})
    )(call, _),
    r"(?<!else )in its place|attention_mask_2d this mask can be left out": keys(attention_mask_2d=true, attention_mask=None),
    "or add attention_mask_2d or segment_ids": keys(lambda call: not call.keep.all(), attention_mask_2d=true),
    "or let (every|each) sequence count from 0": keys(miscounted, position_ids=true),
    "positions are wrong, drop them|Leave position_ids out": keys(miscounted, position_ids=None),
    "Else rebuild the other keys": lambda call, _: (
        None if miscounted(call) else keys(**dict.fromkeys(call.batch, true))(call, _)
    ),
    "Keep position_ids that restart": keys(position_ids=true),
    "cu_seq_lens_q or segment_ids in the batch": keys(cu_seq_lens_q=true),
    "If the row is one sequence, pass attention_mask": lambda call, _: None if call.segments.packed else call.told(),
    "or leave it out|leave it out and pass segment_ids": lambda call, key: keys(**{key: None}, segment_ids=true)(call, key),
    "Add the row|one sample is a list of one": lambda call, _: call.having(
        **{key: value[None] for key, value in call.batch.items()}
    ),
    "Pad them together": keys(tokens=None),
    "Do not wrap this collator": lambda call, _: call.having(input_ids=call.ids, chosen_input_ids=None).through("adapt"),
    "Collate the tokens too|Wrap the collator that makes rows": keys(input_ids=true),
    "Drop the samples": lambda call, _: call.only(call.keep.any(dim=1)) if call.segments.empty_rows else None,
    "Pass 4D masks of a whole batch through wrap_collator": lambda call, _: call.through("wrap_collator"),
    "or pass segment_ids=True and call masks_in_forward": lambda call, _: replace(call, titan={"segment_ids": True}),
    "Leave it out of the samples": lambda call, _: call.told(),
}


def dead_ends(call, steps):
    try:
        run(call)
        return []
    except CollateError as error:
        text = re.sub(r"\s+", " ", str(error))
    except Exception as error:
        return [f"{call.door}: {type(error).__name__}: {error}"[:400]]
    if not steps:
        return [f"{call.door}: still {text}"]
    for expression in re.findall(r"Pass pattern=(\S+) if", text):
        assert Pattern.of(eval(expression, {"Pattern": Pattern})), "what is written there can be typed"
    key = text.partition(":")[0].partition(" ")[0]
    after = [(words, follow(call, key)) for words, follow in REMEDIES.items() if re.search(words, text)]
    followed = [(words, each) for words, each in after if each is not None]
    if not followed:
        return [f"{call.door}: no remedy of {text}"]
    return [f"{words!r}: {end}" for words, each in followed for end in dead_ends(each, steps - (each.door == call.door))]


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("fault", FAULTS | RIGHT_AT_ONCE)
def test_no_remedy_is_a_dead_end(fault, family):
    call = (FAULTS | RIGHT_AT_ONCE)[fault]
    with torch.no_grad():
        call = replace(call, wanted=float(wanted(model_of(family), call)))
    doors = [door for door in DOORS if (fault, door) not in ELSEWHERE]
    steps = dict.fromkeys([*DOORS][:4] if fault in RIGHT_AT_ONCE else (), 0)
    ends = [end for door in doors for end in dead_ends(replace(call, door=f"{door} {family}"), steps.get(door, STEPS))]
    assert ends == [], "\n".join(["", *ends])
