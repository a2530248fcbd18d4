"""Wrong types, shapes, dtypes and values at every public entry: a `CollateError` or a result, never anything else.

Some have to be refused wherever arrays are read, and of what is read there nothing that comes out is NaN.
"""

from functools import partial

import numpy as np
import torch
from fuzz.compared import leaves
from fuzz.drawn import Drawn

from collate_npu import (
    BatchAdapter,
    CollateError,
    ContextParallel,
    PaddingCollator,
    Pattern,
    Segments,
    derive_segments,
    last_token,
    repad,
    split_batch,
    unpad,
    wrap_collator,
)
from collate_npu.kernels.fusion_attention import fusion_attention_kwargs
from collate_npu.kernels.gated_delta import gated_delta_kwargs
from collate_npu.masks import dense
from collate_npu.outputs import ignore_first_labels, per_sequence, shift_labels, to_nested
from collate_npu.parallel import join_shards, split_tensor

IDS = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]])
KEEP, SEGMENTS, CP, ROW = IDS != 0, Segments.from_keep(IDS != 0), ContextParallel(2, 1), Segments([[1, 1, 2, 0]])
FEATURES = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]
BATCH = {"input_ids": IDS, "attention_mask_2d": KEEP, "labels": IDS.masked_fill(~KEEP, -100)}
COLLATORS = (PaddingCollator(pad_token_id=7, padding_side="left"), PaddingCollator(padding_free=True))
ADAPTERS = (
    BatchAdapter(needs_mask_2d=True, consumer="megatron"),
    BatchAdapter(needs_mask_2d=False, consumer="transformers"),
)

NEVER = (
    object(), "x", b"x", {1, 2}, len, type, 1j, ["a", "b"], [[1], 2], [None, 1], (x for x in (1, 2)), np.array(["a", "b"]),
    np.array([None, 1]), np.array([1j, 2]), torch.tensor([1j, 2]), np.array(["2020-01-01"], "datetime64[D]"), [{}, []],
    torch.ones(2, 4, device="meta"), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
)  # fmt: skip
"""No mask, ids or offsets."""
ODD = (
    None, True, 3, -1, 0, 2.5, float("nan"), float("inf"), 1 << 70, 1 << 60, -(1 << 63), [], [[]], {}, (), [1, 2], range(3),
    [[1, 2, 3, 4]], [[1, 0, 1, 0], [0, 0, 0, 0]], [[2, 1, 2, 0], [1, 1, 1, 1]], [[1, 2], [3]], {"input_ids": [1]},
    np.zeros((0, 4)), np.float32(2), np.int8(-3), np.array(3), np.arange(8).reshape(2, 4)[:, ::-1], np.array([1, 2], ">i4"),
    np.full((2, 4), 2**64 - 1, np.uint64), np.array([(1, 2)], [("a", int), ("b", int)]), np.ma.masked_array([1, 2], [0, 1]),
    np.array([[True], [False]]), torch.tensor(2), torch.tensor(torch.nan), torch.full((2, 4), 0.5), torch.empty(0),
    *(torch.full(shape, value) for shape in ((2, 4), (2, 1, 4, 4)) for value in (torch.nan, torch.inf, -torch.inf)),
    *(torch.ones(shape) for shape in ((5, 4), (2, 1, 4, 4), (2, 1, 3, 4), (2, 4, 4, 4, 4))), torch.ones(2, 4).to_sparse(),
    KEEP & False, -torch.ones(2, 4).char(), torch.ones(4, 2).T, torch.ones(2, 4, requires_grad=True),
    torch.arange(9)[::2], torch.Size((2, 4)), memoryview(b"ab"), [torch.tensor(1), torch.ones(2)], IDS.to(torch.float8_e5m2),
    [FEATURES],
)  # fmt: skip


def slots(where, call, *names):
    return {f"{where} {name}": partial(call, name) for name in names}


def sample(key, x):
    return [collator([{**feature, key: x} for feature in FEATURES]) for collator in COLLATORS]


def batch(key, x):
    return [adapter({**BATCH, key: x}) for adapter in ADAPTERS]


def setting(name, x):
    return PaddingCollator(**{"pad_token_id": 7, name: x})


def adapter_setting(name, x):
    return BatchAdapter(**{"needs_mask_2d": True, "consumer": "megatron", name: x})


ARRAYS = {
    **slots("sample", sample, "input_ids", "attention_mask", "seq_lengths"),
    **slots("batch", batch, "attention_mask", "attention_mask_2d", "segment_ids", "cu_seq_lens_q"),
    **slots(
        "Segments",
        lambda name, x: getattr(Segments, name)(x),
        "from_keep",
        "from_ids",
        "from_cu_seqlens",
        "from_position_ids",
    ),
    "features": COLLATORS[0],
    "a sample": lambda x: COLLATORS[0]([FEATURES[0], x]),
    "wrap_collator": lambda x: wrap_collator(lambda features: x)(FEATURES),
    "derive": derive_segments,
    "derive keep": lambda x: derive_segments(dense(SEGMENTS), keep=x),
    "adapter": ADAPTERS[0],
    "split batch": lambda x: split_batch(x, CP),
    "join": lambda x: join_shards([split_tensor(IDS, CP), x], CP),
    "Segments": Segments,
    "physical offsets": lambda x: gated_delta_kwargs(ROW, kernel="fla", padding=x),
}
"""Where arrays are read."""
WAYS = {way.__name__: way for way in (unpad, repad, last_token, per_sequence, to_nested, shift_labels, ignore_first_labels)}
OTHERS = {
    **slots("sample", sample, "labels", "position_ids", "loss_scale"),
    **slots("batch", batch, "input_ids", "labels", "position_ids", "loss_mask", "max_length_q", "seq_lens"),
    **slots("split", lambda key, x: split_batch({**BATCH, key: x}, CP), "mine", "attention_mask", "labels", "cu_seqlens"),
    **slots("way", lambda name, x: WAYS[name](x, SEGMENTS), *WAYS),
    **slots(
        "collator", setting, "pad_token_id", "padding_side", "max_length", "padding", "pattern", "consumer", "attention_mask"
    ),
    **slots(
        "adapter", adapter_setting, "consumer", "pattern", "polarity", "needs_mask_2d", "context_parallel", "model_type"
    ),
    **slots("place", lambda name, x: ContextParallel(**{"size": 2, "rank": 0, name: x}), "size", "rank", "layout", "block"),
    **slots("derive", lambda name, x: derive_segments(dense(SEGMENTS), **{name: x}), "polarity", "batch_size", "pattern"),
    **slots("dense", lambda name, x: dense(SEGMENTS, **{name: x}), "pattern", "rows", "polarity", "max_mask_bytes"),
    **slots("recurrent", lambda name, x: gated_delta_kwargs(ROW, **{"kernel": "fla", name: x}), "kernel", "max_sequences"),
    **slots("attention", lambda name, x: fusion_attention_kwargs(ROW, **{name: x}), "layout", "pattern", "max_mask_bytes"),
    "from_lengths": Segments.from_lengths,
    "sliding": Pattern.sliding,
    "prefix": Pattern.prefix,
    "steps": lambda x: shift_labels(IDS, SEGMENTS, steps=x),
    "shift": shift_labels,
    "fill": lambda x: repad(IDS[KEEP], SEGMENTS, fill=x),
    "split tensor": lambda x: split_tensor(x, CP),
    "cu_seqlens": lambda x: split_tensor(IDS, ContextParallel(2, 0, layout="document_zigzag"), cu_seqlens=x),
}
"""Where settings are read, or values that are the caller's own."""
SLOTS = [*ARRAYS.items(), *OTHERS.items()]


def bad_input(drawn: Drawn) -> None:
    name, call = drawn.pick(SLOTS)
    never, read = drawn.chance(), name in ARRAYS
    given = drawn.pick(NEVER if never else ODD)
    try:
        made = call(given)
    except CollateError:
        return
    except Exception as error:
        raise AssertionError(f"{name}: {type(error).__name__} of {given!r:.200}") from error
    assert not (never and read), f"{name} takes {given!r:.200}: {made!r:.200}"
    assert not read or not any(np.isnan(x).any() for x in leaves(made) if x.dtype.kind == "f"), f"{name}: NaN"
