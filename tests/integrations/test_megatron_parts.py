"""What is decided for models of Megatron before any stack is there; on the real ones: tests/peers."""

import sys
from contextlib import nullcontext
from dataclasses import make_dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from collate_npu import CollateError, ContextParallel, Segments, releases
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations import megatron, swift, twinkle
from collate_npu.integrations.megatron import experts, mcore_bridge, packed
from collate_npu.integrations.swift import masks as swift_masks
from collate_npu.integrations.twinkle import stages
from collate_npu.integrations.twinkle.stages import Stages, refuse_unread
from collate_npu.keys import KEEP_KEY, SEGMENT_KEY

LEFT, PACKED = Segments.from_lengths([2, 3], side="left"), Segments.from_lengths([[2, 3]])


def refused(text):
    """A refusal that says this; none where there is nothing to say."""
    return pytest.raises(CollateError, match=text) if text else nullcontext()


def local(**config):
    """A model of Megatron's own attention."""
    model = nn.Sequential(type("DotProductAttention", (nn.Module,), {})())
    model.config = SimpleNamespace(**{"num_moe_experts": None, "linear_attention_freq": None, **config})
    return model


# --- Megatron's own models


@pytest.mark.parametrize("config", [{}, {"sequence_parallel": False}, {"sequence_parallel": True}])
@pytest.mark.parametrize("there", [True, False])
def test_ranks_that_are_not_told_are_megatrons_and_agree_on_the_batch(monkeypatch, config, there):
    cp, seen = ContextParallel(1, 0) if there else None, []
    monkeypatch.setattr(megatron, "megatron_ranks", lambda *, shared: seen.append(shared) or cp)
    monkeypatch.setattr(megatron, "ranks_agree", lambda *told, call: seen.append((*told, call)) or nullcontext())
    batch = {"input_ids": torch.ones(2, 3).long(), "attention_mask": LEFT.keep.long()}
    assert megatron.gpt_batch(batch, local(**config))[1] == LEFT
    assert seen == [config.get("sequence_parallel", False)] + [(cp, "split")] * there


def test_the_name_of_a_model_is_refused_as_such():
    with pytest.raises(CollateError, match=r"from_pretrained\('Qwen/Qwen3'\)"):
        megatron.gpt_batch({}, "Qwen/Qwen3")
    with pytest.raises(CollateError, match="SimpleNamespace"):
        megatron.gpt_batch({"input_ids": torch.ones(1, 3).long()}, SimpleNamespace(num_moe_experts=None))


@pytest.mark.parametrize(
    ("given", "handed_on"), [([[0, 1, 2], [0, 1, 2]], LEFT.position_ids.tolist()), ([[0, 5, 6]] * 2,) * 2]
)
def test_positions_that_count_places_are_counted_again_and_your_own_are_kept(given, handed_on):
    batch = {"input_ids": torch.ones(2, 3).long(), "attention_mask": LEFT.keep.long(), "position_ids": torch.tensor(given)}
    inputs, _ = megatron.gpt_batch(batch, local(), context_parallel=ContextParallel(1, 0))
    assert inputs["position_ids"].tolist() == handed_on


def test_layers_that_do_not_part_sequences_are_looked_for_where_a_flat_row_has_several(monkeypatch):
    monkeypatch.setattr(megatron, "_refuse_flat", lambda model: None)
    monkeypatch.setitem(releases._FOUND, "transformers", "5.15.0")
    kinds = (
        ("Qwen3_5MoeGatedDeltaNet", "mcore_bridge.model"),
        ("Qwen3_5MoeGatedDeltaNet", "transformers"),
        ("Other", "mcore_bridge"),
    )
    for name, home in kinds:
        model = type(name, (nn.Module,), {"__module__": home})()
        megatron._flat({}, Segments.from_lengths([5]), model, None)
        with refused("USE_MCORE_GDN" if (name, home) == kinds[0] else None):
            megatron._flat({}, PACKED, model, None)


def test_recurrent_layers_that_leave_padding_out_take_no_packed_rows(monkeypatch):
    """Of a model of Megatron's, and in ms-swift's trainer."""
    monkeypatch.setattr(mcore_bridge, "masks_padding", lambda model_type: True)
    trainer = SimpleNamespace(args=SimpleNamespace(attention_backend="local"), kernel="megatron", npu=False)
    model, wants = local(linear_attention_freq=2), swift_masks.TrainerMasks._wants_dense
    assert (megatron._kernel(model, LEFT), wants(trainer, LEFT, recurrent=True)) == ("megatron", True)
    for asked in (lambda: megatron._kernel(model, PACKED), lambda: wants(trainer, PACKED, recurrent=True)):
        with pytest.raises(UnsupportedFormError, match="A recurrent layer carries its state"):
            asked()


@pytest.mark.parametrize(("config", "stops"), [({}, False), ({"bias": False}, False), ({"bias": True}, True)])
def test_routers_without_an_expert_bias_take_the_mask(monkeypatch, config, stops):
    router = type("TopKRouter", (nn.Module,), {"_apply_expert_bias": None})
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.moe.router", SimpleNamespace(TopKRouter=router))
    model = router()
    model.config = SimpleNamespace(**{f"moe_router_enable_expert_{name}": value for name, value in config.items()})
    assert experts._stops_at_mask(model) == stops


@pytest.mark.parametrize(
    ("length", "depths", "said"),
    [(3, 1, ""), (2, 1, "no target 2 tokens ahead"), (4, 2, ""), (3, 2, "no target 3 tokens ahead")],
)
def test_every_depth_of_multi_token_prediction_has_a_target(monkeypatch, length, depths, said):
    monkeypatch.setitem(sys.modules, "megatron.core.package_info", SimpleNamespace(MAJOR=0, MINOR=16))
    config = SimpleNamespace(mtp_num_layers=depths)
    with refused(said):
        experts.refuse_no_target(torch.ones(1, length).long(), Segments.from_lengths([length]), config, None, None)


@pytest.mark.parametrize(
    ("made", "size", "tensor_parallel", "shared", "held"),
    [
        (False, 2, 2, True, None),
        (True, 1, 1, True, None),
        (True, 1, 2, False, None),
        (True, 1, 2, True, (1, 2)),
        (True, 2, 1, False, (2, 1)),
        (True, 2, 2, False, (2, 1)),
    ],
)
def test_megatrons_tensor_parallel_ranks_count_where_they_share_a_row(
    monkeypatch, made, size, tensor_parallel, shared, held
):
    state = SimpleNamespace(model_parallel_is_initialized=lambda: made)
    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(parallel_state=state))
    ranks = lambda **told: ContextParallel(size, 0, **{"tensor_parallel": tensor_parallel, **told})  # noqa: E731
    monkeypatch.setattr(ContextParallel, "from_megatron", ranks)
    cp = packed.megatron_ranks(shared=shared)
    assert (cp and (cp.size, cp.tensor_parallel)) == held


def test_every_sequence_that_ranks_cannot_share_out_is_named():
    packed._check_shared_out((0, 3), None)
    with pytest.raises(CollateError, match=r"(?s)2 bad rows.*row 1: got 1 places.*row 2: got 2 places"):
        packed._check_shared_out((0, 4, 5, 7), ContextParallel(2, 0).for_documents())


def test_offsets_of_a_flat_row_are_judged_as_a_call_on_the_whole_row(monkeypatch):
    kind, judged = make_dataclass("PackedSeqParams", ["cu_seqlens_q"]), []
    monkeypatch.setitem(sys.modules, "megatron.core.packed_seq_params", SimpleNamespace(PackedSeqParams=kind))
    monkeypatch.setattr(packed, "say_call", lambda name, fields, *, B, T, segments, **_: judged.append((B, T, segments)))
    packed.packed_seq_params(PACKED, context_parallel=ContextParallel(1, 0))
    assert judged == [(1, 5, PACKED)]


# --- mcore-bridge


def test_padding_is_zeroed_in_the_first_argument_alone():
    keep, hidden = torch.tensor([[0, 1, 1], [1, 1, 0]]), torch.ones(3, 2, 4)  # [S, B, H]
    config = SimpleNamespace(sequence_parallel=False)
    out, more = megatron.mcore_bridge._zero_padding(keep, config, None, (hidden, "more"))
    assert torch.equal(out[..., 0].T, keep.float())
    assert more == "more"


@pytest.mark.parametrize(("padded", "actual"), [([0, 3], None), (None, [0, 3]), ([0, 3], [0, 2])])
def test_offsets_that_mcore_bridge_finds_none_in_are_refused(padded, actual):
    offsets = [None if each is None else torch.tensor(each) for each in (padded, actual)]
    with pytest.raises(CollateError, match=r"got \[0, 3\]"):
        mcore_bridge._resolved(lambda *_, cp_size: None, *offsets, 4)


@pytest.mark.parametrize("mended", [True, False])
@pytest.mark.parametrize("keys", [{"extra_forward_keys": []}, {}])
def test_a_multimodal_forward_that_is_mended_and_has_the_keys_drops_no_mask(monkeypatch, recwarn, mended, keys):
    monkeypatch.setattr(mcore_bridge.patching, "in_place", lambda ours: mended)
    given = {"language_model_cls": type("Language", (), keys), "forward": lambda self, **masks: None}
    mcore_bridge.pass_through_forward(type("Model", (), given), {}, {KEEP_KEY: 1})
    assert bool(recwarn) == (not (mended and keys))


# --- ms-swift


@pytest.mark.parametrize(
    ("shape", "dtype", "on_meta"),
    [((2, 3, 3), torch.bool, True), ((2, 3, 3), None, False)]
    + [(shape, torch.bool, False) for shape in ((2, 3, 4), (3, 3, 4), (3, 3), (3, 2, 3, 3))],
)
def test_squares_of_bools_alone_take_no_memory_in_a_template(shape, dtype, on_meta):
    build = lambda: torch.ones(shape, dtype=dtype)  # noqa: E731
    with swift._OnMeta(build.__code__):
        assert build().is_meta == on_meta
        assert not torch.ones(shape, dtype=dtype).is_meta


@pytest.mark.parametrize(("width", "before", "after"), [(7, None, "made"), (None, None, None), (7, "own", "own")])
def test_sequences_of_a_flat_row_are_numbered_once_its_width_is_there(width, before, after):
    params = SimpleNamespace(total_tokens=width, seq_idx=before, __post_init__=lambda: setattr(params, "seq_idx", "made"))
    args = SimpleNamespace(padding_free=True, context_parallel_size=1)
    swift._Trainers(None).prepare_batch(lambda *_: {"packed_seq_params": params}, args, {})
    assert params.seq_idx == after


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_layers_of_a_flat_row_are_watched_where_no_ranks_share_it(monkeypatch, ranks):
    watched = []
    monkeypatch.setattr(swift_masks, "guard_first_batch", lambda model, *, segments, **_: watched.append((model, segments)))
    args = SimpleNamespace(padding_free=True, context_parallel_size=ranks, cp_partition_mode="zigzag")
    trainer = SimpleNamespace(args=args, unwrapped_models=[nn.Identity(), nn.Linear(1, 1)])
    ids, params = torch.ones(1, 12), SimpleNamespace(cu_seqlens_q=torch.tensor([0, 8, 12]))
    prepared = lambda *_: {"input_ids": ids, "packed_seq_params": params}  # noqa: E731
    swift_masks.guarded(None, prepared, trainer, {"input_ids": ids, "seq_lens": [7, 3]}, 1)
    assert watched == [(trainer.unwrapped_models[1], Segments([[1] * 7 + [0] + [2] * 3 + [0]]))] * (ranks == 1)


@pytest.mark.parametrize(
    ("npu", "backend", "ranks", "mode", "said"),
    [
        (False, "flash", 1, "contiguous", ""),
        (False, "flash", 2, "zigzag", ""),
        (False, "flash", 2, "contiguous", "cp_partition_mode: got contiguous"),
        (True, "flash", 1, "zigzag", "mlp_padding_free needs a dense mask"),
        (True, "local", 1, "zigzag", ""),
    ],
)
def test_mlp_padding_free_gets_a_dense_mask_where_its_readers_cut_it_right(npu, backend, ranks, mode, said):
    args = SimpleNamespace(mlp_padding_free=True, attention_backend=backend)
    args.context_parallel_size, args.cp_partition_mode = ranks, mode
    trainer = SimpleNamespace(args=args, kernel="megatron", npu=npu)
    with refused(said):
        assert swift_masks.TrainerMasks._wants_dense(trainer, LEFT, recurrent=False)


@pytest.mark.parametrize("size", [2, 3])
def test_a_zigzag_alone_is_the_order_in_which_recurrent_layers_take_a_flat_row(monkeypatch, size):
    info = SimpleNamespace(config=SimpleNamespace(layer_types=["linear_attention"]))
    for layout, said in (("zigzag", ""), ("contiguous", "document_zigzag")):
        monkeypatch.setattr(
            swift_masks, "context_parallel", lambda args, layout=layout: ContextParallel(size, 0, layout=layout)
        )
        with refused(said):
            swift_masks.refuse_layout(SimpleNamespace(model_info=info))


@pytest.mark.parametrize(("ranks", "asked", "padded_to"), [(1, 3, 3), (1, None, None), (2, None, None), (2, 3, 12)])
def test_swifts_rows_are_padded_to_what_both_chunks_of_each_rank_take(ranks, asked, padded_to):
    def original(self, batch, padding_to):
        return {"seq_lens": [2], KEEP_KEY: torch.ones(1, 3), "padding_to": padding_to}

    template = SimpleNamespace(use_megatron=True, padding_free=False, sequence_parallel_size=ranks)
    out = swift._collate(original, template, [], padding_to=asked)
    assert out["padding_to"] == padded_to
    assert out[KEEP_KEY].tolist() == [[True, True, False]]


# --- twinkle


def processor(**changed):
    """What our stages read of twinkle's processor."""
    fields = {"input_ids": 0, "attention_mask": 0, "position_ids": -1}
    made = {"framework": "megatron", "device_mesh": None, "padding_free": False, "padding_side": "right"}
    made |= {"padding_map": fields, "VLM_CONCAT_FIELDS": (), "align_routed_experts": lambda rows: rows}
    return SimpleNamespace(**{**made, "_any_packing": lambda rows: False, **changed})


def test_another_release_of_twinkle_is_said_where_a_processor_gets_our_stages(monkeypatch):
    said = []
    monkeypatch.setattr(twinkle, "say_outside", lambda *told: said.append(told))
    made = processor(framework="transformers")
    made.process_pipeline = [type(name, (), {"__name__": name})() for name in Stages(made, (), None, None).by_name()]
    for _ in range(2):
        twinkle.install(made, needs_mask_2d=True)
    assert said == [(twinkle.PACKAGE, twinkle.TESTED)]


@pytest.mark.parametrize(
    ("micro", "variable", "widths"),
    [(None, True, [4] * 4), (2, False, [4] * 4), (2, True, [2, 2, 4, 4]), (None, False, [4] * 4)],
)
def test_micro_batches_have_widths_of_their_own_where_they_may_vary(micro, variable, widths):
    rows = [{"input_ids": torch.ones(1, n).long()} for n in (1, 2, 4, 3)]
    padded = Stages(processor(), (), None, True).pad_cp(rows, micro, variable_seq_lengths=variable)
    assert [row[SEGMENT_KEY].shape[1] for row in padded] == widths


def by_megatron(home, **fields):
    config = {key: fields.pop(key) for key in ("sequence_parallel",) if key in fields}
    model = type("GPTModel", (nn.Module,), {"__module__": home, **fields})()
    model.config = SimpleNamespace(**config)
    return megatron._passed_on({"padding_mask": torch.ones(1)}, model)


def by_swift(info, sequence_parallel, ranks):
    args = SimpleNamespace(sequence_parallel=sequence_parallel, tensor_model_parallel_size=ranks)
    args.model_info = None if info is None else SimpleNamespace(**info)
    adapter = SimpleNamespace(masks=lambda segments, device: {"attention_mask": None})
    trainer = SimpleNamespace(args=args, cp=None, adapter=adapter, _wants_dense=lambda *_, recurrent: False)
    return swift_masks.TrainerMasks.add(trainer, {"input_ids": torch.ones(2, 3)}, LEFT)


def by_twinkle(ranks, **config):
    adapter = SimpleNamespace(with_segments=lambda batch: ({"attention_mask": None}, Segments.from_lengths([2, 3])))
    routed = Stages(processor(), (), local(num_moe_experts=4, **config), False)._routed
    return routed({SEGMENT_KEY: LEFT.ids}, adapter, ContextParallel(1, 0, tensor_parallel=ranks), npu=False)


CORE, ON, OFF = "megatron.core", {"sequence_parallel": True}, {"sequence_parallel": False}
SHARED, WHOLE, EXPERTS = {"padding_mask": True}, {"padding_mask": False}, {"is_moe_model": True}
ROUTERS = [
    (by_megatron, (CORE,), {**ON, "pre_process": True}, WHOLE),  # it shares the mask out itself
    (by_megatron, (CORE,), ON, WHOLE), (by_megatron, (CORE,), {**ON, "pre_process": False}, SHARED),
    (by_megatron, (CORE,), {"pre_process": False}, WHOLE),
    (by_megatron, ("mcore_bridge.model",), {**ON, "pre_process": True}, SHARED),
    *((by_swift, (info, True, 2), {}, {}) for info in (None, {}, {"is_moe_model": False})),
    (by_swift, (EXPERTS, True, 2), {}, SHARED), (by_swift, (EXPERTS, True, 1), {}, WHOLE),
    (by_swift, (EXPERTS, False, 2), {}, WHOLE), (by_twinkle, (2,), {}, WHOLE), (by_twinkle, (2,), OFF, WHOLE),
    (by_twinkle, (2,), ON, SHARED), (by_twinkle, (1,), ON, WHOLE),
]  # fmt: skip


@pytest.mark.parametrize(("by", "given", "config", "told"), ROUTERS)
def test_routers_masks_are_shared_out_once_where_tensor_parallel_ranks_share_a_row(monkeypatch, by, given, config, told):
    for room in (mcore_bridge, stages):
        monkeypatch.setattr(room, "router_padding", lambda *given, **named: named.get("shared", given[-1]))
        monkeypatch.setattr(room, "pass_through_forward", lambda model, batch, extras: extras)
    monkeypatch.setattr(swift_masks, "_model_class", lambda args: None)
    assert by(*given, **config) == told


@pytest.mark.parametrize(
    ("config", "said"), [({}, ""), ({"masked_softmax_fusion": False}, ""), ({"masked_softmax_fusion": True}, "left")]
)
def test_a_config_alone_tells_of_a_fused_softmax_where_it_says_so(config, said):
    with refused(said):
        refuse_unread([SimpleNamespace(**config)], LEFT)


@pytest.mark.parametrize(
    ("size", "rank", "held"), [(None, None, (1, 0, 1)), (1, 3, (1, 0, 1)), (2, 1, (2, 1, 1)), (2, None, ())]
)
def test_twinkles_mesh_says_who_shares_a_row(size, rank, held):
    mesh = SimpleNamespace(cp_world_size=size, cp_rank=rank, tp_world_size=None)
    held_by = SimpleNamespace(processor=SimpleNamespace(device_mesh=mesh, framework="megatron"))
    with refused("" if held else "cp_rank None"):
        cp = Stages.cp.fget(held_by)
        assert (cp.size, cp.rank, cp.tensor_parallel) == held
