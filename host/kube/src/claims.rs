//! Claims from the API server: a live get for what is new to this node, and a watch of each claim that it has to do with.
//!
//! Nothing selects the claims of a node, so each is followed by its name, within a bound (`docs/decisions/0008`). A claim that is
//! followed and has the wanted UID is answered from memory. While the API server is away so is the last word on a claim that the node
//! holds or was asked for lately: an allocation does not change while somebody uses it. Decides nothing about claims: whether one may
//! be prepared is for the claim manager.

mod convert;
mod known;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use async_trait::async_trait;
use serde_json::Value;
use tokio::sync::broadcast;
use tokio::time::Instant;

use super::api::{Api, ApiError, Follower, Following, Path, Selection, Target};
use known::{Key, Known, Word};
use nodedock_base::conditions::Conditions;
use nodedock_base::locks::Locks;
use nodedock_base::tasks::Tasks;
use nodedock_core::manager::claims::source::ClaimSource;
use nodedock_model::{Claim, ObjectName, ObjectRef, Problem, Uid, limit};

/// How far one who is told of lost claims may fall behind: more than there are claims that are known.
const LOST_BEHIND_MAX: usize = limit::KNOWN_CLAIMS_MAX * 2;

/// Handle to the claims of the API server.
#[derive(Clone)]
pub struct ApiClaims(Arc<Inner>);

struct Inner {
    api: Api,
    node_name: String,
    tasks: Tasks,
    known: Mutex<Known<Following>>,
    /// One live get of a claim at a time.
    asking: Locks<Key>,
    lost: broadcast::Sender<ObjectRef>,
    counts: Counts,
}

#[derive(Debug, Default)]
struct Counts {
    from_memory: AtomicU64,
    asked: AtomicU64,
    while_away: AtomicU64,
}

/// How claims were answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ApiClaimCounts {
    pub from_memory: u64,
    /// By a live get.
    pub asked: u64,
    /// From memory, because the API server could not be asked.
    pub while_away: u64,
    /// That are known and watched now.
    pub known: u64,
    pub followed: u64,
}

impl ApiClaims {
    /// Says as a condition of the node when the API server is away.
    pub fn new(api: Api, node_name: String, conditions: Conditions, tasks: Tasks) -> Self {
        api.tell_reach(conditions, &tasks);
        let inner = Arc::new(Inner {
            api: api.urgent(),
            node_name,
            tasks: tasks.clone(),
            known: Mutex::default(),
            asking: Locks::default(),
            lost: broadcast::Sender::new(LOST_BEHIND_MAX),
            counts: Counts::default(),
        });
        let stopped = tasks.stopped();
        let idle = Arc::downgrade(&inner);
        tasks.spawn("api-claims", async move {
            tokio::select! {
                // Nothing is kept that outlives the process.
                () = stopped => {}
                () = forget_idle(idle) => {}
            }
        });
        Self(inner)
    }

    /// The claim of that name and UID, or the one that has the name now. A known one is answered without asking.
    pub async fn claim_with_uid(
        &self,
        namespace: &ObjectName,
        name: &ObjectName,
        uid: &Uid,
    ) -> Result<Option<Claim>, Problem> {
        let key = (namespace.clone(), name.clone());
        let known = self.0.lock().fresh(&key, uid, Instant::now(), Following::is_live);
        if let Some(claim) = known {
            self.0.counts.from_memory.fetch_add(1, Relaxed);
            return Ok(Some(claim));
        }
        let words = self.0.lock().words();
        // Who waited for another's get takes its answer, if the claim is in it.
        let _asking = self.0.asking.take([key.clone()]).await;
        let learned = self.0.lock().learned_after(words, &key, uid);
        match learned {
            Some(claim) => return Ok(Some(claim)),
            // A pod that uses it is not to wait for a server that was not there a moment ago.
            None if self.0.api.is_away() => {
                if let Some(claim) = self.last_word(&key, uid) {
                    return Ok(Some(claim));
                }
            }
            None => {}
        }
        self.ask(&key, Some(uid)).await
    }

    /// The claims that this node holds, all of them: they stay known, and those that were held and are not any more are forgotten,
    /// since they may be allocated anew.
    pub fn hold(&self, held: &[ObjectRef]) {
        let mut known = self.0.lock();
        known.hold(held, Instant::now());
        drop(known);
        self.0.follow_more();
    }

    /// The claim was given up: what is known of it does not count any more.
    pub fn forget(&self, claim: &ObjectRef) {
        self.0.lock().forget(claim);
        self.0.follow_more();
    }

    /// Claims that were followed and are gone, are others of the same name, or are allocated no more. Who falls behind looks at all
    /// of its claims.
    pub fn lost(&self) -> broadcast::Receiver<ObjectRef> {
        self.0.lost.subscribe()
    }

    pub fn counts(&self) -> ApiClaimCounts {
        let known = self.0.lock();
        let counts = &self.0.counts;
        ApiClaimCounts {
            from_memory: counts.from_memory.load(Relaxed),
            asked: counts.asked.load(Relaxed),
            while_away: counts.while_away.load(Relaxed),
            known: known.len() as u64,
            followed: known.followed() as u64,
        }
    }

    /// A live get.
    async fn ask(&self, key: &Key, uid: Option<&Uid>) -> Result<Option<Claim>, Problem> {
        self.0.counts.asked.fetch_add(1, Relaxed);
        let (namespace, name) = (&key.0, &key.1);
        let got = self.0.api.versioned(|version| {
            let path = version.claim(namespace, name);
            async move { self.0.api.get(&path).await }
        });
        match got.await {
            Ok(object) => {
                let claim = convert::claim(&object).map_err(|problem| about(key, problem))?;
                self.0.learn(key, word(claim.clone(), &object));
                Ok(Some(claim))
            }
            Err(ApiError::NotFound(_)) => {
                self.0.tell_lost(self.0.lock().gone(key));
                Ok(None)
            }
            Err(error) => {
                let busy = matches!(error, ApiError::TooManyRequests { .. });
                let known = uid.filter(|_| busy || error.is_away()).and_then(|uid| self.last_word(key, uid));
                known.ok_or_else(|| about(key, error.problem())).map(Some)
            }
        }
    }

    /// What was known last, where the API server cannot be asked.
    fn last_word(&self, key: &Key, uid: &Uid) -> Option<Claim> {
        let claim = self.0.lock().last(key, uid, Instant::now())?;
        tracing::debug!(claim = %claim.id, "answered with what is known of the claim");
        self.0.counts.while_away.fetch_add(1, Relaxed);
        Some(claim)
    }
}

#[async_trait]
impl ClaimSource for ApiClaims {
    /// Always asked: whom a claim is reserved for may have changed a moment ago.
    async fn claim(&self, namespace: &ObjectName, name: &ObjectName) -> Result<Option<Claim>, Problem> {
        self.ask(&(namespace.clone(), name.clone()), None).await
    }

    async fn claim_with_uid(
        &self,
        namespace: &ObjectName,
        name: &ObjectName,
        uid: &Uid,
    ) -> Result<Option<Claim>, Problem> {
        Self::claim_with_uid(self, namespace, name, uid).await
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Known<Following>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what a get or a watch says of a claim.
    fn learn(self: &Arc<Self>, key: &Key, word: Word) {
        let lost = self.lock().learn(key, word, &self.node_name, Instant::now());
        self.tell_lost(lost);
        self.follow_more();
    }

    /// Watches what is to be watched and is not yet, as far as the bound lets it.
    fn follow_more(self: &Arc<Self>) {
        let mut known = self.lock();
        while let Some(key) = known.to_follow() {
            let following = self.follow(&key);
            known.followed_by(&key, following);
        }
    }

    fn follow(self: &Arc<Self>, key: &Key) -> Following {
        let (namespace, of) = (key.0.clone(), One { claims: Arc::downgrade(self), key: key.clone() });
        let target = Target {
            what: "a claim",
            path: Path::versioned(move |version| version.claims(&namespace)),
            selection: Selection::fields(format!("metadata.name={}", key.1)),
            resync: None,
        };
        // A watch is not what a pod waits for.
        self.api.usual().follow(&self.tasks, target, Arc::new(of))
    }

    fn tell_lost(&self, lost: Option<ObjectRef>) {
        if let Some(lost) = lost {
            // Nobody need listen.
            let _ = self.lost.send(lost);
        }
    }
}

/// What follows one claim.
struct One {
    /// What is known owns this.
    claims: Weak<Inner>,
    key: Key,
}

impl One {
    fn is_it(&self, object: &Value) -> bool {
        let meta = |field: &str| object.get("metadata").and_then(|meta| meta.get(field)?.as_str());
        meta("name") == Some(self.key.1.as_str())
            && meta("namespace").is_none_or(|namespace| namespace == self.key.0.as_str())
    }

    fn learn(&self, object: Option<&Value>) {
        let Some(claims) = self.claims.upgrade() else { return };
        let found = object.map(|object| (object, convert::claim(object)));
        match found {
            Some((object, Ok(claim))) => claims.learn(&self.key, word(claim, object)),
            // One that cannot be read is not answered from memory: the get says what is wrong with it.
            Some((_, Err(_))) => claims.lock().doubt(&self.key),
            None => {
                let lost = claims.lock().gone(&self.key);
                claims.tell_lost(lost);
            }
        }
    }
}

#[async_trait]
impl Follower for One {
    /// A server that does not know the selector would list others too.
    async fn listed(&self, objects: Vec<Value>) {
        self.learn(objects.iter().find(|object| self.is_it(object)));
    }

    async fn applied(&self, object: Value) {
        if self.is_it(&object) {
            self.learn(Some(&object));
        }
    }

    async fn deleted(&self, object: Value) {
        if self.is_it(&object) {
            let Some(claims) = self.claims.upgrade() else { return };
            let uid = object.get("metadata").and_then(|meta| meta.get("uid")?.as_str());
            let lost = claims.lock().deleted(&self.key, uid);
            claims.tell_lost(lost);
        }
    }
}

async fn forget_idle(claims: Weak<Inner>) {
    loop {
        tokio::time::sleep(limit::CLAIM_FOLLOW_IDLE / 4).await;
        let Some(claims) = claims.upgrade() else { return };
        claims.lock().forget_idle(Instant::now());
        claims.follow_more();
    }
}

fn word(claim: Claim, object: &Value) -> Word {
    let version = object.get("metadata").and_then(|meta| meta.get("resourceVersion")?.as_str());
    Word { claim, version: version.and_then(|version| version.parse().ok()) }
}

/// The problem with the claim's name in front, once.
fn about(key: &Key, mut problem: Problem) -> Problem {
    let name = format!("{}/{}", key.0, key.1);
    if !problem.message.contains(&name) {
        problem.message = format!("claim {name}: {}", problem.message);
    }
    problem
}
