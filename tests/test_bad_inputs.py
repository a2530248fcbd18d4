"""Bad inputs: whatever a caller hands in is read or refused by name; no raw exception, nothing that is silently rounded.

Every public function against values of the wrong type, rank, dtype and range.
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
    dense,
    derive_segments,
    needs_mask_2d,
    none_is_exact,
    repad,
    unpad,
    wrap_collator,
)

DENSE = SimpleNamespace(layer_types=["full_attention"])
TWO = Segments.from_lengths([2, 3])
NO_NUMBERS = {
    "a string": "110",
    "an object": object(),
    "a set": {1, 0},
    "ragged lists": [[1, 1], [1]],
    "strings in lists": [["1", "0"], ["1", "1"]],
    "None in lists": [[1, None], [1, 1]],
    "meta": torch.ones(2, 3, device="meta"),
    "complex": torch.ones(2, 3, dtype=torch.complex64),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "an object array": np.array([[1, None]], dtype=object),
    "a generator": (x for x in ()),
    "uint64 that wraps": np.array([[2**64 - 1, 1, 1], [1, 1, 1]], np.uint64),
}
HOLDERS = {
    "numpy": lambda x: x.numpy(),
    "lists": lambda x: x.tolist(),
    "tuples": lambda x: tuple(map(tuple, x.tolist())),
    "sparse": lambda x: x.to_sparse(),
    "uint8": lambda x: x.to(torch.uint8),
    "uint16": lambda x: x.to(torch.uint16),
    "float": lambda x: x.float(),
    "float8": lambda x: x.float().to(torch.float8_e4m3fn),
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "requires grad": lambda x: x.float().requires_grad_(),
    "not contiguous": lambda x: x.t().contiguous().t(),
    "expanded": lambda x: x[:, :, None].expand(*x.shape, 2)[..., 0],
    "numpy bool": lambda x: x.bool().numpy(),
}
KEEP = torch.tensor([[1, 1, 0], [1, 1, 1]])


@pytest.mark.parametrize("value", NO_NUMBERS.values(), ids=NO_NUMBERS)
@pytest.mark.parametrize(
    "read",
    [
        Segments.from_keep,
        Segments.from_ids,
        Segments,
        derive_segments,
        lambda x: derive_segments(dense(TWO), keep=x),
        lambda x: BatchAdapter(DENSE, consumer="megatron")({"input_ids": torch.ones(2, 3), "attention_mask": x}),
        lambda x: BatchAdapter(DENSE, consumer="megatron")({"input_ids": torch.ones(2, 3), "attention_mask_2d": x}),
        lambda x: BatchAdapter(DENSE, consumer="megatron")({"input_ids": torch.ones(2, 3), "segment_ids": x}),
        lambda x: wrap_collator(lambda f: {"input_ids": torch.ones(2, 3), "attention_mask": x})([]),
    ],
    ids=[
        "from_keep",
        "from_ids",
        "Segments",
        "derive",
        "keep=",
        "attention_mask",
        "attention_mask_2d",
        "segment_ids",
        "wrap",
    ],
)
def test_what_holds_no_mask_is_refused_by_name(read, value):
    with pytest.raises(CollateError):
        read(value)


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_whatever_holds_numbers_is_read(holder):
    held = holder(KEEP)
    expected = Segments.from_keep(KEEP)
    assert Segments.from_keep(held) == derive_segments(held) == expected
    for key in ("attention_mask", "attention_mask_2d"):
        batch = {"input_ids": torch.ones(2, 3), key: held}
        assert BatchAdapter(DENSE, consumer="megatron").with_segments(batch)[1] == expected


BAD_CALLS = {
    "a window of half a token": lambda: Pattern.sliding(2.5),
    "a window of True": lambda: Pattern.sliding(True),
    "a chunk of a string": lambda: Pattern.chunked("4"),
    "a pattern nobody knows": lambda: Pattern.of("slide"),
    "a prefix of floats": lambda: Pattern.prefix([1.5]),
    "a pattern in dense": lambda: dense(TWO, pattern="sliding"),
    "too many prefixes": lambda: dense(TWO, pattern=Pattern.prefix([1, 2, 3])),
    "a polarity nobody knows": lambda: dense(TWO, polarity="attend"),
    "a bias of ints": lambda: dense(TWO, polarity="bias", dtype=torch.int64),
    "rows of floats": lambda: dense(TWO, rows=[0.5]),
    "rows of bools": lambda: dense(TWO, rows=[True, False, True]),
    "rows beyond the width": lambda: dense(TWO, rows=[7]),
    "rows of a string": lambda: dense(TWO, rows="all"),
    "half a batch": lambda: derive_segments(dense(TWO), batch_size=0.5),
    "less than a batch": lambda: derive_segments(dense(TWO), batch_size=-1),
    "another batch": lambda: derive_segments(dense(TWO), batch_size=5),
    "polarity of derive": lambda: derive_segments(dense(TWO), polarity="True"),
    "lengths of floats": lambda: Segments.from_lengths([1.5, 2.0]),
    "lengths of strings": lambda: Segments.from_lengths(["3"]),
    "lengths below zero": lambda: Segments.from_lengths([-1]),
    "a width of half a token": lambda: Segments.from_lengths([1], width=1.5),
    "a width too small": lambda: Segments.from_lengths([3], width=2),
    "a side in the middle": lambda: Segments.from_lengths([3], side="middle"),
    "offsets of halves": lambda: Segments.from_cu_seqlens([0, 1.5, 3]),
    "offsets without 0": lambda: Segments.from_cu_seqlens([1, 3]),
    "positions that are custom": lambda: Segments.from_position_ids([[3, 4, 5]]),
    "half a pad id": lambda: PaddingCollator(pad_token_id=1.5),
    "a pad id in a list": lambda: PaddingCollator(pad_token_id=[0]),
    "a multiple of half": lambda: PaddingCollator(pad_token_id=0, pad_to_multiple_of=2.5),
    "a multiple of zero": lambda: PaddingCollator(pad_token_id=0, pad_to_multiple_of=0),
    "a width of a string": lambda: PaddingCollator(pad_token_id=0, max_length="8"),
    "a padding nobody knows": lambda: PaddingCollator(pad_token_id=0, padding="most"),
    "a mode nobody knows": lambda: PaddingCollator(pad_token_id=0, attention_mask="3d"),
    "a side nobody knows": lambda: PaddingCollator(pad_token_id=0, padding_side="middle"),
    "a consumer nobody knows": lambda: PaddingCollator(pad_token_id=0, consumer="vllm", model=DENSE),
    "tensors of another library": lambda: PaddingCollator(pad_token_id=0, return_tensors="np"),
    "no features": lambda: PaddingCollator(pad_token_id=0)([]),
    "a None among features": lambda: PaddingCollator(pad_token_id=0)([{"input_ids": [1]}, None]),
    "a generator of features": lambda: PaddingCollator(pad_token_id=0)(f for f in [{"input_ids": [1]}]),
    "a string of features": lambda: PaddingCollator(pad_token_id=0)("text"),
    "a number as features": lambda: PaddingCollator(pad_token_id=0)(3),
    "text instead of ids": lambda: PaddingCollator(pad_token_id=0)([{"input_ids": "text"}]),
    "strings instead of ids": lambda: PaddingCollator(pad_token_id=0)([{"input_ids": ["1", "2"]}]),
    "float ids": lambda: PaddingCollator(pad_token_id=0)([{"input_ids": [1.0, 2.0]}]),
    "ids that wrap": lambda: PaddingCollator(pad_token_id=0)([{"input_ids": np.array([2**63 + 1], np.uint64)}]),
    "labels of a string": lambda: PaddingCollator(pad_token_id=0)([{"input_ids": [1], "loss_scale": "x"}]),
    "lengths of halves": lambda: PaddingCollator(pad_token_id=0)([{"input_ids": [1, 2], "seq_lengths": [0.5, 1.5]}]),
    "a mask of strings": lambda: PaddingCollator(pad_token_id=0)([{"input_ids": [1, 2], "attention_mask": ["1", "0"]}]),
    "a batch without tokens": lambda: BatchAdapter(DENSE, consumer="megatron")({"labels": torch.ones(2, 3)}),
    "tokens without rows": lambda: BatchAdapter(DENSE, consumer="megatron")({"input_ids": torch.ones(3)}),
    "an adapter without a name": lambda: BatchAdapter(DENSE),
    "a polarity of the adapter": lambda: BatchAdapter(DENSE, consumer="megatron", polarity="inverted"),
    "a model type nobody knows": lambda: BatchAdapter(model_type="gpt17"),
    "nobody's need": lambda: needs_mask_2d(None),
    "two ranks and a half": lambda: ContextParallel(2.5, 0),
    "two ranks as a float": lambda: ContextParallel(2.0, 0),
    "a rank beyond": lambda: ContextParallel(2, 2),
    "a layout nobody knows": lambda: ContextParallel(2, 0, layout="diagonal"),
    "a scope nobody knows": lambda: ContextParallel(2, 0, mask_2d="both"),
    "an output of another batch": lambda: unpad(torch.ones(2, 4), TWO),
    "an output that was not unpadded": lambda: repad(torch.ones(6), TWO),
    "rows of padding alone": lambda: BatchAdapter(DENSE, consumer="megatron")(
        {"input_ids": torch.ones(2, 3), "attention_mask_2d": torch.zeros(2, 3)}
    ),
}


@pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_bad_call_is_refused_with_words(call):
    with pytest.raises(CollateError) as raised:
        call()
    assert len(str(raised.value)) > 30


def test_good_calls_beside_them_are_not():
    assert none_is_exact(TWO)
    assert PaddingCollator(pad_token_id=np.int64(0), max_length=torch.tensor(4))([{"input_ids": (1, 2)}])[
        "input_ids"
    ].tolist()
    assert Segments.from_lengths(np.array([2, 3])) == Segments.from_lengths(torch.tensor([2, 3])) == TWO
    assert Segments.from_lengths([np.array([1, 2]), [3]]).lengths == ((1, 2), (3,))
    assert ContextParallel(np.int64(2), 0).multiple == 4
