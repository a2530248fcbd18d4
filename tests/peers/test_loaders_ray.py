"""Ray 2.60.0 and TransferQueue 0.1.11 on two raylets of this machine, which are two nodes to Ray: Ray's workers collate with
ours, Ray Train's shards give every sample once, and a TransferQueue's batch collates as it is. Nothing of ours schedules.
"""

import pytest
from loaders_rows import QUEUED, SAMPLES
from processes import found_by

NEEDS = ("ray", "transfer_queue", "tensordict")
pytestmark = pytest.mark.slow
TRUTH = [[sample["number"], sample["input_ids"]] for sample in SAMPLES]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Everything in one cluster."""
    return found_by("loaders_ray_work", tmp_path_factory.mktemp("ray"), "data", "train", "queue")[0]


@pytest.mark.parametrize("way", ["iter_torch_batches", "arrow", "map_batches"])
def test_ray_data_gives_every_sample_back(found, way):
    batches = found[way]
    assert sorted(row for batch in batches for row in batch) == TRUTH
    assert max(map(len, batches)) == (6 if way == "map_batches" else 5)


def test_rows_collated_on_ray_keep_their_mask_through_other_batches(found):
    assert sorted(row for batch in found["map_batches, adapted"] for row in batch) == [ids for _, ids in TRUTH]


def test_ray_itself_refuses_none_as_a_column(found):
    assert "corresponding to key 'attention_mask' is of type <class 'NoneType'>" in found["map_batches, None"]


def test_two_workers_of_ray_train_share_the_samples_out(found):
    assert found["nodes"] == 2
    assert len({node for node, _ in found["train"]}) == 2
    assert sorted(row for _, rows in found["train"] for row in rows) == TRUTH
    assert all(rows for _, rows in found["train"])


@pytest.mark.parametrize(("rows", "longest"), [("ragged", 20), ("equal", 3)])
def test_a_batch_of_a_transfer_queue_collates_as_it_is(found, rows, longest):
    got = found[f"queue, {rows}"]
    assert got["form"].startswith("TensorDict")
    assert got["rows"] == [[n, SAMPLES[n]["input_ids"][:longest]] for n in QUEUED]
    assert "PaddingCollator takes such a batch as it is" in found[f"queue, {rows}, adapter"]
