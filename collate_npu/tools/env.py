"""Environment: what is installed and set, whether torch and torch_npu load, and known hazards.

torch need not load: what imports it runs in a process of its own, which a broken library may abort or hang alone. That
process finds packages as any Python here does, but never in the working directory, which `python -c` puts first.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from collate_npu import releases
from collate_npu.errors import printable
from collate_npu.integrations import trainers
from collate_npu.releases import DISTRIBUTIONS, Since, installed, numbers

_ASKED = {
    "torch": """import torch
found = [f"cuda x {torch.cuda.device_count()}"] if torch.cuda.is_available() else []
if hasattr(torch, "npu") and torch.npu.is_available():
    found.append(f"npu x {torch.npu.device_count()} ({torch.npu.get_device_name(0)})")
print("\\nfound:", ", ".join(found) or "cpu only", flush=True)""",
    "torch_npu": """import torch_npu
cann = getattr(getattr(torch_npu, "version", None), "cann", "")
print("\\nfound: torch_npu loads" + f", CANN {cann}" * bool(cann), flush=True)""",
}
"""torch loads torch_npu when it is imported; if that fails or is switched off, the import of torch_npu alone says why."""


def ask(package: str, *, seconds: float = 120) -> tuple[str, str]:
    """Return what a package says of its devices, and why it says nothing; one of them is ""."""
    code = f"import sys\nsys.path = [*filter(None, sys.path)]\n{_ASKED[package]}"
    try:
        done = subprocess.run([sys.executable, "-c", code], input="", capture_output=True, errors="replace", timeout=seconds)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {seconds:.0f} s"
    *_, last = done.stdout.splitlines() or [""]
    if last.startswith("found: "):  # a library that crashes while Python ends does not change the answer
        return last[7:], ""
    ended = f"by {signal.Signals(-done.returncode).name}" if done.returncode < 0 else f"with exit code {done.returncode}"
    said = done.stderr.strip().splitlines() or [""]
    errors = [line for line in said if re.match(r"[\w.]*(Error|Exception)\b", line)]  # first the one that caused others
    told = [errors[-1], *errors[: len(errors) > 1]] if errors else [f"ended {ended}", *filter(None, said[-1:])]
    return "", " ".join([told[0][:300], *(f"({line.strip()[:300]})" for line in told[1:])])


_SETTINGS = (
    "NPU_FA2_SPARSE_MODE", "TORCH_DEVICE_BACKEND_AUTOLOAD", "USE_MCORE_GDN", "ASCEND_HOME_PATH",
    "ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "LD_LIBRARY_PATH",
)  # fmt: skip
_BASE = ("torch", "numpy", "torch_npu", "transformers", "datasets", "mindspeed", "megatron_adaptor",
         "transformer_engine_npu", "llamafactory")  # fmt: skip
_KERNELS = (
    *(name for package in ("fla", "causal_conv1d", "fla_npu") for name in DISTRIBUTIONS[package]),
    *("kernels", "triton", "triton-ascend", "mamba-ssm", "flash-attn", "transformer-engine"),
)


def environment() -> dict[str, Any]:
    """Return what is here, by the names that `collate-npu env --json` prints. A package that is broken is a finding."""
    from collate_npu import __version__

    names = dict.fromkeys((*_BASE, *trainers(), *_KERNELS))
    held = {name: version for name in names if (version := installed(name))}
    devices, silent = ask("torch")
    npu, broken = ask("torch_npu") if "torch_npu" in held else ("torch_npu is not installed", "")
    found = {
        "system": f"{platform.platform()}, Python {platform.python_version()}",
        "packages": {"collate_npu": __version__, **held},
        "settings": {name: value for name in _SETTINGS if (value := os.environ.get(name))},
        "devices": devices or f"not known: torch: {silent}",
        "npu": npu or f"torch_npu does not load: {broken}",
        "cann": _cann(),
    }
    return found | {"hazards": [*hazards(found)]}


_CANN_FILES = ("version.info", "version.cfg", "*-linux/ascend_toolkit_install.info", "*/version.info")
"""Where releases of CANN say which they are, below ASCEND_HOME_PATH; torch_npu reads the third (utils/collect_env.py)."""
_VERSION = re.compile(r"^\s*(?:version|\w+_running_version)\s*=\s*\[?(?:[\d.]+:)?([^\]\s]+)", re.IGNORECASE | re.MULTILINE)


def _cann() -> str:
    """Return the version of the CANN toolkit that ASCEND_HOME_PATH names, and its place; or why there is none."""
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME", "")
    if not home or not Path(home).is_dir():
        return f"none: ASCEND_HOME_PATH is {f'{home}, which is no folder' if home else 'not set'}"
    files = (path for pattern in _CANN_FILES for path in sorted(Path(home).glob(pattern)) if path.is_file())
    found = filter(None, (_VERSION.search(path.read_text(encoding="utf-8", errors="replace")) for path in files))
    return f"{next((one[1] for one in found), 'version not known')} in {home}"


def report(*, as_json: bool = False) -> str:
    """Return the report of this machine as Markdown to paste into an issue, or as JSON; no home directory, no token."""
    found = masked(environment())
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
    """Return each text without home directories, passwords in addresses and tokens, on one line that a terminal can show."""
    if not isinstance(value, str):
        return {key: masked(x) for key, x in value.items()} if isinstance(value, dict) else [masked(x) for x in value]
    home = str(Path.home())
    value = re.sub(rf"{re.escape(home)}(?=[/\s:;,()'\"]|$)", "~", value) if len(home) > 1 else value
    for pattern, instead in _PRIVATE:
        value = re.sub(pattern, instead, value, flags=re.IGNORECASE)
    return printable(value).replace("\n", "\\n")


def hazards(here: dict[str, Any]) -> Iterator[str]:
    """Yield each row of `HAZARDS` and each fault of `releases` that is here, and each package whose release was not run."""
    held = here["packages"]
    for packages, when, text in HAZARDS:
        if all(_name(held, package) for package in packages.split()) and when(here):
            yield text.format_map({**held, "cann": here["cann"], "npu": here["npu"]})
    for fact in vars(releases).values():
        if isinstance(fact, Since) and (name := _name(held, fact.package)) and fact.hurts(held[name]):
            mended = f"mended by {fact}" if str(fact) else "open"
            yield f"{name} {held[name]}: {fact.before} ({fact.source}; {mended})."
    for package, tested in {"torch": "", **trainers()}.items():
        if text := releases.outside(package, tested, held.get(package, "")):
            yield f"{text} says what was checked. No test has run this release: run `collate-npu audit` before you train."


def _name(held: dict[str, str], package: str) -> str:
    """Return which of a package's distributions is installed, "" for none."""
    return next((name for name in DISTRIBUTIONS.get(package, (package,)) if name in held), "")


def _other_cann(here: dict[str, Any]) -> bool:
    """Return True if torch_npu names another CANN than the toolkit's."""
    built, cann = (re.search(r"\d+\.\d+", text) for text in (here["npu"].partition("CANN ")[2], here["cann"]))
    return bool(built and cann and built[0] != cann[0])


HAZARDS: tuple[tuple[str, Callable[[dict[str, Any]], object], str], ...] = (
    # `{PyTorch version}` or `{PyTorch version}.postN`: COMPATIBILITY.md of Ascend/pytorch
    ("torch torch_npu", lambda here: numbers(here["packages"]["torch"]) != numbers(here["packages"]["torch_npu"]),
     "torch {torch} and torch_npu {torch_npu} are not a pair: install the same release of both, the one made for this "
     "machine's CANN."),
    ("torch_npu", _other_cann, "{npu}, and here is {cann}: install a pair (COMPATIBILITY.md of Ascend/pytorch)."),
    ("torch_npu", lambda here: "does not load" in here["npu"],
     "torch_npu is installed without the CANN libraries, and `import torch` loads it: set TORCH_DEVICE_BACKEND_AUTOLOAD=0 "
     "to work on the CPU, or source CANN's set_env.sh. transformers imports it to build a model: uninstall it there."),
    ("torch_npu", lambda here: here["settings"].get("NPU_FA2_SPARSE_MODE") == "2",
     "NPU_FA2_SPARSE_MODE=2 aligns the causal triangle to the top left: wrong where there are more keys than queries (a KV "
     "cache). The default, 3, is right."),
    ("torch_npu fla_npu", lambda here: releases.precedes(here["packages"]["torch_npu"], releases.TORCH_NPU_STREAMS),
     "fla_npu beside torch_npu {torch_npu}: numbers may be wrong (streams out of step) before "
     f"{', '.join(releases.TORCH_NPU_STREAMS)}: upgrade."),
    ("fla triton", lambda here: here["devices"] == "cpu only",
     "flash-linear-attention (fla-core) and triton are installed and there is no GPU: transformers hands Gated DeltaNet to "
     "their kernels, which fail on a CPU. Uninstall them here."),
    # integrations/hub_kernels.py:1033 of transformers
    ("transformers fla", lambda here: not _name(here["packages"], "causal_conv1d"),
     "flash-linear-attention without causal-conv1d: the convolution runs from one sequence of a flat row into the next, in "
     f"transformers before {releases.MISSING_KERNEL_RAISES} without an error, unless you call adapt(model)."),
)  # fmt: skip
"""Packages that are installed together, what else must be so, and the hazard. A package in braces stands for its version,
`{cann}` for the toolkit, `{npu}` for what torch_npu says."""
