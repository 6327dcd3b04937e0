//! Tests against the example plugins.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use native_device_plugin as plugged;
use native_null::{DeviceHealth, HealthState, Options, Plugin, Script, ScriptedOutcome, Versions};
use nodedock_proto::kubelet::pod_resources::v1::ListPodResourcesRequest;
use nodedock_proto::kubelet::pod_resources::v1::pod_resources_lister_client::PodResourcesListerClient;
use tempfile::TempDir;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;

use super::{Call, ClaimRef, Kubelet, KubeletOptions, authority};

const DRIVER: &str = "gpu.example.com";
const RESOURCE: &str = "example.com/gpu";

/// Returns options with pauses that a test can wait for.
fn quick() -> KubeletOptions {
    let short = Duration::from_millis(20);
    KubeletOptions {
        register_again: short,
        health_again: short,
        wipe_after: short,
        ..Default::default()
    }
}

async fn kubelet(options: KubeletOptions) -> (TempDir, Kubelet) {
    let dir = tempfile::tempdir().unwrap();
    let kubelet = Kubelet::start(dir.path(), options).await;
    (dir, kubelet)
}

fn options(root: &Path, driver: &str) -> Options {
    Options::new(
        driver,
        &root.join("plugins_registry"),
        &root.join("plugins"),
    )
}

async fn plugin(root: &TempDir) -> Plugin {
    Plugin::start(options(root.path(), DRIVER), Script::ok("example.com"))
        .await
        .unwrap()
}

fn claims(uids: &[&str]) -> Vec<ClaimRef> {
    uids.iter()
        .map(|uid| ClaimRef::new("default", &format!("claim-{uid}"), uid))
        .collect()
}

/// Waits for an error of this kind.
async fn error(kubelet: &Kubelet, what: &str, part: &str) {
    let is_it = |call: &Call| {
        call.what == what
            && call
                .outcome
                .as_ref()
                .is_err_and(|error| error.contains(part))
    };
    kubelet
        .wait_until(&format!("{what}: {part}"), |view| {
            view.calls().iter().any(is_it)
        })
        .await;
}

async fn counted(kubelet: &Kubelet, what: &str, count: usize) {
    kubelet
        .wait_until(&format!("{count} of {what}"), |view| {
            view.count(what, DRIVER) == count
        })
        .await;
}

#[tokio::test]
async fn registration_calls_use_path_as_authority() {
    let (dir, _kubelet) = kubelet(quick()).await;
    let listener =
        tokio::net::UnixListener::bind(dir.path().join("plugins_registry/a-reg.sock")).unwrap();
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains("%2Fplugins_registry%2Fa-reg.sock") {
        assert_ne!(stream.read_buf(&mut seen).await.unwrap(), 0, "{seen:?}");
    }
}

#[tokio::test]
async fn driver_refusing_its_notification_is_retried() {
    let (dir, kubelet) = kubelet(quick()).await;
    let plugin =
        Plugin::unregistered(options(dir.path(), DRIVER), Script::ok("example.com")).unwrap();
    plugin.fail_notifications(Some("no thanks"));
    plugin.register().unwrap();
    kubelet
        .wait_until("deregistrations", |view| {
            view.count("deregister", DRIVER) >= 2
        })
        .await;
    plugin.fail_notifications(None);
    kubelet.registered(DRIVER).await;
}

#[tokio::test]
async fn late_driver_is_not_registered() {
    let (dir, kubelet) = kubelet(quick()).await;
    let silent = options(dir.path(), DRIVER).registration_socket();
    let _silent = UnixListener::bind(silent).unwrap();
    error(&kubelet, "GetInfo", "DeadlineExceeded").await;
    let _plugin = plugin(&dir).await;
    kubelet.registered(DRIVER).await;
}

#[tokio::test]
async fn unusable_plugin_is_notified_with_reason() {
    let none = |options| Options {
        said_services: Some(vec![]),
        ..options
    };
    let old = |options| Options {
        said_services: Some(vec!["1.0.0".to_owned()]),
        ..options
    };
    let other = |options| Options {
        plugin_type: "Other".to_owned(),
        ..options
    };
    let cases: [(&dyn Fn(Options) -> Options, &str); 3] = [
        (&none, "none of services supported"),
        (&old, "none of services supported"),
        (&other, "no handler registered for plugin type"),
    ];
    for (change, part) in cases {
        let (dir, kubelet) = kubelet(quick()).await;
        let plugin = Plugin::start(change(options(dir.path(), DRIVER)), Script::ok("v"))
            .await
            .unwrap();
        error(&kubelet, "register", part).await;
        let (registered, why) = plugin.notified().await;
        assert!(!registered && why.contains(part), "{why}");
    }
}

#[tokio::test]
async fn restart_rediscovers_sockets_and_wipes_slices() {
    let wiped = Arc::new(Mutex::new(vec![]));
    let log = Arc::clone(&wiped);
    let wipes =
        Arc::new(move |driver: Option<&str>| log.lock().unwrap().push(driver.map(str::to_owned)));
    let (dir, mut kubelet) = kubelet(KubeletOptions {
        wipes: Some(wipes),
        ..quick()
    })
    .await;
    let plugin = plugin(&dir).await;
    kubelet.registered(DRIVER).await;
    kubelet.start_again().await;
    kubelet.registered(DRIVER).await;
    counted(&kubelet, "NotifyRegistrationStatus", 2).await;
    assert_eq!(
        wiped
            .lock()
            .unwrap()
            .iter()
            .filter(|driver| driver.is_none())
            .count(),
        2
    );
    let before = kubelet
        .wait_for("wipes", |view| Some(view.count("wipe", DRIVER)))
        .await;
    plugin.unregister().unwrap();
    plugin.die();
    counted(&kubelet, "wipe", before + 1).await;
    assert_eq!(
        wiped.lock().unwrap().last().unwrap().as_deref(),
        Some(DRIVER)
    );
}

#[tokio::test]
async fn answers_for_other_claims_are_errors() {
    let options = KubeletOptions {
        call_timeout: Duration::from_secs(3),
        ..quick()
    };
    let (dir, kubelet) = kubelet(options).await;
    let plugin = plugin(&dir).await;
    kubelet.registered(DRIVER).await;
    let two = claims(&["u-1", "u-2"]);
    let prepared = kubelet.driver(DRIVER).prepare(&two).await.unwrap();
    assert_eq!(
        (prepared.len(), prepared["u-1"][0].device_name.as_str()),
        (2, "null-0")
    );
    kubelet.driver(DRIVER).unprepare(&two).await.unwrap();
    for (answer, expected) in [
        (ScriptedOutcome::Skip, "skipped 2 ResourceClaims"),
        (
            ScriptedOutcome::Stranger("u-9".to_owned(), vec![]),
            "returned result for unknown claim UID u-9",
        ),
        (
            ScriptedOutcome::Error("no such device".to_owned()),
            "failed for ResourceClaim claim-u-1: no such device",
        ),
    ] {
        plugin.set_script(Script::new(move |_, _| answer.clone()));
        let why = kubelet.driver(DRIVER).prepare(&two).await.unwrap_err();
        assert_eq!(why, format!("NodePrepareResources {expected}"));
        let why = kubelet.driver(DRIVER).unprepare(&two).await.unwrap_err();
        assert_eq!(why, format!("NodeUnprepareResources {expected}"));
    }
    plugin.set_script(Script::prepare(ScriptedOutcome::Hang));
    let why = kubelet.driver(DRIVER).prepare(&two).await.unwrap_err();
    assert!(
        why.starts_with("NodePrepareResources: DeadlineExceeded"),
        "{why}"
    );
    let why = kubelet.driver("none").prepare(&two).await.unwrap_err();
    assert_eq!(why, "DRA driver none is not registered");
}

#[tokio::test]
async fn newest_connected_instance_is_called() {
    let (dir, kubelet) = kubelet(quick()).await;
    let start = async |name| {
        let options = options(dir.path(), DRIVER).instance(name);
        let plugin = Plugin::start(options, Script::ok(name)).await.unwrap();
        let endpoint = plugin.endpoint().to_owned();
        let is_last = |endpoints: Vec<_>| endpoints.last() == Some(&endpoint);
        kubelet
            .wait_until(name, |view| is_last(view.endpoints(DRIVER)))
            .await;
        kubelet
            .wait_until(name, |view| {
                view.connected(DRIVER) == view.endpoints(DRIVER).len()
            })
            .await;
        plugin
    };
    let called = async || {
        let devices = kubelet
            .driver(DRIVER)
            .prepare(&claims(&["u-1"]))
            .await
            .unwrap()
            .remove("u-1")
            .unwrap();
        devices[0].cdi_device_ids[0].clone()
    };
    let _old = start("old").await;
    let new = start("new").await;
    assert_eq!(called().await, "new/null=u-1");
    new.unregister().unwrap();
    kubelet
        .wait_until("the old one", |view| view.endpoints(DRIVER).len() == 1)
        .await;
    assert_eq!(called().await, "old/null=u-1");
}

#[tokio::test]
async fn lost_connection_reopens_without_new_registration() {
    let (dir, kubelet) = kubelet(quick()).await;
    let plugin = plugin(&dir).await;
    kubelet.registered(DRIVER).await;
    plugin.disconnect();
    counted(&kubelet, "connection lost", 1).await;
    kubelet
        .wait_until("still one", |view| {
            view.endpoints(DRIVER) == [plugin.endpoint()]
        })
        .await;
    plugin.serve().unwrap();
    kubelet.registered(DRIVER).await;
    kubelet
        .driver(DRIVER)
        .prepare(&claims(&["u-1"]))
        .await
        .unwrap();
    assert_eq!(
        kubelet
            .calls()
            .iter()
            .filter(|call| call.what == "GetInfo")
            .count(),
        1
    );
}

#[tokio::test]
async fn health_is_watched_until_driver_leaves() {
    let (dir, kubelet) = kubelet(quick()).await;
    let versions = Versions {
        health_v1alpha1: true,
        ..Versions::default()
    };
    let options = Options {
        versions,
        ..options(dir.path(), DRIVER)
    };
    let plugin = Plugin::start(options, Script::ok("v")).await.unwrap();
    let report = |device: &str, state| DeviceHealth {
        pool: "p".to_owned(),
        device: device.to_owned(),
        state,
        timeout_seconds: 0,
        message: "says the driver".to_owned(),
    };
    plugin.report_health(vec![
        report("d-0", HealthState::Healthy),
        report("d-1", HealthState::Unhealthy),
    ]);
    let health = kubelet
        .wait_for("health", |view| {
            Some(view.health(DRIVER)).filter(|h| h.len() == 2)
        })
        .await;
    let of = |name: &str| &health[&("p".to_owned(), name.to_owned())];
    assert_eq!(
        (of("d-0").healthy, of("d-1").healthy),
        (Some(true), Some(false))
    );
    assert_eq!(of("d-0").message, "says the driver");
    plugin.unregister().unwrap();
    kubelet
        .wait_until("no health", |view| view.health(DRIVER).is_empty())
        .await;
}

fn devices(healthy: &[bool]) -> Vec<plugged::Device> {
    let device = |(index, healthy): (usize, &bool)| plugged::Device {
        healthy: *healthy,
        ..plugged::Device::healthy(&format!("gpu-{index}"))
    };
    healthy.iter().enumerate().map(device).collect()
}

#[tokio::test]
async fn devices_of_a_plugin_are_allocated() {
    let (_root, kubelet) = kubelet(quick()).await;
    let why = kubelet.allocate(RESOURCE, 1).await.unwrap_err();
    assert_eq!(why, "cannot allocate unregistered device example.com/gpu");
    let last = |choice: &plugged::Choice| choice.available.iter().rev().take(2).cloned().collect();
    let options = plugged::Options::new(RESOURCE, &kubelet.device_plugins());
    let listed = devices(&[true, true, true, false]);
    let plugin = plugged::Plugin::start(options, plugged::Script::ok().choose(last), listed)
        .await
        .unwrap();
    assert_eq!(
        kubelet.devices(RESOURCE, 4).await.healthy(),
        ["gpu-0", "gpu-1", "gpu-2"]
    );
    let first = kubelet.allocate(RESOURCE, 2).await.unwrap();
    assert_eq!(first.answer.envs["NATIVE_DEVICES"], "gpu-1,gpu-2");
    let why = kubelet.allocate(RESOURCE, 2).await.unwrap_err();
    let expected =
        "requested number of devices unavailable for example.com/gpu. Requested: 2, Available: 1";
    assert_eq!(why, expected);

    let stream = UnixStream::connect(kubelet.root().join("pod-resources/kubelet.sock"))
        .await
        .unwrap();
    let mut client =
        PodResourcesListerClient::new(authority::channel(stream, None).await.unwrap().0);
    let pods = client
        .list(ListPodResourcesRequest {})
        .await
        .unwrap()
        .into_inner()
        .pod_resources;
    assert_eq!(
        pods[0].containers[0].devices[0].device_ids,
        ["gpu-1", "gpu-2"]
    );

    kubelet.free(&first);
    kubelet.allocate(RESOURCE, 3).await.unwrap();
    plugin.list(devices(&[false]));
    kubelet.devices(RESOURCE, 1).await;
    let why = kubelet.allocate(RESOURCE, 1).await.unwrap_err();
    assert_eq!(
        why,
        "no healthy devices present; cannot allocate unhealthy devices example.com/gpu"
    );
}

#[tokio::test]
async fn invalid_device_plugins_are_refused() {
    let (_root, kubelet) = kubelet(quick()).await;
    for (version, resource, part) in [
        ("v1alpha", RESOURCE, "v1beta1"),
        ("v1beta1", "gpu", "is invalid"),
        ("v1beta1", "kubernetes.io/gpu", "is invalid"),
        ("v1beta1", "requests.example.com/gpu", "is invalid"),
    ] {
        let mut options = plugged::Options::new(resource, &kubelet.device_plugins());
        options.said_version = Some(version.to_owned());
        let registered = plugged::Plugin::start(options, plugged::Script::ok(), vec![]).await;
        let why = registered.map(drop).unwrap_err();
        assert!(why.message().contains(part), "{why}");
    }
}

#[tokio::test]
async fn devices_of_ended_plugin_become_unhealthy() {
    let (_root, mut kubelet) = kubelet(quick()).await;
    let options = plugged::Options::new(RESOURCE, &kubelet.device_plugins());
    let start = |count| {
        plugged::Plugin::start(
            options.clone(),
            plugged::Script::ok(),
            devices(&vec![true; count]),
        )
    };
    let plugin = start(2).await.unwrap();
    kubelet.devices(RESOURCE, 2).await;
    plugin.die();
    kubelet
        .wait_until("the end", |view| {
            view.resource(RESOURCE).is_some_and(|found| !found.running)
        })
        .await;
    let found = kubelet
        .wait_for("devices", |view| view.resource(RESOURCE))
        .await;
    assert_eq!((found.devices.len(), found.healthy().len()), (2, 0));
    let _plugin = start(1).await.unwrap();
    assert_eq!(kubelet.devices(RESOURCE, 1).await.healthy(), ["gpu-0"]);

    std::fs::write(kubelet.device_plugins().join("kept"), "").unwrap();
    kubelet.start_again().await;
    assert!(!options.socket().exists() && kubelet.device_plugins().join("kept").exists());
    let empty = |found: super::Resource| found.devices.is_empty();
    kubelet
        .wait_until("nothing", |view| view.resource(RESOURCE).is_some_and(empty))
        .await;
    let _plugin = start(1).await.unwrap();
    kubelet.devices(RESOURCE, 1).await;
}
