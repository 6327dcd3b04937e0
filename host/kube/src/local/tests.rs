//! The decisions, on objects that a test writes as the server would.

mod hardware;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim, ResourceClaimTemplate};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use nodedock_allocator::allocate::{Excluded, NodeRef, NotAllocated, NotAllocatedKind};
use proptest::prelude::*;
use serde_json::{Value, json};

use nodedock_model::ObjectRef;

use super::WaitingClaim;
use super::node_claims::{NodeChanges, NodeClaim};
use super::objects::{Change, Key, ObjectEvent, key};
use super::state::{FINALIZER, LocalClaimsState, POD_CLAIM, Reservations, Step, allocation};
use nodedock_model::Hold;

/// The objects, and what the node has prepared.
struct Machine {
    state: LocalClaimsState,
    version: u64,
    claims: BTreeMap<Key, ResourceClaim>,
    pods: BTreeMap<Key, Pod>,
    node_use: NodeUse,
    reservations: Reservations,
}

/// What the node has prepared.
#[derive(Clone, Default)]
struct NodeUse {
    /// Pods of any claim.
    pods: BTreeSet<String>,
    claims: BTreeMap<String, AllocationResult>,
    holds: BTreeMap<String, Vec<Hold>>,
}

impl NodeUse {
    fn changes(&self) -> NodeChanges {
        let claims = self.claims.iter().map(|(uid, allocation)| NodeClaim {
            allocation: allocation.clone(),
            holds: self.holds.get(uid).cloned().unwrap_or_default(),
            name: name(uid),
            ..NodeClaim::default()
        });
        let claims = self.claims.keys().cloned().zip(claims.map(Some));
        let pods = NodeClaim {
            pods: self.pods.iter().cloned().collect(),
            ..NodeClaim::default()
        };
        NodeChanges {
            revision: 0,
            is_all: true,
            claims: claims
                .chain([("of-other-claims".to_owned(), Some(pods))])
                .collect(),
        }
    }
}

/// Claims that are not allocated, and why.
fn refusals(state: &LocalClaimsState) -> Vec<(Key, Arc<NotAllocated>)> {
    let refused = state.refusals();
    let refused = refused.iter();
    refused
        .map(|((.., key), why)| (key.clone(), why.clone()))
        .collect()
}

impl LocalClaimsState {
    fn allocated(
        &mut self,
        claim: &Arc<ResourceClaim>,
    ) -> Result<AllocationResult, Arc<NotAllocated>> {
        let allocation = self.begin_allocation(claim, Timestamp::UNIX_EPOCH);
        self.end_allocation(allocation.run())
    }
}

fn of<K: serde::de::DeserializeOwned>(object: Value) -> K {
    serde_json::from_value(object).unwrap()
}

fn name(name: &str) -> Key {
    ("default".to_owned(), name.to_owned())
}

fn devices(result: &AllocationResult) -> Vec<String> {
    let results = result
        .devices
        .iter()
        .flat_map(|devices| devices.results.iter().flatten());
    results
        .into_iter()
        .map(|result| result.device.clone())
        .collect()
}

impl Machine {
    fn new(devices: usize) -> Self {
        let mut machine = Self {
            state: LocalClaimsState::new(NodeRef {
                name: "n".into(),
                labels: BTreeMap::new(),
            }),
            version: 1,
            claims: BTreeMap::new(),
            pods: BTreeMap::new(),
            node_use: NodeUse::default(),
            reservations: Reservations::new(),
        };
        machine.list(devices);
        machine
    }

    /// Applies the lists of a start.
    fn list(&mut self, devices: usize) {
        let names: Vec<_> = (0..devices)
            .map(|index| json!({ "name": format!("d{index}") }))
            .collect();
        self.put_devices(&json!(names));
        let class = json!({ "metadata": { "name": "any" }, "spec": { "selectors": [] } });
        self.state.apply(Change::Slice(ObjectEvent::Only(
            BTreeSet::from([(String::new(), "s".to_owned())]),
            u64::MAX,
        )));
        self.state
            .apply(Change::Class(ObjectEvent::Is(Arc::new(of(class)))));
        self.state.apply(Change::Class(ObjectEvent::Only(
            BTreeSet::from([(String::new(), "any".to_owned())]),
            u64::MAX,
        )));
        for claim in self.claims.values() {
            self.state
                .apply(Change::Claim(ObjectEvent::Is(Arc::new(claim.clone()))));
        }
        self.state.apply(Change::Claim(ObjectEvent::Only(
            self.claims.keys().cloned().collect(),
            u64::MAX,
        )));
        self.put_template("t");
        let templates = BTreeSet::from([name("t")]);
        self.state
            .apply(Change::Template(ObjectEvent::Only(templates, u64::MAX)));
        self.state
            .apply(Change::Pod(ObjectEvent::Only(BTreeSet::new(), u64::MAX)));
        for pod in self.pods.values() {
            self.state
                .apply(Change::Pod(ObjectEvent::Is(Arc::new(pod.clone()))));
        }
        let node = json!({ "metadata": { "name": "n" } });
        self.state
            .apply(Change::Node(ObjectEvent::Is(Arc::new(of(node)))));
        self.state.apply(Change::Node(ObjectEvent::Only(
            BTreeSet::from([(String::new(), "n".to_owned())]),
            u64::MAX,
        )));
        self.state.follow_node(self.node_use.changes());
    }

    fn put_template(&mut self, template: &str) {
        let template: ResourceClaimTemplate = of(json!({
            "metadata": { "name": template, "namespace": "default" },
            "spec": { "spec": { "devices": { "requests": [] } } },
        }));
        self.state
            .apply(Change::Template(ObjectEvent::Is(Arc::new(template))));
    }

    fn put_devices(&mut self, devices: &Value) {
        let slice = json!({ "metadata": { "name": "s" }, "spec": { "driver": "d.dev", "nodeName": "n",
            "pool": { "name": "n/p", "generation": 1, "resourceSliceCount": 1 }, "devices": devices } });
        self.state
            .apply(Change::Slice(ObjectEvent::Is(Arc::new(of(slice)))));
    }

    /// Refuses a claim, as after an allocation that ended with `kind`.
    fn refuse(&mut self, claim: &str, kind: NotAllocatedKind) {
        let claim = Arc::new(self.claims[&name(claim)].clone());
        let refusal = NotAllocated {
            kind,
            message: String::new(),
            devices: Vec::new(),
            more: false,
        };
        let mut done = self
            .state
            .begin_allocation(&claim, Timestamp::UNIX_EPOCH)
            .run();
        done.result = Err(refusal);
        assert!(self.state.end_allocation(done).is_err());
    }

    fn restart(&mut self, devices: usize) {
        self.state = LocalClaimsState::new(NodeRef {
            name: "n".into(),
            labels: BTreeMap::new(),
        });
        self.reservations.clear();
        self.list(devices);
    }

    fn put(&mut self, mut claim: ResourceClaim) {
        self.version += 1;
        claim.metadata.resource_version = Some(self.version.to_string());
        let protected = !claim.finalizers().is_empty();
        if claim.metadata.deletion_timestamp.is_some() && !protected {
            self.claims.remove(&key(&claim));
            self.state
                .apply(Change::Claim(ObjectEvent::Gone(key(&claim))));
            return;
        }
        self.claims.insert(key(&claim), claim.clone());
        self.state.put_claim(Arc::new(claim));
    }

    fn create(&mut self, claim: &str, count: u32) {
        self.create_of(
            claim,
            json!({ "deviceClassName": "any", "allocationMode": "ExactCount", "count": count }),
        );
    }

    fn create_of(&mut self, claim: &str, request: Value) {
        let request = json!({ "name": "r", "exactly": request });
        let uid = format!("uid-{claim}-{}", self.version);
        self.put(of(json!({
            "metadata": { "name": claim, "namespace": "default", "uid": uid, "creationTimestamp": "2026-01-01T00:00:00Z" },
            "spec": { "devices": { "requests": [request] } },
        })));
    }

    fn delete(&mut self, claim: &str) {
        if let Some(mut claim) = self.claims.get(&name(claim)).cloned() {
            claim
                .metadata
                .deletion_timestamp
                .get_or_insert_with(|| of(json!("2026-01-02T00:00:00Z")));
            self.put(claim);
        }
    }

    /// Prepares an allocated claim for a pod, as the node does.
    fn prepare(&mut self, claim: &str) {
        let Some(claim) = self.claims.get(&name(claim)) else {
            return;
        };
        if let (Some(uid), Some(result)) = (claim.uid(), allocation(claim)) {
            self.node_use.pods.insert(format!("pod-of-{uid}"));
            self.node_use.claims.insert(uid, result.clone());
        }
        self.state.follow_node(self.node_use.changes());
    }

    fn unprepare_all(&mut self) {
        self.node_use = NodeUse::default();
        self.state.follow_node(NodeUse::default().changes());
    }

    /// Carries out what is decided, until nothing is.
    fn settle(&mut self) {
        for _ in 0..1000 {
            if !self.settle_one_round() {
                return;
            }
        }
        panic!("it does not come to an end");
    }

    /// The steps that are due, which are those that a look at every object finds.
    fn steps(&mut self) -> Vec<Step> {
        let steps = self.state.steps(&self.reservations);
        self.state.pods_changed();
        self.state.open.extend(self.claims.keys().cloned());
        assert_eq!(
            steps,
            self.state.steps(&self.reservations),
            "something is missed"
        );
        steps
    }

    /// Returns whether there was anything to do.
    fn settle_one_round(&mut self) -> bool {
        let steps = self.steps();
        let is_any = !steps.is_empty();
        for step in steps {
            self.take(step);
        }
        is_any
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::MakeNode => {
                let node = json!({ "metadata": { "name": "n" } });
                self.state
                    .apply(Change::Node(ObjectEvent::Is(Arc::new(of(node)))));
            }
            Step::MakeClass(class) => {
                self.state
                    .apply(Change::Class(ObjectEvent::Is(Arc::new(*class))));
            }
            Step::RemoveClass(class) => {
                self.state
                    .apply(Change::Class(ObjectEvent::Gone(key(&*class))));
            }
            Step::Make { pod, claim } => {
                let made = format!("{}-{}-x", pod.name_any(), claim.name);
                let owner = json!({ "apiVersion": "v1", "kind": "Pod", "name": pod.name_any(), "uid": pod.uid() });
                let request = json!({ "name": "r", "exactly": { "deviceClassName": "any" } });
                self.put(of(json!({
                    "metadata": { "name": made, "namespace": "default", "uid": format!("uid-{made}"),
                        "annotations": { POD_CLAIM: claim.name }, "ownerReferences": [owner] },
                    "spec": { "devices": { "requests": [request] } },
                })));
            }
            Step::Name { pod, claims } => {
                let mut pod = Pod::clone(&pod);
                let statuses: Vec<_> = claims
                    .iter()
                    .map(|(name, claim)| json!({ "name": name, "resourceClaimName": claim }))
                    .collect();
                pod.status = Some(of(json!({ "resourceClaimStatuses": statuses })));
                self.put_pod(pod);
            }
            Step::Reserve { claim, consumers } => {
                let mut claim = ResourceClaim::clone(&claim);
                claim.status.get_or_insert_default().reserved_for =
                    (!consumers.is_empty()).then_some(consumers);
                self.put(claim);
            }
            Step::Withdraw(claim) => {
                let mut claim = ResourceClaim::clone(&claim);
                claim.status = None;
                self.put(claim);
            }
            Step::Release(claim) => {
                let mut claim = ResourceClaim::clone(&claim);
                claim.status = None;
                claim.metadata.finalizers = None;
                self.put(claim);
            }
            Step::Allocate(claim) => {
                if let Ok(result) = self.state.allocated(&claim) {
                    let mut claim = ResourceClaim::clone(&claim);
                    claim.metadata.finalizers = Some(vec![FINALIZER.to_owned()]);
                    claim.status.get_or_insert_default().allocation = Some(result);
                    self.put(claim);
                }
            }
        }
    }

    fn put_pod(&mut self, pod: Pod) {
        self.pods.insert(key(&pod), pod.clone());
        self.state
            .apply(Change::Pod(ObjectEvent::Is(Arc::new(pod))));
    }

    fn devices(&self, claim: &str) -> Option<Vec<String>> {
        allocation(self.claims.get(&name(claim))?).map(devices)
    }

    fn consumers(&self, claim: &str) -> Vec<String> {
        let status = self
            .claims
            .get(&name(claim))
            .and_then(|claim| claim.status.clone());
        let consumers = status
            .and_then(|status| status.reserved_for)
            .unwrap_or_default();
        consumers
            .into_iter()
            .map(|consumer| format!("{}/{}", consumer.name, consumer.uid))
            .collect()
    }
}

#[test]
fn pods_of_waiting_claims_are_shown() {
    let pod = |name: &str, phase: &str, status: Value| -> Pod {
        let claims = [
            json!({ "name": "a", "resourceClaimName": "waits" }),
            json!({ "name": "b", "resourceClaimTemplateName": "none" }),
        ];
        of(
            json!({ "metadata": { "name": name, "namespace": "default", "uid": name },
            "spec": { "containers": [], "resourceClaims": claims },
            "status": { "phase": phase, "resourceClaimStatuses": status } }),
        )
    };
    let mut machine = Machine::new(1);
    machine.create("has", 1);
    machine.settle();
    let shown = machine.state.shown;
    machine.put_pod(pod("ended", "Succeeded", json!([])));
    machine.put_pod(pod("web", "Pending", json!([])));
    assert!(machine.state.shown > shown);
    assert!(machine.state.pods_of_refused().is_empty());
    machine.create("waits", 1);
    machine.refuse("waits", NotAllocatedKind::Unsatisfiable);
    let named = |machine: &Machine| {
        let pods = machine.state.pods_of_refused();
        let names = pods.get(&name("waits")).into_iter().flatten();
        Vec::from_iter(names.map(|pod| pod.name.to_string()))
    };
    assert_eq!(named(&machine), ["web"]);
    for index in 0..20 {
        machine.put_pod(pod(&format!("more-{index}"), "Pending", json!([])));
    }
    assert_eq!(named(&machine).len(), 8);
}

#[test]
fn machine_without_classes_gets_default_ones() {
    let mut machine = Machine::new(1);
    assert_eq!(machine.state.classes().collect::<Vec<_>>(), ["any"]);
    let any = || (String::new(), "any".to_owned());
    machine.state.apply(Change::Class(ObjectEvent::Gone(any())));
    machine.create_of("c", json!({ "deviceClassName": "d" }));
    machine.settle();
    assert_eq!(machine.state.classes().collect::<Vec<_>>(), ["d"]);
    assert_eq!(machine.devices("c"), Some(vec!["d0".into()]));
    let class = json!({ "metadata": { "name": "mine" }, "spec": {} });
    machine
        .state
        .apply(Change::Class(ObjectEvent::Is(Arc::new(of(class)))));
    machine.settle();
    assert_eq!(machine.state.classes().collect::<Vec<_>>(), ["mine"]);
}

#[test]
fn hopeless_claims_are_known() {
    let mut machine = Machine::new(1);
    for (claim, count) in [("a", 1), ("b", 1), ("c", 2)] {
        machine.create(claim, count);
    }
    machine.create_of("d", json!({ "deviceClassName": "none" }));
    machine.settle();
    let refused = refusals(&machine.state).into_iter();
    let kinds: Vec<_> = refused
        .map(|((_, name), why)| {
            let holder = why.devices.first().and_then(|device| device.claim.clone());
            (name, why.kind, holder)
        })
        .collect();
    let a = machine.claims[&name("a")].uid();
    assert_eq!(
        kinds,
        [
            ("b".to_owned(), NotAllocatedKind::Unsatisfiable, a.clone()),
            ("c".to_owned(), NotAllocatedKind::Never, a),
            ("d".to_owned(), NotAllocatedKind::Invalid, None),
        ]
    );
}

#[test]
fn claims_are_allocated_in_creation_order() {
    let mut machine = Machine::new(1);
    // Names sort the other way.
    for claim in ["c", "b", "a"] {
        machine.create(claim, 1);
    }
    machine.settle();
    assert_eq!(
        (machine.devices("c"), machine.devices("b")),
        (Some(vec!["d0".into()]), None)
    );
    let refused: BTreeMap<_, _> = refusals(&machine.state).into_iter().collect();
    assert_eq!(refused.keys().collect::<Vec<_>>(), [&name("a"), &name("b")]);
    assert!(
        refused[&name("a")].devices[0].reason.contains("in use"),
        "{refused:?}"
    );
    machine.restart(1);
    machine.delete("c");
    machine.settle();
    assert_eq!(
        (machine.devices("b"), machine.devices("a")),
        (Some(vec!["d0".into()]), None)
    );
    assert!(
        !machine.claims.contains_key(&name("c")),
        "its finalizer is gone, and so is the claim"
    );
}

#[test]
fn deleted_prepared_claim_keeps_devices() {
    let mut machine = Machine::new(1);
    machine.create("a", 1);
    machine.settle();
    machine.prepare("a");
    machine.delete("a");
    machine.create("b", 1);
    machine.settle();
    assert_eq!(
        (machine.devices("a"), machine.devices("b")),
        (Some(vec!["d0".into()]), None)
    );
    machine.unprepare_all();
    machine.settle();
    assert_eq!(
        (machine.devices("a"), machine.devices("b")),
        (None, Some(vec!["d0".into()]))
    );
}

#[test]
fn device_prepared_outside_api_is_unavailable() {
    let mut machine = Machine::new(1);
    machine.create("a", 1);
    machine.settle();
    let result = allocation(&machine.claims[&name("a")]).unwrap().clone();
    machine.delete("a");
    machine.settle();
    machine
        .node_use
        .claims
        .insert("of-a-manifest".into(), result);
    machine.state.follow_node(machine.node_use.changes());
    machine.create("b", 1);
    machine.settle();
    assert_eq!(machine.devices("b"), None);
    machine.unprepare_all();
    machine.settle();
    assert_eq!(machine.devices("b"), Some(vec!["d0".into()]));
}

#[test]
fn claim_is_reserved_for_its_pods() {
    let mut machine = Machine::new(2);
    machine.create("a", 1);
    machine.reservations.insert(
        name("a"),
        BTreeMap::from([("u1".to_owned(), "one".to_owned())]),
    );
    machine.settle();
    assert_eq!(machine.consumers("a"), ["one/u1"]);
    // The prepare has ended, and the node has the pod.
    machine.reservations.clear();
    machine.node_use.pods.insert("u1".into());
    machine.state.follow_node(machine.node_use.changes());
    let pod = json!({ "metadata": { "name": "two", "namespace": "default", "uid": "u2" },
        "spec": { "containers": [], "resourceClaims": [{ "name": "x", "resourceClaimName": "a" }] } });
    machine.put_pod(of(pod));
    machine.settle();
    assert_eq!(machine.consumers("a"), ["one/u1", "two/u2"]);
    machine.unprepare_all();
    machine.settle();
    assert_eq!(machine.consumers("a"), ["two/u2"]);
    let mut over = machine.pods[&name("two")].clone();
    over.status = Some(of(json!({ "phase": "Succeeded" })));
    machine.put_pod(over);
    machine.settle();
    assert_eq!(
        (machine.consumers("a"), machine.devices("a")),
        (vec![], Some(vec!["d0".into()]))
    );
}

#[test]
fn deleted_claim_gets_no_new_consumer() {
    let mut machine = Machine::new(1);
    let pod = |name: &str| {
        of::<Pod>(
            json!({ "metadata": { "name": name, "namespace": "default", "uid": name },
            "spec": { "containers": [], "resourceClaims": [{ "name": "x", "resourceClaimName": "a" }] } }),
        )
    };
    machine.create("a", 1);
    machine.put_pod(pod("one"));
    machine.settle();
    machine.delete("a");
    machine.put_pod(pod("two"));
    machine.settle();
    assert_eq!(machine.consumers("a"), ["one/one"]);
    machine.pods.remove(&name("one"));
    machine
        .state
        .apply(Change::Pod(ObjectEvent::Gone(name("one"))));
    // One that is about to prepare it keeps it.
    let claim = Arc::new(machine.claims[&name("a")].clone());
    let reserving = BTreeMap::from([(
        name("a"),
        BTreeMap::from([("u".to_owned(), "p".to_owned())]),
    )]);
    assert!(!machine.state.may_release(&claim, &reserving));
    machine.settle();
    assert!(!machine.claims.contains_key(&name("a")));
}

#[test]
fn claim_created_during_list_is_kept() {
    let mut machine = Machine::new(1);
    machine.create("a", 1);
    machine.settle();
    let before = machine.version;
    machine.create("b", 1);
    machine.state.apply(Change::Claim(ObjectEvent::Only(
        BTreeSet::from([name("a")]),
        before,
    )));
    assert_eq!(machine.state.claims().size(), 2);
    machine.state.apply(Change::Claim(ObjectEvent::Only(
        BTreeSet::from([name("a")]),
        machine.version,
    )));
    assert_eq!(machine.state.claims().size(), 1);
}

#[test]
fn waiting_claim_retries_on_relevant_changes() {
    let mut machine = Machine::new(1);
    machine.create("a", 1);
    machine.create("b", 1);
    machine.settle();
    let is_tried = |machine: &mut Machine| !machine.steps().is_empty();
    let mut labelled = machine.claims[&name("a")].clone();
    labelled.metadata.labels = Some(BTreeMap::from([("x".to_owned(), "y".to_owned())]));
    machine.put(labelled);
    machine.prepare("a");
    assert!(!is_tried(&mut machine), "nothing became free");
    machine.list(2);
    assert!(is_tried(&mut machine), "there are other devices");
}

/// A selector that fails for a device without the attribute says nothing about devices in use: one that is freed may fit.
#[test]
fn freed_device_retries_failed_selector() {
    let mut machine = Machine::new(2);
    let devices = json!([{ "name": "d0", "attributes": { "index": { "int": 0 } } }, { "name": "d1", "attributes": {} }]);
    machine.put_devices(&devices);
    machine.create("a", 1);
    machine.settle();
    let of_index = [json!({ "cel": { "expression": r#"device.attributes["d.dev"].index == 0"# } })];
    machine.create_of(
        "b",
        json!({ "deviceClassName": "any", "selectors": of_index }),
    );
    machine.create_of("no-class", json!({ "deviceClassName": "none" }));
    machine.settle();
    let kinds = |machine: &Machine| {
        refusals(&machine.state)
            .into_iter()
            .map(|((_, name), why)| (name, why.kind))
            .collect::<Vec<_>>()
    };
    let (invalid, b, no_class) = (
        NotAllocatedKind::Invalid,
        "b".to_owned(),
        "no-class".to_owned(),
    );
    assert_eq!(kinds(&machine), [(b, invalid), (no_class.clone(), invalid)]);
    machine.delete("a");
    machine.settle();
    assert_eq!(machine.devices("b"), Some(vec!["d0".into()]));
    assert_eq!(kinds(&machine), [(no_class, invalid)]);
}

#[test]
fn complex_claims_are_retried_last() {
    let mut machine = Machine::new(1);
    for claim in ["complex", "other", "a"] {
        machine.create(claim, 1);
    }
    for claim in ["complex", "other"] {
        machine.refuse(claim, NotAllocatedKind::TooComplex);
    }
    let tried = |machine: &mut Machine| {
        let steps = machine.steps();
        let name = |step: &Step| match step {
            Step::Allocate(claim) => claim.name_any(),
            other => panic!("{other:?}"),
        };
        steps.iter().map(name).collect::<Vec<_>>()
    };
    assert_eq!(tried(&mut machine), ["a"], "nothing changed for the others");
    machine.settle();
    machine.delete("a");
    // The release.
    machine.settle_one_round();
    machine.create("b", 1);
    assert_eq!(tried(&mut machine), ["b", "complex"]);
    machine.refuse("complex", NotAllocatedKind::TooComplex);
    assert_eq!(
        tried(&mut machine),
        ["b", "other"],
        "the one that was tried less recently"
    );
    machine.settle();
    assert_eq!(machine.devices("b"), Some(vec!["d0".into()]));
}

#[test]
fn pod_gets_one_claim_per_template() {
    let mut machine = Machine::new(2);
    let pod = json!({ "metadata": { "name": "web", "namespace": "default", "uid": "u" },
        "spec": { "containers": [], "resourceClaims": [{ "name": "gpu", "resourceClaimTemplateName": "t" }] } });
    machine.put_pod(of(pod));
    machine.settle();
    assert_eq!(machine.devices("web-gpu-x"), Some(vec!["d0".into()]));
    assert_eq!(machine.consumers("web-gpu-x"), ["web/u"]);
    let statuses = machine.pods[&name("web")]
        .status
        .clone()
        .unwrap()
        .resource_claim_statuses
        .unwrap();
    assert_eq!(
        statuses[0].resource_claim_name.as_deref(),
        Some("web-gpu-x")
    );
    machine.restart(2);
    machine.settle();
    assert_eq!(machine.claims.len(), 1);
}

#[test]
fn missing_template_is_awaited() {
    let mut machine = Machine::new(2);
    let pod = |name: &str, phase: &str| -> Pod {
        let claims = json!([
            { "name": "gpu", "resourceClaimTemplateName": "t" },
            { "name": "nic", "resourceClaimTemplateName": "late" },
        ]);
        of(
            json!({ "metadata": { "name": name, "namespace": "default", "uid": name },
            "spec": { "containers": [], "resourceClaims": claims }, "status": { "phase": phase } }),
        )
    };
    machine.put_pod(pod("ended", "Succeeded"));
    machine.put_pod(pod("web", "Pending"));
    machine.settle();
    let named = |machine: &Machine| {
        let statuses = machine.pods[&name("web")].status.clone();
        statuses.and_then(|status| status.resource_claim_statuses)
    };
    assert_eq!(Vec::from_iter(machine.claims.keys()), [&name("web-gpu-x")]);
    assert!(named(&machine).is_none(), "one of its claims is missing");
    let unmade = machine.state.unmade();
    let [unmade] = &unmade[..] else {
        panic!("{unmade:?}")
    };
    assert_eq!(
        (
            unmade.pod.name.as_str(),
            unmade.claim.as_str(),
            unmade.template.as_str()
        ),
        ("web", "nic", "late")
    );
    let shown = machine.state.shown;
    machine.put_template("late");
    assert!(machine.state.shown > shown && machine.state.unmade().is_empty());
    machine.settle();
    assert_eq!(named(&machine).map(|all| all.len()), Some(2));
    // Of a claim that is made the template may go.
    machine
        .state
        .apply(Change::Template(ObjectEvent::Gone(name("late"))));
    assert!(machine.state.unmade().is_empty());
}

/// What a decision looks at does not grow with the claims that nothing concerns.
#[test]
fn idle_claims_are_not_looked_at() {
    const CLAIMS: usize = 300;
    let mut machine = Machine::new(CLAIMS + 1);
    for index in 0..CLAIMS {
        machine.create(&format!("idle-{index}"), 1);
    }
    for _ in 0..3 {
        let steps = machine.state.steps(&machine.reservations);
        steps.into_iter().for_each(|step| machine.take(step));
    }
    assert_eq!(machine.state.open.len(), 0);
    machine.create("a", 1);
    machine.reservations.insert(
        name("idle-7"),
        BTreeMap::from([("u".to_owned(), "p".to_owned())]),
    );
    assert_eq!(machine.state.steps(&machine.reservations).len(), 2);
    assert_eq!(machine.state.open.len(), 2);
}

#[test]
fn deleted_node_object_is_created_again() {
    let mut machine = Machine::new(1);
    assert!(machine.state.steps(&Reservations::new()).is_empty());
    machine.state.apply(Change::Node(ObjectEvent::Gone((
        String::new(),
        "n".to_owned(),
    ))));
    assert_eq!(machine.state.steps(&Reservations::new()), [Step::MakeNode]);
}

#[test]
fn nothing_is_decided_before_first_list() {
    let mut state = LocalClaimsState::new(NodeRef::default());
    let claim = json!({ "metadata": { "name": "a", "namespace": "default", "uid": "u" },
        "spec": { "devices": { "requests": [] } } });
    state.put_claim(Arc::new(of(claim)));
    assert!(state.steps(&Reservations::new()).is_empty());
}

#[derive(Debug, Clone)]
enum Event {
    Create(u8, u32),
    Delete(u8),
    Prepare(u8),
    UnprepareAll,
    Restart,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (0u8..6, 1u32..4).prop_map(|(claim, count)| Event::Create(claim, count)),
        3 => (0u8..6).prop_map(Event::Delete),
        3 => (0u8..6).prop_map(Event::Prepare),
        1 => Just(Event::UnprepareAll),
        1 => Just(Event::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn devices_are_never_shared_or_wasted(events in prop::collection::vec(event(), 1..60)) {
        const DEVICES: usize = 4;
        let mut machine = Machine::new(DEVICES);
        for event in events {
            match event {
                Event::Create(claim, count) if !machine.claims.contains_key(&name(&format!("c{claim}"))) => {
                    machine.create(&format!("c{claim}"), count);
                }
                Event::Create(..) => {}
                Event::Delete(claim) => machine.delete(&format!("c{claim}")),
                Event::Prepare(claim) => machine.prepare(&format!("c{claim}")),
                Event::UnprepareAll => machine.unprepare_all(),
                Event::Restart => machine.restart(DEVICES),
            }
            machine.settle();
            let mut given = BTreeMap::<String, String>::new();
            let of_claims = machine.claims.values().filter_map(|claim| Some((claim.uid()?, allocation(claim)?)));
            let of_node = machine.node_use.claims.iter().map(|(uid, result)| (uid.clone(), result));
            for (uid, result) in of_claims.chain(of_node) {
                for device in devices(result) {
                    let holder = given.entry(device).or_insert_with(|| uid.clone());
                    prop_assert_eq!(&*holder, &uid);
                }
            }
            let free = DEVICES - given.len();
            for claim in machine.claims.values().filter(|claim| allocation(claim).is_none()) {
                let exactly = claim.spec.devices.as_ref().unwrap().requests.as_ref().unwrap()[0].exactly.clone();
                prop_assert!(exactly.unwrap().count.unwrap() as usize > free, "{} waits", claim.name_any());
            }
        }
    }
}

#[test]
fn holders_of_excluded_devices_have_names() {
    let excluded = |claim: &str| Excluded {
        request: "r".to_owned(),
        driver: "d.dev".to_owned(),
        pool: "n/p".to_owned(),
        device: "d0".to_owned(),
        reason: format!("in use by claim {claim}"),
        claim: Some(claim.to_owned()),
    };
    let why = NotAllocated {
        kind: NotAllocatedKind::Unsatisfiable,
        message: String::new(),
        devices: Vec::new(),
        more: false,
    };
    let names = [("uid-1", "ml/train"), ("uid-2", "user-7/own")];
    let names = names.map(|(uid, name)| (uid.to_owned(), name.to_owned()));
    let id = ObjectRef::new("user-7", "waits", "uid-3").unwrap();
    let mut claim = WaitingClaim::new(id, Arc::new(why), BTreeMap::from(names));
    assert_eq!(claim.holders, ["ml/train", "user-7/own"]);
    assert_eq!(claim.reason(&excluded("uid-1")), "in use by claim ml/train");
    assert_eq!(claim.reason(&excluded("uid-9")), "in use by claim uid-9");
    claim.hide_others("user-7");
    assert_eq!(claim.holders, ["user-7/own", "claims of other users"]);
    let reasons = ["uid-1", "uid-2"].map(|uid| claim.reason(&excluded(uid)));
    assert_eq!(
        reasons,
        [
            "in use by claim of another user",
            "in use by claim user-7/own"
        ]
    );
}
