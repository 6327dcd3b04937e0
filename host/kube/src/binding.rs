//! Claims that a scheduler waits for before it binds a pod: prepared early (KEP-5007, `docs/decisions/0017`).
//!
//! A scheduler sets `status.nominatedNodeName` of a pod, allocates its claims, and waits until the conditions that the devices name are
//! true. Given a watch of the pods that are nominated to this node and the drivers' devices; reads the claims of these pods, and prepares
//! those that are allocated here, for which a scheduler waits and that are reserved. Emits the devices that could not be prepared, for
//! their taint, and the conditions that say so; that a device is prepared is reported with its claim (`manager::claims::kubelet`).
//!
//! A claim that was prepared early is recorded as such until a kubelet requests it. If it is not allocated here any more, its pods are gone
//! or no longer nominated, it is unprepared, also after a restart. A node without such devices opens no watch. Never touches a claim that a
//! kubelet has requested, nor a device of a native plugin, whose own controller sets the conditions.

mod decide;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::future::BoxFuture;
use futures::stream::{BoxStream, FuturesUnordered};
use futures::{FutureExt, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use self::decide::{
    ClaimObservation, ClaimSeen, Consumers, Held, Step, Tracked, is_of_device, is_wanted,
};
use crate::claims::ApiClaims;
use crate::client::{KubeClient, meaning};
use crate::events::{OnRefused, Refusal};
use crate::reconcile::decide::NodePod;
use crate::reconcile::observe::{Place, place_of, pod_of};
use crate::slices::{DriverSnapshot, FailedDevices, SliceSettings};
use crate::status::Reported;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_model::{
    Claim, ClaimRecord, ClaimStatuses, Consumer, DriverName, ObjectName, ObjectRef, Problem,
    ProblemCode, Uid,
};

/// Pods that are nominated to this node: many times those that fit on it. What is beyond waits.
pub(crate) const NOMINATED_PODS_MAX: usize = 1024;

/// Claims that are looked at: more than the claims of a node.
pub(crate) const EARLY_CLAIMS_MAX: usize = 512;

/// Claims that are looked at or prepared at the same time.
const LOOKS_AT_ONCE: usize = 16;

/// Retry interval of a release that failed.
const RELEASE_RETRY: Duration = Duration::from_secs(5);

/// A device that could not be prepared is tainted for so long, as long as a scheduler waits by default.
pub(crate) const FAILED_TAINT: Duration = Duration::from_secs(600);

/// Pods in one answer of a list.
const PODS_PAGE: u32 = 250;

/// Namespace and name of a claim.
type Key = (ObjectName, ObjectName);

/// The claims that are prepared early.
#[async_trait]
pub trait EarlyClaims: Send + Sync {
    /// All that were prepared early and that no kubelet has requested yet.
    fn early(&self) -> Vec<ObjectRef>;

    /// The claim of that name that is held for a kubelet, early or not.
    fn held(&self, namespace: &ObjectName, name: &ObjectName) -> Option<Arc<ClaimRecord>>;

    async fn prepare(&self, driver: &DriverName, claim: Claim) -> Result<(), Problem>;

    /// Does nothing once a kubelet has requested the claim.
    async fn release(&self, claim: &Uid, why: &str) -> Result<(), Problem>;
}

/// Dependencies of the early preparation.
pub struct BindingParts {
    pub client: KubeClient,
    pub node: ObjectName,
    pub claims: ApiClaims,
    pub drivers: watch::Receiver<DriverSnapshot>,
    pub settings: watch::Receiver<SliceSettings>,
    pub early: Arc<dyn EarlyClaims>,
    pub on_refused: OnRefused,
    pub conditions: Conditions,
}

/// Handle to the outcomes of the early preparation.
#[derive(Clone)]
pub struct Binding {
    statuses: watch::Receiver<Reported>,
    failed: watch::Receiver<FailedDevices>,
}

impl Binding {
    /// Starts the task.
    pub fn start(tasks: &Tasks, parts: BindingParts) -> Self {
        let (statuses, failed) = (watch::Sender::default(), watch::Sender::default());
        let binding = Self {
            statuses: statuses.subscribe(),
            failed: failed.subscribe(),
        };
        let early = parts.early.early();
        let mut preparation = EarlyPreparation {
            drivers: parts.drivers.clone(),
            settings: parts.settings.clone(),
            serving: BTreeSet::new(),
            parts: Arc::new(parts),
            statuses,
            failed,
            failed_until: BTreeMap::new(),
            pods: NominatedPods::default(),
            events: None,
            entries: BTreeMap::new(),
            looks: FuturesUnordered::new(),
            is_full: false,
        };
        early
            .into_iter()
            .for_each(|claim| preparation.add((claim.namespace, claim.name)));
        // The manager records its intent before it calls a driver, and brings to an end what it has begun.
        tasks.spawn_until_stopped("binding", preparation.run());
        binding
    }

    /// The failures of claims, by the drivers' names of pools; of others when they were allocated.
    pub fn statuses(&self) -> watch::Receiver<Reported> {
        self.statuses.clone()
    }

    /// The devices that could not be prepared lately.
    pub fn failed(&self) -> watch::Receiver<FailedDevices> {
        self.failed.clone()
    }
}

type PodEvents = BoxStream<'static, watcher::Result<Event<Pod>>>;

struct EarlyPreparation {
    parts: Arc<BindingParts>,
    drivers: watch::Receiver<DriverSnapshot>,
    settings: watch::Receiver<SliceSettings>,
    serving: BTreeSet<DriverName>,
    statuses: watch::Sender<Reported>,
    failed: watch::Sender<FailedDevices>,
    failed_until: BTreeMap<crate::slices::FailedDevice, Instant>,
    pods: NominatedPods,
    /// None: this node has no device for which a scheduler waits.
    events: Option<PodEvents>,
    entries: BTreeMap<Key, Entry>,
    looks: FuturesUnordered<BoxFuture<'static, Looked>>,
    /// Some claim is not looked at, and that was logged.
    is_full: bool,
}

struct Entry {
    /// None while a look is under way.
    tracked: Option<Tracked>,
    due: Instant,
    /// Something changed during the look.
    is_changed: bool,
    statuses: Option<ClaimStatuses>,
}

/// The end of a look at a claim. `after`: when it is to be looked at again; `None`: it is forgotten.
struct Looked {
    key: Key,
    tracked: Tracked,
    /// A prepare has ended, well or not.
    was_prepared: bool,
    after: Option<Duration>,
}

impl EarlyPreparation {
    async fn run(mut self) {
        let mut lost = self.parts.claims.lost();
        loop {
            self.open_or_close();
            self.begin_looks();
            let due = self.next_due();
            tokio::select! {
                // Events, and the newest drivers, stay in their channels until they are received.
                Some(looked) = self.looks.next(), if !self.looks.is_empty() => self.looked(looked),
                Some(event) = next(&mut self.events), if self.events.is_some() => self.observe(event),
                Ok(()) = self.drivers.changed() => self.drivers_changed(),
                Ok(()) = lost.changed() => self.hurry(|_| true),
                Ok(()) = self.settings.changed() => self.hurry(|_| true),
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => self.expire_failed(),
            }
        }
    }

    /// Watches pods only while a scheduler may wait for a device of this node, or a claim is prepared early.
    fn open_or_close(&mut self) {
        let settings = self.settings.borrow();
        let is_needed = settings.waits_for_binding(&self.drivers.borrow());
        drop(settings);
        if !is_needed && self.entries.is_empty() {
            self.events = None;
            self.pods = NominatedPods::default();
            self.parts.conditions.clear(
                ProblemCode::NominatedPodsUnreadable,
                self.parts.node.as_str(),
            );
        } else if self.events.is_none() {
            tracing::info!(
                "pods that are nominated to this node are watched: a device has binding conditions"
            );
            self.events = Some(nominated_pods(&self.parts.client, &self.parts.node));
        }
        let named: Vec<Key> = if is_needed {
            self.pods.claims().collect()
        } else {
            Vec::new()
        };
        named.into_iter().for_each(|key| self.add(key));
    }

    fn add(&mut self, key: Key) {
        if self.entries.contains_key(&key) {
            return;
        }
        if self.entries.len() >= EARLY_CLAIMS_MAX {
            if !std::mem::replace(&mut self.is_full, true) {
                tracing::warn!(
                    max = EARLY_CLAIMS_MAX,
                    "claims of nominated pods wait, since others are looked at"
                );
            }
            return;
        }
        let entry = Entry {
            tracked: Some(Tracked::default()),
            due: Instant::now(),
            is_changed: false,
            statuses: None,
        };
        self.entries.insert(key, entry);
    }

    /// Nothing is decided before all nominated pods are known: a claim must not be released because its pod is not listed yet.
    fn begin_looks(&mut self) {
        let now = Instant::now();
        if !self.pods.is_listed {
            return;
        }
        let due = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.tracked.is_some() && entry.due <= now);
        // The one that waited the longest comes first.
        let mut due: Vec<(Instant, Key)> =
            due.map(|(key, entry)| (entry.due, key.clone())).collect();
        due.sort();
        for (_, key) in due
            .into_iter()
            .take(LOOKS_AT_ONCE.saturating_sub(self.looks.len()))
        {
            let tracked = self
                .entries
                .get_mut(&key)
                .and_then(|entry| entry.tracked.take());
            let Some(tracked) = tracked else { continue };
            let nominated = self.pods.naming(&key);
            self.looks
                .push(look(self.parts.clone(), key, tracked, nominated).boxed());
        }
    }

    fn next_due(&self) -> Option<Instant> {
        let can_begin = self.pods.is_listed && self.looks.len() < LOOKS_AT_ONCE;
        let idle = self
            .entries
            .values()
            .filter(|entry| can_begin && entry.tracked.is_some());
        idle.map(|entry| entry.due)
            .chain(self.failed_until.values().copied())
            .min()
    }

    /// A driver that is loaded may have been waited for.
    fn drivers_changed(&mut self) {
        let serving: BTreeSet<DriverName> = self
            .drivers
            .borrow_and_update()
            .serving
            .keys()
            .cloned()
            .collect();
        if serving != self.serving {
            self.serving = serving;
            self.hurry(|_| true);
        }
    }

    /// Looks at some claims at once.
    fn hurry(&mut self, is_meant: impl Fn(&Key) -> bool) {
        let now = Instant::now();
        for (_, entry) in self.entries.iter_mut().filter(|(key, _)| is_meant(key)) {
            (entry.due, entry.is_changed) = (now, true);
            entry.tracked.iter_mut().for_each(Tracked::hurry);
        }
    }

    fn observe(&mut self, event: watcher::Result<Event<Pod>>) {
        let event = match event {
            Ok(event) => event,
            Err(error) => return self.unreadable(error),
        };
        if !matches!(event, Event::Init) {
            self.parts.conditions.clear(
                ProblemCode::NominatedPodsUnreadable,
                self.parts.node.as_str(),
            );
        }
        let changed = self.pods.apply(event, &self.parts.node);
        self.hurry(|key| changed.contains(key));
    }

    fn unreadable(&self, error: watcher::Error) {
        let error = meaning(error);
        // An unreachable API server is a condition of its own.
        if error.is_unreachable() || error.is_retryable() {
            return tracing::debug!(%error, "nominated pods cannot be watched now");
        }
        let message = format!(
            "pods that are nominated to this node cannot be watched, and a scheduler waits in vain for devices with binding conditions: \
             {error}; it takes the right to watch pods, and Kubernetes 1.35 or later"
        );
        let problem = Problem::unavailable(ProblemCode::NominatedPodsUnreadable, message);
        self.parts.conditions.set(self.parts.node.as_str(), problem);
    }

    fn looked(&mut self, looked: Looked) {
        let Looked {
            key,
            mut tracked,
            was_prepared,
            after,
        } = looked;
        let now = Instant::now();
        if was_prepared {
            self.taint(&tracked, now);
            self.report_failure(&tracked);
        }
        let Some(entry) = self.entries.get_mut(&key) else {
            return;
        };
        entry.statuses = tracked.statuses();
        let is_changed = std::mem::take(&mut entry.is_changed);
        match after {
            // Its pods may have changed meanwhile.
            None if !is_changed => {
                self.entries.remove(&key);
                self.is_full = false;
            }
            after => {
                if is_changed {
                    tracked.hurry();
                }
                let after = after.filter(|_| !is_changed).unwrap_or_default();
                (entry.tracked, entry.due) = (Some(tracked), now + after);
            }
        }
        let known = self
            .entries
            .values()
            .filter_map(|entry| entry.statuses.clone());
        let known: Reported = known
            .map(|statuses| (statuses.claim.uid.clone(), statuses))
            .collect();
        self.statuses.send_if_modified(|statuses| {
            let is_new = *statuses != known;
            *statuses = known;
            is_new
        });
    }

    fn report_failure(&self, tracked: &Tracked) {
        if let (Some((_, _, problem)), Some(claim)) = (tracked.failure(), tracked.claim()) {
            let (claim, consumers) = (&claim.id, claim.reserved_for.as_slice());
            (self.parts.on_refused)(&Refusal {
                action: "Prepare",
                claim,
                consumers,
                problem,
            });
        }
    }

    /// Taints the devices that could not be prepared, and no longer those that were.
    fn taint(&mut self, tracked: &Tracked, now: Instant) {
        for device in tracked.prepared_devices() {
            self.failed_until.remove(&(
                device.driver.clone(),
                device.pool.clone(),
                device.device.clone(),
            ));
        }
        if let Some((driver, devices, problem)) = tracked
            .failure()
            .filter(|(.., problem)| is_of_device(problem))
        {
            for device in devices {
                let key = (driver.clone(), device.pool.clone(), device.device.clone());
                let device = &device.device;
                tracing::warn!(%driver, %device, %problem, "a device that cannot be prepared is tainted for a while");
                self.failed_until.insert(key, now + FAILED_TAINT);
            }
        }
        self.publish_failed();
    }

    fn expire_failed(&mut self) {
        let now = Instant::now();
        self.failed_until.retain(|_, until| *until > now);
        self.publish_failed();
    }

    fn publish_failed(&self) {
        let failed: FailedDevices = self.failed_until.keys().cloned().collect();
        self.failed.send_if_modified(|known| {
            let is_new = *known != failed;
            *known = failed;
            is_new
        });
    }
}

async fn next(events: &mut Option<PodEvents>) -> Option<watcher::Result<Event<Pod>>> {
    events.as_mut()?.next().await
}

/// Never ends: after an error it waits and lists again.
fn nominated_pods(client: &KubeClient, node: &ObjectName) -> PodEvents {
    let fields = format!("status.nominatedNodeName={node}");
    let config = watcher::Config::default()
        .fields(&fields)
        .page_size(PODS_PAGE);
    watcher(Api::<Pod>::all(client.client()), config)
        .default_backoff()
        .boxed()
}

/// Pods that are nominated to this node and not finished.
#[derive(Default)]
struct NominatedPods {
    pods: BTreeMap<Uid, NodePod>,
    /// Pods of a list that is not complete yet.
    listing: BTreeMap<Uid, NodePod>,
    is_listed: bool,
    is_full: bool,
}

impl NominatedPods {
    /// Takes an event, and returns the claims of the pods that it changed.
    fn apply(&mut self, event: Event<Pod>, node: &ObjectName) -> BTreeSet<Key> {
        match event {
            Event::Init => self.listing.clear(),
            Event::InitApply(pod) => {
                if let Some(pod) =
                    nominated(pod, node).filter(|_| has_room(&mut self.is_full, &self.listing))
                {
                    self.listing.insert(pod.uid.clone(), pod);
                }
            }
            Event::InitDone => {
                self.is_listed = true;
                let before = std::mem::replace(&mut self.pods, std::mem::take(&mut self.listing));
                return before
                    .values()
                    .chain(self.pods.values())
                    .flat_map(keys)
                    .collect();
            }
            Event::Apply(pod) => {
                let uid = pod.metadata.uid.clone().unwrap_or_default();
                let Some(pod) = nominated(pod, node) else {
                    return self.remove(&uid);
                };
                if self.pods.contains_key(&pod.uid) || has_room(&mut self.is_full, &self.pods) {
                    let changed = keys(&pod).collect();
                    self.pods.insert(pod.uid.clone(), pod);
                    return changed;
                }
            }
            Event::Delete(pod) => return self.remove(&pod.metadata.uid.unwrap_or_default()),
        }
        BTreeSet::new()
    }

    fn remove(&mut self, uid: &str) -> BTreeSet<Key> {
        let removed = Uid::new(uid).ok().and_then(|uid| self.pods.remove(&uid));
        removed.iter().flat_map(keys).collect()
    }

    fn claims(&self) -> impl Iterator<Item = Key> {
        self.pods.values().flat_map(keys)
    }

    fn naming(&self, (namespace, name): &Key) -> BTreeSet<Uid> {
        let naming = self
            .pods
            .values()
            .filter(|pod| pod.namespace == *namespace && pod.claims.contains(name));
        naming.map(|pod| pod.uid.clone()).collect()
    }
}

fn has_room(is_full: &mut bool, pods: &BTreeMap<Uid, NodePod>) -> bool {
    let is_now_full = pods.len() >= NOMINATED_PODS_MAX;
    if is_now_full && !std::mem::replace(is_full, true) {
        tracing::warn!(
            max = NOMINATED_PODS_MAX,
            "more pods are nominated to this node than are looked at"
        );
    }
    !is_now_full
}

fn keys(pod: &NodePod) -> impl Iterator<Item = Key> {
    pod.claims
        .iter()
        .map(|name| (pod.namespace.clone(), name.clone()))
}

/// The pod, if it is nominated to the node and not bound or finished. A server that does not know the selector gives others too.
fn nominated(pod: Pod, node: &ObjectName) -> Option<NodePod> {
    let nominated = pod
        .status
        .as_ref()
        .and_then(|status| status.nominated_node_name.as_deref());
    let bound = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.node_name.as_deref())
        .unwrap_or_default();
    if nominated != Some(node.as_str()) || !bound.is_empty() {
        return None;
    }
    let pod =
        pod_of(pod).inspect_err(|error| tracing::debug!(%error, "a nominated pod is left out"));
    pod.ok().filter(|pod| !pod.finished)
}

/// Looks at a claim once, and does what is to be done.
async fn look(
    parts: Arc<BindingParts>,
    key: Key,
    mut tracked: Tracked,
    nominated: BTreeSet<Uid>,
) -> Looked {
    let seen = observe(&parts, &key, nominated).await;
    let step = tracked.step(&seen, Instant::now());
    let was_prepared = step == Step::Prepare;
    let after = match step {
        Step::Forget => None,
        Step::Wait(after) => Some(after),
        Step::Prepare => {
            let outcome = prepare(&parts, &seen).await;
            Some(tracked.prepared(outcome, Instant::now()))
        }
        Step::Release(uid, why) => match parts.early.release(&uid, why.words()).await {
            Ok(()) => {
                let (namespace, name, why) = (&key.0, &key.1, why.words());
                tracing::info!(%namespace, %name, %uid, why, "a claim that was prepared early is released");
                tracked.released(Instant::now());
                Some(Duration::ZERO)
            }
            Err(problem) => {
                tracing::debug!(%uid, %problem, "a claim that was prepared early is not released yet");
                Some(RELEASE_RETRY)
            }
        },
    };
    Looked {
        key,
        tracked,
        was_prepared,
        after,
    }
}

/// Prepares the parts of the drivers for whose devices a scheduler waits. Fails with the first driver that did not.
async fn prepare(
    parts: &BindingParts,
    seen: &ClaimObservation,
) -> Result<(), (DriverName, Problem)> {
    let ClaimSeen::Here(claim) = &seen.claim else {
        return Ok(());
    };
    for driver in &claim.awaited {
        let prepared = parts.early.prepare(driver, claim.claim.clone()).await;
        prepared.map_err(|problem| {
            tracing::debug!(claim = %claim.claim.id, %driver, %problem, "a claim is not prepared early");
            (driver.clone(), problem)
        })?;
    }
    Ok(())
}

async fn observe(parts: &BindingParts, key: &Key, nominated: BTreeSet<Uid>) -> ClaimObservation {
    let claim = match parts.claims.scheduled(&key.0, &key.1).await {
        Ok(None) => ClaimSeen::Gone,
        Ok(Some(claim)) => {
            let node = claim
                .claim
                .allocation
                .as_ref()
                .map(|allocation| allocation.node_name.as_deref());
            match node {
                Some(node) if node.is_none_or(|node| node == parts.node.as_str()) => {
                    ClaimSeen::Here(Box::new(claim))
                }
                Some(_) | None => ClaimSeen::NotHere,
            }
        }
        Err(problem) => {
            tracing::debug!(namespace = %key.0, name = %key.1, %problem, "a claim of a nominated pod is not read");
            ClaimSeen::Unknown
        }
    };
    let record = parts.early.held(&key.0, &key.1);
    let held = match &record {
        None => Held::Free,
        Some(record) if record.is_held_early() => Held::Early {
            uid: record.id.uid.clone(),
            allocation: record.allocation.clone(),
        },
        Some(_) => Held::Kubelet,
    };
    let consumers = match (&held, &claim) {
        (Held::Early { .. }, ClaimSeen::Here(claim)) if !is_wanted(&claim.claim, &nominated) => {
            let recorded = record
                .iter()
                .flat_map(|record| &record.kubelet)
                .flat_map(|hold| &hold.consumers);
            consumers(
                parts,
                &key.0,
                claim.claim.reserved_for.iter().chain(recorded),
            )
            .await
        }
        _ => Consumers::Unknown,
    };
    ClaimObservation {
        nominated,
        claim,
        held,
        consumers,
    }
}

/// Returns the state of a claim's consumers, by the places of their pods.
async fn consumers<'a>(
    parts: &BindingParts,
    namespace: &ObjectName,
    consumers: impl Iterator<Item = &'a Consumer>,
) -> Consumers {
    let consumers: BTreeSet<&Consumer> = consumers.collect();
    let mut found = Consumers::Gone;
    for consumer in consumers {
        // Of other consumers it is not known where their pods are.
        let place = match consumer.is_pod() {
            true => place_of(&parts.client, &parts.node, namespace, consumer)
                .await
                .unwrap_or(Place::Unknown),
            false => Place::Unbound,
        };
        match place {
            Place::Here => return Consumers::Bound,
            Place::Unknown => found = Consumers::Unknown,
            Place::Unbound if found == Consumers::Gone => found = Consumers::Waiting,
            Place::Unbound | Place::Elsewhere => {}
        }
    }
    found
}
