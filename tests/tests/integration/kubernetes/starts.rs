//! Starts on a Kubernetes node that cannot succeed say why in a line; what heals is waited for.

use nodedock_stand_ins::api_server::State;
use nodedock_tests::Root;
use nodedock_tests::cluster::{Cluster, NODE, make_kubelet_root, options_of};
use serde_json::json;

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

/// A renamed node left its slices and its Node object behind, and said nothing of them.
#[tokio::test]
async fn former_node_name_is_cleaned_up() {
    let cluster = Cluster::start().await;
    let mut daemon = cluster.daemon().await;
    daemon.until_conditions(&[]).await;
    daemon.terminate().await;
    cluster.api.add_node("renamed");
    for node in [NODE, "renamed"] {
        cluster.api.edit("nodes", "", node, |node| {
            node["status"]["nodeInfo"] = json!({ "machineID": "m", "systemUUID": "u" });
        });
    }
    cluster.api.put(json!({
        "kind": "ResourceSlice",
        "metadata": { "name": "old", "labels": { "app.kubernetes.io/managed-by": "nodedock" } },
        "spec": {
            "driver": "gpu.example.com", "nodeName": NODE, "devices": [],
            "pool": { "name": format!("{NODE}/gpus"), "generation": 1, "resourceSliceCount": 1 },
        },
    }));
    *daemon.options() = options_of("renamed", &cluster.kubeconfig());
    daemon.run().await;
    let is_gone = |state: &State| state.slices("gpu.example.com").is_empty();
    let api = &cluster.api;
    api.wait_until("the slice of the former name is gone", is_gone)
        .await;
    daemon.until_conditions(&["node-name-left"]).await;
    let node = daemon.cli(&["get", "node"]).await;
    node.done_with(&["node-name-left", NODE, "kubectl delete node node-1"]);

    // Looked at again at each start.
    cluster.api.delete("nodes", "", NODE);
    daemon.restart().await;
    daemon.until_conditions(&[]).await;
    let checkpoint = daemon.cli(&["checkpoint", "dump", "-o", "json"]).await;
    assert_eq!(checkpoint.json()["node"]["name"], "renamed");
}
