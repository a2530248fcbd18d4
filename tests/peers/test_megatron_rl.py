"""slime, miles, vime, Relax, ROLL, MindSpeed-MM on the real megatron-core: what their batches compute, what watching says.

Their batches are rebuilt after their sources (rl_batches.py), their loop in small. Megatron's own Gated DeltaNet takes flat
rows from 0.18 on (`hybrid`); the layer of slime's plugins does so on any release (`plugged`, slime 624b824
slime_plugins/models/hf_attention.py:93-182, qwen3_next.py:104-175). Attention and fla's kernels are stand-ins.
"""

from importlib.metadata import version
from typing import Any

import pytest
import rl_batches as batches
import torch
import torch.distributed as dist
from megatron_world import HIDDEN, TEDotProductAttention, causal_conv1d, chunk_gated_delta_rule, gaps, gpt, hybrid
from torch import Tensor, nn
from torch.nn.functional import softplus

from collate_npu import CollateError, Segments
from collate_npu.integrations import megatron
from collate_npu.integrations.megatron import packed_seq_params
from collate_npu.parallel import ContextParallel, gather_sequence, split_tensor
from collate_npu.proof import watch

NEEDS = ("megatron",)
pytestmark = pytest.mark.usefixtures("cpu")
EXACT, WRONG, IMPORTS = 1e-4, 1e-1, 120
SAMPLES = [[5, 9, 31, 2, 44, 8, 17], [12, 3, 0, 25], [7, 7, 50, 1, 33, 21, 60, 11, 4], [40, 6]]
"""Token 0, which pads, is text in one of them."""
HEADS, D = 4, 8
NATIVE = int(version("megatron-core").split(".")[1]) >= 18
needs_native = pytest.mark.skipif(not NATIVE, reason="Gated DeltaNet takes flat rows from megatron-core 0.18 on")


class VarlenGatedDeltaNet(nn.Module):
    """Called `(hidden_states [1, T, H], cu_seqlens)`."""

    def __init__(self) -> None:
        super().__init__()
        self.chunk_gated_delta_rule = chunk_gated_delta_rule
        self.in_proj = nn.Linear(HIDDEN, 3 * HEADS * D + 2 * HEADS, bias=False)
        self.conv_weight = nn.Parameter(torch.randn(3 * HEADS * D, 4) / 2)
        self.out_proj = nn.Linear(HEADS * D, HIDDEN, bias=False)

    def forward(self, hidden_states: Tensor, cu_seqlens: Any = None) -> Tensor:
        qkv, beta, gate = self.in_proj(hidden_states).split([3 * HEADS * D, HEADS, HEADS], dim=-1)
        qkv, _ = causal_conv1d(qkv, self.conv_weight, activation="silu", cu_seqlens=cu_seqlens)
        q, k, v = qkv.unflatten(-1, (3 * HEADS, D)).chunk(3, dim=2)
        rule = {"g": -softplus(gate) / 16, "beta": beta.sigmoid(), "use_qk_l2norm_in_kernel": True}
        out, _ = self.chunk_gated_delta_rule(q, k, v, **rule, cu_seqlens=cu_seqlens)
        return self.out_proj(out.flatten(2))


class Attention(nn.Module):
    """In the place of Megatron's self-attention."""

    def __init__(self, config: Any, *_: Any, pg_collection: Any = None, **__: Any) -> None:
        super().__init__()
        self.linear_attn = VarlenGatedDeltaNet()

    def forward(self, hidden_states: Tensor, attention_mask: Any, packed_seq_params: Any = None, **_: Any) -> Any:
        assert packed_seq_params is not None
        out = self.linear_attn(hidden_states.transpose(0, 1), cu_seqlens=packed_seq_params.cu_seqlens_q)
        return out.transpose(0, 1), None


def plugged(**changed: Any) -> Any:
    """The same with the layer of slime's plugins."""
    model = gpt("aaa", flash=TEDotProductAttention, **changed)
    torch.manual_seed(1)
    for n in (0, 2):
        model.decoder.layers[n].self_attention = Attention(model.config)
    return model


def alone(model: Any) -> dict[str, Any]:
    """Loss, logits and gradients where each sample is a batch of its own, without any padding."""
    total, logits = torch.zeros(()), []
    for row in SAMPLES:
        inputs = batches.slime([row], multiple=1)
        out = model(**inputs)
        total = total + _loss(out, inputs)
        logits.append(out.detach()[0])
    total.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": total.detach(), "logits": logits, "gradients": gradients}


def _loss(out: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Minus the log-probability of each response token, as slime's loss.py takes it of the token before."""
    ids = inputs.get("shifted", inputs["input_ids"].roll(-1, 1))
    told = out.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
    return -(told * inputs["loss_mask"]).sum()


def together(make: str, untold: bool = False) -> dict[str, Any]:
    """In each process: this rank's part of a batch through `hybrid`; logits gathered, loss and gradients summed over the
    ranks, and what watching tells. `untold`: the rule loses its boundaries."""
    inputs = getattr(batches, make)(SAMPLES, size=dist.get_world_size(), rank=dist.get_rank())
    model, offsets = hybrid(), inputs["packed_seq_params"].cu_seqlens_q
    for layer in model.decoder.layers if untold else ():
        layer.self_attention.gated_delta_rule = _untold
    cp, offsets = ContextParallel.from_megatron().for_documents(), offsets[: len(SAMPLES) + 1]  # without the tail
    local = {key: inputs[key][:, : int(offsets[-1]) // cp.size] for key in ("input_ids", "loss_mask")}
    ids = gather_sequence(local["input_ids"], cp, cu_seqlens=offsets)
    with watch(say=False) as seen:
        out = model(**inputs)[:, : local["input_ids"].shape[1]]
    loss = _loss(out, {**local, "shifted": split_tensor(ids.roll(-1, 1), cp, cu_seqlens=offsets)})
    loss.backward()
    loss, gradients = loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for value in (loss, *gradients.values()):
        dist.all_reduce(value)
    gathered = gather_sequence(out.detach(), cp, cu_seqlens=offsets)
    logits = [gathered[0, start : start + len(row)] for start, row in zip(offsets.tolist(), SAMPLES)]
    told = [*map(str, seen.faults), seen.summary()]
    return {"loss": loss, "logits": logits, "gradients": gradients, "told": told}


def _untold(*args: Any, cu_seqlens: Any = None, **kwargs: Any) -> Any:
    from megatron.core.ssm.gated_delta_net import gdn

    return gdn.chunk_gated_delta_rule(*args, **kwargs)


@pytest.fixture(scope="module")
def by_itself(cpu):
    return alone(hybrid())


@needs_native
@pytest.mark.parametrize(("make", "spoilt"), [("slime", False), ("roll_packed", False), ("slime", True)])
def test_on_two_ranks_the_kernels_of_whole_rows_are_judged(pool, by_itself, make, spoilt):
    """Right as they are, and a fault where the rule lost its boundaries."""
    for found in pool("test_megatron_rl.together", make, spoilt, seconds=IMPORTS):
        apart = gaps(found, by_itself)
        assert apart["logits"] > WRONG if spoilt else max(apart.values()) <= EXACT, apart
        text = "goes on from another sequence" if spoilt else "no fault in 1 of 1 forwards"
        assert text in found["told"][0], found["told"]
        assert spoilt or len(found["told"]) == 1, found["told"]


@pytest.mark.parametrize("here", [False, True])
def test_beside_transformer_engine_npu_offsets_say_where_sequences_stand(monkeypatch, here):
    """Its one public caller hands on `cu_seqlens_q` alone, for places in the row."""
    monkeypatch.setattr(megatron, "npu_engine", lambda: here)
    params = packed_seq_params(Segments([[1, 1, 1, 0, 2, 2, 2, 2]]))
    assert params.cu_seqlens_q.tolist() == ([0, 4, 8] if here else [0, 3, 7])
    assert params.cu_seqlens_q_padded.tolist() == [0, 4, 8]


class RuleUntold(VarlenGatedDeltaNet):
    """slime pull request 1686."""

    def forward(self, hidden_states, cu_seqlens=None):
        rule, self.chunk_gated_delta_rule = self.chunk_gated_delta_rule, self.untold
        try:
            return super().forward(hidden_states, cu_seqlens)
        finally:
            self.chunk_gated_delta_rule = rule

    def untold(self, *args, cu_seqlens=None, **kwargs):
        return chunk_gated_delta_rule(*args, **kwargs)


class Mailbox(VarlenGatedDeltaNet):
    """miles pull request 2213: boundaries of the first batch are kept for the next ones."""

    left = None

    def forward(self, hidden_states, cu_seqlens=None):
        self.left = cu_seqlens if self.left is None else self.left
        end = min(int(self.left[-1]), hidden_states.shape[1])
        kept = torch.tensor([*[n for n in self.left.tolist() if n < end], hidden_states.shape[1]], dtype=torch.int32)
        return super().forward(hidden_states, kept)


class LeftOut(VarlenGatedDeltaNet):
    """miles pull request 2213: a family that was not patched, and said "applied"."""

    def forward(self, hidden_states, cu_seqlens=None):
        return super().forward(hidden_states)


FAULTS = {RuleUntold: "chunk_gated_delta_rule got nothing", Mailbox: r"got \[0, ", LeftOut: "causal_conv1d .*got nothing"}


def faulty(layer):
    model = plugged()
    for n in (0, 2):
        attention = model.decoder.layers[n].self_attention
        made = layer()
        made.load_state_dict(attention.linear_attn.state_dict())
        attention.linear_attn = made
    return model


@pytest.mark.parametrize("layer", FAULTS)
def test_watching_finds_the_faults_of_their_threads(layer):
    def run():
        with watch(stop=True):
            model(**batches.slime(SAMPLES))
            model(**batches.slime(SAMPLES[1:]))

    model = faulty(layer)
    with pytest.raises(CollateError, match=rf"(?s)decoder.layers.0.*{FAULTS[layer]}"):
        run()
