"""Hooks of the site: README as the home, the menu from the guide's index.md, the API by job, drawn masks, coloured verdicts.

Nothing here imports torch: `import collate_npu` loads nothing, and mkdocstrings reads the source.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from html import escape, unescape
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / ".ci")]

from notebooks import printed  # noqa: E402

import collate_npu  # noqa: E402

JOBS = {
    "Collate a batch": (
        "From samples to a padded batch, or to a packed row.",
        "PaddingCollator collate.wrap_collator collate.wrapping.WrappedCollator",
    ),
    "Plan batches": (
        "Which samples stand together, and what each batch weighs in a step.",
        "collate.BalancedBatchSampler collate.lengths_of collate.loss_weights",
    ),
    "Adapt a model or a batch": (
        "Give each layer the mask that it reads.",
        "adapt integrations.adapt.Adapted BatchAdapter needs_mask_2d",
    ),
    "Read and draw masks": (
        "Find out which tokens are real, and build a mask in the form you need.",
        "Segments describe derive_segments masks.segments_from_batch masks.none_is_exact masks.Verdict Pattern masks.dense "
        "masks.block_mask masks.mask_mod masks.varlen",
    ),
    "The way back": (
        "From a padded output to real tokens, and labels that cross no boundary.",
        "unpad repad last_token outputs.per_sequence outputs.to_nested outputs.shift_labels outputs.ignore_first_labels",
    ),
    "Ranks that share rows": (
        "Context parallelism: split a batch between ranks, and gather the output.",
        "ContextParallel split_batch gather_sequence parallel.split_tensor "
        "parallel.token_runs parallel.query_rows parallel.pad_documents parallel.cu_seqlens_of "
        "parallel.check_recurrent_split parallel.ranks_agree "
        "parallel.data_group parallel.gloo_group",
    ),
    "Kernel arguments": (
        "What the operators of an Ascend card and recurrent kernels are called with.",
        "kernels.fusion_attention kernels.gated_delta",
    ),
    "Check a run": (
        "Compare what each layer received with what the batch says.",
        "check_delivery guard_first_batch proof.delivery.Delivery proof.delivery.Alone "
        "proof.watch proof.Watch proof.delivery.watch proof.delivery.Watch",
    ),
    "Trainers: transformers": (
        "The Trainer, TRL, Accelerate and torchtitan.",
        "integrations.transformers integrations.accelerate integrations.torchtitan",
    ),
    "Trainers: Megatron": (
        "Megatron-core, MindSpeed, ms-swift and twinkle.",
        "integrations.megatron integrations.swift integrations.twinkle",
    ),
    "Trainers: RL": ("verl.", "integrations.verl"),
    "Errors": ("What is raised, and what a message holds.", "errors"),
    "For tests": ("Tiny models, to test a collator or a stack of your own.", "testing"),
    "Extend": ("Keys of a batch, and readers of a mask, that the package does not know.", "keys consumers.mask_choice"),
}
"""Title of a page: what it is for, and its names in the order a reader needs them; the name of a module shows all of it."""

SHARED = {"adapt", "every_model", "patching"}
"""Modules of `integrations` that are not of one trainer."""

MODULES = ["collate", "masks", "outputs", "parallel", "proof", "proof.delivery"]
"""All public names of these stand on a page, beside those of `collate_npu`, every trainer and each module of JOBS."""


# --- the menu and the pages


def as_markdown(path: Path) -> str:
    """Return a notebook as Markdown: text as it is, code and its output as blocks."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source, output = "".join(cell["source"]), printed(cell)
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [f"```text\n{output}\n```"] * bool(output)
    return "\n\n".join(parts) + "\n"


def on_config(config: Any) -> Any:
    """The menu: the sections and links of index.md, in their order, then the API."""
    menu: list[dict[str, Any]] = [{"Home": "index.md"}, {"Guide": "guide.md"}]
    for line in Path(config.docs_dir, "index.md").read_text(encoding="utf-8").splitlines():
        if title := re.match(r"## (.+)", line):
            menu.append({title[1]: []})
        elif link := re.match(r"\* \[([^\]]+)\]\((\S+)\.(?:md|ipynb)\)", line):
            next(iter(menu[-1].values())).append({link[1]: f"{link[2]}.md"})
    menu = [each for each in menu if all(each.values())]  # a section of scripts has no page
    config.nav = [*menu, {"API": ["api/index.md", *({job: path_of(job)} for job in JOBS)]}]
    return config


def on_files(files: Files, config: Any) -> Files:
    made = {"api/index.md": overview(), **{path_of(job): page_of(job) for job in JOBS}}
    guide = files.src_uris["index.md"]
    files.remove(guide)
    made["guide.md"] = guide.content_string
    made["index.md"] = (ROOT / "README.md").read_text(encoding="utf-8").replace("](collate_npu/guide/", "](")
    made |= {path.name: path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("site.*s")}  # css and js
    for path in Path(config.docs_dir).glob("*.ipynb"):  # beside the file itself, which is there to be run
        made[f"{path.stem}.md"] = f"{as_markdown(path)}\n<a href='{path.name}' download>This page as a notebook</a>\n"
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def path_of(job: str) -> str:
    return f"api/{re.sub(r'[^a-z]+', '-', job.lower())}.md"


def page_of(job: str) -> str:
    purpose, names = JOBS[job]
    return "\n\n".join([f"# {job}", purpose, *map(shown, names.split())])


def shown(name: str) -> str:
    """One name, or a module with what it hands on by `import name as name`, which mkdocstrings leaves out."""
    if not source(name):
        return f"::: collate_npu.{name}"
    names = handed_on(name)
    return "\n\n".join(
        [f"## {name} {{ .module }}", f"::: collate_npu.{name}\n    options: {{heading_level: 2, show_root_heading: false}}"]
        + [f"::: collate_npu.{name}.{each}\n    options: {{heading_level: 3}}" for each in names]
    )


def overview() -> str:
    """Every job with its names, each a link."""
    rows = [f"| [{job}]({Path(path_of(job)).name}) | {purpose} {links(job)} |" for job, (purpose, _) in JOBS.items()]
    return "\n".join(["# API by job", "", "| job | names |", "|---|---|", *rows])


def links(job: str) -> str:
    return " ".join(f"[`{name.split('.')[-1]}`][collate_npu.{name}]" for name in JOBS[job][1].split())


def source(module: str) -> str:
    """The text of a module of the package; "" for any other name."""
    path = ROOT / "collate_npu" / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return path.read_text(encoding="utf-8") if path.exists() else ""


def handed_on(module: str) -> list[str]:
    imports = [node for node in ast.parse(source(module)).body if isinstance(node, ast.ImportFrom)]
    return [each.name for node in imports for each in node.names if each.asname == each.name]


# --- what stands on a page


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links to a notebook and to the guide's index.md lead to their pages; on a first page, lists of links are cards."""
    here = page.file.src_uri
    if here in ("index.md", "guide.md"):
        page.meta["hide"] = ["navigation"]  # of one page
    if here in ("guide.md", "zh/index.md"):
        markdown = re.sub(r"(?:^\* \[.*\n)+", r"<div class='grid cards' markdown>\n\n\g<0>\n</div>\n", markdown, flags=re.M)
    up = "../" * here.count("/")
    return markdown.replace(f"]({up}index.md", f"]({up}guide.md").replace(".ipynb)", ".md)")


def on_page_content(html: str, **_: Any) -> str:
    """Draws masks, and colours verdicts; `::` of a docstring, before a block, is `:` as in Markdown."""
    html = VERDICT.sub(lambda cell: f'<td class="{VERDICTS[cell[1]]}">', html)
    block = r'<div class="(?:language-text )?highlight"><pre><span></span><code>(.*?)</code></pre></div>'
    return re.sub(block, drawn, html.replace("::</p>", ":</p>"), flags=re.S)


VERDICTS = {"right": "right", "正确": "right", "refused": "refused", "拒绝": "refused", "wrong": "wrong", "错误": "wrong"}
VERDICT = re.compile(rf"<td>(?=(?:<strong>)?(?:[^<]* → )?({'|'.join(VERDICTS)})(?:: [\d.][^<]*)?(?:</strong>)?</td>)")
"""A cell that says what happens; behind an arrow stands what happens with us."""


def drawn(block: re.Match[str]) -> str:
    """A block of text as a picture, if it holds `■`, `⬚` or a row of digits; every character keeps its column."""
    lines = unescape(re.sub(r"<[^>]+>", "", block[1])).rstrip("\n").split("\n")
    if not any(PICTURE.search(line) for line in lines):
        return block[0]
    parts = [mark(y, found) for y, line in enumerate(lines) for found in TOKENS.finditer(line)]
    width, height = max(map(len, lines)) * 9 + 9, len(lines) * 18 + 1
    words = escape(" / ".join(filter(None, (line.translate(SPOKEN).strip() for line in lines))), quote=True)
    size = f"viewBox='0 0 {width} {height}' width='{width}' height='{height}'"
    kind = "wide" if width > 400 else "small"  # a small one shrinks to fit a phone, a wide one scrolls
    return f'<div class="picture"><svg role="img" class="{kind}" aria-label="{words}" {size}>{"".join(parts)}</svg></div>'


PICTURE = re.compile(r"[■⬚]|(?<!\S)\d(?: \d){3,}(?! ?\S)")
"""Squares; or a row of digits, the numbers of sequences."""
TOKENS = re.compile(rf"{PICTURE.pattern}|(?:(?!{PICTURE.pattern})\S)+(?: (?:(?!{PICTURE.pattern})\S)+)*")
SPOKEN = str.maketrans({"■": "1", "⬚": "0"})


def mark(y: int, found: re.Match[str]) -> str:
    """Squares of one place, digits of a packed row as squares in the colour of their sequence, and words."""
    text, x = found[0], found.start() * 9
    if text in "■⬚":
        return square(x, y, "real" if text == "■" else "pad")
    if PICTURE.fullmatch(text):
        each = enumerate(text.split())
        return "".join(square(x + 18 * n, y, f"n{(int(d) - 1) % 4}" if d != "0" else "pad", d) for n, d in each)
    return f"<text x='{x}' y='{y * 18 + 13}'>{escape(text)}</text>"


def square(x: float, y: int, kind: str, digit: str = "") -> str:
    rect = f"<rect class='{kind}' x='{x}' y='{y * 18 + 1}' width='16' height='16' rx='2'/>"
    return rect + (f"<text class='digit' x='{x + 8}' y='{y * 18 + 13}'>{digit}</text>" if digit else "")


# --- what must hold


def on_post_build(config: Any) -> None:
    """Every public name stands on a page, every mask is drawn, and verdicts have colours: else the build fails."""
    pages = {path: path.read_text(encoding="utf-8") for path in Path(config.site_dir).rglob("*.html")}
    shown = set(re.findall(r'id="collate_npu\.([\w.]+)"', "".join(pages.values())))
    last = {each.split(".")[-1] for each in shown}
    names = set(collate_npu.__all__) - last
    modules = {*MODULES, *trainers(), *(name for _, names in JOBS.values() for name in names.split() if source(name))}
    names |= {f"{module}.{name}" for module in modules for name in public(module) if name not in collate_npu.__all__} - shown
    if names:
        raise PluginError(f"Not on the site, for want of a docstring or of a line in JOBS: {', '.join(sorted(names))}")
    plain = [path.name for path, text in pages.items() if re.search(r"<pre>(?:(?!</pre>).)*[■⬚] [■⬚]", text, flags=re.S)]
    if plain or "<svg role" not in pages[Path(config.site_dir, "masks.html")]:
        raise PluginError(f"Masks that are not drawn: fence them as text. {plain or 'masks.html'}")
    if '<td class="right">' not in pages[Path(config.site_dir, "index.html")]:
        raise PluginError("No verdict of README's table has a colour: see VERDICT.")


def trainers() -> list[str]:
    """Every trainer's module: the files and packages of `integrations`, less what they share."""
    found = sorted(path.stem for path in (ROOT / "collate_npu" / "integrations").iterdir())
    return [f"integrations.{name}" for name in found if name not in SHARED and not name.startswith("__")]


def public(module: str) -> list[str]:
    """The functions and classes of a module that its `__all__` lists; without one, those that it defines or hands on."""
    tree = ast.parse(source(module)).body
    if found := re.search(r"^__all__ = (\[.*?\])", source(module), flags=re.M | re.S):
        return [name for name in ast.literal_eval(found[1]) if not name.isupper()]
    defined = [node.name for node in tree if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return [name for name in defined if not name.startswith("_")] + handed_on(module)
