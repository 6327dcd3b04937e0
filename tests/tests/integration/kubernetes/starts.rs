//! Starts on a Kubernetes node that cannot succeed say why in a line; what heals is waited for.

use nodedock_tests::Root;
use nodedock_tests::cluster::{Cluster, NODE, make_kubelet_root};

#[tokio::test]
async fn invalid_start_options_name_the_fix() {
    let root = Root::new();
    make_kubelet_root(&root);
    let config = root.write("kubeconfig", "nonsense: [");
    let kubeconfig = config.to_str().unwrap();
    let long = format!("/{}", "x".repeat(80));
    let cases: [(&[&str], i32, &[&str]); 7] = [
        (&["--kubernetes"], 2, &["--node-name"]),
        (
            &["--kubernetes", "--node-name", "Node_1"],
            2,
            &["\"Node_1\"", "--node-name"],
        ),
        (
            &["--kubelet-root", "/k"],
            2,
            &["--kubelet-root", "--kubernetes"],
        ),
        (
            &["--kubernetes", "--node-name", NODE, "--kubelet-root", &long],
            2,
            &["107", "--kubelet-root"],
        ),
        (
            &["--kubernetes", "--node-name", NODE, "--pod", "me"],
            2,
            &["\"me\"", "NAMESPACE/NAME"],
        ),
        (
            &[
                "--kubernetes",
                "--node-name",
                NODE,
                "--kubeconfig",
                "/nowhere",
            ],
            1,
            &["/nowhere"],
        ),
        (
            &[
                "--kubernetes",
                "--node-name",
                NODE,
                "--kubeconfig",
                kubeconfig,
            ],
            1,
            &[kubeconfig],
        ),
    ];
    for (args, code, parts) in cases {
        let said = root
            .run_node_program(&[&["run"], args].concat())
            .await
            .failed(code);
        for part in parts {
            assert!(said.contains(part), "{part} in {said}");
        }
        assert!(
            said.lines()
                .filter(|line| line.starts_with("error:"))
                .count()
                == 1,
            "{said}"
        );
    }
}

#[tokio::test]
async fn daemon_starts_without_api_server() {
    let cluster = Cluster::start().await;
    cluster.api.stop().await;
    let daemon = cluster.daemon().await;
    daemon.run_node_program(&["probe", "live"]).await.done();
    let said = daemon.run_node_program(&["probe", "ready"]).await;
    assert_eq!(said.code, Some(1));
    assert!(said.stdout.contains("API server"), "{said:?}");
    daemon
        .until_conditions(&["api-server-unreachable", "node-object-unreadable"])
        .await;
    cluster.api.start_again().await;
    daemon.until_conditions(&[]).await;
    daemon.run_node_program(&["probe", "ready"]).await.done();
}

#[tokio::test]
async fn missing_node_object_is_awaited() {
    let cluster = Cluster::start().await;
    cluster.api.delete("nodes", "", NODE);
    let daemon = cluster.daemon().await;
    daemon.until_conditions(&["node-object-missing"]).await;
    cluster.api.add_node(NODE);
    daemon.until_conditions(&[]).await;
}
