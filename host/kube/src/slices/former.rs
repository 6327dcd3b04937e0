//! Objects of former names of this node: the Node object, and slices that nodedock wrote.
//!
//! Given the record with the former names. Deletes the slices, as far as the API server allows it, and sets a condition for each name that has
//! something left. Writes the record without the names that have nothing left, and without those that another machine has now, whose objects
//! are never touched.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::Api;
use tokio::time::sleep;

use super::api::SliceApi;
use super::slice::{self, MANAGED_BY, NODEDOCK, is_ours};
use crate::client::{ApiError, ErrorKind, KubeClient};
use crate::facts::{NODE_READ_MAX, NODE_READ_MIN};
use nodedock_base::backoff::Backoff;
use nodedock_base::clock::rfc3339;
use nodedock_base::conditions::Conditions;
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_core::checkpoint::{Change, Checkpoint};
use nodedock_model::{FormerName, NodeRecord, Problem, ProblemCode};

/// Interval of looks at what is left.
const LOOK_PERIOD: Duration = NODE_READ_MAX;
/// Slices that a condition names.
const SLICES_NAMED_MAX: usize = 8;

/// Dependencies of the task.
pub struct FormerNames {
    pub client: KubeClient,
    /// The checkpoint's record of this node's names.
    pub record: NodeRecord,
    pub checkpoint: Checkpoint,
    pub conditions: Conditions,
}

/// Machine that has a former name now.
#[derive(Debug, PartialEq, Eq)]
enum Owner {
    /// There is no Node object of the name.
    None,
    /// The object is from the time at which this machine had the name.
    ThisMachine,
    OtherMachine,
    /// A Node object does not say which machine it is.
    Unknown,
}

/// What a look at a former name found.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    /// Nothing that concerns this machine.
    Nothing,
    Left(Left),
    /// It cannot be known yet, and nothing was done.
    Unknown,
}

/// What is left of a former name.
#[derive(Debug, Default, PartialEq, Eq)]
struct Left {
    has_node: bool,
    slices: Vec<String>,
    /// The API server's words, if it does not allow to delete a slice.
    denied: Option<String>,
}

/// Starts the task, if the node has former names; it ends when nothing of them is left, or with the tasks.
pub fn start(tasks: &Tasks, names: FormerNames) {
    if !names.record.former.is_empty() {
        // A deletion that is interrupted is found by the next start.
        tasks.spawn_until_stopped("former-node-names", names.run());
    }
}

impl FormerNames {
    async fn run(mut self) {
        let mut backoff = Backoff::new(NODE_READ_MIN, NODE_READ_MAX);
        let mut is_failing = false;
        while !self.record.former.is_empty() {
            let delay = match self.look_at_all().await {
                Ok(()) => {
                    backoff.reset();
                    is_failing = false;
                    LOOK_PERIOD
                }
                Err(error) => {
                    if !std::mem::replace(&mut is_failing, true) {
                        tracing::warn!(%error, "objects of former names of this node cannot be read, retrying");
                    }
                    backoff.delay()
                }
            };
            if !self.record.former.is_empty() {
                sleep(delay).await;
            }
        }
    }

    /// Looks at each former name, and forgets those of which nothing is left.
    async fn look_at_all(&mut self) -> Result<(), ApiError> {
        let mut kept = Vec::new();
        for former in self.record.former.clone() {
            let subject = former.name.as_str();
            match self.clean(&former).await? {
                Found::Nothing => {
                    self.conditions.clear(ProblemCode::NodeNameLeft, subject);
                    continue;
                }
                Found::Left(left) => self.conditions.set(subject, left_behind(&former, &left)),
                Found::Unknown => {}
            }
            kept.push(former);
        }
        if kept == self.record.former {
            return Ok(());
        }
        let record = NodeRecord {
            former: kept,
            ..self.record.clone()
        };
        let change = Change::PutNode(Arc::new(record.clone()));
        match self.checkpoint.commit(vec![change]).await {
            Ok(()) => self.record = record,
            // They are looked at again, here or after the next start.
            Err(error) => {
                tracing::warn!(
                    error = chain(&error),
                    "former names of this node stay in the checkpoint"
                );
            }
        }
        Ok(())
    }

    /// Deletes the slices of a former name that may be deleted, and returns what is left of it.
    async fn clean(&self, former: &FormerName) -> Result<Found, ApiError> {
        let old = self.node(former.name.as_str()).await?;
        let own = self.node(self.record.name.as_str()).await?;
        let has_node = match owner(old.as_ref(), own.as_ref()) {
            Owner::None => false,
            Owner::ThisMachine => true,
            Owner::OtherMachine => return Ok(Found::Nothing),
            Owner::Unknown => return Ok(Found::Unknown),
        };
        let api = SliceApi(self.client.clone());
        let mut left = Left {
            has_node,
            ..Left::default()
        };
        let slices = api.of_node(former.name.as_str()).await?;
        for slice in slices.iter().filter(|slice| is_ours(slice)) {
            let name = slice::name(slice);
            match api.delete(slice).await {
                Ok(()) => {
                    tracing::info!(slice = name, node = %former.name, "deleted a slice of a former name of this node");
                }
                Err(error) if error.kind == ErrorKind::NotFound => {}
                Err(error) if is_denied(&error) => {
                    left.slices.push(name.to_owned());
                    left.denied.get_or_insert_with(|| error.to_string());
                }
                Err(error) => return Err(error),
            }
        }
        if left == Left::default() {
            return Ok(Found::Nothing);
        }
        Ok(Found::Left(left))
    }

    /// Reads a Node object. `None`: there is none of this name.
    async fn node(&self, name: &str) -> Result<Option<Node>, ApiError> {
        let api = Api::<Node>::all(self.client.client());
        match api.get(name).await.map_err(ApiError::from) {
            Ok(node) => Ok(Some(node)),
            Err(error) if error.is_missing(name) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Refused by a role (403) or by an admission policy (422).
fn is_denied(error: &ApiError) -> bool {
    matches!(error.kind, ErrorKind::Forbidden | ErrorKind::Invalid)
}

/// `old`: the Node object of a former name. `own`: the one of this node. A kubelet writes the IDs of its machine into it.
fn owner(old: Option<&Node>, own: Option<&Node>) -> Owner {
    let Some(old) = old else {
        return Owner::None;
    };
    match (machine_of(old), own.and_then(machine_of)) {
        (Some(old), Some(own)) if old == own => Owner::ThisMachine,
        (Some(_), Some(_)) => Owner::OtherMachine,
        _ => Owner::Unknown,
    }
}

fn machine_of(node: &Node) -> Option<(&str, &str)> {
    let info = node.status.as_ref()?.node_info.as_ref()?;
    let ids = (info.machine_id.as_str(), info.system_uuid.as_str());
    (!ids.0.is_empty() && !ids.1.is_empty()).then_some(ids)
}

fn left_behind(former: &FormerName, left: &Left) -> Problem {
    let name = &former.name;
    let mut objects = Vec::new();
    objects.extend(left.has_node.then(|| format!("Node {name}")));
    let named = left.slices.iter().take(SLICES_NAMED_MAX);
    objects.extend(named.map(|slice| format!("ResourceSlice {slice}")));
    let more = left.slices.len().saturating_sub(SLICES_NAMED_MAX);
    objects.extend((more > 0).then(|| format!("{more} more slices")));
    let denied = left.denied.as_ref();
    let denied = denied.map(|why| format!("; the API server refuses to delete slices: {why}"));
    let advice = if left.has_node {
        format!("kubectl delete node {name} removes it and its slices")
    } else {
        format!(
            "kubectl delete resourceslices -l {MANAGED_BY}={NODEDOCK} --field-selector spec.nodeName={name}"
        )
    };
    let message = format!(
        "this node was named {name:?} until {}, and the cluster still has {}: {advice}{}",
        rfc3339(former.until_ms),
        objects.join(", "),
        denied.unwrap_or_default()
    );
    Problem::conflict(ProblemCode::NodeNameLeft, message)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::client::tests::over;
    use nodedock_core::checkpoint;
    use nodedock_model::ObjectName;
    use nodedock_stand_ins::api_server::ApiServer;

    fn node(machine_id: &str, system_uuid: &str) -> Node {
        let info = json!({
            "machineID": machine_id, "systemUUID": system_uuid, "bootID": "b", "kernelVersion": "6", "osImage": "o",
            "containerRuntimeVersion": "c", "kubeletVersion": "v1.37.2", "kubeProxyVersion": "",
            "operatingSystem": "linux", "architecture": "amd64",
        });
        serde_json::from_value(json!({ "metadata": {}, "status": { "nodeInfo": info } })).unwrap()
    }

    #[test]
    fn other_machines_node_is_not_ours() {
        let (own, clone, other) = (node("m", "u"), node("m", "u2"), node("m2", "u2"));
        assert_eq!(owner(None, Some(&own)), Owner::None);
        assert_eq!(owner(Some(&own), Some(&own)), Owner::ThisMachine);
        for old in [&clone, &other] {
            assert_eq!(owner(Some(old), Some(&own)), Owner::OtherMachine);
        }
        let nameless = node("", "");
        for old in [&nameless, &Node::default()] {
            assert_eq!(owner(Some(old), Some(&own)), Owner::Unknown);
        }
        assert_eq!(owner(Some(&own), None), Owner::Unknown);
        let both = owner(Some(&nameless), Some(&nameless));
        assert_eq!(both, Owner::Unknown, "no ID is no proof");
    }

    /// Nodes `old` and `new`, and three slices of `old`: two that nodedock wrote.
    async fn renamed() -> (Arc<ApiServer>, FormerNames, tempfile::TempDir) {
        let server = Arc::new(ApiServer::start().await);
        for name in ["old", "new"] {
            server.add_node(name);
            set_machine(&server, name, "m");
        }
        for (name, manager) in [("a", "nodedock"), ("b", "nodedock"), ("c", "other")] {
            server.put(json!({
                "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice",
                "metadata": { "name": name, "labels": { "app.kubernetes.io/managed-by": manager } },
                "spec": {
                    "driver": "gpu.example.com", "nodeName": "old", "devices": [],
                    "pool": { "name": format!("old/{name}"), "generation": 1, "resourceSliceCount": 1 },
                },
            }));
        }
        let dir = tempfile::tempdir().unwrap();
        let opened = checkpoint::open(&dir.path().join("checkpoint.db")).unwrap();
        let name = |name: &str| ObjectName::new(name).unwrap();
        let names = FormerNames {
            client: over(&server),
            record: NodeRecord::new(name("old"), 1).renamed(name("new"), 2),
            checkpoint: opened.checkpoint,
            conditions: Conditions::default(),
        };
        (server, names, dir)
    }

    fn set_machine(server: &ApiServer, name: &str, machine: &str) {
        server.edit("nodes", "", name, |node| {
            node["status"]["nodeInfo"] = json!({ "machineID": machine, "systemUUID": machine });
        });
    }

    fn slices(server: &ApiServer) -> Vec<String> {
        let slices = server.list("resourceslices").into_iter();
        let names = slices.map(|slice| slice["metadata"]["name"].as_str().unwrap().to_owned());
        names.collect()
    }

    fn conditions(names: &FormerNames) -> Vec<(String, String)> {
        let conditions = names.conditions.list().into_iter();
        let named = conditions.map(|condition| (condition.problem.code, condition.subject));
        named.collect()
    }

    #[tokio::test]
    async fn former_name_loses_own_slices() {
        let (server, mut names, dir) = renamed().await;
        names.look_at_all().await.unwrap();
        assert_eq!(slices(&server), ["c"]);
        let left = [("node-name-left".to_owned(), "old".to_owned())];
        assert_eq!(conditions(&names), left, "the Node object is there");
        assert_eq!(names.record.former.len(), 1);
        server.delete("nodes", "", "old").unwrap();
        names.look_at_all().await.unwrap();
        assert_eq!(conditions(&names), []);
        assert!(names.record.former.is_empty());
        names.checkpoint.close().await;
        let opened = checkpoint::open(&dir.path().join("checkpoint.db")).unwrap();
        assert_eq!(opened.dump.node, Some(names.record));
    }

    #[tokio::test]
    async fn slices_without_right_are_named() {
        let (server, mut names, _dir) = renamed().await;
        server.delete("nodes", "", "old").unwrap();
        server.deny("delete", "resourceslices");
        names.look_at_all().await.unwrap();
        assert_eq!(slices(&server), ["a", "b", "c"]);
        let message = names.conditions.list().remove(0).problem.message;
        assert!(
            message.contains("ResourceSlice a, ResourceSlice b"),
            "{message}"
        );
        assert!(message.contains("refuses to delete"), "{message}");
        server.allow_all();
        names.look_at_all().await.unwrap();
        assert_eq!(
            (slices(&server), conditions(&names)),
            (vec!["c".to_owned()], vec![])
        );
    }

    #[tokio::test]
    async fn name_of_other_machine_is_forgotten() {
        let (server, mut names, _dir) = renamed().await;
        set_machine(&server, "new", "");
        names.look_at_all().await.unwrap();
        assert_eq!(names.record.former.len(), 1, "it is not known yet");
        set_machine(&server, "new", "m2");
        names.look_at_all().await.unwrap();
        assert_eq!(slices(&server), ["a", "b", "c"]);
        assert!(conditions(&names).is_empty() && names.record.former.is_empty());
    }

    #[tokio::test]
    async fn unreachable_server_forgets_no_name() {
        let (server, mut names, _dir) = renamed().await;
        server.deny("get", "nodes");
        assert!(names.look_at_all().await.is_err());
        assert_eq!(slices(&server).len(), 3);
        assert_eq!(names.record.former.len(), 1);
    }

    #[test]
    fn condition_names_what_is_left() {
        let former = FormerName {
            name: ObjectName::new("old").unwrap(),
            until_ms: 1,
        };
        let slices = (0..10).map(|n| format!("s{n}")).collect();
        let left = Left {
            has_node: true,
            slices,
            denied: Some("the policy".to_owned()),
        };
        let message = left_behind(&former, &left).message;
        for part in [
            "\"old\"",
            "Node old",
            "ResourceSlice s7",
            "2 more slices",
            "kubectl delete node old",
            "the policy",
        ] {
            assert!(message.contains(part), "{part}: {message}");
        }
        assert!(!message.contains("s8"), "{message}");
        let slice = Left {
            slices: vec!["s".to_owned()],
            ..Left::default()
        };
        let message = left_behind(&former, &slice).message;
        assert!(
            message.contains("--field-selector spec.nodeName=old"),
            "{message}"
        );
        assert!(!message.contains("delete node"), "{message}");
    }
}
