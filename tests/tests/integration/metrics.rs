//! The daemon's metrics, liveness and readiness, by HTTP on the admin socket.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;

use native_null::{Options as PluginOptions, Plugin, Script};
use nodedock_proto::kubelet::pod_resources::v1::ListPodResourcesRequest;
use nodedock_proto::kubelet::pod_resources::v1::pod_resources_lister_client::PodResourcesListerClient;
use nodedock_tests::compose::{claim, gpu_claim, pod, request};
use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};
use nodedock_tests::machine::own_listener;
use nodedock_tests::metrics::{Exposition, Family, ask, families_on_page};
use nodedock_tests::{Daemon, Options};
use tokio::net::TcpStream;

use crate::with_gpus;

/// A sample of the driver.
fn of_driver(found: &Exposition, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
    let mut all = vec![("driver", MOCK_GPU_NAME)];
    all.extend_from_slice(labels);
    found.value(name, &all)
}

#[tokio::test]
async fn metrics_match_page_and_activity() {
    let daemon = with_gpus().await;
    let gpu = gpu_claim("a", &["gpus/gpu-0"]);
    daemon.prepared(request(&pod("one"), &[&gpu])).await;
    PodResourcesListerClient::new(daemon.pod_resources_channel())
        .list(ListPodResourcesRequest {})
        .await
        .expect("an answer");
    let found = daemon.metrics().await;
    let served: BTreeSet<_> = found
        .families
        .iter()
        .map(|Family { name, kind, .. }| {
            if kind == "counter" {
                format!("{name}_total")
            } else {
                name.clone()
            }
        })
        .collect();
    assert_eq!(served, families_on_page());

    let calls = |operation, outcome| {
        of_driver(
            &found,
            "nodedock_driver_calls_total",
            &[("operation", operation), ("outcome", outcome)],
        )
    };
    assert_eq!(
        (calls("prepare", "answered"), calls("prepare", "trap")),
        (Some(1.0), Some(0.0))
    );
    let seconds = of_driver(
        &found,
        "nodedock_driver_call_duration_seconds_count",
        &[("operation", "prepare")],
    );
    assert_eq!(seconds, Some(1.0));
    assert!(of_driver(&found, "nodedock_driver_memory_peak_bytes", &[]) > Some(0.0));
    assert!(of_driver(&found, "nodedock_driver_cpu_seconds_total", &[]) > Some(0.0));
    assert_eq!(
        of_driver(
            &found,
            "nodedock_driver_limit_refusals_total",
            &[("limit", "memory")]
        ),
        Some(0.0)
    );
    assert_eq!(
        of_driver(
            &found,
            "nodedock_driver_state",
            &[("kind", "wasm"), ("state", "serving")]
        ),
        Some(1.0)
    );
    assert_eq!(
        found.value("nodedock_claims", &[("state", "prepared")]),
        Some(1.0)
    );
    assert_eq!(found.value("nodedock_pods", &[]), Some(1.0));
    // The name of the driver, and the claim.
    assert_eq!(
        found.value(
            "nodedock_checkpoint_commits_total",
            &[("outcome", "durable")]
        ),
        Some(2.0)
    );
    assert_eq!(
        found.value("nodedock_checkpoint_commit_duration_seconds_count", &[]),
        Some(2.0)
    );
    assert_eq!(
        found.value("nodedock_cdi_files_rendered_again_total", &[]),
        Some(0.0)
    );
    let operations = [
        ("operation_name", "PrepareResources"),
        ("is_error", "false"),
    ];
    assert_eq!(
        found.value("dra_operations_duration_seconds_count", &operations),
        Some(1.0)
    );
    let version = [("server_api_version", "v1")];
    assert_eq!(
        found.value(
            "kubelet_pod_resources_endpoint_requests_list_total",
            &version
        ),
        Some(1.0)
    );
}

#[tokio::test]
async fn claims_in_use_are_counted() {
    let mut daemon = with_gpus().await;
    let in_use = |found: &Exposition, driver| {
        found.value("dra_resource_claims_in_use", &[("driver_name", driver)])
    };
    let found = daemon.metrics().await;
    assert_eq!(
        (in_use(&found, "<any>"), in_use(&found, MOCK_GPU_NAME)),
        (Some(0.0), None)
    );
    let (one, two) = (pod("one"), pod("two"));
    daemon
        .prepared(request(&one, &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    daemon
        .prepared(request(&two, &[&gpu_claim("b", &["gpus/gpu-1"])]))
        .await;
    let found = daemon.metrics().await;
    assert_eq!(
        (in_use(&found, "<any>"), in_use(&found, MOCK_GPU_NAME)),
        (Some(2.0), Some(2.0))
    );
    daemon.unprepare(&one).await;
    daemon.restart().await;
    daemon.until_serving(MOCK_GPU_FILE).await;
    let found = daemon.metrics().await;
    assert_eq!(
        (in_use(&found, "<any>"), in_use(&found, MOCK_GPU_NAME)),
        (Some(1.0), Some(1.0))
    );
}

#[tokio::test]
async fn plugins_are_counted_by_state() {
    const PLUGIN: &str = "null.example.com";
    let daemon = Daemon::start().await;
    let registry = daemon.state().join("plugins_registry");
    let options = PluginOptions::new(PLUGIN, &registry, &daemon.path().join("plugins"));
    let plugin = Plugin::start(options, Script::ok(PLUGIN)).await.unwrap();
    let socket = plugin.registration_socket().display().to_string();
    daemon.until_serving(&socket).await;
    // Nothing listens on it.
    let dead = registry.join("dead-reg.sock");
    drop(std::os::unix::net::UnixListener::bind(&dead).unwrap());
    let dead = dead.display().to_string();
    daemon.until_state(&dead, "failed").await;

    daemon
        .prepared(request(
            &pod("one"),
            &[&claim("a", &[&format!("{PLUGIN}/null/null-0")])],
        ))
        .await;
    let found = daemon.metrics().await;
    let plugins = |path, state| {
        found.value(
            "plugin_manager_total_plugins",
            &[("socket_path", path), ("state", state)],
        )
    };
    let (wanted, actual) = ("desired_state_of_world", "actual_state_of_world");
    assert_eq!(
        (plugins(&socket, wanted), plugins(&socket, actual)),
        (Some(1.0), Some(1.0))
    );
    assert_eq!(
        (plugins(&dead, wanted), plugins(&dead, actual)),
        (Some(1.0), None)
    );
    let method = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources";
    let call = [
        ("driver_name", PLUGIN),
        ("method_name", method),
        ("grpc_status_code", "OK"),
    ];
    assert_eq!(
        found.value("dra_grpc_operations_duration_seconds_count", &call),
        Some(1.0)
    );

    plugin.unregister().unwrap();
    daemon.until_gone(&socket).await;
    assert_eq!(
        daemon.metrics().await.with("socket_path", &socket),
        Vec::<&str>::new()
    );
}

#[tokio::test]
async fn removed_driver_has_no_metrics() {
    let daemon = with_gpus().await;
    assert!(
        !daemon
            .metrics()
            .await
            .with("driver", MOCK_GPU_NAME)
            .is_empty()
    );
    daemon.take_out(MOCK_GPU_FILE);
    daemon.until_gone(MOCK_GPU_FILE).await;
    assert_eq!(
        daemon.metrics().await.with("driver", MOCK_GPU_NAME),
        Vec::<&str>::new()
    );
}

#[tokio::test]
async fn rendered_file_is_counted() {
    let daemon = with_gpus().await;
    let gpu = gpu_claim("a", &["gpus/gpu-0"]);
    daemon.prepared(request(&pod("one"), &[&gpu])).await;
    for file in daemon.cdi_files() {
        std::fs::remove_file(file.path).unwrap();
    }
    // The answer has the file made right before.
    daemon.prepared(request(&pod("one"), &[&gpu])).await;
    assert_eq!(
        daemon
            .metrics()
            .await
            .value("nodedock_cdi_files_rendered_again_total", &[]),
        Some(1.0)
    );
}

#[tokio::test]
async fn only_health_and_metrics_are_served() {
    let daemon = with_gpus().await;
    let socket = daemon.path().join("run/nodedock/admin.sock");
    assert_eq!(
        std::fs::metadata(socket).unwrap().permissions().mode() & 0o777,
        0o600
    );
    for path in ["/livez", "/readyz", "/livez?verbose=1"] {
        let answer = daemon.admin("GET", path).await;
        assert_eq!(
            (answer.status, answer.body.as_str()),
            (200, "ok\n"),
            "{path}"
        );
    }
    for (method, path, status) in [
        ("GET", "/", 404),
        ("GET", "/metrics/", 404),
        ("POST", "/debug", 404),
        ("POST", "/metrics", 405),
        ("HEAD", "/livez", 405),
        ("DELETE", "/readyz", 405),
    ] {
        let answer = daemon.admin(method, path).await;
        assert_eq!(answer.status, status, "{method} {path}: {}", answer.body);
        assert_eq!(
            answer.headers.contains_key("allow"),
            status == 405,
            "{method} {path}"
        );
    }
}

#[tokio::test]
async fn configured_address_is_listened_on() {
    let free = own_listener();
    let address = free.local_addr().unwrap();
    let config = format!("admin: {{listen: \"{address}\"}}\n");
    drop(free);
    let daemon = Daemon::start_with(Options::default().config(&config)).await;
    let stream = TcpStream::connect(address)
        .await
        .expect("the address accepts");
    let answer = ask(stream, "GET", "/metrics").await;
    assert_eq!(answer.status, 200);
    Exposition::parse(&answer.body).unwrap();
    assert_eq!(
        daemon.admin("GET", "/livez").await.status,
        200,
        "the socket is there as well"
    );
}
