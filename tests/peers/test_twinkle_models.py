"""twinkle-kit 0.5.1's own models, built by their constructors, from `set_processor` to `forward_backward`.

In one process and on Ray, on a CPU; each program runs in processes of its own (`twinkle_work`).
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cells import Stack, verdict, worst_of
from processes import found_by

NEEDS = ("twinkle", "mcore_bridge", "megatron", "ray")
pytestmark = pytest.mark.long("twinkle's models")


HERE = Path(__file__).parent
NEAR = 2e-5
NONE = {"attention": [None, None], "recurrent": [None, None]}
DENSE = {"attention": [[3, 1, 7, 7]] * 2, "recurrent": [[3, 1, 7, 7]] * 2}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Both at once: each takes a while to import its stack."""
    given = {"variants": [{"RAY_USAGE_STATS_ENABLED": "0"}]}
    with ThreadPoolExecutor() as pool:
        work = pool.map(
            lambda part: found_by("twinkle_work", tmp_path_factory.mktemp(part), part, **given)[0], ("models", "ray")
        )
        return dict(zip(("models", "ray"), work))


@pytest.fixture(scope="module")
def told(programs):
    return programs["models"]


def received(answer):
    return {name: answer[name] for name in ("attention", "recurrent")}


@pytest.mark.parametrize("device", ["npu", "other"])
def test_a_hybrid_megatron_model_computes_each_sample_alone(told, device):
    answer = told[f"ours {device}"]
    assert answer["error"] <= NEAR
    assert received(answer) == NONE
    assert told[f"gradient {device}"] <= NEAR
    assert received(told[f"upstream {device}"]) == (NONE if device == "npu" else DENSE)


@pytest.mark.parametrize("device", ["npu", "other"])
def test_left_padding_is_refused_where_no_layer_reads_it_and_upstream_it_is_wrong_in_silence(told, device):
    """The processor was set after `install`: it has our stages all the same."""
    assert told[f"ours left {device}"]["raised"] == "UnsupportedFormError"
    assert "Pad right" in told[f"ours left {device}"]["said"]
    assert told[f"upstream left {device}"]["error"] > 1
    assert told["stages after uninstall"] == ["InputProcessor"]


STACK = Stack("twinkle, Megatron", ("twinkle-kit", "mcore-bridge", "megatron-core"), "peers_misc")
LINE = "integrations.twinkle.install(model)"


def test_a_cell_of_left_padding(told):
    cases = (("alone", told["upstream left npu"]), ("ours", told["ours left npu"]))
    both = {who: verdict(x.get("error"), refused=f"{x.get('raised')}: {x.get('said')}") for who, x in cases}
    STACK.tell("qwen3_next", "padded left", **both, line=LINE)


@pytest.mark.nightly
def test_its_cells_on_one_rank_and_on_two(tmp_path):
    """Right where it runs; the worse of padded and flat rows under context parallelism."""
    found, cells = found_by("twinkle_work", tmp_path, "ranks", ranks=2)[0], {}
    for name, told in found.items():
        cells.setdefault(name.removesuffix(", flat"), []).append(told)
    for name, jobs in cells.items():
        family, _, layout = name.partition(" ")
        both = {who: worst_of(told[who] for told in jobs) for who in ("alone", "ours")}
        assert STACK.tell(family, layout, **both, line=LINE) in [("right", "right"), ("refused", "refused")], name


def test_left_padding_is_computed_where_local_kernels_read_a_dense_mask(told):
    assert told["ours dense left"]["error"] <= NEAR
    assert told["upstream dense left"]["error"] > 1


def test_a_transformers_model_reads_the_2d_mask_that_twinkle_drops(told):
    assert told["ours transformers, 2D alone"]["error"] <= NEAR
    assert told["upstream transformers, 2D alone"]["error"] > 0.1
    assert "padding_free=True" in told["ours transformers, packed"]["said"]


def test_an_adapter_added_after_install_has_its_masks_checked_too(told):
    assert told["adapter"] == "computed"
    assert told["adapter, 2D disagrees"]["raised"] == "CollateError"


def test_objects_are_gathered_by_ours_on_an_npu_alone(told):
    assert told["gathered on cuda"] == [["told"], []]
    assert told["gathered on npu"] == [["told"], ["ours"]]
    assert told["gathered afterwards"] == [["told"], ["ours"]], "uninstalled: twinkle's own again"


def test_on_ray_the_same_call_reaches_the_processor_in_each_worker(programs):
    told = programs["ray"]
    assert told["stages"] == ["InputProcessor", "Stages"]
    assert told["step"] == "computed"
    assert told["ours"]["error"] <= NEAR
    assert received(told["ours"]) == NONE
    assert "IndexError" in told["upstream, a row of one token"]
    assert "UnsupportedFormError" in told["left"]
    assert told["left afterwards"] == "computed", "in silence, as upstream"
