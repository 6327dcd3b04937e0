//! Claims of the local API: from a claim's creation to its devices, and to its prepare, beside a prepare of a named device.

use std::time::{Duration, Instant};

use futures::stream::FuturesUnordered;
use futures::{StreamExt, stream};
use nodedock_kube::local_client::LocalClient;
use nodedock_proto::node::v1;
use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};
use nodedock_tests::{DEADLINE, Daemon, Options, Root, compose};
use serde_json::{Value, json};

use crate::claims::AT_ONCE;
use crate::table::{Table, Times};
use crate::{CdiOnTmpfs, Size};

/// Devices of the driver: as many as one driver file may have.
const DEVICES: usize = 4096;
/// Slices of another driver that publishes by itself, and the devices of each. With these the machine has 5000 devices.
const OTHER_SLICES: usize = 8;
const OTHER_DEVICES: usize = 113;
const ALL_DEVICES: usize = DEVICES + OTHER_SLICES * OTHER_DEVICES;

/// Claims that are made, and then deleted, in a second while another request is measured.
const BULK_RATE: u32 = 500;

pub(crate) async fn run(size: Size, table: &mut Table) {
    let [_, live, _] = size.live;
    let cdi = CdiOnTmpfs::new();
    let root = Root::new();
    root.install_gpus(&format!("pools:\n- {{name: gpus, count: {DEVICES}}}\n"));
    let daemon = Daemon::start_on(root, cdi.with(Options::default().flag("--local-api"))).await;
    daemon.until_serving(MOCK_GPU_FILE).await;
    let socket = daemon.socket().with_file_name("api.sock");
    let api = LocalClient::connect(&socket)
        .await
        .expect("the local API listens");
    publish_others(&api).await;
    until_published(&api).await;
    let selector = format!("device.driver == '{MOCK_GPU_NAME}'");
    let class = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": { "name": "gpu" },
        "spec": { "selectors": [{ "cel": { "expression": selector } }] },
    });
    api.create(&class, "default").await.expect("a class");
    for n in 0..live {
        allocated(&api, &format!("live-{n}")).await;
    }
    let (mut named, mut allocations, mut both) =
        (Times::default(), Times::default(), Times::default());
    let mut client = daemon.client();
    for n in 0..size.single {
        // The last devices, which no claim of the API gets: it has the first that are free.
        let device = format!("gpus/gpu-{}", DEVICES - 1 - n % (DEVICES / 4));
        let pod = compose::pod(&format!("named-{n}"));
        let request = compose::request(
            &pod,
            &[&compose::gpu_claim(&format!("named-{n}"), &[&device])],
        );
        named
            .time(async { prepared(client.prepare_pod(request.clone()).await) })
            .await;
        client
            .unprepare_pod(v1::UnpreparePodRequest { pod: Some(pod) })
            .await
            .expect("unprepare");

        let (name, pod) = (format!("claim-{n}"), compose::pod(&format!("pod-{n}")));
        let request = compose::of_claim(&pod, &name);
        let work = async {
            let claim = allocations.time(allocated(&api, &name)).await;
            prepared(client.prepare_pod(request).await);
            claim
        };
        let claim = both.time(work).await;
        client
            .unprepare_pod(v1::UnpreparePodRequest { pod: Some(pod) })
            .await
            .expect("unprepare");
        api.delete_claim("default", &name, claim["metadata"]["uid"].as_str())
            .await
            .expect("delete");
    }
    let row = format!("prepare of a named device, {ALL_DEVICES} devices, {live} claims");
    table.times(&row, &named, "", "in turns with the next rows");
    table.times(
        "allocate a claim of the local API",
        &allocations,
        &row,
        "from its creation, one selector",
    );
    table.times("allocate and prepare it", &both, &row, "");
    deletions(size, table, &api).await;
    behind_bulk(size, table, &api, &daemon).await;
}

/// Prepares of a claim that is allocated, while other claims are made and then deleted at [`BULK_RATE`]: the time that one request waits behind
/// many of others.
async fn behind_bulk(size: Size, table: &mut Table, api: &LocalClient, daemon: &Daemon) {
    let count = size.burst.min(DEVICES / 4);
    allocated(api, "behind").await;
    let mut alone = Times::default();
    let mut number = 0;
    for _ in 0..size.single.min(count) {
        number += 1;
        prepare_behind(daemon, number, &mut alone).await;
    }
    let row = "prepare of an allocated claim of the local API";
    table.times(row, &alone, "", "alone");
    let mut uids = Vec::with_capacity(count);
    let mut behind = Times::default();
    let creates = at_rate(count, async |n| {
        let name = format!("bulk-{n}");
        let made = api
            .create(&claim_of(&name), "default")
            .await
            .expect("a claim");
        (
            name,
            made["metadata"]["uid"].as_str().expect("a UID").to_owned(),
        )
    });
    tokio::select! {
        made = creates => uids.extend(made),
        () = prepares_behind(daemon, &mut number, &mut behind) => {}
    }
    let note = format!("{count} claims at {BULK_RATE}/s");
    table.times(
        "prepare behind creates of other claims",
        &behind,
        row,
        &note,
    );
    for (name, _) in &uids {
        api.until_allocated("default", name)
            .await
            .expect("there are devices");
    }
    let mut behind = Times::default();
    let deletes = at_rate(count, async |n| {
        let (name, uid) = &uids[n];
        let deleted = api.delete_claim("default", name, Some(uid)).await;
        assert!(deleted.expect("delete"), "{name} was there");
    });
    tokio::select! {
        _ = deletes => {}
        () = prepares_behind(daemon, &mut number, &mut behind) => {}
    }
    table.times(
        "prepare behind deletes of other claims",
        &behind,
        row,
        &note,
    );
}

/// Runs operations, so many a second, however long each takes; returns what they do, when all have ended.
async fn at_rate<T>(count: usize, operation: impl AsyncFn(usize) -> T) -> Vec<T> {
    let mut ticks = tokio::time::interval(Duration::from_secs(1) / BULK_RATE);
    let (mut running, mut done) = (FuturesUnordered::new(), Vec::with_capacity(count));
    for n in 0..count {
        loop {
            tokio::select! {
                Some(ended) = running.next() => done.push(ended),
                _ = ticks.tick() => break,
            }
        }
        running.push(operation(n));
    }
    done.extend(running.collect::<Vec<_>>().await);
    done
}

/// Prepares and unprepares the claim `behind` one time after the other, without end.
async fn prepares_behind(daemon: &Daemon, number: &mut usize, times: &mut Times) {
    loop {
        *number += 1;
        prepare_behind(daemon, *number, times).await;
    }
}

async fn prepare_behind(daemon: &Daemon, number: usize, times: &mut Times) {
    let mut client = daemon.client();
    let pod = compose::pod(&format!("behind-{number}"));
    let request = compose::of_claim(&pod, "behind");
    times
        .time(async { prepared(client.prepare_pod(request).await) })
        .await;
    client
        .unprepare_pod(v1::UnpreparePodRequest { pod: Some(pod) })
        .await
        .expect("unprepare");
}

/// Claims with a device each that are deleted, 64 at once: the time of each until its object is gone.
async fn deletions(size: Size, table: &mut Table, api: &LocalClient) {
    // Devices that the claims of the other rows do not have.
    let count = size.burst.min(DEVICES / 2);
    let mut claims = Vec::with_capacity(count);
    for n in 0..count {
        let name = format!("deleted-{n}");
        let claim = allocated(api, &name).await;
        let uid = claim["metadata"]["uid"].as_str().expect("a UID").to_owned();
        claims.push((name, uid));
    }
    let started = Instant::now();
    let deletions = stream::iter(claims).map(|(name, uid)| async move {
        let began = Instant::now();
        let deleted = api.delete_claim("default", &name, Some(&uid)).await;
        assert!(deleted.expect("delete"), "{name} was there");
        let is_gone = api.until_gone("default", &name, &uid, DEADLINE).await;
        assert!(is_gone, "{name}");
        began.elapsed()
    });
    let mut times = Times::default();
    let mut deletions = deletions.buffer_unordered(AT_ONCE);
    while let Some(took) = deletions.next().await {
        times.add(took);
    }
    let rate = count as f64 / started.elapsed().as_secs_f64();
    table.times(
        "delete a claim of the local API, 64 at once",
        &times,
        "",
        &format!("{rate:.0} claims/s"),
    );
}

async fn publish_others(api: &LocalClient) {
    for slice in 0..OTHER_SLICES {
        let devices: Vec<_> = (0..OTHER_DEVICES)
            .map(|n| json!({ "name": format!("other-{slice}-{n}") }))
            .collect();
        // On all nodes: those of this node go if their driver does not come.
        let slice = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": { "name": format!("other-{slice}") },
            "spec": { "driver": "other.example.com", "allNodes": true, "devices": devices,
                "pool": { "name": "others", "generation": 1, "resourceSliceCount": OTHER_SLICES } },
        });
        api.create(&slice, "default").await.expect("a slice");
    }
}

async fn until_published(api: &LocalClient) {
    let count = |slices: Vec<Value>| {
        slices
            .iter()
            .map(|slice| slice["spec"]["devices"].as_array().map_or(0, Vec::len))
            .sum::<usize>()
    };
    while count(api.slices().await.expect("slices")) < ALL_DEVICES {
        tokio::task::yield_now().await;
    }
}

/// Makes a claim of one device, and waits until it has it.
async fn allocated(api: &LocalClient, name: &str) -> Value {
    api.create(&claim_of(name), "default")
        .await
        .expect("a claim");
    api.until_allocated("default", name)
        .await
        .expect("there are devices")
}

fn claim_of(name: &str) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": { "name": name },
        "spec": { "devices": { "requests": [{ "name": "gpu", "exactly": { "deviceClassName": "gpu" } }] } },
    })
}

fn prepared(answer: Result<tonic::Response<v1::PreparePodResponse>, tonic::Status>) {
    let answer = answer.expect("an answer").into_inner();
    assert!(
        answer
            .claims
            .iter()
            .all(|claim| claim.outcome == "prepared"),
        "{answer:?}"
    );
}
