//! What the rest of a cluster does: nodes, pods, the scheduler, the kubelet's wiping of slices.

use serde_json::{Value, json};

use super::ApiServer;
use super::state::{Key, State};
use super::writes::now;

/// A pod to be put on a node.
#[derive(Clone, Debug)]
pub struct Pod {
    namespace: String,
    name: String,
    node: String,
    claims: Vec<Value>,
    statuses: Vec<Value>,
    uid: Option<String>,
}

impl Pod {
    pub fn new(namespace: &str, name: &str, node: &str) -> Self {
        let (claims, statuses) = (vec![], vec![]);
        let (namespace, name, node) = (namespace.to_owned(), name.to_owned(), node.to_owned());
        Self { namespace, name, node, claims, statuses, uid: None }
    }

    /// With a claim of its namespace, under the name that its containers use.
    pub fn claim(mut self, pod_claim: &str, claim: &str) -> Self {
        self.claims.push(json!({ "name": pod_claim, "resourceClaimName": claim }));
        self
    }

    /// With a claim that was made from a template for this pod.
    pub fn template(mut self, pod_claim: &str, template: &str, claim: &str) -> Self {
        self.claims.push(json!({ "name": pod_claim, "resourceClaimTemplateName": template }));
        self.statuses.push(json!({ "name": pod_claim, "resourceClaimName": claim }));
        self
    }

    /// With a UID of the test's choice.
    pub fn uid(mut self, uid: &str) -> Self {
        self.uid = Some(uid.to_owned());
        self
    }
}

/// A claim as the scheduler leaves it: allocated, reserved, protected from deletion.
#[derive(Clone, Debug)]
pub struct Allocated {
    namespace: String,
    name: String,
    uid: Option<String>,
    node: Option<String>,
    results: Vec<Value>,
    config: Vec<Value>,
    reserved: Vec<Value>,
    owner: Option<(String, String)>,
    annotations: Value,
    spaced: bool,
}

impl Allocated {
    pub fn new(namespace: &str, name: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: None,
            node: None,
            results: vec![],
            config: vec![],
            reserved: vec![],
            owner: None,
            annotations: Value::Null,
            spaced: false,
        }
    }

    /// With a UID of the test's choice.
    pub fn uid(mut self, uid: &str) -> Self {
        self.uid = Some(uid.to_owned());
        self
    }

    /// For devices of one node.
    pub fn node(mut self, node: &str) -> Self {
        self.node = Some(node.to_owned());
        self
    }

    pub fn device(self, request: &str, driver: &str, pool: &str, device: &str) -> Self {
        self.result(json!({ "request": request, "driver": driver, "pool": pool, "device": device }))
    }

    /// A result with whatever a result can have: `shareID`, `consumedCapacity`, `adminAccess`.
    pub fn result(mut self, result: Value) -> Self {
        self.results.push(result);
        self
    }

    /// Opaque parameters for a driver; `source` is `FromClass` or `FromClaim`.
    pub fn config(mut self, source: &str, requests: &[&str], driver: &str, parameters: Value) -> Self {
        let opaque = json!({ "driver": driver, "parameters": parameters });
        self.config.push(json!({ "source": source, "requests": requests, "opaque": opaque }));
        self
    }

    /// For a pod, by its name and UID.
    pub fn reserved_for(mut self, pod: &str, uid: &str) -> Self {
        self.reserved.push(json!({ "resource": "pods", "name": pod, "uid": uid }));
        self
    }

    /// Made from a template for a pod, by its name and UID.
    pub fn owned_by(mut self, pod: &str, uid: &str, pod_claim: &str) -> Self {
        self.owner = Some((pod.to_owned(), uid.to_owned()));
        self.annotations = json!({ "resource.kubernetes.io/pod-claim-name": pod_claim });
        self
    }

    /// Made by a client that writes JSON with space in it: see the module `writes` for what that does to its status.
    pub fn with_spaced_parameters(mut self) -> Self {
        self.spaced = true;
        self
    }

    fn object(&self) -> Value {
        let mut requests: Vec<Value> = vec![];
        for result in &self.results {
            let name = result["request"].as_str().unwrap_or_default().split('/').next().unwrap_or_default();
            if !requests.iter().any(|request| request["name"] == name) {
                let exactly = json!({ "deviceClassName": result["driver"], "allocationMode": "ExactCount", "count": 1 });
                requests.push(json!({ "name": name, "exactly": exactly }));
            }
        }
        let of_claim = self.config.iter().filter(|config| config["source"] == "FromClaim");
        let spec: Vec<Value> = of_claim
            .map(|config| json!({ "requests": config["requests"], "opaque": config["opaque"] }))
            .collect();
        let mut object = json!({
            "kind": "ResourceClaim",
            "metadata": {
                "name": self.name, "namespace": self.namespace,
                "finalizers": ["resource.kubernetes.io/delete-protection"],
            },
            "spec": { "devices": { "requests": requests } },
            "status": { "allocation": { "devices": { "results": self.results }, "allocationTimestamp": now() } },
        });
        if !spec.is_empty() {
            object["spec"]["devices"]["config"] = spec.into();
        }
        if !self.config.is_empty() {
            object["status"]["allocation"]["devices"]["config"] = self.config.clone().into();
        }
        if let Some(node) = &self.node {
            let field = json!({ "key": "metadata.name", "operator": "In", "values": [node] });
            let selector = json!({ "nodeSelectorTerms": [{ "matchFields": [field] }] });
            object["status"]["allocation"]["nodeSelector"] = selector;
        }
        if !self.reserved.is_empty() {
            object["status"]["reservedFor"] = self.reserved.clone().into();
        }
        if let Some(uid) = &self.uid {
            object["metadata"]["uid"] = uid.as_str().into();
        }
        if let Some((name, uid)) = &self.owner {
            object["metadata"]["ownerReferences"] = json!([{
                "apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid, "controller": true,
                "blockOwnerDeletion": true,
            }]);
            object["metadata"]["annotations"] = self.annotations.clone();
        }
        object
    }
}

fn uid(object: &Value) -> String {
    object["metadata"]["uid"].as_str().unwrap_or_default().to_owned()
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

    /// Gives the pod's UID.
    pub fn add_pod(&self, pod: Pod) -> String {
        let claims: Vec<Value> = pod.claims.iter().map(|claim| json!({ "name": claim["name"] })).collect();
        let main = json!({ "name": "main", "image": "registry.k8s.io/pause:3.10", "resources": { "claims": claims } });
        let mut object = json!({
            "kind": "Pod",
            "metadata": { "name": pod.name, "namespace": pod.namespace },
            "spec": {
                "nodeName": pod.node, "containers": [main], "resourceClaims": pod.claims,
                "terminationGracePeriodSeconds": 30,
            },
            "status": { "phase": "Pending", "qosClass": "BestEffort" },
        });
        if !pod.statuses.is_empty() {
            object["status"]["resourceClaimStatuses"] = pod.statuses.into();
        }
        if let Some(uid) = pod.uid {
            object["metadata"]["uid"] = uid.into();
        }
        uid(&self.put(object))
    }

    /// Puts a claim as the scheduler leaves it; a claim of that name that is there is allocated and keeps its UID and its spec.
    /// Gives its UID.
    pub fn allocate_claim(&self, claim: Allocated) -> String {
        let mut object = claim.object();
        if let Some(old) =
            self.get("resourceclaims", &claim.namespace, &claim.name).filter(|_| claim.uid.is_none())
        {
            let status = object["status"].take();
            object = old;
            object["status"] = status;
            object["metadata"]["finalizers"] = json!(["resource.kubernetes.io/delete-protection"]);
        }
        let uid = uid(&self.put(object));
        if claim.spaced {
            self.shared.change(|state| state.spaced.insert(uid.clone()));
        }
        uid
    }

    /// As the scheduler and the claim controller do when the last pod is gone.
    pub fn deallocate_claim(&self, namespace: &str, name: &str) {
        self.edit("resourceclaims", namespace, name, |claim| {
            claim["status"] = json!({});
            claim["metadata"].as_object_mut().map(|metadata| metadata.remove("finalizers"));
        });
    }

    /// Lets one more pod use a claim.
    pub fn reserve_claim(&self, namespace: &str, name: &str, pod: &str, uid: &str) {
        self.edit("resourceclaims", namespace, name, |claim| {
            let status = &mut claim["status"];
            if !status["reservedFor"].is_array() {
                status["reservedFor"] = json!([]);
            }
            let entry = json!({ "resource": "pods", "name": pod, "uid": uid });
            if let Some(list) = status["reservedFor"].as_array_mut() {
                list.push(entry);
            }
        });
    }

    /// A kubelet that starts: it deletes all slices of its node. Gives how many there were.
    pub fn kubelet_starts(&self, node: &str) -> usize {
        self.wipe_slices(node, None)
    }

    /// A kubelet that misses a driver for half a minute: it deletes its slices.
    pub fn wipe_slices(&self, node: &str, driver: Option<&str>) -> usize {
        self.shared.change(|state: &mut State| {
            let meant = |slice: &Value| {
                slice["spec"]["nodeName"] == node
                    && driver.is_none_or(|driver| slice["spec"]["driver"] == driver)
            };
            let slices = state.entries("resourceslices").filter(|(_, slice)| meant(slice));
            let keys: Vec<Key> = slices.map(|(key, _)| key.clone()).collect();
            keys.iter().filter(|key| state.remove(key).is_some()).count()
        })
    }
}
