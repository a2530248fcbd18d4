"""torchtitan 0.3.0: our masks beside its own, what a dataloader gives its trainer, and its own trainer, from the command
line to the gradients.

`titan_jobs.py` is `python -m torchtitan.train` on a CPU, and the user's job: every step is another layout of two rows, and
rank 0 compares loss and gradients with every sample alone. Beside the compiled FlexAttention, which has no backward on a
CPU, the kernels are `titan_kernels`': what is shown is that masks and offsets arrive and keep documents apart, not what a
card computes.
"""

import json
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import titan_kernels
import torch
from cells import Stack, verdict, worst
from hypothesis import given, settings, strategies as st
from processes import found_by
from rotation import some
from titan_kernels import LAYERS, config_of
from torch import nn
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.nn.attention.flex_attention import AuxRequest
from torchtitan.models.common import attention

from collate_npu import CollateError, PaddingCollator, Pattern, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations import torchtitan
from collate_npu.integrations.torchtitan import TitanCollator, trainer_batch

NEEDS = ("torchtitan", "torchdata")
FAMILIES = ("qwen3", "qwen3_5", *some(("llama3", "deepseek_v3", "gpt_oss"), 1))


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """What a CPU lacks."""
    with titan_kernels.with_fla() as patch:
        patch.setattr("spmd_types.assert_type", lambda *_: None)  # no mesh to check types against
        yield


# --- masks and offsets beside torchtitan's own


def parted(rows):
    """Rows of documents with padding before, between and after them, from `(padding, length)` of each."""
    ids = [[n for k, (gap, length) in enumerate(row, 1) for n in [0] * gap + [k] * length] for row in rows]
    return Segments.from_ids([row + [0] * (max(map(len, ids)) - len(row)) for row in ids])


DOCUMENTS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=1, max_size=3)


def attends(predicate, B, S):
    """bool `[B, S, S]`: a mask predicate at every place."""
    b, q, k = torch.meshgrid(torch.arange(B), torch.arange(S), torch.arange(S), indexing="ij")
    return predicate(b, torch.zeros_like(b), q, k)


LONG = Segments.from_ids([[0] * 50 + [1] * 90 + [0] * 16 + [2] * 100, [1] * 200 + [0] * 56])


@pytest.mark.parametrize("pattern", some(["causal", Pattern.sliding(3), Pattern.chunked(3)], 2))
def test_the_compiled_mask_has_the_same_blocks_and_the_compiled_kernel_computes_what_stands_in_for_it(pattern):
    tables = ("kv_num_blocks", "full_kv_num_blocks", "kv_indices", "full_kv_indices", "q_num_blocks", "q_indices")
    one, other = (torchtitan.get_attention_masks(LONG, pattern, block_size=64, compiled=c) for c in (True, False))
    assert one.BLOCK_SIZE == other.BLOCK_SIZE == (64, 64)
    assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in tables)
    q, k, v = torch.randn(3, 2, 2, 256, 16, generator=torch.Generator().manual_seed(0))
    given = {"block_mask": one, "score_mod": None, "scale": None, "return_aux": AuxRequest()}
    found, _ = attention.FlexAttention.compiled_flex_attn(q, k, v, enable_gqa=False, kernel_options={}, **given)
    assert (found - titan_kernels.dense_flex_attention(q, k, v, **given)[0]).abs().max() <= 1e-5


@given(st.lists(DOCUMENTS, min_size=1, max_size=3).map(parted))
@settings(max_examples=60)
def test_torchtitan_makes_the_same_masks_and_offsets_of_our_positions(segments):
    """Host offsets too, which Qwen3.5's Gated DeltaNet demands."""
    B, S = segments.shape
    positions = torchtitan.positions(segments)
    ours = attends(torchtitan.get_attention_masks(segments, compiled=False).mask_mod, B, S)
    causal = attends(attention.get_causal_mask_mod(), B, S)
    assert torch.equal(ours, causal & attends(attention.get_document_mask_mod(positions), B, S))
    efficient = attention.get_efficient_causal_mask_mod_for_packed_document(positions)
    assert torch.equal(ours, causal & attends(efficient, B, S))
    window = attends(torchtitan.get_attention_masks(segments, Pattern.sliding(3), compiled=False).mask_mod, B, S)
    theirs = ours & attends(attention.get_sliding_window_mask_mod(3), B, S)
    assert torch.equal(window[segments.keep], theirs[segments.keep])
    assert torch.equal(positions[segments.keep], segments.position_ids[segments.keep])

    found = torchtitan.varlen_metadata(segments)
    own = attention.create_varlen_metadata_for_document(positions, include_host_offsets=True)
    assert isinstance(found, attention.VarlenMetadata)
    assert torch.equal(found.cu_seq_q, own.cu_seq_q)
    assert torch.equal(found.cu_seq_k, own.cu_seq_k)
    assert (found.cu_seq_q.dtype, found[2:]) == (own.cu_seq_q.dtype, own[2:])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", *some(("llama3", "deepseek_v3", *LAYERS), 2)])
def test_a_models_own_masks_have_the_same_names_and_the_same_rows(family):
    model = titan_kernels.built(config_of(family))
    own = model.get_attention_masks(torchtitan.positions(TWO))
    ours = torchtitan.get_attention_masks(TWO, LAYERS.get(family) or torchtitan.layers_of(model), compiled=False)
    own, ours = (masks if isinstance(masks, dict) else {"": masks} for masks in (own, ours))
    assert own.keys() == ours.keys()
    for name in ours:
        one, other = (
            masks[name].cu_seq_q if name == "deltanet" else titan_kernels.attended(masks[name])[:, 0][TWO.keep]
            for masks in (ours, own)
        )
        assert torch.equal(one, other), name


def test_layers_whose_masks_have_names_of_their_own_are_asked_for():
    made = {"get_attention_masks": lambda self, positions: {}, "config": config_of("qwen3")}
    with pytest.raises(UnsupportedFormError, match=r"GptOss.*Pass layers="):
        torchtitan.layers_of(type("GptOss", (nn.Module,), made)())


# --- masks in the forward of a part, behind torch's own pipeline schedule; what comes of them: the trainer, below

WIDTH = 32
IDS = [[1] * 20 + [0] * 12, [0] * 9 + [1] * 23, [1] * 7 + [0] * 3 + [2] * 14 + [3] * 8]
TWO = Segments.from_ids([*IDS, [1] * 16 + [2] * 16])
HOLE = Segments.from_ids([*IDS, [1] * 9 + [0] * 4 + [1] * 9 + [0] * 10])
TOKENS, HALF, HYBRID = torch.ones(4, WIDTH), torch.ones(4, WIDTH // 2), {"full": "causal", "deltanet": "varlen"}


class Part(nn.Module):
    """It gives back what it is given."""

    config = SimpleNamespace(first_attention=SimpleNamespace(inner_attention=SimpleNamespace(block_size=64)))

    def forward(self, tokens, positions=None, attention_masks=None):
        return {"positions": positions, "attention_masks": attention_masks}


def part(layers):
    made = Part()
    torchtitan.masks_in_forward(made, layers, compiled=False)
    return made


def masks_of(segments, layers="causal"):
    return torchtitan.get_attention_masks(segments, layers, compiled=False)


def calls_with_masks_of_other_tokens():
    """Arguments, keywords, what the error says: a whole row's mask with a rank's tokens, a whole batch's with some of its
    rows, segments of another width; offsets that a schedule cut, and those that torchtitan makes of positions whose padding
    is not 0 (transformers' left padding has 1)."""
    whole, call = masks_of(HOLE), r"(?s)tokens of this call are \[\d, \d+\].*"
    yield (HALF,), {"attention_masks": whole}, f"{call}cp_shard"
    yield (TOKENS[:2],), {"attention_masks": whole}, f"{call}segment_ids"
    yield (TOKENS[:2], torchtitan.positions(HOLE)[:2], whole), {}, call
    yield (TOKENS,), {"attention_masks": masks_of(Segments.from_ids(HOLE.ids[:1]))}, f"{call}schedule"
    yield (HALF,), {"segment_ids": HOLE.ids}, f"{call}leave segment_ids out"
    yield (TOKENS,), {"segment_ids": HOLE.ids}, "row 3: got holes"
    given = {"attention_masks": masks_of(TWO, HYBRID), "positions": torchtitan.positions(TWO)}
    for args, cut in zip(*split_args_kwargs_into_chunks((TOKENS,), given, 2)):
        yield args, cut, r"(?s)deltanet: got \d+ offsets, 0 to 128.*segment_ids"
    left = Segments.from_lengths([20, 32], WIDTH, "left")
    theirs = torchtitan.positions(left).masked_fill(~left.keep, 1)
    for host in (True, False):  # it makes none for full attention
        own = attention.create_varlen_metadata_for_document(theirs, include_host_offsets=host)
        yield (TOKENS[:2],), {"attention_masks": {"deltanet": own}}, "deltanet: got 3 offsets, 12 to 64"


def test_masks_of_other_tokens_are_refused():
    for args, keywords, said in calls_with_masks_of_other_tokens():
        with pytest.raises(CollateError, match=said):
            part(HYBRID)(*args, **keywords)


def test_a_stage_of_distributed_tokens_takes_the_masks_of_its_rows():
    """Two of four rows are here, and half of the width: that of a DTensor over data and tensor parallel ranks."""
    tokens = SimpleNamespace(shape=(4, WIDTH, 8), device="cpu", to_local=lambda: torch.zeros(2, WIDTH // 2, 8))
    stage, ids = part(HYBRID), TWO.ids
    given = stage(tokens, segment_ids=ids[:2])
    assert stage(tokens, **given) == given
    assert given["attention_masks"]["full"].BLOCK_SIZE == (64, 64)
    assert torch.equal(given["positions"], torchtitan.positions(TWO)[:2])
    other = [{"attention_masks": masks_of(Segments.from_ids(ids[:3]), kind)} for kind in ("causal", "varlen")]
    for wrong in ({"segment_ids": ids[:3]}, {"segment_ids": ids[:2, :9]}, *other):
        with pytest.raises(CollateError, match=next(iter(wrong))):
            stage(tokens, **wrong)


# --- what a dataloader gives its trainer

INNER = PaddingCollator(pad_token_id=0, padding_side="left", attention_mask="2d")
BARE = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8, 9, 1, 2, 3], "labels": [8, 9, 1, 2, 3]}]
HOLES = {"input_ids": [4, 5, 0, 6, 7, 8], "labels": [4, 5, -100, -100, 7, 8], "attention_mask": [1, 1, 0, 1, 2, 2]}


def test_rows_of_the_collator_and_holes_which_segment_ids_alone_tell():
    """Rows and their loss: the trainer, below."""
    input_dict, _ = pickle.loads(pickle.dumps(TitanCollator(INNER, extra={"special_tokens": {"image_id": 3}})))(BARE)
    assert input_dict.pop("special_tokens") == {"image_id": 3}
    assert input_dict.keys() == {"input", "positions"}
    with pytest.raises(UnsupportedFormError, match=r"(?s)row 0: got holes.*segment_ids=True"):
        TitanCollator(INNER)([HOLES])
    input_dict, labels = TitanCollator(INNER, segment_ids=True)([HOLES])
    assert input_dict["segment_ids"].tolist() == [[1, 1, 0, 1, 2, 2]]
    assert input_dict["positions"].tolist() == [[0, 1, 0, 2, 0, 1]]
    assert labels.tolist() == [[5, -100, -100, -100, 8, -100]]


def test_labels_that_are_moved_already_are_not_moved_again():
    """torchtitan 2556: declared, or told by the tokens, ends not learned."""
    own = [{**row, "labels": [*row["labels"][:-1], -100]} for row in BARE]
    moved = [{**row, "labels": [*row["labels"][1:], -100]} for row in own]
    told = PaddingCollator(pad_token_id=0, attention_mask="2d", labels_shifted=True)
    wanted = TitanCollator(PaddingCollator(pad_token_id=0, attention_mask="2d"))(own)[1]
    assert torch.equal(TitanCollator(told)(moved)[1], wanted)
    with pytest.raises(CollateError, match="these are moved"):
        TitanCollator(INNER)(moved)


def test_what_the_model_would_be_called_with_is_refused_and_so_are_missing_labels():
    with pytest.raises(UnsupportedFormError, match=r"(?s)got loss_scale.*extra="):
        TitanCollator(INNER)([{**row, "loss_scale": [1.0] * len(row["input_ids"])} for row in BARE])
    batch = {"input_ids": torch.tensor([[5, 6, 0]]), "attention_mask": torch.tensor([[1, 1, 0]])}
    with pytest.raises(CollateError, match=r"labels: got NoneType.*carry labels"):
        trainer_batch(batch)
    assert trainer_batch({**batch, "shift_labels": torch.tensor([[6, 7, -100]])})[1].tolist() == [[6, 7, -100]]


# --- its own trainer

STACK = Stack("torchtitan", ("torchtitan",), "peers_misc")
LINE = "collate_fn=TitanCollator(PaddingCollator(...)) in the dataloader"
NO_PADDING = "torchtitan's loaders pack, and none pads"
STEPS = {"padded right": "right", "padded left": "left", "packed": "packed"}
TOGETHER = pytest.mark.together("torchtitan's trainer")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two processes have run every job: what rank 0 found of each, by step."""
    folder = tmp_path_factory.mktemp("titan")
    assert found_by("titan_jobs", folder, ranks=2) == [True]
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return {job: {step["step"]: step["error"] for step in steps} for job, steps in found.items() if isinstance(steps, list)}


@TOGETHER
def test_every_step_is_as_each_sample_alone(trained):
    """Also rows with holes, by segment_ids and `masks_in_forward`, rows that a load balancer shares out, and those of a
    micro-batch of 1F1B, with the recurrent layer in one process and attention in the other."""
    assert trained.keys() == {*FAMILIES, *(f"{family} shared" for family in FAMILIES)}
    assert {"holes:ids", "left", "packed"} <= trained["qwen3"].keys()
    assert all(any("ids" in step for step in trained[family]) for family in FAMILIES)
    assert max(error for steps in trained.values() for error in steps.values()) <= 5e-6


@TOGETHER
@pytest.mark.parametrize("layout", [*STEPS, "context parallel"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cells(trained, family, layout):
    """Its own trainer on its own packed rows, and on ours; errors are those of the loss and the gradients, relative."""
    if layout == "context parallel" and family == "qwen3_5":
        none = verdict(refused=refusal_to_share_out_a_recurrent_layer())
        STACK.tell(family, layout, alone=none, ours=none, line=LINE)
        return
    found = trained[f"{family} shared" if layout == "context parallel" else family]
    ours = [verdict(found[step]) for step in ([STEPS[layout]] if layout in STEPS else ["left", "packed"])]
    own = layout in ("packed", "context parallel")
    alone = verdict(found["full:own"]) if own else verdict(not_run=NO_PADDING)
    STACK.tell(family, layout, alone=alone, ours=worst(ours), line=LINE)


def refusal_to_share_out_a_recurrent_layer():
    from torchtitan.models.qwen3_5.parallelize import parallelize_qwen3_5

    settings: Any = dict.fromkeys(("training", "ac_config", "dump_folder"))
    compiled = SimpleNamespace(enable=False, components=[])
    settings |= {"parallelism": SimpleNamespace(spmd_backend="partial_dtensor"), "compile_config": compiled}
    with pytest.raises(NotImplementedError, match="GatedDeltaNet") as caught:
        parallelize_qwen3_5(None, parallel_dims=SimpleNamespace(cp_enabled=True), **settings)
    return str(caught.value)
