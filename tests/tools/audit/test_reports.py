"""One table: a report made by hand, as JSON, the terminal and the page print it, beside the text that a person has read.

`PYTHONPATH=tests python tests/tools/audit/test_reports.py` writes reports.txt anew; what then differs is to be read.
"""

import html
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("transformers")
from rich.console import Console

from collate_npu.proof.measure import Errors, Yardstick
from collate_npu.tools.audit.case import Finding
from collate_npu.tools.audit.report import Report, page, print_report

WRITTEN, BETWEEN = Path(__file__).with_name("reports.txt"), "\n" + "=" * 30 + " "
NAN = float("nan")
SETTINGS = {"device": "cpu", "dtype": "float32", "torch": "2", "transformers": "5"}
NOISE = Errors(1e-6, 1e-6, 1e-6, 1e-6)
SEEN = {"m (sdpa)": Yardstick(NOISE, Errors(4.0, 0.5, 0.1, 0.9))}
UNSEEN = {"m (sdpa)": Yardstick(NOISE, NOISE)}
CHECKPOINT = "/home/somebody/models/2026-11-20/a-folder-with-a-long-name/checkpoint-12000-of-qwen3-next"


def finding(*astray, column="collator", whose="ours", **more):
    errors = {"logits": 1e-6, "relative": 1e-6, "loss": 0.0, "gradient": 0.0}
    about = {"model": "m", "attention": "sdpa", "side": "left", "column": column, "whose": whose}
    return Finding(**{**about, **errors, "astray": astray, **more})


def unmeasured(note, **more):
    return finding(note=note, **dict.fromkeys(("logits", "relative", "loss", "gradient")), **more)


def refused(note="no mapping", **more):
    return unmeasured(note, column="wrapped collator", refused=True, **more)


def yours(*astray, **more):
    return finding(*astray, column="my_package.data:make_collator", whose="yours", **more)


def others(*astray, column="no mask", **more):
    return finding(*astray, column=column, whose="elsewhere", **more)


def report(*findings, yardsticks=SEEN, **more):
    return Report(settings=SETTINGS, findings=list(findings), yardsticks=dict(yardsticks), **more)


def wide_report():
    """All kinds of cases, two attentions, a collator of yours that is wrong, and a checkpoint in a deep folder."""
    found = [
        each
        for model in ("m", CHECKPOINT)
        for about in ({"model": model, "attention": attention} for attention in ("sdpa", "flash_attention_2"))
        for each in (
            *(make(side=side, **about) for side in ("left", "right") for make in (finding, yours)),
            others("logits", logits=4.0, **about), finding(side="packed", **about),
            others("logits", "loss", "gradient", column="no boundaries", side="packed", **about),
        )
    ]  # fmt: skip
    found += [yours("logits", "labels", logits=4.0, note="No mask.", by_position=((0.0, 4.0),)), refused(model="n")]
    not_run = {f"{CHECKPOINT}-new (sdpa)": "OSError: no weights"}
    return report(*found, left_out={"r (sdpa)": "never reads it"}, not_run=not_run)


WRONG = finding("loss", "gradient", loss=0.03, gradient=0.06)
RAISED = unmeasured("RuntimeError: no", column="collator + adapter")
GONE = {"n (sdpa)": "OSError: gone"}
RULE = "A mapping is known for attention. Keep the 2D."
PLACES = dict.fromkeys(("gone (sdpa)", "a (b)/c (eager)", "m (sdpa) my:collate", "n (sdpa) packed"), "OSError")
BESIDE = {"not_run": GONE, "left_out": {"r (sdpa)": "deaf"}, "kernels": {"a": {"f": "fla"}}}
VERBOSE, WHOLE = {"verbose": True}, {"whole": True}
COLOURED = {"force_terminal": True, "color_system": "standard"}
SAME = re.compile("^ +measured|^right, wrong: cases|─────")
"""Lines of every report, which some show."""
CASES = {
    "right, and refused": (report(finding(), refused()), {**VERBOSE, **WHOLE}),
    "yours alone": report(yours()), "wrong, and yours": report(finding(), WRONG, yours()), "raises alone": report(RAISED),
    "yours is wrong": report(finding(), yours("labels", logits=7.0, note="No mask: wrap it.")),
    "both are wrong": report(WRONG, yours("logits", note="Wrap it."), not_run=GONE, yardsticks=UNSEEN),
    "not run": report(finding(), not_run=GONE), "nothing ran": report(not_run=GONE),
    "blind": report(finding(), yardsticks=UNSEEN),
    "nothing wrong beside it": report(finding(), yardsticks={"m (sdpa)": Yardstick(NOISE)}),
    "refused alone": report(refused()), "others alone": report(others()),
    "labels and kernels": report(finding("labels"), finding("kernels", column="wrapped collator"), tolerance=3.0),
    "a tolerance that tells nothing": report(finding(), tolerance=5.0),
    "interrupted": report(finding(model="first"), finding(model="second"), interrupted=True),
    "on a card": replace(report(finding()), settings={**SETTINGS, "device": "npu:1"}),
    "the worst is no number": report(finding("loss", logits=3.0, gradient=None), finding("logits", logits=NAN)),
    "states of models": report(finding(), finding("loss", model="bad"), finding(model="n"), not_run=PLACES),
    "all that did not run": (report(refused(), RAISED, yours("logits", note="Wrap it."), **BESIDE), VERBOSE),
    "a reason of six": (report(*(refused(f"layers: got k. {RULE}", model=f"m{n}") for n in range(6))), {}, VERBOSE),
    "all kinds": (wide_report(), {"width": 80, **WHOLE}, {"width": 66}),
    "in colour and in ASCII": (report(WRONG), COLOURED, {"encoding": "ascii"}, {"encoding": "gbk", "width": 44}),
}  # fmt: skip


def printed(made, *, verbose=False, encoding="utf-8", width=120, whole=False, **settings):
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding=encoding), width=width, **settings)
    print_report(console, made, verbose=verbose)
    console.file.flush()
    text = raw.getvalue().decode(encoding)
    assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in text.splitlines()) <= width
    lines = [line.rstrip() for line in text.replace("\x1b[", "ESC").splitlines()]
    at = next((n for n, line in enumerate(lines) if "What the words mean" in line), len(lines))
    return "\n".join(lines if whole else [line for line in lines[:at] if line and not SAME.search(line)])


def written(made, *how):
    """What a program reads first, and the text of the terminal, once for each way to print."""
    found = json.loads(json.dumps(made.as_json(), allow_nan=False))
    heads = json.dumps({key: found[key] for key in list(found)[:4]} | {"cannot_tell": found["cannot_tell"]})
    return "\n\n".join([heads, *(f"{one}\n{printed(made, **one)}" for one in how or ({},))])


def read(made):
    """The page as text, what is bold in stars, without its style."""
    text = re.sub(r'<span style="[^"]*bold[^"]*">(.*?)</span>', r"*\1*", page(made), flags=re.S)
    text = html.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", "", text, flags=re.S))
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def as_json(made):
    return json.dumps(made.as_json(), indent=1, allow_nan=False)


MADE = {name: (written, *(case if isinstance(case, tuple) else [case])) for name, case in CASES.items()}
MADE["page"] = (read, report(finding("logits", model="<b>&m"), not_run={"<u> (sdpa)": "<u>[red]"}))
MADE["JSON"] = (as_json, report(finding("loss", logits=NAN, by_position=((0.0, NAN),)), **BESIDE))
EXPECTED = dict(part.split("\n", 1) for part in WRITTEN.read_text("utf-8").split(BETWEEN)[1:]) if WRITTEN.exists() else {}


@pytest.mark.parametrize("name", MADE)
def test_a_report_is_the_text_that_was_read(name, monkeypatch):
    for setting in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS"):
        monkeypatch.delenv(setting, raising=False)
    form, *case = MADE[name]
    assert form(*case).strip() == EXPECTED[name].strip()


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_without_colour_gets_none(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert not re.search(r"ESC[\d;]*3[1-7]", printed(report(WRONG), force_terminal=True))


if __name__ == "__main__":
    text = "".join(f"{BETWEEN}{name}\n{form(*case)}\n" for name, (form, *case) in MADE.items())
    WRITTEN.write_text(text, encoding="utf-8")
