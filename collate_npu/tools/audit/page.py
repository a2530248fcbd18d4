"""Page: a report as one HTML file that needs nothing else: it opens offline, and can be attached to an issue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from collate_npu.errors import CollateError, explain
from collate_npu.segments import Segments
from collate_npu.tools.audit.notes import notes
from collate_npu.tools.audit.positions import missing, positions_svg
from collate_npu.tools.audit.report import WORDS, Report, State
from collate_npu.tools.audit.tables import MEASURES, WHOSE, Cell, ModelTable, legend, model_tables, summary, titles
from collate_npu.tools.audit.verdict import facts, headline
from collate_npu.tools.audit.ways import KINDS

_SIGNS: dict[State, str] = {"right": "✔", "wrong": "✘", "unproved": "?"}
_STATES: dict[int, State] = {0: "right", 1: "wrong"}
_MOST = 256
"""Tokens of a row that are drawn."""


def check_page(path: Path) -> None:
    """Refuse, before anything is measured, a page that could not be written in the end."""
    if lacking := missing():
        rule = "The page draws the error at each token with matplotlib."
        remedy = "Run pip install matplotlib, or leave --html out."
        raise CollateError(explain("--html", f"no {', '.join(lacking)} here", rule, remedy))
    if path.is_dir() or not path.absolute().parent.is_dir():
        got = f"{path}, a folder" if path.is_dir() else f"{path}, in no folder that exists"
        raise CollateError(explain("--html", got, "The page is one file.", "Name a file in a folder that is there."))


def page(report: Report) -> str:
    """The whole page. Loads matplotlib."""
    state = _STATES.get(report.exit_code, "unproved")
    tables = list(model_tables(report, every=True))
    body = [
        f'<header class="{state}"><h1>{_SIGNS[state]} {escape(headline(report))}</h1></header>',
        _terms(facts(report)),
        _summary(report),
        _titled("Notes", _terms(notes(report, verbose=True))),
        _titled("The error at each token", _positions(report)),
        _titled("The first batch", "".join(_batches(report))),
        _titled("Every case", "".join(map(_table, tables)) + _terms(legend(report, tables))),
        _titled("Settings", _terms((key, str(value)) for key, value in report.settings.items())),
    ]
    title = f"collate-npu audit: {WORDS[report.exit_code]}"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>{"".join(body)}</body></html>\n'
    )


def _titled(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>\n{content}</section>\n" if content else ""


def _terms(told: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(label.strip())}</dt><dd>{escape(text)}</dd>\n" for label, text in told)
    return f"<dl>{items}</dl>\n" if items else ""


def _summary(report: Report) -> str:
    head = "".join(f"<th>{title}</th>" for title in ["", *titles(report)])
    rows = ""
    for row in report.rows():
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in summary(report, row))
        rows += f'<tr><td class="{row.state}">{_SIGNS[row.state]}</td>{cells}</tr>\n'
    return _scrolled(f'<table class="summary"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>')


def _scrolled(content: str) -> str:
    return f'<div class="scroll">{content}</div>\n'


def _table(table: ModelTable) -> str:
    head = "".join(f"<th>{MEASURES[c.measure][0]}<br>{escape(c.attn)}<br>{escape(c.side)}</th>" for c in table.cases)
    rows = "".join(
        f'<tr class="{whose}"><td>{WHOSE[whose][0]}</td><td>{escape(title)}</td>{"".join(map(_cell, cells.values()))}</tr>\n'
        for whose, title, cells in table.rows
    )
    head = f"<thead><tr><th></th><th>handed over by</th>{head}</tr></thead>"
    title = f"<h3>{escape(table.model)}: {KINDS[table.kind]}</h3>\n"
    return title + _scrolled(f"<table>{head}<tbody>{rows}</tbody></table>")


def _cell(cell: Cell) -> str:
    mark = " ✘" if cell.state == "wrong" else ""
    return f'<td class="number {cell.state or "word"}">{escape(cell.text)}{mark}</td>'


def _positions(report: Report) -> str:
    drawn = positions_svg(report)
    return f"<p>{_READ}</p>{_scrolled(f'<div class=plot>{drawn}</div>')}" if drawn else ""


_READ = (
    "The largest difference of a logit from the sample alone, at each token: a line is a sample, a cross is a number that "
    "is not finite. The upright axis is of powers of ten; zero is drawn at its foot."
)


def _batches(report: Report) -> Iterator[str]:
    for layout, (model, segments, causal) in report.batches.items():
        B, S = segments.shape
        packed = "packed: one flat row" if layout == "packed" else f"padded on the {layout}"
        cut = f"; the first {_MOST} are drawn" if S > _MOST else ""
        told = "each colour is a sample" if segments.packed else "coloured is real, grey is padding"
        yield f"<h3>{packed}, of {escape(model)}</h3>\n<p>{B} x {S} tokens{cut}; {told}.</p>\n"
        yield _rows_svg(segments)
        yield "<p>Who attends to whom: a row is a query, a column is a key.</p>\n"
        yield f'<div class="masks">{"".join(_mask_svg(ids[:_MOST], causal) for ids in segments.ids.tolist()[:4])}</div>\n'


def _rows_svg(segments: Segments) -> str:
    """A bar a row."""
    B, S = segments.shape[0], min(segments.shape[1], _MOST)
    bars = "".join(
        f'<rect x="{start}" y="{4 * row}" width="{end - start}" height="3" class="s{min(n, 1) * (1 + (n - 1) % 4)}"/>'
        for row, ids in enumerate(segments.ids.tolist())
        for start, end, n in _runs(ids[:_MOST])
    )
    shape = f'viewBox="0 0 {S} {4 * B}" preserveAspectRatio="none" style="height:{1.1 * B:.1f}rem"'
    return f'<svg class="rows" role="img" aria-label="padding of {B} rows" {shape}>{bars}</svg>\n'


def _mask_svg(ids: list[int], causal: bool) -> str:
    """A triangle a sample, or a square."""
    corner = "" if causal else "L{1} {0}"
    shape = f"M{{0}} {{0}}{corner}L{{1}} {{1}}L{{0}} {{1}}Z"
    path = "".join(shape.format(start, end) for start, end, n in _runs(ids) if n)
    S = len(ids)
    return f'<svg class="mask" role="img" aria-label="attention mask" viewBox="0 0 {S} {S}"><path d="{path}"/></svg>'


def _runs(ids: list[int]) -> Iterator[tuple[int, int, int]]:
    """Where runs of equal numbers begin and end."""
    start = 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or ids[at] != ids[start]:
            yield start, at, ids[start]
            start = at


_STYLE = """
:root{color-scheme:light;--line:#e4e7ec;--soft:#667085}
*{box-sizing:border-box}
body{margin:0 auto;max-width:72rem;padding:clamp(.3rem,3vw,2rem);color:#1d2939;background:#fff;overflow-wrap:anywhere;
font:15px/1.5 system-ui,"Segoe UI",Roboto,"Noto Sans","Noto Sans SC","PingFang SC","Microsoft YaHei",sans-serif}
header{border-radius:.5rem;padding:.8rem clamp(.4rem,2vw,1.2rem);margin-bottom:1rem}
h1{font-size:clamp(1rem,2.6vw,1.35rem);margin:0}
h2{font-size:1.1rem;margin:2rem 0 .6rem;border-top:1px solid var(--line);padding-top:1.2rem}
h3{font-size:.95rem;margin:1.2rem 0 .3rem}
p{margin:.2rem 0 .6rem;color:var(--soft)}
dl{display:grid;grid-template-columns:minmax(0,max-content) minmax(0,1fr);gap:.2rem 1.2rem;margin:.4rem 0}
dt{color:var(--soft)}dd{margin:0}
@media(max-width:34rem){dl{display:block}dd{margin:0 0 .5rem}}
.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:.88rem;overflow-wrap:normal}
th{text-align:right;font-weight:600;color:var(--soft);vertical-align:bottom}
th,td{padding:.28rem .8rem .28rem 0;border-bottom:1px solid var(--line);white-space:nowrap}
th:nth-child(-n+2),td:nth-child(-n+2){text-align:left}
.summary :is(th,td):nth-child(-n+4){text-align:left}
td{text-align:right;font-variant-numeric:tabular-nums}
header.right{background:#e7f6ec;color:#0b5d36}header.wrong{background:#fdecea;color:#a11b12}
header.unproved{background:#fff6e0;color:#7a4b00}
td.right{color:#0b6b3f}td.wrong{color:#b42318;font-weight:700}td.unproved{color:#8a5300}td.word{color:var(--soft)}
tr.elsewhere td{background:#fafafa}
.plot{min-width:34rem;max-width:60rem}.plot svg{display:block;width:100%;height:auto}
.rows{display:block;width:100%;max-width:60rem}
.masks{display:flex;flex-wrap:wrap;gap:.6rem}.mask{width:min(9rem,100%);background:#f2f4f7}.mask path{fill:#344054}
.s0{fill:#e4e7ec}.s1{fill:#2f7d5b}.s2{fill:#3f6fb5}.s3{fill:#b3693a}.s4{fill:#7b5ea7}
"""
