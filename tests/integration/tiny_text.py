"""Tiny random causal and masked language models of dense families, honest like `collate_npu.testing.tiny_model`."""

import inspect

import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB, PAD = 99, 1
# The names that families give to the same sizes; each takes those its config has.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "ffn_dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "n_inner", "embedding_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 128),
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
WINDOW = {
    "mistral": {"sliding_window": 6},
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16},
    "llama4_text": {"attention_chunk_size": 6, "layer_types": ["chunked_attention", "full_attention"], "head_dim": 16}
    | {"num_local_experts": 2, "intermediate_size_mlp": 64, "no_rope_layers": [1, 0]},
    "longformer": {"attention_window": [8, 8]},
}


def text_model(model_type, *, causal=True, attn="sdpa", **fields):
    """Its weights scaled until a wrong mask or position moves the logits, its pad row not zero."""
    default = CONFIG_MAPPING[model_type]()
    known = set(default.to_dict())
    sizes = {name: size for name, size in SIZES.items() if name in known and default.to_dict()[name] is not None}
    config = CONFIG_MAPPING[model_type](
        **(sizes | {"pad_token_id": PAD, "vocab_size": VOCAB} | WINDOW.get(model_type, {}) | fields)
    )
    if causal and hasattr(config, "is_decoder"):
        config.is_decoder = True
    auto = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            model = auto.from_config(config, attn_implementation=attn).float().eval()
        except ValueError:  # families without sdpa
            model = auto.from_config(config, attn_implementation="eager").float().eval()
        for parameter in model.parameters():
            if parameter.ndim >= 2 and parameter.std() < 0.1:
                parameter.mul_(5.0)
        table = model.get_input_embeddings()
        table.weight[PAD].normal_(std=float(table.weight.std()))
    return model


def samples(*lengths):
    """Token ids [L] for each length, none of them the pad id."""
    return [torch.arange(n) * 7 % 90 + 5 for n in lengths]


def place(rows, where, *, hole=3):
    """The ids and the keep mask [B, S] of samples padded on a side, or with a hole in the first and shortest."""
    width = max(map(len, rows)) if where != "holes" else len(rows[0]) + hole
    ids, keep = torch.full((len(rows), width), PAD), torch.zeros(len(rows), width, dtype=torch.long)
    for b, row in enumerate(rows):
        places = torch.arange(len(row)) + (width - len(row) if where == "left" else 0)
        if where == "holes" and b == 0:
            places[4:] += hole
        ids[b, places], keep[b, places] = row, 1
    return ids, keep


@torch.no_grad()
def logits_of(model, ids, **given):
    """`use_cache` off where the model knows it: with a cache, 5.23 does not look for packed positions."""
    cached = given.pop("use_cache", False)
    if "use_cache" in inspect.signature(model.forward).parameters:
        given["use_cache"] = cached
    return model(input_ids=ids, **given).logits


def apart(model, rows, pieces):
    """The largest difference of a logit to its sample alone; NaN counts as wrong."""
    alone = [logits_of(model, row[None], attention_mask=torch.ones(1, len(row)).long())[0] for row in rows]
    return float(
        torch.cat([(a - b).abs().flatten() for a, b in zip(pieces, alone, strict=True)]).nan_to_num(torch.inf).max()
    )


def worst(model, rows, ids, keep, **given):
    """The same for padded rows."""
    logits = logits_of(model, ids, **{"attention_mask": keep, **given})
    return apart(model, rows, [row[kept > 0] for row, kept in zip(logits, keep)])
