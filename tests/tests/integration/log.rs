//! The log: a line for each prepare and unprepare, and no text in the form in which Rust shows its types.

use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};
use nodedock_tests::{Daemon, Options};
use regex::Regex;

/// Lines of the log with a message, and all of the texts.
fn lines<'a>(log: &'a str, message: &str, texts: &[&str]) -> Vec<&'a str> {
    log.lines()
        .filter(|line| line.contains(message) && texts.iter().all(|text| line.contains(text)))
        .collect()
}

#[tokio::test]
async fn each_prepare_and_unprepare_has_line() {
    let mut daemon = Daemon::with_gpus(Options::default()).await;
    let (one, two) = (pod("one"), pod("two"));
    daemon
        .prepared(request(
            &one,
            &[&gpu_claim("a", &["gpus/gpu-0", "gpus/gpu-1"])],
        ))
        .await;
    let held = gpu_claim("b", &["gpus/gpu-0"]);
    daemon.refused(request(&two, &[&held])).await;
    daemon.unprepare(&one).await;
    daemon.terminate().await;
    let log = daemon.log();
    let facts = [
        "claim=default/a",
        "pod=default/one",
        &format!("driver={MOCK_GPU_NAME}"),
        "devices=gpus/gpu-0,gpus/gpu-1",
        "milliseconds=",
        "request=",
        "INFO",
    ];
    assert_eq!(lines(&log, "claim prepared", &facts).len(), 1, "{log}");
    assert_eq!(lines(&log, "claim unprepared", &facts).len(), 1, "{log}");
    let refusal = [
        "claim=default/b",
        "pod=default/two",
        "devices=gpus/gpu-0",
        "code=\"device-held\"",
    ];
    assert_eq!(lines(&log, "prepare failed", &refusal).len(), 1, "{log}");
}

#[tokio::test]
async fn log_has_no_debug_form() {
    let mut daemon = Daemon::with_gpus(Options::default().flag("--local-api")).await;
    daemon.drop_in("bad.wasm", "not a driver");
    let gpu = gpu_claim("a", &["gpus/gpu-0"]);
    daemon.prepared(request(&pod("one"), &[&gpu])).await;
    daemon
        .refused(request(&pod("two"), &[&gpu_claim("b", &["gpus/gpu-0"])]))
        .await;
    daemon.until_log("bad.wasm").await;
    daemon.crash().await;
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.unprepare(&pod("one")).await;
    daemon.terminate().await;
    // A struct, a variant with values, a path of a type, a list of texts.
    let debug = Regex::new(
        r#"\b[A-Z]\w*[a-z]\w* \{|\b(Some|None|Ok|Err)\(|\b\w+::[A-Z]\w*\(|=\[|=Some|=None\b|\[""#,
    )
    .unwrap();
    for line in [
        "ended counters=Counters { list: Counter { value: 0 } }",
        "source: tonic::transport::Error(Transport, hyper::Error(Io))",
        "conflicts=[\"a\"]",
        "first=Some(\"a\")",
    ] {
        assert!(debug.is_match(line), "{line}");
    }
    let log = daemon.log();
    let found: Vec<_> = log.lines().filter(|line| debug.is_match(line)).collect();
    assert!(found.is_empty(), "{found:#?}");
}
