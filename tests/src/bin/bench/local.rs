//! Claims of the local API: from a claim's creation to its devices, and to its prepare, beside a prepare of a named device.

use std::time::Instant;

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
    let claim = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": { "name": name },
        "spec": { "devices": { "requests": [{ "name": "gpu", "exactly": { "deviceClassName": "gpu" } }] } },
    });
    api.create(&claim, "default").await.expect("a claim");
    api.until_allocated("default", name)
        .await
        .expect("there are devices")
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
