"""Rows of which each rank has a part, on processes over Gloo: each real token as its sample alone."""

import pytest
from hypothesis import given, settings, strategies as st
from rotation import NIGHTLY
from strategies import whole_rows

pytest.importorskip("transformers")
from transformers import CONFIG_MAPPING, __version__

HERE = {*CONFIG_MAPPING} if __version__ > "5" else {*CONFIG_MAPPING} - {"recurrent_gemma"}  # which had no sdpa
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("gloo")]
LONG = 200.0
"""Seconds: each process asks a copy of the model first."""
CLOSE = 1e-3
"""Rounding reached 5e-5 in 5000 drawn; planted faults of the exchange begin at 0.2."""
DEALT = {
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "llama", "mamba", "mamba2",
    "minimax", "mistral", "nemotron_h", "qwen3_moe", "recurrent_gemma", "zamba2",
}  # fmt: skip
"""Whose mixers have no gated delta rule: each gets whole sequences, the attention of transformers too."""


@st.composite
def told(draw):
    """A layout; segment ids of whole rows; and the keys of a batch that tell of them."""
    rows, keys = draw(whole_rows()), [["attention_mask"], ["attention_mask", "position_ids"]]
    if rows.empty_rows:  # a mask of padding alone is refused: segment_ids say that it is right
        keys = [[*each, "segment_ids"] for each in keys]
    flat = rows.shape[0] == 1 and rows.padding_side in ("none", "right") and rows.num_sequences + rows.num_padding > 1
    keys += [["position_ids"]] if flat and rows.max_length > 1 else []  # positions of all zeros tell nothing
    return draw(st.sampled_from(["contiguous", "head_tail"])), rows.ids.tolist(), draw(st.sampled_from(keys))


MODES, ATTENTION = st.sampled_from(["", "plain", "reentrant"]), st.sampled_from(["", "exchanged"])
CUT_BY = st.sampled_from(["us", "BatchAdapter"])
HEADS = st.sampled_from([(), (3, 6), (1, 4), (4, 8)])
"""Of two and four ranks some divide both kinds, some one, some none."""


@pytest.mark.parametrize("family", sorted({"qwen3_next", "qwen3_5_text", "olmo_hybrid"} & HERE))
@settings(max_examples=24 if NIGHTLY else 8)
@given(told(), MODES, HEADS, ATTENTION, CUT_BY)
def test_logits_and_gradient_are_those_of_each_sample_alone(family, processes, rows, mode, heads, attention, by):
    heads = heads if family == "qwen3_5_text" else ()
    assert max(map(max, processes("shared_work.errors", family, *rows, mode, heads, attention, by, seconds=LONG))) < CLOSE


@pytest.mark.parametrize("family", sorted(DEALT & HERE))
@settings(max_examples=5)
@given(told(), CUT_BY)
def test_mixers_of_any_kind_get_whole_sequences(family, pair, rows, by):
    assert max(map(max, pair("shared_work.errors", family, *rows, "", (), "", by, seconds=LONG))) < CLOSE


@pytest.mark.parametrize("attention", ["", "exchanged"])
@pytest.mark.parametrize("wrapper", ["FSDP2", "FSDP2 inside mixers"])
def test_where_ranks_gather_parameters_too(wrapper, attention, pair):
    assert max(map(max, pair("adapt_work.of_shared_rows", wrapper, attention, seconds=LONG))) < CLOSE


@pytest.mark.parametrize("fault", ["", "halo", "heads"])
def test_check_delivery_on_ranks_finds_a_fault_of_the_exchange(fault, pair):
    said = "against alone" if fault else "every layer with a known kernel got what the batch says"
    assert all(said in text for text in pair("shared_work.planted", fault, seconds=LONG))


def test_the_bench_counts_what_a_layer_sends(pair):
    assert pair("benchmarks.shared_rows.sent", "convolution, dealt", 32, seconds=LONG) == [[4, 2**20, 1, 1536, 2**20]] * 2


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("width", "int64 [2, 4, 30] on ranks [1]"),
        ("layout", "zigzag, size 2, tp 1 on ranks [1]"),
        ("keys", "keys input_ids, attention_mask on ranks [0]"),
        ("boundary", "cu_seq_lens_q"),
        ("targets", "moved across the end of a sequence"),
        ("way", "does not run by sequence"),
        ("error", "'aten::_values'"),
        ("labels", "Pass shift_labels beside them"),
        ("no backward", "Timed out"),
    ],
)
def test_a_rank_that_differs_stops_all_at_the_first_step(fault, said, pair):
    texts = pair("shared_work.apart", fault, seconds=LONG)
    assert [said in text for text in texts] == [True, fault != "no backward"]  # which meets nobody
