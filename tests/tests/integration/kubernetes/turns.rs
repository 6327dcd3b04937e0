//! Two instances on one root, as in a surge update.

use nodedock_stand_ins::kubelet::{ClaimRef, Kubelet, KubeletOptions};
use nodedock_tests::Options;
use nodedock_tests::cluster::{Cluster, NAMESPACE};
use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME};

const OLD: &str = "old";
const NEW: &str = "new";

fn instance(cluster: &Cluster, uid: &str) -> Options {
    cluster.options().arg("--instance-uid", uid)
}

#[tokio::test]
async fn kubelet_switches_to_newer_instance() {
    let cluster = Cluster::start().await;
    let mut old = cluster.daemon_with(instance(&cluster, OLD)).await;
    old.serve(MOCK_GPU, Form::Core).await;
    let kubelet = Kubelet::start(&old.kubelet(), KubeletOptions::default()).await;
    kubelet.registered(MOCK_GPU_NAME).await;
    let claim = [ClaimRef::new(
        NAMESPACE,
        "one",
        &cluster.gpu_claim("one", &["gpus/gpu-0"]),
    )];
    let driver = kubelet.driver(MOCK_GPU_NAME);
    let before = driver.prepare(&claim).await.unwrap();

    let calls = kubelet.calls().len();
    let new = old.beside(instance(&cluster, NEW)).await;
    kubelet
        .wait_until("the newer instance is called", |view| {
            view.connected(MOCK_GPU_NAME) == 1
        })
        .await;
    assert_eq!(old.terminate().await.code(), Some(0));
    assert_eq!(driver.prepare(&claim).await.unwrap(), before);
    driver.unprepare(&claim).await.unwrap();
    assert!(new.claims().await.is_empty());
    let since: Vec<_> = kubelet
        .calls()
        .split_off(calls)
        .into_iter()
        .map(|call| call.what)
        .collect();
    let registers = |what: &String| what == "GetInfo" || what == "deregister";
    assert!(
        !since.iter().any(registers),
        "for the kubelet nothing has changed: {since:?}"
    );
}

#[tokio::test]
async fn older_instance_is_standby_until_end() {
    let cluster = Cluster::start().await;
    let mut old = cluster.daemon_with(instance(&cluster, OLD)).await;
    old.serve(MOCK_GPU, Form::Core).await;
    let mut kubelet = Kubelet::start(&old.kubelet(), KubeletOptions::default()).await;
    kubelet.registered(MOCK_GPU_NAME).await;
    let claim = [ClaimRef::new(
        NAMESPACE,
        "one",
        &cluster.gpu_claim("one", &["gpus/gpu-0"]),
    )];
    let before = kubelet.driver(MOCK_GPU_NAME).prepare(&claim).await.unwrap();

    // No kubelet is there meanwhile.
    kubelet.stop().await;
    let mut new = old.beside(instance(&cluster, NEW)).await;
    new.until_serving(MOCK_GPU_FILE).await;
    kubelet.start_again().await;
    kubelet.registered(MOCK_GPU_NAME).await;
    assert_eq!(
        kubelet.driver(MOCK_GPU_NAME).prepare(&claim).await.unwrap(),
        before
    );
    let ready = new
        .run_node_program(&["probe", "ready", "--instance-uid", OLD])
        .await;
    assert!(
        ready.code == Some(1) && ready.stdout.contains("is on standby"),
        "{ready:?}"
    );
    new.run_node_program(&["probe", "live", "--instance-uid", OLD])
        .await
        .done();
    assert_eq!(old.terminate().await.code(), Some(0));
    assert_eq!(new.only_claim().await.state, "prepared");
    assert_eq!(new.terminate().await.code(), Some(0));
}

#[tokio::test]
async fn older_instance_serves_during_newer_crash() {
    let cluster = Cluster::start().await;
    let old = cluster.daemon_with(instance(&cluster, OLD)).await;
    let mut new = old.beside(instance(&cluster, NEW)).await;
    new.kill9().await;
    old.until_ready_again().await;
    old.until_conditions(&[]).await;
    new.run().await;
    new.until_conditions(&[]).await;
    let ready = new
        .run_node_program(&["probe", "ready", "--instance-uid", OLD])
        .await;
    assert!(
        ready.code == Some(1) && ready.stdout.contains(NEW),
        "{ready:?}"
    );
}

/// The older one still has the sockets of the node API open, and does not accept on them.
#[tokio::test]
async fn quickly_restarted_newer_instance_takes_precedence() {
    let cluster = Cluster::start().await;
    let old = cluster.daemon_with(instance(&cluster, OLD)).await;
    let mut new = old.beside(instance(&cluster, NEW)).await;
    for _ in 0..3 {
        new.kill9().await;
        new.run().await;
        new.until_conditions(&[]).await;
    }
    let ready = new
        .run_node_program(&["probe", "ready", "--instance-uid", OLD])
        .await;
    assert!(
        ready.code == Some(1) && ready.stdout.contains("is on standby"),
        "{ready:?}"
    );
}

#[tokio::test]
async fn second_daemon_needs_another_instance_uid() {
    let cluster = Cluster::start().await;
    let old = cluster.daemon_with(instance(&cluster, OLD)).await;
    old.run_node_program(&["run"])
        .await
        .failed_with(1, &["another daemon has locked the checkpoint"]);
    old.run_node_program(&["run", "--instance-uid", OLD])
        .await
        .failed_with(1, &["--instance-uid"]);
}
