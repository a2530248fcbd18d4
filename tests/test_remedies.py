"""Law 12: every remedy works. Each refusal a user can meet, what its text says to change, and the answer that then comes.

A row holds the cause, words of the remedy, the same call as the remedy says, and what must be true of its answer.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from collate_npu import (
    BatchAdapter,
    CollateError,
    ContextParallel,
    PaddingCollator,
    Pattern,
    Segments,
    block_mask,
    dense,
    derive_segments,
    last_token,
    needs_mask_2d,
    none_is_exact,
    repad,
    split_batch,
    unpad,
    varlen,
    wrap_collator,
)
from collate_npu.consumers.consumer import Model
from collate_npu.consumers.consumer import route as route_of
from collate_npu.consumers.mindspeed import kernel_of_settings, layout_of_settings
from collate_npu.integrations.trl import adapt_forward
from collate_npu.kernels.fusion_attention import check_contract, fusion_attention_kwargs
from collate_npu.kernels.gated_delta import gated_delta_kwargs
from collate_npu.keys import KEYS, SAMPLE, TOKENS
from collate_npu.masks.find import segments_from_batch
from collate_npu.parallel import check_recurrent_split, cu_seqlens_of, gather_sequence, pad_documents

pytestmark = [pytest.mark.usefixtures("newest_transformers"), pytest.mark.filterwarnings("ignore:collate_npu")]
RIGHT = Segments.from_lengths([3, 5])
LEFT = Segments.from_lengths([3, 5], side="left")
FLAT = Segments.from_lengths([[3, 5]])
PACKED = Segments([[1, 1, 2, 2], [1, 1, 2, 2]])
HOLE = Segments([[1, 1, 0, 0, 1, 1]])
TAIL = Segments([[1, 1, 2, 2, 0, 0]])
HYBRID = SimpleNamespace(layer_types=["linear_attention", "full_attention"])
DENSE = SimpleNamespace(layer_types=["full_attention"])
JAMBA = SimpleNamespace(layer_types=HYBRID.layer_types, model_type="jamba")
QWEN = SimpleNamespace(layer_types=HYBRID.layer_types, model_type="qwen3_next")
ENCODER_HOLE = dense(Segments([[1, 1, 0, 1]]), pattern="bidirectional")
SLIDING = Pattern.sliding(2)
FEATURES = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]


PREFERENCE = [{"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3, 4]}]


def preference(features):
    """As TRL's DataCollatorForPreference: the chosen rows, then the rejected ones."""
    return {"input_ids": torch.tensor([[1, 2, 0], [1, 3, 4]]), "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}


def second_rows(segments):
    """As TRL's collator for KTO."""
    return lambda features: batch_of(segments, attention_mask=segments.keep, KL_input_ids=torch.ones(2, 9))


def packed(features):
    return batch_of(PACKED, attention_mask=PACKED.ids)


def watched_forward(batch):
    """What arrives in the forward of a model that `adapt_forward` looks after."""

    class Model(torch.nn.Module):
        config = SimpleNamespace(layer_types=["full_attention"])

        def forward(self, input_ids=None, attention_mask=None, position_ids=None):
            return {"attention_mask": attention_mask, "position_ids": position_ids}

    model = Model()
    adapt_forward(model, consumer="transformers")
    return model(**batch)


def batch_of(segments, **keys):
    B, S = segments.shape
    return {"input_ids": torch.arange(B * S).view(B, S), **keys}


def find(segments, *, polarity=None, pattern=None, padding_free=False, **keys):
    return segments_from_batch(batch_of(segments, **keys), polarity=polarity, pattern=pattern, padding_free=padding_free)


def collate(features=FEATURES, pad_token_id=0, **settings):
    return PaddingCollator(pad_token_id=pad_token_id, **settings)(features)


def adapt(segments, model=DENSE, consumer="megatron", **settings):
    keys = {"attention_mask_2d": segments.keep, "segment_ids": segments.ids}
    return BatchAdapter(model, consumer=consumer, **settings)(batch_of(segments, **keys))


def flat(model=DENSE, consumer="megatron", segments=FLAT, **settings):
    keys = {"cu_seq_lens_q": segments.cu_seqlens}
    return BatchAdapter(model, consumer=consumer, padding_free=True, **settings)(batch_of(segments, **keys))


def form(segments, consumer="transformers", needs_2d=False, config=None, **settings):
    model = Model(config=config or (HYBRID if needs_2d else None), needs_mask_2d=needs_2d, **settings.pop("model", {}))
    return route_of(consumer, segments, model=model, **settings).form


def inverted(segments):
    return (~segments.keep).long()


INDEXER = SimpleNamespace(layer_types=["full_attention"], index_n_heads=2, index_topk=4, model_type="x")
MISTRAL = SimpleNamespace(sliding_window=2, model_type="mistral", layer_types=["sliding_attention"])
CP = ContextParallel(2, 0)
SLICES = ContextParallel(2, 0, layout="contiguous")
ODD = Segments.from_lengths([3, 5])
EVEN = Segments.from_lengths([3, 5], 8)
THREE_FIVE = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6, 7, 8]}]
APART = Segments([[1, 1, 1, 0, 2, 2, 2, 2, 2, 0, 0, 0]])

REMEDIES = {
    # --- the door
    "no mask": (
        lambda: find(LEFT),
        "Carry attention_mask_2d",
        lambda: find(LEFT, attention_mask_2d=LEFT.keep),
        lambda got: got == LEFT,
    ),
    "a flat row without boundaries": (
        lambda: find(FLAT, padding_free=True),
        "position_ids that restart, cu_seq_lens_q or segment_ids",
        lambda: [
            find(FLAT, padding_free=True, **{key: value})
            for key, value in (
                ("position_ids", FLAT.position_ids),
                ("cu_seq_lens_q", FLAT.cu_seqlens),
                ("segment_ids", FLAT.ids),
            )
        ],
        lambda got: got == [FLAT] * 3,
    ),
    "padding_free with several rows": (
        lambda: find(RIGHT, padding_free=True, attention_mask_2d=RIGHT.keep),
        "or set it to False",
        lambda: find(RIGHT, attention_mask_2d=RIGHT.keep),
        lambda got: got == RIGHT,
    ),
    "a foreign pattern": (
        lambda: find(LEFT, attention_mask=dense(LEFT, pattern=SLIDING), attention_mask_2d=LEFT.keep),
        "Pass pattern=Pattern.sliding(2)",
        lambda: find(LEFT, attention_mask=dense(LEFT, pattern=SLIDING), attention_mask_2d=LEFT.keep, pattern=SLIDING),
        lambda got: got == LEFT,
    ),
    "another pattern than the declared one": (
        lambda: find(LEFT, attention_mask=dense(LEFT), attention_mask_2d=LEFT.keep, pattern=SLIDING),
        "or leave the mask out beside attention_mask_2d",
        lambda: find(LEFT, attention_mask_2d=LEFT.keep, pattern=SLIDING),
        lambda got: got == LEFT,
    ),
    "packed rows of equal length": (
        lambda: find(PACKED, attention_mask=dense(PACKED)),
        "Carry attention_mask_2d (with segment_ids, where rows are packed)",
        lambda: find(PACKED, attention_mask=dense(PACKED), segment_ids=PACKED.ids, attention_mask_2d=PACKED.keep),
        lambda got: got == PACKED,
    ),
    "packed rows or chunks": (
        lambda: find(TAIL, attention_mask=dense(TAIL) & TAIL.keep[:, None, :, None]),
        "Declare pattern='causal'",
        lambda: find(TAIL, attention_mask=dense(TAIL) & TAIL.keep[:, None, :, None], pattern="causal"),
        lambda got: got == TAIL,
    ),
    "a mask by head": (
        lambda: find(LEFT, attention_mask=torch.cat([dense(LEFT), dense(LEFT, pattern=SLIDING)], 1)),
        "pass attention_mask_2d instead",
        lambda: find(LEFT, attention_mask_2d=LEFT.keep),
        lambda got: got == LEFT,
    ),
    "one row of keys": (
        lambda: find(LEFT, attention_mask=LEFT.keep[:, None, None]),
        "Declare pattern='causal' or pattern='bidirectional'",
        lambda: find(LEFT, attention_mask=LEFT.keep[:, None, None], pattern="causal", polarity="keep"),
        lambda got: got == LEFT,
    ),
    "an undeclared polarity": (
        lambda: find(RIGHT, attention_mask=torch.zeros(2, 5)),
        "Pass polarity=",
        lambda: find(RIGHT, attention_mask=torch.zeros(2, 5), polarity="bias"),
        lambda got: got == Segments.from_lengths([5, 5]),
    ),
    "a 2D mask turned around": (
        lambda: find(LEFT, attention_mask=inverted(LEFT)),
        "Invert it (== 0) or declare polarity='masked'",
        lambda: [
            find(LEFT, attention_mask=inverted(LEFT) == 0),
            find(LEFT, attention_mask=inverted(LEFT), polarity="masked"),
        ],
        lambda got: got == [LEFT, LEFT],
    ),
    "a row that is meant to be empty": (
        lambda: find(Segments.from_lengths([0, 3]), attention_mask_2d=Segments.from_lengths([0, 3]).keep),
        "carry segment_ids beside it",
        lambda: find(Segments.from_lengths([0, 3]), segment_ids=Segments.from_lengths([0, 3]).ids),
        lambda got: got == Segments.from_lengths([0, 3]),
    ),
    "a mask of another width": (
        lambda: find(LEFT, attention_mask_2d=torch.ones(2, 6)),
        "Build them together",
        lambda: find(LEFT, attention_mask_2d=LEFT.keep),
        lambda got: got == LEFT,
    ),
    "positions that restart elsewhere": (
        lambda: find(FLAT, segment_ids=FLAT.ids, position_ids=torch.tensor([[0, 1, 0, 1, 2, 3, 4, 5]])),
        "Let every sequence count from 0",
        lambda: find(FLAT, segment_ids=FLAT.ids, position_ids=FLAT.position_ids),
        lambda got: got == FLAT,
    ),
    "offsets of another batch": (
        lambda: find(FLAT, cu_seqlens=FLAT.cu_seqlens, seq_lens=torch.tensor([4, 4])),
        "Keep one set of them",
        lambda: find(FLAT, cu_seqlens=FLAT.cu_seqlens),
        lambda got: got == FLAT,
    ),
    "an object instead of a mask": (
        lambda: find(LEFT, attention_mask_2d="ones"),
        "a dense tensor, a numpy array or nested lists",
        lambda: [find(LEFT, attention_mask_2d=x) for x in (LEFT.keep, LEFT.keep.numpy(), LEFT.keep.tolist())],
        lambda got: got == [LEFT] * 3,
    ),
    # --- a mask alone
    "an unexplained mask": (
        lambda: derive_segments(torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]])),
        "pass prove=False",
        lambda: derive_segments(torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]), prove=False, polarity="keep"),
        lambda got: got.keep.all(),
    ),
    "padding that attends itself": (
        lambda: derive_segments(dense(Segments([[1, 1, 1, 2, 2]])), pattern="causal"),
        "Carry attention_mask_2d",
        lambda: derive_segments(dense(Segments([[1, 1, 1, 2, 2]])), keep=Segments([[1, 1, 1, 0, 0]]).keep, pattern="causal"),
        lambda got: got == Segments([[1, 1, 1, 0, 0]]),
    ),
    "a shared mask or a 2D one": (
        lambda: derive_segments(torch.ones(4, 4).tril()),
        "Pass [B, 1, S, S], or attention_mask_2d",
        lambda: derive_segments(torch.ones(1, 1, 4, 4).tril(), batch_size=4),
        lambda got: got == Segments.from_lengths([4] * 4),
    ),
    "rows that were unmasked": (
        lambda: derive_segments(torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]]), polarity="keep"),
        "Pass unmasked_rows=True",
        lambda: derive_segments(
            torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]]), polarity="keep", unmasked_rows=True
        ),
        lambda got: got == Segments([[1, 1, 0, 0]]),
    ),
    # --- collators
    "no pad id": (
        lambda: collate(pad_token_id=None),
        "or pass pad_token_id=",
        lambda: collate(pad_token_id=0),
        lambda got: got["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0]],
    ),
    "an empty sample": (
        lambda: collate([{"input_ids": []}, {"input_ids": [1]}]),
        "or pass allow_empty=True",
        lambda: segments_from_batch(collate([{"input_ids": []}, {"input_ids": [1]}], allow_empty=True)),
        lambda got: got == Segments.from_lengths([0, 1]),
    ),
    "a key nobody listed": (
        lambda: collate([{"input_ids": [1, 2], "x": [0.5, 1.0]}, {"input_ids": [1], "x": [2.0]}]),
        "keys={**KEYS, 'x': TOKENS} (or SAMPLE",
        lambda: [
            collate([{"input_ids": [1, 2], "x": [0.5, 1.0]}, {"input_ids": [1], "x": [2.0]}], keys={**KEYS, "x": kind})["x"]
            for kind in (TOKENS, SAMPLE)
        ],
        lambda got: got[0].tolist() == [[0.5, 1.0], [2.0, 0.0]] and got[1] == [[0.5, 1.0], [2.0]],
    ),
    "a mask on a flat row": (
        lambda: collate(padding_free=True, attention_mask="4d"),
        "Leave it at 'auto', or set padding_free=False",
        lambda: (collate(padding_free=True)["attention_mask"], collate(attention_mask="4d")["attention_mask"].shape),
        lambda got: got == (None, (2, 1, 3, 3)),
    ),
    "a flat row of images": (
        lambda: collate([{"input_ids": [1, 2], "pixel_values": torch.ones(1, 4)}], padding_free=True),
        "its position_ids [3, L] (the model's get_rope_index), or set padding_free=False",
        lambda: [
            collate([{"input_ids": [1, 2], "pixel_values": torch.ones(1, 4), **more}], padding_free=free)
            for more, free in (({"position_ids": np.zeros((3, 2), int)}, True), ({}, False))
        ],
        lambda got: got[0]["position_ids"].shape == (3, 1, 2) and "position_ids" not in got[1],
    ),
    "None where it is not exact": (
        lambda: collate(padding_side="left", attention_mask="none"),
        "Use 'auto', or pad right",
        lambda: (collate(padding_side="left")["attention_mask"].shape, collate(attention_mask="none")["attention_mask"]),
        lambda got: got == ((2, 1, 3, 3), None),
    ),
    "a row that is too long": (
        lambda: collate(max_length=2),
        "Truncate when tokenising",
        lambda: collate([{"input_ids": f["input_ids"][:2]} for f in FEATURES], max_length=2),
        lambda got: got["input_ids"].shape == (2, 2),
    ),
    "a config does not say who reads": (
        lambda: PaddingCollator(pad_token_id=0, model=DENSE),
        "Pass consumer=",
        lambda: PaddingCollator(pad_token_id=0, model=DENSE, consumer="transformers")(FEATURES),
        lambda got: got["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]],
    ),
    "a mask that hides real tokens": (
        lambda: wrap_collator(lambda f: {"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.tensor([[1, 0]])})(
            [{"input_ids": [1, 2]}]
        ),
        "Let it build the mask from lengths",
        lambda: wrap_collator(lambda f: {"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.tensor([[1, 1]])})(
            [{"input_ids": [1, 2]}]
        ),
        lambda got: got["attention_mask_2d"].all(),
    ),
    "samples at both ends alike": (
        lambda: wrap_collator(lambda f: {"input_ids": torch.tensor([[1, 1, 1], [1, 1, 1]])})([{"input_ids": [1]}] * 2),
        "Let the inner collator emit attention_mask",
        lambda: wrap_collator(
            lambda f: {"input_ids": torch.tensor([[1, 1, 1], [1, 1, 1]]), "attention_mask": torch.tensor([[1, 0, 0]] * 2)}
        )([{"input_ids": [1]}] * 2),
        lambda got: got["attention_mask_2d"].sum() == 2,
    ),
    "preference data in a collator of rows": (
        lambda: collate([{"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3, 4]}]),
        "Wrap the collator that makes rows of these columns: wrap_collator(",
        lambda: wrap_collator(preference, consumer="transformers", model=HYBRID)(PREFERENCE),
        lambda got: got["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]],
    ),
    "rows joined behind the collator": (
        lambda: wrap_collator(lambda f: {"chosen_input_ids": 1})([{}]),
        "call collate_npu.integrations.trl.adapt_forward(model)",
        lambda: watched_forward({"input_ids": batch_of(LEFT)["input_ids"], "attention_mask": LEFT.keep}),
        lambda got: torch.equal(got["attention_mask"], LEFT.keep.long()),
    ),
    "second rows beside left padding": (
        lambda: wrap_collator(second_rows(LEFT), consumer="transformers", model=DENSE)(FEATURES),
        "Pad right; or leave that collator",
        lambda: (
            wrap_collator(second_rows(RIGHT), consumer="transformers", model=DENSE)(FEATURES),
            watched_forward({"input_ids": batch_of(LEFT)["input_ids"], "attention_mask": LEFT.keep}),
        ),
        lambda got: torch.equal(got[1]["position_ids"], LEFT.position_ids) and "position_ids" not in got[0],
    ),
    "packed rows of a wrapped collator": (
        lambda: wrap_collator(packed, consumer="megatron", model=HYBRID)(FEATURES),
        "or use padding_free=True",
        lambda: wrap_collator(packed, consumer="megatron", model=HYBRID, padding_free=True)(FEATURES),
        lambda got: got["cu_seq_lens_q"].tolist() == [0, 2, 4, 6, 8],
    ),
    "an unlisted key of tokens in a row made flat": (
        lambda: wrap_collator(lambda f: packed(f) | {"mine": torch.ones(2, 4)}, padding_free=True)(FEATURES),
        "keys={**KEYS, 'mine': TOKENS} (or SAMPLE, if it is none)",
        lambda: wrap_collator(
            lambda f: packed(f) | {"mine": torch.ones(2, 4)}, padding_free=True, keys={**KEYS, "mine": TOKENS}
        )(FEATURES),
        lambda got: got["mine"].shape == (1, 8),
    ),
    # --- consumers
    "packed rows on recurrent layers": (
        lambda: adapt(PACKED, HYBRID),
        "or use padding_free=True",
        lambda: flat(HYBRID),
        lambda got: got["attention_mask"] is None and "cu_seq_lens_q" in got,
    ),
    "left padding on MindSpeed": (
        lambda: adapt(LEFT, HYBRID, "mindspeed"),
        "Pad right with one sequence a row, or use padding_free=True",
        lambda: (adapt(RIGHT, HYBRID, "mindspeed"), flat(HYBRID, "mindspeed"), adapt(LEFT, HYBRID, "mindspeed_dense")),
        lambda got: [batch["attention_mask"] is None for batch in got] == [True, True, False],
    ),
    "a flat row where MindSpeed reads dense masks": (
        lambda: flat(HYBRID, "mindspeed_dense"),
        "(consumer='mindspeed')",
        lambda: flat(HYBRID, "mindspeed"),
        lambda got: got["attention_mask"] is None,
    ),
    "general attention under context parallelism": (
        lambda: kernel_of_settings(SimpleNamespace(attention_mask_type="general", context_parallel_size=2)),
        "Set attention_mask_type=causal",
        lambda: kernel_of_settings(SimpleNamespace(attention_mask_type="causal", context_parallel_size=2)),
        lambda got: got == "mindspeed",
    ),
    "TransformerEngine's place without flash attention": (
        lambda: kernel_of_settings(SimpleNamespace(use_flash_attn=False), te="own"),
        "Set use_flash_attn=True",
        lambda: kernel_of_settings(SimpleNamespace(use_flash_attn=True), te="own"),
        lambda got: got == "mindspeed",
    ),
    "a window that MindSpeed drops": (
        lambda: form(Segments.from_lengths([5]), "mindspeed", config=SimpleNamespace(window_size=(3, 0))),
        "rows no longer than the window",
        lambda: form(Segments.from_lengths([4]), "mindspeed", config=SimpleNamespace(window_size=(3, 0))),
        lambda got: got == "none",
    ),
    "ranks that share a dense mask of MindSpeed": (
        lambda: BatchAdapter(HYBRID, consumer="mindspeed_dense", context_parallel=CP),
        "Leave context_parallel out",
        lambda: BatchAdapter(HYBRID, consumer="mindspeed_dense")(batch_of(LEFT, attention_mask_2d=LEFT.keep)),
        lambda got: got["attention_mask"].shape == (2, 1, 5, 5),
    ),
    "left padding on TransformerEngine": (
        lambda: adapt(LEFT, DENSE, "transformer_engine"),
        "(consumer='megatron')",
        lambda: adapt(LEFT, DENSE, "megatron"),
        lambda got: torch.equal(got["attention_mask"], dense(LEFT, polarity="masked")),
    ),
    "packed rows on verl": (
        lambda: adapt(PACKED, DENSE, "verl"),
        "padding_free=True",
        lambda: flat(DENSE, "verl"),
        lambda got: got["attention_mask"] is None,
    ),
    "left padding on torchtitan's recurrent layers": (
        lambda: adapt(LEFT, HYBRID, "torchtitan"),
        "Pad right",
        lambda: adapt(RIGHT, HYBRID, "torchtitan"),
        lambda got: got["attention_masks"].shape == (2, 1, 5, 5),
    ),
    "a hole on recurrent layers of Megatron": (
        lambda: adapt(HOLE, HYBRID),
        "Move the padding to one side of the tokens, or drop those tokens from the sample",
        lambda: (adapt(LEFT, HYBRID), adapt(Segments([[1, 1, 1, 1]]), HYBRID)),
        lambda got: torch.equal(got[0]["attention_mask_2d"], LEFT.keep) and got[1]["attention_mask"] is None,
    ),
    "a hole on recurrent layers": (
        lambda: adapt(HOLE, HYBRID, "transformers"),
        "padding_free=True does both, where taken",
        lambda: collate(
            [{"input_ids": [1, 2, 3, 4], "attention_mask": [1, 0, 0, 1]}],
            padding_free=True,
            consumer="transformers",
            model=HYBRID,
        ),
        lambda got: got["input_ids"].tolist() == [[1, 4]],
    ),
    "a model that ignores the mask": (
        lambda: form(LEFT, needs_2d=True, config=SimpleNamespace(model_type="rwkv")),
        "Pad right",
        lambda: form(RIGHT, needs_2d=True, config=SimpleNamespace(model_type="rwkv")),
        lambda got: got == "keep_2d",
    ),
    "an indexer beside padding": (
        lambda: form(Segments.from_lengths([5, 7]), config=INDEXER),
        "Batch sequences of one length",
        lambda: form(Segments.from_lengths([5, 5]), config=INDEXER),
        lambda got: got == "keep_2d",
    ),
    "a dense mask on flash attention": (
        lambda: form(PACKED, model={"attn_implementation": "flash_attention_2"}),
        "Use attn_implementation='sdpa' or 'eager', or padding_free=True",
        lambda: (
            form(PACKED, model={"attn_implementation": "eager"}),
            form(FLAT, padding_free=True, model={"attn_implementation": "flash_attention_2"}),
        ),
        lambda got: got == ("bias", "none"),
    ),
    "a pattern on flex beside recurrent layers": (
        lambda: form(LEFT, needs_2d=True, pattern=SLIDING, model={"attn_implementation": "flex_attention"}),
        "Use attn_implementation='sdpa' or 'eager'",
        lambda: form(LEFT, needs_2d=True, pattern=SLIDING),
        lambda got: got == "mapping",
    ),
    "a window on flex": (
        lambda: form(PACKED, config=replace_window(1), model={"attn_implementation": "flex_attention"}),
        "or rows no longer than the window",
        lambda: form(PACKED, config=replace_window(2), model={"attn_implementation": "flex_attention"}),
        lambda got: got == "block_mask",
    ),
    "a router's loss beside a mapping": (
        lambda: form(LEFT, pattern=SLIDING, needs_2d=True, config=router(True)),
        "Set output_router_logits=False, or keep plain causal attention",
        lambda: (
            form(LEFT, pattern=SLIDING, needs_2d=True, config=router(False)),
            form(LEFT, needs_2d=True, config=router(True)),
        ),
        lambda got: got == ("mapping", "keep_2d"),
    ),
    "an adapter without a model": (
        lambda: BatchAdapter(consumer="megatron"),
        "Pass model=, model_type= or needs_mask_2d=",
        lambda: BatchAdapter(consumer="megatron", needs_mask_2d=True).model.needs_mask_2d,
        lambda got: got is True,
    ),
    "an unknown consumer": (
        lambda: BatchAdapter(DENSE, consumer="vllm"),
        "Name one of them",
        lambda: BatchAdapter(DENSE, consumer="verl").consumer.name,
        lambda got: got == "verl",
    ),
    # --- forms, ways back, parallel, kernels
    "a mask that is too large": (
        lambda: dense(RIGHT, max_mask_bytes=49),
        "Use None where none_is_exact, varlen(), a slice of rows, or raise the limit",
        lambda: (dense(RIGHT, max_mask_bytes=50).shape, dense(RIGHT, rows=slice(0, 2), max_mask_bytes=20).shape),
        lambda got: got == ((2, 1, 5, 5), (2, 1, 2, 5)) and none_is_exact(RIGHT),
    ),
    "a block mask that is too large": (
        lambda: block_mask(RIGHT, max_mask_bytes=49),
        "or raise the limit",
        lambda: block_mask(RIGHT).shape,
        lambda got: got == (2, 1, 5, 5),
    ),
    "rows as a bool": (
        lambda: dense(RIGHT, rows=torch.tensor([True, False, True, False, False])),
        "Pass rows.nonzero()[:, 0]",
        lambda: dense(RIGHT, rows=torch.tensor([True, False, True, False, False]).nonzero()[:, 0]),
        lambda got: torch.equal(got, dense(RIGHT)[:, :, [0, 2]]),
    ),
    "a tail that cannot be kept": (
        lambda: varlen(LEFT, keep_tail=True),
        "unpad() first, and leave the tail out",
        lambda: (unpad(torch.arange(10).view(2, 5), LEFT).tolist(), varlen(LEFT).cu_seqlens_host),
        lambda got: got == ([2, 3, 4, 5, 6, 7, 8, 9], (0, 3, 8)),
    ),
    "an output that was not unpadded": (
        lambda: repad(torch.ones(10), LEFT),
        "Pass the output of unpad",
        lambda: repad(unpad(torch.ones(2, 5), LEFT), LEFT),
        lambda got: torch.equal(got, LEFT.keep.float()),
    ),
    "the last token of an empty row": (
        lambda: last_token(torch.ones(2, 3), Segments.from_lengths([0, 3])),
        "Drop those rows",
        lambda: last_token(torch.arange(3)[None], Segments.from_lengths([3])),
        lambda got: got.tolist() == [2],
    ),
    "a width that does not divide": (
        lambda: adapt(ODD, context_parallel=CP),
        "pad_to_multiple_of=4",
        lambda: adapt(EVEN, context_parallel=CP),
        lambda got: got["input_ids"].shape == (2, 4),
    ),
    "slices for recurrent layers that undo a zigzag": (
        lambda: BatchAdapter(HYBRID, consumer="mindspeed", context_parallel=SLICES)(
            batch_of(EVEN, attention_mask_2d=EVEN.keep)
        ),
        "Use ContextParallel(layout='zigzag'); ms-swift: cp_partition_mode='zigzag', MindSpeed: context_parallel_algo=",
        lambda: BatchAdapter(HYBRID, consumer="mindspeed", context_parallel=CP)(batch_of(EVEN, attention_mask_2d=EVEN.keep)),
        lambda got: got["input_ids"].shape == (2, 4),
    ),
    "recurrent layers that their stack does not share out": (
        lambda: BatchAdapter(HYBRID, consumer="mindspeed_llm_fsdp2", context_parallel=SLICES),
        "Give each rank rows of its own, or use Megatron's context parallelism",
        lambda: [
            BatchAdapter(HYBRID, consumer="mindspeed_llm_fsdp2")(batch_of(EVEN, attention_mask_2d=EVEN.keep)),
            BatchAdapter(HYBRID, consumer="megatron", context_parallel=CP)(batch_of(EVEN, attention_mask_2d=EVEN.keep)),
        ],
        lambda got: [batch["input_ids"].shape[1] for batch in got] == [8, 4],
    ),
    "heads that the ranks do not share out": (
        lambda: check_recurrent_split(CP, "head_exchange_zigzag", EVEN, heads=(3, 6)),
        "Use a context parallel size that divides both numbers",
        lambda: check_recurrent_split(
            ContextParallel(3, 0), "head_exchange_zigzag", Segments.from_lengths([6]), heads=(3, 6)
        ),
        lambda got: got is None,
    ),
    "a ring of MindSpeed that is not known": (
        lambda: layout_of_settings(SimpleNamespace(context_parallel_algo="hybrid_cp_algo")),
        "Use one of them, or context_parallel=",
        lambda: [layout_of_settings(SimpleNamespace(context_parallel_algo=f"{n}_cp_algo")) for n in ("megatron", "ulysses")],
        lambda got: got == ["zigzag", "ulysses"],
    ),
    "padded rows for a state that is passed on": (
        lambda: check_recurrent_split(SLICES, "state_passing", EVEN),
        "Use padding_free=True: one flat row",
        lambda: check_recurrent_split(SLICES, "state_passing", FLAT, padding_free=True),
        lambda got: got is None,
    ),
    "documents on a plain layout": (
        lambda: split_batch(batch_of(FLAT, cu_seq_lens_q=FLAT.cu_seqlens), CP),
        "Use cp.for_documents()",
        lambda: split_shards(),
        lambda got: got,
    ),
    "a key of unknown dimension": (
        lambda: split_batch(batch_of(EVEN, x=torch.zeros(3, 8)), CP),
        "keys={**KEYS, 'x': Key(kind='tokens', dim=...)}, or SAMPLE",
        lambda: split_batch(batch_of(EVEN, x=torch.zeros(3, 8)), CP, keys={**KEYS, "x": SAMPLE})["x"].shape,
        lambda got: got == (3, 8),
    ),
    "a gather without a group": (
        lambda: gather_sequence(torch.ones(2, 4), CP),
        "",
        lambda: gather_sequence(torch.ones(2, 8), ContextParallel(1, 0)).shape,
        lambda got: got == (2, 8),
    ),
    "a flat row on layers that ask for no offsets": (
        lambda: flat(JAMBA, "transformers"),
        "Give each sequence its own row (padding_free=False)",
        lambda: BatchAdapter(JAMBA, consumer="transformers")(batch_of(RIGHT, attention_mask_2d=RIGHT.keep)),
        lambda got: got["attention_mask"].tolist() == RIGHT.keep.int().tolist(),
    ),
    "a flat row for nobody knows which model": (
        lambda: flat(None, "transformers", needs_mask_2d=True),
        "pass model=",
        lambda: flat_route(boundaries_unread=""),
        lambda got: got.form == "mapping",
    ),
    "a flat row where a kernel is missing": (
        lambda: flat_route(boundaries_unread="causal_conv1d_fn is plain torch"),
        "Give each sequence its own row (padding_free=False)",
        lambda: (adapt(RIGHT, HYBRID, "transformers"), flat_route(boundaries_unread="")),
        lambda got: got[0]["attention_mask"].shape == (2, 5) and got[1].form == "mapping",
    ),
    "two readings under a declared pattern": (
        lambda: derive_segments(ENCODER_HOLE, pattern="causal"),
        "Pass polarity='keep'",
        lambda: derive_segments(ENCODER_HOLE, pattern="bidirectional", polarity="keep").lengths,
        lambda got: got == ((3,),),
    ),
    "a module without a config": (
        lambda: needs_mask_2d(torch.nn.Linear(1, 1)),
        "Pass the config itself",
        lambda: needs_mask_2d(HYBRID),
        lambda got: got,
    ),
    # --- flat rows of one shape
    "more tokens than the widest row": (
        lambda: collate(THREE_FIVE, padding_free=True, padding=(4, 6)),
        "Raise the widths, or put fewer samples in a batch",
        lambda: (
            collate(THREE_FIVE, padding_free=True, padding=(4, 8)),
            collate(THREE_FIVE[1:], padding_free=True, padding=(4, 6)),
        ),
        lambda got: [batch["input_ids"].shape[1] for batch in got] == [8, 6],
    ),
    "more tokens than max_length, in a flat row": (
        lambda: collate(THREE_FIVE, padding_free=True, padding="max_length", max_length=6),
        "Raise max_length",
        lambda: collate(THREE_FIVE, padding_free=True, padding="max_length", max_length=8)["input_ids"].shape,
        lambda got: got == (1, 8),
    ),
    "no room for a tail in sequences": (
        lambda: collate(THREE_FIVE, padding_free=True, padding=(8,), max_sequences=4),
        "Raise the widths",
        lambda: collate(THREE_FIVE, padding_free=True, padding=(8, 10), max_sequences=4)["cu_seq_lens_q"].tolist(),
        lambda got: got == [0, 3, 8, 9, 10],
    ),
    "more sequences than the offsets hold": (
        lambda: collate(THREE_FIVE, padding_free=True, max_sequences=1),
        "Raise max_sequences to 2 or more",
        lambda: collate(THREE_FIVE, padding_free=True, max_sequences=2)["cu_seq_lens_q"].tolist(),
        lambda got: got == [0, 3, 8],
    ),
    "rows wider than the widest": (
        lambda: collate(THREE_FIVE, padding=(2, 4)),
        "Raise the widths",
        lambda: collate(THREE_FIVE, padding=(2, 6))["input_ids"].shape,
        lambda got: got == (2, 6),
    ),
    "alignment of sequences in padded rows": (
        lambda: collate(THREE_FIVE, sequence_multiple=4),
        "Leave it out, or set padding_free=True",
        lambda: (collate(THREE_FIVE, pad_to_multiple_of=4), collate(THREE_FIVE, padding_free=True, sequence_multiple=4)),
        lambda got: [batch["input_ids"].shape for batch in got] == [(2, 8), (1, 12)],
    ),
    "alignment under attention that looks ahead": (
        lambda: collate(THREE_FIVE, padding_free=True, sequence_multiple=4, pattern="bidirectional"),
        "pad_to_multiple_of pads the row behind all of them",
        lambda: collate(THREE_FIVE, padding_free=True, pad_to_multiple_of=6, pattern="bidirectional")[
            "cu_seq_lens_q"
        ].tolist(),
        lambda got: got == [0, 3, 8, 12],
    ),
    "physical offsets of another row": (
        lambda: gated_delta_kwargs(FLAT, kernel="fla", padding=[0, 2, 8]),
        "Pass cu_seqlens_padded of this very batch, or 'own'",
        lambda: gated_delta_kwargs(APART, kernel="fla", padding=torch.tensor([0, 4, 10, 12]))["cu_seqlens"].tolist(),
        lambda got: got == [0, 4, 10, 12],
    ),
    "a tail whose beginning is lost": (
        lambda: gated_delta_kwargs(APART, kernel="fla", padding="behind", max_sequences=4),
        "Pass padding=batch['cu_seqlens_padded'] of PaddingCollator(max_sequences=)",
        lambda: gated_delta_kwargs(APART, kernel="fla", padding=[0, 4, 9, 10, 12], max_sequences=4)["cu_seqlens"].tolist(),
        lambda got: got == [0, 4, 9, 10, 12],
    ),
    "rising offsets without a tail": (
        lambda: gated_delta_kwargs(FLAT, kernel="fla", max_sequences=4),
        "Raise the width to 10",
        lambda: gated_delta_kwargs(Segments.from_lengths([[3, 5]], 10), kernel="fla", max_sequences=4)[
            "cu_seqlens"
        ].tolist(),
        lambda got: got == [0, 3, 8, 9, 10],
    ),
    "a window over a hole under TND": (
        lambda: fusion_attention_kwargs(HOLE, pattern=SLIDING, layout="TND"),
        "Use a padded layout such as BSND",
        lambda: fusion_attention_kwargs(HOLE, pattern=SLIDING, layout="BSND"),
        lambda got: check_contract(got, N=1, Nkv=1, D=8, segments=HOLE, pattern=SLIDING) is None,
    ),
}


def flat_route(**known):
    """A flat row on a model that was asked."""
    asked = Model(config=QWEN, model_type="qwen3_next", needs_mask_2d=True, **known)
    return route_of("transformers", FLAT, model=asked, padding_free=True)


def replace_window(size):
    return SimpleNamespace(sliding_window=size, layer_types=["sliding_attention"], model_type="mistral")


def router(on):
    return SimpleNamespace(layer_types=HYBRID.layer_types, output_router_logits=on)


def split_shards():
    cp = CP.for_documents()
    padded, _ = pad_documents(batch_of(FLAT, cu_seq_lens_q=FLAT.cu_seqlens), cp)
    shards = [split_batch(padded, cp.with_rank(rank))["input_ids"] for rank in (0, 1)]
    return sorted(torch.cat(shards, 1)[0].tolist())[-8:] == list(range(8)) or cu_seqlens_of(padded) is not None


@pytest.mark.parametrize("name", REMEDIES)
def test_the_remedy_of_a_refusal_works(name):
    cause, words, follow, right = REMEDIES[name]
    with pytest.raises(CollateError) as raised:
        cause()
    assert words in str(raised.value)
    assert right(follow())
