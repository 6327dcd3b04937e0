//! Actions of the rest of a cluster: nodes, pods, the scheduler, the kubelet's wiping of slices.

use nodedock_apiserver::ObjectKey;
use serde_json::{Value, json};

use super::ApiServer;
use super::objects::now;
use super::state::named;

/// A pod to be put on a node.
#[derive(Clone, Debug)]
pub struct Pod(Value);

/// Adds to a list of an object that may not have it yet.
fn push(list: &mut Value, item: Value) {
    if list.is_null() {
        *list = json!([]);
    }
    list.as_array_mut().expect("it is a list").push(item);
}

impl Pod {
    pub fn new(namespace: &str, name: &str, node: &str) -> Self {
        let main = json!({ "name": "main", "image": "registry.k8s.io/pause:3.10" });
        Self(json!({
            "kind": "Pod",
            "metadata": { "name": name, "namespace": namespace },
            "spec": { "nodeName": node, "containers": [main], "terminationGracePeriodSeconds": 30 },
            "status": { "phase": "Pending", "qosClass": "BestEffort" },
        }))
    }
}

/// A claim as the scheduler leaves it: allocated, reserved, protected from deletion.
#[derive(Clone, Debug)]
pub struct Allocated {
    claim: Value,
    spaced: bool,
}

impl Allocated {
    pub fn new(namespace: &str, name: &str) -> Self {
        let finalizers = ["resource.kubernetes.io/delete-protection"];
        let claim = json!({
            "kind": "ResourceClaim",
            "metadata": { "name": name, "namespace": namespace, "finalizers": finalizers },
            "spec": { "devices": { "requests": [] } },
            "status": { "allocation": { "devices": { "results": [] }, "allocationTimestamp": now() } },
        });
        Self {
            claim,
            spaced: false,
        }
    }

    /// Sets the UID.
    pub fn uid(mut self, uid: &str) -> Self {
        self.claim["metadata"]["uid"] = uid.into();
        self
    }

    /// Restricts the allocation to devices of one node.
    pub fn node(mut self, node: &str) -> Self {
        let field = json!({ "key": "metadata.name", "operator": "In", "values": [node] });
        let selector = json!({ "nodeSelectorTerms": [{ "matchFields": [field] }] });
        self.claim["status"]["allocation"]["nodeSelector"] = selector;
        self
    }

    pub fn device(self, request: &str, driver: &str, pool: &str, device: &str) -> Self {
        self.result(json!({ "request": request, "driver": driver, "pool": pool, "device": device }))
    }

    /// Adds a result with any of its fields: `shareID`, `consumedCapacity`, `adminAccess`.
    pub fn result(mut self, result: Value) -> Self {
        let name = result["request"]
            .as_str()
            .unwrap_or_default()
            .split('/')
            .next()
            .unwrap_or_default();
        let requests = &mut self.claim["spec"]["devices"]["requests"];
        if !requests
            .as_array()
            .into_iter()
            .flatten()
            .any(|request| request["name"] == name)
        {
            let exactly = json!({ "deviceClassName": result["driver"], "allocationMode": "ExactCount", "count": 1 });
            push(requests, json!({ "name": name, "exactly": exactly }));
        }
        push(
            &mut self.claim["status"]["allocation"]["devices"]["results"],
            result,
        );
        self
    }

    /// Opaque parameters for a driver; `source` is `FromClass` or `FromClaim`.
    pub fn config(
        mut self,
        source: &str,
        requests: &[&str],
        driver: &str,
        parameters: Value,
    ) -> Self {
        let opaque = json!({ "driver": driver, "parameters": parameters });
        if source == "FromClaim" {
            let config = json!({ "requests": requests, "opaque": opaque });
            push(&mut self.claim["spec"]["devices"]["config"], config);
        }
        let config = json!({ "source": source, "requests": requests, "opaque": opaque });
        push(
            &mut self.claim["status"]["allocation"]["devices"]["config"],
            config,
        );
        self
    }

    /// Reserves the claim for a pod, by its name and UID.
    pub fn reserved_for(mut self, pod: &str, uid: &str) -> Self {
        push(
            &mut self.claim["status"]["reservedFor"],
            json!({ "resource": "pods", "name": pod, "uid": uid }),
        );
        self
    }

    /// Reserves the claim for the pods of a PodGroup, by its name and UID.
    pub fn reserved_for_group(mut self, group: &str, uid: &str) -> Self {
        push(
            &mut self.claim["status"]["reservedFor"],
            json!({ "apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": group, "uid": uid }),
        );
        self
    }

    /// Stores the claim as created by a client that writes JSON with spaces. An API server stores the opaque parameters of a claim byte by
    /// byte, and compares them with the same parameters as it writes them itself, without spaces: every later JSON write of the claim's
    /// status, of any kind, looks like a change of `status.allocation` and is refused. A recorded apply was refused for this reason.
    pub fn with_spaced_parameters(mut self) -> Self {
        self.spaced = true;
        self
    }
}

fn uid(object: &Value) -> String {
    object["metadata"]["uid"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

impl ApiServer {
    /// Gives the node's UID.
    pub fn add_node(&self, name: &str) -> String {
        uid(&self.put(json!({
            "kind": "Node",
            "metadata": { "name": name, "labels": { "kubernetes.io/hostname": name } },
            "spec": {},
            "status": { "conditions": [{ "type": "Ready", "status": "True", "reason": "KubeletReady" }] },
        })))
    }

    /// Writes the version and the allocatable resources of a kubelet into its Node object.
    pub fn report_kubelet(&self, node: &str, version: &str, allocatable: Value) {
        self.edit("nodes", "", node, |node| {
            let info = [
                "architecture",
                "bootID",
                "containerRuntimeVersion",
                "kernelVersion",
                "machineID",
                "osImage",
            ];
            let mut info: Value = info
                .into_iter()
                .map(|field| (field.to_owned(), json!("x")))
                .collect();
            info["kubeletVersion"] = version.into();
            node["status"]["nodeInfo"] = info;
            node["status"]["allocatable"] = allocatable;
        });
    }

    /// Gives the pod's UID.
    pub fn add_pod(&self, pod: Pod) -> String {
        uid(&self.put(pod.0))
    }

    /// Puts a claim as the scheduler leaves it; a claim of that name that is there is allocated and keeps its UID and its spec.
    /// Gives its UID.
    pub fn allocate_claim(&self, claim: Allocated) -> String {
        let mut object = claim.claim;
        let metadata = &object["metadata"];
        let name = |field: &str| metadata[field].as_str().unwrap_or_default();
        let old = self.get("resourceclaims", name("namespace"), name("name"));
        if let Some(old) = old.filter(|_| metadata["uid"].is_null()) {
            let (finalizers, status) = (metadata["finalizers"].clone(), object["status"].take());
            object = old;
            object["status"] = status;
            object["metadata"]["finalizers"] = finalizers;
        }
        let uid = uid(&self.put(object));
        if claim.spaced {
            self.shared.space(&uid);
        }
        uid
    }

    /// Deallocates a claim as the scheduler and the claim controller do when its last pod is gone.
    pub fn deallocate_claim(&self, namespace: &str, name: &str) {
        self.edit("resourceclaims", namespace, name, |claim| {
            claim["status"] = json!({});
            claim["metadata"]
                .as_object_mut()
                .map(|metadata| metadata.remove("finalizers"));
        });
    }

    /// A kubelet that starts: it deletes all slices of its node. Gives how many there were.
    pub fn kubelet_starts(&self, node: &str) -> usize {
        self.wipe_slices(node, None)
    }

    /// A kubelet that misses a driver for half a minute: it deletes its slices.
    pub fn wipe_slices(&self, node: &str, driver: Option<&str>) -> usize {
        self.shared.server.change_unstored(|draft| {
            let meant = |slice: &Value| {
                slice["spec"]["nodeName"] == node
                    && driver.is_none_or(|driver| slice["spec"]["driver"] == driver)
            };
            let slices = draft.snapshot().objects(named("resourceslices"));
            let slices = slices.filter(|(_, slice)| meant(slice));
            let keys: Vec<ObjectKey> = slices.map(|(key, _)| key.clone()).collect();
            keys.iter()
                .filter(|key| draft.remove(key).is_some())
                .count()
        })
    }
}
