"""Sessions: `nox -s audit` (the main job), `nox -s tests` (the test command); `nox -l` lists the rest.

torch is pinned in every install: an unpinned one may pull several gigabytes of CUDA packages onto a CPU machine. Triton
and flash-linear-attention stay out of every environment that runs transformers' Gated DeltaNet on a CPU.
"""

from __future__ import annotations

import os

import nox

nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_existing_virtualenvs = True

TORCH = os.environ.get("COLLATE_NPU_TORCH", "torch==2.13.0")
TRANSFORMERS = "transformers==5.23.0"
OLDEST_TRANSFORMERS = "transformers==4.57.1"
"""The first release with Qwen3-Next that is not withdrawn."""
TEST = ("pytest==9.2.0", "hypothesis==6.170.15")
AUDIT = ("typer==0.29.1", "rich==15.0.0")
TRAINERS = ("accelerate==1.15.0", "trl==1.16.0", "datasets==5.2.0")


def install(session: nox.Session, *packages: str) -> None:
    """The package itself beside others, torch first and pinned."""
    session.install(TORCH, "numpy")
    session.install("-e", ".", TORCH, *packages)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: rules and format."""
    session.install("ruff==0.17.5")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict, on the package."""
    install(session, "mypy==2.4.1", *AUDIT)
    session.run("mypy")


@nox.session
def audit(session: nox.Session) -> None:
    """The main job: every hybrid family of transformers, tiny, on real text; arguments go to `collate-npu audit`."""
    install(session, TRANSFORMERS, "accelerate==1.15.0", *AUDIT)
    session.run("collate-npu", "audit", *session.posargs)


@nox.session
@nox.parametrize("transformers", ["newest", "oldest"], ids=["newest", "oldest"])
def tests(session: nox.Session, transformers: str) -> None:
    """The test suite, on the newest and on the oldest supported transformers."""
    if transformers == "newest":
        install(session, *TEST, *AUDIT, TRANSFORMERS, *TRAINERS)
    else:
        install(session, *TEST, *AUDIT, OLDEST_TRANSFORMERS, "accelerate==1.10.1")
    session.run("pytest", *session.posargs, env={"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"})
