"""Environment: what is installed, which kernels each stack would run here, what is refused, and known hazards.

For issue reports and for people who wonder why a mask is lost. Imports nothing of what it tells about (`probe`):
torch need not load.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from collate_npu.errors import printable
from collate_npu.tools.env import machine, probe
from collate_npu.tools.env.hazards import hazards
from collate_npu.tools.env.machine import Environment

_PRIVATE = (
    (r"(?<=//)[^/\s:@]+:[^/\s@]+(?=@)", "***"),  # user:password@host
    (r"\b(hf_|sk-|gh[pousr]_|github_pat_|glpat-)[\w-]{8,}", "***"),
    (r"((?:token|secret|password|api_?key)\w*\s*[=:]\s*)[^\s,;\"\\]+", r"\1***"),
    (r"/(?:home|Users)/[^/\s:;,()\"\\]+", "~"),
)


def environment() -> Environment:
    """Look around. Never raises for a package that is broken: that is a finding."""
    from collate_npu import __version__

    packages = machine.packages()
    torch = probe.ask("torch")
    fails = torch.get("fails")
    npu = probe.ask("torch_npu") if "torch_npu" in packages and not fails else {}
    stacks = {} if fails else probe.ask("stacks")
    unknown = {"not known": stacks["fails"]} if "fails" in stacks else {}
    found = Environment(
        system=machine.system(),
        packages={"collate_npu": __version__, **packages},
        settings=machine.settings(),
        cann=machine.cann(),
        devices=f"not known: torch does not load: {fails}" if fails else torch["devices"],
        npu=_npu(packages, fails or npu.get("fails", ""), npu.get("cann", "")),
        runs=stacks.get("runs", unknown),
        refused=stacks.get("refused", {}),
    )
    return replace(found, hazards=tuple(hazards(found)))


def _npu(packages: Mapping[str, str], fails: str, cann: str) -> str:
    if "torch_npu" not in packages:
        return "torch_npu is not installed"
    # ImportError: libhccl.so: CANN is missing
    return f"torch_npu does not load: {fails}" if fails else f"torch_npu loads{f', CANN {cann}' if cann else ''}"


def written(*, as_json: bool = False) -> str:
    """The report of this machine as Markdown to paste into an issue, or as JSON; no home directory, no token."""
    found = masked(asdict(environment()))
    return json.dumps(found, indent=2) if as_json else "\n".join(_markdown(Environment(**found)))


def masked(value: Any) -> Any:
    """Without what is nobody else's business: home directories, passwords in addresses, tokens; each text on one line, with
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


def _markdown(found: Environment) -> Iterator[str]:
    """A list; what is long stands behind a fold."""
    yield f"- system: {found.system}"
    yield from (f"- {name}: {value}" for name, value in found.packages.items())
    yield from (f"- {name}={value}" for name, value in found.settings.items())
    yield from (f"- devices: {found.devices}", f"- npu: {found.npu}", f"- cann: {found.cann}")
    yield from (f"- runs: {stack}: {what}" for stack, what in found.runs.items())
    yield from (f"- hazard: {text}" for text in found.hazards)
    if found.refused:
        yield "\n<details><summary>What is refused here, for a Qwen3-Next</summary>\n"
        for stack, kinds in found.refused.items():
            if right := [kind for kind, why in kinds.items() if not why]:
                yield f"- {stack}: right for {', '.join(right)}"
            yield from (f"- {stack}, {kind}: refused. {why}" for kind, why in kinds.items() if why)
        yield "\n</details>"
