"""Lists that are read off the code, for a type checker or a reader: `python tests/lists.py` writes them."""

import re
import textwrap
from pathlib import Path

import collate_npu
from collate_npu.consumers.consumer import consumers
from collate_npu.consumers.families import READ_BY, RUNS_ON

PACKAGE = Path(collate_npu.__file__).parent


def table() -> str:
    """The consumers in Markdown: what each is given, and what is refused."""
    lines = ["| consumer | what it is given | `attention_mask_2d` | what is refused | source |", "|---|---|---|---|---|"]
    kept = {"recurrent": "kept for recurrent layers", "always": "kept", "never": "taken out"}
    for consumer in consumers().values():
        forms = "; ".join(form.reads for form in consumer.forms)
        forms = forms if consumer.key == "attention_mask" else f"under `{consumer.key}`: {forms}"
        refused = "; ".join(refusal.of for refusal in consumer.refuses) or "nothing"
        cells = (f"`{consumer.name}`", forms, kept[consumer.keeps_mask_2d], refused, consumer.source)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def families() -> str:
    """The hybrid families in Markdown: which kernels keep the sequences of a flat row apart, or where its state runs on."""
    by: dict[str, list[str]] = {}
    for name, kernels in READ_BY.items():
        by.setdefault(re.sub(r"\b(\w*_\w+)", r"`\1`", kernels), []).append(f"`{name}`")
    rows = [f"| {', '.join(names)} | right, told {kernels} |" for kernels, names in by.items()]
    why: dict[str, list[str]] = {}
    for name, reason in RUNS_ON.items():
        why.setdefault(reason, []).append(f"`{name}`")
    rows += [f"| {', '.join(names)} | refused: {reason} |" for reason, names in why.items()]
    return "\n".join(["| family | flat row of several sequences |", "|---|---|", *rows])


def written() -> dict[Path, str]:
    """Each file that holds a list, as it should be."""
    code, page = PACKAGE / "consumers" / "consumer.py", PACKAGE / "guide" / "consumers.md"
    names = textwrap.fill(", ".join(f'"{name}"' for name in sorted(consumers())) + ",", 121)
    literal = "ConsumerName = Literal[\n" + textwrap.indent(names, "    ") + "\n]  # fmt: skip\n"
    kernels = PACKAGE / "guide" / "gated-delta-net.md"
    packed = f"<!-- families -->\n{families()}\n<!-- /families -->"
    rows = f"<!-- consumers -->\n{table()}\n<!-- /consumers -->"
    return {
        code: re.sub(r"ConsumerName = Literal\[\n.*?\]  # fmt: skip\n", literal, code.read_text("utf-8"), flags=re.S),
        page: re.sub(r"<!-- consumers -->.*<!-- /consumers -->", lambda _: rows, page.read_text("utf-8"), flags=re.S),
        kernels: re.sub(r"<!-- families -->.*<!-- /families -->", lambda _: packed, kernels.read_text("utf-8"), flags=re.S),
    }


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
