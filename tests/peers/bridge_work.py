"""What the tests of mcore-bridge have a process do, once for each value of USE_MCORE_GDN: run real models, write JSON.

`python bridge_work.py OUT`. Each case: which layers received what, and how far real tokens are from each sample alone.
Padded rows here, flat ones in `bridge_packed_work`.
"""

import json
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import bridge_world as world  # first: the stand-ins
import swift_world
import torch
import transformers.utils
from swift_world import LOCAL, arguments
from torch import Tensor
from torch.nn.functional import cross_entropy

from collate_npu import BatchAdapter, PaddingCollator, Segments, check_delivery
from collate_npu.integrations import swift
from collate_npu.integrations.megatron import gpt_batch, mcore_bridge
from collate_npu.masks import dense

LENGTHS, WIDTH, PAD = (7, 3, 5), 8, swift_world.PAD
FAR = 1e9


def wire(side: str, width: int = WIDTH) -> tuple[dict[str, Any], Segments]:
    """A padded batch with a 4D mask (True = blocked), as a collator of a user's own may send it; first labels ignored."""
    truth = Segments.from_lengths(LENGTHS, width, side)
    ids = torch.full(truth.shape, PAD)
    ids[truth.keep] = torch.tensor([token for row in swift_world.samples(*LENGTHS) for token in row["input_ids"]])
    first = truth.keep & (truth.position_ids == 0)
    labels = ids.masked_fill(~truth.keep | first, -100)
    masked = dense(truth, polarity="masked")
    return {"input_ids": ids, "labels": labels, "position_ids": truth.position_ids, "attention_mask": masked}, truth


def prepared(model_type: str, kernel: str, data: dict[str, Any]) -> dict[str, Any]:
    """ms-swift's own `prepare_batch`, whatever is installed."""
    args = arguments(model_type, **(LOCAL if kernel == "local" else {}))
    batch = swift_world.prepare(args, data)
    batch.pop("loss_scale", None)
    return batch


@dataclass
class Alone:
    """Each sample by itself, without padding and without us: its logits, and the gradients of all of them."""

    logits: list[Tensor]
    gradients: dict[str, Tensor]


def alone(stages: list[Any]) -> Alone:
    data, _ = wire("right")
    logits = []
    for b, length in enumerate(LENGTHS):
        row = {key: data[key][b : b + 1, :length] for key in ("input_ids", "position_ids")}
        logits += world.run(stages, {**row, "attention_mask": None})
        loss_of(logits[-1:], data["labels"][b : b + 1, :length]).backward()
    return Alone([row.detach() for row in logits], gradients(stages))


def measure(stages: list[Any], batch: dict[str, Any], side: str, by_itself: Alone) -> dict[str, Any]:
    """Logits and gradients against each sample alone, and what each layer received."""
    data, truth = wire(side, batch["input_ids"].shape[1])
    with world.recording(stages) as seen:
        logits = world.run(stages, {**batch, "labels": None})
        loss_of(logits, data["labels"]).backward()
    padding = ~truth.keep
    real = [logits[b, keep].detach() for b, keep in enumerate(truth.keep)]
    return {
        "logits": max(furthest(ours, theirs) for ours, theirs in zip(real, by_itself.logits)),
        "gradients": apart(gradients(stages), by_itself.gradients),
        "gdn": {n: bool(zero.equal(padding)) for n, zero in seen.gdn.items()},
        "attention": {n: None if mask is None else list(mask.shape) for n, mask in seen.attention.items()},
        "router": {n: mask is not None and bool(mask.equal(padding)) for n, mask in seen.router.items()},
        "handed": seen.handed,
        "runs": seen.runs,
    }


def furthest(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max()) if bool(ours.isfinite().all()) else FAR


def loss_of(logits: Any, labels: Tensor) -> Tensor:
    """Summed; a row's first label is ignored, so that no padding is asked for it."""
    rows = [cross_entropy(row[:-1], label[1:], reduction="sum") for row, label in zip(logits, labels)]
    return torch.stack(rows).sum()


def gradients(stages: list[Any]) -> dict[str, Tensor]:
    """Taken off the parameters, so that the next run begins without."""
    named = {f"{i} {name}": p for i, stage in enumerate(stages) for name, p in stage.named_parameters()}
    found = {name: p.grad for name, p in named.items() if p.grad is not None}
    for stage in stages:
        stage.zero_grad()
    return found


def apart(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Largest difference of a gradient, relative to the largest of that parameter; infinite where one is not finite."""
    if ours.keys() != theirs.keys() or not all(bool(grad.isfinite().all()) for grad in ours.values()):
        return FAR
    return max(float((ours[key] - theirs[key]).abs().max() / (theirs[key].abs().max() + 1e-6)) for key in theirs)


def from_ours(stages: list[Any], source: str, side: str, by_itself: Alone) -> dict[str, Any]:
    """Our collator, then `gpt_batch`, or the adapter and `pass_through_forward`."""
    data, truth = wire(side)
    rows = [{"input_ids": data["input_ids"][b, keep].tolist()} for b, keep in enumerate(truth.keep)]
    batch = PaddingCollator(pad_token_id=PAD, padding_side=side, pad_to_multiple_of=WIDTH)(rows)
    if source == "gpt_batch":
        inputs, _ = gpt_batch(batch, stages[0])
        return measure(stages, {key: inputs[key] for key in inputs if key not in ("labels", "loss_mask")}, side, by_itself)
    routed = BatchAdapter(stages[0])(batch)
    extras = {"attention_mask_2d": routed.pop("attention_mask_2d")}
    routed.pop("labels", None)
    return measure(stages, mcore_bridge.pass_through_forward(type(stages[0]), routed, extras), side, by_itself)


def said(act) -> str:
    """What an act that fails says; nothing where it goes through."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def invariance(kernel: str, method: str) -> float:
    """How far gradients, those of the routers' losses included, move when the same tokens are padded to twice the width."""
    found = []
    full = {"recompute_granularity": "full", "recompute_num_layers": 1, "recompute_method": method}
    stages = world.build("qwen3_next", moe=True, moe_aux_loss_coeff=1.0, moe_z_loss_coeff=0.1, **full)
    for width in (WIDTH, 2 * WIDTH):
        data, _ = wire("right", width)
        loss_of(world.run(stages, prepared("qwen3_next", kernel, data) | {"labels": None}), data["labels"]).backward()
        found.append(gradients(stages))
    return apart(*found)


def main() -> dict[str, Any]:
    world.on_cpu()
    out: dict[str, Any] = {}
    for name in ("qwen3_next", "qwen3_next moe", "qwen3_5") if world.NATIVE else ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        for npu in (True, False) if name == "qwen3_5" else (True,):
            npu_there(npu)
            out |= {f"{name}{'' if npu else ', no npu'}, {key}": value for key, value in cases(name).items()}
    npu_there(True)
    for kernel, method in (("flash", "uniform"), ("local", "block")) if world.NATIVE else ():
        for who in ("ours", "upstream"):
            swift.install() if who == "ours" else swift.uninstall()
            out[f"router losses, {method}, {who}"] = invariance(kernel, method)
    for who, (name, cp) in product(("upstream", "ours"), (("qwen3_next", 1), ("qwen3_next", 2), ("qwen3_5", 2))):
        swift.install() if who == "ours" else swift.uninstall()
        out[f"{name} on {cp} ranks is built, {who}"] = said(lambda name=name, cp=cp: world.build(name, cp=cp))
    return out | delivery() | (holes() | lookahead() if world.NATIVE else {})


def delivery() -> dict[str, Any]:
    """What `check_delivery` says of a left-padded batch, with what recurrent layers read and without it."""
    swift.install()
    (model,) = world.build("qwen3_next")
    data, truth = wire("left")
    batch = prepared("qwen3_next", "local", data)
    bare = {key: value for key, value in batch.items() if key != "extra_block_kwargs"}
    found = {"delivered": said(lambda: check_delivery(model, batch, segments=truth))}
    found["not delivered"] = said(lambda: check_delivery(model, bare, segments=truth))
    swift.uninstall()
    return found


def lookahead() -> dict[str, Any]:
    """Gradients of left padding against right padding with a prediction layer, past our refusal: by hand."""
    swift.install()
    stages = world.build("qwen3_next", mtp_num_layers=1)
    found: dict[str, dict[str, Tensor]] = {}
    for ignored, side in product((1, 2), ("left", "right")):
        data, truth = wire(side)
        data["labels"].masked_fill_(truth.position_ids < ignored, -100).masked_fill_(~truth.keep, -100)
        labels = torch.roll(data["labels"], -1, dims=-1)
        batch = {**data, "labels": labels, "extra_block_kwargs": {"attention_mask_2d": truth.keep}}
        (world.run(stages, batch) * (labels != -100)).sum().backward()
        found[f"{ignored} {side}"] = gradients(stages)
    swift.uninstall()
    name = "multi-token prediction, left,"
    return {
        f"{name} learned labels": apart(found["1 left"], found["1 right"]),
        f"{name} first two ignored": apart(found["2 left"], found["2 right"]),
    }


def holes() -> dict[str, Any]:
    """What a hole would do, were it not refused; padding on both sides."""
    swift.install()
    stages = world.build("qwen3_next")
    hole, between = row_of([1, 1, 1, 0, 0, 1, 1, 1]), row_of([0, 1, 1, 1, 1, 1, 1, 0])
    refused = said(lambda: gpt_batch(hole, stages[0])), said(lambda: prepared("qwen3_next", "local", hole))
    by_hand = {"position_ids": hole["position_ids"], "extra_block_kwargs": {"attention_mask_2d": hole["attention_mask"]}}
    by_hand |= {"input_ids": hole["input_ids"], "attention_mask": dense(truth_of(hole), polarity="masked")}
    packed = hole | {"attention_mask": torch.ones(1, 8), "segment_ids": torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2]])}
    packed["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    found = {
        "packed, refused": said(lambda: gpt_batch(packed, stages[0])),
        "hole, refused": refused,
        "hole, not refused": far_from_alone(stages, hole, by_hand),
        "padding on both sides": far_from_alone(stages, between, prepared("qwen3_next", "local", between)),
    }
    swift.uninstall()
    return found


def row_of(keep: list[int]) -> dict[str, Tensor]:
    """One row with a 2D mask."""
    row, ids = torch.tensor([keep]), torch.arange(8)[None] + 3
    positions = (row.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": ids, "labels": ids.masked_fill(row == 0, -100), "position_ids": positions, "attention_mask": row}


def truth_of(row: dict[str, Tensor]) -> Segments:
    return Segments.from_ids(row["attention_mask"])


def far_from_alone(stages: list[Any], row: dict[str, Tensor], batch: dict[str, Any]) -> float:
    real = row["attention_mask"][0] != 0
    ids = row["input_ids"][:, real]
    alone = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None], "attention_mask": None}
    with torch.no_grad():
        return furthest(world.run(stages, {**batch, "labels": None})[0, real], world.run(stages, alone)[0])


def npu_there(there: bool) -> None:
    for module in [transformers.utils, *sys.modules.values()]:
        name = getattr(module, "__name__", "")
        asks = name.startswith(("swift.megatron", "mcore_bridge", "transformers.utils"))
        if asks and "is_torch_npu_available" in vars(module):
            module.is_torch_npu_available = lambda *args, **kwargs: there


def cases(name: str) -> dict[str, Any]:
    model_type, _, moe = name.partition(" ")
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    out = {}
    for plan, stages, changed in (("1 stage", 1, {}), ("2 stages, recomputed", 2, full)):
        swift.install()  # without it USE_MCORE_GDN=0 cannot build Qwen3-Next
        is_moe = bool(moe) or model_type.endswith("_moe")
        built = world.build(model_type, moe=is_moe, stages=stages, moe_aux_loss_coeff=0.0, **changed)
        by_itself = alone(built)
        for kernel, side in (("flash", "right"), ("template", "right"), ("local", "right"), ("local", "left")):
            for who in ("ours", "upstream"):
                swift.install() if who == "ours" else swift.uninstall()
                data = swift_world.collate(arguments(model_type), *LENGTHS) if kernel == "template" else wire(side)[0]
                batch = prepared(model_type, kernel, data)
                out[f"{plan}, {kernel}, {side}, {who}"] = measure(built, batch, side, by_itself)
        swift.install()
        for source, side in product(("gpt_batch", "adapter"), ("left", "right")) if stages == 1 else ():
            out[f"{plan}, {source}, {side}, ours"] = from_ours(built, source, side, by_itself)
    swift.uninstall()
    return out


if __name__ == "__main__":
    sys.modules["bridge_work"] = sys.modules["__main__"]  # which the other one imports
    padded = main()
    npu_there(False)
    import bridge_packed_work

    Path(sys.argv[1]).write_text(json.dumps({"padded": padded, "flat": bridge_packed_work.main()}), encoding="utf-8")
