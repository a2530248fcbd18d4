"""ms-swift 4.6.0: installing, in this process and in a spawned worker, and giving back."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]
if importlib.util.find_spec("swift") is None:
    pytest.skip("ms-swift is not installed", allow_module_level=True)

import te_stub  # noqa: E402, F401

# isort: split  (the stand-ins stand before Megatron is imported)
import torch  # noqa: E402
from mcore_bridge.model.modules import TransformerLayer  # noqa: E402
from swift.megatron.trainers import base, utils  # noqa: E402
from swift.utils import import_external_file, patch_dataloader_external_plugins  # noqa: E402
from swift_fixtures import LENGTHS, as_kind  # noqa: E402
from swift_world import (  # noqa: E402
    arguments,
    prepare,
    template,
)
from torch.utils.data import DataLoader  # noqa: E402

from collate_npu import BatchAdapter, Segments  # noqa: E402
from collate_npu.integrations import swift  # noqa: E402
from collate_npu.integrations.megatron import mcore_bridge  # noqa: E402

pytest_plugins = "swift_fixtures"
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


def test_a_later_patch_of_another_library_stays_and_ours_lets_through(world):
    world.npu()
    args = arguments("qwen3_next")
    data, _ = as_kind(args, "template")
    original, theirs = utils.prepare_batch, prepare(args, data)
    swift.install()
    ours = utils.prepare_batch
    stranger = lambda *given: {**ours(*given), "seen": True}  # noqa: E731
    utils.prepare_batch = stranger
    assert "padding_mask" in prepare(args, data)["extra_block_kwargs"]
    swift.uninstall()
    assert utils.prepare_batch is stranger
    assert base.prepare_batch is original
    after = prepare(args, data)
    assert after.pop("seen")
    assert after.keys() == theirs.keys()
    utils.prepare_batch = ours  # the stranger undoes its own
    assert prepare(args, data).keys() == theirs.keys()
    swift.install()
    swift.uninstall()
    assert utils.prepare_batch is original


def test_as_external_plugins_file_it_installs_and_hides_no_package(tmp_path):
    original, path = utils.prepare_batch, list(sys.path)
    for _ in range(2):
        import_external_file(str(Path(swift.__file__).with_name("plugin.py")))
        assert utils.prepare_batch is not original
        assert sys.path == path  # with its folder first, `import transformers` would find this package's file
    swift.uninstall()


def test_a_spawned_dataloader_worker_replays_the_plugin():
    made = template()
    for attribute in ("model_info", "model_meta"):  # SimpleNamespace, so that the template pickles
        assert hasattr(made.tokenizer, attribute)
    before = DataLoader.__init__, getattr(DataLoader, "_swift_external_plugins", False)
    try:
        import_external_file(str(Path(swift.__file__).with_name("plugin.py")))
        patch_dataloader_external_plugins()
        rows = [{"input_ids": [5] * n, "labels": [5] * n, "length": n} for n in LENGTHS]
        loader = DataLoader(
            rows, batch_size=3, collate_fn=made.data_collator, num_workers=1, multiprocessing_context="spawn"
        )
        (batch,) = loader
    finally:
        DataLoader.__init__, DataLoader._swift_external_plugins = before
        swift.uninstall()
    assert "attention_mask" not in batch
    assert batch["attention_mask_2d"].sum(1).tolist() == list(LENGTHS)


def test_from_args_reads_ms_swifts_own_names(world, monkeypatch):
    """Also without the HF config: model_type, padding_free, context_parallel_size, cp_partition_mode."""
    args = arguments("qwen3_next")
    del args.model_info
    adapter = BatchAdapter.from_args(args)
    assert adapter.route(Segments.from_lengths(LENGTHS)).keeps_mask_2d
    args.padding_free = True
    assert not BatchAdapter.from_args(args).route(Segments.from_lengths([list(LENGTHS)])).keeps_mask_2d
