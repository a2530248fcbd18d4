#!/usr/bin/env bash
# ms-swift 4.6.0 on eight cards: bash ms-swift.sh dense|moe|moe-cp MODEL DATASET [more words of `megatron sft`]
# Cards in all: tensor * pipeline * context * data parallelism.
set -euo pipefail
job=$1 model=$2 dataset=$3
shift 3
plugin=$(python -c 'import collate_npu; print(*collate_npu.__path__)')/integrations/swift/plugin.py

case $job in
dense) # 2 * 2 * 1 * 2
    sizes=(--tensor_model_parallel_size 2 --pipeline_model_parallel_size 2) ;;
moe) # 2 * 2 * 1 * 2; experts over the 4 cards of a stage
    sizes=(--tensor_model_parallel_size 2 --pipeline_model_parallel_size 2 --expert_model_parallel_size 4) ;;
moe-cp) # 2 * 1 * 2 * 2; recurrent layers: megatron-core 0.18 or newer
    sizes=(--tensor_model_parallel_size 2 --context_parallel_size 2 --expert_model_parallel_size 4) ;;
*)
    echo "dense, moe or moe-cp, not $job" >&2
    exit 2 ;;
esac

NPROC_PER_NODE=8 megatron sft --model "$model" --dataset "$dataset" --external_plugins "$plugin" \
    --padding_free false --sequence_parallel true "${sizes[@]}" \
    --micro_batch_size 1 --global_batch_size 16 --max_length 4096 --num_train_epochs 1 --lr 1e-5 \
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 --output_dir output "$@"
