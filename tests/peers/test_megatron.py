"""megatron-core 0.16.1: a real `GPTModel` (local spec, CPU), forward and backward: our batches against samples alone."""

from types import SimpleNamespace

import megatron_work as work
import pytest
import torch
from hypothesis import given, settings, strategies as st
from megatron_world import PAD, TEDotProductAttention, build, far, loss_and_gradients, samples

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Segments, check_delivery, guard_first_batch, last_token
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations.megatron import gpt_batch
from collate_npu.masks import dense
from collate_npu.outputs import per_sequence
from collate_npu.parallel import ContextParallel

NEEDS = ("megatron",)

pytestmark = pytest.mark.usefixtures("cpu")

LENGTHS = (7, 3, 5)


@pytest.fixture(scope="module")
def model(cpu):
    return build()


def strangers(rows, side):
    """As transformers' collators pad: a 2D mask, positions by place."""
    batch = PaddingCollator(pad_token_id=PAD, padding_side=side)(rows)
    places = torch.arange(batch["input_ids"].shape[1]).expand(batch["input_ids"].shape)
    labels = batch["input_ids"].masked_fill(~batch["attention_mask_2d"], -100)  # the first of a row, too
    return {**batch, "labels": labels, "attention_mask": batch.pop("attention_mask_2d").long(), "position_ids": places}


def packed(rows, side):
    """As packing trainers do: one row, packing ids for a mask, positions by place."""
    ids = torch.tensor([[x for row in rows for x in row["input_ids"]]])
    numbered = torch.tensor([[n for n, row in enumerate(rows, 1) for _ in row["input_ids"]]])
    return {"input_ids": ids, "labels": ids, "attention_mask": numbered, "position_ids": torch.arange(ids.shape[1])[None]}


def ours(rows, side):
    return PaddingCollator(pad_token_id=PAD, padding_side=side)(rows)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    side=st.sampled_from(["left", "right"]),
    laid=st.sampled_from([ours, strangers, packed]),
)
@settings(max_examples=20, deadline=None)
def test_any_batch_equals_its_samples_alone_in_logits_loss_and_gradients(model, lengths, side, laid):
    """Law 15 at this door; the model's positions are learned, one by one."""
    collator = PaddingCollator(pad_token_id=PAD)
    rows = samples(*lengths)
    loss, logits, gradients = loss_and_gradients(model, [gpt_batch(laid(rows, side), model)])
    alone = loss_and_gradients(model, [gpt_batch(collator([row]), model) for row in rows])
    assert max(float((x - y).abs().max()) for x, y in zip(logits, alone[1])) <= 1e-5
    assert abs(loss - alone[0]) <= 1e-5 * (1 + abs(alone[0]))
    assert far(gradients, alone[2]) <= 1e-5


@pytest.mark.parametrize("polarity", ["keep", "masked", "bias"])
def test_a_4d_mask_of_a_foreign_collator_reaches_the_model_in_megatrons_polarity(model, polarity):
    truth = Segments.from_lengths(LENGTHS, side="left")
    ids = torch.where(truth.keep, torch.arange(truth.ids.numel()).view(truth.shape) % 60 + 1, PAD)
    batch = {"input_ids": ids, "attention_mask": dense(truth, polarity=polarity)}
    inputs, found = gpt_batch(batch, model)
    assert found == truth
    assert torch.equal(inputs["attention_mask"], dense(truth, polarity="masked"))
    assert inputs["position_ids"].tolist() == truth.position_ids.tolist()
    logits = per_sequence(model(**inputs, labels=None), truth)
    for b, row in enumerate(logits):
        alone, _ = gpt_batch({"input_ids": ids[b, truth.keep[b]][None], "attention_mask": torch.ones(1, len(row))}, model)
        assert (model(**alone, labels=None)[0] - row).abs().max() <= 1e-5


def test_it_has_power_upstream_the_other_polarity_is_wrong_in_silence(model):
    inputs, truth = gpt_batch(PaddingCollator(pad_token_id=PAD, padding_side="left")(samples(*LENGTHS)), model)
    del inputs["loss_mask"], inputs["labels"]
    right = per_sequence(model(**inputs), truth)
    wrong = per_sequence(model(**{**inputs, "attention_mask": ~inputs["attention_mask"]}), truth)
    blind = dense(Segments.from_lengths([7, 7, 7]), polarity="masked")
    padded = per_sequence(model(**{**inputs, "attention_mask": blind}), truth)
    for other in (wrong, padded):
        assert max(float((x - y).abs().max()) for x, y in zip(right, other)) > 1e-2


def test_labels_are_shifted_and_what_follows_padding_or_nothing_is_not_learned(model):
    batch = PaddingCollator(pad_token_id=PAD, padding_side="left")([{"input_ids": [5, 6], "labels": [5, 6]}, *samples(4)])
    inputs, _ = gpt_batch(batch, model)
    assert inputs["labels"][0].tolist() == [0, 0, 6, 0]
    assert inputs["loss_mask"].tolist() == [[0, 0, 1, 0], [1, 1, 1, 0]]


def test_labels_that_are_shifted_already_are_refused(model):
    batch = strangers(samples(*LENGTHS), "left")
    batch["labels"] = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    with pytest.raises(CollateError, match="these are moved already"):
        gpt_batch(batch, model)


def test_a_model_without_experts_gets_no_padding_mask(model):
    assert "padding_mask" not in gpt_batch(PaddingCollator(pad_token_id=PAD)(samples(*LENGTHS)), model)[0]


# --- kernels that read no mask


def one_fused_layer(**config):
    module = torch.nn.Sequential(type("TEDotProductAttention", (torch.nn.Module,), {})())
    module.config = SimpleNamespace(num_moe_experts=None, linear_attention_freq=None, masked_softmax_fusion=False, **config)
    return module


def test_transformer_engine_gets_none_where_that_is_exact_and_a_refusal_elsewhere():
    right = PaddingCollator(pad_token_id=PAD)(samples(*LENGTHS))
    assert gpt_batch(right, one_fused_layer())[0]["attention_mask"] is None
    left = PaddingCollator(pad_token_id=PAD, padding_side="left")(samples(*LENGTHS))
    with pytest.raises(UnsupportedFormError, match="fused softmax, read no dense mask, and padding stands on the left"):
        gpt_batch(left, one_fused_layer())


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("masked_softmax_fusion", True, "run local kernels with masked_softmax_fusion=False"),
        ("linear_attention_freq", 2, "GatedDeltaNet of megatron-core reads no padding mask"),
    ],
)
def test_the_fused_local_softmax_and_gated_delta_net_read_no_left_padding(model, monkeypatch, setting, value, said):
    monkeypatch.setattr(model.config, setting, value)
    right, left = (PaddingCollator(pad_token_id=PAD, padding_side=side)(samples(*LENGTHS)) for side in ("right", "left"))
    assert (gpt_batch(right, model)[0]["attention_mask"] is None) == (setting == "masked_softmax_fusion")
    with pytest.raises(UnsupportedFormError, match=said):
        gpt_batch(left, model)


# --- context parallelism


def test_recurrent_layers_get_the_tokens_whose_zigzag_they_undo(model, monkeypatch):
    right = PaddingCollator(pad_token_id=PAD, pad_to_multiple_of=8)(samples(*LENGTHS))
    slices, zigzag = ContextParallel(2, 0, layout="contiguous"), ContextParallel(2, 0)
    assert gpt_batch(right, model, context_parallel=slices)[0]["input_ids"].shape[1] == 4
    monkeypatch.setattr(model.config, "linear_attention_freq", 2)
    assert gpt_batch(right, model, context_parallel=zigzag)[0]["input_ids"].shape[1] == 4
    with pytest.raises(UnsupportedFormError, match=r"got 'contiguous'\. .*layout='zigzag'"):
        gpt_batch(right, model, context_parallel=slices)
    flat = PaddingCollator(pad_token_id=PAD, padding_free=True)(samples(*LENGTHS))
    monkeypatch.setattr(model, "modules", list)  # its local attention takes no flat row
    monkeypatch.setattr(model.config, "linear_num_key_heads", 1, raising=False)
    with pytest.raises(UnsupportedFormError, match=r"got 'contiguous'\. .*layout='document_zigzag'"):
        gpt_batch(flat, model, context_parallel=slices, padding_free=True)
    with pytest.raises(CollateError, match=r"heads: got \[1"):
        gpt_batch(flat, model, context_parallel=zigzag, padding_free=True)


def test_the_loop_without_any_framework(model):
    """The same collator, `BatchAdapter` instead of `gpt_batch`, the way back with `last_token`."""
    collator = PaddingCollator(pad_token_id=PAD, padding_side="left")
    adapter = BatchAdapter(model, consumer="megatron")
    inputs, segments = adapter.with_segments(collator(samples(*LENGTHS)))
    inputs.pop("labels")
    last = last_token(model(**inputs), segments)
    for b, row in enumerate(samples(*LENGTHS)):
        alone, _ = gpt_batch(collator([row]), model)
        assert (model(**{**alone, "labels": None})[0, -1] - last[b]).abs().max() <= 1e-5


# --- delivery: what `gpt_batch` hands over passes, other hand-overs name the layers


@pytest.fixture(scope="module")
def local():
    return build()


@pytest.fixture(scope="module")
def fused():
    return build(attention=TEDotProductAttention)


def wire(side):
    return PaddingCollator(pad_token_id=PAD, padding_side=side)(samples(7, 3, 5))


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_gpt_batch_hands_over_is_delivered(local, side):
    inputs, segments = gpt_batch(wire(side), local)
    found = check_delivery(local, inputs, segments=segments, alone=True)
    assert set(found.layers) == {f"decoder.layers.{n}.self_attention" for n in range(2)}
    assert max(found.alone.errors.values()) <= found.alone.limit < 1e-4


def test_a_mask_of_the_other_polarity_names_the_layers(local):
    inputs, segments = gpt_batch(wire("left"), local)
    keep = dense(segments, polarity="keep")
    with pytest.raises(CollateError, match=r"decoder\.layers\.0\.self_attention.*attends (padding|more than causal)"):
        check_delivery(local, inputs | {"attention_mask": keep}, segments=segments)


def test_a_kernel_that_reads_no_mask_is_told(fused):
    batch = wire("left")
    inputs, segments = gpt_batch(wire("right"), fused)
    check_delivery(fused, inputs, segments=segments, alone=True)
    left = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
    truth = gpt_batch(batch, build())[1]
    masks = {"attention_mask": dense(truth, polarity="masked")}
    with pytest.raises(CollateError, match="goes on from padding"):
        check_delivery(fused, left | masks, segments=truth)


def test_a_flat_row(fused):
    flat = PaddingCollator(padding_free=True)(samples(4, 3, 5))
    inputs, segments = gpt_batch(flat, fused, padding_free=True)
    check_delivery(fused, inputs, segments=segments, alone=True)
    with pytest.raises(CollateError, match="goes on from another sequence"):
        check_delivery(fused, inputs | {"packed_seq_params": None}, segments=segments)


def test_the_guard_sees_the_first_forward_of_a_loop(local):
    inputs, segments = gpt_batch(wire("left"), local)
    guard_first_batch(local, segments=segments)
    with pytest.raises(CollateError, match="self_attention"):
        local(**inputs | {"attention_mask": torch.zeros(3, 1, 7, 7, dtype=torch.bool)})
    guard_first_batch(local, segments=segments, alone=True)
    local(**inputs)


# --- two Gloo processes: context parallelism, or tensor and sequence parallelism, against one process
#
# Attention is the test's own in the place of a GPU kernel's (megatron_world.py).


IMPORTS = 120


@pytest.fixture
def pool(ranks):
    """Two ranks of a context-parallel group."""
    ranks(2)("megatron_work.start", 1, seconds=IMPORTS)
    return ranks(2)


@pytest.fixture
def tensor_ranks(ranks):
    """Two ranks of a tensor-parallel group."""
    ranks(2)("megatron_work.start", 2, seconds=IMPORTS)
    return ranks(2)


@pytest.mark.parametrize("case", work.CASES)
def test_two_ranks_equal_one_process_in_loss_logits_and_gradients(pool, case):
    alone = work.run(case)
    for found in pool("megatron_work.run", case, seconds=IMPORTS):
        gaps = work.compare(found, alone)
        assert max(gaps.values()) <= 1e-5, gaps
        B, S = alone["shapes"]["input_ids"]
        assert found["shapes"]["input_ids"][0] == B
        assert S / 2 <= found["shapes"]["input_ids"][1] <= (S + 3 * 4) / 2  # flat: alignment behind each sequence


@pytest.mark.parametrize(("case", "how"), [(case, how) for case, ways in work.SPOILT.items() for how in ways])
def test_it_has_power(pool, case, how):
    alone = work.run(case)
    for found in pool("megatron_work.run", case, how, seconds=IMPORTS):
        assert max(work.compare(found, alone).values()) > 1e-2


def test_a_rank_whose_batch_is_refused_says_so(pool):
    told, refused = pool("megatron_work.refused", seconds=IMPORTS)
    assert "rank 1 raised CollateError: loss_mask" in told
    assert refused.startswith("loss_mask: got beside labels")


@pytest.mark.parametrize("side", ["left", "right"])
def test_each_key_is_what_megatrons_own_split_gives_the_rank(pool, side):
    pool("megatron_work.same_as_megatron", side, seconds=IMPORTS)


@pytest.mark.parametrize(
    ("multiple", "padding_free", "shape"), [(8, False, [3, 8]), (16, False, [3, 16]), (1, True, [1, 16])]
)
def test_routers_under_sequence_parallelism_count_no_padding(tensor_ranks, multiple, padding_free, shape):
    """GPTModel shares the mask out itself, so it takes that of all tokens; a flat row is padded to what it can share."""
    alone = work.sequence_parallel(multiple, padding_free)
    for found in tensor_ranks("megatron_work.sequence_parallel", multiple, padding_free, seconds=IMPORTS):
        assert found["shape"] == shape
        assert abs(found["loss"] - alone["loss"]) <= 1e-5 * alone["loss"]
        assert (found["aux"] - alone["aux"]).abs().max() <= 1e-5
        assert far(found["routers"], alone["routers"]) <= 1e-5


def test_a_width_that_sequence_parallelism_cannot_share_out(tensor_ranks):
    for said in tensor_ranks("megatron_work.refusal", seconds=IMPORTS):
        assert "width: got 7 tokens" in said
        assert "pad_to_multiple_of=2" in said
