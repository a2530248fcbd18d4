"""guide/errors.md: each row is reproduced on the real packages, seen as the page says, and mended by its code.

A test of the row's name runs it; a row whose stack is not installed here names the test that reproduces it there.
"""

import re
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from torch.utils.data import default_collate  # noqa: E402
from trained import trainer_of  # noqa: E402

import collate_npu  # noqa: E402
from collate_npu import BatchAdapter, CollateError, PaddingCollator, Segments, describe, split_batch, unpad  # noqa: E402
from collate_npu.collate.collators import _warn_of_neutral_form  # noqa: E402
from collate_npu.errors import AmbiguousMaskError, PolarityError, UnsupportedFormError  # noqa: E402
from collate_npu.masks import dense  # noqa: E402
from collate_npu.parallel import ContextParallel  # noqa: E402
from collate_npu.releases import MISSING_KERNEL_RAISES  # noqa: E402
from collate_npu.testing import byte_tokenizer, tiny_model  # noqa: E402
from collate_npu.tools.show import picture  # noqa: E402

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "collate_npu" / "guide"
TEXT = (GUIDE / "errors.md").read_text(encoding="utf-8")

ELSEWHERE = {
    "megatron-2d": "tests/peers/test_mcore_bridge.py::test_its_cells "
    "tests/peers/test_swift_megatron.py::test_off_an_npu_mlp_padding_free_gets_the_dense_mask_it_reads",
    "torch-npu-import": "tests/npu/test_wheel.py::test_without_cann_torch_itself_names_the_switch",
    "npu-mask": "tests/proof/test_known_kernels.py::test_the_vendors_verdict_on_masks_holds",
    "ranks-apart": "tests/distributed/test_distributed_agreement.py::"
    "test_every_rank_raises_where_one_is_odd_at_the_second_step_of_a_shape",
    "gloo-device": "tests/parallel/test_layout.py::"
    "test_a_gloo_group_is_made_where_the_world_is_bound_to_a_device_that_gloo_does_not_know",
    "fla-cpu": "tests/tools/env/test_env.py::test_a_hazard_is_told_where_it_is_and_nowhere_else",
}


@dataclass(frozen=True)
class Row:
    name: str
    title: str
    text: str

    def said(self, label):
        """What stands behind `**Says:**` and the like."""
        found = re.search(rf"^\*\*{label}[:：]\*\* (.+)$", self.text, flags=re.M)
        return found[1] if found else ""

    @property
    def messages(self):
        """Each error that it names."""
        return [text for _, text in re.findall(r"(`+)((?:(?!\1).)+)\1", self.said("Says"))]

    @property
    def look(self):
        """The line that shows it; the page says which where it names none."""
        return re.match(r"`?([^`]*)", self.said("See") or "`print(describe(batch))`")[1]

    @property
    def code(self):
        return re.findall(r"^```(\w+)\n(.*?)^```$", self.text, flags=re.M | re.S)


def rows_of(text):
    parts = re.split(r'^### <a id="([\w-]+)"></a>(.*)\n', text, flags=re.M)
    return {name: Row(name, *rest) for name, *rest in zip(parts[1::3], parts[2::3], parts[3::3])}


ROWS = rows_of(TEXT)
CHINESE = (GUIDE / "zh" / "errors.md").read_text(encoding="utf-8")


def mended(name, **names):
    """The names after the page's code has run on these."""
    (code,) = (code for kind, code in ROWS[name].code if kind == "python")
    names = {**OURS, **names}
    exec(compile(code, f"errors.md#{name}", "exec"), names)
    return names


LOOKS = {"check_delivery": collate_npu.check_delivery, "describe": describe, "picture": picture}
OURS = {name: getattr(collate_npu, name) for name in collate_npu.__all__}
"""What the page does not import."""


def seen(name, **names):
    """What the page's look at it prints, or raises."""
    said = []
    shown = {"print": lambda *words: said.append(" ".join(map(str, words))), **LOOKS, **names}
    exec(compile(ROWS[name].look, f"errors.md#{name}", "exec"), shown)
    return "\n".join(said)


def refused(name, error, **names):
    """The look at it raises, and returns what is said."""
    with pytest.raises(error) as caught:
        seen(name, **names)
    return str(caught.value)


def says(name, error, run):
    """What runs stops with the words of the page."""
    with pytest.raises(error) as caught:
        run()
    text = str(caught.value)
    assert any(message in text for message in ROWS[name].messages)
    assert isinstance(caught.value, CollateError) == text.endswith(f"\nMore: collate-npu guide errors#{name}")


def test_every_row_has_a_test_and_every_test_a_row():
    tests = {name.removeprefix("test_row_").replace("_", "-") for name in globals() if name.startswith("test_row_")}
    assert tests | set(ELSEWHERE) == set(ROWS)
    assert not tests & set(ELSEWHERE)
    assert "Where **See** is missing: `print(describe(batch))`." in TEXT
    for name, row in ROWS.items():
        assert row.said("Why").endswith("."), name
        assert [kind for kind, _ in row.code] in (["python"], ["console"]), name


def test_the_chinese_page_has_the_same_rows_errors_and_code():
    chinese = rows_of(CHINESE)
    assert list(chinese) == list(ROWS)
    for name, row in ROWS.items():
        assert chinese[name].code == row.code
        assert chinese[name].said("报错") == row.said("Says")
        assert re.findall("`[^`]+`", chinese[name].said("查看")) == re.findall("`[^`]+`", row.said("See"))
        assert chinese[name].said("原因").endswith("。")


def test_a_row_of_another_stack_is_reproduced_there():
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
WORDS |= {message: name for name, row in ROWS.items() for message in row.messages}
"""What is typed, or pasted from a log, and what the page itself names -> the row that comes first, or the page."""


@pytest.mark.parametrize("words", WORDS)
def test_the_words_of_an_error_lead_to_their_row(words):
    found, wanted = pytest.importorskip("collate_npu.tools.cli").read_page(words), WORDS[words]
    if wanted[0] in "#*":
        assert wanted in found
    else:
        assert re.search(r'<a id="([\w-]+)">', found)[1] == wanted


SAMPLES = [{"input_ids": [5, 6, 7, 8, 9, 256]}, {"input_ids": [3, 4, 256]}]  # 256 is eos, and pad
LEFT = Segments.from_lengths([6, 3], side="left")
ONES_AND_ZEROS = (torch.bool, torch.int8, torch.bfloat16)
IDS = torch.tensor([[5, 6, 7, 8, 9, 256], [256, 256, 256, 3, 4, 256]])


@cache
def built(kind):
    """A tiny model; `eager` is a dense one."""
    attn = "eager" if kind == "eager" else "sdpa"
    return tiny_model("qwen3" if kind == "eager" else kind, vocab_size=257, attn_implementation=attn)


@pytest.fixture
def hybrid():
    return built("qwen3_next")


@pytest.fixture
def tokenizer():
    return byte_tokenizer(padding_side="left")


@torch.no_grad()
def apart(model, logits):
    """The largest difference of a logit of a real token to its sample alone."""
    alone = torch.cat([model(input_ids=torch.tensor([sample["input_ids"]])).logits[0] for sample in SAMPLES])
    return float((logits - alone).abs().max())


@torch.no_grad()
def worst(model, **batch):
    return apart(model, unpad(model(**batch).logits, LEFT))


RIGHT, WRONG = 1e-4, 0.5


SILENT = [
    ("qwen3_next", {"attention_mask": dense(LEFT)}, "linear_attn"),
    ("qwen3_next", {"attention_mask": dense(LEFT), "attention_mask_2d": LEFT.keep}, "goes on from padding"),
    ("qwen3", {"attention_mask": dense(LEFT, polarity="masked")}, "more than causal"),
    *(("eager", {"attention_mask": dense(LEFT).to(dtype)}, "self_attn") for dtype in ONES_AND_ZEROS),
]


@pytest.mark.parametrize(("kind", "handed", "words"), SILENT)
def test_row_delivery(kind, handed, words):
    model, batch = built(kind), {"input_ids": IDS, "position_ids": LEFT.position_ids, **handed}
    assert worst(model, **batch) > WRONG
    says("delivery", CollateError, lambda: collate_npu.check_delivery(model, batch))
    assert words in refused("delivery", CollateError, model=model, batch=batch)
    assert worst(model, **mended("delivery", model=model, batch=batch)["batch"]) < RIGHT
    if kind == "qwen3_next" and MISSING_KERNEL_RAISES.holds():  # older ones take no mapping
        batch = {"input_ids": IDS, "attention_mask": dict.fromkeys(("full_attention", "linear_attention"), dense(LEFT))}
        says("delivery", RuntimeError, lambda: model(**batch))
        assert worst(model, **mended("delivery", model=model, batch=batch)["batch"]) < RIGHT


def test_row_positions(tokenizer):
    config = transformers.GPT2Config(vocab_size=257, n_embd=64, n_layer=2, n_head=4, initializer_range=0.2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        gpt2 = transformers.GPT2LMHeadModel(config).eval()
    batch = {"input_ids": IDS, "attention_mask": LEFT.keep.long()}
    assert worst(gpt2, **batch) > WRONG
    assert seen("positions", batch=batch) == "None"
    batch = mended("positions", model=gpt2, tokenizer=tokenizer)["collator"](SAMPLES)
    assert seen("positions", batch=batch) != "None"
    assert worst(gpt2, **batch) < RIGHT


def test_row_packed_recurrent(hybrid, tokenizer):
    batch = transformers.DataCollatorWithFlattening()(SAMPLES)
    told = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(SAMPLES)
    del batch["labels"], told["labels"]
    with torch.no_grad():
        assert apart(hybrid, hybrid(**batch).logits[0]) > WRONG
    assert "goes on from another sequence" in refused("packed-recurrent", CollateError, model=hybrid, batch=batch)
    if MISSING_KERNEL_RAISES.holds():
        says("packed-recurrent", ValueError, lambda: hybrid(**told))
    made = mended("packed-recurrent", model=hybrid, tokenizer=tokenizer)
    logits = hybrid(**made["collator"](SAMPLES), use_cache=False).logits[0]
    made["handle"].remove()
    assert apart(hybrid, logits) < RIGHT


@torch.no_grad()
def test_row_labels(hybrid, tokenizer):
    """They do not batch; those of a real eos are lost; those of padding are learned."""
    labelled = [{**sample, "labels": sample["input_ids"]} for sample in SAMPLES]
    says("labels", ValueError, lambda: transformers.DataCollatorWithPadding(tokenizer)(labelled))
    with pytest.raises(RuntimeError, match="equal size"):
        default_collate([{key: torch.tensor(row) for key, row in sample.items()} for sample in labelled])
    assert "256" not in seen("labels", batch=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)(SAMPLES))
    short = torch.tensor([SAMPLES[1]["input_ids"]])
    alone = float(hybrid(input_ids=short, labels=short).loss)
    wide = IDS[1:].roll(3, 1)  # padded right, beside a longer sample
    batch = {"input_ids": wide, "labels": wide.clone(), "attention_mask": LEFT.keep[1:].roll(3, 1)}
    assert abs(float(hybrid(**batch).loss) - alone) > 0.01
    assert "-100" not in seen("labels", batch=batch)
    fixed = mended("labels", model=hybrid, tokenizer=tokenizer, samples=SAMPLES)
    padded = fixed["collator"](fixed["samples"])
    assert padded["labels"][:, -1].tolist() == [256, 256]
    padded["labels"][0] = -100  # the loss of the shorter sample, beside the longer one
    assert float(hybrid(**padded).loss) == pytest.approx(alone, abs=RIGHT)


@torch.no_grad()
def test_row_wrong_token(hybrid):
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, pad_token_id=256
    )
    head = transformers.LlamaForSequenceClassification(config).eval()
    whole, cut = (head(input_ids=torch.tensor([SAMPLES[1]["input_ids"][:n]])).logits for n in (3, 2))
    assert torch.equal(whole, cut), "the head does not read the token before eos any more"
    right = Segments.from_lengths([6, 3])
    ids = torch.tensor([[5, 6, 7, 8, 9, 256], [3, 4, 256, 256, 256, 256]])
    batch = {"input_ids": ids, "attention_mask": right.keep.long()}
    assert seen("wrong-token", batch=batch) == "tensor([256, 256]) tensor([1, 0])"
    pooled = mended("wrong-token", model=hybrid.model, batch=batch)["pooled"]
    alone = hybrid.model(input_ids=ids[1:, :3]).last_hidden_state[0, 2]
    assert float((pooled[1] - alone).abs().max()) < RIGHT
    assert float((hybrid.model(**batch).last_hidden_state[1, -1] - alone).abs().max()) > 0.05
    assert torch.equal(pooled, collate_npu.last_token(hybrid.model(**batch).last_hidden_state, right))


@torch.no_grad()
def test_row_router_loss(tokenizer):
    moe = tiny_model("qwen3_moe", vocab_size=257)
    moe.config.output_router_logits = True
    tokenizer.padding_side = "right"
    right = [{"input_ids": [3, 4, 5]}, {"input_ids": [3] + [6] * 30}]
    alone = float(moe(input_ids=torch.tensor([[3, 4, 5]])).aux_loss)
    batch = PaddingCollator(tokenizer)(right)
    assert "attention_mask: None" in seen("router-loss", batch=batch)
    row = {"input_ids": batch["input_ids"][:1]}
    assert abs(float(moe(**row).aux_loss) - alone) > 0.05
    mask = mended("router-loss", model=moe, tokenizer=tokenizer)["collator"](right)["attention_mask"][:1]
    assert float(moe(**row, attention_mask=mask).aux_loss) == pytest.approx(alone, abs=RIGHT)


def test_row_lost_column(hybrid, tokenizer, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": [5, 6, 7], "seq_lengths": [2, 1]}, {"input_ids": [3, 4], "seq_lengths": [2]}]

    def trainer():
        collator, data = PaddingCollator(tokenizer, attention_mask="2d"), datasets.Dataset.from_list(rows)
        return trainer_of(hybrid, collator, tmp_path, data, per_device_train_batch_size=2)

    assert "3 sequences" not in seen("lost-column", batch=next(iter(trainer().get_train_dataloader())))
    declared = mended("lost-column", trainer=trainer())["trainer"]
    assert "3 sequences" in seen("lost-column", batch=next(iter(declared.get_train_dataloader())))


def test_row_shard_labels():
    segments, cp = Segments.from_lengths([7], width=8, side="left"), ContextParallel(2, 0)
    ids = torch.arange(8)[None]
    batch = {"input_ids": ids, "labels": ids.masked_fill(~segments.keep, -100)}

    def pairs(shard, targets):
        return set(zip(shard["input_ids"][0].tolist(), targets.tolist())) - {(n, -100) for n in range(8)}

    true = {(n, n + 1) for n in range(1, 7)} | {(0, 1)}  # the padding before the first token predicts it: ignored later
    shards = [split_batch(batch, ContextParallel(2, rank)) for rank in (0, 1)]
    split_first = set().union(*(pairs(shard, shard["labels"][0, 1:]) for shard in shards))
    assert (1, 6) in split_first
    assert seen("shard-labels", shard=shards[0]) == "tensor([[-100,    1,    6,    7]])"
    fixed = [mended("shard-labels", batch=dict(batch), cp=cp.with_rank(rank), segments=segments) for rank in (0, 1)]
    shifted = set().union(*(pairs(one["shard"], one["shard"]["shift_labels"][0]) for one in fixed))
    assert shifted == true - {(0, 1)}


@torch.no_grad()
def test_row_nan():
    eager = built("eager")
    bias = dense(LEFT, polarity="bias")
    batch = {"input_ids": IDS, "attention_mask": bias.masked_fill(bias < 0, -torch.inf), "labels": IDS}
    batch["position_ids"] = LEFT.position_ids
    assert torch.isnan(eager(**batch).loss)
    assert seen("nan", batch=batch) == "tensor(3) rows see nothing"
    batch = mended("nan", model=eager, batch=batch, segments=LEFT)["batch"]
    assert torch.isfinite(eager(**batch).loss)
    assert worst(eager, **{key: value for key, value in batch.items() if key != "labels"}) < RIGHT


def test_row_consumer(hybrid, tokenizer):
    says("consumer", CollateError, lambda: PaddingCollator(tokenizer, model=hybrid.config))
    _warn_of_neutral_form.cache_clear()  # it warns once a process
    with pytest.warns(UserWarning, match=re.escape(ROWS["consumer"].messages[1])) as warned:
        batch = PaddingCollator(tokenizer)(SAMPLES)
    assert {each.filename for each in warned} == {__file__}, "the line that collates"
    assert "attention_mask: bool [2, 1, 6, 6]" in seen("consumer", batch=batch)
    assert worst(hybrid, **batch) > WRONG
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = mended("consumer", model=hybrid, tokenizer=tokenizer)["collator"](SAMPLES)
    assert worst(hybrid, **batch) < RIGHT


def test_row_polarity():
    attention = built("qwen3")
    batch = {"input_ids": IDS, "attention_mask": LEFT.keep[:, None, None]}
    says("polarity", PolarityError, lambda: BatchAdapter(attention, pattern="causal")(batch))
    assert "refused" in seen("polarity", batch=batch)
    assert worst(attention, **mended("polarity", model=attention, batch=batch)["batch"]) < RIGHT


def test_row_mask_pattern():
    attention, holed = built("qwen3"), dense(LEFT)
    holed[:, :, 5, 4] = False
    batch = {"input_ids": IDS, "position_ids": LEFT.position_ids, "attention_mask": holed}
    says("mask-pattern", AmbiguousMaskError, lambda: BatchAdapter(attention)(batch))
    assert "refused" in seen("mask-pattern", batch=batch)
    assert worst(attention, **mended("mask-pattern", model=attention, batch=batch, keep=LEFT.keep)["batch"]) < RIGHT


def test_row_sources_disagree(hybrid):
    batch = {"input_ids": IDS, "attention_mask": LEFT.keep.long(), "seq_lens": torch.tensor([[5], [3]])}
    says("sources-disagree", CollateError, lambda: BatchAdapter(hybrid)(batch))
    assert "padding: not known" in seen("sources-disagree", batch=batch)
    assert worst(hybrid, **BatchAdapter(hybrid)(mended("sources-disagree", batch=batch)["batch"])) < RIGHT


def test_row_padding_unknown(hybrid):
    def theirs(samples):
        return {"input_ids": IDS}

    says("padding-unknown", AmbiguousMaskError, lambda: BatchAdapter(hybrid)(theirs(SAMPLES)))
    assert "padding: not known" in seen("padding-unknown", batch=theirs(SAMPLES))
    assert worst(hybrid, **mended("padding-unknown", model=hybrid, theirs=theirs)["collator"](SAMPLES)) < RIGHT


def test_row_flat_row():
    adapter = BatchAdapter(needs_mask_2d=True, consumer="megatron", padding_free=True)
    batch = dict(transformers.DataCollatorWithFlattening(return_position_ids=False)(SAMPLES))
    says("flat-row", AmbiguousMaskError, lambda: adapter(batch))
    assert "padding: not known" in seen("flat-row", batch=batch)
    assert adapter.with_segments(mended("flat-row")["collator"](SAMPLES))[1].lengths == ((6, 3),)


def test_row_inverted_mask(hybrid, tokenizer):
    samples = [*SAMPLES, {"input_ids": [256]}]
    batch = {"input_ids": torch.cat([IDS, torch.full((1, 6), 256)])}
    batch["attention_mask"] = (batch["input_ids"] != tokenizer.pad_token_id).long()
    says("inverted-mask", CollateError, lambda: BatchAdapter(hybrid)(batch))
    assert "⬚ ⬚ ⬚ ⬚ ⬚ ⬚" in seen("inverted-mask", batch=batch)
    fixed = mended("inverted-mask", model=hybrid, tokenizer=tokenizer)["collator"](samples)
    assert fixed["attention_mask"].sum(1).tolist() == [6, 3, 1]


def test_row_unexpected_keyword():
    class Model(torch.nn.Module):
        def forward(self, input_ids, position_ids, attention_mask):
            return input_ids.sum()

    config = transformers.AutoConfig.for_model("qwen3_next")
    batch = PaddingCollator(pad_token_id=256, consumer="megatron", model=config)(SAMPLES)
    says("unexpected-keyword", TypeError, lambda: Model()(**batch))
    assert "attention_mask_2d" in seen("unexpected-keyword", batch=batch)
    assert mended("unexpected-keyword", model=Model(), batch=batch)["loss"] > 0


def test_row_none_dispatch():
    from accelerate.utils.operations import concatenate

    collator = PaddingCollator(pad_token_id=256)
    batch = collator(SAMPLES)
    says("none-dispatch", TypeError, lambda: concatenate([batch, batch]))
    assert "attention_mask: None" in seen("none-dispatch", batch=batch)
    batch = mended("none-dispatch", collator=collator)["collator"](SAMPLES)
    assert concatenate([batch, batch])["attention_mask_2d"].shape == (4, 6)


def test_row_shard_width(tokenizer):
    samples, cp = [{"input_ids": [5, 6, 7, 8, 9, 10]}], ContextParallel(2, 0)
    batch = PaddingCollator(tokenizer, attention_mask="2d")(samples)
    says("shard-width", CollateError, lambda: split_batch(batch, cp))
    assert seen("shard-width", cp=cp) == "4"
    batch = mended("shard-width", tokenizer=tokenizer, cp=cp)["collator"](samples)
    assert split_batch(batch, cp)["input_ids"].shape == (1, 4)


def test_row_causal_kernel(tokenizer):
    adapter = BatchAdapter(needs_mask_2d=True, consumer="mindspeed")
    says("causal-kernel", UnsupportedFormError, lambda: adapter(PaddingCollator(tokenizer)(SAMPLES)))
    batch = adapter(mended("causal-kernel", tokenizer=tokenizer)["collator"](SAMPLES))
    assert batch["attention_mask"] is None
    assert batch["attention_mask_2d"].sum(1).tolist() == [6, 3]


def test_row_mask_memory(tokenizer):
    wide = PaddingCollator(tokenizer, padding="max_length", max_length=131072)
    says("mask-memory", UnsupportedFormError, lambda: wide(SAMPLES))
    batch = mended("mask-memory", tokenizer=tokenizer)["collator"](SAMPLES)
    assert batch["attention_mask_2d"].tolist()[1] == [True] * 3 + [False] * 3, seen("mask-memory", batch=batch)


def test_row_slow_workers(tokenizer):
    samples = [{"input_ids": [5] * n} for n in (300, 512)]

    def size(batch):
        return sum(value.nbytes for value in batch.values())

    sent = PaddingCollator(tokenizer)(samples)
    assert "attention_mask: bool [2, 1, 512, 512]" in seen("slow-workers", batch=sent)
    batch = mended("slow-workers", tokenizer=tokenizer)["collator"](samples)
    assert size(sent) > 20 * size(batch)
    built = BatchAdapter(needs_mask_2d=True, consumer="megatron")(batch)
    assert built["attention_mask"].shape == (2, 1, 512, 512)
