//! The daemon's metrics, read by Prometheus' own parsers, checked as `promtool check metrics` checks them, and queried with its engine.

use std::path::Path;

use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::MOCK_GPU_NAME;
use nodedock_tests::machine::or_skip;
use nodedock_tests::{Daemon, Options};
use serde_json::{Value, json};

use crate::{lines, programs};

/// Figures of a vendor's exporter, which knows the UUIDs of devices alone.
fn exporter(uuid: &str) -> String {
    let sample = |uuid: &str, value: u32| {
        format!("DCGM_FI_DEV_GPU_UTIL{{gpu=\"{value}\",UUID=\"{uuid}\"}} {value}\n")
    };
    format!(
        "# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).\n# TYPE DCGM_FI_DEV_GPU_UTIL gauge\n{}{}# EOF\n",
        sample(uuid, 87),
        sample("GPU-of-another-node", 3)
    )
}

/// The first block of the page on metrics that is a query of `nodedock_device_info`.
fn query_of_page() -> String {
    let page = include_str!("../../../docs/metrics.md");
    let mut blocks = page.split("```").skip(1).step_by(2);
    let query = blocks.find(|block| block.contains("nodedock_device_info{"));
    query
        .expect("the page has a query of nodedock_device_info")
        .trim()
        .to_owned()
}

/// The expressions of the dashboard, with values for its variables.
fn queries_of_dashboard() -> Vec<String> {
    fn find(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                found.extend(
                    fields
                        .get("expr")
                        .and_then(Value::as_str)
                        .map(str::to_owned),
                );
                fields.values().for_each(|value| find(value, found));
            }
            Value::Array(items) => items.iter().for_each(|value| find(value, found)),
            _ => {}
        }
    }
    let dashboard = include_str!("../../../deploy/grafana/nodedock.json");
    let mut found = Vec::new();
    find(&serde_json::from_str(dashboard).expect("JSON"), &mut found);
    let concrete = |query: String| {
        query
            .replace("$__rate_interval", "1m")
            .replace("$node", "node-1")
    };
    found.into_iter().map(concrete).collect()
}

/// What an expression gives of metrics in files, each series as `{"labels":…,"value":…}`.
async fn query(prometheus: &Path, files: &[&Path], expression: &str) -> Vec<Value> {
    let mut args = vec!["query"];
    args.extend(files.iter().map(|file| file.to_str().expect("UTF-8")));
    args.push(expression);
    let found = lines(prometheus, &args).await;
    let value = |line: &String| serde_json::from_str(line).expect("JSON");
    found.iter().map(value).collect()
}

#[tokio::test]
async fn promtool_finds_no_problem_in_metrics() {
    let Some(prometheus) = or_skip("metrics checked by promtool", programs::prometheus()) else {
        return;
    };
    let daemon = Daemon::with_gpus(Options::default()).await;
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    let text = daemon.admin("GET", "/metrics").await.body;
    let good = daemon.write("metrics.txt", &text);
    let check = async |file: &Path| {
        let args = ["check", file.to_str().expect("UTF-8")];
        lines(&prometheus, &args).await
    };
    assert_eq!(check(&good).await, [""; 0]);
    let bad = text.replace("nodedock_claim_wait_seconds", "nodedock_claim_wait_minutes");
    let bad = check(&daemon.write("bad.txt", bad)).await;
    assert!(
        bad.iter()
            .any(|line| line.starts_with("nodedock_claim_wait_minutes ")),
        "{bad:?}"
    );
}

#[tokio::test]
async fn exporter_figures_join_pods_by_uuid() {
    let Some(prometheus) = or_skip("metrics queried with Prometheus", programs::prometheus())
    else {
        return;
    };
    let daemon = Daemon::with_gpus(Options::default()).await;
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    let own = daemon.write("own.txt", daemon.admin("GET", "/metrics").await.body);
    let info = query(&prometheus, &[&own], "nodedock_device_info{pod=\"one\"}").await;
    let [info] = &info[..] else {
        panic!("one device is prepared: {info:#?}")
    };
    let uuid = info["labels"]["uuid"].as_str().unwrap_or_default();
    assert!(!uuid.is_empty(), "{info:#}");

    let exporter = daemon.write("exporter.txt", exporter(uuid));
    let joined = query(&prometheus, &[&own, &exporter], &query_of_page()).await;
    let [joined] = &joined[..] else {
        panic!("one device has a pod: {joined:#?}")
    };
    assert_eq!(joined["value"], "87");
    for label in ["namespace", "pod", "container", "claim", "device", "uuid"] {
        assert_eq!(joined["labels"][label], info["labels"][label], "{label}");
    }

    // Two containers, each with the figure of the device.
    let series = |container: &str| {
        format!("nodedock_device_info{{pod=\"two\",container=\"{container}\",uuid=\"{uuid}\"}} 1\n")
    };
    let shared = format!(
        "# HELP nodedock_device_info Device\n# TYPE nodedock_device_info gauge\n{}{}# EOF\n",
        series("main"),
        series("side")
    );
    let shared = daemon.write("shared.txt", shared);
    let found = query(&prometheus, &[&shared, &exporter], &query_of_page()).await;
    let values: Vec<_> = found.iter().map(|series| &series["value"]).collect();
    assert_eq!(values, ["87", "87"]);
    let whole = format!("sum (max by (namespace, pod, uuid) ({}))", query_of_page());
    let whole = query(&prometheus, &[&shared, &exporter], &whole).await;
    assert_eq!(whole, [json!({ "labels": {}, "value": "87" })]);

    let queries = queries_of_dashboard();
    let of_pods = queries.iter().filter(|query| query.contains("device_info"));
    for expression in of_pods.clone() {
        let found = query(&prometheus, &[&own], expression).await;
        let labels = json!({ "namespace": info["labels"]["namespace"], "pod": "one", "driver": MOCK_GPU_NAME });
        assert_eq!(found, [json!({ "labels": labels, "value": "1" })]);
    }
    assert_eq!(of_pods.count(), 1);
    // Each is one that the engine evaluates.
    for expression in &queries {
        query(&prometheus, &[&own, &exporter], expression).await;
    }
}

#[tokio::test]
async fn prometheus_parser_finds_every_family() {
    let Some(python) = or_skip(
        "metrics read by the parser of Prometheus",
        programs::python_with("prometheus_client", "prometheus-client"),
    ) else {
        return;
    };
    let daemon = Daemon::with_gpus(Options::default()).await;
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    let answer = daemon.admin("GET", "/metrics").await;
    let ours = daemon.metrics().await.families;
    let file = daemon.write("metrics.txt", &answer.body);
    let script = programs::sources("python").join("read_metrics.py");
    let args = [
        script.to_str().expect("UTF-8"),
        file.to_str().expect("UTF-8"),
    ];
    let read = lines(&python, &args).await;
    let families: Vec<_> = ours
        .iter()
        .map(|ours| format!("{} {} ", ours.kind, ours.name))
        .collect();
    assert_eq!(read.len(), families.len(), "{read:?}");
    for (read, family) in read.iter().zip(&families) {
        assert!(read.starts_with(family.as_str()), "{read} is not {family}");
    }
}
