"""Proof on adapted models: calls on rows of one sequence are judged by the plan, and faults inside buckets are found."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from collate_npu import CollateError, adapt, check_delivery, guard_first_batch
from collate_npu.consumers import by_sequence, flat_row
from collate_npu.proof import watch
from collate_npu.releases import KERNELS_TOLD
from collate_npu.segments import of_lengths
from collate_npu.testing import tiny_model

pytestmark = pytest.mark.models
ROWS = of_lengths([[7, 20], [5]], 30, "left")
BATCH = {"input_ids": torch.arange(60).view(2, 30) + 1, "segment_ids": ROWS.ids, "use_cache": False}
FAMILIES = ["qwen3_next", "llama", "mistral", "gpt2", *["bamba"] * KERNELS_TOLD.holds()]


@pytest.mark.parametrize("name", FAMILIES)
def test_right_runs_are_proved_layer_by_layer(name, capsys):
    model = tiny_model(name, vocab_size=64)
    with adapt(model):
        found = check_delivery(model, BATCH, alone=True)
        guard_first_batch(model)
        with watch(say=False, steps=1) as seen:
            model(**BATCH)
            model.train().gradient_checkpointing_enable({"use_reentrant": False})
            model(**BATCH).logits.sum().backward()
    assert found.leak_free
    assert found.unchecked == ()
    assert seen.faults == []
    assert "NOT JUDGED" not in seen.summary()
    assert "got what the batch says" in capsys.readouterr().out


def swapped(places, *pairs):
    places = places.clone()
    for a, b in pairs:
        places[[a, b]] = places[[b, a]]
    return places


FAULTS = {
    "a row of two sequences": lambda plan: replace(plan, place_T=swapped(plan.place_T, (6, 7))),
    "padding before tokens": lambda plan: replace(plan, place_T=plan.place_T + (torch.arange(32) >= 27)),
    "rows of a bucket swapped": lambda plan: replace(plan, place_T=swapped(plan.place_T, (0, 27))),
    "a sequence in two buckets": lambda plan: replace(plan, buckets=((0, 0), (1,))),
    "a token doubled": lambda plan: replace(plan, at_T=torch.cat([plan.at_T[:1], plan.at_T[:-1]])),
    "a token lost": lambda plan: replace(plan, at_T=plan.at_T.roll(1)),
    "other lengths": lambda plan: replace(plan, lengths=(8, 19, 5)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["qwen3_next", "llama"])
def test_what_is_wrong_inside_a_bucket_is_found(name, fault, monkeypatch):
    model, made = tiny_model(name, vocab_size=64), flat_row.FlatCall.__init__

    def broken(self, *args):
        made(self, *args)
        self.plan = FAULTS[fault](self.plan)
        self.at_T = self.plan.at_T

    with adapt(model), monkeypatch.context() as patch:
        patch.setattr(flat_row.FlatCall, "__init__", broken)
        with pytest.raises((CollateError, IndexError, RuntimeError)) as error:
            check_delivery(model, BATCH)
        if isinstance(error.value, CollateError):
            assert "(the plan)" in str(error.value)
        with watch(say=False, steps=1) as seen, pytest.MonkeyPatch.context():
            try:
                model(**BATCH)
            except (IndexError, RuntimeError):  # it cannot even be laid
                return
    assert "(the plan)" in {each.layer for each in seen.faults}


def test_a_mixer_that_is_handed_something_else_than_its_rows_is_found():
    model = tiny_model("qwen3_next", vocab_size=64)
    layer = model.model.layers[0].linear_attn
    own = type(layer).forward

    def runs_on(self, hidden_states, **kwargs):  # as a stack that joins the rows of a bucket again
        return own(self, hidden_states.reshape(1, -1, hidden_states.shape[-1]), **kwargs).view_as(hidden_states)

    layer.forward = runs_on.__get__(layer)
    segments = of_lengths([[15, 14], [15]], 30)
    with adapt(model), pytest.raises(CollateError, match=r"linear_attn: .*another sequence"):
        check_delivery(model, {**BATCH, "segment_ids": segments.ids}, segments=segments)
    assert by_sequence.running() == (None, None)
