//! ResourceSlices: how many are written for a change of a driver's inventory, and how soon.

use std::time::Instant;

use nodedock_stand_ins::api_server::State;
use nodedock_tests::cluster::{Cluster, NODE};
use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};
use serde_json::Value;

use crate::Size;
use crate::table::{Table, millis};

const FIRST: &str = "slices: first publication";

pub(crate) async fn run(size: Size, table: &mut Table) {
    let cluster = Cluster::start().await;
    let daemon = cluster.daemon().await;
    let devices = size.slice_devices;
    let config = |devices: usize, memory: usize, second: usize| {
        format!(
            "pools:\n- {{name: gpus, count: {devices}, memoryGiB: 80}}\n- {{name: one, count: 1, firstIndex: 4000, memoryGiB: {memory}}}\n- {{name: two, count: {second}, firstIndex: 4010}}\n"
        )
    };
    let started = Instant::now();
    daemon.install_gpus(&config(devices, 1, 1));
    let slices = until(&cluster, |found| {
        devices_of(found, "gpus") == devices && has_all(found)
    })
    .await;
    let took = millis(started.elapsed());
    let note = format!(
        "{devices} devices: {} writes, {slices} slices; from the drop of the file",
        writes(&cluster)
    );
    table.figures(FIRST, vec![took], "ms", "", &note);
    daemon.until_serving(MOCK_GPU_FILE).await;

    let (mut one, mut more, mut written) = (Vec::new(), Vec::new(), [0, 0]);
    for round in 0..size.slice_changes {
        let memory = 2 + round;
        cluster.api.forget_requests();
        let started = Instant::now();
        daemon.install_gpus(&config(devices, memory, 1));
        until(&cluster, |found| {
            memory_of_one(found) == Some(format!("{memory}Gi"))
        })
        .await;
        one.push(millis(started.elapsed()));
        written[0] += writes(&cluster);

        cluster.api.forget_requests();
        let started = Instant::now();
        daemon.install_gpus(&config(devices, memory, 2));
        until(&cluster, |found| devices_of(found, "two") == 2).await;
        more.push(millis(started.elapsed()));
        written[1] += writes(&cluster);
        daemon.install_gpus(&config(devices, memory, 1));
        until(&cluster, |found| devices_of(found, "two") == 1).await;
    }
    let rounds = size.slice_changes;
    let note =
        |written: usize| format!("{written} writes for {rounds} changes; from the config's change");
    table.figures(
        "slices: one device changed",
        one,
        "ms",
        FIRST,
        &note(written[0]),
    );
    table.figures(
        "slices: one device more",
        more,
        "ms",
        FIRST,
        &note(written[1]),
    );
}

/// Waits for slices of the driver; how many there are then.
async fn until(cluster: &Cluster, wanted: impl Fn(&[&Value]) -> bool) -> usize {
    let look = |state: &State| {
        let slices = state.slices(MOCK_GPU_NAME);
        wanted(&slices).then_some(slices.len())
    };
    cluster.api.wait_for("the slices are as wanted", look).await
}

/// Requests that wrote slices.
fn writes(cluster: &Cluster) -> usize {
    let is_write = |verb: &str| matches!(verb, "create" | "update" | "patch" | "delete");
    let requests = cluster.api.requests();
    requests
        .iter()
        .filter(|seen| seen.resource == "resourceslices" && is_write(&seen.verb))
        .count()
}

fn devices<'a>(slices: &[&'a Value], pool: &str) -> impl Iterator<Item = &'a Value> {
    let name = format!("{NODE}/{pool}");
    let of_pool: Vec<_> = slices
        .iter()
        .copied()
        .filter(|slice| slice["spec"]["pool"]["name"] == name)
        .collect();
    of_pool
        .into_iter()
        .flat_map(|slice| slice["spec"]["devices"].as_array().into_iter().flatten())
}

fn devices_of(slices: &[&Value], pool: &str) -> usize {
    devices(slices, pool).count()
}

fn has_all(slices: &[&Value]) -> bool {
    devices_of(slices, "one") == 1 && devices_of(slices, "two") == 1
}

fn memory_of_one(slices: &[&Value]) -> Option<String> {
    let memory = devices(slices, "one").next()?["capacity"]["memory"]["value"].as_str()?;
    Some(memory.to_owned())
}
