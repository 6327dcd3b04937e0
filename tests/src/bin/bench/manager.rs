//! A kubelet's DRA manager as a process, which prepares and unprepares the claims of pods on command and says how long it took.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use nodedock_stand_ins::api_server::Allocated;
use nodedock_tests::DEADLINE;
use nodedock_tests::cluster::{Cluster, NAMESPACE, NODE};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

/// It is killed when dropped.
pub(crate) struct DraManager {
    commands: ChildStdin,
    events: Lines<BufReader<ChildStdout>>,
    registered: BTreeSet<String>,
    /// Number of the last command.
    asked: u64,
    _process: Child,
}

impl DraManager {
    /// Starts it on a kubelet's directory, as a client of the cluster's API server.
    pub(crate) fn start(program: &Path, root: &Path, cluster: &Cluster) -> Self {
        let mut command = Command::new(program);
        command
            .arg("kubelet")
            .arg("--root")
            .arg(root)
            .arg("--kubeconfig")
            .arg(cluster.kubeconfig())
            .args(["--node", NODE])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        let mut process = command.spawn().expect("start a program that was built");
        let commands = process.stdin.take().expect("it is piped");
        let events = BufReader::new(process.stdout.take().expect("it is piped")).lines();
        Self {
            commands,
            events,
            registered: BTreeSet::new(),
            asked: 0,
            _process: process,
        }
    }

    /// Waits until it has registered a driver.
    pub(crate) async fn until_registered(&mut self, driver: &str) {
        while !self.registered.contains(driver) {
            self.event(driver).await;
        }
    }

    /// Has it prepare or unprepare the claims of a pod of the API server. Returns its own time.
    pub(crate) async fn carry_out(&mut self, what: &str, pod: &str) -> Duration {
        self.asked += 1;
        let asked = json!({"id": self.asked, "do": what, "namespace": NAMESPACE, "pod": pod});
        let line = format!("{asked}\n");
        let written = self.commands.write_all(line.as_bytes()).await;
        written.expect("the manager reads its commands");
        loop {
            let event = self.event(what).await;
            if event["id"] == self.asked {
                assert_eq!(event["error"], Value::Null, "{what} {pod}");
                let took = event["us"].as_u64().expect("an answer has its time");
                return Duration::from_micros(took);
            }
        }
    }

    async fn event(&mut self, awaited: &str) -> Value {
        let line = timeout(DEADLINE, self.events.next_line()).await;
        let line = line.unwrap_or_else(|_| panic!("the manager does not answer: {awaited}"));
        let line = line.expect("read the output of a child");
        let line = line.unwrap_or_else(|| panic!("the manager has ended: {awaited}"));
        let event: Value = serde_json::from_str(&line).expect("an event is JSON");
        if let ("registered", Some(name)) = (
            event["event"].as_str().unwrap_or_default(),
            event["name"].as_str(),
        ) {
            self.registered.insert(name.to_owned());
        }
        event
    }
}

/// Puts a pod with a claim for one device into the API server, as the scheduler leaves both.
pub(crate) fn put_pod(cluster: &Cluster, name: &str, driver: &str, pool: &str, device: &str) {
    let container = json!({
        "name": "main", "image": "registry.k8s.io/pause:3.10", "resources": {"claims": [{"name": "claim"}]},
    });
    let pod = cluster.api.put(json!({
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "nodeName": NODE,
            "containers": [container],
            "resourceClaims": [{"name": "claim", "resourceClaimName": name}],
        },
        "status": {"phase": "Pending"},
    }));
    let uid = pod["metadata"]["uid"]
        .as_str()
        .expect("an object has a UID");
    let claim = Allocated::new(NAMESPACE, name)
        .node(NODE)
        .reserved_for(name, uid)
        .device("device-0", driver, pool, device);
    cluster.api.allocate_claim(claim);
}
