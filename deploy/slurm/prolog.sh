#!/bin/sh
# Prolog of slurmd: makes and prepares a claim of as many devices as the job has GPUs of Slurm, and writes their CDI names to
# /run/nodedock-slurm/slurm-job-ID. It may run twice, and behind the epilog of its job. It always returns 0, because Slurm drains a node whose
# prolog fails: task-prolog.sh ends a job without its devices.
class=gpu # the DeviceClass of the devices
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

[ -n "$SLURM_JOB_GPUS" ] || exit 0
run=/run/nodedock-slurm
job=slurm-job-$SLURM_JOB_ID
start=${SLURM_JOB_RESTART_COUNT:-0}

mkdir -p -m 0755 "$run"
exec 9>"$run/lock"
flock 9
# Claims of jobs that the end of the machine or a stop of the daemon left.
for claim in $(nodedock claim get | awk '$2 ~ /^slurm-job-/ { print $2 }'); do
    [ -e "$run/$claim.start" ] && continue
    nodedock unprepare --ignore-not-found "default/$claim"
    nodedock claim delete "$claim"
done
ended=$(cat "$run/$job.ended" 2>/dev/null)
[ "${ended:--1}" -lt "$start" ] || exit 0
echo "$start" >"$run/$job.start"

count=$(echo "$SLURM_JOB_GPUS" | tr ',' '\n' | grep -c .)
nodedock claim create --timeout 10 -f /dev/stdin <<CLAIM
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: $job}
spec:
  devices:
    requests:
      - name: devices
        exactly: {deviceClassName: $class, allocationMode: ExactCount, count: $count}
CLAIM
if prepared=$(nodedock prepare --pod "$job" --claim "$job"); then
    echo "$prepared" | awk '/^container / { names = names separator $3; separator = "," } END { print names }' >"$run/.$job"
    chmod 0644 "$run/.$job"
    mv "$run/.$job" "$run/$job"
fi
exit 0
