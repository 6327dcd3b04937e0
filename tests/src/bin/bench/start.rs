//! Start with many claims, a reboot, a file dropped in, and memory at rest with many claims and drivers.

use std::time::Instant;

use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_FILE, side_file, wasm};
use nodedock_tests::{Daemon, Options, Root};

use crate::kubelet::end;
use crate::table::{Table, millis};
use crate::{CdiOnTmpfs, Size, claims};

pub(crate) async fn run(size: Size, table: &mut Table) {
    starts(size, table).await;
    reboots(size, table).await;
    drops(size, table).await;
    memory(size, table).await;
}

/// Measures the time from the start of the process to `READY=1`, and to the first driver that serves.
async fn starts(size: Size, table: &mut Table) {
    for live in [size.live[0], size.live[2]] {
        let cdi = CdiOnTmpfs::new();
        let mut daemon = claims::daemon(&cdi).await;
        claims::fill(&daemon, live).await;
        for (how, crash) in [("stop", false), ("kill -9", true)] {
            let (mut ready, mut serving) = (Vec::new(), Vec::new());
            for _ in 0..size.starts {
                end(&mut daemon, crash).await;
                let started = Instant::now();
                daemon.run().await;
                ready.push(millis(started.elapsed()));
                daemon.until_serving(MOCK_GPU_FILE).await;
                serving.push(millis(started.elapsed()));
            }
            let row = |live: usize, what: &str| format!("start after {how}, {live} claims, {what}");
            let first = size.live[0];
            table.figures(&row(live, "ready"), ready, "ms", &row(first, "ready"), "");
            table.figures(
                &row(live, "serving"),
                serving,
                "ms",
                &row(first, "serving"),
                "",
            );
        }
        let row = |live: usize| format!("memory of its own, {live} claims, after a restart");
        table.figures(
            &row(live),
            vec![daemon.memory_mib(OWN_MEMORY)],
            "MiB",
            &row(size.live[0]),
            "",
        );
    }
}

/// Every pod's claim is prepared again after a reboot, 64 at once: the time of all of them, by a daemon that is ready.
async fn reboots(size: Size, table: &mut Table) {
    let live = size.live[1];
    let cdi = CdiOnTmpfs::new();
    let mut daemon = claims::daemon(&cdi).await;
    claims::fill(&daemon, live).await;
    let mut took = Vec::new();
    for boot in 0..size.starts {
        let root = daemon.into_root().await;
        let cdi = CdiOnTmpfs::new();
        daemon =
            Daemon::start_on(root, cdi.options().arg("--boot-id", format!("boot-{boot}"))).await;
        daemon.until_serving(MOCK_GPU_FILE).await;
        let started = Instant::now();
        claims::fill(&daemon, live).await;
        took.push(millis(started.elapsed()));
    }
    table.figures(
        &format!("reboot, {live} pods prepared again"),
        took,
        "ms",
        "",
        "",
    );
}

/// Measures the time from the rename into the directory to the state `serving`, as a watcher of the node API sees it.
async fn drops(size: Size, table: &mut Table) {
    let (mut cold, mut cached) = (Vec::new(), Vec::new());
    for _ in 0..size.loads {
        let root = Root::new();
        root.drop_in("mock-gpu.grant.yaml", side_file(MOCK_GPU, "grant"));
        let daemon = Daemon::start_on(root, Options::default().cold()).await;
        for times in [&mut cold, &mut cached] {
            let bytes = wasm(MOCK_GPU, Form::Core);
            let started = Instant::now();
            daemon.drop_in(MOCK_GPU_FILE, bytes);
            daemon.until_serving(MOCK_GPU_FILE).await;
            times.push(millis(started.elapsed()));
            daemon.take_out(MOCK_GPU_FILE);
            daemon.until_gone(MOCK_GPU_FILE).await;
        }
    }
    table.figures("dropped in to serving, cold", cold, "ms", "", "");
    table.figures(
        "dropped in to serving, from the cache",
        cached,
        "ms",
        "dropped in to serving, cold",
        "",
    );
}

/// Memory that the kernel cannot take back, unlike pages of the program's and of compiled drivers' files.
const OWN_MEMORY: &str = "RssAnon";

/// Resident memory, and the part of its own, of a daemon that has loaded its drivers and rests: just compiled, and after a restart.
async fn memory(size: Size, table: &mut Table) {
    for count in size.drivers {
        let root = Root::new();
        (0..count).for_each(|n| install_numbered(&root, n));
        let mut daemon = Daemon::start_on(root, Options::default().cold()).await;
        all_serving(&daemon, count).await;
        for what in ["just compiled", "after a restart"] {
            if what == "after a restart" {
                daemon.restart().await;
                all_serving(&daemon, count).await;
            }
            for (memory, field) in [
                ("resident memory", "VmRSS"),
                ("memory of its own", OWN_MEMORY),
            ] {
                let row = |count: usize| format!("{memory}, {count} drivers, {what}");
                table.figures(
                    &row(count),
                    vec![daemon.memory_mib(field)],
                    "MiB",
                    &row(size.drivers[0]),
                    "",
                );
            }
        }
    }
}

/// Installs the example driver under a name of its own: its file contains its name as text of the same length.
fn install_numbered(root: &Root, n: usize) {
    let (old, new) = (
        b"mock-gpu.nodedock.dev",
        format!("mock-{n:03}.nodedock.dev").into_bytes(),
    );
    let mut bytes = wasm(MOCK_GPU, Form::Core);
    while let Some(at) = bytes.windows(old.len()).position(|window| window == old) {
        bytes[at..at + old.len()].copy_from_slice(&new);
    }
    root.drop_in(
        &format!("mock-{n}.grant.yaml"),
        side_file(MOCK_GPU, "grant"),
    );
    root.drop_in(&format!("mock-{n}.wasm"), bytes);
}

async fn all_serving(daemon: &Daemon, count: usize) {
    for n in 0..count {
        daemon.until_serving(&format!("mock-{n}.wasm")).await;
    }
}
