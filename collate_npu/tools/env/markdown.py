"""Markdown: what was found as Markdown to paste into an issue, or as JSON; no home directory, no token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from collate_npu.tools.env import Environment, environment

_PRIVATE = (
    (re.compile(r"(?<=//)[^/\s:@]+:[^/\s@]+(?=@)"), "***"),  # user:password@host
    (re.compile(r"\b(hf_|sk-|gh[pousr]_|github_pat_|glpat-)[\w-]{8,}"), "***"),
    (re.compile(r"((?:token|secret|password|api_?key)\w*\s*[=:]\s*)[^\s,;]+", re.IGNORECASE), r"\1***"),
    (re.compile(r"/(?:home|Users)/[^/\s:;,()]+"), "~"),
)


def written(*, as_json: bool = False) -> str:
    """The report of this machine."""
    found = environment()
    return json.dumps(_masked_values(asdict(found)), indent=2) if as_json else as_markdown(found)


def as_markdown(found: Environment) -> str:
    """A list; what is long stands behind a fold."""
    lines = [f"- {text}" for text in _lines(found)]
    if found.refused:
        lines += ["", "<details><summary>What is refused here, for a Qwen3-Next</summary>", ""]
        lines += [f"- {text}" for text in _refused(found)]
        lines += ["", "</details>"]
    return masked("\n".join(lines))


def _lines(found: Environment) -> Iterator[str]:
    yield f"system: {found.system}"
    yield from (f"{name}: {value}" for name, value in found.packages.items())
    yield from (f"{name}={value}" for name, value in found.settings.items())
    yield f"devices: {found.devices}"
    yield f"NPU: {found.npu}"
    yield f"CANN: {found.cann}"
    yield from (f"runs: {stack}: {what}" for stack, what in found.runs.items())
    yield from (f"hazard: {text}" for text in found.hazards)


def _refused(found: Environment) -> Iterator[str]:
    for stack, kinds in found.refused.items():
        right = [kind for kind, why in kinds.items() if not why]
        if right:
            yield f"{stack}: right for {', '.join(right)}"
        yield from (f"{stack}, {kind}: refused. {why}" for kind, why in kinds.items() if why)


def _masked_values(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _masked_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked_values(item) for item in value]
    return masked(value) if isinstance(value, str) else value


def masked(text: str) -> str:
    """Without what is nobody else's business: home directories, passwords in addresses, tokens."""
    home = str(Path.home())
    if home not in ("/", ""):
        text = re.sub(rf"{re.escape(home)}(?=[/\s:;,()'\"]|$)", "~", text)
    for pattern, instead in _PRIVATE:
        text = pattern.sub(instead, text)
    return text
