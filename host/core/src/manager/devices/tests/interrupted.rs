//! Crashes, commits that fail, callers that go away, plugins that hang.

use std::time::Duration;

use tokio::time::{Instant, pause};

use super::{numbered, plugged, plugged_with};
use crate::checkpoint;
use crate::manager::ResourceState;
use crate::manager::devices::fixtures::{device, ids, pod, resource, sick, uid};
use crate::manager::tests::scene::{
    DEADLINE, Daemon, FakePlugin, Home, app, container, device_ends,
};
use nodedock_model::{ClaimRecord, ContainerKind, ObjectRef, PodRecord, Problem};

/// Allocates a device for the pod `a` of a daemon that crashes during the plugin's call.
async fn crash_in_allocate(daemon: &Daemon, gpu: &FakePlugin) -> Vec<String> {
    gpu.shut(true);
    let crash = async {
        gpu.called(|calls| calls.allocate.len() == 1).await;
        daemon.crash().await;
        gpu.shut(false);
    };
    tokio::join!(daemon.given("a", &[("gpu", 1)]), crash).0
}

#[tokio::test]
async fn interrupted_allocate_repeats_same_devices() {
    let (home, daemon, gpu) = plugged(2);
    let lost = crash_in_allocate(&daemon, &gpu).await;
    assert_eq!(
        lost,
        ["checkpoint-unavailable"],
        "nothing is answered that is not durable"
    );

    let daemon = home.start_at_once();
    let found = daemon.devices_of("a");
    assert_eq!(found[0].state, ResourceState::Allocating);
    assert_eq!(
        daemon.given("a", &[("gpu", 1)]).await,
        ["no-healthy-device"],
        "its plugin is not back yet"
    );
    assert_eq!(daemon.devices_of("a"), found);
    let better = FakePlugin::preferring(&["dev1"]);
    daemon.plug("gpu", &better, &numbered(2));
    assert_eq!(daemon.given("b", &[("gpu", 1)]).await, ["dev1"]);
    assert_eq!(daemon.given("a", &[("gpu", 1)]).await, ["dev0"]);
    assert_eq!(better.calls().allocate, [ids(&["dev1"]), ids(&["dev0"])]);
    assert_eq!(daemon.devices_of("a")[0].state, ResourceState::Allocated);
}

#[tokio::test]
async fn intent_with_unhealthy_device_is_dropped() {
    let (home, daemon, gpu) = plugged(2);
    crash_in_allocate(&daemon, &gpu).await;
    let daemon = home.start_at_once();
    daemon.plug("gpu", &gpu, &[sick("dev0"), device("dev1", &[])]);
    assert_eq!(
        daemon.given("a", &[("gpu", 1)]).await,
        ["devices-unhealthy"]
    );
    assert_eq!(daemon.given("a", &[("gpu", 1)]).await, ["dev1"]);
}

/// A plugin registers again some time after a boot, and pods are prepared again before.
#[tokio::test]
async fn pod_keeps_devices_across_reboot() {
    let (home, daemon, gpu) = plugged(2);
    assert_eq!(daemon.given("a", &[("gpu", 1)]).await, ["dev0"]);
    daemon.stop().await;
    let daemon = home.start_with("boot-2", Duration::ZERO);
    assert_eq!(daemon.given("a", &[("gpu", 1)]).await, ["plugin-gone"]);
    daemon.plug("gpu", &gpu, &numbered(2));
    assert_eq!(daemon.given("b", &[("gpu", 1)]).await, ["dev1"]);
    gpu.refuse(Problem::internal("broken", "the plugin cannot"));
    assert_eq!(daemon.given("a", &[("gpu", 1)]).await, ["broken"]);
    assert_eq!(daemon.given("c", &[("gpu", 1)]).await, ["too-few-devices"]);
    assert_eq!(daemon.given("a", &[("gpu", 1)]).await, ["dev0"]);
}

#[tokio::test]
async fn unavailable_checkpoint_prevents_plugin_calls() {
    let (home, daemon, gpu) = plugged(2);
    daemon.allocate("a", &app(&[("gpu", 1)])).await;
    daemon.crash().await;
    assert_eq!(
        daemon.given("b", &[("gpu", 1)]).await,
        ["checkpoint-unavailable"]
    );
    assert_eq!(gpu.calls().allocate.len(), 1);
    let devices = daemon.view("gpu").unwrap().devices;
    assert!(devices[1].pods.is_empty(), "what was taken is released");
    assert_eq!(
        daemon.given("a", &[("gpu", 1)]).await,
        ["dev0"],
        "what is durable is answered"
    );
    assert_eq!(
        daemon.free("a").await.unwrap_err().code,
        "checkpoint-unavailable"
    );
    assert_eq!(
        daemon.view("gpu").unwrap().devices[0].pods.len(),
        1,
        "it is free after the commit only"
    );
    assert_eq!(home.start_at_once().manager.pods.list().len(), 1);
}

#[tokio::test]
async fn hanging_plugin_blocks_only_its_resource() {
    let (home, gpu, nic) = (Home::new(), FakePlugin::preferring(&[]), FakePlugin::new());
    let daemon = home.start_at_once();
    daemon.plug("gpu", &gpu, &numbered(4));
    daemon.plug("nic", &nic, &numbered(4));
    gpu.shut(true);
    let (both, one, other) = (
        app(&[("gpu", 1), ("nic", 1)]),
        app(&[("gpu", 1)]),
        app(&[("nic", 1)]),
    );
    let began = Instant::now();
    let others = async {
        gpu.called(|calls| calls.preferred.len() == 1).await;
        let given = daemon.allocate("c", &other).await;
        let meanwhile = (
            device_ends(&given),
            nic.calls().allocate.len(),
            gpu.calls().preferred.len(),
        );
        // From here the clock runs by itself: to the deadline of the preference, and of the call after it.
        pause();
        meanwhile
    };
    let (first, second, others) = tokio::join!(
        daemon.allocate("a", &both),
        daemon.allocate("b", &one),
        others
    );
    assert_eq!(
        others,
        (vec!["dev1".to_owned()], 1, 1),
        "while the first still waits"
    );
    assert_eq!(device_ends(&first), ["driver-deadline", "dev0"]);
    assert!(
        matches!(
            device_ends(&second)[0].as_str(),
            "resource-busy" | "driver-deadline"
        ),
        "{second:?}"
    );
    assert!(
        began.elapsed() < DEADLINE + Duration::from_secs(10),
        "{:?}",
        began.elapsed()
    );
    gpu.shut(false);
    assert_eq!(
        device_ends(&daemon.allocate("b", &one).await),
        ["dev0"],
        "nothing of what failed is kept"
    );
}

#[tokio::test]
async fn hanging_allocate_ends_at_deadline() {
    let (_home, daemon, gpu) = plugged(3);
    gpu.shut(true);
    pause();
    let wanted: Vec<_> = ["a", "b", "c"]
        .iter()
        .map(|name| container(name, ContainerKind::App, &[("gpu", 1)]))
        .collect();
    let began = Instant::now();
    assert_eq!(
        device_ends(&daemon.allocate("a", &wanted).await),
        ["driver-deadline"; 3]
    );
    assert!(
        began.elapsed() < DEADLINE + Duration::from_secs(1),
        "{:?}",
        began.elapsed()
    );
    assert!(daemon.devices_of("a").is_empty());
}

/// A kubelet loses a reservation that is made while a plugin thinks and another pod is cleaned up.
#[tokio::test]
async fn reservation_survives_another_pods_unprepare() {
    let (_home, daemon, gpu) = plugged_with(FakePlugin::preferring(&["dev1"]), 2);
    gpu.shut(false);
    assert_eq!(daemon.given("a", &[("gpu", 1)]).await, ["dev1"]);
    gpu.shut(true);
    let wanted = app(&[("gpu", 1)]);
    let leave = async {
        gpu.called(|calls| calls.preferred.len() == 2).await;
        daemon.free("a").await.unwrap();
        gpu.shut(false);
    };
    let (outcome, ()) = tokio::join!(daemon.allocate("b", &wanted), leave);
    assert_eq!(
        device_ends(&outcome),
        ["dev1"],
        "what became free meanwhile may be preferred"
    );
    assert_eq!(daemon.view("gpu").unwrap().devices[1].pods.len(), 1);
    assert_eq!(device_ends(&daemon.allocate("c", &wanted).await), ["dev0"]);
}

#[tokio::test]
async fn newly_unhealthy_devices_are_not_allocated() {
    let (home, gpu) = (Home::new(), FakePlugin::preferring(&["dev0"]));
    let daemon = home.start_at_once();
    let id = daemon.plug("gpu", &gpu, &numbered(2));
    gpu.shut(true);
    let wanted = app(&[("gpu", 1)]);
    let fall_ill = async {
        gpu.called(|calls| calls.preferred.len() == 1).await;
        daemon
            .manager
            .devices
            .plugin_listed(&id, &[sick("dev0"), device("dev1", &[])]);
        gpu.shut(false);
    };
    let (outcome, ()) = tokio::join!(daemon.allocate("a", &wanted), fall_ill);
    assert_eq!(device_ends(&outcome), ["dev1"]);
}

#[tokio::test]
async fn verify_finds_devices_in_two_pods() {
    let (home, daemon, _) = plugged(2);
    daemon.allocate("a", &app(&[("gpu", 2)])).await;
    let good = checkpoint::verify(&home.checkpoint_path()).unwrap();
    assert_eq!((good.extended_resources, good.findings.len()), (1, 0));
    let [claim] = &daemon.manager.records.claims()[..] else {
        panic!("one claim")
    };
    let mut twin = ClaimRecord::clone(claim);
    twin.id = ObjectRef::new("default", "twin", "uid-twin").unwrap();
    twin.pods = [(uid("b"), pod("b"))].into();
    let pod = PodRecord {
        pod: pod("b"),
        claims: Default::default(),
        containers: Vec::new(),
        unknown: Default::default(),
    };
    let put = vec![
        checkpoint::Change::PutClaim(twin.into()),
        checkpoint::Change::PutPod(pod.into()),
    ];
    daemon.checkpoint().commit(put).await.unwrap();
    let report = checkpoint::verify(&home.checkpoint_path()).unwrap();
    assert!(!report.is_good());
    assert_eq!(report.findings.len(), 2, "{:?}", report.findings);
    assert!(
        report.findings[0]
            .contains("\"dev0\" of example.com/gpu is allocated to the pod default/a"),
        "{:?}",
        report.findings
    );
    let dump = checkpoint::read(&home.checkpoint_path()).unwrap();
    assert_eq!(
        dump.claims[1].resource.as_ref().unwrap().resource,
        resource("gpu")
    );
}
