"""Reports by hand: what an audit might have found, without a model."""

from __future__ import annotations

from collate_npu import Segments
from collate_npu.testing.measure import Errors
from collate_npu.testing.yardstick import Yardstick
from collate_npu.tools.audit.case import Finding
from collate_npu.tools.audit.report import FirstBatch, Report

NAN = float("nan")
SETTINGS = {"device": "cpu", "dtype": "float32", "torch": "2", "transformers": "5"}
NOISE = Errors(1e-6, 1e-6, 1e-6, 1e-6)
SEEN = {"m (sdpa)": Yardstick(NOISE, Errors(4.0, 0.5, 0.1, 0.9))}
UNSEEN = {"m (sdpa)": Yardstick(NOISE, NOISE)}
PLACE = {"model": "m", "attn_implementation": "sdpa", "side": "left"}
CHECKPOINT = "/home/somebody/models/2026-11-20/a-folder-with-a-long-name/checkpoint-12000-of-qwen3-next"


def finding(right=True, *, logits=1e-6, column="collator", whose=None, **more):
    whose = whose or ("ours" if column == "collator" else "elsewhere")
    errors = {"logits": logits, "relative": logits, "loss": 0.0, "gradient": 0.0, "right": right}
    return Finding(**{**PLACE, **errors, "column": column, "whose": whose, **more})


def refused(note="no mapping", **more):
    return Finding(**{**PLACE, "column": "mapping", "whose": "ours", "refused": True, "note": note, **more})


def raised(**more):
    return Finding(**{**PLACE, "column": "adapter", "whose": "ours", "note": "RuntimeError: no", **more})


def lacking(column="collator", *, whose="ours", **more):
    note = "no kernel here: f is plain torch (try --kernels reference)"
    where = {**PLACE, "side": "packed", "column": column, "whose": whose}
    return Finding(**{**where, "no_kernel": True, "note": note, **more})


def report(*findings, yardsticks=SEEN, **more):
    return Report(settings=SETTINGS, findings=list(findings), yardsticks=dict(yardsticks), **more)


def wide_report():
    """All kinds of cases, three attentions, a collator of yours that is wrong, and a checkpoint in a deep folder."""
    found = []
    padded = [("collator", "ours"), ("mapping", "ours"), ("my_package.data:make_collator", "yours"), ("None", "elsewhere")]
    packed = [("collator", "ours"), ("positions", "elsewhere"), ("nothing", "elsewhere")]
    for model in ("m", CHECKPOINT):
        for attn in ("sdpa", "eager", "flash_attention_2"):
            where = {"model": model, "attn_implementation": attn}
            for side in ("left", "right"):
                found += [
                    finding(w != "elsewhere" or side == "right", column=c, whose=w, side=side, **where) for c, w in padded
                ]
            found += [finding(column=c, whose=w, side="packed", **where) for c, w in packed]
        found.append(finding(column="Trainer", whose="ours", side="cp 2", model=model))
    found.append(
        finding(False, logits=4.0, column="my_package.data:make_collator", whose="yours", by_position=((0.0, 4.0),))
    )
    left_out = {"rwkv (sdpa)": "never reads it", f"{CHECKPOINT}-old (sdpa)": "never reads it"}
    batches = {"left": FirstBatch("m", Segments.from_lengths([3, 5], side="left"))}
    batches["packed"] = FirstBatch("m", Segments.from_lengths([[2, 3]]), causal=False)
    not_run = {f"{CHECKPOINT}-new (sdpa)": "OSError: no weights"}
    return report(*found, refused(model="n"), left_out=left_out, not_run=not_run, batches=batches)
