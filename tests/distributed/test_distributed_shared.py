"""Rows of which each rank has a part, on processes over Gloo: each real token as its sample alone."""

import pytest

pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("gloo")]
FORMS = ["right", "left", "flat", "packed", "one"]
LONG = 200.0
"""Seconds: each process asks a copy of the model first."""
DEALT = [
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "llama", "mamba", "mamba2",
    "minimax", "mistral", "nemotron_h", "qwen3_moe", "recurrent_gemma", "zamba2",
]  # fmt: skip
"""Whose mixers have no gated delta rule: each gets whole sequences, the attention of transformers too."""


def worst(found):
    return max(max(gaps) for gaps in found)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "olmo_hybrid"])
def test_logits_and_gradient_are_those_of_each_sample_alone(family, layout, form, processes):
    assert worst(processes("shared_work.errors", family, layout, form, "", seconds=LONG)) < 2e-5


@pytest.mark.parametrize("family", DEALT)
def test_mixers_of_any_kind_get_whole_sequences(family, pair):
    assert worst(pair("shared_work.errors", family, "head_tail", "left", "", (), "", seconds=LONG)) < 2e-5


@pytest.mark.parametrize("form", FORMS[:4])
@pytest.mark.parametrize(("family", "attention"), [("qwen3_next", "exchanged"), ("llama", "")])
def test_a_batch_that_the_adapter_cut(family, attention, form, pair):
    found = pair("shared_work.errors", family, "head_tail", form, "", (), attention, "BatchAdapter", seconds=LONG)
    assert worst(found) < 2e-5


@pytest.mark.parametrize("mode", ["plain", "reentrant"])
@pytest.mark.parametrize("form", ["left", "flat"])
def test_a_layer_computed_again_exchanges_again(form, mode, processes):
    assert worst(processes("shared_work.errors", "qwen3_next", "contiguous", form, mode, seconds=LONG)) < 2e-5


@pytest.mark.parametrize("attention", ["", "exchanged"])
@pytest.mark.parametrize("wrapper", ["FSDP2", "FSDP2 inside mixers"])
def test_where_ranks_gather_parameters_too(wrapper, attention, pair):
    assert (
        worst(pair("shared_work.errors", "qwen3_next", "contiguous", "left", "", (), attention, True, wrapper, seconds=LONG))
        < 2e-5
    )


@pytest.mark.parametrize("fault", ["", "halo", "heads"])
def test_check_delivery_on_ranks_finds_a_fault_of_the_exchange(fault, pair):
    found = pair("shared_work.planted", fault, seconds=LONG)
    assert (
        found == ["every layer with a known kernel got what the batch says"] * 2
        if not fault
        else all("against alone" in text for text in found)
    )


@pytest.mark.parametrize("heads", [(3, 6), (1, 4), (4, 8)])
def test_heads_that_do_not_divide(heads, pools):
    assert worst(pools(4)("shared_work.errors", "qwen3_5_text", "contiguous", "right", "", heads, seconds=LONG)) < 2e-5


def test_the_bench_counts_what_a_layer_sends(pair):
    assert pair("benchmarks.shared_rows.sent", "convolution, dealt", 32, seconds=LONG) == [[4, 2**20, 1, 1536, 2**20]] * 2


def test_without_adapt_each_rank_sees_its_part_alone(pair):
    found = pair("shared_work.errors", "qwen3_next", "contiguous", "flat", "", (), "exchanged", False)
    assert all(min(gaps) > 0.1 for gaps in found)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("length", "int64 [2, 4, 28] on ranks [1]"),
        ("layout", "zigzag, size 2, tp 1 on ranks [1]"),
        ("way", "does not run by sequence"),
        ("boundary", "cu_seq_lens_q"),
        ("error", "'aten::_values'"),
        ("labels", "Pass shift_labels beside them"),
        ("targets", "moved across the end of a sequence"),
        ("not adapted", "no message from ranks [1]"),
        ("no backward", "Timed out"),
    ],
)
def test_a_rank_that_differs_stops_all_at_the_first_step(fault, said, pair):
    texts = pair("shared_work.apart", fault, seconds=LONG)
    assert [said in text for text in texts] == [True, fault not in ("not adapted", "no backward")]  # these meet nobody
