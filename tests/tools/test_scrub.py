"""A scrubbed copy: read, refused, adapted and drawn as the batch is; nothing of its tokens and values is left."""

import re
from contextlib import suppress

import numpy as np
import pytest
import torch

pytest.importorskip("rich")
from hypothesis import given, strategies as st
from strategies import PAD, features
from typed import typed

from collate_npu import BatchAdapter, CollateError, PaddingCollator, describe
from collate_npu.masks import dense, segments_from_batch
from collate_npu.tools.scrub import DRAWN, KEPT, LEFT_OUT, RENAMED, scrub
from collate_npu.tools.sheet import sheet_of
from collate_npu.tools.show import lines, text_of

SECRET = 10**12
"""Ids from here on do not come again by chance."""
LAYOUTS = {
    "right": {"attention_mask": "2d"}, "left": {"attention_mask": "2d", "padding_side": "left"},
    "packed": {"attention_mask": "2d", "packing": True, "max_length": 16}, "flat": {"padding_free": True},
}  # fmt: skip
MASKS = ("2d", "keep", "masked", "bias", "both", "alone", "inverted", "none")


@st.composite
def batches(draw, low):
    """A batch of ours, under one of the masks that batches carry; some are refused."""
    collate = PaddingCollator(pad_token_id=PAD, **LAYOUTS[draw(st.sampled_from([*LAYOUTS]))])
    batch, mask = collate(draw(features())), draw(st.sampled_from(MASKS))
    segments = segments_from_batch(batch)
    for key in ("input_ids", "labels"):
        batch[key] += (batch[key] >= 0) * low
    if mask in ("keep", "masked", "bias", "both", "alone"):
        batch["attention_mask"] = dense(segments, polarity=mask if mask not in ("both", "alone") else "keep")
    if mask in ("inverted", "none"):
        batch["attention_mask"] = ~segments.keep if mask == "inverted" else None
    if mask in ("alone", "inverted", "none"):
        batch = {key: x for key, x in batch.items() if key in ("input_ids", "attention_mask") or draw(st.booleans())}
    return batch


def said(what, batch):
    """What is said of a batch, or why it is refused, without the ids in it."""
    try:
        text = str(what(batch))
    except CollateError as error:
        text = f"refused: {error}"
    return re.sub(r"(the id|the token|of them) [\d, ]+", r"\1 N", text)


def adapted(batch):
    """All but what is changed, and which ids are ignored."""
    out = BatchAdapter(model_type="qwen3_next", consumer="megatron", padding_free="cu_seq_lens_q" in batch)(batch)
    changed = {"input_ids", "labels", "loss_scale"} & {*out}
    return [(out[key] < 0).tolist() for key in sorted(changed)], {key: str(out[key]) for key in sorted({*out} - changed)}


@given(batches(SECRET) | batches(0))
def test_a_copy_says_the_same_and_holds_no_id(batch):
    before = {key: x.clone() for key, x in batch.items() if isinstance(x, torch.Tensor)}
    copy, columns = scrub(batch)
    assert [*copy] == [*batch]
    for what in (segments_from_batch, describe, lambda x: text_of(lines(sheet_of(x), 100)), adapted):
        assert said(what, copy) == said(what, batch)
    pairs = set()
    for key, x in before.items():
        assert torch.equal(batch[key], x)
        assert (copy[key].dtype, copy[key].shape) == (x.dtype, x.shape)
        if key in ("input_ids", "labels"):
            pairs |= set(zip(x.flatten().tolist(), copy[key].flatten().tolist()))
        elif key != "loss_scale":
            assert torch.equal(copy[key], x)
    old, new = map(set, zip(*pairs))
    assert len(old) == len(new) == len(pairs)
    assert max(new) <= max(old)
    padding = set()
    with suppress(CollateError):
        padding = {*batch["input_ids"][~segments_from_batch(batch).keep].tolist()}
    stay = padding if len(padding) == 1 else set()
    assert {(n, n) for n in stay} <= pairs
    assert old & new <= {-100, *stay} or max(old) < SECRET
    assert {*columns[RENAMED]} == {"input_ids", "labels"} & {*batch}


IDS = torch.tensor([[5, 6, 7], [5, 6, 9]]) + SECRET
KEEP = torch.tensor([[1, 1, 1], [1, 1, 0]])
SECRETS = {
    "labels": torch.tensor([SECRET, -100]), "rewards": [SECRET + 0.5, 2e9], "uid": "Ann", "raw": (b"Ann", None),
    "pixel_values": torch.tensor([[0, 1], [1, 0]] * 40), "image": torch.tensor([[0, 1]] * 40),
    "onehot": torch.eye(6)[:, :, None], "inputs_embeds": torch.full((2, 3, 4), 2e9), "chars": np.array([SECRET]),
    "extra": {"a": [[SECRET], [SECRET, 2]], "b": {"c": SECRET}}, "short": torch.tensor([200], dtype=torch.uint8),
    "log_probs": torch.tensor([[SECRET, float("nan"), float("inf")]] * 2).bfloat16(), "names": ["Ann", SECRET],
}  # fmt: skip
LAID_OUT = {
    "attention_mask": {"full": KEEP}, "seq_lengths": [[2, 1], [2]], "max_seqlen": 3, "second_per_grid_ts": [0.1],
    "image_grid_thw": torch.tensor([[1, 4, 4]]), "position_ids": IDS, "response_mask": KEEP[:, 1:],
    "mine": KEEP.bool(), "shift_labels": None,
}  # fmt: skip


def numbers(value):
    """Every number and text in a value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (torch.Tensor, np.ndarray)):
        value = value.tolist()
    return [each for item in value for each in numbers(item)] if isinstance(value, (list, tuple)) else [value]


def test_each_column_is_kept_changed_or_left_out():
    """What nobody knows is private, flags aside; of a private column only the ignored label and what is not finite stay."""
    batch = {"input_ids": IDS, "attention_mask_2d": KEEP, **SECRETS, **LAID_OUT, "object": {1, 2}}
    copy, columns = scrub(batch)
    fates = {KEPT: ["attention_mask_2d", *LAID_OUT], RENAMED: ["input_ids"], DRAWN: [*SECRETS], LEFT_OUT: ["object"]}
    assert columns == fates
    for name in (*SECRETS, *LAID_OUT):
        was, now = numbers(batch[name]), numbers(copy[name])
        assert len(was) == len(now)
        assert (was == now) == (name in LAID_OUT)
        stays = [n for n in now if n in was and n not in (None, -100, 0, 1, 2, float("inf"))]
        assert name in LAID_OUT or stays == []
    assert (copy["labels"][1], copy["log_probs"].isinf().sum()) == (-100, 2)
    assert scrub({"input_ids": IDS, "pixel_values": KEEP})[1][DRAWN] == ["pixel_values"]  # a picture in black and white


@pytest.mark.parametrize("kind", [torch.jagged, list, tuple, torch.uint8])
def test_ids_of_other_containers_are_replaced_alike(kind):
    """Lists, rows of unequal length, and a dtype that holds few of the ids."""
    if kind is torch.jagged:
        rows = labels = torch.nested.nested_tensor([*IDS.unbind()], layout=kind)
    elif kind is torch.uint8:
        rows, labels = torch.tensor([[5, 6, SECRET]]), torch.tensor([[5, 6, 7]], dtype=kind)
    else:
        rows = labels = kind(map(kind, [*IDS.tolist(), [5]]))
    copy, columns = scrub({"input_ids": rows, "labels": labels})
    assert columns[RENAMED] == [*copy]
    assert [*map(type, copy.values())] == [type(rows), type(labels)]
    both = zip((*rows, *labels), (*copy["input_ids"], *copy["labels"]))
    pairs = {(int(was), int(now)) for old_row, new_row in both for was, now in zip(old_row, new_row)}
    assert len({was for was, _ in pairs}) == len({now for _, now in pairs}) == len(pairs)


@pytest.mark.parametrize("ending", [".pt", ".npz", ".safetensors"])
def test_the_command_writes_a_new_file_and_draws_it(tmp_path, ending):
    """The tensors of a batch may be views of one memory, which torch.save writes whole."""
    held = torch.stack([IDS, IDS, KEEP])
    batch = dict(zip(("input_ids", "labels", "attention_mask"), held))
    path, clean = tmp_path / f"batch{ending}", tmp_path / "clean.pt"
    if ending == ".npz":
        np.savez(path, **{key: x.numpy() for key, x in batch.items()})
    elif ending == ".pt":
        torch.save(batch, path)
    else:
        pytest.importorskip("safetensors.torch").save_file({key: x.clone() for key, x in batch.items()}, path)
    before = path.read_bytes()
    done = typed("show", "--batch", path, "--scrub", clean)
    assert (done.exit_code, path.read_bytes()) == (0, before)
    assert re.search(r"\nkept: attention_mask\nother ids: (input_ids, labels|labels, input_ids)\nwritten: ", done.stdout)
    assert not any(int(n).to_bytes(8, "little") in clean.read_bytes() for n in IDS[0])
    drawn = done.stdout.partition("kept:")[0]
    assert sorted(drawn) == sorted(typed("show", "--batch", path).stdout)  # of safetensors in any order
    for args, words in {
        ("--batch", path, "--scrub", clean): "Name another one", ("--lengths", 3, "--scrub", clean): "with --batch",
        ("--batch", path, "--scrub", tmp_path / "a.html"): "End the name with .pt",
    }.items():  # fmt: skip
        refused = typed("show", *args)
        assert (refused.exit_code, refused.stdout, words in refused.stderr) == (2, "", True)
