"""Hooks of the site: the menu is made from the guide's index.md, the pages of the API from the package's own lists of names.

Nothing here imports torch: `import collate_npu` loads nothing, and mkdocstrings reads the source.
"""

from __future__ import annotations

import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import collate_npu  # noqa: E402

MODULES = (
    "testing",
    "keys",
    "consumers.consumer",
    "masks.find",
    "parallel",
    "kernels.fusion_attention",
    "kernels.gated_delta",
)
"""Rendered whole, beside the names of `collate_npu` itself and every trainer's integration."""


WHOLE = "::: collate_npu.{name}\n    options: {{heading_level: 1, show_root_heading: false}}"


def on_config(config: Any) -> Any:
    """The menu: the sections and links of index.md, in their order, then the API."""
    menu: list[dict[str, Any]] = [{"Home": "index.md"}]
    for line in Path(config.docs_dir, "index.md").read_text(encoding="utf-8").splitlines():
        if title := re.match(r"## (.+)", line):
            menu.append({title[1]: []})
        elif link := re.match(r"\* \[([^\]]+)\]\((\S+\.md)\)", line):
            next(iter(menu[-1].values())).append({link[1]: link[2]})
    config.nav = [*menu, {"API": [{path[16:-3]: path} for path in api_pages()]}]  # api/collate_npu.NAME.md
    return config


def on_files(files: Files, config: Any) -> Files:
    for path, text in api_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """A docstring's `::` before a block, as readers of Markdown know it."""
    return html.replace("::</p>", ":</p>")


def api_pages() -> dict[str, str]:
    """Path to text: a page for each room of `collate_npu.__all__`, and one for each module."""
    names = sorted(collate_npu.__all__, key=lambda name: (room(name), name))
    rooms = {where: [f"::: collate_npu.{name}" for name in group] for where, group in groupby(names, key=room)}
    rooms |= {f"collate_npu.{name}": [WHOLE.format(name=name), *handed_on(name)] for name in (*MODULES, *integrations())}
    return {f"api/{where}.md": "\n\n".join([f"# {where}", *parts]) for where, parts in rooms.items()}


def room(name: str) -> str:
    return "collate_npu." + collate_npu._HOME[name].partition(".")[0]


def handed_on(module: str) -> list[str]:
    """What a module hands on by `import name as name`, which mkdocstrings shows of a package with `__all__` alone."""
    path = ROOT / "collate_npu" / module.replace(".", "/")
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    return [f"::: collate_npu.{module}.{name}" for name in re.findall(r"^from \S+ import (\w+) as \1$", text, flags=re.M)]


def integrations() -> list[str]:
    """Every trainer's module: the files and packages of `integrations`, less what they share."""
    shared = {"context_parallel", "patching", "delivery"}
    found = sorted(path.stem for path in (ROOT / "collate_npu" / "integrations").iterdir())
    return [f"integrations.{name}" for name in found if name not in shared and not name.startswith("__")]
