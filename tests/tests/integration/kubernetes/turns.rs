//! Two instances on one root, as in a surge update.

use nodedock_tests::Options;
use nodedock_tests::cluster::Cluster;
use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME};

const OLD: &str = "old";
const NEW: &str = "new";

fn instance(cluster: &Cluster, uid: &str) -> Options {
    cluster.options().arg("--instance-uid", uid)
}

#[tokio::test]
async fn a_newer_instance_takes_over_and_the_older_stands_by_until_it_ends() {
    let cluster = Cluster::start().await;
    let mut old = cluster.daemon_with(instance(&cluster, OLD)).await;
    old.serve(MOCK_GPU, Form::Core).await;
    old.until_offered((MOCK_GPU_NAME, OLD)).await;
    let uid = cluster.gpu_claim("one", &["gpus/gpu-0"]);
    let before = old.kubelet_prepared((MOCK_GPU_NAME, OLD), ("one", &uid)).await;

    let mut new = old.beside(instance(&cluster, NEW)).await;
    new.until_serving(MOCK_GPU_FILE).await;
    new.until_offered((MOCK_GPU_NAME, NEW)).await;
    // No kubelet registers the newer one here: the older one's sockets go when it was waited for long enough.
    assert_eq!(new.kubelet_prepared((MOCK_GPU_NAME, NEW), ("one", &uid)).await, before);
    new.until_withdrawn((MOCK_GPU_NAME, OLD)).await;
    let ready = new.cli(&["probe", "ready", "--instance-uid", OLD]).await;
    assert!(ready.code == Some(1) && ready.stdout.contains("stands by"), "{ready:?}");
    new.cli(&["probe", "live", "--instance-uid", OLD]).await.done();
    assert_eq!(old.terminate().await.code(), Some(0));
    assert_eq!(new.only_claim().await.state, "prepared");
    assert_eq!(new.terminate().await.code(), Some(0));
}

#[tokio::test]
async fn an_older_instance_serves_again_when_the_newer_crashes_and_gives_way_when_it_is_back() {
    let cluster = Cluster::start().await;
    let old = cluster.daemon_with(instance(&cluster, OLD)).await;
    let mut new = old.beside(instance(&cluster, NEW)).await;
    new.kill9().await;
    old.until_ready_again().await;
    old.until_conditions(&[]).await;
    new.run().await;
    new.until_conditions(&[]).await;
    let ready = new.cli(&["probe", "ready", "--instance-uid", OLD]).await;
    assert!(ready.code == Some(1) && ready.stdout.contains(NEW), "{ready:?}");
}

#[tokio::test]
async fn a_daemon_without_an_instance_is_refused_beside_one_and_so_is_the_same_instance() {
    let cluster = Cluster::start().await;
    let old = cluster.daemon_with(instance(&cluster, OLD)).await;
    old.cli(&["run"]).await.failed_with(1, &["another daemon has locked the checkpoint"]);
    old.cli(&["run", "--instance-uid", OLD]).await.failed_with(1, &["--instance-uid"]);
}
