"""Law 15: a stranger's batch has one meaning, whatever door it comes by: loss and gradient of the samples alone.

Batches are as collators of transformers, TRL and packing trainers lay them out (`differential.batch_of`): labels that copy
the ids, positions by place, 2D masks, packing ids.
"""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from rotation import examples

pytest.importorskip("transformers")
import differential
import transformers
from differential import DOORS, PAD, Case, alone, batch_of, drawn, judged, model_of, numbers, through, verdict, whole

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Pattern, Segments
from collate_npu.masks import dense
from collate_npu.testing import left_out

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]
OLD = transformers.__version__ < "5"
KINDS = {
    **dict.fromkeys(("llama", "gpt2", "mistral", "gemma3_text"), "decoder"),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "bamba", "lfm2"), "hybrid"),
}


def case_of(family: str, seed: int = 5, **fixed) -> Case:
    kind = KINDS[family]
    if family not in differential.FAMILIES[kind] or (
        OLD and kind == "hybrid" and (family == "lfm2" or family in left_out())
    ):
        pytest.skip("this transformers has none that reads its mask")
    plain = {"attn": "sdpa", "option": "none", "wrapper": "none"}
    return drawn(seed, kind=kind, family=family, head="CausalLM", **plain, **fixed)


@pytest.mark.parametrize("family", KINDS)
@examples(8)
@given(
    st.integers(0, 2**16),
    st.sampled_from(DOORS),
    st.sampled_from(["left", "right", "packed"]),
    st.sampled_from(["ids", "places"]),
)
def test_a_strangers_batch_has_one_meaning(family, seed, door, side, stranger):
    if KINDS[family] != "decoder" and side == "packed":
        side = "left"  # several sequences in a row are refused there, or never packed
    assert judged(case_of(family, seed, side=side, stranger=stranger), (door,)) == {door: ("right", "")}


def parts(case):
    model, rows = model_of(case.family, case.head, case.attn), differential.samples_of(case)
    return model, rows, batch_of(case, rows, case.side), alone(case, model, rows)


@pytest.mark.parametrize("side", ["left", "right"])
def test_one_row_of_places_is_that_of_all_rows(side):
    case = case_of("gpt2", side=side, stranger="places", prompt=0)
    model, rows, batch, wanted = parts(case)
    batch["position_ids"] = batch["position_ids"][:1]
    assert verdict(whole(case, model, BatchAdapter(model)(batch), rows, side), wanted) == "right"


def test_a_mask_of_the_models_own_window_is_taken():
    case = case_of("mistral", side="left", lengths=(12, 9), prompt=0)
    model, rows, batch, wanted = parts(case)
    segments, size = Segments.from_lengths(case.lengths, side="left"), model.config.sliding_window
    batch["attention_mask"] = dense(segments, polarity="keep", pattern=Pattern.sliding(size))
    chunks = dense(segments, polarity="keep", pattern=Pattern.chunked(size))
    with pytest.raises(CollateError, match=rf"Pattern\.chunked\({size}\)"):  # of the same size, and another pattern
        BatchAdapter(model)({**batch, "attention_mask": chunks, "attention_mask_2d": segments.keep})
    for door in ("adapter", "wrapped", "adapt"):
        assert verdict(through(door, case, model, batch, rows, "left"), wanted) == "right"


@pytest.mark.parametrize("multiple", [None, 8], ids=["whole", "with a tail"])
def test_one_sample_in_a_flat_row_of_a_hybrid_needs_no_kernels(multiple):
    """Two are refused with a remedy; one has no boundary to keep."""
    case = replace(case_of("qwen3_next", side="packed", prompt=0), lengths=(5,))
    model, rows, _, wanted = parts(case)
    collate = PaddingCollator(pad_token_id=PAD, padding_free=True, pad_to_multiple_of=multiple, model=model)
    loss = model(**collate(rows), use_cache=False).loss
    _, *found = numbers(case, model, [], loss)
    assert verdict([wanted[0], *found], wanted) == "right"
    with pytest.raises(CollateError, match="Give each sequence its own row"):
        collate([*rows, *rows])
