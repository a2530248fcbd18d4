"""transformers' own masks and collators, TRL's, torch's and accelerate's, and forms that user code builds in one line.

transformers 5.x is `masking_utils`, 4.x the builders, one implementation and pattern each; `_unmask_unattended` runs on a
card alone: here it is called by hand, as 4.x calls it (modeling_attn_mask_utils.py:410). Packing of LLaMA-Factory 0.9.5 and
axolotl 0.19.0 is written here: both need more than a test environment has. It was compared once with axolotl's
`V2BatchSamplerDataCollatorForSeq2Seq` (utils.collators). Plain masks of every dtype, rank and polarity: law 2.
Legend: B rows, S width, H heads, L tokens of one sample.
"""

import importlib
from functools import cache, partial
from inspect import signature
from typing import Any

import batches
import numpy as np
import torch
from batches import ONE_SEQUENCE, PAD, SIDED, Case, Draw, Producer, case, causal, emitted, keep_2d, placed, producer, said
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask

from collate_npu import Pattern

HF, NEW, TRL, OLD = ("transformers",), ("transformers>=5",), ("trl>=1",), ("transformers.modeling_attn_mask_utils",)
WHOLE = ("packed",)
"""Positions alone cannot say where padding is, so transformers finds packed rows only where nothing is padded."""
POLARITY = {"sdpa": "keep", "eager": "bias"}
WINDOWS = {
    "sliding": ("create_sliding_window_causal_mask", "sliding_window"),
    "chunked": ("create_chunked_causal_mask", "attention_chunk_size"),
}


@cache
def config(implementation: str, **more: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    made = LlamaConfig(vocab_size=128, **sizes, **more)
    made._attn_implementation = implementation
    return made


def made(draw: Draw, name: str, implementation: str, *, two_d: bool = True, **more: Any) -> Any:
    """The mask that `masking_utils.<name>` gives for this draw."""
    from transformers import masking_utils

    settings = {key: more.pop(key) for key in ("sliding_window", "attention_chunk_size") if key in more}
    embeds = torch.zeros(*draw.shape, 1)
    function = getattr(masking_utils, name)
    given = {"config": config(implementation, **settings), "past_key_values": None, "cache": None, **more}
    given |= {"attention_mask": keep_2d(draw) if two_d else None}
    # transformers 4.57 calls the embeddings `input_embeds` and asks for the places of the cache; 5.24 renames the cache.
    given |= {"inputs_embeds": embeds, "input_embeds": embeds, "cache_position": torch.arange(draw.shape[1])}
    names = signature(function).parameters
    with torch._dynamo.config.patch(disable=True):  # flex_attention's mask is compiled otherwise, for seconds
        return function(**{key: value for key, value in given.items() if key in names})


def plain(draw: Draw, implementation: str, **more: Any) -> Case:
    mask = made(draw, "create_causal_mask", implementation, **more)
    return case(draw, mask, told={"polarity": POLARITY.get(implementation)})


def from_positions(draw: Draw, implementation: str, beside: bool = True) -> Case:
    """Packed rows that transformers finds by their positions."""
    positions = {"position_ids": batches.restarting(draw)}
    mask = made(draw, "create_causal_mask", implementation, two_d=False, **positions)
    return case(draw, mask, told={"polarity": POLARITY.get(implementation)}, **(positions if beside else {}))


def window(draw: Draw, implementation: str, pattern: str, packed: bool = False) -> Case:
    name, setting = WINDOWS[pattern]
    size = draw.number(1, draw.shape[1] + 1)
    more = {"position_ids": batches.restarting(draw)} if packed else {}
    mask = made(draw, name, implementation, two_d=not packed, **{setting: size}, **more)
    return case(draw, mask, told={**said(draw, pattern, size), "polarity": POLARITY[implementation]}, **more)


def encoder(draw: Draw, implementation: str) -> Case:
    mask = made(draw, "create_bidirectional_mask", implementation)
    return case(draw, mask, told={**said(draw, "bidirectional"), "polarity": POLARITY[implementation]})


def encoder_window(draw: Draw) -> Case:
    size, at = draw.number(1, draw.shape[1]), np.arange(draw.shape[1])
    mask = made(draw, "create_bidirectional_sliding_window_mask", "sdpa", sliding_window=size)
    both = said(draw, "bidirectional")
    attends = both["attends"] & (abs(at[:, None] - at) <= size)
    pattern = both["pattern"] if (attends == both["attends"]).all() else None
    return case(draw, mask, told={"attends": attends, "pattern": pattern, "polarity": "keep"})


def prefix_or(draw: Draw) -> Case:
    """A prefix that every token sees, through `or_mask_function`."""
    size = draw.number(0, draw.shape[1])
    first = torch.from_numpy(batches.first_places(draw.ids).max(axis=1))
    mask = made(draw, "create_causal_mask", "sdpa", or_mask_function=lambda b, h, q, k: k < first[b] + size)
    ahead = np.arange(draw.shape[1]) < first.numpy()[:, None, None] + size
    attends = causal(draw.ids) | (batches.together(draw.ids) & ahead)
    return case(draw, mask, told={"attends": attends, "pattern": Pattern.prefix(size), "polarity": "keep"})


def image_blocks(draw: Draw) -> Case:
    """Gemma 3: tokens of one image see each other, text is causal."""
    from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask

    kinds = torch.from_numpy((draw.rng.random(draw.shape) < 0.4) & draw.keep).long()
    groups = get_block_sequence_ids_for_mask(kinds)
    mask = made(draw, "create_causal_mask", "sdpa", block_sequence_ids=groups)
    blocks = groups.numpy()
    same = batches.together(draw.keep.astype(np.int64)) & (blocks >= 0)[:, :, None]
    same &= blocks[:, :, None] == blocks[:, None, :]
    told = batches.otherwise(draw, causal(draw.ids) | same)
    return case(draw, mask, told={**told, "polarity": "keep"}, token_type_ids=kinds)


def paligemma(draw: Draw) -> Case:
    """PaliGemma: `token_type_ids` 0 is prefix, in both directions; 1 is the answer (modeling_paligemma.py:258)."""
    ids, lengths = draw.ids, draw.keep.sum(axis=1)
    sizes = (lengths * draw.rng.random(len(ids))).astype(int)
    place = np.arange(ids.shape[1]) - batches.first_places(ids)
    kinds = torch.from_numpy((place >= sizes[:, None]) & draw.keep).long()
    mask = made(draw, "create_causal_mask", "sdpa", block_sequence_ids=torch.where(kinds == 0, 0, -1))
    attends = np.concatenate([batches.prefix(ids[b : b + 1], int(size)) for b, size in enumerate(sizes)])
    # One prefix for each sequence that exists: a row of padding alone has none.
    pattern = Pattern.prefix([int(size) for size, length in zip(sizes, lengths) if length] or 0)
    return case(draw, mask, told={"attends": attends, "pattern": pattern, "polarity": "keep"}, token_type_ids=kinds)


def alibi(draw: Draw, model: str) -> Case:
    """Causal, additive, with each head's own slope: `[B, H, S, S]`."""
    modeling, (B, S) = importlib.import_module(f"transformers.models.{model}.modeling_{model}"), draw.shape
    if model == "mpt":
        slopes = modeling.build_mpt_alibi_tensor(4, S).expand(B, 4, S, S)
    else:
        slopes = modeling.build_alibi_tensor(keep_2d(draw), 4, torch.float32).view(B, 4, 1, -1).expand(-1, -1, S, -1)
    blocked = made(draw, "create_causal_mask", "eager") < -1
    mask = torch.masked_fill(slopes, blocked, torch.finfo(torch.float32).min)
    return case(draw, mask, told=batches.bias_of(draw, mask))


# --- 4.x


def builders() -> Any:
    from transformers import modeling_attn_mask_utils

    return modeling_attn_mask_utils


def triangle(draw: Draw) -> Case:
    """`to_causal_4d`: no padding at all."""
    B, S = draw.shape
    mask = builders().AttentionMaskConverter(is_causal=True).to_causal_4d(B, S, S, dtype=torch.float32)
    return case(draw, mask, told={"polarity": "bias", "silent": True})


def unmasked(draw: Draw) -> Case | None:
    """Rows that attend nothing are made to attend everything; of a single place that is not to be told from a token."""
    if draw.shape[1] == 1:
        return None
    convert = builders().AttentionMaskConverter._unmask_unattended
    mask = builders()._prepare_4d_causal_attention_mask(keep_2d(draw), draw.shape, torch.zeros(*draw.shape, 1), 0)
    return case(draw, convert(mask, min_dtype=LOW), told={"polarity": "bias"})


def old_encoder(draw: Draw) -> Case:
    mask = builders()._prepare_4d_attention_mask(keep_2d(draw), torch.float32)
    return case(draw, mask, told={**said(draw, "bidirectional"), "polarity": "bias"})


# --- collators

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
    side = batches.side_of(draw)
    batch = getattr(transformers, name)(tokenizer(side, pad), **settings)([dict(feature) for feature in features])
    return emitted(draw, batch, ids=placed(draw.lengths, batch["input_ids"].shape[1], side), features=features)


def flattened(draw: Draw, **settings: Any) -> Case:
    """Every sequence of the batch in one row."""
    from transformers import DataCollatorWithFlattening

    features = features_of(draw.sequences())
    batch = DataCollatorWithFlattening(**settings)([dict(feature) for feature in features])
    return emitted(draw, batch, ids=batches.joined(features), features=features, flat=True)


def fixed(draw: Draw) -> Case:
    """Rows that were padded when they were tokenized, stacked as they are."""
    from transformers import default_data_collator

    pairs = zip(draw.tokens.tolist(), draw.keep.astype(int).tolist())
    features: list[dict[str, Any]] = [{"input_ids": tokens, "attention_mask": keep} for tokens, keep in pairs]
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


# --- torch, accelerate, user code

NEVER_EMPTY = tuple(style for style in ONE_SEQUENCE if style != "empty_row")
ACCELERATE = ("accelerate",)
LOW = torch.finfo(torch.float32).min


def document(draw: Draw, *, blocked: bool, block: bool) -> Case:
    """FlexAttention's document mask: ids compared; padding is document 0 and attends itself, or is blocked."""
    ids = torch.from_numpy(draw.ids)
    parts = [lambda b, h, q, k: q >= k, lambda b, h, q, k: ids[b, q] == ids[b, k]]
    if blocked:
        parts.append(lambda b, h, q, k: (ids[b, k] > 0) & (ids[b, q] > 0))
    B, S = draw.shape
    mask = create_mask(and_masks(*parts), B, 1, S, S, device="cpu")
    silent = batches.plain_rows(mask, draw)
    if block:
        return case(draw, create_block_mask(and_masks(*parts), B, 1, S, S, device="cpu"), told={"silent": silent})
    return case(draw, mask, told={"polarity": "keep", "silent": silent})


def flex_window(draw: Draw) -> Case:
    """A BlockMask with a window: another pattern in a form that holds no numbers."""
    B, S = draw.shape
    keep, size = keep_2d(draw, torch.bool), draw.number(1, S)
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < size) & keep[b, k], B, 1, S, S, device="cpu")
    return case(draw, mask, told=said(draw, "sliding", size))


def square_subsequent(draw: Draw, *, padded: bool) -> Case | None:
    """nn.Transformer: -inf above the diagonal, shared by all rows; the second adds the key padding to it."""
    B, S = draw.shape
    if S in (B, 1):
        return None  # in a batch, `[B, S]` has a meaning of its own
    mask = torch.nn.Transformer.generate_square_subsequent_mask(S)
    if padded:
        blocked = torch.zeros(draw.shape).masked_fill(~keep_2d(draw, torch.bool), -torch.inf)
        mask = mask + blocked[:, None, None, :]
    return case(draw, mask, told={"polarity": "bias", "silent": not padded})


def key_padding(draw: Draw) -> Case:
    """nn.TransformerEncoder's `src_key_padding_mask`: `[B, S]`, True = padding, where a keep mask is expected."""
    return case(draw, ~keep_2d(draw, torch.bool), told={"polarity": "masked", "contrary": True})


def by_hand(draw: Draw, form: str) -> Case:
    """Forms that user code builds in one line; of plain ones every dtype, rank and polarity is read in law 2."""
    square = draw.keep[:, None, None, :] & np.tri(draw.shape[1], dtype=bool)
    if form == "diagonal forced":
        mask = torch.from_numpy(square) | torch.eye(draw.shape[1], dtype=torch.bool)
        return case(draw, mask, told={"polarity": "keep", "silent": batches.plain_rows(mask, draw)})
    if form == "numpy additive":
        return case(draw, np.where(square, 0, LOW).astype(np.float32), told={"polarity": "bias"})
    return case(draw, ~square, told={"polarity": "masked"})


def key_row(draw: Draw, form: str) -> Case:
    """`[B, 1, 1, S]` of an encoder, in either polarity, or additive."""
    keep = keep_2d(draw, torch.bool)[:, None, None, :]
    mask = {"keep": keep, "masked": ~keep, "bias": torch.zeros(keep.shape).masked_fill(~keep, LOW)}[form]
    return case(draw, mask, told={**said(draw, "bidirectional"), "polarity": form})


def head_windows(draw: Draw) -> Case:
    """Each head has a window of its own."""
    mask = torch.from_numpy(np.stack([batches.sliding(draw.ids, size) for size in (1, 2, draw.shape[1])], axis=1))
    return case(draw, mask, told={"pattern": None, "polarity": "keep", "richer": not (mask == mask[:, :1]).all()})


def position_bias(draw: Draw) -> Case:
    """A learned bias of up to +-200 added to a causal mask filled with -1e4."""
    blocked = torch.from_numpy(~causal(draw.ids))[:, None]
    numbers = torch.from_numpy(draw.rng.uniform(-200, 200, (1, 1, *draw.shape[1:] * 2)).astype(np.float32))
    mask = numbers + blocked * -1e4
    return case(draw, mask, told=batches.bias_of(draw, mask))


def accelerate(draw: Draw, decoder: bool) -> Case:
    """accelerate's Megatron masks, True = blocked: of an encoder `[B, S, S]`, of a decoder `[1, S, S]` without padding."""
    from accelerate.utils.megatron_lm import T5TrainStep

    if decoder:
        return case(draw, T5TrainStep.get_decoder_mask(draw.shape[1], "cpu"), told={"polarity": "masked", "silent": True})
    mask = T5TrainStep.attn_mask_postprocess(keep_2d(draw))
    return case(draw, mask, told={**said(draw, "bidirectional"), "polarity": "masked"})


# --- packing


def numbers(draw: Draw, *, positions: bool, ones: bool = False) -> Case:
    """neat_packing's `1 1 2 2 0`, alone or with positions that restart, as axolotl's V2 collator emits it; `1 1 1 1 0` of
    axolotl's first multipack collator, where positions alone tell the sequences apart.

    Padding counts 0 (LLaMA-Factory processor/supervised.py:221, transformers' pad of `position_ids`).
    """
    more = {"position_ids": batches.restarting(draw).masked_fill(torch.from_numpy(~draw.keep), 0)} if positions else {}
    return case(draw, keep_2d(draw) if ones else torch.from_numpy(draw.ids.copy()), **more)


def hf(name: str, make: Any, /, needs: Any = HF, styles: Any = ONE_SEQUENCE, **settings: Any) -> Producer:
    return producer(f"hf {name}", needs, make, styles, **settings)


def collator(name: str, *details: str, **settings: Any) -> Producer:
    return producer(", ".join([f"hf {name}", *details]), HF, by_tokenizer, SIDED, name=name, **settings)


def flat(name: str, **settings: Any) -> Producer:
    return producer(f"hf Flattening{name}", HF, flattened, FLAT, **settings)


def row(name: str, make: Any, /, needs: Any = (), styles: Any = ONE_SEQUENCE, **settings: Any) -> Producer:
    return producer(name, needs, make, styles, **settings)


packing = partial(row, styles=(*SIDED, *sorted(batches.PACKED)))
PRODUCERS = [
    hf("causal sdpa", plain, implementation="sdpa"),
    hf("causal eager", plain, implementation="eager"),
    hf("causal flash", plain, implementation="flash_attention_2"),
    hf("causal flex", plain, implementation="flex_attention"),
    hf("packed sdpa", from_positions, implementation="sdpa", beside=False, styles=WHOLE),
    hf("packed sdpa, positions", from_positions, implementation="sdpa", styles=WHOLE),
    hf("packed eager, positions", from_positions, implementation="eager", styles=WHOLE),
    hf("packed flex, positions", from_positions, implementation="flex_attention", styles=WHOLE),
    hf("sliding sdpa", window, implementation="sdpa", pattern="sliding"),
    hf("sliding eager", window, implementation="eager", pattern="sliding"),
    hf("sliding packed", window, implementation="sdpa", pattern="sliding", packed=True, styles=WHOLE),
    hf("chunked sdpa", window, implementation="sdpa", pattern="chunked"),
    hf("chunked eager", window, implementation="eager", pattern="chunked"),
    hf("bidirectional sdpa", encoder, implementation="sdpa", needs=NEW),
    hf("bidirectional eager", encoder, implementation="eager", needs=NEW),
    hf("bidirectional sliding", encoder_window, needs=NEW),
    hf("prefix by or_mask", prefix_or, styles=SIDED),
    hf("PaliGemma prefix", paligemma, needs=NEW, styles=(*SIDED, "empty_row")),
    hf("Gemma3 image blocks", image_blocks, needs=NEW),
    *(hf(f"{model} alibi", alibi, model=model) for model in ("bloom", "mpt")),
    hf("to_causal_4d", triangle, needs=OLD, styles=SIDED),
    hf("_unmask_unattended", unmasked, needs=OLD),
    hf("_prepare_4d (encoder)", old_encoder, needs=OLD),
    collator("DataCollatorWithPadding", labels=False),
    collator("DataCollatorWithPadding", "max_length", labels=False, padding="max_length", max_length=66),
    collator("DataCollatorForSeq2Seq", pad_to_multiple_of=4),
    collator("DataCollatorForLanguageModeling", labels=False, mlm=False),
    collator("DataCollatorForLanguageModeling", "pad is eos", labels=False, mlm=False, pad="<eos>"),
    flat(""),
    flat(", no positions", return_position_ids=False),
    flat(", offsets", return_flash_attn_kwargs=True),
    flat(", offsets alone", return_position_ids=False, return_flash_attn_kwargs=True),
    flat(", seq_idx", return_seq_idx=True),
    flat(", all options", return_flash_attn_kwargs=True, return_seq_idx=True),
    producer("hf default_data_collator", HF, fixed, ONE_SEQUENCE),
    producer("trl SFT, to 8, positions", TRL, sft, RIGHT, pad_to_multiple_of=8, return_position_ids=True),
    producer("trl SFT padding free, to 8", TRL, sft, FLAT, flat=True, pad_to_multiple_of=8),
    producer("trl SFT packed, padding free", TRL, sft, FLAT, flat=True, packed=True, return_position_ids=True),
    producer("trl SFT packed, rows", TRL, sft, FLAT, packed=True, return_position_ids=True),
    producer("trl DPO", TRL, preference, RIGHT),
    producer("trl GRPO pads", TRL, prompts_and_completions, SIDED),
    producer("trl flush_left", TRL, prompts_and_completions, SIDED, flush=True),
    *(row(f"flex documents, padding {name}" + ", BlockMask" * block, document,
          styles=batches.STYLES, blocked=blocked, block=block)
      for name, blocked in (("is document 0", False), ("blocked", True)) for block in (False, True)),
    row("flex window, BlockMask", flex_window),
    row("nn.Transformer triangle", square_subsequent, padded=False, styles=NEVER_EMPTY),
    row("nn.Transformer triangle + key padding", square_subsequent, padded=True),
    row("nn key_padding_mask", key_padding),
    *(row(f"by hand: {form}", by_hand, form=form) for form in ("numpy masked", "numpy additive")),
    row("by hand: diagonal forced", by_hand, form="diagonal forced"),
    row("key row, keep", key_row, form="keep"),
    row("key row, masked", key_row, form="masked"),
    row("key row, additive", key_row, form="bias"),
    row("a window for each head", head_windows),
    row("position bias beside -1e4", position_bias),
    row("accelerate T5 encoder", accelerate, needs=ACCELERATE, decoder=False),
    row("accelerate decoder", accelerate, needs=ACCELERATE, decoder=True, styles=NEVER_EMPTY),
    packing("LLaMA-Factory neat packing", numbers, positions=False),
    packing("LLaMA-Factory and axolotl, numbers, positions", numbers, positions=True),
    packing("axolotl multipack, ones", numbers, positions=True, ones=True),
]  # fmt: skip
