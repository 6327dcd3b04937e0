//! Daemon and kubelet restart while pods come and go.

use std::time::Duration;

use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME};
use nodedock_tests::machine::tell;
use nodedock_tests::{Daemon, Options};

use crate::scene::{Scene, gpus, instance};
use crate::stream::{Stream, Wants};

const STOPS: &str = "daemon stops and starts";
const IS_KILLED: &str = "daemon is killed and starts";
const IS_UPDATED: &str = "newer instance takes over and the older one stops";
const KUBELET: &str = "kubelet is killed and starts";
/// How often each of them happens.
const ROUNDS: usize = 2;
const IN_FLIGHT: usize = 10;
const BETWEEN: usize = 15;
/// As many pods as come while the daemon's sockets are gone, and once more if the kubelet registers the driver twice.
const WITHOUT_SOCKETS: usize = 2 * IN_FLIGHT * ROUNDS;
/// How many pods may need a second attempt to prepare.
const PREPARES_FAILED_MAX: [(&str, usize); 4] =
    [(STOPS, WITHOUT_SOCKETS), (IS_KILLED, WITHOUT_SOCKETS), (IS_UPDATED, WITHOUT_SOCKETS), (KUBELET, 0)];
/// How many pods may need a second attempt to allocate a device.
const ALLOCATIONS_FAILED_MAX: [(&str, usize); 3] =
    [(STOPS, WITHOUT_SOCKETS), (IS_KILLED, WITHOUT_SOCKETS), (IS_UPDATED, WITHOUT_SOCKETS)];
/// More than the pods that run need, since the scheduler learns some time later that a device is free.
const DEVICES: usize = 32;
/// The longest time from the first attempt of a command to its success.
const WAIT_MAX: Duration = Duration::from_secs(60);
const RESOURCE: &str = "example.com/gpu";

#[tokio::test]
async fn a_newer_instance_has_the_claims_of_the_older_one() {
    let Some(mut scene) = Scene::start("instances").await else { return };
    scene.daemon.serve(MOCK_GPU, Form::Core).await;
    scene.kubelet.registered(MOCK_GPU_NAME).await;
    scene.pod_with_claim("kept", gpus(2)).await;
    let names = scene.prepared("kept").await;
    update(&mut scene.daemon, &scene.options, "newer").await;
    scene.daemon.until_serving(MOCK_GPU_FILE).await;
    assert_eq!(scene.daemon.only_claim().await.state, "prepared");
    assert_eq!(scene.prepared_again("kept", MOCK_GPU_NAME).await, names);
    scene.unprepared_again("kept", MOCK_GPU_NAME).await;
    scene.daemon.assert_empty().await;
    scene.pod_with_claim("new", gpus(1)).await;
    scene.prepared_again("new", MOCK_GPU_NAME).await;
    scene.unprepared_again("new", MOCK_GPU_NAME).await;
    scene.daemon.assert_empty().await;
    scene.assert_nothing_forbidden();
}

/// Starts a newer instance and ends the older one when the newer is ready, as a DaemonSet does with `maxSurge: 1`.
async fn update(daemon: &mut Daemon, options: &Options, uid: &str) {
    let newer = daemon.beside(instance(options, uid)).await;
    let mut older = std::mem::replace(daemon, newer);
    let status = older.terminate().await;
    assert!(status.success(), "{status}\n{}", older.log());
}

/// Runs pods while all of this happens, each with the most pods whose first attempt of a command may fail.
async fn stream(scene: &mut Scene, wants: Wants<'_>, command: &str, failed_max: &[(&str, usize)]) {
    let cdi = scene.daemon.cdi();
    let stream = Stream {
        api: &scene.api,
        kubelet: &scene.kubelet,
        node: &scene.node,
        driver: MOCK_GPU_NAME,
        wants,
        cdi: &cdi,
        in_flight: IN_FLIGHT,
        between: BETWEEN,
    };
    let actions: Vec<_> = failed_max.iter().map(|(action, _)| *action).collect();
    let actions = actions.repeat(ROUNDS);
    let mut instances = 0;
    let report = stream.run(&actions, async |action| match action {
        STOPS => scene.daemon.restart().await,
        IS_KILLED => scene.daemon.crash().await,
        IS_UPDATED => {
            instances += 1;
            update(&mut scene.daemon, &scene.options, &format!("instance-{instances}")).await;
        }
        KUBELET => scene.kubelet.restart().await,
        _ => panic!("{action:?} is not known"),
    });
    let report = report.await;
    tell(&format!("pods of the node {} while it restarts:\n{report}", scene.node));
    for (action, failed_max) in failed_max {
        let tally = report.of(action);
        let is_well = tally.failed(command) <= *failed_max && tally.longest_wait < WAIT_MAX;
        assert!(is_well, "{action}: {tally:#?}\n{}", scene.daemon.log());
    }
    scene.daemon.until_conditions(&[]).await;
    scene.assert_nothing_forbidden();
}

#[tokio::test]
async fn pods_with_claims_come_and_go_while_daemon_and_kubelet_restart() {
    let Some(mut scene) = Scene::start("restarts").await else { return };
    scene.daemon.install_gpus(&format!("pools: [{{name: gpus, count: {DEVICES}}}]\n"));
    scene.daemon.until_serving(MOCK_GPU_FILE).await;
    scene.kubelet.registered(MOCK_GPU_NAME).await;
    stream(&mut scene, Wants::Claim, "prepare", &PREPARES_FAILED_MAX).await;
    scene.daemon.assert_empty().await;
    scene.until_devices(MOCK_GPU_NAME, DEVICES).await;
}

#[tokio::test]
async fn pods_with_resources_come_and_go_while_the_daemon_restarts() {
    let Some(mut scene) = Scene::start("allocations").await else { return };
    let pool = format!("{{name: gpus, count: {DEVICES}, extendedResource: {RESOURCE}}}");
    scene.daemon.install_gpus(&format!("pools: [{pool}]\n"));
    scene.daemon.until_serving(MOCK_GPU_FILE).await;
    scene.kubelet.allocatable(RESOURCE, DEVICES).await;
    stream(&mut scene, Wants::Resource(RESOURCE), "allocate", &ALLOCATIONS_FAILED_MAX).await;
    scene.kubelet.allocatable(RESOURCE, DEVICES).await;
}
