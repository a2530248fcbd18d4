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
from importlib import import_module
from pathlib import Path
from typing import Any

from collate_npu import releases
from collate_npu.errors import printable
from collate_npu.integrations import trainers
from collate_npu.releases import DISTRIBUTIONS, Since, installed, numbers
from collate_npu.tools.user_code import describe_error

_CODE = """import sys
sys.path = [*filter(None, sys.path), sys.argv[2]]
from collate_npu.tools.env import answer
answer(sys.argv[1])"""


def ask(question: str, *, seconds: float = 120) -> dict[str, str]:
    """Return the answer to one of `ANSWERS`, or `{"fails": why}`."""
    command = [sys.executable, "-c", _CODE, question, str(Path(__file__).resolve().parents[2])]
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
        last: BaseException = error
        while cause := last.__cause__ or last.__context__:  # of torch's own error the library of CANN that is missing
            last = cause
        found = {"fails": describe_error(error) + (f" ({describe_error(last)})" if last is not error else "")}
    print(f"\n{json.dumps(found)}", flush=True)
    os._exit(0)  # a library that crashes while Python ends does not change the answer


def _torch() -> dict[str, str]:
    import torch

    try:
        found = [f"cuda x {torch.cuda.device_count()}"] if torch.cuda.is_available() else []
        if (npu := getattr(torch, "npu", None)) is not None and npu.is_available():
            found.append(f"npu x {npu.device_count()} ({npu.get_device_name(0)})")
    except Exception as error:  # a driver that does not answer
        return {"devices": f"not known: {describe_error(error)}"}
    return {"devices": ", ".join(found) or "cpu only"}


def _torch_npu() -> dict[str, str]:
    cann = getattr(getattr(import_module("torch_npu"), "version", None), "cann", None)
    return {"npu": f"torch_npu loads{f', CANN {cann}' if cann else ''}"}


ANSWERS: dict[str, Callable[[], dict[str, str]]] = {"torch": _torch, "torch_npu": _torch_npu}
"""torch loads torch_npu when it is imported; if that fails or is switched off, the import of torch_npu alone says why."""
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
    torch = ask("torch")
    npu = {"npu": "torch_npu is not installed"}
    if "torch_npu" in held:
        npu = torch if "fails" in torch else ask("torch_npu")
    found = {
        "system": f"{platform.platform()}, Python {platform.python_version()}",
        "packages": {"collate_npu": __version__, **held},
        "settings": {name: value for name in _SETTINGS if (value := os.environ.get(name))},
        "devices": f"not known: torch does not load: {torch['fails']}" if "fails" in torch else torch["devices"],
        "npu": f"torch_npu does not load: {npu['fails']}" if "fails" in npu else npu["npu"],
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
    if isinstance(value, dict):
        return {key: masked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [masked(item) for item in value]
    if len(home := str(Path.home())) > 1:
        value = re.sub(rf"{re.escape(home)}(?=[/\s:;,()'\"]|$)", "~", value)
    for pattern, instead in _PRIVATE:
        value = re.sub(pattern, instead, value, flags=re.IGNORECASE)
    return printable(value).replace("\n", "\\n")


def hazards(here: dict[str, Any]) -> Iterator[str]:
    """Yield each row of `HAZARDS` and each fault of `releases` that is here, and each package whose release was not run."""
    held = here["packages"]
    wanted, cann = releases.cann_of(held.get("torch_npu", "")), _series(here["cann"])
    made = " or ".join(next((names for made, names in releases.CANN_OF_TORCH_NPU.items() if _series(made) == cann), ()))
    other = cann if wanted and _series(wanted) != cann else ""
    values = {**held, "cann": here["cann"], "wanted": wanted, "made": f"torch_npu {made}" if made else "the one for it"}
    for packages, when, text in HAZARDS:
        if all(_name(held, package) for package in packages.split()) and when(here | {"other_cann": other}):
            yield text.format_map(values)
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


def _series(cann: str) -> str:
    """Return `9.1` of `9.1.0 in /usr/local/Ascend`, "" where no version is known."""
    found = re.match(r"\d+\.\d+", cann)
    return found[0] if found else ""


HAZARDS: tuple[tuple[str, Callable[[dict[str, Any]], object], str], ...] = (
    # `{PyTorch version}` or `{PyTorch version}.postN`: COMPATIBILITY.md of Ascend/pytorch
    ("torch torch_npu", lambda here: numbers(here["packages"]["torch"]) != numbers(here["packages"]["torch_npu"]),
     "torch {torch} and torch_npu {torch_npu} are not a pair: install the same release of both, the one made for this "
     "machine's CANN."),
    ("torch_npu", lambda here: here["other_cann"],
     "torch_npu {torch_npu} is made for CANN {wanted}, and here is {cann}: install {made}, or CANN {wanted} "
     "(COMPATIBILITY.md of Ascend/pytorch)."),
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
`{cann}` for the toolkit, `{wanted}` for the one torch_npu is made for, `{made}` for the torch_npu made for the toolkit."""
