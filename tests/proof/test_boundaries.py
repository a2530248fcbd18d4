"""Boundaries of a call: where sequences begin, what is nobody's, by offsets, numbers, zeros, masks; what of it is wrong."""

import numpy as np
import pytest
import torch

from collate_npu import Segments
from collate_npu.masks import dense
from collate_npu.masks.patterns import CAUSAL
from collate_npu.proof import boundaries

NOBODYS = ([0, 1, 2, 3, 4], [1, 1, 1, 1, 1])


def call(first, neutral=None, shape=None, **settings):
    neutral_T = np.zeros(len(first), bool) if neutral is None else np.array(neutral, bool)
    return boundaries.CallBoundaries("kernel", "rule", shape or (1, len(first)), np.array(first), neutral_T, **settings)


@pytest.mark.parametrize(
    ("offsets", "first", "neutral"),
    [
        ([0, 2, 5], [0, 0, 2, 2, 2], [0, 0, 0, 0, 0]),
        ([1, 3], [0, 1, 1, 3, 3], [1, 0, 0, 1, 1]),
        ([0, 2, 2, 5], [0, 0, 2, 2, 2], [0, 0, 0, 0, 0]),  # one of no token
        ([5, 5], [0, 1, 2, 3, 4], [1, 1, 1, 1, 1]),
        *((wrong, *NOBODYS) for wrong in ([], [0], [0, 3, 2], [-1, 2, 5], [0, 6])),
    ],
)
def test_offsets(offsets, first, neutral):
    assert [x.tolist() for x in boundaries.by_offsets(offsets, 5)] == [first, neutral]


def test_tokens_that_read_themselves_alone_reach_one():
    assert call([0, 1]).reach == 1


@pytest.mark.parametrize("order", ["BTD", "BDT", "BT"])
def test_zeros_stand_row_after_row(order):
    zero_BT = torch.tensor([[1, 0, 0], [1, 1, 0]]).bool()
    x_BTD = torch.where(zero_BT, 0, 7)[..., None].repeat(1, 1, len(order) - 1)
    x_BTD[0, 1, 1:] = 0  # one channel alone is not
    x = x_BTD.permute([{"B": 0, "T": 1, "D": 2}[axis] for axis in order]) if "D" in order else x_BTD[..., 0]
    assert boundaries.zeros_of(x, order).tolist() == zero_BT.flatten().tolist()


@pytest.mark.parametrize(
    ("allowed", "first", "neutral"),
    [
        (["100", "110", "111"], [0, 0, 0], [0, 0, 0]),
        (["111", "111", "111"], [0, 0, 0], [0, 0, 0]),  # to both sides
        (["100", "100", "101"], [0, 0, 0], [0, 1, 0]),
        (["100", "111", "101"], [0, 1, 0], [0, 1, 0]),  # a filling between real tokens
        (["111", "010", "011"], [0, 1, 1], [1, 0, 0]),  # and before them
        (["100", "010", "011"], [0, 1, 1], [0, 0, 0]),
    ],
)
def test_a_mask_says_whom_tokens_read_and_who_is_read(allowed, first, neutral):
    whole = torch.ones(3, 3).tril().bool()
    rows = [whole, torch.tensor([[int(x) for x in row] for row in allowed]).bool()]
    first_T, neutral_T, _ = boundaries.by_mask(lambda b: (rows[b], rows[b]), 2, 3)
    assert first_T.tolist() == [0, 0, 0, *(3 + x for x in first)]
    assert neutral_T.tolist() == [0, 0, 0, *neutral]


@pytest.mark.parametrize(
    ("ids", "first", "neutral", "said"),
    [
        ([0, 0, 1, 1], [0, 0, 2, 2], None, ""),
        ([0, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0], ""),
        ([0, 0, 1, 1], [0, 0, 0, 0], None, "(0, 2) goes on from padding"),
        ([0, 0, 1, 1], [0, 0, 2, 0], None, "(0, 3) goes on from padding"),  # and from its own
        ([1, 1, 2, 2], [0, 0, 0, 0], None, "(0, 2) goes on from another sequence"),
        ([1, 0, 2, 2], [0, 0, 0, 0], None, "(0, 2) goes on from another sequence"),
        ([1, 0, 2, 2], [0, 0, 0, 0], [0, 1, 0, 0], "(0, 2) goes on from another sequence"),
        ([1, 0, 1, 0], [0, 1, 1, 1], None, "(0, 2) goes on from padding"),  # as many tokens, but others
        ([1, 1, 1, 0], [0, 0, 2, 2], None, "(0, 2) does not read the first 2 tokens of its sequence"),
        ([1, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1], "(0, 1) is real, and the kernel treats it as padding"),
    ],
)
def test_what_is_wrong_with_the_first_wrong_token(ids, first, neutral, said):
    why = boundaries.boundary_reason(call(first, neutral), Segments.from_ids([ids]))
    assert why.endswith(said) if said else why == ""


@pytest.mark.parametrize(
    ("positions", "first", "wrong"),
    [
        ([9, 0, 1, 0, 1, 2], 0, None),
        ([9, 2, 3, 2, 3, 4], 2, None),
        ([9, 4, 5, 7, 8, 9], None, None),  # rotary: what differs is right
        ([9, 4, 5, 7, 8, 9], 4, 3),
        ([9, 0, 2, 0, 1, 2], None, 2),
        ([9, 0, 1, 0, 1, 3], None, 5),
        ([9, 0, 1, 2, 3, 4], 0, 3),
    ],
)
def test_positions_count_from_the_first_of_their_sequence(positions, first, wrong):
    why = boundaries.position_reason(np.array(positions), Segments.from_ids([[0, 1, 1, 2, 2, 2]]), first)
    assert f"(0, {wrong}) has position {positions[wrong]}" in why if wrong else why == ""
    assert boundaries.position_reason(np.array(positions), Segments.from_ids([[0] * 6]), first) == ""


RIGHT, TWO = Segments.from_lengths([8, 5]), Segments.from_lengths([[3, 5], [5]])
LEFT = Segments.from_lengths([8, 5], side="left")
ALL = "does not attend all of its sequence"
PAST, EACH = torch.ones(8, 8).tril().bool(), torch.eye(8).bool()


@pytest.mark.parametrize(
    ("segments", "b", "any_head", "every_head", "said"),
    [
        (LEFT, 1, dense(LEFT)[1, 0], None, ""),
        (LEFT, 1, PAST, None, "attends padding: query 3 attends key 0 of 8"),
        (LEFT, 1, PAST, dense(LEFT)[1, 0], "attends padding: query 3 attends key 0 of 8"),
        (TWO, 0, PAST, None, "attends another sequence: query 3 attends key 0 of 8"),
        (RIGHT, 0, torch.ones(8, 8).bool(), None, "attends more than causal attention does: query 0 attends key 1 of 8"),
        (RIGHT, 0, PAST & ~EACH, None, f"{ALL}: query 0 does not attend key 0 of 8"),
        (RIGHT, 0, PAST, PAST.triu(-1), f"{ALL}: query 2 does not attend key 0 of 8 in one of its heads"),
        (RIGHT, 0, PAST[:4], None, "has [4, 8] queries and keys, not [8, 8]"),
    ],
)  # fmt: skip
def test_a_row_that_is_wrong_says_which_query_and_key(segments, b, any_head, every_head, said):
    attended = any_head, any_head if every_head is None else every_head
    said = said and f"row {b} {said}"
    assert boundaries.attention_reason(segments, CAUSAL, b, attended) == said
    ours = boundaries.attention_reason(segments, None, b, attended)
    assert ours == ("" if "all of" in said or "more than" in said else said), "without a pattern only whose tokens they are"
