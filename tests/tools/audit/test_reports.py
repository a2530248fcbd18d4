"""One table: a report made by hand, as JSON, the terminal and the page say it, beside the text that a person has read.

`PYTHONPATH=tests python tests/tools/audit/test_reports.py` writes reports.txt anew; what then differs is to be read.
"""

import html
import io
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("transformers")
from found import MINE, NAN, NOISE, UNSEEN, finding, raised, refused, report, wide_report
from rich.console import Console

from collate_npu.proof.kernel_runs import Run
from collate_npu.proof.measure import Yardstick
from collate_npu.tools.audit.report import page, print_report

WRITTEN, BETWEEN = Path(__file__).with_name("reports.txt"), "\n" + "=" * 30 + " "
YOURS, BATCH = finding(**MINE), finding(False, column="your batch", whose="yours")
WRONG, ELSEWHERE = finding(False, loss=0.03, gradient=0.06), finding(False, logits=3.0, column="no mask")
YOURS_WRONG = finding(False, logits=7.0, note="No mask: wrap it.", **MINE)
GONE = {"n (sdpa)": "OSError: gone"}
RULE, ROWS = "A mapping is known for attention. Keep the 2D.", ((0.0, 1e-6, 2e-6), (0.0, 5e-6))
CALL = Run(operator="a.kernel", truth="padded left", form="TND, mode 3", state="right", forward=1e-3)
WRONG_CALL = Run(operator="b.kernel", truth="window", form="TND, mode 4", state="wrong", forward=NAN, note="out of tokens")
STATES = [finding(), finding(False, model="bad"), finding(model="n")]
PLACES = dict.fromkeys(("gone (sdpa)", "a (b)/c (eager)", "m (sdpa) my:collate", "n (sdpa) packed"), "OSError")
TOLD = {"not_run": GONE, "left_out": {"r (sdpa)": "deaf"}, "kernels": {"a": {"f": "fla"}}}
NAMED = {"model": "<b>&m", "by_position": ((0.0, 4.0),)}
VERBOSE, WHOLE = {"verbose": True}, {"whole": True}
WAYS = [finding(False, logits=3.0, column=way) for way in ("no mask", "mask")]
SAME = re.compile("^ +measured|^right, wrong: cases|─────")
"""Lines of every report, which some show."""
CASES = {
    "right": report(finding()), "right, and refused": (report(finding(), refused()), {**VERBOSE, **WHOLE}),
    "wrong elsewhere": (report(finding(), ELSEWHERE, finding(logits=NAN, column="4D mask alone"), *WAYS[1:]), VERBOSE),
    "left out": report(finding(), left_out={"rwkv (sdpa)": "never reads it"}), "yours, right": report(finding(), YOURS),
    "yours alone": report(YOURS), "wrong": report(finding(), WRONG), "it raises": report(finding(), raised()),
    "raises alone": report(raised()), "yours is wrong": (report(finding(), YOURS_WRONG), WHOLE),
    "yours raises": report(finding(), raised(whose="yours")), "ours is wrong, yours is right": report(WRONG, YOURS),
    "your batch is wrong": report(finding(), BATCH), "both are wrong": report(WRONG, YOURS_WRONG),
    "wrong in all ways": report(WRONG, not_run=GONE, yardsticks=UNSEEN), "not run": report(finding(), not_run=GONE),
    "nothing ran": report(not_run=GONE), "blind": report(finding(), yardsticks=UNSEEN),
    "nothing wrong beside it": report(finding(), yardsticks={"m (sdpa)": Yardstick(NOISE)}),
    "refused alone": report(refused()), "others alone": report(finding(column="no mask")), "nothing": report(),
    "within a tolerance": report(finding(False), tolerance=1e-4),
    "at a tolerance": report(finding(logits=0.5, loss=0.5, gradient=0.5), tolerance=0.5),
    "beyond a tolerance": report(finding(logits=1e-3), tolerance=1e-4),
    "a gradient beyond a tolerance": report(finding(gradient=1.0), tolerance=1e-4),
    "labels with a tolerance": report(finding(False, astray=("labels",)), tolerance=9.0),
    "no number, with a tolerance": report(finding(logits=NAN), tolerance=1e30),
    "a tolerance that tells nothing": report(finding(), tolerance=5.0),
    "interrupted": report(finding(), finding(False), interrupted=True),
    "interrupted, the model it was at": report(finding(model="first"), finding(model="second"), interrupted=True),
    "a call is wrong": (report(finding(), operators=[CALL, CALL, WRONG_CALL]), {}, VERBOSE),
    "a call is right": report(finding(), operators=[CALL]),
    "no operator": report(finding(), operators=[Run(operator="a.kernel", state="not installed")]),
    "operators refused": report(finding(), operators=[Run(operator="a", truth="t", state="refused"), CALL]),
    "the worst is no number": report(finding(logits=3.0), finding(logits=NAN, note="a number is not finite"), finding()),
    "the gradient is no number": report(finding(False, loss=0.03, gradient=NAN), finding(False, gradient=0.0)),
    "a loss alone": (report(finding(False, loss=0.06, gradient=None, astray=("loss",))), WHOLE),
    "gradient astray": report(finding(False, gradient=0.06, astray=("loss", "gradient"))),
    "logits astray": report(finding(False, gradient=0.06, astray=("logits",))),
    "loss astray, without a column": (report(finding(False, gradient=0.06, astray=("loss",))), WHOLE),
    "states of models": report(*STATES, finding(model="fine"), not_run=PLACES),
    "all that did not run": (report(refused(), raised(), YOURS_WRONG, yardsticks=UNSEEN, **TOLD), VERBOSE),
    "a reason of six": (report(*(refused(f"layers: got k_{n}. {RULE}", model=f"m{n}") for n in range(6))), {}, VERBOSE),
    "a reason of five": report(*(refused(f"m{n}_text got it. {RULE}", model=f"m{n}") for n in range(5))),
    "small and large": (report(*(finding(logits=x, column=f"{x}") for x in (0.00999, 0.01, 999.9, 1000))), VERBOSE),
    "summed up": report(finding(), finding(side="packed", logits=2e-6), refused(), *WAYS, finding(column="mask 2")),
    "all kinds": (wide_report(), {"width": 80, **WHOLE}, {"width": 66}),
    "narrow": (report(finding(False), left_out={"m (sdpa)": "x" * 90}), {"width": 44}),
    "in colour": (report(finding(False, logits=4.0)), {"force_terminal": True, "color_system": "standard"}),
    "in ASCII": (report(finding(False, logits=4.0)), {"encoding": "ascii"}, {"encoding": "gbk"}),
}  # fmt: skip
PAGES = {
    "all kinds": wide_report(), "interrupted": report(interrupted=True),
    "names that are code": report(finding(False, logits=4.0, **NAMED), not_run={"<u> (sdpa)": "<u>[red]"}),
    "of each kind": report(finding(by_position=ROWS), finding(logits=1e-7, column="wrapped collator", whose="ours"),
                           finding(False, logits=4.0, column="no mask", by_position=((4.0, 3.0), (0.1, 0.02)))),
    "no number": report(finding(False, logits=NAN, by_position=((1e-6, NAN, 1e-6), (1.0, 2.0)))),
    "a long sample": report(finding(by_position=((*[1e-9] * 148, 1.0, 1e-9),))),
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


def said(made, *how):
    """What a program reads first, what it is of each model, and the text of the terminal, once for each way to print."""
    found = json.loads(json.dumps(made.as_json(), allow_nan=False))
    heads = json.dumps({key: found[key] for key in list(found)[:4]} | {"cannot_tell": found["cannot_tell"]})
    return "\n\n".join([heads, str(made.states()), *(f"{one}\n{printed(made, **one)}" for one in how or ({},))])


def read(made):
    """The page as text, what is bold in stars, without its style."""
    text = re.sub(r'<span style="[^"]*bold[^"]*">(.*?)</span>', r"*\1*", page(made), flags=re.S)
    text = html.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", "", text, flags=re.S))
    lines = [line.rstrip() for line in text.strip().splitlines()]
    return "\n".join(lines if len(made.findings) > 3 or made.not_run else lines[lines.index("*The error at each token*") :])


def as_json(made):
    return json.dumps(made.as_json(), indent=1, allow_nan=False)


MADE = {name: (said, *(case if isinstance(case, tuple) else [case])) for name, case in CASES.items()}
MADE |= {f"page: {name}": (read, made) for name, made in PAGES.items()}
MADE["JSON"] = (as_json, report(finding(False, logits=NAN, by_position=((0.0, NAN),)), operators=[WRONG_CALL], **TOLD))
EXPECTED = dict(part.split("\n", 1) for part in WRITTEN.read_text("utf-8").split(BETWEEN)[1:]) if WRITTEN.exists() else {}


@pytest.mark.parametrize("name", MADE)
def test_what_is_said_is_what_was_read(name, monkeypatch):
    for setting in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS"):
        monkeypatch.delenv(setting, raising=False)
    form, *case = MADE[name]
    assert form(*case).strip() == EXPECTED[name].strip()


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_without_colour_gets_none(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert not re.search(r"ESC[\d;]*3[1-7]", printed(CASES["wrong"], force_terminal=True))


if __name__ == "__main__":
    text = "".join(f"{BETWEEN}{name}\n{form(*case)}\n" for name, (form, *case) in MADE.items())
    WRITTEN.write_text(text, encoding="utf-8")
