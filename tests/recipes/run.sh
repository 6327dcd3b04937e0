#!/bin/bash
# Runs the recipes of docs/containers.md with the real tools of this machine, and checks what they give.
#
#   tests/recipes/run.sh [--bin DIR] [--driver FILE] [RECIPE...]
#
#   --bin DIR      nodedock and nodedockd        [default: target/debug of the repository]
#   --driver FILE  the driver mock-gpu           [default: target/drivers/mock-gpu.wasm of the repository]
#   RECIPE         names of recipes              [default: all]
#
# It runs as root on a machine for experiments: it starts a daemon of its own with the CDI directory /var/run/cdi, makes containers that begin
# with `nodedock-recipe`, and removes all of it at the end. A recipe whose tool is not there, or not configured for it, is skipped with the
# reason. The exit code is 1 if a recipe fails.
#
# Environment:
#   BUSYBOX        a static busybox, the content of the image                                     [default: of PATH]
#   PODMAN_FLAGS   more arguments of `podman run`, such as `--pids-limit 0` without that controller
#   COMPOSE        the command of Docker Compose                                                  [default: docker compose]
#   NERDCTL        the command of nerdctl                                                         [default: nerdctl]
#   SLURM_SCRIPTS  a directory whose prolog.sh, epilog.sh and taskprolog.sh slurm.conf names; they are replaced for the recipe
set -u

here=$(cd "$(dirname "$0")/../.." && pwd)
bin=$here/target/debug
driver=$here/target/drivers/mock-gpu.wasm
recipes=
while [ $# -gt 0 ]; do
    case $1 in
    --bin) bin=$(realpath "$2"); shift 2 ;;
    --driver) driver=$(realpath "$2"); shift 2 ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    -*) echo "unknown argument $1" >&2; exit 2 ;;
    *) recipes="$recipes $1"; shift ;;
    esac
done
: "${BUSYBOX:=$(command -v busybox || :)}" "${PODMAN_FLAGS:=}" "${COMPOSE:=docker compose}" "${NERDCTL:=nerdctl}" "${SLURM_SCRIPTS:=}"
export PODMAN_IGNORE_CGROUPSV1_WARNING=1

# Devices that the driver has without a config.
all_devices=4
image=nodedock-recipe
name=nodedock-recipe
device=nodedock.dev/mock-gpu=any
work=$(mktemp -d /tmp/nodedock-recipe.XXXXXX) || exit 1
chmod 0755 "$work"
export NODEDOCK_ROOT=$work/dock
export PATH=$work/bin:$PATH
runtime=$work/bin/nodedock-runtime

# --- helpers ---

fail() { echo "    $*" >&2; exit 1; }
skip() { echo "    $*" >&2; exit 77; }
has() { command -v "$1" >/dev/null 2>&1; }

# The number of devices in the output of `env`.
devices_in() { grep -cE '^MOCK_GPU_[0-9]+=' <<<"$1"; }

expect_devices() { # NUMBER OUTPUT
    [ "$(devices_in "$2")" = "$1" ] || fail "expected $1 devices, got: $2"
}

claims() { nodedock claim get | awk '$1 == "default" { print $2 }'; }

expect_claims() { # NUMBER, in 5 s
    local left
    for _ in $(seq 50); do
        left=$(claims | wc -l)
        [ "$left" = "$1" ] && return
        sleep 0.1
    done
    fail "expected $1 claims, there are: $(claims | tr '\n' ' ')"
}

expect_text() { # TEXT OUTPUT
    grep -qF -- "$1" <<<"$2" || fail "expected \"$1\", got: $2"
}

# The devices of all claims, one a line.
held() { nodedock claim get | awk '$1 == "default" { print $4 }' | tr ',' '\n'; }

expect_distinct() {
    local twice
    twice=$(held | sort | uniq -d)
    [ -z "$twice" ] || fail "two claims have $twice"
}

version_at_least() { [ "$(printf '%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

start_daemon() {
    setsid nodedockd run --root "$NODEDOCK_ROOT" --local-api --cdi-dir /var/run/cdi </dev/null >>"$work/daemon.log" 2>&1 &
    daemon=$!
    echo "$daemon" >"$work/daemon.pid"
    for _ in $(seq 300); do
        compgen -G '/var/run/cdi/nodedock.dev-*-mock-gpu.json' >/dev/null && return
        kill -0 "$daemon" 2>/dev/null || break
        sleep 0.1
    done
    tail -n 20 "$work/daemon.log" >&2
    echo "the daemon has no class mock-gpu" >&2
    exit 1
}

kill_daemon() { # SIGNAL
    kill "-$1" "$(cat "$work/daemon.pid")" 2>/dev/null
    while kill -0 "$(cat "$work/daemon.pid")" 2>/dev/null; do sleep 0.1; done
}

rootfs() {
    [ -x "$BUSYBOX" ] || skip "no static busybox: name one in BUSYBOX"
    [ -d "$work/rootfs" ] && return
    mkdir -p "$work"/rootfs/{bin,etc,tmp,proc,sys,dev}
    cp "$BUSYBOX" "$work/rootfs/bin/busybox"
    local applet
    for applet in sh env sleep cat true; do ln -s busybox "$work/rootfs/bin/$applet"; done
    echo root:x:0:0::/:/bin/sh >"$work/rootfs/etc/passwd"
    echo root:x:0: >"$work/rootfs/etc/group"
}

need_podman() {
    has podman || skip "no podman"
    rootfs
    podman image exists "$image" || tar -C "$work/rootfs" -c . | podman import -q - "$image" >/dev/null || fail "podman import"
}

need_docker() {
    has docker || skip "no docker"
    docker info >"$work/docker-info" 2>/dev/null || skip "no docker daemon"
    docker info --format '{{range $name, $_ := .Runtimes}}{{$name}} {{end}}' | grep -qw nodedock ||
        skip "docker has no runtime nodedock: add it to daemon.json, with \"features\": {\"cdi\": true}"
    rootfs
    docker image inspect "$image" >/dev/null 2>&1 || tar -C "$work/rootfs" -c . | docker import - "$image" >/dev/null || fail "docker import"
}

need_compose() {
    need_docker
    compose_version=$($COMPOSE version --short 2>/dev/null) || skip "no $COMPOSE"
    compose_version=${compose_version#v}
    mkdir -p "$work/compose"
}

need_nerdctl() {
    has "$NERDCTL" || skip "no nerdctl"
    $NERDCTL info >/dev/null 2>&1 || skip "no containerd"
    rootfs
}

need_systemd() { [ -d /run/systemd/system ] || skip "systemd does not run"; }

podman_run() { podman "${podman_global[@]}" run --network none $PODMAN_FLAGS "$@"; }
podman_global=()
docker_run() { docker run --network none --runtime nodedock "$@"; }

remove_all() {
    local id
    if [ -d /run/systemd/system ]; then
        systemctl stop "$name" "$name-program" 2>/dev/null
        rm -f "/etc/containers/systemd/$name.container" "/run/systemd/system/$name-program.service"
    fi
    if has podman; then podman rm -f -t 0 -i $(podman ps -aq --filter "name=$name") >/dev/null 2>&1; fi
    if has docker; then
        for id in $(docker ps -aq --filter "name=^/$name" 2>/dev/null); do docker rm -f "$id" >/dev/null 2>&1; done
    fi
    if has "$NERDCTL"; then
        for id in $($NERDCTL ps -aq --filter "name=^$name" 2>/dev/null); do $NERDCTL rm -f "$id" >/dev/null 2>&1; done
    fi
}

# --- recipes: one function each ---

recipe_podman_runtime() {
    need_podman
    local output
    output=$(podman_run --rm --runtime "$runtime" --device "$device" "$image" env) || fail "podman run"
    expect_devices 1 "$output"
    output=$(podman_run --rm --runtime "$runtime" --device nodedock.dev/mock-gpu=2 "$image" env) || fail "podman run"
    expect_devices 2 "$output"
    expect_claims 0
}

recipe_podman_default_runtime() { # containers.conf
    need_podman
    cat >"$work/containers.conf" <<CONF
[engine]
runtime = "nodedock"
[engine.runtimes]
nodedock = ["$runtime"]
CONF
    local output
    output=$(CONTAINERS_CONF=$work/containers.conf podman_run --rm --device "$device" "$image" env) || fail "podman run"
    expect_devices 1 "$output"
    output=$(CONTAINERS_CONF=$work/containers.conf podman_run --rm "$image" env) || fail "podman run without devices"
    expect_devices 0 "$output"
    expect_claims 0
}

recipe_podman_hook() {
    need_podman
    mkdir -p "$work/hooks.d"
    cat >"$work/hooks.d/nodedock.json" <<HOOK
{"version": "1.0.0", "hook": {"path": "$bin/nodedock", "args": ["nodedock", "container", "precreate"]}, "when": {"always": true}, "stages": ["precreate"]}
HOOK
    podman_global=(--hooks-dir "$work/hooks.d")
    local output
    output=$(podman_run --rm --device "$device" "$image" env) || fail "podman run"
    expect_devices 1 "$output"
    output=$(podman_run --rm "$image" env) || fail "podman run without devices"
    expect_devices 0 "$output"
    expect_claims 0
    # All devices taken: the reason is not shown.
    podman_run -d --name "$name-all" --device nodedock.dev/mock-gpu=$all_devices "$image" sleep 1000 >/dev/null || fail "podman run"
    output=$(podman_run --rm --device "$device" "$image" env 2>&1) && fail "a device was given twice"
    expect_text "setting up OCI Hooks: executing [nodedock container precreate]: exit status 1" "$output"
    podman rm -f -t 0 "$name-all" >/dev/null
    expect_claims 0
}

recipe_podman_hook_waits() {
    need_podman
    mkdir -p "$work/hooks.d"
    cat >"$work/hooks.d/nodedock.json" <<HOOK
{"version": "1.0.0", "hook": {"path": "$bin/nodedock", "args": ["nodedock", "container", "precreate", "--wait-seconds", "30"]}, "when": {"always": true}, "stages": ["precreate"]}
HOOK
    podman_global=(--hooks-dir "$work/hooks.d")
    podman_run -d --name "$name-all" --device nodedock.dev/mock-gpu=$all_devices "$image" sleep 3 >/dev/null || fail "podman run"
    local output
    output=$(podman_run --rm --device "$device" "$image" env) || fail "podman run"
    expect_devices 1 "$output"
    podman rm -f -t 0 "$name-all" >/dev/null
    expect_claims 0
}

recipe_podman_restart() {
    need_podman
    podman_run -d --name "$name" --restart always --runtime "$runtime" --device "$device" "$image" sleep 1000 >/dev/null || fail "podman run"
    expect_claims 1
    local before after
    before=$(claims)
    podman restart -t 0 "$name" >/dev/null || fail "podman restart"
    expect_claims 1
    after=$(claims)
    [ "$before" != "$after" ] || fail "the claim is that of the container before: $before"
    kill -9 "$(podman inspect -f '{{.State.Pid}}' "$name")"
    for _ in $(seq 50); do [ "$(claims)" != "$after" ] && [ -n "$(claims)" ] && break; sleep 0.1; done
    expect_claims 1
    [ "$(claims)" != "$after" ] || fail "the policy started no container"
    # The monitor killed: the container runs on with its device.
    kill -9 "$(podman inspect -f '{{.State.ConmonPid}}' "$name")"
    sleep 2
    expect_claims 1
    podman rm -f -t 0 "$name" >/dev/null 2>&1 || podman rm -f -t 0 "$name" >/dev/null 2>&1
    expect_claims 0
}

recipe_podman_without_runtime() { # what a user sees
    need_podman
    local output
    output=$(podman_run --rm --device "$device" "$image" env 2>&1) && fail "a container started without its device"
    expect_text "nodedock" "$output"
    output=$(podman_run --rm --runtime "$runtime" --device nodedock.dev/missing=any "$image" env 2>&1) && fail "a class that does not exist"
    expect_text "unresolvable CDI devices nodedock.dev/missing=any" "$output"
}

recipe_run_with_podman() {
    need_podman
    local output
    output=$(nodedock run-with --timeout 10 --class mock-gpu -- podman run --rm --network none $PODMAN_FLAGS "$image" env) || fail "run-with"
    expect_devices 1 "$output"
    output=$(nodedock run-with --timeout 10 --class mock-gpu=2 --class mock-gpu -- podman run --rm --network none $PODMAN_FLAGS "$image" env) || fail "run-with"
    expect_devices 3 "$output"
    expect_claims 0
    # Detached: the claim is the container's.
    nodedock run-with --timeout 10 --class mock-gpu -- podman run -d --name "$name" --network none $PODMAN_FLAGS "$image" sleep 1000 >/dev/null || fail "run-with"
    sleep 1
    expect_claims 1
    podman rm -f -t 0 "$name" >/dev/null
    expect_claims 0
}

recipe_run_with_program() {
    local output code
    output=$(nodedock run-with --timeout 10 --class mock-gpu=2 -- env) || fail "run-with"
    expect_devices 2 "$output"
    expect_text "NODEDOCK_CDI_DEVICES=mock-gpu.nodedock.dev/claim=" "$output"
    cat >"$work/claim.yaml" <<CLAIM
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: two}
spec:
  devices:
    requests:
      - name: gpus
        exactly: {deviceClassName: mock-gpu, allocationMode: ExactCount, count: 2}
CLAIM
    output=$(nodedock run-with --timeout 10 -f "$work/claim.yaml" --name other -- env) || fail "run-with -f"
    expect_devices 2 "$output"
    nodedock run-with --timeout 10 --class mock-gpu -- sh -c 'exit 7'
    code=$?; [ $code = 7 ] || fail "exit code $code of a program that ends with 7"
    nodedock run-with --timeout 10 --class mock-gpu -- /nonexistent 2>/dev/null
    code=$?; [ $code = 127 ] || fail "exit code $code of a program that is not there"
    nodedock run-with --timeout 10 --class mock-gpu -- /etc/passwd 2>/dev/null
    code=$?; [ $code = 126 ] || fail "exit code $code of a file that is no program"
    output=$(nodedock run-with --timeout 10 --class missing -- true 2>&1)
    code=$?; [ $code = 125 ] || fail "exit code $code of a class that does not exist"
    expect_text 'there is no DeviceClass "missing"' "$output"
    output=$(nodedock run-with --timeout 10 --class mock-gpu -- docker compose run web 2>&1)
    code=$?; [ $code = 125 ] || fail "exit code $code with compose"
    expect_text 'a service of compose, may have the device nodedock.dev/CLASS=any' "$output"
    expect_claims 0
}

recipe_claim_made_before() {
    need_podman
    cat >"$work/claim.yaml" <<CLAIM
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: training}
spec:
  devices:
    requests:
      - name: gpus
        exactly: {deviceClassName: mock-gpu, allocationMode: ExactCount, count: 2}
CLAIM
    nodedock claim create -f "$work/claim.yaml" >/dev/null || fail "claim create"
    local output
    for _ in 1 2; do
        output=$(podman_run --rm --runtime "$runtime" --device nodedock.dev/mock-gpu=claim-training "$image" env) || fail "podman run"
        expect_devices 2 "$output"
        expect_claims 1
    done
    nodedock claim delete training >/dev/null || fail "claim delete"
    expect_claims 0
}

recipe_docker_run() {
    need_docker
    local output
    output=$(docker_run --rm --device "$device" "$image" env) || fail "docker run"
    expect_devices 1 "$output"
    output=$(docker_run --rm --device nodedock.dev/mock-gpu=2 "$image" env) || fail "docker run"
    expect_devices 2 "$output"
    output=$(docker_run --rm "$image" env) || fail "docker run without devices"
    expect_devices 0 "$output"
    output=$(docker_run --rm --privileged --device "$device" "$image" env) || fail "docker run --privileged"
    expect_devices 1 "$output"
    [ -x /usr/bin/docker-init ] || [ -x /sbin/docker-init ] || has docker-init || { echo "    without --init: no docker-init" >&2; expect_claims 0; return; }
    output=$(docker_run --rm --init --device "$device" "$image" env) || fail "docker run --init"
    expect_devices 1 "$output"
    expect_claims 0
}

recipe_docker_create_and_exec() { # as the GitHub runner does
    need_docker
    docker create --network none --runtime nodedock --name "$name" --device "$device" "$image" sleep 1000 >/dev/null || fail "docker create"
    expect_claims 0
    docker start "$name" >/dev/null || fail "docker start"
    expect_claims 1
    expect_devices 0 "$(docker exec "$name" env)"
    expect_devices 1 "$(docker exec "$name" sh -c 'cat /proc/1/environ' | tr '\0' '\n')"
    docker rm -f "$name" >/dev/null
    expect_claims 0
}

recipe_docker_gpus() { # as the GitLab runner does: one container for several steps
    need_docker
    local output
    output=$(docker_run --rm --gpus "driver=cdi,\"device=$device,nodedock.dev/mock-gpu=2\"" "$image" env) || fail "docker run --gpus"
    expect_devices 3 "$output"
    docker create --interactive --network none --runtime nodedock --name "$name" --gpus "driver=cdi,device=$device" "$image" sh >/dev/null || fail "docker create"
    for _ in 1 2; do
        output=$(docker start --attach --interactive "$name" <<<env) || fail "docker start"
        expect_devices 1 "$output"
        expect_claims 0
    done
    docker rm -f "$name" >/dev/null
}

# The shell of a job as the GitLab runner starts it: in a process group of its own, with the script on standard input.
job_shell() { # COMMAND
    local trap="trap 'exit 1' TERM"
    exec setsid bash -l <<<"$trap
set -o errexit
($trap; eval $(printf '%q' "$1")) </dev/null
exit 0"
}

recipe_gitlab_shell() {
    has setsid || skip "no setsid"
    local run_with="$bin/nodedock run-with --class mock-gpu --timeout 10 --" output job
    output=$(job_shell "$run_with env") || fail "run-with in a job"
    expect_devices 1 "$output"
    expect_claims 0
    # A job that is cancelled: its process group gets SIGTERM.
    job_shell "$run_with sh -c 'env; exec sleep 1000'" >"$work/job.log" &
    job=$!
    for _ in $(seq 100); do [ "$(devices_in "$(cat "$work/job.log")")" = 1 ] && break; sleep 0.1; done
    expect_claims 1
    kill -TERM -- "-$job"
    wait "$job" && fail "a cancelled job succeeded"
    expect_claims 0
}

recipe_docker_restart() {
    need_docker
    docker_run -d --name "$name" --restart always --device nodedock.dev/mock-gpu=$all_devices "$image" sleep 1000 >/dev/null || fail "docker run"
    expect_claims 1
    local before output
    before=$(claims)
    output=$(docker_run --rm --device "$device" "$image" env 2>&1) && fail "a device was given twice"
    expect_text "0 of $all_devices devices can be used: $all_devices in use; claims with such devices: default/$before" "$output"
    docker restart -t 0 "$name" >/dev/null || fail "docker restart"
    expect_claims 1
    [ "$(claims)" != "$before" ] || fail "the claim is that of the container before: $before"
    before=$(claims)
    kill -9 "$(docker inspect -f '{{.State.Pid}}' "$name")"
    for _ in $(seq 50); do [ "$(claims)" != "$before" ] && [ -n "$(claims)" ] && break; sleep 0.1; done
    expect_claims 1
    [ "$(claims)" != "$before" ] || fail "the policy started no container"
    docker rm -f "$name" >/dev/null
    expect_claims 0
}

recipe_docker_daemon_killed() { # nodedockd: the container keeps its device, and its end frees it
    need_docker
    docker_run -d --name "$name" --device "$device" "$image" sleep 1000 >/dev/null || fail "docker run"
    expect_claims 1
    kill_daemon 9
    docker rm -f "$name" >/dev/null
    start_daemon
    expect_claims 0
    local output
    output=$(docker_run --rm --device "$device" "$image" env) || fail "docker run"
    expect_devices 1 "$output"
}

recipe_docker_default_runtime() {
    need_docker
    [ "$(docker info --format '{{.DefaultRuntime}}')" = nodedock ] || skip "the default runtime of docker is not nodedock"
    local output
    output=$(docker run --rm --network none --device "$device" "$image" env) || fail "docker run"
    expect_devices 1 "$output"
    output=$(docker run --rm --network none "$image" env) || fail "docker run without devices"
    expect_devices 0 "$output"
    expect_claims 0
}

recipe_docker_without_runtime() { # what a user sees
    need_docker
    [ "$(docker info --format '{{.DefaultRuntime}}')" != nodedock ] || skip "the default runtime of docker is nodedock"
    local output
    output=$(docker run --rm --network none --device "$device" "$image" env 2>&1) && fail "a container started without its device"
    expect_text "the container has no device for $device" "$output"
    output=$(docker_run --rm --device nodedock.dev/missing=any "$image" env 2>&1) && fail "a class that does not exist"
    expect_text "unresolvable CDI devices nodedock.dev/missing=any" "$output"
}

recipe_run_with_docker() {
    need_docker
    local output
    output=$(nodedock run-with --timeout 10 --class mock-gpu -- docker run --rm --network none "$image" env) || fail "run-with"
    expect_devices 1 "$output"
    nodedock run-with --timeout 10 --class mock-gpu -- docker run -d --name "$name" --network none "$image" sleep 1000 >/dev/null || fail "run-with"
    sleep 1
    expect_claims 1
    docker rm -f "$name" >/dev/null
    expect_claims 0
}

compose() { (cd "$work/compose" && $COMPOSE -p "$name" -f "$work/compose/compose.yaml" "$@" 2>&1); }

compose_checks() {
    local output
    output=$(compose up -d --scale web=3) || fail "compose up: $output"
    expect_claims 3
    expect_distinct
    output=$(compose run --rm web env) || fail "compose run: $output"
    expect_devices 1 "$output"
    expect_claims 3
    output=$(compose down -t 0) || fail "compose down: $output"
    expect_claims 0
}

recipe_compose() {
    need_compose
    version_at_least "$compose_version" 2.40 || skip "compose $compose_version takes no CDI name in devices"
    cat >"$work/compose/compose.yaml" <<COMPOSE
services:
  web:
    image: $image
    command: sleep 1000
    network_mode: none
    runtime: nodedock
    devices: ["$device"]
COMPOSE
    compose_checks
}

recipe_compose_reservations() { # also with older versions
    need_compose
    cat >"$work/compose/compose.yaml" <<COMPOSE
services:
  web:
    image: $image
    command: sleep 1000
    network_mode: none
    runtime: nodedock
    deploy:
      resources:
        reservations:
          devices:
            - driver: cdi
              capabilities: [gpu]
              device_ids: ["$device"]
COMPOSE
    compose_checks
}

recipe_nerdctl() {
    need_nerdctl
    local output
    output=$($NERDCTL run --rm --network none --runtime "$runtime" --device "$device" --rootfs "$work/rootfs" env) || fail "nerdctl run"
    expect_devices 1 "$output"
    $NERDCTL run -d --name "$name" --network none --runtime "$runtime" --device "$device" --rootfs "$work/rootfs" sleep 1000 >/dev/null || fail "nerdctl run"
    expect_claims 1
    $NERDCTL restart -t 1 "$name" >/dev/null || fail "nerdctl restart"
    expect_claims 1
    $NERDCTL rm -f "$name" >/dev/null
    expect_claims 0
}

recipe_quadlet_generator() {
    has podman || skip "no podman"
    local quadlet=/usr/libexec/podman/quadlet output
    [ -x $quadlet ] || quadlet=/usr/lib/podman/quadlet
    [ -x $quadlet ] || skip "no quadlet"
    mkdir -p "$work/units"
    quadlet_unit >"$work/units/$name.container"
    output=$(QUADLET_UNIT_DIRS=$work/units $quadlet -dryrun 2>/dev/null) || fail "quadlet"
    expect_text "podman --runtime=$runtime run" "$output"
    expect_text "--device $device" "$output"
}

quadlet_unit() {
    cat <<UNIT
[Unit]
Wants=nodedock.service
After=nodedock.service

[Container]
Image=localhost/$image
Exec=sh -c 'env >/out/env; sleep 1000'
AddDevice=$device
GlobalArgs=--runtime=$runtime
Network=none
Volume=$work/out:/out
PodmanArgs=$PODMAN_FLAGS

[Service]
Restart=always
UNIT
}

recipe_quadlet() {
    need_systemd
    need_podman
    mkdir -p /etc/containers/systemd "$work/out"
    quadlet_unit >"/etc/containers/systemd/$name.container"
    systemctl daemon-reload
    systemctl start "$name" || fail "systemctl start: $(journalctl -u "$name" -n 20 --no-pager)"
    expect_claims 1
    for _ in $(seq 50); do [ -s "$work/out/env" ] && break; sleep 0.1; done
    expect_devices 1 "$(cat "$work/out/env")"
    local before
    before=$(claims)
    systemctl restart "$name" || fail "systemctl restart"
    expect_claims 1
    [ "$(claims)" != "$before" ] || fail "the claim is that of the container before"
    systemctl stop "$name"
    rm "/etc/containers/systemd/$name.container"
    systemctl daemon-reload
    expect_claims 0
}

recipe_systemd_service() {
    need_systemd
    mkdir -p "$work/out"
    cat >"/run/systemd/system/$name-program.service" <<UNIT
[Unit]
Wants=nodedock.service
After=nodedock.service

[Service]
Environment=NODEDOCK_ROOT=$NODEDOCK_ROOT
ExecStart=$bin/nodedock run-with --class mock-gpu --wait-for-missing -- /bin/sh -c 'env >$work/out/program; exec sleep 1000'
UNIT
    systemctl daemon-reload
    systemctl start "$name-program" || fail "systemctl start"
    expect_claims 1
    for _ in $(seq 50); do [ -s "$work/out/program" ] && break; sleep 0.1; done
    expect_devices 1 "$(cat "$work/out/program")"
    systemctl kill -s KILL "$name-program"
    expect_claims 0
    systemctl stop "$name-program" 2>/dev/null
    rm "/run/systemd/system/$name-program.service"
    systemctl daemon-reload
}

# The scripts of Slurm with the class and the daemon of these recipes.
slurm_scripts() { # DIRECTORY
    local file
    for file in prolog epilog task-prolog; do
        sed -e "s|^class=gpu|class=mock-gpu|" -e "s|^export PATH=|export NODEDOCK_ROOT=$NODEDOCK_ROOT PATH=$work/bin:|" \
            "$here/deploy/slurm/$file.sh" >"$1/$file.sh" || fail "read the scripts"
        chmod 0755 "$1/$file.sh"
    done
}

slurm_script() { # SCRIPT JOB [GPUS [RESTARTS]]: without the rest of the environment
    env -i SLURM_JOB_ID="$2" ${3:+SLURM_JOB_GPUS=$3} ${4:+SLURM_JOB_RESTART_COUNT=$4} "$work/slurm/$1.sh" >/dev/null 2>&1 || fail "$1 of job $2 returned $?"
}

recipe_slurm_scripts() {
    mkdir -p "$work/slurm"
    slurm_scripts "$work/slurm"
    rm -rf /run/nodedock-slurm
    slurm_script prolog 1 0,1
    slurm_script prolog 1 0,1
    expect_claims 1
    expect_text slurm-job-1 "$(claims)"
    local output
    output=$(env -i SLURM_JOB_ID=1 SLURM_JOB_GPUS=0,1 "$work/slurm/task-prolog.sh") || fail "task-prolog"
    grep -qE '^export NODEDOCK_CDI_DEVICES=mock-gpu\.nodedock\.dev/claim=[^,]+,mock-gpu\.nodedock\.dev/claim=[^,]+$' <<<"$output" || fail "task-prolog: $output"
    slurm_script epilog 1 0,1
    slurm_script epilog 1 0,1
    expect_claims 0
    # The prolog of a job that has ended, and the epilog first.
    slurm_script prolog 1 0,1
    expect_claims 0
    slurm_script epilog 2 0
    slurm_script prolog 2 0
    expect_claims 0
    # A job that is requeued: the epilog of its first start has the number of the second.
    slurm_script prolog 7 0 0
    slurm_script epilog 7 0 1
    slurm_script epilog 7 0 1
    expect_claims 0
    slurm_script prolog 7 0 1
    expect_claims 1
    slurm_script epilog 7 0 1
    expect_claims 0
    # A job without GPUs, and one whose devices are not there.
    slurm_script prolog 3
    expect_claims 0
    slurm_script prolog 4 0,1,2,3,4,5
    env -i SLURM_JOB_ID=4 SLURM_JOB_GPUS=0 "$work/slurm/task-prolog.sh" >/dev/null 2>&1 && fail "a task without its devices began"
    slurm_script epilog 4 0,1,2,3,4,5
    expect_claims 0
    # Claims of jobs that a restart of the machine ended.
    slurm_script prolog 5 0
    expect_claims 1
    rm -rf /run/nodedock-slurm
    slurm_script prolog 6 0
    expect_claims 1
    expect_text slurm-job-6 "$(claims)"
    slurm_script epilog 6 0
    expect_claims 0
    rm -rf /run/nodedock-slurm
}

recipe_slurm_jobs() {
    has srun && sinfo -h >/dev/null 2>&1 || skip "no Slurm"
    [ -n "$SLURM_SCRIPTS" ] || skip "SLURM_SCRIPTS names no directory"
    mkdir -p "$work/slurm" "$work/slurm-before"
    slurm_scripts "$work/slurm"
    cp -p "$SLURM_SCRIPTS"/{prolog,epilog,taskprolog}.sh "$work/slurm-before/" || fail "the scripts of SLURM_SCRIPTS"
    cp "$work/slurm/prolog.sh" "$work/slurm/epilog.sh" "$SLURM_SCRIPTS/"
    cp "$work/slurm/task-prolog.sh" "$SLURM_SCRIPTS/taskprolog.sh"
    rm -rf /run/nodedock-slurm
    local output again code=0
    output=$(timeout 60 srun --gres=gpu:1 sh -c 'echo "devices=$NODEDOCK_CDI_DEVICES"') || code=$?
    again=$(timeout 60 srun sh -c 'echo "devices=$NODEDOCK_CDI_DEVICES"') || code=$?
    local batch=$work/batch.out
    : >"$batch"
    chmod 0666 "$batch"
    timeout 60 sbatch -W -o "$batch" --gres=gpu:2 --wrap 'echo "devices=$NODEDOCK_CDI_DEVICES"' >/dev/null || code=$?
    local requeued=$work/requeued.out
    : >"$requeued"
    chmod 0666 "$requeued"
    cat >"$work/requeue.sh" <<JOB
#!/bin/sh
echo "devices=\$NODEDOCK_CDI_DEVICES" >>$requeued
[ -n "\$SLURM_RESTART_COUNT" ] || { scontrol requeue "\$SLURM_JOB_ID"; sleep 60; }
JOB
    local id
    id=$(sbatch --parsable --requeue -o /dev/null --gres=gpu:1 "$work/requeue.sh")
    for _ in $(seq 90); do # Slurm waits some time with the second start
        scontrol update "jobid=$id" starttime=now 2>/dev/null
        [ "$(wc -l <"$requeued")" = 2 ] && [ -z "$(squeue -h -j "$id" 2>/dev/null)" ] && break
        sleep 2
    done
    cp -p "$work/slurm-before"/* "$SLURM_SCRIPTS/"
    [ $code = 0 ] || fail "a job ended with $code: $output $again $(cat "$batch")"
    expect_text "devices=mock-gpu.nodedock.dev/claim=" "$output"
    [ "$again" = devices= ] || fail "a job without GPUs has $again"
    [ "$(grep -c 'devices=mock-gpu.nodedock.dev/claim=' "$requeued")" = 2 ] || fail "the requeued job had $(cat "$requeued")"
    [ "$(tr ',' '\n' <"$batch" | grep -c 'claim=')" = 2 ] || fail "the batch job has $(cat "$batch")"
    expect_claims 0
    rm -rf /run/nodedock-slurm
}

# --- main ---

[ "$(id -u)" = 0 ] || { echo "run this as root, on a machine for experiments" >&2; exit 2; }
for file in "$bin/nodedock" "$bin/nodedockd" "$driver"; do
    [ -e "$file" ] || { echo "there is no $file: cargo build -p nodedockd -p nodedock && cargo xtask drivers" >&2; exit 2; }
done
if compgen -G '/var/run/cdi/nodedock.dev-*-mock-gpu.json' >/dev/null; then
    echo "another daemon has the class mock-gpu: stop it, and remove /var/run/cdi/nodedock.dev-*-mock-gpu.json" >&2
    exit 2
fi
mkdir -p "$work/bin" "$NODEDOCK_ROOT/var/lib/nodedock/drivers" /var/run/cdi
for file in nodedock nodedockd; do ln -s "$bin/$file" "$work/bin/$file"; done
ln -s "$bin/nodedock" "$runtime"
chmod -R go-w "$NODEDOCK_ROOT"
cp "$driver" "$NODEDOCK_ROOT/var/lib/nodedock/drivers/mock-gpu.wasm"
cp "$here/example-drivers/mock-gpu/mock-gpu.grant.yaml" "$NODEDOCK_ROOT/var/lib/nodedock/drivers/"

finish() {
    remove_all
    kill_daemon TERM
    rm -f /var/run/cdi/nodedock.dev-*-mock-gpu.json
    if has podman; then podman image rm -f "$image" >/dev/null 2>&1; fi
    if has docker; then docker image rm -f "$image" >/dev/null 2>&1; fi
    [ "$failed" = 0 ] && rm -rf "$work"
}
failed=0
trap finish EXIT
trap 'exit 130' INT TERM
start_daemon

[ -n "$recipes" ] || recipes=$(declare -F | awk '$3 ~ /^recipe_/ { sub("recipe_", "", $3); print $3 }')
ran=0 skipped=0
for recipe in $recipes; do
    declare -F "recipe_$recipe" >/dev/null || { echo "there is no recipe $recipe" >&2; failed=1; continue; }
    (trap - EXIT; "recipe_$recipe")
    code=$?
    case $code in
    0) echo "ok    $recipe"; ran=$((ran + 1)) ;;
    77) echo "skip  $recipe"; skipped=$((skipped + 1)) ;;
    *) echo "FAIL  $recipe"; failed=1; remove_all ;;
    esac
done
echo "$ran ok, $skipped skipped"
[ $failed = 0 ] || echo "the daemon's log is $work/daemon.log" >&2
exit $failed
