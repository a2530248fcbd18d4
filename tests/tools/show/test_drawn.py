"""One table: what is shown, in words and in each size, beside the text that a person has read.

`python tests/tools/show/test_drawn.py` writes drawn.txt anew; what then differs is to be read.
"""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("rich")
from collate_npu import CollateError, ContextParallel, PaddingCollator, Pattern, Segments
from collate_npu.masks import dense
from collate_npu.masks.batch_reader import segments_from_batch
from collate_npu.tools.describe import describe
from collate_npu.tools.sheet import sheet_of
from collate_npu.tools.show import consumer_panels, lines, picture, rank_panels, text_of

DRAWN, BETWEEN = Path(__file__).with_name("drawn.txt"), "\n" + "=" * 30 + " "
DENSE = SimpleNamespace(layer_types=["full_attention"])
LETTERS = {0: "<pad>", 5: " the", 6: "中文字", 7: "\n", 8: "😀", 9: "\ufffd", 10: "a longer word", 12: ""}


class Letters:
    """A tokenizer: some tokens must be escaped, some are wide, some are no text, one it does not have."""

    def decode(self, ids):
        return "".join(LETTERS[number] for number in ids)


def rows(*lengths, side="left", width=None):
    return Segments.from_lengths(list(lengths), side=side, width=width)


def batch(truth, **more):
    tokens = torch.where(truth.keep, 5 + torch.arange(truth.shape[1]) % 8, 0)
    return {"input_ids": tokens, "attention_mask_2d": truth.keep, "segment_ids": truth.ids, **more}


def square(truth, turned=None, **how):
    """Its dense mask, one place turned around."""
    mask = dense(truth, **how)
    if turned is not None:
        mask[turned] = ~mask[turned]
    return mask


def collated(*lengths, **how):
    collate = PaddingCollator(pad_token_id=0, consumer="megatron", model=DENSE, **how)
    return collate([{"input_ids": [5] * n, "labels": [5] * n} for n in lengths])


def read(made, *names, ranks=None, **model):
    """What each consumer is given, and each rank."""
    made, model = batch(made) if isinstance(made, Segments) else made, {"model_type": "qwen3", **model}
    panels = [panel for name in names for panel in consumer_panels(made, name, **model)]
    return [*panels, *(() if ranks is None else rank_panels(made, ranks))]


TWO, FOUR, PACKED = rows(3, 5), rows(4, 4), rows([2, 1], [3], side="right", width=4)
KINDS = {"full_attention": dense(TWO), "sliding_attention": square(TWO, pattern=Pattern.sliding(2)), "linear": TWO.keep}
LABELS = torch.tensor([[3, -100, 6, 0, -100], [-100, 2, -100, 4, 5]])
MIXED = torch.where(torch.arange(140).view(2, 70) % 7 == 3, -100, 5)
ODD = torch.tril(torch.full((1, 1, 3, 3), 0.5))
HEADS = torch.cat([dense(FOUR), torch.zeros(2, 1, 4, 4).bool()], 1)
NAN = ODD.masked_fill(torch.tensor([[0, 0, 0], [0, 0, 0], [1, 0, 0]]).bool(), float("nan"))
WINDOW, BLIND = Pattern.sliding(2), square(rows(4), (0, 0, 1, 0))
SLIDING = SimpleNamespace(layer_types=["full_attention", "sliding_attention"], sliding_window=2)
NAMED = {"tokenizer": Letters()}
NESTED = {"none": None, "sparse": torch.eye(2).to_sparse()}
NESTED["more"] = NESTED
CASES = {
    "left": (TWO, 29), "packed": (PACKED, 39), "a row full": (rows([1] * 11), 45), "no token in a row": (rows(0, 2),),
    "folded": (rows([70, 30], 200), 90),
    "forty": (rows(40, side="right"), 200), "four thousand": (rows(4096, 7), 90), "many rows": (rows(*[2] * 18),),
    "too large": (rows(70_000),), "side by side": (rows(*[20] * 5), 91), "one of two": (TWO, {"row": 1}),
    "labels": (batch(TWO, labels=LABELS),), "labels, floating": (batch(TWO, labels=LABELS / 2),),
    "labels of another shape": (batch(TWO, labels=LABELS[:, 1:]),), "2D": (TWO.keep,),
    "no tokens": ({"attention_mask_2d": TWO.keep.tolist()}, NAMED), "three dimensions": (dense(TWO)[:, 0],),
    "labels, folded": (batch(rows(50, 70), labels=MIXED),), "tokens": (batch(rows(8, 13)), NAMED, 30),
    "wide tokens": (batch(rows(13)), NAMED, 61),
    "no such tokens": ({**batch(TWO), "input_ids": torch.full((2, 5), -1)}, NAMED),
    "True is blocked": (dense(TWO, polarity="masked"),), "Megatron's fill": (dense(TWO).logical_not() * -10000.0,),
    "a window": (square(rows(6, 4), pattern=Pattern.sliding(3)),), "an array": (dense(TWO).numpy(),),
    "a mask of all ones": (torch.ones(1, 1, 3, 3),), "an oblong mask": (torch.ones(1, 1, 2, 3),), "NaN": (NAN,),
    "one place wrong": (square(rows(5, 8), (1, 0, 6, 2)),), "one too much": (square(rows(5, 5), (0, 0, 2, 4)),),
    "wrong and large": (square(rows(300, 280), (1, 0, 250, 100)),),
    "wrong in a window": (square(TWO, (1, 0, 3, 0), pattern=WINDOW),),
    "wrong, right padding": (square(rows(5, 8, side="right"), (0, 0, 3, 1)),),
    "2D, added": (torch.tensor([[0.0, 0.0], [-1e9, 0.0]]),), "2D, odd": (torch.tensor([[0.5, 1, 0]]),),
    "a row of padding": ({"input_ids": torch.ones(2, 3), "attention_mask_2d": torch.tensor([[0, 0, 0], [0, 1, 1]])},),
    "no numbers": (torch.tensor([[0, 2], [1, 1]]),), "one mask and no row": (torch.ones(1, 4).bool(),),
    "a batch": (collated(3, 1, padding_side="left"),), "flat": (collated(3, 2, padding_free=True),),
    "each kind of layer": (batch(TWO, attention_mask=KINDS),), "refused, by its kinds": (batch(FOUR, attention_mask=KINDS),),
    "one square for all": (batch(FOUR, attention_mask=dense(FOUR)[0, 0]),),
    "heads that differ": (batch(FOUR, attention_mask=HEADS),),
    "a blind one for all": (batch(FOUR, attention_mask=BLIND[0, 0]),),
    "blind ones": (batch(FOUR, attention_mask=BLIND.expand(2, 1, 4, 4)),),
    "the batch's mask, one place wrong": (batch(TWO, attention_mask=square(TWO, (1, 0, 4, 1), polarity="masked")),),
    "another width": (batch(rows(2, 3), attention_mask=dense(rows(4, 4))), NAMED),
    "2D of another width": ({"input_ids": torch.ones(2, 3).long(), "attention_mask_2d": torch.ones(3, 4)}, NAMED, 90),
    "five dimensions": (batch(TWO, attention_mask=torch.ones(1, 2, 1, 5, 5)),),
    "no mask": ({"input_ids": torch.ones(2, 3).long()},),
    "values as well": (batch(TWO, attention_mask=dense(TWO, polarity="bias") + torch.arange(5.0)),),
    "its own window": (batch(FOUR, attention_mask=square(FOUR, pattern=WINDOW)),),
    "packed, with positions": (batch(PACKED, position_ids=PACKED.position_ids),),
    "no tensors": ({"input_ids": torch.ones(1, 1 << 17).long(), "x": object(), "names": ["a"], "n": NESTED},),
    "megatron": (read(TWO, "megatron", "transformer_engine", "mindspeed", model_type="qwen3_next"),),
    "transformers": (read(rows([4, 1], [5]), "transformers", model=SLIDING, model_type=None),),
    "nothing in the mask's place": (read(rows(2, 3, side="right"), "mindspeed_dense", "transformers"),),
    "no mask, and padding is attended": (read(rows(2, 3, side="right"), "megatron"),),
    "rows that see nothing see themselves": (read(rows(2, 3), "mindspeed_dense"),),
    "a flat row, read": (read(collated(3, 2, padding_free=True), "megatron", padding_free=True),),
    "two ranks": (read(rows(8, 5), ranks=ContextParallel(2, 0)),),
    "too short for the ranks": (read(rows(5), ranks=ContextParallel(2, 0)),),
    "document by document": (read(rows([8] * 8), ranks=ContextParallel(2, 0, layout="document_zigzag")),),
    "no ranks there": (read(TWO, "transformers", context_parallel=ContextParallel(2, 0), model_type="qwen3_next"),),
}  # fmt: skip


def short(panel):
    """Without the words of refusals and routes, which are others' to test."""
    return replace(
        panel, refused=panel.refused.partition(":")[0], facts=panel.facts.partition(";")[0] if panel.derived else panel.facts
    )


def described(batch):
    """In words, without those that are others' to test: of refusals, hazards and routes."""
    words = re.sub(
        r"^(hazard|padding|no mask is(?: not)? exact|cheapest exact form): .+", r"\1", describe(batch), flags=re.M
    )
    return re.sub(r"^Segments\(.+\)", "Segments(...)", words, flags=re.M)


def drawn(shown, *how):
    """The text, and the drawing of so many columns (60) with the colours of its signs."""
    options = next((one for one in how if isinstance(one, dict)), {})
    width = next((one for one in how if isinstance(one, int)), 60)
    if isinstance(shown, list):
        sheet, text = replace(sheet_of(TWO), panels=tuple(shown)), ""
    else:
        sheet, text = sheet_of(shown, **options), str(picture(shown, **options))
    for panel in sheet.panels:
        text = text.replace(panel.refused or "\0", short(panel).refused)
    made = lines(replace(sheet, panels=tuple(map(short, sheet.panels))), width)
    cells = [line for line in made if line and len(line[0][0]) < 6]
    assert max((sum(len(piece) for piece, _ in line) for line in cells), default=0) <= width + 3  # the gap at the end
    styles = {f"{sign} {style}" for line in made for sign, style in line if sign in {*"■⬚◧+-o×!12"}}
    words = [described(shown), ""] if isinstance(shown, dict) else []
    return "\n".join([*words, text, f"[{width}]", text_of(made), "; ".join(sorted(styles))]).strip()


def written():
    return "".join(f"{BETWEEN}{name}\n{drawn(*case)}\n" for name, case in CASES.items())


EXPECTED = dict(part.split("\n", 1) for part in DRAWN.read_text("utf-8").split(BETWEEN)[1:]) if DRAWN.exists() else {}


@pytest.mark.parametrize("name", CASES)
def test_what_is_drawn_is_what_was_read(name):
    assert drawn(*CASES[name]) == EXPECTED[name].strip()


@pytest.mark.parametrize("name", [name for name, (shown, *_) in CASES.items() if isinstance(shown, dict)])
def test_a_refusal_stands_first_in_its_own_words(name):
    shown = CASES[name][0]
    try:
        refused = segments_from_batch(shown) and ""
    except CollateError as error:
        refused = str(error)
    assert sheet_of(shown).panels[0].refused == refused


@pytest.mark.parametrize("numbers", [[[256, 256, 72], [1, 0, 1]], [[-100, 2]]])
def test_token_ids_and_labels_are_no_mask(numbers):
    with pytest.raises(CollateError, match="These look like token ids or labels"):
        picture(torch.tensor(numbers))


if __name__ == "__main__":
    DRAWN.write_text(written(), encoding="utf-8")
