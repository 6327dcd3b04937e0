//! Claims for which a scheduler waits before it binds the pod, at the real daemon.

use nodedock_stand_ins::api_server::{Allocated, State};
use nodedock_stand_ins::kubelet::ClaimRef;
use nodedock_tests::cluster::{NAMESPACE, NODE};
use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};
use serde_json::{Value, json};

use super::{GPUS, Node};

const PREPARED: &str = "nodedock.dev/prepared";
const FAILED: &str = "nodedock.dev/prepare-failed";

impl Node {
    async fn with_binding_conditions() -> Self {
        let config = format!(
            "kubernetes:\n  bindingConditions: [{{driver: {MOCK_GPU_NAME}, pool: gpus}}]\n"
        );
        Self::start_with(GPUS, |options| options.config(&config)).await
    }

    /// Acts as the scheduler at the beginning of its binding cycle.
    fn nominate(&self, pod: &str, claim: &str) {
        self.cluster.api.put(json!({
            "kind": "Pod",
            "metadata": { "name": pod, "namespace": NAMESPACE, "uid": format!("uid-{pod}") },
            "spec": {
                "containers": [{ "name": "main", "image": "registry.k8s.io/pause:3.10" }],
                "resourceClaims": [{ "name": "gpu", "resourceClaimName": claim }],
            },
            "status": { "phase": "Pending", "nominatedNodeName": NODE },
        }));
    }

    /// Acts as the scheduler in the next step. Returns the claim as a kubelet names it.
    fn allocate(
        &self,
        pod: &str,
        claim: &str,
        device: &str,
        parameters: Option<Value>,
    ) -> ClaimRef {
        let allocated = Allocated::new(NAMESPACE, claim)
            .node(NODE)
            .reserved_for(pod, &format!("uid-{pod}"));
        let mut allocated = allocated.result(json!({
            "request": "gpu", "driver": MOCK_GPU_NAME, "pool": format!("{NODE}/gpus"), "device": device,
            "bindingConditions": [PREPARED], "bindingFailureConditions": [FAILED],
        }));
        if let Some(parameters) = parameters {
            allocated = allocated.config("FromClaim", &["gpu"], MOCK_GPU_NAME, parameters);
        }
        ClaimRef::new(
            NAMESPACE,
            claim,
            &self.cluster.api.allocate_claim(allocated),
        )
    }

    /// It binds the pod: the nomination is cleared.
    fn bind(&self, pod: &str) {
        self.cluster.api.edit("pods", NAMESPACE, pod, |pod| {
            pod["spec"]["nodeName"] = NODE.into();
            pod["status"]["nominatedNodeName"] = Value::Null;
        });
    }

    /// Waits as the scheduler does. Gives the condition.
    async fn until_condition(&self, claim: &str, kind: &str) -> Value {
        let is_true = |state: &State| {
            let claim = state.object("resourceclaims", NAMESPACE, claim)?;
            let conditions = claim["status"]["devices"][0]["conditions"].as_array()?;
            conditions
                .iter()
                .find(|found| found["type"] == kind && found["status"] == "True")
                .cloned()
        };
        self.cluster
            .api
            .wait_for(&format!("{kind} of {claim}"), is_true)
            .await
    }

    /// Keys of the taints of a device that is in slices.
    fn taints(&self, device: &str) -> Vec<String> {
        let of_device = self.cluster.api.look(|state| {
            let slices = state.slices(MOCK_GPU_NAME);
            let devices = slices
                .iter()
                .flat_map(|slice| slice["spec"]["devices"].as_array().unwrap());
            devices
                .filter(|found| found["name"] == device)
                .cloned()
                .collect::<Vec<_>>()
        });
        let [found] = of_device.as_slice() else {
            panic!("{device} is in slices as {of_device:?}")
        };
        let taints = found["taints"].as_array().cloned().unwrap_or_default();
        taints
            .iter()
            .map(|taint| taint["key"].as_str().unwrap_or_default().to_owned())
            .collect()
    }
}

#[tokio::test]
async fn claim_is_prepared_before_pod_binding() {
    let node = Node::with_binding_conditions().await;
    let has_conditions = |state: &State| {
        let slices = state.slices(MOCK_GPU_NAME);
        !slices.is_empty()
            && slices.iter().all(|slice| {
                let devices = slice["spec"]["devices"].as_array().unwrap();
                devices.iter().all(|device| {
                    device["bindingConditions"] == json!([PREPARED])
                        && device["bindingFailureConditions"] == json!([FAILED])
                })
            })
    };
    node.cluster
        .api
        .wait_until("the devices have binding conditions", has_conditions)
        .await;
    node.nominate("a", "one");
    let claim = node.allocate("a", "one", "gpu-0", None);
    let condition = node.until_condition("one", PREPARED).await;
    assert_eq!(condition["reason"], "Prepared");
    let prepared = node.daemon.only_claim().await;
    assert_eq!(prepared.state, "prepared");
    node.bind("a");
    node.prepared(&claim).await;
    let history = node.daemon.cli(&["explain", "claim", "one"]).await.done();
    assert_eq!(
        history.matches("prepared by driver").count(),
        1,
        "the driver is called once: {history}"
    );
    node.unprepared(&claim).await;
    assert!(node.daemon.claims().await.is_empty() && node.daemon.cdi_files().is_empty());
    let requests = node.cluster.api.requests();
    assert!(
        !requests.iter().any(|seen| seen.code == 403),
        "the role of the deployment suffices"
    );
}

#[tokio::test]
async fn deallocated_claim_is_released_after_crash() {
    let mut node = Node::with_binding_conditions().await;
    node.nominate("a", "one");
    node.allocate("a", "one", "gpu-0", None);
    node.until_condition("one", PREPARED).await;
    // The same claim gets the device again, and with it no status.
    node.cluster.api.deallocate_claim(NAMESPACE, "one");
    node.daemon.until_no_claims().await;
    node.allocate("a", "one", "gpu-0", None);
    node.until_condition("one", PREPARED).await;
    node.daemon.kill9().await;
    node.cluster.api.delete("pods", NAMESPACE, "a");
    node.cluster.api.deallocate_claim(NAMESPACE, "one");
    node.daemon.run().await;
    node.daemon.until_serving(MOCK_GPU_FILE).await;
    node.daemon.until_no_claims().await;
    assert!(node.daemon.cdi_files().is_empty());

    // A crash between the prepare and the condition: the pod still waits.
    node.nominate("b", "two");
    node.allocate("b", "two", "gpu-1", None);
    node.until_condition("two", PREPARED).await;
    node.daemon.kill9().await;
    node.cluster
        .api
        .edit("resourceclaims", NAMESPACE, "two", |claim| {
            claim["status"]["devices"] = Value::Null;
        });
    node.daemon.run().await;
    node.until_condition("two", PREPARED).await;
    assert_eq!(node.daemon.only_claim().await.state, "prepared");
}

#[tokio::test]
async fn refused_claim_gets_condition_and_event() {
    let node = Node::with_binding_conditions().await;
    node.cluster
        .api
        .wait_until("the devices are in slices", |state| {
            !state.slices(MOCK_GPU_NAME).is_empty()
        })
        .await;
    node.nominate("a", "one");
    let parameters = json!({ "sharing": { "strategy": "no-such-strategy" } });
    node.allocate("a", "one", "gpu-0", Some(parameters));
    let condition = node.until_condition("one", FAILED).await;
    assert!(
        !condition["message"].as_str().unwrap().is_empty(),
        "{condition}"
    );
    let is_event = |state: &State| {
        state.objects("events").iter().any(|event| {
            event["involvedObject"]["kind"] == "Pod" && event["involvedObject"]["name"] == "a"
        })
    };
    node.cluster
        .api
        .wait_until("an event on the pod", is_event)
        .await;
    node.daemon.until_no_claims().await;
    assert!(
        node.taints("gpu-0").is_empty(),
        "another device would refuse it as well"
    );
    // The user mends the claim, and the scheduler allocates it again.
    node.cluster.api.delete("resourceclaims", NAMESPACE, "one");
    node.allocate("a", "one", "gpu-0", None);
    node.until_condition("one", PREPARED).await;
}
