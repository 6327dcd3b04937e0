//! Events on claims, pods and the node: why something was refused, where people look for it.
//!
//! Given what happened (`Events`), from anywhere and at any rate. Emits events of the core API as other node agents write them: the same
//! told again raises the count of the event that stands. What cannot be written for minutes is dropped and counted; nothing waits for it.

mod ledger;
mod node;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};
use tokio::sync::{Notify, watch};
use tokio::time::{Duration, Instant, sleep_until};

use self::ledger::{Ledger, Next, Write};
pub use self::node::follow;
use super::exchange::{Exchange, Refusal, Request, Subject, Verb};
use super::facts::NodeFacts;
use nodedock_base::backoff::Backoff;
use nodedock_base::clock::now_ms;
use nodedock_base::conditions::Conditions;
use nodedock_base::error::chain;
use nodedock_base::printable::{cut, one_line};
use nodedock_base::tasks::Tasks;
use nodedock_model::{Consumer, ObjectName, ObjectRef, Problem, limit};

const FORBIDDEN: &str = "events-forbidden";
const REPORTER: &str = "nodedock";

/// The object that an event is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum About {
    Claim(ObjectRef),
    Pod(ObjectRef),
    /// This node.
    Node,
}

impl About {
    /// Events of objects without a namespace are in `default`.
    fn namespace(&self) -> &str {
        match self {
            Self::Claim(object) | Self::Pod(object) => object.namespace.as_str(),
            Self::Node => "default",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Normal,
    Warning,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    pub about: About,
    pub kind: Kind,
    /// CamelCase.
    pub reason: String,
    /// One line of at most 1,024 bytes.
    pub message: String,
}

/// Events written, and those that were not.
#[derive(Debug, Default)]
pub struct EventCounts {
    pub created: AtomicU64,
    /// Counts of events that stand.
    pub updated: AtomicU64,
    pub refused: AtomicU64,
}

/// Handle to the writer of events. Telling never waits.
#[derive(Clone)]
pub struct Events {
    shared: Arc<Shared>,
}

struct Shared {
    ledger: Mutex<Ledger>,
    news: Notify,
    counts: EventCounts,
}

impl Events {
    /// Starts the task that writes. `node`: what is known of this node's object.
    pub fn start(
        tasks: &Tasks,
        api: Arc<dyn Exchange>,
        node_name: ObjectName,
        node: watch::Receiver<Option<NodeFacts>>,
        conditions: Conditions,
    ) -> Self {
        let ledger = Mutex::new(Ledger::new(Instant::now()));
        let shared = Arc::new(Shared { ledger, news: Notify::new(), counts: EventCounts::default() });
        let writer = Writer { api, node_name, node, conditions, shared: Arc::clone(&shared) };
        let stop = tasks.clone();
        tasks.spawn("events", async move { writer.run(&stop).await });
        Self { shared }
    }

    pub fn tell(&self, told: Told) {
        self.shared.ledger().tell(told, Instant::now(), now_ms());
        self.shared.news.notify_one();
    }

    /// A claim was refused: said on it and on the pods for which it is reserved.
    pub fn refused(&self, claim: &ObjectRef, consumers: &[Consumer], problem: &Problem) {
        let pods = consumers.iter().filter(|consumer| consumer.is_pod()).take(limit::EVENT_PODS_MAX);
        let pod = |pod: &Consumer| ObjectRef {
            namespace: claim.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
        };
        let reason = camel_case(&problem.code);
        let message = message(&problem.message);
        let tell = |about, message: String| {
            self.tell(Told { about, kind: Kind::Warning, reason: reason.clone(), message });
        };
        for pod in pods.map(pod) {
            tell(About::Pod(pod), self::message(&format!("claim {}: {message}", claim.name)));
        }
        tell(About::Claim(claim.clone()), message);
    }

    pub fn counts(&self) -> &EventCounts {
        &self.shared.counts
    }

    /// Events that were never written: there was no room, or the API server was away for too long.
    pub fn dropped(&self) -> u64 {
        self.shared.ledger().dropped()
    }
}

impl Shared {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn message(text: &str) -> String {
    one_line(text, limit::EVENT_MESSAGE_BYTES_MAX - "…".len())
}

/// Words with dashes as one word, such as Kubernetes' reasons are; fit for a reason whatever the words are.
pub fn camel_case(words: &str) -> String {
    let parts = words.split(|c: char| !c.is_ascii_alphanumeric()).filter(|part| !part.is_empty());
    let mut word = String::new();
    for part in parts {
        word.push_str(&part[..1].to_ascii_uppercase());
        word.push_str(&part[1..]);
    }
    if !word.starts_with(|c: char| c.is_ascii_alphabetic()) {
        word = if word.is_empty() { "Unspecified".to_owned() } else { format!("Reason{word}") };
    }
    cut(&word, limit::EVENT_REASON_BYTES_MAX)
}

/// What became of a write.
enum Outcome {
    Done,
    Later(String, Option<Duration>),
}

struct Writer {
    api: Arc<dyn Exchange>,
    node_name: ObjectName,
    node: watch::Receiver<Option<NodeFacts>>,
    conditions: Conditions,
    shared: Arc<Shared>,
}

impl Writer {
    async fn run(&self, tasks: &Tasks) {
        let mut backoff = Backoff::new(limit::KUBE_RETRY_MIN, limit::KUBE_RETRY_MAX);
        let mut said = false;
        loop {
            let next = self.shared.ledger().next(Instant::now());
            let write = match next {
                Next::Write(write) => write,
                Next::Idle(until) => {
                    self.tell_what_is_over();
                    tokio::select! {
                        () = tasks.stopped() => return,
                        // What is told in between is kept as a permit.
                        () = self.shared.news.notified() => {}
                        () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => {}
                    }
                    continue;
                }
            };
            let outcome = tokio::select! {
                // An event that is lost now is told again when it happens again.
                () = tasks.stopped() => return,
                outcome = self.write(&write) => outcome,
            };
            let delay = match outcome {
                Outcome::Done => {
                    backoff.reset();
                    said = false;
                    continue;
                }
                Outcome::Later(why, wanted) => {
                    if !std::mem::replace(&mut said, true) {
                        tracing::warn!(why, "events wait to be written");
                    }
                    backoff.delay().max(wanted.unwrap_or_default().min(limit::KUBE_RETRY_MAX))
                }
            };
            let until = Instant::now() + delay;
            tokio::select! {
                () = tasks.stopped() => return,
                () = sleep_until(until) => {}
            }
        }
    }

    /// Where nothing waits any more, or something was written, nothing is known to be forbidden.
    fn tell_what_is_over(&self) {
        let ledger = self.shared.ledger();
        self.conditions.retain(FORBIDDEN, |namespace| ledger.is_held_back(namespace));
    }

    async fn write(&self, write: &Write) -> Outcome {
        let name = write.name.as_ref().or(write.tried.as_ref());
        let name = name.cloned().unwrap_or_else(|| event_name(self.object_name(&write.about)));
        let done = match &write.name {
            Some(name) => self.update(write, name).await,
            None => self.create(write, &name).await,
        };
        let counts = &self.shared.counts;
        let mut ledger = self.shared.ledger();
        match done {
            Ok(()) => {
                let count = if write.name.is_some() { &counts.updated } else { &counts.created };
                count.fetch_add(1, Relaxed);
                ledger.written(write, name, Instant::now());
            }
            Err(Refusal::Away(away)) => {
                if write.name.is_none() {
                    ledger.tried(write, name);
                }
                return Outcome::Later(away.why, away.retry_after);
            }
            Err(Refusal::Forbidden(words)) => {
                let namespace = write.about.namespace();
                ledger.forbidden(write, Instant::now());
                let words = format!("events cannot be written into namespace {namespace}: {words}");
                self.conditions.set(namespace, Problem::denied(FORBIDDEN, words));
            }
            Err(Refusal::Missing) if write.name.is_some() => ledger.gone(write),
            Err(refused) => {
                counts.refused.fetch_add(1, Relaxed);
                let reason = write.reason.as_str();
                tracing::warn!(about = ?write.about, reason, error = chain(&refused), "an event is not taken");
                ledger.refused(write);
            }
        }
        Outcome::Done
    }

    async fn create(&self, write: &Write, name: &str) -> Result<(), Refusal> {
        let namespace = write.about.namespace();
        let event = json!({
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": self.object(&write.about),
            "reason": write.reason,
            "message": write.message,
            "type": match write.kind {
                Kind::Normal => "Normal",
                Kind::Warning => "Warning",
            },
            "source": {"component": REPORTER, "host": self.node_name},
            "reportingComponent": REPORTER,
            "reportingInstance": self.node_name,
            "firstTimestamp": time(write.first_ms),
            "lastTimestamp": time(write.last_ms),
            "count": write.count,
        });
        let path = format!("/api/v1/namespaces/{namespace}/events");
        let post = Request::with(Verb::Post, path, event.to_string().into_bytes());
        match self.api.exchange(post).await?.object(subject(name)) {
            // Its answer was lost when it was written first, and more may have been told since.
            Err(Refusal::Exists) => self.update(write, name).await,
            other => other.map(drop),
        }
    }

    async fn update(&self, write: &Write, name: &str) -> Result<(), Refusal> {
        let path = format!("/api/v1/namespaces/{}/events/{name}", write.about.namespace());
        let patch = json!({"count": write.count, "lastTimestamp": time(write.last_ms)});
        let patch = Request::with(Verb::MergePatch, path, patch.to_string().into_bytes());
        self.api.exchange(patch).await?.object(subject(name)).map(drop)
    }

    fn object_name<'a>(&'a self, about: &'a About) -> &'a str {
        match about {
            About::Claim(object) | About::Pod(object) => object.name.as_str(),
            About::Node => self.node_name.as_str(),
        }
    }

    fn object(&self, about: &About) -> Value {
        let of = |api: &str, kind: &str, object: &ObjectRef| json!({"apiVersion": api, "kind": kind, "namespace": object.namespace, "name": object.name, "uid": object.uid});
        match about {
            About::Claim(claim) => of(&self.api.resource_api(), "ResourceClaim", claim),
            About::Pod(pod) => of("v1", "Pod", pod),
            About::Node => {
                // A kubelet gives the node's name where it has no UID, and tools look for both.
                let uid = self
                    .node
                    .borrow()
                    .as_ref()
                    .map_or(self.node_name.to_string(), |node| node.uid.to_string());
                json!({"apiVersion": "v1", "kind": "Node", "name": self.node_name, "uid": uid})
            }
        }
    }
}

fn subject(name: &str) -> Subject<'_> {
    Subject { group: "", resource: "events", kind: "Event", name }
}

/// A name that nobody else has, so that a write whose answer was lost can be told from another.
fn event_name(object: &str) -> String {
    let id = uuid::Uuid::new_v4().simple().to_string();
    let object = cut(object, limit::EVENT_NAME_PREFIX_BYTES_MAX);
    format!("{}.{}", object.trim_end_matches(|c: char| !c.is_ascii_alphanumeric()), &id[..16])
}

/// Kubernetes' times have seconds.
fn time(ms: u64) -> String {
    let seconds = i64::try_from(ms / 1000).unwrap_or(0);
    jiff::Timestamp::from_second(seconds).unwrap_or_default().to_string()
}
