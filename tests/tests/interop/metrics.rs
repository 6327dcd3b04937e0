//! The daemon's metrics, read by Prometheus' own parser.

use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::machine::or_skip;
use nodedock_tests::{Daemon, Options};

use crate::{lines, programs};

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
