"""The guide's notebooks print here what they hold, cell by cell, without Jupyter; `nox -s docs` runs them in a kernel."""

import ast
import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest

pytest.importorskip("transformers")
import collate_npu
from collate_npu.releases import KERNELS_TOLD
from collate_npu.tools.guide import as_markdown, printed

pytestmark = pytest.mark.models
NOTEBOOKS = sorted((Path(collate_npu.__file__).parent / "guide").glob("*.ipynb"))


def ran(code, names):
    """What a cell prints, and the text of its last line, as a kernel shows them."""
    out, body = io.StringIO(), ast.parse(code).body
    with redirect_stdout(out):
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return "\n".join(text.strip("\n") for text in (out.getvalue(), "" if value is None else repr(value)) if text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_cell_prints_what_it_holds(path):
    names = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            found = ran("".join(cell["source"]), names)
            assert found == printed(cell) or not KERNELS_TOLD.holds()  # older releases call kernels by other names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_short_and_every_output_is_stored(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert len(cells) <= 10
    assert (
        max(len(line) for cell in cells for line in "".join(cell["source"]).splitlines() if cell["cell_type"] == "code")
        <= 80
    )
    assert all(printed(cell) for cell in cells if cell["cell_type"] == "code")
    assert not any(each.get("name") == "stderr" for cell in cells for each in cell.get("outputs", ()))


def test_a_page_of_it(tmp_path):
    outputs = [
        {"output_type": "stream", "name": "stderr", "text": ["noise\n"]},
        {"output_type": "stream", "name": "stdout", "text": ["one\n", "two\n"]},
        {"output_type": "execute_result", "data": {"text/plain": ["3"], "text/html": ["<b>3</b>"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": ["x = 3\n", "x"], "outputs": outputs},
        {"cell_type": "code", "source": ["pass"], "outputs": []},
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    page = "# Title\ntext\n\n```python\nx = 3\nx\n```\n\n```text\none\ntwo\n3\n```\n\n```python\npass\n```\n"
    assert as_markdown(tmp_path / "a.ipynb") == page
    outputs[1]["text"] = "word " * 16 + "\n" + "word " * 40
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    said = as_markdown(tmp_path / "a.ipynb").splitlines()
    assert max(map(len, said)) <= 80
    assert "word " * 16 in said
