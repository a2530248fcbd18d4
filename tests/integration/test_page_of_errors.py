"""guide/errors.md: each row is reproduced on the real packages, seen as the page says, and mended by its code.

A situation is one row of `SITUATIONS`; a row of the page whose stack is not installed here names the test that reproduces it
there.
"""

import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from accelerate.utils.operations import concatenate  # noqa: E402
from trained import trainer_of  # noqa: E402

import collate_npu  # noqa: E402
from collate_npu import BatchAdapter, CollateError, PaddingCollator, Segments, describe, split_batch, unpad  # noqa: E402
from collate_npu.masks import dense  # noqa: E402
from collate_npu.parallel import ContextParallel  # noqa: E402
from collate_npu.releases import MISSING_KERNEL_RAISES  # noqa: E402
from collate_npu.testing import byte_tokenizer, tiny_model  # noqa: E402
from collate_npu.tools.guide import read_page  # noqa: E402
from collate_npu.tools.show import picture  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:collate_npu")
ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "collate_npu" / "guide"
ELSEWHERE = {
    "megatron-2d": "tests/peers/test_mcore_bridge.py::test_its_cells_on_one_rank_and_on_two "
    "tests/peers/test_swift_megatron.py::test_off_an_npu_the_dense_mask_of_mlp_padding_free_and_with_ignored_labels_what_predicts_ahead_go_through",
    "torch-npu-import": "tests/npu/test_wheel.py::test_without_cann_torch_itself_names_the_switch",
    "npu-mask": "tests/proof/test_known_kernels.py::test_the_vendors_verdict_on_masks_holds",
    "ranks-apart": "tests/distributed/test_distributed_agreement.py::"
    "test_every_rank_raises_where_one_is_odd_at_the_second_step_of_a_shape",
    "gloo-device": "tests/parallel/test_layout.py::"
    "test_a_gloo_group_is_made_where_the_world_is_bound_to_a_device_that_gloo_does_not_know",
    "fla-cpu": "tests/tools/env/test_env.py::test_a_hazard_is_told_where_it_is_and_nowhere_else",
}


def rows_of(page):
    """The text of each row, by its name."""
    parts = re.split(r'^### <a id="([\w-]+)"></a>.*\n', (GUIDE / page).read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


def said(text, label):
    """What stands behind `**Says:**` and the like."""
    found = re.search(rf"^\*\*{label}[:：]\*\* (.+)$", text, flags=re.M)
    return found[1] if found else ""


def code_of(text):
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.M | re.S)


ROWS = rows_of("errors.md")
MESSAGES = {
    name: [each for _, each in re.findall(r"(`+)((?:(?!\1).)+)\1", said(text, "Says"))] for name, text in ROWS.items()
}
"""Each error that a row names."""


def test_the_chinese_page_has_the_same_rows_errors_and_code():
    chinese = rows_of("zh/errors.md")
    assert list(chinese) == list(ROWS)
    for name, text in ROWS.items():
        assert code_of(chinese[name]) == code_of(text)
        assert said(chinese[name], "报错") == said(text, "Says")
        assert re.findall("`[^`]+`", said(chinese[name], "查看")) == re.findall("`[^`]+`", said(text, "See"))
        assert (said(chinese[name], "原因")[-1], said(text, "Why")[-1]) == ("。", ".")
        assert [kind for kind, _ in code_of(text)] in (["python"], ["console"]), name


def test_every_row_is_reproduced_here_or_in_the_test_that_is_named():
    assert sorted({name for name, *_ in SITUATIONS} | set(ELSEWHERE)) == sorted(ROWS)
    for ref in " ".join(ELSEWHERE.values()).split():
        path, _, test = ref.partition("::")
        assert f"\ndef {test}(" in (ROOT / path).read_text(encoding="utf-8"), ref


WORDS = {
    "atten_mask": "npu-mask", "get unsupported atten_mask shape, the shape is [16, 1, 1, 1500]": "npu-mask",
    "TypeError: bad operand type for unary ~: 'NoneType'": "megatron-2d",
    "index 4247 is out of bounds for dimension 0 with size 4247": "megatron-2d",
    "IndexError: Dimension out of range (expected to be in range of [-2, 1], but got 2)": "megatron-2d",
    "RuntimeError: The size of tensor a (8) must match the size of tensor b (4) at dimension 1": "delivery",
    "bound_device_id": "gloo-device", "507008": "torch-npu-import",
    "No key says which tokens are padding: no mask may mean no padding": "padding-unknown", "repatch": "# mindspeed",
    "pad_between_seqs": "# megatron", "cu_seqlens": "* `kernels#the-recurrent-kernels`: ",
}  # fmt: skip
WORDS |= {message: name for name, messages in MESSAGES.items() for message in messages}
"""What is typed, or pasted from a log, and what the page itself names -> the row that comes first, or the page."""


def test_the_words_of_an_error_lead_to_their_row():
    for words, wanted in WORDS.items():
        found = read_page(words)
        assert wanted in found if wanted[0] in "#*" else re.search(r'<a id="([\w-]+)">', found)[1] == wanted, words


# --- what a user has

SAMPLES = [{"input_ids": [5, 6, 7, 8, 9, 256]}, {"input_ids": [3, 4, 256]}]  # 256 is eos, and pad
LABELLED = [{**sample, "labels": sample["input_ids"]} for sample in SAMPLES]
LEFT = Segments.from_lengths([6, 3], side="left")
IDS = torch.tensor([[5, 6, 7, 8, 9, 256], [256, 256, 256, 3, 4, 256]])
KEEP, COUNTED = LEFT.keep.long(), {"input_ids": IDS, "position_ids": LEFT.position_ids}
SHARDED, RANK = Segments.from_lengths([7], width=8, side="left"), ContextParallel(2, 0)
SHARDED_IDS = torch.arange(8)[None]
PADDED_RIGHT, KEEP_RIGHT = torch.tensor([[5, 6, 7, 8, 9, 256], [3, 4, 256, 256, 256, 256]]), KEEP.flip(1)
RIGHT, WRONG = 1e-4, 0.01
TOKENIZER = byte_tokenizer(padding_side="left")


@cache
def built(kind):
    """A tiny model; `eager` is a dense one."""
    if kind != "gpt2":
        attn = "eager" if kind == "eager" else "sdpa"
        return tiny_model("qwen3" if kind == "eager" else kind, vocab_size=257, attn_implementation=attn)
    config = transformers.GPT2Config(vocab_size=257, n_embd=64, n_layer=2, n_head=4, initializer_range=0.2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(config).eval()


def apart(model, logits):
    """The largest difference of a logit of a real token to its sample alone."""
    alone = torch.cat([model(input_ids=torch.tensor([sample["input_ids"]])).logits[0] for sample in SAMPLES])
    return float((logits - alone).abs().max())


def worst(n):
    batch = {key: value for key, value in n.batch.items() if key != "labels"}
    return apart(n.model, unpad(n.model(**batch).logits, LEFT))


def collated(n):
    return worst(SimpleNamespace(model=n.model, batch=n.collator(SAMPLES)))


def adapted(n):
    return worst(SimpleNamespace(model=n.model, batch=BatchAdapter(n.model)(n.batch)))


def flat(n):
    batch = {key: value for key, value in n.batch.items() if key != "labels"}
    return apart(n.model, n.model(**batch).logits[0])


def flat_collated(n):
    logits = n.model(**n.collator(SAMPLES), use_cache=False).logits[0]
    n.handle.remove()
    return apart(n.model, logits)


def loss_of_the_shorter(model, batch):
    """How far it is, beside the longer sample, from its own."""
    short, labels = torch.tensor([SAMPLES[1]["input_ids"]]), batch["labels"].clone()
    labels[0] = -100
    return abs(float(model(**{**batch, "labels": labels}).loss - model(input_ids=short, labels=short).loss))


def from_its_last_token(model, hidden):
    return float((hidden - model(input_ids=IDS[1:, 3:]).last_hidden_state[0, 2]).abs().max())


def router_loss(n):
    """How far it is, for the padded row of a batch, from that of the sample alone."""
    row, mask = n.batch["input_ids"][:1], n.batch["attention_mask"]
    alone = n.model(input_ids=torch.tensor([SAMPLES[1]["input_ids"]]), output_router_logits=True).aux_loss
    mask = {} if mask is None else {"attention_mask": mask[:1]}
    return abs(float(n.model(input_ids=row, output_router_logits=True, **mask).aux_loss - alone))


def loaded():
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": [5, 6, 7], "seq_lengths": [2, 1]}, {"input_ids": [3, 4], "seq_lengths": [2]}]
    collator, data = PaddingCollator(TOKENIZER, attention_mask="2d"), datasets.Dataset.from_list(rows)
    trainer = trainer_of(built("qwen3_next"), collator, tempfile.mkdtemp(), data, per_device_train_batch_size=2)
    return {"trainer": trainer, "batch": next(iter(trainer.get_train_dataloader()))}


def lost_sequences(n):
    return float("3 sequences" not in describe(next(iter(n.trainer.get_train_dataloader()))))


def holed():
    mask = dense(LEFT)
    mask[:, :, 5, 4] = False
    return mask


class Model(torch.nn.Module):
    def forward(self, input_ids, position_ids, attention_mask):
        return input_ids.sum()


def on(kind, **keys):
    """A model and a batch of these keys."""
    return lambda: {"model": built(kind), "batch": {**COUNTED, **keys}}


def by(kind, collator, samples=SAMPLES):
    """A model and what this collator makes of the samples."""
    return lambda: {"model": built(kind), "batch": dict(collator(samples)), "collator": collator, "samples": samples}


FLATTENED, SEQUENCES = transformers.DataCollatorWithFlattening, transformers.DataCollatorForLanguageModeling
NEXT, KINDS = "qwen3_next", ("full_attention", "linear_attention")
EMPTY = {"input_ids": torch.cat([IDS, torch.full((1, 6), 256)])}
EMPTY["attention_mask"] = (EMPTY["input_ids"] != 256).long()
BIAS, LONGER = dense(LEFT, polarity="bias"), [SAMPLES[1], {"input_ids": [3] + [6] * 30}]
MEGATRON = PaddingCollator(pad_token_id=256, consumer="megatron", model=transformers.AutoConfig.for_model(NEXT))
MINDSPEED = BatchAdapter(needs_mask_2d=True, consumer="mindspeed")
ROUTED = BatchAdapter(needs_mask_2d=True, consumer="megatron", padding_free=True)
BLOCKED, NEUTRAL = dense(LEFT, polarity="masked"), PaddingCollator(TOKENIZER)
LENGTHS = {"attention_mask": KEEP, "seq_lens": torch.tensor([[5], [3]])}
SIX, IN_2D = [{"input_ids": [5, 6, 7, 8, 9, 10]}], PaddingCollator(TOKENIZER, attention_mask="2d")
LABELS = SHARDED_IDS.masked_fill(~SHARDED.keep, -100)


def wide(n):
    return PaddingCollator(TOKENIZER, padding="max_length", max_length=131072)(SAMPLES)


def size(batch):
    return sum(value.nbytes for value in batch.values())


SITUATIONS = [
    # the row of the page, what is at hand, what is wrong (how far, or an error), what the look shows, and how far they
    # are once the page's code has run
    ("delivery", on(NEXT, attention_mask=dense(LEFT)), worst, "linear_attn", worst),
    ("delivery", on(NEXT, attention_mask=dense(LEFT), attention_mask_2d=LEFT.keep), worst, "goes on from padding", worst),
    ("delivery", on("qwen3", attention_mask=BLOCKED), worst, "more than causal", worst),
    *(
        ("delivery", on("eager", attention_mask=dense(LEFT).to(dtype)), worst, "self_attn", worst)
        for dtype in (torch.bool, torch.int8, torch.bfloat16)
    ),
    ("positions", by("gpt2", lambda rows: {"input_ids": IDS, "attention_mask": KEEP}), worst, "None", collated),
    ("packed-recurrent", by(NEXT, FLATTENED()), flat, "goes on from another sequence", flat_collated),
    (
        "labels", by(NEXT, SEQUENCES(TOKENIZER, mlm=False)),
        lambda n: transformers.DataCollatorWithPadding(TOKENIZER)(LABELLED),
        "-100", lambda n: loss_of_the_shorter(n.model, n.collator(n.samples)),
    ),
    (
        "labels", by(NEXT, lambda rows: {"input_ids": IDS.flip(1), "labels": IDS.flip(1), "attention_mask": KEEP.flip(1)}),
        lambda n: float((n.batch["labels"][:, -1] == 256).any()),
        "256", lambda n: loss_of_the_shorter(n.model, n.collator(n.samples)),
    ),
    (
        "wrong-token",
        lambda: {"model": built(NEXT).model, "batch": {"input_ids": PADDED_RIGHT, "attention_mask": KEEP_RIGHT}},
        lambda n: from_its_last_token(n.model, n.model(**n.batch).last_hidden_state[1, -1]),
        "tensor([256, 256]) tensor([1, 0])", lambda n: from_its_last_token(n.model, n.pooled[1]),
    ),
    (
        "router-loss", by("qwen3_moe", PaddingCollator(byte_tokenizer()), LONGER), router_loss, "attention_mask: None",
        lambda n: router_loss(SimpleNamespace(model=n.model, batch=n.collator(LONGER))),
    ),
    ("lost-column", loaded, lost_sequences, "input_ids", lost_sequences),
    (
        "shard-labels", lambda: {"batch": {"input_ids": SHARDED_IDS, "labels": LABELS}, "cp": RANK, "segments": SHARDED,
                                 "shard": split_batch({"input_ids": SHARDED_IDS, "labels": LABELS}, RANK)},
        lambda n: float(n.shard["labels"][0, 2] == 6), "tensor([[-100,    1,    6,    7]])",
        lambda n: float(n.shard["shift_labels"].tolist() != [[-100, 2, 7, -100]]),
    ),
    (
        "nan", lambda: on("eager", attention_mask=BIAS.masked_fill(BIAS < 0, -torch.inf), labels=IDS)() | {"segments": LEFT},
        lambda n: float(n.model(**n.batch).loss.isnan()), "tensor(3) rows see nothing", worst,
    ),
    ("polarity", on("qwen3", attention_mask=LEFT.keep[:, None, None]),
     lambda n: BatchAdapter(n.model, pattern="causal")(n.batch), "refused", worst),
    ("mask-pattern", lambda: on("qwen3", attention_mask=holed())() | {"keep": LEFT.keep}, adapted, "refused", worst),
    ("padding-unknown", lambda: on(NEXT)() | {"batch": {"input_ids": IDS}, "theirs": lambda rows: {"input_ids": IDS}},
     adapted, "padding: not known", collated),
    ("flat-row", by("qwen3", FLATTENED(return_position_ids=False)), lambda n: ROUTED(n.batch), "padding: not known",
     lambda n: float(ROUTED.with_segments(n.collator(SAMPLES))[1].lengths != ((6, 3),))),
    ("inverted-mask", lambda: on(NEXT)() | {"batch": EMPTY}, adapted, "⬚ ⬚ ⬚ ⬚ ⬚ ⬚",
     lambda n: float(n.collator([*SAMPLES, {"input_ids": [256]}])["attention_mask"].sum(1).tolist() != [6, 3, 1])),
    ("sources-disagree", on(NEXT, **LENGTHS), adapted, "padding: not known", adapted),
    ("causal-kernel", by("qwen3", NEUTRAL), lambda n: MINDSPEED(n.batch), "",
     lambda n: float(MINDSPEED(n.collator(SAMPLES))["attention_mask_2d"].sum(1).tolist() != [6, 3])),
    ("consumer", by(NEXT, NEUTRAL), lambda n: PaddingCollator(TOKENIZER, model=n.model.config),
     "attention_mask: bool [2, 1, 6, 6]", collated),
    ("consumer", by(NEXT, NEUTRAL), worst, "attention_mask: bool [2, 1, 6, 6]", collated),
    ("shard-width", lambda: {"cp": RANK}, lambda n: split_batch(IN_2D(SIX), RANK), "4",
     lambda n: float(split_batch(n.collator(SIX), RANK)["input_ids"].shape != (1, 4))),
    ("mask-memory", by("qwen3", NEUTRAL), wide, "attention_mask: bool",
     lambda n: float(n.collator(SAMPLES)["attention_mask_2d"].tolist()[1] != [True] * 3 + [False] * 3)),
    ("none-dispatch", by("qwen3", PaddingCollator(pad_token_id=256)), lambda n: concatenate([n.batch, n.batch]),
     "attention_mask: None", lambda n: float(concatenate([n.collator(SAMPLES)] * 2)["attention_mask_2d"].shape != (4, 6))),
    ("unexpected-keyword", lambda: {"model": Model(), "batch": MEGATRON(SAMPLES)}, lambda n: n.model(**n.batch),
     "attention_mask_2d", lambda n: float(not n.loss > 0)),
    ("slow-workers", by("qwen3", NEUTRAL, [{"input_ids": [5] * n} for n in (300, 512)]),
     lambda n: size(n.batch), "attention_mask: bool [2, 1, 512, 512]",
     lambda n: float(size(n.batch) < 20 * size(n.collator(n.samples)))),
]  # fmt: skip
if MISSING_KERNEL_RAISES.holds():  # older releases of transformers take no mapping
    BY_KIND = on(NEXT, attention_mask=dict.fromkeys(KINDS, dense(LEFT)))
    SITUATIONS += [
        ("delivery", BY_KIND, lambda n: n.model(**n.batch), "must match the size", worst),
        ("packed-recurrent", by(NEXT, FLATTENED(return_flash_attn_kwargs=True, return_seq_idx=True)),
         flat, "", flat_collated),
    ]  # fmt: skip
LOOKS = {"check_delivery": collate_npu.check_delivery, "describe": describe, "picture": picture}
OURS = {name: getattr(collate_npu, name) for name in collate_npu.__all__}
"""What the page does not import."""


def outcome(call):
    """A number, or the error that the page speaks of; one of ours names the row of the page."""
    try:
        return call()
    except (CollateError, ValueError, TypeError, RuntimeError) as error:
        return error


def seen(name, names):
    """What the page's look prints, or raises. The page says which look it is where a row names none."""
    look, lines = re.match(r"`?([^`]*)", said(ROWS[name], "See") or "`print(describe(batch))`")[1], []
    names = {**LOOKS, **names, "print": lambda *words: lines.append(" ".join(map(str, words)))}
    error = None if look.startswith("collate-npu ") else outcome(lambda: exec(look, names))
    return "\n".join([*lines, str(error or "")]), error


def is_of_the_page(error, name):
    """It has the words of this row, and one of ours names it."""
    assert any(message in str(error) for message in MESSAGES[name])
    assert isinstance(error, CollateError) == str(error).endswith(f"\nMore: collate-npu guide errors#{name}")
    return True


@torch.no_grad()
@pytest.mark.parametrize(("name", "given", "wrong", "words", "after"), SITUATIONS, ids=[name for name, *_ in SITUATIONS])
def test_a_row_is_reproduced_seen_and_mended(name, given, wrong, words, after):
    names = {"tokenizer": TOKENIZER, "samples": SAMPLES, **given()}
    found, (text, error) = outcome(lambda: wrong(SimpleNamespace(**names))), seen(name, names)
    assert words in text
    assert is_of_the_page(found, name) if isinstance(found, Exception) else found > WRONG
    assert name != "delivery" or is_of_the_page(error, name)
    names = {**OURS, **names}
    (code,) = (code for kind, code in code_of(ROWS[name]) if kind == "python")
    exec(compile(code, f"errors.md#{name}", "exec"), names)
    assert after(SimpleNamespace(**names)) < RIGHT


TYPED = """
from collate_npu import PaddingCollator
PaddingCollator(pad_token_id=0, padding_side="left")([{"input_ids": [1]}, {"input_ids": [1, 2]}])
"""


def test_a_batch_for_nobody_in_particular_warns_at_the_line_that_collates():
    said = subprocess.run([sys.executable, "-c", TYPED], capture_output=True, text=True, check=True).stderr
    assert re.search(rf"<string>:3: UserWarning: .*{re.escape(MESSAGES['consumer'][1])}", said)
