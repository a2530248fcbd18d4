"""Session: all that one `collate-npu audit` measures.

The models, tokenizer and device that it names are checked before any model is built; each refusal is a `CollateError` that
says what to name instead. A model is built when its turn comes, a checkpoint with the class it was saved with. A folder may
hold Python of its own (`auto_map`): it runs with `--trust-remote-code` alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.text import Text
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from collate_npu import __version__
from collate_npu.consumers.model_traits import is_encoder, pattern_of, text_config
from collate_npu.consumers.recurrent import kernel_calls, variables_of
from collate_npu.errors import CollateError, did_you_mean, explain, printable
from collate_npu.proof.invariance import check_one_stack, samples_of
from collate_npu.proof.measure import Batch, predicts_next
from collate_npu.testing import byte_tokenizer, hybrid_model_types, left_out, tiny_model
from collate_npu.tools.audit.case import DUMPED, Audit, Layout
from collate_npu.tools.audit.report import Report
from collate_npu.tools.files import (
    RECIPE,
    batch_of_file,
    has_tokenizer,
    load_tokenizer,
    read_rows,
    samples_of_rows,
    shipped_text,
)
from collate_npu.tools.terminal import progress, shortened
from collate_npu.tools.user_code import as_user_code, describe_error, find_callable, refused, run_user_code


def check_device(device: str, dtype: torch.dtype) -> None:
    """Refuse a device that does not compute; a pretended one (CANN stand-ins) returns zeros: every case would pass."""
    here = ["cpu", *(card for card in ("cuda", "npu") if hasattr(torch, card) and getattr(torch, card).is_available())]
    rule, remedy = f"{dtype} does not compute there.", f"Name a device of this machine: {', '.join(here)}."
    if device.startswith("npu"):
        with refused("--device", device, "An NPU needs torch_npu.", "Install it: collate-npu guide install."):
            import torch_npu  # noqa: F401
    with refused("--device", device, rule, remedy):
        two = (torch.ones(3, device=device, dtype=dtype) + 1).float().cpu()
    if not torch.equal(two, torch.full((3,), 2.0)):
        rule = "One and one is not two there: it is a stand-in, and an audit on it would prove nothing."
        raise CollateError(explain("--device", device, rule, "Run on a real device."))


# --- the user's collators

GIVEN = ("tokenizer", "processing_class", "model", "pad_token_id", "mlm")
"""What a class, or a function that makes a collator, is given by the names of its arguments.

`mlm` is False: tokens masked at random cannot be compared.
"""
_A_COLLATOR = "Name a function of features, or what makes one: def mine(tokenizer, model): return ..."


def named_collator(spec: str) -> Callable[..., Any]:
    """The function or class of a name. Modules of the working directory are found. Raises `CollateError`."""
    return find_callable("--collator", spec, "transformers:DataCollatorForSeq2Seq", _A_COLLATOR)


def ready_collators(
    spec: str, sides: Sequence[str], *, tokenizer: Any, model: Any, pad_token_id: int
) -> list[Callable[..., Any]]:
    """The collator of a name: a function of features as it is, or what a class makes.

    A function that asks for arguments of `GIVEN`, or for none, makes one too. With a tokenizer one is made for each side,
    by a tokenizer that pads there.
    """
    found = named_collator(spec)
    with run_user_code("--collator", spec, "Its arguments say how it is made.", _A_COLLATOR):
        arguments = list(inspect.signature(found).parameters)
    taken = [name for name in arguments if name in GIVEN]
    if not inspect.isclass(found) and arguments and not taken:
        return [_ready(spec, found)]
    by_side = tokenizer is not None and {"tokenizer", "processing_class"} & {*taken}
    made: list[Callable[..., Any]] = []
    for side in sides if by_side else [None]:
        mine = copy.copy(tokenizer)
        if side:
            mine.padding_side = side
        given = dict(zip(GIVEN, (mine, mine, model, pad_token_id, False)))
        rule = f"It is called with {', '.join(taken) or 'nothing'}, by the names of its arguments."
        with run_user_code("--collator", spec, rule, _A_COLLATOR):
            made.append(_ready(spec, found(**{name: given[name] for name in taken})))
    return made


def _ready(spec: str, collator: Callable[..., Any]) -> Callable[..., Any]:
    return as_user_code(collator, "--collator", spec, "It is called with features, a list of dicts.", _A_COLLATOR)


# --- models and tokenizers by name

DEFAULT = ("sdpa", "eager")
MOST_IDS = 1 << 20
"""Of a tiny model's embedding."""


def load_model(
    name: str, attn: str, *, tokenizer: Path | None, device: str, dtype: torch.dtype, seed: int, trust: bool, largest_id: int
) -> tuple[Any, Any, int]:
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
        reader = load_tokenizer(tokenizer, trust=trust) if tokenizer else byte_tokenizer(pad_is_eos=not is_encoder(config))
        model = tiny_model(name, vocab_size=max(len(reader), largest_id + 1), seed=seed, **how)
    check_attention(model, attn)
    pads = [getattr(reader, "pad_token_id", None), getattr(text_config(model.config), "pad_token_id", None), 0]
    return model.to(device).train(), reader, next(int(n) for n in pads if isinstance(n, int))


def check_attention(model: torch.nn.Module, name: str) -> None:
    """Refuse a model that runs another implementation than was named, as transformers chooses for some models."""
    config = getattr(model, "config", None)
    runs_it = getattr(config, "_attn_implementation", None) or name
    both_flash = "flash" in runs_it and "flash" in name  # the same kernel from the hub
    if runs_it != name and not both_flash and hasattr(config, "num_attention_heads"):
        raise ValueError(f"transformers runs {runs_it} in the place of {name}")


def place_of(name: str, attn: str) -> str:
    """A model and its attention, as the report names them."""
    return f"{name} ({attn})"


def candidates(names: Sequence[str], attentions: Sequence[str]) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Each name (default: every hybrid family) with each attention; and those known not to be testable, with the reason.

    What `left_out` measures costs a pass of each family: for eager and sdpa alone, since others may have to compile.
    """
    known = {a: {} if names or a not in DEFAULT else left_out(a) for a in attentions}
    chosen = [(name, a) for name in names or hybrid_model_types() for a in attentions if name not in known[a]]
    return chosen, {place_of(name, a): why for a in attentions for name, why in known[a].items()}


def is_checkpoint(name: str) -> bool:
    """True for a folder that transformers could load; False for a model type."""
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
    """The model of a folder, of the class that its config names: with or without a head, text alone or with vision."""
    config = transformers.AutoConfig.from_pretrained(str(Path(name)), trust_remote_code=trust)
    own = [key for key in getattr(config, "auto_map", None) or {} if key.startswith("AutoModel")]
    classes = [*own, *(getattr(config, "architectures", None) or []), "AutoModelForCausalLM"]
    chosen = next(getattr(transformers, each) for each in classes if hasattr(transformers, each))
    return chosen.from_pretrained(str(Path(name)), trust_remote_code=trust, **how)


def _tokenizer_of(checkpoint: str, given: Path | None, *, trust: bool) -> Any:
    """The tokenizer that was named, else that of a checkpoint; None where there is none."""
    where = given or (Path(checkpoint) if has_tokenizer(Path(checkpoint)) else None)
    return load_tokenizer(where, trust=trust) if where else None


def resolved_kernels(model: Any) -> dict[str, str]:
    """Each function of a recurrent layer that gives way to a kernel, and the package it was found in ("torch": none)."""
    chosen = {call.kernel: variables_of(call.function)["implementation"] for call in kernel_calls(model)}
    packages = {name: getattr(function, "__module__", "").partition(".")[0] for name, function in chosen.items()}
    return {name: "torch" if package == "transformers" else package for name, package in packages.items()}


# --- the session


def audit_all(
    *, models: Sequence[str], data: Path | None, tokenizer: Path | None, sides: Sequence[Layout], attentions: Sequence[str],
    device: str, dtype: str, batch_size: int, batches: int, max_length: int, gradients: bool, tolerance: float | None,
    seed: int, console: Console, collators: Sequence[str] = (), batch: Path | None = None, trust: bool = False,
) -> Report:  # fmt: skip
    """Check what is named, then audit it model by model. Raises `CollateError` where something named cannot be used."""
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise CollateError(explain("--tolerance", str(tolerance), "An error is 0 or more.", "Give such a number, or none."))
    for spec in collators:
        named_collator(spec)
    names, in_dtype = list(dict.fromkeys(models)), getattr(torch, dtype)
    dumped, rows = _dumped(batch, data, names), read_rows(data) if data else shipped_text()
    check_device(device, in_dtype)
    check_models(names, tokenizer, trust=trust)
    ids = [dumped["input_ids"].flatten().tolist()] if dumped else [r["input_ids"] for r in rows if isinstance(r, dict)]
    chosen, untestable = candidates(names, list(dict.fromkeys(attentions or DEFAULT)))
    settings = {"device": device, "dtype": dtype, "batch_size": batch_size, "batches": batches, "max_length": max_length}
    settings |= {"seed": seed, "data": str(batch or data or "shipped with the package")}
    settings |= {"collate_npu": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    report = Report(settings=settings, tolerance=tolerance, left_out=untestable)
    how: dict[str, Any] = {"tokenizer": tokenizer, "device": device, "dtype": in_dtype, "trust": trust, "seed": seed}
    session = _Session(
        report=report, sides=sides, collators=collators, dumped=dumped, all_named=bool(names and attentions),
        build=partial(load_model, **how, largest_id=max(map(max, ids), default=0)),
        draw=partial(samples_of_rows, rows, count=batch_size * batches, max_length=max_length, seed=seed),
        settings={"batch_size": batch_size, "gradients": gradients, "tolerance": tolerance},
    )  # fmt: skip
    try:
        with progress(len(chosen), console) as show:
            for n, (name, attn) in enumerate(chosen, 1):
                shown, began = printable(f"[{n}/{len(chosen)}] {shortened(place_of(name, attn), 60)}"), monotonic()
                session.audit(name, attn, partial(_show_part, show, shown, n - 1))
                console.print(Text(f"{shown}: {monotonic() - began:.1f} s"), soft_wrap=True)
    except KeyboardInterrupt:
        report.interrupted = True
    return report


def _show_part(show: Show, shown: str, before: int, what: str, part: float) -> None:
    show(f"{shown} {what}", before + part)


def _dumped(batch: Path | None, data: Path | None, names: Sequence[str]) -> Batch | None:
    if batch is None:
        return None
    if data or not names:
        rule = "The samples of a dumped batch are in it, and it goes to a model as it is."
        got, remedy = ("--data too", "Leave --data out.") if data else ("no --model", "Name the model that it was made for.")
        raise CollateError(explain("--batch", got, rule, remedy))
    dumped = batch_of_file(batch)
    ids = dumped.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or not ids.numel() or ids.is_floating_point():
        rule = "A batch of samples has input_ids [B, S], whole numbers."
        raise CollateError(explain("--batch", f"{batch}: keys {', '.join(dumped)}", rule, RECIPE))
    return dumped


_ABSENT = ("does not support an attention implementation", "does not support Flash Attention", "in the place of")
"""How it is said that a model does not have an attention implementation."""


Show = Callable[[str, float], None]
"""Called with what runs, and the part of a model that is done."""


@dataclass(frozen=True, kw_only=True)
class _Session:
    """What every candidate is audited with, and the report it goes to."""

    report: Report
    sides: Sequence[Layout]
    collators: Sequence[str]
    """By name."""
    dumped: Batch | None
    all_named: bool
    """True if models and attention were both named: then what a model does not have did not run."""
    build: Callable[[str, str], tuple[Any, Any, int]]
    """Builds a model by its name and attention, beside its tokenizer and the id of padding."""
    draw: Callable[[Any], list[Batch]]
    """Draws samples, for a tokenizer."""
    settings: dict[str, Any]
    """Of `Audit`: batch_size, gradients and tolerance."""

    def audit(self, name: str, attn: str, show: Show) -> None:
        """Every case of one model; `show` gets what runs, and the part that is done."""
        place = place_of(name, attn)
        show("", 0)
        with self._noted(place):
            self._audit(name, place, show, *self.build(name, attn))

    def _audit(self, name: str, place: str, show: Show, model: Any, tokenizer: Any, pad_token_id: int) -> None:
        padded = [side for side in self.sides if side != "packed"]
        about = {"name": name, "pad_token_id": pad_token_id, "sides": self.sides, **self.settings}
        if self.dumped is None:
            samples = self.draw(tokenizer)
        else:  # beside batches laid out as it is: rows of several samples beside flat rows
            given = samples_of(self.dumped, pattern_of(model), next_token=predicts_next(model))
            samples = list(given.features)
            about |= {"batch_size": len(samples), "sides": ["packed"] if given.segments.packed else padded}
        case = Audit(model, samples, **about)
        for n, side in enumerate(case.sides):
            show(side, (n + 1) / (len(case.sides) + 1))  # the samples alone have run
            self._side(case, side, place + (" packed" if side == "packed" else ""))
        if self.dumped is not None:
            self.report.findings.append(case.of_given(DUMPED, [given]))
        for spec in self.collators:
            column = spec.rpartition(":")[2]
            with self._noted(f"{place} {column}"):
                for collator in ready_collators(spec, padded, tokenizer=tokenizer, model=model, pad_token_id=pad_token_id):
                    self.report.findings.append(case.of_collator(column, collator))
        if "packed" in case.sides and (resolved := resolved_kernels(model)):
            self.report.kernels[name] = resolved

    def _side(self, case: Audit, side: Layout, place: str) -> None:
        first = len(self.report.findings)
        for column in case.columns(side):
            self.report.findings.append(case.finding(side, column))
        found = self.report.findings[first:]
        if all(f.logits is None and not f.refused for f in found):
            del self.report.findings[first:]
            self.report.not_run[place] = found[0].note  # it raises whatever is handed over
            return
        if not all(f.refused for f in found if f.whose == "ours"):
            self.report.yardsticks[place] = case.yardstick(side)

    @contextmanager
    def _noted(self, place: str) -> Iterator[None]:
        """The report notes what does not build, does not run alone or cannot be compared."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # code of a checkpoint's own may end the process
            why = " ".join(str(error).split()) if isinstance(error, CollateError) else describe_error(error)
            absent = any(words in why for words in _ABSENT) and not self.all_named
            (self.report.left_out if absent else self.report.not_run)[place] = why
