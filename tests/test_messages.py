"""Error texts are part of the interface: key and row, what arrived, the rule, the remedy; all bad rows at once."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import collate_npu
from collate_npu import (
    AmbiguousMaskError,
    BatchAdapter,
    CollateError,
    PaddingCollator,
    PolarityError,
    Segments,
    UnsupportedFormError,
    dense,
    derive_segments,
)
from collate_npu.errors import explain, explain_rows, shape_of
from collate_npu.keys import KEYS, TOKENS

SEGMENTS = Segments.from_lengths([3, 5])
COLLATE = PaddingCollator(pad_token_id=0, keys={**KEYS, "weights": TOKENS})
HYBRID = SimpleNamespace(layer_types=["linear_attention", "full_attention"])


def with_nan(*rows):
    bias = dense(Segments.from_lengths([3, 5, 4]), polarity="bias")
    bias[list(rows), 0, 2, 1] = torch.nan
    return bias


def ids(*rows, **columns):
    return [{"input_ids": row, **{key: column[b] for key, column in columns.items()}} for b, row in enumerate(rows)]


MESSAGES = {
    "a row with no tokens": (
        lambda: COLLATE(ids([], [1], [])),
        CollateError,
        """\
input_ids: 2 bad rows.
  row 0: got no tokens
  row 2: got no tokens
A row without real tokens has no logits, no loss and no last token.
Drop the samples, or pass allow_empty=True.""",
    ),
    "a row whose mask is all padding": (
        lambda: COLLATE(ids([1, 2], [1], attention_mask=[[0, 0], [1]])),
        CollateError,
        """\
input_ids: 1 bad row.
  row 0: got no tokens
A row without real tokens has no logits, no loss and no last token.
Drop the samples, or pass allow_empty=True.""",
    ),
    "labels of another length": (
        lambda: COLLATE(ids([1, 2], [1], [1], labels=[[1], [1], [1, 2]])),
        CollateError,
        """\
labels: 2 bad rows.
  row 0: got 1 values beside 2 input_ids
  row 2: got 2 values beside 1 input_ids
labels has one value for each token of its row.
Cut or build both together, before collation.""",
    ),
    "float ids in lists": (
        lambda: COLLATE(ids([1, 2.5], [1], [0.5])),
        CollateError,
        """\
input_ids: 2 bad rows.
  row 0: got 2.5 at token 1
  row 2: got 0.5 at token 0
input_ids holds whole numbers of at most 64 bits.
Convert them where the sample is built.""",
    ),
    "float ids in arrays": (
        lambda: COLLATE(ids(torch.tensor([0.5]), [1], np.array([0.5, 1]))),
        CollateError,
        """\
input_ids: 2 bad rows.
  row 0: got float32 [1] starting [0.5]
  row 2: got float64 [2] starting [0.5, 1.0]
input_ids holds whole numbers, one for each token.
Convert them where the sample is built.""",
    ),
    "a mask longer than its row": (
        lambda: COLLATE(ids([1, 2], [1], attention_mask=[[1, 1, 1], [1, 1]])),
        CollateError,
        """\
attention_mask: 2 bad rows.
  row 0: got 3 values beside 2 input_ids
  row 1: got 2 values beside 1 input_ids
A mask is as long as its row.
Cut or build both together, before collation.""",
    ),
    "mixed ndim of ids": (
        lambda: COLLATE(ids(torch.tensor([1, 2]), torch.tensor([[1, 2]]), torch.tensor(3))),
        CollateError,
        """\
input_ids: 2 bad rows.
  row 1: got int64 [1, 2]
  row 2: got int64 []
input_ids of one sample is a list, array or tensor [L] of token ids.
Drop the batch dimension; pass ids, not text.""",
    ),
    "mixed ndim of another key": (
        lambda: COLLATE(ids([1, 2], [1, 2], weights=[np.ones(2), np.ones((2, 3))])),
        CollateError,
        """\
weights: 2 bad rows.
  row 0: got values of shape []
  row 1: got values of shape [3]
All rows of a key have the same number of dimensions, and equal trailing ones.
Give each token one value of the same shape in every row.""",
    ),
    "NaN in an additive mask": (
        lambda: derive_segments(with_nan(0, 2)),
        CollateError,
        """\
attention_mask: 2 bad rows.
  row 0: got NaN
  row 2: got NaN
An additive mask holds finite numbers or -inf.
Look for inf - inf or 0 * inf where it was built.""",
    ),
    "an additive mask with int dtype": (
        lambda: derive_segments(torch.where(dense(SEGMENTS), 0, -10000)),
        CollateError,
        "attention_mask: got int64 [2, 1, 5, 5] with values from -10000 to 0. An additive mask is a float tensor; "
        "ints are 1 and 0. Convert it with .to(torch.float32), or pass the keep mask.",
    ),
    "an all-True 4D mask of unknown polarity": (
        lambda: derive_segments(torch.ones(2, 1, 4, 4, dtype=torch.bool)),
        PolarityError,
        "attention_mask: got bool [2, 1, 4, 4]. Both readings are possible: "
        "as 'keep' it is Segments(B=2, S=4, lengths=[4, 4], padding='none'); "
        "as 'masked' it is Segments(B=2, S=4, lengths=[0, 0], padding='right'). "
        "Pass polarity='keep' (True attends), 'masked' (True is blocked) or 'bias' (additive).",
    ),
    "a [2048, 2048] triangle": (
        lambda: derive_segments(torch.ones(2048, 2048, dtype=torch.bool).triu(1)),
        AmbiguousMaskError,
        "attention_mask: got bool [2048, 2048]. It is torch_npu's compressed causal triangle, which holds no padding, "
        "or 2048 tokens without padding. Carry attention_mask_2d (with segment_ids, where rows are packed) from the "
        "collator beside it.",
    ),
    "4D already split for context parallelism": (
        lambda: derive_segments(dense(Segments.from_lengths([3, 8]), rows=[0, 1, 6, 7])),
        AmbiguousMaskError,
        "attention_mask: got bool [2, 1, 4, 8]. 4 query rows and 8 keys: a context-parallel shard, or a KV cache. "
        "Derive from the whole mask, before the split; self-attention has as many rows as keys.",
    ),
    "masks that disagree": (
        lambda: derive_segments(SEGMENTS.keep, keep=Segments.from_lengths([4, 5]).keep),
        CollateError,
        """\
attention_mask: 1 bad row.
  row 0: got 3 real tokens, not 4
It disagrees with the other mask of the same batch about which tokens are real.
Alignment padding is padding in both; remove the wrong one, or rebuild both from the lengths.""",
    ),
    "no mask at all": (
        lambda: BatchAdapter(HYBRID, consumer="megatron")({"input_ids": torch.ones(2, 5), "labels": torch.ones(2, 5)}),
        AmbiguousMaskError,
        "batch: got keys input_ids, labels. No key says which tokens are padding: no mask may mean no padding, "
        "or a mask that was lost. Carry attention_mask_2d from the collator (PaddingCollator and wrap_collator emit it).",
    ),
    "left padding on MindSpeed": (
        lambda: PaddingCollator(pad_token_id=0, padding_side="left", consumer="mindspeed", model=HYBRID)(ids([1], [1, 2])),
        UnsupportedFormError,
        "attention_mask: got Segments(B=2, S=2, lengths=[1, 2], padding='left'). MindSpeed's flash kernel runs a "
        "compressed causal triangle, and here padding stands on the left, so real tokens would attend it. "
        "Pad right with one sequence a row, or use padding_free=True. MindSpeed 0.14 to 0.16 with one rank a row reads a "
        "dense mask under attention_mask_type=general (consumer='mindspeed_dense').",
    ),
    "a dense mask too large": (
        lambda: dense(Segments.from_lengths([1 << 17])),
        UnsupportedFormError,
        "dense mask: got 16.00 GiB ([1, 1, 131072, 131072]). The limit max_mask_bytes is 4.00 GiB. "
        "Use None where none_is_exact, varlen(), a slice of rows, or raise the limit.",
    ),
    "a key that some samples lack": (
        lambda: COLLATE([{"input_ids": [1], "mine": 1}, {"input_ids": [1]}]),
        CollateError,
        """\
mine: 1 bad row.
  row 1: got nothing
mine stands in every sample or in none.
Fill it in, or drop it, where the sample is built.""",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_the_whole_text(name):
    cause, error, text = MESSAGES[name]
    with pytest.raises(ValueError) as raised:
        cause()
    assert type(raised.value) is error
    assert str(raised.value) == text


# --- how texts are made


def test_one_line_of_four_facts():
    assert explain("key", "this", "The rule.", "The remedy.") == "key: got this. The rule. The remedy."


def test_rows_are_sorted_and_counted():
    assert explain_rows("key", [(2, "b"), (0, "a")], "Rule.", "Remedy.") == (
        "key: 2 bad rows.\n  row 0: got a\n  row 2: got b\nRule.\nRemedy."
    )
    assert explain_rows("key", [(2, "b")], "Rule.", "Remedy.").startswith("key: 1 bad row.\n")


def test_what_arrived():
    assert shape_of(torch.zeros(2, 3, dtype=torch.bfloat16)) == "bfloat16 [2, 3]"
    assert shape_of(np.zeros(2, np.int32)) == "int32 [2]"
    assert shape_of("text") == "str []"


def test_all_errors_are_one_family():
    for error in (PolarityError, AmbiguousMaskError, UnsupportedFormError):
        assert issubclass(error, CollateError)
    assert issubclass(CollateError, ValueError)


ROOMS = ("segments", "masks", "outputs", "consumers", "collate")


def test_every_error_of_the_core_is_explained():
    """No raise with a text of its own: each goes through explain or explain_rows, which ask for all four facts."""
    folder = Path(collate_npu.__file__).parent
    bare = []
    for path in sorted(folder.rglob("*.py")):
        if path.relative_to(folder).parts[0].removesuffix(".py") not in ROOMS:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", "").endswith("Error")
                and node.func.id != "UnexplainedError"
            ):
                made = node.args[0]
                if not (isinstance(made, ast.Call) and getattr(made.func, "id", "") in ("explain", "explain_rows")):
                    bare.append(f"{path.name}:{node.lineno}")
    assert bare == []
