"""Refusals: what a user does wrong, the words that meet it, and the act that the words name, after which it works (law 12).

A situation is one row. That every entry refuses in words whatever it cannot read is a law of its own (test_entries);
remedies of whole batches are followed through every door in integration/test_remedies.
"""

import ast
import inspect
import re
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from entries import BATCH, FEATURES, IDS, OTHERS, RIGHT, ROWS, callables
from house import FILES, PACKAGE, tree_of

import collate_npu
from collate_npu import BatchAdapter, CollateError, Pattern, Segments, last_token, needs_mask_2d, repad, unpad, wrap_collator
from collate_npu.errors import explain
from collate_npu.keys import KEYS, SAMPLE, TOKENS, Key
from collate_npu.masks import dense
from collate_npu.outputs import ignore_first_labels, per_sequence, shift_labels, to_nested
from collate_npu.parallel.layout import gloo_group
from collate_npu.tools.guide import read_page

pytestmark = [pytest.mark.usefixtures("newest_transformers"), pytest.mark.filterwarnings("ignore:collate_npu")]
DENSE, CP = SimpleNamespace(layer_types=["full_attention"]), collate_npu.ContextParallel(2, 0)
HYBRID = SimpleNamespace(layer_types=["linear_attention", "full_attention"])
RIGHT_PADDED, LEFT = Segments.from_lengths([3, 5]), Segments.from_lengths([3, 5], side="left")
FLAT, PACKED, HOLED = Segments.from_lengths([[3, 5]]), Segments([[1, 1, 2, 2], [1, 1, 2, 2]]), Segments([[1, 0, 1, 1]])
SAME = [{"input_ids": [1]}] * 2
UNLISTED = [{"input_ids": [1, 2], "x": [0.5, 1.0]}, {"input_ids": [1], "x": [2.0]}]
IMAGES = {"input_ids": [1, 2], "pixel_values": torch.ones(1, 4)}
SOME_ROWS, HUGE, TOO_WIDE = torch.tensor([True, False, True, False, False]), 1 << 60, "2147483647"


def ids(*rows):
    return [{"input_ids": row} for row in rows]


def collate(features=FEATURES, pad_token_id=0, **settings):
    return collate_npu.PaddingCollator(pad_token_id=pad_token_id, **settings)(features)


def one(**keys):
    return collate([{"input_ids": [1, 2], **keys}])


def batch_of(segments, **keys):
    B, S = segments.shape
    return {"input_ids": torch.arange(B * S).view(B, S), **keys}


ODD = batch_of(EVEN := Segments.from_lengths([3, 5], 8), attention_mask_2d=EVEN.keep, x=torch.zeros(3, 8))


def wrapped(segments, **settings):
    """As TRL's collator for KTO, whose second rows are of other lengths; or packed rows with a key of one's own."""
    beside = {"mine": torch.ones(2, 4)} if segments.packed else {"KL_input_ids": torch.ones(2, 9)}
    return wrap_collator(lambda _: batch_of(segments, attention_mask=segments.ids, **beside), **settings)(FEATURES)


def flat(consumer):
    batch = batch_of(FLAT, cu_seq_lens_q=FLAT.cu_seqlens)
    return BatchAdapter(DENSE, consumer=consumer, padding_free=True)(batch)


def slid(**options):
    batch = batch_of(RIGHT_PADDED, attention_mask=dense(RIGHT_PADDED, pattern=Pattern.sliding(2)))
    return BatchAdapter(DENSE, consumer="megatron", **options)(batch)["attention_mask"]


def holed(*labels):
    return BatchAdapter(DENSE, consumer="megatron")(batch_of(HOLED, segment_ids=HOLED.ids, labels=torch.tensor([labels])))


def series(*rows):
    return pytest.importorskip("pandas").Series(list(rows))


def sparse():
    return torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.int64), torch.ones(1), (1 << 20, 1 << 20))


def proved(samples=((1, 2), (3,)), **settings):
    from collate_npu.testing import assert_padding_invariant

    collator = collate_npu.PaddingCollator(pad_token_id=0, attention_mask="2d")
    assert_padding_invariant(model(), settings.pop("collator", collator), samples, **settings)


@cache
def model():
    pytest.importorskip("transformers")
    from collate_npu.testing import tiny_model

    return tiny_model("llama", vocab_size=16)


FOLLOWED = [
    # the cause, the words of the remedy, and what is true once it is followed
    *(
        (partial(collate, SAME, packing=True, **beside), "Leave packing out.", partial(collate, SAME, **beside))
        for beside in ({"padding_free": True}, {"padding": False})
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
            "position_ids" not in collate([IMAGES])
            and collate([IMAGES | {"position_ids": np.zeros((3, 2), int)}], padding_free=True)["position_ids"].ndim == 3
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
        lambda: "position_ids" not in wrapped(RIGHT_PADDED, consumer="transformers", model=DENSE),
    ),
    (
        slid,
        "Pass pattern=Pattern.sliding(2) if the model attends so",
        lambda: slid(pattern=Pattern.sliding(2)).equal(dense(RIGHT_PADDED, polarity="masked", pattern=Pattern.sliding(2))),
    ),
    (lambda: holed(0, -100, 2, 3), "or ignore that label (-100)", lambda: holed(0, -100, -100, 3)["labels"][0, 3] == 3),
    (lambda: flat("vllm"), "Name one of them", lambda: flat("verl")["attention_mask"] is None),
    (lambda: flat("Megatorn"), "Did you mean megatron", lambda: flat("megatron")["attention_mask"] is None),
    (lambda: needs_mask_2d(torch.nn.Linear(1, 1)), "Pass the config itself", lambda: needs_mask_2d(HYBRID)),
    (
        lambda: dense(RIGHT_PADDED, rows=SOME_ROWS),
        "pass rows.nonzero()[:, 0]",
        lambda: dense(RIGHT_PADDED, rows=SOME_ROWS.nonzero()[:, 0]).equal(dense(RIGHT_PADDED)[:, :, [0, 2]]),
    ),
    (
        lambda: last_token(torch.ones(2, 3), Segments.from_lengths([0, 3])),
        "Drop those rows",
        lambda: last_token(torch.arange(3)[None], Segments.from_lengths([3])).tolist() == [2],
    ),
    (
        lambda: collate_npu.split_batch(ODD, CP),
        "Split it with split_tensor(x, cp, dim=...), or pass BatchAdapter(keys={**KEYS, 'x': SAMPLE})",
        lambda: (
            BatchAdapter(HYBRID, consumer="megatron", context_parallel=CP, keys={**KEYS, "x": SAMPLE})(ODD)["x"] is ODD["x"]
        ),
    ),
]
FREE, WIDEST = {"padding_free": True}, {"padding_free": True, "padding": "max_length"}
FLAT_4D = {"padding_free": True, "attention_mask": "4d"}
SHAPED = [
    # settings over rows of 3 and 5 tokens, words, the settings that they ask for, the shapes of ids and mask (None: no mask)
    (FREE | {"max_length": 4}, "max_length is 4", FREE | {"max_length": 8}, (1, 8), None),
    (FREE | {"padding": (4, 6)}, "or put fewer samples in a flat row", FREE | {"padding": (4, 8)}, (1, 8), None),
    (WIDEST | {"max_length": 6}, "(or max_length)", WIDEST | {"max_length": 8}, (1, 8), None),
    ({"pad_token_id": None}, "or pass pad_token_id=", {}, (2, 5), None),
    (FLAT_4D, "Leave it at 'auto'", FREE, (1, 8), None),
    (FLAT_4D, "or set padding_free=False", {"attention_mask": "4d"}, (2, 5), (2, 1, 5, 5)),
    ({"padding": (2, 4)}, "Raise the widths", {"padding": (2, 6)}, (2, 6), None),
]


def shapes(settings):
    out = collate(ids([1, 2, 3], [4, 5, 6, 7, 8]), **settings)
    return out["input_ids"].shape, getattr(out["attention_mask"], "shape", None)


FOLLOWED += [
    (partial(shapes, wrong), words, lambda right=right, found=found: shapes(right) == tuple(found))
    for wrong, words, right, *found in SHAPED
]
MADE = [
    # constructors of Segments and patterns, what they get, and words
    (Segments, torch.tensor([[1, 3]]), "row 0: got ids [1, 3]"),
    (Segments, torch.tensor([[1, 1], [2, 1]]), "row 1: got ids [2, 1]"),
    (Segments, torch.tensor([[1, 2, 0, 1], [1, 2, 0, 2]]), "1 bad row.\n  row 0: got ids [1, 2, 0, 1]"),
    (Segments, torch.tensor([[1.0, 1.0]]), "segment ids: got float32 [1, 2]"),
    (Segments, torch.tensor([1, 1]), "segment ids: got int64 [2]"),
    (Segments.from_ids, [[1, 2, 1], [1, 1, 1]], "row 0: got ids [1, 2, 1]"),
    (Segments.from_ids, [[0, 0, -1], [0, 1, 1]], "1 bad row.\n  row 0: got the id -1"),
    (Segments.from_ids, np.array([[1, 1 << 63]], np.uint64), "It wrapped around"),
    (Segments.from_lengths, [3, -1], "row 1: got lengths [-1]"),
    (partial(Segments.from_lengths, width=7), [3, 9, [4, 4]], "row 1: got lengths [9]\n  row 2: got lengths [4, 4]"),
    (Segments.from_lengths, np.ones((1, 2, 2), int), "lengths: got int64 [1, 2, 2]"),
    (Segments.from_lengths, [HUGE], TOO_WIDE),
    (partial(Segments.from_lengths, width=HUGE), [1], TOO_WIDE),
    (Segments.from_cu_seqlens, [0, HUGE], TOO_WIDE),
    (Segments.from_keep, [[1, 2]], "Segments.from_ids"),
    (Segments.from_keep, [[0.5, 1.0]], "keep: got float64 [1, 2] with values 0.5, 1.0"),
    (Segments.from_keep, [1, 0], "keep: got int64 [2]"),
    (Segments.from_position_ids, [0, 1, 2], "position_ids: got int64 [3]"),
    (Pattern.of, "sliding", "Pattern.sliding(window)"),
    (Pattern.sliding, 0, "window: got 0"),
    (Pattern.chunked, -1, "chunk size: got -1"),
    (Pattern.prefix, -1, "prefix: got [-1]"),
    (Pattern.prefix, [], "prefix: got []"),
]
BACK, MOVED = (unpad, last_token, per_sequence, to_nested), (shift_labels, ignore_first_labels)
SHARD = "got float32 [2, 3, 8]. The batch is [2, 5] (rows, width), and the tensor a dense one that torch can index. Pass"
SHAPES, LABELS = ((4,), (2, 4), (2, 5, 1)), "There is one label for each token, and the batch is [2, 5] (rows, width). Pad"
WIDTHS = {"max_length": HUGE, "padding": "max_length"}, {"pad_to_multiple_of": HUGE}, {"padding": (HUGE,)}
REFUSED = [
    # samples and settings of a collator
    (
        lambda: collate(ids([], [1], []), keys={**KEYS, "weights": TOKENS}),
        "input_ids: 2 bad rows.\n  row 0: got no tokens\n  row 2: got no tokens\nA row without real tokens has no logits, "
        "no loss and no last token.\nDrop the samples.",
    ),
    (lambda: collate(ids([1], [2, 3], [0.5]), packing=True), "input_ids: 1 bad row.\n  row 2: got 0.5 at token 0\n"),
    (lambda: collate(series([1, 2])), "Pass a list of samples"),
    (lambda: collate([{"input_ids": series(1, 2)}]), "is a list, array or tensor"),
    (lambda: collate([{"input_ids": [1] * 3, "attention_mask": [1, 2, 1]}], padding_free=True), "return"),
    (lambda: one(seq_lengths=[1 << 62] * 4 + [2]), "sum to its number of input_ids"),
    *((partial(collate, SAME, **widths), TOO_WIDE) for widths in (*WIDTHS, FREE | WIDTHS[1])),
    (lambda: collate(ids([1], [1, 2]), pad_token_id=1 << 70), "2**63"),
    (lambda: collate(ids([1], [1, 2]), padding=False), "padding=False takes rows of one length"),
    (lambda: collate(pad_token_id=None, padding_free=True, pad_to_multiple_of=8), "pad_token_id: got None"),
    *((partial(collate, padding=padding), "padding") for padding in ((), (0, 8), (8, "16"), "max_length", 8)),
    (lambda: wrap_collator(lambda features: {**BATCH, "labels": IDS.bool()})([]), "masked_fill"),
    (lambda: wrap_collator(lambda features: None)(FEATURES), "Return the batch there."),
    (lambda: wrap_collator(lambda features: BATCH)(ids([[5, 6, 9]], [[7, 9]])), "without a batch dimension"),
    *((partial(made, value), words) for made, value, words in MADE),
    # what is no tokenizer and no collator
    (lambda: collate_npu.PaddingCollator("gpt2"), "Pass the tokenizer"),
    (lambda: collate_npu.PaddingCollator(torch.nn.Linear(1, 1)), "and model= by its name"),
    *((partial(wrap_collator, no), "Make one: Padding") for no in (collate_npu.PaddingCollator, "my.py:collate")),
    # outputs and labels
    *((partial(verb, torch.zeros(2, 3, 8), RIGHT_PADDED), words) for verb in BACK for words in (SHARD, "gather_sequence")),
    (lambda: repad(torch.zeros(7), RIGHT_PADDED), "8 real tokens, and y has one row for each"),
    *((partial(verb, torch.ones(of).long(), RIGHT_PADDED), f"{[*of]}. {LABELS} them") for verb in MOVED for of in SHAPES),
    *((partial(verb, torch.zeros(2, 5), RIGHT_PADDED, ignore_index=-(1 << 63) - 1), "ignore_index") for verb in MOVED),
    *((partial(verb, torch.zeros(2, 5).to(torch.float8_e5m2), RIGHT_PADDED), "labels: got float8") for verb in MOVED),
    # ranks without a group
    (lambda: collate_npu.ContextParallel(2, 0, group=object()), "not initialised"),
    *((partial(make, None), "Gathering needs the process group") for make in (CP.from_group, gloo_group)),
    # batches and tables
    (lambda: Key(kind="tokenz"), "Key.kind: got 'tokenz'"),
    (lambda: dense(ROWS, dtype=torch.float8_e5m2), "float of 16 bits or more"),
    (lambda: dense(ROWS, polarity="bias", dtype=torch.int64), "A bias is added to scores"),
    (lambda: collate_npu.describe(IDS), "picture draws a mask alone"),
    (lambda: collate_npu.describe({"input_ids": sparse()}), TOO_WIDE),
    (lambda: BatchAdapter(HYBRID, consumer="megatron")({**BATCH, "labels": IDS.byte()}), "the first at place"),
]


OF_MODELS = [
    (lambda: proved(collator=None), "a NoneType"),
    (lambda: proved(collator=collate_npu.PaddingCollator), "Make one: Padding"),
    (lambda: proved("ab"), "samples: got a str"),
    (lambda: proved([[1, 99], [3]]), "token id 99. This model has ids 0 to 15"),
    (lambda: proved([[1, -5], [3]]), "token id -5"),
    (lambda: proved(tolerance=float("nan")), "An error is 0 or more"),
    (lambda: collate_npu.check_delivery(model(), None), "batch: got a"),
]
ALL = [*FOLLOWED, *((*row, lambda: True) for row in REFUSED)]
ALL += [pytest.param(*row, lambda: True, marks=pytest.mark.models) for row in OF_MODELS]


@pytest.mark.parametrize(("cause", "words", "follow"), ALL)
def test_it_is_refused_in_words_and_the_remedy_works(cause, words, follow):
    with pytest.raises(CollateError) as refusal:
        cause()
    assert words in str(refusal.value)
    assert follow()


def test_what_stands_close_to_it_is_read():
    rows = [{"input_ids": [1, 2, 3], "attention_mask": [7, 7, 2 * 10**9]}, {"input_ids": [4, 5], "attention_mask": [9, 1]}]
    made = [collate([dict(row) for row in rows], **how) for how in (FREE, {"packing": True, "max_length": 5})]
    assert [each["position_ids"].tolist() for each in made] == [[[0, 1, 0, 0, 0]]] * 2
    assert all(verb(torch.zeros(2, 5).half(), RIGHT_PADDED).dtype == torch.float16 for verb in MOVED)
    assert collate(rows)["segment_ids"].tolist() == [[1, 1, 2], [1, 2, 0]]
    assert collate({"input_ids": torch.nested.nested_tensor([IDS[0], IDS[1, :2]])})["input_ids"].shape == (2, 4)
    assert one(lengths=1 << 70)["lengths"] == [1 << 70]
    hashes, adapter = np.full(2, 2**64 - 1, np.uint64), BatchAdapter(HYBRID, consumer="megatron")
    assert adapter({**BATCH, "mine": hashes})["mine"] is hashes
    assert collate(ids((1, 2)), np.int64(0), max_length=torch.tensor(4))["input_ids"].tolist() == [[1, 2]]
    assert Segments.from_lengths(np.array([2, 3])) == Segments.from_lengths(torch.tensor([2, 3]))
    assert Segments.from_lengths([np.array([1, 2]), [3]]).lengths == ((1, 2), (3,))
    assert collate_npu.ContextParallel(np.int64(2), 0).multiple == 4


# --- what is no model, no tokenizer and no collator

TOKENIZER = SimpleNamespace(pad_token_id=0, decode=print)
NO_MODELS = {
    "a name": ("Qwen/Qwen3-Next", "from_pretrained('Qwen/Qwen3-Next')"),
    "a folder": (Path("checkpoint"), "Load it: AutoModelForCausalLM.from_pretrained('checkpoint')"),
    "a class": (torch.nn.Linear, "Pass the model"),
    "a tokenizer": (TOKENIZER, "That is a tokenizer: pass the model"),
}


def takers():
    """Every entry with an argument `model`, called with nothing else wrong."""
    for name, made in callables():
        with_model = made.__init__ if isinstance(made, type) else made
        taken = inspect.signature(with_model).parameters if inspect.isroutine(with_model) else {}
        if "model" in taken:
            must = {each: RIGHT[each] for each, of in taken.items() if each in RIGHT and of.default is of.empty}
            yield pytest.param(partial(made, **(must | OTHERS.get(name, {}))), id=name)


@pytest.mark.parametrize("no", NO_MODELS)
@pytest.mark.parametrize("taker", takers())
def test_what_is_no_model_is_refused_with_what_to_pass(taker, no):
    with pytest.raises(CollateError, match=f"got (.|\n)*{re.escape(NO_MODELS[no][1])}"):
        taker(model=NO_MODELS[no][0])


# --- the sections that errors name


def sections(page):
    text = (PACKAGE / "guide" / page).read_text(encoding="utf-8")
    refused = text.partition("## Refused here")[2].partition("\n## ")[0]
    return [{*re.findall(r'<a id="([\w-]+)">', part)} for part in (text, refused)]


def test_sections_that_errors_name_are_there_in_both_languages_and_none_is_left_over():
    nodes = [node for path in FILES for node in ast.walk(tree_of(path)) if isinstance(node, ast.keyword)]
    parts = [part for node in nodes if node.arg == "more" for part in ast.walk(node.value)]
    named = {part.value for part in parts if isinstance(part, ast.Constant) and part.value}
    (there, refused), (chinese, _) = sections("errors.md"), sections("zh/errors.md")
    assert refused <= named <= there & chinese
    for name in named:
        assert read_page(explain("key", "this", "A rule.", "A remedy.", more=name)) == read_page(f"errors#{name}")
