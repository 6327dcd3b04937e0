//! A device plugin in Go on the official API that registers with the real daemon and watches for its socket.

use std::path::Path;

use nodedock_proto::node::v1;
use nodedock_tests::compose::{self, pod};
use nodedock_tests::machine::or_skip;
use nodedock_tests::{Daemon, Options, Root};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::pod_resources;
use crate::programs::{self, Running};

/// A running plugin. It is killed when dropped.
struct Plugin(Running);

impl Plugin {
    fn start(root: &Root, program: &Path, options: &[&str]) -> Self {
        let mut command = Command::new(program);
        command
            .arg("--device-plugins-dir")
            .arg(root.state().join("device-plugins"))
            .args(options);
        Self(Running::start(command))
    }

    /// The next event.
    async fn event(&mut self) -> Value {
        self.0.event("the next event", |_| true).await
    }

    /// Waits until it is registered and was asked for its devices, which come in any order.
    async fn registered_and_listed(&mut self) {
        let mut events = [
            self.event().await["event"].take(),
            self.event().await["event"].take(),
        ];
        events.sort_by_key(|event| event.to_string());
        assert_eq!(events, ["listed", "registered"]);
    }
}

#[tokio::test]
async fn plugin_dialing_path_survives_daemon_crash() {
    let Some(program) = or_skip("a device plugin in Go", programs::go("device-plugin")) else {
        return;
    };
    let mut daemon = Daemon::start().await;
    let options = [
        "--resource",
        "go.example.com/device",
        "--devices",
        "device-0,device-1,device-2",
    ];
    let mut plugin = Plugin::start(&daemon, &program, &options);
    plugin.registered_and_listed().await;
    let listed = "device plugin listed its devices resource=go.example.com/device devices=3";
    daemon.until_log(listed).await;

    daemon.crash().await;
    plugin.registered_and_listed().await;
    daemon.restart().await;
    plugin.registered_and_listed().await;
}

const RESOURCE: &str = "go.example.com/device";

/// A pod with two containers, of one and two devices.
fn wanted() -> v1::PreparePodRequest {
    let container = |name: &str, count| v1::Container {
        name: name.to_owned(),
        extended_resources: [(RESOURCE.to_owned(), count)].into(),
        ..Default::default()
    };
    let containers = vec![container("main", 1), container("second", 2)];
    v1::PreparePodRequest {
        pod: Some(pod("one")),
        containers,
        ..Default::default()
    }
}

#[tokio::test]
async fn go_plugin_devices_reach_go_agent() {
    let programs =
        programs::go("device-plugin").and_then(|a| Ok((a, programs::go("pod-resources")?)));
    let Some((program, agent)) = or_skip("a pod with devices of a plugin in Go", programs) else {
        return;
    };
    let mut daemon = Daemon::start().await;
    let options = [
        "--resource",
        RESOURCE,
        "--devices",
        "device-0,device-1,device-2",
    ];
    let mut plugin = Plugin::start(&daemon, &program, &options);
    plugin.registered_and_listed().await;
    daemon.until_allocatable(RESOURCE, 3).await;
    let answer = daemon.prepare(wanted()).await;
    assert!(
        answer.resources.iter().all(|of| of.outcome == "allocated"),
        "{answer:#?}"
    );
    for of in &answer.resources {
        let asked = plugin.event().await;
        assert_eq!(
            asked,
            json!({"event": "allocate", "devices": of.device_ids})
        );
        let container = answer
            .containers
            .iter()
            .find(|container| container.name == of.container);
        let container = container.unwrap_or_else(|| panic!("{answer:#?}"));
        assert_eq!(container.env["GO_DEVICES"], of.device_ids.join(","));
    }
    let device = |id: &String| json!({"resource_name": RESOURCE, "device_ids": [id]});
    let containers = answer.resources.iter().map(|of| {
        let devices: Vec<_> = of.device_ids.iter().map(device).collect();
        json!({"name": of.container, "devices": devices})
    });
    let listed = json!({"name": "one", "namespace": "default", "containers": containers.collect::<Vec<_>>()});
    for _ in 0..2 {
        let list = pod_resources::ask(&daemon, &agent, "list", &[]).await;
        assert_eq!(list, json!({"pod_resources": [listed]}));
        let all = pod_resources::ask(&daemon, &agent, "allocatable", &[]).await;
        assert_eq!(all["devices"].as_array().map(Vec::len), Some(3), "{all}");
        assert_eq!(daemon.prepare(wanted()).await, answer);
        daemon.crash().await;
        // What the plugin says next is not of an allocation.
        plugin.registered_and_listed().await;
        daemon.until_allocatable(RESOURCE, 3).await;
    }
    daemon.unprepare_pod(&pod("one")).await;
    assert_eq!(
        pod_resources::ask(&daemon, &agent, "list", &[]).await,
        json!({})
    );
}

#[tokio::test]
async fn go_plugin_prepares_claims_through_adapter() {
    const DRIVER: &str = "go-plugin.example.com";
    let Some(program) = or_skip(
        "a device plugin in Go by an adapter",
        programs::go("device-plugin"),
    ) else {
        return;
    };
    let adapter = format!("devicePluginAdapters: [{{resource: {RESOURCE}, driver: {DRIVER}}}]\n");
    let mut daemon = Daemon::start_with(Options::default().config(&adapter)).await;
    let options = [
        "--resource",
        RESOURCE,
        "--devices",
        "device:0,device:1,device-2",
    ];
    let mut plugin = Plugin::start(&daemon, &program, &options);
    plugin.registered_and_listed().await;
    daemon.until_allocatable(RESOURCE, 3).await;
    // An ID that is no DNS label has another name.
    let claim = compose::claim("of-one", &[&format!("{DRIVER}/devices/device--3a1")]);
    let request = compose::request(&pod("one"), &[&claim]);
    let answer = daemon.prepared(request.clone()).await;
    assert_eq!(
        plugin.event().await,
        json!({"event": "allocate", "devices": ["device:1"]})
    );
    assert!(
        daemon
            .only_cdi_file()
            .env()
            .contains(&"GO_DEVICES=device:1".to_owned())
    );
    // The rest goes to a pod by its limits.
    let limits = [(RESOURCE.to_owned(), 2)].into();
    let container = v1::Container {
        name: "main".to_owned(),
        extended_resources: limits,
        ..Default::default()
    };
    let limited = v1::PreparePodRequest {
        pod: Some(pod("limited")),
        containers: vec![container],
        ..Default::default()
    };
    daemon.prepared(limited.clone()).await;
    assert_eq!(
        plugin.event().await,
        json!({"event": "allocate", "devices": ["device:0", "device-2"]})
    );
    daemon.crash().await;
    plugin.registered_and_listed().await;
    assert_eq!(daemon.prepared(request).await, answer);
    for name in ["one", "limited"] {
        daemon.unprepare(&pod(name)).await;
    }
    daemon.assert_empty().await;
}

#[tokio::test]
async fn invalid_extended_resource_names_the_rule() {
    let Some(program) = or_skip(
        "a device plugin in Go that is refused",
        programs::go("device-plugin"),
    ) else {
        return;
    };
    let daemon = Daemon::start().await;
    let mut plugin = Plugin::start(&daemon, &program, &["--resource", "kubernetes.io/device"]);
    let event = plugin.event().await;
    assert_eq!(event["event"], "refused");
    let why = event["why"].as_str().expect("a text");
    assert!(
        why.contains("the ResourceName is invalid") && why.contains("outside kubernetes.io"),
        "{why}"
    );
}
