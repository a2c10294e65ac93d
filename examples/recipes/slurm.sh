#!/bin/bash
# Pretrains on several nodes: sbatch --nodes=8 slurm.sh --model llama-3-8b.json --length 4096 --tokens tokens.bin --out run
#SBATCH --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64
set -euo pipefail
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun shardkit run --strict torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${RANKS_PER_NODE:-8}" \
  --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:29400" \
  "${RECIPE:-train.py}" "$@"
