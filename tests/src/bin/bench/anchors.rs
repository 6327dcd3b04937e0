//! The daemon beside what it is compared with, in the same run: a kubelet's DRA manager and device manager with a plugin that answers at
//! once, and a DRA driver on the official Go library that stores a checkpoint with a sync. Each row of ours is a ratio to theirs.
//!
//! The managers are called in their process, and call a plugin in another one; they read a claim from memory. The daemon is called in another
//! process, by the node API, with the claim in the request, and calls its driver in its own process, or a device plugin in ours.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use nodedock_proto::node::v1;
use nodedock_tests::cluster::NODE;
use nodedock_tests::drivers::MOCK_GPU_NAME;
use nodedock_tests::go::Module;
use nodedock_tests::machine::or_skip;
use nodedock_tests::{DEADLINE, Root, places};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::calls::{Calls, ClusterNode, DeviceManager, Dra};
use crate::claims::{AT_ONCE, come_and_go, daemon, fill, measured, side_by_side};
use crate::cold::Condition;
use crate::devices::{Node, ORDINARY};
use crate::manager::{DraManager, put_pod};
use crate::table::{Table, Times};
use crate::{CdiOnTmpfs, Size};

/// Name of the driver in Go.
const OFFICIAL: &str = "gpu.example.com";
const NEWEST: &str = "Kubernetes 1.37.2, a plugin that answers at once";

/// Ratios that are wanted of prepares, unprepares and pairs of them 64 at once, by the number of live claims.
const OF_CLAIMS: [[Option<f64>; 3]; 4] = [
    [Some(0.5), Some(0.6), Some(0.125)],
    [None, None, None],
    [Some(0.12), Some(0.2), None],
    [None, None, Some(0.01)],
];
/// The same of allocations, by the number of live pods.
const OF_DEVICES: [Option<f64>; 4] = [Some(0.8), None, Some(0.1), None];

pub(crate) async fn run(size: Size, table: &mut Table) {
    let managers = build(
        "kubernetes",
        "dra-manager",
        "-s -w",
        Some("dra-manager.mod"),
    );
    let managers = managers.await;
    let managers = or_skip("rows beside a kubelet's managers", managers);
    if let Some(program) = &managers {
        for (live, goals) in size.anchored.into_iter().zip(OF_CLAIMS) {
            claims(program, size, live, goals, table).await;
        }
        devices(program, size, (ORDINARY, 0), OF_DEVICES[0], table).await;
        for (pods, goal) in size.anchored.into_iter().zip(OF_DEVICES) {
            devices(program, size, (size.devices, pods), goal, table).await;
        }
    }
    let driver = build("go", "dra-driver", "", None).await;
    if let Some(program) = or_skip("rows beside a driver in Go", driver) {
        let node = ClusterNode::start().await;
        let official = Official::start(&program, &node).await;
        drivers(&official, &node, size, table).await;
        if let Some(program) = &managers {
            behind_a_kubelet(program, &node, size, table).await;
        }
    }
}

/// A program of `tests/interop`, which the tests build too. The error says in one line why there is none.
async fn build(
    module: &'static str,
    name: &'static str,
    linker_flags: &'static str,
    requirements: Option<&'static str>,
) -> Result<PathBuf, String> {
    let module = Module {
        sources: Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("interop")
            .join(module),
        output: places::tmp().join("interop"),
        fetch_seconds: 900,
        build_seconds: 1800,
        linker_flags,
        requirements,
    };
    let built = tokio::task::spawn_blocking(move || module.program(name));
    built.await.expect("the build ends")
}

fn goal(ratio: Option<f64>) -> String {
    ratio.map_or(String::new(), |ratio| format!("goal: {ratio}"))
}

/// Runs a part of the program with the managers, on a directory of the disk that daemons have, and returns the times that it prints.
async fn run_part<T: DeserializeOwned>(program: &Path, part: &str, flags: &[(&str, usize)]) -> T {
    let root = Root::new();
    let dir = root.path().join("k");
    std::fs::create_dir(&dir).expect("a new directory below the root");
    let mut command = Command::new(program);
    command.arg(part).arg("--dir").arg(dir);
    for (name, value) in flags {
        command.arg(format!("--{name}={value}"));
    }
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output();
    let output = output.await.expect("start a program that was built");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{part}: {}\n{errors}",
        output.status
    );
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{part} does not print its times: {error}\n{errors}"))
}

/// Times in nanoseconds.
fn times(nanoseconds: &[u64]) -> Times {
    let mut times = Times::default();
    nanoseconds
        .iter()
        .for_each(|took| times.add(Duration::from_nanos(*took)));
    times
}

/// Nanoseconds of the DRA manager.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ClaimTimes {
    prepare: Vec<u64>,
    unprepare: Vec<u64>,
    /// Of all pairs that are under way at once.
    at_once: u64,
}

async fn claims(
    program: &Path,
    size: Size,
    live: usize,
    [prepare, unprepare, pair]: [Option<f64>; 3],
    table: &mut Table,
) {
    let (calls, pairs) = (size.anchored_calls, size.anchored_pairs);
    let flags = [
        ("live", live),
        ("calls", calls),
        ("pairs", pairs),
        ("lanes", AT_ONCE),
    ];
    let manager: ClaimTimes = run_part(program, "bench-claims", &flags).await;
    let (prepares, unprepares, took) = claims_of_daemon(size, live).await;
    let theirs = |what: &str| format!("kubelet's DRA manager: {what}, {live} live");
    let ours = |what: &str| format!("anchors: {what}, {live} live");
    for (what, of_manager, of_daemon, wanted) in [
        ("prepare", manager.prepare, prepares, prepare),
        ("unprepare", manager.unprepare, unprepares, unprepare),
    ] {
        table.times(&theirs(what), &times(&of_manager), "", NEWEST);
        table.times(&ours(what), &of_daemon, &theirs(what), &goal(wanted));
    }
    let what = format!("prepare and unprepare, {AT_ONCE} at once");
    let each = |all: Duration| vec![all.as_secs_f64() * 1e6 / pairs as f64];
    let rate = |all: Duration| format!("{:.0} pairs/s", pairs as f64 / all.as_secs_f64());
    let of_manager = Duration::from_nanos(manager.at_once);
    let note = rate(of_manager);
    table.figures(&theirs(&what), each(of_manager), "µs", "", &note);
    let note = format!("{}; {}", rate(took), goal(pair));
    table.figures(
        &ours(&what),
        each(took),
        "µs",
        &theirs(&what),
        note.trim_end_matches("; "),
    );
}

/// Times of the same calls at a daemon with so many live claims: of prepares, of unprepares, and of all pairs at once.
async fn claims_of_daemon(size: Size, live: usize) -> (Times, Times, Duration) {
    let cdi = CdiOnTmpfs::new();
    let daemon = daemon(&cdi).await;
    fill(&daemon, live).await;
    let (mut prepares, mut unprepares) = (Times::default(), Times::default());
    let mut client = daemon.client();
    for n in 0..size.anchored_calls {
        come_and_go(&mut client, measured(n), &mut prepares, &mut unprepares).await;
    }
    let requests = (0..size.anchored_pairs).map(measured).collect();
    let client = daemon.client();
    let started = Instant::now();
    let pairs = side_by_side(requests, move |request: v1::PreparePodRequest| {
        let mut client = client.clone();
        async move {
            let pod = request.pod.clone();
            let answer = client.prepare_pod(request).await;
            let answer = answer.expect("prepare").into_inner();
            let unprepare = v1::UnpreparePodRequest { pod };
            client.unprepare_pod(unprepare).await.expect("unprepare");
            usize::from(answer.claims[0].outcome != "prepared")
        }
    });
    let (_, failed) = pairs.await;
    assert_eq!(failed, 0, "prepares that failed");
    (prepares, unprepares, started.elapsed())
}

/// Nanoseconds of the device manager.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DeviceTimes {
    allocate: Vec<u64>,
}

/// One of so many devices for each pod. The device manager frees the device of the pod before in the next Allocate, the daemon when the pod
/// is unprepared.
async fn devices(
    program: &Path,
    size: Size,
    (devices, pods): (usize, usize),
    wanted: Option<f64>,
    table: &mut Table,
) {
    let calls = size.anchored_calls;
    let flags = [("live", pods), ("devices", devices), ("calls", calls)];
    let manager: DeviceTimes = run_part(program, "bench-devices", &flags).await;
    let node = Node::start(devices).await;
    node.fill(pods, 1).await;
    let mut daemon = DeviceManager(node.client());
    let mut allocates = Times::default();
    for n in 0..calls {
        allocates.time(daemon.come(n)).await;
        daemon.go(n).await;
    }
    let row = |whose: &str| format!("{whose}: allocate one of {devices} devices, {pods} live pods");
    let (theirs, ours) = (row("kubelet's device manager"), row("anchors"));
    table.times(&theirs, &times(&manager.allocate), "", NEWEST);
    table.times(&ours, &allocates, &theirs, &goal(wanted));
}

/// A driver in Go that runs. It is killed when dropped.
struct Official {
    socket: PathBuf,
    _process: Child,
    _cdi: CdiOnTmpfs,
    _root: Root,
}

impl Official {
    /// Starts it, with its files on a disk and its CDI specs where those of a daemon are, and returns when it listens.
    async fn start(program: &Path, node: &ClusterNode) -> Self {
        let (root, cdi) = (Root::new(), CdiOnTmpfs::new());
        let cdi_dir = match &cdi.0 {
            Some(dir) => dir.path().to_owned(),
            None => root.cdi(),
        };
        let data = root.path().join("plugin");
        std::fs::create_dir(&data).expect("a new directory below the root");
        let mut command = Command::new(program);
        command
            .args(["--driver-name", OFFICIAL, "--node-name", NODE, "--v", "0"])
            .args(["--server", &node.cluster.api.url()])
            .arg("--registry-dir")
            .arg(node.daemon.kubelet().join("plugins_registry"))
            .arg("--data-dir")
            .arg(&data)
            .arg("--cdi-dir")
            .arg(cdi_dir)
            .arg("--checkpoint")
            .arg(root.path().join("checkpoint.json"));
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .kill_on_drop(true);
        let process = command.spawn().expect("start a program that was built");
        let socket = data.join("dra.sock");
        let listens = async {
            while UnixStream::connect(&socket).await.is_err() {
                tokio::task::yield_now().await;
            }
        };
        timeout(DEADLINE, listens)
            .await
            .expect("the driver in Go listens");
        Self {
            socket,
            _process: process,
            _cdi: cdi,
            _root: root,
        }
    }
}

/// Times of calls at the driver in Go and at ours.
type OfBoth = [Times; 2];

/// The calls of a kubelet at the driver in Go and at ours, in turns. Both read each claim from the same API server.
async fn drivers(official: &Official, node: &ClusterNode, size: Size, table: &mut Table) {
    let socket = official.socket.clone();
    let mut both = [Dra::new(socket, &node.cluster, OFFICIAL, NODE), node.dra()];
    let mut numbers = 0..;
    for condition in Condition::ALL {
        let load = condition.begin();
        let (mut comes, mut goes) = (OfBoth::default(), OfBoth::default());
        for n in numbers.by_ref().take(condition.calls(size)) {
            for (calls, times) in both.iter_mut().zip(&mut comes) {
                calls.make_ready(n);
                condition.pause().await;
                times.time(calls.come(n)).await;
            }
            for (calls, times) in both.iter_mut().zip(&mut goes) {
                condition.pause().await;
                times.time(calls.go(n)).await;
            }
        }
        drop(load);
        let name = Dra::GO.expect("a driver has a call for it");
        beside_official(Dra::COME, condition, &comes, None, table);
        beside_official(name, condition, &goes, None, table);
    }
}

/// Pods of the driver in Go and of ours, in turns, at a kubelet's DRA manager: its times, with its own request for the claim and its
/// checkpoint.
async fn behind_a_kubelet(program: &Path, node: &ClusterNode, size: Size, table: &mut Table) {
    let root = node.daemon.kubelet();
    let mut manager = DraManager::start(program, &root, &node.cluster);
    let gpus = format!("{NODE}/gpus");
    let both = [(OFFICIAL, NODE), (MOCK_GPU_NAME, gpus.as_str())];
    for (driver, _) in both {
        manager.until_registered(driver).await;
    }
    let mut numbers = 0..;
    for (condition, prepare, unprepare) in [
        (Condition::Cold, 1.0, Some(1.2)),
        (Condition::Busy, 0.9, None),
    ] {
        let load = condition.begin();
        let (mut prepares, mut unprepares) = (OfBoth::default(), OfBoth::default());
        for n in numbers.by_ref().take(condition.calls(size)) {
            let pods = both.map(|(driver, _)| format!("{driver}-pod-{n}"));
            for (((driver, pool), pod), times) in both.iter().zip(&pods).zip(&mut prepares) {
                put_pod(&node.cluster, pod, driver, pool, "gpu-0");
                condition.pause().await;
                times.add(manager.carry_out("prepare", pod).await);
            }
            for (pod, times) in pods.iter().zip(&mut unprepares) {
                condition.pause().await;
                times.add(manager.carry_out("unprepare", pod).await);
            }
        }
        drop(load);
        let row = |what: &str| format!("{what} behind a kubelet");
        let (what, wanted) = (row("prepare"), Some(prepare));
        beside_official(&what, condition, &prepares, wanted, table);
        let what = row("unprepare");
        beside_official(&what, condition, &unprepares, unprepare, table);
    }
}

/// Rows of the driver in Go and of ours.
fn beside_official(
    what: &str,
    condition: Condition,
    [theirs, ours]: &OfBoth,
    wanted: Option<f64>,
    table: &mut Table,
) {
    let row = |whose: &str| format!("{whose}: {what}, {}", condition.name());
    let against = row("driver in Go");
    let note = "the official library, a checkpoint with a sync";
    table.times(&against, theirs, "", note);
    table.times(&row("anchors"), ours, &against, &goal(wanted));
}
