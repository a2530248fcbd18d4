"""What a commit draws: one of each pair of sessions, by a bit of the seed. With `--table` what is left to the draw.

Two of a pair take about as long, so that each commit takes as long as another. Of other stacks what is drawn runs some cases
of each test, and by turns what starts a cluster of Ray (one of three), torchtitan's trainer (two of three) and the kernels
of an older fla (one of two).
"""

import json
import os
import sys
from pathlib import Path

PAIRS = (
    (("peers_swift",), ("peers_misc",)),
    (("peers_fla", "peers_newest"), ("peers_data", "peers_nemo")),
    (("peers_openrlhf", "peers_skyrl", "peers_llamafactory"), ("peers_veomni", "peers_axolotl", "peers_megatron")),
    (("package",), ("card -- --device cpu --quick",)),
    (("audit -- --attn sdpa --batches 1",), ("audit -- --attn eager --batches 1",)),
)
NIGHTS = Path(__file__).parents[1] / "benchmarks" / "nightly.json"
WHOLE = ("tests_all(newest)", "need", "audit", "faults")
HALF = ("tests_all(oldest)", "oldest_torch", "npu")
"""A half of the test functions, some cases of each; of WHOLE so, too, what starts whole programs."""


def drawn(seed: int) -> list[str]:
    """The sessions that a commit with this seed runs of all pairs."""
    return [name for n, pair in enumerate(PAIRS) for name in pair[seed >> n & 1]]


def table() -> list[str]:
    """Kind, tests in the last whole night, the chance that a commit runs a test of it."""
    whole = next((each for each in json.loads(NIGHTS.read_text("utf-8")) if each["ended"] and not each["some"]), None)
    held: dict[str, int] = {}
    for name, found in (whole or {"sessions": {}})["sessions"].items():
        kind = name.partition(" -- ")[0]
        held[kind] = held.get(kind, 0) + found.get("passed", found.get("faults planted", 0))
    pairs = [name.partition(" -- ")[0] for pair in PAIRS for half in pair for name in half]
    chances = dict.fromkeys((*HALF, *pairs), "1/2, some of its cases") | dict.fromkeys(WHOLE, "1, some of its cases")
    chances |= dict.fromkeys(("package", "card"), "1/2") | {"need": "1", "faults": "10 drawn"}
    rows = [f"{kind:20} {held.get(kind, 0):>7,}  {chance}" for kind, chance in chances.items()]
    alone = [kind for kind in held if kind not in chances and kind in ("fuzz", "soak", "mutants")]
    return [f"{'kind':20} {'tests':>7}  chance a commit", *rows, *(f"{kind:20} {'':>7}  0: at night" for kind in alone)]


if __name__ == "__main__":
    if "--table" in sys.argv:
        print(*table(), sep="\n")
    else:
        print(*drawn(int(os.environ["COLLATE_NPU_SEED"])), sep="\n")
