"""Offsets at every entry that takes them: the right tokens, or words that name the key, what arrived, the rule and what to
pass; and every function that takes a batch beside Segments or offsets refuses what says otherwise."""

from functools import partial
from itertools import accumulate, pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st
from laws.validating import in_words

from collate_npu import BatchAdapter, CollateError, ContextParallel, Segments, gather_sequence, split_batch
from collate_npu.kernels.gated_delta import flat_offsets, gated_delta_kwargs
from collate_npu.keys import KEYS
from collate_npu.masks import segments_from_batch
from collate_npu.outputs import per_sequence
from collate_npu.parallel import check_recurrent_split, cu_seqlens_of, pad_documents, query_rows, split_tensor

S = 16
IDS = torch.arange(1, S + 1)[None]
CP, ALONE = ContextParallel(2, 0, layout="document_zigzag"), ContextParallel(1, 0, layout="document_zigzag")
SLICES, ADAPTER = ContextParallel(2, 0, layout="contiguous"), BatchAdapter(needs_mask_2d=False, consumer="megatron")
ONE = Segments.from_lengths([S])
OFFSETS = [key for key, rule in KEYS.items() if rule.role in ("offsets", "padded_offsets")]
OBJECTS = {"packed_seq_params": SimpleNamespace, "flash_attn_kwargs": dict}


def batch(key, given, **more):
    made = OBJECTS[key](cu_seqlens_q=given) if key in OBJECTS else given
    return {"input_ids": IDS, "labels": IDS, key: made, **more}


def sequences(x, segments):
    return [part.tolist() for part in per_sequence(x, segments)]


def documents(offsets):
    return [IDS[0, a:b].tolist() for a, b in pairwise(offsets) if a < b]


def outer_quarters(offsets):
    return [n for part in documents(offsets) for n in (*part[: len(part) // 4], *part[-(len(part) // 4) :])]


def padded(key, given, **more):
    out, segments = pad_documents(batch(key, given, **more), multiple=8)
    again, twice = pad_documents(out, multiple=8)
    assert segments_from_batch(out) == segments == twice
    assert all(again[name].tolist() == out[name].tolist() for name in ("input_ids", "labels", "cu_seqlens_padded"))
    return sequences(out["labels"], segments)


def halves(held, **settings):
    return split_batch(held, CP, **settings)["labels"][0].tolist()


UNCUT = {
    "flat_offsets": lambda given: flat_offsets(ONE, padding=given)[1:],
    "gated_delta_kwargs": lambda given: tuple(
        gated_delta_kwargs(ONE, kernel="fla", padding=given)["cu_seqlens"].tolist()[1:]
    ),
    "check_recurrent_split": lambda given: (
        check_recurrent_split(ContextParallel(2, 0), ONE, padding_free=True, offsets=given) or (S,)
    ),
}
"""Beside the Segments of one sequence: no offset may stand inside it."""
ENDS_EARLY = {
    "from_cu_seqlens": (lambda given: sequences(IDS, Segments.from_cu_seqlens(given, width=S)), documents),
    "cu_seqlens_of": (lambda given: cu_seqlens_of(batch("cu_seqlens", given)).tolist(), list),
}
"""Offsets need not reach the end of the row: what is behind them is padding, or they are of no row at all."""
WHOLE = {
    **{f"pad_documents, {key}": (partial(padded, key), documents) for key in OFFSETS},
    "pad_documents, several keys": (
        lambda given: padded("cu_seq_lens_q", given, cu_seqlens_q=given, cu_seqlens_kv=given, max_length_q=S), documents
    ),
    **{
        f"the door, {key}": (lambda given, key=key: sequences(IDS, segments_from_batch(batch(key, given))), documents)
        for key in (*OFFSETS, *OBJECTS)
    },
    **{
        f"split_batch, {key}": (lambda given, key=key: halves(batch(key, given)), outer_quarters)
        for key in (*OFFSETS, *OBJECTS)
    },
    "split_batch": (lambda given: halves({"labels": IDS}, cu_seqlens=given), outer_quarters),
    "split_tensor": (lambda given: split_tensor(IDS, CP, cu_seqlens=given)[0].tolist(), outer_quarters),
    "query_rows": (lambda given: (query_rows(S, CP, given) + 1).tolist(), outer_quarters),
    "gather_sequence": (lambda given: gather_sequence(IDS, ALONE, cu_seqlens=given).tolist(), lambda _: IDS.tolist()),
    "the adapter": (lambda given: ADAPTER.with_segments(batch("cu_seqlens", given))[1].cu_seqlens.tolist()[1:-1],
                    lambda offsets: [a for a, b in pairwise(offsets) if 0 < a < b]),
}  # fmt: skip
ENTRIES = ENDS_EARLY | WHOLE
ENTRIES |= {name: (call, lambda offsets: tuple(sorted({*offsets} - {0}))) for name, call in UNCUT.items()}

CUTS = [list(lengths) for n in range(1, 5) for lengths in product(range(0, S + 1, 4), repeat=n) if sum(lengths) == S]
PARTED = st.sampled_from([lengths for lengths in CUTS if all(lengths)])
RIGHT = st.sampled_from([[0, *accumulate(lengths)] for lengths in CUTS])
ODD = st.one_of(
    RIGHT.map(lambda offsets: offsets[:-1]),
    st.lists(st.one_of(st.integers(-2, 10), st.sampled_from([2.5, float("nan"), float("inf"), 2.0**40, 2**62])), max_size=4),
    RIGHT.map(lambda offsets: [*offsets[:-1], offsets[-1] + 2]),
    RIGHT.map(lambda offsets: offsets[1:]),
    RIGHT.flatmap(st.permutations),
    st.lists(st.booleans(), max_size=3),
)
FORMS = {
    "list": list,
    "tuple": tuple,
    "array": np.array,
    "tensor": torch.tensor,
    "int32": lambda offsets: torch.tensor(offsets, dtype=torch.int32),
    "uint8": lambda offsets: torch.tensor(offsets, dtype=torch.uint8),
    "unsigned": lambda offsets: np.array(offsets, np.uint8),
    "a row": lambda offsets: torch.tensor([offsets]),
    "two rows": lambda offsets: np.array([offsets, offsets]),
    "masked": lambda offsets: np.ma.masked_array(offsets, [False] * len(offsets)),
    "bfloat16": lambda offsets: torch.tensor(offsets, dtype=torch.bfloat16),  # 351 would be 352 in it
    "float16": lambda offsets: [*np.array(offsets, np.float16)],
}
REFUSED = ("two rows", "masked", "bfloat16", "float16")


def legal(name, offsets, form):
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in offsets) and form not in REFUSED
    rising = whole and offsets[:1] == [0] and offsets == sorted(offsets)
    if not rising or offsets[-1] > S or (offsets[-1] < S and name not in ENDS_EARLY):
        return False
    uncut = {*offsets} == {0, S} if name == "check_recurrent_split" else offsets[:2] == [0, S]
    return len(offsets) > 1 and (name not in UNCUT or uncut)


@pytest.mark.parametrize("name", ENTRIES)
@given(RIGHT | ODD, st.sampled_from(sorted(FORMS)))
@example([0, float("inf")], "list")
@example([False, True], "tensor")
@example([0, S], "bfloat16")
@example([0, S], "float16")
def test_the_right_tokens_or_words(name, offsets, form):
    call, wanted = ENTRIES[name]
    try:
        given_as = FORMS[form](offsets)
    except (ValueError, TypeError, RuntimeError, OverflowError):
        return  # this container holds no such number
    if legal(name, offsets, form) and not any(n % 4 for n in offsets):
        assert call(given_as) == wanted(offsets)
        return
    if (found := in_words(lambda: call(given_as))) is None:
        return
    held = np.asarray(given_as)
    read = held.reshape(-1).astype(int).tolist()
    assert held.dtype != bool
    assert (held.reshape(-1) == read).all()
    assert form not in REFUSED
    assert legal(name, read, form) or (name in ENDS_EARLY and read[0] == 0 and read == sorted(read))
    assert name in ENDS_EARLY or found == wanted(read)


# --- a batch beside what its caller says of it


def numbered(lengths):
    return {"input_ids": IDS, "segment_ids": Segments.from_lengths([lengths]).ids}


BARE = {"input_ids": IDS}
BESIDE = {
    "segments and a key, split": lambda a, b: split_batch(batch("cu_seqlens", [0, *accumulate(b)]), CP, segments=a),
    "segments and offsets, split": lambda a, b: split_batch(BARE, CP, segments=a, cu_seqlens=[0, *accumulate(b)]),
    "segments and ids, split": lambda a, b: split_batch(numbered(b), SLICES, segments=a),
    "offsets and a key, split": lambda a, b: split_batch(
        batch("cu_seqlens", [0, *accumulate(b)]), CP, cu_seqlens=a.cu_seqlens.tolist()
    ),
    "two keys, split": lambda a, b: split_batch(batch("cu_seqlens", [0, *accumulate(b)], cu_seq_lens_q=a.cu_seqlens), CP),
    "segments and offsets, gathered": lambda a, b: gather_sequence(IDS, ALONE, a, cu_seqlens=[0, *accumulate(b)]),
    "segments and a key, padded": lambda a, b: pad_documents(batch("cu_seqlens", [0, *accumulate(b)]), segments=a),
    "ids and a key, padded": lambda a, b: pad_documents(batch("cu_seqlens", [0, *accumulate(b)], segment_ids=a.ids)),
    "segments and ids, written": lambda a, b: ADAPTER.write(numbered(b), a),
    "lengths and a key, the door": lambda a, b: segments_from_batch(batch("cu_seqlens", a.cu_seqlens, seq_lens=b)),
    "a number of the longest": lambda a, b: segments_from_batch(batch("cu_seqlens", a.cu_seqlens, max_length_q=max(b))),
}


@pytest.mark.parametrize("name", BESIDE)
@given(PARTED, PARTED)
def test_two_that_differ_are_refused(name, one, other):
    segments = Segments.from_lengths([one])
    BESIDE[name](segments, one)
    apart = max(other) < max(one) if name == "a number of the longest" else one != other
    if apart:
        with pytest.raises(CollateError):
            BESIDE[name](segments, other)
