"""Refusals: their texts are part of the interface. Key and row, what arrived, the rule, and a remedy that works.

What a user does wrong, the words that meet it, and the call that the words ask for (law 12). Remedies of whole batches, by
every door: integration/test_remedies; every bad value at every entry: test_bad_input.
"""

import ast
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from house import FILES, PACKAGE, module_of, room_of, tree_of
from rotation import SEED

import collate_npu
from collate_npu import BatchAdapter, CollateError, Segments, last_token, needs_mask_2d, split_batch, wrap_collator
from collate_npu.errors import explain, explain_rows, shape_of, short
from collate_npu.keys import KEYS, SAMPLE, TOKENS
from collate_npu.masks import dense
from collate_npu.tools.guide import read_page

pytestmark = [pytest.mark.usefixtures("newest_transformers"), pytest.mark.filterwarnings("ignore:collate_npu")]
DENSE, CP = SimpleNamespace(layer_types=["full_attention"]), collate_npu.ContextParallel(2, 0)
HYBRID = SimpleNamespace(layer_types=["linear_attention", "full_attention"])
RIGHT, FLAT, EVEN = Segments.from_lengths([3, 5]), Segments.from_lengths([[3, 5]]), Segments.from_lengths([3, 5], 8)
LEFT, PACKED = Segments.from_lengths([3, 5], side="left"), Segments([[1, 1, 2, 2], [1, 1, 2, 2]])
FEATURES, TWO_EQUAL = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}], [{"input_ids": [1]}] * 2
THREE_FIVE = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6, 7, 8]}]
UNLISTED = [{"input_ids": [1, 2], "x": [0.5, 1.0]}, {"input_ids": [1], "x": [2.0]}]
IMAGES = {"input_ids": [1, 2], "pixel_values": torch.ones(1, 4)}
AXES = IMAGES | {"position_ids": np.zeros((3, 2), int)}
SOME_ROWS = torch.tensor([True, False, True, False, False])


def said(cause) -> Exception:
    with pytest.raises(ValueError) as raised:
        cause()
    return raised.value


def batch_of(segments, **keys):
    B, S = segments.shape
    return {"input_ids": torch.arange(B * S).view(B, S), **keys}


ODD = batch_of(EVEN, attention_mask_2d=EVEN.keep, x=torch.zeros(3, 8))


def collate(features=FEATURES, pad_token_id=0, **settings):
    return collate_npu.PaddingCollator(pad_token_id=pad_token_id, **settings)(features)


def wrapped(segments, **settings):
    """As TRL's collator for KTO, whose second rows are of other lengths; or packed rows with a key of one's own."""
    beside = {"mine": torch.ones(2, 4)} if segments.packed else {"KL_input_ids": torch.ones(2, 9)}
    return wrap_collator(lambda _: batch_of(segments, attention_mask=segments.ids, **beside), **settings)(FEATURES)


def flat(consumer):
    batch = batch_of(FLAT, cu_seq_lens_q=FLAT.cu_seqlens)
    return BatchAdapter(DENSE, consumer=consumer, padding_free=True)(batch)


def ids(*rows):
    return [{"input_ids": row} for row in rows]


PACKING = [(TWO_EQUAL, beside) for beside in ({"padding_free": True}, {"padding": False})]
"""Samples and settings that go together without packing alone."""
FOLLOWED = [
    # the cause, words of the remedy, the same call as the remedy says, and what must be true of its answer
    *(
        (partial(collate, rows, packing=True, **beside), "Leave packing out.", partial(collate, rows, **beside))
        for rows, beside in PACKING
    ),
    (
        lambda: collate(UNLISTED),
        "keys={**KEYS, 'x': TOKENS} (from collate_npu.keys), or SAMPLE",
        lambda: [list(collate(UNLISTED, keys={**KEYS, "x": kind})["x"][1]) for kind in (TOKENS, SAMPLE)] == [[2, 0], [2]],
    ),
    (
        lambda: collate([IMAGES], padding_free=True),
        "Set padding_free=False. With a get_rope_index, the model can make position_ids [3, L] of each sample",
        lambda: (
            "position_ids" not in collate([IMAGES]) and collate([AXES], padding_free=True)["position_ids"].shape == (3, 1, 2)
        ),
    ),
    (lambda: collate(max_length=2), "Truncate when tokenising", lambda: collate(ids([1, 2], [4]), max_length=2)),
    (
        partial(wrapped, PACKED, padding_free=True),
        "keys={**KEYS, 'mine': TOKENS} (from collate_npu.keys), or SAMPLE",
        lambda: wrapped(PACKED, padding_free=True, keys={**KEYS, "mine": TOKENS})["mine"].shape == (1, 8),
    ),
    (
        partial(wrapped, LEFT, consumer="transformers", model=DENSE),
        "Pad right; or do not wrap this collator",
        lambda: "position_ids" not in wrapped(RIGHT, consumer="transformers", model=DENSE),
    ),
    (lambda: flat("vllm"), "Name one of them", lambda: flat("verl")["attention_mask"] is None),
    (lambda: needs_mask_2d(torch.nn.Linear(1, 1)), "Pass the config itself", lambda: needs_mask_2d(HYBRID)),
    (
        lambda: dense(RIGHT, rows=SOME_ROWS),
        "pass rows.nonzero()[:, 0]",
        lambda: torch.equal(dense(RIGHT, rows=SOME_ROWS.nonzero()[:, 0]), dense(RIGHT)[:, :, [0, 2]]),
    ),
    (
        lambda: last_token(torch.ones(2, 3), Segments.from_lengths([0, 3])),
        "Drop those rows",
        lambda: last_token(torch.arange(3)[None], Segments.from_lengths([3])).tolist() == [2],
    ),
    (
        lambda: split_batch(ODD, CP),
        "Split it with split_tensor(x, cp, dim=...), or pass BatchAdapter(keys={**KEYS, 'x': SAMPLE})",
        lambda: (
            BatchAdapter(HYBRID, consumer="megatron", context_parallel=CP, keys={**KEYS, "x": SAMPLE})(ODD)["x"] is ODD["x"]
        ),
    ),
]


@pytest.mark.parametrize(("cause", "words", "follow"), FOLLOWED)
def test_the_remedy_of_a_refusal_works(cause, words, follow):
    refusal = said(cause)
    assert isinstance(refusal, CollateError)
    assert words in str(refusal)
    assert follow()


SQUARE, NEITHER = (2, 1, 5, 5), {"padding_side": "left", "attention_mask": "none"}
FREE, WIDEST = {"padding_free": True}, {"padding_free": True, "padding": "max_length"}
FLAT_4D = {"padding_free": True, "attention_mask": "4d"}
ROWS = [
    (FREE | {"max_length": 4}, "max_length is 4", FREE | {"max_length": 8}, (1, 8), None),
    (FREE | {"padding": (4, 6)}, "or put fewer samples in a flat row", FREE | {"padding": (4, 8)}, (1, 8), None),
    (WIDEST | {"max_length": 6}, "(or max_length)", WIDEST | {"max_length": 8}, (1, 8), None),
    ({"pad_token_id": None}, "or pass pad_token_id=", {}, (2, 5), None),
    (FLAT_4D, "Leave it at 'auto'", FREE, (1, 8), None),
    (FLAT_4D, "or set padding_free=False", {"attention_mask": "4d"}, (2, 5), SQUARE),
    (NEITHER, "Use 'auto'", {"padding_side": "left"}, (2, 5), SQUARE),
    (NEITHER, "or pad right", {"attention_mask": "none"}, (2, 5), None),
    ({"model": DENSE}, "Pass consumer=", {"model": DENSE, "consumer": "transformers"}, (2, 5), (2, 5)),
    ({"padding": (2, 4)}, "Raise the widths", {"padding": (2, 6)}, (2, 6), None),
]
"""The same for rows of 3 and 5 tokens, and the shapes of the ids and of the mask; None: there is none."""


@pytest.mark.parametrize(("wrong", "words", "right", "shape", "masked"), ROWS)
def test_what_rows_ask_for_makes_them(wrong, words, right, shape, masked):
    assert words in str(said(lambda: collate(THREE_FIVE, **wrong)))
    out = collate(THREE_FIVE, **right)
    mask = out["attention_mask"]
    assert (out["input_ids"].shape, mask if mask is None else mask.shape) == (shape, masked)


WORDED = {
    "a row with no tokens": (
        lambda: collate(ids([], [1], []), keys={**KEYS, "weights": TOKENS}),
        "input_ids: 2 bad rows.\n  row 0: got no tokens\n  row 2: got no tokens\nA row without real tokens has no logits, "
        "no loss and no last token.\nDrop the samples.",
    ),
    "float ids in packed rows": (
        lambda: collate(ids([1], [2, 3], [0.5]), packing=True),
        "input_ids: 1 bad row.\n  row 2: got 0.5 at token 0\n",
    ),
}


@pytest.mark.parametrize("name", WORDED)
def test_the_text_names_every_bad_row(name):
    cause, text = WORDED[name]
    assert str(said(cause)).startswith(text)


# --- how texts are made


def test_one_line_of_four_facts():
    line = "key: got this. The rule. The remedy."
    assert explain("key", "this", "The rule.", "The remedy.") == line
    assert explain("key", "this", "The rule.", "The remedy.", more="x") == f"{line}\nMore: collate-npu guide errors#x"


def test_rows_are_sorted_and_counted():
    assert explain_rows("key", [(2, "b"), (0, "a")], "Rule.", "Remedy.") == (
        "key: 2 bad rows.\n  row 0: got a\n  row 2: got b\nRule.\nRemedy."
    )
    assert explain_rows("key", [(2, "b")], "Rule.", "Remedy.").startswith("key: 1 bad row.\n")


def test_of_a_long_text_its_beginning_and_end_are_shown():
    text = "".join(map(str, range(10)))
    assert [short(text, most) for most in (10, 8)] == [text, "0123 ... 10 characters ... 89"]


def test_what_arrived():
    assert shape_of(torch.zeros(2, 3, dtype=torch.bfloat16)) == "bfloat16 [2, 3]"
    assert shape_of(np.zeros(2, np.int32)) == "int32 [2]"
    assert shape_of("text") == "str of 4"


ROOMS = ("segments", "masks", "outputs", "consumers", "collate")


def is_bare(node) -> bool:
    """An error of ours that is made with a text of its own."""
    if not (isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("Error")):
        return False
    made = node.args[0]
    explained = isinstance(made, ast.Call) and getattr(made.func, "id", "") in ("explain", "explain_rows")
    return node.func.id != "UnexplainedError" and not explained


def pointers():
    """Every `more=` that a raise site, or a row of a consumer, says: where it stands, and the section it names."""
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.keyword) and node.arg == "more":
                named = [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
                assert named or ast.unparse(node.value) == "refusal.more", "written where it is said"
                yield from ((f"{module_of(path)}:{node.value.lineno}", name) for name in named)


def test_sections_that_errors_name_are_there_in_both_languages():
    named = dict(pointers())
    assert len(named) > 20
    for page in ("errors", "zh/errors"):
        text = (PACKAGE / "guide" / f"{page}.md").read_text(encoding="utf-8")
        assert {where: name for where, name in named.items() if f'<a id="{name}"></a>' not in text} == {}


def test_every_section_of_what_is_refused_here_is_named_by_an_error():
    text = (PACKAGE / "guide" / "errors.md").read_text(encoding="utf-8")
    refused = text.partition("## Refused here")[2].partition("\n## ")[0]
    assert set(re.findall(r'<a id="([\w-]+)">', refused)) <= {name for _, name in pointers()}


def rules():
    """The rule of each error, as the code words it, without what it fills in."""
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            named = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else getattr(node, "arg", "")
            if hasattr(node, "value") and str(named).strip("(").startswith("rule"):
                said = node.value.elts[0] if isinstance(node.value, ast.Tuple) else node.value
                yield " ".join(part.value for part in ast.walk(said) if isinstance(getattr(part, "value", 0), str))


def test_the_words_of_an_error_find_the_section_that_it_names_or_the_nearest():
    asked = sorted({rule for rule in rules() if len(rule.split()) > 4})
    assert len(asked) > 200
    for rule in asked[SEED % 16 :: 16]:
        assert read_page(rule), rule
    for _, name in pointers():
        assert read_page(explain("key", "this", "A rule.", "A remedy.", more=name)) == read_page(f"errors#{name}")


def test_every_error_of_the_core_is_explained():
    """No raise with a text of its own: each goes through explain or explain_rows, which ask for all four facts."""
    core = [path for path in FILES if room_of(path) in ROOMS]
    assert [f"{module_of(path)}:{node.lineno}" for path in core for node in ast.walk(tree_of(path)) if is_bare(node)] == []
