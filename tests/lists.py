"""Lists that are read off the code, for a type checker or a reader: `python tests/lists.py` writes them."""

import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from house import FILES, PACKAGE, ROOT, purpose_of
from torch import Tensor

from collate_npu import BatchAdapter, CollateError, ContextParallel, PaddingCollator, derive_segments, wrap_collator
from collate_npu.consumers.mask_choice import consumers
from collate_npu.consumers.mixers import way_of
from collate_npu.kernels import gated_delta
from collate_npu.parallel import layout
from collate_npu.testing import hybrid_model_types, tiny_model
from collate_npu.tools.cli import parsers
from collate_npu.tools.need import Step, Trained

sys.path.append(str(ROOT))

from benchmarks import figures

CHINESE = {
    "you train with": "你的训练方式",
    "without it": "不用",
    "with it": "使用",
    "add this line": "加这一行",
    "speed": "速度",
    "nothing; faster:": "不用加；更快：",
    "nothing": "不用加",
    "padded right": "右填充",
    "padded left": "左填充",
    "labels": "（标签）",
    "refused": "拒绝",
    "wrong": "错误",
    "right": "正确",
}
"""In this order: the later ones are parts of the earlier ones."""


def table() -> str:
    """The consumers in Markdown: what each is given, and behind it each refusal with the consumers that have it."""
    lines = ["| stack | what it is given | `attention_mask_2d` | source |", "|---|---|---|---|"]
    kept = {"recurrent": "kept for recurrent layers", "always": "kept", "never": "taken out"}
    for consumer in consumers().values():
        forms = "; ".join(form.reads for form in consumer.forms)
        forms = forms if consumer.key == "attention_mask" else f"under `{consumer.key}`: {forms}"
        lines.append(f"| `{consumer.name}` | {forms} | {kept[consumer.keeps_mask_2d]} | {consumer.source} |")
    found = [(refusal.of, f"`{consumer.name}`") for consumer in consumers().values() for refusal in consumer.refuses]
    by = {of: ", ".join(name for each, name in found if each == of) for of, _ in found}
    return "\n".join([*lines, "", "| what is refused | by |", "|---|---|", *(f"| {of} | {by[of]} |" for of in by)])


def families() -> str:
    """The hybrid families in Markdown, each asked which way it goes with `adapt`."""
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
    way = way_of(model)
    return "refused: the padded way" if way.why_padded else "right with `adapt`, sequence by sequence"


def needed() -> str:
    """What `collate-npu need --json` measured, the rows of ms-swift beside the releases it takes."""
    rows = figures.measured("need") + [row for row in figures.measured("need_swift") if row["by"].startswith("ms-swift")]
    titles = "| you train with | Qwen3-Next without it | Qwen3 without it | with it | add this line | speed |"
    lines = [titles, "|---" * 6 + "|"]
    for row, dense in zip(rows[::2], rows[1::2]):
        assert {row["model"], dense["model"]} == {"qwen3_next", "qwen3"}
        (_, by, plain, ours, line, fast), (*_, other, same, _, faster) = map(cells_of, (row, dense))
        assert ours == same
        marked = line.replace(row["line"], f"`{row['line']}`")
        lines.append(f"| {by} | {bold(plain)} | {bold(other)} | {ours} | {marked} | {fast}, {faster} |")
    return "\n".join(lines)


def cells_of(row: dict) -> list[str]:
    return Trained(**{**row, "plain": Step(**row["plain"]), "ours": Step(**row["ours"])}).cells()


def bold(word: str) -> str:
    return f"**{word}**" if word.startswith("wrong") else word


def in_chinese(text: str) -> str:
    return re.sub("|".join(map(re.escape, CHINESE)), lambda found: CHINESE[found[0]], text)


def options() -> str:
    """Every option of the collators, the adapter and the ranks in Markdown, as their docstrings say them."""
    named = {each.__name__: each for each in (PaddingCollator, wrap_collator, BatchAdapter, ContextParallel)}
    of = {name: options_of(each, PaddingCollator if each is wrap_collator else None) for name, each in named.items()}
    return "\n\n".join(f"## {name.replace('WrappedC', 'wrap_c')}\n\n{rows}" for name, rows in of.items())


def options_of(named: Callable[..., Any], same: Any = None) -> str:
    said = {**bullets(same or named), **bullets(named)}
    taken = inspect.signature(named).parameters.items()
    rows = [f"| `{name}` | {default_of(name, each)} | {said[name]} |" for name, each in taken]
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
            default = "" if action.default in (None, False, []) else f"`{action.default}`"
            lines.append(f"| {names} | {default} | {action.help.partition(' [default: ')[0].replace('%%', '%')} |")
    return "\n".join(lines)


def drawn(documented: Any) -> str:
    """The first picture of a docstring, or its table."""
    said = f"{inspect.getdoc(documented)}\n"
    if rows := re.findall(r"^\|.*\|$", said, flags=re.M):
        return "\n".join(rows)
    picture = re.search(r"^    .*\n(?:(?:    .*)?\n)*", said, flags=re.M)[0]
    return f"```text\n{textwrap.dedent(picture).strip()}\n```"


SHOWN = {("max_mask_bytes", "4294967296"): "4 << 30"}


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
    lines = [f"| model | stack | {' | '.join(batches)} |", "|---|---|---|---|---|"]
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
    kind = type(found).__name__.removesuffix("Type")  # of None
    return f"{found.dtype} {list(found.shape)}"[6:] if isinstance(found, Tensor) else kind


def glossary() -> str:
    """Each file of the package, and its first sentence."""
    files = {path.relative_to(PACKAGE).with_suffix(""): purpose_of(path) for path in FILES if path.name != "__init__.py"}
    rows = [f"| `{name}` | {purpose.replace('|', chr(92) + '|')} |" for name, purpose in files.items()]
    return "\n".join(["| file | what it is |", "|---|---|", *rows])


def written() -> dict[Path, str]:
    """Each file that holds a list, as it should be."""
    code = PACKAGE / "consumers" / "mask_choice.py"
    names = textwrap.fill(", ".join(f'"{name}"' for name in sorted(consumers())) + ",", 121)
    literal = "ConsumerName = Literal[\n" + textwrap.indent(names, "    ") + "\n]  # fmt: skip\n"
    return {
        **figures.between("README.md", need=needed(), **figures.readme()),
        **figures.between("zh/index", need=in_chinese(needed()), **figures.chinese()),
        code: re.sub(r"ConsumerName = Literal\[\n.*?\]  # fmt: skip\n", literal, code.read_text("utf-8"), flags=re.S),
        **figures.between("contributing", files=glossary()),
        **figures.between("kernels", families=families(), spellings=drawn(gated_delta)),
        **figures.between("context-parallel", layouts=drawn(layout)),
        **figures.between("options", options=options()),
        **figures.between("speed", step=figures.step_table(), speed=figures.speed_table()),
        **figures.between("planned-batches", planned=figures.planned_table()),
        **figures.between("promises", growth=figures.growth(), nights=figures.nights()),
        **figures.between("install", elsewhere=figures.elsewhere_table(), ran=figures.releases_run()),
        **figures.between("masks", given=given(), derive=options_of(derive_segments), consumers=table()),
        **figures.between("checks", watch=command("watch"), conformance=command("conformance")),
        **figures.between("audit", options=command("audit")),
        **figures.between("show", options=command("show")),
        **figures.between("stacks", need=command("need")),
    }


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
