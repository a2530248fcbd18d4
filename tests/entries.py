"""Every public entry, asked of the package: its functions and classes, and right values for what each of them must get.

A new entry is tested as soon as its face lists it; where it takes an argument of a new name, `RIGHT` needs a value for it.
"""

import inspect
import re

import torch

import collate_npu
from collate_npu import BatchAdapter, ContextParallel, PaddingCollator, Segments, collate, kernels, masks, outputs, parallel
from collate_npu.keys import KEYS, TOKENS

ROWS, FLAT, ONE_ROW = Segments.from_lengths([4, 2]), Segments.from_lengths([[2, 3]]), Segments([[1, 1, 2, 0]])
IDS, ALONE, CP = torch.tensor([[1, 2, 3, 7], [4, 5, 0, 0]]), ContextParallel(1, 0), ContextParallel(2, 1)
BATCH = {"input_ids": IDS, "attention_mask_2d": ROWS.keep, "labels": IDS.masked_fill(~ROWS.keep, -100)}
FLAT_BATCH = {"input_ids": torch.ones(1, 5, dtype=torch.int64), "cu_seq_lens_q": torch.tensor([0, 2, 5])}
FEATURES = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}, {"input_ids": [4, 5], "labels": [4, 5]}]
ADAPTER = BatchAdapter(needs_mask_2d=True, consumer="megatron")
READERS = (ADAPTER, BatchAdapter(needs_mask_2d=False, consumer="transformers"))
COLLATORS = (
    PaddingCollator(pad_token_id=7, padding_side="left"),  # to which weights are some key
    PaddingCollator(keys={**KEYS, "weights": TOKENS}, padding_free=True),
)

# --- functions and classes

FACES = (collate_npu, collate, kernels, masks, outputs, parallel)
RIGHT = {
    "segments": ROWS, "batch": BATCH, "cp": CP, "features": FEATURES, "dataset": FEATURES, "batches": [{"labels": [[1, 2]]}],
    **dict.fromkeys(("x", "labels", "output"), IDS), "y": torch.ones(6), "hidden": torch.ones(2, 4, 3),
    "attention_mask": masks.dense(ROWS), "keep": ROWS.keep, "ids": ROWS.ids, "position_ids": ROWS.position_ids,
    "cu_seqlens": [0, 3], "lengths": [1, 2], "width": 4, "max_tokens": 3, "size": 2, "rank": 0, "window": 2,
    "pattern": "causal", "kernel": "fla", "inner": lambda rows: {},
}  # fmt: skip
"""By the name of an argument."""
OTHERS = {
    "BatchAdapter": {"needs_mask_2d": True, "consumer": "megatron"}, "PaddingCollator": {"pad_token_id": 0},
    "pad_documents": {"batch": FLAT_BATCH}, "cu_seqlens_of": {"batch": FLAT_BATCH}, "varlen": {"segments": FLAT},
    "gather_sequence": {"cp": ALONE}, "check_recurrent_split": {"cp": ALONE}, "choose_form": {"segments": FLAT},
    "flat_offsets": {"segments": FLAT}, "gated_delta_kwargs": {"segments": ONE_ROW},
}  # fmt: skip
"""What one entry must get in place of it, or beside."""
ELSEWHERE = re.compile(r"model|group|mesh|settings|reach|name|ok|args")
"""What no value here is right for: a model (test_refusals), a group of ranks, a record that the package makes."""
OF_RANKS = {"data_group", "gloo_group", "ranks_agree"}


def callables():
    """What each face lists, the constructors and factories of its classes, and the calls of an adapter and a collator."""
    for face in FACES:
        own = [name for name, held in vars(face).items() if getattr(held, "__module__", "") == face.__name__]
        for name in getattr(face, "__all__", None) or [name for name in own if name[0] != "_"]:
            held = getattr(face, name)
            factories = [each for each, of in vars(held).items() if isinstance(of, (classmethod, staticmethod))]
            yield name, held
            yield from ((f"{name}.{each}", getattr(held, each)) for each in factories if each[0] != "_")
    for each in ("__call__", "with_segments", "write", "choose"):
        yield f"BatchAdapter.{each}", getattr(ADAPTER, each)
    yield "PaddingCollator.__call__", COLLATORS[0].__call__


def signatures():
    """Each entry, its parameters, and a right call of it."""
    for name, function in dict(callables()).items():
        if inspect.isclass(function) and issubclass(function, (Exception, collate_npu.Pattern)):
            continue  # an error, and the base of patterns, which Pattern.of and the factories make
        try:
            taken = inspect.signature(function).parameters
        except ValueError:  # a name of types
            continue
        must = [each.name for each in taken.values() if each.default is each.empty]
        if name not in OF_RANKS and not any(ELSEWHERE.fullmatch(each) for each in must[:1]):
            yield name, function, taken, {**{each: RIGHT[each] for each in must}, **OTHERS.get(name, {})}


SIGNATURES = {name: found for name, *found in signatures()}
OF_OURS = re.compile(
    r"Tensor'?$|Segments|ContextParallel|device|dtype|Key\]|Sampler|group|str \| None|ConsumerName|bool \| None"
)
"""Annotations of objects that are ours or torch's: something else in their place is Python's own `TypeError`."""
PYTHONS = {"dim", "fill", "inner", "compiled"}
"""Options of that kind without such an annotation, and one that starts a compiler."""
DATA = {"attention_mask", "keep", "batch", "lengths", "cu_seqlens", "ids", "position_ids", "dataset", "batches", "features"}
"""Arguments that hold what a data set or another stack sends."""


def calls(names):
    """Calls of one value: it stands in the place of an argument that `names` takes by its name and annotation."""
    return {
        f"{name} {each}": lambda x, function=function, right=right, each=each: function(**{**right, each: x})
        for name, (function, taken, right) in SIGNATURES.items()
        for each, parameter in taken.items()
        if names(each, str(parameter.annotation))
    }


ENTRIES = calls(lambda name, kind: name in DATA or name in ("padding", "offsets"))
OPTIONS = calls(lambda name, kind: name not in DATA and not OF_OURS.search(kind) and name not in PYTHONS)

# --- keys of batches and samples

HELD = (*KEYS, "weights", "mine")
PLACES = {  # where a key of HELD stands
    "of each sample": lambda held: [collator([{**feature, **held} for feature in FEATURES]) for collator in COLLATORS],
    "of a sample": lambda held: COLLATORS[0]([FEATURES[0], {**FEATURES[1], **held}]),
    "of a batch": lambda held: [adapter({**BATCH, **held}) for adapter in READERS],
    "of a flat batch": lambda held: [adapter({**FLAT_BATCH, **held}) for adapter in READERS],
    "beside Segments": lambda held: [adapter.write({**BATCH, **held}, ROWS) for adapter in READERS],
    "of an inner batch": lambda held: collate_npu.wrap_collator(lambda f: {**BATCH, **held})(FEATURES),
    "of an inner batch, flattened": lambda held: collate_npu.wrap_collator(lambda f: {**BATCH, **held}, padding_free=True)(
        FEATURES
    ),
    "of a flat inner batch": lambda held: collate_npu.wrap_collator(lambda f: {**FLAT_BATCH, **held})(FEATURES),
    "split": lambda held: collate_npu.split_batch({**BATCH, **held}, CP),
    "described": lambda held: collate_npu.describe({**BATCH, **held}),
    "of a flat batch, described": lambda held: collate_npu.describe({**FLAT_BATCH, **held}),
    "of a flat batch, padded": lambda held: parallel.pad_documents({**FLAT_BATCH, **held}, multiple=4)[0],
}
READ = {
    "of each sample": ("input_ids", "attention_mask", "seq_lengths"),
    "of a batch": ("attention_mask", "attention_mask_2d", "segment_ids", "cu_seq_lens_q"),
}
"""Keys that are read as arrays of numbers."""
