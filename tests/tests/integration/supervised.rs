//! Sockets that outlive the daemon: kept by its parent process, or by a service manager.

use nodedock_proto::node::v1;
use nodedock_stand_ins::kubelet::{ClaimRef, Kubelet, KubeletOptions};
use nodedock_tests::cluster::{Cluster, NAMESPACE};
use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_NAME};
use nodedock_tests::{Client, DEADLINE, Daemon, Options, Root};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{PidfdFlags, Signal, pidfd_open};

fn supervised(options: Options) -> Options {
    options.flag("--supervise")
}

/// Returns the number of a kubelet's calls for the identity of a driver.
fn registrations(kubelet: &Kubelet) -> usize {
    kubelet
        .calls()
        .iter()
        .filter(|call| call.what == "GetInfo")
        .count()
}

#[tokio::test]
async fn clients_wait_through_reported_crash() {
    let mut daemon = Daemon::start_with(supervised(Options::default())).await;
    daemon.until_conditions(&[]).await;
    let crashed = daemon.supervised();
    rustix::process::kill_process(crashed, Signal::KILL).unwrap();
    // Dialled while no process accepts.
    let mut client = Client::new(daemon.channel());
    let (node, ()) = tokio::join!(
        client.get_node(v1::GetNodeRequest {}),
        daemon.until_ready_again()
    );
    let node = node.unwrap().into_inner();
    let problem = node.conditions[0].problem.clone().unwrap();
    assert!(
        problem.code == "daemon-crashed" && problem.message.contains("signal: 9"),
        "{node:?}"
    );
    assert_ne!(daemon.supervised(), crashed);
    daemon.crash_supervised().await;
    let metrics = daemon.metrics().await;
    assert_eq!(
        metrics.value("nodedock_daemon_crashes_total", &[]),
        Some(2.0)
    );
    assert_eq!(daemon.terminate().await.code(), Some(0));
}

#[tokio::test]
async fn crash_fails_only_kubelet_calls_underway() {
    let cluster = Cluster::start().await;
    let mut daemon = cluster.daemon_with(supervised(cluster.options())).await;
    through_restarts(&cluster, &mut daemon, async |daemon| {
        daemon.crash_supervised().await
    })
    .await;
}

#[tokio::test]
async fn descriptor_store_restart_fails_no_call() {
    let cluster = Cluster::start().await;
    let mut daemon = cluster.daemon_with(cluster.options().with_store()).await;
    through_restarts(&cluster, &mut daemon, async |daemon| daemon.restart().await).await;
    daemon.crash().await;
}

/// Prepares claims of a kubelet while the daemon is restarted again and again.
async fn through_restarts(
    cluster: &Cluster,
    daemon: &mut Daemon,
    restart: impl AsyncFn(&mut Daemon),
) {
    daemon.serve(MOCK_GPU, Form::Core).await;
    let kubelet = Kubelet::start(&daemon.kubelet(), KubeletOptions::default()).await;
    kubelet.registered(MOCK_GPU_NAME).await;
    let claim = [ClaimRef::new(
        NAMESPACE,
        "one",
        &cluster.gpu_claim("one", &["gpus/gpu-0"]),
    )];
    let driver = kubelet.driver(MOCK_GPU_NAME);
    let (before, registered) = (
        driver.prepare(&claim).await.unwrap(),
        registrations(&kubelet),
    );
    for _ in 0..3 {
        restart(daemon).await;
        assert_eq!(driver.prepare(&claim).await.unwrap(), before);
    }
    assert_eq!(
        registrations(&kubelet),
        registered,
        "for the kubelet nothing has changed"
    );
    driver.unprepare(&claim).await.unwrap();
    daemon.assert_empty().await;
}

#[tokio::test]
async fn supervisor_and_daemon_end_together() {
    let root = Root::new();
    let said = root
        .run_node_program(&["run", "--supervise", "--config", "/nowhere.yaml"])
        .await;
    assert!(
        said.code == Some(1) && said.stderr.contains("/nowhere.yaml"),
        "{said:?}"
    );
    assert_eq!(said.stderr.matches("error:").count(), 1, "{said:?}");

    let mut daemon = Daemon::start_on(root, supervised(Options::default())).await;
    let process = pidfd_open(daemon.supervised(), PidfdFlags::empty()).unwrap();
    daemon.kill9().await;
    let end = tokio::task::spawn_blocking(move || {
        poll(&mut [PollFd::new(&process, PollFlags::IN)], None)
    });
    tokio::time::timeout(DEADLINE, end)
        .await
        .expect("it ends with its parent")
        .unwrap()
        .unwrap();
    daemon.run().await;
    daemon.signal(Signal::INT);
    assert_eq!(daemon.ended().await.code(), Some(0));
}
