//! Known objects of the local API, and the next steps for them. Pure: events in, steps out.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, PodResourceClaim};
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationResult, DeviceClass, DeviceRequestAllocationResult,
    ResourceClaim, ResourceClaimConsumerReference, ResourceClaimTemplate, ResourceSlice,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use nodedock_allocator::allocate::{
    DeviceHolds, InUse, Inventory, NodeRef, NotAllocated, NotAllocatedKind, allocate_or_never,
};

use uuid::Uuid;

use super::objects::{Change, Key, ObjectEvent, key, version};
use super::{UnmadeClaim, default_classes, names};
use crate::pools::NodePools;
use nodedock_model::{AllocatedDevice, ClaimRecord, Hold, ObjectRef};

/// Keeps an allocated claim until it is unprepared, as Kubernetes' scheduler has it.
pub const FINALIZER: &str = "resource.kubernetes.io/delete-protection";
/// The name of a pod's claim on the ResourceClaim that was made for it.
pub(super) const POD_CLAIM: &str = "resource.kubernetes.io/pod-claim-name";

/// Pods of a claim that waits that are shown with it.
const PODS_SHOWN_MAX: usize = 8;

/// Claims that the node has prepared, as opposed to the objects of the API.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeUse {
    /// UIDs of pods that have prepared claims.
    pub pods: BTreeSet<String>,
    /// UIDs of claims that are prepared or on the way, with their devices under the names that slices have.
    pub claims: BTreeMap<String, AllocationResult>,
    /// Devices and hardware that these claims keep from others, by the UID of the claim.
    pub holds: BTreeMap<String, Vec<Hold>>,
    /// Namespace and name of these claims, by UID.
    pub names: BTreeMap<String, (String, String)>,
}

impl NodeUse {
    /// Collects the claims that a node has, with the names of pools that slices have.
    pub fn of(records: &[Arc<ClaimRecord>], pools: &NodePools) -> Self {
        let claims = records.iter().map(|record| {
            let results = record
                .allocation
                .devices
                .iter()
                .map(|of| device_result(record, of, pools))
                .collect();
            let devices = DeviceAllocationResult {
                config: None,
                results: Some(results),
            };
            let allocation = AllocationResult {
                devices: Some(devices),
                ..AllocationResult::default()
            };
            (record.id.uid.to_string(), allocation)
        });
        Self {
            pods: records
                .iter()
                .flat_map(|record| record.pods.keys())
                .map(ToString::to_string)
                .collect(),
            claims: claims.collect(),
            holds: records
                .iter()
                .map(|record| (record.id.uid.to_string(), record.holds.clone()))
                .collect(),
            names: records
                .iter()
                .map(|record| {
                    let ObjectRef {
                        namespace,
                        name,
                        uid,
                    } = &record.id;
                    (uid.to_string(), (namespace.to_string(), name.to_string()))
                })
                .collect(),
        }
    }
}

fn device_result(
    record: &ClaimRecord,
    device: &AllocatedDevice,
    pools: &NodePools,
) -> DeviceRequestAllocationResult {
    DeviceRequestAllocationResult {
        request: device.request.clone(),
        driver: device.driver.to_string(),
        pool: pools
            .published_in(record, &device.driver, &device.pool)
            .to_string(),
        device: device.device.to_string(),
        admin_access: device.admin_access.then_some(true),
        share_id: device.share_id.clone(),
        consumed_capacity: (!device.consumed.is_empty()).then(|| {
            let consumed = device.consumed.iter();
            consumed
                .map(|(name, amount)| (name.clone(), Quantity(amount.clone())))
                .collect()
        }),
        ..DeviceRequestAllocationResult::default()
    }
}

/// A pod for which claims are about to be prepared, by UID, with its name.
pub(super) type Reservations = BTreeMap<Key, BTreeMap<String, String>>;

/// Step to be taken.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Step {
    /// Make the object of this node again.
    MakeNode,
    MakeClass(Box<DeviceClass>),
    RemoveClass(Arc<DeviceClass>),
    /// Make a ResourceClaim of a template, which is there, for a pod.
    Make {
        pod: Arc<Pod>,
        claim: PodResourceClaim,
    },
    /// Name the made claims in the status of their pod: the pod's names, and the ResourceClaims'.
    Name {
        pod: Arc<Pod>,
        claims: BTreeMap<String, String>,
    },
    /// Set the consumers of an allocated claim.
    Reserve {
        claim: Arc<ResourceClaim>,
        consumers: Vec<ResourceClaimConsumerReference>,
    },
    /// End the allocation of a claim that is deleted and not in use.
    Release(Arc<ResourceClaim>),
    /// End the allocation of a claim whose hardware a prepared claim has: it is allocated again.
    Withdraw(Arc<ResourceClaim>),
    Allocate(Arc<ResourceClaim>),
}

/// A claim, and since when it is here.
struct Known {
    claim: Arc<ResourceClaim>,
    /// Its place among claims that wait: time of its creation, and its first resource version that was seen.
    place: (Option<Timestamp>, u64),
    /// Why it was not allocated, and in which epoch.
    refused: Option<(u64, Arc<NotAllocated>)>,
}

pub(super) struct LocalClaimsState {
    node: NodeRef,
    slices: BTreeMap<Key, Arc<ResourceSlice>>,
    classes: BTreeMap<Key, Arc<DeviceClass>>,
    claims: BTreeMap<Key, Known>,
    templates: BTreeMap<Key, Arc<ResourceClaimTemplate>>,
    pods: BTreeMap<Key, Arc<Pod>>,
    node_use: NodeUse,
    /// UIDs of claims with devices.
    allocated: BTreeSet<String>,
    /// Counts changes of claims, of why they have no devices, of their pods, of prepared claims, and of classes.
    pub(super) shown: u64,
    /// None: slices changed.
    inventory: Option<Arc<Inventory>>,
    in_use: InUse,
    of_devices: Arc<DeviceHolds>,
    /// UIDs of claims whose devices a prepare found with others.
    refused: BTreeSet<String>,
    has_node: bool,
    /// Counts changes that may let a refused claim be allocated: of classes, slices and the node, and devices that became free. A free device
    /// helps also one whose selector failed, since devices in use are not evaluated.
    epoch: u64,
    /// Kinds whose first list is not complete yet.
    unlisted: BTreeSet<&'static str>,
}

pub(super) fn allocation(claim: &ResourceClaim) -> Option<&AllocationResult> {
    claim.status.as_ref()?.allocation.as_ref()
}

fn consumers(claim: &ResourceClaim) -> &[ResourceClaimConsumerReference] {
    claim
        .status
        .as_ref()
        .and_then(|status| status.reserved_for.as_deref())
        .unwrap_or_default()
}

fn is_ending(object: &impl ResourceExt) -> bool {
    object.meta().deletion_timestamp.is_some()
}

fn has_devices(slice: &ResourceSlice) -> bool {
    slice
        .spec
        .devices
        .as_ref()
        .is_some_and(|devices| !devices.is_empty())
}

fn references(pod: &Pod) -> impl Iterator<Item = &PodResourceClaim> {
    let specs = pod.spec.iter();
    specs.flat_map(|spec| spec.resource_claims.iter().flatten())
}

/// The ResourceClaim of a pod's claim, as the pod has it in its spec or its status.
fn named(pod: &Pod, reference: &PodResourceClaim) -> Option<String> {
    if reference.resource_claim_name.is_some() {
        return reference.resource_claim_name.clone();
    }
    let mut statuses = pod
        .status
        .iter()
        .flat_map(|status| status.resource_claim_statuses.iter().flatten());
    let named = statuses.find(|status| status.name == reference.name);
    named.and_then(|status| status.resource_claim_name.clone())
}

/// A pod that runs no more has no use for a claim.
fn is_over(pod: &Pod) -> bool {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    is_ending(pod) || matches!(phase, Some("Succeeded" | "Failed"))
}

impl LocalClaimsState {
    pub(super) fn new(node: NodeRef) -> Self {
        Self {
            node,
            slices: BTreeMap::new(),
            classes: BTreeMap::new(),
            claims: BTreeMap::new(),
            templates: BTreeMap::new(),
            pods: BTreeMap::new(),
            node_use: NodeUse::default(),
            allocated: BTreeSet::new(),
            shown: 0,
            inventory: None,
            in_use: InUse::default(),
            of_devices: Arc::default(),
            refused: BTreeSet::new(),
            has_node: false,
            epoch: 0,
            unlisted: BTreeSet::from(["claims", "classes", "slices", "templates", "pods", "nodes"]),
        }
    }

    pub(super) fn apply(&mut self, change: Change) {
        let was_listed = self.unlisted.is_empty();
        self.put(change);
        // Claims that cannot be made are shown once everything was listed, whichever list was the last.
        self.shown += u64::from(!was_listed && self.unlisted.is_empty());
    }

    fn put(&mut self, change: Change) {
        match change {
            Change::Claim(ObjectEvent::Is(claim)) => self.put_claim(claim),
            Change::Claim(ObjectEvent::Gone(key)) => self.remove_claim(&key),
            Change::Claim(ObjectEvent::Only(keys, newest)) => {
                // One that was made since is in no list from before.
                let gone: Vec<_> = self
                    .claims
                    .iter()
                    .filter(|(key, known)| !keys.contains(*key) && version(&*known.claim) <= newest)
                    .map(|(key, _)| key.clone())
                    .collect();
                gone.iter().for_each(|key| self.remove_claim(key));
                self.unlisted.remove("claims");
            }
            Change::Class(seen) => {
                self.unlisted
                    .remove(if matches!(seen, ObjectEvent::Only(..)) {
                        "classes"
                    } else {
                        ""
                    });
                put(&mut self.classes, seen);
                self.shown += 1;
                self.epoch += 1;
            }
            Change::Slice(seen) => {
                self.unlisted
                    .remove(if matches!(seen, ObjectEvent::Only(..)) {
                        "slices"
                    } else {
                        ""
                    });
                put(&mut self.slices, seen);
                self.inventory = None;
                self.epoch += 1;
            }
            Change::Template(seen) => {
                self.unlisted
                    .remove(if matches!(seen, ObjectEvent::Only(..)) {
                        "templates"
                    } else {
                        ""
                    });
                // Pods whose claims cannot be made are shown.
                self.shown += 1;
                put(&mut self.templates, seen);
            }
            Change::Pod(seen) => {
                self.unlisted
                    .remove(if matches!(seen, ObjectEvent::Only(..)) {
                        "pods"
                    } else {
                        ""
                    });
                // Pods of claims that wait are shown with them.
                let is_shown = match &seen {
                    ObjectEvent::Is(pod) => references(pod).next().is_some(),
                    ObjectEvent::Gone(_) | ObjectEvent::Only(..) => true,
                };
                self.shown += u64::from(is_shown);
                put(&mut self.pods, seen);
            }
            Change::Node(ObjectEvent::Is(node)) if node.name_any() == self.node.name => {
                self.has_node = true;
                let labels = node.labels().clone();
                if labels != self.node.labels {
                    self.node.labels = labels;
                    self.inventory = None;
                    self.epoch += 1;
                }
            }
            Change::Node(ObjectEvent::Gone((_, name))) if name == self.node.name => {
                self.has_node = false
            }
            Change::Node(ObjectEvent::Only(keys, _)) => {
                self.has_node = keys.iter().any(|(_, name)| *name == self.node.name);
                self.unlisted.remove("nodes");
            }
            Change::Node(_) => {}
        }
    }

    /// A claim as a watch or a write showed it: the older of two is left out.
    pub(super) fn put_claim(&mut self, claim: Arc<ResourceClaim>) {
        let key = key(&*claim);
        let before = self.claims.get(&key);
        if before.is_some_and(|before| {
            before.claim.uid() == claim.uid() && version(&*before.claim) >= version(&*claim)
        }) {
            return;
        }
        let place = before
            .filter(|before| before.claim.uid() == claim.uid())
            .map(|before| before.place);
        let created = claim.creation_timestamp().map(|time| time.0);
        let place = place.unwrap_or_else(|| (created, version(&*claim)));
        let before = before.map(|before| before.claim.clone());
        let is_same_use = before.as_ref().is_some_and(|before| {
            before.uid() == claim.uid() && allocation(before) == allocation(&claim)
        });
        if !is_same_use {
            if let Some(before) = before {
                self.end_use(&before);
            }
            if let (Some(uid), Some(allocation)) = (claim.uid(), allocation(&claim)) {
                self.in_use.add(&uid, allocation);
                self.allocated.insert(uid);
            }
        }
        self.shown += 1;
        self.claims.insert(
            key,
            Known {
                claim,
                place,
                refused: None,
            },
        );
        if !is_same_use {
            self.use_foreign();
        }
    }

    fn remove_claim(&mut self, key: &Key) {
        if let Some(before) = self.claims.remove(key) {
            self.shown += 1;
            self.end_use(&before.claim);
            self.use_foreign();
        }
    }

    fn end_use(&mut self, claim: &ResourceClaim) {
        if let (Some(uid), Some(_)) = (claim.uid(), allocation(claim)) {
            self.refused.remove(&uid);
            self.in_use.remove(&uid);
            self.allocated.remove(&uid);
            self.epoch += 1;
        }
    }

    pub(super) fn set_node_use(&mut self, node_use: NodeUse) {
        self.refused
            .retain(|uid| !node_use.claims.contains_key(uid));
        if node_use == self.node_use {
            return;
        }
        let is_freed = self
            .node_use
            .claims
            .keys()
            .any(|uid| !node_use.claims.contains_key(uid));
        for uid in self.node_use.claims.keys() {
            self.in_use.remove(uid);
        }
        self.node_use = node_use;
        self.shown += 1;
        for known in self.claims.values() {
            if let (Some(uid), Some(allocation)) = (known.claim.uid(), allocation(&known.claim)) {
                self.in_use.remove(&uid);
                self.in_use.add(&uid, allocation);
            }
        }
        self.use_foreign();
        if is_freed {
            self.epoch += 1;
        }
    }

    /// Sets what devices keep from others by their hardware.
    pub(super) fn set_device_holds(&mut self, of_devices: Arc<DeviceHolds>) {
        if *of_devices != *self.of_devices {
            self.of_devices = of_devices;
            self.use_all();
            self.epoch += 1;
        }
    }

    /// Counts what is prepared and has no allocated object: claims of manifests, and those whose object is gone; and the hardware that
    /// prepared claims have.
    fn use_foreign(&mut self) {
        for (uid, allocation) in self
            .node_use
            .claims
            .iter()
            .filter(|(uid, _)| !self.allocated.contains(*uid))
        {
            self.in_use.remove(uid);
            self.in_use.add(uid, allocation);
        }
        self.node_use
            .holds
            .iter()
            .for_each(|(uid, holds)| self.in_use.hold(uid, holds));
    }

    /// A prepare of a claim was refused, because others have its devices.
    pub(super) fn refuse(&mut self, uid: String) {
        // One that has no devices by now gets others anyway.
        if self.allocated.contains(&uid) {
            self.refused.insert(uid);
        }
    }

    /// Returns whether a claim that is not prepared is allocated something that others have: a prepare was refused for it, or a prepared
    /// claim has its hardware, which was not known when it was allocated.
    fn is_taken(&self, claim: &ResourceClaim) -> bool {
        let prepared = &self.node_use.claims;
        claim.uid().is_some_and(|uid| {
            !prepared.contains_key(&uid)
                && (self.refused.contains(&uid)
                    || self
                        .in_use
                        .in_the_way(&uid)
                        .any(|other| prepared.contains_key(other)))
        })
    }

    /// Names of the DeviceClasses.
    pub(super) fn classes(&self) -> impl Iterator<Item = &str> {
        self.classes.keys().map(|(_, name)| name.as_str())
    }

    pub(super) fn claims(&self) -> impl Iterator<Item = &Arc<ResourceClaim>> {
        self.claims.values().map(|known| &known.claim)
    }

    /// Returns the claims that are not allocated, in the order in which they are tried, and why.
    pub(super) fn refusals(&self) -> Vec<(Key, Arc<NotAllocated>)> {
        let refused = self.claims.iter().filter_map(|(key, known)| {
            let (_, why) = known.refused.as_ref()?;
            let place = (names::is_of_user(&known.claim), known.place);
            Some((place, key.clone(), why.clone()))
        });
        let mut refused: Vec<_> = refused.collect();
        refused.sort_by_key(|(place, ..)| *place);
        refused
            .into_iter()
            .map(|(_, key, why)| (key, why))
            .collect()
    }

    /// Returns the names of the claims that the node has prepared, by UID.
    pub(super) fn prepared_names(&self) -> BTreeMap<String, Key> {
        self.node_use.names.clone()
    }

    /// Returns the pods that name claims which are not allocated, at most [`PODS_SHOWN_MAX`] for each.
    pub(super) fn pods_of_refused(&self) -> BTreeMap<Key, Vec<ObjectRef>> {
        let mut pods: BTreeMap<Key, Vec<ObjectRef>> = BTreeMap::new();
        if self.claims.values().all(|known| known.refused.is_none()) {
            return pods;
        }
        for pod in self.pods.values().filter(|pod| !is_over(pod)) {
            let (namespace, name) = key(&**pod);
            let uid = pod.uid().unwrap_or_default();
            // no error: the API checked the names
            let Ok(pod_ref) = ObjectRef::new(&namespace, &name, &uid) else {
                continue;
            };
            for claim in references(pod).filter_map(|reference| named(pod, reference)) {
                let key = (namespace.clone(), claim);
                let known = self.claims.get(&key);
                if known.is_some_and(|known| known.refused.is_some()) {
                    let of_claim = pods.entry(key).or_default();
                    of_claim.extend((of_claim.len() < PODS_SHOWN_MAX).then(|| pod_ref.clone()));
                }
            }
        }
        pods
    }

    /// Returns the claims of pods that cannot be made, as their template is not there.
    pub(super) fn unmade(&self) -> Vec<UnmadeClaim> {
        if !self.unlisted.is_empty() {
            return Vec::new();
        }
        // Of pods, by UID, the claims that were made.
        let mut made = BTreeSet::new();
        for known in self.claims.values() {
            let Some(name) = known.claim.annotations().get(POD_CLAIM) else {
                continue;
            };
            let owners = known.claim.owner_references().iter();
            made.extend(owners.map(|owner| (owner.uid.as_str(), name.as_str())));
        }
        let (made, mut unmade) = (&made, Vec::new());
        for pod in self.pods.values().filter(|pod| !is_over(pod)) {
            let uid = pod.metadata.uid.as_deref().unwrap_or_default();
            let is_made =
                |reference: &&PodResourceClaim| made.contains(&(uid, reference.name.as_str()));
            let open = references(pod).filter(|reference| !is_made(reference));
            unmade.extend(open.filter_map(|reference| self.unmade_claim(pod, reference)));
        }
        unmade
    }

    fn unmade_claim(&self, pod: &Pod, reference: &PodResourceClaim) -> Option<UnmadeClaim> {
        let template = reference.resource_claim_template_name.clone()?;
        if self.has_template(pod, reference) {
            return None;
        }
        let (namespace, name) = key(pod);
        // no error: the API checked the names
        let pod = ObjectRef::new(&namespace, &name, &pod.uid()?).ok()?;
        Some(UnmadeClaim {
            pod,
            claim: reference.name.clone(),
            template,
        })
    }

    fn has_template(&self, pod: &Pod, reference: &PodResourceClaim) -> bool {
        let template = reference.resource_claim_template_name.clone();
        template.is_some_and(|template| {
            let key = (pod.namespace().unwrap_or_default(), template);
            self.templates.contains_key(&key)
        })
    }

    /// Returns the steps to be taken now, in this order. There are none before everything was listed once.
    ///
    /// Claims that had too many combinations are tried after all others, one at a time, so that their searches delay no other claim.
    pub(super) fn steps(&self, reservations: &Reservations) -> Vec<Step> {
        if !self.unlisted.is_empty() {
            return Vec::new();
        }
        let made = (!self.has_node).then_some(Step::MakeNode);
        let mut steps: Vec<Step> = made.into_iter().collect();
        steps.extend(self.steps_of_classes());
        steps.extend(self.pods.values().flat_map(|pod| self.steps_of_pod(pod)));
        let (mut waiting, mut complex) = (Vec::new(), Vec::new());
        for (key, known) in &self.claims {
            let claim = &known.claim;
            if allocation(claim).is_none() {
                if is_ending(&**claim) {
                    let is_protected = claim.finalizers().iter().any(|name| name == FINALIZER);
                    let is_free = is_protected && self.may_release(claim, reservations);
                    steps.extend(is_free.then(|| Step::Release(claim.clone())));
                    continue;
                }
                match &known.refused {
                    Some((epoch, _)) if *epoch == self.epoch => {}
                    Some((epoch, why)) if why.kind == NotAllocatedKind::TooComplex => {
                        complex.push((*epoch, known.place, claim));
                    }
                    _ => waiting.push((known.place, claim)),
                }
                continue;
            }
            let wanted = self.consumers_of(key, claim, reservations.get(key));
            if is_ending(&**claim) && self.is_unused(claim, &wanted) {
                steps.push(Step::Release(claim.clone()));
            } else if !is_ending(&**claim)
                && !reservations.contains_key(key)
                && self.is_taken(claim)
            {
                steps.push(Step::Withdraw(claim.clone()));
            } else if wanted != consumers(claim) {
                steps.push(Step::Reserve {
                    claim: claim.clone(),
                    consumers: wanted,
                });
            }
        }
        // Root's before those of users, who may have many.
        waiting.sort_by_key(|(place, claim)| (names::is_of_user(claim), *place));
        let waiting = waiting.into_iter().map(|(_, claim)| claim);
        let complex = complex
            .into_iter()
            .min_by_key(|(epoch, place, _)| (*epoch, *place));
        let complex = complex.map(|(.., claim)| claim);
        steps.extend(
            waiting
                .chain(complex)
                .map(|claim| Step::Allocate(claim.clone())),
        );
        steps
    }

    /// Returns whether a step for which a round had no time may be taken in a later one: its object is as it was. Other steps are decided again.
    pub(super) fn is_current(&self, step: &Step) -> bool {
        match step {
            Step::Make { pod, .. } | Step::Name { pod, .. } => self
                .pods
                .get(&key(&**pod))
                .is_some_and(|known| Arc::ptr_eq(known, pod)),
            Step::Allocate(claim) => self
                .claims
                .get(&key(&**claim))
                .is_some_and(|known| Arc::ptr_eq(&known.claim, claim)),
            _ => false,
        }
    }

    fn steps_of_classes(&self) -> impl Iterator<Item = Step> {
        let with_devices = self.slices.values().filter(|slice| has_devices(slice));
        let drivers = with_devices.map(|slice| slice.spec.driver.as_str());
        let changes = default_classes::changes(self.classes.values(), &drivers.collect());
        let made = changes.made.into_iter().map(Box::new).map(Step::MakeClass);
        made.chain(changes.removed.into_iter().map(Step::RemoveClass))
    }

    /// Returns whether a claim may still be released, as it was decided.
    pub(super) fn may_release(&self, claim: &ResourceClaim, reservations: &Reservations) -> bool {
        let key = key(claim);
        self.is_unused(
            claim,
            &self.consumers_of(&key, claim, reservations.get(&key)),
        )
    }

    fn is_unused(&self, claim: &ResourceClaim, wanted: &[ResourceClaimConsumerReference]) -> bool {
        wanted.is_empty() && !self.is_prepared(claim)
    }

    fn is_prepared(&self, claim: &ResourceClaim) -> bool {
        claim
            .uid()
            .is_some_and(|uid| self.node_use.claims.contains_key(&uid))
    }

    /// The consumers that a claim has, without those that are gone and with those that came, in the order they came.
    fn consumers_of(
        &self,
        key: &Key,
        claim: &ResourceClaim,
        reserving: Option<&BTreeMap<String, String>>,
    ) -> Vec<ResourceClaimConsumerReference> {
        let mut users: BTreeMap<String, String> = reserving.cloned().unwrap_or_default();
        let pods = self
            .pods
            .values()
            .filter(|pod| pod.namespace().as_deref() == Some(key.0.as_str()));
        for pod in pods.filter(|pod| !is_over(pod) && self.uses(pod, &key.1)) {
            users.extend(pod.uid().map(|uid| (uid, pod.name_any())));
        }
        let kept = consumers(claim).iter().filter(|consumer| {
            // What is no pod is released by who reserved it.
            consumer.resource != "pods"
                || self.node_use.pods.contains(&consumer.uid)
                || users.contains_key(&consumer.uid)
        });
        let mut wanted: Vec<_> = kept.cloned().collect();
        // The server takes no new consumer of a claim that is being deleted, but one that prepares it keeps it.
        users.retain(|uid, _| {
            !is_ending(claim) || reserving.is_some_and(|pods| pods.contains_key(uid))
        });
        for (uid, name) in users {
            if !wanted.iter().any(|consumer| consumer.uid == uid) {
                let resource = "pods".to_owned();
                wanted.push(ResourceClaimConsumerReference {
                    api_group: None,
                    name,
                    resource,
                    uid,
                });
            }
        }
        wanted
    }

    /// Returns whether a pod uses the claim of that name.
    fn uses(&self, pod: &Pod, claim: &str) -> bool {
        references(pod).any(|reference| self.name_of(pod, reference).as_deref() == Some(claim))
    }

    /// The ResourceClaim of a pod's claim: the one that it names, or that was made for it.
    fn name_of(&self, pod: &Pod, reference: &PodResourceClaim) -> Option<String> {
        named(pod, reference).or_else(|| self.made_for(pod, &reference.name))
    }

    /// The claim that was made for a pod's claim, whether its status says so already or not.
    fn made_for(&self, pod: &Pod, pod_claim: &str) -> Option<String> {
        let uid = pod.uid()?;
        let namespace = pod.namespace().unwrap_or_default();
        let mut claims = self
            .claims
            .values()
            .filter(|known| known.claim.namespace().as_deref() == Some(&namespace));
        let made = claims.find(|known| {
            let claim = &known.claim;
            claim
                .annotations()
                .get(POD_CLAIM)
                .is_some_and(|name| name == pod_claim)
                && claim
                    .owner_references()
                    .iter()
                    .any(|owner| owner.uid == uid)
        });
        made.map(|known| known.claim.name_any())
    }

    fn steps_of_pod(&self, pod: &Arc<Pod>) -> Vec<Step> {
        if is_over(pod) {
            return Vec::new();
        }
        let templated: Vec<_> = references(pod)
            .filter(|reference| reference.resource_claim_template_name.is_some())
            .collect();
        let mut steps = Vec::new();
        let mut named = BTreeMap::new();
        let mut is_complete = true;
        for reference in &templated {
            match self.made_for(pod, &reference.name) {
                Some(name) => drop(named.insert(reference.name.clone(), name)),
                None if self.has_template(pod, reference) => steps.push(Step::Make {
                    pod: pod.clone(),
                    claim: (*reference).clone(),
                }),
                // It is made once the template is there.
                None => is_complete = false,
            }
        }
        let statuses = pod
            .status
            .iter()
            .flat_map(|status| status.resource_claim_statuses.iter().flatten());
        let known: BTreeMap<String, String> = statuses
            .filter_map(|status| Some((status.name.clone(), status.resource_claim_name.clone()?)))
            .collect();
        if is_complete && steps.is_empty() && !named.is_empty() && named != known {
            steps.push(Step::Name {
                pod: pod.clone(),
                claims: named,
            });
        }
        steps
    }

    /// Takes out what an allocation needs. It has to end with [`Self::end_allocation`], or with [`Self::lost_allocation`].
    pub(super) fn begin_allocation(
        &mut self,
        claim: &Arc<ResourceClaim>,
        now: Timestamp,
    ) -> Allocation {
        let (slices, node) = (&self.slices, &self.node);
        let inventory = self
            .inventory
            .get_or_insert_with(|| Arc::new(Inventory::new(slices.values().cloned(), node)));
        Allocation {
            inventory: inventory.clone(),
            in_use: std::mem::take(&mut self.in_use),
            classes: self.classes.clone(),
            claim: claim.clone(),
            now,
        }
    }

    /// The devices for a claim, or why there are none, which is kept until something changes.
    pub(super) fn end_allocation(
        &mut self,
        done: Allocated,
    ) -> Result<AllocationResult, Arc<NotAllocated>> {
        self.in_use = done.in_use;
        done.result.map_err(|refusal| {
            let refusal = Arc::new(refusal);
            if let Some(known) = self.claims.get_mut(&key(&*done.claim)) {
                known.refused = Some((self.epoch, refusal.clone()));
                self.shown += 1;
            }
            refusal
        })
    }

    /// An allocation did not end: what it took out is made again.
    pub(super) fn lost_allocation(&mut self) {
        self.use_all();
    }

    fn use_all(&mut self) {
        self.in_use = InUse::new(self.of_devices.clone());
        for known in self.claims.values() {
            if let (Some(uid), Some(allocation)) = (known.claim.uid(), allocation(&known.claim)) {
                self.in_use.add(&uid, allocation);
            }
        }
        self.use_foreign();
    }
}

/// An allocation to be made, which may take some time.
pub(super) struct Allocation {
    inventory: Arc<Inventory>,
    in_use: InUse,
    classes: BTreeMap<Key, Arc<DeviceClass>>,
    claim: Arc<ResourceClaim>,
    now: Timestamp,
}

/// One that was made, or refused.
pub(super) struct Allocated {
    in_use: InUse,
    claim: Arc<ResourceClaim>,
    pub(super) result: Result<AllocationResult, NotAllocated>,
}

impl Allocation {
    pub(super) fn run(self) -> Allocated {
        let Self {
            inventory,
            in_use,
            classes,
            claim,
            now,
        } = self;

        let result = allocate_or_never(
            &inventory,
            &in_use,
            &|name| classes.get(&(String::new(), name.to_owned())).cloned(),
            &claim,
            now,
            &mut || Uuid::new_v4().to_string(),
        );
        Allocated {
            in_use,
            claim,
            result,
        }
    }
}

fn put<K: ResourceExt>(objects: &mut BTreeMap<Key, Arc<K>>, seen: ObjectEvent<K>) {
    match seen {
        ObjectEvent::Is(object) => drop(objects.insert(key(&*object), object)),
        ObjectEvent::Gone(key) => drop(objects.remove(&key)),
        ObjectEvent::Only(keys, newest) => {
            objects.retain(|key, object| keys.contains(key) || version(&**object) > newest);
        }
    }
}
