"""Each target passes inputs drawn as bytes, and every input that once failed."""

import random
from importlib.util import find_spec
from pathlib import Path

import pytest
from fuzz.drawn import Drawn
from fuzz.targets import TARGETS
from rotation import PROFILE, SEED

pytestmark = [pytest.mark.filterwarnings("ignore:collate_npu"), pytest.mark.usefixtures("newest_transformers")]
FOUND = [line.split() for line in Path(__file__).with_name("found.txt").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("line", FOUND, ids=lambda line: " ".join(line[:2])[:40])
def test_what_once_failed_passes(line):
    TARGETS[line[0]](Drawn(bytes.fromhex("" if line[1:2] == ["#"] else line[1])))


@pytest.mark.parametrize("name", [each for each in TARGETS if each != "probe" or find_spec("transformers")])
def test_fresh_inputs(name):
    chosen = random.Random(f"{SEED} {name}")
    for _ in range((300 if PROFILE == "fast" else 2000) // (30 if name == "probe" else 1)):
        data = chosen.randbytes(chosen.randrange(1, 160))
        try:
            TARGETS[name](Drawn(data))
        except Exception as error:
            raise AssertionError(f"python -m fuzz found it: {name} {data.hex()}") from error
