"""What ranks do in the distributed tests; every function runs on all ranks of the group at once."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from collate_npu import CollateError, Segments, parallel
from collate_npu.collate import BalancedBatchSampler, loss_weights
from collate_npu.masks import dense
from collate_npu.outputs import shift_labels
from collate_npu.parallel import ContextParallel, cu_seqlens_of, gather_sequence, pad_documents, split_batch, split_tensor

KINDS = (torch.int64, torch.int32, torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.uint8)


def place(**settings: Any) -> ContextParallel:
    return ContextParallel.from_group(dist.group.WORLD, **settings)


def split_and_gather(settings: dict[str, Any], lengths: list[list[int]], width: int, side: str) -> None:
    """Every key that is split comes back from `gather_sequence` exactly as it was."""
    cp = place(**settings)
    batch, segments = whole_batch(cp, lengths, width, side)
    shard = split_batch(batch, cp, segments=segments)
    offsets = cu_seqlens_of(shard)
    for key, value in batch.items():
        if not isinstance(value, Tensor) or value.ndim < 2 or key == "pixel_values":
            assert shard[key] is value, key
            continue
        assert shard[key].shape[1] * cp.size == value.shape[1], key
        back = gather_sequence(shard[key], cp, segments, cu_seqlens=offsets)
        assert back.dtype == value.dtype, key
        assert torch.equal(back, value), key


def whole_batch(cp: ContextParallel, lengths: list[list[int]], width: int, side: str) -> tuple[dict[str, Any], Segments]:
    """The same batch on every rank: rows of the lengths, or one flat row of padded documents."""
    if cp.documents:
        flat = [n for row in lengths for n in row if n] or [1]
        ids = torch.arange(1, sum(flat) + 1)[None]
        batch, segments = pad_documents({"input_ids": ids}, cp, segments=Segments.from_lengths([flat]))
    else:
        segments = Segments.from_lengths(lengths, width=-(-width // cp.multiple) * cp.multiple, side=side)
        batch = {"input_ids": torch.arange(segments.ids.numel()).view(segments.shape)}
    B, S = segments.shape
    for kind in KINDS:
        batch[f"a_{kind}"] = torch.randint(0, 2, (B, S, 2), generator=torch.Generator().manual_seed(S)).to(kind)
    batch |= {
        "labels": torch.where(segments.keep, batch["input_ids"], -100),
        "position_ids": segments.position_ids,
        "attention_mask_2d": segments.keep,
        "attention_mask": None,
        "pixel_values": torch.ones(3, 5),
        "rope": torch.arange(4 * B * S).view(B, S, 4),
    }
    return batch, segments


# --- a model --------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """One causal attention layer between an embedding and a head, in float64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.head = nn.Embedding(50, 8), nn.Linear(8, 24), nn.Linear(8, 50)
        self.double()

    def forward(self, ids: Tensor, bias: Tensor, cp: ContextParallel | None = None, offsets: Any = None) -> Tensor:
        hidden = self.embed(ids)
        q, k, v = self.qkv(hidden).chunk(3, -1)
        if cp is not None:
            k, v = (gather_sequence(x, cp, cu_seqlens=offsets, loss="local") for x in (k, v))
        scores = q @ k.transpose(1, 2) / 8**0.5 + bias[:, 0]
        return self.head(hidden + scores.softmax(-1) @ v)


def loss_of(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / count


def attention(settings: dict[str, Any], lengths: list[list[int]], width: int, side: str, loss: str) -> None:
    """Loss and gradients on shards, with gathered keys, are those of the unsplit model."""
    cp = place(**settings)
    batch, segments = whole_batch(cp, lengths, width, side)
    ids = batch["input_ids"] % 50
    labels = shift_labels(torch.where(segments.keep, ids, -100), segments)
    count = max(int((labels != -100).sum()), 1)
    alone = Attention()
    right = loss_of(alone(ids, dense(segments, polarity="bias", dtype=torch.float64)), labels, count)
    right.backward()

    offsets = cu_seqlens_of(batch)
    shard = split_batch({"input_ids": ids, "shift_labels": labels}, cp, cu_seqlens=offsets)
    model, rows = Attention(), parallel.query_rows(segments.shape[1], cp, offsets)  # only this rank's, keys whole
    logits = model(shard["input_ids"], dense(segments, polarity="bias", dtype=torch.float64, rows=rows), cp, offsets)
    if loss == "local":  # each rank sums the loss of its own tokens
        ours = loss_of(logits, shard["shift_labels"], count)
        ours.backward()
        dist.all_reduce(total := ours.detach().clone())
    else:  # every rank computes the whole loss from the gathered logits
        ours = loss_of(gather_sequence(logits, cp, segments, cu_seqlens=offsets, loss="same"), labels, count)
        ours.backward()
        total = ours.detach()
    assert abs(float(total - right)) < 1e-5, (float(total), float(right))
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, alone.get_parameter(name).grad, atol=1e-5, rtol=1e-5, msg=name)


def jagged(lengths: list[int]) -> None:
    cp = place(layout="document_zigzag")
    batch, segments = pad_documents(
        {"input_ids": torch.arange(1, sum(lengths) + 1)[None]}, cp, segments=Segments.from_lengths([lengths])
    )
    row = torch.stack([batch["input_ids"][0].double(), -batch["input_ids"][0].double()], -1)
    shard = split_tensor(torch.nested.nested_tensor_from_jagged(row, cu_seqlens_of(batch).long()), cp)
    assert shard.is_nested
    assert torch.equal(gather_sequence(shard, cp).values(), row)
    real = gather_sequence(shard, cp, segments)
    assert real.offsets().diff().tolist() == lengths
    assert real.values()[:, 0].tolist() == list(range(1, sum(lengths) + 1))


def meaning_of_loss() -> tuple[float, ...]:
    """Each rank weighs the gathered row by its rank + 1: what `same` and `local` give to rank r's shard."""
    cp = place(layout="contiguous")
    shards = {loss: torch.zeros(1, 1, requires_grad=True) for loss in ("same", "local")}
    for loss, shard in shards.items():
        (gather_sequence(shard, cp, loss=loss).sum() * (cp.rank + 1)).backward()
    return tuple(float(shard.grad) for shard in shards.values())


def weights(per: list[str], bad: int, odd: str = "") -> str:
    row = torch.tensor([[-100, 1, 2][: (rank := dist.get_rank()) + 2]])
    other, lengths = bool(odd) * rank, [3, 2, 4, 5]
    settings = {"max_tokens": 8 + other * (odd == "options"), "seed": other * (odd == "seed"), "num_replicas": 2}
    sampler = BalancedBatchSampler(lengths[:: -1 if other and odd == "order" else 1], rank=rank, **settings)
    sampler.set_epoch(other * (odd == "epoch"))
    step = {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] if rank == bad else row}
    try:
        return str(loss_weights([step], per=per[rank], sampler=sampler))
    except CollateError as error:
        return str(error)


def meshes() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    size, rank = dist.get_world_size(), dist.get_rank()
    x = torch.arange(4 * size * 2).view(2, -1)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    made = [(ContextParallel.from_mesh(mesh), x), (ContextParallel(size, rank, group=mesh), x)]
    if size == 4:
        half = ContextParallel.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"])
        assert half.size == 2
        made += [(half, x + rank // 2)]  # another batch in each data-parallel group
    for cp, own in made:
        assert torch.equal(gather_sequence(split_tensor(own, cp), cp), own)


def gathered_objects(value: Any, group: Any) -> list[Any]:
    carrier = parallel.gloo_group(group)
    dist.all_gather_object(values := [None] * dist.get_world_size(carrier), value, group=carrier)
    return values


def objects_beside_hccl(tensor_parallel: int) -> dict[str, Any]:
    """Gathered where the device's groups are HCCL, as far as anybody can see, and Megatron shares out the ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    spans = [list(range(tp, size, tensor_parallel)) for tp in range(tensor_parallel)]
    shared = [dist.new_group(span) for span in spans][rank % tensor_parallel]
    hccl, seen = {dist.group.WORLD, shared}, []
    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_data_parallel_group_gloo=lambda with_context_parallel: None,
        get_data_parallel_group=lambda with_context_parallel: shared if with_context_parallel else None,
    )
    config, carry = dist.get_backend_config, dist.all_gather_object
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group: "npu:hccl" if group in hccl else config(group))
        patch.setattr(dist, "all_gather_object", lambda *told, group: seen.append(group) or carry(*told, group=group))
        patch.setitem(sys.modules, "megatron.core.parallel_state", state)
        gathered = tuple(gathered_objects(rank, group) for group in (None, dist.group.WORLD, None))
    own = spans[rank % tensor_parallel]
    return {"gathered": gathered, "groups": len(set(seen)), "hccl": len(hccl & set(seen)), "own": own}
