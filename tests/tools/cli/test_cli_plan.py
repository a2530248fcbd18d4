"""`collate-npu plan`: lengths of a file, what three ways to batch cost, and what is refused."""

import json

import numpy as np
import pytest

pytest.importorskip("rich")
from typed import typed

LENGTHS = np.clip(np.random.default_rng(0).lognormal(4, 1, 2000), 2, 512).astype(int)


def written(tmp_path, name):
    path = tmp_path / name
    if name.endswith(".npy"):
        np.save(path, LENGTHS)
    elif name.endswith(".json"):
        path.write_text(json.dumps(LENGTHS.tolist()))
    elif name.endswith(".jsonl"):
        path.write_text("\n".join(json.dumps({"input_ids": [1] * int(n)}) for n in LENGTHS))
    else:
        path.write_text("\n".join(map(str, LENGTHS)))
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.json", "a.npy", "a.jsonl"])
def test_three_ways_side_by_side(name, tmp_path):
    path = written(tmp_path, name)
    option = "--data" if name == "a.jsonl" else "--lengths"
    done = typed("plan", option, path, "--max-tokens", 2048, "--ranks", 4, COLUMNS="80")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("✔ 2,000 samples on 4 ranks, batches of up to 2,048 tokens\n")
    assert max(map(len, done.stdout.splitlines())) <= 80
    rows = [line.split() for line in done.stdout.splitlines() if "%" in line]
    assert [row[0] for row in rows] == ["as", "sorted", "planned"]
    assert [float(row[-2]) for row in rows] == sorted((float(row[-2]) for row in rows), reverse=True)
    found = json.loads(typed("plan", option, path, "--max-tokens", 2048, "--ranks", 4, "--pack", "--json").stdout)
    assert found["planned"]["padding"] == 0
    assert found["planned"]["level"] < 1.05 < found["as they come"]["level"]
    assert found["planned"]["cost"] < 0.5


def test_what_is_not_planned_says_why(tmp_path):
    path = written(tmp_path, "a.txt")
    (tmp_path / "b.txt").write_text("3\nfour\n")
    np.save(tmp_path / "d.npy", np.array([{}]))
    for args, says in (
        (("--max-tokens", 2048), "got neither"),
        (("--max-tokens", 2048, "--lengths", path, "--data", path), "got both"),
        (("--max-tokens", 100, "--lengths", path), "A row holds up to 100 tokens"),
        (("--max-tokens", 100, "--lengths", tmp_path / "b.txt"), "invalid literal"),
        (("--max-tokens", 100, "--lengths", tmp_path / "c.txt"), "got no such file"),
        (("--max-tokens", 100, "--lengths", tmp_path / "d.npy"), "allow_pickle=False"),
        (("--lengths", path), "--max-tokens"),
    ):
        done = typed("plan", *args)
        assert done.exit_code == 2
        assert says in " ".join(done.stderr.split())
