"""Environment: what is installed and set, whether torch and torch_npu load, and known hazards.

For issue reports and for people who wonder why a mask is lost. torch need not load: a question that imports it is answered
in a process of its own, which a library may crash alone. A driver or a half-installed package may raise, abort, or
never come back: then the reason is the answer. The process finds packages as any Python here does, but never in the working
directory, which `python -c` puts first.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from collate_npu import releases
from collate_npu.errors import printable
from collate_npu.integrations import trainers
from collate_npu.releases import DISTRIBUTIONS, Since, installed, numbers
from collate_npu.tools.user_code import describe_error

SECONDS = 120
"""How long a process may take."""
_FOLDER = str(Path(__file__).resolve().parents[2])
"""Around this package, which is found there if nowhere before."""
_CODE = """import sys
sys.path = [*filter(None, sys.path), sys.argv[2]]
from collate_npu.tools.env import answer
answer(sys.argv[1])"""


def ask(question: str, *, seconds: float = SECONDS) -> dict[str, str]:
    """Return the answer to one of `ANSWERS`, or `{"fails": why}`."""
    command = [sys.executable, "-c", _CODE, question, _FOLDER]
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return {"fails": f"no answer within {seconds:.0f} s"}
    if done.returncode == 0:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    how = f"by {signal.Signals(-done.returncode).name}" if done.returncode < 0 else f"with exit code {done.returncode}"
    last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
    return {"fails": " ".join([f"ended {how}", *(f"({line.strip()[:300]})" for line in last)])}


def answer(question: str) -> None:
    """Write an answer as the last line of stdout, in JSON, and end the process."""
    try:
        found = ANSWERS[question]()
    except (Exception, SystemExit) as error:  # some libraries end the process they are imported in
        found = {"fails": _reason(error)}
    print(f"\n{json.dumps(found)}", flush=True)
    os._exit(0)  # a library that crashes while Python ends has no say in what was found


def _reason(error: BaseException) -> str:
    """Return an error and its first cause: of torch's own error (`_import_device_backends`), that library of CANN which
    torch_npu misses."""
    last = error
    while cause := last.__cause__ or last.__context__:
        last = cause
    return describe_error(error) if last is error else f"{describe_error(error)} ({describe_error(last)})"


def _torch() -> dict[str, str]:
    import torch

    try:
        found = [f"cuda x {torch.cuda.device_count()}"] if torch.cuda.is_available() else []
        npu = getattr(torch, "npu", None)
        if npu is not None and npu.is_available():
            found.append(f"npu x {npu.device_count()} ({npu.get_device_name(0)})")
    except Exception as error:  # a driver that does not answer
        return {"devices": f"not known: {describe_error(error)}"}
    return {"devices": ", ".join(found) or "cpu only"}


def _torch_npu() -> dict[str, str]:
    """torch loads it when it is imported; where that failed or was switched off, the import here says why."""
    cann = getattr(getattr(import_module("torch_npu"), "version", None), "cann", None)
    return {"npu": f"torch_npu loads{f', CANN {cann}' if cann else ''}"}


ANSWERS: Mapping[str, Callable[[], dict[str, str]]] = {"torch": _torch, "torch_npu": _torch_npu}


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What `collate-npu env` prints."""

    system: str
    packages: dict[str, str]
    """Installed packages and their versions."""
    settings: dict[str, str]
    devices: str
    npu: str
    """Whether torch_npu works here, and if not, why."""
    cann: str
    """The CANN toolkit and its version, or why there is none."""
    hazards: tuple[str, ...] = ()


_SETTINGS = (
    "NPU_FA2_SPARSE_MODE", "TORCH_DEVICE_BACKEND_AUTOLOAD", "USE_MCORE_GDN", "COLLATE_NPU_GUARD",
    "ASCEND_HOME_PATH", "ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "LD_LIBRARY_PATH",
)  # fmt: skip
_BASE = (
    "torch", "numpy", "torch_npu", "transformers", "datasets", "mindspeed", "megatron_adaptor", "transformer_engine_npu",
    "llamafactory",
)  # fmt: skip
_KERNELS = (
    *DISTRIBUTIONS["fla"], *DISTRIBUTIONS["causal_conv1d"], *DISTRIBUTIONS["fla_npu"], "kernels", "triton", "triton-ascend",
    "mamba-ssm", "flash-attn", "transformer-engine",
)  # fmt: skip


def environment() -> Environment:
    """Look around. Never raises for a package that is broken: that is a finding."""
    from collate_npu import __version__

    names = dict.fromkeys((*_BASE, *(package for package, _ in trainers().values()), *_KERNELS))
    held = {name: version for name in names if (version := installed(name))}
    torch = ask("torch")
    fails = torch.get("fails", "")
    npu = {"npu": "torch_npu is not installed"}
    if "torch_npu" in held:
        npu = {"fails": fails} if fails else ask("torch_npu")
    found = Environment(
        system=f"{platform.platform()}, Python {platform.python_version()}",
        packages={"collate_npu": __version__, **held},
        settings={name: value for name in _SETTINGS if (value := os.environ.get(name))},
        devices=f"not known: torch does not load: {fails}" if fails else torch["devices"],
        npu=f"torch_npu does not load: {npu['fails']}" if "fails" in npu else npu["npu"],
        cann=_cann(),
    )
    return replace(found, hazards=tuple(hazards(found)))


_CANN_FILES = ("version.info", "version.cfg", "*-linux/ascend_toolkit_install.info", "*/version.info")
"""Where releases of CANN say which they are, below ASCEND_HOME_PATH; torch_npu reads the third (utils/collect_env.py)."""
_VERSION = re.compile(r"^\s*(?:version|\w+_running_version)\s*=\s*\[?(?:[\d.]+:)?([^\]\s]+)", re.IGNORECASE | re.MULTILINE)


def _cann() -> str:
    """Return the CANN toolkit that ASCEND_HOME_PATH names, and its version; why not, where there is none."""
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME", "")
    if not home:
        return "none: ASCEND_HOME_PATH is not set"
    if not Path(home).is_dir():
        return f"none: ASCEND_HOME_PATH is {home}, which is no folder"
    files = (path for pattern in _CANN_FILES for path in sorted(Path(home).glob(pattern)) if path.is_file())
    found = filter(None, (_VERSION.search(path.read_text(encoding="utf-8", errors="replace")) for path in files))
    return f"{next((one[1] for one in found), 'version not known')} in {home}"


def report(*, as_json: bool = False) -> str:
    """Return the report of this machine as Markdown to paste into an issue, or as JSON; no home directory, no token."""
    found = masked(asdict(environment()))
    if as_json:
        return json.dumps(found, indent=2)
    facts = {"system": found["system"], **found["packages"], **found["settings"]}
    facts |= {name: found[name] for name in ("devices", "npu", "cann")}
    return "\n".join([f"- {name}: {value}" for name, value in facts.items()] + [f"- hazard: {x}" for x in found["hazards"]])


_PRIVATE = (
    (r"(?<=//)[^/\s:@]+:[^/\s@]+(?=@)", "***"),  # user:password@host
    (r"\b(hf_|sk-|gh[pousr]_|github_pat_|glpat-)[\w-]{8,}", "***"),
    (r"((?:token|secret|password|api_?key)\w*\s*[=:]\s*)[^\s,;\"\\]+", r"\1***"),
    (r"/(?:home|Users)/[^/\s:;,()\"\\]+", "~"),
)


def masked(value: Any) -> Any:
    """Return the text without what is private: home directories, passwords in addresses, tokens; each text on one line, with
    nothing in it that a terminal obeys."""
    if isinstance(value, dict):
        return {key: masked(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(item) for item in value]
    if len(home := str(Path.home())) > 1:
        value = re.sub(rf"{re.escape(home)}(?=[/\s:;,()'\"]|$)", "~", value)
    for pattern, instead in _PRIVATE:
        value = re.sub(pattern, instead, value, flags=re.IGNORECASE)
    return printable(value).replace("\n", "\\n")


# --- known hazards


@dataclass(frozen=True, slots=True)
class Hazard:
    """What is wrong where these packages are installed."""

    packages: str
    text: str
    """A package in braces stands for its version, `{cann}` for the toolkit, `{wanted}` for the one torch_npu is made for,
    `{made}` for the torch_npu that is made for the toolkit."""
    when: Callable[[Environment], object] = lambda here: True
    """What else must be so."""


def hazards(here: Environment) -> Iterator[str]:
    """Yield a line for each row of the table, for each fault of the table of releases that is here, and for each trainer
    whose release was not run."""
    wanted = releases.cann_of(here.packages.get("torch_npu", ""))
    made = [names for cann, names in releases.CANN_OF_TORCH_NPU.items() if _series(cann) == _series(here.cann)]
    made_for = f"torch_npu {' or '.join(made[0])}" if made else "the one made for this CANN"
    values = {**here.packages, "cann": here.cann, "wanted": wanted, "made": made_for}
    for hazard in HAZARDS:
        if all(_name(here, package) for package in hazard.packages.split()) and hazard.when(here):
            yield hazard.text.format_map(values)
    for fact in vars(releases).values():
        if isinstance(fact, Since) and (name := _name(here, fact.package)) and fact.hurts(here.packages[name]):
            mended = f"mended by {fact}" if str(fact) else "open"
            yield f"{name} {here.packages[name]}: {fact.before} ({fact.source}; {mended})."
    for package, tested in (("torch", ""), *trainers().values()):
        if text := releases.outside(package, tested, here.packages.get(package, "")):
            yield f"{text} says what was checked. No test has run this release: run `collate-npu audit` before you train."


def _name(here: Environment, package: str) -> str:
    """Return which of a package's distributions is installed, "" for none."""
    return next((name for name in DISTRIBUTIONS.get(package, (package,)) if name in here.packages), "")


def _series(cann: str) -> str:
    """Return `9.1` of `9.1.0 in /usr/local/Ascend`, "" where no version is known."""
    found = re.match(r"\d+\.\d+", cann)
    return found[0] if found else ""


def _other_cann(here: Environment) -> bool:
    """True if the toolkit is of another release, as far as both are known."""
    wanted = releases.cann_of(here.packages["torch_npu"])
    return bool(wanted and _series(here.cann)) and _series(wanted) != _series(here.cann)


def _no_megatron_layer(here: Environment) -> bool:
    return here.settings.get("USE_MCORE_GDN", "1").lower() in ("0", "false", "no", "off")


HAZARDS = (
    # `{PyTorch version}` or `{PyTorch version}.postN`: COMPATIBILITY.md of Ascend/pytorch
    Hazard("torch torch_npu", "torch {torch} and torch_npu {torch_npu} are not a pair: install the same release of "
           "both, the one made for this machine's CANN.",
           lambda here: numbers(here.packages["torch"]) != numbers(here.packages["torch_npu"])),
    Hazard("torch_npu", "torch_npu {torch_npu} is made for CANN {wanted}, and here is {cann}: install {made}, or CANN "
           "{wanted} (COMPATIBILITY.md of Ascend/pytorch).", _other_cann),
    Hazard("torch_npu", "torch_npu is installed without the CANN libraries, and `import torch` loads it: set "
           "TORCH_DEVICE_BACKEND_AUTOLOAD=0 to work on the CPU, or source CANN's set_env.sh. transformers imports it too "
           "when it builds a model, and fails: uninstall torch_npu for that.", lambda here: "does not load" in here.npu),
    Hazard("torch_npu", "NPU_FA2_SPARSE_MODE=2 aligns the causal triangle to the top left: right for training, wrong "
           "wherever there are more keys than queries (a KV cache). The default, 3, is right for both.",
           lambda here: here.settings.get("NPU_FA2_SPARSE_MODE") == "2"),
    Hazard("torch_npu transformers", "transformers' flash attention on NPU drops sliding windows without an error "
           "(integrations/npu_flash_attention.py:54-104): use sdpa for models that have them."),
    Hazard("torch_npu fla_npu", "fla_npu beside torch_npu {torch_npu}: numbers may be wrong (streams out of step) before "
           f"{', '.join(releases.TORCH_NPU_STREAMS)}: upgrade. {releases.TORCH_NPU_STREAMS[0]} is made for CANN "
           f"{releases.cann_of(releases.TORCH_NPU_STREAMS[0])}.",
           lambda here: releases.precedes(here.packages["torch_npu"], releases.TORCH_NPU_STREAMS)),
    Hazard("fla triton", "flash-linear-attention (fla-core) and triton are installed and there is no GPU: transformers "
           "hands Gated DeltaNet to their kernels, which fail on a CPU. Uninstall them here.",
           lambda here: here.devices == "cpu only"),
    # integrations/hub_kernels.py:1033 of transformers
    Hazard("transformers fla", "flash-linear-attention without causal-conv1d: transformers before "
           f"{releases.MISSING_KERNEL_RAISES} drops seq_idx in silence, later ones raise nothing where cu_seq_lens_q comes "
           "alone, and the convolution runs from one sequence of a flat row into the next, unless you call adapt(model).",
           lambda here: not _name(here, "causal_conv1d")),
    # mcore-bridge 1.6.5: model/gpts/qwen3_next.py:456-458
    Hazard("mcore-bridge", "No Gated DeltaNet of mcore-bridge {mcore-bridge} reads attention_mask_2d: call "
           "integrations.swift.install() or integrations.megatron.mcore_bridge.install() before the model is built, or pad "
           "right."),
    Hazard("mcore-bridge", "USE_MCORE_GDN=0 takes transformers' Gated DeltaNet: no context parallelism, and from "
           f"transformers {releases.MASK_MAPPING} on no Qwen3-Next without that install: unset it.", _no_megatron_layer),
    Hazard("mcore-bridge megatron-core", "Gated DeltaNet of megatron-core {megatron-core} has no context parallelism: "
           f"{releases.MEGATRON_PARALLEL} is the first release with it.",
           lambda here: not (_no_megatron_layer(here) or releases.MEGATRON_PARALLEL.holds(here.packages["megatron-core"]))),
    *(Hazard(package, f"{name} patches Megatron in the process that trains: `import {module}` first, right after torch; "
             "integrations.mindspeed.start_problem() says there whether that happened.") for package, name, module in (
        ("mindspeed", "MindSpeed", "mindspeed.megatron_adaptor"),
        ("megatron_adaptor", "MegatronAdaptor {megatron_adaptor}", "megatron_adaptor"))),
    # ms-swift pull request 10087; zongzhilou/backend 1f35db2 src/backend/__init__.py
    Hazard("megatron_adaptor mindspeed", "MindSpeed is installed beside MegatronAdaptor, which loads it where it can. Here "
           "masks are chosen for MindSpeed's attention: uninstall the one that you do not use."),
)  # fmt: skip
