"""A peer test says at its top which packages it needs, `NEEDS = ("swift", "mcore_bridge")`, and is skipped without one.

That is read before the file is imported, so that it imports its stack as any other file does. Stand-ins for Transformer
Engine come before what imports it.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "distributed"), str(HERE.parent / "integration")]
sys.path.append(str(HERE.parents[1]))  # the benches
_NEEDS = re.compile(r"^NEEDS = \((.*)\)", flags=re.M)


class _Peer(pytest.Module):
    """Made for every file of this folder; what is looked at is imported in `collect`."""

    def collect(self) -> Any:
        found = _NEEDS.search(self.path.read_text(encoding="utf-8"))
        needs = re.findall(r'"(\w+)"', found[1]) if found else []
        if missing := [name for name in needs if find_spec(name) is None]:
            pytest.skip(f"not installed: {', '.join(missing)}", allow_module_level=True)
        if "mcore_bridge" in needs:
            import te_stub  # noqa: F401
        return super().collect()


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module:
    return _Peer.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def ranks():
    """`ranks(size)`: processes on Gloo, the same ones for every file that asks for so many."""
    from gloo_pool import Pool

    pools: dict[int, Pool] = {}
    yield lambda size: pools.get(size) or pools.setdefault(size, Pool(size))
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="module")
def cpu():
    """A CPU in the place of CUDA for Megatron's own models, and its groups of one rank."""
    from megatron_world import on_cpu

    with pytest.MonkeyPatch.context() as patch:
        on_cpu(patch)
        yield patch


@pytest.fixture(scope="module")
def pool(cpu, ranks, request):
    """Two of them that share a row, or as many as a test asks for, with Megatron's groups."""
    size = getattr(request, "param", 2)
    ranks(size)("megatron_world.start_ranks", seconds=120)
    return ranks(size)


# --- verl


@pytest.fixture
def verl_ours():
    from collate_npu.integrations import verl as engine

    engine.install()
    yield
    engine.uninstall()


# --- ms-swift


@pytest.fixture
def world(monkeypatch):
    from swift_world import World

    return World(monkeypatch)


@pytest.fixture
def installed(nothing_left_behind):
    """ms-swift with ours in place."""
    from collate_npu.integrations import swift

    swift.install()
    yield
    swift.uninstall()


@pytest.fixture
def nothing_left_behind():
    from swift_world import held

    before = held()
    yield
    assert held() == before
