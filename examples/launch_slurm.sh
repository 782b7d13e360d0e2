#!/bin/bash
# Start the two ranks of train_ranks.py under Slurm. If a rank or a node dies, the job is queued again, and goes on.
#
#     sbatch examples/launch_slurm.sh --pools /shared/pools
#
#SBATCH --job-name=lightck
#SBATCH --ntasks=2
#SBATCH --requeue            # Slurm itself queues the job again if a node fails, or if the job is preempted
#SBATCH --open-mode=append   # one log for all starts

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

# --kill-on-bad-exit: if one rank dies, Slurm ends the others, which would wait for it.
srun --kill-on-bad-exit=1 bash -c \
    'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID exec python "$@"' \
    rank examples/train_ranks.py "$@" && exit 0
status=$?

# A rank that was killed (by the OOM killer, for example) is a failed job, which Slurm does not queue again by itself.
if [ "${SLURM_RESTART_COUNT:-0}" -lt 5 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
