"""Transport: what leaves a worker arrives as it was, whatever it is, and leaves nothing."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils._pytree import tree_map
from torch.utils.data import get_worker_info

from collate_npu import PaddingCollator
from collate_npu.collate import transport
from collate_npu.collate.transport import INLINE_BYTES, Shipment, shipped

BOUNDS = [0, 1, -1, 127, 128, -128, -129, 32767, 32768, -32768, -32769, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**62]
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
OTHERS = [getattr(torch, f"float{n}") for n in (16, 32, 64)]
OTHERS += [torch.uint8, torch.bool, torch.bfloat16, torch.complex64, torch.uint16]


def crossed(batch):
    """As a queue of multiprocessing carries it."""
    return pickle.loads(bytes(ForkingPickler.dumps(batch)))


def same(one, other):
    """Equal to the bit, in type, and for dicts in order."""
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and same(list(one.values()), list(other.values()))
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if not isinstance(one, torch.Tensor):
        return one == other
    if one.layout is not torch.strided:
        return one.layout is other.layout and same(one.to_dense(), other.to_dense())
    facts = [(each.dtype, each.shape, each.requires_grad, bits(each)) for each in (one, other)]
    return facts[0] == facts[1]


def bits(tensor):
    packed = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return packed.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


@st.composite
def tensors(draw):
    """Of any dtype, up to three axes, with any layout of their memory; whole numbers at the bounds of narrower types."""
    dtype = draw(st.sampled_from([*SIGNED, torch.int64, torch.int64, *OTHERS]))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = int(np.prod(shape))
    if dtype in SIGNED:
        fits = [n for n in BOUNDS if torch.iinfo(dtype).min <= n <= torch.iinfo(dtype).max]
        some = draw(st.lists(st.sampled_from(fits), min_size=1, max_size=2))
        made = torch.tensor((some * count)[:count], dtype=dtype).reshape(shape)
    else:
        seed = draw(st.integers(0, 99))
        raw = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, np.uint8))
        made = raw % 2 == 1 if dtype is torch.bool else raw.view(dtype) if count else torch.empty(0, dtype=dtype)
        made = made.reshape(shape)
    layout = draw(st.sampled_from(["as made", "transposed", "every other", "expanded", "inside"]))
    if made.ndim < 1 or layout == "as made":
        return made
    if layout == "transposed":
        return made.movedim(0, -1)
    if layout == "every other":
        return made.repeat_interleave(2, -1)[..., ::2]
    return made[None].expand(3, *shape) if layout == "expanded" else torch.cat([made, made, made])[made.shape[0] :]


ONES = torch.ones(2, 3)
ODD = [None, "text", 7, 1.5, [1, 2], ["a", None], (torch.arange(3),), np.arange(3), {}, ONES.to_sparse()]
ODD += [ONES.clone().requires_grad_(), torch.nn.Parameter(ONES), torch.nn.Parameter(ONES, requires_grad=False)]
ODD += [torch.imag(torch.conj(torch.complex(ONES, ONES)))]


def batches():
    values = tensors() | st.sampled_from(ODD)
    keys = st.text("abc", min_size=1, max_size=2) | st.integers(0, 3)
    return st.dictionaries(keys, values | st.dictionaries(keys, values, max_size=3), max_size=5)


@pytest.mark.parametrize("inline", [INLINE_BYTES, 100, 8])
def test_what_arrives_is_what_was_sent(inline):
    """For any batch: inside the message, in one shared storage, and the long tensors each in its own."""

    @settings(max_examples=settings.default.max_examples if inline == INLINE_BYTES else 60)
    @given(batches())
    def law(batch):
        before = copy.deepcopy(batch)
        arrived = crossed(Shipment(batch))
        assert type(arrived) is dict
        assert same(batch, arrived)
        assert not any(type(value) is Shipment for value in arrived.values())
        assert same(before, batch), "packing wrote into the batch"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "INLINE_BYTES", inline)
        law()


@given(st.lists(tensors(), min_size=2, max_size=4))
def test_nothing_that_arrives_shares_memory(values):
    """Not even where the worker's tensors did: the same one under two keys, and a part of one."""
    sent = Shipment(enumerate([*values, values[0], values[0][..., :1] if values[0].ndim else values[0]]))
    arrived = crossed(sent)
    assert same(sent, arrived)
    travelled = [value for value in arrived.values() if value.dtype in transport._HELD and value.numel()]
    assert len({value.untyped_storage().data_ptr() for value in travelled}) == len(travelled)
    for value in travelled:
        assert not value.is_shared()
        value.zero_()
    assert all(not bits(value) or max(bits(value)) == 0 for value in travelled)


def shm_mappings():
    return {line.split()[-2] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/torch_" in line}


def test_whole_numbers_take_the_bytes_they_need():
    ids = torch.arange(1000)
    whole = {2000: ids, 1000: ids % 128, 4000: ids + 2**15, 8000: ids + 2**31}
    others = {2000: ids.int(), 4000: torch.zeros(1000), 1000: ids > 3, 2008: torch.ones(1004, dtype=torch.bfloat16)}
    for byte_size, tensor in (*whole.items(), *others.items()):
        assert byte_size <= len(ForkingPickler.dumps(Shipment(x=tensor))) < byte_size + 500


def test_a_long_batch_goes_through_shared_memory_and_a_short_one_in_the_message():
    ids = torch.arange(INLINE_BYTES)  # 4 MiB of int64, 2 MiB to send
    both = {"ids": ids, "labels": ids, "keep": ids > 3}
    for batch, inside in ((both, False), ({"keep": ids > 3}, True), ({"long": ids + 2**40}, False)):
        message = bytes(ForkingPickler.dumps(Shipment(batch)))
        assert (len(message) > INLINE_BYTES) == inside
        before, arrived = shm_mappings(), pickle.loads(message)
        assert same(batch, arrived)
        assert "long" in batch or shm_mappings() <= before, "it keeps what it came in"


def test_without_shared_memory_all_of_a_batch_goes_in_the_message(monkeypatch):
    def full(*_):
        raise RuntimeError("no space left")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", full)
    batch = {"ids": torch.arange(INLINE_BYTES) + 2**33, "keep": torch.arange(2 * INLINE_BYTES) > 3}
    for sent in (batch, {"labels": torch.arange(INLINE_BYTES)}):
        with pytest.warns(RuntimeWarning, match="no space left.*--shm-size"):
            arrived = crossed(Shipment(sent))
        assert [*arrived] == [*sent]
        assert all(torch.equal(value, sent[key]) for key, value in arrived.items())


def test_outside_a_worker_the_batch_is_itself():
    batch = {"input_ids": torch.ones(1, 2)}
    assert get_worker_info() is None
    assert shipped(batch) is batch
    assert type(PaddingCollator(pad_token_id=0)([{"input_ids": [1, 2]}])) is dict


def test_in_a_worker_it_is_still_a_dict():
    """Every way of copying, changing and walking one; the plain pickler takes it as it takes any dict."""
    plain = {"a": torch.arange(3), "b": {"c": torch.ones(2)}, "d": None}
    batch = Shipment(plain)
    copies = [dict(batch), {**batch}, batch.copy(), batch | {}, type(batch)(batch), copy.copy(batch), copy.deepcopy(batch)]
    copies += [*(pickle.loads(pickle.dumps(batch, protocol)) for protocol in range(2, 6)), tree_map(lambda x: x, batch)]
    assert all(same(plain, copied) and isinstance(copied, dict) for copied in copies)
    doubled = tree_map(lambda value: None if value is None else value * 2, batch)
    assert doubled["b"]["c"].tolist() == [2, 2]
    batch["e"] = batch.pop("a") + 1
    assert list(crossed(batch)) == ["b", "d", "e"]
    assert crossed([batch, {"deep": batch}])[1]["deep"]["e"].tolist() == [1, 2, 3]


# --- workers end with their trainer; epochs of real loaders, whole and with a fault, stand in tests/soak


TRAINER = Path(__file__).with_name("killed_trainer.py")
SECONDS = 40
"""Nine on an idle machine; without an end they stay for ever."""


def runs(pid):
    """Neither gone nor a zombie that nobody has collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.draws(1)
@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_workers_of_a_killed_trainer_end(start_method):
    killed = [signal.SIGKILL, signal.SIGTERM]
    command = [sys.executable, str(TRAINER), start_method]
    trainers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in killed]
    workers = [[int(pid) for pid in trainer.stdout.readline().split()] for trainer in trainers]
    everyone = [pid for pids in workers for pid in pids]
    try:
        assert [len(pids) for pids in workers] == [3, 3]
        time.sleep(2)  # what is prefetched is in the pipe
        for trainer, sent in zip(trainers, killed):
            trainer.send_signal(sent)
            trainer.wait()
        until = time.monotonic() + SECONDS
        while time.monotonic() < until and any(map(runs, everyone)):
            time.sleep(0.2)
        assert [list(map(runs, pids)) for pids in workers] == [[False] * 3] * 2
    finally:
        for pid in filter(runs, everyone):
            os.kill(pid, signal.SIGKILL)
        for trainer in trainers:
            trainer.kill()
            trainer.wait()
