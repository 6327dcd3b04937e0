//! The state of the kernel is lost in a reboot: a claim is prepared again when its pod comes back.

use nodedock_proto::node::v1;
use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::MOCK_GPU_FILE;
use nodedock_tests::{Daemon, Options, Root};
use tonic::Code;

fn boot(id: &str) -> Options {
    Options::default().arg("--boot-id", id)
}

fn prepares(claim: &v1::ClaimStatus) -> usize {
    claim
        .timeline
        .iter()
        .filter(|entry| entry.what == "prepared by driver")
        .count()
}

async fn reboot(daemon: Daemon, id: &str) -> Daemon {
    let root: Root = daemon.into_root().await;
    // /run is empty after a boot.
    std::fs::remove_dir_all(root.cdi()).unwrap();
    std::fs::create_dir_all(root.cdi()).unwrap();
    Daemon::start_on(root, boot(id)).await
}

#[tokio::test]
async fn claim_is_stale_after_reboot() {
    let daemon = Daemon::with_gpus(boot("boot-1")).await;
    let request = request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]);
    let answer = daemon.prepared(request.clone()).await;
    assert!(!daemon.only_claim().await.stale_boot);

    let daemon = reboot(daemon, "boot-2").await;
    let claim = daemon.only_claim().await;
    assert!(claim.stale_boot, "{claim:?}");
    let listed = daemon.cli(&["get", "claims"]).await.done();
    assert!(listed.contains("prepared-before-reboot"), "{listed}");
    assert_eq!((claim.state.as_str(), prepares(&claim)), ("prepared", 1));
    daemon
        .cli(&["explain", "claim", "default/a"])
        .await
        .done_with(&["earlier boot"]);

    daemon.until_serving(MOCK_GPU_FILE).await;
    let start = v1::StartContainerRequest {
        pod: Some(pod("one")),
        container: "main".to_owned(),
    };
    let refused = daemon
        .client()
        .start_container(start.clone())
        .await
        .expect_err("a boot lies between");
    assert!(
        refused.code() == Code::Unavailable && refused.message().contains("default/a"),
        "{refused:?}"
    );
    assert_eq!(daemon.prepared(request.clone()).await, answer);
    daemon
        .client()
        .start_container(start)
        .await
        .expect("it may start");
    let claim = daemon.only_claim().await;
    assert_eq!((claim.stale_boot, prepares(&claim)), (false, 2));
    assert_eq!(daemon.only_cdi_file().identity["bootId"], "boot-2");

    daemon.prepared(request).await;
    assert_eq!(prepares(&daemon.only_claim().await), 2, "once is enough");
}
