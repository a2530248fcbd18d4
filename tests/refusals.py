"""The table of refusals: what a user does wrong, the words that meet it, and the call that the words ask for.

`WORDED`: how the text begins, all bad rows in it. `FOLLOWED` (law 12): the cause, words of the remedy, the same call as the
remedy says, and what must be true of its answer where that does not say it. Every bad value at every entry: test_bad_input.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from collate_npu import (
    BatchAdapter,
    ContextParallel,
    PaddingCollator,
    Pattern,
    Segments,
    adapt,
    derive_segments,
    last_token,
    needs_mask_2d,
    split_batch,
    unpad,
    wrap_collator,
)
from collate_npu.consumers.mask_choice import Case, Model, consumer_named
from collate_npu.kernels.gated_delta import gated_delta_kwargs
from collate_npu.keys import KEYS, SAMPLE, TOKENS
from collate_npu.masks import dense, varlen
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.parallel import check_recurrent_split, pad_documents, split_tensor

RIGHT = Segments.from_lengths([3, 5])
LEFT = Segments.from_lengths([3, 5], side="left")
FLAT = Segments.from_lengths([[3, 5]])
PACKED = Segments([[1, 1, 2, 2], [1, 1, 2, 2]])
HYBRID = SimpleNamespace(layer_types=["linear_attention", "full_attention"])
DENSE = SimpleNamespace(layer_types=["full_attention"])
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
    """What arrives in the forward of a model that `adapt` looks after."""

    class Model(torch.nn.Module):
        config = SimpleNamespace(layer_types=["full_attention"])

        def forward(self, input_ids=None, attention_mask=None, position_ids=None):
            return {"attention_mask": attention_mask, "position_ids": position_ids}

    model = Model()
    adapt(model, consumer="transformers")
    return model(**batch)


def batch_of(segments, **keys):
    B, S = segments.shape
    return {"input_ids": torch.arange(B * S).view(B, S), **keys}


def find(segments, *, polarity=None, pattern=None, padding_free=False, **keys):
    return segments_from_batch(batch_of(segments, **keys), polarity=polarity, pattern=pattern, padding_free=padding_free)


def collate(features=FEATURES, pad_token_id=0, **settings):
    return PaddingCollator(pad_token_id=pad_token_id, **settings)(features)


def flat(model=DENSE, consumer="megatron", segments=FLAT, **settings):
    keys = {"cu_seq_lens_q": segments.cu_seqlens}
    return BatchAdapter(model, consumer=consumer, padding_free=True, **settings)(batch_of(segments, **keys))


def form(segments, consumer="transformers", needs_2d=False, config=None, **settings):
    model = Model(config=config or (HYBRID if needs_2d else None), needs_mask_2d=needs_2d, **settings.pop("model", {}))
    case = Case(segments=segments, model=model, pattern=Pattern.of(settings.pop("pattern", "causal")), **settings)
    return consumer_named(consumer).choose(case).form


def window(size):
    return {"config": SimpleNamespace(sliding_window=size, layer_types=["sliding_attention"], model_type="mistral")}


INDEXED = {"layer_types": ["full_attention"], "index_n_heads": 2, "index_topk": 4, "model_type": "x"}
CP = ContextParallel(2, 0)
SLICES, DOCUMENTS = ContextParallel(2, 0, layout="contiguous"), CP.for_documents()
EVEN = Segments.from_lengths([3, 5], 8)
THREE_FIVE = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6, 7, 8]}]
APART = Segments([[1, 1, 1, 0, 2, 2, 2, 2, 2, 0, 0, 0]])

collate_all = PaddingCollator(pad_token_id=0, keys={**KEYS, "weights": TOKENS})


def with_nan(*rows):
    bias = dense(Segments.from_lengths([3, 5, 4]), polarity="bias")
    bias[list(rows), 0, 2, 1] = torch.nan
    return bias


def ids(*rows, **columns):
    return [{"input_ids": row, **{key: column[b] for key, column in columns.items()}} for b, row in enumerate(rows)]


WORDED = {
    "a row with no tokens": (
        lambda: collate_all(ids([], [1], [])),
        "input_ids: 2 bad rows.\n  row 0: got no tokens\n  row 2: got no tokens\nA row without real tokens has no logits, "
        "no loss and no last token.\nDrop the samples.",
    ),
    "float ids in packed rows": (
        lambda: collate(ids([1], [2, 3], [0.5]), packing=True),
        "input_ids: 1 bad row.\n  row 2: got 0.5 at token 0\n",
    ),
    "NaN in an additive mask": (
        lambda: derive_segments(with_nan(0, 2)),
        "attention_mask: 2 bad rows.\n  row 0: got NaN\n  row 2: got NaN\n",
    ),
    "masks that disagree": (
        lambda: derive_segments(RIGHT.keep, keep=Segments.from_lengths([4, 5]).keep),
        "attention_mask: 1 bad row.\n  row 0: got 3 real tokens, not 4\nIt disagrees with the other mask of the same batch",
    ),
}

MOVED, INDEXER = {"model": {"leaks": {"left": "it was measured"}}}, {"config": SimpleNamespace(**INDEXED)}
FLASH, FLEX, EAGER = ({"model": {"attn_implementation": name}} for name in ("flash_attention_2", "flex_attention", "eager"))
ROUTERS = (SimpleNamespace(layer_types=HYBRID.layer_types, output_router_logits=on) for on in (True, False))
MOE, QUIET = ({"config": router, "pattern": SLIDING} for router in ROUTERS)
HYBRID_MODEL = {"config": HYBRID, "needs_2d": True}
WINDOWED = {"consumer": "mindspeed", "config": SimpleNamespace(window_size=(3, 0))}
CHUNKED, OWN = window(2), {"pattern": Pattern.chunked(2)}
CHUNKED["config"].layer_types, CHUNKED["config"].attention_chunk_size = ["chunked_attention"], 2
FIVE, FIVES, MORE = (Segments.from_lengths(lengths) for lengths in ([5], [5, 5], [5, 7]))

ROUTES = [
    (LEFT, MOVED, "pad right", RIGHT, MOVED, "keep_2d"),
    (MORE, INDEXER, "Batch sequences of one length", FIVES, INDEXER, "keep_2d"),
    (PACKED, FLASH, "Use attn_implementation='sdpa' or 'eager'", PACKED, EAGER, "bias"),
    (PACKED, FLASH, "padding_free=True on flash", FLAT, {**FLASH, "padding_free": True}, "none"),
    (LEFT, {**HYBRID_MODEL, "pattern": SLIDING}, "Keep the model's own pattern", LEFT, HYBRID_MODEL, "keep_2d"),
    (PACKED, {**FLEX, **window(1)}, "or rows no longer than the window", PACKED, {**FLEX, **window(2)}, "block_mask"),
    (LEFT, MOE, "Set output_router_logits=False", LEFT, QUIET, "keep"),
    (LEFT, MOE, "or keep plain causal attention", LEFT, {**MOE, "pattern": "causal"}, "keep_2d"),
    (
        FIVE,
        {**CHUNKED, "pattern": SLIDING},
        "Use rows no longer than the window",
        Segments.from_lengths([2]),
        CHUNKED,
        "keep_2d",
    ),
    (FIVE, {**CHUNKED, "pattern": SLIDING}, "with the model's own pattern", FIVE, {**CHUNKED, **OWN}, "keep_2d"),
    (FIVE, WINDOWED, "rows no longer than the window", Segments.from_lengths([4]), WINDOWED, "none"),
]
"""The same for what a consumer reads: rows and settings, the words, rows and settings as they say, and the form."""

FLAT_ROWS = [
    ({"max_length": 4}, "max_length is 4", {"max_length": 8}, [0, 3, 8]),
    ({"padding": (4, 6)}, "or put fewer samples in a flat row", {"padding": (4, 8)}, [0, 3, 8]),
    ({"padding": "max_length", "max_length": 6}, "(or max_length)", {"padding": "max_length", "max_length": 8}, [0, 3, 8]),
]
"""The same for flat rows of 3 and 5 tokens: settings, the words, settings as they say, and the offsets."""

SQUARE, NEITHER = (2, 1, 5, 5), {"padding_side": "left", "attention_mask": "none"}
FLAT_4D = {"padding_free": True, "attention_mask": "4d"}
PADDED_ROWS = [
    ({"pad_token_id": None}, "or pass pad_token_id=", {}, (2, 5), None),
    (FLAT_4D, "Leave it at 'auto'", {"padding_free": True}, (1, 8), None),
    (FLAT_4D, "or set padding_free=False", {"attention_mask": "4d"}, (2, 5), SQUARE),
    (NEITHER, "Use 'auto'", {"padding_side": "left"}, (2, 5), SQUARE),
    (NEITHER, "or pad right", {"attention_mask": "none"}, (2, 5), None),
    ({"model": DENSE}, "Pass consumer=", {"model": DENSE, "consumer": "transformers"}, (2, 5), (2, 5)),
    ({"padding": (2, 4)}, "Raise the widths", {"padding": (2, 6)}, (2, 6), None),
]
"""The same for rows of 3 and 5 tokens that are padded, and the shapes of the ids and of the mask; None: there is none."""

UNEXPLAINED = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]])
UNMASKED = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]])
PADDED, SIX = Segments([[1, 1, 1, 0, 0]]), Segments.from_lengths([6])
ITSELF, FOUR = dense(Segments([[1, 1, 1, 2, 2]])), torch.ones(4, 4).tril()
AS_CAUSAL, KEPT = {"pattern": "causal"}, {"polarity": "keep"}
SOME_ROWS = torch.tensor([True, False, True, False, False])
LEFT_BATCH = batch_of(LEFT, attention_mask=LEFT.keep)
EVEN_BATCH = batch_of(EVEN, attention_mask_2d=EVEN.keep)
FLAT_BATCH = batch_of(FLAT, cu_seq_lens_q=FLAT.cu_seqlens)
MASKS = [
    (UNEXPLAINED, {}, "pass prove=False", UNEXPLAINED, {"prove": False, **KEPT}, [[1, 1, 2]]),
    (ITSELF, AS_CAUSAL, "Let the collator emit", ITSELF, {"keep": PADDED.keep, **AS_CAUSAL}, [[1, 1, 1, 0, 0]]),
    (FOUR, {}, "Pass [B, 1, S, S], or attention_mask_2d", FOUR[None, None], {}, [[1] * 4]),
    (UNMASKED, KEPT, "Pass unmasked_rows=True", UNMASKED, {"unmasked_rows": True, **KEPT}, [[1, 1, 0, 0]]),
    (ENCODER_HOLE, AS_CAUSAL, "Pass polarity='keep'", ENCODER_HOLE, {"pattern": "bidirectional", **KEPT}, [[1, 1, 0, 1]]),
]
"""The same for a mask alone: mask and settings, the words, mask and settings as they say, and the ids that are read."""
TWO_EQUAL = [{"input_ids": [1]}] * 2
UNLISTED = [{"input_ids": [1, 2], "x": [0.5, 1.0]}, {"input_ids": [1], "x": [2.0]}]
IMAGES = {"input_ids": [1, 2], "pixel_values": torch.ones(1, 4)}
AXES = IMAGES | {"position_ids": np.zeros((3, 2), int)}
MINE = packed([]) | {"mine": torch.ones(2, 4)}


def ones(*shape, **more):
    return {"input_ids": torch.ones(shape, dtype=torch.long), **more}


def wrapped(batch, features=FEATURES, **settings):
    return wrap_collator(lambda f: batch(f) if callable(batch) else dict(batch), **settings)(features)


PACKING = [(TWO_EQUAL, beside) for beside in ({"padding_free": True}, {"padding": False})]
"""Samples and settings that go together without packing alone."""

FOLLOWED = [
    *(
        (partial(collate, rows, packing=True, **beside), "Leave packing out.", partial(collate, rows, **beside))
        for rows, beside in PACKING
    ),
    # --- a mask alone
    (
        lambda: find(RIGHT, attention_mask=dense(RIGHT) | torch.eye(5, dtype=torch.bool)),
        "In derive_segments: if the attention is custom",
        lambda: (
            find(RIGHT, attention_mask=dense(RIGHT) | torch.eye(5, dtype=torch.bool), attention_mask_2d=RIGHT.keep) == RIGHT
        ),
    ),
    (
        lambda: collate(UNLISTED),
        "keys={**KEYS, 'x': TOKENS} (from collate_npu.keys), or SAMPLE",
        lambda: [list(collate(UNLISTED, keys={**KEYS, "x": kind})["x"][1]) for kind in (TOKENS, SAMPLE)] == [[2, 0], [2]],
    ),
    (
        lambda: collate([IMAGES], padding_free=True),
        "Set padding_free=False. With a get_rope_index, the model can make position_ids [3, L] of each sample",
        lambda: (
            "position_ids" not in collate([IMAGES]) and collate([AXES], padding_free=True)["position_ids"].shape == (3, 1, 2)
        ),
    ),
    (lambda: collate(max_length=2), "Truncate when tokenising", lambda: collate(ids([1, 2], [4]), max_length=2)),
    (
        lambda: wrapped(ones(1, 2, attention_mask=torch.tensor([[1, 0]])), ids([1, 1])),
        "Let it build the mask from lengths",
        lambda: wrapped(ones(1, 2, attention_mask=torch.tensor([[1, 1]])), ids([1, 1]))["attention_mask_2d"].all(),
    ),
    (
        lambda: wrapped(ones(2, 3), TWO_EQUAL),
        "Let the inner collator emit attention_mask",
        lambda: wrapped(ones(2, 3, attention_mask=torch.eye(3)[[0, 0]]), TWO_EQUAL)["attention_mask_2d"].sum() == 2,
    ),
    (
        lambda: collate(PREFERENCE),
        "Wrap the collator that makes rows of these columns: wrap_collator(",
        lambda: shape(wrapped(preference, PREFERENCE, consumer="transformers", model=HYBRID)) == (2, 3),
    ),
    (
        lambda: wrapped(second_rows(LEFT), consumer="transformers", model=DENSE),
        "Pad right; or do not wrap this collator",
        lambda: (
            "position_ids" not in wrapped(second_rows(RIGHT), consumer="transformers", model=DENSE)
            and torch.equal(watched_forward(LEFT_BATCH)["position_ids"], LEFT.position_ids)
        ),
    ),
    (
        lambda: wrapped(MINE, padding_free=True),
        "keys={**KEYS, 'mine': TOKENS} (from collate_npu.keys), or SAMPLE",
        lambda: wrapped(MINE, padding_free=True, keys={**KEYS, "mine": TOKENS})["mine"].shape == (1, 8),
    ),
    # --- consumers
    (lambda: flat(DENSE, "vllm"), "Name one of them", lambda: bare(flat(DENSE, "verl"))),
    (
        lambda: BatchAdapter(consumer="megatron"),
        "Pass model=, model_type= or needs_mask_2d=",
        lambda: BatchAdapter(consumer="megatron", needs_mask_2d=True),
    ),
    (lambda: needs_mask_2d(torch.nn.Linear(1, 1)), "Pass the config itself", lambda: needs_mask_2d(HYBRID)),
    # --- forms, ways back, parallel, kernels
    (
        lambda: dense(RIGHT, rows=SOME_ROWS),
        "pass rows.nonzero()[:, 0]",
        lambda: torch.equal(dense(RIGHT, rows=SOME_ROWS.nonzero()[:, 0]), dense(RIGHT)[:, :, [0, 2]]),
    ),
    (
        lambda: varlen(LEFT, keep_tail=True),
        "Pass keep_tail=False (tensors of unpad)",
        lambda: len(unpad(torch.ones(2, 5), LEFT)) == varlen(LEFT).cu_seqlens_host[-1],
    ),
    (
        lambda: last_token(torch.ones(2, 3), Segments.from_lengths([0, 3])),
        "Drop those rows",
        lambda: last_token(torch.arange(3)[None], Segments.from_lengths([3])).tolist() == [2],
    ),
    (
        lambda: BatchAdapter(HYBRID, consumer="mindspeed", context_parallel=SLICES)(EVEN_BATCH),
        "Use ContextParallel(layout='zigzag'); ms-swift: cp_partition_mode='zigzag', MindSpeed: context_parallel_algo=",
        lambda: BatchAdapter(HYBRID, consumer="mindspeed", context_parallel=CP)(EVEN_BATCH)["input_ids"].shape == (2, 4),
    ),
    (
        lambda: BatchAdapter(HYBRID, consumer="mindspeed_llm", context_parallel=SLICES),
        "Give each rank rows of its own, or use Megatron's context parallelism",
        lambda: (
            BatchAdapter(HYBRID, consumer="mindspeed_llm")(EVEN_BATCH)
            and BatchAdapter(HYBRID, consumer="megatron", context_parallel=CP)(EVEN_BATCH)
        ),
    ),
    (
        lambda: check_recurrent_split(CP, "head_exchange_zigzag", EVEN, heads=(3, 6)),
        "Use a context parallel size that divides both numbers",
        lambda: check_recurrent_split(ContextParallel(3, 0), "head_exchange_zigzag", SIX, heads=(3, 6)) is None,
    ),
    (
        lambda: split_batch(FLAT_BATCH, CP),
        "Use cp.for_documents()",
        lambda: split_batch(pad_documents(FLAT_BATCH, DOCUMENTS)[0], DOCUMENTS)["input_ids"].shape == (1, 6),
    ),
    (
        lambda: split_batch(EVEN_BATCH | {"x": torch.zeros(3, 8)}, CP),
        "Split it with split_tensor(x, cp, dim=...), or pass BatchAdapter(keys={**KEYS, 'x': SAMPLE})",
        lambda: (
            split_tensor(torch.zeros(3, 8), CP).shape == (3, 4)
            and BatchAdapter(HYBRID, consumer="megatron", context_parallel=CP, keys={**KEYS, "x": SAMPLE})(
                EVEN_BATCH | {"x": torch.zeros(3, 8)}
            )["x"].shape
            == (3, 8)
        ),
    ),
    (
        lambda: gated_delta_kwargs(FLAT, kernel="fla", padding=[0, 2, 8]),
        "Pass cu_seqlens_padded of this very batch, or 'own'",
        lambda: offsets(APART, padding=torch.tensor([0, 4, 10, 12])) == [0, 4, 10, 12],
    ),
]


def bare(batch):
    return batch["attention_mask"] is None


def shape(batch):
    return tuple(batch["attention_mask"].shape)


def offsets(segments, **told):
    return gated_delta_kwargs(segments, kernel="fla", **told)["cu_seqlens"].tolist()
