"""Packed hybrids: transformers' own models with reference kernels, where an installed package would stand, on our flat rows.

Every sequence gives the logits and the gradients it gives alone, or the row is refused.
"""

import pytest
import torch
from rotation import rotating
from strategies import laid_out, marked

pytest.importorskip("transformers")
from flat_rows import (
    EXACT,
    FORGOTTEN,
    GATED_DELTA,
    KDA,
    PAD,
    RIGHT,
    ROWS,
    WRONG,
    alone,
    built,
    errors,
    ours,
    places,
    samples,
    without,
)
from transformers import DataCollatorWithFlattening

from collate_npu import BatchAdapter, CollateError, PaddingCollator, Segments, adapt, check_delivery
from collate_npu.errors import UnsupportedFormError
from collate_npu.keys import KEYS, TOKENS
from collate_npu.releases import KERNELS_TOLD, MISSING_KERNEL_RAISES
from collate_npu.testing import reference_kernels, tiny_config

pytestmark = pytest.mark.skipif(not KERNELS_TOLD.holds(), reason="before 5.19 kernels are resolved in other ways")
LOUD = MISSING_KERNEL_RAISES.holds()
"""Does transformers itself raise where a kernel that is told is missing?"""
FILLS = {"input_ids": PAD, "labels": -100, "position_ids": 0}
TWO_KEYS = [name for name in EXACT if name in GATED_DELTA + KDA]
"""Gated DeltaNet and KDA: the convolution reads `seq_idx`, the rule offsets."""
ONE_KEY = [name for name in EXACT if name not in TWO_KEYS]
"""Mamba-2 and convolutions alone: both read `seq_idx`, and the dense mask keeps attention apart."""
LAYOUTS = (
    {"pad_to_multiple_of": 16},
    {"padding": (256,)},
    {"sequence_multiple": 4},
    {"sequence_multiple": 4, "padding": (256,), "max_sequences": 8},
    {"padding": (256,), "max_sequences": 8},
)


def theirs(model):
    """transformers' own collator tells positions, unless asked for more."""
    adapter, flatten = BatchAdapter(model, padding_free=True), DataCollatorWithFlattening()
    return lambda features: adapter(flatten(features))


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", rotating(TWO_KEYS + ONE_KEY, slow=4))
def test_every_sequence_of_a_flat_row_is_as_alone(name, attn):
    model = built(name, attn)
    with reference_kernels(model):
        others = [theirs(model), *(ours(model, **laid_out(settings)) for settings in LAYOUTS)]
        for (row, lengths), other in zip(ROWS.items(), others, strict=True):
            features = samples(lengths)
            truth = alone(model, features)
            for batch in (ours(model)(features), other(features)):
                at = places(batch, features)
                assert max(errors(model, batch, truth, at)) < RIGHT, row


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_next"])
def test_every_sample_of_packed_rows_is_as_alone(name, side):
    model, features = built(name), marked(samples(ROWS["shorter than the taps"]))
    truth, lengths = alone(model, features), [len(row["place"]) - 1 for row in features]
    ids = [torch.tensor([row["input_ids"]]) for row in features]
    learned = sum(model(own, labels=own).loss * n for own, n in zip(ids, lengths) if n) / sum(lengths)
    handle = adapt(model)
    settings = {"packing": True, "max_length": 8, "padding_side": side, "keys": {**KEYS, "place": TOKENS}}
    batch = PaddingCollator(pad_token_id=PAD, model=model, **settings)(features)
    place_T = batch.pop("place").flatten()
    at = [int((place_T == place).nonzero()) for row in features for place in row["place"]]
    assert batch["input_ids"].shape == (2, 8)
    assert max(errors(model, without(batch, "sample"), truth, torch.tensor(at))) < RIGHT
    assert torch.isclose(model(**without(batch, "sample")).loss, learned, atol=RIGHT)
    handle.remove()


def test_adapt_reads_one_row_with_offsets_as_flat_beside_a_mask_of_ones():
    """As VeOmni writes it, with a tail (veomni/data/data_collator.py, d977449)."""
    model, features = built("qwen3_next"), samples(ROWS["short"])
    flat = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(features)
    width = flat["input_ids"].shape[1]
    row = {key: torch.nn.functional.pad(flat[key], (0, 3), value=fill) for key, fill in FILLS.items()}
    ends = torch.cat([flat["cu_seq_lens_q"], torch.tensor([width + 3], dtype=torch.int32)])
    row |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "tail_padding_length": torch.tensor(3)}
    row["attention_mask"] = torch.ones_like(row["input_ids"])
    with reference_kernels(model):
        truth = alone(model, features)
        assert max(errors(model, row, truth)) > WRONG
        handle = adapt(model)
        assert max(errors(model, row, truth)) < RIGHT
        handle.remove()


@pytest.mark.parametrize("name", TWO_KEYS + ONE_KEY)
def test_each_forgotten_boundary_is_seen(name):
    """Recurrent layers of one key read `seq_idx` alone: there `cu_seq_lens_q` is for flash attention."""
    model, features = built(name), samples(ROWS["short"])
    with reference_kernels(model):
        truth, batch = alone(model, features), ours(model)(features)
        for what, keys in FORGOTTEN.items():
            found = errors(model, without(batch, *keys), truth)
            needed = name in TWO_KEYS or "seq_idx" in keys
            assert min(found) > WRONG / 2 if needed else max(found) < RIGHT, what
        assert min(errors(model, batch | {"attention_mask": None, "use_cache": True}, truth)) > WRONG  # attention runs on


def test_delivery_tells_that_a_kernel_is_missing_or_told_of_other_sequences():
    """transformers before 5.20 runs on without a kernel; later ones raise while the check runs the model."""
    model, features = built("qwen3_5_text"), samples(ROWS["short"])
    with reference_kernels(model):
        batch = without(ours(model)(features), "labels")
        assert len(check_delivery(model, batch).layers) == 3
        truth, other = Segments.from_lengths([list(ROWS["short"])]), ours(model)(samples(ROWS["turned"]))
        with pytest.raises(CollateError, match=r"linear_attn: .*told \[0, 5, 13, 19\]"):
            check_delivery(model, batch | {"cu_seq_lens_q": other["cu_seq_lens_q"]}, segments=truth)
    said = pytest.raises(ValueError, match="without" if LOUD else "conv1d_fn told nothing: .* another sequence")
    with reference_kernels(model, without=("causal_conv1d",)), said:
        check_delivery(model, batch)


@pytest.mark.parametrize("name", [name for name in EXACT if name in KDA])
def test_kimis_delta_rule_reads_a_name_of_its_own(name):
    """The layer hands it `cu_seq_lens_q`, and it takes `cu_seqlens`: the batch has both."""
    model, features = built(name), samples(ROWS["short"])
    with reference_kernels(model):
        batch, truth = without(ours(model)(features), "labels"), Segments.from_lengths([list(ROWS["short"])])
        assert batch["cu_seqlens"].tolist() == batch["cu_seq_lens_q"].tolist()
        assert batch["cu_seqlens"].data_ptr() != batch["cu_seq_lens_q"].data_ptr()
        assert BatchAdapter(model, padding_free=True)(batch)["cu_seqlens"].tolist() == batch["cu_seqlens"].tolist()
        assert max(check_delivery(model, batch, alone=True).alone.errors.values()) < RIGHT
        with pytest.raises(CollateError, match=r"chunk_kimi_delta_attention told nothing: .* goes on from another sequence"):
            check_delivery(model, without(batch, "cu_seqlens"))
        other = ours(model)(samples(ROWS["turned"]))["cu_seqlens"]
        with pytest.raises(CollateError, match=r"told \[0, 5, 13, 19\]"):
            check_delivery(model, batch | {"cu_seqlens": other}, segments=truth)


@pytest.mark.skipif("qwen4_exp_text" not in EXACT, reason="not in this release")
def test_embeddings_of_n_grams_read_no_boundary():
    """They run over the row in qwen4_exp's PLE layers: refused where the config has any, and measured without us."""
    config = tiny_config("qwen4_exp_text", vocab_size=PAD + 1)
    config.ple_layer_ids, config.number_of_conv_states, config.ngram_vocab_size_base = [1], 3, 64
    model, features = type(built("qwen4_exp_text"))(config).eval(), samples(ROWS["short"])
    with reference_kernels(model):
        with pytest.raises(UnsupportedFormError, match="another sequence of its row moves a sequence"):
            ours(model)(features)
        batch = ours(built("qwen4_exp_text"))(features)
        assert min(errors(model, batch, alone(model, features))) > 1e-3
