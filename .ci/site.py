"""Hooks of the site: the menu is made from the guide's index.md, the pages of the API from the package's own lists of names.

Nothing here imports torch: `import collate_npu` loads nothing, and mkdocstrings reads the source.
"""

from __future__ import annotations

import ast
import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import collate_npu  # noqa: E402
from collate_npu.tools.guide import as_markdown  # noqa: E402

MODULES = (
    "collate",
    "collate.wrapping",
    "errors",
    "keys",
    "consumers.mask_routing",
    "masks",
    "outputs",
    "parallel",
    "kernels.check",
    "kernels.fusion_attention",
    "kernels.gated_delta",
    "proof",
    "proof.delivery",
    "testing",
)
"""Rendered whole, beside the names of `collate_npu` itself and every trainer's integration."""


WHOLE = "::: collate_npu.{name}\n    options: {{heading_level: 2, show_root_heading: false}}"


def on_config(config: Any) -> Any:
    """The menu: the sections and links of index.md, in their order, then the API."""
    menu: list[dict[str, Any]] = [{"Home": "index.md"}]
    for line in Path(config.docs_dir, "index.md").read_text(encoding="utf-8").splitlines():
        if title := re.match(r"## (.+)", line):
            menu.append({title[1]: []})
        elif link := re.match(r"\* \[([^\]]+)\]\((\S+)\.(?:md|ipynb)\)", line):
            next(iter(menu[-1].values())).append({link[1]: f"{link[2]}.md"})
    menu = [each for each in menu if all(each.values())]  # a section without pages is text of index.md
    config.nav = [*menu, {"API": [{path[16:-3]: path} for path in api_pages()]}]  # api/collate_npu.NAME.md
    return config


def on_files(files: Files, config: Any) -> Files:
    for path, text in api_pages().items():
        files.append(File.generated(config, path, content=text))
    for path in Path(config.docs_dir).glob("*.ipynb"):  # beside the file itself, which is there to be run
        text = f"{as_markdown(path)}\n<a href='{path.name}' download>This page as a notebook</a>\n"
        files.append(File.generated(config, f"{path.stem}.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to a notebook lead to its page."""
    return markdown.replace(".ipynb)", ".md)")


def on_page_content(html: str, **_: Any) -> str:
    """A docstring's `::` before a block, as readers of Markdown know it."""
    return html.replace("::</p>", ":</p>")


def on_post_build(config: Any) -> None:
    """Every public name stands on a page: one without a docstring is left out without a word."""
    text = "".join(path.read_text(encoding="utf-8") for path in Path(config.site_dir, "api").glob("*.html"))
    shown = set(re.findall(r'id="collate_npu\.([\w.]+)"', text))
    names = {name for name in collate_npu.__all__ if not any(each.split(".")[-1] == name for each in shown)}
    names |= {f"{module}.{name}" for module in MODULES for name in public(module)} - shown
    if names:
        raise PluginError(f"Not on the site, for want of a docstring or of a page: {', '.join(sorted(names))}")


def public(module: str) -> list[str]:
    """What its `__all__` lists."""
    found = re.search(r"^__all__ = (\[.*?\])", source(module), flags=re.M | re.S)
    return ast.literal_eval(found[1]) if found else []


def source(module: str) -> str:
    path = ROOT / "collate_npu" / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")


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
    imports = [node for node in ast.parse(source(module)).body if isinstance(node, ast.ImportFrom)]
    names = [each.name for node in imports for each in node.names if each.asname == each.name]
    return [f"::: collate_npu.{module}.{name}" for name in names]


def integrations() -> list[str]:
    """Every trainer's module: the files and packages of `integrations`, less what they share."""
    shared = {"awaited", "context_parallel", "delivery", "patching", "shared_rows"}
    found = sorted(path.stem for path in (ROOT / "collate_npu" / "integrations").iterdir())
    return [f"integrations.{name}" for name in found if name not in shared and not name.startswith("__")]
