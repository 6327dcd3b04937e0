//! Daemon and kubelet restart while pods come and go.

use std::time::Duration;

use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME};
use nodedock_tests::machine::tell;
use nodedock_tests::{Daemon, Options};

use crate::scene::{Scene, gpus, instance};
use crate::stream::{Report, Stream, Wants};

const CONTAINER: &str = "container of the daemon restarts";
const SERVICE: &str = "service of the daemon restarts";
const CRASHES: &str = "daemon crashes";
const UPDATE: &str = "newer instance takes over and the older one stops";
const KUBELET: &str = "kubelet is killed and starts";
/// Number of rounds of each of them.
const ROUNDS: usize = 20;
const IN_FLIGHT: usize = 10;
const BETWEEN: usize = 5;
/// More than the pods that run need, since the scheduler learns some time later that a device is free.
const DEVICES: usize = 32;
/// The longest time from the first attempt of a command to its success, where no process of the daemon is there for a time, and else.
const WAIT_MAX: Duration = Duration::from_secs(60);
const WAIT_MAX_WITHOUT_GAP: Duration = Duration::from_secs(10);
const RESOURCE: &str = "example.com/gpu";

#[tokio::test]
async fn newer_instance_has_older_claims() {
    let Some(mut scene) = Scene::start("instances").await else {
        return;
    };
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

/// The config of the driver: a pool with what is added to it.
fn gpu_pool(more: &str) -> String {
    format!("pools: [{{name: gpus, count: {DEVICES}{more}}}]\n")
}

/// A node whose daemon has a parent process.
async fn supervised(node: &str, more: &str) -> Option<Scene> {
    Scene::with_gpus_and(node, &gpu_pool(more), |options| options.flag("--supervise")).await
}

/// Starts a newer instance and ends the older one when the newer is ready, as a DaemonSet does with `maxSurge: 1`.
async fn update(daemon: &mut Daemon, options: &Options, uid: &str) {
    let newer = daemon
        .beside(instance(options, uid).flag("--supervise"))
        .await;
    let mut older = std::mem::replace(daemon, newer);
    let status = older.terminate().await;
    assert!(status.success(), "{status}\n{}", older.log());
}

/// Runs pods while all of this happens. A command that fails because the daemon's sockets are gone is repeated, and succeeds in time.
async fn stream(scene: &mut Scene, wants: Wants<'_>, actions: &[&str]) -> Report {
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
    let (all, mut instances) = (actions.repeat(ROUNDS), 0);
    let report = stream.run(&all, async |action| match action {
        CONTAINER | SERVICE => scene.daemon.restart().await,
        CRASHES => scene.daemon.crash_supervised().await,
        UPDATE => {
            instances += 1;
            update(
                &mut scene.daemon,
                &scene.options,
                &format!("instance-{instances}"),
            )
            .await;
        }
        KUBELET => scene.kubelet.restart().await,
        _ => panic!("{action:?} is not known"),
    });
    let report = report.await;
    tell(&format!(
        "pods of the node {} while it restarts:\n{report}",
        scene.node
    ));
    for action in actions {
        let tally = report.of(action);
        assert!(
            tally.longest_wait < WAIT_MAX,
            "{action}: {tally:#?}\n{}",
            scene.daemon.log()
        );
    }
    scene.daemon.until_conditions(&[]).await;
    scene.assert_nothing_forbidden();
    report
}

#[tokio::test]
async fn updates_disturb_no_pod_with_claims() {
    let Some(mut scene) = supervised("restarts", "").await else {
        return;
    };
    let report = stream(&mut scene, Wants::Claim, &[CRASHES, UPDATE, KUBELET]).await;
    for action in [UPDATE, KUBELET] {
        let tally = report.of(action);
        assert_eq!(
            (tally.failed("prepare"), tally.failed("unprepare")),
            (0, 0),
            "{action}: {report}"
        );
        assert!(
            tally.longest_wait < WAIT_MAX_WITHOUT_GAP,
            "{action}: {report}"
        );
    }
    let crashes = report.of(CRASHES);
    for error in crashes.errors.keys() {
        // The connection broke under the call. No other call fails: neither at the dial nor for a driver that is not registered.
        assert!(
            error.contains("EOF")
                || error.contains("reset by peer")
                || error.contains("broken pipe"),
            "{report}"
        );
    }
    assert!(crashes.longest_wait < WAIT_MAX_WITHOUT_GAP, "{report}");
    scene.daemon.assert_empty().await;
    scene.until_devices(MOCK_GPU_NAME, DEVICES).await;
}

#[tokio::test]
async fn descriptor_store_restart_disturbs_no_pod() {
    let Some(mut scene) = Scene::with_gpus_and("service", &gpu_pool(""), Options::with_store).await
    else {
        return;
    };
    let report = stream(&mut scene, Wants::Claim, &[SERVICE]).await;
    let tally = report.of(SERVICE);
    assert_eq!(
        (tally.failed("prepare"), tally.failed("unprepare")),
        (0, 0),
        "{report}"
    );
    assert!(tally.longest_wait < WAIT_MAX_WITHOUT_GAP, "{report}");
    scene.daemon.assert_empty().await;
}

#[tokio::test]
async fn claims_work_during_container_restarts() {
    let Some(mut scene) = supervised("container", "").await else {
        return;
    };
    stream(&mut scene, Wants::Claim, &[CONTAINER]).await;
    scene.daemon.assert_empty().await;
    scene.until_devices(MOCK_GPU_NAME, DEVICES).await;
}

#[tokio::test]
async fn resources_work_during_daemon_restarts() {
    let resource = format!(", extendedResource: {RESOURCE}");
    let Some(mut scene) = supervised("allocations", &resource).await else {
        return;
    };
    scene.kubelet.allocatable(RESOURCE, DEVICES).await;
    stream(
        &mut scene,
        Wants::Resource(RESOURCE),
        &[CONTAINER, CRASHES, UPDATE],
    )
    .await;
    scene.kubelet.allocatable(RESOURCE, DEVICES).await;
}
