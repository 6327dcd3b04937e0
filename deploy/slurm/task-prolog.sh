#!/bin/sh
# TaskProlog of slurmd: gives a job that has GPUs of Slurm the CDI names of its devices, in NODEDOCK_CDI_DEVICES, separated by commas. Without devices
# it ends the task, and the node stays in use.
[ -n "$SLURM_JOB_GPUS$SLURM_STEP_GPUS" ] || exit 0
names=/run/nodedock-slurm/slurm-job-$SLURM_JOB_ID
if [ ! -s "$names" ]; then
    echo "nodedock has no devices for job $SLURM_JOB_ID" >&2
    exit 1
fi
echo "export NODEDOCK_CDI_DEVICES=$(cat "$names")"
