"""Watch: the boundaries that each kernel of a process gets, in any stack, while it runs as it is.

    with watch() as seen:
        trainer.train()
    seen.faults

The first steps are looked at, each forward on its own, and then everything is taken off. A step ends with an optimizer's, or
with a forward without gradients. Costs one copy of boundaries to the host a call, and of masks one look at each score.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from collate_npu.consumers.adapter import MADE
from collate_npu.consumers.model_traits import is_compiled, unwrap
from collate_npu.errors import CollateError, printable
from collate_npu.keys import of_kind
from collate_npu.proof.forward import Fault, Forward, block, case_of
from collate_npu.proof.known_kernels import UnreadError
from collate_npu.proof.recorder import Recorder, bound

STEPS = 2
_MOST_PASSES = 64
"""Forwards a step, and those behind the watched ones until all is taken off where no optimizer ends a step."""


class Watch:
    """The kernel calls that `watch` saw in this process, and its faults."""

    def __init__(
        self,
        *,
        steps: int = STEPS,
        stop: bool = False,
        out: Sequence[Path] = (),
        screen: TextIO | None = None,
        keeps: bool = True,
    ) -> None:
        self.forwards: list[Forward] = []
        self.faults: list[Fault] = []
        self.steps = 0
        """Steps that have ended."""
        self.kernels: Counter[str] = Counter()
        """Calls, by kernel."""
        self.silent: set[str] = set()
        """Layers in which no known kernel ran."""
        self._most, self._stop, self._out, self._screen, self._keeps = steps, stop, [*out], screen, keeps
        self._number = self._judged = self._idle = 0
        self._logged: set[str] = set()
        self._passes: Counter[tuple[int, bool]] = Counter()
        """Forwards of a root, with gradients and without."""
        self._recorder = Recorder(self._begin_forward, self._end_forward)

    @property
    def failed(self) -> set[str]:
        """Errors of the watching itself; the run goes on after them."""
        return self._recorder.failed

    # --- on and off

    def start(self) -> None:
        """Wrap the kernels, and begin to watch."""
        self._recorder.install()
        self._optimizers = register_optimizer_step_post_hook(lambda *_: self._end_step())
        MADE.watch(1)

    def end(self) -> None:
        """Unwrap the kernels; the process is as before."""
        if self._recorder.listens:
            self._recorder.take_off()
            self._optimizers.remove()
            MADE.watch(-1)
            if not self._keeps:  # they hold the models
                self.forwards = []

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Forward | None:
        """The forward that begins here, if this is a model that is still watched, or a layer that is computed again."""
        again = torch._C._current_graph_task_id() != -1
        root = self._recorder.root_of(module) if again else None
        if root is None:
            if not self._recorder.knows(module):
                return None
            root = module
        training = torch.is_grad_enabled() or again
        self._passes[id(root), training] += not again
        if self._passes[id(root), training] > (_MOST_PASSES if training else 1) * self._most:
            if training or not any(trained for _, trained in self._passes):
                self._idle += 1  # nobody steps: it is not trained, or by an optimizer without hooks
            if self._idle > _MOST_PASSES:
                self.end()
            return None
        forward = Forward(root=root, number=self._number, step=self.steps, training=training, again=again)
        if again:
            same = [each for each in self.forwards if each.root is root and each.step == self.steps and not each.again]
            forward.before = [call for each in same for call in each.calls]
        self._number += not again
        if not again:
            self._read_batch(forward, root, args, kwargs)
        return forward

    def _read_batch(self, forward: Forward, root: nn.Module, args: Any, kwargs: Any) -> None:
        """What the inputs of the outermost module say: our adapter's Segments, or what the door finds."""
        try:
            inner = unwrap(root)
            given = bound(inner.forward, args, kwargs)
            forward.compiled = is_compiled(root)
            ids = given.get("input_ids", given.get("tokens"))
            if isinstance(ids, Tensor):
                forward.ids = ids
                if ids.shape[-1] == 1:
                    raise UnreadError("one token a row: decoding is not judged")
            forward.judge_by(case_of(inner, given), whole=not of_kind(given, "vision"))
        except (CollateError, UnreadError) as error:
            forward.skip_reason = str(error)
        except Exception as error:  # whatever stands in a stranger's arguments
            forward.skip_reason = f"{type(error).__name__}: {str(error)[:80]}"

    # --- forwards and steps

    def _end_forward(self, forward: Forward) -> str:
        if forward.again and not forward.calls:
            return ""
        if not forward.again:
            forward.silent = forward.layers_without_kernels()
            self.silent.update(forward.silent)
        self.kernels.update(forward.counts())
        self._judged += not forward.again and forward.judged
        found = forward.faults()
        self.faults += found.values()
        self.forwards.append(forward)
        if found or not forward.again:
            self._log_forward(forward, found)
        forward.release()
        if not (found and self._stop):
            return ""
        self.end()
        return "\n".join(dict.fromkeys(map(str, found.values())))

    def _end_step(self) -> None:
        if self.forwards and any(each.step == self.steps and each.training for each in self.forwards):
            self.steps += 1
            if not self._keeps:
                self.forwards = []
        if self.steps >= self._most:
            self.end()

    def _log_forward(self, forward: Forward, faults: Mapping[int, Fault]) -> None:
        where = f"step {forward.step} rank {_rank()}"
        how = " · computed again" if forward.again else "" if forward.training else " · without gradients"
        how += f" · it raised {forward.raised}" * bool(forward.raised)
        lines = [f"{where}{how} · {block(forward, faults) or 'no known kernel ran'}"]
        if forward.skip_reason and -1 not in faults and forward.skip_reason not in self._logged:
            self._logged.add(forward.skip_reason)
            lines.append(f"  not judged by its batch: {forward.skip_reason}")
        for text in dict.fromkeys(map(str, faults.values())):
            lines.append(f"  ✘ {text}")
        if forward.compiled:
            lines.append("  compiled modules are not seen: set TORCH_COMPILE_DISABLE=1 to watch them")
        record = {
            "rank": _rank(), "pid": os.getpid(), "step": forward.step, "forward": forward.number, "again": forward.again,
            "training": forward.training, "model": type(forward.root).__name__, "said": lines[0],
            "kernels": dict(forward.counts()), "silent": forward.silent,
            "judged": forward.judged, "unsaid": forward.skip_reason,
            "faults": [asdict(each) | {"told": each.received} for each in faults.values()],
        }  # fmt: skip
        self._write("\n".join(lines), record)

    def summary(self) -> str:
        """Return the numbers of steps, calls and kernels seen, and what was not checked. Nothing seen is no pass."""
        if not self.kernels and not self.faults:
            models = ", ".join(sorted(self._recorder.models))
            seen = f"no known kernel ran in {models}" if models else "no model with attention or recurrent layers ran"
            return f"NOTHING WAS SEEN: {seen}. This is not a pass."
        if not (self._judged or self.faults):
            why = next(iter(self._logged), "no kernel had the tokens of its batch").splitlines()[0]
            return f"NOT JUDGED: {self._number} forwards, and none was compared with its batch: {why} This is not a pass."
        calls = ", ".join(f"{name} {n}" for name, n in self.kernels.most_common())
        silent = sorted(self.silent)
        lines = [f"{self.steps} steps, {self._number} forwards ({self._judged} compared with their batch), kernels: {calls}"]
        if silent:
            lines.append(f"no known kernel ran in: {', '.join(silent[:8])}{', ...' * (len(silent) > 8)}")
        if self.failed:
            lines.append(f"could not be watched: {'; '.join(sorted(self.failed)[:4])}")
        if self._recorder.unwrapped:
            lines.append(f"could not be wrapped: {'; '.join(self._recorder.unwrapped[:4])}")
        lines.append(f"{len(self.faults)} faults" if self.faults else "no fault in what was checked")
        return " · ".join(lines)

    def log_summary(self) -> None:
        """Log the summary at the end of a process in which a model ran."""
        self.end()
        if self._number or self.failed:
            self._write(f"rank {_rank()}: {self.summary()}", {})

    def forget(self) -> None:
        """Drop what was seen: a forked process begins anew."""
        self.forwards, self.faults, self.kernels = [], [], Counter()
        self.steps = self._number = self._judged = self._idle = 0
        self._recorder.forget()

    def _write(self, text: str, record: Mapping[str, Any]) -> None:
        if self._screen is not None:
            with suppress(OSError, ValueError):
                print(printable(f"collate_npu watch: {text}"), file=self._screen, flush=True)
        for path in [*self._out] if record else ():
            try:
                with open(path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
            except OSError as error:  # a full disk does not end a run
                self._out.remove(path)
                self._write(f"{error}: nothing more is written there", {})


@contextmanager
def watch(*, steps: int = STEPS, stop: bool = False, out: str | Path | None = None, say: bool = True) -> Iterator[Watch]:
    """Check, for so many steps, the boundaries that each kernel of this process gets, forward by forward.

    With `stop` the first fault raises `CollateError` after its forward. Each forward writes a line of JSON to `out`, and a
    block to the screen (stderr) unless `say` is False. Afterwards nothing is wrapped any more.

    >>> import torch
    >>> from collate_npu.testing import tiny_model
    >>> model, ids = tiny_model("qwen3_next", vocab_size=257), torch.tensor([[256, 256, 7], [4, 5, 6]])
    >>> with watch(say=False) as seen:
    ...     out = model(input_ids=ids, attention_mask=torch.tensor([[0, 0, 1], [1, 1, 1]]))
    >>> seen.faults, seen.kernels["transformers.torch_chunk_gated_delta_rule"]
    ([], 2)
    """
    seen = Watch(steps=steps, stop=stop, out=[Path(out)] if out else [], screen=sys.stderr if say else None)
    seen.start()
    try:
        yield seen
    finally:
        seen.end()
        seen._write(seen.summary(), {})


def arm(_torch: Any) -> None:
    """Watch this process to its end, as `collate-npu watch` sets it in the environment; torch was just imported."""
    settings = json.loads(os.environ["COLLATE_NPU_WATCH"])
    out = [Path(path) for path in (settings["seen"], settings["out"]) if path]
    seen = Watch(steps=settings["steps"], out=out, screen=sys.stderr, keeps=False)
    seen.start()
    os.register_at_fork(after_in_child=seen.forget)
    atexit.register(seen.log_summary)


def _rank() -> str:
    return os.environ.get("RANK", "0")
