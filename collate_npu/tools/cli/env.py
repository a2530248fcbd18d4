"""`collate-npu env`."""

from __future__ import annotations

import typer


def env_command() -> None:
    """What is installed, which kernels it can run, and known hazards; made for pasting into an issue."""
    from collate_npu.tools.env import environment

    found = environment()
    lines = [f"- {name}: {value}" for name, value in found.packages.items()]
    lines += [f"- {name}={value}" for name, value in found.settings.items()]
    lines = [f"- system: {found.system}", *lines, f"- devices: {found.devices}", f"- NPU: {found.npu}"]
    typer.echo("\n".join([*lines, *(f"- hazard: {text}" for text in found.hazards)]))
