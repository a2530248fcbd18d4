"""Dialects: what other stacks write of the sequences of a row that their keys alone do not say.

`KEYS` names the keys and their roles; here is the rest: which object holds offsets, which of them count padding, which
lengths need no mask, and where padding at the end of a flat row begins that offsets or positions number as a sequence.
Legend: S width of a flat row, N its sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from collate_npu.arrays import Array
from collate_npu.errors import CollateError, explain

NO_SEQUENCE = -1000
"""Fills rows of lengths that have fewer sequences (NeMo Automodel 0.7.0 datasets/utils.py)."""
HOLDERS = ("packed_seq_params", "flash_attn_kwargs")
"""Keys with an object, or a dict, of offsets (Megatron-LM core/packed_seq_params.py; NeMo RL 7ea279a
models/automodel/train.py:125)."""
REAL = ("cu_seqlens_unpadded",)
"""Offsets of real tokens alone (Megatron-Bridge): the others of its batch count padding."""
PADS_RIGHT = ("input_lengths", "packed_seq_lengths")
"""Lengths that need no mask, since rows are padded on the right (NeMo RL, unsloth)."""
REMEDY_ONE_SET = "Keep one set of offsets, that of this batch: a collator or a split may have left old ones in it."

SEQUENCE_GROUPS = {
    "openrlhf.models.ring_attn_utils": "RING_ATTN_GROUP",
    "skyrl.backends.skyrl_train.distributed.ulysses.utils": "_ULYSSES_SEQUENCE_PARALLEL_GROUP",
    "verl.utils.ulysses": "_ULYSSES_SEQUENCE_PARALLEL_GROUP",
    "veomni.distributed.parallel_state": "_PARALLEL_STATE.ulysses_group",
}
"""Module and name of the ranks that share a row, a slice each: OpenRLHF 0.11.2, SkyRL 0.3.0, verl 0.9.1, VeOmni 0.1.12."""

TOKEN_BY_TOKEN = frozenset((
    "torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "liger_kernel", "bitsandbytes", "torchao", "kernels",
    "transformer_engine", "swift", "verl", "llamafactory", "axolotl", "openrlhf", "skyrl", "nemo_automodel", "veomni",
    "xtuner", "twinkle", "unsloth", "unsloth_zoo", "torch_npu", "mindspeed", "optimum", "hqq", "gptqmodel", "collate_npu",
))  # fmt: skip
"""Packages whose modules, forwards and hooks, put on a transformers model, leave each token by itself (peer tests)."""


class FlatRow(NamedTuple):
    """A flat row whose numbers leave no padding: where its sequences start, its positions and token ids (None where it holds
    embeddings), places without a label (`unread`), and whether lengths count every sequence: then all are real."""

    starts: list[int]
    positions_S: Array
    ids_S: Array | None
    unread_S: Array
    counted: bool


def _at_position_zero(row: FlatRow) -> int | None:
    """VeOmni d977449 data/data_collator.py: return the start of a last sequence of several tokens at position 0, unless one
    token before equal ones is real."""
    start, ids_S = row.starts[-1], row.ids_S
    last_S = row.positions_S[start:]
    one_is_real = ids_S is not None and (ids_S[start + 1 :] == ids_S[-1]).all() and ids_S[start] != ids_S[-1]
    several = len(row.starts) > 1 and len(last_S) > 1
    return start if several and not row.counted and not last_S.any() and not one_is_real else None


def _counting_again(row: FlatRow) -> int | None:
    """prime-rl 559b447 trainer/batch.py:717-719, whose last length counts the tail: return where the positions of the last
    sequence begin again, stand still or are 0, if nobody learns from there on."""
    last_S = row.positions_S[row.starts[-1] :]
    counted = int((last_S == np.arange(len(last_S))).cumprod().sum())
    rest_S, end = last_S[counted:], row.starts[-1] + counted
    again = any(np.array_equal(rest_S, form) for form in (np.arange(len(rest_S)), 0 * rest_S, 0 * rest_S + counted - 1))
    return end if 0 < counted < len(last_S) and again and row.unread_S[end:].all() else None


def _one_token_again(row: FlatRow) -> int | None:
    """torchtitan b5bcd76: return the start of a last sequence of one token again and again that nobody learns."""
    S, start = len(row.unread_S), row.starts[-1]
    if row.ids_S is None or row.counted or len(row.starts) < 2:
        return None
    run = int((row.unread_S & (row.ids_S == row.ids_S[-1]))[::-1].cumprod().sum())
    return start if row.starts[-2] < S - run <= start < S - 1 else None  # a run of several would be parted still


TAILS = (_at_position_zero, _counting_again, _one_token_again)
"""Each returns where the padding tail of a flat row begins, or None; the first that knows one counts. Places that are each a
sequence, samples of one token (transformers' flattening) or a tail (TRL 1.16 `pad_to_multiple_of`), stay: exact for both."""


def physical_and_real_offsets(offsets: Mapping[str, Array]) -> tuple[str, Array, Array | None]:
    """Return `(key, physical, real or None)`. Raises where offsets are neither of the two."""
    unpadded = {key for key in offsets if key.rpartition(".")[2] in REAL}
    padded = {key for key in offsets if key.endswith("_padded") or unpadded} - unpadded
    name = next((key for key in offsets if key in padded), next(iter(offsets)))
    physical = offsets[name]
    others = {key: ends for key, ends in offsets.items() if not np.array_equal(ends, physical)}
    real_name, real = next(iter(others.items()), ("", None))
    for key, ends in others.items():
        if not padded or key in padded or real is None or not np.array_equal(ends, real) or len(ends) != len(physical):
            rule = f"It differs from {name}, {physical.tolist()[:8]}{f', and from {real_name}' * (key != real_name)}."
            raise CollateError(explain(key, str(ends.tolist()[:8]), rule, REMEDY_ONE_SET, more="sources-disagree"))
    return name, physical, real
