//! Device plugins, and kubelets that come, go, refuse and forget.

use std::os::unix::net::UnixListener as StdListener;
use std::time::Duration;

use nodedock_stand_ins::kubelet::{Kubelet, KubeletOptions, Resource};

use super::*;
use crate::bridge::device_plugins::registration::KUBELET_AWAY;

const RESOURCE: &str = "example.com/gpu";

pub(super) async fn kubelet(node: &Node) -> Kubelet {
    Kubelet::start(&node.root(), KubeletOptions::default()).await
}

/// Returns when the kubelet follows a list of these devices, by letters; those in capitals are not healthy.
pub(super) async fn listed(kubelet: &Kubelet, letters: &str) {
    let letter = |device: &nodedock_proto::kubelet::device_plugin::v1beta1::Device| {
        let letter = device.id.trim_start_matches("p/").to_owned();
        if device.health == "Healthy" {
            letter
        } else {
            letter.to_ascii_uppercase()
        }
    };
    let is_listed =
        |of: &Resource| of.running && of.devices.iter().map(letter).collect::<String>() == letters;
    kubelet
        .wait_until(letters, |view| {
            view.resource(RESOURCE).as_ref().is_some_and(is_listed)
        })
        .await;
}

/// Returns when the list ended.
async fn ended(kubelet: &Kubelet) {
    kubelet
        .wait_until("the end", |view| {
            view.resource(RESOURCE).is_some_and(|of| !of.running)
        })
        .await;
}

pub(super) fn directory(node: &Node) -> PathBuf {
    node.root().join("device-plugins")
}

/// The daemon's sockets in the kubelet's directory.
pub(super) fn sockets(node: &Node) -> Vec<String> {
    let entries = std::fs::read_dir(directory(node))
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    let names = entries.map(|name| name.into_string().unwrap());
    names
        .filter(|name| name.starts_with("nodedock-") && name.ends_with(".sock"))
        .collect()
}

fn registrations(run: &Running, outcome: &str) -> u64 {
    let labels = [
        ("resource", RESOURCE.to_owned()),
        ("outcome", outcome.to_owned()),
    ];
    run.bridge
        .metrics()
        .resource_registrations
        .get_or_create(&labels)
        .get()
}

#[tokio::test]
async fn resource_registers_once_and_lists_changes() {
    let node = Node::new();
    node.offer("ab");
    let kubelet = kubelet(&node).await;
    let run = node.start();
    listed(&kubelet, "ab").await;
    let [socket] = &sockets(&node)[..] else {
        panic!("one socket")
    };
    assert!(
        socket.starts_with("nodedock-gpu-") && socket.ends_with(&format!("-{START}.sock")),
        "{socket}"
    );
    for letters in ["aBc", "a"] {
        node.offer(letters);
        listed(&kubelet, letters).await;
    }
    run.registered(&PluginRegistration::Followed).await;
    let status = run.bridge.resources().remove(0);
    assert_eq!((status.devices, status.healthy), (1, 1));
    let lists = run
        .bridge
        .metrics()
        .lists
        .get_or_create(&[("resource", RESOURCE.to_owned())])
        .get();
    assert_eq!(
        (
            registrations(&run, "registered"),
            registrations(&run, "refused"),
            lists
        ),
        (1, 0, 3)
    );

    node.publish(Published::default());
    ended(&kubelet).await;
    run.until("the socket stays", |_| sockets(&node).is_empty())
        .await;
    assert!(run.bridge.resources().is_empty());
    run.drain().await;
}

#[tokio::test]
async fn resource_registers_again_after_kubelet_restart() {
    let node = Node::new();
    node.offer("a");
    let run = node.start();
    let mut kubelet = kubelet(&node).await;
    listed(&kubelet, "a").await;
    let mut fastest = Duration::MAX;
    for _ in 0..5 {
        kubelet.stop().await;
        let begun = std::time::Instant::now();
        kubelet.start_again().await;
        listed(&kubelet, "a").await;
        fastest = fastest.min(begun.elapsed());
        assert_eq!(sockets(&node).len(), 1);
    }
    // The fastest of some: a machine that runs all tests at once is slow now and then.
    assert!(fastest < Duration::from_millis(200), "{fastest:?}");
    assert_eq!(registrations(&run, "registered"), 6);
    // Gone altogether, with its directory.
    kubelet.stop().await;
    std::fs::remove_dir_all(directory(&node)).unwrap();
    kubelet.start_again().await;
    listed(&kubelet, "a").await;
    run.drain().await;
    ended(&kubelet).await;
    assert!(sockets(&node).is_empty(), "a stop takes the socket away");
}

/// A retry met the new kubelet before the watch reported it; the watch then led to a second registration, which cut the first one's
/// list off.
#[tokio::test]
async fn dead_kubelet_socket_causes_one_registration() {
    let node = Node::new();
    let path = directory(&node).join("kubelet.sock");
    drop(StdListener::bind(&path).unwrap());
    node.offer("a");
    let run = node.start();
    run.until("it is not tried", |run| run.resource().is_some())
        .await;
    let kubelet = kubelet(&node).await;
    listed(&kubelet, "a").await;
    // Other changes in the directory must not cause a registration.
    for name in ["x.sock", "y.sock"] {
        let _other = StdListener::bind(directory(&node).join(name)).unwrap();
        std::fs::remove_file(directory(&node).join(name)).unwrap();
    }
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    for letters in ["ab", "a", "ab"] {
        node.offer(letters);
        listed(&kubelet, letters).await;
    }
    assert_eq!(registrations(&run, "registered"), 1);
    run.drain().await;
}

#[tokio::test]
async fn refused_resource_sets_condition_and_retries() {
    let node = Node::new();
    node.offer("a");
    // It has no time to dial the plugin.
    let hasty = KubeletOptions {
        dial_timeout: Duration::ZERO,
        ..KubeletOptions::default()
    };
    let mut hasty = Kubelet::start(&node.root(), hasty).await;
    let run = node.start();
    let message = run.condition_comes("device-plugin-refused").await;
    assert!(message.contains(RESOURCE), "{message}");
    assert!(matches!(
        run.resource(),
        Some(PluginRegistration::Refused(_))
    ));
    hasty.stop().await;
    let kubelet = kubelet(&node).await;
    listed(&kubelet, "a").await;
    run.condition_goes("device-plugin-refused").await;
    assert!(registrations(&run, "refused") > 0 && run.condition("kubelet-away").is_none());
    run.drain().await;
}

#[tokio::test(start_paused = true)]
async fn missing_kubelet_sets_condition_while_needed() {
    let node = Node::new();
    node.offer("a");
    let run = node.start();
    tokio::time::sleep(KUBELET_AWAY + Duration::from_secs(1)).await;
    run.condition_comes("kubelet-away").await;
    node.publish(Published::default());
    run.condition_goes("kubelet-away").await;
    run.drain().await;
}

/// A kubelet up to 1.36 takes the end of the older instance's list for the end of the newest.
#[tokio::test]
async fn new_instance_registers_after_list_ends() {
    let node = Node::new();
    node.offer("a");
    let kubelet = kubelet(&node).await;
    let old = node.start();
    listed(&kubelet, "a").await;
    old.bridge.hold();
    let listeners = Listeners::of_start("start2");
    listeners.adopt(old.bridge.0.parts.listeners.give().unwrap());
    let new = Running::start(BridgeParts {
        listeners,
        is_alone: false,
        ..node.parts()
    });
    new.until("it is offered", |new| new.resource().is_some())
        .await;
    assert_eq!(
        kubelet.allocate(RESOURCE, 1).await.unwrap().ids,
        ["p/a"],
        "answered by the new one"
    );
    old.drain().await;
    assert_eq!(registrations(&new, "registered"), 0);
    new.bridge.set_alone();
    new.registered(&PluginRegistration::Followed).await;
    listed(&kubelet, "a").await;
    assert_eq!(
        (registrations(&new, "registered"), sockets(&node).len()),
        (1, 1)
    );
    new.drain().await;
    assert!(sockets(&node).is_empty());
}

#[tokio::test]
async fn stored_offer_lasts_until_driver_publishes() {
    let node = Node::new();
    let stored = |id: &str| {
        let offers = node.offered().resources.into_iter();
        offers
            .flat_map(|offer| offer.devices)
            .any(|device| device.id.eq_ignore_ascii_case(id))
    };
    node.offer("aB");
    let kubelet = kubelet(&node).await;
    let run = node.start();
    listed(&kubelet, "aB").await;
    run.until("it is not stored", |_| stored("p/b")).await;
    run.drain().await;
    ended(&kubelet).await;

    node.remove(GPU);
    node.without_resources().await;
    let run = node.start();
    listed(&kubelet, "aB").await;
    node.offer("abc");
    listed(&kubelet, "abc").await;
    run.until("it is not stored", |_| stored("p/c")).await;
    run.drain().await;
    ended(&kubelet).await;

    // The driver is back, and has it no more.
    node.publish(Published::default());
    node.without_resources().await;
    let run = node.start();
    run.until("it is not forgotten", |_| {
        node.offered().resources.is_empty()
    })
    .await;
    assert!(run.bridge.resources().is_empty());
    run.drain().await;
}

#[tokio::test]
async fn device_in_api_claim_is_unhealthy() {
    let node = Node::new();
    node.offer("ab");
    let kubelet = kubelet(&node).await;
    let run = node.start();
    listed(&kubelet, "ab").await;
    let claim = node.source.put("one", "p", "a");
    node.prepare(&claim).await;
    listed(&kubelet, "Ab").await;
    // What the kubelet allocated is in a claim as well, and its pod must not fail for it.
    assert_eq!(kubelet.allocate(RESOURCE, 1).await.unwrap().ids, ["p/b"]);
    node.unprepare(&claim).await;
    listed(&kubelet, "ab").await;
    run.drain().await;
}

#[tokio::test]
async fn device_sharing_allocated_hardware_is_unhealthy() {
    let node = Node::new();
    let mut published = published(
        "p",
        Some(resource()),
        ["a", "b", "c"].map(|id| (id.to_owned(), Some(true), "")),
    );
    let devices = published
        .inventory
        .pools
        .values_mut()
        .flat_map(|pool| pool.devices.iter_mut());
    for (_, facts) in devices.filter(|(device, _)| device.as_str() != "c") {
        facts.identity = vec!["one".to_owned()];
    }
    node.publish(published);
    let kubelet = kubelet(&node).await;
    let run = node.start();
    listed(&kubelet, "abc").await;
    assert_eq!(kubelet.allocate(RESOURCE, 1).await.unwrap().ids, ["p/a"]);
    listed(&kubelet, "aBc").await;
    run.drain().await;
}
