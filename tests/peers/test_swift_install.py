"""ms-swift 4.6.0: installing, in this process and in a spawned worker, and giving back."""

import inspect
import sys
from pathlib import Path

import pytest
import torch
from mcore_bridge.model.modules import TransformerLayer
from swift.megatron.trainers import base, utils
from swift.utils import import_external_file
from swift_world import arguments, collate, reaches_model

from collate_npu import BatchAdapter
from collate_npu.integrations import swift
from collate_npu.integrations.megatron import mcore_bridge

NEEDS = ("swift", "mcore_bridge", "megatron")

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def test_install_reaches_functions_that_were_imported_by_name_and_uninstall_gives_them_back():
    original = utils.prepare_batch
    assert base.prepare_batch is original
    swift.install()
    swift.install()  # twice is once
    assert base.prepare_batch is utils.prepare_batch is not original
    assert inspect.unwrap(base.prepare_batch) is original
    swift.uninstall()
    assert base.prepare_batch is utils.prepare_batch is original
    swift.uninstall()


@pytest.mark.usefixtures("installed")
def test_a_trainer_has_one_adapter_whatever_number_of_batches(world, monkeypatch):
    made, from_args = [], BatchAdapter.from_args
    monkeypatch.setattr(BatchAdapter, "from_args", lambda args, **given: made.append(args) or from_args(args, **given))
    world.npu()
    trainers = [arguments("qwen3_next"), arguments("qwen3_5")]
    for args in trainers:
        for lengths in ((7, 3, 5), (2, 4)):
            assert reaches_model(args, collate(args, *lengths))["attention_mask_2d"].sum() == sum(lengths)
    assert [id(args) for args in made] == [id(args) for args in trainers]


@pytest.mark.parametrize("there", [True, False], ids=["npu", "gpu"])
def test_python_objects_go_by_gloo_on_an_npu(world, monkeypatch, there):
    """The names of the metrics, at every step: `all_gather_object` over HCCL takes device memory in silence."""
    seen = []
    world.npu(there)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda values, value, group=None: seen.append(group))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(swift, "gloo_group", lambda group: f"gloo of {group}")
    swift.install()
    torch.distributed.all_gather_object([None], "loss", group="dp and cp")
    swift.uninstall()
    torch.distributed.all_gather_object([None], "loss", group="dp and cp")
    assert seen == ["gloo of dp and cp" if there else "dp and cp", "dp and cp"]


def test_your_own_install_of_mcore_bridge_survives_ours_and_the_other_way_round():
    theirs = TransformerLayer.forward
    for first, second in ((swift, mcore_bridge), (mcore_bridge, swift)):
        first.install()
        second.install()
        ours = TransformerLayer.forward
        assert inspect.unwrap(ours) is theirs
        swift.uninstall()
        assert TransformerLayer.forward is ours
        mcore_bridge.uninstall()
        assert TransformerLayer.forward is theirs


def test_as_external_plugins_file_it_installs_and_hides_no_package(tmp_path):
    original, path = utils.prepare_batch, list(sys.path)
    for _ in range(2):
        import_external_file(str(Path(swift.__file__).with_name("plugin.py")))
        assert utils.prepare_batch is not original
        assert sys.path == path  # with its folder first, `import transformers` would find this package's file
    swift.uninstall()
