"""Adapters: any batch in; for one consumer, the masks it reads out, from a truth that all sources of the batch agree on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import strategies
import torch
from hypothesis import given

from collate_npu import (
    AmbiguousMaskError,
    BatchAdapter,
    CollateError,
    ContextParallel,
    Pattern,
    PolarityError,
    Segments,
    UnsupportedFormError,
    dense,
    last_token,
)
from collate_npu.consumers.adapter import find_segments
from collate_npu.consumers.route import CONSUMERS

pytestmark = pytest.mark.usefixtures("newest_transformers")
RIGHT = Segments.from_lengths([3, 5])
LEFT = Segments.from_lengths([3, 5], side="left")
FLAT = Segments.from_lengths([[3, 5]])
HYBRID = SimpleNamespace(layer_types=["linear_attention", "full_attention"])
DENSE = SimpleNamespace(layer_types=["full_attention"])


def batch_of(segments, **keys):
    B, S = segments.shape
    return {"input_ids": torch.arange(B * S).view(B, S), **keys}


# --- the truth is found in whatever the batch carries


SOURCES = {
    "2d": lambda s: {"attention_mask_2d": s.keep},
    "2d ints": lambda s: {"attention_mask_2d": s.keep.long()},
    "2d where transformers puts it": lambda s: {"attention_mask": s.keep.long()},
    "2d and None": lambda s: {"attention_mask_2d": s.keep, "attention_mask": None},
    "2d and a mapping": lambda s: {"attention_mask_2d": s.keep, "attention_mask": {"full_attention": None}},
    "2d twice": lambda s: {"attention_mask_2d": s.keep, "attention_mask": s.keep.long()},
    "2d and its opposite": lambda s: {"attention_mask_2d": s.keep, "attention_mask": ~s.keep},
    "4d masked": lambda s: {"attention_mask": dense(s, polarity="masked")},
    "4d keep": lambda s: {"attention_mask": dense(s)},
    "4d additive": lambda s: {"attention_mask": dense(s, polarity="bias")},
    "2d and 4d": lambda s: {"attention_mask_2d": s.keep, "attention_mask": dense(s, polarity="masked")},
    "2d and 4d of another pattern": lambda s: {
        "attention_mask_2d": s.keep,
        "attention_mask": dense(s, pattern="bidirectional"),
    },
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("segments", [RIGHT, LEFT], ids=["right", "left"])
def test_sources_of_the_truth(source, segments):
    assert find_segments(batch_of(segments, **SOURCES[source](segments))) == segments


@given(strategies.packed(extra=2).filter(lambda s: s.shape[0] != s.shape[1]))
def test_positions_that_fall_back_split_the_rows_of_a_2d_mask(segments):
    found = find_segments(batch_of(segments, attention_mask_2d=segments.keep, position_ids=segments.position_ids))
    assert found == segments


def test_positions_beside_a_2d_mask():
    keys = {"attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])}
    arange = torch.arange(5).expand(2, 5)
    assert not find_segments(batch_of(RIGHT, **keys, position_ids=arange)).packed
    assert not find_segments(batch_of(RIGHT, **keys, position_ids=torch.zeros(3, 2, 5))).packed
    packed = torch.tensor([[9, 0, 1, 0, 1], [0, 1, 2, 3, 4]])
    assert find_segments(batch_of(RIGHT, **keys, position_ids=packed)).lengths == ((2, 2), (5,))


def test_inputs_may_be_embeddings_or_megatron_tokens():
    for key, shape in (("inputs_embeds", (2, 5, 3)), ("tokens", (2, 5))):
        assert find_segments({key: torch.zeros(shape), "attention_mask_2d": LEFT.keep}) == LEFT
    with pytest.raises(CollateError, match="keys labels"):
        find_segments({"labels": torch.zeros(2, 5)})


FLAT_SOURCES = {
    "cu_seq_lens_q": {"cu_seq_lens_q": FLAT.cu_seqlens},
    "cu_seqlens": {"cu_seqlens": FLAT.cu_seqlens},
    "cu_seqlens_q": {"cu_seqlens_q": FLAT.cu_seqlens},
    "position_ids": {"position_ids": FLAT.position_ids},
    "ones and positions": {"attention_mask": torch.ones(1, 8), "position_ids": FLAT.position_ids},
}


@pytest.mark.parametrize("source", FLAT_SOURCES)
@pytest.mark.parametrize("padding_free", [False, True])
def test_sources_of_a_flat_row(source, padding_free):
    assert find_segments(batch_of(FLAT, **FLAT_SOURCES[source]), padding_free=padding_free) == FLAT


def test_a_flat_row_with_an_alignment_tail():
    segments = Segments.from_lengths([[3, 2]], 8)
    keys = {"cu_seq_lens_q": torch.tensor([0, 3, 5, 8]), "seq_lens": torch.tensor([3, 2])}
    assert find_segments(batch_of(segments, **keys)) == segments
    assert find_segments(batch_of(segments, cu_seq_lens_q=torch.tensor([0, 3, 5]))) == segments


def test_a_flat_row_without_offsets_is_one_sequence_if_padding_free():
    assert find_segments(batch_of(FLAT), padding_free=True) == Segments.from_lengths([8])
    with pytest.raises(AmbiguousMaskError):
        find_segments(batch_of(FLAT))


def test_offsets_beside_a_2d_mask_split_a_flat_row():
    keys = {"attention_mask": torch.ones(1, 8), "cu_seq_lens_q": FLAT.cu_seqlens}
    assert find_segments(batch_of(FLAT, **keys)) == FLAT


# --- sources that contradict each other


def test_positions_that_count_up_once_say_nothing_of_padding():
    """One row whose mask was lost: its padding counts on, as ours does, or as a model makes it up."""
    batch = {"input_ids": torch.ones(1, 8, dtype=torch.int64), "position_ids": torch.arange(8)[None]}
    with pytest.raises(AmbiguousMaskError, match="a mask that was lost"):
        find_segments(batch)
    assert find_segments(batch, padding_free=True) == Segments.from_lengths([8])


def test_offsets_that_end_before_a_mask_of_ones_disagree():
    keys = {"attention_mask": torch.ones(1, 8), "cu_seq_lens_q": torch.tensor([0, 3, 6])}
    with pytest.raises(CollateError, match="cu_seq_lens_q: 1 bad row"):
        find_segments({"input_ids": torch.ones(1, 8, dtype=torch.int64), **keys})


def test_no_source_is_an_error_that_names_the_keys():
    with pytest.raises(AmbiguousMaskError, match=r"batch: got keys input_ids, labels\. No key says.*attention_mask_2d"):
        find_segments(batch_of(RIGHT, labels=None))


@pytest.mark.parametrize(
    ("polarity", "build"),
    [
        (None, lambda s: s.keep.long()),
        ("keep", lambda s: dense(s)),
        ("masked", lambda s: dense(s, polarity="masked")),
        (None, lambda s: dense(s, polarity="bias")),
    ],
)
def test_disagreement_of_2d_and_4d_names_the_rows(polarity, build):
    segments = Segments.from_lengths([3, 5, 4, 2])
    other = Segments.from_lengths([3, 4, 4, 1], 5)
    with pytest.raises(CollateError) as raised:
        find_segments(batch_of(segments, attention_mask_2d=segments.keep, attention_mask=build(other)), polarity=polarity)
    text = str(raised.value)
    assert all(f"row {b}" in text for b in (1, 3))
    assert not any(f"row {b}" in text for b in (0, 2))


def test_the_truth_of_alignment_padding_must_be_one():
    """ms-swift 4.6.0 marks alignment padding as real in its 2D mask, and as padding in its 4D one."""
    with pytest.raises(CollateError, match="row 0"):
        find_segments(batch_of(RIGHT, attention_mask_2d=torch.ones(2, 5), attention_mask=dense(RIGHT, polarity="masked")))


def test_a_declared_polarity_is_not_overruled():
    masked = {"attention_mask": dense(LEFT, polarity="masked")}
    assert find_segments(batch_of(LEFT, **masked), polarity="masked") == LEFT
    with pytest.raises(CollateError):
        find_segments(batch_of(LEFT, **masked), polarity="keep")
    all_true = {"attention_mask": torch.ones(2, 1, 5, 5, dtype=torch.bool)}
    with pytest.raises(PolarityError):
        find_segments(batch_of(LEFT, **all_true))
    assert find_segments(batch_of(LEFT, **all_true), polarity="keep") == Segments.from_lengths([5, 5])


def test_padding_free_takes_one_row():
    with pytest.raises(CollateError, match=r"2 rows. padding_free means one flat row"):
        find_segments(batch_of(RIGHT, attention_mask_2d=RIGHT.keep), padding_free=True)


# --- the batch that leaves


def test_a_right_padded_hybrid_batch_for_megatron():
    batch = batch_of(
        RIGHT, labels=torch.ones(2, 5), attention_mask=dense(RIGHT, polarity="masked"), attention_mask_2d=RIGHT.keep
    )
    out, segments = BatchAdapter(HYBRID).prepare(batch)
    assert segments == RIGHT
    assert out["attention_mask"] is None
    assert torch.equal(out["attention_mask_2d"], RIGHT.keep)
    assert out["attention_mask_2d"].dtype == torch.bool
    assert out["labels"] is batch["labels"]
    assert list(batch) == ["input_ids", "labels", "attention_mask", "attention_mask_2d"]
    assert next(iter(out)) == "input_ids"


def test_a_left_padded_batch_for_megatron():
    out = BatchAdapter(HYBRID)(batch_of(LEFT, attention_mask_2d=LEFT.keep))
    assert torch.equal(out["attention_mask"], dense(LEFT, polarity="masked"))
    assert torch.equal(out["position_ids"], LEFT.position_ids)
    assert "attention_mask_2d" not in BatchAdapter(DENSE)(batch_of(LEFT, attention_mask_2d=LEFT.keep))


def test_positions_that_are_there_stay():
    positions = torch.full((2, 5), 7)
    keys = {"attention_mask_2d": LEFT.keep, "position_ids": positions}
    out = BatchAdapter(DENSE).apply(batch_of(LEFT, **keys), LEFT)
    assert out["position_ids"] is positions
    vision = batch_of(LEFT, attention_mask_2d=LEFT.keep, pixel_values=torch.zeros(1))
    assert "position_ids" not in BatchAdapter(DENSE)(vision)
    assert "position_ids" not in BatchAdapter(DENSE)(batch_of(RIGHT, attention_mask_2d=RIGHT.keep))


def test_the_mask_of_transformers_is_the_2d_one():
    for model in (HYBRID, DENSE, None):
        out = BatchAdapter(model, consumer="transformers")(batch_of(LEFT, attention_mask=dense(LEFT)))
        assert torch.equal(out["attention_mask"], LEFT.keep.long())
        assert out["attention_mask"].dtype == torch.int64
        assert "attention_mask_2d" not in out


def test_a_pattern_of_its_own_on_transformers():
    sliding = Pattern.sliding(2)
    truth = batch_of(LEFT, attention_mask_2d=LEFT.keep)
    out = BatchAdapter(HYBRID, consumer="transformers", pattern=sliding)(truth)
    assert set(out["attention_mask"]) == {"full_attention", "linear_attention"}
    assert torch.equal(out["attention_mask"]["full_attention"], dense(LEFT, pattern=sliding))
    assert torch.equal(out["attention_mask"]["linear_attention"], LEFT.keep)
    mapping = BatchAdapter(HYBRID, consumer="transformers", pattern=sliding, attn_implementation="eager")(truth)
    assert torch.equal(mapping["attention_mask"]["full_attention"], dense(LEFT, polarity="bias", pattern=sliding))
    eager = BatchAdapter(DENSE, consumer="transformers", pattern=sliding, attn_implementation="eager")(truth)
    assert torch.equal(eager["attention_mask"], dense(LEFT, polarity="bias", pattern=sliding))
    with pytest.raises(UnsupportedFormError, match="flash_attention_2"):
        BatchAdapter(DENSE, consumer="transformers", pattern=sliding, attn_implementation="flash_attention_2")(truth)
    with pytest.raises(UnsupportedFormError, match="no config"):
        BatchAdapter(needs_mask_2d=True, consumer="transformers", pattern=sliding)(truth)


def test_packed_rows_for_an_unknown_transformers_model_are_refused():
    with pytest.raises(CollateError):
        BatchAdapter(consumer="transformers").apply(batch_of(FLAT), FLAT)


def test_verl_reads_bool():
    out = BatchAdapter(HYBRID, consumer="verl")(batch_of(LEFT, attention_mask=LEFT.keep.long()))
    assert out["attention_mask"].dtype == out["attention_mask_2d"].dtype == torch.bool


def test_torchtitan_reads_its_own_key():
    out = BatchAdapter(DENSE, consumer="torchtitan")(batch_of(RIGHT, attention_mask=RIGHT.keep))
    assert "attention_mask" not in out
    assert out["attention_masks"].shape == (2, 1, 5, 5)


@pytest.mark.parametrize(
    ("consumer", "remedy"), [("mindspeed", "attention_mask_type=general"), ("transformer_engine", "local kernels")]
)
def test_causal_kernels_refuse_left_padding(consumer, remedy):
    out = BatchAdapter(HYBRID, consumer=consumer)(batch_of(RIGHT, attention_mask_2d=RIGHT.keep))
    assert out["attention_mask"] is None
    assert torch.equal(out["attention_mask_2d"], RIGHT.keep)
    with pytest.raises(UnsupportedFormError, match=f"padding stands on the left.*{remedy}"):
        BatchAdapter(HYBRID, consumer=consumer)(batch_of(LEFT, attention_mask_2d=LEFT.keep))


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_padding_free_rows_lose_their_masks(consumer):
    keys = {"attention_mask_2d": torch.ones(1, 8), "position_ids": FLAT.position_ids}
    out, segments = BatchAdapter(HYBRID, consumer=consumer, padding_free=True).prepare(batch_of(FLAT, **keys))
    assert out["attention_mask"] is None
    assert "attention_mask_2d" not in out
    assert segments == FLAT


def test_the_truth_comes_back_whole_for_pooling():
    out, segments = BatchAdapter(HYBRID, context_parallel=ContextParallel(2, 0)).prepare(
        batch_of(Segments.from_lengths([3, 5], 8), attention_mask_2d=Segments.from_lengths([3, 5], 8).keep)
    )
    assert out["input_ids"].shape == (2, 4)
    assert segments.shape == (2, 8)
    assert last_token(torch.arange(16).view(2, 8), segments).tolist() == [2, 12]


# --- context parallelism


@pytest.mark.parametrize("rank", [0, 1])
def test_under_context_parallelism_only_this_rank_s_rows_are_built(rank):
    segments = Segments.from_lengths([3, 8], side="left")
    cp = ContextParallel(2, rank, mask_2d="local")
    places = [[0, 1, 6, 7], [2, 3, 4, 5]][rank]
    adapter = BatchAdapter(HYBRID, context_parallel=cp, max_mask_bytes=2 * 4 * 8)
    out = adapter(batch_of(segments, attention_mask_2d=segments.keep, labels=torch.arange(16).view(2, 8)))
    assert torch.equal(out["attention_mask"], dense(segments, polarity="masked")[:, :, places])
    assert torch.equal(out["attention_mask_2d"], segments.keep[:, places])
    assert torch.equal(out["position_ids"], segments.position_ids[:, places])
    assert torch.equal(out["labels"], torch.arange(16).view(2, 8)[:, places])


def test_how_much_of_the_2d_mask_a_rank_gets_is_the_consumer_s_unless_declared():
    """Megatron's GatedDeltaNet gathers the row in order before it would read the mask; MindSpeed splits every key."""
    segments = Segments.from_lengths([3, 8])
    batch = batch_of(segments, attention_mask_2d=segments.keep)
    for consumer, width in (("megatron", 8), ("mindspeed", 4)):
        out = BatchAdapter(HYBRID, consumer=consumer, context_parallel=ContextParallel(2, 1))(batch)
        assert out["attention_mask_2d"].shape == (2, width)
        declared = BatchAdapter(HYBRID, consumer=consumer, context_parallel=ContextParallel(2, 1, mask_2d="local"))(batch)
        assert torch.equal(declared["attention_mask_2d"], segments.keep[:, 2:6])


def test_a_width_that_does_not_divide_is_an_error():
    with pytest.raises(CollateError, match="pad_to_multiple_of=4"):
        BatchAdapter(HYBRID, context_parallel=ContextParallel(2, 0))(batch_of(RIGHT, attention_mask_2d=RIGHT.keep))


def test_recurrent_layers_of_transformers_cannot_be_split():
    with pytest.raises(UnsupportedFormError, match="in silence"):
        BatchAdapter(HYBRID, consumer="transformers", context_parallel=ContextParallel(2, 0))
    BatchAdapter(DENSE, consumer="transformers", context_parallel=ContextParallel(2, 0))


def test_a_block_mask_is_not_split():
    with pytest.raises(UnsupportedFormError, match="torchtitan's and torch's own"):
        BatchAdapter(DENSE, consumer="torchtitan", context_parallel=ContextParallel(1, 0))(
            batch_of(RIGHT, attention_mask_2d=RIGHT.keep)
        )


# --- settings


def test_the_model_must_be_told_where_it_matters():
    for consumer in CONSUMERS:
        if consumer == "transformers":
            BatchAdapter(consumer=consumer)
        else:
            with pytest.raises(CollateError, match="Pass model=, model_type= or needs_mask_2d="):
                BatchAdapter(consumer=consumer)
            BatchAdapter(consumer=consumer, padding_free=True)
    assert BatchAdapter(torch.nn.Module(), needs_mask_2d=True)(batch_of(RIGHT, attention_mask_2d=RIGHT.keep))[
        "attention_mask_2d"
    ].any()


def test_an_unknown_consumer_is_refused_at_once():
    with pytest.raises(CollateError, match="Known are"):
        BatchAdapter(DENSE, consumer="megatrom")


def test_an_argument_namespace():
    args = SimpleNamespace(padding_free=True, context_parallel_size=1, model_type="not_read_beside_a_model")
    adapter = BatchAdapter.from_args(args, model=HYBRID)
    assert adapter.padding_free
    assert adapter.context_parallel is None
    assert not BatchAdapter.from_args(args, model=HYBRID, padding_free=False).padding_free
    for backend, consumer in (("local", "megatron"), ("flash", "transformer_engine"), (None, "megatron")):
        given = SimpleNamespace(padding_free=False, attention_backend=backend)
        assert BatchAdapter.from_args(given, model=HYBRID).consumer == consumer
    enum = SimpleNamespace(attention_backend=SimpleNamespace(name="local"))
    assert BatchAdapter.from_args(enum, model=HYBRID).consumer == "megatron"
    split = SimpleNamespace(padding_free=False, context_parallel_size=2)
    cp = ContextParallel(2, 1, mask_2d="local")
    assert BatchAdapter.from_args(split, needs_mask_2d=True, context_parallel=cp).context_parallel is cp


def test_the_byte_limit_reaches_the_mask():
    with pytest.raises(UnsupportedFormError, match="max_mask_bytes"):
        BatchAdapter(DENSE, max_mask_bytes=49)(batch_of(LEFT, attention_mask_2d=LEFT.keep))


def test_why_is_said():
    assert "right only" in BatchAdapter(HYBRID).route(RIGHT).why
    assert "on the left" in BatchAdapter(HYBRID).route(LEFT).why
    assert BatchAdapter(HYBRID).route(LEFT, padding_free=True).form == "none"
