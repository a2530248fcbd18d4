#!/usr/bin/env bash
# verl 0.9.1, SFT with its FSDP engine: bash verl.sh MODEL DATASET.parquet [more settings of verl]
# DATASET has a column `messages`. CARDS is 8 unless it is set. Run: one step of a tiny Qwen3-Next on two CPU ranks, and its
# checkpoint, with transformers 5.9.0, a CPU as verl's platform and FSDP options for it. No card was available.
set -euo pipefail
model=$1 dataset=$2
shift 2

collate-npu run -- torchrun --standalone --nproc_per_node "${CARDS:-8}" -m verl.trainer.sft_trainer \
    model.path="$model" data.train_files="$dataset" data.train_batch_size=16 data.micro_batch_size_per_gpu=1 \
    data.use_dynamic_bsz=false data.max_length=4096 "trainer.logger=[console]" trainer.total_epochs=1 "$@"
