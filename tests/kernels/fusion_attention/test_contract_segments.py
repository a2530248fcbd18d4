"""With the Segments at hand no wrong call passes: right calls are mutated, and the reference says which went wrong."""

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings, strategies as st
from live_bytes import peak_bytes
from mutations import Kwargs, mutations
from npu_batches import HEAD_DIM, HEADS, KEY_HEADS, SCALE, computed, right_calls
from torch import Tensor

from collate_npu import CollateError, Pattern, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.kernels import Breach
from collate_npu.kernels.check import call_breaches, check_call
from collate_npu.kernels.fusion_attention import contract, fusion_attention_kwargs

pytestmark = pytest.mark.long

NAME, SIZES = "npu_fusion_attention", {"N": HEADS, "Nkv": KEY_HEADS, "D": HEAD_DIM}


def arguments(batch: Segments, **settings: Any) -> Kwargs:
    """Those of a whole call but its tensors."""
    return SCALE | fusion_attention_kwargs(batch, **settings)


def refused(batch: Segments, pattern: Pattern, kwargs: Kwargs, keep_tail: bool) -> bool:
    try:
        sizes = SIZES | (dict.fromkeys(("Tq", "Tkv"), batch.shape[1]) if keep_tail else {})
        check_call(NAME, kwargs, **sizes, segments=batch, pattern=pattern)
    except CollateError:
        return True
    return False


def verdict(batch: Segments, pattern: Pattern, kwargs: Kwargs, keep_tail: bool, right: Tensor) -> str:
    """`wrong` or `same` by the reference, which may refuse itself, `refused` or `passed` by the check."""
    try:
        same = torch.allclose(computed(batch, kwargs, keep_tail), right, atol=1e-9, rtol=0)
    except (CollateError, TypeError):
        same = False
    return f"{'same' if same else 'wrong'}, {'refused' if refused(batch, pattern, kwargs, keep_tail) else 'passed'}"


def only(batch: Segments, kwargs: Kwargs, **settings: Any) -> Breach:
    """The one breach of a call."""
    (breach,) = call_breaches(NAME, kwargs, **SIZES, segments=batch, **settings)
    return breach


# --- drawn, blocks and bytes


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_drawn_calls_pass_and_mutations_compute_the_same_or_are_refused_by_blocks_of_any_size(data: st.DataObject) -> None:
    batch, pattern, kwargs, keep_tail = data.draw(right_calls())
    right = computed(batch, kwargs, keep_tail)
    assert not refused(batch, pattern, kwargs, keep_tail)
    for _ in range(data.draw(st.integers(1, 2))):
        name, kwargs = data.draw(st.sampled_from(list(mutations(kwargs, batch))))
        said = verdict(batch, pattern, kwargs, keep_tail, right)
        assert said != "wrong, passed", name
        for size in (1, 7):
            with mock.patch.object(contract, "BLOCK_SCORES", size):
                assert verdict(batch, pattern, kwargs, keep_tail, right) == said
        if said != "same, passed":
            return


S, LIMIT = 4000, 5 * 2**22
RIGHT, LEFT = Segments.from_lengths([S, 9]), Segments.from_lengths([S, 9], side="left")
WIDE: dict[str, tuple[Segments, Pattern, Any]] = {
    "dense": (LEFT, Pattern.of("causal"), "BSND"),
    "dense bidirectional": (RIGHT, Pattern.of("bidirectional"), "BSND"),
    "dense prefix": (LEFT, Pattern.prefix(3), "BSND"),
    "shared": (RIGHT, Pattern.chunked(9), "BSND"),
    "triangle": (RIGHT, Pattern.of("causal"), "BSND"),
    "prefix": (RIGHT, Pattern.prefix(3), "BSND"),
    "packed chunks": (Segments.from_lengths([500, 9]), Pattern.chunked(9), "TND"),
    "packed": (RIGHT, Pattern.of("bidirectional"), "TND"),
}


@pytest.mark.parametrize("name", WIDE)
def test_max_mask_bytes_is_what_the_arguments_cost(name: str) -> None:
    batch, pattern, layout = WIDE[name]
    size = arguments(batch, pattern=pattern, layout=layout).get("atten_mask", torch.empty(0)).numel()

    def make(limit: int) -> Any:
        return arguments(batch, pattern=pattern, layout=layout, max_mask_bytes=limit)

    assert peak_bytes(lambda: make(size)) <= 4 * size + 2**21  # and tables of some numbers a token
    if size:
        with pytest.raises(UnsupportedFormError, match="max_mask_bytes"):
            make(size - 1)


def test_a_mask_for_each_head_is_read_in_blocks_as_small() -> None:
    batch, both_ways = Segments.from_lengths([900], width=1000), {"pattern": "bidirectional"}
    masked = arguments(batch, **both_ways)["atten_mask"].repeat(1, 64, 1, 1)
    kwargs, sizes = SCALE | {"input_layout": "BSND", "atten_mask": masked, "sparse_mode": 1}, SIZES | {"N": 64}
    taken = peak_bytes(lambda: check_call(NAME, kwargs, **sizes, segments=batch, **both_ways))
    assert taken <= masked.nbytes + LIMIT


# --- messages and sizes


@pytest.mark.parametrize("rows", [8, 9])
def test_every_wrong_row_is_named_until_the_list_is_long(rows: int) -> None:
    with mock.patch.object(contract, "BLOCK_SCORES", 1):  # once, however many blocks of a row are wrong
        found = only(Segments.from_lengths([2] * rows, 3, "left"), arguments(Segments.from_lengths([3] * rows)))
    assert found.where == "atten_mask, sparse_mode"
    assert [f"row {b} attends padding: query 1 attends key 0 of 3" in found.got for b in range(9)] == [True] * 8 + [False]
    assert found.got.endswith("; ...") == (rows == 9)


def test_sizes_follow_from_the_segments_and_others_are_refused() -> None:
    batch = Segments.from_lengths([[3, 2]], width=9)
    padded, packed = (arguments(batch, layout=layout) for layout in ("BSND", "TND"))
    check_call(NAME, padded, **SIZES, segments=batch, B=1, Sq=9, Skv=9)
    check_call(NAME, packed, **SIZES, segments=batch, B=2, Sq=3, Skv=3, Tq=5, Tkv=5)
    for kwargs, name, size in (
        (padded, "B", 2),
        (padded, "Sq", 8),
        (padded, "Skv", 5),
        (packed, "Tq", 8),
        (packed, "Tkv", 4),
    ):
        breach = only(batch, kwargs, **{name: size})
        assert (breach.rule, breach.where, breach.got) == ("sizes-differ", name, str(size))
    assert call_breaches(NAME, packed, **SIZES, segments=batch, Tq=9, Tkv=9)[0].rule == "unused-tail"
    tail = arguments(batch, layout="TND", keep_tail=True)
    check_call(NAME, tail, **SIZES, segments=batch, Tq=9, Tkv=9)
    assert call_breaches(NAME, tail, **SIZES, segments=batch)[0].rule == "refused"


@pytest.mark.parametrize(
    ("lists", "reasons"),
    [
        ({"actual_seq_qlen": [8], "actual_seq_kvlen": [8]}, ["query 0 attends key 0 of 4 in row 1"]),
        ({"actual_seq_kvlen": [5, 8]}, ["query 0 attends key 0 of 4 in row 1", "query 0 does not attend key 0 of 4"]),
    ],
)
def test_packed_rows_of_one_length_are_told_apart(lists: Any, reasons: list[str]) -> None:
    """Here a key's column alone says nothing: the same column of the other row is a key too."""
    batch = Segments.from_lengths([4, 4])
    kwargs = arguments(batch, layout="TND", pattern="bidirectional") | lists
    got = only(batch, kwargs, pattern="bidirectional").got
    assert [each.partition(": ")[2] for each in got.split("; ")] == reasons


# --- what right scores do not say


def test_what_beside_the_mask_changes_an_output_is_refused() -> None:
    """A forgotten scale, and tensors in another layout than the one that is named; with what each remedy says."""
    batch = Segments.from_lengths([3, 5])
    right = arguments(batch)
    x = torch.zeros(2, 5, HEADS, HEAD_DIM)
    k = x[:, :, :KEY_HEADS]
    check_call(NAME, {**right, "query": x, "key": k, "value": k}, **SIZES, segments=batch)
    for changed, rule in (
        ({key: value for key, value in right.items() if key != "scale"}, "scale"),
        ({**right, "scale": 0.0}, "scale"),
        ({**right, "input_layout": "BNSD", "query": x}, "tensor-shape"),
        ({**right, "query": x.transpose(1, 2)}, "tensor-shape"),
    ):
        assert only(batch, changed).rule == rule
        with pytest.raises(UnsupportedFormError, match=rule):
            check_call(NAME, changed, **SIZES, segments=batch)
    check_call(NAME, {**right, "scale": 1.0, "keep_prob": 0.5}, **SIZES, segments=batch)  # whoever writes it may mean it
