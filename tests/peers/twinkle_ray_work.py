"""Run as a program: twinkle on Ray, as its README starts it; the model and its processor live in a worker. Prints JSON."""

import json
import sys
import tempfile
from typing import Any

import ray
import te_stub  # noqa: F401  (before megatron)
import twinkle
import twinkle_world as world
from cpu_world import watch
from twinkle import DeviceGroup, DeviceMesh
from twinkle_work import LENGTHS, error

from collate_npu.integrations import twinkle as ours

RESULTS: dict[str, Any] = {}


def in_worker(handle: Any, function: Any) -> Any:
    return ray.get(handle._actors[0].__ray_call__.remote(function))


def prepare(model: Any) -> None:
    watch(model.model[0])
    world.whole(model.model[0])


def stages(model: Any) -> list[str]:
    processor = next(iter(model.optimizer_group.values())).processor
    return sorted({type(stage.__self__).__name__ for stage in processor.process_pipeline if hasattr(stage, "__self__")})


def step(model: Any, rows: list[Any]) -> Any:
    """From the driver, as a training loop does it."""
    try:
        model.forward_backward(inputs=rows, micro_batch_size=len(rows))()
        return "computed"
    except Exception as refusal:
        return type(refusal).__name__ + " " + str(refusal)


if __name__ == "__main__":
    ray.init(num_cpus=8, include_dashboard=False, runtime_env={"worker_process_setup_hook": "twinkle_world.worker"})
    groups = [DeviceGroup(name="model", ranks=1, device_type="CPU")]
    twinkle.initialize(mode="ray", nproc_per_node=1, ncpu_proc_per_node=1, groups=groups)
    mesh = DeviceMesh.from_sizes(dp_size=1, device_type="cpu")
    model = world.megatron_model(world.checkpoint(tempfile.mkdtemp()), remote_group="model", device_mesh=mesh)
    in_worker(model, prepare)
    model.set_processor("InputProcessor")
    rows = world.features(*LENGTHS)
    RESULTS["upstream, a row of one token"] = step(model, rows)
    ours.install(model)
    RESULTS["stages"] = in_worker(model, stages)
    RESULTS["step"] = step(model, rows)
    RESULTS["ours"] = in_worker(model, error)
    model.set_processor("InputProcessor", padding_side="left")
    RESULTS["left"] = step(model, world.features(7, 3, 5))
    ours.uninstall(model)
    RESULTS["left afterwards"] = step(model, world.features(7, 3, 5))
    with open(sys.argv[1], "w") as file:
        json.dump(RESULTS, file, indent=1)
