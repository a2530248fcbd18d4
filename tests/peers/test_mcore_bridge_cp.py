"""ms-swift's batches on mcore-bridge's models, a row on one rank and shared by two: `mcore_bridge_work` runs them.

megatron-core 0.16.1 has no Gated DeltaNet for two ranks; 0.19.2 does, in an environment of its own.
"""

from importlib.metadata import PackageNotFoundError, version

import pytest
from cells import Stack, worst_of
from processes import found_by

NEEDS = ("swift", "mcore_bridge", "megatron")

try:
    NEWEST = int(version("megatron-core").split(".")[1]) >= 18
except PackageNotFoundError:
    NEWEST = False
PLACE = ("ms-swift, newest Megatron", "peers_newest") if NEWEST else ("ms-swift, Megatron", "peers_swift")
STACK = Stack(PLACE[0], ("ms-swift", "mcore-bridge", "megatron-core"), PLACE[1])
FAMILIES = ("qwen3", "qwen3_next", "qwen3_5")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return found_by("mcore_bridge_work", tmp_path_factory.mktemp("ranks"), *FAMILIES, ranks=2)[0]


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_its_cells(found, family):
    """Right where it runs, without us and with us; the worse of padded and flat rows under context parallelism."""
    for layout, told in found[family].items():
        both = {who: worst_of(cases) for who, cases in told.items()}
        STACK.tell(family, layout, **both, line='--external_plugins "$PLUGIN"')
        hybrid = family != "qwen3"
        refused = hybrid and (layout == "packed" or (layout == "context parallel" and not NEWEST))
        assert {one["verdict"] for one in both.values()} == {"refused" if refused else "right"}, (family, layout, told)
