"""Session: all that one `collate-npu audit` measures.

The models, attention, tokenizer and device that it names are checked before any model is built.

Each refusal is a `CollateError` that says what to name instead. A model is built only when its turn comes, a checkpoint with
the class it was saved with. A folder may hold Python of its own (`auto_map`): it runs with `--trust-remote-code` alone.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
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

from collate_npu import __version__
from collate_npu.consumers.model_traits import is_encoder, pattern_of, text_config
from collate_npu.consumers.recurrent import kernel_calls, variables_of
from collate_npu.errors import CollateError, explain, printable
from collate_npu.proof.invariance import check_one_stack, samples_of
from collate_npu.proof.kernel_runs import KERNELS, runs
from collate_npu.proof.measure import Batch, predicts_next
from collate_npu.testing import byte_tokenizer, hybrid_model_types, left_out, tiny_model
from collate_npu.tools.audit.case import DUMPED, Audit, Layout
from collate_npu.tools.audit.report import Report
from collate_npu.tools.files import RECIPE, batch_of_file, read_rows, samples_of_rows, shipped_text
from collate_npu.tools.kernels import check_device
from collate_npu.tools.terminal import shortened
from collate_npu.tools.user_code import check_callable, describe_error, did_you_mean, find_callable, refused, run_user_code

GIVEN = ("tokenizer", "processing_class", "model", "pad_token_id", "mlm")
"""What a class, or a function that makes a collator, is given by the names of its arguments.

`mlm` is False: tokens masked at random cannot be compared.
"""


def named_collator(spec: str) -> Callable[..., Any]:
    """The function or class of a name. Modules of the working directory are found. Raises `CollateError`."""
    remedy = "Name a function of features, or what makes one."
    return find_callable("--collator", spec, "transformers:DataCollatorForSeq2Seq", remedy)


_theirs = partial(run_user_code, "--collator")


def ready_collators(
    spec: str, sides: Sequence[str], *, tokenizer: Any, model: Any, pad_token_id: int
) -> list[Callable[..., Any]]:
    """The collator of a name: a function of features as it is, or what a class makes.

    A function that asks for arguments of `GIVEN`, or for none, makes one too. With a tokenizer one is made for each side,
    by a tokenizer that pads there.
    """
    found = named_collator(spec)
    with _theirs(spec, "Its arguments tell how it is made.", "Name a function of your own: def mine(tokenizer): ..."):
        arguments = list(inspect.signature(found).parameters)
    taken = [name for name in arguments if name in GIVEN]
    if not inspect.isclass(found) and arguments and not taken:
        return [partial(_called, spec, found)]
    by_side = tokenizer is not None and {"tokenizer", "processing_class"} & {*taken}
    rule = f"It is called with {', '.join(taken) or 'nothing'}, by the names of its arguments."
    made = []
    for side in sides if by_side else [None]:
        mine = copy.copy(tokenizer)
        if side:
            mine.padding_side = side
        given = dict(zip(GIVEN, (mine, mine, model, pad_token_id, False)))
        with _theirs(spec, rule, "Name a function of your own: def mine(tokenizer, model): return ..."):
            made.append(found(**{name: given[name] for name in taken}))
    rule = "It makes a collator, which is called with features."
    remedy = "Name a function of features, or what makes one."
    return [partial(_called, spec, check_callable("--collator", spec, one, rule, remedy)) for one in made]


def _called(spec: str, collator: Callable[..., Any], features: Any) -> Any:
    with _theirs(spec, "It is called with features, a list of dicts.", "Mend it there."):
        return collator(features)


DEFAULT = ("sdpa", "eager")
MOST_IDS = 1 << 20
"""Of a tiny model's embedding."""


def build(
    name: str, attn: str, *, tokenizer: Path | None, device: str, dtype: torch.dtype, seed: int, trust: bool, largest_id: int
) -> tuple[Any, Any, int]:
    """The model on its device, its tokenizer (None where a checkpoint has none), and the id that rows are padded with.

    A model type is built tiny and random, for samples of ids up to `largest_id`. Raises what transformers raises.
    """
    how: dict[str, Any] = {"attn_implementation": attn, "dtype": dtype}
    if is_checkpoint(name):
        model, reader = load_checkpoint(name, trust=trust, **how), read_tokenizer(name, tokenizer, trust=trust)
    else:
        if largest_id >= MOST_IDS:
            rule = f"A tiny model is built for ids below {MOST_IDS}."
            raise CollateError(explain("samples", f"token id {largest_id}", rule, "Name the checkpoint they were made for."))
        from transformers import AutoConfig

        config = AutoConfig.for_model(name)
        check_one_stack(config)
        reader = load_tokenizer(tokenizer, trust=trust) if tokenizer else byte_tokenizer(pad_is_eos=not is_encoder(config))
        model = tiny_model(name, vocab_size=max(len(reader), largest_id + 1), seed=seed, **how)
    check_is_run(model, attn)
    told = [getattr(reader, "pad_token_id", None), getattr(text_config(model.config), "pad_token_id", None), 0]
    return model.to(device).train(), reader, next(int(n) for n in told if isinstance(n, int))


def candidates(names: Sequence[str], attentions: Sequence[str]) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Each name (default: every hybrid family) with each attention; and those known not to be testable, with the reason.

    What `left_out` measures costs a pass of each family: for eager and sdpa alone, since others may have to compile.
    """
    known = {a: {} if names or a not in DEFAULT else left_out(a) for a in attentions}
    chosen = [(name, a) for name in names or hybrid_model_types() for a in attentions if name not in known[a]]
    return chosen, {place_of(name, a): why for a in attentions for name, why in known[a].items()}


def place_of(name: str, attn: str) -> str:
    """A model and its attention, as the report names them."""
    return f"{name} ({attn})"


def check_named(
    names: Sequence[str], attentions: Sequence[str], *, tokenizer: Path | None, device: str, dtype: torch.dtype, trust: bool
) -> None:
    """All the checks. Raises `CollateError` for the first that does not hold."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    for name in names:
        _check_place(name)
    if unknown := [name for name in names if name not in CONFIG_MAPPING_NAMES and not is_checkpoint(name)]:
        rule = f"A model is a model type of transformers {transformers.__version__}, or a folder with a config.json."
        remedy = did_you_mean(unknown, CONFIG_MAPPING_NAMES, f"Name one, for example {hybrid_model_types()[-1]}.")
        raise CollateError(explain("--model", ", ".join(unknown), rule, remedy))
    check_device(device, dtype)
    if tokenizer:
        load_tokenizer(tokenizer, trust=trust)
    for name in filter(is_checkpoint, names):
        check_checkpoint(name, trust=trust)
        read_tokenizer(name, tokenizer, trust=trust)
    for name in attentions:
        check_attention(name, device, dtype)


def check_attention(name: str, device: str, dtype: torch.dtype) -> None:
    """Refuse a name that transformers does not know or that does not compute here, with the reason.

    That is tried on a tiny model of attention alone: a package, a card or a driver that is missing shows only then.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    got = f"{name} on {device} in {str(dtype).removeprefix('torch.')}"
    known = sorted({"eager", *(key for key in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in key)})
    if name not in known and "/" not in name:  # a kernel of the hub: owner/name
        remedy = did_you_mean([name], known, "Name one of them.")
        raise CollateError(explain("--attn", name, f"transformers knows {', '.join(known)}.", remedy))
    if name not in (*DEFAULT, "flex_attention"):  # flex would be compiled, and again for other shapes
        remedy = "Install what it needs, or name a card with --device: collate-npu env lists what is here."
        with refused("--attn", got, "It does not run there.", remedy), torch.no_grad():
            model = tiny_model("llama", vocab_size=8, attn_implementation=name, dtype=dtype).to(device)
            model(input_ids=torch.arange(4, device=device)[None])


def check_is_run(model: torch.nn.Module, name: str) -> None:
    """Refuse a model that runs another implementation than was named, as transformers chooses for some models."""
    config = getattr(model, "config", None)
    runs = getattr(config, "_attn_implementation", None) or name
    both_flash = "flash" in runs and "flash" in name  # the same kernel from the hub
    if runs != name and not both_flash and hasattr(config, "num_attention_heads"):
        raise ValueError(f"transformers runs {runs} in the place of {name}")


def is_checkpoint(name: str) -> bool:
    """True for a folder that transformers could load; False for a model type."""
    return (Path(name) / "config.json").is_file()


def _check_place(name: str) -> None:
    """Refuse a path that is no folder of a checkpoint, and a name of the hub, from which nothing is fetched here."""
    rule, place = "A checkpoint is named by its folder, in which config.json lies; nothing is downloaded.", Path(name)
    if place.is_file():
        whole = is_checkpoint(str(place.parent))
        remedy = f"Name its folder: {place.parent}." if whole else "Name the folder that save_pretrained wrote."
        raise CollateError(explain("--model", f"{name}, a file", rule, remedy))
    if place.is_dir() and not is_checkpoint(name):
        held = sorted(each.parent for each in place.glob("*/config.json"))
        remedy = f"Name the one in it: {held[0]}." if held else "Name the folder that save_pretrained wrote."
        raise CollateError(explain("--model", f"{name}, a folder without config.json", rule, remedy))
    if not place.exists() and "/" in name:
        there = name.startswith((".", "/", "~")) or name.count("/") > 1
        fetch = f"Download it: hf download {name} --local-dir FOLDER, and name FOLDER."
        raise CollateError(explain("--model", f"{name}, no folder here", rule, "Look at its spelling." if there else fetch))


def check_checkpoint(name: str, *, trust: bool) -> None:
    """Refuse, in one line, a folder whose config does not load, or whose own code nobody said to trust."""
    import transformers

    where, remedy = f"--model {name}", "Name the folder of a whole checkpoint, of a model that this transformers has."
    with refused(where, "", "Its config.json does not load.", remedy):  # validators raise what they like
        own = json.loads((Path(name) / "config.json").read_text(encoding="utf-8")).get("auto_map")
        if own and not trust:
            rule = "The folder brings Python code of its own, which would run here."
            remedy = "Read that code, then pass --trust-remote-code; or take auto_map out, if transformers has the model."
            raise CollateError(explain(where, "auto_map in config.json", rule, remedy))
        check_one_stack(transformers.AutoConfig.from_pretrained(str(Path(name)), trust_remote_code=trust))


def load_checkpoint(name: str, *, trust: bool, **how: Any) -> Any:
    """The model of a folder, of the class that its config names: with or without a head, text alone or with vision."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(str(Path(name)), trust_remote_code=trust)
    own = [key for key in getattr(config, "auto_map", None) or {} if key.startswith("AutoModel")]
    named = [*own, *(getattr(config, "architectures", None) or []), "AutoModelForCausalLM"]
    chosen = next(getattr(transformers, each) for each in named if hasattr(transformers, each))
    return chosen.from_pretrained(str(Path(name)), trust_remote_code=trust, **how)


def read_tokenizer(checkpoint: str, named: Path | None, *, trust: bool) -> Any:
    """The tokenizer that was named, else that of a checkpoint; None where there is none."""
    where = named or (Path(checkpoint) if _has_tokenizer(Path(checkpoint)) else None)
    return load_tokenizer(where, trust=trust) if where else None


def _has_tokenizer(folder: Path) -> bool:
    """True if the folder holds files of a tokenizer."""
    names = [path.name for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    return any(re.search("token|vocab|spiece|sentencepiece|tekken", name) for name in names)


def load_tokenizer(where: Path, *, trust: bool = False) -> Any:
    """The tokenizer of a folder, with a pad token: its own, or its eos."""
    from transformers import AutoTokenizer

    remedy = "Name, with --tokenizer, the folder of one that has a pad or an eos token."
    if not _has_tokenizer(where):  # else transformers takes the name for one on the hub, or makes one without words
        got = f"{where}, {'a folder without its files' if where.is_dir() else 'a file' if where.is_file() else 'no folder'}"
        rule = "A tokenizer is named by its folder; nothing is downloaded."
        saved = f"Write it into one: AutoTokenizer.from_pretrained({str(where)!r}).save_pretrained(FOLDER)."
        raise CollateError(explain("--tokenizer", got, rule, remedy if where.exists() else saved))
    with refused(f"tokenizer {where}", "", "It does not load.", remedy):
        tokenizer = AutoTokenizer.from_pretrained(str(where), trust_remote_code=trust)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        rule = "Batches are padded with one of them."
        raise CollateError(explain(f"tokenizer {where}", "neither pad nor eos", rule, remedy))
    return tokenizer


def resolved_kernels(model: Any) -> dict[str, str]:
    """Each function of a recurrent layer that gives way to a kernel, and the package it was found in ("torch": none)."""
    chosen = {call.kernel: variables_of(call.function)["implementation"] for call in kernel_calls(model)}
    packages = {name: getattr(function, "__module__", "").partition(".")[0] for name, function in chosen.items()}
    return {name: "torch" if package == "transformers" else package for name, package in packages.items()}


def audit_all(
    *, models: Sequence[str], data: Path | None, tokenizer: Path | None, sides: Sequence[Layout], attentions: Sequence[str],
    device: str, dtype: str, batch_size: int, batches: int, max_length: int, gradients: bool, tolerance: float | None,
    seed: int, console: Console, collators: Sequence[str] = (), batch: Path | None = None, trust: bool = False,
) -> Report:  # fmt: skip
    """Check what is named, then audit it model by model, on a card its kernels first. Raises `CollateError` where something
    named cannot be used."""
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise CollateError(explain("--tolerance", str(tolerance), "An error is 0 or more.", "Give such a number, or none."))
    names, implementations = list(dict.fromkeys(models)), list(dict.fromkeys(attentions or DEFAULT))
    for spec in collators:
        named_collator(spec)
    dumped = _dumped(batch, data, names)
    rows = read_rows(data) if data else shipped_text()
    how: dict[str, Any] = {"tokenizer": tokenizer, "device": device, "dtype": getattr(torch, dtype), "trust": trust}
    check_named(names, implementations, **how)
    tokens = [dumped["input_ids"].flatten().tolist()] if dumped else [r["input_ids"] for r in rows if isinstance(r, dict)]
    how |= {"seed": seed, "largest_id": max(map(max, tokens), default=0)}
    chosen, left_out = candidates(names, implementations)
    settings = {"device": device, "dtype": dtype, "batch_size": batch_size, "batches": batches, "max_length": max_length}
    settings |= {"seed": seed, "data": str(batch or data or "shipped with the package")}
    settings |= {"collate_npu": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    report = Report(settings=settings, tolerance=tolerance, left_out=left_out)
    session = _Session(
        report, partial(build, **how), sides, collators, dumped, how={"batch_size": batch_size, "gradients": gradients},
        drawn=partial(samples_of_rows, rows, count=batch_size * batches, max_length=max_length, seed=seed),
    )  # fmt: skip
    try:
        if device.partition(":")[0] != "cpu":
            with console.status("kernels"):
                report.operators += runs(KERNELS, device=device, dtype=how["dtype"], few=True)
        for n, (name, attn) in enumerate(chosen, 1):
            session.audit(name, attn, f"[{n}/{len(chosen)}] ", console)
    except KeyboardInterrupt:
        report.interrupted = True
    for name, attn in chosen:  # an attention that a model has not is forgiven where another ran, or no model was named
        absent = any(words in report.not_run.get(place_of(name, attn), "") for words in _ABSENT)
        if absent and (not names or name in {finding.model for finding in report.findings}):
            report.left_out[place_of(name, attn)] = report.not_run.pop(place_of(name, attn))
    return report


_ABSENT = ("does not support an attention implementation", "does not support Flash Attention", "in the place of")


def _dumped(batch: Path | None, data: Path | None, names: Sequence[str]) -> Batch | None:
    if batch is None:
        return None
    rule = "The samples of a dumped batch are in it, and it goes to a model as it is."
    if data:
        raise CollateError(explain("--batch", f"--data {data} too", rule, "Leave --data out."))
    if not names:
        raise CollateError(explain("--batch", "no --model", rule, "Name the model that it was made for."))
    dumped = batch_of_file(batch)
    ids = dumped.get("input_ids")
    dense = isinstance(ids, torch.Tensor) and ids.layout == torch.strided and not ids.is_nested
    if ids is None or not dense or ids.ndim != 2 or not ids.numel() or ids.is_floating_point():
        rule = "A batch of samples has input_ids [B, S], whole numbers."
        raise CollateError(explain("--batch", f"{batch}: keys {', '.join(dumped)}", rule, RECIPE))
    return dumped


@dataclass(frozen=True)
class _Session:
    """What is asked of every candidate, and the report it goes to."""

    report: Report
    build: partial[tuple[Any, Any, int]]  # a model, by its name and attention
    sides: Sequence[Layout]
    collators: Sequence[str]  # by name
    dumped: Batch | None
    how: dict[str, Any]  # batch_size and gradients
    drawn: partial[list[Batch]]  # samples by a tokenizer

    def audit(self, name: str, attn: str, count: str, console: Console) -> None:
        """Every case of one: its name turns on a terminal meanwhile, and a line says how long it took."""
        place, began = place_of(name, attn), monotonic()
        shown = printable(f"{count}{shortened(place, 60)}")
        with console.status(Text(shown)), self._told(place):
            model, tokenizer, pad_token_id = self.build(name, attn)
            self._audit(name, place, model, tokenizer, pad_token_id)
        console.print(Text(f"{shown}: {monotonic() - began:.1f} s"), soft_wrap=True)

    def _audit(self, name: str, place: str, model: Any, tokenizer: Any, pad_token_id: int) -> None:
        padded = [side for side in self.sides if side != "packed"]
        about = {"name": name, "pad_token_id": pad_token_id, "sides": self.sides, **self.how}
        if self.dumped is None:
            samples = self.drawn(tokenizer)
        else:  # beside batches laid out as it is: rows of several samples beside flat rows
            given = samples_of(self.dumped, pattern_of(model), next_token=predicts_next(model))
            samples = list(given.features)
            about |= {"batch_size": len(samples), "sides": ["packed"] if given.segments.packed else padded}
        case = Audit(model, samples, **about)
        for side in case.sides:
            self._side(case, side, place + (" packed" if side == "packed" else ""))
        if self.dumped is not None:
            self.report.findings.append(case.of_given(DUMPED, [given]))
        for spec in self.collators:
            column = spec.rpartition(":")[2]
            with self._told(f"{place} {column}"):
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
        elif not all(f.refused for f in found if f.whose == "ours"):
            self.report.yardsticks[place] = case.yardstick(side)

    @contextmanager
    def _told(self, place: str) -> Iterator[None]:
        """What does not build, does not run alone or cannot be compared is told in the report."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # code of a checkpoint's own may end the process
            ours = isinstance(error, CollateError)
            self.report.not_run[place] = " ".join(str(error).split()) if ours else describe_error(error)
