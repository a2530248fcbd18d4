"""Candidates: the models, the tokenizer and the device a command line names, checked before any model is built.

Each refusal is a `CollateError` that says what to name instead. A model is built only when its turn comes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from collate_npu.consumers.models import is_encoder, text_config
from collate_npu.errors import CollateError, explain
from collate_npu.testing import byte_tokenizer, hybrid_model_types, left_out, tiny_config, tiny_model
from collate_npu.testing.invariance import check_one_stack
from collate_npu.tools.audit.attentions import DEFAULT, check_is_run, first_line
from collate_npu.tools.audit.checkpoints import check_checkpoint, is_checkpoint, load_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A model type, built tiny and random, or the folder of a checkpoint; and what it runs with."""

    name: str
    attn: str
    tokenizer: Path | None
    device: str
    dtype: torch.dtype
    seed: int
    tokenized: bool = False
    """Are the samples token ids already? Then a checkpoint needs no tokenizer."""
    largest_id: int = 0
    """Of those samples: a tiny model is built with as many tokens."""
    trust: bool = False
    """May code of the folder run?"""

    def build(self) -> tuple[Any, Any]:
        """The model, on its device, and its tokenizer, None where none is needed. Raises what transformers raises."""
        local = is_checkpoint(self.name)
        if local:
            settings: dict[str, Any] = {"attn_implementation": self.attn, "dtype": self.dtype, "trust": self.trust}
            model = load_checkpoint(self.name, **settings)
        else:
            vocab_size = max(len(self._tokenizer()), self.largest_id + 1)
            model = tiny_model(
                self.name, vocab_size=vocab_size, seed=self.seed, attn_implementation=self.attn, dtype=self.dtype
            )
        check_is_run(model, self.attn)
        return model.to(self.device), self._tokenizer()

    def _tokenizer(self) -> Any:
        local = is_checkpoint(self.name)
        where = self.tokenizer or (Path(self.name) if local else None)
        if where is not None:
            return None if self.tokenized and not has_tokenizer(where) else load_tokenizer(where, trust=self.trust)
        return byte_tokenizer(pad_is_eos=not is_encoder(tiny_config(self.name, vocab_size=8)))

    def pad_token_id(self, model: Any, tokenizer: Any) -> int:
        """What rows are padded with: the tokenizer's, else what the config says, else 0."""
        config = text_config(model.config)
        said = [getattr(tokenizer, "pad_token_id", None), getattr(config, "pad_token_id", None), 0]
        return next(int(n) for n in said if isinstance(n, int))


OF_ATTENTION_ALONE = ("llama", "qwen3")
"""Families audited beside the hybrid ones where those say nothing: flat rows without kernels, context parallelism."""


def candidates(
    names: Sequence[str], attentions: Sequence[str], *, more: Sequence[str] = (), **settings: Any
) -> tuple[list[Candidate], dict[tuple[str, str], str]]:
    """One for each name (default: every hybrid family, and `more`) and attention; and those known not to be testable.

    What `left_out` measures costs a pass of each family: for eager and sdpa alone, since others may have to compile.
    """
    measured = [] if names else [a for a in attentions if a in DEFAULT]
    excluded = {(name, a): why for a in measured for name, why in left_out(a).items()}
    everyone = names or [*hybrid_model_types(), *more]
    chosen = [(name, a) for name in everyone for a in attentions if (name, a) not in excluded]
    return [Candidate(name=name, attn=a, **settings) for name, a in chosen], excluded


def check_named(
    names: Sequence[str], tokenizer: Path | None, device: str, dtype: torch.dtype, *, tokenized: bool = False,
    trust: bool = False,
) -> None:  # fmt: skip
    """All the checks: models, tokenizers and the device. Raises `CollateError` for the first that does not hold."""
    check_models(names, trust=trust)
    check_device(device, dtype)
    for folder in [tokenizer] if tokenizer else [Path(name) for name in names if is_checkpoint(name)]:
        if not tokenized or has_tokenizer(folder):
            load_tokenizer(folder, trust=trust)


def check_models(names: Sequence[str], *, trust: bool = False) -> None:
    """Refuse, all at once, names that are neither a model type nor the folder of a checkpoint; then bad checkpoints."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    unknown = [name for name in names if name not in CONFIG_MAPPING_NAMES and not is_checkpoint(name)]
    if unknown:
        near = sorted({match for name in unknown for match in get_close_matches(name, CONFIG_MAPPING_NAMES, n=2)})
        rule = f"A model is a model type of transformers {transformers.__version__}, or a folder with a config.json."
        remedy = f"Did you mean {' or '.join(near)}?" if near else f"Name one, for example {hybrid_model_types()[-1]}."
        raise CollateError(explain("--model", ", ".join(unknown), rule, remedy))
    for name in names:
        if is_checkpoint(name):
            check_checkpoint(name, trust=trust)
        else:
            _check_tiny(name)


def _check_tiny(name: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[name]()
    except Exception:  # told when it is built: other models may run
        return
    check_one_stack(config)


def has_tokenizer(folder: Path) -> bool:
    """Does the folder hold files of a tokenizer?"""
    names = [path.name for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    return any(re.search("token|vocab|spiece|sentencepiece|tekken", name) for name in names)


def load_tokenizer(where: Path, *, trust: bool = False) -> Any:
    """The tokenizer of a folder, with a pad token: its own, or its eos."""
    from transformers import AutoTokenizer

    remedy = "Name, with --tokenizer, the folder of one that has a pad or an eos token."
    try:
        if not where.is_dir():
            raise FileNotFoundError("no folder")  # else transformers takes the name for one on the hub
        if not has_tokenizer(where):
            raise FileNotFoundError("no file of a tokenizer")  # 5.x makes one without a vocabulary
        tokenizer = AutoTokenizer.from_pretrained(str(where), trust_remote_code=trust)
    except Exception as error:  # transformers and tokenizers raise bare Exceptions, too
        got = f"{type(error).__name__}: {first_line(error)}"
        raise CollateError(explain(f"tokenizer {where}", got, "It does not load.", remedy)) from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise CollateError(
            explain(f"tokenizer {where}", "neither pad nor eos", "Batches are padded with one of them.", remedy)
        )
    return tokenizer


def check_device(device: str, dtype: torch.dtype) -> None:
    """Refuse a device that does not compute; a pretended one (CANN stand-ins) returns zeros: every case would pass."""
    remedy = "Name a device of this machine: cpu, cuda or npu."
    try:
        if device.startswith("npu"):
            import torch_npu  # noqa: F401
        two = (torch.ones(3, device=device, dtype=dtype) + 1).float().cpu()
    except Exception as error:  # RuntimeError, AssertionError, ImportError ...: each backend has its own
        got = f"{device} ({type(error).__name__}: {first_line(error)})"
        raise CollateError(explain("--device", got, f"{dtype} does not compute there.", remedy)) from None
    if not torch.equal(two, torch.full((3,), 2.0)):
        rule = "One and one is not two there: it is a stand-in, and an audit on it would prove nothing."
        raise CollateError(explain("--device", device, rule, "Run on a real device."))
