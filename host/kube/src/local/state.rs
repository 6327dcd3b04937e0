//! Known objects of the local API, and the next steps for them. Pure: events in, steps out.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, PodResourceClaim};
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceClass, ResourceClaim, ResourceClaimConsumerReference,
    ResourceClaimTemplate, ResourceSlice,
};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use nodedock_allocator::allocate::{
    DeviceHolds, InUse, Inventory, NodeRef, NotAllocated, NotAllocatedKind, allocate_or_never,
};

use rpds::RedBlackTreeMapSync;
use uuid::Uuid;

use super::node_claims::{NodeChanges, NodeClaims};
use super::objects::{Change, Key, ObjectEvent, key, version};
use super::{UnmadeClaim, default_classes, names};
use nodedock_model::ObjectRef;

/// Keeps an allocated claim until it is unprepared, as Kubernetes' scheduler has it.
pub const FINALIZER: &str = "resource.kubernetes.io/delete-protection";
/// The name of a pod's claim on the ResourceClaim that was made for it.
pub(super) const POD_CLAIM: &str = "resource.kubernetes.io/pod-claim-name";

/// Pods of a claim that waits that are shown with it.
const PODS_SHOWN_MAX: usize = 8;

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

/// Place of a claim among those that wait: time of its creation, and its first resource version that was seen.
type Place = (Option<Timestamp>, u64);

/// Claims that are not allocated, in the order in which they are tried: root's before those of users, who may have many.
pub(super) type Refusals = RedBlackTreeMapSync<(bool, Place, Key), Arc<NotAllocated>>;

/// A claim, and since when it is here.
struct Known {
    claim: Arc<ResourceClaim>,
    place: Place,
    /// Why it was not allocated, and in which epoch.
    refused: Option<(u64, Arc<NotAllocated>)>,
}

/// A change costs as much as it concerns: no decision looks at every claim.
pub(super) struct LocalClaimsState {
    node: NodeRef,
    slices: BTreeMap<Key, Arc<ResourceSlice>>,
    classes: BTreeMap<Key, Arc<DeviceClass>>,
    claims: BTreeMap<Key, Known>,
    templates: BTreeMap<Key, Arc<ResourceClaimTemplate>>,
    pods: BTreeMap<Key, Arc<Pod>>,
    index: ClaimIndex,
    /// Pods that use each claim, by UID, with their names.
    users: Reservations,
    /// Pods changed, or templates or claims of them, since `users` was read.
    are_users_old: bool,
    /// A step may be due for a pod.
    are_pods_open: bool,
    /// Claims for which a step may be due: those that are not here were looked at, and nothing that concerns them has changed.
    pub(super) open: BTreeSet<Key>,
    /// Epoch in which the claims that wait were looked at.
    open_epoch: u64,
    /// Reservations as they were in the last decision.
    reserved: Reservations,
    pub(super) prepared: NodeClaims,
    /// The claims, for those who read them.
    shown_claims: RedBlackTreeMapSync<Key, Arc<ResourceClaim>>,
    refusals: Refusals,
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

/// Keys of claims by what they have.
#[derive(Default)]
struct ClaimIndex {
    uids: BTreeMap<String, Key>,
    /// By the UID of a consumer.
    consumers: BTreeMap<String, BTreeSet<Key>>,
    /// By the UID of the pod that they were made for, and its name of the claim.
    made: BTreeMap<(String, String), BTreeSet<Key>>,
    /// Those that are not allocated.
    waiting: BTreeSet<Key>,
}

impl ClaimIndex {
    fn add(&mut self, key: &Key, claim: &ResourceClaim) {
        self.uids.extend(claim.uid().map(|uid| (uid, key.clone())));
        for consumer in consumers(claim) {
            let of_consumer = self.consumers.entry(consumer.uid.clone()).or_default();
            of_consumer.insert(key.clone());
        }
        for made in made_for(claim) {
            self.made.entry(made).or_default().insert(key.clone());
        }
        if allocation(claim).is_none() {
            self.waiting.insert(key.clone());
        }
    }

    fn remove(&mut self, key: &Key, claim: &ResourceClaim) {
        if let Some(uid) = claim.uid() {
            self.uids.remove(&uid);
        }
        for consumer in consumers(claim) {
            remove_from(&mut self.consumers, &consumer.uid, key);
        }
        for made in made_for(claim) {
            remove_from(&mut self.made, &made, key);
        }
        self.waiting.remove(key);
    }
}

fn remove_from<K: Ord>(index: &mut BTreeMap<K, BTreeSet<Key>>, of: &K, key: &Key) {
    if let Some(keys) = index.get_mut(of) {
        keys.remove(key);
        if keys.is_empty() {
            index.remove(of);
        }
    }
}

/// UIDs of the pods that a claim was made for, each with the pod's name of the claim.
fn made_for(claim: &ResourceClaim) -> Vec<(String, String)> {
    let Some(name) = claim.annotations().get(POD_CLAIM) else {
        return Vec::new();
    };
    let owners = claim.owner_references().iter();
    owners
        .map(|owner| (owner.uid.clone(), name.clone()))
        .collect()
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
            index: ClaimIndex::default(),
            users: Reservations::new(),
            are_users_old: true,
            are_pods_open: true,
            open: BTreeSet::new(),
            open_epoch: 0,
            reserved: Reservations::new(),
            prepared: NodeClaims::default(),
            shown_claims: RedBlackTreeMapSync::default(),
            refusals: Refusals::default(),
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
                self.pods_changed();
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
                self.pods_changed();
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
        let known = self.claims.get(&key);
        if known.is_some_and(|before| {
            before.claim.uid() == claim.uid() && version(&*before.claim) >= version(&*claim)
        }) {
            return;
        }
        let before = self.take_out(&key);
        let before = before.as_ref();
        let same = before.filter(|before| before.claim.uid() == claim.uid());
        let created = claim.creation_timestamp().map(|time| time.0);
        let place = same.map_or_else(|| (created, version(&*claim)), |before| before.place);
        let is_same_use =
            same.is_some_and(|before| allocation(&before.claim) == allocation(&claim));
        if before
            .map(|before| made_for(&before.claim))
            .unwrap_or_default()
            != made_for(&claim)
        {
            self.pods_changed();
        }
        self.index.add(&key, &claim);
        self.shown_claims.insert_mut(key.clone(), claim.clone());
        let uid = claim.uid();
        let known = Known {
            claim,
            place,
            refused: None,
        };
        self.claims.insert(key.clone(), known);
        self.shown += 1;
        self.open.insert(key);
        if !is_same_use {
            if let Some(before) = before {
                self.end_use(&before.claim);
            }
            uid.into_iter().for_each(|uid| self.use_of(&uid));
        }
    }

    /// Takes out a claim, with what is known of it, but for what it uses.
    fn take_out(&mut self, key: &Key) -> Option<Known> {
        let known = self.claims.remove(key)?;
        self.index.remove(key, &known.claim);
        self.shown_claims.remove_mut(key);
        self.refusals.remove_mut(&refusal_key(key, &known));
        Some(known)
    }

    fn remove_claim(&mut self, key: &Key) {
        if let Some(before) = self.take_out(key) {
            self.shown += 1;
            if !made_for(&before.claim).is_empty() {
                self.pods_changed();
            }
            self.end_use(&before.claim);
        }
    }

    fn end_use(&mut self, claim: &ResourceClaim) {
        let Some(uid) = claim.uid() else { return };
        if allocation(claim).is_some() {
            self.refused.remove(&uid);
            self.epoch += 1;
        }
        self.use_of(&uid);
    }

    /// Counts again what a claim has: by its object, or as the node has prepared it if it has no allocated object, as claims of manifests and
    /// those whose object is gone; and the hardware that it has since it is prepared.
    fn use_of(&mut self, uid: &str) {
        self.in_use.remove(uid);
        let key = self.index.uids.get(uid);
        let object = key.and_then(|key| allocation(&self.claims.get(key)?.claim));
        let prepared = self.prepared.claim(uid);
        if let Some(allocation) = object.or(prepared.map(|prepared| &prepared.allocation)) {
            self.in_use.add(uid, allocation);
        }
        if let Some(prepared) = prepared {
            self.in_use.hold(uid, &prepared.holds);
        }
        // Claims whose hardware it has may have to be allocated again.
        let others = self.in_use.in_the_way(uid).chain([uid]);
        let keys = others.filter_map(|uid| self.index.uids.get(uid));
        self.open.extend(keys.cloned());
    }

    /// Has all pods looked at.
    pub(super) fn pods_changed(&mut self) {
        (self.are_users_old, self.are_pods_open) = (true, true);
    }

    /// Takes changes of what the node has prepared.
    pub(super) fn follow_node(&mut self, changes: NodeChanges) {
        for (uid, before) in self.prepared.follow(changes) {
            self.shown += 1;
            let now = self.prepared.claim(&uid);
            let pods = before.iter().chain(now).flat_map(|claim| &claim.pods);
            let of_pods = pods.filter_map(|pod| self.index.consumers.get(pod));
            self.open.extend(of_pods.flatten().cloned());
            if now.is_some() {
                self.refused.remove(&uid);
            } else {
                self.epoch += 1;
            }
            self.use_of(&uid);
        }
    }

    /// Sets what devices keep from others by their hardware.
    pub(super) fn set_device_holds(&mut self, of_devices: Arc<DeviceHolds>) {
        if !Arc::ptr_eq(&of_devices, &self.of_devices) && *of_devices != *self.of_devices {
            self.of_devices = of_devices;
            self.use_all();
            self.epoch += 1;
        }
    }

    /// A prepare of a claim was refused, because others have its devices.
    pub(super) fn refuse(&mut self, uid: String) {
        let Some(key) = self.index.uids.get(&uid) else {
            return;
        };
        // One that has no devices by now gets others anyway, and one that is prepared keeps its own.
        if !self.index.waiting.contains(key) && self.prepared.claim(&uid).is_none() {
            self.open.insert(key.clone());
            self.refused.insert(uid);
        }
    }

    /// Returns whether a claim that is not prepared is allocated something that others have: a prepare was refused for it, or a prepared
    /// claim has its hardware, which was not known when it was allocated.
    fn is_taken(&self, claim: &ResourceClaim) -> bool {
        let is_prepared = |uid: &str| self.prepared.claim(uid).is_some();
        claim.uid().is_some_and(|uid| {
            !is_prepared(&uid)
                && (self.refused.contains(&uid) || self.in_use.in_the_way(&uid).any(is_prepared))
        })
    }

    /// Names of the DeviceClasses.
    pub(super) fn classes(&self) -> impl Iterator<Item = &str> {
        self.classes.keys().map(|(_, name)| name.as_str())
    }

    /// Returns the claims as they are now: a copy costs nothing.
    pub(super) fn claims(&self) -> RedBlackTreeMapSync<Key, Arc<ResourceClaim>> {
        self.shown_claims.clone()
    }

    /// Returns the claims that are not allocated, and why: a copy costs nothing.
    pub(super) fn refusals(&self) -> Refusals {
        self.refusals.clone()
    }

    /// Returns the pods that name claims which are not allocated, at most [`PODS_SHOWN_MAX`] for each.
    pub(super) fn pods_of_refused(&self) -> BTreeMap<Key, Vec<ObjectRef>> {
        let mut pods: BTreeMap<Key, Vec<ObjectRef>> = BTreeMap::new();
        if self.refusals.is_empty() {
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
        let mut unmade = Vec::new();
        for pod in self.pods.values().filter(|pod| !is_over(pod)) {
            let uid = pod.uid().unwrap_or_default();
            let is_made = |reference: &&PodResourceClaim| {
                let made = (uid.clone(), reference.name.clone());
                self.index.made.contains_key(&made)
            };
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
    pub(super) fn steps(&mut self, reservations: &Reservations) -> Vec<Step> {
        if !self.unlisted.is_empty() {
            return Vec::new();
        }
        self.read_users();
        self.take_reservations(reservations);
        if self.open_epoch != self.epoch {
            self.open_epoch = self.epoch;
            self.open.extend(self.index.waiting.iter().cloned());
        }
        let made = (!self.has_node).then_some(Step::MakeNode);
        let mut steps: Vec<Step> = made.into_iter().collect();
        steps.extend(self.steps_of_classes());
        steps.extend(self.steps_of_pods());
        let (mut waiting, mut complex, mut open) = (Vec::new(), Vec::new(), BTreeSet::new());
        for key in std::mem::take(&mut self.open) {
            let Some(known) = self.claims.get(&key) else {
                continue;
            };
            let claim = &known.claim;
            let is_open = if allocation(claim).is_none() && !is_ending(&**claim) {
                match &known.refused {
                    Some((epoch, _)) if *epoch == self.epoch => false,
                    Some((epoch, why)) if why.kind == NotAllocatedKind::TooComplex => {
                        complex.push((*epoch, known.place, claim));
                        true
                    }
                    _ => {
                        waiting.push((known.place, claim));
                        true
                    }
                }
            } else {
                let step = self.step_of(&key, claim, reservations);
                let is_open = step.is_some();
                steps.extend(step);
                is_open
            };
            if is_open {
                open.insert(key);
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
        self.open = open;
        steps
    }

    /// The next step for a claim that does not wait for devices.
    fn step_of(
        &self,
        key: &Key,
        claim: &Arc<ResourceClaim>,
        reservations: &Reservations,
    ) -> Option<Step> {
        let wanted = self.consumers_of(key, claim, reservations.get(key));
        if allocation(claim).is_none() {
            let is_protected = claim.finalizers().iter().any(|name| name == FINALIZER);
            let is_free = is_protected && self.is_unused(claim, &wanted);
            return is_free.then(|| Step::Release(claim.clone()));
        }
        if is_ending(&**claim) && self.is_unused(claim, &wanted) {
            Some(Step::Release(claim.clone()))
        } else if !is_ending(&**claim) && !reservations.contains_key(key) && self.is_taken(claim) {
            Some(Step::Withdraw(claim.clone()))
        } else if wanted != consumers(claim) {
            let claim = claim.clone();
            Some(Step::Reserve {
                claim,
                consumers: wanted,
            })
        } else {
            None
        }
    }

    /// Reads which pods use which claims, if that may have changed.
    fn read_users(&mut self) {
        if !std::mem::take(&mut self.are_users_old) {
            return;
        }
        let mut users = Reservations::new();
        for pod in self.pods.values().filter(|pod| !is_over(pod)) {
            let Some(uid) = pod.uid() else { continue };
            let namespace = pod.namespace().unwrap_or_default();
            for claim in references(pod).filter_map(|reference| self.name_of(pod, reference)) {
                let of_claim = users.entry((namespace.clone(), claim)).or_default();
                of_claim.insert(uid.clone(), pod.name_any());
            }
        }
        let before = std::mem::replace(&mut self.users, users);
        self.open.extend(differing(&before, &self.users));
    }

    fn take_reservations(&mut self, reservations: &Reservations) {
        self.open.extend(differing(&self.reserved, reservations));
        self.reserved.clone_from(reservations);
    }

    fn steps_of_pods(&mut self) -> Vec<Step> {
        if !self.are_pods_open {
            return Vec::new();
        }
        let steps = self.pods.values().flat_map(|pod| self.steps_of_pod(pod));
        let steps: Vec<_> = steps.collect();
        self.are_pods_open = !steps.is_empty();
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
    pub(super) fn may_release(
        &mut self,
        claim: &ResourceClaim,
        reservations: &Reservations,
    ) -> bool {
        self.read_users();
        let key = key(claim);
        self.is_unused(
            claim,
            &self.consumers_of(&key, claim, reservations.get(&key)),
        )
    }

    fn is_unused(&self, claim: &ResourceClaim, wanted: &[ResourceClaimConsumerReference]) -> bool {
        let is_prepared = claim
            .uid()
            .is_some_and(|uid| self.prepared.claim(&uid).is_some());
        wanted.is_empty() && !is_prepared
    }

    /// The consumers that a claim has, without those that are gone and with those that came, in the order they came.
    fn consumers_of(
        &self,
        key: &Key,
        claim: &ResourceClaim,
        reserving: Option<&BTreeMap<String, String>>,
    ) -> Vec<ResourceClaimConsumerReference> {
        let mut users: BTreeMap<String, String> = reserving.cloned().unwrap_or_default();
        users.extend(self.users.get(key).cloned().unwrap_or_default());
        let kept = consumers(claim).iter().filter(|consumer| {
            // What is no pod is released by who reserved it.
            consumer.resource != "pods"
                || self.prepared.uses(&consumer.uid)
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

    /// The ResourceClaim of a pod's claim: the one that it names, or that was made for it.
    fn name_of(&self, pod: &Pod, reference: &PodResourceClaim) -> Option<String> {
        named(pod, reference).or_else(|| self.made_for(pod, &reference.name))
    }

    /// The claim that was made for a pod's claim, whether its status says so already or not.
    fn made_for(&self, pod: &Pod, pod_claim: &str) -> Option<String> {
        let namespace = pod.namespace().unwrap_or_default();
        let made = self.index.made.get(&(pod.uid()?, pod_claim.to_owned()))?;
        let mut made = made.iter().filter(|(of, _)| *of == namespace);
        made.next().map(|(_, name)| name.clone())
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

    /// Takes out what an allocation needs. It has to end with [`Self::end_allocation`], or with [`Self::use_all`].
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
            let (key, refusal) = (key(&*done.claim), Arc::new(refusal));
            if let Some(known) = self.claims.get_mut(&key) {
                known.refused = Some((self.epoch, refusal.clone()));
                let place = refusal_key(&key, known);
                self.refusals.insert_mut(place, refusal.clone());
                self.shown += 1;
            }
            refusal
        })
    }

    /// Counts again what all claims have, also after an allocation that did not end.
    pub(super) fn use_all(&mut self) {
        self.in_use = InUse::new(self.of_devices.clone());
        let uids = self.index.uids.keys().chain(self.prepared.uids());
        let uids: BTreeSet<_> = uids.cloned().collect();
        uids.iter().for_each(|uid| self.use_of(uid));
    }
}

/// The claims that one of both has otherwise than the other.
fn differing(one: &Reservations, other: &Reservations) -> BTreeSet<Key> {
    let keys = one.keys().chain(other.keys());
    keys.filter(|key| one.get(*key) != other.get(*key))
        .cloned()
        .collect()
}

fn refusal_key(key: &Key, known: &Known) -> (bool, Place, Key) {
    (names::is_of_user(&known.claim), known.place, key.clone())
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
