#!/usr/bin/env bash
# verl 0.9.1, SFT with the FSDP engine on eight cards: bash verl.sh MODEL DATASET.parquet [more settings of verl]
# The column `messages` of DATASET holds the conversations.
set -euo pipefail
model=$1 dataset=$2
shift 2

torchrun --standalone --nproc_per_node "${CARDS:-8}" -m verl.trainer.sft_trainer \
    model.path="$model" model.external_lib=collate_npu.integrations.verl.plugin \
    data.train_files="$dataset" data.train_batch_size=16 data.micro_batch_size_per_gpu=1 data.use_dynamic_bsz=false \
    data.max_length=4096 "trainer.logger=[console]" trainer.total_epochs=1 "$@"
