"""Every input that once failed passes; each target passes fresh inputs, and sees a fault that is planted for it."""

import random
from pathlib import Path

import pytest
import torch
from fuzz.__main__ import failing
from fuzz.drawn import Drawn
from fuzz.targets import TARGETS
from rotation import PROFILE, SEED

from collate_npu import Segments
from collate_npu.collate import collators
from collate_npu.consumers import mask_routing
from collate_npu.kernels.gated_delta import arguments
from collate_npu.masks import derive
from collate_npu.masks.forms import Verdict
from collate_npu.parallel import gather, split

pytestmark = [pytest.mark.filterwarnings("ignore:collate_npu"), pytest.mark.usefixtures("newest_transformers")]
FOUND = [line.split() for line in Path(__file__).with_name("found.txt").read_text("utf-8").splitlines()]
FEW = 300 if PROFILE == "fast" else 2000


def inputs(name, count):
    chosen = random.Random(f"{SEED} {name}")
    return (chosen.randbytes(chosen.randrange(1, 160)) for _ in range(count))


@pytest.mark.parametrize("line", FOUND, ids=lambda line: " ".join(line[:2])[:40])
def test_what_once_failed_passes(line):
    data = "" if line[1:2] == ["#"] else line[1]
    TARGETS[line[0]](Drawn(bytes.fromhex(data)))


@pytest.mark.parametrize("name", TARGETS)
def test_fresh_inputs(name):
    for data in inputs(name, FEW):
        try:
            TARGETS[name](Drawn(data))
        except Exception as error:
            raise AssertionError(f"python -m fuzz found it: {name} {data.hex()}") from error


def first_runs(x, dim, runs):
    """A shard in another order: whoever holds two runs has them turned around."""
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in reversed(runs)], dim)


PLANTED = {
    "collate": (collators, "ignore_first_labels", lambda labels, segments, **_: labels),
    "derive": (derive, "of_keep", lambda keep_BS: Segments.from_keep(keep_BS[:, ::-1])),
    "adapt": (mask_routing, "none_is_exact", lambda *_: Verdict(True, "always")),
    "split": (split, "take_runs", first_runs),
    "gather": (gather, "_in_order", lambda shards, pieces, dim: torch.cat(list(shards), dim)),
    "outputs": (Segments, "last_indices", property(lambda self: self.indices[: self.num_sequences])),
    "kernels": (arguments, "flat_offsets", lambda segments, **_: segments.cu_seqlens_host),
    "bad_input": (Segments, "from_cu_seqlens", staticmethod(lambda offsets: Segments.from_lengths([[*offsets]]))),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_planted_fault_is_found(name, monkeypatch):
    """One thing of the package is broken: some input out of a few thousand shows it."""
    monkeypatch.setattr(*PLANTED[name])
    assert any(isinstance(failing(TARGETS[name], data), AssertionError) for data in inputs(name, 3000))
