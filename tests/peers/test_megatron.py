"""megatron-core 0.16.1 and 0.19.2: real `GPTModel`s on a CPU, forward and backward. Our batches against samples alone, in
one process and on ranks that share a row, and what is refused.

TransformerEngine's attention and fla's kernels are stand-ins (megatron_world.py). From 0.18 on Megatron's own Gated DeltaNet
takes flat rows and runs on several ranks.
"""

from dataclasses import fields, make_dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any

import megatron_world as world
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from megatron_world import EXPERTS, NATIVE, PAD, RELEASE, aux_losses, far, gaps, gpt, hybrid, outcome, packed_rows, samples
from torch import Tensor

from collate_npu import CollateError, PaddingCollator, Segments, check_delivery
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations import megatron
from collate_npu.integrations.megatron import gpt_batch, packed_seq_params, takes_places
from collate_npu.integrations.swift import number_sequences
from collate_npu.masks import dense
from collate_npu.parallel import ContextParallel
from collate_npu.proof import watch

NEEDS = ("megatron",)
pytestmark = pytest.mark.usefixtures("cpu")
EXACT, IMPORTS = 1e-5, 120
ROWS = samples(7, 3, 5)
needs_native = pytest.mark.skipif(not NATIVE, reason="Gated DeltaNet takes flat rows from megatron-core 0.18 on")


def padded(rows: Any = ROWS, side: str = "right", multiple: int = 1) -> dict[str, Any]:
    return PaddingCollator(pad_token_id=PAD, padding_side=side, pad_to_multiple_of=multiple)(rows)


def flat(rows: Any = ROWS, side: str = "right", multiple: int = 1) -> dict[str, Any]:
    return PaddingCollator(pad_token_id=PAD, padding_free=True, pad_to_multiple_of=multiple)(rows)


def strangers(rows: Any = ROWS, side: str = "right") -> dict[str, Any]:
    """As transformers' collators pad: a 2D mask, positions by place; the first label of a row is learned, too."""
    batch = padded(rows, side)
    places = torch.arange(batch["input_ids"].shape[1]).expand(batch["input_ids"].shape)
    labels = batch["input_ids"].masked_fill(~batch["attention_mask_2d"], -100)
    return {**batch, "labels": labels, "attention_mask": batch.pop("attention_mask_2d").long(), "position_ids": places}


def packed(rows: Any = ROWS, side: str = "right") -> dict[str, Any]:
    """The first sequence in a row, the others in the next, with segment ids."""
    lengths = [len(row["input_ids"]) for row in rows]
    return packed_rows(rows, [lengths[:1], *([lengths[1:]] if rows[1:] else [])])


def trained(**changed: Any) -> Any:
    """Attention alone, of Megatron's local kernels if no other is named; positions are learned, one by one."""
    return gpt(**{"flash": None, "positions": "learned_absolute", **changed}).train()


def areal(rows: Any = ROWS, side: str = "right") -> dict[str, Any]:
    """AReaL 1.0.4 (utils/data.py:815, engine/megatron_engine.py:2023-2110): each sequence padded to what ranks share out,
    the row to a page, which is one more sequence, of the real offsets one without a token."""
    held = [row["input_ids"] + [PAD] * (-len(row["input_ids"]) % 4) for row in rows]
    learned = [row["input_ids"] + [-100] * (-len(row["input_ids"]) % 4) for row in rows]
    ends, real = ([0, *accumulate(map(len, each))] for each in (held, [row["input_ids"] for row in rows]))
    page = (ends[-1] // 64 + 1) * 64
    batch = {"cu_seqlens_padded": torch.tensor([*ends, page]), "cu_seqlens": torch.tensor([*real, real[-1]])}
    for key, each, fill in (("input_ids", held, PAD), ("labels", learned, -100)):
        batch[key] = torch.tensor([[*chain(*each), *[fill] * (page - ends[-1])]])
    return batch


DENSE = {"flash": world.DotProductAttention, "positions": "rope"}
KERNEL = {"flash": world.TEDotProductAttention, "positions": "rope"}
LEARNED = {"positions": "learned_absolute"}


def alone(model: Any, rows: Any) -> dict[str, Any]:
    return outcome(model, *(gpt_batch(padded([row]), model) for row in rows))


# --- one process

MODELS = {
    "local kernels": (trained, (padded, strangers, packed)),
    "a flash kernel": (partial(trained, **KERNEL), (flat, areal)),
    "learned positions": (partial(trained, **KERNEL | LEARNED), (flat, partial(flat, multiple=8))),
    "Gated DeltaNet": (hybrid, (flat, partial(flat, multiple=8))),
}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[needs_native] * (name[0] == "G")) for name in MODELS])
def model_and_layouts(cpu, request):
    make, layouts = MODELS[request.param]
    return make(), layouts


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), side=st.sampled_from(["left", "right"]), data=st.data())
@settings(max_examples=20, deadline=None)
def test_any_batch_equals_its_samples_alone_in_logits_loss_and_gradients(model_and_layouts, lengths, side, data):
    """Law 15 at this door."""
    (model, layouts), rows = model_and_layouts, samples(*lengths, 4)
    batch = data.draw(st.sampled_from(layouts))(rows, side)
    found = outcome(model, gpt_batch(batch, model, padding_free=not {"cu_seq_lens_q", "cu_seqlens"}.isdisjoint(batch)))
    assert max(gaps(found, alone(model, rows)).values()) <= EXACT * (10 if model.config.num_layers == 3 else 1)


@pytest.mark.parametrize("ends", [True, False], ids=["ends learned", "ends not learned"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_labels_and_a_loss_mask_as_megatrons_datasets_move_them_are_not_moved_again(side, ends):
    """miles 3219, Megatron-LM 5298: the loss mask is of predictions."""
    model, batch = trained(), strangers(ROWS, side)
    learned = batch["labels"] if ends else batch["labels"].masked_fill(batch["input_ids"] == ROWS[0]["input_ids"][-1], -100)
    moved = torch.nn.functional.pad(learned[:, 1:], (0, 1), value=-100)
    whole = torch.nn.functional.pad(batch["input_ids"][:, 1:], (0, 1), value=0)
    found = gpt_batch({**batch, "labels": whole, "loss_mask": (moved >= 0).float()}, model)
    wanted = gpt_batch({**batch, "labels": learned}, model)
    assert max(gaps(outcome(model, found), outcome(model, wanted)).values()) <= 1e-6
    with pytest.raises(CollateError, match="a second one would be lost"):  # of tokens, or of predictions?
        gpt_batch({**batch, "labels": learned, "loss_mask": (learned >= 0).float()}, model)


# --- ranks: context parallelism, or tensor and sequence parallelism, against one process. What stands here runs on each rank

SIX, LONG = samples(7, 3, 6), samples(1, 5, 1, 1, 3, 2)
MTP = {"mtp_num_layers": 2, "calculate_per_token_loss": True}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "right padding": (partial(padded, SIX, "right", 4), KERNEL | LEARNED),
    "left padding, dense": (partial(padded, SIX, "left", 4), DENSE | LEARNED),
    "packed rows, dense": (lambda: packed_rows(samples(7, 1, 3, 5), [[7, 1], [3, 5]]), DENSE),
    "flat": (partial(flat, SIX), KERNEL | LEARNED),
    "flat, padding behind the last alone": (partial(flat, samples(8, 4, 6)), KERNEL),
    "experts": (partial(padded, SIX, "right", 4), KERNEL | EXPERTS),
    "experts, left padding, dense": (partial(padded, SIX, "left", 4), DENSE | EXPERTS),
    "experts, flat": (partial(flat, SIX), KERNEL | EXPERTS),
    "multi-token prediction": (partial(padded, SIX, "right", 4), KERNEL | MTP),
    "multi-token prediction, flat": (partial(flat, SIX), KERNEL | MTP),
}
RECURRENT = {
    "one-token sequences": partial(flat, LONG),
    "a tail": partial(flat, samples(6, 3, 4), multiple=8),
    "rows padded right": partial(padded, samples(5, 11, 1, 7), "right", 16),
}


def on_ranks(case: str) -> dict[str, Any]:
    """The outcome of a case on this rank, the shape of its tokens, and what watching says."""
    make, changed = CASES.get(case) or (RECURRENT[case], None)
    batch, model = make(), hybrid() if changed is None else gpt(**changed).train()
    inputs, truth = gpt_batch(batch, model, padding_free="attention_mask_2d" not in batch)
    with watch(say=False) as seen:
        found = outcome(model, (inputs, truth))
    return {**found, "shape": list(inputs["input_ids"].shape), "faults": [*map(str, seen.faults)], "told": seen.summary()}


def check(found: dict[str, Any], wanted: dict[str, Any], limit: float, size: int) -> None:
    apart, (B, S) = gaps(found, wanted), wanted["shape"]
    assert max(apart.values()) <= limit, apart
    assert found["faults"] == []
    assert found["shape"][0] == B
    assert S / size <= found["shape"][1] <= (S + 6 * 2 * size) / size  # flat: alignment behind each sequence


@pytest.mark.parametrize("case", [case for case in CASES if RELEASE < 19 or "multi" not in case])
def test_two_ranks_equal_one_process_in_loss_logits_and_gradients(pool, case):
    """But for prediction on 0.19.2: each rank weights that loss by its own tokens (multi_token_prediction.py:876)."""
    wanted = on_ranks(case)
    for found in pool("test_megatron.on_ranks", case, seconds=IMPORTS):
        check(found, wanted, EXACT, 2)


@needs_native
@pytest.mark.parametrize("pool", [2, 4], indirect=True)
@pytest.mark.parametrize("case", RECURRENT)
def test_recurrent_layers_share_a_row_between_ranks(pool, case):
    """Each sequence of a flat row is padded to what the ranks share out; the kernels of whole rows are watched."""
    wanted = on_ranks(case)
    for found in pool("test_megatron.on_ranks", case, seconds=IMPORTS):
        check(found, wanted, 10 * EXACT, pool.size)
        assert "no fault in 2 of 2 forwards" in found["told"] or "rows" in case


def untold() -> list[str]:
    """What watching says where the rule of each recurrent layer lost its boundaries (slime pull request 1686)."""
    from megatron.core.ssm.gated_delta_net import gdn

    model = hybrid()
    rule = lambda *args, cu_seqlens=None, **more: gdn.chunk_gated_delta_rule(*args, **more)  # noqa: E731
    for layer in model.decoder.layers:
        layer.self_attention.gated_delta_rule = rule
    inputs, _ = gpt_batch(flat(SIX), model, padding_free=True)
    with watch(say=False) as seen:
        model(**inputs)
    return [*map(str, seen.faults)]


@needs_native
def test_on_two_ranks_a_rule_without_its_boundaries_is_a_fault(pool):
    for faults in pool("test_megatron.untold", seconds=IMPORTS):
        assert "goes on from another sequence" in faults[0]


def sequence_parallel(multiple: int, padding_free: bool = False) -> dict[str, Any]:
    """Loss, losses of routers and their gradients: each rank's routers see half the tokens."""
    tp = dist.get_world_size()
    model = trained(**KERNEL, **EXPERTS, tensor_model_parallel_size=tp, sequence_parallel=tp > 1, add_bias_linear=False)
    inputs, _ = gpt_batch((flat if padding_free else padded)(ROWS, "right", multiple), model, padding_free=padding_free)
    aux_losses()
    loss = (model(**inputs) * inputs["loss_mask"]).sum()
    loss.backward()
    routers = {name: p.grad for name, p in model.named_parameters() if name.endswith("router.weight")}
    aux = aux_losses()
    for value in (aux, *routers.values()) if tp > 1 else ():
        dist.all_reduce(value)
    return {"loss": loss.detach(), "aux": aux, "routers": routers, "shape": list(inputs["padding_mask"].shape)}


@pytest.mark.parametrize(
    ("multiple", "padding_free", "shape"), [(8, False, [3, 8]), (16, False, [3, 16]), (1, True, [1, 16])]
)
def test_routers_under_sequence_parallelism_count_no_padding(ranks, multiple, padding_free, shape):
    """GPTModel shares the mask out itself, so it takes that of all tokens; a flat row is padded to what it can share."""
    ranks(2)("megatron_world.start_ranks", 2, seconds=IMPORTS)
    wanted = sequence_parallel(multiple, padding_free)
    for found in ranks(2)("test_megatron.sequence_parallel", multiple, padding_free, seconds=IMPORTS):
        assert found["shape"] == shape
        assert abs(found["loss"] - wanted["loss"]) <= EXACT * wanted["loss"]
        assert (found["aux"] - wanted["aux"]).abs() <= EXACT
        assert far(found["routers"], wanted["routers"]) <= EXACT


# --- what routers count

LOSSES = {
    "aux_loss": {},
    "seq_aux_loss": {"moe_router_load_balancing_type": "seq_aux_loss"},
    "global_aux_loss": {"moe_router_load_balancing_type": "global_aux_loss"},
    "z_loss": {"moe_z_loss_coeff": 1.0, "moe_aux_loss_coeff": 0.0},
    "per_token": {"calculate_per_token_loss": True},
}


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_of_routers_logits_and_gradients_are_the_same_with_more_padding(kind):
    found = []
    for multiple in (1, 16):
        model = trained(**EXPERTS | LOSSES[kind])
        found.append(outcome(model, gpt_batch(padded(ROWS, "left", multiple), model)))
    assert found[0]["aux"].any()
    assert max(gaps(*found).values()) <= EXACT


BIASED = EXPERTS | {
    "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "moe_aux_loss_coeff": 0.0,
}  # fmt: skip


def test_the_bias_of_experts_counts_real_tokens():
    model = trained(**BIASED)
    routers = [module for name, module in model.named_modules() if name.endswith("router")]
    counts = {}
    megatron.install()
    with torch.compiler.set_stance("force_eager"):
        for multiple in (1, 16):
            model(**gpt_batch(padded(ROWS, "left", multiple), model)[0])
            counts[multiple] = torch.stack([router.local_tokens_per_expert.clone() for router in routers])
            [router.local_tokens_per_expert.zero_() for router in routers]
        megatron.uninstall()
        model(**gpt_batch(padded(samples(6, 6)), model)[0])  # no mask: the router would stop at it
    assert torch.equal(counts[1], counts[16])
    assert counts[1].sum(1).tolist() == [15 * 2, 15 * 2]


# --- what no kernel, router or prediction layer of the model computes right is refused

CAPACITY = {"moe_expert_capacity_factor": 0.5, "moe_token_dispatcher_type": "alltoall"}
SINKHORN = {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0}
QUANTILE = {"moe_router_load_balancing_type": "quantile_balancing", "moe_aux_loss_coeff": 0.0}
ALONG = "Multi-token prediction moves labels along the whole row"
LEFT, FUSED, TWO = partial(padded, ROWS, "left"), {"masked_softmax_fusion": True}, ContextParallel(2, 0)
SLICES, EIGHT = {"context_parallel": ContextParallel(2, 0, layout="contiguous")}, partial(padded, ROWS, "right", 8)
REFUSED = {
    "a fused softmax reads no mask": (LEFT, FUSED, {}, "run local kernels with masked_softmax_fusion=False"),
    "Gated DeltaNet reads none": (LEFT, {"kinds": "ga"}, {}, "GatedDeltaNet of megatron-core reads no padding mask"),
    "capacity": (EIGHT, EXPERTS | CAPACITY, {}, "With moe_expert_capacity_factor=0.5 padding takes experts' places"),
    "sinkhorn": (EIGHT, EXPERTS | SINKHORN, {}, "With sinkhorn padding takes experts' places"),
    "quantiles": (EIGHT, EXPERTS | QUANTILE, {}, "With quantile_balancing padding"),
    "expert bias": (LEFT, BIASED, {}, r"issue 6111.*collate_npu\.integrations\.megatron\.install\(\)"),
    "prediction from the left": (LEFT, MTP, {}, ALONG),
    "prediction in packed rows": (packed, MTP, {}, ALONG),
    "prediction with experts": (padded, MTP | EXPERTS, {}, "Routers of the multi-token prediction layers count padding"),
    "recurrent slices": (EIGHT, {"kinds": "ga"}, SLICES, r"got 'contiguous'\. .*layout='zigzag'"),
    "recurrent slices, flat": (flat, {"kinds": "ga", **KERNEL}, SLICES, r"got 'contiguous'\. .*layout='document_zigzag'"),
    "heads": (flat, {"kinds": "ga", **KERNEL, "linear_num_key_heads": 1}, {"context_parallel": TWO}, r"heads: got \[1"),
}


@pytest.mark.parametrize("name", [name for name in REFUSED if RELEASE >= 19 or name != "quantiles"])
def test_what_would_be_computed_wrong_is_refused_and_right_padding_is_not(name, monkeypatch):
    """Capacity, Sinkhorn, quantiles and multi-token prediction are wrong upstream in silence."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    make, changed, given, said = REFUSED[name]
    model, batch = trained(**changed), make()
    given = {"padding_free": "attention_mask_2d" not in batch, **given}
    with pytest.raises(CollateError, match=said) as caught:
        gpt_batch(batch, model, **given)
    assert isinstance(caught.value, UnsupportedFormError) or name == "heads"
    if not given.get("context_parallel"):
        whole, _ = gpt_batch(padded(samples(6, 6)), model)
        assert (whole["attention_mask"] is None) == (name == "a fused softmax reads no mask")
        assert not whole.get("padding_mask", torch.zeros(1)).any()
    elif "heads" not in name:
        ranks = {**given, "context_parallel": TWO.for_documents() if given["padding_free"] else TWO}
        assert gpt_batch(batch, model, **ranks)[0]["input_ids"].shape[1] in (4, 10)


# --- delivery: what `gpt_batch` hands over passes, other hand-overs name the layers


def test_check_delivery_of_a_dense_mask_of_right_padding_and_of_a_flat_row():
    local, fused = trained(), trained(flash=world.TEDotProductAttention)
    left, truth = gpt_batch(LEFT(), local)
    found = check_delivery(local, left, segments=truth, alone=True)
    assert set(found.layers) == {f"decoder.layers.{n}.self_attention" for n in range(2)}
    assert max(found.alone.errors.values()) <= found.alone.limit < 1e-4
    for batch in (padded(), flat()):
        inputs, segments = gpt_batch(batch, fused, padding_free="attention_mask_2d" not in batch)
        check_delivery(fused, inputs, segments=segments, alone=True)
    keep = dense(truth, polarity="keep")
    for model, handed, meant, said in (
        (local, {**left, "attention_mask": keep}, truth, r"decoder\.layers\.0\.self_attention.*attends (padding|more than)"),
        (fused, {**inputs, "packed_seq_params": None}, segments, "goes on from another sequence"),
        (fused, left, truth, "goes on from padding"),
    ):
        with pytest.raises(CollateError, match=said):
            check_delivery(model, handed, segments=meant)


# --- PackedSeqParams

GAPS = Segments([[1, 1, 1, 0, 2, 2, 0, 0]])


def test_every_field_of_the_installed_class():
    params = packed_seq_params(GAPS)
    told = {field.name: getattr(params, field.name) for field in fields(params)}
    told = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in told.items()}
    sides = {f"{name}{side}{kind}": value for side in ("q", "kv") for name, kind, value in (
        ("cu_seqlens_", "", [0, 3, 5]), ("cu_seqlens_", "_padded", [0, 4, 8]), ("max_seqlen_", "", 4))}  # fmt: skip
    known = {"total_tokens": 8, "seq_idx": [[0] * 4 + [1] * 4], "pad_between_seqs": True, "qkv_format": "thd", **sides}
    assert told == {name: known.get(name) for name in told}
    assert known.keys() - told.keys() <= {"total_tokens", "seq_idx", "pad_between_seqs"}
    assert params.cu_seqlens_q.dtype == params.cu_seqlens_q_padded.dtype == torch.int32


@needs_native
def test_mambas_sequence_numbers_where_the_width_is_told_late():
    """As ms-swift 4.6.0 sets it (megatron/utils/utils.py:272): a constructor without it leaves the numbers out."""
    late = packed_seq_params(GAPS)
    late.total_tokens, late.seq_idx = 8, None
    number_sequences(late)
    assert late.seq_idx.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1]]


def test_padding_behind_the_last_sequence_alone_which_transformer_engine_does_not_see(monkeypatch):
    """It compares offsets without the last one, so that nothing may be left for it to see; 0.19 has a field for it."""
    from megatron.core import packed_seq_params as module

    tail = Segments([[1, 1, 1, 1, 2, 2, 0, 0]])
    if not hasattr(packed_seq_params(tail), "pad_between_seqs"):
        assert packed_seq_params(tail).cu_seqlens_q.tolist() == [0, 4, 8]
        later = make_dataclass("PackedSeqParams", [("pad_between_seqs", object, None)], bases=(module.PackedSeqParams,))
        monkeypatch.setattr(module, "PackedSeqParams", later)
    params, full = packed_seq_params(tail), packed_seq_params(Segments([[1, 1, 1, 2, 2]]))
    assert (params.cu_seqlens_q.tolist(), params.pad_between_seqs, full.pad_between_seqs) == ([0, 4, 6], True, False)
    assert full.cu_seqlens_q is full.cu_seqlens_q_padded, "another object is taken for padding"


@pytest.mark.parametrize("where", ["consumers.mindspeed.is_installed", "integrations.megatron.npu_engine"])
def test_what_takes_offsets_for_places_gets_physical_ones(monkeypatch, where):
    """MindSpeed's attention and TransformerEngineNPU's read no others; nor do multi-token prediction and mcore-bridge."""
    model = trained(**KERNEL)
    bridged = type("GPTModel", (torch.nn.Module,), {"__module__": "mcore_bridge.model.gpt_model", "config": model.config})()
    assert [takes_places(each) for each in (model, bridged, trained(**KERNEL, **MTP))] == [False, True, True]
    monkeypatch.setattr(f"collate_npu.{where}", lambda *names: True)
    for params in (packed_seq_params(GAPS), packed_seq_params(GAPS, padding_counts=True)):
        assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 4, 8]
        assert params.cu_seqlens_q is params.cu_seqlens_q_padded


@pytest.mark.parametrize(
    ("ids", "what"),
    [
        ([[0, 1, 1, 2]], "padding before the first sequence"),
        ([[1, 0, 1, 2]], "padding inside a sequence"),
        ([[1, 1], [1, 0]], "one flat row"),
        ([[0, 0]], "at least one sequence"),
    ],
)
def test_padding_that_no_offsets_describe(ids, what):
    with pytest.raises(CollateError, match=what):
        packed_seq_params(Segments(ids))
