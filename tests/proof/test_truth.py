"""Truth: what a batch says in the forms that stacks call their models with, and what is known where it says nothing."""

from threading import get_ident
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from toys import IDS, OFFSETS

from collate_npu import CollateError, Segments
from collate_npu.consumers.adapter import KNOWN_BATCHES
from collate_npu.errors import AmbiguousMaskError
from collate_npu.masks import Pattern, dense
from collate_npu.proof.kernel_calls import case_of

FLAT, LEFT = Segments.from_lengths([[6, 5, 5]]), Segments.from_lengths([3, 8], side="left")
KEEP, ROWS = torch.ones(1, 16).long(), {"input_ids": IDS.view(2, 8), "attention_mask": LEFT.keep.long()}


@pytest.mark.parametrize(
    ("batch", "segments", "flat"),
    [
        ({"input_ids": IDS, "cu_seqlens": OFFSETS}, FLAT, True),
        ({"input_ids": IDS, "attention_mask": KEEP, "cu_seqlens": None}, Segments(KEEP), False),
        ({"input_ids": IDS, "position_ids": torch.arange(16)[None]}, Segments(KEEP), False),  # one sequence
        ({**ROWS, "position_ids": LEFT.position_ids}, LEFT, False),
        ({"input_ids": IDS.T, "attention_mask": KEEP.T, "position_ids": 0 * IDS.T}, Segments(KEEP.T), False),
        ({**ROWS, "seq_lens": [3, 8]}, LEFT, False),
        ({"tokens": IDS, "positions": FLAT.position_ids}, FLAT, False),
        ({"input_ids": IDS, "position_ids": FLAT.position_ids, "positions": torch.arange(16)[None]}, FLAT, False),
        ({"scale": 0.5, "pixel_values": torch.ones(4, 3, 2), "rates": torch.ones(16), "grid": torch.ones(3, 1, 16).int(),
          "hidden": torch.ones(1, 16, 4), "cu_seqlens": OFFSETS}, FLAT, True),
        ({"input_ids": IDS, "names": ["a"], "extra": {"segment_ids": FLAT.ids, "cu_seqlens": None}}, FLAT, False),
        ({**ROWS, "attention_mask": None, "extra": SimpleNamespace(attention_mask_2d=LEFT.keep)}, LEFT, False),
        ({"input_ids": ROWS["input_ids"], "position_ids": LEFT.position_ids * LEFT.keep}, LEFT, False),
        ({"input_ids": IDS, "position_ids": FLAT.position_ids * (FLAT.ids < 3)}, Segments.from_lengths([[6, 5]], 16), False),
        ({"input_ids": ROWS["input_ids"], "position_ids": LEFT.position_ids, "extra": {"attention_mask_2d": LEFT.keep}},
         LEFT, False),
    ],
)  # fmt: skip
def test_what_a_batch_says(batch, segments, flat):
    case = case_of(nn.Identity(), batch)
    assert (case.segments, case.padding_free) == (segments, flat)


def test_a_batch_that_says_nothing_is_the_one_that_the_adapter_made(monkeypatch):
    monkeypatch.setitem(KNOWN_BATCHES.running, get_ident(), FLAT)
    assert case_of(nn.Identity(), {"input_ids": IDS}).segments == FLAT
    assert case_of(nn.Identity(), {"input_ids": IDS, "extra": {"attention_mask_2d": KEEP}}).segments == Segments(KEEP)
    with pytest.raises(AmbiguousMaskError):
        case_of(nn.Identity(), {"input_ids": IDS.T})


def test_the_pattern_is_the_declared_one_and_an_encoder_decoder_is_refused():
    model = nn.Module()
    assert case_of(model, ROWS).pattern == Pattern.of("causal")
    assert case_of(model, ROWS, pattern="bidirectional").pattern == Pattern.of("bidirectional")
    model.config = SimpleNamespace(is_encoder_decoder=True)
    with pytest.raises(CollateError, match="reads two sequences"):
        case_of(model, ROWS)


@pytest.mark.models
def test_what_a_model_of_transformers_makes_of_padding_says_of_it_what_a_causal_mask_says():
    pytest.importorskip("transformers")
    from collate_npu.testing import tiny_model

    batch = {"input_ids": IDS, "attention_mask": dense(Segments(KEEP), pattern=Pattern.sliding(8))}
    assert case_of(tiny_model("mistral", vocab_size=64), batch).segments == Segments(KEEP)
    with pytest.raises(AmbiguousMaskError):
        case_of(tiny_model("llama", vocab_size=64), batch)


class MegatronModule(nn.Module):
    def __init__(self, **config):
        super().__init__()
        self.config = SimpleNamespace(**config)


MegatronModule.__module__ = "megatron.core.transformer.module"


@pytest.mark.parametrize("config", [{}, {"context_parallel_size": None}, {"context_parallel_size": 1}])
@pytest.mark.parametrize("times", [1, 2])
def test_offsets_are_of_the_row_of_all_ranks(config, times):
    batch = {"input_ids": IDS, "packed_seq_params": SimpleNamespace(cu_seqlens_q=times * OFFSETS)}
    whole = Segments.from_lengths([[times * n for n in (6, 5, 5)]])
    assert case_of(MegatronModule(context_parallel_size=2), batch).segments == whole
    if times == 1:
        assert case_of(MegatronModule(**config), batch).segments == whole
    else:
        with pytest.raises(CollateError):
            case_of(MegatronModule(**config), batch)
    rows = {**ROWS, "packed_seq_params": SimpleNamespace(cu_seqlens_q=torch.tensor([0, 8, 16]))}
    assert case_of(MegatronModule(context_parallel_size=2), rows).segments == LEFT
