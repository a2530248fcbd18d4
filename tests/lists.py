"""Lists that are read off the code, for a type checker or a reader: `python tests/lists.py` writes them."""

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

from house import FILES, purpose_of
from torch import Tensor

import collate_npu
from collate_npu import BatchAdapter, CollateError, ContextParallel, PaddingCollator, derive_segments, wrap_collator
from collate_npu.collate import Layout
from collate_npu.consumers.mask_routing import consumers
from collate_npu.consumers.probe import sequences_mix_reason
from collate_npu.consumers.recurrent import MENDS, READS, kernel_calls
from collate_npu.kernels.gated_delta import arguments
from collate_npu.parallel import layout, recurrent
from collate_npu.testing import hybrid_model_types, tiny_model
from collate_npu.tools.cli import parsers

PACKAGE = Path(collate_npu.__file__).parent
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import page_of_stacks  # noqa: E402

NEEDED = (
    ("transformers-trainer", "qwen3_next"),
    ("transformers-trainer", "qwen3"),
    ("ms-swift-megatron", "qwen3_5"),
    ("verl-fsdp", "qwen3_next"),
    ("openrlhf", "qwen3_next"),
)
"""What README shows of the page of stacks: each says another thing."""
CHINESE = {
    "you train with": "训练方式",
    "padded right": "右填充",
    "padded left": "左填充",
    "packed": "打包",
    "refused": "报错拒绝",
}


def table() -> str:
    """The consumers in Markdown: what each is given, and behind it each refusal with the consumers that have it."""
    lines = ["| consumer | what it is given | `attention_mask_2d` | source |", "|---|---|---|---|"]
    kept = {"recurrent": "kept for recurrent layers", "always": "kept", "never": "taken out"}
    for consumer in consumers().values():
        forms = "; ".join(form.reads for form in consumer.forms)
        forms = forms if consumer.key == "attention_mask" else f"under `{consumer.key}`: {forms}"
        lines.append(f"| `{consumer.name}` | {forms} | {kept[consumer.keeps_mask_2d]} | {consumer.source} |")
    found = [(refusal.of, f"`{consumer.name}`") for consumer in consumers().values() for refusal in consumer.refuses]
    by = {of: ", ".join(name for each, name in found if each == of) for of, _ in found}
    return "\n".join([*lines, "", "| what is refused | by |", "|---|---|", *(f"| {of} | {by[of]} |" for of in by)])


def families() -> str:
    """The hybrid families in Markdown, each asked: which kernels keep the sequences of a packed row apart, or would."""
    by: dict[str, list[str]] = {}
    for name in hybrid_model_types():
        by.setdefault(asked(name), []).append(f"`{name}`")
    rows = [f"| {', '.join(names)} | {said} |" for said, names in sorted(by.items(), key=lambda each: "refused" in each[0])]
    return "\n".join(["| family | packed rows |", "|---|---|", *rows])


def asked(name: str) -> str:
    try:
        model = tiny_model(name, vocab_size=99)
    except ValueError:
        model = tiny_model(name, vocab_size=99, attn_implementation="eager")
    if why := sequences_mix_reason(model, BatchAdapter, mended=True):
        return f"refused: {re.sub(r' [(]by .*[)]', '', why)}"
    kernels = {call.kernel: READS[call.kernel] for call in kernel_calls(model) if call.kernel in MENDS}
    told = ", ".join(f"`{kernel}` by `{key}`" for kernel, key in sorted(kernels.items()))
    return f"right under `adapt`; without it where {told} read them"


def needed() -> str:
    """Some lines of the page of stacks, without what needs a GPU or two ranks."""
    rows = []
    for name, family in NEEDED:
        stack = json.loads((ROOT / "benchmarks" / "stacks" / f"{name}.json").read_text("utf-8"))
        rows.append((f"{stack['stack']}, {family}", [cell for cell in stack["cells"] if cell["family"] == family]))
    return page_of_stacks.table("you train with", rows, page_of_stacks.LAYOUTS[:3])


def options() -> str:
    """Every option of the collators, the adapter and the layouts in Markdown, as their docstrings say them."""
    named = {each.__name__: each for each in (PaddingCollator, wrap_collator, BatchAdapter, Layout, ContextParallel)}
    of = {name: options_of(each, PaddingCollator if each is wrap_collator else None) for name, each in named.items()}
    return "\n\n".join(f"## {name.replace('WrappedC', 'wrap_c')}\n\n{rows}" for name, rows in of.items())


def options_of(named: Callable[..., Any], same: Any = None) -> str:
    said = {**bullets(same or named), **bullets(named)}
    rows = [
        f"| `{name}` | {default_of(name, each)} | {said[name]} |"
        for name, each in inspect.signature(named).parameters.items()
    ]
    return "\n".join(["| option | default | what it does |", "|---|---|---|", *rows])


def bullets(named: Callable[..., Any]) -> dict[str, str]:
    """What its docstring says of each option: "* `name`, `name`: text", over lines."""
    found = re.findall(r"^\* ((?:`\w+`, )*`\w+`): (.+(?:\n  .+)*)", inspect.getdoc(named), flags=re.M)
    return {name: re.sub(r"\s+", " ", text) for names, text in found for name in re.findall(r"\w+", names)}


def command(name: str) -> str:
    """The options of one of our commands in Markdown, as its `--help` says them."""
    lines = ["| option | default | what it takes |", "|---|---|---|"]
    for action in parsers()[1][name]._actions:
        if action.option_strings and action.dest != "help":
            names = ", ".join(f"`{each}`" for each in action.option_strings if each.startswith("--"))
            default = "" if action.default is None or action.default is False else f"`{action.default}`"
            lines.append(f"| {names} | {default} | {action.help.partition(' [default: ')[0].replace('%%', '%')} |")
    return "\n".join(lines)


def drawn(module: ModuleType) -> str:
    """The first picture of a module's own words, or its table."""
    said = f"{inspect.getdoc(module)}\n"
    if rows := re.findall(r"^\|.*\|$", said, flags=re.M):
        return "\n".join(rows)
    picture = re.search(r"^    .*\n(?:(?:    .*)?\n)*", said, flags=re.M)[0]
    return f"```text\n{textwrap.dedent(picture).strip()}\n```"


SHOWN = {("keys", "<factory>"): "KEYS", ("layout", "<factory>"): "Layout()", ("max_mask_bytes", "4294967296"): "4 << 30"}


def default_of(name: str, each: inspect.Parameter) -> str:
    shown = repr(each.default)
    return "required" if each.default is each.empty else f"`{SHOWN.get((name, shown), shown)}`"


def given() -> str:
    """What becomes of `attention_mask` in Markdown: three batches, for each consumer of a hybrid model and another."""
    rows = [[1, 2, 3], [4, 5, 6, 7, 8]]
    features = {"right": rows, "left": rows, "packed": [[1, 2, 3, 4, 5]]}
    batches = {}
    for name, ids in features.items():
        collator = PaddingCollator(pad_token_id=0, padding_side="left" if name == "left" else "right", attention_mask="2d")
        lengths = {"seq_lengths": [3, 2]} if name == "packed" else {}
        batches[name] = collator([{"input_ids": each, **lengths} for each in ids])
    lines = [f"| model | consumer | {' | '.join(batches)} |", "|---|---|---|---|---|"]
    for model_type in ("qwen3_next", "qwen3"):
        for consumer in STACKS:
            cells = " | ".join(reads(consumer, batch, model_type) for batch in batches.values())
            lines.append(f"| `{model_type}` | `{consumer}` | {cells} |")
    return "\n".join(lines)


STACKS = ("transformers", "megatron", "transformer_engine", "mindspeed", "mindspeed_dense", "verl", "torchtitan")


def reads(consumer: str, batch: dict, model_type: str) -> str:
    try:
        batch = BatchAdapter(model_type=model_type, consumer=consumer)(batch)
    except CollateError:
        return "refused"
    found = batch.get("attention_mask", batch.get("attention_masks"))
    if found is None:
        return "None"
    return f"{found.dtype} {list(found.shape)}"[6:] if isinstance(found, Tensor) else type(found).__name__


SPEED = ("collate", "dense", "derive", "parallel", "neutral")
TOLD = re.compile(r"4x512$|32x4096(, left|, flat row)?$|64x32768|4x4096|cp 8|8x4096, ")
"""Cases of the page; the others are in the file alone."""


def measured(name: str = "results") -> list[dict]:
    """The rows of the bench's last whole run, or of its last one of `limits`: growth and long."""
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text("utf-8"))["rows"]


def growth_table(rows: list[dict]) -> str:
    """A line a function: the exponents of its time, and the most memory on any axis, by what goes in and out."""
    lines = ["| what | time by rows | by width | by tokens | memory by rows | by width | by tokens | times in and out |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    of_growth = [(row["case"].split(": "), row) for row in rows if row["group"] == "growth"]
    for what, found in groupby(of_growth, key=lambda each: each[0][0]):
        same = {(axis, row["theirs"] is None): row for (_, axis), row in found}
        cells = [same.get((axis, memory)) for memory in (False, True) for axis in ("rows", "width", "tokens")]
        most = max(row["facts"][0]["times"] for row in same.values())
        shown = ("" if row is None else f"{row['ratio']:.2f}" for row in cells)
        lines.append(f"| `{what.replace(',', '`,', 1)}{'`' * (',' not in what)} | {' | '.join(shown)} | {most:.1f} |")
    return "\n".join(lines)


def long_table(rows: list[dict]) -> str:
    """A line a thing that was measured behind all batches."""
    found = [row for row in rows if row["group"] == "long"]
    lines = [f"| behind {found[0]['case']} | found | at most |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {row['name']} | {row['ratio']:.4g} | {row['target']:g} |" for row in found)])


def speed_table(rows: list[dict]) -> str:
    """A line a case: ours, and how many times faster it is than the fastest and the slowest peer."""
    lines = ["| what | case | ours, ms | peers | times faster |", "|---|---|---|---|---|"]
    peers = [row for row in rows if row["against"] == "peer" and row["group"] in SPEED and TOLD.search(row["case"])]
    for (group, case), found in groupby(peers, key=lambda row: (row["group"], row["case"])):
        same = list(found)
        ratios = [row["ratio"] for row in same]
        times = f"{min(ratios):.1f} to {max(ratios):.1f}" if len(ratios) > 1 else f"{ratios[0]:.1f}"
        lines.append(f"| {group} | {case} | {same[0]['ours'] * 1e3:.3g} | {len(ratios)} | {times} |")
    return "\n".join(lines)


def step_table(rows: list[dict]) -> str:
    """A line a way to train on the same rows."""
    lines = ["| a step of | way | tokens a second | times as long | padding | sent, MB | memory, MB |", "|" + "---|" * 7]
    of_steps = [row for row in rows if row["group"] == "step"]
    for case, found in groupby(of_steps, key=lambda row: row["case"]):
        same, name = list(found), case.removesuffix(", cpu")
        ways = [("ours, `adapt(model)`", same[0]["ours"], 1.0, same[0]["facts"][0], same[0]["made"][0])]
        ways += [(row["name"], row["theirs"], row["ratio"], row["facts"][1], row["made"][1]) for row in same]
        for way, seconds, ratio, facts, made in ways:
            speed, memory = facts["tokens"] / seconds, facts["peak"] / 1e6
            padding = f"{facts['padding']:.0%}" if "padding" in facts else "–"
            lines.append(f"| {name} | {way} | {speed:,.0f} | {ratio:.2f} | {padding} | {made / 1e6:.2f} | {memory:.0f} |")
    return "\n".join(lines)


def glossary() -> str:
    """Each file of the package, and its first sentence."""
    files = {path.relative_to(PACKAGE).with_suffix(""): purpose_of(path) for path in FILES if path.name != "__init__.py"}
    rows = [f"| `{name}` | {purpose.replace('|', chr(92) + '|')} |" for name, purpose in files.items()]
    return "\n".join(["| file | what it is |", "|---|---|", *rows])


def between(page: str, **made: str) -> dict[Path, str]:
    """A page of the guide, or README, with what is made between the two comments of each name."""
    path = ROOT / page if page == "README.md" else PACKAGE / "guide" / f"{page}.md"
    text = path.read_text("utf-8")
    for name, lines in made.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, after = text.partition(start)[0], text.partition(end)[2]
        text = f"{before}{start}\n{lines}\n{end}{after}"
    return {path: text}


def written() -> dict[Path, str]:
    """Each file that holds a list, as it should be."""
    code = PACKAGE / "consumers" / "mask_routing.py"
    names = textwrap.fill(", ".join(f'"{name}"' for name in sorted(consumers())) + ",", 121)
    literal = "ConsumerName = Literal[\n" + textwrap.indent(names, "    ") + "\n]  # fmt: skip\n"
    return {
        **between("README.md", need=needed()),
        **between("zh/index", need=re.sub("|".join(CHINESE), lambda found: CHINESE[found[0]], needed())),
        code: re.sub(r"ConsumerName = Literal\[\n.*?\]  # fmt: skip\n", literal, code.read_text("utf-8"), flags=re.S),
        **between("contributing", files=glossary()),
        **between("kernels", families=families(), spellings=drawn(arguments), options=command("kernels")),
        **between("context-parallel", layouts=drawn(layout), schemes=drawn(recurrent)),
        **between("options", options=options()),
        **between("speed", step=step_table(measured()), speed=speed_table(measured())),
        **between("limits", growth=growth_table(measured("limits")), long=long_table(measured("limits"))),
        **between("masks", given=given(), derive=options_of(derive_segments), consumers=table()),
        **between("checks", watch=command("watch"), conformance=command("conformance")),
        **between("audit", options=command("audit")),
        **between("show", options=command("show")),
    }


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
