//! Programs of every kind race for the devices of one pool: by class, by a pod's limits, by claims of a manifest and by name.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use nodedock_tests::drivers::MOCK_GPU_FILE;
use nodedock_tests::places::nodedock;
use nodedock_tests::{Daemon, Options};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::{CLASS, api};

const DEVICES: usize = 8;
const PROGRAMS: usize = 64;
const CRASHES: usize = 6;
/// Deadline for all of them together, on a busy machine.
const LONG: Duration = Duration::from_secs(240);

/// Tries until it has a device, fails if another one has it too, and frees it. `$0`: the program; `$1`: the directory of locks; `$2`: the pod;
/// then how to prepare. A try that a crash has interrupted is repeated, as every caller repeats it. It has the device for the time of two calls, which
/// is long enough to meet another that has it too.
const HOLDER: &str = r#"
nodedock=$0 locks=$1 pod=$2
shift 2
until out=$("$nodedock" prepare "$@" -o json 2>> "$locks/log"); do :; done
device=$(printf %s "$out" | grep -o 'gpu-[0-9]' | head -n 1)
test -n "$device" || device=$(printf %s "$*" | grep -o 'gpu-[0-9]' | head -n 1)
test -n "$device" || exit 8
mkdir "$locks/$device" || exit 9
"$nodedock" get claims > "$locks/work-$pod" 2>&1; "$nodedock" get pods >> "$locks/work-$pod" 2>&1
echo "$device" >> "$locks/given"
rmdir "$locks/$device"
until "$nodedock" unprepare --ignore-not-found "default/$pod" >> "$locks/log" 2>&1; do :; done
"#;

/// The same of a program that `run-with` gives a device.
const PROGRAM: &str = r#"
# Behind the devices is the one by which a claim follows a container.
device=gpu-${NODEDOCK_CDI_DEVICES##*-gpu-}
device=${device%%,*}
mkdir "$0/$device" || exit 9
"$1" get claims > "$0/work-$device" 2>&1; "$1" get pods >> "$0/work-$device" 2>&1
echo "$device" >> "$0/given"
rmdir "$0/$device"
"#;

fn pod(name: &str, resources: &str, claims: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: default, uid: uid-{name}}}\nspec:\n  {claims}\n  containers: [{{name: main, image: none, resources: {{{resources}}}}}]\n"
    )
}

/// A claim that a scheduler has allocated, and its pod.
fn allocated(name: &str, device: &str) -> String {
    let mut text = format!(
        "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {{name: {name}, namespace: default, uid: claim-{name}}}\n"
    );
    writeln!(
        text,
        "spec: {{devices: {{requests: [{{name: r, exactly: {{deviceClassName: gpu}}}}]}}}}"
    )
    .unwrap();
    let result =
        format!("{{request: r, driver: mock-gpu.nodedock.dev, pool: gpus, device: {device}}}");
    let consumer = format!("{{resource: pods, name: {name}, uid: uid-{name}}}");
    writeln!(
        text,
        "status: {{allocation: {{devices: {{results: [{result}]}}}}, reservedFor: [{consumer}]}}\n---"
    )
    .unwrap();
    text + &pod(
        name,
        "claims: [{name: c}]",
        &format!("resourceClaims: [{{name: c, resourceClaimName: {name}}}]"),
    )
}

/// The `n`th program.
fn start(daemon: &Daemon, locks: &Path, n: usize) -> Child {
    let (name, device) = (format!("program-{n}"), format!("gpu-{}", n / 4 % DEVICES));
    let mut holder = Command::new("sh");
    holder
        .env("NODEDOCK_ROOT", daemon.path())
        .args(["-c", HOLDER])
        .arg(nodedock())
        .arg(locks)
        .arg(&name);
    let mut command = match n % 4 {
        0 => {
            let mut program = daemon.command();
            program
                .args(["run-with", "--class", "gpu", "--", "sh", "-c", PROGRAM])
                .arg(locks)
                .arg(nodedock());
            program
        }
        1 => {
            let text = pod(
                &name,
                "limits: {example.com/gpu: 1}",
                "restartPolicy: Never",
            );
            holder
                .arg("-f")
                .arg(daemon.write(&format!("{name}.yaml"), text));
            holder
        }
        2 => {
            holder
                .arg("-f")
                .arg(daemon.write(&format!("{name}.yaml"), allocated(&name, &device)));
            holder
        }
        _ => {
            holder.args([
                "--pod",
                &name,
                "--device",
                &format!("mock-gpu.nodedock.dev/gpus/{device}"),
            ]);
            holder
        }
    };
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

#[tokio::test]
async fn racing_programs_never_share_a_device() {
    let mut daemon = Daemon::start_with(
        Options::default()
            .config("claims: {exclusiveWaitMs: 3000}\n")
            .flag("--local-api"),
    )
    .await;
    daemon.install_gpus(&format!(
        "pools:\n- {{name: gpus, count: {DEVICES}, extendedResource: example.com/gpu}}\n"
    ));
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.until_allocatable("example.com/gpu", DEVICES).await;
    let class = daemon.write("class.yaml", CLASS);
    daemon
        .cli(&["claim", "create", "-f", class.to_str().unwrap()])
        .await
        .done();

    let locks = daemon.path().join("locks");
    fs::create_dir(&locks).unwrap();
    let given = || fs::read_to_string(locks.join("given")).map_or(0, |text| text.lines().count());
    let mut programs: Vec<_> = (0..PROGRAMS).map(|n| start(&daemon, &locks, n)).collect();
    for crash in 1..=CRASHES {
        // Some have had a device since the last one.
        let wanted = crash * PROGRAMS / (CRASHES + 2);
        let some = async {
            while given() < wanted {
                for (n, program) in programs.iter_mut().enumerate() {
                    let ended = program.try_wait().unwrap();
                    assert!(
                        ended.is_none_or(|ended| ended.success()),
                        "program {n}: {ended:?}\n{}",
                        daemon.log()
                    );
                }
                tokio::task::yield_now().await;
            }
        };
        timeout(LONG, some)
            .await
            .unwrap_or_else(|_| panic!("{} of {wanted}\n{}", given(), daemon.log()));
        daemon.crash().await;
    }
    for (n, program) in programs.iter_mut().enumerate() {
        let ended = timeout(LONG, program.wait()).await;
        let ended = ended
            .unwrap_or_else(|_| panic!("program {n} gets no device\n{}", daemon.log()))
            .unwrap();
        assert!(ended.success(), "program {n}: {ended}\n{}", daemon.log());
    }
    assert_eq!(given(), PROGRAMS, "each had one");
    let api = api(&daemon).await;
    while !api.claims(None).await.unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    daemon.until_no_claims().await;
    daemon.assert_empty().await;
}
