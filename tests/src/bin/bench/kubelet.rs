//! The way of a kubelet: from its call on a driver's socket to the answer, beside the bare round trip on the same socket; and from our
//! restart to a driver that can be registered.

use std::path::{Path, PathBuf};
use std::time::Instant;

use nodedock_proto::kubelet::dra::v1::dra_plugin_client::DraPluginClient;
use nodedock_proto::kubelet::dra::v1::{
    Claim, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest,
};
use nodedock_proto::kubelet::registration::InfoRequest;
use nodedock_proto::kubelet::registration::registration_client::RegistrationClient;
use nodedock_tests::cluster::{Cluster, NAMESPACE, options};
use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};
use nodedock_tests::node_api::channel;
use nodedock_tests::{DEADLINE, Daemon, Options};

use crate::table::{Table, Times, millis};
use crate::{CdiOnTmpfs, Size};

const BARE: &str = "kubelet: an empty prepare, nothing but the round trip";

pub(crate) async fn run(size: Size, table: &mut Table) {
    let cluster = Cluster::start().await;
    let cdi = CdiOnTmpfs::new();
    let mut daemon = cluster.daemon_with(cdi.with(unhurried(&cluster))).await;
    daemon.install_gpus("pools: [{name: gpus, count: 64}]\n");
    daemon.until_serving(MOCK_GPU_FILE).await;
    calls(&cluster, &daemon, size, table).await;
    restarts(&mut daemon, size, table).await;
}

/// Options of a daemon that keeps no pause between requests to the API server: what is measured is the way.
pub(crate) fn unhurried(cluster: &Cluster) -> Options {
    options(&cluster.kubeconfig())
        .config("kubernetes: {requestsPerSecond: 1000, requestBurst: 2000}\n")
}

async fn calls(cluster: &Cluster, daemon: &Daemon, size: Size, table: &mut Table) {
    let socket = files(&daemon.kubelet().join("plugins").join(MOCK_GPU_NAME)).pop();
    let socket = socket.expect("the driver is offered");
    let mut client = DraPluginClient::new(channel(socket));
    let uid = cluster.gpu_claim("bench", &["gpus/gpu-0"]);
    let claim = || Claim {
        namespace: NAMESPACE.into(),
        uid: uid.clone(),
        name: "bench".into(),
    };
    let ask = |claims: Vec<Claim>| NodePrepareResourcesRequest { claims };
    let unprepare = || NodeUnprepareResourcesRequest {
        claims: vec![claim()],
    };
    let (mut bare, mut read, mut back, mut again) = (
        Times::default(),
        Times::default(),
        Times::default(),
        Times::default(),
    );
    for _ in 0..size.single {
        bare.time(client.node_prepare_resources(ask(vec![])))
            .await
            .expect("an empty prepare");
    }
    table.times(BARE, &bare, "", "on the driver's socket");
    for _ in 0..size.single {
        let answer = read
            .time(client.node_prepare_resources(ask(vec![claim()])))
            .await
            .expect("prepare");
        let answer = answer.into_inner();
        let outcome = answer.claims.first().and_then(|entry| entry.value.as_ref());
        assert!(
            outcome.is_some_and(|outcome| outcome.error.is_empty()),
            "{answer:?}"
        );
        back.time(client.node_unprepare_resources(unprepare()))
            .await
            .expect("unprepare");
    }
    let note = "the API server is on this machine";
    table.times(
        "kubelet: prepare, claim read from the API server",
        &read,
        BARE,
        note,
    );
    table.times("kubelet: unprepare", &back, BARE, "");

    client
        .node_prepare_resources(ask(vec![claim()]))
        .await
        .expect("prepare");
    let seen = cluster.api.requests().len();
    for _ in 0..size.single {
        again
            .time(client.node_prepare_resources(ask(vec![claim()])))
            .await
            .expect("prepare");
    }
    let asked = cluster.api.requests().len() - seen;
    let note = format!("{asked} requests to the API server in all");
    table.times(
        "kubelet: prepare, claim prepared before",
        &again,
        BARE,
        &note,
    );
    client
        .node_unprepare_resources(unprepare())
        .await
        .expect("unprepare");
}

/// Measures the time from the start of the process to the answer by which a kubelet registers.
async fn restarts(daemon: &mut Daemon, size: Size, table: &mut Table) {
    let directory = daemon.kubelet().join("plugins_registry");
    for (how, crash) in [("stop", false), ("kill -9", true)] {
        let mut times = Vec::new();
        for _ in 0..size.starts {
            end(daemon, crash).await;
            let started = Instant::now();
            let (answered, ()) = tokio::join!(until_answer(&directory, started), daemon.run());
            times.push(answered);
        }
        let row = format!("kubelet: from our start after {how} to GetInfo's answer");
        table.figures(&row, times, "ms", "", "");
    }
}

/// Kills the daemon, or asks it to end.
pub(crate) async fn end(daemon: &mut Daemon, crash: bool) {
    if crash {
        daemon.kill9().await;
    } else {
        assert!(daemon.terminate().await.success());
    }
}

/// The driver's sockets have another name after each start, and those of a process that was killed are still there.
pub(crate) fn files(directory: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(directory)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect()
}

async fn until_answer(directory: &Path, started: Instant) -> f64 {
    let answer = async {
        loop {
            tokio::task::yield_now().await;
            for socket in files(directory) {
                let mut client = RegistrationClient::new(channel(socket));
                if client.get_info(InfoRequest {}).await.is_ok() {
                    return millis(started.elapsed());
                }
            }
        }
    };
    tokio::time::timeout(DEADLINE, answer)
        .await
        .expect("the driver is offered")
}
