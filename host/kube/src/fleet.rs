//! Many nodes with one client: one watch of all slices and one of all nodes, in place of those of each node.

use std::collections::{BTreeMap, BTreeSet};

use futures::{Stream, StreamExt, stream};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{DynamicObject, PostParams};
use kube::core::ApiResource;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{Config, Event, watcher};
use serde_json::json;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_stream::wrappers::UnboundedReceiverStream;

use crate::client::{ApiError, DraResource, KubeClient};
use crate::facts::NodeFacts;
use crate::slices::SliceEvents;
use nodedock_base::backoff::Backoff;
use nodedock_base::error::chain;
use nodedock_model::{ObjectName, Uid, limit};

/// Nodes that are created at the same time.
const CREATIONS: usize = 8;
/// Label of the nodes that are created here.
const SIMULATED: &str = "nodedock.dev/simulated";

type Events = mpsc::UnboundedSender<Result<Event<DynamicObject>, ApiError>>;

/// Returns the events of each node's slices, and the work that passes them on.
pub fn watch_slices_by_node(
    client: &KubeClient,
    nodes: Vec<ObjectName>,
) -> (
    BTreeMap<ObjectName, SliceEvents>,
    impl Future<Output = ()> + Send + use<>,
) {
    let (mut receivers, mut senders) = (BTreeMap::new(), BTreeMap::new());
    for node in nodes {
        let (sender, receiver) = mpsc::unbounded_channel();
        receivers.insert(node.clone(), UnboundedReceiverStream::new(receiver).boxed());
        senders.insert(node, sender);
    }
    let all = client.watch(
        "all resource slices",
        DraResource::Slices,
        None,
        String::new(),
        None,
    );
    (receivers, distribute(all, senders))
}

async fn distribute(
    all: impl Stream<Item = Result<Event<DynamicObject>, ApiError>>,
    nodes: BTreeMap<ObjectName, Events>,
) {
    let mut all = std::pin::pin!(all);
    while let Some(event) = all.next().await {
        // The watch has logged an error, and lists again.
        let Ok(event) = event else { continue };
        // A node that is not there any more needs no events.
        let slice = match &event {
            Event::Init => {
                nodes
                    .values()
                    .for_each(|node| drop(node.send(Ok(Event::Init))));
                continue;
            }
            Event::InitDone => {
                nodes
                    .values()
                    .for_each(|node| drop(node.send(Ok(Event::InitDone))));
                continue;
            }
            Event::Apply(slice) | Event::InitApply(slice) | Event::Delete(slice) => slice,
        };
        let name = slice
            .data
            .pointer("/spec/nodeName")
            .and_then(serde_json::Value::as_str);
        if let Some(node) = name.and_then(|name| nodes.get(name)) {
            drop(node.send(Ok(event)));
        }
    }
}

/// Publishes for each node whether it exists, and its UID. Creates those that do not exist at the start, if it `creates` any.
pub async fn watch_nodes(
    client: KubeClient,
    nodes: BTreeMap<ObjectName, watch::Sender<Option<NodeFacts>>>,
    creates: bool,
) {
    let (sender, missing) = oneshot::channel();
    let create = async {
        if let Ok(missing) = missing.await {
            create(&client, missing).await;
        }
    };
    tokio::join!(observe(&client, &nodes, creates.then_some(sender)), create);
}

/// `missing` gets the nodes that do not exist at the start.
async fn observe(
    client: &KubeClient,
    nodes: &BTreeMap<ObjectName, watch::Sender<Option<NodeFacts>>>,
    mut missing: Option<oneshot::Sender<BTreeSet<ObjectName>>>,
) {
    let api: Api<DynamicObject> = Api::all_with(client.client(), &ApiResource::erase::<Node>(&()));
    let mut events = std::pin::pin!(watcher(api, Config::default()).default_backoff());
    let mut listed = BTreeSet::new();
    while let Some(event) = events.next().await {
        match event {
            Err(error) => tracing::warn!(
                error = chain(&error),
                "the nodes cannot be watched, retrying"
            ),
            Ok(Event::Init) => listed.clear(),
            Ok(Event::InitApply(node)) => listed.extend(exists(nodes, &node)),
            Ok(Event::Apply(node)) => drop(exists(nodes, &node)),
            Ok(Event::Delete(node)) => {
                let sender = node
                    .metadata
                    .name
                    .as_deref()
                    .and_then(|name| nodes.get(name));
                sender
                    .into_iter()
                    .for_each(|sender| drop(sender.send_replace(None)));
            }
            Ok(Event::InitDone) => {
                let absent: BTreeSet<_> = nodes
                    .keys()
                    .filter(|name| !listed.contains(*name))
                    .cloned()
                    .collect();
                absent
                    .iter()
                    .for_each(|name| drop(nodes[name].send_replace(None)));
                match missing.take() {
                    // The receiver waits for it.
                    Some(missing) => drop(missing.send(absent)),
                    None if absent.is_empty() => {}
                    None => tracing::warn!(
                        count = absent.len(),
                        "the API server does not have all nodes"
                    ),
                }
            }
        }
    }
}

fn exists(
    nodes: &BTreeMap<ObjectName, watch::Sender<Option<NodeFacts>>>,
    node: &DynamicObject,
) -> Option<ObjectName> {
    let (name, sender) = nodes.get_key_value(node.metadata.name.as_deref()?)?;
    let uid = Uid::new(node.metadata.uid.clone()?).ok()?;
    let facts = Some(NodeFacts {
        name: name.clone(),
        uid,
    });
    sender.send_if_modified(|known| std::mem::replace(known, facts.clone()) != facts);
    Some(name.clone())
}

/// Creates nodes, and tries again what fails.
async fn create(client: &KubeClient, mut missing: BTreeSet<ObjectName>) {
    let api: Api<Node> = Api::all(client.client());
    let mut backoff = Backoff::new(limit::KUBE_RETRY_MIN, limit::KUBE_RETRY_MAX);
    while !missing.is_empty() {
        let outcomes = stream::iter(std::mem::take(&mut missing))
            .map(|name| {
                let api = api.clone();
                async move {
                    let created = api.create(&PostParams::default(), &object(&name)).await;
                    (name, created)
                }
            })
            .buffer_unordered(CREATIONS);
        let mut last = None;
        for (name, created) in outcomes.collect::<Vec<_>>().await {
            match created {
                Ok(_) => {}
                Err(kube::Error::Api(status)) if status.is_already_exists() => {}
                Err(error) => {
                    missing.insert(name);
                    last = Some(error);
                }
            }
        }
        if let Some(error) = last {
            tracing::warn!(
                count = missing.len(),
                error = chain(&error),
                "nodes are not created, retrying"
            );
            tokio::time::sleep(backoff.delay()).await;
        }
    }
}

/// A node as the documentation of KWOK has it: its controller reports the node ready, and runs the pods there in name only. The taint
/// keeps other pods away.
fn object(name: &ObjectName) -> Node {
    let size = json!({ "cpu": "32", "memory": "256Gi", "pods": "110" });
    let node = json!({
        "metadata": {
            "name": name,
            "annotations": { "kwok.x-k8s.io/node": "fake", "node.alpha.kubernetes.io/ttl": "0" },
            "labels": {
                SIMULATED: "true",
                "type": "kwok",
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
            },
        },
        "spec": { "taints": [{ "key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule" }] },
        "status": { "allocatable": size, "capacity": size },
    });
    serde_json::from_value(node).expect("a node of the API")
}
