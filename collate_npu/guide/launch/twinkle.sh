#!/usr/bin/env bash
# twinkle-kit 0.5.1 on eight cards: bash twinkle.sh dense|moe|moe-cp MODEL DATASET [more words of twinkle's own CLI]
# Rows of DATASET are twinkle's messages. Cards in all: tensor * pipeline * context * data parallelism.
set -euo pipefail
job=$1 model=$2 dataset=$3
shift 3

case $job in
dense) # 2 * 2 * 1 * 2
    sizes=(--tp_size 2 --pp_size 2 --dp_size 2) ;;
moe) # 2 * 2 * 1 * 2; experts over the 4 cards of a stage
    sizes=(--tp_size 2 --pp_size 2 --dp_size 2 --ep_size 4) ;;
moe-cp) # 2 * 1 * 2 * 2; recurrent layers: megatron-core 0.18 or newer
    sizes=(--tp_size 2 --cp_size 2 --dp_size 2 --ep_size 4) ;;
*)
    echo "dense, moe or moe-cp, not $job" >&2
    exit 2 ;;
esac

train=$(cat <<'PYTHON'
import twinkle
from twinkle import DeviceMesh
from twinkle.cli import CLI
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import MegatronModel

from collate_npu.integrations import twinkle as ours

args = CLI.from_args()
names = ("tp_size", "pp_size", "cp_size", "dp_size", "ep_size", "sequence_parallel")
mesh = DeviceMesh.from_sizes(**{name: args[name] for name in names if args[name] is not None})
twinkle.initialize(mode="local", global_device_mesh=mesh)

dataset = Dataset(dataset_meta=DatasetMeta(args["dataset_id"]))
dataset.set_template("Template", model_id=args["model_id"], max_length=args["max_length"])
dataset.encode()
loader = DataLoader(dataset=dataset, batch_size=args["batch_size"])

model = MegatronModel(model_id=args["model_id"])
model.set_optimizer(optimizer_cls="default", lr=args["learning_rate"])
model.set_lr_scheduler(scheduler_cls="default", lr_warmup_steps=2, lr_decay_steps=len(loader))
ours.install(model)
for batch in loader:
    model.forward_backward(inputs=batch, micro_batch_size=args["micro_batch_size"])
    model.clip_grad_and_step()
model.save("last")
PYTHON
)

torchrun --nproc_per_node 8 --no-python python -c "$train" --model_id "$model" --dataset_id "$dataset" "${sizes[@]}" \
    --sequence_parallel --max_length 4096 --batch_size 16 --micro_batch_size 1 "$@"
