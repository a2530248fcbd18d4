"""Kernel runs: the operators that are installed, called with our arguments on a device, against each sequence alone.

Each call is judged by its contract first (`kernels.check`), then made, forward and backward; outputs and gradients of real
tokens are compared with float64 (`kernel_rows`), gradients at padding must be finite. What passes is measured: `TIMES`
the noise, which is what rounding the inputs to the dtype moves, and at least what a matrix product loses on this device.
A kernel's matrix units may round float32 to ten bits (TF32, HF32), whatever torch is set to: on a card that is its noise.
"""

from __future__ import annotations

import builtins
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

from collate_npu.errors import CollateError
from collate_npu.kernels.check import call_breaches, knows
from collate_npu.outputs import unpad
from collate_npu.proof.kernel_rows import SHARED, TRUTHS, Expected, Inputs, Kernel, Truth, apart, expected, in_dtype
from collate_npu.proof.measure import FLOOR, MARGIN, TIMES, product_error
from collate_npu.releases import installed

State = Literal["right", "wrong", "refused", "raised", "cannot tell", "would run", "not installed", "not here"]
"""`refused` by this library, which has no form for it; `raised` by the operator; `not here`: not on this device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One call of an operator, or why there is none. Errors as in `kernel_rows.apart`; None where not measured."""

    operator: str
    state: State
    version: str = ""
    truth: str = ""
    form: str = ""
    forward: float | None = None
    backward: float | None = None
    """The largest of any input."""
    passes: float | None = None
    """The largest error of the output that passes."""
    note: str = ""


class _NotRunError(Exception):
    """Why an operator is not called."""


@dataclass(slots=True)
class _Asked:
    """What a row calls in the place of its operator."""

    kernel: Kernel
    truth: Truth
    function: Callable[..., Any] | None
    form: str
    broken: list[str] = field(default_factory=list)
    called: bool = False

    def __call__(self, form: str, **arguments: Any) -> Any:
        self.form = form
        if knows(self.kernel.name):
            about = {} if self.kernel.problem.recurrent else {"pattern": self.truth.pattern}
            found = call_breaches(self.kernel.name, arguments, segments=self.truth.segments, **about)
            self.broken = [str(breach) for breach in found]
        if self.function is None or self.broken:
            raise _NotRunError
        self.called = True
        first = [arguments.pop(name) for name in self.kernel.positional]
        return self.function(*first, **arguments)


def runs(
    kernels: Sequence[Kernel],
    *,
    device: str,
    dtype: torch.dtype,
    dry: bool = False,
    few: bool = False,
    also: Sequence[str] = (),
) -> Iterator[Run]:
    """Every operator on every truth that it is for, in each of its forms. `dry`: judged, and not called.

    `few` takes the truths that show most. `also` names operators that are interpreted here: slowly, so of those few too.
    """
    kind = device.partition(":")[0]
    for kernel in kernels:
        slow = kernel.name in also
        try:
            _check(kernel, kind, dtype, dry=dry, slow=slow)
            function = None if dry else kernel.function(kind)
        except _NotRunError as error:
            installed = dry or bool(kernel.version) or kind not in kernel.devices
            yield Run(operator=kernel.name, state="not here" if installed else "not installed", note=str(error))
        except Exception as error:  # a package that is half there
            yield Run(operator=kernel.name, state="not here", note=f"it does not load: {_said(error)}")
        else:
            found = of_kernel(kernel, function, device=device, dtype=dtype, few=few or slow)
            yield from (replace(run, version=f"{run.version}, interpreted") if slow else run for run in found)


def _check(kernel: Kernel, kind: str, dtype: torch.dtype, *, dry: bool, slow: bool) -> None:
    if kind not in kernel.devices and not slow:
        raise _NotRunError(f"it runs on {' and '.join(kernel.devices)}")
    if slow and dtype != torch.float32:
        raise _NotRunError("Triton's interpreter takes float32: its products of bfloat16 are wrong (triton 3.7.0)")
    if dtype not in kernel.dtypes:
        raise _NotRunError(f"it takes {', '.join(str(each).removeprefix('torch.') for each in kernel.dtypes)}")
    if not dry and not kernel.version:
        raise _NotRunError(f"{kernel.package} is not installed")


def of_kernel(
    kernel: Kernel, function: Callable[..., Any] | None, *, device: str, dtype: torch.dtype, few: bool = False
) -> Iterator[Run]:
    """One operator; without a function its calls are judged alone."""
    for truth in TRUTHS:
        causal = truth.pattern.name == "causal"
        if (few and not truth.few) or (kernel.problem.recurrent and not causal):
            continue
        for form in kernel.forms:
            if causal or "causal" not in form:
                yield _run(kernel, truth, form, function, device, dtype)


def _run(
    kernel: Kernel, truth: Truth, form: str, function: Callable[..., Any] | None, device: str, dtype: torch.dtype
) -> Run:
    asked = _Asked(kernel, truth, function, form)
    run = Run(operator=kernel.name, version=kernel.version, truth=truth.name, form=form, state="right")
    try:
        run = _measured(kernel, truth, asked, run, device, dtype)
    except CollateError as error:
        run = replace(run, state="raised" if asked.called else "refused", note=str(error))  # an output of another shape
    except _NotRunError:
        run = replace(run, state="wrong" if asked.broken else "would run", note="; ".join(asked.broken))
    except Exception as error:  # operators raise what they like
        run = replace(run, state="raised", note=_said(error))
    return replace(run, form=asked.form)


def _measured(kernel: Kernel, truth: Truth, asked: _Asked, run: Run, device: str, dtype: torch.dtype) -> Run:
    drawn = in_dtype(kernel.problem.draw(truth.segments), dtype)
    where, backward = "cpu" if asked.function is None else device, device.partition(":")[0] in kernel.backward
    inputs = {name: x.to(where).requires_grad_(backward) for name, x in drawn.items()}
    with torch.set_grad_enabled(backward), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = kernel.call(asked, truth, inputs, asked.form)
        known = expected(kernel.problem, truth, dtype)
        if backward:  # padding takes no part: what stands there must not reach the rest
            weights = known.weights[truth.segments.keep].float().to(out.device)
            torch.autograd.backward((unpad(out, truth.segments).float() * weights).sum())
    gradients = {name: _gradient(x) for name, x in inputs.items()} if backward else {}
    coarse = _rounded_to(dtype, device)
    noise, like = expected(kernel.problem, truth, coarse).noise, torch.zeros(1, dtype=coarse, device=device)
    least = FLOOR * product_error(like)
    passes = {name: TIMES * max(each, least) for name, each in noise.items()}  # the first: NaN is not replaced
    return _judged(run, truth, known, {"out": out, **gradients}, passes)


def _rounded_to(dtype: torch.dtype, device: str) -> torch.dtype:
    """What a kernel's products round their inputs to: float16 has the ten bits of TF32 and HF32."""
    return torch.float16 if dtype == torch.float32 and not device.startswith("cpu") else dtype


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def _judged(run: Run, truth: Truth, known: Expected, found: Inputs, passes: Mapping[str, float]) -> Run:
    right = {"out": known.out, **known.gradients}
    errors = apart(truth.segments, found, {name: right[name] for name in found})
    astray = [name for name in found if not errors[name] <= passes[name]]
    spoilt = [name for name in {*found} - SHARED - {"out"} if not bool(torch.isfinite(found[name]).all())]
    said = [f"{', '.join(astray)} of real tokens"] if astray else []
    said += [f"not finite at padding: gradients of {', '.join(sorted(spoilt))}"] if spoilt else []
    told = MARGIN * max(passes[name] for name in found) < 1  # else zeros would pass
    state: State = "wrong" if said else "right" if told else "cannot tell"
    backward = [errors[name] for name in found if name != "out"]
    return replace(
        run, state=state, forward=errors["out"], backward=_largest(backward) if backward else None, passes=passes["out"],
        note="; ".join(said) or ("" if told else "the noise here is as large as what is wrong"),
    )  # fmt: skip


def _largest(errors: Iterable[float]) -> float:
    """NaN if one is."""
    return float(torch.tensor(list(errors), dtype=torch.float64).amax())


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


# --- fla's released Triton kernels in Triton's own interpreter: slow, and their real code. What stands in for the card: the
# autotuner takes a kernel's first configuration, and a loop over a number that was loaded counts in Triton's integers.

KERNELS = ("fla.chunk_gated_delta_rule", "fla.fused_recurrent_gated_delta_rule", "fla.chunk_kda", "fla.causal_conv1d")
"""What runs there."""
_MODULES = ("fla.modules.convolution", "fla.ops.gated_delta_rule", "fla.ops.kda")


def interpreted() -> tuple[str, ...]:
    """The kernels that run on this CPU, for the rest of the process; none where fla or triton is not installed.

    Nor where Triton or fla was imported before: then it compiles, and there is no card. Call it first.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        if not (installed("fla") and installed("triton")) or {"triton", "fla"} & sys.modules.keys():
            return ()
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fla: Triton is not supported here
            _stand_in()
    except Exception:  # releases that fit neither each other nor this
        return ()
    return KERNELS


def _stand_in() -> None:
    def first(*_: Any, **__: Any) -> tuple[float, ...]:
        return 0.0, 0.0, 0.0

    import_module("triton.runtime.autotuner").Autotuner._bench = first
    for name in _MODULES:
        import_module(name)
    count_in_triton()


def count_in_triton() -> None:
    """In every module of fla that is imported by now."""
    tensor, read = import_module("triton.language").tensor, import_module("triton.runtime.interpreter")._implicit_cvt

    def counting(*bounds: Any) -> Iterable[Any]:
        """`range`, whose numbers are Triton's where its bounds are."""
        if not any(isinstance(bound, tensor) for bound in bounds):
            return builtins.range(*bounds)
        whole = (int(bound.handle.data.item()) if isinstance(bound, tensor) else bound for bound in bounds)
        return map(read, builtins.range(*whole))

    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            vars(module)["range"] = counting
