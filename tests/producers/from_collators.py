"""Collators as people use them: transformers, TRL, torch's own, datasets packed by TRL.

Legend: B rows, S width, L tokens of one sample.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from drawing import ONE_SEQUENCE, PAD, SIDED, Draw
from producing import Producer, emitted, joined, placed, producer, side_of
from verdicts import Case

HF, TRL = ("transformers",), ("trl>=1",)
EOS = 1
FLAT, RIGHT = ("none", "packed"), ("none", "right")


@cache
def tokenizer(side: str, pad: str = "<pad>") -> Any:
    """Token n is the number n; `<pad>` is 0, `<eos>` 1."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<eos>": EOS, "<unk>": 2} | {str(n): n for n in range(3, 128)}
    names = {"pad_token": pad, "eos_token": "<eos>", "unk_token": "<unk>"}
    names |= {"tokenizer_object": Tokenizer(models.WordLevel(words, unk_token="<unk>"))}
    built = PreTrainedTokenizerFast(padding_side=side, model_input_names=["input_ids", "attention_mask"], **names)
    built.deprecation_warnings["Asking-to-pad-a-fast-tokenizer"] = True
    return built


def features_of(rows: list[list[int]]) -> list[dict[str, Any]]:
    return [{"input_ids": row} for row in rows]


def by_tokenizer(draw: Draw, name: str, *, pad: str = "<pad>", labels: bool = True, **settings: Any) -> Case:
    """A collator of transformers on samples of these lengths."""
    import transformers

    rows = [[*row[:-1], EOS] if pad == "<eos>" else row for row in draw.rows()]
    features = [feature | ({"labels": list(feature["input_ids"])} if labels else {}) for feature in features_of(rows)]
    collator = getattr(transformers, name)(tokenizer(side_of(draw), pad), **settings)
    batch = collator([dict(feature) for feature in features])
    return emitted(draw, batch, ids=placed(draw.lengths, batch["input_ids"].shape[1], side_of(draw)), features=features)


def flattened(draw: Draw, **settings: Any) -> Case:
    """Every sequence of the batch in one row."""
    from transformers import DataCollatorWithFlattening

    features = features_of(draw.sequences())
    batch = DataCollatorWithFlattening(**settings)([dict(feature) for feature in features])
    return emitted(draw, batch, ids=joined(features), features=features, flat=True)


def fixed(draw: Draw, collate: str) -> Case:
    """Rows that were padded when they were tokenized, stacked as they are."""
    pairs = zip(draw.tokens.tolist(), draw.keep.astype(int).tolist())
    features: list[dict[str, Any]] = [{"input_ids": tokens, "attention_mask": keep} for tokens, keep in pairs]
    if collate == "torch":
        features = [{key: torch.tensor(value) for key, value in feature.items()} for feature in features]
        return emitted(draw, torch.utils.data.default_collate(features), features=features)
    from transformers import default_data_collator

    return emitted(draw, default_data_collator(features), features=features)


def sft(draw: Draw, *, flat: bool = False, packed: bool = False, **settings: Any) -> Case:
    """TRL's collator on samples, or on rows that its `pack_dataset` made: `input_ids` of several and their `seq_lengths`."""
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    features = features_of(draw.sequences())
    if packed:
        import datasets
        from trl import pack_dataset

        datasets.disable_progress_bars()
        features = list(pack_dataset(datasets.Dataset.from_list(features), draw.shape[1], "bfd"))
    batch = DataCollatorForLanguageModeling(pad_token_id=PAD, padding_free=flat, **settings)(features)
    lengths = [list(row.get("seq_lengths", [len(row["input_ids"])])) for row in features]
    rows = [[n for row in lengths for n in row]] if flat else lengths
    ids = np.zeros((len(rows), batch["input_ids"].shape[1]), np.int64)
    for row, parts in zip(ids, rows):
        row[: sum(parts)] = np.repeat(np.arange(1, len(parts) + 1), parts)
    return emitted(draw, batch, ids=ids, features=features, flat=flat)


def preference(draw: Draw) -> Case:
    """DPO: chosen rows, then rejected ones, over the same prompts."""
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    features = []
    for row in draw.rows():
        cut = draw.number(0, len(row) - 1)
        other = draw.rng.integers(3, 100, draw.number(1, 5)).tolist()
        features.append({"prompt_ids": row[:cut], "chosen_ids": row[cut:], "rejected_ids": other})
    batch = DataCollatorForPreference(pad_token_id=PAD)(features)
    lengths = [len(row["prompt_ids"]) + len(row[key]) for key in ("chosen_ids", "rejected_ids") for row in features]
    return emitted(draw, batch, ids=placed(lengths, batch["input_ids"].shape[1], "right"), features=features)


def prompts_and_completions(draw: Draw, *, flush: bool = False) -> Case:
    """GRPO: prompts padded on the left, completions on the right, side by side (grpo_trainer.py:2443-2465)."""
    from trl.trainer.utils import flush_left, pad

    rows = [torch.tensor(row) for row in draw.rows()]
    cuts = [draw.number(0, len(row)) for row in rows]
    halves = {"left": [row[:cut] for row, cut in zip(rows, cuts)], "right": [row[cut:] for row, cut in zip(rows, cuts)]}
    tokens = torch.cat([pad(half, PAD, side) for side, half in halves.items()], 1)
    keep = torch.cat([pad([torch.ones_like(row) for row in half], 0, side) for side, half in halves.items()], 1)
    if flush:
        keep, tokens = flush_left(keep, tokens)
    batch = {"input_ids": tokens, "attention_mask": keep}
    return emitted(draw, batch, ids=keep.numpy().astype(np.int64), features=features_of(draw.rows()))


def hf(name: str, *details: str, **settings: Any) -> Producer:
    return producer(", ".join([f"hf {name}", *details]), HF, by_tokenizer, SIDED, name=name, **settings)


def flat(name: str, *ambiguous: str, **settings: Any) -> Producer:
    return producer(f"hf Flattening{name}", HF, flattened, FLAT, *ambiguous, **settings)


PRODUCERS = [
    hf("DataCollatorWithPadding", labels=False),
    hf("DataCollatorWithPadding", "max_length", labels=False, padding="max_length", max_length=66),
    hf("DataCollatorForSeq2Seq", pad_to_multiple_of=4),
    hf("DataCollatorForLanguageModeling", labels=False, mlm=False),
    hf("DataCollatorForLanguageModeling", "pad is eos", labels=False, mlm=False, pad="<eos>"),
    hf("DataCollatorForTokenClassification"),
    flat(""),
    flat(", no positions", "no boundaries", return_position_ids=False),
    flat(", offsets", return_flash_attn_kwargs=True),
    flat(", offsets alone", return_position_ids=False, return_flash_attn_kwargs=True),
    flat(", seq_idx", return_seq_idx=True),
    flat(", all options", return_flash_attn_kwargs=True, return_seq_idx=True),
    producer("hf default_data_collator", HF, fixed, ONE_SEQUENCE, collate="transformers"),
    producer("torch default_collate", (), fixed, ONE_SEQUENCE, collate="torch"),
    producer("trl SFT", TRL, sft, RIGHT),
    producer("trl SFT, to 8, positions", TRL, sft, RIGHT, pad_to_multiple_of=8, return_position_ids=True),
    producer("trl SFT padding free", TRL, sft, FLAT, flat=True),
    producer("trl SFT padding free, to 8", TRL, sft, FLAT, flat=True, pad_to_multiple_of=8),
    producer("trl SFT packed, padding free", TRL, sft, FLAT, flat=True, packed=True, return_position_ids=True),
    producer("trl SFT packed, rows", TRL, sft, FLAT, packed=True, return_position_ids=True),
    producer("trl DPO", TRL, preference, RIGHT),
    producer("trl GRPO pads", TRL, prompts_and_completions, SIDED),
    producer("trl flush_left", TRL, prompts_and_completions, SIDED, flush=True),
]
