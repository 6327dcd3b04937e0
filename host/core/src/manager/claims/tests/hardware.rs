//! Hardware that containers get by devices of several drivers.

use std::time::Duration;

use crate::manager::claims::fixtures::{claim, driver, pod};
use crate::manager::tests::scene::{Daemon, FakeDriver, Home, Reply, ends};
use nodedock_model::{DeviceAccess, DeviceNode, Edits, ObjectRef};

const FUNCTION: &str = "pci0000:3a/0000:3b:00.0";

fn machine() -> Home {
    let home = Home::new();
    home.record_node("/dev/dri/card0", 0, &format!("{FUNCTION}/drm/card0"));
    home.record_node("/dev/dri/card1", 1, "pci0000:3a/0000:3c:00.0/drm/card1");
    home.record_node("/dev/fuse", 2, "virtual/misc/fuse");
    home
}

fn access(paths: &[&str]) -> Reply {
    let device_nodes = paths.iter().map(|path| DeviceNode::at(path)).collect();
    Reply::Access(DeviceAccess::Edits(Edits {
        device_nodes,
        ..Edits::default()
    }))
}

/// A daemon with two drivers, of which no prepare waits for another claim.
fn with_two(
    home: &Home,
) -> (
    Daemon,
    std::sync::Arc<FakeDriver>,
    std::sync::Arc<FakeDriver>,
) {
    let daemon = home.start_with("boot-1", Duration::ZERO);
    let (gpu, nodes) = (
        FakeDriver::new(driver("gpu")),
        FakeDriver::new(driver("nodes")),
    );
    daemon.serve(&gpu);
    daemon.serve(&nodes);
    (daemon, gpu, nodes)
}

async fn prepare(
    daemon: &Daemon,
    by: &FakeDriver,
    of: &ObjectRef,
    device: &str,
    reply: Reply,
) -> String {
    let name = format!("{}-{}", of.name, device.replace('/', "-"));
    daemon.source.put(claim(&name, &[device], &[of]));
    by.reply(&format!("uid-{name}"), reply);
    ends(&daemon.prepare(of, &[&name]).await)[0].to_owned()
}

#[tokio::test]
async fn claimed_node_is_refused_to_others() {
    let home = machine();
    let (daemon, gpu, nodes) = with_two(&home);
    let (a, b) = (pod("a"), pod("b"));
    assert_eq!(
        prepare(&daemon, &gpu, &a, "gpu/0", access(&["/dev/dri/card0"])).await,
        "prepared"
    );
    assert_eq!(
        prepare(&daemon, &nodes, &b, "nodes/0", access(&["/dev/dri/card0"])).await,
        "device-held"
    );
    assert_eq!(nodes.counts(), (1, 1), "what it prepared is undone");
    assert!(
        daemon.state("uid-b-nodes-0").is_none(),
        "and kept by no claim"
    );
    assert_eq!(
        prepare(&daemon, &nodes, &b, "nodes/0", access(&["/dev/dri/card0"])).await,
        "device-held"
    );
    assert_eq!(nodes.counts(), (1, 1), "it is known what the device gives");
    assert_eq!(
        prepare(&daemon, &nodes, &b, "nodes/1", access(&["/dev/dri/card1"])).await,
        "prepared"
    );

    daemon.unprepare(&a).await;
    assert_eq!(
        prepare(&daemon, &nodes, &b, "nodes/0", access(&["/dev/dri/card0"])).await,
        "prepared"
    );
    let holders = daemon
        .manager
        .holds
        .holders_of_device(&driver("gpu"), "pool", "0");
    assert_eq!(holders.len(), 1, "{holders:?}");
}

#[tokio::test]
async fn control_nodes_are_shared_between_claims() {
    let home = machine();
    let (daemon, gpu, nodes) = with_two(&home);
    let (a, b, c) = (pod("a"), pod("b"), pod("c"));
    assert_eq!(
        prepare(
            &daemon,
            &gpu,
            &a,
            "gpu/0",
            access(&["/dev/dri/card0", "/dev/fuse"])
        )
        .await,
        "prepared"
    );
    assert_eq!(
        prepare(
            &daemon,
            &nodes,
            &b,
            "nodes/0",
            access(&["/dev/dri/card1", "/dev/fuse"])
        )
        .await,
        "prepared"
    );
    let of_driver = prepare(&daemon, &gpu, &c, "gpu/1", access(&["/dev/dri/card0"])).await;
    assert_eq!(
        of_driver, "prepared",
        "a driver says by identity strings which of its devices exclude each other"
    );
}

#[tokio::test]
async fn plugin_cdi_nodes_count_as_held() {
    let home = machine();
    let (daemon, gpu, nodes) = with_two(&home);
    let (a, b) = (pod("a"), pod("b"));
    let spec = r#"{"cdiVersion": "0.5.0", "kind": "vendor.com/gpu", "devices": [
        {"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/in/container", "hostPath": "/dev/dri/card0"}]}}]}"#;
    std::fs::write(daemon.cdi.join("vendor.json"), spec).unwrap();
    let of_plugin = || {
        Reply::Access(DeviceAccess::CdiDevices(vec![
            "vendor.com/gpu=0".to_owned(),
        ]))
    };
    assert_eq!(
        prepare(&daemon, &nodes, &a, "nodes/0", access(&["/dev/dri/card0"])).await,
        "prepared"
    );
    assert_eq!(
        prepare(&daemon, &gpu, &b, "gpu/0", of_plugin()).await,
        "device-held"
    );
    daemon.unprepare(&a).await;
    assert_eq!(
        prepare(&daemon, &gpu, &b, "gpu/0", of_plugin()).await,
        "prepared"
    );
    assert_eq!(
        prepare(&daemon, &nodes, &a, "nodes/0", access(&["/dev/dri/card0"])).await,
        "device-held"
    );
}

#[tokio::test]
async fn node_holds_survive_a_restart() {
    let home = machine();
    let (a, b) = (pod("a"), pod("b"));
    {
        let (daemon, gpu, _) = with_two(&home);
        assert_eq!(
            prepare(&daemon, &gpu, &a, "gpu/0", access(&["/dev/dri/card0"])).await,
            "prepared"
        );
        daemon.crash().await;
    }
    let (daemon, _, nodes) = with_two(&home);
    assert_eq!(
        prepare(&daemon, &nodes, &b, "nodes/0", access(&["/dev/dri/card0"])).await,
        "device-held"
    );
}

#[tokio::test]
async fn prepare_with_new_node_frees_old() {
    let home = machine();
    let (daemon, gpu, nodes) = with_two(&home);
    let (a, b) = (pod("a"), pod("b"));
    assert_eq!(
        prepare(&daemon, &gpu, &a, "gpu/0", access(&["/dev/dri/card0"])).await,
        "prepared"
    );
    daemon.crash().await;
    let daemon = home.start_in("boot-2");
    daemon.serve(&gpu);
    daemon.serve(&nodes);
    assert_eq!(
        prepare(&daemon, &gpu, &a, "gpu/0", access(&["/dev/dri/card1"])).await,
        "prepared"
    );
    assert_eq!(
        prepare(&daemon, &nodes, &b, "nodes/0", access(&["/dev/dri/card0"])).await,
        "prepared"
    );
}
