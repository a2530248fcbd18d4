"""slime, miles, vime, Relax, ROLL, MindSpeed-MM on the real megatron-core: what their batches compute, where ours stops.

Their batches are rebuilt after their sources (rl_batches.py), their loop in small. Megatron's own Gated DeltaNet takes flat
rows from 0.18 on; the layer of slime's plugins does so on any release. Attention and fla's kernels are stand-ins.
"""

import sys
from functools import partial
from importlib.metadata import version
from types import ModuleType, SimpleNamespace

import pytest
import rl_batches as batches
import rl_world as world
import torch
from megatron_world import gaps, gpt

from collate_npu import BatchAdapter, CollateError, Segments
from collate_npu.errors import UnsupportedFormError
from collate_npu.integrations import megatron, slime
from collate_npu.integrations.megatron import packed_seq_params
from collate_npu.integrations.slime import before_log_prob, before_train_step
from collate_npu.kernels.fusion_attention import reference_fusion_attention, triangle

NEEDS = ("megatron",)
EXACT, WRONG, IMPORTS = 1e-4, 1e-1, 120
LENGTHS = [len(row) for row in world.SAMPLES]
NATIVE = int(version("megatron-core").split(".")[1]) >= 18
KINDS = ("plugged", "native") if NATIVE else ("plugged",)
needs_native = pytest.mark.skipif(not NATIVE, reason="Gated DeltaNet takes flat rows from megatron-core 0.18 on")
ARGS = SimpleNamespace(allgather_cp=False, context_parallel_size=1)


@pytest.fixture(scope="module", autouse=True)
def cpu():
    with pytest.MonkeyPatch.context() as patch:
        world.on_a_cpu(patch)
        yield


@pytest.fixture(scope="module")
def by_itself(cpu):
    return {kind: world.alone(getattr(world, kind)()) for kind in KINDS}


@pytest.fixture(scope="module")
def pool(cpu, ranks):
    ranks(2)("rl_world.start", seconds=IMPORTS)
    return ranks(2)


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """As in a new one."""
    here = slime._Process()
    monkeypatch.setattr(slime, "_HERE", here)
    yield here
    if here.watch is not None:
        here.watch.end()


# --- what they hand over is right, on one rank and on two


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("make", "held"), [("slime", None), ("roll_packed", [16] * 4)])
def test_every_sample_of_their_flat_rows_equals_itself_alone(by_itself, kind, make, held):
    model = getattr(world, kind)()
    apart = gaps(world.learned(model, [getattr(batches, make)(world.SAMPLES)], [LENGTHS], held), by_itself[kind])
    assert max(apart.values()) <= EXACT, apart


@needs_native
@pytest.mark.parametrize("make", ["bshd", "roll_padded"])
def test_rows_padded_right_are_exact_without_a_word_of_padding(by_itself, make):
    apart = gaps(world.learned(world.native(), [getattr(batches, make)(world.SAMPLES)], [LENGTHS]), by_itself["native"])
    assert max(apart.values()) <= EXACT, apart


def test_the_plugged_layer_takes_no_padded_rows():
    with pytest.raises(AssertionError):
        world.plugged()(**batches.bshd(world.SAMPLES))


@needs_native
@pytest.mark.parametrize("make", ["slime", "roll_packed"])
def test_and_on_two_ranks_where_the_kernels_of_whole_rows_are_judged(pool, by_itself, make):
    for found in pool("rl_world.together", make, seconds=IMPORTS):
        apart = gaps(found, by_itself["native"])
        assert max(apart.values()) <= EXACT, apart
        assert len(found["told"]) == 1, found["told"]
        assert "(1 compared with their batch)" in found["told"][0]


@needs_native
def test_a_rule_that_lost_its_boundaries_is_told_on_two_ranks_too(pool, by_itself):
    for found in pool("rl_world.together", "slime", True, seconds=IMPORTS):
        assert gaps(found, by_itself["native"])["logits"] > WRONG
        assert "goes on from another sequence" in found["told"][0]


@needs_native
@pytest.mark.parametrize("side", ["right", "left"])
def test_mindspeed_mm_drops_its_mask_which_is_exact_padded_right_alone(by_itself, side):
    """Its Qwen3.5 calls the language model with None (modeling_qwen3_5.py:445-456)."""
    batch = batches.mindspeed_mm(world.SAMPLES, side=side)
    adapter = BatchAdapter(needs_mask_2d=True, consumer="mindspeed_mm")
    with torch.no_grad():
        out = world.native()(input_ids=batch["input_ids"], position_ids=None, attention_mask=None)
    found = [row[keep.bool()] for row, keep in zip(out, batch["attention_mask"])]
    lost = max(float((x - y).abs().max()) for x, y in zip(found, by_itself["native"]["logits"]))
    if side == "right":
        assert lost < EXACT
        assert adapter(batch)["attention_mask"] is None
    else:
        assert lost > WRONG
        with pytest.raises(UnsupportedFormError, match=r"MindSpeed-MM computes plain causal attention.*Pad right"):
            adapter(batch)


def test_rolls_mask_of_two_dimensions_is_refused_by_megatrons_local_attention():
    """An int64 mask [B, S] goes to `masked_fill_`; TransformerEngine's causal kernels do not look at it."""
    with pytest.raises(RuntimeError, match="boolean mask"):
        gpt("aa", flash=None)(**batches.roll_padded(world.SAMPLES))


@pytest.mark.parametrize("here", [False, True])
def test_beside_transformer_engine_npu_offsets_say_where_sequences_stand(monkeypatch, here):
    """Its one public caller hands on `cu_seqlens_q` alone, for places in the row."""
    monkeypatch.setattr(megatron, "npu_engine", lambda: here)
    params = packed_seq_params(Segments([[1, 1, 1, 0, 2, 2, 2, 2]]))
    assert params.cu_seqlens_q.tolist() == ([0, 4, 8] if here else [0, 3, 7])
    assert params.cu_seqlens_q_padded.tolist() == [0, 4, 8]


# --- the hooks: quiet where it is right, words where it is not


def trained(model, steps=3, micro_batches=2, args=ARGS):
    """The loop of slime's model.py in small: log-probabilities, then steps of some micro-batches each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rows = [world.SAMPLES, world.SAMPLES[1:], world.SAMPLES[:1]]
    before_log_prob(args, [model], "ref_")
    with torch.no_grad():
        model(**batches.slime(world.SAMPLES[::-1]))
    for step in range(steps):
        before_train_step(args, 0, step, [model], optimizer, None)
        for n in range(micro_batches):
            inputs = batches.slime(rows[(step + n) % 3])
            (model(**inputs).log_softmax(-1)[..., 0] * inputs["loss_mask"]).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_run_is_told_in_one_line_and_runs_as_it_did(kind, capsys, process):
    plain = torch.nn.Module._call_impl
    trained(getattr(world, kind)())
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.count("\n") == 1
    assert said.out.startswith("collate_npu: 1 steps, 3 forwards (3 compared with their batch), kernels: ")
    assert said.out.endswith("no fault in what was looked at\n")
    assert torch.nn.Module._call_impl is plain
    assert process.watch.forwards == []


class RuleUntold(world.VarlenGatedDeltaNet):
    """slime pull request 1686."""

    def forward(self, hidden_states, cu_seqlens=None):
        rule, self.chunk_gated_delta_rule = self.chunk_gated_delta_rule, self.untold
        try:
            return super().forward(hidden_states, cu_seqlens)
        finally:
            self.chunk_gated_delta_rule = rule

    def untold(self, *args, cu_seqlens=None, **kwargs):
        return world.chunk_gated_delta_rule(*args, **kwargs)


class ConvolutionUntold(world.VarlenGatedDeltaNet):
    """LLaMA-Factory pull request 10436, and slime before 1686 turned round."""

    def forward(self, hidden_states, cu_seqlens=None):
        told, world.causal_conv1d = world.causal_conv1d, partial(untold, world.causal_conv1d)
        try:
            return super().forward(hidden_states, cu_seqlens)
        finally:
            world.causal_conv1d = told


def untold(original, *args, cu_seqlens=None, **kwargs):
    return original(*args, **kwargs)


class Mailbox(world.VarlenGatedDeltaNet):
    """miles pull request 2213: boundaries of the first batch are kept for the next ones."""

    left = None

    def forward(self, hidden_states, cu_seqlens=None):
        self.left = cu_seqlens if self.left is None else self.left
        end = min(int(self.left[-1]), hidden_states.shape[1])
        kept = torch.tensor([*[n for n in self.left.tolist() if n < end], hidden_states.shape[1]], dtype=torch.int32)
        return super().forward(hidden_states, kept)


class LeftOut(world.VarlenGatedDeltaNet):
    """miles pull request 2213: a family that was not patched, and said "applied"."""

    def forward(self, hidden_states, cu_seqlens=None):
        return super().forward(hidden_states)


FAULTS = {
    RuleUntold: "world.chunk_gated_delta_rule: told nothing",
    ConvolutionUntold: "world.causal_conv1d: told nothing",
    Mailbox: r"told \[0, ",
    LeftOut: "world.causal_conv1d: told nothing",
}


def faulty(layer):
    model = world.plugged()
    for n in (0, 2):
        attention = model.decoder.layers[n].self_attention
        made = layer()
        made.load_state_dict(attention.linear_attn.state_dict())
        attention.linear_attn = made
    return model


@pytest.mark.parametrize("layer", FAULTS)
def test_the_faults_of_their_threads_stop_the_first_step(layer, by_itself):
    batch, model = [batches.slime(world.SAMPLES[::-1]), batches.slime(world.SAMPLES)], faulty(layer)
    found = world.learned(model, batch, [LENGTHS[::-1], LENGTHS])
    assert gaps({**found, "logits": found["logits"][4:]}, by_itself["plugged"])["logits"] > WRONG
    with pytest.raises(CollateError, match=rf"(?s)decoder.layers.0.*{FAULTS[layer]}.*gpt_batch's inputs on Megatron"):
        trained(faulty(layer))


def test_a_model_in_which_nothing_could_be_seen_is_no_pass(capsys):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    for step in range(2):
        before_train_step(ARGS, 0, step, [model], None, None)
        model(torch.zeros(1, 2))
    assert "NOTHING WAS SEEN" in capsys.readouterr().out


def test_runs_of_a_row_are_refused_where_layers_keep_a_state(monkeypatch):
    args = SimpleNamespace(allgather_cp=True, context_parallel_size=2)
    with pytest.raises(UnsupportedFormError, match=r"GatedDeltaNet takes chunks of a zigzag.*Leave --allgather-cp out"):
        before_log_prob(args, [world.plugged()], "")
    before_log_prob(args, [gpt("aa", flash=world.TEDotProductAttention)], "")


def test_patches_that_came_too_late_are_told(monkeypatch):
    monkeypatch.setattr(slime, "start_problem", lambda: "its adaptor ran too late")
    with pytest.raises(CollateError, match="ran too late"):
        before_log_prob(ARGS, [world.plugged()], "")


# --- vime on an NPU: its own forward of Megatron's local attention (vime eafbbc2 npu_attention_patch.py:11-66)


@pytest.fixture
def vime(monkeypatch):
    npu = ModuleType("torch_npu")

    def npu_fusion_attention(*args, pse=None, padding_mask=None, **kwargs):
        return reference_fusion_attention(*args, **kwargs)

    npu.npu_fusion_attention = npu_fusion_attention
    monkeypatch.setitem(sys.modules, "torch_npu", npu)

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, packed_seq_params=None, **_):
        flat, mode = packed_seq_params is not None, getattr(self.config, "sparse_mode", 0)
        heads = query.shape[1 if flat else 2]
        ends = packed_seq_params.cu_seqlens_q.tolist() if flat else None
        q, k, v = (x if flat else x.flatten(2) for x in (query, key, value))
        out = npu.npu_fusion_attention(
            q, k, v, heads, "TND" if flat else "SBH", atten_mask=triangle() if mode else attention_mask,
            scale=self.softmax_scale, pre_tockens=65536, next_tockens=0, keep_prob=1.0, inner_precise=0, sparse_mode=mode,
            actual_seq_qlen=ends, actual_seq_kvlen=ends,
        )[0]  # fmt: skip
        return out.flatten(1) if flat else out

    from megatron.core.transformer.dot_product_attention import DotProductAttention

    monkeypatch.setattr(DotProductAttention, "forward", forward)


@pytest.mark.parametrize("make", ["slime", "bshd"])
def test_vimes_attention_looks_ahead_where_nothing_sets_a_mode(vime, make):
    """None stays None under mode 0; with the triangle and mode 2 the same batch is right."""
    model, batch = gpt("aa", flash=None), getattr(batches, make)(world.SAMPLES)
    model.config.sparse_mode = 2
    before_log_prob(ARGS, [model], "")
    with torch.no_grad():
        truth = [model(**batches.bshd([row], multiple=len(row)))[0] for row in world.SAMPLES]
        assert off(model(**batch), truth) < EXACT
    model.config.sparse_mode = 0
    with pytest.raises(CollateError, match=r"none-is-full.*full attention, the future included"):
        model(**batch)
    assert off(model(**batch), truth) > WRONG


def off(out, truth):
    return max(float((x - y).detach().abs().max()) for x, y in zip(world.samples_of(out, LENGTHS), truth))
