"""The laws of the library: what holds for every batch, whatever its padding, packing, mask, dtype, worker or shard.

Law 1 (a batch tells the truth of its features) and law 3 (the way back undoes the way out) stand beside, law 4
(padding invariance) is shown on real models in the integration tests, law 6 (collators travel to workers) in
collate/test_transport, law 7 (imports) in test_imports, law 11 (two sources that differ raise) in masks/test_batch_reader,
law 12 (every remedy works) in test_refusals.
Legend: B rows, S width, H heads.
"""

import itertools
from collections import defaultdict
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import strategies
import torch
from hypothesis import assume, example, given, settings, strategies as st
from live_bytes import peak_bytes
from strategies import Drawn, flat_collator, four_dims
from torch import Tensor

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Pattern, Segments, derive_segments, wrap_collator
from collate_npu.consumers.mask_choice import Case, Model, consumer_named, consumers
from collate_npu.errors import AmbiguousMaskError, PolarityError, UnsupportedFormError
from collate_npu.keys import KEYS, TOKENS
from collate_npu.masks import dense, none_is_exact, varlen
from collate_npu.masks.batch_reader import segments_from_batch

pytestmark = pytest.mark.filterwarnings("ignore:collate_npu")


# --- law 2: what dense builds, derive_segments reads; or two truths give that tensor
#
# Exhaustive for small batches: every truth, pattern and construction, so that "ambiguous" can be looked up.
# Chunks and packing at once are not part of it: the library documents that it does not consider them.


@cache
def all_rows(S):
    """Every row of segment ids of width S."""
    return sorted({tuple(strategies.ids_of(keep, starts, S)) for keep in range(2**S) for starts in range(2**S)})


def all_patterns(segments):
    S = segments.shape[1]
    sizes = range(1, S)
    prefixes = itertools.product(*([0, *range(2, end - start + 1)] for _, start, end in segments.spans))
    return [
        Pattern.of("causal"),
        Pattern.of("bidirectional"),
        *map(Pattern.sliding, sizes),
        *(map(Pattern.chunked, sizes) if not segments.packed else ()),
        *(map(Pattern.prefix, prefixes) if segments.num_sequences else ()),
    ]


def honest(keep_BSS, real_BS):
    """What producers build: padding blocked as a key, or as a key and as a query."""
    return keep_BSS, keep_BSS & real_BS[:, :, None]


def odd(keep_BSS, real_BS):
    """What some do on top: rows that see nothing made to see everything, or every diagonal forced."""
    for built in honest(keep_BSS, real_BS):
        yield "filled", built | ~built.any(axis=2, keepdims=True)
        yield "diagonal", built | np.eye(built.shape[1], dtype=bool)


def documents(segments, pattern):
    """Padding on one side as a sequence of its own, which attends itself as the others do (flex document masks)."""
    if segments.padding_side in ("left", "right") and pattern.name != "prefix":
        ids = segments.ids
        yield dense(Segments.from_ids(torch.where(ids == 0, ids.max() + 1, ids)), pattern=pattern)[:, 0].numpy()


@cache
def worlds(B, S):
    """`(honest, filled, diagonal and document)`: the bytes of every matrix to the truths that give it."""
    found = {kind: defaultdict(set) for kind in ("honest", "filled", "diagonal")}
    for ids in itertools.product(all_rows(S), repeat=B):
        segments = Segments.from_ids(np.array(ids))
        for pattern in all_patterns(segments):
            keep_BSS, real_BS = dense(segments, pattern=pattern)[:, 0].numpy(), segments.keep.numpy()
            for matrix in honest(keep_BSS, real_BS):
                found["honest"][matrix.tobytes()].add(ids)
            for kind, matrix in odd(keep_BSS, real_BS):
                found[kind][matrix.tobytes()].add(ids)
            for matrix in documents(segments, pattern):
                found["diagonal"][matrix.tobytes()].add(ids)
    return found["honest"], found["filled"], found["diagonal"]


def matrix_of(data, B, S):
    return torch.from_numpy(np.frombuffer(data, dtype=bool).reshape(B, 1, S, S).copy())


def read(matrix, **settings):
    """The ids that were derived, or None for a refusal."""
    try:
        return tuple(map(tuple, derive_segments(matrix, **settings).ids.tolist()))
    except (AmbiguousMaskError, PolarityError):
        return None


SIZES = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (2, 3)]


@pytest.mark.parametrize(("B", "S"), SIZES)
def test_law_2_every_honest_matrix_is_read_right_or_has_two_truths(B, S):
    truths, filled, diagonal = worlds(B, S)
    wrong, needless, refused = [], [], 0
    for data, expected in truths.items():
        found = read(matrix_of(data, B, S), polarity="keep")
        if found is not None:
            wrong += [(expected, found)] if {found} != expected else []
        elif len(expected) == 1:
            refused += 1
            others = filled.get(data, set()) | diagonal.get(data, set())
            needless += [expected] if others <= expected else []
    assert wrong == []
    # Rows that settle each other's doubt are not looked at together, nor what padded queries see of single tokens.
    assert B > 1 or all(Segments(ids).max_length == 1 for (ids,) in needless)
    assert S < 3 or refused <= sum(len(expected) == 1 for expected in truths.values()) / 3  # always to refuse is no reading


def misread(found, expected, *, one_side):
    """Read as something else, or with no regard to another truth (of a batch padded on one side, where that is given)."""
    mixed = [one_side and Segments.from_ids(np.array(ids)).padding_side == "mixed" for ids in expected - {found}]
    return found is not None and (found not in expected or not all(mixed))


@pytest.mark.parametrize(("B", "S"), SIZES)
@pytest.mark.parametrize("unmasks", [False, True])
def test_law_2_odd_matrices_are_never_read_wrong(B, S, unmasks):
    """Padding rows unmasked, a diagonal forced, padding as a sequence: where nobody said which, nothing is guessed."""
    truths, filled, diagonal = worlds(B, S)
    wrong = []
    for data in filled if unmasks else {*filled, *diagonal} - set(truths):
        expected = filled.get(data, set()) | (set() if unmasks else diagonal.get(data, set()))
        found = read(matrix_of(data, B, S), polarity="keep", unmasked_rows=unmasks)
        wrong += [(expected, found)] if misread(found, expected, one_side=B > 1) else []
    assert wrong == []


def written(data, keep_B1SS, polarity=None):
    """The matrix as some producer writes it, in this polarity or any; some add ALiBi."""
    drawn, place = Drawn(data.draw), torch.arange(keep_B1SS.shape[-1])
    polarity = polarity or drawn.pick(("keep", "masked", "bias"))
    made, slope = four_dims(drawn, keep_B1SS, polarity), drawn.pick((0.0, 0.125)) * (polarity == "bias")
    return (made.float() - slope * (place[:, None] - place).abs()).to(made.dtype) if slope else made


@given(strategies.attentions(strategies.segments(width=12)), st.data(), st.booleans(), st.booleans())
def test_law_2_a_truth_beside_the_matrix_is_confirmed(attention, data, both, filled):
    """With attention_mask_2d nothing is ambiguous but where packed sequences end, and whether it is turned around."""
    segments, pattern = attention
    assume(segments.num_tokens and segments.shape[1] > 1 and not (segments.packed and pattern.cuts))
    keep_BSS = honest(dense(segments, pattern=pattern)[:, 0], segments.keep)[both]
    keep_BSS = keep_BSS | (filled & ~keep_BSS.any(dim=2, keepdim=True))
    assume(not keep_BSS.all())  # an additive form of it would block nothing, and is refused for that
    alone = ((keep_BSS.sum(dim=2) == 1) | ~segments.keep).all(dim=1).any()
    assume(not (filled and alone))  # read the other way, that row's padding is one sequence
    found = derive_segments(written(data, keep_BSS[:, None]), keep=segments.keep, prove=False)
    assert torch.equal(found.keep, segments.keep)


@given(strategies.segments(width=12), st.sampled_from(["keep", "masked", "bias"]), st.data())
def test_law_2_a_truth_that_differs_is_never_confirmed(segments, polarity, data):
    """The matrix blocks a key that the 2D mask calls real, or shows other real tokens a key that it calls padding."""
    B, S = segments.shape
    b, s = data.draw(st.integers(0, B - 1)), data.draw(st.integers(0, S - 1))
    other = segments.keep.clone()
    other[b, s] = ~other[b, s]
    users_Q = dense(segments)[b, 0, :, s] & other[b]
    assume(other[b, s] or users_Q.any())
    with pytest.raises(CollateError):
        derive_segments(written(data, dense(segments), polarity), polarity=polarity, keep=other)


# --- law 5: every batch gets one form or is refused, and the 2D mask stays exactly where the choice says so


@given(
    strategies.attentions(),
    st.sampled_from(sorted(consumers())),
    st.booleans(),
    st.sampled_from(["sdpa", "eager", "flash_attention_2", "flex_attention", "my_kernel"]),
    st.booleans(),
)
@example((Segments.from_lengths([3], 5, side="left"), "causal"), "transformers", True, "sdpa", False)
def test_law_5_one_answer_for_each_model_consumer_and_batch(attention, consumer, needs_2d, kernel, aux_loss):
    segments, pattern = attention
    layers = ["linear_attention", "full_attention"] if needs_2d else ["full_attention"]
    config = SimpleNamespace(layer_types=layers, _attn_implementation=kernel, output_router_logits=aux_loss)
    adapter = BatchAdapter(config, consumer=consumer, pattern=pattern)
    batch = {"input_ids": segments.ids.long(), "attention_mask_2d": segments.keep, "attention_mask": "theirs"}
    case = Case(segments=segments, model=Model.of(config), pattern=Pattern.of(pattern))
    try:
        chosen = consumer_named(consumer).choose(case)
    except UnsupportedFormError:
        with pytest.raises(UnsupportedFormError):
            adapter.write(batch, segments)
        return
    assert chosen.why
    if consumer == "transformers" and any(start for _, start, _ in segments.spans[:1]):  # padding before it: no flat row
        assert BatchAdapter(config, consumer=consumer, pattern=pattern, padding_free=True).choose(segments) == chosen
    out = adapter.write(batch, segments)
    assert ("attention_mask_2d" in out) == chosen.keeps_mask_2d
    assert ("attention_mask" in out) == (consumers()[consumer].key == "attention_mask")
    assert not chosen.keeps_mask_2d or torch.equal(out["attention_mask_2d"], segments.keep)
    if chosen.form == "none":
        assert out["attention_mask"] is None
        assert none_is_exact(segments, pattern)


# --- law 8: nothing of S * S exists unless it was asked for


def padded(features):
    """Right padding, and a mask of ones and zeros beside it, as many write it."""
    batch = PaddingCollator(pad_token_id=0, attention_mask="2d")(features)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"].long()}


WIDTH = 2048  # S * S bytes, 4 MiB, are 128 times the largest [B, S] tensor
CHEAP = {
    "omit": PaddingCollator(pad_token_id=0, attention_mask="omit", padding_side="left"),
    "verl": PaddingCollator(
        pad_token_id=0, consumer="verl", padding_side="left", model=SimpleNamespace(layer_types=["conv"])
    ),
    "wrapped": wrap_collator(padded),
}
"""Beside those of test_counted_work, whose every byte goes out."""
LONG = [{"input_ids": list(range(n)), "labels": list(range(n))} for n in (WIDTH, WIDTH // 2)]


@pytest.mark.parametrize("name", CHEAP)
def test_law_8_no_square_tensor_unless_asked(name):
    collator = CHEAP[name]
    assert peak_bytes(lambda: collator(LONG)) < WIDTH * WIDTH / 4


@settings(max_examples=5)  # each is measured twice
@given(strategies.segments(), st.booleans())
def test_law_8_an_adapter_that_is_given_the_truth_builds_no_square(segments, needs_2d):
    """Where None is exact, or the consumer reads 2D, the adapter stays below one mask of S * S bytes."""
    segments = Segments(torch.nn.functional.pad(segments.ids, (0, 2048 - segments.shape[1])))
    assume(not segments.packed and segments.padding_side != "mixed")
    batch = {"input_ids": segments.ids.long(), "attention_mask_2d": segments.keep, "segment_ids": segments.ids}
    adapter = BatchAdapter(needs_mask_2d=needs_2d, consumer="megatron" if none_is_exact(segments) else "transformers")
    assert peak_bytes(lambda: adapter(batch)) < 2048**2


# --- law 9: what a collator knew comes out of the door


DENSE = SimpleNamespace(layer_types=["full_attention"])
MODES = ["auto", "4d", "2d", "omit"]
EXTRAS = {
    "nothing": lambda L: {},
    "positions that count on": lambda L: {"position_ids": list(range(5, 5 + L))},
    "positions of three axes": lambda L: {"position_ids": np.arange(3 * L).reshape(3, L)},
    "images": lambda L: {"pixel_values": torch.ones(1, 3, 2, 2), "position_ids": np.zeros((3, L), int)},
    "vectors as long as a row of three": lambda L: {"vector": [0.5, 1.0, 1.5]},
    "targets of three classes": lambda L: {"labels": [0.0, 1.0, 0.0]},
}


@given(
    strategies.features(),
    strategies.sides(),
    st.sampled_from(MODES),
    st.sampled_from([None, 4]),
    st.sampled_from(list(EXTRAS)),
    st.booleans(),
)
def test_law_9_the_door_gives_back_what_the_collator_knew(features, side, mode, multiple, extra, packing):
    features = [{**feature, **EXTRAS[extra](len(feature["input_ids"]))} for feature in strategies.marked(features)]
    settings = {"attention_mask": mode, "pad_to_multiple_of": multiple}
    settings |= {"packing": True, "max_length": 9} if packing else {}
    batch = PaddingCollator(pad_token_id=7, padding_side=side, keys={**KEYS, "place": TOKENS}, **settings)(features)
    assert segments_from_batch(batch) == strategies.standing(features, batch["place"])


def flat_truth(features, width, each=1):
    """The Segments of one flat row of features, each sequence at a multiple of `each`."""
    rows = [[n for n in strategies.own_ids(feature) if n] for feature in features]
    lengths = [row.count(n) for row in rows for n in dict.fromkeys(row)]
    held = [[n] * length + [0] * (-length % each) for n, length in enumerate(lengths, start=1)]
    ids = [n for sequence in held for n in sequence]
    return Segments([ids + [0] * (width - len(ids))])


FLAT_SHAPES = st.fixed_dictionaries(
    {
        "pad_to_multiple_of": st.sampled_from([None, 4]),
        "padding": st.sampled_from(["longest", "max_length", (96, 160)]),
        "multiple": st.sampled_from([None, 1, 3, 4]),
        "max_sequences": st.sampled_from([None, 16]),
        "max_length": st.just(160),
    }
)


@given(strategies.features(), FLAT_SHAPES)
def test_law_9_the_door_a_wrapped_collator_and_an_adapter_give_back_a_flat_row(features, settings):
    """With the offsets that came: alignment and offsets of one length survive."""
    inner = flat_collator(7, **settings)
    batch, wrapped = inner(features), wrap_collator(inner)(features)
    width = batch["input_ids"].shape[1]
    fits = settings["multiple"] and not settings["max_sequences"]  # then the row is as wide as its sequences
    assert fits or settings["padding"] == "longest" or width >= 96
    adapted, segments = BatchAdapter(DENSE, consumer="megatron", padding_free=True).with_segments(batch)
    assert segments == flat_truth(features, width, settings["multiple"] or 1)
    for made in (batch, wrapped, adapted):
        assert segments_from_batch(made) == segments_from_batch(made, padding_free=True) == segments
    for key, value in batch.items():
        for other in (wrapped, adapted):
            same = torch.equal(other[key], value) if isinstance(value, Tensor) else other[key] == value
            assert same or (key == "position_ids" and torch.equal(other[key][segments.keep], value[segments.keep])), key


@given(strategies.features(), FLAT_SHAPES)
def test_law_9_a_transformers_model_gets_one_set_of_offsets(features, settings):
    """Whatever of them arrives: the others are made of it, and the longest is not below any place."""
    model = SimpleNamespace(layer_types=["full_attention"], _attn_implementation="flash_attention_2", model_type="llama")
    adapter = BatchAdapter(model, consumer="transformers", padding_free=True)
    batch = flat_collator(7, **settings)(features)
    others = [("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")] if "cu_seqlens_padded" in batch else []
    for left_out in ((), ("max_length_q", "max_length_k", "cu_seq_lens_k"), *others):
        out = adapter({key: value for key, value in batch.items() if key not in left_out})
        if segments_from_batch(batch).packed or not left_out:
            assert torch.equal(out["cu_seq_lens_q"], out["cu_seq_lens_k"])
            assert out["cu_seq_lens_q"][-1] == batch["input_ids"].shape[1]
            assert out["cu_seq_lens_q"].diff().max() <= min(out["max_length_q"], out["max_length_k"])
            if settings["multiple"]:
                assert torch.equal(out["cu_seq_lens_q"], batch["cu_seqlens_padded"])


# --- law 10: nothing shares memory


@given(strategies.segments())
def test_law_10_segments_never_change(segments):
    before = segments.ids
    given_ids = np.array(segments.array)
    built = Segments(given_ids)
    given_ids[:] = 9
    assert built == segments
    names = ("ids", "keep", "indices", "last_indices", "position_ids", "cu_seqlens")
    for _ in range(2):
        for x in (*(getattr(segments, name) for name in names), varlen(segments).cu_seqlens, dense(segments)):
            x.logical_not_() if x.dtype == torch.bool else x.add_(7)  # raises where it is expanded onto itself
        assert torch.equal(segments.ids, before)
        assert torch.equal(segments.keep, before != 0)


# --- law 13: no pattern is replaced


def attention_of(mask, segments, consumer):
    """bool `[B, S, S]`: what the consumer then computes."""
    B, S = segments.shape
    causal = torch.ones(S, S, dtype=torch.bool).tril().expand(B, S, S)
    if mask is None:
        return causal
    if mask.ndim == 2:
        return causal & mask.bool()[:, None]
    return (~mask if consumer == "megatron" else mask)[:, 0]


@given(
    strategies.attentions(),
    st.sampled_from(["keep", "masked", "bias"]),
    st.sampled_from(["megatron", "transformers"]),
    st.sampled_from([None, "causal", "its own"]),
    st.booleans(),
    st.booleans(),
)
def test_law_13_a_pattern_is_never_replaced(attention, polarity, consumer, declared, beside, wrapped):
    segments, pattern = attention
    mask = dense(segments, polarity=polarity, pattern=pattern)
    batch = {"input_ids": segments.ids.long(), "attention_mask": mask}
    batch |= {"attention_mask_2d": segments.keep, "segment_ids": segments.ids} if beside else {}
    settings = {"consumer": consumer, "pattern": pattern if declared == "its own" else declared}
    way = wrap_collator(lambda _: batch, model=DENSE, **settings) if wrapped else BatchAdapter(DENSE, **settings)
    try:
        out = way([] if wrapped else batch)
    except CollateError:
        undeclared = declared != "its own" and pattern.reaches(segments.longest_span)
        assert not beside or undeclared or consumer == "transformers"
        return
    found = attention_of(out["attention_mask"], segments, consumer)
    assert torch.equal(found[segments.keep], dense(segments, pattern=pattern)[:, 0][segments.keep])
