"""Laws 15, 18 and 19: a batch has one meaning, in any layout and by any door; and nobody loses by adding our line.

What is drawn here is run by `differential`: every real token has the outputs, loss and gradient of its sample alone, or the
batch is refused where the law says so.
"""

import random
import re
from contextlib import suppress
from importlib.util import find_spec
from itertools import product

import pytest
from hypothesis import example, given, settings, strategies as st
from rotation import NIGHTLY, SEED, examples
from strategies import flat_collator, packed_lengths, sides

pytest.importorskip("transformers")
import differential
from differential import DENSE, DOORS, FAMILIES, HYBRIDS, PAD, Case, SkippedError, judged, samples_of, wrapped
from transformers import CONFIG_MAPPING, __version__

from collate_npu import PaddingCollator, adapt
from collate_npu.consumers.model_traits import text_config
from collate_npu.releases import numbers

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]

OLD = ("doge", "moshi", "open-llama", "recurrent_gemma", "xglm", "xlstm") if numbers(__version__) < (5, 2) else ()
"""Whose own code reads later tokens (doge, open-llama), moves labels twice, writes into positions or keeps a state there."""
no_harm = pytest.mark.skipif(numbers(__version__) < (5, 2), reason="law 18 is measured from transformers 5.2 on")
HERE = [mode for mode in differential.MODES if mode != "lora" or find_spec("peft")]
TOLD = ("mask", "places", "counted", "ids", "ids, places", "segments")
FIVE = ((5, 13, 40), (1, 70))
SURE = {*HYBRIDS, "llama", "mistral", "gemma3_text", "llama4_text", "qwen3_moe", "gpt2", "gpt_oss"} - {"inkling2_text"}
"""They run by sequence: one of another way, as whose tiny copy comes out otherwise, would be refused."""


def law(family: str, modes, doors, drawn: settings, attn: str = "sdpa"):
    """Each drawn layout in a drawn mode by a drawn door. What does not run by sequence may be refused. The last mode and the
    last door run always, of rows long enough for several buckets."""
    try:
        model = wrapped(Case(family, attn=attn))
    except Exception as error:
        raise SkippedError from error
    assert (sure := adapt(model).way == "by sequence") or family not in SURE
    layouts = packed_lengths(rows=3, sequences=6, longest=70)

    @drawn
    @given(layouts, sides(), st.integers(0, 3), *map(st.sampled_from, (TOLD, (None, 0, 1), modes, doors)))
    @example(((9,),), "right", 1, "segments", None, modes[-1], doors[-1])  # a flat row's tail is padding on the right
    @example(FIVE, "right", 2, "segments", 0, modes[-1], doors[-1])
    @example(((65,), (64,)), "right", 0, "mask", 0, modes[0], doors[-1])  # their labels stay until they are one flat row
    @example(((2, 1, 2),), "left", 0, "ids", None, modes[0], doors[-1])  # of which qwen3_next alone is right by chance
    @example(((9,), (40,), (3,)), "holes", 1, "mask", 1, modes[0], doors[-1])
    @example(((1,),), "left", 1, "mask", None, modes[0], doors[len(doors) // 2])  # wrapped: older ones read no such mask
    @example(((7,), (12,), (4,)), "left", 1, "places", 0, modes[0], doors[0])
    def runs(lengths, side, more, told, prompt, mode, door):
        lengths = tuple(map(tuple, lengths))
        if any(len(row) > 1 for row in lengths):
            told = told if "ids" in told and family not in FAMILIES["vision"] else "segments"  # images need axes
        prompt = prompt if any(n > 1 + (prompt or 0) for row in lengths for n in row) else None
        case = Case(family, lengths=lengths, side=side, told=told, more=more, attn=attn, wrapper=mode, prompt=prompt)
        unread = len(lengths) == 1 and side == "left" and more > 0 and door != "collator" and numbers(__version__) < (5, 15)
        refused = (case.packed or unread) and family in HYBRIDS and "adapt" not in door.split(", ")
        for what, why in judged(case, (door,)).values():
            rows = "adapt" not in door or mode == "lora" or re.search("Generation|Zamba2", type(model).__name__)  # of rows
            rows = (rows and "behind padding inside" in why) or "rows must be of one length" in why
            assert what == ("refused" if refused else "right") or (what == "refused" and (rows or not sure)), (why, case)
            assert not refused or "adapt(model)" in why, why  # the remedy, which the law runs

    runs()


@pytest.mark.draws(4)
@pytest.mark.parametrize("family", ["qwen3_next", "gemma3_text", "qwen3_moe", "llama"])
def test_a_batch_has_one_meaning(family):
    """In each commit: a hybrid, windows, experts and a dense one."""
    doors = ["collator, adapt", "adapter, adapt", *DOORS]
    law(family, [mode for mode in HERE if mode != "checkpointed"] + ["checkpointed"], doors, examples(6))


OTHERS = [*((name, "sdpa") for name in (*HYBRIDS, *DENSE) if name not in OLD), ("llama", differential.BY_OFFSETS)]


@pytest.mark.draws(2)
@pytest.mark.parametrize(("family", "mode"), [*product(OTHERS, HERE)], ids=str)
def test_every_family_gives_each_sequence_what_it_gives_alone_by_adapt(family, mode):
    with suppress(SkippedError):  # it does not build or run here
        law(family[0], [mode], ["adapt"], settings(max_examples=2 if NIGHTLY else 4), family[1])


REASONS = {"stand at neither end of their rows": "a wrapped collator finds samples in a flat row by their ids"}
"""Refusals of runs that are right without us: what they say, and why they stay."""


def harm(found) -> dict[str, str]:
    """Doors that are wrong, beside a wrong plain run too; and where plain is right those that raise something raw, or refuse
    for no listed reason."""
    bad = {}
    for door, (what, why) in found.items():
        if door == "plain" or what == "right":
            continue
        listed = any(re.search(pattern, why) for pattern in REASONS)
        if what == "wrong" or (found["plain"][0] == "right" and not (what == "refused" and listed)):
            bad[door] = f"{what}: {why}"
        elif what == "raised" and found["plain"][0] != "raised":
            bad[door] = why
    return bad


def case_of(**fixed):
    """The first case from this run's seed on that a family runs at all, and what came of it."""
    for seed in range(begin := random.Random(f"{SEED} {fixed}").randrange(1 << 40), begin + 400):
        case = differential.drawn(seed, **fixed)
        with suppress(SkippedError):
            return case, judged(case)
    raise LookupError(fixed)


DRAWN = [*({"kind": kind} for kind in FAMILIES), *({"option": option} for option in dict.fromkeys(differential.OPTIONS))]
DRAWN += [{"wrapper": wrapper} for wrapper in sorted({*differential.WRAPPERS, "compiled"} - {"none"})]


@no_harm
@pytest.mark.slow
@pytest.mark.draws(8)
@pytest.mark.parametrize("fixed", DRAWN, ids=lambda fixed: next(iter(fixed.values())))
def test_what_is_right_without_us_is_right_with_us(fixed):
    case, doors = case_of(**fixed)
    assert harm(doors) == {}, case


LAYOUTS = {
    "left": {"side": "left", "told": "counted", "prompt": None},
    "right": {"side": "right", "told": "counted", "prompt": None},
    "holes": {"side": "holes", "told": "counted", "prompt": None},
    "flat": {"lengths": ((9, 12, 1),), "told": "positions", "prompt": None, "option": "use_cache", "tail": 8},
}
"""`use_cache`: with one, transformers does not look for packed positions (masking_utils.py:876)."""


def switches(family):
    """Of biases, which padding may reach layers by."""
    text = text_config(CONFIG_MAPPING[family]())
    return [(field, not on) for field, on in vars(text).items() if "bias" in field and isinstance(on, bool)]


FIELDS = [*((name, ()) for name in (*HYBRIDS, *DENSE)), *((name, (each,)) for name in HYBRIDS for each in switches(name))]
FIELDS += [(name, (("is_decoder", True),)) for name in ("roberta", "xlm-roberta")]  # their positions begin behind padding's


@no_harm
@pytest.mark.draws(6)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "fields"), FIELDS, ids=str)
def test_where_padding_or_a_neighbour_leaks_it_is_refused_and_nowhere_else(family, fields, layout):
    """By a module, or its config alone."""
    case = {"family": family, "fields": fields, **LAYOUTS[layout]}
    assert harm(comes(case, ("plain", "adapter", "config", "collator"))) == {}


ENCODER, SEQ2SEQ = {"family": "bert", "head": "base"}, {"head": "Seq2SeqLM"}
FLAT, LEFT, LONG = {"lengths": ((9, 4, 13),), "told": "positions"}, {"side": "left"}, {"lengths": ((5,), (20,))}
HYBRID, CHUNKS, ONE_FLAT = {"family": "qwen3_next"}, {"lengths": ((3,), (11,), (12,))}, {**FLAT, "lengths": ((5,),)}
KNOWN = {
    "an embedding model by its config": {"option": "config.is_causal", "head": "base"},
    "one by the call, padded left": {**LEFT, "option": "is_causal"},
    "an encoder's flat row of one sample": {**ENCODER, **ONE_FLAT, "tail": 16},
    "one that is packed": {**FLAT, "option": "config.is_causal"},
    "one that is packed, by the call": {**FLAT, "option": "is_causal", "attn": "eager"},
    "a hybrid one": {**HYBRID, "option": "is_causal", "head": "base"},
    "EmbeddingGemma, packed": {**FLAT, "family": "gemma3_text", "option": "config.ahead", "head": "base"},
    "a router's loss by the call": {"family": "mixtral", "option": "router"},
    "one by the config": {"family": "qwen3_moe", "option": "config.router"},
    "one padded left": {**LEFT, "family": "mixtral", "option": "router"},
    "prefix tuning": {**LEFT, "wrapper": "prefix"},
    "prompt tuning of completions": {**LEFT, "wrapper": "prompt", "prompt": 1},
    "attention weights": {"option": "attentions", "attn": "eager"},
    "a static cache": {**LEFT, "family": "gemma3_text", "option": "static"},
    "a hybrid's": {**LEFT, **HYBRID, "option": "static"},
    "a prompt in chunks": {**LEFT, **CHUNKS, "option": "chunks"},
    "prompts of one length without a cache": {**LEFT, "lengths": ((5,), (5,)), "option": "uncached"},
    "a static cache, padding first": {**LEFT, "lengths": ((4,), (10,)), "family": "recurrent_gemma", "option": "static"},
    "a static cache, windows first": {**LEFT, "lengths": ((12,),), "family": "recurrent_gemma", "option": "static"},
    "a pooler": {**LEFT, **ENCODER, "family": "roberta"},
    "a head of spans": {**ENCODER, "family": "yoso", "head": "QuestionAnswering"},
    "LED, its source left": {**LEFT, **SEQ2SEQ, "family": "led", "attn": "eager"},
    "T5, its labels left": {**SEQ2SEQ, "family": "t5", "labels_side": "left"},
    "a decoder whose copy is short": {**LEFT, "family": "prophetnet", "option": "keep"},
    "a static cache, of a model that counts places": {**LEFT, "family": "trocr", "option": "static"},
    "BART generates, its source left": {**LEFT, **SEQ2SEQ, "family": "bart", "option": "generate"},
    "one sample of a hybrid in a flat row": {**HYBRID, **ONE_FLAT},
    "one with a tail": {**HYBRID, **ONE_FLAT, "tail": 8},
    "a label behind a hole": {"side": "holes"},
    "one under LoRA": {"side": "holes", "wrapper": "lora"},
    "a window that no row fills": {"family": "mistral", "side": "holes", "lengths": ((4,), (5,)), "prompt": None},
    "a window that its masks leave out": {**FLAT, "family": "moshi", "lengths": ((17, 30, 9),)},
}  # fmt: skip


def comes(fields, doors=("plain", *DOORS)):
    """What came of this case; none where this release has no such family."""
    try:
        return judged(Case(**fields), doors)
    except SkippedError as error:
        pytest.skip(str(error))


@no_harm
@pytest.mark.draws(4)
@pytest.mark.parametrize("what", KNOWN)
def test_known_harm_is_gone(what):
    found = comes(KNOWN[what])
    assert harm(found) == {}
    assert "right" in {found[door][0] for door in found} or found["plain"][0] == "wrong"


SPREAD = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
WITHIN, ALL = ("original_max_position_embeddings", 8), ("max_position_embeddings", 8)
SCALED = (("rope_parameters", SPREAD), WITHIN, ALL)
YARN = (("rope_parameters", {**SPREAD, "rope_type": "yarn"}), WITHIN, ALL)
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, WITHIN[0]: 8}
LONG_ROPE |= {"long_factor": [1.0 + i for i in range(8)]}
PHI3 = {"family": "phi3", "fields": (("rope_parameters", LONG_ROPE), WITHIN, (ALL[0], 64))}
PICKED = (("index_topk", 8), ("index_n_heads", 2))
"""Of few heads scores of exactly zero tie, so that appended tokens, real ones too, move earlier logits."""
SPARSE = (("layer_types", ["full_attention", "minimax_m3_sparse"]), ("index_topk_blocks", 2), ("index_block_size", 4))
SPARSE += (("index_local_blocks", 1),)
ROUTER, WIDE = (("output_router_logits", True),), {"lengths": ((24,), (40,))}
COMES = {
    "dynamic frequencies of short rows": ({"fields": SCALED, "lengths": ((5,), (7,)), "more": 20}, "right"),
    "dynamic frequencies of a long row": ({"fields": SCALED, **LONG}, "refused"),
    "YaRN's": ({"fields": YARN, **LONG}, "right"),
    "long frequencies of short rows": ({**PHI3, "lengths": ((5,), (7,)), "more": 20}, "right"),
    "long frequencies of a long row": ({**PHI3, **LONG}, "refused"),
    "an indexer of few heads": ({"family": "deepseek_v32", "fields": PICKED, **WIDE}, "refused"),
    "an indexer of many heads": ({"family": "deepseek_v32", "fields": (PICKED[0], ("index_n_heads", 8)), **WIDE}, "right"),
    "one within its budget": ({"family": "deepseek_v32", "fields": PICKED, "lengths": ((8,), (40,))}, "right"),
    "an indexer in a flat row": ({**FLAT, "family": "axk2", "fields": (("index_topk", 4), ("index_n_heads", 8))}, "right"),
    "a window filled, with a hole": ({"family": "mistral", "side": "holes", "prompt": None}, "refused"),
    "compressed keys in a flat row": ({**FLAT, "family": "deepseek_v4", "attn": "eager"}, "refused"),
    "masks XLM drops": ({**LEFT, "family": "xlm", "fields": (("causal", True),), "option": "uncached"}, "refused"),
    "sparse blocks in a flat row": ({**FLAT, "family": "minimax_m3_vl_text", "fields": SPARSE, "attn": "eager"}, "refused"),
    "a router's loss in a flat row": ({**FLAT, "family": "mixtral", "fields": ROUTER}, "refused"),
    "a router's loss of gpt-oss": ({**FLAT, "family": "gpt_oss", "fields": ROUTER, "attn": "eager"}, "refused"),
}


@no_harm
@pytest.mark.draws(4)
@pytest.mark.parametrize("what", COMES)
def test_what_follows_the_width_or_the_places_of_a_row_is_known(what):
    """What is refused would be wrong; `adapt` runs it, or refuses it too."""
    fields, wanted = COMES[what]
    found = comes(fields, ("plain", "adapter", "adapt"))
    assert (found["adapter"][0], found["adapt"][0] == "wrong") == (wanted, False), found
    assert wanted == "right" or found["plain"][0] == "wrong" or "router" in what


SHAPES = {
    "a multiple": {"pad_to_multiple_of": 16},
    "a tail": {"padding": (256,)},
    "aligned": {"multiple": 4},
    "one shape": {"multiple": 4, "padding": (256,), "max_sequences": 8},
    "one shape, not aligned": {"padding": (256,), "max_sequences": 8},
}
ROWS = [((6, 8, 5),), ((1, 7, 1, 1, 9),), ((3, 2, 1, 4, 3),), ((63, 64, 65, 2),), ((127, 1, 17),)]


@pytest.mark.draws(3)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text"])
def test_a_flat_row_of_any_shape_gives_each_sequence_what_it_gives_alone(family, attn):
    for lengths, shape in zip(ROWS, SHAPES.values()):
        case = Case(family, attn=attn, lengths=lengths, told="positions", prompt=None)
        model, rows = wrapped(case), samples_of(case)
        batch = flat_collator(PAD, model=model, **shape)(rows)
        out = model(**{"use_cache": False} | batch).logits[0]
        starts = batch["cu_seq_lens_q"].tolist()
        answers = [out[at : at + len(row["input_ids"])] for at, row in zip(starts, rows)]
        found = differential.measured(case, model, answers, differential.read(answers, 0))
        assert differential.verdict(found, differential.alone(case, model, rows)) == "right", shape


@no_harm
@pytest.mark.parametrize("settings", [{"padding_side": "left"}, {"padding_free": True}], ids=str)
def test_a_token_with_the_id_that_is_not_counted_stands_where_it_stood_alone(settings):
    """RoBERTa's family leaves it at `padding_idx`, and counts on behind it."""
    model = wrapped(Case("roberta", fields=(("is_decoder", True),)))
    collate = PaddingCollator(pad_token_id=PAD, model=model, **settings)
    positions = collate([{"input_ids": ids} for ids in ([9, PAD, 7, 8], [5, 6])])["position_ids"].flatten().tolist()
    padding = [PAD] * (len(positions) - 6)
    assert positions == [PAD + 1, PAD, PAD + 2, PAD + 3, *padding, PAD + 1, PAD + 2]
