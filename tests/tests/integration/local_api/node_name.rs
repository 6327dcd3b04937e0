//! The node's name outlives that of its host, and a node is renamed as a whole or not at all.

use nodedock_tests::drivers::MOCK_GPU_FILE;
use nodedock_tests::{Daemon, Options};
use serde_json::Value;

use super::{api, create, machine_with};

const VARIABLE: &str = "NODEDOCK_NODE_NAME";

fn named(name: &str) -> Options {
    Options::default().flag("--local-api").env(VARIABLE, name)
}

/// The daemon takes the name from its host.
fn by_host(daemon: &mut Daemon) {
    *daemon.options() = Options::default().flag("--local-api");
}

async fn nodes_of_slices(daemon: &Daemon) -> Vec<String> {
    let slices = api(daemon).await.slices().await.unwrap();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    slices
        .iter()
        .flat_map(|slice| {
            [
                text(&slice["spec"]["nodeName"]),
                text(&slice["spec"]["pool"]["name"]),
            ]
        })
        .collect()
}

/// Waits until there are slices again.
async fn published(daemon: &Daemon) -> Vec<String> {
    daemon.until_serving(MOCK_GPU_FILE).await;
    loop {
        let found = nodes_of_slices(daemon).await;
        if !found.is_empty() {
            return found;
        }
        tokio::task::yield_now().await;
    }
}

/// The label of the Node object has room for 63 bytes, and so the daemon did not start; pools of the node were in no slice.
#[tokio::test]
async fn longest_node_name_has_claims() {
    let name = "n".repeat(253);
    let mut daemon = machine_with(named(&name)).await;
    let device = create(&daemon, "one", "{deviceClassName: gpu}").await;
    assert_eq!(device, ["gpu-0"]);
    let slices = published(&daemon).await;
    assert_eq!(slices[0], name);
    assert!(
        slices[1].len() < 70 && slices[1].ends_with("/gpus"),
        "{slices:?}"
    );
    let prepare = ["prepare", "--pod", "web", "--claim", "one"];
    let before = daemon.cli(&prepare).await.done();
    daemon.crash().await;
    assert_eq!(daemon.cli(&prepare).await.done(), before);
    // The claim is answered from the checkpoint, before its driver serves.
    daemon.until_serving(MOCK_GPU_FILE).await;
    for device in ["gpus/gpu-0".to_owned(), format!("{}/gpu-0", slices[1])] {
        daemon
            .cli(&["get", "devices", &device])
            .await
            .done_with(&["gpu-0", "default/one"]);
    }
    daemon.cli(&["unprepare", "default/web"]).await.done();
    daemon.cli(&["claim", "delete", "one"]).await.done();
}

/// A laptop got another host name from its network: every later program picked the device that was held under the old name, and failed.
#[tokio::test]
async fn renamed_host_keeps_node_name() {
    let mut daemon = machine_with(named("before")).await;
    assert_eq!(
        create(&daemon, "one", "{deviceClassName: gpu}").await,
        ["gpu-0"]
    );
    let prepare = ["prepare", "--pod", "web", "--claim", "one"];
    let before = daemon.cli(&prepare).await.done();
    let host = {
        let uname = rustix::system::uname();
        uname.nodename().to_string_lossy().to_lowercase()
    };
    by_host(&mut daemon);
    daemon.crash().await;
    let node = daemon.cli(&["get", "node"]).await;
    node.done_with(&[
        "before",
        "node-name-kept",
        "this node keeps the name \"before\"",
        "set nodeName to before",
        &host,
    ]);
    assert_eq!(published(&daemon).await, ["before", "before/gpus"]);
    assert_eq!(daemon.cli(&prepare).await.done(), before);
    // The next claim has another device.
    assert_eq!(
        create(&daemon, "two", "{deviceClassName: gpu}").await,
        ["gpu-1"]
    );
    daemon
        .cli(&["prepare", "--pod", "other", "--claim", "two"])
        .await
        .done();
    // Who sets the name has no condition.
    daemon.options().set_env(VARIABLE, "before");
    daemon.restart().await;
    daemon.until_conditions(&[]).await;
}

#[tokio::test]
async fn only_empty_nodes_are_renamed() {
    let mut daemon = machine_with(named("before")).await;
    create(&daemon, "one", "{deviceClassName: gpu}").await;
    daemon
        .cli(&["prepare", "--pod", "web", "--claim", "one"])
        .await
        .done();
    assert!(daemon.terminate().await.success());
    let refused = [
        "this node is named \"before\"",
        "renamed to \"after\"",
        "default/one",
        "--node-name before",
        "nodedock unprepare",
    ];
    for args in [
        vec!["run", "--local-api", "--node-name", "after"],
        vec!["run", "--node-name", "after"],
    ] {
        daemon
            .run_node_program(&args)
            .await
            .failed_with(1, &refused);
    }
    daemon.run().await;
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.cli(&["unprepare", "default/web"]).await.done();
    // Allocated, and not prepared.
    assert!(daemon.terminate().await.success());
    daemon
        .run_node_program(&["run", "--local-api", "--node-name", "after"])
        .await
        .failed_with(1, &refused);
    daemon.run().await;
    daemon.cli(&["claim", "delete", "one"]).await.done();
    // Renamed without the local API, it is renamed for the next start with it.
    assert!(daemon.terminate().await.success());
    *daemon.options() = Options::default().env(VARIABLE, "after");
    daemon.run().await;
    assert_eq!(daemon.node().await.name, "after");
    *daemon.options() = named("after");
    daemon.restart().await;
    assert_eq!(published(&daemon).await, ["after", "after/gpus"]);
    assert!(daemon.terminate().await.success());
    let dump = daemon
        .cli(&["checkpoint", "dump", "-o", "json"])
        .await
        .done();
    let mut dump: Value = serde_json::from_str(&dump).unwrap();
    let former = dump["node"].as_object_mut().unwrap().remove("former");
    assert_eq!(former.unwrap()[0]["name"], "before");
    let dump = dump.to_string();
    assert!(dump.contains("after") && !dump.contains("before"), "{dump}");
    daemon.run().await;
    // Twice, and back.
    for name in ["third", "before"] {
        *daemon.options() = named(name);
        daemon.restart().await;
        assert_eq!(
            published(&daemon).await,
            [name.to_owned(), format!("{name}/gpus")]
        );
        daemon.until_conditions(&[]).await;
    }
    assert_eq!(
        create(&daemon, "one", "{deviceClassName: gpu}").await,
        ["gpu-0"]
    );
    daemon
        .cli(&["prepare", "--pod", "web", "--claim", "one"])
        .await
        .done();
}
