"""The bench at tiny sizes: what it compares, counts and says. No time is asserted."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
pytest.importorskip("rich")

import collate_npu
from benchmarks import agreement, measure, page_of_stacks, peers, public, report
from benchmarks.groups import collate, derive, growth, step
from benchmarks.timing import Case, Contestant, Pace
from collate_npu import kernels, masks, outputs, parallel, proof

TINY = ((2, 8),)
ONCE = Pace(rounds=3, least=3, budget=0, turn=0)


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    ours, peer, floor = Contestant("ours", id), Contestant("p", id, target=3), Contestant("f", id, against="floor", target=2)
    case = Case("g", "c", ours, [peer, floor], limit=1e6)
    case.made = dict.fromkeys((ours, peer, floor), 0)
    limit, faster, over = case.rows({ours: [1.0, 10.0, 2.0], peer: [4.0, 10.0, 8.0], floor: [0.5, 2.0, 1.0]})
    assert (limit.ours, limit.met) == (2.0, False)  # 2 s are above a second
    assert (faster.ratio, faster.met) == (4.0, True)
    assert (over.ratio, over.met) == (2.0, True)


def test_an_output_that_differs_ends_the_run_and_a_peer_that_raises_is_absent():
    def wrong(ours, theirs):
        assert ours == theirs, "labels differ"

    def no(_):
        raise TypeError("no lists here\nmore")

    ours = Contestant("ours", lambda _: 1)
    with pytest.raises(AssertionError, match="labels differ"):
        Case("g", "c", ours, [Contestant("peer", lambda _: 2, agrees=wrong)]).ready()
    case = Case("g", "c", ours, [Contestant("peer", no), peers.rival("gone", lambda: __import__("no_such_peer"))])
    assert case.ready() == [ours]
    assert [(one.name, one.why) for one in case.absent] == [
        ("peer", "TypeError: no lists here"),
        ("gone", "ModuleNotFoundError: No module named 'no_such_peer'"),
    ]


@pytest.mark.parametrize("key", ["input_ids", "labels", "attention_mask"])
def test_one_changed_token_is_a_difference(key):
    theirs = {"input_ids": [[1, 2], [3, 0]], "labels": [[1, 2], [3, -100]], "attention_mask": [[1, 1], [1, 0]]}
    theirs = {name: torch.tensor(rows) for name, rows in theirs.items()}
    ours = {name: theirs[name].clone() for name in ("input_ids", "labels")}
    ours |= {"attention_mask": None, "attention_mask_2d": theirs["attention_mask"].bool()}
    agreement.same_batch(ours, theirs)
    theirs[key][1, 0] += 1
    with pytest.raises(AssertionError, match=f"{key} differs"):
        agreement.same_batch(ours, theirs)


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.filterwarnings("ignore")  # the peers'
def test_tiny_batches_agree_with_every_peer_installed(monkeypatch):
    """transformers and TRL in the tests' environment; who is not installed is named."""
    pytest.importorskip("transformers")
    for group, name in ((collate, "QUICK"), (collate, "FLAT"), (derive, "SIZES")):
        monkeypatch.setattr(group, name, TINY)
    for group, name in ((collate, "TARGETS"), (derive, "DECLARED"), (derive, "PROVED")):
        monkeypatch.setattr(group, name, {TINY[0]: None})
    monkeypatch.setattr(growth, "CALLS", {name: growth.CALLS[name] for name in ("unpad", "dense")})
    for group in ("collate", "derive", "growth"):
        rows, absent = measure.measure(group, ONCE, quick=True)
        assert {(row.group, row.rounds) for row in rows} == {(group, 3)}
        if group == "collate":
            assert {"transformers Seq2Seq", "transformers WithFlattening", "np.copyto"} <= {row.name for row in rows}
            assert {"TRL", "ms-swift template", "twinkle"} <= {one.name for one in (*rows, *absent)}


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.filterwarnings("ignore")  # the peers'
def test_ways_of_a_step_have_one_loss_and_say_what_they_take(capsys):
    pytest.importorskip("trl")
    found = (case := step.case("llama", 2, 32, 2)).ready()
    assert [one.name for one in found][:2] == ["ours, adapted", "ours, adapted, padded left"]
    assert len(found) == 8
    rows = case.rows({one: [1.0, 1.0, 1.0] for one in found})
    tokens = {facts["tokens"] for row in rows for facts in row.facts}
    assert tokens == {sum(len(row["input_ids"]) for row in step.instruction_rows(2, 32, 2))}
    report.show(report.result(rows, [], threads=1, seconds=1, quick=True))
    assert max(map(len, (out := capsys.readouterr().out).splitlines())) <= 100
    assert "transformers Seq2Seq, left" in out
    wrong = step.Pass(found[0].work(None).loss * 1.01, 0, {})
    with pytest.raises(AssertionError, match="the loss differs"):
        found[1].agrees(found[0].work(None), wrong)


def test_every_public_function_that_takes_a_batch_is_measured():
    names = {name for room in (collate_npu, masks, parallel, kernels, proof) for name in room.__all__}
    here = {name: getattr(each, "__module__", "") for name, each in vars(outputs).items() if name[0] != "_"}
    names |= {name for name, module in here.items() if module == outputs.__name__}
    measured = {what.partition(",")[0].partition(".")[0] for what in public.CALLS}
    assert names == measured | public.FREE
    assert not measured & public.FREE


# --- the page of stacks


def test_the_pages_of_stacks_say_what_was_measured():
    """Every stack that was measured stands on a page."""
    stale = [path.name for path, text in page_of_stacks.written().items() if path.read_text("utf-8") != text]
    assert stale == [], "python -m benchmarks.page_of_stacks"
    stacks = {path.stem for path in (page_of_stacks.HERE / "stacks").glob("*.json")}
    assert stacks == {name for names in page_of_stacks.PAGES.values() for name in names}
