"""Need: do you need this library? Each trainer that is installed here trains a tiny model, plain and with the line to add.

A trainer is built as its user builds it. It takes a few steps on one batch, which leave the weights as they are: the
gradient of the first is compared with that of each sequence alone, the others are timed. ms-swift's rows stand in
`integrations/swift/need.py`, for a stack is named in its own files alone.
"""

from __future__ import annotations

import copy
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, Trainer, TrainingArguments

from collate_npu import integrations
from collate_npu.collate.wrapping import wrap_collator
from collate_npu.consumers.model_traits import text_config
from collate_npu.errors import printable
from collate_npu.integrations.adapt import adapt
from collate_npu.proof import measure
from collate_npu.proof.invariance import advice, locate
from collate_npu.releases import installed
from collate_npu.testing import byte_tokenizer
from collate_npu.tools import terminal
from collate_npu.tools.checkpoints import check_models, is_checkpoint, load_model
from collate_npu.tools.user_code import describe_error

_LENGTHS = (400, 96, 240, 160)
_ROUNDING = 1e-4
"""A smaller error is right: float32 rounds by 1e-6, and faults begin at 1e-2."""
_SETTINGS: dict[str, Any] = {
    "max_steps": 4, "per_device_train_batch_size": len(_LENGTHS), "learning_rate": 0.0, "max_grad_norm": 0.0,
    "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "logging_strategy": "no",
    "disable_tqdm": True,
}  # fmt: skip

_Rows = dict[str, tuple[str, Callable[..., Any]]]
"""By what a user trains with: the line to add; `build(model, tokenizer, features, settings, ours=...)` returns a trainer."""


def _trainer(model: Any, tokenizer: Any, features: Any, settings: Any, *, ours: bool, side: str = "right") -> Any:
    tokenizer.padding_side = "left" if side == "left" else "right"
    collator: Any = DataCollatorWithFlattening() if side == "flat" else DataCollatorForSeq2Seq(tokenizer)
    if ours and side == "left":
        collator = wrap_collator(collator, model=model)
    return _adapted(Trainer(model, TrainingArguments(**settings), data_collator=collator, train_dataset=features), ours)


def _sft(model: Any, tokenizer: Any, features: Any, settings: Any, *, ours: bool, **options: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    datasets: Any = import_module("datasets")
    datasets.disable_progress_bars()
    logging.getLogger("trl").setLevel(logging.ERROR)
    data = datasets.Dataset.from_list([{"input_ids": feature["input_ids"]} for feature in features])
    trainer = SFTTrainer(model, SFTConfig(**settings, **options), train_dataset=data, processing_class=tokenizer)
    return _adapted(trainer, ours)


def _adapted(trainer: Any, ours: bool) -> Any:
    if ours:
        adapt(trainer.model)
    return trainer


_ADAPTS = "adapt(trainer.model)"
_WRAPS = f"wrap_collator(collator, model=model); {_ADAPTS}"
_STACKS: dict[str, _Rows] = {
    "transformers": {
        "Trainer, DataCollatorForSeq2Seq, padded right": (_ADAPTS, _trainer),
        "Trainer, DataCollatorForSeq2Seq, padded left": (_WRAPS, partial(_trainer, side="left")),
        "Trainer, DataCollatorWithFlattening": (_ADAPTS, partial(_trainer, side="flat")),
    },
    "trl": {
        "TRL SFTTrainer, padded": (_ADAPTS, _sft),
        "TRL SFTTrainer, packing=True": (_ADAPTS, partial(_sft, packing=True, max_length=max(_LENGTHS))),
        "TRL SFTTrainer, padding_free=True": (_ADAPTS, partial(_sft, padding_free=True, max_length=None)),
    },
}


def stacks() -> dict[str, _Rows]:
    """Return the rows by package: `_STACKS`, and those of the integrations."""
    names = (path.parent.name for path in sorted(Path(integrations.__file__).parent.glob("*/need.py")))
    found = [import_module(f"collate_npu.integrations.{name}.need") for name in names]
    return {**_STACKS, **{each.PACKAGE: each.NEED for each in found}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The first step of a trainer, and the seconds of a later one."""

    word: str
    """right, wrong, or refused: an error was raised."""
    gradient: float | None = None
    seconds: float = 0.0
    note: str = ""
    """"labels" if the gradient is wrong and the logits are right; else the error."""

    def __str__(self) -> str:
        return f"wrong: {self.gradient:.2g} {self.note}".rstrip() if self.word == "wrong" else self.word


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One model and one way to train it, without us and with the line."""

    model: str
    by: str
    line: str
    plain: Step
    ours: Step

    def cells(self) -> list[str]:
        """Return the row of the table."""
        faster = self.plain.seconds / self.ours.seconds if self.plain.seconds and self.ours.seconds else 0.0
        nothing = f"nothing; faster: {self.line}" if faster > 1.15 else "nothing"
        line = nothing if self.plain.word == "right" else self.line
        return [self.model, self.by, str(self.plain), str(self.ours), line, f"{faster:.1f}" if faster else "-"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """All rows, and the release of each package; "" if it is not installed."""

    rows: Sequence[Trained]
    releases: dict[str, str]

    @property
    def exit_code(self) -> int:
        """0: all rows are right with their line; 1: one is wrong, or was right without; 2: another is refused."""
        lost = [row.plain.word for row in self.rows if row.ours.word != "right"]
        return 1 if "right" in lost or any(row.ours.word == "wrong" for row in self.rows) else 2 if lost else 0

    def as_json(self) -> dict[str, Any]:
        """Return all of it for machines."""
        return terminal.verdict_json(self.exit_code, **asdict(self))

    def drawn(self) -> dict[str, Text | Table]:
        """Return the verdict, the table, and what its words mean."""
        plain, ours = (sum(getattr(row, who).word == "right" for row in self.rows) for who in ("plain", "ours"))
        said = f"{plain} of {len(self.rows)} rows are right without collate_npu, {ours} with the line"
        verdict = terminal.verdict_line(self.exit_code, f"{terminal.WORDS[self.exit_code]}: {said}.")
        table = terminal.ruled("", "you train with", "without", "with", "add this line", numbers=("speed",))
        for name in dict.fromkeys(row.model for row in self.rows):
            table.add_row("", Text(name, "bold"))
            for row in (each for each in self.rows if each.model == name):
                sign = {"right": terminal.RIGHT, "wrong": terminal.WRONG}.get(row.ours.word, terminal.UNPROVED)
                table.add_row(Text(*sign), *map(Text, row.cells()[1:]))
        notes = dict.fromkeys((row.model, step.note) for row in self.rows for step in (row.plain, row.ours))
        tokens = f"sequences of {', '.join(map(str, _LENGTHS))} tokens, on a CPU in float32"
        words = terminal.terms([
            ("wrong", f"relative error of a step's gradient, beside each sequence alone; right: below {_ROUNDING:g}"),
            ("labels", "the logits are right, but the first label of a row is trained from padding"),
            *(("refused", f"{model}: {note}") for model, note in notes if note not in ("", "labels")),
            ("speed", f"how many times as fast a step is with the line; {tokens}"),
            ("ran", ", ".join(f"{package} {here}" for package, here in self.releases.items() if here)),
            ("not installed", ", ".join(package for package, here in self.releases.items() if not here) or "-"),
        ])  # fmt: skip
        return {"Verdict": verdict, "Rows": table, "Words": words}


class _Subject:
    """A model, sequences of random tokens, and what each gives alone."""

    def __init__(self, name: str, *, trust: bool) -> None:
        self.name = name
        self.model, tokenizer, pad = load_model(name, "sdpa", trust=trust)
        config = text_config(self.model.config)  # a router's loss is of the whole batch: no sequence has it alone
        config.output_router_logits, config.router_aux_loss_coef = False, 0.0
        self.tokenizer, drawn = tokenizer or byte_tokenizer(), torch.Generator().manual_seed(0)
        most = min(self.model.get_input_embeddings().weight.shape[0], 256)
        rows = [[*torch.randint(3, most, (n - 1,), generator=drawn).tolist(), pad] for n in _LENGTHS]  # eos is pad, too
        self.features = [{"input_ids": ids, "labels": ids} for ids in rows]
        self.alone = measure.alone(copy.deepcopy(self.model), self.features, True)  # some models keep a state

    def step(self, build: Callable[..., Any], *, ours: bool) -> Step:
        """Train a copy of the model; what trainers print and warn of is not shown."""
        seconds: list[float] = []
        gradients: measure.Gradients = {}

        def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
            began = perf_counter()
            with nullcontext() if gradients else measure.without_dropout(model):
                loss = inner(model, *args, **kwargs)
            seconds.append(perf_counter() - began)
            if not gradients:
                gradients.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
            return loss

        made, given = tempfile.TemporaryDirectory(), copy.deepcopy((self.model, self.tokenizer, self.features))
        with made as folder, redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                trainer = build(*given, {"output_dir": folder, **_SETTINGS}, ours=ours)
                inner, trainer.training_step = trainer.training_step, watched
                trainer.train()
            except Exception as error:
                return Step(word="refused", note=describe_error(error))
            # a trainer learns the mean over the labels; transformers 4.57 counts the first ones, too
            gradient = min(self._error(gradients, count) for count in (sum(_LENGTHS) - len(_LENGTHS), sum(_LENGTHS)))
            word = "right" if gradient < _ROUNDING else "wrong"
            note = "labels" if word == "wrong" and self._labels_alone(trainer) else ""
        return Step(word=word, gradient=gradient, seconds=min(seconds[1:]), note=note)

    def _error(self, gradients: measure.Gradients, count: int) -> float:
        summed = replace(self.alone, gradients={name: grad * count for name, grad in gradients.items()})
        return measure.errors_between(summed, self.alone).gradient

    def _labels_alone(self, trainer: Any) -> bool:
        """True if the logits are right, and first labels are not ignored."""
        with suppress(Exception):  # a batch that only its trainer can hand to the model
            located = locate(next(iter(trainer.get_train_dataloader())), self.features)
            logits = measure.errors_between(located.numbers(trainer.model, False), self.alone).logits
            return logits < _ROUNDING and "First labels" in advice(located, trainer.model, ())
        return False


def measure_need(*, models: Sequence[str], trust: bool) -> Needed:
    """Measure every row of each installed package. Raises `CollateError` for a model that cannot be used."""
    check_models(models, None, trust=trust)
    if not any(map(is_checkpoint, models)):
        torch.set_num_threads(1)  # tiny models run faster so, and as fast each time
    subjects = [_Subject(name, trust=trust) for name in dict.fromkeys(models or ("qwen3_next", "qwen3"))]
    ways = [(words, *how) for package, rows in stacks().items() if installed(package) for words, how in rows.items()]
    found: list[Trained] = []
    with terminal.progress(len(ways) * len(subjects)) as show:
        for words, line, build in ways:
            for subject in subjects:
                show(printable(f"{subject.name}, {words}"), len(found))
                plain, ours = (subject.step(build, ours=ours) for ours in (False, True))
                found.append(Trained(model=subject.name, by=words, line=line, plain=plain, ours=ours))
    return Needed(rows=found, releases={package: installed(package) for package in ("torch", *stacks())})
