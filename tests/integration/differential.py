"""The runner of this folder: a family of transformers, in a layout, by a door, in a mode; and what came of it.

Each result is compared with every sample alone: outputs, loss and gradient. It is right, refused, or a fault. Of what is out
of scope (encoders, two sides, learned tokens, attention to both sides) every door must give what plain transformers gives.
"""

from __future__ import annotations

import copy
import inspect
import random
import re
import sys
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, pairwise
from typing import Any

import tiny_vision
import torch
import transformers
from in_float64 import in_float64, neighbour
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers.masking_utils import flash_attention_mask
from transformers.models.auto import modeling_auto as auto

from collate_npu import BatchAdapter, CollateError, PaddingCollator, adapt, wrap_collator
from collate_npu.consumers.model_traits import out_of_scope_reason, takes, text_config
from collate_npu.consumers.tiny_models import make_honest, quiet
from collate_npu.testing import hybrid_model_types, tiny_config

VOCAB, PAD, WINDOW, IGNORED = 61, 60, 6, -100
LARGE = 20e6
"""Parameters; what has more is not tiny."""
OUTPUTS, LOSS, GRADIENT = 2e-4, 1e-4, 2e-3
"""Rounding, relative. A wrong mask moves the first by 0.1 and more."""

IN_PLACE = (
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart", "prophetnet",
    "roberta-prelayernorm", "trocr", "xlnet",
)  # fmt: skip
"""Their decoders take labels that are moved already."""
HYBRIDS = hybrid_model_types()
DENSE = sorted({*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*HYBRIDS} - {*auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES})
"""Some build from no default config (DeepSeek V2, Ministral, Nemotron), or in no tiny size: these are skipped, saying it."""
FAMILIES = {
    "decoder": DENSE,
    "hybrid": HYBRIDS,
    "encoder": sorted(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "encoder-decoder": sorted(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "vision": [name for name in tiny_vision.MODELS if name in transformers.CONFIG_MAPPING],
}
HEADS = {
    "decoder": ("CausalLM", "CausalLM", "CausalLM", "base", "SequenceClassification", "TokenClassification"),
    "hybrid": ("CausalLM", "CausalLM", "base", "SequenceClassification"),
    "encoder": ("MaskedLM", "base", "base", "QuestionAnswering", "TokenClassification"),
    "encoder-decoder": ("Seq2SeqLM",),
    "vision": ("ImageTextToText",),
}
OPTIONS = ("none", "none", "none", "is_causal", "config.is_causal", "router", "config.router", "use_cache", "cache", "keep")
OPTIONS += ("embeds", "attentions", "states", "generate", "static", "chunks", "uncached", "config.ahead")
AHEAD = ("gemma", "gemma2", "gemma3_text")  # their layers follow `use_bidirectional_attention`, as of EmbeddingGemma
GENERATE = {"generate": {}, "uncached": {"use_cache": False}, "chunks": {"prefill_chunk_size": 5}}
GENERATE |= {"static": {"cache_implementation": "static"}}
TUNERS = ("prefix", "prompt", "p-tuning")
"""They put virtual tokens before a sample's own."""
WRAPPERS = ("none", "none", "none", "checkpointed", "lora", *TUNERS)
MODES = ("none", "trained", "checkpointed", "reentrant", "lora", "sharded")
DOORS = ("collator", "wrapped", "adapter", "adapt")
SEQ2SEQ_SIZES = {
    **dict.fromkeys(("d_model", "hidden_size"), 32), "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_decoder_layers": 1,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_heads": 2,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "attention_window": 8, "block_size": 8, "num_random_blocks": 1,
    "num_encoder_layers": 1, "max_position_embeddings": 128, "num_global_tokens": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    family: str = "llama"
    head: str = "CausalLM"
    lengths: tuple[tuple[int, ...], ...] = ((9,), (4,), (13,))
    """Of the sequences of each row."""
    side: str = "right"
    """Where padding stands: "left", "right", or in "holes" behind the first token of a row."""
    told: str = "mask"
    """By a 2D "mask", alone or with "places" or "counted" positions; by packing "ids", alone or with "ids, places"; by
    "positions" that restart, or by "segments". Samples with images may bring their "axes"."""
    more: int = 0
    """Padding that no row needs."""
    attn: str = "sdpa"
    option: str = "none"
    wrapper: str = "none"
    prompt: int | None = 0
    """So many first labels of each sample are ignored; None: there are none, and all outputs are read."""
    labels_side: str = "right"
    fields: tuple[tuple[str, Any], ...] = ()
    """Of the config."""
    tail: int | None = None
    """A collator pads a packed row to a multiple of this."""
    seed: int = 5

    @property
    def vision(self) -> bool:
        return self.family in tiny_vision.MODELS

    @property
    def packed(self) -> bool:
        return self.told == "positions" or any(len(row) > 1 for row in self.lengths)


def drawn(seed: int, kind: str = "", **fixed) -> Case:
    draw, asked = random.Random(seed), kind
    while True:
        kind = asked or draw.choice(sorted(FAMILIES))
        lengths, side = draw.sample(range(2, 17), draw.randint(1, 4)), draw.choice(("left", "right", "right", "packed"))
        lengths = draw.choice((lengths, lengths, lengths[:1] * len(lengths)))  # of one length rows have no padding
        fields = {
            "family": draw.choice(FAMILIES[kind]),
            "head": draw.choice(HEADS[kind]),
            "attn": draw.choice(("sdpa", "sdpa", "eager")),
            "option": draw.choice(OPTIONS),
            "wrapper": draw.choice(WRAPPERS),
            "prompt": draw.choice((0, 0, 1)),
            "labels_side": draw.choice(("right", "right", "left")),
        }
        if side == "packed":
            fields |= {"lengths": (tuple(lengths),), "told": "positions"}
        else:
            fields |= {"lengths": tuple((n,) for n in lengths), "side": side}
        case = Case(**(fields | fixed), seed=seed)
        if makes_sense(case, kind):
            return case


def makes_sense(case: Case, kind: str) -> bool:
    """Does anybody run it so, and is it known what is right?"""
    of_tokens = case.head in ("CausalLM", "MaskedLM", "base", "TokenClassification")
    tuned = case.wrapper in (*TUNERS, "lora")
    return not (
        (tuned and case.head not in ("CausalLM", "Seq2SeqLM"))
        or (case.wrapper in TUNERS and (case.option != "none" or case.packed))
        or (case.option in GENERATE and (case.head not in ("CausalLM", "Seq2SeqLM") or case.wrapper == "checkpointed"))
        or (case.option in (*GENERATE, "keep") and (case.side != "left" or case.packed))
        or (case.option in ("keep", "router", "config.router") and case.head != "CausalLM")
        or (case.packed and (not of_tokens or case.option in ("cache", "use_cache")))
        or (case.packed and "router" in case.option)  # whose groups are the rows
        or (kind.startswith("encoder") and case.option not in ("none", "attentions", "states", "generate", "embeds"))
        or (kind == "encoder-decoder" and case.option == "embeds")
        or (case.option == "config.ahead" and case.family not in AHEAD)
        or (case.family == "recurrent_gemma" and case.option in ("cache", "use_cache"))  # it keeps its state
        or (case.family == "rwkv" and case.option in GENERATE and len(case.lengths) > 1)  # whose next tokens mix rows
        or (case.vision and case.option not in ("none", "states", "use_cache"))
        or (case.vision and (case.wrapper in ("compiled", "lora", *TUNERS) or case.packed))
    )


# --- models


@cache
def config_of(family: str):
    with quiet():
        if family in FAMILIES["encoder-decoder"]:
            known = transformers.CONFIG_MAPPING[family]().to_dict()
            sizes = {name: size for name, size in SEQ2SEQ_SIZES.items() if known.get(name)}
            ids = {"pad_token_id": PAD, "decoder_start_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
            return transformers.CONFIG_MAPPING[family](**sizes, **ids, vocab_size=VOCAB)
        config = tiny_config(family, vocab_size=VOCAB)
    text = text_config(config)
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(text, name, None):
            setattr(text, name, WINDOW)
    return config


def built(family: str, head: str, attn: str, fields=()) -> nn.Module:
    """A tiny one, honest: a wrong mask shows. Raises whatever transformers raises for a family that does not build so."""
    if family in tiny_vision.MODELS:
        return tiny_vision.vision_model(family)
    config = copy.deepcopy(config_of(family))
    if text_config(config) is config and fields:
        config = type(config)(**config.to_dict() | dict(fields))
    config.num_labels, config.classifier_dropout = 3, 0.0
    for each in {id(each): each for each in (config, text_config(config))}.values():
        dropped = [name for name, x in vars(each).items() if re.search("drop|jitter", name) and isinstance(x, float)]
        for name, value in (*((name, 0.0) for name in dropped), *fields):  # in train mode too, a sample has one answer
            setattr(each, name, value)
    Auto = getattr(transformers, "AutoModel" if head == "base" else f"AutoModelFor{head}")
    if head == "CausalLM" and type(config) not in Auto._model_mapping:
        Auto = transformers.AutoModelForImageTextToText
    with quiet(), torch.device("meta"):
        size = sum(p.numel() for p in Auto.from_config(copy.deepcopy(config)).parameters())
    assert size < LARGE, "it is not tiny"
    with quiet(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            model = Auto.from_config(config, attn_implementation=attn).float().eval()
        except ValueError:  # a family without it, or without attention
            config._attn_implementation = "eager"
            model = Auto.from_config(config).float().eval()
        make_honest(model, 5.0)
        for part in model.modules():
            if isinstance(part, nn.Embedding) and part.weight.requires_grad:
                part.weight.normal_(std=0.3)
    return model


model_of = cache(built)


def wrapped(case: Case) -> nn.Module:
    """The model as its user runs it, and nobody else's."""
    fields = case.fields + ((("use_bidirectional_attention", True),) if case.option == "config.ahead" else ())
    key = case.family, case.head, case.attn
    model = built(*key, fields) if fields else copy.deepcopy(model_of(*key))
    text = text_config(model.config)
    if case.option == "config.is_causal":
        text.is_causal = False
    if case.option == "config.router":
        text.output_router_logits = True
    if case.wrapper in ("trained", "checkpointed", "reentrant"):
        model.train()
        if case.wrapper != "trained" and model.supports_gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": case.wrapper == "reentrant"})
            model.enable_input_require_grads()
    elif case.wrapper == "sharded":  # as ZeRO-3 marks parameters that ranks gather together
        for parameter in model.parameters():
            parameter.ds_id = 0
    elif case.wrapper == "compiled":
        torch._dynamo.reset()
        model.compile(backend="eager")
    elif case.wrapper != "none":
        model = tuned(case, model)
    return model


def tuned(case: Case, model: nn.Module) -> nn.Module:
    import peft

    task = {"CausalLM": "CAUSAL_LM", "Seq2SeqLM": "SEQ_2_SEQ_LM", "base": "FEATURE_EXTRACTION"}[case.head]
    kinds = {
        "lora": lambda: peft.LoraConfig(task_type=task, target_modules="all-linear", init_lora_weights=False),
        "prefix": lambda: peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=3),
        "prompt": lambda: peft.PromptTuningConfig(task_type=task, num_virtual_tokens=3),
        "p-tuning": lambda: peft.PromptEncoderConfig(task_type=task, num_virtual_tokens=3, encoder_hidden_size=16),
    }
    torch.manual_seed(1)
    return peft.get_peft_model(model, kinds[case.wrapper]()).eval()


def inner(model) -> nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


BY_OFFSETS = "by_offsets"
"""Attention as a flash kernel reads a batch: by offsets, or a 2D mask, or a row each. A tail is not written."""


def by_offsets(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, **_):
    groups, out = query.shape[1] // key.shape[1], torch.zeros_like(query)
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    for b in range(len(query)):
        spans = list(pairwise([0, query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()))
        places = [torch.arange(*span) for span in spans]
        if attention_mask is not None:
            places = [attention_mask[b].nonzero().flatten()]
        else:
            out[b, :, spans[-1][1] :] = torch.nan
        for at in filter(len, places):
            out[b, :, at] = sdpa(query[b, :, at], key[b, :, at], value[b, :, at], is_causal=True, scale=scaling)
    return out.transpose(1, 2), None


transformers.AttentionInterface.register(BY_OFFSETS, by_offsets)
transformers.AttentionMaskInterface.register(BY_OFFSETS, flash_attention_mask)


# --- samples, batches


def samples_of(case: Case) -> list[dict[str, Any]]:
    lengths, generator = [*chain(*case.lengths)], torch.Generator().manual_seed(case.seed)
    if case.vision:
        images = ((4, 4), None, (4, 8), (4, 4)) if case.told != "segments" else (None,) * len(lengths)
        found = [tiny_vision.sample(n + 3, seed=case.seed + n, image=image) for n, image in zip(lengths, images)]
        for row in found:
            if case.prompt is not None:
                row["labels"] = [IGNORED] * case.prompt + row["input_ids"][case.prompt :]
            if case.told == "axes":  # as a template computes positions; it sends no types
                row["position_ids"] = tiny_vision.axes(model_of(case.family, case.head, case.attn), row)
        return found
    rows = []
    for n in lengths:
        ids = torch.randint(3, PAD, (n,), generator=generator).tolist()
        row = {"input_ids": ids}
        if case.head in ("CausalLM", "MaskedLM") and case.prompt is not None:
            row["labels"] = [IGNORED] * min(case.prompt, n) + ids[case.prompt :]
        elif case.head == "TokenClassification":
            row["labels"] = [token % 3 for token in ids]
        elif case.head == "SequenceClassification":
            row["labels"] = n % 3
        elif case.head == "Seq2SeqLM":
            row["labels"] = torch.randint(3, PAD, (2 + n % 5,), generator=generator).tolist()
        rows.append(row)
    return rows


def batch_of(case: Case, rows) -> dict[str, torch.Tensor]:
    """As transformers' DataCollatorForSeq2Seq pads, DataCollatorWithFlattening joins, or a packing trainer lays out."""
    lay = lambda values, fill: laid(case, values, fill)  # noqa: E731
    real = lay([[1] * len(row["input_ids"]) for row in rows], 0)
    out = {"input_ids": lay([row["input_ids"] for row in rows], tiny_vision.PAD if case.vision else PAD)}
    if case.vision:
        out["mm_token_type_ids"] = lay([row["mm_token_type_ids"] for row in rows], 0)
        seen = [row for row in rows if "pixel_values" in row]
        out |= {key: torch.cat([row[key] for row in seen]) for key in ("pixel_values", "image_grid_thw") if seen}
    if case.told == "segments":
        out["segment_ids"] = numbered(case, rows)
    elif case.told != "positions":
        out["attention_mask"] = numbered(case, rows) if "ids" in case.told else real
    if case.told == "positions":
        out["position_ids"] = lay([[*range(len(row["input_ids"]))] for row in rows], 0)
    elif case.told == "counted":
        out["position_ids"] = (real.cumsum(1) - 1).clamp(min=0)
    elif "places" in case.told:
        out["position_ids"] = torch.arange(real.shape[1]).repeat(len(real), 1)
    labels = [row.get("labels") for row in rows]
    if isinstance(labels[0], int):
        out["labels"] = torch.tensor(labels)
    elif case.head == "Seq2SeqLM":
        width = max(map(len, labels))
        out["labels"] = torch.tensor([spread(each, width, IGNORED, case.labels_side) for each in labels])
    elif labels[0] is not None:
        if case.told == "positions" and case.head == "CausalLM" and case.family not in IN_PLACE:
            labels = [[IGNORED, *each[1:]] for each in labels]
        out["labels"] = lay(labels, IGNORED)
    return out


def laid(case: Case, values, fill) -> torch.Tensor:
    """The values of each sample in the rows of the case."""
    each = iter(values)
    rows = [[*chain.from_iterable(next(each) for _ in row)] for row in case.lengths]
    return torch.tensor([spread(row, max(map(len, rows)) + case.more, fill, case.side) for row in rows])


def spread(row, width, fill, side):
    pads, cut = [fill] * (width - len(row)), {"left": 0, "right": len(row), "holes": 1}[side]
    return [*row[:cut], *pads, *row[cut:]]


def numbered(case: Case, rows) -> torch.Tensor:
    """Which sequence of its row each place is of; 0: padding."""
    numbers = chain.from_iterable(range(1, len(row) + 1) for row in case.lengths)
    return laid(case, [[n] * len(row["input_ids"]) for n, row in zip(numbers, rows)], 0)


def places_of(case: Case, rows) -> list[torch.Tensor]:
    """The places `[L]` of each sample in the batch `[B * S]`."""
    number = laid(case, [[n] * len(row["input_ids"]) for n, row in enumerate(rows, 1)], 0).flatten()
    return [(number == n).nonzero().flatten() for n in range(1, len(rows) + 1)]


# --- one run


def call_of(case: Case, model) -> dict:
    """Keywords of the call beside the batch."""
    given = {"use_cache": case.option == "use_cache"} if "use_cache" in parameters(inner(model)) else {}
    asked = {
        "is_causal": {"is_causal": False},
        "router": {"output_router_logits": True},
        "attentions": {"output_attentions": True},
        "states": {"output_hidden_states": True, "return_dict": True},
        "keep": {"logits_to_keep": 1},
    }
    if case.option == "cache":
        given |= {"past_key_values": transformers.DynamicCache(config=inner(model).config), "use_cache": True}
    return given | asked.get(case.option, {})


def parameters(model):
    return inspect.signature(type(model).forward).parameters


def run(case: Case, model, batch, rows):
    """`(output, answers of each sample)` of one call."""
    batch = {key: value for key, value in batch.items() if case.option != "keep" or key != "labels"}
    if case.option == "embeds" and "input_ids" in batch:
        batch["inputs_embeds"] = inner(model).get_input_embeddings()(batch.pop("input_ids"))
    if case.vision:
        batch = tiny_vision.taken(model, batch)
    out = model(**(call_of(case, model) | batch))
    named = [out[key] for key in ("logits", "last_hidden_state", "start_logits") if out.get(key) is not None]
    return out, pieces(case, [*named, out[0]][0], rows)


def pieces(case: Case, answer, rows):
    """The part of each sample in an answer for all."""
    if case.head == "SequenceClassification":
        return list(answer)
    if case.option == "keep":
        return [row[-1:] for row in answer] if case.side == "left" or len(rows) == 1 else []
    if case.head == "Seq2SeqLM":  # its answers are the decoder's
        return []
    if case.wrapper in TUNERS:  # tokens that it put before
        answer = answer[:, -laid(case, [row["input_ids"] for row in rows], 0).shape[1] :]
    flat = answer.flatten(0, 1)
    return [flat[at] for at in places_of(case, rows)]


def read(answers, first: int) -> torch.Tensor:
    """A number that each real token has a part in, and the gradient of each with it."""
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(n)) for n, x in enumerate(answers, first)]
    return sum(((x * w).sum() for x, w in zip(answers, weights)), torch.zeros(()))


def targets(case: Case, row) -> int:
    if not isinstance(row.get("labels"), list):
        return 1
    in_place = case.family in IN_PLACE or case.wrapper in ("prompt", "p-tuning")
    shifted = case.head in ("CausalLM", "ImageTextToText") and not in_place
    return sum(y >= 0 for y in row["labels"][shifted:])


def has_loss(case: Case) -> bool:
    return case.head not in ("base", "QuestionAnswering") and case.option != "keep" and case.prompt is not None


def aux_of(model, outs) -> torch.Tensor | None:
    """The router's loss of all real tokens together, by the family's own function."""
    config = text_config(inner(model).config)
    function = vars(sys.modules[type(inner(model)).__module__]).get("load_balancing_loss_func")
    if function is None or any(out.get("router_logits") is None for out in outs):
        return None
    layers = [torch.cat(parts) for parts in zip(*(out.router_logits for out in outs))]
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    return config.router_aux_loss_coef * function(tuple(layers), experts, config.num_experts_per_tok)


def measured(case, model, answers, loss) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    if loss.requires_grad:
        loss.backward()
    grads = [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in model.parameters()]
    told = loss.detach() if has_loss(case) else torch.zeros(())  # a sum of answers may cancel
    return [torch.cat([x.detach().flatten() for x in answers] or [torch.zeros(1)]), told, torch.cat(grads)]


def single(case: Case, row) -> Case:
    return replace(case, lengths=((len(row["input_ids"]),),), side="right", more=0, told="mask")


def alone(case: Case, model, rows) -> list[torch.Tensor]:
    outs, answers, total, count = [], [], torch.zeros(()), sum(targets(case, row) for row in rows)
    for n, row in enumerate(rows):
        own = single(case, row)
        out, answer = run(own, model, batch_of(own, [row]), [row])
        outs.append(out)
        answers += answer
        if has_loss(case):
            aux = out.get("aux_loss")
            mine = out.loss - (text_config(inner(model).config).router_aux_loss_coef * aux if aux is not None else 0)
            total = total + (mine * targets(case, row) / count if targets(case, row) else 0)
        else:
            total = total + read(answer, n)
    if has_loss(case) and (aux := aux_of(model, outs)) is not None:
        total = total + aux
    elif has_loss(case) and any(out.get("aux_loss") is not None for out in outs):
        raise NotImplementedError("no function of its router's loss")
    return measured(case, model, answers, total)


def generated(case: Case, model, batch) -> list[torch.Tensor]:
    given = {key: value for key, value in batch.items() if key != "labels"}
    vars(inner(model)).pop("_previous_max_cache_length", None)  # gpt_neo's windows are wrong in a static cache with room
    with torch.no_grad():
        out = model.generate(
            **given, max_new_tokens=3, min_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True,
            disable_compile=True, **GENERATE[case.option],
        )  # fmt: skip
    return [torch.stack(out.logits, 1), torch.zeros(()), torch.zeros(1)]


def generated_alone(case: Case, model, rows) -> list[torch.Tensor]:
    own = [batch_of(single(case, row), [row]) for row in rows]
    each = [generated(case, model, one) for one in own]
    whole_prompt = (generated(replace(case, option="generate"), model, one) for one in own)
    if case.option == "chunks" and "wrong" in map(verdict, each, whole_prompt):
        raise SkippedError("a prompt in chunks gives other logits, alone too")
    return [torch.cat([one[0] for one in each]), *each[0][1:]]


# --- doors


def made(door: str, case: Case, model, rows, batch) -> dict[str, torch.Tensor]:
    """The batch as it comes out of this door."""
    call = {"is_causal": False} if case.option == "is_causal" else {}  # of a call a batch must be told
    if door in ("adapter", "config"):
        named = {"model": model.config, "consumer": "transformers"} if door == "config" else {"model": model}
        return BatchAdapter(**named, padding_free=case.packed and len(case.lengths) == 1)(batch | call)
    if door == "wrapped":
        return wrap_collator(lambda _: batch | call, model=model)(rows)
    if door != "collator":
        read = takes(inner(model), "position_ids") if door == "adapt" else "position_ids" in parameters(inner(model))
        return {key: value for key, value in batch.items() if read or key != "position_ids"}
    where = {"padding_free": True, "pad_to_multiple_of": case.tail} if case.packed else {"padding_side": case.side}
    out = PaddingCollator(pad_token_id=tiny_vision.PAD if case.vision else PAD, model=model, **where)(rows)
    return {key: value for key, value in out.items() if case.told != "axes" or key != "mm_token_type_ids"}


def through(doors: str, case: Case, model, rows, batch) -> list[torch.Tensor]:
    """By one door, or a collator's and `adapt`."""
    settings = {"attn_implementation": "flash_attention_2"} if case.attn == BY_OFFSETS else {}
    with adapt(model, **settings) if "adapt" in doors.split(", ") else nullcontext():
        out = made(doors.partition(",")[0], case, model, rows, batch)
        if case.option in GENERATE:
            return generated(case, model, out)
        ours = replace(case, more=0) if "collator" in doors else case
        output, answers = run(ours, model, out, rows)
        return measured(case, model, answers, output.loss if has_loss(case) else read(answers, 0))


def has_door(door: str, case: Case, left: bool) -> bool:
    """Of what is left as it came, a collator of packed rows is refused when it is made. None is told of a call."""
    several = len(case.lengths) > 1 and case.packed
    strange = case.head == "Seq2SeqLM" or case.option in (*GENERATE, "embeds", "is_causal") or case.side == "holes"
    return not ("collator" in door and (several or strange or (left and case.packed)))


def errors(found, wanted) -> list[float]:
    """Of outputs, loss and gradient, relative."""
    if any(mine.shape != own.shape for mine, own in zip(found, wanted)):
        return [float("inf")] * 3
    far = [float((mine - own).norm()) / max(float(own.norm()), 1e-3) for mine, own in zip(found, wanted)]
    return [each if each == each else float("inf") for each in far]


def verdict(found, wanted) -> str:
    within = all(far <= most for far, most in zip(errors(found, wanted), (OUTPUTS, LOSS, GRADIENT)))
    return "right" if within else "wrong"


def by_rounding(case: Case, found, model, rows) -> bool:
    """Is it three times as far from float64 as each alone by the worst of nine roundings? One may be small."""
    model = model.eval()
    exact = in_float64(model, lambda wide: alone(case, wide, rows))
    own = [errors(alone(case, each, rows), exact) for each in (model, *(neighbour(model, seed) for seed in range(8)))]
    limits = zip(errors(found, exact), (OUTPUTS, LOSS, GRADIENT), map(max, *own))
    return all(far <= max(within, 3 * most) for far, within, most in limits)


class SkippedError(Exception):
    """This case is none: the family does not build so, or has no such option."""


def wanted_of(case: Case, model, rows, left: bool) -> list[torch.Tensor]:
    if left:
        return through("plain", case, model, rows, batch_of(case, rows))
    if case.option in GENERATE:
        return generated_alone(case, model, rows)
    found = alone(case, model, rows)
    if not all(bool(x.isfinite().all()) for x in found):
        raise SkippedError("not finite alone")
    return found


def judged(case: Case, doors: tuple[str, ...] = ("plain", *DOORS)) -> dict[str, tuple[str, str]]:
    """Door -> ("right", "wrong" or "refused", and why): also of plain transformers, under "plain"."""
    rows, found = samples_of(case), {}
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        try:
            model = wrapped(case)
            left = out_of_scope_reason(model) != "" or case.option == "is_causal"
            if left and case.told == "counted":  # where nobody else gives positions
                rows = [row | {"position_ids": [*range(len(row["input_ids"]))]} for row in rows]
            wanted = wanted_of(case, model, rows, left)
        except SkippedError:
            raise
        except Exception as error:
            raise SkippedError(f"{type(error).__name__}: {error}"[:90]) from None
        for door in (door for door in doors if has_door(door, case, left)):
            batch = batch_of(case, rows)
            if case.option == "embeds":
                batch["inputs_embeds"] = inner(model).get_input_embeddings()(batch.pop("input_ids"))
            try:
                before = {key: value.clone() for key, value in batch.items()}
                numbers = through(door, case, model, rows, batch)
                found[door] = (verdict(numbers, wanted), "")
                if found[door][0] == "wrong" and door != "plain" and not left and case.option not in GENERATE:
                    found[door] = ("right" if by_rounding(case, numbers, model, rows) else "wrong", "")
                assert all(torch.equal(before[key], batch[key]) for key in before), "the batch was written to"
            except CollateError as error:
                found[door] = ("refused", f"{case.family}: {error}")
            except Exception as error:
                found[door] = ("raised", f"{type(error).__name__}: {error}")
    return found
