//! A container gets the device that was asked for, not the one that has its old number today.

use std::path::PathBuf;

use nodedock_proto::node::v1;
use nodedock_tests::compose::{claim, pod, request};
use nodedock_tests::drivers::{
    DEVICE_NODES, DEVICE_NODES_FILE, DEVICE_NODES_NAME, Form, side_file, wasm,
};
use nodedock_tests::machine::or_skip;
use nodedock_tests::{Daemon, Root};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use serde_json::{Value, json};

/// Minors of `/dev/zero` and `/dev/full`, both of major 1: harmless to open.
const ZERO: u32 = 5;
const FULL: u32 = 7;

/// A device node of the test's own; removed when dropped.
struct Node(PathBuf);

impl Node {
    /// None: this machine does not permit it.
    fn make(minor: u32) -> Option<Self> {
        let node = Self(PathBuf::from(format!("/dev/ttyUSB{}", std::process::id())));
        or_skip("device nodes that get other numbers", node.plug(minor))?;
        Some(node)
    }

    fn plug(&self, minor: u32) -> Result<(), String> {
        let made = mknodat(
            CWD,
            &self.0,
            FileType::CharacterDevice,
            Mode::RUSR | Mode::WUSR,
            makedev(1, minor),
        );
        made.map_err(|error| format!("mknod {}: {error}", self.0.display()))
    }

    fn unplug(&self) {
        std::fs::remove_file(&self.0).unwrap();
    }

    fn install(&self, root: &Root) {
        // What the number leads to is no serial port, so the grant names the exact path.
        let path = self.0.display();
        let grant = side_file(DEVICE_NODES, "grant");
        let grant = grant.replace("deviceNodes:\n", &format!("deviceNodes:\n  - {path}\n"));
        root.drop_in("device-nodes.grant.yaml", grant);
        root.drop_in(
            "device-nodes.config.yaml",
            format!("pools: [{{name: serial, paths: ['{path}']}}]\n"),
        );
        root.drop_in(DEVICE_NODES_FILE, wasm(DEVICE_NODES, Form::Core));
    }

    /// Returns the driver's name of the device.
    fn device(&self) -> String {
        self.0.file_name().unwrap().to_string_lossy().to_lowercase()
    }

    fn request(&self) -> v1::PreparePodRequest {
        request(
            &pod("one"),
            &[&claim(
                "a",
                &[&format!("{DEVICE_NODES_NAME}/serial/{}", self.device())],
            )],
        )
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // It may be unplugged.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The minor of the claim's node in its CDI file and in its record.
async fn minors(daemon: &Daemon) -> (Value, Value) {
    let node = |edits: &Value| edits["deviceNodes"][0]["minor"].clone();
    let file = node(&daemon.only_cdi_file().spec["devices"][0]["containerEdits"]);
    let dump = daemon
        .cli(&["checkpoint", "dump", "-o", "json"])
        .await
        .json();
    let part = &dump["claims"][0]["drivers"][DEVICE_NODES_NAME]["prepared"];
    (file, node(&part["devices"][0]["access"]["edits"]))
}

fn prepares(claim: &v1::ClaimStatus) -> usize {
    claim
        .timeline
        .iter()
        .filter(|entry| entry.what == "prepared by driver")
        .count()
}

#[tokio::test]
async fn replugged_node_is_prepared_again() {
    let Some(node) = Node::make(ZERO) else { return };
    let daemon = Daemon::start().await;
    node.install(&daemon);
    daemon.until_serving(DEVICE_NODES_FILE).await;
    let first = daemon.prepared(node.request()).await;
    assert_eq!(daemon.prepared(node.request()).await, first);
    assert_eq!(
        prepares(&daemon.only_claim().await),
        1,
        "the node is what it was"
    );

    node.unplug();
    let problem = daemon.refused(node.request()).await;
    assert_eq!(problem.kind, "not-found", "{problem:?}");
    daemon.until_device("serial", &node.device(), false).await;
    node.plug(FULL).unwrap();
    daemon.until_device("serial", &node.device(), true).await;
    assert_eq!(
        daemon.prepared(node.request()).await,
        first,
        "the name is the same, and what is behind it new"
    );
    assert_eq!(minors(&daemon).await, (json!(FULL), json!(FULL)));
}
