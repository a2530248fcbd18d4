"""Checkpoints: models and tokenizers by the names that a user types, and the device that they run on.

A model type is built tiny and random; a folder is loaded with the class it was saved with. Nothing is downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from collate_npu.consumers.model_traits import out_of_scope_reason, text_config
from collate_npu.errors import CollateError, did_you_mean, explain
from collate_npu.proof.measure import check_one_stack
from collate_npu.testing import byte_tokenizer, tiny_model
from collate_npu.tools.user_code import refused

MOST_IDS = 1 << 20
"""Of a tiny model's embedding."""


def check_device(device: str, dtype: torch.dtype) -> None:
    """Refuse a device that does not compute; a pretended one (CANN stand-ins) returns zeros: every case would pass."""
    if device.startswith("npu"):
        with refused("--device", device, "An NPU needs torch_npu.", "Install it: collate-npu guide install."):
            import torch_npu  # noqa: F401
    with refused("--device", device, f"{dtype} does not compute there.", "Name a device of this machine: collate-npu env."):
        two = (torch.ones(3, device=device, dtype=dtype) + 1).float().cpu()
    if not torch.equal(two, torch.full((3,), 2.0)):
        rule = "One and one is not two there: it is a stand-in, and an audit on it would prove nothing."
        raise CollateError(explain("--device", device, rule, "Run on a real device."))


def load_model(
    name: str, attn: str, *, trust: bool, tokenizer: Path | None = None, device: str = "cpu",
    dtype: torch.dtype = torch.float32, seed: int = 0, largest_id: int = 0,
) -> tuple[Any, Any, int]:  # fmt: skip
    """Return the model on its device, its tokenizer (None where a checkpoint has none), and the id of padding.

    A model type is built tiny and random, for samples of ids up to `largest_id`. Raises what transformers raises.
    """
    how: dict[str, Any] = {"attn_implementation": attn, "dtype": dtype}
    if is_checkpoint(name):
        model, reader = load_checkpoint(name, trust=trust, **how), _tokenizer_of(name, tokenizer, trust=trust)
    else:
        if largest_id >= MOST_IDS:
            rule = f"A tiny model is built for ids below {MOST_IDS}."
            raise CollateError(explain("samples", f"token id {largest_id}", rule, "Name the checkpoint they were made for."))
        config = transformers.AutoConfig.for_model(name)
        check_one_stack(config)
        reader = load_tokenizer(tokenizer, trust=trust) if tokenizer else byte_tokenizer()
        model = tiny_model(name, vocab_size=max(len(reader), largest_id + 1), seed=seed, **how)
    if reason := out_of_scope_reason(model):
        rule = f"It is left as it came: {reason}."
        raise CollateError(explain("--model", name, rule, "Name a causal language model: collate-npu guide scope."))
    runs = getattr(getattr(model, "config", None), "_attn_implementation", None) or attn
    if runs != attn and not ("flash" in runs and "flash" in attn) and hasattr(model.config, "num_attention_heads"):
        raise ValueError(f"transformers runs {runs} in the place of {attn}")
    pads = [getattr(reader, "pad_token_id", None), getattr(text_config(model.config), "pad_token_id", None), 0]
    return model.to(device).train(), reader, next(int(n) for n in pads if isinstance(n, int))


def is_checkpoint(name: str) -> bool:
    """Return True for a folder that transformers could load; False for a model type."""
    return (Path(name) / "config.json").is_file()


def check_models(names: Sequence[str], tokenizer: Path | None, *, trust: bool) -> None:
    """Refuse names that are neither a model type nor a checkpoint's folder, and folders that do not load."""
    if unknown := [name for name in names if name not in CONFIG_MAPPING_NAMES and not is_checkpoint(name)]:
        place = Path(unknown[0])
        kind = "a file" if place.is_file() else "a folder without config.json" if place.is_dir() else "no folder here"
        rule = "A checkpoint is named by its folder, in which config.json lies; nothing is downloaded."
        fetch = f"Name a model type of this transformers, or download it: hf download {place} --local-dir FOLDER."
        remedy = did_you_mean(unknown, CONFIG_MAPPING_NAMES, fetch)
        raise CollateError(explain("--model", f"{', '.join(unknown)}, {kind}", rule, remedy))
    if tokenizer:
        load_tokenizer(tokenizer, trust=trust)
    remedy = "Name the folder of a whole checkpoint; code that it brings runs with --trust-remote-code alone: read it first."
    for name in filter(is_checkpoint, names):
        with refused(f"--model {name}", "", "Its config.json does not load.", remedy):  # validators raise what they like
            check_one_stack(transformers.AutoConfig.from_pretrained(str(Path(name)), trust_remote_code=trust))
        _tokenizer_of(name, tokenizer, trust=trust)


def load_checkpoint(name: str, *, trust: bool, **how: Any) -> Any:
    """Return the model of a folder, of the class that its config names: with or without a head."""
    config = transformers.AutoConfig.from_pretrained(str(Path(name)), trust_remote_code=trust)
    own = [key for key in getattr(config, "auto_map", None) or {} if key.startswith("AutoModel")]
    classes = [*own, *(getattr(config, "architectures", None) or []), "AutoModelForCausalLM"]
    chosen = next(getattr(transformers, each) for each in classes if hasattr(transformers, each))
    return chosen.from_pretrained(str(Path(name)), trust_remote_code=trust, **how)


def _tokenizer_of(checkpoint: str, given: Path | None, *, trust: bool) -> Any:
    where = given or (Path(checkpoint) if has_tokenizer(Path(checkpoint)) else None)
    return load_tokenizer(where, trust=trust) if where else None


def has_tokenizer(folder: Path) -> bool:
    """Return True if a folder has a file of a tokenizer."""
    names = [path.name for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    return any(re.search("token|vocab|spiece|sentencepiece|tekken", name) for name in names)


def load_tokenizer(where: Path, *, trust: bool = False) -> Any:
    """The tokenizer of a folder, with a pad token: its own, or its eos."""
    if not has_tokenizer(where):  # else transformers takes the name for one on the hub, or makes one without words
        rule = "A tokenizer is named by its folder; nothing is downloaded."
        remedy = f"Write it into one: AutoTokenizer.from_pretrained({str(where)!r}).save_pretrained(FOLDER)."
        raise CollateError(explain("--tokenizer", f"{where}, no folder with its files", rule, remedy))
    remedy = "Name, with --tokenizer, the folder of one that has a pad or an eos token."
    with refused(f"tokenizer {where}", "", "It does not load.", remedy):
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(where), trust_remote_code=trust)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise CollateError(explain(f"tokenizer {where}", "neither pad nor eos", "Batches are padded with one.", remedy))
    return tokenizer
