"""Reports by hand: what an audit might have found, without a model."""

from collate_npu.proof.measure import Errors, Yardstick
from collate_npu.tools.audit.case import Finding
from collate_npu.tools.audit.report import Report

NAN = float("nan")
SETTINGS = {"device": "cpu", "dtype": "float32", "torch": "2", "transformers": "5"}
NOISE = Errors(1e-6, 1e-6, 1e-6, 1e-6)
SEEN = {"m (sdpa)": Yardstick(NOISE, Errors(4.0, 0.5, 0.1, 0.9))}
UNSEEN = {"m (sdpa)": Yardstick(NOISE, NOISE)}
PLACE = {"model": "m", "attention": "sdpa", "side": "left"}
MINE = {"column": "my_package.data:make_collator", "whose": "yours"}
CHECKPOINT = "/home/somebody/models/2026-11-20/a-folder-with-a-long-name/checkpoint-12000-of-qwen3-next"


def finding(right=True, *, logits=1e-6, column="collator", whose=None, **more):
    whose = whose or ("ours" if column == "collator" else "elsewhere")
    errors = {"logits": logits, "relative": logits, "loss": 0.0, "gradient": 0.0, "right": right}
    return Finding(**{**PLACE, **errors, "column": column, "whose": whose, **more})


def refused(note="no mapping", **more):
    return Finding(**{**PLACE, "column": "mask per layer kind", "whose": "ours", "refused": True, "note": note, **more})


def raised(**more):
    return Finding(**{**PLACE, "column": "collator + adapter", "whose": "ours", "note": "RuntimeError: no", **more})


def report(*findings, yardsticks=SEEN, **more):
    return Report(settings=SETTINGS, findings=list(findings), yardsticks=dict(yardsticks), **more)


def wide_report():
    """All kinds of cases, three attentions, a collator of yours that is wrong, and a checkpoint in a deep folder."""
    cases = [("collator", "ours"), ("mask per layer kind", "ours"), (MINE["column"], "yours"), ("no mask", "elsewhere")]
    cases = [(side, *case) for side in ("left", "right") for case in cases]
    cases += [("packed", "collator", "ours"), ("packed", "no boundaries", "elsewhere")]
    found = [
        finding((side, whose) != ("left", "elsewhere"), column=c, whose=whose, side=side, model=model, attention=a)
        for model in ("m", CHECKPOINT)
        for a in ("sdpa", "eager", "flash_attention_2")
        for side, c, whose in cases
    ]
    found.append(finding(False, logits=4.0, **MINE, by_position=((0.0, 4.0),)))
    not_run = {f"{CHECKPOINT}-new (sdpa)": "OSError: no weights"}
    return report(*found, refused(model="n"), left_out={"r (sdpa)": "never reads it"}, not_run=not_run)
