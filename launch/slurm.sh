#!/usr/bin/env bash
# Trains on several hosts: sbatch --nodes 2 --gpus-per-node 8 launch/slurm.sh --cp 8 --dp-shard 2
# It starts one torchrun agent per host, by fla_cp/train/torchrun.py.
# --out must be on a file system that all hosts share.
# The job's exit code is the highest exit code of its hosts, see docs/training.md.
# MAX_RESTARTS: how often failed ranks are restarted from the newest checkpoint (default 0);
# they are not restarted after a mistake or after a run that diverged.
# RANKS_PER_HOST: how many ranks a host starts (default: one for each of its GPUs in the job, or 1).
# RDZV_PORT: the port of the first host on which hosts meet (default 29400).
# RDZV_TIMEOUT: for how many seconds hosts wait for each other (default 120).
#SBATCH --job-name=fla-cp-train
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:TERM@300
set -euo pipefail

# sbatch runs a copy of this file, so the clone is the folder in which it was submitted.
cd "${SLURM_SUBMIT_DIR:?run this with sbatch, from the root of the clone}"
ranks_per_host="${RANKS_PER_HOST:-${SLURM_GPUS_ON_NODE:-1}}"
first_host="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"

# A host whose only rank is stopped does not end by itself when the others end.
srun --kill-on-bad-exit=1 python -m fla_cp.train.torchrun \
  --nnodes "$SLURM_JOB_NUM_NODES" \
  --nproc-per-node "$ranks_per_host" \
  --rdzv-id "$SLURM_JOB_ID" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$first_host:${RDZV_PORT:-29400}" \
  --rdzv-conf "join_timeout=${RDZV_TIMEOUT:-120}" \
  --max-restarts "${MAX_RESTARTS:-0}" \
  launch/train.py --out "runs/slurm-$SLURM_JOB_ID" --resume auto "$@" &
job=$!

# 300 s before the limit Slurm signals this script only; the ranks then write a checkpoint.
trap 'kill -TERM "$job"; wait "$job"' TERM
wait "$job"
