//! A pod with claims, devices of a plugin and devices of a pool in one request.

use nodedock_proto::node::v1;
use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::{Daemon, Options};

use native_device_plugin::{Plugin, Script};

use super::agreement::agree;
use super::{GPU, NIC, ready, with_gpus, with_nics};

async fn daemon() -> (Daemon, Plugin) {
    let daemon =
        Daemon::start_with(Options::default().config("claims: {exclusiveWaitMs: 0}\n")).await;
    with_gpus(&daemon).await;
    let plugin = with_nics(&daemon, Script::ok(), 2).await;
    (daemon, plugin)
}

/// A claim for `gpu-2`, one GPU by its resource and both NICs.
fn everything(name: &str) -> v1::PreparePodRequest {
    let mut request = request(&pod(name), &[&gpu_claim("own", &["gpus/gpu-2"])]);
    request.containers[0].extended_resources = [(GPU.to_owned(), 1), (NIC.to_owned(), 2)].into();
    request
}

fn outcomes(answer: &v1::PreparePodResponse) -> Vec<(&str, &str)> {
    let claims = answer
        .claims
        .iter()
        .map(|claim| ("claim", claim.outcome.as_str()));
    claims
        .chain(
            answer
                .resources
                .iter()
                .map(|of| (of.resource.as_str(), of.outcome.as_str())),
        )
        .collect()
}

#[tokio::test]
async fn pod_answer_is_unchanged_after_crash() {
    let (mut daemon, mut plugin) = daemon().await;
    let answer = ready(&daemon, everything("one")).await;
    assert_eq!(
        outcomes(&answer),
        [
            ("claim", "prepared"),
            (GPU, "allocated"),
            (NIC, "allocated")
        ]
    );
    let [main] = answer.containers.as_slice() else {
        panic!("{answer:#?}")
    };
    assert_eq!(main.env["NATIVE_DEVICES"], "nic-0,nic-1");
    assert_eq!(
        main.cdi_devices.len(),
        2,
        "the claim's device and the pool's: {main:?}"
    );
    let files: Vec<_> = daemon
        .cdi_files()
        .iter()
        .flat_map(nodedock_tests::cdi::CdiFile::devices)
        .collect();
    assert!(
        main.cdi_devices.iter().all(|name| files.contains(name)),
        "{main:?} {files:?}"
    );
    assert_eq!(agree(&daemon).await.len(), 3);
    daemon.crash().await;
    drop(plugin);
    plugin = with_nics(&daemon, Script::ok(), 2).await;
    with_gpus(&daemon).await;
    assert_eq!(ready(&daemon, everything("one")).await, answer);
    assert_eq!(agree(&daemon).await.len(), 3);
    let left = daemon.unprepare_pod(&pod("one")).await;
    assert_eq!(
        (left.claims.len(), left.resources.len()),
        (1, 2),
        "{left:#?}"
    );
    assert!(agree(&daemon).await.is_empty() && daemon.agrees().await.is_empty());
    drop(plugin);
}
