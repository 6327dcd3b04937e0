#!/bin/sh
# Epilog of slurmd: ends the claim of a job. It may run twice, and before the prolog of its job. It always returns 0, because Slurm drains a node
# whose epilog fails.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

run=/run/nodedock-slurm
job=slurm-job-$SLURM_JOB_ID

mkdir -p -m 0755 "$run"
exec 9>"$run/lock"
flock 9
# The start of the job that has ended, for a prolog behind this. The epilog of a job that is requeued has the number of the next start already.
if [ -e "$run/$job.start" ]; then
    mv "$run/$job.start" "$run/$job.ended"
elif [ ! -e "$run/$job.ended" ]; then
    echo "${SLURM_JOB_RESTART_COUNT:-0}" >"$run/$job.ended"
fi
rm -f "$run/$job"
nodedock unprepare --ignore-not-found "default/$job"
nodedock claim delete "$job"
find "$run" -name '*.ended' -mmin +1440 -delete
exit 0
