//! Resources come, change, go, and come back.

use tokio::time::{advance, pause};

use super::{numbered, plugged};
use crate::manager::devices::fixtures::{device, driver, ids, pod, resource, sick};
use crate::manager::devices::{PluginId, ResourceSource};
use crate::manager::tests::scene::{Daemon, FakePlugin, GRACE, Home, app};
use nodedock_model::{ChangedKind, DriverKind, Problem};

fn gone(daemon: &Daemon, id: &PluginId) {
    daemon
        .manager
        .devices
        .plugin_left(id, &Problem::unavailable("eof", "its stream ended"));
}

/// Only devices in use make the end of a plugin a problem.
#[tokio::test]
async fn gone_plugin_of_pods_is_reported() {
    let (home, gpu, nic) = (Home::new(), FakePlugin::new(), FakePlugin::new());
    let daemon = home.start_at_once();
    daemon.starts.devices();
    daemon.starts.gone_plugins();
    let first = daemon.plug("gpu", &gpu, &numbered(2));
    let unused = daemon.plug("nic", &nic, &numbered(2));
    daemon.allocate("a", &app(&[("gpu", 1)])).await;
    gone(&daemon, &unused);
    gone(&daemon, &first);
    daemon
        .until_conditions(&[("plugin-gone", "example.com/gpu")])
        .await;
    let message = daemon.conditions.list()[0].problem.message.clone();
    assert!(
        message.contains("dev0 (pod ") && message.contains("registers again"),
        "{message}"
    );
    let second = daemon.plug("gpu", &gpu, &numbered(2));
    daemon.until_conditions(&[]).await;
    gone(&daemon, &second);
    daemon
        .until_conditions(&[("plugin-gone", "example.com/gpu")])
        .await;
    daemon.unprepare(&pod("a")).await;
    daemon.until_conditions(&[]).await;
}

/// The pause before the list is read again is the plugin's, and the condition ends with a list that is used.
#[tokio::test]
async fn unused_list_is_a_condition() {
    let (home, gpu) = (Home::new(), FakePlugin::new());
    let daemon = home.start_at_once();
    let id = daemon.plug("gpu", &gpu, &numbered(2));
    let large = Problem::internal("driver-answer-too-large", "more than the bound");
    daemon.manager.devices.plugin_left(&id, &large);
    assert_eq!(
        daemon.conditions(),
        [(
            "device-list-faulty".to_owned(),
            "example.com/gpu".to_owned()
        )]
    );
    let message = daemon.conditions.list()[0].problem.message.clone();
    assert!(message.contains("more than the bound"), "{message}");
    daemon.plug("gpu", &gpu, &numbered(2));
    assert_eq!(daemon.conditions(), []);
}

#[tokio::test]
async fn reregistered_plugin_replaces_its_devices() {
    let (home, first, second) = (Home::new(), FakePlugin::new(), FakePlugin::new());
    let daemon = home.start_at_once();
    daemon.plug("gpu", &first, &numbered(2));
    assert_eq!(daemon.counts("gpu"), Some((2, 2)));
    daemon.allocate("a", &app(&[("gpu", 1)])).await;
    let again = daemon.manager.devices.plugin_arrived(
        resource("gpu"),
        "/again.sock".into(),
        second.clone(),
    );
    assert_eq!(
        daemon.counts("gpu"),
        Some((2, 2)),
        "what was listed stands until the new list"
    );
    assert_eq!(
        daemon.view("gpu").unwrap().source,
        ResourceSource::Plugin("/again.sock".into())
    );
    daemon.manager.devices.plugin_listed(&again, &numbered(2));
    assert_eq!(daemon.counts("gpu"), Some((2, 2)));
    daemon.plug("gpu", &second, &[device("other", &[])]);
    assert_eq!(
        daemon.counts("gpu"),
        Some((1, 1)),
        "nothing of the old list is left"
    );
    assert_eq!(
        daemon.given("a", &[("gpu", 1)]).await,
        ["dev0"],
        "what was allocated stays"
    );
    assert_eq!(daemon.given("b", &[("gpu", 1)]).await, ["other"]);
    assert_eq!(
        (first.calls().allocate.len(), second.calls().allocate),
        (1, vec![ids(&["other"])])
    );
}

#[tokio::test]
async fn only_healthy_devices_are_allocatable() {
    let (home, gpu) = (Home::new(), FakePlugin::new());
    let daemon = home.start_at_once();
    let id = daemon.plug(
        "gpu",
        &gpu,
        &[device("a", &[]), device("b", &[]), sick("c")],
    );
    daemon.plug("nic", &FakePlugin::new(), &[device("a", &[])]);
    assert_eq!(
        (daemon.counts("gpu"), daemon.counts("nic")),
        (Some((3, 2)), Some((1, 1)))
    );
    daemon
        .manager
        .devices
        .plugin_listed(&id, &[device("a", &[]), sick("b")]);
    assert_eq!(daemon.counts("gpu"), Some((2, 1)));
    assert_eq!(daemon.given("p", &[("gpu", 2)]).await, ["too-few-devices"]);
    daemon
        .manager
        .devices
        .plugin_listed(&id, &[device("a", &[]), device("b", &[])]);
    assert_eq!(
        daemon.given("p", &[("gpu", 2)]).await,
        ["a,b"],
        "healthy again"
    );
    daemon.manager.devices.plugin_listed(&id, &[]);
    assert_eq!(
        daemon.counts("gpu"),
        Some((0, 0)),
        "known, and without devices"
    );
}

#[tokio::test]
async fn resource_of_gone_plugin_expires() {
    let (home, gpu) = (Home::new(), FakePlugin::new());
    let daemon = home.start_at_once();
    daemon.starts.devices();
    let id = daemon.plug("gpu", &gpu, &numbered(2));
    pause();
    gone(&daemon, &id);
    assert_eq!(daemon.counts("gpu"), Some((2, 0)));
    assert!(!daemon.view("gpu").unwrap().active);
    assert_eq!(
        daemon.given("a", &[("gpu", 1)]).await,
        ["no-healthy-device"]
    );
    assert!(gpu.calls().allocate.is_empty());

    advance(GRACE / 2).await;
    let id = daemon.plug("gpu", &gpu, &numbered(2));
    advance(GRACE * 2).await;
    assert_eq!(daemon.counts("gpu"), Some((2, 2)), "it came back in time");

    gone(&daemon, &id);
    daemon.until(|daemon| daemon.counts("gpu").is_none()).await;
    assert_eq!(daemon.manager.devices.capacity().removed, [resource("gpu")]);
    assert_eq!(daemon.given("a", &[("gpu", 1)]).await, ["resource-unknown"]);
    daemon.plug("gpu", &gpu, &numbered(1));
    assert_eq!(
        (
            daemon.counts("gpu"),
            daemon.manager.devices.capacity().removed.len()
        ),
        (Some((1, 1)), 0)
    );
}

#[tokio::test]
async fn recorded_resource_is_remembered_temporarily() {
    let (home, daemon, _) = plugged(2);
    daemon.allocate("a", &app(&[("gpu", 1)])).await;
    daemon.stop().await;

    let daemon = home.start_at_once();
    daemon.starts.devices();
    let view = daemon.view("gpu").unwrap();
    assert_eq!(
        (view.source, view.active, view.devices.len()),
        (ResourceSource::Remembered, false, 0)
    );
    assert_eq!(
        daemon.given("b", &[("gpu", 1)]).await,
        ["no-healthy-device"]
    );
    pause();
    daemon.until(|daemon| daemon.counts("gpu").is_none()).await;
    assert_eq!(daemon.manager.devices.capacity().removed, [resource("gpu")]);
    assert_eq!(
        daemon.given("a", &[("gpu", 1)]).await,
        ["dev0"],
        "its pod keeps what it has"
    );
}

/// The end of an old stream took the plugin that had replaced it out of service.
#[tokio::test]
async fn replaced_plugin_cannot_affect_newer_one() {
    let (home, gpu) = (Home::new(), FakePlugin::new());
    let daemon = home.start_at_once();
    let old = daemon.plug("gpu", &gpu, &numbered(1));
    let new = daemon.plug("gpu", &gpu, &numbered(2));
    gone(&daemon, &old);
    daemon.manager.devices.plugin_listed(&old, &numbered(7));
    assert_eq!(daemon.counts("gpu"), Some((2, 2)));
    gone(&daemon, &new);
    gone(&daemon, &new);
    assert_eq!(daemon.counts("gpu"), Some((2, 0)));
}

#[tokio::test]
async fn faulty_list_sets_a_condition() {
    let (home, gpu) = (Home::new(), FakePlugin::new());
    let daemon = home.start_at_once();
    let id = daemon.plug(
        "gpu",
        &gpu,
        &[device("a", &[]), device("a", &[]), device("", &[])],
    );
    assert_eq!(
        (daemon.counts("gpu"), daemon.condition_codes()),
        (
            Some((1, 1)),
            vec![
                "device-list-faulty".to_owned(),
                "devices-left-out".to_owned()
            ]
        )
    );
    let left_out = || daemon.manager.devices.left_out();
    let [(of, Some(ResourceSource::Plugin(_)), devices)] = &left_out()[..] else {
        panic!("{:?}", left_out())
    };
    assert_eq!(
        (of, devices.devices()[0].name.as_str()),
        (&resource("gpu"), "(no ID)")
    );
    daemon.manager.devices.plugin_listed(&id, &numbered(1));
    assert!(daemon.condition_codes().is_empty());
    assert_eq!(left_out(), []);
    // What a plugin that is gone leaves out is not known.
    daemon
        .manager
        .devices
        .plugin_listed(&id, &[device("", &[])]);
    assert_eq!(left_out().len(), 1);
    gone(&daemon, &id);
    assert_eq!(left_out(), []);
    assert!(daemon.condition_codes().is_empty());
}

#[tokio::test]
async fn flapping_health_is_reported_per_period() {
    let (home, gpu) = (Home::new(), FakePlugin::new());
    let daemon = home.start_at_once();
    pause();
    daemon.starts.devices();
    let (mut changes, mut followed) = (daemon.changes.listen(), daemon.manager.devices.changes());
    let id = daemon.plug("gpu", &gpu, &[device("a", &[])]);
    for n in 0..1000 {
        daemon.manager.devices.plugin_listed(
            &id,
            &[if n % 2 == 0 {
                sick("a")
            } else {
                device("a", &[])
            }],
        );
        tokio::task::yield_now().await;
    }
    assert!(
        followed.has_changed().unwrap(),
        "who follows sees the newest state, and no queue of them"
    );
    followed.mark_unchanged();
    daemon
        .manager
        .devices
        .plugin_listed(&id, &[device("a", &[])]);
    assert!(
        !followed.has_changed().unwrap(),
        "a list that is as before changes nothing"
    );
    let first = changes.recv().await.unwrap();
    assert_eq!(
        (first.kind, first.name.as_str()),
        (ChangedKind::Device, "example.com/gpu")
    );
    changes.recv().await.unwrap();
    advance(GRACE).await;
    assert!(
        changes.try_recv().is_err(),
        "a thousand changes at once are reported twice: at once, and after a time"
    );
}

#[tokio::test]
async fn first_source_keeps_the_resource() {
    let (home, gpu) = (Home::new(), FakePlugin::new());
    let daemon = home.start_at_once();
    daemon.starts.devices();
    let id = daemon.plug("gpu", &gpu, &numbered(1));
    let pools = super::pools::published("gpu", &[("0", &[]), ("1", &[])]);
    daemon.serve_any(
        &driver("gpu"),
        DriverKind::Wasm,
        None,
        Some(pools.subscribe()),
        "",
    );
    daemon
        .until(|daemon| daemon.condition_codes() == ["resource-taken"])
        .await;
    assert_eq!(daemon.counts("gpu"), Some((1, 1)));
    let condition = daemon.conditions.list().remove(0);
    assert!(
        condition.problem.message.contains("/gpu.sock")
            && condition.subject.contains("gpu.example.com"),
        "{condition:?}"
    );
    pause();
    gone(&daemon, &id);
    daemon
        .until(|daemon| daemon.counts("gpu") == Some((2, 2)))
        .await;
    assert!(daemon.condition_codes().is_empty());
    assert_eq!(
        daemon.view("gpu").unwrap().source,
        ResourceSource::Pools(driver("gpu"))
    );

    let waiting = daemon.plug("gpu", &gpu, &numbered(1));
    assert_eq!(
        (daemon.condition_codes(), daemon.counts("gpu")),
        (vec!["resource-taken".to_owned()], Some((2, 2)))
    );
    gone(&daemon, &waiting);
    assert!(
        daemon.condition_codes().is_empty(),
        "one that waited leaves at once"
    );
}
