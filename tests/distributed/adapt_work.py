"""What ranks do for test_distributed_adapt: a model wrapped for them, and the gradient of all samples by themselves."""

import copy

import torch
from shared_work import alone, gaps, gradient, model_of, padded, parts
from torch import distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from collate_npu import CollateError, PaddingCollator, Segments, adapt, check_delivery
from collate_npu.collate import BalancedBatchSampler, loss_weights
from collate_npu.testing import tiny_model

VOCAB, PAD = 61, 7
ROWS = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in (7, 400, 4, 9)]
PARTS = [ROWS[:2], ROWS[2:]]
"""Those of the first rank make two buckets, those of the second one."""


def batch_of(rows, layout):
    if layout == "packed":
        ids = torch.cat(rows)[None]
        return {"input_ids": ids, "position_ids": torch.cat([torch.arange(len(row)) for row in rows])[None], "labels": ids}
    return padded(rows, side="left")


def sharded(model):
    for layer in model.base_model.layers:
        fully_shard(layer)
    return fully_shard(model)


def flat(model):
    layers = {type(layer) for layer in model.base_model.layers}
    how = {"auto_wrap_policy": ModuleWrapPolicy(layers), "use_orig_params": True, "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(model, **how)


def sharded_inside(model):
    """Units inside mixers: ranks gather these parameters at each call."""
    for layer in model.base_model.layers:
        for mixer in (getattr(layer, name) for name in ("self_attn", "linear_attn") if hasattr(layer, name)):
            for part in mixer.children():
                if isinstance(part, torch.nn.Linear):
                    fully_shard(part)
    return fully_shard(model)


WRAPPERS = {"DDP": DistributedDataParallel, "FSDP2": sharded, "FSDP": flat, "FSDP2 inside mixers": sharded_inside}


def mean_of_ranks(family):
    """The gradient of all samples by themselves, as the mean of the ranks' means."""
    truth = tiny_model(family, vocab_size=VOCAB)
    return sum(alone(truth, part)[1] / (sum(map(len, part)) - len(part)) for part in PARTS) / len(PARTS)


def gradient_error(wrapper, first, family, layout):
    """How far this rank's gradient, the mean over ranks, is from that of all samples alone; and is a lost mask refused?"""
    rank, wanted = dist.get_rank(), mean_of_ranks(family)
    model = tiny_model(family, vocab_size=VOCAB)
    if first == "adapt":
        adapt(model)
    wrapped = WRAPPERS[wrapper](model)
    if first == "wrapper":
        adapt(wrapped)
    wrapped(**batch_of(PARTS[rank], layout)).loss.backward()
    found = gradient(wrapped)
    try:
        wrapped(input_ids=batch_of(PARTS[rank], "padded left")["input_ids"])
        refused = False
    except CollateError:
        refused = True
    dist.barrier()
    return float((found - wanted).norm() / wanted.norm()), refused


def delivered(wrapper, alone):
    """What each rank's check says, of batches that ask for more and fewer forwards; and how many it ran."""
    model, counted = WRAPPERS[wrapper](tiny_model("qwen3_next", vocab_size=VOCAB)), []
    model.register_forward_pre_hook(lambda *_: counted.append(1))
    if wrapper == "DDP":
        model.module.register_forward_pre_hook(lambda *_: counted.append(1))
    batch = batch_of([ROWS[:2], ROWS[3:]][dist.get_rank()], "padded left")
    said = str(check_delivery(model, {key: batch[key] for key in ("input_ids", "attention_mask")}, alone=alone))
    dist.barrier()
    return said, len(counted)


def planned_error(wrapper, pack):
    """How far the gradient of one planned step of several micro-batches is from that of all samples, one by one."""
    rank, size, truth = dist.get_rank(), dist.get_world_size(), tiny_model("qwen3", vocab_size=VOCAB)
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCAB, (n,), generator=draw) for n in (*[2] * 30, *[5] * 5, 31, 30)]
    wanted, gaps = alone(truth, rows)[1] / sum(len(row) - 1 for row in rows), {}
    model = tiny_model("qwen3", vocab_size=VOCAB)
    collator = PaddingCollator(pad_token_id=PAD, model=model, padding_free=pack)
    sampler = BalancedBatchSampler(map(len, rows), max_tokens=32, num_replicas=size, rank=rank, pack=pack)
    data = [{"input_ids": row, "labels": row} for row in rows]
    batches = list(DataLoader(data, batch_sampler=sampler, collate_fn=collator))
    for name, weights in (("planned", loss_weights(batches)), ("each alike", [1 / len(batches)] * len(batches))):
        wrapped = WRAPPERS[wrapper](copy.deepcopy(model))
        for batch, weight in zip(batches, weights):
            (wrapped(**batch).loss * weight).backward()
        gaps[name] = float((gradient(wrapped) - wanted).norm() / wanted.norm())
    return gaps


def of_shared_rows(wrapper, attention):
    """`shared_work.gaps` of a model whose parameters ranks gather, too."""
    rows = Segments.from_lengths([23, 40, 31, 50], 64, "left")
    *_, batch, targets, places, samples = parts(rows.ids, ["attention_mask"], "contiguous")
    model = model_of.__wrapped__("qwen3_next", (), attention)
    adapt(model, sequence_group=dist.group.WORLD)
    return gaps(WRAPPERS[wrapper](model), batch, targets, places, *alone(model_of("qwen3_next"), samples))
