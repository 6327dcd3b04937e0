//! Claims of a machine without a cluster: what Kubernetes' scheduler and its controller of claims do, on the objects of the local API.
//!
//! One task reads all objects and decides (`state`, pure): it makes the claims of pods' templates, allocates claims in the order of their
//! creation, one at a time, names their consumers, and ends the allocation of a claim that is deleted and not in use any more. Each write
//! (`writes`) is durable before the next decision. Claims that belong to processes end with these (`processes`), and the slices of native drivers
//! some time after these (`departed`). Claims that wait have Events (`events`).

mod default_classes;
mod departed;
mod events;
mod names;
mod node_claims;
mod objects;
mod processes;
mod state;
#[cfg(test)]
mod tests;
mod writes;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures::future::join_all;
use futures::{FutureExt, StreamExt};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use nodedock_allocator::allocate::NodeRef;
use parking_lot::Mutex;
use rpds::RedBlackTreeMapSync;
use serde_json::json;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};

use self::objects::Key;
use self::state::{LocalClaimsState, Refusals, Reservations, Step, allocation};
use self::writes::Writes;
use crate::claims;
use crate::client::{ApiError, ErrorKind, KubeClient};
use crate::events::EventWriter;
use crate::pools::NodePools;
use nodedock_base::backoff::Backoff;
use nodedock_base::changes::Changes;
use nodedock_base::tasks::Tasks;
use nodedock_base::woken;
use nodedock_core::manager::claims::source::ClaimSource;
use nodedock_model::{
    Allocation, ChangedKind, Claim, ObjectName, ObjectRef, Problem, ProblemCode, Uid, limit,
};

pub use self::names::{CONTAINER_NAMESPACE, LocalNames, NamesListener, user_namespace};
pub use self::node_claims::{NodeChanges, NodeClaim};
pub use self::processes::{
    CONSUMER_ANNOTATION, CREATOR_ANNOTATION, PROCESS_ANNOTATION, annotation_of,
};
pub use self::state::FINALIZER;
pub use nodedock_allocator::allocate::{DeviceHolds, Excluded, NotAllocated, NotAllocatedKind};

/// Time that a prepare waits until its claims are allocated and reserved for its pod: who waits longer for a device waits for the claim.
const RESERVE_WAIT: Duration = Duration::from_secs(10);

/// Pause after a write that failed, doubled up to the second.
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(10);

/// Owner of the fields of classes that files set.
const CLASS_FILES_MANAGER: &str = "nodedock-device-class-files";

/// Claims that are released together: their writes share commits.
const RELEASES_AT_ONCE: usize = 64;

/// Maximum time of a round for each kind of steps (releases, those that a pod may wait for, all others), besides the step that is under way: a
/// request waits for the end of a round, however many claims another one makes or deletes. Three of them are less than the 100 ms that one may wait.
const ROUND_MAX: Duration = Duration::from_millis(25);

/// Maximum time for which releases wait for the other steps.
const RELEASE_DELAY_MAX: Duration = Duration::from_millis(50);

/// Claims that the node has prepared, and their release.
#[async_trait]
pub trait PreparedClaims: Send + Sync {
    /// Returns what changed since a revision of an earlier answer; all claims, if there is none or it is too long ago.
    fn node_changes(&self, seen: Option<u64>) -> NodeChanges;

    /// Returns the holds of this node's devices: what each keeps from others because of the hardware behind it.
    fn device_holds(&self) -> Arc<DeviceHolds>;

    /// Unprepares the pods that use a claim.
    async fn unprepare_users(&self, claim: &str) -> Result<(), Problem>;

    /// Unprepares the pod with this UID if it uses the claim. One that does not is a success.
    async fn unprepare_user(&self, claim: &str, pod: &str) -> Result<(), Problem>;
}

/// Dependencies of the claims of the local API.
pub struct LocalParts {
    pub client: KubeClient,
    /// Name of the object of the node.
    pub node: ObjectName,
    pub changes: Changes,
    pub tasks: Tasks,
}

/// Handle to the claims of the local API.
#[derive(Clone)]
pub struct LocalClaims(Arc<LocalClaimStore>);

struct LocalClaimStore {
    client: KubeClient,
    pools: NodePools,
    reservations: Mutex<Reservations>,
    /// UIDs of claims whose devices a prepare found with others.
    refused: Mutex<Vec<String>>,
    wake: Notify,
    view: watch::Sender<Arc<View>>,
    /// Rounds of decisions that began, and that ended with nothing more to do.
    begun: AtomicU64,
    settled: watch::Sender<u64>,
}

/// The claims after a decision, and why some are not allocated.
#[derive(Default)]
struct View {
    /// [`LocalClaimsState::shown`] of its time.
    shown: u64,
    /// `pods` and `unmade` are of this time as well, and not of the end of the last round.
    is_whole: bool,
    claims: RedBlackTreeMapSync<Key, Arc<ResourceClaim>>,
    refused: Refusals,
    /// Of these claims.
    pods: Arc<BTreeMap<Key, Vec<ObjectRef>>>,
    unmade: Arc<Vec<UnmadeClaim>>,
    /// Names of the claims that the node has prepared, by UID.
    prepared: RedBlackTreeMapSync<String, Key>,
    /// Names of the DeviceClasses.
    classes: Vec<String>,
}

/// Number of the claims that wait for devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PendingClaims {
    pub number: usize,
    /// Creation of the oldest of them; milliseconds since the Unix epoch.
    pub oldest_ms: Option<u64>,
}

/// A claim that is not allocated.
#[derive(Debug)]
pub struct WaitingClaim {
    pub id: ObjectRef,
    pub why: Arc<NotAllocated>,
    /// Claims with devices that it could have, as `NAMESPACE/NAME`, or by UID if they are gone.
    pub holders: Vec<String>,
    /// The same by UID.
    names: BTreeMap<String, String>,
    /// Pods that are to have its devices, not all if there are many.
    pub pods: Vec<ObjectRef>,
}

/// A claim of a pod that cannot be made, as its ResourceClaimTemplate is not there.
#[derive(Debug, Clone, PartialEq, Eq)]
struct UnmadeClaim {
    pod: ObjectRef,
    /// Name of the claim in the pod.
    claim: String,
    template: String,
}

impl WaitingClaim {
    fn new(id: ObjectRef, why: Arc<NotAllocated>, names: BTreeMap<String, String>) -> Self {
        let holders = BTreeSet::from_iter(names.values().cloned());
        Self {
            id,
            why,
            holders: holders.into_iter().collect(),
            names,
            pods: Vec::new(),
        }
    }

    /// Replaces the names of claims of other namespaces.
    pub fn hide_others(&mut self, namespace: &str) {
        let is_own = |holder: &String| {
            let parts = holder.split_once('/');
            parts.is_some_and(|(of, _)| of == namespace)
        };
        let before = self.holders.len();
        self.holders.retain(is_own);
        if self.holders.len() < before {
            self.holders.push("claims of other users".to_owned());
        }
        let others = self.names.values_mut().filter(|name| !is_own(name));
        others.for_each(|name| "of another user".clone_into(name));
    }

    /// Returns why the claim cannot have a device, with the name of the claim that has it.
    pub fn reason(&self, excluded: &Excluded) -> String {
        let holder = excluded.claim.as_ref();
        match holder.and_then(|uid| Some((uid, self.names.get(uid)?))) {
            Some((uid, name)) => excluded.reason.replace(uid, name),
            None => excluded.reason.clone(),
        }
    }
}

/// Keeps claims reserved for a pod until its prepare has ended: then the node's own record of the pod does.
pub struct Reservation {
    shared: Arc<LocalClaimStore>,
    pod: String,
    claims: Vec<Key>,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut reservations = self.shared.reservations.lock();
        for key in &self.claims {
            if let Some(pods) = reservations.get_mut(key) {
                pods.remove(&self.pod);
            }
        }
        reservations.retain(|_, pods| !pods.is_empty());
        drop(reservations);
        self.shared.wake.notify_one();
    }
}

impl LocalClaims {
    pub fn new(client: KubeClient, pools: NodePools) -> Self {
        let shared = LocalClaimStore {
            client,
            pools,
            reservations: Mutex::default(),
            refused: Mutex::default(),
            wake: Notify::new(),
            view: watch::Sender::default(),
            begun: AtomicU64::new(0),
            settled: watch::Sender::default(),
        };
        Self(Arc::new(shared))
    }

    /// Starts the task that decides, and those that follow processes and native drivers.
    pub fn start(&self, parts: LocalParts, prepared: Arc<dyn PreparedClaims>) {
        let node = NodeRef {
            name: parts.node.to_string(),
            labels: BTreeMap::new(),
        };
        let registry = self.0.pools.registry.clone();
        let (drivers, connected) = (parts.changes.signal_of(ChangedKind::Driver), move || {
            registry.instances.connected()
        });
        let wipe = departed::wipe(parts.client.clone(), parts.node.clone(), drivers, connected);
        parts.tasks.spawn_until_stopped("departed-drivers", wipe);
        let writer = EventWriter::new(parts.client.client(), &parts.node);
        let publish = events::publish(self.clone(), writer);
        parts.tasks.spawn_until_stopped("claim-events", publish);
        let writes = Writes::new(parts.client.clone(), parts.node);
        let run = run(
            self.0.clone(),
            LocalClaimsState::new(node),
            writes,
            prepared.clone(),
            parts.changes,
        );
        parts.tasks.spawn_until_stopped("local-claims", run);
        let follow = processes::follow(parts.client, self.0.view.subscribe(), prepared);
        parts.tasks.spawn_until_stopped("claim-processes", follow);
    }

    /// Returns whether a claim, by namespace and name, ends with processes.
    pub fn ends_with_processes(&self, claim: &(String, String)) -> bool {
        let view = self.0.view.borrow();
        view.claims
            .get(claim)
            .is_some_and(|claim| names::ends_with_processes(claim))
    }

    /// Returns what containers may name.
    pub fn names(&self) -> LocalNames {
        LocalNames::of(&self.0.view.borrow().clone())
    }

    /// Returns what containers may name, now and after each change.
    pub fn names_listener(&self) -> NamesListener {
        NamesListener {
            views: self.0.view.subscribe(),
            last: None,
        }
    }

    /// Counts the claims that wait for devices.
    pub fn pending(&self) -> PendingClaims {
        let view = self.0.view.borrow().clone();
        let claims = view.refusals();
        let created = claims.filter_map(|(key, _)| view.claims.get(key)?.creation_timestamp());
        let created_ms = created.map(|time| u64::try_from(time.0.as_millisecond()).unwrap_or(0));
        PendingClaims {
            number: view.refused.size(),
            oldest_ms: created_ms.min(),
        }
    }

    /// Returns the claims that are not allocated, in the order in which they are tried.
    pub fn waiting(&self) -> Vec<WaitingClaim> {
        let view = self.0.view.borrow().clone();
        if view.refused.is_empty() {
            return Vec::new();
        }
        let names: BTreeMap<_, _> = view
            .claims
            .iter()
            .filter_map(|(key, claim)| Some((claim.uid()?, key)))
            .collect();
        let waiting = view.refusals().filter_map(|(key, why)| {
            let uid = view.claims.get(key)?.uid()?;
            let holders = why
                .devices
                .iter()
                .filter_map(|device| device.claim.as_ref());
            let holders = holders.map(|uid| {
                // A claim of a manifest has no object.
                let key = names.get(uid).copied().or_else(|| view.prepared.get(uid));
                let name = key.map(|(namespace, name)| format!("{namespace}/{name}"));
                (uid.clone(), name.unwrap_or_else(|| uid.clone()))
            });
            let id = ObjectRef::new(&key.0, &key.1, &uid).ok()?;
            Some(WaitingClaim {
                pods: view.pods.get(key).cloned().unwrap_or_default(),
                ..WaitingClaim::new(id, why.clone(), holders.collect())
            })
        });
        waiting.collect()
    }

    /// Waits until claims are allocated, and reserves them for a pod. Claims that are not here are left to the prepare, which names them.
    ///
    /// # Errors
    ///
    /// A claim is not allocated in time, with the reason.
    pub async fn reserve(
        &self,
        pod: &ObjectRef,
        claims: &[ObjectName],
    ) -> Result<Reservation, Problem> {
        let keys: Vec<Key> = claims
            .iter()
            .map(|name| (pod.namespace.to_string(), name.to_string()))
            .collect();
        let mut view = self.0.view.subscribe();
        let reservation = Reservation {
            shared: self.0.clone(),
            pod: pod.uid.to_string(),
            claims: keys.clone(),
        };
        {
            let mut reservations = self.0.reservations.lock();
            for key in &keys {
                let pods = reservations.entry(key.clone()).or_default();
                pods.insert(pod.uid.to_string(), pod.name.to_string());
            }
        }
        woken::note();
        self.0.wake.notify_one();
        let mut missing = Vec::new();
        for key in &keys {
            if !view.borrow().claims.contains_key(key) && !self.exists(key).await? {
                missing.push(key);
            }
        }
        let is_reserved = |view: &View, key: &Key| {
            missing.contains(&key)
                || view.claims.get(key).is_some_and(|claim| {
                    let consumers = claim
                        .status
                        .iter()
                        .flat_map(|status| status.reserved_for.iter().flatten());
                    allocation(claim).is_some()
                        && consumers
                            .into_iter()
                            .any(|found| found.uid == reservation.pod)
                })
        };
        let all = view.wait_for(|view| {
            keys.iter().all(|key| is_reserved(view, key))
                || keys.iter().any(|key| is_ending(view, key))
        });
        // What did not come is named below.
        let _ = timeout(RESERVE_WAIT, all).await;
        let view = self.0.view.borrow().clone();
        if let Some(key) = keys.iter().find(|key| is_ending(&view, key)) {
            let message = format!("claim {}/{} is being deleted", key.0, key.1);
            return Err(Problem::conflict(ProblemCode::ClaimNotAllocated, message));
        }
        let waits = keys.iter().find(|key| !is_reserved(&view, key));
        let Some(key) = waits else {
            return Ok(reservation);
        };
        let why = match view.refusals().find(|(refused, _)| *refused == key) {
            Some((_, refusal)) => refusal.message.clone(),
            None => "it was not decided in time".to_owned(),
        };
        let message = format!("claim {}/{} is not allocated: {why}", key.0, key.1);
        Err(Problem::unavailable(
            ProblemCode::ClaimNotAllocated,
            message,
        ))
    }

    /// Has claims allocated again that a prepare refused because others have their devices, and waits until that is decided. A claim whose
    /// prepare is under way for another pod stays as it is.
    pub async fn allocate_again(&self, refused: impl Iterator<Item = &Uid>) {
        self.0
            .refused
            .lock()
            .extend(refused.map(ToString::to_string));
        let begun = self.0.begun.load(Ordering::SeqCst);
        let mut settled = self.0.settled.subscribe();
        self.0.wake.notify_one();
        // no error: the claim is decided later then, and its prepare says what it waits for
        let _ = timeout(RESERVE_WAIT, settled.wait_for(|round| *round > begun)).await;
    }

    /// Returns whether the API has a claim that the last decision did not know.
    async fn exists(&self, key: &Key) -> Result<bool, Problem> {
        let claims = Api::<ResourceClaim>::namespaced(self.0.client.urgent(), &key.0);
        match claims.get_metadata(&key.1).await.map_err(ApiError::from) {
            Ok(_) => Ok(true),
            Err(error) if error.kind == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error.problem()),
        }
    }
}

fn is_ending(view: &View, key: &Key) -> bool {
    view.claims
        .get(key)
        .is_some_and(|claim| claim.metadata.deletion_timestamp.is_some())
}

/// Makes or updates a DeviceClass, whose fields that are set here belong to its file. Fields that it does not have are refused.
///
/// # Errors
///
/// The local API refuses it, or cannot store it.
pub async fn apply_class(
    client: &KubeClient,
    name: &str,
    class: &serde_json::Value,
) -> Result<(), ApiError> {
    let params = PatchParams::apply(CLASS_FILES_MANAGER)
        .force()
        .validation_strict();
    let classes = Api::<DeviceClass>::all(client.client());
    let applied = classes.patch(name, &params, &Patch::Apply(class)).await;
    applied.map(drop).map_err(ApiError::from)
}

/// Makes the object of this node, if there is none, and says that it is ready.
///
/// # Errors
///
/// The local API refuses it, or cannot store it.
pub async fn ensure_node(client: &KubeClient, name: &ObjectName) -> Result<(), ApiError> {
    let arch = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let hostname = name.within(limit::LABEL_BYTES_MAX);
    let labels = [
        ("hostname", hostname.as_str()),
        ("os", "linux"),
        ("arch", arch),
    ];
    let labels = labels.map(|(label, value)| (format!("kubernetes.io/{label}"), value.to_owned()));
    let mut node = Node::default();
    node.metadata.name = Some(name.to_string());
    node.metadata.labels = Some(BTreeMap::from(labels));
    let nodes = Api::<Node>::all(client.client());
    match nodes
        .create(&PostParams::default(), &node)
        .await
        .map_err(ApiError::from)
    {
        Err(error) if error.kind != ErrorKind::Conflict => return Err(error),
        _ => {}
    }
    let now = Timestamp::now().to_string();
    let ready = json!({ "type": "Ready", "status": "True", "reason": "DaemonReady",
        "message": "the daemon allocates and prepares claims", "lastHeartbeatTime": now, "lastTransitionTime": now });
    let status = Patch::Merge(json!({ "status": { "conditions": [ready] } }));
    nodes
        .patch_status(name.as_str(), &PatchParams::default(), &status)
        .await?;
    Ok(())
}

#[async_trait]
impl ClaimSource for LocalClaims {
    async fn claim(
        &self,
        namespace: &ObjectName,
        name: &ObjectName,
    ) -> Result<Option<Claim>, Problem> {
        let key = (namespace.to_string(), name.to_string());
        let known = self.0.view.borrow().claims.get(&key).cloned();
        known
            .map(|claim| claims::local(&claim, &self.0.pools))
            .transpose()
    }

    fn allocated(&self) -> Vec<(Uid, Allocation)> {
        let view = self.0.view.borrow().clone();
        let local = |claim: &Arc<ResourceClaim>| {
            allocation(claim)?;
            match claims::local(claim, &self.0.pools) {
                Ok(claim) => Some((claim.id.uid, claim.allocation?)),
                Err(problem) => {
                    // The API took it, and a prepare of it says the same.
                    tracing::warn!(claim = claim.name_any(), %problem, "an allocated claim cannot be read");
                    None
                }
            }
        };
        view.claims.values().filter_map(local).collect()
    }

    fn allocates(&self, claim: &ObjectRef) -> bool {
        let key = (claim.namespace.to_string(), claim.name.to_string());
        let view = self.0.view.borrow();
        view.claims
            .get(&key)
            .is_some_and(|known| known.uid().is_some_and(|uid| uid == claim.uid.as_str()))
    }
}

/// Decides and writes, again after each change, and reads what changed before each round of decisions.
async fn run(
    shared: Arc<LocalClaimStore>,
    mut state: LocalClaimsState,
    writes: Writes,
    prepared: Arc<dyn PreparedClaims>,
    changes: Changes,
) {
    let mut objects = objects::changes(&shared.client.client());
    let mut of_node = changes.signal_of(ChangedKind::Claim);
    let mut backoff = Backoff::new(RETRY_MIN, RETRY_MAX);
    let mut again = Again::AfterChange;
    let mut unfinished = Unfinished::default();
    loop {
        let paused = async {
            match again {
                Again::Now => {}
                Again::After(delay) => sleep(delay).await,
                Again::AfterChange => std::future::pending().await,
            }
        };
        tokio::select! {
            Some(change) = objects.next() => state.apply(change),
            () = shared.wake.notified() => {}
            Ok(()) = of_node.changed() => {}
            () = paused => {}
        }
        while let Some(Some(change)) = objects.next().now_or_never() {
            state.apply(change);
        }
        let round = shared.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let decided = decide(&shared, &mut state, &writes, &*prepared, &mut unfinished).await;
        again = match decided {
            Ok(is_done) => {
                backoff.reset();
                if is_done {
                    Again::AfterChange
                } else {
                    Again::Now
                }
            }
            Err(error) => {
                // Another writer was first, and the watch brings what it wrote; or the disk takes no writes.
                tracing::debug!(%error, "an object of the local API is not written, retrying");
                Again::After(backoff.delay())
            }
        };
        shared.publish(&state, true);
        if matches!(again, Again::AfterChange) {
            shared.settled.send_replace(round);
        }
    }
}

impl LocalClaimStore {
    /// Reads the reservations, and what the node has prepared, in this order: a reservation ends when its pod is in the latter.
    fn in_use(&self, state: &mut LocalClaimsState, prepared: &dyn PreparedClaims) -> Reservations {
        let reservations = self.reservations.lock().clone();
        // Taken before what the node has prepared is read, since a claim that was refused is not prepared any more; counted after it.
        let refused = std::mem::take(&mut *self.refused.lock());
        state.set_device_holds(prepared.device_holds());
        state.follow_node(prepared.node_changes(state.prepared.seen()));
        refused.into_iter().for_each(|uid| state.refuse(uid));
        reservations
    }

    /// Shows the claims to those who wait for them, unless they were shown. What looks at every pod is shown at the end of a round.
    fn publish(&self, state: &LocalClaimsState, is_end: bool) {
        let known = self.view.borrow().clone();
        if known.shown == state.shown && (known.is_whole || !is_end) {
            return;
        }
        let (pods, unmade) = match is_end {
            true => (state.pods_of_refused().into(), state.unmade().into()),
            false => (known.pods.clone(), known.unmade.clone()),
        };
        self.view.send_replace(Arc::new(View {
            shown: state.shown,
            is_whole: is_end,
            claims: state.claims(),
            refused: state.refusals(),
            pods,
            unmade,
            prepared: state.prepared.names(),
            classes: state.classes().map(str::to_owned).collect(),
        }));
    }
}

/// Time of the next round of decisions.
enum Again {
    Now,
    After(Duration),
    AfterChange,
}

/// Claims to make and to allocate for which the last rounds had no time. They come before later ones, so that each is reached, however often something
/// changes.
#[derive(Default)]
struct Unfinished {
    steps: VecDeque<Step>,
    /// Time of the first of these rounds.
    since: Option<Instant>,
}

/// Takes the steps that are to be taken now, as far as a round has time: new objects are read after it. Returns whether there were none. Fails if none
/// could be taken.
///
/// A release makes every claim that waits be tried again, so releases wait until each has been tried, as long as [`RELEASE_DELAY_MAX`].
async fn decide(
    shared: &LocalClaimStore,
    state: &mut LocalClaimsState,
    writes: &Writes,
    prepared: &dyn PreparedClaims,
    unfinished: &mut Unfinished,
) -> Result<bool, ApiError> {
    let reservations = shared.in_use(state, prepared);
    let steps = state.steps(&reservations);
    let is_done = steps.is_empty();
    let (mut releases, mut urgent, mut others) = (Vec::new(), VecDeque::new(), VecDeque::new());
    for step in steps {
        match step {
            Step::Release(claim) => releases.push(claim),
            Step::Make { .. } | Step::Name { .. } | Step::Allocate(_) => others.push_back(step),
            _ => urgent.push_back(step),
        }
    }
    unfinished.steps.retain(|step| state.is_current(step));
    if unfinished.steps.is_empty() {
        unfinished.steps = others;
    }
    let mut results = Vec::new();
    let end = Instant::now() + ROUND_MAX;
    match unfinished.since {
        Some(since) if since.elapsed() < RELEASE_DELAY_MAX => releases.clear(),
        _ => unfinished.since = None,
    }
    for releases in releases.chunks(RELEASES_AT_ONCE) {
        if Instant::now() >= end {
            break;
        }
        shared.publish(state, false);
        let reservations = shared.in_use(state, prepared);
        let releases = releases
            .iter()
            .filter(|claim| state.may_release(claim, &reservations));
        let released = join_all(releases.map(|claim| writes.release(claim))).await;
        for claim in released {
            results.push(claim.map(|claim| state.put_claim(Arc::new(claim))));
        }
    }
    for steps in [&mut urgent, &mut unfinished.steps] {
        let end = Instant::now() + ROUND_MAX;
        while Instant::now() < end {
            let Some(step) = steps.pop_front() else {
                break;
            };
            // Who waits for one of them does not wait for the others.
            shared.publish(state, false);
            // One that cannot be taken, such as a claim of a template that was just deleted, holds up no other.
            results.push(writes.take(step, state).await);
        }
    }
    if unfinished.steps.is_empty() {
        unfinished.since = None;
    } else {
        unfinished.since.get_or_insert_with(Instant::now);
    }
    let is_taken = results.iter().any(Result::is_ok);
    let failed = results.into_iter().find_map(Result::err);
    failed.filter(|_| !is_taken).map_or(Ok(is_done), Err)
}

impl View {
    /// The claims that are not allocated, in the order in which they are tried, and why.
    fn refusals(&self) -> impl Iterator<Item = (&Key, &Arc<NotAllocated>)> {
        self.refused.iter().map(|((.., key), why)| (key, why))
    }

    /// Claims with annotations.
    fn annotated(&self) -> impl Iterator<Item = (&Key, &Arc<ResourceClaim>)> {
        self.claims
            .iter()
            .filter(|(_, claim)| !claim.annotations().is_empty())
    }
}
