//! From a socket to a registered plugin, and back.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::plugin::{Behaviour, Plugin, kubelet, quick};
use crate::kubelet::{Call, Kubelet, KubeletOptions, Release};

const DRIVER: &str = "gpu.example.com";

/// Waits for an error of this kind, and gives it.
async fn error(kubelet: &Kubelet, what: &str, part: &str) -> String {
    let found = |call: &Call| {
        let error = call.outcome.as_ref().err()?;
        (call.what == what && error.contains(part)).then(|| error.clone())
    };
    kubelet.wait_for(&format!("{what}: {part}"), |view| view.calls().iter().find_map(found)).await
}

#[tokio::test]
async fn a_driver_that_is_there_before_and_one_that_comes_later_are_registered() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("plugins_registry")).unwrap();
    let first = Plugin::start(dir.path(), "", Behaviour::of("first.example.com"));
    let kubelet = Kubelet::start(dir.path(), quick()).await;
    kubelet.registered("first.example.com").await;
    let second = Plugin::start(dir.path(), "", Behaviour::of("second.example.com"));
    kubelet.registered("second.example.com").await;
    assert_eq!(first.seen.lock().unwrap().statuses, [(true, String::new())]);
    second.remove();
    kubelet.deregistered("second.example.com").await;
    kubelet.wait_until("the first", |view| view.drivers() == ["first.example.com"]).await;
}

#[tokio::test]
async fn registration_sockets_are_called_with_the_path_for_an_authority() {
    let (dir, kubelet) = kubelet(quick()).await;
    let stock = Plugin::start(dir.path(), "", Behaviour { tolerant: false, ..Behaviour::of(DRIVER) });
    let why = error(&kubelet, "GetInfo", "").await;
    assert!(why.contains("PROTOCOL_ERROR") || why.contains("protocol error"), "{why}");
    stock.remove();
    let _tolerant = Plugin::start(dir.path(), "", Behaviour::of(DRIVER));
    kubelet.registered(DRIVER).await;
}

#[tokio::test]
async fn a_driver_that_refuses_its_notification_is_deregistered_and_tried_again() {
    let (dir, kubelet) = kubelet(quick()).await;
    let plugin = Plugin::start(dir.path(), "", Behaviour { notify_fails: 2, ..Behaviour::of(DRIVER) });
    kubelet.registered(DRIVER).await;
    assert_eq!(plugin.seen.lock().unwrap().statuses.len(), 3);
    kubelet.wait_until("two deregistrations", |view| view.count("deregister", DRIVER) == 2).await;
}

#[tokio::test]
async fn a_driver_that_answers_too_late_is_not_registered() {
    let options = KubeletOptions { get_info_timeout: Duration::from_millis(20), ..quick() };
    let (dir, kubelet) = kubelet(options).await;
    let slow = Behaviour { get_info_takes: Duration::from_secs(3600), ..Behaviour::of(DRIVER) };
    let plugin = Plugin::start(dir.path(), "", slow);
    error(&kubelet, "GetInfo", "DeadlineExceeded").await;
    assert!(plugin.seen.lock().unwrap().statuses.is_empty());
    plugin.change(|behaviour| behaviour.get_info_takes = Duration::ZERO);
    kubelet.registered(DRIVER).await;
}

#[tokio::test]
async fn a_plugin_that_a_kubelet_cannot_use_is_notified_of_the_reason() {
    let newer = KubeletOptions { release: Release::V1_37, ..quick() };
    let none = Behaviour { versions: vec![], ..Behaviour::of(DRIVER) };
    let old = Behaviour { versions: vec!["1.0.0"], ..Behaviour::of(DRIVER) };
    let other = Behaviour { kind: "Other", ..Behaviour::of(DRIVER) };
    for (behaviour, options, part) in [
        (none, quick(), "empty list of supported gRPC services"),
        (old, quick(), "none of services supported"),
        (other, quick(), "no handler registered for plugin type"),
        (Behaviour::of(&"x".repeat(64)), newer, "invalid"),
    ] {
        let (dir, kubelet) = kubelet(options).await;
        let plugin = Plugin::start(dir.path(), "", behaviour);
        error(&kubelet, "register", part).await;
        let (registered, why) = plugin.seen.lock().unwrap().statuses[0].clone();
        assert!(!registered && why.contains(part), "{why}");
    }
}

#[tokio::test]
async fn a_socket_that_is_made_again_is_registered_again() {
    let (dir, kubelet) = kubelet(quick()).await;
    let first = Plugin::start(dir.path(), "", Behaviour::of(DRIVER));
    kubelet.registered(DRIVER).await;
    first.remove();
    let _second = Plugin::start(dir.path(), "", Behaviour::of(DRIVER));
    kubelet.wait_until("the second", |view| view.count("NotifyRegistrationStatus", DRIVER) == 2).await;
    kubelet.registered(DRIVER).await;
    kubelet.wait_until("one instance", |view| view.endpoints(DRIVER).len() == 1).await;
}

#[tokio::test]
async fn a_restart_finds_every_socket_again_and_wipes_slices() {
    let wiped = Arc::new(Mutex::new(vec![]));
    let log = Arc::clone(&wiped);
    let wipes = Arc::new(move |driver: Option<&str>| log.lock().unwrap().push(driver.map(str::to_owned)));
    let options = KubeletOptions { wipes: Some(wipes), ..quick() };
    let (dir, mut kubelet) = kubelet(options).await;
    let plugin = Plugin::start(dir.path(), "", Behaviour::of(DRIVER));
    kubelet.registered(DRIVER).await;
    kubelet.restart().await;
    kubelet.registered(DRIVER).await;
    assert_eq!(plugin.seen.lock().unwrap().statuses.len(), 2);
    assert_eq!(wiped.lock().unwrap().iter().filter(|driver| driver.is_none()).count(), 2);
    let before = kubelet.wait_for("wipes", |view| Some(view.count("wipe", DRIVER))).await;
    plugin.remove();
    kubelet.wait_until("a wipe", |view| view.count("wipe", DRIVER) == before + 1).await;
    assert_eq!(wiped.lock().unwrap().last().unwrap().as_deref(), Some(DRIVER));
}
