//! Events on claims, pods and the node: why something was refused or a device cannot be used, where people look for it.
//!
//! Given what happened, from any task and at any rate, it publishes events of `events.k8s.io/v1`; the recorder counts the same event of
//! an object in a series. Nothing waits for an event: one that cannot be published for minutes is dropped and counted.

mod devices;
mod node;
mod recorder;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType};
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until};

pub use self::devices::on_unhealthy;
pub use self::node::publish_conditions;
pub(crate) use self::recorder::EventWriter;
use self::recorder::Recorder;
use super::client::{ApiError, DraResource, DraVersion, ErrorKind, KubeClient, Verb};
use super::facts::NodeFacts;
use nodedock_base::backoff::Backoff;
use nodedock_base::conditions::Conditions;
use nodedock_base::printable::{cut, one_line};
use nodedock_base::rate::TokenBucket;
use nodedock_base::tasks::Tasks;
use nodedock_model::{Consumer, ObjectName, ObjectRef, Problem, ProblemCode, Uid, limit};

/// Reason and note of an event (`events.k8s.io/v1`).
const EVENT_REASON_BYTES_MAX: usize = 128;
pub(crate) const EVENT_MESSAGE_BYTES_MAX: usize = 1024;

/// Pods of a refused claim that get an event.
const EVENT_PODS_MAX: usize = 8;

/// Burst of events, and the interval of further ones: a kubelet retries the claims of all pods of the node in the same steps.
const EVENTS_BURST: u32 = 50;
const EVENTS_EVERY: Duration = Duration::from_secs(2);

/// The same for events about unhealthy devices, of which a node has thousands: most of the rate is left to refusals.
const DEVICE_EVENTS_BURST: u32 = 10;
const DEVICE_EVENTS_EVERY: Duration = Duration::from_secs(6);

/// An event that waits for longer is dropped.
const EVENT_AGE_MAX: Duration = Duration::from_secs(600);

/// Events that wait to be published.
const EVENTS_MAX: usize = 512;

/// Delay of a retry after 403: an operator must change a role first.
pub(crate) const KUBE_FORBIDDEN_PAUSE: Duration = Duration::from_secs(300);

const NODE_NAMESPACE: &str = "default";

/// A request of a kubelet, or a status, that was refused.
#[derive(Debug, Clone, Copy)]
pub struct Refusal<'a> {
    /// `Prepare`, `Unprepare` or `Report`.
    pub action: &'static str,
    pub claim: &'a ObjectRef,
    /// Consumers for which the claim is reserved.
    pub consumers: &'a [Consumer],
    pub problem: &'a Problem,
}

/// Called with what is refused.
pub type OnRefused = Arc<dyn Fn(&Refusal<'_>) + Send + Sync>;

/// An event that waits to be published.
struct Publication {
    /// Object of the event, without the fields that may change until it is published: the version of a claim, and the UID of the node.
    regarding: ObjectReference,
    event: Event,
    since: Instant,
}

#[derive(Default)]
struct Counters {
    refused: Counter,
    /// Never published: the queue was full, there were too many of devices, or the API server could not be reached or forbade it for
    /// too long.
    dropped: Counter,
}

/// Handle to the task that publishes events.
#[derive(Clone)]
pub struct Events {
    queue: mpsc::Sender<Publication>,
    kube: KubeClient,
    node_name: ObjectName,
    counters: Arc<Counters>,
    device_tokens: Arc<Mutex<TokenBucket>>,
}

impl Events {
    /// Starts the task that publishes. `node` is this node's object.
    pub fn start(
        tasks: &Tasks,
        kube: KubeClient,
        node_name: ObjectName,
        node: watch::Receiver<Option<NodeFacts>>,
        conditions: Conditions,
    ) -> Self {
        let (queue, waiting) = mpsc::channel(EVENTS_MAX);
        let device_tokens = bucket(DEVICE_EVENTS_EVERY, DEVICE_EVENTS_BURST);
        let (counters, device_tokens) = (Arc::default(), Arc::new(Mutex::new(device_tokens)));
        let events = Self {
            queue,
            kube,
            node_name,
            counters,
            device_tokens,
        };
        let publisher = Publisher {
            recorder: events.recorder(),
            events: events.clone(),
            node,
            conditions,
            tokens: bucket(EVENTS_EVERY, EVENTS_BURST),
            backoff: Backoff::new(limit::KUBE_RETRY_MIN, limit::KUBE_RETRY_MAX),
            forbidden: BTreeMap::new(),
        };
        tasks.spawn_until_stopped("events", publisher.run(waiting));
        events
    }

    fn node(&self) -> ObjectReference {
        reference("Node", None, &self.node_name, None)
    }

    fn recorder(&self) -> Recorder {
        Recorder::new(EventWriter::new(self.kube.client(), &self.node_name))
    }

    /// Publishes that a claim was refused, on the claim and on the pods that it is reserved for.
    pub fn refused(&self, refusal: &Refusal<'_>) {
        let Refusal {
            action,
            claim,
            consumers,
            problem,
        } = *refusal;
        let reason = camel_case(&problem.code);
        let event = |note: String, secondary| warning(&reason, action, note, secondary);
        let pods = consumers
            .iter()
            .filter(|consumer| consumer.is_pod())
            .take(EVENT_PODS_MAX);
        for pod in pods {
            let note = format!("claim {}: {}", claim.name, problem.message);
            // The recorder tells events of a pod's claims apart by the related object.
            self.publish(
                of_pod(&claim.namespace, pod),
                event(note, Some(of_claim(claim))),
            );
        }
        self.publish(of_claim(claim), event(problem.message.clone(), None));
    }

    /// Never waits: an event for which the queue has no room is dropped.
    fn publish(&self, regarding: ObjectReference, event: Event) {
        let note = event
            .note
            .map(|note| one_line(&note, EVENT_MESSAGE_BYTES_MAX));
        let event = Event { note, ..event };
        if self
            .queue
            .try_send(Publication {
                regarding,
                event,
                since: Instant::now(),
            })
            .is_err()
        {
            self.counters.dropped.inc();
        }
    }

    /// Returns the numbers of events since the start by their outcome; updated are those that were counted in an existing series.
    pub fn counts(&self) -> [(&'static str, u64); 4] {
        let (requests, counters) = (self.kube.metrics(), &self.counters);
        [
            ("created", requests.succeeded(Verb::Create, "events")),
            ("updated", requests.succeeded(Verb::Patch, "events")),
            ("refused", counters.refused.get()),
            ("dropped", counters.dropped.get()),
        ]
    }
}

fn bucket(every: Duration, burst: u32) -> TokenBucket {
    TokenBucket::full(every.as_secs_f64().recip(), burst, Instant::now())
}

pub(crate) fn warning(
    reason: &str,
    action: &str,
    note: String,
    related: Option<ObjectReference>,
) -> Event {
    let (reason, action, note) = (reason.to_owned(), action.to_owned(), Some(note));
    Event {
        type_: EventType::Warning,
        reason,
        note,
        action,
        secondary: related,
    }
}

pub(crate) fn reference(
    kind: &str,
    namespace: Option<&ObjectName>,
    name: &ObjectName,
    uid: Option<&Uid>,
) -> ObjectReference {
    ObjectReference {
        kind: Some(kind.to_owned()),
        namespace: namespace.map(ToString::to_string),
        name: Some(name.to_string()),
        uid: uid.map(ToString::to_string),
        ..ObjectReference::default()
    }
}

pub(crate) fn of_claim(claim: &ObjectRef) -> ObjectReference {
    reference(
        "ResourceClaim",
        Some(&claim.namespace),
        &claim.name,
        Some(&claim.uid),
    )
}

fn of_pod(namespace: &ObjectName, pod: &Consumer) -> ObjectReference {
    reference("Pod", Some(namespace), &pod.name, Some(&pod.uid))
}

/// Returns a reference to the related item of an event, where that is not an object of the API.
fn named(name: String) -> ObjectReference {
    ObjectReference {
        name: Some(name),
        ..ObjectReference::default()
    }
}

fn is_node(object: &ObjectReference) -> bool {
    object.kind.as_deref() == Some("Node")
}

fn namespace(object: &ObjectReference) -> &str {
    object.namespace.as_deref().unwrap_or(NODE_NAMESPACE)
}

/// Converts any words with dashes to a reason in Kubernetes' form.
pub fn camel_case(words: &str) -> String {
    let parts = words
        .split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|part| !part.is_empty());
    let mut word: String = parts
        .flat_map(|part| [part[..1].to_ascii_uppercase(), part[1..].to_owned()])
        .collect();
    if !word.starts_with(|c: char| c.is_ascii_alphabetic()) {
        word = if word.is_empty() {
            "Unspecified".to_owned()
        } else {
            format!("Reason{word}")
        };
    }
    cut(&word, EVENT_REASON_BYTES_MAX)
}

struct Publisher {
    events: Events,
    recorder: Recorder,
    node: watch::Receiver<Option<NodeFacts>>,
    conditions: Conditions,
    tokens: TokenBucket,
    backoff: Backoff,
    /// Namespaces in which events are forbidden, with the time of the next try and its event.
    forbidden: BTreeMap<String, (Instant, Publication)>,
}

impl Publisher {
    async fn run(mut self, mut waiting: mpsc::Receiver<Publication>) {
        loop {
            let retry = self
                .forbidden
                .iter()
                .map(|(namespace, (at, _))| (*at, namespace.clone()))
                .min();
            let retry_at = retry.as_ref().map_or_else(Instant::now, |(at, _)| *at);
            tokio::select! {
                () = sleep_until(retry_at), if retry.is_some() => {
                    let held = retry.and_then(|(_, namespace)| self.forbidden.remove(&namespace));
                    if let Some((_, publication)) = held {
                        self.publish(publication).await;
                    }
                }
                // The sender is in `self`.
                Some(publication) = waiting.recv() => {
                    if self.forbidden.contains_key(namespace(&publication.regarding)) {
                        self.drop_one();
                    } else {
                        self.publish(publication).await;
                    }
                }
            }
        }
    }

    /// Publishes one event, again until the API server answers or the event is too old.
    async fn publish(&mut self, publication: Publication) {
        let regarding = self.completed(&publication.regarding).await;
        let namespace = namespace(&publication.regarding);
        while publication.since.elapsed() < EVENT_AGE_MAX {
            while let Err(wait) = self.tokens.take(Instant::now(), 0) {
                sleep(wait).await;
            }
            let published = self.recorder.publish(&publication.event, &regarding).await;
            match published.map_err(ApiError::from) {
                Ok(()) => {
                    self.backoff.reset();
                    return self
                        .conditions
                        .clear(ProblemCode::EventsForbidden, namespace);
                }
                Err(error) if error.is_retryable() => {
                    tracing::debug!(%error, "events wait to be published");
                    let wanted = error.retry_after.unwrap_or_default();
                    sleep(self.backoff.delay().max(wanted.min(limit::KUBE_RETRY_MAX))).await;
                }
                // The event of the series expired; a new recorder does not know it and creates another.
                Err(error) if error.kind == ErrorKind::NotFound && error.object.is_some() => {
                    self.recorder = self.events.recorder();
                }
                Err(error) if error.kind == ErrorKind::Forbidden => {
                    let message =
                        format!("events cannot be created in namespace {namespace}: {error}");
                    self.conditions.set(
                        namespace,
                        Problem::denied(ProblemCode::EventsForbidden, message),
                    );
                    let retry_at = Instant::now() + KUBE_FORBIDDEN_PAUSE;
                    self.forbidden
                        .insert(namespace.to_owned(), (retry_at, publication));
                    return;
                }
                Err(error) => {
                    let ObjectReference { kind, name, .. } = &publication.regarding;
                    let (kind, name) = (kind.as_deref(), name.as_deref());
                    let reason = &publication.event.reason;
                    tracing::warn!(kind, namespace, name, reason, %error, "the API server refuses an event");
                    self.events.counters.refused.inc();
                    return self
                        .conditions
                        .clear(ProblemCode::EventsForbidden, namespace);
                }
            }
        }
        self.drop_one();
        self.conditions
            .clear(ProblemCode::EventsForbidden, namespace);
    }

    fn drop_one(&self) {
        self.events.counters.dropped.inc();
    }

    async fn completed(&self, regarding: &ObjectReference) -> ObjectReference {
        let mut regarding = regarding.clone();
        let api_version = match regarding.kind.as_deref() {
            Some("ResourceClaim") => {
                let version = self
                    .events
                    .kube
                    .dra_version()
                    .await
                    .unwrap_or(DraVersion::V1);
                version.resource(DraResource::Claims).api_version
            }
            _ => "v1".to_owned(),
        };
        regarding.api_version = Some(api_version);
        if is_node(&regarding) {
            // A kubelet gives the node's name where it does not know the UID, and tools look for both.
            let node = self.node.borrow();
            regarding.uid = node
                .as_ref()
                .map(|node| node.uid.to_string())
                .or(regarding.name.clone());
        }
        regarding
    }
}
