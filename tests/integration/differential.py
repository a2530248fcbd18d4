"""Law 18, no harm: what plain transformers computes right is right with us, or refused for a reason that stands in a list.

A case is drawn from a seed: a family, its head, a side, an attention implementation, an option of the call, a wrapper. It
runs without us and by every door, and each result is compared with every sample alone: outputs, loss and gradient. Of what
is out of scope (encoders, two sides, learned tokens, attention to both sides) every door must give what plain transformers
gives, right or wrong.
"""

from __future__ import annotations

import copy
import inspect
import random
import re
import sys
import warnings
from dataclasses import dataclass, field, replace
from functools import cache

import tiny_vision
import torch
import transformers
from torch import nn

from collate_npu import BatchAdapter, CollateError, PaddingCollator, adapt, wrap_collator
from collate_npu.consumers.model_traits import out_of_scope_reason, text_config
from collate_npu.consumers.tiny_models import make_honest, quiet
from collate_npu.testing import hybrid_model_types, tiny_config

VOCAB, PAD, WINDOW = 61, 60, 6
LARGE = 20e6
"""Parameters; what has more is not tiny."""
OUTPUTS, LOSS, GRADIENT = 2e-4, 1e-4, 2e-3
"""Rounding, relative. A wrong mask moves the first by 0.1 and more."""

IN_PLACE = (
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart", "prophetnet",
    "roberta-prelayernorm", "trocr", "xlnet",
)  # fmt: skip
"""Their decoders take labels that are moved already."""
auto = transformers.models.auto.modeling_auto
FAMILIES = {
    "decoder": sorted(
        {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*hybrid_model_types()} - {*auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
    ),
    "hybrid": hybrid_model_types(),
    "encoder": sorted(auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "encoder-decoder": sorted(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "vision": sorted(tiny_vision.MODELS),
}
HEADS = {
    "decoder": ("CausalLM", "CausalLM", "CausalLM", "base", "SequenceClassification", "TokenClassification"),
    "hybrid": ("CausalLM", "CausalLM", "base", "SequenceClassification"),
    "encoder": ("MaskedLM", "base", "base", "QuestionAnswering", "MultipleChoice", "TokenClassification"),
    "encoder-decoder": ("Seq2SeqLM",),
    "vision": ("ImageTextToText",),
}
OPTIONS = ("none", "none", "none", "is_causal", "config.is_causal", "router", "config.router", "use_cache", "cache", "keep")
OPTIONS += ("embeds", "attentions", "states", "generate", "static", "chunks", "config.ahead")
AHEAD = ("gemma", "gemma2", "gemma3_text")
"""Families whose layers follow `use_bidirectional_attention`, as of EmbeddingGemma."""
GENERATE = ("generate", "static", "chunks")
WRAPPERS = ("none", "none", "none", "checkpointing", "lora", "prefix", "prompt", "p-tuning", "compiled")
TUNERS = ("prefix", "prompt", "p-tuning")
"""They put virtual tokens before a sample's own."""
DOORS = ("collator", "wrapped", "adapter", "adapt")
SEQ2SEQ_SIZES = {
    **dict.fromkeys(("d_model", "hidden_size"), 32), "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_decoder_layers": 1,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_heads": 2,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "attention_window": 8, "block_size": 8, "num_random_blocks": 1,
    "num_encoder_layers": 1, "max_position_embeddings": 128, "num_global_tokens": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    kind: str
    family: str
    head: str
    side: str
    """"left", "right", or "packed": one row, positions that restart, no mask."""
    attn: str
    option: str
    wrapper: str
    lengths: tuple[int, ...]
    prompt: int
    """So many first labels of each sample are ignored."""
    labels_side: str
    seed: int = field(compare=False)
    stranger: str = ""
    """"places": positions by place beside the mask; with it, or with "ids", packed rows have packing ids for a mask."""
    tail: int | None = None
    """A collator pads a packed row to a multiple of this."""


def drawn(seed: int, **fixed) -> Case:
    draw = random.Random(seed)
    while True:
        kind = fixed.get("kind") or draw.choice(sorted(FAMILIES))
        fields = {
            "kind": kind,
            "family": draw.choice(FAMILIES[kind]),
            "head": draw.choice(HEADS[kind]),
            "side": draw.choice(("left", "right", "right", "packed")),
            "attn": draw.choice(("sdpa", "sdpa", "eager")),
            "option": draw.choice(OPTIONS),
            "wrapper": draw.choice(WRAPPERS),
            "lengths": tuple(draw.sample(range(2, 17), draw.randint(1, 4))),
            "prompt": draw.choice((0, 0, 1)),
            "labels_side": draw.choice(("right", "right", "left")),
        }
        case = Case(**(fields | fixed), seed=seed)
        if makes_sense(case):
            return case


def makes_sense(case: Case) -> bool:
    """Does anybody run it so, and is it known what is right?"""
    of_tokens = case.head in ("CausalLM", "MaskedLM", "base", "TokenClassification")
    tuned = case.wrapper in (*TUNERS, "lora")
    return not (
        (tuned and case.head not in ("CausalLM", "Seq2SeqLM"))
        or (case.wrapper in TUNERS and (case.option != "none" or case.side == "packed"))
        or (case.option in GENERATE and (case.head not in ("CausalLM", "Seq2SeqLM") or case.wrapper == "checkpointing"))
        or (case.option in (*GENERATE, "keep") and case.side != "left")
        or (case.option in ("keep", "router", "config.router") and case.head != "CausalLM")
        or (case.side == "packed" and (not of_tokens or case.option in ("cache", "use_cache")))
        or (case.side == "packed" and "router" in case.option)  # whose groups are the rows
        or (case.kind.startswith("encoder") and case.option not in ("none", "attentions", "states", "generate", "embeds"))
        or (case.kind == "encoder-decoder" and case.option == "embeds")
        or (case.option == "config.ahead" and case.family not in AHEAD)
        or (case.head == "MultipleChoice" and case.option == "embeds")
        or (case.kind == "vision" and case.option not in ("none", "states", "use_cache"))
        or (case.kind == "vision" and (tuned or case.wrapper in ("compiled", *TUNERS) or case.side == "packed"))
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


@cache
def model_of(family: str, head: str, attn: str, ahead: bool = False) -> nn.Module:
    """A tiny one, honest: a wrong mask shows. Raises whatever transformers raises for a family that does not build so."""
    if family in tiny_vision.MODELS:
        return tiny_vision.vision_model(family)
    config = copy.deepcopy(config_of(family))
    config.num_labels, config.classifier_dropout = 3, 0.0
    if ahead:
        config.use_bidirectional_attention = True
    for each in {id(each): each for each in (config, text_config(config))}.values():
        for name, value in vars(each).items():  # in train mode too, a sample has one answer
            if re.search("drop|jitter", name) and isinstance(value, float):
                setattr(each, name, 0.0)
    Auto = getattr(transformers, "AutoModel" if head == "base" else f"AutoModelFor{head}")
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


def wrapped(case: Case) -> nn.Module:
    """The model as its user runs it, and nobody else's."""
    model = copy.deepcopy(model_of(case.family, case.head, case.attn, case.option.startswith("config.ahead")))
    text = text_config(model.config)
    if case.option in ("config.is_causal", "config.ahead, is_causal"):
        text.is_causal = False
    if case.option == "config.router":
        text.output_router_logits = True
    if case.wrapper == "checkpointing":
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    elif case.wrapper == "compiled":
        torch._dynamo.reset()
        model.compile(backend="eager")
    elif case.wrapper != "none":
        import peft

        task = {"CausalLM": "CAUSAL_LM", "Seq2SeqLM": "SEQ_2_SEQ_LM", "base": "FEATURE_EXTRACTION"}[case.head]
        kinds = {
            "lora": lambda: peft.LoraConfig(task_type=task, target_modules="all-linear", init_lora_weights=False),
            "prefix": lambda: peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=3),
            "prompt": lambda: peft.PromptTuningConfig(task_type=task, num_virtual_tokens=3),
            "p-tuning": lambda: peft.PromptEncoderConfig(task_type=task, num_virtual_tokens=3, encoder_hidden_size=16),
        }
        torch.manual_seed(1)
        model = peft.get_peft_model(model, kinds[case.wrapper]())
    return model


def inner(model) -> nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


# --- samples, batches


def samples_of(case: Case) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(case.seed)
    if case.kind == "vision":
        images = ((4, 4), None, (4, 8), (4, 4))
        found = [tiny_vision.sample(n + 3, seed=case.seed + n, image=image) for n, image in zip(case.lengths, images)]
        return [{**row, "labels": [-100] * case.prompt + row["input_ids"][case.prompt :]} for row in found]
    rows = []
    for n in case.lengths:
        ids = torch.randint(3, PAD, (n,), generator=generator).tolist()
        row = {"input_ids": ids}
        if case.head in ("CausalLM", "MaskedLM"):
            row["labels"] = [-100] * case.prompt + ids[case.prompt :]
        elif case.head == "TokenClassification":
            row["labels"] = [token % 3 for token in ids]
        elif case.head == "SequenceClassification":
            row["labels"] = n % 3
        elif case.head == "Seq2SeqLM":
            row["labels"] = torch.randint(3, PAD, (2 + n % 5,), generator=generator).tolist()
        rows.append(row)
    return rows


def batch_of(case: Case, rows, side: str) -> dict[str, torch.Tensor]:
    """As transformers' DataCollatorForSeq2Seq pads, or DataCollatorWithFlattening joins."""
    one_label = [row for row in rows if isinstance(row.get("labels"), int)]
    if side == "packed":
        ids = [x for row in rows for x in row["input_ids"]]
        out = {"input_ids": torch.tensor([ids])}
        if case.stranger:
            numbered = [n for n, row in enumerate(rows, 1) for _ in row["input_ids"]]
            joined = [y for row in rows for y in row["labels"]]
            out |= {"attention_mask": torch.tensor([numbered]), "labels": torch.tensor([joined])}
            return out | ({"position_ids": torch.arange(len(ids))[None]} if case.stranger == "places" else {})
        out["position_ids"] = torch.tensor([[n for row in rows for n in range(len(row["input_ids"]))]])
        if "labels" in rows[0] and not one_label:
            first = [-100 if case.head == "CausalLM" else None]
            joined = [y for row in rows for y in [*(first if first[0] else row["labels"][:1]), *row["labels"][1:]]]
            out["labels"] = torch.tensor([joined])
        return out
    pad = tiny_vision.PAD if "mm_token_type_ids" in rows[0] else PAD
    out = {"input_ids": padded([row["input_ids"] for row in rows], pad, side)}
    if pad != PAD:
        out["mm_token_type_ids"] = padded([row["mm_token_type_ids"] for row in rows], 0, side)
        seen = [row for row in rows if "pixel_values" in row]
        out |= {key: torch.cat([row[key] for row in seen]) for key in ("pixel_values", "image_grid_thw") if seen}
    out["attention_mask"] = padded([[1] * len(row["input_ids"]) for row in rows], 0, side)
    if case.stranger == "places":
        out["position_ids"] = torch.arange(out["input_ids"].shape[1]).expand_as(out["input_ids"]).clone()
    if one_label:
        out["labels"] = torch.tensor([row["labels"] for row in rows])
    elif "labels" in rows[0]:
        where = case.labels_side if case.head == "Seq2SeqLM" else side
        out["labels"] = padded([row["labels"] for row in rows], -100, where)
    if case.head == "MultipleChoice":  # two choices a sample, the second the first turned round
        other = padded([row["input_ids"][::-1] for row in rows], PAD, side)
        out = {key: torch.stack([value, other if key == "input_ids" else value], 1) for key, value in out.items()}
        out["labels"] = torch.tensor([len(row["input_ids"]) % 2 for row in rows])
    return out


def padded(rows, fill, side):
    width = max(map(len, rows))
    pads = [[fill] * (width - len(row)) for row in rows]
    return torch.tensor([pad + row if side == "left" else row + pad for pad, row in zip(pads, rows)])


# --- one run


def call_of(case: Case, model) -> dict:
    """Keywords of the call beside the batch."""
    given = {"use_cache": case.option == "use_cache"} if "use_cache" in parameters(inner(model)) else {}
    if case.option == "is_causal":
        given["is_causal"] = False
    if case.option == "router":
        given["output_router_logits"] = True
    if case.option == "cache":
        given |= {"past_key_values": transformers.DynamicCache(config=inner(model).config), "use_cache": True}
    if case.option == "attentions":
        given["output_attentions"] = True
    if case.option == "states":
        given |= {"output_hidden_states": True, "return_dict": True}
    if case.option == "keep":
        given["logits_to_keep"] = 1
    return given


def parameters(model):
    return inspect.signature(type(model).forward).parameters


def run(case: Case, model, batch, lengths, sides: str):
    """`(answers of each sample, what is summed up over the samples, their number)` of one call."""
    batch, call = dict(batch), call_of(case, model)
    if case.option == "keep":
        batch.pop("labels", None)
    if case.option == "embeds" and "input_ids" in batch:
        batch["inputs_embeds"] = inner(model).get_input_embeddings()(batch.pop("input_ids"))
    out = model(**(call | batch))
    answer = out.get("logits", out.get("last_hidden_state", out.get("start_logits")))
    if answer is None:
        answer = out[0]
    return out, pieces(case, answer, lengths, sides)


def pieces(case, answer, lengths, side):
    """The part of each sample in an answer for all."""
    if case.head in ("SequenceClassification", "MultipleChoice"):
        return list(answer)
    if case.option == "keep":
        return [row[-1:] for row in answer] if side == "left" else []
    if case.head == "Seq2SeqLM":  # its answers are the decoder's
        return []
    if side == "packed":
        return list(answer[0, : sum(lengths)].split(list(lengths)))  # a tail may follow
    extra = answer.shape[1] - max(lengths)  # tokens that a tuner put before
    width = answer.shape[1]
    return [row[width - n :] if side == "left" else row[extra : extra + n] for row, n in zip(answer, lengths)]


def read(answers, first: int) -> torch.Tensor:
    """A number that each real token has a part in, and the gradient of each with it."""
    total = torch.zeros(())
    for n, answer in enumerate(answers, first):
        weights = torch.randn(answer.shape, generator=torch.Generator().manual_seed(n))
        total = total + (answer * weights).sum()
    return total


def targets(case: Case, row) -> int:
    if not isinstance(row.get("labels"), list):
        return 1
    in_place = case.family in IN_PLACE or case.wrapper in ("prompt", "p-tuning")
    shifted = case.head in ("CausalLM", "ImageTextToText") and not in_place
    return sum(y >= 0 for y in row["labels"][shifted:])


def has_loss(case: Case) -> bool:
    return case.head not in ("base", "QuestionAnswering") and case.option != "keep"


def aux_of(model, outs) -> torch.Tensor | None:
    """The router's loss of all real tokens together, by the family's own function."""
    config = text_config(inner(model).config)
    function = vars(sys.modules[type(inner(model)).__module__]).get("load_balancing_loss_func")
    if function is None or any(out.get("router_logits") is None for out in outs):
        return None
    layers = [torch.cat(parts) for parts in zip(*(out.router_logits for out in outs))]
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    aux = function(tuple(layers), experts, config.num_experts_per_tok)
    return config.router_aux_loss_coef * aux


def numbers(case, model, answers, loss) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    if loss.requires_grad:
        loss.backward()
    grads = [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in model.parameters()]
    told = loss.detach() if has_loss(case) else torch.zeros(())  # a sum of answers may cancel
    return [torch.cat([x.detach().flatten() for x in answers] or [torch.zeros(1)]), told, torch.cat(grads)]


def alone(case: Case, model, rows) -> list[torch.Tensor]:
    outs, answers, total, count = [], [], torch.zeros(()), sum(targets(case, row) for row in rows)
    for n, row in enumerate(rows):
        single = batch_of(replace(case, stranger=""), [row], "right")
        out, own = run(case, model, single, [len(row["input_ids"])], "left")
        outs.append(out)
        answers += own
        if has_loss(case):
            aux = out.get("aux_loss")
            mine = out.loss - (text_config(inner(model).config).router_aux_loss_coef * aux if aux is not None else 0)
            total = total + (mine * targets(case, row) / count if targets(case, row) else 0)
        else:
            total = total + read(own, n)
    if has_loss(case) and (aux := aux_of(model, outs)) is not None:
        total = total + aux
    elif has_loss(case) and any(out.get("aux_loss") is not None for out in outs):
        raise NotImplementedError("no function of its router's loss")
    return numbers(case, model, answers, total)


def whole(case: Case, model, batch, rows, side) -> list[torch.Tensor]:
    out, answers = run(case, model, batch, [len(row["input_ids"]) for row in rows], side)
    return numbers(case, model, answers, out.loss if has_loss(case) else read(answers, 0))


def generated(case: Case, model, batch) -> list[torch.Tensor]:
    more = {"static": {"cache_implementation": "static"}, "chunks": {"prefill_chunk_size": 5}}.get(case.option, {})
    given = {key: value for key, value in batch.items() if key != "labels"}
    with torch.no_grad():
        out = model.generate(
            **given, max_new_tokens=3, min_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True,
            disable_compile=True, **more,
        )  # fmt: skip
    return [torch.stack(out.logits, 1), torch.zeros(()), torch.zeros(1)]


def through(door: str, case: Case, model, batch, rows, side):
    act = (
        (lambda given: generated(case, model, given))
        if case.option in GENERATE
        else (lambda given: whole(case, model, given, rows, side))
    )
    if door == "plain":
        return act(batch)
    if door == "adapt":
        with adapt(model):
            return act(batch)
    call = {"is_causal": False} if case.option == "is_causal" else {}  # of a call a batch must be told
    if door == "adapter":
        return act(BatchAdapter(model, padding_free=side == "packed")(batch | call))
    if door == "wrapped":
        return act(wrap_collator(lambda _: batch | call, model=model)(rows))
    where = {"padding_free": True, "pad_to_multiple_of": case.tail} if side == "packed" else {"padding_side": side}
    pad = tiny_vision.PAD if case.kind == "vision" else PAD
    return act(PaddingCollator(pad_token_id=pad, model=model, **where)(rows))


def verdict(found, wanted) -> str:
    for mine, own, most in zip(found, wanted, (OUTPUTS, LOSS, GRADIENT)):
        if mine.shape != own.shape or not float((mine - own).norm()) <= most * max(float(own.norm()), 1e-3):
            return "wrong"
    return "right"


class SkippedError(Exception):
    """This case is none: the family does not build so, or has no such option."""


def judged(case: Case, doors: tuple[str, ...] = ("plain", *DOORS)) -> dict[str, tuple[str, str]]:
    """Door -> ("right", "wrong" or "refused", and why): also of plain transformers, under "plain"."""
    rows, found = samples_of(case), {}
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        try:
            model = wrapped(case)
            left = out_of_scope_reason(model) != "" or case.option == "is_causal"
            if left:
                wanted = through("plain", case, model, batch_of(case, rows, case.side), rows, case.side)
            elif case.option in GENERATE:
                own = [batch_of(case, [row], "left") for row in rows]
                each = [generated(case, model, one) for one in own]
                whole_prompt = (generated(replace(case, option="generate"), model, one) for one in own)
                if case.option == "chunks" and "wrong" in map(verdict, each, whole_prompt):
                    raise SkippedError("a prompt in chunks gives other logits, alone too")
                wanted = [torch.cat([one[0] for one in each]), *each[0][1:]]
            else:
                wanted = alone(case, model, rows)
            if not all(bool(x.isfinite().all()) for x in wanted):
                raise SkippedError("not finite alone")
        except SkippedError:
            raise
        except Exception as error:
            raise SkippedError(f"{type(error).__name__}: {error}"[:90]) from None
        for door in doors:
            batch = batch_of(case, rows, case.side)
            if case.option == "embeds":
                batch["inputs_embeds"] = inner(model).get_input_embeddings()(batch.pop("input_ids"))
            if door == "collator" and (case.head in ("MultipleChoice", "Seq2SeqLM") or case.option in (*GENERATE, "embeds")):
                continue
            if door == "collator" and left and case.side == "packed":  # refused when it is made
                continue
            try:
                before = {key: value.clone() for key, value in batch.items()}
                found[door] = (verdict(through(door, case, model, batch, rows, case.side), wanted), "")
                assert all(torch.equal(before[key], batch[key]) for key in before), "the batch was written to"
            except CollateError as error:
                found[door] = ("refused", f"{case.family}: {error}")
            except Exception as error:
                found[door] = ("raised", f"{type(error).__name__}: {error}")
    return found


REASONS = {"stand at neither end of their rows": "a wrapped collator finds samples in a flat row by their ids"}
"""Refusals of runs that are right without us: what they say, and why they stay."""


def harm(found) -> dict[str, str]:
    """Doors that are wrong, beside a wrong plain run too; and where plain is right those that raise something raw, or refuse
    for no listed reason."""
    bad = {}
    for door, (what, why) in found.items():
        if door == "plain" or what == "right":
            continue
        listed = any(re.search(pattern, why) for pattern in REASONS)
        if what == "wrong" or (found["plain"][0] == "right" and not (what == "refused" and listed)):
            bad[door] = f"{what}{f': {why}' if why else ''}"
        elif what == "raised" and found["plain"][0] != "raised":
            bad[door] = why
    return bad
