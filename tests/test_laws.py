"""The laws of the library: what holds for every batch, whatever its padding, packing, mask, dtype, worker or shard.

Law 4 (padding invariance) is shown on real models in the integration tests, law 7 (imports) in test_imports.
Legend: B rows, S width, H heads.
"""

import itertools
import pickle
from collections import defaultdict
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import strategies
import torch
from hypothesis import assume, given, settings, strategies as st
from live_bytes import peak_bytes
from strategies import laid_out

from collate_npu import (
    BatchAdapter,
    CollateError,
    ContextParallel,
    PaddingCollator,
    Pattern,
    Segments,
    derive_segments,
    split_batch,
    unpad,
    wrap_collator,
)
from collate_npu.collate import Layout
from collate_npu.consumers.mask_routing import Case, Model, consumer_named, consumers
from collate_npu.errors import AmbiguousMaskError, PolarityError, UnsupportedFormError
from collate_npu.masks import dense, none_is_exact
from collate_npu.releases import MISSING_KERNEL_RAISES

pytestmark = pytest.mark.usefixtures("newest_transformers")
CONFIG_TELLS = MISSING_KERNEL_RAISES.holds()

# --- law 1: Segments round-trip, and agree with the features they came from


@given(strategies.features(), strategies.sides(), st.sampled_from([None, 4]))
def test_law_1_a_batch_tells_the_truth_of_its_features(features, side, multiple):
    collator = PaddingCollator(
        pad_token_id=strategies.PAD, padding_side=side, pad_to_multiple_of=multiple, attention_mask="2d"
    )
    batch = collator(features)
    rows = [strategies.own_ids(feature) for feature in features]
    segments = BatchAdapter(needs_mask_2d=False, consumer="megatron").with_segments(batch)[1]
    assert batch["attention_mask_2d"].tolist() == segments.keep.tolist()
    assert segments.lengths == tuple(tuple(row.count(n) for n in range(1, max(row) + 1)) for row in rows)
    real = [int(token) for row, f in zip(rows, features) for n, token in zip(row, f["input_ids"]) if n]
    assert unpad(batch["input_ids"], segments).tolist() == real
    assert unpad(batch["position_ids"], segments).tolist() == [p for row in segments.lengths for n in row for p in range(n)]


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


@pytest.mark.parametrize(("B", "S"), SIZES)
@pytest.mark.parametrize("polarity", ["keep", "masked"])
def test_law_2_an_undeclared_polarity_is_the_true_one_or_refused(B, S, polarity):
    wrong = []
    for data, expected in worlds(B, S)[0].items():
        matrix = matrix_of(data, B, S)
        found = read(matrix if polarity == "keep" else ~matrix)
        if found is not None and {found} != expected:
            wrong.append((expected, found))
    assert wrong == []


def pads_one_side(ids):
    return Segments.from_ids(np.array(ids)).padding_side != "mixed"


def misread(found, expected, *, one_side):
    """Read as something else, or with no regard to another truth (of a batch padded on one side, where that is given)."""
    return found is not None and (found not in expected or any(not one_side or pads_one_side(o) for o in expected - {found}))


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


FILLS = ("minimum", "-inf", "-1e4")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def as_form(keep, polarity, dtype, fill="minimum", alibi=False):
    """A bool keep matrix as some producer writes it."""
    if polarity != "bias":
        return (keep if polarity == "keep" else ~keep).to(dtype)
    value = {"minimum": torch.finfo(dtype).min, "-inf": -torch.inf, "-1e4": -1e4}[fill]
    place = torch.arange(keep.shape[-1])
    slope = -(place[:, None] - place).abs() / 8 if alibi else torch.zeros(())
    # in float32, as a producer that adds a slope to the minimum and then casts: the sum stays below the threshold
    return torch.where(keep, slope, torch.tensor(float(value)) + (slope if fill == "-1e4" else 0)).to(dtype)


@st.composite
def forms(draw):
    polarity = draw(st.sampled_from(("keep", "masked", "bias")))
    if polarity != "bias":
        return partial(
            as_form, polarity=polarity, dtype=draw(st.sampled_from((torch.bool, torch.uint8, torch.int64, *FLOATS)))
        )
    dtype = draw(st.sampled_from(FLOATS))
    fill = draw(st.sampled_from(FILLS[:2] if dtype == torch.bfloat16 else FILLS))
    return partial(as_form, polarity=polarity, dtype=dtype, fill=fill, alibi=draw(st.booleans()))


def shaped(form, shape, S):
    """One matrix of `[B, S, S]` as `[B,S,S]`, `[B,1,S,S]` or `[B,H,S,S]`; a shared one as `[S,S]` or `[1,1,S,S]`."""
    if shape == "BSS":
        return form
    if shape == "SS":
        return form[0]
    return form[:, None].expand(-1, 3 if shape == "BHSS" else 1, S, S)


@given(strategies.sided(rows=1, shortest=2), forms(), st.sampled_from(["SS", "11SS"]), st.integers(1, 12))
def test_law_2_a_shared_matrix_serves_all_rows(segments, form, shape, B):
    S = segments.shape[1]
    assume(S > 2 and S != B)
    matrix = shaped(form(dense(segments)[:, 0]), shape, S)
    assert derive_segments(matrix, batch_size=B) == Segments.from_ids(segments.ids.expand(B, -1))


@given(strategies.attentions(strategies.segments(width=12)), forms(), st.booleans(), st.booleans())
def test_law_2_a_truth_beside_the_matrix_is_confirmed(attention, form, both, filled):
    """With attention_mask_2d nothing is ambiguous but where packed sequences end, and whether it is turned around."""
    segments, pattern = attention
    assume(segments.num_tokens and segments.shape[1] > 1 and not (segments.packed and pattern.cuts))
    keep_BSS = honest(dense(segments, pattern=pattern)[:, 0], segments.keep)[both]
    keep_BSS = keep_BSS | (filled & ~keep_BSS.any(dim=2, keepdim=True))
    assume(not keep_BSS.all())  # an additive form of it would block nothing, and is refused for that
    alone = ((keep_BSS.sum(dim=2) == 1) | ~segments.keep).all(dim=1).any()
    assume(not (filled and alone))  # read the other way, that row's padding is one sequence
    found = derive_segments(form(keep_BSS)[:, None], keep=segments.keep, prove=False)
    assert torch.equal(found.keep, segments.keep)


@given(strategies.segments(width=12), forms(), st.data())
def test_law_2_a_truth_that_differs_is_never_confirmed(segments, form, data):
    """The matrix blocks a key that the 2D mask calls real, or shows other real tokens a key that it calls padding."""
    B, S = segments.shape
    b, s = data.draw(st.integers(0, B - 1)), data.draw(st.integers(0, S - 1))
    other = segments.keep.clone()
    other[b, s] = ~other[b, s]
    users_Q = dense(segments)[b, 0, :, s] & other[b]
    assume(other[b, s] or users_Q.any())
    with pytest.raises(CollateError):
        derive_segments(form(dense(segments)), polarity=form.keywords["polarity"], keep=other)


# --- law 3: the way back undoes the way out


LAYOUTS = ["zigzag", "contiguous", "ulysses"]


def a_batch(segments):
    B, S = segments.shape
    return {
        "input_ids": torch.arange(B * S).view(B, S),
        "labels": torch.arange(B * S).view(B, S) + 1,
        "position_ids": segments.position_ids,
        "attention_mask_2d": segments.keep,
        "attention_mask": dense(segments, polarity="masked"),
    }


def widened(segments, cp):
    """The same rows with alignment padding: what a collator with pad_to_multiple_of gives."""
    extra = -segments.shape[1] % cp.multiple
    return Segments(torch.nn.functional.pad(segments.ids, (0, extra)))


@given(strategies.sided(), st.sampled_from([2, 4]), st.sampled_from(LAYOUTS))
def test_law_3_deriving_before_the_split_commutes_with_it(segments, size, layout):
    """The adapter, given a 4D mask alone, hands each rank its tokens of the true 2D mask and its rows of the 4D one."""
    cp = ContextParallel(size, 0, layout=layout)
    scheme = "head_exchange_zigzag" if layout == "zigzag" else "head_exchange"
    reader = replace(consumer_named("megatron"), recurrent_scheme=scheme)  # its own takes zigzag alone
    segments = widened(segments, cp)
    batch = a_batch(segments)
    whole = {key: value for key, value in batch.items() if key != "attention_mask_2d"}
    for rank in range(size):
        adapter = BatchAdapter(needs_mask_2d=True, consumer=reader, polarity="masked", context_parallel=cp.with_rank(rank))
        try:
            out, truth = adapter.with_segments(whole)
        except AmbiguousMaskError:
            assert 1 in segments.row_lengths  # a lone token may be padding that attends itself
            continue
        expected = split_batch(batch, cp.with_rank(rank))
        assert truth == segments
        assert torch.equal(out["attention_mask_2d"], expected["attention_mask_2d"])
        if out["attention_mask"] is None:
            assert none_is_exact(segments)
        else:
            assert torch.equal(out["attention_mask"], expected["attention_mask"])


# --- law 5: routing is total, and the 2D mask stays exactly where the route says so


@given(
    strategies.attentions(),
    st.sampled_from(sorted(consumers())),
    st.booleans(),
    st.sampled_from(["sdpa", "eager", "flash_attention_2", "flex_attention", "my_kernel"]),
    st.booleans(),
)
def test_law_5_one_answer_for_each_model_consumer_and_batch(attention, consumer, needs_2d, kernel, aux_loss):
    segments, pattern = attention
    layers = ["linear_attention", "full_attention"] if needs_2d else ["full_attention"]
    config = SimpleNamespace(layer_types=layers, _attn_implementation=kernel, output_router_logits=aux_loss)
    adapter = BatchAdapter(config, consumer=consumer, pattern=pattern)
    batch = {"input_ids": segments.ids.long(), "attention_mask_2d": segments.keep, "attention_mask": "theirs"}
    try:
        chosen = consumer_named(consumer).route(Case(segments=segments, model=Model.of(config), pattern=Pattern.of(pattern)))
    except UnsupportedFormError:
        with pytest.raises(UnsupportedFormError):
            adapter.render(batch, segments)
        return
    assert chosen.why
    out = adapter.render(batch, segments)
    assert ("attention_mask_2d" in out) == chosen.keeps_mask_2d
    assert ("attention_mask" in out) == (consumers()[consumer].key == "attention_mask")
    if chosen.keeps_mask_2d:
        assert torch.equal(out["attention_mask_2d"], segments.keep)
    if chosen.form == "none":
        assert out["attention_mask"] is None
        assert none_is_exact(segments, pattern)


@given(strategies.packed(rows=1, extra=0), st.sampled_from(sorted(consumers())), st.booleans(), st.booleans())
def test_law_5_alignment_of_a_flat_row_changes_no_route(segments, consumer, needs_2d, static):
    """On kernels that read offsets a flat row carries no mask, nor with padding behind each sequence and at its end.
    MindSpeed's dense masks, and recurrent layers of MindSpeed-LLM and -MM go with no flat row: refused."""
    layers = ["linear_attention", "full_attention"] if needs_2d else ["full_attention"]
    model = SimpleNamespace(layer_types=layers, model_type="qwen3_next", _attn_implementation="flash_attention_2")
    features = [{"input_ids": list(range(n))} for n in segments.sequence_lengths]
    shape = {"padding": (96,), "max_sequences": 12} if static else {}
    said = []
    for fixed in ({}, {"sequence_multiple": 4, **shape}):
        neutral = PaddingCollator(pad_token_id=7, padding_free=True, **laid_out(fixed))(features)
        neutral |= {} if fixed else {"attention_mask_2d": segments.keep}
        adapter = BatchAdapter(model, consumer=consumer, padding_free=True)
        try:
            out = adapter(neutral)
        except UnsupportedFormError:
            said.append("refused")
            continue
        said.append((out[consumers()[consumer].key], "attention_mask_2d" in out))
        if "cu_seq_lens_q" in out:
            assert torch.equal(out["cu_seq_lens_q"], neutral["cu_seq_lens_q"])
    runs_on = consumer.startswith(("mindspeed_llm", "mindspeed_mm")) and needs_2d and segments.packed
    untold = consumer == "transformers" and needs_2d and segments.packed and not CONFIG_TELLS
    refused = consumer == "mindspeed_dense" or runs_on or untold
    assert said == ["refused" if refused else (None, False)] * 2


# --- law 6: collators travel to workers and give the same there


def naive_collator(features):
    """As many write it: right padding, a mask beside it."""
    width = max(len(feature["input_ids"]) for feature in features)
    rows = [list(feature["input_ids"]) for feature in features]
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])}


WIDTH = 2048  # S * S bytes, 4 MiB, are 128 times the largest [B, S] tensor
SQUARE = {
    "left": PaddingCollator(SimpleNamespace(pad_token_id=0, padding_side="left")),
    "4d": PaddingCollator(pad_token_id=0, attention_mask="4d", pad_to_multiple_of=4),
    "wrapped, 4d": wrap_collator(naive_collator, attention_mask="4d"),
}
CHEAP = {
    "auto": PaddingCollator(pad_token_id=0),
    "2d": PaddingCollator(pad_token_id=0, attention_mask="2d", padding_side="left"),
    "omit": PaddingCollator(pad_token_id=0, attention_mask="omit", padding_side="left"),
    "flat": PaddingCollator(padding_free=True),
    "flat, of one shape": PaddingCollator(
        pad_token_id=0, padding_free=True, padding=(64, 2 * WIDTH), layout=Layout(sequence_multiple=64, max_sequences=8)
    ),
    "megatron": PaddingCollator(pad_token_id=0, consumer="megatron", model=SimpleNamespace(layer_types=["conv"])),
    "transformers": PaddingCollator(pad_token_id=0, consumer="transformers", padding_side="left"),
    "verl": PaddingCollator(
        pad_token_id=0, consumer="verl", padding_side="left", model=SimpleNamespace(layer_types=["conv"])
    ),
    "wrapped": wrap_collator(naive_collator),
}
COLLATORS = SQUARE | CHEAP


def equal_batches(one, other):
    assert list(one) == list(other)
    for key, value in one.items():
        same = torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        assert same, key


@given(strategies.features(truth=["none"]))
def test_law_6_a_pickled_collator_gives_the_same_batch(features):
    for collator in COLLATORS.values():
        equal_batches(pickle.loads(pickle.dumps(collator))(features), collator(features))


# --- law 8: nothing of S * S exists unless it was asked for


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
