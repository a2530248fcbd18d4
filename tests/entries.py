"""Every public entry, what a right call of it gets, and what may stand in the place of its data."""

import torch

import collate_npu
from collate_npu import ContextParallel, PaddingCollator, Pattern, Segments, derive_segments, describe, wrap_collator
from collate_npu.collate import BalancedBatchSampler, lengths_of, loss_weights
from collate_npu.kernels import fusion_attention, gated_delta
from collate_npu.keys import KEYS, TOKENS
from collate_npu.masks import block_mask, dense, mask_mod, none_is_exact, segments_from_batch, varlen
from collate_npu.parallel import check_recurrent_split, gather_sequence, pad_documents, query_rows, split_tensor

ROWS, FLAT, ONE_ROW = Segments.from_lengths([4, 2]), Segments.from_lengths([[2, 3]]), Segments([[1, 1, 2, 0]])
IDS, ALONE, CP = torch.tensor([[1, 2, 3, 7], [4, 5, 0, 0]]), ContextParallel(1, 0), ContextParallel(2, 1)
BATCH = {"input_ids": IDS, "attention_mask_2d": ROWS.keep, "labels": IDS.masked_fill(~ROWS.keep, -100)}
FLAT_BATCH = {"input_ids": torch.ones(1, 5, dtype=torch.int64), "cu_seq_lens_q": torch.tensor([0, 2, 5])}
FEATURES = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]
ADAPTER = collate_npu.BatchAdapter(needs_mask_2d=True, consumer="megatron")
READERS = (ADAPTER, collate_npu.BatchAdapter(needs_mask_2d=False, consumer="transformers"))
COLLATORS = (
    PaddingCollator(pad_token_id=7, padding_side="left"),  # to which weights are some key
    PaddingCollator(keys={**KEYS, "weights": TOKENS}, padding_free=True),
)
CALLS = {
    fusion_attention.choose_form: {"segments": FLAT},
    fusion_attention.fusion_attention_kwargs: {"segments": ROWS},
    fusion_attention.triangle: {},
    fusion_attention.prefix_triangle: {},
    gated_delta.gated_delta_kwargs: {"segments": ONE_ROW, "kernel": "fla"},
    gated_delta.flat_offsets: {"segments": FLAT},
    gated_delta.zero_padding: {"hidden": torch.ones(2, 4, 3), "segments": ROWS},
    collate_npu.outputs.unpad: {"x": IDS, "segments": ROWS},
    collate_npu.outputs.repad: {"y": torch.ones(6), "segments": ROWS, "fill": 0},
    collate_npu.outputs.last_token: {"x": IDS, "segments": ROWS},
    collate_npu.outputs.per_sequence: {"x": IDS, "segments": ROWS},
    collate_npu.outputs.to_nested: {"x": IDS, "segments": ROWS},
    collate_npu.outputs.shift_labels: {"labels": IDS, "segments": ROWS, "steps": 1, "ignore_index": -100},
    collate_npu.outputs.ignore_first_labels: {"labels": IDS, "segments": ROWS, "ignore_index": -100},
    dense: {"segments": ROWS, "polarity": "keep", "pattern": "causal", "rows": [0],
            "dtype": None, "device": "cpu"},
    block_mask: {"segments": ROWS, "pattern": "causal", "block_size": 128, "device": "cpu"},
    mask_mod: {"segments": ROWS, "pattern": "causal", "device": "cpu"},
    none_is_exact: {"segments": ROWS},
    varlen: {"segments": FLAT, "keep_tail": False},
    derive_segments: {"attention_mask": dense(ROWS), "polarity": "keep", "prove": True, "keep": ROWS.keep},
    segments_from_batch: {"batch": BATCH, "padding_free": False},
    collate_npu.split_batch: {"batch": {"input_ids": IDS}, "cp": CP, "segments": ROWS},
    split_tensor: {"x": IDS, "cp": CP, "dim": 1},
    gather_sequence: {"output": IDS, "cp": ALONE, "segments": ROWS, "dim": 1, "loss": "same"},
    pad_documents: {"batch": FLAT_BATCH, "cp": ALONE, "multiple": 4, "max_sequences": 4, "segments": FLAT,
                    "pad_token_id": 0, "keys": KEYS},
    query_rows: {"width": 4, "cp": CP},
    check_recurrent_split: {"cp": ALONE, "segments": ROWS, "padding_free": False},
    ContextParallel: {"size": 2, "rank": 0, "layout": "zigzag", "tensor_parallel": 1},
    ADAPTER.__call__: {"batch": BATCH},
    ADAPTER.write: {"batch": {"input_ids": IDS}, "segments": ROWS, "padding_free": False},
    collate_npu.BatchAdapter: {"needs_mask_2d": True, "consumer": "megatron", "padding_free": False, "labels_shifted": None,
                   "pattern": None, "polarity": None, "context_parallel": None, "model_type": None, "keys": KEYS},
    PaddingCollator: {"pad_token_id": 0, "padding": True, "padding_free": False, "label_pad_token_id": -100,
                      "padding_side": "left", "max_length": 8, "pattern": "causal", "pad_to_multiple_of": 2,
                      "attention_mask": "auto", "packing": False, "labels_shifted": False, "keys": KEYS},
    wrap_collator: {"inner": lambda rows: {}, "padding_free": False, "polarity": None},
    Segments.from_lengths: {"lengths": [1], "width": 3},
    Segments.from_cu_seqlens: {"cu_seqlens": [0, 3], "width": 3},
    Segments.from_keep: {"keep": ROWS.keep},
    Segments.from_ids: {"ids": ROWS.ids},
    Segments.from_position_ids: {"position_ids": ROWS.position_ids},
    Segments: {"ids": ROWS.ids},
    Pattern.sliding: {"window": 2},
    Pattern.chunked: {"size": 2},
    Pattern.prefix: {"lengths": 2},
    BalancedBatchSampler: {"lengths": [1, 2], "max_tokens": 3, "pack": True, "shuffle": False, "drop_last": False},
    lengths_of: {"dataset": [{"input_ids": [1]}]},
    loss_weights: {"batches": [{"labels": [[1, 2]]}]},
}  # fmt: skip
DATA = {"attention_mask", "keep", "batch", "lengths", "cu_seqlens", "ids", "position_ids", "dataset", "batches"}
"""Arguments that hold what a data set or another stack sends."""
HELD = (*KEYS, "weights", "mine")
PLACES = {  # where a key of HELD stands
    "of each sample": lambda held: [collator([{**feature, **held} for feature in FEATURES]) for collator in COLLATORS],
    "of a sample": lambda held: COLLATORS[0]([FEATURES[0], {**FEATURES[1], **held}]),
    "of a batch": lambda held: [adapter({**BATCH, **held}) for adapter in READERS],
    "of a flat batch": lambda held: [adapter({**FLAT_BATCH, **held}) for adapter in READERS],
    "beside Segments": lambda held: [adapter.write({**BATCH, **held}, ROWS) for adapter in READERS],
    "of an inner batch": lambda held: wrap_collator(lambda features: {**BATCH, **held})(FEATURES),
    "of an inner batch, flattened": lambda held: wrap_collator(lambda f: {**BATCH, **held}, padding_free=True)(FEATURES),
    "of a flat inner batch": lambda held: wrap_collator(lambda features: {**FLAT_BATCH, **held})(FEATURES),
    "split": lambda held: collate_npu.split_batch({**BATCH, **held}, CP),
    "described": lambda held: describe({**BATCH, **held}),
    "of a flat batch, described": lambda held: describe({**FLAT_BATCH, **held}),
    "of a flat batch, padded": lambda held: pad_documents({**FLAT_BATCH, **held}, multiple=4)[0],
}
BESIDE = {f"{key} {place}": lambda x, key=key, call=call: call({key: x}) for place, call in PLACES.items() for key in HELD}
ENTRIES = {
    "ids described": lambda x: describe({"input_ids": x}),
    "features": COLLATORS[0],
    "a sample": lambda x: COLLATORS[0]([FEATURES[0], x]),
    "an inner batch": lambda x: wrap_collator(lambda features: x)(FEATURES),
    "an inner mask": lambda x: wrap_collator(lambda f: {"input_ids": IDS, "attention_mask": x})([]),
    "physical offsets": lambda x: gated_delta.gated_delta_kwargs(ONE_ROW, kernel="fla", padding=x),
    "documents": lambda x: split_tensor(IDS[:1], ContextParallel(2, 0, layout="document_zigzag"), cu_seqlens=x),
    **{
        f"a text {where}": lambda x, call=call: call(x) if isinstance(x, str) else None
        for where, call in {
            "for a key, described": lambda text: describe({**BATCH, text: 1}),
            "for a key, split": lambda text: collate_npu.split_batch({**BATCH, text: torch.ones(3, 4)}, CP),
            "for a key of a sample": lambda text: COLLATORS[0]([{**FEATURES[0], text: [1]}]),
            "for a key of an inner batch": lambda text: wrap_collator(lambda features: {text: 1})(FEATURES),
        }.items()
    },
    **{
        f"{function.__qualname__} {name}": lambda x, function=function, name=name: function(**{**CALLS[function], name: x})
        for function, right in CALLS.items()
        for name in (sorted(right.keys() & DATA) if function is not PaddingCollator else ())
    },
}
ARRAYS = {"features", "a sample", "an inner batch", "an inner mask", "a shard", "physical offsets"}
ARRAYS |= {"derive_segments attention_mask", "derive_segments keep", "BatchAdapter.__call__ batch", "split_batch batch"}
ARRAYS |= {f"Segments.from_{way}" for way in ("keep keep", "ids ids", "cu_seqlens cu_seqlens", "position_ids position_ids")}
ARRAYS |= {"Segments ids"}
ARRAYS |= {f"{key} of each sample" for key in ("input_ids", "attention_mask", "seq_lengths")}
ARRAYS |= {f"{key} of a batch" for key in ("attention_mask", "attention_mask_2d", "segment_ids", "cu_seq_lens_q")}
"""Where arrays are read."""
