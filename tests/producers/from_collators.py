"""Collators as people use them: transformers, TRL, torch's own, datasets packed by TRL.

Legend: B rows, S width, L tokens of one sample.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import torch
from drawing import ONE_SEQUENCE, PAD, SIDED, Draw
from producing import Producer, emitted
from verdicts import Case

HF = ("transformers",)
TRL = ("trl>=1",)
EOS = 1
FLAT = ("none", "packed")


@cache
def tokenizer(side: str, pad: str = "<pad>") -> Any:
    """Token n is the number n; `<pad>` is 0, `<eos>` 1."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<eos>": EOS, "<unk>": 2} | {str(n): n for n in range(3, 128)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    names = {"pad_token": pad, "eos_token": "<eos>", "unk_token": "<unk>"}
    built = PreTrainedTokenizerFast(
        tokenizer_object=made, padding_side=side, model_input_names=["input_ids", "attention_mask"], **names
    )
    built.deprecation_warnings["Asking-to-pad-a-fast-tokenizer"] = True
    return built


def placed(lengths: list[int], width: int, side: str) -> np.ndarray:
    """Segment ids of samples padded to one side."""
    ids = np.zeros((len(lengths), width), np.int64)
    for row, length in zip(ids, lengths):
        row[slice(0, length) if side == "right" else slice(width - length, width)] = 1
    return ids


def _side(draw: Draw) -> str:
    return "left" if draw.style == "left" else "right"


def _features(draw: Draw, *, eos: bool = False, labels: bool = True) -> list[dict[str, Any]]:
    rows = [[*row[:-1], EOS] if eos else row for row in draw.rows()]
    return [{"input_ids": row} | ({"labels": list(row)} if labels else {}) for row in rows]


def by_tokenizer(draw: Draw, collator: Any, *, pad: str = "<pad>", labels: bool = False, **settings: Any) -> Case:
    """`collator(tokenizer)` on samples of these lengths."""
    features = _features(draw, eos=pad == "<eos>", labels=labels)
    batch = collator(tokenizer(_side(draw), pad), **settings)([dict(feature) for feature in features])
    ids = placed(draw.lengths, batch["input_ids"].shape[1], _side(draw))
    return emitted(draw, batch, ids=ids, features=features)


def with_padding(draw: Draw, **settings: Any) -> Case:
    from transformers import DataCollatorWithPadding

    return by_tokenizer(draw, DataCollatorWithPadding, **settings)


def seq2seq(draw: Draw) -> Case:
    from transformers import DataCollatorForSeq2Seq

    return by_tokenizer(draw, DataCollatorForSeq2Seq, labels=True, pad_to_multiple_of=4)


def language(draw: Draw, pad: str = "<pad>") -> Case:
    from transformers import DataCollatorForLanguageModeling

    return by_tokenizer(draw, DataCollatorForLanguageModeling, pad=pad, mlm=False)


def classes(draw: Draw) -> Case:
    from transformers import DataCollatorForTokenClassification

    return by_tokenizer(draw, DataCollatorForTokenClassification, labels=True)


def flattened(draw: Draw, **settings: Any) -> Case:
    """Every sequence of the batch in one row."""
    from transformers import DataCollatorWithFlattening

    features = [{"input_ids": sequence} for row in draw.sequences() for sequence in row]
    batch = DataCollatorWithFlattening(**settings)([dict(feature) for feature in features])
    return emitted(draw, batch, ids=joined(features), features=features, flat=True)


def joined(features: list[dict[str, Any]], width: int | None = None) -> np.ndarray:
    """Segment ids of one flat row; padding behind."""
    row = [n for n, feature in enumerate(features, start=1) for _ in feature["input_ids"]]
    return np.array([row + [0] * ((width or len(row)) - len(row))], np.int64)


def fixed(draw: Draw, collate: str) -> Case:
    """Rows that were padded when they were tokenized, stacked as they are."""
    features = [
        {"input_ids": tokens.tolist(), "attention_mask": keep.astype(int).tolist()}
        for tokens, keep in zip(draw.tokens, draw.keep)
    ]
    if collate == "torch":
        features = [{key: torch.tensor(value) for key, value in feature.items()} for feature in features]
        batch = torch.utils.data.default_collate(features)
    else:
        from transformers import default_data_collator

        batch = default_data_collator(features)
    return emitted(draw, batch, ids=draw.ids, features=features)


def sft(draw: Draw, **settings: Any) -> Case:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    features = [{"input_ids": row} for row in draw.rows()]
    batch = DataCollatorForLanguageModeling(pad_token_id=PAD, **settings)(features)
    ids = placed(draw.lengths, batch["input_ids"].shape[1], "right")
    return emitted(draw, batch, ids=ids, features=features)


def sft_padding_free(draw: Draw, **settings: Any) -> Case:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    features = [{"input_ids": sequence} for row in draw.sequences() for sequence in row]
    batch = DataCollatorForLanguageModeling(pad_token_id=PAD, padding_free=True, **settings)(features)
    return emitted(draw, batch, ids=joined(features, batch["input_ids"].shape[1]), features=features, flat=True)


def packed_rows(draw: Draw) -> list[dict[str, Any]]:
    """A dataset packed by TRL: `input_ids` of several sequences and their `seq_lengths`."""
    import datasets
    from trl import pack_dataset

    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"input_ids": [sequence for row in draw.sequences() for sequence in row]})
    return list(pack_dataset(rows, draw.shape[1], "bfd"))


def sft_packed(draw: Draw, *, padding_free: bool) -> Case:
    """TRL's collator on such rows: one flat row, or rows whose positions start again."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    features = packed_rows(draw)
    batch = DataCollatorForLanguageModeling(pad_token_id=PAD, padding_free=padding_free, return_position_ids=True)(features)
    lengths = [row["seq_lengths"] for row in features]
    if padding_free:
        lengths = [[length for row in lengths for length in row]]
    width = batch["input_ids"].shape[1]
    rows = [[n for n, length in enumerate(row, start=1) for _ in range(length)] for row in lengths]
    ids = np.array([row + [0] * (width - len(row)) for row in rows], np.int64)
    return emitted(draw, batch, ids=ids, features=features, flat=padding_free)


def preference(draw: Draw) -> Case:
    """DPO: chosen rows, then rejected ones, over the same prompts."""
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    features = []
    for row in draw.rows():
        cut = int(draw.rng.integers(0, len(row)))
        other = draw.rng.integers(3, 100, int(draw.rng.integers(1, 6))).tolist()
        features.append({"prompt_ids": row[:cut], "chosen_ids": row[cut:], "rejected_ids": other})
    batch = DataCollatorForPreference(pad_token_id=PAD)(features)
    lengths = [len(row["prompt_ids"]) + len(row[key]) for key in ("chosen_ids", "rejected_ids") for row in features]
    return emitted(draw, batch, ids=placed(lengths, batch["input_ids"].shape[1], "right"), features=features)


def prompts_and_completions(draw: Draw, *, flush: bool = False) -> Case:
    """GRPO: prompts padded on the left, completions on the right, side by side (grpo_trainer.py:2443-2465)."""
    from trl.trainer.utils import flush_left, pad

    rows = [torch.tensor(row) for row in draw.rows()]
    cuts = [int(draw.rng.integers(0, len(row) + 1)) for row in rows]
    halves = ([row[:cut] for row, cut in zip(rows, cuts)], [row[cut:] for row, cut in zip(rows, cuts)])
    sides = ("left", "right")
    tokens = torch.cat([pad(half, PAD, side) for half, side in zip(halves, sides)], 1)
    keep = torch.cat([pad([torch.ones_like(row) for row in half], 0, side) for half, side in zip(halves, sides)], 1)
    if flush:
        keep, tokens = flush_left(keep, tokens)
    features = [{"input_ids": row.tolist()} for row in rows]
    batch = {"input_ids": tokens, "attention_mask": keep}
    return emitted(draw, batch, ids=keep.numpy().astype(np.int64), features=features)


PRODUCERS = [
    Producer("hf DataCollatorWithPadding", HF, with_padding, SIDED),
    Producer("hf DataCollatorWithPadding, to 8", HF, partial(with_padding, pad_to_multiple_of=8), SIDED),
    Producer(
        "hf DataCollatorWithPadding, max_length", HF, partial(with_padding, padding="max_length", max_length=66), SIDED
    ),
    Producer("hf DataCollatorForSeq2Seq", HF, seq2seq, SIDED),
    Producer("hf DataCollatorForLanguageModeling", HF, language, SIDED),
    Producer("hf DataCollatorForLanguageModeling, pad is eos", HF, partial(language, pad="<eos>"), SIDED),
    Producer("hf DataCollatorForTokenClassification", HF, classes, SIDED),
    Producer("hf Flattening", HF, flattened, FLAT),
    Producer("hf Flattening, no positions", HF, partial(flattened, return_position_ids=False), FLAT, ("no boundaries",)),
    Producer("hf Flattening, offsets", HF, partial(flattened, return_flash_attn_kwargs=True), FLAT),
    Producer(
        "hf Flattening, offsets alone",
        HF,
        partial(flattened, return_position_ids=False, return_flash_attn_kwargs=True),
        FLAT,
    ),
    Producer("hf Flattening, seq_idx", HF, partial(flattened, return_seq_idx=True), FLAT),
    Producer(
        "hf Flattening, all options",
        HF,
        partial(flattened, return_flash_attn_kwargs=True, return_seq_idx=True),
        FLAT,
    ),
    Producer("hf default_data_collator", HF, partial(fixed, collate="transformers"), ONE_SEQUENCE),
    Producer("torch default_collate", (), partial(fixed, collate="torch"), ONE_SEQUENCE),
    Producer("trl SFT", TRL, sft, ("none", "right")),
    Producer(
        "trl SFT, to 8, positions", TRL, partial(sft, pad_to_multiple_of=8, return_position_ids=True), ("none", "right")
    ),
    Producer("trl SFT padding free", TRL, sft_padding_free, FLAT),
    Producer("trl SFT padding free, to 8", TRL, partial(sft_padding_free, pad_to_multiple_of=8), FLAT),
    Producer("trl SFT packed, padding free", TRL, partial(sft_packed, padding_free=True), FLAT),
    Producer("trl SFT packed, rows", TRL, partial(sft_packed, padding_free=False), FLAT),
    Producer("trl DPO", TRL, preference, ("none", "right")),
    Producer("trl GRPO pads", TRL, prompts_and_completions, ("none", "right", "left")),
    Producer("trl flush_left", TRL, partial(prompts_and_completions, flush=True), ("none", "right", "left")),
]
