//! Claims from the API server: a live get for what is new to this node, and a watch of each claim that the node holds for a while.
//!
//! No selector gives the claims of a node, so each is watched by its name, within a bound (`docs/decisions/0008`). A claim that is
//! watched and has the wanted UID is answered from the cache. While the API server is unreachable, so is the last state of a claim that
//! the node holds or read lately: an allocation does not change while the claim is in use. Whether a claim may be prepared is
//! decided by the claim manager.

mod cache;
mod convert;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use async_trait::async_trait;
use futures::{Stream, StreamExt};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::ResourceExt;
use kube::api::DynamicObject;
use kube::runtime::watcher::Event;
use parking_lot::{Mutex, MutexGuard};
use prometheus_client::metrics::counter::Counter;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use self::cache::{CachedClaim, ClaimCache, Key};
use self::convert::ReadClaim;
use super::client::{ApiError, DraResource, ErrorKind, KubeClient, Urgency};
use crate::pools::NodePools;
use nodedock_base::conditions::Conditions;
use nodedock_base::locks::Locks;
use nodedock_base::tasks::Tasks;
use nodedock_core::manager::claims::source::ClaimSource;
use nodedock_model::{Claim, DriverName, ObjectName, Problem, ProblemCode, Uid};

/// A claim that is held for so long is watched, and one that is not held is forgotten so long after it was read: claims of most short
/// pods cost one get.
const CLAIM_FOLLOW_AFTER: Duration = Duration::from_secs(60);

/// Cached claims, watched or not: more than a node's pods use.
const KNOWN_CLAIMS_MAX: usize = 256;

/// Handle to the claims of the API server.
#[derive(Clone)]
pub struct ApiClaims(Arc<ClaimReflector>);

struct ClaimReflector {
    client: KubeClient,
    pools: NodePools,
    tasks: Tasks,
    cache: Mutex<ClaimCache>,
    /// One live get of a claim at a time.
    getting: Locks<Key>,
    lost: watch::Sender<()>,
    counts: ApiClaimCounts,
}

/// A claim as a scheduler left it.
#[derive(Debug, Clone, PartialEq)]
pub struct ScheduledClaim {
    /// Claim with the drivers' own names of pools.
    pub claim: Claim,
    /// Time of the allocation, in milliseconds since the Unix epoch; 0: the API server does not say it.
    pub allocated_ms: u64,
    /// Drivers of files here with devices of this node for whose conditions a scheduler waits.
    pub awaited: BTreeSet<DriverName>,
}

/// A change of a claim somewhere in the cluster.
#[derive(Debug, Clone, PartialEq)]
pub enum ClaimEvent {
    Is(Box<Claim>),
    Gone(Uid),
    /// There are no claims but these.
    Listed(BTreeSet<Uid>),
}

/// Watches all claims of the cluster, with the names of pools that the API server has. Claims that a node could not use are left out.
pub fn watch_all(client: &KubeClient) -> impl Stream<Item = ClaimEvent> + Send + use<> {
    let events = client.watch(
        "all resource claims",
        DraResource::Claims,
        None,
        String::new(),
        None,
    );
    let mut listed = BTreeSet::new();
    // The watch has logged an error, and lists again.
    events.filter_map(move |event| {
        std::future::ready(event.ok().and_then(|event| claim_event(event, &mut listed)))
    })
}

fn claim_event(event: Event<DynamicObject>, listed: &mut BTreeSet<Uid>) -> Option<ClaimEvent> {
    match event {
        Event::Init => listed.clear(),
        Event::InitDone => return Some(ClaimEvent::Listed(std::mem::take(listed))),
        Event::Delete(object) => return uid(&object).map(ClaimEvent::Gone),
        Event::InitApply(object) => {
            listed.extend(uid(&object));
            return is(&object);
        }
        Event::Apply(object) => return is(&object),
    }
    None
}

fn uid(object: &DynamicObject) -> Option<Uid> {
    Uid::new(object.uid()?).ok()
}

fn is(object: &DynamicObject) -> Option<ClaimEvent> {
    let claim = read(object).inspect_err(|problem| tracing::warn!(%problem, "a claim is left out"));
    Some(ClaimEvent::Is(Box::new(claim.ok()?.claim)))
}

/// Keeps a claim watched until it is dropped.
struct ClaimWatch {
    live: Arc<AtomicBool>,
    _end: DropGuard,
}

/// Counts of answered claims, by source.
#[derive(Debug, Default)]
pub struct ApiClaimCounts {
    pub from_cache: Counter,
    /// Claims answered by a live get.
    pub from_server: Counter,
    /// Claims answered from the cache, because the API server was unreachable.
    pub while_unreachable: Counter,
}

impl ApiClaims {
    /// Sets a condition of the node while the API server is unreachable.
    pub fn new(client: KubeClient, pools: NodePools, conditions: Conditions, tasks: Tasks) -> Self {
        client.report_reachability(conditions, &tasks);
        client.keep_ready(&tasks);
        let shared = Arc::new(ClaimReflector {
            client,
            pools,
            tasks: tasks.clone(),
            cache: Mutex::default(),
            getting: Locks::default(),
            lost: watch::Sender::new(()),
            counts: ApiClaimCounts::default(),
        });
        // The cache does not outlive the process.
        tasks.spawn_until_stopped("api-claims", age(shared.clone()));
        Self(shared)
    }

    /// Takes whether this node holds claims, by UID: those that it holds stay in the cache, and those that were held and are not any more
    /// leave it, since they may be allocated again. `is_all`: it holds no others.
    pub fn hold(&self, is_all: bool, claims: impl IntoIterator<Item = (Uid, bool)>) {
        self.0.cache().hold(is_all, claims, Instant::now());
        self.0.watch_more();
    }

    /// Changes when a watched claim is deleted, replaced under its name, or not allocated any more.
    pub fn lost(&self) -> watch::Receiver<()> {
        self.0.lost.subscribe()
    }

    pub fn counts(&self) -> &ApiClaimCounts {
        &self.0.counts
    }

    /// Returns the numbers of claims in the cache, and of those that are watched.
    pub fn cached(&self) -> [usize; 2] {
        let cache = self.0.cache();
        [cache.len(), cache.watched()]
    }

    /// The claim of that name and UID, or the one that has the name now. A watched one is answered without a request.
    async fn with_uid(&self, key: &Key, uid: &Uid) -> Result<Option<Claim>, Problem> {
        let before = {
            let cache = self.0.cache();
            if let Some((claim, true)) = cache.last(key, uid) {
                self.0.counts.from_cache.inc();
                return Ok(Some(claim));
            }
            cache.updates()
        };
        // A request that waited for another's get takes its answer, if the claim is in it.
        let _getting = self.0.getting.take([key.clone()]).await;
        let updated = self.0.cache().updated_after(before, key, uid);
        match updated {
            Some(claim) => return Ok(Some(claim)),
            // A pod that uses the claim does not wait for a server that was unreachable a moment ago.
            None if self.0.client.is_unreachable() => {
                if let Some(claim) = self.last_state(key, uid) {
                    return Ok(Some(claim));
                }
            }
            None => {}
        }
        self.get(key, Some(uid)).await
    }

    /// The claim that has the name now, always by a live get, and what of it a scheduler waits for.
    pub async fn scheduled(
        &self,
        namespace: &ObjectName,
        name: &ObjectName,
    ) -> Result<Option<ScheduledClaim>, Problem> {
        let key = (namespace.clone(), name.clone());
        // A kubelet's requests come first.
        let read = match self.read_claim(&key, Urgency::Usual).await {
            Ok(read) => read,
            Err(error) if error.kind == ErrorKind::NotFound => {
                self.0.remove(&key);
                return Ok(None);
            }
            Err(error) => return Err(about(&key, error.problem())),
        };
        let ReadClaim {
            state,
            allocated_ms,
        } = read.map_err(|problem| about(&key, problem))?;
        self.0.update(&key, state.clone());
        let (pools, claim) = (&self.0.pools, state.claim);
        let devices = claim
            .allocation
            .iter()
            .flat_map(|allocation| &allocation.devices);
        let awaited =
            devices.filter(|device| !device.binding.is_empty() && pools.has_device(device));
        let awaited: BTreeSet<_> = awaited.map(|device| device.driver.clone()).collect();
        // A kubelet requests it as soon as its pod is bound.
        if !awaited.is_empty() {
            self.0.await_request(&key);
        }
        Ok(Some(ScheduledClaim {
            awaited,
            allocated_ms,
            claim: pools.localized(claim),
        }))
    }

    /// Reads a claim at the server. The inner error is about the claim.
    async fn read_claim(
        &self,
        key: &Key,
        urgency: Urgency,
    ) -> Result<Result<ReadClaim, Problem>, ApiError> {
        self.0.counts.from_server.inc();
        let client = &self.0.client;
        let got = client.versioned(|version| {
            let (client, path) = (client.clone(), version.claim_path(&key.0, &key.1));
            async move { client.read(urgency, &path).await }
        });
        convert::of_text(&got.await?).map_err(|error| kube::Error::SerdeError(error).into())
    }

    async fn get(&self, key: &Key, uid: Option<&Uid>) -> Result<Option<Claim>, Problem> {
        match self.read_claim(key, Urgency::Urgent).await {
            Ok(read) => {
                let read = read.map_err(|problem| about(key, problem))?;
                self.0.update(key, read.state.clone());
                Ok(Some(read.state.claim))
            }
            Err(error) if error.kind == ErrorKind::NotFound => {
                self.0.remove(key);
                Ok(None)
            }
            Err(error) => {
                let cached = uid
                    .filter(|_| is_cache_valid(&error))
                    .and_then(|uid| self.last_state(key, uid));
                cached.ok_or_else(|| about(key, error.problem())).map(Some)
            }
        }
    }

    /// The cached claim, where the API server does not answer.
    fn last_state(&self, key: &Key, uid: &Uid) -> Option<Claim> {
        let claim = self.0.cache().recall(key, uid)?;
        self.0.watch_more();
        tracing::debug!(claim = %claim.id, "answered a claim from the cache");
        self.0.counts.while_unreachable.inc();
        Some(claim)
    }
}

/// Claims have the drivers' own names of pools.
#[async_trait]
impl ClaimSource for ApiClaims {
    /// Always a live get: for whom a claim is reserved may have changed a moment ago.
    async fn claim(
        &self,
        namespace: &ObjectName,
        name: &ObjectName,
    ) -> Result<Option<Claim>, Problem> {
        let got = self.get(&(namespace.clone(), name.clone()), None).await?;
        Ok(got.map(|claim| self.0.pools.localized(claim)))
    }

    async fn claim_with_uid(
        &self,
        namespace: &ObjectName,
        name: &ObjectName,
        uid: &Uid,
    ) -> Result<Option<Claim>, Problem> {
        let found = self
            .with_uid(&(namespace.clone(), name.clone()), uid)
            .await?;
        Ok(found.map(|claim| self.0.pools.localized(claim)))
    }
}

impl ClaimReflector {
    fn cache(&self) -> MutexGuard<'_, ClaimCache> {
        self.cache.lock()
    }

    /// Takes the state of a claim from a get or a watch.
    fn update(self: &Arc<Self>, key: &Key, state: CachedClaim) {
        let lost = self
            .cache()
            .update(key, state, self.pools.names.node.as_str(), Instant::now());
        self.report_lost(lost);
        self.watch_more();
    }

    /// Opens watches that are due, as far as the bound allows.
    fn watch_more(self: &Arc<Self>) {
        let mut cache = self.cache();
        while let Some((key, version)) = cache.to_watch(Instant::now()) {
            let watch = self.watch(&key, version);
            cache.watched_by(&key, watch);
        }
    }

    fn watch(self: &Arc<Self>, key: &Key, version: Option<u64>) -> ClaimWatch {
        let fields = format!("metadata.name={}", key.1);
        let (namespace, since) = (
            Some(key.0.clone()),
            version.map(|version| version.to_string()),
        );
        let events = self
            .client
            .watch("a claim", DraResource::Claims, namespace, fields, since);
        let (live, end) = (Arc::new(AtomicBool::new(false)), CancellationToken::new());
        let follow = follow(Arc::clone(self), key.clone(), events, Arc::clone(&live));
        let ended = end.clone();
        // The next watch of the claim begins with its state.
        self.tasks.spawn_until_stopped("claim-watch", async move {
            ended.run_until_cancelled(follow).await;
        });
        ClaimWatch {
            live,
            _end: end.drop_guard(),
        }
    }

    /// Watches a claim that a kubelet is about to request: it is answered without a request then.
    fn await_request(self: &Arc<Self>, key: &Key) {
        self.cache().expect_request(key);
        self.watch_more();
    }

    fn report_lost(&self, is_lost: bool) {
        if is_lost {
            self.lost.send_replace(());
        }
    }

    /// Takes what a watch reports of a claim.
    fn observe(self: &Arc<Self>, key: &Key, object: &DynamicObject) {
        match read(object) {
            Ok(state) => self.update(key, state),
            // A claim that cannot be read is not answered from the cache: the get reports what is wrong with it.
            Err(_) => self.cache().invalidate(key),
        }
    }

    /// The claim does not exist.
    fn remove(&self, key: &Key) {
        let lost = self.cache().remove(key);
        self.report_lost(lost);
    }
}

/// Brings what a watch of one claim reports into the cache, which owns the watch.
async fn follow(
    shared: Arc<ClaimReflector>,
    key: Key,
    events: impl Stream<Item = Result<Event<DynamicObject>, ApiError>>,
    live: Arc<AtomicBool>,
) {
    tokio::pin!(events);
    // Without a list the claim is as it was read.
    let mut is_listed = true;
    while let Some(event) = events.next().await {
        match event {
            Err(_) => live.store(false, Relaxed),
            Ok(Event::Init) => is_listed = false,
            Ok(Event::InitApply(object) | Event::Apply(object)) if is_of(&object, &key) => {
                shared.observe(&key, &object);
                is_listed = true;
            }
            Ok(Event::InitDone) => {
                if !is_listed {
                    shared.remove(&key);
                }
                live.store(true, Relaxed);
            }
            Ok(Event::Delete(object)) if is_of(&object, &key) => {
                let lost = shared.cache().deleted(&key, object.metadata.uid.as_deref());
                shared.report_lost(lost);
            }
            // A server that does not know the selector gives others too.
            Ok(Event::InitApply(_) | Event::Apply(_) | Event::Delete(_)) => {}
        }
    }
}

/// Watches claims that are held for a while, and forgets those that are not held.
async fn age(shared: Arc<ClaimReflector>) {
    loop {
        tokio::time::sleep(CLAIM_FOLLOW_AFTER / 4).await;
        shared.cache().forget_idle(Instant::now());
        shared.watch_more();
    }
}

fn is_of(object: &DynamicObject, key: &Key) -> bool {
    let (namespace, name) = (
        object.metadata.namespace.as_deref(),
        object.metadata.name.as_deref(),
    );
    name == Some(key.1.as_str()) && namespace.is_none_or(|namespace| namespace == key.0.as_str())
}

/// Returns whether the last state of a claim is still valid after an error.
fn is_cache_valid(error: &ApiError) -> bool {
    error.kind == ErrorKind::Throttled || error.is_unreachable()
}

fn read(object: &DynamicObject) -> Result<CachedClaim, Problem> {
    let object = serde_json::to_value(object)
        .map_err(|error| Problem::invalid(ProblemCode::ClaimMalformed, error.to_string()))?;
    Ok(convert::of_value(&object)?.state)
}

/// A claim of the local API, with the drivers' own names of pools.
pub(crate) fn local(claim: &ResourceClaim, pools: &NodePools) -> Result<Claim, Problem> {
    Ok(pools.localized(convert::of_typed(claim)?))
}

/// The problem with the claim's name in front, once.
fn about(key: &Key, mut problem: Problem) -> Problem {
    let name = format!("{}/{}", key.0, key.1);
    if !problem.message.contains(&name) {
        problem.message = format!("claim {name}: {}", problem.message);
    }
    problem
}
